"""What a daemon begins with: a configuration file in SPDK's JSON form, as ``spdk-rpc save_config`` writes it.

Use: ``document = first_config(read_calls(path), wait=False)``; the keeper commits it before the first worker starts,
and the worker makes the calls before it says that it serves (dpu.worker). A worker killed meanwhile is followed by
one that makes the calls that are left.
The file: ``{"subsystems": [{"subsystem": NAME, "config": [CALL or [CALL, ...], ...]}, ...]}`` with
``CALL = {"method": NAME, "params": {...}}``; a null ``config`` is an empty one. As in SPDK the calls of "bdev" come
before those of "nvmf", whatever the order in the file.
Limits: FILE_BYTES_MAX. Errors: EmuError naming the file and the place in it.
Source: SPDK's "JSON configuration", PyPI spdk's rpc/config.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpu.errors import EmuError

FILE_BYTES_MAX = 512 << 10  # with all that it becomes it must fit into dpu.channel.ConfigStore
_ORDER = ("bdev", "nvmf")

_HINT = "spdk-rpc save_config writes such a file"


def read_calls(path: str) -> list[dict[str, Any]]:
    """The calls of a configuration file in the order in which they are to be made."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise EmuError(f"cannot read {path}: {error.strerror}", _HINT) from error
    if len(data) > FILE_BYTES_MAX:
        raise EmuError(f"{path} is larger than {FILE_BYTES_MAX} bytes", "load a smaller one and add the rest by RPC")
    try:
        document = json.loads(data)
    except ValueError as error:  # UnicodeDecodeError is one too
        raise EmuError(f"{path} is not JSON: {error}", _HINT) from error
    except RecursionError as error:
        raise EmuError(f"{path} is nested too deep", _HINT) from error
    parts = document.get("subsystems") if isinstance(document, dict) else None
    if not isinstance(parts, list):
        raise EmuError(f'{path} has no array "subsystems"', _HINT)
    calls: list[tuple[int, dict[str, Any]]] = []
    for number, part in enumerate(parts):
        where = f"{path}: subsystems[{number}]"
        if not isinstance(part, dict) or not isinstance(part.get("subsystem"), str):
            raise EmuError(f'{where} is no object with a string "subsystem"', _HINT)
        config = part.get("config")
        if config is None:
            continue
        if not isinstance(config, list):
            raise EmuError(f'{where}: "config" is no array', _HINT)
        name = part["subsystem"]
        rank = _ORDER.index(name) if name in _ORDER else len(_ORDER)
        for element in config:
            calls += [(rank, _call(one, where)) for one in (element if isinstance(element, list) else [element])]
    return [call for _, call in sorted(calls, key=lambda ranked: ranked[0])]


def _call(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("method"), str) or given.keys() - {"method", "params"}:
        shown = json.dumps(given)
        raise EmuError(f'{where}: {shown[:80]} is no object of "method" and "params"', _HINT)
    return given


def first_config(calls: list[dict[str, Any]], *, wait: bool) -> bytes:
    """The document that the first worker finds; dpu.target.Target reads it. ``wait``: for framework_start_init."""
    return json.dumps({"initialized": not wait, "calls": calls}).encode()
