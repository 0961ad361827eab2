"""emu.lab whole: a real QEMU, our daemon, and every way in which a lab ends.

Labs that are killed run in another Python; they have a runtime directory of their own, so what is left can be seen.
"""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpu.errors import EmuError
from emu import paths
from emu.lab import ControllerConfig, DpuConfig, Lab, LabConfig, NamespaceConfig, VmConfig, prepare
from emu.ledger import clean
from emu.process import Identity
from emu.progress import Silent
from emu.vm import Platform, Vm

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1200)]

MIB = 1 << 20
CARD = DpuConfig(
    "card",
    (
        ControllerConfig("a", (NamespaceConfig("memory", 64 * MIB),)),
        ControllerConfig("b", (NamespaceConfig("file", 64 * MIB, 4096), NamespaceConfig("memory", 32 * MIB))),
    ),
)

PROGRAM = """
import asyncio, sys
from pathlib import Path
from emu.lab import *
from emu.progress import Silent

async def main():
    card = DpuConfig("card", (ControllerConfig("a", (NamespaceConfig("file", 1 << 26),)),))
    vm = VmConfig("vm0", memory_mib=256, dpus=(("card", "a"),))
    config = LabConfig(sys.argv[1], vms=(vm,), dpus=(card,), out=Path(sys.argv[2]))
    progress = Silent()
    async with Lab(config, prepare(config, progress), progress) as lab:
        print(lab.vms["vm0"].process.pid, lab.dpus["card"].pid, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def platform() -> Platform:
    return prepare(LabConfig(), Silent())


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which labs have their books and sockets."""
    base = Path(tempfile.mkdtemp(prefix="emu-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    yield paths.runtime_dir("labs")
    shutil.rmtree(base)


NAMES = ("whole", "eight", "killed", "living", "signalled", "fails", "inside")


def files_of_labs() -> set[Path]:
    """Of the labs of this module: other modules may have some at the same time."""
    return {path for path in paths.cache_dir("files").iterdir() if path.name.startswith(NAMES)}


def start_program(name: str, out: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A lab in another Python, up; the pids of its QEMU, of its keeper and of that one's workers."""
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, name, str(out)], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) == 2, "the lab did not start"
    return program, pids + children(pids[1])


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return found


def await_end(pids: list[int]) -> None:
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([fd], [], [], 60)[0], f"{pid} still runs"
        os.close(fd)


def test_a_lab_from_start_to_end(platform: Platform, runtime: Path, tmp_path: Path) -> None:
    """Two VMs on one daemon, three controllers; data goes through each, and nothing is left."""
    vms = (
        VmConfig("vm0", memory_mib=256, dpus=(("card", "b"), ("card", "a"))),
        VmConfig("vm1", memory_mib=256, dpus=(("other", "x"),)),
    )
    other = DpuConfig("other", (ControllerConfig("x", (NamespaceConfig("null", 1 << 30, 4096),), serial="XYZ"),))
    config = LabConfig("whole", vms=vms, dpus=(CARD, other), out=tmp_path / "out")
    progress = Silent()
    before = files_of_labs()

    async def main() -> list[int]:
        async with Lab(config, platform, progress) as lab:
            vm = lab.vms["vm0"]
            assert [one.id for one in vm.attached] == ["card.b", "card.a"]
            devices = (*vm.device("card.b").namespaces, *vm.device("card.a").namespaces)
            assert (set(devices[:2]), devices[2]) == ({"nvme0n1", "nvme0n2"}, "nvme1n1")
            sizes = await vm.guest.run("cat " + " ".join(f"/sys/block/{device}/size" for device in devices))
            assert [int(size) * 512 for size in sizes.split()] == [64 * MIB, 32 * MIB, 64 * MIB]
            for device in devices:
                # a pattern of the device's own name, written past the page cache and read back likewise
                await vm.guest.run(
                    f"yes {device} | head -c 1048576 > /tmp/in && dd if=/tmp/in of=/dev/{device} bs=64k oflag=direct"
                    f" && dd if=/dev/{device} of=/tmp/out bs=64k count=16 iflag=direct && cmp /tmp/in /tmp/out",
                    timeout_s=120,
                )
            own = next(iter(files_of_labs() - before)) / "card.b.1.raw"
            assert own.read_bytes()[:16] == f"{devices[0]}\n{devices[0]}\n".encode()
            serial = await lab.vms["vm1"].guest.run("cat /sys/class/nvme/nvme0/serial")
            assert serial.strip() == "XYZ"
            with pytest.raises(EmuError, match=r"no controller card\.a"):
                lab.vms["vm1"].device("card.a")
            assert lab.dpus["card"].restarts_ms() == []
            return [*(vm.process.pid for vm in lab.vms.values()), *(dpu.pid for dpu in lab.dpus.values())]

    pids = asyncio.run(main())
    assert [Identity.of(pid) for pid in pids] == [None] * 4
    assert list(runtime.iterdir()) == []
    assert files_of_labs() == before
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    logs = {f"{vm}/{log}" for vm in ("vm0", "vm1") for log in ("console.log", "qemu.log", "qemu.txt", "dmesg.txt")}
    assert logs | {"card/dpud.log", "other/dpud.log"} <= written
    assert b"nvme" in (tmp_path / "out" / "vm0" / "dmesg.txt").read_bytes()


def eight_controllers() -> LabConfig:
    controllers = tuple(ControllerConfig(f"c{n}", (NamespaceConfig("memory", 16 * MIB),)) for n in range(8))
    vm = VmConfig("vm0", memory_mib=384, dpus=tuple(("card", one.name) for one in controllers))
    return LabConfig("eight", vms=(vm,), dpus=(DpuConfig("card", controllers),))


async def write_names(vm: Vm) -> None:
    """Into the first block of each device, the name of its controller."""
    for one in vm.attached:
        await vm.guest.run(f"yes {one.id} | head -c 4096 | dd of=/dev/{one.namespaces[0]} bs=4096 oflag=direct")


async def check_names(vm: Vm) -> None:
    for one in vm.attached:
        command = f"dd if=/dev/{one.namespaces[0]} bs=4096 count=1 iflag=direct | head -1"
        assert await vm.guest.run(command) == f"{one.id}\n"


def test_eight_controllers_survive_a_reboot_and_a_killed_qemu(platform: Platform, runtime: Path) -> None:
    """The new QEMU connects to the same sockets; the data is where it was."""

    async def main() -> None:
        async with Lab(eight_controllers(), platform, Silent()) as lab:
            vm = lab.vms["vm0"]
            assert [one.controller for one in vm.attached] == [f"nvme{n}" for n in range(8)]
            await write_names(vm)
            await vm.reboot()
            assert {one.controller for one in vm.attached} == {f"nvme{n}" for n in range(8)}
            await check_names(vm)
            await vm.power_cycle()
            await check_names(vm)
            assert lab.dpus["card"].restarts_ms() == []

    asyncio.run(main())


@pytest.mark.slow
def test_ten_reboots(platform: Platform, runtime: Path) -> None:
    async def main() -> None:
        async with Lab(eight_controllers(), platform, Silent()) as lab:
            vm = lab.vms["vm0"]
            await write_names(vm)
            for _ in range(10):
                await vm.reboot()
                await check_names(vm)
            assert lab.dpus["card"].restarts_ms() == []

    asyncio.run(main())


def test_kill_9_leaves_what_clean_removes(runtime: Path, tmp_path: Path) -> None:
    before = files_of_labs()
    program, pids = start_program("killed", tmp_path / "one")
    living, living_pids = start_program("living", tmp_path / "two")
    try:
        (killed_book,) = runtime.glob("killed-*.jsonl")
        (living_book,) = runtime.glob("living-*.jsonl")
        assert len(files_of_labs() - before) == 2
        assert clean() == []  # both live

        program.kill()
        program.wait()
        await_end(pids)  # without our help
        found = clean()
        assert {one.lab for one in found} == {killed_book.stem}
        assert str(killed_book.with_suffix("")) in {one.what for one in found}
        assert sorted(path.name for path in runtime.iterdir()) == [living_book.stem, living_book.name]
        assert len(files_of_labs() - before) == 1
        assert all(Identity.of(pid) is not None for pid in living_pids)
    finally:
        living.terminate()
        assert living.wait(60) == 128 + signal.SIGTERM
    await_end(living_pids)
    assert list(runtime.iterdir()) == []
    assert files_of_labs() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_lab_in_order(runtime: Path, tmp_path: Path, number: signal.Signals) -> None:
    program, pids = start_program("signalled", tmp_path / "out")
    program.send_signal(number)
    # asyncio.run ends an interrupted program with KeyboardInterrupt, which Python ends with the signal itself
    assert program.wait(60) == {signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT}[number]
    assert [Identity.of(pid) for pid in pids] == [None] * len(pids)
    assert list(runtime.iterdir()) == []
    assert (tmp_path / "out" / "vm0" / "dmesg.txt").exists()


def test_a_lab_that_fails_to_start_leaves_nothing(platform: Platform, runtime: Path, tmp_path: Path) -> None:
    missing = NamespaceConfig("file", MIB, path=tmp_path / "no" / "disk")
    card = DpuConfig("card", (ControllerConfig("a", (missing,)),))
    config = LabConfig("fails", vms=(VmConfig("vm0", memory_mib=256, dpus=(("card", "a"),)),), dpus=(card,))
    before = files_of_labs()

    async def main() -> None:
        with pytest.raises(EmuError, match=r"cannot make .*/no/disk"):
            async with Lab(config, platform, Silent()):
                raise AssertionError("it started")

    asyncio.run(main())
    assert list(runtime.iterdir()) == []
    assert files_of_labs() == before


def test_an_error_inside_is_passed_on_and_dmesg_kept(platform: Platform, runtime: Path, tmp_path: Path) -> None:
    config = LabConfig("inside", vms=(VmConfig("vm0", memory_mib=256),), out=tmp_path / "out", keep=True)

    async def main() -> None:
        async with Lab(config, platform, Silent()):
            raise EmuError("a workload failed")

    with pytest.raises(EmuError, match="a workload failed"):
        asyncio.run(main())
    assert (tmp_path / "out" / "vm0" / "dmesg.txt").stat().st_size > 1000
    (book,) = runtime.glob("*.jsonl")
    assert clean() == [] and book.with_suffix("").is_dir()
    assert {one.lab for one in clean(kept=True)} == {book.stem}
    assert list(runtime.iterdir()) == []
