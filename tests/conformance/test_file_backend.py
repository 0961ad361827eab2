"""The file back end through a whole daemon, once with io_uring and once with threads (DPU_EMU_URING=0).

The daemon runs in a mount namespace of its own with two small file systems: `small` (tmpfs, 4 MiB) fills up, and
`plain` (ramfs) knows neither fallocate nor O_DIRECT. That Flush and FUA reach the kernel as fdatasync and
RWF_DSYNC is shown where the requests can be seen: tests/unit/test_asic_files.py and test_nvme_io_threads.py.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import nvme_driver as nv
from tests.support.daemon import MIB, Daemon, RpcError, Target
from tests.support.nvme_driver import PAGE, GuestRam, Nvme, NvmeError, SubmissionQueue

UNIT = 512
WRITE_FAULT, UNRECOVERED_READ, CAPACITY_EXCEEDED = 0x280, 0x281, 0x081
SMALL_BYTES, FILE_BYTES = 4 * MIB, 16 * MIB
MOUNTS = f'mount -t tmpfs -o size={SMALL_BYTES} none "$1" && mount -t ramfs none "$2" && shift 2 && exec "$@"'

Connect = Callable[..., Nvme]


def unshare() -> list[str]:
    """A command that runs another one where it may mount; skips where none may."""
    for command in (["unshare", "-m"], ["unshare", "-r", "-m"]):
        probe = [*command, "mount", "-t", "ramfs", "none", "/mnt"]
        if shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0:
            return command
    pytest.skip("this user may not mount file systems, not even in a namespace")


@pytest.fixture(scope="module", params=["uring", "threads"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    directory = Path(tempfile.mkdtemp(prefix="dpu-f-"))
    small, plain = directory / "small", directory / "plain"
    small.mkdir()
    plain.mkdir()
    try:
        env = {"DPU_EMU_URING": "1" if request.param == "uring" else "0"}
        daemon = Daemon(directory, env=env)
        daemon.command = [*unshare(), "sh", "-c", MOUNTS, "sh", str(small), str(plain), *daemon.command]
        with daemon:
            daemon.create_transport()
            yield daemon
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Disk:
    """A file as a namespace of a controller of its own."""

    number = 0

    def __init__(self, daemon: Daemon, folder: str, size: int = FILE_BYTES, **options: Any) -> None:
        Disk.number += 1
        self.daemon, self.name = daemon, f"disk{Disk.number}"
        assert daemon.process
        path = daemon.directory / folder / self.name
        self.path = Path(f"/proc/{daemon.process.pid}/root{path}")  # as the daemon sees it
        with self.path.open("wb") as file:
            file.truncate(size)
        params = {"name": self.name, "filename": str(path), "block_size": UNIT, "fallocate": True}
        daemon.rpc("bdev_aio_create", params | options)
        self.target: Target = daemon.add_subsystem(f"nqn.2026-01.io.test:{self.name}", [self.name])
        self.ram = GuestRam(8 << 20)
        self.nvme = Nvme(self.target.path, self.ram)
        self.nvme.enable()
        self.queue: SubmissionQueue = self.nvme.create_queue_pair(1, 64)

    def write(self, slba: int, data: bytes, *, fua: bool = False) -> int:
        """The status."""
        try:
            self.nvme.write(self.queue, 1, slba, data, fua=fua)
        except NvmeError as error:
            return error.status
        return nv.OK

    def read(self, slba: int, length: int) -> bytes:
        return self.nvme.read(self.queue, 1, slba, length)

    def close(self) -> None:
        self.nvme.close()
        self.ram.check_canaries()
        self.ram.close()
        self.daemon.rpc("nvmf_delete_subsystem", {"nqn": self.target.nqn})
        os.truncate(self.path, 0)  # the bdev still has it open
        self.path.unlink()


@pytest.fixture
def disk(daemon: Daemon) -> Iterator[Callable[..., Disk]]:
    """Makes disks; the same worker must have served all of the test."""
    made: list[Disk] = []
    worker = daemon.worker_pid()

    def make(folder: str, **options: Any) -> Disk:
        made.append(Disk(daemon, folder, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert daemon.alive() and daemon.worker_pid() == worker, daemon.log()


def test_a_full_file_system_is_a_status_and_room_makes_it_work_again(disk: Callable[..., Disk]) -> None:
    full = disk("small")
    piece, dice = 64 << 10, random.Random(1)
    written: dict[int, bytes] = {}
    status, slba = nv.OK, 0
    while status == nv.OK:
        assert slba * UNIT < FILE_BYTES, "more was written than there is room for"
        data = dice.randbytes(piece)
        status = full.write(slba, data, fua=bool(slba % 256))
        if status == nv.OK:
            written[slba] = data
        slba += piece // UNIT
    assert status == CAPACITY_EXCEEDED
    assert piece * len(written) > SMALL_BYTES // 2
    assert full.nvme.flush(full.queue, 1) == nv.OK
    for at, data in written.items():
        assert full.read(at, piece) == data, "what was there has suffered"
    at = next(iter(written))
    assert full.write(at, written[at]) == nv.OK, "blocks that are allocated can be written"
    assert full.nvme.write_zeroes(full.queue, 1, 0, 4 * piece // UNIT) == nv.OK
    for again in range(3):
        assert full.write(FILE_BYTES // UNIT - (again + 1) * piece // UNIT, b"\x5a" * piece) == nv.OK
    assert full.read(FILE_BYTES // UNIT - piece // UNIT, piece) == b"\x5a" * piece


def test_room_that_another_program_gives_back(disk: Callable[..., Disk]) -> None:
    full = disk("small")
    filler = full.path.with_name("filler")
    with filler.open("wb") as file, pytest.raises(OSError):
        while True:
            os.write(file.fileno(), bytes(PAGE))
    statuses = [full.write(64 * i, b"\x01" * 32 * UNIT) for i in range(5)]
    assert set(statuses) == {CAPACITY_EXCEEDED}
    filler.unlink()
    assert [full.write(64 * i, b"\x01" * 32 * UNIT) for i in range(5)] == [nv.OK] * 5


def test_many_commands_at_a_full_file_system_each_get_their_answer(disk: Callable[..., Disk]) -> None:
    full = disk("small")
    buffer = full.ram.buffer(128 << 10)
    buffer.fill(b"\x77" * len(buffer))
    commands = [
        full.nvme.submit_io(full.queue, nv.WRITE, 1, i * len(buffer) // UNIT, buffer) for i in range(FILE_BYTES >> 17)
    ]
    statuses = [one.status for one in full.nvme.wait(*commands)]
    assert set(statuses) == {nv.OK, CAPACITY_EXCEEDED}
    for i, status in enumerate(statuses):
        if status == nv.OK:
            assert full.read(i * len(buffer) // UNIT, len(buffer)) == buffer.bytes()


def test_a_file_cut_short_is_a_media_error(disk: Callable[..., Disk]) -> None:
    cut = disk(".")
    assert cut.write(0, b"\x11" * PAGE) == nv.OK
    os.truncate(cut.path, PAGE)
    for slba, length in ((8, PAGE), (0, 2 * PAGE), (FILE_BYTES // UNIT - 8, PAGE)):
        with pytest.raises(NvmeError) as caught:
            cut.read(slba, length)
        assert caught.value.status == UNRECOVERED_READ
        assert cut.nvme.compare(cut.queue, 1, slba, bytes(length)) == UNRECOVERED_READ
    assert cut.read(0, PAGE) == b"\x11" * PAGE
    assert cut.nvme.write_zeroes(cut.queue, 1, 4096, 8) == nv.OK
    assert cut.nvme.flush(cut.queue, 1) == nv.OK
    os.truncate(cut.path, FILE_BYTES)
    assert cut.write(8, b"\x22" * PAGE) == nv.OK
    assert cut.read(0, 2 * PAGE) == b"\x11" * PAGE + b"\x22" * PAGE


def test_a_second_daemon_is_refused(disk: Callable[..., Disk]) -> None:
    held = disk(".")
    directory = Path(tempfile.mkdtemp(prefix="dpu-g-"))
    try:
        with Daemon(directory) as other, pytest.raises(RpcError) as caught:
            other.rpc("bdev_aio_create", {"name": "mine", "filename": str(held.path), "block_size": UNIT})
        assert caught.value.code == -16  # EBUSY
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("folder", [".", "small", "plain"])
def test_any_alignment_of_memory_and_length(disk: Callable[..., Disk], folder: str) -> None:
    """With O_DIRECT too: what it cannot take goes through the page cache, and both see the same bytes."""
    aligned, dice, model = disk(folder, size=2 * MIB), random.Random(3), bytearray(2 * MIB)
    for offset in (0, 512, 4, 1028, PAGE - 4, 2048):
        for blocks in (1, 3, 8, 16, 65):
            slba = dice.randrange(2 * MIB // UNIT - blocks)
            buffer = aligned.ram.buffer(blocks * UNIT, offset)
            buffer.fill(dice.randbytes(len(buffer)))
            assert aligned.nvme.io(aligned.queue, nv.WRITE, 1, slba, buffer) == nv.OK
            model[slba * UNIT : (slba + blocks) * UNIT] = buffer.bytes()
            start = max(0, slba - 8)
            length = min(200 * UNIT, len(model) - start * UNIT)
            assert aligned.read(start, length) == model[start * UNIT : start * UNIT + length]
            buffer.fill(bytes(len(buffer)))
            assert aligned.nvme.io(aligned.queue, nv.READ, 1, slba, buffer) == nv.OK
            assert buffer.bytes() == model[slba * UNIT : (slba + blocks) * UNIT]
            aligned.ram.free_buffer(buffer)
    assert aligned.path.read_bytes() == model


def test_compare(disk: Callable[..., Disk]) -> None:
    compared, data = disk("."), os.urandom(100 << 10)
    assert compared.write(3, data) == nv.OK
    assert compared.nvme.compare(compared.queue, 1, 3, data) == nv.OK
    for at in (0, 511, 512, 50_000, len(data) - 1):
        wrong = bytearray(data)
        wrong[at] ^= 0x80
        assert compared.nvme.compare(compared.queue, 1, 3, bytes(wrong)) == nv.COMPARE_FAILURE
    assert compared.read(3, len(data)) == data


@pytest.mark.parametrize("folder", [".", "small", "plain"])
def test_zeroes_and_deallocation_with_and_without_holes(disk: Callable[..., Disk], folder: str) -> None:
    """ramfs cannot punch: there zeroes are written, and Deallocate is advice that is not taken."""
    zeroed = disk(folder, size=1 * MIB)
    assert zeroed.write(0, b"\x5a" * (256 << 10)) == nv.OK
    assert zeroed.nvme.write_zeroes(zeroed.queue, 1, 3, 200) == nv.OK
    wanted = b"\x5a" * 3 * UNIT + bytes(200 * UNIT) + b"\x5a" * (512 - 203) * UNIT
    assert zeroed.read(0, 256 << 10) == wanted
    fua = zeroed.nvme.execute(zeroed.queue, nv.WRITE_ZEROES, nsid=1, cdw=[300, 0, 7 | 1 << 30])
    assert fua.status == nv.OK
    wanted = wanted[: 300 * UNIT] + bytes(8 * UNIT) + wanted[308 * UNIT :]
    assert zeroed.read(0, 256 << 10) == wanted
    assert zeroed.nvme.dsm(zeroed.queue, 1, [(400, 16)]) == nv.OK
    if folder != "plain":
        wanted = wanted[: 400 * UNIT] + bytes(16 * UNIT) + wanted[416 * UNIT :]
    assert zeroed.read(0, 256 << 10) == wanted == zeroed.path.read_bytes()[: 256 << 10]


def test_direct_and_buffered_commands_at_depth(disk: Callable[..., Disk]) -> None:
    """Sixty at a time, aligned and not, each in its own part of the disk: every one ends with its own data."""
    busy, dice = disk("."), random.Random(5)
    span = FILE_BYTES // UNIT // 60
    for _ in range(4):
        buffers = []
        commands = []
        for i in range(60):
            buffer = busy.ram.buffer(dice.choice([1, 8, 64]) * UNIT, dice.choice([0, 0, 512, 4]))
            buffer.fill(dice.randbytes(len(buffer)))
            buffers.append((i * span + dice.choice([0, 8, 3]), buffer))
            commands.append(
                busy.nvme.submit_io(busy.queue, nv.WRITE, 1, buffers[-1][0], buffer, fua=dice.random() < 0.2)
            )
        assert {one.status for one in busy.nvme.wait(*commands)} == {nv.OK}
        for slba, buffer in buffers:
            assert busy.read(slba, len(buffer)) == buffer.bytes()
            busy.ram.free_buffer(buffer)


def test_deleting_a_subsystem_with_commands_under_way(daemon: Daemon, disk: Callable[..., Disk]) -> None:
    """The file is let go whole: another daemon can have it afterwards."""
    gone = disk(".")
    buffer = gone.ram.buffer(128 << 10)
    for i in range(40):
        gone.nvme.submit_io(gone.queue, nv.WRITE, 1, i * 256, buffer)
    daemon.rpc("nvmf_delete_subsystem", {"nqn": gone.target.nqn})
    daemon.add_subsystem(gone.target.nqn, [gone.name])
    again = disk(".")
    assert again.write(0, b"x" * UNIT) == nv.OK
