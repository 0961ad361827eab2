"""The receiving half of a queue pair: checks, placement in memory, answers of three kinds, immediates in order.

No I/O, no clock. Payload goes to its place at once, whatever came before it; only immediates wait for all that was
sent earlier. A packet is judged in this order, and only the last row writes memory:

    cut by a switch                     NACK TRIMMED or TRIMMED_LASTHOP
    beyond the window                   NACK PSN_OOR_WINDOW
    received before                     SACK
    key unknown, or out of its region   NACK UNEXP_EVENT
    too many immediates wait            NACK UNEXP_EVENT
    else                                placed

A cut packet that asked for a SACK gets one, too, about what did arrive. A refused packet takes no PSN: what was
really sent under that number is still placed when it comes. When everything up to the end of a message is in place, a
transport acknowledgement says so. Answers take the way back that the endpoint knows (net.mrc.peer).
Source: OCP-MRC-1.0 sections 5.1, 6.3.1, 7.5.1-7.5.3 through its readers. Ours: when 64 bits do not hold all that
has come since the oldest gap, SACKs report on it 64 PSNs at a time, in turn with what is around a trigger that lies
further off, so that lost SACKs are made good before what they told of times out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from net.mrc.datagram import Datagram
from net.mrc.frame import message
from net.mrc.requestor import SACK_BITS, Identity, QpSettings
from net.mrc.wire import (
    ENDS,
    Aeth,
    Bth,
    CcState,
    EcnMark,
    Immdt,
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

SACK_COUNTS_BYTES_MIN = 1024
RCVD_UNIT_BYTES = 256
SACK_BEFORE_TRIGGER = 47
"""PSNs before the trigger that a SACK about it reports: many SACKs cover each, so none stays unreported."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a peer may write: ``memory`` at remote addresses from ``va`` on."""

    va: int
    memory: memoryview

    def window(self, va: int, size: int) -> memoryview | None:
        """The part at ``va``; None when that is not all inside."""
        start = va - self.va
        if start < 0 or start + size > len(self.memory):
            return None
        return self.memory[start : start + size]


class Responder:
    """``counters`` by name; ``arrived`` collects immediates in the order of their writes, taken by the endpoint."""

    def __init__(
        self,
        identity: Identity,
        settings: QpSettings,
        regions: Mapping[int, Region],
        way_back: Callable[[int], int] = lambda arrived_by: arrived_by,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self.arrived: list[int] = []
        self._regions = regions
        self._way_back = way_back
        self._expected = 0  # every number below has arrived
        self._beyond: set[int] = set()  # arrived above it
        self._immediates: dict[int, int] = {}
        self._ends: set[int] = set()  # last packets of messages that are not whole yet
        self._highest = 0  # the last that has arrived
        self._walk = 0  # from which number on the next SACK in turn reports
        self._messages = 0  # whole, and everything before them
        self._rcvd_bytes = 0
        self._unreported_packets = 0
        self._unreported_bytes = 0
        self._open_ask: int | None = None  # asked for a SACK while something before it was missing

    def _number(self, psn: int) -> int:
        return self._expected + psn_distance(psn, psn_add(self.identity.peer_psn, self._expected))

    def _psn(self, number: int) -> int:
        return psn_add(self.identity.peer_psn, number)

    def on_write(self, datagram: Datagram) -> Iterator[Datagram]:
        """A write, whole or cut; yields the answer, if one is due."""
        bth = datagram.message.bth
        number = self._number(bth.psn)
        if number < self._expected or number in self._beyond:
            self.counters["duplicates"] += 1
            if number < self._expected and bth.opcode in ENDS:
                yield self._acknowledge(datagram)
            yield self._sack(datagram, number)
            return
        target = self._judge(datagram, number)
        if isinstance(target, NackReason):
            self.counters[target.name] += 1
            yield self._nack(datagram, target)
            if datagram.trimmed and bth.a:
                yield self._sack(datagram, self._expected - 1)
            return
        messages = self._messages
        self._place(datagram, number, target)
        if self._is_due(datagram, number):
            yield self._sack(datagram, number)
        if self._messages != messages:
            yield self._acknowledge(datagram)

    def _judge(self, datagram: Datagram, number: int) -> NackReason | memoryview:
        """Why a packet is refused, or where its payload goes."""
        if datagram.trimmed:
            return NackReason.TRIMMED_LASTHOP if datagram.last_hop else NackReason.TRIMMED
        if number >= self._expected + self.settings.mpr:
            return NackReason.PSN_OOR_WINDOW
        target = self._target(datagram)
        if target is None:
            return NackReason.UNEXP_EVENT
        if datagram.message.get(Immdt) is not None and len(self._immediates) >= self.settings.wimm_max:
            return NackReason.UNEXP_EVENT
        return target

    def _target(self, datagram: Datagram) -> memoryview | None:
        reth = datagram.message.need(Reth)
        region = self._regions.get(reth.r_key)
        if region is None or len(datagram.message.payload) > reth.dma_length:
            return None
        return region.window(reth.va, len(datagram.message.payload))

    def _place(self, datagram: Datagram, number: int, target: memoryview) -> None:
        target[:] = datagram.message.payload
        immediate = datagram.message.get(Immdt)
        if immediate is not None:
            self._immediates[number] = immediate.value
        if datagram.message.bth.opcode in ENDS:
            self._ends.add(number)
        self.counters["placed"] += 1
        self._rcvd_bytes += datagram.wire_bytes()
        self._beyond.add(number)
        self._highest = max(self._highest, number)
        while self._expected in self._beyond:
            self._beyond.remove(self._expected)
            if self._expected in self._immediates:
                self.arrived.append(self._immediates.pop(self._expected))
            if self._expected in self._ends:
                self._ends.remove(self._expected)
                self._messages += 1
            self._expected += 1

    def ahead(self, datagram: Datagram) -> memoryview | None:
        """Where the successors of a datagram that was just heard go, as many of them as would be placed and not
        answered; None when there is none such. ``took`` says how many came."""
        (bth, _, payload), settings = datagram.message, self.settings
        size = len(payload)
        quiet = not (bth.a or bth.rtx or datagram.ce or datagram.trimmed or self._beyond) and self._open_ask is None
        if not quiet or not size or bth.opcode != Opcode.WRITE_MIDDLE or bth.psn != self._psn(self._expected - 1):
            return None
        reth = datagram.message.need(Reth)
        region = self._regions.get(reth.r_key)
        if region is None or size > reth.dma_length:
            return None
        start = reth.va + size - region.va
        count = min(
            settings.sack_packets - 1 - self._unreported_packets,
            (settings.sack_bytes - 1 - self._unreported_bytes) // max(SACK_COUNTS_BYTES_MIN, size),
            (len(region.memory) - start) // size,
        )
        return region.memory[start : start + count * size] if start >= 0 and count > 0 else None

    def took(self, datagram: Datagram, count: int) -> None:
        """So many successors of ``datagram`` are in place, by ``ahead``."""
        self._expected += count
        self._highest = max(self._highest, self._expected - 1)
        self.counters["placed"] += count
        self._rcvd_bytes += count * datagram.wire_bytes()
        self._unreported_packets += count
        self._unreported_bytes += count * max(SACK_COUNTS_BYTES_MIN, len(datagram.message.payload))

    def _is_due(self, datagram: Datagram, number: int) -> bool:
        """Enough has come, or the packet wants it; an ask that came early counts again when its gap closes."""
        self._unreported_packets += 1
        self._unreported_bytes += max(SACK_COUNTS_BYTES_MIN, len(datagram.message.payload))
        bth, settings = datagram.message.bth, self.settings
        closes = self._open_ask is not None and self._open_ask < self._expected
        if closes:
            self._open_ask = None
        if bth.a and number >= self._expected:
            self._open_ask = max(number, self._open_ask or 0)
        full = self._unreported_packets >= settings.sack_packets or self._unreported_bytes >= settings.sack_bytes
        return bool(full or closes or bth.a or bth.rtx or datagram.ce)

    def on_probe(self, datagram: Datagram) -> Datagram:
        """A reliability probe: answered with a SACK that echoes its id and its path's mark."""
        self.counters["probes"] += 1
        return self._sack(datagram, None)

    def _sack(self, datagram: Datagram, trigger: int | None) -> Datagram:
        """trigger: number of the packet it is about; None for a probe."""
        self._unreported_packets = self._unreported_bytes = 0
        self.counters["sacks"] += 1
        base = self._expected
        if self._highest >= base + SACK_BITS:
            if trigger is not None and trigger >= base + SACK_BITS and self.counters["sacks"] % 2:
                base = trigger - SACK_BEFORE_TRIGGER
            else:
                base = self._walk_on()
        bitmap = sum(1 << bit for bit in range(SACK_BITS) if base + bit in self._beyond) if self._beyond else 0
        probe = datagram.message.get(Peth)
        stamp = datagram.message.get(Tseth)
        offset = 0 if trigger is None else trigger - (self._expected - 1)
        if probe is not None:
            offset = (probe.probe_id ^ 0x8000) - 0x8000  # 16 bits in a signed field
        elif not -0x8000 <= offset < 0x8000:
            offset = 0  # a very old duplicate
        seth = Seth(
            m=EcnMark.SKIP_ONCE if datagram.ce else EcnMark.NONE,
            pr=int(probe is not None),
            ack_psn_offset=offset,
            entropy=datagram.entropy,
            spdcid=self.identity.qpn & 0xFFFF,
            dpdcid=self.identity.peer_qpn & 0xFFFF,
            cack_psn=self._psn(self._expected - 1),
            sack_offset=base - (self._expected - 1),
            bitmap=bitmap,
        )
        state = CcState(
            tx_timestamp=probe.tx_timestamp if probe else stamp.tx_timestamp if stamp else 0,
            ooo_count=min(len(self._beyond), 0x7FFF),
            rcvd_bytes=-(-self._rcvd_bytes // RCVD_UNIT_BYTES) & 0xFFFFFF,
        )
        rtx = datagram.message.bth.rtx
        bth = Bth(Opcode.SACK, dqp=self.identity.peer_qpn, psn=self._psn(self._expected - 1), rtx=rtx)
        return Datagram(self.identity.peer, self._way_back(datagram.entropy), message(bth, seth, state))

    def _walk_on(self) -> int:
        """The next 64 numbers from the oldest gap on, up to the last that has arrived; then the gap again."""
        if not self._expected < self._walk <= self._highest:
            self._walk = self._expected
        base, self._walk = self._walk, self._walk + SACK_BITS
        return base

    def _acknowledge(self, datagram: Datagram) -> Datagram:
        """The transport acknowledgement: all messages up to the count are in place."""
        self.counters["acknowledges"] += 1
        bth = Bth(Opcode.ACKNOWLEDGE, dqp=self.identity.peer_qpn, psn=self._psn(self._expected - 1))
        aeth = Aeth(msn=self._messages & 0xFFFFFF)
        return Datagram(self.identity.peer, self._way_back(datagram.entropy), message(bth, aeth))

    def _nack(self, datagram: Datagram, reason: NackReason) -> Datagram:
        stamp = datagram.message.get(Tseth)
        psn = datagram.message.bth.psn
        neth = Neth(
            nack_reason=reason,
            entropy=datagram.entropy,
            spdcid=self.identity.qpn & 0xFFFF,
            dpdcid=self.identity.peer_qpn & 0xFFFF,
            nack_psn=psn,
            tx_timestamp=stamp.tx_timestamp if stamp else 0,
        )
        bth = Bth(Opcode.NACK, dqp=self.identity.peer_qpn, psn=psn)
        return Datagram(self.identity.peer, self._way_back(datagram.entropy), message(bth, neth))
