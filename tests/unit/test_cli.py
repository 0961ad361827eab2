"""The emu command: what it accepts, prints and returns. Nothing is started here."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import emu.lab
import emu.run
import emu.scenario
from dpu.errors import EmuError
from dpu.target import Transport
from emu import cli
from emu.accel import Accel
from emu.daemon import rpc_calls
from emu.dryrun import Place, as_json
from emu.images import Image
from emu.lab import plan
from emu.paths import runtime_path
from emu.qemu import Qemu
from emu.report import Report
from emu.scenario import ScenarioError, parse
from emu.vm import Platform
from emu.workloads import Result, Sample
from tests.support.rpc_host import serving

PLATFORM = Platform(
    Qemu(Path("/opt/qemu-system-x86_64"), "11.1", "user"),
    Accel("tcg", "asked for"),
    Image(Path("/img/vmlinux"), Path("/img/initrd"), "abc"),
)
SCENARIO = """
[vm.web]
nvme = ["card.a", "card.b"]
[dpu.card]
cpus = [0, 1]
[dpu.card.nvme.a]
namespaces = [{ size = "1537K", block_size = 512 }, { backend = "null", size = "3M" }]
[dpu.card.nvme.b]
model = "it's a card"
namespaces = [{ backend = "file", size = "64M", path = "my disk.raw" }, { backend = "file", size = "1M" }]
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(emu.lab, "prepare", lambda config, progress: PLATFORM)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(emu.scenario, "memory_available_bytes", lambda: 8 << 30)


def written(text: str, name: str = "x.toml") -> str:
    Path(name).write_text(text)
    return name


# -- check


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", written(SCENARIO)]) == 0
    assert capsys.readouterr().out == "x.toml: ok (1 VM, 1 DPU, 0 workloads)\n"
    assert cli.main(["check", "demo"]) == 0
    assert "demo: ok" in capsys.readouterr().out
    assert cli.main(["check", written("[vm.a]\nx = 1\ny = 2\n")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and re.findall(r"x\.toml:(\d)", said.err) == ["2", "3"]
    assert cli.main(["check", "nothing.toml"]) == 2
    complaint = capsys.readouterr().err
    assert complaint == (
        "emu: error: there is no scenario nothing.toml\n"
        "  fix: give the path of a file, or a packaged one: credits, demo, frozen, garbage, resize\n"
    )


def test_check_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--json", written(SCENARIO)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] and document["scenario"]["vm"]["web"]["memory"] == 512 << 20
    assert cli.main(["check", "--json", written("[vm.a]\nx = 1\n")]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["problems"][0]["where"] == "x.toml:2" and document["error"]["exit_code"] == 2


def test_the_readme_s_scenario_is_whole_and_has_no_file_that_a_second_lab_would_want() -> None:
    readme = (Path(cli.__file__).parents[1] / "README.md").read_text()
    toml, program = re.findall(r"`(?:my\.toml|check\.sh)`:\n\n```\w+\n(.*?)```", readme, re.DOTALL)
    written(program, "check.sh")
    assert cli.main(["check", written(toml, "my.toml")]) == 0
    scenario = emu.scenario.load(Path("my.toml"))
    assert len(scenario.workloads) == 3
    namespaces = [one for dpu in scenario.dpus.values() for nvme in dpu.nvme.values() for one in nvme.namespaces]
    assert len(namespaces) == 3 and not any(one.path for one in namespaces)


# -- errors and exit codes


def test_an_error_is_one_line_and_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run"]) == 2
    assert capsys.readouterr().err == (
        "emu: error: there is nothing to run\n  fix: give a scenario, or --nvme SIZE; `emu run demo` is a start\n"
    )
    assert cli.main(["run", "demo", "--nvme", "1G"]) == 2
    assert cli.main(["run", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["message"], error["exit_code"]) == ("there is nothing to run", 2)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_missing_on_the_machine_is_exit_code_3(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Loud(EmuError):
        def __str__(self) -> str:
            return super().__str__() + "\nlast console lines:\n  panic"

    async def fail(*arguments: Any) -> None:
        raise Loud("no luck", "get some")

    monkeypatch.setattr(emu.run, "run", fail)
    assert cli.main(["run", "demo", *["--json"] * as_json]) == 3
    said = capsys.readouterr()
    (path,) = Path("out").glob("demo-*/report.json")
    report = json.loads(path.read_text())
    assert not report["ok"] and report["error"].startswith("no luck")
    if as_json:
        document = {
            "message": "no luck",
            "fix": "get some",
            "exit_code": 3,
            "details": "last console lines:\n  panic",
        }
        assert json.loads(said.out) == {"ok": False, "error": document}
    else:
        assert said.err.endswith("emu: error: no luck\n  fix: get some\nlast console lines:\n  panic\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-command"], "no-such-command"),
        ([], "COMMAND"),
        (["run", "--accel", "xen"], "xen"),
        (["images"], "VERB"),
        (["images", "bild"], "bild"),
        (["run", "demo", "--nothing"], "--nothing"),
        (["run", "--nvme", "1G", "--workload", "fio:"], "nothing follows the colon"),
        (["run", "--nvme", "1G", "--workload", "fio:,iodepth=2"], "nothing follows the colon"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], said: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, *["--json"] * as_json]) == 2
    printed = capsys.readouterr()
    if as_json:
        document = json.loads(printed.out)
        assert said in document["error"]["message"] and document["error"]["exit_code"] == 2 and not document["ok"]
    else:
        assert said in printed.err and "  fix: " in printed.err and printed.out == ""


def test_a_wrong_word_points_to_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words, help in (
        (["down", "--labb", "x"], "emu down --help"),
        (["check", "demo", "demo"], "emu check --help"),
        (["fabric", "down", "--nothing"], "emu fabric down --help"),
        (["--nothing", "down"], "emu --help"),
    ):
        assert cli.main(words) == 2
        assert f"  fix: see `{help}`\n" in capsys.readouterr().err, words


def test_help_lists_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["run", "--help"], ["images", "--help"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        assert "130 interrupted" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["exec", "--help"])
    said = capsys.readouterr().out
    assert said.count("exit code:") == 1 and "exit codes:" not in said and "130 interrupted" in said


def test_an_output_that_nobody_reads_ends_it_as_sigpipe_does() -> None:
    program = "import sys, emu.cli; sys.exit(emu.cli.main(['check', 'demo', '--json']))"
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-u", "-c", program]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, timeout=60)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_is_told_by_exit_code_and_document(number: int, code: int, as_json: bool) -> None:
    program = (
        "import sys, asyncio, emu.run, emu.cli, emu.lab\n"
        "async def forever(*arguments):\n"
        "    signals = emu.lab._SigTerm()\n"
        "    signals.install()\n"
        "    print('here', file=sys.stderr, flush=True)\n"
        "    try: await asyncio.Event().wait()\n"
        "    except BaseException as error:\n"
        "        print('down', file=sys.stderr, flush=True)\n"
        "        signals.remove(error)\n"
        "        raise\n"
        "emu.run.run = forever\n"
        "sys.exit(emu.cli.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "run", "demo", *["--json"] * as_json]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == "here\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert child.returncode == code
    if as_json:
        error = {"message": "interrupted; the lab is down", "fix": "", "exit_code": code}
        assert (json.loads(out), err) == ({"ok": False, "error": error}, "down\n")
    else:
        assert (out, err) == ("", "down\nemu: interrupted; the lab is down\n")


# -- run


def fake_run(monkeypatch: pytest.MonkeyPatch, ok: bool) -> list[Any]:
    calls: list[Any] = []

    async def run(scenario: Any, config: Any, progress: Any, report: Report) -> None:
        calls.append((scenario, config))
        result = Result("script", "my [bold] script", "web", "card.a", ok, "" if ok else "it broke")
        result.samples = [Sample("exit_code", 0, "1")]
        result.files = {"stdout.txt": b"hello"}
        report.workloads.append(result)

    monkeypatch.setattr(emu.run, "run", run)
    return calls


def test_run_writes_its_report_and_a_second_run_replaces_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_run(monkeypatch, ok=True)
    mine = Path("out/x/mine")
    old = Path("out/x/workloads/09-old/stdout.txt")
    for number in range(2):
        assert mine.exists() == bool(number)
        assert cli.main(["run", written(SCENARIO), "--out", "out/x", "--cold", "--accel", "tcg"]) == 0
        assert "my [bold] script" in capsys.readouterr().out
        assert json.loads(Path("out/x/report.json").read_text())["ok"]
        assert Path("out/x/workloads/01-my-bold-script/stdout.txt").read_text() == "hello"
        assert not old.exists()
        old.parent.mkdir()
        old.touch()
        if number == 0:
            mine.touch()
    assert mine.exists()
    config = calls[0][1]
    assert (config.restore, config.accel, config.out, config.keep) == (False, "tcg", Path("out/x/lab"), False)


def test_run_json_is_the_report_and_a_failed_workload_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(monkeypatch, ok=False)
    assert cli.main(["run", "demo", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (path,) = Path("out").glob("demo-*/report.json")
    assert document == json.loads(path.read_text())
    assert (document["schema"], document["ok"]) == (1, False)
    assert document["workloads"][0]["error"] == "it broke"
    assert cli.main(["run", "demo"]) == 1
    assert "my [bold] script: it broke" in capsys.readouterr().out


def test_an_output_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(monkeypatch, ok=True)
    Path("file").touch()
    assert cli.main(["run", "demo", "--out", "file"]) == 3
    assert "cannot write the report below file" in capsys.readouterr().err


# -- without a scenario


def test_options_make_a_scenario() -> None:
    scenario = cli.scenario_of_options(
        ["1G", "128M,backend=file,block_size=4096,path=x.raw"], ["fio:randwrite,iodepth=8,runtime=2s", "verify"]
    )
    (vm,) = scenario.vms.values()
    assert vm.nvme == ("card.disk0", "card.disk1")
    namespace = scenario.dpus["card"].nvme["disk1"].namespaces[0]
    assert (namespace.backend, namespace.size, namespace.block_size, namespace.path) == (
        "file",
        128 << 20,
        4096,
        "x.raw",
    )
    shown = [(params.type, params.device) for params in scenario.workloads]
    assert shown == [(kind, f"card.disk{disk}") for kind in ("fio", "verify") for disk in (0, 1)]
    assert (scenario.workloads[0].rw, scenario.workloads[0].iodepth, scenario.workloads[0].runtime) == (
        "randwrite",
        8,
        2,
    )
    assert cli.scenario_of_options(["1G"], []).workloads == ()


@pytest.mark.parametrize(
    ("nvme", "workload", "expected"),
    [
        ("1X", "verify", "--nvme 1X: size: '1X' is not a size"),
        ("1G,blck=4", "verify", '--nvme 1G,blck=4: unknown key "blck"'),
        ("1G,blck", "verify", '"blck" in "1G,blck" is not KEY=VALUE'),
        ("1G", "fio:randred", '--workload fio:randred: unknown rw "randred"; did you mean "randread"?'),
        ("1G", "fo", '--workload fo: unknown workload type "fo"; did you mean "fio"?'),
        ("1G", "verify:x", "--workload verify:x: verify takes nothing after a colon"),
    ],
)
def test_wrong_options_are_named(nvme: str, workload: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--nvme", nvme, "--workload", workload]) == 2
    assert expected in capsys.readouterr().err


# -- dry run


def test_spdk_rpc_lines_send_what_the_lab_sends() -> None:
    """The judge is spdk-rpc itself: with --dry-run it prints the request that it would send."""
    config = parse(SCENARIO, "x.toml", Path()).lab_config()
    directory = Path("/d")
    place = Place(directory, Path("/f"))
    lines = as_json(config, plan(config, PLATFORM, directory, place.files), place)["dpus"]["card"]["spdk_rpc"]
    expected = rpc_calls(config.dpus[0], directory / "card", place.files)
    assert len(lines) == len(expected) == 13
    program = "import sys; from spdk.spdk_rpc import main; sys.exit(main())"
    for line, (method, parameters) in zip(lines, expected, strict=True):
        assert Path(line[0]).name == "spdk-rpc" and line[5:7] == ["-s", "/d/card/rpc"]
        done = subprocess.run(
            [sys.executable, "-c", program, "--dry-run", *line[1:]], capture_output=True, text=True, check=True
        )
        request = json.loads(done.stdout.partition("Request:")[2])
        assert request["method"] == method
        assert set_parameters(request["params"]) == parameters


def test_spdk_rpc_lines_send_the_options_of_front_ends() -> None:
    """The judge is the target that they configure."""
    with tempfile.TemporaryDirectory(prefix="dpu-t-") as folder, serving(Path(folder)) as (socket, _, target):
        text = (
            "[vm.a]\n[dpu.d]\ndisable_mappable_bar0 = true\ndisable_shadow_doorbells = true\n"
            "[dpu.d.nvme.c]\ndisable_msix = true\nallow_unsealed_memory = true\nnamespaces = [{ size = '1M' }]\n"
        )
        config = parse(text, "x.toml", Path()).lab_config()
        place = Place(Path(folder), Path(folder))
        Path(folder, "d/c").mkdir(parents=True)
        shown = as_json(config, plan(config, PLATFORM, place.directory, place.files), place)
        for line in shown["dpus"]["d"]["spdk_rpc"]:
            subprocess.run([socket if word == f"{folder}/d/rpc" else word for word in line], check=True, timeout=60)
        assert target.transport == Transport(disable_mappable_bar0=True, disable_shadow_doorbells=True)
        (listener,) = (one for subsystem in target.subsystems.values() for one in subsystem.listeners.values())
        assert listener.options == {"disable_msix": True, "allow_unsealed_memory": True}


def set_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without what spdk-rpc adds of its own: flags that are off, and one of NVMe over TCP that is on."""
    return {
        key: set_parameters(value) if isinstance(value, dict) else value
        for key, value in parameters.items()
        if value is not False and key != "c2h_success"
    }


def test_dry_run_prints_lines_that_a_shell_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", written(SCENARIO), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    lines = [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]
    (qemu,) = (line for line in lines if line[0] == "/opt/qemu-system-x86_64")
    devices = [json.loads(word) for word in qemu if word.startswith("{")]
    sockets = [device["socket"]["path"] for device in devices]
    listeners = [line[line.index("-a") + 1] for line in lines if "nvmf_subsystem_add_listener" in line]
    assert sockets == [f"{listener}/cntrl" for listener in listeners]
    (mkdir,) = (line for line in lines if line[0] == "mkdir")
    assert set(listeners) <= set(mkdir)
    truncates = {line[3]: line[2] for line in lines if line[0] == "truncate"}
    opened = [line[line.index("bdev_aio_create") + 1] for line in lines if "bdev_aio_create" in line]
    assert list(truncates) == opened and list(truncates.values()) == [str(64 << 20), str(1 << 20)]
    assert not Path("out").exists()

    assert cli.main(["run", written(SCENARIO), "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [json.loads(device) for device in document["vms"]["web"]["devices"]] == [
        json.loads(word) for word in document["vms"]["web"]["qemu"] if word.startswith("{")
    ]


def test_dry_runs_do_not_meet_leave_nothing_and_name_the_real_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "cache"))
    plans = []
    for _ in range(2):
        assert cli.main(["run", written(SCENARIO), "--dry-run", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert not set(plans[0]["temporary"]) & set(plans[1]["temporary"])
    directory, files = map(Path, plans[0]["temporary"])
    assert directory.parent == runtime_path("labs") and not directory.exists()
    assert files.parent == tmp_path / "cache" / "files" and not files.parent.exists()
    assert [Path(path).parent for path in plans[0]["files"]] == [tmp_path, files]  # the user's own, and the lab's


def test_what_a_dry_run_prints_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pasted whole, with programs that do nothing in place of QEMU, dpud and spdk-rpc."""
    monkeypatch.setenv("DPU_EMU_CACHE", str(tmp_path / "cache"))
    machine = tmp_path / "qemu"
    machine.write_text('#!/bin/sh\necho "$@" >>machines\n')
    machine.chmod(0o755)
    qemu = Qemu(machine, "11.1", "user")
    monkeypatch.setattr(emu.lab, "prepare", lambda config, progress: Platform(qemu, PLATFORM.accel, PLATFORM.image))
    daemon = tmp_path / "dpud"
    daemon.write_text("#!/bin/sh\necho dpud >>machines\nexec sleep 1000\n")
    daemon.chmod(0o755)
    client = tmp_path / "client"
    client.write_text('#!/bin/sh\necho "$@" >>calls\n')
    client.chmod(0o755)
    text = SCENARIO.replace("cpus = [0, 1]\n", "")
    assert cli.main(["run", written(text), "--dry-run"]) == 0
    lines = capsys.readouterr().out
    for program in re.findall(r"^(\S+ -P -m dpu.daemon) ", lines, re.MULTILINE):
        lines = lines.replace(program, str(daemon))
    lines = re.sub(r"^\S*spdk-rpc ", f"{client} ", lines, flags=re.MULTILINE)
    done = subprocess.run(["sh"], input=lines, text=True, capture_output=True, timeout=60)
    assert (done.stderr, done.stdout) == ("", "")
    assert len(Path("calls").read_text().splitlines()) == 13
    assert len(Path("machines").read_text().splitlines()) == 2
    assert Path("my disk.raw").stat().st_size == 64 << 20
    assert not list((tmp_path / "cache" / "files").iterdir())
    assert not Path(re.findall(r"rm -r (\S+)", lines)[0]).exists()


# -- the others


def test_clean_doctor_images(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["clean", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "removed": False, "found": [], "kept": []}
    import emu.doctor

    for code, expected in ((0, 0), (1, 3)):
        monkeypatch.setattr(emu.doctor, "doctor", lambda *a, code=code, **k: code)
        assert cli.main(["doctor", "--offline"]) == expected
    import emu.images

    monkeypatch.setattr(emu.images, "images", lambda: [{"digest": "d1", "kernel": "6.12", "current": True}])
    assert cli.main(["images", "list"]) == 0
    assert capsys.readouterr().out == "d1  kernel 6.12  (current)\n"
    assert cli.main(["images", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"][0]["digest"] == "d1"


def test_scenario_errors_count_once() -> None:
    with pytest.raises(ScenarioError) as caught:
        cli.scenario_of_options(["1G", "2G"], ["fio:x"])
    assert len(caught.value.problems) == 1
