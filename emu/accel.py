"""KVM or TCG: whether this host runs a guest's kernel at native speed, found by running some of it.

    accel = choose("auto", progress)     # Accel("kvm", "2130 M instructions/s in ring 0")
    usable, why = probe_kvm()

A /dev/kvm that opens and answers every ioctl is no proof: a host that is itself a paravirtual guest can
emulate its guests' ring 0 at about one million instructions per second, and a stock kernel then looks hung
while it is still unpacking itself. So the probe runs a counting loop in 64-bit ring 0 and takes its time. It
does so in a child process, so that neither a crash nor an ioctl that never returns can take the lab with it.

Limits: an answer within PROBE_TIMEOUT_S. The loop says nothing about devices, so a deadline on the boot that
falls back to TCG is still worth having.
Errors: EmuError when KVM is insisted on and is not usable, with the evidence.
Source: Linux Documentation/virt/kvm/api.rst (4.1 to 4.13, 5); Intel SDM volume 3, 4.5 (4-level paging).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from dpu.errors import EmuError
from emu.progress import Progress

USABLE_INSTRUCTIONS_PER_S = 100e6  # hardware does more than 1000 M, an emulated ring 0 about 1 M
PROBE_TIMEOUT_S = 10.0
_LOOPS = 2_000_000
_TRIES = 3  # the best of these: a busy host takes the CPU away in between
_RUN_TIME_MAX_S = 1.0

Wish = Literal["auto", "kvm", "tcg"]


@dataclass(frozen=True)
class Accel:
    """What QEMU is to use, and the reason in a few words."""

    name: Literal["kvm", "tcg"]
    why: str


def choose(wish: Wish, progress: Progress | None = None) -> Accel:
    """The accelerator for ``wish``; ``auto`` says on ``progress`` what it took."""
    if wish == "tcg":
        return Accel("tcg", "asked for")
    usable, why = probe_kvm()
    if wish == "kvm" and not usable:
        raise EmuError(f"KVM cannot be used here: {why}", "take the accelerator auto or tcg")
    accel = Accel("kvm", why) if usable else Accel("tcg", f"KVM cannot be used: {why}")
    if wish == "auto" and progress is not None:
        progress.note(f"Accelerator: {accel.name} ({accel.why})")
    return accel


@functools.cache
def probe_kvm() -> tuple[bool, str]:
    """(usable, evidence). Asked once per process."""
    if not os.path.exists("/dev/kvm"):
        return False, "there is no /dev/kvm"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False, "no permission to open /dev/kvm (its group is usually kvm)"
    return _ask_child([sys.executable, "-P", "-m", "emu.accel"], PROBE_TIMEOUT_S)


def _ask_child(command: list[str], timeout_s: float) -> tuple[bool, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return False, f"the probe hung for {timeout_s:g} s and was killed"
    except OSError as error:
        return False, f"the probe cannot be started: {error}"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return False, f"the probe died with code {done.returncode} {last}".rstrip()
    usable, why = json.loads(done.stdout)
    return bool(usable), str(why)


def judge(loops_done: int, seconds: float) -> tuple[bool, str]:
    """(usable, evidence) for ``loops_done`` rounds of the two-instruction loop."""
    per_s = 2 * loops_done / seconds
    if per_s > USABLE_INSTRUCTIONS_PER_S:
        return True, f"{per_s / 1e6:.0f} M instructions/s in ring 0"
    return False, f"guest ring 0 is emulated, at {per_s / 1e6:.2g} M instructions/s (hardware: over 1000 M)"


# The child: a virtual machine of 2 MiB with one CPU, through the ioctls of /dev/kvm

_KVM_GET_API_VERSION = 0xAE00
_KVM_CREATE_VM = 0xAE01
_KVM_GET_VCPU_MMAP_SIZE = 0xAE04
_KVM_CREATE_VCPU = 0xAE41
_KVM_SET_TSS_ADDR = 0xAE47
_KVM_RUN = 0xAE80
_KVM_GET_REGS = 0x8090AE81
_KVM_SET_REGS = 0x4090AE82
_KVM_GET_SREGS = 0x8138AE83
_KVM_SET_SREGS = 0x4138AE84
_KVM_SET_USER_MEMORY_REGION = 0x4020AE46
_API_VERSION = 12
_EXIT_HLT = 5

_RAM_BYTES = 0x200000
_PML4, _PDPT, _PD, _CODE = 0x1000, 0x2000, 0x3000, 0x8000
_TSS = 0x70000000  # three pages that Intel processors need, anywhere outside the RAM below 4 GiB
_PRESENT_WRITE, _PRESENT_WRITE_LARGE = 0x3, 0x83
_LOOP = bytes.fromhex("48ffc9 75fb f4")  # 1: dec rcx; jnz 1b; hlt
_CR0 = 0x80050033  # PG, AM, WP, NE, ET, MP, PE
_CR4 = 0x20  # PAE
_EFER = 0x500  # LMA, LME


class _Region(ctypes.LittleEndianStructure):
    """struct kvm_userspace_memory_region"""

    _fields_ = [
        ("slot", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("guest_phys_addr", ctypes.c_uint64),
        ("memory_size", ctypes.c_uint64),
        ("userspace_addr", ctypes.c_uint64),
    ]


class _Regs(ctypes.LittleEndianStructure):
    """struct kvm_regs"""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rsp", "rbp"),
            *("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rip", "rflags"),
        )
    ]


class _Segment(ctypes.LittleEndianStructure):
    """struct kvm_segment"""

    _fields_ = [
        ("base", ctypes.c_uint64),
        ("limit", ctypes.c_uint32),
        ("selector", ctypes.c_uint16),
        *((name, ctypes.c_uint8) for name in ("type", "present", "dpl", "db", "s", "l", "g", "avl")),
        *((name, ctypes.c_uint8) for name in ("unusable", "padding")),
    ]


class _Sregs(ctypes.LittleEndianStructure):
    """struct kvm_sregs"""

    _fields_ = [
        *((name, _Segment) for name in ("cs", "ds", "es", "fs", "gs", "ss", "tr", "ldt")),
        *((name, ctypes.c_uint64 * 2) for name in ("gdt", "idt")),
        *((name, ctypes.c_uint64) for name in ("cr0", "cr2", "cr3", "cr4", "cr8", "efer", "apic_base")),
        ("interrupt_bitmap", ctypes.c_uint64 * 4),
    ]


class _TimeIsUp(Exception):
    pass


def _time_is_up(signum: int, frame: FrameType | None) -> None:
    raise _TimeIsUp


def _run_loop() -> tuple[bool, str]:
    """Time the loop on a virtual CPU of this host."""
    with contextlib.ExitStack() as stack:
        kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, kvm)
        version = fcntl.ioctl(kvm, _KVM_GET_API_VERSION, 0)
        if version != _API_VERSION:
            return False, f"its API is version {version}, not {_API_VERSION}"
        vm = fcntl.ioctl(kvm, _KVM_CREATE_VM, 0)
        stack.callback(os.close, vm)
        fcntl.ioctl(vm, _KVM_SET_TSS_ADDR, _TSS)
        ram = mmap.mmap(-1, _RAM_BYTES)
        ram[_PML4 : _PML4 + 8] = (_PDPT | _PRESENT_WRITE).to_bytes(8, "little")
        ram[_PDPT : _PDPT + 8] = (_PD | _PRESENT_WRITE).to_bytes(8, "little")
        ram[_PD : _PD + 8] = _PRESENT_WRITE_LARGE.to_bytes(8, "little")
        ram[_CODE : _CODE + len(_LOOP)] = _LOOP
        address = ctypes.addressof(ctypes.c_char.from_buffer(ram))
        fcntl.ioctl(vm, _KVM_SET_USER_MEMORY_REGION, bytes(_Region(0, 0, 0, _RAM_BYTES, address)))
        cpu = fcntl.ioctl(vm, _KVM_CREATE_VCPU, 0)
        stack.callback(os.close, cpu)
        run = mmap.mmap(cpu, fcntl.ioctl(kvm, _KVM_GET_VCPU_MMAP_SIZE, 0))
        _enter_long_mode(cpu)
        best_s = _RUN_TIME_MAX_S
        for _ in range(_TRIES):
            loops_done, taken_s = _timed_run(cpu)
            if loops_done < _LOOPS:
                return judge(loops_done, taken_s)
            reason = int.from_bytes(run[8:12], "little")  # struct kvm_run, exit_reason
            if reason != _EXIT_HLT:
                return False, f"a guest of six bytes ended with exit reason {reason}, not HLT"
            best_s = min(best_s, taken_s)
        return judge(_LOOPS, best_s)


def _enter_long_mode(cpu: int) -> None:
    sregs = _Sregs()
    fcntl.ioctl(cpu, _KVM_GET_SREGS, sregs)
    sregs.cs = _Segment(limit=0xFFFFFFFF, selector=8, type=11, present=1, s=1, l=1, g=1)
    for name in ("ds", "es", "fs", "gs", "ss"):
        setattr(sregs, name, _Segment(limit=0xFFFFFFFF, selector=16, type=3, present=1, db=1, s=1, g=1))
    sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer = _CR0, _PML4, _CR4, _EFER
    fcntl.ioctl(cpu, _KVM_SET_SREGS, sregs)


def _timed_run(cpu: int) -> tuple[int, float]:
    """(rounds of the loop that were done, seconds they took)."""
    fcntl.ioctl(cpu, _KVM_SET_REGS, _Regs(rcx=_LOOPS, rip=_CODE, rflags=2))
    began = time.perf_counter()
    try:
        with _alarm(_RUN_TIME_MAX_S):
            fcntl.ioctl(cpu, _KVM_RUN, 0)
    except _TimeIsUp:
        taken = time.perf_counter() - began
        regs = _Regs()
        fcntl.ioctl(cpu, _KVM_GET_REGS, regs)
        return _LOOPS - regs.rcx, taken
    return _LOOPS, time.perf_counter() - began


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _child() -> None:
    try:
        answer = _run_loop()
    except OSError as error:
        answer = (False, f"an ioctl failed: {error.strerror}")
    print(json.dumps(answer))


if __name__ == "__main__":
    _child()
