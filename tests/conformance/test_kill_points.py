"""Workers killed at named points and at random: no error status, right data, every command exactly once.

The points are compiled in (DPU_EMU_KILL_AT, see dpu/killpoint.py). The driver fails by itself on a completion of a
command that is not outstanding, on an SQHD that goes back and on a completion without an interrupt.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import nvme_driver as nv
from tests.support.daemon import MIB, NS_4K, NS_512, NS_FILE, Daemon, RpcError, Target
from tests.support.load import Load
from tests.support.nvme_driver import PAGE, GuestRam, Nvme
from tests.support.vfio_user_client import VfioUserClient

DATA_POINTS = ["header_read", "doorbell_stored", "sqe_copied", "executed", "cqe_half", "cqe_written"]
DATA_POINTS += ["before_eventfd", "in_loop"]
ADMIN_POINTS = ["admin_before_save", "admin_after_save", "admin_after_post"]


class Death:
    """Watches one worker: `death()` tells whether it has died."""

    def __init__(self, pid: int) -> None:
        self.fd = os.pidfd_open(pid)
        self.poll = select.poll()
        self.poll.register(self.fd, select.POLLIN)

    def __call__(self) -> bool:
        return bool(self.poll.poll(0))

    def close(self) -> None:
        os.close(self.fd)


@contextlib.contextmanager
def running(
    point: str = "",
    *,
    generations: int = 1,
    args: Sequence[str] = (),
    listener: Mapping[str, bool] | None = None,
) -> Iterator[tuple[Daemon, Target, Death]]:
    """A daemon whose first workers die at `point`, the standard target, and the death of the first worker."""
    directory = Path(tempfile.mkdtemp(prefix="dpu-k-"))
    env = {"DPU_EMU_KILL_AT": point, "DPU_EMU_KILL_GENERATIONS": str(generations)} if point else {}
    try:
        with Daemon(directory, env=env, args=["--crash-limit", "0", *args]) as daemon:
            death = Death(daemon.worker_pid())
            try:
                yield daemon, daemon.standard_target(listener=listener), death
            except BaseException as error:
                error.add_note(repr(daemon))
                raise
            finally:
                death.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def connected(target: Target, **options: Any) -> Iterator[Nvme]:
    ram = GuestRam(24 << 20)
    nvme = Nvme(target.path, ram, vectors=4, **options)
    try:
        yield nvme
        ram.check_canaries()
    finally:
        nvme.close()
        ram.close()


def pauses_ms(daemon: Daemon) -> list[float]:
    """What the keeper says about each change of workers."""
    return [float(match) for match in re.findall(r"serves after ([\d.]+) ms", daemon.log(100_000))]


@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
@pytest.mark.parametrize("depth", [1, 32])
@pytest.mark.parametrize("point", DATA_POINTS)
def test_kill_on_the_data_path(
    point: str, depth: int, nsid: int, record_property: Callable[[str, object], None]
) -> None:
    shadow = point not in ("header_read", "doorbell_stored")
    count = {"in_loop": 2_000, "before_eventfd": 60}.get(point, 200)
    with running(f"{point}:{count}") as (daemon, target, death), connected(target) as nvme:
        nvme.enable()
        if shadow:
            nvme.enable_shadow_doorbells()
        queue = nvme.create_queue_pair(1, 64)
        load = Load(nvme, queue, nsid, depth=depth)
        load.run(20_000, until=death)
        assert death(), f"the worker never came to {point}"
        load.run(300)
        load.finish()
        record_property("pause_ms", pauses_ms(daemon))


@pytest.mark.parametrize("depth", [1, 32])
@pytest.mark.parametrize("count", [1, 12, 25])
@pytest.mark.parametrize("point", ADMIN_POINTS)
def test_kill_around_admin_commands(point: str, count: int, depth: int) -> None:
    """Count 1 dies in the first Identify, later ones in queue management under a load on another queue."""
    with running(f"{point}:{count}") as (_, target, death), connected(target) as nvme:
        nvme.enable()
        expected = nvme.identify(1)
        nvme.enable_shadow_doorbells()
        load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=depth)
        event = nvme.aer()
        for turn in range(12):
            load.run(20)
            queue = nvme.create_queue_pair(2, 5 + turn)
            nvme.write(queue, NS_4K, turn, bytes([turn]) * PAGE, block=PAGE)
            assert nvme.read(queue, NS_4K, turn, PAGE, block=PAGE) == bytes([turn]) * PAGE
            nvme.set_feature(0x04, 300 + turn)
            assert nvme.get_feature(0x04) == 300 + turn
            assert nvme.identify(1) == expected
            assert nvme.try_admin(0x3F).status == nv.INVALID_OPCODE
            nvme.delete_sq(queue)
            nvme.delete_cq(queue.cq)
        assert death(), f"the worker never came to {point}"
        load.run(100)
        load.finish()
        assert event.completion is None, "the parked event request was completed"
        nvme.doorbell(2, 0xFFFF)
        nvme.wait(event)
        assert event.status == nv.OK


@pytest.mark.parametrize("point", [*ADMIN_POINTS, "before_reply"])
@pytest.mark.parametrize("count", [1, 3, 8, 20, 33])
def test_kill_during_controller_resets(point: str, count: int) -> None:
    with running(f"{point}:{count}") as (_, target, death), connected(target) as nvme:
        for turn in range(15):
            nvme.enable()
            if turn % 2:
                nvme.enable_shadow_doorbells()
            queue = nvme.create_queue_pair(1, 16)
            data = bytes([turn]) * PAGE
            nvme.write(queue, NS_512, turn, data)
            assert nvme.read(queue, NS_512, turn, PAGE) == data
            if turn % 3 == 0:
                nvme.device_reset()
        assert death(), f"the worker never came to {point}"


@pytest.mark.parametrize("depth", [1, 32])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_kill_in_the_middle_of_a_dma_map(count: int, depth: int) -> None:
    with running(f"mid_dma_map:{count}") as (_, target, death):
        with connected(target) as nvme:
            nvme.enable()
            nvme.enable_shadow_doorbells()
            load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=depth)
            iova, offset, size = nvme.ram.windows[1]
            for turn in range(15):
                load.run(20)
                nvme.client.dma_unmap(iova, size)
                nvme.client.dma_map(iova, size, nvme.ram.fd, offset=offset)
                data = bytes([turn]) * PAGE
                buffer = nv.Buffer(iova + turn * PAGE, nvme.ram.view(iova + turn * PAGE, PAGE))
                buffer.fill(data)
                assert nvme.io(load.queue, nv.WRITE, NS_4K, turn, buffer, block=PAGE) == nv.OK
                assert nvme.read(load.queue, NS_4K, turn, PAGE, block=PAGE) == data
            assert death(), "the worker never came to mid_dma_map"
            load.finish()


@pytest.mark.parametrize("depth", [1, 32])
@pytest.mark.parametrize("point", ["rpc_before_commit", "rpc_after_commit"])
def test_kill_in_the_middle_of_an_rpc(point: str, depth: int) -> None:
    """The caller loses its connection; asked again, what it wanted is done exactly once."""
    with running(f"{point}:12") as (daemon, target, death), connected(target) as nvme:
        nvme.enable()
        nvme.enable_shadow_doorbells()
        load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=depth)
        made: list[str] = []
        for turn in range(12):
            load.run(20)
            name = f"extra-{turn}"
            for _ in range(2):
                try:
                    assert daemon.add_memory(name, MIB) == name
                except RpcError as error:
                    assert error.code == -17 and death(), "it exists only if the first call had been committed"
                except (AssertionError, ConnectionError):
                    load.run(20)
                    assert death(), "an RPC was not answered though nobody died"
                    continue
                made.append(name)
                break
        assert death(), f"the worker never came to {point}"
        names = [bdev["name"] for bdev in daemon.rpc("bdev_get_bdevs")]
        assert sorted(names) == sorted(["mem512", "mem4k", "null", "file", *made])
        load.run(200)
        load.finish()


@pytest.mark.parametrize("depth", [1, 32])
def test_several_generations_die_at_the_same_point(depth: int) -> None:
    with running("executed:50", generations=4) as (daemon, target, _), connected(target) as nvme:
        first = daemon.worker_pid()
        nvme.enable()
        nvme.enable_shadow_doorbells()
        load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=depth)
        load.run(2000)
        load.finish()
        assert daemon.worker_pid() != first
        assert len(pauses_ms(daemon)) == 4


def kill_at_random(kills: int, depth: int, nsid: int, seed: int) -> list[float]:
    with running() as (daemon, target, _), connected(target) as nvme:
        rng = random.Random(seed)
        nvme.enable()
        nvme.enable_shadow_doorbells()
        load = Load(nvme, nvme.create_queue_pair(1, 64), nsid, depth=depth, seed=seed)
        for _ in range(kills):
            load.run(rng.randrange(20, 400))
            pid = daemon.worker_pid()
            death = Death(pid)
            os.kill(pid, signal.SIGKILL)
            load.run(until=death)
            death.close()
        load.run(400)
        load.finish()
        # One line for each; a worker killed before it served ends no pause of its own.
        assert len(re.findall(r"worker \d+ died \(SIGKILL\)", daemon.log())) == kills
        return pauses_ms(daemon)


@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
@pytest.mark.parametrize("depth", [1, 32])
def test_random_kills(depth: int, nsid: int, record_property: Callable[[str, object], None]) -> None:
    record_property("pause_ms", kill_at_random(8, depth, nsid, seed=depth))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_random_kills(seed: int, record_property: Callable[[str, object], None]) -> None:
    nsid = (NS_512, NS_FILE, NS_512)[seed]
    record_property("pause_ms", kill_at_random(100, 32, nsid, seed))


def test_kills_during_resets_under_load() -> None:
    with running() as (daemon, target, _), connected(target) as nvme:
        nvme.enable()
        load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=32)
        rng = random.Random(4)
        for turn in range(10):
            load.run(rng.randrange(50, 200))
            changes = load.changes_in_flight()
            load.drop()
            pid = daemon.worker_pid()
            if turn % 2:
                os.kill(pid, signal.SIGKILL)
                nvme.disable()
            else:
                nvme.disable()
                os.kill(pid, signal.SIGKILL)
            nvme.enable()
            if turn % 3:
                nvme.enable_shadow_doorbells()
            load.settle(nvme.create_queue_pair(1, 64), changes)
        load.run(100)
        load.finish()


def test_hung_worker_is_replaced(record_property: Callable[[str, object], None]) -> None:
    """A stopped worker has no heartbeat: the watchdog ends it and another goes on."""
    with running() as (daemon, target, death), connected(target) as nvme:
        nvme.enable()
        nvme.enable_shadow_doorbells()
        load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=32)
        load.run(300)
        os.kill(daemon.worker_pid(), signal.SIGSTOP)
        load.run(until=death)
        load.run(300)
        load.finish()
        record_property("pause_ms", pauses_ms(daemon))


def test_standby_is_replaced() -> None:
    """The death of the standby changes nothing for the guest, and the next kill is survived too."""
    with running() as (daemon, target, _), connected(target) as nvme:
        nvme.enable()
        load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=8)
        worker = daemon.worker_pid()
        for pid in daemon.children():
            if pid != worker:
                os.kill(pid, signal.SIGKILL)
        load.run(200)
        assert daemon.worker_pid() == worker
        daemon.kill_worker()
        load.run(200)
        load.finish()


def test_a_client_goes_and_another_comes_while_nobody_serves() -> None:
    """QEMU is killed and a new one started in the pause between two workers: it is served, not told "in use"."""
    with running(args=["--no-standby"]) as (daemon, target, _):
        for _ in range(2):
            with connected(target) as nvme:
                nvme.enable()
                nvme.write(nvme.create_queue_pair(1, 8), NS_512, 9, b"kept" + bytes(508))
                server = daemon.fork_server_pid()
                os.kill(server, signal.SIGSTOP)
                daemon.kill_worker()
            with VfioUserClient(target.path) as other:
                os.kill(server, signal.SIGCONT)
                other.negotiate()
                assert other.device_info()
            with connected(target) as nvme:
                nvme.enable()
                assert nvme.read(nvme.create_queue_pair(1, 8), NS_512, 9, 512) == b"kept" + bytes(508)


def test_namespaces_and_listeners_survive() -> None:
    """Configuration made before a kill is there afterwards, for new connections too."""
    with running() as (daemon, target, _):
        with connected(target) as nvme:
            nvme.enable()
            queue = nvme.create_queue_pair(1, 8)
            nvme.write(queue, NS_512, 9, b"kept" + bytes(508))
            before = nvme.identify(1), nvme.identify(0, NS_512)
        bdevs = daemon.rpc("bdev_get_bdevs")
        daemon.kill_worker()
        assert daemon.rpc("bdev_get_bdevs") == bdevs
        with connected(target) as nvme:
            nvme.enable()
            queue = nvme.create_queue_pair(1, 8)
            assert nvme.read(queue, NS_512, 9, 512) == b"kept" + bytes(508)
            after = nvme.identify(1), nvme.identify(0, NS_512)
            assert after[0][4:72] == before[0][4:72] and after[1][104:128] == before[1][104:128]


def test_crash_loop_fails_io_instead_of_hanging() -> None:
    """When no worker lives, registers read all ones, writes are acknowledged, and the log says so."""
    directory = Path(tempfile.mkdtemp(prefix="dpu-k-"))
    try:
        with Daemon(directory, args=["--crash-limit", "3"]) as daemon:
            target = daemon.standard_target()
            with connected(target) as nvme:
                nvme.enable()
                for _ in range(3):
                    daemon.kill_worker()
                    if "crash loop" in daemon.log():
                        break
                nvme.wait_csts(0xFFFFFFFF, 0xFFFFFFFF)
                nvme.write32(nv.CC, 0)
                assert nvme.read64(nv.CAP) == 2**64 - 1
                assert "crash loop" in daemon.log()
                assert daemon.alive()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_a_guest_that_workers_die_of_is_cut_off() -> None:
    """Each worker dies of one guest's Write, executed again: its connection ends, and another guest goes on."""
    with running("segment_written", generations=100, args=["--crash-limit", "3"]) as (daemon, target, _):
        daemon.add_memory("other")
        second = daemon.add_subsystem("nqn.2026-01.io.test:other", ["other"])
        with connected(second) as nvme, connected(target) as bad:
            nvme.enable()
            bad.enable()
            queue, bad_queue = nvme.create_queue_pair(1, 8), bad.create_queue_pair(1, 8)
            assert bad.read(bad_queue, NS_512, 0, 512) == bytes(512)
            bad.submit_io(bad_queue, nv.WRITE, NS_512, 0, bad.ram.buffer(512))
            while "is cut off: 3 workers in a row" not in daemon.log():
                assert nvme.read(queue, 1, 0, 512) == bytes(512)
            assert nvme.read(queue, 1, 0, 512) == bytes(512)
            stats = daemon.rpc("dpu_get_stats")
            assert stats["generation"] == 4
            assert [one["nqn"] for one in stats["controllers"]] == ["nqn.2026-01.io.test:other"]
            (served,) = daemon.rpc("bdev_get_iostat", {"names": ["mem512"]})["bdevs"]
            assert served["num_read_ops"] == 1, "what it was served before still counts"
            with pytest.raises((ConnectionError, AssertionError)):
                bad.read32(nv.CSTS)
        with connected(target) as again:
            again.enable()
            assert again.read(again.create_queue_pair(1, 8), NS_512, 0, 512) == bytes(512)


def test_a_trace_outlives_its_worker(tmp_path: Path) -> None:
    """What led to a death can be read after it, tracing goes on, and what was stopped stays stopped."""
    with running() as (daemon, target, _), connected(target) as nvme:
        nvme.enable()
        queue = nvme.create_queue_pair(1, 8)
        daemon.rpc("dpu_trace_start", {"entries": 64})

        def read(*blocks: int) -> list[int]:
            """Read these blocks, then save; the blocks that the trace says were read."""
            for block in blocks:
                nvme.read(queue, NS_512, block, 512)
            daemon.rpc("dpu_trace_save", {"filename": str(tmp_path / "trace")})
            lines = [line.split() for line in (tmp_path / "trace").read_text().splitlines() if target.nqn in line]
            return [int(line[5]) for line in lines]

        assert read(7, 3) == [7, 3]
        daemon.kill_worker()
        assert read() == [7, 3]
        assert read(9) == [7, 3, 9]
        daemon.rpc("dpu_trace_stop")
        daemon.kill_worker()
        assert read(1) == [7, 3, 9]
        daemon.rpc("dpu_trace_start", {"entries": 64})
        assert read(2) == [2]
