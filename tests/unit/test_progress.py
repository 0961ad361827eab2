"""What is said, where, and what is kept for the report."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console

from emu import progress


def _work(shown: progress.Progress) -> None:
    shown.step("Fetching [3] packages", total=100)
    shown.advance(60)
    shown.advance(40)
    shown.note("took [tcg]")
    shown.step("Unpacking")
    shown.close()


def test_lines_say_each_step_and_how_far_a_long_one_is() -> None:
    out = io.StringIO()
    shown = progress.Lines(out, interval_s=0.0)
    _work(shown)
    assert out.getvalue().splitlines() == [
        "Fetching [3] packages",
        "Fetching [3] packages: 60%",
        "Fetching [3] packages: 100%",
        "took [tcg]",
        "Unpacking",
    ]
    assert shown.notes == ["took [tcg]"]


def test_a_bar_leaves_every_step_and_note_on_the_terminal() -> None:
    out = io.StringIO()
    shown = progress.Bar(Console(file=out, force_terminal=True, width=100, color_system=None))
    _work(shown)
    assert all(text in out.getvalue() for text in ("Fetching [3] packages", "took [tcg]", "Unpacking", "100%"))
    assert shown.notes == ["took [tcg]"]


def test_silent_is_silent_and_keeps_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.Silent()
    _work(shown)
    assert capsys.readouterr() == ("", "")
    assert shown.notes == ["took [tcg]"]


def test_standard_output_is_left_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    _work(progress.make())
    said = capsys.readouterr()
    assert said.out == ""
    assert "Unpacking" in said.err


def test_what_is_told_to_another_process_is_shown_there() -> None:
    there = progress.Lines(io.StringIO(), interval_s=0.0)
    lines: list[str] = []
    here = progress.Told(lambda told: lines.append(json.dumps(told)))
    _work(here)
    for line in lines:
        progress.retell(json.loads(line), there)
    direct = progress.Lines(io.StringIO(), interval_s=0.0)
    _work(direct)
    assert there._stream.getvalue() == direct._stream.getvalue() != ""  # type: ignore[attr-defined]
    assert here.notes == there.notes == ["took [tcg]"]


def test_quick_work_is_not_worth_a_word() -> None:
    stream = io.StringIO()
    quick = progress.Late(lambda: progress.Lines(stream, 0.0), delay_s=3600)
    quick.step("Copying", total=4)
    quick.advance(4)
    quick.close()
    assert stream.getvalue() == ""
    slow = progress.Late(lambda: progress.Lines(stream, 0.0), delay_s=0)
    slow.step("Copying", total=4)
    slow.advance(1)
    slow.advance(2)
    slow.step("Copying more", total=2)
    slow.close()
    assert stream.getvalue().splitlines() == ["Copying", "Copying: 25%", "Copying: 75%", "Copying more"]
