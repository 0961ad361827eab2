"""Volumes through the compiled stage, against a naive model."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpu import layout
from dpu.fastpath.jit import JIT
from tests.support import nvme_driver as nv
from tests.support.volume_model import ModelVolume
from tests.unit.asic_lab import ENGINES, GuestSq, Kept, Lab
from tests.unit.volume_lab import CAPACITY_EXCEEDED, FIRST, VolumeKept, VolumeLab

CLUSTER_BLOCKS = 8
SIZE = 1200


@pytest.fixture(params=ENGINES)
def lab(request: pytest.FixtureRequest) -> Iterator[VolumeLab]:
    with VolumeKept() as kept, kept.lab(ENGINES[request.param]) as lab:
        lab.pair()
        yield lab
        lab.control.check()


def test_what_was_never_written_reads_as_zeroes(lab: VolumeLab) -> None:
    assert lab.read(0, 3, 500) == [0] * 500
    assert int(lab.area.volumes[0].changes) == 0


def test_first_write_takes_a_clean_cluster(lab: VolumeLab) -> None:
    assert lab.write(0, 3, 2, 77) == 0
    assert lab.read(0, 0, 16) == [0] * 3 + [77] * 2 + [0] * 11
    assert lab.control.asked == [layout.WHY_ROOM]  # pools were empty
    lab.control.drain()
    used = (lab.area.cluster_states[:600] == layout.CLUSTER_USED).sum()
    assert used == 1 and lab.area.volumes[0].root_changed == 1


def test_a_snapshot_keeps_what_it_had(lab: VolumeLab) -> None:
    lab.write(0, 0, 512, 1)
    lab.control.snapshot(0, 1)
    lab.write(0, 100, 30, 2)
    lab.write(1, 200, 1, 3)
    assert lab.read(1, 0, 512) == [1] * 200 + [3] + [1] * 311
    assert lab.read(0, 0, 512) == [1] * 100 + [2] * 30 + [1] * 382


def check_all(lab: VolumeLab, models: dict[int, ModelVolume]) -> None:
    for volume, model in models.items():
        assert lab.read_all(volume) == model.blocks


def some_range(dice: random.Random, most: int = 512) -> tuple[int, int]:
    """A range of blocks, often of whole clusters or next to a leaf's end."""
    total = SIZE * CLUSTER_BLOCKS
    count = min(most, dice.choice([1, 8, 16, dice.randint(1, 40), dice.randint(1, 512)]))
    at = dice.choice([dice.randrange(total), 512 * CLUSTER_BLOCKS - dice.randint(0, 20), dice.randrange(64)])
    if dice.random() < 0.4:
        at -= at % CLUSTER_BLOCKS
    return min(at, total - count), count


def act(lab: VolumeLab, models: dict[int, ModelVolume], dice: random.Random, value: int) -> None:
    """One random command or management call, on product and model."""
    volume = dice.choice(list(models))
    model = models[volume]
    lba, count = some_range(dice)
    action = dice.choices(
        ["write", "read", "compare", "zero", "deallocate", "copy", "snapshot"], [8, 4, 1, 2, 3, 2, 1]
    )[0]
    if action == "write":
        assert lab.write(volume, lba, count, value) == 0
        model.write(lba, count, value)
    elif action == "read":
        assert lab.read(volume, lba, count) == model.blocks[lba : lba + count]
    elif action == "compare":
        wanted = model.blocks[lba : lba + count]
        assert lab.compare(volume, lba, wanted) == 0
        wanted[dice.randrange(count)] += 1
        assert lab.compare(volume, lba, wanted) == 0x285
    elif action == "zero":
        assert lab.zero(volume, lba, count) == 0
        model.zero(lba, count)
    elif action == "deallocate":
        ranges = [some_range(dice) for _ in range(dice.randint(1, 4))] + [(0, 0)]
        assert lab.deallocate(volume, ranges) == 0
        for lba, count in ranges:
            model.deallocate(lba, count)
    elif action == "copy":
        lba, count = some_range(dice, 128)
        target, _ = some_range(dice, 256)
        target = min(target, SIZE * CLUSTER_BLOCKS - count - 1)
        if abs(lba - target) >= count:
            assert lab.copy(volume, [(lba, count), (0, 1)], target) == 0
            model.copy(lba, target, count)
            model.copy(0, target + count, 1)
    elif len(models) < 4:
        new = len(models)
        lab.control.snapshot(volume, new)
        models[new] = model.snapshot()


def thick(lab: VolumeLab, volume: int, model: ModelVolume) -> None:
    """All of a small part of it is allocated, as dpu.volumes does it at creation."""
    lab.area.volumes[volume].thick = 1
    model.thick = True


def serve_by(lab: VolumeLab, stage: str) -> None:
    """asic: what is mapped, the rest by the soc; soc: everything; threads: everything by control's (dpu.nvme.io)."""
    lab.area.set_offload(stage == "asic")
    if stage == "threads":
        for row in lab.plane.namespaces[3:7]:
            row.threads = layout.WHY_NO_URING


@pytest.mark.parametrize("served_by", ["asic", "soc", "threads"])
@settings(max_examples=4, deadline=None)
@given(dice=st.randoms(use_true_random=False), batch=st.sampled_from([1, 64]), is_thick=st.booleans())
def test_volumes_are_what_the_model_is(served_by: str, dice: random.Random, batch: int, is_thick: bool) -> None:
    with VolumeKept(clusters=4800) as kept, kept.lab(batch=batch) as lab:
        lab.pair()
        serve_by(lab, served_by)
        models = {0: ModelVolume(CLUSTER_BLOCKS, [0] * SIZE * CLUSTER_BLOCKS)}
        if is_thick:
            thick(lab, 0, models[0])
        for value in range(1, 60):
            act(lab, models, dice, value)
        check_all(lab, models)
        lab.control.check()


def test_a_full_group_says_so_and_heals(lab: VolumeLab) -> None:
    blocks = 600 * CLUSTER_BLOCKS
    for lba in range(0, blocks, 480):
        assert lab.write(0, lba, 480, 5) == 0
    assert lab.write(0, blocks, 1, 6) == CAPACITY_EXCEEDED
    assert lab.write(0, 100, 480, 7) == 0  # in place
    assert lab.deallocate(0, [(0, 8)]) == 0
    assert lab.write(0, blocks, 8, 8) == 0
    assert lab.read(0, 0, 9) == [0] * 8 + [5]


def test_a_full_log_waits_for_control(lab: VolumeLab) -> None:
    log = lab.area.log(0)
    size = layout.LOG_ENTRIES - 2
    view = lab.area._words(log - lab.area.host, "<i8", 9)
    view[0], view[8] = 0, size  # as if control had not looked for long
    lab.area._apply = lambda records: None  # type: ignore[method-assign]
    assert lab.write(0, 0, 8, 1) == 0
    assert lab.area.level(log) <= 4 and layout.WHY_ROOM in lab.control.asked
    del lab.area._apply
    lab.area.drain(0)


def test_a_volume_of_a_pebibyte(lab: VolumeLab) -> None:
    v, row = lab.area.volumes[3], lab.plane.namespaces[6]
    blocks = int(row.blocks)
    v.clusters, v.root, row.blocks = 1 << 38, 5000, 1 << 41
    lba = (1 << 41) - 4
    try:
        assert lab.write(3, lba, 4, 9) == 0 and lab.read(3, lba - 12, 16) == [0] * 12 + [9] * 4
        assert lab.deallocate(3, [(0, 1 << 26), (lba - 4, 8)]) == 0
        assert lab.read(3, lba, 4) == [0] * 4
    finally:
        v.clusters, row.blocks = SIZE, blocks


def test_blocks_beyond_the_volume_are_out_of_range(lab: VolumeLab) -> None:
    """Also when the namespace's own size is not up to date."""
    lab.plane.namespaces[3].blocks *= 2
    assert lab.write(0, SIZE * CLUSTER_BLOCKS, 8, 1) == 0x80
    assert lab.zero(0, SIZE * CLUSTER_BLOCKS, 8) == lab.deallocate(0, [(SIZE * CLUSTER_BLOCKS, 8)]) == 0x80


@pytest.mark.skipif(not JIT, reason="plain Python's threads take turns")
@pytest.mark.parametrize("offload", [True, False])
def test_two_pollers_on_one_volume(offload: bool) -> None:
    """Writes, Deallocates and copies race for the same clusters, both threads at full speed."""
    dice = random.Random(1)
    with VolumeKept(clusters=300, size=64) as kept, Kept(files=dict(kept.volumes())) as other, kept.lab() as lab:
        lab.pair()
        with Lab(other) as second:
            second.poller.record.number = second.poller.number = 1
            second.begin()
            queues = [(lab, lab.queue), (second, second.open_pair(1, 64))]
            lab.area.set_offload(offload)
            pages = [[one.kept.ram.buffer(4096) for _ in range(32)] for one, _ in queues]
            for one, _ in queues:
                one.poller.start()
            try:
                written: dict[int, set[int]] = {block: {0} for block in range(64 * CLUSTER_BLOCKS)}
                for turn in range(60):
                    race(lab, queues, pages, dice, turn, written)
                    if turn == 20:
                        lab.control.snapshot(0, 1)
                    lab.control.check()
            finally:
                for one, _ in queues:
                    one.poller.stop()
            found = lab.read_all(0)
            assert all(value in written[block] for block, value in enumerate(found))
            assert any(found)


def race(
    lab: VolumeLab,
    queues: list[tuple[Lab, GuestSq]],
    pages: list[list[nv.Buffer]],
    dice: random.Random,
    turn: int,
    written: dict[int, set[int]],
) -> None:
    """32 commands on each queue, to their end; control answers both pollers."""
    for number, (one, queue) in enumerate(queues):
        for i, page in enumerate(pages[number]):
            lba, blocks = dice.randrange(8 * CLUSTER_BLOCKS), dice.choice([1, 8])
            if dice.random() < 0.3:
                lba -= lba % CLUSTER_BLOCKS
                page.fill(struct.pack("<IIQ", 0, 8, lba))
                queue.submit(nv.DSM, nsid=FIRST, prp1=page.iova, cdw=[0, 4])
            else:
                value = 1 + turn * 64 + number * 32 + i
                page.fill(struct.pack("<Q", value) * 512)
                queue.io(nv.WRITE, lba, blocks, page.iova, nsid=FIRST)
                for block in range(lba, lba + blocks):
                    written[block].add(value)
        queue.ring()
        one.poller.wake()
    done = [0, 0]
    deadline = time.monotonic() + 60
    while done != [32, 32]:
        assert time.monotonic() < deadline, done
        for number, (one, queue) in enumerate(queues):
            for slot in one.misses():
                lab.answer(slot, one)
            completions = queue.cq.reap()
            assert all(completion.status == 0 for completion in completions)
            done[number] += len(completions)
