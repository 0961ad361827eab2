"""The fork server: one process that has imported and compiled everything, and forks a worker whenever asked.

A fork takes milliseconds where loading the worker's program takes most of a second, so a keeper replaces worker
after worker however quickly they die. The worker is forked twice, so that the keeper (a subreaper, see
dpu/worker_process.py) becomes its parent and reaps it; the fork server itself has no child for long.

Use, in the worker's program, before anything has started a thread: ``mine = serve(fd)`` after all imports. In each
worker it returns the channel and heartbeats of that worker; in the fork server it returns None, when the keeper has
closed its end. Request: packet ``fork`` with ``armed`` (are kill points, dpu/killpoint.py) and two descriptors, the
worker's channel and its health memfd; answer: packet ``forked`` with ``pid``.
Errors: OSError when the system has no process left; the fork server then ends, which tells the keeper.
Source: prctl(2) PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER.
"""

from __future__ import annotations

import ctypes
import os
import signal

from dpu import killpoint
from dpu.channel import Channel, Health, Packet, from_fd

NAME = "dpud-forkserver"
WORKER_NAME = "dpud-worker"
"""How the processes are called in ps and top (a kernel's "comm" has 15 characters)."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None)


def die_with(parent: int) -> None:
    """End this process by SIGKILL when ``parent`` ends, also when it just has."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(fd: int) -> tuple[Channel, Health] | None:
    """Fork until the keeper hangs up; see the module.

    :param fd: descriptor of the channel to the keeper, which this owns
    """
    requests, keeper = from_fd(fd), os.getppid()
    _libc.prctl(_PR_SET_NAME, NAME.encode())
    while (packet := requests.recv()) is not None:
        pid = _fork_twice(keeper)
        if pid == 0:
            requests.close()
            return _begin(packet)
        packet.close()
        requests.send("forked", pid=pid)
    return None


def _fork_twice(keeper: int) -> int:
    """0 in a new child of ``keeper``; its pid here, once it is one."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        middle = os.getpid()
        _libc.prctl(_PR_SET_NAME, WORKER_NAME.encode())
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.close(writing)
            os.setsid()  # Ctrl-C in a terminal is the keeper's to handle
            while os.getppid() == middle:  # for the few microseconds that it needs to end
                os.sched_yield()
            die_with(keeper)
            return 0
        os.write(writing, pid.to_bytes(4, "little"))
        os._exit(0)
    os.close(writing)
    pid = int.from_bytes(os.read(reading, 4), "little")
    os.close(reading)
    os.waitpid(middle, 0)
    if not pid:
        raise OSError("no process could be forked")
    return pid


def _begin(packet: Packet) -> tuple[Channel, Health]:
    if not packet.fields["armed"]:
        killpoint.disarm()
    channel_fd, health_fd = packet.fds
    health = Health(health_fd)
    os.close(health_fd)
    return from_fd(channel_fd), health
