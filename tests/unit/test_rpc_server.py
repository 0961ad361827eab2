"""The server on real sockets: slow clients, many clients, and a listening socket that is not its own."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dpu.rpc.dispatcher import Dispatcher, Method, Param, string
from dpu.rpc.framing import REQUEST_BYTES_MAX
from dpu.rpc.server import CONNECTIONS_MAX, Server

DEADLINE_S = 30


async def big() -> str:
    return "x" * (8 << 20)


async def echo(text: str) -> str:
    return text


async def version() -> str:
    return "v"


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving(
    path: Path, *more: Method, send_timeout_s: float = 10
) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    methods = [Method("big", big), Method("echo", echo, (Param("text", string),)), Method("version", version), *more]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen(256)
        server = Server(sock, Dispatcher({row.name: row for row in methods}), send_timeout_s=send_timeout_s)
        await server.start()
        clients: list[Client] = []

        async def connect() -> Client:
            client = await asyncio.open_unix_connection(str(path), limit=32 << 20)
            clients.append(client)
            return client

        try:
            yield connect
        finally:
            for _, writer in clients:
                writer.close()
            await server.close()
            assert path.exists(), "the socket's file is the keeper's"
            sock.getsockname()


async def ask(client: Client, method: str, **params: Any) -> Any:
    reader, writer = client
    request = {"jsonrpc": "2.0", "id": 1, "method": method, **({"params": params} if params else {})}
    writer.write(json.dumps(request, indent=2).encode())
    return json.loads(await reader.readline())["result"]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(limited())


def test_half_a_request_and_an_answer_not_taken_block_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s") as connect:
            (_, half), (_, deaf), other = await connect(), await connect(), await connect()
            half.write(b'{"jsonrpc":"2.0","id":1,"meth')
            deaf.transport.pause_reading()  # type: ignore[attr-defined]
            deaf.write(b'{"id":1,"method":"big"}' * 4)
            await half.drain()
            await deaf.drain()
            assert await ask(other, "version") == "v"
            assert await ask(await connect(), "echo", text="ü" * 1000) == "ü" * 1000

    run(scenario)


def test_a_client_that_never_takes_its_answer_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", send_timeout_s=0.05) as connect:
            reader, writer = await connect()
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b'{"id":1,"method":"big"}')
            await writer.drain()
            other = await connect()
            while "did not take its answer" not in caplog.text:
                await ask(other, "version")
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            text = await reader.read()
            assert 0 < len(text) < 8 << 20

    run(scenario)


def test_requests_of_one_client_are_answered_in_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s") as connect:
            reader, writer = await connect()
            requests = [{"id": n, "method": "echo", "params": {"text": str(n)}} for n in range(500)]
            text = "".join(json.dumps(request, indent=n % 3 or None) for n, request in enumerate(requests)).encode()
            for start in range(0, len(text), 997):
                writer.write(text[start : start + 997])
            writer.write_eof()  # what came before the end is still answered
            answers = [json.loads(line) for line in (await reader.read()).splitlines()]
            assert [(one["id"], one["result"]) for one in answers] == [(n, str(n)) for n in range(500)]

    run(scenario)


def test_one_connection_more_than_allowed_is_closed_and_a_free_place_is_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s") as connect:
            clients = [await connect() for _ in range(CONNECTIONS_MAX)]
            for client in clients:
                assert await ask(client, "version") == "v"
            reader, _ = await connect()
            assert await reader.read() == b""
            clients[0][1].close()
            await clients[0][1].wait_closed()
            while True:  # until the server has seen that end
                reader, writer = await connect()
                try:
                    assert await ask((reader, writer), "version") == "v"
                    break
                except (json.JSONDecodeError, ConnectionError):
                    continue

    run(scenario)


def test_bad_streams_are_closed_without_an_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s") as connect:
            for text in (b"nonsense", b'{"a":}', b"[" * 65, b'{"a":"' + b"x" * REQUEST_BYTES_MAX, b"\x00", b"{}x"):
                reader, writer = await connect()
                writer.write(text)
                try:
                    answer = await reader.read()
                except ConnectionResetError:  # closed with bytes of ours unread
                    answer = b""
                assert b"result" not in answer
                assert answer.count(b"\n") == (1 if text == b"{}x" else 0)
            assert await ask(await connect(), "version") == "v"

    run(scenario)


def test_a_client_that_left_does_not_stop_its_call(tmp_path: Path) -> None:
    async def scenario() -> None:
        started, gate, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            started.set()
            await gate.wait()
            ended.set()

        async with serving(tmp_path / "s", Method("slow", slow)) as connect:
            _, writer = await connect()
            writer.write(b'{"id":1,"method":"slow"}')
            await started.wait()
            writer.close()
            gate.set()
            await ended.wait()
            assert await ask(await connect(), "version") == "v"

    run(scenario)


def test_the_next_server_serves_the_same_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "s"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
            sock.listen()
            for _ in range(2):
                server = Server(sock.dup(), Dispatcher({"version": Method("version", version)}))
                client = await asyncio.open_unix_connection(str(path))  # before it accepts
                await server.start()
                assert await ask(client, "version") == "v"
                await server.close()
                assert await client[0].read() == b""
                client[1].close()

    run(scenario)
