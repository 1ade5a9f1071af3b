"""Where files of weights hold the parameters, as an emitted program says it.

Non-goals: how a plan says it (`names`), reading and writing such files (the runtime).
"""

from collections.abc import Iterator
from math import prod

from ..analysis.param_uses import leaves
from ..config.hf_names import HFWeight
from ..ir import PRECISIONS, Param, Program, walk
from ..ops.attention import SEQUENCE
from .naming import DTYPES, literal


def weights_lines(program: Program, patterns: dict[str, str]) -> Iterator[str]:
    """The setting `names` of a plan that has such; `patterns` are the parameters' names in the program's state."""
    if not program.names:
        return
    yield "names=HFNames("
    yield f"    {DTYPES[PRECISIONS[program.train.precision]]},"
    yield "    {"
    for each in program.names:
        yield from _entry(patterns[each.param], each, program)
    yield "    },"
    counts = ", ".join(f"{literal(path)}: {count}" for path, count in _repeats(program, patterns).items())
    yield f"    repeats={{{counts}}},"
    yield "),"


def _repeats(program: Program, patterns: dict[str, str]) -> dict[str, int]:
    """How often each repeat around a parameter is repeated, by what the parameters' names have before its `*`."""
    found: dict[str, int] = {}
    for param in program.params:
        parts = patterns[param.name].split(".*")
        for depth, dim in enumerate(param.type.dims[: param.stacked], start=1):
            found[".*".join(parts[:depth])] = program.size(dim)
    return found


def _entry(pattern: str, each: HFWeight, program: Program) -> Iterator[str]:
    arguments = [literal(each.tensor), literal(_shape(each, program))]
    if each.part:
        arguments.append(f"start={sum(_shape_of(param, program)[0] for param in _parts(each, program)[: each.part])}")
    if each.transposed:
        arguments.append("transposed=True")
    if each.interleaved:
        arguments.append(f"interleaved=({each.interleaved}, {_head(each, program)})")
    if _has_positions(each, program):
        arguments.append("positions=True")
    line = f"        {literal(pattern)}: HFWeight({', '.join(arguments)}),"
    if len(line) <= 116:
        yield line
        return
    yield f"        {literal(pattern)}: HFWeight("
    yield from (f"            {argument}," for argument in arguments)
    yield "        ),"


def _shape(each: HFWeight, program: Program) -> tuple[int, ...]:
    """The shape of the whole tensor, as the file has it."""
    shapes = [_shape_of(param, program) for param in _parts(each, program)]
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return whole[::-1] if each.transposed else whole


def _parts(each: HFWeight, program: Program) -> list[Param]:
    """All parameters that lie in the same tensor, in their order there."""
    part_of = {other.param: other.part for other in program.names if other.tensor == each.tensor}
    return sorted((param for param in program.params if param.name in part_of), key=lambda param: part_of[param.name])


def _shape_of(param: Param, program: Program) -> tuple[int, ...]:
    """A parameter's shape in files, without padding: matrices [out, in], tables as they are, all else flat."""
    sizes = [program.valid(dim) for dim in param.type.dims[param.stacked :]]
    if param.inner:
        return prod(sizes[: -param.inner]), prod(sizes[-param.inner :])
    return tuple(sizes) if param.name in _tables(program) else (prod(sizes),)


def _head(each: HFWeight, program: Program) -> int:
    """The rows of a head: the last of a parameter's dims that no matrix product sums over."""
    param = next(param for param in program.params if param.name == each.param)
    return program.valid(param.type.dims[len(param.type.dims) - param.inner - 1])


def _has_positions(each: HFWeight, program: Program) -> bool:
    """Whether the tensor is a table of positions, of which a file may have more than the plan's sequences."""
    (param,) = (param for param in program.params if param.name == each.param)
    is_table = param.type.dims[param.stacked :][:1] == (SEQUENCE,) and not param.inner
    return is_table and not each.transposed and each.parts == 1


def _tables(program: Program) -> set[str]:
    """The parameters that have a row for each token or each position."""
    own = leaves(program)
    looked_up = {own.get(op.inputs[1], "") for op in walk(program.region.body) if op.kind == "embedding"}
    return looked_up | {param.name for param in program.params if SEQUENCE in param.type.dims}
