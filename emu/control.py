"""The caller's end of a lab that is up: finds it by its name and speaks with its supervisor (emu/supervisor.py).

    with connect(find(None)) as control:           # the only lab that is up; find("my"): the one of that name
        status = control.status()
        code = control.exec("web", ["lsblk"], stdin=0, write=lambda stream, data: os.write(stream, data))

The socket is ``control`` in the lab's directory. What passes it are the frames of images/agent.py, an object and raw
bytes: one request per connection, then

    status | scenario                 "stream": 1 + raw, a JSON object in pieces, then "code"
    type    vm + raw                  "code": typed into the serial console
    exec    vm, argv, stdin, tty      any number of "more": true and of "stream": 1|2 + raw, then "code"
            raw                       input, one piece for each "more" and one to begin with; empty: its end
    run     workloads, folder, out    any number of "stream": 1 + raw, each one object of emu.progress.Told; then
                                      "code", and the report is in out

An answer with "error" (message, fix, details, code, usage) is the last. When the caller's connection ends, so does
its program or workload.
Errors: UsageError for a lab or VM that is not there; EmuError for what goes wrong in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpu.errors import EmuError, UsageError
from emu import ledger
from emu.guest import GuestError
from emu.ledger import Book
from emu.progress import Progress, retell
from images.agent import JSON_BYTES_MAX, RAW_BYTES_MAX, Parser, pack

SOCKET = "control"
_DETAILS_CHARS_MAX = 30_000  # a frame holds them, escaped
ANSWER_LIMIT_S = 10.0
_SIGNALLED = 128  # a shell's rule for the exit code of a program that a signal has ended


class RemoteError(EmuError):
    """What the supervisor has to complain about; ``log``: last lines of logs; ``code``: for the caller."""

    def __init__(self, message: str, hint: str, log: str, code: int | None) -> None:
        super().__init__(message, hint)
        self.log = log
        self.code = code

    def __str__(self) -> str:
        return super().__str__() + (f"\n{self.log}" if self.log else "")


def labs() -> dict[str, Book]:
    """The labs that are up, by name; those whose supervisor has died included."""
    return ledger.claimed()


def find(name: str | None, vm: str | None = None) -> Book:
    """The lab ``name``; without a name the only one, or the only one that has ``vm``.

    UsageError where that is none, or more than one.
    """
    known = labs()
    living = [one for one, book in known.items() if book.living]
    if name is None and len(living) == 1:
        return known[living[0]]
    if name is None and not living:
        raise UsageError("no lab is up", "`emu up SCENARIO` starts one")
    if name is None:
        having = living if vm is None else [one for one in living if vm in _vms(known[one])]
        if len(having) == 1:
            return known[having[0]]
        if not having:
            raise UsageError(f"no lab has a VM {vm}", f"up are: {', '.join(living)}; `emu status` shows their VMs")
        which = "are up" if having == living else f"have a VM {vm}"
        raise UsageError(f"{len(having)} labs {which}: {', '.join(having)}", "name one: --lab NAME")
    if name not in known:
        raise no_such_lab(name, living)
    if not known[name].living:
        raise UsageError(f"the supervisor of lab {name} has died", "`emu clean` removes what it has left")
    return known[name]


def name_of(book: Book) -> str:
    """The name of a lab that :func:`find` has found."""
    return next(name for name, one in labs().items() if one.file == book.file)


def no_such_lab(name: str, up: Iterable[str]) -> UsageError:
    """The error of a name that no lab has; ``up``: the names that labs have."""
    names = ", ".join(up)
    return UsageError(
        f"there is no lab {name}", f"up are: {names}" if names else "no lab is up; `emu up SCENARIO` starts one"
    )


def _vms(book: Book) -> Iterable[str]:
    """The VMs of a lab; none where it does not answer."""
    try:
        with connect(book, ANSWER_LIMIT_S) as control:
            vms: dict[str, Any] = control.status()["vms"]
            return vms
    except (EmuError, OSError):
        return ()


@contextlib.contextmanager
def connect(book: Book, timeout_s: float | None = None) -> Iterator[Control]:
    """A connection; ``timeout_s``: for each answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(book.file.with_suffix("") / SOCKET))
        except OSError as error:
            raise EmuError(
                f"lab {book.lab} does not answer: {error.strerror}", "it may still be starting: see `emu status`"
            ) from error
        yield Control(sock)


class Control:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._parser = Parser()

    def status(self) -> dict[str, Any]:
        """What ``Supervisor.status`` says."""
        return self._ask("status")

    def scenario(self) -> dict[str, Any]:
        """What the lab was made of: its ``name``, the ``document`` as it was read, the ``folder`` of its paths."""
        return self._ask("scenario")

    def _ask(self, op: str) -> dict[str, Any]:
        text = bytearray()
        self._send(op=op)
        self._follow(None, lambda stream, data: text.extend(data))
        answer: dict[str, Any] = json.loads(text)
        return answer

    def run(self, workloads: Sequence[Any], folder: Path, out: Path, progress: Progress) -> None:
        """Run workloads (tables as in a scenario, paths relative to ``folder``); the report is in ``out`` then."""
        self._send(op="run", workloads=list(workloads), folder=str(folder.absolute()), out=str(out.absolute()))
        self._follow(None, lambda stream, data: retell(json.loads(data), progress))

    def type(self, vm: str, keys: bytes) -> None:
        """Type into the serial console of ``vm``."""
        for start in range(0, len(keys), RAW_BYTES_MAX):
            self._send(keys[start : start + RAW_BYTES_MAX], op="type", vm=vm)
            self._follow(None, lambda stream, data: None)

    def exec(
        self,
        vm: str,
        argv: Sequence[str],
        stdin: int | None,
        write: Callable[[int, bytes], object],
        sent: Callable[[int], object] = lambda count: None,
        tty: Sequence[int | str] | None = None,
    ) -> int:
        """Run a program in ``vm``; its exit code, 128 + n for signal n.

        ``stdin``: a file descriptor of ours that is its input, or None. ``write(stream, data)``: its output;
        ``sent(count)``: so many more bytes of the input are on their way. ``tty``: as ``Guest.exec`` has it.
        """
        self._send(op="exec", vm=vm, argv=list(argv), stdin=stdin is not None, tty=tty and list(tty))
        return self._follow(stdin, write, sent)

    def _follow(
        self,
        stdin: int | None,
        write: Callable[[int, bytes], object],
        sent: Callable[[int], object] = lambda count: None,
    ) -> int:
        wanted = stdin is not None  # a piece of input may be sent
        while True:
            sources = [self._sock.fileno(), stdin] if wanted and stdin is not None else [self._sock.fileno()]
            ready, _, _ = select.select(sources, [], [])
            if self._sock.fileno() in ready:
                for answer, raw in self._received():
                    match answer:
                        case {"stream": stream}:
                            write(stream, raw)
                        case {"more": True}:
                            wanted = True
                        case {"code": code}:
                            return int(code) if code >= 0 else _SIGNALLED - int(code)
            elif stdin is not None:
                data = os.read(stdin, RAW_BYTES_MAX)
                self._send(data)
                sent(len(data))
                wanted = False
                stdin = stdin if data else None

    def _received(self) -> list[tuple[dict[str, Any], bytes]]:
        data = self._sock.recv(4 * RAW_BYTES_MAX)
        if not data:
            raise EmuError("the lab has ended", "`emu status` shows what is up")
        frames = self._parser.feed(data)
        for answer, _ in frames:
            if "error" in answer:
                raise decode_error(answer["error"])
        return frames

    def _send(self, raw: bytes = b"", **fields: Any) -> None:
        frame = pack(fields, raw)
        if len(frame) - len(raw) > JSON_BYTES_MAX:
            raise UsageError("the command line is too long", "put it into a file: `emu cp` takes it to the VM")
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise EmuError(f"the lab has ended: {error.strerror}", "`emu status` shows what is up") from error


def encode_error(error: EmuError) -> dict[str, Any]:
    """For another process, which raises what ``decode_error`` makes of it."""
    return {
        "message": error.message,
        "fix": error.hint,
        "details": error.details[-_DETAILS_CHARS_MAX:],
        "code": error.code if isinstance(error, GuestError) else None,
        "usage": isinstance(error, UsageError),
    }


def decode_error(error: dict[str, Any]) -> EmuError:
    if error["usage"]:
        return UsageError(error["message"], error["fix"])
    return RemoteError(error["message"], error["fix"], error["details"], error["code"])
