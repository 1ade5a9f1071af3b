"""Why a step is not the single device's: the first wrong value, on the smallest mesh that shows it.

The program is also evaluated on one rank.  It goes wrong at the first value whose parts on the
ranks are not the parts of the global value; the values of the parts say which coercion is missing.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from attrs import evolve, frozen

from ..analysis.certificate import mesh_words
from ..ir import (
    INVARIANT,
    MAXIMUM,
    PARTIAL,
    REPLICATED,
    Op,
    Placement,
    Program,
    Region,
    Type,
    base,
    sharded,
)
from ..ir.placements import COERCIONS
from ..ops import OPS, TypingError
from ..syntax.diagnostics import Diagnostic, Note
from .interpreter import Interpreter, ShapeError, Where, differing
from .pipeline.rows import RowsError, run_rows
from .prime_field import Field
from .proof import Case, UnequalError, case_of, compare_results, unequal
from .reference import forwards_apart
from .simulated_mesh import SimulatedMesh
from .small_sizes import resize
from .tensors import Tensor

TRIALS = 2
"""Enough to find what is known to be there."""


@frozen
class WrongValue:
    """The first wrong value, its iteration, and the placements of its parts on the axes where they
    are not as declared.
    """

    value: str
    where: Where
    declared: tuple[tuple[str, Placement], ...]
    actual: tuple[tuple[str, Placement], ...]


def locate(error: UnequalError, program: Program, model: Program) -> Diagnostic:
    """The diagnostic for a program that is not equal to its model."""
    case = _smallest(program, model) or error.case
    numbers = Field(TRIALS, len(program.axes))
    try:
        results = compare_results(case, numbers)
    except ShapeError as unmade:
        results = [unmade.value]
    except RowsError as stop:
        return _diagnostic_of_rows(case, stop)
    alone = _alone(case)
    if wrong := unequal(Case(alone, case.model), numbers):
        return _not_the_model(case, alone, numbers, wrong)
    wrong_value = _first_wrong(case, alone, numbers)
    return _diagnostic(case, wrong_value, results)


def _smallest(program: Program, model: Program) -> Case | None:
    """The smallest mesh on which the step differs, without several stages if it can be."""
    wide = [axis.name for axis in program.axes if axis.size > 1]
    wide.sort(key=lambda axis: program.pipeline is not None and axis == program.pipeline.axis)
    one = {axis.name: 1 for axis in program.axes}
    for count in range(1, len(wide) + 1):
        for axes in combinations(wide, count):
            case = case_of(program, model, one | dict.fromkeys(axes, 2))
            if unequal(case, Field(TRIALS, len(one))):
                return case
    return None


def _alone(case: Case) -> Program:
    """The same program on one rank, where every coercion does nothing; its stages stay where
    they are.
    """
    one = dict.fromkeys(case.mesh, 1) | {axis: case.mesh[axis] for axis in _stages(case)}
    return resize(case.program, one, {dim.name: dim.size for dim in case.program.dims})
    axes = dict.fromkeys(case.mesh, 1)
    for axis in _stages(case):
        axes[axis] = case.mesh[axis]
    return resize(case.program, axes, {dim.name: dim.size for dim in case.program.dims})


def _stages(case: Case) -> list[str]:
    """The axis of the stages, if there are some on several ranks."""
    pipeline = case.program.pipeline
    if not pipeline or case.mesh[pipeline.axis] == 1:
        return []
    return [pipeline.axis]


def _diagnostic_of_rows(case: Case, stop: RowsError) -> Diagnostic:
    """Rows that cannot be done to their end."""
    pipeline = case.program.pipeline
    assert pipeline, "verify: rows without a pipeline"
    span = pipeline.settings.spans.get("schedule", case.program.region.span)
    message = f"on {mesh_words(case.mesh)} a row of the schedule stops"
    return Diagnostic("E0701", message, span, notes=(Note(None, str(stop)),))


# ---- values that are wrong on several ranks


def _first_wrong(case: Case, alone: Program, numbers: Field) -> WrongValue | None:
    start = case.scene(numbers)
    right: dict[tuple[str, Where], Tensor] = {}
    world = SimulatedMesh.of_program(alone)

    def note(name: str, where: Where, value: Tensor) -> None:
        right[name, where] = value

    machine = Interpreter(alone, world, numbers, note, rows=run_rows)
    machine.run(start.on(alone, world, numbers))
    ranks = SimulatedMesh.of_program(case.program)
    type_of = case.program.types
    flat = {bucket.dim for bucket in case.program.buckets}  # each rank packs what it holds
    stale = _stale(case.program)
    wrong: list[WrongValue] = []

    def look(name: str, where: Where, value: Tensor) -> None:
        if wrong:
            return
        if not where and _stages(case):
            return  # ranks hold other things of their own
        whole, type = right[name, where], type_of[name]
        if name in stale or flat & {*type.dims}:
            return
        if not _is(value, whole, type, ranks, numbers):
            wrong.append(
                _describe_value(case.program, name, where, value, whole, type, ranks, numbers)
            )

    try:
        Interpreter(case.program, ranks, numbers, look, rows=run_rows).run(
            start.on(case.program, ranks, numbers)
        )
    except ShapeError as error:
        wrong.append(WrongValue(error.value, (), (), ()))
    return wrong[0] if wrong else None


def _stale(program: Program) -> set[str]:
    """The updated parameters that ranks share out: a rank's copy is right only where it has its
    part.
    """
    shared = set[str]()
    for bucket in program.buckets:
        if bucket.shard_axes:
            shared.update(bucket.params)
    stale = set[str]()
    for op in program.ops:
        if op.kind == "update":
            stale |= {value.name for value in op.outputs if base(value.name) in shared}
    return stale


def _is(value: Tensor, whole: Tensor, type: Type, world: SimulatedMesh, numbers: Field) -> bool:
    """Whether the parts of `value` are the parts of `whole`, placed as `type`; sums and maxima may
    be spread anyhow.
    """
    if value.array.shape[value.lead :] != world.shape(type):
        return False
    for axis, place in type.places:
        if place in (PARTIAL, MAXIMUM):
            value = world.coerce(value, [axis], place, INVARIANT, numbers)
    settled = tuple((axis, place) for axis, place in type.places if place not in (PARTIAL, MAXIMUM))
    return not differing(numbers, value, world.spread(whole, evolve(type, places=settled)))


def _describe_value(
    program: Program,
    name: str,
    where: Where,
    value: Tensor,
    whole: Tensor,
    type: Type,
    world: SimulatedMesh,
    numbers: Field,
) -> WrongValue:
    """The placement that the parts have, if any, with the fewest differences from the declared
    one.
    """
    wide = [axis.name for axis in program.axes if axis.size > 1]
    kinds = [INVARIANT, PARTIAL, MAXIMUM, *(sharded(dim) for dim in type.dims)]
    declared = tuple((axis, type.placement_on(axis)) for axis in wide)
    others = list[tuple[tuple[str, Placement], ...]]()
    for places in product(kinds, repeat=len(wide)):
        placed = tuple(zip(wide, places, strict=True))
        if _divides(program, placed):
            others.append(placed)

    def changes(actual: tuple[tuple[str, Placement], ...]) -> int:
        return sum(a != b for a, b in zip(actual, declared, strict=True))

    for actual in sorted(others, key=changes):
        if _is(value, whole, evolve(type, places=program.places(dict(actual))), world, numbers):
            apart = list[tuple[str, Placement]](), list[tuple[str, Placement]]()
            for due, placed in zip(declared, actual, strict=True):
                if not _alike(due[1], placed[1]):
                    apart[0].append(due)
                    apart[1].append(placed)
            return WrongValue(name, where, tuple(apart[0]), tuple(apart[1]))
    return WrongValue(name, where, declared, ())


def _divides(program: Program, placed: Sequence[tuple[str, Placement]]) -> bool:
    """Whether each axis divides the dim that it shards."""
    for axis, place in placed:
        if place.dim and program.size(place.dim) % program.axis(axis).size:
            return False
    return True


def _alike(declared: Placement, actual: Placement) -> bool:
    """Whether parts that are the same everywhere are as declared: R and I look alike in memory."""
    if declared == REPLICATED:
        declared = INVARIANT
    return actual == declared


_HELD = {
    INVARIANT: "every rank holds the whole value",
    PARTIAL: "each rank holds a part of a sum that was not done",
    MAXIMUM: "each rank holds a maximum of its own",
}


def _diagnostic(case: Case, wrong_value: WrongValue | None, results: Sequence[str]) -> Diagnostic:
    mesh = mesh_words({name: size for name, size in case.mesh.items() if size > 1})
    message = f"on {mesh} the step is not that of a single device"
    if not wrong_value:
        notes = (differences(case.program, results),)
        return Diagnostic("E0701", message, case.program.region.span, notes=notes)
    op, phase = _makers(case.program).get(wrong_value.value, (None, "step"))
    lack = _lacking(case.program, op) if op else None
    texts = [
        f"the first wrong value is `{wrong_value.value}`, in {phase}{iterations(wrong_value.where)}"
    ]
    if lack:
        texts.append(_missing(lack))
        label = _label_of_lack(lack)
    else:
        texts += _apart(wrong_value, op)
        label = _label(wrong_value)
    late = any(result.startswith("gradient of") for result in results) and "loss" not in results
    if phase == "backward" or (phase == "step" and late):
        texts.append("wrong only in the gradient: forward and loss are those of a single device")
    if results == [wrong_value.value]:
        texts.append("no result of the step is reached: shapes do not fit")
    else:
        texts.append(differences(case.program, results).text)
    span = op.span if op else case.program.region.span
    return Diagnostic("E0701", message, span, label, tuple(Note(None, text) for text in texts))


@frozen
class _Lack:
    """An operand that its op cannot take as it is placed, and how it could."""

    op: Op
    operand: str
    axes: tuple[str, ...]
    actual: Placement
    required: Placement


def _lacking(program: Program, op: Op) -> _Lack | None:
    """The operand with a placement that contradicts the declared placement of the op's results."""
    all_types = program.types
    operands = [all_types[name] for name in op.inputs]
    if op.kind == "coerce" or _fits(program, op, operands):
        return None
    names = [axis.name for axis in program.axes]
    groups = list[tuple[str, ...]]()
    for count in range(1, len(names) + 1):
        groups += combinations(names, count)
    for axes, (i, type) in product(groups, enumerate(operands)):
        for place in (INVARIANT, REPLICATED, PARTIAL, *map(sharded, type.dims)):
            placed = dict(type.places) | dict.fromkeys(axes, place)
            other = evolve(type, places=program.places(placed))
            if _fits(program, op, [*operands[:i], other, *operands[i + 1 :]]):
                return _Lack(op, op.inputs[i], axes, type.placement_on(axes[0]), place)
    return None


def _fits(program: Program, op: Op, operands: Sequence[Type]) -> bool:
    results = tuple(value.type for value in op.outputs)
    try:
        return OPS[op.kind].infer(program, operands, op) == results
    except TypingError:
        return False


def _label_of_lack(lack: _Lack) -> str:
    kind = lack.op.kind
    if pulled := dict(lack.op.attrs).get("of"):
        kind = f"vjp of {pulled}"
    return f"`{kind}` cannot take `{lack.operand}` as {lack.actual} on {' × '.join(lack.axes)}"


def _missing(lack: _Lack) -> str:
    way = (
        f"{_coercion(lack.actual, lack.required)} of `{lack.operand}` over {' × '.join(lack.axes)}"
    )
    return f"a coercion is missing or misplaced: {way}"


def _coercion(source: Placement, target: Placement, over: str = "") -> str:
    """For instance `P→I over tp (all_reduce)`."""
    words = f"{source}→{target}{over}"
    if entry := COERCIONS.get((source.kind, target.kind)):
        words += f" ({entry.function})"
    return words


def _label(wrong_value: WrongValue) -> str:
    if not wrong_value.declared:
        return f"`{wrong_value.value}` has the wrong shape"
    axis, declared = wrong_value.declared[0]
    if not wrong_value.actual:
        return f"`{wrong_value.value}` is {declared} on {axis}, but the ranks hold something else"
    actual = wrong_value.actual[0][1]
    words = _HELD.get(actual) or f"each rank holds its slice of `{actual.dim}`"
    return f"`{wrong_value.value}` is {declared} on {axis}, but {words}"


def _apart(wrong_value: WrongValue, op: Op | None) -> Iterator[str]:
    """The actual placement against the declared one, as a coercion that there is or should be."""
    for (axis, declared), (_, actual) in zip(
        wrong_value.declared, wrong_value.actual, strict=False
    ):
        name = _coercion(actual, declared, f" over {axis}")
        if op and op.kind == "coerce":
            yield f"this coercion is extra or of the wrong kind: what leads there is {name}"
        else:
            yield f"a coercion is missing, extra or misplaced before this: {name}"


def iterations(where: Where) -> str:
    """For instance `, microbatches 0, layers 1`."""
    return "".join(f", {dim} {index}" for dim, index in where)


def differences(program: Program, results: Sequence[str]) -> Note:
    """How many results of a step differ, and the first of them."""
    total = 3 + 2 * len(program.params)
    shown = ", ".join(results[:4])
    if len(results) > 4:
        shown += ", …"
    return Note(None, f"{len(results)} of {total} results of the step differ: {shown}")


def _makers(program: Program) -> dict[str, tuple[Op | None, str]]:
    """The op that makes each value, None for a region's results, and its part of the step."""
    makers: dict[str, tuple[Op | None, str]] = {}

    def enter(region: Region, phase: str) -> None:
        if region.kind in ("forward", "backward"):
            phase = region.kind
        for value in region.results:
            makers[value.name] = None, phase
        for stmt in region.body:
            if isinstance(stmt, Region):
                enter(stmt, phase)
                continue
            for value in stmt.outputs:
                makers[value.name] = stmt, phase

    enter(program.region, "step")
    return makers


# ---- programs that are wrong on one rank


def _not_the_model(case: Case, alone: Program, numbers: Field, wrong: Sequence[str]) -> Diagnostic:
    """The step differs from its model without any sharding: in the forward, or in what was made
    of it.
    """
    where = "even on one rank"
    if stages := _stages(case):
        mesh = mesh_words({axis: case.mesh[axis] for axis in stages})
        where = f"on {mesh} alone"
    if apart := forwards_apart(alone, case.single, case.scene(numbers), TRIALS):
        name, iteration = apart
        spans = {value.name: op.span for op in case.program.ops for value in op.outputs}
        span = spans.get(name)
        text = f"the first wrong value is `{name}`{iterations(iteration)}"
    else:
        spans = {f"gradient of {param.name}": param.span for param in case.program.params}
        span = next((spans[result] for result in wrong if result in spans), None)
        text = "wrong only after the forward"
    notes = (Note(None, text), differences(case.program, wrong))
    message = f"{where} the step is not that of the model"
    return Diagnostic("E0701", message, span or case.program.region.span, notes=notes)
