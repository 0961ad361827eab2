"""A load that keeps a queue full and checks every status and every byte against a model.

Use: `load = Load(nvme, queue, nsid, depth=32); load.run(500); load.finish()`; `run` may be given a condition.
No two commands in flight touch the same block, so the outcome of each is known exactly. A read's buffer is used for
a write as soon as the read has completed: a read that is carried out again afterwards corrupts the medium, and shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.support import nvme_driver as nv
from tests.support.nvme_driver import Buffer, Command, Nvme, SubmissionQueue

OPERATIONS = ("read", "write", "zeroes", "trim", "compare", "differ", "flush")
WEIGHTS = (38, 38, 6, 5, 6, 3, 4)


@dataclass
class _Running:
    command: Command
    operation: str
    lba: int
    blocks: int
    buffer: Buffer | None
    data: bytes


class Load:
    """`blocks` from `first` on are owned by this load; `blocks_max` bounds one command.

    `trims`: Deallocate zeroes. It is advice, and a volume does not take it for a part of a cluster that it shares.
    """

    def __init__(
        self,
        nvme: Nvme,
        queue: SubmissionQueue,
        nsid: int,
        *,
        depth: int,
        block: int = 512,
        first: int = 0,
        blocks: int = 4096,
        blocks_max: int = 16,
        seed: int = 1,
        trims: bool = True,
    ) -> None:
        self.nvme, self.queue, self.nsid, self.depth = nvme, queue, nsid, depth
        self.block, self.first, self.blocks_max, self.trims = block, first, blocks_max, trims
        self.model = bytearray(blocks * block)
        self.rng = random.Random(seed)
        self.busy = bytearray(blocks)
        self.running: dict[int, _Running] = {}
        self.spare = [nvme.ram.buffer(blocks_max * block) for _ in range(depth)]
        self.completed = 0
        for start in range(first, first + blocks, 1024):
            assert nvme.write_zeroes(queue, nsid, start, min(1024, first + blocks - start)) == nv.OK

    def run(self, commands: int = 1 << 60, *, until: Callable[[], bool] = lambda: False) -> None:
        """Run until so many more commands have completed or `until()` holds; leaves the queue full."""
        goal = self.completed + commands
        while self.completed < goal and not until():
            self._fill()
            self._reap()

    def finish(self) -> None:
        """Wait for what is in flight and read everything back."""
        while self.running:
            self._reap()
        step = 128 * 1024 // self.block
        for lba in range(0, len(self.busy), step):
            count = min(step, len(self.busy) - lba)
            got = self.nvme.read(self.queue, self.nsid, self.first + lba, count * self.block, block=self.block)
            expected = self.model[lba * self.block : (lba + count) * self.block]
            assert got == expected, f"the medium differs from the model within LBA {lba}..{lba + count - 1}"

    def drop(self) -> None:
        """After a controller reset: what was in flight may have happened or not; ask the medium."""
        dropped, self.running = self.running, {}
        for run in dropped.values():
            if run.buffer is not None:
                self.spare.append(run.buffer)
            self._release(run)

    def settle(self, queue: SubmissionQueue, dropped: list[tuple[int, int, bytes]]) -> None:
        """On a new queue: blocks of dropped writes hold the old or the new data, each as a whole."""
        self.queue = queue
        for lba, blocks, data in dropped:
            for index in range(blocks):
                at = lba + index
                got = self.nvme.read(queue, self.nsid, self.first + at, self.block, block=self.block)
                old = bytes(self.model[at * self.block : (at + 1) * self.block])
                new = data[index * self.block : (index + 1) * self.block]
                assert got in (old, new), f"LBA {at} is neither old nor new after a reset"
                self.model[at * self.block : (at + 1) * self.block] = got

    def changes_in_flight(self) -> list[tuple[int, int, bytes]]:
        """(lba, blocks, data) of every command in flight that changes the medium."""
        return [
            (run.lba, run.blocks, run.data)
            for run in self.running.values()
            if run.operation in ("write", "zeroes", "trim")
        ]

    def _fill(self) -> None:
        while len(self.running) < self.depth and self.queue.space():
            operation = self.rng.choices(OPERATIONS, WEIGHTS)[0]
            if operation == "trim" and not self.trims:
                operation = "zeroes"
            place = self._place()
            if place is None:
                return
            lba, blocks = place if operation != "flush" else (0, 0)
            self._start(operation, lba, blocks)
        self.nvme.ring_sq(self.queue)

    def _place(self) -> tuple[int, int] | None:
        for _ in range(64):
            blocks = self.rng.randint(1, self.blocks_max)
            lba = self.rng.randrange(len(self.busy) - blocks + 1)
            if not any(self.busy[lba : lba + blocks]):
                return lba, blocks
        return None

    def _start(self, operation: str, lba: int, blocks: int) -> None:
        nvme, size, slba = self.nvme, blocks * self.block, self.first + lba
        old = bytes(self.model[lba * self.block : lba * self.block + size])
        buffer, data = None, old
        if operation in ("read", "write", "compare", "differ"):
            buffer = self.spare.pop()
            if operation == "write":
                data = self.rng.randbytes(size)
            elif operation == "differ":
                at = self.rng.randrange(size)
                data = old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]
            buffer.fill(bytes(size) if operation == "read" else data)
            part = Buffer(buffer.iova, buffer.view[:size])
            opcode = {"read": nv.READ, "write": nv.WRITE}.get(operation, nv.COMPARE)
            command = nvme.submit_io(
                self.queue,
                opcode,
                self.nsid,
                slba,
                part,
                block=self.block,
                ring=False,
                fua=self.rng.random() < 0.05,
            )
        elif operation == "zeroes":
            data = bytes(size)
            command = nvme.submit_write_zeroes(self.queue, self.nsid, slba, blocks)
        elif operation == "trim":
            data = bytes(size)
            command = nvme.submit_dsm(self.queue, self.nsid, [(slba, blocks)])
        else:
            command = nvme.submit(self.queue, nv.FLUSH, nsid=self.nsid)
        self.busy[lba : lba + blocks] = b"\1" * blocks
        self.running[command.cid] = _Running(command, operation, lba, blocks, buffer, data)

    def _reap(self) -> None:
        """Check what has completed; wait only if nothing has: a wait for another command reaps too."""
        if not self._collect():
            before = self.queue.completed
            self.nvme.wait_until(self.queue.cq, lambda: self.queue.completed > before, "any completion of the load")
            self._collect()

    def _collect(self) -> bool:
        done = [cid for cid, run in self.running.items() if run.command.completion is not None]
        for cid in done:
            self._check(self.running.pop(cid))
        return bool(done)

    def _check(self, run: _Running) -> None:
        what = f"{run.operation} of {run.blocks} blocks at LBA {self.first + run.lba}"
        expected = nv.COMPARE_FAILURE if run.operation == "differ" else nv.OK
        assert run.command.status == expected, f"{what}: status {run.command.status:#x}"
        size = run.blocks * self.block
        if run.buffer is not None:
            assert bytes(run.buffer.view[:size]) == run.data, f"{what}: wrong data in the buffer"
            self.spare.append(run.buffer)
        if run.operation in ("write", "zeroes", "trim"):
            self.model[run.lba * self.block : run.lba * self.block + size] = run.data
        self._release(run)
        self.completed += 1

    def _release(self, run: _Running) -> None:
        self.busy[run.lba : run.lba + run.blocks] = bytes(run.blocks)
