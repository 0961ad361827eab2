"""A port's frames as they are on the wire, both ways, and a way to put frames there.

A plain packet socket shows a frame as it is when it is read: a switch may have shifted its destination meanwhile. So
frames are taken from a ring (PACKET_MMAP), into which the kernel copies them when they pass.

Use: ``tap = Tap(wiring, port)``; ``tap.send(frame)``; ``for frame in tap.frames(timeout_s=1): frame.data``.
``LinkSocket(tap)`` is the same for Scapy: sniff(opened_socket=...), automata, sr.
Limits: ``frames`` wait; more are lost, and ``count_lost`` tells how many. A tap does not see what it sends itself.
Errors: NetError. Source: Linux Documentation/networking/packet_mmap.rst (TPACKET_V2), packet(7).
"""

from __future__ import annotations

import errno
import mmap
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from scapy.layers.l2 import Ether
from scapy.packet import Packet
from scapy.supersocket import SuperSocket

from net.errors import NetError
from net.topology import Port
from net.wiring import Wiring

FRAMES = 512
_FRAME_BYTES = 1 << 14
_BLOCK_BYTES = 1 << 16
_SO_SNDBUFFORCE, _SEND_BYTES = 32, 1 << 26
_SOL_PACKET, _RX_RING, _STATISTICS, _VERSION = 263, 5, 6, 10
_TPACKET_V2, _STATUS_USER = 1, 1
_HEADER = struct.Struct("=IIIHHII")
_LINK_LAYER_OFFSET, _PACKET_TYPE_OFFSET, _OUTGOING = 32, 10, 4
_ETH_P_ALL = 3
NS_PER_S = 10**9


class TapFrame(NamedTuple):
    """A frame from its Ethernet header; when it passed (Unix time, ns), and from which port."""

    data: bytes
    time_ns: int
    sender: Port


class Tap:
    """On one port: sees both directions of its link; sends as the port's node.

    frames: how many may wait. mark: skb->mark of what it sends.
    """

    def __init__(
        self, wiring: Wiring, port: Port, *, receives: bool = True, frames: int = FRAMES, mark: int = 0
    ) -> None:
        self.port = port
        self._lost = 0
        self._peer = wiring.peer(port)
        self._ring: mmap.mmap | None = None
        self._next = 0
        self._frames = frames
        with wiring.namespace(port.node.name).entered():
            self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            # A whole switch in eBPF does not part frames from their sender: what waits in any queue counts as unsent.
            self.socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BYTES)
            if mark:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
            if receives:
                self.socket.setsockopt(_SOL_PACKET, _VERSION, _TPACKET_V2)
                blocks = frames * _FRAME_BYTES // _BLOCK_BYTES
                request = struct.pack("=4I", _BLOCK_BYTES, blocks, _FRAME_BYTES, frames)
                self.socket.setsockopt(_SOL_PACKET, _RX_RING, request)
                self._ring = mmap.mmap(self.socket.fileno(), frames * _FRAME_BYTES)
            self.socket.bind((wiring.interface(port), _ETH_P_ALL if receives else 0))
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, frame: bytes) -> None:
        """Puts a frame where the port's node would send it: into the port's queue."""
        try:
            try:
                self.socket.send(frame)
            except OSError as error:
                if error.errno != errno.ENETDOWN:
                    raise
                self.socket.send(frame)  # an interface that was down meanwhile has left its error behind
        except OSError as error:
            raise NetError(
                f"{self.port.node.name} cannot send a frame of {len(frame)} bytes: {error.strerror}"
            ) from error

    def take(self) -> TapFrame | None:
        """The next frame that is there."""
        ring = self._ring
        assert ring is not None, "a tap that only sends"
        start = self._next * _FRAME_BYTES
        status, _, captured, mac, _, seconds, nanoseconds = _HEADER.unpack_from(ring, start)
        if not status & _STATUS_USER:
            return None
        kind = ring[start + _LINK_LAYER_OFFSET + _PACKET_TYPE_OFFSET]
        data = ring[start + mac : start + mac + captured]
        struct.pack_into("=I", ring, start, 0)
        self._next = (self._next + 1) % self._frames
        sender = self.port if kind == _OUTGOING else self._peer
        return TapFrame(data, seconds * NS_PER_S + nanoseconds, sender)

    def direction(self, sender: Port) -> str:
        """``sender>receiver``, by names."""
        receiver = self._peer if sender == self.port else self.port
        return f"{sender.node.name}>{receiver.node.name}"

    def frames(self, timeout_s: float) -> Iterator[TapFrame]:
        """What passes, until nothing has for that long after it was asked for."""
        until = time.monotonic() + timeout_s
        while True:
            frame = self.take()
            if frame is not None:
                yield frame
                continue
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.socket], [], [], left)[0]:
                return

    def count_lost(self) -> int:
        """How many frames the ring had no room for since the tap was made."""
        _, dropped = struct.unpack(
            "=II", self.socket.getsockopt(_SOL_PACKET, _STATISTICS, 8)
        )  # starts anew each time
        self._lost += dropped
        return self._lost

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self.socket.close()


class LinkSocket(SuperSocket):
    """A tap as Scapy's socket. ``sniffed_on`` of a received packet is ``sender>receiver``."""

    desc = "frames of a fabric's link"

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.ins = self.outs = tap.socket
        self.closed = False

    def send(self, x: Packet | bytes) -> int:
        data = bytes(x)
        self.tap.send(data)
        return len(data)

    def recv(self, x: int = 65536, **kwargs: Any) -> Packet | None:
        frame = self.tap.take()
        return None if frame is None else self.packet(frame)

    def packet(self, frame: TapFrame) -> Packet:
        """A frame as Scapy has it."""
        packet: Packet = Ether(frame.data)
        packet.time = frame.time_ns / NS_PER_S
        packet.sniffed_on = self.tap.direction(frame.sender)
        return packet

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.tap.close()
