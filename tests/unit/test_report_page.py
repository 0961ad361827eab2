"""The page: well-formed, self-contained, escaped, with words and numbers for whoever does not see the pictures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from emu.report import svg
from emu.report.document import Report
from emu.report.html import STYLE, distribution, page
from emu.report.markup import render
from emu.workloads import fio
from emu.workloads.measures import Histogram, Series
from tests.unit.test_measures import LOG, REPORT
from tests.unit.test_report import report

VOID = {"meta", "br", "link", "img", "input", "hr"}
HOSTILE = "<script>alert('&')</script>"


class Page(HTMLParser):
    """The elements as a flat list of (tag, attributes, path of open tags, text); refuses unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[int] = []
        self.found: list[tuple[str, dict[str, str]]] = []
        self.above: list[list[int]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, [self.found[index] for index in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), attrs
        self.above.append(list(self.open))
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        self.texts.append("")
        if tag not in VOID:
            self.open.append(len(self.found) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self.open.pop()][0] == tag, tag

    def handle_data(self, data: str) -> None:
        for index in self.open:
            self.texts[index] += data

    def all(self, tag: str, below: int | None = None) -> list[int]:
        return [
            index
            for index, (name, _) in enumerate(self.found)
            if name == tag and (below is None or below in self.above[index])
        ]

    def attribute(self, index: int, name: str) -> str:
        return self.found[index][1].get(name, "")


def full_report() -> Report:
    of = report()
    reads, _ = of.workloads
    reads.samples = fio.samples_of(REPORT)
    reads.histograms = [one for one in fio.histograms_of(REPORT) if ":" not in one.op]
    reads.series = fio.series_of(LOG, "iops", "1/s", 250) + fio.series_of(LOG, "bw_bytes", "B/s", 250, 1024)
    reads.card = {
        "io": {"bytes_read": 409600, "num_read_ops": 100},
        "commands": 100, "wait_ns": 100_000, "serve_ns": 300_000, "punts": 3, "latency": [[3072, 60], [6144, 40]],
        "complete": True,
    }  # fmt: skip
    of.workloads.append(replace(reads, vm="other"))
    return of


@pytest.fixture(scope="module")
def whole() -> Page:
    return Page(page(full_report().to_json(), ["lab/web/console.log", "workloads/02 x/fio.json"]))


def test_nothing_is_fetched(whole: Page) -> None:
    text = page(full_report().to_json())
    assert not re.search(r"url\(|@import|<script|<link|src=|https?://", text.replace("<!DOCTYPE html>", ""))
    links = [whole.attribute(index, "href") for index in whole.all("a")]
    assert links == ["lab/web/console.log", "workloads/02%20x/fio.json"]


def test_light_and_dark() -> None:
    assert "color-scheme: light dark" in STYLE
    bright, dark = STYLE.split("@media (prefers-color-scheme: dark)", 1)
    names = set(re.findall(r"(--[\w]+):", bright))
    assert names and names == set(re.findall(r"(--[\w]+):", dark.split("} }", 1)[0]))
    assert set(re.findall(r"var\((--\w+)\)", STYLE)) <= names
    assert not re.search(r"#[0-9a-f]{3,6}", page(full_report().to_json()).split("</style>")[1])


def test_every_picture_has_words_and_a_table_beside_it(whole: Page) -> None:
    pictures = whole.all("svg")
    # distribution, IOPS, bandwidth, stages of each of two fio workloads; the distribution of both together
    assert len(pictures) == 2 * 4 + 1
    for index in pictures:
        assert whole.attribute(index, "role") == "img"
        names = whole.attribute(index, "aria-labelledby").split()
        titled = {
            whole.attribute(at, "id"): whole.texts[at] for tag in ("title", "desc") for at in whole.all(tag, index)
        }
        assert set(names) == set(titled) and all(titled.values())
        (figure,) = [at for at in whole.above[index] if whole.found[at][0] == "figure"]
        assert whole.all("figcaption", figure) and whole.all("table", figure)
    for index in whole.all("table"):
        assert whole.all("caption", index)
        assert {whole.attribute(at, "scope") for at in whole.all("th", index)} <= {"col", "row"}
    ids = [whole.attribute(index, "id") for index in range(len(whole.found)) if whole.attribute(index, "id")]
    assert len(ids) == len(set(ids))
    assert whole.attribute(whole.all("html")[0], "lang") == "en"


def test_what_a_reader_looks_for(whole: Page) -> None:
    text = whole.texts[whole.all("main")[0]]
    for words in ("verify: bad magic [header]", "tcg", "asked for", "load start", "said once", "worker"):
        assert words in text
    assert "failed" in whole.texts[whole.all("strong")[0]]
    stages = next(whole.texts[i] for i in whole.all("table") if "Time of a mean command" in whole.texts[i])
    assert "waiting at the card1 us" in stages and "served by the card3 us" in stages
    tables = [whole.texts[i] for i in whole.all("table")]
    assert any("Counted by the namespace" in text and "num read ops1001" in text for text in tables)
    assert any("bytes read409,6004,096" in text for text in tables), "4,096 per command, not 4.1e+03"
    assert any("Counted by the controller's queuescounter" in text and "punts30.03" in text for text in tables)
    together = next(whole.texts[i] for i in whole.all("p") if "merged histograms of" in whole.texts[i])
    assert "web card.disk, other card.disk" in together


def test_counts_before_and_since_a_reset_are_apart() -> None:
    """As verify leaves them: what was written came before the reset, so the queues made anew know of reads only."""
    of = full_report()
    of.workloads.pop()
    io = {"bytes_read": 8192, "num_read_ops": 2, "bytes_written": 4096, "num_write_ops": 2}
    since = {"commands": 1, "bytes_read": 4096, "bytes_written": 0, "punts": 3, "complete": False}
    of.workloads[0].card |= {"io": io, **since}
    shown = Page(page(of.to_json()))
    namespace, queues = (shown.texts[i] for i in shown.all("table") if "Counted by" in shown.texts[i])
    assert "bytes written4,096" in namespace and "num write ops20.5" in namespace and "punts" not in namespace
    assert "queues since the controller reset" in queues and "punts33" in queues and "bytes" not in queues


def test_numbers_that_are_shown_are_those_of_the_merge() -> None:
    document = full_report().to_json()
    (merged,) = document["merged"]
    single = {one["op"]: Histogram.load(one) for one in document["workloads"][0]["histograms"]}
    for one in merged["histograms"]:
        assert one["bins"] == tuple((value, 2 * count) for value, count in single[one["op"]].bins)
    shown = Page(page(document))
    rows = [shown.texts[index] for index in shown.all("tr")]
    count = single["read"].count
    assert sum(row.startswith(f"read{count:,}") for row in rows) == 2
    assert sum(row.startswith(f"read{2 * count:,}") for row in rows) == 1


def test_one_device_has_nothing_to_merge() -> None:
    of = full_report()
    of.workloads.pop()
    assert of.to_json()["merged"] == []


def test_text_cannot_become_markup() -> None:
    of = full_report()
    of.name = of.error = of.notes[0] = of.workloads[0].name = of.workloads[1].error = HOSTILE
    of.workloads[0].histograms = [replace(of.workloads[0].histograms[0], op=HOSTILE)]
    hostile = Page(page(of.to_json(), [HOSTILE]))
    assert not hostile.all("script")
    assert HOSTILE in hostile.texts[hostile.all("h1")[0]]


def test_a_run_that_never_came_up() -> None:
    empty = Page(page(Report("x", {}, error="no QEMU").to_json()))
    assert "no QEMU" in empty.texts[empty.all("main")[0]] and not empty.all("svg")


def test_the_page_is_made_from_the_saved_json(tmp_path: Path) -> None:
    of = full_report()
    path = of.write(tmp_path / "out")
    (tmp_path / "out/lab/web").mkdir(parents=True)
    (tmp_path / "out/lab/web/console.log").write_text("hello")
    of.write(tmp_path / "out")
    written = Page((tmp_path / "out/report.html").read_text())
    links = [written.attribute(index, "href") for index in written.all("a")]
    assert links == ["workloads/02-verify/fio.json", "lab/web/console.log"]
    assert all((tmp_path / "out" / link).is_file() for link in links)

    def numbers_apart(text: str) -> str:  # ids count on
        return re.sub(r"svg\d+", "svg", text)

    assert numbers_apart(page(json.loads(path.read_text()), links)) == numbers_apart(
        (tmp_path / "out/report.html").read_text()
    )


# -- plots


def attributes(index: int, of: Page, *names: str) -> tuple[float, ...]:
    return tuple(float(of.attribute(index, name)) for name in names)


def test_a_line_is_drawn_to_scale() -> None:
    x = svg.Axis.log("x", 10, 1000, str)
    y = svg.Axis.linear("y", 4, str)
    drawn = Page(render(svg.plot("t", "d", x, y, [svg.Line("l", [(10, 0), (100, 2), (1000, 4)], [("m", 100)])])))
    (line,) = drawn.all("polyline")
    (x0, y0), (x1, y1), (x2, y2) = [
        tuple(map(float, point.split(","))) for point in drawn.attribute(line, "points").split()
    ]
    assert x0 < x1 < x2 and y0 > y1 > y2
    assert (x1 - x0, y0 - y1) == (pytest.approx(x2 - x1, abs=0.2), pytest.approx(y1 - y2, abs=0.2))
    (mark,) = [index for index in drawn.all("line") if drawn.attribute(index, "class").startswith("mark")]
    assert attributes(mark, drawn, "x1", "x2") == (pytest.approx(x1, abs=0.1),) * 2


def test_bars_are_as_long_as_their_values() -> None:
    drawn = Page(render(svg.bars("t", "d", svg.Axis.linear("x", 10, str), ("a", "b"), [("row", (2.5, 7.5))])))
    first, second = [
        attributes(index, drawn, "x", "width") for index in drawn.all("rect") if drawn.attribute(index, "y") != "6"
    ]
    assert second[1] == pytest.approx(3 * first[1], abs=0.1) and second[0] == pytest.approx(sum(first), abs=0.1)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (svg.Axis.linear("", 10, str), [0, 2, 4, 6, 8, 10]),
        (svg.Axis.linear("", 0, str), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (svg.Axis.linear("", 1.2, str, low=0.8), [0.8, 0.9, 1.0, 1.1, 1.2]),
        (svg.Axis.log("", 1000, 30000, str), [1e3, 2e3, 5e3, 1e4, 2e4]),
        (svg.Axis.log("", 1, 1e6, str), [1, 10, 100, 1e3, 1e4, 1e5, 1e6]),
        (svg.Axis.log("", 5, 5, str), [5]),
    ],
)
def test_ticks_are_round_and_on_the_axis(axis: svg.Axis, expected: list[float]) -> None:
    ticks = axis.ticks()
    assert ticks == pytest.approx(expected)
    assert all(-1e-9 <= axis.place(tick) <= 1 + 1e-9 for tick in ticks)


def test_the_drawn_distribution_has_all_commands() -> None:
    points = distribution(Histogram("clat", "ns", "read", ((1100, 1), (1200, 1), (70000, 2))))
    steps = list(zip(points[::2], points[1::2]))
    assert sum(share for (_, share), _ in steps) == 100
    for (begin, share), (end, same) in steps:
        assert end / begin == pytest.approx(2**0.25) and share == same
    assert steps[0][0][0] <= 1100 < 1200 < steps[0][1][0] and steps[0][0][1] == 50
    assert steps[-1][0][0] <= 70000 < steps[-1][1][0] and steps[-1][0][1] == 50


def test_series_of_one_point() -> None:
    of = full_report()
    of.workloads[0].series = [Series("iops", "1/s", "read", ((0.5, 0.0),))]
    Page(page(of.to_json()))
