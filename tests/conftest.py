"""Fixtures around a running daemon and a user-space NVMe driver; see tests/support."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, Target
from tests.support.front_ends import TRAPPED, FrontEnd
from tests.support.nvme_driver import GuestRam, Nvme, SubmissionQueue


@pytest.fixture(scope="module")
def socket_dir() -> Iterator[Path]:
    """A short directory for sockets: their paths must fit 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="dpu-t-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def front_end() -> FrontEnd:
    """How `connect` connects; modules override it to run with several."""
    return TRAPPED


@pytest.fixture(scope="module")
def daemon(socket_dir: Path, front_end: FrontEnd) -> Iterator[Daemon]:
    """A bare daemon, one per test module and front end."""
    directory = socket_dir / front_end.name
    directory.mkdir()
    with Daemon(directory) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def target(daemon: Daemon, front_end: FrontEnd) -> Target:
    """The standard subsystem: memory 512 B, memory 4 KiB, null and file namespaces."""
    return daemon.standard_target(listener=front_end.listener)


@pytest.fixture
def connect(daemon: Daemon, target: Target, front_end: FrontEnd) -> Iterator[Callable[..., Nvme]]:
    """Connects controllers; afterwards their canaries are checked and the daemon must be alive."""
    made: list[Nvme] = []

    def connect(path: str = target.path, ram: GuestRam | None = None, **options: Any) -> Nvme:
        nvme = Nvme(path, ram or GuestRam(), **{**front_end.connect, **options})
        made.append(nvme)
        return nvme

    yield connect
    for nvme in made:
        nvme.close()
        nvme.ram.check_canaries()
        nvme.ram.close()
    assert daemon.alive()


@pytest.fixture
def nvme(connect: Callable[..., Nvme]) -> Nvme:
    """An enabled controller on the standard target, without I/O queues."""
    nvme = connect()
    nvme.enable()
    return nvme


@pytest.fixture(params=["registers", "shadow"])
def queue(nvme: Nvme, front_end: FrontEnd, request: pytest.FixtureRequest) -> SubmissionQueue:
    """I/O queue pair 1 of 64 entries; once with doorbell registers, once with shadow doorbells."""
    if request.param == "shadow":
        if not front_end.shadow:
            pytest.skip(f"no shadow doorbells with {front_end.name}")
        nvme.enable_shadow_doorbells()
    return nvme.create_queue_pair(1, 64)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test carries the daemon's log."""
    report = yield
    running = getattr(item, "funcargs", {}).get("daemon")
    if report.failed and isinstance(running, Daemon):
        report.sections.append(("dpud log", running.log()))
    return report
