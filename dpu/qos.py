"""Rate limits of a back end, as a client sets them by bdev_set_qos_limit.

Use: ``limits = limits.changed(parameters)``; ``dpu.gates`` gives them to the pollers.

Units: I/Os per second and MiB per second of reads and writes together (rw), reads (r) and writes (w), as SPDK's;
rates of r and w I/Os and bursts are ours. Reads are Read, Compare and Verify, writes are Write; other commands are
not limited, as in SPDK.
Limits: a rate is at least 1 (SPDK's least are 1000 I/Os per second).
Source: SPDK's JSON-RPC documentation, bdev_set_qos_limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

_MIB = 1 << 20
_SPDK = ("rw_ios_per_sec", "rw_mbytes_per_sec", "r_mbytes_per_sec", "w_mbytes_per_sec")


@dataclass(frozen=True)
class Limits:
    """Of one back end; 0: none. ``*_burst``: I/Os or MiB that may pass at once after a pause."""

    rw_ios_per_sec: int = 0
    rw_mbytes_per_sec: int = 0
    r_mbytes_per_sec: int = 0
    w_mbytes_per_sec: int = 0
    r_ios_per_sec: int = 0
    w_ios_per_sec: int = 0
    rw_ios_burst: int = 0
    rw_mbytes_burst: int = 0
    r_ios_burst: int = 0
    r_mbytes_burst: int = 0
    w_ios_burst: int = 0
    w_mbytes_burst: int = 0

    def changed(self, given: Mapping[str, int | None]) -> Limits:
        """With what is not None in ``given``; a burst ends with its rate."""
        limits = replace(self, **{name: value for name, value in given.items() if value is not None})
        idle = [name for name in _BURSTS if not getattr(limits, name.replace("burst", "per_sec"))]
        return replace(limits, **dict.fromkeys(idle, 0))

    def describe(self) -> dict[str, int]:
        """``assigned_rate_limits``: SPDK's four, and what is set of ours."""
        return {name: value for name, value in vars(self).items() if name in _SPDK or value}

    def to_config(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if value}

    def bucket(self, name: str) -> tuple[int, int]:
        """(rate per second, burst), in I/Os or bytes, of a bucket of layout.BUCKETS."""
        kind, unit = name.split("_")
        scale, unit = (_MIB, "mbytes") if unit == "bytes" else (1, "ios")
        return scale * getattr(self, f"{kind}_{unit}_per_sec"), scale * getattr(self, f"{kind}_{unit}_burst")


LIMIT_NAMES = tuple(field.name for field in fields(Limits))
_BURSTS = tuple(name for name in LIMIT_NAMES if name.endswith("_burst"))
