"""The configuration of an emitted program, and the metrics that its step returns.

Non-goals: nothing about the model; that is the program itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..checkpoint.hf_weights import HFNames
from ..data.loader import Corpus, Input
from .lr_schedule import Schedule


@dataclass(frozen=True)
class Account:
    """What tensors of a step take at once on a rank, as the compiler counts it for a device, in bytes.

    ranks    of each rank along `axis`, that of a pipeline; without one, of all ranks alike
    reserve  what the compiler leaves besides to CUDA and its libraries
    """

    device: str
    ranks: tuple[int, ...]
    reserve: int = 0
    axis: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run; options of the command line replace `data.files`, `steps`, `lr` and `seed`."""

    name: str
    mesh: Mapping[str, int]  # outermost first
    data: Corpus
    inputs: Mapping[str, Input]  # of "tokens", "labels" and, where the model takes them, "documents"
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
    account: Account | None = None  # what a step takes in memory, as the compiler counts it
    model: str = ""  # a hash of what is computed, on any mesh


@dataclass(frozen=True)
class Metrics:
    """Of one step, 0-dim tensors equal on all ranks: mean loss of a valid token, their number, gradient norm if any.

    With a loss scale a norm that is not finite is that of a step that was skipped.
    """

    loss: Tensor
    tokens: Tensor
    norm: Tensor | None = None
    loss_scale: Tensor | None = None
