"""A virtual machine in a host's place: a tap device in the host's namespace, whose descriptor QEMU gets.

The machine has an address of its own, ``Plan.vm_address``; every other host has a route to it, wrapped like those to
hosts, with one more uSID that tells the host to hand the packet on.

Use: ``tap = HostTap(wiring, 3)``; ``-netdev tap,id=fabric,fd={tap.fd}``,
``-device virtio-net-pci,netdev=fabric,mac={tap.mac}``; in the guest what ``guest_commands`` says.
Limits: IPv6; one machine per host; MTU 8960.
Errors: NetError. Source: Linux Documentation/networking/tuntap.rst; net.srv6.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from ipaddress import IPv6Network

from net.errors import NetError
from net.mrc.frame import IPV6_BYTES
from net.seg6 import encap, end_dt6
from net.switch.settings import MTU_BYTES
from net.topology import Node, Port, Tier
from net.wiring import NEIGHBOUR, Wiring

NAME = "vm"
_TUNSETIFF, _TAP, _NO_PI = 0x400454CA, 0x0002, 0x1000
_MAIN_TABLE = 254


class HostTap:
    """``fd`` for QEMU, or for whoever plays a machine; ``mac``: the machine's; ``gateway_mac``: the host's side."""

    def __init__(self, wiring: Wiring, host: int) -> None:
        plan = wiring.plan
        self.host = host
        self.address = plan.vm_address(host)
        self.mac, self.gateway_mac = (f"02:{kind:02x}:00:00:{host >> 8:02x}:{host & 255:02x}" for kind in (2, 1))
        node = Node(Tier.HOST, 0, host)
        namespace = wiring.namespace(node.name)
        with namespace.entered():
            try:
                self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise NetError(
                    f"no /dev/net/tun: {error.strerror}", "load the module tun, or give the device"
                ) from error
            try:
                fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("=16sH22x", NAME.encode(), _TAP | _NO_PI))
                index = socket.if_nametoindex(NAME)
            except OSError as error:
                os.close(self.fd)
                raise NetError(f"{node.name} has a machine already", "one per host") from error
        netlink = namespace.netlink
        netlink.set_up(index, mtu=MTU_BYTES - IPV6_BYTES, mac=bytes.fromhex(self.gateway_mac.replace(":", "")))
        netlink.address(index, NEIGHBOUR)
        netlink.neighbour(index, self.address, bytes.fromhex(self.mac.replace(":", "")))
        netlink.route(IPv6Network(self.address), index)
        for plane in range(plan.fabric.planes):
            netlink.route(plan.vm_prefix(host, plane), wiring.ifindex(Port(node, plane)), end_dt6(_MAIN_TABLE))
        netlink.flush()
        for peer in range(plan.fabric.hosts):
            if peer != host:
                path = wiring.pair_path(peer, host, (peer + host) % plan.fabric.planes)
                other = Node(Tier.HOST, 0, peer)
                by = wiring.ifindex(Port(other, path.plane))
                netlink = wiring.nodes[other.name].netlink
                netlink.route(IPv6Network(self.address), by, encap(plan.vm_carrier(path)), NEIGHBOUR)
                netlink.flush()

    def guest_commands(self, interface: str = "eth0") -> list[str]:
        """What makes the machine's side work, as a shell has it."""
        return [
            f"echo 0 > /proc/sys/net/ipv6/conf/{interface}/accept_dad",
            f"ip link set {interface} mtu {MTU_BYTES - IPV6_BYTES} up",
            f"ip -6 address add {self.address}/128 dev {interface}",
            f"ip -6 route add default via {NEIGHBOUR} dev {interface}",
        ]

    def close(self) -> None:
        """The device goes with its last descriptor, QEMU's included."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
