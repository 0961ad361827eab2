"""The baseline: a queue pair on one path, in order, acknowledged cumulatively, going back to what is missing.

**RC-like, not RoCE**: the packets are MRC's writes, a lost one is dropped and told by a negative acknowledgement of a
sequence error or found by a timeout, and everything from it on is sent again. The path is drawn once per queue pair,
as a hash would. A fixed window; no congestion control, no PFC (a full queue drops).

Use: ``Endpoint(rng, baseline=True)``; the rest is as net.mrc.endpoint has it.
Source: IBTA volume 1 section 9.7 for the rules of reliable connections.
"""

from __future__ import annotations

from collections.abc import Iterator

from net.mrc.datagram import Datagram
from net.mrc.frame import message
from net.mrc.requestor import OVERHEAD_BYTES_MAX, Requestor, Status
from net.mrc.responder import Responder
from net.mrc.wire import Aeth, Bth, CcState, NackReason, Neth, Opcode, Seth

SYNDROME_ACK = 0x1F
SYNDROME_SEQUENCE_ERROR = 0x60
SYNDROME_ACCESS_ERROR = 0x62


class RcRequestor(Requestor):
    """The sending half; ``inflight_bytes`` is what was sent since the oldest packet that is not acknowledged."""

    _cursor = 0
    _deadline_ns: int | None = None
    _timeouts = 0

    def send(self, now_ns: int) -> Iterator[Datagram]:
        """See Requestor: what may go now, from the cursor on."""
        self.blocked = False
        if self._deadline_ns is not None and now_ns >= self._deadline_ns:
            self._timeouts += 1
            self.counters["timeouts"] += 1
            self._go_back(now_ns)
            if self.settings.gives_up(self._timeouts):
                self.fail(Status.RETRY_EXCEEDED)
        while self.error is None:
            if self._cursor == self._next and not self._cut_next():
                return
            sent = self._outstanding[self._cursor]
            plane = self.paths.plane(sent.ev)
            self.blocked = not self._ports.has_room(plane, now_ns)
            if self.blocked or not self._room(sent.size_bytes):
                return
            self._ports.take(plane, now_ns, sent.size_bytes)
            self.counters["retransmitted" if sent.again else "sent"] += 1
            self.inflight_bytes += sent.size_bytes
            self._cursor += 1
            self._deadline_ns = self._deadline_ns or now_ns + self.settings.timeout_ns
            more = self._requests or self._cursor < self._next
            ask = not more or not self._room(2 * sent.size_bytes)
            content = self._message(self._cursor - 1, sent, ask=ask)
            sent.again = True
            yield Datagram(self.identity.peer, sent.ev, content)

    def _cut_next(self) -> bool:
        """Makes the packet under the cursor; False when there is none to make now."""
        if not self._requests:
            return False
        size = min(self.settings.pmtu_bytes, len(self._requests[0].data) - self._requests[0].offset)
        ev = self.paths.next_ev()
        if ev is None or not self._room(size + OVERHEAD_BYTES_MAX) or not self._may_start(self._requests[0]):
            return False
        self._add(self._requests[0], size, ev)
        return True

    def _go_back(self, now_ns: int) -> None:
        self._cursor, self.inflight_bytes = self._acked, 0
        self._deadline_ns = now_ns + self.settings.timeout_ns if self._outstanding else None

    def on_acknowledge(self, now_ns: int, psn: int, aeth: Aeth) -> None:
        """Cumulative; or a sequence error, which acknowledges what is before its PSN and asks for all from it on."""
        negative = aeth.syndrome != SYNDROME_ACK
        cumulative = self._number(psn) + (not negative)
        if cumulative > self._next:
            self.counters["bad acknowledge"] += 1
            return
        if aeth.syndrome == SYNDROME_ACCESS_ERROR:
            self.fail(Status.REMOTE_ERROR)
            return
        if cumulative > self._acked:
            self._timeouts, self._deadline_ns = 0, now_ns + self.settings.timeout_ns
        while self._acked < cumulative:
            sent = self._outstanding.pop(self._acked)
            self.inflight_bytes -= sent.size_bytes if self._acked < self._cursor else 0
            self._acked += 1
        self._cursor = max(self._cursor, self._acked)
        if not self._outstanding:
            self._deadline_ns = None
        if negative and cumulative == self._acked:
            self.counters["nacks"] += 1
            self._go_back(now_ns)
        self._finish()

    def on_sack(self, now_ns: int, seth: Seth, state: CcState) -> None:
        """There are none."""
        self.counters["bad sack"] += 1

    def on_nack(self, now_ns: int, neth: Neth) -> None:
        """There are none."""
        self.counters["stale nacks"] += 1

    def close(self, planes: frozenset[int], ours: frozenset[int], now_ns: int) -> None:
        """One path only: nothing to change over to."""

    def wake_ns(self) -> int | None:
        """See Requestor."""
        return None if self.error is not None else self._deadline_ns

    def forgive(self, now_ns: int) -> None:
        """See Requestor."""
        if self._deadline_ns is not None:
            self._deadline_ns = max(self._deadline_ns, now_ns + self.settings.timeout_ns)
            self.counters["forgiven"] += 1


class RcResponder(Responder):
    """The receiving half: places what comes in order, and nothing else."""

    _complained = False
    _unacknowledged = 0

    def on_write(self, datagram: Datagram) -> Iterator[Datagram]:
        """See Responder."""
        bth = datagram.message.bth
        number = self._number(bth.psn)
        if datagram.trimmed:
            self.counters["trimmed"] += 1
        elif number < self._expected:
            self.counters["duplicates"] += 1
            yield self._answer(datagram, self._expected - 1, SYNDROME_ACK)
        elif number > self._expected:
            self.counters["out of order"] += 1
            if not self._complained:
                self._complained = True
                yield self._answer(datagram, self._expected, SYNDROME_SEQUENCE_ERROR)
        elif isinstance(target := self._judge(datagram, number), NackReason):
            yield self._answer(datagram, number, SYNDROME_ACCESS_ERROR)
        else:
            self._complained = False
            messages = self._messages
            self._place(datagram, number, target)
            self._unacknowledged += 1
            if bth.a or messages != self._messages or self._unacknowledged >= self.settings.sack_packets:
                self._unacknowledged = 0
                yield self._answer(datagram, number, SYNDROME_ACK)

    def ahead(self, datagram: Datagram) -> None:
        """No short cuts for the baseline."""

    def _answer(self, datagram: Datagram, number: int, syndrome: int) -> Datagram:
        bth = Bth(Opcode.ACKNOWLEDGE, dqp=self.identity.peer_qpn, psn=self._psn(number))
        aeth = Aeth(syndrome, self._messages & 0xFFFFFF)
        return Datagram(self.identity.peer, datagram.entropy, message(bth, aeth))
