"""The rates that a step's products and attention can have here, by torch alone: what decides over
its MFU.

Products are those of a layer of Llama 8B; a weight's gradient is made in bfloat16, in float32, and
added to a sum.  Causal attention is counted as half of s², as in `gpu_products`.

Non-goals: kernels of ours.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu import Machine
from gpu_kernels import TOY, Sizes, parts
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

RATES = ("of", "shape", "part", "time", "TFLOP/s")
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


def rate_rows(machine: Machine) -> Iterator[tuple[str, ...]]:
    """A row for each product and part, then for each backend of attention."""
    sizes = TOY if machine.toy else Sizes()
    heads = sizes.heads * sizes.head_dim
    both = heads + 2 * sizes.kv_heads * sizes.head_dim
    shapes = (
        (both, sizes.hidden),
        (sizes.hidden, heads),
        (2 * sizes.ffn, sizes.hidden),
        (sizes.hidden, sizes.ffn),
    )
    for n, k in shapes:
        yield from _products(machine, sizes.tokens, n, k)
    for rows in (2, 1):
        for backend in (SDPBackend.MATH,) if machine.toy else BACKENDS:
            yield from _attention(machine, sizes, rows, backend)


def _products(machine: Machine, tokens: int, n: int, k: int) -> Iterator[tuple[str, ...]]:
    def drawn(*shape: int) -> torch.Tensor:
        return machine.randn(*shape).detach()

    x, w, g, new = drawn(tokens, k), drawn(n, k), drawn(tokens, n), drawn(n, k)
    total = new.float()
    ways: dict[str, Callable[[], object]] = {
        "forward": lambda: x @ w.mT,
        "gradient of x": lambda: g @ w,
        "gradient of w": lambda: torch.mm(g.mT, x, out=new),
        "gradient of w, then added in float32": lambda: total.add_(torch.mm(g.mT, x, out=new)),
    }
    if machine.on_gpu:
        ways["gradient of w in float32"] = lambda: torch.mm(g.mT, x, out_dtype=torch.float32)
        ways["gradient of w, added in float32"] = lambda: torch.ops.aten.addmm.dtype_out(
            total, g.mT, x, torch.float32, out=total
        )
    for part, way in ways.items():
        try:
            ms = machine.milliseconds(way)
        except Exception as error:  # of any kind: the other ways are still to be measured
            yield ("product", f"{tokens} × {n} × {k}", part, machine.failure(error), "")
            continue
        yield (
            "product",
            f"{tokens} × {n} × {k}",
            part,
            f"{ms:.3f} ms",
            f"{2 * tokens * n * k / ms / 1e9:.0f}",
        )


def _attention(
    machine: Machine, sizes: Sizes, rows: int, backend: SDPBackend
) -> Iterator[tuple[str, ...]]:
    s, d = sizes.tokens // rows, sizes.head_dim
    operands = [
        machine.randn(rows, s, heads, d) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    ]
    shape, flop = f"{rows} × {s} tokens", rows * s * s * sizes.heads * d
    try:
        with sdpa_kernel(backend):
            times = parts(machine, [_causal], operands, ())
    except Exception as error:  # of any kind: the other backends are still to be measured
        yield (backend.name, shape, "", machine.failure(error), "")
        return
    for part, factor, (ms,) in zip(("forward", "backward"), (2, 5), times, strict=True):
        yield (backend.name, shape, part, f"{ms:.3f} ms", f"{factor * flop / ms / 1e9:.0f}")


def _causal(*given: torch.Tensor) -> torch.Tensor:
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return attend(*(each.transpose(1, 2) for each in given))
