"""The rules of the package that no other tool holds: what is shipped and installed, how modules
name each other.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import yaml
from setuptools.dist import Distribution

from scalec.compiler import __version__
from scalec.compiler.emit.imports import IMPORTS
from scalec.compiler.ops.protocol import KERNELS, RUNTIME

ROOT = Path(__file__).parent.parent
FOLDERS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "setuptools"
]["package-dir"]
SHIPPED = {".py", ".typed", ".lark", ".j2", ".json", ".scale", ".toml"}
PYTHON_FILES = [
    path
    for folder in (*FOLDERS.values(), "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_the_tree_is_as_wide_as_a_reader_can_see_at_once() -> None:
    """Thirteen folders of the compiler, fourteen entries of the runtime."""
    entries = {
        name: {it.name for it in (ROOT / name).iterdir()} - {"__pycache__"}
        for name in ("compiler", "runtime")
    }
    assert len(entries["compiler"] - {"__init__.py"}) <= 13
    assert len(entries["runtime"]) <= 14


def absolute_imports(path: Path) -> Iterator[str]:
    """The modules that the file imports by absolute name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def test_imports_go_through_scalec_and_are_relative_inside_a_package() -> None:
    assert [problem for path in PYTHON_FILES for problem in import_problems(path)] == []


def import_problems(path: Path) -> Iterator[str]:
    relative = path.relative_to(ROOT)
    packages = {name.split(".")[0] for name in absolute_imports(path)}
    for folder in sorted(packages & {*FOLDERS.values()}):
        yield f"{relative} says `{folder}`: write `scalec.{folder}`"
    is_inside_a_package = relative.parts[0] in {*FOLDERS.values()} - {"entry"}  # it is above them
    if is_inside_a_package and "scalec" in packages:
        yield f"{relative} says `scalec`: imports inside a package are relative"


def test_an_import_that_goes_another_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "compiler" / "new.py"
    path.parent.mkdir()
    path.write_text("import runtime.data\nfrom scalec.compiler import ir\n")
    assert [*import_problems(path)] == [
        "compiler/new.py says `runtime`: write `scalec.runtime`",
        "compiler/new.py says `scalec`: imports inside a package are relative",
    ]


@pytest.mark.parametrize("module", [RUNTIME, KERNELS])
def test_what_programs_import_is_exported_to_type_checkers(module: str) -> None:
    """The package says that it is typed; so a name that it imports is private unless `__all__`
    has it.
    """
    package = import_module(module)
    assert {name for name in IMPORTS[module] if hasattr(package, name)} <= {*package.__all__}


def test_the_version_is_the_newest_of_the_changelog_and_the_editors() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert released[0] == __version__
    extension = json.loads((ROOT / "docs" / "editors" / "vscode" / "package.json").read_text())
    assert extension["version"] == __version__
    assert f"scalec-{__version__}.vsix" in (ROOT / "docs" / "editors.md").read_text(
        encoding="utf-8"
    )


def test_a_forge_and_pre_commit_run_what_is_there() -> None:
    """The workflow runs targets of the Makefile; hooks run programs of `.venv`, on files of
    kinds that are there.
    """
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert commands == ["make setup", "make test"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.removeprefix("make ") for command in commands} <= {*targets}
    (source,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert source["repo"] == "local"
    for hook in source["hooks"]:
        program, _, _ = hook["entry"].partition(" ")
        assert hook["language"] == "system"
        assert program.startswith(".venv/bin/")
        assert (Path(sys.executable).parent / Path(program).name).exists(), program


def test_the_compiler_never_imports_torch() -> None:
    script = """
import pkgutil, importlib, sys
import scalec.compiler
for module in pkgutil.walk_packages(scalec.compiler.__path__, "scalec.compiler."):
    importlib.import_module(module.name)
assert "torch" not in sys.modules, "something in scalec.compiler imported torch"
"""
    result = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_the_wheel_holds_every_module_and_data_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # build_py asks which script runs it
    distribution = Distribution({"script_name": "pyproject.toml"})
    distribution.parse_config_files(["pyproject.toml"])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    packed = {
        Path(name).relative_to(build.build_lib)
        for name in build.get_outputs(include_bytecode=False)
    }
    left_out = sorted(map(str, set(shipped_files()) - packed))
    assert not left_out, "declare their packages under [tool.setuptools] in pyproject.toml"


def shipped_files() -> Iterator[Path]:
    """Where each file of the package folders belongs in the wheel."""
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SHIPPED:
                yield Path(*package.split("."), path.relative_to(ROOT / folder))


# ---- installed

PLAN = """use "scalec:models/llama.scale" {
  dims { vocab = 256  hidden = 16  heads = 2  kv_heads = 1  ffn = 32  layers = 2 }
}
train {
  seq = 8  global_batch = 2  microbatch = 2  steps = 1
  optimizer sgd { lr = 0.1 }
  data text { files = [python_stdlib] }
}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment into which the wheel was installed, with this one's packages
    but for scalec.
    """
    folder = tmp_path_factory.mktemp("installed")
    source, env = folder / "source", folder / "env"
    source.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", *set(FOLDERS.values())):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source])
    venv.create(env)
    (wheel,) = folder.glob("*.whl")
    run([*pip, "--python", env / "bin" / "python", "install", "--no-deps", wheel])
    (packages,) = env.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    return env / "bin"


def run(command: Sequence[str | Path], folder: Path | None = None) -> str:
    """The output of a command that has to succeed."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=folder, env=env
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_an_installed_scalec_compiles_with_what_ships_and_trains(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.scale").write_text(PLAN)
    assert run([installed / "scalec", "check", "mine.scale"], tmp_path).startswith("ok  llama: ")
    run([installed / "scalec", "compile", "mine.scale"], tmp_path)
    trained = run([installed / "python", "out/mine/train.py", "--device", "cpu"], tmp_path)
    assert "mine on cpu, one rank: steps 1 to 1" in trained
    run([installed / "scalec", "verify", "--recheck", "out/mine"], tmp_path)


def test_python_m_scalec(installed: Path, tmp_path: Path) -> None:
    for python in (installed / "python", Path(sys.executable)):
        assert run([python, "-m", "scalec", "--version"], tmp_path).startswith("scalec ")
        assert "usage: scalec" in run([python, "-m", "scalec", "--help"], tmp_path)


def test_what_is_installed_says_what_it_is(installed: Path) -> None:
    (folder,) = installed.parent.glob("lib/python*/site-packages/scalec-*.dist-info")
    found = PathDistribution(folder)
    assert found.metadata["License-Expression"] == "MIT"
    assert "the scalec authors" in (found.read_text("licenses/LICENSE") or "")
    assert (found.metadata["Description"] or "").strip() == (ROOT / "README.md").read_text(
        encoding="utf-8"
    ).strip()
