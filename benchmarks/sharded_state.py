"""`.venv/bin/python benchmarks/sharded_state.py`: host time of a layer and step where ranks share
state out.

ZeRO 3 beside FSDP2, ZeRO 2 beside FSDP2 that keeps gathered weights for backward, ZeRO 0 beside
DDP.  Bars: half of FSDP2's, no more than DDP's.  The same tiny model in all, in float32; a step is
forward, backward, clipping and AdamW.  The cost of a layer is the difference between 16 layers and
4, over 12: what a step costs once is not in it.

Host time is CPU time of the thread that runs the step, forward and backward: on a fake process
group, which does nothing but copy, and on rank 0 of 2 and 4 gloo ranks, where gloo's own threads
communicate.  Beside it, on gloo ranks, wall time: with fewer cores than threads they also wait for
one another's turn.

Non-goals: overlap, of which tensors so small have none (`overlap.py`).
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, thread_time
from types import ModuleType
from typing import Any, NamedTuple

import plain
import torch
import torch.distributed as dist
from emitted import Sizes, batch, program, random_rows
from measure import asked_quick, in_turns, ratio, table, where
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.futures import Future
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from scalec.runtime import Mesh

LAYERS = (4, 16)
SIZES = Sizes(
    vocab=64, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64, layers=LAYERS[0], seq=8, rows=1
)
FAKE_RANKS = 4
# A layer has 40.25 KiB.  The plan's cap is the most that a bucket has, DDP's the least at which it
# closes one.
CAP, DDP_CAP = "41KiB", 40.25 / 1024
Step = Callable[[], Tensor]
Spread = Callable[[plain.Llama, Mesh], nn.Module]


class Cost(NamedTuple):
    """Seconds that a layer adds to a step."""

    host: float
    wall: float


@dataclass(frozen=True)
class Pair:
    """The plan's words for state, or None for a program of one rank; and torch's way to the
    same.
    """

    emitted: str
    state: str | None
    torch: str
    spread: Spread


def _fsdp(model: plain.Llama, mesh: Mesh, reshard: bool) -> nn.Module:
    assert mesh.device_mesh is not None
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh.device_mesh["dp"], reshard_after_forward=reshard)
    return model


def _ddp(model: plain.Llama, mesh: Mesh, cap: float | None) -> nn.Module:
    group = mesh.axis("dp").group
    spread: Any = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=True
    )
    if dist.get_backend(group) == "fake":
        spread.register_comm_hook(group, _reduced_by_fake)
    return spread


def _reduced_by_fake(
    group: Any,
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
) -> Future[Tensor]:
    """In the place of DDP's own reduction, which wants a result where fake works have none: 3
    µs a bucket.
    """
    group.allreduce([bucket.buffer()])
    done = Future[Tensor]()
    done.set_result(bucket.buffer())
    return done


ALONE = Pair("one rank", None, "plain torch", lambda model, _: model)
PAIRS = (
    ALONE,
    Pair("zero 0", "zero 0 over dp", "DDP", partial(_ddp, cap=None)),
    Pair(
        "zero 0, a bucket a layer",
        f"zero 0 over dp  bucket = {CAP}",
        "DDP, a bucket a layer",
        partial(_ddp, cap=DDP_CAP),
    ),
    Pair("zero 2", "zero 2 over dp", "FSDP2, weights kept", partial(_fsdp, reshard=False)),
    Pair("zero 3", "zero 3 over dp", "FSDP2", partial(_fsdp, reshard=True)),
)
Programs = Mapping[tuple[str, int], ModuleType]
"""By the name of the pair, and the number of layers."""
Steps = Mapping[str, tuple[Step, Step]]
"""The steps of each pair, with the least and the most layers."""


def main() -> None:
    quick = asked_quick(__doc__)
    torch.set_num_threads(1)
    print(f"{where()}, one thread")
    _on_a_fake_group(3 if quick else 100)
    for ranks in (2,) if quick else (2, 4):
        with TemporaryDirectory() as folder:
            arguments = (Path(folder), ranks, _programs(ranks), 2 if quick else 50)
            start_processes(_rank, arguments, nprocs=ranks, start_method="fork")


def _on_a_fake_group(rounds: int) -> None:
    programs = _programs(FAKE_RANKS)
    dist.init_process_group("fake", rank=0, world_size=FAKE_RANKS, store=FakeStore())
    costs = _costs(_steps(programs, Mesh(_axes(FAKE_RANKS))), rounds)
    dist.destroy_process_group()
    _report(f"One of {FAKE_RANKS} ranks, fake process group: host time of a layer", costs, "host")


def _rank(rank: int, folder: Path, ranks: int, programs: Programs, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=ranks
    )
    steps = _steps(programs, Mesh(_axes(ranks)))
    costs = _costs(steps, rounds)
    losses = {name: _mean(large(), ranks) for name, (_, large) in steps.items()}
    if rank == 0:
        _report(f"{ranks} gloo ranks: host time of a layer", costs, "host")
        _report(f"{ranks} gloo ranks: wall time of a layer", costs, "wall")
        rows = [
            (p.emitted, f"{losses[p.emitted]:.5f}", p.torch, f"{losses[p.torch]:.5f}")
            for p in PAIRS[1:]
        ]
        table(
            f"{ranks} gloo ranks: loss after all, {LAYERS[1]} layers",
            ("emitted", "loss", "torch", "loss"),
            rows,
        )
    dist.barrier()
    dist.destroy_process_group()


def _mean(loss: Tensor, ranks: int) -> float:
    """Over all ranks; leaves a value that is a mean already as it is."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / ranks


def _axes(ranks: int) -> dict[str, int]:
    return {"dp": ranks, "tp": 1}


def _programs(ranks: int) -> Programs:
    return {
        (pair.emitted, layers): program(
            replace(SIZES, layers=layers),
            {} if pair.state is None else _axes(ranks),
            state=pair.state or "",
        )
        for pair in PAIRS
        for layers in LAYERS
    }


def _steps(programs: Programs, mesh: Mesh) -> Steps:
    """Seconds of every program; of torch's also without clipping and optimizer."""
    pairs: dict[str, list[Step]] = {}
    for pair in PAIRS:
        own = Mesh({}) if pair.state is None else mesh
        pairs[pair.emitted] = [
            _emitted(programs[pair.emitted, layers], own, mesh.rank("dp")) for layers in LAYERS
        ]
        theirs = [
            _torch(pair.spread, layers, _initial(programs[ALONE.emitted, layers]), mesh)
            for layers in LAYERS
        ]
        pairs[pair.torch], pairs[_passes_of(pair)] = map(list, zip(*theirs, strict=True))
    return {name: (small, large) for name, (small, large) in pairs.items()}


def _passes_of(pair: Pair) -> str:
    return f"{pair.torch}, forward and backward"


def _emitted(emitted: ModuleType, mesh: Mesh, rank: int) -> Step:
    model, state = emitted.build(mesh)
    state.initialise(0)
    own = batch(emitted, *random_rows(SIZES, seed=rank))
    return lambda: emitted.train_step(model, state, own, 1e-3).loss


def _initial(alone: ModuleType) -> dict[str, Tensor]:
    """The parameters with which emitted programs begin, whatever their mesh, by the program of
    one rank.
    """
    _, state = alone.build(Mesh({}))
    state.initialise(0)
    return state.state_dict()


def _torch(spread: Spread, layers: int, values: dict[str, Tensor], mesh: Mesh) -> tuple[Step, Step]:
    """A step by torch's own means, and one that leaves the parameters as they are."""
    model = plain.Llama(replace(SIZES, layers=layers))
    plain.load(model, values)
    wrapped: Any = spread(model, mesh)
    optimizer, rows = plain.optimizer_of(model), random_rows(SIZES, seed=mesh.rank("dp"))

    def passes() -> Tensor:
        loss = plain.loss_of(wrapped(rows[0][0]), rows[1][0])
        loss.backward()
        optimizer.zero_grad()
        return loss

    return partial(plain.step, wrapped, optimizer, *rows), passes


def _costs(steps: Steps, rounds: int) -> dict[str, list[Cost]]:
    gc.freeze()  # whose turn it is when garbage is collected does not pay for what all have made
    return in_turns({name: partial(_of_a_layer, *two) for name, two in steps.items()}, rounds)


def _of_a_layer(small: Step, large: Step) -> Cost:
    least, most = _timed(small), _timed(large)
    return Cost(*((b - a) / (LAYERS[1] - LAYERS[0]) for a, b in zip(least, most, strict=True)))


def _timed(step: Step) -> Cost:
    """Wall time is from when all ranks begin to when all have ended."""
    dist.barrier()
    wall, host = perf_counter(), thread_time()
    step()
    host = thread_time() - host
    dist.barrier()
    return Cost(host, perf_counter() - wall)


def _report(title: str, costs: Mapping[str, list[Cost]], clock: str) -> None:
    times = {name: [getattr(cost, clock) for cost in of] for name, of in costs.items()}
    columns = (
        "emitted",
        "a layer",
        "torch",
        "a layer",
        "ratio",
        "to forward and backward alone",
        "over one rank",
    )
    table(title, columns, [_row(pair, times) for pair in PAIRS])


def _row(pair: Pair, times: Mapping[str, list[float]]) -> tuple[str, ...]:
    own, theirs = times[pair.emitted], times[pair.torch]
    added = [
        _microseconds(_beyond(own, times[ALONE.emitted])),
        _microseconds(_beyond(theirs, times[ALONE.torch])),
    ]
    return (
        pair.emitted,
        _microseconds(own),
        pair.torch,
        _microseconds(theirs),
        ratio(own, theirs),
        ratio(own, times[_passes_of(pair)]),
        "" if pair is ALONE else " beside ".join(added),
    )


def _beyond(times: list[float], others: list[float]) -> list[float]:
    return [a - b for a, b in zip(times, others, strict=True)]


def _microseconds(times: list[float]) -> str:
    return f"{median(times) * 1e6:.0f} µs"


if __name__ == "__main__":
    main()
