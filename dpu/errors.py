"""Errors of the card, as one tree.

    EmuError                 an operator's mistake or a need that is not met: one line and its fix, no traceback
      UsageError             the command line or the scenario names something that is not there or does not fit
    VfioUserError            a peer's message that gets a positive errno back (vfio-user, "Message header")
    DmaFault                 an address that the guest gave is outside the DMA map: becomes an NVMe status
    RpcError                 a JSON-RPC answer with an SPDK error code

A guest's mistake never leaves the card as an exception: it becomes an NVMe status or CSTS.CFS.
Our own mistakes are ``assert``.
"""

from __future__ import annotations


class EmuError(Exception):
    """What went wrong in one line, and in ``hint`` what the operator can do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    @property
    def details(self) -> str:
        """What ``str`` of a subclass tells beside these: the last lines of logs."""
        return str(self).removeprefix(EmuError.__str__(self)).strip("\n")


class UsageError(EmuError):
    """The command line or the scenario is wrong."""


class VfioUserError(Exception):
    """A vfio-user request that is answered with ``errno`` (a positive number, as errno.EINVAL)."""

    def __init__(self, errno: int, message: str = "") -> None:
        super().__init__(message or f"errno {errno}")
        self.errno = errno


class DmaFault(Exception):
    """``iova`` .. ``iova + length`` (bytes) is not inside one mapped region with the rights asked for."""

    def __init__(self, iova: int, length: int) -> None:
        super().__init__(f"no DMA mapping for {length} bytes at {iova:#x}")
        self.iova = iova
        self.length = length


class RpcError(Exception):
    """An error answer: JSON-RPC ``code`` (SPDK uses -errno too) and its ``message``."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
