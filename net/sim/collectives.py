"""Collective operations of simulated hosts: ring all-reduce and all-to-all, with real data, checked at the end.

A ring all-reduce is 2 (n - 1) steps: in each, a host sends a part to the next one as soon as the step before has
arrived from the previous one; half of the steps add up, half pass on the sums. Each part goes in pieces, which wait
for nobody but themselves. An all-to-all has everybody write a block to everybody else. With several lanes, pieces or
shares of blocks are spread over so many queue pairs.

Use: ``ring = RingAllReduce(network, order, size_bytes, qp, paths)``; ``network.run(...)``; ``ring.done_ps``;
``ring.check()``.
Errors: SimError. Source: arXiv 2605.04333 section 5.2.7 (the two patterns); the ring algorithm is common knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from net.errors import SimError
from net.mrc.endpoint import Completion, Kind
from net.mrc.paths import PathSettings
from net.mrc.requestor import QpSettings
from net.sim.mrc import MrcHost, connect
from net.sim.network import Network

WORD_BYTES = 4


class Collective:
    """What both have in common. ``done_ps``: when the last host had everything, None before."""

    bytes_per_host: int
    """What each host sends."""

    def __init__(self, network: Network, order: Sequence[int], memory_bytes: int, lanes: int, baseline: bool) -> None:
        if len(order) < 2 or lanes < 1:
            raise SimError(f"{len(order)} hosts and {lanes} lanes", "give at least 2 hosts and 1 lane")
        self.network = network
        self.lanes = lanes
        self.done_ps: int | None = None
        self.hosts = [MrcHost(host, network, memory_bytes, baseline=baseline) for host in order]
        self._left = 0
        for rank, host in enumerate(self.hosts):
            host.on_completion = self._hook(rank)

    def _hook(self, rank: int) -> Callable[[Completion], None]:
        def arrived(completion: Completion) -> None:
            if completion.kind is Kind.IMMEDIATE:
                self._arrived(rank, completion.value)
                self._left -= 1
                if not self._left:
                    self.done_ps = self.network.sim.now_ps

        return arrived

    def _arrived(self, rank: int, immediate: int) -> None:
        """An immediate came to a host."""

    def check(self) -> None:
        """Compares every result; AssertionError when one is wrong."""
        raise NotImplementedError


class RingAllReduce(Collective):
    """``order``: the ring. ``size_bytes`` per host: a multiple of hosts x pieces x 4."""

    def __init__(
        self,
        network: Network,
        order: Sequence[int],
        size_bytes: int,
        qp: QpSettings,
        paths: PathSettings,
        lanes: int = 1,
        *,
        pieces: int = 8,
        baseline: bool = False,
    ) -> None:
        count = len(order)
        if size_bytes % (count * pieces * WORD_BYTES):
            raise SimError(f"{size_bytes} bytes", f"give a multiple of {count * pieces * WORD_BYTES}")
        self.pieces = pieces
        self.piece_bytes = size_bytes // (count * pieces)
        self.steps = 2 * (count - 1)
        self.bytes_per_host = self.steps * size_bytes // count
        super().__init__(network, order, self.steps * pieces * self.piece_bytes, lanes, baseline)
        self._left = count * self.steps * pieces
        words = self.piece_bytes // WORD_BYTES
        numbers = np.random.default_rng(network.seed)
        shape = (count, pieces, count, words)  # rank, piece, part, word
        self.vectors = numbers.integers(0, 1 << 20, size=shape, dtype=np.uint32)
        self.sums = self.vectors.sum(axis=0, dtype=np.uint32)
        for rank, host in enumerate(self.hosts):
            for lane in range(lanes):
                if count > 2 or rank == 0:  # two hosts share the queue pair
                    connect(host, self.hosts[(rank + 1) % count], qp, paths, lane=lane)
        for rank in range(count):
            for piece in range(pieces):
                network.sim.at(network.sim.now_ps, self._send, rank, piece, 0, rank)

    def _send(self, rank: int, piece: int, step: int, part: int) -> None:
        following = self.hosts[(rank + 1) % len(self.hosts)]
        slot = step * self.pieces + piece
        data = self.vectors[rank, piece, part].tobytes()
        lane = piece % self.lanes
        self.hosts[rank].write(following, data, slot * self.piece_bytes, slot, immediate=slot, lane=lane)

    def _arrived(self, rank: int, immediate: int) -> None:
        count = len(self.hosts)
        step, piece = divmod(immediate, self.pieces)
        part = (rank - 1 - step) % count
        start = immediate * self.piece_bytes
        data: Any = np.frombuffer(self.hosts[rank].memory, np.uint32, self.piece_bytes // WORD_BYTES, start)
        if step < count - 1:
            self.vectors[rank, piece, part] += data
        else:
            self.vectors[rank, piece, part] = data
        if step + 1 < self.steps:
            self._send(rank, piece, step + 1, part)

    def check(self) -> None:
        """See Collective: every host has the sum of all."""
        assert all(np.array_equal(vector, self.sums) for vector in self.vectors)


class AllToAll(Collective):
    """``block_bytes`` from each to each: a multiple of the lanes."""

    def __init__(
        self,
        network: Network,
        order: Sequence[int],
        block_bytes: int,
        qp: QpSettings,
        paths: PathSettings,
        lanes: int = 1,
        *,
        baseline: bool = False,
    ) -> None:
        if block_bytes % lanes:
            raise SimError(f"{block_bytes} bytes", f"give a multiple of {lanes}")
        count = len(order)
        super().__init__(network, order, count * block_bytes, lanes, baseline)
        self.block_bytes = block_bytes
        self.bytes_per_host = (count - 1) * block_bytes
        self._left = count * (count - 1) * lanes
        numbers = np.random.default_rng(network.seed)
        self.blocks = numbers.integers(0, 256, size=(count, count, block_bytes), dtype=np.uint8)
        for rank, host in enumerate(self.hosts):
            for other in self.hosts[rank + 1 :]:
                for lane in range(lanes):
                    connect(host, other, qp, paths, lane=lane)
        for rank in range(count):
            network.sim.at(network.sim.now_ps, self._send_all, rank)

    def _send_all(self, rank: int) -> None:
        """To the next one first, so that not everybody begins with the same host."""
        count, size = len(self.hosts), self.block_bytes // self.lanes
        for offset in range(1, count):
            to = (rank + offset) % count
            for lane in range(self.lanes):
                data = self.blocks[rank, to, lane * size : (lane + 1) * size].tobytes()
                place = rank * self.block_bytes + lane * size
                self.hosts[rank].write(self.hosts[to], data, place, to, immediate=rank, lane=lane)

    def check(self) -> None:
        """See Collective: every host has the block of each other one."""
        for to, host in enumerate(self.hosts):
            memory = np.frombuffer(host.memory, np.uint8).reshape(len(self.hosts), self.block_bytes)
            for rank in range(len(self.hosts)):
                assert rank == to or np.array_equal(memory[rank], self.blocks[rank, to]), (rank, to)
