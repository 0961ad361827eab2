"""The eBPF queue against the plain model, packet by packet, on sequences that Hypothesis makes."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import addressof, memset, sizeof

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from net.ebpf import programs
from net.ebpf.kernel import Records, Ring, Table, load, run_once
from net.mrc.frame import trim
from net.mrc.wire import Ipv6, encode
from net.switch.live import _MatchRecord
from net.switch.model import Action, Cause, PortQueue, QueueConfig
from net.switch.ports import PortRecord

LOOPBACK = 1
"""The interface that BPF_PROG_TEST_RUN pretends to use."""

TRIMMABLE, PRIORITY, TRIMMED = 4, 46, 12
CONFIG = QueueConfig(
    1000, ecn_bytes=3000, trim_bytes=8000, trim_size_bytes=128, limit_bytes=15_000, priority_limit_bytes=700
)
"""A byte takes 8 ms: what time passes while a sequence runs is nothing."""

packets = st.lists(
    st.tuples(st.integers(60, 3000), st.sampled_from((0, TRIMMABLE, PRIORITY)), st.integers(0, 3)), max_size=40
)


class Rig:
    """The program, and the record it uses."""

    def __init__(self) -> None:
        self.ports = Records(PortRecord, 1)
        rest = [Records(_MatchRecord, 1), Ring(1 << 16), Table(8, 24, 1), Table(40, 40, 1, lru=True)]
        maps = programs.Maps(self.ports.fd, *(one.fd for one in rest), LOOPBACK, 0)
        self.program = load(programs.code(programs.queue, maps), "queue")
        self.keep = rest

    def reset(self) -> None:
        record = self.ports[0]
        memset(addressof(record), 0, sizeof(record))
        record.configure(CONFIG, priority=(PRIORITY, TRIMMED), trimmable=(TRIMMABLE,), trim_dscp=TRIMMED)


@pytest.fixture(scope="module")
def rig(live: None) -> Iterator[Rig]:
    yield Rig()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sequence=packets)
def test_program_and_model_agree(rig: Rig, sequence: list[tuple[int, int, int]]) -> None:
    rig.reset()
    model = PortQueue(CONFIG)
    for size, dscp, ecn in sequence:
        header = Ipv6(traffic_class=dscp << 2 | ecn, length=size - 54, src=b"\1" * 16, dst=b"\2" * 16)
        frame = bytes(12) + b"\x86\xdd" + encode(header) + bytes(size - 54)
        verdict = model.offer(0, size, ect=ecn != 0, priority=dscp == PRIORITY, trimmable=dscp == TRIMMABLE)
        result, after = run_once(rig.program, frame)
        wanted = frame
        if verdict.action is Action.MARK:
            wanted = frame[:15] + bytes([frame[15] | 0x30]) + frame[16:]
        elif verdict.action is Action.TRIM:
            wanted = frame[:14] + trim(frame[14:], TRIMMED, CONFIG.trim_size_bytes)
        assert (result == programs.TC_DROP) == (verdict.action is Action.DROP), verdict
        if verdict.action is not Action.DROP:
            assert after == wanted
    record = rig.ports[0]
    assert {cause: record.packets(cause) for cause in Cause} == {cause: model.packets[cause] for cause in Cause}
    assert {cause: record.bytes_in(cause) for cause in Cause} == {cause: model.bytes_in[cause] for cause in Cause}
    assert record.sent_bytes == model.sent_bytes
