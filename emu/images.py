"""Kernels and root file systems for guests: made once from the recipe and the lock file, then kept.

    image = get(progress)                  # the cached one, else fetch + build (about ten seconds)
    image.kernel_args(host_tsc_khz)        # the kernel's command line
    lock(progress)                         # resolve the recipe's packages anew into images/guest.lock

An image is ``images/<digest>/`` in the cache: vmlinux, bzImage, initrd.cpio and image.json. The digest covers
the packages' digests, the recipe and the builder, so a changed recipe is another image and old ones stay
usable. It appears by one rename; two processes that want the same one build it once.

Errors: EmuError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpu.errors import EmuError
from emu import debs, paths
from emu.progress import Progress
from images import builder

MANIFEST = "image.json"
IMAGES_MAX = 4  # kept in the cache; the ones longest not used go

# Each word is a measured saving or keeps the guest's clock right on a loaded host. init_on_alloc is not here
# on purpose: it stays on, as Debian has it. iomem=relaxed lets nvme-cli map the registers of a controller in use.
KERNEL_ARGS = (
    "console=ttyS0 panic=-1 nokaslr mitigations=off quiet tsc=reliable no_timer_check "
    "rcupdate.rcu_expedited=1 cryptomgr.notests random.trust_cpu=on audit=0 8250.nr_uarts=1 iomem=relaxed"
)


@dataclass(frozen=True)
class Image:
    """What a VM boots. ``digest`` stands for the contents; ``append`` ends the kernel's command line."""

    kernel: Path
    initrd: Path | None
    digest: str
    append: str = ""

    def kernel_args(self, host_tsc_khz: int | None = None) -> str:
        """The command line. Give the host's TSC frequency (kHz) under TCG: a guest on a loaded host measures
        a wrong one, and then no time or rate inside the guest can be trusted."""
        words = [KERNEL_ARGS]
        if host_tsc_khz:
            words.append(f"tsc_early_khz={host_tsc_khz}")
        if self.append:
            words.append(self.append)
        return " ".join(words)


def custom(kernel: Path, initrd: Path | None = None, append: str = "") -> Image:
    """The user's own kernel (vmlinux or bzImage) and initrd. The digest covers their contents."""
    digest = hashlib.sha256(append.encode())
    for path in filter(None, (kernel, initrd)):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise EmuError(f"cannot read {path}: {error.strerror}", "give the path of a file") from error
    return Image(kernel.absolute(), initrd and initrd.absolute(), digest.hexdigest()[:16], append)


def get(progress: Progress) -> Image:
    """The image of the recipe and the lock file, built when it is not in the cache."""
    locked = current_lock()
    return _cached(_digest(locked)) or build(progress)


def build(progress: Progress) -> Image:
    """Build the image; another process that builds the same one at this moment is waited for.

    When the mirror has no longer what the lock names, the packages are resolved anew into a lock of this
    cache alone, and that is said.
    """
    locked = current_lock()
    try:
        debs.fetch(locked.debs, progress)
    except debs.MirrorLacks as error:
        progress.note(f"{error.message}: the guest image takes what the mirror has now")
        locked = _resolve(progress)
        debs.write_lock(_own_lock(), locked)
        debs.fetch(locked.debs, progress)
    digest = _digest(locked)
    with paths.locked(paths.cache_dir("images")):
        found = _cached(digest)
        if found is None:
            progress.step("Building the guest image")
            found = _build(locked, digest)
            _prune()
    return found


def fetch(progress: Progress) -> list[Path]:
    """Bring the packages of the lock file into the cache."""
    return debs.fetch(current_lock().debs, progress)


def lock(progress: Progress, path: Path = builder.LOCK) -> debs.Lock:
    """Resolve the packages as the mirror has them now, and write those that the image needs to ``path``."""
    locked = _resolve(progress)
    try:
        debs.write_lock(path, locked)
    except OSError as error:
        raise EmuError(f"cannot write {path}: {error.strerror}", "run this in a clone of the project") from error
    return locked


def images() -> list[dict[str, Any]]:
    """What is in the cache: digest, bytes, kernel, packages and whether ``get`` would take it."""
    wanted = _digest(current_lock())
    rows = []
    for manifest in sorted(paths.cache_dir("images").glob(f"*/{MANIFEST}")):
        row = json.loads(manifest.read_text(encoding="utf-8"))
        rows.append({**row, "current": row["digest"] == wanted, "path": str(manifest.parent)})
    return rows


def current_lock() -> debs.Lock:
    """The lock of the release, or the one that this cache had to make because the mirror had moved on."""
    released = debs.read_lock(builder.LOCK)
    own = _own_lock()
    return debs.read_lock(own) if own.exists() else released


def _own_lock() -> Path:
    """Belongs to one released lock: a new release is tried first again."""
    released = hashlib.sha256(builder.LOCK.read_bytes()).hexdigest()[:16]
    return paths.cache_dir("images") / f"guest-{released}.lock"


def _resolve(progress: Progress) -> debs.Lock:
    """Resolve all packages, then keep those that give a file to the image: a fifth of the whole."""
    recipe = builder.Recipe.load()
    found = debs.resolve(recipe.packages, recipe.suites, progress)
    debs.fetch(found, progress)
    progress.step("Building the guest image to see which packages it needs")
    with tempfile.TemporaryDirectory(prefix="lock-", dir=paths.cache_dir("images")) as directory:
        used = builder.build(recipe, found, Path(directory))
    return debs.Lock(tuple(recipe.packages), tuple(recipe.suites), tuple(used))


def _digest(locked: debs.Lock) -> str:
    digest = hashlib.sha256(locked.digest.encode())
    for path in builder.sources():
        digest.update(hashlib.sha256(path.name.encode() + b"\0" + path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _image(directory: Path) -> Image:
    return Image(directory / builder.VMLINUX, directory / builder.INITRD, directory.name)


def _cached(digest: str) -> Image | None:
    directory = paths.cache_dir("images") / digest
    if not directory.exists():
        return None
    with contextlib.suppress(OSError):
        os.utime(directory)  # the last use, for _prune
    return _image(directory)


def _build(locked: debs.Lock, digest: str) -> Image:
    final = paths.cache_dir("images") / digest
    directory = Path(tempfile.mkdtemp(prefix=f".{digest}-", dir=final.parent))
    try:
        builder.build(builder.Recipe.load(), locked.debs, directory)
        files = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
        kernel = next(deb for deb in locked.debs if deb.package.startswith("linux-image-"))
        manifest = {
            "digest": digest,
            "kernel": kernel.version,
            "files": files,
            "debs": debs.origin(locked.debs),
        }
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        directory.chmod(0o755)
        os.replace(directory, final)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return _image(final)


def _prune() -> None:
    kept = sorted(paths.cache_dir("images").glob(f"*/{MANIFEST}"), key=lambda path: path.parent.stat().st_mtime)
    for manifest in kept[:-IMAGES_MAX]:
        shutil.rmtree(manifest.parent, ignore_errors=True)
