"""Compares what a body of the text did with what the IR does there: the same ops, and what
communicates in its order.

Non-goals: what the IR does (`forward`, `step`).
"""

import ast
from collections import Counter
from collections.abc import Collection, Sequence

from ...ir.placements import COERCIONS
from ...ops import OPS
from ...ops.protocol import ASYNC
from .terms import Event, Log, Loop, Term, get_call, wrong

AWAITING = {entry.function for entry in OPS.values() if entry.awaits}
"""The functions that wait for what another call began."""

MOVES = ("reduce_grads_in_backward", "reshard", "unshard")
"""The functions by which loops over layers move flat buffers."""


def communicating_functions() -> frozenset[str]:
    """The functions of a forward that communicate, in it or in backward: their order is the
    program's.
    """
    of_ops = {entry.function for entry in OPS.values() if entry.sends} - {""}
    return frozenset({*(entry.function for entry in COERCIONS.values()), *of_ops, *MOVES})


def compare(node: ast.AST, actual: Log, expected: Log, ordered: Collection[str] = ()) -> None:
    """Raises where a body does anything else than the IR; `ordered` are the functions of a step
    that communicate.
    """
    left = demand_known(actual, expected)
    missing = [event for event in expected if isinstance(event, Event) and left[event.key] > 0]
    if missing:
        raise wrong(
            node, f"nothing does {', '.join(dict.fromkeys(str(event.term) for event in missing))}"
        )
    functions = ordered or communicating_functions()
    _compare_order(
        node, _communicating_entries(actual, functions), _communicating_entries(expected, functions)
    )
    _compare_overlap(_beside(actual), _beside(expected))


def demand_known(actual: Log, expected: Log) -> "Counter[object]":
    """Raises where a body does what the IR does not; returns what of the IR it has not done."""
    left = Counter[object](event.key for event in expected if isinstance(event, Event))
    for event in actual:
        if isinstance(event, Event):
            left[event.key] -= 1
            if left[event.key] < 0:
                hint = _recomputation_hint(event, expected) or _instead(actual, expected)
                raise wrong(event.node, f"nothing in the IR does `{ast.unparse(event.node)}`{hint}")
    return left


def _recomputation_hint(event: Event, expected: Log) -> str:
    """The end of the message where only recomputation differs."""
    alike = [other for other in expected if isinstance(other, Event) and other.term is event.term]
    if not alike or any(other.key == event.key for other in alike):
        return ""
    hint = (
        "in a block, and recomputed"
        if alike[0].block
        else "recomputed"
        if alike[0].recompute
        else "saved"
    )
    return f" but {hint}"


def _instead(actual: Log, expected: Log) -> str:
    """The first op of the IR that the text does not do."""
    actual_keys = {event.key for event in actual if isinstance(event, Event)}
    missing = (
        event for event in expected if isinstance(event, Event) and event.key not in actual_keys
    )
    return f" here, which does {first.term}" if (first := next(missing, None)) else " here"


def _communicating_entries(log: Log, functions: Collection[str]) -> list[Event | Loop]:
    return [
        entry for entry in log if isinstance(entry, Loop) or function_of(entry.term) in functions
    ]


def function_of(term: Term) -> str:
    """The function that a term calls, or method; "" where it calls none."""
    match term:
        case Term(head="call", args=(Term(head="name", args=(str(name),)), *_)):
            return name
        case Term(head="call", args=(Term(head="attr", args=(_, str(name))), *_)):
            return f".{name}"
        case _:
            return ""


def _compare_order(
    node: ast.AST, actual: Sequence[Event | Loop], expected: Sequence[Event | Loop]
) -> None:
    for ours, theirs in zip(actual, expected, strict=False):
        same = (
            ours is theirs
            if isinstance(ours, Loop) or isinstance(theirs, Loop)
            else ours.key == theirs.key
        )
        if not same:
            raise wrong(
                ours.node, f"`{ast.unparse(ours.node)}` comes before what the IR communicates first"
            )
    if len(actual) != len(expected):
        raise wrong(node, "a loop of the IR is not run, or one more")


def _beside(log: Log) -> list[list[Event]]:
    """Events that run while each exchange is under way, and the `wait` for it last."""
    exchanges: list[list[Event]] = []
    is_under_way = False
    for event in log:
        if isinstance(event, Event):
            if is_under_way:
                exchanges[-1].append(event)
            if _begins(event.term):
                exchanges.append([])
            is_under_way = _begins(event.term) or (
                is_under_way and function_of(event.term) not in AWAITING
            )
    return exchanges


def _begins(term: Term) -> bool:
    """Whether a call begins what a `wait` waits for."""
    call_parts = get_call(term, function_of(term))
    return bool(call_parts and call_parts[1].get(ASYNC.name))


def _compare_overlap(
    actual: Sequence[Sequence[Event]], expected: Sequence[Sequence[Event]]
) -> None:
    """Raises where anything runs beside an exchange that does not in the IR, or does not that
    does.
    """
    for ours, theirs in zip(actual, expected, strict=True):
        left = Counter(event.key for event in theirs)
        for event in ours:
            left[event.key] -= 1
            if left[event.key] < 0:
                raise wrong(
                    event.node,
                    f"`{ast.unparse(event.node)}` runs beside an exchange, and does not in the IR",
                )
        if missing := next((event for event in theirs if left[event.key] > 0), None):
            raise wrong(
                ours[-1].node,
                f"is awaited before {missing.term}, which runs beside the exchange in the IR",
            )
