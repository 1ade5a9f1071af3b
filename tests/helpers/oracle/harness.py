"""Compiles a plan, runs the emitted program on forked ranks, and puts the ranks' parts together
again.

A rank holds the boxes of its state; where ranks hold copies, these must agree to the last bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.oracle.plans import ROWS, SEQ, Case, plan_text
from helpers.oracle.reference import BIAS, Step, Tensors
from helpers.programs import load_program
from scalec.runtime import Batch, Mesh
from scalec.runtime.state.shards import Box, whole

Inputs = tuple[Tensor, ...]
"""Tokens, labels, and what else a model takes: [rows, seq] each."""


@dataclass(frozen=True)
class Part:
    """One rank's part of a tensor: `local` begins at `offsets` of the global `shape`."""

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class RankStep:
    """A step as one rank saw it."""

    loss: float
    norm: float
    tokens: int
    gradients: dict[str, Part]
    parameters: dict[str, Part]
    router_loss: float
    loads: tuple[Tensor, ...]


def load_case(case: Case, folder: Path) -> ModuleType:
    """The emitted program of a case, written to `folder` and imported."""
    return load_program(plan_text(case), folder)


def run(
    case: Case, module: ModuleType, start: Tensors, batches: Sequence[Inputs], lr: float
) -> list[Step]:
    """Trains the emitted program from `start` on global batches, [rows, seq] each; its steps,
    put together.
    """
    ranks: list[list[RankStep]] = run_ranks(case.ranks, _train, module, start, batches, lr)
    return [_joined(steps, start) for steps in zip(*ranks, strict=True)]


def evaluate(case: Case, module: ModuleType, start: Tensors, batch: Inputs) -> list[float]:
    """The loss of `eval_step` on each rank."""
    return run_ranks(case.ranks, _evaluate, module, start, batch)


def _evaluate(module: ModuleType, start: Tensors, batch: Inputs) -> float:
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    fill(state, start)
    return float(module.eval_step(model, state, local_batch(module.PLAN, *batch)).loss)


def initial(case: Case, module: ModuleType, seed: int) -> Tensors:
    """The parameters that the emitted program begins with."""
    return joined(run_ranks(case.ranks, _initialise, module, seed))


def _initialise(module: ModuleType, seed: int) -> dict[str, Part]:
    _, state = module.build(Mesh(module.PLAN.mesh))
    state.initialise(seed)
    return _parameters(state)


def _train(
    module: ModuleType, start: Tensors, batches: Sequence[Inputs], lr: float
) -> list[RankStep]:
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    fill(state, start)
    return [_step(module, model, state, local_batch(module.PLAN, *batch), lr) for batch in batches]


def _step(
    module: ModuleType, model: torch.nn.Module, state: Any, batch: Batch, lr: float
) -> RankStep:
    """One step; its reduced gradients are copied when the update begins, before it scales them."""
    gradients: dict[str, Part] = {}

    def update(*args: Any, **options: Any) -> None:
        gradients.update(
            (box.key, _gradient(state, box)) for box in _boxes(state) if not box.key.endswith(BIAS)
        )
        type(state).update(state, *args, **options)

    state.update = update
    metrics = module.train_step(model, state, batch, lr)
    of_routers = 0.0 if metrics.router_loss is None else float(metrics.router_loss)
    shown = float(metrics.loss), float(metrics.norm), int(metrics.tokens)
    loads = tuple(row for load in metrics.loads for row in load)
    return RankStep(*shown, gradients, _parameters(state), of_routers, loads)


def _gradient(state: Any, box: Box) -> Part:
    """That of the elements which this rank keeps of a parameter: they lie in their buffer as
    masters do in theirs.
    """
    flat = next(flat for flat in state._flats() if _holds(flat.buffers.master, box.tensor))
    start = box.tensor.storage_offset() - flat.buffers.master.storage_offset()
    own = flat.gradient_shard()[start : start + box.tensor.numel()]
    return Part(own.view(box.tensor.shape).clone(), box.shape, box.offset)


def _holds(whole: Tensor, part: Tensor) -> bool:
    """Whether a tensor is a view of another."""
    begin, end = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    return begin <= part.data_ptr() < end


def _parameters(state: Any) -> dict[str, Part]:
    """Copies of this rank's parts of the parameters."""
    return {box.key: Part(box.tensor.clone(), box.shape, box.offset) for box in _boxes(state)}


def _boxes(state: Any) -> Iterator[Box]:
    return (box for box in state.boxes() if not box.key.startswith("optimizer/"))


def kept(state: Any) -> Tensors:
    """This rank's state, by key: views."""
    return {box.key: box.tensor for box in state.boxes()}


def fill(state: Any, start: Tensors) -> None:
    """Copies this rank's part of global parameters into the state."""
    for box in _boxes(state):
        value = start[box.key]
        # of experts, rows of all of them
        joined = value.flatten(0, -2).shape if value.ndim > 2 else value.shape
        assert box.shape in (value.shape, joined), (
            f"{box.key}: {box.shape} where the reference has {value.shape}"
        )
        box.tensor.copy_(value.view(box.shape)[box.extent.within(whole(box.shape))])
    state.refresh()


def local_batch(plan: Any, *inputs: Tensor) -> Batch:
    """This rank's part of a global batch, in the order of the plan's inputs.

    Row m · (D · b) + r · b + j is row j of microbatch m on data rank r of D.
    """
    coordinates = dict(zip(plan.mesh, _coordinates(plan.mesh), strict=True))

    def local(rows: Tensor, name: str) -> Tensor:
        layout = plan.inputs[name]
        rows = rows.view(plan.microbatches, -1, *rows.shape[1:])
        for dim, at in (("batch", 1), ("seq", 2)):
            for axis in layout.split.get(dim, ()):
                ranks, rank = plan.mesh[axis], coordinates[axis]
                if axis in layout.zigzag:
                    chunks = rows.chunk(2 * ranks, at)
                    rows = torch.cat([chunks[rank], chunks[-1 - rank]], at)
                else:
                    rows = rows.chunk(ranks, at)[rank]
        return (rows.transpose(1, 2) if layout.dims == ("seq", "batch") else rows).contiguous()

    return Batch(
        **{name: local(rows, name) for name, rows in zip(plan.inputs, inputs, strict=True)}
    )


def _coordinates(mesh: dict[str, int]) -> list[int]:
    """This rank's place on each axis; ranks are counted with the last axis innermost."""
    rank, places = dist.get_rank(), list[int]()
    for size in reversed(mesh.values()):
        rank, place = divmod(rank, size)
        places.insert(0, place)
    return places


def _box(part: Part) -> tuple[slice, ...]:
    return tuple(
        slice(at, at + size) for at, size in zip(part.offsets, part.local.shape, strict=True)
    )


def _joined(steps: tuple[RankStep, ...], like: Tensors) -> Step:
    first = steps[0]
    assert len({(s.loss, s.norm, s.tokens, s.router_loss) for s in steps}) == 1, "metrics differ"
    wholes = (joined([s.gradients for s in steps]), joined([s.parameters for s in steps]))
    for each in steps:
        assert all(map(torch.equal, each.loads, first.loads)), "loads differ"
    gradients, parameters = (
        {name: x.view_as(like[name]) for name, x in each.items()} for each in wholes
    )
    return Step(first.loss, first.norm, gradients, parameters, first.router_loss, first.loads)


def joined(ranks: list[dict[str, Part]]) -> Tensors:
    """Global tensors; every element is there, and equal on all ranks that hold it."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {
        name: _assembled(name, [rank[name] for rank in ranks if name in rank]) for name in names
    }


def _assembled(name: str, parts: list[Part]) -> Tensor:
    whole = torch.zeros(parts[0].shape, dtype=parts[0].local.dtype)
    there = torch.zeros(parts[0].shape, dtype=torch.bool)
    for part in parts:
        box = _box(part)
        held = there[box]
        assert torch.equal(whole[box][held], part.local[held]), (
            f"{name}: copies on two ranks differ"
        )
        whole[box], there[box] = part.local, True
    assert there.all(), f"{name}: a part is on no rank"
    return whole


def batches(case: Case, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens and labels, [rows, seq] a step; negative labels as the case says."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens, labels = (
            torch.randint(case.config.classes, (case.rows, SEQ), generator=generator)
            for _ in range(2)
        )
        noise = torch.rand(case.rows, SEQ, generator=generator) * torch.rand(
            case.rows, 1, generator=generator
        )
        yield tokens, labels.masked_fill(_ignored(case, noise), -100)


def _ignored(case: Case, noise: Tensor) -> Tensor:
    """Which labels do not count; unless all do, every rank has another number of them."""
    row = torch.arange(case.rows).unsqueeze(1).expand_as(noise)
    per_microbatch = case.rows // case.microbatches
    return {
        "all": torch.zeros_like(noise, dtype=torch.bool),
        "uneven": noise > 0.2,
        "silent_rank": (noise > 0.2) | (row % per_microbatch < ROWS),
        "silent_microbatch": (noise > 0.2) | (row < per_microbatch),
    }[case.valid]
