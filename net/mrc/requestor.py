"""The sending half of a queue pair: writes cut into packets, sprayed, acknowledged selectively, sent again.

No I/O, no clock. What is known of a packet decides what becomes of it:

    acknowledged                     done
    NACK TRIMMED                     sent again at once on another EV; that EV is skipped a turn, unless the cut was
                                     on the last hop
    sent earlier on the same EV than
    one acknowledged, and a newer
    SACK shows it missing            lost: sent again at once; that EV is suspected (a path keeps its order)
    nothing heard for the timeout    lost; that EV is suspected, unless nothing sent later is known to have arrived by
                                     any path (then it may be the peer); counts on the retry budget
    other NACKs                      waits until it is lost by one of these rules, which then suspects nothing
    NACK UNEXP_EVENT, budget spent   the queue pair is in error, every request completes with it

A NACK counts only when it reflects the EV and the time stamp of the last transmission of its packet. So a third party
that sends the responder a write with a wrong key in our name, to have it end our queue pair, must guess both, or the
responder's NACK of the forgery is dropped here. (A forger who sees our packets, or forges acknowledgements, is not
stopped; nothing in MRC authenticates a packet, and regions are guarded by their keys alone.)

A gap in the sequence alone never means loss. A probe keeps its place on its path, too: sent on the EV of a missing
packet, its answer tells of it. So when there is nothing else to send, the EVs of gaps are probed at once. Halfway to
a timeout a reliability probe asks for a SACK, so that lost SACKs do not look like lost packets; so does one when a
full window keeps back what is to be sent again.

Numbers inside are counts from 0; they become 24-bit PSNs at the edge.
How much is in flight is net.mrc.congestion's to say. A request completes when everything up to its last packet is
acknowledged, by a SACK or by a transport acknowledgement: the responder here sends neither before the payload is in
place.
Source: OCP-MRC-1.0 sections 6.2, 7.4, 7.5 and 9 through its readers. Ours: the same-EV rule, when probes go out, that
a timeout with no later arrival suspects nothing, that other NACKs wait, and the check of NACKs.
"""

from __future__ import annotations

import enum
import heapq
import os
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from net.mrc.congestion import Nscc, NsccSettings, Window
from net.mrc.datagram import Burst, Datagram, frame_bytes
from net.mrc.frame import Message, message
from net.mrc.paths import EvProfile, EvState
from net.mrc.ports import Ports
from net.mrc.wire import (
    IMMEDIATES,
    TIMESTAMP_NS,
    Aeth,
    Bth,
    CcState,
    EcnMark,
    Immdt,
    Meth,
    NackReason,
    Neth,
    Opcode,
    Peth,
    Reth,
    Seth,
    Tseth,
    psn_add,
    psn_distance,
)

SACK_BITS = 64
LINEAR_RETRIES, ENDLESS_RETRIES = 7, 25
PROBES_MAX = 256
BURST_MAX = 32
OVERHEAD_BYTES_MAX = 14 + 132 + 3
"""Of a write behind two IPv6 headers: Ethernet, all headers with ICRC, padding."""


@dataclass(frozen=True, slots=True)
class QpSettings:
    """Both halves of a queue pair.

    pmtu_bytes: payload of a full packet. window_bytes: frames in flight without congestion control; nscc: with it.
    mpr: PSNs in flight, a multiple of 128.
    timeout_ns: until a packet of which nothing is heard counts as lost. retries: timeouts of one packet before the
    queue pair fails, 25 for never; from the eighth on the timeout doubles, up to the 25th. wimm_max: writes with
    immediate in flight.
    sack_packets, sack_bytes: a SACK at the latest after so many. selective: send only what is lost again; off, only
    to see what that is worth, everything sent after it too.
    """

    pmtu_bytes: int = 4096
    window_bytes: int = 256 * 1024
    mpr: int = 1024
    timeout_ns: int = 1_000_000
    retries: int = 7
    wimm_max: int = 32
    sack_packets: int = 4
    sack_bytes: int = 16 * 1024
    nscc: NsccSettings | None = None
    selective: bool = True

    def gives_up(self, retries: int) -> bool:
        """Whether so many timeouts of a packet are one too many."""
        return self.retries < ENDLESS_RETRIES and retries > self.retries

    def patience_ns(self, retries: int) -> int:
        """The timeout of a packet that has had so many already."""
        return self.timeout_ns << max(0, min(retries, ENDLESS_RETRIES) - LINEAR_RETRIES)


class Identity(NamedTuple):
    """Both ends of a queue pair: ``psn`` is the first one sent, ``peer_psn`` the first one expected."""

    qpn: int
    peer: int
    peer_qpn: int
    psn: int = 0
    peer_psn: int = 0


class Status(enum.Enum):
    """How a request ended."""

    OK = "ok"
    REMOTE_ERROR = "remote operation error"
    RETRY_EXCEEDED = "retry exceeded"
    NO_PORT = "no port left"


@dataclass(slots=True)
class Request:
    """A write as posted; ``last`` is the number of its last packet once that is known."""

    request_id: int
    data: memoryview
    va: int
    r_key: int
    immediate: int | None
    meth: Meth
    offset: int = 0
    last: int | None = None


@dataclass(slots=True)
class _Sent:
    """A packet that is not acknowledged: ``size`` bytes of its request from ``offset`` on, ``size_bytes`` as a frame.

    ``order`` counts transmissions; ``waiting``: to be sent again.
    """

    request: Request
    offset: int
    size: int
    size_bytes: int
    ev: int
    order: int = 0
    retries: int = 0
    again: bool = False
    waiting: bool = False
    blameless: bool = False
    stamp: int = 0
    doubted: bool = False


def _opcode(request: Request, offset: int, end: int) -> Opcode:
    """Of the packet from ``offset`` to ``end``."""
    if end < len(request.data):
        return Opcode.WRITE_MIDDLE if offset else Opcode.WRITE_FIRST
    if request.immediate is None:
        return Opcode.WRITE_LAST if offset else Opcode.WRITE_ONLY
    return Opcode.WRITE_LAST_IMM if offset else Opcode.WRITE_ONLY_IMM


class _Probe(NamedTuple):
    """A probe that is not answered. ``order`` as in _Sent; ``of_suspect``: it asks whether its EV is well again."""

    ev: int
    order: int
    of_suspect: bool


class Requestor:
    """``counters`` by name; ``finished`` collects (request id, status), taken by the endpoint."""

    def __init__(
        self, identity: Identity, settings: QpSettings, paths: EvProfile, ports: Ports | None = None
    ) -> None:
        self.blocked = False
        """Whether something would have gone if a port had had room."""
        self._ports = ports or Ports()
        self._bursts = os.environ.get("DPU_EMU_MRC_BURSTS") != "0"
        self.identity = identity
        self.settings = settings
        self.paths = paths
        self.window = Nscc(settings.nscc) if settings.nscc else Window(settings.window_bytes)
        self.counters: Counter[str] = Counter()
        self.finished: list[tuple[int, Status]] = []
        self.error: Status | None = None
        self.inflight_bytes = 0
        self._requests: deque[Request] = deque()  # posted, some packets still to be cut
        self._unfinished: deque[Request] = deque()
        self._outstanding: dict[int, _Sent] = {}
        self._next = 0
        self._acked = 0  # every number below is acknowledged
        self._again: list[int] = []  # heap: oldest gap first
        self._timers: deque[tuple[int, int, int]] = deque()  # (deadline, order, number), sorted; some are stale
        self._order = 0
        self._messages = 0
        self._immediates = 0
        self._immediates_open = 0
        self._newest_rcvd: int | None = None
        self._acked_order: dict[int, int] = {}  # by EV: the latest transmission known to have arrived
        self._news_ns = 0
        self._asked_ns: int | None = None
        self._asking: int | None = None  # a packet in flight that asked for a SACK because the window was full
        self._probes: dict[int, _Probe] = {}  # by probe id
        self._probe_id = 0
        self._doubted: set[int] = set()  # EVs of gaps, to be probed

    # Posting.

    def post(self, request_id: int, data: bytes | memoryview, va: int, r_key: int, immediate: int | None) -> None:
        """A write; ``finished`` will have its id exactly once."""
        if self.error is not None:
            self.finished.append((request_id, self.error))
            return
        self._immediates += immediate is not None
        rqmsn = self._immediates & 0xFFFF if immediate is not None else 0
        meth = Meth(rqmsn, self._messages & 0xFFFF)
        request = Request(request_id, memoryview(data), va, r_key, immediate, meth)
        self._messages += 1
        self._requests.append(request)
        self._unfinished.append(request)

    @property
    def idle(self) -> bool:
        """Nothing posted is unfinished."""
        return not self._unfinished

    # Sending.

    def send(self, now_ns: int) -> Iterator[Datagram | Burst]:
        """What may go now: probes, then what is to be sent again, then new packets."""
        self.blocked = False
        if self.error is None:
            yield from self._expire(now_ns)
        if self.error is None:
            for ev in self.paths.probes_due(now_ns):
                yield self._probe(now_ns, ev, of_suspect=True)
            for ev in sorted(self._doubted):
                if self.paths.state(ev) is EvState.DENIED:
                    continue
                self.counters["gap probes"] += 1
                yield self._probe(now_ns, ev)
            self._doubted.clear()
            yield from self._send_again(now_ns)
            yield from self._send_new(now_ns)

    def _send_again(self, now_ns: int) -> Iterator[Datagram]:
        while self._again:
            sent = self._outstanding.get(self._again[0])
            if sent is None or not sent.waiting:  # acknowledged since
                heapq.heappop(self._again)
                continue
            if not self._room(sent.size_bytes):
                yield from self._ask(now_ns)
                return
            ev = self._draw(now_ns, avoid=sent.ev)
            if ev is None:
                return
            number = heapq.heappop(self._again)
            sent.ev, sent.again, sent.waiting, sent.blameless = ev, True, False, False
            sent.doubted = False
            self.counters["retransmitted"] += 1
            yield self._transmit(now_ns, number, sent)

    def _send_new(self, now_ns: int) -> Iterator[Datagram | Burst]:
        while self._requests:
            request = self._requests[0]
            if not self._may_start(request):
                return
            evs = self.paths.next_evs(self._burst_length(request))
            if evs:
                yield self._burst(now_ns, request, evs)
                continue
            size = min(self.settings.pmtu_bytes, len(request.data) - request.offset)
            if self._next - self._acked >= self.settings.mpr or not self._room(size + OVERHEAD_BYTES_MAX):
                yield from self._ask(now_ns)
                return
            ev = self._draw(now_ns)
            if ev is None:
                return
            number, sent = self._add(request, size, ev)
            self.counters["sent"] += 1
            yield self._transmit(now_ns, number, sent)

    def _burst_length(self, request: Request) -> int:
        """How many packets may go that are neither a message's first or last, nor such as to fill the window: nothing
        is decided about them but their ways."""
        if self._ports.limited or not self._bursts or not request.offset:
            return 0
        size = self.settings.pmtu_bytes
        size_bytes = frame_bytes(Opcode.WRITE_MIDDLE, 1, size + -size % 4)
        return min(
            BURST_MAX,
            (len(request.data) - request.offset - 1) // size,
            int(self.window.bytes - self.inflight_bytes) // size_bytes - 2,
            self.settings.mpr - (self._next - self._acked),
        )

    def _burst(self, now_ns: int, request: Request, evs: list[int]) -> Burst:
        offset, size, first = request.offset, self.settings.pmtu_bytes, self._next
        size_bytes = frame_bytes(Opcode.WRITE_MIDDLE, 1, size + -size % 4)
        for ev in evs:
            sent = self._outstanding[self._next] = _Sent(request, request.offset, size, size_bytes, ev)
            self._launch(now_ns, self._next, sent)
            self._next += 1
            request.offset += size
        self.counters["sent"] += len(evs)
        bth, headers, _ = self._message(first, self._outstanding[first], ask=False, stamp=sent.stamp)
        return Burst(self.identity.peer, evs, Message(bth, headers, request.data[offset : request.offset]), size)

    def _ask(self, now_ns: int) -> Iterator[Datagram]:
        """What is in flight may have arrived with no SACK due; as the window is full, nobody else would ask."""
        if self._asking is None and self._asked_ns is None:
            yield from self._probe_for_sack(now_ns)

    def _draw(self, now_ns: int, avoid: int | None = None) -> int | None:
        ports = self._ports
        has_room = (lambda plane: ports.has_room(plane, now_ns)) if ports.limited else None
        ev = self.paths.next_ev(avoid, has_room)
        self.blocked = ev is None
        return ev

    def _may_start(self, request: Request) -> bool:
        return bool(request.immediate is None or request.offset or self._immediates_open < self.settings.wimm_max)

    def _add(self, request: Request, size: int, ev: int) -> tuple[int, _Sent]:
        """The next packet of a request gets its number and is outstanding."""
        number, offset = self._next, request.offset
        request.offset = end = offset + size
        self._next += 1
        if not offset and request.immediate is not None:
            self._immediates_open += 1
        if end == len(request.data):
            request.last = number
            self._requests.popleft()
        size_bytes = frame_bytes(_opcode(request, offset, end), 1, size + -size % 4)
        sent = self._outstanding[number] = _Sent(request, offset, size, size_bytes, ev)
        return number, sent

    def _room(self, size_bytes: int) -> bool:
        return not self.inflight_bytes or self.inflight_bytes + size_bytes <= self.window.bytes

    def _message(self, number: int, sent: _Sent, *, ask: bool, stamp: int = 0) -> Message:
        """A packet as it goes out."""
        request, offset, size = sent.request, sent.offset, sent.size
        end = offset + size
        opcode = _opcode(request, offset, end)
        bth = Bth(
            opcode=opcode,
            pad=-size % 4,
            dqp=self.identity.peer_qpn,
            a=int(ask),
            rtx=int(sent.again),
            ts=1,
            psn=self._psn(number),
        )
        reth = Reth(request.va + offset, request.r_key, len(request.data))
        headers: tuple[tuple[int, ...], ...] = (request.meth, Tseth(stamp), reth)
        if opcode in IMMEDIATES:
            headers += (Immdt(request.immediate or 0),)
        return Message(bth, headers, request.data[offset:end])

    def _transmit(self, now_ns: int, number: int, sent: _Sent) -> Datagram:
        self._launch(now_ns, number, sent)
        ask = not (self._requests or self._again)
        if not ask and self._asking is None and not self._room(2 * sent.size_bytes):
            ask, self._asking = True, number  # once per window: a full window is nothing special
        return Datagram(self.identity.peer, sent.ev, self._message(number, sent, ask=ask, stamp=sent.stamp))

    def _launch(self, now_ns: int, number: int, sent: _Sent) -> None:
        """A packet is in flight from now on."""
        self._order += 1
        sent.order = self._order
        if self._ports.limited:
            self._ports.take(self.paths.plane(sent.ev), now_ns, sent.size_bytes)
        if not self.inflight_bytes:
            self._news_ns = now_ns
        self.inflight_bytes += sent.size_bytes
        self._set_timer(now_ns + self.settings.patience_ns(sent.retries), sent.order, number)
        sent.stamp = now_ns // TIMESTAMP_NS & 0xFFFF

    def _set_timer(self, deadline_ns: int, order: int, number: int) -> None:
        """At the end, where nearly all belong."""
        timer = deadline_ns, order, number
        later = []
        while self._timers and self._timers[-1] > timer:
            later.append(self._timers.pop())
        self._timers.append(timer)
        self._timers.extend(reversed(later))

    def _psn(self, number: int) -> int:
        return psn_add(self.identity.psn, number)

    def _number(self, psn: int) -> int:
        """The number that a PSN means: the nearest one to what is acknowledged."""
        return self._acked + psn_distance(psn, self._psn(self._acked))

    # Time.

    def wake_ns(self) -> int | None:
        """When ``send`` has something to do even if nothing arrives."""
        if self.error is not None:
            return None
        while self._timers and not self._timer_holds(*self._timers[0]):
            self._timers.popleft()
        times = [self._timers[0][0]] if self._timers else []
        if self._timers and self._asked_ns is None:
            times.append(self._news_ns + self.settings.timeout_ns // 2)
        suspects = self.paths.next_probe_ns()
        if suspects is not None:
            times.append(suspects)
        return min(times, default=None)

    def _timer_holds(self, _deadline_ns: int, order: int, number: int) -> bool:
        sent = self._outstanding.get(number)
        return sent is not None and sent.order == order and not sent.waiting

    def forgive(self, now_ns: int) -> None:
        """We were not running: no packet is late before it has had a timeout's time from now on."""
        live = [timer for timer in self._timers if self._timer_holds(*timer)]
        least_ns = now_ns + self.settings.timeout_ns
        self._timers = deque(sorted((max(deadline, least_ns), order, number) for deadline, order, number in live))
        self._news_ns = now_ns
        self.counters["forgiven"] += 1

    def _expire(self, now_ns: int) -> Iterator[Datagram]:
        while self._timers and self._timers[0][0] <= now_ns:
            timer = self._timers.popleft()
            if not self._timer_holds(*timer):
                continue
            sent = self._outstanding[timer[2]]
            sent.retries += 1
            if self.settings.gives_up(sent.retries):
                self.fail(Status.RETRY_EXCEEDED)
                return
            self.counters["timeouts"] += 1
            if not sent.blameless and max(self._acked_order.values(), default=0) > sent.order:
                self.paths.suspect(sent.ev, now_ns)
            self.window.on_loss(now_ns, sent.size_bytes, self.inflight_bytes)
            self._lose(timer[2], sent)
        half_ns = self.settings.timeout_ns // 2
        if self._timers and self._asked_ns is None and now_ns >= self._news_ns + half_ns:
            yield from self._probe_for_sack(now_ns)
            oldest = next((sent for sent in self._outstanding.values() if not sent.waiting), None)
            if oldest is not None:
                self._doubted.add(oldest.ev)

    def _probe_for_sack(self, now_ns: int) -> Iterator[Datagram]:
        self._asked_ns = now_ns
        ev = self.paths.next_ev()
        if ev is not None:
            self.counters["sack probes"] += 1
            yield self._probe(now_ns, ev)

    def _probe(self, now_ns: int, ev: int, *, of_suspect: bool = False) -> Datagram:
        self._probe_id = self._probe_id + 1 & 0xFFFF
        self._order += 1
        self._probes[self._probe_id] = _Probe(ev, self._order, of_suspect)
        if len(self._probes) > PROBES_MAX:
            del self._probes[next(iter(self._probes))]
        identity = self.identity
        peth = Peth(
            probe_id=self._probe_id,
            spdcid=identity.qpn & 0xFFFF,
            dpdcid=identity.peer_qpn & 0xFFFF,
            tx_timestamp=now_ns // TIMESTAMP_NS & 0xFFFF,
        )
        return Datagram(identity.peer, ev, message(Bth(Opcode.PROBE, dqp=identity.peer_qpn), peth))

    # Hearing.

    def on_sack(self, now_ns: int, seth: Seth, state: CcState) -> None:
        """A SACK: removes what it reports, learns about its EV, and finds what is lost."""
        cumulative = self._number(seth.cack_psn) + 1
        if cumulative > self._next:
            self.counters["bad sack"] += 1
            return
        self._news_ns, self._asked_ns = now_ns, None
        before = self.inflight_bytes
        self._acknowledge_below(cumulative)
        base = cumulative - 1 + seth.sack_offset
        for bit in range(seth.bitmap.bit_length()):
            if seth.bitmap >> bit & 1:
                self._acknowledge(base + bit)
        if not seth.pr:
            self._acknowledge(cumulative - 1 + seth.ack_psn_offset)
        if seth.pr:
            self._on_probe_answer(seth)
        self._on_mark(now_ns, seth)
        newly = before - self.inflight_bytes
        rtt_ns = (now_ns // TIMESTAMP_NS - state.tx_timestamp & 0xFFFF) * TIMESTAMP_NS
        self.window.on_ack(now_ns, newly, rtt_ns, seth.m != EcnMark.NONE, self.inflight_bytes)
        self.window.on_receiver(state.rcv_cwnd_pen, bool(state.restore_cwnd), newly)
        if self._is_newest(state.rcvd_bytes, bool(seth.pr)):
            self._find_lost(now_ns, base, seth.bitmap, bool(seth.pr))
        self._finish()

    def on_acknowledge(self, now_ns: int, psn: int, aeth: Aeth) -> None:
        """A transport acknowledgement: everything up to its PSN is in place at the other end."""
        cumulative = self._number(psn) + 1
        if cumulative > self._next or aeth.syndrome >> 5:
            self.counters["bad acknowledge"] += 1
            return
        self._news_ns, self._asked_ns = now_ns, None
        before = self.inflight_bytes
        self._acknowledge_below(cumulative)
        self.window.on_ack(now_ns, before - self.inflight_bytes, None, False, self.inflight_bytes)
        self._finish()

    def _acknowledge_below(self, cumulative: int) -> None:
        for number in range(self._acked, cumulative):
            self._acknowledge(number)
        self._acked = max(self._acked, cumulative)

    def _acknowledge(self, number: int) -> None:
        sent = self._outstanding.pop(number, None)
        if sent is None:
            return
        self._asking = None if self._asking == number else self._asking
        if not sent.waiting:
            self.inflight_bytes -= sent.size_bytes
        if not sent.again:  # else it is not known which transmission arrived
            self._note_arrival(sent.ev, sent.order)

    def _note_arrival(self, ev: int, order: int) -> None:
        if order > self._acked_order.get(ev, 0):
            self._acked_order[ev] = order

    def _on_probe_answer(self, seth: Seth) -> None:
        probe = self._probes.pop(seth.probe_id, None)
        if probe is None:
            return
        self._note_arrival(probe.ev, probe.order)
        if probe.of_suspect:
            self.paths.probed(probe.ev, marked=seth.m == EcnMark.SKIP_ONCE)

    def _on_mark(self, now_ns: int, seth: Seth) -> None:
        if seth.m == EcnMark.SKIP_ONCE:
            self.counters["marks"] += 1
            self.paths.skip(seth.entropy)
        elif seth.m == EcnMark.ALWAYS_SKIP:
            self.paths.suspect(seth.entropy, now_ns)

    def _is_newest(self, rcvd_bytes: int, probed: bool) -> bool:
        """Whether a SACK was made after all others seen: its count of what arrived, modulo 2^24, is ahead.

        The answer to a probe may have the same count: nothing has arrived since.
        """
        if self._newest_rcvd is not None and psn_distance(rcvd_bytes, self._newest_rcvd) < (not probed):
            return False
        self._newest_rcvd = rcvd_bytes
        return True

    def _find_lost(self, now_ns: int, base: int, bitmap: int, probed: bool) -> None:
        """What the newest SACK shows missing although something later on the same EV has arrived.

        What else it shows missing is doubted, if nothing will follow: a gap, or anything in the answer to a probe.
        """
        idle = not (self._requests or self._again)
        for bit in range(min(SACK_BITS, self._next - base)):
            sent = self._outstanding.get(base + bit)
            if sent is None or sent.waiting:
                continue
            if sent.order >= self._acked_order.get(sent.ev, 0):
                if idle and (probed or bitmap >> bit) and not sent.doubted:
                    sent.doubted = True
                    self._doubted.add(sent.ev)
                continue
            self.counters["inferred"] += 1
            if not sent.blameless:
                self.paths.suspect(sent.ev, now_ns)
            self.window.on_loss(now_ns, sent.size_bytes, self.inflight_bytes)
            self._lose(base + bit, sent)

    def on_nack(self, now_ns: int, neth: Neth) -> None:
        """A NACK of one packet."""
        number = self._number(neth.nack_psn)
        sent = self._outstanding.get(number)
        self.counters["nacks"] += 1
        if sent is None or sent.waiting or (sent.ev, sent.stamp) != (neth.entropy, neth.tx_timestamp):
            self.counters["stale nacks"] += 1  # about a transmission that is over, or one that was not ours
            return
        if neth.nack_reason == NackReason.UNEXP_EVENT:
            self.fail(Status.REMOTE_ERROR)
            return
        if neth.nack_reason not in (NackReason.TRIMMED, NackReason.TRIMMED_LASTHOP):
            sent.blameless = True
            return
        if neth.nack_reason == NackReason.TRIMMED:
            self.paths.skip(sent.ev)
        self.window.on_trim(now_ns, sent.size_bytes, self.inflight_bytes)
        self._lose(number, sent)

    def close(self, planes: frozenset[int], ours: frozenset[int], now_ns: int) -> None:
        """Ports of ``planes`` are down. What is in flight by one of ``ours`` is lost, by no path's fault."""
        self.paths.close(planes, now_ns)
        for number, sent in self._outstanding.items():
            if not sent.waiting and self.paths.plane(sent.ev) in ours:
                self._lose(number, sent)

    def _lose(self, number: int, sent: _Sent) -> None:
        if not self.settings.selective:
            for later, other in self._outstanding.items():
                if later > number and not other.waiting:
                    self._give_back(later, other)
        self._give_back(number, sent)

    def _give_back(self, number: int, sent: _Sent) -> None:
        self._asking = None if self._asking == number else self._asking
        sent.waiting = True
        self.inflight_bytes -= sent.size_bytes
        heapq.heappush(self._again, number)

    def _finish(self) -> None:
        while self._unfinished and (last := self._unfinished[0].last) is not None and last < self._acked:
            request = self._unfinished.popleft()
            self._immediates_open -= request.immediate is not None
            self.finished.append((request.request_id, Status.OK))

    def fail(self, status: Status) -> None:
        """The queue pair is over: every request that is not finished ends with ``status``."""
        self.error = status
        self.finished += [(request.request_id, status) for request in self._unfinished]
        self._requests.clear()
        self._unfinished.clear()
        self._outstanding.clear()
        self._again.clear()
        self._timers.clear()
        self.inflight_bytes = 0
