"""Random meshes, and rules of `shard` for them.

Non-goals: whether a model can be sharded so (`random_models` asks what these rules leave whole).
"""

import re
from math import prod

from attrs import frozen
from hypothesis import strategies as st

from .random_expressions import Dims

ALONE = ("hidden", "broad", "wide")
"""Dims of weights that may lie over an axis if none of the others does."""


@frozen
class Sharding:
    """The rules of `shard` in order: a dim and its axes, outer first."""

    axes: dict[str, int]
    rules: tuple[tuple[str, tuple[str, ...]], ...]

    def works(self, dims: Dims) -> set[str]:
        """The dims that an op works on, whose operands and results have these: on each axis by
        the first rule.
        """
        found = (
            next((dim for dim, over in self.rules if axis in over and dim in dims), "")
            for axis in self.axes
        )
        return {*found} - {""}

    def clash(self, dims: Dims) -> bool:
        """Whether two of these, as dims of one parameter, lie over one axis."""
        over = [axis for dim, axes in self.rules if dim in dims and dim != "seq" for axis in axes]
        return len({*over}) < len(over)

    def of(self, body: str) -> "Sharding":
        """The rules and axes left for a model: rules for dims that it has, and axes that they
        name or of size 1.
        """
        rules = tuple((dim, over) for dim, over in self.rules if re.search(rf"\b{dim}\b", body))
        used = {axis for _, over in rules for axis in over}
        return Sharding(
            {axis: size for axis, size in self.axes.items() if axis in used or size == 1}, rules
        )

    def ranks(self, dim: str) -> int:
        """Over how many ranks a dim lies."""
        return prod(self.axes[axis] for axis in dict(self.rules).get(dim, ()))


ROLES = {"replica": "batch", "dp": "batch", "tp": "weights", "ep": "weights", "cp": "seq"}
"""The dims over an axis of such a name: the batch, weights, or the sequence alone."""


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    """One to three axes in any order, of eight ranks at most, and rules for them."""
    names = draw(st.lists(st.sampled_from([*ROLES]), min_size=1, max_size=3, unique=True))
    most = 4 if len(names) < 3 and {*names} != {"tp", "ep"} else 2
    axes = {
        name: draw(st.sampled_from([size for size in (2, 4, 1) if size <= most])) for name in names
    }
    if len(names) == 2 and {*axes.values()} == {4}:
        axes[names[0]] = 2
    over: dict[str, list[str]] = {"batch": [name for name in names if ROLES[name] == "batch"]}
    for axis in (name for name in names if ROLES[name] == "weights"):
        for dim in draw(_claimed()):
            over.setdefault(dim, []).append(axis)
    rules = draw(st.permutations([(dim, tuple(on)) for dim, on in over.items() if on]))
    sequence = tuple(
        a for a in names if ROLES[a] == "seq" or (ROLES[a] == "weights" and draw(st.booleans()))
    )
    at = len(rules) if draw(st.integers(0, 3)) else draw(st.integers(0, len(rules)))
    return Sharding(axes, (*rules[:at], *([("seq", sequence)] if sequence else []), *rules[at:]))


@st.composite
def _claimed(draw: st.DrawFn) -> list[str]:
    """Dims of weights that one axis splits; key/value heads only together with those of queries."""
    if not draw(st.integers(0, 3)):
        return [draw(st.sampled_from(ALONE))]
    dims = draw(st.sets(st.sampled_from(["vocab", "ffn"])))
    heads = draw(
        st.sampled_from(
            [["heads", "kv_heads"], ["heads"], []] if dims else [["heads", "kv_heads"], ["heads"]]
        )
    )
    return [*sorted(dims), *heads]


@st.composite
def written(draw: st.DrawFn, sharding: Sharding) -> str:
    """The rules as text: one line for each, or neighbours over the same axes together."""
    lines: list[tuple[str, tuple[str, ...]]] = []
    together = draw(st.booleans())
    for dim, over in sharding.rules:
        if together and lines and lines[-1][1] == over and dim != "seq":
            lines[-1] = (f"{lines[-1][0]}, {dim}", over)
        else:
            lines.append((dim, over))
    return "\n".join(f"{dims} over {', '.join(over)}" for dims, over in lines)
