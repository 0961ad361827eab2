"""Faults and calls of a scenario: what is asked of which card, when, and what is refused with its line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpu.errors import EmuError
from dpu.faults import ACTIONS, DISTRIBUTIONS, IO_TYPES, Fault
from dpu.qos import LIMIT_NAMES
from emu import timeline
from emu.daemon import rpc_calls
from emu.progress import Silent
from emu.scenario import LimitsSpec, ScenarioError, parse

HEAD = """
[vm.a]
nvme = ["card.disk"]
[dpu.card]
[dpu.card.nvme.disk]
namespaces = [{ size = "1M", limits = { rw_ios_per_sec = 500, rw_ios_burst = 60 } }]
"""


def test_a_scenario_has_every_name_of_the_card() -> None:
    assert set(LimitsSpec.model_fields) == set(LIMIT_NAMES)
    fields = timeline.FaultSpec.model_fields
    assert set(fields["action"].annotation.__args__) == set(ACTIONS)  # type: ignore[union-attr]
    assert set(timeline.IoType.__args__) <= set(IO_TYPES)  # type: ignore[attr-defined]
    text = str(fields["distribution"].annotation)
    assert all(name in text for name in DISTRIBUTIONS)


def test_what_happens_when() -> None:
    scenario = parse(
        HEAD
        + """
[[calls]]
at = "30s"
dpu = "card"
method = "bdev_set_qos_limit"
params = { name = "disk.1", rw_ios_per_sec = 0 }
[[faults]]
at = "20s"
until = "40s"
device = "card.disk"
action = "delay"
io_types = ["read"]
latency = "150us"
spread = "2ms"
distribution = "lognormal"
[[faults]]
device = "card.disk"
action = "corrupt"
probability = 0.5
""",
        "x.toml",
        Path(),
    )
    found = [(one.at, one.dpu, one.method) for one in timeline.events(scenario.faults, scenario.calls)]
    assert found == [
        (0.0, "card", "dpu_fault_add"),
        (20.0, "card", "dpu_fault_add"),
        (30.0, "card", "bdev_set_qos_limit"),
        (40.0, "card", "dpu_fault_remove"),
    ]
    asked = scenario.faults[0].parameters()
    assert asked["bdev_name"] == "disk.1" and (asked["latency_us"], asked["spread_us"]) == (150, 2000)
    Fault("f", **asked).check()
    (dpu,) = scenario.lab_config().dpus
    calls = rpc_calls(dpu, Path("/d"), Path("/f"))
    assert ("bdev_set_qos_limit", {"name": "disk.1", "rw_ios_per_sec": 500, "rw_ios_burst": 60}) in calls
    assert set(scenario.to_json()) >= {"faults", "calls"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[[faults]]\ndevice = "card.dsk"\naction = "hold"', 'x.toml:8: unknown controller "card.dsk"'),
        ('[[faults]]\ndevice = "card.disk"\naction = "hodl"', "x.toml:9:"),
        ('[[faults]]\ndevice = "card.disk"\naction = "hold"\nnsid = 2', "x.toml:10: card.disk has 1 namespaces"),
        ('[[faults]]\ndevice = "card.disk"\naction = "delay"', "delay needs latency"),
        ('[[faults]]\ndevice = "card.disk"\naction = "hold"\nat = "9s"\nuntil = "5s"', "until comes after at"),
        ('[[calls]]\ndpu = "cart"\nmethod = "x"', 'x.toml:8: unknown DPU "cart"'),
        ("[faults]\nat = 1", "[[faults]]"),
    ],
)
def test_refusals(text: str, problem: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        parse(HEAD + text, "x.toml", Path())
    assert problem in str(refused.value)


def test_playing_calls_in_order_notes_what_fails_and_ends_with_the_body() -> None:
    called: list[str] = []
    done = asyncio.Event()

    async def rpc(method: str, **params: Any) -> None:
        called.append(method)
        if method == "second":
            raise EmuError("no such thing")
        if method == "third":
            done.set()

    lab: Any = SimpleNamespace(dpus={"card": SimpleNamespace(rpc=rpc)})
    rows = [timeline.Event(at, "card", what, {}, what) for at, what in ((0, "first"), (0, "second"), (0.01, "third"))]
    rows.append(timeline.Event(3600, "card", "fourth", {}, "fourth"))
    progress = Silent()

    async def play() -> None:
        async with timeline.playing(lab, rows, progress):
            await done.wait()

    asyncio.run(play())
    assert called == ["first", "second", "third"]
    assert "second was refused: no such thing" in progress.notes[1]
