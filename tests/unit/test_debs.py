"""Packages from a small archive on the loopback interface; dpkg-deb is the second opinion on the format."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpu.errors import EmuError
from emu import debs, paths
from emu.debs import Deb
from emu.progress import Silent
from tests.support import archive as support
from tests.support.archive import Archive, file, special


class Counted(Silent):
    """Remembers totals and what was counted towards them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.done = 0

    def step(self, text: str, total: int | None = None) -> None:
        self.total += total or 0

    def advance(self, count: int) -> None:
        self.done += count


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Archive]:
    """An empty archive that is the mirror, and an empty cache."""
    found = Archive()
    with support.serve(found) as url:
        monkeypatch.setenv("DPU_EMU_MIRROR", url)
        monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield found


@pytest.fixture(params=["apt", "urllib"])
def downloader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "urllib":
        monkeypatch.setattr(debs, "APT_HELPER", Path("/nonexistent/apt-helper"))
    elif not debs.APT_HELPER.exists():
        pytest.skip("no apt on this host")
    return str(request.param)


def _in_cache() -> list[str]:
    return sorted(path.name for path in paths.cache_dir("debs").iterdir() if path.name != ".lock")


# Fetching


def test_fetch_brings_exactly_the_bytes_and_counts_them(archive: Archive, downloader: str) -> None:
    wanted = [archive.add(f"p{n}", [file("./usr/x", bytes([n]) * 1000)], "1:2+b1~bpo") for n in range(3)]
    progress = Counted()
    found = debs.fetch([*wanted, wanted[0]], progress)
    assert [path.read_bytes() for path in found[:3]] == list(archive.files.values())
    assert found[3] == found[0]
    assert progress.total == progress.done == sum(deb.size for deb in wanted)
    assert _in_cache() == sorted(f"{deb.sha256}.deb" for deb in wanted)


def test_what_is_in_the_cache_needs_no_network(
    archive: Archive, downloader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deb = archive.add("p", [file("./x")])
    debs.fetch([deb], Silent())
    asked = archive.asked.total()
    monkeypatch.setenv("DPU_EMU_MIRROR", "http://127.0.0.1:9")
    assert debs.fetch([deb], Silent())[0].exists()
    assert archive.asked.total() == asked


def test_a_wrong_digest_is_refused_and_the_right_ones_kept(archive: Archive, downloader: str) -> None:
    good, bad = archive.add("good", [file("./x", b"1")]), archive.add("bad", [file("./x", b"2")])
    path = f"/debian/{bad.filename}"
    archive.files[path] = archive.files[path][:-1] + b"!"
    with pytest.raises(EmuError, match="bad_1"):
        debs.fetch([bad, good], Silent())
    assert _in_cache() == [f"{good.sha256}.deb"]


def test_a_truncated_download_is_refused_and_cleaned(archive: Archive, downloader: str) -> None:
    deb = archive.add("p", [file("./x", os.urandom(100_000))])
    archive.cut.add(f"/debian/{deb.filename}")
    with pytest.raises(EmuError, match="p_1"):
        debs.fetch([deb], Silent())
    assert _in_cache() == []
    archive.cut.clear()
    assert debs.fetch([deb], Silent())[0].stat().st_size == deb.size


def test_a_package_that_the_mirror_lacks_has_its_own_error(archive: Archive, downloader: str) -> None:
    here = archive.add("here", [file("./x")])
    gone = dataclasses.replace(here, package="gone", sha256="0" * 64, filename="pool/main/gone_1.0-1_all.deb")
    with pytest.raises(debs.MirrorLacks, match=r"gone 1\.0-1.*DPU_EMU_MIRROR") as caught:
        debs.fetch([gone, here], Silent())
    assert caught.value.debs == (gone,)
    assert debs.deb_path(here).exists()


def test_a_mirror_that_does_not_answer_is_not_taken_for_one_that_lacks_it(
    archive: Archive, downloader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deb = archive.add("p", [file("./x")])
    monkeypatch.setenv("DPU_EMU_MIRROR", "http://127.0.0.1:9/debian")
    with pytest.raises(EmuError, match="proxy") as caught:
        debs.fetch([deb], Silent())
    assert not isinstance(caught.value, debs.MirrorLacks)
    assert debs.try_mirror("trixie")


def test_a_mirror_may_be_a_directory(
    archive: Archive, downloader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deb = archive.add("p", [file("./x")])
    mirror = tmp_path / "mirror"
    (mirror / deb.filename).parent.mkdir(parents=True)
    (mirror / deb.filename).write_bytes(archive.files[f"/debian/{deb.filename}"])
    monkeypatch.setenv("DPU_EMU_MIRROR", f"file://{mirror}/")
    debs.fetch([deb], Silent())
    assert not debs.deb_path(deb).is_symlink()
    assert debs.deb_path(deb).stat().st_size == deb.size
    gone = dataclasses.replace(deb, sha256="0" * 64, filename="pool/main/gone.deb")
    with pytest.raises(debs.MirrorLacks):
        debs.fetch([gone], Silent())


def test_try_mirror_asks_for_the_release_file(archive: Archive, downloader: str) -> None:
    archive.files["/debian/dists/trixie/InRelease"] = b"anything"
    assert debs.try_mirror("trixie") == ""
    assert "404" in debs.try_mirror("nosuch")


def test_two_processes_fetch_once(archive: Archive) -> None:
    deb = archive.add("p", [file("./x", b"1")])
    archive.go.clear()
    program = (
        "import sys; from emu import debs; from emu.progress import Silent\n"
        "deb = debs.Deb(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5])\n"
        "print('begins', flush=True); print(debs.fetch([deb], Silent())[0])"
    )
    command = [sys.executable, "-c", program, *map(str, dataclasses.astuple(deb))]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        assert process.stdout and process.stdout.readline() == "begins\n"
    archive.go.set()
    said = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert said == {str(debs.deb_path(deb))}
    assert archive.asked[f"/debian/{deb.filename}"] == 1


# Unpacking


def test_unpack_agrees_with_dpkg_deb(tmp_path: Path, archive: Archive) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb on this host")
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        "Package: p\nVersion: 1\nArchitecture: all\nMaintainer: n <n@example.org>\nDescription: t\n"
    )
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/empty").mkdir()
    long = "n" * 120
    (tree / "usr/bin" / long).write_bytes(os.urandom(5000))
    (tree / "usr/bin/tool").write_bytes(b"#!/bin/sh\n")
    (tree / "usr/bin/tool").chmod(0o755)
    (tree / "usr/bin/hard").hardlink_to(tree / "usr/bin/tool")
    (tree / "usr/bin/soft").symlink_to("../bin/tool")
    for compression in ("xz", "zstd", "none"):
        packed = tmp_path / f"{compression}.deb"
        built = subprocess.run(
            ["dpkg-deb", "--root-owner-group", f"-Z{compression}", "-b", tree, packed], capture_output=True
        )
        if built.returncode:
            assert compression == "zstd", built.stderr  # Debian 11's cannot
            continue
        deb = _cached(packed.read_bytes())
        expected, ours = tmp_path / f"{compression}-1", tmp_path / f"{compression}-2"
        subprocess.run(["dpkg-deb", "-x", packed, expected], check=True)
        debs.unpack(deb, ours)
        assert _listing(ours) == _listing(expected)
        assert (ours / "usr/bin/hard").samefile(ours / "usr/bin/tool")


def _listing(root: Path) -> dict[str, tuple[int, bytes]]:
    found = {}
    for path in sorted(root.rglob("*")):
        body = os.readlink(path).encode() if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
        found[str(path.relative_to(root))] = (path.lstat().st_mode, body)
    return found


def _cached(body: bytes) -> Deb:
    """Put a package into the cache past all checks."""
    deb = Deb("p", "1", hashlib.sha256(body).hexdigest(), len(body), "pool/p.deb")
    debs.deb_path(deb).write_bytes(body)
    return deb


ESCAPES = {
    "dot-dot": [file("./usr/../../evil", b"x")],
    "absolute": [file("/tmp/evil", b"x")],
    "link to the parent": [special("./usr/l", tarfile.SYMTYPE, "../../evil")],
    "hard link to the parent": [special("./l", tarfile.LNKTYPE, "../evil")],
    "hard link, absolute": [special("./l", tarfile.LNKTYPE, "/etc/passwd")],
    # each link stays inside word by word; followed, the second does not
    "links that add up": [
        special("./d/e/up", tarfile.SYMTYPE, "../.."),
        special("./out", tarfile.SYMTYPE, "d/e/up/.."),
        file("./out/evil", b"x"),
    ],
    "device": [special("./null", tarfile.CHRTYPE)],
    "pipe": [special("./pipe", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_member_that_leads_out_is_refused(name: str, archive: Archive, tmp_path: Path) -> None:
    deb = archive.add("p", ESCAPES[name])
    debs.fetch([deb], Silent())
    with pytest.raises(EmuError, match="not unpacked"):
        debs.unpack(deb, tmp_path / "a" / "root")
    assert not list(tmp_path.rglob("evil"))


def test_nothing_is_written_through_a_link_that_was_there_before(archive: Archive, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "file").write_bytes(b"untouched")
    (root / "dir").symlink_to(outside)
    (root / "file").symlink_to(outside / "file")
    hard_link = special("./l", tarfile.LNKTYPE, "dir/file")
    for members in ([file("./dir/evil")], [special("./dir", tarfile.DIRTYPE)], [hard_link]):
        deb = archive.add("p", members)
        debs.fetch([deb], Silent())
        with pytest.raises(EmuError, match="leads out"):
            debs.unpack(deb, root)
    deb = archive.add("p", [file("./file", b"new")])
    debs.fetch([deb], Silent())
    debs.unpack(deb, root)  # replaces the link itself
    assert (outside / "file").read_bytes() == b"untouched"
    assert (root / "file").read_bytes() == b"new"
    assert sorted(path.name for path in outside.iterdir()) == ["file"]


def test_an_absolute_link_means_the_package_s_root(archive: Archive, tmp_path: Path) -> None:
    deb = archive.add(
        "p",
        [
            file("./etc/target", b"ours"),
            special("./usr/share/l", tarfile.SYMTYPE, "/etc/target"),
            special("./usr/root", tarfile.SYMTYPE, "/"),
        ],
    )
    debs.fetch([deb], Silent())
    debs.unpack(deb, tmp_path / "root")
    assert (tmp_path / "root/usr/share/l").read_bytes() == b"ours"
    assert (tmp_path / "root/usr/root").resolve() == (tmp_path / "root").resolve()


def test_set_id_bits_are_dropped_and_excluded_members_left_out(archive: Archive, tmp_path: Path) -> None:
    deb = archive.add("p", [file("./bin/su", b"x", 0o4755), file("./doc/a")])
    debs.fetch([deb], Silent())
    debs.unpack(deb, tmp_path / "root", exclude=lambda name: name.startswith("doc"))
    assert (tmp_path / "root/bin/su").stat().st_mode & 0o7777 == 0o755
    assert not (tmp_path / "root/doc").exists()


@pytest.mark.parametrize("keep", [4, 60, 200, -40])
def test_a_damaged_package_is_an_error_of_one_line(keep: int, archive: Archive, tmp_path: Path) -> None:
    body = support.deb_bytes([file("./x", os.urandom(3000))])
    deb = _cached(body[:keep])
    with pytest.raises(EmuError, match="cannot read the package p"):
        debs.unpack(deb, tmp_path / "root")


@pytest.mark.parametrize("name", ["dot-dot", "absolute", "hard link to the parent", "hard link, absolute"])
def test_members_refuses_names_that_lead_out(name: str, archive: Archive) -> None:
    deb = archive.add("p", ESCAPES[name])
    debs.fetch([deb], Silent())
    with pytest.raises(EmuError, match="leads out of the package"):
        list(debs.members(deb))


def test_members_gives_names_without_the_dot(archive: Archive) -> None:
    deb = archive.add("p", [special("./", tarfile.DIRTYPE), file("./usr/x", b"1"), file("y", b"2")])
    debs.fetch([deb], Silent())
    assert [(info.name, body) for info, body in debs.members(deb)] == [("usr/x", b"1"), ("y", b"2")]


# Locks and mirrors


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = Deb("b", "1:1", "b" * 64, 2, "pool/b.deb")
    two = Deb("a", "2", "a" * 64, 1, "pool/a.deb")
    debs.write_lock(tmp_path / "x.lock", debs.Lock(("b",), ("trixie",), (one, two)))
    assert debs.read_lock(tmp_path / "x.lock") == debs.Lock(("b",), ("trixie",), (two, one))


def test_the_digest_follows_the_contents_not_the_order() -> None:
    one, two = Deb("b", "1", "b" * 64, 2, "pool/b.deb"), Deb("a", "2", "a" * 64, 1, "pool/a.deb")
    assert debs.digest([one, two]) == debs.digest([two, one])
    assert debs.digest([one]) != debs.digest([one, two])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"packages": [], "suites": []}',
        '{"packages": [], "suites": [], "debs": [{"package": "p"}]}',
        '{"packages": [], "suites": [], "debs": [{"package": "p", "version": "1", "sha256": "/../x", '
        '"size": 1, "filename": "pool/x"}]}',
    ],
)
def test_a_broken_lock_is_an_error_of_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.lock").write_text(text)
    with pytest.raises(EmuError):
        debs.read_lock(tmp_path / "x.lock")


DEB822 = """\
# comment
Types: deb deb-src
URIs: http://one.example.org/debian/
Suites: bookworm-updates
# URIs: http://commented.example.org/debian
 bookworm
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 x
"""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("debian.sources", DEB822, "http://one.example.org/debian"),
        ("x.sources", DEB822.replace("deb deb-src", "deb-src"), None),
        ("x.sources", f"Enabled: no\n{DEB822}", None),
        ("x.sources", DEB822.replace("main contrib", "stable"), None),
        (
            "x.sources",
            f"Types: deb\nURIs: http://other.example.org/\nSuites: ./\n\n{DEB822}",
            "http://one.example.org/debian",
        ),
        ("x.sources.disabled", DEB822, None),
        (
            "x.list",
            "deb [arch=amd64 signed-by=/x] http://two.example.org/debian trixie main # why",
            "http://two.example.org/debian",
        ),
        (
            "x.list",
            "#deb http://off.example.org/debian trixie main\n"
            "deb http://tool.example.org/apt trixie-tool main\n"
            "deb http://sec.example.org/debian-security trixie-security main\n",
            None,
        ),
    ],
)
def test_the_mirror_is_the_one_that_apt_uses(
    name: str, text: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DPU_EMU_MIRROR", raising=False)
    monkeypatch.setattr(debs, "APT_SOURCES", tmp_path)
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / name).write_text(text)
    if expected is None:
        with pytest.raises(EmuError, match="DPU_EMU_MIRROR"):
            debs.mirror()
    else:
        assert debs.mirror() == expected


def test_a_mirror_that_is_no_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPU_EMU_MIRROR", "deb.example.org")
    with pytest.raises(EmuError, match="URL"):
        debs.mirror()


@pytest.mark.online
def test_resolve_finds_a_package_with_all_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path))
    found = debs.resolve(["hello"], ["trixie"], Silent())
    assert {"hello", "libc6", "libgcc-s1"} <= {deb.package for deb in found}
    hello = next(deb for deb in found if deb.package == "hello")
    (path,) = debs.fetch([hello], Silent())
    said = subprocess.run(["dpkg-deb", "-f", path, "Version"], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == hello.version
    with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(["dpkg-deb", "--fsys-tarfile", path]))) as tar:
        theirs = [name.removeprefix("./") for name in tar.getnames() if name not in (".", "./")]
    assert [info.name for info, _ in debs.members(hello)] == theirs
