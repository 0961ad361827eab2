"""Debian packages -> kernel and initramfs, byte for byte the same from the same packages.

    recipe = Recipe.load()
    used = build(recipe, lock.debs, directory)     # writes vmlinux, bzImage, initrd.cpio; the debs it used

Needs no root and no compiler. Two programs of the guest run on the host: its Python, by the guest's
own loader, because byte code belongs to one version of Python; and busybox, to say which commands it knows.

Errors: EmuError when a package lacks what the recipe names.
Limits: x86-64, merged-/usr packages (Debian 13 or later), a kernel compressed with zstd, modules with xz.
"""

from __future__ import annotations

import fnmatch
import json
import lzma
import os
import posixpath
import stat
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpu.errors import EmuError
from emu import debs
from images import cpio, elf, kernel
from images.cpio import Entry

HERE = Path(__file__).parent
RECIPE = HERE / "guest.toml"
LOCK = HERE / "guest.lock"
AGENT = HERE / "agent.py"
ROOTFS = HERE / "rootfs"

VMLINUX, BZIMAGE, INITRD = "vmlinux", "bzImage", "initrd.cpio"

LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib")
MERGED = ("bin", "sbin", "lib", "lib64")  # links into usr/
NOT_READ = ("usr/share/doc/", "usr/share/man/", "usr/share/locale/", "usr/share/info/", "usr/include/")

_COMPILE = """
import json, py_compile, sys
for source, target, name in json.load(sys.stdin):
    py_compile.compile(source, target, name, True, 0, py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""


@dataclass(frozen=True)
class Recipe:
    """images/guest.toml, whose comments say what each key means."""

    suites: Sequence[str]
    packages: Sequence[str]
    programs: Sequence[str]
    files: Sequence[str]
    busybox_without: Sequence[str]
    modules: Sequence[str]
    python_without: Sequence[str]
    detach: Mapping[str, Sequence[str]]

    @classmethod
    def load(cls, path: Path = RECIPE) -> Recipe:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        try:
            return cls(**data)
        except TypeError as error:
            raise EmuError(f"{path}: {error}", "compare its keys with images/guest.toml of the release") from None


def sources() -> list[Path]:
    """Every file of this package that decides what an image holds, the lock apart."""
    code = [HERE / name for name in ("builder.py", "cpio.py", "elf.py", "kernel.py")]
    return [RECIPE, AGENT, *code, *sorted(path for path in ROOTFS.rglob("*") if path.is_file())]


class Packages:
    """The files of all packages as one tree, and which package each came from."""

    def __init__(self, packages: Iterable[debs.Deb]) -> None:
        self.files: dict[str, Entry] = {}
        self.owner: dict[str, debs.Deb] = {}
        for deb in packages:
            for info, data in debs.members(deb):
                path = _merged(info.name)
                if info.isdir() or path.startswith(NOT_READ):
                    continue
                if info.islnk():
                    entry = self.files[_merged(info.linkname)]
                elif info.issym():
                    entry = cpio.symlink(info.linkname)
                elif info.isreg():
                    entry = cpio.regular(data, 0o755 if info.mode & 0o111 else 0o644)
                else:
                    continue
                self.files[path] = entry
                self.owner[path] = deb

    def get(self, path: str, why: str) -> Entry:
        try:
            return self.files[path]
        except KeyError:
            raise EmuError(f"no package has {path}, {why}", "correct images/guest.toml") from None


def _merged(path: str) -> str:
    return f"usr/{path}" if path.partition("/")[0] in MERGED else path


def build(recipe: Recipe, locked: Sequence[debs.Deb], into: Path) -> list[debs.Deb]:
    """Write kernel and initramfs into the directory ``into``; returns the (fetched) packages that it took."""
    root = Root(Packages(locked), recipe.detach)
    bzimage, version = root.kernel()
    for path in recipe.programs:
        root.add_program(path)
    for pattern in recipe.files:
        root.add_files(pattern)
    root.add_modules(version, recipe.modules)
    with tempfile.TemporaryDirectory(prefix="host-", dir=into) as scratch:
        root.add_busybox(Path(scratch), recipe.busybox_without)
        root.add_python(Path(scratch), recipe.python_without)
    root.add_skeleton()

    (into / VMLINUX).write_bytes(kernel.vmlinux(bzimage))
    (into / BZIMAGE).write_bytes(bzimage)
    with (into / INITRD).open("wb") as out:
        out.writelines(cpio.write(root.entries))
    return sorted(root.used)


class Root:
    """The guest's root file system while it comes together."""

    def __init__(self, packages: Packages, detach: Mapping[str, Sequence[str]]) -> None:
        self.packages = packages
        self.detach = detach
        self.entries: dict[str, Entry] = {}
        self.used: set[debs.Deb] = set()

    def kernel(self) -> tuple[bytes, str]:
        """The bzImage, which is no file of the guest, and its version."""
        found = fnmatch.filter(self.packages.files, "boot/vmlinuz-*")
        if len(found) != 1:
            raise EmuError(f"the packages hold {len(found)} kernels, not one", "correct images/guest.toml")
        self.used.add(self.packages.owner[found[0]])
        return self.packages.files[found[0]].data, found[0].removeprefix("boot/vmlinuz-")

    def take(self, path: str, why: str) -> Entry:
        """Copy one file of the packages; a symbolic link brings its target, which is what is returned."""
        entry = self.packages.get(path, why)
        self.used.add(self.packages.owner[path])
        if path in self.detach:
            try:
                entry = cpio.Entry(entry.mode, elf.detach(entry.data, self.detach[path]))
            except ValueError as error:
                raise EmuError(f"{path}: {error}", "correct 'detach' in images/guest.toml") from error
        self.entries[path] = entry
        if stat.S_ISLNK(entry.mode):
            target = posixpath.join("/", posixpath.dirname(path), entry.data.decode())
            return self.take(_merged(posixpath.normpath(target).lstrip("/")), f"which {path} leads to")
        return entry

    def add_program(self, path: str) -> None:
        """A program or library with everything that it asks the loader for."""
        todo = [(path, self.take(path, "which is a program"))]
        while todo:
            user, entry = todo.pop()
            if not elf.is_elf(entry.data):
                continue
            if loader := elf.interpreter(entry.data):
                self.take(_merged(loader.lstrip("/")), f"which starts {user}")
            for name in elf.needed(entry.data):
                found = [f"{d}/{name}" for d in LIBRARIES if f"{d}/{name}" in self.packages.files]
                if not found:
                    raise EmuError(f"no package has {name}, which {user} asks for", "correct images/guest.toml")
                if found[0] not in self.entries:
                    todo.append((found[0], self.take(found[0], "which is a library")))

    def add_files(self, pattern: str) -> None:
        paths = sorted(fnmatch.filter(self.packages.files, pattern))
        if not paths:
            raise EmuError(f"no package has {pattern}", "correct 'files' in images/guest.toml")
        for path in paths:
            self.take(path, "")

    def add_modules(self, version: str, wanted: Sequence[str]) -> None:
        """Uncompressed, as that is faster to load, with the indexes that a package's postinst would make."""
        base, suffix = f"usr/lib/modules/{version}/", ".xz"
        packed = [p for p in self.packages.files if p.startswith(base) and p.endswith(f".ko{suffix}")]
        paths = [path.removeprefix(base).removesuffix(suffix) for path in packed]
        modules = kernel.closure(
            wanted, paths, lambda path: lzma.decompress(self.packages.files[f"{base}{path}{suffix}"].data)
        )
        self.entries |= {base + path: cpio.regular(data) for path, data in modules.items()}
        for name, text in kernel.modprobe_index(modules).items():
            self.entries[base + name] = cpio.regular(text.encode())
        self.take(f"{base}modules.builtin", "which modprobe reads")

    def add_busybox(self, scratch: Path, without: Sequence[str]) -> None:
        """A link for each command of busybox that is not there as a program of its own."""
        program = scratch / "busybox"
        program.write_bytes(self.take("usr/bin/busybox", "which is the shell").data)
        program.chmod(0o755)
        there = {posixpath.basename(path) for path in self.entries if path.startswith(("usr/bin/", "usr/sbin/"))}
        for path in _run(["busybox", "--list-full"], scratch).split():
            if "/" in path and posixpath.basename(path) not in there | set(without):
                self.entries[_merged(path)] = cpio.symlink("/usr/bin/busybox")
        self.entries["init"] = cpio.symlink("/usr/bin/busybox")

    def add_python(self, scratch: Path, without: Sequence[str]) -> None:
        """The standard library and the agent as byte code without sources."""
        link = self.packages.get("usr/bin/python3", "which is Python").data.decode()
        base = f"usr/lib/{link}/"
        jobs: dict[str, bytes] = {"usr/lib/dpu-emu/agent": AGENT.read_bytes()}
        for path in sorted(p for p in self.packages.files if p.startswith(base)):
            name = path.removeprefix(base)
            if any(fnmatch.fnmatch(name, pattern) for pattern in without):
                continue
            if name.endswith(".py"):
                jobs[path.removesuffix(".py")] = self.take(path, "").data
            elif name.endswith(".so"):
                self.add_program(path)
        sources = [path for path in self.entries if path.startswith(base) and path.endswith(".py")]
        for path in sources:
            del self.entries[path]
        for path, code in self._compiled(scratch, base, link, jobs).items():
            self.entries[f"{path}.pyc"] = cpio.regular(code)

    def _compiled(self, scratch: Path, base: str, python: str, jobs: Mapping[str, bytes]) -> dict[str, bytes]:
        """Byte code of ``jobs`` (path without suffix -> source), by the guest's own Python in ``scratch``."""
        loader = "ld-linux-x86-64.so.2"
        wanted = [p for p in self.entries if p.startswith((LIBRARIES[0], "usr/lib64/")) or p == f"usr/bin/{python}"]
        tree = {path: self.packages.files[path] for path in wanted}
        tree |= {p: e for p, e in self.packages.files.items() if p.startswith(base) and stat.S_ISREG(e.mode)}
        for path, entry in tree.items():
            target = scratch / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISLNK(entry.mode):
                target.symlink_to(entry.data.decode())
            else:
                target.write_bytes(entry.data)
                target.chmod(0o755)
        todo = []
        for number, (path, code) in enumerate(jobs.items()):
            (scratch / f"{number}.py").write_bytes(code)
            todo.append((f"{number}.py", f"{number}.pyc", f"/{path}.py"))
        # relative paths: the loader and PYTHONHOME split theirs at colons, which a cache's path may have
        argv = [f"usr/lib64/{loader}", "--library-path", LIBRARIES[0], f"usr/bin/{python}", "-s", "-S", "-B"]
        _run([*argv, "-c", _COMPILE], scratch, json.dumps(todo))
        return {path: (scratch / compiled).read_bytes() for path, (_, compiled, _) in zip(jobs, todo)}

    def add_skeleton(self) -> None:
        """Directories, the links of a merged /usr, the console's device node and images/rootfs."""
        for name in MERGED:
            self.entries[name] = cpio.symlink(f"usr/{name}")
        for name in ("dev", "etc", "mnt", "proc", "root", "run", "sys", "tmp", "var"):
            self.entries[name] = cpio.directory()
        self.entries["var/run"] = cpio.symlink("/run")
        self.entries["var/tmp"] = cpio.symlink("/tmp")
        self.entries["etc/mtab"] = cpio.symlink("/proc/self/mounts")
        self.entries["dev/console"] = cpio.character_device(5, 1)
        self.entries["dev/null"] = cpio.character_device(1, 3, 0o666)
        for path in ROOTFS.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                # a wheel does not keep permissions: what is a script says so itself
                self.entries[str(path.relative_to(ROOTFS))] = cpio.regular(
                    data, 0o755 if data.startswith(b"#!") else 0o644
                )


def _run(argv: Sequence[str], root: Path, stdin: str = "") -> str:
    """Standard output of a program of the guest's, as given below ``root``, that runs on this host."""
    # nothing of the host's Python may be seen, and the order within sets must not change
    environment = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "PYTHONHOME": "usr", "PYTHONHASHSEED": "0"}
    name = posixpath.basename(argv[0])
    try:
        done = subprocess.run(
            [root / argv[0], *argv[1:]],
            cwd=root,
            input=stdin,
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise EmuError(f"the guest's {name} does not run on this host: {last}") from error
    except OSError as error:
        raise EmuError(
            f"the guest's {name} does not run on this host: {error}",
            "the image can be built on x86-64 only, in a cache directory that is not mounted noexec",
        ) from error
    return done.stdout
