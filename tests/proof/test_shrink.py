"""Rows without a name, made for a plan's costs or read from its file, are proved as a part of
themselves.

Purpose: what `recut` makes of them at small sizes, that it proves equal wherever stages are, and
that mistakes in it are found.  Non-goals: schedules with names (`test_rows`), `resized` as such
(`tests/schedules`).
"""

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.proof_pipelines import compiled, piped
from helpers.schedules.samples import shuffled
from scalec.compiler.ir import MICROBATCHES, Pipeline, Program
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.proof import BOUND, Case, case_of, prove
from scalec.compiler.proof.small_sizes import meshes
from scalec.compiler.schedules.actions import Schedule, Work
from scalec.compiler.schedules.check import problems
from scalec.compiler.schedules.csv_file import csv
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.schedules.rescale import resize
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower
from scalec.testing.audit import Bench
from scalec.testing.audit.mutants import row_mutants
from scalec.testing.audit.mutants.rows import EVALUATED, FAMILIES, FREED

TIED = "tied embedding"
AUTO = ("auto", "auto(memory = 1)", "auto(memory = 2)", "auto(memory = 3, chunks = 2)")


def pipeline_of(program: Program) -> Pipeline:
    assert program.pipeline
    return program.pipeline


def rows_of(program: Program) -> Schedule:
    schedule = pipeline_of(program).schedule
    assert schedule
    return schedule


def without_messages(schedule: Schedule) -> Schedule:
    rows = tuple(tuple(a for a in row if not a.work.is_message) for row in schedule.rows)
    return evolve(schedule, rows=rows, groups=())


def cases(program: Program, model: Program) -> list[Case]:
    return [case_of(program, model, axes) for axes in meshes(program)]


def demand_part(program: Program, model: Program) -> None:
    """The small rows are the plan's for fewer ranks and microbatches, and right by themselves."""
    for case in cases(program, model):
        small = case.program
        found, ranks = rows_of(small), small.axis(pipeline_of(small).axis).size
        assert without_messages(found) == resize(rows_of(program), ranks, small.size(MICROBATCHES))
        assert pipeline_of(small).rows == without_messages(found)
        assert problems(found) == []


# ---- made for costs


@pytest.mark.sample(2)
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("schedule", AUTO)
def test_rows_made_for_costs(schedule: str, pp: int) -> None:
    program, model = compiled(piped(TIED, schedule, pp, layers=6))
    demand_part(program, model)
    assert prove(program, model).bound <= BOUND


@pytest.mark.parametrize("layers", ["0, 4", "4, 0", "1, 3"])
def test_rows_made_for_uneven_stages(layers: str) -> None:
    program, model = compiled(piped(TIED, "auto(memory = 2)", stages=layers))
    demand_part(program, model)
    prove(program, model)


# ---- from a file


def filed(schedule: Schedule, folder: Path, layers: int = 6) -> tuple[Program, Program]:
    """The program of a plan with these rows, of two microbatches or three, and its model."""
    (folder / "rows.csv").write_text(csv(schedule))
    name = {2: "data", 3: "three microbatches"}[schedule.microbatches]
    text = piped(name, 'file("rows.csv")', schedule.ranks, layers)
    model = compile_plan(Source(str(folder / "plan.scale"), text), "resolve")
    return lower(model), model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


HOMES = {
    "in a line": (0, 1, 2, 3),
    "around": (0, 1, 0, 1, 0, 1),
    "folded": (0, 1, 2, 2, 1, 0),
    "there and back twice": (0, 1, 1, 0, 0, 1),
    "two in a row": (0, 0, 1, 1, 2),
    "backwards": (2, 1, 0),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage_to_rank", HOMES)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_rows_of_a_file(stage_to_rank: str, seed: int, folder: Path) -> None:
    """In any order that can be done, with backwards in one and in two parts."""
    where = HOMES[stage_to_rank]
    program, model = filed(shuffled(where, max(where) + 1, 3, seed), folder)
    demand_part(program, model)
    assert prove(program, model).bound <= BOUND


def test_few_rows_for_many(folder: Path) -> None:
    """Eight ranks' rows as those of two and of three: the first stage's and the last one's, and
    one between.
    """
    program, model = filed(SCHEDULES["zb_h1"](8, 3), folder, layers=8)
    demand_part(program, model)
    prove(program, model)
    assert [rows_of(case.program).ranks for case in cases(program, model)] == [2, 3]


# ---- of many stages on each rank


def test_few_chunks_for_many() -> None:
    """Three stages of each rank in place of five; plans that differ in no more than that have
    equal cases.
    """
    five, four = (
        compiled(piped(TIED, f"interleaved_1f1b(chunks={chunks})", layers=10)) for chunks in (5, 4)
    )
    prove(*five)
    small = cases(*five)
    assert [
        len(pipeline_of(case.program).layers) // rows_of(case.program).ranks for case in small
    ] == [3, 3]
    assert [problems(rows_of(case.program)) for case in small] == [[], []]
    assert small == cases(*four)


# ---- rows that are wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["auto", "file"])
def test_every_mutant_of_rows_without_a_name_is_killed(schedule: str, folder: Path) -> None:
    rows = shuffled((0, 1, 1, 0), 2, 2, seed=1)
    assert {Work.BACKWARD, Work.WEIGHT} <= {action.work for _, _, action in rows.cells()}
    made = (
        filed(rows, folder) if schedule == "file" else compiled(piped("data", "auto(memory = 2)"))
    )
    case, *_ = cases(*made)
    on = Bench(case, Field(2, len(case.program.axes)))
    mutants = [*row_mutants(case.program)]
    assert [mutant.what for mutant in mutants if not on.wrong(mutant)] == []
    assert {mutant.family for mutant in mutants} == {*FAMILIES, EVALUATED, FREED}
