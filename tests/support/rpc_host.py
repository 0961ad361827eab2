"""A host for the target that does everything but serve I/O, and the RPC server on it in a thread.

``FakeHost`` keeps what the keeper keeps (stash, listening sockets, committed configuration) in a ``Kept``
that outlives it, so that a test can kill one host and adopt with the next. Every call is a step; at step
``kill_at`` the host dies as by SIGKILL: nothing it does after that reaches ``Kept``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpu.backends import Backend, MemoryBackend
from dpu.errors import RpcError
from dpu.iostat import Row
from dpu.rpc.methods import dispatcher
from dpu.rpc.server import Server
from dpu.target import Subsystem, Target
from dpu.trace import Part
from dpu.volumes.area import Area


class Killed(BaseException):
    """The worker is dead; a BaseException so that no handler of the code under test takes it for an error."""


@dataclass
class Kept:
    """What is left when a worker dies."""

    stash: dict[str, int] = field(default_factory=dict)
    sockets: dict[str, tuple[str, socket.socket]] = field(default_factory=dict)
    config: str = "{}"
    directory: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def fds(self) -> set[int]:
        return {*self.stash.values(), *(sock.fileno() for _, sock in self.sockets.values())}

    def close(self) -> None:
        for fd in self.stash.values():
            os.close(fd)
        for path, sock in self.sockets.values():
            sock.close()
            Path(path).unlink(missing_ok=True)


class FakeHost:
    def __init__(self, kept: Kept | None = None, kill_at: int = -1) -> None:
        self.kept = kept if kept is not None else Kept()
        self.kill_at = kill_at
        self.steps = 0
        self.dead = False
        self.events: list[Any] = []
        self.rows: list[dict[str, Any]] = []
        self.refuse_namespaces = False
        self.commit_error: Exception | None = None
        self.stopped = threading.Event()

    @property
    def directory(self) -> str:
        return self.kept.directory.name

    @property
    def poller_count(self) -> int:
        return 1

    def memory_of(self, backend: MemoryBackend) -> int:
        return 0

    @contextlib.asynccontextmanager
    async def quiet(self, area: Area) -> AsyncIterator[None]:
        self.step(("quiet",))
        yield

    async def grace(self) -> None:
        await asyncio.sleep(0)

    async def settled_volumes(self, area: Area) -> None:
        await asyncio.sleep(0)

    async def volume_changed(self, volume: Backend) -> None:
        self.step(("volume_changed", volume.name))

    def step(self, what: Any) -> None:
        if self.dead or self.steps == self.kill_at:
            self.dead = True
            raise Killed
        self.steps += 1
        self.events.append(what)

    def stash(self, key: str, fd: int) -> None:
        self.step(("stash", key))
        assert key not in self.kept.stash, key
        self.kept.stash[key] = os.dup(fd)

    def unstash(self, key: str) -> None:
        self.step(("unstash", key))
        if key in self.kept.stash:
            os.close(self.kept.stash.pop(key))

    async def settled(self) -> None:
        await asyncio.sleep(0)

    async def listen(self, key: str, path: str) -> None:
        self.step(("listen", key))
        await asyncio.sleep(0)  # here and below: as an answer of the keeper's, it does not come at once
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(path)
            sock.listen()
        except OSError:
            sock.close()
            raise
        self.kept.sockets[key] = (path, sock)

    async def unlisten(self, key: str) -> None:
        self.step(("unlisten", key))
        for _ in range(3):  # longer than "listen": an overtaking call would find the old socket
            await asyncio.sleep(0)
        path, sock = self.kept.sockets.pop(key)
        sock.close()
        os.unlink(path)

    def commit(self, config: dict[str, Any]) -> None:
        self.step(("commit",))
        if self.commit_error is not None:
            raise self.commit_error
        self.kept.config = json.dumps(config)

    def power_lost(self, subsystem: Subsystem) -> None:
        self.step(("power_lost", subsystem.nqn))

    def clear_gate(self, number: int) -> None:
        self.step(("clear_gate", number))

    async def release(self, number: int) -> int:
        self.step(("release", number))
        return 0

    def fault_counts(self, number: int) -> tuple[int, int]:
        return 0, 0

    def health_changed(self, backend: Any, persistent: bool) -> None:
        self.step(("health_changed", backend.name, persistent))

    def gate_changed(self, name: str) -> None:
        self.step(("gate_changed", name))

    def namespace_added(self, subsystem: Subsystem, nsid: int) -> None:
        self.step(("namespace_added", subsystem.nqn, nsid))
        if self.refuse_namespaces:
            raise RpcError(-12, "Cannot allocate memory")

    async def namespace_changed(self, subsystem: Subsystem, nsid: int) -> None:
        what = "namespace_changed" if nsid in subsystem.by_nsid else "namespace_removed"
        self.step((what, subsystem.nqn, nsid))
        await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def paused(self, subsystem: Subsystem) -> AsyncIterator[None]:
        self.step(("paused", subsystem.nqn))
        yield
        self.step(("resumed", subsystem.nqn))

    async def subsystem_deleted(self, subsystem: Subsystem) -> None:
        self.step(("subsystem_deleted", subsystem.nqn))
        await asyncio.sleep(0)

    def controllers(self) -> list[dict[str, Any]]:
        return self.rows

    def stats(self) -> dict[str, Any]:
        return {"pollers": 1}

    def reactors(self) -> list[dict[str, Any]]:
        return []

    def io_rows(self, nqn: str | None = None) -> list[Row]:
        return []

    async def trace_start(self, entries: int) -> None:
        self.events.append(("trace_start", entries))

    async def trace_stop(self) -> None:
        self.events.append(("trace_stop",))

    def trace(self) -> list[Part]:
        return []

    def clock(self) -> tuple[int, int]:
        return 10**9, time.monotonic_ns()

    def stop(self) -> None:
        self.stopped.set()


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[tuple[str, FakeHost, Target]]:
    """An RPC server on a socket in ``directory``: (its path, its host, its target)."""
    path = str(directory / "rpc.sock")
    host = FakeHost()
    listening = threading.Event()
    loop = asyncio.new_event_loop()
    finish = asyncio.Event()
    targets: list[Target] = []

    async def serve() -> None:
        target = Target(host)
        targets.append(target)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
            sock.listen(128)
            server = Server(sock, dispatcher(target), send_timeout_s=2)
            await server.start()
            listening.set()
            await finish.wait()
            await server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert listening.wait(10)
    try:
        yield path, host, targets[0]
    finally:
        loop.call_soon_threadsafe(finish.set)
        thread.join(10)
        loop.close()
        for backend in targets[0].bdevs.values():
            backend.close()
        host.kept.close()
