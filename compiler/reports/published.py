"""The best speeds that others have published, by class of model and GPU: what a prediction above
them is compared with.

MFU counts causal attention by the pairs that are seen, and no parameters of the input embedding, as
ours does.
"""

from collections.abc import Iterator

from attrs import frozen

from ..analysis.communication import parameter_count
from ..ir import Program


@frozen
class Published:
    """A published speed of training in bf16: MFU, or 0.0 where that does not follow from what is
    published.

    parameters  in billions, of the model alone that has this speed; 0.0 where it is the best of its
                class
    tokens      a second and GPU, of that model
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
"""The best of each class, and of models that are published by themselves."""

ALIKE = 0.03
"""The part by which the parameters of a model may differ from those of a published one to be
the same.
"""


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
    of_class = [
        each
        for each in BEST
        if each.gpu == gpu
        and each.has_experts == bool(program.choices)
        and program.train.precision == "bf16"
    ]
    same = [
        each for each in of_class if each.parameters and abs(billions / each.parameters - 1) < ALIKE
    ]
    others = [each for each in of_class if not each.parameters]
    return next(iter([*same, *others]), None)
