"""A volume as a back end: SPDK's logical volume, whose bdev is named by its UUID and has the alias ``store/volume``.

Made by ``bdev_lvol_create``, ``bdev_lvol_snapshot`` and ``bdev_lvol_clone``, and found again when a back end of its
group appears; it is in no stored configuration and in no ``save_config``.
Limits: a whole number of clusters, up to CLUSTERS_MAX of them.
Source: SPDK's ``bdev_get_bdevs`` and ``bdev_lvol_get_lvols`` answers.
"""

from __future__ import annotations

import uuid as uuids
from typing import TYPE_CHECKING, Any, NoReturn

from dpu.backends.base import Backend, Kind
from dpu.volumes.store import VolumeRow

if TYPE_CHECKING:
    from dpu.volumes.group import Group

DELETION = "deletion"


class Volume(Backend):
    """:param row: what the database has of it.

    ``busy``: what a management call is doing to it, "" for nothing. ``children``: volumes that share clusters with it
    and come after it, in order.
    """

    kind = Kind.VOLUME
    product_name = "Logical Volume"
    config_type = "volume"
    numa_reported = True
    io_types = frozenset({"read", "write", "flush", "reset", "write_zeroes", "seek_hole", "seek_data"})

    def __init__(self, store: Group, row: VolumeRow) -> None:
        blocks = row.clusters * store.cluster_bytes // store.block_size
        uuid = uuids.UUID(row.uuid)
        super().__init__(row.uuid, store.block_size, blocks, uuid, readonly=row.readonly, supports_discard=True)
        self.store = store
        self.area = store.area
        self.row = row
        self.number = row.number
        self.parent: Volume | None = None
        self.children: list[Volume] = []
        self.busy = ""

    @property
    def alias(self) -> str:
        return f"{self.store.name}/{self.row.name}"

    @property
    def is_snapshot(self) -> bool:
        return self.row.snapshot or bool(self.children)

    @property
    def being_deleted(self) -> bool:
        return self.busy == DELETION or self.store.busy == DELETION

    def stack(self) -> list[Backend]:
        return [self, *self.store.bases]

    def resized(self) -> None:
        """The row has another size."""
        self.num_blocks = self.row.clusters * self.store.cluster_bytes // self.block_size

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "aliases": [self.alias]}

    def driver_specific(self) -> dict[str, Any]:
        row, parent = self.row, self.parent
        about: dict[str, Any] = {
            "lvol_store_uuid": self.store.uuid,
            "base_bdev": self.store.bases[0].name,
            "thin_provision": row.thin,
            "num_allocated_clusters": self.store.allocated(self),
            "snapshot": self.is_snapshot,
            "clone": parent is not None,
        }
        if parent is not None:
            about["base_snapshot"] = parent.row.name
        if self.children:
            about["clones"] = [child.row.name for child in self.children]
        return {"lvol": {**about, "esnap_clone": False}}

    def describe_lvol(self) -> dict[str, Any]:
        """The object in ``bdev_lvol_get_lvols``."""
        return {
            "alias": self.alias,
            "uuid": self.row.uuid,
            "name": self.row.name,
            "is_thin_provisioned": self.row.thin,
            "is_snapshot": self.is_snapshot,
            "is_clone": self.parent is not None,
            "is_esnap_clone": False,
            "is_degraded": False,
            "num_allocated_clusters": self.store.allocated(self),
            "lvs": {"name": self.store.name, "uuid": self.store.uuid},
        }

    def creation(self) -> tuple[str, dict[str, Any]]:
        size_in_mib = -(-self.size_bytes >> 20)
        return "bdev_lvol_create", {
            "lvol_name": self.row.name,
            "size_in_mib": size_in_mib,
            "lvs_name": self.store.name,
            "thin_provision": self.row.thin,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], fd: int) -> NoReturn:
        raise AssertionError("volumes are in the database of their group")
