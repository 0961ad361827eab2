"""`emu metrics` against a daemon that has done I/O: the same numbers as bdev_get_iostat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.daemon import NS_512, Daemon
from tests.support.nvme_driver import GuestRam, Nvme
from tests.unit.test_metrics import assert_equal, values


def test_equal_to_bdev_get_iostat(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        nvme = Nvme(daemon.standard_target().path, GuestRam())
        nvme.enable()
        queue = nvme.create_queue_pair(1, 16)
        nvme.write(queue, NS_512, 0, bytes(4096))
        nvme.read(queue, NS_512, 0, 1024)
        answer = daemon.rpc("bdev_get_iostat")
        command = [sys.executable, "-m", "emu.cli", "metrics", f"card={daemon.rpc_path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        nvme.close()
    found = values(done.stdout)
    assert len(found) == assert_equal(found, "card", answer) + 1
    written = {("dpu", "card"), ("bdev", "mem512"), ("op", "write")}
    assert found["dpu_bdev_io_bytes_total", frozenset(written)] == 4096
    assert found["dpu_bdev_io_latency_seconds_total", frozenset(written)] > 0
