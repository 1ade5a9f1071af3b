"""The text for the name under the cursor: its meaning, and what becomes of it on the ranks, as Markdown."""

from collections.abc import Iterator, Sequence
from inspect import cleandoc
from math import prod

from attrs import frozen

from ...analysis.collective import Collective
from ...analysis.time.op_rows import OpRow
from ...config.fields import Field, Part, Settings, fields_of
from ...config.units import amount, counted
from ...frontend.calls import signature
from ...ir import ITEM_BYTES, Op, Program, Region, Type, Value, base, results
from ...ir.printer import print_type
from ...ops import OPS, OpDef
from ...reports.time import seconds
from ...syntax.diagnostics import listing
from ...syntax.source import Span
from .document import Document, Facts
from .mentions import Kind, Mention

Lines = Iterator[str]


@frozen
class Hover:
    """The text for a name, and where that is."""

    span: Span
    text: str


def hover(document: Document, line: int, column: int) -> Hover | None:
    """The text for a place of a document; None where there is nothing to say."""
    if not (mention := document.mention(line, column)):
        return None
    text = "\n\n".join(filter(None, _said(document, mention)))
    span = document.here(mention.span)
    return Hover(span, text) if text and span else None


def _said(document: Document, it: Mention) -> Lines:
    facts = document.facts
    match it.kind:
        case Kind.VALUE | Kind.PARAM if facts:
            yield from _of_param(facts, it.name) if it.kind is Kind.PARAM else _of_value(document, facts, it)
        case Kind.DIM if program := facts.program if facts else document.model:
            yield from _dim(program, it.name)
        case Kind.AXIS if facts:
            yield from _axis(facts, it.name)
        case Kind.OP | Kind.WORD if entry := op_named(it.name):
            yield f"```\n{signature(entry)}\n```"
            yield entry.doc
        case Kind.SETTING if isinstance(it.of, type):
            yield from setting(it.of, it.name)
        case Kind.SECTION if isinstance(it.of, type):
            yield cleandoc(it.of.__doc__ or "")
        case _:
            yield ""


def op_named(name: str) -> OpDef | None:
    """The op that a plan calls by this name."""
    return next((entry for entry in OPS.values() if entry.user_visible and entry.plan_name == name), None)


def setting(of: type[Settings], key: str) -> Lines:
    """A setting: its kind of value, its meaning."""
    field = next((field for field in fields_of(of) if field.key == key), None)
    if field:
        yield f"`{key}`: {takes(field)}"
        yield field.doc


def takes(field: Field) -> str:
    """The kind of value that a setting takes, and which sections have it."""
    of = f", of `{field.variant}`" if field.variant else ""
    return (f"`{field.what.example}`" if isinstance(field.what, Part) else field.what.takes) + of


# ---- values


def _of_value(document: Document, facts: Facts, it: Mention) -> Lines:
    at = document.of_facts(it.span)
    value = at and value_at(facts.placed.region, it.name, at, it.binds)
    if not value:
        return
    yield f"```\n{it.name}: {print_type(value.type)}\n```"
    yield _on_a_rank(facts.placed, value.type)
    kept = [each for each in facts.memory.kept if each.what == value.name]
    if kept:
        layers = f", {amount(kept[0].bytes)} of each layer" * (kept[0].layers > 1)
        yield f"kept for backward: {amount(sum(each.total for each in kept))} of a microbatch{layers}"
    if maker := facts.makers.get(value.name):
        yield from _seconds(facts, maker)
        yield "\n".join(f"- {sent(each)}" for each in facts.sent if each.line == str(maker.span))


def value_at(region: Region, name: str, at: Span, binds: bool) -> Value | None:
    """The value that a name has at a place, or is given there."""
    place = (at.line, at.column)
    found = [it for it in _bound(region) if base(it[0].name) == name and it[1].path == at.path]
    after = [value for value, span, _ in found if binds and (span.line, span.column) >= place]
    before = (value for value, _, since in reversed(found) if since <= place)
    return after[0] if after else next(before, None)


def _bound(region: Region) -> Iterator[tuple[Value, Span, tuple[int, int]]]:
    """Each value, the place of what makes it, and from where on its name means it."""
    for arg in region.args:
        yield arg.value, region.span, (region.span.line, region.span.column)
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
    return f"on a rank: {shown} of {of.dtype}, {size}; {', '.join(places) or 'the same on all ranks'}"


def _seconds(facts: Facts, maker: Op) -> Lines:
    """The time of an op, and of all that its line does in backward."""
    if not facts.step:
        return
    own = [row for row in facts.rows if row.where == "forward" and row.name == maker.outputs[0].name]
    backward = [row for row in facts.rows if (row.where, row.line) == ("backward", str(maker.span))]
    took = f"`{maker.kind}` takes {_summed(own)} of the {seconds(facts.step.seconds)} of a step"
    yield f"{took}, backward of {maker.span} {_summed(backward)}"


def _summed(rows: Sequence[OpRow]) -> str:
    return seconds(sum(sum(row.taken.values()) for row in rows))


def sent(it: Collective) -> str:
    """For instance `all_gather` over tp, 32.0 MiB × 126, forward."""
    times = f" × {it.count:,}" if it.count > 1 else ""
    return f"`{it.op}` over {' × '.join(it.axes)}, {amount(it.bytes)}{times}, {it.where}"


# ---- parameters, dims, axes


def _of_param(facts: Facts, name: str) -> Lines:
    program = facts.program
    param = next((param for param in program.stored if param.name == name), None)
    if not param:
        return
    yield f"```\n{name}: {print_type(param.type)}\n```"
    yield f"{counted(prod(map(program.valid, param.type.dims)), 'element')}; {_on_a_rank(program, param.type)}"
    bucket = next((bucket for bucket in program.buckets if name in bucket.params), None)
    if bucket:
        bytes = next((each for each in facts.memory.buckets if each.name == bucket.name), None)
        held = f": {amount(bytes.total)} of state on a rank" if bytes else ""
        shared = f", shared out over {' × '.join(bucket.shard_axes)}" if bucket.shard_axes else ""
        yield f"in bucket `{bucket.name}` with {counted(len(bucket.params) - 1, 'other')}{held}{shared}"
        yield "\n".join(f"- {sent(each)}" for each in facts.sent if each.bucket == bucket.name)


def _dim(program: Program, name: str) -> Lines:
    dim = next((dim for dim in program.dims if dim.name == name), None)
    if not dim:
        return
    padded = f", {dim.size - dim.valid:,} of them padding" if dim.valid < dim.size else ""
    yield f"`{name}` = {dim.size:,}{padded}"
    axes = list(dict.fromkeys(claim.axis for claim in program.claims if claim.dim == name and claim.split))
    if axes:
        sizes = " × ".join(f"`{axis}` = {program.axis(axis).size:,}" for axis in axes)
        yield f"sharded over {sizes}"


def _axis(facts: Facts, name: str) -> Lines:
    program = facts.program
    axes = [axis for axis in program.axes if axis.parent == name]
    yield " × ".join(f"`{axis.name}` = {axis.size:,}" for axis in axes)
    dims = dict.fromkeys(claim.dim for claim in program.claims if claim.axis in {axis.name for axis in axes})
    if dims:
        yield f"shards {listing(dims)}"
    over = [each for each in facts.sent if {axis.name for axis in axes} & {*each.axes}]
    into = sum(each.bytes * each.count for each in over)
    yield f"{counted(sum(each.count for each in over), 'collective')} of a step, into which a rank puts {amount(into)}"
