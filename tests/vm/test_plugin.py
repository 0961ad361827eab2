"""The pytest plugin, in pytests of its own: fixtures, async tests, what a failure leaves, xdist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

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


@pytest.mark.vm
def test_a_lab_that_cannot_start_is_an_error_with_its_folder(project: pytest.Pytester) -> None:
    project.makepyfile(test_it="async def test_it(lab):\n    await lab('[vm.a]\\nkernel = \"no\"\\n')\n")
    result = project.runpytest_subprocess("--dpu-emu-accel=tcg", "--dpu-emu-out=left")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*cannot read*no: No such file*"])


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
