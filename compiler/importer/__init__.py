"""From the configuration of a Hugging Face model (`config.json`) to a plan that trains the same model.

Purpose: a plan with the model in it, one file to read and change: the text of a model of `plans/models` with the
configuration's sizes.  What a plan cannot express is an error at its field, never left out in silence.
Non-goals: weights (`train.py --init` reads them), and how to train: batch, steps and learning rate are examples.
"""

from ..diagnostics import Diagnostic, PlanError, did_you_mean, listing
from ..source import Source
from .config import Config
from .families import FAMILIES
from .text import plan_text


def import_config(source: Source) -> str:
    """The plan of a configuration.  Raises PlanError."""
    config = Config(source)
    kind = str(config.take("model_type", ""))
    if kind not in FAMILIES:
        help = did_you_mean(kind, FAMILIES) or f"there are {listing(FAMILIES)}"
        raise PlanError([Diagnostic("E0801", f"there is no model for `{kind}`", config.span("model_type"), help=help)])
    model = FAMILIES[kind](config)
    config.check()
    return plan_text(kind, model, config.left_out)
