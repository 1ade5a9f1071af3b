"""A whole program: its mesh, dims, parameters and state, and the region that computes."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property
from math import prod

from attrs import evolve, frozen

from ..config.hf_names import HFWeight
from ..config.settings import Cluster, Flow, Train, Watch
from ..schedules.actions import ResultCache
from .declarations import Axis, Bucket, Buffer, Claim, Dim, Param, Pipeline, StateAxes
from .regions import Op, Region
from .types import (
    BATCH,
    DATA_DIMS,
    FLOATS,
    INVARIANT,
    PRECISIONS,
    SEQUENCE,
    Placement,
    Places,
    Type,
)
from .walk import blocks, regions_in, values, walk


@frozen
class Program(ResultCache):
    """A plan on its way to a training program, after the pass `after`."""

    name: str
    after: str
    axes: tuple[Axis, ...]
    dims: tuple[Dim, ...]
    claims: tuple[Claim, ...]
    params: tuple[Param, ...]
    region: Region
    train: Train
    cluster: Cluster
    buckets: tuple[Bucket, ...] = ()
    names: tuple[HFWeight, ...] = ()
    state: tuple[StateAxes, ...] = ()
    flow: Flow = Flow()
    watch: Watch = Watch()
    pipeline: Pipeline | None = None
    loads: tuple[tuple[str, Fraction], ...] = ()
    """How many equal shares of rows a rank's experts get, by dim of experts; one where nothing
    is said.
    """
    buffers: tuple[Buffer, ...] = ()
    recomputed: tuple[str, ...] = ()
    """Names that backward recomputes by `recompute = auto`: ops by first results, or the dims of
    repeats for whole layers; from `choose_recomputed` on."""
    sees: tuple[str, ...] = ()
    """The words of the plan for tokens, beside earlier ones of its own document, that a loss
    may depend on.
    """

    @cached_property
    def types(self) -> Mapping[str, Type]:
        """The type of every parameter and value, by name."""
        types = {param.name: param.type for param in self.params_and_buffers}
        for value in values(self.region):
            types[value.name] = value.type
        return types

    @property
    def params_and_buffers(self) -> tuple[Param, ...]:
        """Parameters and buffers: a step makes them anew; checkpoints and files of weights hold
        them.
        """
        return *self.params, *self.buffers

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Every op, at any depth, in order."""
        return tuple(walk(self.region.body))

    @cached_property
    def zigzags(self) -> frozenset[tuple[str, str]]:
        """The dims and axes whose ranks hold two chunks each."""
        return frozenset((claim.dim, claim.axis) for claim in self.claims if claim.zigzag)

    @cached_property
    def inner(self) -> frozenset[tuple[str, str]]:
        """The dims and axes of claims within an op, which lie inside the other axes."""
        return frozenset((claim.dim, claim.axis) for claim in self.claims if claim.within)

    @cached_property
    def choices(self) -> Mapping[str, str]:
        """By dim of experts, the dim of a token's choices among them."""
        return {dim.name: dim.chosen for dim in self.dims if dim.chosen}

    def zigzag_axes(self, dim: str, axes: Iterable[str]) -> tuple[str, ...]:
        """The given axes whose ranks hold two chunks each of `dim`."""
        return tuple(axis for axis in axes if (dim, axis) in self.zigzags)

    def operands(self, op: Op) -> tuple[Type, ...]:
        """The types of an op's operands."""
        return tuple(self.types[name] for name in op.inputs)

    @cached_property
    def losses(self) -> int:
        """How many losses there are: the sum over tokens, and perhaps the loss of the routers,
        which counts as it is.
        """
        others = 0 if self.region.kind == "model" else 2 + len(self.params_and_buffers)
        return len(self.region.yields) - self.routes - others

    @cached_property
    def routes(self) -> int:
        """How many routes there are: each has a load, how many tokens chose each of its experts
        in each layer.
        """
        region = self.region if self.region.kind == "model" else self.microbatches
        return sum(self.types[end.name].dtype not in FLOATS for end in region.yields)

    @property
    def microbatch_results(self) -> int:
        """How many values a microbatch makes, before gradients: losses and loads."""
        return self.losses + self.routes

    @property
    def microbatches(self) -> Region:
        """A step's region of all microbatches."""
        (region,) = regions_in(self.region.body)
        return region

    @property
    def forward(self) -> Region:
        """A step's forward block."""
        return blocks(self.microbatches)[0]

    @property
    def backward(self) -> Region:
        """A step's backward block."""
        return blocks(self.microbatches)[1]

    @cached_property
    def _dims(self) -> Mapping[str, Dim]:
        return {dim.name: dim for dim in self.dims}

    def dim(self, name: str) -> Dim:
        """The dim `name`."""
        return self._dims[name]

    def size(self, dim: str) -> int:
        """The global size of `dim`."""
        return self.dim(dim).size

    def valid(self, dim: str) -> int:
        """The global size of `dim` without padding."""
        return self.dim(dim).valid

    def with_sizes(self, sizes: Mapping[str, int]) -> "Program":
        """The program with other sizes of some dims."""
        dims = list[Dim]()
        for dim in self.dims:
            if dim.name in sizes:
                dim = evolve(dim, size=sizes[dim.name], valid=sizes[dim.name])
            dims.append(dim)
        return evolve(self, dims=tuple(dims))

    def axis(self, name: str) -> Axis:
        """The axis `name`."""
        return next(axis for axis in self.axes if axis.name == name)

    def param(self, name: str) -> Param:
        """The parameter `name`."""
        return next(param for param in self.params if param.name == name)

    def state_of(self, param: str) -> StateAxes:
        """Over which axes ranks share out what they keep of a parameter: the first of `state`
        with a pattern that matches its name.
        """
        for state in self.state:
            if any(fnmatchcase(param, pattern) for pattern in state.param_patterns):
                return state
        return StateAxes()

    def bucket(self, name: str) -> Bucket:
        """The bucket `name`."""
        return next(bucket for bucket in self.buckets if bucket.name == name)

    @cached_property
    def _flats(self) -> Mapping[str, Bucket]:
        return {bucket.dim: bucket for bucket in self.buckets}

    def bucket_of(self, type: Type) -> Bucket | None:
        """The bucket whose flat buffer a value of `type` is, of one layer or a stack of all;
        None for other values.
        """
        if not type.dims:
            return None
        return self._flats.get(type.dims[-1])

    def reduce_dtype(self, bucket: Bucket) -> str:
        """The element type of a bucket's gradient while it is reduced."""
        if not bucket.shard_axes and not bucket.reduce_axes:
            return bucket.type.dtype
        return PRECISIONS.get(self.train.reduce or "", bucket.type.dtype)

    def degree(self, axes: tuple[str, ...]) -> int:
        """The number of ranks in a group over `axes`."""
        return prod(self.axis(name).size for name in axes)

    @property
    def ranks(self) -> int:
        """The number of ranks of the whole mesh."""
        return prod(axis.size for axis in self.axes)

    def local_size(self, type: Type, dim: str) -> int:
        """How much of `dim` one rank holds of a value of `type`."""
        axes = type.axes_of(dim)
        return self.size(dim) // self.degree(axes) if axes else self.size(dim)

    def dims_in_memory(self, type: Type) -> tuple[tuple[str, ...], ...]:
        """The dims of a value as they lie in memory: rows of experts are one dim, all others are by
        themselves.

        Padded rows are as many of each expert, and experts are a dim of their own.
        """
        experts = self.experts_of(type)
        if not experts:
            return tuple((dim,) for dim in type.dims)
        row_dims = {*DATA_DIMS, self.choices[experts]}
        if self.is_ragged(type):
            row_dims.add(experts)
        rows = tuple(dim for dim in type.dims if dim in row_dims)
        groups = list[tuple[str, ...]]()
        for dim in type.dims:
            if dim == rows[0]:
                groups.append(rows)
            elif dim not in rows:
                groups.append((dim,))
        return tuple(groups)

    def place_of(self, type: Type, dim: str) -> int:
        """Which dim in memory has the dim `dim` of a value."""
        return next(index for index, dims in enumerate(self.dims_in_memory(type)) if dim in dims)

    @cached_property
    def _local_shapes(self) -> dict[Type, tuple[int, ...]]:
        """The shapes that have been asked for: a program has few types and many values."""
        return {}

    def local_shape(self, type: Type) -> tuple[int, ...]:
        """The shape of a value of `type` on one rank; `loads` says how many rows a rank's experts
        have.
        """
        shape = self._local_shapes.get(type)
        if shape is None:
            sizes = list[int]()
            for dims in self.dims_in_memory(type):
                if len(dims) == 1:
                    sizes.append(self.local_size(type, dims[0]))
                else:
                    sizes.append(self._rows(type))
            shape = tuple(sizes)
            self._local_shapes[type] = shape
        return shape

    def _rows(self, type: Type) -> int:
        """The number of rows on one rank; padded rows are counted for one of its experts."""
        experts = self.experts_of(type)
        if padded := self.dim(experts).padded:
            return self.local_size(type, BATCH) * padded // self.degree(type.axes_of(SEQUENCE))
        tokens = 1
        for dim in DATA_DIMS:
            if dim in type.dims:
                tokens *= self.local_size(type, dim)
        degree = self.degree(type.axes_of(experts))
        load = 1
        if degree > 1:
            load = dict(self.loads).get(experts, 1)
        return load * tokens * self.size(self.choices[experts]) // degree

    def elements(self, type: Type) -> int:
        """The number of elements of a value of `type` on one rank."""
        return prod(self.local_shape(type))

    def experts_of(self, type: Type) -> str:
        """The dim of experts of a value whose rows each belong to one token and one of its
        choices; "" for all other values.
        """
        if BATCH not in type.dims:
            return ""
        return next((dim for dim in type.dims if dim in self.choices), "")

    def is_ragged(self, type: Type) -> bool:
        """Whether a value has as many rows of each expert as tokens chose."""
        experts = self.experts_of(type)
        return bool(experts) and not self.dim(experts).padded

    def outer(self, param: Param) -> tuple[str, ...]:
        """The dims before a parameter's own: the dims of repeats, and the dim of experts that have
        one each.
        """
        count = param.stacked
        if count < len(param.type.dims) and param.type.dims[count] in self.choices:
            count += 1
        return param.type.dims[:count]

    def places(self, place_by_axis: dict[str, Placement]) -> Places:
        """Placements in mesh order, invariant ones omitted, with their levels: the canonical
        form.
        """
        placed = list[tuple[str, Placement]]()
        for axis in self.axes:
            place = place_by_axis.get(axis.name, INVARIANT)
            if place != INVARIANT:
                placed.append((axis.name, place))
        if not self.inner:
            return tuple(placed)
        levelled = list[tuple[str, Placement]]()
        for axis, place in placed:
            level = int((place.dim, axis) in self.inner)
            levelled.append((axis, evolve(place, level=level)))
        return tuple(levelled)
