"""The maps of a group in kept memory, as management changes them, and from the database into kept memory.

``Maps`` knows which volume owns what. An entry (or leaf) carries the epoch that it was born in, and an epoch belongs
to one volume: that which wrote in it, or, once that is deleted, the heir of its clusters. So no references are
counted, and no chain of parents is walked: what a volume owns is named by it and its descendants only, and a
descendant names what its ancestors own, or itself.

Use: the methods change kept memory only, and are called where no poller changes the same map (in ``quiet``, or on a
volume that nobody serves). Places and leaves that nobody names any more are returned, not freed.

Limits: EPOCH_MAX epochs (snapshots and clones, ever) and ROOT_WORDS root words per group.
Errors: StoreError for a database whose maps contradict themselves; OSError ENOSPC beyond the limits.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from dpu import layout
from dpu.layout import LEAF_BITS, LEAF_ENTRIES, PLACE, PLACE_BITS
from dpu.volumes.area import Area
from dpu.volumes.store import Saved, Store, StoreError, VolumeRow

NOBODY = -1
_SLICE = 1024  # leaves looked at at once
_NONE = np.zeros(0, np.int64)


def words_for(clusters: int) -> int:
    """Root words of a volume of so many clusters."""
    return -(-clusters >> LEAF_BITS)


class Maps:
    """:param rows: the volumes that there are."""

    def __init__(self, area: Area, rows: Iterable[VolumeRow]) -> None:
        self.area = area
        self._owners = np.full(1024, NOBODY, np.int64)
        for row in rows:
            for epoch in (row.epoch, *row.inherited):
                self.give(epoch, row.number)
        volumes = area.volumes
        taken = sorted(
            (int(v.root), int(v.root_words)) for v in volumes[volumes.state != layout.VOLUME_ABSENT] if v.root_words
        )
        self._runs: list[tuple[int, int]] = []  # free runs of root words
        at = 0
        for first, count in taken:
            if first > at:
                self._runs.append((at, first - at))
            at = first + count
        self._runs.append((at, layout.ROOT_WORDS - at))

    @property
    def root_end(self) -> int:
        """No root word from this one on is in use."""
        return self._runs[-1][0]

    # ------------------------------------------------------------------------------------------------- who owns what

    def give(self, epoch: int, number: int) -> None:
        """What was born in ``epoch`` is this volume's."""
        if epoch >= len(self._owners):
            more = np.full(max(len(self._owners), epoch + 1), NOBODY, np.int64)
            self._owners = np.concatenate([self._owners, more])
        self._owners[epoch] = number

    def owners(self, epochs: Any) -> Any:
        return self._owners[epochs]

    def next_epoch(self) -> int:
        """A new epoch, that of ``area.group.next_epoch``, which grows."""
        epoch = int(self.area.group.next_epoch)
        if epoch > layout.EPOCH_MAX:
            raise OSError(errno.ENOSPC, f"{layout.EPOCH_MAX} snapshots and clones were made in this group")
        self.area.group.next_epoch = epoch + 1
        return epoch

    def owned_leaves(self, number: int, first_word: int = 0) -> tuple[Any, Any]:
        """(indices of root words, leaves) from ``first_word`` on that a volume owns."""
        words = self.area.root(number)[first_word:]
        at = np.flatnonzero(words)
        leaves = words[at]
        mine = self._owners[self.area.leaf_epochs[leaves]] == number
        return at[mine] + first_word, leaves[mine]

    def owned_places(self, number: int) -> Any:
        """Places of the clusters that a volume owns."""
        return self._places_in(self.owned_leaves(number)[1], number)

    def _places_in(self, leaves: Any, number: int) -> Any:
        found = [_NONE]
        for at in range(0, len(leaves), _SLICE):
            entries = self.area.leaves[leaves[at : at + _SLICE]].reshape(-1)
            entries = entries[entries != 0]
            found.append(entries[self._owners[entries >> PLACE_BITS] == number] & PLACE)
        return np.concatenate(found)

    # ------------------------------------------------------------------------------------------------------- records

    def _take_run(self, count: int) -> int:
        for i, (first, length) in enumerate(self._runs):
            if length > count or (length == count and i < len(self._runs) - 1):
                if length == count:
                    del self._runs[i]
                else:
                    self._runs[i] = (first + count, length - count)
                return first
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _free_run(self, first: int, count: int) -> None:
        if not count:
            return
        runs = sorted([*self._runs, (first, count)])
        self._runs = []
        for first, count in runs:
            if self._runs and sum(self._runs[-1]) == first:
                self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + count)
            else:
                self._runs.append((first, count))

    def make(self, row: VolumeRow, words: Any = None) -> None:
        """A record, VOLUME_PENDING, with these root words; None: nothing is mapped."""
        v = self.area.volumes[row.number]
        count = words_for(row.clusters)
        first = self._take_run(count)
        v.root, v.root_words, v.clusters, v.epoch = first, count, row.clusters, row.epoch
        v.thick, v.readonly, v.root_changed, v.changes, v.committed = not row.thin, row.readonly, 0, 0, 0
        self.area.roots[first : first + count] = 0 if words is None else words
        v.state = layout.VOLUME_PENDING
        self.give(row.epoch, row.number)

    def drop(self, number: int) -> None:
        """Forget a record. What it owned was given to somebody or is free."""
        v = self.area.volumes[number]
        v.state = layout.VOLUME_ABSENT
        self._free_run(int(v.root), int(v.root_words))
        v.root_words = v.clusters = 0

    def grow(self, number: int, clusters: int) -> None:
        """More clusters, unmapped; the root moves if its run is too short."""
        v = self.area.volumes[number]
        old, new = int(v.root_words), words_for(clusters)
        if new > old:
            first, moved = int(v.root), self._take_run(new)
            self.area.roots[moved : moved + old] = self.area.roots[first : first + old]
            self.area.roots[moved + old : moved + new] = 0
            v.root, v.root_words = moved, new
            self._free_run(first, old)
        v.clusters = clusters

    def cut(self, number: int, clusters: int) -> tuple[Any, Any]:
        """Fewer clusters. A leaf that is cut through is the volume's own. Returns (places, leaves) that are free."""
        v = self.area.volumes[number]
        words, rest = words_for(clusters), clusters & LEAF_ENTRIES - 1
        _, leaves = self.owned_leaves(number, words)
        places = self._places_in(leaves, number)
        if rest and self.area.root(number)[words - 1]:
            leaf = self.area.leaves[self.area.root(number)[words - 1]]
            tail = leaf[rest:][leaf[rest:] != 0]
            places = np.concatenate([places, tail[self._owners[tail >> PLACE_BITS] == number] & PLACE])
            if len(tail):
                leaf[rest:] = 0
        first, count = int(v.root), int(v.root_words)
        self.area.roots[first + words : first + count] = 0
        v.clusters = clusters
        return places, leaves

    def own_leaf(self, number: int, word: int, leaf: int) -> None:
        """Give a volume its own copy of the leaf at a root word, in ``leaf``, which is free."""
        v, area = self.area.volumes[number], self.area
        area.leaves[leaf] = area.leaves[area.roots[v.root + word]]
        area.leaf_epochs[leaf] = v.epoch
        area.leaf_states[leaf] = layout.LEAF_CHANGED
        area.roots[v.root + word] = leaf
        v.root_changed = 1

    def bury(self, number: int, heir: int) -> tuple[Any, Any]:
        """(places, leaves) that a volume owns and ``heir`` (its only child, or NOBODY) does not name."""
        area = self.area
        at, leaves = self.owned_leaves(number)
        if heir == NOBODY:
            return self._places_in(leaves, number), leaves
        other = area.root(heir)
        inside = at < len(other)
        theirs = np.zeros(len(at), np.int64)
        theirs[inside] = other[at[inside]]
        gone = theirs != leaves  # else the heir names the leaf, and with it all that is in it
        at, leaves, theirs = at[gone], leaves[gone], theirs[gone]
        found = [_NONE]
        for i in range(0, len(leaves), _SLICE):
            mine, yours = area.leaves[leaves[i : i + _SLICE]], area.leaves[theirs[i : i + _SLICE]]
            yours = np.where(theirs[i : i + _SLICE, None] != 0, yours, 0)
            only = (mine != yours) & (mine != 0)
            entries = mine[only]
            found.append(entries[self._owners[entries >> PLACE_BITS] == number] & PLACE)
        return np.concatenate(found), leaves

    def inherit(self, number: int, heir: int, epochs: Iterable[int]) -> None:
        """What was born in ``epochs``, a buried volume's, is the heir's."""
        for epoch in epochs:
            self.give(epoch, heir)

    def reown(self, number: int, first_word: int, words: int) -> None:
        """What a volume has inherited is as if it had been born in its own epoch: it may be written in place."""
        area, epoch = self.area, int(self.area.volumes[number].epoch)
        leaves = area.root(number)[first_word : first_word + words]
        leaves = leaves[leaves != 0]
        leaves = leaves[self._owners[area.leaf_epochs[leaves]] == number]
        entries = area.leaves[leaves]
        births = entries >> PLACE_BITS
        foreign = (entries != 0) & (births != epoch) & (self._owners[births] == number)
        changed = foreign.any(axis=1) | (area.leaf_epochs[leaves] != epoch)
        rows, foreign = entries[changed], foreign[changed]
        leaves = leaves[changed]
        area.leaves[leaves] = np.where(foreign, (rows & PLACE) | epoch << PLACE_BITS, rows)
        area.leaf_epochs[leaves] = epoch
        area.leaf_states[leaves] = layout.LEAF_CHANGED


def load(area: Area, saved: Saved, store: Store) -> None:
    """Fill the kept memory of a new worker's group from the database. StoreError when that cannot be right."""

    def require(right: Any, what: str) -> None:
        if not np.all(right):
            raise StoreError(
                f"{store.path} contradicts itself: {what}",
                "put back a copy of it that was made when the daemon was stopped; other groups are not touched",
            )

    rows = {row.number: row for row in saved.volumes}
    next_epoch = saved.facts.next_epoch
    epochs = [epoch for row in saved.volumes for epoch in (row.epoch, *row.inherited)]
    require(1 <= next_epoch <= layout.EPOCH_MAX + 1, "its next epoch is out of range")
    require(len(set(epochs)) == len(epochs), "two volumes own one epoch")
    require(all(0 < epoch < next_epoch for epoch in epochs), "an epoch is out of range")
    require(all(0 <= n < layout.VOLUMES_MAX and rows[n].clusters > 0 for n in rows), "a volume is out of range")
    require(all(row.parent is None or row.parent in rows for row in saved.volumes), "a volume has lost its parent")
    area.group.next_epoch = next_epoch
    maps = Maps(area, [])
    for row in saved.volumes:
        root = saved.roots.get(row.number, _NONE)
        words = np.zeros(words_for(row.clusters), np.int64)
        require(len(root) <= len(words) and np.all((root >= 0) & (root < layout.LEAVES)), "a root is out of range")
        words[: len(root)] = root
        maps.make(row, words)
        maps.area.volumes[row.number].state = layout.VOLUME_LIVE
        for epoch in row.inherited:
            maps.give(epoch, row.number)
    for number, epoch, entries in store.leaves():
        require(0 < number < layout.LEAVES and 0 < epoch < next_epoch, "a leaf is out of range")
        area.leaves[number] = entries
        area.leaf_epochs[number] = epoch
    used = np.zeros(int((area.backings.first + area.backings.clusters).max()), bool)
    for row in saved.volumes:
        _check(area, maps, rows, row, used, require)
        area.leaf_states[area.root(row.number)] = layout.LEAF_USED
    area.leaf_states[0] = layout.LEAF_FREE  # of root words without a leaf
    area.cluster_states[: len(used)] = np.where(used, layout.CLUSTER_USED, layout.CLUSTER_DIRTY)


def _check(area: Area, maps: Maps, rows: dict[int, VolumeRow], row: VolumeRow, used: Any, require: Any) -> None:
    """One volume: it names what it owns, once, and what its ancestors own, where they name it."""
    ancestors: list[int] = []
    at: int | None = row.number
    while at is not None:
        require(at not in ancestors, "parents go round in a circle")
        ancestors.append(at)
        at = rows[at].parent
    words = area.root(row.number)
    places = np.flatnonzero(words)
    leaves = words[places]
    owners = maps.owners(area.leaf_epochs[leaves])
    require((area.leaf_epochs[leaves] > 0) & np.isin(owners, ancestors), f"a leaf of {row.name} is not there")
    for ancestor in ancestors[1:]:
        shared = places[owners == ancestor]
        other = area.root(ancestor)
        require(shared < len(other), f"a leaf of {row.name} is of nobody")
        require(words[shared] == other[shared], f"a leaf of {row.name} is not its parent's")
    own = leaves[owners == row.number]
    require(len(np.unique(own)) == len(own), f"a leaf of {row.name} is there twice")
    for begin in range(0, len(own), _SLICE):
        entries = area.leaves[own[begin : begin + _SLICE]].reshape(-1)
        entries = entries[entries != 0]
        births, backing, cluster = (
            entries >> PLACE_BITS,
            (entries & PLACE) >> layout.BACKING_SHIFT,
            entries & layout.CLUSTER,
        )
        require((births > 0) & (births < area.group.next_epoch), f"an entry of {row.name} has a wrong epoch")
        require(cluster < area.backings.clusters[backing], f"an entry of {row.name} is outside of the back ends")
        owned = maps.owners(births)
        require(np.isin(owned, ancestors), f"a cluster of {row.name} is of nobody")
        mine = area.state_index(entries[owned == row.number] & PLACE)
        require(len(np.unique(mine)) == len(mine) and not used[mine].any(), f"a cluster of {row.name} is there twice")
        used[mine] = True
