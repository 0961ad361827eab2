"""What the verbs of `emu fabric` do: they ask the process that has the fabric (emu.fabric.holder).

Errors: EmuError.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from dpu.errors import EmuError, UsageError
from emu import ledger
from emu.fabric import picture
from emu.fabric.holder import address, failure
from emu.fabric.spec import FabricSpec, parse_rate
from emu.process import Identity
from emu.progress import output
from emu.units import parse_size, plural
from net.errors import NetError
from net.switch.ports import PROBABILITIES
from net.topology import Topology

_NEVER_KEYS = ("ecn", "trim", "last_hop_trim")
_ANSWER_S, _END_S = 60.0, 10.0
Document = dict[str, Any]


def run(arguments: argparse.Namespace) -> int:
    """One verb; the exit code."""
    try:
        document, text = VERBS[arguments.verb](arguments)
    except NetError as error:
        raise _told(failure(error)) from error
    if arguments.json:
        print(json.dumps({"ok": True, **document}, indent=2, default=str))
    elif text is not None:
        output().print(text, markup=False, highlight=False)
    return 0


def ask(name: str, verb: str, **fields: Any) -> tuple[Document, list[int]]:
    """The holder's answer to one request, and descriptors that came with it."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(address(name)))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise _no_fabric(name) from error
        connection.settimeout(_ANSWER_S)
        try:
            connection.sendall((json.dumps({"do": verb, **fields}) + "\n").encode())
            data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 1)
            while more := connection.recv(1 << 20):
                data += more
        except OSError as error:  # it ends at this moment, or is stuck
            raise _no_fabric(name) from error
    if not data:
        raise _no_fabric(name)
    answer = json.loads(data)
    if not answer.pop("ok"):
        raise _told(answer)
    return answer, fds


def _told(answer: Document) -> EmuError:
    """The error in a holder's answer."""
    error = answer["error"]
    return (UsageError if error["usage"] else EmuError)(error["message"], error["hint"])


def _no_fabric(name: str) -> EmuError:
    known = {one for one, book in ledger.claimed(kind="fabric").items() if book.living}
    if name in known:
        return EmuError(f'fabric "{name}" does not answer', "it is starting or ending; try again")
    fix = f"up are: {', '.join(sorted(known))}; give --name" if known else "`emu fabric up` makes one"
    return UsageError(f'there is no fabric "{name}"', fix)


# The verbs: each returns the JSON document and what a person sees.

Shown = tuple[Document, Any]


def _up(arguments: argparse.Namespace) -> Shown:
    spec = _spec(arguments)
    from emu.up import lab_name

    name = lab_name(arguments.name, "fabric")
    ledger.find_not_living(name, kind="fabric")  # says at once that it is taken
    topology = spec.topology()
    read, write = os.pipe()
    command = [sys.executable, "-m", "emu.fabric.holder", name, spec.model_dump_json(), str(write)]
    with os.fdopen(read) as ready:
        try:
            child = subprocess.Popen(command, pass_fds=[write], stdin=subprocess.DEVNULL, start_new_session=True)
        finally:
            os.close(write)
        said = ready.read()
    if not said:
        raise EmuError(f"the fabric's process ended with code {child.wait()}", "what it said is above")
    answer = json.loads(said)
    if not answer.pop("ok"):
        raise _told(answer)
    if arguments.plan is not None:
        fix = f"the fabric is up; its plan is in {answer['plan']}"
        _write(arguments.plan, Path(answer["plan"]).read_text(), fix)
    text = (
        f'fabric "{arguments.name}" is up: {topology.size}, {plural(topology.link_count, "link")}, '
        f"engine {spec.engine}; process {answer['pid']}\nplan: {answer['plan']}"
    )
    return answer, text


def _spec(arguments: argparse.Namespace) -> FabricSpec:
    given = {key: value for key in FabricSpec.model_fields if (value := getattr(arguments, key, None)) is not None}
    if arguments.scenario is not None:
        from emu.scenario import load

        spec = load(Path(arguments.scenario)).fabric
        if spec is None:
            raise UsageError(f"{arguments.scenario} has no table [fabric]", "add one, or give options")
        given = {**spec.model_dump(exclude_none=True), **given}
    given = {key: False if key in _NEVER_KEYS and value == "0" else value for key, value in given.items()}
    try:
        return FabricSpec.model_validate(given)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        option = f"--{'-'.join(map(str, detail['loc'][:1])).replace('_', '-')}" if detail["loc"] else "options"
        raise UsageError(f"{option}: {detail['msg']}", "see `emu fabric up --help`") from error


def _show(arguments: argparse.Namespace) -> Shown:
    if arguments.plan:
        answer, _ = ask(arguments.name, "plan")
        return answer, answer["text"].rstrip()
    if arguments.watch is not None:
        _watch(arguments)
        return {}, None
    document = sample(arguments.name, arguments.interval)
    if arguments.svg is not None:
        _write(arguments.svg, picture.svg(document), "give another file")
    return document, shown(document)


def _write(file: Path, text: str, fix: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise EmuError(f"cannot write {file}: {error.strerror}", fix) from error


def sample(name: str, interval_s: float) -> Document:
    """What `show` tells, with each end's ``utilisation`` (a share of its rate) over so many seconds."""
    before, _ = ask(name, "show")
    time.sleep(interval_s)
    return picture.compared(before, ask(name, "show")[0])


def _watch(arguments: argparse.Namespace) -> None:
    before = ask(arguments.name, "show")[0]
    with contextlib.suppress(KeyboardInterrupt), Live(console=Console(), auto_refresh=False) as live:
        while True:
            time.sleep(arguments.watch)
            after = ask(arguments.name, "show")[0]
            live.update(shown(picture.compared(before, after), busy=True), refresh=True)
            before = after


def table(document: Document, *, busy: bool = False) -> Table:
    """Each direction of each link; ``busy``: of those that carry nothing and have no fault only the number."""
    shown = Table(box=None, pad_edge=False, header_style="bold", title=_title(document), title_justify="left")
    shown.add_column("from")
    shown.add_column("to")
    for column in ("rate", "used", "packets", "marks", "trims", "first", "lost", "lifted"):
        shown.add_column(column, justify="right")
    shown.add_column("faults")
    quiet = 0
    for link in document["links"]:
        for end, other in zip(link["ends"], reversed(link["ends"])):
            if busy and not end["utilisation"] and not end["state"]:
                quiet += 1
                continue
            packets, faults = end["packets"], end["faults"]
            offered = sum(packets.values())
            now = ", ".join(name if name == "down" else f"{name} {share:g}" for name, share in end["state"].items())
            shown.add_row(
                *(end["node"], other["node"], picture.rate(end["rate_bps"]), f"{end['utilisation']:.0%}"),
                *map(str, (offered, packets["ecn"], packets["trim"], packets["priority"])),
                *map(str, (picture.dropped(packets), faults["lift"] + faults["reorder"])),
                now,
            )
    if quiet:
        shown.caption, shown.caption_justify = f"{plural(quiet, 'direction')} quiet", "left"
    return shown


def shown(document: Document, *, busy: bool = False) -> RenderableType:
    """What endpoints have told, which a small terminal is not to cut off, and the links."""
    links = table(document, busy=busy)
    return Group(states(document), "", links) if document["endpoints"] else links


def states(document: Document) -> Table:
    """Each queue pair's entropy values, by plane."""
    shown = Table(box=None, pad_edge=False, header_style="bold", title="entropy values", title_justify="left")
    for column in ("from", "to", *(f"plane {plane}" for plane in range(document["topology"]["planes"]))):
        shown.add_column(column)
    for column in ("packets", "again", "NACKs", "told"):
        shown.add_column(column, justify="right")
    for pair in document["endpoints"]:
        planes = [
            [ev for ev in pair["evs"] if ev["plane"] == plane] for plane in range(document["topology"]["planes"])
        ]
        counts = [str(pair["counters"].get(key, 0)) for key in ("sent", "retransmitted", "nacks")]
        shown.add_row(pair["src"], pair["dst"], *map(picture.in_words, planes), *counts, f"{pair['age_s']:.0f} s ago")
    return shown


def _title(document: Document) -> str:
    return f"{document['name']}: {Topology(**document['topology']).size}, engine {document['engine']}"


def _write_memory(arguments: argparse.Namespace) -> Shown:
    from emu.fabric import traffic  # MRC's headers take a while

    try:
        size = parse_size(arguments.size)
    except ValueError as error:
        raise UsageError(f"--size: {error}", "such as 16M") from error
    fabric, _ = ask(arguments.name, "show")

    def namespace(node: str) -> int:
        _, [fd] = ask(arguments.name, "namespace", node=node)
        return fd

    topology = Topology(**fabric["topology"])
    found = traffic.write(topology, namespace, Path(fabric["board"]), arguments.pairs, size)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("from", "to"):
        shown.add_column(column)
    for column in ("bytes", "of line", "packets", "again", "NACKs", "marks", "timeouts"):
        shown.add_column(column, justify="right")
    shown.add_column("memory")
    for one in found:
        counts = [str(one[key]) for key in ("sent", "retransmitted", "nacks", "marks", "timeouts")]
        outcome = "equal" if one["equal"] else one["status"]
        shown.add_row(one["src"], one["dst"], str(one["bytes"]), f"{one['line_share']:.0%}", *counts, outcome)
    if not arguments.json:
        output().print(shown)
    traffic.check(found)
    return {"dilation": 1, "writes": found}, None


def _flows(arguments: argparse.Namespace) -> Shown:
    answer, _ = ask(arguments.name, "flows")
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("from", "to", "entropy", "via"):
        shown.add_column(column)
    for column in ("packets", "bytes", "marked", "trimmed", "idle"):
        shown.add_column(column, justify="right")
    for flow in sorted(answer["flows"], key=lambda flow: (flow["src"], flow["dst"], flow["entropy"] or 0)):
        entropy = "-" if flow["entropy"] is None else f"{flow['entropy']:#010x}"
        via = " ".join(flow["via"]) or ("-" if flow["plane"] is None else f"plane {flow['plane']}")
        counts = [str(flow[key]) for key in ("packets", "bytes", "marked", "trimmed")]
        shown.add_row(flow["src"], flow["dst"], entropy, via, *counts, f"{flow['seen_s']:.1f} s")
    return answer, shown if answer["flows"] else "nothing has arrived yet"


_WORDS: dict[str, Document] = {
    "down": {"down": True},
    "up": {"down": False},
    "blackhole": {"blackhole": True},
    "forward": {"blackhole": False},
}


def _fault(arguments: argparse.Namespace) -> Shown:
    if arguments.target == "heal":
        if arguments.change:
            raise UsageError("`fault heal` ends all faults", "`fault TARGET heal` ends those of one link or node")
        ask(arguments.name, "heal", target=None)
        return {}, "every fault has ended, and every link has its first rate"
    if arguments.change == ["heal"]:
        ask(arguments.name, "heal", target=arguments.target)
        return {}, f"{arguments.target}: every fault has ended, and the first rate is back"
    by, wanted = parse_change(arguments.change)
    ask(arguments.name, "fault", target=arguments.target, by=by, set=wanted)
    return {"set": wanted}, f"{arguments.target}: {' '.join(arguments.change)}"


def parse_change(words: Sequence[str]) -> tuple[str | None, Document]:
    """("loss=0.01", "by=h0") as ("h0", {"loss": 0.01}); EmuError for what is no fault."""
    by: str | None = None
    wanted: Document = {}
    names = [name for word in words for name in (_WORDS.get(word) or [word.partition("=")[0]])]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{twice} is given twice", "give each fault once")
    known = ["heal (alone)", *_WORDS, *(f"{name}=SHARE" for name in PROBABILITIES), "rate=RATE", "by=NODE"]
    for word in words:
        key, equals, value = word.partition("=")
        try:
            if not equals and key in _WORDS:
                wanted |= _WORDS[key]
            elif equals and key in PROBABILITIES:
                wanted[key] = float(value)
            elif equals and key == "rate":
                wanted["rate_bps"] = parse_rate(value)
            elif equals and key == "by":
                by = value
            else:
                raise UsageError(f'"{word}" is no fault', f"take some of: {', '.join(known)}")
        except ValueError as error:
            raise UsageError(f"{word}: {error}", f"take some of: {', '.join(known)}") from error
    if not wanted:
        raise UsageError("no fault is named", f"take some of: {', '.join(known)}")
    if "blackhole" in wanted and (len(wanted) > 1 or by is not None):
        raise UsageError("blackhole and forward are for a whole switch, the others for links", "give them alone")
    return by, wanted


def _capture(arguments: argparse.Namespace) -> Shown:
    path = None if arguments.file is None else str(arguments.file.absolute())
    answer, _ = ask(arguments.name, "capture", link=arguments.link, path=path)
    done = f"{answer['frames']} frames written, {answer['lost']} lost"
    return answer, f"writing {path}; `emu fabric capture {arguments.link}` ends it" if path else done


_PACKAGES = {
    **dict.fromkeys(("ip", "ss", "tc", "bridge"), "iproute2"),
    **dict.fromkeys(("ping", "ping6"), "iputils-ping"),
    "nc": "netcat-openbsd",
}
"""Debian's, where they are not called as the program is."""


def _exec(arguments: argparse.Namespace) -> Shown:
    from net.namespaces import enter  # pyroute2 takes half a second

    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise UsageError("there is no program to run", "emu fabric exec h0 -- PROGRAM ...")
    _, [namespace] = ask(arguments.name, "namespace", node=arguments.node)
    enter(namespace)
    os.close(namespace)
    try:
        os.execvp(program[0], program)
    except FileNotFoundError as error:
        package = _PACKAGES.get(program[0], program[0])
        fix = f"install it: `apt-get install {package}` or the package that has it; or give its path"
        raise EmuError(f"cannot run {program[0]}: it is not installed", fix) from error
    except OSError as error:
        raise EmuError(f"cannot run {program[0]}: {error.strerror}", "give an executable file") from error


def _dissector(arguments: argparse.Namespace) -> Shown:
    from net.mrc_dissector import lua

    text = lua()
    if not arguments.json:
        print(text, end="")
    return {"lua": text}, None


def _down(arguments: argparse.Namespace) -> Shown:
    pid = ask(arguments.name, "show")[0]["pid"]
    holder = Identity.of(pid)
    ask(arguments.name, "down")
    until = time.monotonic() + _END_S
    while holder is not None and holder.alive() and time.monotonic() < until:
        time.sleep(0.01)
    return {}, f'fabric "{arguments.name}" is down'


VERBS: dict[str, Callable[[argparse.Namespace], Shown]] = {
    "up": _up,
    "show": _show,
    "fault": _fault,
    "write": _write_memory,
    "flows": _flows,
    "capture": _capture,
    "exec": _exec,
    "dissector": _dissector,
    "down": _down,
}
