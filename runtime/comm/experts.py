"""Where the experts of a mixture lie, and the rows that their tokens make: which rows, their order,
and the rank that each goes to.

A row is a token with one of the experts that it chose.  A rank orders its rows by the peer that
holds their expert, then by expert, then by token; an exchange takes them to their peers, where they
lie by expert, source rank and token.  Padded rows are [experts, rows, …]: each expert has as many,
which are zero after the rows that tokens make.  They are exchanged like any tensor: the host need
not know how many rows tokens made.

Order and counts are decisions: a call that backward recomputes gets the order and counts of its
first run (`decide_once`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..autograd.recompute import decide_once
from . import c10d
from .mesh import Axis, Mesh


class Experts:
    """`count` experts in equal contiguous blocks over the named mesh axes, the first outermost;
    without axes all here.

    Over the axes in `tokens`, tokens are sharded too: their ranks, as one `axis`, exchange rows.
    Over the other axes all ranks have the same tokens, and each makes the rows of its own experts
    alone.

    held: how many experts a rank has.  groups: how many experts this rank makes rows of, `held` for
    each peer.  slots: [count + 1], the number of each expert's group, by peer and then by expert;
    `groups` for an expert that this rank makes no rows of and, at the end, for id −1.  copies: in a
    sanitized run the ranks with the same tokens.
    """

    __slots__ = ("axis", "copies", "count", "experts_per_rank", "groups", "slots")

    def __init__(self, mesh: Mesh, count: int, *axes: str, tokens: Collection[str] = ()) -> None:
        assert set(tokens) <= set(axes), (
            f"experts: tokens over {tokens} are not exchanged over {axes}"
        )
        assert not count % mesh.size(*axes), f"experts: {count} cannot be split over {axes}"
        self.count, self.experts_per_rank = count, count // mesh.size(*axes)
        self.axis = mesh.axis(*tokens)
        self.copies: Axis | None = None
        if mesh.watch is not None:
            self.copies = mesh.axis(*(name for name in axes if name not in tokens))
        self.groups = self.axis.size * self.experts_per_rank
        slots = torch.full((count + 1,), self.groups)
        for peer, first in enumerate(_first_of_peers(mesh, self.experts_per_rank, axes, tokens)):
            slots[first : first + self.experts_per_rank] = torch.arange(
                peer * self.experts_per_rank, (peer + 1) * self.experts_per_rank
            )
        self.slots = slots.to(mesh.device)


def _first_of_peers(
    mesh: Mesh, experts_per_rank: int, axes: Sequence[str], tokens: Collection[str]
) -> list[int]:
    """The first expert of each rank of the axis of `tokens`, in its order."""
    along = [name for name in mesh.axes if name in tokens]
    first: list[int] = []
    sizes = [mesh.size(name) for name in along]
    for place in product(*map(range, sizes)):
        coordinate, index = dict(zip(along, place, strict=True)), 0
        for name in axes:
            index = index * mesh.size(name) + coordinate.get(name, mesh.rank(name))
        first.append(index * experts_per_rank)
    return first


class Groups:
    """Rows of a matrix in groups, one after another.

    counts: int64 [groups], how many rows each has.  sizes: the same on the host, which waits for
    them once.  left: in backward, calls that make gradients of weights, for the exchange that
    begins next; None where they are made at once.
    """

    counts: Tensor
    put_off_gradients: list[Callable[[], None]] | None = None

    @cached_property
    def sizes(self) -> list[int]:
        return cast(Any, self.counts).tolist()

    @cached_property
    def total(self) -> int:
        """How many rows there are."""
        return sum(self.sizes)

    @cached_property
    def ends(self) -> Tensor:
        """Where each group ends, int32 [groups], as `grouped_mm` takes it."""
        return self.counts.cumsum(0, dtype=torch.int32)


@dataclass(eq=False)
class Order(Groups):
    """The rows of this rank's tokens, by group of `experts`; `padded`, if not 0, is how many rows
    each group has.

    choices: int64 [tokens · k], for each row the choice that made it, numbered token · k + which;
    after the first `total` come choices that make no row.  rows: int64 [tokens, k], for each choice
    its row, −1 where it makes none.  Where rows are padded, choices are [groups · padded], −1 for
    rows that no choice makes.
    """

    experts: Experts
    counts: Tensor
    choices: Tensor
    rows: Tensor
    padded: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims of rows before their features."""
        if self.padded:
            return self.experts.groups, self.padded
        return (self.total,)


@dataclass(eq=False)
class ExpertRows(Groups):
    """The rows of this rank's experts, by expert, then source rank, then token.

    sent, received: how many rows go to each peer, and come from each.  arranged: int64 [total], for
    each row its place among the rows as they came, by source rank first; returned: the inverse.
    Both are None where the two orders are the same.
    """

    axis: Axis
    counts: Tensor
    sent: list[int]
    received: list[int]
    arranged: Tensor | None
    returned: Tensor | None


Sorted = tuple[Tensor, Tensor, Tensor]
"""The counts, choices and rows of an order; rows are flat."""


def sort_choices(ids: Tensor, slots: Tensor, groups: int) -> Sorted:
    """The order of choices ids, int64 [n], by their group `slots[ids]`; choices of one group
    keep their order.
    """
    choice_groups = slots[ids]
    ordered, choices = choice_groups.sort(stable=True)
    numbers = torch.arange(max(len(ids), groups), device=ids.device)
    ends = torch.searchsorted(ordered, numbers[:groups], right=True)
    rows = torch.empty_like(choices).scatter_(0, choices, numbers[: len(ids)])
    return (
        ends.diff(prepend=ends.new_zeros(1)),
        choices,
        rows.masked_fill_(choice_groups == groups, -1),
    )


def sort_by_expert(
    ids: Tensor,
    experts: Experts,
    padded: int = 0,
    backend: Callable[[Tensor, Tensor, int], Sorted] = sort_choices,
) -> Order:
    """The order of the rows of tokens that chose `ids`, int64 [..., k]; an id of −1 makes no row.
    Not for graphs.

    With `padded` there are as many rows of each expert; no more tokens may have chosen it.
    """
    assert not is_compiling(), (
        "sort_by_expert: how many rows an expert gets is not known to a graph"
    )
    return decide_once(lambda: _order(ids.detach(), experts, padded, backend))


def _order(
    ids: Tensor, experts: Experts, padded: int, backend: Callable[[Tensor, Tensor, int], Sorted]
) -> Order:
    if experts.copies is not None:
        experts.copies.show_to_watch(ids, "operand")
    counts, choices, rows = backend(ids.flatten(), experts.slots, experts.groups)
    if padded:
        # seen in a sanitized run, where the host may wait
        fits = experts.copies is None or int(counts.max()) <= padded
        assert fits, f"sort_by_expert: more than {padded} rows of an expert"
        choices, rows = _pad_groups(counts, choices, rows, experts.slots[ids.flatten()], padded)
    return Order(experts, counts, choices, rows.view(-1, ids.shape[-1]), padded)


def _pad_groups(
    counts: Tensor, choices: Tensor, rows: Tensor, groups: Tensor, padded: int
) -> tuple[Tensor, Tensor]:
    """Choices and rows, flat, where each group begins at a multiple of `padded`; `groups` has the
    group of each choice.
    """
    starts, places = counts.cumsum(0) - counts, torch.arange(padded, device=counts.device)
    moved = torch.arange(len(counts), device=counts.device) * padded - starts
    source = (starts.unsqueeze(1) + places).clamp(max=len(choices) - 1)
    padded_choices = choices[source].masked_fill(places >= counts.unsqueeze(1), -1)
    return padded_choices.flatten(), (rows + moved[groups.clamp(max=len(counts) - 1)]).where(
        rows >= 0, -1
    )


Places = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""`arranged` and `returned` of `Held`, of counts [ranks, experts] with this sum."""


def places(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`Places` in plain torch."""
    by_expert = counts.mT.contiguous()
    there = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    here = (by_expert.flatten().cumsum(0) - by_expert.flatten()).view_as(by_expert)
    numbers = torch.arange(total, device=counts.device)

    def moved(by: Tensor, sizes: Tensor) -> Tensor:
        return numbers + by.flatten().repeat_interleave(sizes.flatten(), output_size=total)

    return moved(there.mT - here, by_expert), moved(here.mT - there, counts)


def exchange_counts(order: Order, backend: Places = places) -> ExpertRows:
    """How many rows come from each rank for each expert: an all-to-all of counts, for which the
    host waits.
    """
    return decide_once(lambda: _exchange_counts(order, backend))


def _exchange_counts(order: Order, backend: Places) -> ExpertRows:
    axis, experts_per_rank = order.experts.axis, order.experts.experts_per_rank
    if axis.size == 1:
        alone = ExpertRows(axis, order.counts, [], [], None, None)
        alone.sizes = order.sizes
        return alone
    came = torch.empty_like(order.counts)
    c10d.all_to_all(came, order.counts, axis.group)
    order.sizes, arrived = cast(Any, torch.stack([order.counts, came])).tolist()
    sent, received = _by_peer(order.sizes, experts_per_rank), _by_peer(arrived, experts_per_rank)
    by_source = came.view(-1, experts_per_rank)
    arranged, returned = None, None  # with one expert, rows by source are rows by expert
    if experts_per_rank > 1:
        arranged, returned = backend(by_source, sum(received))
    result = ExpertRows(axis, by_source.sum(0), sent, received, arranged, returned)
    result.sizes = [sum(arrived[expert::experts_per_rank]) for expert in range(experts_per_rank)]
    return result


def _by_peer(sizes: Sequence[int], experts_per_rank: int) -> list[int]:
    return [
        sum(sizes[first : first + experts_per_rank])
        for first in range(0, len(sizes), experts_per_rank)
    ]
