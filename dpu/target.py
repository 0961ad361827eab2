"""The target: back ends, subsystems, namespaces and listeners, and the rules for changing them.

Use: ``Target(host)``; its async methods stand behind the RPCs of ``dpu.rpc.methods``. After a worker has
adopted: ``from_config(config, fds)``, then ``await recover(listeners)`` before clients are served.

Every change is one step from one stored configuration to the next (``Host.commit``), in an order that
survives SIGKILL at any point: what a configuration names is made before it is committed (memfd stashed,
socket listening), what it no longer names is taken down afterwards. What a kill left over is dropped by
``from_config`` and ``recover``. Changes are serial: one at a time, under a lock.

Errors: ``RpcError`` with SPDK's code and text; what it does not say goes to the log with its fix.
Source: recorded answers of SPDK v26.05 (tests/conformance/spdk_rpc_vectors.json); NVMe Base 2.0, 4.5 for
NQNs.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import hashlib
import itertools
import logging
import os
import re
import uuid as uuids
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol, cast

from dpu.backends import (
    BACKENDS,
    Backend,
    FileBackend,
    Marks,
    MemoryBackend,
    NullBackend,
    marks_key,
    os_error,
    stash_key,
)
from dpu.backends.base import SIZE_BYTES_MAX, check_geometry
from dpu.backends.file import CacheMode
from dpu.errors import RpcError
from dpu.faults import ACTIONS, Fault
from dpu.iostat import IoStat, Row
from dpu.journal import Journal, journal_key
from dpu.killpoint import killpoint
from dpu.layout import GATES, IO_QUEUES, NAMESPACES, QUEUE_ENTRIES_MAX, RULES, TRANSFER_MAX
from dpu.nvme.errors import CommandError
from dpu.nvme.interfaces import Counters, Life, NamespaceInfo
from dpu.nvme.io import blocks_of, erase
from dpu.nvme.wire import NSID_LOCATION, Status
from dpu.qos import Limits
from dpu.rpc.logs import Logs
from dpu.trace import ENTRIES_MAX, FORMATS, Part, commands
from dpu.volumes.group import Group
from dpu.volumes.interface import VolumeHost
from dpu.volumes.lvols import Lvols
from dpu.volumes.volume import Volume

log = logging.getLogger(__name__)

INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603

TRANSPORT = "VFIOUSER"
DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
MODEL_DEFAULT = "dpu-emu NVMe controller"
NAMESPACES_DEFAULT = 32
NAME_BYTES_MAX = 255
NQN_BYTES_MAX = 223
SERIAL_BYTES_MAX = 20
MODEL_BYTES_MAX = 40
SOCKET_PATH_BYTES_MAX = 107
CNTLID_MAX = 65519
MADE_PREFIX = "ns-"  # names of volumes that guests have made
CONFIG_VERSION = 1

_NQN_UUID = re.compile(r"nqn\.2014-08\.org\.nvmexpress:uuid:[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NQN_DOMAIN = re.compile(
    r"nqn\.\d{4}-(0[1-9]|1[0-2])"
    r"(\.[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)+"
    r":.+",
    re.DOTALL,
)


class Host(VolumeHost, Protocol):
    """What the target needs of the worker it runs in. Owner: dpu/worker.py."""

    @property
    def directory(self) -> str:
        """A directory of this daemon's own, for what does not outlive it; it need not be there yet."""

    def stash(self, key: str, fd: int) -> None:
        """Have the keeper hold a duplicate of ``fd`` (the caller keeps its own) under ``key``."""

    def unstash(self, key: str) -> None:
        """Have the keeper close what it holds under ``key``; unknown keys are fine."""

    async def settled(self) -> None:
        """Return when the keeper has done everything that it was told."""

    async def listen(self, key: str, path: str) -> None:
        """Have the keeper listen on the socket ``path``. OSError when it cannot."""

    async def unlisten(self, key: str) -> None:
        """Stop listening, remove the socket file, and disconnect the clients that came by it."""

    def commit(self, config: dict[str, Any]) -> None:
        """Store the configuration: a new worker sees all of it or none. May raise; then nothing is stored."""

    def namespace_added(self, subsystem: Subsystem, nsid: int) -> None:
        """The namespace is committed: serve it, tell the controllers. May raise RpcError; then it is
        undone."""

    async def namespace_changed(self, subsystem: Subsystem, nsid: int) -> None:
        """Its size, format or controllers have changed, or it is gone: return when every controller serves it so.

        Those for which something has changed are told.
        """

    def paused(self, subsystem: Subsystem) -> contextlib.AbstractAsyncContextManager[None]:
        """No I/O command of its controllers is executed inside."""

    async def subsystem_deleted(self, subsystem: Subsystem) -> None:
        """Disconnect its controllers: return when no command uses its back ends any more."""

    def controllers(self) -> list[dict[str, Any]]:
        """Per controller: ``subnqn`` and SPDK's cntlid, hostnqn, hostid, num_io_qpairs."""

    def stats(self) -> dict[str, Any]:
        """The JSON-able answer of ``dpu_get_stats``."""

    def reactors(self) -> list[dict[str, Any]]:
        """Rows of ``framework_get_reactors``."""

    def io_rows(self, nqn: str | None = None) -> list[Row]:
        """The counters of every controller, or of those of one subsystem."""

    async def trace_start(self, entries: int) -> None:
        """Trace every command from now on, the newest ``entries`` (a power of two) of each poller."""

    async def trace_stop(self) -> None:
        """Trace no more; what there is stays until the next start."""

    def trace(self) -> list[Part]:
        """What was traced, of each poller."""

    def power_lost(self, subsystem: Subsystem) -> None:
        """Its controllers have failed, until they are reset. Called inside ``paused``."""

    def clear_gate(self, number: int) -> None:
        """A gate is going to be a back end's: nothing of its last one's is left in it."""

    def gate_changed(self, name: str) -> None:
        """The gate of a back end is committed: make it what the target says of it."""

    async def release(self, number: int) -> int:
        """Let go what a rule holds or delays; how many commands."""

    def fault_counts(self, number: int) -> tuple[int, int]:
        """Matches of a rule, and how many of them it has struck."""

    def health_changed(self, backend: Backend, persistent: bool) -> None:
        """The warnings of a back end are others; ``persistent``: it has failed for good."""

    def clock(self) -> tuple[int, int]:
        """Ticks per second of the counters' clock, and its time."""

    def stop(self) -> None:
        """End the daemon cleanly."""

    async def prepare(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start a worker of other code (dpu.upgrade) beside this one. OSError when it does not come up."""

    def change_over(self) -> None:
        """End this worker; the prepared one goes on."""


@dataclass(frozen=True)
class Transport:
    """``nvmf_create_transport``'s options that mean something here.

    A client without JSON in its VERSION message (SPDK's initiator) gets its doorbell page to map, one with JSON
    (QEMU) sends its doorbells as messages or uses shadow doorbells; ``disable_mappable_bar0`` and
    ``force_mappable_bar0`` (which SPDK does not have) say the same for all.
    """

    disable_mappable_bar0: bool = False
    disable_adaptive_irq: bool = False
    disable_shadow_doorbells: bool = False
    force_mappable_bar0: bool = False

    def maps_doorbells(self, *, has_json: bool) -> bool:
        """Whether a client may map its doorbell page."""
        return self.force_mappable_bar0 or not (has_json or self.disable_mappable_bar0)


@dataclass(frozen=True)
class Namespace:
    """A back end as ``nsid`` of one subsystem. ``uuid`` and ``nguid`` are the back end's unless given.

    ``format``: bytes of a logical block where Format NVM has chosen others than the back end's, else 0. ``private``:
    at most one controller may have it. ``visible``: it is attached to every controller but those of ``exceptions``;
    else to none but those. ``made``: by Namespace Management, so its volume goes when it is deleted.
    """

    nsid: int
    backend: Backend
    uuid: uuids.UUID
    nguid: bytes
    eui64: bytes = bytes(8)
    format: int = 0
    private: bool = False
    visible: bool = True
    exceptions: frozenset[int] = frozenset()
    made: bool = False

    @property
    def block_size(self) -> int:
        return self.format or self.backend.block_size

    @property
    def num_blocks(self) -> int:
        return self.backend.size_bytes // self.block_size

    def attached(self, cntlid: int) -> bool:
        """Whether the namespace is active in this controller."""
        return self.visible != (cntlid in self.exceptions)

    def attach(self, cntlids: Iterable[int], attached: bool) -> Namespace:
        """The same with these controllers attached or detached."""
        change = self.exceptions.difference if attached == self.visible else self.exceptions.union
        return replace(self, exceptions=change(cntlids))

    def info(self, *, several: bool) -> NamespaceInfo:
        """``several``: its subsystem has more than one controller."""
        return NamespaceInfo(
            nsid=self.nsid,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            nguid=self.nguid,
            eui64=self.eui64,
            uuid=self.uuid.bytes,
            product=self.backend.product_name,
            supports_discard=self.backend.supports_discard,
            readonly=self.backend.readonly,
            warning=self.backend.warning,
            # Another controller may look while a write that a worker's death has cut is not done again yet.
            atomic_bytes=0 if several else self.backend.atomic_bytes,
            shared=several and not self.private,
        )

    def describe(self) -> dict[str, Any]:
        """The object in ``nvmf_get_subsystems``: EUI-64 only where there is one."""
        return {
            "nsid": self.nsid,
            "bdev_name": self.backend.name,
            "name": self.backend.name,
            "nguid": self.nguid.hex().upper(),
            **({"eui64": self.eui64.hex().upper()} if any(self.eui64) else {}),
            "uuid": str(self.uuid),
        }

    def to_config(self) -> dict[str, Any]:
        return {
            "nsid": self.nsid,
            "bdev_name": self.backend.name,
            "uuid": str(self.uuid),
            "nguid": self.nguid.hex(),
            "eui64": self.eui64.hex(),
            "format": self.format,
            "private": self.private,
            "visible": self.visible,
            "exceptions": sorted(self.exceptions),
            "made": self.made,
        }


@dataclass(frozen=True)
class Listener:
    """``traddr``: a directory; clients connect to the socket ``cntrl`` in it.

    ``allow_unsealed_memory``: take guest memory in files that the client may shrink. ``disable_msix``: controllers
    have one MSI vector, and QEMU can unplug them. SPDK has neither.

    ``cntlid``: of the one controller that is reached here, whoever comes; what is attached to it stays.
    """

    nqn: str
    traddr: str
    trsvcid: str
    allow_unsealed_memory: bool = False
    disable_msix: bool = False
    cntlid: int = 1

    @property
    def options(self) -> dict[str, bool]:
        """What was chosen beside the address, by the names of nvmf_subsystem_add_listener."""
        return {name: getattr(self, name) for name in ("allow_unsealed_memory", "disable_msix")}

    @property
    def key(self) -> str:
        return f"{self.nqn}|{self.traddr}"

    @property
    def path(self) -> str:
        return os.path.join(self.traddr, "cntrl")

    def describe(self) -> dict[str, Any]:
        return {"trtype": TRANSPORT, "adrfam": "unknown", "traddr": self.traddr, "trsvcid": self.trsvcid}


@dataclass
class Subsystem:
    """One NVM subsystem, with a controller for each listener. dpu.namespaces is what one of them sees of it."""

    nqn: str
    serial: str
    model: str
    max_namespaces: int = NAMESPACES_DEFAULT
    allow_any_host: bool = False  # kept and reported; a vfio-user client does not say who it is
    by_nsid: dict[int, Namespace] = field(default_factory=dict)
    listeners: dict[str, Listener] = field(default_factory=dict)
    lives: dict[int, Life] = field(default_factory=dict)  # by CNTLID
    pool: str = ""  # UUID of the group that guests make namespaces of
    pool_thin: bool = False

    @property
    def cntlids(self) -> list[int]:
        return sorted(listener.cntlid for listener in self.listeners.values())

    def namespaces(self, cntlid: int | None = None) -> list[NamespaceInfo]:
        """By rising nsid: those that are active in a controller, or all."""
        several = len(self.listeners) > 1
        return [
            self.by_nsid[nsid].info(several=several)
            for nsid in sorted(self.by_nsid)
            if cntlid is None or self.by_nsid[nsid].attached(cntlid)
        ]

    def backend(self, nsid: int) -> Backend:
        """KeyError when ``nsid`` is not allocated."""
        return self.by_nsid[nsid].backend

    def block_size(self, nsid: int) -> int:
        """KeyError when ``nsid`` is not allocated."""
        return self.by_nsid[nsid].block_size

    def describe(self) -> dict[str, Any]:
        return {
            "nqn": self.nqn,
            "subtype": "NVMe",
            "listen_addresses": [listener.describe() for listener in self.listeners.values()],
            "allow_any_host": self.allow_any_host,
            "hosts": [],
            "serial_number": self.serial,
            "model_number": self.model,
            "max_namespaces": self.max_namespaces,
            "passthrough": False,
            "min_cntlid": 1,
            "max_cntlid": CNTLID_MAX,
            "namespaces": [self.by_nsid[nsid].describe() for nsid in sorted(self.by_nsid)],
        }

    def creation(self) -> list[tuple[str, dict[str, Any]]]:
        """The RPCs, SPDK's names and parameters, that make such a subsystem in a bare daemon."""
        identity = {
            "nqn": self.nqn,
            "allow_any_host": self.allow_any_host,
            "serial_number": self.serial,
            "model_number": self.model,
            "max_namespaces": self.max_namespaces,
        }
        rows: list[tuple[str, dict[str, Any]]] = [("nvmf_create_subsystem", identity)]
        for namespace in self.by_nsid.values():
            of = {key: value for key, value in namespace.describe().items() if key != "name"}
            if not namespace.visible:
                of["no_auto_visible"] = True
            rows.append(("nvmf_subsystem_add_ns", {"nqn": self.nqn, "namespace": of}))
        for listener in self.listeners.values():
            address = {"trtype": TRANSPORT, "traddr": listener.traddr, "trsvcid": listener.trsvcid}
            chosen = {name: value for name, value in listener.options.items() if value}
            rows.append(("nvmf_subsystem_add_listener", {"nqn": self.nqn, "listen_address": address, **chosen}))
        if self.pool:
            pool = {"nqn": self.nqn, "lvs_name": self.pool, "thin_provision": self.pool_thin}
            rows.append(("nvmf_subsystem_set_ns_pool", pool))
        return rows

    def to_config(self) -> dict[str, Any]:
        return {
            "nqn": self.nqn,
            "serial_number": self.serial,
            "model_number": self.model,
            "max_namespaces": self.max_namespaces,
            "allow_any_host": self.allow_any_host,
            "namespaces": [namespace.to_config() for namespace in self.by_nsid.values()],
            "pool": [self.pool, self.pool_thin],
            "lives": {cntlid: asdict(life) for cntlid, life in self.lives.items()},
            "listeners": [
                {
                    "traddr": listener.traddr,
                    "trsvcid": listener.trsvcid,
                    "cntlid": listener.cntlid,
                    **listener.options,
                }
                for listener in self.listeners.values()
            ],
        }


class Command(NamedTuple):
    """A guest's command that changes namespaces. ``sequence``: of its in-flight entry, the same in every worker."""

    client: int
    sequence: int


class Target:
    """The whole configuration of one daemon. Read its tables freely; change them by its methods only."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.bdevs: dict[str, Backend] = {}
        self.transport: Transport | None = None
        self.subsystems: dict[str, Subsystem] = {}
        self.lvols = Lvols(self)
        self.iostat = IoStat()
        self.logs = Logs()
        self.calls: list[dict[str, Any]] = []  # of dpu.startup, still to be made
        self._managed: dict[int, tuple[int, int]] = {}  # client -> sequence and result of its guest's last change
        self._doomed: list[str] = []  # volumes of deleted namespaces, still to be deleted
        self._retired: set[int] = set()  # clients whose lives are counted, and who are not forgotten yet
        self.gates: dict[str, int] = {}  # back ends that have one, and its number
        self.limits: dict[str, Limits] = {}
        self.faults: dict[str, Fault] = {}
        self._fault_serial = 0
        self.journals: set[str] = set()  # names of back ends that have one
        self._malloc_count = 0
        self._opening: set[str] = set()  # names of back ends that are being made
        self._lock = asyncio.Lock()
        self._bdev_added = asyncio.Event()
        self._initialized = asyncio.Event()
        self._initialized.set()

    # -- stored configuration

    def to_config(self) -> dict[str, Any]:
        return {
            "version": CONFIG_VERSION,
            "initialized": self.initialized,
            "calls": self.calls,
            "logs": self.logs.to_config(),
            "malloc_count": self._malloc_count,
            "bdevs": [one.to_config() for one in self.bdevs.values() if not isinstance(one, Volume)],
            "groups": self.lvols.to_config(),
            "gates": self.gates,
            "limits": {name: limits.to_config() for name, limits in self.limits.items()},
            "faults": [fault.to_config() for fault in self.faults.values()],
            "fault_serial": self._fault_serial,
            "journals": sorted(self.journals),
            "transport": vars(self.transport) if self.transport else None,
            "subsystems": [subsystem.to_config() for subsystem in self.subsystems.values()],
            "iostat": self.iostat.to_config(),
            "retired": sorted(self._retired),
            "doomed": self._doomed,
            "managed": [[client, *done] for client, done in self._managed.items()],
        }

    def commit_counts(self) -> None:
        """Store what ``iostat`` has been told."""
        try:
            self.host.commit(self.to_config())
        except ValueError as error:  # there is no room for it: the next worker counts from where the last commit was
            log.error("I/O statistics are not stored: %s", error)

    def from_config(self, config: dict[str, Any], fds: dict[str, int]) -> None:
        """Take over from a dead worker. ``config``: of its last ``Host.commit``, or dpu.startup.first_config.

        ``fds``: everything stashed. Keys ``bdev/...``, ``marks/...`` are taken out of it: kept by the back end that
        the configuration names, closed and unstashed when it names none. Other keys are left alone.
        """
        if not config.get("initialized", True):
            self._initialized.clear()
        self.calls = config.get("calls", [])
        if "version" in config:
            self.logs = Logs.from_config(config["logs"])
            assert config["version"] == CONFIG_VERSION, config["version"]
            self._malloc_count = config["malloc_count"]
            for row in config["bdevs"]:
                backend_type = BACKENDS[row["type"]]
                backend = backend_type.from_config(row, fds.pop(stash_key(row["name"]), -1))
                self.bdevs[row["name"]] = backend
            self.lvols.from_config(config["groups"], fds)
            self.gates = config.get("gates", {})
            self.limits = {name: Limits(**row) for name, row in config.get("limits", {}).items()}
            self.faults = {row["name"]: Fault(**row) for row in config.get("faults", [])}
            self._fault_serial = config.get("fault_serial", 0)
            self._set_warnings()
            self._adopt_journals(config.get("journals", []), fds)
            self.transport = Transport(**config["transport"]) if config["transport"] else None
            for row in config["subsystems"]:
                self.subsystems[row["nqn"]] = self._subsystem_from_config(row)
            for backend in self.bdevs.values():
                marks_fd = fds.pop(marks_key(backend.name), -1)
                if marks_fd >= 0:
                    backend.marks = Marks(marks_fd)
                    self.fit_marks(backend)
            self.iostat.from_config(config["iostat"])
            self._retired = set(config["retired"])
            self._doomed = config["doomed"]
            self._managed = {client: (sequence, result) for client, sequence, result in config["managed"]}
        self.iostat.keep(self.bdevs)
        for key in [key for key in fds if key.startswith((stash_key(""), marks_key(""), journal_key("")))]:
            os.close(fds.pop(key))
            self.host.unstash(key)

    def _subsystem_from_config(self, row: dict[str, Any]) -> Subsystem:
        listeners = [Listener(row["nqn"], **item) for item in row["listeners"]]
        return Subsystem(
            nqn=row["nqn"],
            serial=row["serial_number"],
            model=row["model_number"],
            max_namespaces=row["max_namespaces"],
            allow_any_host=row["allow_any_host"],
            by_nsid={
                item["nsid"]: Namespace(
                    item["nsid"],
                    self.bdevs[item["bdev_name"]],
                    uuids.UUID(item["uuid"]),
                    bytes.fromhex(item["nguid"]),
                    bytes.fromhex(item["eui64"]),
                    item["format"],
                    item["private"],
                    item["visible"],
                    frozenset(item["exceptions"]),
                    item["made"],
                )
                for item in row["namespaces"]
                if self._there(row["nqn"], item)
            },
            listeners={listener.key: listener for listener in listeners},
            lives={int(cntlid): _life(life) for cntlid, life in row["lives"].items()},
            pool=row["pool"][0],
            pool_thin=row["pool"][1],
        )

    def _there(self, nqn: str, namespace: dict[str, Any]) -> bool:
        """Whether its back end is there; a volume is not when its group could not be adopted."""
        if (name := namespace["bdev_name"]) in self.bdevs:
            return True
        log.error("namespace %d of %s is gone with its bdev %s", namespace["nsid"], nqn, name)
        return False

    async def recover(self, listeners: Mapping[str, str]) -> None:
        """``listeners``: key -> path that the keeper has. Closes those that no subsystem names."""
        for key in list(listeners):
            if self.subsystem_of(key) is None:
                await self._quietly(self.host.unlisten(key), f"close listener {key}")
        await self.lvols.start()
        await self._delete_doomed()

    def subsystem_of(self, listener_key: str) -> Subsystem | None:
        """Whom a client that came by this listener talks to; None when the listener is gone."""
        for subsystem in self.subsystems.values():
            if listener_key in subsystem.listeners:
                return subsystem
        return None

    @contextlib.contextmanager
    def _change(self, *, faulty: bool = True) -> Iterator[None]:
        """Change the tables inside; leaving commits them. An exception puts them back as they were.

        ``faulty``: faults of metadata may strike it.
        """
        saved = copy.copy(self.bdevs), self.transport, copy.copy(self.subsystems), self._malloc_count
        groups = dict(self.lvols.groups)
        managed = dict(self._managed)
        gates = copy.copy(self.gates), copy.copy(self.limits), copy.copy(self.faults), copy.copy(self.journals)
        inner = {nqn: (dict(one.by_nsid), dict(one.listeners)) for nqn, one in self.subsystems.items()}
        try:
            yield
            self._forget_gates()
            killpoint("rpc_before_commit")
            for fault in list(self.faults.values()) if faulty else []:
                if fault.metadata and fault.strikes():
                    raise os_error(-fault.code, f"fault {fault.name}")
            self.host.commit(self.to_config())
        except BaseException:
            self.bdevs, self.transport, self.subsystems, self._malloc_count = saved
            self._managed, self.lvols.groups = managed, groups
            self.gates, self.limits, self.faults, self.journals = gates
            for nqn, (by_nsid, listeners) in inner.items():
                self.subsystems[nqn].by_nsid, self.subsystems[nqn].listeners = by_nsid, listeners
            raise
        killpoint("rpc_after_commit")

    # -- the daemon as a whole

    @property
    def initialized(self) -> bool:
        """Whether it has its back ends and subsystems, or waits for ``start_init``."""
        return self._initialized.is_set()

    async def start_init(self) -> bool:
        """End the start-up state that ``dpud --wait-for-rpc`` begins with."""
        async with self._lock:
            self._initialized.set()
            self.host.commit(self.to_config())
            return True

    async def wait_init(self) -> bool:
        return await self._initialized.wait()

    async def set_logs(self, **changes: Any) -> bool:
        """``changes``: fields of dpu.rpc.logs.Logs."""
        async with self._lock:
            self.logs = replace(self.logs, **changes)
            self.host.commit(self.to_config())
            self.logs.apply()
            return True

    def saved(self, subsystem: str) -> list[dict[str, Any]]:
        """The calls that make a bare daemon's ``subsystem`` ("bdev" or "nvmf") what this one's is."""
        if subsystem == "bdev":
            rows = [one.creation() for one in self.bdevs.values() if not isinstance(one, Volume)]
            plain = {one.name for one in self.bdevs.values() if not isinstance(one, Volume)}
            limits = {name: one.to_config() for name, one in self.limits.items() if name in plain}
            rows += [("bdev_set_qos_limit", {"name": name, **one}) for name, one in limits.items()]
        elif subsystem == "nvmf":
            rows = []
            if self.transport is not None:
                chosen = {name: value for name, value in vars(self.transport).items() if value}
                rows.append(("nvmf_create_transport", {"trtype": TRANSPORT, **chosen}))
            for one in self.subsystems.values():
                rows += one.creation()
        else:
            raise RpcError(INVALID_PARAMS, f"Subsystem '{subsystem}' not found")
        return [{"method": method, "params": params} for method, params in rows]

    # -- bdevs

    def find_bdev(self, name: str) -> Backend | None:
        """By name, or by the alias that every bdev has, its UUID; a volume's is GROUP/VOLUME."""
        backend = self.bdevs.get(name) or self.lvols.find(name)
        if backend is None:
            backend = next((one for one in self.bdevs.values() if str(one.uuid) == name.lower()), None)
        return backend

    def _users(self, backend: Backend) -> list[tuple[Subsystem, int]]:
        """The namespaces that a back end serves."""
        return [
            (subsystem, nsid)
            for subsystem in self.subsystems.values()
            for nsid, namespace in subsystem.by_nsid.items()
            if namespace.backend is backend
        ]

    def _claimed(self, backend: Backend) -> bool:
        return bool(self._users(backend)) or self.lvols.claims(backend)

    def describe_bdev(self, backend: Backend) -> dict[str, Any]:
        limits = self.limits.get(backend.name, Limits()).describe()
        return {**backend.describe(), "assigned_rate_limits": limits, "claimed": self._claimed(backend)}

    async def get_bdevs(self, name: str | None = None, timeout_ms: int = 0) -> list[dict[str, Any]]:
        """All in the order of creation, or one; waits up to ``timeout_ms`` for that one to appear."""
        if name is None:
            return [self.describe_bdev(backend) for backend in self.bdevs.values()]
        try:
            async with asyncio.timeout(timeout_ms / 1000 if timeout_ms else None):
                while (backend := self.find_bdev(name)) is None:
                    if not timeout_ms:
                        raise os_error(errno.ENODEV)
                    self._bdev_added.clear()
                    await self._bdev_added.wait()
        except TimeoutError:
            raise os_error(errno.ETIMEDOUT) from None
        return [self.describe_bdev(backend)]

    async def create_null(
        self, *, name: str, num_blocks: int, block_size: int, uuid: uuids.UUID | None = None
    ) -> str:
        return await self._add_bdev(
            name, uuid, lambda: NullBackend.create(name, block_size, num_blocks, uuid or uuids.uuid4())
        )

    async def create_memory(
        self, *, num_blocks: int, block_size: int, name: str | None = None, uuid: uuids.UUID | None = None
    ) -> str:
        """``name`` None: "Malloc" and a number."""

        def make() -> Backend:
            chosen = name if name is not None else self._next_malloc_name()
            others = self.bdevs.values()
            return MemoryBackend.create(chosen, block_size, num_blocks, uuid or uuids.uuid4(), others)

        return await self._add_bdev(name, uuid, make)

    def _next_malloc_name(self) -> str:
        while True:
            name = f"Malloc{self._malloc_count}"
            self._malloc_count += 1
            if self.find_bdev(name) is None and name not in self._opening:
                return name

    async def create_file(
        self,
        *,
        name: str,
        filename: str,
        block_size: int | None = None,
        readonly: bool = False,
        fallocate: bool = False,
        uuid: uuids.UUID | None = None,
        cache_mode: CacheMode | None = None,
        kind: type[FileBackend] = FileBackend,
    ) -> str:
        """``kind``: UringBackend for SPDK's other name."""

        def make() -> Backend:
            return kind.create(
                name,
                filename,
                block_size,
                uuid=uuid,
                readonly=readonly,
                fallocate=fallocate,
                cache_mode=cache_mode,
            )

        self._check_new(name, uuid)
        self._opening.add(name)
        try:
            # A disk may take its time to answer: nothing waits for it but this call.
            opened = await asyncio.to_thread(make)
            await self._add_bdev(None, None, lambda: opened)
            await self.lvols.examine(opened)
            return opened.name
        finally:
            self._opening.discard(name)

    def _check_new(self, name: str | None, uuid: uuids.UUID | None) -> None:
        if name is not None and not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise os_error(errno.EINVAL)
        for known_as in (name, str(uuid) if uuid else None):
            if known_as is not None and (self.find_bdev(known_as) is not None or known_as in self._opening):
                raise os_error(errno.EEXIST)

    async def _add_bdev(self, name: str | None, uuid: uuids.UUID | None, make: Callable[[], Backend]) -> str:
        async with self._lock:
            self._check_new(name, uuid)
            backend: Backend | None = None
            try:
                with self._change():
                    backend = make()
                    if self.find_bdev(str(backend.uuid)) is not None:
                        raise os_error(errno.EEXIST)
                    if backend.stash_key is not None:
                        self.host.stash(backend.stash_key, backend.fd)
                    self.bdevs[backend.name] = backend
            except BaseException:
                if backend is not None:
                    self._release(backend)
                raise
            self._bdev_added.set()
            return backend.name

    def _release(self, backend: Backend) -> None:
        if backend.stash_key is not None:
            self.host.unstash(backend.stash_key)
        if backend.marks is not None:
            self.host.unstash(marks_key(backend.name))
        if backend.journal is not None:
            self.host.unstash(journal_key(backend.name))
        backend.close()

    async def delete_bdev(self, name: str, kind: type[Backend]) -> bool:
        """-19 when there is none of this kind. Namespaces on it are removed first, in the same commit."""
        async with self._lock:
            backend = self.find_bdev(name)
            if backend is None or type(backend) is not kind:
                raise os_error(errno.ENODEV)
            self.lvols.forget(backend)
            group = self.lvols.group_on(backend)
            if group is None:
                await self._remove_bdevs([backend])
            else:
                with group.closing("the removal of its bdev"):
                    await self.lvols.leave(group, [backend])
            self._release(backend)
            await self.host.settled()  # else the keeper may hold the file or device for a moment longer
            return True

    async def _remove_bdevs(self, gone: Sequence[Backend], group: Group | None = None) -> None:
        """Take back ends, and a group, out of the configuration, with namespaces on them. The lock is held."""
        users = [user for backend in gone for user in self._users(backend)]
        with self._change():
            for subsystem, nsid in users:
                del subsystem.by_nsid[nsid]
            for backend in gone:
                del self.bdevs[backend.name]
            if group is not None:
                del self.lvols.groups[group.uuid]
        for subsystem, nsid in users:
            await self.host.namespace_changed(subsystem, nsid)
        self.iostat.keep(self.bdevs)

    async def _remove_users(self, backend: Backend) -> None:
        """Remove the namespaces on a back end. The lock is held."""
        if users := self._users(backend):
            with self._change():
                for subsystem, nsid in users:
                    del subsystem.by_nsid[nsid]
            for subsystem, nsid in users:
                await self.host.namespace_changed(subsystem, nsid)

    async def resize_null(self, name: str, new_size: int) -> bool:
        """``new_size`` in MiB."""
        return await self._resize(name, NullBackend, lambda backend: (new_size << 20) // backend.block_size)

    async def rescan_file(self, name: str, kind: type[FileBackend]) -> bool:
        """Take the size that the file has now."""
        return await self._resize(name, kind, lambda backend: cast(FileBackend, backend).measure())

    async def _resize(self, name: str, kind: type[Backend], measure: Callable[[Backend], int]) -> bool:
        """-19 when there is none of this kind. When it returns its namespaces have the new size."""
        async with self._lock, contextlib.AsyncExitStack() as stack:
            backend = self.find_bdev(name)
            if backend is None or type(backend) is not kind:
                raise os_error(errno.ENODEV)
            num_blocks, before = measure(backend), backend.num_blocks
            check_geometry(backend.block_size, num_blocks)
            if num_blocks == before:
                return True
            if num_blocks < before and self.lvols.claims(backend):
                raise os_error(errno.EBUSY, f"there are volumes on bdev {backend.name}")
            users = self._users(backend)
            for nqn in {subsystem.nqn for subsystem, _ in users}:
                await stack.enter_async_context(self.host.paused(self.subsystems[nqn]))
            try:
                with self._change():
                    backend.num_blocks = num_blocks
            except BaseException:
                backend.num_blocks = before
                raise
            self.fit_marks(backend)
            for subsystem, nsid in users:
                await self.host.namespace_changed(subsystem, nsid)
            return True

    def get_iostat(
        self, names: list[str] | None = None, per_channel: bool = False, reset_mode: str = "none"
    ) -> dict[str, Any]:
        """What has been served: of all, or of ``names``; of one by pollers with ``per_channel``."""
        backends = self._named(names)
        if per_channel and (names is None or len(names) != 1):
            raise os_error(errno.EINVAL)
        tick_rate, ticks = self.host.clock()
        rows = self.host.io_rows()
        answer: dict[str, Any] = {"tick_rate": tick_rate, "ticks": ticks}
        if per_channel:
            (name,) = backends
            answer |= {"name": name, "channels": self.iostat.report_channels(name, rows)}
        else:
            answer["bdevs"] = [self.iostat.report(name, rows) for name in backends]
        self._reset_iostat(backends, reset_mode)
        return answer

    def reset_iostat(self, name: str | None = None, mode: str = "all") -> bool:
        """Count from zero again; ``mode``: of dpu.iostat.RESET_MODES."""
        self._reset_iostat(self._named(None if name is None else [name]), mode)
        return True

    def _reset_iostat(self, names: list[str], mode: str) -> None:
        if mode != "none":
            self.iostat.reset(names, self.host.io_rows(), mode)
            self.commit_counts()

    def _named(self, names: list[str] | None) -> list[str]:
        """Names of back ends for names and aliases; -19 when there is none."""
        found = [self.find_bdev(name) for name in names] if names is not None else list(self.bdevs.values())
        if any(backend is None for backend in found):
            raise os_error(errno.ENODEV)
        return [backend.name for backend in found if backend is not None]

    # -- limits

    async def set_limits(self, name: str, **given: int | None) -> bool:
        """``given``: of dpu.qos.Limits; None leaves one as it is, 0 ends it. -22 for none, or a burst alone."""
        async with self._lock:
            backend = self.find_bdev(name)
            if backend is None:
                raise os_error(errno.ENODEV)
            if all(value is None for value in given.values()):
                raise RpcError(-errno.EINVAL, "No rate limits specified")
            limits = self.limits.get(backend.name, Limits()).changed(given)
            if any(value and not getattr(limits, name) for name, value in given.items()):
                raise os_error(errno.EINVAL, "a burst needs a rate")
            with self._change():
                self._need_gate(backend)
                self.limits[backend.name] = limits
                if not limits.to_config():
                    del self.limits[backend.name]
            self.host.gate_changed(backend.name)
            return True

    # -- faults

    async def add_fault(self, *, name: str | None = None, action: str, **given: Any) -> str:
        """Its name; ``given``: of dpu.faults.Fault, without what is None. -17 when the name is taken."""
        async with self._lock:
            fault = Fault(name or self._fault_name(), action, **{k: v for k, v in given.items() if v is not None})
            await self._add_fault(fault)
            return fault.name

    def _fault_name(self) -> str:
        return next(name for n in itertools.count() if (name := f"fault{n}") not in self.faults)

    async def _add_fault(self, fault: Fault) -> None:
        fault.check()
        if fault.name in self.faults:
            raise os_error(errno.EEXIST)
        backend = self.find_bdev(fault.bdev_name) if fault.bdev_name else None
        if fault.bdev_name and backend is None:
            raise os_error(errno.ENODEV)
        with self._change(faulty=False):
            self._fault_serial += 1
            fault.serial = self._fault_serial
            if backend is not None:
                fault.bdev_name, fault.number = backend.name, self._rule_number()
                self._need_gate(backend)
            self.faults[fault.name] = fault
        if backend is not None:
            self.host.gate_changed(backend.name)
            self._tell_health(backend, ACTIONS[fault.action].persistent)

    def _rule_number(self) -> int:
        """One that was not used lately: commands that wait may still name it."""
        used = {fault.number for fault in self.faults.values()}
        first = self._fault_serial % RULES
        numbers = ((first + i) % RULES + 1 for i in range(RULES))
        number = next((one for one in numbers if one not in used), 0)
        if not number:
            raise os_error(errno.ENOSPC, f"there are {RULES} faults")
        return number

    async def remove_fault(self, name: str) -> bool:
        """What it holds or delays goes on. -2 when there is none."""
        async with self._lock:
            fault = self._fault(name)
            await self._remove_faults([fault])
            return True

    async def _remove_faults(self, faults: list[Fault]) -> None:
        with self._change(faulty=False):
            for fault in faults:
                del self.faults[fault.name]
        for fault in faults:
            backend = self.bdevs.get(fault.bdev_name)
            if backend is not None:
                self.host.gate_changed(backend.name)
                await self.host.release(fault.number)
                self._tell_health(backend, False)

    async def release_fault(self, name: str) -> int:
        """How many commands it has let go; later ones are struck as before."""
        async with self._lock:
            fault = self._fault(name)
            return await self.host.release(fault.number) if fault.number else 0

    def get_faults(self, name: str | None = None) -> list[dict[str, Any]]:
        """All, or one. -2 when there is none."""
        faults = [one for one in self.faults.values() if not one.hidden] if name is None else [self._fault(name)]
        for fault in faults:
            if fault.number:
                fault.matches, fault.struck = self.host.fault_counts(fault.number)
        return [fault.describe() for fault in faults]

    def _fault(self, name: str) -> Fault:
        try:
            return self.faults[name]
        except KeyError:
            raise os_error(errno.ENOENT, f"no fault {name!r}") from None

    def fault_of_rule(self, number: int) -> Fault | None:
        return next((fault for fault in self.faults.values() if fault.number == number), None)

    def faults_of(self, name: str) -> list[Fault]:
        """Those of one back end."""
        return [fault for fault in self.faults.values() if fault.bdev_name == name]

    def _set_warnings(self) -> None:
        for backend in self.bdevs.values():
            below = {one.name for one in backend.stack()}
            backend.warning = 0
            for fault in self.faults.values():
                if fault.bdev_name in below:
                    backend.warning |= ACTIONS[fault.action].warning

    def _tell_health(self, backend: Backend, persistent: bool) -> None:
        before = {one.name: one.warning for one in self.bdevs.values()}
        self._set_warnings()
        for one in self.bdevs.values():
            if one.warning != before[one.name] or (persistent and backend in one.stack()):
                self.host.health_changed(one, persistent)

    # -- power cuts

    def _adopt_journals(self, names: list[str], fds: dict[str, int]) -> None:
        for name in names:
            fd = fds.pop(journal_key(name), -1)
            if fd >= 0 and name in self.bdevs:
                self.bdevs[name].journal = Journal(fd, *self._atomic(self.bdevs[name]))
                self.journals.add(name)

    def _atomic(self, backend: Backend) -> tuple[int, int]:
        sizes = [subsystem.by_nsid[nsid].block_size for subsystem, nsid in self._users(backend)]
        return backend.atomic_bytes, max([backend.block_size, *sizes])

    def _journal(self, name: str) -> tuple[Backend, Journal]:
        backend = self.find_bdev(name)
        if backend is None:
            raise os_error(errno.ENODEV)
        if backend.journal is None:
            raise os_error(errno.ENOENT, "no journal: dpu_journal_start comes first")
        return backend, backend.journal

    async def start_journal(self, bdev_name: str) -> bool:
        """From now on power cuts lose what was not flushed. -17 when it is so already."""
        async with self._lock:
            backend = self.find_bdev(bdev_name)
            if backend is None:
                raise os_error(errno.ENODEV)
            if backend.journal is not None:
                raise os_error(errno.EEXIST)
            if isinstance(backend, NullBackend) or backend.readonly:
                raise os_error(errno.EINVAL, "nothing is written there")
            journal = Journal.create(*self._atomic(backend))
            try:
                with self._change(faulty=False):
                    self.host.stash(journal_key(backend.name), journal.fd)
                    self._need_gate(backend)
                    self.journals.add(backend.name)
            except BaseException:
                self.host.unstash(journal_key(backend.name))
                journal.close()
                raise
            backend.journal = journal
            self.host.gate_changed(backend.name)
            return True

    async def stop_journal(self, bdev_name: str) -> bool:
        """What was written stays."""
        async with self._lock:
            backend, journal = self._journal(bdev_name)
            with self._change(faulty=False):
                self.journals.discard(backend.name)
            self.host.gate_changed(backend.name)
            async with self._paused(backend):
                backend.journal = None
            self.host.unstash(journal_key(backend.name))
            journal.close()
            return True

    @contextlib.asynccontextmanager
    async def _paused(self, backend: Backend) -> AsyncIterator[list[Subsystem]]:
        """No I/O command of the subsystems that serve a back end is executed inside."""
        subsystems = list({one.nqn: one for one, _ in self._users(backend)}.values())
        async with contextlib.AsyncExitStack() as stack:
            for subsystem in subsystems:
                await stack.enter_async_context(self.host.paused(subsystem))
            yield subsystems

    async def cut_power(self, bdev_name: str, seed: int | None, fail_controllers: bool) -> dict[str, int]:
        """Lose all that was not flushed, or by ``seed`` a legal part: of so many ``parts``, ``left`` are there."""
        async with self._lock:
            backend, journal = self._journal(bdev_name)
            async with self._paused(backend) as subsystems:
                for subsystem in subsystems if fail_controllers else []:
                    self.host.power_lost(subsystem)
                try:
                    parts, left = await journal.cut(blocks_of(backend), seed)
                except OSError as error:
                    raise os_error(error.errno or errno.EIO) from error
            return {"parts": parts, "left": left}

    async def strike_call(self, method: str) -> None:
        """Faults of RPC methods: delay a call, or fail it. Those of faults are never struck."""
        if method.startswith("dpu_fault_"):
            return
        for fault in list(self.faults.values()):
            if fault.method in ("*", method) and fault.strikes():
                if fault.latency_us:
                    await asyncio.sleep(fault.draw_s())
                if fault.action == "error":
                    raise os_error(-fault.code, f"fault {fault.name}")

    def _forget_gates(self) -> None:
        """Of back ends that are gone."""
        there = self.bdevs.keys()
        self.gates = {name: number for name, number in self.gates.items() if name in there}
        self.limits = {name: limits for name, limits in self.limits.items() if name in there}
        self.journals &= there
        self.faults = {name: one for name, one in self.faults.items() if one.bdev_name in ("", *there)}

    def _need_gate(self, backend: Backend) -> None:
        """Inside ``_change``: the back end has a gate from now on."""
        if backend.name in self.gates:
            return
        used = set(self.gates.values())
        number = next((one for one in range(GATES) if one not in used), -1)
        if number < 0:
            raise os_error(errno.ENOSPC, f"{GATES} back ends have limits or faults")
        self.host.clear_gate(number)
        self.gates[backend.name] = number

    # -- transport and subsystems

    async def create_transport(self, trtype: str, transport: Transport) -> bool:
        async with self._lock:
            if trtype.upper() != TRANSPORT:
                log.error("transport type %r: this target speaks VFIOUSER only", trtype)
                raise RpcError(INVALID_PARAMS, f"Invalid transport type '{trtype}'")
            if self.transport is not None:
                raise RpcError(INTERNAL_ERROR, f"Transport type '{TRANSPORT}' already exists")
            if transport.disable_mappable_bar0 and transport.force_mappable_bar0:
                raise invalid("disable_mappable_bar0 and force_mappable_bar0 exclude each other")
            with self._change():
                self.transport = transport
            return True

    def get_transports(self, trtype: str | None = None) -> list[dict[str, Any]]:
        """The one transport, if it was created. SPDK's keys; the limits are this card's."""
        if trtype is not None and (trtype.upper() != TRANSPORT or self.transport is None):
            raise os_error(errno.ENODEV)
        if self.transport is None:
            return []
        return [
            {
                "trtype": TRANSPORT,
                "max_queue_depth": QUEUE_ENTRIES_MAX,
                "max_io_qpairs_per_ctrlr": IO_QUEUES,
                "in_capsule_data_size": 0,
                "max_io_size": TRANSFER_MAX,
                "max_aq_depth": QUEUE_ENTRIES_MAX,
                "iobuf_small_cache_size": 0,
                "iobuf_large_cache_size": 0,
                "dif_insert_or_strip": False,
                "zcopy": False,
                "abort_timeout_sec": 0,
                "ack_timeout": 0,
                "data_wr_pool_size": 0,
                "disable_command_passthru": True,
            }
        ]

    async def create_subsystem(
        self,
        *,
        nqn: str,
        serial_number: str | None = None,
        model_number: str | None = None,
        max_namespaces: int = 0,
        allow_any_host: bool = False,
    ) -> bool:
        """``max_namespaces`` 0: 32. ``serial_number`` None: made from the NQN, the same every time."""
        async with self._lock:
            serial = serial_number if serial_number is not None else default_serial(nqn)
            model = model_number if model_number is not None else MODEL_DEFAULT
            problem = nqn_problem(nqn) or _identity_problem(serial, model, max_namespaces)
            if nqn in self.subsystems:
                problem = "it exists"
            if problem:
                log.error("nvmf_create_subsystem %r: %s", nqn, problem)
                raise RpcError(INTERNAL_ERROR, f"Unable to create subsystem {nqn}")
            with self._change():
                self.subsystems[nqn] = Subsystem(
                    nqn, serial, model, max_namespaces or NAMESPACES_DEFAULT, allow_any_host
                )
            return True

    async def delete_subsystem(self, nqn: str) -> bool:
        async with self._lock:
            subsystem = self._subsystem(nqn)
            with self._change():
                del self.subsystems[nqn]
            for key in subsystem.listeners:
                await self._quietly(self.host.unlisten(key), f"close listener {key}")
            await self.host.subsystem_deleted(subsystem)
            return True

    def get_subsystems(self, nqn: str | None = None) -> list[dict[str, Any]]:
        """All, the discovery subsystem that SPDK always has first, or one."""
        if nqn is not None and nqn != DISCOVERY_NQN:
            if nqn not in self.subsystems:
                raise os_error(errno.ENODEV)
            return [self.subsystems[nqn].describe()]
        discovery = {
            "nqn": DISCOVERY_NQN,
            "subtype": "Discovery",
            "listen_addresses": [],
            "allow_any_host": True,
            "hosts": [],
        }
        others = [] if nqn else [subsystem.describe() for subsystem in self.subsystems.values()]
        return [discovery, *others]

    def get_controllers(self, nqn: str) -> list[dict[str, Any]]:
        self._subsystem(nqn)
        return [
            {key: value for key, value in row.items() if key != "subnqn"}
            for row in self.host.controllers()
            if row["subnqn"] == nqn
        ]

    def _subsystem(self, nqn: str) -> Subsystem:
        try:
            return self.subsystems[nqn]
        except KeyError:
            raise invalid(f"no subsystem {nqn!r}") from None

    # -- namespaces

    async def add_namespace(
        self,
        *,
        nqn: str,
        bdev_name: str,
        nsid: int = 0,
        uuid: uuids.UUID | None = None,
        nguid: bytes | None = None,
        eui64: bytes | None = None,
        no_auto_visible: bool = False,
    ) -> int:
        """``nsid`` 0: the lowest free one. A bdev serves one namespace at a time, as SPDK's claims have it.

        ``no_auto_visible``: it is attached to no controller yet.
        """
        async with self._lock:
            subsystem = self._subsystem(nqn)
            backend = self.find_bdev(bdev_name)
            if backend is None:
                raise invalid(f"no bdev {bdev_name!r}")
            if self._claimed(backend):
                raise invalid(f"bdev {bdev_name!r} is a namespace already, or holds volumes")
            if isinstance(backend, Volume) and backend.being_deleted:
                raise invalid(f"bdev {bdev_name!r} is being deleted")
            free = (one for one in range(1, subsystem.max_namespaces + 1) if one not in subsystem.by_nsid)
            nsid = nsid or next(free, 0)
            if not 1 <= nsid <= subsystem.max_namespaces or nsid in subsystem.by_nsid:
                raise invalid(
                    f"nsid {nsid or 'any'} of {nqn!r} is taken, or above its max_namespaces "
                    f"{subsystem.max_namespaces}"
                )
            names = uuid or backend.uuid, nguid or backend.uuid.bytes, eui64 or bytes(8)
            namespace = Namespace(nsid, backend, *names, visible=not no_auto_visible)
            with self._change():
                subsystem.by_nsid[nsid] = namespace
                for row in self.host.io_rows(nqn):
                    if row.nsid == nsid:
                        self.iostat.attach(row, backend.name)
            try:
                self.host.namespace_added(subsystem, nsid)
            except BaseException:
                with self._change():
                    del subsystem.by_nsid[nsid]
                raise
            return nsid

    async def remove_namespace(self, nqn: str, nsid: int) -> bool:
        async with self._lock:
            subsystem = self._subsystem(nqn)
            namespace = subsystem.by_nsid.get(nsid)
            if namespace is None:
                raise invalid(f"no namespace {nsid} in {nqn!r}")
            with self._change():
                del subsystem.by_nsid[nsid]
            await self.host.namespace_changed(subsystem, nsid)
            if namespace.format:
                self._drop_marks(namespace.backend)
            return True

    async def attach_namespace(self, nqn: str, nsid: int, cntlid: int, attached: bool) -> bool:
        """Attach a namespace to a controller, or detach it."""
        subsystem = self._subsystem(nqn)
        if nsid not in subsystem.by_nsid:
            raise invalid(f"no namespace {nsid} in {nqn!r}")
        try:
            await self.attach(subsystem, nsid, [cntlid], attached)
        except CommandError as error:
            raise invalid(f"namespace {nsid} of {nqn!r}, controller {cntlid}: {error}") from None
        return True

    # -- what a guest changes by Namespace Management, Namespace Attachment and Format NVM

    @contextlib.contextmanager
    def _managing(self, by: Command | None, result: int = 0) -> Iterator[None]:
        """As ``_change``, with a note that this command was done: after a kill the next worker is asked again."""
        with self._change():
            yield
            if by is not None:
                self._managed[by.client] = by.sequence, result
                killpoint("namespace_before_store")
        if by is not None:
            killpoint("namespace_stored")

    def forget(self, client: int) -> None:
        """The client is gone: nothing will be asked again."""
        self._managed.pop(client, None)
        self._retired.discard(client)
        self.iostat.forget(client)

    def retire(self, client: int, subsystem: Subsystem, cntlid: int, life: Life) -> None:
        """A controller's connection has ended. A commit follows; after it, and a kill, it is told again."""
        if client not in self._retired:
            self._retired.add(client)
            subsystem.lives[cntlid] = life

    def _done(self, by: Command | None) -> int | None:
        done = self._managed.get(by.client) if by is not None else None
        return done[1] if by is not None and done is not None and done[0] == by.sequence else None

    async def attach(
        self, subsystem: Subsystem, nsid: int, cntlids: Sequence[int], attached: bool, by: Command | None = None
    ) -> None:
        """Attach a namespace to controllers, or detach it (Base 5.20). All or none. CommandError."""
        async with self._lock:
            if self._done(by) is not None:
                return
            namespace = _allocated(subsystem, nsid)
            if not cntlids or not set(cntlids) <= set(subsystem.cntlids):
                raise CommandError(Status.CONTROLLER_LIST_INVALID)
            if any(namespace.attached(cntlid) == attached for cntlid in cntlids):
                raise CommandError(Status.NAMESPACE_ALREADY_ATTACHED if attached else Status.NAMESPACE_NOT_ATTACHED)
            changed = namespace.attach(cntlids, attached)
            if namespace.private and sum(changed.attached(cntlid) for cntlid in subsystem.cntlids) > 1:
                raise CommandError(Status.NAMESPACE_IS_PRIVATE)
            with self._managing(by):
                subsystem.by_nsid[nsid] = changed
            await self.host.namespace_changed(subsystem, nsid)
            killpoint("namespace_told")

    async def set_pool(self, nqn: str, lvs_name: str, thin_provision: bool) -> bool:
        """What its guests' Namespace Management makes namespaces of: volumes of this group, or ("") nothing."""
        async with self._lock:
            subsystem = self._subsystem(nqn)
            group = self.lvols.store_named(lvs_name) if lvs_name else None
            if lvs_name and group is None:
                raise invalid(f"no lvol store {lvs_name!r}")
            with self._change():
                subsystem.pool, subsystem.pool_thin = group.uuid if group is not None else "", thin_provision
            return True

    def capacity(self, subsystem: Subsystem) -> tuple[int, int]:
        """Bytes of its namespaces and of what more can be made of, and the latter alone."""
        used = sum(namespace.backend.size_bytes for namespace in subsystem.by_nsid.values())
        group = self.lvols.groups.get(subsystem.pool)
        free = group.free_clusters() * group.cluster_bytes if group is not None else 0
        return used + free, free

    async def create_namespace(
        self, subsystem: Subsystem, blocks: int, block_size: int, private: bool, by: Command
    ) -> int:
        """Make a namespace that is attached to nobody (Base 5.21); its NSID. CommandError.

        It is a whole number of clusters of the group, so it may have more blocks than it was asked for.
        """
        async with self._lock:
            if (done := self._done(by)) is not None:
                return done
            group = self.lvols.groups.get(subsystem.pool)
            nsid = next((n for n in range(1, subsystem.max_namespaces + 1) if n not in subsystem.by_nsid), 0)
            if nsid == 0:
                raise CommandError(Status.NAMESPACE_ID_UNAVAILABLE)
            if group is None or blocks * block_size > SIZE_BYTES_MAX:
                raise CommandError(Status.NAMESPACE_INSUFFICIENT_CAPACITY)
            name = f"{MADE_PREFIX}{by.client}-{by.sequence}"  # a worker that was killed has left it, or nothing
            volume = group.find(name)
            try:
                if volume is None:
                    volume = await group.create_volume(name, blocks * block_size, thin=subsystem.pool_thin)
            except RpcError as error:
                log.error("namespace for a guest of %s: %s", subsystem.nqn, error)
                raise CommandError(Status.NAMESPACE_INSUFFICIENT_CAPACITY) from error
            self.lvols.add(volume)
            killpoint("namespace_made")
            namespace = Namespace(
                nsid,
                volume,
                volume.uuid,
                volume.uuid.bytes,
                format=0 if block_size == volume.block_size else block_size,
                private=private,
                visible=False,
                made=True,
            )
            with self._managing(by, nsid):
                subsystem.by_nsid[nsid] = namespace
            killpoint("namespace_told")
            return nsid

    async def delete_namespaces(self, subsystem: Subsystem, nsids: Sequence[int], by: Command) -> None:
        """Delete namespaces (Base 5.21), and what was made for them; other back ends stay. CommandError."""
        async with self._lock:
            if self._done(by) is not None:
                return
            for nsid in nsids:
                _allocated(subsystem, nsid)
            with self._managing(by):
                gone = [subsystem.by_nsid.pop(nsid) for nsid in nsids]
                self._doomed += [namespace.backend.name for namespace in gone if namespace.made]
            for nsid in nsids:
                await self.host.namespace_changed(subsystem, nsid)
            killpoint("namespace_told")
            for namespace in gone:
                if namespace.format:
                    self._drop_marks(namespace.backend)
        await self._delete_doomed()

    async def _delete_doomed(self) -> None:
        """Delete the volumes of namespaces that a guest has deleted."""
        while self._doomed:
            name = self._doomed[0]
            try:
                if self.find_bdev(name) is not None:
                    await self.lvols.delete(name=name)
            except RpcError as error:
                log.error("volume %s of a deleted namespace stays: %s", name, error)
            self._doomed.remove(name)
            self.host.commit(self.to_config())

    async def format(self, subsystem: Subsystem, nsid: int, block_size: int, by: Command) -> None:
        """Give a namespace logical blocks of another size; all of them read as zeroes afterwards (Base 5.14)."""
        async with self._lock:
            if self._done(by) is not None:
                return
            namespace = _allocated(subsystem, nsid)
            if namespace.backend.readonly:
                raise CommandError(Status.NAMESPACE_WRITE_PROTECTED)
            if namespace.backend.size_bytes % block_size:
                raise CommandError(Status.INVALID_FORMAT)
            async with self.host.paused(subsystem):
                try:
                    await erase(namespace.backend)
                except OSError as error:
                    log.error("format of namespace %d of %s: %s", nsid, subsystem.nqn, error)
                    raise CommandError(Status.INTERNAL_ERROR, dnr=False) from error
                killpoint("format_erased")
                with self._managing(by):
                    chosen = 0 if block_size == namespace.backend.block_size else block_size
                    subsystem.by_nsid[nsid] = replace(namespace, format=chosen)
                self._drop_marks(namespace.backend)
                await self.host.namespace_changed(subsystem, nsid)
                killpoint("namespace_told")

    def fit_marks(self, backend: Backend) -> None:
        """Marks for as many blocks as there are now; nobody looks at them meanwhile."""
        users = self._users(backend)
        blocks = users[0][0].by_nsid[users[0][1]].num_blocks if users else backend.num_blocks
        old = backend.marks
        if old is None or old.num_blocks == blocks:
            return
        backend.marks = old.resized(blocks)
        self.host.unstash(marks_key(backend.name))
        self.host.stash(marks_key(backend.name), backend.marks.fd)
        old.close()

    def _drop_marks(self, backend: Backend) -> None:
        """They count blocks of a size that the namespace no longer has, or will not have."""
        if backend.marks is not None:
            self.host.unstash(marks_key(backend.name))
            backend.marks.close()
            backend.marks = None

    # -- listeners

    async def add_listener(
        self, *, nqn: str, trtype: str, traddr: str, trsvcid: str = "", options: Mapping[str, bool] | None = None
    ) -> bool:
        """``options``: those of ``Listener``."""
        async with self._lock:
            subsystem = self._subsystem(nqn)
            if trtype.upper() != TRANSPORT or self.transport is None:
                raise invalid(f"no transport {trtype!r}: nvmf_create_transport VFIOUSER comes first")
            cntlid = next(number for number in range(1, CNTLID_MAX + 1) if number not in subsystem.cntlids)
            listener = Listener(nqn, traddr, trsvcid, **(options or {}), cntlid=cntlid)
            real = os.path.realpath(traddr)
            taken = [other for one in self.subsystems.values() for other in one.listeners.values()]
            if any(os.path.realpath(other.traddr) == real for other in taken):
                raise invalid(f"{traddr!r} has a listener already")
            if not os.path.isdir(traddr):
                raise invalid(f"traddr {traddr!r} is not a directory")
            if len(os.fsencode(listener.path)) > SOCKET_PATH_BYTES_MAX:
                raise invalid(f"{listener.path!r} is longer than {SOCKET_PATH_BYTES_MAX} bytes")
            try:
                await self.host.listen(listener.key, listener.path)
            except OSError as error:
                raise invalid(f"cannot listen on {listener.path!r}: {error}") from error
            try:
                with self._change():
                    subsystem.listeners[listener.key] = listener
            except BaseException:
                await self._quietly(self.host.unlisten(listener.key), f"close listener {listener.key}")
                raise
            return True

    def get_listeners(self, nqn: str) -> list[dict[str, Any]]:
        return [{"address": listener.describe()} for listener in self._subsystem(nqn).listeners.values()]

    async def remove_listener(self, *, nqn: str, trtype: str, traddr: str, trsvcid: str = "") -> bool:
        async with self._lock:
            subsystem = self._subsystem(nqn)
            key = Listener(nqn, traddr, trsvcid).key
            if trtype.upper() != TRANSPORT or key not in subsystem.listeners:
                raise invalid(f"no {trtype} listener {traddr!r} in {nqn!r}")
            with self._change():
                cntlid = subsystem.listeners.pop(key).cntlid
                for nsid, namespace in subsystem.by_nsid.items():  # the next controller of this number is another
                    if cntlid in namespace.exceptions:
                        subsystem.by_nsid[nsid] = namespace.attach([cntlid], namespace.visible)
            await self._quietly(self.host.unlisten(key), f"close listener {key}")
            return True

    # -- trace

    async def trace_start(self, entries: int) -> bool:
        """``entries`` is rounded up to a power of two."""
        if not 1 <= entries <= ENTRIES_MAX:
            raise invalid(f"entries must be 1 to {ENTRIES_MAX}")
        await self.host.trace_start(1 << (entries - 1).bit_length())
        return True

    async def trace_stop(self) -> bool:
        await self.host.trace_stop()
        return True

    async def trace_save(self, filename: str, format: str) -> dict[str, int]:
        """Write what was traced to a file, which only its owner may read. -errno when it cannot be written."""

        parts = self.host.trace()

        def save() -> dict[str, int]:
            found, lost = commands(parts), sum(part.lost for part in parts)
            fd = os.open(filename, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                file.writelines(FORMATS[format](found, lost))
            return {"commands": len(found), "lost": lost}

        try:
            return await asyncio.to_thread(save)
        except OSError as error:
            log.error("trace: cannot write %r: %s", filename, error.strerror)
            raise os_error(error.errno or errno.EIO) from error

    async def _quietly(self, work: Awaitable[None], what: str) -> None:
        """The configuration has moved on: a failure here is told, and does not undo it."""
        try:
            await work
        except OSError as error:
            log.error("cannot %s: %s", what, error)


def _life(row: dict[str, Any]) -> Life:
    counters = {int(nsid): Counters(**counts) for nsid, counts in row["counters"].items()}
    return Life(**{**row, "counters": counters})


def _allocated(subsystem: Subsystem, nsid: int) -> Namespace:
    """CommandError when another controller has deleted it meanwhile."""
    if nsid not in subsystem.by_nsid:
        raise CommandError(Status.INVALID_FIELD, location=NSID_LOCATION)
    return subsystem.by_nsid[nsid]


def invalid(reason: str) -> RpcError:
    """SPDK's answer to most mistakes in nvmf calls; the reason goes to the log, as SPDK's does."""
    log.error("%s", reason)
    return RpcError(INVALID_PARAMS, "Invalid parameters")


def default_serial(nqn: str) -> str:
    """20 characters, the same for the same NQN: "DPU" and 17 hexadecimal digits of its SHA-256."""
    return "DPU" + hashlib.sha256(nqn.encode()).hexdigest()[:17].upper()


def nqn_problem(nqn: str) -> str:
    """Why ``nqn`` cannot name a new subsystem (NVMe Base 2.0, 4.5), or ""."""
    if len(nqn.encode()) > NQN_BYTES_MAX:
        return f"longer than {NQN_BYTES_MAX} bytes"
    if nqn.startswith("nqn.2014-08.org.nvmexpress:uuid:"):
        return "" if _NQN_UUID.fullmatch(nqn) else "not nqn.2014-08.org.nvmexpress:uuid: and a UUID"
    return "" if _NQN_DOMAIN.fullmatch(nqn) else "not of the form nqn.yyyy-mm.reverse.domain:name"


def _identity_problem(serial: str, model: str, max_namespaces: int) -> str:
    for what, text, limit in (("serial", serial, SERIAL_BYTES_MAX), ("model", model, MODEL_BYTES_MAX)):
        # NVMe Base 2.0, 5.17.2.1: SN and MN are ASCII strings, left justified.
        if len(text) > limit or not text.isascii() or not text.isprintable():
            return f"{what} number {text!r} is not up to {limit} printable ASCII characters"
    if max_namespaces > NAMESPACES:
        return f"max_namespaces {max_namespaces} is above {NAMESPACES}"
    return ""
