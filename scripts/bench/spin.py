"""What spinning before sleep brings and costs: DPU_EMU_SPIN (idle passes) at 0, 50, 200 and 2000.

    scripts/bench/spin [--quick] [--rounds N] [--spin N ...] [--no-guest]

* ``driver``: IOPS and latency of the test driver's compiled closed loop (tests/support/perf.py) at QD 1 and 32 on a
  memory namespace, with interrupts and shadow doorbells, and the CPU time per command of the daemon.
* ``guest``: fio's 4 KiB random reads in a VM, QD 1 and 32, CPU time per I/O of daemon and QEMU.
* ``idle``: CPU share of the whole daemon (keeper, worker, warm standby) with a connected client that does nothing.

Settings are interleaved: each round visits all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from emu.daemon import ControllerConfig, DpuConfig, NamespaceConfig
from emu.lab import Lab, LabConfig, prepare
from emu.process import tree_cpu_s
from emu.progress import Silent
from emu.vm import VmConfig
from scripts.bench import common
from scripts.bench.guest import Device, Job, Sample, run_job
from tests.support.daemon import NS_512, Daemon
from tests.support.nvme_driver import GuestRam, Nvme
from tests.support.perf import closed_loop

SPINS = (0, 50, 200, 2000)
DEPTHS = (1, 32)


def by_driver(spin: int, commands: int, idle_s: float) -> dict[str, Any]:
    """One daemon with this setting: idle share, then QD 1 and QD 32."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dpu-s-") as directory:
        with Daemon(Path(directory), env={"DPU_EMU_SPIN": str(spin)}) as daemon:
            assert daemon.process is not None
            pid = daemon.process.pid
            target = daemon.standard_target()
            nvme = Nvme(target.path, GuestRam())
            nvme.enable()
            nvme.enable_shadow_doorbells()
            queue = nvme.create_queue_pair(1, 64)
            _calm(pid)
            begin, cpu = time.monotonic(), tree_cpu_s(pid)
            time.sleep(idle_s)
            found["idle_percent"] = (tree_cpu_s(pid) - cpu) / (time.monotonic() - begin) * 100
            for depth in DEPTHS:
                cpu = tree_cpu_s(pid)
                result = closed_loop(nvme, queue, nsid=NS_512, depth=depth, commands=commands, spin=0)
                found[f"QD{depth}"] = {
                    "iops": result.iops,
                    "p50_us": result.p50_us,
                    "p99_us": result.p99_us,
                    "cpu_us": (tree_cpu_s(pid) - cpu) / commands * 1e6,
                    "doorbells_per_command": result.doorbells / commands,
                    "interrupts_per_command": result.interrupts / commands,
                }
            nvme.close()
    return found


def _calm(pid: int, limit_s: float = 60.0) -> None:
    """Until the standby has compiled: the daemon's CPU time stands still."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = tree_cpu_s(pid)
        time.sleep(1.0)
        if tree_cpu_s(pid) - before < 0.1:
            return


async def in_guest(spin: int, seconds: float, report: common.Report) -> dict[str, Sample]:
    os.environ["DPU_EMU_SPIN"] = str(spin)  # Lab's dpud inherits it
    try:
        vm = VmConfig("vm", 1, 512, (("card", "disk"),))
        card = DpuConfig("card", (ControllerConfig("disk", (NamespaceConfig("memory", 256 << 20),)),))
        config = LabConfig("bench-spin", (vm,), (card,))
        platform = prepare(config, Silent())
        report.stamp(accel=platform.accel, qemu=platform.qemu, image_digest=platform.image.digest)
        async with Lab(config, platform, Silent()) as lab:
            device = Device("memory", lab.vms["vm"].device("card.disk").namespaces[0])
            await run_job(lab.vms["vm"], lab.dpus["card"], device, Job("write", "128k", 8), 1.0)
            return {
                f"QD{depth}": await run_job(
                    lab.vms["vm"], lab.dpus["card"], device, Job("randread", "4k", depth), seconds
                )
                for depth in DEPTHS
            }
    finally:
        del os.environ["DPU_EMU_SPIN"]


def run(arguments: argparse.Namespace) -> common.Report:
    report = common.Report("spin", arguments)
    driver: dict[int, list[dict[str, Any]]] = {spin: [] for spin in arguments.spin}
    guest: dict[int, list[dict[str, Sample]]] = {spin: [] for spin in arguments.spin}
    loads = []
    for _ in range(arguments.rounds):
        for spin in arguments.spin:
            driver[spin].append(by_driver(spin, arguments.commands, arguments.idle))
            if not arguments.no_guest:
                guest[spin].append(asyncio.run(in_guest(spin, arguments.seconds, report)))
            loads.append(common.load())
    rows = []
    for spin in arguments.spin:
        result: dict[str, Any] = {"idle_percent": common.spread([row["idle_percent"] for row in driver[spin]], 2)}
        for depth in (f"QD{depth}" for depth in DEPTHS):
            names = driver[spin][0][depth]
            result[f"driver {depth}"] = {n: common.spread([row[depth][n] for row in driver[spin]], 2) for n in names}
            if guest[spin]:
                samples = [row[depth] for row in guest[spin]]
                result[f"guest {depth}"] = {
                    "iops": common.spread([s.iops for s in samples], 0),
                    "p50_us": common.spread([s.p50_us for s in samples], 1),
                    "daemon_cpu_us": common.spread([s.daemon_us for s in samples], 2),
                    "qemu_cpu_us": common.spread([s.qemu_us for s in samples], 2),
                }
        report.results[str(spin)] = result
        rows.append(_row(spin, result))
    report.results["loads"] = loads
    heads = ["spin", "idle %"]
    for side in ("driver", "guest"):
        heads += [f"{side} QD{depth} {what}" for depth in DEPTHS for what in ("iops", "p50", "cpu us")]
    common.table(heads, rows)
    return report


def _row(spin: int, result: dict[str, Any]) -> list[Any]:
    row: list[Any] = [spin, result["idle_percent"]["median"]]
    for side, cpu in (("driver", "cpu_us"), ("guest", "daemon_cpu_us")):
        for depth in DEPTHS:
            part = result.get(f"{side} QD{depth}", {})
            row += [part[name]["median"] if part else "-" for name in ("iops", "p50_us", cpu)]
    return row


def main() -> None:
    parser = common.parser(__doc__, "spin")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--spin", type=int, action="append", help=f"only this setting, again for more (default {SPINS})"
    )
    parser.add_argument("--commands", type=int, default=30_000, help="of the driver, per depth")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each fio run")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds of doing nothing")
    parser.add_argument("--no-guest", action="store_true")
    arguments = parser.parse_args()
    arguments.spin = arguments.spin or list(SPINS)
    if arguments.quick:
        arguments.rounds, arguments.commands, arguments.seconds, arguments.idle = 1, 2000, 1.0, 1.0
        arguments.spin = arguments.spin[:2]
    run(arguments).write()


if __name__ == "__main__":
    main()
