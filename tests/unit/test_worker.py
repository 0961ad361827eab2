"""Connections that come and go faster than the worker sees to them: clients without a device behind them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpu import worker as product
from dpu.backends import FileBackend
from dpu.channel import Packet
from dpu.worker import Worker

DEADLINE_S = 30.0


class Channel:
    """Remembers what was sent to the keeper."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, op: str, **fields: Any) -> None:
        self.sent.append((op, fields))


class Guest:
    """What the worker asks of a client."""

    def __init__(self, listener: str) -> None:
        self.subsystem: Any = None
        self.controller = SimpleNamespace(cntlid=1, life=lambda: None)
        self.listener = listener
        self.hung_up = False
        self.drained = asyncio.Event()

    def start(self, *, taking: bool) -> None:
        pass

    async def close(self) -> None:
        self.hung_up = True
        await self.drained.wait()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """One with a subsystem, that serves."""
    health: Any = None
    channel: Any = Channel()
    worker = Worker(channel, health)
    subsystem = object()

    def client(packet: Packet, areas: Any) -> Guest:
        guest = worker.clients[packet.fields["client"]] = Guest(packet.fields["listener"])  # type: ignore[assignment]
        return guest  # type: ignore[return-value]

    monkeypatch.setattr(
        worker,
        "target",
        SimpleNamespace(
            subsystem_of=lambda key: subsystem,
            commit_counts=lambda: None,
            iostat=SimpleNamespace(settle=lambda rows: None),
            retire=lambda *what: None,
            forget=lambda number: None,
        ),
    )
    monkeypatch.setattr(worker, "_client", client)
    monkeypatch.setattr(worker, "_io_rows_of", lambda client: [])
    worker._serving = True
    return worker


def connected(number: int, fds: list[int] | None = None) -> Packet:
    return Packet("client", {"client": number, "listener": "one"}, fds=fds or [])


def gone(number: int) -> Packet:
    return Packet("gone", {"client": number})


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_client_that_goes_while_it_waits_for_the_last_one(worker: Worker) -> None:
    """It is not served: nobody would ever tell the worker of its end again, and the next one would wait for that."""
    reading, writing = os.pipe()

    async def run() -> None:
        worker._packet(connected(1))
        await until(lambda: 1 in worker.clients)
        first: Any = worker.clients[1]
        worker._packet(gone(1))
        await until(lambda: first.hung_up)
        worker._packet(connected(2, [writing]))
        await asyncio.sleep(0)
        worker._packet(gone(2))
        await asyncio.sleep(0)
        worker._packet(connected(3))
        first.drained.set()
        await until(lambda: 3 in worker.clients)
        assert list(worker.clients) == [3]

    asyncio.run(run())
    assert os.read(reading, 1) == b"", "a descriptor of the second client is open"
    os.close(reading)


def test_a_client_that_waits_for_the_last_one_is_served(worker: Worker) -> None:
    async def run() -> None:
        worker._packet(connected(1))
        await until(lambda: 1 in worker.clients)
        first: Any = worker.clients[1]
        worker._packet(gone(1))
        await until(lambda: first.hung_up)
        worker._packet(connected(2))
        await asyncio.sleep(0)
        assert list(worker.clients) == [1]
        first.drained.set()
        await until(lambda: list(worker.clients) == [2])

    asyncio.run(run())


@pytest.mark.parametrize("serving", [False, True])
def test_a_worker_that_waits_for_a_slow_disk_is_not_taken_for_hung(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serving: bool
) -> None:
    """What the last one asked of the disk holds the lock; the keeper gives up on a start that says nothing."""
    monkeypatch.setattr(product, "FENCE_POLLS_SAID", 3)
    worker._serving = serving
    path = tmp_path / "disk"
    path.write_bytes(bytes(4096))
    backend = FileBackend.create("file", str(path), cache_mode="buffered")
    backend.direct_fd = os.open(path, os.O_RDWR)  # not every file system has O_DIRECT
    last = os.open(path, os.O_RDWR)
    fcntl.fcntl(last, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))  # F_OFD_SETLK
    polls = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 10:
            os.close(last)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(worker._fence(backend))
    assert len(polls) == 10
    channel: Any = worker.channel
    assert channel.sent == ([] if serving else [("loading", {})] * 3)
    backend.close()
