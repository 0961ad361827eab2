"""What the experiments' command takes; imports nothing heavy, so that `emu --help` need not wait."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

PARTS = ("trimming", "selective", "spray", "ecn", "skip")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For ``python -m net.experiments`` and ``emu fabric experiments`` alike."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help="C4 ... C23; all when none is given")
    parser.add_argument("--seed", type=int, action="append", metavar="N", help="this seed (repeat for more)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="so many fresh seeds (default 1)")
    parser.add_argument("--without", action="append", default=[], choices=PARTS, help="switch a part of MRC off")
    parser.add_argument("--ablation", action="store_true", help="also the ablation table")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes here")
    parser.add_argument("--dask", metavar="ADDRESS", help="run on this Dask scheduler's workers instead")
    parser.add_argument(
        "--live", action="store_true", help="on a live fabric, in dilated time (root); a case at a time"
    )
    parser.add_argument(
        "--dilation", type=int, metavar="N", help="with --live: how much slower (default: the case's)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write experiments.json, .txt and .svg there")
