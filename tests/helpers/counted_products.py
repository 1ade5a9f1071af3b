"""Which products of matrices run, as torch's dispatcher sees them."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_OPS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm)


class _Products(TorchDispatchMode):
    def __init__(self, found: list[tuple[int, ...]]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.overloadpacket in _OPS:
            self._found.append(tuple(result.shape))
        return result


@contextmanager
def products() -> Generator[list[tuple[int, ...]]]:
    """The shapes of the results of all that run within it, in order."""
    found: list[tuple[int, ...]] = []
    with _Products(found):
        yield found
