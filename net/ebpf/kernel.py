"""bpf(2): maps and programs, by ctypes.

Use: ``ports = Map.array(PortRecord, 24)``; ``ports[3].down = 1`` (shared memory, no system call);
``program = load(p.compile(), "queue")``; ``run_once(program, frame)``; descriptors close with their objects.
Errors: NetError when the kernel refuses; a program that the verifier refuses is our mistake and shows its log.
Limits: x86-64 (the system call's number); records of a map in shared memory are multiples of 8 bytes.
Source: Linux include/uapi/linux/bpf.h, Documentation/bpf/ringbuf.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

from net.errors import NetError

_SYS_BPF = 321
_ATTRIBUTE_BYTES = 144
_MAP_CREATE, _MAP_LOOKUP_ELEM, _MAP_UPDATE_ELEM, _MAP_DELETE_ELEM, _MAP_GET_NEXT_KEY, _PROG_LOAD = range(6)
_PROG_TEST_RUN = 10
_HASH, _ARRAY, _LRU_HASH, _RINGBUF = 1, 2, 9, 27
_MMAPABLE = 1 << 10
_SCHED_CLS = 3
_PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)


def _bpf(command: int, attribute: bytes) -> int:
    buffer = ctypes.create_string_buffer(attribute, _ATTRIBUTE_BYTES)
    result: int = _libc.syscall(_SYS_BPF, command, buffer, len(buffer))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _map(kind: int, key_bytes: int, value_bytes: int, entries: int, flags: int = 0) -> int:
    try:
        return _bpf(_MAP_CREATE, struct.pack("=5I", kind, key_bytes, value_bytes, entries, flags))
    except OSError as error:
        raise NetError(
            f"the kernel makes no BPF map: {error.strerror}", "run as root; needs CONFIG_BPF_SYSCALL"
        ) from error


R = TypeVar("R", bound=ctypes.Structure)


class Records(Generic[R]):
    """A BPF array of ctypes structures, in shared memory: reading and writing costs no system call."""

    def __init__(self, record: type[R], entries: int) -> None:
        size = ctypes.sizeof(record)
        assert size % 8 == 0, f"{record.__name__} has {size} bytes"
        self.fd = _map(_ARRAY, 4, size, entries, _MMAPABLE)
        self._memory = mmap.mmap(self.fd, -(-size * entries // _PAGE) * _PAGE)
        self._records = (record * entries).from_buffer(self._memory)

    def __getitem__(self, index: int) -> R:
        record: R = self._records[index]
        return record

    def close(self) -> None:
        if self.fd >= 0:
            del self._records
            with contextlib.suppress(BufferError):  # somebody holds a record: the memory goes with that
                self._memory.close()
            os.close(self.fd)
            self.fd = -1


class Table:
    """A BPF hash of byte strings; ``lru``: the longest unused entry makes room."""

    def __init__(self, key_bytes: int, value_bytes: int, entries: int, *, lru: bool = False) -> None:
        self.fd = _map(_LRU_HASH if lru else _HASH, key_bytes, value_bytes, entries)
        self._key_bytes, self._value_bytes = key_bytes, value_bytes

    def __setitem__(self, key: bytes, value: bytes) -> None:
        assert (len(key), len(value)) == (self._key_bytes, self._value_bytes)
        key_buffer, value_buffer = ctypes.create_string_buffer(key), ctypes.create_string_buffer(value)
        self._element(_MAP_UPDATE_ELEM, key_buffer, value_buffer)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every entry; one that comes or goes meanwhile may be missing."""
        key, found = ctypes.create_string_buffer(self._key_bytes), ctypes.create_string_buffer(self._key_bytes)
        value = ctypes.create_string_buffer(self._value_bytes)
        before: ctypes.Array[ctypes.c_char] | None = None
        while True:
            try:
                self._element(_MAP_GET_NEXT_KEY, before, found)
                key.raw = found.raw
                self._element(_MAP_LOOKUP_ELEM, key, value)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    return
                raise
            yield key.raw, value.raw
            before = key

    def _element(
        self, command: int, key: ctypes.Array[ctypes.c_char] | None, value: ctypes.Array[ctypes.c_char]
    ) -> None:
        address = 0 if key is None else ctypes.addressof(key)
        _bpf(command, struct.pack("=IxxxxQQQ", self.fd, address, ctypes.addressof(value), 0))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Ring:
    """A BPF ring buffer, read by one thread. ``size_bytes``: a power of two, at least a page."""

    _BUSY, _DISCARD = 1 << 31, 1 << 30

    def __init__(self, size_bytes: int) -> None:
        self.fd = _map(_RINGBUF, 0, 0, size_bytes)
        self._size = size_bytes
        self._consumer = mmap.mmap(self.fd, _PAGE)
        self._producer = mmap.mmap(self.fd, _PAGE + 2 * size_bytes, prot=mmap.PROT_READ, offset=_PAGE)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        """Until there is something, ``wake`` is called, or that long."""
        for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            if fd == self._wake:
                os.eventfd_read(self._wake)

    def wake(self) -> None:
        """Ends the wait of the thread that reads."""
        os.eventfd_write(self._wake, 1)

    def read(self) -> Iterator[bytes]:
        """What is there; each record is taken when the next is asked for."""
        position = struct.unpack_from("=Q", self._consumer)[0]
        while position < struct.unpack_from("=Q", self._producer)[0]:
            offset = _PAGE + position % self._size
            head = struct.unpack_from("=I", self._producer, offset)[0]
            if head & self._BUSY:
                return
            length = head & ~(self._BUSY | self._DISCARD)
            if not head & self._DISCARD:
                yield self._producer[offset + 8 : offset + 8 + length]
            position += -(-(length + 8) // 8) * 8
            struct.pack_into("=Q", self._consumer, 0, position)

    def close(self) -> None:
        if self.fd >= 0:
            self._consumer.close()
            self._producer.close()
            os.close(self._wake)
            os.close(self.fd)
            self.fd = -1


def load(code: bytes, name: str) -> int:
    """A program for tc; its descriptor."""
    instructions = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(1 << 20)

    def attempt(level: int) -> int:
        attribute = struct.pack(
            "=IIQQIIQII16s",
            *(_SCHED_CLS, len(code) // 8, ctypes.addressof(instructions), ctypes.addressof(licence)),
            *(level, len(log) if level else 0, ctypes.addressof(log) if level else 0, 0, 0, name.encode()[:15]),
        )
        return _bpf(_PROG_LOAD, attribute)

    try:
        return attempt(0)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise NetError("the kernel takes no BPF program from you", "run as root") from error
    try:
        return attempt(1)
    except OSError as error:
        end = log.value.decode(errors="replace")[-3000:]
        raise NetError(f"the kernel refuses the BPF program {name}: {error.strerror}", end) from error


def run_once(program: int, frame: bytes, room_bytes: int = 9300) -> tuple[int, bytes]:
    """Runs a program once on ``frame``: its result and the frame as it left it (BPF_PROG_TEST_RUN)."""
    data, out = ctypes.create_string_buffer(frame, len(frame)), ctypes.create_string_buffer(room_bytes)
    attribute = struct.pack(
        "=IIIIQQII", program, 0, len(frame), room_bytes, ctypes.addressof(data), ctypes.addressof(out), 1, 0
    )
    buffer = ctypes.create_string_buffer(attribute, _ATTRIBUTE_BYTES)
    if _libc.syscall(_SYS_BPF, _PROG_TEST_RUN, buffer, 80) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    _, result, _, length = struct.unpack_from("=IIII", buffer)
    return result, out.raw[:length]
