"""emu.lab and emu.daemon without a QEMU: what would be run, files, RPC errors, the order of ends.

The daemon here is a stand-in that speaks JSON-RPC as recorded from SPDK.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path

import pytest

from dpu.daemon import parse_cpus
from dpu.errors import EmuError
from emu import daemon
from emu.accel import Accel
from emu.daemon import Dpu, DpuError, make_file, rpc_calls
from emu.images import Image
from emu.lab import ControllerConfig, DpuConfig, Lab, LabConfig, NamespaceConfig, VmConfig, plan, together
from emu.process import Identity
from emu.progress import Silent
from emu.qemu import Qemu
from emu.vm import CONSOLE_LINES, Platform, panic_lines

CARD = DpuConfig(
    "card",
    (
        ControllerConfig(
            "fast",
            (NamespaceConfig("memory", 1 << 20, 512), NamespaceConfig("file", 1 << 20, 4096, Path("/d/x.raw"))),
            serial="S123",
            model="one",
        ),
        ControllerConfig("slow", (NamespaceConfig("null", 1 << 30, 4096), NamespaceConfig("file"))),
    ),
)


def test_rpc_calls_make_what_the_configuration_says() -> None:
    calls = rpc_calls(CARD, Path("/run/c"), Path("/files"))
    assert [method for method, _ in calls] == [
        "nvmf_create_transport",
        *("nvmf_create_subsystem", "bdev_malloc_create", "nvmf_subsystem_add_ns"),
        *("bdev_aio_create", "nvmf_subsystem_add_ns", "nvmf_subsystem_add_listener"),
        *("nvmf_create_subsystem", "bdev_null_create", "nvmf_subsystem_add_ns"),
        *("bdev_aio_create", "nvmf_subsystem_add_ns", "nvmf_subsystem_add_listener"),
    ]
    assert calls[1][1]["serial_number"] == "S123"
    assert calls[2][1] == {"name": "fast.1", "num_blocks": 2048, "block_size": 512}
    assert calls[4][1] == {"filename": "/d/x.raw", "name": "fast.2", "block_size": 4096}
    assert calls[5][1]["namespace"] == {"bdev_name": "fast.2", "nsid": 2}
    assert calls[6][1]["listen_address"] == {"trtype": "VFIOUSER", "traddr": "/run/c/fast", "trsvcid": "0"}
    assert calls[8][1]["num_blocks"] == 262144
    assert calls[10][1]["filename"] == "/files/card.slow.2.raw"
    json.dumps(calls)

    subsystems = [parameters for method, parameters in calls if method == "nvmf_create_subsystem"]
    assert len({one["nqn"] for one in subsystems}) == len({one["serial_number"] for one in subsystems}) == 2
    assert all(len(one["serial_number"]) <= 20 for one in subsystems)  # NVMe base 2.0, Identify: SN
    assert rpc_calls(CARD, Path("/run/c"), Path("/files")) == calls  # the same serial every time


@pytest.mark.parametrize(("cpus", "expected"), [("0", [0]), ("0,2-3", [0, 2, 3])])
def test_dpud_understands_the_cpus_it_is_given(cpus: str, expected: list[int]) -> None:
    command = daemon.daemon_command(DpuConfig("card", cpus=cpus), Path("/run/rpc"))
    assert command[-2] == "-m"
    assert parse_cpus(command[-1], range(8)) == expected


def test_plan_is_the_whole_lab_as_commands(tmp_path: Path) -> None:
    vms = (VmConfig("a", dpus=(("card", "fast"), ("card", "slow"))), VmConfig("b"))
    platform = Platform(Qemu(Path("/q"), "11", "user"), Accel("tcg", ""), Image(Path("/k"), Path("/i"), "d"))
    found = plan(LabConfig(vms=vms, dpus=(CARD,)), platform, Path("/run/x"), Path("/run/x"))
    devices = [json.loads(arg) for arg in found.vms["a"] if arg.startswith("{")]
    listeners = [call[1]["listen_address"]["traddr"] for call in found.rpc["card"] if "listener" in call[0]]
    assert [device["socket"]["path"] for device in devices] == [f"{path}/cntrl" for path in listeners]
    assert [device["bus"] for device in devices] == ["rp0", "rp1"]
    assert not any(arg.startswith("{") for arg in found.vms["b"])
    assert found.dpus["card"][-2:] == ["-r", "/run/x/card/rpc"]


@pytest.mark.parametrize(
    "vms",
    [
        (VmConfig("a", dpus=(("card", "none"),)),),
        (VmConfig("a", dpus=(("none", "fast"),)),),
        (VmConfig("a", dpus=(("card", "fast"), ("card", "fast"))),),
        (VmConfig("a", dpus=(("card", "fast"),)), VmConfig("b", dpus=(("card", "fast"),))),
    ],
)
def test_a_controller_that_is_not_free_is_refused_before_anything_starts(vms: tuple[VmConfig, ...]) -> None:
    async def main() -> None:
        platform = Platform(Qemu(Path("/q"), "11", "user"), Accel("tcg", ""), Image(Path("/k"), None, "d"))
        async with Lab(LabConfig(vms=vms, dpus=(CARD,)), platform, Silent()):
            raise AssertionError("it started")

    with pytest.raises(EmuError, match=r"cannot have controller \w+\.\w+: .*free: .*card\.slow"):
        asyncio.run(main())


def test_files_are_made_sparse_and_never_resized(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    make_file(path, 10 << 20)
    assert (path.stat().st_size, path.stat().st_blocks) == (10 << 20, 0)
    path.write_bytes(b"data" * 1024)
    make_file(path, 4096)
    assert path.read_bytes() == b"data" * 1024
    with pytest.raises(EmuError, match="has 4096 bytes, the namespace 8192"):
        make_file(path, 8192)
    assert path.stat().st_size == 4096
    with pytest.raises(EmuError, match="No such file or directory"):
        make_file(tmp_path / "no" / "disk", 4096)
    with pytest.raises(EmuError, match="cannot make"):
        make_file(tmp_path / "huge", 1 << 62)
    assert not (tmp_path / "huge").exists()


# ---- a stand-in for dpud, started as the daemon is


STAND_IN = """
import json, os, socket, sys
arguments = sys.argv[1:]
path, ready = arguments[arguments.index("-r") + 1], int(arguments[arguments.index("--ready-fd") + 1])
print("stand-in: hello", flush=True)
if MODE == "dies":
    sys.exit("stand-in: no")
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
os.write(ready, b"\\n")
os.close(ready)
while True:
    connection, _ = listener.accept()
    text = ""
    while not text.endswith("}"):
        text += connection.recv(65536).decode()
    request = json.loads(text)
    if request["method"] == "fail":
        answer = {"error": {"code": -19, "message": "No such device"}}
    elif request["method"] == "die":
        os._exit(7)
    elif request["method"] == "hang":
        connection.recv(1)  # until the client hangs up
        continue
    else:
        answer = {"result": [request["method"], request.get("params")]}
    connection.sendall(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}, indent=2).encode())
"""


def stand_in(mode: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Dpu:
    program = directory / "dpud.py"
    program.write_text(f"MODE = {mode!r}\n{STAND_IN}")
    monkeypatch.setattr(daemon, "daemon_command", lambda config, rpc: [sys.executable, str(program), "-r", str(rpc)])
    return Dpu(DpuConfig("card"), directory, directory, directory)


def test_rpc_results_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        dpu = stand_in("works", tmp_path, monkeypatch)
        await dpu.start()
        try:
            assert await dpu.rpc("echo", name="x") == ["echo", {"name": "x"}]
            with pytest.raises(DpuError, match=r"card: fail: No such device \(-19\)") as caught:
                await dpu.rpc("fail", name="x")
            assert caught.value.code == -19
            assert caught.value.log == ["stand-in: hello"]
            # a caller who gives up is not kept waiting by the thread, and the next call works
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(dpu.rpc("hang"), 0.05)
            assert await dpu.rpc("echo") == ["echo", None]
            with pytest.raises(DpuError, match="card: die"):
                await dpu.rpc("die")
            assert await dpu.process.wait() == 7
            with pytest.raises(DpuError, match="Error while connecting"):
                await dpu.rpc("echo")
        finally:
            await dpu.stop()

    asyncio.run(asyncio.wait_for(main(), 60))  # also waits for the threads, so a stuck one fails here
    assert [thread for thread in threading.enumerate() if "asyncio" in thread.name] == []


def test_a_daemon_that_dies_at_once_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Dpu:
        dpu = stand_in("dies", tmp_path, monkeypatch)
        with pytest.raises(DpuError, match="ended with 1 before it was ready") as caught:
            await dpu.start()
        assert caught.value.log == ["stand-in: hello", "stand-in: no"]
        return dpu

    dpu = asyncio.run(main())
    assert Identity.of(dpu.pid) is None


def test_restarts_are_read_from_the_log(tmp_path: Path) -> None:
    dpu = Dpu(DpuConfig("card"), tmp_path, tmp_path, tmp_path)
    assert dpu.restarts_ms() == []
    dpu.log.write_text(
        "dpud: ready\n"
        "dpud: worker 12 died (signal 9), 13 serves after 1.2 ms\n"
        "dpud: worker 13 died (exit code 1) before it served\n"
        "dpud: worker 13 died (exit code 1), 15 serves after 1700.0 ms\n"
    )
    assert dpu.restarts_ms() == [1.2, 1700.0]


def test_the_first_failure_is_raised_when_all_have_ended() -> None:
    ended = []

    async def wait() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("waiting")

    async def fail() -> None:
        raise EmuError("the first")

    with pytest.raises(EmuError, match="the first"):
        asyncio.run(together([wait(), fail()]))
    assert ended == ["waiting"]
    asyncio.run(together([]))


def test_a_panic_is_shown_with_its_reason() -> None:
    panic = "[ 1.0] Kernel panic - not syncing: Fatal exception"
    oops = [f"oops {number}" for number in range(50)]
    trace = [f"trace {number}" for number in range(50)]
    assert panic_lines("\n".join([*oops, panic, "[ 1.1] end"])) == [
        *oops[-(CONSOLE_LINES - 2) :],
        panic,
        "[ 1.1] end",
    ]
    assert panic_lines("\n".join(["boot", panic, *trace])) == [panic, *trace[: CONSOLE_LINES - 1]]
    assert panic_lines(panic) == [panic]
