"""Labs that stay up: how they are started, looked at and ended from the command line.

    status = start(command, progress)      # the supervisor, in a session of its own; returns when the lab is ready
    for name, lab in status_of(control.labs()).items(): ...
    end(book)

The supervisor tells its progress through a pipe, one JSON object a line, and at last {"ready"} or {"failed"}.
``Relay`` writes them, ``start`` reads them.
Errors: those of the lab that does not start. A supervisor that does not end is killed, and what it leaves removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpu.errors import EmuError, UsageError
from emu import ledger
from emu.control import ANSWER_LIMIT_S, connect, decode_error, encode_error
from emu.lab import Lab
from emu.ledger import Book
from emu.progress import Progress, Told, retell
from emu.units import plural

END_LIMIT_S = 60.0
_NAME_CHARS_MAX = 32


def lab_name(wish: str | None, scenario: str) -> str:
    """The name that the operator wants, or one after the scenario. UsageError for one that is no file name."""
    made = re.sub(r"[^A-Za-z0-9._-]+", "-", scenario if wish is None else wish).strip("-.")[:_NAME_CHARS_MAX]
    if wish is not None and (made != wish or not wish):
        raise UsageError(f'"{wish}" is no name of a lab', f"use up to {_NAME_CHARS_MAX} of a-z, 0-9, . _ -: {made}")
    return made or "lab"


class Relay(Told):
    """Progress for whoever holds the other end of the pipe ``fd``; nobody may."""

    def __init__(self, fd: int) -> None:
        super().__init__(self._write)
        os.set_inheritable(fd, False)
        self._fd = fd

    def failed(self, error: EmuError) -> None:
        """The lab has not come up."""
        self._write({"failed": encode_error(error)})

    def ready(self, lab: Lab) -> None:
        """The lab is up. What this process says from now on goes into a log of its own."""
        log = os.open(lab.out / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        for fd in (1, 2):
            os.dup2(log, fd)
        os.close(log)
        self._write({"ready": True})
        os.close(self._fd)

    def _write(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the caller of `emu up` is gone; the lab comes up without it
            os.write(self._fd, (json.dumps(line) + "\n").encode())


def start(command: Sequence[str], progress: Progress) -> None:
    """Run ``command``, which is to tell its progress to the fd that is put at its end, until its lab is ready."""
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as said, os.fdopen(ours) as pipe:
        try:
            supervisor = subprocess.Popen(
                [*command, str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        before = signal.signal(signal.SIGTERM, _terminated)
        try:
            if _follow(pipe, progress):
                return
        except BaseException:  # Ctrl-C, SIGTERM, or the error that it told
            supervisor.terminate()
            supervisor.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
        code = supervisor.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    raise EmuError("\n".join([f"the lab's supervisor has ended with {code}", *lines[-10:]]), "report this")


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _follow(pipe: Any, progress: Progress) -> bool:
    """Show the progress in ``pipe``; True when the lab is ready, False when the pipe ends before."""
    for line in pipe:
        match json.loads(line):
            case {"failed": error}:
                raise decode_error(error)
            case {"ready": _}:
                return True
            case told:
                retell(told, progress)
    return False


def status_of(books: Mapping[str, Book]) -> dict[str, dict[str, Any]]:
    """Each lab's status by its name; of one that does not answer only its state: "starting" or "crashed"."""
    found: dict[str, dict[str, Any]] = {}
    for name, book in books.items():
        found[name] = {"state": "starting" if book.living else "crashed"}
        try:
            with connect(book, ANSWER_LIMIT_S) as control:
                found[name] = control.status()
        except EmuError:
            continue
        finally:
            found[name]["pid"] = book.owner.pid
    return found


def status_text(labs: Mapping[str, Mapping[str, Any]]) -> str:
    """For a person."""
    lines = []
    for name, lab in labs.items():
        if lab["state"] != "up":
            fix = "; `emu clean` removes what it has left" if lab["state"] == "crashed" else ""
            lines.append(f"{name}: {lab['state']}, supervisor {lab['pid']}{fix}")
            continue
        lines.append(f"{name}: up for {lab['seconds']:.0f} s, {lab['accelerator']}, supervisor {lab['pid']}")
        lines.append(f"  logs in {lab['out']}")
        if (fabric := lab.get("fabric")) is not None:
            size = ", ".join(plural(fabric[f"{noun}s"], noun) for noun in ("plane", "host", "link"))
            lines.append(f"  fabric: {size}; emu fabric show --name {fabric['name']}")
        for vm_name, vm in lab["vms"].items():
            about = f"{plural(vm['vcpus'], 'vCPU')}, {vm['memory_mib']} MiB, pid {vm['pid']}"
            lines.append(f"  VM {vm_name}: {vm['state']}, {about}")
            for one, seen in vm["controllers"].items():
                disks = [f"{disk} (NSID {nsid})" for nsid, disk in enumerate(seen["namespaces"], 1)]
                lines.append(f"    {one}: {', '.join(disks)}")
        for dpu_name, dpu in lab["dpus"].items():
            times = plural(dpu["worker_restarts"], "time")
            restarts = f", worker restarted {times}" if dpu["worker_restarts"] else ""
            lines.append(f"  DPU {dpu_name}: {dpu['state']}, pid {dpu['pid']}{restarts}, RPC {dpu['rpc']}")
    return "\n".join(lines) or "no lab is up; `emu up SCENARIO` starts one"


def end(book: Book) -> bool:
    """End a lab and wait until nothing of it is left; False when it had to be killed."""
    book.owner.kill(signal.SIGTERM)
    ended = _await(book, END_LIMIT_S)
    if not ended:
        book.owner.kill()
        _await(book, END_LIMIT_S)
    if Path(book.file).exists():  # killed now, or dead before
        ledger.remove(book)
    return ended


def _await(book: Book, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while book.owner.alive():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
