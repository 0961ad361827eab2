"""eBPF programs written in Python: a thin builder over llvmlite's IR, compiled by the BPF target inside its wheel.

A program is a function of one context pointer. Values are 64-bit unsigned unless a width is given; pointers are byte
pointers. What is built straight-line is all there is: the verifier wants loops unrolled, so unroll them in Python.

Use::

    p = Program("count")
    record = p.lookup(ports_fd, p.key32(p.context(SkBuff.ifindex)))
    with p.if_(p.eq(record, 0)):
        p.ret(TC_OK)
    p.count(record, 16)
    p.ret(TC_OK)
    code = p.compile()

Limits: 512 bytes of stack for all ``slot`` together; loads and stores must be aligned to their width.
Errors: NetError when the LLVM at hand has no BPF target; the verifier's come from net.ebpf.kernel.
Source: Linux include/uapi/linux/bpf.h (helper numbers, __sk_buff); RFC 9669 (instruction set).
"""

from __future__ import annotations

import contextlib
import enum
import struct
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from net.errors import NetError

CPU = "v3"
"""Instruction set with compare-and-exchange: Linux 5.12."""

PSEUDO_MAP_FD = 1
"""What the source register of a 64-bit load says where its value is a map's descriptor."""

_BYTE_POINTER = ir.IntType(8).as_pointer()


class SkBuff(enum.IntEnum):
    """Offsets in struct __sk_buff."""

    length = 0
    mark = 8
    protocol = 16
    priority = 32
    ifindex = 40


class Helper(enum.IntEnum):
    """Helper functions by number."""

    MAP_LOOKUP_ELEM = 1
    MAP_UPDATE_ELEM = 2
    KTIME_GET_NS = 5
    GET_PRANDOM_U32 = 7
    SKB_STORE_BYTES = 9
    CLONE_REDIRECT = 13
    REDIRECT = 23
    SKB_LOAD_BYTES = 26
    SKB_CHANGE_TAIL = 38
    RINGBUF_RESERVE = 131
    RINGBUF_SUBMIT = 132


class Program:
    """One program under construction."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._module = ir.Module(name)
        self._module.triple = "bpf"
        function = ir.Function(self._module, ir.FunctionType(ir.IntType(32), [_BYTE_POINTER]), name)
        self._context = function.args[0]
        self._entry = function.append_basic_block("entry")
        self._b = ir.IRBuilder(self._entry)
        word = ir.IntType(64)
        self._pseudo = ir.Function(self._module, ir.FunctionType(word, [word, word]), "llvm.bpf.pseudo")

    # Values.

    def value(self, value: Any, bits: int = 64) -> Any:
        """An integer, or a value of another width or a pointer, as ``bits`` bits."""
        if not isinstance(value, ir.Value):
            return ir.Constant(ir.IntType(bits), value)
        if isinstance(value.type, ir.PointerType):
            return self._b.ptrtoint(value, ir.IntType(bits))
        if value.type.width == bits:
            return value
        change = self._b.zext if value.type.width < bits else self._b.trunc
        return change(value, ir.IntType(bits))

    def _binary(self, operation: Any, left: Any, right: Any) -> Any:
        return operation(self.value(left), self.value(right))

    def add(self, left: Any, right: Any) -> Any:
        return self._binary(self._b.add, left, right)

    def sub(self, left: Any, right: Any) -> Any:
        return self._binary(self._b.sub, left, right)

    def mul(self, left: Any, right: Any) -> Any:
        return self._binary(self._b.mul, left, right)

    def mod(self, left: Any, right: Any) -> Any:
        return self._binary(self._b.urem, left, right)

    def shl(self, left: Any, right: Any) -> Any:
        return self._binary(self._b.shl, left, right)

    def shr(self, left: Any, right: Any) -> Any:
        return self._binary(self._b.lshr, left, right)

    def and_(self, left: Any, right: Any) -> Any:
        return self._binary(self._b.and_, left, right)

    def or_(self, left: Any, right: Any) -> Any:
        return self._binary(self._b.or_, left, right)

    def xor(self, left: Any, right: Any) -> Any:
        return self._binary(self._b.xor, left, right)

    def eq(self, left: Any, right: Any) -> Any:
        return self._b.icmp_unsigned("==", self.value(left), self.value(right))

    def ne(self, left: Any, right: Any) -> Any:
        return self._b.icmp_unsigned("!=", self.value(left), self.value(right))

    def lt(self, left: Any, right: Any) -> Any:
        return self._b.icmp_unsigned("<", self.value(left), self.value(right))

    def gt(self, left: Any, right: Any) -> Any:
        return self._b.icmp_unsigned(">", self.value(left), self.value(right))

    def bit(self, mask: Any, number: Any) -> Any:
        """Whether bit ``number`` of ``mask`` is set."""
        return self.ne(self.and_(self.shr(mask, number), 1), 0)

    def both(self, *conditions: Any) -> Any:
        """All of them."""
        result = conditions[0]
        for condition in conditions[1:]:
            result = self._b.and_(result, condition)
        return result

    def select(self, condition: Any, yes: Any, no: Any) -> Any:
        return self._b.select(condition, self.value(yes), self.value(no))

    def minus_or_0(self, left: Any, right: Any) -> Any:
        """``left - right``, or 0 where that is negative."""
        return self.select(self.gt(left, right), self.sub(left, right), 0)

    # Memory.

    def at(self, pointer: Any, offset: Any) -> Any:
        return self._b.gep(pointer, [self.value(offset)])

    def load(self, pointer: Any, offset: Any = 0, bits: int = 64) -> Any:
        return self._b.load(self._b.bitcast(self.at(pointer, offset), ir.IntType(bits).as_pointer()))

    def store(self, pointer: Any, value: Any, offset: Any = 0, bits: int = 64) -> None:
        place = self._b.bitcast(self.at(pointer, offset), ir.IntType(bits).as_pointer())
        self._b.store(self.value(value, bits), place)

    def slot(self, size_bytes: int) -> Any:
        """Zeroed memory on the stack, aligned to 8."""
        words = -(-size_bytes // 8)
        with self._b.goto_entry_block():
            area = self._b.bitcast(self._b.alloca(ir.ArrayType(ir.IntType(64), words)), _BYTE_POINTER)
        for word in range(words):
            self.store(area, 0, 8 * word)
        return area

    def context(self, offset: int) -> Any:
        """A 32-bit field of the context."""
        return self.load(self._context, offset, 32)

    def set_context(self, offset: int, value: Any) -> None:
        self.store(self._context, value, offset, 32)

    def count(self, pointer: Any, offset: int, amount: Any = 1) -> None:
        """Adds atomically to a 64-bit word."""
        place = self._b.bitcast(self.at(pointer, offset), ir.IntType(64).as_pointer())
        self._b.atomic_rmw("add", place, self.value(amount), "monotonic")

    def exchange(self, pointer: Any, offset: int, expected: Any, new: Any) -> Any:
        """Compare-and-exchange of a 64-bit word; whether it was done."""
        place = self._b.bitcast(self.at(pointer, offset), ir.IntType(64).as_pointer())
        pair = self._b.cmpxchg(place, self.value(expected), self.value(new), "monotonic", "monotonic")
        return self._b.extract_value(pair, 1)

    # Calls and control.

    def call(self, helper: Helper, *arguments: Any) -> Any:
        """The helper's 64-bit result. Pointers stay pointers; ``SKB`` helpers get the context by themselves."""
        passed = [one if _is_pointer(one) else self.value(one) for one in arguments]
        kind = ir.FunctionType(ir.IntType(64), [one.type for one in passed])
        return self._b.call(self._b.inttoptr(self.value(int(helper)), kind.as_pointer()), passed)

    def skb_call(self, helper: Helper, *arguments: Any) -> Any:
        """A helper whose first argument is the packet."""
        return self.call(helper, self._context, *arguments)

    def pointer(self, value: Any) -> Any:
        """A helper's result as a pointer."""
        return self._b.inttoptr(value, _BYTE_POINTER)

    def map(self, fd: int) -> Any:
        """A map, as helpers take it."""
        number = self._b.call(self._pseudo, [self.value(PSEUDO_MAP_FD), self.value(fd)])
        return self._b.inttoptr(number, _BYTE_POINTER)

    def lookup(self, fd: int, key: Any) -> Any:
        """The value of a map under the key at ``key``; 0 where there is none, which must be tested."""
        return self.pointer(self.call(Helper.MAP_LOOKUP_ELEM, self.map(fd), key))

    def key32(self, value: Any) -> Any:
        """A 32-bit key on the stack."""
        key = self.slot(4)
        self.store(key, value, 0, 32)
        return key

    @contextlib.contextmanager
    def if_(self, condition: Any) -> Iterator[None]:
        """What is built inside runs where ``condition`` holds; it may end in ``ret``."""
        with self._b.if_then(condition):
            yield

    @contextlib.contextmanager
    def if_else(self, condition: Any) -> Iterator[tuple[Any, Any]]:
        """Two context managers: where it holds, and where not."""
        with self._b.if_else(condition) as branches:
            yield branches

    def ret(self, value: Any) -> None:
        self._b.ret(self.value(value, 32))

    def compile(self) -> bytes:
        """The instructions."""
        try:
            llvm.initialize_all_targets()
            llvm.initialize_all_asmprinters()
            target = llvm.Target.from_triple("bpf")
        except RuntimeError as error:
            raise NetError("this llvmlite cannot compile for BPF", "use llvmlite's own wheel") from error
        module = llvm.parse_assembly(str(self._module))
        machine = target.create_target_machine(cpu=CPU, opt=2)
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
        passes.getModulePassManager().run(module, passes)
        return _text(machine.emit_object(module))


def _is_pointer(value: Any) -> bool:
    return isinstance(value, ir.Value) and isinstance(value.type, ir.PointerType)


def _text(elf: bytes) -> bytes:
    """The section .text of a 64-bit ELF file (System V ABI, chapter 4)."""
    table = struct.unpack_from("<Q", elf, 40)[0]
    entry_size, entries, names = struct.unpack_from("<HHH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + entry_size * number) for number in range(entries)]
    strings = sections[names][4]
    for name, _, _, _, offset, size in sections:
        if elf[strings + name : elf.index(b"\0", strings + name)] == b".text":
            return elf[offset : offset + size]
    raise AssertionError("an object file without .text")
