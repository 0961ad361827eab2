"""Frames that tests send: MRC writes along a path, made by net.mrc.frame; and waiting for counters."""

from __future__ import annotations

import time
from collections.abc import Callable

from net.fabric import Fabric
from net.mrc.frame import DSCP, ECN_ECT, Frame, encode_frame, message
from net.mrc.wire import Bth, Meth, Opcode, Reth
from net.topology import Path


def write(
    fabric: Fabric,
    path: Path,
    psn: int,
    *,
    payload: int = 64,
    dscp: int = DSCP.trimmable,
    ecn: int = ECN_ECT,
    ev: int = 0,
    dqp: int = 5,
) -> bytes:
    """A write of ``payload`` bytes from its Ethernet header on, as the path's host sends it."""
    plan = fabric.plan
    source = plan.host_address(path.src, path.plane).packed
    text = message(Bth(Opcode.WRITE_ONLY, dqp=dqp, psn=psn), Meth(), Reth(0, 0, payload), payload=bytes(payload))
    frame = Frame(
        source,
        plan.host_address(path.dst, path.plane).packed,
        ev,
        text,
        dscp=dscp,
        ecn=ecn,
        outer_src=source,
        outer_dst=plan.carrier(path).packed,
    )
    port = fabric.topology.path_ports(path)[0]
    return fabric.wiring.ethernet(port) + encode_frame(frame)


def first_link(fabric: Fabric, path: Path) -> str:
    """The link that a path begins with."""
    return fabric.topology.host_link(path.plane, path.src).name


def last_link(fabric: Fabric, path: Path) -> str:
    """The link that a path ends with."""
    return fabric.topology.host_link(path.plane, path.dst).name


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    """Looks again and again: counters in shared memory announce nothing."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.002)


def settle(fabric: Fabric, link: str, by: str, packets: int) -> None:
    """Until so many packets have been offered to a port."""
    until(lambda: sum(fabric.counters(link, by).packets.values()) >= packets, f"{packets} packets at {link} by {by}")
