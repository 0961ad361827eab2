"""A closed loop of reads or writes over the test driver, compiled, for benchmarks: QD n, one queue.

A mapped doorbell page is used where there is one.
Use: `nvme.enable_shadow_doorbells()` if wanted, `queue = nvme.create_queue_pair(1, 256)`, then
`closed_loop(nvme, queue, nsid=1, opcode=READ, depth=32, commands=200_000)`. It owns the queue meanwhile.
Idle passes spin `spin` times and then block on the queue's eventfd (a polled queue spins on).
Errors: AssertionError when a command fails or nothing completes for 30 s. Nothing is verified: see load.py.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tests.support.nvme_driver import DOORBELLS, READ, WRITE, Nvme, SubmissionQueue
from tests.support.vfio_user_client import BAR0, FLAG_NO_REPLY, HEADER, REGION_ACCESS, REGION_WRITE

NO_PROGRESS_NS = 30_000_000_000
_DOORBELL_BYTES = HEADER.size + REGION_ACCESS.size + 4
_send: Any = types.ExternalFunction("send", types.int64(types.int64, types.int64, types.int64, types.int64))
_poll: Any = types.ExternalFunction("poll", types.int64(types.int64, types.int64, types.int64))
_read: Any = types.ExternalFunction("read", types.int64(types.int64, types.int64, types.int64))
_clock: Any = types.ExternalFunction("clock_gettime", types.int64(types.int64, types.int64))


_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    return cast(_F, njit(nogil=True)(function))


def _load32(typingctx: Any, address: Any) -> Any:
    """An acquire load of 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        return builder.zext(builder.load_atomic(pointer, "acquire", 4), ir.IntType(64))

    return types.int64(types.int64), codegen


def _store32(typingctx: Any, address: Any, value: Any) -> Any:
    """A release store of 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        builder.store_atomic(builder.trunc(args[1], ir.IntType(32)), pointer, "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _full_fence(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


load32: Any = intrinsic(_load32)
store32: Any = intrinsic(_store32)
full_fence: Any = intrinsic(_full_fence)


@dataclass(frozen=True)
class Result:
    commands: int
    seconds: float
    iops: float
    mean_us: float
    p50_us: float
    p99_us: float
    p999_us: float
    doorbells: int  # messages sent
    interrupts: int  # eventfd reads


@compiled
def _now_ns(scratch: Any) -> Any:
    _clock(1, scratch.ctypes.data)  # CLOCK_MONOTONIC
    return scratch[0] * 1_000_000_000 + scratch[1]


@compiled
def _ring(fd: int, message: Any, shadow: int, event_idx: int, index: int, old: int, new: int) -> int:
    """Mapped doorbell page (``event_idx`` 0), shadow doorbell and event index, or message; 1 if one was sent."""
    if shadow:
        store32(shadow + 4 * index, new)
        if event_idx == 0:
            return 0
        full_fence()
        event = load32(event_idx + 4 * index)
        if ((new - event - 1) & 0xFFFF) >= ((new - old) & 0xFFFF):
            return 0
    message[4] = 0x1000 + 4 * index  # REGION_ACCESS.offset, low half; see _doorbell_message
    message[8] = new
    _send(fd, message.ctypes.data, message.nbytes, 0)
    return 1


@compiled
def _loop(
    sq: Any,
    cq: int,
    entries: int,
    cq_entries: int,
    qid: int,
    tail: int,
    head: int,
    phase: int,
    socket_fd: int,
    event_fd: int,
    shadow: int,
    event_idx: int,
    message: Any,
    prp1: Any,
    prp2: Any,
    command: int,
    nsid: int,
    blocks: int,
    places: int,
    depth: int,
    total: int,
    spin: int,
    started: Any,
    latency: Any,
) -> tuple[int, int, int, int, int, int]:
    """(tail, head, phase, doorbells, interrupts, failed); failed -1 is no progress, else a status."""
    scratch, pollfd, count = np.zeros(2, np.int64), np.zeros(2, np.int32), np.zeros(1, np.int64)
    pollfd[0], pollfd[1] = event_fd, 1
    free, spare = np.arange(depth), depth
    submitted = completed = idle = doorbells = interrupts = 0
    random = 88172645463325252
    last = _now_ns(scratch)
    while completed < total:
        old = tail
        while spare > 0 and submitted < total:
            spare -= 1
            cid = free[spare]
            random ^= random << 13
            random ^= (random >> 7) & 0x1FFFFFFFFFFFFFF
            random ^= random << 17
            at = tail * 8
            sq[at] = command | cid << 16 | nsid << 32
            sq[at + 1] = 0
            sq[at + 2] = 0
            sq[at + 3] = prp1[cid]
            sq[at + 4] = prp2[cid]
            sq[at + 5] = ((random & 0x7FFFFFFFFFFFFFFF) % places) * blocks
            sq[at + 6] = blocks - 1
            sq[at + 7] = 0
            started[cid] = _now_ns(scratch)
            tail = tail + 1 if tail + 1 < entries else 0
            submitted += 1
        if tail != old:
            full_fence()
            doorbells += _ring(socket_fd, message, shadow, event_idx, 2 * qid, old, tail)
        old_head, now = head, 0
        while True:
            word: int = load32(cq + head * 16 + 12)
            if (word >> 16) & 1 != phase:
                break
            if now == 0:
                now = _now_ns(scratch)
            if word >> 17:
                return tail, head, phase, doorbells, interrupts, word >> 17
            cid = word & 0xFFFF
            latency[completed] = now - started[cid]
            completed += 1
            free[spare] = cid
            spare += 1
            head += 1
            if head == cq_entries:
                head, phase = 0, phase ^ 1
        if head != old_head:
            doorbells += _ring(socket_fd, message, shadow, event_idx, 2 * qid + 1, old_head, head)
            idle, last = 0, now
            continue
        idle += 1
        if idle < spin:
            continue
        if event_fd >= 0 and _poll(pollfd.ctypes.data, 1, 1000) > 0:
            interrupts += 1
            _read(event_fd, count.ctypes.data, 8)
        if _now_ns(scratch) - last > NO_PROGRESS_NS:
            return tail, head, phase, doorbells, interrupts, -1
    return tail, head, phase, doorbells, interrupts, 0


def _doorbell_message() -> Any:
    """A posted 4-byte write to BAR0 as 9 words; the offset's low half is word 4, the value word 8."""
    raw = HEADER.pack(0, REGION_WRITE, _DOORBELL_BYTES, FLAG_NO_REPLY, 0)
    raw += REGION_ACCESS.pack(DOORBELLS, BAR0, 4) + bytes(4)
    return np.frombuffer(bytearray(raw), np.uint32)


def _address(view: memoryview | None) -> int:
    return 0 if view is None else ctypes.addressof(ctypes.c_char.from_buffer(view))


def closed_loop(
    nvme: Nvme,
    queue: SubmissionQueue,
    *,
    nsid: int,
    opcode: int = READ,
    depth: int = 32,
    commands: int = 100_000,
    transfer: int = 4096,
    block: int = 512,
    span: int = 64 << 20,
    spin: int = 2000,
) -> Result:
    """`commands` transfers of `transfer` bytes at random places of the first `span` bytes.

    :param depth: commands in flight, less than the queue's entries
    :param block: of the namespace, in bytes
    """
    assert opcode in (READ, WRITE) and depth < queue.entries and not queue.outstanding
    cq = queue.cq
    buffers = [nvme.ram.buffer(transfer) for _ in range(depth)]
    prps = [nvme.prps(buffer.iova, transfer) for buffer in buffers]
    for buffer in buffers:
        buffer.fill(bytes(range(1, 256)) * (transfer // 255))
    latency, started = np.zeros(commands, np.int64), np.zeros(depth, np.int64)
    arguments: tuple[Any, ...] = (
        np.frombuffer(queue.ring, np.int64),
        _address(cq.words.cast("B")),
        queue.entries,
        cq.entries,
        queue.qid,
    )
    rest: tuple[Any, ...] = (
        nvme.client.sock.fileno(),
        cq.eventfd,
        _address(nvme.shadow if nvme.doorbells is None else nvme.doorbells.cast("B")),
        _address(nvme.event_idx),
        _doorbell_message(),
        np.array([prp[0] for prp in prps], np.int64),
        np.array([prp[1] for prp in prps], np.int64),
        opcode,
        nsid,
        transfer // block,
        span // transfer,
        depth,
    )
    nvme.client.sock.setblocking(True)  # the compiled loop has its own deadline
    position: tuple[int, ...] = (queue.tail, cq.head, cq.phase)
    for count in (min(commands, depth), commands):  # the first turn compiles
        begin = time.perf_counter()
        everything: list[Any] = [*arguments, *position, *rest, count, spin, started, latency]
        *position_and_counts, failed = _loop(*everything)
        seconds = time.perf_counter() - begin
        assert failed == 0, "no progress" if failed < 0 else f"status {failed:#x}"
        position = tuple(position_and_counts[:3])
    queue.tail = queue.head = queue.tail_rung = position[0]
    cq.head, cq.phase, cq.head_rung = position[1], position[2], position[1]
    nvme.client.sock.settimeout(nvme.deadline_s)
    for buffer, prp in zip(buffers, prps):
        nvme.ram.free_buffer(buffer)
        for page in prp[2]:
            nvme.ram.free(page, 4096)
    p50, p99, p999 = np.percentile(latency, (50, 99, 99.9)) / 1000
    return Result(
        commands,
        seconds,
        commands / seconds,
        float(latency.mean()) / 1000,
        float(p50),
        float(p99),
        float(p999),
        *position_and_counts[3:5],
    )
