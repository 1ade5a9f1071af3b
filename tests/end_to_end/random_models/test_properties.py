"""Random plans compile or are told why not; those that compile print, read back and are proved; all
is drawn.

Non-goals: numbers (`test_numbers`), mutants (`tests/proof/test_properties.py`).
"""

import json
import re
from collections import Counter
from math import prod

import pytest
import torch
from hypothesis import given, settings

from helpers.plan_schema import mistakes
from helpers.random_models.draws import DRAWS, get_drafts, random_plans, table
from scalec.compiler.analysis.bucket_layout import get_stored_shape
from scalec.compiler.emit import emit
from scalec.compiler.emit.model_classes import model_classes
from scalec.compiler.ir import Program
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.parser import parse_plan
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower
from scalec.runtime.checkpoint.hf_weights import HFWeight
from scalec.tools.formatter import format_plan

REFUSED = 1 / 3
PRECISIONS = [
    "fp32  reduce = bf16",
    "bf16  master = bf16",
    "bf16  master = fp32  reduce = bf16",
    "fp16",
    "fp16  reduce = fp16",
]


@pytest.mark.xdist_group("random numbers")  # whose process draws the same
def test_what_is_drawn() -> None:
    """All of the language, with and without what may be left out."""
    found = set[str]().union(*get_drafts(DRAWS).values())
    assert found >= table(), table() - found


@pytest.mark.long
@pytest.mark.xdist_group("random numbers")
def test_few_drafts_are_refused() -> None:
    refused = Counter[str]()
    drafts = [*get_drafts(DRAWS)][::5]
    for plan in drafts:
        try:
            compile_plan(Source("plan.scale", plan))
        except PlanError as error:
            refused[error.diagnostics[0].code] += 1
    assert refused.total() <= len(drafts) * REFUSED, refused


@settings(max_examples=10)
@given(random_plans())
def test_what_compiles_is_proved_and_reads_back(plan: str) -> None:
    """`emit` reads the program back, too."""
    source = Source("plan.scale", plan)
    model = compile_plan(source, "resolve")
    program = lower(model)
    verify(program, model)
    for each in (model, program):
        assert read_ir(Source("plan.ir", print_ir(each))) == each
    files = emit(program, source)
    beside = {"hf_names.json", "predictions.json"}
    assert files.keys() - {"tiles.json"} == {"train.py", "plan.json"} | beside
    assert not mistakes(files["plan.json"])
    require_every_weight(files["hf_names.json"], program)
    assert parse_plan(Source("plan.scale", format_plan(source))) == parse_plan(source)


def require_every_weight(names_file: str, program: Program) -> None:
    """Tensors of the file's shapes give each parameter all of its values; padding alone is zero."""
    weights = json.loads(names_file)["weights"]
    patterns = model_classes(program).patterns
    assert weights.keys() == {patterns[param.name] for param in program.params_and_buffers}
    for param in program.params_and_buffers:
        weight = HFWeight.read(weights[patterns[param.name]])
        tensors = [torch.rand(weight.shape) + 1 for _ in range(weight.each[1])]
        value = weight.to_parameter(tensors, get_stored_shape(program, param)).flatten()
        in_files = torch.cat([tensor.flatten() for tensor in tensors])
        assert torch.equal(value[: len(in_files)], in_files)
        assert not value[len(in_files) :].any()
        own_dims = param.type.dims[param.stacked :]
        assert len(in_files) == prod(program.valid(dim) for dim in own_dims)


@pytest.mark.long
@settings(max_examples=6)
@given(random_plans())
def test_element_types_apart_from_each_other(plan: str) -> None:
    """As above, in what `random_plans` does not draw, so that other tests keep their plans; and
    nothing done again.
    """
    train = f"precision = {PRECISIONS[len(plan) % len(PRECISIONS)]}  recompute = none"
    source = Source("plan.scale", re.sub(r"precision = .*", train, plan))
    model = compile_plan(source, "resolve")
    program = lower(model)
    verify(program, model)
    assert read_ir(Source("plan.ir", print_ir(program))) == program
    emit(program, source)
