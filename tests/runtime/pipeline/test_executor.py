"""Rows of every schedule on gloo ranks against the same model on one: numbers, waits, memory,
what is recorded.
"""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from helpers.bigram import PLAN
from helpers.forked_ranks import run_ranks
from helpers.late_process_group import Link
from helpers.staged_model import (
    CARRIED,
    ROWS,
    SEQ,
    SHARE,
    WIDTH,
    Model,
    data,
    pipeline,
    schedules,
    whole,
)
from scalec.compiler.schedules.actions import Schedule
from scalec.compiler.schedules.activation_memory import Keeps, high_water
from scalec.runtime import Axis, Mesh, Pipeline, StageInput
from scalec.runtime.comm import p2p
from scalec.runtime.comm.p2p import Exchange, Slot, make_receive, make_send
from scalec.runtime.debug.record import Recorder
from scalec.runtime.debug.sanitize import Sanitizer
from scalec.runtime.pipeline.stage_step import Chunks, LastCell, Pass

pytestmark = pytest.mark.usefixtures("calls_uncompared")

MICROBATCHES = range(1, 6)
CPU = torch.device("cpu")
Result = tuple[list[Tensor], list[Tensor], dict[str, Tensor], bool]


class LateMesh(Mesh):
    """Its messages are late."""

    link = Link()

    def messages(self, name: str) -> Axis:
        return self.link.late(super().messages(name))


class WatchedMesh(Mesh):
    """Its messages are compared with what was sent."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        super().__init__(axes, watch=Sanitizer(CPU))


def _steps(mesh: Mesh, schedule: Schedule) -> Result:
    """Losses of two steps, and of evaluations between them; gradients; whether all was waited
    for.
    """
    ours, model = pipeline(schedule), Model(schedule.stages_of(mesh.rank("pp")), schedule.stages)
    losses, evaluated = list[Tensor](), list[Tensor]()
    for seed in range(2):
        losses.append(ours.run(model, data(seed, schedule.microbatches), SHARE, mesh))
        evaluated.append(ours.evaluate(model, data(seed, schedule.microbatches), mesh))
    link = getattr(mesh, "link", Link())
    return losses, evaluated, model.gradients(), not link.under_way


def _all_steps(kind: type[Mesh], every: Sequence[Schedule]) -> list[Result]:
    mesh = kind({"pp": dist.get_world_size()} if dist.is_initialized() else {"pp": 1})
    return [_steps(mesh, schedule) for schedule in every]


def _check(schedule: Schedule, ranks: Sequence[Result]) -> None:
    losses, gradients = whole(
        schedule.stages, [data(seed, schedule.microbatches) for seed in range(2)]
    )
    own = {name: gradient for _, _, part, _ in ranks for name, gradient in part.items()}
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-12, atol=1e-12, msg=name)
    for each in (
        zip(*[rank[0] for rank in ranks], strict=True),
        zip(*[rank[1] for rank in ranks], strict=True),
    ):
        for parts, loss in zip(each, losses, strict=True):
            torch.testing.assert_close(torch.stack(parts).sum(), loss, rtol=1e-12, atol=0)
            assert sum(bool(part) for part in parts) == 1  # the last stage's rank alone has one
            assert {part.dtype for part in parts} == {torch.float64}
    assert all(waited for *_, waited in ranks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Mesh, LateMesh, WatchedMesh])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_schedule_gives_the_single_process_loss_and_gradients(
    ranks: int, kind: type[Mesh]
) -> None:
    every = [schedule for _, schedule in schedules(ranks, MICROBATCHES)]
    assert len(every) > 30
    for schedule, *results in zip(every, *run_ranks(ranks, _all_steps, kind, every), strict=True):
        _check(schedule, results)


def test_one_rank_needs_no_group() -> None:
    """Two stages hand over what they make; I and W are apart."""
    every = [
        schedule
        for name, schedule in schedules(1, [1, 3])
        if name in ("1f1b", "breadth_first", "zbv")
    ]
    assert len(every) == 6
    for schedule, result in zip(every, _all_steps(Mesh, every), strict=True):
        _check(schedule, [result])


def test_evaluation_makes_no_graph() -> None:
    graphs = list[bool]()
    model = Model([0], 1, begins=lambda _: graphs.append(torch.is_grad_enabled()))
    Pipeline("pp", (0,), CARRIED, ("0F0,0B0",)).evaluate(model, data(0, 1), Mesh({"pp": 1}))
    assert graphs == [False]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x.sum(),
    "transposed": lambda x: (x.t() @ torch.ones(3, 2)).sum(),
    "of a slice": lambda x: x[:, 1:].square().sum(),
    "unused": lambda x: torch.ones((), requires_grad=True) * 2,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_lie_as_what_was_received(layout: str) -> None:
    """However backward makes them, autograd gives a leaf's gradient the leaf's layout: they are
    sent without a copy.
    """
    model: Any = lambda _stage, x: LAYOUTS[layout](x)  # noqa: E731
    x, dx = Slot(), Slot()
    x.put((torch.ones(3, 4),))
    cell = LastCell(1, 0, [StageInput("x", (3, 4), torch.float32)], [], None, x, Slot(), Slot(), dx)
    now = Pass(model, [()], shares=(torch.ones(()),), sums=(torch.zeros(()),), chunks=Chunks({}))
    cell.forward(now)
    cell.backward(now)
    (gradient,) = dx.take()
    assert gradient.is_contiguous()
    assert gradient.untyped_storage().nbytes() == 3 * 4 * 4


def _unwaited(every: Sequence[Schedule], ends: bool) -> bool:
    """Whether all is as it should be if nothing waits where values are taken, or sends at the
    end alone.
    """
    take = Slot.take

    def hasty(self: Slot) -> Any:
        if not ends:
            self._works = ()
        return take(self)

    p2p.Slot.take = hasty
    try:
        results = _all_steps(LateMesh, every)
    except AssertionError:
        return False
    losses = torch.stack([loss for losses, *_ in results for loss in losses])
    return bool(losses.isfinite().all()) and all(waited for *_, waited in results)


def test_without_waits_it_is_wrong() -> None:
    every = [schedule for name, schedule in schedules(2, [3]) if name in ("1f1b", "zbv")]
    assert all(run_ranks(2, _unwaited, every, True))
    assert not any(run_ranks(2, _unwaited, every, False))


def test_rows_are_read_whole() -> None:
    with pytest.raises(AssertionError, match="`0G0` is no action"):
        _row("0F0,0G0")
    with pytest.raises(AssertionError, match="another number of microbatches"):
        _row("0F0,0B0")


def _row(row: str) -> None:
    Pipeline("pp", (0,), (), (row,)).run(Model([0], 1), data(0, 2), SHARE, Mesh({"pp": 1}))


# ---- several messages as one


class _Coalescing:
    """A group that writes down what it is asked to do, and can begin messages as one."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.asked = list[str]()

    def _get_backend(self, device: torch.device) -> "_Coalescing":
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.asked.append("[")

    def _end_coalescing(self, device: torch.device) -> Any:
        self.asked.append("]")
        return SimpleNamespace(wait=lambda: self.asked.append("wait"))

    def send(self, values: list[Tensor], peer: int, tag: int) -> None:
        self.asked.append(f"send {peer}")

    def recv(self, values: list[Tensor], peer: int, tag: int) -> None:
        self.asked.append(f"receive {peer}")


@pytest.mark.parametrize("both", [False, True])
def test_where_the_backend_can_messages_begin_as_one(both: bool) -> None:
    """Even a single one, and each that is waited for waits for all."""
    group, out, under_way, into = _Coalescing(), Slot(), Slot(), Slot()
    axis, device = Axis("pp", 3, 1, group), torch.device("cpu")
    send, receive = (
        make_send(out, axis, 2, under_way),
        make_receive(into, axis, 0, CARRIED[:1], device),
    )
    out.put((torch.zeros(2),))
    exchange = Exchange(axis, [send, receive] if both else [receive], device)
    exchange.begin(None)
    assert group.asked == ["[", *["send 2"] * both, "receive 0", "]"]
    into.take()
    assert group.asked[-1] == "wait"
    out.put((torch.zeros(2),))
    exchange.begin(None)
    assert group.asked.count("wait") == 1 + both  # for the send before


def _two_at_once() -> list[float]:
    """Sends of one kind in one exchange are all waited for, and arrive in order."""
    link, device = Link(), torch.device("cpu")
    axis = link.late(Mesh({"pp": 2}).axis("pp"))
    slots, under_way = [Slot(), Slot()], Slot()
    if axis.rank == 0:
        for number, slot in enumerate(slots):
            slot.put((torch.full((1,), float(number)),))
        Exchange(axis, [make_send(slot, axis, 1, under_way) for slot in slots], device).begin(None)
        under_way.take()
    else:
        one = [StageInput("x", (1,), torch.float32)]
        Exchange(axis, [make_receive(slot, axis, 0, one, device) for slot in slots], device).begin(
            None
        )
    values = [slot.take() for slot in slots]
    assert not link.under_way
    return [float(value) for (value,) in values] if axis.rank else []


def test_several_sends_of_one_kind_are_waited_for() -> None:
    assert run_ranks(2, _two_at_once)[1] == [0.0, 1.0]


# ---- what is in memory


class _Token:
    """Lives as long as the graph that it is in."""


class _Counted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, live: "weakref.WeakSet[_Token]") -> Tensor:
        ctx.token = _Token()
        live.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _CountedModel(Model):
    """Counts the graphs that are kept, and the values of a boundary's size that Python sees
    when a stage begins.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        super().__init__(schedule.stages_of(rank), schedule.stages)
        self.live = weakref.WeakSet[_Token]()
        self.graphs = self.values = 0

    def forward(self, stage: int, given: Any, tokens: Tensor, labels: Tensor) -> Any:
        self.values = max(self.values, _boundaries())
        made = super().forward(stage, given, tokens, labels)
        if isinstance(made, Tensor):
            made = _Counted.apply(made, self.live)
        else:
            made = (_Counted.apply(made[0], self.live), *made[1:])
        self.graphs = max(self.graphs, len(self.live))
        return made


def _boundaries() -> int:
    seen = [
        each for each in gc.get_objects() if type(each) is Tensor and each.shape == CARRIED[2].shape
    ]
    return len({each.untyped_storage()._cdata for each in seen})


def count_live_graphs(every: Sequence[Schedule]) -> list[tuple[int, int, int, int]]:
    """Of each schedule the most graphs and boundary values at once, and those that are left."""
    mesh, found = Mesh({"pp": dist.get_world_size()}), list[tuple[int, int, int, int]]()
    gc.disable()  # what is in a circle would stay
    gc.freeze()  # what follows is all that is looked at
    for schedule in every:
        model = _CountedModel(schedule, mesh.rank("pp"))
        ours = pipeline(schedule)
        ours.run(model, data(0, schedule.microbatches), SHARE, mesh)
        found.append((model.graphs, model.values, len(model.live), _boundaries()))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_graphs_are_kept_no_longer_than_until_backward(ranks: int) -> None:
    named = list(schedules(ranks, [1, 4, 6]))
    every = [schedule for _, schedule in named]
    for (name, schedule), *held in zip(
        named, *run_ranks(ranks, count_live_graphs, every), strict=True
    ):
        keeps = Keeps.uniform(schedule.stages, input=1, weight=0)
        assert [graphs for graphs, *_ in held] == [*high_water(schedule, keeps)], name
        assert [left for *_, left, _ in held] == [0] * ranks
        assert [left for *_, left in held] == [0] * ranks


def test_values_are_kept_no_longer_than_they_are_needed() -> None:
    """With more microbatches no more of them; a first stage has what it sends, and what it is
    about to take.
    """
    named = list(schedules(2, [6, 8]))
    held = run_ranks(2, count_live_graphs, [schedule for _, schedule in named])
    values = {
        (name, schedule.microbatches): [of[1] for of in each]
        for (name, schedule), *each in zip(named, *held, strict=True)
    }
    assert values["1f1b", 6] == values["1f1b", 8] == [2, 2]
    assert values["gpipe", 6] == [1, 6]
    assert values["zbv", 6] == values["zbv", 8] == [3, 8]


# ---- what is recorded


def _recorded(folder: Path, schedule: Schedule) -> list[tuple[Any, ...]]:
    import json

    mesh = Mesh({"pp": 2})
    ours, model = pipeline(schedule), Model(schedule.stages_of(mesh.rank("pp")), schedule.stages)
    with Recorder(folder, PLAN, 0) as recorder:
        recorder.of("train", lambda: ours.run(model, data(0, 1), SHARE, mesh))()
    lines = (folder / f"rank{dist.get_rank():05}.jsonl").read_text().splitlines()
    calls = [json.loads(line) for line in lines[1:-1]]
    return [
        (call["op"], call["peer"], call["group"], call["shape"], call["dtype"]) for call in calls
    ]


def test_messages_are_recorded(tmp_path: Path) -> None:
    (schedule,) = [schedule for name, schedule in schedules(2, [1]) if name == "1f1b"]
    ahead = [([ROWS, SEQ, WIDTH], "float64"), ([ROWS, SEQ], "int64"), ([ROWS, WIDTH], "float64")]
    back = [ahead[0], ahead[2]]
    for rank, recorded in enumerate(run_ranks(2, _recorded, tmp_path, schedule)):
        first, second = ("receive", "send") if rank else ("send", "receive")
        assert recorded == [
            (op, 1 - rank, [0, 1], *of)
            for op, ofs in ((first, ahead), (second, back))
            for of in ofs
        ]
