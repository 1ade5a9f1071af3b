"""The first value of a step that is not finite, with its line of the plan: the step is run once
more, call by call.

It sees calls of torch's functions and of functions that act as they do, and gradients by hooks on
the calls' results.  The host reads each result, which is slow: only a run that ends does this.
"""

import linecache
import re
import sys
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .source_lines import place

_UNSET = {
    *"empty empty_like new_empty empty_strided".split(),
    *"masked_fill masked_fill_ full full_like fill_".split(),
}
"""Functions whose results have no values yet, or have infinities by intention."""


class FirstValue(TorchFunctionMode):
    """While entered, notes the first value that is not finite on this rank; `file` is the
    program's.
    """

    def __init__(self, model: nn.Module, file: str) -> None:
        super().__init__()
        self._file, self._results, self.found = file, 0, ""
        self.order: list[int] = []
        """Sorts the values that ranks have found: forward before backward of a microbatch, then
        by the number of the result.
        """
        self._inside: list[str] = []
        self._calls: dict[str, int] = {}
        self._hooks: list[Any] = []
        for name, module in cast(Any, model).named_modules():
            self._hooks += [module.register_forward_pre_hook(partial(self._enter, name))]
            self._hooks += [module.register_forward_hook(self._leave)]

    def __exit__(self, *raised: Any) -> None:
        """Takes its hooks off the model, also where the step has raised."""
        cast(Any, super()).__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)
        self._calls[name] = self._calls.get(name, 0) + 1

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not self.found and self._inside and getattr(func, "__name__", "") not in _UNSET:
            several = isinstance(results, tuple)
            for value in cast("tuple[Any, ...]", results) if several else (results,):
                if isinstance(value, Tensor) and value.is_floating_point():
                    self._look(value, getattr(func, "__name__", "?"))
        return results

    def _look(self, value: Tensor, function: str) -> None:
        description, self._results = self._here(function), self._results + 1
        order = [self._calls[self._inside[0]], 0, self._results]
        if not _is_finite(value):
            self.found, self.order = description, order
        elif value.requires_grad and not value.is_leaf:
            cast(Any, value).register_hook(partial(self._gradient, description, order))

    def _gradient(self, description: str, order: list[int], gradient: Tensor) -> None:
        if not self.found and not _is_finite(gradient):
            self.found, self.order = f"the gradient of {description}", [order[0], 1, -order[2]]

    def _here(self, function: str) -> str:
        """For instance ``y` in layers.1, microbatch 1, at llama.scale:25, train.py:84 (linear)`."""
        frame = cast(Any, sys)._getframe(1)
        while frame and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        name, where = "a result", ""
        if frame:
            line = linecache.getline(self._file, frame.f_lineno)
            if assignment := re.match(r"\s*(\w+) = ", line):
                name = f"`{assignment[1]}`"
            where = f", at {place(self._file, frame.f_lineno)}"
        module = f" in {self._inside[-1]}" if self._inside[-1] else ""
        return f"{name}{module}, microbatch {self._calls[self._inside[0]]}{where} ({function})"


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value.detach()).all())
