"""The sections of settings as typed values: each class is a section, each field a setting with its type and meaning.

Purpose: what can be set, in one table.  `schema.read` turns syntax into instances, `schema.show` prints them back.
Non-goals: rules between settings, and what a plan's dims and axes have to do with them (`passes`).
"""

from fnmatch import fnmatchcase
from typing import ClassVar

from attrs import field, frozen

from ..schedules.registry import SCHEDULES
from .fields import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SOME,
    Selection,
    Settings,
    Size,
    call,
    choice,
    count,
    count_or_size,
    counts,
    first,
    heading,
    only,
    pair,
    real,
    section,
    sections,
    selection,
    share,
    size,
    text,
    texts,
    token,
    word,
)
from .schema import differing, read, show

__all__ = [
    "AUTO",
    "CHUNK",
    "FILE",
    "ON",
    "SAVE",
    "STDLIB",
    "TORCH",
    "TRITON",
    "Cluster",
    "Data",
    "Flow",
    "Optimizer",
    "Order",
    "ParamGroup",
    "Pipelining",
    "Schedule",
    "Selection",
    "Settings",
    "Size",
    "StateGroup",
    "Train",
    "differing",
    "read",
    "show",
]

AUTO, FILE = "auto", "file"
"""Schedules without a name of their own: made for the plan's costs, and rows that a person wrote."""

TORCH, TRITON = "torch", "triton"
"""Whose kernels a program calls; `auto` is decided with the rest of the plan."""

SAVE, CHUNK = "save", "chunk"
"""What becomes of logits: kept for backward, or made a chunk at a time; `auto` is decided with the rest of the plan."""

OFF, ON = "off", "on"

STDLIB = "python_stdlib"
"""Among a plan's files: the source of Python's standard library on the machine that trains."""


@frozen
class Cluster(Settings):
    """`cluster { … }`: nodes and their GPUs."""

    SECTION: ClassVar[str] = "cluster"
    gpu: str = field(default="", metadata=word("name of the GPU, for instance h100_sxm, for `explain memory`"))
    memory: int | None = field(default=None, metadata=size("memory of a GPU; unset, that of the named GPU"))
    gpus_per_node: int | None = field(
        default=None, metadata=count("GPUs per node; unset, the mesh's ranks divided by `nodes`", at_least=1)
    )
    nodes: int = field(default=1, metadata=count("nodes of the cluster", at_least=1))
    reserve: int | None = field(
        default=None, metadata=size("of a GPU, what is left to its driver, CUDA, cuBLAS and NCCL; unset, an estimate")
    )


@frozen
class Schedule(Settings):
    """`schedule = cosine(…)`: the learning rate over the steps; cosine as in Loshchilov and Hutter 2017."""

    SECTION: ClassVar[str] = "schedule"
    kind: str = field(default="constant", metadata=heading("constant", "cosine"))
    warmup: int = field(default=0, metadata=count("steps in which the learning rate rises linearly from 0"))
    floor: float = field(default=0.0, metadata=only("cosine", real("learning rate at the last step", NOT_NEGATIVE)))


@frozen
class ParamGroup(Settings):
    """`group NAME { … }`: parameters with settings of their own."""

    SECTION: ClassVar[str] = "group"
    name: str = field(metadata=heading())
    params: tuple[str, ...] = field(metadata=texts("patterns of parameter names"))
    weight_decay: float = field(default=0.0, metadata=real("weight decay of these parameters", NOT_NEGATIVE))
    lr_scale: float = field(default=1.0, metadata=real("factor on the learning rate", NOT_NEGATIVE))


@frozen
class Optimizer(Settings):
    """`optimizer adamw { … }` (Loshchilov and Hutter 2019) or `optimizer sgd { … }`."""

    SECTION: ClassVar[str] = "optimizer"
    kind: str = field(metadata=heading("adamw", "sgd"))
    lr: float = field(metadata=real("peak learning rate", POSITIVE))
    betas: tuple[float, float] = field(
        default=(0.9, 0.95),
        metadata=only("adamw", pair("decay of the averages of gradients and their squares", FRACTION)),
    )
    eps: float = field(default=1e-8, metadata=only("adamw", real("added to the root of the second average", POSITIVE)))
    momentum: float = field(default=0.0, metadata=only("sgd", real("decay of the velocity", FRACTION)))
    weight_decay: float = field(
        default=0.0, metadata=real("weight decay: decoupled in adamw, added to the gradient in sgd", NOT_NEGATIVE)
    )
    clip: float = field(default=0.0, metadata=real("largest norm of all gradients, 0 for no clipping", NOT_NEGATIVE))
    schedule: Schedule = field(default=Schedule(), metadata=call(Schedule))
    groups: tuple[ParamGroup, ...] = field(default=(), metadata=sections(ParamGroup))

    @property
    def slots(self) -> tuple[str, ...]:
        """What it remembers of each element of a parameter."""
        if self.kind == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.momentum else ()

    def place(self, param: str) -> int:
        """The place of the group that a parameter is in, from 1; 0 if it is in none."""
        groups = enumerate(self.groups, 1)
        return next((i for i, group in groups if any(fnmatchcase(param, pattern) for pattern in group.params)), 0)


@frozen
class Data(Settings):
    """`data text { … }` or `data tokens { … }`: what is trained on."""

    SECTION: ClassVar[str] = "data"
    kind: str = field(metadata=heading("text", "tokens"))
    files: tuple[str, ...] = field(metadata=texts("paths, `*` for any part of a name", named=(STDLIB,)))
    tokenizer: str = field(default="bytes", metadata=only("text", choice("what makes text into tokens", "bytes")))
    dtype: str = field(default="uint16", metadata=only("tokens", choice("type of a stored token", "uint16", "uint32")))
    holdout: float = field(default=0.0, metadata=share("fraction of the files reserved for validation"))
    separator: int | str | None = field(default=None, metadata=token("the token that ends each document"))
    masked: float | None = field(
        default=None, metadata=share("fraction of the tokens that are hidden and predicted", SOME)
    )
    mask_token: int | str | None = field(default=None, metadata=token("the token that hides others"))

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
    bucket: int | None = field(
        default=None, metadata=size("largest bucket to reduce at once; unset, the parameters of one layer")
    )
    prefetch: int = field(default=1, metadata=count("how many layers ahead parameters are gathered"))


@frozen
class Order(Settings):
    """`schedule = interleaved_1f1b(chunks=2)`: in which order ranks do the work of their stages."""

    SECTION: ClassVar[str] = "schedule"
    kind: str = field(default="1f1b", metadata=heading(*SCHEDULES, AUTO, FILE))
    path: str | None = field(default=None, metadata=first(only(FILE, text("path of the rows, from the plan's folder"))))
    chunks: int | None = field(
        default=None, metadata=count("stages per rank; unset, the schedule's usual number", at_least=1)
    )
    memory: int | Size | None = field(
        default=None,
        metadata=only(
            AUTO, count_or_size("memory budget of a rank, in microbatches in flight or in bytes; unset, unlimited")
        ),
    )


@frozen
class Pipelining(Settings):
    """`pipeline { … }`: how repeats are cut into stages, and in which order these work."""

    SECTION: ClassVar[str] = "pipeline"
    schedule: Order = field(default=Order(), metadata=call(Order))
    stages: tuple[int, ...] | None = field(
        default=None, metadata=counts("layers in each stage; unset, stages of equal cost")
    )


@frozen
class StateGroup(Settings):
    """The settings of `group NAME { … }` in `state`: the parameters that have rules of their own."""

    SECTION: ClassVar[str] = "group"
    name: str = field(metadata=heading())
    params: tuple[str, ...] = field(metadata=texts("patterns of parameter names"))


@frozen
class Train(Settings):
    """`train { … }`: the run."""

    SECTION: ClassVar[str] = "train"
    seq: int = field(metadata=count("tokens in a sequence", at_least=1))
    global_batch: int = field(metadata=count("sequences in a step, over all ranks", at_least=1))
    microbatch: int = field(metadata=count("sequences in a microbatch, on one data-parallel rank", at_least=1))
    steps: int = field(metadata=count("optimizer steps", at_least=1))
    optimizer: Optimizer = field(metadata=section(Optimizer))
    data: Data = field(metadata=section(Data))
    seed: int = field(default=0, metadata=count("of initial values and of the order of data"))
    precision: str = field(
        default="fp32",
        metadata=choice(
            "in which the model computes; bf16 and fp16 keep masters, fp16 a loss scale", "fp32", "bf16", "fp16", "fp64"
        ),
    )
    master: str | None = field(
        default=None,
        metadata=choice(
            "of masters, gradients and optimizer state; unset, fp32 or `precision` if wider", "fp32", "bf16"
        ),
    )
    reduce: str | None = field(
        default=None,
        metadata=choice("in which gradients are summed over ranks; unset, that of masters", "fp32", "bf16", "fp16"),
    )
    kernels: str = field(
        default="auto",
        metadata=choice(
            "of the ops: torch's own, Triton's with ops fused, or those that the cluster's GPU runs best",
            AUTO,
            TORCH,
            TRITON,
        ),
    )
    logits: str = field(
        default=AUTO,
        metadata=choice(
            "of losses: saved for backward, computed a chunk at a time, or whichever suits", AUTO, SAVE, CHUNK
        ),
    )
    compile: str = field(
        default=OFF,
        metadata=choice("whether torch.compile compiles each layer of an innermost repeat to a graph", OFF, ON),
    )
    gathered: str = field(
        default="save",
        metadata=choice("gathered activations: saved for backward, or gathered again in backward", "save", "regather"),
    )
    recompute: Selection = field(
        default=Selection("none"),
        metadata=selection(
            "what backward recomputes: nothing, every layer, every n-th layer, or the named ops",
            "none",
            "full",
            of="selective",
            each="every",
        ),
    )
