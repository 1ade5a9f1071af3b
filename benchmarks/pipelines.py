"""`.venv/bin/python benchmarks/pipelines.py`: schedules made and checked, the host time of an
action, bubbles.

Three questions.  How long it takes to make, check and order the messages of a schedule of 16 ranks
× 4 chunks × 512 microbatches (bar: 2 seconds), and how that grows.  How much the executor adds to
each action, beside torch.distributed.pipelining with stages that do next to nothing, on 2 gloo
ranks (bar: no more).  And whether stages that sleep, in forward and in each part of backward, take
as long as the simulation says (bar: within 5%).

Non-goals: overlap with other communication, GPUs.
"""

import gc
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from statistics import median
from time import perf_counter, process_time, sleep, thread_time
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from measure import asked_quick, in_turns, ratio, table, where
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.multiprocessing.spawn import start_processes

from scalec.compiler.schedules.actions import Schedule
from scalec.compiler.schedules.check import problems
from scalec.compiler.schedules.p2p import with_messages
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.schedules.rendezvous import rendezvous
from scalec.compiler.schedules.timeline import Timeline, Times, simulate
from scalec.runtime import Batch, Mesh, Pipeline, StageInput, split_linear

RANKS, MICROBATCHES, WIDTH = 2, 16, 8
TORCH = {"1f1b": Schedule1F1B, "interleaved_1f1b": ScheduleInterleaved1F1B}
BUBBLES = (
    (2, "1f1b"),
    (4, "gpipe"),
    (4, "1f1b"),
    (2, "interleaved_1f1b"),
    (4, "zb_h1"),
    (4, "zb_h2"),
    (2, "interleaved_zero_bubble"),
    (4, "interleaved_zero_bubble"),
    (4, "zbv"),
    (4, "dualpipev"),
)
"""Ranks and schedules, of twice as many microbatches as ranks."""
NAP = 0.05
"""Seconds that a stage's forward sleeps, and each part of its backward."""

Step = Callable[[], object]


class Cost(NamedTuple):
    """Seconds of a step: of the thread that runs it, and of the clock."""

    host: float
    wall: float


def main() -> None:
    """Measures, and prints tables."""
    quick = asked_quick(__doc__)
    print(where())
    _making(1 if quick else 5)
    start_processes(_overhead, (2 if quick else 40,), nprocs=RANKS, start_method="fork")
    _bubbles(1 if quick else 5)


# ---- schedules


def _making(rounds: int) -> None:
    rows = [_made(microbatches, rounds) for microbatches in (128, 256, 512)]
    columns = (
        "16 ranks × 4 chunks",
        "actions",
        "made",
        "messages",
        "checked",
        "rendezvous",
        "in all, CPU seconds",
    )
    table("Schedules: interleaved_1f1b", columns, rows)


def _made(microbatches: int, rounds: int) -> tuple[str, ...]:
    """The median of each part; without the collector, which the command line runs seldom too."""
    times: list[list[float]] = []
    count = 0
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        clock = [process_time()]
        schedule = SCHEDULES["interleaved_1f1b"](16, microbatches, 4)
        clock.append(process_time())
        ordered = with_messages(schedule, Times.uniform(schedule.stages))
        clock.append(process_time())
        assert not problems(schedule)
        clock.append(process_time())
        assert not rendezvous(ordered)
        clock.append(process_time())
        gc.enable()
        times.append([after - before for before, after in pairwise(clock)])
        count = sum(map(len, schedule.rows))
    parts = [median(column) for column in zip(*times, strict=True)]
    return (
        f"{microbatches} microbatches",
        f"{count:,}",
        *(f"{part:.2f}" for part in (*parts, sum(parts))),
    )


# ---- what an action costs


class _Tiny(nn.Module):
    """A stage that does next to nothing; without a word of loss, which both add alike."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.weight.grad = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x · weight."""
        return x * self.weight


class RankModel(nn.Module):
    """A rank's stages, as emitted programs have them."""

    def __init__(self, held: tuple[int, ...], stages: int, stage: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleDict({str(i): stage() for i in held})
        self.last = stages - 1

    def forward(self, stage: int, x: Tensor | None, tokens: Tensor, labels: Tensor) -> Tensor:
        """One stage; what enters the first are tokens."""
        made: Tensor = self.held[str(stage)](tokens if x is None else x)
        return made.sum() if stage == self.last else made


def our_step(
    schedule: Schedule,
    mesh: Mesh,
    stage: Callable[[], nn.Module],
    batch: Batch,
    shape: tuple[int, ...] = (1, WIDTH),
) -> Step:
    """A step of the runtime's executor; `shape` is of what stages hand on."""
    ordered = with_messages(schedule, Times.uniform(schedule.stages))
    rows = [",".join(map(str, row)) for row in ordered.rows]
    pipeline = Pipeline(
        "pp",
        stage_to_rank=schedule.stage_to_rank,
        stage_inputs=(StageInput("x", shape, torch.float32),),
        schedule=rows,
    )
    model = RankModel(pipeline.stages(mesh), schedule.stages, stage)
    return partial(pipeline.run, model, batch, torch.tensor(1.0), mesh)


def _torchs(name: str, schedule: Schedule, rank: int) -> Step:
    held = schedule.stages_of(rank)
    group = dist.group.WORLD
    example = torch.zeros(1, WIDTH, requires_grad=True)  # else no gradients are sent
    parts = [
        PipelineStage(
            _Tiny(), i, schedule.stages, torch.device("cpu"), (example,), example, group=group
        )
        for i in held
    ]
    made: Any = TORCH[name](
        parts if len(parts) > 1 else parts[0],
        schedule.microbatches,
        loss_fn=_summed,
        scale_grads=False,
    )
    x = torch.ones(schedule.microbatches, WIDTH)

    def step() -> None:
        arguments = (x,) if 0 in held else ()
        target = {"target": x} if schedule.stages - 1 in held else {}
        made.step(*arguments, **target)

    return step


def _summed(x: Tensor, _: Tensor) -> Tensor:
    return x.sum()


def _overhead(rank: int, rounds: int) -> None:
    mesh = _joined(rank, RANKS)
    batch = _batch(MICROBATCHES)
    for name in TORCH:
        schedule = SCHEDULES[name](RANKS, MICROBATCHES)
        steps = {
            "ours": our_step(schedule, mesh, _Tiny, batch),
            "torch": _torchs(name, schedule, rank),
        }
        costs = in_turns({of: partial(_timed, step) for of, step in steps.items()}, rounds)
        actions = len(schedule.rows[rank])
        if rank:
            continue
        rows = [
            (
                of,
                *(
                    f"{median(times) / actions * 1e6:.0f} µs"
                    for times in zip(*costs[of], strict=True)
                ),
                ratio([cost.host for cost in costs[of]], [cost.host for cost in costs["torch"]]),
            )
            for of in costs
        ]
        title = f"{name}, {MICROBATCHES} microbatches, {RANKS} gloo ranks: an action on rank 0"
        table(title, ("", "host time", "wall time", "host time beside torch's"), rows)
    dist.destroy_process_group()


def _timed(step: Step) -> Cost:
    dist.barrier()
    host, wall = thread_time(), perf_counter()
    step()
    return Cost(thread_time() - host, perf_counter() - wall)


# ---- bubbles


class _Nap(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sleep(NAP)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        sleep(NAP)
        return grad_outputs[0]


def _nap_with(gradient: Tensor | None) -> None:
    if gradient is not None:  # as it is while it is put off
        sleep(NAP)


class _Sleeper(nn.Module):
    """The weight's part of backward, which zero-bubble schedules put off, sleeps when its
    gradient is there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        cast(Any, self.weight).register_hook(_nap_with)

    def forward(self, x: Tensor) -> Tensor:
        """x · weightᵀ."""
        return cast(Any, _Nap).apply(split_linear(x, self.weight))


def _bubbles(rounds: int) -> None:
    rows = get_context("fork").SimpleQueue()
    for ranks, name in BUBBLES:
        start_processes(_bubble, (ranks, name, rounds, rows), nprocs=ranks, start_method="fork")
    columns = (
        "",
        "simulated",
        "measured (least–most)",
        "difference",
        "bubble simulated",
        "bubble measured",
    )
    title = (
        f"Stages that sleep {NAP * 1e3:.0f} ms in forward and in each part of backward,"
        f" {rounds} rounds"
    )
    table(title, columns, [rows.get() for _ in BUBBLES])


def _bubble(
    rank: int, ranks: int, name: str, rounds: int, rows: "SimpleQueue[tuple[str, ...]]"
) -> None:
    mesh = _joined(rank, ranks)
    schedule = SCHEDULES[name](ranks, 2 * ranks)
    step = our_step(schedule, mesh, _Sleeper, _batch(2 * ranks))
    step()  # binds rows
    took = torch.tensor([_timed(step).wall for _ in range(rounds)])
    dist.all_reduce(took, dist.ReduceOp.MAX)  # of each round the slowest rank's
    if not rank:
        simulated = simulate(schedule, Times.uniform(schedule.stages))
        rows.put(
            (f"{name}, {ranks} ranks, {2 * ranks} microbatches", *_compared(simulated, took / NAP))
        )
    dist.destroy_process_group()


def _compared(simulated: Timeline, took: Tensor) -> tuple[str, ...]:
    """The simulation beside the median of what rounds took, in naps."""
    measured, fastest, slowest = (float(each) for each in (took.median(), took.min(), took.max()))
    busy = (1 - simulated.bubble) * simulated.total
    return (
        f"{simulated.total * NAP * 1e3:.0f} ms",
        f"{measured * NAP * 1e3:.0f} ({fastest * NAP * 1e3:.0f}–{slowest * NAP * 1e3:.0f}) ms",
        f"{measured / simulated.total - 1:+.1%}",
        f"{simulated.bubble:.1%}",
        f"{1 - busy / measured:.1%}",
    )


def _joined(rank: int, ranks: int) -> Mesh:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{29400 + ranks}", rank=rank, world_size=ranks
    )
    return Mesh({"pp": ranks})


def _batch(microbatches: int) -> Batch:
    rows = torch.ones(microbatches, 1, WIDTH)
    return Batch(tokens=rows, labels=rows)


if __name__ == "__main__":
    main()
