"""Groups and volumes of a target: what survives a kill at any step, what damage costs, and who is told to wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpu.errors import RpcError
from dpu.target import Target
from dpu.volumes.area import Area
from dpu.volumes.data import Label
from tests.support.rpc_host import FakeHost, Kept, Killed

MIB = 1 << 20
NQN = "nqn.2026-11.x:a"
Operation = Callable[[Target], Awaitable[Any]]


def let_go(target: Target) -> None:
    """As the end of a process does."""
    for group in target.lvols.groups.values():
        group.release()
    for backend in target.bdevs.values():
        backend.close()


async def ended(target: Target) -> None:
    """Wait for what goes on beside."""
    for group in target.lvols.groups.values():
        group._closing.set()
        await asyncio.gather(*group._tasks, *group._releases, return_exceptions=True)


def run(target: Target, *operations: Operation) -> list[Any]:
    async def whole() -> list[Any]:
        try:
            return [await operation(target) for operation in operations]
        finally:
            await ended(target)

    return asyncio.run(whole())


def image(path: Path, mib: int = 16) -> str:
    path.touch()
    os.truncate(path, mib * MIB)
    return str(path)


async def make(target: Target, folder: Path) -> None:
    """A file with a group of a thin volume, its snapshot, and a thick one that is a namespace; memory beside."""
    await target.create_memory(name="m", num_blocks=16 * MIB // 512, block_size=512)
    await target.create_file(name="f", filename=image(folder / "f.img"), block_size=512, fallocate=True)
    await target.create_file(name="g", filename=image(folder / "g.img"), block_size=512)
    await target.lvols.create_store(bdev_name="f", lvs_name="lvs", cluster_sz=MIB)
    await target.lvols.create(lvs_name="lvs", lvol_name="a", size_in_mib=4, thin_provision=True)
    await target.lvols.snapshot(lvol_name="lvs/a", snapshot_name="s")
    await target.lvols.create(lvs_name="lvs", lvol_name="b", size_in_mib=2)
    await target.create_subsystem(nqn=NQN)
    await target.add_namespace(nqn=NQN, bdev_name="lvs/b")


def making(folder: Path) -> Operation:
    return lambda target: make(target, folder)


def opening(name: str, path: Path) -> Operation:
    return lambda target: target.create_file(name=name, filename=str(path), block_size=512)


def deleting(name: str) -> Operation:
    return lambda target: target.delete_bdev(name, type(target.bdevs[name]))


def adopt(kept: Kept) -> tuple[Target, FakeHost]:
    host = FakeHost(kept)
    target = Target(host)
    target.from_config(json.loads(kept.config), {key: os.dup(fd) for key, fd in kept.stash.items()})

    async def recover() -> None:
        await target.recover({})

    asyncio.run(recover())
    return target, host


def state(target: Target) -> dict[str, Any]:
    return {
        "groups": sorted(group.name for group in target.lvols.groups.values()),
        "bdevs": sorted(getattr(one, "alias", name) for name, one in target.bdevs.items()),
        "namespaces": sorted(
            getattr(one.backend, "alias", "") for s in target.subsystems.values() for one in s.by_nsid.values()
        ),
    }


OPERATIONS: dict[str, Operation] = {
    "group on a file": lambda t: t.lvols.create_store(bdev_name="g", lvs_name="two"),
    "group in memory": lambda t: t.lvols.create_store(bdev_name="m", lvs_name="two"),
    "delete a group": lambda t: t.lvols.delete_store(lvs_name="lvs"),
    "volume": lambda t: t.lvols.create(lvs_name="lvs", lvol_name="c", size_in_mib=3),
    "snapshot": lambda t: t.lvols.snapshot(lvol_name="lvs/b", snapshot_name="c"),
    "clone": lambda t: t.lvols.clone(snapshot_name="lvs/s", clone_name="c"),
    "rename": lambda t: t.lvols.rename(old_name="lvs/b", new_name="c"),
    "delete": lambda t: t.lvols.delete(name="lvs/a"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_any_step_a_call_is_done_or_not(name: str, tmp_path: Path) -> None:
    found: list[str] = []
    while not found or found[-1] != "not killed":
        folder = tmp_path / str(len(found))
        folder.mkdir()
        kept = Kept()
        first = Target(FakeHost(kept))
        run(first, making(folder))
        old = state(first)
        let_go(first)
        second, dying = adopt(kept)
        run(second)
        dying.steps, dying.kill_at = 0, len(found)
        try:
            run(second, OPERATIONS[name])
            found.append("not killed")
            new = state(second)
        except Killed:
            found.append("killed")
        let_go(second)
        third, _ = adopt(kept)
        run(third)
        seen = state(third)
        if found[-1] == "not killed":
            assert seen == new != old
        else:
            found[-1] += f" {seen}" if seen != old else ""
        let_go(third)
        kept.close()
        again = Target(FakeHost())  # a daemon started anew on what is on the disk
        run(again, opening("f", folder / "f.img"))
        assert ("lvs/b" in state(again)["bdevs"]) == ("lvs/b" in seen["bdevs"])
        let_go(again)
    partly = {text for text in found if text.startswith("killed {")}
    # Its namespace goes first; what a group is made of is there before it has a label.
    assert all(text == f"killed {new}" for text in partly), partly


@pytest.fixture
def target() -> Iterator[Target]:
    host = FakeHost()
    target = Target(host)
    yield target
    let_go(target)
    host.kept.close()


def refused(target: Target, operation: Operation) -> tuple[int, str]:
    with pytest.raises(RpcError) as error:
        run(target, operation)
    return error.value.code, error.value.message


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda path: path.write_bytes(b"\0" * 8192),
            "disk image is malformed|not a database|damaged|another format",
        ),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: change(path, "UPDATE leaf SET epoch = epoch + 1"), "contradicts itself"),
        (lambda path: change(path, "UPDATE volume SET parent = 77"), "has lost its parent"),
        (lambda path: change(path, "UPDATE volume SET parent = number"), "parents go round"),
        (lambda path: change(path, "UPDATE root SET leaves = x'0000000000000000000000000000ff7f'"), "out of range"),
        (lambda path: change(path, "UPDATE leaf SET entries = zeroblob(17)"), "not of 4096 bytes"),
        (lambda path: change(path, "DELETE FROM leaf"), "is not there"),
        (lambda path: change(path, "UPDATE facts SET value = 2 WHERE name = 'format'"), "another format"),
    ],
)
def test_a_damaged_group_is_told_and_nothing_else_is_hurt(
    damage: Callable[[Path], Any], said: str, tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    run(target, making(tmp_path), lambda t: t.lvols.create_store(bdev_name="g", lvs_name="other"))
    run(target, deleting("f"), deleting("g"))
    damage(tmp_path / "f.img.lvs")
    run(target, opening("f", tmp_path / "f.img"), opening("g", tmp_path / "g.img"))
    assert [group.name for group in target.lvols.groups.values()] == ["other"]
    assert {"f", "g"} <= target.bdevs.keys()
    assert re.search(said, caplog.text), caplog.text
    code, message = refused(target, lambda t: t.lvols.create_store(bdev_name="f", lvs_name="new"))
    assert code == -17 and "belongs to group" in message


def change(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        assert database.execute(statement).rowcount > 0


def test_a_new_file_with_an_old_database_beside_it_is_empty(tmp_path: Path, target: Target) -> None:
    run(target, making(tmp_path), deleting("f"))
    (tmp_path / "f.img").unlink()
    image(tmp_path / "f.img")
    run(
        target,
        opening("f", tmp_path / "f.img"),
        lambda t: t.lvols.create_store(bdev_name="f", lvs_name="lvs"),
    )
    (group,) = target.lvols.groups.values()
    assert not group.volumes


def test_a_group_of_several_back_ends_waits_for_all_of_them(tmp_path: Path, target: Target) -> None:
    files = [image(tmp_path / f"{n}.img", 3) for n in range(3)]

    def add(number: int) -> Operation:
        return lambda t: t.create_file(name=f"f{number}", filename=files[number], block_size=512)

    run(
        target,
        *(add(number) for number in range(3)),
        lambda t: t.lvols.create_store(bdev_name="f0", lvs_name="lvs", base_bdevs=["f1", "f2"]),
        lambda t: t.lvols.create(lvs_name="lvs", lvol_name="a", size_in_mib=6),
    )
    assert refused(target, lambda t: t.lvols.create(lvs_name="lvs", lvol_name="b", size_in_mib=1))[0] == -32602
    run(target, deleting("f1"))
    assert not target.lvols.groups and set(target.bdevs) == {"f0", "f2"}
    for name in ("f0", "f2"):
        run(target, deleting(name))
    run(target, add(2), add(0))
    assert not target.lvols.groups
    run(target, add(1))
    (group,) = target.lvols.groups.values()
    assert [base.name for base in group.bases] == ["f0", "f1", "f2"] and group.find("a") is not None


def test_the_second_call_on_an_object_is_told_what_is_under_way(tmp_path: Path, target: Target) -> None:
    run(target, making(tmp_path))
    (group,) = target.lvols.groups.values()
    begun, go_on = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def slow(area: Area) -> AsyncIterator[None]:
        begun.set()
        await go_on.wait()
        yield

    async def both(target: Target) -> None:
        group.host.quiet = slow  # type: ignore[method-assign]
        first = asyncio.create_task(target.lvols.snapshot(lvol_name="lvs/a", snapshot_name="t"))
        await begun.wait()
        for second in (
            target.lvols.delete(name="lvs/a"),
            target.lvols.resize(name="lvs/a", size_in_mib=8),
            target.lvols.snapshot(lvol_name="lvs/a", snapshot_name="u"),
        ):
            with pytest.raises(RpcError) as error:
                await second
            assert error.value.code == -16 and "lvs/a: a snapshot is under way" in error.value.message
        with pytest.raises(RpcError, match="lvs: a call is under way"):
            await target.lvols.delete_store(lvs_name="lvs")
        with pytest.raises(RpcError, match="File exists"):
            await target.lvols.create(lvs_name="lvs", lvol_name="t", size_in_mib=1)
        go_on.set()
        await first

    run(target, both)


def test_a_label_says_whose_a_back_end_is(tmp_path: Path, target: Target) -> None:
    run(target, making(tmp_path))
    (group,) = target.lvols.groups.values()
    assert Label.read(group.files, group.bases[0].fd) == Label(group.uuid, 0, 1, "")
    assert group.path == str(tmp_path / "f.img.lvs")
    run(target, lambda t: t.lvols.delete_store(lvs_name="lvs"))
    assert (tmp_path / "f.img").read_bytes() == bytes(16 * MIB) and not (tmp_path / "f.img.lvs").exists()
    assert not any(hasattr(one, "alias") for one in target.bdevs.values()) and not target.subsystems[NQN].by_nsid
