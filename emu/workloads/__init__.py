"""Workloads: what runs inside a guest. To add one, write its module and add its row here."""

from __future__ import annotations

from emu.workloads import fio, fs, script, verify
from emu.workloads.base import Context, Params, Result, Sample, Workload, WorkloadError

WORKLOADS: dict[str, Workload] = {
    "fio": fio.WORKLOAD,
    "verify": verify.WORKLOAD,
    "fs": fs.WORKLOAD,
    "script": script.WORKLOAD,
}

__all__ = ["WORKLOADS", "Context", "Params", "Result", "Sample", "Workload", "WorkloadError"]
