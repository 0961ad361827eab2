"""Loop devices for tests: real block devices made of files.

Use: ``with loop_device(path, block_size=4096) as device: ...``. Skips the test, with the reason, where the machine
does not let us make one (no root, no loop driver, a container without the device nodes).
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def loop_device(file: Path, *, block_size: int = 512, readonly: bool = False) -> Iterator[str]:
    """A block device with ``block_size`` as its logical one, on ``file``."""
    if shutil.which("losetup") is None:
        pytest.skip("losetup is not installed")
    options = ["--sector-size", str(block_size), *(["--read-only"] if readonly else [])]
    made = subprocess.run(
        ["losetup", "--find", "--show", *options, str(file)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no loop device here: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True, timeout=30)
