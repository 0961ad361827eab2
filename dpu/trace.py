"""The trace of commands: what each poller has written down, as text for a person and as JSON for Perfetto.

Use: ``dpu_trace_start``, ``dpu_trace_stop``, ``dpu_trace_save`` (dpu/rpc/methods.py); ``records(area)`` copies what a
poller has, ``commands`` makes ``Command`` of it, in nanoseconds, ``text`` and ``perfetto`` give the two files.

Stages of a command, in order; those that it did not go through are left out:
    wait          found in its queue -> begun
    asic          begun -> left to another stage, or completed
    soc           in the virtual queues, or with the soc
    io_uring      with the kernel
    to control    in the ring to control
    control       with control, or with a thread of it
    from control  in the ring back, completed at the next pass
An Asynchronous Event Request has no stages but the time that it is parked.

Limits: the newest ``entries`` commands of each poller, in kept memory: a worker that dies leaves what it wrote down
until then, and the next one goes on with it. Needs the stamps (``DPU_EMU_STAMPS``).
Source: "Trace Event Format" (Google, 2016): nestable asynchronous events, which Perfetto and chrome://tracing read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dpu import layout
from dpu.nvme.wire import AdminOpcode, NvmOpcode

ENTRIES: Final = 1 << 15
ENTRIES_MAX: Final = 1 << 20

WHY: Final = {
    layout.WHY_ADMIN: "admin command",
    layout.WHY_FILE: "the data is in a file",
    layout.WHY_NO_URING: "file without io_uring",
    layout.WHY_BUFFER: "needs a buffer for a file's data",
    layout.WHY_MARKS: "marks of Write Uncorrectable",
    layout.WHY_REFUSED: "the file system does not do it",
    layout.WHY_UNSHARED: "guest memory is not shared",
    layout.WHY_SOC: "the map of the volume",
    layout.WHY_ROOM: "no clusters in the pool",
    layout.WHY_SHARED: "clusters shared with a snapshot",
    layout.WHY_COMMIT: "the map is not durable yet",
    layout.WHY_FAULT: "a fault that was asked for",
}
_NAMES: Final[dict[int, str]] = {opcode: opcode.name.replace("_", " ").capitalize() for opcode in NvmOpcode}
_ADMIN_NAMES: Final[dict[int, str]] = {opcode: opcode.name.replace("_", " ").capitalize() for opcode in AdminOpcode}
_WITH_BLOCKS: Final = set(NvmOpcode) - {NvmOpcode.FLUSH, NvmOpcode.DATASET_MANAGEMENT}


@dataclass(frozen=True)
class Command:
    """One command; times in nanoseconds of the poller's clock. ``stages``: (name, begin, end)."""

    controller: str
    sqid: int
    cid: int
    name: str
    nsid: int
    lba: int | None
    bytes: int
    status: int
    why: str
    begin_ns: int
    end_ns: int
    stages: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Part:
    """What one poller has: TRACE records, how many older ones are lost, controllers by client, ticks to ns."""

    records: Any
    lost: int
    names: Mapping[int, str]
    to_ns: Callable[[int], int]


def commands(parts: Sequence[Part]) -> list[Command]:
    """By time of arrival: all pollers have one clock, so one ``to_ns`` for all."""
    found = [
        command(record, part.names.get(number := int(record["client"]), f"client {number}"), part.to_ns)
        for part in parts
        for record in part.records
    ]
    return sorted(found, key=lambda one: one.begin_ns)


def records(area: Any) -> tuple[Any, int]:
    """What a trace area holds, oldest first, and how many were lost. The poller may go on meanwhile."""
    entries = (len(area) - layout.TRACE_HEADER) // layout.TRACE_BYTES
    counter = area[:8].view(np.int64)
    end = int(counter[0])
    ring = area[layout.TRACE_HEADER :].view(layout.TRACE).copy()
    first = max(0, int(counter[0]) + 1 - entries)  # what was overwritten meanwhile, and the one that may be half so
    return ring[np.arange(first, max(end, first)) % entries], first


def command(record: Any, controller: str, to_ns: Callable[[int], int]) -> Command:
    """A TRACE record taken apart. A stamp never lies before the one before it: counters of two CPUs may differ."""
    names, ends = ["wait"], [int(record["begun"])]
    if record["where"] == layout.WHERE_PARKED:
        names, ends = ["parked"], [int(record["done"])]
    elif not record["handed"]:
        names, ends = [*names, "asic"], [*ends, int(record["done"])]
    elif record["where"] == layout.WHERE_ASIC:
        names, ends = [*names, "asic", "soc"], [*ends, int(record["handed"]), int(record["done"])]
    elif record["where"] == layout.WHERE_URING:
        names, ends = [*names, "asic", "io_uring"], [*ends, int(record["handed"]), int(record["done"])]
    else:
        names += ["asic", "to control", "control", "from control"]
        ends += [int(record[stamp]) for stamp in ("handed", "taken", "answered", "done")]
    at = begin = int(record["seen"])
    stages = []
    for name, end in zip(names, ends):
        end = max(at, end)
        stages.append((name, to_ns(at), to_ns(end)))
        at = end
    opcode, sqid = int(record["opcode"]), int(record["sqid"])
    known = (_NAMES if sqid else _ADMIN_NAMES).get(opcode)
    return Command(
        controller=controller,
        sqid=sqid,
        cid=int(record["cid"]),
        name=known or f"Opcode {opcode:02X}h",
        nsid=int(record["nsid"]),
        lba=int(record["lba"]) % (1 << 64) if sqid and opcode in _WITH_BLOCKS else None,
        bytes=int(record["bytes"]),
        status=int(record["status"]),
        why=WHY.get(int(record["why"]), ""),
        begin_ns=to_ns(begin),
        end_ns=to_ns(at),
        stages=tuple(stages),
    )


def text(commands: Sequence[Command], lost: int) -> Iterator[str]:
    """Lines for a person."""
    yield f"# {len(commands)} commands, {lost} older ones lost; {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n"
    yield "# at_us: found in the queue, from the first command on; total_us: until its completion; then each stage\n"
    yield f"#{'at_us':>12} {'total_us':>9} {'sq':>3} {'cid':>5} {'nsid':>4} {'lba':>12} {'bytes':>7} status"
    yield " command; stages in us; why it left the asic; controller\n"
    start = min((one.begin_ns for one in commands), default=0)
    for one in commands:
        lba = "-" if one.lba is None else str(one.lba)
        status = "ok" if one.status & 0x7FF == 0 else f"{one.status & 0x7FF:03X}h"
        stages = ", ".join(f"{name} {(end - begin) / 1000:.2f}" for name, begin, end in one.stages)
        line = f" {(one.begin_ns - start) / 1000:12.2f} {(one.end_ns - one.begin_ns) / 1000:9.2f} {one.sqid:3}"
        line += f" {one.cid:5} {one.nsid:4} {lba:>12} {one.bytes:7} {status:6} {one.name}; {stages}"
        yield f"{line}; {one.why or '-'}; {one.controller}\n"


def perfetto(commands: Sequence[Command], lost: int) -> Iterator[str]:
    """JSON, an event a line: controllers are processes, queues threads, commands slices, stages slices in them."""
    yield '{"displayTimeUnit": "ns", "otherData": ' + json.dumps({"lost": lost}) + ', "traceEvents": [\n'
    lines = sorted(_events(commands), key=lambda event: event.get("ts", -1.0))  # stable: slices stay nested
    for number, event in enumerate(lines):
        yield json.dumps(event) + (",\n" if number + 1 < len(lines) else "\n")
    yield "]}\n"


def _events(commands: Sequence[Command]) -> Iterator[dict[str, Any]]:
    start = min((one.begin_ns for one in commands), default=0)
    controllers = {name: pid for pid, name in enumerate(dict.fromkeys(one.controller for one in commands), 1)}
    for name, pid in controllers.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for name, sqid in dict.fromkeys((one.controller, one.sqid) for one in commands):
        label = {"name": f"queue {sqid}" if sqid else "admin queue"}
        yield {"ph": "M", "name": "thread_name", "pid": controllers[name], "tid": sqid, "args": label}
    for number, one in enumerate(commands, 1):
        common: Mapping[str, Any] = {
            "cat": "nvme",
            "id": number,
            "pid": controllers[one.controller],
            "tid": one.sqid,
        }
        details = {"cid": one.cid, "nsid": one.nsid, "bytes": one.bytes, "status": f"{one.status & 0x7FF:03X}h"}
        details |= {} if one.lba is None else {"lba": one.lba}
        details |= {"why": one.why} if one.why else {}
        yield {**common, "ph": "b", "name": one.name, "ts": (one.begin_ns - start) / 1000, "args": details}
        for name, begin, end in one.stages:
            yield {**common, "ph": "b", "name": name, "ts": (begin - start) / 1000}
            yield {**common, "ph": "e", "name": name, "ts": (end - start) / 1000}
        yield {**common, "ph": "e", "name": one.name, "ts": (one.end_ns - start) / 1000}


FORMATS: Final = {"text": text, "perfetto": perfetto}
