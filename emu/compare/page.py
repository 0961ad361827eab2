"""A comparison as a page and as a table for a terminal.

Use: ``page(comparison.to_json(), links)``; ``print_comparison(comparison.to_json(), console)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from emu.report import svg
from emu.report.html import linked, whole_page
from emu.report.markup import node, table
from emu.units import format_value, plural

HEADS = ["measure", "BASE", "NEW", "NEW : BASE", "95 % interval", "effect", "adjusted p", "verdict"]
_WORDS = {
    "same": "no difference",
    "worse": "NEW is worse",
    "different": "NEW differs",
    "undecided": "undecided: too few runs to tell",
}
_CLASSES = {"worse": "failed", "better": "ok", "changed": "failed"}


def page(document: Mapping[str, Any], links: Sequence[str] = ()) -> str:
    """The page; ``links`` are the reports of the runs, relative to it."""
    body = [node("h1", headline(document)), node("p", subject(document))]
    for number, trial in enumerate(document["trials"], 1):
        if len(document["trials"]) > 1:
            body.append(node("h2", f"Trial {number}: {_WORDS[trial['outcome']]}"))
        body += list(_trial(trial))
    body += [node("p", note, class_="dim") for note in document["notes"]]
    return whole_page("dpu-emu comparison", [*body, *linked("Runs", links)])


def headline(document: Mapping[str, Any]) -> str:
    """The outcome in a line."""
    if not document["aa"]:
        return _WORDS[document["outcome"]]
    outcomes, most = [trial["outcome"] for trial in document["trials"]], 100 * document["upper_bound"]
    words = f"A/A: {document['false_positives']} of {plural(len(outcomes), 'trial')} found a difference"
    if undecided := outcomes.count("undecided"):
        words += f", {undecided} had too few runs to tell"
    return words if most == 100 else f"{words}; with 95 % confidence at most {most:.0f} % of trials would"


def subject(document: Mapping[str, Any]) -> str:
    """What was compared."""
    how = (
        "saved reports"
        if document["pairs"] is None
        else f"{plural(document['pairs'], 'pair')}, seed {document['seed']}"
    )
    sides = f"BASE {document['base']}, NEW {document['new']}"
    return f"{sides}; {how}; a difference is an adjusted p below {document['alpha']}"


def _trial(trial: Mapping[str, Any]) -> Iterator[Element]:
    ratios = [one for one in trial["findings"] if one["ratio"] is not None and one["low"] is not None]
    if ratios:
        low = min(0.95, *(one["low"] for one in ratios))
        high = max(1.05, *(one["high"] for one in ratios))
        words = "; ".join(f"{one['name']} {one['ratio']:.3f}" for one in ratios)
        picture = svg.intervals(
            "NEW : BASE of each measure",
            f"Ratio with its 95 % interval; 1 is no difference. {words}.",
            svg.Axis.linear("NEW : BASE", high, "{:g}".format, low=low),
            [(one["name"], one["low"], one["ratio"], one["high"]) for one in ratios],
            reference=1.0,
        )
        yield node("figure", picture, node("figcaption", "Ratios with their 95 % intervals"), _table(trial))
    else:
        yield _table(trial)


def _table(trial: Mapping[str, Any]) -> Element:
    made = table("Every measure", HEADS, [cells(one) for one in trial["findings"]])
    for row, one in zip(made.iter("tr"), [None, *trial["findings"]]):
        if one is not None and one["verdict"] in _CLASSES:
            row[-1].set("class", _CLASSES[one["verdict"]])
    return made


def cells(one: Mapping[str, Any]) -> list[str]:
    """A finding as the cells of a row."""
    interval = "" if one["low"] is None else f"{one['low']:.3f}-{one['high']:.3f}"
    return [
        one["name"],
        format_value(one["base"], one["unit"]),
        format_value(one["new"], one["unit"]),
        "" if one["ratio"] is None else f"{one['ratio']:.3f}",
        interval,
        "" if one["effect"] is None else f"{one['effect']:+.2f}",
        "exact" if one["kind"] == "exact" else "" if one["adjusted"] is None else f"{one['adjusted']:.4f}",
        one["verdict"],
    ]


def print_comparison(document: Mapping[str, Any], console: Console) -> None:
    """Every trial's table, the notes, the outcome."""
    for number, trial in enumerate(document["trials"], 1):
        title = f"trial {number}" if len(document["trials"]) > 1 else ""
        shown = Table(title=title or None, title_justify="left")
        for place, head in enumerate(HEADS):
            shown.add_column(head, justify="left" if place in (0, len(HEADS) - 1) else "right", overflow="fold")
        alike = [one for one in trial["findings"] if one["kind"] == "exact" and one["verdict"] == "same"]
        for one in trial["findings"]:
            if one in alike:
                continue
            style = {"worse": "red", "better": "green", "changed": "yellow", "undecided": "yellow"}.get(
                one["verdict"], ""
            )
            shown.add_row(*map(escape, cells(one)), style=style)
        console.print(shown)
        console.print(f"the same in all runs: {plural(len(alike), 'deterministic count')}", highlight=False)
    for note in document["notes"]:
        console.print(escape(note), style="dim", highlight=False)
    console.print(escape(subject(document)), style="dim", highlight=False)
    console.print(escape(headline(document)), highlight=False)
