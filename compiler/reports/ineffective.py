"""Settings without effect in the plan that has them: a row for each, with the condition and the
reason.

A test sets every setting in plans of many kinds: a setting that changes no program has a row here,
or its reason in the test.
"""

from collections.abc import Callable, Iterator
from math import lcm

from attrs import fields_dict, frozen

from ..analysis.expert_loads import loads
from ..analysis.recompute import gathers, recomputes_region
from ..config.fields import Settings
from ..config.settings import PADDED, Data, Flow, Train, Watch
from ..config.units import count_words
from ..ir import DATA_DIMS, Program, walk, walk_regions
from ..syntax.diagnostics import Diagnostic
from ..syntax.source import Span

SAVE_EVERY = 500
"""Steps between saves where a plan does not say how many; at the end a run saves in any case."""


@frozen
class Row:
    """A setting of a section, and why it has no effect in a program; "" where it has one."""

    section: type[Settings]
    key: str
    what: str
    why: Callable[[Program], str]


def without_effect(program: Program) -> Iterator[Diagnostic]:
    """A warning for each setting that a plan has and that has no effect in it."""
    for row in ROWS:
        settings = _settings(program, row.section)
        unset = fields_dict(row.section)[row.key].default
        if getattr(settings, row.key) != unset and (why := row.why(program)):
            span = settings.spans.get(row.key, program.region.span)
            yield _warning(row.key, row.what, why, span)
    yield from _groups(program)
    yield from _sets(program)


def _warning(key: str, what: str, why: str, span: Span, help: str = "leave it out") -> Diagnostic:
    return Diagnostic("W0912", f"`{key}` has no effect: {what}", span, why, help=help)


def _settings(program: Program, section: type[Settings]) -> Settings:
    """The settings of a section."""
    train = program.train
    sections = (program.flow, program.watch, train, train.data)
    return next(settings for settings in sections if type(settings) is section)


# ---- conditions


def _prefetch(program: Program) -> str:
    if program.pipeline:
        return "pipeline stages gather all of theirs at once"
    if any(state.parameters for state in program.state):
        return ""
    return "no rule of `state` shards `parameters`"


def _room(program: Program) -> str:
    if loads(program):
        return ""
    if not program.choices:
        return "the model has no `route`"
    return "rows are padded" if program.train.experts == PADDED else "experts lie over no ranks"


def _experts(program: Program) -> str:
    return "" if program.choices else "the model has no `route`"


def _reduce(program: Program) -> str:
    """Gradients of buckets alone are reduced in this type."""
    if not program.buckets:
        return ""
    if any(bucket.reduce_axes or bucket.shard_axes for bucket in program.buckets):
        return ""
    return "no axis of the mesh splits the batch"


def _gathered_reason(program: Program) -> str:
    for op in walk(program.forward.body):
        if gathers(op) and {*DATA_DIMS} & {*op.outputs[0].type.dims}:
            return ""
    return "no activation is sharded between ops"


def _recompute(program: Program) -> str:
    """`full` is about layers of repeats; names of ops and dims are checked where they are read."""
    if program.train.recompute.word != "full":
        return ""
    for region in walk_regions(program.forward.body):
        if region.kind == "repeat" and recomputes_region(program, region):
            return ""
    return "the model has no `repeat`"


def _copies(program: Program) -> str:
    return "" if any(axis.size > 1 for axis in program.axes) else "the mesh has one rank"


def _save_every(program: Program) -> str:
    train = program.train
    every = train.save_every or SAVE_EVERY
    if min(every, SAVE_EVERY) < train.steps:
        return ""
    return f"the run has {count_words(train.steps, 'step')}"


def _keep_every(program: Program) -> str:
    """The saves after steps that it divides; the last step of a run is saved too."""
    train = program.train
    every, keep_every = train.save_every or SAVE_EVERY, train.keep_every or 1
    if train.steps % keep_every == 0 or lcm(every, keep_every) <= train.steps:
        return ""
    return f"saves are after each {count_words(every, 'step')}, of {train.steps:,}"


def _holdout(program: Program) -> str:
    sets = program.train.data.sets
    if sets and all(data_set.holdout is not None for data_set in sets):
        return "each set has its own"
    return ""


ROWS = (
    Row(Flow, "prefetch", "no layer gathers its parameters", _prefetch),
    Row(Train, "room", "no rank's experts get more rows than another's", _room),
    Row(Train, "experts", "there are no rows to pad", _experts),
    Row(Train, "reduce", "no gradient is reduced over ranks", _reduce),
    Row(Train, "gathered", "no activation is gathered", _gathered_reason),
    Row(Train, "recompute", "there are no layers to recompute", _recompute),
    Row(Train, "save_every", "the run saves at its end alone", _save_every),
    Row(Train, "keep_every", "it divides the step of no save", _keep_every),
    Row(Watch, "copies", "no other rank has a copy", _copies),
    Row(Data, "holdout", "no set has it", _holdout),
)


def _groups(program: Program) -> Iterator[Diagnostic]:
    """Groups of parameters whose settings are the optimizer's own."""
    optimizer = program.train.optimizer
    for group in optimizer.groups:
        if group.lr_scale == 1 and group.weight_decay in (None, optimizer.weight_decay):
            what = "its settings are the optimizer's own"
            help = "set its `weight_decay` or `lr_scale`, or leave it out"
            yield _warning(f"group {group.name}", what, "", group.spans["name"], help=help)


def _sets(program: Program) -> Iterator[Diagnostic]:
    """The weight of the only set."""
    sets = program.train.data.sets
    if len(sets) == 1 and sets[0].weight != 1:
        yield _warning("weight", "there is no other set", "", sets[0].spans["weight"])
