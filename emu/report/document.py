"""The report as a value, and as files."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpu.errors import EmuError
from emu.paths import write_whole
from emu.report.html import page
from emu.workloads import Result, Sample
from emu.workloads.measures import PERCENTILES, Histogram, merge_all, percentile_name

SCHEMA = 1
REPORT = "report.json"
PAGE = "report.html"
WORKLOADS = "workloads"
LOGS = "lab"


@dataclass
class VmReport:
    restored: bool


@dataclass
class DpuReport:
    worker_restarts: int | None = None
    stats: Any = None
    error: str = ""


@dataclass
class Report:
    """See the package's docstring for the meaning of each field."""

    name: str
    scenario: dict[str, Any]
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    start_seconds: float = 0.0
    seconds: float = 0.0
    error: str = ""
    host: dict[str, Any] = field(default_factory=dict)
    vms: dict[str, VmReport] = field(default_factory=dict)
    dpus: dict[str, DpuReport] = field(default_factory=dict)
    fabric: dict[str, Any] | None = None
    workloads: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.error and all(result.ok for result in self.workloads)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "name": self.name,
            "started": self.started.isoformat(timespec="seconds"),
            "start_seconds": round(self.start_seconds, 3),
            "seconds": round(self.seconds, 3),
            "ok": self.ok,
            "error": self.error,
            "host": self.host,
            "scenario": self.scenario,
            "vms": {name: asdict(vm) for name, vm in self.vms.items()},
            "dpus": {name: asdict(dpu) for name, dpu in self.dpus.items()},
            **({} if self.fabric is None else {"fabric": self.fabric}),
            "workloads": [result.to_json() for result in self.workloads],
            "merged": self.merged(),
            "notes": self.notes,
        }

    def merged(self) -> list[dict[str, Any]]:
        """The distributions of workloads of one name on several devices or VMs together."""
        groups: dict[str, list[Result]] = {}
        for result in self.workloads:
            if result.histograms:
                groups.setdefault(result.name, []).append(result)
        return [
            {
                "name": name,
                "on": [f"{result.vm} {result.device}".strip() for result in results],
                "samples": [asdict(sample) for one in together for sample in _samples(one)],
                "histograms": [asdict(one) for one in together],
            }
            for name, results in groups.items()
            if len(results) > 1
            for together in [merge_all(one for result in results for one in result.histograms)]
        ]

    def write(self, folder: Path) -> Path:
        """Writes ``folder``/report.json and report.html, each whole or not at all, and the workloads' files.

        Returns the path of the JSON.
        """
        document = self.to_json()
        try:
            for number, result in enumerate(self.workloads, 1):
                below = folder / WORKLOADS / f"{number:02}-{_file_name(result.name)}"
                for name, content in result.files.items():
                    below.mkdir(parents=True, exist_ok=True)
                    (below / name).write_bytes(content)
            folder.mkdir(parents=True, exist_ok=True)
            links = [str(path.relative_to(folder)) for below in (WORKLOADS, LOGS) for path in _files(folder / below)]
            for name, text in ((PAGE, page(document, links)), (REPORT, json.dumps(document, indent=2) + "\n")):
                write_whole(folder / name, text)
        except OSError as error:
            raise EmuError(
                f"cannot write the report below {folder}: {error.strerror}", "choose another --out"
            ) from error
        return folder / REPORT


def _file_name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9._-]+", "-", name).strip("-.") or "workload"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _samples(histogram: Histogram) -> list[Sample]:
    metric, unit, op = histogram.metric, histogram.unit, histogram.op
    return [
        Sample("ios", histogram.count, "1", op),
        *(Sample(f"{metric}_{percentile_name(p)}", histogram.percentile(p), unit, op) for p in PERCENTILES),
    ]
