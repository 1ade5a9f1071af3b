"""The router of a mixture of experts: the choice of each token's experts, its capacity, and its
losses.
"""

from collections.abc import Sequence
from math import ceil, prod

from attrs import evolve

from ..config.settings import PADDED
from ..ir import (
    BATCH,
    DATA_DIMS,
    ITEM_BYTES,
    PARTIAL,
    SEQUENCE,
    Kind,
    Op,
    Placement,
    Program,
    Type,
    sharded,
    splits,
)
from .call import Argument, Call, Dims, Group, Keyword, Positions, Quotient, Size
from .messages import Message
from .protocol import (
    Attribute,
    OpDef,
    Operand,
    Shape,
    TypingError,
    Vjp,
    last_dim,
    takes,
    total,
    wide,
)
from .reach import PAST
from .saved_tensors import Local, Saved

TO = Attribute("to", dims="any", implied=True)
"""The dim that a result has besides its operand's: of choices, or of experts."""

BY = Attribute("by", implied=True)
DIMS = Attribute("dims", kinds=(tuple,), implied=True)
"""The dims of a sum over tokens."""

SCORE = Attribute("score", ("softmax", "sigmoid"), "softmax")
ON = Attribute("normalise", ("off", "on"), "off")


def _choice_shapes(types: Sequence[Type], op: Op) -> list[Shape]:
    """Shapes of each token's gates and experts, one for each choice."""
    logits, *biases = types
    if any(bias.dims != logits.dims[-1:] for bias in biases):
        raise TypingError(f"{op.kind} takes a bias of each expert")
    if len(logits.dims) < 2:
        raise TypingError(f"{op.kind} takes logits [.., experts]")
    dims = (*logits.dims[:-1], str(op.get("to")))
    return [(wide(logits.dtype), dims), ("i64", dims)]


def _limit_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    (ids,) = types
    if ids.axes_of(ids.dims[-1]):
        raise TypingError(f"{op.kind} counts all choices of a token")
    return [ids]


def _load_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """A sum still to be done over the axes that have parts of the tokens."""
    load, ids = types
    if load.axes_in(Kind.PARTIAL) != ids.axes_in(Kind.SHARDED):
        raise TypingError(f"{op.kind} takes a load that is pending where ids are sharded")
    return [load]


def _zero_sum_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """A sum over tokens that begins, placed as `pending_over_tokens` says."""
    dtype = "i64" if op.kind != NO_SCORES.name else str(NO_SCORES.get(op, "dtype"))
    places = op.outputs[0].type.places if op.outputs else ()
    return [Type(dtype, op.names("dims"), places)]


def begins_sum(op: Op) -> bool:
    """Whether an op begins a sum over tokens."""
    return op.kind in (NO_LOAD.name, NO_CHOICES.name, NO_SCORES.name)


def is_sum_by_sequence(program: Program, type: Type) -> bool:
    """Whether a value has a number of each sequence for each expert: a sum over tokens, which
    ranks share out.
    """
    return (
        type.dims[:1] == (BATCH,)
        and len(type.dims) == 2
        and program.dim(type.dims[1]).twin in program.choices
    )


def pending_over_tokens(program: Program, op: Op) -> Op:
    """A sum over tokens that begins: still to be done over the axes on which the operand's tokens
    are sharded.

    A dim of tokens that the sum has is sharded there as the tokens are.
    """
    (result,) = op.outputs
    place_by_axis: dict[str, Placement] = {}
    for item in op.names("work"):
        axis, _, dim = item.partition(":")
        if dim in DATA_DIMS:
            place_by_axis[axis] = sharded(dim) if dim in result.type.dims else PARTIAL
    type = evolve(result.type, places=program.places(place_by_axis))
    attrs = tuple((key, value) for key, value in op.attrs if key != "work")
    return evolve(op, outputs=(evolve(result, type=type),), attrs=attrs)


def _count_type(program: Program, types: Sequence[Type], op: Op) -> list[Type]:
    """Counts of each sequence, a sum still to be done over the axes that have parts of the
    sequence.
    """
    counts, ids = types
    pending_by_sequence = counts.axes_in(Kind.PARTIAL) == ids.axes_of(SEQUENCE)
    same_batch = counts.axes_of(BATCH) == ids.axes_of(BATCH)
    if not pending_by_sequence or not same_batch or BATCH not in counts.dims:
        raise TypingError(
            f"{op.kind} takes counts of each sequence that are pending where a sequence is sharded"
        )
    return [counts]


def _by_sequence(types: Sequence[Type], op: Op) -> list[Shape]:
    """A number of each sequence for each expert."""
    (logits,) = types
    return [(wide(logits.dtype), tuple(dim for dim in logits.dims if dim != SEQUENCE))]


def _logits_and(local: Local, what: str, numbers: int) -> Saved:
    """The logits, and numbers of the loss' element type."""
    item = ITEM_BYTES[local.op.outputs[0].type.dtype]
    return Saved(operands=(0,), others=((what, numbers * item),))


def _balance_saves(local: Local) -> Saved:
    """The share of each expert in each sequence, saved in place of the choices."""
    logits = local.types[0]
    sequences = local.program.local_size(logits, BATCH)
    return _logits_and(local, "shares of experts", sequences * local.program.size(logits.dims[-1]))


def _balance_decision(local: Local) -> Saved:
    """The counts that ranks have summed, where they share sequences: the loss is made of them
    once more.
    """
    others: list[tuple[str, int]] = []
    for message in _counts_of_sequences(local):
        others.append(("counts of choices", prod(message.shape) * ITEM_BYTES[message.dtype]))
    return Saved(others=tuple(others))


def _counts_of_sequences(local: Local) -> tuple[Message, ...]:
    """How many tokens of each sequence chose each expert, summed over the ranks that share the
    sequence.
    """
    logits, axes = local.types[0], local.types[0].axes_of(SEQUENCE)
    if not axes:
        return ()
    shape = (local.program.local_size(logits, BATCH), local.program.size(logits.dims[-1]))
    return (Message("all_reduce", local.op.outputs[0].name, axes, "i64", shape),)


def _counts_of_chunks(local: Local) -> tuple[Message, ...]:
    """How many tokens of each run of positions of each sequence chose each expert, sent as one
    row.
    """
    program, ids = local.program, local.types[0]
    axes = ids.axes_of(SEQUENCE)
    if not axes:
        return ()
    runs = max(map(len, splits.runs_of_ranks(program, ids, SEQUENCE)))
    experts = program.size(str(local.op.get("experts")))
    counts = runs * program.local_size(ids, BATCH) * experts
    return (Message("all_gather", local.op.outputs[0].name, axes, "i64", (counts,)),)


def _choice_call(local: Local) -> Call:
    """The number of choices, and how they are made."""
    options: dict[str, Argument] = {}
    for key, value in local.op.attrs:
        if key == "from":
            key = "from_groups"
        if key == ON.name:
            options[key] = value == "on"
        elif key != TO.name:
            options[key] = value
    if len(local.op.inputs) > 1:
        options["bias"] = Keyword(1)
    return Call((Size(str(local.op.get("to"))),), options)


def _zero_sum_call(local: Local) -> Call:
    """The number of experts, and which dim of the tokens is the batch."""
    options: dict[str, Argument] = {"batch": Dims((BATCH,))}
    if dict(local.op.attrs).get("dtype") == "f64":
        options["double"] = True
    return Call((Size(local.op.names("dims")[-1]),), options)


def _scores_call(local: Local) -> Call:
    return Call((), {**_score_option(local.op), "seq": Dims((SEQUENCE,))})


def _score_option(op: Op) -> dict[str, Argument]:
    """How scores are made of logits, unless it is the default."""
    return {key: value for key, value in op.attrs if key == SCORE.name}


def _counts_call(local: Local) -> Call:
    """Which dim of the ids is the sequence: it has the place that it has among the batch and
    itself.
    """
    ids = local.types[1]
    return Call((), {"seq": ids.dims.index(SEQUENCE)})


def _aux_call(local: Local) -> Call:
    """The share of a group of sequences, and the rows and sequences of a group."""
    rows, sequences = int(str(local.op.get("rows"))), int(str(local.op.get("sequences")))
    by = _by(local.op, local.program.train.global_batch // sequences)
    return Call((), {"by": by, "rows": rows, "sequences": sequences})


def _balance_call(local: Local) -> Call:
    """The share of a sequence, and the ranks that share the sequence."""
    axes = local.types[0].axes_of(SEQUENCE)
    by = _by(local.op, local.program.train.global_batch)
    score = _score_option(local.op)
    return Call((), {"by": by, **score, "seq": Dims((SEQUENCE,)), **_over(axes)})


def _by(op: Op, count: int) -> Quotient:
    """A factor for each of the step's sequences or tokens."""
    return Quotient(float(str(op.get("by"))), count)


def _capacity_call(local: Local) -> Call:
    """The most tokens of a sequence that an expert takes, and the positions that a rank has."""
    axes, experts = local.types[0].axes_of(SEQUENCE), str(local.op.get("experts"))
    arguments = Size(experts), capacity(local.program, local.op)
    options: dict[str, Argument] = {"seq": Dims((SEQUENCE,))}
    if axes:
        options["positions"] = Positions(SEQUENCE, axes)
    return Call(arguments, options | _over(axes))


def capacity(program: Program, op: Op) -> int:
    """The most tokens of a sequence that `limit_capacity` leaves an expert: an equal share
    times the capacity.
    """
    experts, k = program.size(str(op.get("experts"))), program.size(op.outputs[0].type.dims[-1])
    return ceil(float(str(op.get("capacity"))) * program.size(SEQUENCE) * k / experts)


def with_padding(program: Program) -> Program:
    """The program with experts that, if padded at all, are padded to all rows that their capacity
    leaves of a sequence.

    A rank that has a part of the sequence has no more rows for an expert than positions.
    """
    rows_by_experts: dict[str, int] = {}
    for op in program.ops if program.train.experts == PADDED else ():
        if op.kind == CAPACITY.name:
            experts = str(op.get("experts"))
            ranks = program.degree(program.types[op.inputs[0]].axes_of(SEQUENCE))
            rows = ranks * min(capacity(program, op), program.size(SEQUENCE) // ranks)
            rows_by_experts[experts] = max(rows_by_experts.get(experts, 0), rows)
    dims = tuple(evolve(dim, padded=rows_by_experts.get(dim.name, 0)) for dim in program.dims)
    return evolve(program, dims=dims)


def _over(axes: tuple[str, ...]) -> dict[str, Argument]:
    return {"over": Group(axes)} if axes else {}


TOP = OpDef(
    "top",
    "The `to` best experts of each token by scores and biases, their scores as gates; ties go"
    " to the lower index.",
    _choice_shapes,
    operands=(Operand("logits"), Operand("bias", optional=True)),
    attributes=(
        SCORE,
        ON,
        Attribute("scale", default=1.0),
        Attribute("groups", default=1, kinds=(int,)),
        Attribute("from", default=1, kinds=(int,)),
        TO,
    ),
    unsharded_dims=last_dim,
    as_placed=(1,),
    vjp=Vjp(wrt=(0,)),
    decides=True,
    function="top_k",
    call=_choice_call,
    stem="gates",
    saves=lambda local: Saved(operands=(0,), results=(0, 1)),
)


def choices_with_capacity(program: Program) -> tuple[int, ...]:
    """How many experts a token chooses, for each load; () where none is dropped."""
    if not any(op.kind == CAPACITY.name for op in program.ops):
        return ()
    ends = program.microbatches.yields[program.losses : program.microbatch_results]
    choices: list[int] = []
    for end in ends:
        load = program.types[end.name]
        experts = program.dim(program.dim(load.dims[-1]).twin)
        choices.append(program.size(experts.chosen))
    return tuple(choices)


NO_LOSS = OpDef(
    "no_loss",
    "A loss of zero, to which routers add theirs; like the tokens of `x`, a sum over ranks.",
    total,
    operands=takes("x"),
    adjoint=lambda op, grads, b: [None],
    function="no_loss",
    stem="router_loss",
    saves=lambda local: Saved(),
)

NO_LOAD = OpDef(
    "no_load",
    "A load of zero: how many of the tokens `x` each expert will have taken in each layer.",
    operands=takes("x"),
    attributes=(DIMS,),
    typing=_zero_sum_type,
    as_placed=(0,),
    function="no_load",
    call=lambda local: Call(tuple(map(Size, local.op.names("dims")))),
    stem="load",
)

ADD_LOAD = OpDef(
    "add_load",
    "The rows of `load` after its first, then how many tokens each expert takes: a row for"
    " each layer, in their order.",
    operands=takes("load", "ids"),
    typing=_load_type,
    as_placed=(0,),
    function="add_load",
    stem="load",
)

BALANCE = OpDef(
    "balance",
    "by · Σ f · P over sequences and experts: f the share of choices times their number, P the"
    " mean of scores.",
    total,
    operands=takes("logits", "ids"),
    attributes=(BY, SCORE),
    unsharded_dims=last_dim,
    vjp=Vjp(wrt=(0,)),
    communicates=_counts_of_sequences,
    decides=True,
    decision=_balance_decision,
    function="balance",
    call=_balance_call,
    stem="router_loss",
    saves=_balance_saves,
)

NO_SCORES = OpDef(
    "no_scores",
    "Scores of zero: of each sequence of `tokens`, the sum that `sum_scores` will have made"
    " for each expert.",
    operands=takes("tokens"),
    attributes=(DIMS, Attribute("dtype", choices=("f32", "f64"), default="f32", implied=True)),
    typing=_zero_sum_type,
    as_placed=(0,),
    adjoint=lambda op, grads, b: [None],
    function="no_scores",
    call=_zero_sum_call,
    stem="scores",
    saves=lambda local: Saved(),
)

NO_CHOICES = OpDef(
    "no_choices",
    "Counts of zero: of each sequence of `tokens`, how many will have chosen each expert.",
    operands=takes("tokens"),
    attributes=(DIMS,),
    typing=_zero_sum_type,
    as_placed=(0,),
    function="no_choices",
    call=_zero_sum_call,
    stem="choices",
)

SUM_SCORES = OpDef(
    "sum_scores",
    "The sum over each sequence's tokens of their scores of each expert.",
    _by_sequence,
    operands=takes("logits"),
    attributes=(SCORE,),
    unsharded_dims=last_dim,
    vjp=Vjp(),
    function="sum_scores",
    call=_scores_call,
    stem="scores",
)

ADD_CHOICES = OpDef(
    "add_choices",
    "The counts `choices`, and how many tokens of each sequence chose each expert.",
    operands=takes("choices", "ids"),
    typing=_count_type,
    as_placed=(0,),
    function="add_choices",
    call=_counts_call,
    stem="choices",
)

AUX_LOSS = OpDef(
    "aux_loss",
    "by · experts · Σ f · P over groups of `sequences` and over experts: f and P are the"
    " group's choices and scores, "
    "each divided by the `rows` of all layers that a group has.",
    total,
    operands=takes("scores", "choices"),
    attributes=(
        BY,
        Attribute("rows", kinds=(int,), implied=True),
        Attribute("sequences", kinds=(int,), implied=True),
    ),
    unsharded_dims=last_dim,
    vjp=Vjp(wrt=(0,), unread=(0,)),
    function="aux_loss",
    call=_aux_call,
    stem="router_loss",
    saves=lambda local: Saved(
        others=(("choices of experts", local.program.elements(local.types[0]) * local.wide),)
    ),
)

ROUTER_Z = OpDef(
    "router_z",
    "by · Σ (log Σ exp logits)² over tokens.",
    total,
    operands=takes("logits"),
    attributes=(BY,),
    unsharded_dims=last_dim,
    vjp=Vjp(),
    function="router_z",
    call=lambda local: Call(
        (), {"by": _by(local.op, local.program.train.global_batch * local.program.size(SEQUENCE))}
    ),
    stem="router_loss",
    saves=lambda local: _logits_and(
        local, "log of the sum", local.elements() // local.program.size(local.types[0].dims[-1])
    ),
)

CAPACITY = OpDef(
    "limit_capacity",
    "The choices without those of an expert that has `capacity` times its equal share of the"
    " sequence before.",
    operands=takes("ids"),
    attributes=(
        Attribute("capacity", implied=True),
        Attribute("experts", dims="any", implied=True),
    ),
    typing=_limit_type,
    reach=lambda types, op: {0: PAST},
    communicates=_counts_of_chunks,
    decides=True,
    function="limit_capacity",
    call=_capacity_call,
    stem="ids",
)
