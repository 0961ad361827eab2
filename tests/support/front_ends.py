"""The ways in which a client meets its controller, as rows for tests.

Use: a module that runs with all of them overrides the fixture `front_end`::

    @pytest.fixture(scope="module", params=front_ends.rows())
    def front_end(request): return request.param

The first row is in the default set, the others are marked slow; `test_front_ends.py` has those in the default set
with a short load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class FrontEnd:
    """`connect`: how the driver connects (arguments of `Nvme`); `listener`: options of the listener it comes by;
    `shadow`: shadow doorbells are offered. `transport` and `vm`: what makes QEMU connect in that way, as options of
    the transport and in a scenario's `[vm.NAME]`; `listener` and `transport` are keys of scenarios too."""

    name: str
    connect: Mapping[str, Any] = field(default_factory=dict)
    listener: Mapping[str, bool] = field(default_factory=dict)
    shadow: bool = True
    transport: Mapping[str, bool] = field(default_factory=dict)
    vm: Mapping[str, bool] = field(default_factory=dict)


TRAPPED = FrontEnd("trapped")
MAPPED = FrontEnd("mapped", {"capabilities": {}}, shadow=False, transport={"force_mappable_bar0": True})
MSI = FrontEnd("msi", listener={"disable_msix": True})
UNSHARED = FrontEnd("unshared", {"shared": False}, shadow=False, vm={"share_memory": False})
ALL = (TRAPPED, MAPPED, MSI, UNSHARED)


def rows(*default: FrontEnd) -> list[Any]:
    """Parameters for a fixture; all but `default` (the trapped one, if none is named) are slow."""
    quick = default or (TRAPPED,)
    return [pytest.param(one, id=one.name, marks=[] if one in quick else [pytest.mark.slow]) for one in ALL]
