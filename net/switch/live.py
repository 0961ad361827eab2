"""Live switch ports in eBPF: engines "kernel" and "ebpf", and the hosts' own ports of every engine.

Every port of the fabric has one record in shared memory (net.switch.ports): setting a fault is a store, reading
counters a load. HTB below makes the queue real. What a match lifts, and what is held back to be reordered, comes
through a ring buffer to one thread, which calls back and puts frames on their way again.

Use: ``engine = LivePorts(wiring, settings, ports)``; ``engine.record(port).down = 1``;
``engine.lift(port, match, callback)``.
Limits: see net.switch.settings. A lifted frame takes about a millisecond and passes the port's queue afterwards.
Errors: NetError; what a callback raises is raised by ``unlift``.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import IPv6Address
from typing import NamedTuple

from scapy.layers.l2 import Ether
from scapy.packet import Packet

from net.ebpf import programs
from net.ebpf.kernel import Records, Ring, Table, load
from net.errors import NetError
from net.match import Match
from net.mrc.frame import ETHERNET_BYTES
from net.netlink import EGRESS, INGRESS
from net.srv6 import Action, first_prefix
from net.switch.model import QueueConfig
from net.switch.ports import PortRecord
from net.switch.settings import MTU_BYTES, FabricSettings
from net.topology import Node, Port, Tier
from net.wire_tap import Tap
from net.wiring import FIRST_IFINDEX, Wiring

Callback = Callable[[Packet], Packet | Sequence[Packet] | None]
"""What becomes of a lifted packet: None drops it, a packet goes on (edited or not), several all go on."""

_RING_BYTES = 1 << 22
_FLOWS = 1 << 14
_BURST_S = 0.0002
_CLASSES = (programs.PRIORITY_CLASS, programs.DATA_CLASS)


class _MatchRecord(ctypes.LittleEndianStructure):
    _fields_ = [
        ("value", ctypes.c_uint8 * programs.LIFT_WINDOW_BYTES),
        ("mask", ctypes.c_uint8 * programs.LIFT_WINDOW_BYTES),
    ]


class Flow(NamedTuple):
    """What has arrived at a host from one peer by one entropy value (None: not MRC).

    seen_s: seconds since the last packet.
    """

    src: IPv6Address
    dst: IPv6Address
    entropy: int | None
    packets: int
    bytes: int
    marked: int
    trimmed: int
    seen_s: float


class LivePorts:
    """The maps and programs of one fabric. ``ports``: those that send through eBPF."""

    def __init__(self, wiring: Wiring, settings: FabricSettings, ports: Iterable[Port]) -> None:
        self.wiring = wiring
        self.settings = settings
        count = len(wiring.ports)
        self._records = Records(PortRecord, count)
        self._matches = Records(_MatchRecord, count)
        self._ring = Ring(_RING_BYTES)
        self._fib = Table(programs.FIB_KEY_BYTES, programs.FIB_VALUE_BYTES, self._rows())
        self._flows = Table(programs.FLOW_KEY_BYTES, programs.FLOW_VALUE_BYTES, _FLOWS, lru=True)
        self._configs: dict[Port, QueueConfig] = {}
        self._lifts = _Lifts(wiring, self._ring, settings.reorder_s)
        self._loaded: list[int] = []
        try:
            self._attach(set(ports))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Programs and maps go when their namespaces have gone too."""
        self._lifts.close()
        for fd in self._loaded:
            os.close(fd)
        self._loaded.clear()
        for one in (self._records, self._matches, self._ring, self._fib, self._flows):
            one.close()

    def record(self, port: Port) -> PortRecord:
        """Settings, faults and counters of a port, in memory shared with the kernel."""
        return self._records[self.wiring.ports[port]]

    def config(self, port: Port) -> QueueConfig:
        """What a port's queue is set to."""
        return self._configs[port]

    def set_rate(self, port: Port, config: QueueConfig) -> None:
        """Another rate, with its thresholds in bytes; what waits stays."""
        self._configs[port] = config
        self.record(port).change_rate(time.monotonic_ns(), config)
        if self.settings.shape:
            netlink = self.wiring.nodes[port.node.name].netlink
            self._shape(netlink.htb_rates, port, config.rate_bps)
            netlink.flush()

    def lift(self, port: Port, match: Match, callback: Callback) -> None:
        """From now on ``callback`` decides about packets that ``port`` is to send and ``match`` accepts."""
        number = self.wiring.ports[port]
        self._lifts.add(number, port, callback)
        record = self._matches[number]
        record.value[:], record.mask[:] = match.value, match.mask
        self._records[number].lift = 1

    def unlift(self, port: Port) -> None:
        """No more; raises what the callback has raised."""
        number = self.wiring.ports[port]
        self._records[number].lift = 0
        self._lifts.remove(number)

    def flows(self) -> Iterator[Flow]:
        """What has arrived at hosts."""
        now = time.monotonic_ns()
        for key, value in self._flows.items():
            packets, size, marked, trimmed, seen_ns = struct.unpack("=5Q", value)
            entropy, mrc = struct.unpack_from(">I", key, 32)[0], struct.unpack_from("=I", key, 36)[0]
            yield Flow(
                *(IPv6Address(key[:16]), IPv6Address(key[16:32]), entropy if mrc else None),
                *(packets, size, marked, trimmed, max(0, now - seen_ns) / 1e9),
            )

    # Making it.

    def _rows(self) -> int:
        """Of all switches' tables; a map needs one."""
        switches = [node for node in self.wiring.fabric.nodes() if node.tier is not Tier.HOST]
        switches = switches if self.settings.engine == "ebpf" else []
        return max(1, sum(1 for node in switches for _ in self.wiring.plan.node_routes(node)))

    def _attach(self, ports: set[Port]) -> None:
        block = struct.unpack("=I", self.wiring.plan.block.network_address.packed[:4])[0]
        shared = (self._records.fd, self._matches.fd, self._ring.fd, self._fib.fd, self._flows.fd)
        maps = programs.Maps(*shared, FIRST_IFINDEX, block)
        queue, arrive = self._load(programs.queue, maps), self._load(programs.arrive, maps)
        switch = self._load(programs.switch, maps) if self.settings.engine == "ebpf" else -1
        node_numbers = {node.name: number for number, node in enumerate(self.wiring.fabric.nodes())}
        by_node: dict[str, list[Port]] = {}
        for port in ports:
            by_node.setdefault(port.node.name, []).append(port)
        for name, own in by_node.items():
            netlink = self.wiring.nodes[name].netlink
            for port in own:
                index = self.wiring.ifindex(port)
                self._set_up(port, node_numbers[name])
                netlink.clsact(index)
                netlink.bpf(index, EGRESS, queue, "queue")
                if port.node.tier is Tier.HOST:
                    netlink.bpf(index, INGRESS, arrive, "arrive")
                elif switch >= 0:
                    netlink.bpf(index, INGRESS, switch, "switch")
                if self.settings.shape:
                    self._shape(netlink.htb, port, self._configs[port].rate_bps)
            netlink.flush()
            if switch >= 0 and own[0].node.tier is not Tier.HOST:
                self._fill(own[0].node, node_numbers[name])

    def _load(self, build: Callable[[programs.Maps], bytes], maps: programs.Maps) -> int:
        fd = load(programs.code(build, maps), build.__name__)
        self._loaded.append(fd)
        return fd

    def _set_up(self, port: Port, node_number: int) -> None:
        link = self.wiring.port_links[self.wiring.ports[port]]
        config = self._configs[port] = self.settings.queue(link, port)
        record = self.record(port)
        record.node = node_number
        record.configure(
            config,
            priority=self.settings.priority,
            trimmable=self.settings.trimmable,
            trim_dscp=self.settings.trim_dscp(link),
        )

    def _shape(self, wish: Callable[[int, int, tuple[int, int], int, int], None], port: Port, rate_bps: int) -> None:
        burst = max(MTU_BYTES + ETHERNET_BYTES, int(rate_bps / 8 * _BURST_S))
        wish(self.wiring.ifindex(port), programs.HTB_MAJOR, _CLASSES, rate_bps, burst)

    def _fill(self, node: Node, number: int) -> None:
        """The plan's rows of a switch."""
        for route in self.wiring.plan.node_routes(node):
            usid = first_prefix(route.prefix.network_address).network_address.packed[4:6]
            key = struct.pack("=I2sH", number, usid, 0)
            if route.action is Action.END:
                row = struct.pack("=II16x", programs.Verb.END, 0)
            else:
                assert route.port is not None
                port = Port(node, route.port)
                macs = self.wiring.mac(self.wiring.peer(port)) + self.wiring.mac(port)
                row = struct.pack("=II12s4x", programs.Verb.FORWARD, self.wiring.ifindex(port), macs)
            self._fib[key] = row


class _Lifts:
    """The thread that frames come to."""

    def __init__(self, wiring: Wiring, ring: Ring, reorder_s: float) -> None:
        self._wiring, self._ring, self._reorder_s = wiring, ring, reorder_s
        self._ports = list(wiring.ports)
        self._callbacks: dict[int, Callback] = {}
        self._errors: dict[int, Exception] = {}
        self._taps: dict[int, Tap] = {}
        self._held: list[tuple[float, int, int, bytes]] = []  # due, order, port, frame
        self._order = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="fabric-lifts", daemon=True)
        self._thread.start()

    def add(self, number: int, port: Port, callback: Callback) -> None:
        if number in self._callbacks:
            raise NetError(f"{port.node.name}'s port {port.number} is lifted already", "unlift it first")
        self._callbacks[number] = callback

    def remove(self, number: int) -> None:
        self._callbacks.pop(number, None)
        error = self._errors.pop(number, None)
        if error is not None:
            raise error

    def close(self) -> None:
        if not self._stop:
            self._stop = True
            self._ring.wake()
            self._thread.join()
            for tap in self._taps.values():
                tap.close()

    def _run(self) -> None:
        while not self._stop:
            self._ring.wait(max(0.0, self._held[0][0] - time.monotonic()) if self._held else None)
            for record in self._ring.read():
                number, why, length = struct.unpack_from("=IIQ", record)
                frame = record[programs.LIFT_HEAD_BYTES : programs.LIFT_HEAD_BYTES + length]
                if why == programs.Why.REORDER:
                    self._order += 1
                    heapq.heappush(self._held, (time.monotonic() + self._reorder_s, self._order, number, frame))
                else:
                    self._decide(number, frame)
            while self._held and self._held[0][0] <= time.monotonic():
                _, _, number, frame = heapq.heappop(self._held)
                self._send(number, frame)

    def _decide(self, number: int, frame: bytes) -> None:
        callback = self._callbacks.get(number)
        if callback is None:  # unlifted meanwhile
            self._send(number, frame)
            return
        try:
            for packet in answers(callback(Ether(frame))):
                self._send(number, bytes(packet))
        except Exception as error:
            self._errors.setdefault(number, error)

    def _send(self, number: int, frame: bytes) -> None:
        tap = self._taps.get(number)
        if tap is None:
            tap = Tap(self._wiring, self._ports[number], receives=False, mark=programs.MARK_LIFTED)
            self._taps[number] = tap
        tap.send(frame)


def answers(result: Packet | Sequence[Packet] | None) -> Sequence[Packet]:
    """What a callback wants sent."""
    if result is None:
        return ()
    return (result,) if isinstance(result, Packet) else result
