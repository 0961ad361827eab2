"""The target's rules, and that a kill between any two steps leaves the old or the new configuration."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpu import target as target_module
from dpu.backends import FileBackend, MemoryBackend, NullBackend
from dpu.errors import RpcError
from dpu.target import MODEL_DEFAULT, Target, Transport, default_serial, nqn_problem
from tests.support.rpc_host import FakeHost, Kept, Killed

NQN = "nqn.2026-11.x:a"
MIB = 1 << 20
Operation = Callable[[Target], Awaitable[Any]]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "disk.img"
    path.write_bytes(bytes(MIB))
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "vfu"
    path.mkdir()
    return path


def close(target: Target) -> None:
    for backend in target.bdevs.values():
        backend.close()


@pytest.fixture
def target() -> Iterator[Target]:
    host = FakeHost()
    target = Target(host)
    yield target
    close(target)
    host.kept.close()


def host_of(target: Target) -> FakeHost:
    assert isinstance(target.host, FakeHost)
    return target.host


async def setup(target: Target, directory: Path, image: Path) -> None:
    """One of everything: memory as namespace 1, null as 5, a file, a listener, a second subsystem."""
    await target.create_memory(name="m", num_blocks=2048, block_size=512)
    await target.create_memory(num_blocks=256, block_size=4096)
    await target.create_null(name="n", num_blocks=2048, block_size=512)
    await target.create_file(name="f", filename=str(image), block_size=512)
    await target.create_transport("VFIOUSER", Transport(disable_shadow_doorbells=True))
    await target.create_subsystem(nqn=NQN, serial_number="S", model_number="M", max_namespaces=8)
    await target.create_subsystem(nqn=NQN + "2")
    assert await target.add_namespace(nqn=NQN, bdev_name="m") == 1
    assert await target.add_namespace(nqn=NQN, bdev_name="n", nsid=5) == 5
    await target.add_listener(nqn=NQN, trtype="VFIOUSER", traddr=str(directory), trsvcid="0")


def refused(operation: Awaitable[Any]) -> tuple[int, str]:
    async def run() -> None:
        await operation

    with pytest.raises(RpcError) as error:
        asyncio.run(run())
    return error.value.code, error.value.message


# -- kills

OPERATIONS: dict[str, Callable[[Path, Path], Operation]] = {
    "create memory": lambda d, i: lambda t: t.create_memory(num_blocks=8, block_size=512),
    "create null": lambda d, i: lambda t: t.create_null(name="x", num_blocks=8, block_size=512),
    "create file": lambda d, i: lambda t: t.create_file(name="x", filename=str(i.with_name("other.img"))),
    "delete memory in use": lambda d, i: lambda t: t.delete_bdev("m", MemoryBackend),
    "delete memory": lambda d, i: lambda t: t.delete_bdev("Malloc0", MemoryBackend),
    "delete null in use": lambda d, i: lambda t: t.delete_bdev("n", NullBackend),
    "delete file": lambda d, i: lambda t: t.delete_bdev("f", FileBackend),
    "create subsystem": lambda d, i: lambda t: t.create_subsystem(nqn=NQN + "3"),
    "delete subsystem": lambda d, i: lambda t: t.delete_subsystem(NQN),
    "add namespace": lambda d, i: lambda t: t.add_namespace(nqn=NQN, bdev_name="f"),
    "remove namespace": lambda d, i: lambda t: t.remove_namespace(NQN, 1),
    "add listener": lambda d, i: (
        lambda t: t.add_listener(nqn=NQN + "2", trtype="VFIOUSER", traddr=str(d.with_name("second")))
    ),
    "remove listener": lambda d, i: lambda t: t.remove_listener(nqn=NQN, trtype="VFIOUSER", traddr=str(d)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_any_step_the_next_worker_has_the_old_or_the_new(
    name: str, directory: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.with_name("second").mkdir()
    image.with_name("other.img").write_bytes(bytes(MIB))
    operation = OPERATIONS[name](directory, image)
    found: list[str] = []
    kill_at = 0
    while not found or found[-1] != "not killed":
        kept = Kept()
        first = Target(FakeHost(kept))
        asyncio.run(setup(first, directory, image))
        old = kept.config
        close(first)
        before = _open_fds()
        # The worker under test is itself one that took over.
        second, dying = adopt(kept)
        assert second.to_config() == json.loads(old)
        monkeypatch.setattr(target_module, "killpoint", lambda point, host=dying: host.step((point,)))
        dying.steps, dying.kill_at = 0, kill_at
        try:
            asyncio.run(_run(operation, second))
            found.append("not killed")
        except Killed:
            found.append("old" if json.loads(kept.config) == json.loads(old) else "new")
        for fd in _open_fds() - before - kept.fds():  # as the kernel does
            os.close(fd)
        expected = kept.config
        monkeypatch.setattr(target_module, "killpoint", lambda point: None)
        third, _ = adopt(kept)
        assert third.to_config() == json.loads(expected)
        assert set(kept.stash) == {one.stash_key for one in third.bdevs.values()} - {None}
        listeners = {key for one in third.subsystems.values() for key in one.listeners}
        assert set(kept.sockets) == listeners
        if found[-1] == "old":  # and the operation can be had again
            asyncio.run(_run(operation, third))
            third.to_config()
        close(third)
        kept.close()
        kill_at += 1
    assert found[:-1] == sorted(found[:-1], key=["old", "new"].index), found
    assert {"old", "new"} <= set(found), "killed before and after the commit"


async def _run(operation: Operation, target: Target) -> None:
    await operation(target)


def adopt(kept: Kept) -> tuple[Target, FakeHost]:
    """What a new worker does."""
    host = FakeHost(kept)
    target = Target(host)
    fds = {key: os.dup(fd) for key, fd in kept.stash.items()}
    target.from_config(json.loads(kept.config), fds)
    assert not fds
    asyncio.run(target.recover({key: path for key, (path, _) in kept.sockets.items()}))
    return target, host


def test_memory_keeps_its_bytes_from_worker_to_worker(directory: Path, image: Path) -> None:
    kept = Kept()
    first = Target(FakeHost(kept))
    asyncio.run(setup(first, directory, image))
    os.pwrite(first.bdevs["m"].fd, b"kept", 5000)
    close(first)
    second, _ = adopt(kept)
    assert os.pread(second.bdevs["m"].fd, 4, 5000) == b"kept"
    assert second.subsystems[NQN].backend(1) is second.bdevs["m"]
    assert second.transport == Transport(disable_shadow_doorbells=True)
    assert second.subsystem_of(f"{NQN}|{directory}") is second.subsystems[NQN]
    assert second.subsystem_of("other") is None
    close(second)
    kept.close()


def test_other_stashed_descriptors_are_left_alone() -> None:
    host = FakeHost()
    read, write = os.pipe()
    fds = {"state/1": read, "bdev/left over": write}
    Target(host).from_config({}, fds)
    assert fds == {"state/1": read} and host.events == [("unstash", "bdev/left over")]
    os.fstat(read)
    with pytest.raises(OSError):
        os.fstat(write)
    os.close(read)


# -- a commit that fails, a host that refuses


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_change_that_cannot_be_stored_is_not_made(name: str, target: Target, directory: Path, image: Path) -> None:
    directory.with_name("second").mkdir()
    image.with_name("other.img").write_bytes(bytes(MIB))
    asyncio.run(setup(target, directory, image))
    host = host_of(target)
    before = target.to_config(), set(host.kept.stash), set(host.kept.sockets), _open_fds()
    host.commit_error = ValueError("too long")
    with pytest.raises(ValueError):
        asyncio.run(_run(OPERATIONS[name](directory, image), target))
    after = target.to_config(), set(host.kept.stash), set(host.kept.sockets), _open_fds()
    assert before == after


def _open_fds() -> set[int]:
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that the listing itself took
            os.fstat(fd)
            found.add(fd)
    return found


def test_a_namespace_that_cannot_be_served_is_undone(target: Target, directory: Path, image: Path) -> None:
    asyncio.run(setup(target, directory, image))
    host = host_of(target)
    before = host.kept.config
    host.refuse_namespaces = True
    assert refused(target.add_namespace(nqn=NQN, bdev_name="f")) == (-12, "Cannot allocate memory")
    assert host.kept.config == before
    host.refuse_namespaces = False
    assert asyncio.run(target.add_namespace(nqn=NQN, bdev_name="f")) == 2


# -- bdevs


def test_names_and_uuids_are_unique(target: Target, directory: Path, image: Path) -> None:
    asyncio.run(setup(target, directory, image))
    taken = target.bdevs["m"].uuid
    geometry: dict[str, Any] = {"num_blocks": 8, "block_size": 512}
    exists = (-17, "File exists")
    assert refused(target.create_null(name="m", **geometry)) == exists
    assert refused(target.create_null(name="y", uuid=taken, **geometry)) == exists
    assert refused(target.create_null(name=str(taken).upper(), **geometry)) == exists
    assert refused(target.create_file(name="m", filename="/nowhere")) == exists
    assert refused(target.create_null(name="", **geometry))[0] == -22
    assert refused(target.create_null(name="ü" * 128, **geometry))[0] == -22
    assert refused(target.create_file(name="g", filename=str(image)))[0] == -16


def test_automatic_names_are_not_used_again(target: Target) -> None:
    async def scenario() -> list[str]:
        names = [await target.create_memory(num_blocks=8, block_size=512)]
        await target.create_null(name="Malloc1", num_blocks=8, block_size=512)
        names.append(await target.create_memory(num_blocks=8, block_size=512))
        await target.delete_bdev("Malloc2", MemoryBackend)
        names.append(await target.create_memory(num_blocks=8, block_size=512))
        return names

    assert asyncio.run(scenario()) == ["Malloc0", "Malloc2", "Malloc3"]


def test_delete_takes_its_own_kind_only(target: Target, directory: Path, image: Path) -> None:
    asyncio.run(setup(target, directory, image))
    for name, kind in (("m", NullBackend), ("n", FileBackend), ("f", MemoryBackend), ("zz", NullBackend)):
        assert refused(target.delete_bdev(name, kind)) == (-19, "No such device")


def test_deleting_a_bdev_removes_its_namespace_first(target: Target, directory: Path, image: Path) -> None:
    asyncio.run(setup(target, directory, image))
    host, backend = host_of(target), target.bdevs["m"]
    host.events.clear()
    asyncio.run(target.delete_bdev("m", MemoryBackend))
    assert host.events == [("commit",), ("namespace_removed", NQN, 1), ("unstash", "bdev/m")]
    assert backend.fd == -1
    assert [one.nsid for one in target.subsystems[NQN].namespaces()] == [5]


def test_get_bdevs_waits_for_a_bdev(target: Target) -> None:
    async def scenario() -> None:
        waiters = [asyncio.create_task(target.get_bdevs("late", 60_000)) for _ in range(2)]
        await asyncio.sleep(0)
        await target.create_null(name="early", num_blocks=8, block_size=512)
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        await target.create_null(name="late", num_blocks=8, block_size=512)
        for waiter in waiters:
            assert (await waiter)[0]["name"] == "late"

    asyncio.run(scenario())


def test_get_bdevs_that_do_not_come(target: Target) -> None:
    assert refused(target.get_bdevs("never", 1)) == (-110, "Connection timed out")
    assert refused(target.get_bdevs("never")) == (-19, "No such device")


# -- subsystems

NQNS = {
    "nqn.2026-11.x:a": True,
    "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6": True,
    "nqn.2016-06.io.spdk:cnode1": True,
    "nqn.2016-06.io.spdk:" + "a" * 203: True,
    "nqn.2016-06.io.spdk:" + "a" * 204: False,
    "nqn.2016-06.io.spdk:ünïcode": True,
    "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf": False,
    "nqn.2014-08.org.nvmexpress.discovery": False,
    "": False,
    "abc": False,
    "nqn": False,
    "nqn.2026-11.x": False,
    "nqn.2026-11.x:": False,
    "nqn.2026-11:a": False,
    "nqn.26-11.x:a": False,
    "nqn.2026-13.x:a": False,
    "nqn.2026-11.9x:a": False,
    "nqn.2026-11.x-:a": False,
    "nqn.2026-11..x:a": False,
    "nqn.2026-11." + "x" * 64 + ":a": False,
    "NQN.2026-11.x:a": False,
}


@pytest.mark.parametrize("nqn", NQNS)
def test_nqn_form(nqn: str, target: Target) -> None:
    """NVMe Base 2.0, 4.5."""
    assert (nqn_problem(nqn) == "") is NQNS[nqn]
    if not NQNS[nqn]:
        assert refused(target.create_subsystem(nqn=nqn)) == (-32603, f"Unable to create subsystem {nqn}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"serial_number": "s" * 21},
        {"model_number": "m" * 41},
        {"serial_number": "ü"},
        {"model_number": "a\nb"},
        {"max_namespaces": 2**32 - 1},
    ],
)
def test_identity_limits(wrong: dict[str, Any], target: Target) -> None:
    assert refused(target.create_subsystem(nqn=NQN, **wrong))[0] == -32603
    right: dict[str, Any] = {"serial_number": "s" * 20, "model_number": "m" * 40, "max_namespaces": 128}
    assert asyncio.run(target.create_subsystem(nqn=NQN, **right))


def test_defaults(target: Target) -> None:
    asyncio.run(target.create_subsystem(nqn=NQN))
    subsystem = target.subsystems[NQN]
    assert (subsystem.model, subsystem.max_namespaces) == (MODEL_DEFAULT, 32)
    assert subsystem.serial == default_serial(NQN) != default_serial(NQN + "b")
    assert len(subsystem.serial) == 20 and subsystem.serial.isascii()


def test_namespaces_in_order_and_lowest_free_nsid(target: Target) -> None:
    async def scenario() -> list[int]:
        await target.create_subsystem(nqn=NQN, max_namespaces=3)
        for name in "abcd":
            await target.create_null(name=name, num_blocks=8, block_size=512)
        return [
            await target.add_namespace(nqn=NQN, bdev_name="a", nsid=2),
            await target.add_namespace(nqn=NQN, bdev_name="b"),
            await target.add_namespace(nqn=NQN, bdev_name="c"),
        ]

    assert asyncio.run(scenario()) == [2, 1, 3]
    subsystem = target.subsystems[NQN]
    assert [one.nsid for one in subsystem.namespaces()] == [1, 2, 3]
    invalid = (-32602, "Invalid parameters")
    assert refused(target.add_namespace(nqn=NQN, bdev_name="d")) == invalid
    assert refused(target.add_namespace(nqn=NQN, bdev_name="d", nsid=4)) == invalid
    assert refused(target.add_namespace(nqn=NQN, bdev_name="d", nsid=0xFFFFFFFF)) == invalid
    asyncio.run(target.remove_namespace(NQN, 1))
    assert asyncio.run(target.add_namespace(nqn=NQN, bdev_name="d")) == 1


def test_a_bdev_serves_one_namespace(target: Target, directory: Path, image: Path) -> None:
    asyncio.run(setup(target, directory, image))
    for nqn in (NQN, NQN + "2"):
        assert refused(target.add_namespace(nqn=nqn, bdev_name="m")) == (-32602, "Invalid parameters")
    claimed = {row["name"]: row["claimed"] for row in asyncio.run(target.get_bdevs())}
    assert claimed == {"m": True, "Malloc0": False, "n": True, "f": False}


def test_identifiers_of_a_namespace(target: Target, directory: Path, image: Path) -> None:
    asyncio.run(setup(target, directory, image))
    given: dict[str, Any] = {"uuid": uuid.UUID(int=7), "nguid": bytes(range(16)), "eui64": bytes(range(8))}
    asyncio.run(target.add_namespace(nqn=NQN, bdev_name="f", nsid=8, **given))
    plain, _, chosen = target.subsystems[NQN].namespaces()
    bdev = target.bdevs["m"].uuid.bytes
    assert (plain.uuid, plain.nguid, plain.eui64) == (bdev, bdev, bytes(8))
    assert (chosen.uuid, chosen.nguid, chosen.eui64) == (
        uuid.UUID(int=7).bytes,
        bytes(range(16)),
        bytes(range(8)),
    )
    assert "eui64" not in target.get_subsystems(NQN)[0]["namespaces"][0]
    assert target.get_subsystems(NQN)[0]["namespaces"][2]["eui64"] == "0001020304050607"


def test_deleting_a_subsystem_frees_its_bdevs_and_socket(target: Target, directory: Path, image: Path) -> None:
    asyncio.run(setup(target, directory, image))
    host = host_of(target)
    host.events.clear()
    assert (directory / "cntrl").is_socket()
    asyncio.run(target.delete_subsystem(NQN))
    assert host.events == [("commit",), ("unlisten", f"{NQN}|{directory}"), ("subsystem_deleted", NQN)]
    assert not (directory / "cntrl").exists()
    assert asyncio.run(target.add_namespace(nqn=NQN + "2", bdev_name="m")) == 1


# -- listeners


def test_options_of_transport_and_listener_are_saved_and_kept(directory: Path) -> None:
    """For a new worker, and (only where chosen) for save_config."""
    kept = Kept()
    first = Target(FakeHost(kept))
    asyncio.run(first.create_subsystem(nqn=NQN))
    asyncio.run(first.create_transport("VFIOUSER", Transport(force_mappable_bar0=True)))
    asyncio.run(first.add_listener(nqn=NQN, trtype="VFIOUSER", traddr=str(directory), options={"disable_msix": True}))
    (listener,) = adopt(kept)[0].subsystems[NQN].listeners.values()
    assert (listener.disable_msix, listener.allow_unsealed_memory) == (True, False)
    calls = {row["method"]: row["params"] for row in first.saved("nvmf")}
    assert calls["nvmf_create_transport"]["force_mappable_bar0"] is True
    added = calls["nvmf_subsystem_add_listener"]
    assert added["disable_msix"] is True and "allow_unsealed_memory" not in added
    kept.close()


def test_listener_rules(target: Target, directory: Path, tmp_path: Path) -> None:
    def add(traddr: Path | str, nqn: str = NQN, trtype: str = "vfiouser") -> Awaitable[bool]:
        return target.add_listener(nqn=nqn, trtype=trtype, traddr=str(traddr))

    invalid = (-32602, "Invalid parameters")
    asyncio.run(target.create_subsystem(nqn=NQN))
    asyncio.run(target.create_subsystem(nqn=NQN + "2"))
    assert refused(add(directory)) == invalid, "no transport yet"
    asyncio.run(target.create_transport("vfiouser", Transport()))
    assert refused(add(directory, trtype="TCP")) == invalid
    assert refused(add(directory, nqn="nqn.2026-11.x:none")) == invalid
    assert refused(add(tmp_path / "absent")) == invalid
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    assert refused(add(deep)) == invalid
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "cntrl").touch()
    assert refused(add(busy)) == invalid, "the host cannot listen there"
    asyncio.run(_run(lambda t: add(directory), target))
    link = tmp_path / "link"
    link.symlink_to(directory)
    for traddr in (directory, f"{directory}/", link):
        assert refused(add(traddr, NQN + "2")) == invalid
    remove = target.remove_listener
    assert refused(remove(nqn=NQN + "2", trtype="VFIOUSER", traddr=str(directory))) == invalid
    asyncio.run(remove(nqn=NQN, trtype="VFIOUSER", traddr=str(directory)))
    asyncio.run(_run(lambda t: add(directory, NQN + "2"), target))


def test_controllers_of_one_subsystem(target: Target) -> None:
    asyncio.run(target.create_subsystem(nqn=NQN))
    host_of(target).rows = [{"subnqn": NQN, "cntlid": 1}, {"subnqn": NQN + "2", "cntlid": 1}]
    assert target.get_controllers(NQN) == [{"cntlid": 1}]
    with pytest.raises(RpcError):
        target.get_controllers(NQN + "2")


def test_changes_are_serial(target: Target, directory: Path, image: Path) -> None:
    """Each sees what the one before left, also while that one waits for the keeper or the data path."""

    async def at_once(*calls: Awaitable[Any]) -> list[Any]:
        results = await asyncio.gather(*calls, return_exceptions=True)
        return [one.code if isinstance(one, RpcError) else one for one in results]

    async def scenario() -> None:
        await setup(target, directory, image)
        second, third = directory.with_name("second"), NQN + "3"
        second.mkdir()
        # A bdev that is on its way out, and a new one of its name.
        made = target.create_memory(name="m", num_blocks=8, block_size=512)
        assert await at_once(target.delete_bdev("m", MemoryBackend), made) == [True, "m"]
        assert "bdev/m" in host_of(target).kept.stash
        # One directory, two takers.
        listeners = [target.add_listener(nqn=nqn, trtype="VFIOUSER", traddr=str(second)) for nqn in (NQN, NQN + "2")]
        assert await at_once(*listeners) == [True, -32602]
        # A subsystem that goes, and one that takes over its directory.
        await target.create_subsystem(nqn=third)
        moved = target.add_listener(nqn=third, trtype="VFIOUSER", traddr=str(directory))
        assert await at_once(target.delete_subsystem(NQN), moved) == [True, True]

    asyncio.run(scenario())


def test_a_disk_that_does_not_answer_delays_its_own_call_only(
    target: Target, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    create = FileBackend.create

    def slow(*arguments: Any, **options: Any) -> FileBackend:
        assert answers.wait(30)
        return create(*arguments, **options)

    async def run() -> None:
        monkeypatch.setattr(FileBackend, "create", slow)
        late = asyncio.create_task(target.create_file(name="f", filename=str(image), block_size=512))
        await asyncio.sleep(0)
        await target.create_null(name="n", num_blocks=8, block_size=512)
        await target.create_subsystem(nqn=NQN)
        assert await target.add_namespace(nqn=NQN, bdev_name="n") == 1
        assert [row["name"] for row in await target.get_bdevs()] == ["n"]
        with pytest.raises(RpcError, match="File exists"):  # its name is taken already
            await target.create_null(name="f", num_blocks=8, block_size=512)
        assert not late.done()
        answers.set()
        assert await late == "f"
        assert [row["name"] for row in await target.get_bdevs()] == ["n", "f"]

    asyncio.run(run())


def test_counters_without_room_in_the_store_end_nothing(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    host_of(target).commit_error = ValueError("document of 2000000 bytes exceeds 1048568")
    target.commit_counts()
    assert "I/O statistics are not stored: document of 2000000 bytes" in caplog.text
