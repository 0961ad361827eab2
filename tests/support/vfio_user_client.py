"""A vfio-user client over a UNIX socket, written from the specification; it shares no code with the server.

Use: `client = VfioUserClient(path); client.negotiate(); client.device_info()`; then regions, DMA, irqs.
An error reply raises `VfioUserError` with the errno. Every wait has a deadline.
Source: vfio-user.rst ("Message structure" and the command sections), struct formats repeated here on purpose.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

VERSION, DMA_MAP, DMA_UNMAP, DEVICE_GET_INFO, REGION_INFO, REGION_IO_FDS, IRQ_INFO, SET_IRQS = range(1, 9)
REGION_READ, REGION_WRITE, DMA_READ, DMA_WRITE, DEVICE_RESET = range(9, 14)
REGION_WRITE_MULTI = 15

FLAG_REPLY, FLAG_NO_REPLY, FLAG_ERROR = 0x1, 0x10, 0x20

HEADER = struct.Struct("<HHIII")  # id, command, size (header included), flags, errno
REGION_ACCESS = struct.Struct("<QII")  # offset, region, count
DMA_MAP_BODY = struct.Struct("<IIQQQ")  # argsz, flags, file offset, iova, size
DMA_UNMAP_BODY = struct.Struct("<IIQQ")  # argsz, flags, iova, size
DMA_ACCESS = struct.Struct("<QQ")  # iova, count
REGION_INFO_BODY = struct.Struct("<IIIIQQ")  # argsz, flags, index, cap_offset, size, offset
FOUR_WORDS = struct.Struct("<IIII")  # device info, irq info
SET_IRQS_BODY = struct.Struct("<IIIII")  # argsz, flags, index, start, count

BAR0, CONFIG_REGION, MSI_INDEX, MSIX_INDEX = 0, 7, 1, 2
IRQ_DATA_NONE, IRQ_DATA_EVENTFD, IRQ_ACTION_TRIGGER = 0x1, 0x4, 0x20
DEADLINE_S = 60.0  # generous: the machine may be loaded; nothing waits this long when all is well


class VfioUserError(OSError):
    """An error reply of the server."""


@dataclass
class Message:
    """One message as received; `fds` belong to the caller."""

    id: int
    command: int
    flags: int
    errno: int
    payload: bytes
    fds: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Region:
    index: int
    flags: int
    size: int
    windows: tuple[tuple[int, int], ...] = ()  # sparse-mmap capability: (offset, size)
    fds: tuple[int, ...] = ()
    offset: int = 0


class VfioUserClient:
    """One connection. `dma_access(iova, count, data or None) -> bytes` serves the server's DMA messages."""

    def __init__(self, path: str, *, deadline_s: float = DEADLINE_S) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(path)  # waits for room in a listener's queue, which a socket with a timeout does not
        self.sock.settimeout(deadline_s)
        self.deadline_s = deadline_s
        self.capabilities: dict[str, Any] = {}
        self.version = (0, 0)
        self.max_fds = 1
        self.dma_access: Callable[[int, int, bytes | None], bytes] | None = None
        self._next_id = 1

    def __enter__(self) -> VfioUserClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    # --- messages
    def send(
        self,
        command: int,
        payload: bytes = b"",
        *,
        fds: Sequence[int] = (),
        flags: int = 0,
        size: int | None = None,
        message_id: int | None = None,
    ) -> int:
        """Send one message and return its id; `size` overrides the header's size field."""
        if message_id is None:
            message_id = self._next_id
            self._next_id = self._next_id % 0xFFFF + 1
        total = HEADER.size + len(payload) if size is None else size
        self.send_raw(HEADER.pack(message_id, command, total, flags, 0) + payload, fds)
        return message_id

    def send_raw(self, data: bytes, fds: Sequence[int] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.sock.sendmsg([data], ancillary)
        if sent < len(data):
            self.sock.sendall(data[sent:])

    def receive(self) -> Message:
        """The server's next message. Raises ConnectionError at end of file, TimeoutError at the deadline."""
        deadline = time.monotonic() + self.deadline_s
        fds: list[int] = []
        header = self._receive_exactly(HEADER.size, fds, deadline)
        message_id, command, size, flags, number = HEADER.unpack(header)
        assert HEADER.size <= size <= (2 << 20), f"server sent a message of {size} bytes"
        payload = self._receive_exactly(size - HEADER.size, fds, deadline)
        return Message(message_id, command, flags, number, payload, fds)

    def _receive_exactly(self, count: int, fds: list[int], deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            chunk, ancillary, _, _ = self.sock.recvmsg(count - len(data), socket.CMSG_SPACE(4 * 64))
            for level, kind, raw in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers = array.array("i")
                    numbers.frombytes(raw[: len(raw) - len(raw) % 4])
                    fds.extend(numbers)
            if not chunk:
                raise ConnectionError("the server closed the connection")
            data += chunk
        self.sock.settimeout(self.deadline_s)
        return bytes(data)

    def wait_reply(self, message_id: int, command: int) -> Message:
        """The reply to a command. Raises VfioUserError. As in QEMU, what the server asks meanwhile waits for it."""
        asked: list[Message] = []
        while True:
            message = self.receive()
            if message.flags & 0xF == FLAG_REPLY:
                break
            asked.append(message)
        for one in asked:
            self._serve(one)
        assert (message.id, message.command) == (message_id, command), (
            f"got the reply to {message.id} (command {message.command}), expected {message_id} ({command})"
        )
        if message.flags & FLAG_ERROR:
            assert message.errno != 0, "error reply without an errno"
            raise VfioUserError(message.errno, f"command {command}: {os.strerror(message.errno)}")
        return message

    def serve_one(self) -> None:
        """Answer a message that the server has sent by itself."""
        message = self.receive()
        assert message.flags & 0xF != FLAG_REPLY, "a reply that nobody waits for"
        self._serve(message)

    def request(
        self, command: int, payload: bytes = b"", *, fds: Sequence[int] = (), size: int | None = None
    ) -> Message:
        return self.wait_reply(self.send(command, payload, fds=fds, size=size), command)

    def _serve(self, message: Message) -> None:
        number, answer = errno.EINVAL, b""
        if message.command in (DMA_READ, DMA_WRITE) and self.dma_access is not None:
            iova, count = DMA_ACCESS.unpack_from(message.payload)
            data = message.payload[DMA_ACCESS.size :] if message.command == DMA_WRITE else None
            with contextlib.suppress(IndexError):
                answer = DMA_ACCESS.pack(iova, count) + self.dma_access(iova, count, data)
                number = 0
        flags = FLAG_REPLY | (FLAG_ERROR if number else 0)
        header = HEADER.pack(message.id, message.command, HEADER.size + len(answer), flags, number)
        self.send_raw(header + answer)

    # --- commands
    def negotiate(self, capabilities: dict[str, Any] | None = None, *, version: tuple[int, int] = (0, 0)) -> None:
        """VERSION: `capabilities=None` sends what QEMU sends, `{}` the bare 4 bytes of SPDK."""
        if capabilities is None:
            capabilities = {
                "max_msg_fds": 16,
                "max_data_xfer_size": 1048576,
                "max_dma_maps": 65535,
                "pgsizes": 4096,
                "migration": {"pgsize": 4096, "max_bitmap_size": 268435456},
            }
        payload = struct.pack("<HH", *version)
        if capabilities:
            payload += json.dumps({"capabilities": capabilities}).encode() + b"\0"
        reply = self.request(VERSION, payload)
        major, minor = struct.unpack_from("<HH", reply.payload)
        self.version = (major, minor)
        text = reply.payload[4:]
        if text:
            assert text.endswith(b"\0"), "version data is not NUL-terminated"
            self.capabilities = json.loads(text[:-1]).get("capabilities", {})
        self.max_fds = int(self.capabilities.get("max_msg_fds", 1))

    def device_info(self) -> tuple[int, int, int]:
        """(flags, regions, irqs)"""
        _, flags, regions, irqs = FOUR_WORDS.unpack(
            self.request(DEVICE_GET_INFO, FOUR_WORDS.pack(16, 0, 0, 0)).payload
        )
        return flags, regions, irqs

    def region_info(self, index: int, argsz: int | None = None) -> Region:
        """Region info with its capabilities, asked as QEMU does: once small, once with the size returned."""
        reply = self._region_info(index, 32 if argsz is None else argsz)
        needed = REGION_INFO_BODY.unpack_from(reply.payload)[0]
        if argsz is None and needed > 32:
            for fd in reply.fds:
                os.close(fd)
            reply = self._region_info(index, needed)
        _, flags, got, cap_offset, size, offset = REGION_INFO_BODY.unpack_from(reply.payload)
        assert got == index
        windows: list[tuple[int, int]] = []
        seen: set[int] = set()
        while flags & 0x8 and cap_offset and cap_offset not in seen:
            seen.add(cap_offset)
            cap_id, _, following, count, _ = struct.unpack_from("<HHIII", reply.payload, cap_offset)
            if cap_id == 1:
                raw = reply.payload[cap_offset + 16 : cap_offset + 16 + 16 * count]
                windows.extend(struct.iter_unpack("<QQ", raw))
            cap_offset = following
        return Region(index, flags, size, tuple(windows), tuple(reply.fds), offset)

    def _region_info(self, index: int, argsz: int) -> Message:
        body = REGION_INFO_BODY.pack(argsz, 0, index, 0, 0, 0)
        return self.request(REGION_INFO, body + bytes(max(argsz - len(body), 0)))

    def irq_info(self, index: int) -> tuple[int, int]:
        """(flags, count)"""
        reply = self.request(IRQ_INFO, FOUR_WORDS.pack(16, 0, index, 0))
        _, flags, got, count = FOUR_WORDS.unpack(reply.payload)
        assert got == index
        return flags, count

    def set_irqs(self, index: int, start: int, eventfds: Sequence[int]) -> None:
        """Assign eventfds to vectors start.., as many messages as the limit of fds per message needs."""
        step = max(self.max_fds, 1)
        for at in range(0, len(eventfds), step):
            part = eventfds[at : at + step]
            flags = IRQ_DATA_EVENTFD | IRQ_ACTION_TRIGGER
            self.request(SET_IRQS, SET_IRQS_BODY.pack(20, flags, index, start + at, len(part)), fds=part)

    def disable_irqs(self, index: int) -> None:
        self.request(SET_IRQS, SET_IRQS_BODY.pack(20, IRQ_DATA_NONE | IRQ_ACTION_TRIGGER, index, 0, 0))

    def region_read(self, region: int, offset: int, count: int) -> bytes:
        reply = self.request(REGION_READ, REGION_ACCESS.pack(offset, region, count))
        assert REGION_ACCESS.unpack_from(reply.payload) == (offset, region, count)
        data = reply.payload[REGION_ACCESS.size :]
        assert len(data) == count
        return data

    def region_write(self, region: int, offset: int, data: bytes) -> None:
        reply = self.request(REGION_WRITE, REGION_ACCESS.pack(offset, region, len(data)) + data)
        assert REGION_ACCESS.unpack_from(reply.payload) == (offset, region, len(data))

    def post_region_write(self, region: int, offset: int, data: bytes) -> None:
        """A posted write: no reply follows (doorbells)."""
        self.send(REGION_WRITE, REGION_ACCESS.pack(offset, region, len(data)) + data, flags=FLAG_NO_REPLY)

    def dma_map(self, iova: int, size: int, fd: int | None, *, offset: int = 0, flags: int = 3) -> None:
        fds = [] if fd is None else [fd]
        self.request(DMA_MAP, DMA_MAP_BODY.pack(32, flags, offset, iova, size), fds=fds)

    def dma_unmap(self, iova: int, size: int) -> None:
        reply = self.request(DMA_UNMAP, DMA_UNMAP_BODY.pack(24, 0, iova, size))
        assert DMA_UNMAP_BODY.unpack_from(reply.payload)[2:] == (iova, size)

    def reset(self) -> None:
        self.request(DEVICE_RESET)

    def alive(self) -> bool:
        """Whether the server still answers on this connection."""
        try:
            self.device_info()
        except (ConnectionError, BrokenPipeError, TimeoutError):
            return False
        return True
