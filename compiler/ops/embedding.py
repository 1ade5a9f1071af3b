"""Table look-up, over a sharded vocabulary too."""

from collections.abc import Sequence

from ..ir import ITEM_BYTES, Op, Type
from .call import Call, Group
from .protocol import OpDef, Operand, Shape, TypingError, Vjp
from .roles import Roles
from .saved_tensors import Local, Saved
from .work import Work, size


def _embedding_shape(types: Sequence[Type], op: Op) -> list[Shape]:
    tokens, table = types
    if len(table.dims) != 2 or set(table.dims) & set(tokens.dims):
        raise TypingError(
            f"embedding takes a table [rows, features], not [{', '.join(table.dims)}]"
        )
    return [(table.dtype, (*tokens.dims, *table.dims[1:]))]


def _rows(local: Local) -> Saved:
    """The tokens; a part of the table saves them as it counts its own rows, and which tokens it
    lacks.
    """
    table = local.types[1]
    if local.program.degree(table.axes_of(table.dims[0])) == 1:
        return Saved(operands=(0,))
    return Saved(others=(("rows", local.bytes()), ("rows elsewhere", local.elements())))


def _workspace(local: Local) -> int:
    """Rows of a part of the table, before the rows of other ranks are zeroed."""
    table = local.types[1]
    if local.program.degree(table.axes_of(table.dims[0])) == 1:
        return 0
    width = local.program.local_size(table, table.dims[1]) * ITEM_BYTES[table.dtype]
    return local.elements() * width


def _call(local: Local) -> Call:
    """The group of ranks that share the rows out."""
    axes = local.types[1].axes_of(local.types[1].dims[0])
    return Call((Group(axes),) if axes else ())


def _gradient_work(local: Local) -> Work:
    """The work of reading the gradients of the tokens' rows and adding them to a table of zeros."""
    table, tokens = local.types[1], local.elements()
    rows = tokens * local.program.local_size(table, table.dims[1]) * ITEM_BYTES[table.dtype]
    return Work(bytes=3 * rows + size(local, table), kernels=2)


EMBEDDING = OpDef(
    "embedding",
    "Rows of `table`; where its first dim is sharded, rows of other ranks count zero and the"
    " result is partial.",
    _embedding_shape,
    operands=(Operand("tokens", input_name="tokens"), Operand("table")),
    roles=lambda types, op: Roles(rows=types[1].dims[0]),
    vjp=Vjp(delayed=True, work=_gradient_work),
    function="embedding",
    torch="embedding",
    call=_call,
    stem="e",
    saves=_rows,
    workspace=_workspace,
    work=lambda local: Work(bytes=2 * size(local, local.op.outputs[0].type)),
    user_visible=True,
)
