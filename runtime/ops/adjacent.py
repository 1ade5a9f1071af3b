"""Adjacent tensors: consecutive slices of the last dim of one tensor.

Non-goals: who makes them so.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

from torch import Tensor
from torch.compiler import is_compiling


def joint(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor [..., Σn] that `parts` [..., n] are slices of; None if they are not."""
    if not are_beside(parts):
        return None
    first = parts[0]
    return first.as_strided((*first.shape[:-1], sum(part.shape[-1] for part in parts)), first.stride())


def are_beside(parts: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before ends, in each row of one piece of memory; in a graph nobody can say."""
    if is_compiling() or any(part.stride(-1) != 1 for part in parts):
        return False
    return all(
        _storage(first) == _storage(second)
        and first.stride() == second.stride()
        and first.shape[:-1] == second.shape[:-1]
        and first.storage_offset() + first.shape[-1] == second.storage_offset()
        for first, second in pairwise(parts)
    )


def _storage(x: Tensor) -> int:
    return cast(Any, x.untyped_storage())._cdata


def beside(parts: Sequence[Tensor]) -> list[Tensor]:
    """Empty tensors like `parts` [..., n], which lie as those do: as slices of one, or each in memory of its own."""
    if not are_beside(parts):
        return [part.new_empty(part.shape) for part in parts]
    sizes = [part.shape[-1] for part in parts]
    return [*parts[0].new_empty((*parts[0].shape[:-1], sum(sizes))).split_with_sizes(sizes, dim=-1)]
