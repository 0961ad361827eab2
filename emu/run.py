"""Runs a scenario: the lab, its workloads one after the other, the report. Or only workloads in a lab that is up."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dpu.errors import EmuError
from emu import hostinfo, timeline
from emu.daemon import Dpu
from emu.fabric.picture import compared
from emu.lab import Lab, LabConfig, prepare
from emu.paths import cache_dir
from emu.progress import Progress, Silent
from emu.report import DpuReport, Report, VmReport, card
from emu.report.document import LOGS
from emu.scenario import Scenario, split_device
from emu.vm import Vm
from emu.workloads import WORKLOADS, Context, Params, Result
from emu.workloads.base import Output, find_device

_STATS = "dpu_get_stats"
_STEPS = 1000  # of a workload's progress


def run_to_report(scenario: Scenario, config: LabConfig, progress: Progress, out: Path) -> Report:
    """:func:`run`, and its report in the folder ``out``, from the beginning and as it is at the end, however it ends.

    EmuError when the lab cannot start or the folder cannot be written.
    """
    report = Report(scenario.name, scenario.to_json())
    with _written(report, out):
        asyncio.run(run(scenario, config, progress, report))
    return report


async def run_in(lab: Lab, scenario: Scenario, progress: Progress, out: Path) -> None:
    """Runs the workloads of ``scenario`` in ``lab``, which is up and stays so.

    Leaves in ``out`` what :func:`run_to_report` does; the logs in it are the lab's from its beginning until now.
    """
    began_s = time.monotonic()
    stamp = hostinfo.collect(lab.platform.accel, lab.platform.qemu, lab.platform.image.digest)
    report = Report(scenario.name, scenario.to_json(), host=stamp.to_dict())
    with _written(report, out):
        try:
            await _work(lab, scenario.workloads, progress, report)
            await lab.collect()
        finally:
            report.host = stamp.finished().to_dict()
            report.notes = list(progress.notes)
            report.seconds = time.monotonic() - began_s
            for name in (*lab.vms, *lab.dpus):
                shutil.copytree(lab.out / name, out / LOGS / name, dirs_exist_ok=True)


@contextlib.contextmanager
def _written(report: Report, out: Path) -> Iterator[None]:
    """The report is in the folder ``out`` from the beginning, and as it is at the end, however that comes."""
    report.error = "the run has not come to its end"
    report.write(out)  # also tells the next run that this folder is one of ours
    try:
        yield
        report.error = ""
    except EmuError as error:
        report.error = str(error)
        raise
    finally:
        report.write(out)


async def run(scenario: Scenario, config: LabConfig, progress: Progress, report: Report) -> None:
    """Starts the lab of ``config``, runs the workloads of ``scenario``, ends the lab; fills ``report`` on the way.

    A workload that fails is in the report, and the next one runs. EmuError when the lab cannot start.
    """
    began_s = time.monotonic()
    platform = prepare(config, progress)
    stamp = hostinfo.collect(platform.accel, platform.qemu, platform.image.digest)
    report.host = stamp.to_dict()
    async with Lab(config, platform, progress) as lab:
        if config.keep and lab.ledger is not None:
            own = lab.ledger.directory
            progress.note(
                f"Kept: {own} (sockets), {cache_dir('files', own.name)} (files); `emu clean --kept` removes them"
            )
        report.start_seconds = time.monotonic() - began_s
        async with timeline.playing(lab, timeline.events(scenario.faults, scenario.calls), progress):
            await _work(lab, scenario.workloads, progress, report)
    report.host = stamp.finished().to_dict()
    report.notes = list(progress.notes)
    report.seconds = time.monotonic() - began_s


async def _work(lab: Lab, workloads: Sequence[Params], progress: Progress, report: Report) -> None:
    """Runs the workloads, and fills ``report`` with what came of them and of the lab's parts."""
    view = None if lab.config.fabric is None else lab.fabric_view()
    report.vms = {name: VmReport(vm.restored) for name, vm in lab.vms.items()}
    for params in workloads:
        report.workloads.append(await run_workload(lab, params, progress))
    report.dpus = {name: await _dpu_report(dpu) for name, dpu in lab.dpus.items()}
    if view is not None:
        report.fabric = compared(view, lab.fabric_view())


async def workload(lab: Lab, kind: str, progress: Progress | None = None, **params: Any) -> Result:
    """Runs one workload of the table in ``lab``; ``params`` as in a scenario.

    ``vm`` may be left out where there is one, or one with ``device``; ``device`` where the VM has one. EmuError for
    parameters that are wrong.
    """
    device = params.get("device")
    owners = {name: vm for name, vm in lab.vms.items() if device and split_device(device) in vm.config.dpus}
    vm = params.get("vm") or _only(owners or lab.vms, "VM")
    devices = {f"{dpu}.{controller}": None for dpu, controller in lab.vms[vm].config.dpus}
    device = device or _only(devices, "controller")
    try:
        checked = WORKLOADS[kind].params.model_validate({**params, "type": kind, "vm": vm, "device": device})
    except ValidationError as error:
        raise EmuError(f"workload {kind}: {error}") from error
    return await run_workload(lab, checked, progress or Silent())


def _only(things: Mapping[str, Any], noun: str) -> str:
    if len(things) != 1:
        raise EmuError(f"there are {len(things)} {noun}s", f"name one of: {', '.join(things)}")
    return next(iter(things))


async def run_workload(lab: Lab, params: Params, progress: Progress) -> Result:
    """Runs one workload. What goes wrong in the guest, or with it, is in the result."""
    workload = WORKLOADS[params.type]
    name = params.name or params.type
    progress.step(f"{name} on {params.vm}, {params.device}", total=_STEPS)
    bar = _Fraction(progress)
    vm = lab.vms[params.vm]
    dpu, controller = split_device(params.device)
    before = await card.look(lab.dpus[dpu], controller, params.nsid)
    began_s = time.monotonic()
    try:
        guest = VmGuest(vm)
        device = await find_device(guest, controller_name(vm, params.device), params.nsid)
        result = await workload.run(params, Context(guest, device, bar))
    except EmuError as error:
        result = Result(params.type, ok=False, error=str(error))
    bar(1.0)
    result.name, result.vm, result.device = name, params.vm, params.device
    result.seconds = round(time.monotonic() - began_s, 3)
    result.card = card.since(before, await card.look(lab.dpus[dpu], controller, params.nsid))
    return result


def controller_name(vm: Vm, device: str) -> str:
    """What the guest calls the controller ``device`` (DPU.CONTROLLER) now: "nvme0"."""
    place = vm.config.dpus.index(split_device(device))
    return vm.attached[place].controller


@dataclass(frozen=True)
class VmGuest:
    """A VM as workloads see it: its end, a panic or the end of patience end what runs in it."""

    vm: Vm

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float, on_output: Callable[[int, bytes], None] | None = None
    ) -> Output:
        # Patience counts QEMU's CPU time, and each virtual CPU may use a second of that in a second.
        patience_s = timeout_s * (self.vm.config.vcpus + 1)
        return await self.vm.exec(argv, timeout_s=patience_s, on_output=on_output)

    async def read_file(self, path: str) -> bytes:
        return await self.vm.guest.read_file(path)

    async def write_file(self, path: str, data: bytes, permissions: int = 0o644) -> None:
        await self.vm.guest.write_file(path, data, permissions)


class _Fraction:
    """Turns "this part is done" into advances of a step that has ``_STEPS``; never goes back."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done = 0

    def __call__(self, fraction: float) -> None:
        done = min(round(fraction * _STEPS), _STEPS)
        if done > self._done:
            self._progress.advance(done - self._done)
            self._done = done


async def _dpu_report(dpu: Dpu) -> DpuReport:
    """What the daemon tells about itself, as far as it does."""
    try:
        if _STATS not in await dpu.rpc("rpc_get_methods"):
            return DpuReport()
        stats = await dpu.rpc(_STATS)
    except EmuError as error:
        return DpuReport(error=error.message)
    generation = stats.get("generation")  # of the worker: the first is 1
    return DpuReport(worker_restarts=None if generation is None else generation - 1, stats=stats)
