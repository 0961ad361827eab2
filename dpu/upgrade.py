"""Other code for the worker: look at it before anything is stopped.

Use: ``await probe(python, path)`` runs the other code once and gives a :class:`Candidate`, or raises EmuError when it
does not run or cannot go on from what this code has left (``dpu.shape``). ``python -m dpu.upgrade`` is that run: it
says on one line what code it is. The keeper then starts a fork server of it, and changes over when that is ready.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from dpu import jitcache, shape
from dpu.errors import EmuError
from dpu.target import CONFIG_VERSION

PROBE_S_MAX = 60.0
UPGRADE_S_MAX = 300.0
"""Its fast path may have to be compiled on a busy machine."""
COMMAND = ("-P", "-m")


@dataclass(frozen=True)
class Candidate:
    """What the keeper starts: argv and what is different in its environment."""

    command: list[str]
    environment: dict[str, str]
    version: str
    code: str


def describe() -> dict[str, Any]:
    """What other code must know of this one."""
    try:
        version = metadata.version("dpu-emu")
    except metadata.PackageNotFoundError:
        version = "0 (not installed)"
    cache, temporary = jitcache.directory()
    if temporary:
        os.rmdir(cache)
    return {
        "version": version,
        "config": CONFIG_VERSION,
        "shape": shape.describe(),
        "cache": "" if temporary else str(cache),
        "code": jitcache.digest(),  # of the compiled stage
    }


async def probe(python: str, path: str) -> Candidate:
    """``python``: an interpreter, "" for this one; ``path``: a directory for PYTHONPATH, "" for none."""
    python = python or sys.executable
    if path and not os.path.isdir(os.path.join(path, "dpu")):
        raise EmuError(f"there is no dpu package in {path}", "give the directory that holds dpu/")
    environment = {"PYTHONPATH": path} if path else {}
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            *COMMAND,
            "dpu.upgrade",
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise EmuError(f"cannot run {python}: {error.strerror}", "give the Python that has the other code") from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), PROBE_S_MAX)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise EmuError(
            f"the other code did not answer within {PROBE_S_MAX:.0f} s", "run it by hand to see why"
        ) from None
    try:
        theirs = json.loads(out) if process.returncode == 0 else None
        reason = "" if theirs is None else obstacle(describe(), theirs)
    except (ValueError, LookupError, TypeError):
        theirs = None
    if theirs is None:
        last = (err.decode(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
        raise EmuError(f"the other code does not run: {last}", f"try {python} -m dpu.upgrade with its PYTHONPATH")
    if reason:
        raise EmuError(f"the other code cannot take over: {reason}", "end the daemon and start the other one anew")
    if theirs["cache"]:
        environment["NUMBA_CACHE_DIR"] = theirs["cache"]
    return Candidate([python, *COMMAND, "dpu.worker"], environment, theirs["version"], theirs["code"][:16])


def obstacle(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Why ``theirs`` cannot go on from ``mine``, or ""."""
    if mine["config"] != theirs["config"]:
        return f"its configuration is of version {theirs['config']}, and the one in use of version {mine['config']}"
    return shape.obstacle(mine["shape"], theirs["shape"])


if __name__ == "__main__":
    print(json.dumps(describe()))
