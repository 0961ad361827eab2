"""The command line of `emu fabric`; what its verbs do is in emu.fabric.client."""

from __future__ import annotations

import argparse
from pathlib import Path

from net.experiments.arguments import add_arguments as add_experiments

EXAMPLES = """\
examples:
  emu fabric up --planes 2 --t0 2 --t1 2 --hosts 2 --rate 100M
  emu fabric up my.toml                                   its table [fabric]
  emu fabric show --svg fabric.svg
  emu fabric show --watch 1
  emu fabric fault p0-t0-0:p0-t1-1 loss=0.01 by=p0-t0-0   also down, up, rate=10M, corrupt=, duplicate=, reorder=
  emu fabric fault p0-t1-0 blackhole                      a switch that stays up and forwards nothing; undo: forward
  emu fabric fault heal                                   ends all of them, set rates too; fault LINK heal: of one
  emu fabric write h0:h3 h1:h3 --size 64M                 MRC writes, here an incast; show has the EVs' states
  emu fabric exec h0 -- ping -c 1 fd00::4                 any program of this machine; ping: package iputils-ping
  emu fabric capture h0:p0-t0-0 h0.pcap
  emu fabric down
  emu fabric experiments C13 C20 --seeds 3 --out out/experiments   the MRC paper's, simulated; no root

"""


def add_verbs(fabric: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Every verb with its options."""
    verbs = fabric.add_subparsers(required=True, metavar="VERB", dest="verb")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, parents=[common], help=text, description=text)
        verb.add_argument("--name", default="fabric", help="which fabric, where there are several (default: fabric)")
        return verb

    up = add("up", "Bring a fabric up; it stays until `emu fabric down`.")
    up.add_argument("scenario", nargs="?", help="a scenario with a table [fabric]; else the options say what it is")
    for key, text in (
        ("planes", "planes (default: 2)"),
        ("t0", "T0 switches in a plane (default: 2)"),
        ("t1", "T1 switches in a plane (default: 2)"),
        ("hosts", "hosts below a T0 (default: 2)"),
        ("radix", "ports of a switch, in place of the three above"),
        ("rate", 'line rate, such as "100M" (default)'),
        ("uplink-rate", "line rate between switches (default: the same)"),
        ("engine", "kernel (default), ebpf or scapy"),
        ("ecn", "bytes of queue above which packets are marked; 0: never"),
        ("trim", "bytes of queue above which they are trimmed; 0: never"),
        ("last-hop-trim", "the same on ports to hosts"),
        ("limit", "bytes of queue above which they are dropped"),
    ):
        up.add_argument(f"--{key}", metavar="VALUE", help=text)
    up.add_argument("--plan", type=Path, metavar="FILE", help="write uSIDs, addresses and routes there (TOML)")

    show = add("show", "Every link: utilisation, marks, trims, losses.")
    show.add_argument("--svg", type=Path, metavar="FILE", help="a picture of the topology")
    show.add_argument("--watch", type=float, metavar="SECONDS", help="again and again, until Ctrl-C")
    show.add_argument("--interval", type=float, default=0.5, metavar="SECONDS", help="what utilisation is over")
    show.add_argument("--plan", action="store_true", help="uSIDs and addresses instead")

    fault = add("fault", "Make a link or a switch bad, or good again.")
    fault.add_argument("target", help="a link, a switch, or heal: ends all of them")
    fault.add_argument(
        "change",
        nargs="*",
        help="heal, down, up, blackhole, forward, loss=, corrupt=, duplicate=, reorder=, rate=, by=NODE",
    )

    write = add("write", "MRC writes between hosts, all pairs at once; memory is compared at the end.")
    write.add_argument("pairs", nargs="+", metavar="FROM:TO", help="such as h0:h3")
    write.add_argument("--size", default="16M", metavar="BYTES", help="of each pair (default: 16M)")

    add("flows", "What has arrived at hosts, by sender and entropy value, with its path.")
    capture = add("capture", "Write what passes a link to a pcap file; without a file, end that.")
    capture.add_argument("link")
    capture.add_argument("file", nargs="?", type=Path)
    execute = add("exec", "Run a program in a node.")
    execute.add_argument("node")
    execute.add_argument("program", nargs=argparse.REMAINDER, help="after --")
    add_experiments(add("experiments", "The MRC paper's experiments in simulation, as a table; no fabric is needed."))
    add("dissector", "Print a Wireshark dissector for MRC (Lua).")
    add("down", "Take the fabric down.")
