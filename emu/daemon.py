"""One DPU process, `dpud` or SPDK's `nvmf_tgt`: started, configured over JSON-RPC, ended.

    dpu = Dpu(DpuConfig("card", (ControllerConfig("fast"),)), directory, out, files)
    await dpu.start()
    await dpu.configure()                      # transport, back ends, subsystems, namespaces, listeners
    await vm.attach(dpu.socket("fast"))
    await dpu.rpc("bdev_get_bdevs")
    await dpu.stop()

Parameters: ``size`` and ``block_size`` in bytes.
Limits: a file of the lab's own is sparse: a full disk shows when the guest writes, as an NVMe error.
Errors: DpuError with the last lines of the daemon's log; ``code`` is the JSON-RPC error code where there is one.
Source: SPDK's JSON-RPC methods, through dpu.spdk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import stat
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpu.errors import EmuError, RpcError
from dpu.spdk import Client
from emu.ledger import Ledger
from emu.paths import socket_path
from emu.process import Process, tail, tree_cpu_s

START_LIMIT_S = 300.0  # the first start compiles the pollers, on a loaded host for minutes
RPC_LIMIT_S = 60.0
_SOCKET_POLL_S = 0.05
_NAMESPACES_MAX = 32  # of a subsystem whose maker does not say it
_FIXES = {  # of an RPC that fails, by its code: -errno
    -errno.ENOMEM: 'make the namespace smaller, or take backend = "file"',
    -errno.EBUSY: "end the lab or the program that uses the file, or give another path",
    -errno.EACCES: "see the file's permissions, or give another path",
}
_RESTART = re.compile(r"worker \d+ died \(.*\), \d+ serves after ([\d.]+) ms")  # dpu/keeper.py


Engine = Literal["dpud", "spdk"]

TRANSPORT_OPTIONS = ("force_mappable_bar0", "disable_mappable_bar0", "disable_shadow_doorbells")
LISTENER_OPTIONS = ("disable_msix", "allow_unsealed_memory")
OWN_OPTIONS = ("force_mappable_bar0", *LISTENER_OPTIONS)
"""Those that SPDK does not have."""


@dataclass(frozen=True)
class NamespaceConfig:
    """``size``, ``block_size`` in bytes. ``path``: only for "file"; None is a new file of the lab's own.

    ``group``: it is a volume of this group of its DPU; then only ``size`` and ``thin`` count.
    """

    backend: Literal["memory", "null", "file"] = "memory"
    size: int = 1 << 30
    block_size: int = 512
    path: Path | None = None
    group: str = ""
    thin: bool = False
    limits: tuple[tuple[str, int], ...] = ()  # of dpu.qos.Limits


@dataclass(frozen=True)
class GroupConfig:
    """A group of volumes on a back end of its own. ``size``: bytes for volumes; ``cluster_size`` in bytes."""

    name: str
    backend: Literal["memory", "file"] = "memory"
    size: int = 1 << 30
    block_size: int = 512
    cluster_size: int = 1 << 20

    @property
    def base(self) -> NamespaceConfig:
        """The back end; a cluster of it is the group's own."""
        return NamespaceConfig(self.backend, self.size + self.cluster_size, self.block_size)


@dataclass(frozen=True)
class ControllerConfig:
    """One subsystem with one vfio-user socket. NSIDs are 1, 2, ... in the order given."""

    name: str
    namespaces: tuple[NamespaceConfig, ...] = (NamespaceConfig(),)
    serial: str = ""  # "": derived from the DPU's and the controller's name
    model: str = "dpu-emu"
    options: tuple[str, ...] = ()  # of LISTENER_OPTIONS


@dataclass(frozen=True)
class DpuConfig:
    """``cpus``: host CPUs of the pollers as a list, "0,2-3"; "" leaves the choice to the daemon.

    ``engine``: our ``dpud``, or the ``nvmf_tgt`` of the user's own SPDK (variable SPDK_DIR: its built source tree).
    ``options``: of TRANSPORT_OPTIONS.
    """

    name: str
    controllers: tuple[ControllerConfig, ...] = ()
    cpus: str = ""
    engine: Engine = "dpud"
    options: tuple[str, ...] = ()
    groups: tuple[GroupConfig, ...] = ()


class DpuError(EmuError):
    """An error of a DPU; ``log`` holds the last lines of the daemon's log."""

    def __init__(self, message: str, hint: str, log: Sequence[str], code: int | None = None) -> None:
        super().__init__(message, hint)
        self.log = list(log)
        self.code = code

    def __str__(self) -> str:
        lines = "".join(f"\n  {line}" for line in self.log)
        return super().__str__() + (f"\nlast lines of dpud's log:{lines}" if lines else "")


# ---- pure: what is run and what is asked for; --dry-run prints it


def daemon_command(config: DpuConfig, rpc: Path) -> list[str]:
    """The command line of the DPU's daemon, whose JSON-RPC socket is ``rpc``.

    :raises EmuError: engine "spdk" without a built SPDK
    """
    cpus = ["-m", f"[{config.cpus}]"] if config.cpus else []
    if config.engine == "spdk":
        # No PCI: the devices of the host are not for this lab. No locks: its neighbours may use the same CPUs.
        return [str(_nvmf_tgt()), "-r", str(rpc), *cpus, "--no-pci", "--disable-cpumask-locks"]
    return [sys.executable, "-P", "-m", "dpu.daemon", "-r", str(rpc), *cpus]


def _nvmf_tgt() -> Path:
    folder = os.environ.get("SPDK_DIR")
    if not folder:
        raise EmuError('engine = "spdk" runs your own SPDK, and SPDK_DIR is not set', "set it to SPDK's source tree")
    program = Path(folder).absolute() / "build/bin/nvmf_tgt"
    if not os.access(program, os.X_OK) or not program.is_file():
        raise EmuError(
            f"there is no program {program}",
            "build SPDK there: ./configure --with-vfio-user && make; or set SPDK_DIR to another tree",
        )
    return program


def nqn(dpu: str, controller: str) -> str:
    """The subsystem's name (NVMe base 2.0, 4.5); .internal is reserved for private use."""
    return f"nqn.2026-11.internal.dpu-emu:{dpu}:{controller}"


def bdev_name(controller: str, nsid: int) -> str:
    """The back end of a namespace."""
    return f"{controller}.{nsid}"


def listener_directory(directory: Path, controller: str) -> Path:
    """SPDK's ``traddr`` for VFIOUSER; the socket in it is called ``cntrl``."""
    return directory / controller


def backing_file(config: DpuConfig, controller: ControllerConfig, nsid: int, files: Path) -> Path:
    """The user's file of a namespace, or where the lab makes one."""
    own = files / f"{config.name}.{controller.name}.{nsid}.raw"
    return (controller.namespaces[nsid - 1].path or own).absolute()


def group_file(config: DpuConfig, group: GroupConfig, files: Path) -> Path:
    """Where the lab makes the file of a group."""
    return (files / f"{config.name}.{group.name}.raw").absolute()


def rpc_calls(config: DpuConfig, directory: Path, files: Path) -> list[tuple[str, dict[str, Any]]]:
    """The JSON-RPC calls that make a bare dpud (or SPDK's nvmf_tgt) what ``config`` says, in order."""
    transport = {"trtype": "VFIOUSER", **dict.fromkeys(config.options, True)}
    calls: list[tuple[str, dict[str, Any]]] = [("nvmf_create_transport", transport)]
    for group in config.groups:
        base = f"{group.name}.base"
        calls.append(_bdev_call(base, group.base, group_file(config, group, files)))
        store = {"bdev_name": base, "lvs_name": group.name, "cluster_sz": group.cluster_size}
        calls.append(("bdev_lvol_create_lvstore", store))
    for controller in config.controllers:
        name = nqn(config.name, controller.name)
        identity: dict[str, Any] = {
            "nqn": name,
            "serial_number": controller.serial or hashlib.sha256(name.encode()).hexdigest()[:20],
            "model_number": controller.model,
            "allow_any_host": True,
        }
        if len(controller.namespaces) > _NAMESPACES_MAX:
            identity["max_namespaces"] = len(controller.namespaces)
        calls.append(("nvmf_create_subsystem", identity))
        for nsid, namespace in enumerate(controller.namespaces, 1):
            bdev = bdev_name(controller.name, nsid)
            calls.append(_bdev_call(bdev, namespace, backing_file(config, controller, nsid, files)))
            alias = f"{namespace.group}/{bdev}" if namespace.group else bdev
            if namespace.limits:
                calls.append(("bdev_set_qos_limit", {"name": alias, **dict(namespace.limits)}))
            add = {"nqn": name, "namespace": {"bdev_name": alias, "nsid": nsid}}
            calls.append(("nvmf_subsystem_add_ns", add))
        folder = str(listener_directory(directory, controller.name))
        address = {"trtype": "VFIOUSER", "traddr": folder, "trsvcid": "0"}
        listener = {"nqn": name, "listen_address": address, **dict.fromkeys(controller.options, True)}
        calls.append(("nvmf_subsystem_add_listener", listener))
    return calls


def _bdev_call(bdev: str, namespace: NamespaceConfig, path: Path) -> tuple[str, dict[str, Any]]:
    if namespace.group:
        volume = {"lvs_name": namespace.group, "lvol_name": bdev, "size_in_mib": namespace.size >> 20}
        return "bdev_lvol_create", {**volume, "thin_provision": namespace.thin}
    if namespace.backend == "file":
        file = {"filename": str(path), "name": bdev, "block_size": namespace.block_size}
        return "bdev_aio_create", file
    method = {"memory": "bdev_malloc_create", "null": "bdev_null_create"}[namespace.backend]
    num_blocks = namespace.size // namespace.block_size
    return method, {"name": bdev, "num_blocks": num_blocks, "block_size": namespace.block_size}


# ---- the daemon


class Dpu:
    """A DPU and its life. ``directory``: sockets, short; ``out``: logs; ``files``: back ends of the lab's own."""

    def __init__(
        self, config: DpuConfig, directory: Path, out: Path, files: Path, ledger: Ledger | None = None
    ) -> None:
        self.config = config
        self.directory = directory
        self.files = files
        self.ledger = ledger
        self.program = "dpud" if config.engine == "dpud" else "nvmf_tgt"
        self.log = out / f"{self.program}.log"
        self.rpc_socket = socket_path(directory, "rpc")
        self._process: Process | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def process(self) -> Process:
        """The keeper process."""
        if self._process is None:
            raise EmuError(f"{self.name} does not run", "start it first")
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def cpu_s(self) -> float:
        """CPU seconds of the keeper and its workers, those that have ended included."""
        return tree_cpu_s(self.pid)

    def socket(self, controller: str) -> Path:
        """The vfio-user socket of a controller."""
        return listener_directory(self.directory, controller) / "cntrl"

    def namespaces(self, controller: str) -> int:
        """How many namespaces the controller is configured with."""
        return next(len(one.namespaces) for one in self.config.controllers if one.name == controller)

    def restarts_ms(self) -> list[float]:
        """For each worker that died and was replaced: how long nobody served, as the keeper has logged it."""
        with contextlib.suppress(FileNotFoundError):
            return [float(pause) for pause in _RESTART.findall(self.log.read_text(errors="replace"))]
        return []

    def error(self, message: str, hint: str = "", code: int | None = None) -> DpuError:
        """An error of this DPU with what its log says."""
        return DpuError(f"{self.name}: {message}", hint, tail(self.log), code)

    async def start(self) -> None:
        """Start the daemon and wait until it answers; it has no configuration yet."""
        assert not self.running, f"{self.name} runs already"
        command = daemon_command(self.config, self.rpc_socket)
        self.rpc_socket.unlink(missing_ok=True)
        if self._process is None:  # the first start: what is there is another lab's
            self.log.unlink(missing_ok=True)
        if self.config.engine == "spdk":
            self._spawn(command)
            ready: Coroutine[Any, Any, object] = self._answers()
        else:
            reading, theirs = os.pipe()
            try:
                self._spawn([*command, "--ready-fd", str(theirs)], theirs)
            except BaseException:
                os.close(reading)
                raise
            finally:
                os.close(theirs)
            ready = _read_some(reading)
        try:
            said = await asyncio.wait_for(ready, START_LIMIT_S)
        except TimeoutError:
            await self.process.kill()
            raise self.error(
                f"{self.program} is not ready after {START_LIMIT_S:.0f} s", f"its log is {self.log}"
            ) from None
        except BaseException:
            await self.process.kill()
            raise
        if not said:
            code = await self.process.terminate()
            raise self.error(f"{self.program} ended with {code} before it was ready", f"its log is {self.log}")

    def _spawn(self, command: list[str], *fds: int) -> None:
        what = f"{self.program} {self.name}"
        self._process = Process.spawn(command, log=self.log, what=what, ledger=self.ledger, pass_fds=fds)

    async def _answers(self) -> bool:
        """Wait until SPDK's target has initialized itself; False when it has ended instead."""
        while self.running:
            try:
                await self.rpc("framework_wait_init")
            except DpuError:
                await asyncio.sleep(_SOCKET_POLL_S)  # nothing tells when the socket is there
            else:
                return True
        return False

    async def configure(self) -> None:
        """Make it what ``config`` says; makes the back ends' files first."""
        for group in self.config.groups:
            if group.backend == "file":
                make_file(group_file(self.config, group, self.files), group.base.size)
        for controller in self.config.controllers:
            listener_directory(self.directory, controller.name).mkdir(mode=0o700, exist_ok=True)
            for nsid, namespace in enumerate(controller.namespaces, 1):
                if namespace.backend == "file":
                    make_file(backing_file(self.config, controller, nsid, self.files), namespace.size)
        for method, parameters in rpc_calls(self.config, self.directory, self.files):
            await self.rpc(method, **parameters)

    async def rpc(self, method: str, /, **parameters: Any) -> Any:
        """One JSON-RPC call."""
        client = Client(self.rpc_socket, timeout_s=RPC_LIMIT_S)

        def call() -> Any:
            with client:
                return client.call(method, parameters)

        try:
            return await asyncio.to_thread(call)
        except asyncio.CancelledError:
            client.abort()  # lets the thread go
            raise
        except RpcError as error:
            text = f"{method}: {error.message} ({error.code})"
            raise self.error(text, _FIXES.get(error.code, ""), error.code) from error
        except EmuError as error:
            raise self.error(error.message, error.hint) from error

    async def kill(self) -> None:
        """SIGKILL to the keeper."""
        await self.process.kill()

    async def stop(self) -> None:
        """End it in order, or not in order if it does not listen."""
        if self._process is not None:
            await self._process.terminate(grace_s=10)


def make_file(path: Path, size: int) -> None:
    """A sparse file of ``size`` bytes; one that is there must have that size, or be a block device."""
    if path.is_relative_to("/dev") and not path.is_relative_to("/dev/shm") and not path.exists():
        raise EmuError(f"there is no device {path}", "lsblk lists the disks of this machine")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        found = path.stat()
        if not stat.S_ISBLK(found.st_mode) and found.st_size != size:
            raise EmuError(
                f"{path} has {found.st_size} bytes, the namespace {size}",
                "give its real size, or another path",
            ) from None
    except OSError as error:
        raise EmuError(f"cannot make {path}: {error.strerror}", "choose another path") from error
    else:
        try:
            os.truncate(fd, size)
        except OSError as error:
            path.unlink()
            raise EmuError(f"cannot make {path} of {size} bytes: {error.strerror}", "make it smaller") from error
        finally:
            os.close(fd)


async def _read_some(fd: int) -> bytes:
    """Whatever comes first through the pipe, b"" at its end; closes it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
        return os.read(fd, 4096)
    finally:
        loop.remove_reader(fd)
        os.close(fd)
