"""`emu fabric` without a fabric: the scenario's table, words of `fault`, the picture. Live ones: tests/net."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dpu.errors import EmuError, UsageError
from emu.cli import main
from emu.fabric import picture
from emu.fabric.client import parse_change, states, table
from emu.fabric.spec import FabricSpec, parse_rate
from emu.scenario import ScenarioError, load, parse

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("text", "rate"), [("100M", 10**8), ("2.5G", 25 * 10**8), ("64kbit/s", 64000), (10**6, 10**6)]
)
def test_rates_are_powers_of_1000(text: str | int, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "0", "-1M", "1T", "", True])
def test_what_is_no_rate(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        parse_rate(text)


def test_a_scenario_says_what_the_fabric_is(tmp_path: Path) -> None:
    file = tmp_path / "wide.toml"
    file.write_text('[fabric]\nplanes = 4\nradix = 8\nrate = "200M"\ntrim = false\nengine = "ebpf"\n')
    spec = load(file).fabric
    assert spec is not None
    topology, settings = spec.topology(), spec.settings()
    assert (topology.hosts, topology.switches, topology.link_count) == (32, 4 * (8 + 4), 4 * (32 + 32))
    assert (topology.host_rate_bps, topology.uplink_rate_bps) == (2 * 10**8, 2 * 10**8)
    assert (settings.trim_bytes, settings.ecn_bytes, settings.engine) == (None, 50_000, "ebpf")
    assert load(file).to_json()["fabric"]["radix"] == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plane = 2", 'unknown key "plane"; did you mean "planes"?'),
        ('engine = "kernal"', 'did you mean "kernel"?'),
        ('rate = "fast"', "is not a rate"),
        ("radix = 4\nt0 = 2", "radix says how many"),
        ("planes = 9", "less than or equal to 8"),
        ("radix = 4096", "less than or equal to 2048"),
    ],
)
def test_mistakes_in_it_have_their_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(f"[fabric]\n{line}\n")
    with pytest.raises(ScenarioError) as caught:
        load(file)
    [problem] = caught.value.problems
    assert message in problem.message
    assert problem.where.startswith(f"{file}:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[vm.a]\nhost = "h0"\n', "add a table [fabric]"),
        ('[fabric]\n[vm.a]\nhost = "h4"\n', 'no host "h4" in the fabric; hosts are h0 to h3'),
        ('[fabric]\n[vm.a]\nhost = "h0"\n[vm.b]\nhost = "h0"\n', 'host "h0" is taken by VM "a"'),
    ],
)
def test_a_vm_takes_a_host_of_the_fabric(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ScenarioError) as caught:
        load(file)
    [problem] = caught.value.problems
    assert message in problem.message
    file.write_text('[fabric]\n[vm.a]\nhost = "h3"\n')
    assert load(file).lab_config().vms[0].host == "h3"


def test_a_wrong_host_stands_in_the_order_of_lines() -> None:
    with pytest.raises(ScenarioError) as caught:
        parse('[vm.a]\nhost = "h0"\n[dpu.d]\nx = 1\n', "x.toml", Path())
    assert [problem.where for problem in caught.value.problems] == ["x.toml:2", "x.toml:4"]


def test_specs_survive_the_way_to_their_process() -> None:
    spec = FabricSpec(planes=3, ecn=False, rate="10M")
    assert FabricSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("words", "by", "wanted"),
    [
        (["down"], None, {"down": True}),
        (["up", "by=h0"], "h0", {"down": False}),
        (["loss=0.5", "rate=10M"], None, {"loss": 0.5, "rate_bps": 10**7}),
        (["blackhole"], None, {"blackhole": True}),
    ],
)
def test_words_of_fault(words: list[str], by: str | None, wanted: dict[str, Any]) -> None:
    assert parse_change(words) == (by, wanted)


@pytest.mark.parametrize("words", [[], ["by=h0"], ["lost=1"], ["loss"], ["loss=much"], ["rate=never"], ["down=1"]])
def test_words_that_are_no_fault(words: list[str]) -> None:
    with pytest.raises(EmuError) as caught:
        parse_change(words)
    assert "loss=SHARE" in caught.value.hint


@pytest.mark.parametrize("words", [["blackhole", "loss=1"], ["forward", "rate=1M"], ["blackhole", "by=p0-t0-0"]])
def test_a_switch_and_a_link_have_faults_of_their_own(words: list[str]) -> None:
    with pytest.raises(UsageError, match="for a whole switch"):
        parse_change(words)


CAUSES = ("data", "priority", "ecn", "trim", "down", "loss", "limit", "priority limit", "trim limit")


def end(node: str, used: float = 0.0, state: dict[str, float] | None = None, **packets: int) -> dict[str, Any]:
    return {
        "node": node,
        "rate_bps": 10**8,
        "utilisation": used,
        "state": state or {},
        "packets": dict.fromkeys(CAUSES, 0) | packets,
        "faults": {"lift": 0},
    }


def test_an_idle_fabric_shows_every_link() -> None:
    links = [
        {"name": "h0:p0-t0-0", "plane": 0, "ends": [idle("h0"), idle("p0-t0-0")]},
        {"name": "p0-t0-0:p0-t1-0", "plane": 0, "ends": [idle("p0-t0-0"), idle("p0-t1-0")]},
    ]
    topology = {"planes": 1, "t0_per_plane": 1, "t1_per_plane": 1, "hosts_per_t0": 1}
    shown = table({"name": "x", "engine": "kernel", "topology": topology, "links": links})
    assert shown.title == "x: 1 plane x (1 T0 + 1 T1), 1 host, engine kernel"
    assert list(zip(*(column.cells for column in shown.columns[:2]))) == [
        ("h0", "p0-t0-0"),
        ("p0-t0-0", "h0"),
        ("p0-t0-0", "p0-t1-0"),
        ("p0-t1-0", "p0-t0-0"),
    ]


def told(*states: str) -> dict[str, Any]:
    """What an endpoint in h0 has told: two EVs in each of two planes, in these states; the last one in reserve."""
    evs = [
        {"ev": n // 2 << 16 | n % 2, "plane": n // 2, "t1": f"p{n // 2}-t1-{n % 2}", "state": state, "active": n < 3}
        for n, state in enumerate(states)
    ]
    return {"src": "h0", "dst": "h1", "qpn": 256, "age_s": 2.0, "counters": {"sent": 9, "nacks": 1}, "evs": evs}


TOLD = told("good", "assumed bad", "skip", "good")


def test_entropy_values_are_shown_by_plane() -> None:
    columns = states({"topology": {"planes": 2}, "endpoints": [TOLD, told(*["denied"] * 4)]}).columns
    assert [list(column.cells) for column in columns] == [
        ["h0", "h0"],
        ["h1", "h1"],
        ["1 good, assumed bad: p0-t1-1", "denied: p0-t1-0 p0-t1-1"],
        ["1 good, skip: p1-t1-0", "denied: p1-t1-0 p1-t1-1"],
        ["9", "9"],
        ["0", "0"],
        ["1", "1"],
        ["2 s ago", "2 s ago"],
    ]


def test_the_picture_has_a_dot_for_each_entropy_value() -> None:
    topology = {"planes": 2, "t0_per_plane": 1, "t1_per_plane": 2, "hosts_per_t0": 2}
    root = ElementTree.fromstring(
        picture.svg({"name": "x", "engine": "kernel", "topology": topology, "links": [], "endpoints": [TOLD]})
    )
    dots = list(root.iter(f"{SVG}circle"))
    assert [dot.find(f"{SVG}title").text for dot in dots] == [  # type: ignore[union-attr]
        "0x0 by p0-t1-0: good",
        "0x1 by p0-t1-1: assumed bad",
        "0x10000 by p1-t1-0: skip",
        "0x10001 by p1-t1-1: good, in reserve",
    ]
    assert [dot.get("fill") == dot.get("stroke") for dot in dots] == [True, True, True, False]
    assert len({dot.get("stroke") for dot in dots}) == 3
    height = float(root.get("viewBox", "").split()[3])
    assert all(float(dot.get("cy", "inf")) + 5 < height for dot in dots)


def test_a_live_table_leaves_out_what_is_quiet() -> None:
    one, other = idle("p0-t0-0"), idle("p0-t1-0")
    links = [
        {"name": "h0:p0-t0-0", "plane": 0, "ends": [{**idle("h0"), "utilisation": 0.001}, idle("p0-t0-0")]},
        {"name": "p0-t0-0:p0-t1-0", "plane": 0, "ends": [{**one, "state": {"loss": 0.1}}, other]},
    ]
    topology = {"planes": 1, "t0_per_plane": 1, "t1_per_plane": 1, "hosts_per_t0": 1}
    shown = table({"name": "x", "engine": "kernel", "topology": topology, "links": links}, busy=True)
    assert (list(shown.columns[0].cells), shown.caption) == (["h0", "p0-t0-0"], "2 directions quiet")


def test_an_unknown_fabric_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["fabric", "show", "--name", "no-such-fabric"]) == 2


def idle(node: str) -> dict[str, Any]:
    return {**end(node), "faults": {"lift": 0, "reorder": 0}}


def test_the_picture_shows_every_node_and_what_went_wrong() -> None:
    links = [
        {"name": "h0:p0-t0-0", "plane": 0, "ends": [end("h0", 0.5, data=9), end("p0-t0-0")]},
        {"name": "p0-t0-0:p0-t1-0", "plane": 0, "ends": [end("p0-t0-0", 1.0, ecn=3, trim=2), end("p0-t1-0")]},
        {"name": "p1-t0-0:p1-t1-0", "plane": 1, "ends": [end("p1-t0-0", 0, {"down": 1.0}, down=4), end("p1-t1-0")]},
    ]
    topology = {"planes": 2, "t0_per_plane": 1, "t1_per_plane": 1, "hosts_per_t0": 1}
    root = ElementTree.fromstring(
        picture.svg({"name": "a<b", "engine": "kernel", "topology": topology, "links": links})
    )
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for name in ("h0", "p0-t0-0", "p0-t1-0", "p1-t0-0", "p1-t1-0", "plane 0", "plane 1", "m3 t2", "x4"):
        assert name in texts
    inline = picture.element({"name": "x", "engine": "kernel", "topology": topology, "links": links})
    assert inline.tag == "svg"
    lines = list(root.iter(f"{SVG}line"))
    assert len(lines) == 3
    assert [line.get("stroke-dasharray") is not None for line in lines] == [False, False, True]
    widths = [float(line.get("stroke-width", "0")) for line in lines]
    assert widths == [3.0, 5.0, 1.0]
    assert any("h0 to p0-t0-0: 50% of 100Mb/s; data 9" in (title.text or "") for title in root.iter(f"{SVG}title"))
