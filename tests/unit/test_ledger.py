"""emu.ledger and emu.process: what a crash leaves is found and removed, and nothing else is.

The crash is a real one: another Python makes a lab and is killed with SIGKILL.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dpu.errors import EmuError, UsageError
from emu.ledger import Ledger, Leftover, claimed, clean, find, kept
from emu.process import Identity, Process, tail

OWNER = """
import asyncio, sys, os, subprocess
from pathlib import Path
from emu.ledger import Ledger
from emu.process import Identity, Process

async def main():
    root = Path(sys.argv[1])
    ledger = Ledger.create("crash", root)
    (ledger.directory / "socket").touch()
    extra = root.parent / "backing"
    ledger.path(extra)
    extra.mkdir()
    (extra / "file").touch()
    child = Process.spawn(["sleep", "1000"], log=root.parent / "log", what="child", ledger=ledger)
    # a child that the kernel does not kill with us, as one that was started by somebody else's code
    stray = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
    ledger.process(Identity.of(stray.pid), "stray")
    print(ledger.book, child.pid, stray.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "labs"
    path.mkdir()
    return path


def start_owner(root: Path) -> tuple[subprocess.Popen[str], Path, int, int]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(root)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    book, child, stray = owner.stdout.readline().split()
    return owner, Path(book), int(child), int(stray)


def await_end(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], 30)[0], f"{pid} still runs"
    os.close(fd)


def test_clean_leaves_a_living_lab_alone(root: Path) -> None:
    owner, book, child, stray = start_owner(root)
    try:
        assert clean(root) == []
        assert book.exists() and book.with_suffix("").exists()
        assert Identity.of(child) is not None
    finally:
        owner.kill()
        owner.wait()
        os.kill(stray, signal.SIGKILL)


def test_clean_removes_exactly_what_a_crash_left(root: Path) -> None:
    mine = Ledger.create("mine", root)
    bystander = root.parent / "bystander"
    bystander.touch()
    owner, book, child, stray = start_owner(root)
    owner.kill()
    owner.wait()
    await_end(child)  # by the kernel, without our help: PR_SET_PDEATHSIG
    assert Identity.of(stray) is not None

    expected = [("process", f"stray, pid {stray}"), ("path", str(root.parent / "backing"))]
    expected.append(("path", str(book.with_suffix(""))))
    assert [(one.kind, one.what) for one in clean(root, dry_run=True)] == expected
    assert book.exists()
    assert [(one.kind, one.what) for one in clean(root)] == expected

    await_end(stray)
    assert sorted(p.name for p in root.iterdir()) == sorted([mine.book.name, mine.directory.name])
    assert not (root.parent / "backing").exists() and bystander.exists()
    assert clean(root) == []
    mine.close()
    assert list(root.iterdir()) == []


def test_a_reused_pid_is_not_killed(root: Path) -> None:
    """The pid of a dead child now belongs to another process: same pid, later start."""
    victim = subprocess.Popen(["sleep", "1000"])
    try:
        identity = Identity.of(victim.pid)
        me = Identity.of(os.getpid())
        assert identity is not None and me is not None
        book = root / "old-1-0.jsonl"
        lines = [
            {"owner": asdict(replace(me, start=me.start - 1))},
            {
                "add": "process",
                "identity": asdict(replace(identity, start=identity.start - 1)),
                "what": "old",
            },
            {"add": "process", "identity": asdict(replace(identity, boot="an earlier one")), "what": "old"},
        ]
        book.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"add": "pa')
        assert clean(root) == []
        assert not book.exists()
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_a_process_is_written_down_and_a_forgotten_path_stays(root: Path, tmp_path: Path) -> None:
    async def main() -> Ledger:
        ledger = Ledger.create("x", root)
        child = Process.spawn(["true"], log=tmp_path / "log", what="true", ledger=ledger)
        assert await child.wait() == 0
        assert child.returncode == 0
        return ledger

    ledger = asyncio.run(main())
    kept = tmp_path / "kept"
    ledger.path(kept)
    kept.touch()
    ledger.forget(kept)
    entries = [json.loads(line) for line in ledger.book.read_text().splitlines()]
    assert [next(iter(entry)) for entry in entries] == ["owner", "add", "add", "drop"]
    ledger.close()
    assert kept.exists() and not ledger.directory.exists()


def test_keep_leaves_the_files(root: Path) -> None:
    ledger = Ledger.create("x", root)
    (ledger.directory / "file").touch()
    ledger.close(keep=True)
    assert (ledger.directory / "file").exists()
    left = [Leftover("x-" + ledger.book.stem[2:], "path", str(ledger.directory))]
    assert clean(root) == [] and kept(root) == left
    assert (ledger.directory / "file").exists()
    assert clean(root, kept=True, dry_run=True) == clean(root, kept=True) == left
    assert list(root.iterdir()) == [] and kept(root) == []


def test_the_book_of_a_kept_lab_goes_when_its_files_are_gone(root: Path) -> None:
    ledger = Ledger.create("x", root)
    ledger.close(keep=True)
    ledger.directory.rmdir()
    assert clean(root) == [] and list(root.iterdir()) == []


def test_a_name_has_one_living_lab_and_a_dead_one_makes_room(root: Path) -> None:
    first = Ledger.create("x", root)
    first.claim("my")
    assert (book := find("my", root)) is not None and (book.file, book.living) == (first.book, True)
    with pytest.raises(UsageError, match='lab "my" is up already'):
        Ledger.create("y", root).claim("my")
    owner, dead_book, _, stray = start_owner(root)
    (root / "dead.up").symlink_to(dead_book.stem)
    owner.kill()
    owner.wait()
    assert {name: book.living for name, book in claimed(root).items()} == {"dead": False, "my": True}
    second = Ledger.create("z", root)
    second.claim("dead")
    await_end(stray)
    assert not dead_book.exists() and claimed(root)["dead"].file == second.book
    (root / "gone.up").symlink_to("no-such-lab")
    second.claim("gone")
    second.close()
    assert sorted(claimed(root)) == ["my"]
    first.close()
    assert not list(root.glob("*.up"))


def test_clean_leaves_a_name_that_another_lab_has_taken(root: Path) -> None:
    owner, dead_book, _, stray = start_owner(root)
    owner.kill()
    owner.wait()
    living = Ledger.create("new", root)
    living.claim("net", "fabric")
    with dead_book.open("a") as book:
        book.write(json.dumps({"add": "path", "path": str(root / "net.fabric")}) + "\n")
    assert str(root / "net.fabric") not in [one.what for one in clean(root)]
    await_end(stray)
    assert not dead_book.exists() and claimed(root, "fabric")["net"].file == living.book
    assert claimed(root) == {}
    living.release("net", "fabric")
    assert claimed(root, "fabric") == {}
    living.close()


def test_two_labs_of_one_owner_do_not_meet(root: Path) -> None:
    first, second = Ledger.create("same", root), Ledger.create("same", root)
    assert first.directory != second.directory
    first.close()
    assert second.directory.exists() and second.book.exists()


def test_terminate_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    async def main() -> int:
        log = tmp_path / "log"
        child = Process.spawn(
            [
                sys.executable,
                "-c",
                "import signal, time; signal.signal(15, 1); print('up'); time.sleep(1000)",
            ],
            log=log,
            what="deaf",
            env={"PYTHONUNBUFFERED": "1"},
        )
        while tail(log) != ["up"]:
            await asyncio.sleep(0.01)
        return await child.terminate(grace_s=0.1)

    assert asyncio.run(main()) == -signal.SIGKILL


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        Process.spawn(["/no/such/program"], log=tmp_path / "log", what="qemu vm0")

    with pytest.raises(EmuError, match="cannot start qemu vm0: /no/such/program"):
        asyncio.run(main())
