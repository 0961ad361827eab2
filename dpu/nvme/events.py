"""Asynchronous events: requests that wait, events that wait, and what is masked (Base 5.2).

Use: ``park`` a request or get its answer at once; ``raise_event`` when something happened; ``retire`` when the
host has read a log page with RAE 0. Answers go to the ``complete`` function that was passed in.

An event is reported once, then its whole type stays masked until the log page that goes with it has been read
with RAE 0. What happens meanwhile is in the log page, so it needs no event of its own.

Limits: ``LIMIT`` requests; events that wait are a set, so a guest cannot make it grow.
Errors: Asynchronous Event Request Limit Exceeded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final

from dpu.nvme.bits import Bits
from dpu.nvme.errors import CommandError
from dpu.nvme.interfaces import Completion
from dpu.nvme.wire import Status

LIMIT: Final = 4  # AERL is 3, 0's based

_DW0: Final = Bits(AET=(0, 2), AEI=(8, 15), LID=(16, 23))
_ERROR, _SMART, _NOTICE = 0, 1, 2  # Asynchronous Event Type


class Event(enum.IntEnum):
    """DW0 of the completion: type, information, log page (Base figures 146-150)."""

    INVALID_DOORBELL_REGISTER = _DW0.encode(AET=_ERROR, AEI=0x00, LID=0x01)
    INVALID_DOORBELL_VALUE = _DW0.encode(AET=_ERROR, AEI=0x01, LID=0x01)
    PERSISTENT_INTERNAL_ERROR = _DW0.encode(AET=_ERROR, AEI=0x03, LID=0x01)
    TRANSIENT_INTERNAL_ERROR = _DW0.encode(AET=_ERROR, AEI=0x04, LID=0x01)
    RELIABILITY = _DW0.encode(AET=_SMART, AEI=0x00, LID=0x02)
    TEMPERATURE_THRESHOLD = _DW0.encode(AET=_SMART, AEI=0x01, LID=0x02)
    NAMESPACE_ATTRIBUTE_CHANGED = _DW0.encode(AET=_NOTICE, AEI=0x00, LID=0x04)
    LBA_STATUS_INFORMATION_ALERT = _DW0.encode(AET=_NOTICE, AEI=0x05, LID=0x0E)


class AsyncEvents:
    """The state of one controller's event reporting.

    :param complete: completes a parked request: (token, completion)
    """

    def __init__(self, complete: Callable[[int, Completion], None]) -> None:
        self._complete = complete
        self.clear()

    def clear(self) -> None:
        """Forget everything (Controller Level Reset): parked requests are never completed."""
        self._parked: list[tuple[int, int]] = []  # (token, cid), oldest first
        self._waiting: list[Event] = []
        self._masked: set[int] = set()  # event types

    @property
    def parked_tokens(self) -> list[int]:
        """The requests that wait, oldest first."""
        return [token for token, _ in self._parked]

    def park(self, token: int, cid: int) -> Completion | None:
        """One Asynchronous Event Request: its completion if an event waits already, or None."""
        if token in self.parked_tokens:
            return None  # executed and saved, then executed again by the next worker
        for event in self._waiting:
            if self._type(event) not in self._masked:
                self._waiting.remove(event)
                return self._report(event)
        if len(self._parked) >= LIMIT:
            raise CommandError(Status.ASYNC_EVENT_LIMIT_EXCEEDED)
        self._parked.append((token, cid))
        return None

    def abort(self, cid: int) -> bool:
        """Complete the parked request ``cid`` with Command Abort Requested; False if there is none."""
        for entry in self._parked:
            if entry[1] == cid:
                self._parked.remove(entry)
                self._complete(entry[0], Completion(Status.ABORT_REQUESTED.field()))
                return True
        return False

    def raise_event(self, event: Event) -> None:
        """Report ``event`` now or when a request comes; nothing if its type is masked."""
        if self._type(event) in self._masked or event in self._waiting:
            return
        if not self._parked:
            self._waiting.append(event)
            return
        token, _ = self._parked.pop(0)
        self._complete(token, self._report(event))

    def retire(self, lid: int) -> None:
        """The host has read log page ``lid`` with RAE 0: what it told is known, its types are free again."""
        retired = [event for event in Event if _DW0.get(event, "LID") == lid]
        self._waiting = [event for event in self._waiting if event not in retired]
        self._masked -= {self._type(event) for event in retired}

    def dump(self) -> dict[str, Any]:
        return {
            "parked": [list(entry) for entry in self._parked],
            "waiting": [int(event) for event in self._waiting],
            "masked": sorted(self._masked),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._parked = [(token, cid) for token, cid in state["parked"]]
        self._waiting = [Event(value) for value in state["waiting"]]
        self._masked = set(state["masked"])

    def _report(self, event: Event) -> Completion:
        self._masked.add(self._type(event))
        return Completion(Status.SUCCESS.field(), int(event))

    @staticmethod
    def _type(event: Event) -> int:
        return _DW0.get(event, "AET")
