"""A card that SPDK's own command line configures: the shell script, and the folder in which the card comes and goes.

Use: ``place = Place(directory)``; start a ``Daemon(place.directory)``; ``place.script()``; connect a guest to
``place.traddr / "cntrl"``, or ``with place.connected() as (nvme, queue)``; what was saved is in ``place.saved``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.nvme_driver import GuestRam, Nvme, SubmissionQueue

NQN = "nqn.2026-11.io.test:script"
SPDK_RPC = Path(sys.executable).with_name("spdk-rpc")
FILE_BYTES = 4 << 20

# As people write them for SPDK: one command a line, and several in one go through standard input.
SCRIPT = f"""
set -euo pipefail
rpc() {{ {SPDK_RPC} -s "$SOCKET" "$@"; }}
rpc framework_wait_init
rpc bdev_malloc_create -b fast 32 512 -u 11111111-2222-3333-4444-555555555555
rpc bdev_aio_create "$DISK" disk 4096
rpc bdev_wait_for_examine
{SPDK_RPC} -s "$SOCKET" <<COMMANDS
bdev_null_create nothing 64 512
nvmf_create_transport -t VFIOUSER
nvmf_create_subsystem {NQN} -a -s SCRIPT -d Model -m 4
COMMANDS
rpc nvmf_subsystem_add_ns {NQN} fast
rpc nvmf_subsystem_add_ns {NQN} disk -n 3 -g 00112233445566778899AABBCCDDEEFF
mkdir -p "$TRADDR"
rpc nvmf_subsystem_add_listener {NQN} -t VFIOUSER -a "$TRADDR" -s 0
rpc save_config > "$SAVED"
"""


class Place:
    """Folder and files of one card that is stopped and started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket, self.traddr = directory / "rpc", directory / "vfu"
        self.disk, self.saved = directory / "disk.img", directory / "saved.json"
        self.disk.write_bytes(bytes(FILE_BYTES))

    def script(self, text: str = SCRIPT) -> None:
        names = {"SOCKET": self.socket, "DISK": self.disk, "TRADDR": self.traddr, "SAVED": self.saved}
        environment = os.environ | {name: str(path) for name, path in names.items()}
        done = subprocess.run(
            ["bash", "-c", text], env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr + done.stdout

    def rpc(self, *words: str, text: str = "") -> str:
        command = [str(SPDK_RPC), "-s", str(self.socket), *words]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    @contextmanager
    def connected(self) -> Iterator[tuple[Nvme, SubmissionQueue]]:
        nvme = Nvme(str(self.traddr / "cntrl"), GuestRam())
        nvme.enable()
        try:
            yield nvme, nvme.create_queue_pair(1, 64)
            nvme.ram.check_canaries()
        finally:
            nvme.close()
            nvme.ram.close()
