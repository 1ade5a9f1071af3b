"""The text of a plan that says a choice, and the file of its model, or of a plan that uses one.

All plans of a model have the parts of the file's text that no choice says.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from os.path import relpath
from pathlib import Path

from attrs import frozen

from ...syntax import tree
from ...syntax.package_data import SHIPPED, folder
from ...syntax.parser import parse_plan
from ...syntax.source import Source, Span
from .choice import CHUNKED, FULL, HALF, NONE, REGATHER, SELECTIVE, Choice
from .facts import Facts, Goal
from .space import is_near

NAMES, TRAIN, WATCH = "names", "train", "watch"

CHOSEN = ("seq", "global_batch", "microbatch", "recompute")
"""Settings of `train` that a choice says."""

RUN = (
    "steps = 100_000  seed = 0  precision = bf16",
    "optimizer adamw { lr = 3e-4  betas = [0.9, 0.95]  eps = 1e-8  weight_decay = 0.1  clip ="
    " 1.0 }",
    'data tokens { files = ["data/*.bin"]  dtype = uint32 }',
)
"""The run of a model that has none."""


@frozen
class ModelFile:
    """A file, whose mesh, rules, state and pipeline are left out; of a model alone, with other
    sizes of some dims.
    """

    source: Source
    dims: tuple[tuple[str, int], ...] = ()

    @property
    def folder(self) -> Path:
        """Its folder."""
        return Path(self.source.path).parent

    @cached_property
    def _syntax(self) -> tree.Plan:
        return parse_plan(self.source)

    @property
    def is_model(self) -> bool:
        """Whether it has a model and its names alone, so that a plan can use it."""
        return all(isinstance(item, tree.Model) or _is_names(item) for item in self._syntax.items)

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """The dims of a model alone, which have other sizes where `dims` says so."""
        models = (
            item for item in self._syntax.items if self.is_model and isinstance(item, tree.Model)
        )
        sections = (
            it
            for model in models
            for it in model.body
            if isinstance(it, tree.Section) and it.kind.name == "dims"
        )
        return tuple(
            it.key.name
            for section in sections
            for it in section.entries
            if isinstance(it, tree.Setting)
        )

    def model(self, folder: Path) -> str:
        """The file used, or its own model and what it uses, with paths as seen from `folder`.

        Raises PlanError.
        """
        if self.is_model:
            sizes = "  ".join(f"{dim} = {size}" for dim, size in self.dims)
            over = f" {{ dims {{ {sizes} }} }}" if sizes else ""
            return f'use "{seen(Path(self.source.path), folder)}"{over}'
        return "\n\n".join(self._items(folder))

    def _items(self, folder: Path) -> Iterator[str]:
        for item in self._syntax.items:
            if isinstance(item, tree.Use):
                written = item.path.value
                path = (
                    written if written.startswith(SHIPPED) else seen(self.folder / written, folder)
                )
                yield _words(item.span).replace(f'"{written}"', f'"{path}"', 1)
            elif not isinstance(item, tree.Section) or item.kind.name in (NAMES, WATCH):
                yield _words(item.span)

    @cached_property
    def run(self) -> tuple[str, ...]:
        """The lines of `train` but for what a choice says."""
        section = self._section(TRAIN)
        if section is None:
            return RUN
        settings = (
            it
            for it in section.entries
            if isinstance(it, tree.Setting) and it.key.name not in CHOSEN
        )
        inner = (_words(it.span) for it in section.entries if isinstance(it, tree.Section))
        return "  ".join(_words(it.span) for it in settings), *inner

    def said(self, name: str) -> int | None:
        """A whole number that its `train` sets."""
        section = self._section(TRAIN)
        settings = (it for it in section.entries if isinstance(it, tree.Setting)) if section else ()
        values = (it.value for it in settings if it.key.name == name)
        return next((int(value.value) for value in values if isinstance(value, tree.Number)), None)

    def _section(self, kind: str) -> tree.Section | None:
        return next((it for it in self._syntax.sections() if it.kind.name == kind), None)


def _is_names(item: object) -> bool:
    return isinstance(item, tree.Section) and item.kind.name == NAMES


def seen(path: Path, start: Path) -> str:
    """A path as seen from a folder; that of a shipped file as plans name it."""
    plans = folder("plans").resolve()
    if path.resolve().is_relative_to(plans):
        return f"{SHIPPED}{path.resolve().relative_to(plans).as_posix()}"
    return Path(relpath(path.resolve(), start.resolve())).as_posix()


def _words(span: Span) -> str:
    """The text that a span covers, of all of its lines."""
    lines = span.text.split("\n")[span.line - 1 : span.end_line]
    lines[-1] = lines[-1][: span.end_column - 1]
    lines[0] = lines[0][span.column - 1 :]
    return "\n".join(lines)


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
    """The plan that says a choice, with a comment before each section that has a note, as it
    lies in a folder.
    """
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


def _source(
    file: ModelFile, parts: Mapping[str, str], notes: Mapping[str, str], at: Path
) -> Source:
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
    far = "" if is_near(goal, choice) else "  weights_across_nodes = on"
    return (
        f"  gpu = {goal.hardware.name}  gpus_per_node = {per_node}  nodes ="
        f" {choice.gpus // per_node}{file}{far}"
    )


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
    return (
        f"{choice.schedule}(chunks={choice.chunks})"
        if choice.schedule in CHUNKED
        else choice.schedule
    )


def _train(file: ModelFile, goal: Goal, choice: Choice, again: str) -> str:
    sizes = (
        f"seq = {goal.seq}  global_batch = {goal.global_batch}  microbatch = {choice.microbatch}"
    )
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
