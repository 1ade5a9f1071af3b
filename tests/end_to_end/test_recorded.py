"""Records of emitted programs (`SCALEC_RECORD=1`) are their plan, call for call; and no planted
difference passes.
"""

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.forked_ranks import plain_groups
from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from helpers.oracle.recording import EVALUATIONS, recorded
from helpers.programs import import_module, load_program, write_program
from scalec.compiler.proof.recorded import compare
from scalec.compiler.proof.recorded.files import Call, Record, RecordError, Stretch
from scalec.compiler.proof.recorded.order import disorder
from scalec.runtime import Mesh
from scalec.runtime.debug.record import Recorder
from scalec.runtime.train.same_state import SameState
from scalec.testing import plans

CASES = [
    Case(tp=2, microbatches=3, clip=1.0),
    Case(dp=2, tp=2, sp=True, microbatches=2, gathered="regather", clip=1.0),
    Case(dp=2, tp=2, sp=True, vocab=False, precision="bf16"),
    Case(dp=2, tp=2, sp=True, microbatches=2, recompute="full"),
    Case(dp=2, tp=2, sp=True, gathered="regather", recompute="selective(attention, silu, rmsnorm)"),
    Case(tp=4, kv=1, model="parallel"),
    Case(cp=4, how="as zigzag via ring", kv=1, recompute="full", state="zero 3 over cp"),
    Case(cp=2, uly=2, how="as zigzag via ring", kv=4, microbatches=2),
    Case(cp=2, tp=2, sp=True, how="as zigzag", gathered="regather", clip=1.0),
    Case(cp=2, uly=2, how="as zigzag", kv=4, kernels="triton"),
    Case(tp=2, sp=True, model="every", recompute="full"),
    Case(dp=2, tp=2, sp=True, state="zero 1 over dp", precision="bf16"),
    Case(dp=2, tp=2, state="zero 1 over dp", precision="fp16  reduce = bf16"),
    Case(tp=4, sp=True, kv=2, model="tied", optimizer="adamw"),
    Case(dp=2, tp=2, sp=True, microbatches=2, kernels="triton", recompute="full", z=0.01),
    Case(dp=2, tp=2, vocab=False, kernels="triton", state="zero 3 over dp", gathered="regather"),
]
PLANTED = Case(dp=2, tp=2, sp=True, microbatches=2, clip=1.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_record_is_the_plan(case: Case, tmp_path: Path) -> None:
    found = recorded(harness.load_case(case, tmp_path), tmp_path, "--steps 2")
    assert found.equal, found.lines()
    assert (found.steps, found.evaluations, found.ranks, found.backend) == (
        2,
        EVALUATIONS,
        case.ranks,
        "gloo",
    )
    listed = json.loads((tmp_path / "plan.json").read_text())["collectives"]
    assert found.calls == sum(each["count"] for each in listed if each["ranks"] > 1) > 0
    assert (
        f"equal to the plan, call for call: {found.calls} calls a step on each rank, in its order"
        in found.lines()
    )


def test_what_the_sanitizer_compares_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALEC_SANITIZE", "1")
    found = recorded(harness.load_case(PLANTED, tmp_path), tmp_path, "--steps 1")
    assert found.equal, found.lines()


def test_one_rank_communicates_nothing(tmp_path: Path) -> None:
    found = recorded(harness.load_case(Case(), tmp_path), tmp_path, "--steps 1")
    assert found.equal, found.lines()
    assert (
        f"tiny, 1 step and {EVALUATIONS} evaluations on 1 rank, no backend, torch" in found.lines()
    )


@pytest.mark.long
@settings(
    max_examples=6,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(plans())
def test_random_plans_communicate_in_the_order_of_the_ir(
    tmp_path_factory: pytest.TempPathFactory, plan: str
) -> None:
    """On groups that only pretend, one rank after another: order needs no numbers."""
    folder = tmp_path_factory.mktemp("random")
    module = load_program(plan, folder)
    world = prod(module.PLAN.mesh.values())
    with plain_groups():
        for rank in range(world):
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            try:
                _pretend(module, folder / "recorded")
            finally:
                dist.destroy_process_group()
    shutil.copy(folder / "plan.json", folder / "recorded")
    found = compare(folder / "recorded")
    assert found.equal, found.lines()


def _pretend(module: ModuleType, folder: Path) -> None:
    """A recorded step of this rank."""
    plan = module.PLAN
    model, state = module.build(Mesh(plan.mesh))
    state.initialise(0)
    shapes = [[plan.global_batch, plan.seq][: len(given.dims)] for given in plan.inputs.values()]
    inputs = [torch.zeros(shape, dtype=torch.int64) for shape in shapes]
    with Recorder(folder, plan, 0) as recorder:
        recorder.of("train", module.train_step)(
            model, state, harness.local_batch(plan, *inputs), 0.01
        )


# ---- a program that does not do what its plan says: (line, what it becomes, what is found)

FIRST = 'all_reduce_(gradients["matrices"], dp)'
SECOND = 'all_reduce_(gradients["vectors"], dp_tp)'
ALONE = '"""The loss alone: the forward of `train_step`."""'
TURNED = """
    import torch.distributed as dist
    starts = [
        lambda: dist.all_reduce(gradients["matrices"], group=dp.group, async_op=True),
        lambda: dist.all_reduce(gradients["vectors"], group=dp_tp.group, async_op=True),
    ]
    for work in [start() for start in (starts[::-1] if mesh.rank("dp") else starts)]:
        work.wait()
"""
DEFECTS = {
    "missing": (
        SECOND,
        "pass",
        """  ranks 0, 1, 2, 3, step 1, call 50: a call is missing
    plan      all_reduce (sum) of f64[80] over ranks 0, 1, 2, 3: `g_vectors.1`, tiny.scale:1
    recorded  all_reduce (sum) of f64[] over ranks 0, 1""",
    ),
    "missing_in_forward": (
        "sum_exp = all_reduce(sum_exp, self.tp)",
        "pass",
        """, step 1, call 14: a call is missing
    plan      all_reduce (sum) of f64[8, 2] over ranks 0, 1 in forward: `label_logit.1`, tiny.scale:18
    recorded  reduce_scatter (sum) of f64[8, 2, 16] over ranks 0, 1""",
    ),
    "too_many": (
        FIRST,
        f"{FIRST}; all_reduce_(loss, dp)",
        """, step 1, call 50: a call too many
    plan      all_reduce (sum) of f64[80] over ranks 0, 1, 2, 3: `g_vectors.1`, tiny.scale:1
    recorded  all_reduce (sum) of f64[] over ranks 0, 2""",
    ),
    "at_the_end": (
        "state.update(",
        "all_reduce_(grad_norm, dp); state.update(",
        """, step 1, call 52: a call too many
    plan      no further call
    recorded  all_reduce (sum) of f64[] over ranks 0, 2""",
    ),
    "group": (
        SECOND,
        SECOND.replace("dp_tp)", "dp)"),
        """, step 1, call 50: another group
    plan      all_reduce (sum) of f64[80] over ranks 0, 1, 2, 3: `g_vectors.1`, tiny.scale:1
    recorded  all_reduce (sum) of f64[80] over ranks 0, 2""",
    ),
    "dtype": (
        SECOND,
        SECOND.replace("]", "].bfloat16()"),
        """, step 1, call 50: another dtype
    plan      all_reduce (sum) of f64[80] over ranks 0, 1, 2, 3: `g_vectors.1`, tiny.scale:1
    recorded  all_reduce (sum) of bf16[80] over ranks 0, 1, 2, 3""",
    ),
    "shape": (SECOND, SECOND.replace("]", "][1:]"), ", step 1, call 50: another shape\n"),
    "maximum": (
        "sum_exp = all_reduce(sum_exp, self.tp)",
        'sum_exp = all_reduce(sum_exp, self.tp, op="max")',
        """, step 1, call 13: another reduction
    plan      all_reduce (sum) of f64[8, 2] over ranks 0, 1 in forward: `sum_exp.1`, tiny.scale:18
    recorded  all_reduce (max) of f64[8, 2] over ranks 0, 1""",
    ),
    "in_evaluation": (
        ALONE,
        f'{ALONE}\n    all_reduce_(torch.zeros(1), state.mesh.axis("tp"))',
        """, evaluation after step 1, call 1: a call too many
    plan      all_reduce (sum) of i64[] over ranks 0, 2: `num_tokens.1`, tiny.scale:1
    recorded  all_reduce (sum) of f32[1] over ranks 0, 1""",
    ),
    "order": (
        FIRST,
        TURNED.strip(),
        """  ranks 2, 3, step 1, call 49: another order
    plan      all_reduce (sum) of f64[2432] over ranks 0, 2: `g_matrices.1`, tiny.scale:1
    recorded  all_reduce (sum) of f64[80] over ranks 0, 1, 2, 3
not one order on all ranks:
  ranks wait for each other for ever
    rank 0, step 1: all_reduce (sum) of f64[2432] over ranks 0, 2
    rank 1, step 1: all_reduce (sum) of f64[2432] over ranks 1, 3
    rank 2, step 1: all_reduce (sum) of f64[80] over ranks 0, 1, 2, 3
    rank 3, step 1: all_reduce (sum) of f64[80] over ranks 0, 1, 2, 3""",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_difference_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the record alone: a run whose copies have come to differ would end before its first
    save.
    """
    monkeypatch.setattr(SameState, "require", lambda *_: None)
    line, instead, says = DEFECTS[name]
    path = write_program(plan_text(PLANTED), tmp_path) / "train.py"
    text = path.read_text()
    assert line in text
    text = text.replace(line, instead, 1)
    path.write_text(text.replace(SECOND, "pass", 1) if name == "order" else text)
    found = recorded(import_module(path), tmp_path, "--steps 1")
    assert not found.equal
    assert says in found.lines(), found.lines()
    assert bool(found.disorder) == (name == "order")


# ---- a record that is not whole, or not of this run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of two steps on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    assert recorded(harness.load_case(Case(tp=2), folder), folder, "--steps 2").equal
    return folder / "runs/tiny/recorded"


def _replaced(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "rank00001.jsonl"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


UNREADABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no_plan": (
        lambda it: (it / "plan.json").unlink(),
        "/plan.json: copy the one here that was compiled together",
    ),
    "no_json": (lambda it: (it / "plan.json").write_text("{"), "plan.json is not JSON: "),
    "no_account": (
        lambda it: (it / "plan.json").write_text("{}"),
        "is not the account of a compiled plan",
    ),
    "earlier": (
        lambda it: (it / "plan.json").write_text(
            (it / "plan.json").read_text().replace('"loops"', '"count"')
        ),
        "plan.json is of an earlier scalec: compile the plan again",
    ),
    "earlier_turns": (
        lambda it: (it / "plan.json").write_text(
            (it / "plan.json").read_text().replace('"ahead"', '"x"')
        ),
        "plan.json is of an earlier scalec: compile the plan again",
    ),
    "a_rank": (
        lambda it: (it / "rank00001.jsonl").unlink(),
        "has no record of rank 1: copy their files here",
    ),
    "all_ranks": (
        lambda it: [path.unlink() for path in it.glob("rank*")],
        "has no record of ranks 0, 1: run the program with SCALEC_RECORD=1",
    ),
    "empty": (
        lambda it: (it / "rank00001.jsonl").write_text(""),
        "is empty: rank 1 ended before it began",
    ),
    "plan": (_replaced("tiny", "gpt"), "is of another plan: its plan is gpt, not tiny"),
    "mesh": (
        _replaced('"tp": 2', '"tp": 4'),
        "is of another plan: its mesh is {'dp': 1, 'tp': 4}, not {'dp': 1, 'tp'",
    ),
    "rank": (_replaced('"rank": 1', '"rank": 0'), "its rank is 0, not 1"),
    "run": (_replaced('"run": ""', '"run": "x"'), "ranks 0 and 1 recorded different runs"),
    "text": (_replaced('{"step": 1', "oops"), "rank00001.jsonl:2 is not a line of a record"),
    "field": (_replaced('"op"', '"oops"'), "is damaged: 'op'"),
    "lost": (_replaced('"order": 3', '"order": 4'), "is damaged: call 3 is missing"),
    "count": (_replaced('"calls": ', '"calls": 1'), "is damaged: train 1 has "),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_a_record_of_the_plan_is_refused(
    name: str, whole: Path, tmp_path: Path
) -> None:
    change, says = UNREADABLE[name]
    folder = shutil.copytree(whole, tmp_path / "recorded")
    change(folder)
    with pytest.raises(RecordError) as raised:
        compare(folder)
    assert says in str(raised.value)


def test_sizes_of_parts_are_compared_with_the_plan_and_with_those_of_other_ranks(
    whole: Path, tmp_path: Path
) -> None:
    """Ranks that meet in a rotation each have their own: what one sends another is what that
    has from it.
    """
    folder = shutil.copytree(whole, tmp_path / "recorded")
    _replaced('"op": "all_reduce"', '"splits": [[1, 0], [0, 1]], "op": "all_reduce"')(folder)
    found = compare(folder)
    (difference,) = found.differences
    assert difference.recorded is not None
    assert difference.recorded.splits == ((1, 0), (0, 1))
    assert found.disorder[0] == "ranks 0, 1 meet with different calls"


def _cut(folder: Path, lines: int, extra: str = "") -> None:
    """Leaves the first lines of rank 1's record, as if it had died there."""
    path = folder / "rank00001.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]) + extra)


def test_a_rank_that_died_is_named_with_the_call_that_the_others_wait_in(
    whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "recorded")
    _cut(folder, 6, '{"step": 1, "ph')
    found = compare(folder)
    assert not found.equal
    assert (
        "  rank 1, step 1, call 6: the record ends here\n    plan      all_reduce " in found.lines()
    )
    assert "    recorded  no call\n" in found.lines()
    assert "    rank 1 has no further call" in found.lines()


def test_a_rank_that_died_between_steps_is_named(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "recorded")
    lines = (folder / "rank00001.jsonl").read_text().splitlines()
    _cut(folder, next(i for i, line in enumerate(lines) if '"calls"' in line) + 1)
    assert "  rank 1, step 2, call 1: the record ends before it" in compare(folder).lines()


def test_without_steps_nothing_is_equal(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "recorded")
    for path in folder.glob("rank*"):
        path.write_text(path.read_text().splitlines()[0] + "\n")
    found = compare(folder)
    assert not found.equal
    assert found.lines().endswith("no step was recorded")


# ---- one order


def _ran(*calls: list[tuple[str, tuple[int, ...]]]) -> list[Record]:
    """Records of ranks that made `calls`, (op, group) each."""
    made = [tuple(Call(op, "", group, (), "f32") for op, group in rank) for rank in calls]
    return [
        Record(rank, "", "gloo", "", (Stretch("train", 1, each, whole=True),))
        for rank, each in enumerate(made)
    ]


def test_disorder() -> None:
    both, outer = (0, 1), (0, 1, 2)
    gather, reduce = "all_gather", "all_reduce"
    assert (
        disorder(
            _ran(
                [(gather, both), (reduce, outer)],
                [(gather, both), (reduce, outer)],
                [(reduce, outer)],
            )
        )
        == ()
    )
    assert disorder(_ran([(gather, both), (reduce, both)], [(reduce, both), (gather, both)])) == (
        "ranks 0, 1 meet with different calls",
        "  rank 0, step 1: all_gather of f32[] over ranks 0, 1",
        "  rank 1, step 1: all_reduce of f32[] over ranks 0, 1",
    )
    turned = _ran(
        [(gather, both), (gather, outer)], [(gather, outer), (gather, both)], [(gather, outer)]
    )
    assert disorder(turned)[0] == "ranks wait for each other for ever"
    assert len(disorder(turned)) == 4


def test_disorder_in_a_ring_that_no_two_ranks_show() -> None:
    """Each pair of ranks agrees on what it shares; the three together wait for ever."""
    ring = _ran(
        [("x", (0, 1)), ("x", (0, 2))],
        [("x", (1, 2)), ("x", (0, 1))],
        [("x", (0, 2)), ("x", (1, 2))],
    )
    assert disorder(ring)[0] == "ranks wait for each other for ever"
