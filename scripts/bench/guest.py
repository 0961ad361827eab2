"""Our file back end against QEMU's own NVMe controller: same guest, same file system, same cache mode, pairs.

    scripts/bench/guest [--quick] [--pairs N] [--seconds S] [--job NAME ...] [--keep-going]

One VM has three controllers: ours on a file (dpud, O_DIRECT), QEMU's ``nvme`` on another file of the same size on
the same file system (cache.direct=on, aio=io_uring, else native, else threads), and ours on memory. Each job runs on
them one after the other, so the figures of a pair are seconds apart; the order turns round with every pair. The
figures are medians over pairs, the ratios medians of the pairs' own ratios.

CPU time per I/O is taken from /proc/PID/stat of QEMU and of dpud with its workers (the idle standby included),
between two looks at the guest's own I/O counters in the middle of the job, so fio's start is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qemu.qmp import QMPError

from emu.daemon import ControllerConfig, Dpu, DpuConfig, NamespaceConfig
from emu.lab import Lab, LabConfig, prepare
from emu.paths import cache_dir
from emu.process import tree_cpu_s
from emu.progress import make
from emu.vm import Attached, Vm, VmConfig
from emu.workloads.fio import parse_report
from scripts.bench import common

BYTES = 512 << 20
BLOCK = 512
QEMU_AIO = ("io_uring", "native", "threads")  # the first one that this QEMU and kernel have
OUTPUT = "/tmp/bench.json"


@dataclass(frozen=True)
class Job:
    rw: str
    bs: str
    depth: int

    @property
    def name(self) -> str:
        return f"{self.rw} {self.bs} QD{self.depth}"


JOBS = [
    *(Job(rw, "4k", depth) for depth in (32, 1) for rw in ("randread", "randwrite")),
    *(Job(rw, "128k", depth) for depth in (8, 32) for rw in ("read", "write")),
]


@dataclass(frozen=True)
class Device:
    """``side``: "ours", "qemu" or "memory"; ``name`` as in the guest's /dev."""

    side: str
    name: str


@dataclass(frozen=True)
class Sample:
    iops: float
    daemon_us: float  # CPU time per I/O
    qemu_us: float
    p50_us: float
    p99_us: float

    @property
    def total_us(self) -> float:
        return self.daemon_us + self.qemu_us


def write_file(path: Path) -> None:
    """A file whose blocks are all there, with other content in each, out of the page cache."""
    block = os.urandom(1 << 20)
    with path.open("wb", buffering=0) as file:
        for number in range(BYTES >> 20):
            file.write(number.to_bytes(8, "little") + block[8:])
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def plug_qemu_nvme(vm: Vm, path: Path, report: common.Report) -> Attached:
    """QEMU's own controller on ``path``, past the page cache."""
    for aio in QEMU_AIO:
        node: dict[str, Any] = {
            "driver": "raw",
            "node-name": f"bench-{aio}",
            "file": {"driver": "file", "filename": str(path), "aio": aio, "cache": {"direct": True}},
        }
        try:
            await vm.qmp.execute("blockdev-add", node)
        except QMPError as error:
            report.notes.append(f"QEMU has no aio={aio} here: {error}")
            continue
        port = len(vm.attached)
        device = {
            "driver": "nvme",
            "id": "builtin",
            "bus": f"rp{port}",
            "drive": node["node-name"],
            "serial": "builtin",
        }
        report.results["qemu_side"] = {"device": device, "blockdev": node, "cache": "none (O_DIRECT)", "aio": aio}
        return await vm.plug(device, port)
    raise AssertionError("QEMU takes no aio mode")


def our_side(dpu: Dpu, paths: dict[str, Path]) -> dict[str, Any]:
    """How the daemon has opened its file, by the kernel's own word."""
    found = {}
    for pid in _tree(dpu.pid):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if fd.readlink() == paths["ours"]:
                    flags = int(Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text().split("flags:")[1].split()[0], 8)
                    found[f"{pid}/{fd.name}"] = "O_DIRECT" if flags & os.O_DIRECT else "page cache"
            except OSError:
                continue
    log = dpu.log.read_text(errors="replace")
    engine = "threads" if "file I/O goes through threads" in log else "io_uring"
    return {
        "aio": engine,
        "open_files": found,
        "cache": "none (O_DIRECT)" if "O_DIRECT" in found.values() else "page cache",
    }


def _tree(root: int) -> list[int]:
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            todo += [int(word) for word in task.read_text().split()]
    return found


async def _ios(vm: Vm, name: str) -> int:
    """I/Os that the guest's kernel has completed on a device (Documentation/block/stat.rst)."""
    words = (await vm.guest.read_file(f"/sys/block/{name}/stat")).split()
    return int(words[0]) + int(words[4])


async def run_job(vm: Vm, dpu: Dpu, device: Device, job: Job, seconds: float) -> Sample:
    argv = [
        "fio", "--name=job", f"--filename=/dev/{device.name}", f"--rw={job.rw}", f"--bs={job.bs}",
        f"--iodepth={job.depth}", "--ioengine=io_uring", "--direct=1", "--time_based", f"--runtime={seconds:g}",
        "--ramp_time=300ms", "--randrepeat=0", "--norandommap", f"--output={OUTPUT}", "--output-format=json",
    ]  # fmt: skip
    before = await _ios(vm, device.name)
    running = asyncio.ensure_future(vm.exec(argv, timeout_s=seconds + 60))
    while not running.done() and await _ios(vm, device.name) < before + 100:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    begin = (await _ios(vm, device.name), tree_cpu_s(dpu.pid), vm.process.cpu_s())
    await asyncio.sleep(seconds * 0.7)
    end = (await _ios(vm, device.name), tree_cpu_s(dpu.pid), vm.process.cpu_s())
    result = await running
    assert result.code == 0, result.stderr.decode(errors="replace")
    data = parse_report(await vm.guest.read_file(OUTPUT))["jobs"][0]
    assert not data["error"], f"{job.name} on {device.side}: error {data['error']}"
    direction = data["write" if "write" in job.rw else "read"]
    count = max(end[0] - begin[0], 1)
    latency = direction["clat_ns"].get("percentile", {})
    return Sample(
        iops=direction["iops"],
        daemon_us=(end[1] - begin[1]) / count * 1e6,
        qemu_us=(end[2] - begin[2]) / count * 1e6,
        p50_us=latency.get("50.000000", 0) / 1000,
        p99_us=latency.get("99.000000", 0) / 1000,
    )


def summary(job: Job, pairs: list[dict[str, Sample]], loads: list[float]) -> dict[str, Any]:
    """Medians of each side, and of the ratios of each pair."""
    sides = {}
    for side in pairs[0]:
        samples = [pair[side] for pair in pairs]
        sides[side] = {
            "iops": common.spread([s.iops for s in samples], 0),
            "daemon_cpu_us": common.spread([s.daemon_us for s in samples], 2),
            "qemu_cpu_us": common.spread([s.qemu_us for s in samples], 2),
            "p50_us": common.spread([s.p50_us for s in samples], 1),
            "p99_us": common.spread([s.p99_us for s in samples], 1),
        }
    return {
        "sides": sides,
        "iops_ratio": common.spread([pair["ours"].iops / pair["qemu"].iops for pair in pairs]),
        "cpu_ratio": common.spread([pair["ours"].total_us / max(pair["qemu"].qemu_us, 0.01) for pair in pairs]),
        "memory_iops_ratio": common.spread(
            [p["memory"].iops / p["qemu"].iops for p in pairs if "memory" in p] or [0]
        ),
        "loads": loads,
    }


def budgets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Issue 2, section 9.7."""
    found = []
    for name, result in results.items():
        if " 4k " not in name:
            continue
        iops, cpu = result["iops_ratio"]["median"], result["cpu_ratio"]["median"]
        floor = 1.0 if name.endswith("QD32") else 0.85
        found.append({"job": name, "iops_ratio": iops, "min": floor, "met": iops >= floor})
        if name.endswith("QD32"):
            found.append({"job": name, "cpu_ratio": cpu, "max": 1.0, "met": cpu <= 1.0})
    return found


async def bench(arguments: argparse.Namespace, report: common.Report) -> None:
    jobs = [job for job in JOBS if not arguments.job or job.name in arguments.job]
    folder = cache_dir("bench")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {side: folder / f"guest-{side}-{os.getpid()}.raw" for side in ("ours", "qemu")}
    progress = make()
    try:
        for path in paths.values():
            progress.step(f"Writing {path.name}")
            write_file(path)
        ours = NamespaceConfig("file", BYTES, BLOCK, paths["ours"])
        card = DpuConfig(
            "card",
            (
                ControllerConfig("file", (ours,)),
                ControllerConfig("memory", (NamespaceConfig("memory", BYTES, BLOCK),)),
            ),
        )
        guest = VmConfig("vm", arguments.vcpus, 512, (("card", "file"), ("card", "memory")))
        config = LabConfig("bench-guest", (guest,), (card,), accel=arguments.accel)
        platform = prepare(config, progress)
        report.stamp(accel=platform.accel, qemu=platform.qemu, image_digest=platform.image.digest)
        async with Lab(config, platform, progress) as lab:
            progress.close()
            await measure(lab, jobs, paths, arguments, report)
    finally:
        progress.close()
        for path in paths.values():
            path.unlink(missing_ok=True)


async def measure(
    lab: Lab, jobs: list[Job], paths: dict[str, Path], arguments: argparse.Namespace, report: common.Report
) -> None:
    vm, dpu = lab.vms["vm"], lab.dpus["card"]
    builtin = await plug_qemu_nvme(vm, paths["qemu"], report)
    report.results["our_side"] = our_side(dpu, paths)
    devices = [
        Device("ours", vm.device("card.file").namespaces[0]),
        Device("qemu", builtin.namespaces[0]),
        Device("memory", vm.device("card.memory").namespaces[0]),
    ]
    for device in devices:  # the memory namespace gets its pages, the guest its code
        fill = Job("write", "128k", 8)
        await run_job(vm, dpu, device, fill, 1.0)
    found: dict[str, Any] = {}
    report.results["jobs"] = found
    for job in jobs:
        pairs, loads = [], []
        for number in range(arguments.pairs):
            order = devices if number % 2 else devices[::-1]
            pairs.append({d.side: await run_job(vm, dpu, d, job, arguments.seconds) for d in order})
            loads.append(common.load())
        found[job.name] = summary(job, pairs, loads)
        show(job, found[job.name])
        report.results["budgets"] = budgets(found)
        report.save()


def show(job: Job, result: dict[str, Any]) -> None:
    sides = result["sides"]
    text = "  ".join(
        f"{side} {sides[side]['iops']['median']:.0f}/s cpu "
        f"{sides[side]['daemon_cpu_us']['median']:.1f}+{sides[side]['qemu_cpu_us']['median']:.1f} us"
        for side in sides
    )
    ratios = f"iops x{result['iops_ratio']['median']:.2f}, cpu x{result['cpu_ratio']['median']:.2f}"
    print(f"{job.name:20} {ratios}  ({text})  load {statistics.median(result['loads']):.1f}", flush=True)


def main() -> None:
    parser = common.parser(__doc__, "guest")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--vcpus", type=int, default=1)
    parser.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto")
    parser.add_argument("--job", action="append", choices=[job.name for job in JOBS], help="only this one")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.seconds = 1, 1.0
        arguments.job = arguments.job or [JOBS[0].name]
    report = common.Report("guest", arguments)
    asyncio.run(bench(arguments, report))
    report.write()
    print(json.dumps(report.results["budgets"], indent=1))


if __name__ == "__main__":
    main()
