"""File back end: an existing file or block device of the host, taken for itself alone.

Use: ``bdev_aio_create`` or ``bdev_uring_create`` with filename, name, [block_size (bytes, 512 or 4096), uuid];
the first also takes readonly, fallocate and ``cache_mode``, a key of ours beside SPDK's: "direct" (O_DIRECT or
refuse), "buffered" (page cache), left out: direct where the file system takes it, else buffered. The two names are
SPDK's; the engine behind both is io_uring.
``fd`` always goes through the page cache. ``direct_fd`` (-1 when buffered) is the same file with O_DIRECT,
for requests whose offset, length and memory are multiples of ``dio_align_bytes``; others take ``fd``.
Either's fdatasync makes both durable.
``fallocate``: Deallocate punches holes; without it Deallocate is advice that is not taken, as in SPDK.
A device that is mounted, swap, or part of another is refused (dpu.backends.hostdev), as is a file behind a loop
device. The lock is flock(2) on the open file description of ``fd``, for a device its exclusive opening too. The
stashed duplicate shares both, so they are held from worker to worker; they fall when the keeper ends.
Limits: the size is read once, when the device is made, and must be a multiple of the block size, which is not
smaller than the device's logical one.
Errors: -2 no such file, -13/-30 not allowed, -16 in use by another bdev, by another program or by the kernel (SPDK
has no such check), -22 not a file or block device, empty, or not a multiple of the block size.
Source: SPDK's aio and uring bdevs; open(2) O_DIRECT, flock(2), ioctl BLKGETSIZE64 and BLKSSZGET.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
import uuid as uuids
from typing import Any, Literal, Self

from dpu.backends.base import BLOCK_SIZES, Backend, Kind, check_geometry, os_error
from dpu.backends.hostdev import open_unused

log = logging.getLogger(__name__)

CacheMode = Literal["direct", "buffered"]

# <linux/fs.h>; the asm-generic encoding, which x86-64 uses.
BLKSSZGET = 0x1268
BLKGETSIZE64 = 0x80081272

_UUID_SPACE = uuids.UUID("6e1a2a0c-2d53-4f67-9d8e-6c0e1d5b7a11")


class FileBackend(Backend):
    """``direct_fd`` and ``dio_align_bytes``: see above; ``direct_fd`` is owned and closed with ``fd``."""

    kind = Kind.FILE
    product_name = "AIO disk"
    config_type = "file"
    io_types = frozenset({"read", "write", "flush", "reset", "write_zeroes"})

    path: str
    direct_fd: int
    dio_align_bytes: int
    fallocate: bool
    block_size_given: bool
    cache_mode: CacheMode | None  # as asked for

    @classmethod
    def create(
        cls,
        name: str,
        path: str,
        block_size: int | None = None,
        *,
        uuid: uuids.UUID | None = None,
        readonly: bool = False,
        fallocate: bool = False,
        cache_mode: CacheMode | None = None,
    ) -> Self:
        """Open, measure and lock ``path``. block_size None: the device's own, or 4096 for a file."""
        try:
            fd = open_unused(path, readonly)
        except OSError as error:
            log.error("bdev %s: cannot open %r: %s", name, path, error.strerror)
            raise os_error(error.errno or errno.EIO) from error
        try:
            status = os.fstat(fd)
            size_bytes, native_block_size = _measure(fd, status)
            given = block_size is not None
            block_size = block_size if block_size is not None else native_block_size
            if block_size not in BLOCK_SIZES or size_bytes % block_size:
                log.error(
                    "bdev %s: block size %d must be 512 or 4096 and divide the %d bytes of %r",
                    name,
                    block_size,
                    size_bytes,
                    path,
                )
                raise os_error(errno.EINVAL)
            check_geometry(block_size, size_bytes // block_size)
            if stat.S_ISBLK(status.st_mode) and block_size < native_block_size:
                raise os_error(
                    errno.EINVAL, f"block_size {block_size} is smaller than the {native_block_size} of {path}"
                )
            _lock(fd, name, path)
            direct_fd, align = (-1, 1) if cache_mode == "buffered" else _open_direct(fd, readonly)
            if cache_mode == "direct" and direct_fd < 0:
                log.error("bdev %s: %r cannot be read with O_DIRECT; use cache_mode buffered", name, path)
                raise os_error(errno.EINVAL)
        except OSError as error:
            os.close(fd)
            raise os_error(error.errno or errno.EIO) from error
        except BaseException:
            os.close(fd)
            raise
        # The same file is the same disk to a guest, also after the daemon was started anew.
        uuid = uuid or uuids.uuid5(_UUID_SPACE, f"{os.path.realpath(path)}:{status.st_ino}:{name}")
        backend = cls(
            name,
            block_size,
            size_bytes // block_size,
            uuid,
            fd=fd,
            readonly=readonly,
            supports_discard=fallocate and not readonly,
        )
        backend._set(path, direct_fd, align, fallocate, given, cache_mode)
        return backend

    def _set(
        self,
        path: str,
        direct_fd: int,
        dio_align_bytes: int,
        fallocate: bool,
        block_size_given: bool,
        cache_mode: CacheMode | None,
    ) -> None:
        self.path = path
        self.direct_fd = direct_fd
        self.dio_align_bytes = dio_align_bytes
        self.fallocate = fallocate
        self.block_size_given = block_size_given
        self.cache_mode = cache_mode

    def measure(self) -> int:
        """Blocks that the file or device holds now."""
        size_bytes, _ = _measure(self.fd, os.fstat(self.fd))
        return size_bytes // self.block_size

    @property
    def direct(self) -> bool:
        """Aligned requests bypass the page cache."""
        return self.direct_fd >= 0

    def close(self) -> None:
        super().close()
        if self.direct_fd >= 0:
            os.close(self.direct_fd)
            self.direct_fd = -1

    @classmethod
    def from_config(cls, config: dict[str, Any], fd: int) -> Self:
        assert fd >= 0, f"the keeper has lost the file of bdev {config['name']}"
        backend = cls(
            config["name"],
            config["block_size"],
            config["num_blocks"],
            uuids.UUID(config["uuid"]),
            fd=fd,
            readonly=config["readonly"],
            supports_discard=config["fallocate"] and not config["readonly"],
        )
        direct_fd = -1
        if config["direct"]:
            try:
                direct_fd = _reopen(fd, config["readonly"])
            except OSError as error:
                log.error("bdev %s: no O_DIRECT any more, buffered from now on: %s", backend.name, error)
        backend._set(
            config["filename"],
            direct_fd,
            config["dio_align_bytes"],
            config["fallocate"],
            config["block_size_given"],
            config["cache_mode"],
        )
        return backend

    def to_config(self) -> dict[str, Any]:
        return {
            **super().to_config(),
            "filename": self.path,
            "readonly": self.readonly,
            "fallocate": self.fallocate,
            "block_size_given": self.block_size_given,
            "direct": self.direct,
            "dio_align_bytes": self.dio_align_bytes,
            "cache_mode": self.cache_mode,
        }

    def creation(self) -> tuple[str, dict[str, Any]]:
        more = {"cache_mode": self.cache_mode} if self.cache_mode else {}
        parameters = {
            "name": self.name,
            "filename": self.path,
            "block_size": self.block_size,
            "readonly": self.readonly,
            "fallocate": self.fallocate,
            "uuid": str(self.uuid),
        }
        return "bdev_aio_create", parameters | more

    def driver_specific(self) -> dict[str, Any]:
        """SPDK's keys, and ``cache_mode`` of ours."""
        return {
            "aio": {
                "filename": self.path,
                "block_size_override": self.block_size_given,
                "readonly": self.readonly,
                "fallocate": self.fallocate,
                "nowait": False,
                "cache_mode": "direct" if self.direct else "buffered",
            }
        }


class UringBackend(FileBackend):
    """The same under SPDK's other name."""

    product_name = "URING bdev"
    config_type = "uring"

    def creation(self) -> tuple[str, dict[str, Any]]:
        names = ("name", "filename", "block_size", "uuid")
        _, parameters = super().creation()
        return "bdev_uring_create", {name: parameters[name] for name in names}

    def driver_specific(self) -> dict[str, Any]:
        return {"uring": {"filename": self.path}}


def _measure(fd: int, status: os.stat_result) -> tuple[int, int]:
    """Size and native block size, both in bytes."""
    if stat.S_ISBLK(status.st_mode):
        (size_bytes,) = struct.unpack("Q", fcntl.ioctl(fd, BLKGETSIZE64, bytes(8)))
        (block_size,) = struct.unpack("i", fcntl.ioctl(fd, BLKSSZGET, bytes(4)))
        return size_bytes, block_size
    return status.st_size, 4096


def _lock(fd: int, name: str, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        log.error("bdev %s: %r is locked: another bdev or another program uses it", name, path)
        raise os_error(errno.EBUSY) from error


def _reopen(fd: int, readonly: bool) -> int:
    """The file behind ``fd`` once more, with O_DIRECT; also when it has been renamed or removed since."""
    access = os.O_RDONLY if readonly else os.O_RDWR
    return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC | os.O_DIRECT)


def _open_direct(fd: int, readonly: bool) -> tuple[int, int]:
    """An fd with O_DIRECT that was seen to work, and the smallest alignment in bytes that did; (-1, 1) if
    none."""
    try:
        direct_fd = _reopen(fd, readonly)
    except OSError:
        return -1, 1
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as pages:
        for align in BLOCK_SIZES:
            with memoryview(pages) as view, view[align : 2 * align] as buffer:
                try:
                    os.preadv(direct_fd, [buffer], align)
                except OSError:
                    continue
                return direct_fd, align
    os.close(direct_fd)
    return -1, 1
