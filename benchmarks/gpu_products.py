"""Kernels with products in them: attention beside torch's, and head + loss without logits beside
both as they are.

Causal attention is counted as half of s²: 2 s² d FLOP for each head forward, 5 s² d backward, which
makes scores again.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu import GIB, Machine, tiles
from gpu_kernels import TOY, Sizes, parts
from torch import Tensor
from torch.nn import functional as F

ATTENTION = ("attention", "part", "kernel", "TFLOP/s", "torch", "TFLOP/s", "beside torch")
HEADS = ("head + loss", "peak memory", "but for gradients", "of unfused", "time", "of unfused")


def attention_rows(machine: Machine) -> Iterator[tuple[str, ...]]:
    """Rows at 4k and 8k tokens of one step's 8k, forward and backward."""
    from scalec import runtime
    from scalec.runtime import kernels  # needs triton

    sizes = TOY if machine.toy else Sizes()
    n, k, d = sizes.heads, sizes.kv_heads, sizes.head_dim
    ours = kernels.Attention(tiles(kernels, "Attention", d))
    for rows in (2, 1):
        s = sizes.tokens // rows
        operands = [machine.randn(rows, s, heads, d) for heads in (n, k, k)]
        ops: list[Callable[..., Any]] = [
            lambda *it: ours.partial(*it)[0],
            lambda *it: runtime.attention(*it[:3]),
        ]
        flop = rows * n * s * s * d
        shape = f"{rows} × {s} tokens, {n} and {k} heads of {d}"
        try:
            times = parts(machine, ops, operands, (1,))
        except Exception as error:  # of any kind: the other shape is still to be measured
            yield (shape, machine.failure(error), *[""] * 5)
            continue
        for part, factor, (mine, torchs) in zip(
            ("forward", "backward"), (2, 5), times, strict=True
        ):
            rates = [f"{factor * flop / ms / 1e9:.0f}" for ms in (mine, torchs)]
            yield (
                shape,
                part,
                f"{mine:.3f} ms",
                rates[0],
                f"{torchs:.3f} ms",
                rates[1],
                f"{mine / torchs:.2f}×",
            )
    machine.clear()


def head_rows(machine: Machine) -> Iterator[tuple[str, ...]]:
    """Forward and backward together: with logits, eager and compiled, and without, by tokens
    and by classes.
    """
    from scalec import runtime
    from scalec.runtime import kernels

    sizes = TOY if machine.toy else Sizes()
    vocab, labels = sizes.vocab, torch.randint(sizes.vocab, (sizes.tokens,), device=machine.device)
    x, weight = machine.randn(sizes.tokens, sizes.hidden), machine.randn(sizes.vocab, sizes.hidden)
    by_tokens = kernels.LinearCrossEntropy(tiles(kernels, "LinearCrossEntropy", vocab), chunk=1024)
    by_classes = kernels.LinearSoftmaxStats(tiles(kernels, "LinearSoftmaxStats", vocab), chunk=8064)

    def in_parts(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        _, z, t = by_classes(x, weight, labels)
        return runtime.token_loss(z, t, labels)

    ways = {
        "unfused, eager": _unfused,
        "unfused, torch.compile": machine.compile(_unfused),
        "LinearCrossEntropy, 1024 tokens at a time": by_tokens,
        "LinearSoftmaxStats, 8064 classes at a time": in_parts,
    }
    first: tuple[int, float] | None = None
    for name, way in ways.items():
        call = partial(_both, way, x, weight, labels)
        try:
            call()
            peak, ms = machine.peak_bytes(call), machine.milliseconds(call, cold=False)
        except Exception as error:  # of any kind: the other ways are still to be measured
            yield (name, machine.failure(error), *[""] * 4)
            continue
        inside = peak - (x.nbytes + weight.nbytes if machine.on_gpu else 0)
        first = first or (inside, ms)
        of_first = f"{inside / first[0]:.1%}" if first[0] else ""
        yield (
            name,
            f"{peak / GIB:.2f} GiB",
            f"{inside / GIB:.2f} GiB",
            of_first,
            f"{ms:.2f} ms",
            f"{ms / first[1]:.2f}×",
        )
    machine.clear()


def _unfused(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")


def _both(way: Callable[..., Tensor], x: Tensor, weight: Tensor, labels: Tensor) -> object:
    return torch.autograd.grad(way(x, weight, labels), (x, weight))
