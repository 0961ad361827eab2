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

Several endpoints in one thread: ``poll_all``.
Time: ``poll`` reads the monotonic clock. If it is called long after the engine asked for it, it was descheduled, and
no path is blamed (net.mrc.endpoint); nor is one while nothing at all is heard of the peer (net.mrc.requestor).
Parameters: LIVE and LIVE_PATHS suit ports of 50 to 200 Mb/s on a shared machine. rate_bps: of each port, so that the
queue is here and not in the host's port; None sends as fast as the window lets. dilation: so many nanoseconds are one
of the engine's, so a port of 10 Mb/s is one of 10 Gb/s to it with a dilation of 1000, and its time stamps, which end
at 8 ms, reach 8 s. delay_ns: of the engine's time, that what arrives waits, as in the long cable that a veth is not.
ahead: frames that may wait in a port of ours. board: the folder where it tells the states of its entropy values
(net.mrc.board), so that `emu fabric show` shows them.
Limits: root, IPv6. Round trips above 8 ms of the engine's time (16 bits of 128 ns) read too short, so congestion
control (nscc) needs shorter ones, or dilation. Errors: NetError, MrcError.
Source: packet(7); net.mrc.frame for the frames; Gupta et al., To Infinity and Beyond: Time-Warped Network Emulation
(NSDI 2006), for dilation.
"""

from __future__ import annotations

import fcntl
import random
import select
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from net.errors import NetError
from net.mrc.board import Board
from net.mrc.datagram import Addressing, Burst, Datagram
from net.mrc.endpoint import Completion, Endpoint
from net.mrc.frame import ETHERNET_BYTES
from net.mrc.paths import PathSettings
from net.mrc.ports import Ports
from net.mrc.reception import Reception
from net.mrc.requestor import Identity, QpSettings
from net.srv6 import Plan
from net.topology import Node, Tier, plane_of
from net.wiring import Cabling

LIVE = QpSettings(window_bytes=128 * 1024, mpr=4096, timeout_ns=300_000_000, retries=25)
LIVE_PATHS = PathSettings(active=1 << 16, ev_min_active=2, probe_interval_ns=300_000_000)

_ETH_P_ALL = 3  # what the fabric's program at a host's port keeps from the kernel is seen by such sockets only
_ETHERTYPE, _IPV6 = slice(12, 14), b"\x86\xdd"
_SOL_PACKET, _IGNORE_OUTGOING = 263, 23
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE, _BUFFER_BYTES = 33, 32, 1 << 24
_SIOCGIFFLAGS, _RUNNING = 0x8913, 0x40 | 0x1
_FRAME_BYTES_MAX = 1 << 14
_BATCH = 64
_LOOK_NS = 50_000_000
_TELL_NS = 200_000_000


class HostPort(NamedTuple):
    """A host's interface in one plane, and the Ethernet header of what it sends."""

    interface: str
    ethernet: bytes


def host_ports(cabling: Cabling, host: int) -> dict[int, HostPort]:
    """The ports of a host of a live fabric (net.wiring)."""
    ports = cabling.node_ports(Node(Tier.HOST, 0, host))
    return {port.number: HostPort(cabling.interface(port), cabling.ethernet(port)) for port in ports}


class LiveEndpoint:
    """``ports`` by plane. ``engine`` is the Endpoint."""

    def __init__(
        self,
        plan: Plan,
        host: int,
        ports: Mapping[int, HostPort],
        *,
        seed: int | None = None,
        rate_bps: int | None = None,
        dilation: int = 1,
        delay_ns: int = 0,
        ahead: int = 2,
        baseline: bool = False,
        board: Path | None = None,
    ) -> None:
        """See the module; ``baseline``: queue pairs of net.mrc.rc."""
        self.plan = plan
        self.host = host
        self.dilation = dilation
        own = Ports(None if rate_bps is None else rate_bps * dilation, ahead=ahead)
        self.engine = Endpoint(random.Random(seed), baseline=baseline, ports=own)
        self.starved_ns = 0
        """How long ports had nothing to send because ``turn`` came late; of the monotonic clock."""
        self._slack_ns = own.slack_ns * dilation
        ethernet = {plane: port.ethernet for plane, port in ports.items()}
        self._addressing = Addressing(plan, host, ethernet=ethernet)
        self._reception = Reception(self._addressing, self.engine, follows=not delay_ns)
        self._ports = dict(ports)
        self._up = dict.fromkeys(ports, True)
        self._sockets: dict[int, socket.socket] = {}
        self._buffer = memoryview(bytearray(_FRAME_BYTES_MAX))
        self._poll = select.epoll()
        self._planes: dict[int, int] = {}
        self._delay_ns = delay_ns * dilation
        self._travelling: deque[tuple[int, Datagram]] = deque()  # with when it arrives
        self._wake_ns: int | None = 0
        self._look_ns = 0
        self._board = None if board is None else Board(board, host)
        self._tell_ns = 0
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
        self._poll.register(made, select.EPOLLIN)
        self._planes[made.fileno()] = plane

    @property
    def refused(self) -> Counter[str]:
        """Frames that were no MRC for this host, by reason."""
        return self._reception.refused

    def close(self) -> None:
        """No peer is told; its requests run into their retry budget."""
        if self._board is not None:
            self._board.post(self.engine)  # how it ended
        for made in self._sockets.values():
            made.close()
        self._sockets.clear()
        self._poll.close()

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

    def connect(
        self,
        identity: Identity,
        settings: QpSettings = LIVE,
        paths: PathSettings = LIVE_PATHS,
        evs: Sequence[int] | None = None,
    ) -> None:
        """A queue pair over ``evs`` (None: all paths) to a peer; the peer makes its own with the ends exchanged."""
        mine = self.plan.fabric.evs(self.host, identity.peer) if evs is None else evs
        self.engine.connect(identity, mine, plane_of, settings, paths)

    def write(
        self, qpn: int, request_id: int, data: bytes | memoryview, va: int, r_key: int, immediate: int | None = None
    ) -> None:
        """See Endpoint.write."""
        self.engine.write(qpn, request_id, data, va, r_key, immediate)
        self._wake_ns = 0

    def poll(self, timeout_s: float = 0) -> list[Completion]:
        """Receives and sends until something has completed, or for so long; what completed, in order."""
        return [completion for _, completion in poll_all([self], timeout_s)]

    # The event loop.

    def fileno(self) -> int:
        """Readable when a frame is there."""
        return self._poll.fileno()

    @property
    def due_ns(self) -> int:
        """When ``turn`` has something to do even if no frame comes; of the monotonic clock."""
        times = [self._look_ns]
        if self._wake_ns is not None:
            times.append(self._wake_ns)
        if self._travelling:
            times.append(self._travelling[0][0])
        return min(times)

    def turn(self) -> list[Completion]:
        """Takes what is there, lets the engine make a step, sends; what completed, in order."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + _LOOK_NS
            self._look_at_ports()
        if self._board is not None and now_ns >= self._tell_ns:
            self._tell_ns = now_ns + _TELL_NS
            self._board.post(self.engine)
        if self._wake_ns:
            self.starved_ns += max(0, now_ns - self._wake_ns - self._slack_ns)
        for item in self.engine.run(now_ns // self.dilation, self._arrived(now_ns)):
            if isinstance(item, Burst):
                frames = list(self._addressing.encode_burst(item))  # kernel and interpreter share caches: one, then
                for entropy, frame in zip(item.entropies, frames):
                    self._put(entropy, frame)
            else:
                self._put(item.entropy, self._addressing.encode(item))
        wake_ns = self.engine.wake_ns
        self._wake_ns = None if wake_ns is None else wake_ns * self.dilation
        return self.engine.take_completions()

    def _arrived(self, now_ns: int) -> Iterator[Datagram]:
        """What is there; with a delay, what was there so long ago."""
        for fd, _ in self._poll.poll(0):
            for datagram in self._receive(self._planes[fd]):
                if self._delay_ns:
                    self._travelling.append((now_ns + self._delay_ns, datagram))
                else:
                    yield datagram
        while self._travelling and self._travelling[0][0] <= now_ns:
            yield self._travelling.popleft()[1]

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
        """Up to so many frames, all read into the same buffer; with a delay, each stays for its time."""
        made, buffer, left = self._sockets[plane], self._buffer, _BATCH

        def read() -> bytes | memoryview | None:
            nonlocal left
            while left:
                left -= 1
                try:
                    size = made.recv_into(buffer, 0, socket.MSG_DONTWAIT)
                except OSError:
                    return None  # nothing more is there; or the port went down, which its flags will tell
                if buffer[_ETHERTYPE] == _IPV6:
                    frame = buffer[ETHERNET_BYTES:size]
                    return bytes(frame) if self._delay_ns else frame
            return None

        return self._reception.datagrams(read)

    def _put(self, entropy: int, frame: bytes) -> None:
        try:
            self._sockets[plane_of(entropy)].send(frame)
        except OSError:
            pass  # lost like any other: the port is down, or its queue full


def poll_all(endpoints: Sequence[LiveEndpoint], timeout_s: float = 0) -> list[tuple[LiveEndpoint, Completion]]:
    """``poll`` of several endpoints by one thread: until something has completed at any of them, or for so long."""
    waiting = select.poll()
    for endpoint in endpoints:
        waiting.register(endpoint.fileno(), select.POLLIN)
    deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    while True:
        until_ns = min(deadline_ns, *(endpoint.due_ns for endpoint in endpoints))
        ready = {fd for fd, _ in waiting.poll(max(0.0, (until_ns - time.monotonic_ns()) / 1e6))}
        now_ns = time.monotonic_ns()
        # Whoever is first finds the shorter queues: they have their turns in the order in which they should have had
        # them, and nobody is always first of those who only now hear something.
        turns = sorted(
            (min(now_ns, endpoint.due_ns), random.random(), number)
            for number, endpoint in enumerate(endpoints)
            if endpoint.due_ns <= now_ns or endpoint.fileno() in ready
        )
        completed = [(endpoints[n], completion) for *_, n in turns for completion in endpoints[n].turn()]
        if completed or now_ns >= deadline_ns:
            return completed
