"""Memory that the allocator of others' training steps has reserved, and whether the step fits its
GPU.

The model's part of a rank is compiled alone, once for all rows that have it: what a layer and the
head keep for backward, and the parameters.  How many layers and microbatches a rank of a pipeline
has, which part of the state, and what a framework keeps that scalec does not, follow from the row
and the framework's profile.

Reserved memory is a range.  State is known.  Gathered inputs of tensor parallelism stay reserved or
not: jobs with the same options differ.  Saved activations are off by as much as nine of ten rows of
the profile are.  Where a source does not say what is recomputed, the lower end has all layers
recomputed.

Non-goals: experts; what varies between ranks of one stage.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from math import ceil
from typing import Any

from attrs import frozen

from scalec.compiler.config.gpus import GIB, GPUS

from .figures import print_table
from .parts import Part, part_of
from .rows import Row, profile

PROFILES = {"nanotron": "nanotron_memory", "torchtitan": "torchtitan_memory"}
"""By framework; all others keep what scalec's programs keep."""

LIKE_SCALEC = "scalec_memory"


@frozen
class Reserved:
    """GiB that a step's allocator reserves, and whether all ranks' fit; `fits` is None where it
    may.

    likely  on the rank that the framework reports
    low     on the rank that needs most, at least
    high    likewise, at most
    room    GiB of the GPU that an allocator can get; None where its memory is not known
    """

    likely: float
    low: float
    high: float
    room: float | None

    @property
    def fits(self) -> bool | None:
        """Whether the whole range fits; None where a part of it does."""
        if self.room is None or self.high <= self.room:
            return True
        return None if self.low <= self.room else False


def reserved(row: Row, plan: Callable[[Row], str]) -> Reserved:
    """The memory of a row, whose `network` is healthy or congested.  Raises Unsaid or PlanError."""
    given = profile(PROFILES.get(row["framework"], LIKE_SCALEC))
    alone = {
        **row,
        "dp": "1",
        "pp": "1",
        "vpp": "1",
        "zero": "0",
        "recompute": "",
        "global_batch": row["micro_batch"],
    }
    if row["recompute"] == "full":
        alone["recompute"] = "full"
    part = part_of(plan(alone))
    may_recompute = given["may_recompute"] and RECOMPUTE in row.get("assumed", "")
    least = part_of(plan({**alone, "recompute": "full"})) if may_recompute else part
    ranks = range(_number(row, "pp"))
    likely = [_rank(row, rank, part, given) for rank in ranks]
    low = max(_rank(row, rank, least, given, Level.LOW) for rank in ranks)
    high = max(_rank(row, rank, part, given, Level.HIGH) for rank in ranks)
    reported = likely[0] if given["reports"] == "first" else max(likely)
    return Reserved(reported / GIB, low / GIB, high / GIB, _room(row))


def _room(row: Row) -> float | None:
    """GiB of a row's GPU that an allocator can get."""
    gpu = GPUS.get(row["gpu"])
    groups = sum(_number(row, axis) > 1 for axis in ("dp", "cp", "tp", "pp"))
    return None if gpu is None else gpu.memory - gpu.reserve(groups) / GIB


class Level(Enum):
    """The end of the range that is meant, or what lies between."""

    LOW = "low"
    LIKELY = "likely"
    HIGH = "high"


RECOMPUTE = "recompute"
"""The word of the column `assumed` in rows whose source does not say what is recomputed."""


LARGE = 20
"""GiB from which on reserved memory is compared: below, libraries' own weighs as much."""


def print_errors(rows: Sequence[Row], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints errors of reserved memory by framework, and how many rows are wrongly said to fit
    or not.
    """
    errors, verdicts = (
        defaultdict[str, list[float]](list),
        defaultdict[str, list[bool | None]](list),
    )
    inside = list[bool]()
    for row in rows:
        of = found.get(row["id"], {})
        if of.get("memory_gib") is None:
            continue
        verdicts[row["status"]].append(of["fits"])
        if (measured := float(row["mem_reserved_gib"] or 0)) >= LARGE:
            errors[row["framework"]].append(of["memory_gib"] / measured - 1)
            low, high = of["memory_range_gib"]
            inside.append(low <= measured <= high)
    print_table(f"Reserved memory from {LARGE} GiB on, predicted over measured, less 1", errors)
    if inside:
        print(f"{sum(inside)} of {len(inside)} measured ones are within their range")
    for status, each in sorted(verdicts.items()):
        wrong, said = WRONG[status]
        unsure = f"{each.count(None)} of which it is said that they may fit"
        print(f"{each.count(wrong)} of {len(each)} that {said}, {unsure}")


WRONG = {"ok": (False, "ran are called unfit"), "oom": (True, "ran out of memory are called fit")}
"""By status of a row the verdict that is wrong, in words."""


def _number(row: Row, column: str) -> int:
    return int(row[column] or 1)


def _tokens(row: Row) -> int:
    """Bytes of a microbatch on a rank."""
    return int(row["micro_batch"]) * int(row["seq"]) // _number(row, "cp")


def _rank(
    row: Row, rank: int, part: Part, given: Mapping[str, Any], level: Level = Level.LIKELY
) -> float:
    """The bytes of a rank of the pipeline."""
    ranks, microbatches, tp = (_number(row, column) for column in ("pp", "microbatches", "tp"))
    is_first, is_last = rank == 0, rank == ranks - 1
    layers = (
        _layers(row, rank, part) if given["cut"] == "cumulative" else int(row["layers"]) / ranks
    )
    outer = part.outside_layers(is_first, is_last)
    flying = min(_flying(rank, ranks, _number(row, "vpp")), microbatches)
    gathered = _gathered(row, flying, given, level) if tp > 1 else 0
    kept = given["activations"] * (given["selective"] if row["recompute"] == "selective" else 1)
    logits = given["logits"] * _tokens(row) * int(row["vocab"]) / tp
    saved = layers * (kept * flying * part.layer + gathered * part.inputs)
    off = {Level.LOW: given["least"], Level.LIKELY: 1, Level.HIGH: given["most"]}[level]
    return _state(layers * part.inner, outer, row, given) + off * (
        saved + is_last * (part.outside + logits)
    )


def _gathered(row: Row, flying: float, given: Mapping[str, Any], level: Level) -> float:
    """The microbatches whose gathered inputs stay reserved."""
    if level is Level.HIGH or (level is Level.LIKELY and row["network"] in given["keeps_gathered"]):
        return flying
    return 0 if level is Level.LOW else max(flying - 2, 0)


def _layers(row: Row, rank: int, part: Part) -> int:
    """A stage ends as soon as all so far cost their part of the whole: layers and the head, by
    their parameters.
    """
    count, ranks = int(row["layers"]), _number(row, "pp")
    part_of = (count + part.last / part.inner) / ranks
    return min(ceil((rank + 1) * part_of), count) - min(ceil(rank * part_of), count)


def _flying(rank: int, ranks: int, chunks: int) -> float:
    """Microbatches that a rank holds in 1F1B; of interleaved stages, in parts of all its layers."""
    after = ranks - 1 - rank
    return after + 1 if chunks == 1 else (2 * after + (chunks - 1) * ranks + 1) / chunks


def _state(inner: float, outer: float, row: Row, given: Mapping[str, Any]) -> float:
    """Parameters and gradients as the model has them, and masters with the optimizer's; each
    sharded from a stage on.

    Two layers and all that is outside of layers are whole under ZeRO 3.
    """
    zero, dp = _number({"zero": row["zero"] or "0"}, "zero"), _number(row, "dp")
    params, part = inner + outer, 1 / dp
    if zero >= 3:
        whole = outer + 2 * inner / int(row["layers"])
        return params * part * (2 + 4 + 12) + whole * (1 - part) * (2 + 4)
    gradients = given["gradients"] * (part if zero == 2 else 1)
    return params * (2 + gradients + 12 * (part if zero else 1))
