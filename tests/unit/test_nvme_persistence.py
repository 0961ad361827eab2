"""dump, load and reopen: a worker may die before, after or instead of saving a command's effect."""

from __future__ import annotations

import json
import struct

import pytest

from tests.support.nvme_host import CC_ENABLE, Host, run


def sqe(opcode: int, prp1: int = 0x10000, nsid: int = 0, **cdw: int) -> bytes:
    words = [cdw.get(f"cdw{index}", 0) for index in range(10, 16)]
    return struct.pack("<BBHIQQQQ6I", opcode, 0, 0x77, nsid, 0, 0, prp1, 0x11000, *words)


def busy_host() -> Host:
    """Something of everything that a dump must hold."""
    host = Host()
    host.create_cq(1)
    host.create_sq(1, cqid=1)
    host.create_sq(2, cqid=1, iova=0x8000)
    host.code(0x7C, prp1=0x20000, prp2=0x21000)
    host.code(0x09, cdw={10: 0x0B, 11: 1 << 8 | 1 << 1})
    host.code(0x09, cdw={10: 0x04, 11: 350})
    host.code(0x09, cdw={10: 0x0E})
    host.write32(0x0C, 0b10)
    for cid in (1, 2, 0x77):  # two will be used up
        assert host.submit(0x0C, cid=cid) is None
    host.controller.namespace_changed(3)
    host.controller.doorbell_error(5, no_queue=True)
    host.controller.doorbell_error(5, no_queue=False)
    host.code(0xFE)
    host.plane.records["sq", 1][1] = 9  # entries have passed
    host.plane.records["cq", 1][1] = 8
    host.plane.completed.clear()
    return host


def test_dump_is_json_and_load_restores_it() -> None:
    host = busy_host()
    before = host.controller.dump()
    assert json.loads(json.dumps(before)) == json.loads(json.dumps(before, sort_keys=True))
    plane = host.plane
    host.next_worker()
    assert json.dumps(host.controller.dump()) == json.dumps(before)
    assert (host.plane.cqs, host.plane.sqs) == (plane.cqs, plane.sqs)
    assert (host.plane.dbbuf, host.plane.mask) == ((0x20000, 0x21000), 0b10)
    assert host.plane.records["sq", 1][1] == 9
    assert host.plane.records["cq", 1][1] == 8


def test_reopen_of_a_queue_that_the_plane_refuses_is_fatal_not_an_exception() -> None:
    host = Host()
    state = host.controller.dump()
    state["sqs"][0]["iova"] = 0x40000000
    host.next_worker(state)
    assert host.read32(0x1C) & 2
    assert "no DMA mapping" in host.controller.fatal_reason


COMMANDS = {
    "create CQ": sqe(0x05, prp1=0x4000, cdw10=3 | 15 << 16, cdw11=1 << 16 | 3),
    "create SQ": sqe(0x01, prp1=0x4000, cdw10=3 | 15 << 16, cdw11=1 << 16 | 1),
    "create SQ, bad": sqe(0x01, prp1=0x4000, cdw10=2 | 15 << 16, cdw11=1 << 16 | 1),
    "delete SQ": sqe(0x00, cdw10=1),
    "delete CQ, bad": sqe(0x04, cdw10=1),
    "set feature": sqe(0x09, cdw10=0x0A, cdw11=1),
    "set feature, event": sqe(0x09, cdw10=0x04, cdw11=300),
    "get log": sqe(0x02, nsid=0xFFFFFFFF, cdw10=0x04 | 1023 << 16),
    "error log": sqe(0x02, nsid=0xFFFFFFFF, cdw10=0x01 | 1023 << 16),
    "AER": sqe(0x0C),
    "abort AER": sqe(0x08, cdw10=0x77 << 16),
    "dbbuf": sqe(0x7C, prp1=0x22000),
    "nonsense": sqe(0xFE),
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_that_was_not_saved_gives_the_same_again(name: str) -> None:
    host = busy_host()
    saved = json.loads(json.dumps(host.controller.dump()))
    records = json.dumps(sorted(host.plane.records.items()))

    first = run(host.controller.execute(500, COMMANDS[name]))
    effects = json.dumps(host.controller.dump()), list(host.plane.completed)
    queues = dict(host.plane.cqs), dict(host.plane.sqs)
    data = host.memory.read(0x10000, 4096)

    host.next_worker(saved)
    assert run(host.controller.execute(500, COMMANDS[name])) == first
    assert (json.dumps(host.controller.dump()), host.plane.completed) == effects
    assert (host.plane.cqs, host.plane.sqs) == queues
    assert host.memory.read(0x10000, 4096) == data
    for key, record in json.loads(records):
        assert host.plane.records[tuple(key)] == record, "what had passed is not passed again"


def test_a_parked_request_that_was_saved_and_is_executed_again_is_parked_once() -> None:
    host = Host()
    for _ in range(2):
        assert run(host.controller.execute(9, sqe(0x0C))) is None
        host.next_worker()
    assert host.controller.parked_tokens == [9]


def test_a_reset_that_was_not_saved_happens_again_without_running_queues_twice() -> None:
    host = busy_host()
    saved = host.controller.dump()
    host.write32(0x14, 0)
    host.next_worker(saved)
    assert host.plane.records["sq", 1][1] == 9, "reopened where it was"
    host.write32(0x14, 0)
    host.write32(0x14, CC_ENABLE)
    host.create_cq(1)
    host.create_sq(1, cqid=1)
    assert host.plane.records["sq", 1][1] == 0


def test_a_creation_that_was_not_saved_shares_no_epoch_with_one_after_a_reset() -> None:
    host = Host()
    host.create_cq(1)
    saved = host.controller.dump()
    host.create_sq(1, cqid=1)
    host.plane.records["sq", 1][1] = 4  # a hostile guest rings before it has the completion
    host.next_worker(saved)
    host.write32(0x14, 0)
    host.write32(0x14, CC_ENABLE)
    host.create_cq(1)
    host.create_sq(1, cqid=1)
    assert host.plane.records["sq", 1][1] == 0


@pytest.mark.parametrize("cc", [0, CC_ENABLE, CC_ENABLE | 1 << 14, 1 << 14])
@pytest.mark.parametrize("enabled", [False, True])
def test_register_writes_may_be_delivered_twice(cc: int, enabled: bool) -> None:
    once, twice = Host(enable=enabled), Host(enable=enabled)
    once.write32(0x14, cc)
    twice.write32(0x14, cc)
    twice.next_worker()
    twice.write32(0x14, cc)
    for offset in (0x0C, 0x14, 0x1C, 0x24):
        assert once.read32(offset) == twice.read32(offset)
    assert once.plane.sqs == twice.plane.sqs
