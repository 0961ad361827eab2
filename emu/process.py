"""Child processes that cannot outlive us, each with a log file of its own.

    child = Process.spawn(["dpud", "-r", "/run/x"], log=Path("dpud.log"), ledger=ledger, what="dpud dpu0")
    code = await child.wait()
    code = await child.terminate(grace_s=5)

Parameters: ``grace_s`` seconds between SIGTERM and SIGKILL.
Limits: ``spawn`` is called inside a running event loop, which then notes the end of the child. The kernel
kills the child when the *thread* that spawned it ends (prctl(2), PR_SET_PDEATHSIG): never a helper thread.
Errors: EmuError when the program cannot be started.
A process is named by pid and start time (proc(5), /proc/pid/stat field 22) and the boot, never by its name:
a pid is used again, and a program under a private loader shows the loader's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dpu.errors import EmuError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_libc = ctypes.CDLL(None, use_errno=True)  # looked up here: after fork() there is no time for dlopen()


@dataclass(frozen=True)
class Identity:
    """One process, now and for ever: ``start`` in clock ticks since boot, ``boot`` the kernel's boot id."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process that has ``pid`` now; None when there is none."""
        fields = _stat(pid)
        return None if fields is None else cls(pid, int(fields[19]), boot_id())

    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        fields = _stat(self.pid)
        return (
            fields is not None
            and fields[0] not in ("Z", "X")
            and int(fields[19]) == self.start
            and self.boot == boot_id()
        )

    def kill(self, number: int = signal.SIGKILL) -> bool:
        """Send SIGKILL or another signal to this process and to no other; False when it is gone."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive():  # the pidfd holds the process looked at, so no reuse can come between
                return False
            signal.pidfd_send_signal(fd, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)


class Register(Protocol):
    """Where a process is written down: emu.ledger.Ledger."""

    def process(self, identity: Identity, what: str) -> None: ...


class Process:
    """A running child. Made by ``spawn``."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path, what: str, ledger: Register | None) -> None:
        identity = Identity.of(popen.pid)
        assert identity is not None, "a child that was not waited for keeps its /proc entry"
        self.pid = popen.pid
        self.identity = identity
        self.log = log
        self.what = what
        self._popen = popen
        if ledger is not None:
            ledger.process(identity, what)
        loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = loop.create_future()
        self._pidfd = os.pidfd_open(popen.pid)
        loop.add_reader(self._pidfd, self._reap, loop)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exit.set_result(self._popen.wait())

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        *,
        log: Path,
        what: str,
        ledger: Register | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Start ``argv`` in a session of its own, output appended to ``log``; ``env`` is added to ours."""
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died before the line above: no signal will come
                os._exit(1)

        with log.open("ab") as output:
            try:
                popen = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    pass_fds=pass_fds,
                    start_new_session=True,  # a Ctrl-C of the terminal is ours to handle, in order
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise EmuError(
                    f"cannot start {what}: {argv[0]}: {error.strerror}", "see whether that runs"
                ) from error
        return cls(popen, log, what, ledger)

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._exit.result() if self._exit.done() else None

    async def wait(self) -> int:
        """Until it ends; the exit code. Any number of tasks may wait."""
        return await asyncio.shield(self._exit)

    async def terminate(self, grace_s: float = 5.0) -> int:
        """SIGTERM, then SIGKILL after ``grace_s``; the exit code."""
        self._signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """SIGKILL; the exit code."""
        self._signal(signal.SIGKILL)
        return await self.wait()

    def _signal(self, number: signal.Signals) -> None:
        if not self._exit.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def cpu_s(self) -> float:
        """CPU seconds used so far by all its threads, user and system."""
        fields = None if self._exit.done() else _stat(self.pid)
        return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) * _TICK_S


def boot_id() -> str:
    """Which boot of the kernel this is (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def tail(path: Path, lines: int = 30, bytes_max: int = 65536) -> list[str]:
    """The last ``lines`` of a log, read from its last ``bytes_max``; [] when it is not there."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - bytes_max))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def _stat(pid: int) -> list[str] | None:
    """/proc/pid/stat from field 3 (state) on; the name before it may hold blanks and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def thread_cpu_ns(pid: int, tid: int) -> int:
    """CPU nanoseconds of a thread (proc(5), schedstat); 0 where it has ended, or the kernel keeps none."""
    try:
        return int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0])
    except OSError:
        return 0


def process_cpu_ns(pid: int) -> int:
    """CPU nanoseconds of all threads that ``pid`` has; 0 where there is none, or the kernel keeps none."""
    try:
        tids = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    return sum(thread_cpu_ns(pid, int(tid)) for tid in tids)


def tree_cpu_s(root: int) -> float:
    """CPU seconds of ``root`` and all processes below it, those that have ended and were waited for included."""
    total_ticks, todo = 0, [root]
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    while todo:
        pid = todo.pop()
        todo += parents.get(pid, [])
        if fields := _stat(pid):
            total_ticks += sum(int(field) for field in fields[11:15])
    return total_ticks * _TICK_S
