"""A block device of the host behind a namespace: what the guest wrote is on the device, whatever happens between."""

from __future__ import annotations

import asyncio
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dpu.errors import EmuError
from emu.daemon import ControllerConfig, Dpu, DpuConfig, NamespaceConfig
from tests.support import nvme_driver as nv
from tests.support.daemon import Daemon, RpcError
from tests.support.loop_device import loop_device
from tests.support.nvme_driver import GuestRam, Nvme, SubmissionQueue

SIZE = 16 << 20


@contextmanager
def connected(daemon: Daemon, bdev: str) -> Iterator[tuple[Nvme, SubmissionQueue]]:
    """A controller whose namespace 1 is ``bdev``."""
    nqn = f"nqn.2026-01.io.test:{bdev}"
    target = daemon.add_subsystem(nqn, [bdev])
    nvme = Nvme(target.path, GuestRam())
    nvme.enable()
    try:
        yield nvme, nvme.create_queue_pair(1, 64)
        nvme.ram.check_canaries()
    finally:
        nvme.close()
        nvme.ram.close()
        daemon.rpc("nvmf_delete_subsystem", {"nqn": nqn})


@pytest.fixture(scope="module", autouse=True)
def transport(daemon: Daemon) -> None:
    daemon.create_transport()


@pytest.mark.parametrize("kind", ["aio", "uring"])
@pytest.mark.parametrize("block_size", [512, 4096])
def test_verified_io(daemon: Daemon, tmp_path: Path, kind: str, block_size: int) -> None:
    dice = random.Random(block_size)
    expected = bytearray(dice.randbytes(SIZE))
    image = tmp_path / "disk.img"
    image.write_bytes(expected)
    name = f"{kind}{block_size}"
    with loop_device(image, block_size=block_size) as device:
        options = {"fallocate": True} if kind == "aio" else {}
        daemon.rpc(f"bdev_{kind}_create", {"name": name, "filename": device, **options})
        with connected(daemon, name) as (nvme, queue):
            info = nvme.identify(0, 1)
            assert struct.unpack_from("<Q", info) == (SIZE // block_size,)  # NSZE

            def write(count: int) -> None:
                for _ in range(count):
                    size = dice.randrange(1, 9) * 4096
                    slba = dice.randrange((SIZE - size) // block_size)
                    data = dice.randbytes(size)
                    nvme.write(queue, 1, slba, data, block=block_size)
                    expected[slba * block_size : slba * block_size + size] = data

            write(40)
            daemon.kill_worker()
            write(40)
            ranges = nvme.ram.buffer(4096)
            ranges.fill(struct.pack("<IIQ", 0, 64 // (block_size // 512), 8))
            assert nvme.execute(queue, nv.DSM, nsid=1, prp1=ranges.iova, cdw=[0, 1 << 2]).status == nv.OK
            if kind == "aio":
                expected[8 * block_size : 8 * block_size + 32768] = bytes(32768)
            for at in range(0, SIZE, 131072):
                assert nvme.read(queue, 1, at // block_size, 131072, block=block_size) == expected[at : at + 131072]
            assert nvme.execute(queue, nv.FLUSH, nsid=1).status == nv.OK
            with open(device, "rb") as found:
                assert found.read() == expected
        assert daemon.rpc(f"bdev_{kind}_delete", {"name": name}) is True
        os.close(os.open(device, os.O_RDWR | os.O_EXCL))  # nothing holds it any more


def test_read_only_and_busy(daemon: Daemon, tmp_path: Path) -> None:
    image = tmp_path / "disk.img"
    image.write_bytes(bytes(SIZE))
    with loop_device(image) as device:
        create = {"name": "ro", "filename": device, "readonly": True}
        held = os.open(device, os.O_RDONLY | os.O_EXCL)
        with pytest.raises(RpcError, match=f"{device} is mounted elsewhere or another program holds it") as error:
            daemon.rpc("bdev_aio_create", create)
        assert error.value.code == -16
        os.close(held)
        daemon.rpc("bdev_aio_create", create)
        with connected(daemon, "ro") as (nvme, queue):
            assert nvme.read(queue, 1, 0, 4096, block=512) == bytes(4096)
            buffer = nvme.ram.buffer(4096)
            assert nvme.io(queue, nv.WRITE, 1, 0, buffer, block=512) == nv.WRITE_PROTECTED
        with pytest.raises(RpcError) as error:
            daemon.rpc("bdev_uring_delete", {"name": "ro"})
        assert error.value.code == -19, "it is another method's"
        daemon.rpc("bdev_aio_delete", {"name": "ro"})


def test_a_scenarios_file_may_be_a_device(tmp_path: Path) -> None:
    """The lab makes no file where a device should be, and takes one that is there with its own size."""
    image = tmp_path / "disk.img"
    image.write_bytes(bytes(SIZE))

    async def bdevs(path: str, place: Path) -> Any:
        namespace = NamespaceConfig("file", block_size=4096, path=Path(path))
        dpu = Dpu(DpuConfig("card", (ControllerConfig("one", (namespace,)),)), place, place, place)
        await dpu.start()
        try:
            await dpu.configure()
            return await dpu.rpc("bdev_get_bdevs")
        finally:
            await dpu.stop()

    with tempfile.TemporaryDirectory(prefix="dpu-t-") as directory, loop_device(image, block_size=4096) as device:
        with pytest.raises(EmuError, match="there is no device /dev/nvme99n1"):
            asyncio.run(bdevs("/dev/nvme99n1", Path(directory)))
        (bdev,) = asyncio.run(bdevs(device, Path(directory)))
        assert bdev["num_blocks"] == SIZE // 4096 and bdev["driver_specific"]["aio"]["cache_mode"] == "direct"
    assert not Path("/dev/nvme99n1").exists()
