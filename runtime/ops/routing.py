"""A router's choice of experts for each token, their gates, and its losses.

Scores are softmax(logits) over all experts, or sigmoid(logits).  Ties go to the lower index.  All
is in float32 at least.  Choices are decisions: a call that backward recomputes gets the choices of
its first run (`decide_once`).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ..autograd.recompute import decide_once
from ..comm.collectives import all_gather_, all_reduce_
from ..comm.mesh import Axis
from ..comm.positions import Positions
from .plain_attention import wide

Score = Literal["softmax", "sigmoid"]


class Choice(NamedTuple):
    """How experts are chosen and weighed.

    normalise: gates are divided by their sum.  scale: a factor on gates.  groups: the number of
    equal groups of experts; only the `from_groups` groups with the largest sums of their two best
    scores can be chosen from.
    """

    k: int
    score: Score = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    from_groups: int = 1

    def is_plain(self, bias: Tensor | None) -> bool:
        """Whether experts are chosen by their scores alone."""
        return bias is None and self.groups == 1


class Backend(NamedTuple):
    """The choice and its gradient, as this module has them in plain torch."""

    choose_experts: Callable[[Tensor, Tensor | None, Choice], tuple[Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Choice], Tensor]


def choose_experts(logits: Tensor, bias: Tensor | None, how: Choice) -> tuple[Tensor, Tensor]:
    """Gates and ids."""
    wider = logits.to(wide(logits.dtype))
    if how.is_plain(bias):
        ids = _best(wider, how.k)  # logits are in the order of scores, and not rounded as they are
    else:
        ids = _best(_eligible(_scores(wider, how.score), bias, how), how.k)
    if how.normalise:
        picked = wider.gather(-1, ids)
        if how.score == "sigmoid":
            picked = F.logsigmoid(picked)
        gates = picked.softmax(-1)
    else:
        gates = _scores(wider, how.score).gather(-1, ids)
    return gates * how.scale, ids


def gradient(of_gates: Tensor, logits: Tensor, gates: Tensor, ids: Tensor, how: Choice) -> Tensor:
    """The gradient of logits, from the gradient of gates."""
    d = of_gates * gates  # of the logarithms of gates
    d_picked = d
    if how.normalise:
        d_picked = d - gates * (d.sum(-1, keepdim=True) / how.scale)
    wider = logits.to(gates.dtype)
    if how.score == "sigmoid":
        d_picked = d_picked * torch.sigmoid(-wider.gather(-1, ids))
    of_logits = torch.zeros_like(wider).scatter_(-1, ids, d_picked)
    if how.score == "softmax" and not how.normalise:
        of_logits -= wider.softmax(-1) * d.sum(-1, keepdim=True)
    return of_logits.to(logits.dtype)


PLAIN = Backend(choose_experts, gradient)


def top_k(
    logits: Tensor,
    k: int,
    score: Score = "softmax",
    normalise: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    from_groups: int = 1,
    backend: Backend = PLAIN,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token with the largest scores: gates, float32 at least, and ids, int64,
    both [..., k].

    logits [..., experts].  `bias` [experts] is added to scores to choose, also among groups, never
    to gates (arXiv:2408.15664); groups are as in arXiv:2412.19437, section 2.1.2.  Saves logits,
    gates and ids.
    """
    return cast(Any, _TopK).apply(
        logits, bias, Choice(k, score, normalise, scale, groups, from_groups), backend
    )


class _TopK(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, how: Choice, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        gates, ids = decide_once(lambda: backend.choose_experts(logits, bias, how))
        ctx.save_for_backward(logits, gates, ids)
        ctx.mark_non_differentiable(ids)
        ctx.how = how, backend
        return gates, ids

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        how, backend = ctx.how
        return backend.gradient(grad_outputs[0], *ctx.saved_tensors, how), None, None, None


def _eligible(scores: Tensor, bias: Tensor | None, how: Choice) -> Tensor:
    """Values to choose by: scores and bias, −∞ in groups that are not chosen from."""
    biased = scores
    if bias is not None:
        biased = scores + bias.to(scores.dtype)
    by_group: Tensor = cast(Any, biased).unflatten(-1, (how.groups, -1))
    two = by_group.gather(-1, _best(by_group, min(2, by_group.shape[-1]))).sum(-1)
    left = torch.ones_like(two, dtype=torch.bool).scatter_(-1, _best(two, how.from_groups), False)
    return by_group.masked_fill(left.unsqueeze(-1), -torch.inf).flatten(-2)


def _best(x: Tensor, k: int) -> Tensor:
    """The indices of the k largest along the last dim, of equal ones the lower."""
    return cast(Any, x).sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def _scores(logits: Tensor, score: Score) -> Tensor:
    if score == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid()


def no_loss(x: Tensor) -> Tensor:
    """Zero, as routers add their losses to it: float32 at least.

    It has a gradient, also where no router adds one.
    """
    return torch.zeros(
        (), dtype=wide(x.dtype), device=x.device, requires_grad=torch.is_grad_enabled()
    )


def no_load(x: Tensor, *shape: int) -> Tensor:
    """Zeros of this shape on x's device: how many tokens chose each expert in each layer, before
    any did.
    """
    return torch.zeros(shape, dtype=torch.int64, device=x.device)


def add_load(load: Tensor, ids: Tensor) -> Tensor:
    """The rows of `load` [layers, experts] after its first, and then how many tokens chose each
    expert.

    ids [..., k], of no expert where below 0.  After as many calls as there are rows, each row has
    the counts of its call.  `load` may have several dims of layers, or none.
    """
    counts = is_chosen(ids, load.shape[-1]).flatten(0, -2).sum(0, keepdim=True)
    return torch.cat([load.reshape(-1, load.shape[-1])[1:], counts]).view(load.shape)


class Losses(NamedTuple):
    """Figures of logits that the routers' losses need, in plain torch."""

    sums: Callable[[Tensor, Tensor, Score, int], tuple[Tensor, Tensor]]
    of_sums: Callable[[Tensor, Tensor, Score, int], Tensor]
    log_sums: Callable[[Tensor], Tensor]
    of_log_sums: Callable[[Tensor, Tensor, Tensor], Tensor]


def sums(logits: Tensor, ids: Tensor, score: Score, seq: int) -> tuple[Tensor, Tensor]:
    """The sum of each expert's shares of tokens' scores, and how many tokens chose it, int64,
    by sequence.
    """
    return _score_shares(logits, score).sum(seq), is_chosen(ids, logits.shape[-1]).sum(seq)


def of_sums(gradient: Tensor, logits: Tensor, score: Score, seq: int) -> Tensor:
    """The gradient of logits from the gradient of the sums of their shares."""
    p, d = _score_shares(logits, score), gradient.unsqueeze(seq)
    of_logits = p * (d - (p * d).sum(-1, keepdim=True))
    if score == "sigmoid":
        of_logits = of_logits * torch.sigmoid(-logits.to(p.dtype))
    return of_logits.to(logits.dtype)


def log_sums(logits: Tensor) -> Tensor:
    """log Σ exp logits of each token."""
    return logits.to(wide(logits.dtype)).logsumexp(-1)


def of_log_sums(by: Tensor, logits: Tensor, logs: Tensor) -> Tensor:
    """The gradient of logits from the gradient of their `log_sums`, which is by · logs."""
    of_logits = (by * logs).unsqueeze(-1) * (logits.to(logs.dtype) - logs.unsqueeze(-1)).exp()
    return of_logits.to(logits.dtype)


PLAIN_LOSSES = Losses(sums, of_sums, log_sums, of_log_sums)


def balance(
    logits: Tensor,
    ids: Tensor,
    by: float,
    score: Score = "softmax",
    seq: int = 1,
    over: Axis | None = None,
    backend: Losses = PLAIN_LOSSES,
) -> Tensor:
    """by · Σ over sequences and experts of f · P: a loss that is least where a sequence's tokens
    are spread evenly.

    f is experts / (k · length) times how many tokens of the sequence chose the expert, without a
    gradient; P the mean over the sequence of its score, divided by the sum of all experts'
    (arXiv:2412.19437, section 2.1.2).  logits [batch and seq, experts]; ids [batch and seq, k],
    different ones for each token; `seq` is the number of the sequence's dim.  `over` is the axis
    that shards the sequence, if one does: one all-reduce of counts, forward alone, and the result
    is P over it.  Saves logits, and f.
    """
    return cast(Any, _Balance).apply(logits, ids, by, score, seq, over, backend)


class _Balance(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        by: float,
        score: Score,
        seq: int,
        over: Axis | None,
        backend: Losses,
    ) -> Tensor:
        shares, counts = backend.sums(logits, ids, score, seq)
        if over is not None:
            counts = decide_once(lambda: all_reduce_(counts, over))
        length = logits.shape[seq] * (over.size if over else 1)
        f = counts.to(shares.dtype) * (by * logits.shape[-1] / (ids.shape[-1] * length * length))
        ctx.save_for_backward(logits, f)
        ctx.how = score, seq, backend
        return (shares * f).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        logits, f = cast(tuple[Tensor, ...], ctx.saved_tensors)
        score, seq, backend = ctx.how
        of_logits = backend.of_sums(f * grad_outputs[0], logits, score, seq)
        return of_logits, *(None,) * 6


def no_scores(tokens: Tensor, experts: int, batch: int = 0, double: bool = False) -> Tensor:
    """Zeros [batch, experts] for layers to add `sum_scores` to: float32, or float64 if `double`.

    They have a gradient, also where no layer adds any.
    """
    dtype = torch.float64 if double else torch.float32
    shape = tokens.shape[batch], experts
    return torch.zeros(
        shape, dtype=dtype, device=tokens.device, requires_grad=torch.is_grad_enabled()
    )


def no_choices(tokens: Tensor, experts: int, batch: int = 0) -> Tensor:
    """Zeros [batch, experts], int64, for layers to add the choices of tokens to."""
    return torch.zeros((tokens.shape[batch], experts), dtype=torch.int64, device=tokens.device)


def sum_scores(logits: Tensor, score: Score = "softmax", seq: int = 1) -> Tensor:
    """The sum over each sequence's tokens of their scores of each expert, [batch, experts], float32
    at least.

    logits [batch and seq, experts]; `seq` is the number of the sequence's dim.  Saves logits.
    """
    return cast(Any, _SumScores).apply(logits, score, seq)


class _SumScores(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, score: Score, seq: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.how = score, seq
        return _score_shares(logits, score).sum(seq)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (logits,), (score, seq) = ctx.saved_tensors, ctx.how
        return of_sums(grad_outputs[0], logits, score, seq), None, None


def add_choices(choices: Tensor, ids: Tensor, seq: int = 1) -> Tensor:
    """The counts `choices` [batch, experts], plus how many tokens of each sequence chose each
    expert.

    ids [batch and seq, k]; `seq` is the number of the sequence's dim.
    """
    return choices + is_chosen(ids, choices.shape[-1]).sum(seq)


def aux_loss(scores: Tensor, choices: Tensor, by: float, rows: int, sequences: int = 1) -> Tensor:
    """by · experts · Σ over groups of `sequences` and over experts of f · P (arXiv:2101.03961,
    equations 4 to 6).

    f is the part of the group's `rows`, its tokens in all layers, that chose the expert, without a
    gradient; P the mean of its score.  scores and choices [batch, experts] are sums over a
    sequence's tokens and over layers.  Saves the choices of each group.
    """
    by_group: Tensor = cast(Any, choices).unflatten(0, (-1, sequences)).sum(1)
    chosen = by_group.repeat_interleave(sequences, 0).to(scores.dtype)
    return (scores * chosen).sum() * (by * choices.shape[-1] / rows**2)


def router_z(logits: Tensor, by: float, backend: Losses = PLAIN_LOSSES) -> Tensor:
    """by · Σ over tokens of (log Σ exp logits)²: a loss that keeps logits small (arXiv:2202.08906,
    section 3.3).

    Saves logits, and the logarithms.
    """
    return cast(Any, _RouterZ).apply(logits, by, backend)


class _RouterZ(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, by: float, backend: Losses) -> Tensor:
        logs = backend.log_sums(logits)
        ctx.save_for_backward(logits, logs)
        ctx.how = by, backend
        return by * logs.square().sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (by, backend), (logits, logs) = ctx.how, cast(tuple[Tensor, ...], ctx.saved_tensors)
        return backend.of_log_sums(2 * by * grad_outputs[0], logits, logs), None, None


def is_chosen(ids: Tensor, experts: int) -> Tensor:
    """Which experts each token chose: bool [..., experts]; none for an id of −1."""
    mask = torch.zeros((*ids.shape[:-1], experts + 1), dtype=torch.bool, device=ids.device)
    return mask.scatter_(-1, ids.where(ids >= 0, experts), True)[..., :experts]


def limit_capacity(
    ids: Tensor,
    experts: int,
    capacity: int,
    seq: int = 1,
    positions: Positions | None = None,
    over: Axis | None = None,
) -> Tensor:
    """ids, with −1 where `capacity` tokens of the sequence at earlier positions chose the expert
    (arXiv:2101.03961).

    ids [batch and seq, k]; `seq` is the number of the sequence's dim.  Where an axis shards the
    sequence, `over` is this axis and `positions` are this rank's: one all-gather of counts.
    """
    return decide_once(lambda: _ids_within_capacity(ids, experts, capacity, seq, positions, over))


def _ids_within_capacity(
    ids: Tensor,
    experts: int,
    capacity: int,
    seq: int,
    positions: Positions | None,
    over: Axis | None,
) -> Tensor:
    choices = is_chosen(ids, experts)
    if positions is None or over is None or over.size == 1:
        places = choices.cumsum(seq)
    else:
        runs = choices.split_with_sizes([length for _, length in positions.chunks], seq)
        before = _before(torch.stack([run.sum(seq) for run in runs]), positions, over)
        places_by_run: list[Tensor] = []
        for run, base in zip(runs, before, strict=True):
            places_by_run.append(run.cumsum(seq) + base.unsqueeze(seq))
        places = torch.cat(places_by_run, seq)
    return ids.masked_fill(places.gather(-1, ids.clamp(min=0)) > capacity, -1)


def _before(counts: Tensor, positions: Positions, over: Axis) -> Tensor:
    """The sum of the counts of all chunks of the sequence before each of this rank's: [chunks,
    …], as `counts`.
    """
    by_rank = positions.of_ranks()
    most = max(map(len, by_rank))
    whole = counts.new_zeros((over.size, most, *counts.shape[1:]))
    whole[over.rank, : len(counts)] = counts
    all_gather_(whole.view(-1), over)
    starts: list[tuple[int, int, int]] = []
    for rank, runs in enumerate(by_rank):
        for chunk, (start, _) in enumerate(runs):
            starts.append((start, rank, chunk))
    ordered = sorted(starts)
    ends = torch.stack([whole[rank, chunk] for _, rank, chunk in ordered]).cumsum(0)
    place = {start: number for number, (start, *_) in enumerate(ordered)}
    return torch.stack([ends[place[start]] for start, _ in positions.chunks]) - counts


def _score_shares(logits: Tensor, score: Score) -> Tensor:
    """Scores divided by their sum over experts."""
    wider = logits.to(wide(logits.dtype))
    if score == "sigmoid":
        wider = F.logsigmoid(wider)
    return wider.softmax(-1)
