"""Every case of every kernel: under Triton's interpreter in float32, and on a GPU in all
element types.
"""

import ast
import importlib

import pytest

from helpers.kernels.cases import FOLDER, MODULES
from helpers.kernels.interpreted import outcomes

HALVES = tuple(MODULES[::2]), tuple(MODULES[1::2])
"""Each is interpreted in one process."""

CASES = [
    pytest.param(
        module,
        node.name,
        id=f"{module}-{node.name}",
        marks=pytest.mark.xdist_group(f"interpreted {half[0]}"),
    )
    for half in HALVES
    for module in half
    for node in ast.parse((FOLDER / f"{module}.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


@pytest.mark.parametrize(("module", "case"), CASES)
def test_interpreted(module: str, case: str) -> None:
    failure = outcomes(HALVES[module in HALVES[1]])[f"{module}.{case}"]
    assert not failure, failure


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "case"), CASES)
def test_on_a_gpu(module: str, case: str) -> None:
    getattr(importlib.import_module(f"helpers.kernels.{module}"), case)("cuda")
