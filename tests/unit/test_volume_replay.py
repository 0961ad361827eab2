"""Volumes and the death of a worker between any two stores: the next one goes on, and nothing is lost or half done.

As test_asic_replay: the plain engine runs under a `Cutter`, for every store number n. Each case is a command that
changes the map; after the death the next worker recovers the area and executes the command again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import nvme_driver as nv
from tests.support.volume_model import ModelVolume
from tests.unit.asic_lab import PRODUCT, Cut, Cutter
from tests.unit.volume_lab import FIRST, VolumeKept, VolumeLab

BLOCKS = 8  # of a cluster
SIZE = 1200


def submit(lab: VolumeLab, opcode: int, lba: int, blocks: int, value: int) -> None:
    """Put a command in the queue and ring; its data are in the common buffer."""
    kept = lab.group
    kept.buffer.fill(value.to_bytes(8, "little") * (64 * blocks))
    prp1 = kept.buffer.iova
    prp2 = 0 if blocks <= 8 else prp1 + nv.PAGE if blocks <= 16 else kept.prps
    lab.queue.io(opcode, lba, blocks, prp1, prp2, nsid=FIRST)
    lab.queue.ring()


def write(lab: VolumeLab, model: ModelVolume) -> None:
    """Parts of two clusters in two leaves: one is shared, one was never written."""
    submit(lab, nv.WRITE, 512 * BLOCKS - 4, 8, 7)
    model.write(512 * BLOCKS - 4, 8, 7)


def zero(lab: VolumeLab, model: ModelVolume) -> None:
    """Of a shared cluster a part, of another the whole."""
    submit(lab, nv.WRITE_ZEROES, 4, 12, 0)
    model.zero(4, 12)


def deallocate(lab: VolumeLab, model: ModelVolume) -> None:
    """A cluster of its own, a shared one, and part of its own."""
    lab.group.buffer.fill(b"".join(bytes(4) + n.to_bytes(4, "little") + a.to_bytes(8, "little") for a, n in RANGES))
    lab.queue.submit(nv.DSM, nsid=FIRST, prp1=lab.group.buffer.iova, cdw=[len(RANGES) - 1, 4])
    lab.queue.ring()
    for lba, blocks in RANGES:
        model.deallocate(lba, blocks)


RANGES = [(40 * BLOCKS, BLOCKS), (0, BLOCKS), (41 * BLOCKS + 2, 3)]


def copy(lab: VolumeLab, model: ModelVolume) -> None:
    """From shared ones to one that was never written, and to a shared one."""
    lab.group.buffer.fill(bytes(8) + (0).to_bytes(8, "little") + (15).to_bytes(8, "little") + bytes(8))
    target = 512 * BLOCKS - BLOCKS
    lab.queue.submit(nv.COPY, nsid=FIRST, prp1=lab.group.buffer.iova, cdw=[target, 0, 0])
    lab.queue.ring()
    model.copy(0, target, 16)


def prepare(kept: VolumeKept) -> tuple[VolumeLab, ModelVolume, ModelVolume]:
    """A volume with clusters of its own and clusters that it shares with a snapshot."""
    lab = kept.lab(PRODUCT)
    lab.pair()
    model = ModelVolume(BLOCKS, [0] * SIZE * BLOCKS)
    for lba, blocks, value in [(0, 16, 1), (511 * BLOCKS, 8, 2)]:
        assert lab.write(0, lba, blocks, value) == 0
        model.write(lba, blocks, value)
    lab.control.snapshot(0, 1)
    frozen = model.snapshot()
    assert lab.write(0, 40 * BLOCKS, 16, 3) == 0
    model.write(40 * BLOCKS, 16, 3)
    lab.control.room(0)
    lab.control.drain()
    return lab, model, frozen


def again(kept: VolumeKept, queue: object) -> VolumeLab:
    lab = kept.lab(PRODUCT)
    lab.queue = queue  # type: ignore[assignment]
    lab.recover()
    return lab


@pytest.mark.parametrize("offload", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", [write, zero, deallocate, copy])
def test_death_between_any_two_stores(command: Callable[..., None], offload: bool) -> None:
    at, step = 0, 1
    while True:
        with VolumeKept() as kept:
            lab, model, frozen = prepare(kept)
            lab.area.set_offload(offload)
            queue = lab.queue
            command(lab, model)
            cutter = Cutter(at)
            try:
                cutter.settle(lab)
                died = False
            except Cut:
                died = True
            lab.close()
            with again(kept, queue) as lab:
                lab.control.check()  # also what is in pools is clean
                lab.serve()
                done = queue.cq.reap()
                assert [one.status for one in done] == [0]
                assert lab.read_all(0) == model.blocks and lab.read_all(1) == frozen.blocks
                lab.control.check()
            if not died:
                break
        at += step
    assert at > 50
