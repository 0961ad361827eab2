"""A connection to a JSON-RPC socket of SPDK's kind, through PyPI's ``spdk`` client.

Use: ``with Client(path) as client: client.call("bdev_get_bdevs", {"name": "disk"})``. The connection is made at the
first call and kept. Not for several threads at once; ``abort`` may be called from another one.
Limits: ``timeout_s`` for each answer. Errors: RpcError with the code and text of an error answer; EmuError when
nobody listens, the connection is lost, or no answer comes in time (the connection is then closed).
Source: PyPI spdk 26.9, rpc/client.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from spdk.rpc.client import JSONRPCClient, JSONRPCException

from dpu.errors import EmuError, RpcError

TIMEOUT_S = 60.0


class Client:
    """``path``: of the socket. ``timeout_s``: longest wait for an answer, in seconds.

    ``warnings``: what a ``dpud`` had to say beside the result of the last ``call`` (SPDK says nothing).
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S) -> None:
        self.path = os.fspath(path)
        self.timeout_s = timeout_s
        self.warnings: list[str] = []
        self._client: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; the next call makes a new one."""
        client, self._client = self._client, None
        if client is not None and client.sock is not None:
            client.sock.close()

    def abort(self) -> None:
        """End a call that another thread waits in."""
        sock: socket.socket | None = self._client.sock if self._client is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def call(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """The result of one method."""
        with self._errors(method):
            if self._client is None:
                self._client = self._connect()
            # Not the client's own call(): it makes one text of an error answer and its request.
            self._client.send(method, dict(params or {}))
            answer = self._client.recv()
        self.warnings = answer.get("warnings", [])
        return _result(answer)

    def batch(self, calls: Sequence[tuple[str, Mapping[str, Any] | None]]) -> list[Any]:
        """The results of several methods, sent as one request; an RpcError in place of one that failed."""
        if not calls:
            return []
        with self._errors("a batch"), contextlib.closing(self._connect(batch_mode=True)) as client:
            numbers = [client.add_request(method, dict(params or {})) for method, params in calls]
            client.flush()
            answers = {answer["id"]: answer for answer in client.recv()}
        results: list[Any] = []
        for number in numbers:
            try:
                results.append(_result(answers[number]))
            except RpcError as error:
                results.append(error)
        return results

    def _connect(self, **options: Any) -> Any:
        client = JSONRPCClient(self.path, timeout=self.timeout_s, **options)
        client.get_logger().handlers.clear()  # each client adds one to the logger that they share
        return client

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Our errors for the client's; after one the connection is of no use: an answer may still come."""
        try:
            yield
        except JSONRPCException as error:
            self.close()
            first = str(error.message).strip().splitlines()[0]
            raise EmuError(
                f"{what} at {self.path}: {first}", "is the daemon running, and is this its socket?"
            ) from error
        except OSError as error:
            self.close()
            raise EmuError(
                f"{what} at {self.path}: {error.strerror or error}", "the daemon's log may say why"
            ) from error
        except BaseException:
            self.close()
            raise


def _result(answer: Any) -> Any:
    if "error" in answer:
        raise RpcError(int(answer["error"]["code"]), str(answer["error"]["message"]))
    return answer["result"]
