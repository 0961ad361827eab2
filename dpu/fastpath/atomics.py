"""Words of shared memory, memory order and system calls for code that runs compiled or as plain Python.

Every function takes addresses as integers. Each has two forms with one name: a ctypes one that plain Python calls
(x86-64 keeps its loads and stores in order, so a plain access is an acquire or a release there) and an LLVM one
that numba puts in its place. Values are returned as signed 64-bit integers; narrower words are zero-extended.

Words that another thread, another process or the guest may change are only touched through this module: a plain
load in a waiting loop is hoisted out of it by LLVM, and repeated plain stores are merged.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from dpu.fastpath.jit import JIT

_FENCE = threading.Lock()  # taking and leaving a lock is a full barrier
_ATOMIC = threading.Lock()  # for plain Python's threads
_BYTE_POINTER = ir.IntType(8).as_pointer()


def _load(bits: int, order: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(bits)
            pointer = builder.inttoptr(args[0], word.as_pointer())
            value = builder.load_atomic(pointer, order, bits // 8)
            return builder.zext(value, ir.IntType(64)) if bits < 64 else value

        return types.int64(types.int64), codegen

    return load


def _store(bits: int, order: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(bits)
            pointer = builder.inttoptr(args[0], word.as_pointer())
            narrow = builder.trunc(args[1], word) if bits < 64 else args[1]
            builder.store_atomic(narrow, pointer, order, bits // 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


def _no_argument(emit: Callable[[Any], Any], result: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def run(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = emit(builder)
            return context.get_dummy_value() if result is types.void else value

        return result(), codegen

    return run


def _emit_fence(builder: Any) -> None:
    builder.fence("seq_cst")


def _emit_pause(builder: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])


def _emit_ticks(builder: Any) -> Any:
    kind = ir.FunctionType(ir.IntType(64), [])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])


_load_u32, _load_u64 = _load(32, "acquire"), _load(64, "acquire")
_store_u32, _store_u64 = _store(32, "release"), _store(64, "release")
_fence, _pause = _no_argument(_emit_fence, types.void), _no_argument(_emit_pause, types.void)
_ticks = _no_argument(_emit_ticks, types.int64)


@intrinsic  # type: ignore[untyped-decorator]
def _bit_length(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(ir.IntType(64), 64), zeros)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _copy(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, origin = (builder.inttoptr(a, _BYTE_POINTER) for a in args[:2])
        cgutils.raw_memcpy(builder, to, origin, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for_reading, keep, data = word(0), word(3), word(1)
        builder.call(function, [builder.inttoptr(args[0], pointer), for_reading, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _swap_u64(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        pair = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _add_u64(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


def load_u32(address: int) -> int:
    """Acquire-load of a 32-bit word."""
    return int(ctypes.c_uint32.from_address(int(address)).value)


def load_u64(address: int) -> int:
    """Acquire-load of a 64-bit word (as signed)."""
    return int(ctypes.c_int64.from_address(int(address)).value)


def store_u32(address: int, value: int) -> None:
    """Release-store of a 32-bit word."""
    ctypes.c_uint32.from_address(int(address)).value = int(value)


def store_u64(address: int, value: int) -> None:
    """Release-store of a 64-bit word."""
    ctypes.c_int64.from_address(int(address)).value = int(value)


def swap_u64(address: int, expected: int, value: int) -> bool:
    """Store ``value`` if the word is ``expected``, in one step; whether it was."""
    with _ATOMIC:
        if load_u64(address) != expected:
            return False
        store_u64(address, value)
        return True


def add_u64(address: int, value: int) -> int:
    """Add to a 64-bit word in one step; what it was before."""
    with _ATOMIC:
        before = load_u64(address)
        store_u64(address, signed(before + value))
        return before


def fence() -> None:
    """Sequentially consistent fence: stores before it are seen before loads after it are done."""
    with _FENCE:
        pass


def pause() -> None:
    """Tell the processor that this is a waiting loop."""


def prefetch(address: int) -> None:
    """Have the processor read a line into its cache; any address will do."""


def ticks() -> int:
    """The processor's time stamp counter; its rate is :func:`ticks_per_second`'s."""
    return time.perf_counter_ns()


def bit_length(value: int) -> int:
    """Number of bits of a positive number; 0 for 0."""
    return int(value).bit_length()


def signed(value: int) -> int:
    """``value`` modulo 2^64 as a signed number; unsigned fields are taken through it before arithmetic."""
    return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)


def copy(target: int, source: int, count: int) -> None:
    """Copy ``count`` bytes between areas that do not overlap."""
    ctypes.memmove(int(target), int(source), int(count))


def view(address: int, count: int, dtype: np.dtype[Any]) -> Any:
    """``count`` records of ``dtype`` at ``address``, as an array whose elements have the fields as attributes."""
    size = int(count) * dtype.itemsize
    buffer = (ctypes.c_char * size).from_address(int(address))
    return np.frombuffer(memoryview(buffer).cast("B"), dtype).view(np.recarray)


if JIT:
    overload(load_u32)(lambda address: lambda address: _load_u32(address))
    overload(load_u64)(lambda address: lambda address: _load_u64(address))
    overload(store_u32)(lambda address, value: lambda address, value: _store_u32(address, value))
    overload(store_u64)(lambda address, value: lambda address, value: _store_u64(address, value))
    overload(swap_u64)(
        lambda address, expected, value: lambda address, expected, value: _swap_u64(address, expected, value)
    )
    overload(prefetch)(lambda address: lambda address: _prefetch(address))
    overload(add_u64)(lambda address, value: lambda address, value: _add_u64(address, value))
    overload(fence)(lambda: lambda: _fence())
    overload(pause)(lambda: lambda: _pause())
    overload(ticks)(lambda: lambda: _ticks())
    overload(bit_length)(lambda value: lambda value: _bit_length(value))
    overload(signed)(lambda value: lambda value: np.int64(value))
    overload(copy)(lambda target, source, count: lambda target, source, count: _copy(target, source, count))
    overload(view)(
        lambda address, count, dtype: lambda address, count, dtype: carray(_pointer(address), count, dtype)
    )
