"""Line numbers of TOML keys, against documents whose lines are counted by construction."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.toml_lines import key_lines, line_of

DOCUMENT = '''\
# comment with [brackets] and key = 1
title = "a # no comment"   # comment

[vm.web]
vcpus = 2
args = [ # first
  "-device", "x,y=[1]",
  { a = 1, b = [ 2,
    3 ] },
]
text = """
[not.a.table]
key = 1 \\""" ""
"""
raw = \'\'\'
[neither]\'\'\'\'\'

[[workload]]
type = "fio"
"quoted key" = 1
[workload.deep]
x = 1

[[workload]]
type = 'fs'
a.b.c = 2
'''


def test_lines_of_every_kind_of_key() -> None:
    tomllib.loads(DOCUMENT)
    lines = key_lines(DOCUMENT)
    expected = {
        ("title",): 2,
        ("vm",): 4,
        ("vm", "web"): 4,
        ("vm", "web", "vcpus"): 5,
        ("vm", "web", "args"): 6,
        ("vm", "web", "args", 0): 7,
        ("vm", "web", "args", 1): 7,
        ("vm", "web", "args", 2): 8,
        ("vm", "web", "args", 2, "a"): 8,
        ("vm", "web", "args", 2, "b"): 8,
        ("vm", "web", "args", 2, "b", 0): 8,
        ("vm", "web", "args", 2, "b", 1): 9,
        ("vm", "web", "text"): 11,
        ("vm", "web", "raw"): 15,
        ("workload",): 18,
        ("workload", 0): 18,
        ("workload", 0, "type"): 19,
        ("workload", 0, "quoted key"): 20,
        ("workload", 0, "deep"): 21,
        ("workload", 0, "deep", "x"): 22,
        ("workload", 1): 24,
        ("workload", 1, "type"): 25,
        ("workload", 1, "a"): 26,
        ("workload", 1, "a", "b"): 26,
        ("workload", 1, "a", "b", "c"): 26,
    }
    assert lines == expected


@pytest.mark.parametrize(
    ("path", "line"),
    [(("workload", 1, "missing"), 24), (("nothing",), 1), (("vm", "web", "args", 9), 6)],
)
def test_line_of_something_absent_is_that_of_what_surrounds_it(path: tuple[str | int, ...], line: int) -> None:
    assert line_of(key_lines(DOCUMENT), path) == line


_LEAVES = st.one_of(
    st.integers(-5, 5).map(str),
    st.booleans().map(lambda value: str(value).lower()),
    st.sampled_from(['"a = [1]"', "'#'", '"\\""', '""', "''", "1979-05-27 07:32:00", '"""x\n[y]\n"""', "[]", "{}"]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[\n" + ",\n".join(items) + "\n]"),
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]"),
    ),
    max_leaves=6,
)


@given(st.lists(st.tuples(st.integers(0, 3), _VALUES), max_size=8))
def test_every_key_of_a_random_document_is_found_on_its_line(entries: list[tuple[int, str]]) -> None:
    text = ""
    expected: dict[tuple[str | int, ...], int] = {}
    for number, (blank_lines, value) in enumerate(entries):
        text += "\n" * blank_lines + f"[[t]] # {number}\n"
        expected.setdefault(("t",), text.count("\n"))
        expected[("t", number)] = text.count("\n")
        text += f"key{number} = {value}\n"
        expected[("t", number, f"key{number}")] = text.count("\n", 0, text.rindex(f"key{number} =")) + 1
    parsed: dict[str, Any] = tomllib.loads(text)
    assert len(parsed.get("t", [])) == len(entries)
    lines = key_lines(text)
    assert {path: line for path, line in lines.items() if len(path) < 4} == expected
