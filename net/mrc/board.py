"""Where live endpoints tell the states of their entropy values, for who shows a fabric: a file each in one folder.

Use: ``Board(folder, host=0).post(endpoint)`` now and then; ``read(folder)`` from any process.
Limits: a queue pair is told once it has sent something. What nobody has told for an hour is forgotten.
Errors: none; a folder that has gone is the end of a fabric, and nobody looks any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from net.mrc.endpoint import Endpoint, QueuePair

FORGOTTEN_S = 3600.0


class Board:
    """One endpoint's file."""

    def __init__(self, folder: Path, host: int) -> None:
        self._host = host
        self._file = folder / f"{host}.{os.getpid()}.json"

    def post(self, endpoint: Endpoint) -> None:
        """Tells how its queue pairs' paths are."""
        pairs = [_pair(qpn, pair) for qpn, pair in endpoint.pairs.items() if pair.requestor.counters["sent"]]
        if pairs:
            new = self._file.with_suffix(".new")
            with contextlib.suppress(OSError):
                new.write_text(json.dumps({"host": self._host, "pairs": pairs}))
                new.replace(self._file)


def _pair(qpn: int, pair: QueuePair) -> dict[str, Any]:
    paths = pair.requestor.paths
    active = set(paths.active)
    return {
        "qpn": qpn,
        "peer": pair.identity.peer,
        "counters": dict(pair.requestor.counters),
        "evs": [{"ev": ev, "state": state.value, "active": ev in active} for ev, state in paths.states.items()],
    }


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Each endpoint's ``host``, ``age_s`` and ``pairs``: qpn, peer, counters, evs (ev, state, active)."""
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError):  # it went meanwhile
            age_s = time.time() - file.stat().st_mtime
            if age_s > FORGOTTEN_S:
                file.unlink()
            else:
                yield {**json.loads(file.read_text()), "age_s": max(0.0, age_s)}
