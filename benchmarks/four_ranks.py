"""`.venv/bin/python benchmarks/four_ranks.py`: a training step on 4 gloo ranks, beside FSDP2 +
`parallelize_module`.

dp 2 × tp 2 with sequence parallelism.  Both programs start from the same parameters, see the same
tokens and must come to the same loss.  Ranks have a thread each: with fewer than 4 cores they also
wait for one another's turn.

Where the time goes is read from profiled steps, which take longer: gloo's own events (on its
threads, waiting for peers included; a reduce-scatter runs as an all-reduce there), torch's ops on
rank 0, the rest: Python, autograd, dispatch.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import ModuleType

import dtensor
import plain
import torch
import torch.distributed as dist
from emitted import Sizes, batch, initial, program, random_rows
from measure import asked_quick, in_turns, ratio, table, where
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.profiler import ProfilerActivity, profile

from scalec.runtime import Mesh

MESH = {"dp": 2, "tp": 2}
RANKS = 4
PROFILED = 3
EMITTED, TORCH = "emitted", "FSDP2 + DTensor"
CASES = {
    "tiny_llama": Sizes(
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=192,
        layers=2,
        seq=128,
        rows=8,
        microbatches=2,
    ),
    "hidden 512, 4 layers": Sizes(
        vocab=2048,
        hidden=512,
        heads=8,
        kv_heads=4,
        head_dim=64,
        ffn=1536,
        layers=4,
        seq=256,
        rows=2,
    ),
}
Step = Callable[[], Tensor]


def main() -> None:
    quick = asked_quick(__doc__)
    print(f"{where()}, {RANKS} gloo ranks of one thread")
    for name, sizes in list(CASES.items())[: 1 if quick else None]:
        split = program(sizes, MESH, sequence_parallel=True)
        with TemporaryDirectory() as folder:
            arguments = (Path(folder), name, sizes, split, 2 if quick else 25)
            start_processes(_rank, arguments, nprocs=RANKS, start_method="fork")


def _rank(rank: int, folder: Path, name: str, sizes: Sizes, split: ModuleType, rounds: int) -> None:
    torch.set_num_threads(1)
    # DTensor's advice on the gradient norm
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=RANKS
    )
    mesh = Mesh(MESH)
    steps = {EMITTED: _emitted(sizes, split, mesh), TORCH: _torch(sizes, mesh)}
    times = in_turns({kind: partial(timed, step) for kind, step in steps.items()}, rounds)
    losses = {kind: mean(step(), mesh) for kind, step in steps.items()}
    parts = [_where_it_goes(kind, step) for kind, step in steps.items()]
    if rank == 0:
        _report(name, losses, times, parts)
    dist.barrier()
    dist.destroy_process_group()


def _emitted(sizes: Sizes, split: ModuleType, mesh: Mesh) -> Step:
    """The program's step.  Its loss is the mean over all ranks."""
    model, state = split.build(mesh)
    state.initialise(0)
    own = batch(split, *random_rows(sizes, seed=mesh.rank("dp")))
    return lambda: split.train_step(model, state, own, 1e-3).loss


def _torch(sizes: Sizes, mesh: Mesh) -> Step:
    """The same step by torch's own means.  Its loss is that of this rank's rows."""
    model = plain.Llama(sizes)
    plain.load(model, initial(sizes))
    assert mesh.device_mesh is not None
    dtensor.spread(model, mesh.device_mesh)
    optimizer, rows = plain.optimizer_of(model), random_rows(sizes, seed=mesh.rank("dp"))
    return lambda: dtensor.step(model, optimizer, *rows)


def mean(loss: Tensor, mesh: Mesh) -> float:
    """Over data-parallel ranks; leaves a value that is a mean already as it is."""
    total = loss.clone()
    dist.all_reduce(total, group=mesh.axis("dp").group)
    return total.item() / MESH["dp"]


def timed(step: Step) -> float:
    """Seconds from when all ranks begin to when all have ended."""
    dist.barrier()
    start = perf_counter()
    step()
    dist.barrier()
    return perf_counter() - start


def _where_it_goes(kind: str, step: Step) -> tuple[str, ...]:
    """A row of shares of profiled steps."""
    dist.barrier()
    start = perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            step()
        elapsed = perf_counter() - start
    events = profiler.key_averages()
    gathers = sum(event.cpu_time_total for event in events if event.key == "gloo:all_gather") / 1e6
    reductions = (
        sum(event.cpu_time_total for event in events if event.key == "gloo:all_reduce") / 1e6
    )
    ops = sum(event.self_cpu_time_total for event in events if event.key.startswith("aten::")) / 1e6
    calls = sum(event.count for event in events if event.key.startswith("gloo:")) // PROFILED
    shares = [
        f"{part / elapsed:.0%}"
        for part in (gathers, reductions, ops, elapsed - gathers - reductions - ops)
    ]
    return kind, f"{elapsed / PROFILED * 1e3:.1f} ms", str(calls), *shares


def _report(
    name: str, losses: dict[str, float], times: dict[str, list[float]], parts: list[tuple[str, ...]]
) -> None:
    rows = [
        (kind, f"{median(of) * 1e3:.1f} ms", ratio(of, times[TORCH]), f"{losses[kind]:.5f}")
        for kind, of in times.items()
    ]
    table(
        f"{name}: a training step, median",
        ("program", "step", f"beside {TORCH}", "loss after all"),
        rows,
    )
    columns = (
        "program",
        "profiled step",
        "collectives",
        "in all_gather",
        "in reductions",
        "torch's ops",
        "rest",
    )
    table(f"{name}: where the time of rank 0 goes", columns, parts)


if __name__ == "__main__":
    main()
