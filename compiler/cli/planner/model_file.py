"""The file of a model, or of a plan that uses one: what of its text all plans of the model have."""

from collections.abc import Iterator
from functools import cached_property
from os.path import relpath
from pathlib import Path

from attrs import frozen

from ...frontend.load_plan import SHIPPED
from ...syntax import tree
from ...syntax.package_data import folder
from ...syntax.parser import parse_plan
from ...syntax.source import Source, Span

NAMES, TRAIN, WATCH = "names", "train", "watch"

CHOSEN = ("seq", "global_batch", "microbatch", "recompute")
"""Settings of `train` that a choice says."""

RUN = (
    "steps = 100_000  seed = 0  precision = bf16",
    "optimizer adamw { lr = 3e-4  betas = [0.9, 0.95]  eps = 1e-8  weight_decay = 0.1  clip = 1.0 }",
    'data tokens { files = ["data/*.bin"]  dtype = uint32 }',
)
"""The run of a model that has none."""


@frozen
class ModelFile:
    """A file, whose mesh, rules, state and pipeline are left out; of a model alone, with other sizes of some dims."""

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
        models = (item for item in self._syntax.items if self.is_model and isinstance(item, tree.Model))
        sections = (
            it for model in models for it in model.body if isinstance(it, tree.Section) and it.kind.name == "dims"
        )
        return tuple(it.key.name for section in sections for it in section.entries if isinstance(it, tree.Setting))

    def model(self, folder: Path) -> str:
        """The file used, or its own model and what it uses, with paths as seen from `folder`.  Raises PlanError."""
        if self.is_model:
            sizes = "  ".join(f"{dim} = {size}" for dim, size in self.dims)
            over = f" {{ dims {{ {sizes} }} }}" if sizes else ""
            return f'use "{seen(Path(self.source.path), folder)}"{over}'
        return "\n\n".join(self._items(folder))

    def _items(self, folder: Path) -> Iterator[str]:
        for item in self._syntax.items:
            if isinstance(item, tree.Use):
                written = item.path.value
                path = written if written.startswith(SHIPPED) else seen(self.folder / written, folder)
                yield _words(item.span).replace(f'"{written}"', f'"{path}"', 1)
            elif not isinstance(item, tree.Section) or item.kind.name in (NAMES, WATCH):
                yield _words(item.span)

    @cached_property
    def run(self) -> tuple[str, ...]:
        """The lines of `train` but for what a choice says."""
        section = self._section(TRAIN)
        if section is None:
            return RUN
        settings = (it for it in section.entries if isinstance(it, tree.Setting) and it.key.name not in CHOSEN)
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
