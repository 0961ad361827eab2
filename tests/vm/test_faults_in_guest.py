"""Faults as a stock Linux guest meets them: its kernel log, the error log, the SMART log, a hold that ends."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.vm.conftest import Stage, block_device, kernel_log, shell, shell_json

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

SCENARIO = """
[vm.guest]
memory = "512M"
nvme = ["card.disk"]

[dpu.card.nvme.disk]
namespaces = [{ size = "64M" }]
"""
READ = "dd if={} of=/dev/null bs=4k count=1 skip={} iflag=direct 2>&1 || echo failed"


async def test_a_bad_block(stage: Stage) -> None:
    device = await block_device(stage.vm, "card.disk")
    await stage.dpu.rpc(
        "dpu_fault_add",
        name="bad",
        bdev_name="disk.1",
        action="status",
        io_types=["read"],
        lba=800,
        num_blocks=1,
        sct=2,
        sc=0x81,
        dnr=True,
    )
    assert "failed" in await shell(stage.vm, READ.format(device.path, 100))
    assert "failed" not in await shell(stage.vm, READ.format(device.path, 101))
    log = "\n".join(await kernel_log(stage.vm))
    assert "critical medium error" in log or "Unrecovered Read Error" in log, log[-2000:]
    (newest, *_) = (await shell_json(stage.vm, "nvme error-log /dev/nvme0 -o json"))["errors"]
    assert newest["lba"] == 800 and newest["nsid"] == 1
    assert newest["status_field"] & 0x3FF in (0x281, 0x281 & 0x3FF)
    assert (await shell_json(stage.vm, "nvme smart-log /dev/nvme0 -o json"))["media_errors"] >= 1
    await stage.dpu.rpc("dpu_fault_remove", name="bad")
    assert "failed" not in await shell(stage.vm, READ.format(device.path, 100))


async def test_read_only_media_and_a_freeze(stage: Stage) -> None:
    device = await block_device(stage.vm, "card.disk")
    await stage.dpu.rpc("dpu_fault_add", name="worn", bdev_name="disk.1", action="read_only")
    smart = await shell_json(stage.vm, "nvme smart-log /dev/nvme0 -o json")
    warning = smart["critical_warning"]
    assert (warning["value"] if isinstance(warning, dict) else warning) == 8
    written = await shell(
        stage.vm, f"dd if=/dev/zero of={device.path} bs=4k count=1 oflag=direct 2>&1 || echo failed"
    )
    assert "failed" in written
    await stage.dpu.rpc("dpu_fault_remove", name="worn")
    await stage.dpu.rpc("dpu_fault_add", name="frozen", bdev_name="disk.1", action="hold")
    began = time.monotonic()
    reading = asyncio.create_task(shell(stage.vm, READ.format(device.path, 3)))
    while not (await stage.dpu.rpc("dpu_fault_get", name="frozen"))[0]["struck"]:
        await asyncio.sleep(0.05)
    assert not reading.done()
    await stage.dpu.rpc("dpu_fault_remove", name="frozen")
    assert "failed" not in await reading
    assert time.monotonic() - began < 30, "Linux did not have to give up"
