"""Queue management, common checks, Abort and Doorbell Buffer Config (NVMe Base 2.0, 5.1-5.8)."""

from __future__ import annotations

import asyncio
import struct

import pytest

from dpu.nvme.interfaces import Completion
from tests.support.nvme_host import BUFFER, CC_ENABLE, PAGE, UNMAPPED, Host, Plane

INVALID_OPCODE, INVALID_FIELD, DATA_TRANSFER, PRP_OFFSET = 0x001, 0x002, 0x004, 0x013
CQ_INVALID, QUEUE_ID, QUEUE_SIZE, VECTOR, DELETION = 0x100, 0x101, 0x102, 0x108, 0x10C


def test_life_of_a_queue_pair() -> None:
    host = Host()
    assert host.create_cq(3, entries=1024, iova=0x4000, vector=7) == 0
    assert host.plane.cqs[3] == (1024, 0x4000, 7, True)
    assert host.create_sq(2, cqid=3, entries=2, iova=0x9000) == 0
    assert host.plane.sqs[2] == (2, 0x9000, 3)
    assert host.delete_cq(3) == DELETION
    assert host.delete_sq(2) == 0
    assert host.delete_sq(2) == QUEUE_ID
    assert host.delete_cq(3) == 0
    assert host.delete_cq(3) == QUEUE_ID
    assert set(host.plane.cqs) == set(host.plane.sqs) == {0}


def test_all_queue_pairs_exist() -> None:
    host = Host()
    for qid in range(1, 65):
        assert host.create_cq(qid, vector=qid) == 0
        assert host.create_sq(qid, cqid=qid) == 0
    assert host.create_cq(65) == QUEUE_ID
    assert host.create_sq(65, cqid=1) == QUEUE_ID


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"qid": 0}, QUEUE_ID),
        ({"qid": 65}, QUEUE_ID),
        ({"qid": 0xFFFF}, QUEUE_ID),
        ({"qid": 1}, QUEUE_ID),  # in use
        ({"entries": 1}, QUEUE_SIZE),
        ({"entries": 1025}, QUEUE_SIZE),
        ({"entries": 0x10000}, QUEUE_SIZE),
        ({"cdw11": 0b10}, INVALID_FIELD),  # PC 0 although CAP.CQR is 1
        ({"vector": 65}, VECTOR),
        ({"vector": 0xFFFF}, VECTOR),
        ({"iova": 0x4010}, PRP_OFFSET),
        ({"iova": UNMAPPED}, DATA_TRANSFER),
        ({"iova": 0x100000 - PAGE, "entries": 1024}, DATA_TRANSFER),
    ],
)
def test_create_cq_errors(fields: dict[str, int], status: int) -> None:
    host = Host()
    assert host.create_cq(1) == 0
    assert host.create_cq(**{"qid": 2} | fields) == status
    assert set(host.plane.cqs) == {0, 1}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"qid": 0}, QUEUE_ID),
        ({"qid": 65}, QUEUE_ID),
        ({"qid": 1}, QUEUE_ID),  # in use
        ({"cqid": 0}, QUEUE_ID),  # the admin CQ
        ({"cqid": 65}, QUEUE_ID),
        ({"cqid": 2}, CQ_INVALID),
        ({"entries": 1}, QUEUE_SIZE),
        ({"entries": 1025}, QUEUE_SIZE),
        ({"cdw11": 0}, INVALID_FIELD),
        ({"iova": 0x6040}, PRP_OFFSET),
        ({"iova": UNMAPPED}, DATA_TRANSFER),
    ],
)
def test_create_sq_errors(fields: dict[str, int], status: int) -> None:
    host = Host()
    assert host.create_cq(1) == 0
    assert host.create_sq(1, cqid=1) == 0
    assert host.create_sq(**{"qid": 2, "cqid": 1} | fields) == status
    assert set(host.plane.sqs) == {0, 1}


@pytest.mark.parametrize("qid", [0, 1, 64, 65, 0xFFFF])
def test_delete_of_what_is_not_there(qid: int) -> None:
    host = Host()
    assert host.delete_sq(qid) == QUEUE_ID
    assert host.delete_cq(qid) == QUEUE_ID
    assert 0 in host.plane.sqs


def test_entry_sizes_must_be_set_before_io_queues() -> None:
    host = Host(enable=False)
    host.enable(cc=1)
    assert host.create_cq(1) == QUEUE_SIZE
    host.write32(0x14, 1 | 4 << 20)  # IOCQES alone
    assert host.create_cq(1) == 0
    assert host.create_sq(1, cqid=1) == QUEUE_SIZE
    host.write32(0x14, CC_ENABLE)
    assert host.create_sq(1, cqid=1) == 0


def test_interrupts_off_and_shared_vectors() -> None:
    host = Host(vectors=1)
    assert host.create_cq(1, cdw11=0b01, vector=0) == 0
    assert host.plane.cqs[1][2:] == (0, False)
    assert host.create_cq(2, vector=0) == 0
    assert host.create_cq(3, vector=1) == VECTOR


def test_a_reset_deletes_every_queue() -> None:
    host = Host()
    host.create_cq(1)
    host.create_sq(1, cqid=1)
    host.write32(0x14, 0)
    host.write32(0x14, CC_ENABLE)
    assert set(host.plane.cqs) == set(host.plane.sqs) == {0}
    assert host.create_sq(1, cqid=1) == CQ_INVALID


def test_epochs_never_repeat() -> None:
    host = Host()
    for _ in range(3):
        host.create_cq(1)
        host.create_sq(1, cqid=1)
        host.delete_sq(1)
        host.create_sq(1, cqid=1)
        host.write32(0x14, 0)
        host.write32(0x14, CC_ENABLE)
    assert len(host.plane.epochs) == len(set(host.plane.epochs))
    assert host.plane.epochs == sorted(host.plane.epochs)


def test_delete_sq_waits_for_the_plane_and_survives_a_reset_meanwhile() -> None:
    class SlowPlane(Plane):
        def __init__(self) -> None:
            super().__init__()
            self.drained = asyncio.Event()

        async def close_sq(self, qid: int) -> None:
            await self.drained.wait()
            self.sqs.pop(qid, None)

        async def close_all(self) -> None:
            self.drained.set()
            await super().close_all()

    def sqe(opcode: int, qid: int) -> bytes:
        return struct.pack("<BBHIQQQQ6I", opcode, 0, 9, 0, 0, 0, 0, 0, qid, 0, 0, 0, 0, 0)

    async def scenario(*, reset: bool) -> None:
        host = Host(enable=False)
        host.plane = plane = SlowPlane()
        host.controller = host.new_controller()
        host.enable()
        host.create_cq(1)
        host.create_sq(1, cqid=1)
        deletion = asyncio.create_task(host.controller.execute(77, sqe(0x00, 1)))
        await asyncio.sleep(0)
        assert not deletion.done()
        assert 1 in host.controller.sqs, "a dump now must still have the queue"
        if reset:
            await host.controller.register_write(0x14, bytes(4))
            await host.controller.register_write(0x14, struct.pack("<I", CC_ENABLE))
            host.create_cq(1)
            host.create_sq(1, cqid=1)
            await deletion
            assert set(host.controller.sqs) == {0, 1}, "the new queue is not the one that was deleted"
        else:
            plane.drained.set()
            assert await deletion == Completion(0)
            assert set(host.controller.sqs) == {0}

    asyncio.run(scenario(reset=False))
    asyncio.run(scenario(reset=True))


@pytest.mark.parametrize("flags", [0x01, 0x02, 0x03, 0x40, 0x80, 0xC0])
@pytest.mark.parametrize("opcode", [0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x7C])
def test_fused_and_sgl_are_invalid_fields(opcode: int, flags: int) -> None:
    assert Host().code(opcode, flags=flags) == INVALID_FIELD


@pytest.mark.parametrize("opcode", [0x00, 0x01, 0x04, 0x05, 0x08, 0x0C, 0x7C])
@pytest.mark.parametrize("nsid", [1, 2, 0xFFFFFFFF])
def test_nsid_where_a_command_has_none(opcode: int, nsid: int) -> None:
    assert Host().code(opcode, nsid=nsid) == INVALID_FIELD


SUPPORTED = {
    0x00,
    0x01,
    0x02,
    0x04,
    0x05,
    0x06,
    0x08,
    0x09,
    0x0A,
    0x0C,
    0x0D,
    0x15,
    0x7C,
    0x80,
    0x86,
}  # no Keep Alive


@pytest.mark.parametrize("opcode", sorted(set(range(256)) - SUPPORTED))
def test_every_other_opcode_is_invalid(opcode: int) -> None:
    result = Host().submit(opcode)
    assert result is not None
    assert (result.code, result.dnr, result.more) == (INVALID_OPCODE, True, True)


def test_abort() -> None:
    host = Host()
    assert host.submit(0x0C, cid=0x1234) is None
    aer_token = host.tokens
    # No such command: "not aborted".
    for sqid, cid in ((0, 0x1235), (0, 0)):
        result = host.submit(0x08, cdw={10: sqid | cid << 16})
        assert result is not None
        assert (result.code, result.dw0) == (0, 1)
    assert host.plane.completed == []
    result = host.submit(0x08, cdw={10: 0x1234 << 16})
    assert result is not None
    assert (result.code, result.dw0) == (0, 0)
    [(token, completion)] = host.plane.completed
    assert (token, completion.status) == (aer_token, 0x007)
    # I/O is never aborted; a queue that is not there is a mistake.
    assert host.code(0x08, cdw={10: 1}) == INVALID_FIELD
    host.create_cq(1)
    host.create_sq(1, cqid=1)
    result = host.submit(0x08, cdw={10: 1})
    assert result is not None
    assert (result.code, result.dw0) == (0, 1)


def test_doorbell_buffer_config() -> None:
    host = Host()
    assert host.code(0x7C, prp1=0x20000, prp2=0x21000) == 0
    assert host.plane.dbbuf == (0x20000, 0x21000)
    assert host.code(0x7C, prp1=0x20004, prp2=0x21000) == INVALID_FIELD
    assert host.code(0x7C, prp1=0x20000, prp2=0x21800) == INVALID_FIELD
    assert host.code(0x7C, prp1=UNMAPPED, prp2=0x21000) == INVALID_FIELD
    assert host.code(0x7C, prp1=0x20000, prp2=UNMAPPED) == INVALID_FIELD
    assert host.plane.dbbuf == (0x20000, 0x21000)
    host.write32(0x14, 0)
    assert host.plane.dbbuf is None
    host.write32(0x14, CC_ENABLE)
    host.next_worker()
    assert host.plane.dbbuf is None, "a reset ends it for later workers too"


def test_errors_are_logged_and_say_so() -> None:
    host = Host()
    result = host.submit(0x06, nsid=9, cid=0xABCD)
    assert result is not None
    assert (result.code, result.dnr, result.more) == (0x00B, True, True)
    entry = host.log(0x01, 64)
    count, sqid, cid, status, location, lba, nsid = struct.unpack_from("<QHHHHQI", entry)
    assert (count, sqid, cid, lba, nsid) == (1, 0, 0xABCD, 0, 9)
    assert status >> 1 == 0x00B | 1 << 14 | 1 << 13
    assert location == 4  # byte 4 of the entry: NSID


def test_a_success_is_plain() -> None:
    host = Host()
    result = host.submit(0x06, cdw={10: 1}, prp1=BUFFER)
    assert result is not None
    assert (result.code, result.dnr, result.more, result.dw0) == (0, False, False, 0)
