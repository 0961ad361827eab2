"""Channel between the keeper and its workers, and the two memfds that outlive a worker.

A packet of an AF_UNIX SOCK_SEQPACKET socket is a u32 (little endian) with the length of a JSON object, the
object with its ``op``, then raw bytes; file descriptors travel with it by SCM_RIGHTS.

Use: ``left, right = pair()``; ``left.send("take", client=1)``; ``right.recv()``.
``ConfigStore(fd)`` is a document committed by one 8-byte store; ``Health(fd)`` holds the heartbeats.
Limits: PACKET_BYTES_MAX per packet, FDS_MAX descriptors per packet.
Errors: OSError from the socket; ValueError for what does not fit or a packet that is not one.
"""

from __future__ import annotations

import array
import contextlib
import json
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PACKET_BYTES_MAX = 192 * 1024
FDS_MAX = 250
"""Linux takes up to 253 descriptors (SCM_MAX_FD) in one message."""

_LENGTH = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)


@dataclass(frozen=True)
class Packet:
    """One packet as received; whoever takes it owns ``fds``."""

    op: str
    fields: dict[str, Any] = field(default_factory=dict)
    raw: bytes = b""
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close the descriptors that came with the packet."""
        close_fds(self.fds)


def close_fds(fds: Sequence[int]) -> None:
    """Close every descriptor of ``fds``."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class Channel:
    """One end. Sends and receives block: both sides always drain, so neither waits for long."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # The default leaves no room for one whole packet plus the kernel's accounting of it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET_BYTES_MAX)

    def fileno(self) -> int:
        """Descriptor of the socket, for a selector or event loop."""
        return self._sock.fileno()

    def send(self, op: str, *, raw: bytes = b"", fds: Sequence[int] = (), **fields: Any) -> None:
        """Send one packet; ``fds`` stay open here."""
        self._transmit(_encode(op, fields, raw, fds), fds)

    def _transmit(self, packet: bytes, fds: Sequence[int], flags: int = 0) -> None:
        transmit(self._sock, packet, fds, flags)

    def recv(self, *, blocking: bool = True) -> Packet | None:
        """Next packet, or None at end of file; with ``blocking=False`` BlockingIOError when there is none."""
        flags = 0 if blocking else socket.MSG_DONTWAIT
        try:
            data, fds, msg_flags = receive(self._sock, PACKET_BYTES_MAX, flags)
        except ConnectionResetError:
            # The peer died with packets of ours unread. Linux tells so once, ahead of what it sent before.
            data, fds, msg_flags = receive(self._sock, PACKET_BYTES_MAX, flags)
        if not data:
            close_fds(fds)
            return None
        try:
            if msg_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ValueError("packet was truncated")
            op, fields, raw = _decode(data)
        except ValueError:
            close_fds(fds)
            raise
        return Packet(op, fields, raw, fds)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class QueuedChannel(Channel):
    """An end that never waits: what the socket does not take is kept, descriptors included, for ``flush``."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._queue: deque[tuple[bytes, list[int]]] = deque()

    @property
    def backlog(self) -> int:
        """Packets that wait for the socket to become writable."""
        return len(self._queue)

    def _transmit(self, packet: bytes, fds: Sequence[int], flags: int = 0) -> None:
        if not self._queue:
            with contextlib.suppress(BlockingIOError):
                return super()._transmit(packet, fds, flags | socket.MSG_DONTWAIT)
        self._queue.append((packet, [os.dup(fd) for fd in fds]))
        return None

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        with contextlib.suppress(BlockingIOError):
            while self._queue:
                packet, fds = self._queue[0]
                super()._transmit(packet, fds, socket.MSG_DONTWAIT)
                close_fds(self._queue.popleft()[1])

    def close(self) -> None:
        """Close the socket; what waits is lost."""
        while self._queue:
            close_fds(self._queue.popleft()[1])
        super().close()


def pair() -> tuple[Channel, Channel]:
    """Two connected channels."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(left), Channel(right)


def receive(sock: socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int], int]:
    """recvmsg with room for FDS_MAX descriptors: data, descriptors (close-on-exec), message flags."""
    data, ancillary, msg_flags, _ = sock.recvmsg(size, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC)
    return data, _descriptors(ancillary), msg_flags


def from_fd(fd: int) -> Channel:
    """Channel over an inherited descriptor, which it owns from now on."""
    return Channel(socket.socket(fileno=fd))


def transmit(sock: socket.socket, data: bytes | memoryview, fds: Sequence[int], flags: int = 0) -> int:
    """sendmsg with descriptors: bytes sent. (socket.send_fds of Python 3.11 ignores its flags.)"""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return sock.sendmsg([data], ancillary, flags | socket.MSG_NOSIGNAL)


def _encode(op: str, fields: dict[str, Any], raw: bytes, fds: Sequence[int]) -> bytes:
    document = json.dumps({"op": op, **fields}, separators=(",", ":")).encode()
    packet = _LENGTH.pack(len(document)) + document + raw
    if len(packet) > PACKET_BYTES_MAX:
        raise ValueError(f"packet {op!r} of {len(packet)} bytes exceeds {PACKET_BYTES_MAX}")
    if len(fds) > FDS_MAX:
        raise ValueError(f"packet {op!r} with {len(fds)} descriptors exceeds {FDS_MAX}")
    return packet


def _decode(data: bytes) -> tuple[str, dict[str, Any], bytes]:
    if len(data) < _LENGTH.size:
        raise ValueError("packet is shorter than its length word")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if end > len(data):
        raise ValueError("packet is shorter than its JSON part")
    fields = json.loads(data[_LENGTH.size : end])
    if not isinstance(fields, dict) or not isinstance(op := fields.pop("op", None), str):
        raise ValueError("packet has no op")
    return op, fields, data[end:]


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


class ConfigStore:
    """A document in a memfd that a kill at any instruction leaves old or new, never mixed.

    Layout: u64 active half (0 or 1), padding to 64 bytes, then two halves of ``half_bytes``, each a u64
    length and the bytes. ``commit`` writes the half that is not active and then selects it by one 8-byte
    aligned store, which x86-64 does not tear.

    :param fd: the memfd; stays the caller's, the mapping is the store's own
    :param half_bytes: size of one half in bytes
    :param offset: where the store begins in the memfd, a multiple of the page size
    """

    HALF_BYTES = 1024 * 1024
    _HEADER_BYTES = 64

    def __init__(self, fd: int, half_bytes: int = HALF_BYTES, offset: int = 0) -> None:
        self._half_bytes = half_bytes
        self._map = mmap.mmap(fd, self.size(half_bytes), offset=offset)
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def size(cls, half_bytes: int = HALF_BYTES) -> int:
        """Bytes that a store with such halves takes."""
        return cls._HEADER_BYTES + 2 * half_bytes

    @classmethod
    def create(cls, name: str = "config") -> int:
        """A fresh memfd for an empty store."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, cls.size())
        return fd

    def load(self) -> bytes:
        """The document committed last; b"" when there was none."""
        start = self._half(self._words[0])
        (length,) = _U64.unpack_from(self._map, start)
        return self._map[start + _U64.size : start + _U64.size + length]

    def commit(self, data: bytes) -> None:
        """Replace the document.

        :raises ValueError: the document is larger than a half
        """
        if len(data) > self._half_bytes - _U64.size:
            raise ValueError(f"document of {len(data)} bytes exceeds {self._half_bytes - _U64.size}")
        inactive = 1 - self._words[0]
        start = self._half(inactive)
        self._map[start : start + _U64.size] = _U64.pack(len(data))
        self._map[start + _U64.size : start + _U64.size + len(data)] = data
        # A cast memoryview stores the word with one mov; slices of an mmap are copied bytewise.
        self._words[0] = inactive

    def _half(self, index: int) -> int:
        assert index in (0, 1)
        return self._HEADER_BYTES + index * self._half_bytes

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._map.close()


class Health:
    """Heartbeats of one worker: u64 words in a memfd of 4096 bytes.

    Word 0 belongs to the control thread, word 1 + i to poller i, word 60 is the number of pollers. A word
    is alive while it changes; the value means nothing. Word 64 + i names the client that the owner of word i
    serves, word 61 the one whose task has failed; 0: none.
    """

    BYTES = 4096
    CONTROL = 0
    FIRST_POLLER = 1
    POLLERS = 60
    FAULT = 61
    SERVING = 64

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, self.BYTES)
        self.words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls) -> int:
        """A fresh memfd with every word zero."""
        fd = os.memfd_create("health", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls.BYTES)
        return fd

    def beat(self, word: int = CONTROL) -> None:
        """Show that the owner of ``word`` is alive."""
        self.words[word] += 1

    def snapshot(self) -> tuple[int, ...]:
        """The words that must move now: control, then each poller."""
        return tuple(self.words[: self._alive()])

    def suspects(self, stuck: int | None = None) -> list[int]:
        """The clients that a worker which has died was busy with, the likeliest first.

        Control serves several at a time and names one of them, so pollers come first.

        :param stuck: the word of ``snapshot`` whose owner it was
        """
        owners = [*range(self.FIRST_POLLER, self._alive()), self.CONTROL] if stuck is None else [stuck]
        words = [self.FAULT] if self.words[self.FAULT] else [self.SERVING + owner for owner in owners]
        return [client for word in words if (client := self.words[word])]

    def _alive(self) -> int:
        return self.FIRST_POLLER + min(self.words[self.POLLERS], self.POLLERS - self.FIRST_POLLER)

    def close(self) -> None:
        """Unmap."""
        self.words.release()
        self._map.close()
