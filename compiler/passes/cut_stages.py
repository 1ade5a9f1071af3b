"""Cuts the repeats of a pipeline into stages: how many turns each has, on which rank, and what crosses the cuts.

Purpose: stages as equally dear as turns allow, or those of the plan; what a later stage needs of an earlier one is
carried through all repeats between, so that a cut is crossed by what its repeat carries and by nothing else.
Before: `validate`.  Non-goals: when a stage works (`schedule_pipeline`).
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from attrs import evolve

from ..cost import flops
from ..diagnostics import Diagnostic, PlanError
from ..ir import FLOATS, Arg, Enter, Leave, Names, Op, Pipeline, Program, Region, Stmt, Value, Yield, types, uses
from ..schedules.generate import SCHEDULES
from ..schedules.impossible import Impossible
from ..stages import groups, stages


def cut_stages(program: Program) -> Program:
    """The program with its pipeline's stages.  Raises PlanError."""
    if not program.pipeline:
        return program
    order = program.pipeline.settings.schedule
    try:
        homes = SCHEDULES[order.kind].homes(program.axis(program.pipeline.axis).size, order.chunks)
    except Impossible as error:
        raise _impossible(error, program.pipeline) from None
    program = evolve(program, region=_carried(program, program.pipeline))
    pipeline = evolve(program.pipeline, homes=homes, turns=_turns(program, len(homes)))
    return evolve(program, pipeline=evolve(pipeline, held=_held(program, pipeline)))


def _impossible(error: Impossible, pipeline: Pipeline) -> PlanError:
    span = pipeline.settings.spans["schedule"]
    return PlanError([Diagnostic("E0517", error.why, span, "this schedule cannot be", help=error.help)])


# ---- how many turns each stage has


def _turns(program: Program, count: int) -> tuple[int, ...]:
    pipeline = program.pipeline
    assert pipeline, "cut_stages: no pipeline"
    bodies, repeats = groups(pipeline, program.region.body)
    sizes = [program.size(repeat.dim) for repeat in repeats]
    if pipeline.settings.stages is not None:
        return _given(pipeline, pipeline.settings.stages, count, sum(sizes))
    if sum(sizes) < count - 2:
        span = pipeline.settings.spans["schedule"]
        why = f"{sum(sizes)} turns cannot fill {count} stages"
        help = f"between the first and the last one each stage has a turn: at most {sum(sizes) + 2} stages"
        raise PlanError([Diagnostic("E0517", why, span, help=help)])
    costs = [_cost(program, repeat.body) for repeat, size in zip(repeats, sizes, strict=True) for _ in range(size)]
    for end, body in zip(accumulate(sizes[:-1]), bodies[1:-1], strict=True):
        costs[end - 1] += _cost(program, body)
    return balanced(costs, _cost(program, bodies[0]), _cost(program, bodies[-1]), count)


def _given(pipeline: Pipeline, turns: tuple[int, ...], count: int, total: int) -> tuple[int, ...]:
    """What the plan says, if it can be."""
    span = pipeline.settings.spans["stages"]
    if len(turns) != count:
        ranks = max(pipeline.homes, default=count - 1) + 1
        help = f"this schedule has {count} stages on the {ranks} ranks of `{pipeline.axis}`" if pipeline.homes else ""
        raise PlanError([Diagnostic("E0517", f"{len(turns)} stages are given, the schedule has {count}", span, help=help)])
    if sum(turns) != total:
        sums = " + ".join(map(str, turns))
        help = f"{'give' if sum(turns) < total else 'take away'} {abs(total - sum(turns))} more"
        raise PlanError([Diagnostic("E0517", f"{sums} = {sum(turns)} turns are given, the repeats have {total}", span, help=help)])
    if empty := [k for k in range(1, count - 1) if not turns[k]]:
        raise PlanError([Diagnostic("E0517", f"stage {empty[0]} has nothing to do", span, "0 turns between the first and the last stage")])
    return turns


def _cost(program: Program, body: Sequence[Stmt]) -> int:
    """Forward operations of one run of a body."""
    inner = (
        program.size(stmt.dim) * _cost(program, stmt.body) if isinstance(stmt, Region) else flops(program, stmt)
        for stmt in body
    )
    return sum(inner)


def balanced(costs: Sequence[int], first: int, last: int, count: int) -> tuple[int, ...]:
    """How many of the items, in order, each of so many stages has: the dearest stage as cheap as can be.

    The first and the last stage cost so much more, and alone may have no item.  Of several such divisions the one whose
    costs are most alike: the sum of their squares is the least.
    """
    total = len(costs)
    ends = [0, *accumulate(costs)]
    extra = [first, *(0 for _ in range(count - 2)), last] if count > 1 else [first + last]
    least = [int(0 < k < count - 1) for k in range(count)]

    def cost(stage: int, start: int, end: int) -> int:
        return ends[end] - ends[start] + extra[stage]

    def divided(bound: int) -> tuple[int, ...] | None:
        """The best division without a stage above `bound`."""
        best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]  # by end: the sum of squares, and where the stage began
        for stage in range(count):
            found: dict[int, tuple[int, int]] = {}
            for start, (squares, _) in best[-1].items():
                for end in range(start + least[stage], total + 1):
                    own = cost(stage, start, end)
                    if own > bound:
                        break
                    if end not in found or squares + own * own < found[end][0]:
                        found[end] = (squares + own * own, start)
            best.append(found)
        if total not in best[-1]:
            return None
        cuts = [total]
        for found in reversed(best[1:]):
            cuts.append(found[cuts[-1]][1])
        cuts.reverse()
        return tuple(end - start for start, end in zip(cuts, cuts[1:], strict=False))

    bounds = sorted({ends[j] - ends[i] + more for i in range(total + 1) for j in range(i, total + 1) for more in {*extra}})
    at = bisect_left(bounds, True, key=lambda bound: _fits(costs, extra, least, bound))
    found = divided(bounds[at])
    assert found, "cut_stages: turns do not fit into stages"
    return found


def _fits(costs: Sequence[int], extra: Sequence[int], least: Sequence[int], bound: int) -> bool:
    """Whether stages filled one after the other, each up to a bound, take all items, and each has as many as it must."""
    left = len(costs)
    for stage, (more, needed) in enumerate(zip(extra, least, strict=True)):
        behind = sum(least[stage + 1 :])
        taken, filled = 0, more
        while left - taken > behind and filled + costs[len(costs) - left + taken] <= bound:
            filled += costs[len(costs) - left + taken]
            taken += 1
        if more > bound or taken < needed:
            return False
        left -= taken
    return not left


# ---- what crosses the cuts


def _carried(program: Program, pipeline: Pipeline) -> Region:
    """The model in which repeats that are cut carry all that later statements need of earlier ones."""
    region, names = program.region, Names(types(program))
    of = types(program)
    body: list[Stmt] = []
    rest = list(region.body)
    bound: list[str] = []  # floating point values that are no parameters
    renamed: dict[str, str] = {}
    while rest:
        stmt = _renamed(rest.pop(0), renamed)
        if isinstance(stmt, Region) and stmt.dim in pipeline.dims:
            inside, behind = uses(evolve(stmt, args=())), _used(rest, region.yields)
            behind = {renamed.get(name, name) for name in behind}
            live = [name for name in bound if inside[name] or name in behind]
            stmt, results = _carrying(stmt, live, names, of)
            renamed = {old: results.get(new, new) for old, new in renamed.items()} | results
        made = stmt.results if isinstance(stmt, Region) else stmt.outputs
        of |= {value.name: value.type for value in made}
        if isinstance(stmt, Region) or stmt.kind != "leaf":
            bound = [*(renamed.get(name, name) for name in bound), *(v.name for v in made if v.type.dtype in FLOATS)]
            bound = list(dict.fromkeys(bound))
        body.append(stmt)
    yields = tuple(evolve(end, name=renamed.get(end.name, end.name)) for end in region.yields)
    return evolve(region, body=tuple(body), yields=yields)


def _used(body: Sequence[Stmt], yields: Sequence[Yield]) -> set[str]:
    found = {end.name for end in yields}
    for stmt in body:
        found |= set(uses(stmt)) if isinstance(stmt, Region) else set(stmt.inputs)
    return found


def _carrying(region: Region, live: Sequence[str], names: Names, of: dict[str, object]) -> tuple[Region, dict[str, str]]:
    """The repeat that carries these values too, and what they are called behind it."""
    inner = {name: Value(names.fresh(name), of[name]) for name in live}  # type: ignore[arg-type]
    after = {name: Value(names.fresh(name), of[name]) for name in live}  # type: ignore[arg-type]
    carries = [arg for arg in region.args if arg.enter is Enter.CARRY]
    others = [arg for arg in region.args if arg.enter is not Enter.CARRY]
    more = [Arg(value, name, Enter.CARRY) for name, value in inner.items()]
    body = tuple(_renamed(stmt, {name: value.name for name, value in inner.items()}) for stmt in region.body)
    made = evolve(
        region,
        args=(*carries, *more, *others),
        body=body,
        yields=(*region.yields, *(Yield(value.name, Leave.LAST) for value in inner.values())),
        results=(*region.results, *after.values()),
    )
    return made, {name: value.name for name, value in after.items()}


def _renamed(stmt: Stmt, new: dict[str, str]) -> Stmt:
    if isinstance(stmt, Op):
        return evolve(stmt, inputs=tuple(new.get(name, name) for name in stmt.inputs))
    return evolve(
        stmt,
        args=tuple(evolve(arg, source=new.get(arg.source, arg.source)) for arg in stmt.args),
        body=tuple(_renamed(inner, new) for inner in stmt.body),
        yields=tuple(evolve(end, name=new.get(end.name, end.name)) for end in stmt.yields),
    )


def _held(program: Program, pipeline: Pipeline) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The stages of each parameter that does not come slice by slice to a repeat that is cut."""
    bodies, repeats = groups(pipeline, program.region.body)
    params = {op.outputs[0].name: op.inputs[0] for op in bodies[0] if isinstance(op, Op) and op.kind == "leaf"}
    all_ = stages(program, pipeline)
    found: dict[str, set[int]] = {}
    for number, body in enumerate(bodies):
        for name in _used(body, ()) & params.keys():
            found.setdefault(params[name], set()).update(k for k, s in enumerate(all_) if number in s.groups)
    for number, repeat in enumerate(repeats):
        slices = {arg.source for arg in repeat.args if arg.enter is Enter.EACH}
        for name in (set(uses(repeat)) - slices) & params.keys():
            found.setdefault(params[name], set()).update(k for k, s in enumerate(all_) if s.turns[number])
    return tuple((param.name, tuple(sorted(found[param.name]))) for param in program.params if param.name in found)
