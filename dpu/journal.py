"""A back end's volatile cache as a power cut finds it: what was written since the last Flush, and what was there.

Use: ``Journal.create(atomic_bytes, block_size)`` when a client arms it (the keeper holds the memfd), ``Journal(...)``
in the next worker; ``Journaled(inner, journal)`` in place of what dpu.nvme.io works on; ``await cut(inner, seed)``.

While a back end has one, control carries out all of its commands, changes one at a time. Before a write what it
overwrites is noted; Flush and a write with Force Unit Access make everything durable, and so does a full journal: a
device may do so at any time. A cut takes back all that was noted, or a legal part of it: each write is there or not,
as a whole if it is not longer than what the namespace says is written whole, else block by block. A worker's death
changes nothing: what was noted is in the memfd, and undoing a write that was not begun does nothing.

Limits: BYTES_MAX of overwritten data. Errors: OSError of the back end.
Source: NVMe Base 2.0, 7.1 (Flush); NVM Command Set 1.0, 2.1.4 (AWUPF, NAWUPF).
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

BYTES_MAX: Final = 256 << 20
_HEAD: Final = struct.Struct("<Q")  # bytes in use, itself included
_RECORD: Final = struct.Struct("<QQ")  # offset and length of a write; what was there follows


def journal_key(name: str) -> str:
    """Where the keeper holds the journal of a back end that has one."""
    return f"journal/{name}"


class Blocks(Protocol):
    """What dpu.nvme.io works on; lengths and offsets in bytes."""

    async def sync(self) -> None: ...
    async def read(self, length: int, offset: int) -> bytes: ...
    async def write(self, data: bytes, offset: int, durable: bool) -> None: ...
    async def zero(self, length: int, offset: int, durable: bool) -> None: ...
    async def deallocate(self, length: int, offset: int) -> bool: ...


class Journal:
    """:param fd: the memfd, owned; ``atomic_bytes``: a write of so many is there or not, 0: one block."""

    def __init__(self, fd: int, atomic_bytes: int, block_size: int) -> None:
        self.fd = fd
        self._atomic_bytes, self._block_size = max(atomic_bytes, block_size), block_size
        self.lock = asyncio.Lock()

    @classmethod
    def create(cls, atomic_bytes: int, block_size: int) -> Journal:
        journal = cls(os.memfd_create("journal", os.MFD_CLOEXEC), atomic_bytes, block_size)
        journal.clear()
        return journal

    def close(self) -> None:
        os.close(self.fd)

    @property
    def used(self) -> int:
        (used,) = _HEAD.unpack(os.pread(self.fd, _HEAD.size, 0))
        return int(used)

    def clear(self) -> None:
        """Everything is durable."""
        os.pwrite(self.fd, _HEAD.pack(_HEAD.size), 0)
        os.ftruncate(self.fd, _HEAD.size)

    def note(self, offset: int, old: bytes) -> None:
        """``old`` is going to be overwritten. The last store is what makes it count."""
        used = self.used
        os.pwrite(self.fd, _RECORD.pack(offset, len(old)) + old, used)
        os.pwrite(self.fd, _HEAD.pack(used + _RECORD.size + len(old)), 0)

    def records(self) -> list[tuple[int, bytes]]:
        """(offset, what was there), in the order of the writes."""
        data, found, at = os.pread(self.fd, self.used, 0), [], _HEAD.size
        while at < len(data):
            offset, length = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            found.append((offset, data[at : at + length]))
            at += length
        return found

    async def cut(self, blocks: Blocks, seed: int | None) -> tuple[int, int]:
        """Lose what is not durable: all of it, or by ``seed`` a part. How many parts there were, and are left."""
        async with self.lock:
            records = self.records()
            written = []
            for offset, old in reversed(records):
                written.append((offset, await blocks.read(len(old), offset)))
                await blocks.write(old, offset, False)
            dice, parts, left = random.Random(seed), 0, 0
            for offset, new in reversed(written):
                step = len(new) if len(new) <= self._atomic_bytes else self._block_size
                for at in range(0, len(new), step):
                    parts += 1
                    if seed is not None and dice.random() < 0.5:
                        left += 1
                        await blocks.write(new[at : at + step], offset + at, False)
            await blocks.sync()
            self.clear()
            return parts, left


class Journaled:
    """``inner`` with everything noted before it is overwritten."""

    def __init__(self, inner: Blocks, journal: Journal) -> None:
        self._inner, self._journal = inner, journal
        self.read = inner.read

    async def sync(self) -> None:
        async with self._journal.lock:
            await self._sync()

    async def _sync(self) -> None:
        await self._inner.sync()
        self._journal.clear()

    async def write(self, data: bytes, offset: int, durable: bool) -> None:
        await self._change(lambda: self._inner.write(data, offset, durable), len(data), offset, durable)

    async def zero(self, length: int, offset: int, durable: bool) -> None:
        await self._change(lambda: self._inner.zero(length, offset, durable), length, offset, durable)

    async def deallocate(self, length: int, offset: int) -> bool:
        return await self._change(lambda: self._inner.deallocate(length, offset), length, offset, False)

    async def _change(self, work: Callable[[], Awaitable[T]], length: int, offset: int, durable: bool) -> T:
        async with self._journal.lock:
            if self._journal.used + length > BYTES_MAX:
                await self._sync()
            if length <= BYTES_MAX:
                self._journal.note(offset, await self._inner.read(length, offset))
            result = await work()
            if durable or length > BYTES_MAX:
                await self._sync()
            return result
