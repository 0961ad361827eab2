"""Whether `emu compare`'s judgement finds a slowdown that is there, and none that is not, on this machine.

    scripts/bench/compare [--quick] [--trials N] [--pairs N] [--slowdown PERCENT] [--through stage|daemon]

NEW is a copy of this project's `dpu` whose compiled stage waits after each pass, so long that BASE's time per command
grows by ``--slowdown`` percent (5). A trial is ``--pairs`` pairs of runs in a random order, judged as `emu compare`
judges. There are ``--trials`` (20) of them, and as many A/A trials, in which NEW is BASE's code too.
``ratio`` in the report is NEW : BASE over all pairs of a kind: how great the slowdown really was.

* ``stage`` (default): the compiled stage alone, on one thread, the guest's side in C (gcc; see fastpath.py). Each
  run is a process of its own that loads the code anew, because where code and data come to lie makes up to a percent;
  its measure is the median pass of the fastest of a dozen rounds, in ns per command. It holds on a loaded machine:
  passes that were interrupted do not count. A pair loads at once, each on a core, and measures one after the other.
* ``daemon``: real daemons, the test driver's compiled closed loop (16 KiB reads, QD 32), no VM. A run is a new
  controller with new guest memory; its measures are the worker's CPU time and the wall time per command, each of the
  fastest of ``--blocks`` blocks. For a quiet machine: under load, how often both sides sleep is most of the CPU time.

Source of the fastest block: J. Chen and J. Revels, "Robust benchmarking in noisy environments" (2016).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from dpu import jitcache
from dpu.fastpath.poller import ns_multiplier
from emu.compare import stats
from emu.compare.judge import Finding, Measure, judge
from emu.compare.runs import order
from emu.process import process_cpu_ns
from scripts.bench import common, fastpath
from tests.support.daemon import Daemon
from tests.support.nvme_driver import GuestRam, Nvme
from tests.support.perf import closed_loop

Run = dict[str, Measure]

PASS, CPU, WALL = "stage per command", "cpu per command", "time per command"
CALM_S = 0.005  # longer than a tick of the scheduler

# The end of serve_queue in dpu/fastpath/asic.py.
ANCHOR = "            unread += 1\n    if c.events and sqid"
DELAY = """\
            unread += 1
    if sqid:
        until = ticks() + {ticks} * fetched
        while ticks() < until:
            pass
    if c.events and sqid"""


def measured(value: float) -> Measure:
    return Measure(value, "ns", "measured", "less")


# ---- the compiled stage alone


class Stage:
    """Runs of ``--through stage``."""

    def __init__(self, stack: ExitStack, arguments: argparse.Namespace) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fastpath.build(folder)
        command = [sys.executable, "-P", "-m", "tests.support.stage_runs", str(folder / "baseline.so")]
        self.process = stack.enter_context(
            subprocess.Popen(
                [*command, str(arguments.commands)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(common.ROOT)},
            )
        )

    def side(self, package: Path, cache: Path) -> str:
        """Of the package `dpu` in the folder ``package``."""
        return f"{package} {cache}"

    def run(self, *sides: str) -> list[Run]:
        """One run of each, in this order."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(" ".join(sides) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "a run failed; its words are above"
        return [{PASS: measured(float(word))} for word in line.split()]


# ---- a whole daemon


class Cards:
    """Runs of ``--through daemon``."""

    def __init__(self, stack: ExitStack, arguments: argparse.Namespace) -> None:
        self.stack, self.arguments = stack, arguments

    def side(self, package: Path, cache: Path) -> Callable[[], Run]:
        """A daemon of the package `dpu` in the folder ``package``; it finds its cache by itself."""
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="dpu-c-")))
        card = self.stack.enter_context(Daemon(folder, env={"PYTHONPATH": str(package)}))
        card.create_transport()
        path = card.add_subsystem("nqn.2026-01.io.test:c", [card.add_memory("m")]).path
        how: dict[str, Any] = {"nsid": 1, "depth": 32, "transfer": 16 << 10, "span": 256 << 10, "spin": 0}
        blocks, commands = self.arguments.blocks, self.arguments.commands

        def run() -> Run:
            nvme = Nvme(path, GuestRam())
            nvme.enable()
            nvme.enable_shadow_doorbells()
            queue = nvme.create_queue_pair(1, 64)
            pid = card.worker_pid()
            cpu_ns, wall_ns = [], []
            for block in range(blocks + 1):
                before = settled_cpu_ns(pid)
                result = closed_loop(nvme, queue, commands=commands, **how)
                if block:  # the first one touches every page
                    cpu_ns.append((settled_cpu_ns(pid) - before) / commands)
                    wall_ns.append(result.seconds / commands * 1e9)
            nvme.close()
            return {CPU: measured(min(cpu_ns)), WALL: measured(min(wall_ns))}

        return run

    def run(self, *sides: Callable[[], Run]) -> list[Run]:
        """One run of each, in this order."""
        return [side() for side in sides]


def settled_cpu_ns(pid: int) -> int:
    """The worker's CPU time when its poller has gone to sleep: before, the kernel's account lags behind by a tick."""
    seen = -1
    while (now := process_cpu_ns(pid)) != seen:
        seen = now
        time.sleep(CALM_S)
    return now


# ---- trials


def slowed_copy(into: Path, delay_ns: float) -> None:
    """A copy of the package `dpu` whose compiled stage takes ``delay_ns`` more for each command."""
    shutil.copytree(common.ROOT / "dpu", into / "dpu", ignore=shutil.ignore_patterns("__pycache__"))
    source = into / "dpu/fastpath/asic.py"
    text = source.read_text()
    assert text.count(ANCHOR) == 1, "the compiled stage has changed: find the new place for the delay"
    ticks = round(delay_ns * (1 << 20) / ns_multiplier())
    source.write_text(text.replace(ANCHOR, DELAY.format(ticks=ticks)))


def trial(runs: Any, base: Any, new: Any, pairs: int, seed: int) -> tuple[list[Finding], list[float]]:
    """The judgement, and each pair's ratio of the first measure."""
    sides: tuple[list[Run], list[Run]] = ([], [])
    for base_first in order(pairs, seed):
        found = runs.run(base, new) if base_first else reversed(runs.run(new, base))
        for side, one in zip(sides, found, strict=True):
            side.append(one)
    first = next(iter(sides[0][0]))
    return judge(*sides, paired=True), [b[first].value / a[first].value for a, b in zip(*sides)]


def run(arguments: argparse.Namespace) -> common.Report:
    report = common.Report("compare", arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dpu-c-")))
        runs: Stage | Cards = Stage(stack, arguments) if arguments.through == "stage" else Cards(stack, arguments)
        base, twin = (runs.side(common.ROOT, jitcache.directory()[0]) for _ in range(2))
        base_ns = median(next(iter(run.values())).value for _ in range(5) for run in runs.run(base))
        report.results["base_ns"] = round(base_ns, 1)
        slowed_copy(folder, base_ns * arguments.slowdown / 100)
        slow = runs.side(folder, folder / "cache")
        runs.run(slow)  # compiles
        rows = []
        for kind, new in (("slowed", slow), ("A/A", twin)):
            verdicts: Counter[str] = Counter()
            ratios: list[float] = []
            for number in range(arguments.trials):
                findings, found = trial(runs, base, new, arguments.pairs, number)
                changed = {finding.verdict for finding in findings} - {"same"}
                verdicts["worse" if "worse" in changed else next(iter(changed), "same")] += 1
                ratios += found
                report.results[kind] = {
                    "trials": number + 1,
                    "verdicts": dict(verdicts),
                    "ratio": common.spread(ratios, 4),
                    "ratios": [round(one, 4) for one in ratios],
                }
                report.save()
            ratio = report.results[kind]["ratio"]
            told = f"{ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f})"
            rows.append([kind, arguments.trials, *(verdicts[one] for one in ("worse", "same", "better")), told])
        false = arguments.trials - verdicts["same"] - verdicts["undecided"]
        report.results["A/A"]["false_positive_rate_at_most"] = round(stats.upper_bound(false, arguments.trials), 3)
        common.table(["", "trials", "worse", "same", "better", "NEW : BASE"], rows)
    return report


def main() -> None:
    parser = common.parser(__doc__, "compare")
    parser.add_argument("--through", choices=("stage", "daemon"), default="stage")
    parser.add_argument("--trials", type=int, default=20, help="of each kind")
    parser.add_argument("--pairs", type=int, default=24, help="of each trial")
    parser.add_argument("--slowdown", type=float, default=5.0, help="percent of the time per command")
    parser.add_argument("--commands", type=int, default=10_000, help="of each round or block")
    parser.add_argument("--blocks", type=int, default=4, help="of each run through a daemon")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.trials, arguments.pairs, arguments.commands, arguments.blocks = 1, 2, 1000, 1
    run(arguments).write()


if __name__ == "__main__":
    main()
