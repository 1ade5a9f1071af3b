"""A router's losses: one pass over logits for what they need of them, and one for their gradient.

balance     p = softmax(l), or σ(l) / Σ σ(l)      of each sequence and expert Σ p, and how many
            tokens chose it
            dl = p · (d − Σ p · d) · slope        d of Σ p; slope = 1 for a softmax, 1 − σ(l)
                for sigmoids
router_z    z = log Σ exp l                       dl = by · z · exp(l − z)

A program adds up some tokens of one sequence, and torch the sums of programs: nothing is added
atomically.
"""
# pyright: basic, reportGeneralTypeIssues=false

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...comm.mesh import Axis
from ...ops import routing
from ...ops.routing import PLAIN_LOSSES, Losses, Score
from .. import launching
from ..launching import Tile, Tiled, blocks, matrix, next_power_of_two
from .top_k import log_sigmoid, softmax


@triton.jit
def _shares(x, valid, SIGMOID: tl.constexpr):
    """Scores, divided by their sum."""
    return softmax(log_sigmoid(x) if SIGMOID else x, valid)


@triton.jit(do_not_specialize=["length"])
def router_sums_kernel(
    logits, ids, shares, counts, batch_stride, seq_stride, batch_ids, seq_ids, length,
    SIGMOID: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """shares, counts [batch, programs, experts]: sums over every `programs`-th block of tokens
    of a sequence.
    """
    sequence, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)[None, :]
    valid = column < WIDTH
    logits += sequence * batch_stride
    ids += sequence * batch_ids
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    count = tl.zeros([ROWS, COLUMNS], tl.int32)
    for first in range(tl.program_id(1) * ROWS, length, tl.num_programs(1) * ROWS):
        token = first + tl.arange(0, ROWS).to(tl.int64)
        inside = token < length
        x = tl.load(
            logits + token[:, None] * seq_stride + column, mask=inside[:, None] & valid, other=0.0
        )
        total += tl.where(inside[:, None], _shares(x.to(tl.float32), valid, SIGMOID), 0.0)
        for choice in tl.static_range(K):
            id = tl.load(ids + token * seq_ids + choice, mask=inside, other=-1)
            count += (id[:, None] == column).to(tl.int32)
    offsets = (sequence * tl.num_programs(1) + tl.program_id(1)) * WIDTH + tl.arange(0, COLUMNS)
    tl.store(shares + offsets, tl.sum(total, 0), mask=tl.arange(0, COLUMNS) < WIDTH)
    tl.store(counts + offsets, tl.sum(count, 0), mask=tl.arange(0, COLUMNS) < WIDTH)


@triton.jit(do_not_specialize=["length"])
def router_sums_backward(
    gradient, logits, of_logits, batch_stride, seq_stride, of_batch, of_seq, length,
    SIGMOID: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sequence, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)[None, :]
    token = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid, inside = column < WIDTH, (token < length)[:, None] & (column < WIDTH)
    x = tl.load(
        logits + sequence * batch_stride + token[:, None] * seq_stride + column,
        mask=inside,
        other=0.0,
    )
    x = x.to(tl.float32)
    d, p = (
        tl.load(gradient + sequence * WIDTH + column, mask=valid, other=0.0),
        _shares(x, valid, SIGMOID),
    )
    result = p * (d - tl.sum(p * d, 1)[:, None])
    if SIGMOID:
        result *= tl.sigmoid(-x)
    pointers = of_logits + sequence * of_batch + token[:, None] * of_seq + column
    tl.store(pointers, result.to(of_logits.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def router_z_forward(
    logits, logs, stride, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    row, column = (
        tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS),
        tl.arange(0, COLUMNS)[None, :],
    )
    inside, valid = (row < rows)[:, None] & (column < WIDTH), column < WIDTH
    x = tl.load(logits + row[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(valid, x, float("-inf"))
    largest = tl.max(x, 1)
    tl.store(logs + row, largest + tl.log(tl.sum(tl.exp(x - largest[:, None]), 1)), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def router_z_backward(
    by, logits, logs, of_logits, stride, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column = (
        tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS),
        tl.arange(0, COLUMNS)[None, :],
    )
    inside = (row < rows)[:, None] & (column < WIDTH)
    x = tl.load(logits + row[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
    log = tl.load(logs + row, mask=row < rows, other=0.0)[:, None]
    result = tl.load(by) * log * tl.exp(x - log)
    tl.store(
        of_logits + row[:, None] * WIDTH + column,
        result.to(of_logits.dtype.element_ty),
        mask=inside,
    )


class Balance(Tiled[Tile]):
    """`scalec.runtime.balance`; tiles by the number of experts.

    Saves logits, and the shares of choices.
    """

    def __call__(
        self,
        logits: Tensor,
        ids: Tensor,
        by: float,
        score: Score = "softmax",
        seq: int = 1,
        over: Axis | None = None,
    ) -> Tensor:
        """As `scalec.runtime.balance`."""
        return routing.balance(logits, ids, by, score, seq, over, _backend(self, logits))


class RouterZ(Tiled[Tile]):
    """`scalec.runtime.router_z`; tiles by the number of experts.

    Saves logits, and a number for each token.
    """

    def __call__(self, logits: Tensor, by: float) -> Tensor:
        """As `scalec.runtime.router_z`."""
        return routing.router_z(logits, by, _backend(self, logits))


def _backend(op: Tiled[Tile], logits: Tensor) -> Losses:
    tile = op.tile_for(logits.shape[-1], logits)
    if tile is None:
        return PLAIN_LOSSES
    sums, of_sums = partial(_sums, tile=tile), partial(_of_sums, tile=tile)
    return Losses(sums, of_sums, partial(_log_sums, tile=tile), partial(_of_log_sums, tile=tile))


def _sums(logits: Tensor, ids: Tensor, score: Score, seq: int, tile: Tile) -> tuple[Tensor, Tensor]:
    logits, ids = _by_sequence(logits, seq), _by_sequence(ids, seq)
    batch, length, experts = logits.shape
    programs = min(blocks(length, tile.rows), max(1, tile.programs // max(batch, 1)))
    shares = logits.new_empty((batch, programs, experts), dtype=torch.float32)
    counts = torch.empty_like(shares, dtype=torch.int32)
    launching.launch(
        router_sums_kernel,
        (batch, programs),
        *(logits, ids, shares, counts, *logits.stride()[:2], *ids.stride()[:2], length),
        SIGMOID=score == "sigmoid",
        K=ids.shape[-1],
        **tile.options(experts, next_power_of_two(experts)),
    )
    return shares.sum(1), counts.sum(1)


def _of_sums(gradient: Tensor, logits: Tensor, score: Score, seq: int, tile: Tile) -> Tensor:
    of_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    logits, into = _by_sequence(logits, seq), _by_sequence(of_logits, seq)
    batch, length, experts = logits.shape
    launching.launch(
        router_sums_backward,
        (batch, blocks(length, tile.rows)),
        *(gradient.contiguous(), logits, into, *logits.stride()[:2], *into.stride()[:2], length),
        SIGMOID=score == "sigmoid",
        **tile.options(experts, next_power_of_two(experts)),
    )
    return of_logits


def _by_sequence(x: Tensor, seq: int) -> Tensor:
    """x as [batch, seq, …], a view where its last dim lies together in memory."""
    x = x.movedim(seq, 1)
    return x if x.stride(2) == 1 else x.contiguous()


def _log_sums(logits: Tensor, tile: Tile) -> Tensor:
    logs = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    x = matrix(logits, experts := logits.shape[-1])
    options = tile.options(experts, next_power_of_two(experts))
    launching.launch(
        router_z_forward, (blocks(len(x), tile.rows),), x, logs, x.stride(0), len(x), **options
    )
    return logs


def _of_log_sums(by: Tensor, logits: Tensor, logs: Tensor, tile: Tile) -> Tensor:
    of_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    x = matrix(logits, experts := logits.shape[-1])
    launching.launch(
        router_z_backward,
        (blocks(len(x), tile.rows),),
        *(by, x, logs, of_logits, x.stride(0), len(x)),
        **tile.options(experts, next_power_of_two(experts)),
    )
    return of_logits
