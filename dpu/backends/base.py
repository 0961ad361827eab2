"""What every back end is to the rest of the card: a name, a size, and a file descriptor or none.

A back end does no I/O. The data path reads ``kind``, ``fd``, ``block_size``, ``num_blocks`` and the flags,
and does the copying (memory), the io_uring requests (file) or nothing (null) by itself.

Limits: LBA formats of 512 and 4096 bytes; 2^63 - 1 bytes in all.
Source: SPDK's ``bdev_get_bdevs`` answer (its JSON shape), NVMe Base 2.0 for the LBA formats.
"""

from __future__ import annotations

import enum
import errno
import os
import uuid as uuids
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from dpu.backends.marks import Marks
from dpu.errors import RpcError
from dpu.journal import Journal

BLOCK_SIZES = (512, 4096)
SIZE_BYTES_MAX = 2**63 - 1

# SPDK's names of bdev request types, in the order of its answers.
_IO_TYPES = (
    "read",
    "write",
    "unmap",
    "flush",
    "reset",
    "nvme_admin",
    "nvme_io",
    "nvme_io_md",
    "write_zeroes",
    "zcopy",
    "get_zone_info",
    "zone_management",
    "zone_append",
    "compare",
    "compare_and_write",
    "abort",
    "seek_hole",
    "seek_data",
    "copy",
    "nvme_iov_md",
    "nvme_nssr",
    "write_uncorrectable",
)


class Kind(enum.IntEnum):
    """How the data path serves a block: not at all, by a copy, by a file request, by a map (dpu.volumes)."""

    NULL = 0
    MEMORY = 1
    FILE = 2
    VOLUME = 3


def os_error(code: int, reason: str = "") -> RpcError:
    """SPDK's answer to a failed bdev call: -errno and the C library's text for it, and ``reason`` of ours."""
    text = os.strerror(code)
    return RpcError(-code, f"{text}: {reason}" if reason else text)


class Backend(ABC):
    """One block device.

    name: unique in the daemon. block_size: bytes, 512 or 4096. num_blocks: blocks, at least 1.
    fd: owned by the back end, closed by ``close``; -1 where there is nothing to open. The same open file
    description is stashed in the keeper under ``stash_key`` so that a new worker goes on with it.
    """

    kind: ClassVar[Kind]
    product_name: ClassVar[str]
    config_type: ClassVar[str]  # the name of this class in a stored configuration and in BACKENDS
    io_types: ClassVar[frozenset[str]]  # SPDK's names of what a client may send here
    atomic_bytes: ClassVar[int] = 0  # a write of so many is wholly done or not at all; 0: of one block
    numa_reported: ClassVar[bool] = False  # SPDK's malloc bdev reports numa_id, its others do not

    def __init__(
        self,
        name: str,
        block_size: int,
        num_blocks: int,
        uuid: uuids.UUID,
        *,
        fd: int = -1,
        readonly: bool = False,
        supports_discard: bool = False,
    ) -> None:
        self.name = name
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.uuid = uuid
        self.fd = fd
        self.readonly = readonly
        self.supports_discard = supports_discard
        self.journal: Journal | None = None  # while power cuts may come
        self.warning = 0  # Critical Warning bits of the SMART log that faults have set
        self.marks: Marks | None = None  # made by the first Write Uncorrectable

    @property
    def size_bytes(self) -> int:
        return self.block_size * self.num_blocks

    def stack(self) -> list[Backend]:
        """Itself, and what it stands on, from above."""
        return [self]

    @property
    def stash_key(self) -> str | None:
        """Where the keeper holds ``fd``; None when there is no fd to hold."""
        return stash_key(self.name) if self.fd >= 0 else None

    def describe(self) -> dict[str, Any]:
        """The ``bdev_get_bdevs`` object without ``claimed`` and limits, which are the target's knowledge."""
        io_types = set(self.io_types)
        if self.supports_discard:
            io_types.add("unmap")
        if self.readonly:
            io_types -= {"write", "write_zeroes", "unmap"}
        return {
            "name": self.name,
            "aliases": [str(self.uuid)],
            "product_name": self.product_name,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "preferred_write_alignment": 0,
            "preferred_write_granularity": 0,
            "optimal_write_size": 0,
            "preferred_unmap_alignment": 0,
            "preferred_unmap_granularity": 0,
            "uuid": str(self.uuid),
            **({"numa_id": -1} if self.numa_reported else {}),
            "assigned_rate_limits": {},
            "claimed": False,
            "zoned": False,
            "supported_io_types": {name: name in io_types for name in _IO_TYPES},
            "driver_specific": self.driver_specific(),
        }

    def geometry(self) -> dict[str, Any]:
        """Parameters that the creating RPCs of memory and null back ends share."""
        return {
            "name": self.name,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "uuid": str(self.uuid),
        }

    def driver_specific(self) -> dict[str, Any]:
        return {}

    def to_config(self) -> dict[str, Any]:
        """JSON-able; ``from_config`` of the same class makes an equal back end of it."""
        return {
            "type": self.config_type,
            "name": self.name,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "uuid": str(self.uuid),
        }

    @abstractmethod
    def creation(self) -> tuple[str, dict[str, Any]]:
        """The RPC, SPDK's name and parameters, that makes such a back end in a bare daemon."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any], fd: int) -> Backend:
        """Reopen from ``to_config`` and the stashed ``fd`` (-1 when none was stashed), which it now owns."""

    def close(self) -> None:
        """Close ``fd`` and the marks. The stashed duplicates live on until they are unstashed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self.journal is not None:
            self.journal.close()
            self.journal = None
        if self.marks is not None:
            self.marks.close()
            self.marks = None


def stash_key(name: str) -> str:
    return f"bdev/{name}"


def marks_key(name: str) -> str:
    """Where the keeper holds the marks of a back end that has some."""
    return f"marks/{name}"


def check_geometry(block_size: int, num_blocks: int) -> None:
    """RpcError -22 unless the card can serve this size."""
    if block_size not in BLOCK_SIZES or num_blocks < 1 or block_size * num_blocks > SIZE_BYTES_MAX:
        raise os_error(errno.EINVAL)
