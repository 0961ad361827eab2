"""Devices and files in use are refused with the name of their user: on loop devices, else on a made-up /sys."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dpu.backends import FileBackend, UringBackend, hostdev
from dpu.errors import RpcError
from tests.support.loop_device import loop_device

MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "disk.img"
    with path.open("wb") as file:
        file.truncate(8 * MIB)
    return path


@pytest.fixture
def device(image: Path) -> Iterator[str]:
    with loop_device(image) as device:
        yield device


def refused(path: str, *, readonly: bool = False, block_size: int | None = None) -> tuple[int, str]:
    with pytest.raises(RpcError) as error:
        FileBackend.create("d", path, block_size, readonly=readonly)
    return -error.value.code, error.value.message


@pytest.mark.parametrize("kind", [FileBackend, UringBackend])
@pytest.mark.parametrize("block_size", [512, 4096])
def test_size_and_block_size_are_the_devices(image: Path, kind: type[FileBackend], block_size: int) -> None:
    with loop_device(image, block_size=block_size) as device, closing(kind.create("d", device)) as backend:
        assert (backend.block_size, backend.size_bytes) == (block_size, 8 * MIB)
        assert backend.direct and backend.dio_align_bytes == block_size


def test_larger_blocks_may_be_asked_for_smaller_ones_not(image: Path, device: str) -> None:
    with closing(FileBackend.create("d", device, 4096)) as backend:
        assert (backend.block_size, backend.num_blocks) == (4096, 2048)
    with loop_device(image, block_size=4096) as large:
        code, text = refused(large, block_size=512)
        assert code == errno.EINVAL and f"block_size 512 is smaller than the 4096 of {large}" in text


def test_it_is_ours_alone(image: Path, device: str, tmp_path: Path) -> None:
    with closing(FileBackend.create("d", device)) as backend:
        code, text = refused(device)
        assert code == errno.EBUSY and text == f"{os.strerror(code)}: {device} is mounted elsewhere or another " + (
            "program holds it"
        )
        kept = os.dup(backend.fd)  # as the keeper's
    assert refused(device)[0] == errno.EBUSY
    os.close(kept)
    FileBackend.create("d", device).close()


def test_a_file_under_a_loop_device_is_refused(image: Path, device: str) -> None:
    code, text = refused(str(image))
    assert code == errno.EBUSY and text.endswith(f"{image} is what {device} is made of")


def test_a_mounted_device_is_refused(device: str, tmp_path: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", device], check=True)
    place = tmp_path / "a place"
    place.mkdir()
    mounted = subprocess.run(["mount", device, str(place)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        for readonly in (False, True):
            code, text = refused(device, readonly=readonly)
            assert code == errno.EBUSY and text.endswith(f"{device} is mounted at {place}")
    finally:
        subprocess.run(["umount", str(place)], check=True)
    with closing(FileBackend.create("d", device)):
        again = subprocess.run(["mount", device, str(place)], capture_output=True, check=False)
        assert again.returncode != 0, "the kernel lets nobody mount what we serve"


def test_a_read_only_device(image: Path) -> None:
    with loop_device(image, readonly=True) as device:
        code, text = refused(device)
        assert code == errno.EACCES and text.endswith(f"{device} is read-only: say readonly")
        with closing(FileBackend.create("d", device, readonly=True)) as backend:
            assert backend.readonly and backend.size_bytes == 8 * MIB


@pytest.mark.parametrize("path", ["/dev/null", "/proc", "fifo"])
def test_what_is_no_disk(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    code, text = refused(str(tmp_path / path))
    assert code == errno.EINVAL and "neither a file nor a block device" in text


# --- a made-up machine: sda with sda1 and sda2, dm-0 on sda2


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sysfs, proc = tmp_path / "sys", tmp_path / "proc"
    disk = sysfs / "devices/pci/block/sda"
    for name, number in (("", "8:0"), ("sda1", "8:1"), ("sda2", "8:2")):
        (disk / name / "holders").mkdir(parents=True)
        (disk / name / "dev").write_text(number + "\n")
        if name:
            (disk / name / "partition").write_text(name[-1])
        link = sysfs / "dev/block" / number
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(disk / name)
    (sysfs / "block/dm-0/dm").mkdir(parents=True)
    (sysfs / "block/dm-0/dm/name").write_text("vg-root\n")
    (proc / "self").mkdir(parents=True)
    (proc / "self/mountinfo").write_text("20 1 254:1 / / rw - ext4 /dev/root rw\n")
    (proc / "swaps").write_text("Filename Type Size Used Priority\n")
    monkeypatch.setattr(hostdev, "_SYSFS", sysfs)
    monkeypatch.setattr(hostdev, "_PROC", proc)
    numbers = {"/dev/sda": "8:0", "/dev/sda1": "8:1", "/dev/sda2": "8:2"}
    monkeypatch.setattr(hostdev, "_number_of", lambda path: numbers.get(path, ""))
    return tmp_path


def users(minor: int) -> list[str]:
    path = "/dev/sda" + (str(minor) if minor else "")
    return list(hostdev._users_of_device(path, os.makedev(8, minor)))


def test_nobody(machine: Path) -> None:
    assert [users(minor) for minor in range(3)] == [[], [], []]


def test_a_part_that_is_mounted_busies_the_whole_and_not_the_other_part(machine: Path) -> None:
    with (machine / "proc/self/mountinfo").open("a") as file:
        file.write("40 20 8:1 / /mnt/a\\040b rw,relatime shared:1 master:2 - ext4 /dev/sda1 rw\n")
        file.write("41 20 0:44 /sub /pool rw - btrfs /dev/sda2 rw\n")
    one, two = "/dev/sda1 is mounted at /mnt/a b", "/dev/sda2 is mounted at /pool"
    assert [users(minor) for minor in range(3)] == [[one, two], [one], [two]]


def test_a_mounted_whole_busies_its_parts(machine: Path) -> None:
    with (machine / "proc/self/mountinfo").open("a") as file:
        file.write("40 20 8:0 / /data rw - xfs /dev/sda rw\n")
    assert [users(minor) for minor in range(3)] == [["/dev/sda is mounted at /data"]] * 3


def test_swap(machine: Path) -> None:
    with (machine / "proc/swaps").open("a") as file:
        file.write("/dev/sda2 partition 65532 0 -2\n/dev/zram0 partition 1 0 5\n")
    assert [users(minor) for minor in range(3)] == [["/dev/sda2 is swap space"], [], ["/dev/sda2 is swap space"]]


def test_volume_managers(machine: Path) -> None:
    (machine / "sys/devices/pci/block/sda/sda2/holders/dm-0").mkdir()
    (machine / "sys/devices/pci/block/sda/sda1/holders/md127").mkdir()
    by_lvm, by_md = "/dev/sda2 is part of dm-0 (vg-root)", "/dev/sda1 is part of md127"
    assert sorted(users(0)) == [by_md, by_lvm] and users(1) == [by_md] and users(2) == [by_lvm]


def test_a_swap_file(machine: Path, image: Path) -> None:
    with (machine / "proc/swaps").open("a") as file:
        file.write(f"{image} file 8188 0 -2\n")
    assert refused(str(image)) == (errno.EBUSY, f"{os.strerror(errno.EBUSY)}: {image} is swap space")
