"""The kept memory of a group of volumes: its parts as arrays and as addresses, and what a dead worker leaves in it.

Use: ``Area.create(cluster_shift)`` makes a sparse memfd, ``Area(fd)`` maps one; the keeper holds a duplicate, so maps
survive the worker, not the daemon. ``set_backing`` names a back end; ``fill`` gives clusters and leaves to a poller;
``drain`` takes what pollers have changed; ``recover`` comes first in a new worker. Nothing here decides anything.

How a map changes (dpu.fastpath.soc does it, for control :meth:`Area.install`). Pools are single-producer
single-consumer rings that control fills with clean clusters (they read as zeroes), so a mapping may be published
before the data is written. One change, in this order:

1. ``changes`` of the volume grows, so that a Flush that sees the change sees that something is to be committed;
2. where the leaf is not owned: a leaf of the leaf pool is peeked at, filled (with the old one or zeroes), given the
   volume's epoch, LOG_LEAF is written at the tail of the log, the root word is exchanged, log and pool move;
3. a place of the pool is peeked at; the record is written at the tail, its sequence last; LOG_COPY: data is copied;
4. the entry is exchanged (compare and swap: another poller may have been faster, then all begins anew);
5. the tail of the log moves, then the head of the pool.

A worker that dies between any two of them leaves a record at the tail whose ``new`` is in the map (it counts), or is
not (the place is still in the pool, perhaps with data if it was LOG_COPY).

For who commits maps: read ``changes``; wait for a grace of all pollers, so that what was counted is in the logs;
``drain``; take the leaves that are LEAF_CHANGED and the roots that have ``root_changed``; make the data durable, then
the maps; then ``committed`` is what ``changes`` was. A cluster that a drained log has freed is CLUSTER_LEAVING: it
may be used again when that is committed and everything that was begun before has ended (see dpu.volumes.interface).

Limits: the constants of dpu.layout; memory is taken for pages that were written only (8 bytes per mapped cluster if
leaves are full). Errors: OSError.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpu import layout
from dpu.fastpath import soc
from dpu.fastpath.atomics import load_u64, store_u64
from dpu.guestmap import Mapping
from dpu.layout import LEAF_BITS, LEAF_ENTRIES, PLACE, RING_DATA, RING_ENTRIES, RING_HEAD, RING_TAIL
from dpu.volumes.gate import Gate

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Extent:
    """Bytes of a volume that lie together. ``backing`` -1: they are not mapped, ``offset`` is then 0."""

    backing: int
    offset: int  # in the back end
    length: int


@dataclass(frozen=True)
class Answer:
    """To :meth:`Area.ask`. ``why`` 0, or WHY_*: WHY_ROOM, or WHY_SHARED with the clusters to make writable."""

    why: int
    extents: list[Extent]
    done: int  # bytes of an erasure that are dealt with; the rest is to be asked for again
    first: int
    clusters: int


class Area:
    """:param fd: the memfd, owned from now on.

    ``group``, ``backings``, ``volumes``, ``roots``, ``leaf_epochs``, ``leaf_states``, ``cluster_states``, ``leaves``:
    the parts (see dpu.layout). ``address``: of the GROUP_LOCAL record, for the compiled stage. ``gate``: of control's
    threads. ``lock``, ``newcomers``: of Worker.quiet; the planes that have come while it lasts. ``taken``: told of
    records that were drained.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.gate = Gate()
        self.lock = asyncio.Lock()
        self.newcomers: list[Any] | None = None
        self.taken: Callable[[Any], None] = lambda records: None
        self._mapping = Mapping(fd, layout.GROUP_BYTES)
        self.host = self._mapping.host
        part = self._part
        self.group = part(0, layout.GROUP, 1)[0]
        assert (self.group.magic, self.group.version) == (layout.GROUP_MAGIC, layout.VERSION)
        self.backings = part(layout.BACKINGS_OFFSET, layout.GROUP_BACKING, layout.BACKINGS)
        self.volumes = part(layout.VOLUMES_OFFSET, layout.VOLUME, layout.VOLUMES_MAX)
        self.roots = self._words(layout.ROOTS_OFFSET, np.int64, layout.ROOT_WORDS)
        self.leaf_epochs = self._words(layout.LEAF_EPOCHS_OFFSET, np.int64, layout.LEAVES)
        self.leaf_states = self._words(layout.LEAF_STATES_OFFSET, np.uint8, layout.LEAVES)
        self.cluster_states = self._words(layout.CLUSTER_STATES_OFFSET, np.uint8, layout.CLUSTERS_MAX)
        entries = self._words(layout.LEAVES_OFFSET, np.int64, layout.LEAVES * LEAF_ENTRIES)
        self.leaves = entries.reshape(layout.LEAVES, LEAF_ENTRIES)
        self.local: Any = np.zeros(1, layout.GROUP_LOCAL).view(np.recarray)
        self.local_backings: Any = np.zeros(layout.BACKINGS, layout.BACKING).view(np.recarray)
        self.address = int(self.local.ctypes.data)
        g = self.local[0]
        g.roots, g.leaf_epochs = self.host + layout.ROOTS_OFFSET, self.host + layout.LEAF_EPOCHS_OFFSET
        g.areas, g.leaves = self.host + layout.AREAS_OFFSET, self.host + layout.LEAVES_OFFSET
        g.backings, g.volumes = int(self.local_backings.ctypes.data), self.host + layout.VOLUMES_OFFSET
        g.cluster_shift, g.offload, g.copy_max = self.group.cluster_shift, 1, 1 << 20
        self._control: Any = np.zeros(1, layout.POLLER).view(np.recarray)  # stands for a poller
        self._control[0].number, self._control[0].zeroes = layout.CONTROL_AREA, 1
        self._block = np.zeros(layout.BLOCK_BYTES, np.uint8)

    @classmethod
    def create(cls, cluster_shift: int) -> Area:
        """A new group without back ends and volumes; ``cluster_shift``: log2 of the cluster's bytes."""
        assert cluster_shift in layout.CLUSTER_SHIFTS
        fd = os.memfd_create("volumes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.GROUP_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            header = np.zeros(1, layout.GROUP).view(np.recarray)
            header[0].magic, header[0].version = layout.GROUP_MAGIC, layout.VERSION
            header[0].cluster_shift, header[0].next_epoch = cluster_shift, 1
            os.pwrite(fd, header.tobytes(), 0)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Unmap; nobody looks there any more. The arrays are not to be used again."""
        self._mapping.close()
        os.close(self.fd)

    def _part(self, offset: int, dtype: np.dtype[Any], count: int) -> Any:
        return self._words(offset, np.uint8, count * dtype.itemsize).view(dtype).view(np.recarray)

    def _words(self, offset: int, dtype: Any, count: int) -> Any:
        """Not by ctypes: its arrays end at 2^31 elements of some kinds."""
        interface = {"data": (self.host + offset, False), "shape": (count,), "typestr": np.dtype(dtype).str}
        return np.asarray(_Memory({**interface, "version": 3}))

    # -------------------------------------------------------------------------------------------------- back ends

    @property
    def cluster_bytes(self) -> int:
        shift = int(self.group.cluster_shift)
        return 1 << shift

    def set_backing(
        self, number: int, kind: int, fd: int, *, start: int, host: int = 0, direct_fd: int = -1, align: int = 1
    ) -> None:
        """Tell the compiled stage about a back end. ``start``: byte of its cluster 0. The rest is of the back end."""
        row = self.local_backings[number]
        row.host, row.fd, row.direct_fd, row.align, row.start = host and host + start, fd, direct_fd, align - 1, start
        row.kind = kind
        g = self.local[0]
        g.backing_count = max(int(g.backing_count), number + 1)
        g.durable = int((self.local_backings.kind == layout.KIND_FILE).any())
        g.direct = int(g.offload and not g.durable)

    def set_offload(self, on: bool) -> None:
        """Whether the asic serves by itself what is mapped (see dpu.fastpath.soc), from the next pass on."""
        g = self.local[0]
        g.offload, g.direct = int(on), int(on and not g.durable)

    def state_index(self, places: Any) -> Any:
        """Where the states of clusters are in ``cluster_states``."""
        places = np.asarray(places, np.int64)
        first: Any = self.backings.first[places >> layout.BACKING_SHIFT]
        return first + (places & layout.CLUSTER)

    # ------------------------------------------------------------------------------------------------------- maps

    def volume_address(self, number: int) -> int:
        """Of a VOLUME record, for the compiled stage."""
        return int(self.host + layout.VOLUMES_OFFSET + number * layout.VOLUME.itemsize)

    def root(self, number: int) -> Any:
        """The root words of a volume, as a view."""
        v = self.volumes[number]
        first = int(v.root)
        return self.roots[first : first + -(-int(v.clusters) >> LEAF_BITS)]

    def entries(self, number: int, first: int, count: int) -> Any:
        """A copy of the entries of clusters ``first`` to ``first + count`` of a volume, which are inside it."""
        begin, end = first >> LEAF_BITS, (first + count - 1 >> LEAF_BITS) + 1
        words = self.root(number)[begin:end]
        table = np.where(words[:, None] != 0, self.leaves[words], 0)
        return table.reshape(-1)[first - (begin << LEAF_BITS) :][:count]

    def ask(self, number: int, action: int, offset: int, length: int, *, free: bool = False) -> Answer:
        """Where bytes of a volume are, as a poller asks the soc, with the pools of CONTROL_AREA.

        ``action``: BLOCK_READ; BLOCK_WRITE makes them the volume's own; BLOCK_ERASE unmaps (``free``: by Deallocate)
        and lists what is left to be cleared. ``length``: at most TRANSFER_MAX, but of an erasure.
        """
        assert action == layout.BLOCK_ERASE or 0 < length <= layout.TRANSFER_MAX
        b = self._block[: layout.BLOCK.itemsize].view(layout.BLOCK).view(np.recarray)[0]
        b.action, b.group, b.volume = action, self.address, self.volume_address(number)
        b.offset, b.length, b.free = offset, length, int(free)
        count = self._compiled(soc.control_answer, int(self._block.ctypes.data))
        assert count != -soc.OUTSIDE, "bytes that are not in the volume"
        if count < 0:
            return Answer(-count, [], 0, int(b.first), int(b.clusters))
        rows = self._block[layout.BLOCK_EXTENTS :][: count * layout.EXTENT_BYTES].view(layout.EXTENT)
        extents = [Extent(backing, at, size) for _, backing, at, size in rows.tolist()]
        return Answer(0, extents, int(b.done), 0, 0)

    def install(self, number: int, index: int, old: int, place: int, action: int) -> bool:
        """Exchange one entry, logged in CONTROL_AREA, while pollers run: by LOG_ALLOCATE or LOG_COPY ``old`` becomes
        ``place`` (whose data are there already), by LOG_FREE and LOG_DROP 0.

        False: the entry is not ``old`` any more, or its leaf has changed; look again. OSError: no leaf in the pool.
        """
        arguments = self.address, self.volume_address(number), index, old, place, action
        result = self._compiled(soc.control_exchange, *arguments)
        if result < 0:
            raise OSError(errno.ENOSPC, "no leaf in control's pool")
        return bool(result)

    def _compiled(self, function: Callable[..., int], *arguments: int) -> int:
        """Call a function of the soc, with an empty log if it needs one."""
        if self.level(self.log(layout.CONTROL_AREA)) > layout.LOG_ENTRIES // 2:
            self.drain(layout.CONTROL_AREA)
        return function(int(self._control.ctypes.data), *arguments)

    # --------------------------------------------------------------------------------------------- pools and logs

    def _area(self, number: int) -> int:
        return int(self.host + layout.AREAS_OFFSET + number * layout.AREA_BYTES)

    def pool(self, number: int) -> int:
        """Address of a poller's ring of places."""
        return self._area(number) + layout.POOL_OFFSET

    def leaf_pool(self, number: int) -> int:
        """Address of a poller's ring of leaf numbers."""
        return self._area(number) + layout.LEAF_POOL_OFFSET

    def log(self, number: int) -> int:
        """Address of a poller's log: the two words of a ring, then LOG_RECORD x LOG_ENTRIES."""
        return self._area(number) + layout.LOG_OFFSET

    @staticmethod
    def level(ring: int) -> int:
        """Values in a pool, or records in a log."""
        return load_u64(ring + RING_TAIL) - load_u64(ring + RING_HEAD)

    def values(self, ring: int) -> Any:
        """A copy of what is in a pool, oldest first."""
        head, tail = load_u64(ring + RING_HEAD), load_u64(ring + RING_TAIL)
        return self._slots(ring)[np.arange(head, tail) % RING_ENTRIES]

    def _slots(self, ring: int) -> Any:
        return self._words(ring + RING_DATA - self.host, np.int64, RING_ENTRIES)

    def fill(self, ring: int, values: Sequence[int] | Any) -> None:
        """Put places or leaf numbers into a pool, which has room. Their state says POOLED already."""
        tail = load_u64(ring + RING_TAIL)
        assert self.level(ring) + len(values) <= RING_ENTRIES
        self._slots(ring)[np.arange(tail, tail + len(values)) % RING_ENTRIES] = values
        store_u64(ring + RING_TAIL, tail + len(values))

    def take_back(self, ring: int) -> Any:
        """Empty a pool whose poller is quiet; what was in it."""
        found = self.values(ring)
        store_u64(ring + RING_HEAD, load_u64(ring + RING_TAIL))
        return found

    def drain(self, number: int) -> Any:
        """Take the records of a log, as an array of LOG_RECORD, and bring the states up to date with them.

        Doing so again with the same records changes nothing. A cluster may be freed by one poller's log before
        another's says that it was allocated: it stays CLUSTER_LEAVING.
        """
        ring = self.log(number)
        head, tail = load_u64(ring + RING_HEAD), load_u64(ring + RING_TAIL)
        records = self._records(ring)[np.arange(head, tail) % layout.LOG_ENTRIES].copy()
        if head != tail:
            self._apply(records)
            store_u64(ring + RING_HEAD, tail)
            self.taken(records)
        return records

    def _records(self, ring: int) -> Any:
        return self._part(ring + RING_DATA - self.host, layout.LOG_RECORD, layout.LOG_ENTRIES)

    def _apply(self, records: Any) -> None:
        action = records.action
        taken = self.state_index(records.new[_one_of(action, layout.LOG_ALLOCATE, layout.LOG_COPY)] & PLACE)
        taken = taken[self.cluster_states[taken] == layout.CLUSTER_POOLED]
        self.cluster_states[taken] = layout.CLUSTER_USED
        freed = self.state_index(records.old[action == layout.LOG_FREE] & PLACE)
        self.cluster_states[freed] = layout.CLUSTER_LEAVING
        made = records[action == layout.LOG_LEAF]
        self.leaf_states[made.new] = layout.LEAF_CHANGED
        self.volumes.root_changed[made.volume] = 1
        # The leaf is looked up where it is now: after its record others may have come.
        changed = records[action != layout.LOG_LEAF]
        volumes = self.volumes[changed.volume]
        inside = (volumes.state != layout.VOLUME_ABSENT) & (changed.index < volumes.clusters)
        words = self.roots[volumes.root[inside] + (changed.index[inside] >> LEAF_BITS)]
        self.leaf_states[words[words != 0]] = layout.LEAF_CHANGED

    # ------------------------------------------------------------------------------------------- after a death

    def recover(self) -> None:
        """Bring to an end what another worker was killed in, before any poller looks; drains all logs.

        After it every pool holds what its states say; clusters and leaves that were on their way into a pool or out
        of it are CLUSTER_DIRTY and LEAF_FREE.
        """
        for number in range(layout.AREAS):
            self._finish(number)
        for number in range(layout.AREAS):
            self.drain(number)
        for number in range(layout.AREAS):
            for ring, states, pooled in (
                (self.pool(number), self._cluster_state, layout.CLUSTER_POOLED),
                (self.leaf_pool(number), self._leaf_state, layout.LEAF_POOLED),
            ):
                head = load_u64(ring + RING_HEAD)
                if self.level(ring) and states(self.values(ring)[0]) != pooled:
                    store_u64(ring + RING_HEAD, head + 1)
        self._forget_pooled()

    def _cluster_state(self, place: int) -> int:
        return int(self.cluster_states[self.state_index(place)])

    def _leaf_state(self, leaf: int) -> int:
        return int(self.leaf_states[leaf])

    def _finish(self, number: int) -> None:
        """The record at the tail of a log: it counts if the map has its ``new``."""
        ring = self.log(number)
        tail = load_u64(ring + RING_TAIL)
        record = self._records(ring)[tail % layout.LOG_ENTRIES]
        if record.sequence != tail + 1:
            return
        v = self.volumes[record.volume]
        if record.action == layout.LOG_LEAF:
            done = self.roots[v.root + record.index] == record.new
        else:
            word = self.roots[v.root + (record.index >> LEAF_BITS)]
            done = word != 0 and self.leaves[word, record.index & LEAF_ENTRIES - 1] == record.new
            done = done or (word == 0 and record.new == 0)
        if done:
            store_u64(ring + RING_TAIL, tail + 1)
        elif record.action == layout.LOG_COPY:  # the cluster may have been copied to
            self.cluster_states[self.state_index(record.new & PLACE)] = layout.CLUSTER_DIRTY

    def _forget_pooled(self) -> None:
        """What is said to be in a pool, and is not."""
        total = int((self.backings.first + self.backings.clusters).max())
        states = self.cluster_states[:total]
        pools = [self.values(self.pool(number)) for number in self._used()]
        real = self.state_index(np.concatenate(pools)) if pools else np.zeros(0, np.int64)
        said = np.nonzero(states == layout.CLUSTER_POOLED)[0]
        states[np.setdiff1d(said, real, assume_unique=True)] = layout.CLUSTER_DIRTY
        pools = [self.values(self.leaf_pool(number)) for number in self._used()]
        leaves = np.concatenate(pools) if pools else np.zeros(0, np.int64)
        for first, states in self._written(layout.LEAF_STATES_OFFSET, layout.LEAVES):
            said = np.nonzero(states == layout.LEAF_POOLED)[0]
            states[np.setdiff1d(said, leaves - first, assume_unique=True)] = layout.LEAF_FREE

    def _used(self) -> list[int]:
        return [n for n in range(layout.AREAS) if self.level(self.pool(n)) or self.level(self.leaf_pool(n))]

    def _written(self, offset: int, count: int) -> Iterator[tuple[int, Any]]:
        """The parts of an array of bytes that ever were written: (index of the first, view)."""
        at, end = offset, offset + count
        while at < end:
            try:
                at = os.lseek(self.fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                return
            stop = min(end, os.lseek(self.fd, at, os.SEEK_HOLE))
            if at < end:
                yield at - offset, self._words(at, np.uint8, stop - at)
            at = stop


class _Memory:
    """Lets numpy see memory at an address."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _one_of(values: Any, *wanted: int) -> Any:
    return np.isin(values, wanted)
