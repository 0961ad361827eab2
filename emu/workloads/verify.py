"""verify: write everything with checksums, read it back, reset the controller, read it back again.

Use::

    [[workload]]
    type = "verify"

Parameters: ``block_sizes`` (fio's ranges; default 4 KiB, and 512 B to 256 KiB mixed), ``depths`` (queue
depths; default 1, 8, 64), ``jobs`` (threads at once, so that several queues are used; default 2), ``size``
(bytes that each job writes in each pass; default 8M), ``reset`` (reset the controller and read everything
again; default true), ``ioengine``, ``timeout`` (of one pass).

There is one pass for every pair of block size and depth, and each pass and job has a region of its own, so
that after the reset all of them can be read again.

Samples: passes, bytes_verified (B); per operation ios, iops (1/s) and bw_bytes (B/s) over all passes, and of the
passes the worst clat_p50 and clat_p99 (ns): they differ by design, so their figures tell no more than that.

Limits: the regions must fit: block sizes x depths x jobs x size <= size of the namespace. Block sizes below
the namespace's are raised to it. The namespace's data is lost.

Errors: wrong data or an I/O error fails the workload with fio's words.

Source: fio's manual, "Verification" (verify=crc32c, verify_only).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpu.errors import EmuError
from emu.units import DurationSeconds, Size, format_size, parse_size
from emu.workloads.base import BlockDevice, Context, Params, Result, Sample, Workload
from emu.workloads.fio import BLOCK_SIZES, run_fio, samples_of

BlockSizes = Annotated[str, Field(pattern=BLOCK_SIZES)]
Depth = Annotated[int, Field(ge=1, le=1024)]


class VerifyParams(Params):
    block_sizes: tuple[BlockSizes, ...] = Field(default=("4k", "512-256k"), min_length=1)
    depths: tuple[Depth, ...] = Field(default=(1, 8, 64), min_length=1)
    jobs: int = Field(default=2, ge=1, le=64)
    size: Size = 8 << 20
    reset: bool = True
    ioengine: Literal["io_uring", "libaio", "psync", "pvsync2"] = "io_uring"
    timeout: DurationSeconds = 300.0


async def run(params: VerifyParams, context: Context) -> Result:
    passes = plan(params, context.device)
    rounds = 2 if params.reset else 1
    samples: list[Sample] = []
    for number, arguments in enumerate(passes):
        report = await run_fio(context, [*arguments, "--do_verify=1"], params.timeout)
        samples += samples_of(report)
        context.done((number + 1) / len(passes) / rounds)
    if params.reset:
        await context.run(["nvme", "reset", f"/dev/{context.device.controller}"], timeout_s=30)
        for number, arguments in enumerate(passes):
            report = await run_fio(context, [*arguments, "--verify_only=1"], params.timeout)
            samples += [sample for sample in samples_of(report) if sample.op == "read"]  # its writes are none
            context.done(0.5 + (number + 1) / len(passes) / 2)
    return Result(
        type=params.type,
        samples=[
            Sample("passes", len(passes), "1"),
            Sample("bytes_verified", len(passes) * params.jobs * params.size * rounds, "B"),
            *_summary(samples),
        ],
        detail={"resets": int(params.reset), "passes": [" ".join(arguments) for arguments in passes]},
    )


def plan(params: VerifyParams, device: BlockDevice) -> list[list[str]]:
    """fio's arguments for every pass. EmuError when the regions do not fit the device."""
    pairs = [(sizes, depth) for sizes in params.block_sizes for depth in params.depths]
    pass_bytes = params.jobs * params.size
    need_bytes = len(pairs) * pass_bytes
    if need_bytes > device.size:
        raise EmuError(
            f"verify needs {format_size(need_bytes)} and {device.path} has {format_size(device.size)}",
            "make the namespace bigger, or lower the workload's size, jobs, depths or block_sizes",
        )
    return [
        [
            "--name=verify", f"--filename={device.path}", "--rw=randwrite", f"--ioengine={params.ioengine}",
            "--direct=1", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--randseed=1",
            f"--bsrange={_range(sizes, device.block_size)}", f"--iodepth={depth}", f"--numjobs={params.jobs}",
            f"--size={params.size}", f"--offset={number * pass_bytes}", f"--offset_increment={params.size}",
            "--group_reporting",
        ]
        for number, (sizes, depth) in enumerate(pairs)
    ]  # fmt: skip


def _range(sizes: str, block_size: int) -> str:
    smallest, _, largest = sizes.partition("-")
    low = max(parse_size(smallest), block_size)
    return f"{low}-{max(parse_size(largest or smallest), low)}"


def _summary(samples: list[Sample]) -> list[Sample]:
    """Of each operation: its I/Os and bytes over the time that they took, the worst percentiles of a pass."""
    summary: list[Sample] = []
    for op in ("write", "read"):
        found = {
            metric: [sample.value for sample in samples if (sample.metric, sample.op) == (metric, op)]
            for metric in ("ios", "iops", "bw_bytes", "clat_p50", "clat_p99")
        }
        seconds = [ios / iops for ios, iops in zip(found["ios"], found["iops"], strict=True) if iops]
        if sum(seconds):
            total_bytes = sum(rate * time_s for rate, time_s in zip(found["bw_bytes"], seconds, strict=True))
            summary += [
                Sample("ios", sum(found["ios"]), "1", op),
                Sample("iops", sum(found["ios"]) / sum(seconds), "1/s", op),
                Sample("bw_bytes", total_bytes / sum(seconds), "B/s", op),
                *(
                    Sample(metric, max(found[metric]), "ns", op)
                    for metric in ("clat_p50", "clat_p99")
                    if found[metric]
                ),
            ]
    return summary


WORKLOAD = Workload(VerifyParams, run, check=plan)
