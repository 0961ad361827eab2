"""Null back end: takes every command and stores nothing; what a read returns is not defined.

Use: ``bdev_null_create`` with num_blocks (blocks), block_size (bytes, 512 or 4096), name, [uuid].
Limits: none but the largest size of any back end. It exists to measure what the card itself costs.
Errors: -22 for a geometry that the card cannot serve.
Source: SPDK's null bdev.
"""

from __future__ import annotations

import uuid as uuids
from typing import Any

from dpu.backends.base import Backend, Kind, check_geometry


class NullBackend(Backend):
    kind = Kind.NULL
    product_name = "Null disk"
    config_type = "null"
    io_types = frozenset({"read", "write", "reset", "write_zeroes", "abort"})

    @classmethod
    def create(cls, name: str, block_size: int, num_blocks: int, uuid: uuids.UUID) -> NullBackend:
        check_geometry(block_size, num_blocks)
        return cls(name, block_size, num_blocks, uuid)

    def creation(self) -> tuple[str, dict[str, Any]]:
        return "bdev_null_create", self.geometry()

    @classmethod
    def from_config(cls, config: dict[str, Any], fd: int) -> NullBackend:
        assert fd < 0, "a null back end stashes nothing"
        return cls(config["name"], config["block_size"], config["num_blocks"], uuids.UUID(config["uuid"]))
