"""What `emu run` would start, as lines for a shell: for "my QEMU, your dpud" and the other way round.

The commands are :func:`emu.lab.plan`'s, which are those of the lab itself. ``SPDK_RPC`` has a row for each JSON-RPC
method in it: the arguments that make spdk-rpc send the same.

Limits: spdk-rpc takes the size of a null namespace in whole MiB only, and refuses the line of any other.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from emu.lab import LabConfig, Plan

_MIB = 1 << 20

SPDK_RPC: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "nvmf_create_transport": lambda p: ["-t", p["trtype"]],
    "nvmf_create_subsystem": lambda p: [p["nqn"], "-a", "-s", p["serial_number"], "-d", p["model_number"]],
    "bdev_malloc_create": lambda p: ["-b", p["name"], _size_mib(p), p["block_size"]],
    "bdev_null_create": lambda p: [p["name"], _size_mib(p), p["block_size"]],
    "bdev_aio_create": lambda p: [p["filename"], p["name"], p["block_size"]],
    "nvmf_subsystem_add_ns": lambda p: [p["nqn"], p["namespace"]["bdev_name"], "-n", p["namespace"]["nsid"]],
    "nvmf_subsystem_add_listener": lambda p: [
        *(p["nqn"], "-t", p["listen_address"]["trtype"], "-a", p["listen_address"]["traddr"])
    ],
}


def as_json(config: LabConfig, plan: Plan, directory: Path) -> dict[str, Any]:
    """The plan as one JSON object; every command is a list of words."""
    return {
        "directories": [str(path) for path in _directories(plan, directory)],
        "files": {str(path): size for path, size in _files(config, plan)},
        "dpus": {
            name: {"dpud": command, "spdk_rpc": [_spdk_rpc(directory / name, *call) for call in plan.rpc[name]]}
            for name, command in plan.dpus.items()
        },
        "vms": {name: {"qemu": command, "devices": _devices(command)} for name, command in plan.vms.items()},
    }


def as_shell(config: LabConfig, plan: Plan, directory: Path) -> str:
    """The plan as lines that a shell can run piece by piece."""
    return "\n".join(_lines(as_json(config, plan, directory))) + "\n"


def _lines(plan: dict[str, Any]) -> Iterator[str]:
    yield "# Directories for sockets and logs, files for back ends"
    yield f"mkdir -p -m 700 {shlex.join(plan['directories'])}"
    yield from (f"truncate -s {size_bytes} {shlex.quote(path)}" for path, size_bytes in plan["files"].items())
    for name, dpu in plan["dpus"].items():
        yield f"\n# DPU {name}: the daemon, which stays in the foreground; in another shell its configuration"
        yield shlex.join(dpu["dpud"])
        yield from map(shlex.join, dpu["spdk_rpc"])
    for name, vm in plan["vms"].items():
        yield f"\n# VM {name}; a QEMU of your own needs shared memory (memory-backend-memfd,share=on) and"
        yield from (f"#   -device {shlex.quote(device)}" for device in vm["devices"])
        yield shlex.join(vm["qemu"])


def _spdk_rpc(directory: Path, method: str, parameters: dict[str, Any]) -> list[str]:
    return ["spdk-rpc", "-s", str(directory / "rpc"), method, *map(str, SPDK_RPC[method](parameters))]


def _directories(plan: Plan, directory: Path) -> Iterator[Path]:
    yield from (directory / name for name in (*plan.vms, *plan.dpus))
    for calls in plan.rpc.values():
        for method, parameters in calls:
            if method == "nvmf_subsystem_add_listener":
                yield Path(parameters["listen_address"]["traddr"])


def _files(config: LabConfig, plan: Plan) -> Iterator[tuple[Path, int]]:
    """The files behind namespaces and their sizes in bytes, in the order of the calls that open them."""
    for dpu in config.dpus:
        sizes = [one.size for controller in dpu.controllers for one in controller.namespaces if one.backend == "file"]
        opened = [p["filename"] for method, p in plan.rpc[dpu.name] if method == "bdev_aio_create"]
        yield from zip(map(Path, opened), sizes, strict=True)


def _devices(command: list[str]) -> list[str]:
    """The vfio-user devices of a QEMU command line, as they stand there."""
    pairs = itertools.pairwise(command)
    return [word for option, word in pairs if option == "-device" and word.startswith("{")]


def _size_mib(parameters: dict[str, Any]) -> str:
    """The size as spdk-rpc wants it: in MiB, with a fraction where it must."""
    return f"{parameters['num_blocks'] * parameters['block_size'] / _MIB:.12g}"
