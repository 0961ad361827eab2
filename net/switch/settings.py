"""What the ports of a live fabric are set to: thresholds, code points, and each port's share of them.

Use: ``FabricSettings(ecn_bytes=50_000).queue(link, port)`` is the QueueConfig of one port.
Limits: a live fabric runs in namespaces of one machine; 50 to 200 Mb/s per port is what its clock can keep.
Errors: RequestError, SimError.
Source: as net.switch.model; code points as net.mrc.frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from net.errors import RequestError
from net.mrc.frame import DSCP, TRIM_BYTES_MIN, Dscp
from net.switch.model import QueueConfig
from net.topology import Link, Port, Tier

MTU_BYTES = 9000
ENGINES = ("kernel", "ebpf", "scapy")


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """All ports of a fabric.

    engine: "kernel" (seg6 of the kernel, eBPF queue), "ebpf" (the whole switch in eBPF), "scapy" (Python, slow).
    ecn_bytes, trim_bytes, last_hop_trim_bytes, limit_bytes, priority_limit_bytes, trim_size_bytes: see QueueConfig;
    ports to hosts never mark, hosts' own ports neither mark nor trim nor drop.
    shape: False lets packets pass at the machine's speed; verdicts are still those of the line rate.
    reorder_s: how long a packet that is to be overtaken is held back, seconds.
    dscp: which code points are served first, and which may be trimmed.
    """

    engine: str = "kernel"
    ecn_bytes: int | None = 50_000
    trim_bytes: int | None = 200_000
    last_hop_trim_bytes: int | None = 300_000
    limit_bytes: int = 2_000_000
    priority_limit_bytes: int = 1 << 20
    trim_size_bytes: int = 128
    shape: bool = True
    reorder_s: float = 0.005
    dscp: Dscp = field(default=DSCP)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise RequestError(f'there is no switch engine "{self.engine}"', f"take one of: {', '.join(ENGINES)}")
        if not TRIM_BYTES_MIN <= self.trim_size_bytes <= MTU_BYTES:
            raise RequestError(f"trim_size_bytes is {self.trim_size_bytes}", f"give {TRIM_BYTES_MIN} to {MTU_BYTES}")

    def queue(self, link: Link, port: Port) -> QueueConfig:
        """The queue by which ``port`` sends into ``link``."""
        if port.node.tier is Tier.HOST:
            return QueueConfig(link.rate_bps, limit_bytes=1 << 40, priority_limit_bytes=1 << 40)
        last = link.lower.node.tier is Tier.HOST
        return QueueConfig(
            link.rate_bps,
            ecn_bytes=None if last else self.ecn_bytes,
            trim_bytes=self.last_hop_trim_bytes if last else self.trim_bytes,
            trim_size_bytes=self.trim_size_bytes,
            limit_bytes=self.limit_bytes,
            priority_limit_bytes=self.priority_limit_bytes,
        )

    def trim_dscp(self, link: Link) -> int:
        """The code point of what is cut by ports into ``link``."""
        last = link.lower.node.tier is Tier.HOST
        return self.dscp.trimmed_lasthop if last else self.dscp.trimmed

    @property
    def priority(self) -> tuple[int, ...]:
        """Code points that are served first."""
        return (self.dscp.control, self.dscp.trimmed, self.dscp.trimmed_lasthop)

    @property
    def trimmable(self) -> tuple[int, ...]:
        """Code points that may be trimmed."""
        return (self.dscp.trimmable, self.dscp.trimmable_retx)
