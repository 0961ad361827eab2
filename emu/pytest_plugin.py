"""pytest plugin: VMs on emulated DPUs as fixtures. Loaded with the project; imports nothing until it is used.

::

    async def test_my_driver(vm):                     # one VM, one DPU, one controller with 1 GiB of memory
        result = await vm.exec(["nvme", "list"], timeout_s=10)
        assert b"dpu-emu" in result.stdout

    async def test_two_disks(lab):                    # a lab of your own
        mine = await lab("two.toml")                  # a file, TOML text, a Scenario or a LabConfig
        result = await workload(mine, "fio", rw="randread", runtime="2s")      # emu.run.workload
        assert result.value("iops", "read") > 0

Fixtures: ``lab`` makes labs, which end with the test; ``vm`` and ``dpu`` are the first of the lab that the fixture
``lab_scenario`` describes (override it; same forms as above), ``the_lab`` is that lab itself. Tests that use one of
them may be ``async def``; they and the lab run in one event loop in the main thread.

When a test fails, console, dmesg, daemon log and QEMU command line stay in one folder, which is named in the test's
report and in JUnit's property ``dpu_emu_folder``. After a test that passed it is removed.

Options: ``--dpu-emu-accel``, ``--dpu-emu-qemu``, ``--dpu-emu-out`` (default: out/test below the root directory).
Works with pytest-xdist: every worker has labs of its own.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    import asyncio

    from emu.daemon import Dpu
    from emu.lab import Lab, LabConfig
    from emu.scenario import Scenario
    from emu.vm import Platform, Vm

    Description: TypeAlias = str | Path | Scenario | LabConfig
    LabFactory: TypeAlias = Callable[[Description], Awaitable[Lab]]

PROPERTY = "dpu_emu_folder"

DEFAULT_SCENARIO = """
[vm.guest]
vcpus = 2
memory = "512M"
nvme = ["card.disk"]
[dpu.card.nvme.disk]
"""

_RUNNER = pytest.StashKey["asyncio.Runner"]()
_FOLDER = pytest.StashKey[Path]()
_FAILED = pytest.StashKey[bool]()
_PLATFORMS = pytest.StashKey[dict[Any, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dpu-emu", "virtual machines on emulated DPUs")
    group.addoption(
        "--dpu-emu-accel", choices=("auto", "kvm", "tcg"), default="auto", help="accelerator (default: auto)"
    )
    group.addoption("--dpu-emu-qemu", metavar="PATH", help="a QEMU of your own")
    group.addoption("--dpu-emu-out", metavar="DIR", help="folder for what failed tests leave (default: out/test)")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs ``async def`` tests that use this plugin; others are somebody else's."""
    runner = pyfuncitem.stash.get(_RUNNER, None)
    if runner is None or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = pyfuncitem._fixtureinfo.argnames
    runner.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Names the folder in the report of what failed."""
    report = yield
    folder = item.stash.get(_FOLDER, None)
    if folder is not None and report.failed:
        item.stash[_FAILED] = True
        item.user_properties.append((PROPERTY, str(folder)))  # for the reports that follow, JUnit's among them
        report.user_properties.append((PROPERTY, str(folder)))
        report.sections.append(("dpu-emu", f"console, dmesg, daemon log and QEMU command line: {folder}"))
    return report


@pytest.fixture
def _dpu_emu_runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """The event loop of one test."""
    import asyncio

    with asyncio.Runner() as runner:
        request.node.stash[_RUNNER] = runner
        yield runner


@pytest.fixture
def lab(request: pytest.FixtureRequest, _dpu_emu_runner: asyncio.Runner) -> Iterator[LabFactory]:
    """``await lab(DESCRIPTION)`` starts a lab, which ends with the test."""
    from dataclasses import replace

    from emu.lab import Lab, LabConfig

    root = Path(request.config.getoption("--dpu-emu-out") or request.config.rootpath / "out" / "test")
    folder = root.absolute() / _folder_name(request.node.nodeid)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    request.node.stash[_FOLDER] = folder
    labs: list[Lab] = []

    async def start(description: Description) -> Lab:
        config = description if isinstance(description, LabConfig) else _scenario(description, request).lab_config()
        below = folder / str(len(labs)) if labs else folder
        config = replace(
            config,
            out=config.out or below,
            accel=request.config.getoption("--dpu-emu-accel"),
            qemu=config.qemu or request.config.getoption("--dpu-emu-qemu"),
        )
        made = Lab(config, _platform(request.config, config), _progress())
        await made.__aenter__()
        labs.append(made)
        return made

    yield start
    try:
        while labs:
            _dpu_emu_runner.run(labs.pop().__aexit__(None, None, None))
    finally:
        if not request.node.stash.get(_FAILED, False):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def lab_scenario() -> str:
    """What ``vm``, ``dpu`` and ``the_lab`` are made from. Override it in a module or class."""
    return DEFAULT_SCENARIO


@pytest.fixture
def the_lab(lab: LabFactory, lab_scenario: Description, _dpu_emu_runner: asyncio.Runner) -> Lab:
    """The lab that ``lab_scenario`` describes."""

    async def start() -> Lab:
        return await lab(lab_scenario)

    return _dpu_emu_runner.run(start())


@pytest.fixture
def vm(the_lab: Lab) -> Vm:
    """The first VM of ``the_lab``."""
    return next(iter(the_lab.vms.values()))


@pytest.fixture
def dpu(the_lab: Lab) -> Dpu:
    """The first DPU of ``the_lab``."""
    return next(iter(the_lab.dpus.values()))


def _scenario(description: str | Path | Scenario, request: pytest.FixtureRequest) -> Scenario:
    from emu.scenario import load, parse

    if isinstance(description, str) and "\n" in description:
        return parse(description, f"{request.node.name}.toml", request.path.parent)
    if isinstance(description, str | Path):
        return load(request.path.parent / description)
    return description


def _platform(config: pytest.Config, lab_config: LabConfig) -> Platform:
    """QEMU, accelerator and image: looked for once in a process."""
    from emu.lab import prepare

    known = config.stash.setdefault(_PLATFORMS, {})
    key = (lab_config.qemu, lab_config.accel)
    if key not in known:
        known[key] = prepare(lab_config, _progress())
    platform: Platform = known[key]
    return platform


def _progress() -> Any:
    """Lines on standard error, which pytest shows for a test that failed."""
    import sys

    from emu.progress import Lines

    return Lines(sys.stderr)


def _folder_name(nodeid: str) -> str:
    """A file name that is the test's alone: readable, with a number where characters had to go."""
    import zlib

    readable = re.sub(r"[^a-zA-Z0-9._-]+", "-", nodeid).strip("-.")[-80:]
    return f"{readable}-{zlib.crc32(nodeid.encode()):08x}"
