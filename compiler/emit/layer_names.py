"""Names the classes of repeats: `Layer`, and where branches of the plan make several repeats of
one, `DenseLayer` and `MoELayer`.

Non-goals: names of their attributes, which are keys of checkpoints (`module`).
"""

from collections import Counter

from attrs import frozen

from ..ir import Program, walk, walk_regions
from ..ops.experts import DISPATCH
from .naming import class_name, singular


@frozen
class LayerName:
    """The name of the class of a repeat's body, and its words in a docstring."""

    of_class: str
    in_words: str


DENSE, EXPERTS = ("Dense", "dense"), ("MoE", "mixture-of-experts")
"""The words for layers without experts and with experts, in a class' name and in a docstring."""


def make_layer_names(program: Program) -> dict[str, LayerName]:
    """The names of the layers of each repeat, by dim.

    Only a repeat that is a part of another one, `layers_1` of `layers`, says what its layers are,
    and only where no other part has such layers; else its number keeps it apart.
    """
    words_of_dim = dict[str, tuple[str, str]]()
    for region in walk_regions(program.forward.body):
        has_experts = any(op.kind == DISPATCH.name for op in walk(region.body))
        words_of_dim[region.dim] = EXPERTS if has_experts else DENSE
    parts = Counter((_whole(dim), words) for dim, words in words_of_dim.items())
    names = dict[str, LayerName]()
    for dim, words in words_of_dim.items():
        whole = _whole(dim)
        others = [other for other in words_of_dim if other != dim and _whole(other) == whole]
        layer = singular(whole)
        names[dim] = LayerName(class_name(singular(dim)), layer)
        if others and parts[whole, words] == 1:
            prefix, adjective = words
            names[dim] = LayerName(f"{prefix}{class_name(layer)}", f"{adjective} {layer}")
    return names


def _whole(dim: str) -> str:
    """The dim that a part's dim is numbered after: `layers` of `layers_1`."""
    stem, _, number = dim.rpartition("_")
    return stem if stem and number.isdecimal() else dim
