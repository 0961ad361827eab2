"""What the whole card does for a user-space initiator, beside SPDK's target where SPDK_DIR is set.

    scripts/bench/card [--quick] [--rounds N] [--job NAME ...]

The initiator is the tests' driver with its compiled closed loop (tests/support/perf.py): mapped doorbell page,
polled completion queue. It runs on the last CPU and the daemon's poller on the first.

* ``jobs``: random reads and writes of one queue; dpud and SPDK's nvmf_tgt (engine "spdk") alternate within a round.
* ``idle``: CPU share of the whole daemon with a client that does nothing, doorbells trapped and mapped.
* ``scaling``: time per command (4 KiB reads, QD 32) when there are many queues, namespaces or controllers, over that
  of one; the commands go to all of them in turn, TURN to each, and the footprint is the same: FOOTPRINT, as much as
  TURN commands read. (With a larger one the same few blocks of one place would be compared with others of each of
  many, and what is found would be what a cache is worth.)

Budgets (issue 3, section 4): beside SPDK's malloc 1.5 at QD 32, 1.0 at QD 1 and with 128 KiB; null 0.5; idle 1 % when
trapped; scaling 1.3.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from emu.daemon import ControllerConfig, Dpu, DpuConfig, Engine, NamespaceConfig
from scripts.bench import common
from tests.support.nvme_driver import READ, WRITE, GuestRam, Nvme, SubmissionQueue
from tests.support.perf import Result, closed_loop

MIB = 1 << 20
SPAN = 64 * MIB
ENTRIES = 128
TURN = 512
FOOTPRINT = TURN * 4096
MAPPED: dict[str, object] = {}
"""Capabilities of SPDK's initiator, which maps its doorbells; None are QEMU's."""


@dataclass(frozen=True)
class Job:
    backend: Literal["memory", "null"]
    opcode: int
    size: int
    depth: int
    budget: float

    @property
    def name(self) -> str:
        rw = "randread" if self.opcode == READ else "randwrite"
        return f"{self.backend} {rw} {self.size >> 10}k QD{self.depth}"


JOBS = [
    Job("memory", READ, 4096, 32, 1.5),
    Job("memory", WRITE, 4096, 32, 1.5),
    Job("memory", READ, 4096, 1, 1.0),
    Job("memory", WRITE, 4096, 1, 1.0),
    Job("memory", READ, 128 << 10, 32, 1.0),
    Job("memory", WRITE, 128 << 10, 32, 1.0),
    Job("null", READ, 4096, 32, 0.5),
    Job("null", READ, 4096, 1, 0.5),
]
BY_NAME = {job.name: job for job in JOBS}
SCALING = {"16 queues": (16, 1, 1), "64 namespaces": (1, 64, 1), "8 controllers": (1, 1, 8)}
"""(queues, namespaces, controllers), each beside (1, 1, 1)."""


@contextlib.asynccontextmanager
async def card(engine: Engine, controllers: int, namespaces: int, cpu: int) -> AsyncIterator[Dpu]:
    """A daemon with its poller on ``cpu``: controllers m0..., each with memory namespaces, and n0 with a null one."""
    size = SPAN if namespaces == 1 else MIB
    memory = tuple(NamespaceConfig("memory", size) for _ in range(namespaces))
    configs = [ControllerConfig(f"m{number}", memory) for number in range(controllers)]
    configs.append(ControllerConfig("n0", (NamespaceConfig("null", 1 << 30),)))
    with tempfile.TemporaryDirectory(prefix="dpu-c-") as directory:
        place = Path(directory)
        dpu = Dpu(DpuConfig("card", tuple(configs), cpus=str(cpu), engine=engine), place, place, place)
        await dpu.start()
        try:
            await dpu.configure()
            yield dpu
        finally:
            await dpu.stop()


@contextlib.contextmanager
def initiator(dpu: Dpu, controller: str, capabilities: dict[str, object] | None = MAPPED) -> Iterator[Nvme]:
    nvme = Nvme(str(dpu.socket(controller)), GuestRam(), vectors=0, register_bytes=8, capabilities=capabilities)
    try:
        nvme.enable()
        yield nvme
    finally:
        nvme.close()


def measure(dpu: Dpu, job: Job, commands: int) -> Result:
    with initiator(dpu, "m0" if job.backend == "memory" else "n0") as nvme:
        assert nvme.doorbells is not None, "the doorbells are not mapped"
        return loop(nvme, nvme.create_queue_pair(1, ENTRIES), 1, job.opcode, job.size, job.depth, commands)


def loop(
    nvme: Nvme, queue: SubmissionQueue, nsid: int, opcode: int, size: int, depth: int, commands: int, span: int = SPAN
) -> Result:
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(everywhere)})  # of this thread, and not while a daemon is started
    try:
        return closed_loop(
            nvme,
            queue,
            nsid=nsid,
            opcode=opcode,
            depth=depth,
            commands=commands,
            transfer=size,
            span=span,
            spin=1 << 40,
        )
    finally:
        os.sched_setaffinity(0, everywhere)


async def jobs(report: common.Report, arguments: argparse.Namespace, engines: Sequence[Engine], cpu: int) -> None:
    chosen = [BY_NAME[name] for name in arguments.job]
    samples: dict[str, dict[str, list[Result]]] = {job.name: {engine: [] for engine in engines} for job in chosen}
    async with contextlib.AsyncExitStack() as stack:
        cards = {engine: await stack.enter_async_context(card(engine, 1, 1, cpu)) for engine in engines}
        for _ in range(arguments.rounds):
            for job in chosen:
                for engine, dpu in cards.items():
                    count = arguments.commands // (8 if job.size > 4096 else 4 if job.depth == 1 else 1)
                    samples[job.name][engine].append(measure(dpu, job, count))
    rows = []
    for job in chosen:
        result: dict[str, Any] = {
            engine: {
                "iops": common.spread([one.iops for one in of], 0),
                "mean_us": common.spread([one.mean_us for one in of], 2),
                "p99_us": common.spread([one.p99_us for one in of], 2),
            }
            for engine, of in samples[job.name].items()
        }
        if "spdk" in result:
            ratios = [a.iops / b.iops for a, b in zip(samples[job.name]["dpud"], samples[job.name]["spdk"])]
            ratio = common.spread(ratios)
            result |= {"ratio": ratio, "budget": {"least": job.budget, "met": ratio["median"] >= job.budget}}
        report.results.setdefault("jobs", {})[job.name] = result
        ours = result["dpud"]
        figures = [ours[name]["median"] for name in ("iops", "mean_us", "p99_us")]
        rows.append([job.name, *figures, result["ratio"]["median"] if "ratio" in result else "-"])
    common.table(["job", "iops", "mean us", "p99 us", "to spdk"], rows)


async def idle(report: common.Report, arguments: argparse.Namespace, cpu: int) -> None:
    shares: dict[str, list[float]] = {"trapped": [], "mapped": []}
    async with card("dpud", 1, 1, cpu) as dpu:
        for _ in range(arguments.rounds):
            for name, capabilities in (("trapped", None), ("mapped", MAPPED)):
                with initiator(dpu, "m0", capabilities) as nvme:
                    queue = nvme.create_queue_pair(1, ENTRIES)
                    loop(nvme, queue, 1, READ, 4096, 1, 100)
                    begin, cpu_s = time.monotonic(), dpu.cpu_s()
                    await asyncio.sleep(arguments.idle)
                    shares[name].append((dpu.cpu_s() - cpu_s) / (time.monotonic() - begin) * 100)
    report.results["idle_percent"] = {name: common.spread(values, 2) for name, values in shares.items()}
    common.table(["idle", "% of a CPU"], [[name, statistics.median(of)] for name, of in shares.items()])


async def scaling(report: common.Report, arguments: argparse.Namespace, cpu: int) -> None:
    rows = []
    for name, (queues, namespaces, controllers) in SCALING.items():
        ratios = []
        many = queues * namespaces * controllers
        async with card("dpud", controllers, namespaces, cpu) as dpu:
            with contextlib.ExitStack() as stack:
                clients = [stack.enter_context(initiator(dpu, f"m{number}")) for number in range(controllers)]
                places = [
                    (nvme, queue, nsid)
                    for nvme in clients
                    for queue in [nvme.create_queue_pair(qid, ENTRIES) for qid in range(1, queues + 1)]
                    for nsid in range(1, namespaces + 1)
                ]
                turns = max(2, arguments.commands // TURN // many)
                for _ in range(arguments.rounds):
                    # "One" must be alone: a queue that exists is looked at.
                    async with card("dpud", 1, 1, cpu) as other:
                        with initiator(other, "m0") as nvme:
                            queue = nvme.create_queue_pair(1, ENTRIES)
                            one_s = per_command([(nvme, queue, 1)], turns * many, FOOTPRINT)
                    ratios.append(per_command(places, turns, FOOTPRINT // namespaces // controllers) / one_s)
        row = {"ratio": common.spread(ratios), "commands": turns * many * TURN}
        report.results.setdefault("scaling", {})[name] = row
        rows.append([name, row["ratio"]["median"]])
    common.table(["scaling", "cost per command"], rows)


def per_command(places: Sequence[tuple[Nvme, SubmissionQueue, int]], turns: int, span: int) -> float:
    """Seconds per command: ``turns`` times to each place, of which ``span`` bytes are used."""
    results = [
        loop(nvme, queue, nsid, READ, 4096, 32, TURN, span) for _ in range(turns) for nvme, queue, nsid in places
    ]
    return sum(one.seconds for one in results) / sum(one.commands for one in results)


async def run(arguments: argparse.Namespace) -> common.Report:
    report = common.Report("card", arguments)
    cpus = os.sched_getaffinity(0)
    server = min(cpus)
    if len(cpus) == 1:
        report.notes.append("one CPU for daemon and initiator: these figures mean nothing")
    engines: list[Engine] = ["dpud", "spdk"] if os.environ.get("SPDK_DIR") else ["dpud"]
    if len(engines) == 1:
        report.notes.append("SPDK_DIR is not set: there is no peer to compare with")
    await jobs(report, arguments, engines, server)
    await idle(report, arguments, server)
    await scaling(report, arguments, server)
    return report


def main() -> None:
    parser = common.parser(__doc__, "card")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commands", type=int, default=400_000, help="of a 4 KiB job at QD 32; others have fewer")
    parser.add_argument("--idle", type=float, default=4.0, help="seconds of doing nothing")
    parser.add_argument("--job", action="append", choices=BY_NAME, help="only this one, again for more")
    arguments = parser.parse_args()
    arguments.job = arguments.job or list(BY_NAME)
    if arguments.quick:
        arguments.rounds, arguments.commands, arguments.idle, arguments.job = 1, 8000, 0.5, arguments.job[:1]
    asyncio.run(run(arguments)).write()


if __name__ == "__main__":
    main()
