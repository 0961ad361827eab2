"""scripts/setup: what of pip's words a user sees. pip is a program that says what it is told to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IGNORED = "WARNING: Location '/no/wheels' is ignored: it is either a non-existing path or lacks a specific scheme."
PYTHON = f"""\
#!/bin/sh
if [ "$1" = -c ]; then
    exec {sys.executable} -c "import sys; print('$PWD/.venv', sys.version)"
fi
for package in numpy numba; do
    echo "{IGNORED}" >&2
    echo "Collecting $package>=1 (from x)"
done
echo "WARNING: Retrying" >&2
exit $PIP_CODE
"""


@pytest.mark.parametrize("fails", [False, True])
def test_ignored_locations_are_told_only_if_pip_fails(fails: bool, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(PYTHON)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    environment = {**os.environ, "PYTHON": sys.executable, "PIP_CODE": str(int(fails))}
    command = ["bash", "scripts/setup"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == (3 if fails else 0), done.stderr
    assert " numpy numba\n" in done.stdout
    assert done.stderr.count("WARNING: Retrying") == 1
    assert done.stderr.count(IGNORED) == (2 if fails else 0)
    assert ("pip could not install" in done.stderr) == fails
    assert (tmp_path / ".venv/stamp").exists() != fails
