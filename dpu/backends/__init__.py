"""Back ends: what a namespace's blocks live on. One file and one row each."""

from __future__ import annotations

from dpu.backends.base import BLOCK_SIZES, Backend, Kind, marks_key, os_error, stash_key
from dpu.backends.file import FileBackend, UringBackend
from dpu.backends.marks import Marks
from dpu.backends.memory import MemoryBackend
from dpu.backends.null import NullBackend

BACKENDS: dict[str, type[Backend]] = {
    backend.config_type: backend for backend in (NullBackend, MemoryBackend, FileBackend, UringBackend)
}

__all__ = [
    "BACKENDS",
    "BLOCK_SIZES",
    "Backend",
    "FileBackend",
    "Kind",
    "Marks",
    "MemoryBackend",
    "NullBackend",
    "UringBackend",
    "marks_key",
    "os_error",
    "stash_key",
]
