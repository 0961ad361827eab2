"""The functions of the asic stage, one by one, against naive models; compiled and as plain Python.

The parameter `engine`: "product" is dpu.fastpath.asic as imported (compiled, or plain in a run with
NUMBA_DISABLE_JIT=1, see test_asic_nojit.py), "plain" the same source loaded without the compiler.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpu import layout
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import PAGE
from tests.unit import asic_lab
from tests.unit.asic_lab import (
    ENGINES,
    MEMORY_BYTES,
    NS_4K,
    NS_MEMORY,
    NS_NULL,
    UNIT,
    GuestSq,
    Kept,
    Lab,
)

BLOCKS = MEMORY_BYTES // UNIT
READ_ONLY, WRITE_ONLY, BOTH = 1, 2, 3
MDTS_BYTES = 256 << 10
FUA = 1 << 14  # in bits 31:16 of CDW12


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Any:
    return ENGINES[request.param]


@pytest.fixture
def kept() -> Iterator[Kept]:
    with Kept() as kept:
        yield kept
        kept.ram.check_canaries()


@pytest.fixture
def lab(kept: Kept, engine: Any) -> Iterator[Lab]:
    with Lab(kept, engine) as lab:
        yield lab.begin()


def address(array: Any) -> int:
    return int(array.ctypes.data)


# ------------------------------------------------------------------------------------------------------- rings


def ring() -> Any:
    return np.zeros(layout.RING_BYTES, np.uint8)


def test_ring_keeps_order_and_is_empty_or_full_where_it_should_be(engine: Any) -> None:
    area = ring()
    at = address(area)
    assert engine.ring_peek(at) == -1
    for value in range(layout.RING_ENTRIES):
        assert engine.ring_push(at, value)
    assert not engine.ring_push(at, 12345)
    for value in range(layout.RING_ENTRIES):
        assert engine.ring_peek(at) == value
        assert engine.ring_peek(at) == value  # looking takes nothing
        engine.ring_drop(at)
    assert engine.ring_peek(at) == -1


@pytest.mark.parametrize("start", [0, layout.RING_ENTRIES - 3, 5 * layout.RING_ENTRIES + 1])
def test_ring_is_a_queue(engine: Any, start: int) -> None:
    area = ring()
    at = address(area)
    area[layout.RING_HEAD : layout.RING_HEAD + 8].view(np.int64)[0] = start
    area[layout.RING_TAIL : layout.RING_TAIL + 8].view(np.int64)[0] = start
    dice, model = random.Random(start), []
    for value in range(3000):
        if dice.random() < 0.55:
            assert engine.ring_push(at, value)
            model.append(value)
        assert engine.ring_peek(at) == (model[0] if model else -1)
        if model and dice.random() < 0.5:
            engine.ring_drop(at)
            del model[0]


def test_ring_stays_inside_its_bytes(engine: Any) -> None:
    area = np.full(layout.RING_BYTES + 128, 0xC5, np.uint8)
    inner = area[64:-64]
    inner[:] = 0
    for value in range(layout.RING_ENTRIES + 10):
        engine.ring_push(address(inner), value)
    assert (area[:64] == 0xC5).all() and (area[-64:] == 0xC5).all()


# Plain integers wrap as compiled ones do.
WRAPPING = pytest.mark.filterwarnings("ignore:overflow encountered")

# --------------------------------------------------------------------------------------------- guest addresses

# Regions of the model: (iova, size, host, rights), sorted, with holes, touching neighbours and odd sizes.
regions_strategy = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6), st.sampled_from([READ_ONLY, WRITE_ONLY, BOTH])), max_size=8
)


def build_regions(parts: list[tuple[int, int, int]], base: int = 16) -> list[tuple[int, int, int, int]]:
    rows, at = [], base
    for number, (gap, size, rights) in enumerate(parts):
        at += 4 * gap
        rows.append((at, 4 * size, 100_000 * (number + 1), rights))
        at += 4 * size
    return rows


def naive_find(rows: list[tuple[int, int, int, int]], iova: int, size: int, rights: int) -> int:
    for start, length, host, have in rows:
        if start <= iova < start + length:
            fits = iova + size <= start + length and have & rights == rights
            return host + iova - start if fits else 0
    return 0


@WRAPPING
@pytest.mark.parametrize("name", list(ENGINES))
@settings(max_examples=60, deadline=None)
@given(parts=regions_strategy, hint=st.integers(0, 10), rights=st.sampled_from([READ_ONLY, WRITE_ONLY, BOTH]))
def test_dma_find_is_a_search(name: str, parts: list[tuple[int, int, int]], hint: int, rights: int) -> None:
    """Every address and size around every region, with any hint that a region table of before may have left."""
    engine, rows = ENGINES[name], build_regions(parts)
    table = np.zeros(max(len(rows), 1), layout.REGION)
    for i, row in enumerate(rows):
        table[i] = row
    controller = np.zeros(1, layout.CONTROLLER).view(np.recarray)
    local = np.zeros(1, layout.QUEUE_LOCAL).view(np.recarray)
    controller[0].dma, controller[0].dma_count = address(table), len(rows)
    end = rows[-1][0] + rows[-1][1] + 8 if rows else 40
    for iova in [*range(0, end, 3), -4, -(1 << 63), (1 << 63) - 1]:
        for size in (1, 4, 9, 1 << 40):
            local[0].region = hint
            found = engine.dma_find(controller[0], local[0], iova, size, rights)
            assert found == naive_find(rows, iova, size, rights), (rows, iova, size, hint)


def test_region_hint_of_a_table_that_has_shrunk(kept: Kept, engine: Any) -> None:
    """The hint of the old table names no region of the new one; what it named is not reachable any more."""
    with Lab(kept, engine) as lab:
        queue = lab.open_pair(1, 16)
        lab.begin()
        second = kept.ram.windows[1][0]
        assert queue.do(lab, nv.READ, prp1=second, cdw=[0, 0, 0]).status == nv.OK
        lab.plane.memory.unmap(second, kept.ram.windows[1][2])
        lab.plane._publish_dma()
        assert queue.do(lab, nv.READ, prp1=second, cdw=[0, 0, 0]).status == nv.DATA_TRANSFER_ERROR


# --------------------------------------------------------------------------------------------------- PRP walk


class Walk:
    """One `walk_prps` on a lab's guest memory, beside a naive one."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.ram = lab, lab.kept.ram
        self.out = np.zeros(layout.SEGMENTS + 2, layout.SEGMENT)
        self.local = np.zeros(1, layout.QUEUE_LOCAL).view(np.recarray)
        self.sqe = np.zeros(1, layout.SQE).view(np.recarray)
        self.regions = [(region.iova, region.size, region.host) for region in lab.plane.memory.regions]

    def host(self, iova: int) -> int:
        for base, size, host in self.regions:
            if base <= iova < base + size:
                return host + iova - base
        raise IndexError(iova)

    def mapped(self, iova: int, size: int) -> bool:
        return any(base <= iova and iova + size <= base + length for base, length, _ in self.regions)

    def product(self, prp1: int, prp2: int, length: int, rights: int = WRITE_ONLY) -> Any:
        self.out[:] = 0
        # The hosts' addresses are signed in the compiled stage.
        self.sqe[0].prp1, self.sqe[0].prp2 = signed(prp1), signed(prp2)
        out = address(self.out) + layout.SEGMENT.itemsize
        count = int(self.lab.engine.walk_prps(self.lab.plane.record, self.local[0], self.sqe[0], length, rights, out))
        assert not any(self.out[0]) and not any(self.out[-1]), "written outside the list"
        if count < 0:
            return -count & 0x7FF
        return [(int(host), int(size)) for host, size in self.out[1 : 1 + count].tolist()]

    def naive(self, prp1: int, prp2: int, length: int) -> Any:
        """Base 4.1.1, literally: the first page from PRP1, then PRP2 as page or as list."""
        pieces: list[tuple[int, int]] = []
        if prp1 % 4:
            return nv.PRP_OFFSET_INVALID
        pages = [(prp1, min(length, PAGE - prp1 % PAGE))]
        left = length - pages[0][1]
        bad = 0
        if 0 < left <= PAGE:
            pages.append((prp2, left))
            bad = nv.PRP_OFFSET_INVALID if prp2 % PAGE else 0
        elif left:
            at = prp2
            if at % 8:
                pages, left, bad = pages[:1], 0, nv.PRP_OFFSET_INVALID
            while left:
                in_page = (PAGE - at % PAGE) // 8
                if not self.mapped(at, 8 * in_page):
                    bad = nv.DATA_TRANSFER_ERROR
                    break
                raw = struct.unpack(f"<{in_page}Q", self.ram.view(at, 8 * in_page))
                needed = -(-left // PAGE)
                chained = needed > in_page
                for entry in raw[:-1] if chained else raw[:needed]:
                    if entry % PAGE:
                        bad = nv.PRP_OFFSET_INVALID
                        break
                    pages.append((entry, min(left, PAGE)))
                    left -= pages[-1][1]
                if bad or not chained:
                    break
                if raw[-1] % PAGE:
                    bad = nv.PRP_OFFSET_INVALID
                    break
                at = raw[-1]
        for iova, size in pages:
            if not self.mapped(iova, size):
                # What comes first decides; a bad entry later is not looked at.
                return nv.PRP_OFFSET_INVALID if iova % PAGE and iova != prp1 else nv.DATA_TRANSFER_ERROR
            if iova % PAGE and iova != prp1:
                return nv.PRP_OFFSET_INVALID
            host = self.host(iova)
            if pieces and sum(pieces[-1]) == host:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + size)
            else:
                pieces.append((host, size))
        return bad or pieces

    def check(self, prp1: int, prp2: int, length: int) -> None:
        wanted, found = self.naive(prp1, prp2, length), self.product(prp1, prp2, length)
        assert found == wanted, (hex(prp1), hex(prp2), length)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@pytest.fixture
def walk(lab: Lab) -> Walk:
    return Walk(lab)


def write_list(walk: Walk, at: int, entries: list[int]) -> None:
    walk.ram.view(at, 8 * len(entries))[:] = struct.pack(f"<{len(entries)}Q", *entries)


def test_walk_of_every_offset_and_length_in_one_and_two_pages(walk: Walk) -> None:
    first, second = walk.ram.alloc(PAGE), walk.ram.alloc(3 * PAGE) + 2 * PAGE
    for offset in [*range(64), 511, 512, 2048, *range(PAGE - 12, PAGE)]:
        for length in (4, 512, PAGE - offset, PAGE - offset + 4, PAGE, 2 * PAGE - offset):
            for prp2 in (second, second + 8, second + 2048, 0, first + PAGE):
                walk.check(first + offset, prp2, length)


@pytest.mark.parametrize("contiguous", [True, False])
def test_walk_of_lists_at_every_position(walk: Walk, contiguous: bool) -> None:
    """The list begins at any entry of its page, so it chains after any number of entries, or not at all."""
    dice = random.Random(int(contiguous))
    area = walk.ram.alloc(66 * PAGE)
    pages = [area + PAGE * i for i in range(66)]
    if not contiguous:
        dice.shuffle(pages)
    lists = [walk.ram.alloc(PAGE), walk.ram.alloc(2 * PAGE) + PAGE]
    for position in [0, 255, *range(446, 451), *range(494, 497), *range(505, 512)]:
        for length in (2 * PAGE + 4, 3 * PAGE, 17 * PAGE - 512, MDTS_BYTES):
            for offset in (0, 4, 2048, PAGE - 4):
                needed = -(-(length - (PAGE - offset)) // PAGE)
                if needed < 2:
                    continue
                room = 512 - position
                entries = pages[1 : 1 + needed]
                if needed > room:
                    write_list(walk, lists[0] + 8 * position, [*entries[: room - 1], lists[1]])
                    write_list(walk, lists[1], entries[room - 1 :])
                else:
                    write_list(walk, lists[0] + 8 * position, entries)
                found = walk.product(pages[0] + offset, lists[0] + 8 * position, length)
                assert found == walk.naive(pages[0] + offset, lists[0] + 8 * position, length)
                assert sum(size for _, size in found) == length


def test_walk_reads_no_list_entry_that_it_does_not_need(walk: Walk) -> None:
    """The entry behind the last one is not looked at; in a full page the last entry is data when it is the last."""
    pages, at = [walk.ram.alloc(PAGE) for _ in range(4)], walk.ram.alloc(PAGE)
    write_list(walk, at, [pages[1], pages[2], 0xDEAD_BEEF])
    walk.check(pages[0], at, 3 * PAGE)
    write_list(walk, at + PAGE - 16, [pages[1], pages[2]])
    walk.check(pages[0], at + PAGE - 16, 3 * PAGE)
    assert isinstance(walk.product(pages[0], at + PAGE - 16, 3 * PAGE), list)


def test_walk_of_list_pointers_between_entries(walk: Walk) -> None:
    pages, at = [walk.ram.alloc(PAGE) for _ in range(3)], walk.ram.alloc(PAGE)
    for shift in (0, 1, 2, 4, 7, 8, 12):
        walk.ram.view(at + shift, 16)[:] = struct.pack("<2Q", pages[1], pages[2])
        walk.check(pages[0], at + shift, 3 * PAGE)


def test_walk_of_lists_that_loop(walk: Walk) -> None:
    """A list page that chains to itself: its length bounds the walk."""
    data, at = walk.ram.alloc(PAGE), walk.ram.alloc(PAGE)
    write_list(walk, at, [data] * 511 + [at])
    for position in (0, 8 * 500, PAGE - 8):
        walk.check(data, at + position, MDTS_BYTES)
    write_list(walk, at, [at] * 512)
    walk.check(data, at + PAGE - 8, MDTS_BYTES)


def bad_addresses(walk: Walk) -> list[int]:
    base, _, size = walk.ram.windows[0]
    return [0, base - PAGE, base + size, 1 << 62, (1 << 63) - PAGE, 1 << 63, (1 << 64) - PAGE]


@WRAPPING
def test_walk_of_unmapped_addresses_anywhere(walk: Walk) -> None:
    good = [walk.ram.alloc(PAGE) for _ in range(6)]
    at = walk.ram.alloc(PAGE)
    for bad in bad_addresses(walk):
        walk.check(bad, 0, 512)
        walk.check(good[0], bad, 2 * PAGE)
        walk.check(good[0], bad, 3 * PAGE)
        for place in range(4):
            entries = list(good[1:5])
            entries[place] = bad
            write_list(walk, at, entries)
            walk.check(good[0], at, 5 * PAGE)
            write_list(walk, at, [*good[1:5][:place], good[0] + 8])
            walk.check(good[0], at, 5 * PAGE)
        write_list(walk, at + PAGE - 16, [good[1], bad])  # the chain leads nowhere
        walk.check(good[0], at + PAGE - 16, 5 * PAGE)
        write_list(walk, at + PAGE - 16, [good[1], good[2] + 8])  # or has an offset
        walk.check(good[0], at + PAGE - 16, 5 * PAGE)


def test_walk_across_the_end_of_a_region(walk: Walk) -> None:
    base, _, size = walk.ram.windows[0]
    last, at = base + size - PAGE, walk.ram.alloc(PAGE)
    walk.check(last + 4, 0, PAGE)
    walk.check(last, last + PAGE, 2 * PAGE)
    write_list(walk, at, [last, last + PAGE, last])
    walk.check(last, at, 4 * PAGE)
    # A list whose page is cut by the end of the map: regions need not be whole pages.
    odd = [(base, walk.ram.windows[0][1], 8 * PAGE + 16)]
    with Lab(walk.lab.kept, walk.lab.engine, windows=odd) as cut:
        other = Walk(cut)
        other.ram.view(base + 8 * PAGE, 16)[:] = struct.pack("<2Q", base, base + PAGE)
        assert other.product(base, base + 8 * PAGE, 3 * PAGE) == nv.DATA_TRANSFER_ERROR
        other.ram.view(base + 8 * PAGE - 16, 16)[:] = struct.pack("<2Q", base, base + 8 * PAGE)
        assert other.product(base, base + 8 * PAGE - 16, 4 * PAGE) == nv.DATA_TRANSFER_ERROR


@pytest.mark.parametrize("rights", [READ_ONLY, WRITE_ONLY, BOTH])
def test_walk_respects_the_rights_of_regions(kept: Kept, engine: Any, rights: int) -> None:
    with Lab(kept, engine, rights=rights) as lab:
        memory = kept.ram.alloc(4 * PAGE)
        sqe = np.zeros(1, layout.SQE).view(np.recarray)
        local = np.zeros(1, layout.QUEUE_LOCAL).view(np.recarray)
        out = np.zeros(layout.SEGMENTS, layout.SEGMENT)
        sqe[0].prp1, sqe[0].prp2 = memory, memory + PAGE
        for wanted in (READ_ONLY, WRITE_ONLY):
            for length in (PAGE, 2 * PAGE):
                count = engine.walk_prps(lab.plane.record, local[0], sqe[0], length, wanted, address(out))
                assert (count > 0) == bool(rights & wanted), (rights, wanted, length)
        kept.ram.view(memory + 2 * PAGE, 16)[:] = struct.pack("<2Q", memory, memory + PAGE)
        sqe[0].prp2 = memory + 2 * PAGE
        count = engine.walk_prps(lab.plane.record, local[0], sqe[0], 3 * PAGE, WRITE_ONLY, address(out))
        assert (count > 0) == (rights == BOTH)  # data is written, but the list has to be read


# --------------------------------------------------------------------------------------------------- histogram


def naive_bucket(ns: int) -> int:
    """Eight steps per octave: count buckets upward until the next one would begin above `ns`."""
    bucket = 0
    while bucket + 1 < layout.HISTOGRAM_BUCKETS and layout.bucket_floor_ns(bucket + 1) <= ns:
        bucket += 1
    return bucket


@pytest.mark.parametrize(
    "ns", [0, 1, 7, 8, 9, 15, 16, 17, 18, 31, 100, 127, 128, 1000, 4095, 4096, 10**6, 2**33 + 5, 2**40, 2**50]
)
def test_latency_falls_into_its_bucket(kept: Kept, ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`seen` is moved back by `ns` at a clock that stands still, which the compiled one cannot be made to do."""
    engine = asic_lab.PLAIN
    monkeypatch.setattr(engine, "ticks", lambda: 1 << 55)
    with Lab(kept, engine, stamps=True) as lab:
        queue = lab.open_pair(1, 16)
        lab.poller.record.ns_mult = 1 << 20
        queue.submit(nv.FLUSH)
        queue.ring()
        monkeypatch.setattr(engine, "execute", lambda p, c, slot, entry: delay(entry, ns))
        lab.begin().settle()
        assert [int(i) for i in np.nonzero(lab.plane.histograms[1])[0]] == [naive_bucket(min(ns, 2**40))]
        assert lab.plane.histograms.sum() == 1


def delay(entry: Any, ns: int) -> int:
    entry.seen = (1 << 55) - ns
    return 0


@pytest.mark.parametrize("ns", [-1, -8, -1000, -(1 << 40)])
def test_a_clock_that_goes_back_stores_nothing_outside(
    kept: Kept, engine: Any, ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lab(kept, engine, stamps=True) as lab:
        queue = lab.open_pair(1, 16)
        lab.poller.record.ns_mult = 1 << 20
        lab.begin()
        entry, sq = lab.plane.inflight[5], lab.plane.sqs[1]
        entry.sqid = 1
        entry.seen = entry.begun = (1 << 62) if ns == -(1 << 40) else 1 << 60
        before = bytes(lab.plane._state)
        engine.count_command(lab.poller.record, lab.plane.record, entry, sq, 0)
        after = bytes(lab.plane._state)
        changed = [i for i in range(0, len(before), 8) if before[i : i + 8] != after[i : i + 8]]
        histogram = layout.HISTOGRAM_OFFSET + 8 * layout.HISTOGRAM_BUCKETS
        of_sq = layout.SQ_OFFSET + layout.SQ.itemsize
        for at in changed:
            assert at == histogram or of_sq <= at < of_sq + layout.SQ.itemsize, at
        assert queue.submitted == 0


def test_bucket_floors_grow_and_are_within_an_eighth() -> None:
    floors = [layout.bucket_floor_ns(i) for i in range(layout.HISTOGRAM_BUCKETS)]
    assert floors == sorted(set(floors)) and floors[0] == 0
    assert all(high - low <= max(low // 8, 1) for low, high in itertools.pairwise(floors))
    assert floors[-1] < 1 << 41 and floors[-1] + floors[-1] // 8 >= 1 << 40


# ---------------------------------------------------------------------------------------- streams of commands


class Model:
    """What a guest may expect of a stream of I/O commands; blocks of 512 bytes in `disks`, by nsid."""

    SHIFT = {NS_MEMORY: 9, NS_NULL: 9, NS_4K: 12}

    def __init__(self) -> None:
        self.disks = {NS_MEMORY: bytearray(MEMORY_BYTES), NS_4K: bytearray(MEMORY_BYTES)}

    def blocks(self, nsid: int) -> int:
        return 1 << 40 if nsid == NS_NULL else MEMORY_BYTES >> self.SHIFT[nsid]

    def run(self, command: dict[str, Any], data: bytearray) -> int:
        """The status of a command whose PRPs lead to `data`, which a Read fills."""
        op, nsid = command["opcode"], command["nsid"]
        if command["flags"]:
            return nv.INVALID_FIELD
        if op == nv.FLUSH and nsid == 0xFFFFFFFF:
            return nv.OK
        if op not in (nv.FLUSH, nv.READ, nv.WRITE, nv.COMPARE, nv.WRITE_ZEROES, nv.DSM):
            return nv.INVALID_OPCODE
        if not 1 <= nsid <= asic_lab.NAMESPACES_MAX:
            return nv.INVALID_NAMESPACE
        if nsid not in self.SHIFT:
            return nv.INVALID_FIELD
        if op == nv.FLUSH:
            return nv.OK
        if op == nv.DSM:
            return self.deallocate(nsid, command, bytes(data))
        slba, blocks, shift = command["slba"], command["blocks"], self.SHIFT[nsid]
        if slba + blocks > self.blocks(nsid):
            return nv.LBA_OUT_OF_RANGE
        start, length = slba << shift, blocks << shift
        if op == nv.WRITE_ZEROES:
            if nsid in self.disks:
                self.disks[nsid][start : start + length] = bytes(length)
            return nv.OK
        if length > MDTS_BYTES:
            return nv.INVALID_FIELD
        if length > len(data):
            return nv.DATA_TRANSFER_ERROR
        if nsid == NS_NULL:
            return nv.OK
        disk = self.disks[nsid]
        if op == nv.READ:
            data[:length] = disk[start : start + length]
        elif op == nv.WRITE:
            disk[start : start + length] = data[:length]
        elif disk[start : start + length] != data[:length]:
            return nv.COMPARE_FAILURE
        return nv.OK

    def deallocate(self, nsid: int, command: dict[str, Any], raw: bytes) -> int:
        ranges = [struct.unpack_from("<IIQ", raw, 16 * i) for i in range(command["ranges"])]
        if any(slba + blocks > self.blocks(nsid) for _, blocks, slba in ranges):
            return nv.LBA_OUT_OF_RANGE
        if command["attributes"] & 4 and nsid in self.disks:
            for _, blocks, slba in ranges:
                start, end = slba << self.SHIFT[nsid], (slba + blocks) << self.SHIFT[nsid]
                self.disks[nsid][start:end] = bytes(end - start)
        return nv.OK


limits = [0, 1, 2, 255, 256, 2047, 2048, (1 << 32) - 1, 1 << 32, (1 << 40) - 1, 1 << 40, (1 << 63) - 1, 1 << 63]
lbas = st.one_of(
    st.integers(0, 300),
    st.sampled_from([*limits, (1 << 64) - 1, (1 << 64) - 2]),
    st.integers(BLOCKS - 20, BLOCKS + 4),
)


def whole_pages(command: dict[str, Any]) -> dict[str, Any]:
    """Its last page is mapped to its end, so all of it is behind the PRPs."""
    end = -(-(command["offset"] + command["size"]) // PAGE) * PAGE
    return command | {"size": end - command["offset"]}


commands_strategy = st.fixed_dictionaries(
    {
        "opcode": st.sampled_from([nv.READ, nv.WRITE, nv.COMPARE, nv.WRITE_ZEROES, nv.DSM, nv.FLUSH] * 3 + [3, 0x80]),
        "nsid": st.sampled_from([NS_MEMORY] * 6 + [NS_4K] * 4 + [NS_NULL, 0, 5, 8, 9, 0xFFFFFFFE, 0xFFFFFFFF]),
        "flags": st.sampled_from([0] * 12 + [1, 0x40, 0x80]),
        "slba": lbas,
        "blocks": st.sampled_from([1, 1, 2, 7, 8, 9, 16, 64, 100, 512, 513, 65536]),
        "ranges": st.integers(1, 4),
        "attributes": st.sampled_from([4, 4, 7, 0, 2]),
        "offset": st.sampled_from([0, 0, 4, 512, 2048, PAGE - 4]),
        "size": st.sampled_from([PAGE, 2 * PAGE, 3 * PAGE, 40 * PAGE, MDTS_BYTES]),  # of the memory behind the PRPs
        "seed": st.integers(0, 1 << 16),
    }
).map(whole_pages)


def lay_out(kept: Kept, command: dict[str, Any], dice: random.Random) -> tuple[int, int, list[int]]:
    """PRPs of a scattered buffer: PRP1, PRP2, its pages. What is behind the buffer is not mapped."""
    # Taken from the same few pages again and again: commands that are done with them leave their bytes there.
    base = kept.ram.windows[0][0] + (128 << 10)
    pages = [base + PAGE * i for i in range(70)]
    dice.shuffle(pages)
    count = -(-(command["offset"] + command["size"]) // PAGE)
    mine = pages[:count]
    prp1 = mine[0] + command["offset"]
    if count == 1:
        return prp1, 0, mine
    needed = wanted_bytes(command) - (PAGE - command["offset"])
    if needed <= PAGE:
        return prp1, mine[1], mine
    at = base + 80 * PAGE
    entries = [*mine[1:], 0][:66]
    kept.ram.view(at, 8 * len(entries))[:] = struct.pack(f"<{len(entries)}Q", *entries)
    kept.ram.view(at + 8 * len(entries), PAGE - 8 * len(entries))[:] = bytes(PAGE - 8 * len(entries))
    return prp1, at, mine


def wanted_bytes(command: dict[str, Any]) -> int:
    if command["opcode"] == nv.DSM:
        return 16 * int(command["ranges"])
    return int(command["blocks"]) << Model.SHIFT.get(command["nsid"], 9)


def gather(kept: Kept, command: dict[str, Any], pages: list[int]) -> bytearray:
    whole = b"".join(bytes(kept.ram.view(page, PAGE)) for page in pages)
    return bytearray(whole[command["offset"] :][: command["size"]])


def fill_buffer(
    kept: Kept, command: dict[str, Any], pages: list[int], model: Model, dice: random.Random
) -> bytearray:
    """Random bytes; for Compare mostly what is there; for Dataset Management ranges."""
    data = bytearray(dice.randbytes(command["size"]))
    if command["opcode"] == nv.DSM:
        for i in range(command["ranges"]):
            slba = dice.choice([dice.randrange(200), command["slba"]]) & (1 << 64) - 1
            struct.pack_into("<IIQ", data, 16 * i, 7, dice.choice([0, 1, 8, 130, 200]), slba)
    if command["opcode"] == nv.COMPARE and command["nsid"] in model.disks and dice.random() < 0.7:
        start = command["slba"] << Model.SHIFT[command["nsid"]]
        there = model.disks[command["nsid"]][start : start + len(data)]
        data[: len(there)] = there
    if command["opcode"] == nv.COMPARE and dice.random() < 0.2:
        data[min(wanted_bytes(command), len(data)) - 1] ^= 1
    at = command["offset"]
    for i, page in enumerate(pages):
        piece = bytes(data[max(0, PAGE * i - at) : PAGE * (i + 1) - at])
        start = at if i == 0 else 0
        kept.ram.view(page + start, len(piece))[:] = piece
    return data


@WRAPPING
@settings(max_examples=60, deadline=None)
@given(stream=st.lists(commands_strategy, min_size=1, max_size=12), entries=st.integers(2, 5))
def test_streams_do_what_the_model_does(stream: list[dict[str, Any]], entries: int) -> None:
    """The same stream through both engines: status, data on disk and in guest memory are the model's, and all that
    is kept of the two labs is equal byte for byte."""
    kept_bytes = []
    for engine in ENGINES.values():
        with Kept() as kept, Lab(kept, engine) as lab:
            queue, model = lab.open_pair(1, entries), Model()
            lab.begin()
            for number, command in enumerate(stream):
                run_one(kept, lab, queue, model, command, number)
            for nsid, disk in model.disks.items():
                assert kept.disk(nsid) == disk
            sq, cq = lab.plane.sqs[1], lab.plane.cqs[1]
            assert sq.fetched == cq.posted == sq.commands == len(stream)
            assert lab.plane.record.free_count == layout.SLOTS and not lab.plane.inflight.state.any()
            kept.ram.check_canaries()
            kept_bytes.append((bytes(lab.plane._state), bytes(kept.ram.map), lab.plane.locals.cq_tail.tolist()))
    assert kept_bytes[0] == kept_bytes[1]


def run_one(kept: Kept, lab: Lab, queue: GuestSq, model: Model, command: dict[str, Any], number: int) -> None:
    dice = random.Random(command["seed"])
    prp1, prp2, pages = lay_out(kept, command, dice)
    data = fill_buffer(kept, command, pages, model, dice)
    if command["opcode"] == nv.DSM:
        cdw = [command["ranges"] - 1, command["attributes"]]
    else:
        cdw = [command["slba"] & 0xFFFFFFFF, command["slba"] >> 32, command["blocks"] - 1]
    before = bytearray(data)
    wanted = model.run(command, data)
    fields = {"nsid": command["nsid"], "flags": command["flags"]}
    done = queue.do(lab, command["opcode"], cid=(number * 4099) & 0xFFFF, prp1=prp1, prp2=prp2, cdw=cdw, **fields)
    assert (done.status, done.sqid, done.dw0) == (wanted, 1, 0), command
    assert done.sqhd == queue.tail
    assert done.dnr == bool(wanted)
    assert kept.interrupts(1) == 1
    if wanted == nv.DATA_TRANSFER_ERROR:
        data = before  # nothing is moved before all of it was found
    assert gather(kept, command, pages) == data
