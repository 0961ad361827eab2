"""Memory back end: a memfd, zero-filled, sparse until written; the keeper's stash lets it outlive the worker.

Use: ``bdev_malloc_create`` with num_blocks (blocks), block_size (bytes, 512 or 4096), [name, uuid].
The memfd is sealed against shrinking and growing, so no access inside ``size_bytes`` can raise SIGBUS while
memory lasts.
Limits: pages are taken on first write, so the size is checked when the device is made: it and what the other
memory back ends have still to take must fit into the memory that the kernel says is available (MemAvailable,
and the control group's limit where there is one).
Errors: -22 geometry, -12 not enough memory.
Source: SPDK's malloc bdev; memfd_create(2), fcntl(2) F_ADD_SEALS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid as uuids
from collections.abc import Iterable
from typing import Any

from dpu.backends.base import Backend, Kind, check_geometry, os_error
from dpu.host_memory import memory_available_bytes
from dpu.layout import TRANSFER_MAX


class MemoryBackend(Backend):
    kind = Kind.MEMORY
    product_name = "Malloc disk"
    config_type = "memory"
    numa_reported = True
    atomic_bytes = TRANSFER_MAX  # one copy by one poller, done again by the next worker if it was cut
    # SPDK's malloc bdev also says zcopy and copy; no client of ours can send either.
    io_types = frozenset({"read", "write", "unmap", "flush", "reset", "write_zeroes", "compare", "abort"})

    @classmethod
    def create(
        cls, name: str, block_size: int, num_blocks: int, uuid: uuids.UUID, others: Iterable[Backend] = ()
    ) -> MemoryBackend:
        """``others``: the back ends that exist, whose unwritten pages are counted as promised."""
        check_geometry(block_size, num_blocks)
        size_bytes = block_size * num_blocks
        promised_bytes = sum(other.unwritten_bytes() for other in others if isinstance(other, MemoryBackend))
        available_bytes = memory_available_bytes()
        if size_bytes + promised_bytes > available_bytes:
            raise os_error(
                errno.ENOMEM,
                f"bdev {name} needs {size_bytes >> 20} MiB; of {available_bytes >> 20} MiB available "
                f"{promised_bytes >> 20} MiB are promised to other memory bdevs",
            )
        fd = os.memfd_create(f"dpu-bdev-{uuid}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(fd)
            raise os_error(error.errno or errno.ENOMEM) from error
        return cls(name, block_size, num_blocks, uuid, fd=fd, supports_discard=True)

    def creation(self) -> tuple[str, dict[str, Any]]:
        return "bdev_malloc_create", self.geometry()

    @classmethod
    def from_config(cls, config: dict[str, Any], fd: int) -> MemoryBackend:
        assert fd >= 0, f"the keeper has lost the memory of bdev {config['name']}"
        return cls(
            config["name"],
            config["block_size"],
            config["num_blocks"],
            uuids.UUID(config["uuid"]),
            fd=fd,
            supports_discard=True,
        )

    def unwritten_bytes(self) -> int:
        """Bytes that writes may still take from the machine's memory."""
        return max(0, self.size_bytes - os.fstat(self.fd).st_blocks * 512)
