"""Every benchmark of scripts/bench runs with tiny counts and leaves a report. No figure is judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from net.probe import missing

ROOT = Path(__file__).parents[2]
BENCHMARKS = {path.stem for path in (ROOT / "scripts/bench").glob("*.py")} - {"common"}


def bench(name: str, tmp_path: Path, *options: str) -> Any:
    """The results of one benchmark's quick run."""
    out = tmp_path / f"{name}.json"
    command = [sys.executable, "-m", f"scripts.bench.{name}", "--quick", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert set(report) == {"benchmark", "when", "seconds", "host", "options", "results", "notes"}
    assert report["benchmark"] == name and report["options"]["quick"] is True
    assert len(report["host"]["load_start"]) == 3 and len(report["host"]["load_end"]) == 3
    assert report["host"]["cpu_model"] and report["host"]["project_version"]
    return report["results"]


def is_spread(value: Any) -> bool:
    return set(value) == {"median", "min", "max", "count"} and value["min"] <= value["median"] <= value["max"]


def test_every_benchmark_can_be_called() -> None:
    for name in BENCHMARKS:
        link = ROOT / "scripts/bench" / name
        assert link.resolve().name == "_run" and link.resolve().stat().st_mode & 0o111, link


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the C baseline is compiled by gcc")
def test_fastpath(tmp_path: Path) -> None:
    """It also refuses to measure a baseline that leaves other tables than the product."""
    results = bench(
        "fastpath", tmp_path, "--case", "1x32 read 4k", "--case", "1x1 write 4k", "--case", "1x32 read 128k"
    )
    assert set(results["cases"]) == {"1x32 read 4k", "1x1 write 4k", "1x32 read 128k"}
    for case in results["cases"].values():
        for row in case.values():
            assert is_spread(row["ratio"]) and is_spread(row["ns"]["c"]) and is_spread(row["ns"]["numba"])
    assert results["budget"]["ratio"] > 0


def test_fabric(tmp_path: Path) -> None:
    if lacking := missing():
        pytest.skip("no live fabric here: " + "; ".join(lacking))
    results = bench("fabric", tmp_path)
    assert set(results["forwarding"]) == {"kernel 150", "kernel 4k", "ebpf 150", "ebpf 4k"}
    for row in [results["up"], *results["forwarding"].values()]:
        assert all(is_spread(value) for value in row.values())
    assert {row["name"] for row in results["budget"]} >= {"up_s", "kernel_kpps_150", "ebpf_kpps_150"}


def test_punt(tmp_path: Path) -> None:
    results = bench("punt", tmp_path)
    for row in results["rings"] + results["daemon"]:
        assert row["server"]["count"] == 200 and 0 < row["server"]["p50_us"] <= row["server"]["p99_us"]


def test_pause(tmp_path: Path) -> None:
    results = bench("pause", tmp_path)
    assert set(results) == {"memory QD1", "no standby, memory QD1", "budget"}
    for case in results.keys() - {"budget"}:
        assert results[case]["guest_ms"]["count"] == results[case]["keeper_ms"]["count"] == 2
        assert results[case]["guest_ms"]["p99"] >= results[case]["keeper_ms"]["p50"] > 0


def test_card(tmp_path: Path) -> None:
    results = bench("card", tmp_path)
    (job,) = results["jobs"].values()
    assert is_spread(job["dpud"]["iops"]) and job["dpud"]["iops"]["median"] > 0
    assert is_spread(results["idle_percent"]["trapped"]) and is_spread(results["idle_percent"]["mapped"])
    for row in results["scaling"].values():
        assert row["ratio"]["median"] > 0 and row["commands"] > 0


@pytest.mark.vm
def test_guest(tmp_path: Path) -> None:
    results = bench("guest", tmp_path)
    assert results["our_side"]["aio"] in ("io_uring", "threads") and results["qemu_side"]["aio"]
    (job,) = results["jobs"].values()
    assert is_spread(job["iops_ratio"]) and is_spread(job["cpu_ratio"])
    assert job["sides"]["qemu"]["qemu_cpu_us"]["median"] > 0
    assert [row["job"] for row in results["budgets"]] == ["randread 4k QD32"] * 2


@pytest.mark.vm
def test_boot(tmp_path: Path) -> None:
    results = bench("boot", tmp_path)
    for name in ("cold", "snapshot"):
        assert is_spread(results[name]["wall_s"]) and is_spread(results[name]["qemu_cpu_s"])


@pytest.mark.vm
def test_spin(tmp_path: Path) -> None:
    results = bench("spin", tmp_path, "--spin", "0", "--spin", "200")
    for spin in ("0", "200"):
        assert is_spread(results[spin]["idle_percent"])
        for depth in ("QD1", "QD32"):
            assert results[spin][f"driver {depth}"]["iops"]["median"] > 0
            assert results[spin][f"guest {depth}"]["iops"]["median"] > 0


def test_spray(tmp_path: Path) -> None:
    results = bench("spray", tmp_path)
    for spray in ("single path", "round robin", "random"):
        assert is_spread(results[spray]["hops_per_s"]) and results[spray]["nics"] == 512


def has_trials(results: Any, trials: int, pairs: int) -> bool:
    """Whether both kinds ran to their end."""
    kinds = [results["slowed"], results["A/A"]]
    return all(
        kind["trials"] == sum(kind["verdicts"].values()) == trials and len(kind["ratios"]) == trials * pairs
        for kind in kinds
    )


@pytest.mark.slow  # the slow copy is compiled anew
@pytest.mark.parametrize(
    "through",
    [
        pytest.param("stage", marks=pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")),
        "daemon",
    ],
)
def test_compare(through: str, tmp_path: Path) -> None:
    assert has_trials(bench("compare", tmp_path, "--through", through), 1, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the guest's side is compiled by gcc")
def test_a_slowdown_of_5_percent_is_found_and_none_is_invented(tmp_path: Path) -> None:
    """The claim about `emu compare`, on this machine: 19 of 20 trials of each kind."""
    out = tmp_path / "compare.json"
    command = [sys.executable, "-m", "scripts.bench.compare", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())["results"]
    assert has_trials(results, 20, 24)
    assert results["slowed"]["verdicts"].get("worse", 0) >= 19, results["slowed"]["ratio"]
    assert results["A/A"]["verdicts"].get("same", 0) >= 19, results["A/A"]["ratio"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the guest's side is compiled by gcc")
def test_volumes(tmp_path: Path) -> None:
    results = bench("volumes", tmp_path)
    for part in ("written", "soc"):
        for row in results[part].values():
            assert is_spread(row["ratio"]) and is_spread(row["iops"])
    assert is_spread(results["first"]["iops"])
    assert all(row["map_bytes"] >= 8 * int(count) for count, row in results["lookup"].items())
