"""Controllers that come and go beside one that is busy: nothing is left behind in the worker or the keeper."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.conformance.test_kill_points import connected, running
from tests.support import nvme_driver as nv
from tests.support.daemon import NS_512, Daemon
from tests.support.load import Load
from tests.support.nvme_driver import PAGE

ROUNDS, WARM_UP = 50, 5
GROWTH_BYTES_MAX = 4 << 20  # one controller's records are more than 1 MiB


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def mapped_files(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:")


def anonymous_bytes(pid: int) -> int:
    match = re.search(r"^Anonymous: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    assert match is not None
    return int(match[1]) << 10


def rpc_connections(daemon: Daemon) -> int:
    """Those of JSON-RPC that the daemon has yet to close, some time after its answer (unix(7), state 3)."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(row[5] == "03" and row[7:] == [daemon.rpc_path] for row in rows)


def settled(daemon: Daemon, controllers: int, limits: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
    """(descriptors of the keeper, of the worker, mapped files) when so many controllers are left, and no RPC.

    Waits until none is above ``limits``; without them, until twice the same is seen.
    """
    deadline = time.monotonic() + nv.DEADLINE_S
    last = (0, 0, 0)
    while True:
        count, worker = len(daemon.rpc("dpu_get_stats")["controllers"]), daemon.worker_pid()
        while rpc_connections(daemon):
            assert time.monotonic() < deadline, "a connection of JSON-RPC stays open"
        assert daemon.process is not None
        now = descriptors(daemon.process.pid), descriptors(worker), mapped_files(worker)
        enough = now == last if limits is None else all(one <= limit for one, limit in zip(now, limits, strict=True))
        if count == controllers and enough:
            return now
        last = now
        assert time.monotonic() < deadline, f"{count} controllers, {now}, not {limits}"


@pytest.mark.parametrize("listener", [{"disable_msix": True}, {}], ids=["msi", "msix"])
def test_fifty_rounds_beside_a_load(listener: dict[str, bool]) -> None:
    """Connect, use, leave; every other time with commands under way and queues not deleted."""
    with running() as (daemon, target, _), connected(target) as busy:
        busy.enable()
        load = Load(busy, busy.create_queue_pair(1, 64), NS_512, depth=16)
        plugged = daemon.add_subsystem("nqn.2026-01.io.test:plug", [daemon.add_memory("plug")], listener=listener)
        worker = daemon.worker_pid()
        before, grown = (0, 0, 0), 0
        for turn in range(ROUNDS):
            load.run(10)
            with connected(plugged) as nvme:
                nvme.enable()
                queues = [nvme.create_queue_pair(qid, 16) for qid in (1, 2)]
                data = bytes([turn]) * PAGE
                nvme.write(queues[0], 1, turn, data)
                assert nvme.read(queues[1], 1, turn, PAGE) == data
                if turn % 2:
                    buffer = nvme.ram.buffer(PAGE)
                    for _ in range(10):
                        nvme.submit_io(queues[0], nv.WRITE, 1, turn, buffer)
                else:
                    nvme.delete_sq(queues[0])
                    nvme.shutdown()
            if turn == WARM_UP:
                before = settled(daemon, 1)
                grown = anonymous_bytes(worker)
        settled(daemon, 1, before)
        grown = anonymous_bytes(worker) - grown
        load.run(50)
        load.finish()
        assert daemon.worker_pid() == worker
        assert grown < GROWTH_BYTES_MAX, f"{grown >> 10} KiB more after {ROUNDS - WARM_UP} rounds"
