"""Hypothesis strategies for MRC headers, messages and frames, made from the declared tables."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from net.mrc import frame, wire


def headers(kind: type[tuple[Any, ...]]) -> st.SearchStrategy[Any]:
    """Any header of ``kind``, every field over its whole range."""
    parts: dict[str, st.SearchStrategy[Any]] = {}
    for spec in wire.fields(kind):
        size = spec.bits.size
        if size == 128:
            parts[spec.name] = st.binary(min_size=16, max_size=16)
        elif spec.bits.signed:
            parts[spec.name] = st.integers(-(1 << size - 1), (1 << size - 1) - 1)
        else:
            parts[spec.name] = st.integers(0, (1 << size) - 1)
    return st.builds(kind, **parts)


@st.composite
def messages(draw: st.DrawFn, opcode: int | None = None) -> frame.Message:
    """Any message that MRC can carry, or any of an opcode."""
    if opcode is None:
        opcode = draw(st.sampled_from(sorted(wire.STACKS)))
    kinds = list(wire.STACKS[opcode])
    payload = b""
    if kinds[0] is wire.Meth:
        payload = draw(st.binary(max_size=70))
        if draw(st.booleans()):
            kinds.insert(1, wire.Tseth)
    bth = draw(headers(wire.Bth))._replace(opcode=opcode, tver=0)
    return frame.message(bth, *(draw(headers(kind)) for kind in kinds), payload=payload)


@st.composite
def frames(draw: st.DrawFn) -> frame.Frame:
    """Any whole frame, with an outer header or without."""
    address = st.binary(min_size=16, max_size=16)
    plain = frame.Frame(
        draw(address),
        draw(address),
        draw(st.integers(0, 2**32 - 1)),
        draw(messages()),
        draw(st.sampled_from([0, 4, 8, 46])),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 255)),
    )
    if draw(st.booleans()):
        return plain
    return plain._replace(
        outer_src=draw(address),
        outer_dst=draw(address),
        inner_traffic_class=draw(st.integers(0, 255)),
        inner_hop_limit=draw(st.integers(0, 255)),
    )
