"""Optional commands as nvme-cli sends them through the stock driver, and what the driver makes of the features.

The values come from NVM Command Set 1.0 (sections named), as nvme-cli reads them. Reads go by ``nvme read``, whose
status it prints; the kernel's own read of a marked block is one of the tests.
"""

from __future__ import annotations

import os
import re
import signal

import pytest

from emu.vm import Vm
from tests.vm.conftest import Stage, block_device, shell, shell_json, worker_pid

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

MIB = 1 << 20
SCENARIO = """
[vm.guest]
vcpus = 1
memory = "384M"
nvme = ["card.disk"]

[dpu.card.nvme.disk]
namespaces = [{ size = "64M" }, { size = "64M", block_size = 4096 }, { backend = "null", size = "1G" },
              { backend = "file", size = "64M" }]
"""
EVERY, STORING = [1, 2, 3, 4], [1, 2, 4]


async def refused(vm: Vm, command: str, reason: str) -> None:
    """nvme-cli says that the controller has answered with this status."""
    result = await vm.exec(["sh", "-c", command], timeout_s=120)
    said = (result.stdout + result.stderr).decode(errors="replace")
    assert result.code != 0 and reason in said, f"{command}: {result.code}: {said}"


async def path_of(stage: Stage, nsid: int) -> tuple[str, int]:
    found = await block_device(stage.vm, "card.disk", nsid)
    return found.path, found.block_size


@pytest.mark.parametrize("nsid", EVERY)
async def test_write_uncor(stage: Stage, nsid: int) -> None:
    """3.2.7; block counts of nvme-cli are 0's based."""
    path, block = await path_of(stage, nsid)
    read = f"nvme read {path} -s {{}} -c {{}} -z {{}} -d /dev/null"
    await shell(stage.vm, f"nvme write-uncor {path} -s 100 -c 2")
    for start, blocks in ((100, 1), (102, 1), (98, 4)):
        await refused(stage.vm, read.format(start, blocks - 1, blocks * block), "Unrecovered Read Error")
    await refused(stage.vm, f"nvme verify {path} -s 101 -c 0", "Unrecovered Read Error")
    await refused(stage.vm, f"nvme copy {path} --sdlba=0 --slbs=102 --blocks=0", "Unrecovered Read Error")
    await shell(stage.vm, read.format(96, 3, 4 * block))
    # As text: nvme-cli 2.13 ends with an assertion of its own when it is to print this as JSON.
    text = await shell(stage.vm, f"nvme get-lba-status {path} -n {nsid} -s 0 -m 63 -a 0x11 -l 0")
    numbers = [int(number, 16) for number in re.findall(r"0x[0-9a-fA-F]+", text)]
    assert {100, 2, 3} <= set(numbers), text  # first block; blocks, 0's based; status
    result = await stage.vm.exec(
        ["dd", f"if={path}", "of=/dev/null", f"bs={block}", "skip=100", "count=1", "iflag=direct"], timeout_s=60
    )
    assert result.code != 0 and b"No data available" in result.stderr  # BLK_STS_MEDIUM is ENODATA
    await shell(stage.vm, f"dd if=/dev/zero of={path} bs={block} seek=100 count=3 oflag=direct")
    await shell(stage.vm, read.format(98, 7, 8 * block))
    await refused(stage.vm, f"nvme write-uncor {path} -s {1 << 40} -c 0", "LBA Out of Range")


async def test_blocks_stay_uncorrectable_over_a_death(stage: Stage) -> None:
    path, block = await path_of(stage, 2)
    await shell(stage.vm, f"nvme write-uncor {path} -s 7 -c 0")
    pid = await worker_pid(stage.dpu)
    os.kill(pid, signal.SIGKILL)
    read = f"nvme read {path} -s 7 -c 0 -z {block} -d /dev/null"
    await refused(stage.vm, read, "Unrecovered Read Error")
    assert await worker_pid(stage.dpu) != pid
    await shell(stage.vm, f"nvme write-zeroes {path} -s 7 -c 0")
    await shell(stage.vm, read)


@pytest.mark.parametrize("nsid", EVERY)
async def test_verify(stage: Stage, nsid: int) -> None:
    path, _ = await path_of(stage, nsid)
    await shell(stage.vm, f"nvme verify {path} -s 0 -c 4095")
    await refused(stage.vm, f"nvme verify {path} -s {1 << 40} -c 0", "LBA Out of Range")


@pytest.mark.parametrize("nsid", STORING)
async def test_copy(stage: Stage, nsid: int) -> None:
    """3.2.2, with the limits of Identify Namespace."""
    path, block = await path_of(stage, nsid)
    await shell(stage.vm, f"dd if=/dev/urandom of={path} bs={block} seek=8 count=8 oflag=direct")
    await shell(stage.vm, f"nvme copy {path} --sdlba=64 --slbs=10,8 --blocks=5,1")
    look = f"dd if={path} bs={block} skip={{}} count={{}} iflag=direct status=none"
    for source, count, target in ((10, 6, 64), (8, 2, 70)):
        compared = f"{look.format(source, count)} > /tmp/a && {look.format(target, count)} | cmp - /tmp/a"
        await shell(stage.vm, compared)
    limits = await shell_json(stage.vm, f"nvme id-ns {path} -o json")
    assert (limits["mssrl"] * block, limits["mcl"] * block, limits["msrc"]) == (256 << 10, 1 << 20, 127)
    too_long = f"nvme copy {path} --sdlba=64 --slbs=0 --blocks={limits['mssrl']}"
    await refused(stage.vm, too_long, "Command Size Limit Exceeded")
    await refused(stage.vm, f"nvme copy {path} --sdlba=64 --slbs=0 --blocks=0 --format=1", "Invalid Field in Command")
    await refused(stage.vm, f"nvme copy {path} --sdlba={1 << 40} --slbs=0 --blocks=0", "LBA Out of Range")


async def test_what_is_not_supported(stage: Stage) -> None:
    """Keep Alive is optional on PCIe (KAS 0); Action Type 02h of Get LBA Status is not of this version."""
    controller = await shell_json(stage.vm, "nvme id-ctrl /dev/nvme0 -o json")
    assert (controller["kas"], controller["ocfs"], controller["oncs"]) == (0, 1, 0b1_1101_1111)
    await refused(stage.vm, "nvme admin-passthru /dev/nvme0 --opcode=0x18", "Invalid Command Opcode")
    await refused(stage.vm, "nvme get-feature /dev/nvme0 -f 0x0f", "Invalid Field in Command")
    await refused(stage.vm, "nvme get-lba-status /dev/nvme0 -n 1 -s 0 -m 63 -a 2 -l 0", "Invalid Field in Command")


async def test_lba_status_log(stage: Stage) -> None:
    path, _ = await path_of(stage, 1)
    await shell(stage.vm, f"nvme write-uncor {path} -s 40 -c 7")
    log = await shell_json(stage.vm, "nvme lba-status-log /dev/nvme0 -o json")
    assert (log["nlslne"], log["estulb"]) == (1, 8)
    (element,) = log["ns_elements"]
    assert (element["neid"], element["ratype"], element["descs"]) == (1, 0x11, [{"rslba": 40, "rnlb": 7}])
    await shell(stage.vm, f"nvme write-zeroes {path} -s 40 -c 7")


async def test_changed_namespaces(stage: Stage) -> None:
    """Without notices the list waits for the host; with them the driver reads it and scans (Base 5.16.1.5)."""
    (controller,) = (await stage.dpu.rpc("dpu_get_stats"))["controllers"]
    nqn = controller["nqn"]

    async def changed() -> list[int]:
        log = await shell(stage.vm, "nvme changed-ns-list-log /dev/nvme0 -o json")
        return [int(number, 0) for number in re.findall(r"0x[0-9a-fA-F]+|\b\d+\b", log) if int(number, 0)]

    async def event_configuration(value: int) -> None:
        await shell(stage.vm, f"nvme set-feature /dev/nvme0 -f 0x0b -V {value}")

    notices = int(re.findall(r"0x[0-9a-f]+", await shell(stage.vm, "nvme get-feature /dev/nvme0 -f 0x0b"))[-1], 16)
    assert notices & 1 << 8, "the driver asks for namespace notices"
    await event_configuration(0)
    await stage.dpu.rpc("bdev_null_create", name="late", num_blocks=2048, block_size=512)
    await stage.dpu.rpc("nvmf_subsystem_add_ns", nqn=nqn, namespace={"bdev_name": "late", "nsid": 7})
    assert 7 in await changed()
    nsids = "cat /sys/block/nvme*/nsid"
    assert "7" not in (await shell(stage.vm, nsids)).split()
    await event_configuration(notices)
    await stage.dpu.rpc("nvmf_subsystem_remove_ns", nqn=nqn, nsid=7)
    await stage.dpu.rpc("nvmf_subsystem_add_ns", nqn=nqn, namespace={"bdev_name": "late", "nsid": 8})
    appeared = f"i=0; until {nsids} | grep -qx 8; do i=$((i+1)); test $i -lt 300 || exit 1; sleep 0.1; done"
    await shell(stage.vm, appeared)
    assert await changed() == [], "the driver has read it"


async def test_write_cache_and_atomic_writes(stage: Stage) -> None:
    """The driver's view: write back and untorn writes as large as NAWUPF; switched off it is write through."""
    for nsid in EVERY:
        path, block = await path_of(stage, nsid)
        queue = f"/sys/block/{path[5:]}/queue"
        atomic = 256 << 10 if nsid in (1, 2) else block  # memory; AWUPF: one block
        assert int(await shell(stage.vm, f"cat {queue}/atomic_write_max_bytes")) == atomic
        assert await shell(stage.vm, f"cat {queue}/write_cache") == "write back\n"
    await shell(stage.vm, "nvme set-feature /dev/nvme0 -f 6 -V 0")
    text = await shell(stage.vm, "nvme get-feature /dev/nvme0 -f 6")
    assert int(re.findall(r"(?:0x)?[0-9a-f]+$", text.strip())[0], 16) == 0, text
    path, block = await path_of(stage, 4)
    await shell(stage.vm, f"dd if=/dev/zero of={path} bs={block} count=16 oflag=direct")
    await shell(stage.vm, "nvme reset /dev/nvme0")
    text = await shell(stage.vm, "nvme get-feature /dev/nvme0 -f 6")
    assert int(re.findall(r"(?:0x)?[0-9a-f]+$", text.strip())[0], 16) == 1, text
