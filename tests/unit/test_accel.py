"""The choice as a table; the probe's structures against the sizes in KVM's own ioctl numbers; the loop for real."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import pytest

from dpu.errors import EmuError
from emu import accel
from emu.progress import Silent

USABLE, UNUSABLE = (True, "2130 M instructions/s in ring 0"), (False, "guest ring 0 is emulated")


@pytest.mark.parametrize(
    ("wish", "probe", "name"),
    [("auto", USABLE, "kvm"), ("auto", UNUSABLE, "tcg"), ("kvm", USABLE, "kvm"), ("tcg", USABLE, "tcg")],
)
def test_choose(wish: accel.Wish, probe: tuple[bool, str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "probe_kvm", lambda: probe)
    progress = Silent()
    chosen = accel.choose(wish, progress)
    assert chosen.name == name
    if wish != "tcg":
        assert probe[1] in chosen.why
    assert [name in note and probe[1] in note for note in progress.notes] == [True] * (wish == "auto")


def test_insisting_on_an_unusable_kvm_fails_with_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "probe_kvm", lambda: UNUSABLE)
    with pytest.raises(EmuError, match=r"ring 0 is emulated.*auto or tcg"):
        accel.choose("kvm")


@pytest.mark.parametrize(
    ("loops", "seconds", "usable"),
    [(2_000_000, 0.004, True), (2_000_000, 0.039, True), (2_000_000, 0.041, False), (900_000, 1.0, False)],
)
def test_judge_draws_the_line_at_100_million_instructions_per_second(
    loops: int, seconds: float, usable: bool
) -> None:
    assert accel.judge(loops, seconds)[0] is usable


@pytest.mark.parametrize(
    ("program", "evidence"),
    [
        ("import time; time.sleep(600)", "hung for 0.5 s"),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", f"code {-signal.SIGSEGV}"),
        ("raise ValueError('why')", "ValueError: why"),
        ("print('[false, \"x\"]')", "x"),
    ],
)
def test_whatever_happens_to_the_child_is_evidence(program: str, evidence: str) -> None:
    timeout_s = 0.5 if "sleep" in program else 60
    usable, why = accel._ask_child([sys.executable, "-c", program], timeout_s)
    assert not usable
    assert evidence in why


@pytest.mark.parametrize(
    ("request_number", "structure"),
    [
        (accel._KVM_SET_REGS, accel._Regs),
        (accel._KVM_GET_REGS, accel._Regs),
        (accel._KVM_SET_SREGS, accel._Sregs),
        (accel._KVM_GET_SREGS, accel._Sregs),
        (accel._KVM_SET_USER_MEMORY_REGION, accel._Region),
    ],
)
def test_structures_have_the_size_that_the_ioctl_number_says(
    request_number: int, structure: type[ctypes.Structure]
) -> None:
    assert ctypes.sizeof(structure) == request_number >> 16 & 0x3FFF  # _IOC_SIZE in asm-generic/ioctl.h


def test_the_loop_runs_to_its_end_on_a_virtual_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("no /dev/kvm that may be opened")
    monkeypatch.setattr(accel, "_LOOPS", 1000)  # ends with HLT even where ring 0 is emulated
    judged = []

    def judge(loops: int, seconds: float) -> tuple[bool, str]:
        judged.append((loops, seconds))
        return USABLE

    monkeypatch.setattr(accel, "judge", judge)
    assert accel._run_loop() == USABLE
    ((loops, seconds),) = judged
    assert loops == 1000
    assert 0 < seconds < accel._RUN_TIME_MAX_S
