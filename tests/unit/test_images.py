"""images/ and emu/images.py: formats against their specifications, the loader and busybox; builds against builds.

What the guest makes of an image is in tests/vm/test_guest_image.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dpu.errors import EmuError
from emu import debs, images
from emu.progress import Silent
from images import builder, cpio, elf, kernel

# -- cpio


def read_newc(archive: bytes) -> dict[str, dict[str, Any]]:
    """A naive reader of buffer-format.rst, "newc": name -> header fields and data."""
    names = [
        "ino",
        "mode",
        "uid",
        "gid",
        "nlink",
        "mtime",
        "filesize",
        "maj",
        "min",
        "rmaj",
        "rmin",
        "namesize",
        "chksum",
    ]
    files: dict[str, dict[str, Any]] = {}
    position = 0
    while True:
        assert position % 4 == 0
        assert archive[position : position + 6] == b"070701"
        fields: dict[str, Any] = {
            name: int(archive[position + 6 + 8 * i : position + 14 + 8 * i], 16) for i, name in enumerate(names)
        }
        position += 110
        name = archive[position : position + fields["namesize"]]
        assert name.endswith(b"\0")
        position += fields["namesize"]
        position += -position % 4
        fields["data"] = archive[position : position + fields["filesize"]]
        position += fields["filesize"]
        position += -position % 4
        if name == b"TRAILER!!!\0":
            assert not archive[position:].strip(b"\0")
            return files
        files[name[:-1].decode()] = fields


def test_cpio_is_what_the_specification_says() -> None:
    archive = b"".join(
        cpio.write(
            {
                "a/b/file": cpio.regular(b"12345", 0o755),
                "a/link": cpio.symlink("b/file"),
                "dev/console": cpio.character_device(5, 1),
                "empty": cpio.regular(b""),
            }
        )
    )
    files = read_newc(archive)
    assert list(files) == ["a", "a/b", "a/b/file", "a/link", "dev", "dev/console", "empty"]  # parents first
    assert stat.S_ISDIR(files["a/b"]["mode"]) and files["a/b"]["nlink"] == 2
    assert (files["a/b/file"]["mode"], files["a/b/file"]["data"]) == (stat.S_IFREG | 0o755, b"12345")
    assert (files["a/link"]["mode"], files["a/link"]["data"]) == (stat.S_IFLNK | 0o777, b"b/file")
    assert stat.S_ISCHR(files["dev/console"]["mode"])
    assert (files["dev/console"]["rmaj"], files["dev/console"]["rmin"]) == (5, 1)
    for fields in files.values():
        assert (fields["uid"], fields["gid"], fields["mtime"]) == (0, 0, 0)
    assert [fields["ino"] for fields in files.values()] == [1, 2, 3, 4, 5, 6, 7]
    assert len(archive) % 512 == 0


def test_cpio_does_not_depend_on_the_order_of_its_input() -> None:
    entries = {"b": cpio.regular(b"2"), "a/c": cpio.regular(b"1"), "a": cpio.directory(0o700)}
    backwards = dict(reversed(entries.items()))
    assert b"".join(cpio.write(entries)) == b"".join(cpio.write(backwards))
    assert read_newc(b"".join(cpio.write(entries)))["a"]["mode"] == stat.S_IFDIR | 0o700


# -- ELF, against the host's loader


def traced(program: Path) -> list[str]:
    """The libraries that the loader itself would load."""
    done = subprocess.run([program], env={"LD_TRACE_LOADED_OBJECTS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split()[0] for line in done.stdout.splitlines() if "=>" in line]


@pytest.fixture
def program() -> Path:
    """A program of this host that needs libselinux, with versioned and unversioned symbols of it."""
    path = Path("/bin/ls")
    if not elf.is_elf(path.read_bytes()) or "libselinux.so.1" not in traced(path):
        pytest.skip("/bin/ls of this host does not need libselinux")
    return path


def test_needed_and_interpreter_agree_with_the_loader(program: Path) -> None:
    data = program.read_bytes()
    assert set(elf.needed(data)) <= set(traced(program))
    assert elf.needed(data)[0] in traced(program)
    assert Path(elf.interpreter(data)).exists()
    library = Path("/proc/self/maps").read_text().split("/libc.so.6")[0].rpartition(" ")[2] + "/libc.so.6"
    assert elf.needed(Path(library).read_bytes()) == [Path(elf.interpreter(data)).name]


def test_detached_program_runs_without_the_library(program: Path, tmp_path: Path) -> None:
    data = elf.detach(program.read_bytes(), ["libselinux.so.1"])
    changed = tmp_path / "ls"
    changed.write_bytes(data)
    changed.chmod(0o755)
    assert "libselinux.so.1" not in traced(changed)
    assert elf.needed(data) == [n for n in elf.needed(program.read_bytes()) if n != "libselinux.so.1"]
    eager = {"LD_BIND_NOW": "1"}  # every symbol is looked up at the start, as in a program linked "-z now"
    there = [subprocess.run([p, "--version"], capture_output=True, env=eager) for p in (program, changed)]
    assert there[0].returncode == there[1].returncode == 0
    assert there[0].stdout == there[1].stdout


def test_call_into_a_detached_library_is_a_segfault(program: Path, tmp_path: Path) -> None:
    changed = tmp_path / "ls"
    changed.write_bytes(elf.detach(program.read_bytes(), ["libselinux.so.1"]))
    changed.chmod(0o755)
    assert subprocess.run([changed, "-Z", tmp_path], capture_output=True).returncode == -11


def required(data: bytes) -> list[str]:
    """The libraries of the version requirements, walked as the gABI's figure of them shows."""
    table, strings = elf.section(data, ".gnu.version_r"), elf.section(data, ".dynstr")
    dynamic = elf._Dynamic(data)
    at = dynamic.tags[elf.DT_VERNEED] - elf._Dynamic(Path("/bin/ls").read_bytes()).tags[elf.DT_VERNEED]
    names = []
    while True:
        _, _, name, _, following = struct.unpack_from("<HHIII", table, at)
        names.append(strings[name:].split(b"\0")[0].decode())
        if not following:
            assert len(names) == dynamic.tags[elf.DT_VERNEEDNUM]
            return names
        at += following


def test_detach_takes_any_library_out_of_the_version_requirements(program: Path) -> None:
    data = program.read_bytes()
    before = required(data)
    assert len(before) > 1
    for library in before:
        assert required(elf.detach(data, [library])) == [name for name in before if name != library]


def test_detach_refuses_what_is_not_asked_for(program: Path) -> None:
    with pytest.raises(ValueError, match=r"libno\.so"):
        elf.detach(program.read_bytes(), ["libno.so"])
    with pytest.raises(ValueError, match="ELF64"):
        elf.needed(b"#!/bin/sh\n")


# -- kernel and modules


def bzimage(payload: bytes, setup_sectors: int = 3) -> bytes:
    """As boot.rst has it: setup_sects at 0x1f1, "HdrS" at 0x202, payload_offset and _length at 0x248."""
    head = bytearray((setup_sectors + 1) * 512)
    head[0x1F1] = setup_sectors
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 96, len(payload))
    return bytes(head) + bytes(96) + payload + b"behind it"


def test_vmlinux_is_cut_out_of_a_bzimage() -> None:
    vmlinux = elf.MAGIC + os.urandom(5000)
    payload = zstandard.compress(vmlinux) + struct.pack("<I", len(vmlinux))
    assert kernel.vmlinux(bzimage(payload)) == vmlinux


@pytest.mark.parametrize(
    "image",
    [bytes(4096), bzimage(b"\x1f\x8b gzip"), bzimage(zstandard.compress(b"no ELF"))],
    ids=["no bzImage", "gzip", "no ELF inside"],
)
def test_vmlinux_refuses_what_it_cannot_cut(image: bytes) -> None:
    with pytest.raises(EmuError):
        kernel.vmlinux(image)


def module(modinfo: dict[str, str]) -> bytes:
    """The smallest ELF64 with a .modinfo section."""
    text = b"".join(f"{key}={value}".encode() + b"\0" for key, value in modinfo.items())
    names = b"\0.modinfo\0.shstrtab\0"
    head = elf.MAGIC.ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, 64 + len(text) + len(names), 0, 64, 0, 0, 64, 3, 2
    )

    def section(name: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 1, 0)

    sections = section(0, 0, 0) + section(1, 64, len(text)) + section(10, 64 + len(text), len(names))
    return head + text + names + sections


MODULES = {
    "kernel/a/top-one.ko": module({"depends": "middle,base", "alias": "pci:v1*"}),
    "kernel/b/middle.ko": module({"depends": "base", "softdep": "pre: soft post: later"}),
    "kernel/b/base.ko": module({"depends": ""}),
    "kernel/c/soft.ko": module({"depends": "builtin_one"}),
    "kernel/c/later.ko": module({}),
    "kernel/c/other.ko": module({}),
}


def test_modules_bring_what_they_depend_on() -> None:
    chosen = kernel.closure(["top_one"], MODULES, MODULES.__getitem__)
    assert {kernel.module_name(path) for path in chosen} == {"top_one", "middle", "base", "soft"}
    assert all(chosen[path] == MODULES[path] for path in chosen)
    with pytest.raises(EmuError, match="no_such"):
        kernel.closure(["no-such"], MODULES, MODULES.__getitem__)


def test_modprobe_index_lists_what_is_loaded_first_last() -> None:
    index = kernel.modprobe_index(MODULES)
    dep = dict(line.split(":") for line in index["modules.dep"].splitlines())
    assert set(dep) == set(MODULES)
    # depmod(8): "the file is read from right to left"
    order = [kernel.module_name(path) for path in reversed(dep["kernel/a/top-one.ko"].split())]
    assert sorted(order) == ["base", "middle", "soft"]
    assert order.index("base") < order.index("middle") and order.index("soft") < order.index("middle")
    assert dep["kernel/b/base.ko"] == ""
    assert index["modules.alias"] == "alias pci:v1* top_one\n"


# -- recipe and cache


def test_recipe_with_an_unknown_or_missing_key_is_refused(tmp_path: Path) -> None:
    assert "fio" in builder.Recipe.load().packages
    text = builder.RECIPE.read_text()
    wrong = tmp_path / "guest.toml"
    for changed in (text.replace("modules = [", "moduls = [", 1), "nonsense = 1\n" + text):
        wrong.write_text(changed)
        with pytest.raises(EmuError, match=r"guest\.toml"):
            builder.Recipe.load(wrong)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a lock of one package, and a builder that only counts."""
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builder, "LOCK", tmp_path / "guest.lock")
    debs.write_lock(builder.LOCK, lock_of("1"))
    monkeypatch.setattr(debs, "fetch", lambda wanted, progress: [debs.deb_path(deb) for deb in wanted])
    return tmp_path / "cache"


def lock_of(version: str) -> debs.Lock:
    digest = hashlib.sha256(version.encode()).hexdigest()
    deb = debs.Deb("linux-image-x", version, digest, 1, f"pool/{version}.deb")
    return debs.Lock(("linux-image-x",), ("trixie",), (deb,))


class Counting:
    """Stands for builder.build: writes small files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.before = threading.Event()
        self.before.set()
        monkeypatch.setattr(builder, "build", self)

    def __call__(self, recipe: builder.Recipe, locked: tuple[debs.Deb, ...], into: Path) -> list[debs.Deb]:
        self.count += 1
        assert self.before.wait(60)
        for name in (builder.VMLINUX, builder.BZIMAGE, builder.INITRD):
            (into / name).write_text(locked[0].version)
        return sorted(locked)


def test_image_is_built_once_and_listed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Counting(monkeypatch)
    image = images.get(Silent())
    assert image.kernel.read_text() == "1" and image.initrd is not None and image.initrd.is_absolute()
    monkeypatch.setattr(debs, "fetch", lambda *_: pytest.fail("fetched for an image that is there"))
    assert images.get(Silent()) == image
    assert build.count == 1
    (row,) = images.images()
    assert (row["digest"], row["current"], row["kernel"]) == (image.digest, True, "1")
    debs.write_lock(builder.LOCK, lock_of("2"))
    assert [row["current"] for row in images.images()] == [False]


def test_images_longest_not_used_go(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Counting(monkeypatch)
    made = []
    for number in range(images.IMAGES_MAX):
        debs.write_lock(builder.LOCK, lock_of(str(number)))
        made.append(images.get(Silent()).kernel.parent)
        os.utime(made[-1], (number, number))
    debs.write_lock(builder.LOCK, lock_of("0"))
    images.get(Silent())  # a use
    debs.write_lock(builder.LOCK, lock_of("new"))
    made.append(images.get(Silent()).kernel.parent)
    assert [path.exists() for path in made] == [True, False, True, True, True]


def test_digest_covers_lock_and_every_source(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Path] = []
    for source in builder.sources():
        copies.append(tmp_path / f"{len(copies)}-{source.name}")
        shutil.copyfile(source, copies[-1])
    monkeypatch.setattr(builder, "sources", lambda: copies)
    seen = {images._digest(images.current_lock())}
    for copy in copies:
        copy.write_bytes(copy.read_bytes() + b"\n")
        seen.add(images._digest(images.current_lock()))
    debs.write_lock(builder.LOCK, lock_of("2"))
    seen.add(images._digest(images.current_lock()))
    assert len(seen) == len(copies) + 2
    assert {"agent.py", "guest.toml", "builder.py", "rc", "inittab"} <= {p.name.split("-", 1)[1] for p in copies}


def test_two_at_once_build_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Counting(monkeypatch)
    build.before.clear()
    found: list[images.Image] = []
    threads = [threading.Thread(target=lambda: found.append(images.get(Silent()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    build.before.set()
    for thread in threads:
        thread.join(60)
    assert build.count == 1 and found[0] == found[1]


def test_build_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(recipe: builder.Recipe, locked: tuple[debs.Deb, ...], into: Path) -> list[debs.Deb]:
        (into / builder.VMLINUX).write_text("half")
        raise EmuError("no package has x")

    monkeypatch.setattr(builder, "build", broken)
    with pytest.raises(EmuError):
        images.get(Silent())
    assert [path.name for path in (cache / "images").iterdir()] == [".lock"]
    Counting(monkeypatch)
    assert images.get(Silent()).kernel.read_text() == "1"


def test_mirror_that_moved_on_gives_a_lock_of_this_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Counting(monkeypatch)
    fresh = lock_of("2").debs

    def fetch(wanted: tuple[debs.Deb, ...], progress: Silent) -> list[Path]:
        if wanted[0].version == "1":
            raise debs.MirrorLacks(wanted, "http://mirror")
        return []

    monkeypatch.setattr(debs, "fetch", fetch)
    monkeypatch.setattr(debs, "resolve", lambda packages, suites, progress: list(fresh))
    progress = Silent()
    released = builder.LOCK.read_bytes()
    image = images.get(progress)
    assert image.kernel.read_text() == "2"
    assert len(progress.notes) == 1 and "linux-image-x 1" in progress.notes[0]
    assert builder.LOCK.read_bytes() == released
    count = build.count
    assert images.get(progress) == image and build.count == count  # the next time it is just there
    debs.write_lock(builder.LOCK, lock_of("3"))  # the next release tries its own packages first
    assert images.current_lock() == lock_of("3")


def test_custom_image_has_a_digest_of_its_contents(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    digests = {
        images.custom(one).digest,
        images.custom(two).digest,
        images.custom(one, two).digest,
        images.custom(one, append="x").digest,
    }
    assert len(digests) == 4
    assert images.custom(one).initrd is None
    with pytest.raises(EmuError, match="none"):
        images.custom(tmp_path / "none")


def test_kernel_args() -> None:
    image = images.Image(Path("k"), None, "d", append="root=/dev/vda")
    assert image.kernel_args(2_400_000).endswith(" tsc_early_khz=2400000 root=/dev/vda")
    assert "tsc_early_khz" not in image.kernel_args(None)
    assert "init_on_alloc" not in image.kernel_args(None)  # stays as Debian has it: on


# -- the real thing


@pytest.fixture(scope="module")
def locked() -> debs.Lock:
    lock = debs.read_lock(builder.LOCK)
    if not all(debs.deb_path(deb).exists() for deb in lock.debs):
        pytest.skip("the guest's packages are not in the cache: emu images fetch")
    return lock


@contextlib.contextmanager
def surroundings(umask: int, directory: Path, **environment: str) -> Any:
    before, where = os.umask(umask), os.getcwd()
    os.chdir(directory)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            yield
    finally:
        os.umask(before)
        os.chdir(where)


def test_same_packages_give_the_same_bytes(locked: debs.Lock, tmp_path: Path) -> None:
    def digests(directory: Path, packages: list[debs.Deb]) -> dict[str, str]:
        directory.mkdir()
        used = builder.build(builder.Recipe.load(), packages, directory)
        assert used == sorted(locked.debs)  # the lock names what is needed and nothing else
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}

    with surroundings(0o077, tmp_path, TZ="Asia/Tokyo", LC_ALL="C", PYTHONHASHSEED="1"):
        first = digests(tmp_path / "first", list(locked.debs))
    with surroundings(0o002, Path("/"), TZ="UTC", LC_ALL="de_DE.UTF-8", PYTHONOPTIMIZE="2"):
        second = digests(tmp_path / "another: place", list(reversed(locked.debs)))
    assert first == second
    assert set(first) == {"vmlinux", "bzImage", "initrd.cpio"}

    files = read_newc((tmp_path / "first" / "initrd.cpio").read_bytes())
    assert sum(fields["filesize"] for fields in files.values()) <= 60_000_000
    assert all((f["uid"], f["gid"], f["mtime"]) == (0, 0, 0) for f in files.values())
    for path, fields in files.items():
        if path.endswith(".pyc"):  # PEP 552: flags 1 = hash-based, not checked against a source
            assert fields["data"][4:8] == b"\x01\0\0\0", path
            assert str(tmp_path).encode() not in fields["data"], path
        if stat.S_ISLNK(fields["mode"]) and not fields["data"].startswith(b"/proc"):
            assert resolves(path, files), path


def resolves(path: str, files: dict[str, dict[str, Any]]) -> bool:
    """Whether a link leads, through others, to a file of the image."""
    for _ in range(9):
        parts = path.split("/")
        for i in range(1, len(parts) + 1):
            fields = files.get("/".join(parts[:i]))
            if fields is None:
                return False
            if stat.S_ISLNK(fields["mode"]):
                target = os.path.join("/", *parts[: i - 1], fields["data"].decode(), *parts[i:])
                path = os.path.normpath(target).lstrip("/")
                break
        else:
            return True
    return False
