"""Compiles the text of a plan: to its program, to the text of `train.py`, or to the module."""

import importlib.util
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from scalec.compiler.emit import emit
from scalec.compiler.ir import Program
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan

PATH = "tiny.scale"
"""The path that a plan is read as, unless a test says another."""

_numbers = count()


def make_program(text: str, until: str = PASS_NAMES[-1], path: str = PATH) -> Program:
    """The program of a plan after a pass, by default after the last.  Raises PlanError."""
    return compile_plan(Source(path, text), until)


def get_refusal(text: str, path: str = PATH) -> PlanError:
    """The mistakes of a plan, which must have some."""
    with pytest.raises(PlanError) as raised:
        make_program(text, path=path)
    return raised.value


def get_error_code(text: str) -> str:
    """The code of the first mistake of a plan, which must have some."""
    return get_refusal(text).diagnostics[0].code


@cache
def get_files(text: str, path: str = PATH) -> Mapping[str, str]:
    """The emitted files of a plan, by name."""
    source = Source(path, text)
    return emit(compile_plan(source), source)


@cache
def get_train_py(text: str, path: str = PATH) -> tuple[str, Program]:
    """The text of a plan's `train.py`, and the program that it was emitted from."""
    source = Source(path, text)
    program = compile_plan(source)
    return emit(program, source)["train.py"], program


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Writes files to a folder, which need not be there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)


def write_program(text: str, folder: Path, path: str = PATH) -> Path:
    """Writes the emitted files of a plan to a folder, and returns the folder."""
    write_files(get_files(text, path), folder)
    return folder


def import_module(path: Path) -> ModuleType:
    """The module in a file, imported anew at each call."""
    spec = importlib.util.spec_from_file_location(f"emitted_{next(_numbers)}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_program(text: str, folder: Path, path: str = PATH) -> ModuleType:
    """The emitted program of a plan, written to a folder and imported."""
    return import_module(write_program(text, folder, path) / "train.py")
