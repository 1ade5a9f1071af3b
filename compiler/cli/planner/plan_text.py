"""The text of a plan that says a choice."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ...syntax.source import Source
from .choice import CHUNKED, FULL, HALF, NONE, REGATHER, SELECTIVE, Choice
from .facts import Facts, Goal
from .model_file import ModelFile, seen


def bare_plan(file: ModelFile, goal: Goal) -> Source:
    """The plan of a model on one rank.  Raises PlanError."""
    one = Choice()
    parts = {"": file.model(file.folder), "train": _train(file, goal, one, "")}
    return _source(file, parts, {}, file.folder)


def plan(
    file: ModelFile,
    facts: Facts,
    goal: Goal,
    choice: Choice,
    notes: Mapping[str, str] | None = None,
    at: Path | None = None,
) -> Source:
    """The plan that says a choice, with a comment before each section that has a note, as it lies in a folder."""
    parts = {
        "": file.model(at or file.folder),
        "cluster": _cluster(goal, choice, at or file.folder),
        "mesh": "".join(f"  {axis} = {size}" for axis, size in choice.degrees.items()),
        "shard": "".join(f"\n  {rule}" for rule in _rules(facts, choice)),
        "state": _state(choice),
        "pipeline": f"  schedule = {_schedule(choice)}" if choice.pp > 1 else "",
        "train": _train(file, goal, choice, _recomputation(facts, choice)),
    }
    return _source(file, parts, notes or {}, at or file.folder)


def _source(file: ModelFile, parts: Mapping[str, str], notes: Mapping[str, str], at: Path) -> Source:
    text = "\n\n".join(_section(name, body, notes) for name, body in parts.items() if body)
    return Source(str(at / f"{Path(file.source.path).stem}_plan.scale"), f"{text}\n")


def _section(name: str, body: str, notes: Mapping[str, str]) -> str:
    comments = "".join(f"# {line}\n" for line in notes.get(name, "").splitlines())
    if not name:
        return f"{comments}\n{body}" if comments else body
    end = "\n" if "\n" in body else " "
    return f"{comments}{name} {{{body}{end}}}"


def _cluster(goal: Goal, choice: Choice, at: Path) -> str:
    per_node = min(goal.per_node, choice.gpus)
    file = f'  hardware = "{seen(goal.file, at)}"' if goal.file else ""
    return f"  gpu = {goal.hardware.name}  gpus_per_node = {per_node}  nodes = {choice.gpus // per_node}{file}"


def _rules(facts: Facts, choice: Choice) -> Iterator[str]:
    """In order of priority."""
    here = choice.degrees
    if choice.pp > 1:
        yield f"{', '.join(facts.repeats)} over pp"
    if experts := [axis for axis in ("ep", *(("tp",) if choice.fold else ())) if axis in here]:
        yield f"{', '.join(facts.program.choices)} over {', '.join(experts)}"
    if batch := [axis for axis in ("dp", "ep") if axis in here]:
        yield f"batch over {', '.join(batch)}"
    if choice.cp > 1:
        yield f"seq over cp {'' if choice.via == 'ulysses' else 'as zigzag '}via {choice.via}"
    if choice.tp > 1:
        yield f"{', '.join(facts.tensor_dims)} over tp"
        if choice.sp:
            yield "seq over tp"


def _state(choice: Choice) -> str:
    if not choice.data_axes:
        return ""
    prefetch = f"  prefetch = {choice.prefetch}" if choice.prefetch != 1 else ""
    return f"  zero {choice.zero} over {', '.join(choice.data_axes)}{prefetch}"


def _schedule(choice: Choice) -> str:
    return f"{choice.schedule}(chunks={choice.chunks})" if choice.schedule in CHUNKED else choice.schedule


def _train(file: ModelFile, goal: Goal, choice: Choice, again: str) -> str:
    sizes = f"seq = {goal.seq}  global_batch = {goal.global_batch}  microbatch = {choice.microbatch}"
    return "".join(f"\n  {line}" for line in (f"{sizes}{again}", *file.run))


def _recomputation(facts: Facts, choice: Choice) -> str:
    said = {
        NONE: "",
        REGATHER: "gathered = regather",
        SELECTIVE: f"recompute = selective({', '.join(facts.selective)})",
        HALF: f"recompute = every(2, {', '.join(facts.innermost)})",
        FULL: "recompute = full",
    }
    return f"  {said[choice.recompute]}"
