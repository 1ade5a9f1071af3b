"""Which element types a step has: in which the model computes, what is kept of it, and what ranks exchange.

Non-goals: where a value changes its element type (`place_state`, `fuse_buckets`).
"""

from ..config.settings import Train
from ..ir import ITEM_BYTES, PRECISIONS
from ..syntax.diagnostics import Diagnostics


def element_types(train: Train) -> tuple[str, str]:
    """Those of activations and of parameters' state of record.  Raises PlanError where settings contradict."""
    found = Diagnostics()
    master = train.master or ("fp64" if train.precision == "fp64" else "fp32")
    if master != train.precision and _bytes(master) <= _bytes(train.precision):
        found.error(
            "E0411",
            f"masters of {master} are less precise than the {train.precision} in which the model computes",
            train.spans["master"],
            help=f"leave `master` out, or compute in `precision = {master}`",
        )
    if train.reduce and train.reduce != master and _bytes(train.reduce) >= _bytes(master):
        found.error(
            "E0411",
            f"sums in {train.reduce} are no more precise than the {master} in which gradients are added up",
            train.spans["reduce"],
            help="leave `reduce` out",
        )
    elif train.reduce == "fp16" and train.precision != "fp16":
        found.error(
            "E0411",
            "without a loss scale gradients are too small for sums in fp16",
            train.spans["reduce"],
            help="write `reduce = bf16`, which takes as many bytes, or `precision = fp16`, which has a loss scale",
        )
    found.check()
    return PRECISIONS[train.precision], PRECISIONS[master]


def _bytes(precision: str) -> int:
    return ITEM_BYTES[PRECISIONS[precision]]
