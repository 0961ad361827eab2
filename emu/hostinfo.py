"""The stamp on every report: what ran on what, so that a figure can be judged later.

    stamp = collect(accel=accel, qemu=qemu, image_digest=image.digest)
    ...                                   # the run
    report["host"] = stamp.finished().to_dict()

What a caller does not know yet stays None. Load averages are the 1, 5 and 15 minute ones of getloadavg(3); a
load above the number of cores means that the figures are those of a busy host.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from emu.accel import Accel
from emu.qemu import Qemu

DISTRIBUTION = "dpu-emu"


@dataclass(frozen=True)
class HostInfo:
    """One run's stamp; ``cores`` are those this process may use, ``load_*`` (1, 5, 15 minutes)."""

    cpu_model: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    project_version: str
    load_start: tuple[float, float, float]
    load_end: tuple[float, float, float] | None = None
    accelerator: str | None = None
    accelerator_why: str | None = None
    qemu_version: str | None = None
    qemu_source: str | None = None
    qemu_pinned: bool | None = None
    image_digest: str | None = None

    def finished(self) -> HostInfo:
        """The same with the load as it is now, at the end of the run."""
        return replace(self, load_end=os.getloadavg())

    def to_dict(self) -> dict[str, Any]:
        """For a JSON report."""
        return asdict(self)


def collect(accel: Accel | None = None, qemu: Qemu | None = None, image_digest: str | None = None) -> HostInfo:
    """The stamp at the start of a run."""
    return HostInfo(
        cpu_model=cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        project_version=project_version(),
        load_start=os.getloadavg(),
        accelerator=accel.name if accel else None,
        accelerator_why=accel.why if accel else None,
        qemu_version=qemu.version if qemu else None,
        qemu_source=qemu.source if qemu else None,
        qemu_pinned=qemu.origin.get("pinned") if qemu else None,
        image_digest=image_digest,
    )


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the kernel gives it."""
    match = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def project_version() -> str:
    """The installed version of this project."""
    return importlib.metadata.version(DISTRIBUTION)
