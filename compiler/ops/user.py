"""A function of the user's own, taken at its word: which dims it works along, and which operands it
is linear in.

Applied to slices along the dims that it works along, it gives the slices of its results; so these
may be sharded, and every other dim is whole on each rank.  Linearity is part of its meaning; a
pending sum is reduced before the call all the same, as before all ops but sums.  Non-goals: reading
or running the function.
"""

from collections.abc import Sequence
from keyword import iskeyword
from math import isfinite

from ..ir import BATCH, FLOATS, SEQUENCE, Op, Type
from .call import Call, PositionIds
from .protocol import DETERMINISTIC, Attribute, OpDef, Operand, Shape, TypingError, Vjp
from .reach import PAST, Reach
from .saved_tensors import Local

LEAD = ".."
"""In dims of a signature: any dims, the same for all operands that have them."""


def module_and_function(op: Op) -> tuple[str, str]:
    """The two parts of the attribute `function`."""
    module, _, function = str(op.get("function")).partition(":")
    return module, function


def constants(op: Op) -> tuple[float, ...]:
    """The numbers that the function takes after its operands."""
    return tuple(map(float, op.names("constants")))


def positions_in(op: Op) -> tuple[tuple[str, str], ...]:
    """(keyword, dim): by this keyword the function takes the positions along the dim that a rank
    has.
    """
    pairs: list[tuple[str, str]] = []
    for words in op.names("positions"):
        keyword, _, dim = words.partition(" ")
        pairs.append((keyword, dim))
    return tuple(pairs)


def linear_in(op: Op) -> tuple[int, ...]:
    """The operands that the function is linear in, each alone."""
    return tuple(map(int, op.names("linear")))


def causal_dim(op: Op) -> str:
    """The dim along which a position of the results depends on no later position of the
    operands; "" for none.
    """
    return str(dict(op.attrs).get("causal", ""))


def _reach(types: Sequence[Type], op: Op) -> dict[int, Reach]:
    """The positions before and its own, of operands that have the sequence, where the function
    is causal along it.
    """
    if causal_dim(op) != SEQUENCE:
        return {}
    return {i: PAST for i, type in enumerate(types) if SEQUENCE in type.dims}


def _call_shapes(types: Sequence[Type], op: Op) -> list[Shape]:
    """Leading dims as the operands have them, then the dims that `gives` names."""
    _check_words(op, len(types))
    if len({type.dtype for type in types}) != 1 or types[0].dtype not in FLOATS:
        raise TypingError(f"{op.get('function')} takes numbers of one element type")
    results = _result_dims(types, op)
    operand_dims: set[str] = set()
    for type in types:
        operand_dims.update(type.dims)
    along = {*op.names("along")}
    for dims in results:
        if len({*dims}) < len(dims) or not {*dims} <= operand_dims or not along <= {*dims}:
            raise TypingError(
                f"{op.get('function')} gives [{', '.join(dims)}] along {', '.join(sorted(along))}"
            )
    _check_positions(op, operand_dims)
    causal = causal_dim(op)
    if causal and (causal in along or any(causal not in dims for dims in results)):
        raise TypingError(f"{op.get('function')} is causal along {causal}")
    if BATCH in operand_dims - along:
        raise TypingError(
            f"{op.get('function')} does not work along batch: samples are independent of each other"
        )
    return [(types[0].dtype, dims) for dims in results]


def _result_dims(types: Sequence[Type], op: Op) -> list[tuple[str, ...]]:
    """The dims of each result.

    Raises TypingError where operands do not fit, or `..` has several meanings or none.
    """
    leads: set[tuple[str, ...]] = set()
    for type, words in zip(types, op.names("takes"), strict=True):
        lead = _lead(type, words.split())
        if lead is not None:
            leads.add(lead)
    gives = [words.split() for words in op.names("gives")]
    if len(leads) > 1 or (not leads and any(LEAD in words for words in gives)):
        raise TypingError(
            f"`{LEAD}` of {op.get('function')} stands for other dims in one operand than in another"
        )
    results: list[tuple[str, ...]] = []
    for words in gives:
        dims: list[str] = []
        for word in words:
            if word == LEAD:
                dims += min(leads)
            else:
                dims.append(word)
        results.append(tuple(dims))
    return results


def _check_positions(op: Op, operand_dims: set[str]) -> None:
    """Raises TypingError unless positions are along dims of operands, and by keywords of Python."""
    for keyword, dim in positions_in(op):
        if not keyword.isidentifier() or iskeyword(keyword) or dim not in operand_dims:
            raise TypingError(f"{op.get('function')} takes positions `{keyword}` along {dim}")
        if dim == BATCH:
            raise TypingError(
                f"{op.get('function')} takes positions along batch: samples are independent of"
                " each other"
            )


def _lead(type: Type, words: Sequence[str]) -> tuple[str, ...] | None:
    """The dims that `..` means; None without one.

    The others come last, in the signature's order.
    """
    named = words[LEAD in words[:1] :]
    cut = len(type.dims) - len(named)
    if cut < 0 or list(type.dims[cut:]) != named or (cut and named == words):
        raise TypingError(f"[{', '.join(type.dims)}] is not [{', '.join(words)}]")
    return None if named == words else type.dims[:cut]


def _check_words(op: Op, count: int) -> None:
    """Text that becomes part of a program is a name or a number."""
    parts = str(op.get("function")).split(":")
    if len(parts) != 2 or not all(part.isidentifier() for part in parts):
        raise TypingError(f"{op.get('function')} is not module:function")
    try:
        fits = all(map(isfinite, constants(op)))
        fits = fits and all(0 <= operand < count for operand in linear_in(op))
    except ValueError:
        fits = False
    if not fits or len(op.names("takes")) != count:
        raise TypingError(f"{op.get('function')} of {count} operands has other attributes")


def _call(local: Local) -> Call:
    """The numbers that the function takes, and its positions by their keywords."""
    positions = {keyword: _position_ids(local, dim) for keyword, dim in positions_in(local.op)}
    return Call(constants(local.op), positions)


def _position_ids(local: Local, dim: str) -> PositionIds:
    """The positions along a dim that a rank has: all operands that have the dim are sharded
    alike.
    """
    axes = next(type.axes_of(dim) for type in local.types if dim in type.dims)
    return PositionIds(dim, axes)


def _dims_not_along(types: Sequence[Type], op: Op) -> frozenset[str]:
    """The dims that the function does not work along: it needs them whole."""
    dims: set[str] = set()
    for type in types:
        dims.update(type.dims)
    return frozenset(dims - {*op.names("along")})


CALL = OpDef(
    "call",
    "A function of a module beside the plan: of each slice along the dims `along`, all others"
    " whole.",
    _call_shapes,
    operands=(Operand("x"),),
    attributes=(
        Attribute("function", kinds=(str,)),
        Attribute("takes", kinds=(tuple,)),
        Attribute("gives", kinds=(tuple,)),
        Attribute("along", kinds=(tuple,)),
        Attribute("linear", kinds=(tuple,)),
        Attribute("constants", kinds=(tuple,)),
        Attribute("positions", kinds=(tuple,), default=()),
        Attribute("causal", kinds=(str,), default=""),
        DETERMINISTIC,
    ),
    variadic=True,
    unsharded_dims=_dims_not_along,
    reach=_reach,
    vjp=Vjp(),
    call=_call,
    deterministic=lambda local: False,
)
