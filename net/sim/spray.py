"""Queues and spray of one plane at full size, compiled: **no transport**, nothing is acknowledged or sent again.

Time goes in slots, one slot per full packet at line rate; all ports have the same rate. A host sends at most one
packet a slot, to one other host; the packet queues at its T0's uplink, at the T1's downlink, and at the last T0's
port to the host. What finds more than ``trim`` packets before it is counted as trimmed and is gone (its header takes
no time). A link with the switch behind it takes ``delay`` slots. Planes share nothing, so one plane is the whole.

It is the event simulation (net.sim.network) for packets of one size at whole slots: the same queues, in the same
order, to the packet; a test says so at 64 hosts.

Use: ``result = run(SpraySettings(clos(1, 512), slots=200, spray="round robin"))``; ``result.depths[Stage.UP]``;
``result.packet_hops``.
Errors: SimError. Source: arXiv 2605.04333 section 2 for the sizes (131,072 NICs in a plane of 512-port switches).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from net.errors import SimError
from net.sim.network import Stage
from net.topology import Topology

SPRAYS = ("single path", "round robin", "random")
DEPTH_BINS = 256
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class SpraySettings:
    """fabric: its first plane is simulated. slots: in which hosts send. load: chance of a host to send in a slot.

    spray: see SPRAYS. delay: slots per link. trim: packets before a packet above which it is cut (below DEPTH_BINS).
    seed: of destinations (one random cycle through all hosts), sending and spray.
    """

    fabric: Topology
    slots: int = 200
    load: float = 0.9
    spray: str = "round robin"
    delay: int = 3
    trim: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.spray not in SPRAYS:
            raise SimError(f"there is no spray {self.spray!r}", f"give one of {', '.join(SPRAYS)}")
        if not 0 < self.load <= 1:
            raise SimError(f"load is {self.load}", "give a share of the line rate, above 0 and at most 1")
        if not 0 <= self.trim < DEPTH_BINS - 1 or self.delay < 1 or self.slots < 1:
            raise SimError("slots, delay or trim out of range", f"slots and delay from 1, trim 0 to {DEPTH_BINS - 2}")
        if self.fabric.host_rate_bps != self.fabric.uplink_rate_bps:
            raise SimError("ports of two rates", "slots need one: give host_rate_bps and uplink_rate_bps alike")


@dataclass(slots=True)
class SprayResult:
    """``depths``: per stage, how many packets found so many before them. ``seconds``: wall time of the run."""

    sent: int
    received: int
    trimmed: dict[Stage, int]
    packet_hops: int
    seconds: float
    depths: dict[Stage, Counter[int]] = field(default_factory=dict)


def destinations(fabric: Topology, seed: int) -> NDArray[np.int64]:
    """Where each host sends: a random cycle through all of them."""
    order = np.random.default_rng(seed).permutation(fabric.hosts)
    following = np.empty(fabric.hosts, np.int64)
    following[order] = np.roll(order, -1)
    return following


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def mixed(seed: int, host: int, count: int) -> Any:
    """64 random bits for a host's packet of a number (splitmix64)."""
    value = np.uint64(seed) * np.uint64(_MIX1) + np.uint64(host) * np.uint64(_MIX2)
    value += (np.uint64(count) + np.uint64(1)) * np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX2)
    return value ^ (value >> np.uint64(31))


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def sends(seed: int, host: int, slot: int, chance: int) -> Any:
    """Whether a host sends in a slot; ``chance`` of 2^32."""
    return mixed(seed, host, 2 * slot) >> np.uint64(32) < np.uint64(chance)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def walk(seed: int, host: int, uplinks: int, spray: int) -> Any:
    """Where a host's walk over its uplinks starts, and its step: prime to their number, 0 for a single path."""
    own = mixed(seed, host, 1 << 40)
    step = np.int64((own >> np.uint64(32)) % np.uint64(uplinks)) | 1
    while math.gcd(step, uplinks) != 1:
        step += 2
    return np.int64(own % np.uint64(uplinks)), 0 if spray == 0 else step


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def uplink(seed: int, host: int, slot: int, place: int, step: int, uplinks: int, spray: int) -> Any:
    """The T1 for a host's packet, and where its walk stands then: any at random, or the place where it stands."""
    if spray == 2:
        return np.int64(mixed(seed, host, 2 * slot + 1) % np.uint64(uplinks)), place
    return place, (place + step) % uplinks


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _simulate(
    following: Any, seed: int, slots: int, chance: int, spray: int, sizes: Any, delay: int, trim: int, lists: Any,
    counts: Any, depths: Any, trimmed: Any,
) -> tuple[int, int]:  # fmt: skip
    """sizes: hosts, hosts per T0, T1s, T0s. lists, counts: per stage a ring of slots with what arrives in each."""
    hosts, per_t0, uplinks, t0s = sizes
    ring = lists.shape[1]
    finish_up = np.zeros(t0s * uplinks, np.int64)
    finish_down = np.zeros(uplinks * t0s, np.int64)
    finish_last = np.zeros(hosts, np.int64)
    place = np.zeros(hosts, np.int64)
    step = np.zeros(hosts, np.int64)
    for host in range(hosts):
        place[host], step[host] = walk(seed, host, uplinks, spray)
    sent = received = 0
    pending = 0
    slot = 0
    while slot < slots or pending:
        here = slot % ring
        for stage in range(3):
            finish = finish_up if stage == 0 else finish_down if stage == 1 else finish_last
            for index in range(counts[stage, here]):
                entry = lists[stage, here, index]
                dst = entry & 0xFFFFFFFF
                port = entry >> 32
                depth = max(0, finish[port] - slot)
                depths[stage, depth] += 1
                if depth > trim:
                    trimmed[stage] += 1
                    pending -= 1
                    continue
                leaves = slot + depth + 1
                finish[port] = leaves
                if stage == 2:
                    received += 1
                    pending -= 1
                    continue
                after = (leaves + delay) % ring
                if stage == 0:
                    number = (port % uplinks) * t0s + dst // per_t0
                else:
                    number = dst
                lists[stage + 1, after, counts[stage + 1, after]] = number << 32 | dst
                counts[stage + 1, after] += 1
            counts[stage, here] = 0
        if slot < slots:
            after = (slot + 1 + delay) % ring
            for host in range(hosts):
                if not sends(seed, host, slot, chance):
                    continue
                dst = following[host]
                sent += 1
                pending += 1
                chosen, place[host] = uplink(seed, host, slot, place[host], step[host], uplinks, spray)
                if dst // per_t0 == host // per_t0:
                    stage, port = 2, dst
                else:
                    stage, port = 0, host // per_t0 * uplinks + chosen
                lists[stage, after, counts[stage, after]] = port << 32 | dst
                counts[stage, after] += 1
        slot += 1
    return sent, received


def run(settings: SpraySettings) -> SprayResult:
    """Runs until everything has arrived or was trimmed."""
    fabric = settings.fabric
    ring = settings.trim + settings.delay + 3
    room = max(fabric.hosts, fabric.t0_per_plane * fabric.t1_per_plane) + fabric.hosts
    lists = np.empty((3, ring, room), np.int64)
    counts = np.zeros((3, ring), np.int64)
    depths = np.zeros((3, DEPTH_BINS), np.int64)
    trimmed = np.zeros(3, np.int64)
    sizes = (fabric.hosts, fabric.hosts_per_t0, fabric.t1_per_plane, fabric.t0_per_plane)
    chance = round(settings.load * (1 << 32))
    following = destinations(fabric, settings.seed)
    spray = SPRAYS.index(settings.spray)
    begin = time.perf_counter()
    sent, received = _simulate(
        following, settings.seed, settings.slots, chance, spray, sizes, settings.delay, settings.trim, lists, counts,
        depths, trimmed,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    stages = (Stage.UP, Stage.DOWN, Stage.LAST)
    return SprayResult(
        sent,
        received,
        {stage: int(trimmed[n]) for n, stage in enumerate(stages)},
        sent + int(depths.sum()),  # a host's own port is a hop, too
        seconds,
        {
            stage: Counter({depth: int(count) for depth, count in enumerate(depths[n]) if count})
            for n, stage in enumerate(stages)
        },
    )
