"""What a plan cannot ask of layers that torch.compile makes a graph of.

Inside a graph torch.compile decides itself what backward makes again.
Non-goals: pipelines whose backward is in two parts (`schedule_pipeline`).
"""

from ..config.settings import ON, Train
from ..syntax.diagnostics import Diagnostics, Note


def check_compiled(train: Train) -> None:
    """Raises PlanError where parts of a layer are to be made again, and layers to be compiled."""
    found = Diagnostics()
    if train.compile == ON:
        asked = Note(train.spans["compile"], "layers are compiled")
        if train.recompute.word == "selective":
            found.error(
                "E0412",
                "torch.compile itself chooses what to recompute in a layer",
                train.spans["recompute"],
                notes=[asked],
                help="write `recompute = full` or `every(2, layers)` for whole layers, or leave `compile` out",
            )
        if train.gathered == "regather":
            found.error(
                "E0412",
                "a compiled layer saves its gathered activations",
                train.spans["gathered"],
                notes=[asked],
                help="write `recompute = full`, which also regathers in backward, or leave `compile` out",
            )
    found.check()
