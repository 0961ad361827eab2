"""Volumes whose clusters are in files: io_uring requests, copies made by control, Flush and Force Unit Access."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpu import layout
from dpu.errors import EmuError
from dpu.fastpath.uring import Ring
from tests.support import nvme_driver as nv
from tests.support.volume_model import ModelVolume
from tests.unit.test_volume_soc import CLUSTER_BLOCKS, SIZE, act, check_all, serve_by
from tests.unit.volume_lab import FIRST, VolumeKept, VolumeLab

FUA = 1 << 14  # in bits 31:16 of CDW12


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[VolumeKept]:
    try:
        Ring.create(8).close()
    except EmuError as error:
        pytest.skip(error.message)
    with VolumeKept(clusters=4800, directory=tmp_path, backings=2) as kept:
        yield kept


@pytest.fixture
def lab(kept: VolumeKept) -> Iterator[VolumeLab]:
    with kept.lab() as lab:
        lab.pair()
        yield lab
        lab.control.check()


@pytest.mark.parametrize("served_by", ["asic", "soc", "threads"])
def test_volumes_in_files_are_what_the_model_is(lab: VolumeLab, served_by: str) -> None:
    dice = random.Random(served_by)
    serve_by(lab, served_by)
    models = {0: ModelVolume(CLUSTER_BLOCKS, [0] * SIZE * CLUSTER_BLOCKS)}
    for value in range(1, 120):
        act(lab, models, dice, value)
    check_all(lab, models)
    assert served_by == "threads" or layout.WHY_SHARED in lab.control.asked


def test_a_flush_commits_what_has_changed_and_only_that(lab: VolumeLab) -> None:
    def flush() -> None:
        lab.queue.submit(nv.FLUSH, nsid=FIRST)
        assert lab.finish() == 0

    flush()
    assert lab.control.asked == []
    lab.write(0, 0, 8, 1)
    lab.control.asked.clear()
    flush()
    assert lab.control.asked == [layout.WHY_COMMIT]
    lab.write(0, 0, 8, 2)  # in place
    flush()
    assert lab.control.asked == [layout.WHY_COMMIT]


@pytest.mark.parametrize("whole_controller", [False, True])
def test_a_durable_write_commits_the_map_after_the_data(lab: VolumeLab, whole_controller: bool) -> None:
    """Force Unit Access, or the volatile write cache switched off."""
    control = FUA
    if whole_controller:
        lab.plane.set_write_through(True)
        control = 0
    lab.write(0, 0, 8, 1, control=control)
    assert lab.control.asked[-1] == layout.WHY_COMMIT
    assert lab.area.volumes[0].changes == lab.area.volumes[0].committed > 0
    lab.control.asked.clear()
    assert lab.write(0, 0, 8, 2, control=control) == 0
    assert lab.control.asked == []
    lab.group.buffer.fill(bytes(512))
    assert lab.do_io(nv.WRITE_ZEROES, 0, 2, 3, control=control) == 0
    assert lab.control.asked == [layout.WHY_COMMIT]  # a cleared part needs its file's fsync
    assert lab.read(0, 0, 8) == [2, 2, 0, 0, 0, 2, 2, 2]


def test_control_can_wait_for_requests_that_began_before(kept: VolumeKept) -> None:
    """The counters by parity: what is under way is counted where it began, until it has come back."""
    with kept.lab() as lab:
        lab.pair()
        lab.write(0, 0, 8, 1)
        p = lab.poller.record
        p.parity = 1
        kept.buffer.fill(bytes(4096))
        lab.queue.io(nv.READ, 0, 8, kept.buffer.iova, nsid=FIRST)
        lab.queue.ring()
        lab.one_pass()
        assert (int(p.begun_even), int(p.begun_odd)) in ((0, 1), (0, 0))  # the kernel may have been that fast
        lab.serve()
        assert (int(p.begun_even), int(p.begun_odd)) == (0, 0)
        assert [one.status for one in lab.queue.cq.reap()] == [0]
