"""The command line of dpud, kill points, and where compiled code is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dpu import jitcache, killpoint
from dpu.daemon import UsageError, main, parse_cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0x1", [0]),
        ("0x3", [0, 1]),
        ("a", [1, 3]),
        ("0X80000001", [0, 31]),
        ("[0]", [0]),
        ("[3,1]", [1, 3]),
        ("[0,2-4]", [0, 2, 3, 4]),
        ("[ 5 - 6 , 5 ]", [5, 6]),
    ],
)
def test_core_masks(text: str, cpus: list[int]) -> None:
    assert parse_cpus(text, range(32)) == cpus


@pytest.mark.parametrize("text", ["", "0x", "xyz", "[]", "[1", "[2-1]", "[a]", "[1,,2]", "0x0", "-1", "[-1]"])
def test_bad_core_masks(text: str) -> None:
    with pytest.raises(UsageError, match="CPU"):
        parse_cpus(text, range(32))


def test_cpus_must_be_allowed() -> None:
    with pytest.raises(UsageError, match=r"CPU 2,3 is not available \(allowed: 0,1\)"):
        parse_cpus("0xf", [0, 1])
    with pytest.raises(UsageError, match=r"4,5,6,7,8,9,10,11,\.\.\."):
        parse_cpus("[0-99999]", range(4))


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ([], 2, "-r"),
        (["-r", "x", "--watch", "1"], 2, "unrecognized arguments: --watch"),
        (["-r", "x", "--watchdog", "soon"], 2, "--watchdog"),
        (["-r", "x", "--watchdog", "-1"], 2, "0 to 3600"),
        (["-r", "x", "-m", "zz"], 2, "bad CPU mask"),
        (["-r", "x", "--ready-fd", "999"], 2, "not open"),
        (["-r", "/nowhere/x"], 1, "/nowhere/x: No such file or directory (name another socket with -r, in a dir"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, line: str
) -> None:
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("dpud: ") and error.count("\n") == 1 and line in error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out.startswith("dpud ")


@pytest.mark.parametrize(
    ("value", "hits"), [("here", 1), ("here:1", 1), ("here:3", 3), ("there", 0), ("", 0), ("here:x", 0)]
)
def test_kill_points(value: str, hits: int) -> None:
    program = (
        "from dpu.killpoint import killpoint\n"
        "for hit in range(1, 6):\n print(hit, flush=True); killpoint('here'); killpoint('elsewhere')"
    )
    environment = {**os.environ, killpoint.VARIABLE: value}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == (-signal.SIGKILL if hits else 0)
    assert done.stdout.split()[-1] == str(hits or 5)


def test_compiled_code_is_kept_by_what_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in ("layout.py", "nvme/wire.py", "fastpath/asic.py"):
        (tmp_path / "dpu" / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dpu" / source).write_text("x = 1\n")
    monkeypatch.setattr(jitcache, "_PACKAGE", tmp_path / "dpu")
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "cache"))
    first, temporary = jitcache.directory()
    assert first.parent == tmp_path / "cache" / "numba" and first.is_dir() and not temporary
    assert jitcache.directory() == (first, False)
    for source in ("layout.py", "nvme/wire.py", "fastpath/asic.py"):
        before = jitcache.digest()
        (tmp_path / "dpu" / source).write_text("x = 2\n")
        assert jitcache.digest() != before
    (tmp_path / "dpu" / "keeper.py").write_text("other\n")
    before = jitcache.digest()
    monkeypatch.setattr(jitcache, "_version", lambda package: "0.0")
    assert jitcache.digest() != before


def test_without_a_writable_cache_a_temporary_one_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "file"))
    path, temporary = jitcache.directory()
    assert temporary and path.is_dir()
    path.rmdir()


def test_the_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPU_EMU_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert jitcache.cache_root() == Path("/xdg/dpu-emu")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert jitcache.cache_root() == Path("/home/somebody/.cache/dpu-emu")
    monkeypatch.setenv("DPU_EMU_CACHE", "/mine")
    assert jitcache.cache_root() == Path("/mine")


def test_the_keeper_does_not_load_the_compiler() -> None:
    program = "import dpu.daemon, sys; print([m for m in ('numba', 'numpy', 'asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
