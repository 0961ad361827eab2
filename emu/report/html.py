"""The report as one page: it fetches nothing, so it can be mailed, archived by CI, and opened as a file.

Use: ``page(report.to_json(), links)`` with ``links`` = paths of logs beside the page. It is made from the JSON
document alone, so a saved report.json gives the same page.

Every picture has a text alternative and a table beside it. Latencies of one operation are the merged histogram's;
"at the card" are the daemon's own stamps, so the distance between both is the guest and QEMU.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote
from xml.etree.ElementTree import Element

from emu.report import svg
from emu.report.markup import node, render, table
from emu.units import format_duration, format_size, format_value
from emu.workloads.measures import PERCENTILES, Histogram, Series, percentile_name

_STEPS_PER_OCTAVE = 4  # of the drawn distribution; the histograms have at least 8
_CARD = "at the card"
_FABRIC = (
    "Use over the whole run; m marks, t trims, x losses. Dots are entropy values of MRC's queue pairs: green good, "
    "yellow skipped, red assumed bad, grey denied, hollow in reserve. Tooltips have the rest. Time is not dilated: "
    "rates are shares of lines as slow as the scenario has made them."
)

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1b1f; --dim: #5c5f66; --rule: #d9dbe0; --bad: #b3261e;
  --good: #146c2e; --c0: #1f5fae; --c1: #b4471b; --c2: #24793a; --c3: #7a3fa0; --c4: #8a6d00; --c5: #0a7480; }
@media (prefers-color-scheme: dark) { :root { --back: #17181c; --text: #e6e6ea; --dim: #a3a6ae; --rule: #3a3d45;
  --bad: #ff8a80; --good: #7fd694; --c0: #7db4ff; --c1: #ffa27a; --c2: #83d694; --c3: #cfa0f2; --c4: #e0c04f;
  --c5: #6fd3df; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 0 auto; padding: 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { border-top: 1px solid var(--rule); padding-top: 1rem; margin-top: 2rem; }
a { color: var(--c0); } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.dim { color: var(--dim); } .ok { color: var(--good); } .failed { color: var(--bad); } .scroll { overflow-x: auto; }
figure { margin: 1rem 0; } figcaption { color: var(--dim); }
table { border-collapse: collapse; margin: 0.5rem 0; } caption { text-align: left; color: var(--dim); }
th, td { padding: 0.15rem 0.7rem 0.15rem 0; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--rule); font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; } th[scope=row] { font-weight: normal; }
svg { width: 100%; height: auto; } svg text { fill: var(--text); font-size: 11px; }
.rule { stroke: var(--rule); stroke-width: 1; } .line { fill: none; stroke-width: 1.8; }
.mark { fill: none; stroke-width: 1; opacity: 0.7; } .area { stroke: none; opacity: 0.15; }
""" + "".join(
    f".c{i} {{ stroke: var(--c{i}); }} .area.c{i}, .block.c{i} {{ fill: var(--c{i}); stroke: none; }}\n"
    for i in range(svg.COLOURS)
)


def page(document: Mapping[str, Any], links: Sequence[str] = ()) -> str:
    """The page of a report (``Report.to_json()``); ``links`` are files relative to it."""
    name = document["name"]
    body = [
        node("h1", name),
        _verdict(document),
        _summary(document["workloads"]),
        *(part for number, one in enumerate(document["workloads"], 1) for part in _workload(number, one)),
        *(part for one in document["merged"] for part in _together(one)),
        *_dpus(document["dpus"]),
        *_fabric(document.get("fabric")),
        *_circumstances(document),
        *linked("Logs and files", links),
    ]
    return whole_page(f"{name}: dpu-emu report", body)


def whole_page(title: str, body: Iterable[Element]) -> str:
    """A page with our style."""
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("title", title),
        node("style", STYLE),
    )
    return render(node("html", head, node("body", node("main", *body)), lang="en"))


def _verdict(document: Mapping[str, Any]) -> Element:
    host = document["host"]
    facts = [f"started {document['started']}", f"took {format_duration(document['seconds'])}"]
    if host.get("accelerator"):
        facts.append(f"accelerator {host['accelerator']} ({host['accelerator_why']})")
    if host.get("load_start"):
        loads = " to ".join(f"{load[0]:.1f}" for load in (host["load_start"], host["load_end"]) if load)
        facts.append(f"load {loads} on {host['cores']} cores")
    verdict = node("strong", "passed" if document["ok"] else "failed", class_="ok" if document["ok"] else "failed")
    parts: list[Element | str] = [verdict, "; " + "; ".join(facts)]
    if document["error"]:
        parts.append(node("pre", document["error"], class_="failed"))
    return node("div", *parts)


def _fabric(document: dict[str, Any] | None) -> Iterable[Element]:
    if document is not None:
        from emu.fabric.picture import element

        yield node("h2", "fabric")
        yield node("p", _FABRIC)
        yield element(document)


# ---- workloads


def _summary(workloads: Sequence[Mapping[str, Any]]) -> Element:
    rows = []
    for number, one in enumerate(workloads, 1):
        found = {(sample["op"], sample["metric"]): sample for sample in one["samples"]}
        ops = [op for op in dict.fromkeys(sample["op"] for sample in one["samples"]) if (op, "ios") in found] or [""]
        for op in ops:
            figures = [
                _figure(found[op, metric]) if (op, metric) in found else ""
                for metric in ("iops", "bw_bytes", "clat_p50", "clat_p99", "clat_p99.9")
            ]
            outcome = "ok" if one["ok"] else "failed"
            place = f"{one['vm']} {one['device']}".strip()
            rows.append([f"{number}. {one['name']}", place, op, *figures, outcome])
    heads = ["workload", "on", "operation", "IOPS", "bandwidth", "p50", "p99", "p99.9", "result"]
    return table("Workloads", heads, rows)


def _workload(number: int, one: Mapping[str, Any]) -> Iterator[Element]:
    yield node("h2", f"{number}. {one['name']}", id=f"workload-{number}")
    place = ", ".join(text for text in (one["type"], one["vm"], one["device"]) if text)
    yield node("p", f"{place}: {'ok' if one['ok'] else 'failed'}, {format_duration(one['seconds'])}")
    if one["error"]:
        yield node("pre", one["error"], class_="failed")
    histograms = [Histogram.load(histogram) for histogram in one["histograms"]]
    card = one["card"]
    if card.get("latency"):
        histograms.append(Histogram("latency", "ns", _CARD, tuple(map(tuple, card["latency"]))))
    yield from _distribution(one["name"], [histogram for histogram in histograms if histogram.count])
    series = [Series.load(series) for series in one["series"]]
    for metric, label in (("iops", "I/Os per second"), ("bw_bytes", "bandwidth, MB/s")):
        yield from _over_time(one["name"], label, [one for one in series if one.metric == metric and one.points])
    if card.get("commands"):
        yield from _stages(one)
    if one["samples"]:
        rows = [[f"{s['op']} {s['metric']}".strip(), _figure(s)] for s in one["samples"]]
        yield _folded("All samples", table("Samples", ["metric", "value"], rows))


def _together(one: Mapping[str, Any]) -> Iterator[Element]:
    """Workloads of one name on several devices."""
    yield node("h2", f"{one['name']}, all together")
    yield node("p", f"The merged histograms of {', '.join(one['on'])}.")
    yield from _distribution(one["name"], [Histogram.load(histogram) for histogram in one["histograms"]])


def _distribution(name: str, histograms: Sequence[Histogram]) -> Iterator[Element]:
    if not histograms:
        return
    drawn = [distribution(histogram) for histogram in histograms]
    low = min(points[0][0] for points in drawn)
    high = max(points[-1][0] for points in drawn)
    marks = [[(percentile_name(p), max(one.percentile(p), low)) for p in PERCENTILES] for one in histograms]
    title = f"{name}: distribution of latency"
    words = "; ".join(
        f"{one.op}: median {_ns(one.percentile(50))}, 99 % within {_ns(one.percentile(99))}" for one in histograms
    )
    picture = svg.plot(
        title,
        f"Share of commands by latency on a logarithmic axis. {words}.",
        svg.Axis.log("latency", low, high, _ns),
        svg.Axis.linear("% of commands", 1.05 * max(share for points in drawn for _, share in points), "{:g}".format),
        [svg.Line(one.op, points, mark, filled=True) for one, points, mark in zip(histograms, drawn, marks)],
    )
    heads = ["operation", "commands", *(percentile_name(p) for p in PERCENTILES), "slowest"]
    rows = [
        [one.op, f"{one.count:,}", *(_ns(one.percentile(p)) for p in PERCENTILES), _ns(one.bins[-1][0])]
        for one in histograms
    ]
    yield _figure_with(picture, title, table("Percentiles of the merged histograms", heads, rows))


def distribution(histogram: Histogram) -> list[tuple[float, float]]:
    """(latency, % of commands) as steps of a quarter of an octave: histograms of different steps look alike."""
    counts: Counter[int] = Counter()
    for value, count in histogram.bins:
        counts[math.floor(math.log2(max(value, 1.0)) * _STEPS_PER_OCTAVE + 1e-9)] += count
    points: list[tuple[float, float]] = []
    for step in range(min(counts), max(counts) + 1):
        share = 100 * counts[step] / histogram.count
        points += [(2.0 ** (edge / _STEPS_PER_OCTAVE), share) for edge in (step, step + 1)]
    return points


def _over_time(name: str, label: str, series: Sequence[Series]) -> Iterator[Element]:
    if not series:
        return
    factor = 1e-6 if series[0].unit == "B/s" else 1.0
    lines = [svg.Line(one.op, [(at, value * factor) for at, value in one.points]) for one in series]
    title = f"{name}: {label} over time"
    words = "; ".join(
        f"{line.label}: {_plain(min(v for _, v in line.points))} to {_plain(max(v for _, v in line.points))}"
        for line in lines
    )
    picture = svg.plot(
        title,
        f"{label} over the seconds of the run. {words}.",
        svg.Axis.linear("seconds", max(at for line in lines for at, _ in line.points), "{:g}".format),
        svg.Axis.linear(label, 1.05 * max(value for line in lines for _, value in line.points), _plain),
        lines,
    )
    instants = sorted({at for line in lines for at, _ in line.points})
    values = [dict(line.points) for line in lines]
    rows = [[f"{at:g}", *(_plain(one[at]) if at in one else "" for one in values)] for at in instants]
    numbers = table(title, ["second", *(line.label for line in lines)], rows)
    yield _figure_with(picture, title, _folded("The same as a table", numbers))


def _stages(one: Mapping[str, Any]) -> Iterator[Element]:
    """Where the time of a mean command went."""
    card = one["card"]
    wait_ns, serve_ns = (card.get(key, 0) / card["commands"] for key in ("wait_ns", "serve_ns"))
    stages = {"waiting at the card": wait_ns, "served by the card": serve_ns}
    found = {(sample["op"], sample["metric"]): sample["value"] for sample in one["samples"]}
    ops = [op for op in ("read", "write", "trim") if (op, "clat_mean") in found]
    if ios := sum(found[op, "ios"] for op in ops):
        seen_ns = sum(found[op, "clat_mean"] * found[op, "ios"] for op in ops) / ios
        stages = {"guest and QEMU": max(seen_ns - wait_ns - serve_ns, 0.0), **stages}
    title = f"{one['name']}: time per stage"
    total_ns = sum(stages.values())
    shares = ", ".join(f"{stage} {_ns(value)}" for stage, value in stages.items())
    picture = svg.bars(
        title,
        f"The time of a mean command by stage: {shares}.",
        svg.Axis.linear("time of a mean command", total_ns, _ns),
        list(stages),
        [("mean command", list(stages.values()))],
    )
    rows = [
        [stage, _ns(value), f"{100 * value / total_ns:.1f} %" if total_ns else ""] for stage, value in stages.items()
    ]
    # The namespace counts through a controller reset, queues do not: their rows are never mixed.
    whole, queues = card["io"], {key: value for key, value in card.items() if type(value) is int}
    since = "" if card["complete"] else " since the controller reset"
    note = (
        since and f"The card's times and what its queues counted are{since}: the counts of earlier queues are gone."
    )
    yield _figure_with(
        picture,
        f"{title}. The guest's part, where there is one, is fio's mean completion latency less the card's. {note}",
        table("Time of a mean command", ["stage", "time", "share"], rows),
        table(
            "Counted by the namespace during the whole workload",
            ["counter", "sum", "per command"],
            _counters(whole, sum(value for key, value in whole.items() if key.startswith("num_"))),
        ),
        table(
            f"Counted by the controller's queues{since}",
            ["counter", "sum", "per command"],
            _counters({key: value for key, value in queues.items() if key not in whole}, card["commands"]),
        ),
    )


def _counters(counts: Mapping[str, int], commands: int) -> list[list[str]]:
    return [
        [key.replace("_", " "), f"{count:,}", _plain(count / commands) if commands else ""]
        for key, count in counts.items()
    ]


# ---- the rest


def _dpus(dpus: Mapping[str, Any]) -> Iterator[Element]:
    rows = []
    for name, one in dpus.items():
        restarts = one["worker_restarts"]
        rows.append([name, "" if restarts is None else str(restarts), one["error"]])
    if rows:
        yield node("h2", "DPUs")
        yield table("DPUs", ["DPU", "restarts of its worker", "error"], rows)
        stats = {name: one["stats"] for name, one in dpus.items() if one["stats"]}
        yield _folded("Their last statistics", node("pre", json.dumps(stats, indent=1)))


def _circumstances(document: Mapping[str, Any]) -> Iterator[Element]:
    yield node("h2", "Circumstances")
    rows = []
    for key, value in document["host"].items():
        if value is not None:
            text = " ".join(f"{one:.2f}" for one in value) if isinstance(value, list | tuple) else str(value)
            rows.append([key.replace("_", " "), format_size(value) if key == "memory_bytes" else text])
    rows += [[f"VM {name}", "restored" if vm["restored"] else "booted"] for name, vm in document["vms"].items()]
    yield table("Host", ["what", "value"], rows)
    for note in document["notes"]:
        yield node("p", note, class_="dim")
    yield _folded("The scenario, every default filled in", node("pre", json.dumps(document["scenario"], indent=1)))


def linked(title: str, links: Sequence[str]) -> Iterator[Element]:
    """A list of links, if there are any."""
    if links:
        yield node("h2", title)
        yield node("ul", *(node("li", node("a", link, href=quote(link))) for link in links))


def _folded(summary: str, content: Element) -> Element:
    return node("details", node("summary", summary), content)


def _figure_with(picture: Element, caption: str, *beside: Element) -> Element:
    return node("figure", picture, node("figcaption", caption), *beside)


def _figure(sample: Mapping[str, Any]) -> str:
    return format_value(sample["value"], sample["unit"])


def _ns(value: float) -> str:
    return format_value(value, "ns")


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
