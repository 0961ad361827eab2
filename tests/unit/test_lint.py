"""What holds for every file: linters, import direction, and nothing that only one machine has."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("dpu", "net", "emu", "images")

# The card knows no lab, the fabric neither; only the remote back end crosses the fabric.
FORBIDDEN: dict[str, Callable[[str, str], bool]] = {
    "net": lambda module, target: _top(target) in ("dpu", "emu"),
    "dpu": lambda module, target: (
        _top(target) == "emu" or (_top(target) == "net" and module != "dpu.backends.remote")
    ),
    "images": lambda module, target: _top(target) == "net",
}
COMPILED = "dpu.fastpath"
COMPILED_MAY_IMPORT = re.compile(
    r"(numpy|numba|llvmlite)(\..*)?|dpu\.fastpath(\..*)?|dpu\.(layout|errors)|dpu(\.\w+)?\.wire"
)


def _top(module: str) -> str:
    return module.partition(".")[0]


def tool(name: str, *arguments: str) -> None:
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert path, f"{name} is not installed; scripts/setup installs it"
    done = subprocess.run([path, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{name} {' '.join(arguments)}\n{done.stdout}{done.stderr}"


def test_ruff_check() -> None:
    tool("ruff", "check", ".")


def test_ruff_format() -> None:
    tool("ruff", "format", "--check", ".")


@pytest.mark.timeout(600)
def test_mypy() -> None:
    tool("mypy")


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, path


def imports(module: str, path: Path) -> Iterator[str]:
    """Every module that ``path`` may import, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: -node.level if path.name != "__init__.py" else 1 - node.level or None]
                base = ".".join([*above, base]).rstrip(".")
            yield from dict.fromkeys(_submodule(base, alias.name) for alias in node.names)


def _submodule(base: str, name: str) -> str:
    """``from base import name`` imports base.name where that is a module of this project."""
    path = ROOT.joinpath(*base.split("."), name)
    return f"{base}.{name}" if path.is_dir() or path.with_suffix(".py").is_file() else base


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_import_direction(package: str) -> None:
    wrong = [
        f"{module} imports {target}"
        for module, path in modules(package)
        for target in imports(module, path)
        if FORBIDDEN[package](module, target)
    ]
    assert wrong == []


def test_the_compiled_path_imports_only_numbers_and_wire_formats() -> None:
    found = [(module, target) for module, path in modules("dpu/fastpath") for target in imports(module, path)]
    assert any(target == "numpy" for _, target in found)  # the test sees imports at all
    wrong = [
        f"{module} imports {target}"
        for module, target in found
        if _top(target) not in sys.stdlib_module_names and not COMPILED_MAY_IMPORT.fullmatch(target)
    ]
    assert wrong == []


def test_relative_imports_are_followed(tmp_path: Path) -> None:
    assert _submodule("dpu", "errors") == "dpu.errors" and _submodule("dpu.errors", "EmuError") == "dpu.errors"
    plain, package = tmp_path / "b.py", tmp_path / "__init__.py"
    for path in (plain, package):
        path.write_text("from . import x\nfrom .y import z\nfrom ..other import w\nimport emu.lab\n")
    assert list(imports("a.c.b", plain)) == ["a.c", "a.c.y", "a.other", "emu.lab"]
    assert list(imports("a.c", package)) == ["a.c", "a.c.y", "a.other", "emu.lab"]


# Written so that this file does not name them itself.
LOCAL_NAMES = re.compile(
    r"(?<![\w.$}])/(wo" r"rk|opt/py" r"pi|opt/wh" r"eels|root/\.)|py" r"pi\.org|python" r"hosted|art" r"ifactory"
)


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git clone")
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    return [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]


def test_no_file_names_one_machine_or_a_package_registry() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        if path.is_file()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if LOCAL_NAMES.search(line)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("/wo" "rk/x", True), ("a/wo" "rk/b", False), ("https://py" "pi.org/simple", True), ("PyPI", False)],
)  # fmt: skip
def test_local_names_are_recognized(text: str, expected: bool) -> None:
    assert bool(LOCAL_NAMES.search(text)) == expected


def test_every_script_is_executable_and_strict() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()] + [ROOT / ".ci/run"]
    assert len(scripts) >= 5
    for path in scripts:
        text = path.read_text()
        assert path.stat().st_mode & 0o111 or path.parent.name == ".ci", f"{path} is not executable"
        if text.startswith("#!/usr/bin/env bash"):
            assert "set -euo pipefail" in text, path
            subprocess.run(["bash", "-n", str(path)], check=True)
