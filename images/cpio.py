"""Initial RAM file systems: a cpio "newc" writer whose output depends on nothing but its input.

Inode numbers count up from 1 in path order; owner, group and times are 0. No root is needed for device nodes:
they are records like others. Source: Linux Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One file: ``mode`` with the type bits, ``data`` the contents or the link's target."""

    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def directory(mode: int = 0o755) -> Entry:
    return Entry(stat.S_IFDIR | mode)


def regular(data: bytes, mode: int = 0o644) -> Entry:
    return Entry(stat.S_IFREG | mode, data)


def symlink(target: str) -> Entry:
    return Entry(stat.S_IFLNK | 0o777, target.encode())


def character_device(major: int, minor: int, mode: int = 0o600) -> Entry:
    return Entry(stat.S_IFCHR | mode, device=(major, minor))


def write(entries: Mapping[str, Entry]) -> Iterator[bytes]:
    """The archive, piece by piece. Paths are relative; parents that are missing become 0755 directories."""
    tree = dict(entries)
    for path in entries:
        while "/" in path:
            path = path.rpartition("/")[0]
            tree.setdefault(path, directory())
    total = 0
    for inode, (path, entry) in enumerate([*sorted(tree.items()), ("TRAILER!!!", Entry(0))], 1):
        name = path.encode() + b"\0"
        links = 2 if stat.S_ISDIR(entry.mode) else 1
        fields = (inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
        record = _padded(_padded(head) + entry.data)
        total += len(record)
        yield record
    yield bytes(-total % 512)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
