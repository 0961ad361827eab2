"""Where compiled code is kept between runs.

Use: ``directory()`` gives the value of NUMBA_CACHE_DIR for workers. It is named after everything that the
compiled code depends on, so a change of the sources or of a compiler never meets old code. numba itself is
not imported: the keeper calls this.
The root is ``DPU_EMU_CACHE``, else ``$XDG_CACHE_HOME/dpu-emu``, else ``~/.cache/dpu-emu``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dpu.killpoint import VARIABLE

_PACKAGE = Path(__file__).parent
_COMPILERS = ("numba", "llvmlite", "numpy")


def cache_root() -> Path:
    """The cache directory of the project; it may not exist."""
    chosen = os.environ.get("DPU_EMU_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpu-emu"


def digest() -> str:
    """SHA-256 over the sources of the compiled stage and the versions of its compilers."""
    sources = sorted((_PACKAGE / "fastpath").glob("*.py"))
    sources += [_PACKAGE / "layout.py", _PACKAGE / "nvme" / "wire.py"]
    total = hashlib.sha256()
    for source in sources:
        content = source.read_bytes() if source.exists() else b""
        total.update(f"{source.relative_to(_PACKAGE)} {len(content)}\n".encode() + content)
    for package in _COMPILERS:
        total.update(f"{package} {_version(package)}\n".encode())
    # Kill points are compiled in only when a test names one (dpu.fastpath.jit).
    total.update(f"killable {VARIABLE in os.environ}, trace {os.environ.get('DPU_EMU_TRACE')}\n".encode())
    total.update(f"python {platform.python_version()}\n".encode())
    return total.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def directory() -> tuple[Path, bool]:
    """The directory, made, and whether it is a temporary one because the cache is not writable.

    The caller removes a temporary one when the last worker has gone.
    """
    try:
        wanted = cache_root() / "numba" / digest()
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted, False
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return Path(tempfile.mkdtemp(prefix="dpu-emu-numba-")), True
