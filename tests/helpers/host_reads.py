"""Reads of tensors on the host by ops and communication of the runtime: on a GPU each of them
would wait for it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

READS = (
    "tolist",
    "item",
    "nonzero",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """The methods by which a tensor is read within the block, each where it is called."""
    found: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        def method(*args: Any) -> Any:
            caller = sys._getframe(1)
            if any(
                f"/runtime/{folder}/" in caller.f_code.co_filename
                for folder in ("ops", "comm", "kernels")
            ):
                found.append(f"{name} in {caller.f_code.co_qualname}")
            return read(*args)

        return method

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, watched(name))
        yield found
