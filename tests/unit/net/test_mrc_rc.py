"""The RC-like baseline: the same promises over the same bad channel, and going back where MRC would select."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.mrc.datagram import Datagram
from net.mrc.endpoint import Completion, Kind
from net.mrc.requestor import QpSettings, Status
from net.mrc.wire import Aeth, Opcode
from tests.unit.net.mrc_channel import ACTIONS, HOSTS, QPNS, Channel, always, fates

A, B = HOSTS
SMALL = QpSettings(pmtu_bytes=64, window_bytes=3000, timeout_ns=400_000, retries=60)


def payload(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(HOSTS), st.sampled_from([0, 63, 65, 700]), st.booleans()), max_size=5),
    st.lists(st.sampled_from(ACTIONS), max_size=60),
    st.sampled_from([0, 0xFFFFFA, 0x7FFFFE]),
)
def test_memory_is_equal_under_any_schedule(
    writes: list[tuple[int, int, bool]], actions: list[str], psn: int
) -> None:
    channel = Channel(fates(actions), SMALL, psn=psn, baseline=True)
    expected = {host: bytearray(4096) for host in HOSTS}
    offsets = dict.fromkeys(HOSTS, 0)
    for number, (host, size, immediate) in enumerate(writes):
        data, start = payload(size, number), offsets[host]
        expected[B if host == A else A][start : start + size] = data
        channel.write(host, number, data, start, number if immediate else None)
        offsets[host] += size
    channel.run()
    for host in HOSTS:
        assert channel.inside(host) == expected[host]
        assert channel.done(host) == [n for n, (writer, _, _) in enumerate(writes) if writer == host]
        immediates = [n for n, (writer, _, immediate) in enumerate(writes) if writer != host and immediate]
        assert channel.done(host, Kind.IMMEDIATE) == immediates
        assert all(completion.status is Status.OK for completion in channel.completions[host])
        requestor = channel.endpoints[host].pairs[QPNS[host]].requestor
        assert requestor.idle and requestor.inflight_bytes == 0


@pytest.mark.parametrize("lost", [0, 5, 30])
def test_one_loss_costs_everything_in_flight_behind_it(lost: int) -> None:
    """20 packets of 146 bytes fill the window; the one that is lost is told by the next, and all go again from it."""
    struck: list[int] = []

    def fate(datagram: Datagram) -> str:
        bth = datagram.message.bth
        if bth.opcode != Opcode.ACKNOWLEDGE and bth.psn == lost and not struck:
            struck.append(lost)
            return "lose"
        return "pass"

    channel = Channel(fate, SMALL, baseline=True)
    channel.write(A, 0, payload(4096), 0)
    channel.run()
    requestor, responder = channel.counters(A)[0], channel.counters(B)[1]
    assert requestor["sent"] == 64 and requestor["nacks"] == 1 and requestor["timeouts"] == 0
    assert requestor["retransmitted"] == responder["out of order"] + 1 > 10
    assert channel.inside(B) == payload(4096)
    negative = [d.message.need(Aeth) for d in channel.sent if d.message.get(Aeth) and d.message.need(Aeth)[0] != 0x1F]
    assert negative == [Aeth(0x60, 0)]


def test_one_path_only_and_nothing_but_writes_and_acknowledgements() -> None:
    channel = Channel(always, SMALL, baseline=True)
    channel.write(A, 0, payload(4096), 0)
    channel.run()
    assert len({datagram.entropy for datagram in channel.sent}) == 1
    assert {d.message.bth.opcode for d in channel.sent if not d.is_data} == {Opcode.ACKNOWLEDGE}
    assert channel.counters(A)[0] == {"sent": 64}


def test_the_last_packet_is_lost_and_retries_run_out() -> None:
    channel = Channel(lambda d: "lose", QpSettings(64, 3000, timeout_ns=400_000, retries=3), baseline=True)
    channel.write(A, 4, payload(64), 0)
    channel.run(until_ns=50_000_000)
    assert channel.completions[A] == [Completion(QPNS[A], Kind.WRITE, 4, Status.RETRY_EXCEEDED)]
    assert sum(datagram.is_data for datagram in channel.sent) == 4


def test_a_write_without_rights_ends_the_writer() -> None:
    channel = Channel(always, SMALL, baseline=True)
    channel.endpoints[A].write(QPNS[A], 5, b"data", 0x10000, 0xBAD)
    channel.run()
    assert channel.completions[A] == [Completion(QPNS[A], Kind.WRITE, 5, Status.REMOTE_ERROR)]
    assert channel.inside(B) == bytes(4096)
