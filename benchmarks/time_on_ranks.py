"""Steps of plans on two gloo ranks of this machine, predicted and measured: `time_of_plans.py
--ranks`.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from emitted import MODELS, batch, loaded, random_rows
from measure import table
from time_of_plans import Case, calibrated, row_of, sizes, write
from torch.multiprocessing.spawn import start_processes

from scalec.compiler.analysis.hardware import load
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.syntax.limits import load as source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Mesh

RANKS = 2
ON_RANKS = {
    "zero 1, two ranks": Case(sizes(256, 4, 128, 4), {"dp": RANKS}, "zero 1 over dp"),
    "tp 2, two ranks": Case(sizes(512, 3, 192, 4), {"tp": RANKS}),
}


def on_ranks(rounds: int) -> None:
    """A table of plans on two gloo ranks, at whose shapes the machine is measured by as many
    ranks.
    """
    rows = list[tuple[str, ...]]()
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").symlink_to(MODELS.resolve())
        on = load(
            calibrated(folder, ON_RANKS, "torch.distributed.run", f"--nproc-per-node={RANKS}", "-m")
        )
        for word, case in ON_RANKS.items():
            path, times = write(folder, word, case), folder / f"{word}.json"
            predicted, emitted = step_time(compile_plan(source(path)), on), loaded(folder, path)
            start_processes(
                _rank, (times, case, emitted, rounds), nprocs=RANKS, start_method="fork"
            )
            rows.append((word, *row_of(predicted, json.loads(times.read_text()))))
    table("Two gloo ranks, a thread each", ("plan", "predicted", "measured", "error"), rows)


def _rank(rank: int, times: Path, case: Case, emitted: Any, rounds: int) -> None:
    """Writes the seconds of steps, from when both ranks begin to when both have ended."""
    torch.set_num_threads(1)
    store = times.with_suffix(".rendezvous")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh, found = Mesh(case.mesh), list[float]()
    model, state = emitted.build(mesh)
    state.initialise(0)
    own = batch(emitted, *random_rows(case.sizes, seed=rank if "dp" in case.mesh else 0))
    for _ in range(rounds + 2):
        dist.barrier()
        start = perf_counter()
        emitted.train_step(model, state, own, 1e-3)
        dist.barrier()
        found.append(perf_counter() - start)
    if rank == 0:
        times.write_text(json.dumps(found[2:]))
    dist.destroy_process_group()
