"""The paper's experiments on live fabrics, by the rules of simulation: shares and counts, in time slow enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from net.experiments import table
from net.experiments.__main__ import main
from net.experiments.cases import Outcome
from net.experiments.lab import Variant
from net.experiments.live import LIVE, STARVED_MAX, one

SLOW = (pytest.mark.slow, pytest.mark.timeout(3600))


def on_a_machine_that_kept_pace(outcome: Outcome) -> Outcome:
    if not outcome.passed and outcome.figures["starved"] > STARVED_MAX:
        pytest.skip(outcome.ours)
    return outcome


def test_two_flows_part_live(live: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line: ECN moves flow 1 to the other EV; what is printed says how slow time was."""
    code = main(["C13", "--live", "--seed", "1", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "experiments.json").read_text())
    (row,) = written["experiments"]
    on_a_machine_that_kept_pace(
        Outcome(row["ours"], row["passed"], {key: values[0] for key, values in row["figures"].items()})
    )
    assert code == 0 and row["passed"], row["ours"]
    dilation = row["figures"]["dilation"][0]
    assert f"dilated {dilation} times: ports of {10_000 / dilation:g} Mb/s" in capsys.readouterr().out
    assert "no latencies" in written["note"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in LIVE])
def test_cases_pass_live_on_a_fresh_seed(live: None, name: str) -> None:
    (seed,) = table.fresh_seeds(1)
    outcome = on_a_machine_that_kept_pace(one(name, seed, Variant()))
    assert outcome.passed, (seed, outcome.ours)


@pytest.mark.slow
def test_without_skip_two_flows_stay_on_one_ev_live(live: None) -> None:
    outcome = one("C13", 1, Variant(skip=False))
    assert not outcome.passed and "STAYS" in outcome.ours
    assert outcome.figures["first"] + outcome.figures["second"] < 1.1  # they share what one path carries


def test_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["C5", "--live"], "there is no live experiment C5"),
        (["C13", "--dilation", "10"], "--dilation is for live fabrics"),
        (["C13", "--live", "--dilation", "0"], "a dilation of 0"),
        (["C13", "--live", "--ablation"], "--ablation and --dask are for simulations"),
    ):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith(message)
