"""Memory of messages between stages: row 32; and their order: row 106."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.late_process_group import Link
from helpers.staged_model import SHARE, Model, data, pipeline, schedules, whole
from scalec.compiler.schedules.actions import Schedule, Work
from scalec.compiler.schedules.check import problems
from scalec.runtime import Axis, Mesh, StageInput
from scalec.runtime.comm import c10d, p2p
from scalec.runtime.comm.p2p import Slot

Gradients = dict[str, Tensor]


class LateMesh(Mesh):
    """Its messages are late."""

    link = Link()

    def messages(self, name: str) -> Axis:
        return self.link.late(super().messages(name))


def _step(
    schedule: Schedule, kind: type[Mesh], plant: Callable[[], None] | None
) -> Gradients | str:
    """A rank's gradients with the defect, or what stops it."""
    if plant:
        plant()
    mesh = kind({"pp": 2})
    model = Model(schedule.stages_of(mesh.rank("pp")), schedule.stages)
    try:
        pipeline(schedule).run(model, data(0, schedule.microbatches), SHARE, mesh)
    except AssertionError as error:
        return str(error)
    return model.gradients()


def _received_into_one_memory() -> None:
    """What a stage receives lies where the microbatch before it lay."""
    received, memory = p2p.make_receive, dict[StageInput, Tensor]()

    def reusing(
        slot: Slot, axis: Axis, peer: int, carried: Any, device: torch.device
    ) -> p2p.Message:
        made = received(slot, axis, peer, carried, device)
        fresh = made.ready

        def ready() -> tuple[Tensor, ...]:
            return tuple(
                memory.setdefault(each, new) for each, new in zip(carried, fresh(), strict=True)
            )

        return p2p.Message(ready, made.call, axis, peer, made.under_way)

    _replaced("make_receive", reusing)


def _sent_from_one_memory() -> None:
    """What a stage sends lies where the microbatch before it lay, whose message may be under
    way.
    """
    memory = dict[tuple[int, torch.dtype], Tensor]()

    def reusing(slot: Slot, axis: Axis, peer: int, under_way: Slot) -> p2p.Message:
        def ready() -> tuple[Tensor, ...]:
            values = [x.contiguous() for x in slot.take()]
            return tuple(
                memory.setdefault((at, x.dtype), x.clone()).copy_(x) for at, x in enumerate(values)
            )

        return p2p.Message(ready, c10d.begin_send, axis, peer, under_way)

    _replaced("make_send", reusing)


def _replaced(name: str, function: Any) -> None:
    from scalec.runtime.pipeline import executor as rows

    setattr(rows, name, function)


@pytest.fixture
def schedule() -> Schedule:
    """All forwards first, so that many values are in memory at once."""
    return next(schedule for name, schedule in schedules(2, [3]) if name == "gpipe")


def test_row_106_a_message_is_taken_for_that_of_another_microbatch(schedule: Schedule) -> None:
    """Two messages between two ranks passed each other (Megatron#1450): the rows' own check, at
    every compile.
    """
    assert problems(schedule) == []
    row = [*schedule.rows[0]]
    first, second = [at for at, action in enumerate(row) if action.work is Work.SEND_FORWARD][:2]
    row.insert(second, row.pop(first))
    (found,) = problems(evolve(schedule, rows=(tuple(row), *schedule.rows[1:])))
    assert found.why == f"`1RECV_F0` gets `0SEND_F1` (cell {second - 1}) of rank 0"


def _right(schedule: Schedule, ranks: list[Gradients | str]) -> bool:
    _, expected = whole(schedule.stages, [data(0, schedule.microbatches)])
    own = {
        name: gradient
        for rank in ranks
        if isinstance(rank, dict)
        for name, gradient in rank.items()
    }
    return own.keys() == expected.keys() and all(
        torch.allclose(own[name], gradient, rtol=1e-12, atol=1e-12)
        for name, gradient in expected.items()
    )


def test_row_32_without_a_defect_it_is_right(schedule: Schedule) -> None:
    assert _right(schedule, run_ranks(2, _step, schedule, LateMesh, None))


def test_row_32_memory_is_received_into_while_backward_needs_it(schedule: Schedule) -> None:
    """Gradients are of another microbatch's values, whatever the group."""
    assert not _right(schedule, run_ranks(2, _step, schedule, Mesh, _received_into_one_memory))


def test_row_32_memory_is_written_before_it_is_sent(schedule: Schedule) -> None:
    """gloo has mostly sent by then, so that nothing shows; the late group says it."""
    first, _ = run_ranks(2, _step, schedule, LateMesh, _sent_from_one_memory)
    assert first == "what is sent has changed on its way"
