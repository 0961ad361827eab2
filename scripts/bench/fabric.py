"""What a live fabric costs: time to come up, packets per CPU-second through three switches, bytes host to host.

    scripts/bench/fabric [--quick] [--seconds S] [--rounds N]

* ``up``: from nothing to 16 hosts x 4 planes (4 T0 and 4 T1 in each), and down again.
* ``forwarding``: one process sends the same MRC writes without a pause, 64 a system call, along one path across a T1,
  unshaped; what counts is what the last switch has sent, per CPU-second of the machine (/proc/stat), the sender's
  included. Frames of about 150 bytes and of a 4 KiB payload, engines kernel and ebpf.
* ``host_to_host``: the same run's payload per second of wall time at 4 KiB, as it arrived; nobody reads it there.

Budgets (issue 5, section 6.6): up in 10 s; 150 and 220 kpps per CPU-second (kernel, ebpf) at 150 bytes; 200 MB/s.
Needs root. The whole machine's CPU time is charged, so let nothing else run.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from dataclasses import replace

from net.fabric import Fabric
from net.mrc.frame import DSCP, ECN_ECT, Frame, encode_frame, message
from net.mrc.wire import Bth, Meth, Opcode, Reth
from net.switch.settings import FabricSettings
from net.topology import Path, Topology
from net.wire_tap import Tap
from scripts.bench import common

BUDGETS = {"up_s": 10.0, "kernel_kpps_150": 150.0, "ebpf_kpps_150": 220.0, "host_to_host_MBps": 200.0}
LARGE = Topology(planes=4, t0_per_plane=4, t1_per_plane=4, hosts_per_t0=4, host_rate_bps=10**8, uplink_rate_bps=10**8)
SMALL = Topology(planes=1, t0_per_plane=2, t1_per_plane=1, hosts_per_t0=1)
PATH = Path(0, 1, 0, 0)
PAYLOADS = {"150": 8, "4k": 4096}
BATCH = 64
_TICKS = os.sysconf("SC_CLK_TCK")


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Msghdr(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint),
        ("iov", ctypes.POINTER(_Iovec)),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


class _Mmsghdr(ctypes.Structure):
    _fields_ = [("header", _Msghdr), ("length", ctypes.c_uint)]


class Sender:
    """Sends BATCH copies of one frame a call (sendmmsg(2))."""

    def __init__(self, fabric: Fabric, frame: bytes) -> None:
        port = fabric.topology.path_ports(PATH)[0]
        self.tap = Tap(fabric.wiring, port, receives=False)
        self._frame = ctypes.create_string_buffer(frame, len(frame))
        self._vector = _Iovec(ctypes.addressof(self._frame), len(frame))
        header = _Msghdr(iov=ctypes.pointer(self._vector), iovlen=1)
        self._batch = (_Mmsghdr * BATCH)(*(_Mmsghdr(header) for _ in range(BATCH)))
        self._libc = ctypes.CDLL(None, use_errno=True)

    def send(self) -> None:
        done = self._libc.sendmmsg(self.tap.fileno(), self._batch, BATCH, 0)
        assert done == BATCH, os.strerror(ctypes.get_errno())


def write(fabric: Fabric, payload: int) -> bytes:
    """One MRC write along PATH."""
    plan = fabric.plan
    source, target = (plan.host_address(host, 0).packed for host in (PATH.src, PATH.dst))
    text = message(Bth(Opcode.WRITE_ONLY, dqp=5), Meth(), Reth(0, 0, payload), payload=bytes(payload))
    carrier = plan.carrier(PATH).packed
    frame = Frame(source, target, 0, text, dscp=DSCP.no_trim, ecn=ECN_ECT, outer_src=source, outer_dst=carrier)
    return fabric.wiring.ethernet(fabric.topology.path_ports(PATH)[0]) + encode_frame(frame)


def busy_s() -> float:
    """CPU time that the machine has spent, idle and waiting left out."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS


def forwarding(engine: str, payload: int, seconds: float) -> dict[str, float]:
    """One run."""
    unlimited = replace(
        FabricSettings(engine=engine, shape=False), ecn_bytes=None, trim_bytes=None, limit_bytes=1 << 40
    )
    with Fabric(SMALL, unlimited) as fabric:
        sender = Sender(fabric, write(fabric, payload))
        last = fabric.topology.host_link(0, PATH.dst)

        def arrived() -> int:
            return fabric.counters(last.name, last.upper.node.name).sent_packets

        for _ in range(16):
            sender.send()
        packets, cpu, wall = arrived(), busy_s(), time.monotonic()
        while time.monotonic() - wall < seconds:
            sender.send()
        packets, cpu, wall = arrived() - packets, busy_s() - cpu, time.monotonic() - wall
        sender.tap.close()
    assert packets > 0, "nothing has arrived"
    return {
        "kpps_per_cpu_second": packets / max(cpu, 1 / _TICKS) / 1000,
        "kpps": packets / wall / 1000,
        "payload_MBps": packets * payload / wall / 1e6,
        "cpus": cpu / wall,
    }


def up() -> dict[str, float]:
    """Up and down once."""
    began = time.monotonic()
    fabric = Fabric(LARGE)
    made = time.monotonic()
    fabric.close()
    return {"up_s": made - began, "close_s": time.monotonic() - made}


def run(arguments: argparse.Namespace) -> common.Report:
    report = common.Report("fabric", arguments)
    ups: list[dict[str, float]] = []
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        ups.append(up())
        for engine in ("kernel", "ebpf"):
            for size, payload in PAYLOADS.items():
                runs.setdefault(f"{engine} {size}", []).append(forwarding(engine, payload, arguments.seconds))
    report.results["up"] = {key: common.spread([one[key] for one in ups]) for key in ups[0]}
    report.results["forwarding"] = {
        name: {key: common.spread([one[key] for one in rows], 1) for key in rows[0]} for name, rows in runs.items()
    }
    forwarded = report.results["forwarding"]
    found = {
        "up_s": report.results["up"]["up_s"]["median"],
        "kernel_kpps_150": forwarded["kernel 150"]["kpps_per_cpu_second"]["median"],
        "ebpf_kpps_150": forwarded["ebpf 150"]["kpps_per_cpu_second"]["median"],
        "host_to_host_MBps": forwarded["kernel 4k"]["payload_MBps"]["median"],
    }
    report.results["budget"] = [
        {"name": name, "budget": budget, "found": found[name]} for name, budget in BUDGETS.items()
    ]
    common.table(["fabric", "found", "budget"], [(name, found[name], budget) for name, budget in BUDGETS.items()])
    return report


def main() -> None:
    parser = common.parser(__doc__, "fabric")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one forwarding run")
    parser.add_argument("--rounds", type=int, default=5, help="of everything")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.rounds = 0.3, 1
    run(arguments).write()


if __name__ == "__main__":
    main()
