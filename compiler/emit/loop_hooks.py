"""The lines around a turn of a repeat that move its flat buffers: gathers before, frees after, reductions in backward.

Purpose: one line per bucket and movement.  Autograd runs what they do in backward from the last line to the first, so
that it comes in the order of the IR: gathers again, the turn's own backward, reductions.
Non-goals: what the step does with buckets (`step`).
"""

from collections.abc import Mapping
from math import prod

from attrs import frozen

from ..analysis.bucket_comms import Route, routes
from ..ir import Bucket, Op, Program, Stmt, walk
from .line_writer import Lines
from .naming import DTYPES, call, singular

Line = tuple[str, str]
"""Code, and its comment."""


@frozen
class Around:
    """The lines before the call of a turn's module, and those after it."""

    before: tuple[Line, ...] = ()
    after: tuple[Line, ...] = ()


def is_flat(program: Program, stmt: Stmt) -> bool:
    """Whether a statement of a forward body is one that these lines stand for."""
    if not isinstance(stmt, Op):
        return False
    flat_params = {bucket.dim for bucket in program.buckets}
    return stmt.kind == "unpack" or bool(flat_params & {*stmt.outputs[0].type.dims})


def loop_name(bucket: Bucket, depth: int, alone: bool) -> str:
    """What a loop inside `depth` others calls a turn's buffer, or those of the turns inside; `own` if it is `alone`."""
    rest = bucket.name.removeprefix("_".join([*bucket.turns, ""]))
    if inside := bucket.turns[depth + 1 :]:
        return "_".join([*inside, rest])
    return "own" if alone else f"{singular(bucket.turns[depth])}_{rest}"


def around(program: Program, own: Mapping[Bucket, str], x: str, lines: Lines) -> Around:
    """The lines for the buffers `own` of a turn, by their names; `x` is what they pass on."""
    last = [bucket for bucket in reversed(program.buckets) if bucket in own]  # autograd runs the last line first
    of = routes(program)
    reductions = (_reduction(program, of[b.name], own[b], x, lines) for b in last)
    gathers = (_gather(program, of[b.name], own[b], x, lines) for b in last if of[b.name].gather)
    freed = (_freed(of[b.name], own[b], x, lines) for b in own if of[b.name].reshard_after_forward)
    return Around((*reductions, *gathers), tuple(freed))


def _reduction(program: Program, route: Route, own: str, x: str, lines: Lines) -> Line:
    over = {"scatter": route.scatter, "add": route.add}
    arguments = [x, own, *(f"{word}={lines.axis(axes)}" for word, axes in over.items() if axes)]
    if route.shard_gradients:
        arguments.append("each=True")
    if route.sent != route.bucket.type.dtype:
        arguments.append(f"dtype={DTYPES[route.sent]}")
    change = ", ".join([*(["P→S"] if route.scatter else []), *(["P→I"] if route.add else [])])
    size = f"{_elements(program, route.bucket):,} × {route.sent}"
    when = "" if route.shard_gradients else ", in the last microbatch"
    return _line(x, "reduce_grads_in_backward", arguments, lines), f"bwd: {change}  {size}{when}"


def _gather(program: Program, route: Route, own: str, x: str, lines: Lines) -> Line:
    if not route.reshard_after_forward:
        return _line(x, "wait_for_unshard", [x, own], lines), "S→R is complete"
    arguments = [x, own, lines.axis(route.gather)]
    return _line(x, "unshard", arguments, lines), f"S→R  {gathered(program, route)}  bwd: freed"


def _freed(route: Route, own: str, x: str, lines: Lines) -> Line:
    return _line(x, "reshard", [x, own, lines.axis(route.gather)], lines), "freed  bwd: S→R again"


def _line(x: str, function: str, arguments: list[str], lines: Lines) -> str:
    return call(f"{x} = {function}", arguments, lines.indent(deeper=1), after=0)


def _elements(program: Program, bucket: Bucket) -> int:
    """What this rank holds of one turn's gradient of record."""
    return program.elements(bucket.type) // prod(map(program.size, bucket.turns))


def gathered(program: Program, *of: Route) -> str:
    """The sizes of gathered buffers of a turn, all of one element type."""
    sizes = " + ".join(f"{_elements(program, route.bucket) * program.degree(route.gather):,}" for route in of)
    return f"{f'({sizes})' if len(of) > 1 else sizes} × {working(program, *of)}"


def working(program: Program, *of: Route) -> str:
    """The element type of buckets' parameters as the model uses them, which is one."""
    names = {route.bucket.name for route in of}
    unpacks = (op for op in walk(program.region.body) if op.kind == "unpack" and op.get("bucket") in names)
    (dtype,) = {value.type.dtype for op in unpacks for value in op.outputs}
    return dtype
