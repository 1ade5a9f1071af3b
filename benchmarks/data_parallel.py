"""`.venv/bin/python benchmarks/data_parallel.py`: a data-parallel step on 4 gloo ranks, beside DDP.

Optimizer state whole on each rank, beside `DistributedDataParallel`; and shared out (ZeRO 1),
beside DDP with torch's `ZeroRedundancyOptimizer`.  All start from the same parameters, see the same
tokens and must come to the same loss.  Ranks have a thread each: with fewer than 4 cores they also
wait for one another's turn.
"""

from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import plain
import torch
import torch.distributed as dist
from emitted import BETAS, EPS, WEIGHT_DECAY, Sizes, batch, initial, program, random_rows
from four_ranks import Step, timed
from measure import asked_quick, in_turns, ratio, table, where
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from scalec.runtime import Mesh

RANKS = 4
MESH = {"dp": RANKS, "tp": 1}
WHOLE, SHARED, DDP, REDUNDANCY = (
    "emitted",
    "emitted, zero 1",
    "DDP",
    "DDP + ZeroRedundancyOptimizer",
)
BESIDE = {WHOLE: DDP, SHARED: REDUNDANCY, DDP: DDP, REDUNDANCY: REDUNDANCY}
SIZES = Sizes(
    vocab=2048, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1536, layers=4, seq=256, rows=1
)


def main() -> None:
    quick = asked_quick(__doc__)
    print(f"{where()}, {RANKS} gloo ranks of one thread")
    programs = {
        kind: program(SIZES, MESH, state=state)
        for kind, state in ((WHOLE, ""), (SHARED, "zero 1 over dp"))
    }
    with TemporaryDirectory() as folder:
        start_processes(
            _rank, (Path(folder), programs, 2 if quick else 25), nprocs=RANKS, start_method="fork"
        )


def _rank(rank: int, folder: Path, programs: dict[str, ModuleType], rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=RANKS
    )
    mesh = Mesh(MESH)
    steps = {kind: _emitted(emitted, mesh) for kind, emitted in programs.items()}
    steps |= {DDP: _ddp(rank, shared=False), REDUNDANCY: _ddp(rank, shared=True)}
    times = in_turns({kind: partial(timed, step) for kind, step in steps.items()}, rounds)
    losses = {kind: mean_of(step, mesh) for kind, step in steps.items()}
    if rank == 0:
        rows = [
            (
                kind,
                f"{median(of) * 1e3:.1f} ms",
                f"{ratio(of, times[BESIDE[kind]])} {BESIDE[kind]}",
                f"{losses[kind]:.5f}",
            )
            for kind, of in times.items()
        ]
        table("A training step, median", ("program", "step", "beside", "loss after all"), rows)
    dist.barrier()
    dist.destroy_process_group()


def mean_of(step: Step, mesh: Mesh) -> float:
    """The loss of one more step, the mean over ranks."""
    loss = step().clone()
    dist.all_reduce(loss, group=mesh.axis("dp").group)
    return loss.item() / RANKS


def _emitted(emitted: ModuleType, mesh: Mesh) -> Step:
    model, state = emitted.build(mesh)
    state.initialise(0)
    own = batch(emitted, *random_rows(SIZES, seed=mesh.rank("dp")))
    return lambda: emitted.train_step(model, state, own, 1e-3).loss


def _ddp(rank: int, shared: bool) -> Step:
    """The same step by torch's own means."""
    model = plain.Llama(SIZES)
    plain.load(model, initial(SIZES))
    optimizer: torch.optim.Optimizer = plain.optimizer_of(model)
    if shared:
        options: dict[str, Any] = {
            "lr": 1e-3,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": WEIGHT_DECAY,
            "fused": True,
        }
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    spread: Any = DistributedDataParallel(model, gradient_as_bucket_view=True)
    rows = random_rows(SIZES, seed=rank)
    return lambda: plain.step(spread, optimizer, *rows)


if __name__ == "__main__":
    main()
