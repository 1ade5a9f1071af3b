"""The intermediate representation: one page of frozen classes for every level from plan to training step.

Purpose: say what a program *is*; `printer` writes it, `reader` reads it back, `wellformed` says which ones are legal.
Non-goals: behaviour.  Ops are described in `ops`, placements coerced in `placements`, both as data.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Literal

from attrs import Factory, evolve, field, frozen

from .names import Stored
from .schedules.actions import Schedule
from .settings import Cluster, Flow, Pipelining, Train
from .source import Span


class Kind(Enum):
    """What the ranks of one mesh axis hold of a value (design: the four placements)."""

    INVARIANT = "I"  # the same value, one logical use
    REPLICATED = "R"  # the same value, used separately by each rank
    SHARDED = "S"  # a slice of one dim
    PARTIAL = "P"  # the value is the sum over ranks
    MAXIMUM = "M"  # the value is the maximum over ranks; carries no gradient


@frozen
class Placement:
    """A value's placement on one mesh axis; `dim` is set for shards only."""

    kind: Kind
    dim: str = ""

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind is Kind.SHARDED else self.kind.value


INVARIANT = Placement(Kind.INVARIANT)
REPLICATED = Placement(Kind.REPLICATED)
PARTIAL = Placement(Kind.PARTIAL)
MAXIMUM = Placement(Kind.MAXIMUM)


def sharded(dim: str) -> Placement:
    """The placement S(dim)."""
    return Placement(Kind.SHARDED, dim)


Places = tuple[tuple[str, Placement], ...]
Attr = int | float | str | tuple[str, ...] | Placement


@frozen
class Type:
    """Element type, named dims in physical order (outermost first), and placements in mesh order, invariant omitted."""

    dtype: str
    dims: tuple[str, ...]
    places: Places = ()

    def at(self, axis: str) -> Placement:
        """The placement on `axis`."""
        return dict(self.places).get(axis, INVARIANT)

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """The axes that shard `dim`, outer first."""
        return tuple(axis for axis, place in self.places if place == sharded(dim))

    def axes_in(self, kind: Kind) -> tuple[str, ...]:
        """The axes on which the placement is of `kind`."""
        return tuple(axis for axis, place in self.places if place.kind is kind)

    def inside(self, dim: str) -> "Type":
        """The type of one slice along the leading stacked `dim`."""
        assert self.dims[:1] == (dim,), f"{dim} does not lead {self.dims}"
        return evolve(self, dims=self.dims[1:])

    def stacked(self, dim: str) -> "Type":
        """The type of such values stacked along a new leading `dim`."""
        return evolve(self, dims=(dim, *self.dims))

    @property
    def differentiable(self) -> bool:
        """Whether gradients can flow: floating point, and no maximum."""
        return self.dtype in FLOATS and not self.axes_in(Kind.MAXIMUM)


STATES = ("parameters", "gradients", "optimizer")
"""What ranks may share out of a parameter's state."""

MICROBATCHES = "microbatches"
DATA_DIMS = ("batch", "seq")
"""The dims of the model's inputs; they never shard a parameter's storage."""

FLOATS = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
ITEM_BYTES = {**FLOATS, "i64": 8}
PRECISIONS = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "fp64": "f64"}
"""The element types by what plans call them."""


@frozen
class Value:
    """A name, bound once, and its type."""

    name: str
    type: Type


def _line(span: Span) -> tuple[str, int]:
    return PurePath(span.path).name, span.line


def _span() -> Span:
    return field(eq=_line, repr=False, kw_only=True)


@frozen
class Op:
    """One operation: `outputs = kind(inputs) <attrs>`."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    span: Span = _span()

    def get(self, key: str) -> Attr:
        """The attribute `key`, which the op's kind declares."""
        return dict(self.attrs)[key]

    def names(self, key: str) -> tuple[str, ...]:
        """The attribute `key` as a tuple of names; empty where it is absent."""
        found = dict(self.attrs).get(key, ())
        assert isinstance(found, tuple), f"{self.kind}: {key} is not a list of names"
        return found


class Enter(Enum):
    """How a value of the enclosing scope enters a region; values that are the same in every iteration are just used."""

    CARRY = "carry"  # the first iteration's value; later ones take what the one before yielded
    EACH = "each"  # one slice per iteration along the region's dim


class Leave(Enum):
    """How a value of a region's body leaves it."""

    LAST = "last"  # carried: the last iteration's
    STACK = "stack"  # all iterations', stacked along the region's dim
    SUM = "sum"  # the sum over iterations


@frozen
class Arg:
    """A value of a region's body, made from `source` of the enclosing scope."""

    value: Value
    source: str
    enter: Enter


@frozen
class Yield:
    """A value of a region's body that becomes the region's result of the same position."""

    name: str
    leave: Leave


@frozen
class Region:
    """A nested body: `results = kind (args) { body  yield … }`.

    `model` and `step` are outermost, and their arguments are the program's inputs; `forward` and `backward` are blocks
    whose names stay visible after them; `repeat` and `microbatches` run once per index of `dim`, `repeat` backwards if
    `reverse`.
    """

    kind: Literal["model", "step", "microbatches", "forward", "backward", "repeat"]
    body: tuple["Stmt", ...]
    args: tuple[Arg, ...] = ()
    yields: tuple[Yield, ...] = ()
    results: tuple[Value, ...] = ()
    dim: str = ""
    reverse: bool = False
    span: Span = _span()


Stmt = Op | Region


@frozen
class Axis:
    """A mesh axis; `whole` names the axis of the plan of which this is a factor (else itself)."""

    name: str
    size: int
    whole: str
    span: Span = _span()


@frozen
class Dim:
    """A named dim and its global size; what is behind the first `valid` is padding, which counts for nothing."""

    name: str
    size: int
    valid: int = Factory(lambda self: self.size, takes_self=True)
    span: Span = _span()


@frozen
class Claim:
    """One dim's claim to work over one axis.  Lower `rank` goes first; `split` is false where the dim is too small."""

    rank: int
    dim: str
    axis: str
    split: bool
    span: Span = _span()


@frozen
class Init:
    """How a parameter begins: `normal(std)`, `ones()` or `zeros()`."""

    kind: str
    args: tuple[float, ...] = ()


@frozen
class Param:
    """A parameter: its state of record, how it begins, and two counts of its dims.

    The first `stacked` dims are those of repeats, the last `inner` ones those that a matrix product contracts.
    """

    name: str
    type: Type
    stacked: int
    inner: int
    init: Init
    span: Span = _span()


@frozen
class Bucket:
    """Parameters whose gradients are reduced as one flat buffer; `type` is that of the buffer's gradient of record.

    Its last dim is the flat one.  Before it stand the dims of repeats of which each turn has a buffer of its own, that
    is gathered and reduced by itself.  A rank keeps masters and optimizer state of what it holds of the gradient; of
    its parameters, whatever their types say, the rest is stale between steps.
    """

    name: str
    params: tuple[str, ...]
    type: Type

    @property
    def dim(self) -> str:
        """The flat dim."""
        return self.type.dims[-1]

    @property
    def turns(self) -> tuple[str, ...]:
        """The dims of repeats, outermost first, whose turns have a buffer each."""
        return self.type.dims[:-1]


@frozen
class StateAxes:
    """Over which axes ranks share out what a step keeps, outermost first: each rank holds a part of each bucket.

    `of` has patterns of the parameters' names.  `optimizer` is also for the masters, and what is shared out there is
    updated there.
    """

    of: tuple[str, ...] = ("*",)
    parameters: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()


@frozen
class Pipeline:
    """Repeats that are cut into stages over a mesh axis.

    What types and dims say is of all stages together; nothing but sums over stages mentions the axis.  A stage has
    `turns` turns of the repeats over `dims`, one behind the other; what stands before a repeat's first turn belongs to
    the first stage or to that of the turn before, what stands behind the last one to the last stage.
    """

    axis: str
    dims: tuple[str, ...]
    settings: Pipelining
    given: Schedule | None = None
    """The rows of the plan's file, without messages."""
    turns: tuple[int, ...] = ()
    """Of each stage; from `cut_stages` on."""
    homes: tuple[int, ...] = ()
    """The rank of each stage on the axis."""
    held: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The stages of each parameter that is no slice of a repeat that is cut."""
    schedule: Schedule | None = None
    """With messages; from `schedule_pipeline` on."""

    @property
    def splits(self) -> bool:
        """Whether the gradients of weights are made apart from those of inputs."""
        return self.schedule is not None and self.schedule.splits

    def ranks_of(self, param: str) -> tuple[int, ...]:
        """The ranks that hold a parameter whole; of those that are cut with their repeats, none."""
        return tuple(sorted({self.homes[stage] for stage in dict(self.held).get(param, ())}))


@frozen
class Program:
    """A plan on its way to a training program, after the pass `stage`."""

    name: str
    stage: str
    axes: tuple[Axis, ...]
    dims: tuple[Dim, ...]
    claims: tuple[Claim, ...]
    params: tuple[Param, ...]
    region: Region
    train: Train
    cluster: Cluster
    buckets: tuple[Bucket, ...] = ()
    names: tuple[Stored, ...] = ()
    state: tuple[StateAxes, ...] = ()
    flow: Flow = Flow()
    pipeline: Pipeline | None = None

    def size(self, dim: str) -> int:
        """The global size of `dim`."""
        return next(d.size for d in self.dims if d.name == dim)

    def valid(self, dim: str) -> int:
        """The global size of `dim` without padding."""
        return next(d.valid for d in self.dims if d.name == dim)

    def sized(self, sizes: Mapping[str, int]) -> "Program":
        """The program with other sizes of some dims."""
        dims = (
            evolve(dim, size=sizes[dim.name], valid=sizes[dim.name]) if dim.name in sizes else dim for dim in self.dims
        )
        return evolve(self, dims=tuple(dims))

    def axis(self, name: str) -> Axis:
        """The axis `name`."""
        return next(a for a in self.axes if a.name == name)

    def state_of(self, param: str) -> StateAxes:
        """Over which axes ranks share out what they keep of a parameter: the first of `state` that is of its name."""
        found = (state for state in self.state if any(fnmatchcase(param, pattern) for pattern in state.of))
        return next(found, StateAxes())

    def bucket(self, name: str) -> Bucket:
        """The bucket `name`."""
        return next(bucket for bucket in self.buckets if bucket.name == name)

    def degree(self, axes: tuple[str, ...]) -> int:
        """The number of ranks in a group over `axes`."""
        product = 1
        for name in axes:
            product *= self.axis(name).size
        return product

    def local_size(self, type: Type, dim: str) -> int:
        """How much of `dim` one rank holds of a value of `type`."""
        return self.size(dim) // self.degree(type.axes_of(dim))

    def local_shape(self, type: Type) -> tuple[int, ...]:
        """The shape of a value of `type` on one rank."""
        return tuple(self.local_size(type, dim) for dim in type.dims)

    def elements(self, type: Type) -> int:
        """The number of elements of a value of `type` on one rank."""
        product = 1
        for size in self.local_shape(type):
            product *= size
        return product

    def places(self, at: dict[str, Placement]) -> Places:
        """Placements in mesh order, invariant ones omitted: the canonical form."""
        return tuple((a.name, at[a.name]) for a in self.axes if at.get(a.name, INVARIANT) != INVARIANT)


def walk(body: tuple[Stmt, ...]) -> Iterator[Op]:
    """Every op of `body` and of the regions in it, in order."""
    for stmt in body:
        if isinstance(stmt, Region):
            yield from walk(stmt.body)
        else:
            yield stmt


def values(region: Region) -> Iterator[Value]:
    """Every value that `region` binds, at any depth."""
    yield from (arg.value for arg in region.args)
    yield from region.results
    for stmt in region.body:
        yield from values(stmt) if isinstance(stmt, Region) else stmt.outputs


def types(program: Program) -> dict[str, Type]:
    """The type of every parameter and value, by name."""
    return {p.name: p.type for p in program.params} | {v.name: v.type for v in values(program.region)}


def uses(region: Region) -> Counter[str]:
    """How often each value is read in `region`, at any depth."""
    found = Counter(arg.source for arg in region.args)
    found.update(end.name for end in region.yields)
    for stmt in region.body:
        found.update(uses(stmt) if isinstance(stmt, Region) else stmt.inputs)
    return found


def base(name: str) -> str:
    """The name without the number of its rebinding: `x` of `x.2`."""
    return name.split(".")[0]


class Names:
    """Gives names that are not taken: `x`, `x.1`, `x.2`, …"""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._next: dict[str, int] = {}
        for name in taken:
            stem, _, number = name.partition(".")
            self._next[stem] = max(self._next.get(stem, 0), int(number or 0) + 1)

    def fresh(self, like: str) -> str:
        """A new name on the stem of `like`."""
        stem = base(like)
        number = self._next.get(stem, 0)
        self._next[stem] = number + 1
        return f"{stem}.{number}" if number else stem
