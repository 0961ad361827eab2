"""What each command of a DPU did for a while, in a file: `emu trace`.

    record("/tmp/my/rpc", Path("trace.json"), seconds=10.0)     # for ui.perfetto.dev
    record("/tmp/my/rpc", Path("trace.txt"), seconds=10.0)      # for a person

The name of the file decides: ".json" is Perfetto's format, every other one is text (see :mod:`dpu.trace` for both).
``entries``: the newest so many commands of each poller are kept; None is the daemon's own choice.
Limits: dpud only. The daemon writes the file, so its user must be allowed to. Tracing that was on is begun anew.
Errors: EmuError for a daemon that does not trace, or cannot write.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from dpu.errors import EmuError, RpcError
from dpu.spdk import Spdk
from dpu.spdk.types import TraceFormat

_METHOD_NOT_FOUND = -32601  # JSON-RPC 2.0, 5.1


def record(
    socket: str,
    file: Path,
    seconds: float,
    entries: int | None = None,
    started: Callable[[], object] = lambda: None,
) -> dict[str, int]:
    """Trace for ``seconds``, or until Ctrl-C; ``started`` is called when every command is traced.

    Tells how many ``commands`` are in ``file``, and how many older ones are ``lost``.
    """
    with Spdk(socket) as card:
        try:
            card.dpu_trace_start(entries=entries)
            try:
                with contextlib.suppress(KeyboardInterrupt):
                    started()
                    time.sleep(seconds)
            finally:
                card.dpu_trace_stop()
            form: TraceFormat = "perfetto" if file.suffix == ".json" else "text"
            return card.dpu_trace_save(filename=str(file.absolute()), format=form)
        except RpcError as error:
            if error.code == _METHOD_NOT_FOUND:
                raise EmuError(f"the daemon at {socket} does not trace", "dpud does; SPDK has spdk_trace") from error
            raise EmuError(f"no trace in {file}: {error.message}", "see dpud's log, or give another file") from error
