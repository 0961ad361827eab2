"""A bare daemon configured by SPDK's own command line: from nothing to I/O, saved, restarted, loaded."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, RpcError
from tests.support.scripted_card import NQN, Place


@pytest.fixture
def place() -> Iterator[Place]:
    directory = Path(tempfile.mkdtemp(prefix="dpu-t-"))
    yield Place(directory)
    shutil.rmtree(directory)


def test_from_nothing_to_io_save_restart_load(place: Place) -> None:
    data = random.Random(3).randbytes(65536)
    with Daemon(place.directory) as daemon:
        place.script()
        before = daemon.rpc("nvmf_get_subsystems"), daemon.rpc("bdev_get_bdevs")
        with place.connected() as (nvme, queue):
            identity = nvme.identify(1)
            for nsid, block in ((1, 512), (3, 4096)):
                nvme.write(queue, nsid, 8, data, block=block)
                assert nvme.read(queue, nsid, 8, len(data), block=block) == data
    saved = place.saved.read_text()
    assert not (place.traddr / "cntrl").exists()

    with Daemon(place.directory) as daemon:
        place.rpc("load_config", "-j", str(place.saved))
        check(place, daemon, before, identity, data)
        assert place.rpc("save_config") == saved

    with Daemon(place.directory, args=["-c", str(place.saved)]) as daemon:
        check(place, daemon, before, identity, data)
        assert place.rpc("save_config") == saved
        daemon.kill_worker()
        check(place, daemon, before, identity, data)


def check(place: Place, daemon: Daemon, before: Any, identity: bytes, data: bytes) -> None:
    assert (daemon.rpc("nvmf_get_subsystems"), daemon.rpc("bdev_get_bdevs")) == before
    with place.connected() as (nvme, queue):
        assert nvme.identify(1)[4:72] == identity[4:72]  # SN, MN, FR
        assert nvme.read(queue, 3, 8, len(data), block=4096) == data  # the file's; memory begins anew


def test_save_and_load_of_one_subsystem(place: Place) -> None:
    with Daemon(place.directory) as daemon:
        daemon.add_memory("fast", 1 << 20)
        daemon.rpc("bdev_uring_create", {"name": "disk", "filename": str(place.disk)})
        daemon.create_transport()
        saved = json.loads(place.rpc("save_subsystem_config", "-n", "bdev"))
        assert [call["method"] for call in saved["config"]] == ["bdev_malloc_create", "bdev_uring_create"]
        with pytest.raises(RpcError, match="Subsystem 'zz' not found") as error:
            daemon.rpc("framework_get_config", {"name": "zz"})
        assert error.value.code == -32602
    with Daemon(place.directory) as daemon:
        place.rpc("load_subsystem_config", "-j", json.dumps(saved))
        assert [row["name"] for row in daemon.rpc("bdev_get_bdevs")] == ["fast", "disk"]
        assert daemon.rpc("nvmf_get_transports") == []


def calls(*given: tuple[str, dict[str, Any]], subsystem: str = "bdev") -> str:
    config = [{"method": method, "params": params} for method, params in given]
    return json.dumps({"subsystems": [{"subsystem": subsystem, "config": config}]})


NULL = ("bdev_null_create", {"name": "n", "num_blocks": 8, "block_size": 512})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"cannot read .*/saved.json: No such file"),
        ("{", r"saved.json is not JSON: .*line 1"),
        ("[]", r'saved.json has no array "subsystems"'),
        ('{"subsystems": [{"subsystem": "bdev", "config": {}}]}', r'subsystems\[0\]: "config" is no array'),
        ('{"subsystems": [{"config": []}]}', r"subsystems\[0\] is no object with a string"),
        (
            '{"subsystems": [{"subsystem": "bdev", "config": [{"methods": 1}]}]}',
            r'subsystems\[0\]: {"methods": 1} is no',
        ),
        (calls(("bdev_nul_create", {})), r"cannot be done: bdev_nul_create: Method not found"),
        (calls(NULL, NULL), r"cannot be done: bdev_null_create: File exists"),
    ],
)
def test_a_wrong_file_ends_the_start_with_one_line(place: Place, text: str | None, says: str) -> None:
    if text is not None:
        place.saved.write_text(text)
    command = [str(Path(sys.executable).with_name("dpud")), "-r", str(place.socket), "-c", str(place.saved)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and re.search(says, done.stderr.splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr and not place.socket.exists()


def test_the_order_of_subsystems_in_a_file_does_not_matter(place: Place) -> None:
    place.traddr.mkdir()
    nvmf = json.loads(
        calls(
            ("nvmf_create_transport", {"trtype": "VFIOUSER"}),
            ("nvmf_create_subsystem", {"nqn": NQN}),
            ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "n"}}),
            subsystem="nvmf",
        )
    )["subsystems"]
    bdev = json.loads(calls(NULL))["subsystems"]
    bdev[0]["config"] = [bdev[0]["config"]]  # an array in it is a batch
    others = [{"subsystem": "sock", "config": None}, {"subsystem": "vmd", "config": []}]
    place.saved.write_text(json.dumps({"subsystems": [*others, *nvmf, *bdev]}))
    with Daemon(place.directory, args=["-c", str(place.saved)]) as daemon:
        (_, ours) = daemon.rpc("nvmf_get_subsystems")
        assert [one["bdev_name"] for one in ours["namespaces"]] == ["n"]


@pytest.mark.parametrize(
    ("point", "number"), [("rpc_before_commit", 1), ("rpc_after_commit", 3), ("rpc_before_commit", 6)]
)
def test_a_worker_killed_while_it_loads(place: Place, point: str, number: int) -> None:
    """The next one makes the calls that are left, none twice and none never."""
    place.traddr.mkdir()
    document = calls(
        ("bdev_malloc_create", {"name": "m", "num_blocks": 128, "block_size": 512}),
        ("bdev_aio_create", {"name": "disk", "filename": str(place.disk), "block_size": 4096}),
        ("nvmf_create_transport", {"trtype": "VFIOUSER"}),
        ("nvmf_create_subsystem", {"nqn": NQN, "allow_any_host": True}),
        ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "disk", "nsid": 3}}),
        (
            "nvmf_subsystem_add_listener",
            {"nqn": NQN, "listen_address": {"trtype": "VFIOUSER", "traddr": str(place.traddr)}},
        ),
    )
    place.saved.write_text(document)
    kill = {"DPU_EMU_KILL_AT": f"{point}:{number}"}
    with Daemon(place.directory, args=["-c", str(place.saved)], env=kill) as daemon:
        assert daemon.rpc("dpu_get_stats")["generation"] == 2
        assert [row["name"] for row in daemon.rpc("bdev_get_bdevs")] == ["m", "disk"]
        with place.connected() as (nvme, queue):
            assert nvme.read(queue, 3, 0, 4096, block=4096) == bytes(4096)


def test_wait_for_rpc(place: Place) -> None:
    create = {"name": "n", "num_blocks": 8, "block_size": 512}
    with Daemon(place.directory, args=["--wait-for-rpc"]) as daemon:
        for _ in range(2):
            with pytest.raises(RpcError, match="after framework is initialized") as error:
                daemon.rpc("bdev_null_create", create)
            assert error.value.code == -1
            now = daemon.rpc("rpc_get_methods", {"current": True})
            assert "framework_start_init" in now and "bdev_null_create" not in now
            daemon.kill_worker()  # the next one waits too
        waited: list[Any] = []
        waiter = threading.Thread(target=lambda: waited.append(daemon.rpc("framework_wait_init")))
        waiter.start()
        assert place.rpc("framework_start_init") == ""
        waiter.join(60)
        assert waited == [True]
        daemon.kill_worker()
        assert daemon.rpc("bdev_null_create", create) == "n"
        now = daemon.rpc("rpc_get_methods", {"current": True})
        assert "framework_start_init" not in now and "bdev_null_create" in now
        with pytest.raises(RpcError, match="before framework is initialized") as error:
            daemon.rpc("framework_start_init")
        assert error.value.code == -1


def test_load_config_ends_the_start_up_state(place: Place) -> None:
    """PyPI's client calls framework_start_init by itself when the card waits for it."""
    place.saved.write_text(calls(NULL))
    with Daemon(place.directory, args=["--wait-for-rpc"]) as daemon:
        place.rpc("load_config", "-j", str(place.saved))
        assert [row["name"] for row in daemon.rpc("bdev_get_bdevs")] == ["n"]


def test_log_levels_hold_over_a_kill(place: Place) -> None:
    with Daemon(place.directory) as daemon:
        assert (place.rpc("log_get_level"), place.rpc("log_get_print_level")) == ('"INFO"\n', '"INFO"\n')
        daemon.rpc("bdev_get_bdevs")
        assert "bdev_get_bdevs" not in daemon.log()
        place.rpc("log_set_print_level", "DEBUG")
        place.rpc("log_set_flag", "rpc")
        daemon.kill_worker()
        assert json.loads(place.rpc("log_get_flags")) == {"rpc": True}
        daemon.rpc("bdev_get_bdevs")
        assert re.search(r"DEBUG dpu.rpc.dispatcher: bdev_get_bdevs\(.*\): \[\]", daemon.log())
        place.rpc("log_clear_flag", "all")
        place.rpc("log_set_level", "ERROR")
        lines = len(daemon.log().splitlines())
        with pytest.raises(RpcError, match="Method not found"):
            daemon.rpc("bdev_get_bdev")  # a warning, at other times
        assert len(daemon.log().splitlines()) == lines
        with pytest.raises(RpcError, match="Invalid parameters"):
            daemon.rpc("log_set_level", {"level": "LOUD"})


def test_the_socket_is_the_owners_alone(place: Place) -> None:
    with Daemon(place.directory) as daemon:
        assert place.socket.stat().st_mode & 0o777 == 0o600
        os.kill(daemon.process.pid if daemon.process else 0, signal.SIGTERM)
        assert daemon.process is not None and daemon.process.wait(60) == 0
    assert not place.socket.exists()
