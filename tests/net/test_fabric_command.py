"""`emu fabric` from the command line: up, show, fault, flows, capture, exec, down, and what kill -9 leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from scapy.utils import rdpcap

from dpu.errors import EmuError, UsageError
from emu import ledger
from emu.accel import Accel
from emu.cli import main
from emu.fabric.client import ask
from emu.fabric.holder import LabFabric, address
from emu.fabric.spec import FabricSpec
from emu.lab import Lab, LabConfig
from emu.process import Identity
from emu.progress import Silent
from emu.supervisor import Supervisor
from emu.up import status_text
from emu.vm import Platform
from tests.net.frames import until
from tests.net.transfers import MIB, Pump, Transfer

NAME = f"test-{os.getpid()}"
UPLINK = "p0-t0-0:p0-t1-0"


def emu(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What `emu fabric WORDS --json` answers."""
    main(["fabric", *words, "--json", "--name", NAME])
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def up(live: None, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    answer = emu(capsys, "up", "--planes", "1", "--t1", "1", "--hosts", "1", "--rate", "1G")
    assert answer["ok"], answer
    yield answer
    holder = Identity.of(answer["pid"])
    if holder is not None and holder.alive():
        assert emu(capsys, "down")["ok"]
        assert not holder.alive()
    assert not address(NAME).exists()


def ends(document: Any) -> dict[tuple[str, str], Any]:
    return {(link["name"], end["node"]): end for link in document["links"] for end in link["ends"]}


def udp(count: int) -> list[str]:
    """h0 sends so many datagrams to h1."""
    script = "import socket, sys; s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); "
    script += f"[s.sendto(bytes(1000), ('fd00::2', 9)) for _ in range({count})]"
    return [
        sys.executable,
        "-m",
        "emu.cli",
        "fabric",
        "exec",
        "--name",
        NAME,
        "h0",
        "--",
        sys.executable,
        "-c",
        script,
    ]


def test_a_fabric_from_the_command_line(up: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "fc00:0:4000::/48" in Path(up["plan"]).read_text()
    assert emu(capsys, "up")["error"]["message"].endswith("is up already")
    assert emu(capsys, "capture", "h1:p0-t0-1", str(tmp_path / "h1.pcap"))["ok"]
    assert emu(capsys, "fault", UPLINK, "loss=1", "rate=10M", "by=p0-t0-0")["ok"]
    subprocess.run(udp(5), check=True)
    until(lambda: ends(emu(capsys, "show"))[UPLINK, "p0-t0-0"]["packets"]["loss"] == 5, "five lost packets")
    end = ends(emu(capsys, "show"))[UPLINK, "p0-t0-0"]
    assert (end["rate_bps"], end["state"]) == (10**7, {"loss": 1.0})
    assert emu(capsys, "fault", "h0:p0-t0-0", "heal")["ok"]
    assert ends(emu(capsys, "show"))[UPLINK, "p0-t0-0"]["rate_bps"] == 10**7
    assert emu(capsys, "fault", UPLINK, "heal")["ok"]
    end = ends(emu(capsys, "show"))[UPLINK, "p0-t0-0"]
    assert (end["rate_bps"], end["state"]) == (10**9, {})
    assert emu(capsys, "fault", UPLINK, "loss=1", "rate=10M")["ok"]
    assert emu(capsys, "fault", "p0-t1-0", "blackhole")["ok"]
    assert emu(capsys, "fault", "heal")["ok"]
    assert {(end["rate_bps"], str(end["state"])) for end in ends(emu(capsys, "show")).values()} == {(10**9, "{}")}
    subprocess.run(udp(7), check=True)
    until(
        lambda: [flow["packets"] for flow in emu(capsys, "flows")["flows"] if flow["dst"] == "h1"] == [7], "the flow"
    )
    assert emu(capsys, "capture", "h1:p0-t0-1")["frames"] >= 7
    frames = [frame for frame in rdpcap(str(tmp_path / "h1.pcap")) if len(frame) == 14 + 40 + 40 + 8 + 1000]
    assert len(frames) == 7
    assert emu(capsys, "show", "--svg", str(tmp_path / "fabric.svg"))["ok"]
    picture = ElementTree.parse(tmp_path / "fabric.svg")
    tooltips = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert any("p0-t0-0 to p0-t1-0" in text and "loss 5" in text for text in tooltips)


MISTAKES = [
    (["fault", "p0-t0-0:p0-t1-7", "down"], 2, "there is no link p0-t0-0:p0-t1-7", "did you mean p0-t0-0:p0-t1-0?"),
    (["fault", "p0-t0-9", "heal"], 2, "there is no link or node p0-t0-9", "emu fabric show"),
    (["fault", UPLINK, "down", "by=h9"], 2, f"h9 is no end of {UPLINK}", "its ends are"),
    (["fault", "h0", "blackhole"], 2, "there is no switch h0", "switches are named like"),
    (["fault", UPLINK, "loss=2"], 2, "loss is 2.0", "0 to 1"),
    (["fault", UPLINK, "rate=1"], 2, "a rate of 1 b/s cannot be kept", "10000 to "),
    (["fault", UPLINK, "down", "up"], 2, "down is given twice", "once"),
    (["fault", UPLINK, "lost=2"], 2, '"lost=2" is no fault', "loss=SHARE"),
    (["capture", "h9:p0-t0-0", "x.pcap"], 2, "there is no link h9:p0-t0-0", "did you mean"),
    (["exec", "h9", "--", "true"], 2, "there is no node h9", "nodes are"),
    (["write", "h0:h9"], 2, '"h0:h9" is no pair of hosts', "hosts are h0 to h1"),
    (["write", "h0:h1", "--size", "x"], 2, "--size: 'x' is not a size", "16M"),
    (["write", "h0:h1", "h0:h1"], 2, "a pair is given twice", "once"),
    (["up", "--rate", "1k"], 2, "--rate: Input should be greater than or equal to 10000", "--help"),
    (["up", "--rate", "fast"], 2, "--rate: Value error, 'fast' is not a rate", "--help"),
]


def test_mistakes_are_told(up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for (verb, *words), code, message, fix in MISTAKES:
        assert main(["fabric", verb, "--json", "--name", NAME, *words]) == code
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["message"].startswith(message)
        assert fix in error["fix"]


def test_what_is_refused_has_changed_nothing(up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = [end["state"] | {"rate": end["rate_bps"]} for end in ends(emu(capsys, "show")).values()]
    wrong = [["rate=10M", "loss=2"], ["loss=0.5", "rate=1"], ["down", "loss=0.5", "corrupt=2"]]
    for words in [*wrong, ["rate=10M", "down", "by=h9"]]:
        assert not emu(capsys, "fault", UPLINK, *words)["ok"]
        assert [end["state"] | {"rate": end["rate_bps"]} for end in ends(emu(capsys, "show")).values()] == before


def test_writes_between_hosts_and_what_becomes_of_their_paths(
    live: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A T1 swallows everything: its EV is told as bad in the document, the table and the picture, the others not."""
    assert emu(capsys, "up", "--hosts", "1", "--rate", "50M")["ok"]
    try:
        assert emu(capsys, "fault", "p1-t1-0", "blackhole")["ok"]
        answer = emu(capsys, "write", "h0:h1", "h1:h0", "--size", "1M")
        assert answer["dilation"] == 1
        for one in answer["writes"]:
            assert one["equal"] and one["sent"] == 256 and one["retransmitted"] > 0
        document = emu(capsys, "show", "--svg", str(tmp_path / "fabric.svg"))
        assert [(pair["src"], pair["dst"]) for pair in document["endpoints"]] == [("h0", "h1"), ("h1", "h0")]
        for pair in document["endpoints"]:
            states = {ev["t1"]: ev["state"] for ev in pair["evs"]}
            assert states == {"p0-t1-0": "good", "p0-t1-1": "good", "p1-t1-0": "assumed bad", "p1-t1-1": "good"}
        assert main(["fabric", "show", "--name", NAME]) == 0
        assert "1 good, assumed bad: p1-t1-0" in " ".join(capsys.readouterr().out.split())
        titles = ElementTree.parse(tmp_path / "fabric.svg").iter("{http://www.w3.org/2000/svg}title")
        assert [title.text for title in titles].count("0x10000 by p1-t1-0: assumed bad, in reserve") == 2
    finally:
        assert emu(capsys, "down")["ok"]


def test_a_request_that_nobody_foresaw_does_not_end_the_fabric(up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EmuError, match="KeyError"):
        ask(NAME, "no such verb")
    assert emu(capsys, "show")["pid"] == up["pid"]


def test_a_program_that_is_not_installed_is_named_with_its_package(up: Any) -> None:
    command = [sys.executable, "-m", "emu.cli", "fabric", "exec", "--name", NAME, "h0", "--"]
    for program, package in (("ping", "iputils-ping"), ("no-such-program", "no-such-program")):
        ended = subprocess.run(
            [*command, program], capture_output=True, text=True, env={**os.environ, "PATH": "/none"}
        )
        assert ended.returncode == 3
        assert f"fix: install it: `apt-get install {package}`" in ended.stderr


def test_a_plan_that_cannot_be_written_is_no_traceback(
    live: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ("up", "--planes", "1", "--t1", "1", "--hosts", "1")
    error = emu(capsys, *small, "--plan", str(tmp_path / "no" / "plan.toml"))["error"]
    assert "cannot write" in error["message"] and error["fix"].startswith("the fabric is up; its plan is in ")
    assert emu(capsys, "down")["ok"]
    assert emu(capsys, *small, "--plan", str(tmp_path / "plan.toml"))["ok"]
    try:
        assert (tmp_path / "plan.toml").read_text() == emu(capsys, "show", "--plan")["toml"]
    finally:
        assert emu(capsys, "down")["ok"]


def test_clean_removes_what_a_killed_holder_leaves(up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    holder = Identity.of(up["pid"])
    assert holder is not None
    os.kill(up["pid"], signal.SIGKILL)
    until(lambda: not holder.alive(), "the holder's end")
    assert address(NAME).exists()
    found = [one.what for one in ledger.clean() if one.lab.startswith(f"fabric-{NAME}"[:16])]
    assert str(Path(up["plan"]).parent) in found
    assert not address(NAME).exists()
    assert not Path(up["plan"]).exists()


def test_a_dead_holders_name_is_taken_over_and_clean_leaves_the_new_one(
    up: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = Identity.of(up["pid"])
    assert holder is not None
    os.kill(up["pid"], signal.SIGKILL)
    until(lambda: not holder.alive(), "the holder's end")
    assert emu(capsys, "show")["error"]["exit_code"] == 2
    again = emu(capsys, "up", "--planes", "1", "--t1", "1", "--hosts", "1")
    try:
        assert not [one for one in ledger.clean() if one.lab.startswith(f"fabric-{NAME}"[:16])]
        assert emu(capsys, "show")["pid"] == again["pid"]
    finally:
        assert emu(capsys, "down")["ok"]


def test_a_labs_fabric_answers_too(live: None, capsys: pytest.CaptureFixture[str]) -> None:
    book = ledger.Ledger.create(NAME)
    lab = LabFabric(FabricSpec(planes=1, hosts=1), NAME, book)
    try:
        other = ledger.Ledger.create(NAME)
        with pytest.raises(UsageError, match="is up already"):
            LabFabric(FabricSpec(planes=1, hosts=1), NAME, other)
        other.close()
        assert emu(capsys, "fault", UPLINK, "loss=0.5")["ok"]
        assert lab.fabric.state(UPLINK) == {"loss": 0.5}
        assert "lab" in emu(capsys, "down")["error"]["message"]
        assert lab.holder.show({})["endpoints"] == []
        pump = Pump([lab.fabric.endpoint(host) for host in ("h0", "h1")])
        transfer = Transfer(pump, 0, 1, MIB)
        pump.until(transfer.done)
        for end in pump.ends:
            end.close()
        [pair] = lab.holder.show({})["endpoints"]  # what the lab's report has of it
        assert (pair["src"], pair["dst"], pair["counters"]["sent"]) == ("h0", "h1", MIB // 4096)
        assert {ev["t1"]: ev["state"] for ev in pair["evs"]} == {"p0-t1-0": "good", "p0-t1-1": "good"}
    finally:
        lab.close()
        book.close()
    assert not address(NAME).exists()


def test_a_labs_fabric_has_the_labs_name_and_status_tells_it(live: None, capsys: pytest.CaptureFixture[str]) -> None:
    config = LabConfig("scenario", fabric=FabricSpec(planes=1, hosts=1), claim=NAME)
    platform = Platform(cast(Any, None), Accel("tcg", ""), cast(Any, None))  # no VM is started

    async def main() -> None:
        async with Lab(config, platform, Silent()) as lab:
            assert emu(capsys, "show")["pid"] == os.getpid()
            assert lab.out.is_dir()  # for the supervisor's log, also of a lab without VMs
            status = json.loads(json.dumps(Supervisor(lab, cast(Any, None)).status()))
            assert status["fabric"] == {"name": NAME, "engine": "kernel", "planes": 1, "hosts": 2, "links": 6}
            text = status_text({NAME: {**status, "pid": 1}})
            assert f"  fabric: 1 plane, 2 hosts, 6 links; emu fabric show --name {NAME}" in text.splitlines()

    asyncio.run(main())
    assert not address(NAME).exists()
