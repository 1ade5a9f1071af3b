"""The memory that autograd and the state of an emitted program really hold, on forked ranks.

Tensors are told apart by their storages.  State, a step's inputs and a module's tables are there
all the time and count apart.
"""

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from itertools import accumulate, islice
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.forked_ranks import run_ranks
from scalec.compiler.ops import OPS
from scalec.runtime import Batch, Mesh, TrainState
from scalec.runtime.autograd import recompute
from scalec.runtime.comm import experts
from scalec.runtime.ops import routing
from scalec.runtime.state.flat_param import reserve

AGAIN = "recomputed"
"""In the place of a kind: a layer of which only what enters it is kept."""

debug: Any = dist  # the stubs leave its levels out
KINDS = {entry.function: entry.name for entry in OPS.values() if entry.function}
KINDS |= {"torch.mul": "mul", "regather": "coerce", AGAIN: AGAIN}
OPERATORS = {ast.Mult: "mul", ast.Div: "div"}


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank; what autograd keeps, by kind of op."""

    kept: dict[str, int]
    state: int
    tables: int
    inputs: int


def measure(module: ModuleType, rows: int) -> list[Measured]:
    """The memory that each rank of a program holds of one microbatch, whose global batch is of
    so many rows.
    """
    return run_ranks(_ranks(module), _measure, module, rows)


def _ranks(module: ModuleType) -> int:
    return prod(module.PLAN.mesh.values())


def _measure(module: ModuleType, rows: int) -> Measured:
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    state.initialise(0)
    batch = _batch(module.PLAN, rows)
    seen = _Seen({*_always(model, state, batch)}, Path(str(module.__file__)))
    flat_params = (
        [state.flat_params(1)] if "flat_params" in signature(model.forward).parameters else []
    )
    with saved_tensors_hooks(seen.packed, lambda tensor: tensor), _even_loads(seen, module):
        made = model(*next(iter(batch.microbatches())), *flat_params)
    losses: list[Tensor] = [
        each for each in (made if isinstance(made, tuple) else (made,)) if each.requires_grad
    ]
    sum(losses[1:], losses[0]).backward()
    return Measured(dict(seen.bytes), *_sizes(model, state, batch))


@contextmanager
def _even_loads(seen: "_Seen", module: ModuleType) -> Iterator[None]:
    """Routes give ranks as many rows each.

    Their decisions are seen: it is kept, but not by autograd.
    """

    def decided(make: Callable[[], Any]) -> Any:
        made = recompute.decide_once(lambda: _chosen(make(), module))
        if isinstance(made, Tensor):  # ids within a capacity, or counts of choices
            if recompute._deciding.get() is not recompute._make:
                seen.counted(made, AGAIN)
            return made
        for each in made if isinstance(made, tuple) else vars(made).values():
            if isinstance(each, Tensor):
                seen.counted(each, DECISIONS[type(made)])
        return made

    with (
        patch.object(routing, "decide_once", decided),
        patch.object(experts, "decide_once", decided),
    ):
        yield


def _chosen(made: Any, module: ModuleType, to_first: bool = False) -> Any:
    """Other ids than a router's: of all experts in turn, of one rank after the other, or of the
    first experts.
    """
    if not isinstance(made, tuple):
        return made
    gates, ids = cast(tuple[Tensor, Tensor], made)
    if to_first:
        return gates, torch.arange(ids.shape[-1]).expand_as(ids).contiguous()
    ranks = _ranks(module)
    choice, each = torch.arange(ids.numel()).view_as(ids), module.EXPERTS // ranks
    return gates, choice % ranks * each + choice // ranks % each


@contextmanager
def _loads(module: ModuleType, to_first: bool) -> Iterator[None]:
    """Routes give ranks as many rows each, or all to the first experts; ranks that are not
    there chose as this one.
    """

    def decided(make: Callable[[], Any]) -> Any:
        return recompute.decide_once(lambda: _chosen(make(), module, to_first))

    def counted(order: experts.Order, *backend: Any) -> experts.ExpertRows:
        axis = order.experts.axis
        if axis.size > 1 and dist.get_backend() == "fake":
            order.experts.axis = replace(axis, group=_Alike(axis))
        return count(order, *backend)

    count = experts._exchange_counts
    with (
        patch.object(routing, "decide_once", decided),
        patch.object(experts, "_exchange_counts", counted),
    ):
        yield


class _Alike:
    """A group without a network, in which all ranks count as many rows as this one."""

    def __init__(self, axis: Any) -> None:
        self._axis, self._group = axis, axis.group

    def alltoall_base(
        self, came: Tensor, sent: Tensor, received: list[int], parts: list[int], *options: Any
    ) -> Any:
        work = self._group.alltoall_base(came, sent, received, parts, *options)
        if not (received or parts):
            came.copy_(sent.view(self._axis.size, -1)[self._axis.rank].repeat(self._axis.size))
        return work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


DECISIONS: dict[type, str] = {
    tuple: "top",
    experts.Order: "dispatch",
    experts.ExpertRows: "exchange",
}
"""The first ops that keep them."""


@dataclass(frozen=True)
class MeasuredStages:
    """Bytes on one rank of a pipeline; what it keeps of one microbatch from forward to
    backward, by stage.
    """

    kept: dict[int, int]
    state: int
    tables: int
    inputs: int


def measure_stages(module: ModuleType, rows: int) -> list[MeasuredStages]:
    """The memory that each rank of a program in stages holds, whose global batch is of so many
    rows.
    """
    return run_ranks(_ranks(module), _measure_stages, module, rows)


def _measure_stages(module: ModuleType, rows: int) -> MeasuredStages:
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    state.initialise(0)
    batch = _batch(module.PLAN, rows)
    freed = [own for each in state.flat_params().values() for own in each if own.is_freed]
    for each in freed:
        reserve(each.buffers.unsharded)
    kept: dict[int, int] = {}
    for stage in module.PIPELINE.stages(mesh):
        seen = _Seen({*_always(model, state, batch)}, Path(str(module.__file__)))
        enters = (
            [each for each in module.PIPELINE._stage_inputs if each.at(stage - 1)] if stage else []
        )
        zeros = [torch.zeros(each.shape, dtype=each.dtype) for each in enters]
        given = [each.requires_grad_(each.is_floating_point()) for each in zeros]
        x = tuple(given) if len(given) > 1 else given[0] if given else None
        with saved_tensors_hooks(seen.packed, lambda tensor: tensor), _even_loads(seen, module):
            model(stage, x, *next(iter(batch.microbatches())))
        for each in given:
            seen.counted(each, "entering")
        kept[stage] = sum(seen.bytes.values())
    for each in freed:
        each.reshard()
    return MeasuredStages(kept, *_sizes(model, state, batch))


def _always(model: nn.Module, state: TrainState, batch: Batch) -> dict[int, int]:
    return {**_storages(_buffers(state)), **_storages(model.buffers()), **_storages(_inputs(batch))}


def _sizes(model: nn.Module, state: TrainState, batch: Batch) -> Iterator[int]:
    """The storages of state, tables and inputs."""
    return (
        sum(_storages(held).values()) for held in (_buffers(state), model.buffers(), _inputs(batch))
    )


def peaks(module: ModuleType, rows: int, to_first: bool = False) -> list[int]:
    """The most that each rank along the first axis allocates at once, as `peak` says."""
    inside = _ranks(module) // next(iter(module.PLAN.mesh.values()))
    return [
        run_ranks(1, _peak, module, rows, rank, to_first)[0]
        for rank in range(0, _ranks(module), inside)
    ]


def peak(module: ModuleType, rows: int, to_first: bool = False) -> int:
    """The most that a rank of a program allocates at once in a step, beside what is there before
    it.

    The network is not there: gloo copies what it sends, and how long it holds that differs from run
    to run.  Routes give ranks as many rows each, or, `to_first`, all to the first experts, which
    are of this rank.
    """
    (found,) = run_ranks(1, _peak, module, rows, 0, to_first)
    return found


def peaks_of_ranks(module: ModuleType, rows: int, to_first: bool) -> list[int]:
    """The same of all ranks, with the network: what gloo holds for a moment counts too."""
    return run_ranks(_ranks(module), _measured_peak, module, rows, to_first)


def _peak(module: ModuleType, rows: int, rank: int = 0, to_first: bool = False) -> int:
    dist.destroy_process_group()
    debug.set_debug_level(debug.DebugLevel.OFF)  # else gloo would compare what ranks do
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=_ranks(module))
    return _measured_peak(module, rows, to_first)


def _measured_peak(module: ModuleType, rows: int, to_first: bool) -> int:
    mesh = Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    state.initialise(0)
    batch = _batch(module.PLAN, rows)
    with (
        _loads(module, to_first),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found,
    ):
        module.train_step(model, state, batch, 0.1)
    events: Any = found.profiler and found.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in events.events() if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


def _batch(plan: Any, rows: int) -> Batch:
    """Zeros of the shapes that a rank is given: of values, memory knows nothing."""
    each = rows // plan.microbatches
    sizes = {"batch": each, "seq": plan.seq}

    def local(name: str) -> Tensor:
        layout = plan.inputs[name]
        shape = [sizes[dim] for dim in layout.dims]
        for dim, axes in layout.split.items():
            for axis in axes:
                shape[layout.dims.index(dim)] //= plan.mesh[axis]
        return torch.zeros(plan.microbatches, *shape, dtype=torch.int64)

    return Batch(**{name: local(name) for name in plan.inputs})


def _inputs(batch: Batch) -> Iterator[Tensor]:
    yield from (each for each in vars(batch).values() if each is not None)


def _buffers(state: TrainState) -> Iterator[Tensor]:
    """Every tensor that a state holds."""
    found: list[Any] = [state]
    seen: set[int] = set()
    while found:
        it = found.pop()
        if id(it) in seen or isinstance(it, (nn.Module, Mesh, str, int, float, type)):
            continue
        seen.add(id(it))
        if isinstance(it, Tensor):
            yield it
        elif isinstance(it, dict):
            found += it.values()  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(it, (list, tuple)):
            found += it
        else:
            found += getattr(it, "__dict__", {}).values()


def _storages(tensors: Iterator[Tensor]) -> dict[int, int]:
    """The storage of tensors, and its size: layers' weights are the same storage each time they
    have memory.
    """
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {_identity(storage): storage.nbytes() for storage in storages}


def _identity(storage: Any) -> int:
    return storage._cdata


class _Seen:
    """The storages that autograd keeps, each counted for the op that first keeps it."""

    def __init__(self, always: set[int], program: Path) -> None:
        self.bytes: Counter[str] = Counter()  # by the kind of op
        self._always, self._file = always, str(program)
        self._lines = program.read_text().splitlines()
        self._known: set[int] = set()
        self._alive: list[Tensor] = []  # so that no storage takes another's place

    def packed(self, tensor: Tensor) -> Tensor:
        """The hook: counts, and keeps the tensor as it is."""
        if self._is_new(tensor):
            self.counted(tensor, self._kind())
        return tensor

    def counted(self, tensor: Tensor, kind: str) -> None:
        """Counts a storage, unless it is counted already."""
        if self._is_new(tensor):
            self._known.add(_identity(tensor.untyped_storage()))
            self._alive.append(tensor.detach())
            self.bytes[kind] += tensor.untyped_storage().nbytes()

    def _is_new(self, tensor: Tensor) -> bool:
        return _identity(tensor.untyped_storage()) not in self._known | self._always

    def _kind(self) -> str:
        """The op that keeps it: of the program's innermost line, the call or operator that runs."""
        frame = sys._getframe()
        while frame.f_code.co_filename != self._file:
            assert frame.f_back, "no line of the program keeps this"
            frame = frame.f_back
        line, end, first, last = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
        assert line
        assert end
        *before, final = (text.encode() for text in self._lines[line - 1 : end])
        code = b"\n".join([*before, final[:last]])[first:]
        if code.startswith(b"with "):  # its position is all of its block
            code = code.removeprefix(b"with ").partition(b") as ")[0] + b")"
        node = ast.parse(code.decode(), mode="eval").body
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)]
        assert isinstance(node, ast.Call), ast.unparse(node)
        name = ast.unparse(node.func).removeprefix("split_")
        return KINDS[ast.unparse(node.args[0]) if name == "recompute" else name]
