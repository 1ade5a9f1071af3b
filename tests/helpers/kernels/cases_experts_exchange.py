"""The order in which rows of other ranks come to lie by expert, against a list of them, and
rows that are moved so.
"""

from collections.abc import Iterable
from functools import partial
from itertools import cycle, product
from typing import Any, Self

import torch
from torch import Tensor

from helpers.kernels.cases import PRECISIONS, check_against, randn
from helpers.kernels.programs import evenly_routed
from scalec.runtime import Experts, Mesh, sort_by_expert
from scalec.runtime.comm.experts import ExpertRows
from scalec.runtime.comm.mesh import Axis
from scalec.runtime.kernels import Exchange, ExchangeBack, ExchangeCounts, Tile

SIZES = [(2, 2, 1), (3, 4, 9), (4, 2, 40), (2, 64, 300), (5, 3, 0)]
"""Ranks, experts of each, tokens."""

WIDTHS = (1, 40, 127)

TILES = (
    Tile(rows=1, warps=4),
    Tile(rows=4, warps=4, columns=16),
    Tile(rows=128, warps=4, columns=64),
)
CHUNK = Tile(rows=16, warps=4)


class Mirror:
    """In the place of a group: each rank sends what this one does, which gets its own back."""

    def alltoall_base(self, out: Tensor, x: Tensor, *_: Any) -> Self:
        out.copy_(x)
        return self

    def wait(self) -> None: ...


def _experts(ranks: int, each: int, device: str) -> Experts:
    experts = Experts(Mesh({}, device), ranks * each)
    experts.axis, experts.experts_per_rank = Axis("ep", ranks, 0, Mirror()), each  # pyright: ignore[reportArgumentType]
    return experts


def _held(
    ranks: int, each: int, tokens: int, device: str, least: int = 0
) -> tuple[ExpertRows, list[int]]:
    """The result of `ExchangeCounts` of random choices of experts from `least` on, and the row that
    lies at each place.

    Rows come by rank and expert.
    """
    count = ranks * each
    ids = torch.randint(least, count, (tokens, 1), generator=torch.Generator().manual_seed(tokens))
    held = ExchangeCounts({count: CHUNK})(
        sort_by_expert(ids.to(device), _experts(ranks, each, device))
    )
    came = [divmod(expert, each) for expert in sorted(ids.flatten().tolist())]
    sizes = [sum(own == expert for _, own in came) for expert in range(each)]
    assert held.counts.tolist() == held.sizes == sizes
    return held, sorted(range(tokens), key=lambda row: (came[row][1], came[row][0], row))


def case_places(device: str) -> None:
    """Experts and ranks may have no rows, and where all rows are of one expert."""
    for (ranks, each, tokens), share in product(SIZES, (0, 0.5, 1)):
        held, rows = _held(
            ranks, each, tokens, device, min(int(share * ranks * each), ranks * each - 1)
        )
        assert held.arranged is not None
        assert held.returned is not None
        assert held.arranged.tolist() == rows
        assert [rows[at] for at in held.returned.tolist()] == [*range(tokens)]


def case_rows(device: str) -> None:
    """Each size with one width."""
    _check_rows(device, zip(SIZES, cycle(WIDTHS), strict=False))


def case_all_rows(device: str) -> None:
    _check_rows(device, product(SIZES, WIDTHS))


def _check_rows(device: str, cases: Iterable[tuple[tuple[int, int, int], int]]) -> None:
    """There and back."""
    for number, ((ranks, each, tokens), width) in enumerate(cases):
        rows_per_expert, rows = _held(ranks, each, tokens, device)
        moved = torch.eye(tokens, dtype=torch.float64)[rows].view(tokens, tokens)
        tiles = {width: TILES[number % 3]}
        for precision in PRECISIONS[device]:
            x = randn(tokens, width, precision=precision, device=device)
            check_against(
                partial(Exchange(tiles), expert_rows=rows_per_expert),
                partial(torch.matmul, moved),
                [x],
                precision,
            )
            check_against(
                partial(ExchangeBack(tiles), expert_rows=rows_per_expert),
                partial(torch.matmul, moved.mT),
                [x],
                precision,
            )


def examples(device: str, dtype: torch.dtype) -> None:
    """Qwen3-30B-A3B's rows on 8 ranks, and DeepSeek-V3's."""
    for count, width in ((128, 2048), (256, 7168)):
        with evenly_routed():
            ids = torch.empty(512, 8, dtype=torch.int64, device=device)
            held = ExchangeCounts({count: CHUNK})(
                sort_by_expert(ids, _experts(8, count // 8, device))
            )
        tiles = {width: Tile(rows=1, warps=4, columns=1024)}
        rows = torch.empty(held.total, width, device=device, dtype=dtype, requires_grad=True)
        out = ExchangeBack(tiles)(Exchange(tiles)(rows, held), held)
        out.backward(torch.empty_like(out))
