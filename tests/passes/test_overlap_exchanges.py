"""Ops beside exchanges of rows, in the IR and in programs; the order of a run is in
`end_to_end`.
"""

import re
from collections.abc import Callable, Sequence

import pytest
from attrs import evolve

from end_to_end.test_overlapped_exchanges import AFTER, BEFORE, PLAN
from helpers.programs import make_program
from scalec.compiler.analysis.verifier import check
from scalec.compiler.emit.readback import check as read_back
from scalec.compiler.emit.train_py import train_py
from scalec.compiler.ir import Op, Stmt, blocks, map_ops, regions_in, walk
from scalec.compiler.ops.protocol import begins
from scalec.compiler.reports.explain import explain_collectives
from scalec.compiler.syntax.source import Source

TWO = PLAN.replace(
    "    x = x + y\n",
    """    z = m
    route z to experts by top(m @ second[hidden -> experts], 2) {
      z = silu(z @ f_up[hidden -> expert_ffn]) @ f_down[expert_ffn -> hidden]
    }
    x = x + y + z
""",
)
PARTS = AFTER.replace("dp = 2", "dp = 2  tp = 2").replace(
    "batch over dp", "batch over dp  ffn over tp"
)
FUSED = AFTER.replace("steps = 1", "steps = 1  kernels = triton  precision = bf16")
USED_WITHIN = BEFORE.replace("    x = x + y + s", "    x = x + y * s")


def beside(body: Sequence[Stmt]) -> list[list[str]]:
    """The kinds of ops that run beside each exchange of a repeat, in their order; counts of
    choices apart.
    """
    (repeat,) = regions_in(body)
    found: list[list[str]] = []
    is_under_way = False
    for op in walk(repeat.body):
        is_under_way = is_under_way and op.kind != "wait"
        if is_under_way and op.kind != "add_load":
            found[-1].append(op.kind)
        if begins(op):
            found.append([])
            is_under_way = True
    return found


@pytest.mark.parametrize(
    ("text", "forward"),
    [
        (BEFORE, [["contract", "silu", "contract"], ["mul", "contract"]]),
        (AFTER, [["contract", "silu", "contract"], ["mul", "contract"]]),
        (USED_WITHIN, [["contract", "silu", "contract"], ["mul", "contract"]]),
        (PARTS, [["coerce", "contract", "silu", "contract"], ["mul", "contract", "coerce"]]),
        (FUSED, [["contracts"], ["silu_mul", "contract"]]),
        (PLAN, [[]]),
        (
            TWO,
            [["contract"], ["top", "sort_by_expert", "exchange_counts", "dispatch"], ["combine"]],
        ),
    ],
    ids=["before", "after", "used within", "of parts", "fused", "alone", "two routes"],
)
def test_ops_that_depend_on_no_rows_run_beside_exchanges(
    text: str, forward: list[list[str]]
) -> None:
    """The half that comes first beside the exchange to the experts, the other beside the one
    back.
    """
    assert beside(blocks(make_program(text).microbatches)[0].body) == forward


SIZES = [(1, 1), (2, 2), (2, 8), (8, 2), (64, 256)]


@pytest.mark.parametrize(
    ("expert", "forward"),
    [
        ("silu(m @ s_up[hidden -> ffn])", [["contract", "silu"], ["contract"]]),
        ("silu(silu(m) @ s_up[hidden -> ffn])", [["silu", "contract", "silu"], ["contract"]]),
        (
            "silu(rmsnorm(m, inner[hidden], 1e-5) @ s_up[hidden -> ffn])",
            [["rmsnorm", "contract", "silu"], ["contract"]],
        ),
    ],
    ids=["one activation", "an activation before", "a norm before"],
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_where_an_op_runs_depends_on_no_sizes(
    sizes: tuple[int, int], expert: str, forward: list[list[str]]
) -> None:
    """The proof compiles the same model at small sizes, and the two have to be the same ops."""
    hidden, ffn = sizes
    line = f"    s = {expert} @ s_down[ffn -> hidden]"
    text = re.sub("    s = .*", line, AFTER)
    text = text.replace("hidden = 48", f"hidden = {hidden}").replace(" ffn = 72", f" ffn = {ffn}")
    assert beside(blocks(make_program(text).microbatches)[0].body) == forward


def test_gradients_run_beside_the_conjugates() -> None:
    """As in forward, from the last to the first, with those of experts' weights."""
    last, first = beside(blocks(make_program(AFTER).microbatches)[1].body)
    assert last == ["contract", "contract", "mul", "mul"]
    assert first[:5] == [*["grouped_contract"] * 3, "contract", "contract"]
    assert first[5:].count("contract") == 2


def test_explain_says_what_runs_beside_exchanges() -> None:
    found = explain_collectives(make_program(AFTER)).split("\n\n")
    (table,) = (part.splitlines() for part in found if part.startswith("exchanges of rows"))
    assert [line.split("  ")[-1].strip() for line in table[1:]] == [
        "s_gate, s_up",
        "s_down",
        "s_down",
        "e_down, e_up, e_gate, s_up, s_gate",
    ]
    assert all("nothing" not in line for line in table)


def _moved(text: str, line: str, to: str) -> str:
    """The text with the only line that begins as `line` after the one that begins as `to`."""
    lines = text.splitlines()
    (old,) = (i for i, each in enumerate(lines) if each.strip().startswith(line))
    taken = lines.pop(old)
    (new,) = (i for i, each in enumerate(lines) if each.strip().startswith(to))
    return "\n".join([*lines[: new + 1], taken, *lines[new + 1 :]])


WRONG: dict[str, tuple[Callable[[str], str], str]] = {
    "awaited before": (
        lambda text: _moved(text, "expert_in = wait(", "pending_expert_in = exchange("),
        "awaited before",
    ),
    "awaited later": (
        lambda text: _moved(text, "s = linear(", "s_up = linear("),
        "runs beside an exchange",
    ),
    "begun later": (
        lambda text: _moved(text, "pending_expert_in = exchange(", "s_up = linear("),
        "awaited before",
    ),
    "awaited at once": (
        lambda text: text.replace("rows_per_expert, async_op=True)", "rows_per_expert)"),
        "nothing in the IR does",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_program_begins_and_waits_as_the_ir_does(what: str) -> None:
    it = make_program(AFTER)
    text = train_py(it, Source("p.scale", AFTER))
    read_back(text, it)
    change, message = WRONG[what]
    with pytest.raises(AssertionError, match=message):
        read_back(change(text), it)


def test_rows_under_way_are_read_by_their_wait_alone() -> None:
    it = make_program(AFTER)
    check(it)
    begun = next(op for op in walk(it.forward.body) if begins(op)).outputs[0].name
    came = next(op for op in walk(it.forward.body) if op.kind == "wait").outputs[0].name

    def read_early(op: Op) -> Op:
        return evolve(op, inputs=(begun, *op.inputs[1:])) if op.inputs[:1] == (came,) else op

    def never_awaited(op: Op) -> Op:
        return evolve(op, attrs=tuple(each for each in op.attrs if each[0] != "async_op"))

    for wrong in (read_early, never_awaited):
        with pytest.raises(AssertionError, match=r"before they have come|under way"):
            check(evolve(it, region=map_ops(it.region, wrong)))
