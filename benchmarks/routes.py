"""`.venv/bin/python benchmarks/routes.py`: host time of a route's bookkeeping: what goes where, and
how much of it.

One rank of eight with tokens so few that only the host's work shows, and a group that hands back
what it is given.  The order of rows and the exchange of counts are made once a route, and once more
by no recomputation; beside them is what a route does besides, forward, without its products:
choice, dispatch, two exchanges, combine.

All is called as programs call it, with the kernels' classes, which are plain torch on the CPU; and
as on a GPU, but for the launches themselves: three of bookkeeping, and five of the rest.

Bar: at most 250 µs of bookkeeping.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import process_time
from typing import Any, Self
from unittest.mock import patch

import torch
from gpu import tiles
from measure import asked_quick, in_turns, table, where
from torch import Tensor

from scalec.runtime import Experts, Mesh, kernels
from scalec.runtime.comm.experts import ExpertRows, Order
from scalec.runtime.comm.mesh import Axis
from scalec.runtime.kernels import launching

RANKS, EXPERTS, K, TOKENS, HIDDEN, REPEATS = 8, 128, 8, 16, 64, 20


def _made(name: str, size: int) -> Any:
    """The function that a program makes of a kernel."""
    return getattr(kernels, name)(tiles(kernels, name, size))


top_k, sort_by_expert, exchange_counts = (
    _made(name, EXPERTS) for name in ("TopK", "SortByExpert", "ExchangeCounts")
)
dispatch, combine = _made("Dispatch", HIDDEN), _made("Combine", HIDDEN)
exchange, exchange_back = _made("Exchange", HIDDEN), _made("ExchangeBack", HIDDEN)


class Mirror:
    """In the place of a group: every rank does what this one does."""

    def alltoall_base(self, out: Tensor, x: Tensor, *_: list[int]) -> Self:
        out.copy_(x[: len(out)])
        return self

    def wait(self) -> None: ...


def main() -> None:
    quick = asked_quick(__doc__)
    torch.set_num_threads(1)
    parts = {
        "bookkeeping": _timed(_bookkeeping),
        "all but products": _timed(_route),
        "bookkeeping of kernels, but for their launches": _unlaunched(
            _timed(_bookkeeping, tokens=0)
        ),
        "all but products, of kernels, but for their launches": _unlaunched(
            _timed(_route, tokens=0)
        ),
    }
    found = in_turns(parts, 3 if quick else 60)
    print(f"{where()}, one thread")
    rows = [(name, f"{median(times) * 1e6:.0f} µs") for name, times in found.items()]
    table("Host time of a route, forward", ("part", "time"), rows)


def _experts() -> Experts:
    experts = Experts(Mesh({}), EXPERTS)
    experts.axis, experts.experts_per_rank = Axis("ep", RANKS, 0, Mirror()), EXPERTS // RANKS
    return experts


def _timed(
    part: Callable[[Tensor, Tensor, Tensor, Experts], object], tokens: int = TOKENS
) -> Callable[[], float]:
    x, logits, experts = torch.randn(tokens, HIDDEN), torch.randn(tokens, EXPERTS), _experts()
    ids = logits.argsort()[:, :K]

    def run() -> float:
        begun = process_time()
        for _ in range(REPEATS):
            part(x, logits, ids, experts)
        return (process_time() - begun) / REPEATS

    return run


def _unlaunched(run: Callable[[], float]) -> Callable[[], float]:
    """All that the host does for kernels, which are not started; there are no tokens, since
    nothing is computed.
    """

    def without() -> float:
        with _no_launches():
            return run()

    return without


@contextmanager
def _no_launches() -> Iterator[None]:
    with (
        patch.object(launching, "INTERPRETED", True),
        patch.object(launching, "launch", lambda *_, **__: None),
    ):
        yield


def _bookkeeping(_: Tensor, __: Tensor, ids: Tensor, experts: Experts) -> tuple[Order, ExpertRows]:
    order = sort_by_expert(ids, experts)
    return order, exchange_counts(order)


def _route(x: Tensor, logits: Tensor, _: Tensor, experts: Experts) -> Tensor:
    gates, ids = top_k(logits, K)
    order, held = _bookkeeping(x, logits, ids, experts)
    rows = exchange(dispatch(x, order), held)
    return combine(exchange_back(rows, held), gates, order)


if __name__ == "__main__":
    main()
