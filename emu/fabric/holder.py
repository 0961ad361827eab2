"""The process that has a fabric: brings it up, answers on a Unix socket, takes it down when told, or when it ends.

    python -m emu.fabric.holder NAME SPEC-AS-JSON READY-FD

One request a connection: a JSON line {"do": verb, ...}; the answer is a JSON line {"ok": ...}. ``namespace`` answers
with a descriptor too (SCM_RIGHTS). Everything is in the ledger of this process, so `emu clean` removes what kill -9
leaves: a name and a folder; namespaces, links and programs go with the process by themselves.
Errors: those of the fabric become {"ok": false, "error": {"message", "hint", "usage"}}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpu.errors import EmuError, UsageError
from emu.fabric.spec import FabricSpec
from emu.ledger import Ledger
from emu.paths import runtime_dir, socket_path
from net.errors import NetError, RequestError
from net.mrc.board import read
from net.switch.ports import check_rate
from net.topology import Node, Port, Tier, plane_of

if TYPE_CHECKING:
    from net.fabric import Fabric

_SOCKET = "fabric"
Answer = dict[str, Any]


def address(name: str) -> Path:
    """The socket of the fabric ``name``: in the directory of the process that has claimed the name."""
    return socket_path(runtime_dir("labs"), f"{name}.fabric/{_SOCKET}")


class Holder:
    """The verbs, by name in ``DO``."""

    def __init__(self, name: str, fabric: Fabric, directory: Path, lab: str = "") -> None:
        """``directory``: of its own. ``lab``: that the fabric is a part of, and ends with."""
        self.name, self.fabric, self.lab = name, fabric, lab
        self.board = fabric.board = directory / "endpoints"
        self.board.mkdir(mode=0o700, exist_ok=True)
        self.stop = False
        self.captures: dict[str, Any] = {}

    def show(self, request: Answer) -> Answer:
        """Everything that a picture needs; counters are since the fabric came up."""
        fabric = self.fabric
        topology = {field: getattr(fabric.topology, field) for field in fabric.topology.__slots__}
        links = [self._link(name) for name in fabric.wiring.links]
        return {
            "name": self.name,
            "pid": os.getpid(),
            "engine": fabric.settings.engine,
            "time_s": time.monotonic(),
            "topology": topology,
            "settings": {key: value for key, value in asdict(fabric.settings).items() if key != "dscp"},
            "links": links,
            "board": str(self.board),
            "endpoints": self._endpoints(),
        }

    def _endpoints(self) -> list[Answer]:
        """What endpoints have told of their queue pairs, of several programs' the newest."""
        posts = sorted(read(self.board), key=lambda post: -post["age_s"])
        pairs = {(pair["src"], pair["dst"], pair["qpn"]): pair for post in posts for pair in self._pairs(post)}
        return [pairs[key] for key in sorted(pairs)]

    def _pairs(self, post: Answer) -> Iterator[Answer]:
        """The queue pairs of an endpoint, with names in place of numbers."""
        fabric, src = self.fabric.topology, post["host"]
        for pair in post["pairs"]:
            ends = {"src": f"h{src}", "dst": f"h{pair['peer']}", "age_s": post["age_s"]}
            paths = {row["ev"]: fabric.path(src, pair["peer"], row["ev"]) for row in pair["evs"]}
            via = {
                ev: "" if path.t1 is None else Node(Tier.T1, path.plane, path.t1).name for ev, path in paths.items()
            }
            evs = [{**row, "plane": plane_of(row["ev"]), "t1": via[row["ev"]]} for row in pair["evs"]]
            yield {**ends, "qpn": pair["qpn"], "counters": pair["counters"], "evs": evs}

    def _link(self, name: str) -> Answer:
        link = self.fabric.link(name)
        return {
            "name": name,
            "plane": link.plane,
            "ends": [self._end(name, port) for port in (link.lower, link.upper)],
        }

    def _end(self, name: str, port: Port) -> Answer:
        fabric, by = self.fabric, port.node.name
        counters = fabric.counters(name, by)
        return {
            "node": by,
            "rate_bps": fabric.rate(name, by),
            "state": fabric.state(name, by),
            "sent_packets": counters.sent_packets,
            "sent_bytes": counters.sent_bytes,
            "packets": {cause.value: count for cause, count in counters.packets.items()},
            "faults": {fault.value: count for fault, count in counters.faults.items()},
        }

    def flows(self, request: Answer) -> Answer:
        """What has arrived at hosts, with the path of each."""
        fabric = self.fabric
        plan, hosts = fabric.plan, range(fabric.topology.hosts)
        ports = {plan.host_address(n, plane): (n, plane) for n in hosts for plane in range(fabric.topology.planes)}
        names = {address: f"h{host}" for address, (host, _) in ports.items()}
        names |= {plan.vm_address(host): f"h{host} (vm)" for host in hosts}
        rows = []
        for flow in fabric.flows():
            src, dst = ports.get(flow.src), ports.get(flow.dst)
            ends = {"src": names.get(flow.src, str(flow.src)), "dst": names.get(flow.dst, str(flow.dst))}
            row = {**flow._asdict(), **ends, "plane": None if src is None else src[1], "via": []}
            if flow.entropy is not None and src is not None and dst is not None:
                try:
                    path = fabric.topology.path(src[0], dst[0], flow.entropy)
                    row["via"] = [n.name for n in fabric.topology.path_nodes(path) if n.tier is not Tier.HOST]
                except NetError:  # an EV of a tool that numbers paths otherwise
                    pass
            rows.append(row)
        return {"flows": rows}

    def fault(self, request: Answer) -> Answer:
        """{"target": link, "by": node or null, "set": {down, rate_bps, loss, ...}}, or a switch and {blackhole}."""
        target, by, wanted = request["target"], request.get("by"), dict(request["set"])
        if "blackhole" in wanted:
            self.fabric.blackhole(target, wanted["blackhole"])
            return {}
        rate_bps = wanted.pop("rate_bps", None)
        if rate_bps is not None:
            check_rate(rate_bps)  # first, as all else: what is refused has changed nothing
        self.fabric.fault(target, by=by, **wanted)
        if rate_bps is not None:
            self.fabric.set_rate(target, rate_bps, by)
        return {}

    def heal(self, request: Answer) -> Answer:
        """{"target": link, switch or host, or null: all}."""
        self.fabric.heal(request["target"])
        return {}

    def plan(self, request: Answer) -> Answer:
        return {"text": self.fabric.plan.text(), "toml": self.fabric.plan.to_toml()}

    def capture(self, request: Answer) -> Answer:
        """Starts a pcap file of a link, or ends one (path null) and says how much is in it."""
        link = self.fabric.link(request["link"]).name
        running = self.captures.pop(link, None)
        if running is not None:
            running.close()
        if request["path"] is not None:
            self.captures[link] = self.fabric.capture(link, Path(request["path"]))
        return {"frames": getattr(running, "frames", 0), "lost": getattr(running, "lost", 0)}

    def namespace(self, request: Answer) -> Answer:
        """The descriptor goes with the answer."""
        return {"fd": self.fabric.wiring.namespace(request["node"]).fd}

    def down(self, request: Answer) -> Answer:
        if self.lab:
            raise RequestError(
                f"this fabric is a part of lab {self.lab}", f"it goes down with the lab: `emu down {self.lab}`"
            )
        self.stop = True
        return {}

    DO: dict[str, Callable[[Holder, Answer], Answer]] = {
        verb.__name__: verb for verb in (show, flows, fault, heal, plan, capture, namespace, down)
    }

    def answer(self, request: Answer) -> Answer:
        try:
            return {"ok": True, **self.DO[request["do"]](self, request)}
        except NetError as error:
            return failure(error)
        except Exception as error:  # ours; the fabric and all that runs in it outlive a verb
            return failure(_ours(error))


def _ours(error: Exception) -> EmuError:
    traceback.print_exception(error)
    return EmuError(f"the fabric's process failed at it: {error!r}", "that is a bug; its log has the whole story")


def failure(error: NetError | EmuError) -> Answer:
    """What a client is told of it; ``usage``: it is the client's own mistake."""
    usage = isinstance(error, RequestError | UsageError)
    return {"ok": False, "error": {"message": error.message, "hint": error.hint, "usage": usage}}


def serve(holder: Holder, listener: socket.socket) -> None:
    """One request after the other, until ``down``."""
    while not holder.stop:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5)  # of a client that says nothing
            try:
                request = json.loads(connection.makefile("r").readline())
                answer = holder.answer(request)
                fds = [answer.pop("fd")] if "fd" in answer else []
                data = (json.dumps(answer, default=str) + "\n").encode()
                if fds:
                    socket.send_fds(connection, [data], fds)
                else:
                    connection.sendall(data)
            except (OSError, ValueError) as error:
                print(f"a client's request failed: {error}", file=sys.stderr)


class LabFabric:
    """The fabric of the lab ``name``, brought up in the lab's process; `emu fabric --name NAME` finds it too."""

    def __init__(self, spec: FabricSpec, name: str, ledger: Ledger) -> None:
        self.name = name
        self._ledger = ledger
        ledger.claim(name, "fabric")
        self.fabric = spec.bring_up()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(socket_path(ledger.directory, _SOCKET)))
        self._listener.listen()
        self.holder = Holder(name, self.fabric, ledger.directory, lab=name)
        self._thread = threading.Thread(target=self._serve, name="fabric-verbs", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # shut down
            serve(self.holder, self._listener)

    def close(self) -> None:
        """Takes it down."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.fabric.close()
        self._ledger.release(self.name, "fabric")  # also of a lab that is kept


def main(arguments: list[str]) -> None:
    name, spec, ready = arguments[0], FabricSpec.model_validate_json(arguments[1]), int(arguments[2])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    ledger = Ledger.create(f"fabric-{name}")
    log = os.open(ledger.directory / "fabric.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    try:
        with os.fdopen(ready, "w") as report, socket.socket(socket.AF_UNIX) as listener:
            try:
                ledger.claim(name, "fabric")
                fabric = spec.bring_up()
            except Exception as error:
                report.write(json.dumps(failure(error if isinstance(error, EmuError) else _ours(error))))
                return
            with fabric:
                listener.bind(str(socket_path(ledger.directory, _SOCKET)))
                listener.listen()
                (ledger.directory / "plan.toml").write_text(fabric.plan.to_toml())
                report.write(
                    json.dumps({"ok": True, "pid": os.getpid(), "plan": str(ledger.directory / "plan.toml")})
                )
                report.close()
                serve(Holder(name, fabric, ledger.directory), listener)
    finally:
        ledger.close()


if __name__ == "__main__":
    main(sys.argv[1:])
