"""A keeper in a process of its own over the fake worker, and a vfio-user client that counts what it gets."""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpu import forkserver
from dpu.vfio_user import wire
from dpu.vfio_user.wire import Command

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
"""Far beyond what anything here takes; a test that needs it has failed."""

_LAUNCHER = """
import json, logging, os, sys
from dpu import keeper
from dpu.errors import EmuError
options = json.loads(sys.argv[1])
vars(keeper).update(options.pop("constants", {}))
logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="dpud: %(message)s")
try:
    on_ready = lambda: logging.info("ready")
    keeper.Keeper(environment=os.environ, cpus=[0], on_ready=on_ready, **options).run()
except EmuError as error:
    sys.exit(f"dpud: {error}")
"""


class KeeperLab:
    """One keeper process; ``log`` are its lines so far.

    :param env: more environment; :param options: of Keeper, and ``constants`` of its module to change
    """

    def __init__(self, tmp_path: Path, *, env: dict[str, str] | None = None, **options: Any) -> None:
        self.directory = tmp_path
        self.rpc_path = str(tmp_path / "rpc.sock")
        self.fake_log = tmp_path / "fake.log"
        self.fake_log.touch()
        worker = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
        arguments = {"rpc_socket": self.rpc_path, "command": worker, "watchdog_s": 0.0, **options}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "FAKE_LOG": str(self.fake_log), **(env or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, json.dumps(arguments)],
            stderr=subprocess.PIPE,
            env=environment,
        )
        self.log: list[str] = []
        self._changed = threading.Condition()
        self._closed = False
        self._seen = 0
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.log.append(line.decode().rstrip())
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_log(self, pattern: str) -> re.Match[str]:
        """The next line, after the one found last, that matches."""
        found: list[re.Match[str]] = []

        def search() -> bool:
            while not found and self._seen < len(self.log):
                match = re.search(pattern, self.log[self._seen])
                self._seen += 1
                found.extend([match] if match else [])
            return bool(found) or self._closed

        with self._changed:
            self._changed.wait_for(search, DEADLINE_S)
        assert found, f"no line {pattern!r} in {self.log}"
        return found[0]

    def ready(self) -> KeeperLab:
        self.wait_log("ready")
        return self

    def rpc(self, op: str, **fields: Any) -> dict[str, Any]:
        """One request to whoever serves; one that died with its worker is sent again."""
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(DEADLINE_S)
                sock.connect(self.rpc_path)
                try:
                    sock.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")
                    line = sock.makefile().readline()
                except (BrokenPipeError, ConnectionResetError):
                    continue
                if line:
                    return dict(json.loads(line))
        raise AssertionError("the RPC socket closes every connection")

    def listen(self, key: str = "a") -> str:
        path = str(self.directory / key)
        assert self.rpc("listen", key=key, path=path)["error"] == ""
        return path

    def kill_worker(self, how: int = signal.SIGKILL) -> int:
        """Kill who serves and wait until it is gone."""
        pid = int(self.rpc("state")["pid"])
        pidfd = os.pidfd_open(pid)
        os.kill(pid, how)
        wait_exit(pidfd)
        return pid

    def events(self, **wanted: Any) -> list[dict[str, Any]]:
        lines = self.fake_log.read_text().splitlines()
        return [e for e in map(json.loads, lines) if all(e.get(k) == v for k, v in wanted.items())]

    def until(self, condition: Callable[[], bool]) -> None:
        """Pass the time with requests until ``condition`` holds."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, "it never holds"
            self.rpc("state")

    def fds(self) -> int:
        """How many descriptors the keeper has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def fork_server(self) -> int:
        """Its pid."""
        (pid,) = (pid for pid in self.children() if process_name(pid) == forkserver.NAME)
        return pid

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in tasks.read_text().split()]

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.end()

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.end()


def process_name(pid: int) -> str:
    """Its name in ps, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip()
    except OSError:
        return ""


def in_recvmsg(pid: int) -> bool:
    """Whether a process waits for a packet (syscall 47 on x86-64)."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] == "47"


def wait_exit(pidfd: int) -> None:
    """Wait for the end of a process and close its pidfd."""
    ready, _, _ = select.select([pidfd], [], [], DEADLINE_S)
    os.close(pidfd)
    assert ready, "the process goes on"


class VfioClient:
    """A client of one connection; message ids count up, and every reply must have the id that it answers."""

    def __init__(self, path: str, negotiate: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(path)
        self.next_id = 1
        if negotiate:
            self.call(Command.VERSION, bytes(4) + b'{"capabilities":{"max_msg_fds":16}}\0')

    def message(self, cmd: int, payload: bytes = b"", flags: int = 0) -> bytes:
        self.next_id += 1
        return wire.message(self.next_id - 1, cmd, payload, flags)

    def send(self, cmd: int, payload: bytes = b"", flags: int = 0, fds: Sequence[int] = ()) -> int:
        socket.send_fds(self.sock, [self.message(cmd, payload, flags)], fds)
        return self.next_id - 1

    def receive(self) -> tuple[Any, bytes]:
        """The next reply: header and payload."""
        header = wire.Header.from_buffer_copy(self._exactly(wire.HEADER_BYTES))
        assert header.flags & wire.HeaderFlag.TYPE_MASK == wire.HeaderFlag.REPLY
        return header, self._exactly(header.msg_size - wire.HEADER_BYTES)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            assert piece, "end of file"
            data += piece
        return data

    def reply_to(self, msg_id: int) -> tuple[int, bytes]:
        """(errno, payload) of the next reply, which must be the one to ``msg_id``."""
        header, payload = self.receive()
        assert header.msg_id == msg_id
        failed = bool(header.flags & wire.HeaderFlag.ERROR)
        assert failed == bool(header.error_no)
        return header.error_no, payload

    def call(self, cmd: int, payload: bytes = b"", fds: Sequence[int] = ()) -> tuple[int, bytes]:
        return self.reply_to(self.send(cmd, payload, fds=fds))

    def read(self, offset: int, count: int = 4) -> bytes:
        error_no, payload = self.call(Command.REGION_READ, bytes(wire.RegionAccess(offset, 0, count)))
        assert error_no == 0
        return payload[ctypes.sizeof(wire.RegionAccess) :]

    def write(self, offset: int, data: bytes, posted: bool = False) -> None:
        payload = bytes(wire.RegionAccess(offset, 0, len(data))) + data
        if posted:
            self.send(Command.REGION_WRITE, payload, wire.HeaderFlag.NO_REPLY)
        else:
            assert self.call(Command.REGION_WRITE, payload)[0] == 0

    def dma_map(self, iova: int, size: int, fd: int | None = None, offset: int = 0) -> int:
        payload = bytes(wire.DmaMap(32, 3, offset, iova, size))
        return self.call(Command.DMA_MAP, payload, [] if fd is None else [fd])[0]

    def dma_unmap(self, iova: int, size: int) -> int:
        return self.call(Command.DMA_UNMAP, bytes(wire.DmaUnmap(24, 0, iova, size)))[0]

    def set_irqs(self, start: int, fds: Sequence[int], count: int | None = None, flags: int = 0x24) -> int:
        payload = bytes(wire.IrqSet(20, flags, 2, start, len(fds) if count is None else count))
        return self.call(Command.DEVICE_SET_IRQS, payload, fds)[0]

    def silent(self) -> bool:
        """Whether nothing is there to be read (a reply that nobody asked for would be)."""
        return not select.select([self.sock], [], [], 0)[0]

    def close(self) -> None:
        self.sock.close()
