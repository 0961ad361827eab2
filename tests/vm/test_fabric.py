"""A VM in the place of a fabric's host: real QEMU, real guest, through kernel SRv6 switches to a server in a host."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from emu.fabric.spec import FabricSpec
from emu.lab import Lab, LabConfig, prepare
from emu.progress import Silent
from emu.vm import VmConfig
from net.probe import missing

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(900)]

BYTES = 1_000_000
CLIENT = "import socket, sys; socket.create_connection(sys.argv[1:3]).sendall(b'x' * int(sys.argv[3]))"


def test_a_guest_talks_through_the_fabric(tmp_path: Path) -> None:
    if lacking := missing():
        pytest.skip("no live fabric here: " + "; ".join(lacking))
    config = LabConfig("joined", vms=(VmConfig("web", host="h0"),), fabric=FabricSpec(), out=tmp_path)

    async def main() -> None:
        async with Lab(config, prepare(config, Silent()), Silent()) as lab:
            vm, fabric = lab.vms["web"], lab.fabric
            with fabric.inside("h3"):
                server = socket.create_server((fabric.address("h3", 1), 0), family=socket.AF_INET6)
            with server:
                server.settimeout(120)
                accepted = asyncio.get_running_loop().run_in_executor(None, receive, server)
                command = ["python3", "-c", CLIENT, fabric.address("h3", 1), str(server.getsockname()[1]), str(BYTES)]
                result = await vm.exec(command, timeout_s=60)
                assert result.code == 0, result.stderr
                assert await accepted == (str(fabric.plan.vm_address(0)), BYTES)
            crossed = fabric.counters("p1-t0-0:p1-t1-1")  # its pair's path in plane 1
            assert crossed.sent_bytes > BYTES

    asyncio.run(main())


def receive(server: socket.socket) -> tuple[str, int]:
    """Who has sent how much."""
    connection, (peer, *_) = server.accept()
    with connection:
        received = 0
        while data := connection.recv(1 << 16):
            received += len(data)
    return peer, received
