"""The settings of a run as a program writes them: its plan, predictions of a step, learning-rate
schedules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import cos, pi, prod
from typing import Protocol

from torch import Tensor

from ..checkpoint.hf_weights import HFNames
from ..data.corpus import Corpus
from ..data.loader import Input


class Schedule(Protocol):
    """A learning rate for each step."""

    def lr(self, step: int, steps: int, peak: float) -> float: ...


@dataclass(frozen=True)
class Constant:
    """Linear warm-up over `warmup` steps, then the peak."""

    warmup: int = 0

    def lr(self, step: int, steps: int, peak: float) -> float:
        """The learning rate of step `step` (from 0) of `steps`."""
        return peak * min(1.0, (step + 1) / max(1, self.warmup))


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up over `warmup` steps, then half a cosine; the last step's learning rate is
    `floor`.

    (arXiv:1608.03983.)
    """

    warmup: int = 0
    floor: float = 0.0

    def lr(self, step: int, steps: int, peak: float) -> float:
        """The learning rate of step `step` (from 0) of `steps`."""
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, steps - 1 - self.warmup)
        floor = min(self.floor, peak)
        return floor + (peak - floor) * 0.5 * (1 + cos(pi * progress))


@dataclass(frozen=True)
class Account:
    """Peak memory of a step's tensors on a rank, as the compiler counts it for a device, in bytes.

    ranks    of each rank along `axis`, a pipeline's; without an axis, of all ranks alike
    reserve  bytes that the compiler leaves besides to CUDA and its libraries
    most     the same where tokens choose as many of a rank's experts as they can; `ranks` then
             assumes equal loads
    """

    device: str
    ranks: tuple[int, ...]
    reserve: int = 0
    axis: str = ""
    most: tuple[int, ...] = ()

    def at(self, place: int) -> tuple[int, int]:
        """The least and the most of a rank at a place along the axis."""
        return self.ranks[place], (self.most or self.ranks)[place]


@dataclass(frozen=True)
class Expected:
    """A step as the compiler prices it.

    gpu              the GPUs that it is priced for
    seconds          of the step
    error            how far the step may differ from `seconds`, as a part of it
    flops_per_token  operations that the model needs: 6 for each parameter but the embedding's, and
                     attention's
    peak_flops       operations a second that a GPU is able to do, in the element type of the plan
    """

    gpu: str
    seconds: float
    error: float
    flops_per_token: int
    peak_flops: float


@dataclass(frozen=True)
class Prediction:
    """A step on one mesh as the compiler predicts it: its memory, and its time where the compiler
    knows the GPUs.
    """

    mesh: Mapping[str, int]
    account: Account | None = None
    expected: Expected | None = None


@dataclass(frozen=True)
class Watch:
    """The looks of a run at its values, to find wrong ones; numbers are steps between two looks,
    None for none.

    finite  whether loss and gradient norm were finite
    skips   this many steps in a row that were not finite, or that a rule has skipped, are skipped;
            one more ends the run
    locate  such a step is run once more, to name the first value that is not finite
    copies  whether values that ranks should hold alike are alike
    replay  whether a step that is run twice is the same to the last bit
    spikes  how many median deviations above the median of the losses before it a loss is a spike
    """

    finite: int = 1
    skips: int = 0
    locate: bool = False
    copies: int | None = None
    replay: int | None = None
    spikes: float | None = None


@dataclass(frozen=True)
class SmallerMesh:
    """A mesh with fewer data-parallel ranks, on which the same step has more microbatches; the
    rest is as in `Plan`.
    """

    mesh: Mapping[str, int]
    microbatches: int
    nodes: int = 1
    account: Account | None = None  # in programs of scalec 0.2: see `Plan.prediction`
    expected: Expected | None = None

    @property
    def ranks(self) -> int:
        """The ranks of the mesh."""
        return prod(self.mesh.values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run.  Options of the command line replace files of data, steps, lr, seed
    and the settings of saves.
    """

    name: str
    mesh: Mapping[str, int]  # outermost first
    data: Corpus
    # of "tokens", "labels" and, where the model takes them, "documents"
    inputs: Mapping[str, Input]
    vocab: int
    seq: int  # tokens of a sequence
    global_batch: int  # sequences of a step, over all ranks and microbatches
    microbatches: int
    steps: int
    seed: int
    lr: float  # the schedule's peak
    schedule: Schedule
    nodes: int = 1
    names: HFNames | None = None  # where files of weights hold the parameters
    predictions: tuple[Prediction, ...] = ()  # of this mesh and each smaller one
    account: Account | None = None  # in programs of scalec 0.2: see `prediction`
    expected: Expected | None = None
    smaller: tuple[SmallerMesh, ...] = ()  # the largest first, for a run that has lost nodes
    largest: "Plan | None" = None  # of a plan on one of its smaller meshes
    model: str = ""  # hash of the model on any mesh; checkpoints must have the same
    unpadded: str = ""  # its hash without padding, where there is any
    padded_rows: Mapping[str, int] = field(
        default_factory=lambda: dict[str, int]()
    )  # by patterns of names: those that count
    save_every: int = 500  # steps
    keep: int = 2  # the newest checkpoints, and
    keep_every: int = 0  # those of steps that this divides
    watch: Watch = Watch()
    # of each load, how many experts a token chooses, where a capacity may drop some
    choices: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """The ranks of the mesh."""
        return prod(self.mesh.values())

    @property
    def prediction(self) -> Prediction:
        """The prediction for this mesh.  Programs of scalec 0.2 have it in the plan itself."""
        for prediction in self.predictions:
            if prediction.mesh == self.mesh:
                return prediction
        return Prediction(self.mesh, self.account, self.expected)

    def shrink_to(self, ranks: int) -> "Plan":
        """The plan on the largest of its meshes that this number of ranks can make; unchanged where
        they can make none.
        """
        if self.ranks <= ranks:
            return self
        for mesh in self.smaller:
            if mesh.ranks <= ranks:
                changes = {field.name: getattr(mesh, field.name) for field in fields(mesh)}
                return replace(self, largest=self, **changes)
        return self


@dataclass(frozen=True)
class Metrics:
    """Metrics of a step, tensors equal on all ranks: mean loss of a token, number of tokens,
    gradient norm if any.

    With a loss scale, a norm that is not finite belongs to a step that was skipped.  So does a loss
    above `limit`, which is None in steps without this rule.  `router_loss`: the losses that routers
    add.  `loads`: for each route, how many of the step's tokens each expert took in each layer,
    int64 [layers, experts].
    """

    loss: Tensor
    tokens: Tensor
    norm: Tensor | None = None
    loss_scale: Tensor | None = None
    router_loss: Tensor | None = None
    loads: tuple[Tensor, ...] = ()
    limit: Tensor | None = None
