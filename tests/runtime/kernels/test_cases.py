"""Every case of every kernel: under Triton's interpreter in float32, and on a GPU in all
element types.
"""

import ast
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.kernels.cases import FOLDER, MODULES
from helpers.kernels.interpreted import is_long, outcomes

HALVES = tuple(MODULES[::2]), tuple(MODULES[1::2])
"""Each is interpreted in one process."""


def _cases() -> Iterator[Any]:
    """The cases of all modules; a long one is in a process of its own."""
    for half in HALVES:
        for module in half:
            for node in ast.parse((FOLDER / f"{module}.py").read_text()).body:
                if not (isinstance(node, ast.FunctionDef) and node.name.startswith("case_")):
                    continue
                case = f"{module}.{node.name}"
                marks = [pytest.mark.xdist_group(f"interpreted {half[0]}")]
                if is_long(node.name):
                    marks = [pytest.mark.xdist_group(f"interpreted {case}"), pytest.mark.long]
                yield pytest.param(module, node.name, id=f"{module}-{node.name}", marks=marks)


CASES = [*_cases()]


@pytest.mark.parametrize(("module", "case"), CASES)
def test_interpreted(module: str, case: str) -> None:
    name = f"{module}.{case}"
    run_together = (name,) if is_long(case) else HALVES[module in HALVES[1]]
    failure = outcomes(run_together)[name]
    assert not failure, failure


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "case"), CASES)
def test_on_a_gpu(module: str, case: str) -> None:
    getattr(importlib.import_module(f"helpers.kernels.{module}"), case)("cuda")
