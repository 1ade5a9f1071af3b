"""The constants of a program: sizes of dims, functions made of kernels, the layers and ranks of a
pipeline's stages.

Non-goals: which kernels a program has (`analysis.kernel_tiles`), what a stage does
(`staged_forward`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from ..analysis.elastic import every_size
from ..analysis.kernel_tiles import Used, chip, kernels_of, tiles_file
from ..ir import MICROBATCHES, Pipeline, Program, Value, base
from ..ir.stages import crossing, stages
from ..schedules.csv_file import csv, groups_csv
from .naming import (
    DTYPES,
    TAKEN,
    WIDTH,
    call,
    class_name,
    exploded,
    filled,
    literal,
    read_beside,
    singular,
)
from .user_ops import modules


def size_names(program: Program, values: Iterable[str]) -> dict[str, str]:
    """The name of the size of each dim of a parameter, but for those that something else goes
    by.
    """
    cut = program.pipeline.dims if program.pipeline else ()
    dims = dict.fromkeys(
        dim for param in program.params for dim in param.type.dims if dim not in cut
    ) | {"seq": None}
    classes = (class_name(singular(dim.name)) for dim in program.dims)
    taken = {
        *TAKEN,
        *modules(program),
        *classes,
        class_name(program.name),
        *map(base, values),
        "I",
        "L",
        "O",
    }
    words = {dim: dim.upper() for dim in dims if not program.dim(dim).twin}
    names = {
        dim: word
        for dim, word in words.items()
        if word not in taken and [*words.values()].count(word) == 1
    }
    return names | {dim.name: names[dim.twin] for dim in program.dims if dim.twin in names}


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
        f"TILES = {read_beside('read_tiles', file, 0)}",
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
    each = (
        [_range(stage.layers[i]) for stage in stages(program, pipeline)]
        for i, _ in enumerate(pipeline.dims)
    )
    layers = [
        filled(f"{literal(dim)}: ", ranges, 4)
        for dim, ranges in zip(pipeline.dims, each, strict=True)
    ]
    first, entries = "LAYERS_OF_STAGE = {  # by repeat", (f"    {entry}," for entry in layers)
    return [first, *entries, f"}}{_as_it_is(layers)}"]


def pipeline_line(program: Program, sizes: Mapping[str, str]) -> str:
    """The pipeline: which rank has each stage, what crosses, and the file of each rank's row."""
    pipeline = program.pipeline
    assert pipeline, "emit: no pipeline"
    largest, *others = _files_of_sizes(program)
    arguments = [
        literal(pipeline.axis),
        filled("stage_to_rank=", [*map(str, pipeline.stage_to_rank)], 4),
        _carried(program, pipeline, sizes),
        *(f"{key}={read_beside('read_schedule', file)}" for key, file in largest.items()),
        *_smaller(program, others),
    ]
    return exploded("PIPELINE = Pipeline", arguments, 0) + _as_it_is(arguments[1:2])


def _as_it_is(tuples: Iterable[str]) -> str:
    """The sign that keeps formatters from writing tuples that have several lines with one entry
    on each.
    """
    return "  # fmt: skip" if any("\n" in each for each in tuples) else ""


def schedule_files(program: Program) -> dict[str, str]:
    """The files that a program with a pipeline reads its rows from, name → text."""
    files = (
        [file for files in _files_of_sizes(program) for file in files.values()]
        if program.pipeline
        else []
    )
    return {name: text for file in files for name, text in file.items()}


def _files_of_sizes(program: Program) -> list[dict[str, dict[str, str]]]:
    """At each size of an elastic axis the arguments that are read from files, and these, name →
    text.
    """
    return [
        _row_files(it, f"_{it.size(MICROBATCHES)}" * (i > 0))
        for i, it in enumerate(every_size(program))
    ]


def _row_files(program: Program, number: str) -> dict[str, dict[str, str]]:
    assert program.pipeline, "emit: no pipeline"
    schedule = program.pipeline.schedule
    assert schedule, "emit: no schedule"
    groups = {f"message_groups{number}.csv": groups_csv(schedule)}
    return {"schedule": {f"schedule{number}.csv": csv(schedule)}, "message_groups": groups}


def _smaller(program: Program, files: Sequence[dict[str, dict[str, str]]]) -> Iterator[str]:
    """The argument with the rows of smaller sizes, by their numbers of microbatches."""
    entries = (
        exploded(
            f"{it.size(MICROBATCHES)}: ",
            [read_beside("read_schedule", file, 12) for file in each.values()],
            8,
        )
        for it, each in zip(every_size(program)[1:], files, strict=True)
    )
    if files:
        yield "\n".join(
            [
                "smaller={  # by their microbatches, where nodes are lost",
                *(f"        {entry}," for entry in entries),
                "    }",
            ]
        )


def _range(layers: range) -> str:
    return f"range({layers.start}, {layers.stop})"


def _carried(program: Program, pipeline: Pipeline, sizes: Mapping[str, str]) -> str:
    """The values that cross, in order; where they differ between cuts, with the cuts that they
    cross.
    """
    cuts = [
        [_value(value, program, sizes) for value in values]
        for values in crossing(program, pipeline)
    ]
    entries: list[str] = []
    begin = 0
    for values, same in groupby(cuts):
        end = begin + len([*same])
        some = f", cuts={_range(range(begin, end))}" if end - begin < len(cuts) else ""
        entries += [f"StageInput({value}{some})" for value in values]
        begin = end
    return call("stage_inputs=", entries if len(entries) > 1 else [f"{entries[0]},"], 4)


def _value(value: Value, program: Program, sizes: Mapping[str, str]) -> str:
    constant = "" if value.type.differentiable else ", gradient=False"
    degrees = {dim: program.degree(value.type.axes_of(dim)) for dim in value.type.dims}
    parts = {
        dim: f"{sizes[dim]} // {n}" if n > 1 else sizes[dim]
        for dim, n in degrees.items()
        if dim in sizes
    }
    shape = [parts.get(dim, str(program.local_size(value.type, dim))) for dim in degrees]
    dims = f"({', '.join(shape)}{',' * (len(shape) == 1)})"
    return f"{literal(base(value.name))}, {dims}, {DTYPES[value.type.dtype]}{constant}"
