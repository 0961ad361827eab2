"""Short cuts change nothing: bursts send what packets one by one would be, and what follows a middle packet straight
into memory leaves the same memory, counters and answers as the engine's ordinary way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.errors import MrcError
from net.mrc.datagram import Addressing, Burst, Datagram
from net.mrc.endpoint import Endpoint
from net.mrc.frame import DSCP, encode_frame, trim
from net.mrc.reception import Reception
from net.mrc.requestor import Identity, QpSettings
from net.srv6 import Plan
from net.topology import plane_of
from tests.unit.net.mrc_channel import ACTIONS, FABRIC, HOSTS, QPNS, Channel, always, fates

A, B = HOSTS
PMTU = 64
SWITCH = "DPU_EMU_MRC_BURSTS"


def payload(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(HOSTS), st.sampled_from([0, 64, 700, 1900]), st.booleans()), max_size=4),
    st.lists(st.sampled_from(ACTIONS), max_size=60),
    st.sampled_from([0, 0xFFFFFA]),
    st.sampled_from([3000, 7000]),
)
def test_bursts_are_the_same_packets(
    writes: list[tuple[int, int, bool]], actions: list[str], psn: int, window: int
) -> None:
    channels = []
    for switch in "01":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SWITCH, switch)
            channel = Channel(fates(actions), QpSettings(PMTU, window, 128, 400_000, 25), psn=psn, memory_bytes=8000)
        offset = 0
        for number, (host, size, immediate) in enumerate(writes):
            channel.write(host, number, payload(size, number), offset, number if immediate else None)
            offset += size
        channel.run()
        channels.append(channel)
    one, other = channels
    assert one.sent == other.sent and one.completions == other.completions
    assert [one.counters(host) for host in HOSTS] == [other.counters(host) for host in HOSTS]


def test_a_long_write_goes_in_bursts() -> None:
    channel = Channel(always, QpSettings(PMTU, 20_000))
    channel.write(A, 0, payload(4000), 0)
    items = list(channel.endpoints[A].run(0))
    assert sum(len(item.entropies) for item in items if isinstance(item, Burst)) > 50


class Receiver:
    """Host B with ``memory_bytes`` of memory, its frames read by a Reception that takes short cuts or not."""

    def __init__(self, options: QpSettings, memory_bytes: int, follows: bool) -> None:
        self.endpoint = Endpoint(random.Random(B))
        self.memory = bytearray(b"\xc5" * 64 + bytes(memory_bytes) + b"\xc5" * 64)
        self.key = self.endpoint.register(memoryview(self.memory)[64:-64], va=0)
        self.endpoint.connect(Identity(QPNS[B], A, QPNS[A]), FABRIC.evs(B, A), plane_of, options)
        self.reception = Reception(Addressing(Plan(FABRIC), B), self.endpoint, follows=follows)
        self.engine_heard = 0

    def hear(self, now_ns: int, frames: list[bytes]) -> list[Datagram]:
        """A step, with everything in one buffer that is used again and again."""
        buffer = memoryview(bytearray(1 << 12))
        left = iter(frames)

        def read() -> memoryview | None:
            frame = next(left, None)
            if frame is None:
                return None
            buffer[: len(frame)] = frame
            buffer[len(frame) :] = bytes(len(buffer) - len(frame))
            return buffer[: len(frame)]

        def counted() -> Iterator[Datagram]:
            for datagram in self.reception.datagrams(read):
                self.engine_heard += 1
                yield datagram

        answers = list(self.endpoint.run(now_ns, counted()))
        assert all(isinstance(answer, Datagram) for answer in answers)
        return [answer for answer in answers if isinstance(answer, Datagram)]

    def state(self) -> tuple[Any, ...]:
        """All that there is but what belongs to the endpoint."""
        own = vars(self.endpoint.pairs[QPNS[B]].responder).items()
        responder = {name: value for name, value in own if name not in ("_regions", "_way_back")}
        endpoint = self.endpoint
        return self.memory, responder, self.reception.refused, endpoint.counters, endpoint.take_completions()


def frames_of(options: QpSettings, key: int, sizes: list[int]) -> list[bytes]:
    """What host A sends for writes of these sizes, one behind the other, with nothing heard in return."""
    wire, sender = Addressing(Plan(FABRIC), A), Endpoint(random.Random(1))
    sender.connect(Identity(QPNS[A], B, QPNS[B]), FABRIC.evs(A, B), plane_of, options)
    offset = 0
    for number, size in enumerate(sizes):
        sender.write(QPNS[A], number, payload(size, number), offset, key, number if number % 2 else None)
        offset += size
    return [wire.encode(datagram) for datagram in sender.step(1000).send]


CHANGES = ("keep", "keep", "keep", "lose", "twice", "swap", "mark", "trim", "damage", "alter")


def changed(frames: list[bytes], changes: list[tuple[int, str, int]]) -> list[bytes]:
    """With something done to some of them; ``alter``: a bit of the message is another one, under a right ICRC."""
    wire = Addressing(Plan(FABRIC), B)
    for place, change, bit in changes:
        if not frames:
            break
        at = place % len(frames)
        frame = frames[at]
        damaged = bytearray(frame)
        damaged[bit % len(frame)] ^= 1 << bit % 8
        if change == "lose":
            del frames[at]
        elif change == "twice":
            frames.insert(bit % len(frames), frame)
        elif change == "swap":
            frames[at], frames[at - 1] = frames[at - 1], frames[at]
        elif change == "mark":
            frames[at] = bytes([frame[0], frame[1] | 0x30]) + frame[2:]
        elif change == "trim":
            frames[at] = trim(frame, DSCP.trimmed)
        elif change == "damage":
            frames[at] = bytes(damaged)
        elif change == "alter":
            frames[at] = altered(wire, frame, bit)
    return frames


def altered(wire: Addressing, frame: bytes, bit: int) -> bytes:
    """Another value in one field of a write."""
    try:
        datagram = wire.decode(frame)
    except MrcError:
        return frame
    bth, headers, _ = datagram.message
    if datagram.trimmed or len(headers) < 3:
        return frame
    meth, stamp, reth, *rest = headers
    other = [
        (bth._replace(a=1), meth, reth),
        (bth._replace(rtx=1), meth, reth),
        (bth._replace(dqp=bth.dqp ^ 1), meth, reth),
        (bth._replace(psn=bth.psn ^ 1 << bit % 24), meth, reth),
        (bth, meth._replace(msn=meth.msn ^ 1), reth),
        (bth, meth, reth._replace(va=reth.va ^ 1 << bit % 64)),
        (bth, meth, reth._replace(r_key=reth.r_key ^ 1)),
        (bth, meth, reth._replace(dma_length=bit % 100)),
    ][bit % 8]
    content = datagram.message._replace(bth=other[0], headers=(other[1], stamp, other[2], *rest))
    back = Addressing(Plan(FABRIC), A)
    return encode_frame(back.frame(Datagram(B, datagram.entropy, content)))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from([0, 64, 130, 640, 1900]), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 99), st.sampled_from(CHANGES), st.integers(0, 9999)), max_size=5),
    st.lists(st.integers(1, 20), max_size=5),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([100, 1000, 8000]),
)
def test_the_short_cut_is_the_ordinary_way(
    sizes: list[int], changes: list[tuple[int, str, int]], steps: list[int], sack_packets: int, memory_bytes: int
) -> None:
    options = QpSettings(PMTU, 1 << 20, 128, 400_000, 25, 32, sack_packets)
    compare(options, memory_bytes, sizes, changes, steps)


@pytest.mark.parametrize("change", CHANGES[2:])
def test_every_fifth_of_a_long_write(change: str) -> None:
    """So that whatever is unusual has been seen before on the same way; byte 140 is in the payload."""
    compare(QpSettings(PMTU, 1 << 20, sack_packets=16), 6400, [6400], [(n, change, 140) for n in range(8, 90, 5)], [])


def compare(
    options: QpSettings, memory_bytes: int, sizes: list[int], changes: list[tuple[int, str, int]], steps: list[int]
) -> None:
    """Two receivers hear the same, so many frames a step."""
    plain, quick = (Receiver(options, memory_bytes, follows) for follows in (False, True))
    frames = changed(frames_of(options, plain.key, sizes), changes)
    assert plain.key == quick.key
    now_ns = 2000
    for count in [*steps, len(frames)]:
        now, frames = frames[:count], frames[count:]
        now_ns += 200_000
        assert plain.hear(now_ns, now) == quick.hear(now_ns, now)
        assert plain.state() == quick.state()
    assert quick.memory[:64] == b"\xc5" * 64 == quick.memory[-64:]


def test_most_of_a_long_write_never_reaches_the_engine() -> None:
    options = QpSettings(PMTU, 1 << 20, sack_packets=16, sack_bytes=1 << 20)
    receiver = Receiver(options, 6400, True)
    receiver.hear(2000, frames_of(options, receiver.key, [6400]))
    assert receiver.memory[64:-64] == payload(6400, 0)
    assert receiver.engine_heard <= 2 + 100 // 16 + 4  # both ends, every SACK, every way once


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    options = QpSettings(PMTU, 1 << 20)
    receiver = Receiver(options, 6400, True)
    receiver.hear(2000, frames_of(options, receiver.key, [6400]))
    assert receiver.memory[64:-64] == payload(6400, 0) and receiver.engine_heard == 100
