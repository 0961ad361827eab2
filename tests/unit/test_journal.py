"""The journal against a model that keeps every version of every block: what a power cut may leave."""

from __future__ import annotations

import asyncio
import random

import pytest

from dpu.journal import Journal, Journaled

BLOCK, BLOCKS = 512, 24


class Disk:
    """Blocks in memory."""

    def __init__(self) -> None:
        self.data = bytearray(BLOCK * BLOCKS)
        self.syncs = 0

    async def sync(self) -> None:
        self.syncs += 1

    async def read(self, length: int, offset: int) -> bytes:
        return bytes(self.data[offset : offset + length])

    async def write(self, data: bytes, offset: int, durable: bool) -> None:
        self.data[offset : offset + len(data)] = data

    async def zero(self, length: int, offset: int, durable: bool) -> None:
        await self.write(bytes(length), offset, durable)

    async def deallocate(self, length: int, offset: int) -> bool:
        await self.write(bytes(length), offset, False)
        return True


@pytest.mark.parametrize("atomic_bytes", [0, 4 * BLOCK])
@pytest.mark.parametrize("lost", [True, False])
def test_what_a_cut_may_leave(atomic_bytes: int, lost: bool) -> None:
    """200 histories of writes, zeroes, discards, FUA, flushes and deaths; each block ends with a legal version."""

    async def history(seed: int) -> None:
        dice, disk = random.Random(seed), Disk()
        journal = Journal.create(atomic_bytes, BLOCK)
        versions = [[bytes(BLOCK)] for _ in range(BLOCKS)]
        whole: list[tuple[int, int, bytes]] = []  # writes since the flush that are there as a whole or not
        for step in range(dice.randrange(20)):
            blocks = Journaled(disk, journal)
            first, count = dice.randrange(BLOCKS - 6), dice.randint(1, 6)
            what = dice.choice(["write", "write", "write", "zero", "discard", "fua", "flush", "death"])
            data = bytes([step + 1]) * (BLOCK * count) if what in ("write", "fua") else bytes(BLOCK * count)
            if what == "flush":
                await blocks.sync()
            elif what == "death":  # the next worker has the same memfd, and may do the last write again
                journal = Journal(journal.fd, atomic_bytes, BLOCK)
                continue
            elif what in ("write", "fua"):
                await blocks.write(data, first * BLOCK, what == "fua")
            elif what == "zero":
                await blocks.zero(len(data), first * BLOCK, False)
            else:
                assert await blocks.deallocate(len(data), first * BLOCK) is True
            if what != "flush":
                for at in range(count):
                    versions[first + at].append(data[at * BLOCK : (at + 1) * BLOCK])
                whole.append((first, count, data))
            if what in ("flush", "fua"):
                versions = [[one[-1]] for one in versions]
                whole = []
        await journal.cut(disk, None if lost else seed)
        found = [bytes(disk.data[at : at + BLOCK]) for at in range(0, BLOCK * BLOCKS, BLOCK)]
        for block, legal in zip(found, versions):
            assert block == legal[0] if lost else block in legal
        if atomic_bytes and not lost and whole:
            first, count, data = whole[-1]  # nothing has overwritten the last one
            if len(data) <= atomic_bytes and all(v[-1] != v[-2] for v in versions[first : first + count]):
                there = [found[first + i] == data[i * BLOCK : (i + 1) * BLOCK] for i in range(count)]
                older = [data[:BLOCK] in versions[first + i][:-1] for i in range(count)]
                assert any(older) or all(there) or not any(there), "torn"
        assert journal.records() == []
        journal.close()

    for seed in range(200):
        asyncio.run(history(seed))


def test_a_full_journal_makes_room_by_making_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill() -> None:
        monkeypatch.setattr("dpu.journal.BYTES_MAX", 8 * BLOCK)
        disk, journal = Disk(), Journal.create(0, BLOCK)
        blocks = Journaled(disk, journal)
        for i in range(12):
            await blocks.write(bytes([i + 1]) * BLOCK, i * BLOCK, False)
        assert disk.syncs == 1
        await blocks.write(b"x" * (10 * BLOCK), 0, False)
        assert journal.records() == [], "larger than the journal: durable at once"
        await blocks.write(b"y" * BLOCK, 0, False)
        await journal.cut(disk, None)
        assert disk.data[: 10 * BLOCK] == b"x" * (10 * BLOCK)
        journal.close()

    asyncio.run(fill())
