"""The guest image in a real QEMU, with QEMU's own NVMe controller: what the image promises, tried in the guest."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from emu import images, qemu
from emu.accel import Accel
from emu.guest import Guest, GuestError
from emu.progress import Silent
from emu.vm import Platform, Vm, VmConfig
from images import agent, builder

pytestmark = pytest.mark.vm

MEMORY_MIB = 256
PYTHON_MODULES = """
argparse array asyncio base64 bisect bz2 collections.abc concurrent.futures configparser contextlib
copy csv ctypes dataclasses datetime decimal difflib enum errno fcntl fractions functools glob gzip
hashlib heapq hmac http.client inspect io ipaddress itertools json logging lzma math mmap
multiprocessing os pathlib pickle platform pprint queue random re resource secrets select selectors
shlex shutil signal socket statistics string struct subprocess sysconfig tarfile tempfile termios
textwrap threading time tomllib traceback types typing unittest urllib.request uuid weakref
xml.etree.ElementTree zipfile zlib zoneinfo
"""
PATIENCE_S = 240.0
T = TypeVar("T")


class Booted:
    """A VM whose event loop stands still between two calls."""

    def __init__(self, runner: asyncio.Runner, vm: Vm) -> None:
        self.runner, self.vm = runner, vm

    @property
    def guest(self) -> Guest:
        return self.vm.guest

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, PATIENCE_S))

    def sh(self, command: str, **more: Any) -> str:
        return self.do(self.guest.run(command, timeout_s=PATIENCE_S, **more))

    def connect_again(self) -> None:
        """As the next host does."""
        self.do(self.guest.close())
        self.vm._guest = self.do(Guest.connect(self.vm.paths.agent))


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory, socket_dir: Path) -> Iterator[Booted]:
    out = tmp_path_factory.mktemp("vm")
    disk = out / "disk"
    with disk.open("wb") as file:
        file.truncate(512 << 20)
    nvme = ("-drive", f"file={disk},if=none,id=disk,format=raw", "-device", "nvme,serial=image-test,drive=disk")
    progress = Silent()
    platform = Platform(qemu.find(None, progress), Accel("tcg", "asked for"), images.get(progress))
    vm = Vm(VmConfig("image", memory_mib=MEMORY_MIB, qemu_args=nvme), platform, socket_dir, out)
    with asyncio.Runner() as runner:
        runner.run(vm.start())
        try:
            yield Booted(runner, vm)
        finally:
            runner.run(vm.stop())


def test_boots_in_256_mib(booted: Booted, record_property: Any) -> None:
    record_property("cpu_s_to_agent", round(booted.vm.process.cpu_s(), 2))
    info = booted.do(booted.guest.info())
    assert info.kernel.startswith("6.12.") and info.kernel.endswith("-cloud-amd64")
    assert info.cpus == 1
    assert 200 << 20 < info.memory_bytes < MEMORY_MIB << 20
    available = re.search(r"MemAvailable:\s+(\d+) kB", booted.sh("cat /proc/meminfo"))
    assert available and int(available[1]) >= 100_000
    assert booted.sh("hostname; whoami; echo $HOME; pwd") == "image\nroot\n/root\n/root\n"
    assert booted.sh("dmesg | grep -E 'WARNING:|BUG:|Oops|Call Trace|lockup|Out of memory' || true") == ""


def test_heap_is_initialised_on_allocation(booted: Booted) -> None:
    """Debian's default stays: what it costs and hides under TCG is part of what is measured."""
    assert "init_on_alloc" not in booted.do(booted.guest.info()).command_line
    assert "heap alloc:on" in booted.sh("dmesg | grep 'mem auto-init'")


def test_agent_does_not_wait_for_a_host(booted: Booted) -> None:
    """Ready before anybody spoke: init has long gone on to the console."""
    assert "Please press Enter" in booted.vm.paths.console.read_text(errors="replace")


def test_every_program_finds_its_libraries(booted: Booted) -> None:
    script = 'for p; do LD_TRACE_LOADED_OBJECTS=1 /lib64/ld-linux-x86-64.so.2 $p 2>&1 | sed "s,^,$p: ,"; done'
    programs = [f"/{p}" for p in builder.Recipe.load().programs]
    found = booted.do(booted.guest.exec(["sh", "-c", script, "sh", *programs], check=True)).stdout.decode()
    assert "libc.so.6 => " in found
    assert "not found" not in found
    assert "librados" not in found and "libicu" not in found


def test_fio_and_nvme_cli_start(booted: Booted) -> None:
    assert booted.sh("fio --version").startswith("fio-3.")
    engines = booted.sh("fio --enghelp")
    assert {"io_uring", "libaio", "psync", "mmap", "sg"} <= {line.strip() for line in engines.splitlines()}
    listed = booted.sh("nvme list")
    assert "/dev/nvme0n1" in listed and "image-test" in listed
    assert "sn        : image-test" in booted.sh("nvme id-ctrl /dev/nvme0")
    assert "nvme0n1" in booted.sh("lsblk")


def test_fio_verifies_what_it_wrote(booted: Booted) -> None:
    job = (
        "--name=verify --filename=/dev/nvme0n1 --size=16M --rw=randwrite --bs=4k --iodepth=32 --ioengine=io_uring "
        "--direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1"
    )
    assert "err= 0" in booted.sh(f"fio {job}")
    # and it does see a byte that is not as it was written
    booted.sh(
        "printf x | dd of=/dev/nvme0n1 bs=1 seek=1000000 conv=notrunc oflag=direct,seek_bytes bs=512 2>&1 || true"
    )
    booted.sh("dd if=/dev/urandom of=/dev/nvme0n1 bs=4096 seek=100 count=1 oflag=direct 2>&1")
    with pytest.raises(GuestError, match="verify"):
        booted.sh(f"fio {job} --verify_only")


@pytest.mark.parametrize(("kind", "check"), [("ext4", "e2fsck -fn"), ("xfs", "xfs_repair -n")])
def test_file_systems(booted: Booted, kind: str, check: str) -> None:
    device = "/dev/nvme0n1"
    force = "-F" if kind == "ext4" else "-f"
    booted.sh(f"mkfs.{kind} -q {force} {device} 2>&1 && mount -t {kind} {device} /mnt")
    digest = booted.sh("head -c 20000000 /dev/urandom | tee /mnt/file | sha256sum").split()[0]
    booted.sh("umount /mnt")
    assert f'TYPE="{kind}"' in booted.sh(f"blkid {device}")
    assert booted.sh(f"{check} {device} 2>&1")
    booted.sh(f"mount {device} /mnt")  # the type is found out
    assert booted.sh("sha256sum < /mnt/file").split()[0] == digest
    assert kind in booted.sh("grep /mnt /proc/mounts")
    booted.sh("umount /mnt && wipefs -aq /dev/nvme0n1")


def test_every_module_loads(booted: Booted) -> None:
    for name in builder.Recipe.load().modules:
        booted.sh(f"modprobe {name} 2>&1")
    booted.sh("modprobe nvme && rmmod null_blk && modprobe null_blk nr_devices=2")  # built in; with options
    assert booted.sh("ls /dev/nullb1 /dev/ram0 /dev/loop-control").split() == [
        "/dev/loop-control",
        "/dev/nullb1",
        "/dev/ram0",
    ]
    booted.sh("rmmod null_blk && modprobe -r brd")
    with pytest.raises(GuestError):
        booted.sh("modprobe no_such_module")


def test_python_and_its_standard_library(booted: Booted) -> None:
    modules = PYTHON_MODULES.split()
    code = f"import {', '.join(modules)}\nprint(hashlib.sha256(b'x').hexdigest(), ctypes.sizeof(ctypes.c_long))"
    assert booted.sh("python3 -", input=code.encode()) == f"{hashlib.sha256(b'x').hexdigest()} 8\n"
    written = booted.sh("find /usr/lib -name __pycache__ -o -name '*.py'")
    assert written == ""  # byte code was shipped, none had to be made


def test_programs_run_at_the_same_time(booted: Booted) -> None:
    async def both() -> list[Any]:
        commands = ["mkfifo /tmp/f; cat /tmp/f", "while [ ! -p /tmp/f ]; do sleep 0.1; done; echo met > /tmp/f"]
        return await asyncio.gather(*(booted.guest.run(c) for c in commands), *[booted.guest.ping()] * 1)

    assert booted.do(both())[0] == "met\n"


def test_files_of_20_mb_come_back_as_they_went(booted: Booted) -> None:
    data = os.urandom(20_000_000)
    booted.do(booted.guest.write_file("/tmp/file", data))
    assert booted.sh("sha256sum /tmp/file").split()[0] == hashlib.sha256(data).hexdigest()
    assert booted.do(booted.guest.read_file("/tmp/file")) == data
    assert booted.sh("cat", input=data[:1_000_000]).encode(errors="replace")  # larger than a pipe
    booted.sh("rm /tmp/file")


def test_program_that_hangs_is_killed(booted: Booted) -> None:
    with pytest.raises(GuestError, match=r"not finished after 2 s\n  before"):
        booted.do(booted.guest.exec(["sh", "-c", "echo before; sleep 12345 & sleep 12345"], timeout_s=2))
    assert booted.sh("ps | grep -c '[s]leep 12345' || true") == "0\n"


def test_clock_and_random_numbers(booted: Booted) -> None:
    booted.do(booted.guest.set_clock(1_000_000_000 * 10**9))
    assert booted.sh("date -u +%Y") == "2001\n"
    booted.do(booted.guest.set_clock())
    assert abs(int(booted.sh("date +%s")) - time.time()) < PATIENCE_S
    booted.do(booted.guest.reseed())
    assert booted.sh("head -c 16 /dev/urandom | od -An -tx1") != booted.sh("head -c 16 /dev/urandom | od -An -tx1")


def test_next_host_is_served_after_one_that_vanished(booted: Booted) -> None:
    booted.connect_again()

    async def vanish() -> None:
        running = asyncio.ensure_future(booted.guest.exec(["yes"], on_output=lambda stream, data: started.set()))
        started = asyncio.Event()
        await started.wait()  # output is under way
        await booted.guest.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, GuestError):
            await running

    booted.do(vanish())
    booted.connect_again()
    assert booted.sh("ps | grep -c '[y]es' || true") == "0\n"
    assert booted.sh("echo here") == "here\n"


def test_agent_that_dies_is_started_again(booted: Booted) -> None:
    pid = booted.sh("pidof python3").strip()
    with contextlib.suppress(GuestError):
        booted.do(booted.guest.exec(["kill", "-9", pid], timeout_s=1))
    booted.connect_again()
    assert booted.sh("pidof python3").strip() != pid


def test_reboot(booted: Booted) -> None:
    booted.sh("touch /tmp/marker")
    booted.do(booted.vm.reboot())
    assert booted.sh("ls /tmp") == ""
    assert "nvme0n1" in booted.sh("lsblk")


def test_restored_guest_serves_a_new_host(booted: Booted, tmp_path: Path) -> None:
    """Saved with half a request in the channel and output under way, as a template never is."""

    async def save_and_restore() -> None:
        started = asyncio.Event()
        running = asyncio.ensure_future(booted.guest.exec(["yes"], on_output=lambda stream, data: started.set()))
        await started.wait()
        frame = agent.pack({"id": 0, "op": "ping"}, bytes(agent.RAW_BYTES_MAX))
        booted.guest._writer.write(frame[:50_000])
        await booted.guest._drain()
        await booted.vm.qmp.execute("stop")
        await booted.vm.migrate("migrate", tmp_path / "ram")
        await booted.vm.kill()
        with contextlib.suppress(GuestError):
            await running
        await booted.vm.start(restore=tmp_path / "ram")

    before = booted.sh("cat /proc/sys/kernel/random/boot_id")
    booted.do(save_and_restore())
    assert booted.sh("cat /proc/sys/kernel/random/boot_id") == before
    assert booted.sh("ps | grep -c '[y]es' || true") == "0\n"
    assert abs(int(booted.sh("date +%s")) - time.time()) < PATIENCE_S
    assert "image-test" in booted.sh("nvme list")
