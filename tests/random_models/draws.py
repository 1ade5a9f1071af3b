"""The random plans of these tests: `scalec.testing`'s, with user ops; and what of the language stands in them.

The module of the user ops lies beside this file; plans are compiled as if they did too.
"""

from collections.abc import Iterator

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from scalec.compiler.ir import Program, walk
from scalec.compiler.ops import OPS, OpDef
from scalec.compiler.passes import compile_plan
from scalec.compiler.source import Source
from scalec.testing import compiles, plans
from scalec.testing.random_plans import drafts

USER_OPS = """op gated(x[.., f], linear y[.., f], cap) -> [.., f] over .., f from "own_ops:gated"
op unit(x[.., d], linear g[d]) -> [.., d] over .. from "own_ops:unit"
"""
STATEMENTS = (
    "x = x + gated(x @ wg{n}[hidden -> ffn], x @ wu{n}[hidden -> ffn], 2) @ wd{n}[ffn -> hidden]",
    "x = x + unit(x, g{n}[hidden])",
    "s = gated(s, cap=c, y=s + bs{n}[ffn])",
)

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

ARITHMETIC = {"contract", "add", "mul", "div", "scale", "shift", "call"}
"""What a plan writes otherwise than by the op's name."""


def random_plans() -> st.SearchStrategy[str]:
    """Plans that compile."""
    return plans(USER_OPS, STATEMENTS)


def random_drafts() -> st.SearchStrategy[str]:
    """Plans a few of which the compiler refuses."""
    return drafts(USER_OPS, STATEMENTS)


def covering(number: int, of: int) -> list[str]:
    """So many of a larger number of random plans: always that in which most stands that is in none before it."""
    found: dict[str, set[str]] = {}

    @settings(derandomize=True, max_examples=of, deadline=None, phases=[Phase.generate], suppress_health_check=CHECKS)
    @given(random_drafts())
    def draw(plan: str) -> None:
        found[plan] = words(compile_plan(Source("plan.scale", plan), "resolve"))

    draw()
    chosen: list[str] = []
    while found and len(chosen) < number:
        best = max(found, key=lambda plan: len(found[plan]))
        known = found.pop(best)
        if compiles(best):
            chosen.append(best)
            found = {plan: new - known for plan, new in found.items()}
    return chosen


def table() -> set[str]:
    """What can stand in a plan, by `words`."""
    return ARITHMETIC.union(*(_words_of(op) for op in OPS.values() if op.surface))


def words(model: Program) -> set[str]:
    """Of a model before any placement: kinds of ops, how many operands they have, settings and choices."""
    found: set[str] = set()
    for op in walk(model.region.body):
        found |= {op.kind, f"{op.kind} of {len(op.inputs)}"}
        found |= {f"{op.kind} {word}" for name, value in op.attrs for word in (name, f"{name}={value}")}
    return found


def _words_of(op: OpDef) -> Iterator[str]:
    least = sum(not operand.optional for operand in op.operands)
    for count in [2, 3] if op.more else range(least, len(op.operands) + 1):
        yield f"{op.name} of {count}"
    for attribute in op.attributes:
        choices = [choice for choice in attribute.choices if choice != attribute.default]
        yield from (f"{op.name} {attribute.name}={choice}" for choice in choices)
        if not choices:
            yield f"{op.name} {attribute.name}"
