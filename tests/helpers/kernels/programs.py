"""Programs of plans with kernels, and a step of them on any device, the meta device too: no memory,
no numbers.

Non-goals: no launching of ranks; a program of several is run as one of them, in a group that only
pretends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from scalec.compiler.emit.train_py import program_files
from scalec.compiler.frontend import resolve
from scalec.compiler.frontend.loss_chunking import logits_for
from scalec.compiler.ir import Program, Region
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import lower
from scalec.runtime import Batch, Experts, Mesh
from scalec.runtime.comm import experts
from scalec.runtime.comm.experts import ExpertRows, Order, Places

debug: Any = dist  # the stubs leave its levels out

LAYERS_OF_STAGE = 2
"""The layers left of each repeat that is not cut into stages: all its layers start the same
kernels.
"""


def compiled(source: Source, gpu: str, kernels: str = "triton") -> Program:
    """The program of a plan for some GPU, with few layers."""
    program = resolve(source)
    turned = set[str]() if program.pipeline else {region.dim for region in _repeats(program.region)}
    dims = (
        evolve(dim, size=LAYERS_OF_STAGE, valid=LAYERS_OF_STAGE) if dim.name in turned else dim
        for dim in program.dims
    )
    train, cluster = evolve(program.train, kernels=kernels), evolve(program.cluster, gpu=gpu)
    few = evolve(program, dims=tuple(dims), train=train, cluster=cluster)
    return lower(evolve(few, train=evolve(train, logits=logits_for(few))))


def _repeats(region: Region) -> Iterator[Region]:
    inner = [stmt for stmt in region.body if isinstance(stmt, Region)]
    return chain((each for each in inner if each.kind == "repeat"), *map(_repeats, inner))


def emitted(program: Program, source: Source) -> ModuleType:
    """The program, as Python has it; the files that it reads lie beside it until it has begun."""
    module = ModuleType("emitted")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        files = program_files(program, source)
        for name, text in files.items():
            path.with_name(name).write_text(text)
        module.__file__ = str(path)
        exec(compile(files["train.py"], "train.py", "exec"), vars(module))
    return module


@contextmanager
def evenly_routed() -> Iterator[None]:
    """Routes of experts on the meta device, where nothing was chosen: each expert has as many
    rows as any other.
    """
    order_of, counted = experts._order, experts._exchange_counts

    def order(ids: Tensor, of: Experts, padded: int, backend: Any) -> Order:
        found = order_of(ids, of, padded, backend)
        if ids.is_meta and not padded:
            # of experts elsewhere a copy of the tokens has the rows
            share = ids.numel() * of.groups // of.count
            found.sizes = [
                share // of.groups + (group < share % of.groups) for group in range(of.groups)
            ]
        return found

    def held(order: Order, backend: Places) -> ExpertRows:
        each = order.experts.experts_per_rank
        if not order.counts.is_meta or order.experts.axis.size == 1:
            return counted(order, backend)
        sent = [
            sum(order.sizes[first : first + each]) for first in range(0, len(order.sizes), each)
        ]
        counts = order.counts.view(-1, each)
        places = (None, None) if each == 1 else backend(counts, order.total)
        found = ExpertRows(order.experts.axis, counts.sum(0), sent, sent, *places)
        found.sizes = [sum(order.sizes[expert::each]) for expert in range(each)]
        return found

    with patch.object(experts, "_order", order), patch.object(experts, "_exchange_counts", held):
        yield


@contextmanager
def pretended(ranks: int, rank: int) -> Iterator[ProcessGroup | None]:
    """A process group of so many ranks, of which this one is there; it communicates nothing, on
    no device.
    """
    level = debug.get_debug_level()
    debug.set_debug_level(debug.DebugLevel.OFF)  # else gloo would compare what ranks do
    if ranks > 1:
        dist.init_process_group(
            "cpu:fake,meta:fake", rank=rank, world_size=ranks, store=FakeStore()
        )
    try:
        with evenly_routed():
            yield dist.group.WORLD
    finally:
        if ranks > 1:
            dist.destroy_process_group()
        debug.set_debug_level(level)


def step(module: ModuleType, device: str) -> None:
    """One step of this rank on a device, with memory that nobody has filled."""
    model, state = module.build(Mesh(module.PLAN.mesh, device))
    module.train_step(model, state, batch(module.PLAN, device), 1e-3)


def batch(plan: Any, device: str, seed: int = 0) -> Batch:
    """The inputs of one rank for a step: random classes, of every input in its layout.

    Only the first of several microbatches, unless a pipeline's rows say how many there are.
    """
    microbatches = plan.microbatches if "pp" in plan.mesh else 1
    generator = torch.Generator().manual_seed(seed)

    def local(name: str) -> Tensor:
        layout = plan.inputs[name]
        sizes = {"batch": plan.global_batch // plan.microbatches, "seq": plan.seq}
        shape = [
            sizes[dim] // prod(plan.mesh[axis] for axis in layout.split.get(dim, ()))
            for dim in layout.dims
        ]
        return torch.randint(plan.vocab, (microbatches, *shape), generator=generator).to(device)

    return Batch(**{name: local(name) for name in plan.inputs})
