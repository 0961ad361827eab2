"""Words of shared memory: both forms of each function agree, and the compiled loop really has the atomics.

The generated code is looked at: a plain load in a waiting loop is hoisted, plain stores are merged, and without
the fence a poller sleeps through a doorbell; no run on one machine shows any of that for sure.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

from dpu import layout
from dpu.fastpath import asic, atomics
from dpu.fastpath.jit import JIT
from tests.unit.asic_lab import Kept, Lab

compiled_only = pytest.mark.skipif(not JIT, reason="nothing is compiled in this run")

WORDS = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x1_0000_0000, (1 << 63) - 1, -1, -(1 << 63), -5]


def wrap(function: Callable[..., Any], arguments: str) -> Any:
    """`function` called from compiled code."""
    scope = {"function": function}
    exec(f"def call({arguments}): return function({arguments})", scope)
    return numba.njit(scope["call"])


NAMES = {
    "load_u32": "a",
    "load_u64": "a",
    "store_u32": "a, b",
    "store_u64": "a, b",
    "swap_u64": "a, b, c",
    "add_u64": "a, b",
    "signed": "a",
    "bit_length": "a",
    "copy": "a, b, c",
    "fence": "",
    "pause": "",
    "ticks": "",
}
COMPILED = {name: wrap(getattr(atomics, name), arguments) for name, arguments in NAMES.items()}


@pytest.fixture(params=["compiled", "plain"])
def words(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param == "plain":
        return lambda name, *arguments: getattr(atomics, name)(*arguments)
    return lambda name, *arguments: COMPILED[name](*arguments)


@pytest.mark.parametrize("value", WORDS)
def test_loads_and_stores(words: Callable[..., Any], value: int) -> None:
    area = np.full(3, -1, np.int64)
    at = int(area.ctypes.data) + 8
    words("store_u64", at, value)
    assert area.tolist() == [-1, value, -1] and words("load_u64", at) == value
    area[1] = -1
    words("store_u32", at, value & 0xFFFFFFFF)
    assert words("load_u32", at) == value & 0xFFFFFFFF, "zero-extended"
    assert words("load_u32", at + 4) == 0xFFFFFFFF, "32 bits only"
    assert area.tolist()[::2] == [-1, -1]


@pytest.mark.parametrize("value", WORDS)
def test_swap_and_add(words: Callable[..., Any], value: int) -> None:
    area = np.full(3, -1, np.int64)
    at = int(area.ctypes.data) + 8
    area[1] = 7
    assert not words("swap_u64", at, 8, value) and area[1] == 7
    assert words("swap_u64", at, 7, value) and area[1] == value
    assert words("add_u64", at, 5) == value
    assert area.tolist() == [-1, (value + 5 + (1 << 63)) % (1 << 64) - (1 << 63), -1]


def test_adds_of_two_threads_are_all_there() -> None:
    area = np.zeros(1, np.int64)
    at = int(area.ctypes.data)

    def add() -> None:
        for _ in range(10_000):
            COMPILED["add_u64"](at, 3)

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert area[0] == 60_000


def test_numbers(words: Callable[..., Any]) -> None:
    for value in (0, 1, 2, 3, 255, 256, (1 << 40) - 1, 1 << 40, (1 << 62) + 1):
        assert words("bit_length", value) == value.bit_length()
    for narrow in (np.uint8(255), np.uint16(65535), np.uint32(0xFFFFFFFF), np.int64(-1)):
        assert words("signed", narrow) == int(narrow)
    assert words("signed", np.uint64((1 << 64) - 2)) == -2
    first, second = words("ticks"), words("ticks")
    assert 0 < first <= second
    words("fence")
    words("pause")


@pytest.mark.parametrize("count", [0, 1, 7, 64, 4096])
def test_copy(words: Callable[..., Any], count: int) -> None:
    source = np.arange(8192, dtype=np.uint32).view(np.uint8)[:8192].copy()
    target = np.full(8192, 0xC5, np.uint8)
    words("copy", int(target.ctypes.data) + 3, int(source.ctypes.data) + 5, count)
    assert (target[3 : 3 + count] == source[5 : 5 + count]).all()
    assert (target[:3] == 0xC5).all() and (target[3 + count :] == 0xC5).all()


def test_view_is_the_memory_itself() -> None:
    """As plain Python; the compiled form is what every other test uses."""
    area = np.zeros(4, layout.SEGMENT)
    records = atomics.view(int(area.ctypes.data) + 16, 2, layout.SEGMENT)
    assert len(records) == 2
    records[1].host = 77
    assert area["host"].tolist() == [0, 0, 77, 0]


@pytest.mark.parametrize("dtype", [getattr(layout, name) for name in dir(layout) if name.isupper()])
def test_plain_python_reads_every_field(dtype: Any) -> None:
    """numpy's own attributes (size, flags, data ...) would hide fields of these names."""
    if not isinstance(dtype, np.dtype) or dtype.names is None:
        return
    record = atomics.view(int(np.zeros(1, dtype).ctypes.data), 1, dtype)[0]
    for name in dtype.names:
        assert not hasattr(np.void, name), f"{name} is a name of numpy's"
        assert getattr(record, name) is not None


# ----------------------------------------------------------------------------------------------- generated code


def lower(function: Any, *types: Any) -> tuple[str, str]:
    """LLVM's optimized code and the assembly of a function compiled here and now (a cached one has none)."""
    fresh = numba.njit(nogil=True)(function.py_func)
    fresh.compile(types)
    (signature,) = fresh.signatures
    code = str(fresh.inspect_llvm(signature))
    body = re.search(rf"^define [^\n]*{function.__name__}B[^\n]*\{{\n(.*?)^\}}", code, re.M | re.S)
    assert body
    return body[1], str(fresh.inspect_asm(signature))


@pytest.fixture(scope="module")
def loop() -> tuple[str, str, str]:
    fresh = numba.njit(nogil=True)(asic.run.py_func)  # type: ignore[attr-defined]
    fresh.compile((numba.int64,))
    (signature,) = fresh.signatures
    code = str(fresh.inspect_llvm(signature))
    body = re.search(r"^define [^\n]*asic3runB[^\n]*\{\n(.*?)^\}", code, re.M | re.S)
    assert body
    return code, body[1], str(fresh.inspect_asm(signature))


@compiled_only
def test_the_loop_has_its_atomics(loop: tuple[str, str, str]) -> None:
    code, _, assembly = loop
    for wanted in (
        r"load atomic i32, ptr [^,]+ acquire, align 4",
        r"load atomic i64, ptr [^,]+ acquire, align 8",
        r"store atomic i32 [^,]+, ptr [^,]+ release, align 4",
        r"store atomic i64 [^,]+, ptr [^,]+ release, align 8",
        r"fence seq_cst",
        r"llvm.x86.sse2.pause",
    ):
        assert re.search(wanted, code), wanted
    assert re.search(r"\bmfence\b|lock\s+orl?", assembly), "the fence was optimized away"


@compiled_only
def test_the_stop_word_is_read_in_every_round(loop: tuple[str, str, str]) -> None:
    """Its load is in a block that the loop comes back to, so it was not hoisted."""
    _, body, _ = loop
    home = {
        name
        for name, text in blocks(body).items()
        for value in re.findall(r"(%[\w.]+) = load atomic i64[^\n]*acquire", text)
        if re.search(rf"icmp eq i64 {re.escape(value)}, 0\n", text)
    }
    assert home, "no load of the stop word"
    targets = {label for text in blocks(body).values() for label in re.findall(r"label %([\w.$-]+)", text)}
    assert home & targets, "nothing jumps back to the load of the stop word"


def blocks(body: str) -> dict[str, str]:
    """The basic blocks of a function by their labels."""
    return dict(re.findall(r"^([\w.$-]+):[^\n]*\n((?:  [^\n]*\n)*)", body, re.M))


@compiled_only
def test_event_indices_are_stored_before_the_fence_and_shadows_loaded_after() -> None:
    """set_armed ends with the fence: a pass that looks again cannot be moved before the stores."""
    with Kept() as kept, Lab(kept) as lab:
        body, _ = lower(asic.set_armed, numba.typeof(lab.poller.record), numba.boolean)
    assert "store atomic i32" in body
    ends = [text for text in blocks(body).values() if "  ret i32" in text]
    assert len(ends) == 1 and "fence seq_cst" in ends[0], "a way out without the fence"
    assert "store atomic" not in ends[0][ends[0].index("fence seq_cst") :]


@compiled_only
def test_completion_words_are_two_releases_the_phase_last() -> None:
    """64-bit stores: the first word, then the one with the phase at +8, then the queue's count, then the entry."""
    with Kept() as kept, Lab(kept) as lab:
        plane = lab.plane
        arguments = (lab.poller.record, plane.record, 1, plane.inflight[0], plane.cqs[1], plane.locals[1])
        body, _ = lower(asic.write_completion, *(numba.typeof(one) for one in arguments))
    entry = {name: layout.offset_of(layout.INFLIGHT, name) for name in ("cqe_low", "cqe_high")}

    def source(value: str) -> int:
        """Offset in the in-flight entry that a value was loaded from."""
        pointer = re.search(rf"{re.escape(value)} = load i64, ptr (%[\w.]+)", body)
        assert pointer, f"{value} is no plain load"
        offset = re.search(rf"{re.escape(pointer[1])} = getelementptr[^\n]*%arg.entry, i64 (\d+)", body)
        assert offset, f"{value} does not come from the entry"
        return int(offset[1])

    stores = re.findall(r"store atomic i64 (\S+), ptr (%[\w.]+) release, align 8", body)
    assert [source(value) for value, _ in stores[:2]] == [entry["cqe_low"], entry["cqe_high"]]
    low, high = (re.search(rf"{re.escape(pointer)} = inttoptr i64 (%[\w.]+)", body) for _, pointer in stores[:2])
    assert low and high
    assert re.search(rf"{re.escape(high[1])} = add (?:\w+ )*i64 {re.escape(low[1])}, 8\b", body), "not one CQE"
    assert [value for value, _ in stores[2:]].count("0") == 1, "the entry is freed once, after the completion"
    pointers = "|".join(re.escape(pointer) for _, pointer in stores[:2])
    assert not re.search(rf"store i\d+ [^\n]*(?:{pointers})\b", body), "a plain store"


@compiled_only
def test_an_entry_is_marked_before_the_queue_moves() -> None:
    """FETCHED is released after the copy of the SQE and before the count of fetched commands."""
    with Kept() as kept, Lab(kept) as lab:
        body, _ = lower(
            asic.serve_queue, numba.typeof(lab.poller.record), numba.typeof(lab.plane.record), numba.int64
        )
    copy = re.search(r"llvm.memcpy[^\n]*i64 64,", body)
    marked = re.search(rf"store atomic i64 {layout.FETCHED}, ptr [^\n]* release", body)
    assert copy and marked and copy.start() < marked.start()
    following = re.search(r"store atomic i64 (%[\w.]+), ptr [^\n]* release", body[marked.end() :])
    assert following and re.search(rf"{re.escape(following[1])} = add [^\n]*, 1\n", body)
