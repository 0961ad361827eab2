"""The corpus in every set, 60 seconds of atheris for each target in the full one.

DPU_EMU_FUZZ_S: seconds instead of 60. What it finds is a file in the folder that the failure names: put it into
tests/fuzz/corpus/TARGET once it is mended.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

HERE = Path(__file__).parent
SECONDS = int(os.environ.get("DPU_EMU_FUZZ_S", "60"))


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_corpus(target: str, quiet: None) -> None:
    inputs = sorted((HERE / "corpus" / target).iterdir())
    assert inputs
    for path in inputs:
        TARGETS[target](path.read_bytes())
    TARGETS[target](b"")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_fuzz(target: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed: pip install 'dpu-emu[fuzz]'")
    corpus = tmp_path / "corpus"
    shutil.copytree(HERE / "corpus" / target, corpus)
    options = [f"-max_total_time={SECONDS}", "-timeout=60", "-max_len=4096", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", target, *options, "-print_final_stats=1", str(corpus)],
        cwd=HERE.parents[1],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS + 200,
    )
    found = [path.name for path in tmp_path.iterdir() if path.is_file()]
    assert done.returncode == 0 and not found, f"{found} in {tmp_path}\n{(done.stdout + done.stderr)[-6000:]}"
    assert "stat::number_of_executed_units" in done.stderr
