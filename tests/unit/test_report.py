"""The report: every figure is in the JSON, and the table shows them as people read them."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

import emu.report
from dpu.errors import EmuError
from emu import hostinfo
from emu.accel import Accel
from emu.report import DpuReport, Report, VmReport, print_report
from emu.workloads import Result, Sample


def report() -> Report:
    reads = Result("fio", "reads", "web", "card.disk", seconds=5.21)
    reads.samples = [
        Sample("ios", 87745, "1", "read"),
        Sample("iops", 17549.15, "1/s", "read"),
        Sample("bw_bytes", 71881319, "B/s", "read"),
        Sample("clat_p50", 321536, "ns", "read"),
        Sample("clat_p99", 2834432, "ns", "read"),
        Sample("cpu_user", 3.0, "%"),
    ]
    verify = Result("verify", "verify", "web", "card.disk", False, "verify: bad magic [header]", 9.4)
    verify.samples = [Sample("passes", 6, "1"), Sample("bytes_verified", 96 << 20, "B")]
    verify.files = {"fio.json": b"{}"}
    return Report(
        "my",
        {"vm": {}},
        datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        seconds=14.61234,
        host=hostinfo.collect(Accel("tcg", "asked for"), image_digest="abc").finished().to_dict(),
        vms={"web": VmReport(restored=True)},
        dpus={"card": DpuReport(worker_restarts=2, stats={"commands": 5})},
        workloads=[reads, verify],
        notes=["said once"],
    )


def table(of: Report) -> list[str]:
    console = Console(file=io.StringIO(), width=160)
    print_report(of.to_json(), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_json_has_the_documented_keys_and_every_figure(tmp_path: Path) -> None:
    path = report().write(tmp_path / "deep" / "out")
    assert path == tmp_path / "deep" / "out" / "report.json"
    document = json.loads(path.read_text())
    assert emu.report.__doc__ is not None
    assert [key for key in document if f"- ``{key}``: " not in emu.report.__doc__] == []
    assert document["schema"] == 1
    assert document["started"] == "2026-01-02T03:04:05+00:00"
    assert (document["ok"], document["seconds"]) == (False, 14.612)
    assert document["host"]["accelerator"] == "tcg" and document["host"]["image_digest"] == "abc"
    assert document["vms"] == {"web": {"restored": True}}
    assert document["dpus"]["card"] == {"worker_restarts": 2, "stats": {"commands": 5}, "error": ""}
    assert {"metric": "iops", "value": 17549.15, "unit": "1/s", "op": "read"} in document["workloads"][0]["samples"]
    assert document["workloads"][1]["files"] == ["fio.json"]
    assert (path.parent / "workloads/02-verify/fio.json").read_bytes() == b"{}"
    assert not list(path.parent.glob(".*"))


def test_table() -> None:
    lines = table(report())
    (reads,) = (line for line in lines if "reads" in line)
    for text in ("web card.disk", "read", "17,549", "68.55 MiB/s", "322 us", "2.83 ms", "ok, 5.2 s"):
        assert text in reads
    (verify,) = (line for line in lines if "verify" in line and "failed" in line)
    assert "failed, 6 passes, 96 MiB verified, 9.4 s" in verify
    assert "verify: verify: bad magic [header]" in lines
    assert any("tcg (asked for); image abc" in line for line in lines)
    assert "card: its worker was restarted 2 times" in lines


def test_what_two_workloads_say_is_shown_once() -> None:
    of = report()
    for result in of.workloads:
        result.error = "the guest panicked\nlast console lines:\n  [1.0] <TASK>"
    lines = table(of)
    assert lines.count("reads: the guest panicked") == lines.count("verify: the guest panicked") == 1
    assert lines.count("  [1.0] <TASK>") == 1


def test_ok_needs_every_workload() -> None:
    of = report()
    assert not of.ok
    of.workloads.pop()
    assert of.ok


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    of = report()
    of.workloads[1].name = "../../x y"
    of.write(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out/workloads").iterdir()] == ["02-x-y"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(EmuError, match="cannot write the report"):
        report().write(tmp_path / "out")
