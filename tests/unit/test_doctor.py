"""Every row on a host that lacks what it asks for, and the two forms of the answer."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpu.errors import EmuError
from emu import accel, debs, doctor, hostinfo, images, qemu
from emu.doctor import Asked, Check

GOOD = qemu.Qemu(Path("/opt/qemu"), "11.1.3", "user")


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which everything is in order and nothing slow is asked."""
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(accel, "probe_kvm", lambda: (True, "2000 M instructions/s"))
    monkeypatch.setattr(qemu, "present", lambda option=None: GOOD)
    monkeypatch.setattr(qemu, "probe", lambda command: ("", "11.1.3"))
    monkeypatch.setattr(images, "images", lambda: [{"current": True}])
    monkeypatch.setattr(debs, "mirror", lambda: "http://mirror.example.org/debian")
    monkeypatch.setattr(debs, "try_mirror", lambda suite: "")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def _row(name: str, asked: Asked | None = None) -> Check:
    return next(check for check in doctor.run_checks(asked) if check.name == name)


def test_a_good_host_passes_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor(json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True
    assert [row["name"] for row in said["checks"]] == list(doctor.CHECKS)
    assert all(set(row) == {"name", "status", "found", "fix"} for row in said["checks"])
    assert doctor.doctor(json=False) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in doctor.CHECKS)


def test_no_word_is_broken_at_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = "interoperability-of-several-directories"
    checks = [doctor.Check("output directory", "warn", f"{words} {words}", f"{words} or {words}")]
    doctor._print_table(checks)
    lines = capsys.readouterr().out.splitlines()
    assert [line.count(words) for line in lines] == [1, 1, 1, 1] and max(map(len, lines)) <= 80


def test_a_failure_shows_in_the_exit_code_with_its_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def present(option: str | None = None) -> qemu.Qemu:
        raise EmuError("the QEMU [of yours] is no program", "give [a path]")

    monkeypatch.setattr(qemu, "present", present)
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.doctor(json=False) == 1
    table = capsys.readouterr().out
    assert "the QEMU [of yours] is no program" in table
    assert "give [a path]" in table
    assert doctor.doctor(json=True) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert _row("package mirror").status == "ok"


def test_whatever_is_amiss_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "probe_kvm", lambda: (False, "no permission to open /dev/kvm"))
    monkeypatch.setattr(debs, "try_mirror", lambda suite: "404  Not Found")
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (4096, 2048))
    checks = doctor.run_checks()
    amiss = {check.name for check in checks if check.status != "ok"}
    assert {"KVM", "package mirror", "host load", "open files"} <= amiss
    assert all(bool(check.fix) == (check.status != "ok") for check in checks)


def test_a_missing_qemu_fails_only_where_it_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qemu, "present", lambda option=None: None)
    assert _row("QEMU").status == "warn"
    assert _row("QEMU", Asked(offline=True)).status == "fail"
    for deb in debs.read_lock(qemu.LOCK).debs:
        debs.deb_path(deb).touch()
    assert _row("QEMU", Asked(offline=True)).status == "ok"


def test_a_mirror_that_is_down_fails_only_while_something_is_to_be_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(debs, "try_mirror", lambda suite: "Could not connect")
    assert _row("package mirror").status == "warn"
    monkeypatch.setattr(images, "images", list)
    assert _row("guest image").status == "warn"
    assert _row("package mirror").status == "fail"
    for deb in images.current_lock().debs:
        debs.deb_path(deb).touch()
    assert (_row("guest image").status, _row("package mirror").status) == ("ok", "warn")
    monkeypatch.setattr(qemu, "present", lambda option=None: None)
    assert _row("package mirror").status == "fail"


def test_a_qemu_that_broke_since_it_was_made_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qemu, "probe", lambda command: ("it does not start and stop: killed", ""))
    assert _row("QEMU's device").status == "fail"


def test_a_cache_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "file" / "cache"))
    row = _row("cache directory")
    assert row.status == "fail"
    assert "DPU_EMU_CACHE" in row.fix


def test_an_output_directory_need_not_exist_yet(tmp_path: Path) -> None:
    assert _row("output directory", Asked(out=tmp_path / "a" / "b")).status == "ok"
    (tmp_path / "file").touch()
    assert _row("output directory", Asked(out=tmp_path / "file" / "b")).status == "fail"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("free", "status"), [(100 << 20, "fail"), (1 << 30, "warn"), (3 << 30, "ok")], ids=str)
def test_disk_space(free: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert _row("cache directory").status == _row("output directory").status == status


@pytest.mark.parametrize(("limit", "used", "free"), [("max", 0, 8 << 30), (str(1 << 30), 1 << 20, 1023 << 20)])
def test_memory_is_what_the_control_group_leaves(limit: str, used: int, free: int, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 9999999999 kB\nMemAvailable: {8 << 20} kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    assert doctor._memory_free(tmp_path / "meminfo", tmp_path)[0] == free


def test_io_uring_that_is_forbidden_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def syscall(number: int, *rest: object) -> int:
        assert number == 425
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: SimpleNamespace(syscall=syscall))
    row = _row("io_uring")
    assert row.status == "warn"
    assert "Operation not permitted" in row.found


def test_io_uring_leaves_no_open_file() -> None:
    before = set(os.listdir("/proc/self/fd"))
    assert _row("io_uring").status in ("ok", "warn")
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_memfd_whose_seals_do_not_hold_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _row("sealed memfd").status == "ok"
    monkeypatch.setattr(fcntl, "fcntl", lambda *arguments: 0)
    assert _row("sealed memfd").status == "fail"


def test_a_check_that_breaks_is_a_row_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(asked: Asked) -> doctor.Answer:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/meminfo")

    monkeypatch.setitem(doctor.CHECKS, "memory", broken)
    assert _row("memory").status == "fail"


def test_python_packages_lists_the_dependencies_without_the_extras() -> None:
    row = _row("Python packages")
    assert row.status == "ok"
    assert "zstandard" in row.found
    assert "pytest" not in row.found


def test_a_stamp_has_both_loads_and_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = hostinfo.collect(accel=accel.Accel("tcg", "asked for"), qemu=GOOD, image_digest="abc")
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 1.0, 0.5))
    found = json.loads(json.dumps(stamp.finished().to_dict()))
    assert (found["load_start"], found["load_end"]) == ([0.5, 0.5, 0.5], [2.0, 1.0, 0.5])
    assert (found["accelerator"], found["qemu_version"], found["image_digest"]) == ("tcg", "11.1.3", "abc")
    assert found["cores"] == 2
    with contextlib.suppress(FileNotFoundError):
        assert found["cpu_model"] in Path("/proc/cpuinfo").read_text()
