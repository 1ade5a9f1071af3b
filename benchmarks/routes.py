"""`.venv/bin/python benchmarks/routes.py`: host time of a route's bookkeeping: what goes where, and how much of it.

One rank of eight with tokens so few that only the host's work shows, and a group that hands back what it is given.
The order of rows and the exchange of counts are made once a route, and once more by no recomputation; beside them is
what a route does besides, forward, without its products: choice, dispatch, two exchanges, combine.

Bar: at most 250 µs of bookkeeping.
"""

from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Self

import torch
from measure import asked_quick, in_turns, table, where
from torch import Tensor

from scalec.runtime import (
    Experts,
    Mesh,
    combine,
    dispatch,
    exchange,
    exchange_back,
    exchange_counts,
    sort_by_expert,
    top_k,
)
from scalec.runtime.comm.experts import Held, Order
from scalec.runtime.comm.mesh import Axis

RANKS, EXPERTS, K, TOKENS, REPEATS = 8, 128, 8, 16, 20


class Mirror:
    """In the place of a group: every rank does what this one does."""

    def alltoall_base(self, out: Tensor, x: Tensor, *_: list[int]) -> Self:
        out.copy_(x[: len(out)])
        return self

    def wait(self) -> None: ...


def main() -> None:
    quick = asked_quick(__doc__)
    torch.set_num_threads(1)
    parts = {"bookkeeping": _bookkeeping, "all but products": _route}
    found = in_turns({name: _timed(part, _experts()) for name, part in parts.items()}, 3 if quick else 60)
    print(f"{where()}, one thread")
    rows = [(name, f"{median(times) * 1e6:.0f} µs") for name, times in found.items()]
    table("Host time of a route, forward", ("part", "time"), rows)


def _experts() -> Experts:
    experts = Experts(Mesh({}), EXPERTS)
    experts.axis, experts.held = Axis("ep", RANKS, 0, Mirror()), EXPERTS // RANKS
    return experts


def _timed(part: Callable[[Tensor, Tensor, Experts], object], experts: Experts) -> Callable[[], float]:
    logits = torch.randn(TOKENS, EXPERTS)
    ids = logits.argsort()[:, :K]

    def run() -> float:
        begun = process_time()
        for _ in range(REPEATS):
            part(logits, ids, experts)
        return (process_time() - begun) / REPEATS

    return run


def _bookkeeping(_: Tensor, ids: Tensor, experts: Experts) -> tuple[Order, Held]:
    order = sort_by_expert(ids, experts)
    return order, exchange_counts(order)


def _route(logits: Tensor, _: Tensor, experts: Experts) -> Tensor:
    gates, ids = top_k(logits, K)
    order, held = _bookkeeping(logits, ids, experts)
    rows = exchange(dispatch(logits, order), held)
    return combine(exchange_back(rows, held), gates, order)


if __name__ == "__main__":
    main()
