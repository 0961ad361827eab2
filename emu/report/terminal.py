"""The report as a table for a terminal; made from the JSON, as the page is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from emu.units import format_value, plural

Object = Mapping[str, Any]

_COLUMNS = ("iops", "bw_bytes", "clat_p50", "clat_p99")
_UNSHOWN = {"cpu_user", "cpu_system", "clat_mean", "clat_max", "clat_p90", "clat_p99.9", "ios"}


def print_report(report: Object, console: Console) -> None:
    """One row for every operation of every workload of ``Report.to_json()``, and what the figures are worth."""
    table = Table(title=escape(report["name"]), title_justify="left")
    for name in ("workload", "on", "operation"):
        table.add_column(name, overflow="fold")
    for name in ("IOPS", "bandwidth", "p50", "p99"):
        table.add_column(name, justify="right")
    table.add_column("result", overflow="fold")
    for result in report["workloads"]:
        for row in _rows(result):
            table.add_row(*row)
    console.print(table)
    told = {""}
    for result in report["workloads"]:
        if result["error"]:
            line, _, details = result["error"].partition("\n")  # such as the last lines of a console
            console.print(f"[red]{escape(result['name'])}[/]: {escape(line)}", highlight=False)
            if details not in told:
                console.print(details, markup=False, highlight=False)
                told.add(details)
    console.print(escape("\n".join(_context(report))), highlight=False, style="dim")


def _rows(result: Object) -> Iterator[tuple[str, ...]]:
    verdict, samples = "[green]ok[/]" if result["ok"] else "[red]failed[/]", result["samples"]
    rest = [_text(sample) for sample in samples if not sample["op"] and sample["metric"] not in _UNSHOWN]
    about = ", ".join([verdict, *(escape(text) for text in rest if text), f"{result['seconds']:.1f} s"])
    first = (escape(result["name"]), escape(f"{result['vm']} {result['device']}".strip()))
    ops = list(dict.fromkeys(sample["op"] for sample in samples if sample["op"])) or [""]
    for op in ops:
        found = {sample["metric"]: sample for sample in samples if sample["op"] == op}
        cells = [_figure(found[metric]) if op and metric in found else "" for metric in _COLUMNS]
        yield (*first, escape(op), *cells, about)
        first, about = ("", ""), ""


def _figure(sample: Object) -> str:
    return format_value(sample["value"], sample["unit"])


def _text(sample: Object) -> str:
    """ "96 MiB verified"; "" for a count that is zero, which is no news."""
    name = sample["metric"].removeprefix("bytes_").removesuffix("_seconds").replace("_", " ")
    return f"{_figure(sample)} {name}" if sample["value"] else ""


def _context(report: Object) -> Iterator[str]:
    host = report["host"]
    parts = [
        f"{host['accelerator']} ({host['accelerator_why']})" if host.get("accelerator") else "",
        f"QEMU {host['qemu_version']}" if host.get("qemu_version") else "",
        f"image {host['image_digest']}" if host.get("image_digest") else "",
        f"{plural(host['cores'], 'core')}, load {host['load_start'][0]:.1f}" if host.get("load_start") else "",
    ]
    yield "; ".join(part for part in parts if part)
    for name, dpu in report["dpus"].items():
        if dpu["worker_restarts"]:
            yield f"{name}: its worker was restarted {plural(dpu['worker_restarts'], 'time')}"
