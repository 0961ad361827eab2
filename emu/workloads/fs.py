"""fs: make a file system, fill it, unmount, mount again, compare every file.

Use::

    [[workload]]
    type = "fs"
    fs = "xfs"

Parameters: ``fs`` ("ext4" or "xfs"), ``size`` (bytes of files to write; default 64M), ``seed`` (same seed,
same files), ``timeout`` (of each step; default 5m).

A quarter of the bytes is in files of up to 64 KiB in nested folders, the rest in files of up to 8 MiB. The
digests are computed from what was generated, leave the guest before it unmounts, and are compared on the host
with what the guest reads after mounting again with empty caches. The file system is checked (fsck) at the
end.

Samples: files, bytes_verified (B), fill_seconds (with sync), read_seconds.

Limits: the namespace's data is lost; xfs needs 300 MiB or more.

Errors: a missing, extra or changed file, or any failing command, fails the workload.

Source: mkfs.ext4(8), mkfs.xfs(8), e2fsck(8), xfs_repair(8).
"""

from __future__ import annotations

import json
from typing import Any, Literal

from dpu.errors import EmuError
from emu.units import DurationSeconds, Size, format_size
from emu.workloads.base import BlockDevice, Context, Params, Result, Sample, Workload, WorkloadError

_MOUNT = "/mnt/emu"
_SCRIPT = "/tmp/fs_guest.py"
_XFS_MIN = 300 << 20  # bytes; mkfs.xfs refuses less

_MKFS = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
_FSCK = {"ext4": ["fsck.ext4", "-f", "-n"], "xfs": ["xfs_repair", "-n"]}

# Runs in the guest, where only the standard library is.
GUEST_PROGRAM = """
import hashlib, json, os, random, sys, time

def fill(root, size, seed):
    rng = random.Random(seed)
    digests, written, number = {}, 0, 0
    while written < size:
        limit = 65536 if written < size // 4 else 8 << 20
        data = rng.randbytes(min(rng.randint(1, limit), size - written))
        name = "d%d/d%d/f%d" % (number % 7, number % 3, number)
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        digests[name] = hashlib.sha256(data).hexdigest()
        written += len(data)
        number += 1
    os.sync()
    return digests, written

def read(root):
    digests, total = {}, 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                data = file.read()
            digests[os.path.relpath(path, root)] = hashlib.sha256(data).hexdigest()
            total += len(data)
    return digests, total

verb, root, *numbers = sys.argv[1:]
start = time.monotonic()
digests, total = fill(root, *map(int, numbers)) if verb == "fill" else read(root)
print(json.dumps({"digests": digests, "bytes": total, "seconds": time.monotonic() - start}))
"""


class FsParams(Params):
    fs: Literal["ext4", "xfs"] = "ext4"
    size: Size = 64 << 20
    seed: int = 1
    timeout: DurationSeconds = 300.0


async def run(params: FsParams, context: Context) -> Result:
    device = context.device.path
    timeout_s = params.timeout
    await context.guest.write_file(_SCRIPT, GUEST_PROGRAM.encode())
    await context.run([*_MKFS[params.fs], device], timeout_s)
    await context.run(["mkdir", "-p", _MOUNT], timeout_s)
    await context.run(["mount", "-t", params.fs, device, _MOUNT], timeout_s)
    context.done(0.1)
    try:
        # A folder of our own, because mkfs.ext4 makes lost+found.
        arguments = ["fill", f"{_MOUNT}/files", str(params.size), str(params.seed)]
        written = await _program(context, arguments, timeout_s)
        context.done(0.6)
        await context.run(["umount", _MOUNT], timeout_s)
        await context.run(["sh", "-c", "echo 3 > /proc/sys/vm/drop_caches"], timeout_s)
        await context.run(["mount", "-t", params.fs, device, _MOUNT], timeout_s)
        found = await _program(context, ["read", f"{_MOUNT}/files"], timeout_s)
        context.done(0.9)
    finally:
        await context.guest.exec(["umount", _MOUNT], timeout_s=timeout_s)
    compare(written["digests"], found["digests"])
    await context.run([*_FSCK[params.fs], device], timeout_s)
    return Result(
        type=params.type,
        samples=[
            Sample("files", len(found["digests"]), "1"),
            Sample("bytes_verified", found["bytes"], "B"),
            Sample("fill_seconds", written["seconds"], "s"),
            Sample("read_seconds", found["seconds"], "s"),
        ],
        detail={"fs": params.fs},
    )


def compare(written: dict[str, str], found: dict[str, str]) -> None:
    """WorkloadError that counts and names what differs between two {file: digest} tables."""
    missing = sorted(written.keys() - found.keys())
    extra = sorted(found.keys() - written.keys())
    changed = sorted(name for name in written.keys() & found.keys() if written[name] != found[name])
    complaints = [
        f"{len(names)} files {what} (first: {names[0]})"
        for what, names in (("missing", missing), ("that nobody wrote", extra), ("changed", changed))
        if names
    ]
    if complaints:
        raise WorkloadError(f"after mounting again, of {len(written)} files: {', '.join(complaints)}")


async def _program(context: Context, arguments: list[str], timeout_s: float) -> dict[str, Any]:
    result = await context.run(["python3", _SCRIPT, *arguments], timeout_s)
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def check(params: FsParams, device: BlockDevice) -> None:
    """EmuError when the file system cannot be that small, or the files do not fit."""
    smallest = max(params.size, _XFS_MIN if params.fs == "xfs" else 0)
    if device.size < smallest or device.size == params.size:  # the file system itself needs room too
        raise EmuError(
            f"{params.fs} with {format_size(params.size)} of files needs more than {format_size(device.size)}, "
            f"which {device.path} has",
            "make the namespace bigger, or lower the workload's size",
        )


WORKLOAD = Workload(FsParams, run, main="fs", check=check)
