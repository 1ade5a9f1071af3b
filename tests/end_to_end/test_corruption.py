"""Silent corruption on one of several ranks: which look of `watch` finds it, by step and place,
and what none finds.
"""

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from helpers.programs import write_program
from helpers.small_log import small_log
from scalec.runtime import Batch, Mesh, Watch
from scalec.runtime.errors import RunError
from scalec.runtime.train.watching import Watching
from scalec.testing.faults import Fault, Flip, Point, Program, fork

Plant = Callable[[Any, Any, Batch], None]
"""Spoils something on one rank, given its model, state and batch."""

TENSORS = Case(dp=2, tp=2, clip=0.05, optimizer="adamw", precision="fp32")
SHARED = Case(dp=2, optimizer="adamw", precision="fp32", state="zero 1 over dp")
STAGES = Case(pp=2, dp=2, optimizer="momentum", microbatches=2, precision="fp32")
EACH = Watch(copies=1)
TWICE = Watch(replay=2)


def _flip(x: Tensor) -> None:
    x.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def _box(state: Any, start: str) -> Tensor:
    return next(
        box.tensor for box in state.boxes() if box.key.startswith(start) and box.tensor.numel()
    )


def _before_the_update(state: Any, spoil: Callable[[], None]) -> None:
    """Once, after the ranks' own sums and before anything is compared."""

    def look() -> None:
        state.looks.remove(look)
        spoil()

    state.looks.insert(0, look)


def _tokens(model: Any, state: Any, batch: Batch) -> None:
    batch.tokens[0, 1, 2] += 1


def _sum_of_copies(model: Any, state: Any, batch: Batch) -> None:
    """The result of an all-reduce."""
    held = next(it for it in state.copies() if it.axis.size > 1 and it.role == "gradient")
    _before_the_update(state, lambda: _flip(held.tensor))


def _sum_of_a_shard(model: Any, state: Any, batch: Batch) -> None:
    """The result of a reduce-scatter, which one rank alone has."""
    _before_the_update(state, lambda: _flip(state._memories[0].flat_params[0].gradient_shard()))


def _shard(model: Any, state: Any, batch: Batch) -> None:
    """State that one rank alone has."""
    _before_the_update(state, lambda: _flip(_box(state, "optimizer/exp_avg_sq/")))


def _layer(model: Any, state: Any, batch: Batch) -> None:
    """A function whose results differ by chance, as a user's op might have."""
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1"))
    forward, calls = layer.forward, count(1)
    layer.forward = lambda x, *others: forward(x * (1 + 2**-20 * next(calls)), *others)


def _always(model: Any, state: Any, batch: Batch) -> None:
    """A function that is wrong on this rank, each time alike."""
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1"))
    forward = layer.forward
    layer.forward = lambda x, *others: forward(x * 1.001, *others)


class _Noisy:
    """An optimizer whose arithmetic differs by chance."""

    def __init__(self, usual: Any) -> None:
        self._usual, self._calls = usual, count(1)

    def update(self, part: Any, **given: Any) -> None:
        self._usual.update(part, **given)
        part.slots["exp_avg"].view(-1)[0] += next(self._calls)


def _optimizer(model: Any, state: Any, batch: Batch) -> None:
    state._optimizer = _Noisy(state._optimizer)


def _copy(model: Any, state: Any, batch: Batch) -> None:
    _flip(next(it.tensor for it in state.copies() if it.axis.size > 1))


FOUND: dict[str, tuple[Case, Watch, Plant, str]] = {
    "data that ranks share": (
        TENSORS,
        EACH,
        _tokens,
        r"step 2: input tokens\[0, 1, 2\] is not the same over tp: rank 2 differs from rank 3, \d+ on rank 2",
    ),
    "data of a pipeline": (
        STAGES,
        EACH,
        _tokens,
        r"step 2: input tokens\[0, 1, 2\] is not the same over pp: rank 1 ",
    ),
    "a sum that ranks share": (
        TENSORS,
        EACH,
        _sum_of_copies,
        r"step 2: the gradient of \S+\[\S.*\] is not the same over",
    ),
    "a copy in a pipeline": (
        STAGES,
        EACH,
        _copy,
        r"step 2: momentum_buffer of \S+\[.*\] is not the same over dp: rank 2",
    ),
    "a shard at rest": (
        SHARED,
        EACH,
        _shard,
        r"step 2: `optimizer/exp_avg_sq/\S+` changed before the update, on rank 1 on",
    ),
    "a sum of a shard": (
        SHARED,
        TWICE,
        _sum_of_a_shard,
        r"step 2: run twice, rank 1 on \S+ has another gradient of bucket",
    ),
    "an op": (
        SHARED,
        TWICE,
        _layer,
        r"step 2: run twice, rank 1 on \S+ has another result of layers\.1 in call 1, ",
    ),
    "an update": (
        SHARED,
        TWICE,
        _optimizer,
        r"step 2: run twice, rank 1 on \S+ has another update of exp_avg in \S+",
    ),
}
UNSEEN: dict[str, tuple[Case, Plant]] = {
    "data that one rank alone has": (SHARED, _tokens),
    "an op that is wrong alike each time": (SHARED, _always),
}
"""Nothing is the same as what these spoil, on any other rank or at any other time."""


def _watched(module: Any, rows: harness.Inputs, asked: Watch, plant: Plant) -> str:
    """What the last rank is told in three steps, before the second of which something is
    spoiled on it.
    """
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    state.initialise(0)
    batch = harness.local_batch(module.PLAN, *rows)
    batch = Batch(batch.tokens.clone(), batch.labels.clone())
    run = module.train_step
    watching = Watching(
        asked, model, state, run, lambda _: batch, small_log(None), module.PLAN.inputs
    )
    try:
        for number in (1, 2, 3):
            if (
                number == 2
                and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
            ):
                plant(model, state, batch)
            watching.after(number, watching.step(number, batch, 0.1, run, lambda: None))
    except RunError as error:
        return str(error)
    return ""


def get_reports(case: Case, folder: Path, asked: Watch, plant: Plant) -> set[str]:
    rows = next(harness.batches(case, 1))
    return {*run_ranks(case.ranks, _watched, harness.load_case(case, folder), rows, asked, plant)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", FOUND)
def test_it_is_found_where_it_is(what: str, tmp_path: Path) -> None:
    case, asked, plant, words = FOUND[what]
    (told,) = get_reports(case, tmp_path, asked, plant)
    assert re.match(words, told), told


@pytest.mark.parametrize("what", UNSEEN)
def test_none_finds_what_is_the_same_as_nothing(what: str, tmp_path: Path) -> None:
    case, plant = UNSEEN[what]
    assert get_reports(case, tmp_path, Watch(copies=1, replay=1), plant) == {""}


# ---- whole runs of other kinds of plans

ELASTIC = plan_text(Case(dp=4, optimizer="adamw", state="zero 1 over dp")).replace(
    "dp = 4", "dp = 2..4"
)
DOCUMENTS = (
    plan_text(Case(tp=2, microbatches=2, optimizer="adamw"))
    .replace("labels[batch, seq])", "labels[batch, seq], documents[batch, seq])")
    .replace("mask=causal", "mask=causal, documents=documents")
    .replace("tokenizer = bytes", "tokenizer = bytes  separator = 10")
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("text", [ELASTIC, DOCUMENTS], ids=["elastic", "documents"])
def test_runs_are_watched(text: str, faulty: bool, tmp_path: Path) -> None:
    """Of the elastic plan on its smaller mesh."""
    write_program(
        f"{text} watch {{ copies every 2  replay every 3  spikes = 8  locate = on }}", tmp_path
    )
    (tmp_path / "corpus.bin").write_bytes(bytes(i * 7 % 32 for i in range(8000)))
    program = Program(
        tmp_path, 2, "--data=corpus.bin --data-as-is --device=cpu --steps=6 --log-every=1"
    )
    ended = fork(program, *[Fault(Point("step", 4, 1), Flip(of="state"))] * faulty).wait(120)
    assert ended.statuses == ((1, 1) if faulty else (0, 0)), ended.err
    assert any("error: step 4: " in said for said in ended.err) == faulty, ended.err
