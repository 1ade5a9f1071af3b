"""The signatures that a plan calls its own functions with, for a process that tries these on random
numbers.

Purpose: dims, numbers and sizes of each call; the words of the certificate for what was tried.
Non-goals: trying them (`scalec.testing.op_trial`), and the process (`cli.op_trials`).
"""

from collections.abc import Iterable, Sequence
from math import prod

from attrs import frozen

from ..ir import Op, Program, Type
from ..ops.user import LEAD, causal_dim, constants, linear_in, positions_in
from .certificate import Tried

DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
"""Torch's words for element types."""

LEADING = ((2, 3), (4, 2))
"""The sizes that the dims of `..` have in turns, in each of two cases."""

OTHER = (4, 8)
"""The size of all other dims in each case."""

MOST_NUMBERS = 1 << 20
"""Operands of more numbers are not tried at the plan's own sizes."""


Sizes = tuple[tuple[str, int], ...]
"""The sizes of dims, each with its name."""


@frozen
class TrialSignature:
    """The signature of a function in one call, as `scalec.testing.op_trial` reads it."""

    function: str
    names: tuple[str, ...]
    operands: tuple[tuple[str, ...], ...]
    gives: tuple[tuple[str, ...], ...]
    along: tuple[str, ...]
    linear: tuple[int, ...]
    constants: tuple[float, ...]
    positions: tuple[tuple[str, str], ...]
    causal: str
    dtype: str
    cases: tuple[Sizes, ...]
    instead: Sizes


def trial_signatures(model: Program) -> dict[TrialSignature, Op]:
    """The signatures that a model calls its own functions with, each with a call."""
    types, signatures = model.types, dict[TrialSignature, Op]()
    for op in model.ops:
        if op.kind == "call":
            signatures.setdefault(_signature(op, [types[name] for name in op.inputs], model), op)
    return signatures


def _signature(op: Op, types: Sequence[Type], model: Program) -> TrialSignature:
    lead = _leading_dims(op, types)
    operands = tuple(type.dims for type in types)
    dims: dict[str, None] = {}
    for type in types:
        dims |= dict.fromkeys(type.dims)
    cases = list[Sizes]()
    for leading, other in zip(LEADING, OTHER, strict=True):
        cases.append(case_sizes(dims, lead, leading, other))
    return TrialSignature(
        function=str(op.get("function")),
        names=tuple(f"operand {number + 1}" for number in range(len(types))),
        operands=operands,
        gives=tuple(_spell_out(words.split(), lead) for words in op.names("gives")),
        along=op.names("along"),
        linear=linear_in(op),
        constants=constants(op),
        positions=positions_in(op),
        causal=causal_dim(op),
        dtype=DTYPES[types[0].dtype],
        cases=tuple(cases),
        instead=_plan_sizes(operands, lead, op.names("along"), model),
    )


def _leading_dims(op: Op, types: Sequence[Type]) -> tuple[str, ...]:
    """The dims that `..` means in a call."""
    for type, words in zip(types, op.names("takes"), strict=True):
        named = words.split()
        if LEAD in named:
            return type.dims[: len(type.dims) - len(named) + 1]
    return ()


def _spell_out(words: Sequence[str], lead: tuple[str, ...]) -> tuple[str, ...]:
    dims = list[str]()
    for word in words:
        if word == LEAD:
            dims += lead
        else:
            dims.append(word)
    return tuple(dims)


def case_sizes(
    dims: Iterable[str], lead: Sequence[str], leading: Sequence[int], other: int
) -> Sizes:
    """The sizes of dims in one case: the dims of `lead` have the sizes `leading` in turns."""
    sizes = dict.fromkeys(dims, other)
    for number, dim in enumerate(lead):
        sizes[dim] = leading[number % len(leading)]
    return tuple(sizes.items())


def _plan_sizes(
    operands: Sequence[Sequence[str]], lead: Sequence[str], along: Sequence[str], model: Program
) -> Sizes:
    """The plan's own sizes of dims that are whole, a part of the others; none where that is too
    much.
    """
    sizes = dict[str, int]()
    for dims in operands:
        for dim in dims:
            size = model.size(dim)
            if dim in along:
                divisors = [part for part in range(2, 17) if size % part == 0]
                size = max(divisors, default=min(size, 16))
            sizes[dim] = size
    for number, dim in enumerate(lead):
        sizes[dim] = LEADING[0][number % 2]
    for dims in operands:
        if prod(sizes[dim] for dim in dims) > MOST_NUMBERS:
            return ()
    return tuple(sizes.items())


def get_tried_functions(signatures: Iterable[TrialSignature]) -> tuple[Tried, ...]:
    """The certificate's entries for functions that have been tried with these signatures."""
    checks = dict[str, dict[str, None]]()
    for signature in signatures:
        words = checks.setdefault(signature.function, {})
        words |= dict.fromkeys(_checks(signature))
    return tuple(Tried(function, tuple(words)) for function, words in sorted(checks.items()))


def _checks(signature: TrialSignature) -> Iterable[str]:
    """The checks that were made, in words."""
    yield f"slice by slice along {', '.join(signature.along)}"
    for number in signature.linear:
        yield f"linear in {signature.names[number]}"
    if signature.causal:
        yield f"causal along {signature.causal}"
    yield "gradients, against finite differences"
    yield (
        "the same bits in each call, whatever was called before and the state of random"
        " generators is"
    )
    yield "operands are not written to"
    yield "dims, element type and device of results"
