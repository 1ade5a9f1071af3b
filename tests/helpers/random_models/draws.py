"""The random plans of these tests: `scalec.testing`'s, with user ops; and what of the language
stands in them.

The module of the user ops lies beside this file; plans are compiled as if they did too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalec.compiler.ir import Program
from scalec.compiler.ops import OPS, OpDef
from scalec.compiler.syntax import tree
from scalec.compiler.syntax.parser import parse_plan
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.testing import plans
from scalec.testing.random_plans import drafts

T = TypeVar("T")

USER_OPS = """op gated(x[.., f], linear y[.., f], cap) -> [.., f] over .., f from "own_ops:gated"
op unit(x[.., d], linear g[d]) -> [.., d] over .. from "own_ops:unit"
op parted(x[.., d], y[.., d]) -> [.., d], [..] over .. from "own_ops:parted"
"""
STATEMENTS = (
    "x = x + gated(x @ wg{n}[hidden -> ffn], x @ wu{n}[hidden -> ffn], 2) @ wd{n}[ffn -> hidden]",
    "x = x + unit(x, g{n}[hidden])",
    "s = gated(s, cap=c, y=s + bs{n}[ffn])",
    "xp{n}, m{n} = parted(x, x * gp{n}[hidden])\nx = xp{n} - x * m{n}",
    "sp{n}, m{n} = parted(y=s + bp{n}[ffn], x=s)\ns = sp{n} + s",
)

DRAWS = 250
"""With so many drafts all of the language is drawn, and is in some that are compared with torch."""

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

ARITHMETIC = {
    "contract",
    "add",
    "mul",
    "div",
    "scale",
    "shift",
    "call",
    "call gives 1",
    "call gives 2",
}
"""Ops that a plan writes otherwise than by their names."""

NESTS = {f"{inner} in {outer}" for inner in ("repeat", "if") for outer in ("repeat", "if")} | {
    "ifs in repeat"
}
"""Statements that may be in others."""

AGAIN = {f"recompute = {word}" for word in ("none", "full", "every", "selective")}
"""Ops that backward recomputes."""


FUSED = {"cross_entropy cap", "attention deterministic=on"}
"""Ops that passes alone write."""


def random_plans() -> st.SearchStrategy[str]:
    """Plans that compile."""
    return plans(USER_OPS, STATEMENTS)


def random_drafts() -> st.SearchStrategy[str]:
    """Plans a few of which the compiler refuses."""
    return drafts(USER_OPS, STATEMENTS)


@cache
def get_drafts(of: int) -> dict[str, set[str]]:
    """So many random drafts, and what stands in each."""
    found: dict[str, set[str]] = {}

    @settings(max_examples=of, suppress_health_check=CHECKS)
    @given(random_drafts())
    def draw(plan: str) -> None:
        found[plan] = words(plan, compile_plan(Source("plan.scale", plan), "resolve"))

    draw()
    return found


def covering(number: int, of: Mapping[str, set[str]], tried: Callable[[str], T | None]) -> list[T]:
    """The results of `tried` for so many of a larger number of plans, given with what stands in
    each.

    The next one is always the plan in which most stands that is in none before it; None leaves a
    plan out.
    """
    found, chosen = dict(of), list[T]()
    while found and len(chosen) < number:
        best = max(found, key=lambda plan: len(found[plan]))
        known = found.pop(best)
        if made := tried(best):
            chosen.append(made)
            found = {plan: new - known for plan, new in found.items()}
    return chosen


def table() -> set[str]:
    """The parts that a plan can have, by `words`."""
    return (ARITHMETIC | NESTS | AGAIN).union(
        *(_words_of(op) for op in OPS.values() if op.user_visible)
    ) - FUSED


def words(plan: str, model: Program) -> set[str]:
    """The parts of a plan and its model before placements: ops, operands, settings, choices,
    nesting, recomputation.
    """
    (syntax_of,) = (
        item
        for item in parse_plan(Source("plan.scale", plan)).items
        if isinstance(item, tree.Model)
    )
    found = {*_nests([item for item in syntax_of.body if isinstance(item, tree.Repeat)], "model")}
    found.add(f"recompute = {model.train.recompute.word}")
    for op in model.ops:
        found |= {op.kind, f"{op.kind} of {len(op.inputs)}", f"{op.kind} gives {len(op.outputs)}"}
        found |= {
            f"{op.kind} {word}" for name, value in op.attrs for word in (name, f"{name}={value}")
        }
    return found


def _nests(body: Sequence[tree.Statement], around: str) -> Iterator[str]:
    """The parts of `body`, which is in `around`."""
    for item in body:
        match item:
            case tree.Repeat():
                yield f"repeat in {around}"
                yield from _nests(item.body, "repeat")
            case tree.If():
                yield f"if in {around}"
                yield from (
                    word for side in (item.body, item.others) for word in _nests(side, "if")
                )
            case tree.Bind():
                pass
    if sum(isinstance(item, tree.If) for item in body) > 1:
        yield f"ifs in {around}"


def _words_of(op: OpDef) -> Iterator[str]:
    least = sum(not operand.optional for operand in op.operands)
    for count in [2, 3] if op.variadic else range(least, len(op.operands) + 1):
        yield f"{op.name} of {count}"
    for attribute in op.attributes:
        choices = [choice for choice in attribute.choices if choice != attribute.default]
        yield from (f"{op.name} {attribute.name}={choice}" for choice in choices)
        if not choices:
            yield f"{op.name} {attribute.name}"
