"""The sections of settings as typed values: each class is a section, each field a setting with its
type and meaning.

`schema.read` makes instances of syntax, `schema.show` prints them back.  Rules between settings are
in `frontend`.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

from attrs import evolve, frozen

from ..schedules.registry import SCHEDULES
from .fields import CALL, EVERY, FIRST, Heading, Only, Settings
from .values import (
    AT_LEAST_1,
    AUTO,
    BYTES,
    BYTES_OR_AUTO,
    COUNT_OR_BYTES,
    COUNTS,
    FRACTION,
    NUMBER_OR_SKIP,
    POSITIVE,
    SOME,
    TEXT,
    TOKEN,
    WORD,
    Selection,
    Size,
    Skip,
    one_of,
    selection,
    share,
    strings,
)

FILE = "file"
"""The schedule of rows that a person wrote."""

TORCH, TRITON = "torch", "triton"
"""Implementations of ops; `auto` is decided with the rest of the plan."""

SAVE, CHUNK = "save", "chunk"
"""Treatment of logits: saved for backward, or computed in chunks; `auto` is decided with the
rest of the plan.
"""

OFF, ON = "off", "on"

DROPLESS, PADDED = "dropless", "padded"
"""Numbers of rows of experts: those that tokens make, or as many as the capacity of each expert
has room for.
"""

STDLIB = "python_stdlib"
"""Among a plan's files: the source of Python's standard library on the machine that trains."""


@frozen
class Cluster(Settings):
    """`cluster { … }`: nodes and their GPUs."""

    SECTION: ClassVar[str] = "cluster"
    gpu: Annotated[str, WORD, "name of the GPU, for instance h100_sxm, for `explain memory`"] = ""
    memory: Annotated[int | None, BYTES, "memory of a GPU; unset, that of the named GPU"] = None
    gpus_per_node: Annotated[
        int | None, AT_LEAST_1, "GPUs per node; unset, the mesh's ranks divided by `nodes`"
    ] = None
    nodes: Annotated[int, AT_LEAST_1, "nodes of the cluster"] = 1
    hardware: Annotated[
        str | None, TEXT, "file with measured figures of GPUs and links, for `explain time`"
    ] = None
    reserve: Annotated[
        int | None,
        BYTES,
        "memory of a GPU left to its driver, CUDA, cuBLAS and NCCL; unset, an estimate",
    ] = None
    weights_across_nodes: Annotated[
        str | None,
        one_of(OFF, ON),
        "whether axes of weights may span several nodes; unset, they are refused",
    ] = None


@frozen
class Schedule(Settings):
    """`schedule = cosine(…)`: the learning rate over the steps; cosine as in Loshchilov and
    Hutter 2017.
    """

    SECTION: ClassVar[str] = "schedule"
    kind: Annotated[str, Heading(("constant", "cosine"))] = "constant"
    warmup: Annotated[int, "steps in which the learning rate rises linearly from 0"] = 0
    floor: Annotated[float, Only("cosine"), "learning rate at the last step"] = 0.0


@frozen
class ParamGroup(Settings):
    """`group NAME { … }`: parameters with settings of their own."""

    SECTION: ClassVar[str] = "group"
    name: Annotated[str, Heading()]
    params: Annotated[tuple[str, ...], strings(), "patterns of parameter names"]
    weight_decay: Annotated[
        float | None, "weight decay of these parameters, by default the optimizer's"
    ] = None
    lr_scale: Annotated[float, "factor on the learning rate"] = 1.0


@frozen
class Optimizer(Settings):
    """`optimizer adamw { … }` (Loshchilov and Hutter 2019) or `optimizer sgd { … }`."""

    SECTION: ClassVar[str] = "optimizer"
    kind: Annotated[str, Heading(("adamw", "sgd"))]
    lr: Annotated[float, POSITIVE, "peak learning rate"]
    betas: Annotated[
        tuple[float, float],
        Only("adamw"),
        FRACTION,
        "decay of the averages of gradients and their squares",
    ] = (0.9, 0.95)
    eps: Annotated[float, Only("adamw"), POSITIVE, "added to the root of the second average"] = 1e-8
    momentum: Annotated[float, Only("sgd"), FRACTION, "decay of the velocity"] = 0.0
    weight_decay: Annotated[
        float, "weight decay: decoupled in adamw, added to the gradient in sgd"
    ] = 0.0
    clip: Annotated[float, "largest norm of all gradients, 0 for no clipping"] = 0.0
    schedule: Annotated[Schedule, CALL] = Schedule()
    groups: tuple[ParamGroup, ...] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        """The state that the optimizer keeps for each element of a parameter."""
        if self.kind == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.momentum else ()

    def group_of(self, param: str) -> ParamGroup:
        """The settings of a parameter: the settings of its group, and the optimizer's own where
        its group does not say them.
        """
        place = self.place(param)
        group = self.groups[place - 1] if place else ParamGroup("", ())
        if group.weight_decay is not None:
            return group
        return evolve(group, weight_decay=self.weight_decay)

    def params_by_group(self, params: Iterable[str]) -> dict[ParamGroup, list[str]]:
        """Parameters by the settings that they share."""
        params_by_group: dict[ParamGroup, list[str]] = {}
        for name in params:
            params_by_group.setdefault(self.group_of(name), []).append(name)
        return params_by_group

    def place(self, param: str) -> int:
        """The place of the group that a parameter is in, from 1; 0 if it is in none."""
        for place, group in enumerate(self.groups, start=1):
            if any(fnmatchcase(param, pattern) for pattern in group.params):
                return place
        return 0


@frozen
class DataSet(Settings):
    """`set NAME { … }`: files that are one of several sets of `data`, and how often they are
    dealt out.
    """

    SECTION: ClassVar[str] = "set"
    name: Annotated[str, Heading()]
    files: Annotated[tuple[str, ...], strings(STDLIB), "paths, `*` for any part of a name"]
    weight: Annotated[
        float, share(POSITIVE), "share of the sequences, beside the weights of the other sets"
    ] = 1.0
    holdout: Annotated[
        float | None,
        share(FRACTION),
        "fraction of the files reserved for validation; unset, that of `data`",
    ] = None


FOLDER = "folder"
"""The heading of `data` that names folders of `scalec data`."""


@frozen
class Data(Settings):
    """`data text { … }`, `data tokens { … }` or `data folder { … }`: the training data."""

    SECTION: ClassVar[str] = "data"
    kind: Annotated[str, Heading(("text", "tokens", FOLDER))]
    files: Annotated[
        tuple[str, ...] | None,
        strings(STDLIB),
        "paths, `*` for any part of a name; needed where there is no `set`",
    ] = None
    tokenizer: Annotated[str, Only("text"), one_of("bytes"), "how text is split into tokens"] = (
        "bytes"
    )
    dtype: Annotated[str, Only("tokens"), one_of("uint16", "uint32"), "type of a stored token"] = (
        "uint16"
    )
    as_is: Annotated[
        str | None,
        Only("text tokens"),
        one_of(OFF, ON),
        "whether files that seem to be of another format are read; unset, they are refused",
    ] = None
    holdout: Annotated[
        float,
        share(FRACTION),
        "fraction of the files reserved for validation; of a single file, its last part",
    ] = 0.0
    separator: Annotated[
        int | str | None, Only("text tokens"), TOKEN, "the token that ends each document"
    ] = None
    masked: Annotated[
        float | None,
        Only("text tokens"),
        share(SOME),
        "fraction of the tokens that are hidden and predicted",
    ] = None
    mask_token: Annotated[
        int | str | None, Only("text tokens"), TOKEN, "the token that hides others"
    ] = None
    sets: tuple[DataSet, ...] = ()

    @property
    def mixture(self) -> tuple[DataSet, ...]:
        """The sets, each with its share for validation."""
        sets: list[DataSet] = []
        for data_set in self.sets:
            if data_set.holdout is None:
                data_set = evolve(data_set, holdout=self.holdout)
            sets.append(data_set)
        return tuple(sets)

    @property
    def separator_id(self) -> int | None:
        """The id of the token that ends each document."""
        return _id(self.separator)

    @property
    def mask_id(self) -> int | None:
        """The id of the token that hides others."""
        return _id(self.mask_token)


def _id(token: int | str | None) -> int | None:
    return ord(token) if isinstance(token, str) else token


@frozen
class Flow(Settings):
    """The settings of `state { … }`: how what ranks share out of a model's state is moved."""

    SECTION: ClassVar[str] = "state"
    bucket: Annotated[
        int | str | None,
        BYTES_OR_AUTO,
        "largest bucket to reduce at once; unset, the parameters of one layer; `auto`,"
        " whichever makes a step fastest",
    ] = None
    prefetch: Annotated[int, "how many layers ahead parameters are gathered"] = 1

    @property
    def largest(self) -> int | None:
        """The bytes of the largest bucket, where the plan or the compiler has set them."""
        return self.bucket if isinstance(self.bucket, int) else None


@frozen
class Watch(Settings):
    """`watch { … }`: what a run looks at to find values that are wrong."""

    SECTION: ClassVar[str] = "watch"
    finite: Annotated[
        int,
        EVERY,
        AT_LEAST_1,
        "steps between two looks at whether loss and gradient norm were finite",
    ] = 1
    skips: Annotated[
        int,
        "steps in a row that may be skipped, since they were not finite or by `spikes`; one"
        " more ends the run",
    ] = 0
    locate: Annotated[
        str, one_of(OFF, ON), "whether such a step is run once more to name the first such value"
    ] = OFF
    copies: Annotated[
        int | None,
        EVERY,
        AT_LEAST_1,
        "steps between two comparisons of state and gradients that ranks hold alike; unset, none",
    ] = None
    replay: Annotated[
        int | None,
        EVERY,
        AT_LEAST_1,
        "steps between two that are run twice, and compared to the last bit; unset, none",
    ] = None
    spikes: Annotated[
        float | Skip | None,
        NUMBER_OR_SKIP,
        "by how many median deviations a loss is above the median of those before it to be"
        " told, or for its step to be "
        "skipped; unset, neither",
    ] = None

    @property
    def deviations(self) -> float | None:
        """The median deviations above which a loss is a spike; None if none is."""
        return self.spikes.deviations if isinstance(self.spikes, Skip) else self.spikes

    @property
    def get_loss_limit(self) -> float | None:
        """The same, if the step of a spike is skipped."""
        return self.deviations if isinstance(self.spikes, Skip) else None


@frozen
class Order(Settings):
    """`schedule = interleaved_1f1b(chunks=2)`: in which order ranks do the work of their stages."""

    SECTION: ClassVar[str] = "schedule"
    kind: Annotated[str, Heading((*SCHEDULES, AUTO, FILE))] = "1f1b"
    path: Annotated[
        str | None, Only(FILE), FIRST, TEXT, "path of the rows, from the plan's folder"
    ] = None
    chunks: Annotated[
        int | None, AT_LEAST_1, "stages per rank; unset, the schedule's usual number"
    ] = None
    memory: Annotated[
        int | Size | None,
        Only(AUTO),
        COUNT_OR_BYTES,
        "memory budget of a rank, in microbatches in flight or in bytes; unset, unlimited",
    ] = None


@frozen
class Pipelining(Settings):
    """`pipeline { … }`: how repeats are cut into stages, and in which order these work."""

    SECTION: ClassVar[str] = "pipeline"
    schedule: Annotated[Order, CALL] = Order()
    stages: Annotated[
        tuple[int, ...] | None, COUNTS, "layers in each stage; unset, stages of equal cost"
    ] = None


@frozen
class StateGroup(Settings):
    """The settings of `group NAME { … }` in `state`: the parameters that have rules of their
    own.
    """

    SECTION: ClassVar[str] = "group"
    name: Annotated[str, Heading()]
    params: Annotated[tuple[str, ...], strings(), "patterns of parameter names"]


@frozen
class Train(Settings):
    """`train { … }`: the run."""

    SECTION: ClassVar[str] = "train"
    seq: Annotated[int, AT_LEAST_1, "tokens in a sequence"]
    global_batch: Annotated[int, AT_LEAST_1, "sequences in a step, over all ranks"]
    microbatch: Annotated[int, AT_LEAST_1, "sequences in a microbatch, on one data-parallel rank"]
    steps: Annotated[int, AT_LEAST_1, "optimizer steps"]
    optimizer: Optimizer
    data: Data
    seed: Annotated[int, "seed of initial values and of the order of data"] = 0
    precision: Annotated[
        str,
        one_of("fp32", "bf16", "fp16", "fp64"),
        "dtype in which the model computes; bf16 and fp16 have master weights, fp16 a loss scale",
    ] = "fp32"
    master: Annotated[
        str | None,
        one_of("fp32", "bf16"),
        "dtype of master weights, gradients and optimizer state; unset, fp32 or `precision` if"
        " wider",
    ] = None
    reduce: Annotated[
        str | None,
        one_of("fp32", "bf16", "fp16"),
        "dtype of sums of gradients over ranks; unset, `master`'s",
    ] = None
    kernels: Annotated[
        str,
        one_of(AUTO, TORCH, TRITON),
        "implementation of ops: torch's own, Triton's with ops fused, or the best one for the"
        " cluster's GPU",
    ] = "auto"
    logits: Annotated[
        str,
        one_of(AUTO, SAVE, CHUNK),
        "logits of losses: saved for backward, computed in chunks, or whichever suits",
    ] = AUTO
    compile: Annotated[
        str,
        one_of(OFF, ON),
        "whether torch.compile compiles each layer of an innermost repeat to a graph",
    ] = OFF
    gathered: Annotated[
        str,
        one_of("save", "regather"),
        "gathered activations: saved for backward, or regathered in backward",
    ] = "save"
    recompute: Annotated[
        Selection,
        selection("none", "full", with_names="selective", with_number="every"),
        "what backward recomputes: nothing, every layer, every n-th layer, the named ops, or"
        " what memory asks for",
    ] = Selection("none")
    room: Annotated[
        float | None,
        AT_LEAST_1,
        "rows of experts for which the account has memory, relative to an equal share of a"
        " rank; unset, 1.25",
    ] = None
    experts: Annotated[
        str,
        one_of(DROPLESS, PADDED),
        "rows of experts: as many as tokens chose, or padded to the `capacity` of routes",
    ] = DROPLESS
    save_every: Annotated[int | None, AT_LEAST_1, "steps between two saves; unset, 500"] = None
    keep: Annotated[int | None, AT_LEAST_1, "newest checkpoints that stay; unset, 2"] = None
    keep_every: Annotated[
        int | None, AT_LEAST_1, "checkpoints of steps that this divides stay too; unset, none"
    ] = None

    @property
    def saves(self) -> dict[str, int]:
        """The settings of saves that are set, by name."""
        names = ("save_every", "keep", "keep_every")
        return {name: value for name in names if (value := getattr(self, name)) is not None}
