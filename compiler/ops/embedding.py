"""Table look-up, over a sharded vocabulary too."""

from collections.abc import Sequence

from ..ir import ITEM_BYTES, Op, Type
from .call import Call, Group
from .protocol import OpDef, Operand, Shape, TypingError, Vjp
from .roles import Roles
from .saved_tensors import Local, Saved
from .work import Work, size


def _looked_up(types: Sequence[Type], op: Op) -> list[Shape]:
    tokens, table = types
    if len(table.dims) != 2 or set(table.dims) & set(tokens.dims):
        raise TypingError(
            f"embedding takes a table [rows, features], not [{', '.join(table.dims)}]"
        )
    return [(table.dtype, (*tokens.dims, *table.dims[1:]))]


def _rows(it: Local) -> Saved:
    """The tokens; for a part of the table, as it counts its rows, and which tokens it lacks."""
    table = it.types[1]
    if it.program.degree(table.axes_of(table.dims[0])) == 1:
        return Saved(operands=(0,))
    return Saved(others=(("rows", it.bytes()), ("rows elsewhere", it.elements())))


def _unmasked(it: Local) -> int:
    """Rows of a part of the table, before those of other ranks are zeroed."""
    table = it.types[1]
    width = it.program.local_size(table, table.dims[1]) * ITEM_BYTES[table.dtype]
    return 0 if it.program.degree(table.axes_of(table.dims[0])) == 1 else it.elements() * width


def _call(it: Local) -> Call:
    """The group of ranks that share the rows out."""
    axes = it.types[1].axes_of(it.types[1].dims[0])
    return Call((Group(axes),) if axes else ())


def _gradient_work(it: Local) -> Work:
    """The gradients of the tokens' rows, read, and added to a table of zeros."""
    table, tokens = it.types[1], it.elements()
    rows = tokens * it.program.local_size(table, table.dims[1]) * ITEM_BYTES[table.dtype]
    return Work(bytes=3 * rows + size(it, table), kernels=2)


EMBEDDING = OpDef(
    "embedding",
    "Rows of `table`; where its first dim is sharded, rows of other ranks count zero and the"
    " result is partial.",
    _looked_up,
    operands=(Operand("tokens", given="tokens"), Operand("table")),
    roles=lambda types, op: Roles(rows=types[1].dims[0]),
    vjp=Vjp(delayed=True, work=_gradient_work),
    function="embedding",
    torch="embedding",
    call=_call,
    stem="e",
    saves=_rows,
    workspace=_unmasked,
    work=lambda it: Work(bytes=2 * size(it, it.op.outputs[0].type)),
    user_visible=True,
)
