"""The collectives of a step, in order, where layers of a repeat gather and reduce by themselves."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import pytest
from attrs import asdict

from helpers.zero_plans import LAYERS, REST, TURN, compiled, plan_text, program
from scalec.compiler.analysis.collective import Collective
from scalec.compiler.analysis.communication import collectives, evaluation
from scalec.compiler.proof.recorded.plan import get_expected_calls

# ---- the list: (use, op, axes, what goes in, loops, calls), counted by hand

FORWARD, BACKWARD = ("microbatches", "layers"), ("microbatches", "layers.1")
ONCE = ("all_reduce", "dp", (), (), 1)
GATHERED = ("parameters", "all_gather", "dp", (REST // 2,), (), 1)
REDUCED = ("gradients", "reduce_scatter", "dp", (REST,), (), 1)
LISTS: dict[str, list[tuple[Any, ...]]] = {
    "zero 0 over dp": [
        ("totals", *ONCE),
        ("gradients", "all_reduce", "dp", (TURN,), BACKWARD, LAYERS),
        ("totals", *ONCE),
        ("gradients", "all_reduce", "dp", (REST,), (), 1),
    ],
    "zero 1 over dp": [
        ("totals", *ONCE),
        GATHERED,
        ("parameters", "all_gather", "dp", (TURN // 2,), ("layers",), LAYERS),
        ("gradients", "reduce_scatter", "dp", (TURN,), ("microbatches", "layers.2"), LAYERS),
        ("totals", *ONCE),
        REDUCED,
        ("totals", *ONCE),
    ],
    "zero 2 over dp": [
        ("totals", *ONCE),
        GATHERED,
        ("parameters", "all_gather", "dp", (TURN // 2,), ("layers",), LAYERS),
        ("gradients", "reduce_scatter", "dp", (TURN,), ("microbatches", "layers.2"), 3 * LAYERS),
        ("totals", *ONCE),
        REDUCED,
        ("totals", *ONCE),
    ],
    "zero 3 over dp": [
        ("totals", *ONCE),
        GATHERED,
        ("parameters", "all_gather", "dp", (TURN // 2,), FORWARD, 3 * LAYERS),
        ("parameters", "all_gather", "dp", (TURN // 2,), BACKWARD, 3 * LAYERS),
        ("gradients", "reduce_scatter", "dp", (TURN,), BACKWARD, 3 * LAYERS),
        ("totals", *ONCE),
        REDUCED,
        ("totals", *ONCE),
    ],
    "parameters, optimizer over dp": [
        ("totals", *ONCE),
        GATHERED,
        ("parameters", "all_gather", "dp", (TURN // 2,), FORWARD, 3 * LAYERS),
        ("parameters", "all_gather", "dp", (TURN // 2,), BACKWARD, 3 * LAYERS),
        ("gradients", "reduce_scatter", "dp", (TURN,), BACKWARD, LAYERS),
        ("totals", *ONCE),
        REDUCED,
        ("totals", *ONCE),
    ],
}


def row(it: Collective) -> tuple[Any, ...]:
    return it.use, it.op, "*".join(it.axes), it.shape, it.loops, it.count


@pytest.mark.parametrize("state", LISTS)
def test_the_list(state: str) -> None:
    listed = collectives(program(state))
    assert [row(it) for it in listed] == LISTS[state]
    once = [it for it in listed if it.use == "gradients" and it.loops and it.count == LAYERS]
    assert [it for it in listed if it.last] == once


def test_turns_gather_as_far_ahead_as_the_plan_says() -> None:
    for prefetch in (0, 2):
        listed = collectives(program(f"zero 3 over dp  prefetch = {prefetch}"))
        assert [it.ahead for it in listed if it.use == "parameters"] == [0, prefetch, prefetch]
    assert not any(it.ahead for it in collectives(program("zero 2 over dp  prefetch = 2")))


def test_a_reduction_stands_where_it_begins() -> None:
    (begun,) = (it for it in collectives(program("zero 1 over dp")) if it.last)
    assert (begun.where, begun.bucket, begun.value) == (
        "backward",
        "layers.matrices",
        "g_layers_matrices.1",
    )


def test_a_part_is_reduced_over_replicas_right_behind_its_scattering() -> None:
    for state, calls in (("zero 1 over dp", LAYERS), ("zero 3 over dp", 3 * LAYERS)):
        listed = collectives(program(state, mesh="replica = 2 dp = 4"))
        at = next(i for i, it in enumerate(listed) if it.use == "gradients")
        assert [row(it)[1:4] + row(it)[5:] for it in listed[at : at + 2]] == [
            ("reduce_scatter", "dp", (TURN,), calls),
            ("all_reduce", "replica", (TURN // 4,), calls),
        ]


def test_neighbours_with_the_same_turns_are_gathered_turn_by_turn_together() -> None:
    for axis, loops in (
        ("dp", [("layers",), ("layers",)]),
        ("replica", [("layers",), ("layers.1",)]),
    ):
        state = f'zero 1 over dp  group ups {{ params = ["up"]  zero 2 over {axis} }}'
        listed = collectives(program(state, mesh="replica = 2 dp = 2"))
        assert [
            it.loops for it in listed if it.use == "parameters" and it.where == "step" and it.loops
        ] == loops


def test_evaluation_gathers_as_the_step_does() -> None:
    for state, gathers in (("zero 0 over dp", 0), ("zero 1 over dp", 2), ("zero 3 over dp", 2)):
        listed = evaluation(program(state))
        assert len([it for it in listed if it.use == "parameters"]) == gathers
        assert len([it for it in listed if it.use == "totals"]) == 2
        assert not [it for it in listed if it.use == "gradients"]


# ---- the order of calls, written out of the list


def _each(
    value: str, loops: Sequence[str], *, last: bool = False, ahead: int = 0, every: int = 1
) -> dict[str, Any]:
    """An entry of plan.json."""
    entry = {
        "op": "all_gather",
        "maximum": False,
        "axes": ["dp"],
        "ranks": 2,
        "shape": [1],
        "dtype": "f32",
    }
    where = {"loops": [*loops], "last": last, "ahead": ahead, "every": every, "where": "step"}
    return {**entry, **where, "value": value, "line": "x:1"}


def _calls(dims: dict[str, int], *listed: dict[str, Any]) -> str:
    plan = {"mesh": {"dp": 2}, "dims": dims, "collectives": [*listed], "evaluation": []}
    return "".join(each.value for each in get_expected_calls(plan, 0)["train"])


def test_the_last_microbatch_begins_what_is_reduced_once() -> None:
    inside = ("microbatches", "layers")
    listed = [
        _each("a", inside),
        _each("r", inside, last=True),
        _each("e", ()),
        _each("x", inside[:1], last=True),
    ]
    assert _calls({"microbatches": 3, "layers": 2}, *listed[:3]) == "aa" + "aa" + "arar" + "e"
    assert _calls({"microbatches": 2, "layers": 2}, *listed[:2], listed[3]) == "aa" + "ararx"


def test_neighbours_in_one_loop_turn_together_others_one_after_the_other() -> None:
    dims = {"layers": 3}
    assert _calls(dims, _each("a", ["layers"]), _each("b", ["layers"])) == "ababab"
    assert _calls(dims, _each("a", ["layers"]), _each("b", ["layers.1"])) == "aaabbb"


def test_what_is_done_again_in_the_first_of_every_n_turns() -> None:
    """Backward goes from the last layer, number 4, to the first, number 0."""
    listed = [_each("a", ["layers"], every=2), _each("b", ["layers"])]
    assert _calls({"layers": 5}, *listed) == "ab" + "b" + "ab" + "b" + "ab"
    assert _calls({"layers": 4}, *listed) == "b" + "ab" + "b" + "ab"


def _begun(shape: Sequence[int], ahead: int, microbatches: int) -> Iterator[str]:
    """Gathers `g`, `h` and what else is done in each layer, `u`: a layer sees that its own and
    the next have begun.
    """
    for _ in range(microbatches):
        begun: set[tuple[str, int]] = set()
        for at in range(prod(shape)):
            for value in "gh":
                due = {(value, layer) for layer in range(at, min(at + ahead + 1, prod(shape)))}
                yield from value * len(due - begun)
                begun |= due
            yield "u"


@pytest.mark.parametrize("ahead", range(6))
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (3, 1)], ids=str)
def test_gathers_begin_ahead(shape: tuple[int, ...], ahead: int) -> None:
    names = ("outer", "inner")[: len(shape)]
    loops = ("microbatches", *names)
    listed = [_each("g", loops, ahead=ahead), _each("h", loops, ahead=ahead), _each("u", loops)]
    dims = {"microbatches": 2, **dict(zip(names, shape, strict=True))}
    assert _calls(dims, *listed) == "".join(_begun(shape, ahead, 2))


def test_the_order_of_a_step_with_shared_parameters() -> None:
    """Of two layers and two microbatches, by initials: totals, gathers, reductions; layers' in
    capitals.
    """
    text = plan_text("zero 3 over dp", microbatches=2).replace(f"layers = {LAYERS}", "layers = 2")
    listed = [asdict(it) for it in collectives(compiled(text))]
    for it in listed:
        initial = {"parameters": "p", "gradients": "g", "totals": "t"}[it["use"]]
        it["value"] = initial.upper() if it["loops"] else initial
    assert _calls({"microbatches": 2, "layers": 2}, *listed) == "tp" + 2 * ("PP" + "PPGG") + "tgt"


SEQUENCE = {
    "mesh { dp = 2 }": "mesh { dp = 2  tp = 2 }",
    "over dp }\nstate": "over dp  ffn over tp  seq over tp }\nstate",
}


@pytest.mark.parametrize("recompute", ["none", "every(2, layers)", "every(3, layers)", "full"])
@pytest.mark.parametrize("state", LISTS)
def test_each_is_called_as_often_as_it_is_counted(state: str, recompute: str) -> None:
    text = plan_text(state).replace("steps = 1", f"steps = 1  recompute = {recompute}")
    for old, new in SEQUENCE.items():
        text = text.replace(old, new)
    of = compiled(text)
    listed = [asdict(it) | {"value": str(i)} for i, it in enumerate(collectives(of))]
    mesh, dims = ({it.name: it.size for it in them} for them in (of.axes, of.dims))
    calls = get_expected_calls(
        {"mesh": mesh, "dims": dims, "collectives": listed, "evaluation": []}, 0
    )["train"]
    assert Counter(each.value for each in calls) == {it["value"]: it["count"] for it in listed}
    assert len({it["every"] for it in listed}) == (2 if "every" in recompute else 1)
