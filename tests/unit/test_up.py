"""Labs that stay up, without one: names, progress through the pipe, what is said when something is not there."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from dpu.errors import EmuError, UsageError
from emu import cli, control
from emu.control import RemoteError, decode_error, encode_error
from emu.guest import GuestError
from emu.ledger import Book
from emu.process import Identity
from emu.progress import Silent
from emu.up import lab_name, start, status_text
from emu.vm import VmError


class Told(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def step(self, text: str, total: int | None = None) -> None:
        self.said.append((text, total))

    def advance(self, count: int) -> None:
        self.said.append(count)


def supervisor(body: str) -> list[str]:
    """A program in the place of a supervisor: ``relay`` is what it tells, ``error`` an EmuError to tell."""
    text = (
        "import sys, types\nfrom pathlib import Path\nfrom emu.up import Relay\nfrom dpu.errors import EmuError\n"
        "relay = Relay(int(sys.argv[-1]))\n" + body
    )
    return [sys.executable, "-c", text]


def test_progress_comes_through_and_the_log_is_the_lab_s(tmp_path: Path) -> None:
    progress = Told()
    body = (
        "relay.step('boot', 3); relay.advance(2); relay.note('taking tcg')\n"
        f"relay.ready(types.SimpleNamespace(out=Path({str(tmp_path)!r})))\n"
        "print('after', flush=True)\nrelay.note('nobody listens')\n"
    )
    start(supervisor(body), progress)
    assert (progress.said, progress.notes) == ([("boot", 3), 2], ["taking tcg"])
    while "after" not in (tmp_path / "supervisor.log").read_text():
        time.sleep(0.01)


def test_what_keeps_a_lab_from_coming_up_is_raised_here() -> None:
    with pytest.raises(EmuError, match="no QEMU") as caught:
        start(supervisor("relay.failed(EmuError('no QEMU', 'get one'))"), Silent())
    assert caught.value.hint == "get one"
    with pytest.raises(EmuError, match=r"supervisor has ended with 1\n(.*\n)*ZeroDivisionError"):
        start(supervisor("1 / 0"), Silent())


@pytest.mark.parametrize(
    ("wish", "scenario", "name"),
    [
        (None, "my", "my"),
        (None, "a b/c", "a-b-c"),
        (None, "..", "lab"),
        ("x.1", "my", "x.1"),
        (None, "l" * 99, "l" * 32),
    ],
)
def test_names(wish: str | None, scenario: str, name: str) -> None:
    assert lab_name(wish, scenario) == name


@pytest.mark.parametrize("wish", ["", "a/b", "..", "x" * 33, "a b"])
def test_what_is_no_name_is_refused(wish: str) -> None:
    with pytest.raises(UsageError, match="no name of a lab"):
        lab_name(wish, "my")


def test_errors_pass_to_another_process_whole() -> None:
    vm = VmError("web: it panicked", "see why", ["line"], ["qemu said"])
    passed = decode_error(json.loads(json.dumps(encode_error(vm))))
    assert str(passed) == str(vm) and isinstance(passed, RemoteError)
    assert isinstance(decode_error(encode_error(UsageError("no such VM", "x"))), UsageError)
    code = decode_error(encode_error(GuestError("cannot run", code=127)))
    assert isinstance(code, RemoteError) and code.code == 127


@pytest.fixture
def _no_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "labs", dict)


@pytest.mark.usefixtures("_no_lab")
def test_without_a_lab(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert capsys.readouterr().out == "no lab is up; `emu up SCENARIO` starts one\n"
    for arguments in (["down"], ["cp", "a", "web:b"], ["console", "web"], ["status", "my"], ["down", "my"]):
        assert cli.main(arguments) == 2, arguments
        assert "  fix: " in capsys.readouterr().err
    assert cli.main(["down", "nosuch"]) == 2
    assert "  fix: no lab is up" in capsys.readouterr().err
    assert cli.main(["down", "--all"]) == 0
    assert cli.main(["exec", "web", "--", "ls"]) == 125  # 2 might be the program's
    assert "no lab is up" in capsys.readouterr().err


class _Owner:
    def alive(self) -> bool:
        return True


@pytest.fixture
def two_labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Book]:
    """Labs "one" and "two"; both have a VM web, the second a VM guest."""
    books = {name: Book(tmp_path / f"{name}.jsonl", cast(Identity, _Owner()), {}, []) for name in ("one", "two")}
    monkeypatch.setattr(control, "labs", lambda: books)
    monkeypatch.setattr(control, "_vms", lambda book: ["web", "guest"] if book.lab == "two" else ["web"])
    return books


@pytest.mark.parametrize("command", ["down", "top", "status"])
@pytest.mark.parametrize("words", [["two"], ["--lab", "two"], ["--lab=two"]])
def test_a_lab_is_named_in_either_form(command: str, words: list[str]) -> None:
    assert cli._parser().parse_args([command, *words]).lab == "two"
    assert cli._parser().parse_args([command]).lab is None
    with pytest.raises(UsageError):
        cli._parser().parse_args([command, "one", *words])


def test_of_two_labs_one_is_named_or_has_the_vm(
    two_labs: dict[str, Book], capsys: pytest.CaptureFixture[str]
) -> None:
    assert control.find("one") is two_labs["one"]
    assert control.find(None, "guest") is two_labs["two"]
    for arguments, said in (
        (["down"], "2 labs are up: one, two\n  fix: name one: --lab NAME"),
        (["console", "web"], "2 labs are up: one, two\n  fix: name one: --lab NAME"),
        (["console", "no"], "no lab has a VM no\n  fix: up are: one, two"),
        (["down", "--lab", "tow"], "there is no lab tow\n  fix: up are: one, two"),
        (["cp", "web:/a", "."], "2 labs are up"),
    ):
        assert cli.main(arguments) == 2
        assert said in capsys.readouterr().err, arguments


@pytest.mark.usefixtures("_no_lab")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["exec", "web"], "there is no program"),
        (["exec", "web", "--"], "there is no program"),
        (["exec", "web", "-n", "ls"], "-n stands after the VM"),
    ],
)
def test_exec_says_where_words_go(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 125
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lab", "no"], "there is no lab no\n  fix: up are: one, two"),
        (["--lab", "one", "--cold"], "--cold does not go with --lab"),
        (["--lab", "one", "--accel", "tcg"], "--accel does not go with --lab"),
        (["--lab", "one", "--dry-run"], "--dry-run does not go with --lab"),
        (["x.toml", "--lab", "one", "--workload", "verify"], "--workload does not go with a scenario"),
    ],
)
def test_run_in_a_lab_takes_it_as_it_is(
    two_labs: dict[str, Book], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_status_of_labs_that_do_not_answer() -> None:
    labs = {"a": {"state": "starting", "pid": 1}, "b": {"state": "crashed", "pid": 2}}
    assert status_text(labs).splitlines() == [
        "a: starting, supervisor 1",
        "b: crashed, supervisor 2; `emu clean` removes what it has left",
    ]
