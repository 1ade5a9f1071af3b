"""Rows of training steps: the work of each by the compiler, in two processes, and all of their
seconds at once.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen

from scalec.compiler.analysis.hardware import Hardware, find_shipped_gpu, load
from scalec.compiler.analysis.hardware.files import FOLDER
from scalec.compiler.syntax.diagnostics import PlanError

from .batch import Array, Batch, batch
from .frameworks import NUMBERS, Framework, profile, profile_of
from .plans import compiled, degree, plan
from .reserved import Reserved, reserved
from .rows import Row, Unsaid, why
from .steps import steps
from .work import Microbatch, work_of

USABLE = 0.77
"""The part of its data sheet's rate that a network holds."""

FEW = 50
"""Rows below which one process predicts all of them."""

HEALTHY, CONGESTED = "healthy", "congested"
"""States of a network."""

SLOW = ((2, 0.94), (4, 0.44), (1 << 30, 0.33))
"""By the number of nodes up to which it holds, the part of a node's adapters below which an
all-reduce of 1 GiB is so slow that the links have to be in a bad state: between what jobs of both
states measured (hardware.csv)."""

COLUMNS = ("attention", "compile", "overlap", "grad", "gpus", "allreduce_gbs", "assumed")
"""Columns that a file may lack."""

FIGURES = ("step_s", "memory_gib", "memory_range_gib", "room_gib", "fits", "parts")
"""The figures of a row; `fits` is None where it may fit."""

Clusters = Mapping[str, Row]


@frozen
class Read:
    """Rows that have a plan, their work, hardware and memory; by id, why others have none."""

    rows: Sequence[Row]
    work: Sequence[Microbatch]
    hardware: Sequence[Hardware]
    memory: Sequence[Reserved]
    whys: Mapping[str, str]

    @property
    def batch(self) -> Batch:
        """All of it as arrays."""
        return batch(self.rows, self.work, self.hardware)


def constants() -> dict[str, float]:
    """The shared constants, which `fit_profiles.py` writes."""
    return tomllib.loads(Path(__file__).with_name("constants.toml").read_text(encoding="utf-8"))


def numbers(rows: Sequence[Row], given: Framework | None = None) -> dict[str, Array]:
    """The numbers of the rows' frameworks, or a given profile's for all."""
    of = [given or profile(profile_of(row["framework"])) for row in rows]
    return {name: np.array([getattr(it, name) for it in of]) for name in NUMBERS}


def predicted(given: Read, framework: Framework | None = None) -> dict[str, dict[str, Any]]:
    """By row's id its figures, with a profile or each row's own; where there are none, the
    reason.
    """
    none = dict.fromkeys(FIGURES)
    found: dict[str, dict[str, Any]] = {
        id: {**none, "why": reason} for id, reason in given.whys.items()
    }
    if not given.rows:
        return found
    priced = steps(given.batch, numbers(given.rows, framework), constants())
    for at, (row, memory) in enumerate(zip(given.rows, given.memory, strict=True)):
        found[row["id"]] = {
            "step_s": float(priced.seconds[at]),
            "memory_gib": memory.likely,
            "memory_range_gib": (memory.low, memory.high),
            "room_gib": memory.room,
            "fits": memory.fits,
            "parts": {name: float(seconds[at]) for name, seconds in priced.parts.items()},
        }
    return found


def read_work(given: Sequence[Row], clusters: Clusters, processes: int = 2) -> Read:
    """Compiles the rows' plans, those of equal microbatches once."""
    rows = [{**dict.fromkeys(COLUMNS, ""), **row} for row in given]
    texts, whys, hardware = dict[str, str](), dict[str, str](), dict[str, Hardware]()
    for row in rows:
        try:
            hardware[row["id"]], texts[row["id"]] = hardware_of(row, clusters), _key(row)
        except Unsaid as error:
            whys[row["id"]] = why(error)
    first = {text: _least(row) for row in rows if (text := texts.get(row["id"]))}
    planned = [{**row, "network": _state(row, clusters)} for row in rows if row["id"] in texts]
    works, memory = _in_processes(((_work, [*first.values()]), (_memory, planned)), processes)
    found = dict(zip(first, works, strict=True))
    of = {row["id"]: (found[texts[row["id"]]], it) for row, it in zip(planned, memory, strict=True)}
    whys |= {
        id: reason for id, each in of.items() for reason in each[::-1] if isinstance(reason, str)
    }
    good = [row for row in planned if row["id"] not in whys]
    work, needs = zip(*(of[row["id"]] for row in good), strict=True) if good else ((), ())
    return Read(good, work, [hardware[row["id"]] for row in good], needs, whys)


def _key(row: Row) -> str:
    """Rows of one key have the same work of a microbatch."""
    return f"{plan(_least(row))}\n{row['gpus_per_node']}"


def _least(row: Row) -> Row:
    """The row with two ranks of dp, and as many microbatches as stages: neither changes the
    work of one.
    """
    dp = min(degree(row, "dp"), 2)
    return {
        **row,
        "dp": f"{dp}",
        "global_batch": f"{int(row['micro_batch'] or 0) * dp * degree(row, 'pp')}",
    }


def _work(row: Row) -> Microbatch | str:
    try:
        return work_of(compiled(row), degree(row, "gpus_per_node"))
    except (Unsaid, PlanError) as error:
        return why(error)


def _memory(row: Row) -> Reserved | str:
    try:
        return reserved(row, plan)
    except (Unsaid, PlanError) as error:
        return why(error)


def _in_processes(
    tasks: Iterable[tuple[Callable[[Row], Any], Sequence[Row]]], processes: int
) -> list[list[Any]]:
    """Results of each function on its rows; few rows are not worth processes."""
    todo = [*tasks]
    if processes < 2 or max(len(rows) for _, rows in todo) < FEW:
        return [[*map(of, rows)] for of, rows in todo]
    with get_context("fork").Pool(processes) as pool:
        under_way = [pool.map_async(of, rows, chunksize=8) for of, rows in todo]
        return [it.get() for it in under_way]


# ---- hardware


def hardware_of(row: Row, clusters: Clusters) -> Hardware:
    """The hardware of a row: a shipped cluster of its GPU and adapters, or its GPU on a network
    like its cluster's.

    Raises Unsaid.
    """
    gbit = _gbit(row, clusters)
    ranks = degree(row, "gpus_per_node")
    name, state = f"{row['gpu']}_{ranks}x{gbit / ranks:.0f}", _state(row, clusters)
    if state != HEALTHY:
        name += f"_{state}"
    path = FOLDER / "clusters" / f"{name}.toml"
    if path.is_file():
        return evolve(load(path), ranks_per_node=ranks)
    found = find_shipped_gpu(row["gpu"])
    if found is None:
        raise Unsaid(f"no data sheet of {row['gpu']}")
    return evolve(found, ranks_per_node=ranks, network=gbit / 8 * 1e9 * USABLE or found.network)


def _gbit(row: Row, clusters: Clusters) -> float:
    """Gb/s of a node's adapters, 0 if nothing is known of the row's cluster."""
    return (
        float(clusters[row["cluster"]]["node_gbit_s"] or 0) if row["cluster"] in clusters else 0.0
    )


def _state(row: Row, clusters: Clusters) -> str:
    """Congested if the all-reduce at a job's start is too slow for the adapters of its nodes."""
    nodes = degree(row, "gpus") / degree(row, "gpus_per_node")
    part = next(part for most, part in SLOW if nodes <= most)
    if not row["allreduce_gbs"] or nodes <= 1:
        return HEALTHY
    return CONGESTED if float(row["allreduce_gbs"]) < part * _gbit(row, clusters) / 8 else HEALTHY
