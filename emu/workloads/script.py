"""script: a program of the user's, run in the guest.

Use::

    [[workload]]
    type = "script"
    path = "check.sh"

Parameters: ``path`` (relative to the scenario; it is copied into the guest and started, so its first line
names its interpreter: /bin/sh and python3 are there), ``args``, ``timeout`` (default 10m).

It finds in its environment: DEVICE (/dev/nvme0n1), CONTROLLER (/dev/nvme0), NSID, BLOCK_SIZE (bytes).

Samples: exit_code. Standard output and standard error are kept whole, as stdout.txt and stderr.txt.

Errors: any exit code but 0 fails the workload.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from emu.units import DurationSeconds
from emu.workloads.base import Context, Params, Result, Sample, Workload, read_user_file, tail


class ScriptParams(Params):
    path: str = Field(min_length=1)
    args: tuple[str, ...] = ()
    timeout: DurationSeconds = 600.0


async def run(params: ScriptParams, context: Context) -> Result:
    device = context.device
    script = f"/tmp/script-{context.device.name}"
    await context.guest.write_file(script, read_user_file(params.path), permissions=0o755)
    environment = {
        "DEVICE": device.path,
        "CONTROLLER": f"/dev/{device.controller}",
        "NSID": device.nsid,
        "BLOCK_SIZE": device.block_size,
    }
    argv = ["env", *(f"{name}={value}" for name, value in environment.items()), script, *params.args]
    result = await context.guest.exec(argv, timeout_s=params.timeout)
    failed = result.code != 0
    return Result(
        type=params.type,
        ok=not failed,
        error=f"{Path(params.path).name} ended with {result.code}: {tail(result.stderr or result.stdout)}"
        if failed
        else "",
        samples=[Sample("exit_code", result.code, "1")],
        files={"stdout.txt": result.stdout, "stderr.txt": result.stderr},
    )


WORKLOAD = Workload(ScriptParams, run, main="path", paths=("path",))
