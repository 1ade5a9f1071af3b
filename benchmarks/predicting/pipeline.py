"""Rows of pipelines: samples a second on each GPU and the bubble of a schedule, by simulation of
its rows.

A stage's times are the profiled ones of the row, or of one with the same model, in proportion to
layers and samples; where none are known the stage is compiled and priced.  Bubble rate is that of
the rank that takes longest from its first action to its last, as the zero-bubble paper has it (Qi
et al. 2024, arXiv 2401.10241, section 5.2).

Non-goals: memory, data parallelism, the optimizer.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from attrs import evolve, frozen

from scalec.compiler.analysis.hardware import find_shipped_gpu
from scalec.compiler.analysis.time.pipeline import get_stage_clocks
from scalec.compiler.schedules.actions import Schedule, Work
from scalec.compiler.schedules.activation_memory import Keeps, MemoryBudget
from scalec.compiler.schedules.feasibility import Task
from scalec.compiler.schedules.list_scheduling import Rule, follow_rule
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.schedules.timeline import Times, simulate
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

from .rows import Row, Unsaid, gpt, profile, stage_layers, train

FIGURES = ("samples_s_gpu", "bubble_rate")
"""Columns that are predicted."""

NAMED = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved_1f1b",
    "ZB-H1": "zb_h1",
    "ZB-H2": "zb_h2",
    "ZB-V": "zbv",
}
BUDGETS = {"ZB-1p": 1, "ZB-2p": 2}
"""Schedules made for what a rank may hold: microbatches for each rank."""

SYNCHRONOUS = " with all-reduce sync"
"""A step of all ranks begins when the last one is done; elsewhere each begins its own."""

VOCAB = 50_304


@frozen
class Parts:
    """Milliseconds of a stage's forward, gradient of inputs and gradient of weights, and of a
    message in a node.
    """

    forward: float
    input: float
    weight: float
    message: float

    @classmethod
    def profiled(cls, row: Row) -> "Parts":
        """The parts of a row that has them."""
        return cls(*(float(row[f"T_{name}_ms"]) for name in ("F", "B", "W", "comm")))

    @property
    def total(self) -> float:
        """Seconds of a microbatch."""
        return self.forward + self.input + self.weight

    def scaled(self, stage: float, samples: float) -> "Parts":
        """With multiples of the layers in a stage and of the samples in a microbatch."""
        times = stage * samples
        return Parts(
            self.forward * times, self.input * times, self.weight * times, self.message * samples
        )

    def slowed(self, by: float, action: float) -> "Parts":
        """Slower by a part, and by milliseconds for each action."""
        forward, input, weight = (
            time * (1 + by) + action for time in (self.forward, self.input, self.weight)
        )
        return Parts(forward, input, weight, self.message)


class Predictor:
    """Predicts rows, of which some have the times of others' stages."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._profiled = [row for row in rows if row["T_F_ms"]]
        self._profile = profile("megatron_pipelines")

    def __call__(self, row: Row) -> dict[str, float]:
        """The figures of a row.  Raises Unsaid or PlanError."""
        if not row["microbatches"]:
            raise Unsaid("a formula, without sizes")
        parts, given = self._parts(row), self._profile
        cost = self._cost(row, parts)
        slow = parts.slowed(given["slowdown"], given["action_ms"])
        samples = int(row["micro_batch"]) * int(row["microbatches"])
        return {
            "samples_s_gpu": samples / (self._cost(row, slow) / 1e3) / int(row["pp"]),
            "bubble_rate": 1 - int(row["microbatches"]) * parts.total / cost,
        }

    def _parts(self, row: Row) -> Parts:
        """A stage's times: its own, or of the row most like it, or priced."""
        if row["T_F_ms"]:
            return Parts.profiled(row)
        of_model = [
            it
            for it in self._profiled
            if all(it[key] == row[key] for key in ("layers", "hidden", "seq"))
        ]
        if not of_model:
            return _priced(*(int(row[key]) for key in SIZES), row["gpu"])
        near = min(of_model, key=lambda it: abs(int(it["microbatches"]) - int(row["microbatches"])))
        stage, samples = (
            int(near["pp"]) / int(row["pp"]),
            int(row["micro_batch"]) / int(near["micro_batch"]),
        )
        return Parts.profiled(near).scaled(stage, samples)

    def _cost(self, row: Row, parts: Parts) -> float:
        """The milliseconds of the longest rank."""
        name = row["schedule"].removesuffix("*").removesuffix(SYNCHRONOUS)
        ranks, microbatches = int(row["pp"]), int(row["microbatches"])
        if name in NAMED:
            chunks = stage_layers(int(row["layers"]), ranks)[1] if name == "1F1B-I" else None
            schedule = SCHEDULES[NAMED[name]](ranks, microbatches, chunks)
            found = [(schedule, self._times(schedule.stage_to_rank, ranks, parts))]
        elif name in BUDGETS:
            times = self._times(tuple(range(ranks)), ranks, parts)
            each = MemoryBudget(
                (BUDGETS[name] * ranks,) * ranks,
                Keeps.uniform(ranks, 1, self._profile["weight_keeps"]),
            )
            task = Task(tuple(range(ranks)), microbatches, times, each)
            found = [(it, times) for it in _ruled(task, parts, BUDGETS[name])]
        else:
            raise Unsaid(f"no schedule {name}")
        return min(_span(*each, together=row["schedule"].endswith(SYNCHRONOUS)) for each in found)

    def _times(self, stage_to_rank: Sequence[int], ranks: int, parts: Parts) -> Times:
        """Times of all stages; a message between nodes takes longer."""
        stages, given = len(stage_to_rank), self._profile
        chunks, node = stages // ranks, given["ranks_per_node"]
        away = parts.message * given["message_rate"] / given["network_rate"]
        cuts = tuple(
            parts.message if a // node == b // node else away for a, b in pairwise(stage_to_rank)
        )
        forward, input, weight = (
            (time / chunks,) * stages for time in (parts.forward, parts.input, parts.weight)
        )
        return Times(forward, input, weight, parts.message, cuts)


def _ruled(task: Task, parts: Parts, ahead: int) -> list[Schedule]:
    """Schedules by rules: forward first, weights' parts in gaps or only where nothing else can
    be done at once.
    """
    lags = (1e-9 * parts.weight, parts.weight)
    return [follow_rule(Rule(-parts.forward, lag, ahead), task).schedule() for lag in lags]


def _span(schedule: Schedule, times: Times, together: bool) -> float:
    found = simulate(schedule, times)
    return found.total if together else max(slots[-1].end - slots[0].start for slots in found.slots)


GPUS: Mapping[str, str] = {"A100-80GB": "a100_80gb"}


SIZES = ("layers", "hidden", "heads", "seq", "pp", "micro_batch")


@lru_cache
def _priced(
    layers: int, hidden: int, heads: int, seq: int, stages: int, samples: int, gpu: str
) -> Parts:
    """The times of a stage in the middle, by data sheet and the profile.

    Raises Unsaid or PlanError.
    """
    hardware, given = find_shipped_gpu(GPUS.get(gpu, gpu)), profile("megatron_pipelines")
    if hardware is None:
        raise Unsaid(f"no data sheet of {gpu}")
    hardware, own = evolve(hardware, held={"bf16": given["held"]}), stage_layers(layers, stages)
    sizes = {"vocab": VOCAB, "hidden": hidden, "heads": heads, "head_dim": hidden // heads}
    text = gpt({**sizes, "ffn": 4 * hidden, "layers": layers}, ("bias", "tied"))
    text += f"mesh {{ pp = {stages} }}\nshard {{ layers over pp }}\n"
    text += f"pipeline {{ schedule = zb_h1  stages = {own} }}\n" + train(
        seq, samples * stages, samples
    )
    of = get_stage_clocks(compile_plan(Source("row.scale", text)), hardware)[stages // 2]
    scores = own[stages // 2] * samples * heads * seq**2 / hardware.memory_rate
    return Parts(
        1e3 * (of[Work.FORWARD].gpu + scores * given["forward_bytes"]),
        1e3 * (of[Work.INPUT].gpu + scores * given["backward_bytes"]),
        1e3 * of[Work.WEIGHT].gpu,
        1e3 * samples * seq * hidden * 2 / given["message_rate"],
    )
