"""Who uses a host's block device or file, so that a back end takes none that is in use.

Use: ``fd = open_unused(path, readonly)``; errors say who has it. A block device is opened with O_EXCL: the kernel
then refuses every other exclusive user (a mount, swap, LVM, RAID, another back end) for as long as ``fd`` or a
duplicate of it is open, and is refused by each of them. What is read from /proc and /sys before serves the message,
and catches a file behind a loop device or used as swap, which O_EXCL does not.
Limits: programs that open a device without O_EXCL (dd, fsck) are not seen; a mount in another namespace is refused
without its name.
Errors: RpcError -16 with who it is, -13 for a read-only device that is to be written, -22 for what is neither a file
nor a block device; OSError of open(2).
Source: open(2) O_EXCL on block devices, proc(5) mountinfo and swaps, Linux Documentation/ABI/testing/sysfs-block.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from dpu.backends.base import os_error

_SYSFS = Path("/sys")
_PROC = Path("/proc")


def open_unused(path: str, readonly: bool) -> int:
    """A descriptor of the file or block device ``path``, of which nobody else makes use."""
    # Looked at before it is opened: to open a FIFO or a character device may block or do something.
    status = os.stat(path)
    block = stat.S_ISBLK(status.st_mode)
    if not block and not stat.S_ISREG(status.st_mode):
        raise os_error(errno.EINVAL, f"{path} is neither a file nor a block device")
    found = next(_users_of_device(path, status.st_rdev) if block else _users_of_file(path, status), "")
    if found:
        raise os_error(errno.EBUSY, found)
    if block and not readonly and _text(_device(status.st_rdev) / "ro") == "1":
        raise os_error(errno.EACCES, f"{path} is read-only: say readonly")  # open(2) alone may let it pass
    flags = (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC | (os.O_EXCL if block else 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise os_error(errno.EBUSY, f"{path} is mounted elsewhere or another program holds it") from error
        raise


def _users_of_device(path: str, number: int) -> Iterator[str]:
    """Sentences about mounts, swap, and devices built on this one, on its partitions or on its whole disk."""
    device = _device(number)
    related = {_number(number): path}
    if (device / "partition").exists():
        disk = device.resolve().parent
        related[_text(disk / "dev")] = f"/dev/{disk.name}"
    for partition in device.glob("*/partition"):
        related[_text(partition.parent / "dev")] = f"/dev/{partition.parent.name}"
    for line in (_PROC / "self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields = line.split(" ")
        source = _unescape(fields[fields.index("-") + 2])
        # btrfs mounts have numbers of no device; their source has.
        number_of = fields[2] if fields[2] in related else _number_of(source)
        if number_of in related:
            yield f"{related[number_of]} is mounted at {_unescape(fields[4])}"
    for swap in _swaps():
        if _number_of(swap) in related:
            yield f"{related[_number_of(swap)]} is swap space"
    for number_of, name in related.items():
        for holder in (_SYSFS / "dev/block" / number_of / "holders").glob("*"):
            called = _text(_SYSFS / "block" / holder.name / "dm/name")
            yield f"{name} is part of {holder.name}" + (f" ({called})" if called else "")


def _users_of_file(path: str, status: os.stat_result) -> Iterator[str]:
    for backing in (_SYSFS / "block").glob("loop*/loop/backing_file"):
        if _is_file(_text(backing), status):
            yield f"{path} is what /dev/{backing.parents[1].name} is made of"
    for swap in _swaps():
        if _is_file(swap, status):
            yield f"{path} is swap space"


def _swaps() -> list[str]:
    lines = (_PROC / "swaps").read_text(errors="surrogateescape").splitlines()[1:]
    return [_unescape(line.split()[0]) for line in lines]


def _is_file(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)
    except (OSError, ValueError):
        return False


def _number_of(path: str) -> str:
    """ "major:minor" of a block device, "" for anything else."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ""
    return _number(status.st_rdev) if stat.S_ISBLK(status.st_mode) else ""


def _number(number: int) -> str:
    return f"{os.major(number)}:{os.minor(number)}"


def _device(number: int) -> Path:
    return _SYSFS / "dev/block" / _number(number)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""


def _unescape(field: str) -> str:
    """Undo the octal escapes of proc(5)."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
