"""The host's end of the agent in a guest (images/agent.py, which documents the frames).

    guest = await Guest.connect(vm_directory / "agent")       # as soon as QEMU has been started, or restored
    result = await guest.exec(["nvme", "list"], timeout_s=10)  # ExecResult(code, stdout, stderr)
    text = await guest.run("lsblk | tail -1")                  # a shell command; GuestError unless it succeeds
    await guest.write_file("/tmp/job.fio", data)

Parameters: times in seconds of the host's clock. Limits: a program's output ``OUTPUT_BYTES_MAX`` per stream;
files pass through the guest's memory. Several programs may run at once; files are served one piece
after the other. A file of a device that hangs hangs the agent: read those with a program.
Errors: GuestError names the command, how it ended and the last lines it wrote; GuestGone (also a
ConnectionError) when QEMU closes the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shlex
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dpu.errors import EmuError
from images import agent

CONNECT_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 120.0
DYING_TIMEOUT_S = 5.0
HELLO_AGAIN_S = 1.0  # doubled each time
OUTPUT_BYTES_MAX = 64 << 20
LINES_IN_ERROR = 10
CANNOT_RUN, CANNOT_FIND = 126, 127  # a shell's codes for a program that does not start
_WINDOW = 16  # requests of a file transfer under way at once

OnOutput = Callable[[int, bytes], Awaitable[object] | None]
Input = bytes | AsyncIterator[bytes]


class GuestError(EmuError):
    """Something in the guest failed; ``code`` is that of the program (-n: signal n), None if it has none."""

    def __init__(self, message: str, hint: str = "", code: int | None = None) -> None:
        super().__init__(message, hint)
        self.code = code


class GuestGone(GuestError, ConnectionError):
    """The connection to the agent is closed: QEMU has ended, or ``close`` was called."""


@dataclass(frozen=True)
class ExecResult:
    """How a program ended: exit ``code``, or -n for signal n as in ``subprocess``, and what it wrote."""

    code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class GuestInfo:
    """What the guest says about itself."""

    kernel: str
    cpus: int
    memory_bytes: int
    command_line: str
    uptime_ns: int


class _Call:
    """One request that is under way: a future for its last answer, and what comes before that."""

    def __init__(self, on_output: Callable[[int, bytes], None] | None = None, keep_output: bool = True) -> None:
        self.done: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self.output = {1: bytearray(), 2: bytearray()}
        self.on_output = on_output
        self.keep_output = keep_output

    def answer(self, fields: dict[str, Any], raw: bytes) -> None:
        if self.done.done():
            return
        stream = fields.get("stream")
        if stream not in self.output:
            self.done.set_result((fields, raw))
            return
        if self.keep_output:
            self.output[stream] += raw
        if len(self.output[stream]) > OUTPUT_BYTES_MAX:
            self.done.set_exception(GuestError(f"it wrote more than {OUTPUT_BYTES_MAX >> 20} MiB"))
        elif self.on_output is not None:
            try:
                self.on_output(stream, raw)
            except Exception as error:  # the caller's mistake goes to the caller, not into the reader
                self.done.set_exception(error)


class _Flow:
    """Passes output on, and stops the program while its reader cannot keep up. ``send``: sends it a signal."""

    def __init__(self, on_output: OnOutput, send: Callable[[int], None]) -> None:
        self._on_output = on_output
        self._send = send
        self._waits: set[asyncio.Task[None]] = set()

    def __call__(self, stream: int, data: bytes) -> None:
        until = self._on_output(stream, data)
        if until is None:
            return
        if not self._waits:
            self._send(signal.SIGSTOP)
        task = asyncio.ensure_future(self._continue(until))
        self._waits.add(task)

    async def _continue(self, until: Awaitable[object]) -> None:
        try:
            await until
        except OSError:  # the reader is gone; whoever runs the program will end it
            pass
        finally:
            self._waits.discard(asyncio.current_task())
            if not self._waits:
                self._send(signal.SIGCONT)

    def close(self) -> None:
        for task in self._waits:
            task.cancel()


class Guest:
    """A connection to the agent of one guest. Made by ``connect``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._nonce = ""  # what the answer to this connection's "hello" has in it
        self._gone = ""  # why there is no connection any more
        self._receiving = asyncio.ensure_future(self._receive(reader))

    @classmethod
    async def connect(cls, path: Path, timeout_s: float = CONNECT_TIMEOUT_S) -> Self:
        """Connect to the socket that QEMU listens on, and wait until the agent answers."""
        try:
            async with asyncio.timeout(timeout_s):
                guest = cls(*await _open(path))
                try:
                    await guest._hello()
                except BaseException:
                    await guest.close()
                    raise
                return guest
        except TimeoutError:
            raise GuestError(
                f"the agent in the guest has not answered within {timeout_s:g} s", "see the guest's console"
            ) from None

    async def close(self, why: str = "the connection was closed") -> None:
        """Close the connection; what is under way ends with GuestGone, in the guest with the next host."""
        self._lose(why)
        self._receiving.cancel()
        await asyncio.wait([self._receiving])
        self._writer.transport.abort()  # what a guest that hangs has not taken is not waited for
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    # -- requests

    async def ping(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Return when the agent has answered."""
        await self._request("ping", timeout_s=timeout_s)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None = None,
        input: Input | None = None,
        on_output: OnOutput | None = None,
        keep_output: bool = True,
        check: bool = False,
        tty: Sequence[int | str] | None = None,
    ) -> ExecResult:
        """Run a program and wait for its end.

        ``input``: an iterator is asked for the next piece when the program has taken the one before.
        ``on_output(stream, data)`` is called with each piece as it comes (stream 1 or 2); where it returns an
        awaitable, the program is stopped (SIGSTOP) until that is done. ``keep_output``: False for output without
        end, which is then not in the result. ``check``: another exit code than 0 is a GuestError. After
        ``timeout_s``, or when the caller is cancelled, the program is killed with all of its process group.
        Files and environment are the agent's: PATH, HOME=/root. ``tty``: rows, columns and TERM of a terminal of its
        own; all that comes is then stream 1.
        """
        name = shlex.join(argv)
        flow = on_output and _Flow(on_output, lambda number: self._signal(request, number))
        with self._call(flow, keep_output) as (request, call):
            terminal = {} if tty is None else {"tty": list(tty)}
            self._send({"id": request, "op": "exec", "argv": list(argv), "stdin": bool(input), **terminal})
            try:
                async with asyncio.timeout(timeout_s):
                    fields = await self._until_end(request, call, input or b"")
            except TimeoutError:
                self._kill(request)
                with contextlib.suppress(TimeoutError, GuestError):  # what it wrote until then
                    await asyncio.wait_for(self._await(call), DYING_TIMEOUT_S)
                raise self._failed(name, f"was not finished after {timeout_s:g} s", call) from None
            except GuestGone:
                raise
            except GuestError as error:
                self._kill(request)
                raise self._failed(name, f"failed: {error.message}", call) from None
            except BaseException:
                self._kill(request)
                raise
        if "error" in fields:
            code = CANNOT_FIND if fields.get("errno") == errno.ENOENT else CANNOT_RUN
            raise GuestError(f"cannot run {name} in the guest: {fields['error']}", "see the guest's PATH", code)
        code = -int(fields["signal"]) if "signal" in fields else int(fields["code"])
        if check and code:
            raise self._failed(name, f"ended with {_ending(code)}", call, code)
        return ExecResult(code, bytes(call.output[1]), bytes(call.output[2]))

    async def run(self, command: str, *, timeout_s: float | None = None, input: bytes | None = None) -> str:
        """Run a shell command, which must succeed; returns its standard output."""
        result = await self.exec(["sh", "-c", command], timeout_s=timeout_s, input=input, check=True)
        return result.stdout.decode(errors="replace")

    async def read_file(self, path: str) -> bytes:
        """The contents of a file in the guest."""
        async with self._opened(path, "r") as file:
            data = bytearray()
            size = {"file": file, "size": agent.RAW_BYTES_MAX}
            under_way = deque(self._start("read", **size) for _ in range(_WINDOW))
            while piece := (await self._finish("read", *under_way.popleft()))[1]:
                data += piece
                under_way.append(self._start("read", **size))
            for rest in under_way:  # each finds the end of the file too
                await self._finish("read", *rest)
            return bytes(data)

    async def write_file(self, path: str, data: bytes, permissions: int = 0o644) -> None:
        """Make or replace a file in the guest."""
        async with self._opened(path, "w", permissions=permissions) as file:
            under_way: deque[tuple[int, _Call]] = deque()
            for piece in _slices(data):
                if len(under_way) == _WINDOW:
                    await self._finish("write", *under_way.popleft())
                under_way.append(self._start("write", piece, file=file))
                await self._drain()
            for rest in under_way:
                await self._finish("write", *rest)

    async def set_clock(self, unix_ns: int | None = None) -> None:
        """Set the guest's wall clock, by default to the host's: after a restore it stands where it stood."""
        await self._request("clock", ns=time.time_ns() if unix_ns is None else unix_ns)

    async def reseed(self) -> None:
        """Reseed the guest's random numbers: guests restored from one snapshot would share theirs."""
        await self._request("reseed", os.urandom(64))

    async def info(self) -> GuestInfo:
        """Kernel, CPUs and memory as the guest sees them."""
        fields, _ = await self._request("info")
        return GuestInfo(**{name: fields[name] for name in GuestInfo.__dataclass_fields__})

    # -- one request

    async def _request(
        self, operation: str, raw: bytes = b"", *, timeout_s: float = REQUEST_TIMEOUT_S, **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        return await self._finish(operation, *self._start(operation, raw, **fields), timeout_s=timeout_s)

    def _start(self, operation: str, raw: bytes = b"", **fields: Any) -> tuple[int, _Call]:
        request, call = self._new_call()
        self._send({"id": request, "op": operation, **fields}, raw)
        return request, call

    async def _finish(
        self, operation: str, request: int, call: _Call, timeout_s: float | None = REQUEST_TIMEOUT_S
    ) -> tuple[dict[str, Any], bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                fields, raw = await self._await(call)
        except TimeoutError:
            raise GuestError(f"the agent in the guest has not answered {operation} within {timeout_s:g} s") from None
        finally:
            self._calls.pop(request, None)
        if "error" in fields:
            raise GuestError(f"{operation} in the guest failed: {fields['error']}")
        return fields, raw

    def _new_call(self, flow: _Flow | None = None, keep_output: bool = True) -> tuple[int, _Call]:
        if self._gone:
            raise GuestGone(self._gone)
        self._last_id += 1
        call = self._calls[self._last_id] = _Call(flow, keep_output)
        return self._last_id, call

    @contextlib.contextmanager
    def _call(self, flow: _Flow | None = None, keep_output: bool = True) -> Iterator[tuple[int, _Call]]:
        request, call = self._new_call(flow, keep_output)
        try:
            yield request, call
        finally:
            self._calls.pop(request, None)
            if flow is not None:
                flow.close()

    async def _await(self, call: _Call) -> tuple[dict[str, Any], bytes]:
        await self._drain()
        return await asyncio.shield(call.done)  # a timeout ends the wait, not the call

    @contextlib.asynccontextmanager
    async def _opened(self, path: str, mode: str, **fields: Any) -> Any:
        try:
            found, _ = await self._request("open", path=path, mode=mode, **fields)
        except GuestGone:
            raise
        except GuestError as error:
            raise GuestError(f"{path}: {error.message}", error.hint) from None
        try:
            yield found["file"]
        finally:
            if not self._gone:
                await self._request("close", file=found["file"])

    # -- programs

    async def _until_end(self, request: int, call: _Call, input: Input) -> dict[str, Any]:
        """The program's last answer; its input is given to it meanwhile, as far as it takes it."""
        feeding = asyncio.ensure_future(self._feed(request, input))
        try:
            await asyncio.wait((call.done, feeding), return_when=asyncio.FIRST_COMPLETED)
            if not call.done.done():
                feeding.result()  # where the input fails, so does the program
            fields, _ = await self._await(call)
            return fields
        finally:
            feeding.cancel()
            await asyncio.wait((feeding,))
            if not feeding.cancelled():
                feeding.exception()  # its input came to nothing after its end

    async def _feed(self, request: int, input: Input) -> None:
        if not input:
            return
        async for piece in _pieces(input) if isinstance(input, bytes) else input:
            for part in _slices(piece):
                await self._finish("stdin", *self._start("stdin", part, target=request), timeout_s=None)
        await self._request("stdin", target=request)

    def _kill(self, request: int) -> None:
        self._signal(request, signal.SIGKILL)

    def _signal(self, request: int, number: int) -> None:
        """Ask for it; the answer is nobody's."""
        if not self._gone:
            self._send({"id": 0, "op": "kill", "target": request, "signal": int(number)})

    def _failed(self, name: str, how: str, call: _Call, code: int | None = None) -> GuestError:
        lines = bytes(call.output[2] or call.output[1]).decode(errors="replace").splitlines()
        text = "".join(f"\n  {line}" for line in lines[-LINES_IN_ERROR:])
        return GuestError(f"in the guest, {name} {how}{text}", code=code)

    # -- the connection

    async def _hello(self) -> None:
        """Begin anew with whatever agent is there; what another host left in the channel is dropped."""
        nonce = secrets.token_hex(16)
        with self._call() as (request, call):
            hello = agent.pack({"id": request, "op": "hello", "nonce": nonce})
            again_s = HELLO_AGAIN_S
            self._nonce = nonce
            self._writer.write(hello)
            while True:
                try:
                    async with asyncio.timeout(again_s):
                        fields, _ = await self._await(call)
                        break
                except TimeoutError:
                    # It may be within half a frame, which the zeros end; or not be there yet.
                    again_s *= 2
                    self._writer.write(bytes(agent.FRAME_BYTES_MAX) + hello)
        if fields.get("version") != agent.VERSION:
            raise GuestError(
                f"the agent in the guest speaks version {fields.get('version')}, not {agent.VERSION}",
                "use an image of this release",
            )

    def _send(self, fields: dict[str, Any], raw: bytes = b"") -> None:
        frame = agent.pack(fields, raw)
        if len(frame) - len(raw) > agent.JSON_BYTES_MAX:
            raise GuestError(f"{fields['op']}: {len(frame)} bytes are too much for one request to the guest")
        self._writer.write(frame)

    async def _drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError as error:
            raise GuestGone(f"the connection to the guest's agent is lost: {error}") from None

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        parser = agent.Parser()
        greeted = False
        why = "QEMU closed the connection to the guest's agent"
        try:
            while data := await reader.read(agent.FRAME_BYTES_MAX):
                for fields, raw in parser.feed(data):
                    greeted = greeted or fields.get("nonce") == self._nonce
                    request = fields.get("id")
                    if greeted and isinstance(request, int) and request in self._calls:
                        self._calls[request].answer(fields, raw)
        except OSError as error:
            why = f"the connection to the guest's agent is lost: {error}"
        self._lose(why)

    def _lose(self, why: str) -> None:
        self._gone = self._gone or why
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(GuestGone(self._gone))
                call.done.exception()  # nobody may be waiting


async def _open(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_unix_connection(path, limit=2 * agent.FRAME_BYTES_MAX)
        except (FileNotFoundError, ConnectionRefusedError):  # QEMU has not come that far
            await asyncio.sleep(0.01)


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _slices(data: bytes) -> Iterator[bytes]:
    """In parts that a frame can hold."""
    return (data[start : start + agent.RAW_BYTES_MAX] for start in range(0, len(data), agent.RAW_BYTES_MAX))


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
