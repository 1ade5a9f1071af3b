"""Reads what `SCALEC_RECORD=1` left of a run: one file of JSON lines for each rank.

Non-goals: what the plan says (`recorded_plan`), and whether it was done (`recorded`).
"""

import json
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

from attrs import field, frozen

NAMES = {"int64": "i64", "float64": "f64", "float32": "f32", "bfloat16": "bf16"}
"""The plan's names of torch's dtypes."""


class RecordError(Exception):
    """There is no record that could be compared; one line says why and what to do."""


@frozen
class Call:
    """A collective as one rank asks for it: `group` in global ranks, shape and dtype of the local tensor that goes in."""

    op: str
    reduction: str  # `sum` or `max`, empty for what reduces nothing
    group: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """For instance `all_reduce (max) of f32[128, 8] over ranks 0, 1`."""
        reduction = f" ({self.reduction})" if self.reduction else ""
        return f"{self.op}{reduction} of {self.dtype}{list(self.shape)} over {ranks(self.group)}"


@frozen
class Stretch:
    """The calls of one train_step, one evaluation, or of what the loop does in between; `whole` if it came to its end."""

    phase: str
    step: int
    calls: tuple[Call, ...]
    whole: bool

    def __str__(self) -> str:
        """Where it is in the run."""
        return {"train": "step", "evaluate": "evaluation after step"}.get(self.phase, "after step") + f" {self.step}"


@frozen
class Record:
    """What one rank recorded; `origin` tells whose record it is."""

    rank: int
    origin: dict[str, Any] = field(eq=False)
    stretches: tuple[Stretch, ...]

    def calls(self) -> Iterator[tuple[Stretch, Call]]:
        """Every call, in order, and where in the run it was made."""
        return ((stretch, call) for stretch in self.stretches for call in stretch.calls)


def ranks(numbers: Sequence[int]) -> str:
    """For instance `rank 3`, or `ranks 0, 1`, or `ranks 0, 1, 2, … 127`."""
    shown = [*numbers[:6], "…", numbers[-1]] if len(numbers) > 8 else numbers
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, shown))}"


def read_plan(folder: Path) -> dict[str, Any]:
    """The plan.json that lies beside the record.  Raises RecordError."""
    path = folder / "plan.json"
    if not path.is_file():
        raise RecordError(f"there is no {path}: copy the one here that was compiled together with the program")
    try:
        plan = json.loads(path.read_bytes())
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from None
    if not isinstance(plan, dict) or not {"name", "mesh", "dims", "collectives", "evaluation"} <= set(cast(Any, plan)):
        raise RecordError(f"{path} is not the account of a compiled plan")
    return cast("dict[str, Any]", plan)


def read_records(folder: Path, plan: dict[str, Any]) -> list[Record]:
    """The records of all ranks of the plan's mesh, by rank.  Raises RecordError where one is not of this plan and run."""
    world = prod(plan["mesh"].values())
    paths = {rank: folder / f"rank{rank:05}.jsonl" for rank in range(world)}
    missing = [rank for rank, path in paths.items() if not path.is_file()]
    if missing:
        where = "copy their files here" if len(missing) < world else "run the program with SCALEC_RECORD=1"
        raise RecordError(f"{folder} has no record of {ranks(missing)}: {where}")
    records = [_read(path, rank, plan) for rank, path in paths.items()]
    for record in records:
        if record.origin.get("run") != records[0].origin.get("run"):
            raise RecordError(f"ranks 0 and {record.rank} recorded different runs: empty {folder} and record once more")
    return records


def _read(path: Path, rank: int, plan: dict[str, Any]) -> Record:
    lines = list(_lines(path))
    if not lines:
        raise RecordError(f"{path} is empty: rank {rank} ended before it began")
    origin = lines[0]
    for key, expected in (("plan", plan["name"]), ("mesh", plan["mesh"]), ("rank", rank)):
        if json.dumps(origin.get(key)) != json.dumps(expected):  # as text: the order of a mesh's axes counts
            raise RecordError(f"{path} is of another plan: its {key} is {origin.get(key)}, not {expected}")
    try:
        return Record(rank, origin, tuple(_stretches(lines[1:])))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is damaged: {error}") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file; a last one that was not written to its end is left out."""
    *whole, _ = path.read_text(errors="replace").split("\n")
    for number, text in enumerate(whole, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise RecordError(f"{path}:{number} is not a line of a record")
        yield cast("dict[str, Any]", line)


def _stretches(lines: Sequence[dict[str, Any]]) -> Iterator[Stretch]:
    """Lines put together by phase; each `calls` closes one."""
    order, calls, at = 0, list[Call](), ("loop", 0)
    for line in lines:
        here = (str(line["phase"]), int(line["step"]))
        if here != at and calls:
            yield Stretch(*at, tuple(calls), whole=at[0] == "loop")
            calls = []
        at = here
        if "calls" in line:
            if line["calls"] != len(calls):
                raise ValueError(f"{at[0]} {at[1]} has {len(calls)} calls of {line['calls']}")
            yield Stretch(*at, tuple(calls), whole=True)
            calls, at = [], ("loop", at[1])
            continue
        if line["order"] != order:
            raise ValueError(f"call {order} is missing")
        order += 1
        calls.append(_call(line))
    if calls:
        yield Stretch(*at, tuple(calls), whole=at[0] == "loop")


def _call(line: dict[str, Any]) -> Call:
    dtype = str(line["dtype"])
    return Call(line["op"], line["reduction"], tuple(line["group"]), tuple(line["shape"]), NAMES.get(dtype, dtype))
