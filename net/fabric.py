"""A live fabric: hosts and switches as namespaces, links by name, faults, counters, and Scapy on every wire.

::

    with Fabric(Topology(2, 2, 2, 2, 10**8, 10**8)) as fabric:          # 2 planes x (2 T0 + 2 T1), 4 hosts
        fabric.fault("p0-t0-0:p0-t1-1", loss=0.01)                       # both ways; ``by=`` for one
        packet = fabric.packet("h0", "h3", ev=1) / UDP(dport=9)          # EV 1: plane 0, uplink 1
        fabric.expect("p0-t0-1:h3", lambda p: UDP in p, after=lambda: fabric.send("h0:p0-t0-0", packet))
        fabric.lift("h0:p0-t0-0", {"bth.psn": 7}, lambda packet: None)   # the packet with PSN 7 is lost
        print(fabric.counters("p0-t0-0:p0-t1-1").packets)
        fabric.start("h3", ["python", "server.py"])                      # a process in a host

A link is named by its ends, the lower first: ``h0:p0-t0-0``, ``p0-t0-0:p0-t1-1``. ``by`` names the end that sends.

Parameters: topology with rates in bits per second; FabricSettings: engine, thresholds in bytes.
Limits: root, Linux; rates of 50 to 200 Mb/s a port are kept honestly. Everything lives as long as this process: when
it ends, by whatever signal, namespaces, links, programs and maps are gone (but for processes that run inside).
Errors: NetError; where the kernel lacks something, one error that names all of it.
Source: see net.topology, net.srv6, net.switch.model.
"""

from __future__ import annotations

import contextlib
import difflib
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from net.capture import Capture
from net.errors import NetError, RequestError
from net.match import Match
from net.mrc.frame import ECN_ECT, entropy_fields
from net.mrc.live import LiveEndpoint, host_ports
from net.probe import missing
from net.srv6 import Plan
from net.switch.live import Callback, Flow, LivePorts
from net.switch.model import Cause
from net.switch.ports import PROBABILITIES, Fault, PortRecord, check_rate, check_share
from net.switch.settings import FabricSettings
from net.switch.software import SoftPort, SoftPorts
from net.tap import HostTap
from net.topology import Link, Port, Tier, Topology
from net.wire_tap import LinkSocket, Tap
from net.wiring import Wiring

TIMEOUT_S = 2.0


class Counters(NamedTuple):
    """One direction of one link since the fabric came up; ``faults`` counts those injected, and what was lifted."""

    sent_packets: int
    sent_bytes: int
    packets: dict[Cause, int]
    bytes_in: dict[Cause, int]
    faults: dict[Fault, int]


class Fabric:
    """See the module. Up when made; ``close`` or the end of ``with`` takes it down."""

    def __init__(self, topology: Topology, settings: FabricSettings | None = None, plan: Plan | None = None) -> None:
        self.topology = topology
        self.settings = settings or FabricSettings()
        self.plan = plan or Plan(topology)
        assert self.plan.fabric == topology
        check_rate(topology.host_rate_bps)
        check_rate(topology.uplink_rate_bps)
        self.board: Path | None = None
        """Where ``endpoint``s tell their paths' states (net.mrc.board)."""
        self._open: list[Any] = []
        try:
            self.wiring = Wiring(self.plan, forwards=self.settings.engine == "kernel")
            self._open.append(self.wiring)
            soft = {port for port in self.wiring.ports if self.settings.engine == "scapy" and not _is_host(port)}
            self._live = LivePorts(self.wiring, self.settings, self.wiring.ports.keys() - soft)
            self._open.append(self._live)
            self._soft = SoftPorts(self.wiring, self.settings, soft)
            self._open.append(self._soft)
        except BaseException as error:
            self.close()
            if isinstance(error, NetError) and (lacking := missing()):
                raise NetError("this machine makes no fabric: " + "; ".join(lacking), "see `emu doctor`") from error
            raise

    def close(self) -> None:
        """Takes everything down."""
        for one in reversed(self._open):
            one.close()
        self._open.clear()

    def __enter__(self) -> Fabric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Names.

    def link(self, name: str) -> Link:
        """A link by its name, in either order of its ends."""
        links = self.wiring.links
        other = ":".join(reversed(name.split(":")))
        if name not in links and other not in links:
            near = difflib.get_close_matches(name, links, n=1)
            hint = f"did you mean {near[0]}?" if near else f"links are {', '.join(list(links)[:4])} ..."
            raise RequestError(f"there is no link {name}", hint)
        return links.get(name) or links[other]

    def port(self, link: str, by: str | None = None) -> Port:
        """The end of ``link`` that is ``by``'s (None: the lower)."""
        found = self.link(link)
        for port in (found.lower, found.upper):
            if by in (None, port.node.name):
                return port
        raise RequestError(
            f"{by} is no end of {link}", f"its ends are {found.lower.node.name} and {found.upper.node.name}"
        )

    def _ports(self, link: str, by: str | None) -> list[Port]:
        found = self.link(link)
        return [found.lower, found.upper] if by is None else [self.port(link, by)]

    def host(self, name: str) -> int:
        """A host's number."""
        for number in range(self.topology.hosts):
            if name == f"h{number}":
                return number
        raise RequestError(f"there is no host {name}", f"hosts are h0 to h{self.topology.hosts - 1}")

    def _engine(self, port: Port) -> LivePorts | SoftPorts:
        return self._soft if self.settings.engine == "scapy" and not _is_host(port) else self._live

    def _record(self, port: Port) -> PortRecord | SoftPort:
        return self._engine(port).record(port)

    # What happens on links.

    def counters(self, link: str, by: str | None = None) -> Counters:
        """What ``by`` (None: the lower end) has sent into ``link``."""
        record = self._record(self.port(link, by))
        return Counters(
            record.sent_packets,
            record.sent_bytes,
            {cause: record.packets(cause) for cause in Cause},
            {cause: record.bytes_in(cause) for cause in Cause},
            {fault: record.faults(fault) for fault in Fault},
        )

    def flows(self) -> Iterator[Flow]:
        """What has arrived at hosts, by peer and entropy value."""
        return self._live.flows()

    def fault(
        self,
        link: str,
        *,
        by: str | None = None,
        down: bool | None = None,
        loss: float | None = None,
        corrupt: float | None = None,
        duplicate: float | None = None,
        reorder: float | None = None,
    ) -> None:
        """Makes a link bad, or good again with 0 and False; both directions, or only what ``by`` sends.

        down: nothing passes; a host sees its carrier go. The others: shares of packets, 0 to 1. None: as it is.
        """
        shares = {"loss": loss, "corrupt": corrupt, "duplicate": duplicate, "reorder": reorder}
        wanted = {name: share for name, share in shares.items() if share is not None}
        for name, share in wanted.items():
            check_share(name, share)  # all of them before one is set
        found = self.link(link)
        for port in self._ports(link, by):
            record = self._record(port)
            for name, share in wanted.items():
                record.share(name, share)
            if down is not None:
                record.down = int(down)
        if down is not None and by is None and found.lower.node.tier is Tier.HOST:
            self.wiring.set_carrier(found, not down)

    def blackhole(self, switch: str, on: bool = True) -> None:
        """A switch that stays up and forwards nothing, or does so again."""
        ports = [port for port in self.wiring.ports if port.node.name == switch and not _is_host(port)]
        if not ports:
            raise RequestError(f"there is no switch {switch}", "switches are named like p0-t0-0 and p0-t1-0")
        for port in ports:
            self._record(port).down = int(on)

    def set_rate(self, link: str, rate_bps: int, by: str | None = None) -> None:
        """Another line rate, bits per second; thresholds keep their bytes."""
        check_rate(rate_bps)
        for port in self._ports(link, by):
            engine = self._engine(port)
            engine.set_rate(port, replace(engine.config(port), rate_bps=rate_bps))

    def rate(self, link: str, by: str | None = None) -> int:
        """The line rate of what ``by`` sends, bits per second."""
        port = self.port(link, by)
        return self._engine(port).config(port).rate_bps

    def state(self, link: str, by: str | None = None) -> dict[str, float]:
        """The faults that ``by``'s direction has now: ``down`` 1, shares of the others; nothing where all is well."""
        record = self._record(self.port(link, by))
        found = {"down": float(record.down), **{name: record.get_share(name) for name in PROBABILITIES}}
        return {name: value for name, value in found.items() if value}

    def heal(self, target: str | None = None) -> None:
        """Ends every fault of a link, or of a node's links (None: of all), and gives them their first rates back."""
        links = [link for link in self.wiring.links.values() if target in (None, *_ends(link))]
        if not links and ":" not in str(target):
            raise RequestError(f"there is no link or node {target}", "see `emu fabric show`")
        for link in links or [self.link(str(target))]:
            ports = (link.lower, link.upper)
            down = any(self._record(port).down for port in ports)
            self.fault(link.name, down=False if down else None, loss=0, corrupt=0, duplicate=0, reorder=0)
            for port in ports:
                if self._engine(port).config(port).rate_bps != link.rate_bps:
                    self.set_rate(link.name, link.rate_bps, port.node.name)

    # Scapy.

    def socket(self, link: str, by: str | None = None) -> LinkSocket:
        """A Scapy socket: receives what passes ``link`` in both directions, sends as ``by``; close it."""
        return LinkSocket(Tap(self.wiring, self.port(link, by)))

    def send(self, link: str, packets: Packet | bytes | Iterable[Packet | bytes], by: str | None = None) -> None:
        """Puts frames (from Ethernet on) into ``link`` as ``by`` would send them."""
        several = [packets] if isinstance(packets, Packet | bytes) else packets
        with contextlib.closing(Tap(self.wiring, self.port(link, by), receives=False)) as tap:
            for packet in several:
                tap.send(bytes(packet))

    def packet(self, src: str, dst: str, ev: int = 0, *, dscp: int = 0, ecn: int = ECN_ECT) -> Packet:
        """Ethernet and both IPv6 headers of a packet between two hosts along the path of ``ev``; put yours behind.

        It enters by the link of ``src`` in the path's plane (see net.topology for entropy values).
        """
        path = self.topology.path(self.host(src), self.host(dst), ev)
        source, target = (str(self.plan.host_address(host, path.plane)) for host in (path.src, path.dst))
        ethernet = Ether(self.wiring.ethernet(self.topology.path_ports(path)[0]))
        flow_label, _ = entropy_fields(ev)
        outer = IPv6(src=source, dst=str(self.plan.carrier(path)), tc=dscp << 2 | ecn)
        return ethernet / outer / IPv6(src=source, dst=target, fl=flow_label)

    def sniff(self, link: str, **scapy: Any) -> list[Packet]:
        """Scapy's sniff on ``link``: count=, timeout=, lfilter=, stop_filter=, prn=, started_callback=."""
        from scapy.sendrecv import sniff

        with self.socket(link) as tap:
            return list(sniff(opened_socket=tap, **scapy))

    def expect(
        self,
        link: str,
        accepts: Callable[[Packet], bool],
        *,
        after: Callable[[], object] | None = None,
        count: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> list[Packet]:
        """The first ``count`` packets on ``link`` that are accepted once ``after`` is called; else AssertionError."""
        seen: list[Packet] = []
        good: list[Packet] = []
        with self.socket(link) as tap:
            if after is not None:
                after()
            for frame in tap.tap.frames(timeout_s):
                packet = tap.packet(frame)
                seen.append(packet)
                if accepts(packet):
                    good.append(packet)
                    if len(good) == count:
                        return good
        lines = "".join(f"\n  {packet.sniffed_on}: {packet.summary()}" for packet in seen[-20:])
        raise AssertionError(f"{link}: {len(good)} of {count} packets in {timeout_s} s; seen {len(seen)}:{lines}")

    def sr(
        self,
        link: str,
        packets: Packet | Sequence[Packet],
        *,
        by: str | None = None,
        answers: Callable[[Packet, Packet], bool] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> tuple[list[tuple[Packet, Packet]], list[Packet]]:
        """Sends and pairs each packet with what answers it on ``link``: (pairs, unanswered), as Scapy's sr.

        answers: whether the second packet answers the first (default: Scapy's own opinion).
        """
        waiting = [packets] if isinstance(packets, Packet) else list(packets)
        fits = answers or (lambda sent, received: bool(received.answers(sent)))
        pairs: list[tuple[Packet, Packet]] = []
        with self.socket(link, by) as tap:
            for packet in waiting:
                tap.send(packet)
            for frame in tap.tap.frames(timeout_s):
                received = tap.packet(frame)
                sent = next((one for one in waiting if fits(one, received)), None)
                if sent is not None:
                    waiting.remove(sent)
                    pairs.append((sent, received))
                    if not waiting:
                        break
        return pairs, waiting

    def lift(self, link: str, match: Mapping[str, int | bytes], callback: Callback, by: str | None = None) -> None:
        """``callback`` decides about what ``by`` sends into ``link`` and ``match`` (see net.match) accepts."""
        port = self.port(link, by)
        self._engine(port).lift(port, Match(match), callback)

    def unlift(self, link: str, by: str | None = None) -> None:
        """No more; raises what the callback has raised."""
        port = self.port(link, by)
        self._engine(port).unlift(port)

    def capture(self, link: str, path: Path) -> Capture:
        """Writes what passes ``link`` to a pcap file, until it is closed or the fabric goes down."""
        capture = Capture(Tap(self.wiring, self.port(link)), path)
        self._open.append(capture)
        return capture

    # Hosts.

    @contextlib.contextmanager
    def inside(self, node: str) -> Iterator[None]:
        """Sockets and processes that the calling thread makes belong to ``node``."""
        with self.wiring.namespace(node).entered():
            yield

    def start(self, node: str, command: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """A process in ``node``, which is the caller's to end. Hosts reach each other by ``address``."""
        with self.inside(node):
            return subprocess.Popen(command, **popen)

    def endpoint(self, host: str, **options: Any) -> LiveEndpoint:
        """An MRC endpoint in ``host``, closed with the fabric; options: of net.mrc.live.LiveEndpoint."""
        number = self.host(host)
        mine = {"rate_bps": self.topology.host_rate_bps, "board": self.board, **options}
        with self.inside(host):
            made = LiveEndpoint(self.plan, number, host_ports(self.wiring, number), **mine)
        self._open.append(made)
        return made

    def tap(self, host: str) -> HostTap:
        """A virtual machine's way in, in the place of ``host``; see net.tap."""
        tap = HostTap(self.wiring, self.host(host))
        self._open.append(tap)
        return tap

    def address(self, host: str, plane: int = 0) -> str:
        """The IPv6 address of a host in a plane, for ordinary programs."""
        return str(self.plan.host_address(self.host(host), plane))

    def node_ports(self, node: str) -> list[Port]:
        """The ports of a node."""
        found = next((one for one in self.topology.nodes() if one.name == node), None)
        if found is None:
            raise RequestError(f"there is no node {node}", "see `emu fabric show`")
        return self.wiring.node_ports(found)


def _ends(link: Link) -> tuple[str, str]:
    return link.lower.node.name, link.upper.node.name


def _is_host(port: Port) -> bool:
    return port.node.tier is Tier.HOST
