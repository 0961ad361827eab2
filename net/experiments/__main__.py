"""``python -m net.experiments``: the paper's experiments in simulation, as a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from net.errors import NetError
from net.experiments import table
from net.experiments.lab import Variant

PARTS = ("trimming", "selective", "spray", "ecn", "skip")


def arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes; ``emu fabric experiments`` takes the same."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help="C4 ... C23; all when none is given")
    parser.add_argument("--seed", type=int, action="append", metavar="N", help="this seed (repeat for more)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="so many fresh seeds (default 1)")
    parser.add_argument("--without", action="append", default=[], choices=PARTS, help="switch a part of MRC off")
    parser.add_argument("--ablation", action="store_true", help="also the ablation table")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write experiments.json, .txt and .svg there")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")


def run(options: argparse.Namespace) -> int:
    """0 when every case passed, 1 otherwise."""
    seeds = options.seed or table.fresh_seeds(options.seeds)

    def progress(done: int, total: int) -> None:
        if not options.json and sys.stderr.isatty():
            print(f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    variant = Variant(**dict.fromkeys(options.without, False))
    rows = table.run(options.cases, seeds, variant, workers=options.workers, progress=progress)
    found = table.ablate(seeds, workers=options.workers, progress=progress) if options.ablation else None
    if options.out is not None:
        table.write(rows, found, options.out)
    if options.json:
        print(json.dumps({"ok": all(row.passed for row in rows), "experiments": [asdict(row) for row in rows]}))
    else:
        print(table.text(rows) + (table.ablation_text(found) if found else ""), end="")
    return 0 if all(row.passed for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m net.experiments", description=__doc__)
    arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except NetError as error:
        print(f"{error.message}\n  fix: {error.hint}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
