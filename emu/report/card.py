"""What the card counted while a workload ran: two looks at ``bdev_get_iostat`` and ``dpu_get_stats``, subtracted.

Use::

    before = await look(dpu, "fast", 1)
    ...                                             # the workload
    result.card = since(before, await look(dpu, "fast", 1))

``io``: the namespace's bdev_get_iostat, SPDK's fields, as far as they are sums. The rest is of the controller's I/O
queues together: commands, bytes_read, bytes_written, punts, errors (1 and B), signals
(interrupts sent), wait_ns and serve_ns (found in the queue to begun, begun to completed, summed over commands),
latency ([smallest latency of the bucket in ns, commands]), and whatever else a queue counts. ``complete`` is false
where queues went away meanwhile (a controller reset), because their counts went with them. ``cpu_ns`` is the CPU time
of the worker, all its threads; it is missing where another worker took over.

Limits: an SPDK target tells ``io`` only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpu.errors import EmuError
from emu.daemon import Dpu, bdev_name, nqn
from emu.process import process_cpu_ns

_ABOUT = {"sqid", "entries", "epoch", "fetched"}  # what a queue is; commands are counted beside ``fetched``


@dataclass(frozen=True)
class Look:
    """One look: the controller's I/O queues by SQID, its namespace's sums, the worker and its CPU time."""

    queues: dict[int, dict[str, Any]] = field(default_factory=dict)
    io: dict[str, int] = field(default_factory=dict)
    pid: int = 0
    cpu_ns: int = 0


async def look(dpu: Dpu, controller: str, nsid: int) -> Look:
    """What the daemon says now, as far as it does."""
    try:
        (iostat,) = (await dpu.rpc("bdev_get_iostat", names=[bdev_name(controller, nsid)]))["bdevs"]
    except EmuError:
        return Look()
    io = {key: count for key, count in iostat.items() if key.startswith(("bytes_", "num_"))}
    try:
        stats = await dpu.rpc("dpu_get_stats")
    except EmuError:
        return Look(io=io)
    queues = io_queues(stats, nqn(dpu.name, controller))
    return Look(queues, io, stats["pid"], process_cpu_ns(stats["pid"]))


def io_queues(stats: Mapping[str, Any], name: str) -> dict[int, dict[str, Any]]:
    """Of an answer of ``dpu_get_stats``: the I/O queues of the subsystem ``name`` (an NQN), by SQID."""
    rows = [row for one in stats["controllers"] if one["nqn"] == name for row in one["queues"]]
    return {row["sqid"]: row for row in rows if row["sqid"]}


def since(before: Look, after: Look) -> dict[str, Any]:
    """What was counted in between."""
    if not before.io or not after.io:
        return {}
    document: dict[str, Any] = {"io": {key: count - before.io.get(key, 0) for key, count in after.io.items()}}
    if not after.pid:
        return document
    document |= queues_since(before.queues, after.queues)
    if before.pid == after.pid and after.cpu_ns:
        document["cpu_ns"] = after.cpu_ns - before.cpu_ns
    return document


def queues_since(before: Mapping[int, Mapping[str, Any]], after: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The part of ``since`` that queues count; rows of ``dpu_get_stats`` by SQID."""
    sums: Counter[str] = Counter()
    latency: Counter[int] = Counter()
    complete = set(before) <= set(after)
    for sqid, row in after.items():
        old = before.get(sqid, {})
        if old and (old["epoch"] != row["epoch"] or old["fetched"] > row["fetched"]):
            old, complete = {}, False
        for key in row.keys() - _ABOUT - {"latency"}:
            sums.update(_flat(key, row[key]))
            sums.subtract(_flat(key, old.get(key, 0)))
        latency.update(dict(row["latency"]))
        latency.subtract(dict(old.get("latency", [])))
    document: dict[str, Any] = {key: sums[key] for key in sorted(sums)}
    document["latency"] = [[floor_ns, count] for floor_ns, count in sorted(latency.items()) if count]
    document["complete"] = complete
    return document


def _flat(key: str, value: Any) -> dict[str, int]:
    """A counter; or counters by reason, as "key.reason"."""
    return {f"{key}.{reason}": count for reason, count in value.items()} if isinstance(value, dict) else {key: value}
