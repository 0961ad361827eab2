"""The metadata of one group of volumes, in an SQLite database of its own.

Use: ``Store.create(path, facts, ...)`` or ``Store.open(path)``; ``read`` gives all that was committed, each ``write``
is one transaction. Everything here blocks: call it in a thread, one call at a time.

facts     uuid and name of the group, bytes of its clusters, the next epoch, the format of this database
backing   a row per back end: its clusters, and the name it had
volume    a row per volume; ``number`` is its place in the kept memory too
root      the leaves of a volume, ROOT_CHUNK numbers in a row; trailing ones that are missing are 0
leaf      LEAF_ENTRIES entries as in kept memory (dpu.layout)

Which clusters are free is not here: those are free that no map names. Nor is which of them read as zeroes: none is
taken to after a restart, so each is cleaned before it is used.

Errors: StoreError for what is no such database, or damaged; sqlite3.Error when a transaction fails: it is undone.
Source: SQLite's documentation of WAL and ``synchronous``: with FULL a transaction is durable when it returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from dpu.errors import EmuError
from dpu.layout import LEAF_BYTES

FORMAT = 1
ROOT_CHUNK = 512
_CHUNK_BITS = 24  # of the key of a row of ``root``, below the volume's number
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE backing (number INTEGER PRIMARY KEY, bdev TEXT NOT NULL, clusters INTEGER NOT NULL);
CREATE TABLE volume (
    number INTEGER PRIMARY KEY, uuid TEXT NOT NULL UNIQUE, name TEXT NOT NULL UNIQUE, parent INTEGER, thin INTEGER,
    readonly INTEGER, snapshot INTEGER, clusters INTEGER, epoch INTEGER, inherited TEXT
);
CREATE TABLE root (key INTEGER PRIMARY KEY, leaves BLOB NOT NULL);
CREATE TABLE leaf (number INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, entries BLOB NOT NULL);
"""

Connection = Any  # sqlite3's; tests of power cuts bring another module's that has execute, executemany and close


class StoreError(EmuError):
    """The database cannot be used."""


def connect(path: str, durable: bool) -> Connection:
    """Open the database ``path``, which is made if it is not there. The one place where SQLite opens files."""
    connection = sqlite3.connect(path, timeout=5, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # else a file in shared memory beside the other two
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
    except BaseException:
        connection.close()
        raise
    return connection


@dataclass
class VolumeRow:
    """``epoch``: births of the clusters that the volume owns, with those of deleted snapshots, ``inherited``."""

    number: int
    uuid: str
    name: str
    parent: int | None
    thin: bool
    readonly: bool
    snapshot: bool
    clusters: int
    epoch: int
    inherited: list[int] = field(default_factory=list)


@dataclass
class BackingRow:
    number: int
    bdev: str
    clusters: int


@dataclass
class Facts:
    uuid: str
    name: str
    cluster_bytes: int
    next_epoch: int = 1


@dataclass
class Saved:
    """A whole database, but for the leaves."""

    facts: Facts
    backings: list[BackingRow]
    volumes: list[VolumeRow]
    roots: dict[int, Any]  # volume -> numbers of leaves, without trailing zeroes


@dataclass
class Batch:
    """One transaction. ``roots``: (volume, chunk) -> leaf numbers. ``leaves``: number -> (epoch, entries)."""

    facts: dict[str, Any] = field(default_factory=dict)
    volumes: list[VolumeRow] = field(default_factory=list)
    gone_volumes: list[int] = field(default_factory=list)
    short_roots: list[tuple[int, int]] = field(default_factory=list)  # (volume, chunks that are left)
    roots: dict[tuple[int, int], Any] = field(default_factory=dict)
    leaves: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    gone_leaves: list[int] = field(default_factory=list)
    backings: list[BackingRow] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())


class Store:
    """:param durable: transactions survive a power cut; without, the death of a process only."""

    def __init__(self, path: str, durable: bool, connect: Callable[[str, bool], Connection] = connect) -> None:
        self.path = path
        self._connection = connect(path, durable)

    @classmethod
    def create(
        cls,
        path: str,
        durable: bool,
        facts: Facts,
        backings: list[BackingRow],
        connect: Callable[[str, bool], Connection] = connect,
    ) -> Self:
        """A new database in place of whatever is at ``path``."""
        remove(path)
        store = cls(path, durable, connect)
        try:
            with store._transaction():
                for statement in _SCHEMA.split(";"):
                    store._execute(statement)
                store._execute("INSERT INTO facts VALUES ('format', ?)", (FORMAT,))
                store._write(Batch(facts=vars(facts), backings=backings))
        except BaseException:
            store.close()
            raise
        if durable:
            _sync_directory(path)
        return store

    def close(self) -> None:
        self._connection.close()

    def _execute(self, statement: str, values: Any = ()) -> Any:
        return self._connection.execute(statement, values)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            with contextlib.suppress(Exception):  # SQLite may have ended it by itself
                self._execute("ROLLBACK")
            raise

    def write(self, batch: Batch) -> None:
        """All of ``batch``, or nothing."""
        with self._transaction():
            self._write(batch)

    def _write(self, batch: Batch) -> None:
        many = self._connection.executemany
        many("INSERT OR REPLACE INTO facts VALUES (?, ?)", batch.facts.items())
        many("INSERT OR REPLACE INTO backing VALUES (?, ?, ?)", [tuple(vars(one).values()) for one in batch.backings])
        many("DELETE FROM volume WHERE number = ?", [(number,) for number in batch.gone_volumes])
        cuts = [(number, 0) for number in batch.gone_volumes] + batch.short_roots
        many("DELETE FROM root WHERE key >= ? AND key < ?", [(_key(n, left), _key(n + 1, 0)) for n, left in cuts])
        # Twice: names may go round in a circle.
        many("UPDATE volume SET name = uuid WHERE number = ?", [(row.number,) for row in batch.volumes])
        many(
            "INSERT OR REPLACE INTO volume VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(*list(vars(row).values())[:-1], json.dumps(row.inherited)) for row in batch.volumes],
        )
        many(
            "INSERT OR REPLACE INTO root VALUES (?, ?)",
            [(_key(*place), np.asarray(words, "<i4").tobytes()) for place, words in batch.roots.items()],
        )
        many("DELETE FROM leaf WHERE number = ?", [(number,) for number in batch.gone_leaves])
        many(
            "INSERT OR REPLACE INTO leaf VALUES (?, ?, ?)",
            [(number, epoch, entries) for number, (epoch, entries) in batch.leaves.items()],
        )

    def read(self, *, check: bool) -> Saved:
        """Everything but the leaves. ``check``: have SQLite look at every page first."""
        try:
            if check:
                (answer,) = next(iter(self._execute("PRAGMA quick_check(1)")))
                if answer != "ok":
                    raise StoreError(f"{self.path} is damaged: {answer}", _HINT)
            return self._read()
        except StoreError:
            raise
        except Exception as error:  # no such table, not a database, text in place of a number, ...
            raise StoreError(f"{self.path} is damaged: {error}", _HINT) from error

    def _read(self) -> Saved:
        facts = dict(iter(self._execute("SELECT name, value FROM facts")))
        if facts.pop("format", None) != FORMAT:
            raise StoreError(f"{self.path} is of another format", "use the version of dpu-emu that made it")
        volumes = [
            VolumeRow(
                number, uuid, name, parent, bool(thin), bool(readonly), bool(snapshot), clusters, epoch, json.loads(e)
            )
            for number, uuid, name, parent, thin, readonly, snapshot, clusters, epoch, e in self._execute(
                "SELECT * FROM volume ORDER BY number"
            )
        ]
        parts: dict[int, list[tuple[int, Any]]] = {}
        for key, blob in self._execute("SELECT key, leaves FROM root ORDER BY key"):
            chunk = key & (1 << _CHUNK_BITS) - 1
            parts.setdefault(key >> _CHUNK_BITS, []).append((chunk, np.frombuffer(blob, "<i4")))
        roots = {}
        for number, chunks in parts.items():
            last, words = chunks[-1]
            root = roots[number] = np.zeros(last * ROOT_CHUNK + len(words), np.int64)
            for chunk, words in chunks:
                root[chunk * ROOT_CHUNK :][: len(words)] = words
        backings = [BackingRow(*row) for row in self._execute("SELECT * FROM backing ORDER BY number")]
        return Saved(Facts(**facts), backings, volumes, roots)

    def leaves(self) -> Iterator[tuple[int, int, Any]]:
        """(number, epoch, entries) of every leaf."""
        for number, epoch, blob in self._execute("SELECT number, epoch, entries FROM leaf ORDER BY number"):
            if not isinstance(blob, bytes) or len(blob) != LEAF_BYTES:
                raise StoreError(f"{self.path} is damaged: leaf {number} is not of {LEAF_BYTES} bytes", _HINT)
            yield number, epoch, np.frombuffer(blob, "<i8")


_HINT = "put back a copy of it that was made when the daemon was stopped; other groups are not touched"


def _key(number: int, chunk: int) -> int:
    return number << _CHUNK_BITS | chunk


def remove(path: str) -> None:
    """Delete a database and what SQLite has made beside it."""
    for one in (path, f"{path}-wal", f"{path}-shm", f"{path}-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(one)


def _sync_directory(path: str) -> None:
    fd = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
