"""What each back end has served: SPDK's ``bdev_get_iostat`` out of the pollers' tables.

A poller counts in a row per controller and namespace (layout.SPACE), which only grows and goes away with its
controller. A back end's figures are what rows that no longer serve it gave (``past``) and what each row that does has
gained since it began to (``base``). Both are part of the stored configuration, and a row moves from one to the other
in one commit, so a worker that is killed loses no command and counts none twice.

Use: ``attach`` before a row begins to serve a back end, ``settle`` and then ``forget`` when its controller goes
away, with a commit after each of the first two; ``report`` and ``report_channels`` give the answers. Counts and bytes
are of commands that succeeded; ticks are from the moment a poller found a command in its queue until it posted the
completion.
Limits: a reset while commands complete may leave one of them in the largest and smallest latency.
Source: SPDK's JSON-RPC documentation, bdev_get_iostat and bdev_reset_iostat; recorded answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpu import layout

RESET_MODES = ("none", "all", "maxmin", "error")

# SPDK's names, in its order -> the words of a row.
_OPERATIONS = {
    "bytes_read": "bytes_read",
    "num_read_ops": "reads",
    "bytes_written": "bytes_written",
    "num_write_ops": "writes",
    "bytes_unmapped": "bytes_unmapped",
    "num_unmap_ops": "unmaps",
    "bytes_copied": "bytes_copied",
    "num_copy_ops": "copies",
}
_LATENCIES = {
    f"{start}{op}_latency_ticks": f"{op}_ticks{end}"
    for op in ("read", "write", "unmap", "copy")
    for start, end in (("", ""), ("max_", "_max"), ("min_", "_min"))
}
_ERRORS = {"failed": "media_errors", "miscompare": "miscompares"}

_MAX = tuple(name for name in layout.SPACE.names if name.endswith("_max"))
_MIN = tuple(name for name in layout.SPACE.names if name.endswith("_min"))
_SUMS = tuple(name for name in layout.SPACE.names if name not in _MAX + _MIN)
_RESET = {"all": _SUMS, "maxmin": (), "error": tuple(_ERRORS.values())}

Counts = dict[str, int]


class Row(NamedTuple):
    """A row of a live controller. ``words``: the record; ``thread``: 1's based number of its poller."""

    client: int
    nsid: int
    thread: int
    words: Any


@dataclass
class _Attached:
    """Which back end a row serves, and what the row had counted before (without zeros)."""

    bdev: str
    base: Counts = field(default_factory=dict)


class IoStat:
    """The books. Keys of rows are (client, nsid); back ends are known by their names."""

    def __init__(self) -> None:
        self._past: dict[str, Counts] = {}
        self._attached: dict[tuple[int, int], _Attached] = {}

    def attach(self, row: Row, bdev: str) -> None:
        """``row`` serves ``bdev`` from now on, and whatever it served before no longer."""
        attached = self._attached.get((row.client, row.nsid))
        if attached is not None and attached.bdev == bdev:
            return
        if attached is None:
            # Its first: all that it holds is of this one, also when a worker was killed before it stored that.
            self._attached[row.client, row.nsid] = _Attached(bdev)
            return
        self.settle([row])
        for word in _MAX + _MIN:
            row.words[word] = 0
        self._attached[row.client, row.nsid] = _Attached(bdev, _without_zeros(_sums(row)))

    def settle(self, rows: Iterable[Row]) -> None:
        """What ``rows`` have gained is their back ends' once and for all. Twice does no harm."""
        for row in rows:
            attached = self._attached.get((row.client, row.nsid))
            if attached is not None and attached.bdev:
                self._past[attached.bdev] = _add(self._past.get(attached.bdev, {}), _gained(row, attached.base))
                attached.base = _without_zeros(_sums(row))

    def forget(self, client: int) -> None:
        """The rows of ``client`` are gone; they were settled and committed before."""
        for key in [key for key in self._attached if key[0] == client]:
            del self._attached[key]

    def keep(self, bdevs: Iterable[str]) -> None:
        """Drop what belongs to other back ends. Their rows serve nothing, but are known not to be fresh."""
        names = set(bdevs)
        self._past = {name: counts for name, counts in self._past.items() if name in names}
        for attached in self._attached.values():
            if attached.bdev not in names:
                attached.bdev = ""

    def reset(self, bdevs: Iterable[str], rows: Iterable[Row], mode: str) -> None:
        """Start again from zero: "all", the errors ("error"), or the largest and smallest latencies ("maxmin")."""
        if mode == "none":
            return
        names, words = set(bdevs), _RESET[mode]
        for name in names & self._past.keys():
            gone = {*words, *(() if mode == "error" else _MAX + _MIN)}
            self._past[name] = {word: count for word, count in self._past[name].items() if word not in gone}
        for row in rows:
            attached = self._attached.get((row.client, row.nsid))
            if attached is not None and attached.bdev in names:
                attached.base = _without_zeros(attached.base | {word: int(row.words[word]) for word in words})
                if mode != "error":
                    for word in _MAX + _MIN:
                        row.words[word] = 0

    def report(self, bdev: str, rows: Iterable[Row]) -> dict[str, Any]:
        """The object of ``bdev``."""
        counts = self._past.get(bdev, {})
        for _, gained in self._serving(bdev, rows):
            counts = _add(counts, gained)
        return {"name": bdev, **_shape(counts)}

    def report_channels(self, bdev: str, rows: Iterable[Row]) -> list[dict[str, Any]]:
        """One object for each poller that serves ``bdev`` now, as SPDK's channels are one for each thread."""
        threads: dict[int, Counts] = {}
        for row, gained in self._serving(bdev, rows):
            threads[row.thread] = _add(threads.get(row.thread, {}), gained)
        return [{"thread_id": thread, **_shape(counts)} for thread, counts in sorted(threads.items())]

    def _serving(self, bdev: str, rows: Iterable[Row]) -> Iterable[tuple[Row, Counts]]:
        for row in rows:
            attached = self._attached.get((row.client, row.nsid))
            if attached is not None and attached.bdev == bdev:
                yield row, _gained(row, attached.base)

    def to_config(self) -> dict[str, Any]:
        return {
            "past": self._past,
            "attached": [[*key, one.bdev, one.base] for key, one in self._attached.items()],
        }

    def from_config(self, config: Mapping[str, Any]) -> None:
        self._past = dict(config["past"])
        self._attached = {(client, nsid): _Attached(bdev, base) for client, nsid, bdev, base in config["attached"]}


def _sums(row: Row) -> Counts:
    return {word: int(row.words[word]) for word in _SUMS}


def _without_zeros(counts: Counts) -> Counts:
    return {word: count for word, count in counts.items() if count}


def _gained(row: Row, base: Mapping[str, int]) -> Counts:
    gained = {word: count - base.get(word, 0) for word, count in _sums(row).items()}
    return gained | {word: int(row.words[word]) for word in _MAX + _MIN}


def _add(one: Mapping[str, int], other: Mapping[str, int]) -> Counts:
    """Sums added, the larger of two largest and the smaller of two smallest; a smallest of 0 is none."""
    total = {word: one.get(word, 0) + other.get(word, 0) for word in _SUMS}
    for word in _MAX:
        total[word] = max(one.get(word, 0), other.get(word, 0))
    for word in _MIN:
        found = [counts[word] for counts in (one, other) if counts.get(word)]
        total[word] = min(found, default=0)
    return total


def _shape(counts: Mapping[str, int]) -> dict[str, Any]:
    return {
        **{name: counts.get(word, 0) for name, word in (_OPERATIONS | _LATENCIES).items()},
        "io_error": {name: counts[word] for name, word in _ERRORS.items() if counts.get(word)},
    }
