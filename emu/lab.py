"""A lab: VMs and DPUs that live and end together.

    platform = prepare(config, progress)               # QEMU, accelerator, guest image: may fetch and build
    async with Lab(config, platform, progress) as lab:
        disk = lab.vms["web"].device("card.fast")      # disk.namespaces == ("nvme0n1",)
        await lab.vms["web"].exec(["lsblk"], timeout_s=10)
    print(plan(config, platform, directory, files))    # the same, as commands and RPC calls; nothing is started

In the output folder: <vm>/{console.log, qemu.log, qemu.txt, dmesg.txt} and <dpu>/dpud.log.
Parameters: see LabConfig.
Limits: a lab belongs to the main thread's event loop. SIGINT is the caller's: asyncio.run turns it into a
cancellation, which ends the lab in order; SIGTERM is treated likewise and ends in exit code 143.
Errors: EmuError; VmError and DpuError with the logs' last lines. Whatever fails, nothing is left behind, and
what SIGKILL leaves is in the ledger for `emu clean`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from dpu.errors import EmuError
from emu import accel, images, qemu, snapshot
from emu.accel import Accel
from emu.daemon import ControllerConfig, Dpu, DpuConfig, GroupConfig, NamespaceConfig, daemon_command, rpc_calls
from emu.fabric.spec import FabricSpec
from emu.ledger import Ledger
from emu.paths import cache_dir
from emu.progress import Progress
from emu.units import plural
from emu.vm import DiskConfig, Platform, Vm, VmConfig, VmError, VmPaths, device_json, qemu_command

if TYPE_CHECKING:
    from emu.fabric.holder import LabFabric
    from net.fabric import Fabric

__all__ = [
    "ControllerConfig",
    "DiskConfig",
    "DpuConfig",
    "GroupConfig",
    "Lab",
    "LabConfig",
    "NamespaceConfig",
    "Plan",
    "VmConfig",
    "plan",
    "prepare",
]


@dataclass(frozen=True)
class LabConfig:
    """Everything a lab needs to start. Names of VMs, of DPUs and of a DPU's controllers are unique.

    ``out``: folder for console logs, daemon logs and QEMU lines (None: below the runtime directory).
    ``claim``: the name that other programs find it by; one lab has it at a time (None: found by nobody).
    """

    name: str = "lab"
    vms: tuple[VmConfig, ...] = ()
    dpus: tuple[DpuConfig, ...] = ()
    fabric: FabricSpec | None = None
    qemu: str | None = None  # path of the QEMU to use
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    restore: bool = True  # False: cold boot, no template snapshot
    out: Path | None = None
    claim: str | None = None
    keep: bool = False  # leave directories and back-end files in place at the end


def prepare(config: LabConfig, progress: Progress) -> Platform:
    """What the lab's VMs run on: found, or fetched and built where that has not been done yet."""
    for dpu in config.dpus:
        daemon_command(dpu, Path())  # says at once that there is no SPDK
    return Platform(qemu.find(config.qemu, progress), accel.choose(config.accel, progress), images.get(progress))


@dataclass(frozen=True)
class Plan:
    """What a lab would run: for each VM and DPU by name its command line, for each DPU its RPC calls too."""

    vms: dict[str, list[str]]
    dpus: dict[str, list[str]]
    rpc: dict[str, list[tuple[str, dict[str, Any]]]]


def plan(config: LabConfig, platform: Platform, directory: Path, files: Path) -> Plan:
    """The commands of the lab with its sockets and logs in ``directory`` and its own back-end files in ``files``.

    Each VM's controllers are on its command line here; a lab plugs the same JSON in with ``device_add``.
    """
    vms: dict[str, list[str]] = {}
    for vm in config.vms:
        own = directory / vm.name
        command = qemu_command(vm, _vm_platform(platform, vm), VmPaths.below(own, own))
        for port, (dpu, controller) in enumerate(vm.dpus):
            socket = directory / dpu / controller / "cntrl"
            command += ["-device", json.dumps(device_json(socket, f"{dpu}.{controller}", port))]
        vms[vm.name] = command
    dpus = {dpu.name: daemon_command(dpu, directory / dpu.name / "rpc") for dpu in config.dpus}
    rpc = {dpu.name: rpc_calls(dpu, directory / dpu.name, files) for dpu in config.dpus}
    return Plan(vms, dpus, rpc)


class Lab:
    """The context manager. ``out`` is the folder with the logs, ``ledger`` the book of what was made."""

    def __init__(self, config: LabConfig, platform: Platform, progress: Progress) -> None:
        self.config = config
        self.platform = platform
        self.progress = progress
        self.vms: dict[str, Vm] = {}
        self.dpus: dict[str, Dpu] = {}
        self.out = Path()
        self.ledger: Ledger | None = None
        self._fabric: LabFabric | None = None
        self._signals = _SigTerm()

    async def __aenter__(self) -> Lab:
        _check(self.config)
        self._signals.install()
        try:
            self._make_directories()
            if self.config.fabric is not None:
                assert self.ledger is not None
                name = self.config.claim or self.ledger.directory.name
                self.progress.step(f"Bringing the fabric up: emu fabric show --name {name}")
                self._fabric = await asyncio.to_thread(self._bring_up_fabric, self.config.fabric, name)
            counts = (plural(len(self.config.vms), "VM"), plural(len(self.config.dpus), "DPU"))
            self.progress.step(f"Starting {', '.join(counts)}")
            starts = [self._start_dpu(dpu) for dpu in self.dpus.values()]
            await together([*starts, *map(self._start_vm, self.vms.values())])
            await together(self._attach(vm) for vm in self.vms.values())
            await self._join_fabric()
        except BaseException as error:
            await self._end(failed=True)
            self._signals.remove(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._end(failed=error is not None)
        finally:
            self._signals.remove(error)

    def _make_directories(self) -> None:
        self.ledger = Ledger.create(self.config.name)
        if self.config.claim is not None:
            self.ledger.claim(self.config.claim)
        self.out = (self.config.out or self.ledger.directory / "_out").absolute()  # no VM or DPU has such a name
        _make(self.out)
        files = cache_dir("files") / self.ledger.directory.name
        self.ledger.path(files)
        files.mkdir(mode=0o700)
        for dpu in self.config.dpus:
            self.dpus[dpu.name] = Dpu(dpu, *self._folders(dpu.name), files, self.ledger)
        for vm in self.config.vms:
            platform = _vm_platform(self.platform, vm)
            self.vms[vm.name] = Vm(vm, platform, *self._folders(vm.name), self.ledger)

    def _folders(self, name: str) -> tuple[Path, Path]:
        assert self.ledger is not None
        directory, out = self.ledger.directory / name, self.out / name
        directory.mkdir(mode=0o700)
        _make(out)
        return directory, out

    async def _join_fabric(self) -> None:
        """A network card for every VM that stands in the place of a host."""
        for vm in self.vms.values():
            if vm.config.host is not None:
                from emu.fabric.vm import join

                await join(vm, self.fabric, vm.config.host)

    @property
    def fabric(self) -> Fabric:
        """The live fabric that the scenario asks for."""
        if self._fabric is None:
            raise EmuError("this lab has no fabric", "give its scenario a table [fabric]")
        return self._fabric.fabric

    @property
    def fabric_name(self) -> str | None:
        """What `emu fabric --name` calls it; None: there is no fabric."""
        return None if self._fabric is None else self._fabric.name

    def fabric_view(self) -> dict[str, Any]:
        """What `emu fabric show --json` tells of it now."""
        assert self._fabric is not None
        return self._fabric.holder.show({})

    def _bring_up_fabric(self, spec: FabricSpec, name: str) -> LabFabric:
        from emu.fabric.holder import LabFabric  # Scapy and LLVM take a second

        assert self.ledger is not None
        return LabFabric(spec, name, self.ledger)

    async def _start_dpu(self, dpu: Dpu) -> None:
        await dpu.start()
        await dpu.configure()

    async def _start_vm(self, vm: Vm) -> None:
        try:
            await self._boot(vm)
        except VmError as error:
            if self.config.accel != "auto" or vm.platform.accel.name != "kvm":
                raise
            # the probe found KVM usable, this guest did not: whatever it is, TCG does not have it
            self.progress.note(f"{error.message} with KVM; taking TCG")
            vm.platform = replace(vm.platform, accel=Accel("tcg", f"with KVM, {error.message}"))
            await self._boot(vm)

    async def _boot(self, vm: Vm) -> None:
        if self.config.restore:
            await snapshot.start(vm, self.progress)
        else:
            await vm.start()

    async def _attach(self, vm: Vm) -> None:
        """In the order of the configuration: the guest numbers its controllers as they come."""
        for name, controller in vm.config.dpus:
            dpu = self.dpus[name]
            await vm.attach(dpu.socket(controller), f"{name}.{controller}", dpu.namespaces(controller))

    async def collect(self) -> None:
        """Write each running guest's kernel log to dmesg.txt in its output folder."""
        await together(self._collect(vm) for vm in self.vms.values() if vm.running)

    async def _collect(self, vm: Vm) -> None:
        with contextlib.suppress(EmuError, OSError, EOFError, TimeoutError):
            result = await vm.exec(["dmesg"], timeout_s=10)
            (vm.out / "dmesg.txt").write_bytes(result.stdout)

    async def _end(self, failed: bool) -> None:
        """Everything down: the guests first, so that no daemon goes away under a living one."""
        try:
            if failed or self.config.out is not None:
                await self.collect()
        finally:
            for things in (self.vms.values(), self.dpus.values()):
                await asyncio.gather(*(one.stop() for one in things), return_exceptions=True)
            if self._fabric is not None:
                self._fabric.close()
            if self.ledger is not None:
                self.ledger.close(keep=self.config.keep)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EmuError(f"cannot make {out}: {error.strerror}", "choose another output folder") from error


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once. The first failure cancels the rest and is raised, when all have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _check(config: LabConfig) -> None:
    """Every controller that a VM is to have exists and has one VM: a vfio-user socket serves one client."""
    free = {(dpu.name, controller.name) for dpu in config.dpus for controller in dpu.controllers}
    for vm in config.vms:
        for device in vm.dpus:
            if device not in free:
                raise EmuError(
                    f"{vm.name} cannot have controller {'.'.join(device)}: it is in use or does not exist",
                    f"free: {', '.join(map('.'.join, sorted(free))) or 'none'}; give each VM controllers of its own",
                )
            free.remove(device)


def _vm_platform(platform: Platform, vm: VmConfig) -> Platform:
    if vm.kernel is None:
        return platform
    return replace(platform, image=images.custom(vm.kernel, vm.initrd))


class _SigTerm:
    """SIGTERM cancels the task that runs the lab; when that has ended the lab, the program ends with 143."""

    def __init__(self) -> None:
        self._before: Any = None
        self._received = False

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel(number: int, frame: FrameType | None) -> None:
            self._received = True
            loop.call_soon_threadsafe(task.cancel)

        self._before = signal.signal(signal.SIGTERM, cancel)

    def remove(self, error: BaseException | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
        if self._received and isinstance(error, asyncio.CancelledError):
            raise SystemExit(128 + signal.SIGTERM)
