"""`.venv/bin/python benchmarks/one_rank.py`: a training step of an emitted program for one rank
beside plain torch.

Both start from the same parameters, see the same tokens and must come to the same loss.  Bar:
within 5%.  Measured in CPU time of one thread, which is wall time on an idle machine, and hardly
more on a busy one.
"""

import multiprocessing
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from time import process_time
from typing import TypeVar

import plain
import torch
from emitted import Sizes, batch, initial, program, random_rows
from measure import asked_quick, in_turns, ratio, table, where
from torch import Tensor

from scalec.runtime import Mesh

T = TypeVar("T")
Step = Callable[[], Tensor]
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
    "hidden 256, 4 layers": Sizes(
        vocab=1024, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=768, layers=4, seq=256, rows=8
    ),
}


def main() -> None:
    quick = asked_quick(__doc__)
    torch.set_num_threads(1)
    cases = list(CASES.items())[: 1 if quick else None]
    rows = [_row(name, sizes, rounds=2 if quick else 25) for name, sizes in cases]
    print(f"{where()}, one thread")
    columns = (
        "model",
        "plain torch",
        "emitted",
        "ratio",
        "memory, plain",
        "emitted",
        "loss, plain",
        "emitted",
    )
    table(
        "A training step on one rank: median CPU time; peak memory, steps over start; loss"
        " after all",
        columns,
        rows,
    )


def _row(name: str, sizes: Sizes, rounds: int) -> tuple[str, ...]:
    memory = [_in_a_fork(partial(_peak, make, sizes)) for make in (_plain, _emitted)]
    return _in_a_fork(partial(_timed, name, sizes, rounds, memory))


def _in_a_fork(function: Callable[[], T]) -> T:
    """Its result from a process of its own, whose memory and threads are fresh: this one never
    computes.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function)


def _peak(make: Callable[[Sizes], Step], sizes: Sizes) -> int:
    """Bytes by which this process grows at most over making a model and three steps."""
    # what torch imports late is nobody's
    make(replace(sizes, seq=2, rows=1, hidden=16, layers=1))()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = make(sizes)
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def _timed(name: str, sizes: Sizes, rounds: int, memory: list[int]) -> tuple[str, ...]:
    losses: dict[str, float] = {}

    def timed(kind: str, step: Step) -> float:
        start = process_time()
        loss = step()
        elapsed = process_time() - start
        losses[kind] = loss.item()
        return elapsed

    steps = {"plain": _plain(sizes, initial(sizes)), "emitted": _emitted(sizes)}
    times = in_turns({kind: partial(timed, kind, step) for kind, step in steps.items()}, rounds)
    milliseconds = [f"{median(times[kind]) * 1e3:.1f} ms" for kind in steps]
    megabytes = [f"{size / 1e6:.0f} MB" for size in memory]
    final = [f"{losses[kind]:.5f}" for kind in steps]
    return name, *milliseconds, ratio(times["emitted"], times["plain"]), *megabytes, *final


def _plain(sizes: Sizes, values: dict[str, Tensor] | None = None) -> Step:
    model, rows = plain.Llama(sizes), random_rows(sizes, seed=1)
    if values is not None:
        plain.load(model, values)
    optimizer = plain.optimizer_of(model)
    return lambda: plain.step(model, optimizer, *rows)


def _emitted(sizes: Sizes) -> Step:
    module = program(sizes, mesh={})
    model, state = module.build(Mesh({}))
    state.initialise(0)
    own = batch(module, *random_rows(sizes, seed=1))
    return lambda: module.train_step(model, state, own, 1e-3).loss


if __name__ == "__main__":
    main()
