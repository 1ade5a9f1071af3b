"""The text for the name under the cursor: its meaning, and what becomes of it on the ranks, as
Markdown.
"""

from collections.abc import Callable, Iterator, Sequence
from inspect import cleandoc
from itertools import islice
from math import prod

import attrs
from attrs import frozen

from ...analysis.collective import Collective
from ...analysis.memory import capacity
from ...analysis.time.op_rows import OpRow
from ...analysis.time.prices import EXPOSED
from ...config.fields import Field, Part, Settings, fields_of
from ...config.units import amount, counted
from ...frontend.calls import signature
from ...frontend.routes import CALL
from ...ir import DATA_DIMS, ITEM_BYTES, Op, Param, Program, Region, Type, Value, base, results
from ...ir.printer import print_type
from ...ops import OPS, OpDef
from ...reports.summary import headline, tokens
from ...reports.time import seconds
from ...syntax import tree
from ...syntax.diagnostics import listing
from ...syntax.source import Span
from .document import Document, Facts
from .mentions import Kind, Mention
from .moved import offset
from .sent import sent
from .words import MEANINGS, WORDS

Lines = Iterator[str]


@frozen
class Hover:
    """The text for a name, and where that is."""

    span: Span
    text: str


def hover(document: Document, line: int, column: int) -> Hover | None:
    """The text for a place of a document; None where there is nothing to say."""
    if not (mention := document.mention(line, column)):
        return _keyword(document, line, column)
    text = "\n\n".join(filter(None, _said(document, mention)))
    span = document.here(mention.span)
    return Hover(span, text) if text and span else None


def _keyword(document: Document, line: int, column: int) -> Hover | None:
    """The text for a word of the language that names nothing."""
    source = document.source
    at = offset(source.text, line, column)
    around = next(
        (
            it
            for it in WORDS.finditer(source.text)
            if it.start() <= at <= it.end() and it[0] in MEANINGS
        ),
        None,
    )
    return Hover(source.span(*around.span()), MEANINGS[around[0]]) if around else None


def _said(document: Document, it: Mention) -> Lines:
    facts = document.facts
    match it.kind:
        case Kind.VALUE if facts:
            yield from _of_value(document, facts, it)
        case Kind.PARAM if facts:
            for param in _params(document, facts.program, it.name):
                yield from _of_param(facts, param)
        case Kind.VALUE | Kind.PARAM if document.model:
            yield from _unplaced(document, document.model, it)
        case Kind.CONST if value := constant(document, it.name):
            yield f"`{it.name} = {value}`"
        case Kind.DIM if program := facts.program if facts else document.model:
            yield from (
                _dim(program, it.name)
                if facts or it.name not in DATA_DIMS or not document.is_model
                else ()
            )
        case Kind.AXIS if facts:
            yield from _axis(facts, it.name)
        case Kind.OP | Kind.WORD if entry := op_named(it.name):
            yield f"```\n{signature(entry)}\n```"
            yield from _of_call(document, facts, it, entry) if facts else ()
            yield entry.doc
        case Kind.ARGUMENT | Kind.WORD if isinstance(it.of, str) and (entry := op_named(it.of)):
            yield f"```\n{signature(entry)}\n```"
            yield entry.doc
        case Kind.OP if own := _declaration(document, it.name):
            yield f"```\n{own}\n```"
        case Kind.SETTING if isinstance(it.of, type):
            yield from setting(it.of, it.name)
        case Kind.SECTION | Kind.WORD if isinstance(it.of, type) and it.of is not Settings:
            yield cleandoc(it.of.__doc__ or "")
        case Kind.MODEL | Kind.FILE if facts:
            yield from _whole(facts)
        case _:
            yield MEANINGS.get(it.name, "")


def op_named(name: str) -> OpDef | None:
    """The op that a plan calls by this name."""
    visible = (entry for entry in (*OPS.values(), CALL) if entry.user_visible or entry is CALL)
    return next((entry for entry in visible if entry.plan_name == name), None)


def _declaration(document: Document, name: str) -> str:
    """The line of the plan that declares an op of its own; "" where none does."""
    found = document.syntax.mentions if document.syntax else ()
    spans = (it.span for it in found if it.binds and (it.kind, it.name) == (Kind.OP, name))
    return next((span.text.split("\n")[span.line - 1].strip() for span in spans), "")


def constant(document: Document, name: str) -> str:
    """The words of a constant's value, first those with which a file is used; "" where none is
    given.
    """
    items = [
        item for plan in (document.syntax.plans if document.syntax else ()) for item in plan.items
    ]
    parts = (
        part
        for field in ("sections", "body")
        for item in items
        for part in getattr(item, field, ())
    )
    sections = (
        part for part in parts if isinstance(part, tree.Section) and part.kind.name == "const"
    )
    entries = (
        entry
        for section in sections
        for entry in section.entries
        if isinstance(entry, tree.Setting)
    )
    return next((entry.value.span.words for entry in entries if entry.key.name == name), "")


def _whole(facts: Facts) -> Lines:
    """The plan as a whole: its size, its memory, its time."""
    yield f"{headline(facts.program)}, {tokens(facts.program)}"
    has = f"; its GPU has {amount(room)}" if (room := capacity(facts.program)) else ""
    yield f"a rank needs {amount(facts.memory.needs)}{has}"
    yield f"a step takes {seconds(facts.step.seconds)}" if facts.step else ""


def setting(of: type[Settings], key: str) -> Lines:
    """A setting: its kind of value, its meaning."""
    field = next((field for field in fields_of(of) if field.key == key), None)
    if field:
        yield f"`{key}`: {takes(field)}"
        yield field.doc
        default = attrs.fields_dict(of)[field.name].default
        if not isinstance(field.what, Part) and default not in (attrs.NOTHING, None, ""):
            yield f"by default `{field.what.show(default)}`"


def takes(field: Field) -> str:
    """The kind of value that a setting takes, and which sections have it."""
    of = f", of `{field.variant}`" if field.variant else ", after `every`" if field.every else ""
    return (f"`{field.what.example}`" if isinstance(field.what, Part) else field.what.takes) + of


# ---- values


def _of_value(document: Document, facts: Facts, it: Mention) -> Lines:
    if not (at := document.of_facts(it.span)):
        return
    placed = value_at(facts.placed.region, it.name, at, it.binds)
    if value := placed or value_at(facts.model.region, it.name, at, it.binds):
        yield f"```\n{it.name}: {print_type(value.type)}\n```"
        yield from (
            _made(facts, placed)
            if placed
            else ("no rank holds it by itself: it is part of a larger op",)
        )


def _unplaced(document: Document, model: Program, it: Mention) -> Lines:
    """The dims of a name where no step is known."""
    of = next((param.type for param in _params(document, model, it.name)), None)
    value = None if of else value_at(model.region, it.name, it.span, it.binds)
    if type := value.type if value else of:
        yield f"```\n{it.name}: [{', '.join(type.dims)}]\n```"


def _of_call(document: Document, facts: Facts, it: Mention, entry: OpDef) -> Lines:
    """The result of a call, which may have no name."""
    at = document.of_facts(it.span)
    place = at and (entry.name, at.path, at.start)
    ops = (op for op in facts.placed.ops if (op.kind, op.span.path, op.span.start) == place)
    for op in islice(ops, 1):
        yield f"gives `{print_type(op.outputs[0].type)}`"
        yield from _made(facts, op.outputs[0])


def _made(facts: Facts, value: Value) -> Lines:
    """All that is known of a value with a placement."""
    yield _on_a_rank(facts.placed, value.type)
    kept = [each for each in facts.memory.kept if each.what == value.name]
    if kept:
        layers = f", {amount(kept[0].bytes)} of each layer" * (kept[0].layers > 1)
        yield (
            f"kept for backward: {amount(sum(each.total for each in kept))} of a microbatch{layers}"
        )
    if maker := facts.makers.get(value.name):
        yield from _seconds(facts, maker)
        yield _sent(facts, lambda it: it.line == str(maker.span))


def value_at(region: Region, name: str, at: Span, binds: bool) -> Value | None:
    """The value that a name has at a place, or is given there."""
    found = [it for it in _bound(region) if base(it[0].name) == name and it[1].path == at.path]
    after = [value for value, span, _ in found if binds and span.start >= at.start]
    before = (value for value, _, since in reversed(found) if since <= at.start)
    return after[0] if after else next(before, None)


def _bound(region: Region) -> Iterator[tuple[Value, Span, tuple[int, int]]]:
    """Each value, the place of what makes it, and from where on its name means it."""
    for arg in region.args:
        yield arg.value, region.span, region.span.start
    for stmt in region.body:
        if isinstance(stmt, Region):
            yield from _bound(stmt)
        for value in results(stmt):
            yield value, stmt.span, (stmt.span.end_line, stmt.span.end_column)


def _on_a_rank(program: Program, of: Type) -> str:
    shape = program.local_shape(of)
    size = amount(int(prod(shape)) * ITEM_BYTES[of.dtype])
    places = [f"{place} over `{axis}`" for axis, place in of.places]
    shown = " × ".join(f"{int(each):,}" for each in shape) or "a number"
    return (
        f"on a rank: {shown} of {of.dtype}, {size}; {', '.join(places) or 'the same on all ranks'}"
    )


def _seconds(facts: Facts, maker: Op) -> Lines:
    """The time of an op, and of all that its line does in backward."""
    own = [
        row for row in facts.rows if row.where == "forward" and row.name == maker.outputs[0].name
    ]
    backward = [row for row in facts.rows if (row.where, row.line) == ("backward", str(maker.span))]
    if facts.step and own:
        took = f"`{maker.kind}` takes {_summed(own)} of the {seconds(facts.step.seconds)} of a step"
        yield f"{took}, backward of {maker.span} {_summed(backward)}"


def _summed(rows: Sequence[OpRow]) -> str:
    return seconds(sum(sum(row.taken.values()) for row in rows))


def _sent(facts: Facts, wanted: Callable[[Collective], bool]) -> str:
    """A list, for instance of `all_gather` over tp, 32.0 MiB × 126, forward, 37.4 ms."""
    took = {row.name: sum(row.sends.values()) for row in facts.rows}
    found = [
        (it, sum(took.get(name, 0) for name in it.values) * (it.values <= took.keys()))
        for it in sent(facts.sent, wanted)
    ]
    lines = (
        f"- `{it.op}` over {' × '.join(it.axes)}, {it}, {it.where}" + f", {seconds(t)}" * bool(t)
        for it, t in found
    )
    return "\n".join(lines)


# ---- parameters, dims, axes


def _params(document: Document, program: Program, name: str) -> Iterator[Param]:
    """A parameter; where branches of a repeat have one each, all of them."""
    found = document.syntax.mentions if document.syntax else ()
    bound = next(
        (it.span for it in found if it.binds and (it.kind, it.name) == (Kind.PARAM, name)), None
    )
    place = document.of_facts(bound) if bound else None
    for param in program.stored:
        if param.name == name or (
            place and (param.span.path, param.span.start) == (place.path, place.start)
        ):
            yield param


def _of_param(facts: Facts, param: Param) -> Lines:
    program, name = facts.program, param.name
    yield f"```\n{name}: {print_type(param.type)}\n```"
    yield (
        f"{counted(prod(map(program.valid, param.type.dims)), 'element')};"
        f" {_on_a_rank(program, param.type)}"
    )
    bucket = next((bucket for bucket in program.buckets if name in bucket.params), None)
    if bucket:
        bytes = next((each for each in facts.memory.buckets if each.name == bucket.name), None)
        held = f": {amount(bytes.total)} of state on a rank" if bytes else ""
        shared = f", shared out over {' × '.join(bucket.shard_axes)}" if bucket.shard_axes else ""
        yield (
            f"in bucket `{bucket.name}` with"
            f" {counted(len(bucket.params) - 1, 'other')}{held}{shared}"
        )
        yield _sent(facts, lambda it: it.bucket == bucket.name)


def _dim(program: Program, name: str) -> Lines:
    dim = next((dim for dim in program.dims if dim.name == name), None)
    if not dim:
        return
    padded = f", {dim.size - dim.valid:,} of them padding" if dim.valid < dim.size else ""
    yield f"`{name}` = {dim.size:,}{padded}"
    axes = list(
        dict.fromkeys(claim.axis for claim in program.claims if claim.dim == name and claim.split)
    )
    if axes:
        sizes = " × ".join(f"`{axis}` = {program.axis(axis).size:,}" for axis in axes)
        yield f"sharded over {sizes}"


def _axis(facts: Facts, name: str) -> Lines:
    program = facts.program
    axes = [axis for axis in program.axes if axis.parent == name]
    yield " × ".join(f"`{axis.name}` = {axis.size:,}" for axis in axes)
    dims = dict.fromkeys(
        claim.dim for claim in program.claims if claim.axis in {axis.name for axis in axes}
    )
    if dims:
        yield f"shards {listing(dims)}"
    over = sent(facts.sent, lambda it: not {axis.name for axis in axes}.isdisjoint(it.axes))
    count, into = sum(it.count for it in over), amount(sum(it.bytes for it in over))
    yield f"{counted(count, 'collective')} of a step, into which a rank puts {into}"
    if facts.step:
        own = {axis.name for axis in axes}
        took = sum(time for among, time in facts.step.sent.items() if own & {*among})
        waits = facts.step.kinds.items()
        waited = sum(
            time for kind, time in waits if own & {*kind.removeprefix(EXPOSED).split(" × ")}
        )
        yield f"they take {seconds(took)}; for {seconds(waited)} the GPU waits"
