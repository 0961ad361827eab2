"""What `emu run` would start, as lines for a shell: for "my QEMU, your dpud" and the other way round.

The lines work as they are, pasted piece by piece or all at once: daemons and VMs run in the background, and the last
lines wait for the VMs, end the daemons and remove what was made. Every plan has directories of its own.

The commands are :func:`emu.lab.plan`'s, which are those of the lab itself. ``SPDK_RPC`` has a row for each JSON-RPC
method in it: the arguments that make spdk-rpc send the same.

A call with an option that SPDK does not have goes as a configuration, which spdk-rpc sends as it is.

Limits: spdk-rpc takes the size of a null namespace in whole MiB only, and refuses the line of any other.
"""

from __future__ import annotations

import itertools
import json
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emu.daemon import OWN_OPTIONS
from emu.lab import LabConfig, Plan
from emu.paths import cache_dir, runtime_path

_MIB = 1 << 20
_PATIENCE = ["-r", "600", "-t", "300"]  # tries, 0.2 s apart, and seconds: the first dpud compiles its pollers

SPDK_RPC: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "nvmf_create_transport": lambda p: [
        *("-t", p["trtype"]),
        *["-M"] * ("disable_mappable_bar0" in p),
        *["-S"] * ("disable_shadow_doorbells" in p),
    ],
    "nvmf_create_subsystem": lambda p: [p["nqn"], "-a", "-s", p["serial_number"], "-d", p["model_number"]],
    "bdev_malloc_create": lambda p: ["-b", p["name"], _size_mib(p), p["block_size"]],
    "bdev_null_create": lambda p: [p["name"], _size_mib(p), p["block_size"]],
    "bdev_aio_create": lambda p: [p["filename"], p["name"], p["block_size"]],
    "bdev_lvol_create_lvstore": lambda p: [p["bdev_name"], p["lvs_name"], "-c", p["cluster_sz"]],
    "bdev_lvol_create": lambda p: [
        *("-l", p["lvs_name"], p["lvol_name"], p["size_in_mib"]),
        *["-t"] * p["thin_provision"],
    ],
    "nvmf_subsystem_add_ns": lambda p: [p["nqn"], p["namespace"]["bdev_name"], "-n", p["namespace"]["nsid"]],
    "nvmf_subsystem_add_listener": lambda p: [
        *(p["nqn"], "-t", p["listen_address"]["trtype"], "-a", p["listen_address"]["traddr"]),
        *("-s", p["listen_address"]["trsvcid"]),
    ],
}


@dataclass(frozen=True)
class Place:
    """Directories of one plan. ``directory``: sockets and logs; ``files``: back-end files that are not the user's."""

    directory: Path
    files: Path


def place(name: str) -> Place:
    """Where a lab of that name would be, under a name that no other plan has; nothing is made."""
    directory = runtime_path("labs") / f"{name[:16]}-{secrets.token_hex(4)}"
    return Place(directory, cache_dir() / "files" / directory.name)


def as_json(config: LabConfig, plan: Plan, place: Place) -> dict[str, Any]:
    """The plan as one JSON object; every command is a list of words."""
    files = dict(_files(config, plan))
    own = [place.files] if any(path.parent == place.files for path in files) else []
    made = [*_with_parents(place.directory, 2), *_directories(plan, place.directory)]
    return {
        "directories": [
            str(path) for path in (*made, *(parent for path in own for parent in _with_parents(path, 1)))
        ],
        "files": {str(path): size for path, size in files.items() if not path.exists()},
        "temporary": [str(path) for path in (place.directory, *own)],
        "dpus": {
            name: {
                "dpud": command,
                "spdk_rpc": [_spdk_rpc(place.directory / name, *call) for call in plan.rpc[name]],
            }
            for name, command in plan.dpus.items()
        },
        "vms": {name: {"qemu": command, "devices": _devices(command)} for name, command in plan.vms.items()},
    }


def as_shell(config: LabConfig, plan: Plan, place: Place) -> str:
    """The plan as lines for a shell (sh, bash, zsh)."""
    return "\n".join(_lines(as_json(config, plan, place))) + "\n"


def _lines(plan: dict[str, Any]) -> Iterator[str]:
    yield "# Directories for sockets and logs, files for back ends"
    yield f"mkdir -p -m 700 {shlex.join(plan['directories'])}"
    yield from (f"truncate -s {size_bytes} {shlex.quote(path)}" for path, size_bytes in plan["files"].items())
    for number, (name, dpu) in enumerate(plan["dpus"].items()):
        yield f"\n# DPU {name}: the daemon and its configuration"
        yield f"{shlex.join(dpu['dpud'])} & dpu{number}=$!"
        yield from map(shlex.join, dpu["spdk_rpc"])
    for number, (name, vm) in enumerate(plan["vms"].items()):
        yield f"\n# VM {name}; a QEMU of your own needs shared memory (memory-backend-memfd,share=on) and"
        yield from (f"#   -device {shlex.quote(device)}" for device in vm["devices"])
        yield f"{shlex.join(vm['qemu'])} & vm{number}=$!"
    vms, dpus = ([f"${kind}{number}" for number in range(len(plan[f"{kind}s"]))] for kind in ("vm", "dpu"))
    yield "\n# The end of the VMs; paste the last line to end everything before that"
    yield f"wait {' '.join(vms)}"
    yield f"kill {' '.join([*vms, *dpus])} 2>/dev/null; wait; rm -r {shlex.join(plan['temporary'])}"


def _spdk_rpc(directory: Path, method: str, parameters: dict[str, Any]) -> list[str]:
    beside = Path(sys.executable).with_name("spdk-rpc")  # of this virtual environment, which need not be activated
    command = [str(beside) if beside.exists() else "spdk-rpc", *_PATIENCE, "-s", str(directory / "rpc")]
    if any(option in parameters for option in OWN_OPTIONS):
        config = {"subsystems": [{"subsystem": "nvmf", "config": [{"method": method, "params": parameters}]}]}
        return [*command, "load_config", "-j", json.dumps(config)]
    return [*command, method, *map(str, SPDK_RPC[method](parameters))]


def _with_parents(path: Path, count: int) -> list[Path]:
    """``path`` and ``count`` directories above it, from the top: mkdir -p gives only those named its mode."""
    return [*reversed(path.parents[:count]), path]


def _directories(plan: Plan, directory: Path) -> Iterator[Path]:
    yield from (directory / name for name in (*plan.vms, *plan.dpus))
    for calls in plan.rpc.values():
        for method, parameters in calls:
            if method == "nvmf_subsystem_add_listener":
                yield Path(parameters["listen_address"]["traddr"])


def _files(config: LabConfig, plan: Plan) -> Iterator[tuple[Path, int]]:
    """The files behind namespaces and their sizes in bytes, in the order of the calls that open them."""
    for dpu in config.dpus:
        namespaces = [one for controller in dpu.controllers for one in controller.namespaces]
        bases = [group.base for group in dpu.groups]
        sizes = [one.size for one in (*bases, *namespaces) if one.backend == "file"]
        opened = [p["filename"] for method, p in plan.rpc[dpu.name] if method == "bdev_aio_create"]
        yield from zip(map(Path, opened), sizes, strict=True)


def _devices(command: list[str]) -> list[str]:
    """The vfio-user devices of a QEMU command line, as they stand there."""
    pairs = itertools.pairwise(command)
    return [word for option, word in pairs if option == "-device" and word.startswith("{")]


def _size_mib(parameters: dict[str, Any]) -> str:
    """The size as spdk-rpc wants it: in MiB, with a fraction where it must."""
    return f"{parameters['num_blocks'] * parameters['block_size'] / _MIB:.12g}"
