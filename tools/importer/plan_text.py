"""The text of a plan, from the text of one of our models: numbers replaced in place, everything
else unchanged.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, cast

import attrs
from attrs import field, frozen

from ...compiler.analysis.communication import active_count, parameter_count
from ...compiler.frontend import resolve
from ...compiler.syntax import tree
from ...compiler.syntax.package_data import folder
from ...compiler.syntax.parser import parse_plan
from ...compiler.syntax.source import Source, Span
from ..formatter import format_plan
from .config import as_json

RUN = """\
mesh {{ dp = 1  tp = 1 }} # outermost first; the plan is written for any degrees

shard {{ # order is priority
  {experts}batch over dp
  vocab, {heads} over tp
  seq over tp
}}

train {{ # examples: yours to set
  seq = {seq}  global_batch = 8  microbatch = 1  steps = 1000  seed = 0  precision = {precision}
  optimizer adamw {{
    lr = 1e-5  betas = [0.9, 0.95]  eps = 1e-8  weight_decay = 0.1  clip = 1.0
    schedule = cosine(warmup=100, floor=1e-6)
  }}
  data tokens {{ files = ["data/*.bin"]  dtype = {tokens}{masked} }}
}}
"""

MASK_TOKEN = 103
"""Ids in the vocabulary of uncased English that BERT and DistilBERT share (Devlin et al. 2019)."""


@frozen
class Model:
    """One of our models as a configuration has it."""

    file: str
    """In `plans/models`."""
    sizes: Mapping[str, float]
    """Dims and constants."""
    std: float
    """The standard deviation of initial values."""
    seq: int
    """Tokens of a sequence."""
    precision: str
    tied: bool = False
    """Whether the file's `head` is to be its `wte`."""
    masked: bool = False
    """Whether it learns from masked tokens."""
    replaced: Mapping[str, str] = field(factory=dict[str, str])
    """Texts of the file, and what takes their place."""
    without: tuple[str, ...] = ()
    """Repeats that are left out."""


def plan_text(
    kind: str, model: Model, left_out: Mapping[str, float], unread: Mapping[str, object]
) -> str:
    """The plan as text, laid out as all are; it resolves."""
    text = (folder("plans") / "models" / model.file).read_text(encoding="utf-8")
    for old, new in model.replaced.items():
        assert old in text, f"importer: {model.file} lacks {old}"
        text = text.replace(old, new)
    plan = f"{_edit_model(text, model)}\n{_run(model)}"
    program = resolve(Source("plan.scale", plan))
    counts = f"{parameter_count(program):,} parameters"
    if program.choices:
        counts += f", {active_count(program):,} of them active"
    head = f"# A {kind} of {counts}, from its Hugging Face configuration.\n"
    for name, value in left_out.items():
        head += f"# Left out, as a setting of training: {name} = {value}.\n"
    for name, value in unread.items():
        head += (
            f"# Without effect, for transformers does not read it: {as_json(name)} ="
            f" {as_json(value)}.\n"
        )
    return format_plan(Source("plan.scale", f"{head}\n{plan}"))


def _run(model: Model) -> str:
    """The sections after the model: mesh, sharding and training."""
    vocab = int(model.sizes["vocab"])
    dims = [dim for dim in ("heads", "kv_heads", "ffn", "shared_ffn") if dim in model.sizes]
    experts, masked = "", ""
    if "experts" in model.sizes:
        experts = "experts over dp, tp\n  "
    if model.masked:
        masked = f"  masked = 15%  mask_token = {min(MASK_TOKEN, vocab - 1)}"
    return RUN.format(
        experts=experts,
        heads=", ".join(dims),
        seq=model.seq,
        precision=model.precision,
        tokens="uint16" if vocab <= 2**16 else "uint32",
        masked=masked,
    )


class _Edits:
    """Changes of a text, which are made all at once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._starts = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
        self._edits: list[tuple[int, int, str]] = []

    def cut(self, span: Span) -> None:
        """Takes out the lines of a span."""
        self._edits.append((self._starts[span.line - 1], self._starts[span.end_line], ""))

    def replace(self, span: Span, new: str) -> None:
        """Writes other text in the place of a span."""
        start = self._starts[span.line - 1] + span.column - 1
        end = self._starts[span.end_line - 1] + span.end_column - 1
        self._edits.append((start, end, new))

    def text_from(self, span: Span) -> str:
        """The changed text, without what comes before the line of a span."""
        text = self._text
        for start, end, new in sorted(self._edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text[self._starts[span.line - 1] :]


def _edit_model(text: str, model: Model) -> str:
    """A model file's model and names, changed as `model` says, without what the file says
    before them.
    """
    plan = parse_plan(Source("model.scale", text))
    file_model = next(item for item in plan.items if isinstance(item, tree.Model))
    names = next(plan.sections())
    edits = _Edits(text)
    dropped = {"head"} if model.tied else set[str]()
    for item in file_model.body:
        if isinstance(item, tree.Repeat) and item.dim.name in model.without:
            edits.cut(item.span)
            dropped |= {use.name.name for use in _param_uses(item)}
        elif isinstance(item, tree.Section):
            _edit_section(item, model, edits)
        elif isinstance(item, tree.Init) and not item.names:
            edits.replace(item.dist.span, f"normal({number_text(model.std)})")
        elif model.tied:
            _tie_head(item, edits)
    _cut_dropped(file_model, names, dropped, edits)
    return edits.text_from(file_model.span)


def _tie_head(item: object, edits: _Edits) -> None:
    """Uses the embedding in the place of the head."""
    for use in _param_uses(item):
        if use.name.name == "head":
            edits.replace(use.span, "wte")


def _cut_dropped(model: tree.Model, names: tree.Section, dropped: set[str], edits: _Edits) -> None:
    """Takes out the initial values and the names of parameters that are `dropped`."""
    for item in model.body:
        if isinstance(item, tree.Init) and dropped & set(map(str, item.names)):
            edits.cut(item.span)
    for entry in names.entries:
        if isinstance(entry, tree.Setting) and entry.key.name in dropped:
            edits.cut(entry.span)


def _edit_section(section: tree.Section, model: Model, edits: _Edits) -> None:
    """Sets the sizes of a model in its section of dims or constants."""
    for entry in section.entries:
        if not isinstance(entry, tree.Setting):
            continue
        if entry.key.name in model.without:
            edits.cut(entry.span)
        elif entry.key.name in model.sizes:
            edits.replace(entry.value.span, number_text(model.sizes[entry.key.name]))


def _param_uses(node: object) -> Iterator[tree.ParamUse]:
    """The parameters that a part of a model uses, at any depth."""
    for inner in _walk(node):
        if isinstance(inner, tree.ParamUse):
            yield inner


def number_text(number: float) -> str:
    """A number as a plan writes it."""
    return str(int(number)) if number == int(number) else repr(number)


def _walk(node: object) -> Iterator[object]:
    """A node of syntax, or a tuple of such, and all in it."""
    if isinstance(node, tuple):
        for child in cast("tuple[object, ...]", node):
            yield from _walk(child)
    elif attrs.has(cast(Any, type(node))) and not isinstance(node, Span):
        yield node
        for field in attrs.fields(cast(Any, type(node))):
            yield from _walk(getattr(node, field.name))
