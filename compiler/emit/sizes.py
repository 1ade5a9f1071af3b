"""The sizes of a plan's dims, which a program names once: `HIDDEN, HEADS = 64, 4`.

Non-goals: sizes of one rank, which follow from them.
"""

from collections.abc import Iterable, Iterator, Mapping

from ..ir import Program, base
from .naming import TAKEN, WIDTH, class_name, singular
from .user_ops import modules


def size_names(program: Program, values: Iterable[str]) -> dict[str, str]:
    """The name of the size of each dim of a parameter, but for those that something else goes by."""
    cut = program.pipeline.dims if program.pipeline else ()
    dims = dict.fromkeys(dim for param in program.params for dim in param.type.dims if dim not in cut) | {"seq": None}
    classes = (class_name(singular(dim.name)) for dim in program.dims)
    taken = {*TAKEN, *modules(program), *classes, class_name(program.name), *map(base, values), "I", "L", "O"}
    words = {dim: dim.upper() for dim in dims}
    return {dim: word for dim, word in words.items() if word not in taken and [*words.values()].count(word) == 1}


def size_lines(program: Program, names: Mapping[str, str]) -> Iterator[str]:
    """The line that gives each its size, or several where that is too long."""
    sizes = [str(program.size(dim)) for dim in names]
    line = f"{', '.join(names.values())} = {', '.join(sizes)}"
    if len(names) < 2 or len(line) > WIDTH:
        yield from (f"{name} = {size}" for name, size in zip(names.values(), sizes, strict=True))
    else:
        yield line
    if program.pipeline:
        yield f"FIRST, LAST = 0, {len(program.pipeline.stage_to_rank) - 1}  # stages"


def product(names: Mapping[str, str], program: Program, dims: Iterable[str]) -> str:
    """The product of some sizes."""
    return " * ".join(names.get(dim, str(program.size(dim))) for dim in dims)
