"""A VM in the place of a fabric's host: a tap descriptor, handed to its QEMU and set up in its guest.

Use: ``tap = await join(vm, fabric, "h1")``; then the guest is ``tap.address``, and reaches every host and machine.
Limits: one VM per host; the network card takes the VM's last root port; the guest needs virtio_net and `ip` (the
project's image has both).
Errors: EmuError; VmError with the logs' last lines.
Source: QEMU's QMP reference: getfd, netdev_add (tap, fd), device_add.
"""

from __future__ import annotations

import asyncio

from qemu.qmp import QMPError

from dpu.errors import EmuError
from emu.vm import Vm, root_ports
from net.errors import NetError
from net.fabric import Fabric
from net.tap import HostTap

_NETDEV = "fabric"
_PATIENCE_S = 10.0
_SET_UP = """
set -e
modprobe virtio_net 2>/dev/null || true
for attempt in $(seq 100); do
  for card in /sys/class/net/*; do
    [ "$(cat "$card/address")" = "$1" ] && interface=${card##*/}
  done
  [ -n "$interface" ] && break
  sleep 0.05
done
[ -n "$interface" ]
"""


async def join(vm: Vm, fabric: Fabric, host: str) -> HostTap:
    """Plugs a network card into a running ``vm``: from now on it is the machine in the place of ``host``."""
    try:
        tap = await asyncio.to_thread(fabric.tap, host)
    except NetError as error:
        raise EmuError(error.message, error.hint) from error
    try:
        vm.qmp.send_fd_scm(tap.fd)
        await vm.qmp.execute("getfd", {"fdname": _NETDEV})
        await vm.qmp.execute("netdev_add", {"type": "tap", "id": _NETDEV, "fd": _NETDEV})
        card = {"driver": "virtio-net-pci", "id": "fabric-card", "netdev": _NETDEV, "mac": tap.mac}
        await vm.qmp.execute("device_add", card | {"bus": f"rp{root_ports(vm.config) - 1}"})
    except QMPError as error:
        raise vm.error(f"cannot plug in a network card: {error}") from error
    script = _SET_UP + "\n".join(tap.guest_commands('"$interface"'))
    result = await vm.exec(["sh", "-c", script, "join", tap.mac], timeout_s=_PATIENCE_S, what="sees no network card")
    if result.code:
        raise vm.error(f"cannot set up its network card: {result.stderr.decode().strip()}")
    return tap
