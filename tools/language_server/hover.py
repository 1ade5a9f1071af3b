"""The text for the name under the cursor, as Markdown: its meaning, its memory, time and messages
on the ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from inspect import cleandoc
from math import prod

import attrs
from attrs import frozen

from ...compiler.analysis.collective import Collective
from ...compiler.analysis.memory import capacity
from ...compiler.analysis.time.op_rows import OpRow
from ...compiler.analysis.time.prices import EXPOSED
from ...compiler.config.fields import Field, Part, Settings, fields_of
from ...compiler.config.units import amount, count_words
from ...compiler.frontend.arguments import signature
from ...compiler.frontend.route_call import CALL
from ...compiler.ir import (
    DATA_DIMS,
    ITEM_BYTES,
    Bucket,
    Op,
    Param,
    Program,
    Region,
    Type,
    Value,
    base,
    results,
)
from ...compiler.ir.printer import print_type
from ...compiler.ops import OPS, OpDef
from ...compiler.reports.summary import headline, tokens
from ...compiler.reports.time import seconds
from ...compiler.syntax import tree
from ...compiler.syntax.diagnostics import listing
from ...compiler.syntax.source import Span
from .document import Document, Facts
from .mentions import Kind, Mention
from .moved import offset
from .sent import find_collectives
from .words import MEANINGS, WORDS

Lines = Iterator[str]


@frozen
class Hover:
    """The text for a name, and the place of the name."""

    span: Span
    text: str


def hover(document: Document, line: int, column: int) -> Hover | None:
    """The text for a place of a document; None where there is nothing to say."""
    mention = document.mention(line, column)
    if not mention:
        return _keyword(document, line, column)
    text = "\n\n".join(filter(None, _hover_lines(document, mention)))
    span = document.to_current_span(mention.span)
    return Hover(span, text) if text and span else None


def _keyword(document: Document, line: int, column: int) -> Hover | None:
    """The text for a word of the language that names nothing."""
    source = document.source
    index = offset(source.text, line, column)
    for word in WORDS.finditer(source.text):
        if word.start() <= index <= word.end() and word[0] in MEANINGS:
            return Hover(source.span(*word.span()), MEANINGS[word[0]])
    return None


def _hover_lines(document: Document, mention: Mention) -> Lines:
    match mention.kind:
        case Kind.VALUE | Kind.PARAM if document.facts or document.model:
            yield from _tensor(document, mention)
        case Kind.CONST if value := constant(document, mention.name):
            yield f"`{mention.name} = {value}`"
        case Kind.DIM if document.facts:
            yield from _dim(document.facts.program, mention.name)
        case Kind.DIM if document.model:
            # A model alone says nothing of its data: their sizes are those of the stand-in.
            if mention.name not in DATA_DIMS or not document.is_model:
                yield from _dim(document.model, mention.name)
        case Kind.AXIS if document.facts:
            yield from _axis(document.facts, mention.name)
        case Kind.OP | Kind.WORD if entry := find_op(mention.name):
            yield f"```\n{signature(entry)}\n```"
            if document.facts:
                yield from _call_lines(document, document.facts, mention, entry)
            yield entry.doc
        case Kind.MODEL | Kind.FILE if document.facts:
            yield from _plan_lines(document.facts)
        case _:
            yield from _by_syntax(document, mention)


def _tensor(document: Document, mention: Mention) -> Lines:
    """A value or a parameter."""
    facts = document.facts
    if not facts:
        if document.model:
            yield from _unplaced_lines(document, document.model, mention)
    elif mention.kind is Kind.VALUE:
        yield from _value_lines(document, facts, mention)
    else:
        for param in _params(document, facts.program, mention.name):
            yield from _param_lines(facts, param)


def _by_syntax(document: Document, mention: Mention) -> Lines:
    """A name that needs no program."""
    owner = mention.owner
    match mention.kind:
        case Kind.ARGUMENT | Kind.WORD if isinstance(owner, str) and (entry := find_op(owner)):
            yield f"```\n{signature(entry)}\n```"
            yield entry.doc
        case Kind.OP if declaration := _declaration(document, mention.name):
            yield f"```\n{declaration}\n```"
        case Kind.SETTING if isinstance(owner, type):
            yield from setting(owner, mention.name)
        case Kind.SECTION | Kind.WORD if isinstance(owner, type) and owner is not Settings:
            yield cleandoc(owner.__doc__ or "")
        case _:
            yield MEANINGS.get(mention.name, "")


def find_op(name: str) -> OpDef | None:
    """The op that a plan calls by this name."""
    for entry in OPS.values():
        if entry.user_visible and entry.plan_name == name:
            return entry
    return CALL if CALL.plan_name == name else None


def _declaration(document: Document, name: str) -> str:
    """The line of the plan that declares an op of its own; "" where none does."""
    for mention in document.mentions:
        if mention.binds and (mention.kind, mention.name) == (Kind.OP, name):
            return mention.span.text.split("\n")[mention.span.line - 1].strip()
    return ""


def constant(document: Document, name: str) -> str:
    """The words of a constant's value; "" where the plan has none.

    A value that a plan gives a constant of a file it uses comes before the file's own.
    """
    for section in _constants(document):
        for entry in section.entries:
            if isinstance(entry, tree.Setting) and entry.key.name == name:
                return entry.value.span.words
    return ""


def _constants(document: Document) -> Iterator[tree.Section]:
    """The sections `const`: first the ones in `use`, which override the ones in models."""
    plans = document.plans
    for field in ("sections", "body"):
        for plan in plans:
            for item in plan.items:
                for part in getattr(item, field, ()):
                    if isinstance(part, tree.Section) and part.kind.name == "const":
                        yield part


def _plan_lines(facts: Facts) -> Lines:
    """The plan as a whole: its size, its memory, its time."""
    yield f"{headline(facts.program)}, {tokens(facts.program)}"
    room = capacity(facts.program)
    gpu = f"; its GPU has {amount(room)}" if room else ""
    yield f"a rank needs {amount(facts.memory.needs)}{gpu}"
    if facts.step:
        yield f"a step takes {seconds(facts.step.seconds)}"


def setting(settings: type[Settings], key: str) -> Lines:
    """A setting of a class: its kind of value, its meaning, its default."""
    for field in fields_of(settings):
        if field.key == key:
            break
    else:
        return
    yield f"`{key}`: {takes(field)}"
    yield field.doc
    default = attrs.fields_dict(settings)[field.name].default
    if not isinstance(field.what, Part) and default not in (attrs.NOTHING, None, ""):
        yield f"by default `{field.what.show(default)}`"


def takes(field: Field) -> str:
    """The kind of value that a setting takes, and which sections have it."""
    value = f"`{field.what.example}`" if isinstance(field.what, Part) else field.what.takes
    if field.variants:
        sections = " and ".join(f"`{heading}`" for heading in field.variants)
        return f"{value}, of {sections}"
    return f"{value}, after `every`" if field.every else value


# ---- values


def _value_lines(document: Document, facts: Facts, mention: Mention) -> Lines:
    name, binds = mention.name, mention.binds
    span = document.to_facts_span(mention.span)
    if not span:
        return
    placed = value_at(facts.placed.region, name, span, binds)
    value = placed or value_at(facts.model.region, name, span, binds)
    if not value:
        return
    yield f"```\n{name}: {print_type(value.type)}\n```"
    if placed:
        yield from _placed_value_lines(facts, placed)
    else:
        yield "no rank holds it by itself: it is part of a larger op"


def _unplaced_lines(document: Document, model: Program, mention: Mention) -> Lines:
    """The dims of a name where no step is known."""
    param = next(_params(document, model, mention.name), None)
    named = param or value_at(model.region, mention.name, mention.span, mention.binds)
    if named:
        yield f"```\n{mention.name}: [{', '.join(named.type.dims)}]\n```"


def _call_lines(document: Document, facts: Facts, mention: Mention, entry: OpDef) -> Lines:
    """The result of a call, which may have no name."""
    span = document.to_facts_span(mention.span)
    place = span and (entry.name, span.path, span.start)
    for op in facts.placed.ops:
        if (op.kind, op.span.path, op.span.start) == place:
            yield f"gives `{print_type(op.outputs[0].type)}`"
            yield from _placed_value_lines(facts, op.outputs[0])
            return


def _placed_value_lines(facts: Facts, value: Value) -> Lines:
    """All that is known of a value with a placement."""
    yield _on_a_rank(facts.placed, value.type)
    saved = [tensor for tensor in facts.memory.kept if tensor.what == value.name]
    if saved:
        total = amount(sum(tensor.total for tensor in saved))
        layers = f", {amount(saved[0].bytes)} of each layer" if saved[0].layers > 1 else ""
        yield f"kept for backward: {total} of a microbatch{layers}"
    maker = facts.makers.get(value.name)
    if maker:
        line = str(maker.span)
        yield from _seconds(facts, maker)
        yield _collective_lines(facts, lambda collective: collective.line == line)


def value_at(region: Region, name: str, place: Span, binds: bool) -> Value | None:
    """The value that a name has at a place; where it `binds`, the value that it gets there."""
    bound = [
        (value, span, since)
        for value, span, since in _bound(region)
        if base(value.name) == name and span.path == place.path
    ]
    if binds:
        for value, span, _ in bound:
            if span.start >= place.start:
                return value
    for value, _, since in reversed(bound):
        if since <= place.start:
            return value
    return None


def _bound(region: Region) -> Iterator[tuple[Value, Span, tuple[int, int]]]:
    """Each value, the place of its statement, and the place from where its name means it."""
    for arg in region.args:
        yield arg.value, region.span, region.span.start
    for stmt in region.body:
        if isinstance(stmt, Region):
            yield from _bound(stmt)
        for value in results(stmt):
            yield value, stmt.span, (stmt.span.end_line, stmt.span.end_column)


def _on_a_rank(program: Program, type: Type) -> str:
    shape = program.local_shape(type)
    size = amount(int(prod(shape)) * ITEM_BYTES[type.dtype])
    places = ", ".join(f"{place} over `{axis}`" for axis, place in type.places)
    lengths = " × ".join(f"{int(length):,}" for length in shape) or "a number"
    return f"on a rank: {lengths} of {type.dtype}, {size}; {places or 'the same on all ranks'}"


def _seconds(facts: Facts, maker: Op) -> Lines:
    """The time of an op, and of all that its line does in backward."""
    name, line = maker.outputs[0].name, str(maker.span)
    forward = [row for row in facts.rows if row.where == "forward" and row.name == name]
    backward = [row for row in facts.rows if row.where == "backward" and row.line == line]
    if facts.step and forward:
        step = seconds(facts.step.seconds)
        yield (
            f"`{maker.kind}` takes {_total_time(forward)} of the {step} of a step,"
            f" backward of {maker.span} {_total_time(backward)}"
        )


def _total_time(rows: Sequence[OpRow]) -> str:
    return seconds(sum(sum(row.all_seconds.values()) for row in rows))


def _collective_lines(facts: Facts, wanted: Callable[[Collective], bool]) -> str:
    """A list, for instance of `all_gather` over tp, 32.0 MiB × 126, forward, 37.4 ms."""
    seconds_by_name = {row.name: sum(row.sends.values()) for row in facts.rows}
    lines = list[str]()
    for alike in find_collectives(facts.collectives_by_rank, wanted):
        line = f"- `{alike.op}` over {' × '.join(alike.axes)}, {alike}, {alike.where}"
        if alike.values <= seconds_by_name.keys():
            time = sum(seconds_by_name[name] for name in alike.values)
            if time:
                line += f", {seconds(time)}"
        lines.append(line)
    return "\n".join(lines)


# ---- parameters, dims, axes


def _params(document: Document, program: Program, name: str) -> Iterator[Param]:
    """A parameter; where branches of a repeat have one each, all of them."""
    place = None
    for mention in document.mentions:
        if mention.binds and (mention.kind, mention.name) == (Kind.PARAM, name):
            place = document.to_facts_span(mention.span)
            break
    for param in program.params_and_buffers:
        is_there = place and (param.span.path, param.span.start) == (place.path, place.start)
        if param.name == name or is_there:
            yield param


def _param_lines(facts: Facts, param: Param) -> Lines:
    program, name = facts.program, param.name
    elements = count_words(prod(map(program.valid, param.type.dims)), "element")
    yield f"```\n{name}: {print_type(param.type)}\n```"
    yield f"{elements}; {_on_a_rank(program, param.type)}"
    for bucket in program.buckets:
        if name in bucket.params:
            yield from _bucket(facts, bucket)
            return


def _bucket(facts: Facts, bucket: Bucket) -> Lines:
    """The bucket of a parameter: its state on a rank, its collectives."""
    state, shared = "", ""
    for bytes in facts.memory.buckets:
        if bytes.name == bucket.name:
            state = f": {amount(bytes.total)} of state on a rank"
            break
    if bucket.shard_axes:
        shared = f", shared out over {' × '.join(bucket.shard_axes)}"
    others = count_words(len(bucket.params) - 1, "other")
    yield f"in bucket `{bucket.name}` with {others}{state}{shared}"
    yield _collective_lines(facts, lambda collective: collective.bucket == bucket.name)


def _dim(program: Program, name: str) -> Lines:
    dim = next((dim for dim in program.dims if dim.name == name), None)
    if not dim:
        return
    padding = f", {dim.size - dim.valid:,} of them padding" if dim.valid < dim.size else ""
    yield f"`{name}` = {dim.size:,}{padding}"
    claims = [claim for claim in program.claims if claim.dim == name and claim.split]
    axes = dict.fromkeys(claim.axis for claim in claims)
    if axes:
        sizes = " × ".join(f"`{axis}` = {program.axis(axis).size:,}" for axis in axes)
        yield f"sharded over {sizes}"


def _axis(facts: Facts, name: str) -> Lines:
    program = facts.program
    axes = [axis for axis in program.axes if axis.parent == name]
    names = {axis.name for axis in axes}
    yield " × ".join(f"`{axis.name}` = {axis.size:,}" for axis in axes)
    dims = dict.fromkeys(claim.dim for claim in program.claims if claim.axis in names)
    if dims:
        yield f"shards {listing(dims)}"
    collectives = find_collectives(
        facts.collectives_by_rank, lambda collective: not names.isdisjoint(collective.axes)
    )
    count = sum(alike.count for alike in collectives)
    bytes = amount(sum(alike.bytes for alike in collectives))
    yield f"{count_words(count, 'collective')} of a step, into which a rank puts {bytes}"
    if facts.step:
        sends = [time for among, time in facts.step.sent.items() if not names.isdisjoint(among)]
        waits = list[float]()
        for kind, time in facts.step.kinds.items():
            if not names.isdisjoint(kind.removeprefix(EXPOSED).split(" × ")):
                waits.append(time)
        yield f"they take {seconds(sum(sends))}; for {seconds(sum(waits))} the GPU waits"
