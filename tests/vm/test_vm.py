"""emu.vm and emu.snapshot with a real QEMU and the project's image; the controller is QEMU's own, not ours."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from emu import accel, images, qemu, snapshot
from emu.ledger import Ledger
from emu.process import Identity
from emu.progress import Silent
from emu.vm import Attached, Platform, Vm, VmConfig, VmError

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def platform() -> Platform:
    progress = Silent()
    return Platform(qemu.find(None, progress), accel.choose("auto", progress), images.get(progress))


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    root = Path(tempfile.mkdtemp(prefix="emu-test-", dir="/tmp"))  # short: sockets go there
    try:
        yield Ledger.create("test", root)
    finally:
        shutil.rmtree(root)


@pytest.fixture
def make(platform: Platform, ledger: Ledger, tmp_path: Path) -> Callable[..., Vm]:
    def make(name: str = "vm0", **config: object) -> Vm:
        directory, out = ledger.directory / name, tmp_path / name
        directory.mkdir()
        out.mkdir()
        return Vm(VmConfig(name, **config), platform, directory, out, ledger)  # type: ignore[arg-type]

    return make


@pytest.fixture
def own_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No snapshot is there yet, and none is left behind."""
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "snapshots"


def run(vms: list[Vm], work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        try:
            await work()
        finally:
            for vm in vms:
                await vm.stop()

    asyncio.run(main())
    for vm in vms:
        assert Identity.of(vm.process.pid) is None


async def plug_null(vm: Vm, port: int = 0) -> Attached:
    """QEMU's NVMe controller on a device that is all zeros, 256 MiB."""
    node = {"driver": "null-co", "node-name": f"null{port}", "size": 256 << 20, "read-zeroes": True}
    await vm.qmp.execute("blockdev-add", node)
    device = {"driver": "nvme", "id": f"n{port}", "bus": f"rp{port}", "drive": f"null{port}", "serial": f"s{port}"}
    return await vm.plug(device, port)


async def shell(vm: Vm, command: str) -> str:
    result = await vm.exec(["sh", "-c", command], timeout_s=30)
    assert result.code == 0, result
    return result.stdout.decode().strip()


def test_cold_boot_plug_and_reboot(make: Callable[..., Vm]) -> None:
    vm = make(vcpus=2, memory_mib=384, kernel_args="dpu_emu_test=1")

    async def work() -> None:
        await vm.start()
        info = await vm.guest.info()
        assert info.cpus == 2
        assert 300 << 20 < info.memory_bytes <= 384 << 20
        assert info.command_line.endswith("dpu_emu_test=1")
        assert abs(int(await shell(vm, "date +%s")) - time.time()) < 5

        # the port is told by its slot, so the last one first
        plugged = [await plug_null(vm, port) for port in (7, 0)]
        assert [one.namespaces for one in plugged] == [("nvme0n1",), ("nvme1n1",)]
        for one in plugged:
            path = f"/sys/class/nvme/{one.controller}"
            assert await shell(vm, f"cat {path}/serial") == f"s{one.port}"
            assert await shell(vm, f"cat /sys/block/{one.namespaces[0]}/size") == str((256 << 20) // 512)

        before = await shell(vm, "cat /proc/sys/kernel/random/boot_id")
        await vm.reboot()
        assert await shell(vm, "cat /proc/sys/kernel/random/boot_id") != before
        for one in vm.attached:
            assert await shell(vm, f"cat /sys/class/nvme/{one.controller}/serial") == f"s{one.port}"
        assert [one.port for one in vm.attached] == [7, 0]

    run([vm], work)


def test_two_makers_make_one_template_and_restored_guests_differ(
    make: Callable[..., Vm], own_snapshots: Path
) -> None:
    vms = [make(f"vm{number}", memory_mib=256) for number in range(2)]
    progress = Silent()

    async def work() -> None:
        await asyncio.gather(*(snapshot.start(vm, progress) for vm in vms))
        assert [vm.restored for vm in vms] == [True, True]
        assert progress.notes == []
        assert sum((vm.out / "template").exists() for vm in vms) == 1
        assert [path.name for path in own_snapshots.iterdir() if path.is_dir()] == [
            snapshot.key(vms[0].config, vms[0].platform)
        ]

        now_s = [int(await shell(vm, "date +%s")) for vm in vms]
        assert all(abs(now - time.time()) < 5 for now in now_s)
        # python draws from getrandom(), uuid from the kernel's own use of it
        for source in ("cat /proc/sys/kernel/random/uuid", 'python3 -c "import os; print(os.urandom(16).hex())"'):
            drawn = [await shell(vm, source) for vm in vms]
            assert drawn[0] != drawn[1]
        assert [(await plug_null(vm)).controller for vm in vms] == ["nvme0", "nvme0"]

    run(vms, work)


def test_clock_is_right_after_a_late_restore(make: Callable[..., Vm], own_snapshots: Path) -> None:
    """The template is made to be a day old: its guest's clock is set back before it is saved."""
    vm, later = make("vm0", memory_mib=256), make("vm1", memory_mib=256)
    yesterday_s = int(time.time()) - 86400

    async def work() -> None:
        await vm.start()
        await vm.guest.set_clock(yesterday_s * 10**9)
        assert abs(int(await shell(vm, "date +%s")) - yesterday_s) < 5
        await vm.qmp.execute("stop")
        own_snapshots.mkdir(parents=True)
        await vm.migrate("migrate", own_snapshots / "ram")
        await later.start(restore=own_snapshots / "ram")
        assert abs(int(await shell(later, "date +%s")) - time.time()) < 5

    run([vm, later], work)


def test_a_broken_snapshot_is_removed_said_and_the_vm_boots(make: Callable[..., Vm], own_snapshots: Path) -> None:
    vm = make(memory_mib=256)
    folder = own_snapshots / snapshot.key(vm.config, vm.platform)
    folder.mkdir(parents=True)
    (folder / "ram").write_bytes(b"\0" * 8192)
    (folder / "meta.json").write_text('{"ram_bytes": 8192}')
    progress = Silent()

    async def work() -> None:
        await snapshot.start(vm, progress)
        assert not vm.restored
        assert not folder.exists()
        assert [note.count("booting instead") for note in progress.notes] == [1]

    run([vm], work)


def test_a_panic_ends_the_wait_and_shows_the_console(make: Callable[..., Vm]) -> None:
    vm = make(memory_mib=256)

    async def work() -> None:
        await snapshot.start(vm, Silent())
        with pytest.raises(VmError, match="the guest panicked") as caught:
            await vm.exec(["sh", "-c", "echo c > /proc/sysrq-trigger"], timeout_s=300)
        assert any("sysrq triggered crash" in line for line in caught.value.console)
        assert len(caught.value.console) <= 30

    run([vm], work)


def test_the_end_of_qemu_ends_the_wait(make: Callable[..., Vm]) -> None:
    vm = make(memory_mib=256)

    async def work() -> None:
        await snapshot.start(vm, Silent())
        sleeping = asyncio.ensure_future(vm.exec(["sleep", "1000"], timeout_s=2000))
        await shell(vm, "until pidof sleep; do :; done")
        vm.process.identity.kill()
        with pytest.raises(VmError, match="QEMU ended with signal 9"):
            await sleeping

    run([vm], work)


def test_a_hung_program_is_given_up(make: Callable[..., Vm]) -> None:
    vm = make(memory_mib=256)

    async def work() -> None:
        await snapshot.start(vm, Silent())
        with pytest.raises(VmError, match="has not finished sleep 1000 after"):
            await vm.exec(["sleep", "1000"], timeout_s=1)
        assert await shell(vm, "until ! pidof sleep; do :; done") == ""  # and killed

    run([vm], work)


def test_what_qemu_says_when_it_cannot_start(make: Callable[..., Vm]) -> None:
    vm = make(qemu_args=("-device", "no-such-device"))

    async def work() -> None:
        with pytest.raises(VmError, match=r"QEMU ended with exit code 1(.|\n)*no-such-device"):
            await snapshot.start(vm, Silent())

    run([vm], work)


def test_power_cycle_brings_the_controllers_back(make: Callable[..., Vm]) -> None:
    vm = make(memory_mib=256)

    async def work() -> None:
        await snapshot.start(vm, Silent())
        first = vm.process.pid
        await shell(vm, "touch /tmp/only-in-memory")
        one = await vm.plug({"driver": "nvme", "id": "bare", "bus": "rp3", "serial": "s"}, 3, namespaces=0)
        assert one.namespaces == ()
        await vm.power_cycle()
        assert vm.process.pid != first and not vm.restored
        assert await shell(vm, "ls /tmp") == ""
        assert vm.device("bare").port == 3

    run([vm], work)
