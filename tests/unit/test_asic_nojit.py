"""The asic stage with NUMBA_DISABLE_JIT=1: the same tests on the same source, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpu.fastpath.jit import JIT

ROOT = Path(__file__).parents[2]
MODULES = ("test_asic_queues.py", "test_poller.py", "test_atomics.py", "test_asic_session.py", "test_volume_soc.py")


@pytest.mark.skipif(not JIT, reason="this is that process")
def test_the_same_tests_pass_without_the_compiler() -> None:
    """What ran compiled here as "product" runs as plain Python there."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"),
            *(f"tests/unit/{name}" for name in MODULES),
            *("-k", "not plain"),
        ],
        cwd=ROOT,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
