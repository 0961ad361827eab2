"""The processes of a keeper as it sees them: the fork server, and the workers that come from it.

Use: ``server = start(argv, environment)`` from the main thread; ``server.ask(armed)``; ``server.worker(packet)`` for
its answer. ``process.wait()`` when ``process.pidfd`` is readable; ``process.close()``. The fork server's program gets
the descriptor number of its channel as its last argument (dpu/forkserver.py). All of them end with their keeper,
however that ends.
Errors: OSError when no process can be started.
Source: prctl(2) PR_SET_CHILD_SUBREAPER, pidfd_open(2), waitid(2) P_PIDFD.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dpu.channel import Health, Packet, QueuedChannel
from dpu.forkserver import die_with

WATCH_TICKS = 8
"""Samples without a heartbeat until a worker counts as hung."""

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


class State(enum.Enum):
    """Life of a worker: STARTING -> READY -> ADOPTED -> UP, and dead from any of them."""

    STARTING = enum.auto()
    READY = enum.auto()
    ADOPTED = enum.auto()
    UP = enum.auto()


class Watchdog:
    """Tells from samples of heartbeats whether one has stopped.

    It counts samples, not seconds: while the whole machine (or the keeper) stands still, nothing counts.
    """

    def __init__(self, ticks: int = WATCH_TICKS) -> None:
        self._ticks = ticks
        self._words: tuple[int, ...] = ()
        self._still: list[int] = []

    def stuck(self, words: tuple[int, ...]) -> int | None:
        """Take a sample; return the index of a word that did not move for ``ticks`` samples."""
        if len(words) != len(self._words):
            self._words, self._still = words, [0] * len(words)
            return None
        self._still = [0 if new != old else n + 1 for new, old, n in zip(words, self._words, self._still)]
        self._words = words
        return next((i for i, n in enumerate(self._still) if n >= self._ticks), None)


@dataclass(eq=False)
class Child:
    """A process of ours: ended by ``kill``, reaped by ``wait`` or seen to have ended by its ``pidfd``."""

    pid: int
    channel: QueuedChannel
    pidfd: int = field(init=False)
    verdict: str = ""
    channel_open: bool = True

    def __post_init__(self) -> None:
        self.pidfd = os.pidfd_open(self.pid)

    def kill(self, verdict: str = "", number: int = signal.SIGKILL) -> None:
        """Send a signal, by default SIGKILL; ``verdict`` is why, for the log."""
        self.verdict = self.verdict or verdict
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def ended(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for its end; whether it has come."""
        return bool(select.select([self.pidfd], [], [], max(0.0, timeout_s))[0])

    def wait(self) -> str:
        """Reap it; how it ended: "SIGKILL", "exit 1", with the verdict when it was us."""
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert result is not None  # only with WNOHANG
        status = result.si_status
        if result.si_code == os.CLD_EXITED:
            text = f"exit {status}"
        else:
            text = signal.Signals(status).name if status in _SIGNALS else f"signal {status}"
        return f"{text} by {self.verdict}" if self.verdict else text

    def close(self) -> None:
        """Let go of one that has ended."""
        os.close(self.pidfd)
        self.channel_open = False
        self.channel.close()


_SIGNALS = {number.value for number in signal.Signals}


@dataclass(eq=False)
class Worker(Child):
    """One worker process and what the keeper shares with it."""

    health: Health = field(kw_only=True)
    since_s: float = field(default_factory=time.monotonic)
    state: State = State.STARTING
    watchdog: Watchdog = field(default_factory=Watchdog)
    stuck: int | None = None  # the word of the heartbeat that has stopped
    ended_s: float | None = None

    def enter(self, state: State) -> None:
        """Note the time of a change of state."""
        self.state = state
        self.since_s = time.monotonic()

    def close(self) -> None:
        super().close()
        self.health.close()


@dataclass(eq=False)
class ForkServer(Child):
    """The process that workers are forked from; one request at a time."""

    _asked: tuple[QueuedChannel, Health] | None = None

    @property
    def busy(self) -> bool:
        """Whether a request has not been answered yet."""
        return self._asked is not None

    def ask(self, armed: bool) -> None:
        """Request a worker; ``armed``: with kill points (dpu/killpoint.py).

        :raises OSError: it is gone, or descriptors have run out
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._asked = QueuedChannel(mine), Health(health_fd := Health.create())
            try:
                self.channel.send("fork", fds=(theirs.fileno(), health_fd), armed=armed)
            except OSError:  # no request, so its end is not that of one as well
                self._drop_request()
                raise
            finally:
                os.close(health_fd)

    def worker(self, packet: Packet) -> Worker:
        """The worker of the last request.

        :raises ValueError: the packet is no answer to it
        """
        if packet.op != "forked" or self._asked is None:
            raise ValueError(f"{packet.op!r} from the fork server")
        (channel, health), self._asked = self._asked, None
        return Worker(int(packet.fields["pid"]), channel, health=health)

    def close(self) -> None:
        super().close()
        self._drop_request()

    def _drop_request(self) -> None:
        asked, self._asked = self._asked or (), None
        for each in asked:
            each.close()


def start(command: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
    """Start a fork server that dies with this process; this process becomes the parent of its orphans.

    :param command: argv; the descriptor number of its channel is appended
    :param environment: its environment and that of its workers
    :raises OSError: fork or exec failed
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = os.getpid()
    with theirs:
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                start_new_session=True,  # Ctrl-C in a terminal is the keeper's to handle
                # The kernel takes the *thread* that forks for the parent, hence "from the main thread".
                preexec_fn=lambda: die_with(keeper),
            )
        except (OSError, subprocess.SubprocessError) as error:
            mine.close()
            raise OSError(str(error)) from error
    process.returncode = 0  # reaped by its pidfd, not by subprocess
    return ForkServer(process.pid, QueuedChannel(mine))
