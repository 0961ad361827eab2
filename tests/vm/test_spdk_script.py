"""A bare dpud that SPDK's command line makes a VM's disk: I/O, saved, restarted, loaded, and the data is there."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from emu import accel, images, qemu, snapshot
from emu.ledger import Ledger
from emu.progress import Silent
from emu.vm import Platform, Vm, VmConfig
from tests.support.daemon import Daemon
from tests.support.scripted_card import Place

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dpu-t-", dir="/tmp"))  # short: sockets go there
    yield path
    shutil.rmtree(path)


def test_from_a_script_to_a_vm_and_over_a_restart(directory: Path, tmp_path: Path) -> None:
    (directory / "card").mkdir()
    place = Place(directory / "card")
    ledger = Ledger.create("script", directory)
    progress = Silent()
    platform = Platform(qemu.find(None, progress), accel.choose("auto", progress), images.get(progress))

    async def in_a_vm(name: str, command: str) -> str:
        """What ``command`` writes in a new VM; $device is the file's namespace, which has NSID 3."""
        for folder in (ledger.directory / name, tmp_path / name):
            folder.mkdir()
        vm = Vm(VmConfig(name), platform, ledger.directory / name, tmp_path / name, ledger)
        await snapshot.start(vm, progress)
        try:
            disk = await vm.attach(place.traddr / "cntrl", namespaces=2)
            known = f"cat /sys/class/nvme/{disk.controller}/serial /sys/block/{disk.namespaces[1]}/nsid"
            text = f"set -e; {known}; device=/dev/{disk.namespaces[1]}; {command}"
            result = await vm.exec(["sh", "-c", text], timeout_s=120)
            assert result.code == 0, result
            serial, nsid, *rest = result.stdout.decode().split("\n")
            assert (serial.strip(), nsid) == ("SCRIPT", "3")
            return "\n".join(rest)
        finally:
            await vm.stop()

    read = "sha256sum </mnt/data; umount /mnt"
    with Daemon(place.directory):
        place.script()
        write = "mkfs.ext4 -q $device; mount $device /mnt; head -c 999999 /dev/urandom >/mnt/data"
        before = asyncio.run(in_a_vm("first", f"{write}; {read}"))
    with Daemon(place.directory, args=["-c", str(place.saved)]):
        assert asyncio.run(in_a_vm("second", f"mount $device /mnt; {read}")) == before != ""
    ledger.close()
