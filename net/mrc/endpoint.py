"""An MRC endpoint without I/O and clock: queue pairs, registered memory, completions.

Use: ``endpoint = Endpoint(rng)``; ``key = endpoint.register(bytearray(4096), va=0)``;
``endpoint.connect(identity, evs, plane_of)``; ``endpoint.write(qpn, 7, data, va, peer_key)``;
``step = endpoint.step(now_ns, received)``: send ``step.send``, look at ``step.completions``, call again at
``step.wake_ns`` at the latest.
Time: nanoseconds, passed in and never going back. A call much later than asked for makes nobody blame a path.
Errors: MrcError for a queue pair or key that does not exist; whatever a peer sends is counted in ``counters``.
Limits: reconstructed (see net.mrc.wire). No dynamic MPR; a responder never says ALWAYS_SKIP, nor that it lacks room.
Attributes of both ends are taken to be equal.
Source: OCP-MRC-1.0 sections 5 to 9 through its readers.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from net.errors import MrcError, Reason
from net.mrc.datagram import Burst, Datagram
from net.mrc.paths import EvProfile, PathSettings
from net.mrc.peer import Peer
from net.mrc.ports import Ports
from net.mrc.rc import RcRequestor, RcResponder
from net.mrc.requestor import Identity, QpSettings, Requestor, Status
from net.mrc.responder import Region, Responder
from net.mrc.wire import ENDPOINT_QP, WRITES, Aeth, CcState, Neth, Opcode, Seth


class Kind(enum.Enum):
    """What a completion is about."""

    WRITE = "write"
    IMMEDIATE = "immediate"


class Completion(NamedTuple):
    """A write of ours is done (value: its request id), or one of the peer's with an immediate (value: that)."""

    qpn: int
    kind: Kind
    value: int
    status: Status = Status.OK


class Output(NamedTuple):
    """What to do after a step."""

    send: list[Datagram]
    wake_ns: int | None
    completions: list[Completion]


@dataclass(slots=True)
class QueuePair:
    """Both halves."""

    identity: Identity
    requestor: Requestor
    responder: Responder


class Endpoint:
    """A NIC's worth of queue pairs."""

    def __init__(self, rng: random.Random, *, baseline: bool = False, ports: Ports | None = None) -> None:
        """baseline: queue pairs of net.mrc.rc, on one path, instead. ports: what they may give away at a time."""
        self.counters: Counter[str] = Counter()
        self.pairs: dict[int, QueuePair] = {}
        self.peers: dict[int, Peer] = {}
        self.baseline = baseline
        self._ports = ports or Ports()
        self._turn = 0
        self._rng = rng
        self._regions: dict[int, Region] = {}
        self.wake_ns: int | None = None
        """When to call again at the latest, after a step."""
        self._expected_ns: int | None = None  # the same, ports that are full left out
        self._down: frozenset[int] = frozenset()
        self._ports_changed = False

    def register(self, memory: bytearray | memoryview, va: int) -> int:
        """Lets peers write ``memory`` at addresses from ``va`` on; returns the key they need."""
        key = self._rng.randrange(1, 1 << 32)
        while key in self._regions:
            key = self._rng.randrange(1, 1 << 32)
        self._regions[key] = Region(va, memoryview(memory))
        return key

    def unregister(self, key: int) -> None:
        """From now on nobody may write there."""
        if self._regions.pop(key, None) is None:
            raise MrcError(Reason.VALUE, f"no region has the key {key:#x}", "register() returns it")

    def connect(
        self,
        identity: Identity,
        evs: Sequence[int],
        plane_of: Callable[[int], int],
        settings: QpSettings | None = None,
        paths: PathSettings | None = None,
    ) -> QueuePair:
        """A queue pair; the peer makes its own with the ends exchanged."""
        if identity.qpn in self.pairs or identity.qpn <= 2:
            raise MrcError(Reason.VALUE, f"queue pair {identity.qpn} is taken", "numbers 0 to 2 are reserved")
        settings = settings or QpSettings()
        if self.baseline:
            evs = [self._rng.choice(evs)]
        profile = EvProfile(evs, plane_of, paths or PathSettings(), self._rng)
        if identity.peer not in self.peers:
            self.peers[identity.peer] = Peer(identity.peer, evs, plane_of, settings.timeout_ns // 4, self._rng)
        requestor_kind, responder_kind = (RcRequestor, RcResponder) if self.baseline else (Requestor, Responder)
        responder = responder_kind(identity, settings, self._regions, self.peers[identity.peer].way_back)
        pair = QueuePair(identity, requestor_kind(identity, settings, profile, self._ports), responder)
        self.pairs[identity.qpn] = pair
        self._ports_changed = self._ports_changed or bool(self._down)
        return pair

    def set_port(self, plane: int, *, up: bool) -> None:
        """The port in ``plane`` went down or came up: from the next step its EVs are out, or probed, and peers told.

        With no port left that both ends have, queue pairs fail.
        """
        self._down = self._down - {plane} if up else self._down | {plane}
        self._ports_changed = True

    def write(
        self, qpn: int, request_id: int, data: bytes | memoryview, va: int, r_key: int, immediate: int | None = None
    ) -> None:
        """Posts a write to the peer's memory; it goes out with the next step and completes exactly once."""
        if qpn not in self.pairs:
            raise MrcError(Reason.VALUE, f"there is no queue pair {qpn}", "connect it first")
        if not 0 <= va <= (1 << 64) - len(data):
            raise MrcError(Reason.VALUE, f"{len(data)} bytes from {va:#x} on", "addresses have 64 bits")
        self.pairs[qpn].requestor.post(request_id, data, va, r_key, immediate)

    def step(self, now_ns: int, received: Iterable[Datagram] = ()) -> Output:
        """Takes in what arrived and says what to send."""
        send: list[Datagram] = []
        for item in self.run(now_ns, received):
            send += item.datagrams() if isinstance(item, Burst) else (item,)
        return Output(send, self.wake_ns, self.take_completions())

    def run(self, now_ns: int, received: Iterable[Datagram] = ()) -> Iterator[Datagram | Burst]:
        """A step, piece by piece: each datagram is done with before the next is asked for.

        To be run to its end; then ``wake_ns`` and ``take_completions`` have the rest.
        """
        for datagram in received:
            yield from self._receive(now_ns, datagram)
        self._forgive_if_late(now_ns)
        if self._ports_changed:
            self._announce_ports(now_ns)
        for peer in self.peers.values():
            yield from peer.updates(now_ns)
        yield from self._share_out(now_ns)
        wakes = [pair.requestor.wake_ns() for pair in self.pairs.values()]
        wakes += [peer.wake_ns() for peer in self.peers.values()]
        self._expected_ns = self.wake_ns = min((wake for wake in wakes if wake is not None), default=None)
        if any(pair.requestor.blocked for pair in self.pairs.values()):
            times = (self.wake_ns, self._ports.room_ns(now_ns))
            self.wake_ns = min((at for at in times if at is not None), default=None)

    def _share_out(self, now_ns: int) -> Iterator[Datagram | Burst]:
        """A packet or a burst of each queue pair in turn, while there are any; another one begins each time."""
        pairs = list(self.pairs.values())
        self._turn += 1
        start = self._turn % len(pairs) if pairs else 0
        senders = [pair.requestor.send(now_ns) for pair in pairs[start:] + pairs[:start]]
        while senders:
            left = []
            for sender in senders:
                datagram = next(sender, None)
                if datagram is not None:
                    left.append(sender)
                    yield datagram
            senders = left

    def _announce_ports(self, now_ns: int) -> None:
        self._ports_changed = False
        for peer in self.peers.values():
            peer.announce(self._down)
            self._close_planes(now_ns, peer)

    def _close_planes(self, now_ns: int, peer: Peer) -> None:
        """Queue pairs to a peer use the planes in which both have a port; with none left they are over."""
        closed = self._down | peer.closed
        for pair in self.pairs.values():
            if pair.identity.peer != peer.peer:
                continue
            if closed.issuperset(peer.planes):
                pair.requestor.fail(Status.NO_PORT)
            else:
                pair.requestor.close(closed, self._down, now_ns)

    def _forgive_if_late(self, now_ns: int) -> None:
        """Called long after the time asked for, we were not running, and what we missed may still be on its way."""
        if self._expected_ns is None:
            return
        for pair in self.pairs.values():
            if now_ns - self._expected_ns > pair.requestor.settings.timeout_ns // 4:
                pair.requestor.forgive(now_ns)

    def _receive(self, now_ns: int, datagram: Datagram) -> Iterator[Datagram]:
        bth, headers = datagram.message.bth, datagram.message.headers
        if bth.dqp == ENDPOINT_QP:
            yield from self._receive_endpoint(now_ns, datagram)
            return
        pair = self.pairs.get(bth.dqp)
        if pair is None or pair.identity.peer != datagram.peer:
            self.counters["unknown queue pair"] += 1
        elif bth.opcode in WRITES:
            yield from pair.responder.on_write(datagram)
            if not self.baseline:
                yield from self.peers[datagram.peer].on_data(now_ns)
        elif datagram.trimmed:
            self.counters["trimmed control"] += 1  # and not answered, as UET 1.0.3 has it
        elif bth.opcode == Opcode.PROBE:
            # First what finds ways back: by one that is dead the answer would be lost.
            yield from self.peers[datagram.peer].on_data(now_ns)
            yield pair.responder.on_probe(datagram)
        elif bth.opcode == Opcode.SACK:
            seth, state = headers
            assert isinstance(seth, Seth) and isinstance(state, CcState)
            pair.requestor.on_sack(now_ns, seth, state)
            if not seth.pr:
                self.peers[datagram.peer].confirm(now_ns, seth.entropy)
        elif bth.opcode == Opcode.NACK:
            assert isinstance(headers[0], Neth)
            pair.requestor.on_nack(now_ns, headers[0])
        elif bth.opcode == Opcode.ACKNOWLEDGE:
            assert isinstance(headers[0], Aeth)
            pair.requestor.on_acknowledge(now_ns, bth.psn, headers[0])
        else:
            self.counters["not handled"] += 1

    def _receive_endpoint(self, now_ns: int, datagram: Datagram) -> Iterator[Datagram]:
        peer, opcode = self.peers.get(datagram.peer), datagram.message.bth.opcode
        if peer is None:
            self.counters["unknown peer"] += 1
        elif datagram.trimmed:
            self.counters["trimmed control"] += 1
        elif opcode == Opcode.ENDPOINT_REQUEST:
            closed = peer.closed
            yield peer.on_request(datagram)
            if peer.closed != closed:
                self._close_planes(now_ns, peer)
        elif opcode == Opcode.ENDPOINT_RESPONSE:
            peer.on_response(datagram.message)
        else:
            self.counters["not handled"] += 1

    def ahead(self, datagram: Datagram) -> memoryview | None:
        """See Responder.ahead."""
        pair = self.pairs.get(datagram.message.bth.dqp)
        return pair.responder.ahead(datagram) if pair is not None and pair.identity.peer == datagram.peer else None

    def took(self, datagram: Datagram, count: int) -> None:
        """See Responder.took."""
        self.pairs[datagram.message.bth.dqp].responder.took(datagram, count)

    def take_completions(self) -> list[Completion]:
        """What has completed since the last call, in order."""
        return list(self._completions())

    def _completions(self) -> Iterator[Completion]:
        for qpn, pair in self.pairs.items():
            for value in pair.responder.arrived:
                yield Completion(qpn, Kind.IMMEDIATE, value)
            pair.responder.arrived.clear()
            for request_id, status in pair.requestor.finished:
                yield Completion(qpn, Kind.WRITE, request_id, status)
            pair.requestor.finished.clear()
