"""A fabric as SVG: a panel per plane, T1 switches above T0 switches above hosts, links coloured by what they carry.

Use: ``svg(sample("fabric", 0.5))`` (emu.fabric.client); the document is that of `emu fabric show --json`.
A link is as dark and as wide as its busier direction is full; red where packets were lost, dashed where it is down.
Its marks (m), trims (t) and losses (x) since the fabric came up stand beside it, everything in its tooltip. Below
each plane, a line for each MRC queue pair that has told of itself: a dot for each of its entropy values there, filled
while it takes turns, coloured by its state.
Limits: fit for reading up to some hundred links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element
from xml.sax.saxutils import escape

NAMESPACE = "http://www.w3.org/2000/svg"
_HOST_WIDTH, _ROW, _MARGIN, _HEAD = 78, 150, 30, 56
_BOX_WIDTH, _BOX_HEIGHT = 66, 22
_PAIR_HEIGHT, _PAIRS_MAX, _DOT = 18, 32, 14
_STATES = {"good": "#2a7", "skip": "#da3", "assumed bad": "#c22", "denied": "#888"}
_STYLE = """\
.fabric text { font: 11px sans-serif; fill: #222 } .fabric .head { font-weight: bold; font-size: 13px }
.fabric .node { fill: #fff; stroke: #444 } .fabric .switch { fill: #eef3fa }
.fabric .note { font-size: 9px; fill: #a33 } .fabric .back { fill: #fff }
"""
Document = dict[str, Any]
Place = tuple[float, float]


def rate(bits_per_second: int) -> str:
    """100000000 as "100M"."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:g}{unit}"
    return str(bits_per_second)


def dropped(packets: dict[str, int]) -> int:
    """Packets that went nowhere, by whatever cause."""
    return sum(packets[cause] for cause in ("down", "loss", "limit", "priority limit", "trim limit"))


def svg(document: Document) -> str:
    """The picture."""
    topology = document["topology"]
    hosts = topology["t0_per_plane"] * topology["hosts_per_t0"]
    width = max(hosts, topology["t1_per_plane"]) * _HOST_WIDTH + 2 * _MARGIN
    pairs = document.get("endpoints", [])[:_PAIRS_MAX]  # reports of before have none
    foot = _HEAD + 2 * _ROW + _BOX_HEIGHT + _MARGIN
    height = foot + _PAIR_HEIGHT * len(pairs)
    parts = []
    for plane in range(topology["planes"]):
        places = _places(topology, plane, width)
        links = [link for link in document["links"] if link["plane"] == plane]
        drawn = [_link(link, places) for link in links] + [_node(name, place) for name, place in places.items()]
        drawn += [_pair(pair, plane, foot + _PAIR_HEIGHT * number) for number, pair in enumerate(pairs)]
        head = f'<text class="head" x="{_MARGIN}" y="{_HEAD - 30}">plane {plane}</text>'
        parts.append(f'<g transform="translate({plane * width} 0)">{head}{"".join(drawn)}</g>')
    size = f"{topology['planes'] * width} {height}"
    title = escape(f"{document['name']}, engine {document['engine']}")
    return (
        f'<svg xmlns="{NAMESPACE}" class="fabric" viewBox="0 0 {size}" role="img">\n<title>{title}</title>\n'
        f'<style>{_STYLE}</style>\n<rect class="back" width="100%" height="100%"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def element(document: Document) -> Element:
    """The picture as a part of an HTML page, which needs no name space."""
    return ElementTree.fromstring(svg(document).replace(f' xmlns="{NAMESPACE}"', ""))


def compared(before: Document, after: Document) -> Document:
    """``after`` with the ``utilisation`` of each end since ``before``: a share of its rate."""
    seconds = after["time_s"] - before["time_s"]
    for old, new in zip(before["links"], after["links"], strict=True):
        for was, end in zip(old["ends"], new["ends"], strict=True):
            bits = 8 * (end["sent_bytes"] - was["sent_bytes"])
            end["utilisation"] = bits / seconds / end["rate_bps"] if seconds > 0 else 0.0
    return after


def _places(topology: Document, plane: int, width: float) -> dict[str, Place]:
    """The middle of every node of a plane."""
    t0s, t1s, below = (topology[key] for key in ("t0_per_plane", "t1_per_plane", "hosts_per_t0"))

    def row(count: int, y: float) -> list[Place]:
        step = (width - 2 * _MARGIN) / count
        return [(_MARGIN + step * (number + 0.5), y) for number in range(count)]

    names = [f"p{plane}-t1-{number}" for number in range(t1s)]
    places = dict(zip(names, row(t1s, _HEAD)))
    places |= dict(zip([f"p{plane}-t0-{number}" for number in range(t0s)], row(t0s, _HEAD + _ROW)))
    return places | dict(zip([f"h{number}" for number in range(t0s * below)], row(t0s * below, _HEAD + 2 * _ROW)))


def _node(name: str, place: Place) -> str:
    x, y = place
    kind = "node" if name.startswith("h") else "node switch"
    corner = f'x="{x - _BOX_WIDTH / 2:.0f}" y="{y - _BOX_HEIGHT / 2:.0f}"'
    box = f'<rect class="{kind}" {corner} width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="4"/>'
    return f'{box}<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle">{name}</text>'


def in_words(evs: Sequence[Document]) -> str:
    """Entropy values of one plane: "2 good", or "1 good, assumed bad: p0-t1-1"."""
    others: dict[str, list[str]] = {}
    for ev in evs:
        if ev["state"] != "good":
            others.setdefault(ev["state"], []).append(ev["t1"])
    good = sum(ev["state"] == "good" for ev in evs)
    named = [f"{state}: {' '.join(via)}" if any(via) else state for state, via in others.items()]
    return ", ".join([f"{good} good"] * bool(good) + named)


def _pair(pair: Document, plane: int, y: float) -> str:
    """A queue pair's entropy values of a plane, in a line."""
    evs = [ev for ev in pair["evs"] if ev["plane"] == plane]
    dots = []
    for number, ev in enumerate(evs):
        colour, x = _STATES[ev["state"]], _MARGIN + _BOX_WIDTH + 10 + _DOT * number
        tooltip = f"{ev['ev']:#x} {'by ' + ev['t1'] if ev['t1'] else 'below one T0'}: {ev['state']}"
        fill = colour if ev["active"] else "none"
        dots.append(
            f'<circle cx="{x}" cy="{y - 4:.0f}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2">'
            f"<title>{escape(tooltip + ('' if ev['active'] else ', in reserve'))}</title></circle>"
        )
    name = escape(f"{pair['src']} to {pair['dst']}")
    return (
        f'<g><text x="{_MARGIN}" y="{y:.0f}">{name}<title>{escape(in_words(evs))}</title></text>{"".join(dots)}</g>'
    )


def _link(link: Document, places: dict[str, Place]) -> str:
    (x1, y1), (x2, y2) = (places[end["node"]] for end in link["ends"])
    used = min(1.0, max(end["utilisation"] for end in link["ends"]))
    marks, trims = (sum(end["packets"][cause] for end in link["ends"]) for cause in ("ecn", "trim"))
    lost = sum(dropped(end["packets"]) for end in link["ends"])
    down = any("down" in end["state"] for end in link["ends"])
    level = round(190 - 150 * used)
    colour = "#c22" if lost or down else f"rgb({level},{level},{round(200 - 40 * used)})"
    dash = ' stroke-dasharray="5 4"' if down else ""
    line = (
        f'x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="{colour}" stroke-width="{1 + 4 * used:.1f}"'
    )
    note = " ".join(f"{letter}{count}" for letter, count in (("m", marks), ("t", trims), ("x", lost)) if count)
    x, y = x1 + (x2 - x1) * 0.35, y1 + (y2 - y1) * 0.35
    text = f'<text class="note" x="{x:.0f}" y="{y:.0f}">{note}</text>' if note else ""
    return f"<g><title>{escape(_tooltip(link))}</title><line {line}{dash}/>{text}</g>"


def _tooltip(link: Document) -> str:
    lines = []
    for end, other in zip(link["ends"], reversed(link["ends"])):
        counts = ", ".join(f"{name} {count}" for name, count in {**end["packets"], **end["faults"]}.items() if count)
        state = "".join(f", {name} {share:g}" for name, share in end["state"].items())
        used = f"{end['utilisation']:.0%} of {rate(end['rate_bps'])}b/s"
        lines.append(f"{end['node']} to {other['node']}: {used}; {counts or 'nothing'}{state}")
    return "\n".join(lines)
