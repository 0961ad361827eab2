"""One `dpud` process and its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class NamespaceConfig:
    """``size``, ``block_size`` in bytes. ``path``: only for "file"; None is a new file of the lab's own."""

    backend: Literal["memory", "null", "file"] = "memory"
    size: int = 1 << 30
    block_size: int = 512
    path: Path | None = None


@dataclass(frozen=True)
class ControllerConfig:
    """One subsystem with one vfio-user socket. NSIDs are 1, 2, ... in the order given."""

    name: str
    namespaces: tuple[NamespaceConfig, ...] = (NamespaceConfig(),)
    serial: str = ""  # "": derived from the DPU's and the controller's name
    model: str = "dpu-emu"


@dataclass(frozen=True)
class DpuConfig:
    """``cpus``: what `dpud -m` takes, a mask or a list; "" leaves the choice to dpud."""

    name: str
    controllers: tuple[ControllerConfig, ...] = ()
    cpus: str = ""
