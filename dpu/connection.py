"""One client's socket as the keeper uses it: whole messages in, replies out, never waiting.

Use: ``message = connection.read()`` when readable, ``connection.answer(reply)``, ``connection.flush()`` when
writable and ``connection.backlog``. Workers hold dups of the socket, and a dup shares O_NONBLOCK, so that
flag is never relied on: every call says MSG_DONTWAIT.
Limits: those of dpu/vfio_user/keeping.py; unsent replies are the caller's to bound (do not read meanwhile).
Errors: ConnectionLost, with the reason, when the connection cannot go on.
Source: unix(7) for what happens to descriptors in a stream.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Sequence

from dpu.channel import close_fds, receive, transmit
from dpu.vfio_user.keeping import Message, MessageReader, StreamError


class ConnectionLost(Exception):
    """The connection is over; the text is why."""


class Connection:
    """The keeper's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = MessageReader()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self.open = True

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._sock.fileno()

    @property
    def partial(self) -> bool:
        """Whether a message has been read in part."""
        return self._reader.partial

    @property
    def backlog(self) -> bool:
        """Whether a reply waits for the client to take it."""
        return bool(self._out)

    @property
    def backlog_bytes(self) -> int:
        """How much waits for the client to take it."""
        return sum(len(data) for data, _ in self._out)

    def read(self) -> Message | None:
        """Receive one piece; the message that it completes, or None.

        :raises BlockingIOError: nothing to read
        :raises ConnectionLost: end of file or a stream that cannot go on
        """
        try:
            data, fds, flags = receive(self._sock, self._reader.want, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if flags & socket.MSG_CTRUNC or not data:
            close_fds(fds)
            lost = flags & socket.MSG_CTRUNC
            raise ConnectionLost("descriptors were lost: too many are open" if lost else "closed by the client")
        try:
            return self._reader.feed(data, fds)
        except StreamError as error:
            raise ConnectionLost(str(error)) from error

    def answer(self, reply: bytes, fds: Sequence[int] = ()) -> None:
        """Send ``reply`` as far as the client takes it now, the rest by ``flush``; takes ``fds``.

        :raises ConnectionLost: the client is gone
        """
        if not reply or not self.open:
            return close_fds(fds)
        self._out.append((memoryview(reply), list(fds)))
        return self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the client takes it.

        :raises ConnectionLost: the client is gone
        """
        while self._out:
            data, fds = self._out[0]
            try:
                sent = transmit(self._sock, data, fds, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            close_fds(fds)  # they went with the first byte
            self._out.popleft()
            if sent < len(data):
                self._out.appendleft((data[sent:], []))

    def hang_up(self) -> None:
        """End the connection for every dup of its socket.

        Nothing is left unread: the reset that would follow makes QEMU abort.
        """
        if not self.open:
            return
        self.open = False
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            while self._sock.recv(65536, socket.MSG_DONTWAIT):
                pass

    def close(self) -> None:
        """Hang up and let go of everything."""
        self.hang_up()
        self._sock.close()
        self._reader.close()
        while self._out:
            close_fds(self._out.popleft()[1])
