"""What the stock Linux driver and its programs see of our controller: identity, logs, data, file systems.

The expected values come from the scenario and from NVMe Base 2.0 (sections named), read by nvme-cli's own parser.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from emu.run import workload
from tests.vm.conftest import (
    VERIFY,
    Stage,
    block_device,
    complaints,
    fio,
    io_commands,
    kernel_log,
    shell,
    shell_json,
)

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

MIB = 1 << 20

SCENARIO = """
[vm.guest]
vcpus = 2
memory = "512M"
nvme = ["card.disk", "card.files"]

[dpu.card.nvme.disk]
serial = "QA-0001"
model = "QA disk of the tests"
namespaces = [{ size = "384M" }, { size = "320M", block_size = 4096 }, { backend = "null", size = "1G" }]

[dpu.card.nvme.files]
namespaces = [{ backend = "file", size = "384M" }, { backend = "file", size = "384M", block_size = 4096 }]
"""
GEOMETRY = {  # (device, NSID): (bytes, block size)
    ("card.disk", 1): (384 * MIB, 512),
    ("card.disk", 2): (320 * MIB, 4096),
    ("card.disk", 3): (1024 * MIB, 512),
    ("card.files", 1): (384 * MIB, 512),
    ("card.files", 2): (384 * MIB, 4096),
}
WITH_DATA = [place for place in GEOMETRY if place != ("card.disk", 3)]
IDS = [f"{device[5:]}-{nsid}" for device, nsid in WITH_DATA]


# ---- identity (Base 5.17.2, NVM 4.1.5)


async def test_controller(stage: Stage) -> None:
    found = await shell_json(stage.vm, "nvme id-ctrl /dev/nvme0 -o json")
    texts = {key: found[key].rstrip(" ") for key in ("sn", "mn", "fr")}
    assert texts == {"sn": "QA-0001", "mn": "QA disk of the tests", "fr": "1.0"}
    assert (len(found["sn"]), len(found["mn"]), len(found["fr"])) == (20, 40, 8)  # padded with spaces
    assert found["ver"] == 0x20000 and found["cntrltype"] == 1
    assert 4096 << found["mdts"] == 256 << 10
    assert 0 < found["cntlid"] < 0xFFF0
    assert (found["sqes"], found["cqes"]) == (0x66, 0x44)  # 64 and 16 bytes, required and maximum
    assert found["nn"] >= 3
    assert re.fullmatch(r"nqn\.2\d{3}-\d\d\.[a-z.-]+:\S+", found["subnqn"])
    assert found["vwc"] & 1  # a volatile write cache, so that Linux sends Flush
    # Compare, Dataset Management, Write Zeroes; Doorbell Buffer Config
    assert found["oncs"] & 0b1101 == 0b1101 and found["oacs"] & 0x100
    assert found["frmw"] >> 1 & 7 == 1  # one slot, 1..7 allowed
    assert found["wctemp"] < found["cctemp"]
    other = await shell_json(stage.vm, "nvme id-ctrl /dev/nvme1 -o json")
    assert other["sn"] != found["sn"] and other["subnqn"] != found["subnqn"]


async def test_registers(stage: Stage) -> None:
    """Base 3.1.3: CAP, VS, CC, CSTS as a running driver leaves them."""
    found = await shell_json(stage.vm, "nvme show-regs /dev/nvme0 -o json")
    cap = int(found["cap"])
    assert cap & 0xFFFF == 1023 and cap >> 16 & 1  # MQES 0's based; CQR: queues are contiguous
    assert cap >> 37 & 1 and cap >> 48 & 0xF == 0 and cap >> 32 & 0xF == 0  # NVM set; MPSMIN 4 KiB; stride 4 bytes
    assert int(found["vs"]) == 0x20000
    assert int(found["cc"]) & 1 and int(found["csts"]) & 0b1111 == 1  # enabled; ready, not fatal, not shutting down
    assert int(found["aqa"]) == 31 << 16 | 31  # Linux: NVME_AQ_DEPTH 32, 0's based
    assert int(found["asq"]) and int(found["acq"])


async def test_namespaces(stage: Stage) -> None:
    unique: set[str] = set()
    for (device, nsid), (size, block_size) in GEOMETRY.items():
        found = await block_device(stage.vm, device, nsid)
        assert (found.size, found.block_size) == (size, block_size)
        namespace = await shell_json(stage.vm, f"nvme id-ns {found.path} -o json")
        assert namespace["nsze"] == namespace["ncap"] == namespace["nuse"] == size // block_size
        assert [(1 << lbaf["ds"], lbaf["ms"]) for lbaf in namespace["lbafs"]] == [(512, 0), (4096, 0)]
        assert namespace["nlbaf"] == 1 and namespace["nsattr"] == 0
        assert 1 << namespace["lbafs"][namespace["flbas"] & 0xF]["ds"] == block_size
        assert int(namespace["nguid"], 16)
        descriptors = (await shell_json(stage.vm, f"nvme ns-descs {found.path} -o json"))["ns-descs"]
        by_type = {one["Type"]: one for one in descriptors}
        assert by_type["nguid"]["nguid"] == namespace["nguid"]
        assert by_type["csi"]["csi"] == "0"
        unique |= {namespace["nguid"], by_type["uuid"]["uuid"]}
        # Linux reads all this too, through its own commands
        kernel = f"/sys/block/{found.path[5:]}"
        limits = await shell(
            stage.vm,
            f"cat {kernel}/queue/logical_block_size {kernel}/queue/max_hw_sectors_kb {kernel}/queue/write_cache",
        )
        assert limits.splitlines() == [str(block_size), "256", "write back"]
    assert len(unique) == 2 * len(GEOMETRY)
    lists = await shell_json(stage.vm, "nvme list-ns /dev/nvme0 -o json")
    assert [one["nsid"] for one in lists["nsid_list"]] == [1, 2, 3]


async def test_list(stage: Stage) -> None:
    listed = {one["DevicePath"]: one for one in (await shell_json(stage.vm, "nvme list -o json"))["Devices"]}
    assert len(listed) == len(GEOMETRY)
    for (device, nsid), (size, block_size) in GEOMETRY.items():
        row = listed[(await block_device(stage.vm, device, nsid)).path]
        assert (row["NameSpace"], row["PhysicalSize"], row["SectorSize"]) == (nsid, size, block_size)
        assert row["Firmware"] == "1.0"
        if device == "card.disk":
            assert (row["SerialNumber"], row["ModelNumber"]) == ("QA-0001", "QA disk of the tests")


async def test_queues(stage: Stage) -> None:
    """One queue pair for each vCPU; the controller offers 64 (Base 5.27.1.5, 0's based)."""
    for controller in ("nvme0", "nvme1"):
        assert await shell(stage.vm, f"cat /sys/class/nvme/{controller}/queue_count") == "3\n"
    feature = await shell_json(stage.vm, "nvme get-feature /dev/nvme0 -f 7 -o json")
    assert feature["feature: 0x07"][0]["Current"] == "0x003f003f"
    interrupts = await shell(stage.vm, "grep -o 'nvme[01]q[0-9]*' /proc/interrupts")
    assert interrupts.split() == [f"nvme{c}q{q}" for c in (0, 1) for q in (0, 1, 2)]
    for controller in (await stage.dpu.rpc("dpu_get_stats"))["controllers"]:
        assert [queue["sqid"] for queue in controller["queues"]] == [0, 1, 2]
        assert controller["shadow_doorbells"]


# ---- log pages (Base 5.16) and features (5.27)


async def test_smart_log(stage: Stage) -> None:
    """Counts what was really moved, in units of 512000 bytes; the daemon's temperature in kelvin."""
    device = await block_device(stage.vm, "card.disk")
    before = await shell_json(stage.vm, "nvme smart-log /dev/nvme0 -o json")
    moved = "dd if={} of={} bs=128k count=80 {}"
    await shell(stage.vm, moved.format("/dev/zero", device.path, "oflag=direct"))
    await shell(stage.vm, moved.format(device.path, "/dev/null", "iflag=direct"))
    after = await shell_json(stage.vm, "nvme smart-log /dev/nvme0 -o json")
    assert after["host_write_commands"] - before["host_write_commands"] == 80
    assert after["host_read_commands"] - before["host_read_commands"] == 80
    for direction in ("read", "written"):
        units = after[f"data_units_{direction}"] - before[f"data_units_{direction}"]
        assert 80 * 131072 / 512000 - 1 < units < 80 * 131072 / 512000 + 1
    assert (after["critical_warning"], after["media_errors"], after["percent_used"]) == (0, 0, 0)
    assert 273 < after["temperature"] < 343 and after["avail_spare"] >= after["spare_thresh"]


async def test_error_log(stage: Stage) -> None:
    """A command that must fail is the newest entry, with opcode's queue, status and the place of the fault."""
    before = (await shell_json(stage.vm, "nvme smart-log /dev/nvme0 -o json"))["num_err_log_entries"]
    result = await stage.vm.exec(["nvme", "get-log", "/dev/nvme0", "--log-id=0xee", "--log-len=512"], timeout_s=30)
    assert result.code != 0 and b"Invalid Log Page" in result.stderr
    newest = (await shell_json(stage.vm, "nvme error-log /dev/nvme0 -e 1 -o json"))["errors"][0]
    assert newest["error_count"] == before + 1
    assert (newest["sqid"], newest["parm_error_location"]) == (0, 40)  # CDW10, byte 40 of the command
    assert newest["status_field"] & 0x7FF == 0x109  # command specific, Invalid Log Page
    after = (await shell_json(stage.vm, "nvme smart-log /dev/nvme0 -o json"))["num_err_log_entries"]
    assert after == before + 1
    entries = await shell_json(stage.vm, "nvme id-ctrl /dev/nvme0 -o json")
    whole = await shell_json(stage.vm, "nvme error-log /dev/nvme0 -o json")
    assert len(whole["errors"]) == entries["elpe"] + 1  # 0's based


async def test_firmware_log(stage: Stage) -> None:
    log = (await shell_json(stage.vm, "nvme fw-log /dev/nvme0 -o json"))["nvme0"]
    assert log["Active Firmware Slot (afi)"] == 1
    assert list(log) == ["Active Firmware Slot (afi)", "Firmware Rev Slot 1"]
    assert "(1.0" in log["Firmware Rev Slot 1"]


async def test_effects_log(stage: Stage) -> None:
    """Supported commands, with a change of logical blocks (LBCC) where a command writes."""
    (log,) = await shell_json(stage.vm, "nvme effects-log /dev/nvme0 --csi=0 -o json")
    admin = {int(name.split("_")[1].split()[0]): bits for name, bits in log["admin_cmd_set"].items()}
    io = {int(name.split("_")[1].split()[0]): bits for name, bits in log["io_cmd_set"].items()}
    assert set(admin) >= {0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x7C, 0x86}
    changing, others = {1, 4, 8, 9, 0x19}, {0, 2, 5, 0x0C}
    assert {opcode: bits & 3 for opcode, bits in io.items()} == dict.fromkeys(changing, 3) | dict.fromkeys(others, 1)
    assert all(bits & 1 for bits in admin.values())


async def test_effects_log_of_every_command_set(stage: Stage) -> None:
    """Without --csi, nvme-cli looks into CAP.CSS and asks for each command set that it names."""
    log = await shell_json(stage.vm, "nvme effects-log /dev/nvme0 -o json")
    assert [one["command_set_identifier"] for one in log] == [0]


async def test_features(stage: Stage) -> None:
    async def value(fid: int, more: str = "") -> int:
        text = await shell(stage.vm, f"nvme get-feature /dev/nvme0 -f {fid} {more}")
        found = re.search(r"value:\s*(?:0x)?([0-9a-f]+)", text)
        assert found, text
        return int(found[1], 16)

    assert await value(0x02) == 0  # power state 0
    assert await value(0x06) == 1  # volatile write cache on
    assert await value(0x0B) & 0x100  # Linux asks for namespace events
    threshold = (await shell_json(stage.vm, "nvme id-ctrl /dev/nvme0 -o json"))["wctemp"]
    assert await value(0x04) == threshold
    await shell(stage.vm, "nvme set-feature /dev/nvme0 -f 4 -V 345")
    assert (await value(0x04), await value(0x04, "-s 1")) == (345, threshold)  # current, default
    await shell(stage.vm, f"nvme set-feature /dev/nvme0 -f 4 -V {threshold}")


# ---- data


async def commands_by_queue(stage: Stage, device: str) -> dict[int, int]:
    (controller,) = [
        one
        for one in (await stage.dpu.rpc("dpu_get_stats"))["controllers"]
        if one["nqn"].endswith(":" + device.partition(".")[2])
    ]
    return {queue["sqid"]: queue["commands"] for queue in controller["queues"]}


@pytest.mark.parametrize(("device", "nsid"), [WITH_DATA[0], WITH_DATA[3]], ids=[IDS[0], IDS[3]])
async def test_verify(stage: Stage, device: str, nsid: int) -> None:
    """4 KiB, and 512 bytes to 256 KiB mixed; two jobs on two queues; before and after a reset."""
    before = await commands_by_queue(stage, device)
    result = await workload(stage.lab, "verify", device=device, nsid=nsid, size="1M", depths=[1, 32])
    assert result.ok, result.error
    assert result.value("bytes_verified") == 2 * 2 * 2 * 2 * MIB
    after = await commands_by_queue(stage, device)
    assert all(after[qid] for qid in (1, 2))  # queues are made anew by the reset: what they did since
    assert before.keys() == after.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("device", "nsid"), WITH_DATA, ids=IDS)
async def test_verify_every_depth(stage: Stage, device: str, nsid: int) -> None:
    result = await workload(stage.lab, "verify", device=device, nsid=nsid, size="4M", depths=[1, 2, 4, 8, 16, 32, 64])
    assert result.ok, result.error
    assert result.value("bytes_verified") == 14 * 2 * 2 * 4 * MIB


async def test_both_queues_work(stage: Stage) -> None:
    device = await block_device(stage.vm, "card.disk")
    before = await commands_by_queue(stage, "card.disk")
    pinned = ("--cpus_allowed=0,1", "--cpus_allowed_policy=split", "--numjobs=2", "--offset_increment=2M")
    await fio(stage.vm, device, "--rw=randwrite", "--bs=4k", "--iodepth=16", "--size=2M", *pinned, *VERIFY)
    after = await commands_by_queue(stage, "card.disk")
    for qid in (1, 2):
        assert after[qid] - before[qid] >= 2 * 512  # every block written and read through the queue of its CPU


async def test_null_device(stage: Stage) -> None:
    """Takes and gives everything, keeps nothing; no verify can hold."""
    device = await block_device(stage.vm, "card.disk", 3)
    report = await fio(
        stage.vm, device, "--rw=randrw", "--bs=4k-64k", "--iodepth=16", "--runtime=1s", "--time_based", "--size=1G"
    )
    assert report["jobs"][0]["read"]["total_ios"] > 0 and report["jobs"][0]["write"]["total_ios"] > 0


async def filled(stage: Stage, path: str) -> None:
    """Nothing in the first 4 MiB is zero."""
    await shell(stage.vm, f"tr '\\0' x < /dev/zero | dd of={path} bs=1M count=4 iflag=fullblock oflag=direct")


async def looks(stage: Stage, path: str) -> list[str]:
    """What each of the first four MiB holds: "zero", "x" (all of it), or "mixed"."""
    program = (
        "import mmap, os\n"
        f"fd = os.open({path!r}, os.O_RDONLY | os.O_DIRECT)\n"
        "data = mmap.mmap(-1, 4 << 20); os.preadv(fd, [data], 0)\n"
        "parts = [data[i << 20 : (i + 1) << 20] for i in range(4)]\n"
        "print(*('zero' if not any(p) else 'x' if p == b'x' * len(p) else 'mixed' for p in parts))\n"
    )
    result = await stage.vm.exec(["python3", "-c", program], timeout_s=90)
    assert result.code == 0, result.stderr
    return result.stdout.decode().split()


@pytest.mark.parametrize(("device", "nsid"), WITH_DATA, ids=IDS)
async def test_discard_and_write_zeroes(stage: Stage, device: str, nsid: int) -> None:
    """Only the range asked for; a deallocated block reads as zeroes where DLFEAT says so (NVM figure 97)."""
    found = await block_device(stage.vm, device, nsid)
    dlfeat = (await shell_json(stage.vm, f"nvme id-ns {found.path} -o json"))["dlfeat"] & 7
    assert dlfeat == 1 or device == "card.files"
    await filled(stage, found.path)
    await shell(stage.vm, f"/usr/sbin/blkdiscard -f -o {MIB} -l {MIB} {found.path}")
    assert await looks(stage, found.path) in [["x", one, "x", "x"] for one in ("zero", "x")[: 2 - dlfeat]]
    await shell(stage.vm, f"/usr/sbin/blkdiscard -f -z -o {2 * MIB} -l {MIB} {found.path}")
    assert (await looks(stage, found.path))[2:] == ["zero", "x"]


async def test_trim_and_write_under_verify(stage: Stage) -> None:
    """fio deallocates each block before it writes it, and reads back what it wrote."""
    device = await block_device(stage.vm, "card.disk", 2)
    report = await fio(
        stage.vm, device, "--rw=randtrimwrite", "--bs=4k", "--iodepth=16", "--size=4M", "--ioengine=libaio", *VERIFY
    )
    job = report["jobs"][0]
    assert job["trim"]["total_ios"] > 0 and job["read"]["total_ios"] == job["write"]["total_ios"] > 0


@pytest.mark.parametrize("device", ["card.disk", "card.files"])
async def test_flush(stage: Stage, device: str) -> None:
    """fsync of the device becomes Flush (the 16th number of the statistics counts them)."""
    found = await block_device(stage.vm, device)
    name = found.path[5:]

    async def flushes() -> int:
        return int((await shell(stage.vm, f"cat /sys/block/{name}/stat")).split()[15])

    before = await flushes()
    arguments = ("--rw=randwrite", "--bs=4k", "--iodepth=4", "--size=1M", "--fsync=16")
    await fio(stage.vm, found, *arguments, *VERIFY)
    assert await flushes() - before >= 256 // 16 - 1  # none after the last write
    buffered = "dd if=/dev/urandom of={0} bs=64k count=16 seek=64 conv=fsync && dd if={0} bs=64k count=16 skip=64"
    await shell(stage.vm, f"{buffered.format(found.path)} of=/dev/null")


# ---- file systems


@pytest.mark.parametrize(
    ("fs", "device", "nsid"),
    [
        ("ext4", "card.disk", 2),
        pytest.param("xfs", "card.files", 1, marks=pytest.mark.slow),
        pytest.param("xfs", "card.disk", 1, marks=pytest.mark.slow),
        pytest.param("ext4", "card.disk", 1, marks=pytest.mark.slow),
        pytest.param("xfs", "card.disk", 2, marks=pytest.mark.slow),
        pytest.param("ext4", "card.files", 1, marks=pytest.mark.slow),
        pytest.param("ext4", "card.files", 2, marks=pytest.mark.slow),
        pytest.param("xfs", "card.files", 2, marks=pytest.mark.slow),
    ],
)
async def test_file_system(stage: Stage, request: pytest.FixtureRequest, fs: str, device: str, nsid: int) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    size = 160 * MIB if slow else 12 * MIB
    result = await workload(stage.lab, "fs", fs=fs, device=device, nsid=nsid, size=f"{size}")
    assert result.ok, result.error
    assert result.value("bytes_verified") == size


# ---- programs that run from our disk

# Programs are started from a file system on the disk, each time from empty caches, so the code of one is read into
# pages that had that of another. QEMU's TCG keeps translations of guest memory that another process writes; Linux's
# init_on_alloc, Debian's default, makes the guest write such pages itself. (With init_on_alloc=0 on its command line,
# 14 of 64 programs of this test went wrong.)
PROGRAMS = """
import os, shutil, subprocess, sys
device, rounds = sys.argv[1], int(sys.argv[2])
root = "/mnt/programs"
os.makedirs(root, exist_ok=True)
subprocess.run(["mkfs.ext4", "-q", "-F", device], check=True)
subprocess.run(["mount", "-t", "ext4", device, root], check=True)
libraries = os.path.join(root, "lib")
shutil.copytree("/usr/lib/x86_64-linux-gnu", libraries, symlinks=True)
for name in ("busybox", "python3.13", "fio", "nvme"):
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    shutil.copy(found, root)
open(root + "/text", "w").write("the quick brown fox\\n" * 20000)
loader = [libraries + "/ld-linux-x86-64.so.2", "--library-path", libraries]
commands = [
    [root + "/busybox", "md5sum", root + "/text"],
    [root + "/busybox", "sha256sum", root + "/text"],
    [root + "/busybox", "awk", "{ n += length($0) } END { print n, NR }", root + "/text"],
    [root + "/busybox", "sort", "-u", root + "/text"],
    [*loader, root + "/python3.13", "-c", "import hashlib, json; print(json.dumps(sorted(range(500), key=str)))"],
    [*loader, root + "/fio", "--version"],
    [*loader, root + "/nvme", "version"],
    [*loader, root + "/fio", "--name=x", "--ioengine=null", "--size=1M", "--output-format=terse", "--minimal",
     "--output=/dev/null"],
]
def run(command):
    done = subprocess.run(command, capture_output=True)
    return done.returncode, done.stdout, done.stderr
expected = [run(command) for command in commands]
assert all(code == 0 for code, _, _ in expected), expected
wrong = []
for number in range(rounds):
    for command, right in zip(commands, expected):
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
        found = run(command)
        if found != right:
            wrong.append((number, command, found[0], found[1][:200], found[2][:200]))
subprocess.run(["umount", root], check=True)
print(rounds * len(commands), len(wrong), *wrong[:3], sep="\\n")
"""


async def run_programs(stage_vm: Any, path: str, rounds: int) -> tuple[int, int, str]:
    await stage_vm.guest.write_file("/tmp/programs.py", PROGRAMS.encode())
    result = await stage_vm.exec(["python3", "/tmp/programs.py", path, str(rounds)], timeout_s=120 + 30 * rounds)
    assert result.code == 0, result.stderr.decode()
    runs, wrong, *examples = result.stdout.decode().splitlines()
    return int(runs), int(wrong), "\n".join(examples)


@pytest.mark.parametrize(
    ("device", "nsid", "rounds"),
    [("card.disk", 1, 1), pytest.param("card.files", 2, 60, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
async def test_programs_from_our_disk(
    stage: Stage, device: str, nsid: int, rounds: int, record_property: Any
) -> None:
    found = await block_device(stage.vm, device, nsid)
    runs, wrong, examples = await run_programs(stage.vm, found.path, rounds)
    record_property("programs", f"{wrong} of {runs} wrong")
    assert wrong == 0, examples


# ---- the judge of kernel logs, on Linux 6.12's own words (drivers/nvme/host)


def test_what_counts_as_a_complaint() -> None:
    bad = [
        "<4>[    1.0] nvme nvme0: I/O tag 12 (100c) opcode 0x2 (I/O Cmd) QID 1 timeout, reset controller",
        "<4>[    1.0] nvme nvme0: I/O tag 12 (100c) QID 1 timeout, completion polled",
        "<4>[    1.0] nvme nvme0: missing or invalid SUBNQN field.",
        "<6>[    1.0] nvme nvme0: globally duplicate IDs for nsid 1",
        "<4>[    1.0] nvme nvme0: clearing duplicate IDs for nsid 1",
        "<3>[    1.0] nvme nvme0: Identify namespace failed (-4)",
        "<3>[    1.0] I/O error, dev nvme0n1, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
        "<3>[    1.0] Buffer I/O error on dev nvme0n1, logical block 0, async page read",
        "<3>[    1.0] INFO: task fio:123 blocked for more than 120 seconds.",
    ]
    good = [
        "<6>[    1.0] nvme nvme0: 2/0/0 default/read/poll queues",
        "<6>[    1.0] nvme nvme0: rescanning namespaces.",
        "<4>[    1.0] nvme nvme0: resetting controller",
        "<4>[    1.0] nvme nvme0: using unchecked data buffer",
        "<6>[    1.0] EXT4-fs (nvme0n1): mounted filesystem 12345678 r/w with ordered data mode.",
        "<6>[    1.0] XFS (nvme1n1): Ending clean mount",
    ]
    assert complaints([*bad, *good]) == bad
    assert bad[5] not in complaints(bad, resets=True)


# ---- last: all of the above, as the kernel saw it


async def test_no_complaint(stage: Stage) -> None:
    log = await kernel_log(stage.vm)
    assert [line for line in log if "default/read/poll queues" in line]  # it is the whole log
    assert complaints(log) == []
    stats = await stage.dpu.rpc("dpu_get_stats")
    assert io_commands(stats) > 0 and stage.dpu.restarts_ms() == []
