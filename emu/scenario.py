"""Scenario files: what a lab is made of and what runs in it.

::

    [vm.web]
    vcpus = 2
    memory = "512M"
    nvme = ["card.fast"]             # the controllers it gets: DPU.CONTROLLER

    [dpu.card]
    cpus = [0]

    [dpu.card.nvme.fast]
    namespaces = [{ backend = "memory", size = "1G", block_size = 4096 }]

    [[workload]]
    type = "fio"
    rw = "randread"

A workload's ``vm`` may be left out where the scenario has one VM or ``device`` is attached to one; its ``device``
where its VM has one controller.

Limits: names are 1 to 16 lower-case letters, digits, ``-`` and ``_``, because sockets are named after them. A
scenario is checked for this machine: its CPUs, its memory, the files that the scenario names.

Errors: :class:`ScenarioError` holds every problem of the file at once, each with its line and, for a name
that is not known, the nearest one that is.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dpu.errors import EmuError, UsageError
from dpu.host_memory import memory_available_bytes
from emu.daemon import LISTENER_OPTIONS, OWN_OPTIONS, TRANSPORT_OPTIONS
from emu.fabric.spec import FabricSpec
from emu.lab import ControllerConfig, DiskConfig, DpuConfig, GroupConfig, LabConfig, NamespaceConfig, VmConfig
from emu.timeline import CallSpec, FaultSpec
from emu.toml_lines import Path as KeyPath
from emu.toml_lines import key_lines, line_of
from emu.units import Size, format_size
from emu.vm import ROOT_PORTS_MAX
from emu.workloads import WORKLOADS, Params
from emu.workloads.base import BlockDevice

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,15}")
_SIZE_MAX = 2**63 - 1  # bytes: what off_t can say
Where = Callable[[KeyPath], str]
"""Says where a key of a document is, for a person."""
_KEYS = ("vm", "dpu", "fabric", "workload", "faults", "calls")
CONTROLLERS_MAX = 64
"""Of one DPU: what its workers have tables for."""


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LimitsSpec(_Spec):
    """Rates of I/Os and MiB per second, and credits of I/Os and MiB that pauses save up: see dpu.qos."""

    rw_ios_per_sec: int = Field(default=0, ge=0)
    rw_mbytes_per_sec: int = Field(default=0, ge=0)
    r_ios_per_sec: int = Field(default=0, ge=0)
    r_mbytes_per_sec: int = Field(default=0, ge=0)
    w_ios_per_sec: int = Field(default=0, ge=0)
    w_mbytes_per_sec: int = Field(default=0, ge=0)
    rw_ios_burst: int = Field(default=0, ge=0)
    rw_mbytes_burst: int = Field(default=0, ge=0)
    r_ios_burst: int = Field(default=0, ge=0)
    r_mbytes_burst: int = Field(default=0, ge=0)
    w_ios_burst: int = Field(default=0, ge=0)
    w_mbytes_burst: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> LimitsSpec:
        for name, value in self:
            rate = name.replace("_burst", "_per_sec")
            if value and not getattr(self, rate):
                raise ValueError(f"{name} needs {rate}")
        return self

    def chosen(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, value) for name, value in self if value)


class NamespaceSpec(_Spec):
    backend: Literal["memory", "null", "file"] = "memory"
    size: Size = 1 << 30
    block_size: Literal[512, 4096] = 512
    path: str | None = None
    """Of backend "file": the user's own file, made if it is not there. None: one of the lab's own."""
    group: str | None = None
    """It is a volume of this group of its DPU."""
    thin: bool = False
    limits: LimitsSpec = LimitsSpec()

    @model_validator(mode="after")
    def _consistent(self) -> NamespaceSpec:
        if self.group is None and self.thin:
            raise ValueError("thin is of a volume; say the group that it is in")
        if self.group is not None:
            wrong = sorted({"backend", "block_size", "path"} & self.model_fields_set)
            if wrong:
                raise ValueError(f"{wrong[0]} is that of the group; leave it out")
            if self.size % (1 << 20):
                raise ValueError("the size of a volume is a whole number of MiB")
        if self.path is not None and self.backend != "file":
            raise ValueError(f'path goes with backend = "file", not with "{self.backend}"')
        if self.size > _SIZE_MAX:
            raise ValueError(f"size {self.size} is too large; the largest is {format_size(_SIZE_MAX)}")
        if self.size % self.block_size:
            raise ValueError(f"size {self.size} is not a multiple of block_size {self.block_size}")
        return self


class GroupSpec(_Spec):
    """A group of volumes, of ``size`` for all of them together."""

    backend: Literal["memory", "file"] = "memory"
    size: Size = Field(default=1 << 30, ge=1)
    block_size: Literal[512, 4096] = 512
    cluster_size: Size = 1 << 20

    @model_validator(mode="after")
    def _consistent(self) -> GroupSpec:
        if self.cluster_size.bit_count() != 1 or not 4096 <= self.cluster_size <= 64 << 20:
            raise ValueError("cluster_size is a power of two from 4K to 64M")
        if self.size % self.cluster_size:
            raise ValueError(f"size {self.size} is not a multiple of cluster_size {self.cluster_size}")
        return self


class ControllerSpec(_Spec):
    namespaces: tuple[NamespaceSpec, ...] = Field(default=(NamespaceSpec(),), min_length=1, max_length=32)
    serial: str = Field(default="", max_length=20, pattern=r"^[\x21-\x7e]*$")  # NVMe base 2.0, Identify: SN
    model: str = Field(default="dpu-emu", max_length=40, pattern=r"^[\x20-\x7e]+$")  # MN
    disable_msix: bool = False
    allow_unsealed_memory: bool = False


class DpuSpec(_Spec):
    cpus: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = ()
    """Host CPUs of its pollers; none: the daemon's own choice."""
    engine: Literal["dpud", "spdk"] = "dpud"
    """"spdk": the user's own ``nvmf_tgt`` from SPDK_DIR in place of ``dpud``."""
    nvme: dict[str, ControllerSpec] = Field(default={}, max_length=CONTROLLERS_MAX)
    group: dict[str, GroupSpec] = {}
    force_mappable_bar0: bool = False
    disable_mappable_bar0: bool = False
    disable_shadow_doorbells: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> DpuSpec:
        if self.force_mappable_bar0 and self.disable_mappable_bar0:
            raise ValueError("force_mappable_bar0 and disable_mappable_bar0 exclude each other; leave one out")
        return self


class VmSpec(_Spec):
    vcpus: int = Field(default=1, ge=1, le=64)
    memory: Size = 512 << 20
    kernel: str | None = None
    initrd: str | None = None
    kernel_args: str = ""
    disk: str | None = None
    qemu_args: tuple[str, ...] = ()
    nvme: tuple[str, ...] = Field(default=(), max_length=ROOT_PORTS_MAX)
    share_memory: bool = True
    """False: no daemon can map its memory; each byte is asked for by a message."""
    host: str | None = None
    """The fabric's host whose place it takes: a network card there."""

    @model_validator(mode="after")
    def _consistent(self) -> VmSpec:
        if self.memory % (1 << 20):
            raise ValueError("memory is a whole number of MiB")
        if self.initrd is not None and self.kernel is None:
            raise ValueError("initrd goes with a kernel")
        return self


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a scenario: ``where`` is FILE:LINE, or the option on the command line."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class ScenarioError(UsageError):
    """Everything that is wrong with a scenario."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True)
class Scenario:
    """A checked scenario: every name in it exists, every workload has its VM and its device."""

    name: str
    vms: Mapping[str, VmSpec]
    dpus: Mapping[str, DpuSpec]
    workloads: tuple[Params, ...]
    folder: Path = field(default_factory=Path)
    """What the paths in it are relative to."""
    fabric: FabricSpec | None = None
    document: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """As it was read."""
    faults: tuple[FaultSpec, ...] = ()
    calls: tuple[CallSpec, ...] = ()

    def lab_config(self, **more: Any) -> LabConfig:
        """The lab of this scenario; ``more`` are other fields of :class:`LabConfig`."""
        return LabConfig(
            name=self.name,
            vms=tuple(self._vm(name, vm) for name, vm in self.vms.items()),
            dpus=tuple(self._dpu(name, dpu) for name, dpu in self.dpus.items()),
            fabric=self.fabric,
            **more,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "vm": {name: vm.model_dump(mode="json") for name, vm in self.vms.items()},
            "dpu": {name: dpu.model_dump(mode="json") for name, dpu in self.dpus.items()},
            **({} if self.fabric is None else {"fabric": self.fabric.model_dump(mode="json", exclude_none=True)}),
            "workload": [params.model_dump(mode="json") for params in self.workloads],
            **(
                {"faults": [one.model_dump(mode="json", exclude_none=True) for one in self.faults]}
                if self.faults
                else {}
            ),
            **({"calls": [one.model_dump(mode="json") for one in self.calls]} if self.calls else {}),
        }

    def _vm(self, name: str, vm: VmSpec) -> VmConfig:
        return VmConfig(
            name=name,
            vcpus=vm.vcpus,
            memory_mib=vm.memory >> 20,
            dpus=tuple(split_device(device) for device in vm.nvme),
            kernel=self._path(vm.kernel),
            initrd=self._path(vm.initrd),
            kernel_args=vm.kernel_args,
            disks=() if vm.disk is None else (DiskConfig(self.folder / vm.disk),),
            qemu_args=vm.qemu_args,
            host=vm.host,
            share_memory=vm.share_memory,
        )

    def _dpu(self, name: str, dpu: DpuSpec) -> DpuConfig:
        controllers = tuple(
            ControllerConfig(
                name=controller_name,
                namespaces=tuple(
                    NamespaceConfig(
                        spec.backend,
                        spec.size,
                        spec.block_size,
                        self._path(spec.path),
                        spec.group or "",
                        spec.thin,
                        spec.limits.chosen(),
                    )
                    for spec in controller.namespaces
                ),
                serial=controller.serial,
                model=controller.model,
                options=_chosen(controller, LISTENER_OPTIONS),
            )
            for controller_name, controller in dpu.nvme.items()
        )
        cpus, options = ",".join(map(str, dpu.cpus)), _chosen(dpu, TRANSPORT_OPTIONS)
        groups = tuple(GroupConfig(name, **group.model_dump()) for name, group in dpu.group.items())
        return DpuConfig(name, controllers, cpus=cpus, engine=dpu.engine, options=options, groups=groups)

    def _path(self, path: str | None) -> Path | None:
        return None if path is None else self.folder / path


def split_device(device: str) -> tuple[str, str]:
    """ "card.fast" as ("card", "fast")."""
    dpu, _, controller = device.partition(".")
    return dpu, controller


def load(path: Path, changes: Sequence[str] = ()) -> Scenario:
    """The scenario in the file ``path``; paths in it are relative to its folder.

    ``changes``: values that take the place of the file's, as KEY=VALUE, such as "workload.0.iodepth=64".
    """
    document, where = read(path, changes)
    return check(document, path.stem, path.parent, where)


def read(path: Path, changes: Sequence[str] = ()) -> tuple[dict[str, Any], Where]:
    """What stands in the file ``path``, unchecked, and where each key of it is."""
    return _document(_text(path), str(path), changes)


def parse(text: str, file: str, folder: Path, changes: Sequence[str] = ()) -> Scenario:
    """The scenario in ``text``, which came from ``file`` (for messages)."""
    document, where = _document(text, file, changes)
    return check(document, Path(file).stem, folder, where)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScenarioError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ScenarioError([Problem(f"{path}:1", "the file is not UTF-8 text")]) from error


def _document(text: str, file: str, changes: Sequence[str]) -> tuple[dict[str, Any], Where]:
    """The TOML in ``text``, changed, and where its keys are."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        position = re.search(r" \(at line (\d+), column \d+\)| \(at end of document\)", str(error))
        line = position[1] if position and position[1] else text.count("\n") + 1
        message = str(error)[: position.start()] if position else str(error)
        raise ScenarioError([Problem(f"{file}:{line}", message)]) from error
    lines = key_lines(text)
    changed = {_change(document, change): change for change in changes}

    def where(path: KeyPath) -> str:
        own = next((change for key, change in changed.items() if path[: len(key)] == key), "")
        return f"--set {own}" if own else f"{file}:{line_of(lines, path)}"

    return document, where


def _change(document: dict[str, Any], change: str) -> KeyPath:
    """Carries out one change, KEY=VALUE with a value as in TOML, a text without quotes too; the key's path."""
    key, equals, text = change.partition("=")
    path: KeyPath = tuple(int(step) if step.isdigit() else step for step in key.strip().split("."))
    place: Any = document
    try:
        if not equals:
            raise ValueError
        for step in path[:-1]:
            place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
        try:
            place[path[-1]] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            place[path[-1]] = text
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ScenarioError([Problem(f"--set {change}", "is not KEY=VALUE for a key of this scenario")]) from error
    return path


def check(document: Mapping[str, Any], name: str, folder: Path, where: Where) -> Scenario:
    """The scenario in ``document``. ``where(path)`` says where a key is. ScenarioError has every problem."""
    checker = _Checker(document, folder, where)
    scenario = checker.scenario(name)
    checker.end()
    return scenario


def check_workloads(lab: Mapping[str, Any], tables: Any, folder: Path, where: Where) -> tuple[Params, ...]:
    """The workloads ``tables`` of a document for a lab that is up; ``lab``: the document that it came from.

    ScenarioError has every problem.
    """
    checker = _Checker({**lab, "workload": tables}, folder, where)
    workloads = tuple(checker.workloads())
    checker.end()
    return workloads


Model = TypeVar("Model", bound=BaseModel)


class _Checker:
    """Checks part by part, so that one wrong part does not hide the problems of the others."""

    def __init__(self, document: Mapping[str, Any], folder: Path, where: Where) -> None:
        self.document = document
        self.folder = folder
        self.where = where
        self.problems: list[Problem] = []

    def problem(self, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(self.where(path), message))

    def end(self) -> None:
        """ScenarioError with all that was found, in the order of lines."""
        if self.problems:
            raise ScenarioError(sorted(dict.fromkeys(self.problems), key=lambda problem: _line(problem.where)))

    def scenario(self, name: str) -> Scenario:
        for key in self.document:
            if key not in _KEYS:
                self.problem((key,), _unknown("key", key, _KEYS))
        dpus = self.named_parts("dpu", DpuSpec)
        vms = self.named_parts("vm", VmSpec)
        self.check_attachments()
        self.check_shared(vms, dpus)
        self.check_engines(vms, dpus)
        self.check_groups(dpus)
        self.check_machine(vms, dpus)
        workloads = self.workloads()
        faults, calls = self.listed("faults", FaultSpec), self.listed("calls", CallSpec)
        self.check_events(faults, calls, dpus)
        fabric: FabricSpec | None = None
        if "fabric" in self.document:
            fabric = self.part(FabricSpec, self.document["fabric"], ("fabric",))
        elif not self.document.get("vm"):
            self.problem((), "there is no VM; add a table such as [vm.web]")
        self.check_hosts(vms, fabric)
        timed = tuple(faults.values()), tuple(calls.values())
        return Scenario(name, vms, dpus, tuple(workloads), self.folder, fabric, self.document, *timed)

    def named_parts(self, kind: str, model: type[Model]) -> dict[str, Model]:
        """The tables ``[kind.NAME]`` that are right."""
        table = self.document.get(kind, {})
        if not isinstance(table, dict):
            self.problem((kind,), f"{kind} is a table of tables: [{kind}.NAME]")
            return {}
        parts: dict[str, Model] = {}
        for name, raw in table.items():
            path = (kind, name)
            self.check_name(path, name)
            part = self.part(model, raw, path)
            if part is not None:
                parts[name] = part
            if kind == "vm" and name in _table(self.document.get("dpu")):
                self.problem(
                    path, f'"{name}" is the name of a DPU too; their folders would be one: rename one of them'
                )
            for group in _table(_table(raw).get("group")) if kind == "dpu" else ():
                self.check_name((*path, "group", group), group)
            for controller in _table(_table(raw).get("nvme")) if kind == "dpu" else ():
                self.check_name((*path, "nvme", controller), controller)
                if controller == "rpc":
                    self.problem(
                        (*path, "nvme", controller), '"rpc" is the name of the DPU\'s RPC socket; take another'
                    )
        return parts

    def check_name(self, path: KeyPath, name: str) -> None:
        if not _NAME.fullmatch(name):
            self.problem(path, f'"{name}" is no name; use 1 to 16 of a-z, 0-9, "-" and "_"')

    def part(self, model: type[Model], raw: Any, path: KeyPath) -> Model | None:
        if not isinstance(raw, dict):
            self.problem(path, f"{_shown(path)} is a table")
            return None
        try:
            return model.model_validate(raw)
        except ValidationError as error:
            details = error.errors(include_url=False)
            for detail in details:
                if detail["type"] == "too_short" and len(details) > 1:
                    continue  # pydantic counts only the elements that are right
                self.problem((*path, *detail["loc"]), _explain(model, path, detail))
            return None

    def check_attachments(self) -> None:
        """Every attached controller exists and has one VM."""
        devices = self.devices()
        taken: dict[str, str] = {}
        for name in _table(self.document.get("vm")):
            for index, device in enumerate(self.attached(name)):
                path = ("vm", name, "nvme", index)
                if device not in devices:
                    self.problem(path, _unknown("controller", device, devices))
                elif device in taken:
                    self.problem(
                        path, f'controller "{device}" is attached already, to VM "{taken[device]}"; it takes one'
                    )
                taken.setdefault(device, name)

    def check_shared(self, vms: Mapping[str, VmSpec], dpus: Mapping[str, DpuSpec]) -> None:
        """No two controllers have one serial number, no two namespaces or disks one file."""
        serials: set[str] = set()
        files: set[Path] = set()

        def take(path: KeyPath, name: str | None) -> None:
            file = None if name is None else (self.folder / name).resolve()
            if file in files:
                self.problem(path, f"file {name} is used twice; give each its own")
            files.update(() if file is None else (file,))

        for path, controller in _controllers(dpus):
            if controller.serial in serials:
                self.problem((*path, "serial"), f'serial "{controller.serial}" is used twice; give each its own')
            serials |= {controller.serial} - {""}
            for index, spec in enumerate(controller.namespaces):
                take((*path, "namespaces", index, "path"), spec.path)
        for name, vm in vms.items():
            take(("vm", name, "disk"), vm.disk)

    def check_groups(self, dpus: Mapping[str, DpuSpec]) -> None:
        """Every volume's group is there, and has room for those that are not thin."""
        left = {(name, group): spec.size for name, dpu in dpus.items() for group, spec in dpu.group.items()}
        for path, controller in _controllers(dpus):
            name = str(path[1])
            for index, spec in enumerate(controller.namespaces):
                at = (*path, "namespaces", index)
                if spec.group is None:
                    continue
                if (name, spec.group) not in left:
                    self.problem((*at, "group"), _unknown("group", spec.group, dpus[name].group))
                elif not spec.thin:
                    left[name, spec.group] -= spec.size
                    if left[name, spec.group] < 0:
                        message = f'group "{spec.group}" has no room for this; make it larger, or say thin = true'
                        self.problem((*at, "size"), message)

    def check_engines(self, vms: Mapping[str, VmSpec], dpus: Mapping[str, DpuSpec]) -> None:
        """SPDK is asked for nothing that only dpud can."""
        theirs = {name for name, dpu in dpus.items() if dpu.engine == "spdk"}
        parts: list[tuple[KeyPath, BaseModel]] = [(("dpu", name), dpus[name]) for name in theirs]
        parts += [(path, one) for path, one in _controllers(dpus) if path[1] in theirs]
        for path, part in parts:
            for option in _chosen(part, OWN_OPTIONS):
                self.problem((*path, option), f'{option} is of dpud; leave it out, or engine = "spdk"')
        for name, vm in vms.items():
            for device in vm.nvme:
                if not vm.share_memory and split_device(device)[0] in theirs:
                    message = f"SPDK, the engine of {device}, must map the VM's memory; leave share_memory out"
                    self.problem(("vm", name, "share_memory"), message)

    def check_hosts(self, vms: Mapping[str, VmSpec], fabric: FabricSpec | None) -> None:
        """Every VM's host is one of the fabric, and nobody else's."""
        hosts = [f"h{number}" for number in range(0 if fabric is None else fabric.topology().hosts)]
        taken: dict[str, str] = {}
        for name, vm in vms.items():
            path = ("vm", name, "host")
            if vm.host is None:
                continue
            if "fabric" not in self.document:
                self.problem(path, "host is one of a fabric; add a table [fabric]")
            elif vm.host in taken:
                self.problem(path, f'host "{vm.host}" is taken by VM "{taken[vm.host]}"')
            elif hosts and vm.host not in hosts:
                self.problem(path, f'there is no host "{vm.host}" in the fabric; hosts are h0 to {hosts[-1]}')
            taken.setdefault(vm.host, name)

    def check_machine(self, vms: Mapping[str, VmSpec], dpus: Mapping[str, DpuSpec]) -> None:
        """This machine has the CPUs, the memory and the files."""
        allowed = sorted(os.sched_getaffinity(0))
        for name, dpu in dpus.items():
            for index, cpu in enumerate(dpu.cpus):
                if cpu not in allowed:
                    shown = ", ".join(map(str, allowed))
                    self.problem(("dpu", name, "cpus", index), f"CPU {cpu} is not available; allowed: {shown}")
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for name, vm in vms.items():
            if vm.memory > total:
                message = f"{format_size(vm.memory)} are more than this machine has; at most {format_size(total)}"
                self.problem(("vm", name, "memory"), message)
            for key, rights in (("kernel", os.R_OK), ("initrd", os.R_OK), ("disk", os.R_OK | os.W_OK)):
                if (value := getattr(vm, key)) is not None:
                    self.check_file(("vm", name, key), self.folder / value, rights)
        promised, available = 0, memory_available_bytes()
        for name, dpu in dpus.items():
            for group_name, group in dpu.group.items():
                promised += group.size if group.backend == "memory" else 0
                if promised > available:
                    message = f"groups in memory need {format_size(promised)} up to here, and "
                    message += f'{format_size(available)} are available; make them smaller, or take backend = "file"'
                    self.problem(("dpu", name, "group", group_name, "size"), message)
        for path, controller in _controllers(dpus):
            for index, spec in enumerate(controller.namespaces):
                at = (*path, "namespaces", index)
                if spec.group is not None:
                    continue
                if spec.backend == "memory":
                    if promised <= available < promised + spec.size:
                        self.problem(
                            (*at, "size"),
                            f"memory namespaces need {format_size(promised + spec.size)} up to here, and "
                            f'{format_size(available)} are available; make them smaller, or take backend = "file"',
                        )
                    promised += spec.size
                elif spec.path is not None:
                    self.check_back_end((*at, "path"), self.folder / spec.path, spec.size)

    def check_file(self, path: KeyPath, file: Path, rights: int) -> None:
        """``file`` is there for ``rights`` (os.R_OK, ...)."""
        if file.is_dir() or not file.exists():
            self.problem(path, f"there is no file {file}; a path is relative to the scenario's folder")
        elif not os.access(file, rights):
            self.problem(path, f"{file} cannot be {'written' if rights & os.W_OK else 'read'}; see its permissions")

    def check_back_end(self, path: KeyPath, file: Path, size: int) -> None:
        """A namespace's file can be made, or is one of its size, or a block device."""
        if not file.exists():
            if not file.parent.is_dir():
                self.problem(path, f"there is no folder {file.parent}; make it, or give another path")
            elif not os.access(file.parent, os.W_OK | os.X_OK):
                self.problem(path, f"no file can be made in {file.parent}; see its permissions, or give another path")
            return
        mode, found = file.stat().st_mode, file.stat().st_size
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            self.problem(path, f"{file} is neither a file nor a block device; give another path")
        elif stat.S_ISREG(mode) and found != size:
            fix = f"write size = {found}" if found else "remove it, and it is made anew"
            self.problem(path, f"{file} has {found} bytes, the namespace {size}; {fix}, or give another path")
        else:
            self.check_file(path, file, os.R_OK | os.W_OK)

    def attached(self, vm: str) -> list[str]:
        """The controllers that the document gives to ``vm``, known or not."""
        raw = _table(_table(self.document.get("vm")).get(vm)).get("nvme", [])
        return [device for device in raw if isinstance(device, str)] if isinstance(raw, list) else []

    def devices(self) -> list[str]:
        """Every DPU.CONTROLLER that the document names, right or wrong otherwise."""
        return [
            f"{dpu}.{controller}"
            for dpu, raw in _table(self.document.get("dpu")).items()
            for controller in _table(_table(raw).get("nvme"))
        ]

    def listed(self, kind: str, model: type[Model]) -> dict[int, Model]:
        """The tables ``[[kind]]`` that are right, by their numbers."""
        table = self.document.get(kind, [])
        if not isinstance(table, list):
            self.problem((kind,), f"{kind} is an array of tables: [[{kind}]]")
            return {}
        parts = {index: self.part(model, raw, (kind, index)) for index, raw in enumerate(table)}
        return {index: part for index, part in parts.items() if part is not None}

    def check_events(
        self, faults: Mapping[int, FaultSpec], calls: Mapping[int, CallSpec], dpus: Mapping[str, DpuSpec]
    ) -> None:
        """Faults have their device and namespace, calls their DPU."""
        devices = self.devices()
        for index, fault in faults.items():
            dpu, name = split_device(fault.device)
            controller = dpus[dpu].nvme.get(name) if dpu in dpus else None
            if fault.device not in devices:
                self.problem(("faults", index, "device"), _unknown("controller", fault.device, devices))
            elif controller is not None and fault.nsid > len(controller.namespaces):
                message = f"{fault.device} has {len(controller.namespaces)} namespaces"
                self.problem(("faults", index, "nsid"), message)
            elif dpu in dpus and dpus[dpu].engine == "spdk":
                self.problem(("faults", index, "device"), "SPDK has no such faults; use the engine dpud")
        for index, call in calls.items():
            if call.dpu not in _table(self.document.get("dpu")):
                self.problem(("calls", index, "dpu"), _unknown("DPU", call.dpu, _table(self.document.get("dpu"))))

    def workloads(self) -> Iterable[Params]:
        raw_workloads = self.document.get("workload", [])
        if not isinstance(raw_workloads, list):
            self.problem(("workload",), "workload is an array of tables: [[workload]]")
            return []
        checked = (self.workload(raw, ("workload", index)) for index, raw in enumerate(raw_workloads))
        return [params for params in checked if params is not None]

    def workload(self, raw: Any, path: KeyPath) -> Params | None:
        kind = _table(raw).get("type")
        if not isinstance(kind, str) or kind not in WORKLOADS:
            at = (*path, "type") if kind is not None else path
            self.problem(
                at,
                f"type is missing; one of: {', '.join(WORKLOADS)}"
                if kind is None
                else _unknown("workload type", kind, WORKLOADS),
            )
            return None
        params = self.part(WORKLOADS[kind].params, raw, path)
        files = self.files(raw, WORKLOADS[kind].paths, path)
        common = params or self.common(raw)
        vm, device = self.place(common, path)
        if params is None:
            return None
        self.check_fit(params, device, path)
        return params.model_copy(update={"vm": vm, "device": device, "name": params.name or kind, **files})

    def common(self, raw: Mapping[str, Any]) -> Params:
        """What every workload has, out of one whose own parameters are wrong."""
        values: dict[str, Any] = {"type": ""}
        for key in Params.model_fields.keys() & raw.keys():
            try:
                Params.model_validate({"type": "", key: raw[key]})
            except ValidationError:
                continue
            values[key] = raw[key]
        return Params.model_validate(values)

    def files(self, raw: Mapping[str, Any], keys: Iterable[str], path: KeyPath) -> dict[str, str]:
        """The user's files among the parameters, by key, relative to the scenario's folder no more."""
        files: dict[str, str] = {}
        for key in keys:
            value = raw.get(key)
            if isinstance(value, str) and value:
                files[key] = str(self.folder / value)
                self.check_file((*path, key), self.folder / value, os.R_OK)
        return files

    def place(self, params: Params, path: KeyPath) -> tuple[str, str]:
        """Its VM and its device, as it names them or as there is only one; "" with a problem otherwise."""
        vms, devices = list(_table(self.document.get("vm"))), self.devices()
        device = params.device
        owners = [vm for vm in vms if device in self.attached(vm)]
        if params.vm and params.vm not in vms:
            self.problem((*path, "vm"), _unknown("VM", params.vm, vms))
        if device and device not in devices:
            self.problem((*path, "device"), _unknown("controller", device, self.attached(params.vm) or devices))
        elif device and not owners:
            vm = params.vm or "VM"
            self.problem((*path, "device"), f'"{device}" is not attached to a VM; add it to vm.{vm}.nvme')
        elif device and params.vm in vms and params.vm not in owners:
            message = f'"{device}" is attached to VM "{owners[0]}"; write vm = "{owners[0]}", or leave vm out'
            self.problem((*path, "vm"), message)
        if device:
            self.check_nsid(params, device, path)
            return params.vm or (owners or [""])[0], device
        vm = params.vm or (vms[0] if len(vms) == 1 else "")
        if not vm and vms:
            several = [one for one in vms if self.attached(one)]
            self.problem(path, f"vm or device is missing; a VM: {', '.join(several or vms)}")
        if vm not in vms:
            return "", ""
        attached = self.attached(vm)
        if len(attached) != 1:
            self.problem(
                path,
                f"device is missing; one of: {', '.join(attached)}"
                if attached
                else f'VM "{vm}" has no controller to work on; add nvme = ["DPU.CONTROLLER"] to it',
            )
            return vm, ""
        self.check_nsid(params, attached[0], path)
        return vm, attached[0]

    def namespaces(self, device: str) -> Any:
        """What the document says of the namespaces of ``device``, right or wrong."""
        dpu, controller = split_device(device)
        raw = _table(_table(_table(_table(self.document.get("dpu")).get(dpu)).get("nvme")).get(controller))
        return raw.get("namespaces", [{}])

    def check_nsid(self, params: Params, device: str, path: KeyPath) -> None:
        namespaces = self.namespaces(device)
        if device in self.devices() and isinstance(namespaces, list) and params.nsid > len(namespaces):
            count = len(namespaces)
            self.problem((*path, "nsid"), f'controller "{device}" has namespace{"s" * (count > 1)} 1 to {count}')

    def check_fit(self, params: Params, device: str, path: KeyPath) -> None:
        """What the workload says of the namespace that it is to work on, as far as that is known by now."""
        check, namespaces = WORKLOADS[params.type].check, self.namespaces(device)
        if check is None or device not in self.devices() or params.nsid > len(namespaces):
            return
        try:
            spec = NamespaceSpec.model_validate(namespaces[params.nsid - 1])
        except (ValidationError, KeyError, TypeError):  # that has its own problem
            return
        if spec.path is not None and (self.folder / spec.path).is_block_device():
            return
        name = f"namespace {params.nsid} of {device}"
        try:
            check(params, BlockDevice(name, device, params.nsid, spec.block_size, spec.size))
        except EmuError as error:
            self.problem(path, f"{error.message}; {error.hint}")


def _chosen(part: BaseModel, options: Sequence[str]) -> tuple[str, ...]:
    """Those of ``options`` that are on in ``part``."""
    return tuple(option for option in options if getattr(part, option, False))


def _controllers(dpus: Mapping[str, DpuSpec]) -> Iterator[tuple[KeyPath, ControllerSpec]]:
    """Every controller and where it is."""
    for name, dpu in dpus.items():
        for controller_name, controller in dpu.nvme.items():
            yield ("dpu", name, "nvme", controller_name), controller


def _table(raw: Any) -> Mapping[str, Any]:
    return raw if isinstance(raw, dict) else {}


def _shown(path: KeyPath) -> str:
    """A path as a person writes it: [vm.web], [[workload]]."""
    if path[0] == "workload":
        return "[[workload]]"
    return f"[{'.'.join(str(key) for key in path if isinstance(key, str))}]"


def _line(where: str) -> int:
    line = where.rpartition(":")[2]
    return int(line) if line.isdigit() else 0


_SAME = (
    {"bs", "bsize", "blocksize", "block_size"},
    {"iodepth", "depth", "qd", "qdepth", "queue_depth"},
    {"numjobs", "jobs", "threads"},
    {"runtime", "time", "duration"},
    {"memory", "ram", "mem"},
    {"vcpus", "cpus", "smp"},
    {"share_memory", "share", "shared", "unshared"},
    {"force_mappable_bar0", "mapped", "mapped_doorbells"},
    {"disable_msix", "msi", "msi_only"},
)
"""What other tools call a key: a better guess than the spelling is."""


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A sentence about a name that is not known, with the nearest that is, or with all of them."""
    names = [str(item) for item in known]
    near = [one for one in names if any({name, one} <= same for same in _SAME)]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        hint = f'; did you mean "{near[0]}"?'
    else:
        hint = f"; known: {', '.join(names)}" if names else "; there is none"
    return f'unknown {kind} "{name}"{hint}'


def _explain(model: type[BaseModel], path: KeyPath, detail: Any) -> str:
    """A pydantic error in this project's words."""
    location: KeyPath = tuple(detail["loc"])
    key = location[-1] if location and isinstance(location[-1], str) else ""
    if detail["type"] == "extra_forbidden":
        around = (*path, *location[:-1])
        return f"{_unknown('key', key, _fields(model, location[:-1]))} (in {_shown(around)})"
    if detail["type"] == "missing":
        return f"{key} is missing"
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        return f"{key}: {message}" if key else message
    if detail["type"] == "literal_error":
        expected = re.findall(r"'([^']*)'|(\d+)", detail["ctx"]["expected"])
        return _unknown(key, str(detail["input"]), (text or number for text, number in expected))
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{'.'.join(map(str, location))}: {message}, not {detail['input']!r}"


def _fields(model: type[BaseModel], location: KeyPath) -> list[str]:
    """The keys that ``model`` takes at ``location`` inside it."""
    annotation: Any = model
    for step in location:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = annotation.model_fields[str(step)].annotation
        else:
            annotation = annotation.__args__[0 if isinstance(step, int) else 1]
    return list(annotation.model_fields)
