"""fio: any fio job against one namespace.

Use::

    [[workload]]
    type = "fio"
    rw = "randread"
    iodepth = 32
    runtime = "10s"

or with a job file of your own, ``job = "my.fio"``: ``${DEVICE}`` in it is the namespace's device, and a job
file that names neither ``filename`` nor ``directory`` gets it as its ``filename``.

Parameters: ``rw`` (fio's names), ``bs`` ("4k", a range "512-64k"), ``iodepth``, ``numjobs``, ``size`` (of the
region; default the whole namespace), ``runtime`` and ``ramp`` (durations; default runtime 10s unless ``size``
is given), ``ioengine``, ``rate_iops``, ``job``, ``timeout``.

Samples per operation: iops (1/s), bw_bytes (B/s), ios, clat_mean, clat_p50, p90, p99, p99.9, clat_max (ns);
for the job: cpu_user, cpu_system (% of one CPU, by fio's own account), errors. Threads of one job are one job. With
several jobs in a job file, the operation is "JOB:read" and so on, and "read" is all of them together, without iops
and bw_bytes where they ran one after the other. Beside the samples: the histogram of completion latencies of each
operation, from which the percentiles are, and IOPS and bandwidth over time.

Limits: the device is written without asking when the job writes.

Errors: an I/O error, a verify error and a job that fio refuses make the workload fail, with fio's words.

Source: fio's manual, "JSON+ output", "Log File Formats" and "Job file parameters"; tried with fio 3.39.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from dpu.errors import EmuError
from emu.units import DurationSeconds, Size, format_size, parse_size
from emu.workloads.base import (
    BlockDevice,
    Context,
    Params,
    Result,
    Sample,
    Workload,
    WorkloadError,
    read_user_file,
    tail,
)
from emu.workloads.measures import PERCENTILES, Histogram, Series, percentile_name

_DONE = re.compile(rb"\[(\d+(?:\.\d+)?)%\]")
BLOCK_SIZES = r"^[1-9]\d*[kKmM]?(-[1-9]\d*[kKmM]?)?$"
_DIRECTIONS = ("read", "write", "trim")  # by fio's numbers
_WINDOW_MS = 500  # of the time series, at least
_POINTS = 240  # of a time series, about
_MARGIN_S = 60.0  # beyond the runtime: fio's start, laying out, and its end
_WITHOUT_RUNTIME_S = 900.0


class FioParams(Params):
    rw: Literal["read", "write", "randread", "randwrite", "rw", "randrw", "trim", "randtrim"] = "randread"
    bs: str = Field(default="4k", pattern=BLOCK_SIZES)
    iodepth: int = Field(default=1, ge=1, le=4096)
    numjobs: int = Field(default=1, ge=1, le=256)
    size: Size | None = None
    runtime: DurationSeconds | None = None
    ramp: DurationSeconds | None = None
    ioengine: Literal["io_uring", "libaio", "psync", "pvsync2"] = "io_uring"
    rate_iops: int | None = Field(default=None, ge=1)
    job: str | None = None
    timeout: DurationSeconds | None = None

    @model_validator(mode="after")
    def _job_stands_alone(self) -> FioParams:
        others = self.model_fields_set & {
            "rw", "bs", "iodepth", "numjobs", "size", "runtime", "ramp", "ioengine", "rate_iops",
        }  # fmt: skip
        if self.job is not None and others:
            raise ValueError(f"job = {self.job!r} has its own parameters; take out {', '.join(sorted(others))}")
        return self


async def run(params: FioParams, context: Context) -> Result:
    path = context.device.path
    if params.job is not None:
        job = f"/tmp/user-{context.device.name}.fio"
        await context.guest.write_file(job, _with_device(read_user_file(params.job)))
        arguments, window_ms = [job], _WINDOW_MS
        timeout_s = _WITHOUT_RUNTIME_S
    else:
        runtime_s = params.runtime or (10.0 if params.size is None else None)
        arguments = [
            "--name=job", f"--filename={path}", f"--rw={params.rw}", f"--bs={params.bs}",
            f"--iodepth={params.iodepth}", f"--numjobs={params.numjobs}", f"--ioengine={params.ioengine}",
            "--direct=1", "--group_reporting",
        ]  # fmt: skip
        if params.size is not None:
            arguments.append(f"--size={params.size}")
        if runtime_s is not None:
            arguments += ["--time_based", f"--runtime={_ms(runtime_s)}"]
        if params.ramp is not None:
            arguments.append(f"--ramp_time={_ms(params.ramp)}")
        if params.rate_iops is not None:
            arguments.append(f"--rate_iops={params.rate_iops}")
        timeout_s = (runtime_s or _WITHOUT_RUNTIME_S) + (params.ramp or 0.0) + _MARGIN_S
        window_ms = max(_WINDOW_MS, round((runtime_s or 0.0) * 1000 / _POINTS))
    report, series = await _run_logged(context, arguments, params.timeout or timeout_s, window_ms)
    return Result(
        type=params.type,
        samples=samples_of(report),
        histograms=histograms_of(report),
        series=series,
        files={"fio.json": json.dumps(report, separators=(",", ":")).encode()},
    )


async def _run_logged(
    context: Context, arguments: Sequence[str], timeout_s: float, window_ms: int
) -> tuple[dict[str, Any], list[Series]]:
    """:func:`run_fio` with a log of IOPS and bandwidth. A job file may keep its logs for itself: then none."""
    prefix = f"/tmp/fio-{context.device.name}"
    logs = [f"{prefix}_iops.log", f"{prefix}_bw.log"]
    options = [
        f"--write_iops_log={prefix}", f"--write_bw_log={prefix}", f"--log_avg_msec={window_ms}",
        "--log_unix_epoch=1",  # jobs that follow one another do not all begin at 0
        "--per_job_logs=0",
    ]  # fmt: skip
    await context.guest.exec(["rm", "-f", *logs], timeout_s=30)  # jobs append to the log that they share
    report = await run_fio(context, [*options, *arguments], timeout_s)
    for given in (report.get("global options", {}), *(job.get("job options", {}) for job in report["jobs"])):
        window_ms = int(given.get("log_avg_msec", window_ms))
    texts = [await context.guest.exec(["cat", log], timeout_s=30) for log in logs]
    iops, bandwidth = (text.stdout.decode(errors="replace") if text.code == 0 else "" for text in texts)
    return report, [
        *series_of(iops, "iops", "1/s", window_ms),
        *series_of(bandwidth, "bw_bytes", "B/s", window_ms, factor=1024),
    ]


def series_of(log: str, metric: str, unit: str, window_ms: int, factor: int = 1) -> list[Series]:
    """What fio's log says of each operation, summed over jobs, ``factor`` times its values.

    A row is (end of the window in ms, value, direction, ...); each job has one for each window.
    """
    rows = [line.split(",")[:3] for line in log.splitlines() if line.count(",") >= 2]
    if not rows or window_ms <= 0:
        return []
    begin_ms = min(int(at) for at, _, _ in rows) - window_ms
    sums: dict[str, Counter[int]] = {}
    for at, value, direction in rows:
        window = round((int(at) - begin_ms) / window_ms)
        sums.setdefault(_DIRECTIONS[int(direction)], Counter())[window] += int(value) * factor
    return [
        Series(metric, unit, op, tuple((window * window_ms / 1000, values[window]) for window in sorted(values)))
        for op, values in sorted(sums.items())
    ]


async def run_fio(context: Context, arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Runs fio in the guest and returns its JSON report. WorkloadError when fio or the device says no."""

    def follow(stream: int, data: bytes) -> None:
        percentages = _DONE.findall(data)
        if percentages:
            context.done(float(percentages[-1]) / 100)

    output = f"/tmp/fio-{context.device.name}.json"  # workloads on other devices may run in the same guest
    argv = [
        "env", f"DEVICE={context.device.path}",
        "fio", f"--output={output}", "--output-format=json+", "--eta=always", "--eta-newline=1", *arguments,
    ]  # fmt: skip
    result = await context.guest.exec(argv, timeout_s=timeout_s, on_output=follow)
    report = parse_report(await context.guest.read_file(output)) if result.code == 0 else None
    if report is None:
        complaint = result.stderr or await _output_so_far(context, output) or result.stdout
        raise WorkloadError(f"fio ended with {result.code}: {tail(complaint)}")
    for job in report["jobs"]:
        if job.get("error") or job.get("total_err"):
            raise WorkloadError(f"fio job {job['jobname']} met error {job.get('error') or job['total_err']}")
    return report


async def _output_so_far(context: Context, output: str) -> bytes:
    result = await context.guest.exec(["cat", output], timeout_s=30)
    text: bytes = result.stdout
    return text[: text.find(b"{")] if b"{" in text else text


def parse_report(output: bytes) -> dict[str, Any]:
    """fio's JSON; what it prints before the opening brace are warnings."""
    start = output.find(b"{")
    if start < 0:
        raise WorkloadError(f"fio wrote no report: {tail(output)}")
    try:
        report: dict[str, Any] = json.loads(output[start:])
    except ValueError as error:
        raise WorkloadError(f"fio's report is not JSON: {error}") from error
    return report


def samples_of(report: dict[str, Any]) -> list[Sample]:
    """Samples of every job in fio's JSON report, and of all jobs together."""
    samples: list[Sample] = []
    groups = _groups(report)
    for label, jobs in groups:
        for op in _DIRECTIONS:
            parts = [job[op] for job in jobs if job[op]["total_ios"]]
            if parts:
                at_once = len({job["groupid"] for job in jobs if "groupid" in job}) <= 1
                samples += _direction(parts, _operation(label, op), at_once)
        if label or len(groups) == 1:
            samples += [
                Sample("cpu_user", _mean([job["usr_cpu"] for job in jobs]), "%", label),
                Sample("cpu_system", _mean([job["sys_cpu"] for job in jobs]), "%", label),
                Sample("errors", sum(job.get("total_err", 0) for job in jobs), "1", label),
            ]
    return samples


def histograms_of(report: dict[str, Any]) -> list[Histogram]:
    """The completion latencies of every job, and of all jobs together, where fio kept them."""
    return [
        merged
        for label, jobs in _groups(report)
        for op in _DIRECTIONS
        if (merged := _merged([job[op] for job in jobs], _operation(label, op))) is not None
    ]


def _groups(report: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(name, its threads' reports) of each job; then, if there are several, ("", all)."""
    jobs: dict[str, list[dict[str, Any]]] = {}
    for job in report["jobs"]:
        jobs.setdefault(job["jobname"], []).append(job)
    every = ("", list(report["jobs"]))
    return [*jobs.items(), every] if len(jobs) > 1 else [every]


def _operation(label: str, op: str) -> str:
    return f"{label}:{op}" if label else op


def _merged(parts: Sequence[dict[str, Any]], op: str) -> Histogram | None:
    """None where there is nothing, or a part that kept no histogram."""
    used = [part["clat_ns"] for part in parts if part["total_ios"]]
    if not used or not all(one.get("bins") for one in used):
        return None
    return Histogram.merge(
        [Histogram.of("clat", "ns", op, {int(ns): count for ns, count in one["bins"].items()}) for one in used]
    )


def _direction(parts: Sequence[dict[str, Any]], op: str, at_once: bool) -> list[Sample]:
    ios = sum(part["total_ios"] for part in parts)
    samples = [Sample("ios", ios, "1", op)]
    if len(parts) == 1:
        samples += [Sample("iops", parts[0]["iops"], "1/s", op), Sample("bw_bytes", parts[0]["bw_bytes"], "B/s", op)]
    elif at_once and (runtime_ms := max(part["runtime"] for part in parts)):  # as fio's group_reporting does
        total_bytes = sum(part["io_bytes"] for part in parts)
        samples += [
            Sample("iops", ios * 1000 / runtime_ms, "1/s", op),
            Sample("bw_bytes", total_bytes * 1000 / runtime_ms, "B/s", op),
        ]
    latencies = [part["clat_ns"] for part in parts if "mean" in part.get("clat_ns", {})]
    if latencies:
        mean = sum(one["mean"] * one["N"] for one in latencies) / max(sum(one["N"] for one in latencies), 1)
        samples += [
            Sample("clat_mean", mean, "ns", op),
            Sample("clat_max", max(one["max"] for one in latencies), "ns", op),
        ]
    histogram = _merged(parts, op)
    if histogram is not None:
        samples += [Sample(f"clat_{percentile_name(p)}", histogram.percentile(p), "ns", op) for p in PERCENTILES]
    return samples


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _with_device(job: bytes) -> bytes:
    if re.search(rb"^\s*(filename|directory)\s*=", job, re.MULTILINE):
        return job
    return b"[global]\nfilename=${DEVICE}\n" + job


def _ms(duration_s: float) -> str:
    return f"{round(duration_s * 1000)}ms"


def check(params: FioParams, device: BlockDevice) -> None:
    """EmuError for block sizes that the device refuses or that do not fit the region."""
    if params.job is not None:  # that is fio's to judge
        return
    smallest, *rest = map(parse_size, params.bs.split("-"))  # a range has multiples of its smallest
    if smallest % device.block_size:
        raise EmuError(
            f"bs {params.bs} is not a multiple of the block size of {device.path}, {device.block_size} bytes",
            f"write bs = {max(1, smallest // device.block_size) * device.block_size} or a multiple of it",
        )
    region = min(params.size or device.size, device.size)
    if max([smallest, *rest]) > region:
        raise EmuError(f"bs {params.bs} is larger than the region, {format_size(region)}", "make bs or that fit")


WORKLOAD = Workload(FioParams, run, main="rw", paths=("job",), check=check)
