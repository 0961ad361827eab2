"""The soc stage: the block layer of volumes, on tables. It sees block requests, never a guest's data.

The asic puts a command into a virtual queue (a ring of the poller) when tables alone do not answer it; :func:`serve`
looks the blocks up, allocates clusters from the poller's pool, copies shared ones, takes freed ones out of the map,
and puts the command into the queue back, with a list of extents; the asic moves the data. The same thread serves both
stages in the same pass, so both queues are empty between passes. With ``offload`` (the default) the asic looks up by
itself (:func:`find`, :func:`locate`) what is mapped, and for a write owned; without it every command passes through
here, as on the paper's card.

In which order a map is changed, and what a death leaves: dpu.volumes.area. What the stage cannot do (a pool is empty,
a log is full, a shared cluster is in a file or larger than ``copy_max``) is answered with minus a WHY_* and left to
control, which has the command executed again.

Limits: one request locates at most EXTENTS extents, and erases at most ERASE_STEPS clusters; the rest is asked again.
Source: the data flow of RISTRETTO (FAST '26); the map is DESIGN's rule 7.
"""

from __future__ import annotations

from typing import Any

from dpu.fastpath.atomics import add_u64, copy, load_u64, prefetch, signed, store_u64, swap_u64, view
from dpu.fastpath.jit import compiled, inlined
from dpu.fastpath.rings import kill_at, ring_drop, ring_peek, ring_push
from dpu.fastpath.system import fill
from dpu.layout import (
    AREA_BYTES,
    BACKING,
    BACKING_SHIFT,
    BACKINGS,
    BLOCK,
    BLOCK_BYTES,
    BLOCK_COPY,
    BLOCK_ERASE,
    BLOCK_EXTENTS,
    BLOCK_TARGETS,
    BLOCK_WRITE,
    CLUSTER,
    CONTROLLER,
    CONTROLLERS,
    EXTENT,
    EXTENT_BYTES,
    EXTENTS,
    GROUP_LOCAL,
    KILL_POINTS,
    KIND_MEMORY,
    LEAF_BITS,
    LEAF_BYTES,
    LEAF_ENTRIES,
    LEAF_POOL_OFFSET,
    LOG_ALLOCATE,
    LOG_COPY,
    LOG_DROP,
    LOG_ENTRIES,
    LOG_FREE,
    LOG_LEAF,
    LOG_OFFSET,
    LOG_RECORD_BYTES,
    OWN_MAKE,
    OWN_NOT,
    PLACE,
    PLACE_BITS,
    POLLER,
    POOL_OFFSET,
    RING_DATA,
    RING_HEAD,
    RING_TAIL,
    VOLUME,
    VOLUME_BYTES,
    VOLUME_CHANGES,
    WHY_ROOM,
    WHY_SHARED,
    WHY_SOC,
)

OUTSIDE = 255  # no WHY_*; locate(): the range is not inside the volume
ERASE_STEPS = 4096
COPY_DATA = 256
LOG_NEWS = 4095  # control is woken each time the log has so many records more, plus one
_RECORDS = 2  # that one change can write

_COUNTED, _FILLED = KILL_POINTS["soc_counted"], KILL_POINTS["soc_leaf_filled"]
_LEAF_LOGGED, _LEAF_PUBLISHED = KILL_POINTS["soc_leaf_logged"], KILL_POINTS["soc_leaf_published"]
_LOGGED, _COPIED, _PUBLISHED = KILL_POINTS["soc_logged"], KILL_POINTS["soc_copied"], KILL_POINTS["soc_published"]
_TAIL_MOVED = KILL_POINTS["soc_tail_moved"]


# ------------------------------------------------------------------------------------------------------ look-up


@inlined
def look_up(g: Any, v: Any, index: int) -> int:
    """The entry of a cluster, which is inside the volume; 0 when it is not mapped."""
    leaf = load_u64(g.roots + 8 * (v.root + (index >> LEAF_BITS)))
    if leaf == 0:
        return 0
    return load_u64(g.leaves + LEAF_BYTES * leaf + 8 * (index & (LEAF_ENTRIES - 1)))


@inlined
def look_ahead(ns: Any, lba: int) -> None:
    """Have the entry of a block, which may be any number, come into the cache while something else is done."""
    g = view(ns.group, 1, GROUP_LOCAL)[0]
    v = view(ns.volume, 1, VOLUME)[0]
    index = lba << ns.shift >> g.cluster_shift
    if 0 <= index < v.clusters:
        leaf = load_u64(g.roots + 8 * (v.root + (index >> LEAF_BITS)))
        prefetch(g.leaves + LEAF_BYTES * leaf + 8 * (index & (LEAF_ENTRIES - 1)))


@inlined
def backing_of(g: Any, entry: int) -> Any:
    """The back end of an entry."""
    return view(g.backings, BACKINGS, BACKING)[(entry & PLACE) >> BACKING_SHIFT]


@inlined
def find(ns: Any, offset: int, size: int, write: bool) -> int:
    """Host address of bytes of a volume that the asic may use by itself; 0 when :func:`locate` has to be asked."""
    g = view(ns.group, 1, GROUP_LOCAL)[0]
    v = view(ns.volume, 1, VOLUME)[0]
    shift = g.cluster_shift
    index = offset >> shift
    if g.direct == 0 or (offset + size - 1) >> shift != index or index >= v.clusters:
        return 0
    entry = look_up(g, v, index)
    if entry == 0 or (write and entry >> PLACE_BITS != v.epoch):
        return 0
    return backing_of(g, entry).host + ((entry & CLUSTER) << shift) + (offset & ((1 << shift) - 1))


@compiled
def add_extent(p: Any, g: Any, extents: int, count: int, entry: int, within: int, size: int) -> int:
    """Append bytes of a cluster to a list, joined to the last ones if they follow them; the new count.

    Bytes that are not mapped are the poller's page of zeroes, which is as long as a transfer.
    """
    host, fd, offset = p.zeroes, -1, 0
    if entry:
        number = (entry & PLACE) >> BACKING_SHIFT
        b = view(g.backings, BACKINGS, BACKING)[number]
        at = ((entry & CLUSTER) << g.cluster_shift) + within
        host, fd, offset = (b.host + at if b.kind == KIND_MEMORY else 0), number, b.start + at
    if count > 0:
        last = view(extents + EXTENT_BYTES * (count - 1), 1, EXTENT)[0]
        if last.backing == fd and (fd < 0 or last.offset + last.length == offset):
            last.length += size
            return count
    e = view(extents + EXTENT_BYTES * count, 1, EXTENT)[0]
    e.host = host
    e.backing = fd
    e.offset = offset
    e.length = size
    return count + 1


@compiled
def locate(p: Any, b: Any, at: int, extents: int) -> int:
    """List where ``b.length`` bytes at ``at`` are; their number, or minus a WHY_*, or minus OUTSIDE.

    ``b.own``: whether they shall be the volume's own, or be made so; -WHY_SOC when they are not.
    """
    g = view(b.group, 1, GROUP_LOCAL)[0]
    v = view(b.volume, 1, VOLUME)[0]
    shift = g.cluster_shift
    end = at + b.length
    last = (end - 1) >> shift
    if last >= v.clusters:
        return -OUTSIDE
    count = 0
    while at < end:
        index = at >> shift
        entry = look_up(g, v, index)
        if b.own and entry >> PLACE_BITS != v.epoch:
            if b.own != OWN_MAKE:
                return -WHY_SOC
            entry = own(p, g, v, b.volume, index, entry)
            if entry == 0:
                continue
            if entry < 0:
                b.first = index
                b.clusters = last - index + 1
                return entry
        stop = min(end, (index + 1) << shift)
        count = add_extent(p, g, extents, count, entry, at & ((1 << shift) - 1), stop - at)
        at = stop
    return count


# ------------------------------------------------------------------------------------------------------ changes


@compiled
def log_write(log: int, action: int, number: int, index: int, old: int, new: int) -> int:
    """Write a record at the tail, which does not move; the tail."""
    tail = load_u64(log + RING_TAIL)
    at = log + RING_DATA + LOG_RECORD_BYTES * (tail % LOG_ENTRIES)
    store_u64(at, 0)  # the sequence comes first in a record
    store_u64(at + 8, action)
    store_u64(at + 16, number)
    store_u64(at + 24, index)
    store_u64(at + 32, old)
    store_u64(at + 40, new)
    store_u64(at, tail + 1)
    return tail


@compiled
def log_end(p: Any, log: int, tail: int, done: bool) -> None:
    """The record at the tail counts, or is void: then it must never be taken for one that a death has cut."""
    if not done:
        store_u64(log + RING_DATA + LOG_RECORD_BYTES * (tail % LOG_ENTRIES), 0)
        return
    store_u64(log + RING_TAIL, tail + 1)
    if (tail + 1) & LOG_NEWS == 0:
        p.refill = 1
        p.kick = 1


@compiled
def pool_drop(p: Any, pool: int) -> None:
    """Take the head of a pool; control is told whenever it has halved."""
    ring_drop(pool)
    level = load_u64(pool + RING_TAIL) - load_u64(pool + RING_HEAD)
    if level & (level - 1) == 0:
        p.refill = 1
        p.kick = 1


@compiled
def own_leaf(p: Any, g: Any, v: Any, number: int, index: int, area: int) -> int:
    """Address of the leaf of a cluster, which is the volume's own; 0: begin anew; minus a WHY_*."""
    word_at = g.roots + 8 * (v.root + (index >> LEAF_BITS))
    word = load_u64(word_at)
    if word != 0 and load_u64(g.leaf_epochs + 8 * word) == v.epoch:
        return g.leaves + LEAF_BYTES * word
    leaf = ring_peek(area + LEAF_POOL_OFFSET)
    if leaf < 0:
        return -WHY_ROOM
    at = g.leaves + LEAF_BYTES * leaf
    if word != 0:
        copy(at, g.leaves + LEAF_BYTES * word, LEAF_BYTES)
    else:
        fill(at, 0, LEAF_BYTES)
    store_u64(g.leaf_epochs + 8 * leaf, v.epoch)
    kill_at(p, _FILLED)
    log = area + LOG_OFFSET
    tail = log_write(log, LOG_LEAF, number, index >> LEAF_BITS, word, leaf)
    kill_at(p, _LEAF_LOGGED)
    done = swap_u64(word_at, word, leaf)
    kill_at(p, _LEAF_PUBLISHED)
    log_end(p, log, tail, done)
    if not done:
        return 0
    pool_drop(p, area + LEAF_POOL_OFFSET)
    return at


@compiled
def exchange(p: Any, g: Any, v: Any, volume: int, index: int, old: int, place: int, action: int) -> int:
    """Change an entry from ``old`` to a place of the volume's own (with LOG_FREE and LOG_DROP to 0), logged.

    ``action``: LOG_*, with COPY_DATA if the cluster is first to be copied, in memory.
    1; 0: another was faster, nothing has happened; minus a WHY_*.
    """
    copies = action & COPY_DATA
    action &= COPY_DATA - 1
    area = g.areas + AREA_BYTES * p.number
    log = area + LOG_OFFSET
    if load_u64(log + RING_TAIL) - load_u64(log + RING_HEAD) > LOG_ENTRIES - _RECORDS:
        return -WHY_ROOM
    number = (volume - g.volumes) // VOLUME_BYTES
    add_u64(volume + VOLUME_CHANGES, 1)
    kill_at(p, _COUNTED)
    leaf = own_leaf(p, g, v, number, index, area)
    if leaf <= 0:
        return leaf
    new = place | v.epoch << PLACE_BITS if action == LOG_ALLOCATE or action == LOG_COPY else 0
    tail = log_write(log, action, number, index, old, new)
    kill_at(p, _LOGGED)
    size = 1 << g.cluster_shift
    target = backing_of(g, new).host + (new & CLUSTER) * size if copies else 0
    if copies:
        copy(target, backing_of(g, old).host + (old & CLUSTER) * size, size)
        kill_at(p, _COPIED)
    done = swap_u64(leaf + 8 * (index & (LEAF_ENTRIES - 1)), old, new)
    kill_at(p, _PUBLISHED)
    if copies and not done:
        fill(target, 0, size)  # it stays in the pool, where everything is clean
    log_end(p, log, tail, done)
    kill_at(p, _TAIL_MOVED)
    return 1 if done else 0


@compiled
def own(p: Any, g: Any, v: Any, volume: int, index: int, old: int) -> int:
    """Make a cluster the volume's own; its entry. 0: look again; minus a WHY_*: control has to help."""
    pool = g.areas + AREA_BYTES * p.number + POOL_OFFSET
    action = LOG_ALLOCATE
    if old != 0:
        action = LOG_COPY | COPY_DATA
        if backing_of(g, old).kind != KIND_MEMORY or 1 << g.cluster_shift > g.copy_max:
            return -WHY_SHARED
    place = ring_peek(pool)
    if place < 0:
        return -WHY_ROOM
    if old != 0 and backing_of(g, place).kind != KIND_MEMORY:
        return -WHY_SHARED
    done = exchange(p, g, v, volume, index, old, place, action)
    if done <= 0:
        return done
    pool_drop(p, pool)
    return place | v.epoch << PLACE_BITS


@compiled
def erase(p: Any, b: Any, extents: int) -> int:
    """Make ``b.length`` bytes at ``b.offset`` read as zeroes; extents that are to be cleared, or minus a WHY_*.

    Whole clusters leave the map: shared ones always, own ones with ``b.free`` (Deallocate) unless the volume is
    thick. The rest is listed, or with ``b.free``, if it is shared, left alone: Deallocate is advice.
    ``b.done``: bytes dealt with, less than ``b.length`` when it was enough for one request.
    """
    g = view(b.group, 1, GROUP_LOCAL)[0]
    v = view(b.volume, 1, VOLUME)[0]
    shift = g.cluster_shift
    at, end = b.offset, b.offset + b.length
    count = 0
    steps = 0
    nowhere = signed(0)  # a constant would have numba compile exchange() again
    b.done = 0
    if (end - 1) >> shift >= v.clusters:
        return -OUTSIDE
    while at < end and steps < ERASE_STEPS and count < EXTENTS:
        steps += 1
        index = at >> shift
        if load_u64(g.roots + 8 * (v.root + (index >> LEAF_BITS))) == 0:
            at = min(end, ((index | (LEAF_ENTRIES - 1)) + 1) << shift)
            continue
        entry = look_up(g, v, index)
        stop = min(end, (index + 1) << shift)
        if entry != 0:
            owned = entry >> PLACE_BITS == v.epoch
            whole = stop - at == 1 << shift
            result = 1
            if whole and (not owned or (b.free and not v.thick)):
                result = exchange(p, g, v, b.volume, index, entry, nowhere, LOG_FREE if owned else LOG_DROP)
            elif owned:
                count = add_extent(p, g, extents, count, entry, at & ((1 << shift) - 1), stop - at)
            elif not b.free:
                result = min(own(p, g, v, b.volume, index, entry), 0)  # and look again: it is owned then
            if result < 0:
                b.first = index
                b.clusters = 1
                return result
            if result == 0:
                continue
        at = stop
    b.done = at - b.offset
    return count


# ------------------------------------------------------------------------------------------------------ serving


@compiled
def answer(p: Any, at: int) -> int:
    """Do a block request: extents listed, or minus a WHY_*."""
    b = view(at, 1, BLOCK)[0]
    extents = at + BLOCK_EXTENTS
    if b.action == BLOCK_ERASE:
        return erase(p, b, extents)
    if b.action == BLOCK_COPY:
        b.own = OWN_MAKE
        count = locate(p, b, b.target, at + BLOCK_TARGETS)
        if count < 0:
            return count
        b.target_count = count
    b.own = OWN_MAKE if b.action == BLOCK_WRITE else OWN_NOT
    return locate(p, b, b.offset, extents)


@compiled
def serve(p: Any) -> int:
    """Do what is in the virtual queue from the asic, and answer into the other one; how much it was."""
    controllers = view(p.controllers, CONTROLLERS, CONTROLLER)
    count = 0
    while True:
        value = ring_peek(p.to_soc)
        if value < 0:
            return count
        ring_drop(p.to_soc)
        c = controllers[value >> 32]
        store_u64(p.serving, c.client)
        at = c.blocks + BLOCK_BYTES * (value & 0xFFFFFFFF)
        result = answer(p, at)
        view(at, 1, BLOCK)[0].count = result
        ring_push(p.from_soc, value)
        count += 1


# ------------------------------------------------------------------------------------ for control (dpu.volumes.area)


@compiled
def control_exchange(poller: int, group: int, volume: int, index: int, old: int, place: int, action: int) -> int:
    """As :func:`exchange`, for control's own area; data has been copied already."""
    p = view(poller, 1, POLLER)[0]
    g = view(group, 1, GROUP_LOCAL)[0]
    return exchange(p, g, view(volume, 1, VOLUME)[0], volume, index, old, place, action)


@compiled
def control_answer(poller: int, block: int) -> int:
    """As :func:`answer`, with control's own pool."""
    return answer(view(poller, 1, POLLER)[0], block)
