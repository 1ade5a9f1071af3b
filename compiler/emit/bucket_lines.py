"""What a step says of flat buffers that are moved in parts, of turns or of a pipeline's chunks.

Purpose: here their gathers begin, and here stages are told how to reduce what they leave.
Non-goals: what turns do by themselves (`turns`), and buckets that move whole (`step`).
"""

from collections.abc import Callable, Iterator, Sequence

from ..analysis.bucket_comms import Route, routes
from ..analysis.communication import places
from ..analysis.stage_buckets import chunks
from ..ir import Kind, Op, Program
from ..ir.placements import ends
from .loop_hooks import gathered, working
from .naming import DTYPES, call, literal
from .step_parts import Ranks, lined


def runs(program: Program) -> list[list[Route]]:
    """The buckets whose turns or chunks the step gathers, those together that follow each other and turn alike."""
    of, flat_params = (
        routes(program),
        {bucket.dim: bucket.name for bucket in program.buckets if bucket.turns or program.pipeline},
    )
    runs: list[list[Route]] = []
    for op in program.region.body:
        if isinstance(op, Op) and op.kind == "coerce" and ends(op)[0].kind is Kind.SHARDED:
            if not (name := flat_params.get("".join(op.outputs[0].type.dims[-1:]))):
                continue
            last, route = runs[-1][-1] if runs else None, of[name]
            if last and (last.bucket.turns, last.gather) == (route.bucket.turns, route.gather):
                runs[-1].append(route)
            else:
                runs.append([route])
    return runs


def unshard_ahead(program: Program, run: Sequence[Route], axis: str) -> tuple[str, str]:
    """The line that begins to gather buckets over an axis, and its comment."""
    line = call("unshard_ahead", [axis, *map(_flats, run)], 4, after=0)
    if program.pipeline:
        return line, f"S→R  {_largest(program, *run)} × {working(program, *run)}, awaited by each stage"
    turns = " × ".join(f"{program.size(dim)}" for dim in run[0].bucket.turns)
    return line, f"S→R  {turns} × {gathered(program, *run)}, awaited by each turn"


def stage_grad_reduction(program: Program, named: Callable[[Ranks], str]) -> Iterator[str]:
    """How stages reduce the chunks of each bucket, in the order of the IR; groups of ranks are `named`."""
    of = routes(program)
    for route in (of[bucket.name] for bucket in program.buckets):
        over = [(word, change, axes) for word, change, axes in _sums(route) if axes]
        if over:
            groups = [f"{word}={named(Ranks(axes))}" for word, _, axes in over]
            sent = [f"dtype={DTYPES[route.sent]}"] if route.sent != route.bucket.type.dtype else []
            line = call("stage_grad_reduction", [_flats(route), *groups, *sent], 8)
            changes = ", ".join(change for _, change, _ in over)
            yield from lined(f"    {line},", f"{changes}  {_largest(program, route)} × {route.sent}, behind each stage")


def _sums(route: Route) -> list[tuple[str, str, tuple[str, ...]]]:
    return [("scatter", "P→S", route.scatter), ("add", "P→I", route.add)]


def _flats(route: Route) -> str:
    return f"flat_params[{literal(route.bucket.name)}]"


def _largest(program: Program, *of: Route) -> str:
    """The most elements that any rank has of one chunk of each of these buckets."""
    own = [chunk for rank in places(program) for chunk in chunks(program, rank)]
    sizes = [max(chunk.size for chunk in own if chunk.bucket == route.bucket.name) for route in of]
    text = " + ".join(f"{size:,}" for size in sizes)
    return f"up to {f'({text})' if len(of) > 1 else text}"
