"""Every front end of dpud with a real QEMU and Linux: chosen by a scenario, killed workers, plug and unplug."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emu.run import workload
from emu.vm import Vm, VmError
from tests.conformance.test_hotplug import settled
from tests.support.daemon import MIB, Daemon
from tests.support.front_ends import ALL, MAPPED, MSI, UNSHARED, FrontEnd
from tests.vm.test_vm import ledger, make, platform, run, shell

__all__ = ["ledger", "make", "platform"]  # fixtures
pytestmark = [pytest.mark.vm, pytest.mark.timeout(1800)]

Make = Callable[..., Vm]
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


UNSEALED = ("-object", "memory-backend-memfd,id=own,size=256M,share=on,seal=off", "-machine", "memory-backend=own")


def table(name: str, **keys: Any) -> str:
    """A table of a scenario; JSON's values are TOML's."""
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), ""])


async def test_a_scenario_chooses(lab: Any) -> None:
    """Each row by its keys, and memory without seals: the guest sees it, the card says it, data pass."""
    rows = {one.name: one for one in (*ALL, FrontEnd("unsealed", listener={"allow_unsealed_memory": True}))}
    own: dict[str, Any] = {"unsealed": {"qemu_args": UNSEALED}}
    chosen = await lab(
        "".join(
            table(f"vm.{name}", memory="256M", nvme=[f"{name}-card.disk"], **one.vm, **own.get(name, {}))
            + table(f"dpu.{name}-card", **one.transport)
            + table(f"dpu.{name}-card.nvme.disk", namespaces=[], **one.listener).replace("[]", "[{ size = '32M' }]")
            for name, one in rows.items()
        )
    )
    for name, one in rows.items():
        vm, dpu, disk = chosen.vms[name], chosen.dpus[f"{name}-card"], f"{name}-card.disk"
        kinds = await shell(vm, f"cat /sys/class/nvme/{vm.device(disk).controller}/device/msi_irqs/*")
        assert set(kinds.split()) == ({"msi"} if one is MSI else {"msix"}), name
        result = await workload(chosen, "verify", device=disk, size="1M", depths=[8], jobs=1, block_sizes=["4k"])
        assert result.ok, result.error
        (controller,) = (await dpu.rpc("dpu_get_stats"))["controllers"]
        assert controller["shadow_doorbells"] == one.shadow, name
        assert controller["mapped_doorbells"] == (one is MAPPED), name
        assert controller["shared_memory"] == (one is not UNSHARED), name
    await chosen.vms["msi"].detach(chosen.vms["msi"].device("msi-card.disk"))


def both(name: str, one: FrontEnd) -> FrontEnd:
    return replace(one, name=name, listener=MSI.listener)


@pytest.mark.slow
@pytest.mark.parametrize(
    "front_end",
    [MAPPED, MSI, UNSHARED, both("mapped-msi", MAPPED), both("unshared-msi", UNSHARED)],
    ids=lambda one: one.name,
)
def test_verified_io_and_a_killed_worker(make: Make, directory: Path, front_end: FrontEnd) -> None:
    vm = make(**front_end.vm)

    async def work(daemon: Daemon) -> None:
        daemon.rpc("nvmf_create_transport", {"trtype": "VFIOUSER", **front_end.transport})
        memory = [daemon.add_memory("m", 64 * MIB)]
        target = daemon.add_subsystem("nqn.2026-01.io.test:vm", memory, listener=front_end.listener)
        await vm.start()
        disk = await vm.attach(Path(target.path))
        kinds = await shell(vm, f"cat /sys/class/nvme/{disk.controller}/device/msi_irqs/*")
        assert set(kinds.split()) == ({"msi"} if front_end.listener else {"msix"})
        running = asyncio.create_task(fio(vm, disk.namespaces[0]))
        for _ in range(2):
            await asyncio.sleep(2)
            await asyncio.to_thread(daemon.kill_worker)
        await running
        (controller,) = daemon.rpc("dpu_get_stats")["controllers"]
        assert controller["shadow_doorbells"] == front_end.shadow, "Linux uses what is offered"
        assert sum(queue["errors"] for queue in controller["queues"] if queue["sqid"]) == 0
        assert "timeout" not in await shell(vm, "dmesg | grep nvme || true")

    with Daemon(directory) as daemon:
        run([vm], lambda: work(daemon))


@pytest.mark.slow
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


@pytest.mark.slow
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
