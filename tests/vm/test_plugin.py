"""The pytest plugin, in pytests of its own: fixtures, async tests, what a failure leaves, xdist."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from emu.paths import cache_dir

pytest_plugins = ["pytester"]

TESTS = """
import asyncio
import pytest

@pytest.fixture
def lab_scenario():
    return "[vm.small]\\nmemory = '256M'\\n"

async def test_passes(vm):
    result = await vm.exec(["uname"], timeout_s=30)
    assert result.stdout == b"Linux\\n"

async def test_fails(lab):
    first = await lab("[vm.a]\\nmemory = '256M'\\n")
    await first.vms["a"].exec(["sh", "-c", "echo seen-by-the-kernel > /dev/kmsg"], timeout_s=30)
    assert first is None

@pytest.mark.parametrize("x", ["a/b", "a b"])
def test_plain(x, the_lab):
    assert the_lab.vms["small"].running
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_it=TESTS)
    return pytester


@pytest.mark.vm
@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_fixtures_and_what_a_failure_leaves(project: pytest.Pytester, workers: list[str]) -> None:
    result = project.runpytest_subprocess(
        "--dpu-emu-accel=tcg", "--junitxml=junit.xml", "-p", "no:cacheprovider", *workers
    )
    result.assert_outcomes(passed=3, failed=1)
    (folder,) = (project.path / "out/test").iterdir()
    assert "test_fails" in folder.name
    assert {"console.log", "qemu.log", "qemu.txt", "dmesg.txt"} <= {path.name for path in (folder / "a").iterdir()}
    assert "seen-by-the-kernel" in (folder / "a/dmesg.txt").read_text()
    result.stdout.fnmatch_lines([f"*console, dmesg, daemon log and QEMU command line: {folder}"])
    cases = {case.get("name"): case for case in ElementTree.parse(project.path / "junit.xml").iter("testcase")}
    properties = {
        name: [(p.get("name"), p.get("value")) for p in case.iter("property")] for name, case in cases.items()
    }
    assert properties["test_fails"] == [("dpu_emu_folder", str(folder))]
    assert properties["test_passes"] == []


LOOPED = """
import pytest

@pytest.fixture
def lab_scenario():
    disk = "[dpu.card.nvme.disk]\\nnamespaces = [{ size = '16M' }]\\n"
    return "[vm.small]\\nmemory = '256M'\\nnvme = ['card.disk']\\n" + disk

async def test_reads(vm):
    disk = f"if=/dev/{vm.device('card.disk').namespaces[0]}"
    result = await vm.exec(["dd", disk, "of=/dev/null", "bs=4k", "count=64", "iflag=direct"], timeout_s=60)
    assert result.code == 0

async def test_writes(vm):
    disk = f"/dev/{vm.device('card.disk').namespaces[0]}"
    result = await vm.exec(["sh", "-c", f"echo kept | dd of={disk} conv=fsync && head -c 4 {disk}"], timeout_s=60)
    assert result.stdout == b"kept"

async def test_resets(vm):
    disk = vm.device("card.disk")
    result = await vm.exec(["nvme", "reset", f"/dev/{disk.controller}"], timeout_s=60)
    assert result.code == 0
"""


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_again_and_again_under_load(
    pytester: pytest.Pytester, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DPU_EMU_LOOPS (default 10) runs of a project with three VMs at once: none fails, and nothing is left."""
    pytester.makepyfile(test_it=LOOPED)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    files = cache_dir() / "files"
    for number in range(int(os.environ.get("DPU_EMU_LOOPS", "10"))):
        result = pytester.runpytest_subprocess("--dpu-emu-accel=tcg", "-p", "no:cacheprovider", "-n", "4")
        result.assert_outcomes(passed=3)
        assert [path for path in socket_dir.rglob("*") if not path.is_dir()] == [], f"left in loop {number}"
        assert list(socket_dir.glob("*/labs/*")) == [], f"left in loop {number}"
        assert processes_naming(str(socket_dir)) == [], f"left in loop {number}"
    assert [path for name in ("reads", "writes", "resets") for path in files.glob(f"test_{name}*")] == []


def processes_naming(text: str) -> list[str]:
    """Command lines of processes, but our own, that have ``text`` in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in line and path.parent.name != str(os.getpid()):
                found.append(line)
    return found


@pytest.mark.vm
def test_a_lab_that_cannot_start_is_an_error_with_its_folder(project: pytest.Pytester) -> None:
    (project.path / "rubbish").write_text("no kernel\n")
    project.makepyfile(test_it="async def test_it(lab):\n    await lab('[vm.a]\\nkernel = \"rubbish\"\\n')\n")
    result = project.runpytest_subprocess("--dpu-emu-accel=tcg", "--dpu-emu-out=left")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*QEMU ended with exit code 1*", "*invalid kernel header*"])


def test_async_tests_of_others_are_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("async def test_it():\n    pass\n")
    result = pytester.runpytest_subprocess()
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*async def functions are not natively supported*"])


def test_the_plugin_costs_nothing_until_it_is_used() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules); import emu.pytest_plugin; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert {name for name in loaded if not name.startswith("emu")} <= {"shutil", "inspect", "zlib", "bz2", "lzma"}
    assert set(loaded) >= {"emu.pytest_plugin"} and not {"emu.lab", "emu.scenario"} & set(loaded)


def test_folder_names_are_the_tests_own() -> None:
    from emu.pytest_plugin import _folder_name

    names = {_folder_name(nodeid) for nodeid in ("t.py::a[x/y]", "t.py::a[x y]", "t.py::" + "b" * 300, "../../x")}
    assert len(names) == 4
    for name in names:
        assert Path(name).name == name and not name.startswith(".") and len(name) < 100
