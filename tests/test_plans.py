"""The plans that scalec ships: they compile, and have the published numbers of parameters."""

from pathlib import Path

import pytest

from scalec.compiler.account import parameter_count
from scalec.compiler.emit import emit
from scalec.compiler.ir import Program
from scalec.compiler.limits import load
from scalec.compiler.passes import compile_plan
from scalec.compiler.summary import ranks

PLANS = Path(__file__).parents[1] / "plans"

PUBLISHED = {  # parameters (Llama Team 2024, table 3, from the models' configurations), ranks of the plan
    "llama3_8b": (8_030_261_248, 128),
    "llama3_70b": (70_553_706_496, 512),
    "llama3_405b": (405_853_388_800, 16_384),
    "qwen2_5_7b": (7_615_616_512, 64),  # Yang et al. 2024 (Qwen2.5): 7.6B; safetensors metadata of the release
    "qwen3_8b": (8_190_735_360, 128),  # Qwen Team 2025: 8.2B; safetensors metadata of the release
}


def program(name: str) -> Program:
    """The compiled plan."""
    return compile_plan(load(PLANS / f"{name}.scale"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    compiled = program(name)
    assert (parameter_count(compiled), ranks(compiled)) == PUBLISHED[name]


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.scale")), ids=lambda path: path.stem)
def test_every_plan_compiles(path: Path) -> None:
    source = load(path)
    assert set(emit(compile_plan(source), source)) == {"train.py", "plan.json"}


def test_the_size_of_the_ir_does_not_depend_on_the_number_of_layers_or_ranks() -> None:
    small = load(PLANS / "llama3_8b.scale")
    texts = [emit(compile_plan(small), small)["train.py"], emit(program("llama3_405b"), small)["train.py"]]
    assert len({text.count("\n") for text in texts}) == 1
