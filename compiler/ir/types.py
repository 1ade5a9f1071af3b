"""The type of a value: its element type, its dims, and which part of it the ranks of each mesh
axis have.
"""

from enum import Enum
from operator import itemgetter

from attrs import evolve, field, frozen


class Kind(Enum):
    """The part of a value that the ranks of one mesh axis have (design: the four placements)."""

    INVARIANT = "I"  # the same value, one logical use
    REPLICATED = "R"  # the same value, used separately by each rank
    SHARDED = "S"  # a slice of one dim
    PARTIAL = "P"  # the value is the sum over ranks
    MAXIMUM = "M"  # the value is the maximum over ranks; carries no gradient


@frozen
class Placement:
    """A value's placement on one mesh axis; `dim` is set for shards only.

    Axes that shard one dim nest in the mesh's order, axes of a higher `level` inside the others.
    """

    kind: Kind
    dim: str = ""
    level: int = field(default=0, eq=False, repr=False)

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind is Kind.SHARDED else self.kind.value


INVARIANT = Placement(Kind.INVARIANT)
REPLICATED = Placement(Kind.REPLICATED)
PARTIAL = Placement(Kind.PARTIAL)
MAXIMUM = Placement(Kind.MAXIMUM)


def sharded(dim: str, level: int = 0) -> Placement:
    """The placement S(dim)."""
    return Placement(Kind.SHARDED, dim, level)


Places = tuple[tuple[str, Placement], ...]
Attr = int | float | str | tuple[str, ...] | Placement


@frozen(cache_hash=True)
class Type:
    """Element type, named dims in physical order (outermost first), and placements in mesh
    order, invariant omitted.
    """

    dtype: str
    dims: tuple[str, ...]
    places: Places = ()

    def placement_on(self, axis: str) -> Placement:
        """The placement on `axis`."""
        return dict(self.places).get(axis, INVARIANT)

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """The axes that shard `dim`, outer first."""
        leveled = [(place.level, axis) for axis, place in self.places if place.dim == dim]
        if len(leveled) > 1:
            leveled.sort(key=itemgetter(0))
        return tuple(axis for _, axis in leveled)

    def axes_in(self, kind: Kind) -> tuple[str, ...]:
        """The axes on which the placement is of `kind`."""
        return tuple(axis for axis, place in self.places if place.kind is kind)

    def inside(self, dim: str) -> "Type":
        """The type of one slice along the leading stacked `dim`."""
        assert self.dims[:1] == (dim,), f"{dim} does not lead {self.dims}"
        return evolve(self, dims=self.dims[1:])

    def stack_along(self, dim: str) -> "Type":
        """The type of such values stacked along a new leading `dim`."""
        return evolve(self, dims=(dim, *self.dims))

    @property
    def differentiable(self) -> bool:
        """Whether gradients can flow: floating point, and no maximum."""
        return self.dtype in FLOATS and not self.axes_in(Kind.MAXIMUM)


MICROBATCHES = "microbatches"
BATCH, SEQUENCE = DATA_DIMS = ("batch", "seq")
"""The dims of the model's inputs, as plans call them; they never shard a parameter's storage."""

FLOATS = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
ITEM_BYTES = {**FLOATS, "i64": 8}
PRECISIONS = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "fp64": "f64"}
"""The element types by what plans call them."""


@frozen
class Value:
    """A name, bound once, and its type."""

    name: str
    type: Type
