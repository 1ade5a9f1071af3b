"""From the configuration of a Hugging Face model (`config.json`) to a plan that trains the same model.

Purpose: a plan with the model in it, one file to read and change: the text of a model of `plans/models` with the
configuration's sizes.  What a plan cannot express is an error at its field, never left out in silence.
Non-goals: weights (`train.py --init` reads them), and how to train: batch, steps and learning rate are examples.
"""

from ...syntax.diagnostics import did_you_mean, listing
from ...syntax.source import Source
from .config import TEXT, Config, as_json
from .plan_text import plan_text
from .registry import FAMILIES


def import_config(source: Source) -> str:
    """The plan of a configuration.  Raises PlanError."""
    config = Config(source)
    kind: str = config.read("model_type", TEXT)
    config.found.check()
    if kind not in FAMILIES:
        help = did_you_mean(kind, FAMILIES) or f"there are {listing(FAMILIES)}"
        config.wrong("E0801", f"there is no model for `{kind}`", "model_type", help=help)
        config.found.check()
    family = FAMILIES[kind]
    _is_language_model(config, family.architecture)
    model = family.model(config)
    config.check()
    config.found.check()
    return plan_text(kind, model, config.left_out)


def _is_language_model(config: Config, wanted: str) -> None:
    """A configuration may leave out the class, but not name another: its outputs would not be those of a plan."""
    given: object = config.take("architectures")
    if given not in (None, [], [wanted]):
        message = f"`architectures` is `{as_json(given)}`: this is not a language model"
        config.wrong("E0801", message, "architectures", help=f"a plan is written for `{wanted}`")
