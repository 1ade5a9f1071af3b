"""The masks of dropout, as docs/language.md says them, in numpy: by splitmix64 (Steele, Lea, Flood
2014, figure 16).

Non-goals: other orders of dims than [rows, …], in which the elements of a row are counted.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Draws = NDArray[np.uint64]
"""A word for each row."""


def draws_of(values: Tensor) -> Draws:
    """The dims that a batch has."""
    return values.numpy().astype(np.uint64)


def forked(draws: Draws, layer: int) -> Draws:
    """The draws of one layer of a repeat."""
    return _word(draws, np.uint64(2**64 - 1 - layer))


def dropped(x: Tensor, draws: Draws, site: int, p: float) -> Tensor:
    """x with what falls below `p` dropped, at one of the dropouts of a model, counted from 1."""
    index = np.arange(np.prod(x.shape[1:], dtype=int), dtype=np.uint64).reshape(x.shape[1:])
    keys = _word(draws, np.uint64(site)).reshape(-1, *(1,) * index.ndim)
    kept = (_word(keys, index) >> np.uint64(11)) / 2**53 >= p
    return x * torch.from_numpy(kept / (1 - p))


def _word(begin: Draws, step: Draws | np.uint64) -> Draws:
    with np.errstate(over="ignore"):
        z = begin + step * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
