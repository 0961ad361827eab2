"""Faults on demand: what a client asks for, and how each is carried out.

Use: ``Fault.parse(...)`` of a ``dpu_fault_add``; ``rule`` and ``quantiles_ns`` are what pollers need (layout.RULE),
``mishap`` what control does to data. A fault strikes commands of one back end, calls of an RPC method, or commits of
the configuration. Of those that it matches it lets ``after`` pass, then strikes each ``every``-th with
``probability``, at most ``num``; dice are made from ``seed`` and the number of the match, so a run can be repeated.

Units: latencies in microseconds, ranges in logical blocks.
Limits: layout.RULES faults at a time; latencies up to an hour. A range does not match commands without one (Flush,
Dataset Management, Copy). Errors: RpcError -22.
Source: NVMe Base 2.0, 4.6.1 and figure 94 for statuses, figures 146 to 148 for events, figure 207 for warnings.
"""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Final

from dpu import layout
from dpu.backends import os_error
from dpu.nvme.wire import NvmOpcode, Status

LATENCY_US_MAX: Final = 3_600_000_000
_STEPS: Final = 1 << layout.DELAY_STEPS_BITS
_PROBABILITY: Final = 1 << 32
_DNR: Final = True

IO_TYPES: Final[dict[str, tuple[int, ...]]] = {
    "read": (NvmOpcode.READ,),
    "write": (NvmOpcode.WRITE,),
    "flush": (NvmOpcode.FLUSH,),
    "unmap": (NvmOpcode.DATASET_MANAGEMENT,),
    "write_zeroes": (NvmOpcode.WRITE_ZEROES,),
    "compare": (NvmOpcode.COMPARE,),
    "verify": (NvmOpcode.VERIFY,),
    "copy": (NvmOpcode.COPY,),
    "write_uncorrectable": (NvmOpcode.WRITE_UNCORRECTABLE,),
    "all": tuple(range(64)),
}
"""SPDK's names and what follows from them."""

_WRITES: Final = ("write", "write_zeroes", "copy", "write_uncorrectable")
# Bits of Critical Warning in the SMART log.
WARNING_RELIABILITY: Final = 1 << 2
WARNING_READ_ONLY: Final = 1 << 3


@dataclass(frozen=True)
class Action:
    """What a fault can do to I/O. ``io_types``: which commands, unless told; ``warning``: while it is there."""

    act: int
    io_types: tuple[str, ...] = ("all",)
    status: int = 0
    warning: int = 0
    persistent: bool = False  # told as a Persistent Internal Error event
    own_status: bool = False  # sct and sc say the status


ACTIONS: Final[dict[str, Action]] = {
    "status": Action(layout.ACT_STATUS, status=Status.INTERNAL_ERROR.field(), own_status=True),
    "delay": Action(layout.ACT_NONE),
    "slow": Action(layout.ACT_NONE),
    "hold": Action(layout.ACT_HOLD),
    "lose": Action(layout.ACT_STATUS, ("write",)),
    "corrupt": Action(layout.ACT_CONTROL, ("read",)),
    "torn": Action(layout.ACT_CONTROL, ("write",), own_status=True),
    "gone": Action(
        layout.ACT_STATUS,
        status=Status.INTERNAL_ERROR.field(dnr=_DNR),
        warning=WARNING_RELIABILITY,
        persistent=True,
    ),
    "full": Action(layout.ACT_STATUS, _WRITES, Status.CAPACITY_EXCEEDED.field(dnr=_DNR)),
    "read_only": Action(
        layout.ACT_STATUS,
        (*_WRITES, "unmap"),
        Status.NAMESPACE_WRITE_PROTECTED.field(dnr=_DNR),
        warning=WARNING_READ_ONLY,
    ),
    "not_ready": Action(layout.ACT_STATUS, status=Status.NAMESPACE_NOT_READY.field()),
    "fatal": Action(layout.ACT_CONTROL),
}
MANAGEMENT_ACTIONS: Final = ("error", "delay")
DISTRIBUTIONS: Final = ("fixed", "uniform", "exponential", "lognormal", "two_point")


@dataclass
class Fault:
    """One fault. ``number``: of its rule in the kept table; 0 for faults of the management path."""

    name: str
    action: str
    bdev_name: str = ""
    method: str = ""  # of an RPC; "*": any
    metadata: bool = False  # commits of the configuration
    io_types: tuple[str, ...] = ()
    lba: int = 0
    num_blocks: int = 0  # 0: to the end
    after: int = 0
    every: int = 1
    num: int = 0  # 0: no end
    probability: float = 1.0
    seed: int = 0
    sct: int = 0
    sc: int = -1  # -1: the action's own status
    dnr: bool = False
    code: int = -errno.EIO  # of a failing call
    latency_us: int = 0
    distribution: str = "fixed"
    spread_us: int = 0  # uniform: the largest; lognormal and two_point: 99 in 100 are not above it
    corrupt_offset: int = -1  # -1: drawn
    corrupt_value: int = 0  # exclusive or; 0: drawn for each byte
    corrupt_bytes: int = 1  # 0: all
    torn_blocks: int = -1  # that are written; -1: drawn
    number: int = 0
    serial: int = 0  # of its making, never used again
    matches: int = 0  # of the management path; the pollers' are in the table
    struck: int = 0
    hidden: bool = field(default=False)  # made by one of SPDK's calls, and listed there

    def __post_init__(self) -> None:
        self.io_types = tuple(self.io_types)

    # -- checks

    def check(self) -> None:
        """RpcError -22 for what cannot be done."""
        of_io = bool(self.bdev_name)
        actions = ACTIONS if of_io else MANAGEMENT_ACTIONS
        problems = {
            "one of bdev_name, method and metadata is needed": of_io + bool(self.method) + self.metadata == 1,
            f"action {self.action!r} is none of {', '.join(actions)}": self.action in actions,
            f"io_types are {', '.join(IO_TYPES)}": all(one in IO_TYPES for one in self.io_types),
            "every begins at 1": self.every >= 1,
            "probability is above 0 and at most 1": 0 < self.probability <= 1,
            f"latencies end at {LATENCY_US_MAX} us": max(self.latency_us, self.spread_us) <= LATENCY_US_MAX,
            f"distribution is one of {', '.join(DISTRIBUTIONS)}": self.distribution in DISTRIBUTIONS,
            f"{self.distribution} needs spread_us of at least latency_us": self.spread_us >= self.latency_us
            or self.distribution in ("fixed", "exponential"),
            f"{self.action} needs latency_us": bool(self.latency_us) or self.action not in ("delay", "slow"),
            "commits cannot be delayed": not (self.metadata and self.latency_us),
            "code is a negative errno": self.code < 0,
            "corrupt_value is 0 to 255": self.corrupt_value <= 255,
            "sct is 0 to 7, sc 0 to 255": 0 <= self.sct <= 7 and -1 <= self.sc <= 255,
        }
        for problem, good in problems.items():
            if not good:
                raise os_error(errno.EINVAL, problem)

    # -- for pollers

    @property
    def status(self) -> int:
        """The Status Field that struck commands end with; 0: they succeed."""
        action = ACTIONS[self.action]
        if action.own_status and self.sc >= 0:
            return self.dnr << 14 | self.sct << 8 | self.sc
        return action.status

    def rule(self) -> dict[str, int]:
        """Fields of a layout.RULE."""
        action = ACTIONS[self.action]
        opcodes = 0
        for one in self.io_types or action.io_types:
            for opcode in IO_TYPES[one]:
                opcodes |= 1 << opcode
        return {
            "opcodes": opcodes - (opcodes >> 63 << 64),
            "first": self.lba,
            "last": self.lba + self.num_blocks - 1 if self.num_blocks else layout.HELD,
            "skip": self.after,
            "every": self.every,
            "count": self.num or layout.HELD,
            "rate": round(self.probability * _PROBABILITY),
            "seed": self.seed,
            "matches": 0,
            "struck": 0,
            "action": action.act,
            "status": self.status,
            "delayed": int(self.latency_us > 0),
            "serial": self.serial,
        }

    def quantiles_ns(self) -> list[int]:
        """Of the latency: DELAY's points, equally spaced from 0 to 1."""
        low, high = self.latency_us * 1000, self.spread_us * 1000
        normal = NormalDist()

        def at(q: float) -> float:
            inner = min(max(q, 0.25 / _STEPS), 1 - 0.25 / _STEPS)
            if self.distribution == "uniform":
                return low + (high - low) * q
            if self.distribution == "exponential":
                return -low * math.log(1 - inner)
            if self.distribution == "lognormal":  # latency_us is the median
                sigma = math.log(high / low) / normal.inv_cdf(0.99)
                return low * math.exp(sigma * normal.inv_cdf(inner))
            return high if self.distribution == "two_point" and q > 0.99 else low

        return [min(round(at(i / _STEPS)), LATENCY_US_MAX * 1000) for i in range(_STEPS + 1)]

    # -- for control

    def strikes(self) -> bool:
        """Of the management path: count a match; whether the fault strikes it."""
        match = self.matches
        self.matches += 1
        passes = match < self.after or (match - self.after) % self.every or 0 < self.num <= self.struck
        if passes or random.Random(f"{self.seed}:{match}").random() >= self.probability:
            return False
        self.struck += 1
        return True

    def draw_s(self) -> float:
        """A delay of the management path, in seconds; after ``strikes``."""
        points = self.quantiles_ns()
        return points[random.Random(f"{self.seed}:{self.matches}:delay").randrange(_STEPS)] / 1e9

    def mishap(self, match: int, block_size: int) -> Mishap:
        """What happens to the data of the command that was match number ``match``."""
        dice = random.Random(f"{self.seed}:{match}:data")
        if self.action == "corrupt":
            return Mishap(lambda data: self._corrupted(data, dice))
        return Mishap(lambda data: self._torn(data, dice, block_size), self.status)

    def _corrupted(self, data: bytes, dice: random.Random) -> bytes:
        count = min(self.corrupt_bytes or len(data), len(data))
        offset = self.corrupt_offset if self.corrupt_offset >= 0 else dice.randrange(len(data) - count + 1)
        wrong = bytearray(data)
        for at in range(offset, min(offset + count, len(data))):
            wrong[at] ^= self.corrupt_value or dice.randint(1, 255)
        return bytes(wrong)

    def _torn(self, data: bytes, dice: random.Random, block_size: int) -> bytes:
        blocks = len(data) // block_size
        kept = min(self.torn_blocks, blocks) if self.torn_blocks >= 0 else dice.randrange(blocks)
        return data[: kept * block_size]

    # -- for clients

    def describe(self) -> dict[str, Any]:
        """What was asked for, without what is as it is by default."""
        plain = {name: value for name, value in vars(self).items() if name not in _INNER}
        default = vars(Fault(self.name, self.action))
        row = {name: value for name, value in plain.items() if value != default[name] or name in ("name", "action")}
        return {**row, "matches": self.matches, "struck": self.struck}

    def to_config(self) -> dict[str, Any]:
        return dict(vars(self))


_INNER: Final = {"number", "serial", "matches", "struck", "hidden"}
NUMBERS: Final = (
    *("lba", "num_blocks", "after", "every", "num", "seed", "sct", "sc", "latency_us", "spread_us"),
    *("corrupt_offset", "corrupt_value", "corrupt_bytes", "torn_blocks"),
)
"""Parameters that are whole numbers from 0 on."""


@dataclass(frozen=True)
class Mishap:
    """Data on its way: ``change`` gives what comes instead (shorter: the rest is lost), ``status`` how it ends."""

    change: Callable[[bytes], bytes]
    status: int = 0
