"""Writes a program as IR text, which `parser` reads back to an equal program.

Non-goals: plan text (`config.schema.show` and `config.hf_names.show_names` write the sections before the IR).
"""

from collections.abc import Iterable, Iterator, Sequence

from attrs import asdict

from ..config.hf_names import show_names
from ..config.schema import show
from ..config.settings import Flow, Watch
from ..syntax.source import Span
from . import (
    Attr,
    Axis,
    Bucket,
    Buffer,
    Claim,
    Dim,
    Kind,
    Op,
    Param,
    Pipeline,
    Placement,
    Program,
    Region,
    StateAxes,
    Type,
    Value,
)


def print_ir(program: Program) -> str:
    """The program as text."""
    lines = [
        show(program.cluster),
        show(program.train),
        *([show(program.flow)] if program.flow != Flow() else []),
        *([show(program.watch)] if program.watch != Watch() else []),
        *([show(program.pipeline.settings)] if program.pipeline else []),
        *([show_names(program.names)] if program.names else []),
        "",
        f"program {program.name} after {program.after}",
        *map(_axis, program.axes),
        *(f"dim {d.name} = {d.size}{_more(d)} {_location(d.span)}" for d in program.dims),
        *map(_claim, program.claims),
        *map(_param, program.params),
        *map(_buffer, program.buffers),
        *map(_state, program.state),
        *map(_bucket, program.buckets),
        *(f"recomputed {name}" for name in program.recomputed),
        *(_pipeline(program.pipeline) if program.pipeline else ()),
        *_region(program.region, ""),
    ]
    return "\n".join(lines) + "\n"


def _axis(it: Axis) -> str:
    within = f" from {it.within[0]} to {it.within[1]}" if it.within else ""
    return f"axis {it.name} = {it.size} of {it.parent}{within} {_location(it.span)}"


def _claim(it: Claim) -> str:
    return f"claim {it.rank} {it.dim} {'over' if it.split else 'whole'} {it.axis}{how_claimed(it)} {_location(it.span)}"


def how_claimed(it: Claim) -> str:
    """The rest of a claim, for instance ` as zigzag via ring`; "" for most."""
    words = {"as": "zigzag" if it.zigzag else "", "via": it.via, "within": it.within}
    return "".join(f" {word} {said}" for word, said in words.items() if said)


def _more(dim: Dim) -> str:
    words = {
        "of": dim.valid if dim.valid < dim.size else 0,
        "twin": dim.twin,
        "chosen": dim.chosen,
        "padded": dim.padded,
    }
    return "".join(f" {word} {said}" for word, said in words.items() if said)


def _state(state: StateAxes) -> str:
    kinds = [f"{kind} [{_join(axes)}]" for kind, axes in asdict(state).items() if kind != "of" and axes]
    return " ".join(["state", *kinds, "of", _attr(state.of)])


def _bucket(it: Bucket) -> str:
    facts = asdict(it, filter=lambda field, value: bool(value) and field.name not in ("name", "params", "type"))
    words = (name if value is True else f"{name} [{_join(value)}]" for name, value in facts.items())
    return " ".join([f"bucket {it.name}: {print_type(it.type)} of [{_join(it.params)}]", *words])


def _pipeline(it: Pipeline) -> Iterator[str]:
    layers, stage_to_rank = (
        f" layers [{_join(it.layers)}]" if it.layers else "",
        f" stage_to_rank [{_join(it.stage_to_rank)}]" if it.stage_to_rank else "",
    )
    yield f"pipeline {it.axis} of [{_join(it.dims)}]{layers}{stage_to_rank}"
    for name, stages in it.param_stages:
        yield f"held {name} by [{_join(stages)}]"
    for word, schedule in (("given", it.given), ("row", it.schedule)):
        for row in schedule.grouped if schedule else ():
            yield f'{word} "{" ".join(row)}"'


def _param(param: Param) -> str:
    init = f"{param.init.kind}({_join(param.init.args)})"
    dims = f"stacked {param.stacked} inner {param.inner}"
    return f"param {param.name}: {print_type(param.type)} ~ {init} {dims} {_location(param.span)}"


def _buffer(it: Buffer) -> str:
    facts = f"rate {it.rate!r} route {it.route} stacked {it.stacked}"
    return f"buffer {it.name}: {print_type(it.type)} {facts} {_location(it.span)}"


def print_type(type: Type) -> str:
    """For instance `bf16[batch@dp, seq, hidden]{tp: P}`."""
    dims = _join("@".join(filter(None, (dim, "*".join(type.axes_of(dim))))) for dim in type.dims)
    pending = _join(f"{axis}: {place}" for axis, place in type.places if place.kind is not Kind.SHARDED)
    return f"{type.dtype}[{dims}]" + (f"{{{pending}}}" if pending else "")


def print_op(op: Op) -> str:
    """One op on one line."""
    attrs = _join(f"{key}={_attr(value)}" for key, value in op.attrs)
    return (
        f"{_results(op.outputs)}{op.kind}({_join(op.inputs)})"
        + (f" <{attrs}>" if attrs else "")
        + f" {_location(op.span)}"
    )


def _region(region: Region, indent: str) -> Iterator[str]:
    for value in region.results[:-1]:
        yield f"{indent}{_value(value)},"
    results = _results(region.results[-1:])
    head = " ".join(filter(None, (region.kind, region.dim, "reversed" if region.reverse else "")))
    if region.args:
        yield f"{indent}{results}{head} ("
        ends = [","] * (len(region.args) - 1) + [f") {_location(region.span)} {{"]
        for arg, end in zip(region.args, ends, strict=True):
            yield f"{indent}    {_value(arg.value)} = {arg.enter.value} {arg.source}{end}"
    else:
        yield f"{indent}{results}{head} () {_location(region.span)} {{"
    for stmt in region.body:
        if isinstance(stmt, Region):
            yield from _region(stmt, indent + "  ")
        else:
            yield f"{indent}  {print_op(stmt)}"
    if region.yields:
        yield f"{indent}  yield {_join(f'{end.leave.value} {end.name}' for end in region.yields)}"
    yield f"{indent}}}"


def _results(values: Sequence[Value]) -> str:
    return f"{_join(map(_value, values))} = " if values else ""


def _value(value: Value) -> str:
    return f"{value.name}: {print_type(value.type)}"


def _attr(value: Attr) -> str:
    if isinstance(value, tuple):
        return f"[{_join(word if word.isidentifier() else _quoted(word) for word in value)}]"
    return _quoted(value) if isinstance(value, str) else str(value) if isinstance(value, Placement) else repr(value)


def _quoted(word: str) -> str:
    return f'"{word}"'


def _location(span: Span) -> str:
    return f"!{span}"


def _join(parts: Iterable[object]) -> str:
    return ", ".join(map(str, parts))
