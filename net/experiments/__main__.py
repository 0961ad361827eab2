"""``python -m net.experiments``: the paper's experiments, simulated or (``--live``) on live fabrics, as a table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from net.errors import NetError, SimError
from net.experiments import table
from net.experiments.arguments import add_arguments
from net.experiments.lab import Variant


def run(options: argparse.Namespace) -> int:
    """0 when every case passed, 1 otherwise."""
    seeds = options.seed or table.fresh_seeds(options.seeds)

    def progress(done: int, total: int) -> None:
        if not options.json and sys.stderr.isatty():
            print(f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    off: dict[str, Any] = dict.fromkeys(options.without, False)
    variant = Variant(**off)
    note, found = table.NOTE, None
    if options.live:
        if options.ablation or options.dask:
            raise SimError("--ablation and --dask are for simulations", "leave --live away, or them")
        from net.experiments import live  # Scapy and LLVM take a second

        note = live.NOTE
        rows = live.run(options.cases, seeds, variant, options.dilation, progress)
    elif options.dilation is not None:
        raise SimError("--dilation is for live fabrics", "add --live")
    else:
        place = {"workers": options.workers, "dask": options.dask, "progress": progress}
        rows = table.run(options.cases, seeds, variant, **place)
        found = table.ablate(seeds, **place) if options.ablation else None
    if options.out is not None:
        table.write(rows, found, options.out, note)
    if options.json:
        print(json.dumps(table.document(rows, found, note), indent=2))
    else:
        print(table.text(rows, note) + (table.ablation_text(found) if found else ""), end="")
    return 0 if all(row.passed for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m net.experiments", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    try:
        return run(parser.parse_args(argv))
    except NetError as error:
        print(f"{error.message}\n  fix: {error.hint}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
