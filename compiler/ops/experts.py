"""A mixture of experts: rows of tokens expert by expert, what experts make of them, and their
weighted sum.

As formulas, y[t] = sum over e of gate[t, e] · f_e(x[t]).  Rows `[experts, batch, seq, ...]` have an
entry for each expert that a token chose, and are zero elsewhere; in memory they are a matrix,
expert by expert.  An `order` of rows says which there are: `[experts, batch, seq, chosen]`, one
where a token's choice is the expert.  Where ranks have parts of the tokens and of the experts, rows
are exchanged between them.  Padded rows are as many of each expert on all ranks, zero where there
is none, and only the ops from tokens to rows and back know of an order.  An exchange with
`async_op` only begins, and `wait` gives what it brings; backward begins its inverse at the `wait`,
and waits where forward began.  Non-goals: the choice of experts (`routers`), and what runs beside
an exchange (`passes.overlap_exchanges`).
"""

from collections.abc import Iterator, Sequence
from math import prod

from attrs import evolve

from ..ir import BATCH, DATA_DIMS, ITEM_BYTES, Op, Placement, Program, Type, sharded
from .algebra import narrowed
from .call import Argument, Call, Dims, Experts, Group
from .messages import Message, pieces
from .protocol import Attribute, Builder, OpDef, Operand, Shape, TypingError, Vjp, takes
from .roles import Roles
from .routers import CAPACITY, TO
from .saved_tensors import Local, Saved, factors
from .work import Product, Work, no_work

OWN = Attribute("own", kinds=(tuple,), default=(), implied=True)
"""Axes whose ranks have the same tokens, and each its own experts."""

MOVES = Attribute("to", kinds=(tuple,), implied=True)
"""Where rows go on each axis: `dp:experts`."""

ASYNC = Attribute("async_op", choices=("off", "on"), default="off", implied=True)
"""Whether an exchange only begins, as torch's collectives do."""


# ---- types


def _sorted(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """Placed as the choices; over the axes `own`, on which all ranks have the same tokens,
    those of own experts.
    """
    (ids,), experts = types, str(op.get("to"))
    if set(op.names("own")) & {axis for axis, _ in ids.places}:
        raise TypingError(
            f"{op.kind} picks experts over axes on which all ranks have the same tokens"
        )
    at = dict(ids.places) | dict.fromkeys(op.names("own"), sharded(experts))
    return [Type("i64", (experts, *ids.dims), program.places(at))]


def with_own_experts(op: Op, work: Sequence[str]) -> Op:
    """An op that sorts by experts, with the axes over which it works on these; any other op as
    it is.
    """
    own = tuple(
        item.partition(":")[0]
        for item in work
        if item.partition(":")[2] == str(dict(op.attrs).get("to"))
    )
    return evolve(op, attrs=(*op.attrs, (OWN.name, own))) if op.kind == SORT.name and own else op


def _dispatched(types: Sequence[Type], op: Op) -> list[Shape]:
    x, order = types
    if x.dims[:-1] != order.dims[1:-1]:
        raise TypingError(f"{op.kind} takes x [{', '.join(order.dims[1:-1])}, features]")
    return [(x.dtype, (order.dims[0], *x.dims))]


def _combined(types: Sequence[Type], op: Op) -> list[Shape]:
    rows, gates, order = types
    if gates.dims != order.dims[1:] or rows.dims[:-1] != order.dims[:-1]:
        raise TypingError(
            f"{op.kind} takes rows [{', '.join(order.dims[:-1])}, features] and their gates"
        )
    return [(rows.dtype, rows.dims[1:])]


def _products(types: Sequence[Type], op: Op) -> list[Shape]:
    """Each expert's dims of both operands, in order, less those that are summed over."""
    (x, w, *_), experts, over = types, types[0].dims[0], op.names("over")
    left, right = ([dim for dim in type.dims if dim not in (experts, *over)] for type in (x, w))
    if x.dtype != w.dtype or {*left} & {*right} or any(type.dims[0] != experts for type in types):
        raise TypingError(f"{op.kind} takes operands of each of the {experts}")
    return [(x.dtype, (experts, *left, *right))]


def _biased(types: Sequence[Type], op: Op) -> list[Shape]:
    """The rows, to which each expert adds one of its own."""
    x, b, *_ = types
    if x.dtype != b.dtype or b.dims != tuple(dim for dim in x.dims if dim not in DATA_DIMS):
        raise TypingError(f"{op.kind} takes rows, and of each expert one more")
    return [(x.dtype, x.dims)]


def moves(op: Op) -> Iterator[tuple[str, str]]:
    """The axes over which rows are exchanged, and the dim that each then shards."""
    for item in op.names("to"):
        axis, _, dim = item.partition(":")
        yield axis, dim


def _moved(program: Program, type: Type, op: Op) -> Type:
    experts = program.experts_of(type)
    at: dict[str, Placement] = dict(type.places)
    for axis, dim in moves(op):
        if at.get(axis) is None or {at[axis].dim, dim} not in [
            {experts, tokens} for tokens in DATA_DIMS
        ]:
            raise TypingError(f"{op.kind} exchanges shards of tokens and of {experts} on {axis}")
        at[axis] = sharded(dim)
    return Type(type.dtype, type.dims, program.places(at))


def _exchanged(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """Rows lie as `held` says before or after they are exchanged; padded ones lie alike on all
    ranks.
    """
    rows, *orders = types
    result = _moved(program, rows, op)
    lie = _shards(rows if op.kind == EXCHANGE_BACK.name else result)
    if any(_shards(held) != lie for held in orders):
        raise TypingError(f"{op.kind} takes rows that lie as `held` says")
    return [result]


def begins(op: Op) -> bool:
    """Whether an op begins an exchange for which a `wait` waits: only that reads its result."""
    return dict(op.attrs).get(ASYNC.name) == "on"


def is_counted_on_host(program: Program, op: Op) -> bool:
    """Whether the host waits at an op until the GPU has counted the rows of each expert, on which
    later sizes depend.

    Where rows are exchanged, their counts are, and the host reads both at once; else it reads them
    for the first rows.
    """
    if op.kind not in (COUNTS.name, DISPATCH.name):
        return False
    order = op.inputs[0] if op.kind == COUNTS.name else op.inputs[1]
    if not program.is_ragged(program.types[order]):
        return False
    exchanged = {other.inputs[0] for other in program.ops if other.kind == COUNTS.name}
    return op.kind == COUNTS.name or order not in exchanged


def is_of_weights(op: Op) -> bool:
    """Whether an op makes the gradient of experts' weights, for which no gradient of rows waits."""
    return op.kind == GROUPED.name and BATCH in op.names("over")


def _shards(type: Type) -> list[tuple[str, Placement]]:
    return [(axis, place) for axis, place in type.places if place.dim]


def _roles(types: Sequence[Type], op: Op) -> Roles:
    """The ops that lead into rows and out of them work on tokens, and on experts only where
    tokens are whole.
    """
    return Roles(routed=str(op.get("to")) if op.kind == SORT.name else types[-1].dims[0])


# ---- gradients, and what is saved


def _undone(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """Gradients go the way back: where the op only begins, they are on it."""
    made = b.emit(WAIT.name, grads, op.inputs[:1])[0] if begins(op) else _sent_back(op, grads, b)
    return [made, *(None for _ in op.inputs[1:])]


def _sent_back(op: Op, grads: Sequence[str], b: Builder) -> str:
    rows, *held = op.inputs
    back = tuple(f"{axis}:{b.type(rows).at(axis).dim}" for axis, _ in moves(op))
    given = {ASYNC.name: "on"} if begins(op) else {}
    return b.emit(
        BACK.get(op.kind, op.kind), [grads[0], *map(b.saved, held)], [rows], to=back, **given
    )[0]


def _product_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """As of any product, for each expert."""
    (grad,), (x, w, *order), over = grads, op.inputs, op.names("over")
    experts = b.type(x).dims[0]
    outer = {
        name: tuple(dim for dim in b.type(name).dims if dim not in (experts, *over))
        for name in (x, w)
    }

    def product(other: str, of: str) -> str | None:
        if not b.wanted(of):
            return None
        return b.emit(
            GROUPED.name, [grad, b.saved(other), *map(b.saved, order)], [of], over=outer[other]
        )[0]

    return [product(w, x), product(x, w), *(None for _ in order)]


def _bias_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    (grad,), (x, bias, *order) = grads, op.inputs
    of_bias = narrowed(grad, bias, b.type(x).dims, b) if b.wanted(bias) else None
    return [grad if b.wanted(x) else None, of_bias, *(None for _ in order)]


def _summed_bytes(it: Local) -> int:
    """Plain torch: rows of two choices of each token in the type of the sum, and a sum wider
    than the result.
    """
    # of combine, and of the gradient of dispatch
    tokens = it.op.outputs[0].type if it.op.outputs else it.types[0]
    return 0 if it.launched else it.program.elements(tokens) * it.wide * (2 + it.is_narrow)


def _spread_bytes(it: Local) -> int:
    """Plain torch: of each row its token's gradient and products of it, in the element type of a
    sum.

    A product of two element types converts an operand first, on the CPU in memory.
    """
    if it.launched or not it.is_narrow:
        return 0 if it.launched else it.bytes()
    return 3 * it.widened() - it.bytes() if it.device == "cpu" else 2 * it.widened()


def regroups(program: Program, op: Op) -> bool:
    """Whether rows of experts are put in order, before they are sent back or when they have come:
    in a copy.

    A rank that has one expert need not.
    """
    rows = program.operands(op)[0] if op.kind == EXCHANGE_BACK.name else op.outputs[0].type
    return program.local_size(rows, rows.dims[0]) > 1


def _regrouped_bytes(it: Local) -> int:
    """The rows of experts once more; of an exchange that only begins, `_way_bytes` and the
    result of `wait` count.
    """
    rows = it.types[0] if it.op.kind == EXCHANGE_BACK.name else it.op.outputs[0].type
    copied = regroups(it.program, it.op) and not begins(it.op)
    return it.program.elements(rows) * it.item * copied


def _order_bytes(program: Program, op: Op) -> int:
    """Bytes of each choice's row, each row's choice, and the number of rows of each expert."""
    (ids,), (order,) = program.operands(op), op.outputs
    choices = program.elements(ids)
    rows = choices if program.is_ragged(order.type) else program.elements(order.type)
    return ITEM_BYTES["i64"] * (choices + rows + program.local_size(order.type, order.type.dims[0]))


def _held_bytes(program: Program, op: Op) -> int:
    """For each row its place as it came, and the inverse, if a rank has several experts; their
    numbers of rows.
    """
    rows = op.outputs[0].type
    experts = program.local_size(rows, rows.dims[0])
    return ITEM_BYTES["i64"] * (2 * program.elements(rows) * (experts > 1) + experts)


def _way_bytes(program: Program, op: Op) -> int:
    """While rows are under way, what comes, and what is sent where that is a copy; otherwise
    rows as any other.
    """
    sent, came = program.operands(op)[0], op.outputs[0].type
    copied = op.kind == EXCHANGE_BACK.name and regroups(program, op)
    return (
        ITEM_BYTES[came.dtype] * (program.elements(came) + program.elements(sent) * copied)
        if begins(op)
        else 0
    )


def _grouped_work(it: Local) -> Work:
    """Work of an expert on an equal share of the rows, or on all that it has room for."""
    (x, w), made, program = it.types[:2], it.op.outputs[0].type, it.program

    def width(type: Type) -> int:
        return prod(program.local_size(type, dim) for dim in type.dims[1:] if dim not in DATA_DIMS)

    experts = program.local_size(made, made.dims[0])
    rows = program.elements(x) // width(x) // experts
    if program.experts_of(made):
        return Work(made.dtype, (Product(rows, width(made), width(x), experts),))
    return Work(made.dtype, (Product(width(x), width(w), rows, experts),))


# ---- messages and calls


def _counts(it: Local) -> tuple[Message, ...]:
    """The number of rows that each rank sends for each expert."""
    experts = it.program.experts_of(it.types[0])
    return (
        Message(
            "all_to_all", it.op.outputs[0].name, _axes(it.op), "i64", (it.program.size(experts),)
        ),
    )


def _rows(it: Local) -> tuple[Message, ...]:
    rows, drops = it.types[0], any(op.kind == CAPACITY.name for op in it.program.ops)
    shape, sent = it.program.local_shape(rows), "some" if drops else "all"
    return (
        Message("all_to_all", it.op.outputs[0].name, _axes(it.op), rows.dtype, shape, ragged=sent),
    )


def _padded_rows(it: Local) -> tuple[Message, ...]:
    axes, dim = _axes(it.op), _ends(it)[1]
    shape = pieces(it.program, it.types[0], dim, axes)
    return (Message("all_to_all", it.op.outputs[0].name, axes, it.types[0].dtype, shape),)


def _ends(it: Local) -> tuple[str, str]:
    """The dims that an exchange gathers and shards; if these are several of tokens, one that
    lies with the others.
    """
    (axis, dim), *_ = moves(it.op)
    return it.types[0].at(axis).dim, dim


def _axes(op: Op) -> tuple[str, ...]:
    return tuple(axis for axis, _ in moves(op))


def _sort_call(it: Local) -> Call:
    """The layout of experts: over which axes they lie, which of these have parts of the tokens;
    the rows of each.
    """
    experts = str(it.op.get("to"))
    claimed = {claim.axis for claim in it.program.claims if claim.dim == experts and claim.split}
    axes = tuple(axis.name for axis in it.program.axes if axis.name in claimed)
    order = it.op.outputs[0].type
    rows: dict[str, Argument] = (
        {} if it.program.is_ragged(order) else {"padded": it.program.local_shape(order)[1]}
    )
    return Call(
        (Experts(experts, axes, tuple(axis for axis in axes if it.types[0].at(axis).dim)),), rows
    )


def _padded_call(it: Local) -> Call:
    source, target = _ends(it)
    return Call((Group(_axes(it.op)),), {"dim_from": Dims((source,)), "dim_to": Dims((target,))})


SORT = OpDef(
    "sort_by_expert",
    "The order of rows: one where a token's choice is the expert; over the axes `own`, of the"
    " rank's own experts.",
    operands=takes("ids"),
    attributes=(TO, OWN),
    typing=_sorted,
    roles=_roles,
    holds=_order_bytes,
    decides=True,
    function="sort_by_expert",
    call=_sort_call,
    stem="order",
)

COUNTS = OpDef(
    "exchange_counts",
    "The order of rows after an exchange: each rank tells the others how many it has for each"
    " of their experts.",
    operands=takes("order"),
    attributes=(MOVES,),
    typing=lambda program, types, op: [_moved(program, types[0], op)],
    communicates=_counts,
    holds=_held_bytes,
    decides=True,
    function="exchange_counts",
    call=lambda it: Call(),
    stem="held",
)

DISPATCH = OpDef(
    "dispatch",
    "A row of each token for each of its experts.",
    _dispatched,
    operands=takes("x", "order"),
    linear=((0,),),
    roles=_roles,
    vjp=Vjp(wrt=(0,), unread=(0,), workspace=_summed_bytes),
    function="dispatch",
)

EXCHANGE, EXCHANGE_BACK = (
    OpDef(
        name,
        doc,
        operands=takes("rows", "held"),
        attributes=(MOVES, ASYNC),
        linear=((0,),),
        typing=_exchanged,
        adjoint=_undone,
        communicates=_rows,
        function=name,
        call=lambda it: Call((), {ASYNC.name: True} if begins(it.op) else {}),
        saves=lambda it: Saved(operands=(1,)),
        workspace=_regrouped_bytes,
        holds=_way_bytes,
    )
    for name, doc in (
        ("exchange", "Rows to the ranks of their experts, over several axes at once."),
        ("exchange_back", "Rows to the ranks of their tokens."),
    )
)

BACK = {EXCHANGE.name: EXCHANGE_BACK.name, EXCHANGE_BACK.name: EXCHANGE.name}

EXCHANGE_PADDED = OpDef(
    "exchange_padded",
    "Rows to the ranks of their experts, or back, over several axes at once; as many of each"
    " expert for every rank.",
    operands=takes("rows"),
    attributes=(MOVES,),
    linear=((0,),),
    typing=_exchanged,
    adjoint=_undone,
    communicates=_padded_rows,
    function="all_to_all",
    call=_padded_call,
    saves=lambda it: Saved(),
)

WAIT = OpDef(
    "wait",
    "Rows of an exchange that has begun, when they have come.",
    operands=takes("rows"),
    linear=((0,),),
    typing=lambda program, types, op: [types[0]],
    adjoint=lambda op, grads, b: [_sent_back(b.maker(op.inputs[0]), grads, b)],
    awaits=True,
    function="wait",
    call=lambda it: Call(),
    work=no_work,
)

GROUPED = OpDef(
    "grouped_contract",
    "For each expert the product x·w of its rows, of which there are those of `order`, summed"
    " over the dims `over`.",
    _products,
    operands=(*takes("x", "w"), Operand("order", optional=True)),
    attributes=(Attribute("over", kinds=(tuple,)),),
    linear=((0,), (1,)),
    adjoint=_product_adjoint,
    function="grouped_linear",
    stem="y",
    saves=factors,
    work=_grouped_work,
)

BIASED = OpDef(
    "grouped_bias",
    "x + b of each expert for its rows, of which there are those of `order`.",
    _biased,
    operands=(*takes("x", "b"), Operand("order", optional=True)),
    linear=((0, 1),),
    unsharded_dims=lambda types, op: frozenset(
        dim for order in types[2:] for dim in order.dims[-1:]
    ),
    adjoint=_bias_adjoint,
    function="grouped_bias",
    call=lambda it: Call(),
    stem="y",
    saves=lambda it: Saved(operands=tuple(range(2, len(it.types)))),
)

COMBINE = OpDef(
    "combine",
    "The sum over a token's experts of gate · row.",
    _combined,
    operands=takes("rows", "gates", "order"),
    linear=((0,), (1,)),
    roles=_roles,
    vjp=Vjp(wrt=(0, 1), workspace=_spread_bytes),
    function="combine",
    workspace=_summed_bytes,
)
