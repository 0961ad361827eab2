"""The fabric's eBPF programs: a port's queue, a whole switch, and what counts flows at a host.

``queue``    egress of every port: faults, then what net.switch.model says: accept, mark, trim, drop; the class that
             HTB serves it in. With the kernel's own seg6 before it, that is the default engine.
``switch``   ingress of every switch port, engine "ebpf": shift, look-up, the *outgoing* port's queue, redirect.
``arrive``   ingress of every host port: counts flows, and keeps MRC from the host's kernel, which has no use for it.

Trimming on the way out leaves the qdisc with the old length, so a trimmed packet is sent to its own port once more
(``MARK_SENT`` tells that it has been here). Use: see net.fabric. Errors: as net.ebpf.kernel.
Source: net.switch.model; RFC 8200 section 3, RFC 9800 section 4.1.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from net.ebpf.program import PSEUDO_MAP_FD, Helper, Program, SkBuff
from net.mrc.frame import ETHERNET_BYTES, IPV6_BYTES, NEXT_IPV6
from net.mrc.wire import NEXT_UDP, UDP_PORT
from net.switch.model import Cause
from net.switch.ports import ALWAYS, PROBABILITIES, RATE_SHIFT, Fault, cause_offset, fault_offset, offset

TC_OK, TC_DROP = 0, 2
MARK_SENT = 0x6D726301
"""skb->mark of a packet that its port's queue has accepted; scrubbed when it leaves the namespace."""
MARK_LIFTED = 0x6D726302
"""skb->mark of a packet that comes back from Python: no fault meets it again, and it is not lifted again."""

HTB_MAJOR = 1
PRIORITY_CLASS, DATA_CLASS = 1, 2

LIFT_WINDOW_BYTES = 160
LIFT_HEAD_BYTES = 16
LIFT_ROOM_BYTES = 1 << 14
FLOW_KEY_BYTES, FLOW_VALUE_BYTES = 40, 40
FIB_KEY_BYTES, FIB_VALUE_BYTES = 8, 24

_ETHERTYPE_IPV6 = 0xDD86  # as skb->protocol shows it on a little-endian machine
_HEADER_BYTES = ETHERNET_BYTES + IPV6_BYTES
_PAD = 2  # Ethernet's 14 bytes stand at 2, so IPv6 is aligned at 16
_IP = 16
_STAND_IN = 0x7E000000
_LOAD_64 = 0x18
_ADVANCE_TRIES = 4  # another CPU on the same port at the same time is rare, three of them do not happen


class Verb(enum.IntEnum):
    """A row of the switch program's table."""

    END = 1
    FORWARD = 2


class Why(enum.IntEnum):
    """Why a packet was lifted to Python."""

    MATCH = 1
    REORDER = 2


@dataclass(frozen=True, slots=True)
class Maps:
    """Descriptors of what the programs share.

    first_ifindex: the interface index of port 0. block: the first 32 bits of every carrier, as they lie in memory.
    """

    ports: int
    matches: int
    ring: int
    fib: int
    flows: int
    first_ifindex: int
    block: int


def code(build: Callable[[Maps], bytes], maps: Maps) -> bytes:
    """The program of ``build`` for these maps; compiled once per process: maps differ in their descriptors only."""
    names = ("ports", "matches", "ring", "fib", "flows")
    stand_ins = {name: _STAND_IN + number for number, name in enumerate(names)}
    instructions = bytearray(_compiled(build, replace(maps, **stand_ins)))
    for place in range(0, len(instructions), 8):
        operation, registers, _, value = struct.unpack_from("=BBhi", instructions, place)
        if operation == _LOAD_64 and registers >> 4 == PSEUDO_MAP_FD:
            struct.pack_into("=i", instructions, place + 4, getattr(maps, names[value - _STAND_IN]))
    return bytes(instructions)


@functools.cache
def _compiled(build: Callable[[Maps], bytes], maps: Maps) -> bytes:
    return build(maps)


def queue(maps: Maps) -> bytes:
    """The egress program."""
    p = Program("queue")
    number = p.sub(p.context(SkBuff.ifindex), maps.first_ifindex)
    record = p.lookup(maps.ports, p.key32(number))
    with p.if_(p.eq(record, 0)):
        p.ret(TC_OK)
    with p.if_(p.eq(p.context(SkBuff.mark), MARK_SENT)):
        p.ret(TC_OK)
    header = _header(p)
    port = _Port(p, maps, record, number, header, p.context(SkBuff.ifindex), redirects=False)
    port.faults(p.ne(p.context(SkBuff.mark), MARK_LIFTED))
    port.offer()
    return p.compile()


def switch(maps: Maps) -> bytes:
    """The ingress program of engine "ebpf"."""
    p = Program("switch")
    came = p.lookup(maps.ports, p.key32(p.sub(p.context(SkBuff.ifindex), maps.first_ifindex)))
    with p.if_(p.eq(came, 0)):
        p.ret(TC_OK)
    header = _header(p)
    with p.if_(p.ne(p.load(header, _IP + 24, 32), maps.block)):
        p.ret(TC_OK)
    key = p.slot(FIB_KEY_BYTES)
    p.store(key, p.load(came, offset("node")), 0, 32)

    def look_up() -> Any:
        p.store(key, p.load(header, _IP + 28, 16), 4, 16)
        found = p.lookup(maps.fib, key)
        with p.if_(p.eq(found, 0)):
            p.count(came, fault_offset(Fault.UNROUTED))
            p.ret(TC_DROP)
        return found

    with p.if_(p.eq(p.load(look_up(), 0, 32), int(Verb.END))):
        for place in range(_IP + 28, _IP + 38, 2):
            p.store(header, p.load(header, place + 2, 16), place, 16)
        p.store(header, 0, _IP + 38, 16)
    row = look_up()
    hops = p.load(header, _IP + 7, 8)
    goes_on = p.both(p.eq(p.load(row, 0, 32), int(Verb.FORWARD)), p.gt(hops, 1))
    with p.if_(p.eq(goes_on, 0)):
        p.count(came, fault_offset(Fault.UNROUTED))
        p.ret(TC_DROP)
    p.store(header, p.sub(hops, 1), _IP + 7, 8)
    for place in range(0, 12, 2):
        p.store(header, p.load(row, 8 + place, 16), _PAD + place, 16)
    with p.if_(p.ne(p.skb_call(Helper.SKB_STORE_BYTES, 0, p.at(header, _PAD), _HEADER_BYTES, 0), 0)):
        p.ret(TC_DROP)
    out = p.load(row, 4, 32)
    number = p.sub(out, maps.first_ifindex)
    record = p.lookup(maps.ports, p.key32(number))
    with p.if_(p.eq(record, 0)):
        p.ret(TC_DROP)
    port = _Port(p, maps, record, number, header, out, redirects=True)
    port.faults(p.eq(0, 0))
    port.offer()
    return p.compile()


def arrive(maps: Maps) -> bytes:
    """The ingress program of host ports. Packet sockets have seen the frame before it runs."""
    p = Program("arrive")
    header = p.slot(112)  # IPv6 at 16, inner IPv6 at 56, UDP at 96
    with p.if_(p.ne(p.context(SkBuff.protocol), _ETHERTYPE_IPV6)):
        p.ret(TC_OK)
    with p.if_(p.ne(p.skb_call(Helper.SKB_LOAD_BYTES, 0, p.at(header, _PAD), 102), 0)):
        p.ret(TC_OK)
    with p.if_(p.ne(p.load(header, _IP + 6, 8), NEXT_IPV6)):
        p.ret(TC_OK)
    inner = 56
    port = int.from_bytes(UDP_PORT.to_bytes(2, "big"), "little")
    mrc = p.both(p.eq(p.load(header, inner + 6, 8), NEXT_UDP), p.eq(p.load(header, 98, 16), port))
    key = p.slot(FLOW_KEY_BYTES)
    for place in range(0, 32, 8):
        p.store(key, p.load(header, inner + 8 + place), place)
    with p.if_(mrc):
        p.store(key, p.load(header, inner + 2, 16), 32, 16)  # the flow label's low half, then the source port
        p.store(key, p.load(header, 96, 16), 34, 16)
        p.store(key, 1, 36, 32)
    length, now = p.context(SkBuff.length), p.call(Helper.KTIME_GET_NS)
    traffic_class = _traffic_class(p, header)
    marked = p.select(p.eq(p.and_(traffic_class, 3), 3), 1, 0)
    outer = p.or_(p.shl(p.load(header, _IP + 4, 8), 8), p.load(header, _IP + 5, 8))
    within = p.or_(p.shl(p.load(header, inner + 4, 8), 8), p.load(header, inner + 5, 8))
    cut = p.select(p.lt(outer, p.add(within, 40)), 1, 0)
    words = (1, length, marked, cut)
    found = p.lookup(maps.flows, key)
    with p.if_else(p.ne(found, 0)) as (known, new):
        with known:
            for place, word in enumerate(words):
                p.count(found, 8 * place, word)
            p.store(found, now, 32)
        with new:
            first = p.slot(FLOW_VALUE_BYTES)
            for place, word in enumerate((*words, now)):
                p.store(first, word, 8 * place)
            p.call(Helper.MAP_UPDATE_ELEM, p.map(maps.flows), key, first, 0)
    p.ret(p.select(mrc, TC_DROP, TC_OK))
    return p.compile()


def _header(p: Program) -> Any:
    """Ethernet and IPv6 on the stack; what is not IPv6 passes untouched, multicast (of listener reports) does not."""
    with p.if_(p.ne(p.context(SkBuff.protocol), _ETHERTYPE_IPV6)):
        p.ret(TC_OK)
    header = p.slot(_PAD + _HEADER_BYTES)
    with p.if_(p.ne(p.skb_call(Helper.SKB_LOAD_BYTES, 0, p.at(header, _PAD), _HEADER_BYTES), 0)):
        p.ret(TC_OK)
    with p.if_(p.eq(p.load(header, _IP + 24, 8), 0xFF)):
        p.ret(TC_DROP)
    return header


def _traffic_class(p: Program, header: Any) -> Any:
    high, low = p.load(header, _IP, 8), p.load(header, _IP + 1, 8)
    return p.or_(p.shl(p.and_(high, 15), 4), p.shr(low, 4))


@dataclass(slots=True)
class _Port:
    """Code for one packet at the port it leaves by. ``out``: that interface."""

    p: Program
    maps: Maps
    record: Any
    number: Any
    header: Any
    out: Any
    redirects: bool

    def get(self, name: str) -> Any:
        return self.p.load(self.record, offset(name))

    def count(self, cause: Cause, size: Any) -> None:
        packets, size_bytes = cause_offset(cause)
        self.p.count(self.record, packets)
        self.p.count(self.record, size_bytes, size)

    def drop(self, cause: Cause) -> None:
        self.count(cause, self.p.context(SkBuff.length))
        self.p.ret(TC_DROP)

    def met(self, name: str) -> Any:
        """Whether chance has it."""
        p = self.p
        return p.lt(p.and_(p.call(Helper.GET_PRANDOM_U32), ALWAYS - 1), self.get(name))

    def faults(self, fresh: Any) -> None:
        """Down for every packet; the others for ``fresh`` ones."""
        p = self.p
        with p.if_(p.ne(self.get("down"), 0)):
            self.drop(Cause.DOWN)
        armed = self.get("lift")
        for name in PROBABILITIES:
            armed = p.or_(armed, self.get(name))
        with p.if_(p.both(fresh, p.ne(armed, 0))):
            with p.if_(self.met("loss")):
                self.drop(Cause.LOSS)
            with p.if_(p.ne(self.get("lift"), 0)):
                self._lift_if_matched()
            with p.if_(self.met("reorder")):
                p.count(self.record, fault_offset(Fault.REORDER))
                self._to_python(Why.REORDER)
            with p.if_(self.met("corrupt")):
                self._corrupt()

    def _lift_if_matched(self) -> None:
        p = self.p
        match = p.lookup(self.maps.matches, p.key32(self.number))
        with p.if_(p.ne(match, 0)):
            window = p.slot(LIFT_WINDOW_BYTES)
            left = p.minus_or_0(p.context(SkBuff.length), 1)
            size = p.add(p.select(p.lt(left, LIFT_WINDOW_BYTES - 1), left, LIFT_WINDOW_BYTES - 1), 1)
            p.skb_call(Helper.SKB_LOAD_BYTES, 0, window, size)
            wrong: Any = 0
            for place in range(0, LIFT_WINDOW_BYTES, 8):
                value, mask = p.load(match, place), p.load(match, LIFT_WINDOW_BYTES + place)
                wrong = p.or_(wrong, p.and_(p.xor(p.load(window, place), value), mask))
            with p.if_(p.eq(wrong, 0)):
                p.count(self.record, fault_offset(Fault.LIFT))
                self._to_python(Why.MATCH)

    def _to_python(self, why: Why) -> None:
        """Copies the frame into the ring and takes it off the way; with the ring full it goes on by itself."""
        p = self.p
        size = LIFT_HEAD_BYTES + LIFT_ROOM_BYTES
        room = p.pointer(p.call(Helper.RINGBUF_RESERVE, p.map(self.maps.ring), size, 0))
        with p.if_(p.ne(room, 0)):
            last = p.and_(p.sub(p.context(SkBuff.length), 1), LIFT_ROOM_BYTES - 1)
            p.store(room, self.number, 0, 32)
            p.store(room, int(why), 4, 32)
            p.store(room, p.add(last, 1), 8)
            p.skb_call(Helper.SKB_LOAD_BYTES, 0, p.at(room, LIFT_HEAD_BYTES), p.add(last, 1))
            p.call(Helper.RINGBUF_SUBMIT, room, 0)
            p.ret(TC_DROP)

    def _corrupt(self) -> None:
        """One bit behind the outer header changes, so the packet still arrives."""
        p = self.p
        length = p.context(SkBuff.length)
        with p.if_(p.gt(length, _HEADER_BYTES)):
            place = p.add(
                p.mod(p.and_(p.call(Helper.GET_PRANDOM_U32), ALWAYS - 1), p.sub(length, _HEADER_BYTES)), _HEADER_BYTES
            )
            byte = p.slot(8)
            p.skb_call(Helper.SKB_LOAD_BYTES, place, byte, 1)
            flipped = p.shl(1, p.and_(p.call(Helper.GET_PRANDOM_U32), 7))
            p.store(byte, p.xor(p.load(byte, 0, 8), flipped), 0, 8)
            p.skb_call(Helper.SKB_STORE_BYTES, place, byte, 1, 0)
            p.count(self.record, fault_offset(Fault.CORRUPT))

    def offer(self) -> None:
        """What PortQueue.offer does, and out."""
        p, header = self.p, self.header
        length, now = p.context(SkBuff.length), p.call(Helper.KTIME_GET_NS)
        traffic_class = _traffic_class(p, header)
        code_point, ecn = p.shr(traffic_class, 2), p.and_(traffic_class, 3)
        with p.if_(p.bit(self.get("priority_mask"), code_point)):
            self._accept_priority(now, length, Cause.PRIORITY_LIMIT)
            self.count(Cause.PRIORITY, length)
            self._forward(PRIORITY_CLASS, length)
        backlog = p.minus_or_0(self.get("finish_ns"), now)
        with p.if_(p.gt(backlog, self.get("limit_ns"))):
            self.drop(Cause.LIMIT)
        trim_size = self.get("trim_size")
        trimmable = p.bit(self.get("trimmable_mask"), code_point)
        with p.if_(p.both(p.gt(backlog, self.get("trim_ns")), trimmable, p.gt(length, trim_size))):
            self._accept_priority(now, trim_size, Cause.TRIM_LIMIT)
            self.count(Cause.TRIM, length)
            self._trim(trim_size, ecn)
            self._forward(PRIORITY_CLASS, trim_size, shorter=True)
        self._advance("finish_ns", now, length)
        marked = p.both(p.gt(backlog, self.get("ecn_ns")), p.ne(ecn, 0))
        with p.if_else(marked) as (mark, keep):
            with mark:
                p.store(header, p.or_(p.load(header, _IP + 1, 8), 0x30), _IP + 1, 8)
                p.skb_call(Helper.SKB_STORE_BYTES, 14, p.at(header, _IP), 2, 0)
                self.count(Cause.ECN, length)
            with keep:
                self.count(Cause.DATA, length)
        self._forward(DATA_CLASS, length)

    def _accept_priority(self, now: Any, size: Any, full: Cause) -> None:
        p = self.p
        waiting = p.minus_or_0(self.get("priority_finish_ns"), now)
        with p.if_(p.gt(waiting, self.get("priority_limit_ns"))):
            self.drop(full)
        self._advance("priority_finish_ns", now, size)
        self._advance("finish_ns", now, size)

    def _advance(self, name: str, now: Any, size: Any) -> None:
        """finish = max(now, finish) + time of ``size``, against other CPUs."""
        p = self.p
        time = p.shr(p.mul(size, self.get("byte_time")), RATE_SHIFT)
        with contextlib.ExitStack() as nested:
            for _ in range(_ADVANCE_TRIES):
                finish = self.get(name)
                start = p.select(p.gt(finish, now), finish, now)
                done = p.exchange(self.record, offset(name), finish, p.add(start, time))
                nested.enter_context(p.if_(p.eq(done, 0)))

    def _trim(self, size: Any, ecn: Any) -> None:
        p, header = self.p, self.header
        with p.if_(p.ne(p.skb_call(Helper.SKB_CHANGE_TAIL, size, 0), 0)):
            self.drop(Cause.TRIM_LIMIT)
        traffic_class = p.or_(p.shl(self.get("trim_dscp"), 2), ecn)
        p.store(header, p.or_(0x60, p.shr(traffic_class, 4)), _IP, 8)
        low = p.or_(p.shl(p.and_(traffic_class, 15), 4), p.and_(p.load(header, _IP + 1, 8), 15))
        p.store(header, low, _IP + 1, 8)
        payload = p.sub(size, _HEADER_BYTES)
        p.store(header, p.shr(payload, 8), _IP + 4, 8)
        p.store(header, payload, _IP + 5, 8)
        p.skb_call(Helper.SKB_STORE_BYTES, 14, p.at(header, _IP), 6, 0)

    def _forward(self, htb_class: int, size: Any, *, shorter: bool = False) -> None:
        """Out, in a class; ``shorter``: the kernel has to count its bytes anew."""
        p = self.p
        p.set_context(SkBuff.priority, HTB_MAJOR << 16 | htb_class)
        p.count(self.record, offset("sent_packets"))
        p.count(self.record, offset("sent_bytes"), size)
        fresh = p.ne(p.context(SkBuff.mark), MARK_LIFTED)
        if htb_class == DATA_CLASS:
            with p.if_(p.both(fresh, p.ne(self.get("duplicate"), 0))):
                with p.if_(self.met("duplicate")):
                    self._advance("finish_ns", p.call(Helper.KTIME_GET_NS), size)
                    p.count(self.record, fault_offset(Fault.DUPLICATE))
                    p.count(self.record, offset("sent_packets"))
                    p.count(self.record, offset("sent_bytes"), size)
                    p.set_context(SkBuff.mark, MARK_SENT)
                    p.skb_call(Helper.CLONE_REDIRECT, self.out, 0)
        if self.redirects or shorter:
            p.set_context(SkBuff.mark, MARK_SENT)
            p.ret(p.call(Helper.REDIRECT, self.out, 0))
        else:
            p.ret(TC_OK)
