"""What an endpoint knows of another one beyond its queue pairs: the ways back to it, and which ports both have.

**Reverse EVs**: one per plane, by which SACKs, NACKs and acknowledgements go. A SACK for data of ours says that its
EV works, so it becomes its plane's. Where we only receive, an EV probe goes out on a random EV once per round trip;
the EV that answers becomes its plane's, and a plane whose probe is not answered has none until one is. With none at
all, an answer takes the path that its packet came by.

**Ports**: a change of ours is told by PORT_STATUS_UPDATE requests, again and again until answered.

No I/O, no clock. Use: see net.mrc.endpoint. Time: nanoseconds, passed in.
Source: arXiv 2605.04333 section 2.4; OCP-MRC-1.0 sections 7.4.7 and 7.4.8 through their readers. How often an update
is repeated, and when a plane's reverse EV is given up, are ours.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from net.mrc.datagram import Datagram
from net.mrc.frame import Message, message
from net.mrc.wire import ENDPOINT_QP, TIMESTAMP_NS, Bth, Eeth, EndpointOp, Erth, Opcode

UPDATES_MAX = 16
REQUEST_ID_MASK = 0xFFFF


class Peer:
    """``evs`` name the paths to it; ``interval_ns`` is about a round trip; ``counters`` by name."""

    def __init__(
        self, peer: int, evs: Sequence[int], plane_of: Callable[[int], int], interval_ns: int, rng: random.Random
    ) -> None:
        self.peer = peer
        self.planes = sorted({plane_of(ev) for ev in evs})
        self.closed: frozenset[int] = frozenset()
        """Planes in which the peer has said its port to be down."""
        self.down: frozenset[int] = frozenset()
        """Planes in which ours is."""
        self.counters: Counter[str] = Counter()
        self._evs = list(evs)
        self._plane_of = plane_of
        self._interval_ns = interval_ns
        self._rng = rng
        self._reverse: dict[int, int] = {}
        self._turn = 0
        self._request_id = rng.randrange(REQUEST_ID_MASK + 1)
        self._probes: dict[int, tuple[int, int]] = {}  # request id -> (EV, when sent)
        self._probe_ns: int | None = None  # when data that comes in calls for a probe
        self._mask: int | None = None  # of an update that is not answered
        self._updates: set[int] = set()
        self._update_ns = 0
        self._updates_sent = 0

    # Reverse EVs.

    @property
    def reverse_evs(self) -> dict[int, int]:
        """By plane."""
        return dict(self._reverse)

    def way_back(self, arrived_by: int) -> int:
        """The EV for an answer: the planes' in turn; the packet's own while there is none."""
        if not self._reverse:
            return arrived_by
        self._turn += 1
        ways = list(self._reverse.values())
        return ways[self._turn % len(ways)]

    def confirm(self, now_ns: int, ev: int) -> None:
        """A SACK for data of ours on ``ev`` came: that way works, and no probe is needed for now."""
        if ev in self._evs:
            self._take(ev)
        self._probe_ns = now_ns + self._interval_ns

    def _take(self, ev: int) -> None:
        if self._is_open(ev):
            self._reverse[self._plane_of(ev)] = ev

    def _is_open(self, ev: int) -> bool:
        return self._plane_of(ev) not in self.closed | self.down

    def on_data(self, now_ns: int) -> Iterator[Datagram]:
        """Data or a reliability probe came in: an EV probe if it is time for one."""
        if self._probe_ns is None:
            self._probe_ns = now_ns + self._interval_ns
        if now_ns < self._probe_ns:
            return
        self._probe_ns = now_ns + self._interval_ns
        self._give_up(now_ns)
        evs = list(filter(self._is_open, self._evs))
        if evs:
            ev = self._rng.choice(evs)
            request = self._request(now_ns, ev, EndpointOp.EV_PROBE, 0)
            self._probes[request.message.bth.psn] = (ev, now_ns)
            self.counters["ev probes"] += 1
            yield request

    def _give_up(self, now_ns: int) -> None:
        """Probes that were not answered for four round trips take their planes' reverse EVs with them."""
        for request_id, (ev, sent_ns) in list(self._probes.items()):
            if now_ns - sent_ns >= 4 * self._interval_ns:
                del self._probes[request_id]
                self.counters["ev probes unanswered"] += 1
                self._reverse.pop(self._plane_of(ev), None)

    def _forget_closed(self) -> None:
        self._reverse = {plane: ev for plane, ev in self._reverse.items() if self._is_open(ev)}

    # Ports.

    def announce(self, down: frozenset[int]) -> None:
        """Our ports in these planes are down, the others up: the peer is told, bit n for plane n."""
        self.down = down
        self._forget_closed()
        self._mask = sum(1 << plane for plane in self.planes if plane not in down)
        self._updates_sent = self._update_ns = 0
        self._updates.clear()

    def updates(self, now_ns: int) -> Iterator[Datagram]:
        """The update that is due, if one is."""
        if self._mask is None or now_ns < self._update_ns:
            return
        evs = list(filter(self._is_open, self._evs))
        if self._updates_sent == UPDATES_MAX or not evs:
            self._mask = None
            return
        request = self._request(now_ns, self._rng.choice(evs), EndpointOp.PORT_STATUS_UPDATE, self._mask)
        self._updates.add(request.message.bth.psn)
        self._update_ns = now_ns + (self._interval_ns << min(self._updates_sent, 8))
        self._updates_sent += 1
        self.counters["port updates"] += 1
        yield request

    def wake_ns(self) -> int | None:
        """When ``updates`` has something."""
        return None if self._mask is None else self._update_ns

    # Requests and responses.

    def _request(self, now_ns: int, ev: int, op: EndpointOp, mask: int) -> Datagram:
        self._request_id = self._request_id + 1 & REQUEST_ID_MASK
        erth = Erth(op=op, port_status_mask=mask, tx_timestamp=now_ns // TIMESTAMP_NS & 0xFFFF)
        bth = Bth(Opcode.ENDPOINT_REQUEST, dqp=ENDPOINT_QP, psn=self._request_id)
        return Datagram(self.peer, ev, message(bth, erth))

    def on_request(self, datagram: Datagram) -> Datagram:
        """A request of the peer's: its ports are noted in ``closed``; the answer goes back by the same EV."""
        erth = datagram.message.need(Erth)
        if erth.op == EndpointOp.PORT_STATUS_UPDATE:
            closed = frozenset(plane for plane in self.planes if not erth.port_status_mask >> plane & 1)
            if len(closed) == len(self.planes):
                self.counters["bad port status"] += 1  # it came by one of them
            else:
                self.closed = closed
                self._forget_closed()
        eeth = Eeth(op=erth.op & 3, tx_timestamp=erth.tx_timestamp)
        bth = Bth(Opcode.ENDPOINT_RESPONSE, dqp=ENDPOINT_QP, psn=datagram.message.bth.psn & REQUEST_ID_MASK)
        return Datagram(self.peer, datagram.entropy, message(bth, eeth))

    def on_response(self, response: Message) -> None:
        """An answer, matched by its request id."""
        request_id = response.bth.psn & REQUEST_ID_MASK
        if request_id in self._probes:
            ev, _ = self._probes.pop(request_id)
            self._take(ev)
        elif request_id in self._updates:
            self._mask = None
            self._updates.clear()
        else:
            self.counters["stale responses"] += 1
