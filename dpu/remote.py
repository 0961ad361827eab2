"""The queues of a controller whose guest memory is not shared: copied here for the poller, and back.

::

    guest's SQ --DMA_READ--> copy of SQ --> poller, control (dpu.nvme.io)
    guest's CQ, eventfd <--DMA_WRITE-- copy of CQ <--'

The poller serves the copies as it serves any queue, and sees the doorbells of what has been copied only
(``Plane.seen``). The commands themselves go to control, whose ``View`` fetches and stores their data.

A worker may die at any instruction. Copies of SQs are made anew: a command that the poller has not fetched is still
in the guest's queue. The copies of CQs are kept, with how many of their entries the guest has (``Plane.delivered``);
what was written but not counted is written again, byte for byte, into the same place. Data are in the guest's memory
before a command is EXECUTED, so they are never written again after its completion.

Use: ``queues = RemoteQueues(plane, view, fatal)``; run ``serve()`` as a task; ``look()`` when something may have
changed. ``fatal(reason)`` is called when a queue cannot be read or written though it is mapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable

import numpy as np

from dpu import layout
from dpu.dma import View
from dpu.errors import DmaFault
from dpu.fastpath.atomics import load_u64
from dpu.killpoint import killpoint
from dpu.layout import DMA_READ, DMA_WRITE
from dpu.plane import Plane

NAP_S = 0.001  # between looks at doorbells that the client writes into memory by itself


class RemoteQueues:
    """Carries entries for one controller while ``plane.remote``."""

    def __init__(self, plane: Plane, view: View, fatal: Callable[[str], None]) -> None:
        self._plane = plane
        self._view = view
        self._fatal = fatal
        self._changed = asyncio.Event()

    def look(self) -> None:
        """Doorbells, completions or the DMA map may have changed."""
        self._changed.set()

    async def serve(self) -> None:
        """Carry entries as long as the controller lives."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NAP_S if self._plane.remote and self._plane.record.mapped else None):
                    await self._changed.wait()
            self._changed.clear()
            if self._plane.remote:
                await self._round()

    async def _round(self) -> None:
        """Completions of the admin queue go last: Delete SQ says that those of the queue have been posted."""
        admin = self._posted(0)
        live = [int(qid) for qid in np.nonzero(self._plane.cqs["live"])[0]]
        await asyncio.gather(*(self._deliver(qid, self._posted(qid)) for qid in live if qid))
        await self._deliver(0, admin)
        if self._plane.show_heads():
            self._plane.poller.wake()
        await asyncio.gather(*(self._fetch(int(qid)) for qid in np.nonzero(self._plane.sqs["live"])[0]))

    def _posted(self, qid: int) -> int:
        at = self._plane.cqs.ctypes.data + layout.CQ_BYTES * qid + layout.CQ_POSTED
        return int(load_u64(int(at)))

    async def _deliver(self, qid: int, posted: int) -> None:
        """Give the guest its completions, then its interrupt."""
        plane, cq = self._plane, self._plane.cqs[qid]
        epoch, entries, iova = int(cq.epoch), int(cq.entries), int(cq.iova)
        done = before = int(plane.delivered[qid])
        while cq.live and done < posted:
            at = done % entries
            count = min(posted - done, entries - at)
            try:
                await self._view.store(iova + 16 * at, ctypes.string_at(plane.cq_copy(qid) + 16 * at, 16 * count))
            except DmaFault as fault:
                self._unreachable(fault, iova, entries * 16, DMA_WRITE)
                break
            killpoint("completion_stored")
            if cq.epoch != epoch or not cq.live:
                return
            done += count
            plane.delivered[qid] = done
        if done != before:
            plane.interrupt(qid)

    async def _fetch(self, qid: int) -> None:
        """Copy new entries, and show the poller the tail behind them."""
        plane, sq = self._plane, self._plane.sqs[qid]
        epoch, entries, iova = int(sq.epoch), int(sq.entries), int(sq.iova)
        tail, at = int(plane.doorbells[2 * qid]), int(plane.seen[2 * qid])
        if tail >= entries:
            return
        while tail != at:
            count = (tail if tail > at else entries) - at
            try:
                data = await self._view.load(iova + 64 * at, 64 * count)
            except DmaFault as fault:
                self._unreachable(fault, iova, entries * 64, DMA_READ)
                return
            if sq.epoch != epoch or not sq.live:
                return
            killpoint("command_loaded")
            ctypes.memmove(plane.sq_copy(qid) + 64 * at, data, len(data))
            at = (at + count) % entries
            plane.show(2 * qid, at)
            plane.poller.wake()

    def _unreachable(self, fault: DmaFault, iova: int, size: int, rights: int) -> None:
        """Not being mapped is no mistake: firmware maps RAM anew while queues live. Anything else is fatal."""
        with contextlib.suppress(DmaFault):
            self._plane.memory.places(iova, size, rights)
            if not self._plane.closing:
                self._fatal(f"a queue cannot be reached: {fault}")
