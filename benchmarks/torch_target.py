"""`.venv/bin/python benchmarks/torch_target.py`: programs of torch alone beside the runtime's, on a
fake process group.

Calls and bytes that a rank gives to collectives in a step: the plan's, torch's of the same plan,
and bytes beyond.  Host time: CPU time of a step of both programs, in turns, at sizes so small that
only the host's work shows.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from types import ModuleType

import torch
import torch.distributed as dist
from emitted import imported
from measure import asked_quick, in_turns, ratio, table, where
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_traffic import Row, compared, planned, sent_by

from scalec.compiler.emit import dtensor, emit
from scalec.compiler.emit.target import whole_mesh
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Batch, Mesh

PLANS = {
    "dp 4": ("mesh { dp = 4  tp = 1 }  shard { batch over dp }", ""),
    "dp 2 × tp 2": (
        "mesh { dp = 2  tp = 2 }  shard { batch over dp  vocab, heads, kv_heads, ffn over tp }",
        "",
    ),
    "dp 2 × tp 2, sequence parallel": ("mesh { dp = 2  tp = 2 }", ""),
    "dp 4, zero 1": (
        "mesh { dp = 4  tp = 1 }  shard { batch over dp }  state { zero 1 over dp }",
        "",
    ),
    "dp 2 × tp 2, zero 3, recomputed": (
        "mesh { dp = 2  tp = 2 }  state { zero 3 over dp }",
        "recompute = full",
    ),
    "cp 4, ring": ("mesh { dp = 1  tp = 1  cp = 4 }  shard { seq over cp via ring }", ""),
    "dp 2 × cp 2": ("mesh { dp = 2  tp = 1  cp = 2 }  shard { batch over dp  seq over cp }", ""),
}
"""Variants of `plans/tiny_llama.scale`: mesh, shard and state, and settings of `train`."""

TINY = Path(__file__).parents[1] / "plans" / "tiny_llama.scale"


def source(mesh: str, train: str) -> Source:
    """A variant of the tiny plan."""
    text = f'use "tiny_llama.scale" {{ train {{ {train} }} }}\n{mesh}\n'
    return Source(str(TINY.with_name("variant.scale")), text)


@contextmanager
def one_of(ranks: int) -> Iterator[None]:
    """A process group of one rank that nothing answers."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def step_of_torch(module: ModuleType) -> Callable[[], object]:
    """A step of a program of torch alone, on rows of its global batch."""
    mesh = init_device_mesh("cpu", tuple(module.MESH.values()), mesh_dim_names=tuple(module.MESH))
    model, optimizer = module.build(mesh)
    rows = torch.zeros(module.GLOBAL_BATCH, module.SEQ, dtype=torch.int64)
    return lambda: module.train_step(model, optimizer, module.microbatches(mesh, rows, rows), 1e-3)


def step_of_runtime(module: ModuleType) -> Callable[[], object]:
    """A step of the runtime's program, on one rank's part of that."""
    model, state = module.build(Mesh(module.PLAN.mesh))
    state.initialise(0)
    sizes = {"seq": module.SEQ, "batch": module.PLAN.global_batch // module.PLAN.microbatches}
    given = module.PLAN.inputs["tokens"]
    ranks = {
        dim: prod(module.PLAN.mesh[axis] for axis in given.split.get(dim, ())) for dim in given.dims
    }
    part = torch.zeros(
        module.PLAN.microbatches,
        *(sizes[dim] // ranks[dim] for dim in given.dims),
        dtype=torch.int64,
    )
    return lambda: module.train_step(model, state, Batch(tokens=part, labels=part), 1e-3)


def main() -> None:
    quick = asked_quick(__doc__)
    torch.set_num_threads(1)
    print(where())
    counted: list[tuple[str, ...]] = []
    timed: list[tuple[str, ...]] = []
    for name, (mesh, train) in PLANS.items():
        # torch keeps meshes of a process for the next ones
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            rows, times = pool.submit(
                _measured, name, source(mesh, train), 2 if quick else 20
            ).result()
        counted += rows
        timed.append(times)
    columns = ("plan", "collective", "axes", "calls", "of torch", "bytes", "of torch", "beyond")
    table("A rank's collectives in a step", columns, counted)
    table("CPU time of a step", ("plan", "runtime", "torch alone", "ratio"), timed)


def _measured(
    name: str, plan: Source, rounds: int
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    program = compile_plan(plan)
    with TemporaryDirectory() as folder, one_of(prod(axis.size for axis in program.axes)):
        ours = step_of_runtime(_imported(emit(program, plan), Path(folder, "runtime")))
        theirs = step_of_torch(_imported(dtensor.emit(program, plan), Path(folder, "torch")))
        rows = [
            _row(name, row)
            for row in compared(planned(program), sent_by(theirs, whole_mesh(program)))
        ]
        times = in_turns({"runtime": partial(_cpu, ours), "torch": partial(_cpu, theirs)}, rounds)
    ms = [f"{1e3 * median(times[each]):.1f} ms" for each in ("runtime", "torch")]
    return rows, (name, *ms, ratio(times["torch"], times["runtime"]))


def _row(name: str, row: Row) -> tuple[str, ...]:
    numbers = (row.calls_planned, row.calls, row.bytes_planned, row.bytes, row.beyond)
    return name, row.op, " ".join(row.axes), *(f"{number:,}" for number in numbers)


def _cpu(step: Callable[[], object]) -> float:
    before = process_time()
    step()
    return process_time() - before


def _imported(files: dict[str, str], folder: Path) -> ModuleType:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))  # for `torch_ops.py`; the process runs one plan alone
    return imported(folder / "train.py")


if __name__ == "__main__":
    main()
