"""Every workload in a real guest on our controller, and the emu command around them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emu.daemon import Dpu
from emu.lab import Lab
from emu.run import VmGuest, controller_name, workload
from emu.vm import Vm
from emu.workloads import Context, Result, WorkloadError
from emu.workloads.base import find_device
from emu.workloads.fio import run_fio
from emu.workloads.verify import VerifyParams, plan

pytestmark = pytest.mark.vm

# Two namespaces with different block sizes, so that the second one's NSID and block size matter.
SCENARIO = """
[vm.guest]
vcpus = 2
memory = "512M"
nvme = ["card.disk", "card.files"]

[dpu.card.nvme.disk]
namespaces = [{ size = "512M" }, { size = "512M", block_size = 4096 }]

[dpu.card.nvme.files]
namespaces = [{ backend = "file", size = "400M" }]
"""


@pytest.fixture
def lab_scenario() -> str:
    return SCENARIO


def passed(result: Result) -> Result:
    assert result.ok, result.error
    return result


async def test_fio(the_lab: Lab) -> None:
    parameters: dict[str, Any] = {"device": "card.disk", "iodepth": 8, "bs": "4k"}
    reads = passed(await workload(the_lab, "fio", rw="randread", runtime="1s", **parameters))
    assert reads.value("iops", "read") * 4096 == pytest.approx(reads.value("bw_bytes", "read"), rel=0.01)
    assert 0 < reads.value("clat_p50", "read") <= reads.value("clat_p99", "read") <= reads.value("clat_max", "read")
    writes = passed(await workload(the_lab, "fio", rw="write", size="8M", nsid=2, **parameters))
    assert writes.value("ios", "write") == 2048
    # What the card counted, and what fio counted: the same, and the merged histogram has every command.
    assert reads.card["io"]["num_read_ops"] == reads.value("ios", "read") == reads.histograms[0].count
    assert (writes.card["io"]["bytes_written"], writes.card["io"]["bytes_read"]) == (8 << 20, 0)
    assert reads.card["complete"] and reads.card["cpu_ns"] > 0 and reads.card["serve_ns"] > 0
    assert sum(count for _, count in reads.card["latency"]) == reads.card["commands"]
    assert {one.metric for one in reads.series} == {"iops", "bw_bytes"}


async def test_fio_job_file(the_lab: Lab, tmp_path: Path) -> None:
    job = tmp_path / "my.fio"
    job.write_text("[one]\nrw=read\nbs=64k\nsize=1M\n[two]\nstonewall\nrw=write\nbs=64k\nsize=2M\n")
    result = passed(await workload(the_lab, "fio", device="card.disk", job=str(job)))
    assert (result.value("ios", "one:read"), result.value("ios", "two:write")) == (16, 32)
    job.write_text("[one]\nrw=sideways\n")
    refused = await workload(the_lab, "fio", device="card.disk", job=str(job))
    assert not refused.ok and "sideways" in refused.error


@pytest.mark.parametrize(("device", "nsid"), [("card.disk", 1), ("card.disk", 2), ("card.files", 1)])
async def test_verify(the_lab: Lab, device: str, nsid: int) -> None:
    result = passed(await workload(the_lab, "verify", device=device, nsid=nsid, size="2M", depths=[1, 64]))
    assert result.value("bytes_verified") == 4 * 2 * 2 * (2 << 20)  # passes, jobs, before and after the reset
    assert result.value("ios", "write") * 2 == pytest.approx(result.value("ios", "read"), rel=0.01)


async def test_verify_sees_one_wrong_block(vm: Vm) -> None:
    guest = VmGuest(vm)
    device = await find_device(guest, controller_name(vm, "card.disk"), 1)
    context = Context(guest, device)
    params = VerifyParams(type="verify", block_sizes=("4k",), depths=(8,), jobs=1, size="1M", reset=False)  # type: ignore[arg-type]
    (arguments,) = plan(params, device)
    await run_fio(context, [*arguments, "--do_verify=1"], 60)
    await run_fio(context, [*arguments, "--verify_only=1"], 60)
    spoil = f"dd if=/dev/urandom of={device.path} bs=4096 seek=77 count=1 oflag=direct"
    assert (await vm.exec(["sh", "-c", spoil], timeout_s=30)).code == 0
    with pytest.raises(WorkloadError, match="verify"):
        await run_fio(context, [*arguments, "--verify_only=1"], 60)


@pytest.mark.parametrize(("fs", "device"), [("ext4", "card.disk"), ("xfs", "card.disk"), ("xfs", "card.files")])
async def test_fs(the_lab: Lab, fs: str, device: str) -> None:
    result = passed(await workload(the_lab, "fs", fs=fs, device=device, size="24M"))
    assert result.value("bytes_verified") == 24 << 20
    assert result.value("files") > 10


async def test_script(the_lab: Lab, dpu: Dpu, tmp_path: Path) -> None:
    script = tmp_path / "my.py"
    script.write_text(
        "#!/usr/bin/env python3\n"
        "import os, sys\n"
        "fd = os.open(os.environ['DEVICE'], os.O_RDONLY)\n"
        "print(os.lseek(fd, 0, os.SEEK_END), os.environ['BLOCK_SIZE'], os.path.exists(os.environ['CONTROLLER']))\n"
        "sys.exit(len(sys.argv) - 1)\n"
    )
    result = passed(await workload(the_lab, "script", device="card.disk", nsid=2, path=str(script)))
    assert result.files["stdout.txt"].decode().split() == [str(512 << 20), "4096", "True"]
    failed = await workload(the_lab, "script", device="card.disk", path=str(script), args=["a", "b"])
    assert not failed.ok and failed.value("exit_code") == 2
    assert dpu.running


# -- the command


def emu(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "emu.cli", *arguments]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children(pid: int) -> set[int]:
    """Every process below ``pid`` now, from /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    below, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in below} - below
        below |= more
        grown = bool(more)
    return below - {pid}


def test_run_without_a_scenario(tmp_path: Path) -> None:
    with emu(
        "run", "--nvme", "64M", "--workload", "fio:randread,runtime=1s,iodepth=4", "--json", "--accel", "tcg",
        cwd=tmp_path,
    ) as process:  # fmt: skip
        out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["ok"] and report["host"]["accelerator"] == "tcg" and report["host"]["image_digest"]
    (result,) = report["workloads"]
    assert {"ios", "iops", "clat_p99"} <= {sample["metric"] for sample in result["samples"]}
    (folder,) = (tmp_path / "out").iterdir()
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {
        *("report.json", "report.html", "workloads/01-fio/fio.json", "lab/card/dpud.log"),
        *("lab/guest/console.log", "lab/guest/dmesg.txt", "lab/guest/qemu.txt"),
    } <= left


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with emu("run", "--nvme", "64M", "--workload", "fio:randread,runtime=5m", cwd=tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("fio on"):
                break
        below = children(process.pid)
        assert len(below) >= 3  # QEMU, the keeper, a worker
        process.send_signal(number)
        process.communicate(timeout=120)
    assert process.returncode == code
    assert [pid for pid in below if os.path.exists(f"/proc/{pid}")] == []
    with emu("clean", "--dry-run", "--json", cwd=tmp_path) as process:
        out, _ = process.communicate(timeout=60)
    assert not [one for one in json.loads(out)["found"] if one["lab"].startswith("run-")]
