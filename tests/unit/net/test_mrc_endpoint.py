"""The MRC engine over a channel that loses, cuts, doubles, delays and marks: memory equal, completions once and in
order; each reaction of the table in net.mrc.requestor seen on the wire; hostile packets."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.errors import MrcError
from net.mrc.datagram import Datagram
from net.mrc.endpoint import Completion, Endpoint, Kind
from net.mrc.frame import Message, message
from net.mrc.paths import EvState
from net.mrc.requestor import Identity, QpSettings, Status
from net.mrc.wire import WRITES as WRITE_OPCODES
from net.mrc.wire import (
    Aeth,
    Bth,
    CcState,
    EcnMark,
    Eeth,
    Erth,
    Immdt,
    Meth,
    NackReason,
    Neth,
    Opcode,
    Peth,
    Reth,
    Seth,
    Tseth,
)
from tests.unit.net.mrc_cases import messages
from tests.unit.net.mrc_channel import ACTIONS, FABRIC, HOSTS, QPNS, Channel, always, fates

SMALL = QpSettings(pmtu_bytes=64, window_bytes=3000, timeout_ns=400_000, retries=25)
A, B = HOSTS


def payload(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


# Any schedule.

WRITES = st.lists(
    st.tuples(st.sampled_from(HOSTS), st.sampled_from([0, 1, 63, 64, 65, 200, 700]), st.booleans()),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=120)
@given(
    WRITES,
    st.lists(st.sampled_from(ACTIONS), max_size=80),
    st.sampled_from([0, 0xFFFFFA, 0x7FFFFE]),
    st.sampled_from([1, 4]),
)
def test_memory_is_equal_under_any_schedule(
    writes: list[tuple[int, int, bool]], actions: list[str], psn: int, sack_packets: int
) -> None:
    options = QpSettings(64, 3000, 128, 400_000, 25, 2, sack_packets)
    channel = Channel(fates(actions), options, psn=psn, memory_bytes=4300)
    write_all_and_compare(channel, writes)


def write_all_and_compare(channel: Channel, writes: list[tuple[int, int, bool]]) -> None:
    """(writer, size, with an immediate or not), each behind the one before; memory and completions are right."""
    expected = {host: bytearray(len(channel.inside(host))) for host in HOSTS}
    offsets = dict.fromkeys(HOSTS, 0)
    for number, (host, size, immediate) in enumerate(writes):
        data, start = payload(size, number), offsets[host]
        expected[B if host == A else A][start : start + size] = data
        channel.write(host, number, data, start, 1000 + number if immediate else None)
        offsets[host] += size
    channel.run()
    for host in HOSTS:
        assert channel.inside(host) == expected[host]
        mine = [number for number, (writer, _, _) in enumerate(writes) if writer == host]
        theirs = [1000 + n for n, (writer, _, immediate) in enumerate(writes) if writer != host and immediate]
        assert channel.done(host) == mine and channel.done(host, Kind.IMMEDIATE) == theirs
        assert all(completion.status is Status.OK for completion in channel.completions[host])
        requestor = channel.endpoints[host].pairs[QPNS[host]].requestor
        assert requestor.idle and requestor.inflight_bytes == 0


SPANS = st.tuples(st.integers(0, 60), st.integers(1, 60))  # from which datagram on, and for how many SPAN_NS
SPAN_NS = 100_000


@settings(deadline=None, max_examples=80)
@given(
    WRITES,
    st.lists(st.sampled_from(ACTIONS), max_size=80),
    st.lists(st.tuples(SPANS, st.sampled_from(FABRIC.evs(A, B))), max_size=6),
    st.lists(st.tuples(SPANS, st.sampled_from(HOSTS)), max_size=3),
    st.sampled_from([0, 0xFFFFFA, 0x7FFFFE]),
)
def test_memory_is_equal_while_paths_and_ports_die(
    writes: list[tuple[int, int, bool]],
    actions: list[str],
    kills: list[tuple[tuple[int, int], int]],
    flaps: list[tuple[tuple[int, int], int]],
    psn: int,
) -> None:
    """The same schedules, and for a time from such a datagram on: paths swallow everything both ways, and the port in
    plane 1 of a host is down, which that host sees. Not for so many datagrams: each retry waits twice as long."""
    scheduled = fates(actions)
    ends: dict[tuple[str, int], int] = {}

    def within(kind: str, index: int, span: tuple[int, int]) -> bool:
        if len(channel.sent) < span[0]:
            return False
        return channel.now_ns < ends.setdefault((kind, index), channel.now_ns + span[1] * SPAN_NS)

    def fate(datagram: Datagram) -> str:
        down = {host for index, (span, host) in enumerate(flaps) if within("flap", index, span)}
        for host in HOSTS:
            if (host in down) != (host in channel.ports_down):
                channel.turn_port(host, 1, up=host not in down)
        dead = any(within("kill", index, span) and ev == datagram.entropy for index, (span, ev) in enumerate(kills))
        return "lose" if dead or (down and datagram.entropy >> 16 == 1) else scheduled(datagram)

    options = QpSettings(64, 3000, 128, 400_000, 25, 2)
    channel = Channel(fate, options, psn=psn, memory_bytes=4300, probe_interval_ns=300_000)
    write_all_and_compare(channel, writes)


@pytest.mark.parametrize("seed", range(6))
def test_a_long_bad_run(seed: int) -> None:
    """64 KiB through a fifth of everything going wrong, wrapping the PSN."""
    rng = random.Random(seed)
    channel = Channel(
        lambda _: rng.choice(ACTIONS) if rng.random() < 0.2 else "pass",
        QpSettings(pmtu_bytes=256, window_bytes=20_000, timeout_ns=400_000, retries=25),
        psn=0xFFFFFF - 100,
        memory_bytes=65_536,
    )
    data = payload(65_536, seed)
    for part in range(8):
        channel.write(A, part, data[part * 8192 : part * 8192 + 8192], part * 8192, part)
    channel.run()
    assert channel.inside(B) == data
    assert channel.done(A) == channel.done(B, Kind.IMMEDIATE) == list(range(8))
    assert channel.counters(B)[1]["placed"] == 256


# A clear channel.


def test_packets_of_a_write() -> None:
    channel = Channel(always, SMALL, psn=0xFFFFFE)
    channel.write(A, 1, payload(150), 10, immediate=0xCAFE)
    channel.write(A, 2, payload(64), 500)
    channel.write(A, 3, b"", 700, immediate=9)
    channel.run()
    data = [datagram.message for datagram in channel.sent if datagram.is_data]
    assert [content.bth.opcode for content in data] == [
        Opcode.WRITE_FIRST,
        Opcode.WRITE_MIDDLE,
        Opcode.WRITE_LAST_IMM,
        Opcode.WRITE_ONLY,
        Opcode.WRITE_ONLY_IMM,
    ]
    assert [content.bth.psn for content in data] == [0xFFFFFE, 0xFFFFFF, 0, 1, 2]
    reths = [content.need(Reth) for content in data]
    assert [reth.va for reth in reths] == [0x1000A, 0x1000A + 64, 0x1000A + 128, 0x10000 + 500, 0x10000 + 700]
    assert [reth.dma_length for reth in reths] == [150, 150, 150, 64, 0]
    assert [(content.need(Meth).rqmsn, content.need(Meth).msn) for content in data] == [
        *[(1, 0)] * 3,
        (0, 1),
        (2, 2),
    ]
    assert data[2].need(Immdt).value == 0xCAFE
    assert [content.bth.a for content in data] == [0, 0, 0, 0, 1]
    assert channel.inside(B)[10:160] == payload(150)
    assert channel.completions[B] == [Completion(QPNS[B], Kind.IMMEDIATE, value) for value in (0xCAFE, 9)]


def test_nothing_is_sent_twice_on_a_clear_channel_and_all_paths_are_used() -> None:
    channel = Channel(always, SMALL, active=4)
    channel.write(A, 0, payload(4096), 0)
    channel.run()
    requestor, responder = channel.counters(A)[0], channel.counters(B)[1]
    assert requestor == {"sent": 64} and responder["placed"] == 64
    assert responder["sacks"] <= 64 // 4 + 64 // 4  # one in four, and where the window was nearly full
    counts = [sum(d.is_data and d.entropy == ev for d in channel.sent) for ev in (0, 1, 0x10000, 0x10001)]
    assert counts == [16, 16, 16, 16]


def test_the_window_is_kept() -> None:
    channel = Channel(lambda datagram: "pass" if datagram.is_data else "lose", SMALL)
    channel.write(A, 0, payload(4096), 0)
    channel.run(until_ns=150_000)
    sizes = [datagram.wire_bytes() for datagram in channel.sent if datagram.is_data]
    assert 3000 - 300 < sum(sizes) <= 3000
    narrow = Channel(lambda datagram: "pass" if datagram.is_data else "lose", QpSettings(64, 10**6, mpr=7))
    narrow.write(A, 0, payload(4096), 0)
    narrow.run(until_ns=150_000)
    assert sum(datagram.is_data for datagram in narrow.sent) == 7


def test_immediates_in_flight_are_limited() -> None:
    channel = Channel(lambda datagram: "pass" if datagram.is_data else "lose", QpSettings(64, 10**6, wimm_max=3))
    for number in range(10):
        channel.write(A, number, b"x", number, immediate=number)
    channel.run(until_ns=150_000)
    assert sum(datagram.is_data for datagram in channel.sent) == 3
    channel.fate = always
    channel.run()
    assert channel.done(B, Kind.IMMEDIATE) == list(range(10))


# Reactions, each alone. The EV of a packet is known from what was sent.


def one_bad(nth: int, action: str, count: int = 1) -> Any:
    """A fate that strikes the ``nth`` data packet (from 0), ``count`` transmissions of that PSN."""
    seen: list[int] = []

    def fate(datagram: Datagram) -> str:
        if not datagram.is_data:
            return "pass"
        psn = datagram.message.bth.psn
        seen.append(psn)
        return action if psn == nth and seen.count(psn) <= count else "pass"

    return fate


def transmissions(channel: Channel, psn: int) -> list[Datagram]:
    return [datagram for datagram in channel.sent if datagram.is_data and datagram.message.bth.psn == psn]


@pytest.mark.parametrize(("action", "reason", "state"), [("trim", 1, "skip"), ("trim last hop", 2, "good")])
def test_a_cut_packet_is_asked_for_and_sent_again_at_once(action: str, reason: int, state: str) -> None:
    channel = Channel(one_bad(5, action), SMALL, active=4)
    paths = channel.endpoints[A].pairs[QPNS[A]].requestor.paths
    channel.write(A, 0, payload(1024), 0)
    channel.run()
    nacks = [datagram for datagram in channel.sent if datagram.message.bth.opcode == Opcode.NACK]
    first, again = transmissions(channel, 5)
    assert len(nacks) == 1 and nacks[0].entropy == first.entropy
    neth = nacks[0].message.need(Neth)
    assert (neth.nack_reason, neth.nack_psn, neth.entropy) == (reason, 5, first.entropy)
    assert neth.tx_timestamp == first.message.need(Tseth).tx_timestamp
    assert again.entropy != first.entropy and again.message.bth.rtx == 1
    requestor = channel.counters(A)[0]
    del requestor["gap probes"]  # of the gap that a SACK showed before the NACK came
    assert requestor == {"sent": 16, "nacks": 1, "retransmitted": 1}  # no timeout, nothing inferred
    assert (paths.changes[EvState.GOOD, EvState.SKIP] == 1) == (state == "skip")
    assert channel.now_ns < 400_000 and channel.inside(B)[:1024] == payload(1024)


def test_cut_again_and_again() -> None:
    channel = Channel(one_bad(5, "trim", 6), SMALL)
    channel.write(A, 0, payload(1024), 0)
    channel.run()
    assert len(transmissions(channel, 5)) == 7 and channel.counters(A)[0]["timeouts"] == 0
    assert channel.done(A) == [0]


def test_a_loss_is_inferred_from_a_later_packet_of_the_same_path() -> None:
    channel = Channel(one_bad(2, "lose"), SMALL, active=2, probe_successes=2)
    paths = channel.endpoints[A].pairs[QPNS[A]].requestor.paths
    channel.write(A, 0, payload(2048), 0)
    channel.run(until_ns=390_000)  # before any timeout
    first, again = transmissions(channel, 2)
    requestor = channel.counters(A)[0]
    assert requestor["inferred"] == 1 == requestor["retransmitted"] and requestor["timeouts"] == 0
    assert channel.done(A) == [0] and again.entropy != first.entropy
    assert paths.state(first.entropy) is EvState.ASSUMED_BAD
    later = channel.sent[channel.sent.index(again) + 1 :]
    assert all(datagram.entropy != first.entropy for datagram in later if datagram.is_data)
    channel.run()  # probes find the path well again
    assert paths.state(first.entropy) is EvState.GOOD
    assert channel.counters(B)[1]["probes"] == 2


def test_gaps_alone_are_no_loss() -> None:
    """A slow path: everything on one EV is late by many packets. Nothing is sent again, nobody suspected."""
    slow: list[int] = []

    def fate(datagram: Datagram) -> str:
        if datagram.is_data and not slow:
            slow.append(datagram.entropy)
        return "late" if datagram.peer == B and datagram.entropy == slow[0] else "pass"

    channel = Channel(fate, SMALL, active=4)
    channel.write(A, 0, payload(4096), 0)
    channel.run()
    requestor = channel.counters(A)[0]
    assert requestor["retransmitted"] == requestor["inferred"] == requestor["timeouts"] == 0
    assert channel.done(A) == [0]


def test_the_last_packet_is_lost() -> None:
    """Nothing later tells of it, but a probe that goes the same way halfway to the timeout does."""
    channel = Channel(one_bad(15, "lose"), SMALL)
    channel.write(A, 0, payload(1024), 0)
    channel.run()
    first, again = transmissions(channel, 15)
    requestor = channel.counters(A)[0]
    assert (requestor["timeouts"], requestor["inferred"], requestor["retransmitted"]) == (0, 1, 1)
    assert requestor["sack probes"] == 1 and requestor["gap probes"] == 2  # for the oldest, then for the last
    paths = channel.endpoints[A].pairs[QPNS[A]].requestor.paths
    assert paths.changes[EvState.GOOD, EvState.ASSUMED_BAD] == 1 and again.entropy != first.entropy
    assert channel.done(A) == [0]


def test_lost_sacks_are_asked_for_and_nobody_is_suspected() -> None:
    lost: list[Datagram] = []

    def fate(datagram: Datagram) -> str:
        if datagram.message.bth.opcode == Opcode.ACKNOWLEDGE:
            return "lose"
        if datagram.message.bth.opcode == Opcode.SACK and not datagram.message.need(Seth).pr:
            lost.append(datagram)
            return "lose"
        return "pass"

    channel = Channel(fate, SMALL)
    channel.write(A, 0, payload(512), 0)
    channel.run()
    requestor = channel.counters(A)[0]
    assert lost and requestor == {"sent": 8, "sack probes": 1, "gap probes": 1}
    assert channel.done(A) == [0]


def test_marks_skip_the_path_that_was_marked() -> None:
    channel = Channel(one_bad(3, "mark"), SMALL, active=4)
    paths = channel.endpoints[A].pairs[QPNS[A]].requestor.paths
    channel.write(A, 0, payload(1024), 0)
    channel.run()
    sacks = [d.message.need(Seth) for d in channel.sent if d.message.bth.opcode == Opcode.SACK]
    marked = [seth for seth in sacks if seth.m == EcnMark.SKIP_ONCE]
    assert [seth.entropy for seth in marked] == [transmissions(channel, 3)[0].entropy]
    assert channel.counters(A)[0]["marks"] == 1 and channel.counters(A)[0]["retransmitted"] == 0
    assert paths.changes[EvState.GOOD, EvState.SKIP] == 1


def test_retries_run_out() -> None:
    channel = Channel(lambda datagram: "lose", QpSettings(64, 3000, timeout_ns=400_000, retries=3))
    channel.write(A, 7, payload(100), 0)
    channel.write(A, 8, payload(100), 100)
    channel.run(until_ns=10_000_000)
    assert channel.completions[A] == [Completion(QPNS[A], Kind.WRITE, n, Status.RETRY_EXCEEDED) for n in (7, 8)]
    assert len(transmissions(channel, 0)) == 4
    channel.write(A, 9, b"more", 0)
    channel.run(until_ns=20_000_000)
    assert channel.completions[A][2:] == [Completion(QPNS[A], Kind.WRITE, 9, Status.RETRY_EXCEEDED)]


def test_twenty_five_retries_never_run_out_and_the_timeout_doubles_from_the_eighth() -> None:
    times: list[int] = []

    def fate(datagram: Datagram) -> str:
        if datagram.is_data:
            times.append(channel.now_ns)
        return "lose"

    channel = Channel(fate, QpSettings(64, 3000, timeout_ns=400_000, retries=25))
    channel.write(A, 7, payload(10), 0)
    channel.run(until_ns=1_000_000_000_000)
    waits = [(later - earlier) // 400_000 for earlier, later in pairwise(times)]
    assert waits[:26] == [1] * 8 + [2**n for n in range(1, 19)] and set(waits[26:]) == {2**18} and len(waits) > 27
    channel.fate = always
    channel.run(until_ns=2_000_000_000_000)
    assert channel.completions[A] == [Completion(QPNS[A], Kind.WRITE, 7)]


def test_who_was_not_running_blames_nobody() -> None:
    channel = Channel(always, SMALL)
    channel.write(A, 0, payload(512), 0)
    channel.deliver(A, [])
    sent = [datagram for datagram in channel.sent if datagram.is_data]
    channel.now_ns = 50_000_000  # the answers lie in a socket, unread
    channel.deliver(A, [])
    requestor = channel.endpoints[A].pairs[QPNS[A]].requestor
    assert requestor.counters["forgiven"] == 1 and requestor.counters["timeouts"] == 0
    channel.run()
    assert channel.done(A) == [0]
    assert [d.message.bth.psn for d in channel.sent if d.is_data] == [d.message.bth.psn for d in sent]


def test_other_nacks_wait_until_the_loss_is_known_and_suspect_nobody() -> None:
    channel = Channel(one_bad(7, "lose"), SMALL)
    channel.write(A, 0, payload(512), 0)
    channel.deliver(A, [])
    lost = transmissions(channel, 7)[0]
    neth = Neth(nack_reason=NackReason.NO_RESOURCE, nack_psn=7, entropy=lost.entropy)
    channel.deliver(A, [Datagram(B, 0, message(Bth(Opcode.NACK, dqp=QPNS[A]), neth))])
    channel.run()
    requestor = channel.endpoints[A].pairs[QPNS[A]].requestor
    assert requestor.counters["timeouts"] + requestor.counters["inferred"] == 1 and channel.done(A) == [0]
    assert requestor.paths.changes[EvState.GOOD, EvState.ASSUMED_BAD] == 0


def test_an_old_nack_is_left_alone() -> None:
    channel = Channel(always, SMALL, active=4)
    channel.write(A, 0, payload(64), 0)
    channel.deliver(A, [])
    other = next(ev for ev in (0, 1) if ev != channel.sent[0].entropy)
    neth = Neth(nack_reason=NackReason.TRIMMED, nack_psn=0, entropy=other)
    channel.deliver(A, [Datagram(B, 0, message(Bth(Opcode.NACK, dqp=QPNS[A]), neth))])
    channel.run()
    assert channel.counters(A)[0] == {"sent": 1, "nacks": 1, "stale nacks": 1}


def sack(cack: int, acked: list[int], rcvd: int, *, trigger: int | None = None, base: int | None = None) -> Datagram:
    """A SACK as B would send it, made by hand; its bitmap starts behind ``cack`` unless told."""
    base = cack + 1 if base is None else base
    bitmap = sum(1 << psn - base for psn in acked)
    offset = 0 if trigger is None else trigger - cack
    seth = Seth(
        ack_psn_offset=offset, cack_psn=cack & 0xFFFFFF, sack_offset=base - cack, bitmap=bitmap, entropy=0xFFFF
    )
    return Datagram(B, 0, message(Bth(Opcode.SACK, dqp=QPNS[A]), seth, CcState(rcvd_bytes=rcvd)))


def started(packets: int, **paths: int) -> tuple[Channel, list[int]]:
    """A channel on which A has sent so many packets and hears only what a test makes; the EVs in order."""
    channel = Channel(lambda _: "lose", SMALL, **paths)
    channel.write(A, 0, payload(64 * packets), 0)
    channel.deliver(A, [])
    return channel, [datagram.entropy for datagram in channel.sent]


@pytest.mark.parametrize(("rcvd", "inferred"), [(10, 0), (20, 0), (21, 1), (0xFFFFF0, 0)])
def test_only_the_newest_sack_shows_losses(rcvd: int, inferred: int) -> None:
    """PSN 3 came, on the EV of PSN 1, says a SACK that does not report on 1. The next one shows 1 missing: if it is
    older than the first, 1 may have come since."""
    channel, evs = started(6, active=2)
    assert evs[1] == evs[3] != evs[0]
    channel.deliver(A, [sack(-1, [], 20, trigger=3, base=64), sack(-1, [], rcvd)])
    assert channel.counters(A)[0]["inferred"] == inferred


def test_what_was_sent_again_tells_nothing_of_its_path() -> None:
    """PSN 0 is sent again on the EV of PSN 1. Its first transmission may be what arrived: nothing is known of 1."""
    channel, evs = started(2, active=2)
    neth = Neth(nack_reason=NackReason.TRIMMED_LASTHOP, nack_psn=0, entropy=evs[0])
    channel.deliver(A, [Datagram(B, 0, message(Bth(Opcode.NACK, dqp=QPNS[A]), neth))])
    assert [datagram.entropy for datagram in channel.sent] == [
        evs[0],
        evs[1],
        evs[1],
    ]  # not the NACK's EV, though its turn
    channel.deliver(A, [sack(0, [], 10)])
    assert channel.counters(A)[0]["inferred"] == 0


def test_what_waits_to_be_sent_again_is_not_in_flight() -> None:
    """All paths out, a cut packet waits; then it turns out to have arrived after all: it is not taken off twice."""
    channel, evs = started(6, active=2)
    requestor = channel.endpoints[A].pairs[QPNS[A]].requestor
    whole = requestor.inflight_bytes
    for ev in (0, 1, 0x10000, 0x10001):
        requestor.paths.deny(ev)
    neth = Neth(nack_reason=NackReason.TRIMMED, nack_psn=0, entropy=evs[0])
    channel.deliver(A, [Datagram(B, 0, message(Bth(Opcode.NACK, dqp=QPNS[A]), neth))])
    assert requestor.inflight_bytes == whole * 5 // 6 and len(channel.sent) == 6
    channel.deliver(A, [sack(0, [], 10)])
    assert requestor.inflight_bytes == whole * 5 // 6
    requestor.paths.allow(0)
    channel.deliver(A, [])
    assert len(channel.sent) == 6  # and it is not sent again


# Acknowledgements, ways back, ports.


def control(channel: Channel, opcode: Opcode) -> list[Datagram]:
    return [datagram for datagram in channel.sent if datagram.message.bth.opcode == opcode]


def test_messages_are_acknowledged_when_they_and_all_before_are_in_place() -> None:
    """Three messages of two packets; the first packet of the second one is late: 1, then 2 and 3 at once."""
    channel = Channel(one_bad(2, "late"), SMALL)
    for number in range(3):
        channel.write(A, number, payload(100), 100 * number)
    channel.run()
    acks = [(d.message.bth.psn, d.message.need(Aeth)) for d in control(channel, Opcode.ACKNOWLEDGE)]
    assert acks == [(1, Aeth(0x1F, 1)), (5, Aeth(0x1F, 3))]


@pytest.mark.parametrize(("psn", "syndrome", "done"), [(5, 0x1F, [0]), (5, 0x7F, []), (4, 0x1F, []), (99, 0x1F, [])])
def test_an_acknowledgement_completes_what_it_covers(psn: int, syndrome: int, done: list[int]) -> None:
    channel, _ = started(6)
    aeth = Aeth(syndrome, 1)
    channel.deliver(A, [Datagram(B, 0, message(Bth(Opcode.ACKNOWLEDGE, dqp=QPNS[A], psn=psn), aeth))])
    assert channel.done(A) == done
    requestor = channel.endpoints[A].pairs[QPNS[A]].requestor
    assert (requestor.counters["bad acknowledge"] == 1) == (psn == 99 or syndrome != 0x1F)
    assert requestor.idle == bool(done) and (requestor.inflight_bytes == 0) == bool(done)


def test_who_only_receives_finds_ways_back_by_probing() -> None:
    """One EV of four swallows what B sends: what was probed on it stays unanswered, and it is never a way back."""
    dead = 0x10001

    def fate(datagram: Datagram) -> str:
        return "lose" if datagram.peer == A and datagram.entropy == dead else "pass"

    channel = Channel(fate, QpSettings(64, 2000, timeout_ns=400_000), memory_bytes=150_000)
    channel.write(A, 0, payload(150_000), 0)
    channel.run()
    peer = channel.endpoints[B].peers[A]
    assert peer.counters["ev probes"] > 10 and peer.counters["ev probes unanswered"] > 0
    assert set(peer.reverse_evs) <= {0, 1} and dead not in peer.reverse_evs.values()
    sacks = control(channel, Opcode.SACK)
    early = [sack for sack in sacks if sack.entropy != sack.message.need(Seth).entropy]
    assert len(early) > len(sacks) / 2  # by a way of its own, not by the data's
    assert sum(sack.entropy == dead for sack in sacks) < len(sacks) / 8
    assert channel.inside(B) == payload(150_000)


def test_who_also_sends_learns_ways_back_from_its_sacks() -> None:
    channel = Channel(always, QpSettings(64, 2000, timeout_ns=400_000), memory_bytes=100_000)
    for host in HOSTS:
        channel.write(host, 0, payload(100_000), 0)
    channel.run()
    assert control(channel, Opcode.ENDPOINT_REQUEST) == []
    assert all(set(channel.endpoints[host].peers[peer].reverse_evs) == {0, 1} for host, peer in (HOSTS, HOSTS[::-1]))


def planes_used(channel: Channel, since: int) -> set[int]:
    return {d.entropy >> 16 for d in channel.sent[since:] if d.is_data}


def test_a_dead_way_back_is_given_up_even_when_only_probes_arrive() -> None:
    """B answers by an EV that dies; A has one packet in flight at a time and hears nothing until B looks around."""
    channel = Channel(always, QpSettings(64, 200, timeout_ns=400_000, retries=25), memory_bytes=60_000)
    channel.write(A, 0, payload(60_000), 0)
    channel.run(until_ns=2_000_000)
    dead = set(channel.endpoints[B].peers[A].reverse_evs.values())
    assert dead
    channel.fate = lambda datagram: "lose" if datagram.peer == A and datagram.entropy in dead else "pass"
    channel.run()
    assert channel.done(A) == [0] and channel.inside(B) == payload(60_000)


def test_a_port_goes_down_and_comes_back() -> None:
    """What was in flight by it goes again at once, without a timeout; the peer hears of it and leaves the plane, too;
    back up, its EVs are probed before they carry data."""
    channel = Channel(always, SMALL, memory_bytes=60_000, probe_interval_ns=20_000)
    for host in HOSTS:
        channel.write(host, 0, payload(60_000), 0)
    channel.run(until_ns=50_000)
    channel.fate = lambda datagram: "lose" if datagram.entropy >> 16 == 1 else "pass"
    channel.endpoints[A].set_port(1, up=False)
    channel.deliver(A, [])
    update = control(channel, Opcode.ENDPOINT_REQUEST)[0]
    assert update.message.need(Erth).port_status_mask == 0b01 and update.message.bth.dqp == 2
    assert update.entropy >> 16 == 0
    mark = len(channel.sent)
    channel.run(until_ns=channel.now_ns + 25_000)
    half = len(channel.sent)
    channel.run(until_ns=channel.now_ns + 100_000)
    assert planes_used(channel, half) == {0}
    assert {d.entropy >> 16 for d in channel.sent[mark:] if d.peer == B} == {0}
    for host in HOSTS:
        paths = channel.endpoints[host].pairs[QPNS[host]].requestor.paths
        assert {paths.state(0x10000), paths.state(0x10001)} == {EvState.DENIED}
    assert channel.counters(A)[0]["timeouts"] == 0
    channel.fate = always
    channel.endpoints[A].set_port(1, up=True)
    channel.deliver(A, [])
    again = len(channel.sent)
    channel.run()
    probes = [d for d in channel.sent[again:] if d.message.bth.opcode == Opcode.PROBE]
    assert {d.entropy >> 16 for d in probes} == {1} and len(probes) >= 3
    assert planes_used(channel, again) == {0, 1}
    for host in HOSTS:
        paths = channel.endpoints[host].pairs[QPNS[host]].requestor.paths
        assert {paths.state(ev) for ev in (0, 1, 0x10000, 0x10001)} == {EvState.GOOD}
        assert channel.done(host) == [0] and channel.inside(host) == payload(60_000)


def test_what_was_lost_with_the_peers_port_is_sent_again_and_never_probed_for() -> None:
    """The writer cannot know what had arrived: a timeout tells, and no packet follows by the plane that is closed."""
    channel = Channel(lambda datagram: "lose" if datagram.entropy >> 16 == 1 else "pass", SMALL)
    channel.write(A, 0, payload(512), 0)
    channel.deliver(A, [])
    assert planes_used(channel, 0) == {0, 1}
    channel.endpoints[B].set_port(1, up=False)
    channel.deliver(B, [])
    channel.run(until_ns=15_000)
    closed = len(channel.sent)
    channel.run()
    assert {d.entropy >> 16 for d in channel.sent[closed:]} == {0}
    assert channel.counters(A)[0]["retransmitted"] == 4 and channel.done(A) == [0]


def test_a_port_update_is_repeated_until_answered() -> None:
    channel = Channel(lambda _: "lose", SMALL)
    channel.endpoints[A].set_port(0, up=False)
    channel.deliver(A, [])
    channel.run(until_ns=1_000_000)
    sent = len(control(channel, Opcode.ENDPOINT_REQUEST))
    assert 3 <= sent <= 6  # at 0, 0.1, 0.3, 0.7 ms
    channel.fate = always
    channel.run()
    assert len(control(channel, Opcode.ENDPOINT_REQUEST)) == sent + 1
    assert channel.endpoints[B].peers[A].closed == {0}


def test_nobody_believes_that_the_last_port_is_down() -> None:
    """It came by one of them. Nor is an answer believed that was not asked for."""
    channel = Channel(always, SMALL)
    update = message(Bth(Opcode.ENDPOINT_REQUEST, dqp=2, psn=7), Erth(port_status_mask=0))
    (sent,) = answer(channel, Datagram(A, 0, update))
    assert sent.message.bth.opcode == Opcode.ENDPOINT_RESPONSE and sent.message.bth.psn == 7
    (probe,) = answer(channel, Datagram(A, 0x10001, message(Bth(Opcode.ENDPOINT_REQUEST, dqp=2), Erth(op=1))))
    assert probe.message.need(Eeth).operation == 1 and probe.entropy == 0x10001
    answer(channel, Datagram(A, 0, message(Bth(Opcode.ENDPOINT_RESPONSE, dqp=2, psn=5), Eeth())))
    peer = channel.endpoints[B].peers[A]
    assert peer.closed == frozenset() and peer.counters == {"bad port status": 1, "stale responses": 1}


def test_without_any_port_queue_pairs_fail() -> None:
    channel = Channel(lambda _: "lose", SMALL)
    channel.write(A, 3, payload(100), 0)
    channel.deliver(A, [])
    for plane in (0, 1):
        channel.endpoints[A].set_port(plane, up=False)
    channel.deliver(A, [])
    assert channel.completions[A] == [Completion(QPNS[A], Kind.WRITE, 3, Status.NO_PORT)]


# What the responder refuses. One valid write, changed in one place.


def arriving(psn: int = 0, data: bytes = b"data", immediate: int | None = None, **reth: int) -> Datagram:
    base = {"va": 0x10000, "r_key": 0, "dma_length": 4}
    headers: list[Any] = [Meth(), Tseth(5), Reth(**{**base, **reth})]
    opcode = Opcode.WRITE_ONLY
    if immediate is not None:
        opcode = Opcode.WRITE_ONLY_IMM
        headers.append(Immdt(immediate))
    return Datagram(A, 1, message(Bth(opcode, dqp=QPNS[B], psn=psn, a=1), *headers, payload=data))


def answer(channel: Channel, datagram: Datagram) -> Any:
    before = len(channel.sent)
    channel.deliver(B, [datagram])
    return [sent for sent in channel.sent[before:] if sent.message.bth.opcode != Opcode.ACKNOWLEDGE]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r_key": 1}, NackReason.UNEXP_EVENT),
        ({"va": 0x10000 - 1}, NackReason.UNEXP_EVENT),
        ({"va": 0}, NackReason.UNEXP_EVENT),
        ({"va": 0x10000 + 4096 - 3}, NackReason.UNEXP_EVENT),
        ({"va": 0x10000 + 4096}, NackReason.UNEXP_EVENT),
        ({"va": 2**64 - 1}, NackReason.UNEXP_EVENT),
        ({"dma_length": 3}, NackReason.UNEXP_EVENT),
        ({"psn": 128}, NackReason.PSN_OOR_WINDOW),
        ({"psn": 0x7FFFFF}, NackReason.PSN_OOR_WINDOW),
    ],
)
def test_refused_writes_change_no_memory(changes: dict[str, Any], reason: NackReason) -> None:
    channel = Channel(always, QpSettings(64, mpr=128))
    (sent,) = answer(channel, arriving(**{"r_key": channel.keys[B], **changes}))
    neth = sent.message.need(Neth)
    assert (neth.nack_reason, neth.nack_psn, sent.message.bth.dqp) == (reason, changes.get("psn", 0), QPNS[A])
    assert channel.inside(B) == bytes(4096)


@pytest.mark.parametrize("psn", [0xFFFFFF, 0xFFFF00, 0xFF7F00, 0x800001, 0x800000])
def test_stale_writes_change_no_memory(psn: int) -> None:
    """Just before the first PSN, so far before that a SACK cannot say how far, and as far as 24 bits go."""
    channel = Channel(always, QpSettings(64, mpr=128))
    (sent,) = answer(channel, arriving(psn, b"evil", r_key=channel.keys[B]))
    seth = sent.message.need(Seth)
    assert (seth.cack_psn, seth.bitmap) == (0xFFFFFF, 0) and channel.inside(B) == bytes(4096)
    assert seth.ack_psn_offset == (psn - 0xFFFFFF if psn >= 0xFF7FFF else 0)


VAS = st.one_of(st.integers(0, 2**64 - 1), st.integers(0x10000 - 70, 0x10000 + 70), st.integers(0x10F00, 0x11100))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(sorted(WRITE_OPCODES)).flatmap(messages), VAS), max_size=10), st.booleans())
def test_who_knows_the_key_still_writes_inside_the_region_only(writes: list[tuple[Message, int]], last: bool) -> None:
    """Any write but those that fit: at any address, with any PSN, length and flags."""
    channel = Channel(always, QpSettings(64, mpr=128))
    for content, va in writes:
        reth = content.need(Reth)
        size = len(content.payload)
        if size <= reth.dma_length and 0x10000 <= va <= 0x11000 - size:
            va = 0x11001 - size if last else 0x10000 - 1
        headers = [h._replace(va=va, r_key=channel.keys[B]) if isinstance(h, Reth) else h for h in content.headers]
        bth = content.bth._replace(dqp=QPNS[B])
        channel.deliver(B, [Datagram(A, 1, Message(bth, tuple(headers), content.payload))])
        assert channel.inside(B) == bytes(4096)


@pytest.mark.parametrize("changes", [{}, {"va": 0x10000 + 4096 - 4}, {"psn": 127}])
def test_writes_just_inside_are_placed(changes: dict[str, Any]) -> None:
    channel = Channel(always, QpSettings(64, mpr=128))
    (sent,) = answer(channel, arriving(**{"r_key": channel.keys[B], **changes}))
    assert sent.message.bth.opcode == Opcode.SACK
    start = changes.get("va", 0x10000) - 0x10000
    assert channel.inside(B)[start : start + 4] == b"data"


def test_sack_of_gaps_and_duplicates() -> None:
    """PSNs 0, 2, 5 have come, then 2 again with other content: nothing is written twice."""
    channel = Channel(always, QpSettings(64, mpr=128))
    for psn in (0, 2, 5):
        (sent,) = answer(channel, arriving(psn, r_key=channel.keys[B]))
    seth, state = sent.message.need(Seth), sent.message.need(CcState)
    assert (seth.cack_psn, seth.ack_psn_offset, seth.acked(), seth.entropy) == (0, 5, [2, 5], 1)
    assert (state.tx_timestamp, state.ooo_count) == (5, 2)
    assert state.rcvd_bytes == -(-3 * (14 + 124 + 4 + 4) // 256)  # three frames of 146 bytes, in units of 256
    (sent,) = answer(channel, arriving(2, b"evil", r_key=channel.keys[B]))
    assert sent.message.need(Seth).ack_psn_offset == 2 and channel.inside(B)[:4] == b"data"
    (sent,) = answer(channel, arriving(0, b"evil", r_key=channel.keys[B]))
    assert sent.message.need(Seth).ack_psn_offset == 0 and channel.inside(B)[:4] == b"data"
    assert channel.counters(B)[1]["duplicates"] == 2


def test_sacks_report_the_trigger_and_all_since_the_oldest_gap_in_turn() -> None:
    """0 is missing, 100 to 299 come: one SACK has its trigger, the next 64 PSNs after those of the last but one."""
    channel = Channel(always, QpSettings(64, mpr=384))
    walk = []
    for psn in range(100, 300):
        (sent,) = answer(channel, arriving(psn, r_key=channel.keys[B]))
        seth = sent.message.need(Seth)
        base = (seth.cack_psn + seth.sack_offset) % (1 << 24)
        assert (seth.cack_psn + seth.ack_psn_offset) % (1 << 24) == psn
        assert set(seth.acked()) == set(range(max(base, 100), min(base + 64, psn + 1)))
        if psn % 2:
            walk.append((psn, base))
        else:
            assert base == psn - 47
    expected = 0
    for psn, base in walk:
        assert base == (expected if expected <= psn else 0)
        expected = base + 64


def test_probes_hear_of_all_that_came_since_the_oldest_gap() -> None:
    """Nothing else may tell of it: two packets call for no SACK, and after a trim the next ones may all be cut."""
    channel = Channel(always, QpSettings(64, mpr=384))
    for psn in (1, 70, 200):
        answer(channel, arriving(psn, r_key=channel.keys[B]))
    heard: set[int] = set()
    for _ in range(4):
        (sent,) = answer(channel, Datagram(A, 1, message(Bth(Opcode.PROBE, dqp=QPNS[B]), Peth())))
        heard |= set(sent.message.need(Seth).acked())
    assert heard == {1, 70, 200}


def test_lost_sacks_blame_no_path_that_carried_its_packets() -> None:
    """One EV of four swallows data, and for a while no SACK comes back. What the others carried meanwhile is reported
    before it times out, so the dead one alone is left."""
    options = QpSettings(64, 40_000, 1024, 400_000, 25)
    paths = {"active": 4, "ev_min_active": 1, "probe_interval_ns": 50_000_000}
    quiet = range(40_000, 160_000)

    def fate(datagram: Datagram) -> str:
        if datagram.is_data:
            return "lose" if channel.now_ns >= 40_000 and datagram.entropy == 1 else "pass"
        return "lose" if channel.now_ns in quiet and datagram.peer == A else "pass"

    channel = Channel(fate, options, memory_bytes=200_000, **paths)
    for part in range(100):  # bit by bit: it goes on arriving when SACKs do
        channel.run(until_ns=part * 5_000)
        channel.now_ns = max(channel.now_ns, part * 5_000)
        channel.write(A, part, payload(2000, part), part * 2000)
    channel.run(until_ns=2_000_000)
    profile = channel.endpoints[A].pairs[QPNS[A]].requestor.paths
    assert [profile.state(ev) for ev in FABRIC.evs(A, B)].count(EvState.ASSUMED_BAD) == 1
    assert profile.state(1) is EvState.ASSUMED_BAD
    assert channel.inside(B) == b"".join(payload(2000, part) for part in range(100))


def test_an_open_gap_does_not_fill_the_window_with_what_has_arrived() -> None:
    """One packet stays away for long; everything behind it is reported all the same and keeps the window moving."""
    channel = Channel(
        one_bad(3, "lose", 50), QpSettings(64, 3000, timeout_ns=400_000, retries=60), memory_bytes=60_000
    )
    channel.write(A, 0, payload(60_000), 0)
    channel.run(until_ns=4_000_000)
    assert len({datagram.message.bth.psn for datagram in channel.sent if datagram.is_data}) == -(-60_000 // 64)
    channel.run()
    assert channel.inside(B) == payload(60_000)


def test_an_early_ask_is_answered_again_when_its_gap_closes() -> None:
    """Packets that did not ask: 0 and 1 come after 2, which did."""
    channel = Channel(always, SMALL)

    def quiet(psn: int) -> Datagram:
        datagram = arriving(psn, r_key=channel.keys[B])
        bth = datagram.message.bth._replace(a=0)
        return datagram._replace(message=datagram.message._replace(bth=bth))

    assert [len(answer(channel, arriving(2, r_key=channel.keys[B])))] == [1]
    assert answer(channel, quiet(1)) == []
    (sent,) = answer(channel, quiet(0))
    assert sent.message.need(Seth).cack_psn == 2
    assert answer(channel, quiet(3)) == []


def test_immediates_wait_for_what_was_sent_before_and_are_limited() -> None:
    channel = Channel(always, QpSettings(64, mpr=128, wimm_max=2))
    for psn, expected in ((3, []), (1, []), (4, []), (0, [11]), (2, [11, 13])):
        immediate = None if psn in (0, 2) else 10 + psn
        sent = answer(channel, arriving(psn, immediate=immediate, r_key=channel.keys[B]))
        assert channel.done(B, Kind.IMMEDIATE) == expected
        if psn == 4:  # the third that waits
            assert sent[0].message.need(Neth).nack_reason == NackReason.UNEXP_EVENT


def test_a_write_without_rights_ends_the_writer() -> None:
    channel = Channel(always, SMALL)
    channel.endpoints[A].write(QPNS[A], 5, b"data", 0x10000, 0xBAD)
    channel.run()
    assert channel.completions[A] == [Completion(QPNS[A], Kind.WRITE, 5, Status.REMOTE_ERROR)]
    assert channel.inside(B) == bytes(4096)


def test_unregistered_memory_is_out_of_reach() -> None:
    channel = Channel(always, SMALL)
    channel.endpoints[B].unregister(channel.keys[B])
    (sent,) = answer(channel, arriving(r_key=channel.keys[B]))
    assert sent.message.need(Neth).nack_reason == NackReason.UNEXP_EVENT and channel.inside(B) == bytes(4096)


def test_probe_answer() -> None:
    channel = Channel(always, SMALL)
    probe = message(Bth(Opcode.PROBE, dqp=QPNS[B]), Peth(probe_id=0xFEDC, tx_timestamp=77))
    (sent,) = answer(channel, Datagram(A, 0x10001, probe, ce=True))
    seth = sent.message.need(Seth)
    assert (seth.pr, seth.probe_id, seth.m, seth.entropy) == (1, 0xFEDC, EcnMark.SKIP_ONCE, 0x10001)
    assert sent.message.need(CcState).tx_timestamp == 77 and seth.cack_psn == 0xFFFFFF


def test_what_belongs_to_nobody_is_counted() -> None:
    channel = Channel(always, SMALL)
    good = arriving(r_key=channel.keys[B])
    stranger = good._replace(peer=1)
    nowhere = good._replace(message=good.message._replace(bth=good.message.bth._replace(dqp=9)))
    lost = Datagram(A, 0, message(Bth(Opcode.ENDPOINT_RESPONSE, dqp=QPNS[B]), Eeth()))
    cut = Datagram(A, 0, message(Bth(Opcode.PROBE, dqp=QPNS[B]), Peth()), trimmed=True)
    request = Datagram(A, 0, message(Bth(Opcode.ENDPOINT_REQUEST, dqp=2), Erth(port_status_mask=1)), trimmed=True)
    unknown = request._replace(peer=1, trimmed=False)
    for datagram in (stranger, nowhere, lost, cut, request, unknown):
        assert answer(channel, datagram) == []
    assert channel.endpoints[B].counters == {
        "unknown queue pair": 2,
        "not handled": 1,
        "trimmed control": 2,
        "unknown peer": 1,
    }
    assert channel.inside(B) == bytes(4096)


# Hostile peers.


def strike(channel: Channel, host: int, content: Message, ce: bool, trimmed: bool, dqp: int | None = None) -> None:
    """A message in the peer's name; only the key it cannot know is wrong."""
    reth = content.get(Reth)
    assert reth is None or reth.r_key != channel.keys[host]
    bth = content.bth._replace(dqp=QPNS[host] if dqp is None else dqp)
    channel.deliver(host, [Datagram(A if host == B else B, 1, content._replace(bth=bth), ce, trimmed)])


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(messages(), st.booleans(), st.booleans()), max_size=12), st.data())
def test_hostile_packets_change_no_memory_and_stop_nobody(hostile: list[Any], data: st.DataObject) -> None:
    """Any message to the right queue pair, before and after a transfer."""
    channel = Channel(always, SMALL)
    first = data.draw(st.integers(0, len(hostile)))
    for content, trimmed, ce in hostile[:first]:
        for host in HOSTS:
            strike(channel, host, content, ce, trimmed)
    channel.run(until_ns=1_000_000)
    assert channel.inside(A) == channel.inside(B) == bytes(4096)
    channel.write(A, 0, payload(1000), 0)
    channel.write(A, 1, payload(100), 1000, immediate=5)
    channel.run(until_ns=channel.now_ns + 2_000_000_000)
    assert channel.inside(B)[:1000] == payload(1000) and channel.inside(B)[1000:1100] == payload(100)
    assert channel.inside(A) == bytes(4096)
    assert channel.done(A) == [0, 1] and channel.done(B, Kind.IMMEDIATE) == [5]
    for content, trimmed, ce in hostile[first:]:
        for host in HOSTS:
            strike(channel, host, content, ce, trimmed)
    assert channel.inside(B)[1100:] == bytes(2996)


BLIND = st.sampled_from(
    [*WRITE_OPCODES, Opcode.NACK, Opcode.PROBE, Opcode.ENDPOINT_REQUEST, Opcode.ENDPOINT_RESPONSE]
).flatmap(messages)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), BLIND, st.integers(0, 120), st.booleans(), st.booleans()), max_size=12),
    st.sampled_from([0, 0xFFFFF0]),
)
def test_blind_forgeries_during_a_transfer_stop_nobody(hostile: list[Any], psn: int) -> None:
    """Writes with a wrong key, NACKs of any reason, probes and endpoint requests, at PSNs in flight.

    Not acknowledgements: those are believed, as in RoCE.
    """
    channel = Channel(always, SMALL, psn=psn)
    channel.now_ns = 1_000_000  # not 0: a forger may guess that
    channel.write(A, 0, payload(4000), 0)
    channel.write(A, 1, payload(96), 4000, immediate=5)
    for wait, content, number, trimmed, ce in sorted(hostile, key=lambda each: each[0]):
        channel.run(until_ns=1_000_000 + wait * 3000)
        target = content.bth._replace(psn=psn + number & 0xFFFFFF)
        headers = [h._replace(nack_psn=target.psn) if isinstance(h, Neth) else h for h in content.headers]
        dqp = 2 if content.bth.opcode in (Opcode.ENDPOINT_REQUEST, Opcode.ENDPOINT_RESPONSE) else None
        for host in HOSTS:
            strike(channel, host, Message(target, tuple(headers), content.payload), ce, trimmed, dqp)
    channel.run(until_ns=2_000_000_000)
    assert channel.inside(B) == payload(4000) + payload(96) and channel.inside(A) == bytes(4096)
    assert channel.done(A) == [0, 1] and channel.done(B, Kind.IMMEDIATE) == [5]
    assert all(completion.status is Status.OK for completion in channel.completions[A])


def test_a_forged_write_with_a_wrong_key_does_not_end_the_writer() -> None:
    """The responder refuses it and says so to the real writer, who knows from EV and stamp that it sent no such."""
    channel = Channel(always, SMALL)
    channel.write(A, 0, payload(1024), 0)
    channel.deliver(A, [])
    channel.now_ns += 5_000
    real = next(d for d in channel.sent if d.message.bth.psn == 3)
    forged = arriving(3, b"evil", r_key=0xBAD)._replace(entropy=real.entropy)
    (nack,) = answer(channel, forged)
    assert nack.message.need(Neth).nack_reason == NackReason.UNEXP_EVENT
    channel.run()
    requestor, responder = channel.counters(A)[0], channel.counters(B)[1]
    assert channel.completions[A] == [Completion(QPNS[A], Kind.WRITE, 0)]
    assert requestor["stale nacks"] == responder["UNEXP_EVENT"] == 1
    assert channel.inside(B)[:1024] == payload(1024)


def test_mistakes_name_the_fix() -> None:
    endpoint = Endpoint(random.Random(1))
    with pytest.raises(MrcError, match="connect it first"):
        endpoint.write(5, 0, b"", 0, 0)
    with pytest.raises(MrcError, match="register"):
        endpoint.unregister(5)
    endpoint.connect(Identity(5, 1, 6), [0, 1], lambda ev: 0)
    for qpn in (5, 2):
        with pytest.raises(MrcError, match="reserved"):
            endpoint.connect(Identity(qpn, 1, 6), [0], lambda ev: 0)
