"""A DPU daemon in a host of a fabric: its network is the host's, its clients are where they always were."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from net.fabric import Fabric
from net.topology import Topology
from tests.support.daemon import Daemon
from tests.support.nvme_driver import GuestRam, Nvme

TINY = Topology(planes=1, t0_per_plane=2, t1_per_plane=1, hosts_per_t0=1, host_rate_bps=10**8, uplink_rate_bps=10**8)


def network(pid: int | str) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def test_a_daemon_in_a_host_serves_guests_outside_and_reaches_other_hosts(live: None, socket_dir: Path) -> None:
    """Its processes have the host's network, also the worker that takes over; the vfio-user socket is a path."""
    ram, data = GuestRam(), bytes(range(256)) * 16
    with Fabric(TINY) as fabric, contextlib.ExitStack() as stack:
        with fabric.inside("h0"):
            inside = network("thread-self")
            daemon = stack.enter_context(Daemon(socket_dir))
            daemon.create_transport()
            target = daemon.add_subsystem("nqn.2026-01.io.test:h0", [daemon.add_memory("far")])
        assert inside != network("self")
        nvme = Nvme(target.path, ram)
        stack.callback(ram.close)
        stack.callback(nvme.close)
        nvme.enable()
        queue = nvme.create_queue_pair(1, 16)
        nvme.write(queue, 1, 8, data)
        with fabric.inside("h0"):
            daemon.kill_worker()
            worker = daemon.worker_pid()
        assert nvme.read(queue, 1, 8, len(data)) == data
        assert daemon.process is not None
        assert {network(pid) for pid in (daemon.process.pid, worker, daemon.fork_server_pid())} == {inside}

        # What a remote back end does: a stream from the daemon's network to a storage node on another host.
        with fabric.inside("h1"):
            storage = stack.enter_context(socket.create_server((fabric.address("h1"), 10809), family=socket.AF_INET6))
        with fabric.inside("h0"):
            stack.enter_context(socket.create_connection((fabric.address("h1"), 10809), timeout=10)).sendall(b"NBD")
        connection, (peer, *_) = storage.accept()
        assert (stack.enter_context(connection).recv(3), peer) == (b"NBD", fabric.address("h0"))
        assert fabric.counters("p0-t0-0:p0-t1-0").sent_packets > 0
