"""Buckets that ranks share out: whole rows, every element on one rank, and the update that an
unshared bucket makes.
"""

from functools import partial
from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.forked_ranks import run_ranks
from scalec.runtime import (
    AdamW,
    Bucket,
    Mesh,
    ParamGroup,
    TrainState,
    all_gather_,
    normal,
    reduce_scatter_,
    weight,
)
from scalec.runtime.state.layout import Piece
from scalec.runtime.state.shards import Extent, fault

SHAPES = ((6, 4), (3,), (5, 2, 3), (1, 7), (2, 2))


class _Model(nn.Module):
    def __init__(self, mesh: Mesh, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            setattr(self, f"w{i}", weight(mesh, *shape, init=normal(0.5)))


def _state(
    mesh: Mesh,
    shapes: tuple[tuple[int, ...], ...],
    shared: bool,
    dtype: torch.dtype = torch.float64,
) -> TrainState:
    model = _Model(mesh, shapes)
    names = [f"w{i}" for i in range(len(shapes))]
    groups = (
        ParamGroup(*names[::2], weight_decay=0.1),
        *([ParamGroup(*names[1::2], lr_scale=0.5)] if names[1:] else []),
    )
    bucket = Bucket(*groups, shard_axes=("dp",) if shared else ())
    state = TrainState(model, mesh, {"all": bucket}, AdamW(), dtype, torch.float64)
    state.initialise(seed=1)
    return state


class _Seen(Mesh):
    """A mesh as one of its ranks sees it, without the others."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._seen = {"dp": rank}
        super().__init__({"dp": ranks})

    def _place(self) -> dict[str, int]:
        return self._seen

    def _made(self, key: tuple[str, ...]) -> None: ...


@given(
    st.lists(
        st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
    ).map(tuple),
    st.integers(2, 7),
)
def test_ranks_hold_whole_rows_and_each_element_once(
    shapes: tuple[tuple[int, ...], ...], ranks: int
) -> None:
    boxes = [list(_state(_Seen(ranks, rank), shapes, shared=True).boxes()) for rank in range(ranks)]
    for i, shape in enumerate(shapes):
        held = [box for rank in boxes for box in rank if box.key == f"w{i}"]
        assert all(box.is_own for box in held)
        assert not fault(shape, [Extent(box.offset, tuple(box.tensor.shape)) for box in held])
        assert all(a.offset[0] + a.tensor.shape[0] == b.offset[0] for a, b in pairwise(held))


def test_parts_that_are_gathered_are_the_parameters_of_an_unshared_bucket() -> None:
    for rank in run_ranks(3, partial(_gathered, torch.float64)):
        assert all(torch.equal(a, b) for a, b in rank)


def test_working_copies_are_those_of_an_unshared_bucket() -> None:
    for rank in run_ranks(2, partial(_gathered, torch.bfloat16)):
        assert all(torch.equal(a, b) for a, b in rank)


def _gathered(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Three updates by gradients that differ between ranks, shared out and not: pairs that
    should be the same.
    """
    size = torch.distributed.get_world_size()
    mesh = Mesh({"dp": size})
    axis = mesh.axis("dp")
    shared, plain = _state(mesh, SHAPES, True, dtype), _state(mesh, SHAPES, False, dtype)
    pairs: list[tuple[Tensor, Tensor]] = []
    for step in range(3):
        values = [_gradient(shape, step, rank) for shape in SHAPES for rank in range(size)]
        for state in (shared, plain):
            for i, view in enumerate(_views(state)):
                view.copy_(
                    values[i * size + axis.rank]
                    if state is shared
                    else torch.stack(values[i * size : (i + 1) * size]).sum(0)
                )
        flat = shared.gradients()
        flat["all"] = reduce_scatter_(flat["all"], axis)
        for state in (shared, plain):
            state.update(
                0.1, skip=torch.tensor(step == 1), scale=torch.tensor(0.5, dtype=torch.float64)
            )
        all_gather_(shared.weights()["all"], axis)
        pairs += zip(_parameters(shared), _parameters(plain), strict=True)
    return pairs


def _gradient(shape: tuple[int, ...], step: int, rank: int) -> Tensor:
    """Whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + prod(shape))
    return torch.randint(-5, 6, shape, generator=generator).double()


def _views(state: TrainState) -> list[Tensor]:
    """The gradients of all parameters, by name."""
    (gradient,) = state.gradients().values()
    return [piece.view(gradient) for piece in _pieces(state)]


def _parameters(state: TrainState) -> list[Tensor]:
    (flat,) = state._flats()
    return [piece.view(flat.buffers.unsharded).clone() for piece in _pieces(state)]


def _pieces(state: TrainState) -> list[Piece]:
    (flat,) = state._flats()
    return sorted(flat.layout.pieces, key=lambda piece: piece.name)
