"""The evaluator's own audit: every op's meaning in float64 against plain torch, every gradient
against autograd.

Purpose: `compiler.proof.semantics` is the only thing the evaluator knows of ops; here each formula,
and the gradients that the tape makes of it, are held against the definition, written in torch and
not taken from our runtime.  Non-goals: coercions (`test_simulated_mesh`), arithmetic in the field
(`test_prime_field`), the tape by itself (`test_tape`), whole steps (`test_proof`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attrs import evolve, fields, frozen

from helpers.empty_programs import frame
from helpers.reference_ops import (
    attention,
    cross_entropy,
    layer_norm,
    rms_norm,
    rope,
    rope_frequencies,
    soft_cap,
)
from helpers.unary_ops import UNARY, cases
from scalec.compiler.config.settings import Optimizer, ParamGroup, Schedule
from scalec.compiler.ir import Attr, Bucket, Op, Program, Type, Value
from scalec.compiler.ops import OPS
from scalec.compiler.ops import gradients as written
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.semantics import MEANINGS, Call, pull_back
from scalec.compiler.proof.semantics.step import update_param
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.tensors import RANDOM, Tensor
from scalec.testing.float64 import FUNCTIONS, Reals

NAMES = "batch seq hidden ffn vocab heads kv_heads head_dim layers share".split()
DIMS = dict(zip("bshfvnkdlo", NAMES, strict=True))
"""The letters of shapes; of a share there is one on each rank."""

SIZES = {
    name: dict(zip(DIMS, sizes, strict=True))
    for name, sizes in {
        "kv heads < heads": (2, 5, 6, 3, 7, 6, 2, 4, 3, 1),
        "kv heads = heads": (3, 4, 2, 5, 11, 3, 3, 6, 2, 1),
        "one kv head": (2, 6, 4, 2, 4, 4, 1, 2, 1, 1),
        "ones": (1, 1, 1, 1, 3, 1, 1, 2, 1, 1),
    }.items()
}
"""In all of them `vocab` is as large as `ffn` and `head_dim` together, as what is joined is."""

Numbers = dict[str, int]
Formula = Callable[..., Any]


# ---- definitions in torch


def rms_scaled(
    x: torch.Tensor, weight: torch.Tensor, square: torch.Tensor, eps: float
) -> torch.Tensor:
    return x * weight / torch.sqrt(square + eps).reshape(*square.shape, *[1] * weight.ndim)


def rope_by(theta: float, seq: int) -> Formula:
    """Rotary positions of the whole last dim, along the dim `seq`."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        return rope(x, rope_frequencies(x.shape[-1], theta), seq)

    return turned


def dropout_factors(draws: torch.Tensor, *sizes: int, p: float, site: int = 1) -> torch.Tensor:
    """What elements of [batch, *sizes] are multiplied by: the verifier's own hash of everything
    that it depends on.
    """
    indices = np.ogrid[tuple(slice(size) for size in (len(draws), *sizes))]
    factors = FUNCTIONS["kept"](draws.numpy().reshape(indices[0].shape), *indices[1:], site, p)
    assert set(np.unique(factors)) <= {0, 1 / (1 - p)}
    return torch.from_numpy(factors)


def dropout(x: torch.Tensor, draws: torch.Tensor, batch: int) -> torch.Tensor:
    return x * dropout_factors(
        draws, *(size for i, size in enumerate(x.shape) if i != batch), p=0.25
    ).movedim(0, batch)


def attention_in(layout: str, dropout: float = 0) -> Formula:
    """Causal attention where q has this layout, of letters of `bsnd`.

    Behind q, k, v may come ids of documents and, with dropout, draws.
    """
    from_layout = [layout.index(letter) for letter in "bsnd" if letter in layout]
    to_layout = [[letter for letter in "bsnd" if letter in layout].index(at) for at in layout]
    has_batch = "b" in layout

    def formula(*operands: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(from_layout) for x in operands[:3])
        if not has_batch:
            q, k, v = (x[None] for x in (q, k, v))
        *documents, draws = operands[3:] if dropout else (*operands[3:], None)
        ids = documents[0] if documents else None
        y = attention(
            q,
            k,
            v,
            documents=ids if ids is None or layout[0] == "b" else ids.T,
            change_weights=None if draws is None else drop_weights(draws, dropout),
        )
        return (y if has_batch else y[0]).permute(to_layout)

    return formula


def drop_weights(draws: torch.Tensor, p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Dropout of weights [batch, heads, query, key]."""
    return lambda weights: weights * dropout_factors(draws, *weights.shape[1:], p=p)


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The row of each id; zeros for an id that the table lacks."""
    known = (ids >= 0).reshape(*ids.shape, *(1,) * (table.ndim - 1))
    return table[ids.clamp(min=0)] * known


def local_softmax_stats(
    logits: torch.Tensor, peak: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    below = logits - peak[..., None]
    at_label = below.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)
    return below.exp().sum(-1), (1 - smoothing) * at_label + smoothing * below.mean(-1)


def token_loss(
    z: torch.Tensor,
    t: torch.Tensor,
    labels: torch.Tensor,
    peak: torch.Tensor | float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    return (z.log() - t + z_loss * (z.log() + peak).pow(2))[labels >= 0].sum()


def head(
    x: torch.Tensor,
    w: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    **options: float,
) -> torch.Tensor:
    return cross_entropy(F.linear(x, w, bias), labels, **options)


def parts_below(
    m: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float = 0.0,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """z, relative to m and in a dim of its own, and t, which is relative to nothing."""
    logits = soft_cap(logits, cap)
    z, _ = local_softmax_stats(logits, m, labels)
    _, t = local_softmax_stats(logits, torch.zeros_like(m), labels, smoothing)
    return z[..., None], t


def logit_softmax_stats(logits: torch.Tensor, labels: torch.Tensor, **options: float) -> Any:
    """m has a gradient of zero."""
    m = soft_cap(logits, options.get("cap", 0.0)).amax(-1)
    return m.detach() + 0 * m, *parts_below(m.detach(), logits, labels, **options)


def linear_softmax_stats(
    x: torch.Tensor,
    w: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    **options: float,
) -> Any:
    return logit_softmax_stats(F.linear(x, w, bias), labels, **options)


def rescale_to_global_max(
    m: torch.Tensor,
    z: torch.Tensor,
    t: torch.Tensor,
    peak: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a label is ignored, t has its smoothing still."""
    return z[..., 0] * torch.exp(m - peak), t - (
        (1 - smoothing) * (labels >= 0).double() + smoothing
    ) * peak


def clip_scale(norm: torch.Tensor, most: float) -> torch.Tensor:
    return (most / norm).clamp(max=1) if most else torch.ones_like(norm)


def updated_by_descent(
    grad: torch.Tensor, scale: torch.Tensor, count: torch.Tensor, *params: torch.Tensor
) -> Any:
    """Gradient descent at a rate of a half, from one gradient of all parameters, one behind
    another.
    """
    parts = grad.flatten().split([param.numel() for param in params])
    pairs = zip(params, parts, strict=True)
    return tuple(
        param - 0.5 * scale * part.reshape(param.shape) * (count > 0) for param, part in pairs
    )


def updated_by_turns(
    grad: torch.Tensor, scale: torch.Tensor, count: torch.Tensor, *params: torch.Tensor
) -> Any:
    """The same, each layer of all parameters from a gradient of its own."""
    layers = [
        updated_by_descent(grads, scale, count, *own)
        for grads, *own in zip(grad, *params, strict=True)
    ]
    return tuple(torch.stack(stack) for stack in zip(*layers, strict=True))


def _pulled(
    formula: Formula,
    operands: list[torch.Tensor],
    grads: Sequence[torch.Tensor],
    wanted: Sequence[int],
) -> Any:
    for i in wanted:
        operands[i].requires_grad_(True)
    found = formula(*operands)
    results = found if isinstance(found, tuple) else (found,)
    return torch.autograd.grad(results, [operands[i] for i in wanted], grads, create_graph=True)


# ---- the table


@frozen
class Case:
    """What an op takes and gives, in words of letters, and its definition.

    Operands: `#bs` token ids or labels, `#.` a count, `0.` the count zero, `+bs` positive numbers,
    `.` a scalar.  `fh+h` is one flat dim.  Where each layer over `l` has a bucket, `l|fh` is the
    stack of all, `l/fh` one layer's.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    formula: Formula
    attrs: tuple[tuple[str, Attr], ...] = ()


def case(spec: str, formula: Formula, **attrs: Attr) -> Case:
    """`spec` is `operands -> results`."""
    operands, results = spec.split("->")
    return Case(tuple(operands.split()), tuple(results.split()), formula, tuple(attrs.items()))


def einsum(path: str) -> Formula:
    return lambda *xs: torch.einsum(path, *xs)


def same(*args: torch.Tensor) -> torch.Tensor:
    return args[0].clone()


def added(*args: torch.Tensor) -> torch.Tensor:
    return sum(args[1:], args[0])


def parted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`vocab` as `ffn` and `head_dim`."""
    sizes = next(sizes for sizes in SIZES.values() if sizes["v"] == x.shape[-1])
    return x.split((sizes["f"], sizes["d"]), -1)


def sum_and_norm(norm: Formula) -> Formula:
    def both(
        x: torch.Tensor, y: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y, norm(x + y, *weights, eps=0.1)

    return both


def gated(function: Formula) -> Formula:
    return lambda x, y: function(x) * y


def two_ropes(seq: int, theta: float) -> Formula:
    turned = rope_by(theta, seq)
    return lambda q, k: (turned(q), turned(k))


OF_ONE = {name: [*cases(name, ("batch", "seq", "hidden"))] for name in UNARY}
"""Functions of one operand with their attributes."""

DROPS: dict[str, Attr] = {"mask": "causal", "dropout": 0.25, "site": 1}
"""Attention that drops weights."""

LOSSES: list[dict[str, float]] = [
    {"smoothing": 0.1},
    {"z": 0.25},
    {"smoothing": 0.1, "z": 0.25},
    {"smoothing": 0.1, "cap": 2.0},
]
"""Options of the loss."""

HEADS: list[dict[str, float]] = [
    {},
    {"cap": 2.0},
    {"smoothing": 0.1, "z": 0.25},
    {"smoothing": 0.1, "cap": 0.5},
]
"""Options of the loss that makes its own logits; its parts have no z-loss."""

PARTS: list[dict[str, float]] = [{}, {"cap": 2.0}, {"smoothing": 0.1, "cap": 0.5}]
INNER: dict[str, Attr] = {"inner": ("hidden",)}
PRODUCTS = ("sbh vh #sb", "sbh vh #sb v")
"""Operands of a loss that makes its own logits, without and with a bias."""

SHARE: dict[str, Attr] = {"as": "share"}
SHARED = INNER | SHARE


def key(operand: int, *shape: int, result: int = 0) -> torch.Tensor:
    """What combines the elements of a slice of an operand of a user's own function."""
    return torch.as_tensor(Reals(0).random(shape, f"my_ops:own () {result} {operand}")[0])


def own_by_element(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tanh(key(0) * x) * key(1) * y


def own_two(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return own_by_element(x, y), torch.tanh(key(0, result=1) * x) * key(1, result=1) * y


def own_by_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h, f = x.shape[-1], w.shape[0]
    return x @ key(0, h, h).T * torch.tanh(torch.einsum("ofi,fi->o", key(1, h, f, h), w))


OWN: dict[str, Attr] = {"function": "my_ops:own", "gives": (".. hidden",), "constants": ()}
BY_ELEMENT = OWN | {
    "takes": (".. hidden",) * 2,
    "along": ("batch", "seq", "hidden"),
    "linear": ("1",),
}
BY_ROW = OWN | {"takes": (".. hidden", "ffn hidden"), "along": ("batch", "seq"), "linear": ("0",)}
TWO = BY_ELEMENT | {"gives": (".. hidden", ".. hidden")}

GATES = {f"{name}_mul": OF_ONE[name] for name in ("gelu", "silu")}

FUSED = {
    "add_layernorm": [
        case("bsh bsh h h -> bsh bsh", sum_and_norm(layer_norm), eps=0.1),
        case("sbnd sbnd nd -> sbnd sbnd", sum_and_norm(layer_norm), eps=0.1),
    ],
    "add_rmsnorm": [
        case("bsh bsh h -> bsh bsh", sum_and_norm(rms_norm), eps=0.1),
        case("sbnd sbnd nd -> sbnd sbnd", sum_and_norm(rms_norm), eps=0.1),
    ],
    "contracts": [
        case("bsh fh -> bsf", einsum("bsh,fh->bsf"), over=("hidden",)),
        case(
            "sbh ndh kdh fh -> sbnd sbkd sbf",
            lambda x, *ws: tuple((x @ w.flatten(0, -2).T).unflatten(-1, w.shape[:-1]) for w in ws),
            over=("hidden",),
        ),
        case(
            "bsnd hnd vnd -> bsh bsv",
            lambda x, *ws: tuple(torch.tensordot(x, w, 2) for w in (w.movedim(0, -1) for w in ws)),
            over=("heads", "head_dim"),
        ),
    ],
    **{
        name: [case("bsh bsh -> bsh", gated(f), **attrs) for f, attrs in each]
        for name, each in GATES.items()
    },
    "linear_cross_entropy": [
        case(f"{word} -> .", partial(head, **it), **it, **INNER)
        for word in PRODUCTS
        for it in HEADS
    ],
    "linear_softmax_stats": [
        case(f"{word} -> sb sbo sb", partial(linear_softmax_stats, **it), **it, **SHARED)
        for word in PRODUCTS
        for it in PARTS
    ],
    "logit_softmax_stats": [
        case("sbv #sb -> sb sbo sb", partial(logit_softmax_stats, **it), **it, **SHARE)
        for it in PARTS
    ],
    "rescale_to_global_max": [
        case("sb sbo sb sb #sb -> sb sb", rescale_to_global_max, classes="vocab"),
        case(
            "sb sbo sb sb #sb -> sb sb",
            partial(rescale_to_global_max, smoothing=0.1),
            smoothing=0.1,
            classes="vocab",
        ),
    ],
    "rope_pair": [
        case("bsnd bskd -> bsnd bskd", two_ropes(1, 100.0), theta=100.0),
        case("sbnd sbkd -> sbnd sbkd", two_ropes(0, 5e5), theta=5e5),
    ],
}
"""Ops that do the work of several: each is held to what these mean one after the other."""

CASES = {
    **FUSED,
    **{
        name: [case("bsh -> bsh", f, **attrs) for f, attrs in each] for name, each in OF_ONE.items()
    },
    "add": [
        case("bsh bsh bsh -> bsh", added),
        case("h bsh sh -> bsh", added),
        case(". . -> .", added),
    ],
    "attention": [
        case("bsnd bskd bskd -> bsnd", attention_in("bsnd"), mask="causal"),
        case("sbnd sbkd sbkd -> sbnd", attention_in("sbnd"), mask="causal"),
        case("snd skd skd -> snd", attention_in("snd"), mask="causal"),
        case("snd snd snd -> snd", attention_in("snd"), mask="causal"),
        case("bsnd bskd bskf -> bsnf", attention_in("bsnd"), mask="causal"),
        case("bsnd bskd bskd #bs -> bsnd", attention_in("bsnd"), mask="causal"),
        case("sbnd sbkd sbkd #sb -> sbnd", attention_in("sbnd"), mask="causal"),
        case("bsnd bskd bskd #b -> bsnd", attention_in("bsnd", dropout=0.25), **DROPS),
        case(
            "sbnd sbkd sbkd #sb #b -> sbnd",
            attention_in("sbnd", dropout=0.25),
            **DROPS,
        ),
    ],
    "begin": [case("fh h ->", lambda *xs: (), bucket="flat")],
    "cast": [case("bsh -> bsh", same, dtype="f64")],
    "call": [
        case("bsh bsh -> bsh", own_by_element, **BY_ELEMENT),
        case("sbh fh -> sbh", own_by_row, **BY_ROW),
        case("bsh bsh -> bsh bsh", own_two, **TWO),
    ],
    "clip_scale": [
        case("+. -> .", partial(clip_scale, most=most), max=most)
        for most in (1e-9, 0.5, 1.0, 1e9, 0.0)
    ],
    "concat": [
        case("bsf bsd -> bsv", lambda *xs: torch.cat(xs, -1), **{"as": "vocab"}),
        case(
            "bsnf bsd -> bsnv",
            lambda x, y: torch.cat([x, y[:, :, None].expand(*x.shape[:3], -1)], -1),
            **{"as": "vocab"},
        ),
        case("f d -> v", lambda *xs: torch.cat(xs, -1), **{"as": "vocab"}),
    ],
    "contract": [
        case("bsh fh -> bsf", einsum("bsh,fh->bsf"), over=("hidden",)),
        case("sbnd hnd -> sbh", einsum("sbnd,hnd->sbh"), over=("heads", "head_dim")),
        case("sbf bsh -> fh", einsum("sbf,bsh->fh"), over=("seq", "batch")),
        case("h h -> .", einsum("h,h->"), over=("hidden",)),
    ],
    "count_valid": [
        case("#bs -> .", lambda x: (x >= 0).sum()),
        case("#sb -> .", lambda x: (x >= 0).sum()),
    ],
    "cross_entropy": [
        case("bsv #bs -> .", cross_entropy),
        case("sbv #sb -> .", cross_entropy),
        *(case("sbv #sb -> .", partial(cross_entropy, **options), **options) for options in LOSSES),
    ],
    "div": [
        case("bsh bsh -> bsh", torch.div),
        case("bsh +h -> bsh", torch.div),
        case("sh bsh -> bsh", torch.div),
    ],
    "dropout": [
        case("bsh #b -> bsh", partial(dropout, batch=0), p=0.25, site=1),
        case("sbnd #b -> sbnd", partial(dropout, batch=1), p=0.25, site=1),
    ],
    "embedding": [case("#bs vh -> bsh", embedding), case("#sb vnd -> sbnd", embedding)],
    "grad_norm": [case("+. +. -> .", lambda *xs: added(*xs).sqrt()), case("+. -> .", torch.sqrt)],
    "if_below": [
        case("#. . . -> .", lambda count, loss, limit: torch.where(loss <= limit, count, 0))
    ],
    "if_finite": [case("#. +. . -> .", lambda count, norm, loss: count)],
    "layernorm": [
        case("bsh h h -> bsh", partial(layer_norm, eps=0.1), eps=0.1),
        case("bsh h -> bsh", partial(layer_norm, eps=0.1), eps=0.1),
        case("sbnd nd nd -> sbnd", partial(layer_norm, eps=0.1), eps=0.1),
    ],
    "leaf": [case("vh -> vh", same)],
    "leaf_grad": [case("vh -> vh", same)],
    "max_logit": [case("sbv -> sb", lambda x: x.amax(-1)), case("v -> .", lambda x: x.amax(-1))],
    "mean": [
        case("bsh -> h", lambda x: x.mean((0, 1)), over=("batch", "seq")),
        case("bsh -> bs", lambda x: x.mean(-1), over=("hidden",)),
    ],
    "mean_square": [
        case("sbnd -> sb", lambda x: (x * x).mean((2, 3)), over=("heads", "head_dim")),
        case("bsh -> bs", lambda x: (x * x).mean(-1), over=("hidden",)),
    ],
    "mul": [
        case("bsh bsh -> bsh", torch.mul),
        case("bsh h -> bsh", torch.mul),
        case("sh bsh -> bsh", torch.mul),
    ],
    "pack": [
        case("fh h lnd -> .*", lambda *xs: torch.cat([x.flatten() for x in xs]), bucket="flat"),
        case(
            "l|fh l|h -> l|.*", lambda *xs: torch.cat([x.flatten(1) for x in xs], -1), bucket="flat"
        ),
        case(
            "lb|h lb|nd -> lb|.*",
            lambda *xs: torch.cat([x.flatten(2) for x in xs], -1),
            bucket="flat",
        ),
        case("l/fh l/h -> .*", lambda *xs: torch.cat([x.flatten() for x in xs]), bucket="flat"),
    ],
    "reciprocal": [
        case(f"{word} -> .", lambda n: 1 / n.clamp(min=1).double(), dtype="f64")
        for word in ("#.", "0.")
    ],
    "rmsnorm": [
        case("bsh h -> bsh", partial(rms_norm, eps=0.1), eps=0.1),
        case("sbnd nd -> sbnd", partial(rms_norm, eps=1e-5), eps=1e-5),
        case("bsnd d -> bsnd", partial(rms_norm, eps=2.0), eps=2.0),
    ],
    "rms_scaled": [
        case("bsh h +bs -> bsh", partial(rms_scaled, eps=0.1), eps=0.1),
        case("sbnd nd +sb -> sbnd", partial(rms_scaled, eps=0.1), eps=0.1),
    ],
    "rope": [
        case("bsnd -> bsnd", rope_by(100.0, 1), theta=100.0),
        case("sbkd -> sbkd", rope_by(5e5, 0), theta=5e5),
        case("sd -> sd", rope_by(2.0, 0), theta=2.0),
    ],
    "scale": [case("bsh -> bsh", lambda x: -0.75 * x, by=-0.75)],
    "shift": [case("bsh -> bsh", lambda x: x - 0.75, by=-0.75)],
    "local_softmax_stats": [
        case("sbv sb #sb -> sb sb", local_softmax_stats),
        case("bsv bs #bs -> bs bs", local_softmax_stats),
        case("sbv sb #sb -> sb sb", partial(local_softmax_stats, smoothing=0.1), smoothing=0.1),
    ],
    "split": [case("sbv -> sbf sbd", parted, parts=("ffn", "head_dim"))],
    "sum": [
        case("bsh -> h", lambda x: x.sum((0, 1)), over=("batch", "seq")),
        case("bsh -> bs", lambda x: x.sum(-1), over=("hidden",)),
    ],
    "sum_squares": [
        case("bsh fh -> .", lambda *xs: sum((x * x).sum() for x in xs)),
        case("v -> .", lambda x: x @ x),
    ],
    "token_loss": [
        case("+sb sb #sb -> .", token_loss),
        case("+bs bs #bs -> .", token_loss),
        case("+sb sb #sb sb -> .", partial(token_loss, z_loss=0.25), z_loss=0.25),
    ],
    "unpack": [
        case("h+h -> h h", lambda x: x.chunk(2), bucket="flat"),
        case("l|h+h -> l|h l|h", lambda x: x.chunk(2, -1), bucket="flat"),
        case("h+h -> l/h l/h", lambda x: x.chunk(2), bucket="flat"),
    ],
    "unscaled": [case(". +. -> .", torch.div)],
    "unscaled_norm": [case("+. +. +. -> .", lambda scale, *xs: added(*xs).sqrt() / scale)],
    "update": [
        case("vh . #. vh -> vh", updated_by_descent),
        case("vh . 0. vh -> vh", updated_by_descent),
        case("fh+lnd+h . #. fh lnd h -> fh lnd h", updated_by_descent, bucket="flat"),
        case("l|fh+h . #. l|fh l|h -> l|fh l|h", updated_by_turns, bucket="flat"),
    ],
}
"""For every kind but `coerce`, which is no function of one rank's operands, `fork`, any of distinct
results, `loss_scale` and `loss_limit`, any number, `ring_attention`, of several ranks, `zeros` and
`one`, which have no operands, and `vjp`, which is of all others that have gradients."""

OF_ROUTES = {
    *(
        "top",
        "balance",
        "router_z",
        "dispatch",
        "combine",
        "grouped_contract",
        "grouped_bias",
        "balanced",
    ),
    *("no_scores", "no_choices", "sum_scores", "add_choices", "aux_loss"),
    *("no_loss", "no_load", "add_load", "limit_capacity", "sort_by_expert"),
    *("exchange_counts", "exchange", "exchange_back", "exchange_padded", "wait"),
}
"""Ops of experts: the first line's are held to torch in `test_expert_semantics`, what moves
rows by plans alone.
"""

OF_PARTS = ("linear_softmax_stats", "logit_softmax_stats")
"""Ops whose first result, a maximum, has no gradient."""

WITHOUT_GRADIENT = {
    ("max_logit", 0),
    ("rescale_to_global_max", 0),
    ("rescale_to_global_max", 3),
    ("local_softmax_stats", 1),
    ("token_loss", 3),
}
"""Operands on which the loss does not depend, though the op's own result does: the peak is
taken away again.
"""

ALL = [
    pytest.param(kind, it, id=f"{kind} {i}")
    for kind, them in CASES.items()
    for i, it in enumerate(them)
]
OF_A_FORWARD = [
    param
    for param in ALL
    if OPS[str(param.values[0])].differentiable or param.values[0] in ("cast", "leaf")
]
WITH_VJP = [
    param for param in ALL if (entry := OPS[str(param.values[0])]).vjp and not entry.adjoint
]


def test_every_op_has_a_meaning_and_stands_here() -> None:
    elsewhere = {
        "fork",
        "loss_limit",
        "loss_scale",
        "one",
        "ring_attention",
        "vjp",
        "zeros",
        *OF_ROUTES,
    }
    assert set(CASES) | elsewhere == set(MEANINGS) == set(OPS) - {"coerce"}


# ---- drawing operands


def dims(word: str, sizes: Numbers) -> dict[str, int]:
    """The dims of a word and their sizes."""
    stack, bar, own = word.rpartition("|")
    if bar:
        return dims(stack, sizes) | dims(own, sizes)
    word = word.rpartition("/")[2]
    letters = word.lstrip("#0+").replace(".", "")
    if "+" in letters:
        return {
            "flat": sum(
                int(np.prod(list(dims(part, sizes).values()))) for part in letters.split("+")
            )
        }
    return {DIMS[letter]: sizes[letter] for letter in letters}


def _layers(word: str) -> str:
    """What stands before the bar."""
    stack, bar, _ = word.replace("/", "|").rpartition("|")
    return stack if bar else ""


def random_operand(word: str, sizes: Numbers, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    shape = list(dims(word, sizes).values())
    if word[0] in "#0":
        return np.asarray(
            0 if word[0] == "0" else rng.integers(-1 if len(word) > 2 else 1, sizes["v"], shape)
        )
    value = rng.normal(size=shape)
    return np.asarray(np.exp(value) if word[0] == "+" else value)


@frozen
class Drawn:
    """An op of a case at some sizes, and its operands."""

    kind: str
    case: Case
    sizes: Numbers
    operands: list[np.ndarray[Any, Any]]

    def call(self) -> Call:
        """The op on one rank in float64."""
        full = self._bucketed(
            frame({}, {DIMS[letter]: size for letter, size in self.sizes.items()})
        )
        types = [
            Type("i64" if word[0] in "#0" else "f64", tuple(dims(word, self.sizes)))
            for word in self.case.operands
        ]
        names = tuple(f"x{i}" for i in range(len(types)))
        results = tuple(
            Value(f"y{i}", self._result(word)) for i, word in enumerate(self.case.results)
        )
        op = Op(self.kind, names, results, self.case.attrs, span=full.region.span)
        args = [Tensor(type.dims, x[None]) for type, x in zip(types, self.operands, strict=True)]
        return Call(full, SimulatedMesh.of_program(full), Reals(0), op, args, types)

    def _bucketed(self, full: Program) -> Program:
        """With the parameters of the one bucket that the op speaks of, if it does."""
        words = {
            "pack": self.case.operands,
            "unpack": self.case.results,
            "update": self.case.operands[3:],
        }
        if self.kind not in words:
            return full
        own = [
            Type("f64", tuple(dims(word.replace("/", "|"), self.sizes)))
            for word in words[self.kind]
        ]
        layers = tuple(dims(_layers(words[self.kind][0]), self.sizes))
        params = tuple(
            evolve(full.params[0], name=f"p{i}", type=type, stacked=0, inner=0)
            for i, type in enumerate(own)
        )
        bucket = Bucket(
            "flat", tuple(param.name for param in params), Type("f64", (*layers, "flat"))
        )
        return evolve(full, params=params, buckets=(bucket,))

    def _result(self, word: str) -> Type:
        if word.endswith(".*"):
            return Type("f64", (*dims(_layers(word), self.sizes), "flat"))
        return Type("f64", tuple(dims(word, self.sizes)))

    def tensors(self) -> list[torch.Tensor]:
        """The operands for the definition."""
        return [torch.from_numpy(x.copy()) for x in self.operands]

    def defined(self) -> list[torch.Tensor]:
        """What the definition gives."""
        found = self.case.formula(*self.tensors())
        return [*found] if isinstance(found, tuple) else [found]

    def grads(self) -> list[Tensor]:
        """Gradients of the results, drawn."""
        rng, results = np.random.default_rng(1), zip(self.case.results, self.defined(), strict=True)
        return [
            Tensor(self._result(word).dims, rng.normal(size=(1, *result.shape)))
            for word, result in results
        ]


def draw(kind: str, case: Case, sizes: str, seed: int = 0) -> Drawn:
    rng = np.random.default_rng(seed)
    return Drawn(
        kind,
        case,
        SIZES[sizes],
        [random_operand(word, SIZES[sizes], rng) for word in case.operands],
    )


def assert_same(found: Tensor, expected: torch.Tensor, dims: Sequence[str], what: str) -> None:
    assert found.dims == tuple(dims), what
    assert found.array.shape == (1, *expected.shape), what
    np.testing.assert_allclose(
        found.array[0], expected.detach().numpy(), rtol=1e-11, atol=1e-11, err_msg=what
    )


# ---- the audit


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("kind", "case"), ALL)
def test_meanings_are_the_definitions(kind: str, case: Case, sizes: str) -> None:
    it = draw(kind, case, sizes)
    call = it.call()
    for value, found, expected in zip(
        call.op.outputs, MEANINGS[kind].value(call), it.defined(), strict=True
    ):
        assert_same(found, expected, value.type.dims, f"{kind}: {value.name}")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("kind", "case"), OF_A_FORWARD)
def test_gradients_are_those_of_autograd(kind: str, case: Case, sizes: str) -> None:
    it = draw(kind, case, sizes)
    call, grads = it.call(), it.grads()
    operands = [i for i, type in enumerate(call.types) if type.differentiable]
    pulled = grads[1:] if kind in OF_PARTS else grads
    _, found = pull_back(MEANINGS[kind], call, pulled, operands)
    assert_autograd(it, grads, dict(zip(operands, found, strict=True)))


def test_a_maximum_has_no_gradient() -> None:
    call = draw("max_logit", CASES["max_logit"][0], "ones").call()
    assert pull_back(MEANINGS["max_logit"], call, [], [0])[1] == [None]


@frozen
class Tape:
    """Evaluates each `vjp` that is written: the `Builder` of the op protocol."""

    forward: Call
    held: dict[str, Tensor]

    def emit(
        self, kind: str, inputs: Sequence[str], like: Sequence[str], **attrs: Attr
    ) -> tuple[str, ...]:
        outputs = tuple(Value(f"d_{name}", self.type(name)) for name in like)
        op = Op(kind, tuple(inputs), outputs, tuple(attrs.items()), span=self.forward.op.span)
        args, types = [self.held[name] for name in inputs], [self.type(name) for name in inputs]
        results = MEANINGS[kind].value(evolve(self.forward, op=op, args=args, types=types))
        names = tuple(value.name for value in outputs)
        self.held.update(zip(names, results, strict=True))
        return names

    def save(self, name: str) -> str:
        return name

    def type(self, name: str) -> Type:
        """The type of an operand, of a result or of a result's gradient."""
        op = self.forward.op
        types = dict(zip(op.inputs, self.forward.types, strict=True))
        for i, value in enumerate(op.outputs):
            types |= {value.name: value.type, f"dy{i}": value.type}
        return types[name]

    def is_wanted(self, name: str) -> bool:
        return self.type(name).dtype != "i64"

    def maker(self, name: str) -> Op:
        raise AssertionError(f"{name} is an operand")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("kind", "case"), WITH_VJP)
def test_a_vjp_gives_those_gradients_of_what_it_reads(kind: str, case: Case, sizes: str) -> None:
    """A maximum has none."""
    it = draw(kind, case, sizes)
    call, grads = it.call(), it.grads()
    names = [f"dy{i}" for i in range(len(grads))]
    results = zip(
        (value.name for value in call.op.outputs), MEANINGS[kind].value(call), strict=True
    )
    tape = Tape(
        call,
        dict(zip((*call.op.inputs, *names), (*call.args, *grads), strict=True)) | dict(results),
    )
    without = ["" if kind in OF_PARTS and not i else name for i, name in enumerate(names)]
    names = written(OPS[kind], call.op, without, tape)
    found = {i: tape.held[name] for i, name in enumerate(names) if name}
    assert {*found} == {
        i
        for i, type in enumerate(call.types)
        if type.differentiable and (kind, i) not in WITHOUT_GRADIENT
    }
    assert_autograd(it, grads, found)


def assert_autograd(it: Drawn, grads: Sequence[Tensor], found: Mapping[int, Tensor | None]) -> None:
    """The gradients that autograd makes of an op's operands, by their numbers."""
    types = it.call().types
    wanted = [i for i in found if (it.kind, i) not in WITHOUT_GRADIENT]
    dys = [torch.from_numpy(grad.array)[0] for grad in grads]
    expected = _pulled(it.case.formula, it.tensors(), dys, wanted) if wanted else ()
    for i, want in zip(wanted, expected, strict=True):
        grad = found[i]
        assert grad
        assert_same(grad, want, types[i].dims, f"{it.kind}: the gradient of operand {i}")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.25)])
def test_the_parts_of_cross_entropy_are_its_whole(sizes: str, smoothing: float, z: float) -> None:
    """Value and gradient through the parts are those of the whole, though none goes through the
    peak.
    """
    rng = np.random.default_rng(0)
    logits, labels = (
        torch.from_numpy(random_operand(word, SIZES[sizes], rng)) for word in ("sbv", "#sb")
    )
    logits.requires_grad_(True)
    peak = logits.detach().amax(-1)
    parts = token_loss(*local_softmax_stats(logits, peak, labels, smoothing), labels, peak, z)
    whole = cross_entropy(logits, labels, smoothing, z)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (parts, whole)))


# ---- float64, which overflows


LARGE = 1e3
"""Times this, scores and logits are so far apart that the exponential of no difference but 0 is
above 0.
"""


@pytest.mark.parametrize("case", CASES["attention"])
def test_keys_that_are_not_seen_do_not_count_however_large_their_scores(case: Case) -> None:
    it = draw("attention", case, "one kv head")
    it.operands[0] *= LARGE
    (found,), (expected,) = MEANINGS["attention"].value(call := it.call()), it.defined()
    assert_same(found, expected, call.op.outputs[0].type.dims, "attention")


def test_a_row_of_softmax_that_sees_nothing_is_zero() -> None:
    x, seen = (
        Tensor(("seq", "key"), np.array([rows], float))
        for rows in ([[1, 9], [2, 3]], [[1, 0], [0, 0]])
    )
    assert Reals(0).softmax(x, seen).array.tolist() == [[[1, 0], [0, 0]]]


def test_padding_does_not_count_however_large_its_logits() -> None:
    program = frame({}, {"batch": 2, "vocab": 4})
    program = evolve(program, dims=(program.dims[0], evolve(program.dims[1], valid=3)))
    type, labels = Type("f64", ("batch", "vocab")), Type("i64", ("batch",))
    op = Op(
        "cross_entropy",
        ("x", "labels"),
        (Value("loss", Type("f64", ())),),
        (),
        span=program.region.span,
    )
    x, given = np.array([[1.0, 2, 3, LARGE], [3, 2, 1, LARGE]]), np.array([0, 2])
    args = [Tensor(type.dims, x[None]), Tensor(labels.dims, given[None])]
    (found,) = MEANINGS["cross_entropy"].value(
        Call(program, SimulatedMesh.of_program(program), Reals(0), op, args, [type, labels])
    )
    assert_same(
        found, cross_entropy(torch.from_numpy(x[:, :3]), torch.from_numpy(given)), (), "loss"
    )


# ---- draws, of which those of an iteration are no function that anything relies on


def test_every_iteration_draws_apart() -> None:
    """Of repeats in one another too; and nothing else is drawn so."""
    program = frame({}, {"layers": 3, "blocks": 2})
    found = [Tensor(("batch",), np.arange(4)[None])]
    for repeat in ("blocks", "layers"):
        type = Type("i64", (repeat, "batch"))
        op = Op(
            "fork",
            ("draws",),
            (Value("own", type),),
            (("repeat", repeat),),
            span=program.region.span,
        )
        last = found[-1] if repeat == "blocks" else found[-1].get_slice(1)
        (own,) = MEANINGS["fork"].value(
            Call(
                program,
                SimulatedMesh.of_program(program),
                Reals(0),
                op,
                [last],
                [type.inside(repeat)],
            )
        )
        assert own.array.shape == (1, program.size(repeat), 4)
        found.append(own)
    every = np.concatenate([each.array.ravel() for each in found])
    assert len(np.unique(every)) == len(every)


# ---- the update, which in the field is a function of everything that an optimizer is told


def changed(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizer with each of its settings changed."""
    values = {
        "kind": "sgd",
        "lr": 2e-3,
        "betas": (0.8, 0.95),
        "eps": 1e-7,
        "momentum": 0.5,
        "weight_decay": 0.2,
    }
    schedules = {"kind": "cosine", "warmup": 7, "floor": 1e-5}
    groups = [
        ParamGroup("norms", ("w*",), weight_decay=0.3),
        ParamGroup("norms", ("w*",), weight_decay=0.1, lr_scale=2.0),
    ]
    found = {name: evolve(optimizer, **{name: value}) for name, value in values.items()}
    found |= {
        f"schedule {n}": evolve(optimizer, schedule=evolve(Schedule(), **{n: v}))
        for n, v in schedules.items()
    }
    found |= {f"group {i}": evolve(optimizer, groups=(group,)) for i, group in enumerate(groups)}
    known = {"spans", "clip", "schedule", "groups", *values}  # clipping is an op of its own
    assert {field.name for field in fields(Optimizer)} == known
    assert {field.name for field in fields(Schedule)} == {"spans", *schedules}
    return found


def field_update(optimizer: Optimizer, name: str) -> np.ndarray[Any, Any]:
    """An update of the same numbers in the field."""
    program: Program = frame({}, {"vocab": 3})
    program = evolve(program, train=evolve(program.train, optimizer=optimizer))
    numbers = Field(2, 0)
    param, grad = (
        Tensor(("vocab",), numbers.random((3,), word), RANDOM) for word in ("param", "grad")
    )
    count = Tensor((), np.ones(1, int))
    return update_param(program, numbers, name, param, grad, numbers.ratio(1, 1), count).array


def test_updates_depend_on_every_setting_of_the_optimizer() -> None:
    optimizer = Optimizer(kind="adamw", lr=1e-3, weight_decay=0.1)
    plain = field_update(optimizer, "wq")
    assert (field_update(optimizer, "wq") == plain).all()
    for what, other in {**changed(optimizer), "name": optimizer}.items():
        assert (field_update(other, "norm" if what == "name" else "wq") != plain).all(), what
