"""The meanings of a route's ops in float64 against plain torch, every gradient against
autograd, on one rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from helpers.empty_programs import frame
from scalec.compiler.ir import Op, Type, Value
from scalec.compiler.proof.semantics import MEANINGS, Call, pull_back
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.tensors import Tensor
from scalec.testing.float64 import Reals

SIZES = {"batch": 2, "seq": 5, "hidden": 3, "ffn": 4, "experts": 6, "scored": 6, "chosen": 2}
LOGITS, IDS, BY_SEQUENCE = (
    ("batch", "seq", "scored"),
    ("batch", "seq", "chosen"),
    ("batch", "scored"),
)
ORDER = ("experts", *IDS)
X, ROWS = ("batch", "seq", "hidden"), ("experts", "batch", "seq", "hidden")
RNG = np.random.default_rng(3)
IDS_OF_TOKENS = np.stack([[RNG.permutation(6)[:2] for _ in range(5)] for _ in range(2)])
HOT = np.moveaxis(np.eye(6, dtype=int)[IDS_OF_TOKENS], -1, 0)


def drawn(dims: Sequence[str]) -> np.ndarray[Any, Any]:
    return RNG.standard_normal([SIZES[dim] for dim in dims])


def top(
    logits: torch.Tensor,
    score: str,
    normalise: bool,
    scale: float = 1.0,
    groups: int = 1,
    among: int = 1,
) -> Any:
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    by_group = scores.unflatten(-1, (groups, -1))
    best = by_group.topk(2, dim=-1).values.sum(-1).topk(among, dim=-1).indices
    left = torch.zeros_like(by_group[..., 0]).scatter(-1, best, 1.0).unsqueeze(-1)
    gates = by_group.masked_fill(left == 0, -1).flatten(-2).topk(2, dim=-1).values
    return scale * (gates / gates.sum(-1, keepdim=True) if normalise else gates)


def balance(logits: torch.Tensor, ids: torch.Tensor, score: str) -> torch.Tensor:
    counts = torch.nn.functional.one_hot(ids, 6).sum((1, 2)).double() * 6 / (2 * 5)
    scores = (
        logits.softmax(-1)
        if score == "softmax"
        else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    )
    return 0.25 * (counts * scores.mean(1)).sum()


def shares(logits: torch.Tensor, score: str) -> torch.Tensor:
    if score == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)


def aux_loss(scores: torch.Tensor, choices: torch.Tensor, sequences: int) -> torch.Tensor:
    """By the mean over each group's rows, of which there are 30."""
    p, f = (x.double().unflatten(0, (-1, sequences)).sum(1) / 30 for x in (scores, choices))
    return 0.25 * 6 * (p * f).sum()


def dispatch(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return order.sum(-1).double().unsqueeze(-1) * x


def combine(rows: torch.Tensor, gates: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ebsc,bsc,ebsh->bsh", order.double(), gates, rows)


def products(x: torch.Tensor, w: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ebs,ebsh,efh->ebsf", order.sum(-1).double(), x, w)


def padded_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ebsh,efh->ebsf", x, w)


NONE = drawn(ROWS) * HOT.sum(-1)[..., None]  # rows are zero where no token chose the expert
CASES: dict[
    str,
    tuple[
        str, list[tuple[tuple[str, ...], Any]], tuple[str, ...], dict[str, Any], Callable[..., Any]
    ],
] = {
    **{
        f"top {score} {normalise} {groups}": (
            "top",
            [(LOGITS, drawn(LOGITS))],
            IDS,
            {
                "to": "chosen",
                "score": score,
                "normalise": normalise,
                "scale": 2.5,
                "groups": groups,
                "from": among,
            },
            lambda x, s=score, on=normalise == "on", g=groups, a=among: top(x, s, on, 2.5, g, a),
        )
        for score in ("softmax", "sigmoid")
        for normalise in ("off", "on")
        for groups, among in ((1, 1), (3, 2))
    },
    **{
        f"balance {score}": (
            "balance",
            [(LOGITS, drawn(LOGITS)), (IDS, IDS_OF_TOKENS)],
            (),
            {"by": 0.25, "score": score},
            lambda x, ids, s=score: balance(x, ids, s),
        )
        for score in ("softmax", "sigmoid")
    },
    **{
        f"sums of {score}": (
            "sum_scores",
            [(LOGITS, drawn(LOGITS))],
            BY_SEQUENCE,
            {"score": score},
            lambda x, s=score: shares(x, s).sum(1),
        )
        for score in ("softmax", "sigmoid")
    },
    **{
        f"auxiliary loss of {sequences}": (
            "aux_loss",
            [(BY_SEQUENCE, drawn(BY_SEQUENCE)), (BY_SEQUENCE, RNG.integers(0, 9, (2, 6)))],
            (),
            {"by": 0.25, "rows": 30, "sequences": sequences},
            lambda x, counts, n=sequences: aux_loss(x, counts, n),
        )
        for sequences in (1, 2)
    },
    "z": (
        "router_z",
        [(LOGITS, drawn(LOGITS))],
        (),
        {"by": 0.5},
        lambda x: 0.5 * x.logsumexp(-1).square().sum(),
    ),
    "dispatch": ("dispatch", [(X, drawn(X)), (ORDER, HOT)], ROWS, {}, dispatch),
    "combine": ("combine", [(ROWS, NONE), (IDS, drawn(IDS)), (ORDER, HOT)], X, {}, combine),
    "products": (
        "grouped_contract",
        [
            (ROWS, NONE),
            (("experts", "ffn", "hidden"), drawn(("experts", "ffn", "hidden"))),
            (ORDER, HOT),
        ],
        ("experts", "batch", "seq", "ffn"),
        {"over": ("hidden",)},
        products,
    ),
    "biases": (
        "grouped_bias",
        [(ROWS, NONE), (("experts", "hidden"), drawn(("experts", "hidden"))), (ORDER, HOT)],
        ROWS,
        {},
        lambda x, b, order: x + b[:, None, None] * (order.sum(-1, keepdim=True)),
    ),
    "padded biases": (
        "grouped_bias",
        [(ROWS, drawn(ROWS)), (("experts", "hidden"), drawn(("experts", "hidden")))],
        ROWS,
        {},
        lambda x, b: x + b[:, None, None],
    ),
    "padded products": (
        "grouped_contract",
        [(ROWS, drawn(ROWS)), (("experts", "ffn", "hidden"), drawn(("experts", "ffn", "hidden")))],
        ("experts", "batch", "seq", "ffn"),
        {"over": ("hidden",)},
        padded_products,
    ),
}


@pytest.mark.parametrize(("padded", "rows"), [(0, 10), (5, 10), (2, 4), (1, 2)])
def test_rows_past_the_padded_ones_are_no_rows(padded: int, rows: int) -> None:
    """The first ones of each expert are, for each of two sequences as many."""
    program = frame({"tp": 1}, SIZES)
    dims = tuple(
        evolve(dim, chosen="chosen", padded=padded) if dim.name == "experts" else dim
        for dim in program.dims
    )
    program, result = evolve(program, dims=dims), Value("order", Type("i64", ORDER))
    op = Op("sort_by_expert", ("ids",), (result,), (("to", "experts"),), span=program.region.span)
    # some of which chose the first expert twice
    ids = np.where(IDS_OF_TOKENS == 3, 0, IDS_OF_TOKENS)
    call = Call(
        program,
        SimulatedMesh.of_program(program),
        Reals(1),
        op,
        [Tensor(IDS, ids[None, None])],
        [Type("i64", IDS)],
    )
    (found,) = MEANINGS["sort_by_expert"].value(call)
    wanted = np.zeros((6, 20), dtype=int)
    for expert in range(6):
        wanted[expert, np.flatnonzero(ids == expert)[:rows]] = 1
    assert (found.array[0, 0] == wanted.reshape(6, 2, 5, 2)).all()


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(name: str) -> None:
    kind, operands, dims, attrs, formula = CASES[name]
    program = frame({"tp": 1}, SIZES)
    choices = tuple(
        evolve(dim, chosen="chosen") if dim.name == "experts" else dim for dim in program.dims
    )
    program = evolve(program, dims=choices)
    types = [Type("i64" if x.dtype.kind == "i" else "f64", own) for own, x in operands]
    results = (
        Value("y", Type("f64", dims)),
        *([Value("ids", Type("i64", IDS))] if kind == "top" else []),
    )
    op = Op(
        kind,
        tuple(f"x{i}" for i in range(len(types))),
        results,
        tuple(attrs.items()),
        span=program.region.span,
    )
    args = [Tensor(own, x[None, None]) for own, x in operands]
    call = Call(program, SimulatedMesh.of_program(program), Reals(1), op, args, types)
    found = MEANINGS[kind].value(call)
    tensors = [torch.from_numpy(x).requires_grad_(x.dtype.kind == "f") for _, x in operands]
    want = formula(*tensors)
    assert np.allclose(found[0].array[0, 0], want.detach().numpy(), rtol=1e-12, atol=1e-14)
    dy = RNG.standard_normal(want.shape)
    if name in ("products", "biases"):
        dy = dy * HOT.sum(-1)[..., None]  # gradients of rows are zero where there is none
    wrt = [i for i, x in enumerate(tensors) if x.requires_grad]
    _, made = pull_back(MEANINGS[kind], call, [Tensor(dims, dy[None, None])], wrt)
    wanted = [tensors[i] for i in wrt]
    expected = torch.autograd.grad(want, wanted, torch.from_numpy(np.asarray(dy)))
    for grad, due in zip(made, expected, strict=True):
        assert grad
        assert np.allclose(grad.array[0, 0], due.numpy(), rtol=1e-12, atol=1e-14)


def test_choices_of_each_sequence_are_counted() -> None:
    program = frame({"tp": 1}, SIZES)
    before = RNG.integers(0, 9, (2, 6))
    choices = Value("y", Type("i64", BY_SEQUENCE))
    op = Op("add_choices", ("x0", "x1"), (choices,), (), span=program.region.span)
    args = [Tensor(BY_SEQUENCE, before[None, None]), Tensor(IDS, IDS_OF_TOKENS[None, None])]
    types = [Type("i64", BY_SEQUENCE), Type("i64", IDS)]
    call = Call(program, SimulatedMesh.of_program(program), Reals(1), op, args, types)
    (found,) = MEANINGS["add_choices"].value(call)
    counts = [
        [(of_sequence == expert).sum() for expert in range(6)] for of_sequence in IDS_OF_TOKENS
    ]
    assert (found.array[0, 0] == before + counts).all()


def test_a_load_has_the_layers_before_and_the_counts_of_this_one() -> None:
    """By brute force; of choices that a capacity has dropped, -1, none counts."""
    program = frame({"tp": 1}, {**SIZES, "layers": 3})
    ids, before = IDS_OF_TOKENS.copy(), RNG.integers(0, 9, (3, 6))
    ids[0, 2, 1] = -1
    load = Value("y", Type("i64", ("layers", "scored")))
    op = Op("add_load", ("x0", "x1"), (load,), (), span=program.region.span)
    args = [
        Tensor(("layers", "scored"), Reals(1).constant(before[None, None]).array),
        Tensor(IDS, ids[None, None]),
    ]
    types = [load.type, Type("i64", IDS)]
    call = Call(program, SimulatedMesh.of_program(program), Reals(1), op, args, types)
    (found,) = MEANINGS["add_load"].value(call)
    counts = [sum(int(expert == each) for each in ids.flat) for expert in range(6)]
    assert found.array[0, 0].tolist() == [*before[1:].tolist(), counts]


def test_biases_choose_and_are_no_part_of_gates() -> None:
    """Of groups too: those with the largest sums of their two best scores with biases."""
    logits, bias = torch.from_numpy(drawn(LOGITS)), torch.from_numpy(RNG.standard_normal(6))
    program = frame({"tp": 1}, SIZES)
    attrs = {
        "to": "chosen",
        "score": "sigmoid",
        "normalise": "on",
        "scale": 2.5,
        "groups": 3,
        "from": 2,
    }
    results = (Value("y", Type("f64", IDS)), Value("ids", Type("i64", IDS)))
    op = Op("top", ("x0", "x1"), results, tuple(attrs.items()), span=program.region.span)
    args = [
        Tensor(LOGITS, logits.numpy()[None, None]),
        Tensor(("scored",), bias.numpy()[None, None]),
    ]
    types = [Type("f64", LOGITS), Type("f32", ("scored",))]
    gates, ids = MEANINGS["top"].value(
        Call(program, SimulatedMesh.of_program(program), Reals(1), op, args, types)
    )
    scores = logits.sigmoid()
    by_group = (scores + bias).unflatten(-1, (3, 2))
    best = by_group.sum(-1).topk(2, dim=-1).indices
    left = torch.zeros_like(by_group[..., 0]).scatter(-1, best, 1.0).unsqueeze(-1)
    want = by_group.masked_fill(left == 0, -torch.inf).flatten(-2).topk(2, dim=-1).indices
    picked = scores.gather(-1, want)
    assert ids.array[0, 0].tolist() == want.tolist()
    assert np.allclose(
        gates.array[0, 0], (2.5 * picked / picked.sum(-1, keepdim=True)).numpy(), rtol=1e-12
    )


@pytest.mark.parametrize("count", [0, 3])
def test_biases_move_to_the_mean_load(count: int) -> None:
    program, dims = frame({"tp": 1}, {**SIZES, "layers": 2}), ("layers", "scored")
    bias, load = RNG.standard_normal((2, 6)), np.array([[3, 1, 2, 2, 4, 0], [5, 5, 5, 5, 5, 5]])
    op = Op(
        "balanced",
        ("b", "l", "n"),
        (Value("y", Type("f32", dims)),),
        (("rate", 0.25),),
        span=program.region.span,
    )
    args = [
        Tensor(dims, bias[None, None]),
        Reals(1).constant(load[None, None], dims),
        Tensor((), np.array([[count]])),
    ]
    call = Call(
        program, SimulatedMesh.of_program(program), Reals(1), op, args, [Type("f32", dims)] * 3
    )
    (found,) = MEANINGS["balanced"].value(call)
    want = bias + 0.25 * np.array([[-1, 1, 0, 0, -1, 1], [0] * 6]) * bool(count)
    assert np.allclose(found.array[0, 0], want)
