"""Runs the rows of a pipeline's schedule: what this rank does for which stage and microbatch, in
this order.

Actions are written as torch.distributed.pipelining writes them, `1F3` for stage 1 and microbatch 3:
F forward, B backward, or its parts I, of the input, and W, of the weights; SEND_F and RECV_F of
what forward makes, SEND_B and RECV_B of gradients.  Between stages of one rank values are handed
over without a message.

Rows and message groups are texts of the compiler's file, and are read here; the messages of a group
begin as one.  A row's references are bound once, on the first step; then an action is one call.
Dropout is a function of the sample (`ops.dropout`), so that there is no random state to save.

Non-goals: whether rows and groups are right, and cannot deadlock (the compiler has checked them);
the weights and gradients of a stage (`stage_step`).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.mesh import Axis, Crossing, Mesh
from ..comm.p2p import (
    Exchange,
    Message,
    Slot,
    StageInput,
    make_checked_receive,
    make_checked_send,
    make_receive,
    make_send,
)
from ..data.loader import Batch
from ..state.buckets import Holders
from ..state.flat_param_group import NOTHING, FlatParams
from .stage_step import Cell, Chunks, LastCell, Pass

_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")
_BEGIN, _END = "begin", "end"  # of a stage
_Call = Callable[[Pass], None]


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a row, or where a stage begins or ends."""

    stage: int
    work: str
    microbatch: int

    @property
    def is_message(self) -> bool:
        return "_" in self.work

    @property
    def is_forward(self) -> bool:
        """Whether evaluation does it too."""
        return self.work in ("F", "SEND_F", "RECV_F")


def parse_row(row: str) -> list[Action]:
    """The actions of a row."""
    return [*map(_action, row.split(","))]


def _action(word: str) -> Action:
    match = _ACTION.fullmatch(word)
    assert match, f"pipeline: `{word}` is no action"
    return Action(int(match[1]), match[2], int(match[3]))


def group_messages(actions: Sequence[Action], groups: str) -> Iterator[list[Action]]:
    """A row's actions in their order, in a list for each group of actions that begin as one.
    `groups` is the rank's line.
    """
    group_of_action = dict[Action, str]()
    for group in groups.split(","):
        for word in group.split():
            group_of_action[_action(word)] = group
    # an action that is in no group is one by itself
    runs = groupby(actions, lambda action: group_of_action.get(action, action))
    return (list(run) for _, run in runs)


class Pipeline:
    """A model in stages, over the ranks of an axis.

    stage_to_rank  the rank of each stage
    stage_inputs   what a stage makes for the next, in this order at every cut that it crosses
    schedule       each rank's row of actions, between commas
    message_groups for each rank, its messages that begin as one: groups between commas, messages
    between spaces
    smaller        rows and groups where a mesh with fewer ranks has more microbatches, by their
                   number

    The model is called with a stage's number, what the stage before has made (nothing for the
    first; several values in a tuple), and a microbatch's inputs.  The last stage makes a part of
    the loss.
    """

    def __init__(
        self,
        axis: str,
        stage_to_rank: Sequence[int],
        stage_inputs: Sequence[StageInput],
        schedule: Sequence[str],
        message_groups: Sequence[str] = (),
        smaller: Mapping[int, tuple[Sequence[str], Sequence[str]]] = MappingProxyType({}),
    ) -> None:
        self._axis, self._stage_to_rank, self._stage_inputs = axis, stage_to_rank, stage_inputs
        self._rows, self._smaller = (schedule, message_groups or [""] * len(schedule)), smaller
        # A part of the loss is float32 at least.  A rank without any part cannot see its type.
        self._wide = torch.float32
        for stage_input in stage_inputs:
            self._wide = torch.promote_types(self._wide, stage_input.dtype)
        self._bound: tuple[Mesh, _Row] | None = None

    def stages(self, mesh: Mesh) -> tuple[int, ...]:
        """The stages of this rank."""
        rank = mesh.rank(self._axis)
        ranks = enumerate(self._stage_to_rank)
        return tuple(stage for stage, stage_rank in ranks if stage_rank == rank)

    def build(
        self, kind: Callable[[Mesh, tuple[int, ...]], nn.Module], mesh: Mesh
    ) -> tuple[nn.Module, Holders]:
        """The model with this rank's stages, and for each of its parameters the stages that have
        it.
        """
        stages_of_param: dict[str, tuple[int, ...]] = {}
        for stage in self.stages(mesh):
            for name, _ in kind(mesh, (stage,)).named_parameters():
                stages_of_param[name] = (*stages_of_param.get(name, ()), stage)
        return kind(mesh, self.stages(mesh)), stages_of_param

    def run(
        self,
        model: nn.Module,
        batch: Batch,
        share: Tensor,
        mesh: Mesh,
        flat_params: FlatParams = NOTHING,
        router_share: float | Tensor | None = None,
        loads: tuple[Tensor, ...] = (),
    ) -> Any:
        """Forward and backward of all microbatches; the sum of losses, zero on ranks without the
        last stage.

        `share` is the gradient of each part of the loss.  `router_share`, if given, is the gradient
        of the routers' losses, whose sum is a second result.  The last stage adds the loads of each
        microbatch to `loads`, which are results as well.  Parameters' gradients are added up.
        `flat_params` are waited for where their stages begin, and their gradients are reduced where
        the stages end.
        """
        inputs = [*batch.microbatches()]
        shares = (share,)
        if router_share is not None:
            shares = (share, torch.zeros_like(share) + router_share)
        sums = (*map(torch.zeros_like, shares), *loads)
        now = Pass(model, inputs, shares, sums, Chunks(flat_params, trains=True))
        row = self._row(mesh, len(inputs))
        row.go(row.all, now)
        if len(sums) == 1:
            return sums[0]
        return sums

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, batch: Batch, mesh: Mesh, flat_params: FlatParams = NOTHING
    ) -> Tensor:
        """The sum of losses, without any gradients; nothing is dropped."""
        zero = torch.zeros((), dtype=self._wide, device=mesh.device)
        inputs = [*batch.microbatches()]
        if batch.draws is not None:
            inputs = [(*values[:-1], None) for values in inputs]  # draws come last
        row = self._row(mesh, len(inputs))
        row.go(row.forwards, Pass(model, inputs, (), (zero,), Chunks(flat_params)))
        return zero

    def _row(self, mesh: Mesh, microbatches: int) -> "_Row":
        if self._bound is None or self._bound[0] is not mesh:
            axis = mesh.messages(self._axis)
            rows, groups = self._smaller.get(microbatches, self._rows)
            row = _Row(
                rows[axis.rank],
                groups[axis.rank],
                self._stage_to_rank,
                self._stage_inputs,
                axis,
                mesh.device,
            )
            self._bound = mesh, row
        return self._bound[1]


def _with_stages(actions: Sequence[Action]) -> Iterator[Action]:
    """The actions, and where stages begin and end.

    A stage begins before its first action that computes.  It ends before the action that computes
    next after its last one, so that the last result is sent before the end begins a reduction.
    """
    computing = [i for i, action in enumerate(actions) if not action.is_message]
    begins = {actions[i].stage: i for i in reversed(computing)}
    ends = dict[int, int]()
    for i, next_ in zip(computing, [*computing[1:], len(actions)], strict=True):
        ends[actions[i].stage] = next_
    for i, action in enumerate([*actions, None]):
        for stage, end in ends.items():
            if end == i:
                yield Action(stage, _END, 0)
        if action is None:
            return
        for stage, begin in begins.items():
            if begin == i:
                yield Action(stage, _BEGIN, 0)
        yield action


class _Row:
    """A row's calls, in order: `all`, and the `forwards` alone.

    All rows are parts of one order, where a group of messages is one event of both its ranks (the
    compiler checks it).  So are their forwards: evaluation cannot deadlock either.
    """

    def __init__(
        self,
        row: str,
        groups: str,
        stage_to_rank: Sequence[int],
        stage_inputs: Sequence[StageInput],
        axis: Axis,
        device: torch.device,
    ) -> None:
        self._stage_to_rank, self._axis, self._device = stage_to_rank, axis, device
        # by the stage that it enters; nothing enters the first, or leaves the last
        self._crossing: list[list[StageInput]] = [[]]
        for cut in range(len(stage_to_rank) - 1):
            self._crossing.append([value for value in stage_inputs if value.at(cut)])
        self._crossing.append([])
        # By stage and microbatch, what enters a stage, and its gradient.  If the stage before is of
        # this rank too, it has the same slots, and values are handed over.
        self._entering = defaultdict[tuple[int, int], Slot](Slot)
        self._returning = defaultdict[tuple[int, int], Slot](Slot)
        # by the sending stage and direction
        self._under_way = defaultdict[tuple[int, str], Slot](Slot)
        actions = parse_row(row)
        self._cells = dict[tuple[int, int], Cell]()
        for action in actions:
            if action.work == "F":
                self._cells[action.stage, action.microbatch] = self._cell(action)
        self._microbatches = len({microbatch for _, microbatch in self._cells})
        self.all = self._calls(actions, groups)
        self.forwards = self._calls([action for action in actions if action.is_forward], groups)

    def go(self, calls: Sequence[_Call], now: Pass) -> None:
        """Makes the calls, and waits for the last sends."""
        assert len(now.inputs) == self._microbatches, (
            "pipeline: the rows are for another number of microbatches"
        )
        for call in calls:
            call(now)
        for slot in self._under_way.values():
            slot.take()

    def _cell(self, action: Action) -> Cell:
        here, after = (action.stage, action.microbatch), (action.stage + 1, action.microbatch)
        kind = LastCell if after[0] == len(self._stage_to_rank) else Cell
        entering, returning = self._entering, self._returning
        slots = {
            "x": entering[here],
            "y": entering[after],
            "dy": returning[after],
            "dx": returning[here],
        }
        crossing = self._crossing[action.stage], self._crossing[action.stage + 1]
        return kind(*here, *crossing, self._axis.watch, **slots)

    def _calls(self, actions: Sequence[Action], groups: str) -> tuple[_Call, ...]:
        calls: list[_Call] = []
        for group in group_messages([*_with_stages(actions)], groups):
            if group[0].is_message:
                calls.append(Exchange(self._axis, [*map(self._message, group)], self._device).begin)
            else:
                calls += map(self._call, group)
        return tuple(calls)

    def _call(self, action: Action) -> _Call:
        if action.work == _BEGIN:
            return lambda now: now.chunks.begin(action.stage)
        if action.work == _END:
            return lambda now: now.chunks.end(action.stage)
        cell = self._cells[action.stage, action.microbatch]
        return {"F": cell.forward, "B": cell.backward, "I": cell.input_part, "W": cell.weight_part}[
            action.work
        ]

    def _message(self, action: Action) -> Message:
        """Moves what enters a stage, or its gradient: this stage, or the one after it."""
        sends, values = action.work.startswith("SEND"), action.work.endswith("F")
        ahead = sends == values  # the other end is the stage after
        slots = self._entering if values else self._returning
        slot = slots[action.stage + ahead, action.microbatch]
        other_stage = action.stage + 1 if ahead else action.stage - 1
        peer = self._stage_to_rank[other_stage]
        watch = self._axis.watch
        if sends:
            message = make_send(slot, self._axis, peer, self._under_way[action.stage, action.work])
            if watch is None:
                return message
            return make_checked_send(message, watch)
        crossing = self._crossing[action.stage + ahead]
        moved = [value for value in crossing if values or value.gradient]
        message = make_receive(slot, self._axis, peer, moved, self._device)
        if watch is None:
            return message
        ranks = self._axis.ranks()
        content = Crossing(
            tuple(value.name for value in moved),
            not values,
            action.stage,
            action.microbatch,
            source=ranks[peer],
            target=ranks[self._axis.rank],
        )
        return make_checked_receive(message, watch, content, self._device)
