"""The Llama of `plans/models/llama.scale` and its step in plain torch: what emitted programs are
timed against.

Modules and optimizer as one writes them by hand for one device; `dtensor.py` spreads the same
modules over ranks.  Rotary positions are written the cheapest way that we know, since a slow
baseline would flatter us.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from emitted import BETAS, CLIP, EPS, WEIGHT_DECAY, Sizes
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal attention with rotary positions; of several ranks' heads it computes those it has
    weights for.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.wq = nn.Linear(sizes.hidden, sizes.heads * sizes.head_dim, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.wo = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q = rotated(self._heads(self.wq(x)), cosine, sine)
        k = rotated(self._heads(self.wk(x)), cosine, sine)
        v = self._heads(self.wv(x))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.wo(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w_gate = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.w_up = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.w_down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))


class Layer(nn.Module):
    """A decoder layer.  x: [b, s, h]"""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.attention = Attention(sizes)
        self.norm2 = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cosine, sine)
        return x + self.mlp(self.norm2(x))


_DIST: Any = dist
GATHER: Any = getattr(_DIST, "all_gather_single", None) or _DIST.all_gather_into_tensor
SCATTER: Any = getattr(_DIST, "reduce_scatter_single", None) or _DIST.reduce_scatter_tensor
"""torch 2.13 warns at each call of the older names, which takes time."""


class Gathered(torch.autograd.Function):
    """Rows of all ranks of a group; backward sums them, and each rank keeps its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return scattered(grad_outputs[0], ctx.group), None


class Scattered(torch.autograd.Function):
    """This rank's rows of the sum over a group; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return gathered(grad_outputs[0], ctx.group), None


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    GATHER(whole, x.contiguous(), group=group)
    return whole


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    SCATTER(part, x.contiguous(), group=group)
    return part


class SequenceParallelLayer(Layer):
    """A decoder layer as Megatron shards it, between whose products ranks split the sequence.
    x: [s/tp, b, h]
    """

    def __init__(self, sizes: Sizes, group: dist.ProcessGroup) -> None:
        super().__init__(sizes)
        self.group = group

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        a = cast(Any, Gathered).apply(self.norm1(x), self.group)
        y = self.attention(a.transpose(0, 1), cosine, sine).transpose(0, 1)
        x = x + cast(Any, Scattered).apply(y, self.group)
        m = cast(Any, Gathered).apply(self.norm2(x), self.group)
        return x + cast(Any, Scattered).apply(self.mlp(m), self.group)


class Llama(nn.Module):
    """Logits [b, s, v] of tokens [b, s]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.wte = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.cosine, self.sine = rotary(sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.head(self.norm(x))


def rotary(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of rotary positions, [s, 1, d] each."""
    half = torch.arange(0, sizes.head_dim, 2) / sizes.head_dim
    angle = torch.arange(sizes.seq).double().outer(500000.0 ** -half.double())
    sine = angle.sin()
    return angle.cos().repeat(1, 2).unsqueeze(1).float(), torch.cat([-sine, sine], dim=1).unsqueeze(
        1
    ).float()


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [b, s, n, d] at its positions."""
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean token loss."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The plans' AdamW."""
    return torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )


def step(model: Llama, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> Tensor:
    """One training step on [microbatches, rows, seq]; its mean loss."""
    total = torch.zeros(())
    for part in zip(tokens, labels, strict=True):
        loss = loss_of(model(part[0]), part[1]) / len(tokens)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return total


def load(model: Llama, values: dict[str, Tensor]) -> None:
    """Takes over the parameters of an emitted program's state on one rank."""
    model.load_state_dict({name: values[_emitted_name(name)] for name in model.state_dict()})


def _emitted_name(name: str) -> str:
    return name.removesuffix(".weight").replace("attention.", "").replace("mlp.", "")
