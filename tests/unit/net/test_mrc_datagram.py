"""What a host keeps of the fronts of frames changes no byte and no verdict: against the codec that keeps nothing."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv6Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.errors import MrcError
from net.mrc import datagram as module
from net.mrc.datagram import Addressing, Burst, Datagram
from net.mrc.frame import DSCP, Frame, Message, decode_frame, encode_frame, message, trim
from net.mrc.wire import Bth, Meth, Opcode, Reth, Tseth
from net.srv6 import Plan
from net.topology import Topology
from tests.unit.net.mrc_cases import messages

PLAN = Plan(Topology(planes=2, t0_per_plane=2, t1_per_plane=2, hosts_per_t0=2))
EVS = [0, 1, 0x10000, 0x10001]
SENT = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from(EVS), messages())


def write(size: int = 300) -> Message:
    return message(Bth(Opcode.WRITE_ONLY, dqp=7), Meth(), Tseth(9), Reth(0, 1, size), payload=b"\xaa" * size)


def plainly(host: Addressing, data: bytes) -> Datagram:
    return host.datagram(decode_frame(data))


def verdict(decode: Callable[[Addressing, bytes], Datagram], host: Addressing, data: bytes) -> Datagram | None:
    """None for a frame that is refused; which of several reasons is found first does not matter."""
    try:
        return decode(host, data)
    except MrcError:
        return None


@settings(deadline=None, max_examples=60)
@given(st.lists(SENT, min_size=1, max_size=6), st.data())
def test_the_same_bytes_and_datagrams(sent: list[tuple[int, int, Message]], data: st.DataObject) -> None:
    sender = Addressing(PLAN, 0)
    hosts = {host: Addressing(PLAN, host) for host in (1, 2, 3)}
    for peer, ev, content in sent * 2:  # the second time from memory
        datagram = Datagram(peer, ev, content)
        frame = sender.encode(datagram)
        assert frame.hex() == encode_frame(sender.frame(datagram)).hex()
        host = hosts[peer]
        assert host.decode(frame) == host.decode(memoryview(frame)) == datagram._replace(peer=0)
        damaged = bytearray(frame)
        damaged[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        size = data.draw(st.integers(len(frame) - 60, len(frame)))
        other = bytes(damaged[:size]) + bytes(data.draw(st.integers(0, 9)))
        assert verdict(Addressing.decode, host, other) == verdict(plainly, host, other)


def test_marks_and_cuts_are_told_apart() -> None:
    sender, host = Addressing(PLAN, 0), Addressing(PLAN, 3)
    frame = sender.frame(Datagram(3, 1, write()))
    for _ in range(2):
        marked = host.decode(encode_frame(frame._replace(ecn=3)))
        assert marked.ce and not marked.trimmed
        assert not host.decode(encode_frame(frame)).ce
        for code_point, last_hop in ((DSCP.trimmed, False), (DSCP.trimmed_lasthop, True)):
            cut = host.decode(trim(encode_frame(frame), code_point))
            assert cut.trimmed and cut.last_hop == last_hop and cut.message.payload == b""


def test_sent_again_has_a_code_point_of_its_own() -> None:
    sender = Addressing(PLAN, 0)
    content = write()
    again = content._replace(bth=content.bth._replace(rtx=1))
    classes = [decode_frame(sender.encode(Datagram(3, 1, each))).dscp for each in (content, again) * 2]
    assert classes == [DSCP.trimmable, DSCP.trimmable_retx] * 2


def test_strangers_are_refused_each_time() -> None:
    host = Addressing(PLAN, 3)
    own = PLAN.host_address(3, 0).packed
    for src, dst in ((IPv6Address("fd01::1").packed, own), (PLAN.host_address(0, 0).packed, bytes(16))):
        data = encode_frame(Frame(src, dst, 1, write(), outer_src=src, outer_dst=own))
        for _ in range(2):
            with pytest.raises(MrcError, match="not from a host of this plan"):
                host.decode(data)


def test_whatever_becomes_of_a_flow_label_an_answer_finds_its_way() -> None:
    """No ICRC covers it (RoCEv2 masks it), so a damaged one must be seen to name no path, or a path there is."""
    sender, host = Addressing(PLAN, 0), Addressing(PLAN, 3)
    refused = 0
    for bit in range(20):
        data = bytearray(sender.encode(Datagram(3, 0x10001, write())))
        data[40 + 3 - bit // 8] ^= 1 << bit % 8
        try:
            arrived = host.decode(data)
        except MrcError as error:
            refused += "is no way from there" in error.message
        else:
            assert host.encode(Datagram(arrived.peer, arrived.entropy, write()))
    assert refused == 16  # of 20 bits, 16 are the EV's


def test_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_MAX", 8)
    sender, host = Addressing(PLAN, 0), Addressing(PLAN, 3)
    for size in range(0, 400, 4):
        datagram = Datagram(3, 1, write(size))
        assert host.decode(sender.encode(datagram)) == datagram._replace(peer=0)
        assert max(len(sender._fronts), len(host._arrived)) <= 8


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPU_EMU_MRC_FRONTS", "0")
    sender, host = Addressing(PLAN, 0), Addressing(PLAN, 3)
    datagram = Datagram(3, 1, write())
    assert host.decode(sender.encode(datagram)) == datagram._replace(peer=0)
    assert not sender._fronts and not host._arrived


@settings(deadline=None, max_examples=60)
@given(
    messages(Opcode.WRITE_MIDDLE),
    st.lists(st.sampled_from(EVS), min_size=1, max_size=5),
    st.integers(1, 70),
    st.sampled_from([7, 0xFFFFFE]),
)
def test_a_burst_is_its_datagrams(content: Message, evs: list[int], size: int, psn: int) -> None:
    bth, (meth, *_, reth), _ = content
    content = message(
        bth._replace(psn=psn), meth, Tseth(9), reth._replace(va=reth.va >> 1), payload=bytes(range(size))
    )
    content = content._replace(payload=memoryview(bytes(n & 0xFF for n in range(size * len(evs)))))
    burst = Burst(3, evs, content, size)
    datagrams = list(burst.datagrams())
    assert [datagram.entropy for datagram in datagrams] == evs
    for n, (_, _, one, *_) in enumerate(datagrams):
        assert one.bth.psn == psn + n & 0xFFFFFF and one.need(Reth).va == content.need(Reth).va + n * size
        assert one.payload == content.payload[n * size : n * size + size]
    sender = Addressing(PLAN, 0, ethernet={0: b"plane 0", 1: b"plane 1"})
    frames = list(sender.encode_burst(burst))
    assert [frame.hex() for frame in frames] == [sender.encode(datagram).hex() for datagram in datagrams]
    assert [frame[:7] for frame in frames] == [b"plane %d" % (ev >> 16) for ev in evs]
