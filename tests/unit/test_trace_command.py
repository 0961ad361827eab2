"""emu trace: what it asks of a daemon, and what it says when that cannot."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from dpu.errors import EmuError
from emu import cli
from emu.trace import record
from tests.support.rpc_host import serving


def test_it_starts_stops_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="dpu-t-") as folder, serving(Path(folder)) as (socket, host, _):
        assert record(socket, tmp_path / "t.json", 0.0, entries=5) == {"commands": 0, "lost": 0}
        assert host.events[-2:] == [("trace_start", 8), ("trace_stop",)]
        assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
        assert cli.main(["trace", str(tmp_path / "t.txt"), "--for", "1ms", "--socket", socket]) == 0
        assert (tmp_path / "t.txt").read_text().startswith("# 0 commands")
        assert capsys.readouterr().out == f"{tmp_path}/t.txt: 0 commands\n"
        with pytest.raises(EmuError, match=r"no trace in /no/such/t\.txt"):
            record(socket, Path("/no/such/t.txt"), 0.0)
        assert host.events[-1] == ("trace_stop",)
        assert cli.main(["trace", "t", "--socket", socket, "--dpu", "card"]) == 2
