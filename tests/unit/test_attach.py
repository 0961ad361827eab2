"""What a person does with a VM, against a supervisor that is not there: console, JSON of output, the scripts of cp.

Independent sources: the host's own sh, tar and base64.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from emu import attach
from emu.ledger import Book

BOOK = cast(Book, None)


class Supervisor:
    """A VM web of this process's pid; keys go into its console's log, in capitals. ``output``: of any program."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.typed = b""
        self.restored = False
        self.output = b""

    def status(self) -> dict[str, Any]:
        return {"vms": {"web": {"pid": os.getpid(), "console": str(self.log), "restored": self.restored}}}

    def type(self, vm: str, keys: bytes) -> None:
        self.typed += keys
        with self.log.open("ab") as log:
            log.write(keys.upper())

    def exec(
        self,
        vm: str,
        argv: Sequence[str],
        stdin: int | None,
        write: Callable[[int, bytes], object],
        sent: Callable[[int], object] = bytes,
    ) -> int:
        write(1, self.output)
        return 0


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    supervisor = Supervisor(tmp_path / "console.log")
    supervisor.log.touch()

    @contextlib.contextmanager
    def connect(book: Book) -> Iterator[Supervisor]:
        yield supervisor

    monkeypatch.setattr(attach, "connect", connect)
    return supervisor


def test_a_console_ends_with_its_input(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor.log.write_text("before\n")
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        attach.console(BOOK, "web")
    assert (capfd.readouterr().out, supervisor.typed) == ("before\n", b"")
    (tmp_path / "keys").write_text("ls\n")
    monkeypatch.setattr(attach, "_QUIET_S", 0.05)
    with (tmp_path / "keys").open() as keys:
        monkeypatch.setattr("sys.stdin", keys)
        attach.console(BOOK, "web")
    assert (capfd.readouterr().out, supervisor.typed) == ("before\nLS\n", b"ls\n")


def test_a_guest_has_its_time_for_an_answer() -> None:
    assert not attach._answered(ended_s=10, shown_s=5, now_s=10.9) and attach._answered(10, 5, 11.1)
    assert not attach._answered(ended_s=10, shown_s=15, now_s=15.9) and attach._answered(10, 15, 16.1)
    assert attach._answered(ended_s=10, shown_s=20, now_s=20.1)  # it is never quiet


def test_an_empty_console_says_why(supervisor: Supervisor, capfd: pytest.CaptureFixture[str]) -> None:
    attach.console(BOOK, "web", once=True)
    assert "has shown nothing yet: `emu exec web -- dmesg`" in capfd.readouterr().err
    supervisor.restored = True
    attach.console(BOOK, "web", once=True)
    assert "snapshot" in capfd.readouterr().err
    supervisor.log.write_text("hello\n")
    attach.console(BOOK, "web", once=True)
    assert capfd.readouterr() == ("hello\n", "")


def test_json_loses_no_byte(supervisor: Supervisor) -> None:
    supervisor.output = "Grüße\n".encode()
    assert attach.capture(BOOK, "web", ["x"], False) == {"code": 0, "stdout": "Grüße\n", "stderr": ""}
    supervisor.output = bytes(range(256))
    done = attach.capture(BOOK, "web", ["x"], False)
    assert done["stdout"] is None and base64.b64decode(done["stdout_base64"]) == supervisor.output


def unpack(target: Path, name: str, data: bytes) -> int:
    argv = ["sh", "-c", attach._UNPACK, "emu-cp", str(target), "0", name, ".emu-cp-x"]
    return subprocess.run(argv, input=data, stderr=subprocess.DEVNULL, timeout=60).returncode


def test_what_does_not_come_whole_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "tree" / "below").mkdir(parents=True)
    (tmp_path / "tree" / "below" / "data").write_bytes(os.urandom(1 << 20))
    pack = ["tar", "-cf", "-", "-C", str(tmp_path), "tree"]
    tree = subprocess.run(pack, stdout=subprocess.PIPE, check=True).stdout
    guest = tmp_path / "guest"
    guest.mkdir()
    for target in (guest, guest / "renamed"):
        assert unpack(target, "tree", tree[: len(tree) // 2]) != 0
        assert not list(guest.iterdir())
    for target, final in ((guest, guest / "tree"), (guest / "renamed", guest / "renamed"), (guest, guest / "tree")):
        assert unpack(target, "tree", tree) == 0
        assert (final / "below" / "data").read_bytes() == (tmp_path / "tree" / "below" / "data").read_bytes()
    assert {one.name for one in guest.iterdir()} == {"tree", "renamed"}
    for target in (guest, guest / "new"):
        (guest / ".emu-cp-x").mkdir()
        subprocess.run(["sh", "-c", attach._FORGET, "emu-cp", str(target), ".emu-cp-x"], check=True, timeout=60)
        assert {one.name for one in guest.iterdir()} == {"tree", "renamed"}
