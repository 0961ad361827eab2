"""Does this host have what the lab needs? One row per need: what was found, and the fix for what is amiss.

    emu doctor [--json] [--offline]       # exit code 0: everything needed is there; 3: something is not

``ok`` is fine, ``warn`` works but slower, smaller or not for everybody, ``fail`` stops ``emu run``. A check
that cannot be made at all is a ``fail`` that says why.

To add a need: one function that returns a Check, and its row in CHECKS.
Sources: memfd_create(2), fcntl_memfd seals in fcntl(2); io_uring_setup(2); kernel.io_uring_disabled in Linux
Documentation/admin-guide/sysctl/kernel.rst; getrlimit(2); cgroup v2 memory.max.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.metadata
import json as json_module
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpu.errors import EmuError
from emu import accel, debs, hostinfo, images, paths, qemu

MIB, GIB = 1 << 20, 1 << 30
MEMORY_FAIL, MEMORY_WARN = 512 * MIB, 2 * GIB  # one VM of 256 MiB and the card; the default test set
DISK_FAIL, DISK_WARN = 512 * MIB, 2 * GIB
SHM_WARN = 64 * MIB
FILES_FAIL, FILES_WARN = 1024, 4096  # 8 controllers with 65 vectors and their sockets need about 600
KERNEL_MIN = (5, 10)
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One need: its name, whether it is met, what was found, and what to do ("" when nothing is)."""

    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Asked:
    """What the operator wants checked: a QEMU of their own, the output directory, without a network."""

    qemu: str | None = None
    out: Path = Path("out")
    offline: bool = False


def doctor(json: bool, offline: bool = False, qemu_option: str | None = None, out: Path = Path("out")) -> int:
    """Make all checks and print them on standard output; the exit code."""
    checks = run_checks(Asked(qemu_option, out, offline))
    good = all(check.status != "fail" for check in checks)
    if json:
        print(json_module.dumps({"ok": good, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        _print_table(checks)
    return 0 if good else 1


def run_checks(asked: Asked | None = None) -> list[Check]:
    """Every row of CHECKS, in order."""
    asked = asked or Asked()
    return [_made(name, check, asked) for name, check in CHECKS.items()]


def _made(name: str, check: Callable[[Asked], tuple[Status, str, str]], asked: Asked) -> Check:
    try:
        return Check(name, *check(asked))
    except EmuError as error:
        return Check(name, "fail", error.message, error.hint)
    except OSError as error:
        return Check(name, "fail", f"the check itself fails: {error}", "report this")


def _print_table(checks: Sequence[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for may_wrap in (False, False, True):
        table.add_column(no_wrap=not may_wrap, overflow="fold")  # folds a path that is longer than a line
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in checks:
        status = f"[{colours[check.status]}]{check.status}[/]"
        table.add_row(status, check.name, escape(check.found))
        if check.fix:
            table.add_row("", "", f"[bold]fix:[/] {escape(check.fix)}")
    Console().print(table)


# The checks: each returns (status, what was found, fix)

Answer = tuple[Status, str, str]


def _machine(asked: Asked) -> Answer:
    found = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "fail", found, "use Linux on x86-64"
    number = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    if number < KERNEL_MIN:
        return "warn", found, "kernels before 5.10 are not tried: use a newer one"
    return "ok", found, ""


def _python(asked: Asked) -> Answer:
    found = f"Python {platform.python_version()}, dpu-emu {hostinfo.project_version()}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return "fail", found, "use Python 3.11, 3.12 or 3.13"
    return "ok", found, ""


def _packages(asked: Asked) -> Answer:
    found, missing = [], []
    for line in importlib.metadata.requires(hostinfo.DISTRIBUTION) or []:
        need, _, marker = line.partition(";")
        if "extra" in marker:
            continue
        name = re.split(r"[^\w.-]", need, maxsplit=1)[0]
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(need.strip())
    if missing:
        return "fail", f"missing: {', '.join(missing)}", f"{sys.executable} -m pip install dpu-emu"
    return "ok", ", ".join(found), ""


def _qemu(asked: Asked) -> Answer:
    found = qemu.present(asked.qemu)
    if found is None:
        what = f"none with {qemu.DEVICE}; a private one is made at the first run"
        return _to_be_made(what, debs.read_lock(qemu.LOCK), asked)
    pinned = ", not the pinned version" if found.origin.get("pinned") is False else ""
    return "ok", f"{found.version}, {found.source}{pinned}: {found.binary}", ""


def _to_be_made(what: str, lock: debs.Lock, asked: Asked) -> Answer:
    missing = _missing(lock)
    if not missing:
        return "ok", f"{what}, of packages that are here", ""
    what += f", of {sum(deb.size for deb in missing) / 1e6:.0f} MB from the mirror"
    if asked.offline:
        return "fail", what, "run once with a network"
    return "warn", what, "nothing to do but to wait at the first run"


def _image(asked: Asked) -> Answer:
    if _has_image():
        return "ok", "built, and that of this version", ""
    return _to_be_made("none yet; it is built at the first run", images.current_lock(), asked)


def _device(asked: Asked) -> Answer:
    found = qemu.present(asked.qemu)
    if found is None:
        return "warn", "no QEMU to ask yet", "it is tried when the private QEMU is made"
    wrong, _ = qemu.probe(found.command())
    if wrong:
        return "fail", wrong, f"remove {found.binary.parent.parent}: it is made anew at the next run"
    return "ok", f"{qemu.DEVICE} is there, and QEMU starts and stops", ""


def _kvm(asked: Asked) -> Answer:
    usable, why = accel.probe_kvm()
    if usable:
        return "ok", why, ""
    fix = "TCG is used: slower, and it works"
    if "permission" in why:
        fix = "usermod -aG kvm USER and a new login; until then TCG is used"
    return "warn", why, fix


def _memfd(asked: Asked) -> Answer:
    fd = os.memfd_create("dpu-emu-doctor", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        try:
            os.ftruncate(fd, 0)
        except PermissionError:
            return "ok", "memfd_create and seals work", ""
        return "fail", "a sealed memfd can be shrunk", "use a real Linux kernel"
    finally:
        os.close(fd)


_IO_URING_SETUP = 425  # x86-64 system call number
_IO_URING_PARAMS_BYTES = 120


def _io_uring(asked: Asked) -> Answer:
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    fd = libc.syscall(_IO_URING_SETUP, 4, params)
    if fd >= 0:
        os.close(fd)
        return "ok", f"io_uring may be used{_io_uring_sysctl()}", ""
    code = ctypes.get_errno()
    found = f"io_uring may not be used: {os.strerror(code)}{_io_uring_sysctl()}"
    fix = "a thread pool serves files instead, more slowly"
    if code == errno.EPERM and _io_uring_sysctl():
        fix += "; sysctl kernel.io_uring_disabled=0 allows it"
    elif code == errno.EPERM:
        fix += "; a container's seccomp profile forbids it"
    return "warn", found, fix


def _io_uring_sysctl() -> str:
    """How kernel.io_uring_disabled (Linux 6.6) stands, if it does not allow everything."""
    try:
        value = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
    except OSError:
        return ""
    return "" if value == "0" else f" (kernel.io_uring_disabled={value})"


def _memory(asked: Asked) -> Answer:
    free, by = _memory_free()
    return _enough(free, MEMORY_FAIL, MEMORY_WARN, f"{_size(free)} free ({by})", "free memory")


def _memory_free(meminfo: Path = Path("/proc/meminfo"), cgroup: Path | None = None) -> tuple[int, str]:
    """(bytes that can be had, what sets that limit)."""
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    directory = cgroup or _own_cgroup()
    try:
        limit = (directory / "memory.max").read_text().strip()
        left = int(limit) - int((directory / "memory.current").read_text())
    except (OSError, ValueError):  # no such limit, "max", or no cgroup v2
        return free, "host"
    return min((free, "host"), (max(left, 0), "control group"))


def _own_cgroup() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::/"):
            return Path("/sys/fs/cgroup", line.removeprefix("0::/"))
    return Path("/sys/fs/cgroup")


def _shm(asked: Asked) -> Answer:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return "warn", f"no /dev/shm: {error.strerror}", "mount a tmpfs there: files in memory use it"
    fix = "give it more (in a container: --shm-size)"
    return _enough(free, 0, SHM_WARN, f"{_size(free)} free in /dev/shm", fix)


def _cache(asked: Asked) -> Answer:
    directory = paths.cache_dir()
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return "fail", f"{directory}: {error.strerror}", "set DPU_EMU_CACHE to a directory you can write"
    free = shutil.disk_usage(directory).free
    fix = "free some space, or set DPU_EMU_CACHE to a larger disk"
    return _enough(free, DISK_FAIL, DISK_WARN, f"{_size(free)} free in {directory}", fix)


def _out(asked: Asked) -> Answer:
    directory = asked.out.absolute()
    while not directory.exists():
        directory = directory.parent
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        return "fail", f"{directory} cannot be written", "give another directory with --out"
    free = shutil.disk_usage(directory).free
    fix = "free some space, or give another directory with --out"
    return _enough(free, DISK_FAIL, DISK_WARN, f"{_size(free)} free for {asked.out}", fix)


def _sockets(asked: Asked) -> Answer:
    directory = paths.runtime_dir(f"doctor-{os.getpid()}")
    directory.rmdir()
    return "ok", str(directory.parent), ""


def _files(asked: Asked) -> Answer:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # dpud raises the soft limit to it
    count = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    fix = "raise the hard limit: nofile in /etc/security/limits.conf, or the container's --ulimit nofile"
    return _enough(count, FILES_FAIL, FILES_WARN, f"{count} at most", fix)


def _mirror(asked: Asked) -> Answer:
    if asked.offline:
        return "ok", "not asked (--offline)", ""
    status: Status = "fail" if _needs_mirror(asked) else "warn"
    try:
        base = debs.mirror()
        wrong = debs.try_mirror(qemu.SUITES[-1])
    except EmuError as error:
        return status, error.message, error.hint
    proxies = [name for name in ("http_proxy", "https_proxy") if os.environ.get(name)]
    through = f" through {' and '.join(proxies)}" if proxies else ""
    if wrong:
        fix = "check network, http_proxy and https_proxy, or set DPU_EMU_MIRROR to a Debian mirror"
        return status, f"{base}{through}: {wrong}", fix
    return "ok", f"{base}{through} answers", ""


def _needs_mirror(asked: Asked) -> bool:
    """Is something still to be fetched before a lab can run?"""
    try:
        no_qemu = qemu.present(asked.qemu) is None and _missing(debs.read_lock(qemu.LOCK))
        return bool(no_qemu or (not _has_image() and _missing(images.current_lock())))
    except EmuError:  # the row of what is broken says so
        return False


def _missing(lock: debs.Lock) -> list[debs.Deb]:
    return [deb for deb in lock.debs if not debs.deb_path(deb).exists()]


def _has_image() -> bool:
    return any(image["current"] for image in images.images())


def _fabric(asked: Asked) -> Answer:
    from net.probe import missing  # LLVM and netlink, which no other check needs

    lacking = missing()
    if lacking:
        return "warn", f"no live fabrics here: {'; '.join(lacking)}", "give it what is named; the rest works without"
    return "ok", "namespaces, SRv6 with next-csid, BPF programs and HTB work", ""


def _load(asked: Asked) -> Answer:
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    found = f"load {load:.2f} on {cores} cores ({hostinfo.cpu_model()})"
    if cores < 2:
        return "warn", found, "one core: guest and card take turns; figures mean little"
    if load > cores:
        return "warn", found, "the host is busy: figures of a run now mean little"
    return "ok", found, ""


def _enough(found: int, fail: int, warn: int, text: str, fix: str) -> Answer:
    if found < fail:
        return "fail", text, fix
    if found < warn:
        return "warn", text, fix
    return "ok", text, ""


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


CHECKS: dict[str, Callable[[Asked], Answer]] = {
    "machine": _machine,
    "Python": _python,
    "Python packages": _packages,
    "QEMU": _qemu,
    "QEMU's device": _device,
    "guest image": _image,
    "KVM": _kvm,
    "sealed memfd": _memfd,
    "io_uring": _io_uring,
    "memory": _memory,
    "shared memory": _shm,
    "cache directory": _cache,
    "output directory": _out,
    "socket directory": _sockets,
    "open files": _files,
    "package mirror": _mirror,
    "fabric": _fabric,
    "host load": _load,
}
