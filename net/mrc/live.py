"""An MRC endpoint on real interfaces: writes into another host's memory over a live fabric.

It reads and writes whole frames on packet sockets, one per plane, because what it needs stands in outer headers (a
mark that the kernel does not copy inside) and in frames that the kernel would not deliver (cut ones). Frames that are
no MRC for this host are left alone; damaged ones are counted by reason.

Use, in the host's namespace::

    with LiveEndpoint(plan, host=0, ports=host_ports(wiring, 0)) as mine:
        key = mine.register(bytearray(1 << 20), va=0)     # tell the peer
        mine.connect(Identity(qpn=0x100, peer=3, peer_qpn=0x103))
        mine.write(0x100, request_id=1, data=data, va=0, r_key=peer_key, immediate=7)
        for completion in mine.poll(timeout_s=0.1): ...   # nothing moves but inside poll

Time: ``poll`` reads the monotonic clock. If it is called long after the engine asked for it, it was descheduled, and
no path is blamed (net.mrc.endpoint); nor is one while nothing at all is heard of the peer (net.mrc.requestor).
Parameters: LIVE and LIVE_PATHS suit ports of 50 to 200 Mb/s on a shared machine. rate_bps: of each port, so that the
queue is here and not in the host's port; None sends as fast as the window lets.
Limits: root, IPv6. Round trips above 8 ms (16 bits of 128 ns) read too short, so congestion control (nscc) needs
shorter ones. Errors: NetError, MrcError.
Source: packet(7); net.mrc.frame for the frames.
"""

from __future__ import annotations

import contextlib
import fcntl
import random
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import NamedTuple

from net.errors import MrcError, NetError
from net.mrc.datagram import Addressing, Datagram
from net.mrc.endpoint import Completion, Endpoint
from net.mrc.frame import ETHERNET_BYTES
from net.mrc.paths import PathSettings
from net.mrc.ports import Ports
from net.mrc.requestor import Identity, QpSettings
from net.srv6 import Plan
from net.topology import Node, Tier, plane_of
from net.wiring import Wiring

LIVE = QpSettings(window_bytes=128 * 1024, mpr=4096, timeout_ns=300_000_000, retries=25)
LIVE_PATHS = PathSettings(active=1 << 16, ev_min_active=2, probe_interval_ns=300_000_000)

_ETH_P_ALL = 3  # what the fabric's program at a host's port keeps from the kernel is seen by such sockets only
_IPV6 = b"\x86\xdd"
_SOL_PACKET, _IGNORE_OUTGOING = 263, 23
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE, _BUFFER_BYTES = 33, 32, 1 << 24
_SIOCGIFFLAGS, _RUNNING = 0x8913, 0x40 | 0x1
_FRAME_BYTES_MAX = 1 << 14
_BATCH = 64
_LOOK_NS = 50_000_000


class HostPort(NamedTuple):
    """A host's interface in one plane, and the Ethernet header of what it sends."""

    interface: str
    ethernet: bytes


def host_ports(wiring: Wiring, host: int) -> dict[int, HostPort]:
    """The ports of a host of a live fabric (net.wiring)."""
    ports = wiring.node_ports(Node(Tier.HOST, 0, host))
    return {port.number: HostPort(wiring.interface(port), wiring.ethernet(port)) for port in ports}


class LiveEndpoint:
    """``ports`` by plane. ``engine`` is the Endpoint; ``refused`` counts frames by reason."""

    def __init__(
        self,
        plan: Plan,
        host: int,
        ports: Mapping[int, HostPort],
        *,
        seed: int | None = None,
        rate_bps: int | None = None,
    ) -> None:
        self.plan = plan
        self.host = host
        self.engine = Endpoint(random.Random(seed), ports=Ports(rate_bps))
        self.refused: Counter[str] = Counter()
        self._addressing = Addressing(plan, host)
        self._ports = dict(ports)
        self._up = dict.fromkeys(ports, True)
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._planes: dict[int, int] = {}
        self._wake_ns: int | None = 0
        self._look_ns = 0
        try:
            for plane, port in self._ports.items():
                self._open(plane, port)
        except OSError as error:
            self.close()
            raise NetError(
                f"no packet socket on {port.interface}: {error.strerror}", "be root, in the host"
            ) from error

    def _open(self, plane: int, port: HostPort) -> None:
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)  # hears nothing yet
        self._sockets[plane] = made
        made.bind((port.interface, _ETH_P_ALL))
        made.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        for option in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
            made.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._poll.register(made, select.POLLIN)
        self._planes[made.fileno()] = plane

    def close(self) -> None:
        """Nobody is told; the peer's requests run into their retry budget."""
        for made in self._sockets.values():
            made.close()
        self._sockets.clear()

    def __enter__(self) -> LiveEndpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The message API.

    def register(self, memory: bytearray | memoryview, va: int) -> int:
        """See Endpoint.register."""
        return self.engine.register(memory, va)

    def unregister(self, key: int) -> None:
        """See Endpoint.unregister."""
        self.engine.unregister(key)

    def connect(self, identity: Identity, settings: QpSettings = LIVE, paths: PathSettings = LIVE_PATHS) -> None:
        """A queue pair over all paths to a peer; the peer makes its own with the ends exchanged."""
        evs = self.plan.fabric.evs(self.host, identity.peer)
        self.engine.connect(identity, evs, plane_of, settings, paths)

    def write(
        self, qpn: int, request_id: int, data: bytes, va: int, r_key: int, immediate: int | None = None
    ) -> None:
        """See Endpoint.write."""
        self.engine.write(qpn, request_id, data, va, r_key, immediate)
        self._wake_ns = 0

    def poll(self, timeout_s: float = 0) -> list[Completion]:
        """Receives and sends until something has completed, or for so long; what completed, in order."""
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            completed = self._turn(deadline_ns)
            if completed or time.monotonic_ns() >= deadline_ns:
                return completed

    def _turn(self, deadline_ns: int) -> list[Completion]:
        until_ns = deadline_ns if self._wake_ns is None else min(deadline_ns, self._wake_ns)
        wait_ms = max(0.0, (until_ns - time.monotonic_ns()) / 1e6)
        ready = [self._planes[fd] for fd, event in self._poll.poll(wait_ms) if event & select.POLLIN]
        received = [datagram for plane in ready for datagram in self._receive(plane)]
        now_ns = time.monotonic_ns()
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + _LOOK_NS
            self._look_at_ports()
        output = self.engine.step(now_ns, received)
        self._wake_ns = output.wake_ns
        for datagram in output.send:
            self._send(datagram)
        return output.completions

    def _look_at_ports(self) -> None:
        """A port without carrier is down: that is the only thing about a path that a host can see by itself."""
        for plane, port in self._ports.items():
            request = struct.pack("16sH14x", port.interface.encode(), 0)
            flags = struct.unpack("16xH14x", fcntl.ioctl(self._sockets[plane], _SIOCGIFFLAGS, request))[0]
            up = flags & _RUNNING == _RUNNING
            if up != self._up[plane]:
                self._up[plane] = up
                self.engine.set_port(plane, up=up)

    def _receive(self, plane: int) -> Iterator[Datagram]:
        made = self._sockets[plane]
        for _ in range(_BATCH):
            try:
                data = made.recv(_FRAME_BYTES_MAX, socket.MSG_DONTWAIT)
            except OSError:
                return  # nothing more is there; or the port went down, which its flags will tell
            if data[12:14] != _IPV6:
                continue
            try:
                yield self._addressing.decode(memoryview(data)[ETHERNET_BYTES:])
            except MrcError as error:
                self.refused[error.reason.value] += 1

    def _send(self, datagram: Datagram) -> None:
        plane = plane_of(datagram.entropy)
        frame = self._ports[plane].ethernet + self._addressing.encode(datagram)
        with contextlib.suppress(OSError):  # lost like any other: the port is down, or its queue full
            self._sockets[plane].send(frame)
