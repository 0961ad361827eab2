"""Plots as SVG elements for a page: lines over a linear or logarithmic axis, stacked bars, intervals.

Use::

    x = Axis.log("latency", 1e3, 1e6, format_ns)
    plot("Latency", "what a reader who cannot see it should know", x, y, [Line("read", points)])

Colours are CSS variables of the page (``--c0`` ... of class ``c0`` ...), so that a page can be light or dark; lines
differ by their dashes too. Every plot has a title and a description for those who do not see it.

Limits: up to ``COLOURS`` lines are told apart.

Source: SVG 2, https://www.w3.org/TR/SVG2/; WAI-ARIA Graphics (role img with title and desc).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from xml.etree.ElementTree import Element

from emu.report.markup import node

COLOURS = 6
_WIDTH, _HEIGHT = 720.0, 240.0
_LEFT, _RIGHT, _BOTTOM, _ROW = 64.0, 12.0, 40.0, 15.0
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4", "12 4")
_NEARLY = 1e-9  # 1.2 / 0.1 is a little less than 12
_numbers = count(1)  # ids are unique in a page


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``; ``text`` writes a value for a person."""

    label: str
    low: float
    high: float
    text: Callable[[float], str]
    logarithmic: bool = False

    @classmethod
    def linear(cls, label: str, high: float, text: Callable[[float], str], low: float = 0.0) -> Axis:
        """From ``low`` to ``high`` or a little more."""
        return cls(label, low, high if high > low else low + 1.0, text)

    @classmethod
    def log(cls, label: str, low: float, high: float, text: Callable[[float], str]) -> Axis:
        """Between two values above 0, which may be equal."""
        return cls(label, low / 1.1, high * 1.1, text, logarithmic=True)

    def place(self, value: float) -> float:
        """0.0 at ``low``, 1.0 at ``high``."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """A handful of round values on the axis."""
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps: tuple[int, ...] = (1,) if len(decades) > 5 else (1, 2, 5)
            values = [step * 10.0**decade for decade in decades for step in steps]
        else:
            step = _round_step((self.high - self.low) / 5)
            first, last = math.ceil(self.low / step - _NEARLY), math.floor(self.high / step + _NEARLY)
            return [index * step for index in range(first, last + 1)]
        return [value for value in values if self.low <= value <= self.high]


@dataclass(frozen=True)
class Line:
    """``points`` by ascending x; ``marks`` are labelled x values, such as percentiles."""

    label: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[tuple[str, float]] = ()
    filled: bool = False


def plot(title: str, description: str, x: Axis, y: Axis, lines: Sequence[Line]) -> Element:
    """Lines, each with a row for its name and its marks above the plot."""
    top = _ROW * len(lines) + 8
    height = top + _HEIGHT + _BOTTOM
    inner = _WIDTH - _LEFT - _RIGHT

    def across(value: float) -> float:
        return _LEFT + inner * min(max(x.place(value), 0.0), 1.0)

    def down(value: float) -> float:
        return top + _HEIGHT * (1 - min(max(y.place(value), 0.0), 1.0))

    parts: list[Element] = []
    for value in y.ticks():
        parts.append(_rule(_LEFT, down(value), _LEFT + inner, down(value)))
        parts.append(_text(_LEFT - 6, down(value) + 4, y.text(value), "end"))
    parts += _axis_below(x, across, _LEFT + inner / 2, top, top + _HEIGHT)
    middle = top + _HEIGHT / 2
    parts.append(_text(14, middle, y.label, "middle", transform=f"rotate(-90 14 {middle:.1f})"))
    for number, line in enumerate(lines):
        colour, row = f"c{number % COLOURS}", 12 + _ROW * number
        dash = _DASHES[number % COLOURS]
        parts.append(
            node("path", d=f"M{_LEFT - 56:.0f} {row - 4:.0f}h24", class_=f"line {colour}", stroke_dasharray=dash)
        )
        parts.append(_text(_LEFT - 28, row, line.label, "start"))
        path = " ".join(f"{across(at):.1f},{down(value):.1f}" for at, value in line.points)
        if line.filled and line.points:
            begin, end = across(line.points[0][0]), across(line.points[-1][0])
            area = f"{begin:.1f},{top + _HEIGHT:.1f} {path} {end:.1f},{top + _HEIGHT:.1f}"
            parts.append(node("polygon", points=area, class_=f"area {colour}"))
        parts.append(node("polyline", points=path, class_=f"line {colour}", stroke_dasharray=dash))
        used = _LEFT + 8.0 * len(line.label)
        for label, value in line.marks:
            at = across(value)
            parts.append(
                node(
                    "line", x1=at, y1=row + 2, x2=at, y2=top + _HEIGHT, class_=f"mark {colour}", stroke_dasharray=dash
                )
            )
            width = 8.0 * len(label)
            if at > used:
                fits = at + width < _WIDTH
                parts.append(_text(at + 2 if fits else at - 2, row, label, "start" if fits else "end"))
                used = at + width
    return _picture(title, description, height, parts)


def bars(
    title: str, description: str, axis: Axis, parts: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]
) -> Element:
    """One bar for each row, made of ``parts`` one after the other."""
    left, bar, top = 160.0, 26.0, 24.0
    inner, bottom = _WIDTH - left - _RIGHT, top + bar * len(rows)

    def across(value: float) -> float:
        return left + inner * axis.place(value)

    shapes = _axis_below(axis, across, left + inner / 2, top, bottom)
    at = left
    for number, part in enumerate(parts):
        shapes.append(node("rect", x=at, y=6.0, width=10.0, height=10.0, class_=f"block c{number % COLOURS}"))
        shapes.append(_text(at + 14, 15, part, "start"))
        at += 24 + 7.5 * len(part)
    for index, (label, values) in enumerate(rows):
        y, sum_so_far = top + bar * index + 4, axis.low
        shapes.append(_text(left - 6, y + 14, _short(label, 24), "end"))
        for number, value in enumerate(values):
            width = across(sum_so_far + value) - across(sum_so_far)
            shapes.append(
                node(
                    "rect",
                    x=across(sum_so_far),
                    y=y,
                    width=width,
                    height=bar - 8,
                    class_=f"block c{number % COLOURS}",
                )
            )
            sum_so_far += value
    return _picture(title, description, bottom + _BOTTOM, shapes)


def intervals(
    title: str, description: str, axis: Axis, rows: Sequence[tuple[str, float, float, float]], reference: float
) -> Element:
    """For each row (label, low, middle, high) a point with its interval; ``reference`` is drawn as a line."""
    left, bar, top = 240.0, 22.0, 10.0
    inner, bottom = _WIDTH - left - _RIGHT, top + bar * len(rows)

    def across(value: float) -> float:
        return left + inner * min(max(axis.place(value), 0.0), 1.0)

    shapes = _axis_below(axis, across, left + inner / 2, top, bottom)
    shapes.append(node("line", x1=across(reference), y1=top, x2=across(reference), y2=bottom, class_="line c1"))
    for index, (label, low, middle, high) in enumerate(rows):
        y = top + bar * index + bar / 2
        shapes.append(_text(left - 6, y + 4, _short(label, 36), "end"))
        shapes.append(node("line", x1=across(low), y1=y, x2=across(high), y2=y, class_="line c0"))
        shapes.append(node("circle", cx=across(middle), cy=y, r=4.0, class_="block c0"))
    return _picture(title, description, bottom + _BOTTOM, shapes)


def _picture(title: str, description: str, height: float, parts: Sequence[Element]) -> Element:
    number = next(_numbers)
    names = {"title": f"svg{number}-title", "desc": f"svg{number}-desc"}
    return node(
        "svg",
        node("title", title, id=names["title"]),
        node("desc", description, id=names["desc"]),
        *parts,
        viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}",
        role="img",
        aria_labelledby=f"{names['title']} {names['desc']}",
    )


def _axis_below(
    axis: Axis, across: Callable[[float], float], middle: float, top: float, bottom: float
) -> list[Element]:
    """Its ticks as rules from ``top`` to ``bottom`` with their values, and its label."""
    parts: list[Element] = []
    for value in axis.ticks():
        parts.append(_rule(across(value), top, across(value), bottom))
        parts.append(_text(across(value), bottom + 16, axis.text(value), "middle"))
    return [*parts, _text(middle, bottom + _BOTTOM - 6, axis.label, "middle")]


def _short(label: str, length: int) -> str:
    return label if len(label) < length else label[: length - 2] + "..."


def _rule(x1: float, y1: float, x2: float, y2: float) -> Element:
    return node("line", x1=x1, y1=y1, x2=x2, y2=y2, class_="rule")


def _text(x: float, y: float, text: str, anchor: str, **more: object) -> Element:
    return node("text", text, x=x, y=y, text_anchor=anchor, **more)


def _round_step(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten that is not smaller."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)
