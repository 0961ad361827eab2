"""What a workload is: parameters with types, one coroutine, a result made of samples.

A workload is one module with a :class:`Workload` in it and one row in ``emu.workloads.WORKLOADS``.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from dpu.errors import EmuError
from emu.workloads.measures import Histogram, Series


class Params(BaseModel):
    """What every workload takes. ``vm`` and ``device`` may be left out where only one is possible."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    name: str = Field(default="", max_length=64)
    """What the report calls it; "" is its type."""
    vm: str = ""
    device: str = ""
    """The controller it works on, as DPU.CONTROLLER."""
    nsid: int = Field(default=1, ge=1)


class Output(Protocol):
    """What a program in the guest left: :class:`emu.guest.ExecResult`."""

    @property
    def code(self) -> int: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...


class GuestLike(Protocol):
    """The part of a guest that workloads use. Times are in seconds of a quiet host."""

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float, on_output: Callable[[int, bytes], None] | None = None
    ) -> Output: ...

    async def read_file(self, path: str) -> bytes: ...

    async def write_file(self, path: str, data: bytes, permissions: int = 0o644) -> None: ...


@dataclass(frozen=True)
class BlockDevice:
    """A namespace as the guest's kernel shows it."""

    path: str  # /dev/nvme0n1
    controller: str  # nvme0
    nsid: int
    block_size: int  # bytes
    size: int  # bytes

    @property
    def name(self) -> str:
        """nvme0n1"""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Context:
    """Where a workload runs. ``done`` is called with the part of the work that is done, 0.0 to 1.0."""

    guest: GuestLike
    device: BlockDevice
    done: Callable[[float], None] = lambda fraction: None

    async def run(self, argv: Sequence[str], timeout_s: float) -> Output:
        """Runs ``argv`` in the guest; a failure is a :class:`WorkloadError` with the end of its output."""
        result = await self.guest.exec(argv, timeout_s=timeout_s)
        if result.code != 0:
            said = tail(result.stderr or result.stdout)
            raise WorkloadError(f"`{shlex.join(argv)}` ended with {result.code} in the guest: {said}")
        return result


class WorkloadError(EmuError):
    """The workload ran and did not pass. It becomes the ``error`` of its result, not the end of the run."""


@dataclass(frozen=True)
class Sample:
    """One number: ``metric`` in ``unit``, of the operation ``op`` ("read", "write", ... or "")."""

    metric: str
    value: float
    unit: str
    op: str = ""


@dataclass
class Result:
    """What came of a workload.

    ``detail``: what does not fit a number. ``files``: whole outputs by file name, kept beside the report.
    ``card``: what the card counted for the controller's I/O queues meanwhile (:mod:`emu.report.card`).
    """

    type: str
    name: str = ""
    vm: str = ""
    device: str = ""
    ok: bool = True
    error: str = ""
    seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    histograms: list[Histogram] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    card: dict[str, Any] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict, repr=False)

    def value(self, metric: str, op: str = "") -> float:
        """The one sample ``metric`` of ``op``. KeyError names what there is instead."""
        for sample in self.samples:
            if sample.metric == metric and sample.op == op:
                return sample.value
        known = sorted({f"{sample.op} {sample.metric}".strip() for sample in self.samples})
        raise KeyError(f"no sample {op} {metric}; there are: {', '.join(known)}")

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object; of ``files`` only the names."""
        return {**asdict(self), "files": sorted(self.files)}


@dataclass(frozen=True)
class Workload:
    """A row of the table.

    ``main``: the parameter that follows the type's colon on the command line (``fio:randread``).
    ``paths``: parameters that are files of the user's, relative to the scenario.
    ``check``: EmuError for parameters that a device of that size and block size cannot serve; before the lab starts.
    ``run``: raises :class:`WorkloadError` when the guest's data or a program in the guest is wrong.
    """

    params: type[Params]
    run: Callable[[Any, Context], Awaitable[Result]]
    main: str = ""
    paths: tuple[str, ...] = ()
    check: Callable[[Any, BlockDevice], object] | None = None


def tail(output: bytes, lines: int = 5) -> str:
    """The last ``lines`` lines of a program's output in one line."""
    text = output.decode(errors="replace").strip()
    return " | ".join(line.strip() for line in text.splitlines()[-lines:]) or "(no output)"


def read_user_file(path: str) -> bytes:
    """A file of the user's. EmuError when it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise EmuError(f"cannot read {path}: {error.strerror}", "check the workload's path") from error


async def find_device(guest: GuestLike, controller: str, nsid: int) -> BlockDevice:
    """Namespace ``nsid`` of ``controller`` ("nvme0"), from the guest's sysfs. WorkloadError without it."""
    result = await guest.exec(["sh", "-c", _FIND_DEVICE, "find-device", controller, str(nsid)], timeout_s=30)
    if result.code != 0:
        raise WorkloadError(f"the guest has no namespace {nsid} on {controller}: {tail(result.stderr)}")
    name, block_size, sectors = result.stdout.decode().split()
    return BlockDevice(f"/dev/{name}", controller, nsid, int(block_size), int(sectors) * 512)


# Numbers in names say nothing: with multipath, path nvme1c0n3 belongs to /dev/nvme1n3, and 3 need not be the
# NSID. So the NSID is read, and the size (always in units of 512 bytes) is that of the named device.
_FIND_DEVICE = r"""
for path in /sys/class/nvme/$1/nvme*n*; do
  [ -r "$path/nsid" ] && read -r nsid < "$path/nsid" && [ "$nsid" = "$2" ] || continue
  name=${path##*/}
  case $name in nvme*c*n*) name=${name%%c*}n${name##*n} ;; esac
  read -r block_size < "/sys/block/$name/queue/logical_block_size"
  read -r sectors < "/sys/block/$name/size"
  echo "$name $block_size $sectors"
  exit
done
ls "/sys/class/nvme/$1/" >&2
exit 1
"""
