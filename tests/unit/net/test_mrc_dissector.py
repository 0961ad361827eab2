"""The Lua dissector has every field of every header at its place; Wireshark itself is not run here."""

from __future__ import annotations

import re
from itertools import accumulate

from net.mrc import wire
from net.mrc_dissector import lua

ADD = re.compile(
    r'^add\("(\w+)", ProtoField\.(\w+)\("mrc\.\w+\.(\w+)".*"(.*)"\), (\d+), (\d+), (true|false)\)$', re.M
)
HEADER = re.compile(r"^headers\.(\w+) = \{.* size = (\d+),", re.M)
STACK = re.compile(r'^  \[(\d+)\] = \{ name = "(\w+)", (.*) \},$', re.M)


def test_fields_fill_their_headers() -> None:
    text = lua()
    sizes = {name: int(size) for name, size in HEADER.findall(text)}
    assert sizes["bth"] == 12
    assert sizes["seth"] == 28
    for name, size in sizes.items():
        rows = [(int(bit), int(bits)) for header, _, _, _, bit, bits, _ in ADD.findall(text) if header == name]
        widths = [bits for _, bits in rows]
        assert [bit for bit, _ in rows] == [0, *accumulate(widths)][:-1]
        assert sum(widths) == 8 * size


def test_a_field_is_as_wide_as_its_type_allows() -> None:
    for _, kind, name, _, _, bits, signed in ADD.findall(lua()):
        width = int(re.sub(r"\D", "", kind))
        assert int(bits) <= width, name
        assert kind.startswith("int") == (signed == "true")


def test_what_one_reader_vouches_for_says_so() -> None:
    flagged = {
        (header.upper(), name, text.removeprefix("[one witness: ").removesuffix("]"))
        for header, _, name, text, _, _, _ in ADD.findall(lua())
        if text
    }
    assert flagged == set(wire.reconstructed())
    assert "not called compliant" in lua().lower()


def test_opcodes_lead_to_their_headers() -> None:
    found = {int(number): [*re.findall(r'"(\w+)"', names)] for number, _, names in STACK.findall(lua())}
    assert found == {int(op): [kind.__name__.lower() for kind in kinds] for op, kinds in wire.STACKS.items()}


def test_the_port_is_a_setting() -> None:
    assert "local PORT, ICRC = 4971, 4" in lua(4971)
