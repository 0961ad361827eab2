"""The shape of all state that stages, processes and generations of workers share.

Two kinds of memory:

* **kept** (memfds that the keeper holds, so they outlive a worker): per controller the doorbell page and the state
  area; this module gives every offset in them. Nothing kept holds an address of a process.
* **worker-local** (numpy arrays of one worker): poller contexts, controller contexts, DMA tables, rings. Addresses
  live only here and are made anew by each worker.

The state area, in order::

    HEADER            magic, version, sizes (one page)
    SQ  x QUEUES      what is live, how many commands were fetched
    CQ  x QUEUES      what is live, how many completions were posted
    SPACE x NAMESPACES  per-namespace counters (SMART, iostat)
    INFLIGHT x SLOTS  whole SQE, state, result: the replay rule's ground truth
    HISTOGRAM x QUEUES  log-linear latency histogram
    delivered x QUEUES, copies of CQs  for guest memory that is not shared (dpu.remote)
    blob              control's own state as JSON (dpu.channel.ConfigStore)

A group of volumes has a kept area of its own, at the end of this module.

64-bit fields are signed: numba turns mixtures of uint64 and int64 into floats. Counters of fetched and posted
entries grow for ever; queue positions and the phase are derived from them (position = count modulo entries, phase =
1 in even rounds), so one 8-byte store moves head and phase at once.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any, Final

import numpy as np

from dpu.nvme.wire import CompletionEntry, CopyRange, DsmRange, SubmissionEntry

VERSION: Final = 2
MAGIC: Final = 0x31555044454D5544  # "DUMEDPU1"

PAGE: Final = 4096
IO_QUEUES: Final = 64
QUEUES: Final = IO_QUEUES + 1
QUEUE_ENTRIES_MAX: Final = 1024
VECTORS: Final = QUEUES
NAMESPACES: Final = 128
SLOTS: Final = 1024  # commands in flight per controller; more wait in their SQs
MDTS: Final = 6  # 2^6 pages of 4 KiB: 256 KiB
TRANSFER_MAX: Final = PAGE << MDTS
COPY_MAX: Final = 4 * TRANSFER_MAX  # bytes that one Copy moves; of one source range TRANSFER_MAX
SEGMENTS: Final = (1 << MDTS) + 1  # an unaligned transfer touches one page more
CONTROLLERS: Final = 64  # per worker
BATCH: Final = 32  # commands fetched from one SQ before the next SQ gets its turn
DOORBELLS_OFFSET: Final = 0x1000  # in BAR0 (CAP.DSTRD 0)
BAR_BYTES: Final = PAGE  # of doorbells
BAR_FILE_BYTES: Final = DOORBELLS_OFFSET + BAR_BYTES  # as in BAR0, so that a client can map the doorbells
BLOB_BYTES: Final = 256 << 10  # each half of control's own state (dpu.channel.ConfigStore)
RING_ENTRIES: Final = CONTROLLERS * SLOTS  # a command is in a ring once, so none is ever full


def _fields(dtype: Any) -> dict[str, tuple[Any, int]]:
    """Name -> (dtype, offset)."""
    return {name: dtype.fields[name][:2] for name in dtype.names}


def _record(fields: dict[str, tuple[Any, int]], size: int) -> Any:
    """The dtype with these fields at these offsets."""
    clash = [name for name in fields if hasattr(np.void, name)]
    assert not clash, f"plain Python would find numpy's attribute instead of the field: {clash}"
    formats, offsets = [f for f, _ in fields.values()], [at for _, at in fields.values()]
    return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": size})


def _signed(structure: type[ctypes.LittleEndianStructure]) -> Any:
    """The structure's dtype, 64-bit fields signed (see the module's docstring), ``flags`` as ``cdw0_flags``."""
    wire = _fields(np.dtype(structure))
    fields = {"cdw0_flags" if name == "flags" else name: field for name, field in wire.items()}
    signed = {name: (np.dtype("<i8") if kind.itemsize == 8 else kind, at) for name, (kind, at) in fields.items()}
    return _record(signed, ctypes.sizeof(structure))


def _words(*names: str, size: int = 0) -> Any:
    """Signed 64-bit fields in order, padded to ``size`` bytes."""
    assert not size or 8 * len(names) <= size, (names, size)
    return _record({name: (np.dtype("<i8"), 8 * i) for i, name in enumerate(names)}, size or 8 * len(names))


SQE: Final = _signed(SubmissionEntry)
CQE: Final = np.dtype(CompletionEntry)
RANGE: Final = _signed(DsmRange)
COPY_RANGE: Final = _signed(CopyRange)

# ---------------------------------------------------------------------------------------------- kept: state area

HEADER: Final = _words("magic", "version", "bytes", size=PAGE)

SQ: Final = _words(
    "live",
    "epoch",
    "entries",
    "iova",
    "cqid",
    "fetched",  # commands copied out of the queue, ever
    "commands",  # the counters below are of this queue's life
    "punts",
    "errors",
    "bytes_read",
    "bytes_written",
    "ticks_wait",  # sums over commands: found in the queue -> begun
    "ticks_serve",  # begun -> completion posted
    size=128,
)

CQ: Final = _words("live", "epoch", "entries", "iova", "vector", "interrupts", "posted", "signals", size=64)

# Five words for each kind of command that moves data, so that one piece of code counts all of them.
# Ticks are from found in the queue to posted; ticks_min 0: none.
TALLY: Final = _words("count", "bytes", "ticks", "ticks_max", "ticks_min")
TALLY_BYTES: Final = TALLY.itemsize
TALLY_READ: Final = 0
TALLY_WRITE: Final = 1
TALLY_UNMAP: Final = 2
TALLY_COPY: Final = 3

SPACE: Final = _words(
    *("reads", "bytes_read", "read_ticks", "read_ticks_max", "read_ticks_min"),
    *("writes", "bytes_written", "write_ticks", "write_ticks_max", "write_ticks_min"),
    *("unmaps", "bytes_unmapped", "unmap_ticks", "unmap_ticks_max", "unmap_ticks_min"),
    *("copies", "bytes_copied", "copy_ticks", "copy_ticks_max", "copy_ticks_min"),
    "others",
    "errors",
    "media_errors",
    "miscompares",
    size=192,
)
SPACE_BYTES: Final = SPACE.itemsize

# in-flight states: the replay rule (DESIGN rule 5)
FREE: Final = 0
FETCHED: Final = 1  # the SQE is ours; executed again after a crash
EXECUTED: Final = 2  # status and dw0 are set; never executed again
POSTING: Final = 3  # cq_count and the CQE's words are set: written again, byte for byte, unless posted has passed it

INFLIGHT: Final = np.dtype(
    [
        ("sqe", SQE),
        ("state", "<i8"),
        ("sqid", "<i8"),
        ("sq_count", "<i8"),  # which fetch of its SQ this was
        ("sequence", "<i8"),  # order of fetch in the controller
        ("status", "<i8"),  # CQE status field without the phase
        ("dw0", "<i8"),
        ("cq_count", "<i8"),  # which post of its CQ this is
        ("cqe_low", "<i8"),
        ("cqe_high", "<i8"),
        ("where", "<i8"),  # WHERE_* : which stage has it
        ("bytes", "<i8"),  # of data
        ("pending", "<i8"),  # io_uring operations that have not come back
        ("seen", "<i8"),  # stamps in ticks: found in its queue, begun
        ("begun", "<i8"),
        ("verdict", "<i8"),  # of the gate: VERDICT_*, the number of its rule, and which match of that it is
        ("due", "<i8"),  # ticks: when it is executed, or HELD
    ]
)

WHERE_ASIC: Final = 0
WHERE_URING: Final = 1
WHERE_CONTROL: Final = 2
WHERE_PARKED: Final = 3  # an AER: holds no place in the CQ
WHERE_HEAP: Final = 4  # behind a gate: waits for its time, its turn or its release

VERDICT_RULE: Final = 0xFFFF
VERDICT_JUDGED: Final = 1 << 16  # it has been counted by the rules
VERDICT_ADMITTED: Final = 1 << 17  # it has been paid for
VERDICT_DELAYED: Final = 1 << 18  # ``due`` is set
VERDICT_CONTROL: Final = 1 << 19  # control carries it out, as the rule says
VERDICT_MATCH_SHIFT: Final = 20
HELD: Final = (1 << 63) - 1  # until it is released

# Log-linear histogram of nanoseconds: 8 steps per octave, 2^3 .. 2^40 ns.
HISTOGRAM_STEP_BITS: Final = 3
HISTOGRAM_BUCKETS: Final = 38 << HISTOGRAM_STEP_BITS
HISTOGRAM: Final = np.dtype(("<i8", (HISTOGRAM_BUCKETS,)))


def bucket_floor_ns(bucket: int) -> int:
    """The smallest latency, in nanoseconds, that a histogram bucket counts."""
    exponent = (bucket >> HISTOGRAM_STEP_BITS) - 1
    if exponent <= 0:
        return bucket
    return (bucket - (exponent << HISTOGRAM_STEP_BITS)) << exponent


def _place() -> dict[str, int]:
    """Offsets of the parts of the state area, each on a page."""
    parts = {
        "header": HEADER.itemsize,
        "sq": SQ.itemsize * QUEUES,
        "cq": CQ.itemsize * QUEUES,
        "space": SPACE.itemsize * NAMESPACES,
        "inflight": INFLIGHT.itemsize * SLOTS,
        "histogram": HISTOGRAM_BUCKETS * 8 * QUEUES,
        "delivered": 8 * QUEUES,
        "cq_copies": 16 * QUEUE_ENTRIES_MAX * QUEUES,
        "blob": PAGE + 2 * BLOB_BYTES,
    }
    offsets, at = {}, 0
    for name, size in parts.items():
        offsets[name] = at
        at += -(-size // PAGE) * PAGE
    return offsets | {"end": at}


_OFFSETS: Final = _place()
SQ_OFFSET: Final = _OFFSETS["sq"]
CQ_OFFSET: Final = _OFFSETS["cq"]
SPACE_OFFSET: Final = _OFFSETS["space"]
INFLIGHT_OFFSET: Final = _OFFSETS["inflight"]
HISTOGRAM_OFFSET: Final = _OFFSETS["histogram"]
DELIVERED_OFFSET: Final = _OFFSETS["delivered"]
CQ_COPIES_OFFSET: Final = _OFFSETS["cq_copies"]
BLOB_OFFSET: Final = _OFFSETS["blob"]
STATE_BYTES: Final = _OFFSETS["end"]


def offset_of(dtype: Any, field: str) -> int:
    """Byte offset of a field in its record."""
    return _fields(dtype)[field][1]


INFLIGHT_BYTES: Final = INFLIGHT.itemsize
SQ_BYTES: Final = SQ.itemsize
CQ_BYTES: Final = CQ.itemsize
INFLIGHT_STATE: Final = offset_of(INFLIGHT, "state")
SQ_FETCHED: Final = offset_of(SQ, "fetched")
CQ_POSTED: Final = offset_of(CQ, "posted")

# ------------------------------------------------------------------------------------------------- kept: gates
# One area of a daemon: GATE x GATES, RULE x RULES, DELAY x RULES. Sparse: a back end without limits and faults has no
# gate. Times are in ticks.

# GCRA (ITU-T I.371): conforming unless the theoretical arrival time is more than ``tolerance`` ahead.
BUCKET: Final = _words("per_unit", "tolerance", "tat", size=32)  # per_unit: ticks << PER_UNIT_SHIFT; 0: no limit
BUCKET_BYTES: Final = BUCKET.itemsize
BUCKET_PER_UNIT: Final = offset_of(BUCKET, "per_unit")
BUCKET_TAT: Final = offset_of(BUCKET, "tat")
PER_UNIT_SHIFT: Final = 20
BUCKETS: Final = ("rw_ios", "rw_bytes", "r_ios", "r_bytes", "w_ios", "w_bytes")
PLACES: Final = 64  # flows that share a back end fairly
GATES: Final = 16384
RULES: Final = 1024

GATE: Final = _record(
    {
        "rules": (np.dtype("<i8"), 0),  # number of the first one
        "managed": (np.dtype("<i8"), 8),  # control carries out every command
        "served": (np.dtype("<i8"), 16),  # virtual time: of the flow that was served last
        "buckets": (np.dtype((BUCKET, (len(BUCKETS),))), 64),
        "waiting": (np.dtype(("<i8", (PLACES,))), 256),  # whether the flow in this place has commands that wait
        "turns": (np.dtype(("<i8", (PLACES,))), 768),  # virtual time of the flow: ticks of service that it has had
    },
    1280,
)
GATE_BYTES: Final = GATE.itemsize
GATE_MANAGED: Final = offset_of(GATE, "managed")
GATE_SERVED: Final = offset_of(GATE, "served")
GATE_BUCKETS: Final = offset_of(GATE, "buckets")
GATE_WAITING: Final = offset_of(GATE, "waiting")
GATE_TURNS: Final = offset_of(GATE, "turns")

RULE: Final = _words(
    "live",
    "following",  # number of the gate's next one
    "opcodes",  # bit n: opcode n
    "first",  # logical blocks; of commands without a range all match
    "last",
    "skip",  # so many matches pass
    "every",  # of the others each so manieth is struck
    "count",  # at most so many
    "rate",  # with this probability, of 2^32
    "seed",
    "matches",  # so far
    "struck",
    "action",  # ACT_*
    "status",
    "delayed",  # its DELAY is drawn from
    "serial",  # which fault it is, ever
    size=128,
)
RULE_BYTES: Final = RULE.itemsize
RULE_MATCHES: Final = offset_of(RULE, "matches")
RULE_STRUCK: Final = offset_of(RULE, "struck")
ACT_NONE: Final = 0
ACT_STATUS: Final = 1  # ends with ``status``, nothing is done
ACT_HOLD: Final = 2  # waits until it is released
ACT_CONTROL: Final = 3
DELAY_STEPS_BITS: Final = 8
DELAY: Final = np.dtype(("<i8", ((1 << DELAY_STEPS_BITS) + 1,)))  # quantiles, in ticks
DELAY_BYTES: Final = DELAY.itemsize

RULES_OFFSET: Final = GATE_BYTES * GATES
DELAYS_OFFSET: Final = RULES_OFFSET + RULE_BYTES * RULES
GATES_BYTES: Final = DELAYS_OFFSET + -(-DELAY_BYTES * RULES // PAGE) * PAGE

# ------------------------------------------------------------------------------------------------- worker-local

# Commands of one namespace of one controller: what they have to pass, and who waits, in order of arrival.
FLOW: Final = _words(
    *("gate0", "gate1", "gate2", "gate3"),  # addresses
    *("place0", "place1", "place2", "place3"),  # in the gates' tables; -1: takes no turns
    "gates",  # how many
    "due",  # of its item in the heap; 0 when nobody waits
    *("read_head", "read_tail", "write_head", "write_tail"),  # slot + 1, chained by CONTROLLER's ``links``
    size=128,
)
FLOW_BYTES: Final = FLOW.itemsize
FLOW_GATES_MAX: Final = 4
FLOW_PLACES: Final = offset_of(FLOW, "place0")
FLOW_LINES: Final = offset_of(FLOW, "read_head")
LINE: Final = _words("head", "tail")
LINE_BYTES: Final = LINE.itemsize

HEAP_ITEM: Final = _words("due", "what")  # controller << 32 | slot, or HEAP_FLOW | namespace's index
HEAP_FLOW: Final = 1 << 31
HEAP_ITEMS: Final = 2 * CONTROLLERS * (SLOTS + NAMESPACES)

# One DMA region: guest addresses iova .. iova + length are at host address ``host``; rights: 1 read, 2 write.
REGION: Final = _words("iova", "length", "host", "rights")
DMA_READ: Final = 1  # the device may read guest memory
DMA_WRITE: Final = 2

# A namespace as the compiled stage sees it; ``kind`` is what map_lookup switches on.
NAMESPACE: Final = _words(
    "kind",
    "shift",  # log2 of the logical block size
    "blocks",
    "host",  # memory: address of block 0
    "fd",  # memory: the memfd; file: through the page cache
    "direct_fd",  # file: O_DIRECT, or -1
    "align",  # of O_DIRECT, minus 1
    "readonly",
    "discard",  # Deallocate does something
    "marks",  # addresses of dpu.backends.marks: a byte of each block, 0 while nothing was ever marked
    "mark_pages",  # a byte of each MARK_PAGE blocks: some of them may be marked
    "threads",  # WHY_* every command goes to control, or 0
    "volume",  # addresses of its VOLUME and of its group's GROUP_LOCAL
    "group",
    size=128,
)
MARK_PAGE_BITS: Final = 12
KIND_ABSENT: Final = 0
KIND_NULL: Final = 1
KIND_MEMORY: Final = 2
KIND_FILE: Final = 3
KIND_VOLUME: Final = 4

SEGMENT: Final = _words("host", "length")  # the kernel's struct iovec
SEGMENT_BYTES: Final = SEGMENT.itemsize
SEGMENT_LIST_BYTES: Final = SEGMENTS * SEGMENT_BYTES  # of one slot

# Words of queues that are valid in this worker only; index i serves SQ i and CQ i alike.
QUEUE_LOCAL: Final = _words(
    "sq_host",  # 0: resolved at the next use; DMA maps come and go under live queues
    "sq_head",  # fetched modulo entries
    "sq_outstanding",
    "cq_host",
    "cq_tail",  # posted modulo entries
    "cq_phase",
    "cq_outstanding",  # fetched commands that hold a place in this CQ
    "dirty",  # completions were posted since its vector was fired
    "region",  # index of the DMA region that served last
    "bad_tail",  # the invalid doorbell value that was reported last, so that it is reported once
    "bad_head",
    "blocked",  # commands wait for room in this CQ
    size=128,
)

CONTROLLER: Final = _words(
    "live",
    "busy",  # ticks: when it had something to do last
    "index",
    "client",  # its number at the keeper
    "state",  # address of the state area
    "bar",  # address of the doorbell page
    "seen",  # address of the doorbells that count: the same page, or those of what control has copied (dpu.remote)
    "namespaces",  # NAMESPACE x NAMESPACES, by nsid - 1
    "namespaces_max",  # NN: a larger NSID is invalid, an absent one below is inactive
    "queues",  # QUEUE_LOCAL x QUEUES
    "vectors",  # eventfd per vector, -1 when not assigned
    "segments",  # SEGMENT x SEGMENTS x SLOTS
    "free",  # stack of free slots
    "free_count",
    "dma",  # REGION x dma_count, sorted by iova
    "dma_count",
    "socket",
    "attention",  # ATTENTION_*
    "hold",  # 1: no new command is fetched
    "sequence",  # of the next fetched command
    "outstanding",  # commands that are with io_uring
    "shadow",  # DBBUF: guest memory of the two buffers as host addresses, 0 when off
    "events",
    "live_queues",  # ids of live SQs, live_count of them
    "live_count",
    "bad_doorbell",  # kind << 32 | id of a doorbell write to report; 0 when control has read it
    "todo",  # ring of SLOTS: commands to bring to their end (asic.finish_todo)
    "todo_begin",
    "todo_end",
    "recovering",  # they are the last worker's: new commands wait
    "mapped",  # 1: the client writes to the doorbell page itself, and nothing tells us when
    "write_through",  # the volatile write cache is off: every write is durable when it completes
    "tracing",  # TRACE_SLOT x SLOTS, 0 while nothing is traced
    "blocks",  # BLOCK x SLOTS, each with what belongs to it
    "flows",  # FLOW x NAMESPACES, 0 while no namespace has a gate
    "links",  # of waiting commands: slot + 1 of the next, by slot
    size=320,
)

ATTENTION_NONE: Final = 0
ATTENTION_WANTED: Final = 1  # a message that is no doorbell (or the end of the stream) is at the head
ATTENTION_TAKEN: Final = 2  # control has seen it

BAD_DOORBELL_REGISTER: Final = 1  # Base 2.0 figure 146: "Write to Invalid Doorbell Register" (value + 1)
BAD_DOORBELL_VALUE: Final = 2  # "Invalid Doorbell Write Value" (value + 1)

POLLER: Final = _words(
    "stop",
    "passes",
    "grace_wanted",
    "grace_seen",
    "control_fd",  # eventfd: wakes control
    "wake_fd",  # eventfd: wakes this poller
    "health",  # address of the heartbeat word
    "serving",  # address of the word with the client that is being served
    "misses",  # ring poller -> control: commands for control
    "updates",  # ring control -> poller: commands that control has executed
    "errors",  # ring poller -> control of ERROR_RECORD: failed I/O commands, for the error log
    "uring",  # address of URING
    "pollfds",
    "scratch",
    "dirty",  # controller << 32 | cqid of CQs to signal at the end of the pass
    "dirty_count",
    "controllers",  # CONTROLLER x CONTROLLERS
    "controller_count",
    "spin",  # idle passes before sleeping
    "stamps",  # 0: no time is taken on the data path
    "counters",  # 0: nothing is counted on the data path
    "ns_mult",  # nanoseconds = ticks * ns_mult >> 20
    "kick",  # control has something to do; woken once at the end of the pass
    "armed",  # 1: the guest was asked to ring for new entries
    "sleeps",
    "idle_ms",  # longest sleep
    "nap_ns",  # longest sleep while a doorbell page is mapped by its client
    "kill_point",  # tests: KILL_POINTS code and countdown
    "kill_after",
    "pid",
    "trace_ring",  # TRACE records behind TRACE_HEADER
    "trace_mask",  # entries - 1
    "looks",  # passes that have looked at all controllers
    "looked",  # ticks: when the last one did
    "look_ticks",  # after so long they are again
    "quiet_ticks",  # a controller that had nothing for so long is not looked at meanwhile
    "number",  # of its area in each group of volumes
    "to_soc",  # virtual queues: rings asic -> soc and back
    "from_soc",
    "zeroes",  # TRANSFER_MAX bytes of zeroes
    "refill",  # a pool has halved, or a log has grown: for control
    "parity",  # control's; requests on volumes that io_uring has are counted by it, see Poller.settled
    "begun_even",
    "begun_odd",
    "clock",  # tests: address of the time in ticks; 0: the processor's
    "gates",  # the kept area
    "heap",  # HEAP_ITEM x HEAP_ITEMS, of heap_count
    "heap_count",
    "heap_stale",  # control has changed what waits: look at all of it
    size=448,
)

STOP: Final = offset_of(POLLER, "stop")
HEAP_STALE: Final = offset_of(POLLER, "heap_stale")
GRACE_WANTED: Final = offset_of(POLLER, "grace_wanted")
GRACE_SEEN: Final = offset_of(POLLER, "grace_seen")
SCRATCH_BYTES: Final = 3 * PAGE  # peeked messages; consumed ones; the number 1 for eventfds
DIRTY_MAX: Final = CONTROLLERS * QUEUES

# One traced command; times in ticks, 0 where it was not. ``where``: the last stage beside the asic that had it.
TRACE: Final = _words(
    "seen",  # found in its queue
    "begun",
    "handed",  # to io_uring or to control
    "taken",  # by control
    "answered",  # by control
    "done",  # completion posted
    "client",
    "sqid",
    "cid",
    "opcode",
    "nsid",
    "lba",
    "bytes",
    "status",
    "where",
    "why",  # WHY_*: why it left the asic
)
TRACE_BYTES: Final = TRACE.itemsize
TRACE_HEADER: Final = 128  # before the records: how many were written, ever; whether it is switched on; TRACE_SHAPE
TRACE_SHAPE: Final = zlib.crc32(repr(TRACE.descr).encode())  # other code may have other records (dpu.upgrade)
TRACE_SLOT: Final = _words("handed", "taken", "answered", "why")


def trace_bytes(entries: int) -> int:
    """Of the area for so many traced commands."""
    return TRACE_HEADER + entries * TRACE_BYTES


WHY_ADMIN: Final = 1
WHY_FILE: Final = 2
WHY_NO_URING: Final = 3
WHY_BUFFER: Final = 4
WHY_MARKS: Final = 5
WHY_REFUSED: Final = 6
WHY_UNSHARED: Final = 7
WHY_SOC: Final = 8
WHY_ROOM: Final = 9  # a pool is empty or a log is full: executed again when control has seen to it
WHY_SHARED: Final = 10  # clusters of a file, or large ones, are shared: executed again when control has copied them
WHY_COMMIT: Final = 11  # done, and complete when the map is durable
WHY_FAULT: Final = 12

ERROR_RECORD: Final = _words("controller", "sqid", "cid", "status", "nsid", "lba", size=64)
ERROR_ENTRIES: Final = 64

# A posted 4-byte REGION_WRITE as vfio-user carries it: the one message that pollers read by themselves.
DOORBELL: Final = np.dtype(
    [
        ("id", "<u2"),
        ("command", "<u2"),
        ("length", "<u4"),
        ("message_flags", "<u4"),
        ("error", "<u4"),
        ("offset", "<i8"),
        ("region", "<u4"),
        ("count", "<u4"),
        ("value", "<u4"),
    ]
)

# Single-producer single-consumer ring: producer and consumer words on cache lines of their own.
RING_HEAD: Final = 0
RING_TAIL: Final = 64
RING_DATA: Final = 128
RING_BYTES: Final = RING_DATA + 8 * RING_ENTRIES

POLLFD: Final = np.dtype([("fd", "<i4"), ("events", "<i2"), ("revents", "<i2")])
POLLFDS: Final = CONTROLLERS + 2

# io_uring, include/uapi/linux/io_uring.h
URING: Final = _words(
    "fd",
    "sq_head",
    "sq_tail",
    "sq_mask",
    "sq_array",
    "sqes",
    "cq_head",
    "cq_tail",
    "cq_mask",
    "cqes",
    "pending",  # prepared, not yet submitted
    "inflight",  # prepared or submitted, not yet reaped
    "limit",  # of inflight
    size=128,
)
URING_SQE: Final = np.dtype(
    [
        ("opcode", "u1"),
        ("sqe_flags", "u1"),
        ("ioprio", "<u2"),
        ("fd", "<i4"),
        ("off", "<i8"),
        ("addr", "<i8"),
        ("len", "<u4"),
        ("rw_flags", "<u4"),
        ("user_data", "<i8"),
        ("buf_index", "<u2"),
        ("personality", "<u2"),
        ("splice_fd", "<i4"),
        ("pad", "<i8", (2,)),
    ]
)
URING_CQE: Final = np.dtype([("user_data", "<i8"), ("res", "<i4"), ("cqe_flags", "<u4")])
for _dtype in (INFLIGHT, POLLFD, DOORBELL, URING_SQE, URING_CQE):
    _record(_fields(_dtype), _dtype.itemsize)  # refuses clashing names
assert URING_SQE.itemsize == 64 and URING_CQE.itemsize == 16 and CQE.itemsize == 16 and SQE.itemsize == 64

# ---------------------------------------------------------------------------------------- volumes: kept, by group
#
# A sparse memfd per group, its parts at fixed offsets in this order::
#
#     GROUP             magic, version, cluster size, next epoch (one page)
#     GROUP_BACKING x BACKINGS   where a back end's clusters begin in STATE
#     VOLUME x VOLUMES_MAX
#     root words        the leaves of each volume, a run of words each; 0: no leaf, so leaf 0 is never used
#     leaf epochs       a word per leaf: the epoch that it was made in
#     leaf states, cluster states   a byte each; control alone touches them
#     poller areas      AREAS of them: pool, leaf pool, log; the last one is control's own
#     leaves            LEAF_ENTRIES entries each
#
# Entry of a leaf: bits 0-31 cluster, 32-39 back end (together the cluster's place), 40-62 birth epoch, at least 1.
# 0 is unmapped and reads as zeroes. An entry may be written in place (it is owned) if its birth is the volume's
# epoch; a leaf is owned if its epoch is. See dpu.volumes.area for what is written when.

GROUP_MAGIC: Final = 0x31505552474D5544  # "DUMGRUP1"
GROUP: Final = _words("magic", "version", "cluster_shift", "next_epoch", size=PAGE)
GROUP_BACKING: Final = _words("first", "clusters", size=32)
BACKINGS: Final = 256
VOLUMES_MAX: Final = 16384
VOLUME: Final = _words(
    "state",
    "epoch",
    "clusters",  # logical size; no larger index is looked up
    "root",  # its first root word
    "root_words",  # that its run has room for
    "thick",  # 1: Deallocate zeroes, and takes no cluster away
    "readonly",  # control's, as the next
    "root_changed",  # the database has other root words
    "changes",  # of the map, ever: counted before the change is made
    "committed",  # so many of them are durable
    size=128,
)
VOLUME_ABSENT: Final = 0
VOLUME_PENDING: Final = 1  # being made or deleted: dropped if the worker dies
VOLUME_LIVE: Final = 2
VOLUME_BYTES: Final = VOLUME.itemsize
VOLUME_CHANGES: Final = offset_of(VOLUME, "changes")
VOLUME_COMMITTED: Final = offset_of(VOLUME, "committed")

PLACE_BITS: Final = 40
PLACE: Final = (1 << PLACE_BITS) - 1
BACKING_SHIFT: Final = 32
CLUSTER: Final = (1 << BACKING_SHIFT) - 1  # clusters per back end
EPOCH_MAX: Final = (1 << 23) - 1
LEAF_BITS: Final = 9
LEAF_ENTRIES: Final = 1 << LEAF_BITS
CLUSTER_SHIFTS: Final = range(12, 27)  # 4 KiB to 64 MiB

# What a cluster is; see dpu.volumes.
CLUSTER_DIRTY: Final = 0  # free, holds somebody's data
CLUSTER_CLEAN: Final = 1  # free, reads as zeroes
CLUSTER_POOLED: Final = 2  # clean, in a poller's pool
CLUSTER_USED: Final = 3
CLUSTER_LEAVING: Final = 4  # unmapped: free when that is durable and nobody uses it any more
LEAF_FREE: Final = 0
LEAF_POOLED: Final = 1
LEAF_USED: Final = 2
LEAF_CHANGED: Final = 3  # used, and not as the database has it

# Change of a map by a poller (or control), for control. Valid if ``sequence``, stored last, is its number in the log
# plus 1. ``old`` and ``new`` are entries; of LOG_LEAF root words, and ``index`` is that of the root word.
LOG_RECORD: Final = _words("sequence", "action", "volume", "index", "old", "new", size=64)
LOG_RECORD_BYTES: Final = LOG_RECORD.itemsize
LOG_SEQUENCE: Final = offset_of(LOG_RECORD, "sequence")
LOG_ALLOCATE: Final = 1  # 0 -> a cluster of the pool
LOG_COPY: Final = 2  # an entry that is not owned -> a cluster of the pool with the same data
LOG_FREE: Final = 3  # an owned entry -> 0
LOG_DROP: Final = 4  # an entry that is not owned -> 0
LOG_LEAF: Final = 5  # a root word -> a leaf of the leaf pool
LOG_ENTRIES: Final = 16384
LOG_BYTES: Final = RING_DATA + LOG_RECORD_BYTES * LOG_ENTRIES

AREAS: Final = 65
CONTROL_AREA: Final = AREAS - 1
POOL_OFFSET: Final = 0  # RING of places
LEAF_POOL_OFFSET: Final = POOL_OFFSET + -(-RING_BYTES // PAGE) * PAGE  # RING of leaf numbers
LOG_OFFSET: Final = LEAF_POOL_OFFSET + -(-RING_BYTES // PAGE) * PAGE
AREA_BYTES: Final = LOG_OFFSET + -(-LOG_BYTES // PAGE) * PAGE

ROOT_WORDS: Final = 1 << 30
LEAVES: Final = 1 << 27
CLUSTERS_MAX: Final = 1 << 33  # of a group

BACKINGS_OFFSET: Final = PAGE
VOLUMES_OFFSET: Final = BACKINGS_OFFSET + BACKINGS * GROUP_BACKING.itemsize
ROOTS_OFFSET: Final = VOLUMES_OFFSET + VOLUMES_MAX * VOLUME.itemsize
LEAF_EPOCHS_OFFSET: Final = ROOTS_OFFSET + 8 * ROOT_WORDS
LEAF_STATES_OFFSET: Final = LEAF_EPOCHS_OFFSET + 8 * LEAVES
CLUSTER_STATES_OFFSET: Final = LEAF_STATES_OFFSET + LEAVES
AREAS_OFFSET: Final = CLUSTER_STATES_OFFSET + CLUSTERS_MAX
LEAVES_OFFSET: Final = AREAS_OFFSET + AREAS * AREA_BYTES
LEAF_BYTES: Final = 8 * LEAF_ENTRIES
GROUP_BYTES: Final = LEAVES_OFFSET + LEAVES * LEAF_BYTES

# Worker-local: a group's parts as addresses, and its back ends.
GROUP_LOCAL: Final = _words(
    "roots",  # those that a look-up needs come first
    "leaf_epochs",
    "areas",
    "leaves",
    "backings",  # BACKING x BACKINGS
    "volumes",
    "cluster_shift",
    "offload",  # 1: what is mapped, and for a write owned, does not pass through the soc
    "durable",  # 1: Flush has something to make durable
    "direct",  # offload, and all of it is in memory
    "backing_count",  # the rest of them is not used
    "copy_max",  # larger clusters are copied by control
    size=128,
)
BACKING: Final = _words("kind", "host", "fd", "direct_fd", "align", "start", size=64)  # host, start: of cluster 0

# A block request: what asic and soc say to each other about the command in a slot, and the asic to itself.
BLOCK: Final = _words(
    "action",  # BLOCK_*
    "group",  # addresses, as in NAMESPACE
    "volume",
    "offset",  # bytes in the volume
    "length",
    "target",  # of a copy
    "own",  # locate: OWN_*
    "free",  # erase: Deallocate
    "count",  # the soc's answer: extents, or minus a WHY_*
    "target_count",
    "done",  # erase: bytes dealt with
    "first",  # WHY_SHARED: clusters that control shall make writable
    "clusters",
    "why",  # WHY_*: what control shall do
    "segments",  # of the guest's memory
    "sequence",  # of the command that part and at belong to: how far it is
    "part",  # range of a Deallocate or Copy
    "at",  # bytes of it
    "left",  # bytes that io_uring has not moved yet
    "parity",
    size=192,
)
OWN_NOT: Final = 0  # look up only
OWN_ALREADY: Final = 1  # all has to be the volume's own
OWN_MAKE: Final = 2  # and is made so
BLOCK_READ: Final = 0
BLOCK_WRITE: Final = 1
BLOCK_ERASE: Final = 2
BLOCK_COPY: Final = 3
EXTENT: Final = _words("host", "backing", "offset", "length")  # host 0: in a file; backing -1: zeroes
EXTENT_BYTES: Final = EXTENT.itemsize
EXTENTS: Final = (TRANSFER_MAX >> CLUSTER_SHIFTS[0]) + 1
BLOCK_EXTENTS: Final = BLOCK.itemsize
BLOCK_TARGETS: Final = BLOCK_EXTENTS + EXTENTS * EXTENT_BYTES
BLOCK_IOVECS: Final = BLOCK_TARGETS + EXTENTS * EXTENT_BYTES
BLOCK_BYTES: Final = BLOCK_IOVECS + -(-(SEGMENTS + EXTENTS) * SEGMENT.itemsize // 64) * 64

# Named points where a test may end the worker (see dpu/killpoint.py); code 0 is "never".
KILL_POINTS: Final = {
    "header_read": 1,
    "doorbell_stored": 2,
    "sqe_copied": 3,
    "executed": 4,
    "cqe_half": 5,
    "cqe_written": 6,
    "before_eventfd": 7,
    "in_loop": 8,
    "uring_submitted": 9,
    "segment_written": 10,
    "soc_counted": 11,
    "soc_leaf_filled": 12,
    "soc_leaf_logged": 13,
    "soc_leaf_published": 14,
    "soc_logged": 15,
    "soc_copied": 16,
    "soc_published": 17,
    "soc_tail_moved": 18,
}
