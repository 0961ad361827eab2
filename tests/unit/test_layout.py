"""The shape of shared state: sizes and offsets that later workers, the guest and the kernel rely on."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dpu import layout


def fields(dtype: Any) -> dict[str, tuple[str, int]]:
    return {name: (dtype.fields[name][0].str, dtype.fields[name][1]) for name in dtype.names}


def test_submission_entry_is_that_of_the_specification() -> None:
    """Base 2.0 figure 87; 64-bit fields are signed in the compiled stage."""
    assert layout.SQE.itemsize == 64
    assert fields(layout.SQE) == {
        "opcode": ("|u1", 0),
        "cdw0_flags": ("|u1", 1),
        "cid": ("<u2", 2),
        "nsid": ("<u4", 4),
        "cdw2": ("<u4", 8),
        "cdw3": ("<u4", 12),
        "mptr": ("<i8", 16),
        "prp1": ("<i8", 24),
        "prp2": ("<i8", 32),
        **{f"cdw{n}": ("<u4", 4 * n) for n in range(10, 16)},
    }


def test_range_is_that_of_the_specification() -> None:
    """NVM command set 1.0 figure 41: attributes, length, starting LBA."""
    assert layout.RANGE.itemsize == 16
    assert list(fields(layout.RANGE).values()) == [("<u4", 0), ("<u4", 4), ("<i8", 8)]


def test_io_uring_structures_are_those_of_the_kernel() -> None:
    assert list(fields(layout.URING_CQE).values()) == [("<i8", 0), ("<i4", 8), ("<u4", 12)]
    assert [at for _, at in fields(layout.URING_SQE).values()][:12] == [0, 1, 2, 4, 8, 16, 24, 28, 32, 40, 42, 44]
    assert layout.URING_SQE.itemsize == 64 and layout.SEGMENT.itemsize == 16 and layout.POLLFD.itemsize == 8


def test_doorbell_message_is_that_of_the_protocol() -> None:
    assert layout.DOORBELL.itemsize == 36
    assert [at for _, at in fields(layout.DOORBELL).values()] == [0, 2, 4, 8, 12, 16, 24, 28, 32]


PARTS = [
    (0, layout.HEADER, 1),
    (layout.SQ_OFFSET, layout.SQ, layout.QUEUES),
    (layout.CQ_OFFSET, layout.CQ, layout.QUEUES),
    (layout.SPACE_OFFSET, layout.SPACE, layout.NAMESPACES),
    (layout.INFLIGHT_OFFSET, layout.INFLIGHT, layout.SLOTS),
    (layout.HISTOGRAM_OFFSET, layout.HISTOGRAM, layout.QUEUES),
]


def test_parts_of_the_state_area_do_not_touch() -> None:
    ends = [(at, at + dtype.itemsize * count) for at, dtype, count in PARTS]
    ends.append((layout.BLOB_OFFSET, layout.BLOB_OFFSET + layout.PAGE + 2 * layout.BLOB_BYTES))
    for (_, end), (start, _) in itertools.pairwise(ends):
        assert end <= start and start % layout.PAGE == 0
    assert ends[-1][1] <= layout.STATE_BYTES and layout.STATE_BYTES % layout.PAGE == 0


@pytest.mark.parametrize(
    "name", ["HEADER", "SQ", "CQ", "SPACE", "INFLIGHT", "REGION", "NAMESPACE", "QUEUE_LOCAL", "CONTROLLER", "POLLER"]
)
def test_every_word_is_a_word_of_its_own(name: str) -> None:
    """Eight bytes, aligned, and no two share a byte: each can be loaded and stored by itself."""
    dtype = getattr(layout, name)
    used: set[int] = set()
    for field, (kind, at) in fields(dtype).items():
        size = np.dtype(dtype[field]).itemsize
        assert not used & set(range(at, at + size)), field
        used |= set(range(at, at + size))
        if kind == "<i8":
            assert at % 8 == 0
    assert max(used) < dtype.itemsize and dtype.itemsize % 8 == 0


def test_named_offsets() -> None:
    assert layout.INFLIGHT_STATE == fields(layout.INFLIGHT)["state"][1] == 64
    assert fields(layout.SQ)["fetched"][1] == layout.SQ_FETCHED
    assert fields(layout.CQ)["posted"][1] == layout.CQ_POSTED
    assert fields(layout.POLLER)["stop"][1] == layout.STOP
    assert layout.RING_TAIL - layout.RING_HEAD >= 64 and layout.RING_DATA - layout.RING_TAIL >= 64


def test_limits_fit_together() -> None:
    """What the guest may ask for fits into what is there for it."""
    assert layout.SEGMENTS * layout.PAGE >= layout.TRANSFER_MAX + layout.PAGE
    assert 8 * layout.QUEUES <= layout.BAR_BYTES  # two doorbells of 4 bytes for each queue
    assert layout.SCRATCH_BYTES >= 2 * layout.PAGE + 8 and layout.PAGE >= 256 * 16
    assert layout.DIRTY_MAX >= layout.CONTROLLERS * layout.QUEUES
    assert layout.RING_ENTRIES >= layout.CONTROLLERS * layout.SLOTS and layout.POLLFDS >= layout.CONTROLLERS + 2
    assert np.dtype(layout.HISTOGRAM).itemsize == layout.HISTOGRAM_BUCKETS * 8


def test_states_are_in_the_order_of_a_command() -> None:
    assert layout.FREE == 0 < layout.FETCHED < layout.EXECUTED < layout.POSTING
