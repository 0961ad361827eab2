"""The README's promises: a fresh clone and a bare wheel, by an ordinary user, the second time without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from emu.paths import cache_dir

ROOT = Path(__file__).parents[2]
ORDINARY_UID = 65533  # nobody's, and not "nobody", which owns things
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True)
class User:
    """Somebody without rights, with a home of their own that begins empty but for fetched packages."""

    home: Path

    def run(self, *argv: str, cwd: Path, network: bool = True) -> subprocess.CompletedProcess[str]:
        is_root = os.getuid() == 0
        become = (
            ["setpriv", f"--reuid={ORDINARY_UID}", f"--regid={ORDINARY_UID}", "--clear-groups"] if is_root else []
        )
        cut_off = [] if network else ["unshare", "--net"] if is_root else ["unshare", "--net", "--map-root-user"]
        kept = {
            name: value for name, value in os.environ.items() if name.startswith(("PIP_", "http", "no_proxy", "SSL"))
        }
        environment = {**kept, "HOME": str(self.home), "PATH": SEARCH_PATH, "LANG": "C.UTF-8"}
        return subprocess.run(
            [*cut_off, *become, *argv],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def owns(self, folder: Path) -> Path:
        if os.getuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, ORDINARY_UID, ORDINARY_UID, follow_symlinks=False)
        return folder


@pytest.fixture
def user() -> Iterator[User]:
    # Not pytest's tmp_path: nobody else may enter that.
    home = Path(tempfile.mkdtemp(prefix="dpu-emu-user-"))
    home.chmod(0o755)
    made = User(home)
    try:
        shutil.copytree(cache_dir("debs"), home / ".cache/dpu-emu/debs")
        made.owns(home)
        yield made
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.online
@pytest.mark.timeout(1800)
def test_demo_of_an_ordinary_user_and_again_without_a_network(user: User) -> None:
    clone = user.home / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    user.owns(clone)
    for network in (True, False):
        done = user.run("bash", "scripts/demo", cwd=clone, network=network)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((clone / "out/demo/report.json").read_text())
        assert report["ok"] and [one["ok"] for one in report["workloads"]] == [True, True, True]
        assert "random reads" in done.stdout
    assert "Setting up" not in done.stdout and "Fetching" not in done.stderr


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.online
@pytest.mark.timeout(1800)
def test_wheel_in_an_empty_environment(user: User) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(user.home), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = user.home.glob("dpu_emu-*.whl")
    # /usr/bin/python3 is there for everybody; the interpreter that runs this may be in root's home.
    for command in (
        ["python3", "-m", "venv", "env"],
        ["env/bin/pip", "install", "--quiet", "-c", "constraints.txt", wheel.name],
    ):
        shutil.copy(ROOT / "constraints.txt", user.home)
        done = user.run(*command, cwd=user.home)
        assert done.returncode == 0, done.stderr
    done = user.run("env/bin/emu", "run", "--nvme", "1G", "--workload", "verify", "--json", cwd=user.home)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] and report["workloads"][0]["type"] == "verify"
    done = user.run("env/bin/emu", "clean", "--json", cwd=user.home)
    assert json.loads(done.stdout)["found"] == []


def test_setup_names_what_an_ordinary_user_lacks(user: User) -> None:
    """A Python without ensurepip, as Debian's is without python3-venv; and one that is none."""
    clone = user.home / "clone"
    (clone / "scripts").mkdir(parents=True)
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, clone / name)
    broken = user.home / "python3"
    broken.write_text('#!/bin/sh\ncase "$*" in *ensurepip*) exit 1 ;; esac\nexec /usr/bin/python3 "$@"\n')
    broken.chmod(0o755)
    user.owns(clone)
    for python, fix in (
        (str(broken), "sudo apt-get install -y --no-install-recommends python3-venv"),
        ("/bin/false", "unset PYTHON"),
    ):
        done = user.run("env", f"PYTHON={python}", "bash", "scripts/setup", cwd=clone)
        assert done.returncode == 3
        assert done.stderr.splitlines()[-1] == f"  fix: {fix}"
        assert not (clone / ".venv").exists()
