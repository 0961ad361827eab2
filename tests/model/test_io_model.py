"""Hypothesis drives a controller against a naive model: one bytearray and one set of bad blocks for each namespace.

Rules mix transfers of any size and alignment, Copy and Write Uncorrectable, on several queues, with resets of the
controller and kills of the worker.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support import front_ends
from tests.support import nvme_driver as nv
from tests.support.daemon import NS_4K, NS_512, NS_FILE, Daemon, Target
from tests.support.front_ends import TRAPPED, FrontEnd
from tests.support.nvme_driver import PAGE, Command, GuestRam, Nvme, SubmissionQueue

BLOCK = {NS_512: 512, NS_4K: 4096, NS_FILE: 512}
MODEL_BLOCKS = 256  # of each namespace the first so many blocks are used

namespaces = st.sampled_from(sorted(BLOCK))
starts = st.integers(0, MODEL_BLOCKS - 1)
counts = st.one_of(st.integers(1, 4), st.integers(1, 64))
offsets = st.one_of(st.just(0), st.integers(0, PAGE // 4 - 1).map(lambda dword: 4 * dword))
seeds = st.integers(0, 2**32 - 1)


def content(seed: int, size: int) -> bytes:
    """Cheap distinct data: a repeated 8-byte word with its index mixed in."""
    return b"".join((seed * 0x9E3779B97F4A7C15 + n & 2**64 - 1).to_bytes(8, "little") for n in range(size // 8))


class IoMachine(RuleBasedStateMachine):
    daemon: Daemon
    target: Target
    kills: bool
    front_end: FrontEnd

    def __init__(self) -> None:
        super().__init__()
        self.ram = GuestRam(16 << 20)
        self.nvme = Nvme(self.target.path, self.ram, vectors=4, **self.front_end.connect)
        self.model = {nsid: bytearray(MODEL_BLOCKS * block) for nsid, block in BLOCK.items()}
        self.bad: dict[int, set[int]] = {nsid: set() for nsid in BLOCK}  # marked by Write Uncorrectable
        self.queues: list[SubmissionQueue] = []
        self.next = 0

    @initialize(shadow=st.booleans(), depths=st.lists(st.sampled_from([2, 3, 8, 64]), min_size=1, max_size=3))
    def start(self, shadow: bool, depths: list[int]) -> None:
        self.shadow, self.depths = shadow, depths
        self._bring_up()
        for nsid, block in BLOCK.items():
            assert self.nvme.write_zeroes(self.queues[0], nsid, 0, MODEL_BLOCKS) == nv.OK, block

    def _bring_up(self) -> None:
        self.nvme.enable()
        if self.shadow and self.front_end.shadow:
            self.nvme.enable_shadow_doorbells()
        self.queues = [self.nvme.create_queue_pair(qid, depth) for qid, depth in enumerate(self.depths, 1)]

    def _queue(self) -> SubmissionQueue:
        self.next += 1
        return self.queues[self.next % len(self.queues)]

    def _extent(self, nsid: int, start: int, count: int) -> tuple[int, slice]:
        """Number of blocks that fit, and the bytes of the model."""
        count = min(count, MODEL_BLOCKS - start)
        block = BLOCK[nsid]
        return count, slice(start * block, (start + count) * block)

    @rule(nsid=namespaces, start=starts, count=counts, offset=offsets, seed=seeds, fua=st.booleans())
    def write(self, nsid: int, start: int, count: int, offset: int, seed: int, fua: bool) -> None:
        count, part = self._extent(nsid, start, count)
        buffer = self.ram.buffer(count * BLOCK[nsid], offset)
        buffer.fill(content(seed, len(buffer)))
        status = self.nvme.io(self._queue(), nv.WRITE, nsid, start, buffer, block=BLOCK[nsid], fua=fua)
        assert status == nv.OK
        self.model[nsid][part] = content(seed, len(buffer))
        self.bad[nsid] -= set(range(start, start + count))
        self.ram.free_buffer(buffer)

    def _reads(self, nsid: int, start: int, count: int) -> int:
        """The status of what reads these blocks."""
        return nv.UNRECOVERED_READ_ERROR if self.bad[nsid] & set(range(start, start + count)) else nv.OK

    @rule(nsid=namespaces, start=starts, count=counts)
    def write_uncorrectable(self, nsid: int, start: int, count: int) -> None:
        count, _ = self._extent(nsid, start, count)
        assert self.nvme.blocks(self._queue(), nv.WRITE_UNCORRECTABLE, nsid, start, count) == nv.OK
        self.bad[nsid] |= set(range(start, start + count))

    @rule(nsid=namespaces, start=starts, count=counts)
    def verify(self, nsid: int, start: int, count: int) -> None:
        count, _ = self._extent(nsid, start, count)
        assert self.nvme.blocks(self._queue(), nv.VERIFY, nsid, start, count) == self._reads(nsid, start, count)

    @rule(nsid=namespaces)
    def lba_status(self, nsid: int) -> None:
        condition, found = self.nvme.lba_status(nsid, 0, MODEL_BLOCKS, room=MODEL_BLOCKS)
        assert {block for lba, run, _ in found for block in range(lba, lba + run)} == self.bad[nsid]
        assert condition == 2

    @rule(nsid=namespaces, to=starts, ranges=st.lists(st.tuples(starts, counts), min_size=1, max_size=5))
    def copy(self, nsid: int, to: int, ranges: list[tuple[int, int]]) -> None:
        """Sources that the target does not touch, as far as there is room behind it."""
        block, room, chosen = BLOCK[nsid], MODEL_BLOCKS - to, []
        total = sum(count for _, count in ranges)
        for start, count in ranges:
            count = min(self._extent(nsid, start, count)[0], room)
            if count and not (start < to + total and to < start + count):
                chosen.append((start, count))
                room -= count
        if not chosen:
            return
        status = max(self._reads(nsid, *one) for one in chosen)
        assert self.nvme.copy(self._queue(), nsid, to, chosen).status == status
        if status == nv.OK:
            data = b"".join(self.model[nsid][start * block : (start + count) * block] for start, count in chosen)
            self.model[nsid][to * block : to * block + len(data)] = data
            self.bad[nsid] -= set(range(to, to + len(data) // block))

    @rule(nsid=namespaces, start=starts, count=counts, offset=offsets)
    def read(self, nsid: int, start: int, count: int, offset: int) -> None:
        count, part = self._extent(nsid, start, count)
        buffer = self.ram.buffer(count * BLOCK[nsid], offset)
        status = self.nvme.io(self._queue(), nv.READ, nsid, start, buffer, block=BLOCK[nsid])
        assert status == self._reads(nsid, start, count)
        assert status or buffer.bytes() == self.model[nsid][part]
        self.ram.free_buffer(buffer)

    @rule(nsid=namespaces, start=starts, count=counts, deallocate=st.booleans())
    def write_zeroes(self, nsid: int, start: int, count: int, deallocate: bool) -> None:
        count, part = self._extent(nsid, start, count)
        assert self.nvme.write_zeroes(self._queue(), nsid, start, count, deallocate=deallocate) == nv.OK
        self.model[nsid][part] = bytes(count * BLOCK[nsid])
        self.bad[nsid] -= set(range(start, start + count))

    @rule(nsid=namespaces, ranges=st.lists(st.tuples(starts, counts), min_size=1, max_size=5))
    def trim(self, nsid: int, ranges: list[tuple[int, int]]) -> None:
        fitting = [(start, self._extent(nsid, start, count)[0]) for start, count in ranges]
        assert self.nvme.dsm(self._queue(), nsid, fitting) == nv.OK
        for start, count in fitting:
            self.model[nsid][self._extent(nsid, start, count)[1]] = bytes(count * BLOCK[nsid])
            self.bad[nsid] -= set(range(start, start + count))

    @rule(nsid=namespaces, start=starts, count=counts, flip=st.one_of(st.none(), seeds))
    def compare(self, nsid: int, start: int, count: int, flip: int | None) -> None:
        count, part = self._extent(nsid, start, count)
        data = bytearray(self.model[nsid][part])
        if flip is not None:
            data[flip % len(data)] ^= 1 << flip % 8
        status = self.nvme.compare(self._queue(), nsid, start, bytes(data), block=BLOCK[nsid])
        assert status == (self._reads(nsid, start, count) or (nv.OK if flip is None else nv.COMPARE_FAILURE))

    @rule(nsid=st.one_of(namespaces, st.just(0xFFFFFFFF)))
    def flush(self, nsid: int) -> None:
        assert self.nvme.flush(self._queue(), nsid) == nv.OK

    @rule(nsid=namespaces, beyond=st.integers(0, 3), count=st.integers(1, 8))
    def out_of_range(self, nsid: int, beyond: int, count: int) -> None:
        blocks = int.from_bytes(self.nvme.identify(0, nsid)[:8], "little")
        buffer = self.ram.buffer(count * BLOCK[nsid])
        slba = blocks - count + 1 + beyond
        status = self.nvme.io(self._queue(), nv.WRITE, nsid, slba, buffer, block=BLOCK[nsid])
        assert status == nv.LBA_OUT_OF_RANGE
        self.ram.free_buffer(buffer)

    @rule(
        nsid=namespaces,
        jobs=st.lists(
            st.tuples(st.integers(0, 31), st.booleans(), seeds), min_size=1, max_size=24, unique_by=lambda j: j[0]
        ),
        kill=st.booleans(),
    )
    def burst(self, nsid: int, jobs: list[tuple[int, bool, int]], kill: bool) -> None:
        """Commands in flight together on all queues, each with 8 blocks of its own; perhaps a kill under them."""
        size = 8 * BLOCK[nsid]
        flights: list[tuple[Command, nv.Buffer, int, bool]] = []
        for slot, is_write, seed in jobs:
            buffer = self.ram.buffer(size)
            if is_write:
                buffer.fill(content(seed, size))
                self.model[nsid][slot * size : (slot + 1) * size] = content(seed, size)
                self.bad[nsid] -= set(range(slot * 8, slot * 8 + 8))
            opcode = nv.WRITE if is_write else nv.READ
            command = self.nvme.submit_io(self._queue(), opcode, nsid, slot * 8, buffer, block=BLOCK[nsid])
            flights.append((command, buffer, slot, is_write))
        if kill and self.kills:
            self.daemon.kill_worker()
        self.nvme.wait(*(flight[0] for flight in flights))
        for command, buffer, slot, is_write in flights:
            assert command.status == (nv.OK if is_write else self._reads(nsid, slot * 8, 8))
            assert command.status or is_write or buffer.bytes() == self.model[nsid][slot * size : (slot + 1) * size]
            self.ram.free_buffer(buffer)

    @precondition(lambda self: self.kills)
    @rule()
    def kill(self) -> None:
        self.daemon.kill_worker()

    @rule(shadow=st.booleans(), depths=st.lists(st.sampled_from([2, 3, 8, 64]), min_size=1, max_size=3))
    def reset(self, shadow: bool, depths: list[int]) -> None:
        self.shadow, self.depths = shadow, depths
        self._bring_up()

    @rule()
    def device_reset(self) -> None:
        self.nvme.device_reset()
        self._bring_up()

    @rule()
    def reconnect(self) -> None:
        self.nvme.close()
        self.nvme = Nvme(self.target.path, self.ram, vectors=4, **self.front_end.connect)
        self._bring_up()

    @invariant()
    def memory_is_whole(self) -> None:
        self.ram.check_canaries()

    def teardown(self) -> None:
        self.nvme.close()
        self.ram.close()


def run_machine(kills: bool, front_end: FrontEnd = TRAPPED, **options: Any) -> None:
    directory = Path(tempfile.mkdtemp(prefix="dpu-m-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        daemon = stack.enter_context(Daemon(directory, args=["--crash-limit", "0"]))
        target = daemon.standard_target(listener=front_end.listener)
        namespace = {"daemon": daemon, "target": target, "kills": kills, "front_end": front_end}
        machine = type("Machine", (IoMachine,), namespace)
        chosen = settings(
            deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, database=None, **options
        )
        try:
            run_state_machine_as_test(machine, settings=chosen)
        except BaseException as error:
            error.add_note(repr(daemon))
            raise


def test_io_against_the_model() -> None:
    run_machine(kills=False, max_examples=40, stateful_step_count=40)


def test_io_against_the_model_with_kills() -> None:
    run_machine(kills=True, max_examples=6, stateful_step_count=20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("front_end", front_ends.ALL, ids=lambda one: one.name)
@pytest.mark.parametrize("kills", [False, True])
def test_io_against_the_model_for_long(kills: bool, front_end: FrontEnd) -> None:
    examples = (300 if front_end is TRAPPED else 60) // (5 if kills else 1)
    run_machine(kills, front_end, max_examples=examples, stateful_step_count=60)
