"""`.venv/bin/python benchmarks/experts.py`: a layer of experts beside one with a hand-written
all-to-all.

Forward and backward of routed SwiGLU experts on 2 gloo ranks, each token with two of eight: choice,
order, exchange of counts and rows, products, the way back and the sum by gates.  Beside it the same
layer as one writes it in torch alone: `topk`, `argsort`, `bincount`, `all_to_all_single_autograd`
of torch, a product for each expert, and `index_add`.

Non-goals: kernels, which need a GPU (`gpu_experts.py`); what is hidden beside a shared expert
(`exchanges.py`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from measure import asked_quick, where
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import linear, silu
from two_ranks import RANKS, Comparison, Step, compare

from scalec.runtime import (
    Experts,
    Mesh,
    combine,
    dispatch,
    exchange,
    exchange_back,
    exchange_counts,
    grouped_linear,
    sort_by_expert,
    top_k,
)

EXPERTS, CHOICES = 8, 2
HELD = EXPERTS // RANKS
SIZES = {"small": (64, 64, 64), "larger": (1024, 256, 512)}
"""Tokens of a rank, hidden and inner size: of the first little but the host's work shows."""
PORT = 29473
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""The result for tokens [tokens, hidden], the router's weight, and the rank's experts' weights
[experts, out, in].
"""


def main() -> None:
    quick = asked_quick(__doc__)
    print(f"{where()}, {RANKS} gloo ranks, one thread each")
    comparisons = [
        Comparison(
            f"{tokens:,} tokens of a rank, hidden {hidden}, {EXPERTS} experts of {inner},"
            f" {CHOICES} for each token",
            partial(_layers, tokens, hidden, inner),
            "torch, by hand",
        )
        for tokens, hidden, inner in SIZES.values()
    ]
    compare(comparisons, 2 if quick else 20, PORT)


def _layers(tokens: int, hidden: int, inner: int, rank: int) -> Mapping[str, Step]:
    experts = Experts(Mesh({"ep": RANKS}), EXPERTS, "ep", tokens=("ep",))
    ways: dict[str, Layer] = {"ours": partial(_ours, experts), "torch, by hand": _by_hand}
    x = torch.randn(tokens, hidden)
    # all ranks' own
    router = torch.randn(EXPERTS, hidden, generator=torch.Generator().manual_seed(7)) * hidden**-0.5
    gate, up = (torch.randn(HELD, inner, hidden) * hidden**-0.5 for _ in range(2))
    down = torch.randn(HELD, hidden, inner) * inner**-0.5
    operands, gradient = [x, router, gate, up, down], torch.randn(tokens, hidden)
    return {name: partial(_step, way, operands, gradient) for name, way in ways.items()}


def _step(way: Layer, operands: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    """The result and the gradients of the operands."""
    x, router, gate, up, down = (each.detach().requires_grad_() for each in operands)
    out = way(x, router, gate, up, down)
    gradients = torch.autograd.grad(out, (x, router, gate, up, down), gradient)
    return out.detach(), *gradients


def _ours(
    experts: Experts, x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """The layer as programs have it."""
    gates, ids = top_k(linear(x, router), CHOICES)
    order = sort_by_expert(ids, experts)
    held = exchange_counts(order)
    rows = exchange(dispatch(x, order), held)
    inner = silu(grouped_linear(rows, gate, held)) * grouped_linear(rows, up, held)
    return combine(exchange_back(grouped_linear(inner, down, held), held), gates, order)


def _by_hand(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gates, ids = linear(x, router).softmax(-1).topk(CHOICES)
    order = ids.flatten().argsort(stable=True)
    tokens = order // CHOICES
    counts = ids.flatten().bincount(minlength=EXPERTS)
    came = torch.empty_like(counts)
    dist.all_to_all_single(came, counts)
    sent, received = (_lists(each) for each in (counts, came))
    splits, splits_back = [sum(each) for each in sent], [sum(each) for each in received]
    rows = _exchanged(x[tokens], splits_back, splits)
    by_expert = _by_expert(rows, received)
    made = [
        _expert(part, *weights) for part, *weights in zip(by_expert, gate, up, down, strict=True)
    ]
    rows = _exchanged(_by_source(made, received), splits, splits_back)
    return torch.zeros_like(x).index_add(0, tokens, rows * gates.flatten()[order].unsqueeze(1))


def _expert(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(silu(linear(rows, gate)) * linear(rows, up), down)


def _lists(counts: Tensor) -> list[list[int]]:
    """By rank, and by its experts; the host waits for it."""
    return cast(Any, counts.view(RANKS, HELD)).tolist()


def _by_expert(rows: Tensor, received: list[list[int]]) -> list[Tensor]:
    """The rows of each expert, of those that lie by source."""
    parts = rows.split([size for sizes in received for size in sizes])
    return [torch.cat(parts[expert::HELD]) for expert in range(HELD)]


def _by_source(made: list[Tensor], received: list[list[int]]) -> Tensor:
    """The inverse."""
    of_experts = [
        own.split([sizes[expert] for sizes in received]) for expert, own in enumerate(made)
    ]
    return torch.cat([parts[source] for source in range(RANKS) for parts in of_experts])


def _exchanged(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    group: Any = dist.group.WORLD
    return all_to_all_single_autograd(rows, received, sent, group)


if __name__ == "__main__":
    main()
