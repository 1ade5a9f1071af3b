"""A whole program: its mesh, dims, parameters and state, and the region that computes."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property
from math import prod

from attrs import Factory, evolve, frozen

from ..config.hf_names import HFWeight
from ..config.settings import Cluster, Flow, Pipelining, Train, Watch
from ..schedules.actions import Known, Schedule, stages_of_rank
from ..syntax.source import Span
from .regions import Op, Region, written_at
from .types import BATCH, DATA_DIMS, FLOATS, INVARIANT, PRECISIONS, SEQUENCE, Placement, Places, Type
from .walk import blocks, regions_in, values, walk

STATES = ("parameters", "gradients", "optimizer")
"""The parts of a parameter's state that ranks may shard."""


@frozen
class Axis:
    """A mesh axis; `parent` is the plan's axis that this is a factor of (else the axis itself).

    within  of an elastic axis, the least and the most ranks that the plan allows; `size` is one of the sizes that it
            may have
    """

    name: str
    size: int
    parent: str
    within: tuple[int, int] | None = None
    span: Span = written_at()


@frozen
class Dim:
    """A named dim and its global size; elements after the first `valid` are padding, which counts for nothing.

    twin    the dim that this one has the size of, and that is sharded apart from it
    chosen  of experts, the dim of a token's choices: beside a dim of tokens only these entries exist, others are zero
    padded  of experts, to how many rows of one sequence each is padded, over all ranks that share it; 0 where there are
            as many rows as tokens chose
    """

    name: str
    size: int
    valid: int = Factory(lambda self: self.size, takes_self=True)
    twin: str = ""
    chosen: str = ""
    padded: int = 0
    span: Span = written_at()


@frozen
class Claim:
    """One dim's claim to work over one axis.  Lower `rank` goes first; `split` is false where the dim is too small.

    zigzag  whether rank r of n holds the chunks r and 2n - 1 - r of 2n, not the r-th part
    via     how attention comes by the keys that other ranks hold: `gather`, `ring`, `ulysses`; "" where nothing is said
    within  the kind of op that alone works so, and whose axis lies inside those of other claims; "" for all ops
    """

    rank: int
    dim: str
    axis: str
    split: bool
    zigzag: bool = False
    via: str = ""
    within: str = ""
    span: Span = written_at()


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
    span: Span = written_at()


@frozen
class Buffer(Param):
    """State without a gradient, float32 and zero at first, that all ranks hold alike: the biases of a router.

    Each step moves each by `rate`, as the load number `route` says.
    """

    rate: float = 0.0
    route: int = 0


@frozen
class Bucket:
    """Parameters whose gradients are reduced as one flat buffer; `type` is that of the buffer's gradient of record.

    Its last dim is the flat one, after the dims of repeats whose iterations have a buffer each, gathered and reduced
    separately.  Each rank keeps master weights and optimizer state only for its shard of the gradient.  Between steps
    the rest of its copy of the parameters is stale, even if their type says R.

    shard_axes             the axes that shard it: parameters are gathered, gradients reduced and scattered over them
    reduce_axes            the axes over which the gradient, or the rank's shard of it, is reduced as well
    reshard_after_forward  whether parameters are gathered for one layer, or to the end of a stage, not for the step
    shard_gradients        whether each microbatch reduces gradients, which otherwise add up and are reduced once a step
    """

    name: str
    params: tuple[str, ...]
    type: Type
    shard_axes: tuple[str, ...] = ()
    reduce_axes: tuple[str, ...] = ()
    reshard_after_forward: bool = False
    shard_gradients: bool = False

    @property
    def dim(self) -> str:
        """The flat dim."""
        return self.type.dims[-1]

    @property
    def layers(self) -> tuple[str, ...]:
        """The dims of repeats, outermost first, whose layers have a buffer each."""
        return self.type.dims[:-1]

    @property
    def per_layer(self) -> bool:
        """Whether each iteration of a repeat has a buffer of its own."""
        return bool(self.layers)


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

    Types and dims are those of all stages together; nothing but sums over stages mentions the axis.  A stage has
    `layers` layers of the repeats over `dims`, in their order; ops before a repeat's first layer belong to the first
    stage or to that of the layer before, ops after the last one to the last stage.
    """

    axis: str
    dims: tuple[str, ...]
    settings: Pipelining
    given: Schedule | None = None
    """The rows of the plan's file, or, from `place_stages` on, those made for it; without messages."""
    layers: tuple[int, ...] = ()
    """The number of layers of each stage; from `cut_stages` on."""
    stage_to_rank: tuple[int, ...] = ()
    """The rank of each stage on the axis; of `auto` from `place_stages` on."""
    param_stages: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The stages of each parameter that is no slice of a repeat that is cut."""
    schedule: Schedule | None = None
    """With messages; from `schedule_pipeline` on."""

    @property
    def splits(self) -> bool:
        """Whether the gradients of weights are made apart from those of inputs."""
        return self.schedule is not None and self.schedule.splits

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the model's order."""
        return stages_of_rank(self.stage_to_rank, rank)

    def ranks_of(self, param: str) -> tuple[int, ...]:
        """The ranks that hold a parameter whole; of those that are cut with their repeats, none."""
        return tuple(sorted({self.stage_to_rank[stage] for stage in dict(self.param_stages).get(param, ())}))


@frozen
class Program(Known):
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
    """How many equal shares of rows a rank's experts get, by dim of experts; one where nothing is said."""
    buffers: tuple[Buffer, ...] = ()
    recomputed: tuple[str, ...] = ()
    """Names that backward recomputes by `recompute = auto`: ops by first results, or the dims of repeats for whole
    layers; from `choose_recomputed` on."""

    @cached_property
    def types(self) -> Mapping[str, Type]:
        """The type of every parameter and value, by name."""
        return {p.name: p.type for p in self.stored} | {v.name: v.type for v in values(self.region)}

    @property
    def stored(self) -> tuple[Param, ...]:
        """Parameters and buffers: what a step makes anew, and checkpoints and files of weights hold."""
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
        """The dims and axes of claims within an op, which lie inside those of the others."""
        return frozenset((claim.dim, claim.axis) for claim in self.claims if claim.within)

    @cached_property
    def choices(self) -> Mapping[str, str]:
        """The dims of experts, and those of a token's choices among them."""
        return {dim.name: dim.chosen for dim in self.dims if dim.chosen}

    def zigzag_axes(self, dim: str, axes: Iterable[str]) -> tuple[str, ...]:
        """The given axes whose ranks hold two chunks each of `dim`."""
        return tuple(axis for axis in axes if (dim, axis) in self.zigzags)

    def operands(self, op: Op) -> tuple[Type, ...]:
        """The types of an op's operands."""
        return tuple(self.types[name] for name in op.inputs)

    @cached_property
    def losses(self) -> int:
        """How many losses there are: the sum over tokens, and perhaps that of the routers, which counts as it is."""
        others = 0 if self.region.kind == "model" else 2 + len(self.stored)
        return len(self.region.yields) - self.routes - others

    @cached_property
    def routes(self) -> int:
        """How many routes there are: each has a load, how many tokens chose each of its experts in each layer."""
        of = self.region if self.region.kind == "model" else self.microbatches
        return sum(self.types[end.name].dtype not in FLOATS for end in of.yields)

    @property
    def made(self) -> int:
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

    def sized(self, sizes: Mapping[str, int]) -> "Program":
        """The program with other sizes of some dims."""
        dims = (
            evolve(dim, size=sizes[dim.name], valid=sizes[dim.name]) if dim.name in sizes else dim for dim in self.dims
        )
        return evolve(self, dims=tuple(dims))

    def axis(self, name: str) -> Axis:
        """The axis `name`."""
        return next(axis for axis in self.axes if axis.name == name)

    def param(self, name: str) -> Param:
        """The parameter `name`."""
        return next(param for param in self.params if param.name == name)

    def state_of(self, param: str) -> StateAxes:
        """Over which axes ranks share out what they keep of a parameter: the first of `state` that is of its name."""
        found = (state for state in self.state if any(fnmatchcase(param, pattern) for pattern in state.of))
        return next(found, StateAxes())

    def bucket(self, name: str) -> Bucket:
        """The bucket `name`."""
        return next(bucket for bucket in self.buckets if bucket.name == name)

    @cached_property
    def _flats(self) -> Mapping[str, Bucket]:
        return {bucket.dim: bucket for bucket in self.buckets}

    def bucket_of(self, type: Type) -> Bucket | None:
        """The bucket whose flat buffer a value of `type` is, of one layer or a stack of all; None for other values."""
        return self._flats.get(type.dims[-1]) if type.dims else None

    def reduce_dtype(self, bucket: Bucket) -> str:
        """The element type in which a bucket's gradient is reduced."""
        sent = PRECISIONS.get(self.train.reduce or "", bucket.type.dtype)
        return sent if bucket.shard_axes or bucket.reduce_axes else bucket.type.dtype

    def degree(self, axes: tuple[str, ...]) -> int:
        """The number of ranks in a group over `axes`."""
        return prod(self.axis(name).size for name in axes)

    def local_size(self, type: Type, dim: str) -> int:
        """How much of `dim` one rank holds of a value of `type`."""
        axes = type.axes_of(dim)
        return self.size(dim) // self.degree(axes) if axes else self.size(dim)

    def joined(self, type: Type) -> tuple[tuple[str, ...], ...]:
        """The dims of a value as they lie in memory: rows of experts are one dim, all others are by themselves.

        Padded rows are as many of each expert, and experts are a dim of their own.
        """
        if not (experts := self.experts_of(type)):
            return tuple((dim,) for dim in type.dims)
        ragged = (experts,) if self.is_ragged(type) else ()
        rows = tuple(dim for dim in type.dims if dim in (*ragged, *DATA_DIMS, self.choices[experts]))
        each = {dim: rows if dim == rows[0] else (dim,) for dim in type.dims if dim == rows[0] or dim not in rows}
        return tuple(each.values())

    def place_of(self, type: Type, dim: str) -> int:
        """Which dim in memory has the dim `dim` of a value."""
        return next(at for at, dims in enumerate(self.joined(type)) if dim in dims)

    def local_shape(self, type: Type) -> tuple[int, ...]:
        """The shape of a value of `type` on one rank; of rows by a rank's experts, as many as `loads` says."""
        return tuple(
            self.local_size(type, dims[0]) if len(dims) == 1 else self._rows(type) for dims in self.joined(type)
        )

    def _rows(self, type: Type) -> int:
        """The number of rows on one rank; of padded ones, of each of its experts."""
        experts = self.experts_of(type)
        if padded := self.dim(experts).padded:
            return self.local_size(type, BATCH) * padded // self.degree(type.axes_of(SEQUENCE))
        tokens = prod(self.local_size(type, dim) for dim in DATA_DIMS if dim in type.dims)
        degree = self.degree(type.axes_of(experts))
        load = dict(self.loads).get(experts, 1) if degree > 1 else 1
        return load * tokens * self.size(self.choices[experts]) // degree

    def elements(self, type: Type) -> int:
        """The number of elements of a value of `type` on one rank."""
        return prod(self.local_shape(type))

    def experts_of(self, type: Type) -> str:
        """The dim of experts of rows, of which each is of one token and one of its choices; "" of all other values."""
        if BATCH not in type.dims:
            return ""
        return next((dim for dim in type.dims if dim in self.choices), "")

    def is_ragged(self, type: Type) -> bool:
        """Whether a value has as many rows of each expert as tokens chose."""
        experts = self.experts_of(type)
        return bool(experts) and not self.dim(experts).padded

    def outer(self, param: Param) -> tuple[str, ...]:
        """The dims before a parameter's own: those of repeats, and that of the experts that have one each."""
        of_experts = param.type.dims[param.stacked : param.stacked + 1]
        return param.type.dims[: param.stacked + (of_experts[0] in self.choices if of_experts else 0)]

    def places(self, at: dict[str, Placement]) -> Places:
        """Placements in mesh order, invariant ones omitted, with their levels: the canonical form."""
        found = ((a.name, at[a.name]) for a in self.axes if at.get(a.name, INVARIANT) != INVARIANT)
        if not self.inner:
            return tuple(found)
        return tuple((axis, evolve(place, level=int((place.dim, axis) in self.inner))) for axis, place in found)
