"""Every mutant is caught: random models, meshes, rules and ways to train.

Non-goals: every mutant of a plan (`test_audit`); that the plans themselves are equal
(`end_to_end/random_models`).
"""

from attrs import evolve
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from scalec.compiler.ir import Program
from scalec.compiler.proof.interpreter import Interpreter, ShapeError
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.proof import Case, case_of, differences
from scalec.compiler.proof.reference import Reference
from scalec.compiler.proof.semantics import MEANINGS
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.small_sizes import meshes
from scalec.compiler.proof.tensors import Numbers
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower
from scalec.testing import plans
from scalec.testing.audit.mutants import mutants
from scalec.testing.audit.mutants.faults import FAULTS
from scalec.testing.float64 import Reals


@settings(max_examples=5)
@given(plans(), st.integers(0, 2**20))
def test_whatever_is_mutated_is_caught(plan: str, choice: int) -> None:
    """One mutant of each of many plans: it differs in the field, or in no number of float64
    either.
    """
    model = compile_plan(Source("plan.scale", plan), "resolve")
    program = lower(model)
    made = [*mutants(program)]
    mutant = made[choice % len(made)]
    note(f"{mutant.what} ({mutant.line})")
    cases = [case_of(program, model, axes) for axes in meshes(program)]
    axes = len(program.axes)
    if not is_wrong(cases, mutant.program, Field(4, axes)):
        # a model that overflows float64 says nothing there
        assume(not is_wrong(cases, program, Reals(axes)))
        assert not is_wrong(cases, mutant.program, Reals(axes))


def is_wrong(cases: list[Case], mutant: Program, numbers: Numbers) -> bool:
    return any(parts(case, evolve(case.program, region=mutant.region), numbers) for case in cases)


def parts(case: Case, program: Program, numbers: Numbers) -> bool:
    """Whether the step of `program` is not the single-device step, or cannot be evaluated."""
    start, world = case.scene(numbers), SimulatedMesh.of_program(program)
    expected = Reference(case.single, numbers).run(start)
    try:
        found = Interpreter(program, world, numbers, meanings=MEANINGS | FAULTS).run(
            start.on(program, world, numbers)
        )
    except (ShapeError, AssertionError):
        return True
    return bool(differences(program, world, numbers, found, expected))
