"""The effect of a coercion on ranks' tensors: each entry of the table against numpy, and the
adjoint identity.

Purpose: `SimulatedMesh.coerced` on meshes of one to three axes and on joint groups, on copies that
agree and on such as do not. Non-goals: which coercions are legal and in what order
(`tests/ir/test_coercions.py`).
"""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest

from scalec.compiler.ir import INVARIANT, MAXIMUM, PARTIAL, REPLICATED, Kind, Placement, sharded
from scalec.compiler.ir.placements import COERCIONS, conjugate, dual
from scalec.compiler.proof.prime_field import Field, P
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.tensors import Array, Tensor
from scalec.testing.float64 import Reals

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

GROUPS = {
    "2": ({"a": 2}, ("a",)),
    "3": ({"a": 3}, ("a",)),
    "first of 2 × 3": ({"a": 2, "b": 3}, ("a",)),
    "second of 2 × 3": ({"a": 2, "b": 3}, ("b",)),
    "both of 2 × 3": ({"a": 2, "b": 3}, ("a", "b")),
    "first and last of 2 × 3 × 2": ({"a": 2, "b": 3, "c": 2}, ("a", "c")),
    "one rank": ({"a": 1}, ("a",)),
}
ParamGroup = tuple[dict[str, int], tuple[str, ...]]

LOCAL = (12, 24)
"""Of the dims d and e on each rank before a coercion, so that each may be split over twelve
ranks.
"""


def ids(entry: tuple[Placement, Placement]) -> str:
    return "→".join(map(str, entry))


# ---- definitions: what rank `rank` of a group has, from the parts of all


def total(parts: list[Array], rank: int, source: Placement, target: Placement) -> Array:
    return np.add.reduce(parts)


def largest(parts: list[Array], rank: int, source: Placement, target: Placement) -> Array:
    return np.maximum.reduce(parts)


def own(parts: list[Array], rank: int, source: Placement, target: Placement) -> Array:
    return parts[rank]


def join_parts(parts: list[Array], rank: int, source: Placement, target: Placement) -> Array:
    return np.concatenate(parts, axis=axis_of(source))


def cut(array: Array, pieces: int, rank: int, place: Placement) -> Array:
    """The piece of `array` that is rank's along the dim of `place`."""
    size = array.shape[axis_of(place)] // pieces
    return array.take(range(rank * size, (rank + 1) * size), axis=axis_of(place))


def scattered(parts: list[Array], rank: int, source: Placement, target: Placement) -> Array:
    return cut(np.add.reduce(parts), len(parts), rank, target)


def exchanged(parts: list[Array], rank: int, source: Placement, target: Placement) -> Array:
    return np.concatenate(
        [cut(part, len(parts), rank, target) for part in parts], axis=axis_of(source)
    )


def sliced(parts: list[Array], rank: int, source: Placement, target: Placement) -> Array:
    return cut(parts[rank], len(parts), rank, target)


def padded(parts: list[Array], rank: int, source: Placement, target: Placement) -> Array:
    return np.concatenate(
        [part * (i == rank) for i, part in enumerate(parts)], axis=axis_of(source)
    )


def once(parts: list[Array], rank: int, source: Placement, target: Placement) -> Array:
    return parts[rank] * (rank == 0)


def axis_of(place: Placement) -> int:
    return "de".index(place.dim)


DEFINITIONS: dict[str, Callable[[list[Array], int, Placement, Placement], Array]] = {
    "I→R": own,
    "P→I": total,
    "S(d)→R": join_parts,
    "P→S(d)": scattered,
    "S(d)→S(e)": exchanged,
    "S(d)→I": join_parts,
    "I→S(d)": sliced,
    "R→S(d)": sliced,
    "S(d)→P": padded,
    "I→P": once,
    "R→I": own,
    "R→P": once,
    "M→R": largest,
    "M→I": largest,
}


def groups(axes: dict[str, int], over: tuple[str, ...]) -> Iterator[list[tuple[int, ...]]]:
    """The ranks of each group, as places in the mesh, outer axes first."""
    rest = [axis for axis in axes if axis not in over]
    for fixed in product(*(range(axes[axis]) for axis in rest)):
        at = dict(zip(rest, fixed, strict=True))
        inner = (
            at | dict(zip(over, place, strict=True))
            for place in product(*(range(axes[a]) for a in over))
        )
        yield [tuple(each[axis] for axis in axes) for each in inner]


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("entry", ENTRIES, ids=ids)
def test_coercions_are_what_they_are_called(
    entry: tuple[Placement, Placement], group: ParamGroup
) -> None:
    """Also of copies that should agree and do not: every rank's numbers are its own."""
    axes, over = group
    x = np.random.default_rng(0).normal(size=(1, *axes.values(), *LOCAL))
    found = SimulatedMesh(axes, {}).coerce(Tensor(("d", "e"), x), over, *entry, Reals(len(axes)))
    assert found.dims == ("d", "e")
    for places in groups(axes, over):
        parts = [x[0][place] for place in places]
        for rank, place in enumerate(places):
            expected = DEFINITIONS[ids(entry)](parts, rank, *entry)
            result = np.broadcast_to(found.array, (1, *axes.values(), *found.array.shape[-2:]))[0][
                place
            ]
            np.testing.assert_allclose(result, expected, rtol=1e-14)


def test_every_entry_has_a_definition() -> None:
    assert set(DEFINITIONS) == set(map(ids, ENTRIES))


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("entry", WITH_GRADIENT, ids=ids)
def test_adjoint_identity(entry: tuple[Placement, Placement], group: ParamGroup) -> None:
    """⟨g, C x⟩ = ⟨C* g, x⟩ in the field, with g placed by the dual of where C leads."""
    (axes, over), (source, target) = group, entry
    world, n = SimulatedMesh(axes, {}), Field(2, len(axes))
    x = random_parts(n, "x", group, source, LOCAL)
    forward = world.coerce(x, over, source, target, n)
    g = random_parts(n, "g", group, dual(target), forward.array.shape[-2:])
    backward = world.coerce(g, over, *conjugate(source, target), n)
    assert inner(g, forward, group, target) == inner(backward, x, group, source)


def random_parts(
    n: Field, name: str, group: ParamGroup, place: Placement, local: tuple[int, ...]
) -> Tensor:
    """Random parts of all ranks, alike in each group where the placement says so."""
    axes, over = group
    x = n.random((*axes.values(), *local), name)
    if place in (INVARIANT, REPLICATED):
        for axis in over:
            at = 1 + list(axes).index(axis)
            x = np.broadcast_to(x.take([0], axis=at), x.shape)
    return Tensor(("d", "e"), x)


def inner(u: Tensor, v: Tensor, group: ParamGroup, place: Placement) -> list[int]:
    """⟨u, v⟩ over all ranks in each trial; where v, and so u, is invariant, a group counts once."""
    axes, over = group
    x, y = np.broadcast_arrays(u.array, v.array)
    full = np.broadcast_to(
        x.astype(object) * y.astype(object), (len(x), *axes.values(), *x.shape[-2:])
    )
    if place == INVARIANT:
        for axis in over:
            full = full.take([0], axis=1 + list(axes).index(axis))
    return [int(trial.sum()) % P for trial in full]
