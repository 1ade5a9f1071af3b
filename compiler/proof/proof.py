"""Holds the sharded step to the single-device step in a prime field: loss, norm, count, every
gradient and update.
"""

from collections.abc import Sequence
from math import ceil, log2

from attrs import evolve, frozen

from ..analysis.causality import claim as causality_claim
from ..analysis.certificate import Proof, get_user_functions, mesh_words
from ..config.settings import AUTO, Selection
from ..ir import Claim, Pipeline, Program, Type
from ..passes.bucket_params import fuse_buckets_as
from ..passes.schedule_pipeline import schedule_pipeline
from ..schedules.check import problems
from ..syntax.diagnostics import Diagnostic, Note, PlanError
from ..tuning.lowering import PASS_NAMES, make_variant
from .causality import depends_on_hidden_tokens
from .inputs import Inputs, scene
from .interpreter import Interpreter, Outcome, ShapeError, differing
from .pipeline.rows import RowsError, run_rows
from .pipeline.shrink import stage_to_rank, stages_of_params
from .prime_field import Field, P, Q
from .reference import Reference
from .simulated_mesh import SimulatedMesh
from .small_sizes import Sizes, meshes, resize, small
from .tensors import Numbers, Tensor

FIRST, PLACED, FUSED, LAST = PASS_NAMES[0], *PASS_NAMES[-3:]

BOUND = -50
"""The logarithm of how probable it may be that unequal steps agree in one case."""

TRIALS = 6
"""The trials that the evaluation begins with; if the bound asks for more, it is repeated."""

DEEP = 16
"""Stages from which on values are of so high a degree that the bound asks for a trial more."""

MOST_TRIALS = 128
"""More are not made: at so high a degree they would hardly help."""


@frozen
class Case:
    """The step at one choice of small sizes: the sharded program, and a program of the model
    that it must equal.
    """

    program: Program
    model: Program

    @property
    def mesh(self) -> Sizes:
        """The axes and their sizes."""
        return {axis.name: axis.size for axis in self.program.axes}

    @property
    def single(self) -> Program:
        """The model with the program's axes, into which its own may have been factored; it lies
        over none of them.
        """
        return evolve(self.model, axes=self.program.axes)

    def scene(self, numbers: Numbers) -> Inputs:
        """Inputs of both steps."""
        return scene(self.program, numbers)


class UnequalError(Exception):
    """The sharded step is not the single-device step: in `case`, the `results` differ."""

    def __init__(self, case: Case, results: list[str]) -> None:
        super().__init__(case, results)
        self.case, self.results = case, results


class HiddenTokensError(Exception):
    """A loss of the model depends on a token that it must not see."""


def case_of(program: Program, model: Program, axes: Sizes) -> Case:
    """Both programs at small sizes on the mesh `axes`; the model may have axes whose factors these
    are.
    """
    dims = small(program, axes)
    whole = dict[str, int]()
    for axis in program.axes:
        whole[axis.parent] = whole.get(axis.parent, 1) * axes[axis.name]
    sharded, single = resize(program, axes, dims), resize(model, whole | axes, dims)
    parents = {axis.name: axis.parent for axis in sharded.axes}
    # the plan's sizes have led to the strategies of claims
    ways = {(claim.dim, parents.get(claim.axis, claim.axis)): claim.via for claim in sharded.claims}
    claims = list[Claim]()
    for claim in single.claims:
        if claim.via == AUTO:
            claim = evolve(claim, via=ways[claim.dim, claim.axis])
        claims.append(claim)
    pipeline = _as_far(single.pipeline, sharded.pipeline)
    single = evolve(single, pipeline=pipeline, claims=tuple(claims))
    if single.train.recompute.word == AUTO:  # it recomputes what the plan's sizes have led to
        train = single.train
        if not sharded.recomputed:
            train = evolve(train, recompute=Selection("none"))
        single = evolve(single, train=train, recomputed=sharded.recomputed)
    return Case(sharded, single)


def cases(program: Program, model: Program) -> list[Case]:
    """All that is evaluated of a program after the last pass: equal for plans that differ only
    where no case depends on it.
    """
    assert keeps_sizes(program, model), "verify: sizes or settings are not the plan's"
    assert has_its_stages(program), "verify: the stages are not those that the plan's forward has"
    return [case_of(program, model, axes) for axes in meshes(program)]


def _as_far(pipeline: Pipeline | None, cut: Pipeline | None) -> Pipeline | None:
    """A small pipeline, as far as another is cut and scheduled."""
    if not pipeline or not cut:
        return pipeline
    if not pipeline.layers:
        return evolve(pipeline, settings=cut.settings, rows=cut.rows)
    return evolve(cut, schedule=pipeline.schedule and cut.schedule)


def keeps_sizes(program: Program, model: Program) -> bool:
    """Whether the program's own sizes, at which nothing is evaluated, and its settings are the
    model's.
    """
    dims = {dim.name: (dim.size, dim.valid) for dim in program.dims}
    are_equal = all(dims.get(dim.name) == (dim.size, dim.valid) for dim in model.dims)
    return are_equal and _settings(program) == _settings(model)


def _settings(program: Program) -> tuple[object, ...]:
    """The sizes of the plan's axes, which the program may have split into factors, and its
    settings.
    """
    ranks = dict[str, int]()
    for axis in program.axes:
        ranks[axis.parent] = ranks.get(axis.parent, 1) * axis.size
    pipeline = program.pipeline
    if not pipeline:
        return ranks, program.train, ()
    return ranks, program.train, (pipeline.axis, pipeline.dims, pipeline.settings)


def has_its_stages(program: Program) -> bool:
    """Whether a pipeline at its own sizes, at which nothing is evaluated, holds what it reads
    and does all its work.
    """
    pipeline = program.pipeline
    if not pipeline:
        return True
    assert pipeline.schedule, "verify: no schedule"
    are_placed = (
        pipeline.stage_to_rank
        == pipeline.schedule.stage_to_rank
        == stage_to_rank(pipeline, program.axis(pipeline.axis).size)
    )
    has_params = pipeline.param_stages == stages_of_params(program, pipeline)
    return are_placed and has_params and not problems(pipeline.schedule)


def compiles_alike(case: Case) -> bool:
    """Whether the small model compiles to the program: at these sizes the compiler decides as at
    the plan's.

    Only which parameters share a bucket goes by their bytes, and is taken as it is.
    """
    sharded, recompiled = case.program, anew(case)
    return (
        recompiled.region == sharded.region
        and recompiled.params == sharded.params
        and recompiled.buckets == sharded.buckets
    )


def anew(case: Case) -> Program:
    """The small model compiled with the program's buckets, unchecked: it is for comparing with the
    program that was checked.
    """
    if case.model.after == LAST:
        return case.model
    if case.model.after == FUSED:
        return schedule_pipeline(case.model)
    placed = make_variant(case.model).get_program_after(PLACED)
    return schedule_pipeline(fuse_buckets_as(placed, case.program.buckets))


def prove(program: Program, model: Program) -> Proof:
    """Evaluates `program` after the last pass on two small meshes.

    Raises UnequalError; HiddenTokensError; PlanError where products of results nest too deeply for
    any bound.  `model` is the same plan before any placement, or `program` itself, whose forward is
    then taken for the model.
    """
    all_cases = cases(program, model)
    fields = _fields(program, all_cases)
    if model.after == FIRST:
        single = _on_one_rank(model)
        against = "the model before any placement"
    else:
        single = all_cases[0].single
        against = f"the forward in IR text from after `{model.after}`"
    _check_hidden_tokens(single, fields[-1].trials)
    ops = program.ops
    return Proof(
        against=against,
        meshes=tuple(case.mesh for case in all_cases),
        prime=P,
        trials=min(numbers.trials for numbers in fields),
        bound=ceil(max(map(error_bound, fields))),
        gradients=len(program.params),
        losses=program.losses,
        causality=causality_claim(model),
        parameters=len(program.params),
        ops=len(ops),
        kinds=len({op.kind for op in ops}),
        trusted=get_user_functions(program),
        stages=program.pipeline.axis if program.pipeline else "",
    )


def _fields(program: Program, all_cases: Sequence[Case]) -> list[Field]:
    """The arithmetic of each case, after the evaluation.  Raises UnequalError, PlanError."""
    trials = TRIALS
    for case in all_cases:
        pipeline = case.program.pipeline
        if pipeline and len(pipeline.layers) >= DEEP:
            trials = TRIALS + 1
    fields: list[Field] = []
    for case in all_cases:
        numbers, results = _evaluate(case, trials)
        if not results and error_bound(numbers) > BOUND:
            trials = _enough(program, numbers)
            numbers, results = _evaluate(case, trials)
        if results:
            raise UnequalError(case, results)
        assert compiles_alike(case), (
            f"verify: on {mesh_words(case.mesh)} the plan does not compile to the same IR"
        )
        fields.append(numbers)
    return fields


def _on_one_rank(model: Program) -> Program:
    """A model at the smallest sizes, which no axis divides."""
    axes = {axis.name: 1 for axis in model.axes}
    return resize(model, axes, small(model, axes))


def _check_hidden_tokens(model: Program, trials: int) -> None:
    """Raises HiddenTokensError where a loss depends on a token that it must not see."""
    numbers = Field(trials, len(model.axes))
    if depends_on_hidden_tokens(model, scene(model, numbers), numbers):
        raise HiddenTokensError
    assert error_bound(numbers) <= BOUND, "verify: a forward is of higher degree than its step"


def _evaluate(case: Case, trials: int) -> tuple[Field, list[str]]:
    numbers = Field(trials, len(case.program.axes))
    return numbers, unequal(case, numbers)


def _enough(program: Program, numbers: Field) -> int:
    """The number of trials that the bound asks for.  Raises PlanError where it is not to be had."""
    share = _share(numbers)
    trials = MOST_TRIALS + 1
    if share < 1:
        trials = ceil((log2(1 + numbers.hashed**2 / 2) - BOUND) / -log2(share))
    if trials > MOST_TRIALS:
        note = Note(
            None, f"values are of degree {numbers.degree.all:,}, with {numbers.inverted:,} inverses"
        )
        help = "multiply results by one another less often, or compile with --no-verify"
        message = "the step's values are of too high a degree to be proved equal"
        raise PlanError(
            [Diagnostic("E0705", message, program.region.span, notes=(note,), help=help)]
        )
    return trials


def error_bound(numbers: Field) -> float:
    """The logarithm of the probability that the evaluated values are equal although the programs
    are not.
    """
    return log2(1 + numbers.hashed**2 / 2) + numbers.trials * log2(_share(numbers))


def _share(numbers: Field) -> float:
    """The share of a polynomial's points at which it may vanish: its degree, denominators cleared,
    in Q values.

    The degree counts twice, since exponents may be negative.
    """
    return 2 * (numbers.degree.all + numbers.degree.inverses * numbers.inverted) / Q


def unequal(case: Case, numbers: Numbers) -> list[str]:
    """The names of the results that differ; of a value that has the wrong shape, its name; what
    stops a row.
    """
    try:
        return compare_results(case, numbers)
    except ShapeError as error:
        return [error.value]
    except RowsError as error:
        return [str(error)]


def compare_results(case: Case, numbers: Numbers) -> list[str]:
    """The names of the results that differ.  Raises ShapeError, RowsError where there are none."""
    start = case.scene(numbers)
    expected = Reference(case.single, numbers).run(start)
    world = SimulatedMesh.of_program(case.program)
    machine = Interpreter(case.program, world, numbers, rows=run_rows)
    outcome = machine.run(start.on(case.program, world, numbers))
    return differences(case.program, world, numbers, outcome, expected)


def differences(
    program: Program, world: SimulatedMesh, numbers: Numbers, actual: Outcome, expected: Outcome
) -> list[str]:
    """The results that differ on any rank from what it should hold of the single device's."""
    due = on_ranks(program, world, expected)
    names = list[str]()
    for (name, _, value), (_, _, right) in zip(actual.results(), due.results(), strict=True):
        if differing(numbers, value, right):
            names.append(name)
    return names


def on_ranks(program: Program, world: SimulatedMesh, expected: Outcome) -> Outcome:
    """The parts of the single device's results that ranks should hold."""
    types = {param.name: param.type for param in program.params_and_buffers}
    metrics = dict[str, Tensor]()
    for name, value in expected.metrics.items():
        metrics[name] = world.spread(value, Type("", value.dims))
    return Outcome(
        metrics,
        {name: world.spread(value, types[name]) for name, value in expected.gradients.items()},
        {name: world.spread(value, types[name]) for name, value in expected.parameters.items()},
    )
