"""Shows that no loss depends on a token that it must not see: such tokens are replaced, and it
stays the same.

Purpose: a second opinion on `analysis.causality`, by values, of the single-device model.
Non-goals: saying which op lets a token in.
"""

from collections.abc import Iterator

import numpy as np
from attrs import evolve

from ..analysis.causality import DOCUMENTS, LABELS, TOKENS, WORDS, has_documents, shares_capacity
from ..analysis.vocabulary import vocabulary
from ..ir import Program
from .inputs import Inputs, below
from .interpreter import differing
from .reference import Reference
from .tensors import Array, Numbers, Tensor


def depends_on_hidden_tokens(model: Program, start: Inputs, numbers: Numbers) -> bool:
    """Whether a loss of the model depends on a token that it must not see."""
    for before, after in _scenes(model, start, numbers.seed):
        losses = (Reference(model, numbers).loss(inputs) for inputs in (before, after))
        if differing(numbers, *losses):
            return True
    return False


def _scenes(model: Program, start: Inputs, seed: int) -> Iterator[tuple[Inputs, Inputs]]:
    """Inputs, and the same with all tokens replaced on which no loss must depend.

    Every second sequence has no labels.  The others have labels up to a position, within the
    document there.  There are as many scenes as it takes for every position but the last to be the
    last label of a sequence.
    """
    tokens = start.inputs[TOKENS].array
    shape: tuple[int, ...] = tokens.shape
    ids = model.valid(vocabulary(model))
    labels = below(ids, (seed, "all labels"), shape)
    others = (tokens + 1 + below(max(ids - 1, 1), (seed, "other tokens"), shape)) % ids
    first_last_label = 0
    while first_last_label < shape[-1] - 1:
        last_label, sequences = _last_labels(shape, first_last_label)
        counts, is_visible = _masks(model, start, last_label)
        before = _with(start, LABELS, np.where(counts, labels, -1))
        yield before, _with(before, TOKENS, np.where(is_visible, tokens, others))
        first_last_label += sequences


def _last_labels(shape: tuple[int, ...], first: int) -> tuple[Array, int]:
    """The position of the last label of each sequence, -1 where it has none; and how many have
    some.
    """
    *_, seq = shape
    number = np.arange(np.prod(shape[:-1])).reshape(*shape[:-1], 1)
    position = (first + number // 2) % (seq - 1)
    return np.where(number % 2 == 0, position, -1), (number.size + 1) // 2


def _masks(model: Program, start: Inputs, last_label: Array) -> tuple[Array, Array]:
    """The tokens whose losses count, and the tokens on which they may depend."""
    seq: int = start.inputs[TOKENS].array.shape[-1]
    (position,) = np.ogrid[:seq,]
    counts: Array = position <= last_label
    is_visible: Array = counts
    if WORDS["later"] in model.sees:
        is_visible = last_label >= 0
    if has_documents(model) and WORDS["document"] not in model.sees and not shares_capacity(model):
        documents = start.inputs[DOCUMENTS].array
        is_alike: Array = documents == np.take_along_axis(
            documents, np.maximum(last_label, 0), axis=-1
        )
        counts, is_visible = counts & is_alike, is_visible & is_alike
    return counts, is_visible


def _with(start: Inputs, name: str, array: Array) -> Inputs:
    """The inputs with another array of one of them."""
    return evolve(start, inputs=start.inputs | {name: Tensor(start.inputs[name].dims, array)})
