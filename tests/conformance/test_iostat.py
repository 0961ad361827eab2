"""bdev_get_iostat of a running daemon: its figures are those that the guest's side counted itself."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import nvme_driver as nv
from tests.support.daemon import NS_4K, NS_512, NS_FILE, NS_NULL, Daemon, RpcError, Target
from tests.support.nvme_driver import Nvme, SubmissionQueue

BDEVS = {NS_512: "mem512", NS_4K: "mem4k", NS_NULL: "null", NS_FILE: "file"}
BLOCK = {NS_512: 512, NS_4K: 4096, NS_NULL: 512, NS_FILE: 512}


def stat(daemon: Daemon, name: str, **more: Any) -> dict[str, Any]:
    (row,) = daemon.rpc("bdev_get_iostat", {"names": [name], **more})["bdevs"]
    assert row["name"] == name
    return dict(row)


def counts(row: dict[str, Any]) -> dict[str, int]:
    return {key: row[key] for key in row if key.startswith(("bytes_", "num_")) and row[key]}


def work(nvme: Nvme, queue: SubmissionQueue, nsid: int) -> dict[str, int]:
    """Some of everything; what it should be counted as."""
    block = BLOCK[nsid]
    for slba, size in ((0, 4096), (8, 8192), (1, 65536)):
        nvme.write(queue, nsid, slba, bytes(size), block=block)
    nvme.read(queue, nsid, 0, 12288, block=block)
    assert nvme.execute(queue, nv.FLUSH, nsid=nsid).status == nv.OK
    expected = {"num_write_ops": 3, "bytes_written": 77824, "num_read_ops": 1, "bytes_read": 12288}
    if nsid == NS_NULL:
        return expected
    ranges = nvme.ram.buffer(4096)
    ranges.fill(struct.pack("<IIQIIQ", 0, 8, 0, 0, 16, 64))
    done = nvme.execute(queue, nv.DSM, nsid=nsid, prp1=ranges.iova, cdw=[1, 1 << 2])
    assert done.status == nv.OK
    nvme.ram.free_buffer(ranges)
    return expected | {"num_unmap_ops": 1, "bytes_unmapped": 24 * block}


@pytest.fixture(autouse=True)
def reset(daemon: Daemon, target: Target) -> None:
    assert daemon.rpc("bdev_reset_iostat") is True


@pytest.mark.parametrize("nsid", list(BDEVS))
def test_counts_and_latencies(daemon: Daemon, nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    before = daemon.rpc("bdev_get_iostat")
    begin = time.monotonic()
    expected = work(nvme, queue, nsid)
    passed_s = time.monotonic() - begin
    after = daemon.rpc("bdev_get_iostat")
    rows = {row["name"]: row for row in after["bdevs"]}
    assert list(rows) == list(BDEVS.values())  # all of them, in the order of creation
    assert {name: counts(row) for name, row in rows.items() if counts(row)} == {BDEVS[nsid]: expected}
    assert rows[BDEVS[nsid]]["io_error"] == {}
    # The clock is one of seconds, and no command took longer than all of them.
    rate, ticks = after["tick_rate"], after["ticks"] - before["ticks"]
    assert rate == before["tick_rate"] and ticks / rate >= passed_s * 0.99
    for op in ("read", "write"):
        row, number = rows[BDEVS[nsid]], rows[BDEVS[nsid]][f"num_{op}_ops"]
        total, most, least = (row[f"{start}{op}_latency_ticks"] for start in ("", "max_", "min_"))
        assert 0 < least <= total / number <= most <= total <= passed_s * rate * 1.01


def test_errors_are_not_counted_as_io(daemon: Daemon, nvme: Nvme, queue: SubmissionQueue) -> None:
    buffer = nvme.ram.buffer(4096)
    nvme.write(queue, NS_512, 0, b"\x01" * 512, block=512)
    assert nvme.io(queue, nv.READ, NS_512, 1 << 40, buffer, block=512) == nv.LBA_OUT_OF_RANGE
    assert nvme.io(queue, nv.COMPARE, NS_512, 0, buffer, block=512) == nv.COMPARE_FAILURE
    row = stat(daemon, "mem512")
    assert counts(row) == {"num_write_ops": 1, "bytes_written": 512}
    assert row["io_error"] == {"miscompare": 1}  # the other never came to the back end


def test_a_kill_and_a_disconnect_lose_nothing(daemon: Daemon, target: Target, connect: Callable[..., Nvme]) -> None:
    nvme = connect()
    nvme.enable()
    expected = work(nvme, nvme.create_queue_pair(1, 64), NS_512)
    daemon.kill_worker()
    assert counts(stat(daemon, "mem512")) == expected
    nvme.close()
    assert counts(stat(daemon, "mem512")) == expected
    daemon.kill_worker()
    assert counts(stat(daemon, "mem512")) == expected
    again = connect()
    again.enable()
    work(again, again.create_queue_pair(1, 64), NS_512)
    assert counts(stat(daemon, "mem512")) == {name: 2 * count for name, count in expected.items()}


def test_a_namespace_id_used_again_does_not_mix_back_ends(
    daemon: Daemon, target: Target, nvme: Nvme, queue: SubmissionQueue
) -> None:
    expected = work(nvme, queue, NS_4K)
    daemon.add_memory("other", block_size=4096)
    daemon.rpc("nvmf_subsystem_remove_ns", {"nqn": target.nqn, "nsid": NS_4K})
    daemon.rpc("nvmf_subsystem_add_ns", {"nqn": target.nqn, "namespace": {"bdev_name": "other", "nsid": NS_4K}})
    try:
        assert work(nvme, queue, NS_4K) == expected
        daemon.kill_worker()
        nvme.read(queue, NS_4K, 0, 4096, block=4096)
        more = expected | {"num_read_ops": 2, "bytes_read": expected["bytes_read"] + 4096}
        assert counts(stat(daemon, "mem4k")) == expected and counts(stat(daemon, "other")) == more
    finally:
        daemon.rpc("bdev_malloc_delete", {"name": "other"})
        add = {"nqn": target.nqn, "namespace": {"bdev_name": "mem4k", "nsid": NS_4K}}
        daemon.rpc("nvmf_subsystem_add_ns", add)
    assert counts(stat(daemon, "mem4k")) == expected


def test_resets(daemon: Daemon, nvme: Nvme, queue: SubmissionQueue) -> None:
    expected = work(nvme, queue, NS_512)
    full = stat(daemon, "mem512", reset_mode="maxmin")
    assert full["max_read_latency_ticks"] > 0
    cleared = stat(daemon, "mem512", reset_mode="none")
    assert counts(cleared) == expected and cleared["read_latency_ticks"] == full["read_latency_ticks"]
    assert all(not value for name, value in cleared.items() if name.startswith(("max_", "min_")))
    assert counts(stat(daemon, "mem512", reset_mode="all")) == expected
    assert counts(stat(daemon, "mem512")) == {}
    work(nvme, queue, NS_NULL)
    work(nvme, queue, NS_512)
    assert daemon.rpc("bdev_reset_iostat", {"name": "null"}) is True
    assert counts(stat(daemon, "null")) == {} and counts(stat(daemon, "mem512")) == expected


def test_channels(daemon: Daemon, nvme: Nvme, queue: SubmissionQueue) -> None:
    expected = work(nvme, queue, NS_512)
    answer = daemon.rpc("bdev_get_iostat", {"names": ["mem512"], "per_channel": True})
    (channel,) = answer.pop("channels")
    assert set(answer) == {"tick_rate", "ticks", "name"} and answer["name"] == "mem512"
    assert channel.pop("thread_id") == 1 and counts(channel) == expected


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"names": ["none"]}, -19),
        ({"names": ["mem512", "none"]}, -19),
        ({"name": "mem512"}, -32603),
        ({"names": "mem512"}, -32603),
        ({"names": [1]}, -32603),
        ({"reset_mode": "some"}, -32603),
        ({"per_channel": True}, -22),
        ({"per_channel": True, "names": ["mem512", "null"]}, -22),
    ],
)
def test_mistakes(daemon: Daemon, params: dict[str, Any], code: int) -> None:
    with pytest.raises(RpcError) as error:
        daemon.rpc("bdev_get_iostat", params)
    assert error.value.code == code
