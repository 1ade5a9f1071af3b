"""The shape that a parameter has in files of weights, whatever the parameter.

The writer of `hf_names.json` and the reader that checks it both take it from here.
Non-goals: the tensor that holds it (`emit.hf_names`), its shape in checkpoints (`bucket_layout`).
"""

from math import prod

from ..ir import SEQUENCE, Param, Program
from ..schedules.actions import once
from .param_uses import get_param_values
from .vocabulary import tables


@once
def get_file_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter in files, repeats and experts apart.

    A matrix is [out, in], a table keeps its dims, all else is flat.
    """
    param_of = get_param_values(program)
    token_tables = {param_of[value] for value in tables(program) if value in param_of}
    shapes: dict[str, tuple[int, ...]] = {}
    for param in program.params_and_buffers:
        shapes[param.name] = _shape(program, param, param.name in token_tables)
    return shapes


def _shape(program: Program, param: Param, is_token_table: bool) -> tuple[int, ...]:
    sizes = _sizes(program, param)
    if param.inner:
        return prod(sizes[: -param.inner]), prod(sizes[-param.inner :])
    has_rows = is_token_table or SEQUENCE in param.type.dims
    if has_rows and sizes:
        return sizes
    return (prod(sizes),)


def _sizes(program: Program, param: Param) -> tuple[int, ...]:
    """The sizes of a parameter's own dims.

    Padding is left out where it is the last rows: in the first dim.  Elsewhere a file has the
    padding too.
    """
    dims = param.type.dims[len(program.outer(param)) :]
    return (*map(program.valid, dims[:1]), *map(program.size, dims[1:]))
