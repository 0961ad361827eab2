"""The `emu` command.

Exit codes: 0 it worked; 1 a workload failed; 2 the command line or the scenario is wrong; 3 this machine or its
network lacks something; 130 interrupted (143: by SIGTERM); 141 nobody reads its output. `emu exec` ends with the exit
code of its program, 128 + n for signal n; 125 where emu itself fails, 126 and 127 where the program cannot be run or
is not there.

With --json, standard output is one JSON document, also when something goes wrong or is interrupted: then it is
``{"ok": false, "error": {"message", "fix", "exit_code"}}``, in it ``"details"`` where logs tell more, beside it
``"problems": [{"where", "message"}]`` for a scenario. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any, NoReturn

from dpu.errors import EmuError, UsageError
from emu.fabric.arguments import EXAMPLES as FABRIC_EXAMPLES
from emu.fabric.arguments import add_verbs as add_fabric_verbs

# Everything else is imported by the command that needs it, so that none waits for another's.

OK, FAILED, USAGE, ENVIRONMENT, INTERRUPTED, TERMINATED, BROKEN_PIPE = 0, 1, 2, 3, 130, 143, 141
EXEC_FAILED = 125  # as of env(1) and containers: not the program's own code

_EXIT_CODES = """\
exit codes: 0 worked, 1 a workload failed, 2 wrong usage or scenario, 3 something is missing here,
            130 interrupted (143: by SIGTERM), 141 nobody reads the output"""
_RUN_EXAMPLES = """\
examples:
  emu run demo                                       the packaged scenario
  emu run my.toml --out out/my
  emu run --nvme 1G --workload fio:randread,iodepth=32
  emu run --nvme 4G,backend=file,path=disk.raw --workload verify --workload fs:xfs
  emu run my.toml --dry-run                          the commands only
  emu run --lab my                                   in a lab that `emu up` has started: its scenario's workloads,
  emu run --lab my --workload fio:randwrite,bs=64k   these, on every controller or with device=card.fast on that one,
  emu run --lab my new.toml                          or those of a file

"""
_UP_EXAMPLES = """\
examples:
  emu up my.toml                                     returns when every VM has its controllers
  emu up my.toml --name second                       another lab of the same scenario
  emu up --nvme 1G                                   without a scenario: one VM, one DPU

"""
_EXEC_HELP = """\
examples:
  emu exec web -- lsblk
  emu exec web -- sh -c 'cat > /tmp/x' < file
  emu exec -t web -- sh                              a shell with a terminal

exit code: the program's own, 128 + n for signal n; 125 emu failed, 126 cannot be run, 127 is not there;
           130 interrupted (143: by SIGTERM), 141 nobody reads our output, as of `emu exec web -- yes | head`

--json: {"ok", "code", "stdout", "stderr"}; output that is no UTF-8 is in "stdout_base64", and "stdout" is null
"""
_CP_EXAMPLES = """\
examples:
  emu cp job.fio tests web:/root/
  emu cp web:/var/log/x.log .

"""

_DPU_EXAMPLES = """\
examples:
  emu dpu upgrade ~/src/dpu-emu                      a checkout takes over, under I/O
  emu dpu upgrade --python ~/new/bin/python          what another environment has installed
  emu dpu upgrade ~/src/dpu-emu --lab my --dpu card

Code that cannot read what the running code has left is refused; nothing has stopped then.

"""
_COMPARE_EXAMPLES = """\
examples:
  emu compare my.toml new.toml --pairs 12
  emu compare my.toml --set workload.0.iodepth=64
  emu compare my.toml --env DPU_EMU_STAMPS=0         what a switch is worth
  emu compare out/last-week out/today                reports that were saved
  emu compare my.toml --aa --trials 20               how often it cries wolf here

here: 0 no difference, 1 NEW is worse in something, 4 it differs and is worse in nothing, 5 undecided, too few runs
to tell (--aa: 0 none, 1 some, 5 undecided)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    own = [*itertools.takewhile(lambda word: word != "--", words)]
    in_a_lab = any(word == "--lab" or word.startswith("--lab=") for word in own)
    as_json, starts_a_lab = "--json" in own, bool({"run", "up", "compare"} & set(own[:1])) and not in_a_lab
    try:
        arguments = _parser().parse_args(words)
        as_json = arguments.json
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except EmuError as error:
        return _complain(error, as_json)
    except KeyboardInterrupt:
        return _interrupted(INTERRUPTED, as_json, starts_a_lab)
    except SystemExit as ended:
        if ended.code == TERMINATED:
            return _interrupted(TERMINATED, as_json, starts_a_lab)
        raise  # --help, --version
    except BrokenPipeError:  # `emu exec web -- yes | head -1`: as a program that SIGPIPE has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be flushed
        return BROKEN_PIPE


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """None is unknown to the command itself: argparse would leave the complaint to `emu`."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="emu",
        description="Virtual machines on emulated DPUs.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dpu-emu {metadata.version('dpu-emu')}")
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON document on standard output")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str,
        function: Callable[[argparse.Namespace], int],
        text: str,
        epilog: str = "",
        codes: str = _EXIT_CODES,
    ) -> Any:
        command = commands.add_parser(
            name,
            parents=[common],
            help=text,
            description=text,
            epilog=epilog + codes,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(command=function)
        return command

    def add_qemu_option(command: argparse.ArgumentParser) -> None:
        command.add_argument("--qemu", metavar="PATH", help="a QEMU of your own (or DPU_EMU_QEMU)")

    def add_machine_options(command: argparse.ArgumentParser) -> None:
        command.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto", help="default: auto")
        add_qemu_option(command)
        command.add_argument("--cold", action="store_true", help="boot; do not restore a template snapshot")

    def add_lab_options(command: argparse.ArgumentParser) -> None:
        command.add_argument("scenario", nargs="?", help="a scenario file, or the name of a packaged one")
        command.add_argument(
            "--nvme",
            action="append",
            default=[],
            metavar="SIZE[,KEY=VALUE...]",
            help="without a scenario: a controller with a namespace of that size; backend=, block_size=, path=",
        )
        add_machine_options(command)

    run = add("run", _run, "Start a lab (or take one that is up), run its workloads, report.", _RUN_EXAMPLES)
    add_lab_options(run)
    run.set_defaults(default_workload=["verify"])
    run.add_argument("--lab", metavar="NAME", help="run only the workloads, in the lab of that name, which is up")
    run.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="TYPE[:MAIN][,KEY=VALUE...]",
        help="without a scenario: fio:randread, verify, fs:xfs, script:PATH; default verify",
    )
    run.add_argument("--out", type=Path, metavar="DIR", help="report and logs (default: out/NAME-TIME)")
    run.add_argument("--keep", action="store_true", help="leave back-end files and sockets' directory behind")
    run.add_argument("--dry-run", action="store_true", help="print every command, start nothing")

    up = add("up", _up, "Start a lab and leave it up; `emu run --lab NAME` runs its workloads.", _UP_EXAMPLES)
    add_lab_options(up)
    up.set_defaults(workload=[], default_workload=[])
    up.add_argument("--name", help="of the lab (default: the scenario's)")
    up.add_argument("--out", type=Path, metavar="DIR", help="keep its logs there (default: they go with the lab)")
    up.add_argument("--foreground", action="store_true", help="stay its supervisor; Ctrl-C ends the lab")
    up.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)  # where emu.up.start reads

    def add_lab_name(command: argparse.ArgumentParser) -> None:
        command.add_argument("--lab", metavar="NAME", help="needed where more than one lab could be meant")

    def add_lab(command: argparse.ArgumentParser, only: str = "needed where more than one lab is up") -> None:
        """NAME or --lab NAME: of commands that take nothing else."""
        command.set_defaults(lab=None)
        either = command.add_mutually_exclusive_group()
        either.add_argument("lab", nargs="?", metavar="NAME", default=argparse.SUPPRESS, help=f"the lab; {only}")
        either.add_argument("--lab", metavar="NAME", default=argparse.SUPPRESS, help="the same")

    status = add("status", _status, "Labs that are up, their VMs and DPUs.")
    add_lab(status, "default: all")

    execute = add("exec", _exec, "Run a program in a VM, with standard input, output and exit code.", _EXEC_HELP, "")
    add_lab_name(execute)
    how = execute.add_mutually_exclusive_group()
    how.add_argument("-n", "--no-stdin", action="store_true", help="its standard input is empty")
    how.add_argument("-t", "--tty", action="store_true", help="on a terminal: for shells, editors, top")
    execute.add_argument("vm", metavar="VM")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...")

    cp = add("cp", _cp, "Copy files and directories into a VM or out of it.", _CP_EXAMPLES)
    add_lab_name(cp)
    cp.add_argument("source", nargs="+", metavar="SOURCE", help="path, or VM:PATH")
    cp.add_argument("target", metavar="TARGET", help="VM:PATH, or path")

    console = add("console", _console, "Show a VM's serial console and type into it; Ctrl-] leaves.")
    add_lab_name(console)
    console.add_argument("--once", action="store_true", help="print what it has shown so far, and leave")
    console.add_argument("vm", metavar="VM")

    top = add("top", _top, "What the cards of a lab do: IOPS, latencies, punts, CPU of each stage; Ctrl-C leaves.")
    add_lab(top)
    top.add_argument(
        "--once", action="store_true", help="one interval only (with --json: one document, else one a line)"
    )
    top.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="between two looks (default: 1)"
    )

    dpu = add("dpu", _dpu, "Have the DPUs of a lab that is up go on with other code.", _DPU_EXAMPLES)
    dpu.add_argument("verb", choices=("upgrade",), metavar="VERB", help="upgrade")
    dpu.add_argument("path", nargs="?", default="", help="a directory with a package dpu, as a checkout is")
    dpu.add_argument("--python", default="", metavar="PATH", help="another interpreter, as of another environment")
    dpu.add_argument("--dpu", metavar="NAME", help="one of them; default: all")
    add_lab_name(dpu)

    down = add("down", _down, "End a lab; nothing of it is left.")
    add_lab(down)
    down.add_argument("--all", action="store_true", help="every lab that is up")

    check = add("check", _check, "Check a scenario file; every problem at once, with its line.")
    check.add_argument("scenario", help="a scenario file, or the name of a packaged one")

    clean = add("clean", _clean, "Remove what crashed labs left behind, and nothing else.")
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    clean.add_argument("--kept", action="store_true", help="also what `emu run --keep` has left")

    doctor = add("doctor", _doctor, "Check what this machine has and lacks, with the fix for each.")
    doctor.add_argument("--offline", action="store_true", help="do not ask the network")
    add_qemu_option(doctor)

    compare = add("compare", _compare, "Whether NEW differs from BASE: paired runs, exact tests.", _COMPARE_EXAMPLES)
    compare.add_argument(
        "base", metavar="BASE", help="a scenario as for run; or a folder or report.json of earlier runs"
    )
    compare.add_argument("new", nargs="?", metavar="NEW", help="the same; default: BASE with --set and --env")
    compare.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of NEW")
    compare.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of NEW's daemons"
    )
    compare.add_argument("--pairs", type=int, default=24, help="runs of each side, 9 or more; default: 24")
    compare.add_argument("--seed", type=int, default=0, help="of the order; default: 0")
    compare.add_argument("--aa", action="store_true", help="BASE against itself: the rate of false positives")
    compare.add_argument("--trials", type=int, default=1, help="repeat the whole comparison; default: 1")
    compare.add_argument("--out", type=Path, metavar="DIR", help="default: out/compare-TIME")
    add_machine_options(compare)

    trace = add("trace", _trace, "What each command of a DPU does, stage by stage, and why; Ctrl-C ends it early.")
    trace.add_argument("file", type=Path, metavar="FILE", help="NAME.json for ui.perfetto.dev; any other: text")
    trace.add_argument("--for", dest="seconds", type=_duration, default=10.0, metavar="TIME", help="default: 10s")
    trace.add_argument("--entries", type=int, help="keep the newest so many commands of each poller")
    add_lab_name(trace)
    trace.add_argument("--dpu", metavar="NAME", help="needed where the lab has more than one")
    trace.add_argument("--socket", help="the JSON-RPC socket of a dpud of your own, in place of a lab's")

    metrics = add("metrics", _metrics, "DPUs' I/O counters for Prometheus, as OpenMetrics text.")
    add_lab_name(metrics)
    metrics.add_argument(
        "socket", nargs="*", metavar="[NAME=]SOCKET", help="JSON-RPC sockets; NAME is the label; default: the lab's"
    )
    metrics.add_argument("--listen", metavar="[HOST:]PORT", help="serve http://HOST:PORT/metrics; else print once")

    fabric = add("fabric", _fabric, "A live fabric: up, show, fault, write, flows, exec, down.", FABRIC_EXAMPLES)
    add_fabric_verbs(fabric, common)

    images = add("images", _images, "Guest images in the cache.", _IMAGES_HELP)
    images.add_argument("verb", choices=tuple(_IMAGES), metavar="VERB", help=" | ".join(_IMAGES))
    return parser


# -- run


def _run(arguments: argparse.Namespace) -> int:
    if arguments.lab is not None:
        return _run_in_lab(arguments)
    from emu.lab import plan, prepare
    from emu.progress import make
    from emu.run import run_to_report

    scenario = _scenario_to_run(arguments)
    out = _out(arguments, scenario.name)
    config = scenario.lab_config(
        qemu=arguments.qemu,
        accel=arguments.accel,
        restore=not arguments.cold,
        out=out / "lab",
        keep=arguments.keep,
    )
    progress = make()
    try:
        if arguments.dry_run:
            from emu import dryrun

            place = dryrun.place(config.name)
            planned = plan(config, prepare(config, progress), place.directory, place.files)
            progress.close()
            if arguments.json:
                _print_json(dryrun.as_json(config, planned, place))
            else:
                print(dryrun.as_shell(config, planned, place), end="")
            return OK
        _make_room(out)
        report = run_to_report(scenario, config, progress, out)
    finally:
        progress.close()
    return _show_report(report.to_json(), out, arguments.json)


def _run_in_lab(arguments: argparse.Namespace) -> int:
    from emu import control
    from emu.progress import make
    from emu.report.document import REPORT
    from emu.scenario import check_workloads

    made = {option: getattr(arguments, option) for option in ("nvme", "qemu", "cold", "keep", "dry_run")}
    for option, given in {**made, "accel": arguments.accel != "auto"}.items():
        if given:
            raise UsageError(f"--{option.replace('_', '-')} does not go with --lab", "the lab is up; leave it out")
    if arguments.scenario and arguments.workload:
        raise UsageError("--workload does not go with a scenario", "write it into the scenario, or leave that out")
    book = control.find(arguments.lab)
    with control.connect(book, control.ANSWER_LIMIT_S) as lab:
        scenario = lab.scenario()
    document = scenario["document"]
    tables, folder, where = _workloads_of(arguments, document, Path(scenario["folder"]))
    if not check_workloads(document, tables, folder, where):
        raise UsageError("there are no workloads to run", "give --workload, or a scenario that has some")
    out = _out(arguments, arguments.lab)
    _make_room(out)
    progress = make()
    try:
        if arguments.scenario:
            progress.note(f"Of {arguments.scenario} only the workloads are taken; lab {arguments.lab} stays as it is")
        with control.connect(book) as lab:
            lab.run(tables, folder, out, progress)
    finally:
        progress.close()
    return _show_report(json.loads((out / REPORT).read_text()), out, arguments.json)


def _workloads_of(arguments: argparse.Namespace, lab: dict[str, Any], folder: Path) -> tuple[Any, Path, Any]:
    """Those of a file, of --workload, or the lab's own: tables, the folder of their paths, where each key is."""
    from emu.scenario import read

    if arguments.scenario:
        with _scenario_file(arguments.scenario) as path:
            document, where = read(path)
            return document.get("workload", []), path.parent, where
    if arguments.workload:
        attached = [device for vm in lab.get("vm", {}).values() for device in vm.get("nvme", [])]
        tables, sources = _workload_tables(arguments.workload, attached)
        return tables, Path(), lambda path: sources[int(path[1])]
    return lab.get("workload", []), folder, lambda path: f"lab {arguments.lab}"


def _out(arguments: argparse.Namespace, name: str) -> Path:
    out: Path | None = arguments.out
    return out or Path("out") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _show_report(report: dict[str, Any], out: Path, as_json: bool) -> int:
    from emu.progress import output
    from emu.report import print_report
    from emu.report.document import PAGE, REPORT

    if as_json:
        _print_json(report)
    else:
        print_report(report, output())
        print(f"report: {out / REPORT}, {PAGE}")
    return OK if report["ok"] else FAILED


def _scenario_to_run(arguments: argparse.Namespace) -> Any:
    if arguments.scenario is None and not arguments.nvme:
        raise UsageError("there is nothing to run", "give a scenario, or --nvme SIZE; `emu run demo` is a start")
    if arguments.scenario is None:
        return scenario_of_options(arguments.nvme, arguments.workload or arguments.default_workload)
    if arguments.nvme or arguments.workload:
        raise UsageError("--nvme and --workload do not go with a scenario", "write them into the scenario")
    return _load(arguments.scenario)


def _load(name: str, changes: Sequence[str] = ()) -> Any:
    """The scenario in the file ``name``, or the packaged one of that name; ``changes`` as :func:`load` has them."""
    from emu.scenario import load

    with _scenario_file(name) as path:
        return load(path, changes)


def _scenario_file(name: str) -> contextlib.AbstractContextManager[Path]:
    """The file ``name``, or the packaged scenario of that name, which is a file for as long as that is used."""
    if Path(name).exists():
        return contextlib.nullcontext(Path(name))
    packaged = {file.name: file for file in (resources.files("emu") / "scenarios").iterdir()}
    if f"{name}.toml" in packaged:
        return resources.as_file(packaged[f"{name}.toml"])
    known = ", ".join(sorted(file.removesuffix(".toml") for file in packaged if file.endswith(".toml")))
    raise UsageError(f"there is no scenario {name}", f"give the path of a file, or a packaged one: {known}")


def scenario_of_options(nvme: Sequence[str], workloads: Sequence[str]) -> Any:
    """The scenario that ``--nvme`` and ``--workload`` describe: one VM, one DPU, every workload on every disk."""
    from emu.scenario import check

    names = [f"disk{number}" for number in range(len(nvme))]
    table, sources = _workload_tables(workloads, [f"card.{name}" for name in names])
    controllers: dict[str, Any] = {}
    for name, text in zip(names, nvme, strict=True):
        size, options = _split_options(text)
        controllers[name] = {"namespaces": [{"size": size, **options}]}
    document = {
        "vm": {"guest": {"vcpus": 2, "memory": "512M", "nvme": [f"card.{name}" for name in names]}},
        "dpu": {"card": {"nvme": controllers}},
        "workload": table,
    }

    def where(path: tuple[str | int, ...]) -> str:
        if path[0] == "workload" and len(path) > 1:
            return sources[int(path[1])]
        return f"--nvme {nvme[names.index(str(path[3]))]}" if len(path) > 3 else "--nvme"

    return check(document, "run", Path(), where)


def _workload_tables(workloads: Sequence[str], devices: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """What ``--workload`` describes, each on every device unless it names one; and the option of each."""
    from emu.workloads import WORKLOADS

    tables: list[dict[str, Any]] = []
    sources: list[str] = []
    for text in workloads:
        head, options = _split_options(text)
        kind, colon, main = head.partition(":")
        if colon and kind in WORKLOADS:
            if not WORKLOADS[kind].main:
                raise UsageError(f"--workload {text}: {kind} takes nothing after a colon", f"write {kind},KEY=VALUE")
            if not main:
                raise UsageError(
                    f"--workload {text}: nothing follows the colon", f"write {kind}:{WORKLOADS[kind].main.upper()}"
                )
            options = {WORKLOADS[kind].main: main, **options}
        for device in [options["device"]] if "device" in options else devices:
            tables.append({"type": kind, **options, "device": device})
            sources.append(f"--workload {text}")
    return tables, sources


def _split_options(text: str) -> tuple[str, dict[str, Any]]:
    """ "1G,backend=file,block_size=4096" as ("1G", {"backend": "file", "block_size": 4096})."""
    head, *rest = text.split(",")
    options: dict[str, Any] = {}
    for item in rest:
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f'"{item}" in "{text}" is not KEY=VALUE', "separate options by commas")
        options[key] = int(value) if value.isdigit() else value
    return head, options


def _make_room(out: Path) -> None:
    """Takes away what an earlier run left in ``out``, and only that."""
    from emu.report.document import LOGS, PAGE, REPORT, WORKLOADS

    if (out / REPORT).is_file():
        (out / REPORT).unlink()
        (out / PAGE).unlink(missing_ok=True)
        for folder in (WORKLOADS, LOGS):
            shutil.rmtree(out / folder, ignore_errors=True)


# -- labs that stay up


def _up(arguments: argparse.Namespace) -> int:
    from emu import control, ledger
    from emu.progress import make
    from emu.supervisor import supervise
    from emu.up import Relay, lab_name, start, status_of, status_text

    scenario = _scenario_to_run(arguments)
    name = lab_name(arguments.name, scenario.name)
    progress = make() if arguments.report_fd is None else Relay(arguments.report_fd)
    if arguments.foreground:
        config = scenario.lab_config(
            qemu=arguments.qemu,
            accel=arguments.accel,
            restore=not arguments.cold,
            out=arguments.out,
            claim=name,
        )
        try:
            asyncio.run(supervise(scenario, config, progress, lambda lab: _say_ready(name, progress, lab)))
        except EmuError as error:
            if isinstance(progress, Relay):
                progress.failed(error)
            raise
        return OK
    ledger.find_not_living(name)  # says at once that it is taken
    words = [arguments.scenario] if arguments.scenario else [f"--nvme={text}" for text in arguments.nvme]
    words += ["--name", name, "--accel", arguments.accel, *["--cold"] * arguments.cold]
    words += [
        word
        for option in ("qemu", "out")
        if (value := getattr(arguments, option))
        for word in (f"--{option}", str(value))
    ]
    try:
        start([sys.executable, "-P", "-m", "emu.cli", "up", "--foreground", *words, "--report-fd"], progress)
    finally:
        progress.close()
    lab = status_of({name: control.find(name)})
    if arguments.json:
        _print_json({"ok": True, "lab": name, **lab[name]})
    else:
        print(status_text(lab))
    return OK


def _say_ready(name: str, progress: Any, lab: Any) -> None:
    from emu.up import Relay

    if isinstance(progress, Relay):
        progress.ready(lab)
    else:
        progress.close()
        print(f"lab {name} is up; Ctrl-C ends it", file=sys.stderr)


def _status(arguments: argparse.Namespace) -> int:
    from emu import control
    from emu.up import status_of, status_text

    known = control.labs()
    if arguments.lab is not None:
        if arguments.lab not in known:
            raise control.no_such_lab(arguments.lab, known)
        known = {arguments.lab: known[arguments.lab]}
    labs = status_of(known)
    if arguments.json:
        _print_json({"ok": True, "labs": labs})
    else:
        print(status_text(labs))
    return OK


def _exec(arguments: argparse.Namespace) -> int:
    from emu import attach, control

    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    try:
        if not argv:
            raise UsageError("there is no program to run", "emu exec VM -- PROGRAM ...")
        if arguments.argv[0] != "--" and argv[0].startswith("-"):
            raise UsageError(f"{argv[0]} stands after the VM", "options go before it, a program after --")
        if arguments.tty and arguments.json:
            raise UsageError("a terminal is no JSON", "leave -t or --json out")
        book = control.find(arguments.lab, arguments.vm)
        if arguments.tty:
            return attach.run_on_terminal(book, arguments.vm, argv)
        if not arguments.json:
            return attach.run(book, arguments.vm, argv, not arguments.no_stdin)
        done = attach.capture(book, arguments.vm, argv, not arguments.no_stdin)
        _print_json({"ok": done["code"] == 0, **done})
        return int(done["code"])
    except EmuError as error:
        return _complain(error, arguments.json, getattr(error, "code", None) or EXEC_FAILED)


def _cp(arguments: argparse.Namespace) -> int:
    from emu import attach, control
    from emu.progress import Late, make

    progress = Late(make)
    try:
        book = control.find(arguments.lab, attach.vm_of([*arguments.source, arguments.target]))
        attach.copy(book, arguments.source, arguments.target, progress)
    finally:
        progress.close()
    if arguments.json:
        _print_json({"ok": True})
    return OK


def _console(arguments: argparse.Namespace) -> int:
    from emu import attach, control

    if arguments.json:
        raise UsageError("a console is no JSON", "leave --json out")
    attach.console(control.find(arguments.lab, arguments.vm), arguments.vm, arguments.once)
    return OK


def _interval(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError("0.05 to 3600 seconds")
    return value


def _duration(text: str) -> float:
    from emu.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _lab_that_is_up(name: str | None) -> tuple[Any, str, dict[str, Any]]:
    """The book, the name and the status of a lab, or of the only one."""
    from emu import control
    from emu.up import status_of

    book = control.find(name)
    name = control.name_of(book)
    lab = status_of({name: book})[name]
    if lab["state"] != "up":
        raise EmuError(f"lab {name} is {lab['state']}", "`emu status` says when it is up")
    return book, name, lab


def _top(arguments: argparse.Namespace) -> int:
    from rich.live import Live

    from emu import top
    from emu.progress import output

    book, name, lab = _lab_that_is_up(arguments.lab)
    views = top.views(lab, arguments.interval)
    if arguments.once:
        views = itertools.islice(views, 1)
    console = output()
    try:
        if arguments.json:
            for shown in views:
                print(json.dumps(shown, indent=2 if arguments.once else None), flush=True)
        elif arguments.once or not console.is_terminal:
            for shown in views:
                console.print(top.as_table(name, shown))
        else:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for shown in views:
                    live.update(top.as_table(name, shown), refresh=True)
                    if not book.living:
                        break
    except KeyboardInterrupt:  # the ordinary end
        if arguments.once:
            raise
    return OK


def _dpu(arguments: argparse.Namespace) -> int:
    from emu import control
    from emu.progress import Late, make
    from emu.up import status_of
    from emu.upgrade import upgrade

    if not arguments.path and not arguments.python:
        raise UsageError("which code?", "give a directory with a package dpu, or --python")
    book = control.find(arguments.lab)
    name = control.name_of(book)
    lab = status_of({name: book})[name]
    sockets = {one: dpu["rpc"] for one, dpu in lab.get("dpus", {}).items()}
    if arguments.dpu is not None:
        if arguments.dpu not in sockets:
            raise UsageError(f"lab {name} has no DPU {arguments.dpu}", f"it has {', '.join(sockets) or 'none'}")
        sockets = {arguments.dpu: sockets[arguments.dpu]}
    progress = Late(make)
    try:
        rows = upgrade(sockets, arguments.python, arguments.path, progress)
    finally:
        progress.close()
    if arguments.json:
        _print_json({"ok": True, "dpus": rows})
    for one, row in () if arguments.json else rows.items():
        print(f"DPU {one}: dpu-emu {row['version']}, code {row['code']}; nothing served for {row['pause_ms']:.1f} ms")
    return OK


def _down(arguments: argparse.Namespace) -> int:
    from emu import control
    from emu.progress import make
    from emu.up import end

    known = control.labs()
    if arguments.all:
        names = list(known)
    elif arguments.lab in known:  # one whose supervisor has died too
        names = [arguments.lab]
    else:
        names = [control.name_of(control.find(arguments.lab))]
    progress = make()
    try:
        for name in names:
            progress.step(f"Ending lab {name}")
            if not end(known[name]):
                progress.note(f"lab {name} did not end by itself; it was killed and removed")
    finally:
        progress.close()
    if arguments.json:
        _print_json({"ok": True, "ended": names})
    return OK


# -- the other commands


def _check(arguments: argparse.Namespace) -> int:
    from emu.units import plural

    scenario = _load(arguments.scenario)
    if arguments.json:
        _print_json({"ok": True, "problems": [], "scenario": scenario.to_json()})
    else:
        counts = ((len(scenario.vms), "VM"), (len(scenario.dpus), "DPU"), (len(scenario.workloads), "workload"))
        print(f"{arguments.scenario}: ok ({', '.join(plural(*one) for one in counts)})")
    return OK


def _clean(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from emu import ledger

    found = ledger.clean(dry_run=arguments.dry_run, kept=arguments.kept)
    kept = [] if arguments.kept else ledger.kept()
    if arguments.json:
        rows = {"found": [asdict(one) for one in found], "kept": [asdict(one) for one in kept]}
        _print_json({"ok": True, "removed": bool(found) and not arguments.dry_run, **rows})
    else:
        for one in found:
            print(f"{'would remove' if arguments.dry_run else 'removed'} {one.kind} {one.what} of lab {one.lab}")
        for one in kept:
            print(f"left {one.what} of lab {one.lab}, which was to be kept (emu clean --kept removes it)")
        if not found and not kept:
            print("nothing to clean")
    return OK


def _doctor(arguments: argparse.Namespace) -> int:
    from emu.doctor import doctor

    code = doctor(arguments.json, offline=arguments.offline, qemu_option=arguments.qemu)
    return OK if code == 0 else ENVIRONMENT


def _compare(arguments: argparse.Namespace) -> int:
    from emu.compare.command import compare
    from emu.progress import make, output

    progress = make()
    try:
        document, code = compare(arguments, _load, progress, None if arguments.json else output())
    finally:
        progress.close()
    if arguments.json:
        _print_json(document)
    return code


def _fabric(arguments: argparse.Namespace) -> int:
    if arguments.verb == "experiments":
        from net.errors import NetError, RequestError, SimError
        from net.experiments.__main__ import run as run_experiments

        try:
            return run_experiments(arguments)
        except NetError as error:
            kind = UsageError if isinstance(error, RequestError | SimError) else EmuError
            raise kind(error.message, error.hint) from error
    from emu.fabric.client import run

    return run(arguments)


def _trace(arguments: argparse.Namespace) -> int:
    from emu.trace import record
    from emu.units import plural

    socket = arguments.socket
    if socket is None:
        _, name, lab = _lab_that_is_up(arguments.lab)
        dpus = lab["dpus"]
        dpu = arguments.dpu or (next(iter(dpus)) if len(dpus) == 1 else None)
        if dpu not in dpus:
            wrong = f"lab {name} has {plural(len(dpus), 'DPU')}" if dpu is None else f"lab {name} has no DPU {dpu}"
            raise UsageError(wrong, f"--dpu is one of: {', '.join(dpus)}")
        socket = dpus[dpu]["rpc"]
    elif arguments.lab or arguments.dpu:
        raise UsageError("--socket does not go with --lab and --dpu", "leave it out for a DPU of a lab")
    said = f"tracing for {arguments.seconds:g} s"
    found = record(
        *(socket, arguments.file, arguments.seconds, arguments.entries),
        started=lambda: print(said, file=sys.stderr, flush=True),
    )
    if arguments.json:
        _print_json({"ok": True, "file": str(arguments.file), **found})
    else:
        lost = f", {found['lost']} older ones lost (--entries keeps more)" if found["lost"] else ""
        print(f"{arguments.file}: {plural(found['commands'], 'command')}{lost}")
    return OK


def _metrics(arguments: argparse.Namespace) -> int:
    from emu import metrics

    sockets: dict[str, str] = {}
    if not arguments.socket:
        sockets = {name: dpu["rpc"] for name, dpu in _lab_that_is_up(arguments.lab)[2]["dpus"].items()}
    elif arguments.lab:
        raise UsageError("--lab does not go with sockets", "leave one of them out")
    for text in arguments.socket:
        name, _, path = text.partition("=") if "=" in text.partition("/")[0] else (text, "", text)
        sockets[name] = path
    if arguments.listen is not None:
        with metrics.server(sockets, arguments.listen) as server:
            print(f"http://{server.server_name}:{server.server_port}/metrics", file=sys.stderr, flush=True)
            server.serve_forever()
    stats = metrics.ask(sockets)
    if arguments.json:
        _print_json({"ok": None not in stats.values(), "dpus": stats})
    else:
        print(metrics.render(stats), end="")
    return ENVIRONMENT if None in stats.values() else OK


def _images(arguments: argparse.Namespace) -> int:
    from emu.progress import make

    progress = make()
    try:
        document, text = _IMAGES[arguments.verb](progress)
    finally:
        progress.close()
    if arguments.json:
        _print_json({"ok": True, **document})
    else:
        print(text)
    return OK


def _images_build(progress: Any) -> tuple[dict[str, Any], str]:
    from emu import images

    image = images.get(progress)
    return {"digest": image.digest, "kernel": str(image.kernel), "initrd": str(image.initrd)}, (
        f"image {image.digest}: {image.kernel.parent}"
    )


def _images_fetch(progress: Any) -> tuple[dict[str, Any], str]:
    from emu import images, qemu

    found = qemu.find(None, progress)
    files = images.fetch(progress)
    return {"qemu": found.to_dict(), "files": [str(path) for path in files]}, (
        f"{len(files)} packages of the image; QEMU {found.version}"
    )


def _images_list(progress: Any) -> tuple[dict[str, Any], str]:
    from emu import images

    rows = images.images()
    lines = [f"{row['digest']}  kernel {row['kernel']}{'  (current)' * row['current']}" for row in rows]
    return {"images": rows}, "\n".join(lines) or "no images; `emu images build` makes one"


def _images_lock(progress: Any) -> tuple[dict[str, Any], str]:
    from emu import images

    locked = images.lock(progress)
    return {"packages": len(locked.debs)}, f"{len(locked.debs)} packages locked"


_IMAGES: dict[str, Callable[[Any], tuple[dict[str, Any], str]]] = {
    "build": _images_build,
    "fetch": _images_fetch,
    "list": _images_list,
    "lock": _images_lock,
}
_IMAGES_HELP = """\
build  the image of this release, unless it is there
fetch  every package of the image and of QEMU, for work without a network
list   what is in the cache
lock   pin the packages that the mirror has now (needs apt)

"""


# -- output


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def _complain(error: EmuError, as_json: bool, code: int | None = None) -> int:
    code = code or (USAGE if isinstance(error, UsageError) else ENVIRONMENT)
    details = error.details
    if as_json:
        told = {"message": error.message, "fix": error.hint, "exit_code": code}
        document: dict[str, Any] = {"ok": False, "error": {**told, **({"details": details} if details else {})}}
        if (problems := getattr(error, "problems", None)) is not None:  # ScenarioError, which is slow to import
            document["problems"] = [{"where": one.where, "message": one.message} for one in problems]
        _print_json(document)
    else:
        for line in error.message.splitlines():
            print(f"emu: error: {line}", file=sys.stderr)
        if error.hint:
            print(f"  fix: {error.hint}", file=sys.stderr)
        if details:
            print(details, file=sys.stderr)
    return code


def _interrupted(code: int, as_json: bool, starts_a_lab: bool) -> int:
    message = "interrupted; the lab is down" if starts_a_lab else "interrupted"
    if as_json:
        _print_json({"ok": False, "error": {"message": message, "fix": "", "exit_code": code}})
    else:
        print(f"emu: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
