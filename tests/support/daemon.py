"""Runs `dpud` for tests: starts it on temporary sockets, configures it by JSON-RPC, kills its workers.

Use: `with Daemon(directory) as daemon: target = daemon.standard_target(); Nvme(target.path, ram)`.
The RPC client is a few lines of our own: the daemon's framing meets something it did not come with.
Errors: `RpcError` with the code of the error object; AssertionError with the log when it does not come up.
"""

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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dpu.forkserver import NAME as FORK_SERVER
from dpu.forkserver import WORKER_NAME

DEADLINE_S = 120.0  # the first start on a loaded machine compiles the fast path
PR_SET_PDEATHSIG = 1
MIB = 1 << 20

NS_512, NS_4K, NS_NULL, NS_FILE = 1, 2, 3, 4  # namespaces of the standard target
STANDARD_BYTES = 64 * MIB  # size of each, except the null one
NULL_BYTES = 1 << 30
MAX_NAMESPACES = 8


class RpcError(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error.get('code')}: {error.get('message')}")
        self.code = error.get("code")


@dataclass(frozen=True)
class Target:
    """A subsystem as configured: where its socket is."""

    nqn: str
    path: str


class Daemon:
    """A running `dpud`. `directory` must be short: sockets live in it."""

    def __init__(
        self,
        directory: Path,
        *,
        cpus: str = "",
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.rpc_path = str(directory / "rpc")
        self.log_path = directory / "dpud.log"
        self.env = dict(os.environ) | dict(env or {})
        self.command = [str(Path(sys.executable).with_name("dpud")), "-r", self.rpc_path, *args]
        if cpus:
            self.command += ["-m", cpus]
        self.process: subprocess.Popen[bytes] | None = None
        self._numbers = 0
        self._targets = 0

    def __enter__(self) -> Daemon:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # --- life
    def start(self) -> None:
        """Start and wait until an RPC is answered."""
        prctl = ctypes.CDLL(None).prctl
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        try:
            self.rpc("spdk_get_version")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it; SIGKILL when SIGTERM does not within the deadline."""
        if self.process is None:
            return
        children = self.children()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in children:  # a worker that outlives its keeper must not disturb the next test
            wait_for_exit(pid)
        self.process = None

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log(self, lines: int = 200) -> str:
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def __repr__(self) -> str:
        return f"dpud in {self.directory}, its log:\n{self.log()}"

    # --- RPC
    def rpc(self, method: str, params: Any = None, *, deadline_s: float = DEADLINE_S) -> Any:
        """Call and return the result; connects again while the daemon starts. Raises RpcError."""
        self._numbers += 1
        request = {"jsonrpc": "2.0", "method": method, "id": self._numbers}
        if params is not None:
            request["params"] = params
        deadline = time.monotonic() + deadline_s
        with self._connect(deadline) as sock:
            sock.settimeout(max(deadline - time.monotonic(), 0.01))
            sock.sendall(json.dumps(request, indent=2).encode())
            text, answer = "", None
            while answer is None:
                chunk = sock.recv(65536)
                assert chunk, f"RPC connection closed during {method}\n{self!r}"
                text += chunk.decode()
                try:
                    answer, _ = json.JSONDecoder().raw_decode(text)
                except json.JSONDecodeError:
                    continue
        assert answer["id"] == self._numbers
        if "error" in answer:
            raise RpcError(answer["error"])
        return answer["result"]

    def _connect(self, deadline: float) -> socket.socket:
        assert self.process is not None
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(self.rpc_path)
                return sock
            except (FileNotFoundError, ConnectionRefusedError):
                sock.close()
            try:
                code = self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                assert time.monotonic() < deadline, f"no RPC socket\n{self!r}"
            else:
                raise AssertionError(f"dpud exited with {code}\n{self!r}")

    # --- workers
    def children(self) -> list[int]:
        if self.process is None:
            return []
        pids: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            try:
                pids += [int(word) for word in task.read_text().split()]
            except OSError:
                continue
        return pids

    def worker_pid(self) -> int:
        """The serving worker: the child that has the RPC listening socket, which a standby has not.

        Waits through a change of workers. Raises AssertionError at the deadline.
        """
        inodes = {
            line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines() if self.rpc_path in line
        }
        deadline = time.monotonic() + DEADLINE_S
        assert self.process is not None
        while True:
            for pid in self.children():
                if inodes & socket_inodes(pid):
                    return pid
            assert time.monotonic() < deadline, f"no serving worker\n{self!r}"
            try:
                self.process.wait(0.005)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"dpud exited\n{self!r}")

    def fork_server_pid(self) -> int:
        """The child that workers are forked from."""
        (pid,) = (pid for pid in self.children() if Path(f"/proc/{pid}/comm").read_text().rstrip() == FORK_SERVER)
        return pid

    def kill_worker(self, number: int = signal.SIGKILL) -> int:
        """Send a signal to the serving worker; its pid. SIGKILL also waits until it is gone."""
        pid = self.worker_pid()
        os.kill(pid, number)
        if number == signal.SIGKILL:
            wait_for_exit(pid)
        return pid

    # --- targets
    def add_subsystem(
        self, nqn: str, bdevs: Sequence[str], *, serial: str = "", listener: Mapping[str, bool] | None = None
    ) -> Target:
        """A subsystem with one listener and its options; bdevs become namespaces 1.."""
        self._targets += 1
        directory = self.directory / f"c{self._targets}"
        directory.mkdir()
        self.rpc(
            "nvmf_create_subsystem",
            {
                "nqn": nqn,
                "serial_number": serial or f"TEST{self._targets:016d}",
                "allow_any_host": True,
                "max_namespaces": MAX_NAMESPACES,
            },
        )
        for nsid, bdev in enumerate(bdevs, 1):
            added = self.rpc("nvmf_subsystem_add_ns", {"nqn": nqn, "namespace": {"bdev_name": bdev, "nsid": nsid}})
            assert added == nsid
        address = {"trtype": "VFIOUSER", "traddr": str(directory), "trsvcid": "0"}
        self.rpc("nvmf_subsystem_add_listener", {"nqn": nqn, "listen_address": address, **(listener or {})})
        return Target(nqn, str(directory / "cntrl"))

    def add_memory(self, name: str, size: int = STANDARD_BYTES, block_size: int = 512) -> str:
        params = {"name": name, "num_blocks": size // block_size, "block_size": block_size}
        return str(self.rpc("bdev_malloc_create", params))

    def create_transport(self) -> None:
        self.rpc("nvmf_create_transport", {"trtype": "VFIOUSER"})

    def standard_target(
        self, nqn: str = "nqn.2026-01.io.test:standard", *, listener: Mapping[str, bool] | None = None
    ) -> Target:
        """Namespaces: memory 512 B, memory 4096 B, null 512 B, file 512 B."""
        self.create_transport()
        self.add_memory("mem512")
        self.add_memory("mem4k", block_size=4096)
        self.rpc("bdev_null_create", {"name": "null", "num_blocks": NULL_BYTES // 512, "block_size": 512})
        path = self.directory / "disk.img"
        with path.open("wb") as file:
            file.truncate(STANDARD_BYTES)
        self.rpc("bdev_aio_create", {"name": "file", "filename": str(path), "block_size": 512, "fallocate": True})
        return self.add_subsystem(nqn, ["mem512", "mem4k", "null", "file"], listener=listener)


def standby_ready(keeper: int, serving: int) -> bool:
    """Whether another worker than the serving one waits for its turn, in epoll_wait (232, 281 on x86-64)."""
    for child in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
        try:
            name = Path(f"/proc/{child}/comm").read_text().rstrip()
            waits = Path(f"/proc/{child}/syscall").read_text().split()[0] in ("232", "281")
        except OSError:
            continue
        if int(child) != serving and name == WORKER_NAME and waits:
            return True
    return False


def socket_inodes(pid: int) -> set[str]:
    """Inode numbers of the sockets a process holds, as text."""
    found: set[str] = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            match = re.fullmatch(r"socket:\[(\d+)\]", _readlink(f"/proc/{pid}/fd/{name}"))
            if match:
                found.add(match[1])
    except OSError:
        pass
    return found


def _readlink(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def wait_for_exit(pid: int, deadline_s: float = 30.0) -> None:
    """Wait until a process that is not our child has ended; kill it at the deadline."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([fd], [], [], deadline_s)[0]:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"process {pid} did not end")
    finally:
        os.close(fd)
