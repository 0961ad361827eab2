"""The gate: what a command has to pass before it is executed, and the heap of those that wait.

A *gate* belongs to a back end: its rate limits and its fault rules, in an area that outlives a worker. A *flow* is
one namespace of one controller, with the gates of what it stands on; so a flow is one poller's alone, and gates are
shared. A command is first judged by the rules, once: the first one that strikes it is its own. Then it is paid for at
all limits. Then its rule acts: a delay, a status, a hold until it is released, or a special hand (control).

Limits are GCRA (ITU-T I.371 appendix): a command conforms while the theoretical arrival time is at most ``tolerance``
ahead, and moves it on by its own cost; so any size passes, and is paid for afterwards. Commands that do not conform
wait in their flow's line, reads and writes apart; nobody has reserved anything, so limits can change at any time.
Flows of one back end take turns by virtual time (start-time fair queueing, Goyal et al., SIGCOMM '96): none is served
that has had QUANTUM more than one that waits.

The heap has one item for a command with a delay, and one for a flow whose lines are not empty. Items are not taken
out when what they name has gone: an item counts only if its time is still that of its command or flow.

A worker's death: who waits is FETCHED and comes to the gate again; ``verdict`` and ``due`` of its entry say how far
it had got, so it is neither counted nor paid for twice.
"""

from __future__ import annotations

from typing import Any

from dpu.fastpath.atomics import add_u64, load_u64, signed, store_u64, swap_u64, ticks, view
from dpu.fastpath.jit import compiled
from dpu.layout import (
    ACT_CONTROL,
    ACT_HOLD,
    ACT_STATUS,
    BUCKET,
    BUCKET_BYTES,
    BUCKET_TAT,
    CONTROLLER,
    CONTROLLERS,
    DELAY_BYTES,
    DELAY_STEPS_BITS,
    DELAYS_OFFSET,
    FETCHED,
    FLOW,
    FLOW_BYTES,
    FLOW_LINES,
    FLOW_PLACES,
    GATE_BUCKETS,
    GATE_MANAGED,
    GATE_SERVED,
    GATE_TURNS,
    GATE_WAITING,
    HEAP_FLOW,
    HEAP_ITEM,
    HEAP_ITEMS,
    HELD,
    INFLIGHT,
    INFLIGHT_OFFSET,
    LINE,
    LINE_BYTES,
    NAMESPACE,
    NAMESPACES,
    PER_UNIT_SHIFT,
    PLACES,
    RULE,
    RULE_BYTES,
    RULE_MATCHES,
    RULE_STRUCK,
    RULES_OFFSET,
    SLOTS,
    VERDICT_ADMITTED,
    VERDICT_CONTROL,
    VERDICT_DELAYED,
    VERDICT_JUDGED,
    VERDICT_MATCH_SHIFT,
    VERDICT_RULE,
    WHERE_ASIC,
    WHERE_HEAP,
)
from dpu.nvme.wire import CDW12_NLB, NvmOpcode

_WRITE, _READ = int(NvmOpcode.WRITE), int(NvmOpcode.READ)
_COMPARE, _ZEROES, _VERIFY = int(NvmOpcode.COMPARE), int(NvmOpcode.WRITE_ZEROES), int(NvmOpcode.VERIFY)
_UNCORRECTABLE = int(NvmOpcode.WRITE_UNCORRECTABLE)

WAIT = -1
OPEN = -3
RETRY_NS = 50_000  # until a flow whose turn it is not looks again
HELD_BACK_NS = 1_000_000  # until a controller that is on hold is looked at again
QUANTUM_NS = 1_000_000  # of service that one flow may be ahead of another
DUE_BATCH = 256  # items of the heap that one pass takes
_BUCKETS_OF_ALL = 2  # the first two buckets are of reads and writes


@compiled
def clock(p: Any) -> int:
    """The time, in ticks."""
    return load_u64(p.clock) if p.clock else ticks()


@compiled
def to_ticks(p: Any, ns: int) -> int:
    """Nanoseconds as ticks; more than 0."""
    return (ns << 20) // p.ns_mult + 1


@compiled
def append_todo(c: Any, slot: int) -> None:
    """Queue a slot for asic.finish_todo. A slot is queued once, so the ring of SLOTS has room."""
    store_u64(c.todo + 8 * (c.todo_end % SLOTS), slot)
    c.todo_end += 1


# -------------------------------------------------------------------------------------------------------- the heap


@compiled
def heap_place(p: Any, due: int, what: int) -> None:
    """Add an item; there is room."""
    items = view(p.heap, HEAP_ITEMS, HEAP_ITEM)
    at = p.heap_count
    p.heap_count += 1
    while at > 0:
        parent = (at - 1) >> 1
        if items[parent].due <= due:
            break
        items[at].due = items[parent].due
        items[at].what = items[parent].what
        at = parent
    items[at].due = due
    items[at].what = what


@compiled
def heap_pop(p: Any) -> int:
    """Take the item that is due first out; what it names."""
    items = view(p.heap, HEAP_ITEMS, HEAP_ITEM)
    what = items[0].what
    p.heap_count -= 1
    count = p.heap_count
    due, last = items[count].due, items[count].what
    at = 0
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        if child + 1 < count and items[child + 1].due < items[child].due:
            child += 1
        if items[child].due >= due:
            break
        items[at].due = items[child].due
        items[at].what = items[child].what
        at = child
    items[at].due = due
    items[at].what = last
    return what


@compiled
def counts(p: Any, due: int, what: int) -> bool:
    """Whether what an item names still waits for its time."""
    c = view(p.controllers, CONTROLLERS, CONTROLLER)[what >> 32]
    if c.live == 0 or c.flows == 0:
        return False
    index = what & 0xFFFFFFFF
    if index & HEAP_FLOW:
        flow = view(c.flows + FLOW_BYTES * (index ^ HEAP_FLOW), 1, FLOW)[0]
        return flow.due == due
    entry = view(c.state + INFLIGHT_OFFSET, SLOTS, INFLIGHT)[index]
    return entry.state == FETCHED and entry.where == WHERE_HEAP and entry.due == due


@compiled
def heap_sweep(p: Any) -> None:
    """Take out the items that do not count."""
    items = view(p.heap, HEAP_ITEMS, HEAP_ITEM)
    count = p.heap_count
    p.heap_count = 0
    for i in range(count):
        due, what = items[i].due, items[i].what
        if counts(p, due, what):
            heap_place(p, due, what)


@compiled
def heap_push(p: Any, due: int, what: int) -> None:
    """Add an item. No more than half of the room can count at a time; the others are swept out when it is full."""
    if p.heap_count == HEAP_ITEMS:
        heap_sweep(p)
    heap_place(p, due, what)


@compiled
def next_due_ns(p: Any, limit_ns: int) -> int:
    """Nanoseconds until something is due, at most ``limit_ns``."""
    if p.heap_count == 0:
        return limit_ns
    left = view(p.heap, HEAP_ITEMS, HEAP_ITEM)[0].due - clock(p)
    if left <= 0:
        return 0
    if left >> 43:  # hours: it would not fit below
        return limit_ns
    return min(limit_ns, left * p.ns_mult >> 20)


# --------------------------------------------------------------------------------------------------------- limits


@compiled
def set_bucket(address: int, per_unit: int, tolerance: int, now: int) -> None:
    """Change a limit under load: what was taken beyond the rate stays so many units, at the new price."""
    b = view(address, 1, BUCKET)[0]
    old = b.per_unit
    while True:
        tat = load_u64(address + BUCKET_TAT)
        ahead = max(tat - now, 0) if old else 0
        if ahead > 0 and old != per_unit:
            ahead = int(float(ahead) * float(per_unit) / float(old))  # may be more than 64 bits in between
        if swap_u64(address + BUCKET_TAT, tat, now + ahead):
            break
    b.tolerance = tolerance
    b.per_unit = per_unit


@compiled
def units_of(bucket: int, size: int) -> int:
    """What a command of ``size`` bytes takes from a bucket: odd ones count bytes."""
    return size if bucket & 1 else 1


@compiled
def bucket_of(gate: int, index: int, writing: int) -> int:
    """Address of the bucket number ``index`` (0 to 3) of those that a read or a write has to pass."""
    if index >= _BUCKETS_OF_ALL:
        index += 2 * writing
    return gate + GATE_BUCKETS + BUCKET_BYTES * index


@compiled
def cost_of(b: Any, index: int, size: int) -> int:
    """Ticks that a command moves a bucket on."""
    return b.per_unit * units_of(index, size) >> PER_UNIT_SHIFT


@compiled
def my_turn(gate: int, place: int, quantum: int) -> bool:
    """Whether no flow that waits has had less service by more than ``quantum``."""
    waiting, turns = gate + GATE_WAITING, gate + GATE_TURNS
    mine = max(load_u64(turns + 8 * place), load_u64(gate + GATE_SERVED) - quantum)
    for i in range(PLACES):
        if i != place and load_u64(waiting + 8 * i) and mine > load_u64(turns + 8 * i) + quantum:
            return False
    return True


@compiled
def pay(p: Any, address: int, flow: Any, writing: int, size: int, now: int) -> int:
    """Pay for a command at all gates of its flow: 0, or the time to try again, and then nothing was paid."""
    ready, dear = now, 0
    for i in range(4 * flow.gates):
        b = view(bucket_of(load_u64(address + 8 * (i >> 2)), i & 3, writing), 1, BUCKET)[0]
        if b.per_unit:
            ready = max(ready, b.tat - b.tolerance)
            dear = max(dear, cost_of(b, i & 3, size))
    if ready > now:
        return ready
    if dear == 0:
        return 0
    quantum = max(to_ticks(p, QUANTUM_NS), dear)
    for i in range(flow.gates):
        place = load_u64(address + FLOW_PLACES + 8 * i)
        if place >= 0 and not my_turn(load_u64(address + 8 * i), place, quantum):
            return now + to_ticks(p, RETRY_NS)
    for i in range(4 * flow.gates):
        at = bucket_of(load_u64(address + 8 * (i >> 2)), i & 3, writing)
        b = view(at, 1, BUCKET)[0]
        cost = cost_of(b, i & 3, size)
        while b.per_unit:
            tat = load_u64(at + BUCKET_TAT)
            if tat - b.tolerance > now:  # another poller was faster
                for j in range(i):
                    paid = bucket_of(load_u64(address + 8 * (j >> 2)), j & 3, writing)
                    add_u64(paid + BUCKET_TAT, -cost_of(view(paid, 1, BUCKET)[0], j & 3, size))
                return tat - b.tolerance
            if swap_u64(at + BUCKET_TAT, tat, max(tat, now) + cost):
                break
    for i in range(flow.gates):
        gate, place = load_u64(address + 8 * i), load_u64(address + FLOW_PLACES + 8 * i)
        if place >= 0:
            turn = max(load_u64(gate + GATE_TURNS + 8 * place), load_u64(gate + GATE_SERVED) - quantum)
            store_u64(gate + GATE_TURNS + 8 * place, turn + dear)
            if turn > load_u64(gate + GATE_SERVED):
                store_u64(gate + GATE_SERVED, turn)
    return 0


@compiled
def set_waiting(address: int, flow: Any, waiting: int) -> None:
    """Say at the gates of a flow whether some of its commands wait."""
    for i in range(flow.gates):
        place = load_u64(address + FLOW_PLACES + 8 * i)
        if place >= 0:
            store_u64(load_u64(address + 8 * i) + GATE_WAITING + 8 * place, waiting)


@compiled
def size_of(c: Any, entry: Any) -> int:
    """Bytes that a command with a range of blocks is about."""
    ns = view(c.namespaces, NAMESPACES, NAMESPACE)[signed(entry.sqe.nsid) - 1]
    return (signed(entry.sqe.cdw12) & CDW12_NLB) + 1 << ns.shift  # 0's based


@compiled
def line_up(c: Any, line: Any, slot: int, entry: Any) -> None:
    """Put a command at the end of a line."""
    entry.where = WHERE_HEAP
    entry.due = 0
    store_u64(c.links + 8 * slot, 0)
    if line.head:
        store_u64(c.links + 8 * (line.tail - 1), slot + 1)
    else:
        line.head = slot + 1
    line.tail = slot + 1


@compiled
def serve_flow(p: Any, c: Any, index: int, now: int) -> int:
    """Let as many of a flow's commands go as conform; how many. Sets the time of its next look."""
    address = c.flows + FLOW_BYTES * index
    flow = view(address, 1, FLOW)[0]
    lines = view(address + FLOW_LINES, 2, LINE)
    table = view(c.state + INFLIGHT_OFFSET, SLOTS, INFLIGHT)
    served = 0
    due = 0
    while lines[0].head or lines[1].head:
        first = 0 if lines[0].head else 1
        if lines[0].head and lines[1].head:
            first = int(table[lines[1].head - 1].sequence < table[lines[0].head - 1].sequence)
        went = False
        due = HELD
        for turn in range(2):
            writing = first ^ turn
            slot = lines[writing].head - 1
            if slot < 0:
                continue
            entry = table[slot]
            when = pay(p, address, flow, writing, size_of(c, entry), now)
            if when == 0:
                lines[writing].head = load_u64(c.links + 8 * slot)
                entry.verdict |= VERDICT_ADMITTED
                entry.where = WHERE_ASIC
                append_todo(c, slot)
                served += 1
                went = True
                due = 0
                break
            due = min(due, when)
        if not went:
            break
    set_waiting(address, flow, int(due != 0))
    if due:
        heap_push(p, due, c.index << 32 | HEAP_FLOW | index)
    flow.due = due
    return served


# ---------------------------------------------------------------------------------------------------------- rules


@compiled
def mix(seed: int, number: int) -> int:
    """32 random bits, the same for the same arguments (two rounds of C. Wellons' "lowbias32")."""
    x = (signed(seed) ^ signed(seed) >> 32) & 0xFFFFFFFF
    for i in range(2):
        x = (x ^ (number >> 32 * i & 0xFFFFFFFF)) + 0x9E3779B9 & 0xFFFFFFFF  # it maps 0 to 0
        x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
        x = x ^ x >> 16
    return x


@compiled
def matches(r: Any, entry: Any) -> bool:
    """Whether a command is one that a rule is about."""
    op = signed(entry.sqe.opcode)
    if op > 63 or not r.opcodes >> op & 1:
        return False
    if r.first == 0 and r.last == HELD:
        return True
    if op != _READ and op != _WRITE and op != _COMPARE and op != _ZEROES and op != _VERIFY and op != _UNCORRECTABLE:
        return False
    lba = signed(entry.sqe.cdw10) | signed(entry.sqe.cdw11) << 32
    return r.first <= lba + (signed(entry.sqe.cdw12) & CDW12_NLB) and lba <= r.last


@compiled
def strikes(rule: int, r: Any) -> int:
    """Count a match; its number, or -1 when the rule lets it pass."""
    number = add_u64(rule + RULE_MATCHES, 1)
    if number < r.skip or (number - r.skip) % r.every or mix(r.seed, 2 * number) >= r.rate:
        return -1
    if add_u64(rule + RULE_STRUCK, 1) < r.count:
        return number
    add_u64(rule + RULE_STRUCK, -1)
    return -1


@compiled
def judge(p: Any, address: int, flow: Any, entry: Any) -> int:
    """The verdict on a command."""
    for i in range(flow.gates):
        number = load_u64(load_u64(address + 8 * i))  # GATE.rules
        while number:
            rule = p.gates + RULES_OFFSET + RULE_BYTES * (number - 1)
            r = view(rule, 1, RULE)[0]
            if r.live and matches(r, entry):
                match = strikes(rule, r)
                if match >= 0:
                    by = VERDICT_CONTROL if r.action == ACT_CONTROL else 0
                    return VERDICT_JUDGED | by | number | match << VERDICT_MATCH_SHIFT
            number = r.following
    return VERDICT_JUDGED


@compiled
def delay_of(p: Any, number: int, r: Any, match: int) -> int:
    """Ticks drawn from a rule's distribution."""
    dice = mix(r.seed, 2 * match + 1)
    quantiles = p.gates + DELAYS_OFFSET + DELAY_BYTES * (number - 1)
    step = dice >> 32 - DELAY_STEPS_BITS
    low, high = load_u64(quantiles + 8 * step), load_u64(quantiles + 8 * step + 8)
    return low + ((high - low) * (dice & 0xFFFF) >> 16)  # less than 2^47 ticks: 13 hours


# ------------------------------------------------------------------------------------------------------- the gate


@compiled
def gate(p: Any, c: Any, slot: int, entry: Any) -> int:
    """What becomes of a fetched command: OPEN (it is executed now), WAIT, or the status that it ends with."""
    nsid = signed(entry.sqe.nsid)
    if entry.sqid == 0 or nsid < 1 or nsid > NAMESPACES:
        return OPEN
    index = nsid - 1
    address = c.flows + FLOW_BYTES * index
    flow = view(address, 1, FLOW)[0]
    if flow.gates == 0:
        return OPEN
    if entry.verdict == 0:
        entry.verdict = judge(p, address, flow, entry)
    if not entry.verdict & VERDICT_ADMITTED:
        op = signed(entry.sqe.opcode)
        writing = int(op == _WRITE)
        if writing or op == _READ or op == _COMPARE or op == _VERIFY:
            line = view(address + FLOW_LINES + LINE_BYTES * writing, 1, LINE)[0]
            now = clock(p)
            when = 0 if line.head else pay(p, address, flow, writing, size_of(c, entry), now)
            if line.head or when:
                line_up(c, line, slot, entry)
                set_waiting(address, flow, 1)
                if flow.due == 0 or (when and when < flow.due):
                    flow.due = when
                    heap_push(p, when, c.index << 32 | HEAP_FLOW | index)
                return WAIT
        entry.verdict |= VERDICT_ADMITTED
    number = entry.verdict & VERDICT_RULE
    if number:
        r = view(p.gates + RULES_OFFSET + RULE_BYTES * (number - 1), 1, RULE)[0]
        if r.live:
            return act(p, c, slot, entry, number, r)
        entry.verdict &= ~(VERDICT_RULE | VERDICT_CONTROL)
    for i in range(flow.gates):
        if load_u64(load_u64(address + 8 * i) + GATE_MANAGED):
            entry.verdict |= VERDICT_CONTROL
    return OPEN


@compiled
def act(p: Any, c: Any, slot: int, entry: Any, number: int, r: Any) -> int:
    """Do to a command what its rule says."""
    if r.delayed:
        now = clock(p)
        if not entry.verdict & VERDICT_DELAYED:
            entry.due = now + delay_of(p, number, r, entry.verdict >> VERDICT_MATCH_SHIFT)
            entry.verdict |= VERDICT_DELAYED
        if entry.due > now:
            entry.where = WHERE_HEAP
            heap_push(p, entry.due, c.index << 32 | slot)
            return WAIT
    if r.action == ACT_HOLD:
        entry.where = WHERE_HEAP
        entry.due = HELD
        return WAIT
    return r.status if r.action == ACT_STATUS else OPEN


@compiled
def wake_due(p: Any) -> int:
    """Send on what is due, to asic.finish_todo; how much."""
    controllers = view(p.controllers, CONTROLLERS, CONTROLLER)
    items = view(p.heap, HEAP_ITEMS, HEAP_ITEM)
    now = clock(p)
    if p.heap_stale:
        p.heap_stale = 0
        for i in range(p.controller_count):
            c = controllers[i]
            if c.live and c.flows:
                look_again(p, c, now)
    done = 0
    for _ in range(DUE_BATCH):
        if p.heap_count == 0 or items[0].due > now:
            break
        due = items[0].due
        what = heap_pop(p)
        if not counts(p, due, what):
            continue
        c = controllers[what >> 32]
        index = what & 0xFFFFFFFF
        if index & HEAP_FLOW:
            if c.hold:
                address = c.flows + FLOW_BYTES * (index ^ HEAP_FLOW)
                flow = view(address, 1, FLOW)[0]
                set_waiting(address, flow, 0)  # nobody waits for its turn meanwhile
                flow.due = now + to_ticks(p, HELD_BACK_NS)
                heap_push(p, flow.due, what)
            else:
                done += serve_flow(p, c, index ^ HEAP_FLOW, now)
        else:
            entry = view(c.state + INFLIGHT_OFFSET, SLOTS, INFLIGHT)[index]
            if c.hold:
                entry.due = now + to_ticks(p, HELD_BACK_NS)
                heap_push(p, entry.due, what)
            else:
                entry.where = WHERE_ASIC
                append_todo(c, index)
                done += 1
    return done


@compiled
def look_again(p: Any, c: Any, now: int) -> None:
    """Make all flows of a controller that have commands in line due now."""
    for i in range(NAMESPACES):
        address = c.flows + FLOW_BYTES * i
        flow = view(address, 1, FLOW)[0]
        lines = view(address + FLOW_LINES, 2, LINE)
        flow.due = 0
        if lines[0].head or lines[1].head:
            flow.due = now
            set_waiting(address, flow, 1)
            heap_push(p, now, c.index << 32 | HEAP_FLOW | i)
