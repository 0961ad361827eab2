"""Against the kernel: what it can bind, whom its locks keep out; and the XDG base directory specification."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dpu.errors import EmuError
from emu import paths


def test_cache_dir_prefers_its_own_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "own"))
    assert paths.cache_dir("debs", "x") == tmp_path / "own" / "debs" / "x"
    assert (tmp_path / "own" / "debs" / "x").is_dir()
    monkeypatch.delenv("DPU_EMU_CACHE")
    assert paths.cache_dir() == tmp_path / "xdg" / "dpu-emu"


def test_cache_dir_ignores_a_relative_xdg_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPU_EMU_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_dir() == tmp_path / ".cache" / "dpu-emu"


def test_cache_dir_that_cannot_be_made_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(EmuError, match="DPU_EMU_CACHE"):
        paths.cache_dir()


def _short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory short enough, which pytest's own are not always."""
    base = tmp_path / "r"
    base.mkdir(mode=0o700)
    monkeypatch.setattr(paths, "SOCKET_PATH_BYTES_MAX", 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    return base


def test_runtime_dir_is_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = _short(tmp_path, monkeypatch)
    path = paths.runtime_dir("lab")
    assert path == base / f"dpu-emu-{os.getuid()}" / "lab"
    assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o700
    assert paths.runtime_dir("lab") == path


@pytest.mark.parametrize("trap", ["open to others", "symbolic link"])
def test_runtime_dir_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
    below = _short(tmp_path, monkeypatch) / f"dpu-emu-{os.getuid()}"
    if trap == "symbolic link":
        below.symlink_to(tmp_path)
    else:
        below.mkdir()
        below.chmod(0o777)
    with pytest.raises(EmuError, match="belongs to you alone"):
        paths.runtime_dir("lab")


def test_runtime_dir_leaves_a_directory_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    path = paths.runtime_dir(f"test-{os.getpid()}")
    try:
        assert path.parent.parent == Path("/tmp")
    finally:
        path.rmdir()


def test_socket_path_agrees_with_the_kernel(tmp_path: Path) -> None:
    room = paths.SOCKET_PATH_BYTES_MAX - len(os.fsencode(tmp_path)) - 1
    if room < 1:
        pytest.skip("the temporary directory's own path is too long")
    with socket.socket(socket.AF_UNIX) as longest:
        longest.bind(str(paths.socket_path(tmp_path, "s" * room)))
    with socket.socket(socket.AF_UNIX) as longer, pytest.raises(OSError):
        longer.bind(str(tmp_path / ("s" * (room + 1))))
    with pytest.raises(EmuError, match="shorter"):
        paths.socket_path(tmp_path, "s" * (room + 1))


def test_locked_keeps_out_everybody_else(tmp_path: Path) -> None:
    with paths.locked(tmp_path), open(tmp_path / ".lock") as other:
        for wish in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, wish | fcntl.LOCK_NB)
    with open(tmp_path / ".lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    hold = (
        "import sys, pathlib; from emu import paths\n"
        "with paths.locked(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        holder.kill()
    with paths.locked(tmp_path):
        pass
