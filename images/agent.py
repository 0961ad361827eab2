"""The agent inside the guest: does what the host asks for over a virtio-serial port.

Runs as ``python3 -I -S agent.pyc`` under busybox init, which starts it again when it ends. It imports frozen
and built-in modules only: under TCG the json, signal and subprocess modules would cost more than its whole
start. emu/guest.py is the other end.

A frame is: 0x7E, u32 length of the JSON object, u32 length of the raw bytes, u32 CRC-32 of both, the object,
the raw bytes (all little-endian). Zero bytes between frames mean nothing. What is no frame is skipped byte by
byte, so both ends find each other again whatever was lost or torn: a guest restored from a snapshot may hold
half a frame of a host that is gone. A new host therefore sends FRAME_BYTES_MAX zeros, which end any half
frame, and "hello" with a nonce; it drops everything before the answer with the same nonce. "hello" also ends
what the former host left running. The agent never speaks first, and what it says to no host is lost.

Requests, each with "id", which the answers carry; an answer with "error" (text) or the one shown is the last:
    hello   nonce                           nonce, version
    ping                                    {}
    exec    argv, stdin: bool, tty          any number of "stream": 1|2 + raw, then "code" or "signal": int;
                                            tty: rows, columns and TERM of a terminal of its own, or left out
    stdin   target (id of an exec) + raw    {} when the program has taken it, or is over; without raw: end of file
    kill    target, signal                  {}: for the exec's whole process group; SIGKILL for all its descendants
    open    path, mode: r|w|a, permissions  file
    read    file, size                      raw; none at the end of the file
    write   file + raw                      {}
    close   file                            {}
    clock   ns                              {}: sets CLOCK_REALTIME, Unix time
    reseed  raw                             {}: credits the entropy and reseeds the CRNG at once
    info                                    kernel, cpus, memory_bytes, command_line, uptime_ns
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time
import zlib
from _json import encode_basestring_ascii, make_encoder, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PORT = "org.dpu-emu.agent"
VERSION = 1
SYNC = 0x7E
HEAD_BYTES = 13
JSON_BYTES_MAX = 65536
RAW_BYTES_MAX = 65536
FRAME_BYTES_MAX = HEAD_BYTES + JSON_BYTES_MAX + RAW_BYTES_MAX
READ_BYTES = 16384  # the kernel hands out 4 KiB at a time; a larger buffer only costs its making

SIGKILL, SIGPIPE, SIGXFSZ = 9, 13, 25  # signal(7); the signal module is slow to import
TIOCSWINSZ = 0x5414  # asm-generic/ioctls.h
RNDADDENTROPY = 0x40085203  # linux/random.h: _IOW('R', 3, int[2])
RNDRESEEDCRNG = 0x5207  # _IO('R', 7)
OPEN_FLAGS = {
    "r": os.O_RDONLY,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}


class _Json:
    """What the C scanner wants to know: plain JSON."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float


_scan = make_scanner(_Json)  # type: ignore[arg-type]
_encode = make_encoder({}, str, encode_basestring_ascii, None, ":", ",", False, False, True)


def pack(fields: dict[str, Any], raw: bytes = b"") -> bytes:
    """One frame."""
    text = "".join(_encode(fields, 0)).encode()
    check = zlib.crc32(raw, zlib.crc32(text))
    head = b"".join(n.to_bytes(4, "little") for n in (len(text), len(raw), check))
    return bytes([SYNC]) + head + text + raw


class Parser:
    """Bytes in, (object, raw bytes) out; never fails, whatever comes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = 0  # bytes that the frame at its start has, once that is known

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """The frames that ``data`` completes."""
        self._buffer += data
        if len(self._buffer) < self._wanted:
            return []
        self._wanted = 0
        frames: list[tuple[dict[str, Any], bytes]] = []
        while (start := self._buffer.find(SYNC)) >= 0:
            del self._buffer[:start]
            if len(self._buffer) < HEAD_BYTES:
                return frames
            text_bytes, raw_bytes, check = (int.from_bytes(self._buffer[i : i + 4], "little") for i in (1, 5, 9))
            end = HEAD_BYTES + text_bytes + raw_bytes
            if text_bytes <= JSON_BYTES_MAX and raw_bytes <= RAW_BYTES_MAX:
                if len(self._buffer) < end:
                    self._wanted = end
                    return frames
                body = bytes(self._buffer[HEAD_BYTES:end])
                fields = _object(body[:text_bytes]) if zlib.crc32(body) == check else None
                if fields is not None:
                    frames.append((fields, body[text_bytes:]))
                    del self._buffer[:end]
                    continue
            del self._buffer[:1]
        self._buffer.clear()
        return frames


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value, _ = _scan(text.decode(), 0)
    except (ValueError, StopIteration, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Exec:
    """One running program."""

    def __init__(self, agent: Agent, request: int, argv: list[str], stdin: bool, tty: list[Any] | None) -> None:
        self.agent, self.request = agent, request
        self.input: list[tuple[bytes, Any]] = []  # what to write, and the request to answer then
        self.input_ends = not stdin
        actions: list[tuple[Any, ...]]
        environment = os.environ
        if tty is None:
            ends = [os.pipe(), os.pipe(), os.pipe()]
            theirs = [ends[0][0], ends[1][1], ends[2][1]]
            self.stdin, self.outputs = ends[0][1], {ends[1][0]: 1, ends[2][0]: 2}
            actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(theirs)]
        else:
            rows, columns, name = tty
            self.stdin, slave = os.openpty()
            theirs = [slave]
            self.outputs = {os.dup(self.stdin): 1}
            fcntl.ioctl(slave, TIOCSWINSZ, rows.to_bytes(2, "little") + columns.to_bytes(2, "little") + bytes(4))
            environment = {**os.environ, "TERM": name}  # type: ignore[assignment]
            # The first terminal that the leader of a session opens controls it.
            actions = [(os.POSIX_SPAWN_OPEN, 0, os.ttyname(slave), os.O_RDWR, 0)]
            actions += [(os.POSIX_SPAWN_DUP2, 0, number) for number in (1, 2)]
        try:
            self.pid = os.posix_spawnp(
                argv[0],
                argv,
                environment,
                file_actions=actions,
                setsid=True,
                setsigdef=[SIGPIPE, SIGXFSZ],  # Python ignores these, a program must not
            )
        except BaseException:
            for fd in (self.stdin, *self.outputs):
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self.pidfd = os.pidfd_open(self.pid)
        agent.watch(self.pidfd, self.ended)
        for fd in (self.stdin, *self.outputs):
            os.set_blocking(fd, False)
        for fd in self.outputs:
            agent.watch(fd, self.forwarder(fd))
        self.feed()

    def feed(self) -> None:
        """Give the program what it takes of its input."""
        if self.stdin < 0:
            return
        try:
            while self.input:
                data, request = self.input[0]
                rest = data[os.write(self.stdin, data) :]
                self.input[0] = rest, request
                if not rest:
                    del self.input[0]
                    self.agent.answer(request)
        except BlockingIOError:
            self.agent.watch(self.stdin, self.feed, select.EPOLLOUT)
            return
        except OSError:  # it does not read any more
            self.drop_input()
        self.agent.unwatch(self.stdin)
        if self.input_ends:
            os.close(self.stdin)
            self.stdin = -1

    def drop_input(self) -> None:
        for _, request in self.input:
            self.agent.answer(request)
        self.input.clear()

    def forwarder(self, fd: int) -> Callable[[], Any]:
        return lambda: self.forward(fd)

    def forward(self, fd: int) -> bool:
        """Send one piece of output; False when there is none now."""
        try:
            data = os.read(fd, RAW_BYTES_MAX)
        except BlockingIOError:
            return False
        except OSError:  # a terminal that nobody has any more
            data = b""
        if data:
            self.agent.answer(self.request, data, stream=self.outputs[fd])
        else:
            self.agent.unwatch(fd)
            os.close(fd)
            del self.outputs[fd]
        return bool(data)

    def ended(self) -> None:
        """The program is over. What others that hold its output still write is nobody's."""
        _, status = os.waitpid(self.pid, 0)
        self.agent.unwatch(self.pidfd)
        os.close(self.pidfd)
        if self.agent.execs.get(self.request) is not self:  # abandoned
            return
        for fd in list(self.outputs):
            while self.forward(fd):
                pass
        self.release()
        if os.WIFSIGNALED(status):
            self.agent.answer(self.request, signal=os.WTERMSIG(status))
        else:
            self.agent.answer(self.request, code=os.WEXITSTATUS(status))

    def abandon(self) -> None:
        """Kill it and do not wait: in I/O on a device that hangs it may take long to die."""
        self.kill(SIGKILL)
        self.release()

    def kill(self, number: int) -> None:
        """Signal its process group; SIGKILL also goes to what has left that, as fio's jobs do."""
        below = descendants(self.pid) if number == SIGKILL else []  # orphans are nobody's
        os.killpg(self.pid, number)
        for pid in below:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def release(self) -> None:
        for fd in (self.stdin, *self.outputs):
            if fd >= 0:
                self.agent.unwatch(fd)
                os.close(fd)
        self.stdin, self.outputs = -1, {}
        self.drop_input()
        del self.agent.execs[self.request]


def descendants(pid: int) -> list[int]:
    """The processes below ``pid``, each after its parent (proc(5): stat)."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat") as file:
                parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it is over; it is no process
            pass
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


class Agent:
    """The port, the event loop, and what belongs to the present host: programs and open files."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.parser = Parser()
        self.epoll = select.epoll()
        self.handlers: dict[int, Callable[[], Any]] = {}
        self.execs: dict[int, Exec] = {}
        self.files: set[int] = set()
        self.nonce = ""  # of the present host
        os.set_blocking(port, False)
        # Edge-triggered: a port without a host reports "hung up" for as long as that lasts.
        self.watch(port, self.receive, select.EPOLLIN | select.EPOLLET)

    def watch(self, fd: int, handler: Callable[[], Any], events: int = select.EPOLLIN) -> None:
        if fd not in self.handlers:
            self.epoll.register(fd, events)
        self.handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def run(self) -> None:
        while True:
            for fd, _ in self.epoll.poll():
                handler = self.handlers.get(fd)  # one before it in this round may have taken it away
                if handler is not None:
                    handler()

    def receive(self) -> None:
        while True:
            try:
                data = os.read(self.port, READ_BYTES)
            except BlockingIOError:
                return
            if not data:  # no host
                return
            for fields, raw in self.parser.feed(data):
                self.serve(fields, raw)

    def send(self, frame: bytes) -> None:
        """Wait for the host to take the frame; without a host it is dropped."""
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[os.write(self.port, rest) :]
            except BlockingIOError:
                writable = select.poll()
                writable.register(self.port, select.POLLOUT)
                if any(events & select.POLLHUP for _, events in writable.poll()):
                    return
            except BrokenPipeError:
                return

    def answer(self, request: Any, raw: bytes = b"", **fields: Any) -> None:
        self.send(pack({"id": request, **fields}, raw))

    def serve(self, fields: dict[str, Any], raw: bytes) -> None:
        request, name = fields.get("id"), fields.get("op")
        method = REQUESTS.get(name) if isinstance(name, str) else None
        try:
            if method is None:
                raise ValueError(f"unknown request {name!r}")
            method(self, fields, raw)
        except OSError as error:
            self.answer(request, error=error.strerror or str(error), errno=error.errno)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            self.answer(request, error=f"{name}: {type(error).__name__}: {error}"[:500])

    def hello(self, fields: dict[str, Any], raw: bytes) -> None:
        if fields["nonce"] != self.nonce:  # the same host asks again when an answer takes long
            self.begin(fields["nonce"])
        self.answer(fields["id"], nonce=self.nonce, version=VERSION)

    def begin(self, nonce: str) -> None:
        self.nonce = nonce
        for running in list(self.execs.values()):
            running.abandon()
        for fd in self.files:
            os.close(fd)
        self.files.clear()

    def ping(self, fields: dict[str, Any], raw: bytes) -> None:
        self.answer(fields["id"])

    def exec(self, fields: dict[str, Any], raw: bytes) -> None:
        request, argv = fields["id"], fields["argv"]
        if request in self.execs or not argv:
            raise ValueError("the id is in use, or argv is empty")
        self.execs[request] = Exec(self, request, argv, fields["stdin"], fields.get("tty"))

    def stdin(self, fields: dict[str, Any], raw: bytes) -> None:
        running = self.execs.get(fields["target"])
        if running is None or running.stdin < 0:  # one that is over takes no input, which is no mistake of the host
            self.answer(fields["id"])
            return
        if raw:
            running.input.append((raw, fields["id"]))
        else:
            running.input_ends = True
            self.answer(fields["id"])
        running.feed()

    def kill(self, fields: dict[str, Any], raw: bytes) -> None:
        running = self.execs.get(fields["target"])
        if running is not None:
            running.kill(fields["signal"])
        self.answer(fields["id"])

    def open(self, fields: dict[str, Any], raw: bytes) -> None:
        flags = OPEN_FLAGS[fields["mode"]] | os.O_CLOEXEC
        fd = os.open(fields["path"], flags, fields.get("permissions", 0o644))
        self.files.add(fd)
        self.answer(fields["id"], file=fd)

    def file(self, fields: dict[str, Any]) -> int:
        fd = fields["file"]
        if fd not in self.files:
            raise ValueError("no such file")
        return int(fd)

    def read(self, fields: dict[str, Any], raw: bytes) -> None:
        self.answer(fields["id"], os.read(self.file(fields), min(fields["size"], RAW_BYTES_MAX)))

    def write(self, fields: dict[str, Any], raw: bytes) -> None:
        rest = memoryview(raw)
        while rest:
            rest = rest[os.write(self.file(fields), rest) :]
        self.answer(fields["id"])

    def close(self, fields: dict[str, Any], raw: bytes) -> None:
        fd = self.file(fields)
        self.files.discard(fd)
        os.close(fd)
        self.answer(fields["id"])

    def clock(self, fields: dict[str, Any], raw: bytes) -> None:
        time.clock_settime_ns(time.CLOCK_REALTIME, fields["ns"])
        self.answer(fields["id"])

    def reseed(self, fields: dict[str, Any], raw: bytes) -> None:
        pool = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
        try:
            sizes = (8 * len(raw)).to_bytes(4, "little") + len(raw).to_bytes(4, "little")
            fcntl.ioctl(pool, RNDADDENTROPY, sizes + raw)
            fcntl.ioctl(pool, RNDRESEEDCRNG)
        finally:
            os.close(pool)
        self.answer(fields["id"])

    def info(self, fields: dict[str, Any], raw: bytes) -> None:
        with open("/proc/cmdline") as file:
            command_line = file.read().strip()
        self.answer(
            fields["id"],
            kernel=os.uname().release,
            cpus=os.sysconf("SC_NPROCESSORS_ONLN"),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
            command_line=command_line,
            uptime_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        )


REQUESTS = {
    name: getattr(Agent, name)
    for name in (
        *("hello", "ping", "exec", "stdin", "kill", "open", "read", "write", "close"),
        *("clock", "reseed", "info"),
    )
}


def find_port() -> int:
    """The port by its name; the kernel may still be finding out what the host offers."""
    ports, pause_s = "/sys/class/virtio-ports", 0.01
    while True:
        for entry in os.listdir(ports) if os.path.isdir(ports) else []:
            with open(f"{ports}/{entry}/name") as file:
                if file.read().strip() == PORT:
                    return os.open(f"/dev/{entry}", os.O_RDWR | os.O_CLOEXEC)
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 1.0)


def main() -> None:
    """Serve the port, or in tests the file descriptor that the command line names."""
    Agent(int(sys.argv[1]) if len(sys.argv) > 1 else find_port()).run()


if __name__ == "__main__":
    main()
