"""The books of served commands against a naive model: counters by back end, counted as the commands happen."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpu import layout
from dpu.iostat import IoStat, Row

CLIENTS, NSIDS, BDEVS = 3, 4, ["a", "b", "c"]
OPS = {  # an op -> words of a row, SPDK's names
    "read": ("reads", "bytes_read", "num_read_ops", "bytes_read"),
    "write": ("writes", "bytes_written", "num_write_ops", "bytes_written"),
    "unmap": ("unmaps", "bytes_unmapped", "num_unmap_ops", "bytes_unmapped"),
    "copy": ("copies", "bytes_copied", "num_copy_ops", "bytes_copied"),
}
VECTORS = json.loads((Path(__file__).parents[1] / "conformance" / "spdk_rpc_vectors.json").read_text())
KEYS = list(
    next(
        row["answer"]["result"]["bdevs"][0]
        for row in VECTORS["calls"]
        if row["request"]["method"] == "bdev_get_iostat"
    )
)


class Lab:
    """Rows as pollers would count in them, and what the model has seen."""

    def __init__(self) -> None:
        self.spaces: dict[int, Any] = {}
        self.serves: dict[tuple[int, int], str] = {}
        self.seen: dict[str, Counter[str]] = {name: Counter() for name in BDEVS}
        self.latencies: dict[tuple[str, str], list[int]] = {}
        self.stat = IoStat()

    def open(self, client: int) -> None:
        self.spaces[client] = np.zeros(NSIDS, layout.SPACE).view(np.recarray)

    def rows(self, client: int | None = None) -> list[Row]:
        clients = [client] if client is not None else list(self.spaces)
        return [Row(c, n + 1, c % 2 + 1, self.spaces[c][n]) for c in clients for n in range(NSIDS)]

    def attach(self, client: int, nsid: int, bdev: str) -> None:
        self.stat.attach(self.rows(client)[nsid - 1], bdev)
        self.serves[client, nsid] = bdev

    def command(self, client: int, nsid: int, op: str, size: int, spent: int) -> None:
        row, bdev = self.spaces[client][nsid - 1], self.serves[client, nsid]
        count, bytes_, theirs, their_bytes = OPS[op]
        row[count] += 1
        row[bytes_] += size
        row[f"{op}_ticks"] += spent
        row[f"{op}_ticks_max"] = max(row[f"{op}_ticks_max"], spent)
        row[f"{op}_ticks_min"] = min(row[f"{op}_ticks_min"] or spent, spent)
        self.seen[bdev] += Counter({theirs: 1, their_bytes: size, f"{op}_latency_ticks": spent})
        self.latencies.setdefault((bdev, op), []).append(spent)

    def close(self, client: int, twice: bool) -> None:
        self.stat.settle(self.rows(client))
        if twice:  # a worker killed after the commit: the next one does it again
            self.kill()
            self.stat.settle(self.rows(client))
        self.stat.forget(client)
        del self.spaces[client]
        self.serves = {key: bdev for key, bdev in self.serves.items() if key[0] != client}

    def kill(self) -> None:
        """A worker dies just after a commit; the next one has the configuration and the rows."""
        config = json.loads(json.dumps(self.stat.to_config()))
        self.stat = IoStat()
        self.stat.from_config(config)
        self.stat.keep(BDEVS)

    def check(self) -> None:
        for bdev in BDEVS:
            report = self.stat.report(bdev, self.rows())
            assert list(report) == KEYS and report["name"] == bdev
            for key in KEYS[1:-1]:
                if key.startswith(("max_", "min_")):
                    spent = self.latencies.get((bdev, key.split("_")[1]), [])
                    assert report[key] == (max if key.startswith("max_") else min)(spent, default=0), (bdev, key)
                else:
                    assert report[key] == self.seen[bdev][key], (bdev, key)


@pytest.mark.parametrize("seed", range(30))
def test_against_the_model(seed: int) -> None:
    dice = random.Random(seed)
    lab = Lab()
    for _ in range(150):
        step = dice.random()
        client, nsid = dice.randrange(CLIENTS), dice.randrange(NSIDS) + 1
        if client not in lab.spaces:
            lab.open(client)
        elif step < 0.1:
            lab.attach(client, nsid, dice.choice(BDEVS))
        elif step < 0.14:
            lab.close(client, twice=dice.random() < 0.5)
        elif step < 0.17:
            lab.kill()
        elif step < 0.2:
            bdev = dice.choice(BDEVS)
            lab.stat.reset([bdev], lab.rows(), "all")
            lab.seen[bdev].clear()
            lab.latencies = {key: found for key, found in lab.latencies.items() if key[0] != bdev}
        elif step < 0.23:
            bdev = dice.choice(BDEVS)
            lab.stat.reset([bdev], lab.rows(), "maxmin")
            lab.latencies = {key: found for key, found in lab.latencies.items() if key[0] != bdev}
        elif (client, nsid) in lab.serves:
            lab.command(client, nsid, dice.choice(list(OPS)), dice.randrange(1, 1 << 20), dice.randrange(1, 1 << 30))
        lab.check()


def test_errors_have_spdks_names_and_can_be_reset_alone() -> None:
    lab = Lab()
    lab.open(0)
    lab.attach(0, 1, "a")
    lab.command(0, 1, "read", 512, 9)
    assert lab.stat.report("a", lab.rows())["io_error"] == {}
    lab.spaces[0][0].media_errors, lab.spaces[0][0].miscompares = 3, 2
    assert lab.stat.report("a", lab.rows())["io_error"] == {"failed": 3, "miscompare": 2}
    lab.stat.reset(["b"], lab.rows(), "error")
    lab.stat.reset(["a"], lab.rows(), "none")
    assert lab.stat.report("a", lab.rows())["io_error"] == {"failed": 3, "miscompare": 2}
    lab.stat.reset(["a"], lab.rows(), "error")
    report = lab.stat.report("a", lab.rows())
    assert (report["io_error"], report["num_read_ops"], report["max_read_latency_ticks"]) == ({}, 1, 9)


def test_channels_are_the_pollers_that_serve_now() -> None:
    lab = Lab()
    for client in range(3):
        lab.open(client)
        lab.attach(client, 1, "a")
        lab.command(client, 1, "write", 100 << client, 5)
    channels = lab.stat.report_channels("a", lab.rows())
    assert [(one["thread_id"], one["bytes_written"]) for one in channels] == [(1, 100 + 400), (2, 200)]
    assert list(channels[0]) == ["thread_id", *KEYS[1:]]
    assert lab.stat.report_channels("b", lab.rows()) == []


def test_a_deleted_back_end_leaves_nothing() -> None:
    lab = Lab()
    lab.open(0)
    lab.attach(0, 1, "a")
    lab.command(0, 1, "read", 512, 9)
    lab.stat.settle(lab.rows())
    lab.stat.keep(["b"])
    lab.command(0, 1, "read", 512, 9)  # by nobody's leave; it is nobody's
    lab.stat.settle(lab.rows())
    assert lab.stat.to_config()["past"] == {}
    lab.attach(0, 1, "a")  # a new one of the same name
    assert lab.stat.report("a", lab.rows())["num_read_ops"] == 0
    lab.stat.forget(0)
    assert lab.stat.to_config() == {"past": {}, "attached": []}


def test_a_row_whose_attachment_was_not_stored_yet() -> None:
    """A client has connected and done I/O; the worker dies before anything else is committed."""
    lab = Lab()
    lab.open(0)
    lab.attach(0, 1, "a")
    lab.command(0, 1, "read", 512, 9)
    lab.stat = IoStat()
    lab.attach(0, 1, "a")
    lab.check()
