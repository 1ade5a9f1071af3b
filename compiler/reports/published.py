"""The best speeds that others have published, by class of model and GPU, to compare a prediction
with.

MFU counts causal attention by the pairs that are seen, and no parameters of the input embedding, as
ours does.
"""

from collections.abc import Iterator

from attrs import frozen

from ..analysis.communication import parameter_count
from ..ir import Program


@frozen
class Published:
    """A published speed of training in bf16: MFU, or 0.0 where what is published does not give
    it.

    parameters  in billions, where only a model of this size has this speed; 0.0 where the speed is
                the best of its class
    tokens      a second and GPU, of this model
    """

    gpu: str
    has_experts: bool
    what: str
    source: str
    mfu: float = 0.0
    parameters: float = 0.0
    tokens: float = 0.0


BEST = (
    Published(
        gpu="h100_sxm",
        has_experts=False,
        what="GPT 16B on 192 GPUs",
        source="Megatron-LM's README, 2024",
        mfu=0.471,
    ),
    Published(
        gpu="h100_sxm",
        has_experts=False,
        what="70B at 8,192 positions on 64 GPUs",
        source="NeMo Automodel's performance summary",
        mfu=0.393,
        parameters=70.6,
        tokens=867,
    ),
    Published(
        gpu="h100_sxm",
        has_experts=True,
        what="30B-A3B on 8 GPUs",
        source="NeMo Automodel's performance summary",
        parameters=30.5,
        tokens=12_040,
    ),
    Published(
        gpu="h100_sxm",
        has_experts=True,
        what="671B-A37B on 256 GPUs",
        source="NeMo Automodel's performance summary",
        parameters=671.0,
        tokens=1_002,
    ),
)
"""The best of each class, and the speeds of single models."""

ALIKE = 0.03
"""A model counts as a published one if its number of parameters differs by at most this part."""


def get_warning(program: Program, gpu: str, mfu: float, tokens: float) -> Iterator[str]:
    """A line where a prediction is above the best published speed of this model, or else of its
    class; none elsewhere.

    `tokens` are predicted for each second and GPU.
    """
    best = get_best(program, gpu)
    if best is None:
        return
    if best.mfu and mfu > best.mfu:
        figures = f"MFU {mfu:.1%} is above {best.mfu:.1%}"
    elif not best.mfu and tokens > best.tokens:
        figures = f"{tokens:,.0f} tokens/s/GPU are above {best.tokens:,.0f}"
    else:
        return
    yield (
        f"{figures}, the best that is published ({best.what}; {best.source}): measure before"
        " you rely on it"
    )


def get_best(program: Program, gpu: str) -> Published | None:
    """The published speed of a model of the same size, or the best of its class; None where
    there is neither.
    """
    billions = parameter_count(program) / 1e9
    if program.train.precision != "bf16":
        return None
    best_of_class: Published | None = None
    for speed in BEST:
        if speed.gpu != gpu or speed.has_experts != bool(program.choices):
            continue
        if speed.parameters and abs(billions / speed.parameters - 1) < ALIKE:
            return speed
        if not speed.parameters and best_of_class is None:
            best_of_class = speed
    return best_of_class
