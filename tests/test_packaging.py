"""The rules of the package that no other tool holds: what is shipped, and how modules name each other."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools.dist import Distribution

ROOT = Path(__file__).parent.parent
FOLDERS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
SHIPPED = {".py", ".lark", ".j2", ".scale"}
PYTHON_FILES = [
    path
    for folder in (*FOLDERS.values(), "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def absolute_imports(path: Path) -> Iterator[str]:
    """The modules that the file imports by absolute name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_through_scalec_and_are_relative_inside_a_package(path: Path) -> None:
    imported = {name.split(".")[0] for name in absolute_imports(path)}
    bare = imported & set(FOLDERS.values())
    assert not bare, f"say `scalec.…` instead of {bare}"
    if path.relative_to(ROOT).parts[0] in FOLDERS.values():
        assert "scalec" not in imported, "imports inside a package are relative"


def test_the_compiler_never_imports_torch() -> None:
    script = """
import pkgutil, importlib, sys
import scalec.compiler
for module in pkgutil.walk_packages(scalec.compiler.__path__, "scalec.compiler."):
    importlib.import_module(module.name)
assert "torch" not in sys.modules, "something in scalec.compiler imported torch"
"""
    result = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_wheel_holds_every_module_and_data_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "pyproject.toml"})  # build_py asks which script runs it
    distribution.parse_config_files(["pyproject.toml"])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    packed = {Path(name).relative_to(build.build_lib) for name in build.get_outputs(include_bytecode=False)}
    left_out = sorted(map(str, set(shipped_files()) - packed))
    assert not left_out, "declare their packages under [tool.setuptools] in pyproject.toml"


def shipped_files() -> Iterator[Path]:
    """Where each file of the package folders belongs in the wheel."""
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SHIPPED:
                yield Path(*package.split("."), path.relative_to(ROOT / folder))
