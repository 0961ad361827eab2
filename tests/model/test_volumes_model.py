"""Volumes against a naive model of them, with the worker killed and the power cut at any step.

The model knows no map and no epoch: a volume is a dictionary of clusters, a cluster is one object that volumes name
together until one of them writes to it, and a block is the number of the write that made it.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import os
import random
import struct
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dpu.errors import RpcError
from dpu.layout import PLACE
from dpu.volumes.group import Group, database_of
from dpu.volumes.volume import Volume
from tests.support.volumes import (
    Death,
    Disk,
    Killed,
    MortalHost,
    PythonPoller,
    discard,
    make_file,
    mortal,
    read,
    write,
)

CLUSTER, BLOCK = 4096, 512
BLOCKS = CLUSTER // BLOCK
TOTAL = 40  # clusters of the group
SIZES = st.sampled_from([1, 3, 8, 511, 512, 513, 520, 1030])
INDICES = st.sampled_from([0, 1, 2, 6, 510, 511, 512, 513, 519, 1023, 1024, 1029])
PICKS = st.integers(0, 11)
VOLUMES_MAX = 9
DIES = st.one_of(st.just(-1), st.integers(0, 14))

Cluster = dict[int, int]  # block -> number of the write


class Naive:
    """One volume."""

    def __init__(self, size: int, *, thin: bool = True, parent: str | None = None, readonly: bool = False) -> None:
        self.size, self.thin, self.parent, self.readonly = size, thin, parent, readonly
        self.map: dict[int, Cluster] = {} if thin else {i: {} for i in range(size)}

    def shape(self) -> tuple[Any, ...]:
        return self.size, self.thin, self.parent, self.readonly

    def contents(self) -> dict[int, Cluster]:
        return {index: dict(cluster) for index, cluster in self.map.items() if cluster}


Model = dict[str, Naive]


def children(model: Model, name: str) -> list[str]:
    return [other for other, volume in model.items() if volume.parent == name]


def used(model: Model) -> int:
    return len({id(cluster) for volume in model.values() for cluster in volume.map.values()})


def shared(model: Model, name: str, index: int) -> bool:
    cluster = model[name].map[index]
    return any(one is cluster for other, v in model.items() if other != name for one in v.map.values())


# -- what each call does; each returns the model after it


def do_create(model: Model, name: str, size: int, thin: bool) -> Model:
    model[name] = Naive(size, thin=thin)
    return model


def do_write(model: Model, name: str, index: int, block: int, count: int, number: int) -> Model:
    volume = model[name]
    if index not in volume.map:
        volume.map[index] = {}
    elif shared(model, name, index):
        volume.map[index] = dict(volume.map[index])
    volume.map[index] |= dict.fromkeys(range(block, min(BLOCKS, block + count)), number)
    return model


def do_discard(model: Model, name: str, index: int) -> Model:
    model[name].map.pop(index, None)
    return model


def do_snapshot(model: Model, name: str, new: str) -> Model:
    volume = model[name]
    snapshot = model[new] = Naive(volume.size, parent=volume.parent, readonly=True)
    snapshot.map = dict(volume.map)
    volume.parent, volume.thin = new, True
    return model


def do_clone(model: Model, name: str, new: str) -> Model:
    clone = model[new] = Naive(model[name].size, parent=name)
    clone.map = dict(model[name].map)
    return model


def do_resize(model: Model, name: str, size: int) -> Model:
    volume = model[name]
    if not volume.thin:
        volume.map |= {i: {} for i in range(volume.size, size)}
    volume.size = size
    volume.map = {i: cluster for i, cluster in volume.map.items() if i < size}
    return model


def do_decouple(model: Model, name: str) -> Model:
    volume = model[name]
    assert volume.parent is not None
    parent = model[volume.parent]
    above = model[parent.parent].map if parent.parent is not None else {}
    for i, cluster in volume.map.items():
        if cluster is parent.map.get(i) and cluster is not above.get(i):
            volume.map[i] = dict(cluster)
    volume.parent = parent.parent
    return model


def do_inflate(model: Model, name: str) -> Model:
    volume = model[name]
    volume.map = {
        i: dict(volume.map[i]) if i in volume.map and shared(model, name, i) else volume.map.get(i, {})
        for i in range(volume.size)
    }
    volume.thin, volume.parent = False, None
    return model


def do_rename(model: Model, name: str, new: str) -> Model:
    for child in children(model, name):
        model[child].parent = new
    model[new] = model.pop(name)
    return model


def do_set_read_only(model: Model, name: str) -> Model:
    model[name].readonly = True
    return model


def do_delete(model: Model, name: str) -> Model:
    for child in children(model, name):
        model[child].parent = model[name].parent
    del model[name]
    return model


class Volumes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name, "disk")
        self.runner = asyncio.Runner()
        self.model: Model = {}
        self.durable: dict[str, dict[int, Cluster]] = {}  # by UUID, as of the last commit
        self.written: dict[tuple[str, int, int], set[int]] = {}  # since then
        self.death = Death()
        self.number = self.names = 0

    @initialize()
    def start(self) -> None:
        base = self.base = make_file(self.path, (TOTAL + 1) * CLUSTER)
        os.pwrite(base.fd, b"\xaa" * TOTAL * CLUSTER, CLUSTER)  # somebody's data of before
        self.open_with(
            lambda host, disk: Group.create(host, database_of(base), "lvs", [base], CLUSTER, clear=False, files=disk),
            base.fd,
        )
        self.run(self.group.label())

    def open_with(self, make: Callable[[MortalHost, Disk], Group], fd: int) -> None:
        self.death = Death()
        self.disk = Disk(self.death)
        self.disk.add(fd)
        self.group = mortal(make(MortalHost(self.death), self.disk), self.death)
        self.death.area_fd = self.group.area.fd
        self.run(self.group.recount())

    def run(self, work: Awaitable[Any]) -> Any:
        async def whole() -> Any:
            try:
                return await work
            finally:
                await asyncio.gather(*self.group._releases, return_exceptions=True)

        return self.runner.run(whole())

    def volume(self, name: str) -> Volume:
        volume = self.group.find(name)
        assert volume is not None
        return volume

    # -- doing

    def change(
        self, work: Callable[[], Awaitable[Any]], after: Callable[[Model], Model], dies: int, commits: bool = True
    ) -> None:
        """Do ``work``, which makes ``after`` of the model; or die at a step, and then it has done that or nothing."""
        old, new = copy.deepcopy(self.model), after(copy.deepcopy(self.model))
        room = used(new) <= TOTAL
        self.death.left, done = dies, self.group._done
        try:
            self.run(work())
            if self.death.dead:  # in something that nobody waits for
                raise Killed
        except Killed:
            self.adopt()
            assert self.agrees(old) or self.agrees(new)
            self.model = self.rebuilt(new if self.agrees(new) else old)
            self.remember_both()
            return
        except (RpcError, OSError) as error:
            text = error.message if isinstance(error, RpcError) else os.strerror(error.errno or 0)
            assert text == os.strerror(errno.ENOSPC) and not room
            return
        finally:
            self.death.left = -1
        assert room
        self.model = new
        self.compare(new)
        if commits and self.group._done > done:
            self.remember()

    def agrees(self, model: Model) -> bool:
        """Whether a reader sees no difference."""
        if {v.row.name for v in self.group.volumes.values()} != set(model):
            return False
        return all(
            self.shape(name) == naive.shape() and self.contents(name) == naive.contents()
            for name, naive in model.items()
        )

    def shape(self, name: str) -> tuple[Any, ...]:
        volume = self.volume(name)
        assert volume.num_blocks == volume.row.clusters * BLOCKS
        parent = volume.parent.row.name if volume.parent else None
        return volume.row.clusters, volume.row.thin, parent, volume.readonly

    def clusters(self, name: str) -> dict[int, tuple[int, Cluster]]:
        """Mapped clusters: index -> (place, what is in it)."""
        volume = self.volume(name)
        entries = volume.area.entries(volume.number, 0, volume.row.clusters)
        found = {}
        for index in np.flatnonzero(entries).tolist():
            blocks = np.frombuffer(read(volume, index * CLUSTER, CLUSTER), "<u8").reshape(BLOCKS, -1)
            assert (blocks == blocks[:, :1]).all(), "a block is of two writes"
            numbers = {block: int(row[0]) for block, row in enumerate(blocks) if row[0]}
            found[index] = (int(entries[index]) & PLACE, numbers)
        return found

    def contents(self, name: str) -> dict[int, Cluster]:
        return {index: numbers for index, (_, numbers) in self.clusters(name).items() if numbers}

    def compare(self, model: Model) -> None:
        assert self.agrees(model)
        for name, naive in model.items():
            assert sorted(self.clusters(name)) == sorted(naive.map)
            names = [child.row.name for child in self.volume(name).children]
            assert sorted(names) == sorted(children(model, name))
            parent = model[naive.parent].map if naive.parent else {}
            own = [i for i, cluster in naive.map.items() if cluster is not parent.get(i)]
            assert self.group.allocated(self.volume(name)) == len(own)

    def rebuilt(self, model: Model) -> Model:
        """The model with the clusters that there are."""
        places: dict[int, Cluster] = {}
        for name, naive in model.items():
            naive.map = {
                index: places.setdefault(place, dict(n)) for index, (place, n) in self.clusters(name).items()
            }
        return model

    def remember(self) -> None:
        """All that there is was committed."""
        self.durable = {self.volume(name).name: self.contents(name) for name in self.model}
        self.written = {}

    def remember_both(self) -> None:
        """What there is may have been committed, or not."""
        for name in self.model:
            uuid, found = self.volume(name).name, self.contents(name)
            durable = self.durable.setdefault(uuid, {})
            for index in {*durable, *found}:
                for block in range(BLOCKS):
                    self.written.setdefault((uuid, index, block), set()).add(found.get(index, {}).get(block, 0))

    def adopt(self) -> None:
        """The worker was killed; the next one goes on with what is kept."""
        base, kept = self.base, self.death.copy_fd
        self.group.release()
        self.open_with(lambda host, disk: Group.adopt(host, database_of(base), [base], kept, files=disk), base.fd)

    # -- rules

    def picked(self, pick: int, fits: Callable[[Naive], bool] = lambda naive: True) -> str | None:
        names = [name for name, naive in self.model.items() if fits(naive)]
        return names[pick % len(names)] if names else None

    def new_name(self) -> str | None:
        self.names += 1
        return f"v{self.names}" if len(self.model) < VOLUMES_MAX else None

    @rule(size=SIZES, thin=st.booleans(), dies=DIES)
    def create(self, size: int, thin: bool, dies: int) -> None:
        size = size if thin else min(size, 8)
        if name := self.new_name():
            work = lambda: self.group.create_volume(name, size * CLUSTER, thin=thin)  # noqa: E731
            self.change(work, lambda model: do_create(model, name, size, thin), dies)

    @rule(
        pick=PICKS,
        index=INDICES,
        block=st.integers(0, BLOCKS - 1),
        count=st.integers(1, BLOCKS),
        polled=st.booleans(),
        dies=DIES,
    )
    def write(self, pick: int, index: int, block: int, count: int, polled: bool, dies: int) -> None:
        name = self.picked(pick, lambda naive: not naive.readonly)
        if name is None:
            return
        self.number += 1
        number, count, index = self.number, min(count, BLOCKS - block), index % self.model[name].size
        offset, data = index * CLUSTER + block * BLOCK, struct.pack("<Q", number) * (count * BLOCK // 8)
        poller = PythonPoller(self.group, self.death.step)
        volume = self.volume(name)
        for one in range(block, block + count):
            self.written.setdefault((volume.name, index, one), set()).add(number)
        work = (lambda: poller.write(volume, offset, data)) if polled else (lambda: write(volume, offset, data))
        self.change(work, lambda model: do_write(model, name, index, block, count, number), dies, commits=False)

    @rule(pick=PICKS, index=INDICES, polled=st.booleans(), dies=DIES)
    def discard(self, pick: int, index: int, polled: bool, dies: int) -> None:
        name = self.picked(pick, lambda naive: naive.thin and not naive.readonly)
        if name is None:
            return
        index %= self.model[name].size
        poller, volume = PythonPoller(self.group, self.death.step), self.volume(name)
        for block in range(BLOCKS):
            self.written.setdefault((volume.name, index, block), set()).add(0)

        def work() -> Awaitable[None]:
            return poller.discard(volume, index) if polled else discard(volume, index)

        self.change(work, lambda model: do_discard(model, name, index), dies, commits=False)

    @rule(pick=PICKS, dies=DIES)
    def snapshot(self, pick: int, dies: int) -> None:
        name, new = self.picked(pick, lambda naive: not naive.readonly), self.new_name()
        if name and new:
            work = lambda: self.group.snapshot(self.volume(name), new)  # noqa: E731
            self.change(work, lambda model: do_snapshot(model, name, new), dies)

    @rule(pick=PICKS, dies=DIES)
    def clone(self, pick: int, dies: int) -> None:
        name, new = self.picked(pick, lambda naive: naive.readonly), self.new_name()
        if name and new:
            work = lambda: self.group.clone(self.volume(name), new)  # noqa: E731
            self.change(work, lambda model: do_clone(model, name, new), dies)

    @rule(pick=PICKS, size=SIZES, dies=DIES)
    def resize(self, pick: int, size: int, dies: int) -> None:
        name = self.picked(pick, lambda naive: not naive.readonly)
        if name:
            size = size if self.model[name].thin else min(size, 8)
            work = lambda: self.group.resize(self.volume(name), size * CLUSTER)  # noqa: E731
            self.change(work, lambda model: do_resize(model, name, size), dies)

    @rule(pick=PICKS, dies=DIES)
    def decouple(self, pick: int, dies: int) -> None:
        name = self.picked(pick, lambda naive: not naive.readonly and naive.parent is not None)
        if name:
            work = lambda: self.group.decouple(self.volume(name))  # noqa: E731
            self.change(work, lambda model: do_decouple(model, name), dies)

    @rule(pick=PICKS, dies=DIES)
    def inflate(self, pick: int, dies: int) -> None:
        name = self.picked(pick, lambda naive: not naive.readonly and naive.size < 9)
        if name:
            work = lambda: self.group.inflate(self.volume(name))  # noqa: E731
            self.change(work, lambda model: do_inflate(model, name), dies)

    @rule(pick=PICKS, dies=DIES)
    def rename(self, pick: int, dies: int) -> None:
        name, new = self.picked(pick), self.new_name()
        if name and new:
            work = lambda: self.group.rename(self.volume(name), new)  # noqa: E731
            self.change(work, lambda model: do_rename(model, name, new), dies)

    @precondition(lambda self: len(self.model) > VOLUMES_MAX // 2)
    @rule(pick=PICKS, dies=DIES)
    def set_read_only(self, pick: int, dies: int) -> None:
        name = self.picked(pick)
        if name:
            work = lambda: self.group.set_read_only(self.volume(name))  # noqa: E731
            self.change(work, lambda model: do_set_read_only(model, name), dies)

    @precondition(lambda self: len(self.model) > 2)
    @rule(pick=PICKS, dies=DIES)
    def delete(self, pick: int, dies: int) -> None:
        names = [name for name in self.model if len(children(self.model, name)) < 2]
        name = names[pick % len(names)]
        self.change(lambda: self.remove(self.volume(name)), lambda model: do_delete(model, name), dies)

    async def remove(self, volume: Volume) -> None:
        with self.group.deleting(volume):
            await self.group.delete(volume)

    @rule(dies=DIES)
    def flush(self, dies: int) -> None:
        self.change(self.group.commit, lambda model: model, dies)

    @rule(seed=st.integers(0, 9))
    def cut_power(self, seed: int) -> None:
        """Some of what was not synced is lost; everything that the last commit saw is there."""
        some = random.Random(seed)
        base, old = self.base, self.group
        old.release()
        self.disk.lose(base.fd, lambda _: some.random() < 0.5)
        self.open_with(lambda host, disk: Group.load(host, database_of(base), [base], files=disk), base.fd)
        self.run(self.group.label())
        self.adjust_to_disk()

    def adjust_to_disk(self) -> None:
        """After a power cut: calls are all there; each block is what was flushed or what was written to it later."""
        assert {v.row.name for v in self.group.volumes.values()} == set(self.model)
        for name, naive in self.model.items():
            assert self.shape(name) == naive.shape()
            durable, found = self.durable[self.volume(name).name], self.contents(name)
            for index in {*durable, *found}:
                for block in range(BLOCKS):
                    later = self.written.get((self.volume(name).name, index, block), set())
                    allowed = {durable.get(index, {}).get(block, 0), *later}
                    assert found.get(index, {}).get(block, 0) in allowed, (
                        name,
                        index,
                        block,
                        found.get(index),
                        allowed,
                    )
        self.model = self.rebuilt(self.model)
        self.remember()

    @rule()
    def count_clusters(self) -> None:
        self.run(self.group.commit())
        self.remember()
        assert self.group.free_clusters() == TOTAL - used(self.model)

    def teardown(self) -> None:
        if hasattr(self, "group"):
            self.group.release()
            self.group.bases[0].close()
        self.runner.close()
        self.directory.cleanup()


TestVolumes = Volumes.TestCase
TestVolumes.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
