"""The RPC server: connections on a listening socket that somebody else owns.

Use: ``server = Server(sock, dispatcher); await server.start(); ...; await server.close()``. The socket stays
open and its file stays where it is: both are the keeper's, and the next worker accepts on them.
Each connection is a task of its own; its requests are answered one after the other, in order.
Limits: CONNECTIONS_MAX at a time (one more is closed at once), one request and one answer in memory for each,
SEND_TIMEOUT_S for a client to take its answer. An idle connection may stay.
Errors: a connection whose stream is no JSON is closed, as SPDK does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from dpu.rpc.dispatcher import Dispatcher
from dpu.rpc.framing import FramingError, Splitter

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
SEND_TIMEOUT_S = 10.0
_READ_BYTES = 65536
_ACCEPT_RETRY_S = 0.2


class Server:
    def __init__(
        self, sock: socket.socket, dispatcher: Dispatcher, *, send_timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        """``sock``: a listening stream socket; it is made non-blocking."""
        self._sock = sock
        self._dispatcher = dispatcher
        self._send_timeout_s = send_timeout_s
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._sock.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop accepting and drop the connections. Work that a request has begun goes on."""
        tasks = [*self._connections, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        # Not asyncio's own server: from Python 3.13 on that removes the socket's file when it closes.
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                log.error("cannot accept an RPC connection: %s", error.strerror)
                await asyncio.sleep(_ACCEPT_RETRY_S)  # out of descriptors: some may be given back
                continue
            if len(self._connections) >= CONNECTIONS_MAX:
                log.warning("an RPC connection refused: %d are open", CONNECTIONS_MAX)
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        splitter = Splitter()
        loop = asyncio.get_running_loop()
        with contextlib.closing(connection):
            connection.setblocking(False)
            try:
                while data := await loop.sock_recv(connection, _READ_BYTES):
                    splitter.feed(data)
                    while (text := splitter.next_value()) is not None:
                        answer = await self._dispatcher.answer(text)
                        await self._send(connection, answer.text)
                        for action in answer.actions:
                            action()
            except FramingError as error:
                log.warning("RPC connection closed: %s", error)
            except TimeoutError:
                log.warning("RPC connection closed: the client did not take its answer in %g s", self._send_timeout_s)
            except OSError as error:
                log.info("RPC connection lost: %s", error.strerror)
            except Exception:
                log.exception("RPC connection closed")

    async def _send(self, connection: socket.socket, text: bytes) -> None:
        if text:
            async with asyncio.timeout(self._send_timeout_s):
                await asyncio.get_running_loop().sock_sendall(connection, text)
