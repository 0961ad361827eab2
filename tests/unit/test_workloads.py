"""Workloads against a guest that only answers: what they run in it, and what they make of its answers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpu.errors import EmuError
from emu.workloads import WORKLOADS, Context, Result, Sample, WorkloadError, fio, fs, verify
from emu.workloads import base as workloads_base
from emu.workloads.base import BlockDevice, find_device

DISK = BlockDevice("/dev/nvme3n2", "nvme3", 1, 512, 1 << 30)

# fio 3.39, --output-format=json+, shortened and with bins made up; the first line is what fio prints before its JSON.
FIO_REPORT = """fio: some warning
{
  "fio version": "fio-3.39",
  "jobs": [
    {
      "jobname": "job", "error": 0, "usr_cpu": 12.5, "sys_cpu": 30.25,
      "read": {"total_ios": 52665, "io_bytes": 215715840, "runtime": 3001, "iops": 17549.15, "bw_bytes": 71881319,
        "clat_ns": {"min": 90000, "max": 9000000, "mean": 450000.5, "stddev": 1.0, "N": 52665,
          "bins": {"321536": 30000, "700000": 20000, "2834432": 2500, "5000000": 165}}},
      "write": {"total_ios": 0, "iops": 0.0, "bw_bytes": 0, "clat_ns": {"min": 0, "max": 0, "mean": 0.0}},
      "trim": {"total_ios": 0, "iops": 0.0, "bw_bytes": 0, "clat_ns": {"min": 0, "max": 0, "mean": 0.0}}
    }
  ]
}
"""


@dataclass(frozen=True)
class Answer:
    code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""


@dataclass
class FakeGuest:
    """Answers each program by the first row whose words are all in its arguments; remembers what it was given."""

    answers: list[tuple[str, Answer]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    permissions: dict[str, int] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float, on_output: Callable[[int, bytes], None] | None = None
    ) -> Answer:
        command = " ".join(argv)
        self.commands.append(command)
        answer = next((answer for words, answer in self.answers if words in command), Answer())
        if on_output is not None and answer.stdout:
            on_output(1, answer.stdout)
        return answer

    async def read_file(self, path: str) -> bytes:
        return self.files[path]

    async def write_file(self, path: str, data: bytes, permissions: int = 0o644) -> None:
        self.files[path] = data
        self.permissions[path] = permissions


def run(guest: FakeGuest, kind: str, done: Callable[[float], None] = lambda part: None, **params: Any) -> Result:
    row = WORKLOADS[kind]
    checked = row.params.model_validate({"type": kind, **params})

    async def main() -> Result:
        return await row.run(checked, Context(guest, DISK, done))

    return asyncio.run(main())


def fio_guest(report: str = FIO_REPORT, answer: Answer = Answer()) -> FakeGuest:
    return FakeGuest([("fio ", answer)], {"/tmp/fio-nvme3n2.json": report.encode()})


# -- fio


def test_fio_turns_its_parameters_into_a_command_and_its_json_into_samples() -> None:
    guest = fio_guest(answer=Answer(stdout=b"Jobs: 1 (f=1): [r(1)][37.5%][r=70MiB/s]\n[50%]\n"))
    parts: list[float] = []
    result = run(guest, "fio", parts.append, rw="randread", bs="8k", iodepth=32, runtime="3s", ramp="500ms")
    remove, command, *logs = guest.commands
    assert remove == "rm -f /tmp/fio-nvme3n2_iops.log /tmp/fio-nvme3n2_bw.log"
    assert logs == ["cat /tmp/fio-nvme3n2_iops.log", "cat /tmp/fio-nvme3n2_bw.log"]
    assert command.startswith("env DEVICE=/dev/nvme3n2 fio ")
    for word in (
        *("--filename=/dev/nvme3n2", "--rw=randread", "--bs=8k", "--iodepth=32", "--numjobs=1", "--direct=1"),
        *("--time_based", "--runtime=3000ms", "--ramp_time=500ms", "--output-format=json+"),
    ):
        assert word in command.split()
    assert parts == [0.5]
    assert result.ok
    assert {(sample.op, sample.metric): sample.value for sample in result.samples} == {
        ("read", "ios"): 52665,
        ("read", "iops"): 17549.15,
        ("read", "bw_bytes"): 71881319,
        ("read", "clat_mean"): 450000.5,
        ("read", "clat_max"): 9000000,
        ("read", "clat_p50"): 321536,
        ("read", "clat_p90"): 700000,
        ("read", "clat_p99"): 2834432,
        ("read", "clat_p99.9"): 5000000,
        ("", "cpu_user"): 12.5,
        ("", "cpu_system"): 30.25,
        ("", "errors"): 0,
    }
    assert result.value("iops", "read") == 17549.15
    with pytest.raises(KeyError, match=r"there are: .*read iops"):
        result.value("iops", "write")


def test_the_windows_of_a_log_are_those_that_the_job_wants(tmp_path: Path) -> None:
    job = tmp_path / "my.fio"
    job.write_text("[global]\nlog_avg_msec=250\n[job]\n")
    report = FIO_REPORT.replace('"jobs"', '"global options": {"log_avg_msec": "250"}, "jobs"')
    guest = fio_guest(report)
    guest.answers.insert(0, ("_iops.log", Answer(stdout=b"1250, 7, 0, 0, 0\n1500, 8, 0, 0, 0\n")))
    guest.answers.insert(1, ("_bw.log", Answer(code=1)))
    (iops,) = run(guest, "fio", job=str(job)).series
    assert iops.points == ((0.25, 7), (0.5, 8))


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, "--runtime=10000ms"), ({"size": "64M"}, "--size=67108864"), ({"rate_iops": 5}, "--rate_iops=5")],
)
def test_fio_defaults(params: dict[str, Any], expected: str) -> None:
    guest = fio_guest()
    run(guest, "fio", **params)
    assert expected in guest.commands[1].split()
    assert ("--time_based" in guest.commands[1]) == ("size" not in params)


def test_fio_says_what_fio_said() -> None:
    guest = FakeGuest([("cat ", Answer(stdout=b"fio: bad option <x>\n{")), ("fio ", Answer(code=1))])
    with pytest.raises(WorkloadError, match="fio ended with 1: fio: bad option <x>"):
        run(guest, "fio")
    with pytest.raises(WorkloadError, match="fio job job met error 84"):
        run(fio_guest(FIO_REPORT.replace('"error": 0', '"error": 84')), "fio")
    with pytest.raises(WorkloadError, match="fio wrote no report"):
        run(fio_guest("Killed"), "fio")


def test_a_job_file_gets_the_device_unless_it_names_one(tmp_path: Path) -> None:
    job = tmp_path / "my.fio"
    for text, expected in (
        ("[a]\nrw=read\n", "[global]\nfilename=${DEVICE}\n[a]\nrw=read\n"),
        ("[a]\n filename = ${DEVICE}\n", "[a]\n filename = ${DEVICE}\n"),
        ("[a]\ndirectory=/mnt\n", "[a]\ndirectory=/mnt\n"),
    ):
        job.write_text(text)
        guest = fio_guest()
        run(guest, "fio", job=str(job))
        assert guest.files["/tmp/user-nvme3n2.fio"].decode() == expected
        assert guest.commands[1].split()[-1] == "/tmp/user-nvme3n2.fio"


def test_a_job_file_with_several_jobs_keeps_them_apart() -> None:
    report = json.loads(FIO_REPORT[FIO_REPORT.index("{") :])
    report["jobs"].append({**report["jobs"][0], "jobname": "other"})
    assert {sample.op for sample in fio.samples_of(report)} == {"job:read", "job", "other:read", "other", "read"}


# -- verify


@given(
    sizes=st.lists(st.sampled_from(["4k", "512-256k", "1k-2k", "128k"]), min_size=1, max_size=3),
    depths=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    jobs=st.integers(1, 8),
    size=st.integers(1, 64).map(lambda blocks: blocks << 18),
    block_size=st.sampled_from([512, 4096]),
)
def test_verify_regions_neither_overlap_nor_leave_the_device(
    sizes: list[str], depths: list[int], jobs: int, size: int, block_size: int
) -> None:
    need = len(sizes) * len(depths) * jobs * size
    params = verify.VerifyParams.model_validate(
        {"type": "verify", "block_sizes": sizes, "depths": depths, "jobs": jobs, "size": size}
    )
    device = BlockDevice("/dev/x", "x", 1, block_size, need)
    used: set[int] = set()
    for arguments in verify.plan(params, device):
        options = dict(word.split("=", 1) for word in arguments if "=" in word)
        low, high = map(int, options["--bsrange"].split("-"))
        assert block_size <= low <= high
        for job in range(int(options["--numjobs"])):
            start = int(options["--offset"]) + job * int(options["--offset_increment"])
            region = set(range(start, start + int(options["--size"]), 1 << 18))
            assert not region & used
            used |= region
    assert used == set(range(0, need, 1 << 18))
    with pytest.raises(EmuError, match="verify needs"):
        verify.plan(params, BlockDevice("/dev/x", "x", 1, block_size, need - 1))


def test_verify_reads_everything_again_after_the_reset() -> None:
    report = json.loads(FIO_REPORT[FIO_REPORT.index("{") :])
    report["jobs"][0]["write"] = {**report["jobs"][0]["read"], "total_ios": 100}
    guest = fio_guest(json.dumps(report))
    result = run(guest, "verify", block_sizes=["4k"], depths=[1, 8], size="1M")
    # With verify_only fio counts writes that it did not do.
    assert (result.value("ios", "write"), result.value("ios", "read")) == (2 * 100, 4 * 52665)
    rate = 17549.15  # every pass reports the same, so the rate over all of them is that too
    assert result.value("iops", "read") == pytest.approx(rate)
    assert result.value("bw_bytes", "read") == pytest.approx(71881319)
    assert (result.value("clat_p50", "read"), result.value("clat_p99", "read")) == (321536, 2834432)
    kinds = [
        "reset" if "reset" in command else "again" if "--verify_only=1" in command else "write"
        for command in guest.commands
    ]
    assert kinds == ["write", "write", "reset", "again", "again"]
    assert "nvme reset /dev/nvme3" in guest.commands[2]
    written, again = guest.commands[:2], guest.commands[3:]
    assert [command.replace("--verify_only=1", "--do_verify=1") for command in again] == written
    assert result.value("bytes_verified") == 2 * 2 * 2 * (1 << 20)  # passes x jobs x rounds x 1 MiB
    assert run(fio_guest(), "verify", reset=False).value("bytes_verified") == 6 * 2 * (8 << 20)


# -- fs


def guest_program(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", fs.GUEST_PROGRAM, *arguments], check=True, capture_output=True, text=True
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_fs_finds_every_kind_of_difference(tmp_path: Path) -> None:
    root = tmp_path / "files"
    written = guest_program("fill", str(root), str(1 << 20), "7")
    assert written["bytes"] == 1 << 20 == sum(path.stat().st_size for path in root.rglob("f*"))
    assert guest_program("fill", str(tmp_path / "again"), str(1 << 20), "7")["digests"] == written["digests"]
    assert guest_program("fill", str(tmp_path / "other"), str(1 << 20), "8")["digests"] != written["digests"]
    fs.compare(written["digests"], guest_program("read", str(root))["digests"])
    changed, missing = sorted(path for path in root.rglob("f*") if path.stat().st_size)[:2]
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    missing.unlink()
    (root / "more").touch()
    with pytest.raises(WorkloadError) as caught:
        fs.compare(written["digests"], guest_program("read", str(root))["digests"])
    for part in (
        f"1 files changed (first: {changed.relative_to(root)})",
        f"1 files missing (first: {missing.relative_to(root)})",
        "1 files that nobody wrote (first: more)",
    ):
        assert part in str(caught.value)


def test_fs_unmounts_between_writing_and_reading() -> None:
    digests = json.dumps({"digests": {"a": "1"}, "bytes": 3, "seconds": 0.5}).encode()
    guest = FakeGuest([("python3", Answer(stdout=digests))])
    result = run(guest, "fs", fs="xfs", size="1M", seed=4)
    first_words = [command.split()[0] for command in guest.commands]
    assert first_words == ["mkfs.xfs", "mkdir", "mount", "python3", "umount", "sh", "mount", "python3", "umount", "xfs_repair"]  # fmt: skip # noqa: E501
    assert "fill /mnt/emu/files 1048576 4" in guest.commands[3]
    assert result.value("files") == 1


def test_fs_unmounts_after_a_failure() -> None:
    guest = FakeGuest([("python3", Answer(code=1, stderr=b"Traceback\nOSError: [Errno 5] I/O error"))])
    with pytest.raises(WorkloadError, match="I/O error"):
        run(guest, "fs")
    assert guest.commands[-1] == "umount /mnt/emu"


# -- script


def test_script_gets_its_device_and_its_output_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "my.sh"
    path.write_text("#!/bin/sh\n")
    guest = FakeGuest([("/tmp/script-nvme3n2", Answer(3, b"out\n", b"no luck\n"))])
    result = run(guest, "script", path=str(path), args=["a b"])
    assert guest.files["/tmp/script-nvme3n2"] == b"#!/bin/sh\n" and guest.permissions["/tmp/script-nvme3n2"] == 0o755
    for word in ("DEVICE=/dev/nvme3n2", "CONTROLLER=/dev/nvme3", "NSID=1", "BLOCK_SIZE=512"):
        assert word in guest.commands[0].split()
    assert not result.ok and result.error == "my.sh ended with 3: no luck"
    assert result.files == {"stdout.txt": b"out\n", "stderr.txt": b"no luck\n"}
    assert result.to_json()["files"] == ["stderr.txt", "stdout.txt"]
    assert run(FakeGuest(), "script", path=str(path)).ok
    with pytest.raises(EmuError, match="cannot read"):
        run(FakeGuest(), "script", path=str(tmp_path / "gone"))


# -- the device


class HostShell(FakeGuest):
    """Runs programs on the host, with ``root`` in the place of /sys."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float, on_output: Callable[[int, bytes], None] | None = None
    ) -> Answer:
        done = subprocess.run([word.replace("/sys/", f"{self.root}/") for word in argv], capture_output=True)
        return Answer(done.returncode, done.stdout, done.stderr)


def test_a_device_is_found_by_its_nsid_and_not_by_a_number_in_its_name(tmp_path: Path) -> None:
    for path, nsid in (("nvme1c4n1", 7), ("nvme1c4n2", 1), ("hwmon", None)):
        folder = tmp_path / "class/nvme/nvme4" / path
        folder.mkdir(parents=True)
        if nsid is not None:
            (folder / "nsid").write_text(f"{nsid}\n")
    for name, sectors in (("nvme1n1", 16), ("nvme1n2", 4096)):
        (tmp_path / "block" / name / "queue").mkdir(parents=True)
        (tmp_path / "block" / name / "queue/logical_block_size").write_text("4096\n")
        (tmp_path / "block" / name / "size").write_text(f"{sectors}\n")
    guest = HostShell(tmp_path)
    found = asyncio.run(find_device(guest, "nvme4", 1))
    assert found == BlockDevice("/dev/nvme1n2", "nvme4", 1, 4096, 4096 * 512)
    assert asyncio.run(find_device(guest, "nvme4", 7)).path == "/dev/nvme1n1"
    with pytest.raises(WorkloadError, match="no namespace 2 on nvme4"):
        asyncio.run(find_device(guest, "nvme4", 2))


# -- the table


def test_every_row_has_a_module_with_its_manual() -> None:
    for name, row in WORKLOADS.items():
        module = sys.modules[row.run.__module__]
        assert module.__doc__ and module.__doc__.startswith(f"{name}: ")
        for part in ("Use::", "Parameters:", "Samples", "Errors:"):
            assert part in module.__doc__, (name, part)
        own = row.params.model_fields.keys() - workloads_base.Params.model_fields.keys()
        for parameter in own:
            assert f"``{parameter}``" in module.__doc__ or f"{parameter} =" in module.__doc__, (name, parameter)
        assert {row.main, *row.paths} - {""} <= own


def test_samples_are_plain_json() -> None:
    result = Result("fio", samples=[Sample("iops", 1.0, "1/s", "read")], files={"a": b"\0"})
    assert json.loads(json.dumps(result.to_json()))["samples"] == [
        {"metric": "iops", "value": 1.0, "unit": "1/s", "op": "read"}
    ]
