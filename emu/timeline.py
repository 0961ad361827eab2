"""What happens to a lab at given times while its workloads run: faults, and calls of a DPU's RPC.

::

    [[faults]]
    at = "20s"                       # after the first workload has begun; left out: at once
    until = "25s"                    # left out: to the end
    device = "card.disk"
    action = "hold"                  # the other keys are those of dpu_fault_add

    [[calls]]
    at = "30s"
    dpu = "card"
    method = "bdev_set_qos_limit"
    params = { name = "disk.1", rw_ios_per_sec = 500 }   # a back end is called CONTROLLER.NSID

Use: ``async with playing(lab, events(faults, calls), progress)``. Times are real time, within what the host's load
allows. Errors: a call that fails is a note of the run; the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dpu.errors import EmuError
from emu.daemon import bdev_name
from emu.lab import Lab
from emu.progress import Progress
from emu.units import DurationSeconds as Duration

IoType = Literal["read", "write", "flush", "unmap", "write_zeroes", "compare", "verify", "copy", "all"]
Action = Literal[
    "status", "delay", "slow", "hold", "lose", "corrupt", "torn", "gone", "full", "read_only", "not_ready", "fatal"
]


class FaultSpec(BaseModel):
    """One ``[[faults]]``. What is None is left to the card."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: Duration = 0.0
    until: Duration | None = None
    device: str
    nsid: int = Field(default=1, ge=1)
    action: Action
    io_types: tuple[IoType, ...] | None = None
    lba: int | None = Field(default=None, ge=0)
    num_blocks: int | None = Field(default=None, ge=1)
    after: int | None = Field(default=None, ge=0)
    every: int | None = Field(default=None, ge=1)
    num: int | None = Field(default=None, ge=1)
    probability: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0)
    sct: int | None = Field(default=None, ge=0, le=7)
    sc: int | None = Field(default=None, ge=0, le=255)
    dnr: bool | None = None
    latency: Duration | None = None
    spread: Duration | None = None
    distribution: Literal["fixed", "uniform", "exponential", "lognormal", "two_point"] | None = None
    corrupt_offset: int | None = Field(default=None, ge=0)
    corrupt_value: int | None = Field(default=None, ge=0, le=255)
    corrupt_bytes: int | None = Field(default=None, ge=0)
    torn_blocks: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> FaultSpec:
        if self.until is not None and self.until <= self.at:
            raise ValueError("until comes after at")
        if self.action in ("delay", "slow") and self.latency is None:
            raise ValueError(f"{self.action} needs latency, how long")
        return self

    def parameters(self) -> dict[str, Any]:
        """Those of dpu_fault_add."""
        given = self.model_dump(
            exclude_none=True, exclude={"at", "until", "device", "nsid", "latency", "spread"}, mode="json"
        )
        for name in ("latency", "spread"):
            if (seconds := getattr(self, name)) is not None:
                given[f"{name}_us"] = round(seconds * 1_000_000)
        return given | {"bdev_name": bdev_name(self.device.partition(".")[2], self.nsid)}


class CallSpec(BaseModel):
    """One ``[[calls]]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: Duration = 0.0
    dpu: str
    method: str
    params: dict[str, Any] = {}


@dataclass(frozen=True)
class Event:
    """A call ``at`` so many seconds; ``what`` is for people."""

    at: float
    dpu: str
    method: str
    params: dict[str, Any]
    what: str


def events(faults: Sequence[FaultSpec], calls: Sequence[CallSpec]) -> list[Event]:
    """In the order of their times."""
    found = [Event(one.at, one.dpu, one.method, one.params, one.method) for one in calls]
    for number, fault in enumerate(faults):
        name, dpu = f"scenario{number}", fault.device.partition(".")[0]
        what = f"{fault.action} on {fault.device} namespace {fault.nsid}"
        found.append(Event(fault.at, dpu, "dpu_fault_add", fault.parameters() | {"name": name}, what))
        if fault.until is not None:
            found.append(Event(fault.until, dpu, "dpu_fault_remove", {"name": name}, f"end of {what}"))
    return sorted(found, key=lambda one: one.at)


@contextlib.asynccontextmanager
async def playing(lab: Lab, timeline: Sequence[Event], progress: Progress) -> AsyncIterator[None]:
    """The events happen while the body runs; what is later than that does not."""
    task = asyncio.create_task(_play(lab, timeline, progress))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _play(lab: Lab, timeline: Sequence[Event], progress: Progress) -> None:
    began = time.monotonic()
    for event in timeline:
        await asyncio.sleep(max(0.0, began + event.at - time.monotonic()))
        try:
            await lab.dpus[event.dpu].rpc(event.method, **event.params)
        except EmuError as error:
            progress.note(f"at {event.at:g} s: {event.what} was refused: {error}")
        else:
            progress.note(f"at {time.monotonic() - began:.1f} s: {event.what}")
