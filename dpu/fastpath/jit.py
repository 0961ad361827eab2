"""The one door to numba: typed decorator, and the switch between compiled and plain Python.

``compiled`` marks a module-level function for nopython compilation (nogil, cached). With ``NUMBA_DISABLE_JIT=1``
it returns the function unchanged, so pytest, pdb and coverage work on the same source. Closures are never
compiled: numba would not find them in its cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import config

F = TypeVar("F", bound=Callable[..., Any])

JIT = not config.DISABLE_JIT
# Kill points are compiled in only when a test asks for them; dpu.jitcache keeps the builds apart.
KILLABLE = "DPU_EMU_KILL_AT" in os.environ
# DPU_EMU_TRACE=0 compiles the trace out, to measure what it costs while it is off.
TRACEABLE = os.environ.get("DPU_EMU_TRACE") != "0"


def compiled(function: F, **options: Any) -> F:
    """Compile ``function`` at its first call, without the interpreter lock, and keep the result on disk."""
    return cast(F, numba.njit(nogil=True, cache=True, boundscheck=False, **options)(function))


def inlined(function: F) -> F:
    """As ``compiled``, for what every command passes through: LLVM puts it into its callers."""
    return compiled(function, forceinline=True)
