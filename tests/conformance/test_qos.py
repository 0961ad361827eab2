"""Rate limits on a running daemon, set by SPDK's RPC, changed under load and over dead workers.

A limit is an upper bound on what passes in a time, so that is what real time is used for: a slow machine passes less.
Exact times, fair shares and death between any two stores are in tests/unit/test_gate.py, under a virtual clock.
"""

from __future__ import annotations

import json
import random
import time

import pytest

from tests.conformance.test_kill_points import connected, running
from tests.support import nvme_driver as nv
from tests.support.daemon import NS_512, NS_FILE, Daemon, RpcError
from tests.support.load import Load
from tests.support.nvme_driver import Command, Nvme, SubmissionQueue

NAMES = {NS_512: "mem512", NS_FILE: "file"}


def limit(daemon: Daemon, name: str, **limits: int) -> None:
    assert daemon.rpc("bdev_set_qos_limit", {"name": name, **limits}) is True


def assigned(daemon: Daemon, name: str) -> dict[str, int]:
    (row,) = daemon.rpc("bdev_get_bdevs", {"name": name})
    return dict(row["assigned_rate_limits"])


def reads(nvme: Nvme, queue: SubmissionQueue, nsid: int, count: int) -> list[Command]:
    buffer = nvme.ram.buffer(4096)
    return [
        nvme.submit(queue, nv.READ, nsid=nsid, prp1=buffer.iova, cdw=[8 * i, 0, 7], ring=i == count - 1)
        for i in range(count)
    ]


@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_no_more_than_the_limit_passes_also_over_a_death(nsid: int) -> None:
    with running() as (daemon, target, _), connected(target) as nvme:
        nvme.enable()
        queue = nvme.create_queue_pair(1, 128)
        limit(daemon, NAMES[nsid], rw_ios_per_sec=100)
        began = time.monotonic()
        commands = reads(nvme, queue, nsid, 60)
        nvme.wait(*commands[:20])
        daemon.kill_worker()
        done = nvme.wait(*commands)
        assert time.monotonic() - began >= 58 / 100  # one at once, and one for a time slice shorter than its price
        assert {one.status for one in done} == {nv.OK}


def test_changes_under_load_lose_nothing() -> None:
    dice = random.Random(11)
    with running() as (daemon, target, _), connected(target) as nvme:
        nvme.enable()
        nvme.enable_shadow_doorbells()
        load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=32)
        for turn in range(50):
            rate = dice.choice([2_000, 5_000, 100_000, 0])
            limit(daemon, "mem512", **{dice.choice(["rw_ios_per_sec", "w_ios_per_sec", "r_ios_per_sec"]): rate})
            limit(daemon, "mem512", rw_mbytes_per_sec=dice.choice([0, 5, 50]))
            load.run(20)
            if turn % 10 == 9:
                daemon.kill_worker()
        limit(daemon, "mem512", **dict.fromkeys(assigned(daemon, "mem512"), 0))
        load.run(100)
        load.finish()  # data, every command once


def test_limits_are_reported_saved_and_kept() -> None:
    with running() as (daemon, target, _), connected(target) as nvme:
        nvme.enable()
        none = {"rw_ios_per_sec": 0, "rw_mbytes_per_sec": 0, "r_mbytes_per_sec": 0, "w_mbytes_per_sec": 0}
        assert assigned(daemon, "mem512") == none
        limit(daemon, "mem512", rw_ios_per_sec=5000, w_mbytes_per_sec=7)
        limit(daemon, "mem512", rw_ios_burst=300)
        want = none | {"rw_ios_per_sec": 5000, "w_mbytes_per_sec": 7, "rw_ios_burst": 300}
        assert assigned(daemon, "mem512") == want
        daemon.kill_worker()
        assert assigned(daemon, "mem512") == want
        config = daemon.rpc("framework_get_config", {"name": "bdev"})
        saved = [one["params"] for one in config if one["method"] == "bdev_set_qos_limit"]
        assert saved == [{"name": "mem512", "rw_ios_per_sec": 5000, "w_mbytes_per_sec": 7, "rw_ios_burst": 300}]
        json.dumps(config)
        limit(daemon, "mem512", rw_ios_per_sec=0, w_mbytes_per_sec=0)
        assert assigned(daemon, "mem512") == none
        with pytest.raises(RpcError) as refused:
            limit(daemon, "mem512", rw_ios_burst=5)
        assert refused.value.code == -22
        limit(daemon, "file", rw_ios_per_sec=9)
        daemon.rpc("bdev_aio_delete", {"name": "file"})
        assert [one for one in daemon.rpc("framework_get_config", {"name": "bdev"}) if "qos" in one["method"]] == []


def test_commands_that_wait_can_be_aborted_deleted_and_reset() -> None:
    with running() as (daemon, target, _), connected(target) as nvme:
        nvme.enable()
        queue = nvme.create_queue_pair(1, 64)
        limit(daemon, "mem512", rw_ios_per_sec=1)
        commands = reads(nvme, queue, NS_512, 8)
        nvme.wait(commands[0])
        assert nvme.abort(1, commands[6].cid).dw0 & 1 == 0, "not aborted"
        nvme.wait(commands[6])
        assert commands[6].status == 0x07  # Command Abort Requested
        daemon.rpc("nvmf_subsystem_remove_ns", {"nqn": target.nqn, "nsid": NS_512})
        nvme.wait(*commands)
        assert {one.status for one in commands[2:6]} <= {nv.OK, nv.INVALID_FIELD}
        assert commands[7].status == nv.INVALID_FIELD  # an inactive NSID
        daemon.rpc("nvmf_subsystem_add_ns", {"nqn": target.nqn, "namespace": {"bdev_name": "mem512", "nsid": NS_512}})
        commands = reads(nvme, queue, NS_512, 8)
        nvme.delete_sq(queue)
        assert {one.status for one in commands} <= {nv.OK, 0x08} and commands[7].status == 0x08
        queue = nvme.create_queue_pair(2, 64)
        reads(nvme, queue, NS_512, 8)
        nvme.enable()
        limit(daemon, "mem512", rw_ios_per_sec=0)
        nvme.read(nvme.create_queue_pair(1, 64), NS_512, 0, 4096)
