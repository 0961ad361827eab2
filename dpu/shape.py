"""How a controller's kept state area is laid out, said in the area itself, so that other code can read it.

Use: ``describe()`` is this code's shape, JSON-able; ``obstacle(old, new)`` says why areas of one shape cannot become
areas of another ("" when they can); ``create()`` makes an empty area; ``current(fd)`` gives an area of this code's
shape: ``fd`` itself, or a new memfd with everything that ``fd`` holds, found by the names of parts and fields.

Limits: a field keeps its name and format for ever, a part its name; what is new begins as zeroes. Where that is not
enough ``layout.VERSION`` changes, and areas of the other version are refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
from typing import Any, Final

import numpy as np

from dpu import layout
from dpu.channel import ConfigStore

SHAPE_BYTES: Final = 16 << 10
_HEADER = struct.Struct("<qqq")  # layout.HEADER, which never changes
_LENGTH = struct.Struct("<I")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# Part -> (record, how many, offset). The document of control's own state is copied as a document.
_WORD = np.dtype("<i8")
_PARTS: Final[dict[str, tuple[np.dtype[Any], int, int]]] = {
    "sq": (layout.SQ, layout.QUEUES, layout.SQ_OFFSET),
    "cq": (layout.CQ, layout.QUEUES, layout.CQ_OFFSET),
    "space": (layout.SPACE, layout.NAMESPACES, layout.SPACE_OFFSET),
    "inflight": (layout.INFLIGHT, layout.SLOTS, layout.INFLIGHT_OFFSET),
    "histogram": (_WORD, layout.QUEUES * layout.HISTOGRAM_BUCKETS, layout.HISTOGRAM_OFFSET),
    "delivered": (_WORD, layout.QUEUES, layout.DELIVERED_OFFSET),
    "cq_copies": (np.dtype("V16"), layout.QUEUES * layout.QUEUE_ENTRIES_MAX, layout.CQ_COPIES_OFFSET),
}


def describe() -> dict[str, Any]:
    """This code's shape."""
    return {
        "version": layout.VERSION,
        "bytes": layout.STATE_BYTES,
        "parts": {
            name: {"count": count, "offset": offset, "itemsize": dtype.itemsize, "fields": _fields(dtype)}
            for name, (dtype, count, offset) in _PARTS.items()
        },
        "blob": {"half_bytes": layout.BLOB_BYTES, "offset": layout.BLOB_OFFSET},
        "groups": [layout.GROUP_BYTES, layout.LEAVES_OFFSET, layout.AREAS_OFFSET, _fields(layout.VOLUME)],
    }


def _fields(dtype: np.dtype[Any]) -> dict[str, list[Any]]:
    """Name -> [format, offset]; of a plain number one field without a name."""
    if dtype.fields is None:
        return {"": [dtype.str, 0]}
    return {name: [kind.str, offset] for name, (kind, offset, *_) in dtype.fields.items()}


def obstacle(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Why what ``old`` code has left cannot be read by ``new`` code, or ""."""
    if old["version"] != new["version"]:
        return f"its state areas are of version {new['version']}, and those in use of version {old['version']}"
    for name, part in old["parts"].items():
        other = new["parts"].get(name)
        if other is None:
            return f"it has no room for {name}"
        if other["count"] < part["count"]:
            return f"it has room for {other['count']} of {name} where {part['count']} are in use"
        for field, (kind, _) in part["fields"].items():
            if other["fields"].get(field, [kind])[0] != kind:
                return f"its {name}.{field} is {other['fields'][field][0]} where {kind} is in use"
    if new["blob"]["half_bytes"] < old["blob"]["half_bytes"]:
        return "it has less room for what controllers save"
    if old["groups"] != new["groups"]:
        return "it lays out volume groups in another way"
    return ""


def create(name: str = "state") -> int:
    """A memfd with an empty area of this code's shape."""
    text = json.dumps(describe(), separators=(",", ":")).encode()
    assert _LENGTH.size + len(text) <= SHAPE_BYTES, len(text)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, layout.STATE_BYTES + SHAPE_BYTES)
        os.pwrite(fd, _LENGTH.pack(len(text)) + text, layout.STATE_BYTES)
        os.pwrite(fd, _HEADER.pack(layout.MAGIC, layout.VERSION, layout.STATE_BYTES), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def current(fd: int) -> int:
    """``fd``, or a new memfd of this code's shape with the same state. The old one stays the caller's."""
    old, new = _shape_of(fd), describe()
    if old == new:
        return fd
    reason = obstacle(old, new)
    assert not reason, f"the state area of another version cannot be read: {reason}"
    made = create()
    with mmap.mmap(fd, old["bytes"]) as source, mmap.mmap(made, layout.STATE_BYTES) as target:
        for name, part in old["parts"].items():
            _copy(part, source, new["parts"][name], target)
    with _store(fd, old) as before, _store(made, new) as after:
        after.commit(before.load())
    return made


def _store(fd: int, shape: dict[str, Any]) -> contextlib.closing[ConfigStore]:
    return contextlib.closing(ConfigStore(fd, shape["blob"]["half_bytes"], shape["blob"]["offset"]))


def _shape_of(fd: int) -> dict[str, Any]:
    magic, _, size = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
    assert magic == layout.MAGIC, "not a state area"
    (length,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, size))
    shape: dict[str, Any] = json.loads(os.pread(fd, length, size + _LENGTH.size))
    return shape


def _copy(old: dict[str, Any], source: mmap.mmap, new: dict[str, Any], target: mmap.mmap) -> None:
    """Copy one part, field by field."""
    views = [_view(old, source, old["count"]), _view(new, target, old["count"])]
    for field in old["fields"].keys() & new["fields"].keys():
        views[1][field or "f"][:] = views[0][field or "f"]
    views.clear()  # the maps are about to be closed


def _view(part: dict[str, Any], memory: mmap.mmap, count: int) -> Any:
    fields = part["fields"]
    dtype = np.dtype(
        {
            "names": [name or "f" for name in fields],
            "formats": [kind for kind, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": part["itemsize"],
        }
    )
    return np.frombuffer(memory, dtype, count, part["offset"])
