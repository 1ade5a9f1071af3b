"""A small program written by hand: a table of bigrams, data-parallel over two ranks.

Non-goals: how it is started (`started`, and the tests themselves).
"""

import os
import signal

import torch
from torch import Tensor, nn

from scalec.runtime import (
    AdamW,
    Batch,
    Bucket,
    Cosine,
    Input,
    Mesh,
    Metrics,
    ParamGroup,
    Plan,
    Text,
    TrainState,
    all_reduce_,
    clip_scale,
    count_valid,
    cross_entropy,
    embedding,
    normal,
    sum_squares,
    weight,
)

ROWS = Input(("batch", "seq"), {"batch": ("dp",)})
PLAN = Plan(
    name="bigram",
    mesh={"dp": 2},
    data=Text(("text/*.txt",), holdout=0.5),
    inputs={"tokens": ROWS, "labels": ROWS},
    vocab=256,
    seq=8,
    global_batch=4,
    microbatches=1,
    steps=4,
    seed=0,
    lr=0.1,
    schedule=Cosine(warmup=1, floor=0.1),
)


class Bigram(nn.Module):
    """The logits of the next token are a row of a table."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.table = weight(mesh, 256, 256, init=normal(0.02))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The sum of the tokens' losses."""
        return cross_entropy(embedding(tokens, self.table), labels)


def build(mesh: Mesh) -> tuple[nn.Module, TrainState]:
    """As an emitted program does."""
    model = Bigram(mesh)
    return model, TrainState(model, mesh, {"dp": Bucket(ParamGroup("table"))}, AdamW())


def train_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    """Three collectives: the count, the gradients, the loss."""
    dp = state.mesh.axis("dp")
    count = all_reduce_(count_valid(batch.labels), dp)
    loss = torch.zeros(())
    for tokens, labels in batch.microbatches():
        part = model(tokens, labels)
        (part / count).backward()
        loss += part.detach()
    norm = sum_squares(all_reduce_(state.gradients()["dp"], dp)).sqrt()
    state.update(lr, scale=clip_scale(norm, 1.0), skip=count == 0)
    return Metrics(loss=all_reduce_(loss, dp) / count, norm=norm, tokens=count)


def eval_step(model: nn.Module, state: TrainState, batch: Batch) -> Metrics:
    """Two collectives: the count, the loss."""
    dp = state.mesh.axis("dp")
    count = all_reduce_(count_valid(batch.labels), dp)
    return Metrics(loss=all_reduce_(model(*next(batch.microbatches())), dp) / count, tokens=count)


def failing_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    """Rank 1 fails before its first collective."""
    if state.mesh.axis("dp").rank == 1:
        raise ValueError("a rank has a bad day")
    return train_step(model, state, batch, lr)


def signalling_step(model: nn.Module, state: TrainState, batch: Batch, lr: float) -> Metrics:
    """Rank 1 gets a signal in each step."""
    if state.mesh.axis("dp").rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    return train_step(model, state, batch, lr)
