"""One worker process as its keeper sees it: started, watched, ended.

Use: ``worker = start(argv, environment)`` from the main thread; ``worker.wait()`` when ``worker.pidfd`` is
readable; ``worker.close()``. The worker's program gets two descriptor numbers as its last arguments: its
channel (dpu/channel.py) and the health memfd. It ends with its keeper, however that ends.
Errors: OSError when no process can be started.
Source: prctl(2) PR_SET_PDEATHSIG, pidfd_open(2).
"""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dpu.channel import Health, QueuedChannel

WATCH_TICKS = 8
"""Samples without a heartbeat until a worker counts as hung."""

_PR_SET_PDEATHSIG = 1
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
class Worker:
    """One worker process and what the keeper shares with it."""

    process: subprocess.Popen[bytes]
    pidfd: int
    channel: QueuedChannel
    health: Health
    since_s: float
    state: State = State.STARTING
    watchdog: Watchdog = field(default_factory=Watchdog)
    verdict: str = ""
    ended_s: float | None = None
    channel_open: bool = True

    @property
    def pid(self) -> int:
        return self.process.pid
        """Process id."""
        return self.process.pid

    def enter(self, state: State) -> None:
        """Note the time of a change of state."""
        self.state = state
        self.since_s = time.monotonic()

    def kill(self, verdict: str = "") -> None:
        """End it by SIGKILL; ``verdict`` is why, for the log."""
        self.verdict = self.verdict or verdict
        self.process.kill()

    def wait(self) -> str:
        """Reap it; how it ended: "SIGKILL", "exit 1", with the verdict when it was us."""
        code = self.process.wait()
        if code >= 0:
            text = f"exit {code}"
        else:
            text = signal.Signals(-code).name if -code in _SIGNALS else f"signal {-code}"
        return f"{text} by {self.verdict}" if self.verdict else text

    def close(self) -> None:
        """Let go of a worker that has ended."""
        os.close(self.pidfd)
        self.channel_open = False
        self.channel.close()
        self.health.close()


_SIGNALS = {number.value for number in signal.Signals}


def start(command: Sequence[str], environment: Mapping[str, str]) -> Worker:
    """Start a worker that dies with this process.

    :param command: argv; the descriptor numbers of the channel and the health memfd are appended
    :param environment: its environment
    :raises OSError: fork or exec failed
    """
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    health_fd = Health.create()
    keeper = os.getpid()

    def bind_to_keeper() -> None:
        # The kernel takes the *thread* that forks for the parent, hence "from the main thread".
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)

    fds = (theirs.fileno(), health_fd)
    try:
        process = subprocess.Popen(
            [*command, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C in a terminal is the keeper's to handle
            preexec_fn=bind_to_keeper,
        )
        health = Health(health_fd)
    except (OSError, subprocess.SubprocessError) as error:
        mine.close()
        raise OSError(str(error)) from error
    finally:
        theirs.close()
        os.close(health_fd)
    return Worker(process, os.pidfd_open(process.pid), QueuedChannel(mine), health, time.monotonic())
