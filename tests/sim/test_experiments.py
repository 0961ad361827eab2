"""The paper's experiments by their own rules: some here on two seeds, all of them in the slow set on fresh ones.

What must fail must fail: a rule that passes whatever is switched off would say nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from net.errors import SimError
from net.experiments import table
from net.experiments.__main__ import main
from net.experiments.cases import CASES, Outcome, c13_two_flows_two_evs, c19_fifteen_to_one
from net.experiments.lab import Variant, jain

QUICK = [name for name, row in CASES.items() if row.quick]


@pytest.mark.parametrize("name", QUICK)
def test_quick_cases_pass(name: str) -> None:
    outcome = CASES[name].run(1, Variant())
    assert outcome.passed, outcome.ours


def test_without_skip_two_flows_stay_on_one_ev() -> None:
    outcome = c13_two_flows_two_evs(1, Variant(skip=False))
    assert not outcome.passed and "STAYS" in outcome.ours
    assert outcome.figures["first"] < 0.7 and outcome.figures["alone"] >= 0.95


def test_trims_are_nacks_are_retransmissions_and_only_with_trimming() -> None:
    outcome = c19_fifteen_to_one(1, Variant())
    assert outcome.passed, outcome.ours
    without = c19_fifteen_to_one(1, Variant(trimming=False))
    assert not without.passed and without.figures["trims"] == 0 < without.figures["timeouts"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_cases_pass_on_fresh_seeds(tmp_path: Path) -> None:
    seeds = table.fresh_seeds(2)
    rows = table.run([], seeds, workers=2)
    table.write(rows, None, tmp_path)
    failed = [(row.case, row.ours) for row in rows if not row.passed]
    assert not failed, (seeds, failed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_part_is_worth_something() -> None:
    found = table.ablate([1], workers=2)
    on = {traffic: variants["everything on"] for traffic, variants in found.items()}
    assert min(on["incast 7:1"].goodput, on["permutation 8 to 8"].goodput) > 0.9
    assert found["incast 7:1"]["no trimming"].timeouts > on["incast 7:1"].timeouts == 0
    assert found["permutation 8 to 8"]["no spray"].least < 0.6 * on["permutation 8 to 8"].least
    lossy = found["0.2 % loss on every link"]
    assert lossy["no selective repeat"].again > 5 * lossy["everything on"].again


def test_the_table_is_written_and_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["C20", "C13", "--seed", "1", "--without", "skip", "--out", str(tmp_path), "--workers", "1"])
    assert code == 1
    printed = capsys.readouterr().out
    assert "C20  pass (1 of 1)" in printed and "C13  FAIL (0 of 1)" in printed
    document = json.loads((tmp_path / "experiments.json").read_text())
    assert [row["case"] for row in document["experiments"]] == ["C20", "C13"]
    assert (tmp_path / "experiments.txt").read_text() == printed
    assert (tmp_path / "experiments.svg").read_text().count("<rect") == 2


def test_a_case_that_breaks_fails_with_the_line_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seed: int, variant: Variant) -> Outcome:
        assert seed + 1 == 0, "two\nlines"
        return Outcome("", True)

    monkeypatch.setitem(CASES, "C5", CASES["C5"]._replace(run=broken))
    [row] = table.run(["C5"], [1])
    assert not row.passed and row.ours == 'broke: assert seed + 1 == 0, "two\\nlines"'


def test_an_unknown_case_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["C91"]) == 2 and "fix: " in capsys.readouterr().err
    with pytest.raises(SimError, match="C12"):
        table.chosen(["C12x"])


def test_jain() -> None:
    assert jain([2, 2, 2]) == 1 and jain([1, 0, 0, 0]) == 0.25 and jain([0, 0]) == 0
