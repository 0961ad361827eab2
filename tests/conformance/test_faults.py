"""Faults of a running daemon as a guest's driver meets them: statuses, error log, SMART, events, data; and of calls.

Which commands are struck, and delays, are in tests/unit/test_faults.py.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.test_kill_points import connected, running
from tests.support import nvme_driver as nv
from tests.support.daemon import NS_512, NS_FILE, Daemon, RpcError, Target
from tests.support.nvme_driver import PAGE, Nvme, SubmissionQueue

NAMES = {NS_512: "mem512", NS_FILE: "file"}
ERROR_LOG, SMART = 1, 2


class Bench:
    def __init__(self, daemon: Daemon, target: Target, nvme: Nvme) -> None:
        self.daemon, self.target, self.nvme = daemon, target, nvme
        nvme.enable()
        nvme.enable_shadow_doorbells()
        self.queue: SubmissionQueue = nvme.create_queue_pair(1, 64)

    def add(self, action: str, **more: Any) -> str:
        return str(self.daemon.rpc("dpu_fault_add", {"action": action, **more}))

    def remove(self, name: str) -> None:
        assert self.daemon.rpc("dpu_fault_remove", {"name": name}) is True

    def get(self, name: str) -> dict[str, Any]:
        (row,) = self.daemon.rpc("dpu_fault_get", {"name": name})
        return dict(row)

    def read(self, nsid: int = NS_512, lba: int = 0) -> int:
        buffer = self.nvme.ram.buffer(PAGE)
        done = self.nvme.execute(self.queue, nv.READ, nsid=nsid, prp1=buffer.iova, cdw=[lba, 0, 7])
        self.nvme.ram.free_buffer(buffer)
        return done.status

    def write(self, data: bytes, nsid: int = NS_512, lba: int = 0) -> int:
        buffer = self.nvme.ram.buffer(len(data))
        buffer.fill(data)
        done = self.nvme.execute(
            self.queue, nv.WRITE, nsid=nsid, prp1=buffer.iova, cdw=[lba, 0, len(data) // 512 - 1]
        )
        self.nvme.ram.free_buffer(buffer)
        return done.status

    def smart(self) -> bytes:
        return self.nvme.get_log(SMART, 512)


@pytest.fixture(scope="module")
def served() -> Iterator[Bench]:
    with running() as (daemon, target, _), connected(target) as nvme:
        yield Bench(daemon, target, nvme)


@pytest.fixture
def bench(served: Bench) -> Iterator[Bench]:
    yield served
    for one in served.daemon.rpc("dpu_fault_get"):
        served.remove(one["name"])
    assert served.read() == nv.OK
    served.nvme.get_log(ERROR_LOG, 64)  # masked events are told again
    served.smart()


@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_a_media_error_is_in_the_completion_the_log_and_smart(bench: Bench, nsid: int) -> None:
    """SCT 2, SC 81h is Unrecovered Read Error: the error log names the command, SMART counts a media error."""
    before = bench.smart()
    bench.add("status", bdev_name=NAMES[nsid], io_types=["read"], lba=40, num_blocks=1, sct=2, sc=0x81, dnr=True)
    assert bench.read(nsid, 41) == nv.OK
    buffer = bench.nvme.ram.buffer(PAGE)
    command = bench.nvme.submit(bench.queue, nv.READ, nsid=nsid, prp1=buffer.iova, cdw=[36, 0, 7])
    (done,) = bench.nvme.wait(command)
    assert (done.status, done.dnr, done.more) == (0x281, True, True)
    assert bench.write(bytes(PAGE), nsid, 36) == nv.OK
    entry = bench.nvme.get_log(ERROR_LOG, 64)
    count, sqid, cid, status = struct.unpack_from("<QHHH", entry)
    lba, where = struct.unpack_from("<QI", entry, 16)
    assert (sqid, cid, status >> 1 & 0x7FF, lba, where) == (1, command.cid, 0x281, 36, nsid)
    after = bench.smart()
    media, errors = (int.from_bytes(after[at : at + 16], "little") for at in (160, 176))
    assert media == int.from_bytes(before[160:176], "little") + 1
    assert errors == int.from_bytes(before[176:192], "little") + 1 == count
    assert (bench.get("fault0")["matches"], bench.get("fault0")["struck"]) == (1, 1)


def test_counts_go_on_over_a_death(bench: Bench) -> None:
    bench.add("status", name="third", bdev_name="mem512", after=2, num=1, sc=0x06)
    assert [bench.read(), bench.read()] == [nv.OK, nv.OK]
    bench.daemon.kill_worker()
    assert [bench.read(), bench.read()] == [0x06, nv.OK]
    assert bench.get("third") == {
        "name": "third",
        "action": "status",
        "bdev_name": "mem512",
        "after": 2,
        "num": 1,
        "sc": 6,
        "matches": 4,
        "struck": 1,
    }


def test_a_frozen_volume_is_held_over_a_death_and_can_be_aborted(bench: Bench) -> None:
    bench.add("hold", name="frozen", bdev_name="mem512")
    buffer = bench.nvme.ram.buffer(PAGE)
    commands = [
        bench.nvme.submit(bench.queue, nv.READ, nsid=NS_512, prp1=buffer.iova, cdw=[0, 0, 7]) for _ in range(3)
    ]
    assert bench.read(NS_FILE) == nv.OK, "the other namespace goes on"
    bench.daemon.kill_worker()
    assert bench.read(NS_FILE) == nv.OK
    assert bench.nvme.abort(1, commands[1].cid).dw0 & 1 == 0
    assert bench.nvme.wait(commands[1])[0].status == 0x07
    assert commands[0].completion is None
    assert bench.daemon.rpc("dpu_fault_release", {"name": "frozen"}) == 2
    assert [one.status for one in bench.nvme.wait(commands[0], commands[2])] == [nv.OK, nv.OK]
    command = bench.nvme.submit(bench.queue, nv.READ, nsid=NS_512, prp1=buffer.iova, cdw=[0, 0, 7])
    assert bench.read(NS_FILE) == nv.OK and command.completion is None
    bench.remove("frozen")
    assert bench.nvme.wait(command)[0].status == nv.OK


@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_data_that_are_wrong_lost_or_torn_with_a_good_status(bench: Bench, nsid: int) -> None:
    data = bytes(range(256)) * 16
    assert bench.write(data, nsid) == nv.OK
    name = bench.add("corrupt", bdev_name=NAMES[nsid], corrupt_offset=100, corrupt_value=1, num=1)
    found = bench.nvme.read(bench.queue, nsid, 0, PAGE)
    assert [i for i in range(PAGE) if found[i] != data[i]] == [100] and found[100] == data[100] ^ 1
    assert bench.nvme.read(bench.queue, nsid, 0, PAGE) == data
    bench.remove(name)
    name = bench.add("lose", bdev_name=NAMES[nsid], num=1)
    assert bench.write(bytes(PAGE), nsid) == nv.OK
    assert bench.nvme.read(bench.queue, nsid, 0, PAGE) == data
    bench.remove(name)
    name = bench.add("torn", bdev_name=NAMES[nsid], torn_blocks=3, num=1)
    assert bench.write(bytes(PAGE), nsid) == nv.OK
    assert bench.nvme.read(bench.queue, nsid, 0, PAGE) == bytes(3 * 512) + data[3 * 512 :]
    bench.remove(name)
    bench.add("corrupt", bdev_name=NAMES[nsid], io_types=["write"], corrupt_bytes=0, seed=1)
    assert bench.write(data, nsid) == nv.OK
    assert all(a != b for a, b in zip(bench.nvme.read(bench.queue, nsid, 0, PAGE), data))


@pytest.mark.parametrize(
    ("action", "read", "write"),
    [("full", nv.OK, 0x81), ("read_only", nv.OK, 0x20), ("not_ready", 0x82, 0x82), ("gone", 0x06, 0x06)],
)
def test_ready_made_ones(bench: Bench, action: str, read: int, write: int) -> None:
    bench.add(action, bdev_name="mem512")
    assert (bench.read(), bench.write(bytes(PAGE))) == (read, write)
    assert bench.smart()[0] == {"read_only": 1 << 3, "gone": 1 << 2}.get(action, 0)


def test_events_of_health_and_of_internal_errors(bench: Bench) -> None:
    """SMART events come when the host has asked for that warning; details of Internal Error come as error events."""
    bench.nvme.set_feature(0x0B, 1 << 3)
    event = bench.nvme.aer()
    bench.add("read_only", name="worn", bdev_name="mem512")
    (done,) = bench.nvme.wait(event)
    assert done.dw0 == 0x02_00_01  # log page 2, NVM subsystem reliability, SMART / health
    bench.remove("worn")
    bench.smart()
    bench.nvme.set_feature(0x0B, 0)
    event = bench.nvme.aer()
    bench.add("status", name="internal", bdev_name="mem512", sc=0x06, num=1)
    assert bench.read() == 0x06
    (done,) = bench.nvme.wait(event)
    assert done.dw0 == 0x01_04_00  # log page 1, transient internal error, error status
    bench.nvme.get_log(ERROR_LOG, 64)
    event = bench.nvme.aer()
    bench.add("gone", name="gone", bdev_name="mem512")
    (done,) = bench.nvme.wait(event)
    assert done.dw0 == 0x01_03_00  # persistent internal error


def test_calls_fail_and_are_slow(bench: Bench) -> None:
    rpc = bench.daemon.rpc
    bench.add("error", name="no-bdevs", method="bdev_get_bdevs", after=1, num=1, code=-12)
    rpc("bdev_get_bdevs")
    with pytest.raises(RpcError) as refused:
        rpc("bdev_get_bdevs")
    assert refused.value.code == -12
    rpc("bdev_get_bdevs")
    bench.add("delay", name="slow", method="*", latency_us=200_000, num=1)
    began = time.monotonic()
    rpc("bdev_get_bdevs")
    assert time.monotonic() - began >= 0.2
    bench.add("error", name="disk", metadata=True, code=-5)
    with pytest.raises(RpcError) as refused:
        rpc("bdev_null_create", {"name": "lost", "num_blocks": 8, "block_size": 512})
    assert refused.value.code == -5
    bench.remove("disk")
    with pytest.raises(RpcError) as refused:
        rpc("bdev_get_bdevs", {"name": "lost"})
    assert refused.value.code == -19, "nothing of it is left"


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"action": "status", "bdev_name": "nowhere"}, -19),
        ({"action": "status"}, -22),
        ({"action": "sticky", "bdev_name": "mem512"}, -22),
        ({"action": "status", "bdev_name": "mem512", "io_types": ["reed"]}, -22),
        ({"action": "status", "bdev_name": "mem512", "lbas": 3}, -32603),
        ({"action": "corrupt", "method": "bdev_get_bdevs"}, -22),
    ],
)
def test_refusals(bench: Bench, params: dict[str, Any], code: int) -> None:
    with pytest.raises(RpcError) as refused:
        bench.daemon.rpc("dpu_fault_add", params)
    assert refused.value.code == code
    assert bench.daemon.rpc("dpu_fault_get") == []
    with pytest.raises(RpcError) as refused:
        bench.daemon.rpc("dpu_fault_remove", {"name": "x"})
    assert refused.value.code == -2


def test_a_failed_controller_stops_until_it_is_reset() -> None:
    with running() as (daemon, target, _), connected(target) as nvme:
        bench = Bench(daemon, target, nvme)
        bench.add("fatal", bdev_name="mem512", io_types=["write"], after=1, num=1)
        assert bench.write(bytes(PAGE)) == nv.OK
        buffer = nvme.ram.buffer(PAGE)
        command = nvme.submit(bench.queue, nv.WRITE, nsid=NS_512, prp1=buffer.iova, cdw=[0, 0, 7])
        nvme.wait_csts(nv.CSTS_CFS, nv.CSTS_CFS)
        other = nvme.submit(bench.queue, nv.READ, nsid=NS_FILE, prp1=buffer.iova, cdw=[0, 0, 7])
        daemon.kill_worker()
        assert nvme.read32(nv.CSTS) & nv.CSTS_CFS
        nvme.reap(bench.queue.cq)
        assert command.completion is None and other.completion is None
        nvme.enable()
        bench.queue = nvme.create_queue_pair(1, 64)
        assert bench.write(bytes(PAGE)) == nv.OK and bench.read(NS_FILE) == nv.OK


@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_a_power_cut_loses_what_was_not_flushed(nsid: int) -> None:
    """Also over a worker's death. What was flushed, or written with Force Unit Access, is there."""
    with running() as (daemon, target, _), connected(target) as nvme:
        bench = Bench(daemon, target, nvme)
        assert bench.write(b"a" * PAGE, nsid) == nv.OK
        assert daemon.rpc("dpu_journal_start", {"bdev_name": NAMES[nsid]}) is True
        assert bench.write(b"b" * PAGE, nsid) == nv.OK
        assert nvme.flush(bench.queue, nsid) == nv.OK
        assert bench.write(b"c" * PAGE, nsid) == nv.OK
        assert bench.write(b"c" * PAGE, nsid, 8) == nv.OK
        daemon.kill_worker()
        assert bench.write(b"d" * PAGE, nsid) == nv.OK
        assert nvme.read(bench.queue, nsid, 0, 2 * PAGE) == b"d" * PAGE + b"c" * PAGE
        assert daemon.rpc("dpu_power_cut", {"bdev_name": NAMES[nsid]})["left"] == 0
        nvme.wait_csts(nv.CSTS_CFS, nv.CSTS_CFS)
        nvme.enable()
        bench.queue = nvme.create_queue_pair(1, 64)
        assert nvme.read(bench.queue, nsid, 0, 2 * PAGE) == b"b" * PAGE + bytes(PAGE)
        assert daemon.rpc("dpu_journal_stop", {"bdev_name": NAMES[nsid]}) is True
        with pytest.raises(RpcError) as refused:
            daemon.rpc("dpu_power_cut", {"bdev_name": NAMES[nsid]})
        assert refused.value.code == -2
        assert bench.write(b"e" * PAGE, nsid) == nv.OK


def test_what_a_seeded_power_cut_leaves_is_legal_and_repeated(bench: Bench) -> None:
    """Each block has one of the versions that were written since the last flush, or the one before."""
    rpc, nvme = bench.daemon.rpc, bench.nvme
    states = []
    for seed in (1, 2, 1):
        rpc("dpu_journal_start", {"bdev_name": "file"})
        assert bench.write(b"0" * PAGE, NS_FILE) == nv.OK
        assert nvme.flush(bench.queue, NS_FILE) == nv.OK
        for version in (b"1", b"2", b"3"):
            assert bench.write(version * PAGE, NS_FILE) == nv.OK
        found = rpc("dpu_power_cut", {"bdev_name": "file", "seed": seed, "fail_controllers": False})
        assert found["parts"] == 24 and 0 < found["left"] < 24
        data = nvme.read(bench.queue, NS_FILE, 0, PAGE)
        blocks = [data[at : at + 512] for at in range(0, PAGE, 512)]
        assert all(one in {v * 512 for v in (b"0", b"1", b"2", b"3")} for one in blocks)
        states.append(data)
        rpc("dpu_journal_stop", {"bdev_name": "file"})
    assert states[0] == states[2] != states[1]
