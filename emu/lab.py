"""A lab: VMs and DPUs that live and end together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from emu.daemon import ControllerConfig, DpuConfig, NamespaceConfig
from emu.vm import DiskConfig, VmConfig

__all__ = ["ControllerConfig", "DiskConfig", "DpuConfig", "LabConfig", "NamespaceConfig", "VmConfig"]


@dataclass(frozen=True)
class LabConfig:
    """Everything a lab needs to start. Names of VMs, of DPUs and of a DPU's controllers are unique.

    ``out``: folder for console logs, daemon logs and QEMU lines (None: below the runtime directory).
    """

    name: str = "lab"
    vms: tuple[VmConfig, ...] = ()
    dpus: tuple[DpuConfig, ...] = ()
    qemu: str | None = None  # path of the QEMU to use
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    restore: bool = True  # False: cold boot, no template snapshot
    out: Path | None = None
    keep: bool = False  # leave directories and back-end files in place at the end
