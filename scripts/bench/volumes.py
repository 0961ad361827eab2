"""What volumes cost in the compiled stages, in one process: beside a memory namespace, and by the size of the map.

    scripts/bench/volumes [--quick] [--rounds N]

The guest's side is the compiled C of scripts/bench/fastpath (needs gcc), and what is timed is a pass, as there. All
is 4 KiB at queue depth 32, in memory, with stamps and counters on.

* ``written``: a thin volume whose clusters of 1 MiB are its own, served by the asic alone, against a memory namespace
  with the same footprint; the ratio is that of the rates, by pairs.
* ``soc``: the same with ``offload`` off: every command passes through both virtual queues.
* ``first``: each command allocates a cluster of 4 KiB that was never touched before; control has filled the pool.
* ``lookup``: reads of a volume with 10 K, 1 M, 10 M mapped clusters in random order, all of them the same 256 MiB of
  data; ``memory`` is what the maps took. The ratio is that of times per command, to the first.

Budgets (issue 4, section 6): written 0.95; soc 500 K IOPS; first 200 K IOPS; lookup 1.2.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpu import layout
from dpu.backends import MemoryBackend
from dpu.guestmap import Mapping
from dpu.volumes.area import Area
from scripts.bench import common
from scripts.bench.fastpath import BLOCK, READ, WRITE, Case, Rig, build, product_pass
from tests.unit.volume_lab import FakeVolume

DATA_BYTES = 256 << 20
HOT = 8 << 20
SHIFT = 20
EPOCH = 1
OPERATIONS = {"read": READ, "write": WRITE}
LOOKUP_CLUSTERS = (10_000, 1_000_000, 10_000_000)
FIRST_COMMANDS = 8000  # less than a pool holds


@dataclass
class Group:
    """A group of one volume on the memory back end."""

    area: Area
    volume: FakeVolume

    def map(self, places: Any) -> None:
        """Have the volume own ``places``, cluster by cluster."""
        area, v = self.area, self.area.volumes[0]
        v.clusters = len(places)
        leaves = -(-len(places) // layout.LEAF_ENTRIES)
        area.roots[:leaves] = np.arange(1, leaves + 1)
        area.leaf_epochs[1 : leaves + 1] = EPOCH
        area.leaves[1 : leaves + 1].reshape(-1)[: len(places)] = places | EPOCH << layout.PLACE_BITS

    def empty(self, clusters: int) -> None:
        """Nothing is mapped any more; the pools are full of clusters that come next."""
        area = self.area
        area.take_back(area.pool(0))
        area.take_back(area.leaf_pool(0))
        area.drain(0)
        area.volumes[0].clusters = clusters
        area.roots[: -(-clusters // layout.LEAF_ENTRIES)] = 0
        area.fill(area.leaf_pool(0), np.arange(1, layout.RING_ENTRIES + 1))
        area.fill(area.pool(0), np.random.default_rng(1).permutation(layout.RING_ENTRIES))


@contextlib.contextmanager
def group(memory: MemoryBackend, mapping: Mapping, shift: int, clusters: int) -> Iterator[Group]:
    area = Area.create(shift)
    area.backings[0] = (0, memory.size_bytes >> shift)
    area.set_backing(0, layout.KIND_MEMORY, memory.fd, start=0, host=mapping.host)
    v = area.volumes[0]
    v.state, v.epoch, v.root_words = layout.VOLUME_LIVE, EPOCH, layout.ROOT_WORDS
    volume = FakeVolume("volume", BLOCK, (clusters << shift) // BLOCK, uuid.uuid4(), supports_discard=True)
    volume.area, volume.number = area, 0
    yield Group(area, volume)
    area.close()


def case(name: str, opcode: int, footprint: int) -> Case:
    return Case(name, 1, 32, opcode, 4096, footprint)


class Bench:
    def __init__(self, library: ctypes.CDLL, arguments: argparse.Namespace, report: common.Report) -> None:
        self.library, self.arguments, self.results = library, arguments, report.results
        product = product_pass(cache=True)
        self.product = product.address
        self._keep = product
        self.memory = MemoryBackend.create("bench", BLOCK, DATA_BYTES // BLOCK, uuid.uuid4())
        self.mapping = Mapping(self.memory.fd, DATA_BYTES)
        ctypes.memset(self.mapping.host, 0x5A, DATA_BYTES)

    @contextlib.contextmanager
    def rig(self, one: Case, backend: Any) -> Iterator[Rig]:
        rig = Rig(one, self.library, {False: backend}, self.mapping)
        try:
            yield rig
        finally:
            rig.close()

    def ns(self, rig: Rig, commands: int) -> float:
        """Nanoseconds per command: of the median pass."""
        return rig.round(self.product, commands)[0] * int(rig.poller.record.ns_mult) / (1 << 20) / rig.per_pass

    def written(self) -> None:
        rows = []
        clusters = HOT >> SHIFT
        places = np.arange(clusters, dtype=np.int64)
        for offload in (True, False):
            for name, opcode in OPERATIONS.items():
                one = case(name, opcode, HOT)
                with group(self.memory, self.mapping, SHIFT, clusters) as made:
                    made.map(places)
                    made.area.set_offload(offload)
                    with self.rig(one, self.memory) as plain, self.rig(one, made.volume) as volume:
                        sides = {"memory": plain, "volume": volume}
                        times: dict[str, list[float]] = {side: [] for side in sides}
                        for rig in sides.values():
                            self.ns(rig, self.arguments.commands // 4)
                        for number in range(self.arguments.rounds):
                            for side in sorted(sides, reverse=bool(number % 2)):
                                times[side].append(self.ns(sides[side], self.arguments.commands))
                ratio = common.spread([a / b for a, b in zip(times["memory"], times["volume"])])
                iops = common.spread([1e9 / ns for ns in times["volume"]], 0)
                part = self.results.setdefault("written" if offload else "soc", {})
                part[name] = {"ratio": ratio, "iops": iops, "ns": {k: common.spread(v, 1) for k, v in times.items()}}
                if offload:
                    part[name]["budget"] = {"least": 0.95, "met": ratio["median"] >= 0.95}
                else:
                    part[name]["budget"] = {"least": 500_000, "met": iops["median"] >= 500_000}
                medians = [statistics.median(times[side]) for side in ("memory", "volume")]
                rows.append([f"{name}, {'offload' if offload else 'soc'}", *medians, ratio["median"], iops["median"]])
        common.table(["4 KiB QD 32", "memory ns", "volume ns", "ratio of rates", "IOPS"], rows)

    def first(self) -> None:
        """The data memory is new in each round: its pages are taken by the writes."""
        clusters = 1 << 20
        rates = []
        for _ in range(self.arguments.rounds):
            size = layout.RING_ENTRIES << 12
            memory = MemoryBackend.create("first", BLOCK, size // BLOCK, uuid.uuid4())
            mapping = Mapping(memory.fd, size)
            with group(memory, mapping, 12, clusters) as made:
                made.empty(clusters)
                with self.rig(case("first", WRITE, clusters << 12), made.volume) as rig:
                    rates.append(1e9 / self.ns(rig, FIRST_COMMANDS))
            mapping.close()
            memory.close()
        iops = common.spread(rates, 0)
        self.results["first"] = {"iops": iops, "budget": {"least": 200_000, "met": iops["median"] >= 200_000}}
        common.table(["first writes", "IOPS"], [["4 KiB clusters", iops["median"]]])

    def lookup(self) -> None:
        dice = np.random.default_rng(1)
        with contextlib.ExitStack() as stack:
            rigs, memory = {}, {}
            for count in LOOKUP_CLUSTERS[: 2 if self.arguments.quick else 3]:
                made = stack.enter_context(group(self.memory, self.mapping, 12, count))
                made.map(dice.integers(DATA_BYTES >> 12, size=count, dtype=np.int64))
                rigs[count] = stack.enter_context(self.rig(case(str(count), READ, count << 12), made.volume))
                memory[count] = os.fstat(made.area.fd).st_blocks * 512
            times: dict[int, list[float]] = {count: [] for count in rigs}
            for rig in rigs.values():
                self.ns(rig, self.arguments.commands // 4)
            for _ in range(self.arguments.rounds):
                for count, rig in rigs.items():
                    times[count].append(self.ns(rig, self.arguments.commands))
        rows = []
        for count, values in times.items():
            ratio = common.spread([a / b for a, b in zip(values, times[LOOKUP_CLUSTERS[0]])])
            self.results.setdefault("lookup", {})[str(count)] = {
                "ns": common.spread(values, 1),
                "ratio": ratio,
                "map_bytes": memory[count],
                "budget": {"most": 1.2, "met": ratio["median"] <= 1.2},
            }
            rows.append([count, statistics.median(values), ratio["median"], memory[count] / count])
        common.table(["mapped clusters", "ns", "to the first", "bytes per cluster"], rows)


def main() -> None:
    parser = common.parser(__doc__, "volumes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commands", type=int, default=200_000, help="of one run of a round")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.commands = 2, 4000
    report = common.Report("volumes", arguments)
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(build(Path(directory)), arguments, report)
        bench.written()
        bench.first()
        bench.lookup()
    report.write()


if __name__ == "__main__":
    main()
