"""The asic stage: doorbells, SQE fetch, checks, PRP walk, look-up, copy, completion, interrupt.

One poller = one thread without the interpreter lock; it serves its controllers in turn and never waits for
control. What it cannot answer from tables it hands to control over the miss ring; what control has answered comes
back over the update ring; what a volume's map has to be changed for goes to the soc stage (dpu.fastpath.soc) and back
over two virtual queues; files go through io_uring, reaped in the same loop. Each pass ends with one eventfd
write per CQ that got completions.

Replay rule (DESIGN rule 5). A fetch writes the whole SQE and its place into an in-flight entry, marks it FETCHED,
then moves the queue. A completion writes the CQE's words into the entry, marks it POSTING, writes the CQE, moves
the queue, frees the entry. So a worker that dies between any two stores leaves entries from which :func:`finish_todo`
goes on: FETCHED is executed again, EXECUTED is posted, POSTING is written again byte for byte.

Everything here runs compiled, or as plain Python with NUMBA_DISABLE_JIT=1. Sections are of the NVMe Base
Specification 2.0 and the NVM Command Set Specification 1.0.
"""

from __future__ import annotations

from typing import Any

from dpu.fastpath import soc
from dpu.fastpath.atomics import (
    bit_length,
    copy,
    fence,
    load_u32,
    load_u64,
    pause,
    signed,
    store_u32,
    store_u64,
    ticks,
    view,
)
from dpu.fastpath.gate import OPEN, append_todo, gate, next_due_ns, wake_due
from dpu.fastpath.jit import TRACEABLE, compiled, inlined
from dpu.fastpath.rings import kill_at, ring_drop, ring_peek, ring_push
from dpu.fastpath.system import differ, fill, find, io_uring_enter, move, ppoll, punch, read, recv, write
from dpu.layout import (
    ATTENTION_NONE,
    ATTENTION_WANTED,
    BACKING,
    BACKINGS,
    BAD_DOORBELL_REGISTER,
    BAD_DOORBELL_VALUE,
    BAR_BYTES,
    BATCH,
    BLOCK,
    BLOCK_BYTES,
    BLOCK_COPY,
    BLOCK_ERASE,
    BLOCK_EXTENTS,
    BLOCK_IOVECS,
    BLOCK_READ,
    BLOCK_TARGETS,
    BLOCK_WRITE,
    CONTROLLER,
    CONTROLLERS,
    COPY_MAX,
    COPY_RANGE,
    CQ,
    CQ_BYTES,
    CQ_OFFSET,
    CQ_POSTED,
    DMA_READ,
    DMA_WRITE,
    DOORBELL,
    DOORBELLS_OFFSET,
    ERROR_ENTRIES,
    ERROR_RECORD,
    EXECUTED,
    EXTENT,
    EXTENTS,
    FETCHED,
    FREE,
    GRACE_SEEN,
    GRACE_WANTED,
    GROUP_LOCAL,
    HISTOGRAM_BUCKETS,
    HISTOGRAM_OFFSET,
    HISTOGRAM_STEP_BITS,
    INFLIGHT,
    INFLIGHT_BYTES,
    INFLIGHT_OFFSET,
    INFLIGHT_STATE,
    KILL_POINTS,
    KIND_ABSENT,
    KIND_FILE,
    KIND_MEMORY,
    KIND_VOLUME,
    MARK_PAGE_BITS,
    NAMESPACE,
    NAMESPACES,
    OWN_ALREADY,
    OWN_NOT,
    PAGE,
    POLLER,
    POLLFD,
    POLLFDS,
    POSTING,
    QUEUE_LOCAL,
    QUEUES,
    RANGE,
    REGION,
    RING_DATA,
    RING_HEAD,
    RING_TAIL,
    SEGMENT,
    SEGMENT_BYTES,
    SEGMENT_LIST_BYTES,
    SEGMENTS,
    SLOTS,
    SPACE,
    SPACE_BYTES,
    SPACE_OFFSET,
    SQ,
    SQ_BYTES,
    SQ_FETCHED,
    SQ_OFFSET,
    STOP,
    TALLY,
    TALLY_BYTES,
    TALLY_COPY,
    TALLY_READ,
    TALLY_UNMAP,
    TALLY_WRITE,
    TRACE,
    TRACE_BYTES,
    TRACE_HEADER,
    TRACE_SLOT,
    TRANSFER_MAX,
    URING,
    URING_CQE,
    URING_SQE,
    VERDICT_CONTROL,
    VOLUME_CHANGES,
    VOLUME_COMMITTED,
    WHERE_ASIC,
    WHERE_CONTROL,
    WHERE_PARKED,
    WHERE_URING,
    WHY_ADMIN,
    WHY_BUFFER,
    WHY_COMMIT,
    WHY_FAULT,
    WHY_FILE,
    WHY_MARKS,
    WHY_NO_URING,
    WHY_REFUSED,
    WHY_SOC,
)
from dpu.nvme.wire import (
    BROADCAST_NSID,
    CDW11_DSM_AD,
    CDW12_COPY_FORMAT,
    CDW12_COPY_NR,
    CDW12_FUA,
    CDW12_NLB,
    CDW12_PRACT,
    COPY_RANGES_MAX,
    DSM_RANGES_MAX,
    AdminOpcode,
    NvmOpcode,
    Status,
)

# Names as plain numbers: compiled code takes globals as constants.
_FLUSH, _WRITE, _READ = int(NvmOpcode.FLUSH), int(NvmOpcode.WRITE), int(NvmOpcode.READ)
_COMPARE, _ZEROES = int(NvmOpcode.COMPARE), int(NvmOpcode.WRITE_ZEROES)
_DSM, _UNCORRECTABLE = int(NvmOpcode.DATASET_MANAGEMENT), int(NvmOpcode.WRITE_UNCORRECTABLE)
_VERIFY, _COPY = int(NvmOpcode.VERIFY), int(NvmOpcode.COPY)
_AER = int(AdminOpcode.ASYNC_EVENT_REQUEST)
_BROADCAST = int(BROADCAST_NSID)

_DNR = 1 << 14  # Do Not Retry (Base 4.6.1): the same command would fail again
SHORT_SLEEP_NS = 100_000
NAP_NS_MIN = 50_000
LOOKS = 4  # 452 doorbells
NAP_SPINS = 10  # between naps a poller spins longer: about as long as the shortest nap
URING_RESERVE = DSM_RANGES_MAX + 1  # requests that one command can need: Deallocate's, and one to spare
_MORE = 1 << 13  # the error log has an entry of it
_OK = 0
_INVALID_OPCODE = int(Status.INVALID_OPCODE) | _DNR
_INVALID_FIELD = int(Status.INVALID_FIELD) | _DNR
_DATA_TRANSFER = int(Status.DATA_TRANSFER_ERROR) | _DNR
_INVALID_NAMESPACE = int(Status.INVALID_NAMESPACE_OR_FORMAT) | _DNR
_PRP_OFFSET = int(Status.PRP_OFFSET_INVALID) | _DNR
_LBA_RANGE = int(Status.LBA_OUT_OF_RANGE) | _DNR
_CAPACITY = int(Status.CAPACITY_EXCEEDED) | _DNR
_WRITE_PROTECTED = int(Status.NAMESPACE_WRITE_PROTECTED) | _DNR
_MISCOMPARE = int(Status.COMPARE_FAILURE)
_COMPARE_FAILURE = _MISCOMPARE | _DNR
_SIZE_LIMIT = int(Status.COMMAND_SIZE_LIMIT_EXCEEDED) | _DNR
_WRITE_FAULT = int(Status.WRITE_FAULT)
_READ_ERROR = int(Status.UNRECOVERED_READ_ERROR)
_INTERNAL = int(Status.INTERNAL_ERROR)
_VOLUME = 1 << 31  # in the tag of an io_uring request, above the slot
_PENDING = -1  # execute(): the completion comes later
_BY_CONTROL = -2  # uring_status(): what the file system cannot do, a thread of control does another way

_REGION_WRITE = 10  # vfio-user command
_NO_REPLY = 0x10
_DOORBELL_BYTES = 36
_PEEK, _DONT_WAIT = 2, 0x40
_POLLIN = 1

_OP_READV, _OP_WRITEV, _OP_FSYNC, _OP_FALLOCATE = 1, 2, 3, 17
_LINK = 4  # IOSQE_IO_LINK
_DATASYNC = 1
_DSYNC = 2  # RWF_DSYNC
_PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_ENOSPC, _EFBIG, _EDQUOT, _EFAULT, _EINVAL, _EOPNOTSUPP = -28, -27, -122, -14, -22, -95
_PUNCH_MIN = 64 << 10  # larger zeroing of memory gives the pages back instead of writing them

_HEADER_READ, _DOORBELL_STORED = KILL_POINTS["header_read"], KILL_POINTS["doorbell_stored"]
_SQE_COPIED, _EXECUTED, _CQE_HALF = (
    KILL_POINTS["sqe_copied"],
    KILL_POINTS["executed"],
    KILL_POINTS["cqe_half"],
)
_CQE_WRITTEN, _BEFORE_EVENTFD = KILL_POINTS["cqe_written"], KILL_POINTS["before_eventfd"]
_IN_LOOP, _URING_SUBMITTED = KILL_POINTS["in_loop"], KILL_POINTS["uring_submitted"]
_SEGMENT_WRITTEN = KILL_POINTS["segment_written"]


# --------------------------------------------------------------------------------------------- guest addresses


@inlined
def dma_find(c: Any, local: Any, iova: int, size: int, rights: int) -> int:
    """Host address of guest memory, or 0 when it is not all inside one mapped region with these rights."""
    count = c.dma_count
    regions = view(c.dma, count, REGION)
    hint = local.region
    if hint < count:
        r = regions[hint]
        offset = iova - r.iova
        if iova >= r.iova and offset < r.length:
            if size <= r.length - offset and r.rights & rights == rights:
                return r.host + offset
            return 0
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if regions[middle].iova <= iova:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return 0
    r = regions[low - 1]
    offset = iova - r.iova
    if offset < r.length and size <= r.length - offset and r.rights & rights == rights:
        local.region = low - 1
        return r.host + offset
    return 0


@compiled
def resolve_sq(c: Any, sqid: int) -> bool:
    """Find the host address of an SQ; False while the guest has it unmapped."""
    local = view(c.queues, QUEUES, QUEUE_LOCAL)[sqid]
    if local.sq_host == 0:
        sq = view(c.state + SQ_OFFSET, QUEUES, SQ)[sqid]
        local.sq_host = dma_find(c, local, sq.iova, sq.entries * 64, DMA_READ)
    return local.sq_host != 0


@compiled
def resolve_cq(c: Any, cqid: int) -> bool:
    """Find the host address of a CQ; False while the guest has it unmapped."""
    local = view(c.queues, QUEUES, QUEUE_LOCAL)[cqid]
    if local.cq_host == 0:
        cq = view(c.state + CQ_OFFSET, QUEUES, CQ)[cqid]
        local.cq_host = dma_find(c, local, cq.iova, cq.entries * 16, DMA_WRITE)
    return local.cq_host != 0


@inlined
def add_segment(c: Any, local: Any, out: int, count: int, iova: int, size: int, rights: int) -> int:
    """Append guest memory to a segment list, joined to the last one if it follows it; -1 when it is unmapped."""
    host = dma_find(c, local, iova, size, rights)
    if host == 0:
        return -1
    segments = view(out, SEGMENTS, SEGMENT)
    if count > 0 and segments[count - 1].host + segments[count - 1].length == host:
        segments[count - 1].length += size
        return count
    segments[count].host = host
    segments[count].length = size
    return count + 1


@inlined
def walk_prps(c: Any, local: Any, sqe: Any, length: int, rights: int, out: int) -> int:
    """The segments of a transfer of ``length`` bytes at ``out``; their number, or minus a status.

    PRP entries and lists: Base 4.1.1. Each address is looked up in the DMA map; lists are read once, entry by
    entry, from guest memory that may change meanwhile: nothing is read twice. The number of steps is bounded by
    ``length``: every list page but the first gives at least 511 pages.
    """
    iova = sqe.prp1
    offset = iova & (PAGE - 1)
    if offset & 3:
        return -_PRP_OFFSET
    size = min(PAGE - offset, length)
    count = add_segment(c, local, out, 0, iova, size, rights)
    if count < 0:
        return -_DATA_TRANSFER
    left = length - size
    if left == 0:
        return count
    if left <= PAGE:
        if sqe.prp2 & (PAGE - 1):
            return -_PRP_OFFSET
        count = add_segment(c, local, out, count, sqe.prp2, left, rights)
        return count if count >= 0 else -_DATA_TRANSFER
    at = sqe.prp2
    if at & 7:
        return -_PRP_OFFSET
    entries = (PAGE - (at & (PAGE - 1))) >> 3
    page = dma_find(c, local, at, entries * 8, DMA_READ)
    if page == 0:
        return -_DATA_TRANSFER
    index = 0
    while left > 0:
        entry = load_u64(page + 8 * index)
        index += 1
        if entry & (PAGE - 1):
            return -_PRP_OFFSET
        if index == entries and left > PAGE:
            entries = PAGE >> 3
            index = 0
            page = dma_find(c, local, entry, PAGE, DMA_READ)
            if page == 0:
                return -_DATA_TRANSFER
            continue
        size = min(PAGE, left)
        count = add_segment(c, local, out, count, entry, size, rights)
        if count < 0:
            return -_DATA_TRANSFER
        left -= size
    return count


@inlined
def map_lookup(ns: Any, local: Any, lba: int, size: int, write: bool) -> int:
    """Host address of bytes from a logical block on, the one place where a block's home is looked up; 0 is a miss.

    A large map is not in the cache: what the next entry of the queue asks for is fetched while this one is copied.
    """
    if ns.kind == KIND_MEMORY:
        return ns.host + (lba << ns.shift)
    if ns.kind == KIND_VOLUME:
        if local.sq_host:  # 0 while a new worker executes the last one's commands, and when DMA maps have changed
            soc.look_ahead(ns, load_u64(local.sq_host + 64 * local.sq_head + 40))  # CDW10 and 11
        return soc.find(ns, lba << ns.shift, size, write)
    return 0


@compiled
def find_mark(ns: Any, lba: int, blocks: int) -> int:
    """The first block of a range that Write Uncorrectable has marked; -1 when there is none.

    ``ns.marks`` is not 0. Pages of marks that were never written are not touched: that would take memory for them.
    """
    end = lba + blocks
    while lba < end:
        first, last = lba >> MARK_PAGE_BITS, (end - 1) >> MARK_PAGE_BITS
        page = find(ns.mark_pages + first, 1, last - first + 1)
        if page == 0:
            return -1
        page -= ns.mark_pages
        lba = max(lba, page << MARK_PAGE_BITS)
        stop = min(end, (page + 1) << MARK_PAGE_BITS)
        at = find(ns.marks + lba, 1, stop - lba)
        if at:
            return at - ns.marks
        lba = stop
    return -1


@compiled
def unmark(ns: Any, lba: int, blocks: int) -> None:
    """The blocks were written: they can be read again."""
    end = lba + blocks
    lba = find_mark(ns, lba, blocks)
    while lba >= 0:
        stop = min(end, ((lba >> MARK_PAGE_BITS) + 1) << MARK_PAGE_BITS)
        fill(ns.marks + lba, 0, stop - lba)
        lba = find_mark(ns, stop, end - stop)


# -------------------------------------------------------------------------------------------------- completion


@inlined
def count_io(entry: Any, sq: Any, status: int, op: int, space: int, spent: int) -> None:
    """Count a command on the namespace whose counters are at ``space``."""
    if status or (op != _READ and op != _WRITE and op != _DSM and op != _COPY):
        row = view(space, 1, SPACE)[0]
        if status == 0:
            row.others += 1
            return
        row.errors += 1
        if status & 0x7FF == _MISCOMPARE:
            row.miscompares += 1
        elif status >> 8 & 7 == 2:  # Media and Data Integrity Errors
            row.media_errors += 1
        return
    kind = TALLY_READ
    if op == _READ:
        sq.bytes_read += entry.bytes
    elif op == _WRITE:
        kind = TALLY_WRITE
        sq.bytes_written += entry.bytes
    else:
        kind = TALLY_UNMAP if op == _DSM else TALLY_COPY
    tally = view(space + TALLY_BYTES * kind, 1, TALLY)[0]
    tally.count += 1
    tally.bytes += entry.bytes
    tally.ticks += spent
    if spent > tally.ticks_max:
        tally.ticks_max = spent
    if spent < tally.ticks_min or tally.ticks_min == 0:
        tally.ticks_min = spent


@inlined
def count_command(p: Any, c: Any, entry: Any, sq: Any, status: int) -> None:
    """Counters, stamps and histogram of a command that ends."""
    sqid = entry.sqid
    op = signed(entry.sqe.opcode)
    spent = 0
    if p.stamps:
        now = ticks()
        sq.ticks_wait += entry.begun - entry.seen
        sq.ticks_serve += now - entry.begun
        spent = min(max(now - entry.seen, 0), 1 << 40)  # counters of two CPUs may differ
    sq.commands += 1
    if status:
        sq.errors += 1
    if sqid:
        nsid = signed(entry.sqe.nsid)
        if 0 < nsid <= NAMESPACES:
            count_io(entry, sq, status, op, c.state + SPACE_OFFSET + SPACE_BYTES * (nsid - 1), spent)
    if p.stamps:
        ns = spent * p.ns_mult >> 20
        bucket = ns
        if ns >= 1 << HISTOGRAM_STEP_BITS:
            exponent = bit_length(ns) - 1 - HISTOGRAM_STEP_BITS
            bucket = (exponent << HISTOGRAM_STEP_BITS) + (ns >> exponent)
        at = c.state + HISTOGRAM_OFFSET + 8 * (HISTOGRAM_BUCKETS * sqid + min(bucket, HISTOGRAM_BUCKETS - 1))
        store_u64(at, load_u64(at) + 1)


@compiled
def report_error(p: Any, c: Any, entry: Any, status: int) -> int:
    """Give control what the error log page wants to know; the status, with MORE when it could be told."""
    tail = load_u64(p.errors + RING_TAIL)
    if tail - load_u64(p.errors + RING_HEAD) >= ERROR_ENTRIES:
        return status  # control is that far behind
    status |= _MORE
    record = view(p.errors + RING_DATA, ERROR_ENTRIES, ERROR_RECORD)[tail % ERROR_ENTRIES]
    record.controller = c.index
    record.sqid = entry.sqid
    record.cid = signed(entry.sqe.cid)
    record.status = status
    record.nsid = signed(entry.sqe.nsid)
    record.lba = signed(entry.sqe.cdw10) | (signed(entry.sqe.cdw11) & 0x7FFFFFFF) << 32
    if status & 0x7FF == _READ_ERROR and 0 < record.nsid <= NAMESPACES:
        ns = view(c.namespaces, NAMESPACES, NAMESPACE)[record.nsid - 1]
        if ns.marks and signed(entry.sqe.opcode) != _COPY:
            bad = find_mark(ns, record.lba, (signed(entry.sqe.cdw12) & CDW12_NLB) + 1)
            record.lba = bad if bad >= 0 else record.lba
    store_u64(p.errors + RING_TAIL, tail + 1)
    p.kick = 1
    return status


@inlined
def write_completion(p: Any, c: Any, slot: int, entry: Any, cq: Any, local: Any) -> None:
    """From POSTING on: CQE, queue, free entry. Run again after a crash with the same words it is harmless."""
    at = local.cq_host + 16 * local.cq_tail
    store_u64(at, entry.cqe_low)
    kill_at(p, _CQE_HALF)
    store_u64(at + 8, entry.cqe_high)
    kill_at(p, _CQE_WRITTEN)
    address = c.state + CQ_OFFSET + CQ_BYTES * entry_cqid(c, entry)
    store_u64(address + CQ_POSTED, cq.posted + 1)
    local.cq_tail += 1
    if local.cq_tail == cq.entries:
        local.cq_tail = 0
        local.cq_phase ^= 1
    release(c, slot, entry)
    if local.dirty == 0:
        local.dirty = 1
        store_u64(p.dirty + 8 * p.dirty_count, c.index << 32 | entry_cqid(c, entry))
        p.dirty_count += 1


@inlined
def entry_cqid(c: Any, entry: Any) -> int:
    """The CQ of an in-flight entry."""
    return signed(view(c.state + SQ_OFFSET, QUEUES, SQ)[entry.sqid].cqid)


@inlined
def release(c: Any, slot: int, entry: Any) -> None:
    """Free an in-flight entry."""
    store_u64(c.state + INFLIGHT_OFFSET + INFLIGHT_BYTES * slot + INFLIGHT_STATE, FREE)
    view(c.queues, QUEUES, QUEUE_LOCAL)[entry.sqid].sq_outstanding -= 1
    store_u64(c.free + 8 * c.free_count, slot)
    c.free_count += 1


@inlined
def post(p: Any, c: Any, slot: int, entry: Any, status: int) -> None:
    """Complete a command: its CQE (Base 4.6), phase last. Its CQ has room: the fetch has seen to that."""
    sq = view(c.state + SQ_OFFSET, QUEUES, SQ)[entry.sqid]
    cq = view(c.state + CQ_OFFSET, QUEUES, CQ)[sq.cqid]
    locals_ = view(c.queues, QUEUES, QUEUE_LOCAL)
    local = locals_[sq.cqid]
    if status and entry.sqid:
        status = report_error(p, c, entry, status)
    if p.counters:
        count_command(p, c, entry, sq, status)
    if TRACEABLE and c.tracing:
        trace_command(p, c, slot, entry, status)
    entry.status = status
    entry.cq_count = cq.posted
    entry.cqe_low = entry.dw0
    high = locals_[entry.sqid].sq_head | entry.sqid << 16 | signed(entry.sqe.cid) << 32
    entry.cqe_high = signed(high | (status << 1 | local.cq_phase) << 48)
    store_u64(c.state + INFLIGHT_OFFSET + INFLIGHT_BYTES * slot + INFLIGHT_STATE, POSTING)
    kill_at(p, _EXECUTED)
    if entry.where != WHERE_PARKED:
        local.cq_outstanding -= 1
    write_completion(p, c, slot, entry, cq, local)


# -------------------------------------------------------------------------------------------------- I/O commands


@compiled
def uring_prepare(u: Any, opcode: int, fd: int, offset: int, address: int, size: int, flags: int, tag: int) -> Any:
    """Fill the next io_uring entry; submitted at the end of the pass. The fetch has seen that there is room."""
    tail = load_u32(u.sq_tail)
    index = tail & u.sq_mask
    e = view(u.sqes, u.sq_mask + 1, URING_SQE)[index]
    e.opcode = opcode
    e.sqe_flags = 0
    e.ioprio = 0
    e.fd = fd
    e.off = offset
    e.addr = address
    e.len = size
    e.rw_flags = flags
    e.user_data = tag
    e.buf_index = 0
    e.personality = 0
    e.splice_fd = 0
    store_u32(u.sq_array + 4 * index, index)
    store_u32(u.sq_tail, (tail + 1) & 0xFFFFFFFF)
    u.pending += 1
    u.inflight += 1
    return e


@compiled
def hand_over(c: Any, slot: int, why: int) -> None:
    """Note in the trace that a command leaves the asic."""
    extra = view(c.tracing, SLOTS, TRACE_SLOT)[slot]
    extra.handed = ticks()
    extra.why = why


@compiled
def trace_command(p: Any, c: Any, slot: int, entry: Any, status: int) -> None:
    """Add a command that ends to the poller's trace; the oldest one goes."""
    count = load_u64(p.trace_ring)
    r = view(p.trace_ring + TRACE_HEADER + TRACE_BYTES * (count & p.trace_mask), 1, TRACE)[0]
    extra = view(c.tracing, SLOTS, TRACE_SLOT)[slot]
    r.seen = entry.seen
    r.begun = entry.begun
    r.handed = extra.handed
    r.taken = extra.taken
    r.answered = extra.answered
    r.done = ticks()
    r.client = c.client
    r.sqid = entry.sqid
    r.cid = signed(entry.sqe.cid)
    r.opcode = signed(entry.sqe.opcode)
    r.nsid = signed(entry.sqe.nsid)
    r.lba = signed(entry.sqe.cdw10) | signed(entry.sqe.cdw11) << 32
    r.bytes = entry.bytes
    r.status = status
    r.where = entry.where
    r.why = extra.why
    extra.handed = 0
    extra.taken = 0
    extra.answered = 0
    extra.why = 0
    store_u64(p.trace_ring, count + 1)


@compiled
def to_uring(p: Any, c: Any, slot: int, entry: Any, operations: int) -> int:
    """Account for a command that has gone to io_uring."""
    if TRACEABLE and c.tracing:
        hand_over(c, slot, WHY_FILE)
    entry.where = WHERE_URING
    entry.pending = operations
    c.outstanding += 1
    return _PENDING


@compiled
def to_control(p: Any, c: Any, slot: int, entry: Any, why: int) -> int:
    """Hand a command to control over the miss ring, which has room for all slots of all controllers."""
    if TRACEABLE and c.tracing:
        hand_over(c, slot, why)
    block_of(c, slot).why = why
    if entry.where != WHERE_PARKED:
        entry.where = WHERE_CONTROL
    if not ring_push(p.misses, c.index << 32 | slot):
        return _INTERNAL
    p.kick = 1
    if p.counters:
        view(c.state + SQ_OFFSET, QUEUES, SQ)[entry.sqid].punts += 1
    return _PENDING


@inlined
def transfer(p: Any, c: Any, slot: int, entry: Any, ns: Any, lba: int, blocks: int) -> int:
    """Read, Write or Compare ``blocks`` logical blocks at ``lba``, already checked against the namespace."""
    sqe = entry.sqe
    op = signed(sqe.opcode)
    length = blocks << ns.shift
    if length > TRANSFER_MAX:
        return _INVALID_FIELD
    entry.bytes = length
    local = view(c.queues, QUEUES, QUEUE_LOCAL)[entry.sqid]
    out = c.segments + slot * SEGMENT_LIST_BYTES
    count = walk_prps(c, local, sqe, length, DMA_WRITE if op == _READ else DMA_READ, out)
    if count < 0:
        return -count
    segments = view(out, SEGMENTS, SEGMENT)
    host = map_lookup(ns, local, lba, length, op == _WRITE)
    if host:
        for i in range(count):
            size = segments[i].length
            if op == _READ:
                copy(segments[i].host, host, size)
            elif op == _WRITE:
                copy(host, segments[i].host, size)
                kill_at(p, _SEGMENT_WRITTEN)
            elif differ(host, segments[i].host, size):
                return _COMPARE_FAILURE
            host += size
        return _OK
    if ns.kind == KIND_VOLUME:
        return transfer_volume(p, c, slot, entry, ns, lba << ns.shift, length, count)
    if ns.kind != KIND_FILE:
        return _OK  # null: nothing is stored and nothing is touched
    if op == _COMPARE:
        return to_control(p, c, slot, entry, WHY_BUFFER)
    fd = ns.direct_fd
    odd = lba << ns.shift
    for i in range(count):
        odd |= segments[i].host | segments[i].length
    if fd < 0 or odd & ns.align:
        fd = ns.fd
    flags = _DSYNC if op == _WRITE and (signed(sqe.cdw12) & CDW12_FUA or c.write_through) else 0
    u = view(p.uring, 1, URING)[0]
    tag = c.index << 32 | slot
    uring_prepare(u, _OP_READV if op == _READ else _OP_WRITEV, fd, lba << ns.shift, out, count, flags, tag)
    return to_uring(p, c, slot, entry, 1)


@compiled
def clear(p: Any, c: Any, slot: int, entry: Any, ns: Any, offset: int, size: int) -> int:
    """Make ``size`` bytes read as zeroes; operations given to io_uring."""
    if ns.kind == KIND_MEMORY:
        if size < _PUNCH_MIN or punch(ns.fd, offset, size) < 0:
            fill(ns.host + offset, 0, size)
        return 0
    if ns.kind == KIND_FILE:
        u = view(p.uring, 1, URING)[0]
        uring_prepare(u, _OP_FALLOCATE, ns.fd, offset, size, _PUNCH_HOLE, 0, c.index << 32 | slot)
        return 1
    return 0


@compiled
def write_zeroes(p: Any, c: Any, slot: int, entry: Any, ns: Any, lba: int, blocks: int) -> int:
    """Write Zeroes (NVM 3.2.8); not bounded by MDTS."""
    if ns.kind == KIND_VOLUME:
        return erase_part(p, c, slot, entry, ns, lba << ns.shift, blocks << ns.shift)
    operations = clear(p, c, slot, entry, ns, lba << ns.shift, blocks << ns.shift)
    if operations == 0:
        return _OK
    if signed(entry.sqe.cdw12) & CDW12_FUA or c.write_through:
        u = view(p.uring, 1, URING)[0]
        index = (load_u32(u.sq_tail) - 1) & u.sq_mask
        view(u.sqes, u.sq_mask + 1, URING_SQE)[index].sqe_flags = _LINK
        uring_prepare(u, _OP_FSYNC, ns.fd, 0, 0, 0, _DATASYNC, c.index << 32 | slot)
        operations += 1
    return to_uring(p, c, slot, entry, operations)


@compiled
def flush(p: Any, c: Any, slot: int, entry: Any, nsid: int) -> int:
    """Flush (Base 7.1) of one namespace, or of all with FFFFFFFFh."""
    namespaces = view(c.namespaces, NAMESPACES, NAMESPACE)
    first, last = (0, NAMESPACES) if nsid == _BROADCAST else (nsid - 1, nsid)
    for i in range(first, last):
        if namespaces[i].kind == KIND_VOLUME:
            g = view(namespaces[i].group, 1, GROUP_LOCAL)[0]
            if g.durable and (nsid == _BROADCAST or uncommitted(namespaces[i])):
                return to_control(p, c, slot, entry, WHY_COMMIT)
    u = view(p.uring, 1, URING)[0]
    operations = 0
    for i in range(first, last):
        if namespaces[i].kind == KIND_VOLUME:
            g = view(namespaces[i].group, 1, GROUP_LOCAL)[0]
            backings = view(g.backings, BACKINGS, BACKING)
            for k in range(g.backing_count):
                if backings[k].kind == KIND_FILE:
                    uring_prepare(u, _OP_FSYNC, backings[k].fd, 0, 0, 0, _DATASYNC, c.index << 32 | slot)
                    operations += 1
        if namespaces[i].kind == KIND_FILE:
            if u.fd < 0:
                return to_control(p, c, slot, entry, WHY_NO_URING)
            fd = namespaces[i].fd
            uring_prepare(u, _OP_FSYNC, fd, 0, 0, 0, _DATASYNC, c.index << 32 | slot)
            operations += 1
    return to_uring(p, c, slot, entry, operations) if operations else _OK


@inlined
def known(op: int) -> bool:
    """Whether an opcode has a row in dpu.nvme.commands.IO_EFFECTS."""
    return (
        op <= _READ or op == _UNCORRECTABLE or op == _COMPARE or _ZEROES <= op <= _DSM or op == _VERIFY or op == _COPY
    )


@inlined
def in_range(ns: Any, lba: int, blocks: int) -> bool:
    """Whether the blocks are inside the namespace; a negative LBA is one of 2^63 or more."""
    return 0 <= lba <= ns.blocks and blocks <= ns.blocks - lba


@compiled
def take_ranges(p: Any, c: Any, slot: int, entry: Any, size: int) -> int:
    """Copy a command's list of ranges to the scratch area: the guest may change it under us. Its status."""
    local = view(c.queues, QUEUES, QUEUE_LOCAL)[entry.sqid]
    out = c.segments + slot * SEGMENT_LIST_BYTES
    found = walk_prps(c, local, entry.sqe, size, DMA_READ, out)
    if found < 0:
        return -found
    segments = view(out, SEGMENTS, SEGMENT)
    at = p.scratch
    for i in range(found):
        copy(at, segments[i].host, segments[i].length)
        at += segments[i].length
    return _OK


@compiled
def deallocate(p: Any, c: Any, slot: int, entry: Any, ns: Any) -> int:
    """Dataset Management (NVM 3.2.3): the Deallocate attribute; other attributes are hints."""
    sqe = entry.sqe
    count = (signed(sqe.cdw10) & 0xFF) + 1  # 0's based
    status = take_ranges(p, c, slot, entry, count * 16)
    if status != _OK:
        return status
    ranges = view(p.scratch, count, RANGE)
    total = 0
    for i in range(count):
        if not in_range(ns, ranges[i].slba, signed(ranges[i].nlb)):
            return _LBA_RANGE
        total += signed(ranges[i].nlb)
    if not signed(sqe.cdw11) & CDW11_DSM_AD:
        return _OK
    if ns.readonly:
        return _WRITE_PROTECTED
    if not ns.discard:
        return _OK
    entry.bytes = total << ns.shift
    # A range keeps its marks when the file system fails it. And 256 ranges can be all blocks, 256 times over.
    if ns.marks:
        return to_control(p, c, slot, entry, WHY_MARKS)
    if ns.kind == KIND_VOLUME:
        b = block_of(c, slot)
        resume(b, entry)
        while b.part < count and signed(ranges[b.part].nlb) == 0:
            b.part += 1
        if b.part == count:
            return _OK
        part = ranges[b.part]
        return erase_part(p, c, slot, entry, ns, part.slba << ns.shift, signed(part.nlb) << ns.shift)
    operations = 0
    for i in range(count):
        size = signed(ranges[i].nlb) << ns.shift
        if size:
            operations += clear(p, c, slot, entry, ns, ranges[i].slba << ns.shift, size)
    return to_uring(p, c, slot, entry, operations) if operations else _OK


@compiled
def copy_blocks(p: Any, c: Any, slot: int, entry: Any, ns: Any, threads: int) -> int:
    """Copy (NVM 3.2.2) within a namespace, Descriptor Format 0h.

    Ranges are copied one after the other. Where a host lets source and destination overlap, which it should not, the
    result after a worker's death is that of copying more than once.
    """
    sqe = entry.sqe
    count = (signed(sqe.cdw12) & CDW12_COPY_NR) + 1  # 0's based
    if signed(sqe.cdw12) & CDW12_COPY_FORMAT:
        return _INVALID_FIELD
    if count > COPY_RANGES_MAX:
        return _SIZE_LIMIT
    if threads:  # control checks the ranges, too
        return to_control(p, c, slot, entry, threads)
    status = take_ranges(p, c, slot, entry, count * 32)
    if status != _OK:
        return status
    ranges = view(p.scratch, count, COPY_RANGE)
    total = 0
    for i in range(count):
        blocks = signed(ranges[i].nlb) + 1  # 0's based
        total += blocks
        if blocks << ns.shift > TRANSFER_MAX or total << ns.shift > COPY_MAX:
            return _SIZE_LIMIT
    target = signed(sqe.cdw10) | signed(sqe.cdw11) << 32
    if not in_range(ns, target, total):
        return _LBA_RANGE
    for i in range(count):
        if not in_range(ns, ranges[i].slba, signed(ranges[i].nlb) + 1):
            return _LBA_RANGE
    if ns.readonly:
        return _WRITE_PROTECTED
    if ns.marks:
        for i in range(count):
            if find_mark(ns, ranges[i].slba, signed(ranges[i].nlb) + 1) >= 0:
                return _READ_ERROR
    entry.bytes = total << ns.shift
    if in_files(ns):
        return to_control(p, c, slot, entry, WHY_BUFFER)
    if ns.kind == KIND_MEMORY:
        host = ns.host + (target << ns.shift)
        for i in range(count):
            size = signed(ranges[i].nlb) + 1 << ns.shift
            move(host, ns.host + (ranges[i].slba << ns.shift), size)
            host += size
    if ns.kind == KIND_VOLUME:
        b = block_of(c, slot)
        resume(b, entry)
        if b.part < count:
            address(b, ns, BLOCK_COPY, ranges[b.part].slba << ns.shift, signed(ranges[b.part].nlb) + 1 << ns.shift)
            b.target = target << ns.shift
            for i in range(b.part):
                b.target += signed(ranges[i].nlb) + 1 << ns.shift
            return to_soc(p, c, slot, entry)
    if ns.marks:
        unmark(ns, target, total)
    return _OK


@compiled
def verify(p: Any, c: Any, slot: int, entry: Any, ns: Any) -> int:
    """Verify (NVM 3.2.5) of blocks that are not marked: memory holds what was put there, control reads a file."""
    if signed(entry.sqe.cdw12) & CDW12_PRACT:
        return _INVALID_FIELD
    return to_control(p, c, slot, entry, WHY_BUFFER) if in_files(ns) else _OK


# ------------------------------------------------------------------------------------------------------ volumes


@inlined
def block_of(c: Any, slot: int) -> Any:
    """The block request of a slot."""
    return view(c.blocks + BLOCK_BYTES * slot, 1, BLOCK)[0]


@compiled
def in_files(ns: Any) -> bool:
    """Whether some of a namespace is in files."""
    return ns.kind == KIND_FILE or (ns.kind == KIND_VOLUME and view(ns.group, 1, GROUP_LOCAL)[0].durable != 0)


@compiled
def uncommitted(ns: Any) -> bool:
    """Whether a volume's map has changes that are not durable."""
    return load_u64(ns.volume + VOLUME_CHANGES) != load_u64(ns.volume + VOLUME_COMMITTED)


@compiled
def resume(b: Any, entry: Any) -> None:
    """A command of many parts begins, or goes on where it was."""
    if b.sequence != entry.sequence:
        b.sequence = entry.sequence
        b.part = 0
        b.at = 0


@compiled
def address(b: Any, ns: Any, action: int, offset: int, length: int) -> None:
    """Fill in a block request."""
    b.action = action
    b.group = ns.group
    b.volume = ns.volume
    b.offset = offset
    b.length = length


@compiled
def to_soc(p: Any, c: Any, slot: int, entry: Any) -> int:
    """Put a command into the virtual queue to the soc; if that is full it begins again in the next pass."""
    if TRACEABLE and c.tracing:
        hand_over(c, slot, WHY_SOC)
    if not ring_push(p.to_soc, c.index << 32 | slot):
        append_todo(c, slot)
    return _PENDING


@compiled
def transfer_volume(p: Any, c: Any, slot: int, entry: Any, ns: Any, offset: int, length: int, segments: int) -> int:
    """Read, Write or Compare blocks that are not all in one cluster in memory, or that the soc has to see."""
    b = block_of(c, slot)
    write = signed(entry.sqe.opcode) == _WRITE
    address(b, ns, BLOCK_WRITE if write else BLOCK_READ, offset, length)
    b.segments = segments
    if view(ns.group, 1, GROUP_LOCAL)[0].offload:
        b.own = OWN_ALREADY if write else OWN_NOT
        b.count = soc.locate(p, b, offset, c.blocks + BLOCK_BYTES * slot + BLOCK_EXTENTS)
        if b.count > 0:
            return ended(p, c, slot, entry, ns, b, move_extents(p, c, slot, entry, b))
    return to_soc(p, c, slot, entry)


@compiled
def erase_part(p: Any, c: Any, slot: int, entry: Any, ns: Any, offset: int, length: int) -> int:
    """The next part of a Deallocate or Write Zeroes, of ``length`` bytes at ``offset``."""
    b = block_of(c, slot)
    op = signed(entry.sqe.opcode)
    if op == _ZEROES:
        resume(b, entry)
        if b.part:
            return _OK
    address(b, ns, BLOCK_ERASE, offset + b.at, length - b.at)
    b.free = 1 if op == _DSM else 0
    return to_soc(p, c, slot, entry)


@compiled
def volume_to_uring(p: Any, c: Any, slot: int, entry: Any, b: Any, operations: int) -> int:
    """Account for requests on a volume: control waits for those that began before it took a cluster away."""
    if operations == 0:
        return _OK
    b.parity = p.parity & 1
    if b.parity:
        p.begun_odd += 1
    else:
        p.begun_even += 1
    return to_uring(p, c, slot, entry, operations)


@compiled
def move_extents(p: Any, c: Any, slot: int, entry: Any, b: Any) -> int:
    """Move a command's data between the guest and the extents of its block request."""
    op = signed(entry.sqe.opcode)
    at = c.blocks + BLOCK_BYTES * slot
    extents = view(at + BLOCK_EXTENTS, EXTENTS, EXTENT)
    iovecs = view(at + BLOCK_IOVECS, SEGMENTS + EXTENTS, SEGMENT)
    segments = view(c.segments + slot * SEGMENT_LIST_BYTES, SEGMENTS, SEGMENT)
    g = view(b.group, 1, GROUP_LOCAL)[0]
    u = view(p.uring, 1, URING)[0]
    b.left = 0
    if op == _COMPARE:
        for i in range(b.count):
            if extents[i].host == 0:
                return to_control(p, c, slot, entry, WHY_BUFFER)
    flags = _DSYNC if op == _WRITE and (signed(entry.sqe.cdw12) & CDW12_FUA or c.write_through) else 0
    segment, within, used, operations = 0, 0, 0, 0
    for i in range(b.count):
        host, left, odd, first = extents[i].host, extents[i].length, extents[i].offset, used
        while left > 0:
            guest = segments[segment].host + within
            size = min(left, segments[segment].length - within)
            if extents[i].host == 0:
                iovecs[used].host = guest
                iovecs[used].length = size
                odd |= guest | size
                used += 1
            elif op == _READ:
                copy(guest, host, size)
            elif op == _WRITE:
                copy(host, guest, size)
                kill_at(p, _SEGMENT_WRITTEN)
            elif differ(host, guest, size):
                return _COMPARE_FAILURE
            host += size
            left -= size
            within += size
            if within == segments[segment].length:
                segment += 1
                within = 0
        if extents[i].host == 0:
            backing = view(g.backings, BACKINGS, BACKING)[extents[i].backing]
            fd = backing.fd if backing.direct_fd < 0 or odd & backing.align else backing.direct_fd
            list_at = at + BLOCK_IOVECS + SEGMENT_BYTES * first
            opcode = _OP_READV if op == _READ else _OP_WRITEV
            tag = c.index << 32 | _VOLUME | slot
            uring_prepare(u, opcode, fd, extents[i].offset, list_at, used - first, flags, tag)
            b.left += extents[i].length
            operations += 1
    return volume_to_uring(p, c, slot, entry, b, operations)


@compiled
def clear_extents(p: Any, c: Any, slot: int, entry: Any, b: Any) -> int:
    """Make the extents of a block request read as zeroes."""
    extents = view(c.blocks + BLOCK_BYTES * slot + BLOCK_EXTENTS, EXTENTS, EXTENT)
    backings = view(view(b.group, 1, GROUP_LOCAL)[0].backings, BACKINGS, BACKING)
    u = view(p.uring, 1, URING)[0]
    b.left = 0
    operations = 0
    for i in range(b.count):
        e = extents[i]
        fd = backings[e.backing].fd
        if e.host == 0:
            tag = c.index << 32 | _VOLUME | slot
            uring_prepare(u, _OP_FALLOCATE, fd, e.offset, e.length, _PUNCH_HOLE, 0, tag)
            operations += 1
        elif e.length < _PUNCH_MIN or punch(fd, e.offset, e.length) < 0:
            fill(e.host, 0, e.length)
    return volume_to_uring(p, c, slot, entry, b, operations)


@compiled
def copy_extents(c: Any, slot: int, b: Any) -> int:
    """Copy between the two lists of a block request, all of it in memory."""
    at = c.blocks + BLOCK_BYTES * slot
    sources = view(at + BLOCK_EXTENTS, EXTENTS, EXTENT)
    targets = view(at + BLOCK_TARGETS, EXTENTS, EXTENT)
    i, k, done, filled = 0, 0, 0, 0
    while i < b.count:
        size = min(sources[i].length - done, targets[k].length - filled)
        move(targets[k].host + filled, sources[i].host + done, size)
        done += size
        filled += size
        if done == sources[i].length:
            i += 1
            done = 0
        if filled == targets[k].length:
            k += 1
            filled = 0
    b.done = b.length
    return _OK


@compiled
def ended(p: Any, c: Any, slot: int, entry: Any, ns: Any, b: Any, status: int) -> int:
    """The data of a block request have been moved, unless ``status`` says else: go on; a status, or _PENDING."""
    op = signed(entry.sqe.opcode)
    if status == _OK and b.action >= BLOCK_ERASE:
        if b.done < b.length:  # it was enough for one pass
            b.at += b.done
            append_todo(c, slot)
            return _PENDING
        b.part += 1
        b.at = 0
        if op == _DSM:
            status = deallocate(p, c, slot, entry, ns)
        elif op == _COPY:
            status = copy_blocks(p, c, slot, entry, ns, 0)
    if status != _OK:
        return status
    if op == _WRITE or op == _ZEROES:
        if ns.marks:
            lba = signed(entry.sqe.cdw10) | signed(entry.sqe.cdw11) << 32
            unmark(ns, lba, (signed(entry.sqe.cdw12) & CDW12_NLB) + 1)
        durable = signed(entry.sqe.cdw12) & CDW12_FUA or c.write_through
        if durable and in_files(ns) and (op == _ZEROES or uncommitted(ns)):
            return to_control(p, c, slot, entry, WHY_COMMIT)
    return _OK


@compiled
def complete(p: Any, c: Any, slot: int, entry: Any, status: int) -> None:
    """Post a command unless it is pending."""
    if status != _PENDING:
        post(p, c, slot, entry, status)


@compiled
def answered(p: Any, c: Any, slot: int) -> None:
    """The soc has answered a block request."""
    entry = view(c.state + INFLIGHT_OFFSET, SLOTS, INFLIGHT)[slot]
    ns = view(c.namespaces, NAMESPACES, NAMESPACE)[signed(entry.sqe.nsid) - 1]
    b = block_of(c, slot)
    u = view(p.uring, 1, URING)[0]
    if b.count < 0:
        status = _LBA_RANGE if b.count == -soc.OUTSIDE else to_control(p, c, slot, entry, -b.count)
    elif u.inflight + URING_RESERVE > u.limit:
        append_todo(c, slot)
        return
    elif b.action == BLOCK_ERASE:
        status = clear_extents(p, c, slot, entry, b)
    elif b.action == BLOCK_COPY:
        status = copy_extents(c, slot, b)
    else:
        status = move_extents(p, c, slot, entry, b)
    complete(p, c, slot, entry, ended(p, c, slot, entry, ns, b, status))


@compiled
def serve_soc(p: Any) -> int:
    """Let the soc do what this pass has asked of it, and what that leads to."""
    controllers = view(p.controllers, CONTROLLERS, CONTROLLER)
    count = 0
    while soc.serve(p):
        while True:
            value = ring_peek(p.from_soc)
            if value < 0:
                break
            ring_drop(p.from_soc)
            c = controllers[value >> 32]
            store_u64(p.serving, c.client)
            answered(p, c, value & 0xFFFFFFFF)
            count += 1
    return count


@compiled
def reap_volume(p: Any, c: Any, slot: int, result: int) -> None:
    """Take in an io_uring result of a command on a volume."""
    entry = view(c.state + INFLIGHT_OFFSET, SLOTS, INFLIGHT)[slot]
    ns = view(c.namespaces, NAMESPACES, NAMESPACE)[signed(entry.sqe.nsid) - 1]
    b = block_of(c, slot)
    if result >= 0:
        b.left -= result
    elif entry.status == 0:
        entry.status = uring_status(entry, result)
    entry.pending -= 1
    if entry.pending:
        return
    c.outstanding -= 1
    if b.parity:
        p.begun_odd -= 1
    else:
        p.begun_even -= 1
    status = entry.status
    entry.status = 0
    if status == _OK and b.left:
        status = _READ_ERROR if signed(entry.sqe.opcode) == _READ else _CAPACITY
    if status == _BY_CONTROL:
        status = to_control(p, c, slot, entry, WHY_REFUSED)
    complete(p, c, slot, entry, ended(p, c, slot, entry, ns, b, status))


# -------------------------------------------------------------------------------------------------- any command


@inlined
def execute(p: Any, c: Any, slot: int, entry: Any) -> int:
    """Do a command; its status, or _PENDING."""
    if entry.sqid == 0:
        return to_control(p, c, slot, entry, WHY_ADMIN)
    sqe = entry.sqe
    if signed(sqe.cdw0_flags):  # fused operations and SGLs are not offered (Identify FUSES, SGLS)
        return _INVALID_FIELD
    op = signed(sqe.opcode)
    nsid = signed(sqe.nsid)
    if op == _FLUSH and nsid == _BROADCAST:
        return flush(p, c, slot, entry, nsid)
    if not known(op):
        return _INVALID_OPCODE
    if nsid < 1 or nsid > c.namespaces_max:
        return _INVALID_NAMESPACE
    ns = view(c.namespaces, NAMESPACES, NAMESPACE)[nsid - 1]
    if ns.kind == KIND_ABSENT:
        return _INVALID_FIELD  # an inactive NSID (Base figure 87)
    threads = ns.threads
    if c.flows and entry.verdict & VERDICT_CONTROL:
        threads = WHY_FAULT
    if op == _FLUSH:
        return to_control(p, c, slot, entry, threads) if threads else flush(p, c, slot, entry, nsid)
    if op == _DSM:
        return to_control(p, c, slot, entry, threads) if threads else deallocate(p, c, slot, entry, ns)
    if op == _COPY:
        return copy_blocks(p, c, slot, entry, ns, threads)
    lba = signed(sqe.cdw10) | signed(sqe.cdw11) << 32
    blocks = (signed(sqe.cdw12) & CDW12_NLB) + 1  # 0's based
    if not in_range(ns, lba, blocks):
        return _LBA_RANGE
    if ns.readonly and (op == _WRITE or op == _ZEROES or op == _UNCORRECTABLE):
        return _WRITE_PROTECTED
    if op == _UNCORRECTABLE:  # control alone makes marks
        return to_control(p, c, slot, entry, WHY_MARKS)
    if ns.marks and (op == _READ or op == _COMPARE or op == _VERIFY) and find_mark(ns, lba, blocks) >= 0:
        return _READ_ERROR
    if op == _VERIFY:
        return verify(p, c, slot, entry, ns)
    if threads:
        if blocks << ns.shift > TRANSFER_MAX and op != _ZEROES:
            return _INVALID_FIELD
        entry.bytes = blocks << ns.shift
        return to_control(p, c, slot, entry, threads)
    if op == _ZEROES:
        status = write_zeroes(p, c, slot, entry, ns, lba, blocks)
    else:
        status = transfer(p, c, slot, entry, ns, lba, blocks)
    if ns.marks and status == _OK and (op == _WRITE or op == _ZEROES):
        unmark(ns, lba, blocks)
    return status


@inlined
def begin(p: Any, c: Any, slot: int, entry: Any) -> None:
    """Execute a fetched command, if it may pass, and post what is done."""
    if p.stamps:
        entry.begun = ticks()
    status = gate(p, c, slot, entry) if c.flows else OPEN
    if status == OPEN:
        status = execute(p, c, slot, entry)
    if status != _PENDING:
        post(p, c, slot, entry, status)


# ------------------------------------------------------------------------------------------------------- queues


@compiled
def bad_doorbell(p: Any, c: Any, kind: int, value: int) -> None:
    """Report an invalid doorbell write to control, one at a time."""
    if c.bad_doorbell == 0:
        c.bad_doorbell = kind << 32 | value
        p.kick = 1


@compiled
def serve_queue(p: Any, c: Any, sqid: int) -> int:
    """Fetch and begin up to BATCH commands of one SQ; how many."""
    sqs = view(c.state + SQ_OFFSET, QUEUES, SQ)
    sq = sqs[sqid]
    locals_ = view(c.queues, QUEUES, QUEUE_LOCAL)
    local = locals_[sqid]
    shadowed = c.shadow != 0 and sqid != 0
    doorbells = c.shadow if shadowed else c.seen
    tail = load_u32(doorbells + 8 * sqid)
    head = local.sq_head
    if tail == head:
        return 0
    if tail >= sq.entries:
        if (shadowed or c.mapped) and local.bad_tail != tail:
            local.bad_tail = tail
            bad_doorbell(p, c, BAD_DOORBELL_VALUE, 2 * sqid)
        return 0
    cqid = sq.cqid
    if not resolve_sq(c, sqid) or not resolve_cq(c, cqid):
        return 0
    cq = view(c.state + CQ_OFFSET, QUEUES, CQ)[cqid]
    completions = locals_[cqid]
    consumed = load_u32((c.shadow if c.shadow != 0 and cqid != 0 else c.seen) + 8 * cqid + 4)
    if consumed >= cq.entries:
        if (shadowed or c.mapped) and completions.bad_head != consumed:
            completions.bad_head = consumed
            bad_doorbell(p, c, BAD_DOORBELL_VALUE, 2 * cqid + 1)
        return 0
    unread = completions.cq_tail - consumed
    if unread < 0:
        unread += cq.entries
    u = view(p.uring, 1, URING)[0]
    seen = ticks() if p.stamps else 0
    inflight = c.state + INFLIGHT_OFFSET
    table = view(inflight, SLOTS, INFLIGHT)
    state = c.state + SQ_OFFSET + SQ_BYTES * sqid
    fetched = 0
    while head != tail and fetched < BATCH:
        if c.free_count == 0 or u.inflight + URING_RESERVE > u.limit:
            break
        if unread + completions.cq_outstanding >= cq.entries - 1:
            if completions.blocked == 0:
                completions.blocked = 1
                return fetched + 1  # something has changed: do not sleep before its event index is set
            break
        slot = load_u64(c.free + 8 * (c.free_count - 1))
        c.free_count -= 1
        entry = table[slot]
        copy(inflight + INFLIGHT_BYTES * slot, local.sq_host + 64 * head, 64)
        entry.sqid = sqid
        entry.sq_count = sq.fetched
        entry.sequence = c.sequence
        entry.status = 0
        entry.dw0 = 0
        entry.bytes = 0
        entry.verdict = 0
        entry.seen = seen
        parked = sqid == 0 and signed(entry.sqe.opcode) == _AER
        entry.where = WHERE_PARKED if parked else WHERE_ASIC
        store_u64(inflight + INFLIGHT_BYTES * slot + INFLIGHT_STATE, FETCHED)
        kill_at(p, _SQE_COPIED)
        store_u64(state + SQ_FETCHED, sq.fetched + 1)
        c.sequence += 1
        head += 1
        if head == sq.entries:
            head = 0
        local.sq_head = head
        local.sq_outstanding += 1
        if not parked:
            completions.cq_outstanding += 1
        fetched += 1
        before = completions.cq_tail
        begin(p, c, slot, entry)
        if completions.cq_tail != before:
            unread += 1
    if c.events and sqid and not p.armed:
        store_u32(c.events + 8 * sqid, (head if head else sq.entries) - 1)
    return fetched


@compiled
def has_room(c: Any, cqid: int) -> bool:
    """Whether a CQ can take a completion that holds no place in it (a parked command's)."""
    cq = view(c.state + CQ_OFFSET, QUEUES, CQ)[cqid]
    local = view(c.queues, QUEUES, QUEUE_LOCAL)[cqid]
    consumed = load_u32((c.shadow if c.shadow != 0 and cqid != 0 else c.seen) + 8 * cqid + 4)
    unread = local.cq_tail - consumed
    if unread < 0:
        unread += cq.entries
    return unread + local.cq_outstanding < cq.entries - 1


@compiled
def take_updates(p: Any) -> int:
    """Move what control has executed to the lists of its controllers, so that no guest waits for another's."""
    controllers = view(p.controllers, CONTROLLERS, CONTROLLER)
    count = 0
    while True:
        value = ring_peek(p.updates)
        if value < 0:
            return count
        c = controllers[value >> 32]
        slot = value & 0xFFFFFFFF
        state = view(c.state + INFLIGHT_OFFSET, SLOTS, INFLIGHT)[slot].state if c.live else FREE
        if state == EXECUTED or state == FETCHED:  # FETCHED: to be executed now; FREE: a reset has dropped it
            append_todo(c, slot)
        ring_drop(p.updates)
        count += 1


@compiled
def uring_status(entry: Any, result: int) -> int:
    """The status of an io_uring result: a number of bytes or a negative errno."""
    op = signed(entry.sqe.opcode)
    if result >= 0:
        if (op == _READ or op == _WRITE) and result != entry.bytes:
            return _READ_ERROR if op == _READ else _CAPACITY  # a short write: the file system had no more
        return _OK
    if result == _EFAULT:
        return _DATA_TRANSFER
    if op == _READ:
        return _READ_ERROR
    if result == _EOPNOTSUPP and op != _WRITE and op != _FLUSH:
        return _OK if op == _DSM else _BY_CONTROL  # Deallocate is advice
    if result == _ENOSPC or result == _EFBIG or result == _EDQUOT:
        return _CAPACITY
    return _WRITE_FAULT


@inlined
def written(c: Any, entry: Any) -> None:
    """A Write or Write Zeroes on a file has succeeded."""
    op = signed(entry.sqe.opcode)
    if op == _WRITE or op == _ZEROES:
        ns = view(c.namespaces, NAMESPACES, NAMESPACE)[signed(entry.sqe.nsid) - 1]
        if ns.marks:
            lba = signed(entry.sqe.cdw10) | signed(entry.sqe.cdw11) << 32
            unmark(ns, lba, (signed(entry.sqe.cdw12) & CDW12_NLB) + 1)


@compiled
def reap(p: Any) -> int:
    """Complete what io_uring has done."""
    u = view(p.uring, 1, URING)[0]
    if u.inflight == 0:
        return 0
    head, tail = load_u32(u.cq_head), load_u32(u.cq_tail)
    if head == tail:
        return 0
    controllers = view(p.controllers, CONTROLLERS, CONTROLLER)
    results = view(u.cqes, u.cq_mask + 1, URING_CQE)
    count = 0
    while head != tail:
        e = results[head & u.cq_mask]
        head = (head + 1) & 0xFFFFFFFF
        u.inflight -= 1
        c = controllers[e.user_data >> 32]
        store_u64(p.serving, c.client)
        slot = e.user_data & (_VOLUME - 1)
        if e.user_data & _VOLUME:
            reap_volume(p, c, slot, signed(e.res))
            count += 1
            continue
        entry = view(c.state + INFLIGHT_OFFSET, SLOTS, INFLIGHT)[slot]
        if entry.status == 0:
            entry.status = uring_status(entry, signed(e.res))
        entry.pending -= 1
        if entry.pending == 0:
            c.outstanding -= 1
            if entry.status == _BY_CONTROL:
                entry.status = 0
                if to_control(p, c, slot, entry, WHY_REFUSED) != _PENDING:
                    post(p, c, slot, entry, _INTERNAL)
            else:
                if entry.status == _OK:
                    written(c, entry)
                post(p, c, slot, entry, entry.status)
        count += 1
    store_u32(u.cq_head, head)
    return count


@compiled
def submit(p: Any) -> None:
    """Give the kernel what this pass has prepared, with one system call."""
    u = view(p.uring, 1, URING)[0]
    if u.pending:
        done = io_uring_enter(u.fd, u.pending, 0, 0)
        if done > 0:
            u.pending -= done
        kill_at(p, _URING_SUBMITTED)


@compiled
def finish_todo(p: Any, c: Any) -> None:
    """Bring commands to their end: what control has executed, and after a restart all that the last worker left.

    After a restart control has put POSTING entries first: their place in the CQ is taken already. A slot that cannot
    go on just now (its CQ is unmapped or has no room for a parked command) goes to the end of the list.
    """
    table = view(c.state + INFLIGHT_OFFSET, SLOTS, INFLIGHT)
    locals_ = view(c.queues, QUEUES, QUEUE_LOCAL)
    u = view(p.uring, 1, URING)[0]
    for _ in range(c.todo_end - c.todo_begin):
        if u.inflight + URING_RESERVE > u.limit:
            return
        slot = load_u64(c.todo + 8 * (c.todo_begin % SLOTS))
        c.todo_begin += 1
        entry = table[slot]
        cqid = entry_cqid(c, entry)
        if not resolve_cq(c, cqid):
            append_todo(c, slot)
        elif entry.state == POSTING:
            cq = view(c.state + CQ_OFFSET, QUEUES, CQ)[cqid]
            if entry.where != WHERE_PARKED:
                locals_[cqid].cq_outstanding -= 1
            write_completion(p, c, slot, entry, cq, locals_[cqid])
        elif entry.state == EXECUTED:
            if entry.where == WHERE_PARKED and not has_room(c, cqid):
                append_todo(c, slot)
            else:
                post(p, c, slot, entry, entry.status)
        elif entry.state == FETCHED:
            entry.status = 0
            if c.recovering and p.stamps:
                entry.seen = ticks()
            if entry.where != WHERE_PARKED:
                entry.where = WHERE_ASIC
            begin(p, c, slot, entry)
    if c.todo_begin == c.todo_end:
        c.recovering = 0


# ---------------------------------------------------------------------------------------------------- doorbells


@compiled
def store_doorbell(p: Any, c: Any, offset: int, value: int) -> None:
    """One doorbell write, ``offset`` from the first doorbell (Base 3.1.3.24 and .25, DSTRD 0)."""
    queue = offset >> 3
    store_u32(c.bar + offset, value)
    if c.seen != c.bar:
        p.kick = 1
    entries = 0
    if queue < QUEUES:
        if offset & 4:
            cq = view(c.state + CQ_OFFSET, QUEUES, CQ)[queue]
            entries = cq.entries if cq.live else 0
        else:
            sq = view(c.state + SQ_OFFSET, QUEUES, SQ)[queue]
            entries = sq.entries if sq.live else 0
    # Linux still rings the admin doorbells of a controller that it has just disabled; that tells nobody anything.
    if value >= entries and view(c.state + SQ_OFFSET, QUEUES, SQ)[0].live:
        bad_doorbell(p, c, BAD_DOORBELL_VALUE if entries else BAD_DOORBELL_REGISTER, offset >> 2)


@compiled
def drain_socket(p: Any, c: Any) -> int:
    """Peek and commit (DESIGN rule 4): store the leading doorbells, then consume exactly their bytes.

    Anything else at the head is control's: it asks the keeper to take it. A kill before the bytes are consumed only
    repeats the stores. At most LOOKS pages of it: a client that writes as fast as it is read keeps nobody waiting.
    """
    count = 0
    for _ in range(LOOKS):
        if c.attention != ATTENTION_NONE:
            return count
        size = recv(c.socket, p.scratch, PAGE, _PEEK | _DONT_WAIT)
        if size < 0:
            return count
        kill_at(p, _HEADER_READ)
        at = 0
        while size - at >= _DOORBELL_BYTES:
            m = view(p.scratch + at, 1, DOORBELL)[0]
            if (
                signed(m.command) != _REGION_WRITE
                or signed(m.length) != _DOORBELL_BYTES
                or signed(m.message_flags) != _NO_REPLY
            ):
                break
            offset = m.offset - DOORBELLS_OFFSET
            if signed(m.region) != 0 or signed(m.count) != 4 or offset & 3 or offset < 0 or offset >= BAR_BYTES:
                break
            store_doorbell(p, c, offset, signed(m.value))
            at += _DOORBELL_BYTES
            count += 1
        kill_at(p, _DOORBELL_STORED)
        if at:
            recv(c.socket, p.scratch + PAGE, at, _DONT_WAIT)
        if size < PAGE or at == 0:
            if at < size or size == 0:
                c.attention = ATTENTION_WANTED
                p.kick = 1
            return count
    return count


# ----------------------------------------------------------------------------------------------------- the loop


@compiled
def set_armed(p: Any, armed: bool) -> None:
    """Before sleeping ask guests with shadow doorbells to ring for their next entry; after waking, not to.

    EventIdx (Base 5.8): the guest rings when its tail passes it. So it is the tail while armed, one less while the
    entries are found by looking. A CQ head rings only when commands wait for room in the CQ.
    """
    controllers = view(p.controllers, CONTROLLERS, CONTROLLER)
    for i in range(p.controller_count):
        c = controllers[i]
        if c.live == 0 or c.events == 0:
            continue
        locals_ = view(c.queues, QUEUES, QUEUE_LOCAL)
        sqs = view(c.state + SQ_OFFSET, QUEUES, SQ)
        for k in range(c.live_count):
            sqid = load_u64(c.live_queues + 8 * k)
            if sqid == 0:
                continue
            cqid = sqs[sqid].cqid
            if armed:
                store_u32(c.events + 8 * sqid, load_u32(c.shadow + 8 * sqid))
                if locals_[cqid].blocked:
                    store_u32(c.events + 8 * cqid + 4, load_u32(c.shadow + 8 * cqid + 4))
            else:
                head = locals_[sqid].sq_head
                store_u32(c.events + 8 * sqid, (head if head else sqs[sqid].entries) - 1)
                locals_[cqid].blocked = 0
    p.armed = 1 if armed else 0
    fence()


@compiled
def sleep(p: Any, nap_ns: int) -> bool:
    """Wait for a message, a wake-up or an io_uring completion; bounded, so that the heartbeat goes on.

    Whether it was a nap of at most ``nap_ns``, because doorbells that clients write into memory wake nobody.
    """
    fds = view(p.pollfds, POLLFDS, POLLFD)
    controllers = view(p.controllers, CONTROLLERS, CONTROLLER)
    fds[0].fd = p.wake_fd
    fds[1].fd = view(p.uring, 1, URING)[0].fd
    count = 2
    nap = False
    for i in range(p.controller_count):
        c = controllers[i]
        if c.live and c.attention == ATTENTION_NONE:
            fds[count].fd = c.socket
            count += 1
        if c.live and c.mapped and c.live_count:
            nap = True
    for i in range(count):
        fds[i].events = _POLLIN
        fds[i].revents = 0
    p.sleeps += 1
    wait_ns = next_due_ns(p, nap_ns if nap else p.idle_ms * 1_000_000)
    store_u64(p.scratch, wait_ns // 1_000_000_000)  # struct timespec
    store_u64(p.scratch + 8, wait_ns % 1_000_000_000)
    ppoll(p.pollfds, count, p.scratch)
    if fds[0].revents:
        read(p.wake_fd, p.scratch, 8)
    return nap


@compiled
def signal(p: Any) -> None:
    """One eventfd write per CQ that got completions in this pass."""
    if p.dirty_count == 0:
        return
    kill_at(p, _BEFORE_EVENTFD)
    controllers = view(p.controllers, CONTROLLERS, CONTROLLER)
    for i in range(p.dirty_count):
        value = load_u64(p.dirty + 8 * i)
        c = controllers[value >> 32]
        cqid = value & 0xFFFFFFFF
        view(c.queues, QUEUES, QUEUE_LOCAL)[cqid].dirty = 0
        cq = view(c.state + CQ_OFFSET, QUEUES, CQ)[cqid]
        if cq.interrupts:
            fd = load_u64(c.vectors + 8 * cq.vector)
            if fd >= 0:
                write(fd, p.scratch + 2 * PAGE, 8)
                cq.signals += 1
    p.dirty_count = 0


@compiled
def one_pass(p: Any, look: bool) -> int:
    """One round over rings, io_uring and controllers; ``look``: at their sockets too. How much was done.

    To find nothing costs a cache miss or two for each queue, which the commands of busy controllers would pay for. So
    quiet controllers are looked at each ``look_ticks`` only, but always before the poller sleeps, when it is armed.
    Passes can be long or short: counting them would bound neither what that costs nor what a first command waits.
    """
    work = take_updates(p) + reap(p)
    if p.heap_count or p.heap_stale:
        work += wake_due(p)
    controllers = view(p.controllers, CONTROLLERS, CONTROLLER)
    now, everywhere = 0, True
    if p.controller_count > 1:
        now = ticks()
        everywhere = p.armed != 0 or not 0 <= now - p.looked < p.look_ticks
    if everywhere:
        p.looks += 1
        p.looked = now
    # With doorbells in memory the queues say by themselves what is new, and a system call would be most of an idle
    # pass. The pass before sleeping always looks.
    seldom = everywhere and (p.armed != 0 or p.looks & 63 == 0)
    for i in range(p.controller_count):
        c = controllers[i]
        if c.live == 0:
            continue
        quiet = now - c.busy > p.quiet_ticks
        if quiet and not everywhere:
            continue
        before = work
        store_u64(p.serving, c.client)
        trapped = c.shadow == 0 and c.mapped == 0
        if c.attention == ATTENTION_NONE and (seldom or (trapped and (look or quiet))):
            work += drain_socket(p, c)
        if c.hold:
            continue
        if c.todo_begin != c.todo_end:
            c.busy = now
            finish_todo(p, c)
        if c.recovering and c.todo_begin != c.todo_end:
            continue  # new commands wait for those of the last worker
        for k in range(c.live_count):
            work += serve_queue(p, c, load_u64(c.live_queues + 8 * k))
        if work != before:
            c.busy = now
    work += serve_soc(p)
    store_u64(p.serving, 0)
    submit(p)
    signal(p)
    if p.kick:
        p.kick = 0
        write(p.control_fd, p.scratch + 2 * PAGE, 8)
    return work


@compiled
def run(address: int) -> None:
    """A poller's life: until its stop word is set. ``address``: its POLLER record.

    Adaptive polling: ``spin`` idle passes, then the guests are asked to ring, one pass more looks whether
    something came meanwhile, then it sleeps. After a sleep of more than SHORT_SLEEP_NS it does not spin: work does
    not come fast enough for that to be of use.

    With mapped doorbells it naps instead, and each nap in a row is twice as long as the one before, up to
    ``nap_ns``: what a doorbell waits is bounded by that, and by about the time that there was nothing to do.
    """
    p = view(address, 1, POLLER)[0]
    stop = address + STOP
    idle, spin, nap_ns, naps = 0, p.spin, NAP_NS_MIN, False
    while load_u64(stop) == 0:
        p.passes += 1
        store_u64(p.health, p.passes)
        wanted = load_u64(address + GRACE_WANTED)
        if wanted != p.grace_seen:
            store_u64(address + GRACE_SEEN, wanted)
            p.kick = 1
        kill_at(p, _IN_LOOP)
        if one_pass(p, idle > 0 or p.passes & 7 == 0):
            if p.armed:
                set_armed(p, False)
            idle = 0
            if naps:
                spin, nap_ns = p.spin * NAP_SPINS, NAP_NS_MIN
            continue
        idle += 1
        if idle < spin:
            pause()
        elif p.armed == 0:
            set_armed(p, True)
        else:
            begin = ticks()
            naps = sleep(p, min(nap_ns, p.nap_ns))
            short = (ticks() - begin) * p.ns_mult >> 20 < SHORT_SLEEP_NS
            spin = p.spin if short and not naps else 0
            nap_ns = min(2 * nap_ns, p.nap_ns) if naps else NAP_NS_MIN
            set_armed(p, False)
            idle = 1
