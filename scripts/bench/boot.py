"""From nothing to the first I/O: a cold boot, and a restore from the template snapshot with hot-plug.

    scripts/bench/boot [--quick] [--rounds N]

Each round starts dpud and a VM (QEMU started at time zero), plugs in a controller with a memory namespace and reads
4 KiB of it in the guest past the guest's page cache. Wall time and QEMU's CPU time until then. dpud is started before
time zero; its own start is given beside. The aims (issue 2, section 9.7): 5 s cold, 0.7 s from the snapshot.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace
from typing import Any

from emu.daemon import ControllerConfig, DpuConfig, NamespaceConfig
from emu.lab import Lab, LabConfig, prepare
from emu.progress import Silent
from emu.snapshot import start as start_restored
from emu.vm import Platform, Vm, VmConfig
from scripts.bench import common

AIM_S = {"cold": 5.0, "snapshot": 0.7}


class TimedLab(Lab):
    """A lab that does not start its VM: the benchmark does."""

    async def _start_vm(self, vm: Vm) -> None:
        pass

    async def _attach(self, vm: Vm) -> None:
        pass


async def one(config: LabConfig, platform: Platform, restored: bool) -> dict[str, float]:
    begin_dpu = time.monotonic()
    async with TimedLab(config, platform, Silent()) as lab:
        vm, dpu = lab.vms["vm"], lab.dpus["card"]
        begin = time.monotonic()
        if restored:
            await start_restored(vm, Silent())
        else:
            await vm.start()
        up = time.monotonic()
        device = await vm.attach(dpu.socket("disk"), "card.disk", 1)
        plugged = time.monotonic()
        argv = ["dd", f"if=/dev/{device.namespaces[0]}", "of=/dev/null", "bs=4096", "count=1", "iflag=direct"]
        result = await vm.exec(argv, timeout_s=60)
        end = time.monotonic()
        assert result.code == 0, result.stderr
        assert vm.restored == restored, "the VM was not started as asked"
        return {
            "wall_s": end - begin,
            "qemu_cpu_s": vm.process.cpu_s(),
            "agent_s": up - begin,
            "controller_s": plugged - up,
            "read_s": end - plugged,
            "dpud_s": begin - begin_dpu,
        }


async def bench(arguments: argparse.Namespace, report: common.Report) -> None:
    vm = VmConfig("vm", 1, 512, (("card", "disk"),))
    card = DpuConfig("card", (ControllerConfig("disk", (NamespaceConfig("memory", 64 << 20),)),))
    config = LabConfig("bench-boot", (vm,), (card,), accel=arguments.accel)
    platform = prepare(config, Silent())
    report.stamp(accel=platform.accel, qemu=platform.qemu, image_digest=platform.image.digest)
    await one(config, platform, True)  # makes the template where there is none, and warms the page cache
    rounds: dict[str, list[dict[str, float]]] = {"cold": [], "snapshot": []}
    loads = []
    for _ in range(arguments.rounds):
        for name, found in rounds.items():
            found.append(await one(replace(config, restore=name == "snapshot"), platform, name == "snapshot"))
        loads.append(common.load())
    rows = []
    for name, found in rounds.items():
        result: dict[str, Any] = {key: common.spread([row[key] for row in found]) for key in found[0]}
        result["aim"] = {"wall_s": AIM_S[name], "met": result["wall_s"]["median"] <= AIM_S[name]}
        report.results[name] = result
        rows.append([name, *(f"{result[key]['median']:.2f}" for key in found[0])])
    report.results["loads"] = loads
    common.table(["to the first I/O", *rounds["cold"][0]], rows)


def main() -> None:
    parser = common.parser(__doc__, "boot")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    report = common.Report("boot", arguments)
    asyncio.run(bench(arguments, report))
    report.write()


if __name__ == "__main__":
    main()
