"""Framing of RPC requests, against the standard library's own incremental JSON decoder."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpu.rpc.framing import DEPTH_MAX, REQUEST_BYTES_MAX, FramingError, Splitter


def feed(splitter: Splitter, data: bytes) -> list[bytes]:
    splitter.feed(data)
    return list(iter(splitter.next_value, None))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
requests = st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4)


@given(
    st.lists(st.tuples(requests, st.sampled_from(["", " ", "\n", "\r\n\t "])), max_size=5),
    st.booleans(),
    st.data(),
)
def test_any_cut_of_any_stream(items: list[tuple[object, str]], ascii_only: bool, data: st.DataObject) -> None:
    stream = "".join(json.dumps(item, ensure_ascii=ascii_only, indent=1) + gap for item, gap in items).encode()
    splitter, found, rest = Splitter(), [], stream
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        found += feed(splitter, rest[:size])
        rest = rest[size:]
    assert [json.loads(value) for value in found] == [item for item, _ in items]
    assert splitter.pending_bytes == 0


def test_byte_by_byte_through_escapes() -> None:
    text = rb'{"a\\":"\"}{\\","b":[{"c":"\u005d"}]}'
    splitter = Splitter()
    found = [value for byte in text + text for value in feed(splitter, bytes([byte]))]
    assert found == [text, text]


@pytest.mark.parametrize("text", [b"nonsense", b"1", b'"{}"', b"}", b"]", b"\xef\xbb\xbf{}", b"{} x"])
def test_what_cannot_start_a_request(text: bytes) -> None:
    with pytest.raises(FramingError):
        feed(Splitter(), text)


def test_depth_limit() -> None:
    deep = b"[" * DEPTH_MAX + b"]" * DEPTH_MAX
    assert feed(Splitter(), deep) == [deep]
    with pytest.raises(FramingError):
        feed(Splitter(), b"[" * (DEPTH_MAX + 1))


def test_size_limit() -> None:
    full = b'{"a":"' + b"x" * (REQUEST_BYTES_MAX - 8) + b'"}'
    assert len(full) == REQUEST_BYTES_MAX
    assert feed(Splitter(), full + full[:100]) == [full]
    with pytest.raises(FramingError):
        feed(Splitter(), b'{"a":"x' + full[6:])
    splitter = Splitter()
    with pytest.raises(FramingError):  # not even finished
        for _ in range(REQUEST_BYTES_MAX // 65536 + 1):
            feed(splitter, b'{"a":"' if not splitter.pending_bytes else b"x" * 65536)


def test_small_pieces_of_a_large_request_are_not_scanned_again() -> None:
    """Work is linear: the scan position moves with what came."""
    splitter = Splitter()
    feed(splitter, b'{"a":"')
    for _ in range(1000):
        feed(splitter, b"x" * 100)
        assert splitter._scanned == splitter.pending_bytes
    assert len(feed(splitter, b'"}')) == 1
