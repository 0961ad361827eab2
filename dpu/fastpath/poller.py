"""A poller: its records, its thread, and how control speaks with it.

Use: ``poller = Poller(...)``; ``poller.start()``; ``await poller.grace()`` returns when every pass that began before
the call has ended, so what was unpublished before it is no longer looked at. One poller serves up to CONTROLLERS
controllers; their records are ``poller.controllers``.

Limits: the constants of dpu.layout. Errors: EmuError from io_uring.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from typing import Any

import numpy as np

from dpu import layout
from dpu.fastpath import asic, gate, rings, soc
from dpu.fastpath.atomics import load_u64, store_u64, ticks
from dpu.fastpath.jit import JIT, compiled
from dpu.fastpath.uring import NoRing, Ring

SPIN_PASSES = 50
IDLE_MS = 250
NAP_US = 2000
SETTLE_POLL_S = 0.001
_PARITY = layout.offset_of(layout.POLLER, "parity")
LOOK_US = 3
QUIET_US = 100
_PR_SET_TIMERSLACK = 29
_LIBC = ctypes.CDLL(None)


@compiled
def now() -> int:
    """The clock of the stamps, in ticks."""
    return ticks()


def tick_rate() -> int:
    """Ticks per second."""
    return (1_000_000_000 << 20) // ns_multiplier()


def compile_all() -> None:
    """Compile the loop (or load it from the cache) before anything is served, and measure the clock."""
    if JIT:
        asic.run.compile("void(int64)")  # type: ignore[attr-defined]
        rings.ring_push.compile("boolean(int64,int64)")  # type: ignore[attr-defined]
        rings.ring_peek.compile("int64(int64)")  # type: ignore[attr-defined]
        rings.ring_drop.compile("void(int64)")  # type: ignore[attr-defined]
        soc.control_exchange.compile("int64(int64,int64,int64,int64,int64,int64,int64)")  # type: ignore[attr-defined]
        soc.control_answer.compile("int64(int64,int64)")  # type: ignore[attr-defined]
        now.compile("int64()")  # type: ignore[attr-defined]
        gate.set_bucket.compile("void(int64,int64,int64,int64)")  # type: ignore[attr-defined]
    ns_multiplier()


@functools.cache
def ns_multiplier(seconds: float = 0.02) -> int:
    """``ns_mult`` of layout.POLLER: measured, since the rate of the time stamp counter is nowhere to be read."""
    if not JIT:
        return 1 << 20  # plain Python's ticks are nanoseconds
    begin = now(), time.perf_counter_ns()
    time.sleep(seconds)
    passed = now() - begin[0], time.perf_counter_ns() - begin[1]
    return (passed[1] << 20) // max(passed[0], 1)


class Poller:
    """``cpu``: the CPU that the thread is bound to, or None. ``health``: address of its heartbeat word.
    ``serving``: address of the word in which it names the client that it serves; 0: none is told.

    ``quiet_us``: how long a controller had nothing to do until it is looked at less often; 0: each pass looks at it.
    ``number``: of its area in each group of volumes.
    """

    def __init__(
        self,
        cpu: int | None,
        health: int,
        ring: Ring | NoRing,
        *,
        serving: int = 0,
        stamps: bool = True,
        spin: int = SPIN_PASSES,
        nap_us: int = NAP_US,
        quiet_us: int = QUIET_US,
        number: int = 0,
    ) -> None:
        self.cpu, self.number = cpu, number
        self.ring = ring
        self.control_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._records: Any = np.zeros(1, layout.POLLER).view(np.recarray)
        self.record = self._records[0]
        self.address = int(self._records.ctypes.data)
        self.controllers: Any = np.zeros(layout.CONTROLLERS, layout.CONTROLLER).view(np.recarray)
        self._areas = {
            "misses": np.zeros(layout.RING_BYTES, np.uint8),
            "updates": np.zeros(layout.RING_BYTES, np.uint8),
            "to_soc": np.zeros(layout.RING_BYTES, np.uint8),
            "from_soc": np.zeros(layout.RING_BYTES, np.uint8),
            "zeroes": np.zeros(layout.TRANSFER_MAX, np.uint8),
            "errors": np.zeros(layout.RING_DATA + layout.ERROR_ENTRIES * layout.ERROR_RECORD.itemsize, np.uint8),
            "pollfds": np.zeros(layout.POLLFDS, layout.POLLFD),
            "scratch": np.zeros(layout.SCRATCH_BYTES, np.uint8),
            "dirty": np.zeros(layout.DIRTY_MAX, np.int64),
            "serving": np.zeros(1, np.int64),
            "heap": np.zeros(layout.HEAP_ITEMS, layout.HEAP_ITEM),
        }
        p = self.record
        for name, area in self._areas.items():
            p[name] = area.ctypes.data
        self._areas["scratch"][2 * layout.PAGE] = 1  # what is written to eventfds
        p.controllers, p.uring = self.controllers.ctypes.data, ring.address
        p.control_fd, p.wake_fd, p.health = self.control_fd, self.wake_fd, health
        p.number = number
        p.serving = serving or p.serving
        p.spin, p.idle_ms, p.stamps, p.counters = spin, IDLE_MS, int(stamps), 1
        p.ns_mult, p.pid, p.nap_ns = ns_multiplier(), os.getpid(), nap_us * 1000
        p.look_ticks = (LOOK_US * 1000 << 20) // ns_multiplier()
        p.quiet_ticks = (quiet_us * 1000 << 20) // ns_multiplier() if quiet_us else 1 << 62
        self.trace: Any = None  # see make_trace
        self._thread: threading.Thread | None = None
        self._settling = asyncio.Lock()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    # ------------------------------------------------------------------------------------------------ its life

    def start(self) -> None:
        """Run the loop in a thread of its own."""
        self._thread = threading.Thread(target=self._main, name=f"poller-{self.cpu}", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        if self.cpu is not None:
            with contextlib.suppress(OSError):  # the CPU may have gone offline: then any will do
                os.sched_setaffinity(0, {self.cpu})
        _LIBC.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # of this thread: else a nap of 50 us takes 100
        asic.run(self.address)

    @property
    def running(self) -> bool:
        """Whether the thread looks at the records."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End the loop and wait for it. What it points to may be unmapped afterwards."""
        if self._thread is not None:
            store_u64(self.address + layout.STOP, 1)
            self.wake()
            self._thread.join()
            self._thread = None
            store_u64(self.address + layout.STOP, 0)

    # ------------------------------------------------------------------------------------------ words with it

    def wake(self) -> None:
        """End its sleep."""
        os.eventfd_write(self.wake_fd, 1)

    def look_at_waiting(self) -> None:
        """Have it look at all commands that wait at gates: what they wait for has changed."""
        store_u64(self.address + layout.HEAP_STALE, 1)
        self.wake()

    def call_control(self) -> None:
        """Have control look at its clients; from any thread, even in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.control_fd, 1)

    async def grace(self) -> None:
        """Return when every pass that was under way has ended."""
        if not self.running:
            return
        wanted = load_u64(self.address + layout.GRACE_WANTED) + 1
        store_u64(self.address + layout.GRACE_WANTED, wanted)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((wanted, future))
        self.wake()
        await future

    async def settled(self) -> None:
        """Return when all that was begun on volumes before has ended, with io_uring too; nothing is held up.

        What begins is counted by the parity of a word that changes here, so the older ones can be waited for.
        """
        async with self._settling:
            old = int(self.record.parity)
            store_u64(self.address + _PARITY, old + 1)
            await self.grace()
            begun = "begun_odd" if old & 1 else "begun_even"
            while self.running and self.record[begun]:
                await asyncio.sleep(SETTLE_POLL_S)

    def woken(self) -> None:
        """Called by control when ``control_fd`` is readable: empties it and ends graces that are over."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.control_fd, 8)
        seen = load_u64(self.address + layout.GRACE_SEEN)
        for wanted, future in [one for one in self._waiters if one[0] <= seen]:
            self._waiters.remove((wanted, future))
            if not future.done():
                future.set_result(None)

    def misses(self) -> list[tuple[int, int]]:
        """(controller index, slot) of the commands that were handed to control."""
        found = []
        while (value := int(rings.ring_peek(int(self.record.misses)))) >= 0:
            rings.ring_drop(int(self.record.misses))
            found.append((value >> 32, value & 0xFFFFFFFF))
        return found

    def update(self, controller: int, slot: int) -> None:
        """Give a command back whose entry is EXECUTED. The ring has room for every slot of every controller."""
        pushed = rings.ring_push(int(self.record.updates), controller << 32 | slot)
        assert pushed, "update ring is full"
        self.wake()

    def errors(self) -> list[Any]:
        """Failed I/O commands since the last call, as copies of ERROR_RECORD."""
        ring = int(self.record.errors)
        head, tail = load_u64(ring + layout.RING_HEAD), load_u64(ring + layout.RING_TAIL)
        records = self._areas["errors"][layout.RING_DATA :].view(layout.ERROR_RECORD).view(np.recarray)
        found = [records[i % layout.ERROR_ENTRIES].copy() for i in range(head, tail)]
        store_u64(ring + layout.RING_HEAD, tail)
        return found

    def make_trace(self, entries: int, fd: int = -1) -> None:
        """An area for traced commands (a power of two of them), while no controller is traced.

        ``fd``: a memfd of ``layout.trace_bytes``, which stays the caller's; -1: memory of this process.
        """
        self.trace = np.frombuffer(mmap.mmap(fd, layout.trace_bytes(entries)), np.uint8)
        self.record.trace_mask = entries - 1
        store_u64(self.address + layout.offset_of(layout.POLLER, "trace_ring"), int(self.trace.ctypes.data))

    def to_ns(self, count: int) -> int:
        """Ticks as nanoseconds."""
        return count * int(self.record.ns_mult) >> 20

    def thread(self) -> tuple[int, float]:
        """The kernel's number of its thread, and the CPU seconds that it has used."""
        assert self._thread is not None and self._thread.ident is not None and self._thread.native_id is not None
        return self._thread.native_id, time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def describe(self) -> dict[str, int | None]:
        """For dpu_get_stats."""
        return {
            "cpu": self.cpu,
            "passes": int(self.record.passes),
            "sleeps": int(self.record.sleeps),
            "io_uring": int(self.ring.fd >= 0),
        }

    def controllers_end(self, index: int) -> None:
        """Have the loop look at records up to ``index``."""
        self.record.controller_count = max(int(self.record.controller_count), index + 1)

    def free_index(self) -> int:
        """The lowest controller record that is not in use; -1 when all are."""
        for index in range(layout.CONTROLLERS):
            if self.controllers[index].state == 0:
                return index
        return -1
