"""How long a guest waits when the worker dies under load: SIGKILL, the standby or a new fork takes over.

    scripts/bench/pause [--quick] [--kills N]

The guest is the test driver (tests/support/nvme_driver.py): a closed loop of 4 KiB reads with interrupts and shadow
doorbells. Per kill: the longest latency that it saw around the kill, and what the keeper's log says (from the end of
the old worker's connection to serving). With a standby each kill waits until it is there; without one (--no-standby,
or a second death before there is one again) the worker has to be forked first.
The budget (issue 2, sections 6 and 9.4): p99 <= 50 ms with the warm standby.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import select
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpu.keeper import QUICK_DEATH_S
from scripts.bench import common
from tests.support.daemon import NS_512, NS_FILE, Daemon, Target, standby_ready
from tests.support.nvme_driver import READ, Command, GuestRam, Nvme

BUDGET_MS = 50.0
TRANSFER = 4096
SETTLE_S = 0.5
STANDBY_LIMIT_S = 120.0
CASES = [("memory", NS_512, 1), ("memory", NS_512, 32), ("file", NS_FILE, 32)]
WITHOUT = "no standby, "


class Loop:
    """A closed loop of reads; ``worst_ns`` is the longest latency since it was last set to 0."""

    def __init__(self, nvme: Nvme, nsid: int, depth: int) -> None:
        self.nvme, self.nsid, self.depth = nvme, nsid, depth
        self.queue = nvme.create_queue_pair(1, 64)
        self.buffers = [nvme.ram.buffer(TRANSFER) for _ in range(depth)]
        self.running: list[tuple[Command, int, int]] = []
        self.rng = random.Random(1)
        self.worst_ns = 0
        self.completed = 0
        for i in range(depth):
            self._submit(i)
        nvme.ring_sq(self.queue)

    def _submit(self, buffer: int) -> None:
        lba = 8 * self.rng.randrange(4096)
        command = self.nvme.submit_io(self.queue, READ, self.nsid, lba, self.buffers[buffer], ring=False)
        self.running.append((command, buffer, time.perf_counter_ns()))

    def turn(self) -> None:
        """Take what has completed, submit as much; waits for one at least."""
        before = self.queue.completed
        self.nvme.wait_until(self.queue.cq, lambda: self.queue.completed > before, "a completion")
        now = time.perf_counter_ns()
        done = [row for row in self.running if row[0].completion is not None]
        self.running = [row for row in self.running if row[0].completion is None]
        for command, buffer, begun in done:
            assert command.status == 0, f"status {command.status:#x}"
            self.worst_ns = max(self.worst_ns, now - begun)
            self._submit(buffer)
        self.completed += len(done)
        self.nvme.ring_sq(self.queue)

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn()


def await_standby(daemon: Daemon, loop: Loop) -> None:
    """Run the load until a standby waits for its turn."""
    assert daemon.process is not None
    deadline = time.monotonic() + STANDBY_LIMIT_S
    while not standby_ready(daemon.process.pid, daemon.worker_pid()):
        assert time.monotonic() < deadline, f"no standby\n{daemon!r}"
        loop.run(0.05)


def kept_pauses(daemon: Daemon) -> list[float]:
    """Of the keeper's log, in ms."""
    return [float(found) for found in re.findall(r"serves after ([\d.]+) ms", daemon.log(1_000_000))]


def measure(daemon: Daemon, target: Target, nsid: int, depth: int, kills: int, standby: bool) -> dict[str, Any]:
    ram = GuestRam()
    nvme = Nvme(target.path, ram)
    nvme.enable()
    nvme.enable_shadow_doorbells()
    loop = Loop(nvme, nsid, depth)
    rng = random.Random(depth)
    before, worst, calm = len(kept_pauses(daemon)), [], []
    for _ in range(kills):
        if standby:
            await_standby(daemon, loop)
        else:
            loop.run(
                QUICK_DEATH_S
            )  # the keeper waits before it starts the next one, when they die in quick succession
        loop.worst_ns = 0
        loop.run(SETTLE_S)
        calm.append(loop.worst_ns / 1e6)  # what the host's load alone does to it
        loop.worst_ns = 0
        loop.run(rng.random() * 0.05)
        pid = daemon.worker_pid()
        end = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        loop.run(0.3)
        while not select.select([end], [], [], 0)[0]:
            loop.turn()
        os.close(end)
        loop.run(0.2)
        worst.append(loop.worst_ns / 1e6)
    kept = kept_pauses(daemon)[before:]
    nvme.close()
    return {
        "guest_ms": percentiles(worst),
        "keeper_ms": percentiles(kept),
        "guest_ms_without_kill": percentiles(calm),
        "all_guest_ms": [round(value, 1) for value in worst],
        "load": common.load(),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest rank."""
    ranked = sorted(values)
    found = {name: ranked[math.ceil(share * len(ranked)) - 1] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {name: round(value, 1) for name, value in found.items()} | {
        "max": round(ranked[-1], 1),
        "count": len(ranked),
    }


def run(arguments: argparse.Namespace) -> common.Report:
    report = common.Report("pause", arguments)
    rows = []
    cases = CASES[:1] if arguments.quick else CASES
    for standby in (True, False):
        args = ["--crash-limit", "0"] if standby else ["--crash-limit", "0", "--no-standby"]
        with tempfile.TemporaryDirectory(prefix="dpu-b-") as directory, Daemon(Path(directory), args=args) as daemon:
            target = daemon.standard_target()
            for backend, nsid, depth in cases if standby else cases[:1]:
                result = measure(daemon, target, nsid, depth, arguments.kills, standby)
                name = f"{'' if standby else WITHOUT}{backend} QD{depth}"
                report.results[name] = result
                figures = (result[of][k] for of in ("guest_ms", "keeper_ms") for k in ("p50", "p99"))
                rows.append([name, *figures, result["load"]])
                print(*rows[-1], flush=True)
    worst = max(result["guest_ms"]["p99"] for name, result in report.results.items() if not name.startswith(WITHOUT))
    report.results["budget"] = {"p99_ms_max": BUDGET_MS, "p99_ms": worst, "met": worst <= BUDGET_MS}
    common.table(["pause, ms", "guest p50", "guest p99", "keeper p50", "keeper p99", "load"], rows)
    return report


def main() -> None:
    parser = common.parser(__doc__, "pause")
    parser.add_argument("--kills", type=int, default=25, help="of each case")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.kills = 2
    run(arguments).write()


if __name__ == "__main__":
    main()
