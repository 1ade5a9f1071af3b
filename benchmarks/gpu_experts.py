"""A mixture of experts on one GPU, in the shape of Qwen3-30B-A3B: rows beside a copy, products
beside a dense one.

Rows are compared by the bytes that a call must move at least, products by operations: a dense
product has as many.  A layer's whole route is compared with its products alone; bar: 1.15 times
their time.  `ours` of products is the kernel where torch has one too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast
from unittest.mock import patch

import torch
from gpu import GIB, Machine, tiles
from gpu_kernels import parts
from torch import Tensor
from torch.nn import functional as F

from scalec import runtime
from scalec.runtime.comm.experts import ExpertRows, Order
from scalec.runtime.comm.mesh import Axis
from scalec.runtime.ops import grouped_linear

EXPERTS = ("experts", "part", "ours", "plain torch", "beside a copy, or products")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, and of the tokens of a call."""

    tokens: int = 16384
    experts: int = 128
    k: int = 8
    hidden: int = 2048
    ffn: int = 768
    product_rows: int = 16384
    copied: int = GIB


TOY = Sizes(tokens=16, experts=4, k=2, hidden=64, ffn=32, product_rows=16, copied=1 << 10)


def expert_rows(machine: Machine) -> Iterator[tuple[str, ...]]:
    """A row for each function and part, as soon as it is measured."""
    sizes = TOY if machine.toy else Sizes()
    for made in (_moved, _bookkeeping, _products, _layer):
        try:
            yield from made(machine, sizes)
        except Exception as error:  # of any kind: the others are still to be measured
            yield (made.__name__.strip("_"), "", machine.failure(error), "", "")
        machine.clear()


class Nowhere:
    """In the place of a group: nothing is sent, and memory is what it was."""

    def alltoall_base(self, *_: object) -> Self:
        return self

    def wait(self) -> None: ...


def _order(machine: Machine, tokens: int, sizes: Sizes) -> Order:
    ids = torch.rand(tokens, sizes.experts, device=machine.device).argsort(-1)[:, : sizes.k]
    order = runtime.sort_by_expert(
        ids, runtime.Experts(runtime.Mesh({}, machine.device), sizes.experts)
    )
    assert order.total == tokens * sizes.k
    return order


def _moved(machine: Machine, sizes: Sizes) -> Iterator[tuple[str, ...]]:
    from scalec.runtime import kernels  # needs triton

    source = torch.empty(sizes.copied, dtype=torch.int8, device=machine.device)
    rate = 2 * sizes.copied / machine.milliseconds(partial(torch.empty_like(source).copy_, source))
    del source
    order, tile = _order(machine, sizes.tokens, sizes), tiles(kernels, "Combine", sizes.hidden)
    of_tokens = sizes.tokens * sizes.hidden * machine.dtype.itemsize
    x, rows = machine.randn(sizes.tokens, sizes.hidden), machine.randn(order.total, sizes.hidden)
    gates = torch.rand(sizes.tokens, sizes.k, device=machine.device, requires_grad=True)
    k, everything = sizes.k, [order.total]
    axis = Axis("ep", 2, 0, cast(Any, Nowhere()))
    held = ExpertRows(
        axis, order.counts, everything, everything, order.choices, order.rows.flatten()
    )
    subjects: list[tuple[str, Any, Any, Sequence[Tensor], object, int, int]] = [
        ("dispatch", kernels.Dispatch(tile), runtime.dispatch, (x,), order, 1 + k, 1 + k),
        ("combine", kernels.Combine(tile), runtime.combine, (rows, gates), order, 1 + k, 1 + 2 * k),
        ("regrouping", kernels.Exchange(tile), runtime.exchange, (rows,), held, 2 * k, 2 * k),
    ]
    for name, ours, plain, operands, by, *moved in subjects:
        times = parts(machine, (ours, plain), operands, (by,))
        for part, bytes, (mine, torchs) in zip(("forward", "backward"), moved, times, strict=True):
            yield (name, part, *_times(mine, torchs), f"{bytes * of_tokens / mine / rate:.0%}")


def _bookkeeping(machine: Machine, sizes: Sizes) -> Iterator[tuple[str, ...]]:
    logits = torch.randn(1, sizes.tokens, sizes.experts, device=machine.device, requires_grad=True)
    chosen: dict[str, Any] = {"k": sizes.k, "normalise": True}
    ids, experts = runtime.top_k(logits, **chosen)[1], _order(machine, sizes.tokens, sizes).experts
    subjects: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("top_k", "TopK", runtime.top_k, chosen),
        ("balance", "Balance", runtime.balance, {"ids": ids, "by": 0.01}),
        ("router_z", "RouterZ", runtime.router_z, {"by": 0.001}),
    ]
    for name, kernel, plain, options in subjects:
        ways = [partial(each, **options) for each in (_of_router(kernel, sizes), plain)]
        for part, times in zip(
            ("forward", "backward"), parts(machine, ways, (logits,), ()), strict=True
        ):
            yield (name, part, *_times(*times), "")
    sorts = (_of_router("SortByExpert", sizes), runtime.sort_by_expert)
    yield (
        "sort_by_expert",
        "",
        *_times(*(machine.milliseconds(partial(each, ids, experts)) for each in sorts)),
        "",
    )


def _of_router(name: str, sizes: Sizes) -> Any:
    from scalec.runtime import kernels

    return getattr(kernels, name)(tiles(kernels, name, sizes.experts))


def _products(machine: Machine, sizes: Sizes) -> Iterator[tuple[str, ...]]:
    from scalec.runtime import kernels

    held = _order(machine, sizes.product_rows // sizes.k, sizes)
    for name, width, out in (("up", sizes.hidden, sizes.ffn), ("down", sizes.ffn, sizes.hidden)):
        x, weight = machine.randn(held.total, width), machine.randn(sizes.experts, out, width)
        with patch.object(grouped_linear, "is_for_grouped_mm", lambda *_: False):
            ours = parts(
                machine,
                (kernels.GroupedLinear(tiles(kernels, "GroupedLinear", width)),),
                (x, weight),
                (held,),
            )
        plain = parts(machine, (runtime.grouped_linear,), (x, weight), (held,))
        dense = parts(machine, (F.linear,), (x, machine.randn(out, width)), ())
        for part, (mine,), (torchs,), (whole,) in zip(
            ("forward", "backward"), ours, plain, dense, strict=True
        ):
            yield (
                f"grouped_linear, {name}",
                part,
                *_times(mine, torchs),
                f"{whole / mine:.0%}, {whole / torchs:.0%}",
            )


def _layer(machine: Machine, sizes: Sizes) -> Iterator[tuple[str, ...]]:
    """A whole route of one rank, forward and backward, beside its products alone."""
    from scalec.runtime import kernels

    def tiled(name: str, size: int) -> Any:
        return getattr(kernels, name)(tiles(kernels, name, size))

    def routed(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gates, ids = top_k(F.linear(x, router).float(), sizes.k, normalise=True)
        order = sort_by_expert(ids, experts)
        rows = dispatch(x, order)
        rows = silu_mul(to_ffn(rows, gate, order), to_ffn(rows, up, order))
        return combine(to_hidden(rows, down, order), gates, order)

    def products(rows: Tensor, wide: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        gate, up, down = weights
        return to_ffn(rows, gate, order), to_ffn(rows, up, order), to_hidden(wide, down, order)

    top_k, sort_by_expert = _of_router("TopK", sizes), _of_router("SortByExpert", sizes)
    dispatch, combine = tiled("Dispatch", sizes.hidden), tiled("Combine", sizes.hidden)
    to_ffn, to_hidden = tiled("GroupedLinear", sizes.hidden), tiled("GroupedLinear", sizes.ffn)
    silu_mul = tiled("SiluMul", sizes.ffn)
    x, router = (
        machine.randn(sizes.tokens, sizes.hidden),
        machine.randn(sizes.experts, sizes.hidden),
    )
    up, down = (sizes.experts, sizes.ffn, sizes.hidden), (sizes.experts, sizes.hidden, sizes.ffn)
    weights = [machine.randn(*shape) for shape in (up, up, down)]
    order = _order(machine, sizes.tokens, sizes)
    experts = order.experts
    rows, wide = machine.randn(order.total, sizes.hidden), machine.randn(order.total, sizes.ffn)
    whole = parts(machine, (routed,), (x, router, *weights), ())
    alone = parts(machine, (products,), (rows, wide, *weights), ())
    for part, (mine,), (least,) in zip(("forward", "backward"), whole, alone, strict=True):
        yield ("a layer's route", part, f"{mine:.3f} ms", "", f"{mine / least:.2f}× its products")


def _times(ours: float, plain: float) -> tuple[str, str]:
    return f"{ours:.3f} ms", f"{plain:.3f} ms"
