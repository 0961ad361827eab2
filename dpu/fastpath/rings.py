"""What all compiled stages stand on: single-producer single-consumer rings, and the named points of the tests."""

from __future__ import annotations

from typing import Any

from dpu.fastpath.atomics import load_u64, store_u64
from dpu.fastpath.jit import KILLABLE, compiled, inlined
from dpu.fastpath.system import die
from dpu.layout import RING_DATA, RING_ENTRIES, RING_HEAD, RING_TAIL


@inlined
def kill_at(p: Any, point: int) -> None:
    """Die here if a test asked for it; compiled to nothing in a daemon that was started without kill points."""
    if KILLABLE and p.kill_point == point:
        p.kill_after -= 1
        if p.kill_after <= 0:
            die(p.pid)


@compiled
def ring_push(ring: int, value: int) -> bool:
    """Producer's side; False when the ring is full."""
    tail = load_u64(ring + RING_TAIL)
    if tail - load_u64(ring + RING_HEAD) >= RING_ENTRIES:
        return False
    store_u64(ring + RING_DATA + 8 * (tail % RING_ENTRIES), value)
    store_u64(ring + RING_TAIL, tail + 1)
    return True


@compiled
def ring_peek(ring: int) -> int:
    """Consumer's side: the oldest value, which stays; -1 when the ring is empty."""
    head = load_u64(ring + RING_HEAD)
    if head == load_u64(ring + RING_TAIL):
        return -1
    return load_u64(ring + RING_DATA + 8 * (head % RING_ENTRIES))


@compiled
def ring_drop(ring: int) -> None:
    """Consumer's side: take what :func:`ring_peek` gave."""
    store_u64(ring + RING_HEAD, load_u64(ring + RING_HEAD) + 1)
