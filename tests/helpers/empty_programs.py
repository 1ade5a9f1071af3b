"""Programs with axes and dims but without a body, and types on them."""

from collections.abc import Mapping
from functools import cache

from attrs import evolve
from hypothesis import strategies as st

from helpers.small_plans import Plan
from scalec.compiler.ir import INVARIANT, PARTIAL, REPLICATED, Placement, Program, Type, sharded


@cache
def _tiny() -> Program:
    return Plan(mesh="tp = 2", shard="ffn over tp").program("resolve")


def frame(axes: Mapping[str, int], dims: Mapping[str, int]) -> Program:
    """A program for typing ops and paths on a mesh."""
    program = _tiny()
    axis, dim = program.axes[0], program.dims[0]
    return evolve(
        program,
        axes=tuple(evolve(axis, name=name, size=size, parent=name) for name, size in axes.items()),
        dims=tuple(evolve(dim, name=name, size=size, valid=size) for name, size in dims.items()),
    )


@st.composite
def placements(
    draw: st.DrawFn, program: Program, dims: tuple[str, ...], dtype: str = "f64"
) -> Type:
    """A type with any placement on each axis; integers are never partial."""
    places: list[Placement] = [INVARIANT, REPLICATED, *map(sharded, dims)] + [PARTIAL] * (
        dtype != "i64"
    )
    return Type(
        dtype,
        dims,
        program.places({axis.name: draw(st.sampled_from(places)) for axis in program.axes}),
    )
