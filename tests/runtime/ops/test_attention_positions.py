"""Attention of the queries at some positions against those rows of attention on the whole, one
rank after another.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from helpers.kernels.cases_attention import SMALL
from helpers.ranks_alone import positions_at
from scalec.runtime import Positions, attention
from scalec.runtime.kernels import Attention
from scalec.runtime.ops.dropout import draws_of

SEQ, DIM = 24, 8
DROPPED: dict[str, Any] = {"draws": draws_of(range(2), seed=0), "dropout": 0.3, "site": 1}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    *({"window": window} for window in (1, 2, 5, SEQ - 1, SEQ, 40)),
    {"window": 4, "causal": False},
    {"documents": True},
    {"documents": True, "causal": False},
    {"documents": True, "window": 6, "scale": 0.3},
    {"softcap": 1.5},
    {"softcap": 1.5, "documents": True, "window": 5, "causal": False},
    DROPPED,
    DROPPED | {"documents": True, "window": 7, "softcap": 2.0},
]
BACKENDS: dict[str, Callable[..., Tensor]] = {"torch": attention, "plain": Attention({DIM: SMALL})}


def _whole(layout: str, heads: int, seed: int) -> Tensor:
    rows = (2, SEQ) if layout == "bshd" else (SEQ, 2)
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*rows, heads, DIM, dtype=torch.float64, generator=draw).requires_grad_()


def _given(options: dict[str, Any], layout: str) -> dict[str, Any]:
    """Documents of 5 tokens and of 7, which end inside of chunks."""
    ids = torch.stack([torch.arange(SEQ).div(size, rounding_mode="floor") for size in (5, 7)])
    ids = ids if layout == "bshd" else ids.T
    return options | {"documents": ids if "documents" in options else None, "layout": layout}


def _ways() -> Iterator[tuple[str, int, bool]]:
    for layout in ("bshd", "sbhd"):
        for ranks in range(1, 5):
            for zigzag in (False, True):
                yield layout, ranks, zigzag


@pytest.mark.sample(16)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda it: " ".join(it) + f" {it.get('window', '')}"
)
def test_rows_are_those_of_the_whole(options: dict[str, Any], backend: str) -> None:
    """And gradients of all ranks are, together, those of the whole."""
    for layout, ranks, zigzag in _ways():
        seq, given = layout.index("s"), _given(options, layout)
        qkv = [_whole(layout, heads, seed) for seed, heads in enumerate((4, 2, 2))]
        expected = BACKENDS["torch"](*qkv, **given)
        slope = torch.randn(
            expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
        )
        gradients = torch.autograd.grad(expected, qkv, slope)
        sums = [torch.zeros_like(it) for it in qkv]
        for rank in range(ranks):
            places = positions_at(SEQ, rank, ranks, zigzag)
            held = places.indices(torch.device("cpu"))
            out = BACKENDS[backend](
                qkv[0].index_select(seq, held), *qkv[1:], **given, positions=places
            )
            torch.testing.assert_close(
                out, expected.index_select(seq, held), atol=1e-12, rtol=1e-12
            )
            for total, part in zip(
                sums, torch.autograd.grad(out, qkv, slope.index_select(seq, held)), strict=True
            ):
                total += part
        for actual, wanted in zip(sums, gradients, strict=True):
            torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-12)


def _calls(positions: Positions, **options: Any) -> list[tuple[int, int]]:
    """How many queries and keys torch's attention gets, call by call."""
    q, k = torch.zeros(1, positions.local, 1, DIM), torch.zeros(1, positions.size, 1, DIM)
    calls: list[tuple[int, int]] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                calls.append((args[0].shape[-2], args[1].shape[-2]))
            return func(*args, **(kwargs or {}))

    with Watch():
        cast(Any, attention)(q, k, k, positions=positions, **options)
    return calls


def test_a_chunk_is_a_call_on_the_keys_that_it_sees() -> None:
    zigzag = positions_at(24, 1, 3, True)
    assert zigzag.chunks == ((4, 4), (16, 4))
    assert _calls(zigzag) == [(4, 8), (4, 20)]
    assert _calls(zigzag, window=3) == [(4, 6), (4, 6)]
    assert _calls(zigzag, window=3, causal=False) == [(4, 8), (4, 8)]
    assert _calls(zigzag, causal=False) == [(8, 24)]
    assert _calls(positions_at(24, 2, 3, True)) == [(8, 16)]
    assert _calls(positions_at(24, 2, 3, False)) == [(8, 24)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"window": 5}, DROPPED], ids=str)
def test_it_is_the_same_in_a_graph(options: dict[str, Any]) -> None:
    places = positions_at(SEQ, 0, 2, True)
    q, k, v = (
        _whole("bshd", heads, seed)[:, :length]
        for seed, (heads, length) in enumerate(((4, 12), (2, 24), (2, 24)))
    )
    torch.compiler.reset()  # pyright: ignore[reportUnknownMemberType]
    for backend in BACKENDS.values():
        run = partial(backend, **options, positions=places)
        graph = torch.compile(lambda *qkv: run(*qkv), backend="aot_eager", fullgraph=True)  # noqa: B023
        torch.testing.assert_close(graph(q, k, v), run(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 20])
def test_a_gpu_aligns_a_prefix_at_its_lower_right(dtype: torch.dtype, dim: int) -> None:
    draw = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 256, 4, dim, generator=draw).to(dtype).requires_grad_() for _ in range(3)]
    places = positions_at(256, 1, 4, True)
    results: list[Any] = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        q, k, v = (it.to(device, kind) for it in qkv)
        out = attention(q[:, places.indices(q.device)], k, v, positions=places)
        results.append(
            [it.double().cpu() for it in (out, *torch.autograd.grad(out.sin().sum(), qkv))]
        )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
