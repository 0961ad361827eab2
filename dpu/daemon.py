"""``dpud``: the card's daemon. It starts bare and is configured over JSON-RPC at its socket.

Use: ``dpud -r /run/dpu.sock -m [0-1]``; ``-c FILE`` begins with a saved configuration. It stays in the foreground
and logs to stderr; "dpud: ready" says that RPCs are answered and that the file has been loaded. SIGTERM or SIGINT
ends it and removes its sockets.
Exit codes: 0 after a clean stop, 1 when it cannot start, no worker comes up or the file is wrong, 2 for wrong
options.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from dpu import jitcache
from dpu.errors import EmuError, UsageError
from dpu.keeper import Keeper
from dpu.startup import first_config, read_calls

WORKER_COMMAND = (sys.executable, "-P", "-m", "dpu.worker")
"""-P: a directory "dpu" where the daemon is started is not ours."""

log = logging.getLogger("dpud")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "dpud --help lists the options")


def parse_cpus(text: str, allowed: Sequence[int]) -> list[int]:
    """CPUs of a core mask in one of SPDK's forms: hexadecimal ("0x3", "3") or a list ("[0,2-3]").

    :param allowed: CPUs that this process may use
    :raises UsageError: neither form, nothing chosen, or a CPU that is not allowed
    """
    cpus: set[int] = set()
    hint = 'a mask like 0x3 or a list like "[0,2-3]"'
    listed = re.fullmatch(r"\[(.*)\]", text.strip())
    if listed:
        for part in listed[1].split(","):
            ends = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part)
            if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
                raise UsageError(f"bad CPU list {text!r}", hint)
            cpus.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    elif re.fullmatch(r"(0[xX])?[0-9a-fA-F]{1,256}", text.strip()):
        mask = int(text, 16)
        cpus.update(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)
    else:
        raise UsageError(f"bad CPU mask {text!r}", hint)
    if not cpus:
        raise UsageError(f"no CPU in {text!r}", hint)
    missing = sorted(cpus - set(allowed))
    if missing:
        names = ",".join(map(str, missing[:8])) + (",..." if len(missing) > 8 else "")
        raise UsageError(f"CPU {names} is not available", f"allowed: {','.join(map(str, sorted(allowed)))}")
    return sorted(cpus)


def parser() -> argparse.ArgumentParser:
    """The options of ``dpud``."""
    options = _Parser(prog="dpud", description="Serve NVMe controllers over vfio-user.", allow_abbrev=False)
    options.add_argument("-r", dest="rpc_socket", metavar="SOCKET", required=True, help="path of the RPC socket")
    options.add_argument(
        "-m",
        dest="cpus",
        metavar="CPUS",
        help="one poller bound to each CPU: 0x3 or [0,2-3] (default: one, not bound)",
    )
    options.add_argument("-c", "--config", metavar="FILE", help="begin with what spdk-rpc save_config has written")
    options.add_argument(
        "--wait-for-rpc", action="store_true", help="take configuration only after the RPC framework_start_init"
    )
    options.add_argument(
        "--watchdog",
        type=_seconds,
        default=3.0,
        metavar="SECONDS",
        help="kill a worker without a heartbeat for so long; 0: never (default 3)",
    )
    options.add_argument("--no-standby", action="store_true", help="no second worker held ready")
    options.add_argument(
        "--crash-limit",
        type=int,
        default=5,
        metavar="N",
        help="after N workers in a row that died within 5 s, cut off the guest that all of them died of, or give up; "
        "0: never (default 5)",
    )
    options.add_argument("--ready-fd", type=int, metavar="FD", help="write one byte to FD when ready, and close it")
    options.add_argument("--version", action="version", version=f"dpud {_version()}")
    return options


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError("0 to 3600 seconds")
    return value


def _version() -> str:
    try:
        return version("dpu-emu")
    except PackageNotFoundError:
        return "0 (not installed)"


def _on_ready(ready_fd: int | None) -> Callable[[], None]:
    def ready() -> None:
        log.info("ready")
        if ready_fd is not None:
            with contextlib.suppress(OSError):
                os.write(ready_fd, b"\n")
                os.close(ready_fd)

    return ready


def _raise_file_limit() -> None:
    """Every client brings descriptors: as many as the hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(arguments: argparse.Namespace) -> None:
    """Run the daemon until it is asked to stop.

    :raises EmuError: it cannot start
    """
    allowed = sorted(os.sched_getaffinity(0))
    # Without -m one poller that the scheduler places: bound to a CPU that a guest's vCPU uses too, it would starve.
    cpus = parse_cpus(arguments.cpus, allowed) if arguments.cpus else []
    if arguments.config and arguments.wait_for_rpc:
        raise UsageError("-c needs the state that --wait-for-rpc puts off", "give one of them")
    config = first_config(read_calls(arguments.config) if arguments.config else [], wait=arguments.wait_for_rpc)
    ready_fd: int | None = arguments.ready_fd
    if ready_fd is not None:
        try:
            os.set_inheritable(ready_fd, False)
        except OSError as error:
            raise UsageError(f"--ready-fd {ready_fd} is not open", "pass an inherited descriptor") from error
    _raise_file_limit()
    cache, temporary = jitcache.directory()
    if temporary:
        log.warning("the cache is not writable: compiled code is lost at exit (DPU_EMU_CACHE names another)")
    try:
        Keeper(
            arguments.rpc_socket,
            WORKER_COMMAND,
            cpus=cpus,
            environment={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
            watchdog_s=arguments.watchdog,
            standby=not arguments.no_standby,
            crash_limit=arguments.crash_limit,
            on_ready=_on_ready(ready_fd),
            config=config,
        ).run()
    finally:
        if temporary:
            shutil.rmtree(cache, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="dpud: %(message)s")
    try:
        serve(parser().parse_args(argv))
    except EmuError as error:
        print(f"dpud: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
