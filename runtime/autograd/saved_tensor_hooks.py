"""Saved-tensor hooks that chain to the enclosing ones: torch itself calls only the innermost.

Non-goals: hooks of our own (`again`, `collectives`).
"""

import importlib
from typing import Any

from torch import Tensor

_autograd: Any = importlib.import_module("torch._C._autograd")  # torch's stubs do not know it


class Around:
    """The hooks at the time it is made, as functions; without any, tensors are kept as they are."""

    def __init__(self) -> None:
        self._hooks = _autograd._top_saved_tensors_default_hooks(False)

    def pack(self, saved: Tensor) -> Any:
        """What is kept of a tensor."""
        return self._hooks[0](saved) if self._hooks else saved

    def unpack(self, packed: Any) -> Tensor:
        """The tensor of which this was kept."""
        return self._hooks[1](packed) if self._hooks else packed
