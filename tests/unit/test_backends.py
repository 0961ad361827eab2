"""Back ends: geometry, seals, locks, O_DIRECT, and that a second worker finds the same device."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dpu.backends import BACKENDS, Backend, FileBackend, Kind, MemoryBackend, NullBackend, memory
from dpu.errors import RpcError
from dpu.host_memory import memory_available_bytes

UUID = uuid.UUID("11111111-2222-3333-4444-555555555555")
MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk.img"
    path.write_bytes(bytes(MIB))
    yield path


def refusal(error: pytest.ExceptionInfo[RpcError]) -> int:
    return -error.value.code


@pytest.mark.parametrize(
    ("block_size", "num_blocks"), [(500, 100), (0, 100), (1024, 100), (8192, 1), (512, 0), (4096, 2**52)]
)
def test_geometry_that_the_card_cannot_serve(block_size: int, num_blocks: int) -> None:
    for create in (NullBackend.create, MemoryBackend.create):
        with pytest.raises(RpcError) as error:
            create("x", block_size, num_blocks, UUID)
        assert refusal(error) == errno.EINVAL


def test_null_has_no_descriptor() -> None:
    backend = NullBackend.create("n", 512, 2**53, UUID)  # 4 EiB: nothing is allocated
    assert (backend.kind, backend.fd, backend.stash_key) == (Kind.NULL, -1, None)


def test_memory_is_zero_sized_and_sealed() -> None:
    with closing(MemoryBackend.create("m", 4096, 256, UUID)) as backend:
        assert os.fstat(backend.fd).st_size == MIB
        assert os.pread(backend.fd, MIB, 0) == bytes(MIB)
        assert os.fstat(backend.fd).st_blocks == 0, "reading allocates nothing"
        for size in (0, MIB - 4096, MIB + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(backend.fd, size)
        assert not os.get_inheritable(backend.fd)


def test_memory_beyond_the_machine_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_available_bytes", lambda: 3 * MIB)
    with closing(MemoryBackend.create("a", 512, 2 * MIB // 512, UUID)) as first:
        with pytest.raises(RpcError) as error:
            MemoryBackend.create("b", 512, 2 * MIB // 512, UUID, [first])
        assert refusal(error) == errno.ENOMEM
        assert "bdev b needs 2 MiB; of 3 MiB available 2 MiB are promised" in error.value.message
        # What the first has written is no longer a promise: the kernel's figure has it already.
        os.pwrite(first.fd, b"x" * (2 * MIB), 0)
        MemoryBackend.create("b", 512, 2 * MIB // 512, UUID, [first]).close()


def test_memory_available_is_the_kernels_figure_or_less() -> None:
    text = Path("/proc/meminfo").read_text()
    kib = int(text.split("MemAvailable:")[1].split()[0])
    assert 0 < memory_available_bytes() <= (kib << 10) * 1.2


def test_file_measures_and_reports_itself(image: Path) -> None:
    with closing(FileBackend.create("f", str(image), 4096)) as backend:
        assert (backend.num_blocks, backend.size_bytes, backend.readonly) == (256, MIB, False)
        assert not os.get_inheritable(backend.fd)
        row = backend.describe()
        assert row["driver_specific"]["aio"]["filename"] == str(image)
        assert row["driver_specific"]["aio"]["block_size_override"] is True
    with closing(FileBackend.create("f", str(image))) as backend:
        assert backend.block_size == 4096
        assert backend.describe()["driver_specific"]["aio"]["block_size_override"] is False


@pytest.mark.parametrize(("size", "block_size"), [(0, 512), (1000, 512), (MIB + 512, 4096), (MIB, 500), (MIB, 0)])
def test_file_of_a_wrong_size(tmp_path: Path, size: int, block_size: int) -> None:
    path = tmp_path / "odd.img"
    path.write_bytes(bytes(size))
    with pytest.raises(RpcError) as error:
        FileBackend.create("f", str(path), block_size)
    assert refusal(error) == errno.EINVAL


def test_file_that_is_none(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, code in (
        (tmp_path / "absent", errno.ENOENT),
        (tmp_path, errno.EINVAL),
        (fifo, errno.EINVAL),  # and it does not block
        (Path("/dev/zero"), errno.EINVAL),
        (tmp_path / ("x" * 300), errno.ENAMETOOLONG),
    ):
        with pytest.raises(RpcError) as error:
            FileBackend.create("f", str(path), 512)
        assert refusal(error) == code, path


def test_file_is_locked_against_a_second_user(image: Path) -> None:
    """Against another bdev of ours, and against another program that asks for the lock."""
    with closing(FileBackend.create("f", str(image), 512)):
        link = image.with_name("link.img")
        os.link(image, link)
        for path in (image, link):
            with pytest.raises(RpcError) as error:
                FileBackend.create("g", str(path), 512)
            assert refusal(error) == errno.EBUSY
        assert not _another_program_gets_the_lock(image)
    assert _another_program_gets_the_lock(image)


def test_the_lock_outlives_the_worker_in_a_duplicate(image: Path) -> None:
    backend = FileBackend.create("f", str(image), 512)
    stashed = os.dup(backend.fd)
    config, before = backend.to_config(), backend.describe()
    backend.close()
    assert not _another_program_gets_the_lock(image)
    image.unlink()  # the name may even be gone
    with closing(FileBackend.from_config(config, stashed)) as again:
        assert again.describe() == before
        assert os.pread(again.fd, 4096, 0) == bytes(4096)


def _another_program_gets_the_lock(path: Path) -> bool:
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    run = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, check=False)
    return run.returncode == 0


def test_direct_is_what_the_flag_says(image: Path) -> None:
    with closing(FileBackend.create("f", str(image), 512, cache_mode="buffered")) as backend:
        assert (backend.direct, backend.direct_fd, backend.dio_align_bytes) == (False, -1, 1)
        assert not fcntl.fcntl(backend.fd, fcntl.F_GETFL) & os.O_DIRECT
    with closing(FileBackend.create("f", str(image), 512)) as backend:
        assert not fcntl.fcntl(backend.fd, fcntl.F_GETFL) & os.O_DIRECT
        if not backend.direct:
            pytest.skip("the file system of the temporary directory takes no O_DIRECT")
        assert fcntl.fcntl(backend.direct_fd, fcntl.F_GETFL) & os.O_DIRECT
        align = backend.dio_align_bytes
        with mmap.mmap(-1, 16384) as pages:
            pages[:] = b"d" * 16384
            with memoryview(pages) as view, view[4096 + align : 4096 + 2 * align] as buffer:
                assert os.pwritev(backend.direct_fd, [buffer], 3 * align) == align
        assert os.pread(backend.fd, 1, 3 * align) == b"d", "one file behind both descriptors"


def test_direct_is_refused_where_the_file_system_has_none(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def without_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", without_direct)
    with closing(FileBackend.create("f", str(image), 512)) as backend:
        assert not backend.direct
    with pytest.raises(RpcError) as error:
        FileBackend.create("f", str(image), 512, cache_mode="direct")
    assert refusal(error) == errno.EINVAL
    assert _another_program_gets_the_lock(image), "a refused bdev holds nothing"


def test_readonly_file_cannot_be_written(image: Path) -> None:
    with closing(FileBackend.create("f", str(image), 512, readonly=True, fallocate=True)) as backend:
        with pytest.raises(OSError):
            os.pwrite(backend.fd, b"x", 0)
        types = backend.describe()["supported_io_types"]
        assert types["read"] and not (types["write"] or types["write_zeroes"] or types["unmap"])
        assert not backend.supports_discard


def test_a_file_is_the_same_disk_every_time(image: Path) -> None:
    found = set()
    for _ in range(2):
        with closing(FileBackend.create("f", str(image), 512)) as backend:
            found.add(backend.uuid)
    with closing(FileBackend.create("g", str(image), 512)) as backend:
        assert len(found) == 1 and backend.uuid not in found


def test_stored_configuration_makes_an_equal_back_end(image: Path) -> None:
    made: list[Backend] = [
        NullBackend.create("n", 4096, 7, UUID),
        MemoryBackend.create("m", 512, 8, UUID),
        FileBackend.create("f", str(image), 512, fallocate=True, uuid=UUID),
    ]
    for backend in made:
        config = backend.to_config()
        again = BACKENDS[config["type"]].from_config(config, os.dup(backend.fd) if backend.fd >= 0 else -1)
        assert again.describe() == backend.describe()
        assert again.to_config() == config
        assert again.supports_discard == backend.supports_discard
        again.close()
        backend.close()
