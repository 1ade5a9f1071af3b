"""The table of coercions: closed under duality, and what `path` makes of it.

Non-goals: what each coercion does, and that its conjugate is its adjoint
(`proof/test_simulated_mesh.py`); the runtime's collectives (`runtime/comm`).
"""

from collections.abc import Sequence
from itertools import permutations

import pytest
from attrs import field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.empty_programs import frame, placements
from helpers.field_values import TRIALS, drawn, is_spread, spread
from scalec.compiler.ir import (
    INVARIANT,
    MAXIMUM,
    PARTIAL,
    REPLICATED,
    Kind,
    Placement,
    Program,
    Type,
    sharded,
)
from scalec.compiler.ir.placements import (
    COERCIONS,
    DUAL,
    OrderError,
    Step,
    coercion,
    conjugate,
    dual,
    path,
)
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.simulated_mesh import SimulatedMesh

EXAMPLES = {
    Kind.INVARIANT: INVARIANT,
    Kind.REPLICATED: REPLICATED,
    Kind.PARTIAL: PARTIAL,
    Kind.MAXIMUM: MAXIMUM,
}
ENTRIES = [
    (EXAMPLES.get(a, sharded("d")), EXAMPLES.get(b, sharded("e" if a is b else "d")))
    for a, b in COERCIONS
]
WITH_GRADIENT = [(a, b) for a, b in ENTRIES if a != MAXIMUM]


def ids(entry: tuple[Placement, Placement]) -> str:
    return "→".join(map(str, entry))


# ---- duality


def test_dual_is_an_involution() -> None:
    assert all(DUAL[DUAL[kind]] is kind for kind in DUAL)
    assert set(DUAL) == set(Kind) - {Kind.MAXIMUM}


@pytest.mark.parametrize("entry", WITH_GRADIENT, ids=ids)
def test_conjugates_are_entries(entry: tuple[Placement, Placement]) -> None:
    back = conjugate(*entry)
    assert (back[0].kind, back[1].kind) in COERCIONS
    assert conjugate(*back) == entry


@pytest.mark.parametrize("entry", WITH_GRADIENT, ids=ids)
def test_conjugates_of_communication(entry: tuple[Placement, Placement]) -> None:
    """An all-reduce goes with nothing, a gather with a scatter or a slice, an exchange with an
    exchange.
    """
    pair = {COERCIONS[a.kind, b.kind].collective for a, b in (entry, conjugate(*entry))}
    assert pair in (
        {""},
        {"all_reduce", ""},
        {"all_gather", "reduce_scatter"},
        {"all_gather", ""},
        {"all_to_all"},
    )


def test_all_changes_are_entries_but_one() -> None:
    """Any placement can become any other; P → R starts as P → I does, and a maximum is only
    ever reduced.
    """
    kinds = [Kind.INVARIANT, Kind.REPLICATED, Kind.SHARDED, Kind.PARTIAL]
    changes = {(a, b) for a in kinds for b in kinds if a is not b} | {(Kind.SHARDED, Kind.SHARDED)}
    maxima = {(Kind.MAXIMUM, Kind.REPLICATED), (Kind.MAXIMUM, Kind.INVARIANT)}
    assert set(COERCIONS) == changes - {(Kind.PARTIAL, Kind.REPLICATED)} | maxima


# ---- path


@frozen
class Pair:
    """A mesh of one to three axes, and two ways to place a value on it."""

    program: Program = field(repr=False)
    source: Type
    target: Type


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Any pair."""
    axes = {"a": 2, "b": 3, "c": 2}
    program = frame(dict(list(axes.items())[: draw(st.integers(1, 3))]), {"d": 12, "e": 24})
    return Pair(program, *(draw(placements(program, ("d", "e"))) for _ in range(2)))


def applied(pair: Pair) -> list[tuple[Step, Type, Type]]:
    """The steps of the path, each with the types around it; none if there is no path."""
    steps: list[tuple[Step, Type, Type]] = []
    source = pair.source
    try:
        found = path(pair.program, pair.source, pair.target.places)
    except OrderError:
        return []
    for step in found:
        after = step.type_after(source, pair.program)
        steps.append((step, source, after))
        source = after
    return steps


def test_an_axis_is_summed_before_it_is_replicated() -> None:
    """Also where the axis before it is replicated alone, and both are replicated in one step."""
    program = frame({"a": 2, "b": 3}, {"d": 12})
    places = program.places({"b": PARTIAL})
    target = program.places({"a": REPLICATED, "b": REPLICATED})
    steps = path(program, Type("f64", ("d",), places), target)
    assert [(step.axes, str(step.target)) for step in steps] == [(("b",), "I"), (("a", "b"), "R")]


@settings(max_examples=200)
@given(pairs())
def test_paths_lead_where_they_should(pair: Pair) -> None:
    """Each step is an entry of the table, and leaves the value as it is."""
    world, numbers, steps = (
        SimulatedMesh.of_program(pair.program),
        Field(TRIALS, len(pair.program.axes)),
        applied(pair),
    )
    value = drawn(world, pair.source.dims, "value")
    held = spread(world, numbers, value, pair.source, "value")
    for step, before, after in steps:
        assert (step.source.kind, step.target.kind) in COERCIONS
        assert all(before.placement_on(axis) == step.source for axis in step.axes)
        held = world.coerce(held, step.axes, step.source, step.target, numbers)
        assert is_spread(world, numbers, held, after, value)
    assert not steps or steps[-1][2] == pair.target


@settings(max_examples=200)
@given(pairs())
def test_paths_move_innermost_axes_and_little(pair: Pair) -> None:
    """Only the innermost axes of a dim move; by the table's stages, unless no such order moves
    innermost axes alone.
    """
    steps = [step for step, _, _ in applied(pair)]
    stages = _stages(steps)
    assert _moves_innermost(steps, pair)
    if stages != sorted(stages):
        in_order = (each for each in permutations(steps) if _stages(each) == sorted(stages))
        assert not any(_moves_innermost(each, pair) for each in in_order)


def _stages(steps: Sequence[Step]) -> list[int]:
    return [coercion(step.source, step.target).stage for step in steps]


def _moves_innermost(steps: Sequence[Step], pair: Pair) -> bool:
    type = pair.source
    for step in steps:
        after = step.type_after(type, pair.program)
        for place, at in ((step.source, type), (step.target, after)):
            if place.kind is Kind.SHARDED and at.axes_of(place.dim)[-len(step.axes) :] != step.axes:
                return False
        type = after
    return True


@settings(max_examples=200)
@given(pairs())
def test_paths_refuse_only_what_reorders_a_dim(pair: Pair) -> None:
    """Where each dim keeps its outer axes, and one kind of change is asked of it, there is a
    path.
    """
    for dim in pair.source.dims:
        before, after = pair.source.axes_of(dim), pair.target.axes_of(dim)
        shared = min(len(before), len(after))
        moved = {
            (pair.source.placement_on(axis), pair.target.placement_on(axis))
            for axis in (*before[shared:], *after[shared:])
        }
        if before[:shared] != after[:shared] or len(moved) > 1:
            return
    assert bool(path(pair.program, pair.source, pair.target.places)) == (pair.source != pair.target)


def test_sums_of_several_axes_are_one_collective() -> None:
    program = frame({"a": 2, "b": 3}, {"d": 12, "e": 24})
    pending = Type("f64", ("d", "e"), (("a", PARTIAL), ("b", PARTIAL)))
    assert path(program, pending, ()) == [Step(("a", "b"), PARTIAL, INVARIANT)]
    assert [
        step.axes for step in path(program, pending, (("a", REPLICATED), ("b", REPLICATED)))
    ] == [("a", "b")] * 2


@pytest.mark.parametrize("place", [INVARIANT, REPLICATED, PARTIAL, sharded("d")])
def test_the_dual_of_the_dual_is_the_placement(place: Placement) -> None:
    assert dual(dual(place)) == place
