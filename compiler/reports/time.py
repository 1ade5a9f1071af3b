"""The report of `scalec explain time`: what a step takes, on what, and how much of the GPU's peak it is.

Non-goals: the times themselves (`analysis.time`).
"""

from collections.abc import Iterator, Sequence
from math import prod

from ..analysis.communication import active_count
from ..analysis.flops import cost
from ..analysis.param_uses import leaves
from ..analysis.time.hardware import Hardware
from ..analysis.time.step import StepTime
from ..ir import MICROBATCHES, PRECISIONS, Op, Program, Region, Stmt, walk
from ..ops import OPS, roles
from ..ops.embedding import EMBEDDING
from ..ops.saved_tensors import Local
from .summary import headline, ranks

LINES = 3
"""How many lines of the plan are named for each kind of time."""

LEAST = 0.0005
"""The least share of a step that a row has."""


def time(program: Program, on: Hardware, it: StepTime) -> str:
    """The time of a step of a program after the last pass, for people."""
    per_gpu = program.train.global_batch * program.train.seq / ranks(program) / it.seconds
    peak = on.peak[PRECISIONS[program.train.precision]] * it.seconds
    model, done = _model(program) / ranks(program), _done(program)
    source = f"on {ranks(program):,} × {on.name}, by data sheets: expect 15 to 20%"
    summary = (
        f"{_seconds(it.seconds)} a step, {per_gpu:,.0f} tokens/s/GPU, MFU {model / peak:.1%}, HFU {done / peak:.1%}"
    )
    rows = [("", "seconds", "share", "at"), *_rows(it)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (f"{kind:{widths[0]}}  {s:>{widths[1]}}  {part:>{widths[2]}}  {at}".rstrip() for kind, s, part, at in rows)
    return "\n\n".join((f"{headline(program)}\n{source}", summary, "\n".join(lines), MFU))


MFU = (
    "MFU: 6 operations for each token and parameter but the embedding's, and attention's of the pairs that are seen;\n"
    "HFU: all operations that are done, backward's recomputation too."
)


def _rows(it: StepTime) -> Iterator[tuple[str, str, str, str]]:
    """Kinds of time, the longest first, each with the plan's lines that take most; shorter ones add up."""
    rest = 0.0
    for kind, seconds in sorted(it.kinds.items(), key=lambda pair: -pair[1]):
        if seconds < LEAST * it.seconds:
            rest += seconds
            continue
        lines = sorted(((s, line) for (of, line), s in it.spent.items() if of == kind), reverse=True)
        most = [f"{line} {_seconds(s)}" for s, line in lines[:LINES] if s >= LEAST * it.seconds]
        yield kind, _seconds(seconds), f"{seconds / it.seconds:.0%}", ", ".join(most) if len(lines) > 1 else ""
    if rest:
        yield "other", _seconds(rest), f"{rest / it.seconds:.0%}", ""


def _seconds(time: float) -> str:
    return f"{time:.2f} s" if time >= 1 else f"{time * 1e3:.1f} ms" if time >= 1e-3 else f"{time * 1e6:.0f} µs"


def _model(program: Program) -> int:
    """The operations that a model needs for a step, on all ranks together."""
    of, uses = leaves(program), list[tuple[str, str]]()
    for op in walk(program.forward.body):
        uses += [(of[name], op.kind) for name in op.inputs if name in of]
    looked_up = {name for name, kind in uses if kind == EMBEDDING.name}
    looked_up -= {name for name, kind in uses if kind != EMBEDDING.name}
    tables = sum(prod(map(program.valid, program.param(name).type.dims)) for name in looked_up)
    tokens = program.train.global_batch * program.train.seq
    return 6 * tokens * (active_count(program) - tables) + 3 * _attention(program, program.forward.body)


def _attention(program: Program, body: Sequence[Stmt]) -> int:
    """Forward's operations of all microbatches, on all ranks together."""

    def of(stmts: Sequence[Stmt]) -> int:
        inner = (of(it.body) * program.size(it.dim) if isinstance(it, Region) else each(it) for it in stmts)
        return sum(inner)

    def each(op: Op) -> int:
        return cost(program, [op]).forward if roles(op, program.types).key_seq else 0

    return of(body) * program.size(MICROBATCHES)


def _done(program: Program) -> int:
    """The operations of a step that a rank does, on average over a pipeline's."""
    stages = program.axis(program.pipeline.axis).size if program.pipeline else 1
    return _of(program, program.region.body) // stages


def _of(program: Program, body: Sequence[Stmt]) -> int:
    inner = (
        _of(program, stmt.body) * (program.size(stmt.dim) if stmt.dim else 1)
        if isinstance(stmt, Region)
        else OPS[stmt.kind].work(Local(program, stmt, program.operands(stmt))).operations
        for stmt in body
    )
    return sum(inner)
