"""Blocks that Write Uncorrectable has marked, until they are written again: a byte each, kept over a worker's death.

Use: ``Marks.create(num_blocks)`` at the first Write Uncorrectable of a back end; ``mark`` and ``ranges`` for control,
the addresses ``blocks`` and ``pages`` for the compiled stage, which looks and clears. A block has a byte, not a bit,
because control marks while pollers clear. Only control marks, and only it changes ``pages``.

The memfd holds a byte of each MARK_PAGE blocks (some of them may be marked), then, from the next page on, a byte of
each block. It is sparse: memory is taken for pages with marks only.

Limits: ``BLOCKS_MAX`` blocks of address space, ``MEMORY_BYTES_MAX`` of memory. Beyond them ``mark`` and ``create``
raise OSError (ENOSPC, EFBIG).
Source: NVM Command Set Specification 1.0, section 3.2.7.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

from dpu.guestmap import Mapping
from dpu.layout import MARK_PAGE_BITS, PAGE

BLOCKS_MAX = 1 << 40
MEMORY_BYTES_MAX = 256 << 20
_CHUNK = 1 << 20
_PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_LIBC = ctypes.CDLL(None, use_errno=True)
_MARK_PAGE = 1 << MARK_PAGE_BITS
assert _MARK_PAGE == PAGE  # bytes of marks are found page by page


class Marks:
    """:param fd: the memfd, owned from now on; the keeper holds a duplicate. Its size tells the number of blocks."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        num_blocks = (
            size - size // (_MARK_PAGE * PAGE + PAGE) * PAGE
        )  # a page of bytes for so many blocks, rounded up
        while _pages_bytes(num_blocks) + num_blocks > size:
            num_blocks -= PAGE
        self.num_blocks = num_blocks
        self._offset = _pages_bytes(num_blocks)
        self._mapping = Mapping(fd, self._offset + num_blocks)
        self.pages = self._mapping.host
        self.blocks = self.pages + self._offset

    @classmethod
    def create(cls, num_blocks: int) -> Marks:
        if num_blocks > BLOCKS_MAX:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        fd = os.memfd_create("marks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _pages_bytes(num_blocks) + num_blocks)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def resized(self, num_blocks: int) -> Marks:
        """The same marks, but for those beyond the new end, in a memfd for another number of blocks."""
        new = Marks.create(num_blocks)
        for start, data in self._chunks(0, min(num_blocks, self.num_blocks)):
            for at in range(0, len(data), PAGE):
                piece, lba = data[at : at + PAGE], start + at
                if 1 in piece:
                    os.pwrite(new.fd, piece, new._offset + lba)
                    first = lba >> MARK_PAGE_BITS
                    ctypes.memset(new.pages + first, 1, (lba + len(piece) - 1 >> MARK_PAGE_BITS) - first + 1)
        return new

    def mark(self, lba: int, count: int) -> None:
        """Mark ``count`` blocks. Doing it again changes nothing."""
        if os.fstat(self.fd).st_blocks * 512 + count > MEMORY_BYTES_MAX:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        ctypes.memset(self.blocks + lba, 1, count)
        first = lba >> MARK_PAGE_BITS
        ctypes.memset(self.pages + first, 1, (lba + count - 1 >> MARK_PAGE_BITS) - first + 1)

    def clear(self, lba: int, count: int) -> None:
        """The blocks were written by control. What is marked in vain costs nothing any more, nor any memory."""
        if count == 0:
            return
        if _LIBC.fallocate(self.fd, _PUNCH_HOLE, ctypes.c_long(self._offset + lba), ctypes.c_long(count)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        first, end = -(-lba >> MARK_PAGE_BITS), lba + count >> MARK_PAGE_BITS
        if first < end:
            ctypes.memset(self.pages + first, 0, end - first)

    def ranges(self, lba: int, count: int, limit: int = 1 << 62) -> list[tuple[int, int]]:
        """The first ``limit`` runs (block, length) of marked blocks in a range, in order."""
        found: list[tuple[int, int]] = []
        for start, data in self._chunks(lba, lba + count):
            at = data.find(1)
            while at >= 0:
                stop = data.find(0, at)
                stop = len(data) if stop < 0 else stop
                if found and sum(found[-1]) == start + at:
                    found[-1] = found[-1][0], found[-1][1] + stop - at
                elif len(found) == limit:
                    return found
                else:
                    found.append((start + at, stop - at))
                at = data.find(1, stop)
        return found

    def _chunks(self, lba: int, end: int) -> Iterator[tuple[int, bytes]]:
        """The bytes of marks of the blocks from ``lba`` to ``end``, each read once.

        Without holes, which hold none; reading others through the file takes no memory.
        """
        while lba < end:
            try:
                lba = max(lba, os.lseek(self.fd, self._offset + lba, os.SEEK_DATA) - self._offset)
            except OSError:  # ENXIO: only a hole is left
                return
            if lba < end:
                yield lba, os.pread(self.fd, min(_CHUNK, end - lba), self._offset + lba)
            lba += _CHUNK

    def close(self) -> None:
        self._mapping.close()
        os.close(self.fd)


def _pages_bytes(num_blocks: int) -> int:
    pages = -(-num_blocks >> MARK_PAGE_BITS)
    return -(-pages // PAGE) * PAGE
