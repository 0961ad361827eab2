"""One QEMU virtual machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DiskConfig:
    """A disk image of the user's, given to the guest as virtio-blk (format by its name: .qcow2 or raw)."""

    path: Path
    read_only: bool = False


@dataclass(frozen=True)
class VmConfig:
    """What a VM is. ``dpus``: the controllers it gets, as (DPU name, controller name), in this order."""

    name: str
    vcpus: int = 1
    memory_mib: int = 512
    dpus: tuple[tuple[str, str], ...] = ()
    kernel: Path | None = None  # None: the project's image
    initrd: Path | None = None  # None: the project's image, unless a kernel is given
    kernel_args: str = ""  # added to the command line
    disks: tuple[DiskConfig, ...] = ()
    qemu_args: tuple[str, ...] = ()  # added at the end, as given
