"""A lab that the tests of one module share: ``stage``.

A module that uses it defines ``SCENARIO`` (TOML). Its tests may be ``async def``: they run in the lab's event loop.
When one fails, its report names the folder with console, dmesg and daemon log.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from emu.daemon import Dpu
from emu.lab import Lab, prepare
from emu.progress import Silent
from emu.run import VmGuest, controller_name
from emu.scenario import parse
from emu.vm import Vm
from emu.workloads import Context
from emu.workloads.base import BlockDevice, find_device
from emu.workloads.fio import run_fio

# Warnings of drivers/nvme/host/ioctl.c: at the first command that a program passes through to a controller without
# SGLs (nvme_map_user_request); at a reset that a program asks for (NVME_IOCTL_RESET).
HARMLESS = re.compile(r"using unchecked data buffer|nvme\d+: resetting controller$")
# The driver scans after each reset; the next reset cancels that scan's commands (-EINTR, Host Aborted Command).
CUT_SHORT = re.compile(r"Identify .*failed \(-4\)|failed \(nsid=\d+, status=0x(371|fffffffc)\)")
ALARMING = re.compile(
    r"timeout|polled|reset controller|Abort|duplicate ID|SUBNQN|I/O error|Removing after|hung|blocked for"
    r"|Device not ready|failed|invalid|missing",
    re.IGNORECASE,
)


@dataclass
class Stage:
    """A running lab with its loop. ``vm`` and ``dpu`` are its first ones."""

    runner: asyncio.Runner
    lab: Lab

    @property
    def vm(self) -> Vm:
        return next(iter(self.lab.vms.values()))

    @property
    def dpu(self) -> Dpu:
        return next(iter(self.lab.dpus.values()))


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    folder = Path(request.config.getoption("--dpu-emu-out") or request.config.rootpath / "out" / "test")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")  # two of them may run tests of one module
    out = folder.absolute() / f"{request.module.__name__.rpartition('.')[2]}{worker}"
    shutil.rmtree(out, ignore_errors=True)
    scenario = parse(request.module.SCENARIO, f"{out.name}.toml", request.path.parent)
    accel = cast(Literal["auto", "kvm", "tcg"], request.config.getoption("--dpu-emu-accel"))
    config = replace(scenario.lab_config(), out=out, accel=accel, qemu=request.config.getoption("--dpu-emu-qemu"))
    progress = Silent()
    failed_before = request.session.testsfailed
    with asyncio.Runner() as runner:
        lab = Lab(config, prepare(config, progress), progress)
        runner.run(lab.__aenter__())
        try:
            yield Stage(runner, lab)
        finally:
            runner.run(lab.__aexit__(None, None, None))
    if request.session.testsfailed == failed_before:
        shutil.rmtree(out, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    stage = pyfuncitem.funcargs.get("stage")
    if not isinstance(stage, Stage) or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = pyfuncitem._fixtureinfo.argnames
    stage.runner.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    stage = getattr(item, "funcargs", {}).get("stage")
    if report.failed and isinstance(stage, Stage):
        report.sections.append(("lab", f"console, dmesg, daemon log: {stage.lab.out}"))
    return report


# ---- the guest


async def shell(vm: Vm, command: str, *, timeout_s: float = 60) -> str:
    """The output of a shell command, which must succeed. ``timeout_s`` of a quiet host, times the CPUs it may use."""
    result = await vm.exec(["sh", "-c", command], timeout_s=timeout_s * (vm.config.vcpus + 1))
    assert result.code == 0, f"{command}: {result.code}: {(result.stdout + result.stderr).decode(errors='replace')}"
    return result.stdout.decode(errors="replace")


async def shell_json(vm: Vm, command: str) -> Any:
    return json.loads(await shell(vm, command))


async def kernel_log(vm: Vm) -> list[str]:
    """The guest's kernel log with levels: "<6>[    1.234567] text"."""
    return (await shell(vm, "dmesg -r")).splitlines()


def complaints(lines: list[str], *, resets: bool = False) -> list[str]:
    """Of ``lines``, what a kernel says about storage that is not as it should be. ``resets``: one follows another."""
    found = []
    for line in lines:
        level = re.match(r"<(\d+)>", line)
        about_storage = re.search(r"nvme|blk_|Buffer I/O|EXT4-fs|XFS|hung|blocked for|critical", line)
        bad = (level and int(level[1]) & 7 <= 4) or ALARMING.search(line)
        harmless = HARMLESS.search(line) or (resets and CUT_SHORT.search(line))
        if about_storage and bad and not harmless:
            found.append(line)
    return found


async def block_device(vm: Vm, device: str, nsid: int = 1) -> BlockDevice:
    """Namespace ``nsid`` of "DPU.CONTROLLER"."""
    return await find_device(VmGuest(vm), controller_name(vm, device), nsid)


async def fio(vm: Vm, device: BlockDevice, *arguments: str, timeout_s: float = 300) -> dict[str, Any]:
    """Run fio on ``device`` past the page cache; its report. WorkloadError when an I/O or its data fails."""
    common = ["--name=t", f"--filename={device.path}", "--direct=1", "--verify_state_save=0", "--group_reporting"]
    engine = [] if any(one.startswith("--ioengine") for one in arguments) else ["--ioengine=io_uring"]
    return await run_fio(Context(VmGuest(vm), device), [*common, *engine, *arguments], timeout_s)


VERIFY = ("--verify=crc32c", "--verify_fatal=1", "--randseed=7")


# ---- the daemon


async def worker_pid(dpu: Dpu) -> int:
    return int((await dpu.rpc("dpu_get_stats"))["pid"])


def io_commands(stats: dict[str, Any], nqn: str = "") -> int:
    """Completed I/O commands of all controllers whose NQN ends with ``nqn``."""
    return sum(
        queue["commands"]
        for controller in stats["controllers"]
        for queue in controller["queues"]
        if queue["sqid"] and controller["nqn"].endswith(nqn)
    )


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank."""
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * percent // 100).__int__() - 1)]
