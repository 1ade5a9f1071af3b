"""The constants of a program: sizes of dims, functions made of kernels, the layers and ranks of a
pipeline's stages.

Non-goals: which kernels a program has (`analysis.kernel_tiles`), what a stage does
(`staged_forward`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from ..analysis.elastic import every_size
from ..analysis.kernel_tiles import Used, chip, kernels_of, tiles_file
from ..ir import MICROBATCHES, Op, Pipeline, Program, Type, Value, base, walk
from ..ir.stages import crossing, stages
from ..ops.call import RotaryTable, Size
from ..ops.saved_tensors import Local
from ..schedules.csv_file import csv, groups_csv
from .naming import (
    DTYPES,
    TAKEN,
    WIDTH,
    call,
    class_name,
    companion_call,
    explode,
    fill_lines,
    literal,
    singular,
)
from .target import Target
from .user_ops import modules


def size_names(program: Program, types: Mapping[str, Type], target: Target) -> dict[str, str]:
    """The name of the size of each dim of a parameter, and of each dim whose size calls name,
    except names that something else has; `types` are the types of all values.
    """
    cut = program.pipeline.dims if program.pipeline else ()
    dims = dict[str, None]()  # as an ordered set
    for param in program.params:
        dims |= dict.fromkeys(dim for dim in param.type.dims if dim not in cut)
    dims["seq"] = None
    for op in walk(program.forward.body):
        for dim in _dims_in_call(op, program, types, target):
            dims[program.dim(dim).twin or dim] = None
    classes = (class_name(singular(dim.name)) for dim in program.dims)
    taken = {*TAKEN, *modules(program), *classes, class_name(program.name), *map(base, types)}
    taken |= {"I", "L", "O"}  # read as digits
    words = {dim: dim.upper() for dim in dims if not program.dim(dim).twin}
    occurrences = Counter(words.values())
    names = dict[str, str]()
    for dim, word in words.items():
        if word not in taken and occurrences[word] == 1:
            names[dim] = word
    return names | {dim.name: names[dim.twin] for dim in program.dims if dim.twin in names}


def _dims_in_call(
    op: Op, program: Program, types: Mapping[str, Type], target: Target
) -> Iterator[str]:
    """The dims whose sizes the call of an op says, or the table of positions that it rotates by."""
    call = target.call(Local(program, op, tuple(types[name] for name in op.inputs)))
    for argument in (*call.args, *call.options.values()):
        match argument:
            case Size(dim):
                yield dim
            case RotaryTable() if "dims" not in dict(op.attrs):
                yield types[op.inputs[0]].dims[-1]
            case _:
                pass


def size_lines(program: Program, names: Mapping[str, str]) -> Iterator[str]:
    """The line that gives each its size, or several where that is too long."""
    sizes = {name: str(program.size(dim)) for dim, name in names.items()}
    line = f"{', '.join(sizes)} = {', '.join(sizes.values())}"
    if len(sizes) < 2 or len(line) > WIDTH:
        yield from (f"{name} = {size}" for name, size in sizes.items())
    else:
        yield line
    if program.pipeline:
        yield f"FIRST, LAST = 0, {len(program.pipeline.stage_to_rank) - 1}  # stages"


def product(names: Mapping[str, str], program: Program, dims: Iterable[str]) -> str:
    """The product of some sizes."""
    return " * ".join(names.get(dim, str(program.size(dim))) for dim in dims)


# ---- kernels


def kernel_lines(program: Program) -> list[str]:
    """The file of the tiles, and the functions that are kernels; none where a program calls
    torch's own.
    """
    if not (file := tiles_file(program)):
        return []
    head = f"# Triton kernels with tiles for {chip(program)}; elsewhere torch does the same."
    return [
        head,
        f"TILES = {companion_call('read_tiles', file, 0)}",
        *map(_kernel, kernels_of(program)),
    ]


def _kernel(used: Used) -> str:
    chunk = f", chunk={used.chunk}" if used.chunk else ""
    return f"{used.function} = {used.name}(TILES[{literal(used.name)}]{chunk})"


# ---- stages


def stage_lines(program: Program) -> list[str]:
    """The layers of each stage, if there are stages."""
    if not (pipeline := program.pipeline):
        return []
    all_stages, layers = stages(program, pipeline), list[str]()
    for i, dim in enumerate(pipeline.dims):
        layers.append(_layers_entry(dim, [stage.layers[i] for stage in all_stages]))
    entries = [f"    {entry}," for entry in layers]
    head = "LAYERS_OF_STAGE = {  # by repeat: the layers of stage 0, of stage 1, …"
    return [head, *entries, f"}}{_as_it_is(layers)}"]


def _layers_entry(dim: str, layers: Sequence[range]) -> str:
    """The layers of a repeat by stage: a range each, if all fit one line."""
    name = f"{literal(dim)}: "
    entry = call(name, [*map(_range, layers)], 4)
    if "\n" not in entry:
        return entry
    entries = list[str]()
    for _, neighbours in groupby(layers, len):
        entries += _equal_ranges([*neighbours])
    return _table(name, entries)


def _table(name: str, entries: Sequence[str]) -> str:
    """A tuple with these entries, where a star marks several values."""
    if entries[1:] or not entries[0].startswith("*"):
        return fill_lines(name, entries, 4)
    values = entries[0].removeprefix("*")
    return f"{name}tuple{values}" if values.startswith("(") else f"{name}tuple({values})"


def _equal_ranges(layers: Sequence[range]) -> list[str]:
    """The layers of neighbouring stages that have equally many; of three or more, one entry."""
    size, count = len(layers[0]), len(layers)
    if not size:
        return [f"*{count} * (range(0),)"] if count > 1 else ["range(0)"]
    if count < 3:
        return [*map(_range, layers)]
    start, stop = layers[0].start, layers[-1].stop
    first_layers = _range(range(start, stop)) if size == 1 else f"range({start}, {stop}, {size})"
    return [f"*(range(i, i + {size}) for i in {first_layers})"]


def pipeline_line(program: Program, sizes: Mapping[str, str]) -> str:
    """The pipeline: which rank has each stage, what crosses, and the file of each rank's row."""
    pipeline = program.pipeline
    assert pipeline, "emit: no pipeline"
    largest, *others = _files_of_sizes(program)
    arguments = [
        literal(pipeline.axis),
        _table("stage_to_rank=", _ranks_of_stages(pipeline.stage_to_rank)),
        _stage_inputs(program, pipeline, sizes),
        *(f"{key}={companion_call('read_schedule', file)}" for key, file in largest.items()),
        *_smaller(program, others),
    ]
    return explode("PIPELINE = Pipeline", arguments, 0) + _as_it_is(arguments[1:2])


LISTED = 8
"""The most stages whose ranks are listed one by one."""


def _ranks_of_stages(ranks: Sequence[int]) -> list[str]:
    """The rank of each stage; in a pipeline with many, a range for each pass over all ranks."""
    count = max(ranks) + 1
    ranges = {
        (*range(count),): f"*range({count})",
        (*range(count)[::-1],): f"*range({count - 1}, -1, -1)",
    }
    passes = [(*ranks[start : start + count],) for start in range(0, len(ranks), count)]
    if len(ranks) <= LISTED or not ranges.keys() >= {*passes}:
        return [*map(str, ranks)]
    return [ranges[ranks_of_pass] for ranks_of_pass in passes]


def _as_it_is(tuples: Iterable[str]) -> str:
    """The sign that keeps formatters from rewriting tuples that have several entries on each of
    several lines.
    """
    return "  # fmt: skip" if any("\n" in entries for entries in tuples) else ""


def schedule_files(program: Program) -> dict[str, str]:
    """The files that a program with a pipeline reads its rows from, name → text."""
    if not program.pipeline:
        return {}
    files = dict[str, str]()
    for files_by_argument in _files_of_sizes(program):
        for file in files_by_argument.values():
            files |= file
    return files


def _files_of_sizes(program: Program) -> list[dict[str, dict[str, str]]]:
    """At each size of an elastic axis, the arguments that are read from files, each with its
    file, name → text.
    """
    files = list[dict[str, dict[str, str]]]()
    for i, sized in enumerate(every_size(program)):
        suffix = f"_{sized.size(MICROBATCHES)}" if i else ""
        files.append(_row_files(sized, suffix))
    return files


def _row_files(program: Program, number: str) -> dict[str, dict[str, str]]:
    assert program.pipeline, "emit: no pipeline"
    schedule = program.pipeline.schedule
    assert schedule, "emit: no schedule"
    groups = {f"message_groups{number}.csv": groups_csv(schedule)}
    return {"schedule": {f"schedule{number}.csv": csv(schedule)}, "message_groups": groups}


def _smaller(program: Program, files: Sequence[dict[str, dict[str, str]]]) -> Iterator[str]:
    """The argument with the rows of smaller sizes, by their numbers of microbatches."""
    if not files:
        return
    lines = ["smaller={  # on smaller meshes, by their microbatches"]
    for sized, files_of_size in zip(every_size(program)[1:], files, strict=True):
        reads = [companion_call("read_schedule", file, 12) for file in files_of_size.values()]
        lines.append(f"        {explode(f'{sized.size(MICROBATCHES)}: ', reads, 8)},")
    yield "\n".join([*lines, "    }"])


def _range(layers: range) -> str:
    return f"range({layers.start}, {layers.stop})"


def _stage_inputs(program: Program, pipeline: Pipeline, sizes: Mapping[str, str]) -> str:
    """The values that cross, in order.

    Where they differ between cuts, each has the numbers of the cuts that it crosses.
    """
    cuts = list[list[str]]()
    for values in crossing(program, pipeline):
        cuts.append([_value(value, program, sizes) for value in values])
    entries: list[str] = []
    begin = 0
    for values, same in groupby(cuts):
        end = begin + len([*same])
        cuts_word = f", cuts={_range(range(begin, end))}" if end - begin < len(cuts) else ""
        entries += [f"StageInput({value}{cuts_word})" for value in values]
        begin = end
    if len(entries) == 1:
        entries = [f"{entries[0]},"]  # a tuple of one
    return call("stage_inputs=", entries, 4)


def _value(value: Value, program: Program, sizes: Mapping[str, str]) -> str:
    """The arguments that describe a value that crosses: its name, its shape on a rank, its type."""
    shape = list[str]()
    for dim in value.type.dims:
        size, degree = sizes.get(dim), program.degree(value.type.axes_of(dim))
        if size is None:
            size = str(program.local_size(value.type, dim))
        elif degree > 1:
            size = f"{size} // {degree}"
        shape.append(size)
    constant = "" if value.type.differentiable else ", gradient=False"
    comma = "," if len(shape) == 1 else ""
    dims = f"({', '.join(shape)}{comma})"
    return f"{literal(base(value.name))}, {dims}, {DTYPES[value.type.dtype]}{constant}"
