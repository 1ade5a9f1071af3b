"""Writes a program as IR text, which `parser` reads back to an equal program.

Non-goals: plan text (`config.schema.show` and `config.hf_names.show_names` write the sections
before the IR).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import asdict

from ..config.hf_names import show_names
from ..config.schema import show
from ..config.settings import Flow, Watch
from .declarations import Bucket, Claim, Dim, Pipeline, StateAxes
from .program import Program
from .regions import Op, Region
from .types import Attr, Kind, Placement, Type, Value


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
        " ".join(("program", program.name, "after", program.after, *program.sees)),
        *(
            f"axis {a.name} = {a.size} of {a.parent}{_range(a.within)} !{a.span}"
            for a in program.axes
        ),
        *(f"dim {d.name} = {d.size}{_more(d)} !{d.span}" for d in program.dims),
        *(
            f"claim {c.rank} {c.dim} {'over' if c.split else 'whole'} {c.axis}{how_claimed(c)}"
            f" !{c.span}"
            for c in program.claims
        ),
        *(
            f"param {p.name}: {print_type(p.type)} ~ {p.init.kind}({_join(p.init.args)})"
            f" stacked {p.stacked} inner {p.inner} !{p.span}"
            for p in program.params
        ),
        *(
            f"buffer {b.name}: {print_type(b.type)} rate {b.rate!r} route {b.route} stacked"
            f" {b.stacked} !{b.span}"
            for b in program.buffers
        ),
        *map(_state, program.state),
        *map(_bucket, program.buckets),
        *(f"recomputed {name}" for name in program.recomputed),
        *(_pipeline(program.pipeline) if program.pipeline else ()),
        *_region(program.region, ""),
    ]
    return "\n".join(lines) + "\n"


def _range(within: tuple[int, int] | None) -> str:
    return f" from {within[0]} to {within[1]}" if within else ""


def how_claimed(it: Claim) -> str:
    """The rest of a claim, for instance ` as zigzag via ring`; "" for most."""
    return _said({"as": "zigzag" if it.zigzag else "", "via": it.via, "within": it.within})


def _more(dim: Dim) -> str:
    valid = dim.valid if dim.valid < dim.size else 0
    return _said({"of": valid, "twin": dim.twin, "chosen": dim.chosen, "padded": dim.padded})


def _said(words: Mapping[str, int | str]) -> str:
    return "".join(f" {word} {said}" for word, said in words.items() if said)


def _state(state: StateAxes) -> str:
    kinds = [
        f"{kind} [{_join(axes)}]" for kind, axes in asdict(state).items() if kind != "of" and axes
    ]
    return " ".join(["state", *kinds, "of", _attr(state.of)])


def _bucket(it: Bucket) -> str:
    facts = asdict(
        it, filter=lambda field, value: bool(value) and field.name not in ("name", "params", "type")
    )
    words = (name if value is True else f"{name} [{_join(value)}]" for name, value in facts.items())
    return " ".join([f"bucket {it.name}: {print_type(it.type)} of [{_join(it.params)}]", *words])


def _pipeline(it: Pipeline) -> Iterator[str]:
    placed = {"layers": it.layers, "stage_to_rank": it.stage_to_rank}
    more = _said({word: f"[{_join(numbers)}]" for word, numbers in placed.items() if numbers})
    yield f"pipeline {it.axis} of [{_join(it.dims)}]{more}"
    for name, stages in it.param_stages:
        yield f"held {name} by [{_join(stages)}]"
    for word, schedule in (("given", it.given), ("row", it.schedule)):
        for row in schedule.grouped if schedule else ():
            yield f'{word} "{" ".join(row)}"'


def print_type(type: Type) -> str:
    """For instance `bf16[batch@dp, seq, hidden]{tp: P}`."""
    dims = _join("@".join(filter(None, (dim, "*".join(type.axes_of(dim))))) for dim in type.dims)
    pending = _join(
        f"{axis}: {place}" for axis, place in type.places if place.kind is not Kind.SHARDED
    )
    return f"{type.dtype}[{dims}]" + (f"{{{pending}}}" if pending else "")


def print_op(op: Op) -> str:
    """One op on one line."""
    attrs = f" <{_join(f'{key}={_attr(value)}' for key, value in op.attrs)}>" if op.attrs else ""
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
        yield f"{indent}  yield {_join(f'{end.leave.value} {end.name}' for end in region.yields)}"
    yield f"{indent}}}"


def _results(values: Sequence[Value]) -> str:
    return f"{_join(map(_value, values))} = " if values else ""


def _value(value: Value) -> str:
    return f"{value.name}: {print_type(value.type)}"


def _attr(value: Attr) -> str:
    if isinstance(value, tuple):
        return f"[{_join(word if word.isidentifier() else _attr(word) for word in value)}]"
    return (
        f'"{value}"'
        if isinstance(value, str)
        else str(value)
        if isinstance(value, Placement)
        else repr(value)
    )


def _join(parts: Iterable[object]) -> str:
    return ", ".join(map(str, parts))
