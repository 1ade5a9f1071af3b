"""`.venv/bin/python benchmarks/contexts.py`: attention over a sharded sequence, a ring and Ulysses,
beside torch's.

Forward and backward of one causal attention on 2 gloo ranks.  torch's `context_parallel` replaces
calls of its kernels for CUDA; here its ring (`_templated_ring_attention`) is given the kernel for
the CPU, which ours calls too.  Both lie in a zigzag.  torch's ring gathers all keys at first by
default, and passes them on by `alltoall`.  Ulysses beside it is written by hand with torch's
`all_to_all_single_autograd`, as DeepSpeed has it.

Non-goals: overlap, of which gloo on few cores shows little (`ring.py`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from measure import asked_quick, where
from torch import Tensor
from torch.autograd import Function
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.nn.functional import scaled_dot_product_attention
from two_ranks import RANKS, Comparison, Step, compare

from scalec.runtime import Mesh
from scalec.runtime.comm.collectives import all_to_all
from scalec.runtime.ops.attention import attention
from scalec.runtime.ops.ring_attention import ring_attention

HEADS, KV_HEADS, WIDTH = 8, 8, 64
"""As many heads of keys: torch's kernel for the CPU takes no fewer."""
PORT = 29471
ATEN: Any = cast(Any, torch.ops).aten
FORWARD = ATEN._scaled_dot_product_flash_attention_for_cpu
BACKWARD = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The result [batch, positions of the rank, heads, width] of queries, keys and values of this
form.
"""


def main() -> None:
    quick = asked_quick(__doc__)
    print(f"{where()}, {RANKS} gloo ranks, one thread each")
    comparisons: list[Comparison] = []
    for positions in (256,) if quick else (256, 1024):
        size = f"{positions} positions of a rank, {HEADS} heads of {WIDTH}"
        comparisons.append(
            Comparison(f"A ring: {size}", partial(_rings, positions), "torch, alltoall")
        )
        comparisons.append(
            Comparison(f"Ulysses: {size}", partial(_ulysses, positions), "torch, by hand")
        )
    compare(comparisons, 2 if quick else 20, PORT)


def _rings(positions: int, rank: int) -> Mapping[str, Step]:
    axis = Mesh({"cp": RANKS}).axis("cp")
    ways: dict[str, Attention] = {
        "ours": lambda q, k, v: ring_attention(q, k, v, axis, zigzag=True),
        "torch, alltoall": partial(_torchs_ring, "alltoall"),
        "torch, allgather": partial(_torchs_ring, "allgather"),
    }
    return _steps(ways, positions)


def _ulysses(positions: int, rank: int) -> Mapping[str, Step]:
    axis = Mesh({"cp": RANKS}).axis("cp")

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (all_to_all(each, axis, dim_from=1, dim_to=2) for each in (q, k, v))
        return all_to_all(attention(q, k, v), axis, dim_from=2, dim_to=1)

    return _steps({"ours": ours, "torch, by hand": _torchs_ulysses}, positions)


def _steps(ways: Mapping[str, Attention], positions: int) -> dict[str, Step]:
    operands = [torch.randn(1, positions, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    gradient = torch.randn(1, positions, HEADS, WIDTH)
    return {name: partial(_step, way, operands, gradient) for name, way in ways.items()}


def _step(way: Attention, operands: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    """The result and the gradients of the operands."""
    own = [each.detach().requires_grad_() for each in operands]
    out = way(*own)
    gradients = torch.autograd.grad(out, own, gradient)
    return out.detach(), *gradients


# ---- torch's


class _Ring(Function):
    """torch's ring, [batch, heads, positions, width], as its dispatcher would call it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group: Any = dist.group.WORLD
        out, lse, *_ = torchs._templated_ring_attention(
            group, 2, FORWARD, q, k, v, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group: Any = dist.group.WORLD
        found = torchs._templated_ring_attention_backward(
            group,
            2,
            BACKWARD,
            grad_outputs[0],
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            is_causal=True,
            dropout_p=0.0,
        )
        return found[0], found[1], found[2]


def _torchs_ring(method: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torchs.set_rotate_method(method)
    by_head = (each.transpose(1, 2) for each in (q, k, v))
    return cast(Tensor, cast(Any, _Ring).apply(*by_head)).transpose(1, 2)


def _torchs_ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (_heads_for_positions(each).transpose(1, 2) for each in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    return _positions_for_heads(out.transpose(1, 2))


def _heads_for_positions(x: Tensor) -> Tensor:
    """[b, s / ranks, h, d] → [b, s, h / ranks, d]"""
    batch, positions, heads, width = x.shape
    parts = (
        x.view(batch, positions, RANKS, heads // RANKS, width).permute(2, 0, 1, 3, 4).contiguous()
    )
    came = _exchanged(parts)
    return came.permute(1, 0, 2, 3, 4).reshape(batch, RANKS * positions, heads // RANKS, width)


def _positions_for_heads(x: Tensor) -> Tensor:
    """[b, s, h / ranks, d] → [b, s / ranks, h, d]"""
    batch, positions, heads, width = x.shape
    parts = x.reshape(batch, RANKS, positions // RANKS, heads, width).transpose(0, 1).contiguous()
    came = _exchanged(parts)
    return came.permute(1, 2, 0, 3, 4).reshape(batch, positions // RANKS, RANKS * heads, width)


def _exchanged(parts: Tensor) -> Tensor:
    group: Any = dist.group.WORLD
    return all_to_all_single_autograd(parts, None, None, group)


if __name__ == "__main__":
    main()
