"""Template snapshots: a guest that has booted once is not booted again.

    await start(vm, progress)      # instead of vm.start(): restored where that works, else booted

The first VM of a kind boots a template: the same machine with empty root ports, agent ready. Its state goes
into cache/snapshots/<key>/ram (QEMU's mapped-ram format); each later VM of that kind continues there in a
fraction of a second and gets its controllers by hot-plug. The key is over all that the state depends on.
A guest continued this way has its clock set and its random numbers reseeded (Vm.start).

Limits: VMs with disks or QEMU arguments of the user's boot cold, their state is not ours to keep. The newest
``SNAPSHOTS_MAX`` stay in the cache.
Errors: a snapshot that cannot be made, or that fails, is removed, said once, and the VM boots cold.
Source: QEMU docs/devel/migration/mapped-ram.rst.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qemu.qmp import QMPError

from dpu.errors import EmuError
from emu.paths import cache_dir
from emu.progress import Progress
from emu.vm import Platform, Vm, VmConfig, VmPaths, qemu_command

SNAPSHOTS_MAX = 8
LOCK_WAIT_S = 120.0
"""How long a VM waits for another process that makes its snapshot, before it boots by itself."""
LOCK_POLL_S = 0.05
_FORMAT = 1  # of the folder and of what Vm.start does with it


class _Unsavable(EmuError):
    """There is no template snapshot to be had now."""


async def start(vm: Vm, progress: Progress) -> None:
    """Start ``vm`` from its template snapshot, made first if need be; else cold."""
    if vm.config.disks or vm.config.qemu_args:
        await vm.start()
        return
    folder = cache_dir("snapshots") / key(vm.config, vm.platform)
    try:
        if not _whole(folder):
            await _make(vm, folder, progress)
        await vm.start(restore=folder / "ram")
        with contextlib.suppress(OSError):
            os.utime(folder)  # the last use, for _prune
    except EmuError as error:
        if not isinstance(error, _Unsavable) and not folder.exists():
            raise  # the template did not even boot, nor would this one
        shutil.rmtree(folder, ignore_errors=True)
        note = f"No start from a template snapshot ({error.message}); booting instead"
        if note not in progress.notes:
            progress.note(note)
        await vm.start()


def key(config: VmConfig, platform: Platform) -> str:
    """The name of the snapshot that such a VM can continue from."""
    return hashlib.sha256(json.dumps(_ingredients(config, platform)).encode()).hexdigest()[:32]


def _ingredients(config: VmConfig, platform: Platform) -> dict[str, Any]:
    anywhere = VmPaths(Path("qmp"), Path("agent"), Path("keyboard"), Path("console"))
    return {
        "format": _FORMAT,
        "qemu": [platform.qemu.version, *_file_identity(platform.qemu.binary)],
        "command": qemu_command(replace(config, name="vm"), platform, anywhere),
        "image": platform.image.digest,
        "host": [os.uname().release, *_host_cpu(Path("/proc/cpuinfo").read_text())],
    }


def _file_identity(path: Path) -> list[Any]:
    """Tells a file from what it was before without reading it."""
    found = path.resolve().stat()
    return [str(path.resolve()), found.st_size, found.st_mtime_ns]


def _host_cpu(cpuinfo: str) -> list[str]:
    """Model, stepping, microcode and features of the first CPU."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
    lines = cpuinfo.partition("\n\n")[0].splitlines()
    return [line for line in lines if line.partition(":")[0].strip() in wanted]


def _whole(folder: Path) -> bool:
    """Whether the snapshot is there with every byte that was saved."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        return bool((folder / "ram").stat().st_size == meta["ram_bytes"])
    except (OSError, ValueError, KeyError):
        return False


async def _make(vm: Vm, folder: Path, progress: Progress) -> None:
    """Boot the template and save it as ``folder``, unless another process does so at the moment."""
    async with _locked(folder.parent / f".lock-{folder.name}", progress):
        if _whole(folder):
            return
        for left_over in (*folder.parent.glob(f".new-{folder.name}-*"), folder):  # of a killed maker; a broken one
            shutil.rmtree(left_over, ignore_errors=True)
        progress.step("Booting a template VM, once")
        new = folder.parent / f".new-{folder.name}-{os.getpid()}"
        if vm.ledger is not None:
            vm.ledger.path(new)
        try:
            new.mkdir()
            await _boot_and_save(vm, new / "ram")
            meta = {"ram_bytes": (new / "ram").stat().st_size, **_ingredients(vm.config, vm.platform)}
            (new / "meta.json").write_text(json.dumps(meta, indent=1))
            await asyncio.to_thread(_sync, new / "ram", new / "meta.json")
            new.rename(folder)
        except OSError as error:
            raise _Unsavable(f"cannot save it in {folder.parent}: {error.strerror}") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
            if vm.ledger is not None:
                vm.ledger.forget(new)
        _prune(folder.parent)


async def _boot_and_save(vm: Vm, ram: Path) -> None:
    directory, out = vm.directory / "template", vm.out / "template"
    directory.mkdir(exist_ok=True)
    out.mkdir(exist_ok=True)
    template = Vm(vm.config, vm.platform, directory, out, vm.ledger)
    await template.start()
    try:
        await template.qmp.execute("stop")
        await template.migrate("migrate", ram)
    except QMPError as error:
        raise _Unsavable(f"QEMU cannot save it: {error}") from error
    except EmuError as error:
        raise _Unsavable(error.message) from error
    finally:
        await template.stop()


def _sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _prune(root: Path) -> None:
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in folders[:-SNAPSHOTS_MAX]:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def _locked(path: Path, progress: Progress) -> AsyncIterator[None]:
    """One maker of a snapshot at a time, in all processes; the kernel frees the lock when a holder dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for attempt in itertools.count():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:  # a blocking flock() would stop the event loop: maybe the holder's
                if attempt * LOCK_POLL_S >= LOCK_WAIT_S:
                    raise _Unsavable("another process takes too long to make it") from error
                if attempt == 1:
                    progress.step("Waiting for another process that boots this template VM")
                await asyncio.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(fd)
