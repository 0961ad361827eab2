"""A group of volumes (SPDK: lvstore), control's side: its metadata, its clusters, and what is done to volumes.

Use: ``Group.create``, ``Group.load`` (from the database: a back end has appeared) or ``Group.adopt`` (from kept
memory: the last worker has died); then ``start()``. The data path calls what dpu.volumes.interface names.

The order of things, which is what survives a kill or a power cut at any point:

* A map is committed after the data that it points to: captured, ``fdatasync`` of the back ends, one transaction.
* A cluster that is freed is used again when no committed map names it and nobody can be reading it any more.
* The database decides. A management call changes kept memory in a way that can be undone (a record that is PENDING,
  unmapped clusters beyond the end, a newer epoch), commits, and then does the rest, which can be done again:
  ``adopt`` drops records that the database does not have, cuts volumes that are too long, and ``start`` frees what no
  map names.
* Groups of memory lose their data with their daemon, so only their list of volumes is in the database.

Errors: RpcError with SPDK's codes for calls; OSError of back ends and StoreError at opening.
Source: SPDK's blobstore for what a snapshot, a clone, inflating and decoupling are.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import uuid as uuids
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dpu import layout
from dpu.backends import Backend, FileBackend, MemoryBackend, os_error
from dpu.errors import RpcError
from dpu.killpoint import killpoint
from dpu.layout import CLUSTER_LEAVING, CLUSTER_USED, LEAF_BITS, LEAF_ENTRIES, PLACE, PLACE_BITS
from dpu.volumes import store as stores
from dpu.volumes.area import Area
from dpu.volumes.data import Files, Label
from dpu.volumes.interface import VolumeHost
from dpu.volumes.maps import NOBODY, Maps, load, words_for
from dpu.volumes.store import BackingRow, Batch, Facts, Saved, Store, StoreError, VolumeRow
from dpu.volumes.supply import Supply, no_space
from dpu.volumes.volume import DELETION, Volume

log = logging.getLogger(__name__)

COMMIT_S = 0.5  # what nobody flushes is committed after this time
NAME_BYTES_MAX = 63  # of a group or volume, as SPDK's
LEAVES_AT_ONCE = 64  # put into control's own pool
COPY_AT_ONCE = 64  # clusters that inflate and decouple copy between two looks at the map
_SLICE = 1024  # leaves between two turns of other tasks
_INVALID = -32602

Connect = Callable[[str, bool], stores.Connection]


def refused(code: int) -> RpcError:
    """SPDK's answer when the volume layer says no: its text, and the code of wrong parameters."""
    return RpcError(_INVALID, os.strerror(code))


class Group:
    """``bases``: its back ends by number. ``area``: its kept memory. ``volumes``: by number."""

    def __init__(
        self, host: VolumeHost, files: Files, store: Store, area: Area, bases: Sequence[Backend], saved: Saved
    ) -> None:
        self.host = host
        self.files = files
        self.area = area
        self.bases = list(bases)
        self.uuid, self.name = saved.facts.uuid, saved.facts.name
        self.cluster_bytes = saved.facts.cluster_bytes
        self.block_size = bases[0].block_size
        self.durable = not isinstance(bases[0], MemoryBackend)
        self.busy = ""  # what is done to all of it
        self._calls = 0  # management calls that are under way
        self._store = store
        self._backing_rows = saved.backings
        for number, base in enumerate(bases):
            kind = layout.KIND_FILE if isinstance(base, FileBackend) else layout.KIND_MEMORY
            address = host.memory_of(base) if isinstance(base, MemoryBackend) else 0
            direct_fd, align = (base.direct_fd, base.dio_align_bytes) if isinstance(base, FileBackend) else (-1, 1)
            area.set_backing(
                number, kind, base.fd, start=self.cluster_bytes, host=address, direct_fd=direct_fd, align=align
            )
        self.maps = Maps(area, saved.volumes)
        highest = int(area.roots[: self.maps.root_end].max(initial=0))
        pooled = [area.values(area.leaf_pool(number)) for number in range(layout.AREAS)]
        self.supply = Supply(area, bases, files, 1 + max(highest, *(int(leaves.max(initial=0)) for leaves in pooled)))
        self.volumes: dict[int, Volume] = {row.number: Volume(self, row) for row in saved.volumes}
        self._by_name = {volume.row.name: volume for volume in self.volumes.values()}
        for volume in self.volumes.values():
            if volume.row.parent is not None:
                volume.parent = self.volumes[volume.row.parent]
                volume.parent.children.append(volume)
        self._names: set[str] = set()  # of volumes that are being made
        self._slots = 1 + max(self.volumes, default=-1)  # no record from this number on is in use
        self._roots = saved.roots  # as they are in the database
        self._writing = asyncio.Lock()
        self._full = asyncio.Lock()
        self._begun = self._done = 0  # commits: how many were begun, and which of them was the last that succeeded
        self._dirty = False  # something was drained since the last commit began
        self._leaving: list[Any] = []  # indices of clusters to be released by the next commit
        self._leaving_leaves: list[Any] = []
        self._going_leaves: list[Any] = []  # to be released as soon as nobody can be reading them
        self._orphans = _NONE  # clusters that the last worker had not released yet
        self._burying: set[int] = set()  # volumes that are being deleted while their child is served
        self._later: list[Any] = []  # records of what such a child no longer names
        self._copying: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._releases: set[asyncio.Task[Any]] = set()
        self._filling: set[int] = set()
        self._closing = asyncio.Event()
        area.taken = self._take

    # --------------------------------------------------------------------------------------------- making and finding

    @classmethod
    def create(
        cls,
        host: VolumeHost,
        path: str,
        name: str,
        bases: Sequence[Backend],
        cluster_bytes: int,
        *,
        clear: bool,
        files: Files | None = None,
        connect: Connect = stores.connect,
    ) -> Group:
        """A new group, whose database is at ``path``. ``clear``: give the room of the back ends back. Blocks.

        The back ends get their labels by ``label``, when whoever made the group has stored that it is there.
        """
        files = files or Files()
        facts = Facts(str(uuids.uuid4()), name, cluster_bytes)
        counts = [clusters_of(base, cluster_bytes) for base in bases]
        rows = [BackingRow(i, base.name, count) for i, (base, count) in enumerate(zip(bases, counts))]
        durable = not isinstance(bases[0], MemoryBackend)
        cleared = [clear and files.punch(base.fd, cluster_bytes, n * cluster_bytes) for base, n in zip(bases, counts)]
        store = Store.create(path, durable, facts, rows, connect)
        area = _new_area(rows, cluster_bytes)
        for base, row, clean in zip(area.backings, rows, cleared):
            if clean:
                area.cluster_states[base.first : base.first + row.clusters] = layout.CLUSTER_CLEAN
        return cls(host, files, store, area, bases, Saved(facts, rows, [], {}))

    @classmethod
    def load(
        cls,
        host: VolumeHost,
        path: str,
        bases: Sequence[Backend],
        *,
        files: Files | None = None,
        connect: Connect = stores.connect,
    ) -> Group:
        """The group whose labels the back ends bear, from its database. Blocks. StoreError when it is damaged."""
        store = _open_store(path, bases, connect)
        try:
            saved = store.read(check=True)
            check_backings(path, saved, bases)
            area = _new_area(saved.backings, saved.facts.cluster_bytes)
            try:
                load(area, saved, store)
                return cls(host, files or Files(), store, area, bases, saved)
            except BaseException:
                area.close()
                raise
        except BaseException:
            store.close()
            raise

    @classmethod
    def adopt(
        cls,
        host: VolumeHost,
        path: str,
        bases: Sequence[Backend],
        fd: int,
        *,
        files: Files | None = None,
        connect: Connect = stores.connect,
    ) -> Group:
        """The group that a dead worker has left in the kept memory ``fd``. Before any poller looks."""
        store = _open_store(path, bases, connect)
        try:
            saved = store.read(check=False)
        except BaseException:
            store.close()
            raise
        area = Area(fd)
        area.recover()
        rows = {row.number: row for row in saved.volumes}
        for number in np.flatnonzero(area.volumes.state != layout.VOLUME_ABSENT).tolist():
            if number not in rows:  # it was not made, or is deleted: see ``start`` for what it has named
                area.volumes[number].state = layout.VOLUME_ABSENT
        for row in saved.volumes:
            v = area.volumes[row.number]
            v.state, v.thick, v.readonly = layout.VOLUME_LIVE, not row.thin, row.readonly
            if int(v.epoch) != row.epoch:  # a snapshot of it was not made
                row.inherited.append(row.epoch)
                row.epoch = int(v.epoch)
        group = cls(host, files or Files(), store, area, bases, saved)
        group._orphans = np.flatnonzero(group.supply.states == CLUSTER_LEAVING)
        for row in saved.volumes:
            group._fit(row)
        return group

    def _fit(self, row: VolumeRow) -> None:
        """Bring a volume that was being resized to the size that the database has; see what of it is not there."""
        v = self.area.volumes[row.number]
        if v.clusters > row.clusters:
            self.maps.cut(row.number, row.clusters)
        assert v.clusters == row.clusters
        committed = self._roots.get(row.number, np.zeros(0, np.int64))
        words = self.area.root(row.number)
        if not np.array_equal(words[: len(committed)], committed) or words[len(committed) :].any():
            v.root_changed = 1

    def start(self) -> None:
        """Begin to look after it."""
        self._spawn(self._run())

    async def label(self) -> None:
        """See to it that the back ends bear their labels."""
        labels = [self._label(number) for number in range(len(self.bases))]

        def write() -> None:
            for base, wanted in zip(self.bases, labels):
                if Label.read(self.files, base.fd) != wanted:
                    wanted.write(self.files, base.fd)

        await asyncio.to_thread(write)

    def _label(self, number: int) -> Label:
        first = self.bases[0]
        beside = isinstance(first, FileBackend) and self._store.path == database_of(first)
        return Label(self.uuid, number, len(self.bases), "" if beside else os.path.abspath(self._store.path))

    async def close(self) -> None:
        """Commit and leave it. No volume of it is served any more."""
        self._closing.set()
        await asyncio.gather(*self._tasks, *self._releases, return_exceptions=True)
        with contextlib.suppress(OSError):
            await self.commit()
        await asyncio.gather(*self._releases, return_exceptions=True)
        self.release()

    def release(self) -> None:
        """Close the files."""
        self._store.close()
        self.area.close()

    def erase(self) -> None:
        """Take the labels away: the group is found no more. Blocks."""
        for base in self.bases:
            Label.erase(self.files, base.fd)

    def remove(self) -> None:
        """After ``erase`` and ``close``: give back its room, and delete the database. Blocks."""
        for base, row in zip(self.bases, self._backing_rows):
            with contextlib.suppress(OSError):
                self.files.punch(base.fd, self.cluster_bytes, row.clusters * self.cluster_bytes)
        stores.remove(self._store.path)

    @property
    def path(self) -> str:
        return self._store.path

    def _spawn(self, work: Coroutine[Any, Any, Any], among: set[asyncio.Task[Any]] | None = None) -> None:
        task = asyncio.create_task(work)
        tasks = self._tasks if among is None else among
        tasks.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("group %s: fault", self.name, exc_info=error)

        task.add_done_callback(ended)

    async def _run(self) -> None:
        """All that nobody waits for."""
        await self.recount()
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_S):
                    await self._closing.wait()
            try:
                if self._dirty or self._leaving or self._leaving_leaves or self._logged():
                    await self.commit()
                await self.supply.clean_some()
            except OSError as error:
                log.error("group %s: %s", self.name, error.strerror)

    async def recount(self) -> None:
        """Free what no map names: what calls of a dead worker have left, and its notes of what was freed."""
        area, states = self.area, self.supply.states
        async with self._writing:
            # First what is said to be used, then the maps: what pollers map meanwhile is not looked at.
            used = np.flatnonzero(states == CLUSTER_USED)
            held = np.flatnonzero(area.leaf_states[: self.supply.leaf_end] >= layout.LEAF_USED)
            marks = np.zeros(len(states), bool)
            roots = [area.root(number) for number in self.volumes]
            leaves = np.unique(np.concatenate(roots)) if roots else np.zeros(0, np.int64)
            leaves = leaves[leaves != 0]
            for at in range(0, len(leaves), _SLICE):
                entries = area.leaves[leaves[at : at + _SLICE]].reshape(-1)
                marks[area.state_index(entries[entries != 0] & PLACE)] = True
                await asyncio.sleep(0)
            # What pollers have unmapped meanwhile is in their logs after the grace: it is freed by these, and once.
            await self.host.grace()
            self._drain()
            lost = used[~marks[used]]
            lost = lost[states[lost] == CLUSTER_USED]
            states[lost] = CLUSTER_LEAVING
            self._leaving += [lost, self._orphans]
            self._orphans = _NONE
            going = np.concatenate([_NONE, leaves, *self._leaving_leaves, *self._going_leaves])
            roots = [area.root(number) for number in self.volumes]
            held = held[area.leaf_states[held] >= layout.LEAF_USED]
            self._leaving_leaves.append(np.setdiff1d(held, np.concatenate([going, *roots])))
        for volume in list(self.volumes.values()):
            if volume.row.inherited and not volume.readonly:
                with _space():
                    await self._reown(volume)

    # ------------------------------------------------------------------------------------------------------- the logs

    def _logged(self) -> bool:
        area = self.area
        return any(area.level(area.log(number)) for number in (*range(self.host.poller_count), layout.CONTROL_AREA))

    def _drain(self) -> None:
        """Take what pollers have changed."""
        for number in (*range(self.host.poller_count), layout.CONTROL_AREA):
            self.area.drain(number)

    def _take(self, records: Any) -> None:
        """What was drained."""
        self._dirty = True
        action = records.action
        freed = records[action == layout.LOG_FREE]
        self._leaving.append(self.area.state_index(freed.old & PLACE))
        self._settle_inherited(records)

    def _settle_inherited(self, records: Any) -> None:
        """An entry, or leaf, that a volume has inherited is its own, which pollers cannot know: free what it was."""
        for kinds in ((layout.LOG_COPY, layout.LOG_DROP), (layout.LOG_LEAF,)):
            some = records[np.isin(records.action, kinds) & (records.old != 0)]
            leaves = layout.LOG_LEAF in kinds
            owners = self.maps.owners(self.area.leaf_epochs[some.old] if leaves else some.old >> PLACE_BITS)
            self._let_go(some[owners == some.volume])
            if self._burying:  # it may be going to inherit these
                self._later.append(some[np.isin(owners, list(self._burying))])

    def _let_go(self, records: Any) -> None:
        """What these records have replaced is nobody's."""
        leaves = records.action == layout.LOG_LEAF
        places = self.area.state_index(records.old[~leaves] & PLACE)
        self.supply.states[places] = CLUSTER_LEAVING
        self._leaving.append(places)
        self._leaving_leaves.append(records.old[leaves])

    # ----------------------------------------------------------------------------------------------------- committing

    async def commit(self, volume: int = NOBODY) -> None:
        """Make durable what was completed before: data, then maps. OSError when it cannot be."""
        begun = self._begun
        async with self._writing:
            if self._done <= begun:  # else one that was begun after this call has done it
                await self._commit(Batch())

    async def _commit(self, batch: Batch, *, roots: Iterable[int] = (), cuts: dict[int, int] | None = None) -> None:
        """Commit ``batch`` and everything that has changed before. The lock ``_writing`` is held.

        roots: volumes whose roots are new. cuts: volumes that are to be so many clusters long.
        """
        area, volumes = self.area, self.area.volumes[: self._slots]
        self._begun += 1
        counted = volumes.changes.copy()
        await self.host.grace()
        self._drain()
        leaving, self._leaving = self._leaving, []
        leaves, self._leaving_leaves = self._leaving_leaves, []
        self._dirty = False
        try:
            changed, roots_now = self._capture(batch, roots, cuts or {}) if self.durable else (_NONE, {})
            captured = [batch.leaves[leaf] for leaf in changed.tolist()]
            if batch:
                batch.facts["next_epoch"] = int(area.group.next_epoch)
            if batch or self.durable:
                await asyncio.to_thread(self._write, batch)
        except Exception as error:
            self._leaving += leaving
            self._leaving_leaves += leaves
            self._dirty = True
            for number in {number for number, _ in batch.roots}:
                volumes[number].root_changed = 1
            if isinstance(error, OSError):
                raise
            log.error("group %s: its metadata cannot be written: %s", self.name, error)
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
        self._done = self._begun
        killpoint("volume_committed")
        self._roots |= roots_now
        for number in batch.gone_volumes:
            self._roots.pop(number, None)
        area.volumes.committed[: len(counted)] = counted
        await self._settle(changed, captured)
        self._release(leaving, leaves)

    def _capture(self, batch: Batch, roots: Iterable[int], cuts: dict[int, int]) -> tuple[Any, dict[int, Any]]:
        """Put every changed root and leaf into ``batch``. Returns (numbers of leaves, roots that were changed)."""
        area, volumes = self.area, self.area.volumes[: self._slots]
        changed = (volumes.root_changed != 0) & (volumes.state != layout.VOLUME_ABSENT)
        found, extra = {}, [_NONE]
        for number in {*np.flatnonzero(changed).tolist(), *roots, *cuts} - {*batch.gone_volumes}:
            volumes[number].root_changed = 0
            words = area.root(number).copy()
            if number in cuts:
                words = words[: words_for(cuts[number])]
                batch.short_roots.append((number, -(-len(words) // stores.ROOT_CHUNK)))
            found[number] = words
            old = self._roots.get(number, _NONE)
            for at in range(0, len(words), stores.ROOT_CHUNK):
                now, before = words[at : at + stores.ROOT_CHUNK], old[at : at + stores.ROOT_CHUNK]
                if not np.array_equal(now[: len(before)], before) or now[len(before) :].any():
                    batch.roots[number, at // stores.ROOT_CHUNK] = now
                    extra.append(now[now != 0])
        states = area.leaf_states[: self.supply.leaf_end]
        # A leaf may be in a root while its record is not in the log yet; the root is not to name what is not there.
        fresh = np.concatenate(extra)
        fresh = fresh[states[fresh] == layout.LEAF_POOLED]
        ends = {}
        for number, clusters in cuts.items():
            if clusters & LEAF_ENTRIES - 1 and (leaf := int(found[number][-1])):
                ends[leaf] = clusters & LEAF_ENTRIES - 1
        leaves = np.unique(
            np.concatenate([np.flatnonzero(states == layout.LEAF_CHANGED), fresh, [*ends]]).astype(int)
        )
        leaves = np.setdiff1d(leaves, batch.gone_leaves)
        for at in range(0, len(leaves), _SLICE):
            some = leaves[at : at + _SLICE]
            entries = area.leaves[some]
            for leaf, epoch, row in zip(some.tolist(), area.leaf_epochs[some].tolist(), entries):
                if leaf in ends:
                    row[ends[leaf] :] = 0
                batch.leaves[leaf] = (epoch, row.tobytes())
        return leaves, found

    def _write(self, batch: Batch) -> None:
        """In a thread: data, then maps."""
        if self.durable:
            for base in self.bases:
                self.files.sync(base.fd)
        killpoint("volume_synced")
        if batch:
            self._store.write(batch)

    async def _settle(self, leaves: Any, captured: list[tuple[int, bytes]]) -> None:
        """Leaves that are still what was written are not changed any more."""
        area = self.area
        for at in range(0, len(leaves), _SLICE):
            some = leaves[at : at + _SLICE]
            rows = captured[at : at + _SLICE]
            entries = np.frombuffer(b"".join(entries for _, entries in rows), np.int64).reshape(-1, LEAF_ENTRIES)
            same = (area.leaves[some] == entries).all(axis=1)
            same &= area.leaf_epochs[some] == np.array([epoch for epoch, _ in rows])
            same &= area.leaf_states[some] == layout.LEAF_CHANGED
            area.leaf_states[some[same]] = layout.LEAF_USED
            await asyncio.sleep(0)

    def _release(self, places: list[Any], leaves: list[Any]) -> None:
        """Nothing durable names these: free them when nobody can be reading them any more."""
        indices, numbers = np.concatenate([_NONE, *places]), np.concatenate([_NONE, *leaves])
        if not len(indices) and not len(numbers):
            return

        async def release() -> None:
            try:
                await self.host.settled_volumes(self.area)
                self.supply.release(indices)
                self.supply.release_leaves(np.unique(numbers))
            finally:
                self._going_leaves = [one for one in self._going_leaves if one is not numbers]

        self._going_leaves.append(numbers)
        self._spawn(release(), self._releases)

    # --------------------------------------------------------------------------------------------- for the data path

    def look(self, poller: int) -> None:
        """As VolumeStore's."""
        self._drain()
        if poller not in self._filling:
            self._filling.add(poller)
            self._spawn(self._fill(poller))

    async def _fill(self, poller: int) -> None:
        try:
            await self.supply.top_up(poller, self.host.poller_count)
        except OSError as error:
            log.error("group %s: no clean clusters: %s", self.name, error.strerror)
        finally:
            self._filling.discard(poller)

    async def room(self, poller: int) -> bool:
        """As VolumeStore's."""
        self._drain()
        try:
            if await self.supply.top_up(poller, self.host.poller_count):
                return True
            return await self._find_room() and await self.supply.top_up(poller, self.host.poller_count)
        except OSError as error:
            log.error("group %s: no clean clusters: %s", self.name, error.strerror)
            return False

    async def _find_room(self) -> bool:
        """When nothing is left: have back what was freed, and what lies in pools; whether there was any."""
        async with self._full:
            self._drain()
            if not self.supply.free_count() and not self._leaving and not self._releases:
                return False
            await self.commit()
            await asyncio.gather(*self._releases)
            async with self.host.quiet(self.area):
                self._drain()
                self.supply.take_back(self.host.poller_count)
            return True

    async def _take_clusters(self, count: int) -> Any:
        """As Supply.take, and looks everywhere."""
        try:
            return await self.supply.take(count)
        except OSError as error:
            if error.errno != errno.ENOSPC or not await self._find_room():
                raise
            return await self.supply.take(count)

    async def make_writable(self, volume: int, first: int, count: int) -> None:
        """As VolumeStore's."""
        await self._own(volume, np.arange(first, first + count))

    async def _own(self, number: int, indices: Any) -> None:
        """Let a volume own these clusters."""
        waiting = {self._copying[number, i] for i in indices.tolist() if (number, i) in self._copying}
        while waiting:
            await asyncio.wait(waiting)
            waiting = {self._copying[number, i] for i in indices.tolist() if (number, i) in self._copying}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keys = [(number, i) for i in indices.tolist()]
        self._copying |= dict.fromkeys(keys, done)
        try:
            while len(indices := await self._own_once(number, indices)):
                pass
        finally:
            for key in keys:
                del self._copying[key]
            done.set_result(None)

    async def _own_once(self, number: int, indices: Any) -> Any:
        """Those of the indices that are still not owned."""
        area, v = self.area, self.area.volumes[number]
        if indices[-1] >= v.clusters:
            raise OSError(errno.EINVAL, "beyond the end of the volume")
        entries = area.entries(number, int(indices[0]), int(indices[-1] - indices[0] + 1))[indices - indices[0]]
        todo = entries >> PLACE_BITS != v.epoch
        indices, entries = indices[todo], entries[todo]
        if not len(indices):
            return indices
        places = await self._take_clusters(len(indices))
        try:
            await asyncio.to_thread(self._copy, entries, places)
        except BaseException:
            self.supply.spoiled(places)
            raise
        for index, entry, place in zip(indices.tolist(), entries.tolist(), places.tolist()):
            if index >= v.clusters or not self._install(number, index, entry, place):
                (self.supply.spoiled if entry else self.supply.give_back)(np.array([place]))
        return indices

    def _copy(self, entries: Any, places: Any) -> None:
        for entry, place in zip(entries.tolist(), places.tolist()):
            if entry:
                source, target = self.supply.where(entry & PLACE), self.supply.where(place)
                self.files.copy(*source, *target, self.cluster_bytes)

    def _install(self, number: int, index: int, old: int, place: int) -> bool:
        """Exchange an entry by one of ``place``, if it is still ``old``."""
        leaves = self.area.leaf_pool(layout.CONTROL_AREA)
        if not self.area.level(leaves):
            self.area.fill(leaves, self.supply.take_leaves(LEAVES_AT_ONCE))
        return self.area.install(number, index, old, place, layout.LOG_COPY if old else layout.LOG_ALLOCATE)

    # ----------------------------------------------------------------------------------------------------- management

    def find(self, name: str) -> Volume | None:
        return self._by_name.get(name)

    def free_clusters(self) -> int:
        """What no volume has, whether it can be given out yet or not."""
        return int((self.supply.states != CLUSTER_USED).sum())

    def allocated(self, volume: Volume) -> int:
        """Clusters that a volume owns."""
        return len(self.maps.owned_places(volume.number))

    def describe(self) -> dict[str, Any]:
        """The object in ``bdev_lvol_get_lvstores``."""
        return {
            "uuid": self.uuid,
            "name": self.name,
            "base_bdev": self.bases[0].name,
            "total_data_clusters": self.supply.total,
            "free_clusters": self.free_clusters(),
            "block_size": self.block_size,
            "cluster_size": self.cluster_bytes,
            "max_growable_size": (layout.CLUSTER + 1) * self.cluster_bytes,
        }

    @contextlib.contextmanager
    def doing(self, what: str, *volumes: Volume) -> Iterator[None]:
        """One call at a time on an object: the second is told so."""
        busy = next((volume for volume in volumes if volume.busy), None)
        if busy is not None or self.busy:
            name, doing = (busy.alias, busy.busy) if busy is not None else (self.name, self.busy)
            raise os_error(errno.EBUSY, f"{name}: {doing} is under way")
        for volume in volumes:
            volume.busy = what
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            for volume in volumes:
                volume.busy = ""

    @contextlib.contextmanager
    def closing(self, what: str) -> Iterator[None]:
        """Around what ends with ``close``: there is no call under way, and none comes."""
        if self.busy or self._calls:
            raise os_error(errno.EBUSY, f"{self.name}: {self.busy or 'a call'} is under way")
        self.busy = what
        try:
            yield
        except BaseException:
            self.busy = ""
            raise

    @contextlib.contextmanager
    def _naming(self, name: str, exists: RpcError) -> Iterator[None]:
        """A new name for a volume."""
        if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise refused(errno.EINVAL)
        if name in self._by_name or name in self._names:
            raise exists
        self._names.add(name)
        try:
            yield
        finally:
            self._names.discard(name)

    def _row(self, name: str, clusters: int, *, thin: bool, parent: Volume | None = None, **more: Any) -> VolumeRow:
        """A new volume's row, with a place in kept memory and an epoch of its own unless it is given one."""
        free = np.flatnonzero(self.area.volumes[: self._slots].state == layout.VOLUME_ABSENT)
        number = int(free[0]) if len(free) else self._slots
        if number >= layout.VOLUMES_MAX:
            raise os_error(errno.ENOSPC, f"a group has up to {layout.VOLUMES_MAX} volumes")
        self._slots = max(self._slots, number + 1)
        uuid, above = str(uuids.uuid4()), parent.number if parent else None
        row = VolumeRow(number, uuid, name, above, thin, False, False, clusters, 0)
        row = replace(row, **more)
        row.epoch = row.epoch or self.maps.next_epoch()
        return row

    def _add(self, row: VolumeRow) -> Volume:
        """It is committed."""
        volume = Volume(self, row)
        if row.parent is not None:
            volume.parent = self.volumes[row.parent]
            volume.parent.children.append(volume)
        self.volumes[row.number] = self._by_name[row.name] = volume
        self.area.volumes[row.number].state = layout.VOLUME_LIVE
        return volume

    async def create_volume(self, name: str, size_bytes: int, *, thin: bool) -> Volume:
        """A new volume of zeroes, ``size_bytes`` rounded up to clusters."""
        clusters = -(-size_bytes // self.cluster_bytes)
        if not 0 < clusters <= layout.CLUSTERS_MAX:
            raise refused(errno.EINVAL)
        with self.doing("creation"), self._naming(name, os_error(errno.EEXIST)), _space():
            places = _NONE if thin else await self._reserve(clusters)
            try:
                async with self._writing:
                    row = self._row(name, clusters, thin=thin)
                    self.maps.make(row)
                    try:
                        self._fill_map(row.number, 0, places)
                        await self._commit(Batch(volumes=[row]), roots=[row.number])
                    except BaseException:
                        self._unmake(row.number)
                        raise
            except BaseException:
                self.supply.give_back(places)
                raise
            return self._add(row)

    async def _reserve(self, clusters: int) -> Any:
        if clusters > self.supply.free_count() + sum(map(len, self._leaving)) and not self._releases:
            raise no_space()
        return await self._take_clusters(clusters)

    def _fill_map(self, number: int, first: int, places: Any) -> None:
        """Map clusters from ``first`` on, which are unmapped and not served."""
        if not len(places):
            return
        area, v = self.area, self.area.volumes[number]
        end = first + len(places)
        begin_word, end_word = first >> LEAF_BITS, words_for(end)
        words = area.root(number)[begin_word:end_word]
        fresh = words == 0
        leaves = self.supply.take_leaves(int(fresh.sum()))
        area.leaves[leaves] = 0
        area.leaf_epochs[leaves] = v.epoch
        words[fresh] = leaves
        table = area.leaves[words].reshape(-1)
        start = first - (begin_word << LEAF_BITS)
        table[start : start + len(places)] = places | int(v.epoch) << PLACE_BITS
        area.leaves[words] = table.reshape(-1, LEAF_ENTRIES)
        area.leaf_states[words] = layout.LEAF_CHANGED
        v.root_changed = 1
        self.supply.used(places)

    def _unmake(self, number: int) -> None:
        """A volume that could not be committed, and owns nothing that anybody else names."""
        leaves = self.maps.owned_leaves(number)[1]
        self.maps.drop(number)
        self.supply.release_leaves(leaves)

    async def snapshot(self, volume: Volume, name: str) -> Volume:
        """A read-only volume of what ``volume`` is at one moment of this call."""
        with self.doing("a snapshot", volume), self._naming(name, refused(errno.EEXIST)), _space():
            if volume.readonly:
                raise refused(errno.EINVAL)
            await self.commit()  # else all of it would be written after the moment, and take long
            async with self._writing:
                area, v, old = self.area, self.area.volumes[volume.number], volume.row
                row = self._row(
                    name, old.clusters, thin=True, parent=volume.parent, readonly=True, snapshot=True, epoch=old.epoch
                )
                row.inherited = old.inherited
                origin = replace(old, parent=row.number, thin=True, inherited=[], epoch=self.maps.next_epoch())
                async with self.host.quiet(area):
                    self._drain()
                    self.maps.make(row, area.root(volume.number))
                    killpoint("snapshot_made")
                    v.epoch, v.thick = origin.epoch, 0
                    self.maps.give(origin.epoch, volume.number)
                    self.maps.inherit(volume.number, row.number, row.inherited)
                try:
                    await self._commit(Batch(volumes=[row, origin]), roots=[row.number])
                except BaseException:
                    await self._merge(row.number, row, volume, origin)
                    raise
                volume.row = origin
                snapshot = self._add(row)
                if snapshot.parent is not None:
                    snapshot.parent.children.remove(snapshot)
                    snapshot.parent.children[snapshot.parent.children.index(volume)] = snapshot
                volume.parent, snapshot.children = snapshot, [volume]
                return snapshot

    async def _merge(self, number: int, row: VolumeRow, heir: Volume, heir_row: VolumeRow) -> None:
        """Undo a snapshot that was not committed: ``heir`` has back what was its own."""
        async with self.host.quiet(self.area):
            self._drain()
            places, leaves = self.maps.bury(number, heir.number)
            self.maps.inherit(number, heir.number, (row.epoch, *row.inherited))
            self.maps.drop(number)
        heir.row = replace(heir.row, epoch=heir_row.epoch, inherited=[row.epoch, *row.inherited])
        self._let_leave(places, leaves)

    def _let_leave(self, places: Any, leaves: Any) -> None:
        indices = self.area.state_index(places)
        self.supply.states[indices] = CLUSTER_LEAVING
        self._leaving.append(indices)
        self._leaving_leaves.append(leaves)

    async def clone(self, origin: Volume, name: str) -> Volume:
        """A writable volume that begins as the read-only ``origin``."""
        with self.doing("a clone", origin), self._naming(name, refused(errno.EEXIST)), _space():
            if not origin.readonly:
                raise refused(errno.EINVAL)
            async with self._writing:
                row = self._row(name, origin.row.clusters, thin=True, parent=origin)
                self.maps.make(row, self.area.root(origin.number))
                try:
                    await self._commit(Batch(volumes=[row]), roots=[row.number])
                except BaseException:
                    self.maps.drop(row.number)
                    raise
                return self._add(row)

    async def rename(self, volume: Volume, name: str) -> None:
        if name == volume.row.name:
            return
        with self.doing("a renaming", volume), self._naming(name, refused(errno.EEXIST)), _space():
            await self._commit_row(volume, replace(volume.row, name=name))

    async def rename_group(self, name: str) -> None:
        with self.doing("a renaming"), _space():
            async with self._writing:
                await self._commit(Batch(facts={"name": name}))
            self.name = name

    async def _commit_row(self, volume: Volume, row: VolumeRow) -> None:
        """A row with another name, parent or flags."""
        async with self._writing:
            await self._commit(Batch(volumes=[row]))
            if row.name != volume.row.name:
                del self._by_name[volume.row.name]
                self._by_name[row.name] = volume
            volume.row = row

    async def set_read_only(self, volume: Volume) -> None:
        with self.doing("a change", volume), _space():
            await self._commit_row(volume, replace(volume.row, readonly=True))
            volume.readonly = True
            self.area.volumes[volume.number].readonly = 1
            await self.host.volume_changed(volume)

    async def resize(self, volume: Volume, size_bytes: int) -> None:
        clusters = -(-size_bytes // self.cluster_bytes)
        with self.doing("a resize", volume), _space():
            if volume.readonly:
                raise refused(errno.EPERM)
            if not 0 < clusters <= layout.CLUSTERS_MAX:
                raise refused(errno.EINVAL)
            if clusters > volume.row.clusters:
                await self._grow(volume, clusters)
            elif clusters < volume.row.clusters:
                await self._shrink(volume, clusters)

    async def _grow(self, volume: Volume, clusters: int) -> None:
        """Longer in kept memory, then in the database, then for the guest."""
        number, old = volume.number, volume.row.clusters
        places = _NONE if volume.row.thin else await self._reserve(clusters - old)
        row = replace(volume.row, clusters=clusters)
        try:
            async with self._writing:
                async with self.host.quiet(self.area):
                    self._drain()
                    self.maps.grow(number, clusters)
                    self._fill_map(number, old, places)
                try:
                    await self._commit(Batch(volumes=[row]), roots=[number])
                except BaseException:
                    async with self.host.quiet(self.area):
                        self._drain()
                        _, leaves = self.maps.cut(number, old)
                    self.supply.release_leaves(leaves)
                    raise
        except BaseException:
            self.supply.give_back(places)
            raise
        volume.row = row
        volume.resized()
        await self.host.volume_changed(volume)

    async def _shrink(self, volume: Volume, clusters: int) -> None:
        """Shorter for the guest, then in the database, then in kept memory."""
        number, before = volume.number, volume.row
        row = replace(before, clusters=clusters)
        volume.row = row
        volume.resized()
        await self.host.volume_changed(volume)
        async with self._writing:
            try:
                await self._own_last_leaf(number, clusters)
                await self._commit(Batch(volumes=[row]), cuts={number: clusters})
            except BaseException:
                volume.row = before
                volume.resized()
                await self.host.volume_changed(volume)
                raise
            async with self.host.quiet(self.area):
                self._drain()
                self._let_leave(*self.maps.cut(number, clusters))

    async def _own_last_leaf(self, number: int, clusters: int) -> None:
        """The leaf that a new end cuts through is not to be shared."""
        word = (clusters - 1) >> LEAF_BITS
        async with self.host.quiet(self.area):
            self._drain()
            leaf = int(self.area.root(number)[word])
            if (
                clusters & LEAF_ENTRIES - 1
                and leaf
                and self.area.leaf_epochs[leaf] != self.area.volumes[number].epoch
            ):
                (new,) = self.supply.take_leaves(1)
                self.maps.own_leaf(number, word, int(new))
                if self.maps.owners(self.area.leaf_epochs[leaf]) == number:
                    self._leaving_leaves.append(np.array([leaf]))

    async def decouple(self, volume: Volume) -> None:
        """Copy what the volume has in common with its parent; its parent is then its parent's."""
        parent = volume.parent
        if parent is None:
            raise refused(errno.EINVAL)
        with self.doing("decoupling", volume, parent), _space():
            if volume.readonly:
                raise refused(errno.EPERM)
            await self._copy_what(volume, lambda entries: self.maps.owners(entries >> PLACE_BITS) == parent.number)
            await self._own_leaves_of(volume, parent)
            await self._leave_parent(volume, parent.parent, thin=volume.row.thin)

    async def inflate(self, volume: Volume) -> None:
        """Copy what the volume shares, allocate the rest: it is thick then, and nobody's clone."""
        with self.doing("inflating", volume), _space():
            if volume.readonly:
                raise refused(errno.EPERM)
            v = self.area.volumes[volume.number]
            if v.thick:
                return
            async with self.host.quiet(self.area):
                v.thick = 1  # else a guest could free what has just been allocated
            try:
                epoch = int(v.epoch)
                await self._copy_what(volume, lambda entries: entries >> PLACE_BITS != epoch)
                await self._leave_parent(volume, None, thin=False)
            except BaseException:
                v.thick = 0
                raise

    async def _copy_what(self, volume: Volume, wanted: Callable[[Any], Any]) -> None:
        """Let a volume own the clusters whose entries are ``wanted``. ENOSPC before anything is copied."""
        area, number, count = self.area, volume.number, volume.row.clusters
        at_once = _SLICE * LEAF_ENTRIES
        spans = [(at, min(at_once, count - at)) for at in range(0, count, at_once)]
        needed = sum(int(wanted(area.entries(number, *span)).sum()) for span in spans)
        if needed > self.supply.free_count() + sum(map(len, self._leaving)) and not self._releases:
            raise no_space()
        for at in range(0, count, COPY_AT_ONCE):
            size = min(COPY_AT_ONCE, count - at)
            while len(indices := at + np.flatnonzero(wanted(area.entries(number, at, size)))):
                await self._own(number, indices)

    async def _own_leaves_of(self, volume: Volume, parent: Volume) -> None:
        """Copy the leaves that ``volume`` has in common with ``parent``."""
        area, number = self.area, volume.number
        async with self._writing, self.host.quiet(area):
            self._drain()
            words = area.root(number)
            held = np.flatnonzero(words)
            theirs = held[self.maps.owners(area.leaf_epochs[words[held]]) == parent.number]
            for word, leaf in zip(theirs.tolist(), self.supply.take_leaves(len(theirs)).tolist()):
                self.maps.own_leaf(number, word, leaf)
            self._dirty = True

    async def _leave_parent(self, volume: Volume, parent: Volume | None, *, thin: bool) -> None:
        await self._commit_row(volume, replace(volume.row, parent=parent.number if parent else None, thin=thin))
        if volume.parent is not None:
            volume.parent.children.remove(volume)
        volume.parent = parent
        if parent is not None:
            parent.children.append(volume)

    @contextlib.contextmanager
    def deleting(self, volume: Volume) -> Iterator[None]:
        """Around ``delete`` and what comes before it. A volume with two children stays."""
        if len(volume.children) > 1:
            raise RpcError(-32603, os.strerror(errno.EPERM))
        with self.doing(DELETION, volume), self.doing("deletion of its parent", *volume.children):
            yield

    async def delete(self, volume: Volume) -> None:
        """Inside ``deleting``, when nobody serves it. What it shares with its only child is the child's."""
        heir = volume.children[0] if volume.children else None
        with _space():
            async with self._writing:
                await self._delete(volume, heir)
            if heir is not None and not heir.readonly:
                await self._reown(heir)

    async def _delete(self, volume: Volume, heir: Volume | None) -> None:
        number, row, heir_number = volume.number, volume.row, heir.number if heir else NOBODY
        batch = Batch(gone_volumes=[number])
        self._burying.add(number)
        try:
            async with contextlib.AsyncExitStack() as stack:
                if heir is not None and not heir.readonly:
                    await stack.enter_async_context(self.host.quiet(self.area))
                self._drain()
                places, leaves = self.maps.bury(number, heir_number)
            batch.gone_leaves = leaves.tolist()
            heir_row = None
            if heir is not None:
                heir_row = replace(
                    heir.row, parent=row.parent, inherited=[*heir.row.inherited, row.epoch, *row.inherited]
                )
                batch.volumes.append(heir_row)
            await self._commit(batch)
            if heir is not None and heir_row is not None:
                heir.row = heir_row
                self.maps.inherit(number, heir.number, (row.epoch, *row.inherited))
        finally:
            self._burying.discard(number)
            later, self._later = self._later, []
            for records in later:
                self._settle_inherited(records)
        self.maps.drop(number)
        del self.volumes[number], self._by_name[row.name]
        parent = volume.parent
        if parent is not None:
            at = parent.children.index(volume)
            parent.children[at : at + 1] = [heir] if heir is not None else []
        if heir is not None:
            heir.parent = parent
        indices = self.area.state_index(places)
        self.supply.states[indices] = CLUSTER_LEAVING
        self._release([indices], [leaves])  # the database has forgotten them already

    async def _reown(self, volume: Volume) -> None:
        """Let a volume write in place what it has inherited."""
        words = len(self.area.root(volume.number))
        for at in range(0, words, _SLICE):
            async with self.host.quiet(self.area):
                self._drain()
                self.maps.reown(volume.number, at, _SLICE)
                self._dirty = True
        await self._commit_row(volume, replace(volume.row, inherited=[]))

    async def extend(self) -> None:
        """Take in what the last back end has become longer by since the group was made."""
        last, row = self.area.backings[len(self.bases) - 1], self._backing_rows[-1]
        clusters = clusters_of(self.bases[-1], self.cluster_bytes)
        if clusters <= row.clusters:
            return
        with self.doing("growing"), _space():
            async with self._writing:
                await self._commit(Batch(backings=[replace(row, clusters=clusters)]))
            self._backing_rows[-1] = replace(row, clusters=clusters)
            last.clusters = clusters
            self.supply.extended()


_NONE = np.zeros(0, np.int64)


@contextlib.contextmanager
def _space() -> Iterator[None]:
    """SPDK's answers for what goes wrong in the volume layer."""
    try:
        yield
    except OSError as error:
        raise refused(error.errno or errno.EIO) from error


def database_of(base: FileBackend) -> str:
    """Path of the database of a group whose first back end is this."""
    return f"{base.path}.lvs"


def clusters_of(base: Backend, cluster_bytes: int) -> int:
    """Clusters that a back end has, beside the one that its label is in."""
    return min(base.size_bytes // cluster_bytes - 1, layout.CLUSTER + 1)


def _open_store(path: str, bases: Sequence[Backend], connect: Connect) -> Store:
    if not os.path.exists(path):
        raise StoreError(f"{path} is missing", "it holds the maps of the volumes; put it back")
    try:
        return Store(path, not isinstance(bases[0], MemoryBackend), connect)
    except Exception as error:  # sqlite3.Error, or that of whatever module ``connect`` uses
        raise StoreError(f"{path} cannot be opened: {error}") from error


def check_backings(path: str, saved: Saved, bases: Sequence[Backend]) -> None:
    """StoreError unless the back ends have room for what the database says."""
    size = saved.facts.cluster_bytes
    if size not in (1 << shift for shift in layout.CLUSTER_SHIFTS) or len(saved.backings) != len(bases):
        raise StoreError(f"{path} does not fit its back ends")
    for row, base in zip(saved.backings, bases):
        if clusters_of(base, size) < row.clusters:
            raise StoreError(
                f"bdev {base.name} is shorter than it was", f"{row.clusters + 1} clusters of {size} bytes"
            )


def _new_area(rows: Sequence[BackingRow], cluster_bytes: int) -> Area:
    area = Area.create(cluster_bytes.bit_length() - 1)
    first = 0
    for row in rows:
        area.backings[row.number] = (first, row.clusters)
        first += row.clusters
    return area
