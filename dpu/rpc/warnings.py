"""What a caller should know beside the result of its call.

Use: ``warn(text)`` anywhere below a method of the table; the dispatcher puts it into the member ``warnings`` of the
answer, which JSON-RPC does not have and clients that do not know it pass over. Outside of a call it is logged only.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator

log = logging.getLogger(__name__)

_collected: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("warnings", default=None)


def warn(text: str) -> None:
    """Tell the caller, and the log."""
    log.warning("%s", text)
    collected = _collected.get()
    if collected is not None:
        collected.append(text)


@contextlib.contextmanager
def collecting() -> Iterator[list[str]]:
    """What is warned of inside, also by tasks that are made there."""
    found: list[str] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)
