"""The parts of a program besides the region that computes: axes, dims, rules, parameters,
buckets, a pipeline.
"""

from attrs import Factory, frozen

from ..config.settings import Pipelining
from ..schedules.actions import Schedule, stages_of_rank
from ..syntax.source import Span
from .regions import span_field
from .types import Type

STATES = ("parameters", "gradients", "optimizer")
"""The parts of a parameter's state that ranks may shard."""


@frozen
class Axis:
    """A mesh axis; `parent` is the plan's axis that this is a factor of (else the axis itself).

    within  of an elastic axis, the least and the most ranks that the plan allows; `size` is one of
            the sizes that it may have
    """

    name: str
    size: int
    parent: str
    within: tuple[int, int] | None = None
    span: Span = span_field()


@frozen
class Dim:
    """A named dim and its global size; elements after the first `valid` are padding, which counts
    for nothing.

    twin    the dim that this one has the size of, and that is sharded apart from it
    chosen  of experts, the dim of a token's choices: beside a dim of tokens only these entries
            exist, others are zero
    padded  of experts, to how many rows of one sequence each is padded, over all ranks that share
            it; 0 where there are as many rows as tokens chose
    """

    name: str
    size: int
    valid: int = Factory(lambda self: self.size, takes_self=True)
    twin: str = ""
    chosen: str = ""
    padded: int = 0
    span: Span = span_field()


@frozen
class Claim:
    """One dim's claim to work over one axis.  Lower `rank` goes first; `split` is false where the
    dim is too small.

    zigzag  whether rank r of n holds the chunks r and 2n - 1 - r of 2n, not the r-th part
    via     how attention comes by the keys that other ranks hold: `gather`, `ring`, `ulysses`; ""
            where nothing is said
    within  the kind of op that alone works so, and whose axis lies inside the axes of other claims;
            "" for all ops
    """

    rank: int
    dim: str
    axis: str
    split: bool
    zigzag: bool = False
    via: str = ""
    within: str = ""
    span: Span = span_field()


@frozen
class Init:
    """How a parameter begins: `normal(std)`, `ones()` or `zeros()`."""

    kind: str
    args: tuple[float, ...] = ()


@frozen
class Param:
    """A parameter: its state of record, how it begins, and two counts of its dims.

    The first `stacked` dims belong to repeats.  A matrix product contracts the last `inner` dims.
    """

    name: str
    type: Type
    stacked: int
    inner: int
    init: Init
    span: Span = span_field()


@frozen
class Buffer(Param):
    """State without a gradient, float32 and zero at first, that all ranks hold alike: the biases of
    a router.

    Each step moves each by `rate`, as the load number `route` says.
    """

    rate: float = 0.0
    route: int = 0


@frozen
class Bucket:
    """Parameters whose gradients are reduced as one flat buffer; `type` is the type of the buffer's
    gradient of record.

    Its last dim is the flat one, after the dims of repeats whose iterations have a buffer each,
    gathered and reduced separately.  Each rank keeps master weights and optimizer state only for
    its shard of the gradient.  Between steps the rest of its copy of the parameters is stale, even
    if their type says R.

    shard_axes             the axes that shard it: parameters are gathered, gradients reduced and
                           scattered over them
    reduce_axes            the axes over which the gradient, or the rank's shard of it, is reduced
                           as well
    reshard_after_forward  whether parameters are gathered for one layer, or to the end of a stage,
                           not for the step
    shard_gradients        whether each microbatch reduces gradients, which otherwise add up and are
                           reduced once a step
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
    """Over which axes ranks share out what a step keeps, outermost first: each rank holds a part of
    each bucket.

    `of` has patterns of the parameters' names.  `optimizer` is also for the masters, and what is
    shared out there is updated there.
    """

    param_patterns: tuple[str, ...] = ("*",)
    parameters: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()


@frozen
class Pipeline:
    """Repeats that are cut into stages over a mesh axis.

    Types and dims describe all stages together; nothing but sums over stages mentions the axis.  A
    stage has `layers` layers of the repeats over `dims`, in their order.  Ops before a repeat's
    first layer belong to the stage of the layer before, or to the first stage.  Ops after the last
    layer belong to the last stage.
    """

    axis: str
    dims: tuple[str, ...]
    settings: Pipelining
    rows: Schedule | None = None
    """The rows of the plan's file, or, from `place_stages` on, the rows made for it; without
    messages.
    """
    layers: tuple[int, ...] = ()
    """The number of layers of each stage; from `divide_stages` on."""
    stage_to_rank: tuple[int, ...] = ()
    """The rank of each stage on the axis; of `auto` from `place_stages` on."""
    param_stages: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The stages of each parameter that is no slice of a repeat that is cut."""
    schedule: Schedule | None = None
    """With messages; from `schedule_pipeline` on."""

    @property
    def splits(self) -> bool:
        """Whether the gradients of weights are made apart from the gradients of inputs."""
        return self.schedule is not None and self.schedule.splits

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the model's order."""
        return stages_of_rank(self.stage_to_rank, rank)

    def ranks_of(self, param: str) -> tuple[int, ...]:
        """The ranks that hold a parameter whole; none if it is cut with its repeat."""
        stages = dict(self.param_stages).get(param, ())
        return tuple(sorted({self.stage_to_rank[stage] for stage in stages}))
