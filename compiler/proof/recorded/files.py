"""Reads what `SCALEC_RECORD=1` left of a run: one file of JSON lines for each rank."""

import json
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

from attrs import frozen

NAMES = {"int64": "i64", "float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""The plan's names of torch's dtypes."""

Splits = tuple[tuple[int, ...], ...]
"""The sizes of what a rank sends to each rank of a group, and of what it has from each."""


class RecordError(Exception):
    """There is no record that could be compared; one line says why and what to do."""


@frozen
class Call:
    """A collective or a message as one rank asks for it.

    op         all_reduce, all_gather, reduce_scatter, all_to_all or rotate; send or receive;
               torch's own name of any other, with `::` in it
    reduction  `sum` or `max`; empty for what reduces nothing
    group      as global ranks
    shape      of the local tensor that goes in, as is its dtype; or of the received one.  In a plan
               the first size is None where ranks have rows of experts
    peer       the global rank at a message's other end
    splits     of an all-to-all whose parts are not equal: their sizes, to each rank of the group
               and from each
    """

    op: str
    reduction: str
    group: tuple[int, ...]
    shape: tuple[int | None, ...]
    dtype: str
    peer: int | None = None
    splits: Splits | None = None

    def __str__(self) -> str:
        """For instance `all_reduce (max) of f32[128, 8] over ranks 0, 1`, or `send of f32[128,
        8] to rank 1`.
        """
        if self.peer is not None:
            way = "to" if self.op == "send" else "from"
            return f"{self.op} of {self.dtype}{list(self.shape)} {way} rank {self.peer}"
        words = self.op
        if self.reduction:
            words += f" ({self.reduction})"
        sizes = ", ".join("rows" if size is None else str(size) for size in self.shape)
        words += f" of {self.dtype}[{sizes}] over {ranks(self.group)}"
        if self.splits:
            words += f", {' + '.join(map(str, self.splits[0]))} to each"
        return words


@frozen
class Stretch:
    """The calls of one `train` step, one `evaluate`, or the `loop` between them; `whole` if it came
    to its end.
    """

    phase: str
    step: int
    calls: tuple[Call, ...]
    whole: bool

    def __str__(self) -> str:
        """Where it is in the run."""
        words = {"train": "step", "evaluate": "evaluation after step"}
        return f"{words.get(self.phase, 'after step')} {self.step}"


@frozen
class Record:
    """The record of one rank; ranks that were started together share `run`."""

    rank: int
    run: str
    backend: str
    torch: str
    stretches: tuple[Stretch, ...]

    def calls(self) -> Iterator[tuple[Stretch, Call]]:
        """Every call, in order, and where in the run it was made."""
        for stretch in self.stretches:
            for call in stretch.calls:
                yield stretch, call


def ranks(numbers: Sequence[int]) -> str:
    """For instance `rank 3`, or `ranks 0, 1`, or `ranks 0, 1, 2, … 127`."""
    shown: Sequence[object] = numbers
    if len(numbers) > 8:
        shown = [*numbers[:6], "…", numbers[-1]]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, shown))}"


def read_plan(folder: Path) -> dict[str, Any]:
    """The plan.json that lies beside the record, of an elastic one at the size that ran.

    Raises RecordError.
    """
    path = folder / "plan.json"
    if not path.is_file():
        raise RecordError(
            f"there is no {path}: copy the one here that was compiled together with the program"
        )
    try:
        plan: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from None
    keys = {"name", "mesh", "dims", "collectives", "evaluation"}
    if not isinstance(plan, dict) or not keys <= set(cast(Any, plan)):
        raise RecordError(f"{path} is not the account of a compiled plan")
    account = cast("dict[str, Any]", plan)
    for collective in account["collectives"]:
        if not {"loops", "last", "ahead", "every"} <= collective.keys():
            raise RecordError(
                f"{path} is of an earlier scalec: compile the plan again, and record once more"
            )
    if not (smaller := cast("list[dict[str, Any]]", account.get("smaller", []))):
        return account
    first, mesh = folder / "rank00000.jsonl", None
    if first.is_file():
        mesh = next((line.get("mesh") for line in _lines(first)), None)
    for size in smaller:
        if size["mesh"] == mesh:
            return account | size
    return account


def read_records(folder: Path, plan: dict[str, Any]) -> list[Record]:
    """The records of all ranks of the plan's mesh, by rank.

    Raises RecordError unless all are of this plan and run.
    """
    world = prod(plan["mesh"].values())
    paths = {rank: folder / f"rank{rank:05}.jsonl" for rank in range(world)}
    missing = [rank for rank, path in paths.items() if not path.is_file()]
    if missing:
        where = "run the program with SCALEC_RECORD=1"
        if len(missing) < world:
            where = "copy their files here"
        elif (inside := folder / "recorded").is_dir():
            where = f"name {inside}"
        raise RecordError(f"{folder} has no record of {ranks(missing)}: {where}")
    records = [_read(path, rank, plan) for rank, path in paths.items()]
    for record in records:
        if record.run != records[0].run:
            raise RecordError(
                f"ranks 0 and {record.rank} recorded different runs: empty {folder} and record"
                " once more"
            )
    return records


def _read(path: Path, rank: int, plan: dict[str, Any]) -> Record:
    lines = list(_lines(path))
    if not lines:
        raise RecordError(f"{path} is empty: rank {rank} ended before it began")
    origin = lines[0]
    for key, expected in (("plan", plan["name"]), ("mesh", plan["mesh"]), ("rank", rank)):
        # as text: the order of a mesh's axes counts
        if json.dumps(origin.get(key)) != json.dumps(expected):
            raise RecordError(
                f"{path} is of another plan: its {key} is {origin.get(key)}, not {expected}"
            )
    try:
        return Record(
            rank, origin["run"], origin["backend"], origin["torch"], tuple(_stretches(lines[1:]))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is damaged: {error}") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file; a last one that was not written to its end is left out."""
    *whole, _ = path.read_text("utf-8", errors="replace").split("\n")
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
    order, calls, current = 0, list[Call](), ("loop", 0)
    for line in lines:
        here = (str(line["phase"]), int(line["step"]))
        if here != current and calls:
            yield Stretch(*current, tuple(calls), whole=current[0] == "loop")
            calls = []
        current = here
        if "calls" in line:
            if line["calls"] != len(calls):
                phase, step = current
                raise ValueError(f"{phase} {step} has {len(calls)} calls of {line['calls']}")
            yield Stretch(*current, tuple(calls), whole=True)
            calls, current = [], ("loop", current[1])
            continue
        if line["order"] != order:
            raise ValueError(f"call {order} is missing")
        order += 1
        calls.append(_call(line))
    if calls:
        yield Stretch(*current, tuple(calls), whole=current[0] == "loop")


def _call(line: dict[str, Any]) -> Call:
    dtype = NAMES.get(str(line["dtype"]), str(line["dtype"]))
    group, shape = tuple(line["group"]), tuple(line["shape"])
    splits = None
    if "splits" in line:
        splits = tuple(tuple(sizes) for sizes in line["splits"])
    return Call(line["op"], line["reduction"], group, shape, dtype, line.get("peer"), splits)
