"""Elements of a page: text can never become markup, because only :func:`node` makes elements.

Use: ``node("p", "some ", node("b", name), class_="note")``; ``render(root)`` for the text of the page.

Source: HTML, https://html.spec.whatwg.org/; the tree is the standard library's.
"""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element


def node(tag: str, *children: Element | str, **attributes: object) -> Element:
    """An element. ``class_`` is the attribute class, ``stroke_width`` is stroke-width."""
    made = Element(tag, {_name(key): _number(value) for key, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    return made


def table(caption: str, headings: list[str], rows: list[list[str]]) -> Element:
    """A table whose first column names the row."""
    head = node("tr", *(node("th", heading, scope="col") for heading in headings))
    body = [node("tr", node("th", row[0], scope="row"), *(node("td", cell) for cell in row[1:])) for row in rows]
    whole = node("table", node("caption", caption), node("thead", head), node("tbody", *body))
    return node("div", whole, class_="scroll")


def render(root: Element) -> str:
    """The page as text, with its document type."""
    return "<!DOCTYPE html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-") if key != "viewBox" else key


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
