"""Where the lab keeps things: a cache that may be deleted at any time, and a short directory for sockets.

    cache_dir("debs")        DPU_EMU_CACHE, else $XDG_CACHE_HOME/dpu-emu, else ~/.cache/dpu-emu
    runtime_dir("lab-1")     $XDG_RUNTIME_DIR or /tmp, dpu-emu-<uid>/lab-1, mode 0700, ours alone
    locked(directory)        one process at a time; the lock goes with the process, also after a crash

Errors: EmuError when a directory cannot be made, or belongs to somebody else.
Limits: a Unix socket's path has 107 bytes (unix(7), sun_path); ``socket_path`` refuses a longer one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dpu.errors import EmuError

SOCKET_PATH_BYTES_MAX = 107
_SOCKET_NAME_BYTES = 40  # room that a runtime directory leaves for "<dpu>/<n>/cntrl" below it


def cache_dir(*parts: str) -> Path:
    """The cache directory, or the directory ``parts`` below it; made when missing."""
    if own := os.environ.get("DPU_EMU_CACHE"):
        root = Path(own).expanduser().absolute()
    elif (xdg := os.environ.get("XDG_CACHE_HOME", "")).startswith("/"):  # the XDG rules ignore a relative one
        root = Path(xdg) / "dpu-emu"
    else:
        root = _home() / ".cache" / "dpu-emu"
    path = root.joinpath(*parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EmuError(
            f"cannot make the cache directory {path}: {error.strerror}",
            "set DPU_EMU_CACHE to a directory that you can write",
        ) from error
    return path


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise EmuError(
            "you have no home directory, so no cache directory either", "set DPU_EMU_CACHE to a directory"
        ) from error


def runtime_path(name: str) -> Path:
    """Where ``runtime_dir`` makes the directory of ``name``; nothing is made here."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp"))
    below = Path(f"dpu-emu-{os.getuid()}")
    too_long = len(os.fsencode(base / below / name)) + _SOCKET_NAME_BYTES > SOCKET_PATH_BYTES_MAX
    # sudo keeps XDG_RUNTIME_DIR of the user who called it, and a login that is over has taken it away
    if not base.is_absolute() or too_long or not _is_ours(base):
        base = Path("/tmp")
    return base / below / name


def runtime_dir(name: str) -> Path:
    """A directory for the sockets of ``name``, made when missing; only this user can enter it."""
    path = runtime_path(name)
    for directory in (path.parent, path):
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise EmuError(
                f"cannot make the runtime directory {directory}: {error.strerror}",
                "set XDG_RUNTIME_DIR to a directory of your own",
            ) from error
        if not _is_ours(directory):
            raise EmuError(
                f"{directory} is not a directory that belongs to you alone",
                "remove it, or set XDG_RUNTIME_DIR to a directory of your own",
            )
    return path


def _is_ours(directory: Path) -> bool:
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def socket_path(directory: Path, name: str) -> Path:
    """``directory / name``, or EmuError when the kernel cannot bind a path of that length."""
    path = directory / name
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise EmuError(
            f"the socket path {path} has more than {SOCKET_PATH_BYTES_MAX} bytes",
            "choose a shorter directory",
        )
    return path


def write_whole(path: Path, text: str) -> None:
    """Put ``text`` into the file ``path``, whole or not at all. OSError as of open(2) and rename(2)."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold ``directory``/.lock; waits for another holder. The kernel frees it when a holder dies."""
    fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
