"""Workers killed, stopped and crashing while a real guest verifies its data: it must not notice.

Two fio jobs, each on a CPU and so on a queue of its own, write and verify all the time. After each kill completions
must go on within ``PROGRESS_S`` of the daemon's CPU time (or of idleness; a loaded host gets more wall time).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from dpu.errors import EmuError
from emu.daemon import Dpu, DpuError
from emu.lab import Lab
from emu.vm import Patience, Vm
from emu.workloads.base import BlockDevice
from tests.support.daemon import standby_ready
from tests.vm.conftest import (
    VERIFY,
    Stage,
    block_device,
    complaints,
    fio,
    io_commands,
    kernel_log,
    percentile,
    shell,
    worker_pid,
)

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

PROGRESS_S = 2.0
QUICK_DEATH_S = 5.0  # dpu.keeper: a worker that dies sooner counts towards a crash loop ...
CRASH_LIMIT = 5  # ... of so many

SPARE = [f"spare{number}" for number in range(6)]
SCENARIO = """
[vm.guest]
vcpus = 2
memory = "384M"
nvme = ["card.memory", "card.file"]

[dpu.card.nvme.memory]
namespaces = [{ size = "64M" }]
[dpu.card.nvme.file]
namespaces = [{ backend = "file", size = "64M", block_size = 4096 }]
""" + "".join(f'[dpu.card.nvme.{name}]\nnamespaces = [{{ size = "16M" }}]\n' for name in SPARE)


async def paced_kill(dpu: Dpu, *, wait_warm: bool = True, delay_s: float = 0.0) -> tuple[int, bool]:
    """SIGKILL the serving worker after ``delay_s``, at a pace that is no crash loop.

    ``wait_warm``: first wait for the standby to be ready. Returns the dead one's pid, and whether a standby was.
    """
    pid = await worker_pid(dpu)
    deaths = [line for line in dpu.log.read_text().splitlines() if " died (" in line]
    if len(deaths) % (CRASH_LIMIT - 1) == CRASH_LIMIT - 2:  # this one has lived long: the count starts anew
        await asyncio.sleep(QUICK_DEATH_S + 0.5)
    while wait_warm and not standby_ready(dpu.pid, pid):
        await asyncio.sleep(0.05)
    await asyncio.sleep(delay_s)
    warm = standby_ready(dpu.pid, pid)
    os.kill(pid, signal.SIGKILL)
    return pid, warm


@dataclass
class Killer:
    """Kills serving workers and watches that life goes on."""

    dpu: Dpu
    rng: random.Random
    warm: list[bool] = field(default_factory=list)  # of each kill: was a standby ready
    progress_s: list[float] = field(default_factory=list)  # of each kill: until completions were seen, on the wall

    async def kill(self, *, wait_warm: bool = True, delay_s: float = 0.3) -> None:
        """Kill after a random part of ``delay_s``; returns when completions go on."""
        dead, warm = await paced_kill(self.dpu, wait_warm=wait_warm, delay_s=self.rng.uniform(0, delay_s))
        began_s = time.monotonic()
        self.warm.append(warm)
        await self._progress(dead)
        self.progress_s.append(time.monotonic() - began_s)

    async def _progress(self, dead: int) -> None:
        patience = Patience(PROGRESS_S, self.dpu.cpu_s, time.monotonic)
        seen: int | None = None
        while True:
            stats = await stats_of(self.dpu)
            if stats["pid"] != dead:
                if seen is None:
                    seen = io_commands(stats)
                elif io_commands(stats) > seen:
                    return
            assert not (over := patience.over()), (
                f"no completion {over} since worker {dead} was killed; {seen} before"
            )
            await asyncio.sleep(0.01)

    def report(self, record_property: Callable[[str, object], None], pauses_ms: list[float]) -> None:
        """The pauses as the keeper logged them, of kills with a standby ready."""
        assert len(pauses_ms) == len(self.warm)
        warm_ms = [pause for pause, warm in zip(pauses_ms, self.warm, strict=True) if warm]
        cold_ms = [pause for pause, warm in zip(pauses_ms, self.warm, strict=True) if not warm]
        for name, values in (
            ("pause with standby", warm_ms),
            ("pause without standby", cold_ms),
            ("kill to completions seen", [1000 * value for value in self.progress_s]),
        ):
            if values:
                text = f"p50 {percentile(values, 50):.1f} p99 {percentile(values, 99):.1f} max {max(values):.1f} ms"
                print(f"{name}: {len(values)} kills, {text}")
                record_property(name, text)


async def stats_of(dpu: Dpu) -> dict[str, Any]:
    """dpu_get_stats; asked again when the worker that was asked dies over it."""
    while True:
        assert "crash loop" not in dpu.log.read_text()
        with contextlib.suppress(DpuError):
            answer: dict[str, Any] = await dpu.rpc("dpu_get_stats")
            return answer


@contextlib.asynccontextmanager
async def verifying(vm: Vm, device: BlockDevice, depth: int) -> AsyncIterator[dict[str, Any]]:
    """Writes and verifies from 8 MiB on until the end of the block; then the result, fio's report, is filled in."""
    report: dict[str, Any] = {}
    argv = [
        "fio", "--name=verify", f"--filename={device.path}", "--rw=randwrite", "--ioengine=io_uring", "--direct=1",
        f"--bsrange={device.block_size}-32k", f"--bsrange={max(4096, device.block_size)}-32k", f"--iodepth={depth}",
        "--numjobs=2", "--size=4M", "--offset=8M", "--offset_increment=4M", "--cpus_allowed=0,1",
        "--cpus_allowed_policy=split", *VERIFY, f"--verify_backlog={4 * depth}", "--verify_state_save=0",
        "--time_based", "--runtime=24h", "--group_reporting", "--output-format=json", "--output=/tmp/load.json",
    ]  # fmt: skip
    running = asyncio.ensure_future(vm.guest.exec(argv))
    try:
        yield report
        assert not running.done(), f"fio ended early: {running.result()}"
        await shell(vm, "killall -INT fio")
        result = await asyncio.wait_for(running, 600)
    finally:
        running.cancel()
    text = (await vm.guest.read_file("/tmp/load.json")).decode()
    assert result.code == 128, f"{result}\n{text[:2000]}"  # of fio: ended by a signal, and nothing else
    report.update(json.loads(text[text.index("{") :]))
    (job,) = report["jobs"]
    assert (job["error"], job.get("total_err", 0)) == (0, 0), text
    assert job["read"]["total_ios"] > 0 and job["write"]["total_ios"] > 0


async def kept(vm: Vm, device: BlockDevice, *, check: bool) -> None:
    """Write the first 4 MiB with checksums, or check them."""
    verb = "--verify_only=1" if check else "--do_verify=0"
    await fio(vm, device, "--rw=write", "--bs=64k", "--iodepth=4", "--size=4M", *VERIFY, verb)


async def new_lines(vm: Vm, before: list[str]) -> list[str]:
    """What the kernel has logged since, but for what it says when the host gives QEMU too little CPU time."""
    slow_host = re.compile(r"hrtimer: interrupt took|perf: interrupt took too long|clocksource: ")
    return [line for line in (await kernel_log(vm))[len(before) :] if not slow_host.search(line)]


def kills_of(request: pytest.FixtureRequest) -> int:
    return 75 if request.node.get_closest_marker("slow") else 3


CASES = [("memory", 1), ("memory", 32), ("file", 1), ("file", 32)]
DEFAULT = [("memory", 32), ("file", 1)]


@pytest.mark.parametrize(
    ("backend", "depth"),
    [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow, id=f"many-{case[0]}-{case[1]}") for case in CASES)],
)
@pytest.mark.timeout(3600)
async def test_killed_at_random(
    stage: Stage, request: pytest.FixtureRequest, backend: str, depth: int, record_property: Any
) -> None:
    """Zero errors, nothing in the kernel's log, the data of before and of now."""
    vm, dpu = stage.vm, stage.dpu
    device = await block_device(vm, f"card.{backend}")
    await kept(vm, device, check=False)
    log, pauses = await kernel_log(vm), len(dpu.restarts_ms())
    killer = Killer(dpu, random.Random(f"{backend}{depth}"))
    kills = kills_of(request)
    async with verifying(vm, device, depth) as report:
        for number in range(kills):
            await killer.kill(wait_warm=number % 4 != 3)
    killer.report(record_property, dpu.restarts_ms()[pauses:])
    await kept(vm, device, check=True)
    assert await new_lines(vm, log) == []
    (job,) = report["jobs"]
    slowest_ms = max(job[op]["clat_ns"]["max"] for op in ("read", "write")) / 1e6
    record_property("slowest I/O", f"{slowest_ms:.1f} ms of {job['read']['total_ios'] + job['write']['total_ios']}")
    print(f"slowest I/O {slowest_ms:.1f} ms of {job['read']['total_ios'] + job['write']['total_ios']}")


async def test_a_hung_worker_is_replaced(stage: Stage) -> None:
    """SIGSTOP: the watchdog kills it, and I/O goes on; the guest's own patience is 30 s."""
    vm, dpu = stage.vm, stage.dpu
    device = await block_device(vm, "card.memory")
    log, restarts = await kernel_log(vm), len(dpu.restarts_ms())
    async with verifying(vm, device, 8):
        pid = await worker_pid(dpu)
        while not standby_ready(dpu.pid, pid):
            await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)
        stats = await stats_of(dpu)  # waits: nobody else can answer
        assert stats["pid"] != pid
        seen = io_commands(stats)
        while io_commands(await stats_of(dpu)) == seen:
            await asyncio.sleep(0.01)
    assert await new_lines(vm, log) == []
    assert len(dpu.restarts_ms()) == restarts + 1
    assert "watchdog" in next(line for line in dpu.log.read_text().splitlines() if f"worker {pid} died" in line)


async def test_killed_during_resets(stage: Stage, request: pytest.FixtureRequest) -> None:
    """`nvme reset` in a loop under verify, workers killed meanwhile: every reset succeeds, nothing is lost."""
    await resets(stage, kills=3)


@pytest.mark.slow
async def test_killed_during_many_resets(stage: Stage) -> None:
    await resets(stage, kills=40)


async def resets(stage: Stage, kills: int) -> None:
    vm, dpu = stage.vm, stage.dpu
    device = await block_device(vm, "card.memory")
    await kept(vm, device, check=False)
    log = await kernel_log(vm)
    killer = Killer(dpu, random.Random(7))
    looping = asyncio.ensure_future(
        vm.guest.run(
            f"touch /tmp/go; n=0; while [ -e /tmp/go ]; do nvme reset /dev/{device.controller} || exit 1;"
            " n=$((n + 1)); done; echo $n"
        )
    )
    try:
        async with verifying(vm, device, 16):
            for _ in range(kills):
                assert not looping.done(), looping.result()
                await killer.kill(delay_s=1.0)
            await shell(vm, "rm /tmp/go")
            count = int(await asyncio.wait_for(looping, 600))
    finally:
        looping.cancel()
    assert count >= kills
    await kept(vm, device, check=True)
    assert complaints(await new_lines(vm, log), resets=True) == []


@pytest.mark.parametrize("controllers", [2, pytest.param(6, marks=pytest.mark.slow)])
async def test_killed_while_the_driver_probes(stage: Stage, controllers: int) -> None:
    """Hot-plugged controllers come up although their worker is killed meanwhile, and hold data."""
    vm, dpu = stage.vm, stage.dpu
    log = await kernel_log(vm)
    plugged = {one.id for one in vm.attached}
    rng = random.Random(controllers)
    for name in [name for name in SPARE if name not in plugged][:controllers]:
        killing = asyncio.ensure_future(paced_kill(dpu, delay_s=rng.uniform(0, 0.6)))  # a probe takes about so long
        while not standby_ready(dpu.pid, (await stats_of(dpu))["pid"]):  # the kill may come while it is asked
            await asyncio.sleep(0.05)
        one = await asyncio.wait_for(vm.attach(dpu.socket(name), name), 300)
        await killing
        device = BlockDevice(f"/dev/{one.namespaces[0]}", one.controller, 1, 512, 16 << 20)
        await fio(vm, device, "--rw=randwrite", "--bs=4k", "--iodepth=8", "--size=1M", *VERIFY)
    assert complaints(await new_lines(vm, log)) == []


@pytest.mark.slow
async def test_killed_while_the_guest_boots(stage: Stage) -> None:
    vm, dpu = stage.vm, stage.dpu
    device = await block_device(vm, "card.memory")
    await kept(vm, device, check=False)
    rebooting = asyncio.ensure_future(vm.reboot())
    kills = 0
    while not rebooting.done() and kills < 4:
        await paced_kill(dpu, delay_s=0.1)
        kills += 1
    await asyncio.wait_for(rebooting, 600)
    assert kills > 0
    await kept(vm, await block_device(vm, "card.memory"), check=True)
    assert complaints(await kernel_log(vm)) == []


async def test_a_crash_loop_fails_io(lab: Any) -> None:
    """Workers that die as fast as they come: no more are started, I/O ends with an error, the daemon says why."""
    scenario = (
        '[vm.guest]\nmemory = "256M"\nnvme = ["card.disk"]\n[dpu.card.nvme.disk]\nnamespaces = [{ size = "64M" }]\n'
    )
    mine: Lab = await lab(scenario)
    vm, dpu = mine.vms["guest"], mine.dpus["card"]
    (name,) = vm.device("card.disk").namespaces
    await shell(vm, f"echo 3000 > /sys/block/{name}/queue/io_timeout")  # ms, instead of 30 s
    reading = asyncio.ensure_future(
        vm.exec(["sh", "-c", f"while dd if=/dev/{name} of=/dev/null bs=4k iflag=direct; do :; done"], timeout_s=120)
    )
    dead: set[int] = set()  # killed as soon as they answer
    while "crash loop" not in dpu.log.read_text():
        with contextlib.suppress(EmuError, OSError):
            pid = await asyncio.wait_for(worker_pid(dpu), 5)
            if pid not in dead:
                os.kill(pid, signal.SIGKILL)
                dead.add(pid)
        await asyncio.sleep(0.01)
    assert len(dead) == CRASH_LIMIT
    result = await reading
    assert b"error" in result.stderr.lower()
    assert dpu.running and vm.running
    with pytest.raises(EmuError):
        await dpu.rpc("dpu_get_stats")
    assert "No more are started: devices read all ones and I/O fails" in dpu.log.read_text()
    # and again, now that the driver knows: at once
    again = await vm.exec(["dd", f"if=/dev/{name}", "of=/dev/null", "count=1"], timeout_s=60)
    assert again.code != 0 or b"0+0 records in" in again.stderr  # no device, or one of no size on its way out
