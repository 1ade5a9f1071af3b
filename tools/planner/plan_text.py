"""The plan for a choice, as text and as a variant; the file of its model, or of a plan that uses a
model.

All plans of a model have the parts of the file's text that no choice sets.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from os.path import relpath
from pathlib import Path

from attrs import frozen

from ...compiler.frontend import resolve
from ...compiler.syntax import tree
from ...compiler.syntax.package_data import SHIPPED, folder
from ...compiler.syntax.parser import parse_plan
from ...compiler.syntax.source import Source, Span
from ...compiler.tuning.lowering import make_variant
from ...compiler.tuning.variant import Variant
from .choice import CHUNKED, FULL, HALF, NONE, REGATHER, SELECTIVE, Choice
from .facts import Facts, Goal
from .space import is_near

NAMES, TRAIN, WATCH = "names", "train", "watch"

CHOSEN = ("seq", "global_batch", "microbatch", "recompute")
"""Settings of `train` that a choice sets."""

RUN = (
    "steps = 100_000  seed = 0  precision = bf16",
    "optimizer adamw { lr = 3e-4  betas = [0.9, 0.95]  eps = 1e-8  weight_decay = 0.1  clip ="
    " 1.0 }",
    'data tokens { files = ["data/*.bin"]  dtype = uint32 }',
)
"""The lines of `train` for a file without them."""


@frozen
class ModelFile:
    """A file; its mesh, rules, state and pipeline are left out.

    dims  other sizes of some dims, where the file has a model alone
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
        """The dims of a model alone: `dims` may give other sizes for them."""
        if not self.is_model:
            return ()
        dims = list[str]()
        for model in self._syntax.items:
            for section in model.body if isinstance(model, tree.Model) else ():
                if isinstance(section, tree.Section) and section.kind.name == "dims":
                    dims += [setting.key.name for setting in _settings(section)]
        return tuple(dims)

    def model(self, folder: Path) -> str:
        """A `use` of the file, or its own model and its `use`s, with paths as seen from `folder`.

        Raises PlanError.
        """
        if self.is_model:
            sizes = "  ".join(f"{dim} = {size}" for dim, size in self.dims)
            over = f" {{ dims {{ {sizes} }} }}" if sizes else ""
            return f'use "{get_path_from(Path(self.source.path), folder)}"{over}'
        return "\n\n".join(self._items(folder))

    def _items(self, folder: Path) -> Iterator[str]:
        for item in self._syntax.items:
            if isinstance(item, tree.Use):
                name = item.path.value
                path = (
                    name if name.startswith(SHIPPED) else get_path_from(self.folder / name, folder)
                )
                yield _words(item.span).replace(f'"{name}"', f'"{path}"', 1)
            elif not isinstance(item, tree.Section) or item.kind.name in (NAMES, WATCH):
                yield _words(item.span)

    @cached_property
    def run(self) -> tuple[str, ...]:
        """The lines of `train` that no choice sets."""
        section = self._section(TRAIN)
        if section is None:
            return RUN
        settings, inner = list[str](), list[str]()
        for entry in section.entries:
            if isinstance(entry, tree.Section):
                inner.append(_words(entry.span))
            elif isinstance(entry, tree.Setting) and entry.key.name not in CHOSEN:
                settings.append(_words(entry.span))
        return "  ".join(settings), *inner

    def find_train_number(self, name: str) -> int | None:
        """A whole number that its `train` sets."""
        section = self._section(TRAIN)
        for setting in _settings(section) if section else ():
            if setting.key.name == name and isinstance(setting.value, tree.Number):
                return int(setting.value.value)
        return None

    def _section(self, kind: str) -> tree.Section | None:
        for section in self._syntax.sections():
            if section.kind.name == kind:
                return section
        return None


def _is_names(item: object) -> bool:
    return isinstance(item, tree.Section) and item.kind.name == NAMES


def _settings(section: tree.Section) -> Iterator[tree.Setting]:
    for entry in section.entries:
        if isinstance(entry, tree.Setting):
            yield entry


def get_path_from(path: Path, start: Path) -> str:
    """A path as seen from a folder; the path of a shipped file is as plans name it."""
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
    folder: Path | None = None,
) -> Source:
    """The plan for a choice, as it lies in a folder, with a comment before each section that has
    a note.
    """
    folder = folder or file.folder
    parts = {
        "": file.model(folder),
        "cluster": _cluster(goal, choice, folder),
        "mesh": "".join(f"  {axis} = {size}" for axis, size in choice.degrees.items()),
        "shard": "".join(f"\n  {rule}" for rule in _rules(facts, choice)),
        "state": _state(choice),
        "pipeline": f"  schedule = {_schedule(choice)}" if choice.pp > 1 else "",
        "train": _train(file, goal, choice, _recomputation(facts, choice)),
    }
    return _source(file, parts, notes or {}, folder)


def make_plan_variant(file: ModelFile, facts: Facts, goal: Goal, choice: Choice) -> Variant:
    """The plan for a choice, not lowered yet.  Raises PlanError."""
    return make_variant(resolve(plan(file, facts, goal, choice)))


def _source(
    file: ModelFile, parts: Mapping[str, str], notes: Mapping[str, str], folder: Path
) -> Source:
    text = "\n\n".join(_section(name, body, notes) for name, body in parts.items() if body)
    return Source(str(folder / f"{Path(file.source.path).stem}_plan.scale"), f"{text}\n")


def _section(name: str, body: str, notes: Mapping[str, str]) -> str:
    comments = "".join(f"# {line}\n" for line in notes.get(name, "").splitlines())
    if not name:
        return f"{comments}\n{body}" if comments else body
    end = "\n" if "\n" in body else " "
    return f"{comments}{name} {{{body}{end}}}"


def _cluster(goal: Goal, choice: Choice, folder: Path) -> str:
    per_node = min(goal.per_node, choice.gpus)
    text = f"  gpu = {goal.hardware.name}  gpus_per_node = {per_node}"
    text += f"  nodes = {choice.gpus // per_node}"
    if goal.file:
        text += f'  hardware = "{get_path_from(goal.file, folder)}"'
    if not is_near(goal, choice):
        text += "  weights_across_nodes = on"
    return text


def _rules(facts: Facts, choice: Choice) -> Iterator[str]:
    """The rules of `shard`, in order of priority."""
    degrees = choice.degrees
    if choice.pp > 1:
        yield f"{', '.join(facts.repeats)} over pp"
    expert_axes = [
        axis for axis in ("ep", "tp") if axis in degrees and (axis == "ep" or choice.fold)
    ]
    if expert_axes:
        yield f"{', '.join(facts.program.choices)} over {', '.join(expert_axes)}"
    batch_axes = [axis for axis in ("dp", "ep") if axis in degrees]
    if batch_axes:
        yield f"batch over {', '.join(batch_axes)}"
    if choice.cp > 1:
        layout = "" if choice.via == "ulysses" else "as zigzag "
        yield f"seq over cp {layout}via {choice.via}"
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
    if choice.schedule in CHUNKED:
        return f"{choice.schedule}(chunks={choice.chunks})"
    return choice.schedule


def _train(file: ModelFile, goal: Goal, choice: Choice, recomputation: str) -> str:
    sizes = (
        f"seq = {goal.seq}  global_batch = {goal.global_batch}  microbatch = {choice.microbatch}"
    )
    return "".join(f"\n  {line}" for line in (f"{sizes}{recomputation}", *file.run))


def _recomputation(facts: Facts, choice: Choice) -> str:
    settings = {
        NONE: "",
        REGATHER: "gathered = regather",
        SELECTIVE: f"recompute = selective({', '.join(facts.selective)})",
        HALF: f"recompute = every(2, {', '.join(facts.innermost)})",
        FULL: "recompute = full",
    }
    return f"  {settings[choice.recompute]}"
