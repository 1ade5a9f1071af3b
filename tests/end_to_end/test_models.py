"""The models of plans/models, each at a tiny size: emitted programs against plain torch in one process, in float64.

However they are sharded and trained: every pair of a model, a degree, a setting and another of these occurs.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from helpers.oracle import harness, matrix
from helpers.oracle.all_pairs import all_pairs
from helpers.oracle.compare import assert_same
from helpers.oracle.models import HEADS, MODELS, SIZES, Model
from helpers.oracle.plans import Case, train_text
from helpers.oracle.reference import Loss, Tensors, Training, train
from scalec.compiler.emit import emit
from scalec.compiler.passes import compile_plan
from scalec.compiler.syntax.source import Source

PLANS = Path(__file__).parents[2] / "plans"
LR = 0.01
STEPS = 2

BY_FILE = {model.file: model for model in MODELS}
RECOMPUTE = ("none", "full", "selective(attention, embedding)")  # ops and repeats that all of them have
FACTORS = {**matrix.FACTORS, "recompute": RECOMPUTE, "model": tuple(BY_FILE)}
IMPOSSIBLE = matrix.IMPOSSIBLE | {
    frozenset({("model", model.file), ("kv", kv)})
    for model in MODELS
    for kv in matrix.FACTORS["kv"]
    if kv != HEADS and not model.grouped
}
CASES = [Case(**case) for case in all_pairs(FACTORS, IMPOSSIBLE)]


def test_every_model_file_is_there() -> None:
    assert set(BY_FILE) == {path.stem for path in (PLANS / "models").glob("*.scale")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_equal_plain_torch(case: Case, tmp_path: Path) -> None:
    model = BY_FILE[case.model]
    module = _compiled(model, case, tmp_path)
    start = _drawn(harness.initial(case, module, seed=5))
    batches = list(harness.batches(case, STEPS))
    expected = train(_loss_of(model), _training(case, list(start)), start, batches, LR)
    steps = harness.run(case, module, start, batches, LR)
    for number, (got, want) in enumerate(zip(steps, expected, strict=True)):
        assert_same(got, want, f"step {number}: ")


def _compiled(model: Model, case: Case, folder: Path) -> ModuleType:
    """The emitted program of a tiny plan that lies where the shipped ones do."""
    source = Source(str(PLANS / "tiny.scale"), _plan(model, case))
    path = folder / "train.py"
    path.write_text(emit(compile_plan(source), source)["train.py"])
    return harness.imported(path)


def _plan(model: Model, case: Case) -> str:
    dims, kv = (f"kv_heads = {case.kv}", "kv_heads, ") if model.grouped else ("", "")
    vocab, seq = "vocab, " if case.vocab else "", "seq over tp" if case.sp else ""
    return f"""use "models/{model.file}.scale" {{ dims {{ {SIZES}  {model.dims}  {dims} }}  const {{ {model.const} }} }}
mesh  {{ dp = {case.dp}  tp = {case.tp} }}
shard {{ batch over dp  {vocab}heads, {kv}ffn over tp  {seq} }}
{train_text(case)}"""


def _drawn(like: Tensors) -> Tensors:
    """Parameters of a size at which every one of them matters; no two norm weights are alike."""
    generator = torch.Generator().manual_seed(7)
    noise = {n: torch.randn(v.shape, generator=generator, dtype=torch.float64) for n, v in like.items()}
    return {n: v / v.shape[1] ** 0.5 if v.dim() == 2 else 1 + 0.2 * v for n, v in noise.items()}


def _training(case: Case, names: Sequence[str]) -> Training:
    """The optimizer, its groups by the names that this model has."""
    if case.optimizer != "groups":
        return case.training
    last = sorted({name.rpartition(".")[2] for name in names})
    norms, queries = ([n for n in last if "norm" in n], [n for n in last if "wq" in n])
    decay = (*((name, 0.0) for name in norms), *((name, 0.3) for name in queries))
    return replace(case.training, decay=decay, scale=tuple((name, 0.5) for name in norms))


def _loss_of(model: Model) -> Loss:
    """The sum of token losses over labels ≥ 0."""

    def loss(parameters: Tensors, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model.logits(parameters, tokens)
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")

    return loss
