"""Named places where a test may end a worker as a crash would.

Use: ``killpoint("before_reply")`` at the place; run with ``DPU_EMU_KILL_AT=before_reply`` to die there by
SIGKILL at the first hit, ``DPU_EMU_KILL_AT=before_reply:3`` at the third. Without the variable a call costs
one comparison. The first ``DPU_EMU_KILL_GENERATIONS`` workers of a keeper (default 1) are armed, so the next one
serves.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "DPU_EMU_KILL_AT"
GENERATIONS_VARIABLE = "DPU_EMU_KILL_GENERATIONS"


def parse(value: str) -> tuple[str, int]:
    """("name", n) of "name" or "name:n"; ("", 0) of what is neither."""
    name, _, count = value.partition(":")
    return (name, int(count)) if count.isdigit() else (name, 1) if name and not count else ("", 0)


NAME, _left = parse(os.environ.get(VARIABLE, ""))
"""The point named by the environment, "" when there is none."""

ARMED = bool(NAME)


def disarm() -> None:
    """No point of this process kills it any more."""
    global ARMED, NAME
    ARMED, NAME = False, ""


def killpoint(name: str) -> None:
    """Die here when ``name`` is the point and this is its nth hit."""
    if ARMED and name == NAME:
        _hit()


def _hit() -> None:
    global _left
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
