"""Records of pipelines' ranks (`SCALEC_RECORD=1`) are the plan: collectives, messages, order."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from helpers.oracle.recording import recorded
from helpers.programs import import_module, load_program, write_program
from helpers.uneven_stages import unlike
from scalec.compiler.proof.recorded.files import Call, Record, Stretch
from scalec.compiler.proof.recorded.order import disorder

SP = Case(pp=2, tp=2, sp=True, microbatches=4, layers=4, clip=0.05)
CASES = {
    "1f1b": SP,
    "uneven stages": replace(SP, layers=5, stages="[3, 2]", gathered="regather"),
    "interleaved": replace(
        SP, layers=5, schedule="interleaved_1f1b(chunks=2)", recompute="every(2, layers)"
    ),
    "weights apart": replace(SP, schedule="zb_h1", model="tied", gathered="regather"),
    "weights apart, done again": replace(
        SP, schedule="zbv", recompute="selective(attention, silu)"
    ),
    "weights apart, layers again": replace(SP, layers=5, schedule="zbv", recompute="full"),
    "tied over some ranks": Case(
        pp=4, microbatches=4, layers=5, model="tied", clip=0.05, optimizer="adamw"
    ),
    "shared state": Case(
        pp=2, dp=2, microbatches=4, layers=4, state="zero 1 over dp", optimizer="groups"
    ),
    "shared state of several stages": Case(
        pp=2,
        dp=2,
        microbatches=4,
        layers=5,
        state="zero 3 over dp",
        schedule="zbv",
        model="tied",
        precision="bf16",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_the_record_is_the_plan(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found = recorded(harness.load_case(case, tmp_path), tmp_path, "--steps 2")
    assert found.equal, found.lines()
    plan = json.loads((tmp_path / "plan.json").read_text())
    calls = [0] * case.pp
    for each in plan["collectives"]:
        calls[each["rank"]] += each["count"] * (each["ranks"] > 1)
    assert (found.calls, found.uniform) == (max(calls), len({*calls}) == 1)
    assert ("a step on each rank" in found.lines()) == found.uniform


@pytest.mark.long
def test_the_record_of_messages_that_differ_from_cut_to_cut(tmp_path: Path) -> None:
    found = recorded(load_program(unlike(), tmp_path), tmp_path, "--steps 2")
    assert found.equal, found.lines()


def test_the_rank_that_has_most_is_told_of(tmp_path: Path) -> None:
    """Of four ranks only the inner ones have two neighbours, and only the last one ends with a
    loss.
    """
    found = recorded(
        harness.load_case(CASES["tied over some ranks"], tmp_path), tmp_path, "--steps 1"
    )
    plan = json.loads((tmp_path / "plan.json").read_text())
    messages = [
        sum(it["count"] for it in plan["collectives"] if it["rank"] == r and "peer" in it)
        for r in range(4)
    ]
    assert messages == [8, 16, 16, 8]
    assert f"call for call: up to {found.calls} calls a step on a rank" in found.lines()


# ---- a program that does not do what its plan says: (what it becomes, what is found)

ONE = "0F0,0SEND_F0,0F1"
DEFECTS = {
    "later sent": (
        ONE,
        "0F0,0F1,0SEND_F0",
        """  ranks 0, 1, step 1, call 10: another order
    plan      send of f64[4, 2, 16] to rank 2 in forward: `x.1`, tiny.scale:20
    recorded  reduce_scatter (sum) of f64[8, 2, 16] over ranks 0, 1""",
    ),
    "not summed": (
        "loss = all_reduce_(loss, pp) * inv_num_tokens",
        "loss = loss * inv_num_tokens",
        "a call is missing\n    plan      all_reduce (sum) of f64[] over ranks 0, 2: `loss.3`",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_difference_is_found(name: str, tmp_path: Path) -> None:
    line, instead, says = DEFECTS[name]
    path = write_program(plan_text(SP), tmp_path) / "train.py"
    text, rows = path.read_text(), path.with_name("schedule.csv").read_text()
    assert line in text + rows
    changed = rows.replace(line, instead, 1)
    path.with_name("schedule.csv").write_text(changed)
    old, new = (sha256(each.encode()).hexdigest() for each in (rows, changed))
    path.write_text(text.replace(old, new).replace(line, instead, 1))
    found = recorded(import_module(path), tmp_path, "--steps 1")
    assert not found.equal
    assert says in found.lines(), found.lines()


# ---- messages of two ranks


def _sent(op: str, size: int, peer: int) -> Call:
    return Call(op, "", (0, 1), (size,), "f32", peer)


def _ran(*calls: list[Call]) -> list[Record]:
    """Records of ranks that made `calls`."""
    return [
        Record(rank, "", "gloo", "", (Stretch("train", 1, tuple(each), whole=True),))
        for rank, each in enumerate(calls)
    ]


def test_messages_of_two_directions_need_no_order() -> None:
    one = [_sent("send", 2, 1), _sent("receive", 3, 1), _sent("send", 4, 1)]
    other = [_sent("send", 3, 0), _sent("receive", 2, 0), _sent("receive", 4, 0)]
    assert disorder(_ran(one, other)) == ()


@pytest.mark.parametrize(
    ("received", "says"),
    [
        ([4, 2], ("step 1: f32[2]", "step 1: f32[4]")),
        ([2], ("step 1: f32[4]", "nothing")),
        ([], ("step 1: f32[2]", "nothing")),
    ],
)
def test_what_is_sent_is_received_in_its_order(received: list[int], says: tuple[str, str]) -> None:
    sent = [_sent("send", 2, 1), _sent("send", 4, 1)]
    assert disorder(_ran(sent, [_sent("receive", size, 0) for size in received])) == (
        "rank 1 does not receive what rank 0 sends",
        f"  rank 0, {says[0]}",
        f"  rank 1, {says[1]}",
    )


def test_how_a_message_is_shown() -> None:
    assert str(_sent("send", 2, 1)) == "send of f32[2] to rank 1"
    assert str(_sent("receive", 2, 0)) == "receive of f32[2] from rank 0"
