"""The controller against a naive model of registers and queues, over resets and dying workers; and a fuzzer.

The model is written from the specification alone: a few sets and numbers, no code of ``dpu.nvme``.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.nvme_host import ACQ, ASQ, BUFFER, CC_ENABLE, RAM_BYTES, UNMAPPED, Host, run

QUEUE_IDS = st.sampled_from([0, 1, 2, 3, 64, 65])
ADDRESSES = st.sampled_from([0x4000, 0x6000, 0x8000, 0x4008, UNMAPPED])
ENTRIES = st.sampled_from([1, 2, 16, 1024, 1025])


class ControllerModel(RuleBasedStateMachine):
    """One controller and its model, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(enable=False)
        self.saved: dict[str, Any] = self.host.controller.dump()
        self.cc = self.aqa = self.asq = self.acq = self.mask = 0
        self.cqs: set[int] = set()
        self.sqs: dict[int, int] = {}  # SQ -> CQ
        self.parked = 0
        self.failed = self.ready = self.shut_down = self.created = False

    # Commands, some of which are executed twice because a worker dies before saving them

    def execute(self, opcode: int, dies: bool, **fields: Any) -> int | None:
        host = self.host
        saved, tokens = json.loads(json.dumps(host.controller.dump())), host.tokens
        # Every queue that is open has been used by now: a re-creation must start afresh, a re-open must not.
        for (kind, qid), record in host.plane.records.items():
            if qid in (host.plane.cqs if kind == "cq" else host.plane.sqs):
                record[1] += 1
        marks = {key: list(record) for key, record in host.plane.records.items()}
        result = host.submit(opcode, **fields)
        if dies:
            host.next_worker(saved)
            for key, record in marks.items():
                if key in {("cq", qid) for qid in self.cqs} | {("sq", qid) for qid in self.sqs}:
                    assert host.plane.records[key] == record
            host.tokens = tokens
            assert host.submit(opcode, **fields) == result
        return None if result is None else result.code

    @rule(qid=QUEUE_IDS, entries=ENTRIES, iova=ADDRESSES, vector=st.sampled_from([0, 64, 65]), dies=st.booleans())
    def create_cq(self, qid: int, entries: int, iova: int, vector: int, dies: bool) -> None:
        cdw = {10: qid | (entries - 1) << 16, 11: vector << 16 | 3}
        code = self.execute(0x05, dies, prp1=iova, cdw=cdw)
        good = self.usable() and 1 <= qid <= 64 and qid not in self.cqs and 2 <= entries <= 1024
        good = good and iova % 4096 == 0 and iova != UNMAPPED and vector < 65 and self.sizes()[1] == 4
        assert (code == 0) == good
        if good:
            self.cqs.add(qid)
            self.created = True
            assert self.host.plane.records["cq", qid][1] == 0

    @rule(qid=QUEUE_IDS, cqid=QUEUE_IDS, entries=ENTRIES, iova=ADDRESSES, dies=st.booleans())
    def create_sq(self, qid: int, cqid: int, entries: int, iova: int, dies: bool) -> None:
        code = self.execute(0x01, dies, prp1=iova, cdw={10: qid | (entries - 1) << 16, 11: cqid << 16 | 1})
        good = self.usable() and 1 <= qid <= 64 and qid not in self.sqs and 2 <= entries <= 1024
        good = good and cqid != 0 and cqid in self.cqs and self.sizes()[0] == 6
        good = good and iova % 4096 == 0 and iova != UNMAPPED
        assert (code == 0) == good
        if good:
            self.sqs[qid] = cqid
            self.created = True
            assert self.host.plane.records["sq", qid][1] == 0

    @rule(qid=QUEUE_IDS, dies=st.booleans())
    def delete_sq(self, qid: int, dies: bool) -> None:
        good = self.usable() and qid != 0 and qid in self.sqs
        assert (self.execute(0x00, dies, cdw={10: qid}) == 0) == good
        if good:
            del self.sqs[qid]

    @rule(qid=QUEUE_IDS, dies=st.booleans())
    def delete_cq(self, qid: int, dies: bool) -> None:
        used = qid in self.sqs.values()
        good = self.usable() and qid != 0 and qid in self.cqs and not used
        code = self.execute(0x04, dies, cdw={10: qid})
        assert (code == 0) == good
        if good:
            self.cqs.remove(qid)
        elif self.usable() and qid != 0 and qid in self.cqs:
            assert code == 0x10C

    @rule(dies=st.booleans())
    def event_request(self, dies: bool) -> None:
        code = self.execute(0x0C, dies)
        if not self.usable():
            assert code == 0x006
        elif self.parked < 4:
            assert code is None
            self.parked += 1
        else:
            assert code == 0x105

    @rule(dies=st.booleans())
    def number_of_queues(self, dies: bool) -> None:
        code = self.execute(0x09, dies, cdw={10: 7, 11: 3 << 16 | 3})
        assert code == (0x006 if not self.usable() else 0x00C if self.created else 0)

    # Registers

    @rule(
        aqa=st.sampled_from([0, 31 << 16 | 31, 31, 0xFFFFFFFF]),
        asq=st.sampled_from([ASQ, ASQ + 8, UNMAPPED]),
        acq=st.sampled_from([ACQ, ACQ + 2048]),
        whole=st.booleans(),
    )
    def queue_registers(self, aqa: int, asq: int, acq: int, whole: bool) -> None:
        self.host.write32(0x24, aqa)
        if whole:
            self.host.write64(0x28, asq)
            self.host.write64(0x30, acq)
        else:
            for offset, value in ((0x28, asq), (0x30, acq)):
                self.host.write32(offset + 4, value >> 32)
                self.host.write32(offset, value & 0xFFFFFFFF)
        if not self.cc & 1:
            self.aqa, self.asq, self.acq = aqa & 0x0FFF0FFF, asq, acq

    @rule()
    def good_enable(self) -> None:
        self.queue_registers(31 << 16 | 31, ASQ, ACQ, True)
        self.write_cc(CC_ENABLE)

    @rule(
        enable=st.booleans(),
        css=st.sampled_from([0, 0, 6, 1, 7]),
        mps=st.sampled_from([0, 0, 0, 1]),
        ams=st.sampled_from([0, 0, 0, 1]),
        shn=st.sampled_from([0, 0, 0, 1, 2, 3]),
        sizes=st.sampled_from([(6, 4), (6, 4), (0, 0), (6, 0), (0, 4), (7, 5)]),
    )
    def any_cc(self, enable: bool, css: int, mps: int, ams: int, shn: int, sizes: tuple[int, int]) -> None:
        word = enable | css << 4 | mps << 7 | ams << 11 | shn << 14 | sizes[0] << 16 | sizes[1] << 20
        self.write_cc(word)

    def write_cc(self, word: int) -> None:
        self.host.write32(0x14, word)
        was, now = self.cc & 1, word & 1
        locked = 7 << 4 | 0xF << 7 | 7 << 11
        if was and now:
            word = word & ~locked | self.cc & locked
        if was and not now:
            self.level_reset()
        self.cc = word
        if now and not was:
            self.shut_down = False
            good = not word >> 4 & 7 and not word >> 7 & 0xF and not word >> 11 & 7
            good = good and bool(self.aqa & 0xFFF) and bool(self.aqa >> 16)
            good = good and self.asq % 4096 == 0 and self.acq % 4096 == 0
            good = good and self.asq + ((self.aqa & 0xFFF) + 1) * 64 <= RAM_BYTES
            self.ready, self.failed = good, not good
            if good:
                self.cqs, self.sqs = {0}, {0: 0}
        if word >> 14 & 3 in (1, 2):
            self.shut_down = True

    @rule(bits=st.integers(0, 0xFFFFFFFF), clear=st.booleans())
    def interrupt_mask(self, bits: int, clear: bool) -> None:
        self.host.write32(0x10 if clear else 0x0C, bits)
        self.mask = self.mask & ~bits if clear else self.mask | bits

    @rule()
    def device_reset(self) -> None:
        run(self.host.controller.reset())
        self.level_reset()
        self.cc = self.aqa = self.asq = self.acq = 0

    @precondition(lambda self: self.ready)
    @rule()
    def fatal(self) -> None:
        self.host.controller.fatal("a test says so")
        self.failed = True

    @rule()
    def worker_dies(self) -> None:
        self.host.next_worker()

    def level_reset(self) -> None:
        self.cqs, self.sqs = set(), {}
        self.parked = self.mask = 0
        self.failed = self.ready = self.shut_down = self.created = False

    def usable(self) -> bool:
        return self.ready and not self.failed

    def sizes(self) -> tuple[int, int]:
        return self.cc >> 16 & 0xF, self.cc >> 20 & 0xF

    @invariant()
    def registers_agree(self) -> None:
        host = self.host
        assert host.read32(0x14) == self.cc
        assert host.read32(0x1C) == self.ready | self.failed << 1 | self.shut_down << 3
        assert (host.read32(0x24), host.read64(0x28), host.read64(0x30)) == (self.aqa, self.asq, self.acq)
        assert host.read32(0x0C) == host.read32(0x10) == self.mask
        assert host.plane.mask == self.mask

    @invariant()
    def queues_agree(self) -> None:
        assert len(self.host.controller.parked_tokens) == self.parked
        if self.ready or not self.failed:  # a failed enable may leave the admin CQ to the reset
            assert set(self.host.plane.cqs) == self.cqs
            assert {qid: row[2] for qid, row in self.host.plane.sqs.items()} == self.sqs


TestControllerModel = ControllerModel.TestCase
TestControllerModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


OPCODES = st.one_of(
    st.sampled_from([0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x7C]), st.integers(0, 255)
)
WORDS = st.one_of(
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 255),
    st.builds(lambda low, high: low | high << 16, st.integers(0, 70), st.integers(0, 1100)),
)
POINTERS = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.integers(0, RAM_BYTES + 8192),
    st.sampled_from([BUFFER, BUFFER + 0xFF8, RAM_BYTES - 4096, RAM_BYTES - 8]),
)
SQES = st.one_of(
    st.binary(min_size=64, max_size=64),
    st.builds(
        lambda opcode, flags, cid, nsid, prp1, prp2, words: struct.pack(
            "<BBHIQQQQ6I", opcode, flags, cid, nsid, 0, 0, prp1, prp2, *words
        ),
        OPCODES,
        st.sampled_from([0, 0, 0, 0, 1, 0x40]),
        st.integers(0, 3),
        st.sampled_from([0, 0, 0, 1, 2, 3, 9, 0xFFFFFFFE, 0xFFFFFFFF]),
        POINTERS,
        POINTERS,
        st.lists(WORDS, min_size=6, max_size=6),
    ),
)
REGISTER_WRITES = st.tuples(
    st.one_of(st.sampled_from([0x0C, 0x10, 0x14, 0x24, 0x28, 0x2C, 0x30, 0x34]), st.integers(0, 0xFFF)),
    st.one_of(
        st.binary(min_size=0, max_size=9),
        st.sampled_from([struct.pack("<I", CC_ENABLE), struct.pack("<Q", ASQ), struct.pack("<Q", ACQ)]),
    ),
)
FILLS = st.one_of(
    st.just(b""), st.lists(POINTERS, min_size=1, max_size=512).map(lambda p: struct.pack(f"<{len(p)}Q", *p))
)


@settings(max_examples=300, deadline=None)
@given(FILLS, st.lists(st.one_of(SQES, SQES, SQES, REGISTER_WRITES), min_size=1, max_size=25))
def test_nothing_a_guest_does_raises(fill: bytes, steps: list[bytes | tuple[int, bytes]]) -> None:
    host = Host()
    host.memory.data[BUFFER : BUFFER + len(fill)] = fill  # PRP lists, some of them loops
    for token, step in enumerate(steps):
        if isinstance(step, tuple):
            run(host.controller.register_write(*step))
            assert len(host.controller.register_read(step[0], len(step[1]))) == len(step[1])
        else:
            completion = run(host.controller.execute(token, step))
            if completion is not None:
                host.result(completion)
    assert len(host.memory.data) == RAM_BYTES
    dump = json.loads(json.dumps(host.controller.dump()))
    host.next_worker()
    assert json.loads(json.dumps(host.controller.dump())) == dump
