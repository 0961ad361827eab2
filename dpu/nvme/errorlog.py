"""The Error Information log: the newest failed commands (Base 5.16.1.2).

Use: ``record`` one error, ``page`` for the log page's bytes, newest first.

Limits: ``ENTRIES`` entries; ``count`` never goes back, also across controller resets, and is what SMART reports.
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass
from typing import Any, Final

from dpu.nvme.wire import NO_LOCATION, ErrorLogEntry

ENTRIES: Final = 64  # ELPE is 63, 0's based
NO_CID: Final = 0xFFFF  # the error belongs to no command
NO_LBA: Final = 0


@dataclass(frozen=True)
class Error:
    """One failed command; ``status`` is the 15-bit Status Field."""

    count: int
    sqid: int
    cid: int
    status: int
    location: int
    lba: int
    nsid: int


class ErrorLog:
    """The log of one controller."""

    def __init__(self, count: int = 0) -> None:
        self.count = count  # of all that there ever were
        self._errors: deque[Error] = deque(maxlen=ENTRIES)

    def record(
        self,
        sqid: int,
        cid: int,
        status: int,
        nsid: int = 0,
        lba: int = NO_LBA,
        location: int = NO_LOCATION,
    ) -> None:
        """Add one error."""
        self.count += 1
        self._errors.append(Error(self.count, sqid, cid, status, location, lba, nsid))

    def page(self) -> bytes:
        """The whole log page; unused entries have the count 0."""
        entries = [
            ErrorLogEntry(
                error_count=error.count,
                sqid=error.sqid,
                cid=error.cid,
                status=error.status << 1,
                location=error.location,
                lba=error.lba,
                nsid=error.nsid,
            )
            for error in reversed(self._errors)
        ]
        return b"".join(map(bytes, entries)).ljust(ENTRIES * 64, b"\0")

    def dump(self) -> dict[str, Any]:
        return {"count": self.count, "errors": [list(astuple(error)) for error in self._errors]}

    def load(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self._errors = deque((Error(*fields) for fields in state["errors"]), maxlen=ENTRIES)
