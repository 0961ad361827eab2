"""The command `emu compare`: its options, and what becomes of them.

Errors: UsageError for operands or options that do not go together.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from dpu.errors import EmuError, UsageError
from emu.compare import COMPARE, PAGE, Comparison, Trial, compare_saved, compare_scenarios, stats, write
from emu.compare.judge import ALPHA
from emu.compare.page import headline, print_comparison
from emu.compare.runs import Document, Side, is_saved, run_once, saved
from emu.progress import Progress
from emu.scenario import Scenario
from emu.units import plural

CODES = {"same": 0, "worse": 1, "different": 4, "undecided": 5}

Load = Callable[[str, Sequence[str]], Scenario]
"""The scenario of a name, changed."""


def compare(
    arguments: argparse.Namespace, load: Load, progress: Progress, console: Console | None
) -> tuple[Any, int]:
    """Compares, writes the folder, prints to ``console`` if there is one: (compare.json's document, exit code)."""
    out: Path = arguments.out or Path("out") / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    operands = [arguments.base, *([arguments.new] if arguments.new else [])]
    kinds = {is_saved(text) for text in operands}
    if kinds == {True, False}:
        for text in operands:
            if not is_saved(text) and not _is_scenario(text, load):
                raise UsageError(f"there is no {text}", "give two folders with saved reports, or two scenarios")
        raise UsageError(
            "a scenario and a saved report cannot be compared", "give two scenarios, or two saved reports"
        )
    if any(is_saved(text) and Path(text).resolve().is_relative_to(out.resolve()) for text in operands):
        raise UsageError(f"--out {out} would take away what is compared", "choose another --out")
    _make_room(out)
    comparison = (_saved if kinds == {True} else _scenarios)(arguments, load, progress, out)
    page = write(comparison, out)
    document = comparison.to_json()
    if console is not None:
        print_comparison(document, console)
        print(f"report: {page}, compare.json")
    code = CODES[comparison.outcome]
    return document, 1 if comparison.aa and comparison.false_positives else code


def _is_scenario(text: str, load: Load) -> bool:
    """Whether an operand is a file, or names a packaged scenario."""
    try:
        return Path(text).exists() or bool(load(text, ()))
    except EmuError:
        return False


def _make_room(out: Path) -> None:
    """Takes away what an earlier comparison left in ``out``, and only that."""
    if (out / COMPARE).is_file():
        for name in (COMPARE, PAGE):
            (out / name).unlink(missing_ok=True)
        for folder in (out / "base", out / "new", *out.glob("trial-*")):
            shutil.rmtree(folder, ignore_errors=True)


def _saved(arguments: argparse.Namespace, load: Load, progress: Progress, out: Path) -> Comparison:
    if not arguments.new or arguments.set or arguments.env or arguments.aa:
        raise UsageError("saved reports are compared as they are", "give two of them, without --set, --env and --aa")
    comparison = Comparison(arguments.base, arguments.new)
    compare_saved(comparison, saved(Path(arguments.base)), saved(Path(arguments.new)))
    return comparison


def _scenarios(arguments: argparse.Namespace, load: Load, progress: Progress, out: Path) -> Comparison:
    if arguments.aa and (arguments.new or arguments.set or arguments.env):
        raise UsageError("--aa compares BASE with itself", "leave out NEW, --set and --env")
    if not (arguments.aa or arguments.new or arguments.set or arguments.env):
        raise UsageError("there is no NEW", "give it, or --set or --env for what differs, or --aa")
    if arguments.pairs < 1 or arguments.trials < 1:
        raise UsageError("--pairs and --trials count from 1", "give a number above 0")
    environment = dict(_variable(text) for text in arguments.env)
    base = Side("base", load(arguments.base, ()))
    new = Side("new", load(arguments.new or arguments.base, arguments.set), environment)
    changed = " ".join([arguments.new or arguments.base, *arguments.set, *arguments.env])
    comparison = Comparison(arguments.base, changed, arguments.pairs, arguments.seed, arguments.aa)
    total = 2 * arguments.pairs * arguments.trials
    if stats.smallest_p(arguments.pairs) >= ALPHA:
        needed = stats.runs_needed(1, ALPHA, paired=True)
        pairs = plural(arguments.pairs, "pair")
        progress.note(
            f"warning: {pairs} can decide deterministic counts only; what has noise needs {needed} pairs at least"
        )
    progress.step(f"{plural(total, 'run')} in {plural(arguments.pairs * arguments.trials, 'pair')}", total=total)
    config = {"accel": arguments.accel, "qemu": arguments.qemu, "restore": not arguments.cold}

    def one_run(side: Side, folder: Path) -> Document:
        document = run_once(side, folder, **config)
        progress.advance(1)
        return document

    def told(trial: Trial) -> None:
        if arguments.trials > 1:
            progress.note(f"trial {len(comparison.trials)}: {trial.outcome}; {headline(comparison.to_json())}")

    compare_scenarios(comparison, base, new, one_run, out, arguments.trials, told)
    return comparison


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--env {text} is not NAME=VALUE", "separate name and value by =")
    return name, value
