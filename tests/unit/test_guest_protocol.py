"""emu/guest.py and images/agent.py against each other, joined as QEMU joins them, without a VM.

Files and programs are compared with what this host does by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.guest import ExecResult, Guest, GuestError, GuestGone
from images import agent

PATIENCE_S = 60.0


class Port:
    """A virtio-serial port: one agent, at most one host; what the agent says to no host is lost."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "agent"
        self.host: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Port:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", agent.__file__, str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.reader, self.writer = await asyncio.open_connection(sock=ours)
        self.server = await asyncio.start_unix_server(self._serve, self.path)
        self.outward = asyncio.ensure_future(self._outward())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.outward.cancel()
        self.server.close()
        self.process.kill()
        self.process.wait()
        self.writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.host = writer
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.writer.write(data)
                await self.writer.drain()
        self.host = None
        writer.close()

    async def _outward(self) -> None:
        while data := await self.reader.read(65536):
            if self.host is not None:
                self.host.write(data)
                with contextlib.suppress(ConnectionError):
                    await self.host.drain()


@contextlib.asynccontextmanager
async def connected(port: Port) -> AsyncIterator[Guest]:
    guest = await Guest.connect(port.path, PATIENCE_S)
    try:
        yield guest
    finally:
        await guest.close()


Scenario = Callable[[Port, Guest], Coroutine[Any, Any, None]]


def run(directory: Path, scenario: Scenario) -> None:
    """``scenario`` with an agent and a guest."""

    async def main() -> None:
        async with Port(directory) as port, connected(port) as guest:
            await scenario(port, guest)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


# -- programs whose input and output have no end


def test_a_stream_of_input_is_asked_for_as_the_program_takes_it(tmp_path: Path) -> None:
    """A program that reads nothing gets what a pipe holds, and not a piece more."""
    asked = 0
    go = tmp_path / "go"

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal asked
        for _ in range(40):
            asked += 1
            yield bytes(65536)

    async def scenario(port: Port, guest: Guest) -> None:
        program = f"while [ ! -e {go} ]; do sleep 0.01; done; wc -c"
        running = asyncio.ensure_future(guest.exec(["sh", "-c", program], input=pieces()))
        for _ in range(20):
            await guest.ping()  # answered after every request before it
        assert 1 <= asked <= 3
        go.touch()
        assert (await running).stdout.split() == [b"2621440"]
        assert asked == 40

    run(tmp_path, scenario)


def test_input_for_a_program_that_has_ended_is_over(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield bytes(65536)

    async def scenario(port: Port, guest: Guest) -> None:
        assert (await guest.exec(["sh", "-c", "exit 3"], input=pieces())).code == 3
        assert (await guest.exec(["head", "-c", "70000"], input=pieces())).stdout == bytes(70000)

    run(tmp_path, scenario)


def test_input_that_a_program_has_closed_is_dropped(tmp_path: Path) -> None:
    asked = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal asked
        for _ in range(10):
            asked += 1
            yield bytes(65536)

    async def scenario(port: Port, guest: Guest) -> None:
        program = f"exec 0<&-; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; exit 4"
        running = asyncio.ensure_future(guest.exec(["sh", "-c", program], input=pieces()))
        await until(lambda: asked == 10)
        (tmp_path / "go").touch()
        assert (await running).code == 4

    run(tmp_path, scenario)


def test_a_program_whose_output_is_not_taken_is_stopped(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        got, taken = 0, asyncio.Event()

        def slow(stream: int, data: bytes) -> Awaitable[object] | None:
            nonlocal got
            got += len(data)
            return taken.wait()

        program = "echo $$ >pid; exec head -c 50000000 /dev/zero"
        argv = ["sh", "-c", f"cd {tmp_path}; {program}"]
        running = asyncio.ensure_future(guest.exec(argv, on_output=slow, keep_output=False))
        await until(lambda: got > 0 and (tmp_path / "pid").exists())
        pid = (tmp_path / "pid").read_text().strip()
        await until(lambda: "\nState:\tT" in Path(f"/proc/{pid}/status").read_text())
        for _ in range(20):
            await guest.ping()  # others are served meanwhile
        assert got < 10_000_000
        taken.set()
        result = await running
        assert (result.code, result.stdout, got) == (0, b"", 50_000_000)

    run(tmp_path, scenario)


@pytest.mark.parametrize(("program", "code"), [("/no/such", 127), ("/etc/passwd", 126)])
def test_a_program_that_does_not_start_has_a_shell_s_code(tmp_path: Path, program: str, code: int) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        with pytest.raises(GuestError, match="cannot run") as caught:
            await guest.exec([program])
        assert caught.value.code == code

    run(tmp_path, scenario)


# -- frames


def test_frame_is_what_the_agent_s_docstring_says() -> None:
    text = b'{"id":1,"op":"ping"}'
    expected = b"\x7e" + struct.pack("<III", len(text), 3, zlib.crc32(text + b"raw")) + text + b"raw"
    assert agent.pack({"id": 1, "op": "ping"}, b"raw") == expected


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_frames_are_found_however_they_are_cut_and_whatever_is_between_them(data: st.DataObject) -> None:
    garbage = st.one_of(st.binary(max_size=40), st.integers(0, 40).map(bytes), st.just(b"\x7e" * 5))
    wanted = data.draw(st.lists(st.tuples(st.integers(0, 99), st.binary(max_size=60)), max_size=5))
    stream = b""
    for number, raw in wanted:
        stream += data.draw(garbage) + agent.pack({"id": number}, raw)
    stream += bytes(agent.FRAME_BYTES_MAX)  # ends whatever the garbage pretended to begin
    parser, found = agent.Parser(), []
    while stream:
        cut = data.draw(st.integers(1, 80)) if len(stream) < 2000 else 100_000
        found += parser.feed(stream[:cut])
        stream = stream[cut:]
    assert found == [({"id": number}, raw) for number, raw in wanted]


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"{", b'{"a":}', b"\xff\xfe", b"[" * 60_000, b'"x"'], ids=lambda t: repr(t[:8])
)
def test_frame_without_an_object_is_dropped(text: bytes) -> None:
    bad = b"\x7e" + struct.pack("<III", len(text), 0, zlib.crc32(text)) + text
    assert agent.Parser().feed(bad + agent.pack({"id": 1})) == [({"id": 1}, b"")]


# -- programs


def test_exec_gives_output_and_exit_code(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        command = ["sh", "-c", "echo out; echo err >&2; exit 7"]
        here = subprocess.run(command, capture_output=True)
        assert await guest.exec(command) == ExecResult(here.returncode, here.stdout, here.stderr)
        assert (await guest.exec(["sh", "-c", "kill -TERM $$"])).code == -15
        assert await guest.run("printf x | tr x y") == "y"
        # Python ignores SIGPIPE, a program must not: yes would complain, and end later
        assert await guest.exec(["sh", "-c", "yes | head -1"]) == ExecResult(0, b"y\n", b"")

    run(tmp_path, scenario)


def test_exec_checks_say_command_code_and_last_lines(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        with pytest.raises(GuestError, match=r"sh -c .*exit code 3") as caught:
            await guest.run("seq 100 >&2; exit 3")
        assert caught.value.code == 3
        assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [str(n) for n in range(91, 101)]
        with pytest.raises(GuestError, match="signal SIGSEGV"):
            await guest.run("kill -SEGV $$")
        with pytest.raises(GuestError, match=r"no-such-program.*No such file"):
            await guest.exec(["no-such-program"])
        with pytest.raises(GuestError, match=r"exec: \d+ bytes are too much"):
            await guest.exec(["echo", "x" * agent.JSON_BYTES_MAX])
        assert (await guest.exec(["echo", "x" * 60_000])).stdout == b"x" * 60_000 + b"\n"

    run(tmp_path, scenario)


def test_exec_passes_input_larger_than_any_buffer(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        data = os.urandom(1_000_000)
        assert (await guest.exec(["cat"], input=data)).stdout == data
        assert (await guest.exec(["head", "-c", "10"], input=data)).stdout == data[:10]
        assert (await guest.exec(["cat"])).stdout == b""
        assert (await guest.exec(["cat"], input=b"")).stdout == b""

    run(tmp_path, scenario)


def test_exec_streams_while_the_program_runs(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        gate = tmp_path / "gate"
        seen: list[tuple[int, bytes]] = []

        def on_output(stream: int, data: bytes) -> None:
            seen.append((stream, data))
            gate.touch()  # the program goes on only because its first words came through

        command = f"echo first; while [ ! -e {gate} ]; do sleep 0.01; done; echo second >&2"
        result = await guest.exec(["sh", "-c", command], timeout_s=PATIENCE_S, on_output=on_output)
        assert seen == [(1, b"first\n"), (2, b"second\n")]
        assert (result.stdout, result.stderr) == (b"first\n", b"second\n")

        def broken(stream: int, data: bytes) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await guest.exec(["sh", "-c", "echo x; sleep 1000"], on_output=broken)
        await guest.ping()

    run(tmp_path, scenario)


def test_programs_run_at_the_same_time(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        # each opens its own end of a FIFO, which returns only when the other's program runs too
        os.mkfifo(tmp_path / "fifo")
        reading = guest.exec(["cat", str(tmp_path / "fifo")], timeout_s=PATIENCE_S)
        writing = guest.exec(["sh", "-c", f"echo met > {tmp_path}/fifo"], timeout_s=PATIENCE_S)
        result, _ = await asyncio.gather(reading, writing)
        assert result.stdout == b"met\n"
        many = await asyncio.gather(*(guest.run(f"echo {n}") for n in range(30)))
        assert many == [f"{n}\n" for n in range(30)]

    run(tmp_path, scenario)


def test_timeout_and_cancellation_kill_all_that_the_program_has_started(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        pids: list[int] = []

        def on_output(stream: int, data: bytes) -> None:
            pids.extend(int(line) for line in data.split())

        own_session = "setsid sh -c 'echo $$; sleep 1000; :' &"  # as fio's jobs have; its sleep is two levels down
        command = ["sh", "-c", f"sleep 1000 & echo $!; echo $$; {own_session} wait"]
        with pytest.raises(GuestError, match=r"not finished after 1 s\n"):
            await guest.exec(command, timeout_s=1, on_output=on_output)
        cancelled = asyncio.ensure_future(guest.exec(command, on_output=on_output))
        await until(lambda: len(pids) == 6)
        cancelled.cancel()
        await until(lambda: not any(alive(pid) for pid in pids))

    run(tmp_path, scenario)


def test_a_program_has_a_terminal_of_its_own(tmp_path: Path) -> None:
    """It controls the session, has the size and name asked for, and turns Ctrl-C into SIGINT."""

    async def scenario(port: Port, guest: Guest) -> None:
        shown = bytearray()

        async def keys() -> AsyncIterator[bytes]:
            yield b"read it\n"
            await until(lambda: b"sleeping" in shown)
            yield b"\x03"

        script = "tty; stty size; echo $TERM; read x; echo \"[$x]\"; trap 'echo interrupted; exit 7' INT; "
        argv = ["sh", "-c", f"{script}: >/dev/tty && echo sleeping; sleep 1000 & wait"]
        done = await guest.exec(
            argv,
            input=keys(),
            timeout_s=PATIENCE_S,
            tty=(33, 77, "vt220"),
            on_output=lambda _, data: shown.extend(data),
        )
        assert done.code == 7 and re.fullmatch(
            rb"(read it\r\n)?/dev/pts/\d+\r\n(read it\r\n)?33 77\r\n(read it\r\n)?vt220\r\n(read it\r\n)?"
            rb"\[read it\]\r\nsleeping\r\n\^Cinterrupted\r\n",
            done.stdout,
        ), done
        assert (await guest.exec(["tty"], timeout_s=PATIENCE_S)).stdout == b"not a tty\n"

    run(tmp_path, scenario)


def test_background_program_that_keeps_the_output_open_delays_nobody(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        pid = int(await guest.run("sleep 1000 & echo $!", timeout_s=PATIENCE_S))
        assert alive(pid)
        os.kill(pid, 9)

    run(tmp_path, scenario)


def test_output_beyond_the_limit_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emu.guest.OUTPUT_BYTES_MAX", 1 << 20)

    async def scenario(port: Port, guest: Guest) -> None:
        with pytest.raises(GuestError, match="yes failed: it wrote more than 1 MiB"):
            await guest.exec(["yes"])
        await guest.ping()

    run(tmp_path, scenario)


# -- files and the rest


@pytest.mark.parametrize("size", [0, 1, 65536, 3_000_001])
def test_files_come_back_as_they_went(tmp_path: Path, size: int) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        data, path = os.urandom(size), tmp_path / "file"
        await guest.write_file(str(path), data, 0o600)
        assert path.read_bytes() == data
        assert path.stat().st_mode & 0o777 == 0o600
        assert await guest.read_file(str(path)) == data
        await guest.write_file(str(path), b"short")
        assert path.read_bytes() == b"short"

    run(tmp_path, scenario)


def test_file_errors_name_the_file(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        with pytest.raises(GuestError, match="/no/such: open in the guest failed: No such file"):
            await guest.read_file("/no/such")
        with pytest.raises(GuestError, match="No space left"):
            await guest.write_file("/dev/full", b"x")
        assert b"Linux" in await guest.read_file("/proc/version")
        fds = len(os.listdir(f"/proc/{port.process.pid}/fd"))
        for _ in range(3):
            with pytest.raises(GuestError):
                await guest.write_file("/dev/full", b"x")
        assert len(os.listdir(f"/proc/{port.process.pid}/fd")) == fds

    run(tmp_path, scenario)


def test_info_is_what_this_host_says(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        info = await guest.info()
        assert info.kernel == os.uname().release
        kib = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        assert kib and info.memory_bytes == int(kib[1]) * 1024
        assert info.command_line == Path("/proc/cmdline").read_text().strip()
        assert abs(info.uptime_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) < PATIENCE_S * 1e9

    run(tmp_path, scenario)


def test_nonsense_from_a_host_is_answered_and_survived(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = [
        {"op": "no-such"},
        {"op": ["ping"]},
        {},
        {"op": "exec"},
        {"op": "exec", "argv": [], "stdin": False},
        {"op": "exec", "argv": "ls", "stdin": 3},
        {"op": "exec", "argv": [1], "stdin": False},
        {"op": "open", "path": "/x", "mode": "q"},
        {"op": "read", "file": 0, "size": 1},
        {"op": "read", "file": "1", "size": 1},
        {"op": "close", "file": 1},
        {"op": "stdin", "target": []},
        {"op": "clock", "ns": "x"},
        {"op": "hello"},
    ]

    async def scenario(port: Port, guest: Guest) -> None:
        for number, fields in enumerate(requests, 1000):
            call: Awaitable[Any] = guest._finish("x", *start(guest, number, fields))
            with pytest.raises(GuestError):
                await call
        await guest.ping()

    def start(guest: Guest, number: int, fields: dict[str, Any]) -> Any:
        request, call = guest._new_call()
        guest._send({"id": request, **fields})
        return request, call

    run(tmp_path, scenario)


# -- hosts come and go


def test_next_host_finds_an_agent_in_the_middle_of_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emu.guest.HELLO_AGAIN_S", 0.1)

    async def scenario(port: Port, guest: Guest) -> None:
        frame = agent.pack({"id": 9, "op": "ping"}, bytes(60_000))
        for cut in (1, 5, agent.HEAD_BYTES, 30, 59_000):
            port.writer.write(frame[:cut])
            async with connected(port) as after:
                assert await after.run("echo here") == "here\n"

    run(tmp_path, scenario)


def test_next_host_drops_what_was_said_to_another_one(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        await guest.close()
        # the rest of a frame to a former host, and an answer that carries the id of the next one's hello
        stale = agent.pack({"id": 1, "code": 1})
        serve = port._serve

        async def with_left_overs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(stale[-9:] + stale + stale[:20])
            await serve(reader, writer)

        port.server.close()
        port.path.unlink()
        port.server = await asyncio.start_unix_server(with_left_overs, port.path)
        async with connected(port) as after:
            assert await after.run("echo here") == "here\n"

    run(tmp_path, scenario)


def test_hello_ends_what_the_former_host_left_running(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        pids: list[int] = []
        running = asyncio.ensure_future(
            guest.exec(["sh", "-c", "echo $$; sleep 1000"], on_output=lambda _, data: pids.append(int(data)))
        )
        await until(lambda: bool(pids))
        await guest.close()
        with pytest.raises(GuestGone):
            await running
        async with connected(port) as after:
            await until(lambda: not alive(pids[0]))
            with pytest.raises(GuestGone):
                await guest.ping()
            assert (await after.exec(["true"])).code == 0
        # reaped, not left as a zombie
        await until(lambda: not Path(f"/proc/{pids[0]}").exists())

    run(tmp_path, scenario)


def test_hello_said_twice_by_one_host_ends_nothing(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        os.mkfifo(tmp_path / "fifo")
        running = asyncio.ensure_future(guest.exec(["cat", str(tmp_path / "fifo")]))
        await guest.ping()  # so the program runs
        guest._send({"id": 0, "op": "hello", "nonce": guest._nonce})
        await guest.run(f"echo still > {tmp_path}/fifo", timeout_s=PATIENCE_S)
        assert (await running).stdout == b"still\n"

    run(tmp_path, scenario)


def test_hello_closes_what_the_former_host_left_open(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        fds = os.listdir(f"/proc/{port.process.pid}/fd")
        await guest._request("open", path="/dev/zero", mode="r")
        assert len(os.listdir(f"/proc/{port.process.pid}/fd")) == len(fds) + 1
        await guest.close()
        async with connected(port):
            assert os.listdir(f"/proc/{port.process.pid}/fd") == fds

    run(tmp_path, scenario)


def test_connection_lost_ends_what_is_under_way(tmp_path: Path) -> None:
    async def scenario(port: Port, guest: Guest) -> None:
        running = asyncio.ensure_future(guest.exec(["sleep", "1000"]))
        await guest.ping()
        assert port.host is not None
        port.host.close()
        with pytest.raises(GuestGone, match="QEMU closed"):
            await running
        with pytest.raises(ConnectionError):
            await guest.exec(["true"])

    run(tmp_path, scenario)


def test_agent_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emu.guest.HELLO_AGAIN_S", 0.001)  # more is sent than fits into the socket

    async def main() -> None:
        with pytest.raises(GuestError, match=r"not answered within 0\.1 s"):
            await Guest.connect(tmp_path / "nobody", 0.1)
        async with await asyncio.start_unix_server(lambda reader, writer: None, tmp_path / "mute"):
            with pytest.raises(GuestError, match=r"not answered within 0\.5 s"):
                await asyncio.wait_for(Guest.connect(tmp_path / "mute", 0.5), PATIENCE_S)

    asyncio.run(main())
