"""Which QEMU is taken, and how the private one is put together; mostly with programs that only talk like QEMU.

The stand-ins are shell scripts in packages of a loopback archive, so fetching, unpacking, wrappers and the smoke
test are the real ones. The last tests ask the real private QEMU, when this machine's cache has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpu.errors import EmuError
from emu import debs, paths, qemu
from emu.progress import Silent
from tests.support import archive as support
from tests.support.archive import Archive, file

GREETING = json.dumps(
    {"QMP": {"version": {"qemu": {"micro": 3, "minor": 1, "major": 11}, "package": "Test 1"}, "capabilities": []}}
)
QEMU = f"""\
#!/bin/sh
case "$*" in
  *"-device vfio-user-pci,help"*) echo "vfio-user-pci options:";;
  *"-machine none"*) echo '{GREETING}'; cat >&2; echo '{{"event": "SHUTDOWN"}}';;
  *) echo "$$ preload=$LD_PRELOAD modules=$QEMU_MODULE_DIR" "$@";;
esac
"""
OLD = "#!/bin/sh\necho \"$1: Device 'vfio-user-pci' not found\" >&2; exit 1\n"
CRASHING = QEMU.replace("cat >&2;", "cat >&2; echo 'cannot start' >&2; exit 1;")
LOADER = """\
#!/bin/sh
while :; do
  case "$1" in
    --inhibit-cache) shift;;
    --library-path|--argv0) shift 2;;
    --list) exit 0;;
    *) exec sh "$@";;
  esac
done
"""


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Archive]:
    """A mirror, an empty cache, and no QEMU on the host."""
    found = Archive()
    with support.serve(found) as url:
        monkeypatch.setenv("DPU_EMU_MIRROR", url)
        monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.delenv("DPU_EMU_QEMU", raising=False)
        monkeypatch.setattr(qemu, "LOCK", tmp_path / "qemu.lock")
        monkeypatch.setenv("PATH", _path_without_qemu(tmp_path))
        yield found


def _path_without_qemu(tmp_path: Path) -> str:
    own = tmp_path / "path"
    own.mkdir()
    for tool in ("sh", "cat"):
        (own / tool).symlink_to(f"/bin/{tool}")
    return str(own)


def _script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def _packages(archive: Archive, program: str = QEMU, version: str = "1") -> debs.Lock:
    programs = [file(f"./usr/bin/{tool}", program.encode(), 0o755) for tool in qemu.TOOLS]
    firmware = file("./usr/share/qemu/pvh.bin", b"rom")
    manual = file("./usr/share/doc/manual", b"long")
    loader = file("./usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", LOADER.encode(), 0o755)
    found = (
        archive.add("qemu", [*programs, firmware, manual], version),
        archive.add("libc6", [loader, file("./usr/lib/x86_64-linux-gnu/gconv/X.so")], version),
    )
    return debs.Lock(("qemu",), ("trixie",), found)


def _prefixes() -> list[Path]:
    return [path for path in paths.cache_dir("qemu").iterdir() if path.name != ".lock"]


# The operator's and the system's


@pytest.mark.parametrize("how", ["option", "environment"])
def test_the_operator_s_own_is_final(
    how: str, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, old = _script(tmp_path / "good", QEMU), _script(tmp_path / "old", OLD)
    _script(tmp_path / "path" / qemu.SYSTEM_EMULATOR, QEMU)

    def find(name: Path) -> qemu.Qemu:
        if how == "option":
            return qemu.find(str(name), Silent())
        monkeypatch.setenv("DPU_EMU_QEMU", str(name))
        return qemu.find(None, Silent())

    found = find(good)
    assert (found.binary, found.source, found.version) == (good, "user", "11.1.3 (Test 1)")
    with pytest.raises(EmuError, match="no device vfio-user-pci"):
        find(old)
    with pytest.raises(EmuError, match="is no program"):
        find(tmp_path / "missing")
    with pytest.raises(EmuError, match="cannot start"):
        find(_script(tmp_path / "crashing", CRASHING))


def test_the_option_goes_before_the_environment(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPU_EMU_QEMU", str(tmp_path / "missing"))
    assert qemu.find(str(_script(tmp_path / "good", QEMU)), Silent()).binary == tmp_path / "good"


def test_the_system_s_is_taken_when_it_has_the_device(archive: Archive, tmp_path: Path) -> None:
    system = _script(tmp_path / "path" / qemu.SYSTEM_EMULATOR, QEMU)
    found = qemu.find(None, Silent())
    assert (found.binary, found.source) == (system, "system")
    _script(tmp_path / "path" / "qemu-img", QEMU)
    assert found.command("qemu-img") == [str(tmp_path / "path" / "qemu-img")]
    with pytest.raises(EmuError, match="qemu-nbd"):
        found.command("qemu-nbd")


def test_a_system_s_without_the_device_is_left_alone(archive: Archive, tmp_path: Path) -> None:
    system = _script(tmp_path / "path" / qemu.SYSTEM_EMULATOR, OLD)
    debs.write_lock(qemu.LOCK, _packages(archive))
    assert qemu.find(None, Silent()).source == "private"
    assert system.read_text() == OLD


# The private one


def test_the_private_one_is_made_once_and_then_found_offline(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    debs.write_lock(qemu.LOCK, _packages(archive))
    assert qemu.present() is None
    found = qemu.find(None, Silent())
    assert (found.source, found.version, found.origin["pinned"]) == ("private", "11.1.3 (Test 1)", True)
    assert {row["package"]: row["sha256"] for row in found.origin["packages"]} == {
        deb.package: deb.sha256 for deb in debs.read_lock(qemu.LOCK).debs
    }
    root = found.binary.parent.parent / "root"
    assert (root / "usr/share/qemu/pvh.bin").read_bytes() == b"rom"
    assert not (root / "usr/share/doc").exists()
    assert not (root / "usr/lib/x86_64-linux-gnu/gconv").exists()
    monkeypatch.setenv("DPU_EMU_MIRROR", "http://127.0.0.1:9")
    assert qemu.find(None, Silent()) == found
    assert _prefixes() == [found.binary.parent.parent]


def test_the_wrappers_exec_and_keep_the_host_s_libraries_out(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    debs.write_lock(qemu.LOCK, _packages(archive))
    found = qemu.find(None, Silent())
    monkeypatch.setenv("LD_PRELOAD", "/nonexistent.so")
    for tool in qemu.TOOLS:
        with subprocess.Popen(
            [*found.command(tool), "a b", "$x"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as run:
            said = run.communicate()[0].strip()
        bin_directory = found.binary.parent
        root = f"{bin_directory}/../root"
        firmware = f"-L {root}/usr/share/qemu -L {root}/usr/share/seabios " if "system" in tool else ""
        assert said == f"{run.pid} preload= modules={root}/modules {firmware}a b $x"
        assert list(Path(root, "modules").iterdir()) == []


def test_a_cache_may_be_moved(archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debs.write_lock(qemu.LOCK, _packages(archive))
    qemu.find(None, Silent())
    (tmp_path / "cache").rename(tmp_path / "with space")
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "with space"))
    found = qemu.present()
    assert found is not None
    assert subprocess.run(found.command("qemu-img"), check=False).returncode == 0


def test_packages_that_do_not_work_leave_nothing(archive: Archive) -> None:
    debs.write_lock(qemu.LOCK, _packages(archive, CRASHING))
    with pytest.raises(EmuError, match="cannot start"):
        qemu.find(None, Silent())
    assert _prefixes() == []


def test_what_a_killed_process_left_is_removed(archive: Archive) -> None:
    left = paths.cache_dir("qemu") / ".new-left"
    (left / "root").mkdir(parents=True)
    debs.write_lock(qemu.LOCK, _packages(archive))
    qemu.find(None, Silent())
    assert not left.exists()


def test_two_at_once_make_it_once(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    debs.write_lock(qemu.LOCK, _packages(archive))
    made, real = [], debs.unpack

    def unpack(deb: debs.Deb, *rest: object, **named: object) -> None:
        made.append(deb.package)
        real(deb, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(debs, "unpack", unpack)
    found: list[qemu.Qemu] = []
    both = [threading.Thread(target=lambda: found.append(qemu.find(None, Silent()))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert found[0] == found[1]
    assert sorted(made) == ["libc6", "qemu"]


def test_packages_that_are_gone_are_replaced_and_that_is_said(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = _packages(archive)
    debs.write_lock(qemu.LOCK, pinned)
    gone = pinned.debs[0]
    del archive.files[f"/debian/{gone.filename}"]
    current = _packages(archive, f"{QEMU}# newer\n", version="2")
    resolved = []
    monkeypatch.setattr(qemu, "make_lock", lambda progress: resolved.append(1) or current)  # type: ignore[func-returns-value]
    first = Silent()
    found = qemu.find(None, first)
    qemu._make_private(Silent())  # as a second process does that waited for the first
    assert len(resolved) == 1
    assert any("has no qemu 1" in note for note in first.notes)
    assert found.to_dict()["pinned"] is False
    assert {row["version"] for row in found.to_dict()["packages"]} == {"2"}
    # the current packages may be those that another version of the lock pins: this one still does not
    debs.write_lock(qemu.LOCK, current)
    assert qemu.find(None, Silent()).origin["pinned"] is True
    debs.write_lock(qemu.LOCK, pinned)
    monkeypatch.setenv("DPU_EMU_MIRROR", "http://127.0.0.1:9")
    second = Silent()
    assert qemu.find(None, second) == found
    assert found.to_dict()["pinned"] is False
    assert any("not the pinned one" in note for note in second.notes)


def test_a_replacement_that_fails_its_test_is_not_taken(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = _packages(archive)
    debs.write_lock(qemu.LOCK, pinned)
    archive.files.clear()
    current = _packages(archive, OLD, version="2")
    monkeypatch.setattr(qemu, "make_lock", lambda progress: current)
    with pytest.raises(EmuError, match="no device"):
        qemu.find(None, Silent())
    assert qemu.present() is None


def test_a_mirror_that_is_down_is_not_a_reason_for_other_packages(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    debs.write_lock(qemu.LOCK, _packages(archive))
    monkeypatch.setenv("DPU_EMU_MIRROR", "http://127.0.0.1:9")
    monkeypatch.setattr(qemu, "make_lock", lambda progress: pytest.fail("asked for other packages"))
    with pytest.raises(EmuError, match="proxy"):
        qemu.find(None, Silent())


# The real one


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> qemu.Qemu:
    monkeypatch.delenv("DPU_EMU_QEMU", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    found = qemu.present()
    monkeypatch.undo()
    if found is None:
        pytest.skip("the private QEMU is not in this machine's cache")
    return found


def test_the_real_one_has_the_device_and_runs_by_itself(private: qemu.Qemu) -> None:
    assert qemu.probe(private.command()) == ("", private.version)
    for tool in ("qemu-img", "qemu-nbd"):
        run = subprocess.run([*private.command(tool), "--version"], capture_output=True, text=True, check=True)
        assert private.version.split()[0] in run.stdout


def test_the_real_one_loads_only_its_own_libraries_and_firmware(private: qemu.Qemu) -> None:
    """By what the kernel says is mapped; a PC with an option ROM makes it load firmware."""
    arguments = ["-machine", "q35", "-accel", "tcg", "-display", "none", "-nodefaults", "-S", "-qmp", "stdio"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*private.command(), *arguments, "-device", "e1000e"], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
    ) as run:
        assert run.stdout and run.stdin
        assert b"QMP" in run.stdout.readline()
        maps = Path(f"/proc/{run.pid}/maps").read_text()
        run.stdin.write(b'{"execute": "qmp_capabilities"}{"execute": "quit"}')
        run.stdin.close()
        run.stdout.read()
    assert run.returncode == 0
    root = os.path.realpath(private.binary.parent.parent)
    mapped = {line.split(None, 5)[5] for line in maps.splitlines() if len(line.split(None, 5)) == 6}
    libraries = {path for path in mapped if ".so" in path}
    assert any(path.endswith("/libc.so.6") for path in libraries)
    assert all(path.startswith(f"{root}/") for path in libraries)


@pytest.mark.online
def test_a_lock_made_now_has_all_that_the_programs_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DPU_EMU_QEMU", raising=False)
    monkeypatch.setattr(qemu, "LOCK", tmp_path / "qemu.lock")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    debs.write_lock(qemu.LOCK, qemu.make_lock(Silent()))
    qemu._make_private(Silent())
    found = qemu._private()
    assert found is not None
    assert qemu.probe(found.command())[0] == ""
