"""A fabric that cannot be made says everything that is missing, in one error; what fails leaves nothing behind."""

from __future__ import annotations

import os
import threading

import pytest

from net import fabric as fabric_module
from net.errors import NetError
from net.fabric import Fabric
from net.netlink import Netlink
from net.switch.settings import ENGINES, FabricSettings
from tests.net.conftest import SMALL


def test_one_error_names_it_all(live: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Netlink, index: int, *rest: object) -> None:
        raise NetError("HTB on interface 10: Specified qdisc kind is unknown")

    monkeypatch.setattr(Netlink, "htb", refuse)
    monkeypatch.setattr(fabric_module, "missing", lambda: ["CONFIG_NET_SCH_HTB: line rates", "CONFIG_B: c"])
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(NetError, match="CONFIG_NET_SCH_HTB: line rates; CONFIG_B: c") as caught:
        Fabric(SMALL)
    assert "emu doctor" in caught.value.hint
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fabric_that_is_closed_leaves_neither_descriptors_nor_threads(live: None, engine: str) -> None:
    before, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    fabric = Fabric(SMALL, FabricSettings(engine=engine))
    fabric.fault("p0-t0-0:p0-t1-0", loss=0.5)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    fabric.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
