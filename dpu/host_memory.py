"""How much memory this machine can still give; apart from the back ends, which import numpy.

Source: proc_meminfo(5); the kernel's cgroup-v2 and cgroup-v1 memory controllers.
"""

from __future__ import annotations

from pathlib import Path

# (folder, limit, use) of the control group that a container sees as its root: version 2, version 1.
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def memory_available_bytes() -> int:
    """What this process may still take: the kernel's estimate, cut to the control group's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for folder, limit_file, use_file in _CGROUPS:
        try:
            limit, use = (Path(folder, name).read_text().strip() for name in (limit_file, use_file))
            counts = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit.isdigit():
            # Page cache counts as use, and goes when the group needs room.
            reclaimable = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
            available = min(available, max(0, int(limit) - int(use) + reclaimable))
    return available
