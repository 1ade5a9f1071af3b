"""The models of plans/models, each at a tiny size: emitted programs against plain torch in one process, in float64."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from oracle import harness
from oracle.models import MODELS, SIZES, Model
from oracle.plans import ROWS, SEQ, Case
from oracle.reference import Step, Tensors
from scalec.compiler.emit import emit
from scalec.compiler.passes import compile_plan
from scalec.compiler.source import Source

PLANS = Path(__file__).parents[2] / "plans"
LR = 0.1
TOLERANCE = 1e-9

STEPS = 2
SEQUENCE = Case(dp=2, tp=2, sp=True, microbatches=2)
TENSOR = Case(tp=4)
CASES = [(model, SEQUENCE) for model in MODELS] + [(m, TENSOR) for m in MODELS if m.file == "olmo2"]


@pytest.mark.parametrize(("model", "case"), CASES, ids=lambda each: getattr(each, "file", str(each)))
def test_steps_equal_plain_torch(model: Model, case: Case, tmp_path: Path) -> None:
    module = _compiled(model, case, tmp_path)
    start = _drawn(harness.initial(case, module, seed=5))
    batches = list(harness.batches(case, STEPS))
    steps = harness.run(case, module, start, batches, LR)
    for number, (got, want) in enumerate(zip(steps, _expected(model, start, batches), strict=True)):
        at = f"step {number}: "
        assert got.loss == pytest.approx(want.loss, rel=TOLERANCE, abs=0), at
        assert got.norm == pytest.approx(want.norm, rel=TOLERANCE, abs=0), at
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            _close(f"{at}gradient of {name}", got.gradients[name], gradient)
            _close(f"{at}{name}", got.parameters[name], want.parameters[name])


def _close(name: str, got: Tensor, expected: Tensor) -> None:
    error, scale = (got - expected).abs().max().item(), expected.abs().max().item()
    assert scale > 0, f"{name}: nothing to compare"
    assert error <= TOLERANCE * scale, f"{name}: off by {error:.3g}, where the largest element is {scale:.3g}"


def _compiled(model: Model, case: Case, folder: Path) -> ModuleType:
    """The emitted program of a tiny plan that lies where the shipped ones do."""
    source = Source(str(PLANS / "tiny.scale"), _plan(model, case))
    path = folder / "train.py"
    path.write_text(emit(compile_plan(source), source)["train.py"])
    return harness.imported(path)


def _plan(model: Model, case: Case) -> str:
    kv = "kv_heads, " if "kv_heads" in model.dims else ""
    return f"""use "models/{model.file}.scale" {{ dims {{ {SIZES}  {model.dims} }}  const {{ {model.const} }} }}
mesh  {{ dp = {case.dp}  tp = {case.tp} }}
shard {{ batch over dp  vocab, heads, {kv}ffn over tp  {"seq over tp" if case.sp else ""} }}
train {{
  seq = {SEQ}  global_batch = {case.rows}  microbatch = {ROWS}  steps = {STEPS}  precision = fp64
  optimizer sgd {{ lr = {LR} }}
  data text {{ files = [python_stdlib]  tokenizer = bytes }}
}}
"""


def _drawn(like: Tensors) -> Tensors:
    """Parameters of a size at which every one of them matters; no two norm weights are alike."""
    generator = torch.Generator().manual_seed(7)
    noise = {n: torch.randn(v.shape, generator=generator, dtype=torch.float64) for n, v in like.items()}
    return {n: v / v.shape[1] ** 0.5 if v.dim() == 2 else 1 + 0.2 * v for n, v in noise.items()}


def _expected(model: Model, parameters: Tensors, batches: list[tuple[Tensor, Tensor]]) -> Iterator[Step]:
    """Each step of plain gradient descent."""
    for tokens, labels in batches:
        leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
        loss = cross_entropy(model.logits(leaves, tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        parameters = {name: value - LR * gradients[name] for name, value in parameters.items()}
        yield Step(loss.item(), sum(float(g.pow(2).sum()) for g in gradients.values()) ** 0.5, gradients, parameters)
