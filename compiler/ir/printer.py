"""Writes a program as IR text, which `parser` reads back to an equal program.

Non-goals: plan text (`config.schema.show` and `config.hf_names.show_names` write the sections
before the IR).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import asdict

from ..config.hf_names import show_names
from ..config.schema import print_section
from ..config.settings import Flow, Watch
from .declarations import STATES, Bucket, Buffer, Claim, Dim, Param, Pipeline, StateAxes
from .program import Program
from .regions import Op, Region
from .types import Attr, Kind, Placement, Type, Value


def print_ir(program: Program) -> str:
    """The program as text."""
    lines = [
        *_settings(program),
        "",
        " ".join(("program", program.name, "after", program.after, *program.sees)),
        *_declarations(program),
        *_region(program.region, ""),
    ]
    return "\n".join(lines) + "\n"


def _settings(program: Program) -> Iterator[str]:
    """The sections of a plan that a program keeps; sections that say nothing are left out."""
    yield print_section(program.cluster)
    yield print_section(program.train)
    if program.flow != Flow():
        yield print_section(program.flow)
    if program.watch != Watch():
        yield print_section(program.watch)
    if program.pipeline:
        yield print_section(program.pipeline.settings)
    if program.names:
        yield show_names(program.names)


def _declarations(program: Program) -> Iterator[str]:
    """A line for each entry of a program's fields."""
    for axis in program.axes:
        yield f"axis {axis.name} = {axis.size} of {axis.parent}{_range(axis.within)} !{axis.span}"
    for dim in program.dims:
        yield f"dim {dim.name} = {dim.size}{_more(dim)} !{dim.span}"
    yield from map(_claim, program.claims)
    yield from map(_param, program.params)
    yield from map(_buffer, program.buffers)
    yield from map(_state, program.state)
    yield from map(_bucket, program.buckets)
    for name in program.recomputed:
        yield f"recomputed {name}"
    if program.pipeline:
        yield from _pipeline(program.pipeline)


def _range(within: tuple[int, int] | None) -> str:
    if not within:
        return ""
    least, most = within
    return f" from {least} to {most}"


def _claim(claim: Claim) -> str:
    word = "over" if claim.split else "whole"
    words = f"claim {claim.rank} {claim.dim} {word} {claim.axis}{how_claimed(claim)}"
    return f"{words} !{claim.span}"


def how_claimed(claim: Claim) -> str:
    """The last words of a claim, for instance ` as zigzag via ring`; "" for most."""
    layout = "zigzag" if claim.zigzag else ""
    return _words({"as": layout, "via": claim.via, "within": claim.within})


def _param(param: Param) -> str:
    init = f"{param.init.kind}({_join(param.init.args)})"
    counts = f"stacked {param.stacked} inner {param.inner}"
    return f"param {param.name}: {print_type(param.type)} ~ {init} {counts} !{param.span}"


def _buffer(buffer: Buffer) -> str:
    numbers = f"rate {buffer.rate!r} route {buffer.route} stacked {buffer.stacked}"
    return f"buffer {buffer.name}: {print_type(buffer.type)} {numbers} !{buffer.span}"


def _more(dim: Dim) -> str:
    valid = dim.valid if dim.valid < dim.size else 0
    return _words({"of": valid, "twin": dim.twin, "chosen": dim.chosen, "padded": dim.padded})


def _words(values_by_word: Mapping[str, int | str]) -> str:
    """Words with their values; words without a value are left out."""
    return "".join(f" {word} {value}" for word, value in values_by_word.items() if value)


def _state(state: StateAxes) -> str:
    words = ["state"]
    for kind in STATES:
        if axes := getattr(state, kind):
            words.append(f"{kind} [{_join(axes)}]")
    return " ".join([*words, "of", _attr(state.param_patterns)])


def _bucket(bucket: Bucket) -> str:
    words = [f"bucket {bucket.name}: {print_type(bucket.type)} of [{_join(bucket.params)}]"]
    for name, value in asdict(bucket).items():
        if name in ("name", "params", "type") or not value:
            continue
        if value is True:
            words.append(name)
        else:
            words.append(f"{name} [{_join(value)}]")
    return " ".join(words)


def _pipeline(pipeline: Pipeline) -> Iterator[str]:
    more = dict[str, str]()
    if pipeline.layers:
        more["layers"] = f"[{_join(pipeline.layers)}]"
    if pipeline.stage_to_rank:
        more["stage_to_rank"] = f"[{_join(pipeline.stage_to_rank)}]"
    yield f"pipeline {pipeline.axis} of [{_join(pipeline.dims)}]{_words(more)}"
    for name, stages in pipeline.param_stages:
        yield f"held {name} by [{_join(stages)}]"
    for word, schedule in (("given", pipeline.rows), ("row", pipeline.schedule)):
        if not schedule:
            continue
        for row in schedule.words_with_groups:
            yield f'{word} "{" ".join(row)}"'


def print_type(type: Type) -> str:
    """For instance `bf16[batch@dp, seq, hidden]{tp: P}`."""
    dims = _join("@".join(filter(None, (dim, "*".join(type.axes_of(dim))))) for dim in type.dims)
    others = list[str]()
    for axis, place in type.places:
        if place.kind is not Kind.SHARDED:
            others.append(f"{axis}: {place}")
    text = f"{type.dtype}[{dims}]"
    if others:
        text += f"{{{_join(others)}}}"
    return text


def print_op(op: Op) -> str:
    """One op on one line."""
    attrs = ""
    if op.attrs:
        pairs = _join(f"{key}={_attr(value)}" for key, value in op.attrs)
        attrs = f" <{pairs}>"
    return f"{_results(op.outputs)}{op.kind}({_join(op.inputs)}){attrs} !{op.span}"


def _region(region: Region, indent: str) -> Iterator[str]:
    for value in region.results[:-1]:
        yield f"{indent}{_value(value)},"
    results = _results(region.results[-1:])
    head = " ".join(filter(None, (region.kind, region.dim, "reversed" if region.reverse else "")))
    args = (
        f"\n{indent}    {_value(arg.value)} = {arg.enter.value} {arg.source}" for arg in region.args
    )
    yield f"{indent}{results}{head} ({','.join(args)}) !{region.span} {{"
    for stmt in region.body:
        if isinstance(stmt, Region):
            yield from _region(stmt, indent + "  ")
        else:
            yield f"{indent}  {print_op(stmt)}"
    if region.yields:
        ends = _join(f"{end.leave.value} {end.name}" for end in region.yields)
        yield f"{indent}  yield {ends}"
    yield f"{indent}}}"


def _results(values: Sequence[Value]) -> str:
    if not values:
        return ""
    return f"{_join(map(_value, values))} = "


def _value(value: Value) -> str:
    return f"{value.name}: {print_type(value.type)}"


def _attr(value: Attr) -> str:
    if isinstance(value, tuple):
        words = _join(word if word.isidentifier() else _attr(word) for word in value)
        return f"[{words}]"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Placement):
        return str(value)
    return repr(value)


def _join(parts: Iterable[object]) -> str:
    return ", ".join(map(str, parts))
