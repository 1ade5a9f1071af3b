"""Communication and memory of a pipeline's ranks, by hand on a small plan, and how they are
shown.
"""

import json
import re
from pathlib import Path

import pytest

from helpers.uneven_stages import unlike
from helpers.zero_plans import HIDDEN, TURN, VOCAB, compiled, plan_text
from scalec.compiler import cli
from scalec.compiler.analysis.communication import collectives, evaluation, places
from scalec.compiler.analysis.link_traffic import crosses, get_sent_bytes
from scalec.compiler.analysis.memory import accounts
from scalec.compiler.analysis.stage_program import rank_programs
from scalec.compiler.emit import emit
from scalec.compiler.ir import Program
from scalec.compiler.reports.explain import explain_collectives, memory
from scalec.compiler.reports.summary import communication
from scalec.compiler.syntax.source import Source

TABLE = VOCAB * HIDDEN  # elements of the embedding, and of the head
CROSSING = 4 * 4 * HIDDEN  # bytes of one microbatch's x: 4 places of a row


def text(layers: list[int], settings: str = "") -> str:
    """The plan in as many stages, each on a rank of its own, with two ranks for data."""
    return (
        plan_text("zero 1 over dp")
        .replace(
            "mesh { dp = 2 }",
            f"mesh {{ pp = {len(layers)}  dp = 2 }}\npipeline {{ schedule = 1f1b  stages ="
            f" {layers} }}",
        )
        .replace("batch over dp", "batch over dp  layers over pp")
        .replace("steps = 1\n", f"steps = 1  {settings}\n")
    )


def program(layers: list[int], settings: str = "") -> Program:
    return compiled(text(layers, settings))


def test_a_rank_has_its_own_parameters() -> None:
    of = program([3, 2])
    assert [sum(map(own.elements, (p.type for p in own.params))) for own in rank_programs(of)] == [
        TABLE + 3 * TURN,
        2 * TURN + TABLE,
    ]
    for rank, own in enumerate((TABLE + 3 * TURN, 2 * TURN + TABLE)):
        moved = [each for each in collectives(of, rank) if each.use == "gradients"]
        assert sum(each.elements * each.count for each in moved) == own
        moved = [each for each in collectives(of, rank) if each.use == "parameters"]
        assert sum(each.elements * each.ranks for each in moved) == own
        buckets = accounts(of)[rank].buckets
        assert (
            sum(it.parameters for it in buckets) == sum(it.gradients for it in buckets) == 4 * own
        )


def test_messages() -> None:
    """Of three stages the one between has two neighbours; each way one message for each of
    three microbatches.
    """
    of = program([2, 2, 1])
    found = [
        {
            (each.op, each.where, each.peer): (each.count, each.bytes)
            for each in collectives(of, r)
            if each.use == "stages"
        }
        for r in places(of)
    ]
    each = (3, CROSSING)
    assert found == [
        {("send", "forward", 1): each, ("receive", "backward", 1): each},
        {("receive", "forward", 0): each, ("send", "forward", 2): each}
        | {("receive", "backward", 2): each, ("send", "backward", 0): each},
        {("receive", "forward", 1): each, ("send", "backward", 1): each},
    ]
    assert {
        each.where for r in places(of) for each in evaluation(of, r) if each.peer is not None
    } == {"forward"}


def test_messages_are_of_what_crosses_their_cut() -> None:
    """Of x and s each rank of tp has 4 places of 16 features, of y 8 of 12 and of z 4 of 6, for
    two rows in 8 bytes.
    """
    x, y, z = 2 * 4 * 16 * 8, 2 * 8 * 12 * 8, 2 * 4 * 6 * 8
    cuts, of = [[x, x], [x, x], [y], [y], [z], [z], [z]], compiled(unlike())
    listed = [each for r in places(of) for each in collectives(of, r) if each.use == "stages"]
    for stage in range(8):
        ahead, back = cuts[stage] if stage < 7 else [], cuts[stage - 1] if stage else []
        found = {(it.op, it.where): [] for it in listed}
        for it in listed:
            found[it.op, it.where] += [it.bytes] if it.stage == stage else []
        assert found == {
            ("send", "forward"): ahead,
            ("receive", "backward"): ahead,
            ("receive", "forward"): back,
            ("send", "backward"): back,
        }
    assert {each.count for each in listed} == {4}


def test_a_sum_over_some_ranks_is_of_these() -> None:
    tied = text([2, 1, 1, 1]).replace("head[hidden -> vocab]", "wte")
    among = [
        [it.among for it in collectives(compiled(tied), rank) if it.among] for rank in range(4)
    ]
    assert among == [[(0, 3)], [], [], [(0, 3)]]


def test_turns_that_are_done_again_count_from_the_first_stage() -> None:
    """Of five layers 0, 2 and 4: of the last stage's two, 3 and 4, the second."""
    of = compiled(
        text([3, 2], "recompute = every(2, layers)")
        .replace("dp = 2 }", "dp = 2  tp = 2 }")
        .replace("layers over pp", "layers over pp  ffn over tp  seq over tp")
    )
    again = [[it.count for it in collectives(of, rank) if it.every == 2] for rank in (0, 1)]
    assert [{*counts} for counts in again] == [{3 * 2}, {3 * 1}]


def test_a_table_for_ranks_that_are_alike() -> None:
    shown = communication(program([2, 1, 1, 1]))
    assert re.findall(r"per step and rank (.+) of pp", shown) == ["0", "1, 2", "3"]
    sends = [line.split() for line in shown.splitlines() if line.startswith("send ")]
    assert sends == [
        ["send", "pp", "4", calls, size, "B"]
        for calls, size in (("3", "384"), ("6", "768"), ("3", "384"))
    ]


def test_links_of_two_ranks() -> None:
    """Four ranks of two each: two of them on each node of four."""
    of = program([2, 1, 1, 1])
    assert [crosses(of, ("pp",), 4, pair) for pair in ((0, 1), (1, 2), (3, 2))] == [
        False,
        True,
        False,
    ]


def test_the_rank_that_sends_most_is_shown() -> None:
    of = program([3, 2])
    shown = explain_collectives(of)
    assert "rank 0 of pp, which sends most, sends " in shown
    (row,) = re.findall(
        r"^send to rank 1 of pp +forward, 3 microbatches +3 +32 x f32 +384 B", shown, re.MULTILINE
    )
    assert row
    assert [sum(map(get_sent_bytes, collectives(of, rank))) for rank in (0, 1)] == sorted(
        (sum(map(get_sent_bytes, collectives(of, rank))) for rank in (0, 1)), reverse=True
    )


def test_plan_json_has_all_ranks() -> None:
    of = program([3, 2])
    said = json.loads(emit(of, Source("tiny.scale", text([3, 2])))["plan.json"])
    assert said["pipeline"]["stages"] == [
        {"rank": 0, "layers": {"layers": [0, 3]}},
        {"rank": 1, "layers": {"layers": [3, 5]}},
    ]
    assert said["pipeline"]["rows"][1].startswith("1RECV_F0 1F0")
    assert [len([it for it in said["collectives"] if it["rank"] == r]) for r in (0, 1)] == [
        len(collectives(of, rank)) for rank in (0, 1)
    ]
    most = max(accounts(of), key=lambda it: it.total)
    assert (said["memory"]["rank"], said["memory"]["peak"]["bytes"]) == (most.rank, most.total)


def test_memory_is_that_of_the_rank_that_needs_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = program([3, 2])
    most = max(accounts(of), key=lambda it: it.total)
    path = tmp_path / "tiny.scale"
    path.write_text(text([3, 2]))
    assert cli.main(("explain", "memory", str(path))) == 0
    shown = capsys.readouterr().out
    assert shown == memory(of) + "\n"
    assert f" on rank {most.rank} of pp, which needs most, " in shown
    assert "of microbatches in flight" in shown
