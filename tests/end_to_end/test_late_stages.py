"""Emitted programs in stages on a network that is late: what moves around a stage begins and ends
where it should.

Non-goals: numbers of whole programs (`test_pipelines`), and that all is recorded as planned
(`test_recorded_stages`).
"""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from helpers.forked_ranks import run_ranks
from helpers.late_process_group import Link
from helpers.oracle import harness
from helpers.oracle.plans import Case
from helpers.oracle.reference import Tensors
from scalec.runtime import Mesh, TrainState, unshard_ahead
from scalec.runtime.pipeline import stage_step
from scalec.runtime.state import flat_param, grad_reduction

CASE = Case(pp=2, dp=2, microbatches=4, layers=4, schedule="interleaved_1f1b(chunks=2)", clip=0.05)
STATES = ("", "zero 1 over dp", "zero 3 over dp")
Event = tuple[str, str, int]


def _step(
    module: ModuleType, start: Tensors, batch: harness.Inputs, without: str = ""
) -> tuple[float, list[Event]]:
    """The norm of a step's gradients; what began, was waited for and done in it, in order."""
    mesh, link = Mesh(module.PLAN.mesh), Link()
    link.poison()
    _make_late(module, link)
    if without:
        _no_longer(without)
    model, state = module.build(mesh)
    harness.fill(state, start)
    record_cells(link)
    metrics = module.train_step(model, state, harness.local_batch(module.PLAN, *batch), 0.1)
    return float(metrics.norm), link.events


def _make_late(module: Any, link: Link) -> None:
    """What chunks gather and reduce is late."""

    module.unshard_ahead = lambda axis, *flat_params: unshard_ahead(link.late(axis), *flat_params)
    build = module.build

    def built(mesh: Mesh) -> tuple[nn.Module, TrainState]:
        model, state = build(mesh)
        for flat in state._flats():
            flat.shard_axis, flat.reduce_axis = (
                link.late(flat.shard_axis),
                flat.reduce_axis and link.late(flat.reduce_axis),
            )
        return model, state

    module.build = built


def _no_longer(what: str) -> None:
    """Nothing waits for weights, or for the sums of gradients, in this process."""
    if what == "weights":
        flat_param.FlatParam.wait_for_unshard = lambda self: None
    else:
        grad_reduction.Reductions.finish = lambda self: None


def record_cells(link: Link) -> None:
    """Forwards and backwards are events too."""
    for name in ("forward", "backward"):
        done = getattr(stage_step.Cell, name)

        def told(self: Any, now: Any, name: str = name, done: Any = done) -> None:
            link.events.append(("does", name, self._stage))
            done(self, now)

        setattr(stage_step.Cell, name, told)


def _norms(state: str, folder: Path, without: str = "") -> list[tuple[float, list[Event]]]:
    case = Case(**{**vars(CASE), "state": state})
    module = harness.load_case(case, folder)
    start = harness.initial(case, module, seed=3)
    (batch,) = harness.batches(case, 1)
    return run_ranks(case.ranks, _step, module, start, batch, without)


@pytest.mark.sample(1)
@pytest.mark.parametrize("state", STATES)
def test_what_a_stage_needs_is_awaited_and_what_it_leaves_is_summed_meanwhile(
    state: str, tmp_path: Path
) -> None:
    results = _norms(state, tmp_path)
    assert len({norm for norm, _ in results}) == 1
    for rank, (norm, events) in enumerate(results):
        assert norm > 0
        stages = (0, 2) if rank < CASE.dp else (1, 3)
        if state:
            _check_gathers(events, stages)
        _check_reductions(events, stages, "scatter" if state else "sum")


def _check_gathers(events: Sequence[Event], stages: tuple[int, int]) -> None:
    """All begin before anything is done; the second stage's is waited for when the first has
    long begun.
    """
    gathers = [number for what, name, number in events if (what, name) == ("begin", "gather")]
    first, second = (events.index(("does", "forward", stage)) for stage in stages)
    assert len(gathers) == len(stages)
    assert all(events.index(("begin", "gather", number)) < first for number in gathers)
    waits = [events.index(("wait", "gather", number)) for number in gathers]
    assert waits[0] < first < waits[1] < second


def _check_reductions(events: Sequence[Event], stages: tuple[int, int], name: str) -> None:
    """Each begins behind its stage's last backward; the first one before the rows end, awaited
    behind them.
    """
    begun = [at for at, (what, which, _) in enumerate(events) if (what, which) == ("begin", name)]
    ends = [
        max(at for at, event in enumerate(events) if event == ("does", "backward", stage))
        for stage in stages
    ]
    awaited = [events.index(("wait", name, events[at][2])) for at in begun]
    assert ends[1] < begun[0] < ends[0] < begun[1]
    assert min(awaited) > begun[1]


@pytest.mark.parametrize("without", ["weights", "sums"])
def test_without_waits_it_is_wrong(without: str, tmp_path: Path) -> None:
    norms = [norm for norm, _ in _norms("zero 1 over dp", tmp_path, without)]
    assert not any(torch.isfinite(torch.tensor(norms)))
