"""Another guest on the same daemon: `check()` proves that it still works and sees no error.

Use: `witness = Witness(daemon)`; after (or during) something hostile elsewhere: `witness.check()`.
"""

from __future__ import annotations

import random

from tests.support.daemon import MIB, Daemon
from tests.support.nvme_driver import OK, READ, WRITE, GuestRam, Nvme

BLOCKS, SIZE, DEPTH = 1024, 4096, 16


class Witness:
    """A controller of its own subsystem with a model of its namespace's first 4 MiB."""

    def __init__(self, daemon: Daemon, name: str = "witness") -> None:
        self.target = daemon.add_subsystem(f"nqn.2026-01.io.test:{name}", [daemon.add_memory(name, 8 * MIB, SIZE)])
        self.ram = GuestRam(4 * MIB)
        self.nvme = Nvme(self.target.path, self.ram, vectors=2)
        self.nvme.enable()
        self.nvme.enable_shadow_doorbells()
        self.queue = self.nvme.create_queue_pair(1, 64)
        self.model = {lba: bytes(SIZE) for lba in range(BLOCKS)}
        self.buffers = [self.ram.buffer(SIZE) for _ in range(DEPTH)]
        self.rng = random.Random(1)

    def check(self, rounds: int = 3) -> None:
        """Write and read back `rounds` batches; every status and every byte must be right."""
        for _ in range(rounds):
            lbas = self.rng.sample(range(BLOCKS), DEPTH)
            for lba, buffer in zip(lbas, self.buffers):
                self.model[lba] = self.rng.randbytes(SIZE)
                buffer.fill(self.model[lba])
            self._run(WRITE, lbas)
            lbas = self.rng.sample(range(BLOCKS), DEPTH // 2) + lbas[: DEPTH // 2]
            self._run(READ, lbas)
            for lba, buffer in zip(lbas, self.buffers):
                assert buffer.bytes() == self.model[lba], f"the witness read wrong data at LBA {lba}"
        self.ram.check_canaries()

    def _run(self, opcode: int, lbas: list[int]) -> None:
        commands = [
            self.nvme.submit_io(self.queue, opcode, 1, lba, buffer, block=SIZE)
            for lba, buffer in zip(lbas, self.buffers)
        ]
        statuses = {completion.status for completion in self.nvme.wait(*commands)}
        assert statuses == {OK}, f"the witness saw {statuses}"

    def close(self) -> None:
        self.nvme.close()
        self.ram.close()
