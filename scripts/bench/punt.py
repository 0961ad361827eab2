"""Punt round trip: from the poller to control (asyncio) and back, as an admin command or an I/O that misses makes it.

    scripts/bench/punt [--quick] [--commands N]

Two measurements, both by the poller's own stamps (found in its queue -> completion posted, dpu/layout.py:
histogram, 8 steps per octave), so no client's time is in them:

* ``daemon``: Get Features through a real dpud, by the test driver, one at a time: ring, asyncio, decoding, the
  command, saving the controller's state for the next worker, ring. The client's own view is given beside.
* ``rings``: the same poller in this process; control is a bare callback that answers at once. What the rings, the
  two eventfds and asyncio cost by themselves.

The budget (issue 2, section 5: p50 <= 50 us) is about the rings with the management thread in a callback loop.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpu import jitcache

os.environ.setdefault("NUMBA_CACHE_DIR", str(jitcache.directory()[0]))

import numpy as np

from dpu import layout
from dpu.fastpath.poller import Poller, compile_all
from dpu.fastpath.uring import NoRing
from dpu.nvme.interfaces import Completion
from dpu.plane import Plane
from scripts.bench import common
from tests.support.daemon import Daemon
from tests.support.nvme_driver import GET_FEATURES, GuestRam, Nvme

BUDGET_US = 50.0
SPINS = (0, 200, 20_000)  # idle passes before the poller sleeps
ENTRIES = 64
NUMBER_OF_QUEUES = 7  # feature


def percentiles(histogram: Sequence[Sequence[int]]) -> dict[str, float]:
    """p50 and p99 in microseconds of [floor ns, count] rows; the middle of the bucket stands for it."""
    total = sum(count for _, count in histogram)
    found = {"count": float(total)}
    for name, share in (("p50_us", 0.5), ("p99_us", 0.99)):
        seen = 0
        for floor_ns, count in histogram:
            seen += count
            if seen >= share * total:
                found[name] = round(floor_ns * 17 / 16 / 1000, 1)
                break
    return found


def from_daemon(commands: int, spin: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="dpu-p-") as directory:
        with Daemon(Path(directory), env={"DPU_EMU_SPIN": str(spin)}) as daemon:
            target = daemon.standard_target()
            nvme = Nvme(target.path, GuestRam())
            nvme.enable()
            for _ in range(100):
                nvme.get_feature(NUMBER_OF_QUEUES)
            before = _admin_histogram(daemon)
            latencies = np.zeros(commands)
            for i in range(commands):
                begin = time.perf_counter_ns()
                nvme.try_admin(GET_FEATURES, cdw=[NUMBER_OF_QUEUES, 0])
                latencies[i] = time.perf_counter_ns() - begin
            after = _admin_histogram(daemon)
            nvme.close()
    server = [[floor, after[floor] - before.get(floor, 0)] for floor in sorted(after)]
    return {
        "spin": spin,
        "server": percentiles(server),
        "client": {
            "p50_us": round(float(np.percentile(latencies, 50)) / 1000, 1),
            "p99_us": round(float(np.percentile(latencies, 99)) / 1000, 1),
        },
        "load": common.load(),
    }


def _admin_histogram(daemon: Daemon) -> dict[int, int]:
    queues = daemon.rpc("dpu_get_stats")["controllers"][0]["queues"]
    return {int(floor): int(count) for floor, count in next(row for row in queues if row["sqid"] == 0)["latency"]}


class Rings:
    """A poller and a controller whose admin queue is answered by a callback."""

    IOVA = 1 << 32

    def __init__(self, spin: int) -> None:
        self._health = np.zeros(8, np.int64)
        self.poller = Poller(None, int(self._health.ctypes.data), NoRing(), spin=spin)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.fds = [os.memfd_create(name, flags) for name in ("state", "bar", "ram")]
        for fd, size in zip(self.fds, (layout.STATE_BYTES, layout.BAR_FILE_BYTES, 16 * layout.PAGE)):
            os.ftruncate(fd, size)
        fcntl.fcntl(self.fds[2], fcntl.F_ADD_SEALS, 2)  # F_SEAL_SHRINK
        self.plane = Plane(self.poller, self.fds[0], self.fds[1], -1, lambda backend: 0)
        self.plane.adopt_dma(self.IOVA, 16 * layout.PAGE, 3, 0, self.fds[2])
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.plane.set_vectors(0, [self.event])
        self.plane.open_cq(0, ENTRIES, self.IOVA, 0, True, epoch=1)
        self.plane.open_sq(0, ENTRIES, self.IOVA + layout.PAGE, 0, epoch=1)
        self.tail = 0

    def ring(self) -> None:
        """One command more; what it says does not matter, control answers it unread."""
        self.tail = (self.tail + 1) % ENTRIES
        self.plane.doorbells[0] = self.tail
        self.poller.wake()

    async def run(self, commands: int) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        left = commands

        def missed() -> None:
            self.poller.woken()
            for _, slot in self.poller.misses():
                self.plane.finish(slot, Completion(0))

        def completed() -> None:
            nonlocal left
            os.eventfd_read(self.event)
            self.plane.doorbells[1] = self.tail  # the CQ's head follows
            left -= 1
            if left:
                self.ring()
            else:
                done.set()

        loop.add_reader(self.poller.control_fd, missed)
        loop.add_reader(self.event, completed)
        self.plane.begin()
        self.poller.start()
        begin = time.perf_counter()
        self.ring()
        await asyncio.wait_for(done.wait(), 120)
        seconds = time.perf_counter() - begin
        for fd in (self.poller.control_fd, self.event):
            loop.remove_reader(fd)
        self.poller.stop()
        histogram = self.plane.histograms[0]
        rows = [[layout.bucket_floor_ns(int(i)), int(histogram[i])] for i in np.nonzero(histogram)[0]]
        return {
            "spin": int(self.poller.record.spin),
            "server": percentiles(rows),
            "per_second": round(commands / seconds),
            "load": common.load(),
        }


def run(arguments: argparse.Namespace) -> common.Report:
    report = common.Report("punt", arguments)
    compile_all()
    report.results["rings"] = [asyncio.run(Rings(spin).run(arguments.commands)) for spin in SPINS]
    report.results["daemon"] = [from_daemon(arguments.commands, spin) for spin in SPINS[:2]]
    best = min(row["server"]["p50_us"] for row in report.results["rings"])
    default = report.results["rings"][1]["server"]["p50_us"]
    report.results["budget"] = {"p50_us_max": BUDGET_US, "p50_us": default, "best": best, "met": default <= BUDGET_US}
    rows = [
        (
            kind,
            row["spin"],
            row["server"]["p50_us"],
            row["server"]["p99_us"],
            row.get("client", {}).get("p50_us", "-"),
        )
        for kind in ("rings", "daemon")
        for row in report.results[kind]
    ]
    common.table(["punt round trip", "spin", "p50 us", "p99 us", "client's p50 us"], rows)
    return report


def main() -> None:
    parser = common.parser(__doc__, "punt")
    parser.add_argument("--commands", type=int, default=5000)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.commands = 200
    run(arguments).write()


if __name__ == "__main__":
    main()
