"""What control does to the bytes of back ends: every read, write, hole and sync of theirs goes through here.

Use: ``Files().zero(fd, offset, length)``. Everything blocks: call it in a thread. Errors: OSError.
A *label* in the first bytes of a back end says which group it belongs to (``Label``).
Source: fallocate(2) FALLOC_FL_PUNCH_HOLE, for block devices too: the range reads as zeroes afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from dataclasses import dataclass

from dpu.layout import PAGE

_PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_CHUNK_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_MAGIC = b"dpu-emu group\n\0\0"


class Files:
    """Operations on open files; tests of power cuts bring others."""

    def read(self, fd: int, offset: int, length: int) -> bytes:
        data = os.pread(fd, length, offset)
        if len(data) != length:
            raise OSError(errno.EIO, "file is shorter than its back end")
        return data

    def write(self, fd: int, offset: int, data: bytes | memoryview) -> None:
        if os.pwrite(fd, data, offset) != len(data):
            raise OSError(errno.ENOSPC, "short write")

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Whether the file system could take the bytes back; they read as zeroes then."""
        if _LIBC.fallocate(fd, _PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(length)) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENODEV):
            return False
        raise OSError(code, os.strerror(code))

    def sync(self, fd: int) -> None:
        """Everything written before is durable."""
        os.fdatasync(fd)

    def zero(self, fd: int, offset: int, length: int) -> None:
        """Bytes read as zeroes afterwards; their place is given back where that is possible."""
        if not self.punch(fd, offset, length):
            for at in range(offset, offset + length, _CHUNK_BYTES):
                self.write(fd, at, bytes(min(_CHUNK_BYTES, offset + length - at)))

    def copy(self, source: int, source_offset: int, target: int, target_offset: int, length: int) -> None:
        """Bytes of one open file to another."""
        for at in range(0, length, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, length - at)
            self.write(target, target_offset + at, self.read(source, source_offset + at, size))


@dataclass(frozen=True)
class Label:
    """Group ``uuid``'s back end ``number`` of ``count``. ``metadata``: path of the database, "": beside the file."""

    uuid: str
    number: int
    count: int
    metadata: str = ""

    def write(self, files: Files, fd: int) -> None:
        """Make it durable."""
        text = _MAGIC + json.dumps(vars(self)).encode()
        files.write(fd, 0, text.ljust(PAGE, b"\0"))
        files.sync(fd)

    @staticmethod
    def read(files: Files, fd: int) -> Label | None:
        """None when there is none."""
        data = files.read(fd, 0, PAGE)
        if not data.startswith(_MAGIC):
            return None
        try:
            return Label(**json.loads(data[len(_MAGIC) :].rstrip(b"\0")))
        except (ValueError, TypeError) as error:
            raise OSError(errno.EINVAL, f"the label of its group of volumes is damaged: {error}") from error

    @staticmethod
    def erase(files: Files, fd: int) -> None:
        files.write(fd, 0, bytes(PAGE))
        files.sync(fd)
