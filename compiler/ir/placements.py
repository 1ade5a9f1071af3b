"""Placements and the coercions between them: one table, closed under duality.

Purpose: what each coercion does forward and backward, and which coercions lead from one type to
another.  Non-goals: deciding where coercions go (`passes.insert_collectives`).

The gradient of a value placed `a` is placed `dual(a)`, without exception; so the backward of `a →
b` is `dual(b) → dual(a)`.  The vocabulary comes from Meta's spmd_types and from
JAX's sharding-and-autodiff notes; f and g are Megatron-LM's (Shoeybi et al. 2019, figure 3).
"""

from collections.abc import Iterable
from itertools import permutations

from attrs import frozen

from ..syntax.source import Span
from . import INVARIANT, Kind, Op, Placement, Places, Program, Type, Value

I, R, S, P, M = Kind.INVARIANT, Kind.REPLICATED, Kind.SHARDED, Kind.PARTIAL, Kind.MAXIMUM  # noqa: E741

DUAL = {I: I, R: P, S: S, P: R}


@frozen
class Coercion:
    """The effect of a change of placement on the local tensors of a group of ranks.

    `collective` is what it communicates ("" for nothing); `function` is the runtime's name for the
    pair of it and its conjugate; `stage` orders several coercions of one value, since slicing early
    and gathering late moves least; `local` is what it does to the local tensor without
    communicating ("" for nothing).
    """

    collective: str
    function: str
    stage: int
    local: str = ""


COERCIONS = {
    (I, R): Coercion("", "replicate", 1),  # Megatron's f
    (P, I): Coercion("all_reduce", "all_reduce", 1),  # Megatron's g
    (S, R): Coercion("all_gather", "all_gather", 2),  # sequence into tensor parallelism
    (P, S): Coercion("reduce_scatter", "reduce_scatter", 0),  # tensor into sequence parallelism
    (S, S): Coercion("all_to_all", "all_to_all", 1),  # Ulysses, expert dispatch
    (S, I): Coercion("all_gather", "all_gather_invariant", 2),  # out of a sharded region
    (I, S): Coercion("", "shard", 0, "slice"),  # into a sharded region
    (R, S): Coercion("", "take_shard", 0, "slice"),  # masks and positions
    (S, P): Coercion("", "pad_shard", 1, "pad"),  # the conjugate of a slice
    (I, P): Coercion("", "once", 1, "zero but on rank 0"),  # a bias added once
    (R, I): Coercion("", "invariant", 1),  # the conjugate of adding once
    (R, P): Coercion("", "once_replicated", 1, "zero but on rank 0"),  # its own conjugate
    (M, R): Coercion("all_reduce", "all_reduce", 1),  # the maximum of logits
    (M, I): Coercion("all_reduce", "all_reduce", 1),  # the maximum of logits
}
"""Every coercion; P → R is not among them, since it shares its first half: P → I → R."""


def dual(place: Placement) -> Placement:
    """The placement of the gradient of a value placed so."""
    if place.kind is S:
        return place
    return Placement(DUAL[place.kind])


def dual_type(type: Type) -> Type:
    """The type of the gradient of a value of `type`."""
    return Type(type.dtype, type.dims, tuple((axis, dual(place)) for axis, place in type.places))


def conjugate(source: Placement, target: Placement) -> tuple[Placement, Placement]:
    """The coercion that is the backward of source → target."""
    return dual(target), dual(source)


def coercion(source: Placement, target: Placement) -> Coercion:
    """The table's entry for source → target."""
    return COERCIONS[source.kind, target.kind]


def coercion_of(op: Op) -> Coercion:
    """The table's entry for an op `coerce`."""
    return coercion(*ends(op))


def ends(op: Op) -> tuple[Placement, Placement]:
    """The placements that an op `coerce` starts from and leads to."""
    source, target = op.get("from"), op.get("to")
    assert isinstance(source, Placement), "coerce: `from` is no placement"
    assert isinstance(target, Placement), "coerce: `to` is no placement"
    return source, target


@frozen
class Step:
    """One coercion over the joint group of `axes`."""

    axes: tuple[str, ...]
    source: Placement
    target: Placement

    def type_after(self, type: Type, program: Program) -> Type:
        """The type after this step."""
        places = dict(type.places) | dict.fromkeys(self.axes, self.target)
        return Type(type.dtype, type.dims, program.places(places))

    def op(self, name: str, result: Value, span: Span) -> Op:
        """The op that does this step to the value `name`."""
        return Op(
            "coerce",
            (name,),
            (result,),
            (("axes", self.axes), ("from", self.source), ("to", self.target)),
            span=span,
        )


class OrderError(Exception):
    """A dim would be gathered or scattered over an axis that is not its innermost."""

    def __init__(self, dim: str, axes: tuple[str, ...], moved: tuple[str, ...]) -> None:
        super().__init__(dim, axes, moved)
        self.dim, self.axes, self.moved = dim, axes, moved


def path(program: Program, type: Type, want: Places) -> list[Step]:
    """The coercions from `type` to the placements `want`, in the order that moves least.

    One step may cover several axes.  Axes whose ranks hold two chunks each have steps of their own.

    Raises OrderError where a dim would be gathered or scattered over an axis that is not its
    innermost.
    """
    wanted = dict(want)
    order = [axis.name for axis in program.axes]
    # what several axes do alike is one coercion
    groups: dict[tuple[Placement, Placement, str], tuple[str, ...]] = {}
    for axis in order:
        for source, target in _hops(type.placement_on(axis), wanted.get(axis, INVARIANT)):
            apart = _apart(program, axis, source, target)
            groups[source, target, apart] = (*groups.get((source, target, apart), ()), axis)
    steps = [Step(axes, source, target) for (source, target, _), axes in groups.items()]
    summed = {axis for step in steps if step.source.kind is P for axis in step.axes}

    def rank(step: Step) -> tuple[int, int]:
        """By the table's stage.  Gathers come innermost first: only the innermost axis of a dim
        can be gathered.  An axis is summed before it is replicated: P → I → R.
        """
        stage = coercion(step.source, step.target).stage
        if stage == 2:
            return stage, -order.index(step.axes[-1])
        if (step.source.kind, step.target.kind) == (INVARIANT.kind, R):
            return stage, int(not summed.isdisjoint(step.axes))
        return stage, 0

    steps.sort(key=rank)
    wrong: OrderError | None = None
    for ordered in permutations(steps):
        try:
            _check_order(ordered, type, program)
        except OrderError as error:
            wrong = wrong or error
        else:
            return [*ordered]
    raise wrong or AssertionError("placements: no order of no steps")


def _apart(program: Program, axis: str, *places: Placement) -> str:
    """A key that keeps this axis out of steps over others.

    It is the axis itself where its ranks hold chunks, `inner` where the axis lies inside others,
    and "" else.
    """
    dim_axes = {(place.dim, axis) for place in places if place.dim}
    if dim_axes & program.zigzags:
        return axis
    if dim_axes & program.inner:
        return "inner"
    return ""


def _check_order(steps: Iterable[Step], before: Type, program: Program) -> None:
    """Raises OrderError where a step is not over the innermost axes of its dim."""
    for step in steps:
        after = step.type_after(before, program)
        for place, type in ((step.source, before), (step.target, after)):
            axes = step.axes
            if place.kind is S:
                axes = type.axes_of(place.dim)
            if axes[-len(step.axes) :] != step.axes:
                raise OrderError(place.dim, axes, step.axes)
        before = after


def _hops(source: Placement, target: Placement) -> list[tuple[Placement, Placement]]:
    if source == target:
        return []
    if (source.kind, target.kind) == (P, R):
        return [(source, INVARIANT), (INVARIANT, target)]
    return [(source, target)]
