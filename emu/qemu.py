"""The QEMU to run: one that has the device ``vfio-user-pci``, whichever its version is.

    qemu = find(None, progress)           # option, DPU_EMU_QEMU, PATH, else a private copy that is made once
    [*qemu.command(), "-machine", "q35"]  # and qemu.command("qemu-img"), qemu.command("qemu-nbd")

The private copy is made of Debian packages (trixie-backports), each pinned by version and sha256 in
images/qemu.lock and unpacked without root below cache/qemu/<digest>/. Its programs run through the C library
that came with them, by one small wrapper script each that execs, so the process id is QEMU's own. The
system's QEMU is never touched and, unless it has the device, never used.

When the archive no longer has the pinned packages, the current ones are taken: only after the same smoke
test, with a note, and written down in origin.json, so that a report can show it. An operator's own QEMU is an
error, not a reason to look elsewhere, when it lacks the device.

``python -m emu.qemu FILE`` writes a new lock file of the mirror's current packages (needs a Debian host).

Limits: x86-64 only. Errors: EmuError with the fix.
Source: ld.so(8); QEMU's docs/system/devices/vfio-user.rst; the device exists from QEMU 10.1.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import images
from dpu.errors import EmuError
from emu import debs, paths
from emu.progress import Progress, make

SYSTEM_EMULATOR = "qemu-system-x86_64"
TOOLS = (SYSTEM_EMULATOR, "qemu-img", "qemu-nbd")
DEVICE = "vfio-user-pci"
LOCK = Path(images.__file__).parent / "qemu.lock"
PACKAGES = ("qemu-system-x86", "qemu-utils")
SUITES = ("trixie", "trixie-updates", "trixie-backports")

_DATA_PACKAGES = ("ipxe-qemu", "qemu-system-data", "seabios")  # firmware: no program names these as a library
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_LOADER = f"{_LIBRARIES}/ld-linux-x86-64.so.2"
_FIRMWARE = ("usr/share/qemu", "usr/share/seabios")
_PROBE_TIMEOUT_S = 60

# Relative to the script itself, so that a cache directory can be moved. LD_PRELOAD names libraries that were
# built for the host's C library; modules of the host's QEMU make this one abort.
_WRAPPER = """\
#!/bin/sh
root="${{0%/*}}/../root"
unset LD_PRELOAD LD_LIBRARY_PATH
export QEMU_MODULE_DIR="$root/modules"
exec "$root/{loader}" --inhibit-cache --library-path "$root/{libraries}" --argv0 "$0" \\
  "$root/usr/bin/{tool}"{arguments} "$@"
"""


@dataclass(frozen=True)
class Qemu:
    """A QEMU that has the device.

    ``binary`` is what to run; ``version`` as QEMU says it, package included; ``origin`` is for a private copy
    {"pinned": bool, "packages": [{package, version, sha256}]}, else empty.
    """

    binary: Path
    version: str
    source: Literal["user", "system", "private"]
    origin: dict[str, Any] = field(default_factory=dict, compare=False)

    def command(self, tool: str = SYSTEM_EMULATOR) -> list[str]:
        """The command line's first words for one of TOOLS."""
        if tool == SYSTEM_EMULATOR:
            return [str(self.binary)]
        beside = self.binary.parent / tool
        found = str(beside) if beside.exists() else shutil.which(tool)
        if found is None:
            raise EmuError(f"{tool} is neither beside {self.binary} nor in PATH", "install qemu-utils")
        return [found]

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {
            "binary": str(self.binary),
            "version": self.version,
            "source": self.source,
            "pinned": self.origin.get("pinned"),
            "packages": self.origin.get("packages", []),
        }


def find(option: str | None, progress: Progress) -> Qemu:
    """The QEMU to use; makes the private copy when there is no other (the only case that needs a network).

    ``option`` is a path or a command name as an operator gives it; it and DPU_EMU_QEMU are final.
    """
    found = present(option)
    if found is None:
        _make_private(progress)
        found = present(option)
        assert found is not None
    if found.origin.get("pinned") is False:
        progress.note(f"QEMU is {found.version}, not the pinned one, which the archive no longer had")
    return found


def present(option: str | None = None) -> Qemu | None:
    """As ``find``, but nothing is made: None when it would have to be."""
    own = option or os.environ.get("DPU_EMU_QEMU")
    if own:
        return _own(own, "the option" if option else "DPU_EMU_QEMU")
    system = shutil.which(SYSTEM_EMULATOR)
    if system is not None:
        missing, version = probe([system])
        if not missing:
            return Qemu(Path(system), version, "system")
    return _private()


def _own(name: str, given_by: str) -> Qemu:
    path = shutil.which(os.path.expanduser(name))
    if path is None:
        raise EmuError(f"the QEMU of {given_by}, {name}, is no program", f"give the path of a {SYSTEM_EMULATOR}")
    missing, version = probe([path])
    if missing:
        raise EmuError(
            f"the QEMU of {given_by}, {path}, cannot be used: {missing}",
            f"give one of QEMU 10.1 or newer that was built with {DEVICE}, or none: then one is fetched",
        )
    return Qemu(Path(path).absolute(), version, "user")


def probe(command: Sequence[str]) -> tuple[str, str]:
    """(what is wrong or "", version) of a system emulator: has it the device, does it start and stop?"""
    try:
        asked = _run([*command, "-device", f"{DEVICE},help"])
        if asked.returncode or f"{DEVICE} options" not in asked.stdout:
            return f"it has no device {DEVICE}", ""
        talk = '{"execute": "qmp_capabilities"}\n{"execute": "quit"}\n'
        arguments = ["-machine", "none", "-nodefaults", "-display", "none", "-qmp", "stdio"]
        ran = _run([*command, *arguments], talk)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not run: {error}", ""
    greeting = ran.stdout.split("\n", 1)[0]
    if ran.returncode or '"QMP"' not in greeting or '"SHUTDOWN"' not in ran.stdout:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        return f"it does not start and stop: {last}", ""
    version = json.loads(greeting)["QMP"]["version"]
    number = ".".join(str(version["qemu"][part]) for part in ("major", "minor", "micro"))
    return "", f"{number} ({version['package']})" if version["package"] else number


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)


# The private copy: cache/qemu/<digest>/{bin,root,origin.json}


def _recipe(lock: debs.Lock) -> str:
    """The name of the copy made of ``lock``: changes with the packages and with how they are put together."""
    how = f"{_WRAPPER} {_FIRMWARE} {TOOLS}"
    return hashlib.sha256(f"{lock.digest} {how}".encode()).hexdigest()[:16]


def _private() -> Qemu | None:
    lock = debs.read_lock(LOCK)
    prefix = paths.cache_dir("qemu") / _recipe(lock)
    try:
        origin = json.loads((prefix / "origin.json").read_text())
    except FileNotFoundError:
        return None
    origin["pinned"] = origin["packages"] == debs.origin(lock.debs)
    return Qemu(prefix / "bin" / SYSTEM_EMULATOR, origin["version"], "private", origin)


def _make_private(progress: Progress) -> None:
    """Make the copy in a directory beside its place and move it there whole; a second process waits."""
    directory = paths.cache_dir("qemu")
    with paths.locked(directory):
        if _private() is not None:
            return
        for left_over in directory.glob(".new-*"):  # of a process that was killed: the lock is ours now
            shutil.rmtree(left_over)
        lock = debs.read_lock(LOCK)
        try:
            debs.fetch(lock.debs, progress)
        except debs.MirrorLacks as error:
            progress.note(f"{error.message}; taking the QEMU that it has now, if that one works")
            current = make_lock(progress)
            debs.fetch(current.debs, progress)
            _assemble(current, directory, progress)
            # under the pinned one's name too, so that later runs find it without asking the mirror again
            link = directory / _recipe(lock)
            link.unlink(missing_ok=True)
            link.symlink_to(_recipe(current))
        else:
            _assemble(lock, directory, progress)


def _assemble(lock: debs.Lock, directory: Path, progress: Progress) -> None:
    final = directory / _recipe(lock)
    if final.exists():
        return
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=directory))
    try:
        new.chmod(0o755)
        _unpack(lock.debs, new / "root", progress)
        (new / "root" / "modules").mkdir()
        (new / "bin").mkdir()
        for tool in TOOLS:
            _write_wrapper(new / "bin" / tool, tool)
        progress.step("Trying the private QEMU")
        foreign = [path for path in _libraries(new / "root") if new not in path.parents]
        wrong, version = probe([str(new / "bin" / SYSTEM_EMULATOR)])
        if foreign:
            wrong = f"{foreign[0].name} is not in its packages"
        if wrong:
            raise EmuError(
                f"the QEMU made of Debian packages fails its test: {wrong}",
                "set DPU_EMU_QEMU to a QEMU 10.1 or newer of your own",
            )
        origin = {"version": version, "packages": debs.origin(lock.debs)}
        (new / "origin.json").write_text(json.dumps(origin, indent=1))
        new.rename(final)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _unpack(packages: Sequence[debs.Deb], root: Path, progress: Progress) -> None:
    progress.step(f"Unpacking {len(packages)} packages", len(packages))
    for deb in packages:
        debs.unpack(deb, root, exclude=lambda name: not _is_wanted(name))
        progress.advance(1)


def _is_wanted(name: str) -> bool:
    """Programs, libraries and firmware; no documentation, no other programs, no plug-ins of libraries."""
    directory, _, base = name.rpartition("/")
    if directory == "usr/bin":
        return base in TOOLS
    if directory == _LIBRARIES:
        return ".so" in base
    return any(name == firmware or name.startswith(f"{firmware}/") for firmware in _FIRMWARE)


def _write_wrapper(path: Path, tool: str) -> None:
    firmware = [f' -L "$root/{name}"' for name in _FIRMWARE] if tool == SYSTEM_EMULATOR else []
    path.write_text(_WRAPPER.format(loader=_LOADER, libraries=_LIBRARIES, tool=tool, arguments="".join(firmware)))
    path.chmod(0o755)


def _libraries(root: Path) -> set[Path]:
    """Every library that the programs below ``root`` load, as the loader there finds them."""
    found: set[Path] = set()
    for tool in TOOLS:
        loader = [str(root / _LOADER), "--inhibit-cache", "--library-path", str(root / _LIBRARIES)]
        listed = _run([*loader, "--list", str(root / "usr/bin" / tool)])
        if listed.returncode:
            raise EmuError(f"{tool} misses a library: {listed.stderr.strip() or listed.stdout.strip()}")
        for path in re.findall(r"=> (/\S+) \(0x", listed.stdout):
            if not path.endswith(".so.2") or "/ld-linux" not in path:  # the loader is listed at its ELF path
                found.add(Path(path))
    return found


# The lock


def make_lock(progress: Progress) -> debs.Lock:
    """The current packages on the mirror, less those that the programs need nothing of."""
    resolved = debs.resolve(PACKAGES, SUITES, progress)
    debs.fetch(resolved, progress)
    with tempfile.TemporaryDirectory(prefix="lock-", dir=paths.cache_dir("apt")) as directory:
        root = Path(directory).resolve() / "root"
        _unpack(resolved, root, progress)
        used = {os.path.normpath(path.relative_to(root)) for path in _libraries(root)}
        used |= {os.path.normpath((root / path).resolve().relative_to(root)) for path in list(used)}
    used |= {_LOADER} | {f"usr/bin/{tool}" for tool in TOOLS}
    wanted = [deb for deb in resolved if deb.package in _DATA_PACKAGES or _holds(deb, used)]
    return debs.Lock(PACKAGES, SUITES, tuple(wanted))


def _holds(deb: debs.Deb, names: Iterable[str]) -> bool:
    return not {info.name for info, _ in debs.members(deb)}.isdisjoint(names)


def main() -> None:
    """Write a new lock file to the path given."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m emu.qemu LOCK_FILE")
    progress = make()
    try:
        debs.write_lock(Path(sys.argv[1]), make_lock(progress))
    except EmuError as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        progress.close()


if __name__ == "__main__":
    main()
