"""Free clusters and leaves of a group: cleaned in bulk, given to pollers, taken back.

A cluster goes DIRTY -> CLEAN (reads as zeroes) -> POOLED -> USED -> LEAVING -> DIRTY (dpu.layout); a poller gets
clean ones only, so that it never has to zero the rest of one that it writes a part of. What has been cleaned in this
run is not remembered over a restart: then all that is free is dirty, and is cleaned again when it is wanted.

Use: ``await supply.top_up(poller)``; ``await supply.take(count)`` for control; ``release`` for clusters that nobody
can see any more. All but ``_clean`` runs in control's thread, and no other thread touches the states.

Errors: OSError: ENOSPC when nothing is left, else what the back end said while it was cleaned.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpu import layout
from dpu.backends.base import Backend
from dpu.layout import CLUSTER_CLEAN, CLUSTER_DIRTY, CLUSTER_LEAVING, CLUSTER_POOLED, CLUSTER_USED
from dpu.volumes.area import Area
from dpu.volumes.data import Files

CONTROL_TARGET = 64  # clusters in control's own pool
POOL_TARGET = 4096  # clusters given to a poller at once, if there are many
LEAF_POOL_TARGET = 512
CLEAN_CLUSTERS = 4096  # cleaned at a time, and of no more bytes than
CLEAN_BYTES = 256 << 20
_WINDOW = 1 << 16


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Supply:
    """:param bases: the back ends, by their numbers; cluster 0 of each begins at byte ``cluster_bytes``.
    :param leaf_end: no leaf from this number on is in use
    """

    def __init__(self, area: Area, bases: Sequence[Backend], files: Files, leaf_end: int) -> None:
        self._area = area
        self._bases = bases
        self._files = files
        self._first = np.array([int(row.first) for row in area.backings[: len(bases)]], np.int64)
        self.extended()
        self._cursors: dict[int, int] = {}
        self._lock = asyncio.Lock()
        self.leaf_end = leaf_end
        self._free_leaves: list[int] = (np.flatnonzero(area.leaf_states[1:leaf_end] == layout.LEAF_FREE) + 1).tolist()

    def extended(self) -> None:
        """The last back end has more clusters than before."""
        self.total = int(sum(int(row.clusters) for row in self._area.backings[: len(self._bases)]))
        self.states = self._area.cluster_states[: self.total]

    # ---------------------------------------------------------------------------------------------------- clusters

    def place(self, indices: Any) -> Any:
        """Places (back end << 32 | cluster) of indices in ``states``."""
        numbers = np.searchsorted(self._first, indices, "right") - 1
        return numbers << layout.BACKING_SHIFT | indices - self._first[numbers]

    def free_count(self) -> int:
        """Clusters that can be had, when what is in pools is taken back."""
        counts = np.bincount(self.states, minlength=5)
        return int(counts[CLUSTER_DIRTY] + counts[CLUSTER_CLEAN] + counts[CLUSTER_POOLED])

    def where(self, place: int) -> tuple[int, int]:
        """(file descriptor, offset in bytes) of a cluster."""
        number, cluster = place >> layout.BACKING_SHIFT, place & layout.CLUSTER
        return self._bases[number].fd, (cluster + 1) * self._area.cluster_bytes

    def _find(self, state: int, count: int) -> Any:
        """Indices of up to ``count`` clusters in this state, from where the last search ended."""
        found: list[Any] = []
        at, left, have = self._cursors.get(state, 0) % self.total, self.total, 0
        while left > 0 and have < count:
            size = min(_WINDOW, self.total - at, left)
            hits = np.flatnonzero(self.states[at : at + size] == state)[: count - have] + at
            found.append(hits)
            have += len(hits)
            left -= size
            at = int(hits[-1]) + 1 if have == count else at + size
            at %= self.total
        self._cursors[state] = at
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    async def _collect(self, count: int) -> Any:
        """Indices of up to ``count`` clusters that were made clean and POOLED. The lock is held."""
        clean = self._find(CLUSTER_CLEAN, count)
        self.states[clean] = CLUSTER_POOLED
        while len(clean) < count:
            size = min(CLEAN_CLUSTERS, max(1, CLEAN_BYTES >> int(self._area.group.cluster_shift)))
            dirty = np.sort(self._find(CLUSTER_DIRTY, max(size, min(count - len(clean), CLEAN_CLUSTERS))))
            if not len(dirty):
                break
            try:
                await asyncio.to_thread(self._clean, dirty)
            except BaseException:
                self.states[clean] = CLUSTER_CLEAN
                raise
            self.states[dirty] = CLUSTER_CLEAN
            more = dirty[: count - len(clean)]
            self.states[more] = CLUSTER_POOLED
            clean = np.concatenate([clean, more])
        return clean

    def _clean(self, indices: Any) -> None:
        """Zero clusters, in runs. ``indices`` rise."""
        places = self.place(indices)
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        size = self._area.cluster_bytes
        for run in np.split(places, breaks):
            fd, offset = self.where(int(run[0]))
            self._files.zero(fd, offset, len(run) * size)

    async def take(self, count: int) -> Any:
        """Places of ``count`` clean clusters, POOLED until their user says USED. ENOSPC when there are fewer."""
        async with self._lock:
            indices = await self._collect(count)
            if len(indices) < count:
                self.states[indices] = CLUSTER_CLEAN
                raise no_space()
            return self.place(indices)

    def give_back(self, places: Any) -> None:
        """What ``take`` gave and was not written to."""
        self.states[self._area.state_index(places)] = CLUSTER_CLEAN

    def used(self, places: Any) -> None:
        """What ``take`` gave is in a map now."""
        self.states[self._area.state_index(places)] = CLUSTER_USED

    def spoiled(self, places: Any) -> None:
        """What ``take`` gave was written to, and is not used."""
        self.states[self._area.state_index(places)] = CLUSTER_DIRTY

    def release(self, indices: Any) -> None:
        """Nobody can see these LEAVING clusters any more."""
        leaving = indices[self.states[indices] == CLUSTER_LEAVING]
        self.states[leaving] = CLUSTER_DIRTY

    async def clean_some(self) -> bool:
        """Clean a part of what is dirty, so that its place is given back; whether there was any."""
        async with self._lock:
            size = min(CLEAN_CLUSTERS, max(1, CLEAN_BYTES >> int(self._area.group.cluster_shift)))
            dirty = np.sort(self._find(CLUSTER_DIRTY, size))
            if len(dirty):
                await asyncio.to_thread(self._clean, dirty)
                self.states[dirty] = CLUSTER_CLEAN
            return bool(len(dirty))

    # ------------------------------------------------------------------------------------------------------- pools

    def target(self, pollers: int) -> int:
        """Clusters that a pool is filled up to at most: when few are left, each gets a small part of them."""
        return max(1, self.free_count() // (2 * pollers))

    async def top_up(self, poller: int, pollers: int) -> bool:
        """Fill both pools of a poller, or of CONTROL_AREA; False when it has no cluster and there is none."""
        area = self._area
        leaves = area.leaf_pool(poller)
        wanted = LEAF_POOL_TARGET - area.level(leaves)
        if wanted > 0:
            area.fill(leaves, self.take_leaves(wanted))
        async with self._lock:
            pool = area.pool(poller)
            most = CONTROL_TARGET if poller == layout.CONTROL_AREA else POOL_TARGET
            wanted = min(most, self.target(pollers)) - area.level(pool)
            if wanted > 0:
                area.fill(pool, self.place(await self._collect(wanted)))
            return area.level(pool) > 0

    def take_back(self, pollers: int) -> None:
        """Empty the pools of all pollers, which are quiet, for somebody who finds no cluster otherwise."""
        for poller in (*range(pollers), layout.CONTROL_AREA):
            places = self._area.take_back(self._area.pool(poller))
            self.states[self._area.state_index(places)] = CLUSTER_CLEAN

    # ------------------------------------------------------------------------------------------------------ leaves

    def take_leaves(self, count: int) -> Any:
        """Numbers of ``count`` free leaves, POOLED now. ENOSPC when the kept memory has no more."""
        recycled = [self._free_leaves.pop() for _ in range(min(count, len(self._free_leaves)))]
        fresh = count - len(recycled)
        if self.leaf_end + fresh > layout.LEAVES:
            self._free_leaves += recycled
            raise no_space()
        leaves = np.array([*recycled, *range(self.leaf_end, self.leaf_end + fresh)], np.int64)
        self.leaf_end += fresh
        self._area.leaf_states[leaves] = layout.LEAF_POOLED
        return leaves

    def release_leaves(self, leaves: Any) -> None:
        """Nobody can see these leaves any more."""
        self._area.leaf_states[leaves] = layout.LEAF_FREE
        self._free_leaves += np.asarray(leaves).tolist()
