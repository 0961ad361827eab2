"""What a person does with a VM of a lab that is up: run programs, copy files, sit at its console.

    code = run(book, "web", ["lsblk"], stdin=True)      # our stdin, stdout and stderr are the program's
    copy(book, ["a", "b"], "web:/tmp")                  # one side is VM:PATH, as with scp
    console(book, "web")                                # until Ctrl-]

Files are copied by tar on both sides: with their permissions, directories whole. What comes has its name only when
all of it is there; a directory that is there already gets its files one by one. Limits: contents of devices and of
/proc: `emu exec VM -- cat`.
Errors: UsageError for paths that are not there; EmuError with the words of tar.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dpu.errors import EmuError, UsageError
from emu.control import Control, connect
from emu.ledger import Book
from emu.process import Identity
from emu.progress import Progress

_REMOTE = re.compile(r"([a-z0-9][a-z0-9_-]{0,15}):(.*)", re.DOTALL)
_LEAVE = b"\x1d"  # Ctrl-], as telnet and virsh
_LOOK_S = 0.02  # at the console's log
_SHOWN_BYTES = 2000  # of what the console has shown before
_QUIET_S = 1.0  # of a console that has no more to say to what was typed
_ANSWER_S_MAX = 10.0  # for one that is never quiet

# $1: where to; $2: 1 when that must be a directory; $3: the name of what comes; $4: of a directory for it meanwhile.
# tar is read whole before the name is given, so that nobody finds half a file.
_UNPACK = r"""
if [ -d "$1/$3" ]; then exec tar -xf - -C "$1"; fi
if [ -d "$1" ]; then parent=$1 final=$1/$3
else
  case $1 in */) echo "$1 is no directory" >&2; exit 20 ;; esac
  if [ "$2" = 1 ]; then echo "$1 is no directory" >&2; exit 20; fi
  parent=$(dirname "$1") final=$1
  [ -d "$parent" ] || { echo "there is no directory $parent" >&2; exit 20; }
fi
mkdir -m 700 "$parent/$4" || exit 21
tar -xf - -C "$parent/$4" && mv -f "$parent/$4/$3" "$final"
code=$?
rm -rf "$parent/$4"
exit $code
"""
# Takes away what _UNPACK has left when it was killed. $1: where to; $2: its $4.
_FORGET = 'if [ -d "$1" ]; then rm -rf "$1/$2"; else rm -rf "$(dirname "$1")/$2"; fi'
_PACK = r"""
[ -e "$1" ] || { echo "there is no $1" >&2; exit 20; }
[ -f "$1" ] || [ -d "$1" ] || { echo "$1 is neither a file nor a directory" >&2; exit 20; }
exec tar -cf - -C "$(dirname "$1")" "$(basename "$1")"
"""
_NOT_THERE = 20


# ---- exec


def run(book: Book, vm: str, argv: Sequence[str], stdin: bool) -> int:
    """Run a program with our standard streams; its exit code."""
    with connect(book) as control:
        return control.exec(vm, argv, sys.stdin.fileno() if stdin else None, _write_through)


def run_on_terminal(book: Book, vm: str, argv: Sequence[str]) -> int:
    """Run a program on a terminal of its own, which ours is the other end of: every key is the program's.

    Its size is ours at the beginning. UsageError where standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError("-t needs a terminal, and standard input is none", "leave it out")
    columns, rows = os.get_terminal_size(0)
    with connect(book) as control, _raw_terminal():
        return control.exec(vm, argv, 0, _write_through, tty=(rows, columns, os.environ.get("TERM", "dumb")))


def capture(book: Book, vm: str, argv: Sequence[str], stdin: bool) -> dict[str, Any]:
    """Run a program; its exit code and what it wrote: as text, or in base64 where that is no UTF-8."""
    output = {1: bytearray(), 2: bytearray()}
    with connect(book) as control:
        source = sys.stdin.fileno() if stdin else None
        code = control.exec(vm, argv, source, lambda stream, data: output[stream].extend(data))
    return {"code": code, **_in_json("stdout", output[1]), **_in_json("stderr", output[2])}


def _in_json(name: str, data: bytes | bytearray) -> dict[str, str | None]:
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": base64.b64encode(data).decode()}


def _write_through(stream: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(stream, rest) :]


# ---- cp


def vm_of(paths: Iterable[str]) -> str | None:
    """The VM that the first VM:PATH of ``paths`` names."""
    return next((match[1] for match in map(_REMOTE.fullmatch, paths) if match is not None), None)


def copy(book: Book, sources: Sequence[str], target: str, progress: Progress) -> None:
    """Copy ``sources`` to ``target``, an existing directory where there are several."""
    remote = [_REMOTE.fullmatch(one) for one in sources]
    to = _REMOTE.fullmatch(target)
    if to is not None and not any(remote):
        for source in map(Path, sources):
            if not source.exists():
                raise UsageError(f"there is no {source}", "give a file or a directory")
        for source in map(Path, sources):
            _upload(book, source, to[1], to[2] or ".", len(sources) > 1, progress)
    elif to is None and all(remote):
        place = Path(target)
        if (len(sources) > 1 or target.endswith("/")) and not place.is_dir():
            raise UsageError(f"{target} is no directory", "make it, or copy one file")
        for match in remote:
            assert match is not None
            _download(book, match[1], match[2], place, progress)
    else:
        raise UsageError("one side is in a VM, and only one", "write VM:PATH for it")


def _upload(book: Book, source: Path, vm: str, target: str, into: bool, progress: Progress) -> None:
    place = source.resolve()
    progress.step(f"Copying {source} to {vm}:{target}", _size(place))
    meanwhile = f".emu-cp-{secrets.token_hex(4)}"
    pack = ["tar", "-cf", "-", "-C", str(place.parent), "--", place.name]
    with subprocess.Popen(pack, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tar:
        assert tar.stdout is not None and tar.stderr is not None
        argv = ["sh", "-c", _UNPACK, "emu-cp", target, str(int(into)), place.name, meanwhile]
        try:
            code, said = _in_guest(book, vm, argv, tar.stdout.fileno(), lambda data: None, progress.advance)
        except KeyboardInterrupt:
            with contextlib.suppress(EmuError):
                _in_guest(book, vm, ["sh", "-c", _FORGET, "emu-cp", target, meanwhile], None, lambda data: None)
            raise
        finally:
            tar.stdout.close()
        complaint = tar.stderr.read().decode(errors="replace")
    space = f"see `emu exec {vm} -- df -h`: in this project's image, / is RAM; the file system of a disk takes more"
    _judge(code, said, f"cannot copy {source} to {vm}:{target}", space)
    if tar.returncode:
        raise EmuError(f"cannot read all of {source}: {complaint.strip()}", "see its permissions")


def _size(place: Path) -> int:
    """Bytes of a file, or of all in a directory."""
    files = [place] if place.is_file() else place.rglob("*")
    return sum(one.lstat().st_size for one in files)


def _size_in_guest(book: Book, vm: str, source: str) -> int | None:
    found = bytearray()
    code, _ = _in_guest(book, vm, ["du", "-sk", source], None, found.extend)
    return int(found.split()[0]) << 10 if code == 0 and found else None


def _download(book: Book, vm: str, source: str, target: Path, progress: Progress) -> None:
    parent = target if target.is_dir() else target.parent
    if not parent.is_dir():
        raise UsageError(f"there is no directory {parent}", "make it, or give another path")
    try:
        new = Path(tempfile.mkdtemp(prefix=".emu-cp-", dir=parent))
    except OSError as error:
        raise UsageError(f"cannot write in {parent}: {error.strerror}", "give another path") from error
    try:
        progress.step(f"Copying {vm}:{source} to {target}", _size_in_guest(book, vm, source))
        unpack = ["tar", "-xf", "-", "--no-same-owner", "-C", str(new)]
        with subprocess.Popen(unpack, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as tar:
            assert tar.stdin is not None and tar.stderr is not None
            code, said = _in_guest(
                book, vm, ["sh", "-c", _PACK, "emu-cp", source], None, _feeder(tar.stdin, progress)
            )
            with contextlib.suppress(BrokenPipeError):
                tar.stdin.close()
            complaint = tar.stderr.read().decode(errors="replace")
        _judge(code, said, f"cannot copy {vm}:{source}", "see its permissions")
        if tar.returncode:
            raise EmuError(f"cannot write {target}: {complaint.strip()}", "see the free space and permissions")
        for made in new.iterdir():
            _move(made, target / made.name if target.is_dir() else target)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _move(made: Path, final: Path) -> None:
    try:
        if made.is_dir() and final.is_dir():
            shutil.copytree(made, final, symlinks=True, dirs_exist_ok=True)
        else:
            os.replace(made, final)
    except OSError as error:
        raise UsageError(f"cannot write {final}: {error.strerror}", "remove it, or give another path") from error


def _feeder(pipe: IO[bytes], progress: Progress) -> Callable[[bytes], None]:
    def feed(data: bytes) -> None:
        progress.advance(len(data))
        with contextlib.suppress(BrokenPipeError):  # tar has ended and says why
            pipe.write(data)

    return feed


def _in_guest(
    book: Book,
    vm: str,
    argv: Sequence[str],
    stdin: int | None,
    write: Callable[[bytes], None],
    sent: Callable[[int], object] = lambda count: None,
) -> tuple[int, str]:
    complaint = bytearray()
    with connect(book) as control:
        code = control.exec(
            vm, argv, stdin, lambda stream, data: write(data) if stream == 1 else complaint.extend(data), sent
        )
    return code, complaint.decode(errors="replace").strip()


def _judge(code: int, said: str, what: str, hint: str) -> None:
    if code == _NOT_THERE:
        raise UsageError(said, "give a path that is there")
    if code:
        raise EmuError(f"{what}: {said or f'tar ended with {code}'}", hint)


# ---- console


def console(book: Book, vm: str, once: bool = False) -> None:
    """Show the serial console of ``vm`` and type into it, until Ctrl-] or the end of the VM.

    ``once``: only what it has shown so far. Where standard input is no terminal, it is typed until its end; what the
    guest says to it is shown until the console is quiet.
    """
    with connect(book) as control:
        vms = control.status()["vms"]
        if vm not in vms:
            raise UsageError(f"there is no VM {vm}", f"there are: {', '.join(vms)}")
        with open(vms[vm]["console"], "rb") as log:
            if once:
                shutil.copyfileobj(log, sys.stdout.buffer)
                sys.stdout.flush()
                if not log.tell():
                    print(f"emu: {_why_empty(vm, vms[vm])}", file=sys.stderr)
                return
            log.seek(max(0, log.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            with _raw_terminal() as is_terminal:
                if is_terminal:
                    print(f"console of {vm}; Ctrl-] leaves, Enter gives a shell", end="\r\n", file=sys.stderr)
                _sit_at(control, vm, Identity.of(vms[vm]["pid"]), log, is_terminal)


def _sit_at(control: Control, vm: str, machine: Identity | None, log: IO[bytes], is_terminal: bool) -> None:
    """Show what comes into ``log`` and type what comes from standard input, until one of them is over."""
    typing: int | None = sys.stdin.fileno()
    typed, ended_s, shown_s = False, 0.0, 0.0
    while True:
        alive = machine is not None and machine.alive()
        if shown := log.read():
            _write_through(1, shown)
            shown_s = time.monotonic()
        if not alive:
            print(f"{vm} has ended", end="\r\n", file=sys.stderr)
            return
        if typing is None and (not typed or _answered(ended_s, shown_s, time.monotonic())):
            return
        ready, _, _ = select.select([] if typing is None else [typing], [], [], _LOOK_S)
        if ready and typing is not None:
            keys = os.read(typing, 4096)
            if is_terminal and _LEAVE in keys:
                return
            if keys:
                control.type(vm, keys)
                typed = True
            else:
                typing, ended_s = None, time.monotonic()


def _answered(ended_s: float, shown_s: float, now_s: float) -> bool:
    """Whether a guest has had its time for an answer to what was typed until ``ended_s``."""
    return now_s - max(ended_s, shown_s) >= _QUIET_S or now_s - ended_s >= _ANSWER_S_MAX


def _why_empty(name: str, vm: Mapping[str, Any]) -> str:
    why = "it continues from a snapshot, so its boot was another's; " if vm["restored"] else ""
    return f"the console of {name} has shown nothing yet: {why}`emu exec {name} -- dmesg` has the kernel's log"


@contextlib.contextmanager
def _raw_terminal() -> Iterator[bool]:
    """Every key goes to the guest, Ctrl-C too. False where standard input is no terminal."""
    if not sys.stdin.isatty():
        yield False
        return
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield True
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
