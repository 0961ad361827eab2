"""Groups of volumes without a worker: control's side over real files, read and written by a thread's path alone."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from dpu import layout
from dpu.backends import Backend, FileBackend, MemoryBackend
from dpu.fastpath.atomics import load_u64, store_u64
from dpu.layout import BLOCK_ERASE, CONTROL_AREA, LEAF_ENTRIES, PLACE, PLACE_BITS, RING_HEAD, RING_TAIL
from dpu.nvme.io import help_out
from dpu.volumes.area import Area
from dpu.volumes.data import Files
from dpu.volumes.group import Group
from dpu.volumes.store import Batch
from dpu.volumes.volume import Volume


class FakeVolumeHost:
    """No poller serves anything, so whatever was begun has ended."""

    def __init__(self, poller_count: int = 1) -> None:
        self.poller_count = poller_count
        self.changed: list[str] = []

    def memory_of(self, backend: MemoryBackend) -> int:
        return 0

    @contextlib.asynccontextmanager
    async def quiet(self, area: Area) -> AsyncIterator[None]:
        yield

    async def grace(self) -> None:
        pass

    async def settled_volumes(self, area: Area) -> None:
        pass

    async def volume_changed(self, volume: Backend) -> None:
        self.changed.append(volume.name)


def make_file(path: Path, size: int, name: str = "base") -> FileBackend:
    path.touch()
    os.truncate(path, size)
    return open_file(path, name)


def open_file(path: Path, name: str = "base") -> FileBackend:
    return FileBackend.create(name, str(path), 512, cache_mode="buffered")


def make_memory(size: int, name: str = "base") -> MemoryBackend:
    return MemoryBackend.create(name, 512, size // 512, uuid.uuid4())


def read(volume: Volume, offset: int, length: int) -> bytes:
    """Bytes inside one cluster."""
    group, entry = volume.store, entry_of(volume, offset // volume.store.cluster_bytes)
    if not entry:
        return bytes(length)
    fd, start = group.supply.where(entry & PLACE)
    return group.files.read(fd, start + offset % group.cluster_bytes, length)


async def write(volume: Volume, offset: int, data: bytes) -> None:
    """Bytes inside one cluster, as a thread of control writes them."""
    index = offset // volume.store.cluster_bytes
    while not owned(volume, index):
        await volume.store.make_writable(volume.number, index, 1)
    _write_in_place(volume, offset, data)


async def discard(volume: Volume, index: int) -> None:
    """Unmap a cluster as a thread of control does it."""
    size = volume.store.cluster_bytes
    while (answer := volume.area.ask(volume.number, BLOCK_ERASE, index * size, size, free=True)).why:
        await help_out(volume.store, answer.why, CONTROL_AREA, volume.number, answer.first, answer.clusters)
    assert answer.done == size and not answer.extents


def entry_of(volume: Volume, index: int) -> int:
    return int(volume.area.entries(volume.number, index, 1)[0])


def owned(volume: Volume, index: int) -> bool:
    return bool(entry_of(volume, index) >> PLACE_BITS == volume.area.volumes[volume.number].epoch)


def _write_in_place(volume: Volume, offset: int, data: bytes) -> None:
    group = volume.store
    fd, start = group.supply.where(entry_of(volume, offset // group.cluster_bytes) & PLACE)
    group.files.write(fd, start + offset % group.cluster_bytes, data)


def find(group: Group, name: str) -> Volume:
    volume = group.find(name)
    assert volume is not None, name
    return volume


class Killed(BaseException):
    """The worker is dead. A BaseException, so that no handler of the code under test takes it for an error."""


class Death:
    """Counts steps, and dies at one of them: what is kept is copied then, and nothing is written after."""

    def __init__(self) -> None:
        self.left = -1  # steps until death; -1: none
        self.dead = False
        self.area_fd = -1  # to copy
        self.copy_fd = -1

    def step(self) -> None:
        if self.left == 0 and not self.dead:
            self.dead = True
            self.copy_fd = copy_sparse(self.area_fd)
        if self.dead:
            raise Killed
        self.left -= 1


class MortalHost(FakeVolumeHost):
    """``death`` has a step at whatever the group asks of the worker."""

    def __init__(self, death: Death) -> None:
        super().__init__()
        self.death = death

    @contextlib.asynccontextmanager
    async def quiet(self, area: Area) -> AsyncIterator[None]:
        self.death.step()
        yield
        self.death.step()

    async def grace(self) -> None:
        self.death.step()

    async def settled_volumes(self, area: Area) -> None:
        self.death.step()


class Disk(Files):
    """Files that can lose what was not synced. ``death`` has a step at each operation."""

    def __init__(self, death: Death) -> None:
        self.death = death
        self._durable: dict[int, bytearray] = {}  # fd -> what a power cut cannot take
        self._pending: dict[int, list[tuple[int, bytes]]] = {}

    def add(self, fd: int) -> None:
        self._durable[fd] = bytearray(os.pread(fd, os.fstat(fd).st_size, 0))
        self._pending[fd] = []

    def write(self, fd: int, offset: int, data: bytes | memoryview) -> None:
        self.death.step()
        super().write(fd, offset, data)
        self._pending[fd].append((offset, bytes(data)))

    def punch(self, fd: int, offset: int, length: int) -> bool:
        self.death.step()
        self._pending[fd].append((offset, bytes(length)))
        return super().punch(fd, offset, length)

    def sync(self, fd: int) -> None:
        self.death.step()
        self.lose(fd, lambda _: True)

    def lose(self, fd: int, kept: Callable[[int], bool]) -> None:
        """Forget operations that were not synced, but those for whose number ``kept`` is true."""
        for number, (offset, data) in enumerate(self._pending[fd]):
            if kept(number):
                self._durable[fd][offset : offset + len(data)] = data
        self._pending[fd] = []
        os.pwrite(fd, self._durable[fd], 0)


def mortal(group: Group, death: Death) -> Group:
    """The same with a step before and after each transaction."""
    write = group._store.write

    def stepping(batch: Batch) -> None:
        death.step()
        write(batch)
        death.step()

    group._store.write = stepping  # type: ignore[method-assign]
    return group


def copy_sparse(fd: int) -> int:
    """A copy of a memfd, holes as holes."""
    copy = os.memfd_create("copy", os.MFD_CLOEXEC)
    size = os.fstat(fd).st_size
    os.ftruncate(copy, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        end = os.lseek(fd, at, os.SEEK_HOLE)
        os.pwrite(copy, os.pread(fd, end - at, at), at)
        at = end
    return copy


class PythonPoller:
    """What dpu.fastpath.soc does to a map, word by word in the order of dpu.volumes.area; ``step`` between them."""

    def __init__(self, group: Group, step: Callable[[], None], number: int = 0) -> None:
        self.group, self.area, self.step, self.number = group, group.area, step, number

    async def write(self, volume: Volume, offset: int, data: bytes) -> None:
        """Bytes inside one cluster."""
        index = offset // self.group.cluster_bytes
        while not owned(volume, index):
            if self._allocate(volume, index):
                break
            if not await self.group.room(self.number):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _write_in_place(volume, offset, data)

    async def discard(self, volume: Volume, index: int) -> None:
        old = entry_of(volume, index)
        if not old:
            return
        v = self.area.volumes[volume.number]
        v.changes += 1
        while not (leaf := self._own_leaf(volume, index)):
            assert await self.group.room(self.number)
        self._record(layout.LOG_FREE if old >> PLACE_BITS == v.epoch else layout.LOG_DROP, volume, index, old, 0)
        self.area.leaves[leaf, index % LEAF_ENTRIES] = 0
        self.step()
        self._move(self.area.log(self.number), RING_TAIL)

    def _allocate(self, volume: Volume, index: int) -> bool:
        area, v, old = self.area, self.area.volumes[volume.number], entry_of(volume, index)
        v.changes += 1
        self.step()
        leaf = self._own_leaf(volume, index)
        pool = area.pool(self.number)
        if not leaf or not area.level(pool):
            return False
        place = int(area.values(pool)[0])
        new = place | int(v.epoch) << PLACE_BITS
        self._record(layout.LOG_COPY if old else layout.LOG_ALLOCATE, volume, index, old, new)
        if old:
            source, target = self.group.supply.where(old & PLACE), self.group.supply.where(place)
            self.group.files.copy(*source, *target, self.group.cluster_bytes)
        area.leaves[leaf, index % LEAF_ENTRIES] = new
        self.step()
        self._move(area.log(self.number), RING_TAIL)
        self._move(pool, RING_HEAD)
        return True

    def _own_leaf(self, volume: Volume, index: int) -> int:
        """The number of the volume's own leaf; 0 when one is needed and there is none."""
        area, v = self.area, self.area.volumes[volume.number]
        word, pool = index // LEAF_ENTRIES, area.leaf_pool(self.number)
        old = int(area.root(volume.number)[word])
        if old and area.leaf_epochs[old] == v.epoch:
            return old
        if not area.level(pool):
            return 0
        leaf = int(area.values(pool)[0])
        area.leaves[leaf] = area.leaves[old] if old else 0
        area.leaf_epochs[leaf] = v.epoch
        self._record(layout.LOG_LEAF, volume, word, old, leaf)
        area.root(volume.number)[word] = leaf
        self.step()
        self._move(area.log(self.number), RING_TAIL)
        self._move(pool, RING_HEAD)
        return leaf

    def _record(self, action: int, volume: Volume, index: int, old: int, new: int) -> None:
        log = self.area.log(self.number)
        tail = load_u64(log + RING_TAIL)
        record = self.area._records(log)[tail % layout.LOG_ENTRIES]
        record.action, record.volume, record.index, record.old, record.new = action, volume.number, index, old, new
        record.sequence = tail + 1
        self.step()

    def _move(self, ring: int, word: int) -> None:
        store_u64(ring + word, load_u64(ring + word) + 1)
        self.step()
