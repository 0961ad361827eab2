"""One QEMU virtual machine whose NVMe controllers are plugged in while it runs.

    vm = Vm(VmConfig("vm0", memory_mib=512), platform, directory, out)
    await vm.start()                                 # cold; start(restore=RAM) continues a template snapshot
    disk = await vm.attach(Path("/run/x/cntrl"))     # disk.controller "nvme0", disk.namespaces ("nvme0n1",)
    result = await vm.exec(["lsblk"], timeout_s=10)
    await vm.reboot(); await vm.power_cycle(); await vm.stop()

Parameters: sizes in their unit (``memory_mib``); times in seconds of a quiet host, see ``Patience``.
Limits: at most ``ROOT_PORTS_MAX`` controllers; ``detach`` refuses one with MSI-X, on whose removal QEMU 11.1 aborts.
Errors: VmError with the last console lines when QEMU ends, the guest panics, or patience is over.
Source: QEMU 11.1 manual (qemu(1), docs/system/devices/vfio-user.rst), QMP reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from qemu.qmp import EventListener, QMPClient, QMPError

from dpu.errors import EmuError
from emu.accel import Accel
from emu.guest import ExecResult, Guest
from emu.images import Image
from emu.ledger import Ledger
from emu.paths import socket_path
from emu.process import Process, tail
from emu.qemu import Qemu
from images.agent import PORT as AGENT_PORT

ROOT_PORTS_MIN = 8
ROOT_PORTS_MAX = 24  # q35 has 32 slots on its root bus; some are taken
FIRST_PORT_SLOT = 4
CONSOLE_LINES = 30
BOOT_PATIENCE_S = {"tcg": 90.0, "kvm": 30.0}  # a boot takes 4 s of CPU under TCG
PLUG_PATIENCE_S = 30.0
UNPLUG_PATIENCE_S = 60.0  # Linux waits 5 s before it lets go: the button could be pressed again
MESSAGE_TIMEOUT_MS = 60_000  # the watchdog of dpud is far shorter; a loaded host must not cost the controller

_PANIC = "Kernel panic - not syncing"
_T = TypeVar("_T")

logging.getLogger("qemu.qmp").addHandler(logging.NullHandler())  # the end of a QEMU is not worth a traceback


@dataclass(frozen=True)
class DiskConfig:
    """A disk image of the user's, given to the guest as virtio-blk (format by its name: .qcow2 or raw)."""

    path: Path
    read_only: bool = False


@dataclass(frozen=True)
class VmConfig:
    """What a VM is. ``dpus``: the controllers it gets, as (DPU name, controller name), in this order."""

    name: str
    vcpus: int = 1
    memory_mib: int = 512
    dpus: tuple[tuple[str, str], ...] = ()
    kernel: Path | None = None  # None: the project's image
    initrd: Path | None = None  # the one that goes with ``kernel``
    kernel_args: str = ""  # added to the command line
    disks: tuple[DiskConfig, ...] = ()
    qemu_args: tuple[str, ...] = ()  # added at the end, as given
    host: str | None = None  # of the lab's fabric: the VM gets a network card in its place
    share_memory: bool = True  # False: its daemons must ask QEMU for every byte


@dataclass(frozen=True)
class Platform:
    """What a VM runs on and boots."""

    qemu: Qemu
    accel: Accel
    image: Image


@dataclass(frozen=True)
class VmPaths:
    """Sockets (short paths) and logs of one VM."""

    qmp: Path
    agent: Path
    keyboard: Path  # of the serial console; what it shows is in ``console``
    console: Path

    @classmethod
    def below(cls, directory: Path, out: Path) -> VmPaths:
        qmp, agent, keyboard = (socket_path(directory, name) for name in ("qmp", "agent", "keyboard"))
        return cls(qmp, agent, keyboard, out / "console.log")


@dataclass(frozen=True)
class Attached:
    """One controller as the guest sees it, on root port ``port``; ``device`` is what plugs it in again."""

    id: str
    port: int
    device: Mapping[str, Any]
    controller: str  # "nvme0"
    namespaces: tuple[str, ...]  # "nvme0n1", below /dev; by NSID, which the guest's numbers need not follow


class VmError(EmuError):
    """An error of a VM; ``console`` holds the last lines of its serial console, ``log`` QEMU's own."""

    def __init__(self, message: str, hint: str, console: Sequence[str], log: Sequence[str]) -> None:
        super().__init__(message, hint)
        self.console = list(console)
        self.log = list(log)

    def __str__(self) -> str:
        text = super().__str__()
        for title, lines in (("QEMU said", self.log), ("last console lines", self.console)):
            if lines:
                text += f"\n{title}:\n" + "\n".join(f"  {line}" for line in lines)
        return text


# ---- the command line: pure, and printed by --dry-run


def qemu_command(config: VmConfig, platform: Platform, paths: VmPaths, *, incoming: bool = False) -> list[str]:
    """The exact command line. ``incoming``: wait for a snapshot, with the CPUs stopped."""
    kvm = platform.accel.name == "kvm"
    image = platform.image
    khz = None if kvm else tsc_khz(Path("/proc/cpuinfo").read_text())  # KVM tells the guest by itself
    append = f"{image.kernel_args(khz)} {config.kernel_args}".strip()
    log = f"logfile={_escaped(paths.console)},logappend=on"
    # shared and sealed: the daemon maps the memory. Of a memfd it would get the descriptor without share=on too.
    kind, share = ("memfd", "on") if config.share_memory else ("ram", "off")
    command = [
        *platform.qemu.command(),
        *("-name", config.name),
        *("-nodefaults", "-no-user-config", "-display", "none"),
        *(
            "-machine",
            "q35,memory-backend=ram,i8042=off,hpet=off,smbus=off,sata=off,vmport=off,smm=off,graphics=off",
        ),
        *("-accel", "kvm" if kvm else "tcg,thread=multi,tb-size=64"),
        *("-cpu", "host" if kvm else "max"),
        *("-smp", str(config.vcpus)),
        *("-m", f"{config.memory_mib}M"),
        *("-object", f"memory-backend-{kind},id=ram,size={config.memory_mib}M,share={share}"),
        *("-device", "virtio-serial-pci,id=serial,max_ports=2,addr=2"),
        *("-chardev", f"socket,id=agent,path={_escaped(paths.agent)},server=on,wait=off"),
        *("-device", f"virtserialport,chardev=agent,name={AGENT_PORT}"),
        *("-chardev", f"socket,id=console,path={_escaped(paths.keyboard)},server=on,wait=off,{log}"),
        *("-serial", "chardev:console"),
        *("-qmp", f"unix:{_escaped(paths.qmp)},server=on,wait=off"),
    ]
    command += [*_port_options(root_ports(config)), *_disk_options(config.disks)]
    command += ["-kernel", str(image.kernel), "-append", append]
    if image.initrd is not None:
        command += ["-initrd", str(image.initrd)]
    command += config.qemu_args
    if incoming:
        command += ["-incoming", "defer", "-S"]
    return command


def _port_options(count: int) -> Iterator[str]:
    for port in range(count):
        place = f"chassis={port + 1},slot={port + 1},addr={FIRST_PORT_SLOT + port:#x}"
        yield from ("-device", f"pcie-root-port,id=rp{port},{place},io-reserve=0")


def _disk_options(disks: Sequence[DiskConfig]) -> Iterator[str]:
    for number, disk in enumerate(disks):
        form = "qcow2" if disk.path.suffix == ".qcow2" else "raw"
        access = "on" if disk.read_only else "off"
        yield from ("-drive", f"file={_escaped(disk.path)},if=none,id=disk{number},format={form},read-only={access}")
        yield from ("-device", f"virtio-blk-pci,drive=disk{number}")


def device_json(socket: Path, identifier: str, port: int) -> dict[str, Any]:
    """The arguments of ``device_add``, and of ``-device`` as JSON, for one vfio-user controller."""
    return {
        "driver": "vfio-user-pci",
        "id": identifier,
        "bus": f"rp{port}",
        "socket": {"type": "unix", "path": str(socket)},
        "x-msg-timeout": MESSAGE_TIMEOUT_MS,
    }


def root_ports(config: VmConfig) -> int:
    """How many root ports the VM has: one for each controller, and some to spare."""
    if len(config.dpus) > ROOT_PORTS_MAX:
        raise EmuError(
            f"{config.name} has {len(config.dpus)} controllers; a VM takes {ROOT_PORTS_MAX}", "use another VM"
        )
    return max(ROOT_PORTS_MIN, len(config.dpus))


def tsc_khz(cpuinfo: str) -> int | None:
    """The host's TSC rate; TCG hands that counter to the guest. None where it does not run at one known rate.

    Linux sets loops_per_jiffy from the TSC rate, and bogomips is twice that in MHz (arch/x86/kernel/tsc.c);
    "cpu MHz" is the clock of the moment.
    """
    values = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in cpuinfo.splitlines())}
    if "constant_tsc" not in values.get("flags", "").split() or "bogomips" not in values:
        return None
    return round(float(values["bogomips"]) * 500)


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")  # QEMU's own rule in option values


def panic_lines(console: str) -> list[str]:
    """The lines to show of a panic: the last ones, but never without the one that says why."""
    lines = console.splitlines()
    panic = next(number for number, line in enumerate(lines) if _PANIC in line)
    start = max(0, min(panic, len(lines) - CONSOLE_LINES))
    return lines[start : start + CONSOLE_LINES]


# ---- patience


class Patience:
    """A deadline in time that a process really had, so that a loaded host does not end a good boot.

    It is over when the process has used ``budget_s`` of CPU, or was idle (it did not want the CPU) for as
    long, or ten times as much has passed on the wall.
    """

    IDLE_SHARE = 0.03  # of one CPU; a guest that does nothing uses 1-2 % under TCG

    def __init__(self, budget_s: float, cpu_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self.budget_s = budget_s
        self._cpu_s = cpu_s
        self._clock = clock
        self._start_cpu_s = self._last_cpu_s = cpu_s()
        self._start_s = self._last_s = clock()
        self._idle_s = 0.0

    def over(self) -> str:
        """Why it is over, or "" while it is not. To be asked as often as you like."""
        now_s, cpu_s = self._clock(), self._cpu_s()
        if now_s - self._last_s < 1.0:  # the kernel counts CPU time in steps of 10 ms
            return ""
        if cpu_s - self._last_cpu_s < self.IDLE_SHARE * (now_s - self._last_s):
            self._idle_s += now_s - self._last_s
        self._last_s, self._last_cpu_s = now_s, cpu_s
        if cpu_s - self._start_cpu_s > self.budget_s:
            return f"after {cpu_s - self._start_cpu_s:.0f} s of CPU time"
        if self._idle_s > self.budget_s:
            return f"after {self._idle_s:.0f} s in which it did nothing"
        if now_s - self._start_s > 10 * self.budget_s:
            return f"after {now_s - self._start_s:.0f} s"
        return ""


# ---- the machine


class Vm:
    """A VM and its life. ``directory``: for sockets, short; ``out``: for logs. Both exist."""

    def __init__(
        self, config: VmConfig, platform: Platform, directory: Path, out: Path, ledger: Ledger | None = None
    ) -> None:
        self.config = config
        self.platform = platform
        self.ledger = ledger
        self.directory = directory
        self.out = out
        self.paths = VmPaths.below(directory, out)
        self.attached: list[Attached] = []
        self.restored = False
        self._process: Process | None = None
        self._qmp: QMPClient | None = None
        self._guest: Guest | None = None
        self._keyboard: asyncio.StreamWriter | None = None
        self._console_from = 0  # where this boot begins in the console log

    # -- state

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def guest(self) -> Guest:
        """The agent in the guest."""
        return _needed(self._guest, self.name)

    @property
    def qmp(self) -> QMPClient:
        """The connection to QEMU's monitor, for what this class does not offer."""
        return _needed(self._qmp, self.name)

    @property
    def process(self) -> Process:
        """The QEMU process: ``pid``, ``cpu_s()``, ``wait()``."""
        return _needed(self._process, self.name)

    @property
    def boot_patience_s(self) -> float:
        return BOOT_PATIENCE_S[self.platform.accel.name]

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def device(self, identifier: str) -> Attached:
        """The controller plugged in under ``identifier``, in a lab "DPU.CONTROLLER"."""
        for one in self.attached:
            if one.id == identifier:
                return one
        plugged = ", ".join(one.id for one in self.attached)
        raise EmuError(f"{self.name} has no controller {identifier}", f"it has: {plugged}")

    def console_tail(self, lines: int = CONSOLE_LINES) -> list[str]:
        """The last lines that the guest wrote to its serial console."""
        return tail(self.paths.console, lines)

    def _boot_console(self) -> str:
        """All that the console has shown since this boot began."""
        return _from(self.paths.console, self._console_from).decode(errors="replace")

    def error(self, message: str, hint: str = "", console: Sequence[str] | None = None) -> VmError:
        """An error of this VM with what its logs say."""
        lines = self.console_tail() if console is None else console
        return VmError(f"{self.name}: {message}", hint, lines, tail(self.out / "qemu.log", 10))

    # -- life

    async def start(self, restore: Path | None = None) -> None:
        """Start QEMU and wait for the agent; ``restore``: the RAM file of a template snapshot."""
        assert not self.running, f"{self.name} runs already"
        command = qemu_command(self.config, self.platform, self.paths, incoming=restore is not None)
        (self.out / "qemu.txt").write_text(shlex.join(command) + "\n")
        for path in (self.paths.qmp, self.paths.agent, self.paths.keyboard):
            path.unlink(missing_ok=True)
        if self._process is None:  # the first start: what is there is another lab's
            for path in (self.paths.console, self.out / "qemu.log"):
                path.unlink(missing_ok=True)
        self._console_from = _size(self.paths.console)
        self.restored = restore is not None
        self.attached = []
        self._process = Process.spawn(
            command,
            log=self.out / "qemu.log",
            what=f"qemu {self.name}",
            ledger=self.ledger,
        )
        try:
            await self._race(self._bring_up(restore), self.boot_patience_s, "is not ready")
        except BaseException as error:
            await self.kill()
            if isinstance(error, QMPError):
                error = self.error(f"QEMU refuses to start the guest: {error}")
            if isinstance(error, VmError) and not error.hint:
                error.hint = self._own_parts() or f"its console is {self.paths.console}"
            raise error

    def _own_parts(self) -> str:
        """What of the VM is the operator's, and so may be why it does not start."""
        parts = [key for key in ("qemu_args", "kernel", "kernel_args", "disks") if getattr(self.config, key)]
        return f"check the VM's own {', '.join(parts)}" if parts else ""

    async def _bring_up(self, restore: Path | None) -> None:
        self._qmp = QMPClient(self.name)
        await self._qmp.connect(await _connection(self.paths.qmp))
        if restore is not None:
            await self.migrate("migrate-incoming", restore)
            await self._qmp.execute("cont")
        await self._meet()
        if restore is not None:
            await self.guest.set_clock()
            await self.guest.reseed()

    async def _meet(self) -> None:
        """Find the agent; a guest of the project's image is named after its VM."""
        self._guest = await Guest.connect(self.paths.agent)
        if self.config.kernel is None:
            await self._guest.write_file("/proc/sys/kernel/hostname", self.name.encode())
            await self._guest.write_file("/etc/hosts", f"127.0.0.1 localhost {self.name}\n::1 localhost\n".encode())

    async def migrate(self, command: str, ram: Path) -> None:
        """Save into (``migrate``) or load from (``migrate-incoming``) the file ``ram``; CPUs are stopped."""
        capabilities = [{"capability": name, "state": True} for name in ("events", "mapped-ram")]
        await self.qmp.execute("migrate-set-capabilities", {"capabilities": capabilities})
        with self.qmp.listener("MIGRATION") as events:
            await self.qmp.execute(command, {"uri": f"file:{ram}"})
            async for event in events:  # "setup", "active", then how it ended
                status = cast(dict[str, Any], event["data"])["status"]
                if status == "completed":
                    return
                if status in ("failed", "cancelled"):
                    raise self.error(f"{command} {status}")

    async def attach(
        self, socket: Path, identifier: str | None = None, namespaces: int = 1, port: int | None = None
    ) -> Attached:
        """Plug in the controller behind a vfio-user ``socket``; returns when ``namespaces`` are in /dev."""
        port = self._free_port() if port is None else port
        return await self.plug(device_json(socket, identifier or f"nvme{port}", port), port, namespaces)

    async def plug(self, device: Mapping[str, Any], port: int, namespaces: int = 1) -> Attached:
        """``device_add`` of any NVMe controller on root port ``port``."""
        try:
            await self._race(self.qmp.execute("device_add", dict(device)), PLUG_PATIENCE_S, "device_add hangs")
        except QMPError as error:
            raise self.error(f"cannot plug in {device['id']}: {error}") from error
        controller, names = await self._await_controller(port, namespaces)
        attached = Attached(str(device["id"]), port, device, controller, names)
        self.attached.append(attached)
        return attached

    async def detach(self, one: Attached) -> None:
        """``device_del``: returns when the guest has let go of the controller, and QEMU of the connection.

        QEMU (seen with 11.1) aborts when it unplugs a vfio-user device with MSI-X, so such a one is refused.
        """
        argv = ["sh", "-c", f"cat /sys/class/nvme/{one.controller}/device/msi_irqs/*"]
        kinds = await self.exec(argv, timeout_s=PLUG_PATIENCE_S, what=f"does not know {one.controller}")
        if one.device["driver"] == "vfio-user-pci" and b"msix" in kinds.stdout:
            raise self.error(
                f"{one.id} has MSI-X: QEMU aborts when it is unplugged", "give its listener disable_msix"
            )
        with self.qmp.listener(("DEVICE_DELETED", "DEVICE_UNPLUG_GUEST_ERROR")) as events:
            await self.qmp.execute("device_del", {"id": one.id})
            await self._race(self._deleted(events, one.id), UNPLUG_PATIENCE_S, f"does not let go of {one.id}")
        self.attached.remove(one)

    async def _deleted(self, events: EventListener, identifier: str) -> None:
        async for event in events:
            if cast(dict[str, Any], event["data"]).get("device") == identifier:
                if event["event"] == "DEVICE_DELETED":
                    return
                raise self.error(f"the guest does not let go of {identifier}")

    def _free_port(self) -> int:
        taken = {one.port for one in self.attached}
        for port in range(root_ports(self.config)):
            if port not in taken:
                return port
        raise EmuError(f"{self.name} has no free root port", f"a VM takes {root_ports(self.config)} controllers here")

    async def _await_controller(self, port: int, namespaces: int) -> tuple[str, tuple[str, ...]]:
        slot = f"0000:00:{FIRST_PORT_SLOT + port:02x}.0"
        argv = ["sh", "-c", _AWAIT_CONTROLLER, "await-controller", slot, str(namespaces)]
        result = await self.exec(argv, timeout_s=PLUG_PATIENCE_S, what=f"sees no controller on port {port}")
        controller, *found = result.stdout.decode().split()
        by_nsid = sorted((int(nsid), name) for nsid, _, name in (one.partition(":") for one in found))
        return controller, tuple(name for _, name in by_nsid)

    async def exec(self, argv: Sequence[str], *, timeout_s: float, what: str = "", **more: Any) -> ExecResult:
        """Run a program in the guest, see ``Guest.exec``; also ends when QEMU does or the guest panics.

        ``timeout_s``: a quiet host's; math.inf is for ever.
        """
        doing = what or f"has not finished {shlex.join(argv)[:60]}"
        return await self._race(self.guest.exec(argv, **more), timeout_s, doing)

    async def type(self, keys: bytes) -> None:
        """Type into the serial console; what it shows is in the console log."""
        if self._keyboard is None or self._keyboard.is_closing():
            _needed(self._qmp, self.name)
            reader, self._keyboard = await asyncio.open_unix_connection(self.paths.keyboard)
            self._listening = asyncio.ensure_future(_drain(reader))  # QEMU waits for a listener that does not listen
        self._keyboard.write(keys)
        await self._keyboard.drain()

    async def reboot(self) -> None:
        """Reboot from inside, in order, and wait until the agent and every controller are back."""
        with self.qmp.listener("RESET") as resets:
            asking = asyncio.ensure_future(self.guest.exec(["reboot"], timeout_s=self.boot_patience_s))
            await self._race(resets.get(), self.boot_patience_s, "does not reboot")
        await _drop(asking)
        await self.come_back()

    async def come_back(self) -> None:
        """After a reset of the machine: wait until the agent and every controller are there again."""
        self._console_from = _size(self.paths.console)
        await self._race(self._reconnect(), self.boot_patience_s, "is not back after its reboot")
        self.attached = [await self._seen_again(one) for one in self.attached]

    async def _reconnect(self) -> None:
        await self.guest.close("the guest was reset")
        await self._meet()

    async def _seen_again(self, one: Attached) -> Attached:
        controller, names = await self._await_controller(one.port, len(one.namespaces))
        return Attached(one.id, one.port, one.device, controller, names)

    async def power_cycle(self) -> None:
        """Take the power away: kill QEMU, boot a new one, plug the same controllers in again."""
        before = self.attached
        await self.kill()
        await self.start()
        for one in before:
            await self.plug(one.device, one.port, len(one.namespaces))

    async def kill(self) -> None:
        """SIGKILL, as a crash of QEMU would be."""
        if self._process is not None:
            await self._process.kill()
        await self._disconnect()

    async def stop(self) -> None:
        """End QEMU in order (the guest is not asked), or not in order if it does not listen."""
        if self._qmp is not None and self.running:
            with contextlib.suppress(QMPError, OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._qmp.execute("quit"), 5)
                await asyncio.wait_for(self.process.wait(), 10)
        if self._process is not None:
            await self._process.terminate()
        await self._disconnect()

    async def _disconnect(self) -> None:
        if self._keyboard is not None:
            self._keyboard.close()
            await _drop(self._listening)
        if self._guest is not None:
            await self._guest.close()
        if self._qmp is not None:
            with contextlib.suppress(QMPError, OSError, EOFError):
                await self._qmp.disconnect()
        self._guest = self._qmp = self._keyboard = None

    # -- readiness

    async def _race(self, work: Awaitable[_T], budget_s: float, problem: str) -> _T:
        """``work`` against the end of QEMU, a panic of the guest, and patience."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self.process.wait())
        watch = asyncio.ensure_future(self._watch(budget_s, problem))
        try:
            await asyncio.wait((task, ended, watch), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled() and isinstance(task.exception(), OSError | EOFError | QMPError):
                await asyncio.wait((ended,), timeout=0.5)  # a broken connection: is it the end of QEMU?
            if ended.done():
                raise self.error(f"QEMU ended with {_exit_text(ended.result())}")
            return task.result() if task.done() else watch.result()
        finally:
            for one in (task, ended, watch):
                await _drop(one)

    async def _watch(self, budget_s: float, problem: str) -> NoReturn:
        patience = Patience(budget_s, self.process.cpu_s, asyncio.get_running_loop().time)
        while not (over := patience.over()):
            if _PANIC in self._boot_console():
                await asyncio.sleep(0.25)  # for the rest of its trace
                raise self.error("the guest panicked", console=panic_lines(self._boot_console()))
            await asyncio.sleep(0.25)
        raise self.error(f"{problem} {over}")


# Prints the controller and NSID:NAME of its namespaces: Linux scans them in parallel and numbers them as they come.
# With multipath, the namespace of path nvme0c1n1 is /dev/nvme0n1.
_AWAIT_CONTROLLER = r"""
cd /sys/bus/pci/devices
while :; do
  for nvme in $1/0000:*/nvme/nvme*; do
    [ -r "$nvme/state" ] && read -r state < "$nvme/state" && [ "$state" = live ] || continue
    found=0 names=
    for path in "$nvme"/nvme*n*; do
      name=${path##*/}
      case $name in nvme*c*n*) name=${name%%c*}n${name##*n} ;; esac
      [ -b "/dev/$name" ] && read -r nsid < "/sys/block/$name/nsid" || continue
      found=$((found + 1)) names="$names $nsid:$name"
    done
    [ $found -ge $2 ] && echo "${nvme##*/}$names" && exit
  done
  sleep 0.02
done
"""


def _needed(thing: _T | None, name: str) -> _T:
    if thing is None:
        raise EmuError(f"{name} does not run", "start it first")
    return thing


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def _connection(path: Path) -> socket.socket:
    """Connected to QEMU's socket, which it makes in its first milliseconds."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):  # not bound yet, not listening yet
            connection.close()
            await asyncio.sleep(0.005)
        else:
            return connection


async def _drain(reader: asyncio.StreamReader) -> None:
    """Read and drop until the end."""
    with contextlib.suppress(OSError):
        while await reader.read(65536):
            pass


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""


async def _drop(future: asyncio.Future[Any]) -> None:
    """Cancel it and wait for its end; its outcome was either read or is of no interest."""
    future.cancel()
    await asyncio.wait((future,))
    if not future.cancelled():
        future.exception()  # asyncio complains about one that nobody looked at
