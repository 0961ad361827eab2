"""What a lab has made, written down before it is used, so that a crash leaves nothing behind.

    ledger = Ledger.create("demo")         # <runtime>/labs/demo-<pid>-<n>.jsonl, and a directory of that name
    ledger.path(backing_file)              # removed with the lab
    ledger.process(identity, "qemu vm0")   # killed with the lab
    ledger.claim("my")                     # <runtime>/labs/my.up: what other programs find the lab by
    ledger.claim("my", "fabric")           # <runtime>/labs/my.fabric: the same for its fabric
    ledger.close()                         # the normal end
    ledger.close(keep=True)                # the normal end of a lab that is to be kept: nothing is removed
    for found in clean(): print(found)     # `emu clean`: what dead labs left; living and kept ones are left alone

The file has one JSON object a line, each written by one write(2): first the owner, then {"add": ...} and
{"drop": ...}; {"keep": true} is the last of a lab that was kept. A last line that a crash cut off is ignored: what
it would have named was not used yet. A lab lives while its owner does, told by pid, start time and boot.
Errors: EmuError when the runtime directory cannot be used.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dpu.errors import UsageError
from emu.paths import runtime_dir
from emu.process import Identity

_SUFFIX = ".jsonl"
_DRAFT = ".draft-"
_NAMES = {"lab": ".up", "fabric": ".fabric"}
_DOWN = {"lab": "`emu down {}`", "fabric": "`emu fabric down --name {}`"}


@dataclass(frozen=True)
class Leftover:
    """One thing of a lab that is over: a process (what it was) or a path."""

    lab: str
    kind: Literal["process", "path"]
    what: str


class Ledger:
    """The book of one lab. ``directory``: short, for its sockets; goes away with it."""

    def __init__(self, book: Path) -> None:
        self.book = book
        self.directory = book.with_suffix("")
        self._paths: list[Path] = []

    @classmethod
    def create(cls, name: str, root: Path | None = None) -> Ledger:
        """A new book and directory under ``root`` (default: the runtime directory), owned by this process."""
        root = root or runtime_dir("labs")
        owner = Identity.of(os.getpid())
        assert owner is not None
        for number in itertools.count():
            ledger = cls(root / f"{name[:16]}-{owner.pid}-{number}{_SUFFIX}")
            draft = root / f"{ledger.book.stem}{_DRAFT}{owner.pid}"
            draft.write_text(_line(owner=asdict(owner)))
            try:
                os.link(draft, ledger.book)  # appears whole or not at all, and never replaces another's
            except FileExistsError:
                continue
            finally:
                draft.unlink()
            break
        ledger.directory.mkdir(mode=0o700)
        return ledger

    def process(self, identity: Identity, what: str) -> None:
        """A child that must not outlive the lab. Its end need not be noted: an identity is used once."""
        self._write(add="process", identity=asdict(identity), what=what)

    def claim(self, name: str, kind: str = "lab") -> None:
        """Take ``name``, which one living lab, or fabric, has at a time. UsageError when another has it."""
        link = self.book.with_name(name + _NAMES[kind])
        for _ in range(2):
            if (holder := find_not_living(name, link.parent, kind)) is not None:
                remove(holder)
            try:
                os.symlink(self.directory.name, link)
            except FileExistsError:  # of a book that is gone, or another was faster
                if find(name, link.parent, kind) is None:
                    link.unlink(missing_ok=True)
                continue
            self.path(link)
            return
        raise UsageError(f'another {kind} "{name}" starts at this moment', "give this one another --name")

    def release(self, name: str, kind: str) -> None:
        """``name`` is free again before the lab ends; nobody finds what had it."""
        link = self.book.with_name(name + _NAMES[kind])
        _remove(link, self.directory.name)
        self.forget(link)

    def path(self, path: Path) -> None:
        """A file or directory that goes away with the lab; call this before making it."""
        self._paths.append(path)
        self._write(add="path", path=str(path))

    def forget(self, path: Path) -> None:
        """``path`` stays after all, or is gone already."""
        self._paths.remove(path)
        self._write(drop="path", path=str(path))

    def close(self, keep: bool = False) -> None:
        """All processes have ended: remove the paths, the directory and the book; ``keep``: nothing."""
        if keep:
            self._write(keep=True)
            return
        for path in (*self._paths, self.directory):
            _remove(path, self.directory.name)
        self.book.unlink(missing_ok=True)

    def _write(self, **entry: Any) -> None:
        fd = os.open(self.book, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, _line(**entry).encode())
        finally:
            os.close(fd)


@dataclass
class Book:
    """What a lab's book says. ``paths``: what goes away with it, its directory last."""

    file: Path
    owner: Identity
    processes: dict[Identity, str]
    paths: list[Path]
    kept: bool = False

    @property
    def lab(self) -> str:
        return self.file.stem

    @property
    def living(self) -> bool:
        """The lab runs."""
        return not self.kept and self.owner.alive()

    def left_paths(self) -> list[Leftover]:
        there = [path for path in self.paths if os.path.lexists(path) and not _is_anothers(path, self.lab)]
        return [Leftover(self.lab, "path", str(path)) for path in there]


def books(root: Path | None = None) -> list[Book]:
    """The books of all labs, living, dead and kept."""
    found = []
    for file in sorted((root or runtime_dir("labs")).glob("*" + _SUFFIX)):
        try:
            found.append(_read(file))
        except FileNotFoundError:  # its owner, or an `emu clean`, was faster
            continue
    return found


def find(name: str, root: Path | None = None, kind: str = "lab") -> Book | None:
    """The book of the lab that has claimed ``name`` for itself or for its fabric."""
    link = (root or runtime_dir("labs")) / (name + _NAMES[kind])
    try:
        return _read(link.parent / (os.readlink(link) + _SUFFIX))
    except FileNotFoundError:
        return None


def find_not_living(name: str, root: Path | None = None, kind: str = "lab") -> Book | None:
    """The same for whoever wants the name: UsageError where a living lab has it."""
    holder = find(name, root, kind)
    if holder is not None and holder.living:
        fix = f"{_DOWN[kind].format(name)}, or give this one another --name"
        raise UsageError(f'{kind} "{name}" is up already', fix)
    return holder


def claimed(root: Path | None = None, kind: str = "lab") -> dict[str, Book]:
    """Every lab that has claimed a name for itself, or for its fabric."""
    suffix = _NAMES[kind]
    names = sorted(path.name.removesuffix(suffix) for path in (root or runtime_dir("labs")).glob("*" + suffix))
    return {name: book for name in names if (book := find(name, root, kind)) is not None}


def kept(root: Path | None = None) -> list[Leftover]:
    """What labs that were to be kept have left."""
    return [one for book in books(root) if book.kept for one in book.left_paths()]


def clean(root: Path | None = None, dry_run: bool = False, kept: bool = False) -> list[Leftover]:
    """Remove what labs with a dead owner have left; with ``dry_run`` only say what that is.

    ``kept``: also what labs have left that were to be kept. A book of those whose paths are gone goes too.
    """
    root = root or runtime_dir("labs")
    found: list[Leftover] = []
    for book in books(root):
        if book.living or (book.kept and not kept and book.left_paths()):
            continue
        living = {identity: what for identity, what in book.processes.items() if identity.alive()}
        found += [Leftover(book.lab, "process", f"{what}, pid {one.pid}") for one, what in living.items()]
        found += book.left_paths()
        if dry_run:
            continue
        remove(book)
    for draft in root.glob("*" + _DRAFT + "*"):
        if Identity.of(int(draft.name.rpartition("-")[2])) is None:
            draft.unlink(missing_ok=True)
    return found


def remove(book: Book) -> None:
    """Kill and remove everything in the book of a lab that is over, and the book."""
    living = [identity for identity in book.processes if identity.alive()]
    for identity in living:
        identity.kill()
    _await_end(living)
    for path in book.paths:
        _remove(path, book.lab)
    book.file.unlink(missing_ok=True)


def _read(file: Path) -> Book:
    entries = list(_entries(file))
    book = Book(file, Identity(**entries[0]["owner"]), {}, [])
    for entry in entries[1:]:
        match entry:
            case {"add": "process", "identity": identity, "what": what}:
                book.processes[Identity(**identity)] = what
            case {"add": "path", "path": path}:
                book.paths.append(Path(path))
            case {"drop": "path", "path": path}:
                book.paths.remove(Path(path))
            case {"keep": True}:
                book.kept = True
    book.paths.append(file.with_suffix(""))
    return book


def _entries(book: Path) -> Iterator[dict[str, Any]]:
    for line in book.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _line(**entry: Any) -> str:
    return json.dumps(entry) + "\n"


def _await_end(killed: list[Identity], limit_s: float = 10.0) -> None:
    """SIGKILL takes a moment: a QEMU has its memory to give back, and holds its sockets until then."""
    until = time.monotonic() + limit_s
    while any(one.alive() for one in killed) and time.monotonic() < until:
        time.sleep(0.01)


def _is_anothers(path: Path, lab: str) -> bool:
    """A name that ``lab`` has claimed and another lab has taken since."""
    return path.suffix in _NAMES.values() and path.is_symlink() and os.readlink(path) != lab


def _remove(path: Path, lab: str) -> None:
    if _is_anothers(path, lab):
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
