"""Kept memory of a group of volumes: where things are, and what a dead worker leaves in it.

Records and entries are written out by hand from the table in dpu.layout's text.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from dpu import layout
from dpu.volumes.area import Area, Extent

SHIFT = 16
CLUSTER = 1 << SHIFT
ALLOCATE, COPY, FREE, DROP, LEAF = 1, 2, 3, 4, 5
DIRTY, CLEAN, POOLED, USED, LEAVING = range(5)


@pytest.fixture
def area() -> Iterator[Area]:
    area = Area.create(SHIFT)
    area.backings[0] = (0, 100)
    area.backings[1] = (100, 50)
    area.set_backing(0, layout.KIND_MEMORY, 7, start=4096)
    area.set_backing(1, layout.KIND_FILE, 8, start=0)
    v = area.volumes[3]
    v.state, v.epoch, v.clusters, v.root, v.root_words = layout.VOLUME_LIVE, 5, 1200, 40, 3
    yield area
    area.close()


def entry(cluster: int, backing: int = 0, birth: int = 5) -> int:
    return cluster | backing << 32 | birth << 40


def write_log(area: Area, number: int, action: int, index: int, old: int, new: int, *, moved: bool = True) -> None:
    at = area.log(number) - area.host
    (tail,) = struct.unpack("<q", os.pread(area.fd, 8, at + 64))
    record = struct.pack("<6q", tail + 1, action, 3, index, old, new)
    os.pwrite(area.fd, record, at + 128 + 64 * (tail % 16384))
    if moved:
        os.pwrite(area.fd, struct.pack("<q", tail + 1), at + 64)


def put(area: Area, index: int, value: int, leaf: int = 9) -> None:
    area.roots[40 + index // 512] = leaf
    area.leaves[leaf, index % 512] = value


def test_a_new_worker_finds_what_the_last_one_had(area: Area) -> None:
    put(area, 700, entry(1))
    again = Area(os.dup(area.fd))
    assert again.cluster_bytes == CLUSTER and again.entries(3, 700, 1).tolist() == [entry(1)]
    again.close()


def test_memory_is_taken_for_what_was_written_only(area: Area) -> None:
    put(area, 0, entry(1))
    assert os.fstat(area.fd).st_size == layout.GROUP_BYTES > 1 << 39
    assert os.fstat(area.fd).st_blocks * 512 < 1 << 20


def test_entries_across_leaves_and_holes(area: Area) -> None:
    put(area, 511, entry(1), leaf=9)
    put(area, 1024, entry(2), leaf=8)
    found = area.entries(3, 511, 514)
    assert len(found) == 514 and found[0] == entry(1) and found[513] == entry(2) and not found[1:513].any()


def test_extents_join_what_lies_together(area: Area) -> None:
    for index, value in [(1, entry(4)), (2, entry(5)), (3, entry(6, 1))]:
        put(area, index, value)
    assert area.ask(3, layout.BLOCK_READ, CLUSTER + 512, 4 * CLUSTER - 1024).extents == [
        Extent(0, 4096 + 4 * CLUSTER + 512, 2 * CLUSTER - 512),
        Extent(1, 6 * CLUSTER, CLUSTER),
        Extent(-1, 0, CLUSTER - 512),
    ]


def test_pools_are_rings(area: Area) -> None:
    ring = area.pool(2)
    for turn in range(5):
        area.fill(ring, np.arange(turn, turn + 3000))
        assert area.level(ring) == 3000 and area.take_back(ring).tolist() == list(range(turn, turn + 3000))
    assert area.level(ring) == area.level(area.leaf_pool(2)) == 0


def test_draining_brings_states_up_to_date(area: Area) -> None:
    area.cluster_states[area.state_index([1, 2, 3 | 1 << 32])] = [POOLED, POOLED, USED]
    put(area, 700, entry(1))
    write_log(area, 4, LEAF, 1, 0, 9)
    write_log(area, 4, ALLOCATE, 700, 0, entry(1))
    write_log(area, 4, COPY, 701, entry(30, birth=2), entry(2))
    write_log(area, 4, FREE, 702, entry(3, 1), 0)
    write_log(area, 4, DROP, 703, entry(31, birth=2), 0)
    records = area.drain(4)
    assert records.action.tolist() == [LEAF, ALLOCATE, COPY, FREE, DROP]
    assert area.cluster_states[[1, 2, 103, 30, 31]].tolist() == [USED, USED, LEAVING, DIRTY, DIRTY]
    assert area.leaf_states[9] == layout.LEAF_CHANGED and area.volumes[3].root_changed == 1
    assert len(area.drain(4)) == 0


def test_a_cluster_that_one_log_frees_before_another_allocates_it_stays_free(area: Area) -> None:
    area.cluster_states[1] = POOLED
    write_log(area, 0, ALLOCATE, 5, 0, entry(1))
    write_log(area, 1, FREE, 5, entry(1), 0)
    area.drain(1)
    area.drain(0)
    assert area.cluster_states[1] == LEAVING


def test_a_record_at_the_tail_counts_if_the_map_has_it(area: Area) -> None:
    area.cluster_states[[1, 2]] = POOLED
    area.fill(area.pool(0), [1, 2])
    put(area, 5, entry(1))
    write_log(area, 0, ALLOCATE, 5, 0, entry(1), moved=False)
    area.recover()
    assert area.values(area.pool(0)).tolist() == [2] and area.cluster_states[[1, 2]].tolist() == [USED, POOLED]


def test_a_record_at_the_tail_does_not_count_if_it_came_to_nothing(area: Area) -> None:
    area.cluster_states[[1, 2]] = POOLED
    area.fill(area.pool(0), [1, 2])
    put(area, 5, entry(77))
    write_log(area, 0, ALLOCATE, 5, 0, entry(1), moved=False)
    area.recover()
    assert area.values(area.pool(0)).tolist() == [1, 2] and area.cluster_states[1] == POOLED


def test_a_cluster_that_was_being_copied_to_is_not_clean(area: Area) -> None:
    area.cluster_states[[1, 2]] = POOLED
    area.fill(area.pool(0), [1, 2])
    put(area, 5, entry(77, birth=2))
    write_log(area, 0, COPY, 5, entry(77, birth=2), entry(1), moved=False)
    area.recover()
    assert area.values(area.pool(0)).tolist() == [2] and area.cluster_states[[1, 2]].tolist() == [DIRTY, POOLED]


def test_a_cluster_freed_by_another_before_its_allocation_was_logged_leaves_the_pool(area: Area) -> None:
    """Poller 0 had published it; poller 1 found it, wrote, and freed it; then the worker died."""
    area.cluster_states[[1, 2]] = POOLED
    area.fill(area.pool(0), [1, 2])
    put(area, 5, 0)
    write_log(area, 0, ALLOCATE, 5, 0, entry(1), moved=False)
    write_log(area, 1, FREE, 5, entry(1), 0)
    area.recover()
    assert area.values(area.pool(0)).tolist() == [2] and area.cluster_states[[1, 2]].tolist() == [LEAVING, POOLED]


def test_an_old_record_at_the_tail_means_nothing(area: Area) -> None:
    put(area, 5, entry(1))
    at = area.log(0) - area.host
    os.pwrite(area.fd, struct.pack("<6q", 1, FREE, 3, 6, entry(2), 0), at + 128)  # of a round ago
    os.pwrite(area.fd, struct.pack("<q", 16384), at)
    os.pwrite(area.fd, struct.pack("<q", 16384), at + 64)
    area.recover()
    assert area.cluster_states[2] == DIRTY and area.level(area.log(0)) == 0


def test_what_was_on_its_way_into_a_pool_is_free(area: Area) -> None:
    area.cluster_states[[1, 102]] = POOLED
    area.leaf_states[[9, 20000]] = layout.LEAF_POOLED
    area.fill(area.leaf_pool(64), [9])
    area.recover()
    assert area.cluster_states[[1, 102]].tolist() == [DIRTY, DIRTY]
    assert area.leaf_states[[9, 20000]].tolist() == [layout.LEAF_POOLED, layout.LEAF_FREE]


def test_a_leaf_that_is_in_a_root_leaves_the_pool(area: Area) -> None:
    area.leaf_states[[9, 10]] = layout.LEAF_POOLED
    area.fill(area.leaf_pool(0), [9, 10])
    area.roots[41] = 9
    write_log(area, 0, LEAF, 1, 0, 9, moved=False)
    area.recover()
    assert area.values(area.leaf_pool(0)).tolist() == [10] and area.leaf_states[9] == layout.LEAF_CHANGED
