"""A guest's mistake, on its way to becoming a status."""

from __future__ import annotations

from dpu.nvme.wire import NO_LOCATION, Status


class CommandError(Exception):
    """Ends a command with ``status``.

    :param dnr: Do Not Retry: the same command would fail again
    :param location: Parameter Error Location (Base figure 206): byte of the SQE | bit << 8
    """

    def __init__(self, status: Status, *, dnr: bool = True, location: int = NO_LOCATION) -> None:
        super().__init__(status.name)
        self.status = status
        self.dnr = dnr
        self.location = location
