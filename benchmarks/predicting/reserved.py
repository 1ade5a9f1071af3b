"""Memory that the allocator of others' training steps has reserved, and whether the step fits its GPU.

The model's part of a rank is compiled alone, once for all rows that have it: what a layer and the head keep for
backward, and the parameters.  How many layers and microbatches a rank of a pipeline has, which part of the state, and
what a framework keeps that scalec does not, follow from the row and the framework's profile.

Non-goals: experts; what varies between ranks of one stage.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from scalec.compiler.config.gpus import GIB, GPUS

from .figures import print_table
from .parts import Part, part_of
from .rows import Row, profile

PROFILES = {"nanotron": "nanotron_memory", "torchtitan": "torchtitan_memory"}
"""By framework; all others keep what scalec's programs keep."""

LIKE_SCALEC = "scalec_memory"


def reserved(row: Row, plan: Callable[[Row], str]) -> tuple[float, bool]:
    """GiB on the rank that the framework reports, and whether all ranks' fit.  Raises Unsaid or PlanError.

    The row's `network` is healthy or congested.
    """
    given = profile(PROFILES.get(row["framework"], LIKE_SCALEC))
    alone = {**row, "dp": "1", "pp": "1", "vpp": "1", "zero": "0", "recompute": "", "global_batch": row["micro_batch"]}
    if row["recompute"] == "full":
        alone["recompute"] = "full"
    part = part_of(plan(alone))
    sizes = [_rank(row, rank, part, given) for rank in range(_number(row, "pp"))]
    gpu = GPUS.get(row["gpu"])
    largest = max(sizes)
    groups = sum(_number(row, axis) > 1 for axis in ("dp", "cp", "tp", "pp"))
    needs = largest * (1 + given["fragments"]) + (gpu.reserve(groups) if gpu else 0)
    reported = sizes[0] if given["reports"] == "first" else largest
    return reported / GIB, gpu is None or needs <= gpu.memory * GIB


LARGE = 20
"""GiB from which on reserved memory is compared: below, libraries' own weighs as much."""


def print_errors(rows: Sequence[Row], found: Mapping[str, Mapping[str, object]]) -> None:
    """Prints the errors of reserved memory by framework, and how many rows are wrongly said to fit or not."""
    errors, wrong = defaultdict[str, list[float]](list), defaultdict[str, list[bool]](list)
    for row in rows:
        value, fits = (found.get(row["id"], {}).get(figure) for figure in ("memory_gib", "fits"))
        if isinstance(value, float):
            wrong[row["status"]].append(fits is not (row["status"] == "ok"))
            if float(row["mem_reserved_gib"] or 0) >= LARGE:
                errors[row["framework"]].append(value / float(row["mem_reserved_gib"]) - 1)
    print_table(f"Reserved memory from {LARGE} GiB on, predicted over measured, less 1", errors)
    for status, each in sorted(wrong.items()):
        print(f"{sum(each)} of {len(each)} that {STATUS[status]}")


STATUS = {"ok": "ran and are called unfit", "oom": "ran out of memory and are called fit"}


def _number(row: Row, column: str) -> int:
    return int(row[column] or 1)


def _tokens(row: Row) -> int:
    """Bytes of a microbatch on a rank."""
    return int(row["micro_batch"]) * int(row["seq"]) // _number(row, "cp")


def _rank(row: Row, rank: int, part: Part, given: Mapping[str, Any]) -> float:
    """The bytes of a rank of the pipeline."""
    ranks, microbatches, tp = (_number(row, column) for column in ("pp", "microbatches", "tp"))
    is_first, is_last = rank == 0, rank == ranks - 1
    layers = _layers(row, rank, part) if given["cut"] == "cumulative" else int(row["layers"]) / ranks
    outer = part.outside_layers(is_first, is_last)
    flying = min(_flying(rank, ranks, _number(row, "vpp")), microbatches)
    gathers = row["network"] in given["keeps_gathered"]
    gathered = flying if gathers else max(flying - 2, 0)
    kept = given["activations"] * (given["selective"] if row["recompute"] == "selective" else 1)
    return (
        _state(layers * part.inner, outer, row, given)
        + layers * (kept * flying * part.layer + gathered * part.inputs * (tp > 1))
        + is_last * (part.outside + given["logits"] * _tokens(row) * int(row["vocab"]) / tp)
    )


def _layers(row: Row, rank: int, part: Part) -> int:
    """A stage ends as soon as all so far cost their part of the whole: layers and the head, by their parameters."""
    count, ranks = int(row["layers"]), _number(row, "pp")
    part_of = (count + part.last / part.inner) / ranks
    return min(ceil((rank + 1) * part_of), count) - min(ceil(rank * part_of), count)


def _flying(rank: int, ranks: int, chunks: int) -> float:
    """Microbatches that a rank holds in 1F1B; of interleaved stages, in parts of all its layers."""
    after = ranks - 1 - rank
    return after + 1 if chunks == 1 else (2 * after + (chunks - 1) * ranks + 1) / chunks


def _state(inner: float, outer: float, row: Row, given: Mapping[str, Any]) -> float:
    """Parameters and gradients as the model has them, and masters with the optimizer's; each sharded from a stage on.

    Two layers and all that is outside of layers are whole under ZeRO 3.
    """
    zero, dp = _number({"zero": row["zero"] or "0"}, "zero"), _number(row, "dp")
    params, part = inner + outer, 1 / dp
    if zero >= 3:
        whole = outer + 2 * inner / int(row["layers"])
        return params * part * (2 + 4 + 12) + whole * (1 - part) * (2 + 4)
    gradients = given["gradients"] * (part if zero == 2 else 1)
    return params * (2 + gradients + 12 * (part if zero else 1))
