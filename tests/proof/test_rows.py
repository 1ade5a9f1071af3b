"""Steps with a pipeline prove equal, as their ranks' rows are done action by action; wrong rows do
not.

Purpose: every schedule, every place of a cut, parameters that several stages hold; each mistake of
the mutants' list found at rows of every kind; and the same verdict as that of the schedules' own
check, which runs nothing.  Non-goals: rows as such (`tests/schedules`), programs without a pipeline
(`test_proof`).
"""

from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve

from helpers.proof_pipelines import compiled, of_model, piped
from helpers.uneven_stages import CHUNKS, unlike
from scalec.compiler.analysis.stage_program import stage_programs
from scalec.compiler.ir import Op, Pipeline, Program, Region, Stmt, walk
from scalec.compiler.ir.stages import crossing
from scalec.compiler.proof import verify
from scalec.compiler.proof.pipeline.shrink import covers, params_on_several_ranks
from scalec.compiler.proof.pipeline.split_backward import halves
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.proof import BOUND, Case, case_of, prove, unequal
from scalec.compiler.proof.sharded_state import copy_from_owner, ownership_mask, with_noise
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.small_sizes import meshes
from scalec.compiler.proof.tensors import Tensor
from scalec.compiler.schedules.actions import Action, Schedule
from scalec.compiler.schedules.cell_table import cell_table, message_groups
from scalec.compiler.schedules.check import problems
from scalec.compiler.schedules.dependencies import get_payload
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.testing.audit import Bench, Fate, audit
from scalec.testing.audit.mutants import Mutant, row_mutants
from scalec.testing.audit.mutants.rows import EVALUATED, FAMILIES, FREED

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "breadth_first",
    "zb_h1",
    "zb_h2",
    "interleaved_zero_bubble",
    "zbv",
)
MUTATED = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
TIED = "tied embedding"


def pipeline_of(program: Program) -> Pipeline:
    assert program.pipeline
    return program.pipeline


def rows_of(program: Program) -> Schedule:
    schedule = pipeline_of(program).schedule
    assert schedule
    return schedule


def small(text: str, mesh: int = 0) -> Case:
    program, model = compiled(text)
    return case_of(program, model, meshes(program)[mesh])


# ---- what is right


@pytest.mark.sample(3)
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_proves_equal(schedule: str, pp: int) -> None:
    proof = prove(*compiled(piped(TIED, schedule, pp, layers=6)))
    assert proof.bound <= BOUND
    assert [mesh["pp"] for mesh in proof.meshes] == [2, 3]


def test_a_schedule_that_needs_many_microbatches_gets_them() -> None:
    text = piped("three microbatches", "dualpipev", layers=6).replace(
        "global_batch = 12", "global_batch = 32"
    )
    program, model = compiled(text)
    prove(program, model)
    assert [rows_of(small(text, i).program).microbatches for i in (0, 1)] == [4, 6]


CUTS = {
    "first without layers": (2, "0, 4"),
    "last without layers": (2, "4, 0"),
    "neither has": (3, "0, 4, 0"),
    "uneven": (3, "1, 2, 1"),
    "one rank": (1, "4"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("cut", CUTS)
def test_wherever_the_cuts_are(cut: str, schedule: str) -> None:
    pp, layers = CUTS[cut]
    for name in (TIED, "captured matrix"):
        prove(*compiled(piped(name, schedule, pp, stages=layers)))


PLANS = (
    "captured parameter",
    "captured value",
    "two carried values",
    "a repeat of one",
    "several repeats",
    "layers that differ",
    "dropout",
    "documents",
    "smoothing and z-loss",
    "bf16",
    "fp16, shared, summed in fp16",
    "shared optimizer state",
    "recomputed, dropout",
    "two key/value heads on four ranks",
    "one device",
    "fused, head with a bias",
    "fused, head with a bias, vocabulary whole",
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("name", PLANS)
def test_whatever_crosses_the_cuts(name: str, schedule: str) -> None:
    """Values that later stages need, draws and documents of their own, state that ranks share
    out within a stage.
    """
    schedule = "zb_h1" if name == "a repeat of one" and schedule != "1f1b" else schedule
    prove(*compiled(piped(name, schedule)))


MODELS = {
    "gpt2": (
        "vocab = 24  hidden = 8  heads = 4  ffn = 16  layers = 4",
        "vocab, heads, ffn",
        "layers",
    ),
    "gemma2": (
        "vocab = 24  hidden = 8  heads = 4  kv_heads = 2  head_dim = 4  ffn = 16  pairs = 4",
        "vocab, heads, kv_heads, ffn",
        "pairs",
    ),
    "llama3_2": (
        "vocab = 24  hidden = 8  heads = 4  kv_heads = 2  ffn = 16  layers = 4",
        "vocab, heads, kv_heads, ffn",
        "layers",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_h2"])
@pytest.mark.parametrize("file", MODELS)
def test_models_with_a_tied_embedding(file: str, schedule: str) -> None:
    program, model = compiled(of_model(file, *MODELS[file], schedule, pp=2))
    assert dict(pipeline_of(program).param_stages)["wte"] == (
        0,
        len(pipeline_of(program).stage_to_rank) - 1,
    )
    assert prove(program, model).bound <= BOUND


# ---- sizes


def test_small_pipelines_have_the_plans_kinds_of_stages() -> None:
    case = small(piped(TIED, "1f1b", 4, layers=8, stages="0, 4, 4, 0"), 1)
    assert pipeline_of(case.program).layers == (0, 2, 0)
    assert dict(pipeline_of(case.program).param_stages)["wte"] == (0, 2)


def test_copies_are_shared_among_as_many_kinds_of_ranks() -> None:
    """On two ranks, those of the first and the last stage would be all."""
    text = piped("captured matrix", "1f1b", 4).replace("@ head[hidden -> vocab]", "@ wte")
    program, model = compiled(text)
    assert params_on_several_ranks(pipeline_of(program)) == {"wte": "wte", "w": "w"}
    assert [mesh["pp"] for mesh in meshes(program)] == [3, 3]
    prove(program, model)


def test_small_pipelines_are_cut_where_other_values_cross() -> None:
    """What crosses the plan's cuts crosses all those of the second mesh; on the first there may
    be too few cuts.
    """
    text = unlike("1f1b  stages = [1, 1, 2, 2, 1]").replace("pp = 2", "pp = 5")
    program, _ = compiled(text)
    found = [small(text, mesh).program for mesh in (0, 1)]
    assert [pipeline_of(each).layers for each in found] == [(3, 3), (1, 1, 2, 3)]
    assert [[len(values) for values in crossing(each, pipeline_of(each))] for each in found] == [
        [1],
        [2, 1, 1],
    ]
    assert (covers(program, found[0]), covers(program, found[1])) == (False, True)


@pytest.mark.parametrize("schedule", [CHUNKS, "zb_h1", "zbv"])
def test_what_crosses_differs_from_cut_to_cut(schedule: str) -> None:
    prove(*compiled(unlike(schedule)))


@pytest.mark.parametrize("what", ["held", "rows", "stage_to_rank"])
def test_stages_at_the_plans_sizes_are_those_of_its_forward(what: str) -> None:
    program, model = compiled(piped(TIED))
    pipeline, rows = pipeline_of(program), rows_of(program)
    wrong = {
        "held": evolve(
            pipeline, param_stages=tuple((name, (0,)) for name, _ in pipeline.param_stages)
        ),
        "rows": evolve(pipeline, schedule=evolve(rows, rows=(rows.rows[0][:-1], *rows.rows[1:]))),
        "stage_to_rank": evolve(pipeline, stage_to_rank=(1, 0)),
    }
    with pytest.raises(AssertionError, match="the stages are not those"):
        prove(evolve(program, pipeline=wrong[what]), model)


# ---- what a stage does


def test_a_stage_waits_for_weights_alone() -> None:
    """Of a zero-bubble schedule, the weight part is the gradients of matrices, and every op is
    in one part.
    """
    program = small(piped(TIED, "zb_h1")).program
    (region,) = [stmt for stmt in program.region.body if isinstance(stmt, Region)]
    types = {value.name: value.type for op in program.ops for value in op.outputs}
    types |= {arg.value.name: arg.value.type for inner in _regions(region) for arg in inner.args}
    for stage in stage_programs(program):
        both = halves(stage.backward, types)
        then = [op for op in walk(both.weight.body) if op.kind not in ("add", "coerce")]
        assert {dict(op.attrs).get("of", op.kind) for op in then} <= {"contract", "embedding"}
        assert all("w" in op.outputs[0].name for op in then)
        names = Counter(
            v.name
            for part in (both.input, both.weight)
            for op in walk(part.body)
            for v in op.outputs
        )
        assert names == Counter(v.name for op in walk(stage.backward.body) for v in op.outputs)


@pytest.mark.parametrize(
    ("name", "head"), [("", "linear_softmax_stats"), (", vocabulary whole", "linear_cross_entropy")]
)
def test_the_weight_of_a_head_waits_with_its_bias(name: str, head: str) -> None:
    program = small(piped(f"fused, head with a bias{name}", "zb_h1")).program
    (region,) = [stmt for stmt in program.region.body if isinstance(stmt, Region)]
    types = {value.name: value.type for op in program.ops for value in op.outputs}
    types |= {arg.value.name: arg.value.type for inner in _regions(region) for arg in inner.args}
    last = halves(stage_programs(program)[-1].backward, types)
    now, then = (
        [op.names("wrt") for op in walk(part.body) if dict(op.attrs).get("of") == head]
        for part in (last.input, last.weight)
    )
    assert (now, then) == ([("x",)], [("w", "bias")])


def _regions(region: Region) -> list[Region]:
    inner = [stmt for stmt in region.body if isinstance(stmt, Region)]
    return [region, *(each for stmt in inner for each in _regions(stmt))]


def test_what_a_rank_does_not_hold_is_noise() -> None:
    program = small(piped(TIED)).program
    world, n = SimulatedMesh.of_program(program), Field(2, len(program.axes))
    for param in program.params:
        x = Tensor(
            param.type.dims, np.full((1, *world.lead, *world.shape(param.type)), 7, np.uint64)
        )
        mask = np.broadcast_to(ownership_mask(program, world, param.name).array > 0, x.array.shape)
        # some rank of the stages' axis, outermost, holds each element
        assert mask.any(axis=1).all(), param.name
        found = with_noise(program, world, param.name, x, n)
        assert ((found.array == 7) == mask).all(), param.name
        assert (copy_from_owner(program, world, param.name, found).array == 7).all(), param.name
    assert not ownership_mask(program, world, "wq").array.all()


def edited(case: Case, kind: str, **attrs: object) -> Case:
    """The case with other attributes of all ops of a kind that have these."""

    def of(op: Op) -> Op:
        own = dict(op.attrs)
        if op.kind != kind or not attrs.keys() & own.keys():
            return op
        return evolve(op, attrs=tuple((own | attrs).items()))

    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(
            evolve(s, body=body(s.body)) if isinstance(s, Region) else of(s) for s in stmts
        )

    region = case.program.region
    return evolve(case, program=evolve(case.program, region=evolve(region, body=body(region.body))))


def test_sums_over_stages_are_told_apart() -> None:
    """A copy is counted by the first that holds it, or by another, but not by one that holds
    none.
    """
    case = small(piped(TIED), 1)
    n = Field(4, len(case.program.axes))
    assert unequal(case, n) == unequal(edited(case, "sum_squares", once=("2",)), n) == []
    assert unequal(edited(case, "sum_squares", once=("1",)), n) == ["norm"]
    assert unequal(edited(case, "coerce", among=("0", "1")), n) == [
        "norm",
        "gradient of wte",
        "updated wte",
    ]


# ---- rows that are wrong


def few(schedule: str, pp: int = 2) -> str:
    """A plan without tensor parallelism, with a tied embedding."""
    return piped("data", schedule, pp).replace("@ head[hidden -> vocab]", "@ wte")


@cache
def bench(schedule: str, mesh: int) -> Bench:
    return Bench(small(few(schedule), mesh), Field(2, 2))


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("mesh", [0, 1], ids=["pp 2", "pp 3"])
@pytest.mark.parametrize("schedule", MUTATED)
def test_every_mutant_of_rows_is_killed(schedule: str, mesh: int, part: int) -> None:
    """Of three mutants one."""
    on = bench(schedule, mesh)
    made = [*row_mutants(on.case.program)]
    assert [mutant.what for mutant in made[part::3] if not on.wrong(mutant)] == []
    assert {mutant.family for mutant in made} == {*FAMILIES, EVALUATED, FREED}


EXPECTED = {
    "actions exchanged": ("`0F0` and `0SEND_F0` of rank 0 exchanged", Fate.SHAPES),
    "another microbatch": ("`1F1` of rank 1 in place of `1F0`", Fate.SHAPES),
    "action done twice": ("`1W0` of rank 1 done twice", Fate.SHAPES),
    "action left out": ("`1W0` of rank 1 left out", Fate.VALUES),
    "message to or from elsewhere": ("`0SEND_B0` of rank 0 in place of `0SEND_F0`", Fate.SHAPES),
    "message lost": ("`0SEND_F0` not received", Fate.SHAPES),
    "message doubled": ("`1SEND_B0` sent and received twice", Fate.SHAPES),
    "message of another microbatch": ("`0SEND_F0` of rank 0 after `0SEND_F1`", Fate.VALUES),
    FREED: ("what `0I0` of rank 0 takes freed before it", Fate.SHAPES),
}
EVALUATIONS = {
    "`0F0` and `0SEND_F0` of rank 0 exchanged in evaluation": Fate.SHAPES,
    "`1F2` of rank 1 left out in evaluation": Fate.VALUES,
    "`0SEND_F0` not received in evaluation": Fate.SHAPES,
    "`0RECV_B1` done too in evaluation": Fate.SHAPES,
    "`1I2` done too in evaluation": Fate.SHAPES,
    "`0SEND_F0` of rank 0 after `0SEND_F1` in evaluation": Fate.VALUES,
}


@pytest.mark.parametrize("family", [*FAMILIES, FREED])
def test_each_family_has_the_mutant_that_is_expected_of_it(family: str) -> None:
    what, fate = EXPECTED[family]
    on = bench("zb_h1", 0)
    (mutant,) = [each for each in row_mutants(on.case.program) if each.what == what]
    assert (mutant.family, on.wrong(mutant)) == (family, fate)


def test_mistakes_in_evaluation_alone_are_found() -> None:
    on = bench("zb_h1", 0)
    made = {
        mutant.what: mutant for mutant in row_mutants(on.case.program) if mutant.family == EVALUATED
    }
    assert {what: on.wrong(made[what]) for what in EVALUATIONS} == EVALUATIONS


@pytest.mark.sample(3)
@pytest.mark.parametrize("mesh", [0, 1], ids=["pp 2", "pp 3"])
@pytest.mark.parametrize("schedule", [*MUTATED, "zbv"])
def test_neighbours_change_places_unless_one_needs_the_other(schedule: str, mesh: int) -> None:
    """The schedules' own check refuses exactly those rows that go wrong, run action by action, or
    that may hang.

    Rows may hang, though all is computed right, only where two messages were exchanged.
    """
    on = bench(schedule, mesh)
    kinds = Counter[tuple[bool, bool]]()
    for rows, exchanged in neighbours(rows_of(on.case.program)):
        pipeline = evolve(pipeline_of(on.case.program), schedule=rows)
        mutant = Mutant("", "", "", evolve(on.case.program, pipeline=pipeline))
        right, hangs = on.runs(mutant) is None, may_hang(rows)
        found = problems(rows)
        assert (not found) == (right and not hangs), rows
        if right and hangs:
            assert all(action.work.is_message for action in exchanged), rows
            assert all(" waits for " in problem.why for problem in found), rows
        kinds[right, right and hangs] += 1
    assert {(True, False), (False, False)} <= {*kinds}
    assert kinds[True, True] or (schedule, mesh) == ("zbv", 0), (
        "some exchange makes rows wait for each other"
    )


def may_hang(schedule: Schedule) -> bool:
    """Whether there is no order of groups of messages of which every row is a part.

    NCCL does what a rank begins one after the other, and a message only when both its ranks have
    come to it.
    """
    order = TopologicalSorter[object]()
    of = {
        action: [get_payload(each) for each in group]
        for group in schedule.groups
        for action in group
    }
    for row in schedule.rows:
        begun = [frozenset(of.get(it, [get_payload(it)])) for it in row if it.work.is_message]
        for before, after in pairwise(dict.fromkeys(begun)):
            order.add(after, before)
    try:
        order.prepare()
    except CycleError:
        return True
    return False


def neighbours(schedule: Schedule) -> list[tuple[Schedule, tuple[Action, Action]]]:
    """The rows with two neighbouring actions exchanged, their groups made anew, and these two,
    for each two.
    """
    found: list[tuple[Schedule, tuple[Action, Action]]] = []
    for rank, row in enumerate(schedule.rows):
        for at in range(len(row) - 1):
            wrong: tuple[Action, ...] = (*row[:at], row[at + 1], row[at], *row[at + 2 :])
            rows = evolve(schedule, rows=(*schedule.rows[:rank], wrong, *schedule.rows[rank + 1 :]))
            grouped = evolve(rows, groups=message_groups(cell_table(rows)))
            found.append((grouped, (row[at], row[at + 1])))
    return found


@pytest.mark.long
def test_the_audit_of_a_program_with_stages() -> None:
    found = audit(*compiled(few("1f1b", 3)))
    assert [v.mutant.what for v in found.of(Fate.EQUIVALENT, Fate.MISSED)] == []
    assert {
        "copies of several stages counted twice",
        "summed over stages without a copy",
        *FAMILIES,
        EVALUATED,
        FREED,
    } <= {v.mutant.family for v in found.verdicts}
    what = {v.mutant.what: v.fate for v in found.verdicts}
    assert what["all_reduce of loss.1 over pp x dp done over dp instead"] is Fate.VALUES


# ---- what is said


def test_a_row_that_stops_is_told_with_its_rank_and_cell() -> None:
    on = bench("1f1b", 0)
    (mutant,) = [
        each for each in row_mutants(on.case.program) if each.what == "`1B0` of rank 1 left out"
    ]
    (said,) = unequal(evolve(on.case, program=mutant.program), Field(2, 2))
    assert (
        said
        == "rank 1, cell 3, `1SEND_B0`: the gradient of what leaves of stage 0, microbatch 0 is"
        " not there"
    )


def test_what_all_stages_would_do_at_once_is_refused() -> None:
    wrong = edited(small(piped("data, tensor, sequence")), "coerce", axes=("pp", "tp"))
    (said,) = unequal(wrong, Field(2, 3))
    assert said.endswith("is computed by all stages at once, which work on different microbatches")


def test_what_only_stages_show_is_said_of_them() -> None:
    program, model = compiled(piped(TIED))
    wrong = edited(Case(program, model), "sum_squares", once=()).program
    with pytest.raises(PlanError) as caught:
        verify(wrong, model)
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (
        "E0701",
        "on pp 2 alone the step is not that of the model",
    )
