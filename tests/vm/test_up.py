"""emu up, status, exec, cp, console and down: a real lab, used from the outside as a person and as a script would."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emu.paths import cache_dir
from emu.process import Identity
from tests.conformance.test_upgrade import MOVED, PACKAGE, other_code

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1200)]

SCENARIO = """
[vm.web]
memory = "256M"
nvme = ["card.a"]
[dpu.card.nvme.a]
namespaces = [{ size = "64M" }, { backend = "file", size = "64M" }]
"""


class Emu:
    """The command with a runtime directory of its own, so that what is left can be seen."""

    def __init__(self, base: Path, accel: str) -> None:
        self.base = base
        self.accel = accel
        self.labs = base / f"dpu-emu-{os.getuid()}" / "labs"
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(base)}
        (base / "up.toml").write_text(SCENARIO)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", "emu.cli", *words]

    def __call__(self, *words: str, input: bytes = b"", code: int = 0) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            self.command(*words), env=self.environment, input=input, capture_output=True, timeout=600
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout!r}\n{done.stderr.decode()}"
        return done

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code).stdout)

    def popen(self, *words: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command(*words), env=self.environment, stdin=pipe, stdout=pipe, stderr=pipe)

    def up(self, name: str) -> Any:
        return self.json("up", str(self.base / "up.toml"), "--name", name, "--accel", self.accel)


@pytest.fixture(scope="module")
def emu(request: pytest.FixtureRequest) -> Iterator[Emu]:
    with tempfile.TemporaryDirectory(prefix="emu-", dir="/tmp") as base:
        emu = Emu(Path(base), request.config.getoption("--dpu-emu-accel"))
        yield emu
        emu("down", "--all")
        emu("clean")
        assert list(emu.labs.iterdir()) == []


@pytest.fixture(scope="module")
def lab(emu: Emu) -> Any:
    return emu.up("my")


def await_end(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], 60)[0], f"{pid} still runs"
    os.close(fd)


def files_of(lab: Any) -> Path:
    return cache_dir("files") / Path(lab["directory"]).name


def test_up_returns_when_all_is_there(emu: Emu, lab: Any) -> None:
    assert (lab["ok"], lab["state"], lab["lab"]) == (True, "up", "my")
    names = lab["vms"]["web"]["controllers"]["card.a"]["namespaces"]
    assert sorted(names) == ["nvme0n1", "nvme0n2"]
    shown = emu.json("status")["labs"]["my"]
    assert {key: shown[key] for key in ("vms", "dpus", "pid")} == {key: lab[key] for key in ("vms", "dpus", "pid")}
    parents = [
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in (lab["vms"]["web"]["pid"], lab["dpus"]["card"]["pid"])
    ]
    assert parents == [lab["pid"]] * 2
    assert b'lab "my" is up already' in emu("up", str(emu.base / "up.toml"), "--name", "my", code=2).stderr


def test_exec_is_the_program(emu: Emu, lab: Any) -> None:
    done = emu("exec", "web", "--", "sh", "-c", "cat; echo err >&2; exit 7", input=b"in\0\xff" * 100_000, code=7)
    assert (done.stdout, done.stderr) == (b"in\0\xff" * 100_000, b"err\n")
    emu("exec", "web", "--", "sh", "-c", "kill -TERM $$", code=128 + signal.SIGTERM)
    assert b"No such file" in emu("exec", "web", "--", "no-such-program", code=127).stderr
    assert b"has no VM wb" in emu("exec", "wb", "--", "true", code=125).stderr
    said = json.loads(emu("exec", "--json", "web", "--", "sh", "-c", "echo out; exit 3", code=3).stdout)
    assert said == {"ok": False, "code": 3, "stdout": "out\n", "stderr": ""}


def test_a_guest_has_the_name_of_its_vm(emu: Emu, lab: Any) -> None:
    assert emu("exec", "web", "--", "hostname").stdout == b"web\n"
    look = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    assert emu("exec", "web", "--", "python3", "-c", look).stdout == b"127.0.0.1\n"


def test_exec_streams_and_its_end_is_the_program_s_end(emu: Emu, lab: Any) -> None:
    with emu.popen("exec", "web", "--", "sh", "-c", "echo $$; read x; echo got $x; exec sleep 1000") as running:
        assert running.stdin is not None and running.stdout is not None
        pid = int(running.stdout.readline())  # comes while the program runs
        running.stdin.write(b"it\n")
        running.stdin.flush()
        assert running.stdout.readline() == b"got it\n"
        assert emu("exec", "web", "--", "cat", f"/proc/{pid}/comm").stdout == b"sleep\n"
        running.send_signal(signal.SIGINT)
        _, complaint = running.communicate(timeout=60)
        assert (running.returncode, complaint) == (130, b"emu: interrupted\n")
    gone = f"while [ -e /proc/{pid} ]; do sleep 0.05; done"
    emu("exec", "web", "--", "sh", "-c", gone)


def test_workloads_run_in_it(emu: Emu, lab: Any, tmp_path: Path) -> None:
    """Those of a file; with the report that `emu run` makes. The lab stays, whatever becomes of them."""
    fio = '[[workload]]\ntype = "fio"\nrw = "write"\nsize = "1M"\nnsid = 2\n'
    (tmp_path / "more.toml").write_text(f"[vm.other]\n{fio}")
    report = emu.json("run", "--lab", "my", str(tmp_path / "more.toml"), "--out", str(tmp_path / "out"))
    (done,) = report["workloads"]
    assert report["ok"] and (done["vm"], done["device"]) == ("web", "card.a")
    assert done["card"]["io"]["bytes_written"] == 1 << 20 and done["card"]["complete"]
    (params,) = report["scenario"]["workload"]
    assert (params["nsid"], list(report["scenario"]["vm"])) == (2, ["web"])
    left = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    logs = {"web/console.log", "web/dmesg.txt", "web/qemu.log", "web/qemu.txt", "card/dpud.log"}
    assert left >= {"report.json", "report.html", "workloads/01-fio/fio.json", *(f"lab/{name}" for name in logs)}

    (tmp_path / "wrong.toml").write_text(f"{fio}{fio}nsid = 3\n".replace("nsid = 2\nnsid", "nsid"))
    wrong = emu("run", "--lab", "my", str(tmp_path / "wrong.toml"), code=2).stderr.decode()
    assert f'{tmp_path}/wrong.toml:10: controller "card.a" has namespaces 1 to 2' in wrong
    assert b"there are no workloads to run" in emu("run", "--lab", "my", code=2).stderr

    endless = ["--workload", "fio:randread,runtime=1h", "--out", str(tmp_path / "endless")]
    with emu.popen("run", "--lab", "my", *endless) as running:
        emu("exec", "web", "--", "sh", "-c", "until pidof fio; do sleep 0.05; done")
        assert b"my runs workloads already" in emu("run", "--lab", "my", "--workload", "fio:read", code=2).stderr
        running.send_signal(signal.SIGINT)
        _, complaint = running.communicate(timeout=60)
        assert running.returncode == 130 and complaint.endswith(b"emu: interrupted\n")
    emu("exec", "web", "--", "sh", "-c", "while pidof fio; do sleep 0.05; done")
    assert json.loads((tmp_path / "endless/report.json").read_text())["error"] == "the run has not come to its end"
    reads = ["--workload", "fio:read,size=1M,device=card.a", "--out", str(tmp_path / "again")]
    again = emu.json("run", "--lab", "my", *reads)
    assert again["ok"] and again["workloads"][0]["card"]["io"]["bytes_read"] == 1 << 20


def test_trace_and_metrics_are_of_the_lab(emu: Emu, lab: Any, tmp_path: Path) -> None:
    with emu.popen("trace", str(tmp_path / "t.json"), "--for", "1h") as tracing:
        assert tracing.stdin is not None and tracing.stderr is not None
        assert tracing.stderr.readline() == b"tracing for 3600 s\n"
        emu("exec", "web", "--", "sh", "-c", "dd if=/dev/nvme0n1 of=/dev/null bs=4k count=20 iflag=direct")
        tracing.send_signal(signal.SIGINT)
        told, _ = tracing.communicate(timeout=60)
    assert tracing.returncode == 0 and re.search(rb"t.json: \d+ commands\n", told)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event.get("ph") == "b" and event["name"] == "Read" for event in events) >= 20
    assert b'dpu_up{dpu="card"} 1' in emu("metrics").stdout
    assert b"--dpu is one of: card" in emu("trace", "t", "--dpu", "crad", code=2).stderr


def test_cp_both_ways(emu: Emu, lab: Any, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    data = os.urandom(1 << 20)
    (tree / "below" / "data").write_bytes(data)
    (tree / "run").write_text("#!/bin/sh\n")
    (tree / "run").chmod(0o750)
    (tree / "link").symlink_to("run")
    emu("cp", str(tree), str(tree / "run"), "web:/tmp")
    emu("cp", str(tree / "run"), "web:/tmp/renamed")
    back = tmp_path / "back"
    emu("cp", "web:/tmp/tree", str(back))
    assert (back / "below" / "data").read_bytes() == data
    assert (back / "run").stat().st_mode & 0o777 == 0o750 and (back / "link").readlink() == Path("run")
    emu("cp", "web:/tmp/renamed", "web:/tmp/run", str(tmp_path))
    assert (tmp_path / "renamed").read_bytes() == (tmp_path / "run").read_bytes() == b"#!/bin/sh\n"
    assert not list(tmp_path.glob(".emu-cp*"))
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(300 << 20)  # more than all of the guest's RAM
    assert b"No space left" in emu("cp", str(large), "web:/root", code=3).stderr
    left = emu("exec", "web", "--", "find", "/root", "-name", "large", "-o", "-name", ".emu-cp*").stdout
    assert left == b""
    for words in (
        ("web:/tmp/none", str(tmp_path)),
        (str(tmp_path / "none"), "web:/tmp"),
        (str(tree / "run"), "web:/none/x"),
        (str(tree / "run"), "web:/tmp/none/"),
        ("web:/dev/nvme0n1", str(tmp_path)),
        (str(tree), "web:/a", "web:/b"),
    ):
        assert b"  fix: " in emu("cp", *words, code=2).stderr, words


def test_top_counts_what_fio_does(emu: Emu, lab: Any) -> None:
    """Over its intervals, exactly as many commands as fio says; one of them is a Flush."""
    with emu.popen("top", "--json", "--interval", "0.2") as top:
        assert top.stdout is not None
        top.stdout.readline()  # it has its first look
        job = "--rw=randrw --bs=4k --size=4m --iodepth=8 --direct=1 --ioengine=io_uring --output-format=json"
        fio = ["fio", "--name=x", "--filename=/dev/nvme0n1", *job.split()]
        done = json.loads(emu("exec", "-n", "web", "--", *fio).stdout)["jobs"][0]
        commands = 0
        views: list[dict[str, Any]] = []
        while commands < 1024 or views[-1]["commands"]:
            view = json.loads(top.stdout.readline())["dpus"]["card"]
            views.append(view["controllers"]["a"])
            commands += views[-1]["commands"]
        top.send_signal(signal.SIGINT)
        top.communicate(timeout=60)
        assert top.returncode == 0
    assert done["read"]["total_ios"] + done["write"]["total_ios"] == 1024
    assert commands - 1024 in (0, 1)  # the close of a block device flushes
    moved = [round(sum(view[key] for view in views)) for key in ("read_bytes_per_s", "write_bytes_per_s")]
    assert min(moved) > 0
    busy = next(view for view in views if view["commands"])
    assert 0 < busy["latency_ns"]["p50"] <= busy["latency_ns"]["p99"] <= busy["latency_ns"]["p99.9"]
    assert view["cpus"].keys() >= {"asic", "control", "keeper"}
    assert b"card.a" in emu("top", "--once", "--interval", "0.1").stdout


def test_upgrade_under_verify(emu: Emu, lab: Any, tmp_path: Path) -> None:
    """Code with another layout, and back, while fio writes and verifies; the guest's kernel notices nothing."""
    code = other_code(tmp_path, layout=MOVED)
    fio = ["fio", "--name=v", "--filename=/dev/nvme0n2", "--rw=randwrite", "--bs=4k", "--iodepth=16", "--direct=1"]
    fio += [
        "--ioengine=io_uring",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--size=16M",
        "--loops=1000",
        "--output-format=json",
    ]
    running = emu.popen("exec", "web", "--", *fio, "--runtime=600", "--time_based")
    try:
        for path in (code, PACKAGE.parent):
            row = emu.json("dpu", "upgrade", str(path))["dpus"]["card"]
            assert row["pause_ms"] > 0
    finally:
        emu("exec", "web", "--", "sh", "-c", "kill -INT $(pidof fio)")
        out, err = running.communicate(timeout=120)
    job = json.loads(out[out.index(b"{") :])["jobs"][0]
    assert job["error"] == 0, (job, err)
    assert job["write"]["total_ios"] > 100 and job["read"]["total_ios"] > 0, "it has verified"
    dmesg = emu("exec", "web", "--", "dmesg").stdout.decode()
    assert not re.search(r"nvme.*(timeout|reset|error)", dmesg), dmesg[-2000:]
    worse = other_code(tmp_path / "worse", layout=("VERSION: Final = ", "VERSION: Final = 1 + "))
    refused = emu("dpu", "upgrade", str(worse), code=3)
    assert b"cannot take over" in refused.stderr
    assert b"which code?" in emu("dpu", "upgrade", code=2).stderr


def test_console_shows_what_is_typed_into_it(emu: Emu, lab: Any) -> None:
    with emu.popen("console", "web") as console:
        assert console.stdin is not None and console.stdout is not None
        console.stdin.write(b"\necho typed-$((6*7))\n")
        console.stdin.flush()
        shown = b""
        while b"typed-42" not in shown:
            shown += (piece := os.read(console.stdout.fileno(), 4096))
            assert piece, shown
        console.send_signal(signal.SIGINT)
        console.communicate(timeout=60)
        assert console.returncode == 130
    assert b"typed-42" in emu("console", "--once", "web").stdout


def test_console_and_top_on_a_terminal(emu: Emu, lab: Any) -> None:
    """Ctrl-C is the guest's, Ctrl-] leaves, and the terminal is as it was before; top redraws until Ctrl-C."""
    with terminal(emu.command("console", "web"), emu.environment) as (master, process):
        before = termios.tcgetattr(master)
        read_until(master, rb"Ctrl-\] leaves")
        os.write(master, b"\necho up-$((2+3))\n")
        read_until(master, rb"up-5\r\n.*guest# ")
        os.write(master, b"sleep 1001\n")
        # before it runs, the shell takes Ctrl-C for text
        running = "for i in $(seq 300); do ps | grep -q '[s]leep 100[1]' && exit; sleep 0.1; done; exit 1"
        emu("exec", "web", "--", "sh", "-c", running)
        os.write(master, b"\x03")
        read_until(master, rb"guest# ")
        os.write(master, b"echo typed-$((6*9))\n")
        read_until(master, rb"typed-54")
        os.write(master, b"\x1d")
        assert process.wait(60) == 0
        assert termios.tcgetattr(master) == before
    with terminal(emu.command("exec", "-t", "web", "--", "sh"), emu.environment) as (master, process):
        read_until(master, rb"[#$] ")
        os.write(master, b"stty size; sleep 1002\n")
        read_until(master, rb"40 100\r\n")
        os.write(master, b"\x03")  # the sleep's, not ours
        read_until(master, rb"[#$] ")
        os.write(master, b"exit 5\n")
        assert process.wait(60) == 5
    assert b"-t needs a terminal" in emu("exec", "-t", "web", "--", "sh", code=125).stderr
    with terminal(emu.command("top", "--interval", "0.1"), emu.environment) as (master, process):
        for _ in range(3):
            read_until(master, rb"card\.a")
        os.write(master, b"\x03")
        assert process.wait(60) == 0


@contextlib.contextmanager
def terminal(command: list[str], environment: dict[str, str]) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A program that is the foreground of a terminal of its own; the terminal's other end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    try:
        process = subprocess.Popen(
            command, env=environment, stdin=slave, stdout=slave, stderr=slave, preexec_fn=own_terminal
        )
        os.set_blocking(master, True)
        with process:
            try:
                yield master, process
            finally:
                process.kill()
    finally:
        os.close(slave)
        os.close(master)


def read_until(fd: int, pattern: bytes) -> None:
    shown = b""
    while not re.search(pattern, shown, re.DOTALL):
        assert select.select([fd], [], [], 60)[0], shown
        shown += os.read(fd, 65536)


@pytest.mark.slow
def test_a_guest_that_reboots_is_found_again(emu: Emu, lab: Any) -> None:
    with emu.popen("exec", "-n", "web", "--", "sleep", "1000") as running:
        emu("exec", "web", "--", "sh", "-c", "touch /tmp/before; reboot")
        _, complaint = running.communicate(timeout=600)
        assert running.returncode in (125, 128 + signal.SIGTERM, 128 + signal.SIGKILL), complaint
    # the old guest may still be ending, and takes programs that come in this moment with it
    look = emu.command("exec", "-n", "web", "--", "sh", "-c", "ls /tmp/before; ls /dev/nvme0n?")
    while (
        seen := subprocess.run(look, env=emu.environment, capture_output=True)
    ).returncode or b"/tmp" in seen.stdout:
        assert seen.returncode in (0, 125), seen.stderr
    assert seen.stdout == b"/dev/nvme0n1\n/dev/nvme0n2\n"


def test_a_killed_supervisor_is_cleaned_up_after_twice_and_another_lab_lives_on(emu: Emu, lab: Any) -> None:
    """Issue 3, 5.6."""
    killed = emu.up("killed")
    before = sorted(emu.labs.iterdir())
    assert b"2 labs are up: killed, my" in emu("exec", "web", "--", "true", code=125).stderr
    os.kill(killed["pid"], signal.SIGKILL)
    for pid in (killed["pid"], killed["vms"]["web"]["pid"], killed["dpus"]["card"]["pid"]):
        await_end(pid)  # without our help
    assert emu.json("status")["labs"]["killed"]["state"] == "crashed"
    assert sorted(emu.labs.iterdir()) == before and files_of(killed).exists()
    found = emu.json("clean")["found"]
    assert {one["lab"] for one in found} == {Path(killed["directory"]).name}
    left = {path for path in before if path.name.startswith(Path(lab["directory"]).name)} | {emu.labs / "my.up"}
    assert set(emu.labs.iterdir()) == left and not files_of(killed).exists() and files_of(lab).exists()
    assert emu.json("clean")["found"] == []
    assert set(emu.labs.iterdir()) == left
    assert emu("exec", "web", "--", "echo", "alive").stdout == b"alive\n"


def test_an_interrupted_up_leaves_nothing(emu: Emu) -> None:
    before = set(emu.labs.iterdir())
    with emu.popen("up", str(emu.base / "up.toml"), "--name", "no", "--accel", emu.accel) as starting:
        assert starting.stderr is not None
        while b"Starting 1 VM" not in (line := starting.stderr.readline()):
            assert line
        starting.send_signal(signal.SIGINT)
        starting.communicate(timeout=60)
        assert starting.returncode == 130
    assert set(emu.labs.iterdir()) == before


def test_an_up_that_is_ended_by_a_script_leaves_nothing(emu: Emu) -> None:
    """SIGTERM, as of timeout(1)."""
    before = set(emu.labs.iterdir())
    with emu.popen("up", str(emu.base / "up.toml"), "--name", "no", "--accel", emu.accel, "--json") as starting:
        assert starting.stderr is not None
        while b"Starting 1 VM" not in (line := starting.stderr.readline()):
            assert line
        starting.terminate()
        out, _ = starting.communicate(timeout=60)
    assert (starting.returncode, json.loads(out)["error"]["exit_code"]) == (143, 143)
    assert set(emu.labs.iterdir()) == before


def test_down_leaves_nothing(emu: Emu, lab: Any) -> None:
    """The last test of this module: it ends the lab of the others."""
    pids = [lab["pid"], lab["vms"]["web"]["pid"], lab["dpus"]["card"]["pid"]]
    identities = [Identity.of(pid) for pid in pids]
    assert emu.json("down")["ended"] == ["my"]
    assert not any(one is not None and one.alive() for one in identities)
    assert list(emu.labs.iterdir()) == [] and not files_of(lab).exists()
    assert b"no lab is up" in emu("status").stdout
