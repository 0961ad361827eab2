"""`emu dpu upgrade`: have the DPUs of a lab go on with other code, under whatever its guests do.

Use: ``upgrade(sockets, python, path, progress)``; the rows say what serves now and how long nothing did.
Errors: EmuError when other code is refused or does not come up (nothing has stopped then), or when it ended before
it served (the code of before serves again).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from dpu.errors import EmuError, RpcError
from dpu.spdk import Spdk
from dpu.upgrade import UPGRADE_S_MAX
from emu.progress import Progress

POLL_S = 0.02
SERVE_S_MAX = 30.0


def upgrade(sockets: Mapping[str, str], python: str, path: str, progress: Progress) -> dict[str, dict[str, Any]]:
    """``sockets``: of JSON-RPC, by name. ``python``, ``path``: as dpu_upgrade's; "" for none."""
    path = os.path.abspath(path) if path else ""
    rows: dict[str, dict[str, Any]] = {}
    for name, socket in sockets.items():
        progress.step(f"Upgrading DPU {name}")
        with Spdk(socket, timeout_s=UPGRADE_S_MAX + SERVE_S_MAX) as card:
            before = card.dpu_get_stats()
            try:
                told = card.dpu_upgrade(python=python or None, path=path or None)
            except RpcError as error:
                raise EmuError(f"DPU {name}: {error.message}", "it serves on with the code it has") from error
            stats, pause = _served(card, before["generation"])
        if stats["code"] != told["code"]:
            raise EmuError(
                f"DPU {name}: the other code ended before it served; the code of before goes on",
                "its errors are in dpud's log",
            )
        rows[name] = {**told, "pause_ms": pause["pause_ms"], "generation": stats["generation"]}
    return rows


def _served(card: Spdk, generation: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The statistics of the worker that follows, and the pause before it.

    Its predecessor may still answer, or nobody for a moment.
    """
    deadline = time.monotonic() + SERVE_S_MAX
    while True:
        card.close()
        try:
            stats = card.dpu_get_stats()
            for pause in stats["pauses"]:
                if pause["generation"] > generation:
                    return stats, pause
        except EmuError:
            if time.monotonic() >= deadline:
                raise
        if time.monotonic() >= deadline:
            raise EmuError("no worker of the other code has come up", "dpud's log says why")
        time.sleep(POLL_S)
