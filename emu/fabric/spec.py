"""The scenario's table [fabric]: a few numbers that give any two-tier multi-plane Clos, and its queues.

::

    [fabric]
    planes = 2
    t0 = 2                  # T0 switches per plane; with t1 and hosts, or radix in place of all three
    t1 = 2
    hosts = 2               # below each T0
    rate = "100M"           # bits per second of a host's port; uplink_rate: of a T0-T1 link (default: the same)
    engine = "kernel"       # "ebpf", "scapy"
    ecn = "50K"             # bytes of queue above which packets are marked; false: never
    trim = "200K"           # above which they are trimmed; last_hop_trim: on ports to hosts; false: never

Errors: what is wrong is told with its line (emu.scenario). Source: net.topology, net.switch.settings.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dpu.errors import EmuError
from emu.units import Size
from net.errors import NetError
from net.switch.ports import RATES_BPS
from net.topology import INDEX_MAX, PLANES_MAX, Topology, clos

if TYPE_CHECKING:
    from net.fabric import Fabric
    from net.switch.settings import FabricSettings

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMG]?)(?:bit/s|b/s|bps|bit)?")
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}


def parse_rate(text: str | int) -> int:
    """``text`` in bits per second: a number, or "100M" (powers of 1000). ValueError says what a rate looks like."""
    match = _RATE.fullmatch(str(text).strip()) if isinstance(text, str | int) and not isinstance(text, bool) else None
    if match is None or (rate := round(float(match[1]) * _FACTORS[match[2]])) <= 0:
        raise ValueError(f'{text!r} is not a rate; write bits per second or a text such as "100M"')
    return rate


Rate = Annotated[int, Field(ge=RATES_BPS[0], le=RATES_BPS[1]), BeforeValidator(parse_rate)]
Threshold = Size | Literal[False]


def _bytes(threshold: Any) -> int | None:
    return None if threshold is False else int(threshold)


class FabricSpec(BaseModel):
    """See the module."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    planes: int = Field(default=2, ge=1, le=PLANES_MAX)
    t0: int | None = Field(default=None, ge=1, le=INDEX_MAX)
    t1: int | None = Field(default=None, ge=1, le=INDEX_MAX)
    hosts: int | None = Field(default=None, ge=1, le=INDEX_MAX)
    radix: int | None = Field(default=None, ge=2, le=INDEX_MAX, multiple_of=2)
    rate: Rate = 100_000_000
    uplink_rate: Rate | None = None
    engine: Literal["kernel", "ebpf", "scapy"] = "kernel"
    ecn: Threshold = 50_000
    trim: Threshold = 200_000
    last_hop_trim: Threshold = 300_000
    limit: Size = 2_000_000
    trim_size: int = Field(default=128, ge=122, le=9000)

    @model_validator(mode="after")
    def _consistent(self) -> FabricSpec:
        if self.radix is not None and (self.t0, self.t1, self.hosts) != (None, None, None):
            raise ValueError("radix says how many t0, t1 and hosts there are; leave them out")
        return self

    def topology(self) -> Topology:
        """The fabric; two of everything where nothing is said."""
        uplink = self.uplink_rate or self.rate
        if self.radix is not None:
            return clos(self.planes, self.radix, host_rate_bps=self.rate, uplink_rate_bps=uplink)
        return Topology(self.planes, self.t0 or 2, self.t1 or 2, self.hosts or 2, self.rate, uplink)

    def bring_up(self) -> Fabric:
        """The live fabric, up; EmuError where this machine cannot make it."""
        from net.fabric import Fabric  # Scapy takes a second

        try:
            return Fabric(self.topology(), self.settings())
        except NetError as error:
            raise EmuError(error.message, error.hint) from error

    def settings(self) -> FabricSettings:
        """Its ports."""
        from net.switch.settings import FabricSettings  # MRC's headers take a while

        return FabricSettings(
            engine=self.engine,
            ecn_bytes=_bytes(self.ecn),
            trim_bytes=_bytes(self.trim),
            last_hop_trim_bytes=_bytes(self.last_hop_trim),
            limit_bytes=self.limit,
            trim_size_bytes=self.trim_size,
        )
