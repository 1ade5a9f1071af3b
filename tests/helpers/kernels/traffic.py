"""How many bytes kernels load and store of each operand and result, counted under Triton's
interpreter.

    python tests/helpers/kernels/traffic.py

prints as JSON, of each launch of some calls, its kernel and by parameter how often all bytes were
loaded, and stored.

Non-goals: what caches keep from memory; which accesses are wide (`machine_code`).
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

Times = dict[str, tuple[float, float]]
"""By parameter."""


@cache
def traffic() -> list[tuple[str, Times]]:
    """Each launch's kernel, and how often it loads and stores what it is given; in a process of
    its own.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return [
        (name, {key: tuple(each) for key, each in times.items()})
        for name, times in json.loads(result.stdout)
    ]


@dataclass
class _Count:
    """Bytes by place: of each tensor of one launch, from where it lies in memory on."""

    tensors: dict[str, Tensor]
    loaded: Counter[str] = field(default_factory=Counter[str])
    stored: Counter[str] = field(default_factory=Counter[str])

    def add(self, counter: Counter[str], pointers: Any, mask: Any) -> None:
        """Counts one access."""
        places = pointers.data[mask.data.astype(bool)]
        if places.size:
            size = pointers.get_element_ty().primitive_bitwidth // 8
            counter[self._of(int(places.min()))] += places.size * size

    def _of(self, place: int) -> str:
        return next(
            name for name, it in self.tensors.items() if 0 <= place - it.data_ptr() < _extent(it)
        )

    def times(self) -> Times:
        """How often all of each tensor was loaded, and stored."""
        sizes = {name: it.numel() * it.itemsize for name, it in self.tensors.items()}
        return {
            name: (self.loaded[name] / size, self.stored[name] / size)
            for name, size in sizes.items()
        }


def _extent(x: Tensor) -> int:
    """Bytes from its first to its last element."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    ) * x.itemsize


@contextmanager
def _counted() -> Iterator[list[tuple[str, Times]]]:
    from triton.runtime.interpreter import interpreter_builder as builder

    from scalec.runtime.kernels import launching

    found, launch = list[tuple[str, Times]](), launching.launch
    load, store = builder.create_masked_load, builder.create_masked_store

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        names = kernel.arg_names
        count = _Count(
            {name: arg for name, arg in zip(names, args, strict=False) if isinstance(arg, Tensor)}
        )

        def loading(pointers: Any, mask: Any, *rest: Any) -> Any:
            count.add(count.loaded, pointers, mask)
            return load(pointers, mask, *rest)

        def storing(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            count.add(count.stored, pointers, mask)
            return store(pointers, value, mask, *rest)

        with (
            patch.object(builder, "create_masked_load", loading),
            patch.object(builder, "create_masked_store", storing),
        ):
            launch(kernel, grid, *args, **options)
        found.append(
            (f"{kernel.fn.__module__.rpartition('.')[-1]}.{kernel.fn.__name__}", count.times())
        )

    with patch.object(launching, "launch", record):
        yield found


def _calls() -> None:
    """Each kernel that is bound by memory, forward and backward, with tails of rows and columns."""
    from scalec.runtime import Experts, Mesh, kernels, sort_by_expert
    from scalec.runtime.state.optimizers import ParamGroup, Part

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    def differentiate(*results: Tensor) -> None:
        results = tuple(it for it in results if it.requires_grad)
        torch.autograd.backward(results, [torch.randn(it.shape) for it in results])

    tile = kernels.Tile(rows=2, warps=4, programs=2)
    for width in (24, 2100):
        differentiate(
            *kernels.AddLayerNorm({width: tile})(
                randn(7, width), randn(7, width), randn(width), randn(width), eps=1e-5
            )
        )
    gate = kernels.SiluMul({40: kernels.Tile(rows=2, warps=4, columns=16)})
    differentiate(gate(randn(7, 40), randn(7, 40)))
    differentiate(
        *kernels.RopePair({8: tile})(
            randn(5, 1, 4, 8), randn(5, 1, 2, 8), torch.randn(2, 5, 1, 1, 6)
        )
    )
    loss = kernels.CrossEntropy({100: kernels.Tile(rows=1, warps=4, columns=64)})
    differentiate(loss(randn(5, 100), torch.arange(5)))
    order = sort_by_expert(torch.arange(14).view(7, 2) % 6, Experts(Mesh({}), 6))
    rows, block = randn(14, 40), {40: kernels.Tile(rows=2, warps=4, columns=16)}
    differentiate(kernels.Dispatch(block)(randn(7, 40), order))
    differentiate(kernels.Combine(block)(rows, torch.rand(7, 2, requires_grad=True), order))
    p, g, m, v, copies = (torch.rand(2, 100) for _ in range(5))
    part = Part(ParamGroup(), p, g, {"exp_avg": m, "exp_avg_sq": v}, copies)
    kernels.AdamW(tile=kernels.Tile(rows=1, warps=4, columns=64)).update(
        part, 1e-3, torch.ones(()), torch.zeros(())
    )
    kernels.Accumulate()(torch.zeros(100), torch.ones(100, dtype=torch.float16))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    with _counted() as found:
        _calls()
    print(json.dumps(found))
