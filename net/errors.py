"""Errors of the fabric, as one tree.

    NetError                 an operator's mistake or a need that is not met: one line and its fix, no traceback
    |- RequestError          a host, switch or link that is not there; a value that does not fit: the caller's mistake
    |  `- TopologyError      numbers that make no fabric; a host, plane, switch or entropy value outside of it
    |- PlanError             addressing: a node that fits no uSID, an address that is no carrier of this plan
    |- SimError              a simulation that was asked for the impossible
    `- MrcError              bytes that are no MRC packet, or values that fit no MRC header (carries a Reason)

A peer's packet raises nothing but MrcError, and engines count those by reason. Our own mistakes are ``assert``.
"""

from __future__ import annotations

import enum


class NetError(Exception):
    """What went wrong in one line, and in ``hint`` what the operator can do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class RequestError(NetError):
    """The caller names what is not there, or gives a value that does not fit."""


class TopologyError(RequestError):
    """Numbers that make no fabric, or something outside of it."""


class PlanError(NetError):
    """A node that fits no uSID, or an address that is no carrier of this plan."""


class SimError(NetError):
    """A simulation that was asked for the impossible."""


class Reason(enum.Enum):
    """Why bytes were refused as MRC."""

    TRUNCATED = "truncated"
    OPCODE = "opcode"
    LENGTH = "length"
    ICRC = "icrc"
    ENCAPSULATION = "encapsulation"
    VALUE = "value"


class MrcError(NetError):
    """Bytes that are no MRC packet, or a value that fits no field; ``reason`` is what a counter is kept by."""

    def __init__(self, reason: Reason, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason
