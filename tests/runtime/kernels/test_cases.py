"""Every case of every kernel: under Triton's interpreter in float32, and on a GPU in all element types."""

import ast
import importlib

import pytest

from helpers.kernels.cases import FOLDER, MODULES
from helpers.kernels.interpreted import outcomes

CASES = [
    pytest.param(module, node.name, id=f"{module}-{node.name}")
    for module in MODULES
    for node in ast.parse((FOLDER / f"{module}.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str]:
    """What came of the cases of all modules of which any is asked for."""
    names = "\n".join(item.name for item in request.session.items if item.path == request.path)
    return outcomes(module for module in MODULES if f"[{module}-" in names)


@pytest.mark.parametrize(("module", "case"), CASES)
def test_interpreted(interpreted: dict[str, str], module: str, case: str) -> None:
    failure = interpreted[f"{module}.{case}"]
    assert not failure, failure


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "case"), CASES)
def test_on_a_gpu(module: str, case: str) -> None:
    getattr(importlib.import_module(f"helpers.kernels.{module}"), case)("cuda")
