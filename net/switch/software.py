"""Engine "scapy": switches in plain Python, for reading and for checking the others; two to three ms per hop.

A thread takes every frame that reaches a switch port from the wire, shifts and looks up as net.srv6 says, asks the
port's queue model, edits with Scapy, and sends when the model says that the packet has left.

Use: ``engine = SoftPorts(wiring, settings, ports)``; then as net.switch.live.
Limits: a few hundred packets a second in all. A packet is lifted before chance may lose it. Duplicates take no queue.
Errors: NetError. Source: net.switch.model, net.srv6; RFC 8200 section 3.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import select
import threading
import time
from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv6Address

from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from net.errors import NetError
from net.match import Match
from net.mrc.frame import ECN_CE, ECN_MASK, ETHERNET_BYTES, IPV6_BYTES
from net.srv6 import Action, Table, decide
from net.switch import model
from net.switch.live import Callback, answers
from net.switch.model import Cause, PortQueue, QueueConfig
from net.switch.ports import Fault, check_share
from net.switch.settings import FabricSettings
from net.topology import Port
from net.wire_tap import Tap
from net.wiring import Wiring

_TAP_FRAMES = 128
_PS_PER_NS = 1000
_OUTER_BYTES = ETHERNET_BYTES + IPV6_BYTES
_ACCEPTED = (Cause.DATA, Cause.PRIORITY, Cause.ECN, Cause.TRIM)


class SoftPort:
    """One port: what a record of net.switch.ports is in the other engines."""

    def __init__(self, config: QueueConfig, trim_dscp: int, settings: FabricSettings, seed: str) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.queue = PortQueue(config, self.rng)
        self.shares = dict.fromkeys(("corrupt", "duplicate", "reorder"), 0.0)
        self.lifted: tuple[Match, Callback] | None = None
        self.error: Exception | None = None
        self.fault_packets: Counter[Fault] = Counter()
        self._trim_dscp, self._settings = trim_dscp, settings

    @property
    def down(self) -> int:
        return int(self.queue.down)

    @down.setter
    def down(self, value: int) -> None:
        self.queue.down = bool(value)

    @property
    def sent_packets(self) -> int:
        return sum(self.queue.packets[cause] for cause in _ACCEPTED) + self.fault_packets[Fault.DUPLICATE]

    @property
    def sent_bytes(self) -> int:
        return self.queue.sent_bytes

    def share(self, fault: str, value: float) -> None:
        check_share(fault, value)
        if fault == "loss":
            self.queue.loss = value
        else:
            self.shares[fault] = value

    def get_share(self, fault: str) -> float:
        return self.queue.loss if fault == "loss" else self.shares[fault]

    def packets(self, cause: Cause) -> int:
        return self.queue.packets[cause]

    def bytes_in(self, cause: Cause) -> int:
        return self.queue.bytes_in[cause]

    def faults(self, fault: Fault) -> int:
        return self.fault_packets[fault]

    def meets(self, fault: Fault) -> bool:
        """Whether chance has it; counted."""
        met = self.rng.random() < self.shares[fault.value]
        self.fault_packets[fault] += met
        return met

    def offer(self, packet: Packet) -> int | None:
        """Marks or trims ``packet``; when its last bit has left (ps), None: dropped."""
        ip, size = packet[IPv6], len(packet)
        dscp = ip.tc >> 2
        verdict = self.queue.offer(
            time.monotonic_ns() * _PS_PER_NS,
            size,
            ect=bool(ip.tc & ECN_MASK),
            priority=dscp in self._settings.priority,
            trimmable=dscp in self._settings.trimmable,
        )
        if verdict.action is model.Action.MARK:
            ip.tc |= ECN_CE
        elif verdict.action is model.Action.TRIM:
            ip.tc = self._trim_dscp << 2 | ip.tc & ECN_MASK
            ip.plen = verdict.size_bytes - _OUTER_BYTES
            packet[Raw].load = packet[Raw].load[: ip.plen]
        return verdict.departure_ps


class SoftPorts:
    """All switch ports of a fabric, and the thread that serves them."""

    def __init__(self, wiring: Wiring, settings: FabricSettings, ports: Iterable[Port]) -> None:
        self._wiring, self._settings = wiring, settings
        self._ports: dict[Port, SoftPort] = {}
        self._taps: dict[Port, Tap] = {}
        self._tables: dict[Port, Table] = {}
        self._due: list[tuple[int, int, Port, bytes, bool]] = []  # time ns, order, port, frame, still to be queued
        self._order = 0
        self._stop = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            for port in ports:
                link = wiring.port_links[wiring.ports[port]]
                queue = settings.queue(link, port)
                self._ports[port] = SoftPort(
                    queue, settings.trim_dscp(link), settings, f"{port.node.name} {port.number}"
                )
                self._taps[port] = Tap(wiring, port, frames=_TAP_FRAMES)
                self._tables[port] = wiring.plan.table(port.node)
        except BaseException:
            self._close_taps()
            raise
        self._by_fd = {tap.fileno(): port for port, tap in self._taps.items()}
        self._thread = threading.Thread(target=self._run, name="fabric-switches", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        if not self._stop:
            self._stop = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._close_taps()

    def _close_taps(self) -> None:
        for tap in self._taps.values():
            tap.close()
        os.close(self._wake)

    def record(self, port: Port) -> SoftPort:
        """Settings, faults and counters of a port."""
        return self._ports[port]

    def config(self, port: Port) -> QueueConfig:
        """What a port's queue is set to."""
        return self._ports[port].config

    def set_rate(self, port: Port, config: QueueConfig) -> None:
        """Another rate, with its thresholds in bytes; what waits stays."""
        soft = self._ports[port]
        soft.queue.change_rate(time.monotonic_ns() * _PS_PER_NS, config.rate_bps)
        soft.config = config

    def lift(self, port: Port, match: Match, callback: Callback) -> None:
        """As LivePorts.lift."""
        if self._ports[port].lifted is not None:
            raise NetError(f"{port.node.name}'s port {port.number} is lifted already", "unlift it first")
        self._ports[port].lifted = (match, callback)

    def unlift(self, port: Port) -> None:
        """As LivePorts.unlift."""
        soft = self._ports[port]
        soft.lifted = None
        error, soft.error = soft.error, None
        if error is not None:
            raise error

    # The thread.

    def _run(self) -> None:
        waiting = [*self._by_fd, self._wake]
        while not self._stop:
            timeout_s = max(0, self._due[0][0] - time.monotonic_ns()) / 1e9 if self._due else None
            for fd in select.select(waiting, [], [], timeout_s)[0]:
                port = self._by_fd.get(fd)
                frame = self._taps[port].take() if port is not None else None
                if port is not None and frame is not None and frame.sender != port:
                    self._arrive(port, frame.data)
            while self._due and self._due[0][0] <= time.monotonic_ns():
                _, _, port, data, queued = heapq.heappop(self._due)
                if queued:
                    self._queue(port, _packet(data))
                else:
                    with contextlib.suppress(NetError):  # the interface went down while the frame waited
                        self._taps[port].send(data)

    def _arrive(self, came: Port, frame: bytes) -> None:
        packet = _packet(frame)
        if IPv6 not in packet:
            return
        ip = packet[IPv6]
        address, route = decide(self._tables[came], IPv6Address(ip.dst))
        if route is None or route.action is not Action.FORWARD or route.port is None or ip.hlim < 2:
            self._ports[came].fault_packets[Fault.UNROUTED] += 1
            return
        out = Port(came.node, route.port)
        packet[Ether].src, packet[Ether].dst = (
            mac.hex(":") for mac in (self._wiring.mac(out), self._wiring.mac(self._wiring.peer(out)))
        )
        ip.dst, ip.hlim = str(address), ip.hlim - 1
        soft = self._ports[out]
        if not soft.down:
            if soft.lifted is not None and soft.lifted[0].accepts(bytes(packet)):
                soft.fault_packets[Fault.LIFT] += 1
                self._lift(out, bytes(packet), soft.lifted[1])
                return
            if soft.meets(Fault.REORDER):
                self._later(
                    time.monotonic_ns() + int(self._settings.reorder_s * 1e9), out, bytes(packet), queued=True
                )
                return
            if soft.meets(Fault.CORRUPT):
                load = bytearray(packet[Raw].load)
                load[soft.rng.randrange(len(load))] ^= 1 << soft.rng.randrange(8)
                packet[Raw].load = bytes(load)
        self._queue(out, packet, fresh=True)

    def _lift(self, out: Port, frame: bytes, callback: Callback) -> None:
        try:
            for packet in answers(callback(Ether(frame))):
                self._queue(out, _packet(bytes(packet)))
        except Exception as error:
            self._ports[out].error = self._ports[out].error or error

    def _queue(self, out: Port, packet: Packet, *, fresh: bool = False) -> None:
        soft = self._ports[out]
        departure_ps = soft.offer(packet)
        if departure_ps is None:
            return
        due_ns = departure_ps // _PS_PER_NS if self._settings.shape else 0
        self._later(due_ns, out, bytes(packet))
        if fresh and packet[IPv6].tc >> 2 not in self._settings.priority and soft.meets(Fault.DUPLICATE):
            self._later(due_ns, out, bytes(packet))

    def _later(self, due_ns: int, out: Port, frame: bytes, *, queued: bool = False) -> None:
        self._order += 1
        heapq.heappush(self._due, (due_ns, self._order, out, frame, queued))


def _packet(frame: bytes) -> Packet:
    """Outer headers as layers; what they carry is not looked at."""
    return Ether(frame[:_OUTER_BYTES]) / Raw(frame[_OUTER_BYTES:])
