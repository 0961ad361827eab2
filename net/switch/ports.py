"""The state of every port as the eBPF programs and Python share it: settings, faults, queue, counters.

Use: ``record.configure(config, ...)``; ``record.down = 1``; ``record.share("loss", 0.01)``;
``record.packets(Cause.ECN)``.
The layout is this structure and nothing else: the programs take their offsets from it.
Time: nanoseconds of CLOCK_MONOTONIC. Sizes in bytes from the Ethernet header, as the kernel counts them.
Errors: NetError. Source: net.switch.model, of which this is the other half.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterable

from net.errors import RequestError
from net.switch.model import BITS, Cause, QueueConfig

NEVER = (1 << 63) - 1
NS_PER_S = 10**9
RATE_SHIFT = 20
"""A byte's time is kept in units of 2^-20 ns: 100 Gb/s are 83,886 of them."""

RATES_BPS = (10_000, 10**12)
"""Line rates that the kernel's shaper (HTB, with a frame of 9000 bytes) and a byte's time can say."""

ALWAYS = 1 << 32
"""A probability of 1, as a bound for a random 32-bit number."""

CAUSES = tuple(Cause)


class Fault(enum.Enum):
    """What else happens to packets: injected, or on their way."""

    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    LIFT = "lift"
    UNROUTED = "unrouted"


FAULTS = tuple(Fault)
PROBABILITIES = ("loss", "corrupt", "duplicate", "reorder")


class PortRecord(ctypes.LittleEndianStructure):
    """One port. Probabilities are bounds for a random 32-bit number; masks have a bit per code point."""

    _fields_ = [
        ("node", ctypes.c_uint64),
        ("byte_time", ctypes.c_uint64),
        ("ecn_ns", ctypes.c_uint64),
        ("trim_ns", ctypes.c_uint64),
        ("limit_ns", ctypes.c_uint64),
        ("priority_limit_ns", ctypes.c_uint64),
        ("trim_size", ctypes.c_uint64),
        ("trim_dscp", ctypes.c_uint64),
        ("priority_mask", ctypes.c_uint64),
        ("trimmable_mask", ctypes.c_uint64),
        ("down", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in PROBABILITIES),
        ("lift", ctypes.c_uint64),
        ("finish_ns", ctypes.c_uint64),
        ("priority_finish_ns", ctypes.c_uint64),
        ("sent_packets", ctypes.c_uint64),
        ("sent_bytes", ctypes.c_uint64),
        ("cause_packets", ctypes.c_uint64 * len(CAUSES)),
        ("cause_bytes", ctypes.c_uint64 * len(CAUSES)),
        ("fault_packets", ctypes.c_uint64 * len(FAULTS)),
    ]

    def configure(
        self, config: QueueConfig, *, priority: Iterable[int] = (), trimmable: Iterable[int] = (), trim_dscp: int = 0
    ) -> None:
        """Sets the queue; counters, faults and what stands in it stay. Code points as DSCPs."""
        self._set_queue(config)
        self.priority_mask, self.trimmable_mask = (
            sum(1 << dscp for dscp in set(some)) for some in (priority, trimmable)
        )
        self.trim_dscp = trim_dscp

    def _set_queue(self, config: QueueConfig) -> None:
        self.byte_time = (BITS * NS_PER_S << RATE_SHIFT) // config.rate_bps
        for name in ("ecn", "trim", "limit", "priority_limit"):
            value = getattr(config, f"{name}_bytes")
            setattr(self, f"{name}_ns", NEVER if value is None else min(NEVER, self.time_ns(value)))
        self.trim_size = config.trim_size_bytes

    def time_ns(self, size_bytes: int) -> int:
        """How long so many bytes take."""
        return int(size_bytes * self.byte_time >> RATE_SHIFT)

    def change_rate(self, now_ns: int, config: QueueConfig) -> None:
        """Another line rate; what stands in the queue stays, in bytes."""
        old = self.byte_time
        self._set_queue(config)
        for name in ("finish_ns", "priority_finish_ns"):
            waiting = max(0, getattr(self, name) - now_ns)
            setattr(self, name, now_ns + waiting * self.byte_time // max(1, old))

    def share(self, fault: str, value: float) -> None:
        """Sets the share of packets, 0 to 1, that meet ``fault``."""
        check_share(fault, value)
        setattr(self, fault, round(value * ALWAYS))

    def get_share(self, fault: str) -> float:
        """The share of packets that meet ``fault``."""
        return float(getattr(self, fault) / ALWAYS)

    def packets(self, cause: Cause) -> int:
        """Packets offered, by what became of them."""
        return int(self.cause_packets[CAUSES.index(cause)])

    def bytes_in(self, cause: Cause) -> int:
        """Bytes offered, by what became of them."""
        return int(self.cause_bytes[CAUSES.index(cause)])

    def faults(self, fault: Fault) -> int:
        """Packets that met a fault."""
        return int(self.fault_packets[FAULTS.index(fault)])


def check_share(fault: str, value: float) -> None:
    """RequestError unless there is such a fault and ``value`` is a share of packets."""
    if fault not in PROBABILITIES:
        raise RequestError(f'there is no random fault "{fault}"', f"take one of: {', '.join(PROBABILITIES)}")
    if not 0 <= value <= 1:
        raise RequestError(f"{fault} is {value}", "give a share of packets, 0 to 1")


def check_rate(rate_bps: int) -> None:
    """RequestError unless a live port can have this line rate, bits per second."""
    least, most = RATES_BPS
    if not least <= rate_bps <= most:
        raise RequestError(f"a rate of {rate_bps} b/s cannot be kept", f"give {least} to {most} bits per second")


def offset(name: str) -> int:
    """Where a field stands in a record."""
    field: int = getattr(PortRecord, name).offset
    return field


def cause_offset(cause: Cause) -> tuple[int, int]:
    """Where a cause's packets and bytes stand."""
    place = 8 * CAUSES.index(cause)
    return offset("cause_packets") + place, offset("cause_bytes") + place


def fault_offset(fault: Fault) -> int:
    """Where a fault's packets stand."""
    return offset("fault_packets") + 8 * FAULTS.index(fault)
