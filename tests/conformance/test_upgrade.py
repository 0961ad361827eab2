"""Other code takes over from a worker that serves: from another place, with another layout, and code that cannot."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dpu
from dpu.errors import RpcError
from dpu.spdk import Spdk
from tests.support.daemon import NS_4K, NS_512, NS_FILE, Daemon, Target
from tests.support.load import Load
from tests.support.nvme_driver import GuestRam, Nvme

PACKAGE = Path(dpu.__file__).parent


def other_code(place: Path, **changes: tuple[str, str]) -> Path:
    """A copy of the package with texts replaced, by module; the directory for PYTHONPATH."""
    shutil.copytree(PACKAGE, place / "dpu", ignore=shutil.ignore_patterns("__pycache__"))
    for module, (old, new) in changes.items():
        path = place / "dpu" / f"{module}.py"
        text = path.read_text()
        assert text.count(old) == 1, (module, old)
        path.write_text(text.replace(old, new))
    return place


@pytest.fixture
def served(socket_dir: Path, tmp_path: Path) -> Iterator[tuple[Daemon, Target]]:
    directory = socket_dir / tmp_path.name
    directory.mkdir()
    with Daemon(directory) as daemon:
        yield daemon, daemon.standard_target()


def connected(target: Target) -> Nvme:
    nvme = Nvme(target.path, GuestRam(24 << 20), vectors=4)
    nvme.enable()
    return nvme


def loads(nvme: Nvme) -> list[Load]:
    sizes = {NS_512: 512, NS_4K: 4096, NS_FILE: 512}
    queues = [nvme.create_queue_pair(qid, 64) for qid in (1, 2, 3)]
    return [
        Load(nvme, queue, nsid, depth=16, block=size, blocks=1024)
        for queue, (nsid, size) in zip(queues, sizes.items())
    ]


# The layout moves: a field is added in front of the others of a record.
_SQ_WORDS = '"live",\n    "epoch",\n    "entries",\n    "iova",\n    "cqid",'
MOVED = (_SQ_WORDS, '"novelty",\n    ' + _SQ_WORDS)


@pytest.mark.parametrize("layout", [pytest.param("same", marks=pytest.mark.slow), "moved"])
def test_other_code_takes_over_under_io(
    layout: str, served: tuple[Daemon, Target], tmp_path: Path, record_property: Any
) -> None:
    """No error status, right data, counters and configuration go on; asked for twice, there and back."""
    daemon, target = served
    code = other_code(tmp_path / "code", **({"layout": MOVED} if layout == "moved" else {}))
    nvme = connected(target)
    nvme.enable_shadow_doorbells()
    running = loads(nvme)
    for load in running:
        load.run(200)
    before = nvme.get_log(2, 512)
    with Spdk(daemon.rpc_path, timeout_s=300) as card:
        for path in (str(code), str(PACKAGE.parent)):
            worker = daemon.worker_pid()
            card.close()  # a worker's connections end with it
            told = card.dpu_upgrade(path=path)
            for load in running:
                load.run(200)
            card.close()
            while not (stats := card.dpu_get_stats())["pauses"]:  # told a moment after it serves
                pass
            assert stats["pid"] != worker and stats["generation"] > 1
            assert stats["code"] == told["code"]
            maps = Path(f"/proc/{stats['pid']}/environ").read_bytes()
            assert f"PYTHONPATH={path}".encode() in maps
            pause = stats["pauses"][-1]
            assert "change of code" in pause["why"]
            record_property("pause_ms", pause["pause_ms"])
            daemon.kill_worker()  # the next one is of the same code
            for load in running:
                load.run(100)
            assert f"PYTHONPATH={path}".encode() in Path(f"/proc/{daemon.worker_pid()}/environ").read_bytes()
    for load in running:
        load.finish()
    after = nvme.get_log(2, 512)
    assert all(after[at : at + 16][::-1] > before[at : at + 16][::-1] for at in (64, 80)), "SMART counts on"
    nvme.ram.check_canaries()
    nvme.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layout": ("VERSION: Final = ", "VERSION: Final = 1 + ")}, "version"),
        ({"layout": ("SLOTS: Final = 1024", "SLOTS: Final = 512")}, "inflight"),
        ({"target": ("CONFIG_VERSION = 1", "CONFIG_VERSION = 2")}, "configuration"),
        ({"upgrade": ("from dpu import jitcache", "from dpu import nowhere, jitcache")}, "does not run"),
        ({"worker": ("def main() -> None:", "raise SystemExit(3)\n\n\ndef main() -> None:")}, "did not come up"),
    ],
    ids=["version", "smaller", "configuration", "broken", "worker"],
)
def test_code_that_cannot_take_over_is_refused_and_nothing_stops(
    changes: dict[str, tuple[str, str]], text: str, served: tuple[Daemon, Target], tmp_path: Path
) -> None:
    daemon, target = served
    nvme = connected(target)
    load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=16, blocks=1024)
    load.run(100)
    worker = daemon.worker_pid()
    with Spdk(daemon.rpc_path, timeout_s=300) as card:
        with pytest.raises(RpcError, match=text):
            card.dpu_upgrade(path=str(other_code(tmp_path / "code", **changes)))
        with pytest.raises(RpcError, match="no dpu package"):
            card.dpu_upgrade(path=str(tmp_path))
        with pytest.raises(RpcError, match="cannot run"):
            card.dpu_upgrade(python="/nowhere/python")
    load.run(100)
    load.finish()
    assert daemon.worker_pid() == worker
    nvme.close()


def test_code_that_dies_when_it_takes_over_is_taken_back(served: tuple[Daemon, Target], tmp_path: Path) -> None:
    """The clients go on with the code of before."""
    daemon, target = served
    nvme = connected(target)
    load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=16, blocks=1024)
    load.run(100)
    broken = {"worker": ("        self.target.logs.apply()\n", "        os._exit(9)\n")}
    with Spdk(daemon.rpc_path, timeout_s=300) as card:
        card.dpu_upgrade(path=str(other_code(tmp_path / "code", **broken)))
        load.run(200)
        load.finish()
        card.close()
        assert card.dpu_get_stats()["generation"] >= 3
    assert "going back" in daemon.log()
    environment = Path(f"/proc/{daemon.worker_pid()}/environ").read_bytes()
    assert str(tmp_path).encode() not in environment
    nvme.close()
