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
for the job: cpu_user, cpu_system (% of one CPU, by fio's own account), errors. With several jobs in a job
file, the operation is "JOB:read" and so on.

Limits: the device is written without asking when the job writes.

Errors: an I/O error, a verify error and a job that fio refuses make the workload fail, with fio's words.

Source: fio's manual, "JSON+ output" and "Job file parameters"; tried with fio 3.39.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from emu.units import DurationSeconds, Size
from emu.workloads.base import Context, Params, Result, Sample, Workload, WorkloadError, read_user_file, tail

_DONE = re.compile(rb"\[(\d+(?:\.\d+)?)%\]")
_BLOCK_SIZES = r"^\d+[kKmM]?(-\d+[kKmM]?)?$"
_MARGIN_S = 60.0  # beyond the runtime: fio's start, laying out, and its end
_WITHOUT_RUNTIME_S = 900.0


class FioParams(Params):
    rw: Literal["read", "write", "randread", "randwrite", "rw", "randrw", "trim", "randtrim"] = "randread"
    bs: str = Field(default="4k", pattern=_BLOCK_SIZES)
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
        report = await run_fio(context, [job], params.timeout or _WITHOUT_RUNTIME_S)
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
        report = await run_fio(context, arguments, params.timeout or timeout_s)
    return Result(
        type=params.type,
        samples=samples_of(report),
        files={"fio.json": json.dumps(report, indent=1).encode()},
    )


async def run_fio(context: Context, arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Runs fio in the guest and returns its JSON report. WorkloadError when fio or the device says no."""

    def follow(stream: int, data: bytes) -> None:
        percentages = _DONE.findall(data)
        if percentages:
            context.done(float(percentages[-1]) / 100)

    output = f"/tmp/fio-{context.device.name}.json"  # workloads on other devices may run in the same guest
    argv = [
        "env", f"DEVICE={context.device.path}",
        "fio", f"--output={output}", "--output-format=json", "--eta=always", "--eta-newline=1", *arguments,
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
    """Samples of every job in fio's JSON report."""
    samples: list[Sample] = []
    several = len({job["jobname"] for job in report["jobs"]}) > 1
    for job in report["jobs"]:
        prefix = f"{job['jobname']}:" if several else ""
        for op in ("read", "write", "trim"):
            if job[op]["total_ios"]:
                samples += _direction(job[op], prefix + op)
        label = job["jobname"] if several else ""
        samples += [
            Sample("cpu_user", job["usr_cpu"], "%", label),
            Sample("cpu_system", job["sys_cpu"], "%", label),
            Sample("errors", job.get("total_err", 0), "1", label),
        ]
    return samples


def _direction(data: dict[str, Any], op: str) -> list[Sample]:
    samples = [
        Sample("ios", data["total_ios"], "1", op),
        Sample("iops", data["iops"], "1/s", op),
        Sample("bw_bytes", data["bw_bytes"], "B/s", op),
    ]
    latency = data.get("clat_ns", {})
    if "mean" in latency:
        samples += [
            Sample("clat_mean", latency["mean"], "ns", op),
            Sample("clat_max", latency["max"], "ns", op),
        ]
    for name, key in (
        ("p50", "50.000000"),
        ("p90", "90.000000"),
        ("p99", "99.000000"),
        ("p99.9", "99.900000"),
    ):
        if key in latency.get("percentile", {}):
            samples.append(Sample(f"clat_{name}", latency["percentile"][key], "ns", op))
    return samples


def _with_device(job: bytes) -> bytes:
    if re.search(rb"^\s*(filename|directory)\s*=", job, re.MULTILINE):
        return job
    return b"[global]\nfilename=${DEVICE}\n" + job


def _ms(duration_s: float) -> str:
    return f"{round(duration_s * 1000)}ms"


WORKLOAD = Workload(FioParams, run, main="rw", paths=("job",))
