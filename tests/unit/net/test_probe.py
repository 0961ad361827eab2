"""What is missing for a live fabric is told at once, by the kernel's own names of options."""

from __future__ import annotations

import os

import pytest

from emu import doctor
from net import probe
from net.errors import NetError
from net.namespaces import Namespace


def test_without_root_that_is_all_there_is_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert probe.missing() == ["the right to make namespaces: run as root"]
    assert "run as root" in next(
        one.found for one in doctor.run_checks(doctor.Asked(offline=True)) if one.name == "fabric"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a namespace")
def test_every_need_that_is_not_met_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_next_csid(node: Namespace, peer: Namespace) -> None:
        raise NetError("route to fc00:0:1::/48: Invalid argument")

    def lacks_htb(node: Namespace, peer: Namespace) -> None:
        raise NetError("HTB on interface 2: Specified qdisc kind is unknown")

    def is_there(node: Namespace, peer: Namespace) -> None:
        pass

    needs = [("CONFIG_A: x", lacks_next_csid), ("CONFIG_VETH: y", is_there), ("CONFIG_NET_SCH_HTB: z", lacks_htb)]
    monkeypatch.setattr(probe, "_NEEDS", needs)
    assert probe.missing() == [
        "CONFIG_A: x (Invalid argument)",
        "CONFIG_NET_SCH_HTB: z (Specified qdisc kind is unknown)",
    ]
