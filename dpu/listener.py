"""Listening AF_UNIX sockets whose files never get in a later run's way.

Use: ``listener = listen(path)``; accept from ``listener.sock``, which does not block; ``listener.close()``.
A socket file that a crash left behind is recognised by connecting to it, and replaced.
Limits: 107 bytes of path. Errors: OSError with a readable ``strerror``.
Source: unix(7).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False)
class Listener:
    """A listening socket and the identity of its file, so that only our own file is ever removed."""

    path: str
    sock: socket.socket
    identity: tuple[int, int]

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self.sock.close()
        with contextlib.suppress(OSError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self.identity:
                os.unlink(self.path)


def private_directory(path: str) -> str:
    """The directory, beside its RPC socket ``path``, of what dies with a daemon; made by whoever needs it."""
    return f"{path}.volumes"


def listen(path: str) -> Listener:
    """Listen at ``path``, mode 0600; a socket file that nobody listens at any more is replaced.

    :raises OSError: EADDRINUSE when somebody listens there, EEXIST for a file that is no socket, ...
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked_directory(os.path.dirname(path) or "."):
            _remove_stale(path)
            mask = os.umask(0o177)
            try:
                sock.bind(path)
            finally:
                os.umask(mask)
            sock.listen(128)
            status = os.lstat(path)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return Listener(path, sock, (status.st_dev, status.st_ino))


@contextlib.contextmanager
def _locked_directory(path: str) -> Iterator[None]:
    """Keep two daemons from looking at one stale file at the same time, without a lock file left behind."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        else:
            raise OSError(errno.EBUSY, "another process holds a lock on the directory")
        yield
    finally:
        os.close(fd)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "a file that is no socket is in the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:  # its backlog is full: somebody is there
            pass
        raise OSError(errno.EADDRINUSE, "another process listens there")
