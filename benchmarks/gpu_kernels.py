"""Each kernel beside torch eager, torch.compile and a copy of as many bytes on the device.

Bytes are those that a call must move at least: each operand read once, each result written once.

Non-goals: kernels with products in them (`gpu_products`), the fastest tiles (`tune_kernels`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch
from gpu import GIB, Machine, tiles
from torch import Tensor
from torch.nn import functional as F

from scalec import runtime
from scalec.runtime.state.optimizers import ParamGroup, Part

Op = Callable[..., Any]
EPS = 1e-5
KERNELS = (
    "kernel",
    "size",
    "part",
    "GB/s",
    "of copy",
    "eager",
    "of copy",
    "torch.compile",
    "of copy",
    "beside best",
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a token's values."""

    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    vocab: int = 128256
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    state: int = 1 << 28
    copied: int = GIB


TOY = Sizes(
    tokens=16,
    hidden=64,
    ffn=64,
    vocab=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    state=64,
    copied=1 << 10,
)


@dataclass(frozen=True)
class Subject:
    """A kernel, what torch has for it, their operands with and without gradients.

    `forward` and `backward` are the bytes that each part moves at least.
    """

    name: str
    size: int
    ours: Op
    plain: Op
    operands: Sequence[Tensor]
    rest: Sequence[Tensor]
    forward: int
    backward: int


def kernel_rows(machine: Machine) -> Iterator[tuple[str, ...]]:
    """A row for each kernel and part, as soon as it is measured."""
    sizes = TOY if machine.toy else Sizes()
    source = torch.empty(sizes.copied, dtype=torch.int8, device=machine.device)
    copied = _rate(
        2 * sizes.copied, machine.milliseconds(partial(torch.empty_like(source).copy_, source))
    )
    yield (
        "device copy",
        f"{2 * sizes.copied / GIB:.2g} GiB",
        "",
        f"{copied:.0f}",
        "100%",
        "",
        "",
        "",
        "",
        "",
    )
    del source
    for name, made in (*_SUBJECTS.items(), ("AdamW", _adamw), ("Accumulate", _accumulate)):
        try:
            yield from made(machine, sizes, copied)
        except Exception as error:  # of any kind: the other kernels are still to be measured
            yield (name, "", machine.failure(error), *[""] * 7)
        machine.clear()


def parts(
    machine: Machine, ops: Sequence[Op], operands: Sequence[Tensor], rest: Sequence[Any]
) -> tuple[list[float], list[float]]:
    """The times of forward and of backward of each op."""
    with functorch.patch(donated_buffer=False):  # backward of one forward is done again and again
        times = [[machine.milliseconds(call) for call in _calls(op, operands, rest)] for op in ops]
    forward, backward = (list(each) for each in zip(*times, strict=True))
    return forward, backward


def _calls(op: Op, operands: Sequence[Tensor], rest: Sequence[Any]) -> tuple[Op, Op]:
    made = op(*operands, *rest)
    results = [it for it in (made if isinstance(made, tuple) else (made,)) if it.requires_grad]
    gradients = [torch.ones_like(it) for it in results]
    back = partial(torch.autograd.grad, results, operands, gradients, retain_graph=True)
    return partial(op, *operands, *rest), back


def _rate(bytes: float, ms: float) -> float:
    """In GB/s."""
    return bytes / ms / 1e6


def _compared(
    name: str, size: int, part: str, bytes: int, times: Sequence[float], copied: float
) -> tuple[str, ...]:
    """A row; `times` are ours and others', of which infinite ones are left out."""
    cells: list[str] = []
    for ms in (*times, *[float("inf")] * (3 - len(times))):
        rate = _rate(bytes, ms)
        cells += [f"{rate:.0f}", f"{rate / copied:.0%}"] if rate else ["", ""]
    return (name, str(size), part, *cells, f"{times[0] / min(times[1:]):.2f}×")


def _moved(
    make: Callable[[Any, Machine, Sizes], Subject],
) -> Callable[..., Iterator[tuple[str, ...]]]:
    """The rows of a subject whose floor is a copy."""

    def rows(machine: Machine, sizes: Sizes, copied: float) -> Iterator[tuple[str, ...]]:
        from scalec.runtime import kernels  # needs triton

        subject = make(kernels, machine, sizes)
        ops = (subject.ours, subject.plain, machine.compile(subject.plain))
        forward, backward = parts(machine, ops, subject.operands, subject.rest)
        yield _compared(subject.name, subject.size, "forward", subject.forward, forward, copied)
        yield _compared(subject.name, subject.size, "backward", subject.backward, backward, copied)

    return rows


def _rms_norm(kernels: Any, machine: Machine, sizes: Sizes) -> Subject:
    h, each = sizes.hidden, sizes.tokens * sizes.hidden * machine.dtype.itemsize
    ours = kernels.RMSNorm(tiles(kernels, "RMSNorm", h))
    operands = (machine.randn(sizes.tokens, h), machine.randn(h))

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (h,), weight, EPS)

    return Subject("RMSNorm", h, partial(ours, eps=EPS), plain, operands, (), 2 * each, 3 * each)


def _add_rms_norm(kernels: Any, machine: Machine, sizes: Sizes) -> Subject:
    h, each = sizes.hidden, sizes.tokens * sizes.hidden * machine.dtype.itemsize
    ours = kernels.AddRMSNorm(tiles(kernels, "AddRMSNorm", h))

    def plain(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        s = x + y
        return s, F.rms_norm(s, (h,), weight, EPS)

    operands = (machine.randn(sizes.tokens, h), machine.randn(sizes.tokens, h), machine.randn(h))
    return Subject("AddRMSNorm", h, partial(ours, eps=EPS), plain, operands, (), 4 * each, 4 * each)


def _layer_norm(kernels: Any, machine: Machine, sizes: Sizes) -> Subject:
    h, each = sizes.hidden, sizes.tokens * sizes.hidden * machine.dtype.itemsize
    ours = kernels.LayerNorm(tiles(kernels, "LayerNorm", h))
    operands = (machine.randn(sizes.tokens, h), machine.randn(h), machine.randn(h))
    return Subject(
        "LayerNorm",
        h,
        partial(ours, eps=EPS),
        lambda x, weight, bias: F.layer_norm(x, (h,), weight, bias, EPS),
        operands,
        (),
        2 * each,
        3 * each,
    )


def _rope_pair(kernels: Any, machine: Machine, sizes: Sizes) -> Subject:
    d, counts = sizes.head_dim, (sizes.heads, sizes.kv_heads)
    each = sizes.tokens * sum(counts) * d * machine.dtype.itemsize
    operands = [machine.randn(sizes.tokens, 1, heads, d) for heads in counts]
    angles = torch.randn(2, sizes.tokens, 1, 1, d, device=machine.device).to(machine.dtype)
    ours = kernels.RopePair(tiles(kernels, "RopePair", d))

    def plain(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return runtime.rope(q, table), runtime.rope(k, table)

    return Subject("RopePair", d, ours, plain, operands, (angles,), 2 * each, 2 * each)


def _gate(name: str, function: Op, kernels: Any, machine: Machine, sizes: Sizes) -> Subject:
    each = sizes.tokens * sizes.ffn * machine.dtype.itemsize
    ours = getattr(kernels, name)(tiles(kernels, name, sizes.ffn))
    operands = [machine.randn(sizes.tokens, sizes.ffn) for _ in range(2)]
    return Subject(
        name, sizes.ffn, ours, lambda a, b: function(a) * b, operands, (), 3 * each, 5 * each
    )


def _cross_entropy(kernels: Any, machine: Machine, sizes: Sizes) -> Subject:
    each = sizes.tokens * sizes.vocab * machine.dtype.itemsize
    ours = kernels.CrossEntropy(tiles(kernels, "CrossEntropy", sizes.vocab))
    labels = torch.randint(sizes.vocab, (sizes.tokens,), device=machine.device)
    operands = (machine.randn(sizes.tokens, sizes.vocab),)
    return Subject(
        "CrossEntropy", sizes.vocab, ours, _summed_loss, operands, (labels,), each, 2 * each
    )


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


_SUBJECTS = {
    "RMSNorm": _moved(_rms_norm),
    "AddRMSNorm": _moved(_add_rms_norm),
    "LayerNorm": _moved(_layer_norm),
    "RopePair": _moved(_rope_pair),
    "SiluMul": _moved(partial(_gate, "SiluMul", F.silu)),
    "GeluMul": _moved(partial(_gate, "GeluMul", F.gelu)),
    "CrossEntropy": _moved(_cross_entropy),
}


def _adamw(machine: Machine, sizes: Sizes, copied: float) -> Iterator[tuple[str, ...]]:
    from scalec.runtime import kernels

    p, g, m, v = (torch.rand(1, sizes.state, device=machine.device) for _ in range(4))
    part = Part(ParamGroup(weight_decay=0.1), p, g, {"exp_avg": m, "exp_avg_sq": v}, p.bfloat16())
    one, zero = torch.ones((), device=machine.device), torch.zeros((), device=machine.device)
    (tile,) = tiles(kernels, "AdamW", sizes.state).values()
    both = (kernels.AdamW(tile=tile), runtime.AdamW())
    times = [
        machine.milliseconds(partial(each.update, part, 1e-9, one, zero, one)) for each in both
    ]
    yield _compared("AdamW", sizes.state, "update", 30 * sizes.state, times, copied)


def _accumulate(machine: Machine, sizes: Sizes, copied: float) -> Iterator[tuple[str, ...]]:
    from scalec.runtime import kernels

    total = torch.zeros(sizes.state, device=machine.device)
    x = torch.ones(sizes.state, device=machine.device, dtype=torch.bfloat16)
    calls = (partial(kernels.Accumulate(), total, x), partial(total.add_, x))
    times = [machine.milliseconds(call) for call in calls]
    yield _compared("Accumulate", sizes.state, "add", 10 * sizes.state, times, copied)
