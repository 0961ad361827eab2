"""Every front end of dpud with a real QEMU and Linux: verified I/O, a killed worker, plugging and unplugging."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emu.vm import Vm, VmError
from tests.conformance.test_hotplug import settled
from tests.support.daemon import MIB, Daemon
from tests.vm.test_vm import ledger, make, platform, run, shell

__all__ = ["ledger", "make", "platform"]  # fixtures
pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(1800)]

Make = Callable[..., Vm]
PRIVATE_RAM = ("-object", "memory-backend-ram,id=private,size=512M", "-machine", "memory-backend=private")
FIO = (
    "fio --name=t --filename=/dev/{disk} --direct=1 --ioengine=io_uring --rw=randrw --bs=4k --size=16M --iodepth=8 "
    "--verify=crc32c --verify_fatal=1 --verify_state_save=0 --io_size={io_size} --minimal"
)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dpu-v-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


async def fio(vm: Vm, disk: str, io_size: str = "8M") -> None:
    result = await vm.exec(["sh", "-c", FIO.format(disk=disk, io_size=io_size)], timeout_s=600)
    assert result.code == 0, result


@pytest.mark.parametrize(
    "name, transport, listener, qemu_args",
    [
        ("mapped", {"force_mappable_bar0": True}, {}, ()),
        ("msi", {}, {"disable_msix": True}, ()),
        ("mapped-msi", {"force_mappable_bar0": True}, {"disable_msix": True}, ()),
        ("unshared", {}, {}, PRIVATE_RAM),
        ("unshared-msi", {}, {"disable_msix": True}, PRIVATE_RAM),
    ],
)
def test_verified_io_and_a_killed_worker(
    make: Make,
    directory: Path,
    name: str,
    transport: dict[str, bool],
    listener: dict[str, bool],
    qemu_args: tuple[str, ...],
) -> None:
    vm = make(qemu_args=qemu_args)

    async def work(daemon: Daemon) -> None:
        daemon.rpc("nvmf_create_transport", {"trtype": "VFIOUSER", **transport})
        target = daemon.add_subsystem("nqn.2026-01.io.test:vm", [daemon.add_memory("m", 64 * MIB)], listener=listener)
        await vm.start()
        disk = await vm.attach(Path(target.path))
        kinds = await shell(vm, f"cat /sys/class/nvme/{disk.controller}/device/msi_irqs/*")
        assert set(kinds.split()) == ({"msi"} if listener else {"msix"})
        running = asyncio.create_task(fio(vm, disk.namespaces[0]))
        for _ in range(2):
            await asyncio.sleep(2)
            await asyncio.to_thread(daemon.kill_worker)
        await running
        (controller,) = daemon.rpc("dpu_get_stats")["controllers"]
        assert controller["shadow_doorbells"] == (name == "msi"), "Linux uses what is offered"
        assert sum(queue["errors"] for queue in controller["queues"] if queue["sqid"]) == 0
        assert "timeout" not in await shell(vm, "dmesg | grep nvme || true")

    with Daemon(directory) as daemon:
        run([vm], lambda: work(daemon))


def test_a_controller_with_msix_is_not_unplugged(make: Make, directory: Path) -> None:
    """QEMU would abort."""
    vm = make()

    async def work(daemon: Daemon) -> None:
        daemon.create_transport()
        target = daemon.add_subsystem("nqn.2026-01.io.test:vm", [daemon.add_memory("m", 16 * MIB)])
        await vm.start()
        disk = await vm.attach(Path(target.path))
        with pytest.raises(VmError, match="MSI-X"):
            await vm.detach(disk)
        assert vm.attached == [disk] and await shell(vm, "echo alive") == "alive"

    with Daemon(directory) as daemon:
        run([vm], lambda: work(daemon))


@pytest.mark.parametrize("rounds", [3, 50])
def test_plugging_and_unplugging_under_io(make: Make, directory: Path, rounds: int) -> None:
    """One controller comes and goes, in use until it does, while another one is under verified load."""
    vm = make()

    async def load(disk: str, enough: asyncio.Event) -> None:
        while not enough.is_set():
            await fio(vm, disk, "4M")

    async def work(daemon: Daemon) -> None:
        daemon.create_transport()
        msi = {"disable_msix": True}
        busy, plugged = (
            Path(
                daemon.add_subsystem(
                    f"nqn.2026-01.io.test:{name}", [daemon.add_memory(name, 32 * MIB)], listener=msi
                ).path
            )
            for name in ("busy", "plugged")
        )
        await vm.start()
        disk = (await vm.attach(busy)).namespaces[0]
        enough = asyncio.Event()
        running = asyncio.create_task(load(disk, enough))
        before = (0, 0, 0)
        worker = daemon.worker_pid()
        for turn in range(rounds):
            one = await vm.attach(plugged, "plugged")
            await fio(vm, one.namespaces[0], "1M")
            reading = f"dd if=/dev/{one.namespaces[0]} of=/dev/null bs=4k iflag=direct 2>/dev/null & echo"
            await shell(vm, reading)
            await vm.detach(one)
            if turn == 0:
                before = await asyncio.to_thread(settled, daemon, 1)
            assert not running.done(), running
        await asyncio.to_thread(settled, daemon, 1, before)
        assert daemon.worker_pid() == worker
        enough.set()
        await running
        assert await shell(vm, "ls /sys/class/nvme | wc -l") == "1"

    with Daemon(directory) as daemon:
        run([vm], lambda: work(daemon))
