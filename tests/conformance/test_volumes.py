"""Logical volumes of a bare daemon: made by SPDK's calls, written by a driver, killed and started anew."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import MIB, Daemon, RpcError, Target
from tests.support.load import Load
from tests.support.nvme_driver import GuestRam, Nvme, NvmeError, SubmissionQueue

GROUP = "lvs"
LIMITS = ("--crash-limit", "0")  # tests kill more often
CLUSTER = MIB // 512  # blocks
CAPACITY_EXCEEDED, NAMESPACE_IS_WRITE_PROTECTED = 0x81, 0x20


class Card:
    """A daemon with one group, a subsystem, and a controller in it."""

    def __init__(self, daemon: Daemon, base: Path | None) -> None:
        self.daemon, self.base = daemon, base
        if base is None:
            daemon.add_memory("base", 64 * MIB)
        else:
            self.add_base()
        daemon.rpc("bdev_lvol_create_lvstore", {"bdev_name": "base", "lvs_name": GROUP, "cluster_sz": MIB})
        self.serve()

    def add_base(self) -> None:
        self.daemon.rpc(
            "bdev_aio_create", {"name": "base", "filename": str(self.base), "block_size": 512, "fallocate": True}
        )

    def serve(self) -> None:
        self.daemon.create_transport()
        self.target: Target = self.daemon.add_subsystem("nqn.2026-01.io.test:volumes", [])
        self.connect()

    def connect(self) -> None:
        self.nvme = Nvme(self.target.path, GuestRam())
        self.nvme.enable()
        self.queue: SubmissionQueue = self.nvme.create_queue_pair(1, 64)

    def rpc(self, method: str, **params: object) -> object:
        return self.daemon.rpc(f"bdev_lvol_{method}", params)

    def add(self, name: str) -> int:
        """Its NSID."""
        namespace = {"bdev_name": f"{GROUP}/{name}"}
        nsid = self.daemon.rpc("nvmf_subsystem_add_ns", {"nqn": self.target.nqn, "namespace": namespace})
        assert isinstance(nsid, int)
        return nsid

    def create(self, name: str, size_in_mib: int = 16, *, thin: bool = True) -> int:
        self.rpc("create", lvs_name=GROUP, lvol_name=name, size_in_mib=size_in_mib, thin_provision=thin)
        return self.add(name)

    def write(self, nsid: int, lba: int, data: bytes) -> None:
        self.nvme.write(self.queue, nsid, lba, data)

    def read(self, nsid: int, lba: int, length: int = 512) -> bytes:
        return self.nvme.read(self.queue, nsid, lba, length)

    def delete(self, name: str) -> None:
        assert self.rpc("delete", name=f"{GROUP}/{name}") is True

    def about(self, name: str) -> dict[str, Any]:
        (bdev,) = self.daemon.rpc("bdev_get_bdevs", {"name": f"{GROUP}/{name}"})
        return dict(bdev["driver_specific"]["lvol"])

    def free_clusters(self) -> int:
        (group,) = self.daemon.rpc("bdev_lvol_get_lvstores", {"lvs_name": GROUP})
        return int(group["free_clusters"])


@pytest.fixture(params=["memory", "file"])
def card(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Card]:
    base = None
    if request.param == "file":
        base = tmp_path / "disk.img"
        base.touch()
        os.truncate(base, 64 * MIB)
    with tempfile.TemporaryDirectory(prefix="dpu-t-") as directory, Daemon(Path(directory), args=LIMITS) as daemon:
        card = Card(daemon, base)
        yield card
        card.nvme.close()
        assert daemon.alive()


def pattern(tag: int, length: int = 512) -> bytes:
    return bytes([tag]) * length


def test_life_of_volumes(card: Card) -> None:
    thin = card.create("thin")
    thick = card.create("thick", 8, thin=False)
    assert card.about("thin")["num_allocated_clusters"] == 0 and card.about("thick")["num_allocated_clusters"] == 8
    assert card.read(thin, 5000) == bytes(512) == card.read(thick, 5000)
    card.write(thin, 2048, pattern(1, 4096))
    card.write(thick, 0, pattern(2))
    card.rpc("snapshot", lvol_name=f"{GROUP}/thin", snapshot_name="snap")
    card.write(thin, 2049, pattern(3))
    card.rpc("clone", snapshot_name=f"{GROUP}/snap", clone_name="clone")
    snap, clone = card.add("snap"), card.add("clone")
    assert card.read(thin, 2048, 1536) == pattern(1) + pattern(3) + pattern(1)
    assert card.read(snap, 2048, 4096) == card.read(clone, 2048, 4096) == pattern(1, 4096)
    with pytest.raises(NvmeError) as error:
        card.write(snap, 0, pattern(4))
    assert error.value.status == NAMESPACE_IS_WRITE_PROTECTED
    card.rpc("resize", name=f"{GROUP}/clone", size_in_mib=20)
    assert card.read(clone, 20 * 2048 - 1) == bytes(512)
    card.write(clone, 20 * 2048 - 1, pattern(5))
    assert card.about("clone")["num_allocated_clusters"] == 1 and card.about("thin")["num_allocated_clusters"] == 1
    card.rpc("decouple_parent", name=f"{GROUP}/clone")
    assert card.about("clone")["num_allocated_clusters"] == 2 and not card.about("clone")["clone"]
    card.delete("snap")
    assert card.read(thin, 2048, 1536) == pattern(1) + pattern(3) + pattern(1)
    assert card.read(clone, 2048, 4096) == pattern(1, 4096) and card.read(clone, 20 * 2048 - 1) == pattern(5)
    for name in ("thin", "clone", "thick"):
        card.delete(name)
    assert card.free_clusters() == 63


def test_kills_under_load(card: Card) -> None:
    """Snapshots come and go, and the worker dies, while every byte is verified."""
    nsid = card.create("v")
    load = Load(card.nvme, card.queue, nsid, depth=24, blocks=16 * 2048, trims=False)
    for turn in range(4):
        load.run(60)
        card.rpc("snapshot", lvol_name=f"{GROUP}/v", snapshot_name=f"s{turn}")
        load.run(60)
        card.daemon.kill_worker()
        load.run(60)
        if turn:
            card.delete(f"s{turn - 1}")
    load.finish()


@pytest.mark.parametrize("card", ["file"], indirect=True)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_started_anew_finds_them(card: Card, end: int) -> None:
    nsid = card.create("v")
    card.write(nsid, 100, pattern(1))
    assert card.nvme.flush(card.queue, nsid) == 0
    card.rpc("snapshot", lvol_name=f"{GROUP}/v", snapshot_name="s")
    card.write(nsid, 100, pattern(2))
    if end == signal.SIGKILL:
        assert card.nvme.flush(card.queue, nsid) == 0  # after SIGTERM it needs none
    card.nvme.close()
    assert card.daemon.process is not None
    card.daemon.process.send_signal(end)
    card.daemon.process.wait(30)
    card.daemon.start()
    card.add_base()
    card.serve()
    assert card.read(card.add("v"), 100) == pattern(2) and card.read(card.add("s"), 100) == pattern(1)


def test_a_full_group_says_so_and_heals(card: Card) -> None:
    """63 clusters: each first write of one finds room, the next one does not; freeing gives it back."""
    nsid = card.create("v", 100)
    for cluster in range(63):
        card.write(nsid, cluster * CLUSTER, pattern(1))
    with pytest.raises(NvmeError) as error:
        card.write(nsid, 63 * CLUSTER, pattern(1))
    assert error.value.status == CAPACITY_EXCEEDED and card.free_clusters() == 0
    card.write(nsid, 5, pattern(2))  # what is mapped can be written
    assert card.nvme.dsm(card.queue, nsid, [(10 * CLUSTER, CLUSTER), (20 * CLUSTER, CLUSTER)]) == 0
    card.write(nsid, 63 * CLUSTER, pattern(3))
    card.rpc("snapshot", lvol_name=f"{GROUP}/v", snapshot_name="s")
    card.write(nsid, 0, pattern(4))  # the last one, for a copy
    with pytest.raises(NvmeError):
        card.write(nsid, CLUSTER, pattern(4))
    with pytest.raises(RpcError, match="No space left on device"):
        card.create("w", 1, thin=False)
    card.delete("s")  # what they share is the volume's own again
    card.write(nsid, CLUSTER, pattern(5))
    assert card.free_clusters() == 1  # what the snapshot had before the copy
    assert card.read(nsid, 0) + card.read(nsid, 5) == pattern(4) + pattern(2)
    assert card.read(nsid, CLUSTER) + card.read(nsid, 63 * CLUSTER) == pattern(5) + pattern(3)
    assert card.read(nsid, 10 * CLUSTER) == bytes(512)


def test_no_volume_shows_what_was_another_s(card: Card) -> None:
    """A group filled with 0xAA and emptied; then 512 bytes in each cluster of another volume, with kills."""
    nsid = card.create("a", 62, thin=False)
    for lba in range(0, 62 * CLUSTER, 256):
        card.write(nsid, lba, pattern(0xAA, 128 << 10))
    card.delete("a")
    nsid, rng = card.create("b", 62), random.Random(1)
    places = [cluster * CLUSTER + rng.randrange(CLUSTER) for cluster in range(62)]
    for number, lba in enumerate(places):
        card.write(nsid, lba, pattern(1))
        if number % 20 == 10:
            card.daemon.kill_worker()
    for lba in range(0, 62 * CLUSTER, 256):
        expected = bytearray(128 << 10)
        for place in places:
            if lba <= place < lba + 256:
                expected[(place - lba) * 512 : (place - lba + 1) * 512] = pattern(1)
        assert card.read(nsid, lba, 128 << 10) == expected


@pytest.mark.slow
def test_ten_thousand_volumes(card: Card) -> None:
    for number in range(10_000):
        card.rpc("create", lvs_name=GROUP, lvol_name=f"v{number}", size_in_mib=16, thin_provision=True)
    nsid = card.add("v9999")
    card.write(nsid, 7, pattern(1))
    card.daemon.kill_worker()
    assert card.read(nsid, 7) == pattern(1) and card.read(card.add("v5000"), 7) == bytes(512)
    assert len(card.daemon.rpc("bdev_lvol_get_lvols")) == 10_000
