"""`emu fabric write`: MRC writes between hosts of a fabric that is up, all at once, each checked at its end.

Use: ``write(topology, namespaces, board, ["h0:h3", "h1:h3"], size)``, an incast; then ``check`` what it returns.
Parameters: size in bytes, of each pair.
Limits: one thread makes and takes all packets, some ten megabytes a second; time is the machine's, not dilated, and
rates are shares of the line. While it runs, `emu fabric show` has the states of the entropy values.
Errors: EmuError.
Source: net.mrc.live.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpu.errors import EmuError, UsageError
from net.mrc.endpoint import Completion, Kind
from net.mrc.live import LiveEndpoint, host_ports, poll_all
from net.mrc.requestor import Identity, Status
from net.namespaces import inside
from net.sim.mrc import qpn
from net.srv6 import Plan
from net.topology import Topology
from net.wiring import Cabling

CHUNK_BYTES = 256 * 1024
STALL_S = 30.0
Document = dict[str, Any]


class _Transfer:
    """One pair: ``src`` writes ``size`` bytes of noise into the memory of ``dst``."""

    def __init__(self, src: LiveEndpoint, dst: LiveEndpoint, size: int, lane: int) -> None:
        self.src, self.dst = src, dst
        self.qpn, theirs = qpn(dst.host, lane), qpn(src.host, lane)
        self.data, self.memory = random.Random(src.host).randbytes(size), bytearray(size)
        self.left = self.chunks = -(-size // CHUNK_BYTES)
        self.status = Status.OK
        self.seconds = 0.0
        key = dst.register(self.memory, 0)
        src.connect(Identity(self.qpn, dst.host, theirs))
        dst.connect(Identity(theirs, src.host, self.qpn))
        view = memoryview(self.data)
        for start in range(0, size, CHUNK_BYTES):
            part = view[start : start + CHUNK_BYTES]
            src.write(self.qpn, start, part, start, key)

    def on_completion(self, completion: Completion, seconds: float) -> None:
        self.left -= 1
        self.seconds = seconds
        if completion.status is not Status.OK:
            self.status = completion.status

    def document(self, line_bps: int) -> Document:
        counters = self.src.engine.pairs[self.qpn].requestor.counters
        whole = self.status is Status.OK and not self.left
        return {
            "src": f"h{self.src.host}",
            "dst": f"h{self.dst.host}",
            "bytes": len(self.data),
            "status": self.status.value if not self.left else "stalled",
            "equal": whole and self.memory == self.data,
            "seconds": self.seconds,
            "line_share": 8 * len(self.data) / self.seconds / line_bps if whole else 0.0,
            **{key: counters[key] for key in ("sent", "retransmitted", "nacks", "marks", "timeouts")},
        }


def write(
    topology: Topology, namespaces: Callable[[str], int], board: Path, pairs: Sequence[str], size: int
) -> list[Document]:
    """What became of each of ``pairs`` ("h0:h3"). namespaces: a descriptor of a host's namespace, which is closed."""
    ends = [_pair(topology, pair) for pair in pairs]
    if len(set(ends)) < len(ends):
        raise UsageError("a pair is given twice", "give each once; --size says how much it writes")
    plan, cabling = Plan(topology), Cabling(topology)
    with contextlib.ExitStack() as stack:
        hosts: dict[int, LiveEndpoint] = {}
        for host in sorted({host for pair in ends for host in pair}):
            namespace = namespaces(f"h{host}")
            with inside(namespace):
                rate = topology.host_rate_bps
                made = LiveEndpoint(plan, host, host_ports(cabling, host), rate_bps=rate, board=board)
            os.close(namespace)
            hosts[host] = stack.enter_context(made)
        transfers = [_Transfer(hosts[src], hosts[dst], size, lane) for lane, (src, dst) in enumerate(ends)]
        _drive(list(hosts.values()), {(one.src.host, one.qpn): one for one in transfers})
        return [one.document(topology.host_rate_bps * topology.planes) for one in transfers]


def _drive(hosts: Sequence[LiveEndpoint], transfers: dict[tuple[int, int], _Transfer]) -> None:
    began = heard = time.monotonic()
    while any(one.left for one in transfers.values()) and time.monotonic() < heard + STALL_S:
        for host, completion in poll_all(hosts, 0.1):
            heard = time.monotonic()
            if completion.kind is Kind.WRITE:
                transfers[host.host, completion.qpn].on_completion(completion, heard - began)


def _pair(topology: Topology, text: str) -> tuple[int, int]:
    names = {f"h{number}": number for number in range(topology.hosts)}
    src, _, dst = text.partition(":")
    if src not in names or dst not in names or src == dst:
        raise UsageError(f'"{text}" is no pair of hosts', f"write h0:h1; hosts are h0 to h{topology.hosts - 1}")
    return names[src], names[dst]


def check(documents: Sequence[Document]) -> None:
    """EmuError unless all has arrived."""
    for one in documents:
        if not one["equal"]:
            raise EmuError(
                f"{one['src']} to {one['dst']}: {one['status']}", "`emu fabric show` has losses and EV states"
            )
