"""The QEMU command line, device JSON, patience, the TSC rate and the snapshot key: all without a QEMU.

Independent sources: the JSON is parsed again; the TSC rate is measured with the instruction itself.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dpu.errors import EmuError
from emu import snapshot
from emu.accel import Accel
from emu.images import Image
from emu.qemu import Qemu
from emu.vm import (
    ROOT_PORTS_MAX,
    DiskConfig,
    Patience,
    Platform,
    VmConfig,
    VmPaths,
    device_json,
    qemu_command,
    tsc_khz,
)

PATHS = VmPaths(Path("/run/q"), Path("/run/a"), Path("/run/k"), Path("/out/console.log"))
TSC_FLAGS = "flags\t\t: fpu tsc constant_tsc nonstop_tsc\n"


@pytest.fixture
def platform(tmp_path: Path) -> Platform:
    binary = tmp_path / "qemu"
    binary.touch()
    image = Image(Path("/img/vmlinux"), Path("/img/initrd"), "d1gest")
    return Platform(Qemu(binary, "11.1.3", "user"), Accel("tcg", "asked for"), image)


def values(command: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(command) if name == option]


def test_guest_memory_is_shared_and_of_the_size_asked_for(platform: Platform) -> None:
    command = qemu_command(VmConfig("vm0", vcpus=3, memory_mib=768), platform, PATHS)
    assert values(command, "-object") == ["memory-backend-memfd,id=ram,size=768M,share=on"]
    assert values(command, "-m") == ["768M"]
    assert values(command, "-smp") == ["3"]
    assert "memory-backend=ram" in values(command, "-machine")[0].split(",")
    private = qemu_command(VmConfig("vm0", memory_mib=768, share_memory=False), platform, PATHS)
    assert values(private, "-object") == ["memory-backend-ram,id=ram,size=768M,share=off"]


def test_accelerators(platform: Platform) -> None:
    tcg = qemu_command(VmConfig("vm0"), platform, PATHS)
    kvm = qemu_command(VmConfig("vm0"), replace(platform, accel=Accel("kvm", "fast")), PATHS)
    assert values(tcg, "-accel")[0].startswith("tcg,thread=multi")
    assert (values(kvm, "-accel"), values(kvm, "-cpu")) == (["kvm"], ["host"])
    assert "tsc_early_khz" not in values(kvm, "-append")[0]


def test_a_root_port_for_each_controller_and_some_to_spare(platform: Platform) -> None:
    def ports(controllers: int) -> list[dict[str, str]]:
        config = VmConfig("vm0", dpus=tuple(("card", f"c{n}") for n in range(controllers)))
        devices = values(qemu_command(config, platform, PATHS), "-device")
        found = [device.split(",")[1:] for device in devices if device.startswith("pcie-root-port")]
        return [dict(option.split("=") for option in one) for one in found]

    assert len(ports(0)) == len(ports(8)) == 8
    twelve = ports(12)
    assert [port["id"] for port in twelve] == [f"rp{n}" for n in range(12)]
    for unique in ("chassis", "slot", "addr"):
        assert len({port[unique] for port in twelve}) == 12
    with pytest.raises(EmuError, match="25 controllers"):
        ports(ROOT_PORTS_MAX + 1)


def test_the_users_own_parts(platform: Platform) -> None:
    config = VmConfig(
        "vm0",
        kernel_args="nvme.poll_queues=2",
        disks=(DiskConfig(Path("/a,b.qcow2")), DiskConfig(Path("/c.img"), read_only=True)),
        qemu_args=("-device", "virtio-rng-pci"),
    )
    command = qemu_command(config, platform, PATHS)
    assert values(command, "-append")[0].endswith(" nvme.poll_queues=2")
    assert values(command, "-drive") == [
        "file=/a,,b.qcow2,if=none,id=disk0,format=qcow2,read-only=off",
        "file=/c.img,if=none,id=disk1,format=raw,read-only=on",
    ]
    assert command[-2:] == ["-device", "virtio-rng-pci"]
    without_initrd = replace(platform, image=replace(platform.image, initrd=None))
    assert "-initrd" not in qemu_command(config, without_initrd, PATHS)


def test_a_restored_vm_differs_only_in_where_it_begins(platform: Platform) -> None:
    cold = qemu_command(VmConfig("vm0"), platform, PATHS)
    assert qemu_command(VmConfig("vm0"), platform, PATHS, incoming=True) == [*cold, "-incoming", "defer", "-S"]


def test_device_json_survives_json() -> None:
    device = json.loads(json.dumps(device_json(Path("/run/x/cntrl"), "card.fast", 3)))
    assert device["driver"] == "vfio-user-pci"
    assert device["bus"] == "rp3"
    assert device["socket"] == {"type": "unix", "path": "/run/x/cntrl"}
    assert device["x-msg-timeout"] >= 30_000


def test_tsc_rate_of_cpuinfo() -> None:
    assert tsc_khz(TSC_FLAGS + "bogomips\t: 5192.28\n") == 2_596_140
    assert tsc_khz("flags\t\t: fpu tsc\nbogomips\t: 5192.28\n") is None
    assert tsc_khz(TSC_FLAGS) is None


def test_tsc_rate_is_the_instructions() -> None:
    """bogomips against rdtsc itself over 50 ms; nothing here depends on how long that really took."""
    claimed_khz = tsc_khz(Path("/proc/cpuinfo").read_text())
    if claimed_khz is None:
        pytest.skip("no constant TSC on this host")
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\x0f\x31\x48\xc1\xe2\x20\x48\x09\xd0\xc3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)

    def reading() -> tuple[int, int]:
        """(ns, ticks) taken closest together: the best of some tries."""
        tries = []
        for _ in range(50):
            before_ns, ticks, after_ns = time.monotonic_ns(), rdtsc(), time.monotonic_ns()
            tries.append((after_ns - before_ns, (before_ns + after_ns) // 2, ticks))
        return min(tries)[1:]

    start_ns, start_ticks = reading()
    while time.monotonic_ns() - start_ns < 50_000_000:
        pass
    end_ns, end_ticks = reading()
    assert (end_ticks - start_ticks) * 1e6 / (end_ns - start_ns) == pytest.approx(claimed_khz, rel=2e-3)


class Host:
    """A clock and the CPU time of a process, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.cpu_s = 7.0

    def run(self, patience: Patience, wall_s: float, share: float) -> tuple[float, str]:
        """One-second steps until patience is over or ``wall_s`` has passed; (seconds, why)."""
        for second in range(int(wall_s)):
            self.now_s += 1
            self.cpu_s += share
            if why := patience.over():
                return second + 1, why
        return wall_s, ""


@pytest.mark.parametrize(
    ("share", "seconds", "why"),
    [
        (1.0, 31, "CPU time"),  # a busy guest on a quiet host: its own time
        (0.0, 31, "did nothing"),  # hangs, waiting for something
        (0.5, 61, "CPU time"),  # gets half a CPU: twice as long
        (0.04, 301, "after 301 s"),  # hardly any CPU, but wants it: ten times as long, not for ever
    ],
)
def test_patience_is_measured_in_what_the_process_had(share: float, seconds: int, why: str) -> None:
    host = Host()
    patience = Patience(30.0, lambda: host.cpu_s, lambda: host.now_s)
    stopped_s, text = host.run(patience, 1000, share)
    assert (stopped_s, why in text) == (seconds, True)


@pytest.mark.parametrize(("share", "seconds"), [(0.02, 30), (0.05, 300)])
def test_patience_sees_idleness_through_the_kernels_coarse_cpu_times(share: float, seconds: int) -> None:
    """Asked four times a second, with CPU time in steps of 10 ms: 2 % is idle, 5 % is not."""
    host = Host()
    patience = Patience(30.0, lambda: round(host.cpu_s // 0.01 * 0.01, 2), lambda: host.now_s)
    for _ in range(4000):
        host.now_s += 0.25
        host.cpu_s += 0.25 * share
        if patience.over():
            break
    assert host.now_s - 100 == pytest.approx(seconds, abs=2)


def test_snapshot_key_covers_what_the_state_depends_on(platform: Platform) -> None:
    config = VmConfig("vm0", dpus=(("card", "a"),))
    key = snapshot.key(config, platform)
    assert snapshot.key(replace(config, name="other", dpus=(("card", "b"),)), platform) == key
    different = {
        snapshot.key(replace(config, vcpus=2), platform),
        snapshot.key(replace(config, memory_mib=1024), platform),
        snapshot.key(replace(config, kernel_args="quiet"), platform),
        snapshot.key(replace(config, dpus=tuple(("card", str(n)) for n in range(9))), platform),
        snapshot.key(config, replace(platform, accel=Accel("kvm", ""))),
        snapshot.key(config, replace(platform, image=replace(platform.image, digest="other"))),
        snapshot.key(config, replace(platform, qemu=replace(platform.qemu, version="11.1.4"))),
    }
    platform.qemu.binary.write_text("another build of the same version")
    different.add(snapshot.key(config, platform))
    assert len(different | {key}) == 9
