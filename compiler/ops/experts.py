"""A mixture of experts: rows of tokens expert by expert, what experts make of them, and their
weighted sum.

As formulas, y[t] = sum over e of gate[t, e] · f_e(x[t]).  Rows `[experts, batch, seq, ...]` have an
entry for each expert that a token chose, and are zero elsewhere; in memory they are a matrix,
expert by expert.  An `order` of rows says which rows there are: `[experts, batch, seq, chosen]`,
one where a token's choice is the expert.  Where ranks have parts of the tokens and of the experts,
they exchange rows.  All ranks have the same number of padded rows of each expert, zero where there
is no row; then only the ops from tokens to rows and back know of an order.  An exchange with
`async_op` only begins, and `wait` gives what it brings; backward begins its inverse at the `wait`,
and waits where forward began.  Non-goals: the choice of experts (`routers`), and what runs beside
an exchange (`passes.overlap_exchanges`).
"""

from collections.abc import Iterator, Sequence
from math import prod

from attrs import evolve

from ..ir import DATA_DIMS, ITEM_BYTES, Op, Placement, Program, Type, sharded
from .algebra import sum_to_operand, sums_over_batch
from .call import Argument, Call, Dims, Experts, Group
from .messages import Message, pieces
from .protocol import (
    ASYNC,
    Attribute,
    Builder,
    OpDef,
    Operand,
    Shape,
    TypingError,
    Vjp,
    begins,
    never,
    takes,
)
from .roles import Roles
from .routers import CAPACITY, TO
from .saved_tensors import Local, Saved, Views, factors
from .work import Product, Work, no_work

OWN = Attribute("own", kinds=(tuple,), default=(), implied=True)
"""Axes whose ranks have the same tokens, and each its own experts."""

MOVES = Attribute("to", kinds=(tuple,), implied=True)
"""Where rows go on each axis: `dp:experts`."""


# ---- types


def _order_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """The order of rows, placed as the choices are.

    Over the axes `own`, on which all ranks have the same tokens, each rank has its own experts.
    """
    (ids,), experts = types, str(op.get("to"))
    if set(op.names("own")) & {axis for axis, _ in ids.places}:
        raise TypingError(
            f"{op.kind} picks experts over axes on which all ranks have the same tokens"
        )
    places = dict(ids.places) | dict.fromkeys(op.names("own"), sharded(experts))
    return [Type("i64", (experts, *ids.dims), program.places(places))]


def with_own_experts(op: Op, work: Sequence[str]) -> Op:
    """An op that sorts by experts, with the axes over which it works on these; any other op as
    it is.
    """
    if op.kind != SORT.name:
        return op
    axes: list[str] = []
    for item in work:
        axis, _, dim = item.partition(":")
        if dim == str(dict(op.attrs).get("to")):
            axes.append(axis)
    return evolve(op, attrs=(*op.attrs, (OWN.name, tuple(axes)))) if axes else op


def _dispatch_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    x, order = types
    if x.dims[:-1] != order.dims[1:-1]:
        raise TypingError(f"{op.kind} takes x [{', '.join(order.dims[1:-1])}, features]")
    return [(x.dtype, (order.dims[0], *x.dims))]


def _combine_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    rows, gates, order = types
    if gates.dims != order.dims[1:] or rows.dims[:-1] != order.dims[:-1]:
        raise TypingError(
            f"{op.kind} takes rows [{', '.join(order.dims[:-1])}, features] and their gates"
        )
    return [(rows.dtype, rows.dims[1:])]


def _products(types: Sequence[Type], op: Op) -> list[Shape]:
    """Each expert's dims of both operands, in order, without the dims that are summed over."""
    (x, w, *_), experts, over = types, types[0].dims[0], op.names("over")
    left = [dim for dim in x.dims if dim not in (experts, *over)]
    right = [dim for dim in w.dims if dim not in (experts, *over)]
    if x.dtype != w.dtype or {*left} & {*right} or any(type.dims[0] != experts for type in types):
        raise TypingError(f"{op.kind} takes operands of each of the {experts}")
    return [(x.dtype, (experts, *left, *right))]


def _bias_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    """The rows; each expert adds a row of its own to them."""
    x, b, *_ = types
    if x.dtype != b.dtype or b.dims != tuple(dim for dim in x.dims if dim not in DATA_DIMS):
        raise TypingError(f"{op.kind} takes rows, and of each expert one more")
    return [(x.dtype, x.dims)]


def _choice_dims(types: Sequence[Type], op: Op) -> frozenset[str]:
    """The last dims of the orders after the first two operands: of a token's choices."""
    dims: set[str] = set()
    for order in types[2:]:
        dims.update(order.dims[-1:])
    return frozenset(dims)


def moves(op: Op) -> Iterator[tuple[str, str]]:
    """The axes over which rows are exchanged, and the dim that each then shards."""
    for item in op.names("to"):
        axis, _, dim = item.partition(":")
        yield axis, dim


def _type_after_exchange(program: Program, type: Type, op: Op) -> Type:
    experts = program.experts_of(type)
    pairs = [{experts, tokens} for tokens in DATA_DIMS]
    places: dict[str, Placement] = dict(type.places)
    for axis, dim in moves(op):
        if places.get(axis) is None or {places[axis].dim, dim} not in pairs:
            raise TypingError(f"{op.kind} exchanges shards of tokens and of {experts} on {axis}")
        places[axis] = sharded(dim)
    return Type(type.dtype, type.dims, program.places(places))


def _exchange_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """Rows lie as `rows_per_expert` says before or after their exchange; padded rows lie alike on
    all ranks.
    """
    rows, *orders = types
    result = _type_after_exchange(program, rows, op)
    lie = _shards(rows if op.kind == EXCHANGE_BACK.name else result)
    if any(_shards(order) != lie for order in orders):
        raise TypingError(f"{op.kind} takes rows that lie as `rows_per_expert` says")
    return [result]


def _reads_exchanged_counts(program: Program, op: Op) -> bool:
    """Whether the host waits for the counts of each expert's rows, its own and the other ranks', by
    which it sizes the rows that come.
    """
    return program.is_ragged(program.types[op.inputs[0]])


def _reads_own_counts(program: Program, op: Op) -> bool:
    """Whether the host waits for the counts of each expert's rows, by which it sizes the rows.

    Where rows are exchanged, it has read them with the other ranks' counts.
    """
    order = op.inputs[1]
    exchanged = {other.inputs[0] for other in program.ops if other.kind == COUNTS.name}
    return program.is_ragged(program.types[order]) and order not in exchanged


def _shards(type: Type) -> list[tuple[str, Placement]]:
    return [(axis, place) for axis, place in type.places if place.dim]


def _roles(types: Sequence[Type], op: Op) -> Roles:
    """The ops that lead into rows and out of them work on tokens, and on experts only where
    tokens are whole.
    """
    return Roles(routed=str(op.get("to")) if op.kind == SORT.name else types[-1].dims[0])


# ---- gradients, and what is saved


def _exchange_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """The gradient of the rows goes the way back.

    Where the op only begins, the gradient of `wait` has begun that way, and here it is awaited.
    """
    if begins(op):
        (grad,) = b.emit(WAIT.name, grads, op.inputs[:1])
    else:
        grad = _send_back(op, grads, b)
    return [grad, *(None for _ in op.inputs[1:])]


def _send_back(op: Op, grads: Sequence[str], b: Builder) -> str:
    rows, *orders = op.inputs
    back: list[str] = []
    for axis, _ in moves(op):
        back.append(f"{axis}:{b.type(rows).placement_on(axis).dim}")
    options = {ASYNC.name: "on"} if begins(op) else {}
    kind, operands = BACK.get(op.kind, op.kind), [grads[0], *map(b.save, orders)]
    return b.emit(kind, operands, [rows], to=tuple(back), **options)[0]


def _product_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    """The gradients of both factors, for each expert, as of any product."""
    (grad,), (x, w, *order), over = grads, op.inputs, op.names("over")
    experts = b.type(x).dims[0]

    def product(other: str, factor: str) -> str | None:
        """The gradient of a factor: the product with the other, over the other's own dims."""
        if not b.is_wanted(factor):
            return None
        outer = tuple(dim for dim in b.type(other).dims if dim not in (experts, *over))
        operands = [grad, b.save(other), *map(b.save, order)]
        return b.emit(GROUPED.name, operands, [factor], over=outer)[0]

    return [product(w, x), product(x, w), *(None for _ in order)]


def _bias_adjoint(op: Op, grads: Sequence[str], b: Builder) -> list[str | None]:
    (grad,), (x, bias, *order) = grads, op.inputs
    of_bias = sum_to_operand(grad, bias, b.type(x).dims, b) if b.is_wanted(bias) else None
    return [grad if b.is_wanted(x) else None, of_bias, *(None for _ in order)]


def _bytes_of_sum(local: Local) -> int:
    """The bytes of a sum over choices in plain torch: rows of two choices of each token in the type
    of the sum, and a sum wider than the result.
    """
    if local.runs_kernel:
        return 0
    # of combine, and of the gradient of dispatch
    tokens = local.op.outputs[0].type if local.op.outputs else local.types[0]
    return local.program.elements(tokens) * local.wide * (2 + local.is_narrow)


def _spread_bytes(local: Local) -> int:
    """The bytes that plain torch makes for each row: its token's gradient and products of it, in
    the element type of a sum.

    A product of two element types converts an operand first, on the CPU in memory.
    """
    if local.runs_kernel:
        return 0
    if not local.is_narrow:
        return local.bytes()
    if local.device == "cpu":
        return 3 * local.wide_bytes() - local.bytes()
    return 2 * local.wide_bytes()


def regroups(program: Program, op: Op) -> bool:
    """Whether a copy puts rows of experts in order, before they are sent back or when they have
    come.

    A rank that has one expert needs none.
    """
    rows = program.operands(op)[0] if op.kind == EXCHANGE_BACK.name else op.outputs[0].type
    return program.local_size(rows, rows.dims[0]) > 1


def _regroup_bytes(local: Local) -> int:
    """The bytes of the copy that has rows of experts in order.

    For an exchange that only begins, `_way_bytes` and the result of `wait` count the copy.
    """
    rows = local.types[0] if local.op.kind == EXCHANGE_BACK.name else local.op.outputs[0].type
    copied = regroups(local.program, local.op) and not begins(local.op)
    return local.program.elements(rows) * local.item * copied


def _order_bytes(program: Program, op: Op) -> int:
    """Bytes of each choice's row, each row's choice, and the number of rows of each expert."""
    (ids,), (order,) = program.operands(op), op.outputs
    choices = program.elements(ids)
    rows = choices if program.is_ragged(order.type) else program.elements(order.type)
    return ITEM_BYTES["i64"] * (choices + rows + program.local_size(order.type, order.type.dims[0]))


def _order_bytes_after_exchange(program: Program, op: Op) -> int:
    """Bytes of each row's place as it came, and of the inverse, if a rank has several experts; and
    of the experts' numbers of rows.
    """
    rows = op.outputs[0].type
    experts = program.local_size(rows, rows.dims[0])
    return ITEM_BYTES["i64"] * (2 * program.elements(rows) * (experts > 1) + experts)


def _way_bytes(program: Program, op: Op) -> int:
    """Bytes while rows are under way: of what comes, and of what is sent where that is a copy.

    0 for an exchange that does not only begin: its rows count as any others.
    """
    if not begins(op):
        return 0
    sent, received = program.operands(op)[0], op.outputs[0].type
    copied = op.kind == EXCHANGE_BACK.name and regroups(program, op)
    elements = program.elements(received) + program.elements(sent) * copied
    return ITEM_BYTES[received.dtype] * elements


def _product_work(local: Local) -> Work:
    """Work of an expert on an equal share of the rows, or on all that it has room for."""
    (x, w), result, program = local.types[:2], local.op.outputs[0].type, local.program

    def width(type: Type) -> int:
        return prod(program.local_size(type, dim) for dim in type.dims[1:] if dim not in DATA_DIMS)

    experts = program.local_size(result, result.dims[0])
    rows = program.elements(x) // width(x) // experts
    if program.experts_of(result):
        return Work(result.dtype, (Product(rows, width(result), width(x), experts),))
    return Work(result.dtype, (Product(width(x), width(w), rows, experts),))


# ---- messages and calls


def _counts(local: Local) -> tuple[Message, ...]:
    """The number of rows that each rank sends for each expert."""
    experts = local.program.experts_of(local.types[0])
    return (
        Message(
            "all_to_all",
            local.op.outputs[0].name,
            _axes(local.op),
            "i64",
            (local.program.size(experts),),
        ),
    )


def _rows(local: Local) -> tuple[Message, ...]:
    rows, drops = local.types[0], any(op.kind == CAPACITY.name for op in local.program.ops)
    shape, sent = local.program.local_shape(rows), "some" if drops else "all"
    return (
        Message(
            "all_to_all", local.op.outputs[0].name, _axes(local.op), rows.dtype, shape, ragged=sent
        ),
    )


def _messages_of_padded_rows(local: Local) -> tuple[Message, ...]:
    axes, dim = _axes(local.op), _ends(local)[1]
    shape = pieces(local.program, local.types[0], dim, axes)
    return (Message("all_to_all", local.op.outputs[0].name, axes, local.types[0].dtype, shape),)


def _ends(local: Local) -> tuple[str, str]:
    """The dims that an exchange gathers and shards; if it gathers or shards several dims of
    tokens, one that lies with the others.
    """
    (axis, dim), *_ = moves(local.op)
    return local.types[0].placement_on(axis).dim, dim


def _axes(op: Op) -> tuple[str, ...]:
    return tuple(axis for axis, _ in moves(op))


def _sort_call(local: Local) -> Call:
    """The layout of experts: the axes over which they lie, and which axes have parts of the tokens;
    the rows of each expert if they are padded.
    """
    program, experts = local.program, str(local.op.get("to"))
    claimed = {claim.axis for claim in program.claims if claim.dim == experts and claim.split}
    axes = tuple(axis.name for axis in program.axes if axis.name in claimed)
    token_axes = tuple(axis for axis in axes if local.types[0].placement_on(axis).dim)
    order = local.op.outputs[0].type
    options: dict[str, Argument] = {}
    if not program.is_ragged(order):
        options["padded"] = program.local_shape(order)[1]
    return Call((Experts(experts, axes, token_axes),), options)


def _exchange_padded_call(local: Local) -> Call:
    source, target = _ends(local)
    return Call((Group(_axes(local.op)),), {"dim_from": Dims((source,)), "dim_to": Dims((target,))})


SORT = OpDef(
    "sort_by_expert",
    "The order of rows: one where a token's choice is the expert; over the axes `own`, of the"
    " rank's own experts.",
    operands=takes("ids"),
    attributes=(TO, OWN),
    typing=_order_type,
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
    typing=lambda program, types, op: [_type_after_exchange(program, types[0], op)],
    communicates=_counts,
    holds=_order_bytes_after_exchange,
    waits_on_host=_reads_exchanged_counts,
    decides=True,
    function="exchange_counts",
    call=lambda local: Call(),
    stem="rows_per_expert",
)

DISPATCH = OpDef(
    "dispatch",
    "A row of each token for each of its experts.",
    _dispatch_shape,
    operands=takes("x", "order"),
    linear=((0,),),
    roles=_roles,
    vjp=Vjp(wrt=(0,), unread=(0,), workspace=_bytes_of_sum),
    waits_on_host=_reads_own_counts,
    function="dispatch",
)


def _exchange(
    name: str, doc: str, copies_sent: Views = never, copies_received: Views = never
) -> OpDef:
    """An exchange of ragged rows, forth or back."""
    return OpDef(
        name,
        doc,
        operands=takes("rows", "rows_per_expert"),
        attributes=(MOVES, ASYNC),
        linear=((0,),),
        typing=_exchange_type,
        adjoint=_exchange_adjoint,
        communicates=_rows,
        function=name,
        call=lambda local: Call((), {ASYNC.name: True} if begins(local.op) else {}),
        saves=lambda local: Saved(operands=(1,)),
        workspace=_regroup_bytes,
        holds=_way_bytes,
        copies_sent=copies_sent,
        copies_received=copies_received,
    )


EXCHANGE = _exchange(
    "exchange",
    "Rows to the ranks of their experts, over several axes at once.",
    copies_received=regroups,
)
EXCHANGE_BACK = _exchange(
    "exchange_back", "Rows to the ranks of their tokens.", copies_sent=regroups
)

BACK = {EXCHANGE.name: EXCHANGE_BACK.name, EXCHANGE_BACK.name: EXCHANGE.name}

EXCHANGE_PADDED = OpDef(
    "exchange_padded",
    "Rows to the ranks of their experts, or back, over several axes at once; as many of each"
    " expert for every rank.",
    operands=takes("rows"),
    attributes=(MOVES,),
    linear=((0,),),
    typing=_exchange_type,
    adjoint=_exchange_adjoint,
    communicates=_messages_of_padded_rows,
    function="all_to_all",
    call=_exchange_padded_call,
    saves=lambda local: Saved(),
)

WAIT = OpDef(
    "wait",
    "Rows of an exchange that has begun, when they have come.",
    operands=takes("rows"),
    linear=((0,),),
    typing=lambda program, types, op: [types[0]],
    adjoint=lambda op, grads, b: [_send_back(b.maker(op.inputs[0]), grads, b)],
    awaits=True,
    function="wait",
    call=lambda local: Call(),
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
    may_delay=sums_over_batch,
    late_weights=True,
    function="grouped_linear",
    stem="y",
    saves=factors,
    work=_product_work,
)

BIASED = OpDef(
    "grouped_bias",
    "x + b of each expert for its rows, of which there are those of `order`.",
    _bias_shape,
    operands=(*takes("x", "b"), Operand("order", optional=True)),
    linear=((0, 1),),
    unsharded_dims=_choice_dims,
    adjoint=_bias_adjoint,
    function="grouped_bias",
    call=lambda local: Call(),
    stem="y",
    saves=lambda local: Saved(operands=tuple(range(2, len(local.types)))),
)

COMBINE = OpDef(
    "combine",
    "The sum over a token's experts of gate · row.",
    _combine_shape,
    operands=takes("rows", "gates", "order"),
    linear=((0,), (1,)),
    roles=_roles,
    vjp=Vjp(wrt=(0, 1), workspace=_spread_bytes),
    function="combine",
    workspace=_bytes_of_sum,
)
