"""The models of plans/models, each at a tiny size: emitted programs against plain torch in one
process, in float64.

Each in one program; in all of these together every pair of a degree and a setting, and of two
settings, occurs.  Long tests have every pair with each model, and more degrees and settings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, cycle, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor
from torch.nn.functional import cross_entropy

from helpers.oracle import harness, matrix
from helpers.oracle.all_pairs import Pair, all_pairs
from helpers.oracle.compare import assert_same
from helpers.oracle.models import HEADS, MODELS, SIZES, Model
from helpers.oracle.plans import Case, train_text
from helpers.oracle.reference import Loss, Step, Tensors, Training, random_parameters, train
from helpers.programs import load_program

PLANS = Path(__file__).parents[2] / "plans"
LR = 0.01
STEPS = 2

BY_FILE = {model.file: model for model in MODELS}
# ops and repeats that all of them have
RECOMPUTE = ("none", "full", "selective(attention, embedding)")
FACTORS = {**matrix.FACTORS, "recompute": RECOMPUTE, "model": tuple(BY_FILE)}
IMPOSSIBLE = matrix.IMPOSSIBLE | {
    frozenset({("model", model.file), ("kv", kv)})
    for model in MODELS
    for kv in matrix.FACTORS["kv"]
    if kv != HEADS and not model.grouped
}
CASES = [Case(**case) for case in all_pairs(FACTORS, IMPOSSIBLE)]

FEW: Mapping[str, Sequence[Any]] = {
    "mesh": ("dp", "tp", "dp, tp"),
    "sp": (False, True),
    "vocab": (True, False),
    "kv": (4, 2),
    "microbatches": (1, 2),
    "valid": ("uneven", "silent_microbatch"),
    "gathered": ("save", "regather"),
    "kernels": ("torch", "triton"),
    "logits": ("chunk", "save"),
    "optimizer": ("adamw", "groups"),
    "recompute": RECOMPUTE,
    "state": ("", "zero 1 over dp", "zero 3 over dp"),
    "clip": (0.0, 0.05),
}
NOT_AMONG_FEW: frozenset[Pair] = frozenset(
    {
        *(frozenset({("mesh", "tp"), ("state", state)}) for state in FEW["state"][1:]),
        *(frozenset({("mesh", "dp"), each}) for each in (("sp", True), ("vocab", False))),
        frozenset({("microbatches", 1), ("valid", "silent_microbatch")}),
    }
)
ROWS = all_pairs(FEW, NOT_AMONG_FEW)


def _few() -> Iterator[Case]:
    """A program of each model, one after the other in the next of the rows."""
    for model, row in zip(MODELS, cycle(ROWS), strict=False):
        case = {**row, "kv": row["kv"] if model.grouped else HEADS, "model": model.file}
        case.update((axis, 2) for axis in case.pop("mesh").split(", "))
        yield Case(**case)


def test_every_model_file_is_there() -> None:
    """`tools/importer/test_same_numbers` has those of experts, and `test_five_axes` the
    tiny one.
    """
    assert {*BY_FILE, "deepseek_v3", "mixtral", "olmoe", "qwen3_moe", "tiny_moe"} == {
        path.stem for path in (PLANS / "models").glob("*.scale")
    }


def test_the_few_have_every_pair() -> None:
    assert len(ROWS) <= len(MODELS)
    for a, b in combinations(FEW, 2):
        wanted = {frozenset({(a, x), (b, y)}) for x, y in product(FEW[a], FEW[b])} - NOT_AMONG_FEW
        assert wanted <= {frozenset({(a, row[a]), (b, row[b])}) for row in ROWS}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [*_few()], ids=str)
def test_steps_of_each_model_equal_plain_torch(case: Case, tmp_path: Path) -> None:
    compare(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_equal_plain_torch(case: Case, tmp_path: Path) -> None:
    compare(case, tmp_path)


def compare(case: Case, tmp_path: Path) -> None:
    """Two steps against plain torch."""
    model = BY_FILE[case.model]
    module = _compiled(model, case, tmp_path)
    start = get_start(harness.initial(case, module, seed=5))
    batches = list(harness.batches(case, STEPS))
    expected = expected_of(model, case, start, batches)
    steps = harness.run(case, module, start, batches, LR)
    for number, (got, want) in enumerate(zip(steps, expected, strict=True)):
        assert_same(got, want, f"step {number}: ")


def expected_of(
    model: Model, case: Case, start: Tensors, batches: Sequence[harness.Inputs]
) -> list[Step]:
    """The steps of plain torch."""
    return train(_loss_of(model), _training(case, list(start)), start, batches, LR)


def _compiled(model: Model, case: Case, folder: Path) -> ModuleType:
    """The emitted program of a tiny plan that lies where the shipped ones do."""
    return load_program(model_plan(model, case), folder, str(PLANS / "tiny.scale"))


def model_plan(model: Model, case: Case) -> str:
    """The plan of a model at a tiny size, as if it lay beside the shipped ones."""
    dims, kv = (f"kv_heads = {case.kv}", "kv_heads, ") if model.grouped else ("", "")
    vocab, seq = "vocab, " if case.vocab else "", "seq over tp" if case.sp else ""
    return f"""use "models/{model.file}.scale" {{ dims {{ {SIZES}  {model.dims}  {dims} }}  const {{ {model.const} }} }}
mesh  {{ dp = {case.dp}  tp = {case.tp} }}
shard {{ batch over dp  {vocab}heads, {kv}ffn over tp  {seq} }}
{train_text(case)}"""


def get_start(like: Tensors) -> Tensors:
    """Parameters of a size at which every one of them matters; no two norm weights are alike."""
    noise = random_parameters(like, 1)
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
        return cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )

    return loss
