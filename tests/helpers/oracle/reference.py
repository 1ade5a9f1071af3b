"""A Llama-like model and its training in one process, plain torch, float64: what emitted programs
are held against.

Nothing of scalec is imported here, and no fused or distributed op of torch is used.  Parameters are a dictionary; matrices are [out, in], heads outermost in their
dim.

Non-goals: speed, and anything the plans of these tests do not use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, cos, pi

import torch
from torch import Tensor

from helpers.reference_ops import (
    attention,
    cross_entropy,
    layer_norm,
    rms_norm,
    rope,
    rope_frequencies,
    silu,
)

Tensors = dict[str, Tensor]
BIAS = "router_bias"
Loss = Callable[..., "Tensor | tuple[Tensor, Routed]"]
"""The sum of token losses, of parameters, tokens, labels and what else a model is given; and
what routers did.
"""


@dataclass(frozen=True)
class Config:
    """Sizes and variants of the model."""

    vocab: int = 32
    classes: int = 32  # of the vocabulary, what is no padding
    smoothing: float = 0.0  # of labels (Szegedy et al. 2016)
    z_loss: float = 0.0  # the factor of log² Z (Chowdhery et al. 2022)
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 24
    layers: int = 2
    eps: float = 1e-5
    theta: float = 10000.0
    tied: bool = False  # the output projection is the embedding table
    parallel: bool = False  # attention and MLP beside each other, after one norm (GPT-J)
    # with norms of queries and keys over all heads, softmax, means and joined features
    every: bool = False
    experts: int = 6
    few: int = 4
    # queries, keys and values of narrow vectors; one rotated part of keys for all heads
    latent: bool = False
    q_rank: int = 6
    kv_rank: int = 5
    nope: int = 4
    pe: int = 2
    v_dim: int = 3
    route: "Route | None" = None  # the MLP is a mixture of experts


@dataclass(frozen=True)
class Route:
    """How a token's experts are chosen and weighed."""

    experts: int = 12
    k: int = 2
    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    among: int = 1  # groups, from which they are chosen
    rate: float = 0.0  # by which a step moves biases that choose; 0 for none
    capacity: float = 0.0  # of an expert, in equal shares of a sequence; 0 for no bound
    balance: float = 0.0  # factors of the router's losses
    z: float = 0.0
    aux: float = 0.0  # factor of the loss over all layers
    aux_batch: int = 1  # of so many sequences
    ffn: int = 0  # the width of an expert, if not the model's
    affine: bool = False  # experts have biases
    shared: bool = False  # the MLP is beside them, for all tokens (Dai et al. 2024)

    @property
    def matrices(self) -> tuple[str, str, str]:
        """The names of an expert's: gate, up, down."""
        return ("e_gate", "e_up", "e_down") if self.shared else ("w_gate", "w_up", "w_down")


@dataclass(frozen=True)
class Training:
    """The optimizer; `decay` and `scale` are looked up by the last part of a parameter's name."""

    kind: str = "sgd"
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: tuple[tuple[str, float], ...] = ()
    scale: tuple[tuple[str, float], ...] = ()
    clip: float = 0.0


@dataclass(frozen=True)
class Step:
    """The results of one step: mean loss, gradients before clipping, their norm, parameters
    after the update.
    """

    loss: float
    norm: float
    gradients: Tensors
    parameters: Tensors
    router_loss: float = 0.0
    loads: tuple[Tensor, ...] = ()  # of each layer's experts, in tokens


@dataclass(frozen=True)
class Routed:
    """The terms of some tokens' routers in the loss, and how many tokens chose each expert,
    layer by layer.
    """

    losses: list[Tensor]
    loads: list[Tensor]
    rate: float = 0.0
    # by layer, if a loss is over all of them
    scores: list[Tensor] = field(default_factory=list[Tensor])
    chosen: list[Tensor] = field(default_factory=list[Tensor])

    @property
    def loss(self) -> Tensor:
        """The sum."""
        return torch.stack([torch.zeros((), dtype=torch.float64), *self.losses]).sum()

    def biases(self, p: Tensors) -> Tensors:
        """All biases after a step: up by the rate where fewer tokens than the mean chose, down
        where more did.
        """
        means = [load.double().mean() for load in self.loads]
        moves = [
            self.rate * (mean - load).sign().float()
            for load, mean in zip(self.loads, means, strict=True)
        ]
        return {name: p[name] + moves[int(name.split(".")[1])] for name in p if name.endswith(BIAS)}


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter."""
    c, kv = config, config.kv_heads * config.hidden // config.heads
    layer = {
        "norm1": (c.hidden,),
        "wq": (c.hidden, c.hidden),
        "wk": (kv, c.hidden),
        "wv": (kv, c.hidden),
        "wo": (c.hidden, c.hidden),
        **({} if c.parallel else {"norm2": (c.hidden,)}),
        "w_gate": (c.ffn, c.hidden),
        "w_up": (c.ffn, c.hidden),
        "w_down": (c.hidden, c.ffn),
        **(_more_shapes(c) if c.every else {}),
        **(_expert_shapes(c, c.route) if c.route else {}),
        **(_latent_shapes(c) if c.latent else {}),
    }
    if c.latent:
        del layer["wk"], layer["wv"]
    layers = {f"layers.{i}.{name}": shape for i in range(c.layers) for name, shape in layer.items()}
    head: dict[str, tuple[int, ...]] = {} if c.tied else {"head": (c.vocab, c.hidden)}
    return {"wte": (c.vocab, c.hidden), **layers, "norm": (c.hidden,), **head}


def _more_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    head = c.hidden // c.heads
    return {
        "bias1": (c.hidden,),
        "q_norm": (c.heads, head),
        "k_norm": (c.kv_heads, head),
        "k_bias": (c.kv_heads, head),
        "w_gate": (c.experts, c.hidden),
        "w_few": (c.few, c.hidden),
        "w_up": (c.ffn, c.experts + c.few),
        "norm3": (c.ffn,),
    }


def _expert_shapes(c: Config, route: Route) -> dict[str, tuple[int, ...]]:
    (gate, up, down), ffn = route.matrices, route.ffn or c.ffn
    return {
        **({BIAS: (route.experts,)} if route.rate else {}),
        "router": (route.experts, c.hidden),
        gate: (route.experts, ffn, c.hidden),
        up: (route.experts, ffn, c.hidden),
        down: (route.experts, c.hidden, ffn),
        **(
            {"b_gate": (route.experts, ffn), "b_down": (route.experts, c.hidden)}
            if route.affine
            else {}
        ),
    }


def _latent_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    return {
        "wq_a": (c.q_rank, c.hidden),
        "q_norm": (c.q_rank,),
        "wq": (c.heads * (c.nope + c.pe), c.q_rank),
        "wkv_a": (c.kv_rank + c.pe, c.hidden),
        "kv_norm": (c.kv_rank,),
        "wkv": (c.kv_heads * (c.nope + c.v_dim), c.kv_rank),
        "wo": (c.hidden, c.heads * c.v_dim),
    }


def initial(config: Config) -> Tensors:
    """Parameters of a size at which every one of them matters; no two norm weights are alike."""
    generator = torch.Generator().manual_seed(7)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.2 * values

    found = {name: drawn(shape) for name, shape in shapes(config).items()}
    return {name: (x - 1).float() if name.endswith(BIAS) else x for name, x in found.items()}


def random_parameters(like: Tensors, spread: float) -> Tensors:
    """Random numbers times `spread`, in the shapes of other parameters."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: spread * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for name, value in like.items()
    }


def loss(config: Config, p: Tensors, tokens: Tensor, labels: Tensor) -> Tensor:
    """The sum of token losses over labels ≥ 0; tokens and labels are [rows, seq]."""
    return losses(config, p, tokens, labels)[0]


def losses(config: Config, p: Tensors, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Routed]:
    """That, and what routers did."""
    x, routed = p["wte"][tokens], Routed([], [], config.route.rate if config.route else 0.0)
    for i in range(config.layers):
        x = _layer(
            config,
            {k.split(".")[2]: v for k, v in p.items() if k.startswith(f"layers.{i}.")},
            x,
            routed,
        )
    logits = (
        rms_norm(x, p["norm"], config.eps) @ p["wte" if config.tied else "head"][: config.classes].T
    )
    total = cross_entropy(logits, labels, config.smoothing, config.z_loss)
    if config.route and config.route.aux:
        routed.losses.append(_aux_loss(config.route, routed.scores, routed.chosen))
    return total, routed


def _aux_loss(route: Route, scores: list[Tensor], chosen: list[Tensor]) -> Tensor:
    """Fedus et al. 2021, equations 4 to 6, of each group of sequences in all layers together;
    the mean over groups.
    """
    p, f = (
        torch.stack(each, 1).double().unflatten(0, (-1, route.aux_batch))
        for each in (scores, chosen)
    )
    mean_p, mean_f = (x.mean((1, 2, 3)) for x in (p, f))
    return route.aux * route.experts * (mean_p * mean_f).sum(-1).mean()


def _layer(c: Config, p: Tensors, x: Tensor, routed: Routed) -> Tensor:
    if c.every:
        return _layer_of_every(c, p, x)
    a = rms_norm(x, p["norm1"], c.eps)
    if c.parallel:
        return x + _attention(c, p, a) + _mlp(p, a)
    x = x + _attention(c, p, a)
    m = rms_norm(x, p["norm2"], c.eps)
    if c.route is None:
        return x + _mlp(p, m)
    return x + _experts(c.route, p, m, routed) + (_mlp(p, m) if c.route.shared else 0)


def _layer_of_every(c: Config, p: Tensors, x: Tensor) -> Tensor:
    x = x + _attention(c, p, layer_norm(x, p["norm1"], eps=c.eps) + p["bias1"])
    m = layer_norm(x, p["norm2"], eps=c.eps)
    gate = (m @ p["w_gate"].T).softmax(-1)
    joined = torch.cat([gate, m @ p["w_few"].T], -1)
    up = layer_norm(joined @ p["w_up"].T, p["norm3"], eps=c.eps)
    scale = m.mean(1, keepdim=True).softmax(-1) * gate.sum(1, keepdim=True).pow(2).mean(
        -1, keepdim=True
    )
    return x + silu(up) @ p["w_down"].T + m * scale * up.mean(-1, keepdim=True)


def _of_all_heads(x: Tensor, weight: Tensor, c: Config, norm: Callable[..., Tensor]) -> Tensor:
    """A norm over all heads together."""
    return norm(x.flatten(2), weight.flatten(), eps=c.eps).view_as(x)


def _mlp(p: Tensors, x: Tensor) -> Tensor:
    gate = x @ p["w_gate"].T + p.get("b_gate", 0)
    return (silu(gate) * (x @ p["w_up"].T)) @ p["w_down"].T + p.get("b_down", 0)


def _experts(route: Route, p: Tensors, x: Tensor, routed: Routed) -> Tensor:
    """Each expert on all tokens, times its gate, which is 0 where it is not chosen (Shazeer et
    al. 2017).
    """
    logits = x @ p["router"].T
    scores = logits.softmax(-1) if route.score == "softmax" else logits.sigmoid()
    compared = scores.detach() + p[BIAS].detach() if route.rate else scores.detach()
    by_group = compared.unflatten(-1, (route.groups, -1))
    best = _largest(by_group.topk(2).values.sum(-1), route.among)  # DeepSeek-AI 2024, section 2.1.2
    chosen = _largest(by_group.masked_fill(~best.unsqueeze(-1), -torch.inf).flatten(-2), route.k)
    gates = scores * chosen
    gates = route.scale * (gates / gates.sum(-1, keepdim=True) if route.normalise else gates)
    if route.balance or route.z:
        # DeepSeek-AI 2024, section 2.1.2: of each sequence
        f = chosen.double().mean(1) * route.experts / route.k
        balance = (f * (scores / scores.sum(-1, keepdim=True)).mean(1)).sum(-1).mean()
        # Zoph et al. 2022
        routed.losses.append(route.balance * balance + route.z * logits.logsumexp(-1).pow(2).mean())
    if route.aux:
        routed.scores.append(scores / scores.sum(-1, keepdim=True))
        routed.chosen.append(chosen)
    most = (
        ceil(route.capacity * x.shape[1] * route.k / route.experts)
        if route.capacity
        else x.shape[1]
    )
    taken = chosen & (chosen.cumsum(1) <= most)
    routed.loads.append(taken.sum((0, 1)))
    gates = gates * taken

    def expert(e: int) -> Tensor:
        own = [*zip(("w_gate", "w_up", "w_down"), route.matrices, strict=True)]
        own += [(name, name) for name in ("b_gate", "b_down") if route.affine]
        return _mlp({name: p[of][e] for name, of in own}, x)

    return torch.stack([gates[..., e, None] * expert(e) for e in range(route.experts)]).sum(0)


def _largest(x: Tensor, k: int) -> Tensor:
    """Whether an element is among the k largest along the last dim; of equal ones the first."""
    order = x.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, order[..., :k], True)


def _attention(c: Config, p: Tensors, x: Tensor) -> Tensor:
    """Causal, and the product with `wo`."""
    q, k, v = _latent(c, p, x) if c.latent else _projected(c, p, x)
    return attention(q, k, v).flatten(2) @ p["wo"].T


def _projected(c: Config, p: Tensors, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [rows, seq, heads, head_dim]."""
    q = (x @ p["wq"].T).unflatten(-1, (c.heads, -1))
    k, v = ((x @ p[name].T).unflatten(-1, (c.kv_heads, -1)) for name in ("wk", "wv"))
    if c.every:
        q, k = (
            _of_all_heads(q, p["q_norm"], c, rms_norm),
            _of_all_heads(k, p["k_norm"], c, layer_norm) + p["k_bias"],
        )
    return _rotated(q, c.theta), _rotated(k, c.theta), v


def _latent(c: Config, p: Tensors, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by latent attention (DeepSeek-V2, arXiv:2405.04434, equations 37 to 47)."""
    q = (rms_norm(x @ p["wq_a"].T, p["q_norm"], c.eps) @ p["wq"].T).unflatten(-1, (c.heads, -1))
    narrow, shared = (x @ p["wkv_a"].T).split([c.kv_rank, c.pe], -1)
    both = (rms_norm(narrow, p["kv_norm"], c.eps) @ p["wkv"].T).unflatten(-1, (c.kv_heads, -1))
    k, v = both.split([c.nope, c.v_dim], -1)
    turned = _rotated(shared.unsqueeze(2), c.theta).expand(-1, -1, c.kv_heads, -1)
    return (
        torch.cat([q[..., : c.nope], _rotated(q[..., c.nope :], c.theta)], -1),
        torch.cat([k, turned], -1),
        v,
    )


def _rotated(x: Tensor, theta: float) -> Tensor:
    return rope(x, rope_frequencies(x.shape[-1], theta))


def run(
    config: Config,
    training: Training,
    start: Tensors,
    batches: list[tuple[Tensor, Tensor]],
    lr: float,
) -> list[Step]:
    """Trains the model above."""
    return train(partial(losses, config), training, start, batches, lr)


def train(
    model: Loss,
    training: Training,
    start: Tensors,
    batches: Sequence[tuple[Tensor, ...]],
    lr: float,
) -> list[Step]:
    """Trains on (tokens, labels, …) of each step, [rows, seq]; a step without a valid label
    changes nothing.
    """
    parameters, optimizer, steps = start, _Optimizer(training, start), list[Step]()
    for batch in batches:
        labels = batch[1]
        leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
        made = model(leaves, *batch)
        total, routed = made if isinstance(made, tuple) else (made, Routed([], []))
        mean = total / max(1, int((labels >= 0).sum()))
        (mean + routed.loss).backward()
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        norm = sum(float(g.pow(2).sum()) for g in gradients.values()) ** 0.5
        if (labels >= 0).any():
            factor = min(1.0, training.clip / (norm + 1e-6)) if training.clip else 1.0
            moved = {name: parameters[name] for name in gradients}
            moved = optimizer.step(moved, {name: g * factor for name, g in gradients.items()}, lr)
            parameters = parameters | moved | routed.biases(parameters)
        steps.append(
            Step(mean.item(), norm, gradients, parameters, routed.loss.item(), (*routed.loads,))
        )
    return steps


class _Optimizer:
    """SGD with momentum, or AdamW (Loshchilov and Hutter 2019, algorithm 2), a parameter at a
    time.
    """

    def __init__(self, training: Training, parameters: Tensors) -> None:
        self._training, self._count = training, 0
        self._first = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self._second = {name: torch.zeros_like(value) for name, value in parameters.items()}

    def step(self, parameters: Tensors, gradients: Tensors, lr: float) -> Tensors:
        """The parameters after one more update."""
        self._count += 1
        update = {"sgd": self._sgd, "adamw": self._adamw}[self._training.kind]
        return {
            name: update(name, value, gradients[name], lr) for name, value in parameters.items()
        }

    def _sgd(self, name: str, value: Tensor, gradient: Tensor, lr: float) -> Tensor:
        lr, decay = self._settings(name, lr)
        self._first[name] = self._training.momentum * self._first[name] + gradient + decay * value
        return value - lr * self._first[name]

    def _adamw(self, name: str, value: Tensor, gradient: Tensor, lr: float) -> Tensor:
        lr, decay = self._settings(name, lr)
        b1, b2 = self._training.betas
        self._first[name] = b1 * self._first[name] + (1 - b1) * gradient
        self._second[name] = b2 * self._second[name] + (1 - b2) * gradient.pow(2)
        mean, square = (
            self._first[name] / (1 - b1**self._count),
            self._second[name] / (1 - b2**self._count),
        )
        return value - lr * decay * value - lr * mean / (square.sqrt() + self._training.eps)

    def _settings(self, name: str, lr: float) -> tuple[float, float]:
        """Learning rate and weight decay of this parameter."""
        last, t = name.rpartition(".")[2], self._training
        return lr * dict(t.scale).get(last, 1.0), dict(t.decay).get(last, t.weight_decay)


def cosine(step: int, steps: int, peak: float, warmup: int, floor: float) -> float:
    """Linear to `peak` over `warmup` steps, then half a cosine; the last step takes `floor`, a
    learning rate.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / (steps - 1 - warmup)
    return floor + (peak - floor) * (1 + cos(pi * done)) / 2
