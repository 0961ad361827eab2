"""What a live fabric costs: time to come up, packets per CPU-second through three switches, bytes host to host.

    scripts/bench/fabric [--quick] [--seconds S] [--rounds N]

* ``up``: from nothing to 16 hosts x 4 planes (4 T0 and 4 T1 in each), and down again.
* ``forwarding``: one process sends the same MRC writes without a pause, 64 a system call, along one path across a T1,
  unshaped; what counts is what the last switch has sent, per CPU-second of the sender and the kernel's softirq
  threads, for the switches work in the sender's system calls or in those. Frames of about 150 bytes and of a 4 KiB
  payload, engines kernel and ebpf. ``others_cpus``: what the rest of the machine was busy with. (In a kernel that
  accounts for interrupts apart, CONFIG_IRQ_TIME_ACCOUNTING, the switches' work is there, too.)
* ``host_to_host``: one MRC endpoint (net.mrc.live) writes into another's memory along the same path, in 4 KiB
  packets, each endpoint in a process of its own; the memory is compared. Payload per second of wall time, and the
  CPU time per packet of either process (the switches work inside the sender's and, for acknowledgements, the
  receiver's).

Budgets (issue 5, section 6.6): up in 10 s; 150 and 220 kpps per CPU-second (kernel, ebpf) at 150 bytes; 200 MB/s.
Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from net.fabric import Fabric
from net.mrc.endpoint import Kind
from net.mrc.frame import DSCP, ECN_ECT, Frame, encode_frame, message
from net.mrc.live import LIVE, LiveEndpoint, host_ports
from net.mrc.requestor import Identity, Status
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
QPNS = {PATH.src: 0x100, PATH.dst: 0x101}
REGION_BYTES, WRITE_BYTES, DEPTH = 1 << 24, 1 << 18, 16
UNSHAPED = replace(LIVE, window_bytes=1 << 22, sack_packets=16, sack_bytes=1 << 16)
"""There is no line rate to respect: a window of 980 packets, and a SACK for 16 of them."""
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


def unlimited(engine: str) -> FabricSettings:
    """Ports without line rates, marks, trims and limits."""
    settings = FabricSettings(engine=engine, shape=False)
    return replace(settings, ecn_bytes=None, trim_bytes=None, limit_bytes=1 << 40)


def softirq_threads_s() -> float:
    """CPU time that the kernel's softirq threads have spent."""
    ticks = 0
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            if "(ksoftirqd/" in name:
                ticks += sum(map(int, rest.split()[11:13]))
    return ticks / _TICKS


def forwarding(engine: str, payload: int, seconds: float) -> dict[str, float]:
    """One run."""
    with Fabric(SMALL, unlimited(engine)) as fabric:
        sender = Sender(fabric, write(fabric, payload))
        last = fabric.topology.host_link(0, PATH.dst)

        def arrived() -> int:
            return fabric.counters(last.name, last.upper.node.name).sent_packets

        for _ in range(16):
            sender.send()
        packets, busy, threads = arrived(), busy_s(), softirq_threads_s()
        cpu, wall = time.process_time(), time.monotonic()
        while time.monotonic() - wall < seconds:
            sender.send()
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        cpu += softirq_threads_s() - threads
        packets, busy = arrived() - packets, busy_s() - busy
        sender.tap.close()
    assert packets > 0, "nothing has arrived"
    return {
        "kpps_per_cpu_second": packets / cpu / 1000,
        "kpps": packets / wall / 1000,
        "cpus": cpu / wall,
        "others_cpus": max(0.0, busy - cpu) / wall,
    }


def endpoint(fabric: Fabric, host: int) -> LiveEndpoint:
    """One end, with its queue pair to the other."""
    peer = PATH.dst if host == PATH.src else PATH.src
    with fabric.wiring.namespace(f"h{host}").entered():
        made = LiveEndpoint(fabric.plan, host, host_ports(fabric.wiring, host), seed=host)
    made.connect(Identity(QPNS[host], peer, QPNS[peer]), UNSHAPED)
    return made


def receiver(fabric: Fabric, pipe: Connection) -> None:
    """Gives memory, counts immediates, says what they cost and what is in the memory."""
    with endpoint(fabric, PATH.dst) as end:
        memory = bytearray(REGION_BYTES)
        pipe.send(end.register(memory, 0))
        writes, arrived = pipe.recv(), 0
        cpu = time.process_time()
        while arrived < writes:
            arrived += sum(completion.kind is Kind.IMMEDIATE for completion in end.poll(timeout_s=1))
        cpu = time.process_time() - cpu
        end.poll(timeout_s=0.1)  # what is acknowledged twice
        pipe.send((cpu, bytes(memory)))


def host_to_host(engine: str, writes: int) -> dict[str, float]:
    """One run of so many writes of WRITE_BYTES, over and over the same memory."""
    data = os.urandom(REGION_BYTES)
    parts = [(at, data[at : at + WRITE_BYTES]) for at in range(0, REGION_BYTES, WRITE_BYTES)]
    with Fabric(SMALL, unlimited(engine)) as fabric:
        pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=receiver, args=(fabric, theirs), daemon=True)
        process.start()
        theirs.close()
        with endpoint(fabric, PATH.src) as end:
            key = pipe.recv()
            pipe.send(writes)
            cpu, wall = time.process_time(), time.monotonic()
            posted = done = 0
            while done < writes:
                while posted < min(writes, done + DEPTH):
                    at, part = parts[posted % len(parts)]
                    end.write(QPNS[PATH.src], posted, part, at, key, immediate=posted)
                    posted += 1
                completions = end.poll(timeout_s=1)
                assert all(completion.status is Status.OK for completion in completions), completions
                done += len(completions)
            cpu, wall = time.process_time() - cpu, time.monotonic() - wall
            their_cpu, memory = pipe.recv()
            counters = end.engine.pairs[QPNS[PATH.src]].requestor.counters
        process.join()
    assert memory == data, "other memory has arrived"
    packets = writes * WRITE_BYTES / 4096
    return {
        "MBps": writes * WRITE_BYTES / wall / 1e6,
        "sender_us": cpu / packets * 1e6,
        "receiver_us": their_cpu / packets * 1e6,
        "MBps_by_cpu": 4096 * packets / max(cpu, their_cpu) / 1e6,
        "sent_again": counters["retransmitted"] / packets,
    }


def up() -> dict[str, float]:
    """Up and down once."""
    began, cpu = time.monotonic(), time.process_time()
    fabric = Fabric(LARGE)
    made, cpu = time.monotonic(), time.process_time() - cpu
    fabric.close()
    return {"up_s": made - began, "up_cpu_s": cpu, "close_s": time.monotonic() - made}


def run(arguments: argparse.Namespace) -> common.Report:
    report = common.Report("fabric", arguments)
    ups: list[dict[str, float]] = []
    runs: dict[str, list[dict[str, float]]] = {}
    ends: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        ups.append(up())
        for engine in ("kernel", "ebpf"):
            for size, payload in PAYLOADS.items():
                runs.setdefault(f"{engine} {size}", []).append(forwarding(engine, payload, arguments.seconds))
            ends.setdefault(engine, []).append(host_to_host(engine, arguments.writes))
    report.results["up"] = {key: common.spread([one[key] for one in ups]) for key in ups[0]}
    report.results["forwarding"] = {
        name: {key: common.spread([one[key] for one in rows], 1) for key in rows[0]} for name, rows in runs.items()
    }
    report.results["host_to_host"] = {
        name: {key: common.spread([one[key] for one in rows], 1) for key in rows[0]} for name, rows in ends.items()
    }
    forwarded = report.results["forwarding"]
    found = {
        "up_s": report.results["up"]["up_s"]["median"],
        "kernel_kpps_150": forwarded["kernel 150"]["kpps_per_cpu_second"]["median"],
        "ebpf_kpps_150": forwarded["ebpf 150"]["kpps_per_cpu_second"]["median"],
        "host_to_host_MBps": report.results["host_to_host"]["kernel"]["MBps"]["median"],
    }
    report.results["budget"] = [
        {"name": name, "budget": budget, "found": found[name]} for name, budget in BUDGETS.items()
    ]
    common.table(["fabric", "found", "budget"], [(name, found[name], budget) for name, budget in BUDGETS.items()])
    return report


def main() -> None:
    parser = common.parser(__doc__, "fabric")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one forwarding run")
    parser.add_argument("--writes", type=int, default=2048, help=f"of one host to host run, {WRITE_BYTES} bytes each")
    parser.add_argument("--rounds", type=int, default=5, help="of everything")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.writes, arguments.rounds = 0.3, 64, 1
    run(arguments).write()


if __name__ == "__main__":
    main()
