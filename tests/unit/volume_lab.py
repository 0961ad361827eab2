"""Volumes in the asic lab: a group in kept memory, back ends for it, and a control that does what it is asked.

Use:
    with VolumeKept(cluster_shift=12) as kept, kept.lab() as lab:
        lab.write(0, lba, blocks, value); assert lab.read(0, lba, blocks) == [value] * blocks
Volume i is namespace FIRST + i. `Control` stands for dpu.volumes: it fills pools, copies what is shared, commits; it
does no more than dpu.volumes.interface says. A second `kept.lab(...)` is the next worker.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from dpu import layout
from dpu.backends import Backend, Kind
from dpu.fastpath.uring import Ring
from dpu.guestmap import Mapping
from dpu.nvme import io
from dpu.nvme.interfaces import Completion as Result
from dpu.volumes.area import Area
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import PAGE, Nvme
from tests.unit.asic_lab import PRODUCT, UNIT, GuestSq, Kept, Lab

FIRST = 4  # namespace of volume 0
VOLUMES = 4
TRANSFER = 256 << 10
CAPACITY_EXCEEDED = 0x81


class FakeVolume(Backend):
    """What dpu.volumes.interface calls a VolumeNamespace."""

    kind = Kind.VOLUME
    product_name, config_type, io_types = "volume", "volume", frozenset()
    area: Area
    number: int
    store: Any

    @classmethod
    def from_config(cls, config: dict[str, Any], fd: int) -> FakeVolume:
        raise NotImplementedError

    def creation(self) -> tuple[str, dict[str, Any]]:
        raise NotImplementedError


class VolumeKept(Kept):
    """A group with `clusters` clusters in memory, or in files below `directory`; `backings` back ends."""

    def __init__(
        self,
        *,
        cluster_shift: int = 12,
        clusters: int = 600,
        size: int = 1200,
        directory: Path | None = None,
        backings: int = 1,
        start: int = PAGE,
    ) -> None:
        area = Area.create(cluster_shift)
        self.area_fd = os.dup(area.fd)
        self.shift, self.clusters, self.start, self.in_files = cluster_shift, clusters, start, directory is not None
        volumes: dict[int, Backend] = {}
        for number in range(VOLUMES):
            v = area.volumes[number]
            v.state, v.epoch, v.clusters = layout.VOLUME_LIVE, number + 1, size
            v.root, v.root_words = 1000 * number, 1000
            blocks = (size << cluster_shift) // UNIT
            backend = FakeVolume(f"v{number}", UNIT, blocks, uuid.uuid4(), supports_discard=True)
            backend.number = number
            volumes[FIRST + number] = backend
        area.group.next_epoch = VOLUMES + 1
        self.parts: list[tuple[int, Mapping | None]] = []
        each = clusters // backings
        for k in range(backings):
            area.backings[k] = (k * each, each)
            bytes_ = start + (each << cluster_shift)
            if directory is not None:
                path = directory / f"part{k}"
                path.touch()
                fd = os.open(path, os.O_RDWR)
                os.truncate(fd, bytes_)
                self.parts.append((fd, None))
            else:
                fd = os.memfd_create("part", os.MFD_CLOEXEC)
                os.truncate(fd, bytes_)
                self.parts.append((fd, Mapping(fd, bytes_)))
        area.cluster_states[:clusters] = layout.CLUSTER_CLEAN
        area.close()
        super().__init__(ram_bytes=2 << 20, files=volumes)
        self.buffer = self.ram.buffer(TRANSFER)
        self.prps = Nvme.prps(self_with_ram(self.ram), self.buffer.iova, TRANSFER)[1]

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for fd, mapping in self.parts:
            if mapping:
                mapping.close()
            os.close(fd)
        os.close(self.area_fd)

    def volumes(self) -> dict[int, Backend]:
        """The namespaces that are volumes."""
        return {nsid: backend for nsid, backend in self.backends.items() if isinstance(backend, FakeVolume)}

    def new_area(self) -> Area:
        area = Area(os.dup(self.area_fd))
        for number, (fd, mapping) in enumerate(self.parts):
            kind = layout.KIND_FILE if self.in_files else layout.KIND_MEMORY
            area.set_backing(number, kind, fd, start=self.start, host=mapping.host if mapping else 0)
        return area

    def lab(self, engine: Any = PRODUCT, **options: Any) -> VolumeLab:
        """A worker; its area is recovered."""
        area = self.new_area()
        area.recover()
        return VolumeLab(self, engine, area, **options)


def self_with_ram(ram: Any) -> Any:
    class Driver:
        prps_of_pages = Nvme.prps_of_pages

    driver = Driver()
    driver.ram = ram  # type: ignore[attr-defined]
    return driver


class Control:
    """The other side of dpu.volumes.interface, at once. `batch`: what it puts into a pool; 0: nothing, ever."""

    def __init__(self, area: Area, batch: int = 64) -> None:
        self.area, self.batch = area, batch
        self.asked: list[int] = []  # WHY_*

    def total(self) -> int:
        return int((self.area.backings.first + self.area.backings.clusters).max())

    def drain(self) -> None:
        for number in range(layout.AREAS):
            self.area.drain(number)

    def settle(self) -> None:
        """What was freed can be used again: it is made clean."""
        self.drain()
        area = self.area
        for state in (layout.CLUSTER_LEAVING, layout.CLUSTER_DIRTY):
            for index in np.nonzero(area.cluster_states[: self.total()] == state)[0]:
                backing, cluster = self.place(int(index))
                row = area.local_backings[backing]
                at = int(row.start) + cluster * area.cluster_bytes
                os.pwrite(int(row.fd), bytes(area.cluster_bytes), at)
                area.cluster_states[index] = layout.CLUSTER_CLEAN

    def place(self, index: int) -> tuple[int, int]:
        rows = self.area.backings
        backing = int(np.nonzero((rows.clusters > 0) & (rows.first <= index))[0][-1])
        return backing, index - int(rows.first[backing])

    def clean(self, count: int) -> list[int]:
        """Take clean clusters; their places."""
        states = self.area.cluster_states[: self.total()]
        found = np.nonzero(states == layout.CLUSTER_CLEAN)[0][:count]
        states[found] = layout.CLUSTER_POOLED
        return [backing << 32 | cluster for backing, cluster in map(self.place, found.tolist())]

    def room(self, number: int) -> bool:
        self.settle()
        area = self.area
        if not area.level(area.leaf_pool(number)):
            free = np.nonzero(area.leaf_states[1:4000] == layout.LEAF_FREE)[0][:8] + 1
            area.leaf_states[free] = layout.LEAF_POOLED
            area.fill(area.leaf_pool(number), free)
        if not area.level(area.pool(number)):
            area.fill(area.pool(number), self.clean(self.batch))
        return bool(area.level(area.pool(number)))

    def make_writable(self, volume: int, first: int, count: int) -> bool:
        area = self.area
        self.drain()
        for index in range(first, first + count):
            while (old := int(area.entries(volume, index, 1)[0])) >> layout.PLACE_BITS != area.volumes[volume].epoch:
                places = self.clean(1)
                if not places or not self.room(layout.CONTROL_AREA):
                    return False
                if old:
                    self._copy(old & layout.PLACE, places[0])
                action = layout.LOG_COPY if old else layout.LOG_ALLOCATE
                assert area.install(volume, index, old, places[0], action)
        return True

    def _copy(self, old: int, new: int) -> None:
        size, rows = self.area.cluster_bytes, self.area.local_backings
        source, target = rows[old >> 32], rows[new >> 32]
        data = os.pread(int(source.fd), size, int(source.start) + (old & layout.CLUSTER) * size)
        os.pwrite(int(target.fd), data, int(target.start) + (new & layout.CLUSTER) * size)

    def snapshot(self, volume: int, into: int) -> None:
        """`into` becomes a snapshot (or clone) of the volume: dpu.volumes does it inside of quiet()."""
        area, rows = self.area, self.area.volumes
        area.root(into)[:] = area.root(volume)
        for number in (volume, into):
            rows[number].epoch = area.group.next_epoch
            area.group.next_epoch += 1

    def check(self) -> None:
        """Every cluster is where it says; volumes share only what they inherited."""
        area = self.area
        self.drain()
        total = self.total()
        used: dict[int, int] = {}
        for number in range(VOLUMES):
            v = area.volumes[number]
            entries = area.entries(number, 0, int(v.clusters))
            mine = entries[entries != 0]
            owned = (mine >> layout.PLACE_BITS == v.epoch).tolist()
            for index, own in zip(area.state_index(mine & layout.PLACE).tolist(), owned):
                assert used.get(index, 0) == 0 or not own, f"cluster {index} is owned and named by another volume"
                assert used.get(index, 0) != 2, f"cluster {index} is owned by another volume"
                used[index] = 2 if own else 1
            assert len(set(mine.tolist())) == len(mine), "a volume names a cluster twice"
        states = area.cluster_states[:total]
        named = set(used)
        assert set(np.nonzero(states == layout.CLUSTER_USED)[0].tolist()) >= named
        for state in (layout.CLUSTER_DIRTY, layout.CLUSTER_CLEAN, layout.CLUSTER_POOLED, layout.CLUSTER_LEAVING):
            assert not named & set(np.nonzero(states == state)[0].tolist()), state
        pools = [area.values(area.pool(number)) for number in range(layout.AREAS)]
        pooled = area.state_index(np.concatenate(pools)).tolist()
        assert len(set(pooled)) == len(pooled) and not set(pooled) & named
        assert set(pooled) == set(np.nonzero(states == layout.CLUSTER_POOLED)[0].tolist())
        for place in np.concatenate(pools).tolist():
            row = area.local_backings[place >> 32]
            at = int(row.start) + (place & layout.CLUSTER) * area.cluster_bytes
            assert not any(os.pread(int(row.fd), area.cluster_bytes, at)), "a cluster in a pool is not clean"


class Store:
    """`Control` as a dpu.volumes.interface.VolumeStore."""

    def __init__(self, control: Control) -> None:
        self.control = control

    def look(self, poller: int) -> None:
        raise NotImplementedError

    async def room(self, poller: int) -> bool:
        return self.control.room(poller)

    async def make_writable(self, volume: int, first: int, count: int) -> None:
        if not self.control.make_writable(volume, first, count):
            raise OSError(errno.ENOSPC, "full")

    async def commit(self, volume: int) -> None:
        v = self.control.area.volumes[volume]
        changes = int(v.changes)
        self.control.drain()
        v.committed = changes


class Namespaces:
    """What dpu.nvme.io wants of a subsystem."""

    def __init__(self, lab: Lab) -> None:
        self.by_nsid = lab.kept.backends

    def backend(self, nsid: int) -> Backend:
        return self.by_nsid[nsid]

    def block_size(self, nsid: int) -> int:
        return self.by_nsid[nsid].block_size


class VolumeLab(Lab):
    def __init__(self, kept: VolumeKept, engine: Any, area: Area, *, batch: int = 64, **options: Any) -> None:
        self.group = kept
        self.area = area
        self.control = Control(area, batch)
        for backend in kept.backends.values():
            if isinstance(backend, FakeVolume):
                backend.area, backend.store = area, Store(self.control)
        if kept.in_files:
            options.setdefault("ring", Ring.create())
        super().__init__(kept, engine, **options)

    def close(self) -> None:
        super().close()
        if isinstance(self.poller.ring, Ring):
            self.poller.ring.close()
        self.area.close()

    def serve(self, passes: int = 10_000) -> None:
        """Until nothing is to be done, control's part included."""
        for _ in range(passes):
            work = self.one_pass()
            for slot in self.misses():
                work += 1
                self.answer(slot)
            if int(self.poller.ring.record[0].inflight):
                self.settle_files()
                work += 1
            if not work:
                return
        raise AssertionError("there is work for ever")

    def answer(self, slot: int, lab: Lab | None = None) -> None:
        """What dpu.session does with a command that the poller has handed over; ``lab``: of another controller."""
        lab = lab or self
        plane = lab.plane
        self.control.asked.append(plane.wants(slot)[0])
        completion: Result | None
        if (volume := plane.asks_for(slot)) is not None:
            completion = asyncio.run(io.see_to(volume, lab.poller.number, *plane.wants(slot)))
        else:
            durable = bool(plane.record.write_through)
            completion = asyncio.run(io.execute(plane.sqe(slot), plane.memory, Namespaces(lab), durable))
        if completion is None:
            plane.again(slot)
        else:
            plane.finish(slot, completion)

    # --- the guest's side
    def pair(self) -> GuestSq:
        self.begin()
        self.queue = self.open_pair(1, 64)
        return self.queue

    def do_io(self, opcode: int, volume: int, lba: int, blocks: int, *, control: int = 0) -> int:
        """One command with the common buffer; its status."""
        kept = self.group
        size = blocks * UNIT
        prp1 = kept.buffer.iova
        prp2 = 0 if size <= PAGE else prp1 + PAGE if size <= 2 * PAGE else kept.prps
        self.queue.io(opcode, lba, blocks, prp1, prp2, nsid=FIRST + volume, control=control)
        return self.finish()

    def finish(self) -> int:
        self.queue.ring()
        self.serve()
        (done,) = self.queue.cq.reap()
        return done.status

    def write(self, volume: int, lba: int, blocks: int, value: int, *, control: int = 0) -> int:
        self.group.buffer.fill(np.full(blocks * UNIT // 8, value, np.int64).tobytes())
        return self.do_io(nv.WRITE, volume, lba, blocks, control=control)

    def compare(self, volume: int, lba: int, values: list[int]) -> int:
        self.group.buffer.fill(np.repeat(np.array(values, np.int64), UNIT // 8).tobytes())
        return self.do_io(nv.COMPARE, volume, lba, len(values))

    def read(self, volume: int, lba: int, blocks: int) -> list[int]:
        self.group.buffer.fill(b"\xee" * blocks * UNIT)
        assert self.do_io(nv.READ, volume, lba, blocks) == 0
        found = np.frombuffer(self.group.buffer.bytes()[: blocks * UNIT], np.int64).reshape(blocks, UNIT // 8)
        assert (found == found[:, :1]).all(), "a block has parts of several writes"
        return [int(value) for value in found[:, 0]]

    def read_all(self, volume: int) -> list[int]:
        total = self.kept.backends[FIRST + volume].num_blocks
        values: list[int] = []
        while len(values) < total:
            values += self.read(volume, len(values), min(TRANSFER // UNIT, total - len(values)))
        return values

    def zero(self, volume: int, lba: int, blocks: int) -> int:
        return self.do_io(nv.WRITE_ZEROES, volume, lba, blocks)

    def deallocate(self, volume: int, ranges: list[tuple[int, int]]) -> int:
        data = b"".join(struct.pack("<IIQ", 0, blocks, lba) for lba, blocks in ranges)
        self.group.buffer.fill(data)
        cdw = [len(ranges) - 1, 4]
        self.queue.submit(nv.DSM, nsid=FIRST + volume, prp1=self.group.buffer.iova, cdw=cdw)
        return self.finish()

    def copy(self, volume: int, ranges: list[tuple[int, int]], target: int) -> int:
        rows = [np.array([0, lba, blocks - 1, 0], np.int64).tobytes() for lba, blocks in ranges]
        self.group.buffer.fill(b"".join(rows))
        cdw = [target & 0xFFFFFFFF, target >> 32, len(ranges) - 1]
        self.queue.submit(nv.COPY, nsid=FIRST + volume, prp1=self.group.buffer.iova, cdw=cdw)
        return self.finish()
