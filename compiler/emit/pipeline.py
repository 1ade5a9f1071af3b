"""What a program says of its pipeline: each stage's layers and rank, what crosses, and the file of each rank's row.

Non-goals: the model's stages (`bodies`), and the call that runs the rows (`step`).
"""

from itertools import groupby

from attrs import frozen

from ..ir import Pipeline, Program, Value, base
from ..ir.stages import crossing, stages
from ..schedules.csv_file import csv
from .naming import DTYPES, call, exploded, literal, read_beside


@frozen
class PipelineLines:
    """The constants before the classes, and the value behind them."""

    layers: tuple[str, ...] = ()
    value: tuple[str, ...] = ()


def pipeline_lines(program: Program) -> PipelineLines:
    """What stands in the program, nothing without a pipeline."""
    pipeline = program.pipeline
    if not pipeline:
        return PipelineLines()
    assert pipeline.schedule, "emit: no schedule"
    all_ = stages(program, pipeline)
    layers = [
        "LAYERS_OF_STAGE = {  # of each repeat, those of each stage",
        *(
            f"    {call(f'{literal(dim)}: ', [_range(stage.layers[i]) for stage in all_], 4)},"
            for i, dim in enumerate(pipeline.dims)
        ),
        "}",
    ]
    arguments = [
        literal(pipeline.axis),
        f"stage_to_rank={literal(pipeline.stage_to_rank)}",
        _carried(program, pipeline),
        f"schedule={read_beside('read_schedule', schedule_file(program))}",
    ]
    return PipelineLines(tuple(layers), (exploded("PIPELINE = Pipeline", arguments, 0),))


def schedule_file(program: Program) -> dict[str, str]:
    """The file that a program with a pipeline reads its rows from, name → text."""
    pipeline = program.pipeline
    return {"schedule.csv": csv(pipeline.schedule)} if pipeline and pipeline.schedule else {}


def _range(layers: range) -> str:
    return f"range({layers.start}, {layers.stop})"


def _carried(program: Program, pipeline: Pipeline) -> str:
    """What crosses, in its order; where that is not the same at all cuts, at which ones it is."""
    cuts = [[_value(value, program) for value in values] for values in crossing(program, pipeline)]
    entries: list[str] = []
    begin = 0
    for values, same in groupby(cuts):
        end = begin + len([*same])
        some = f", cuts={_range(range(begin, end))}" if end - begin < len(cuts) else ""
        entries += [f"StageInput({value}{some})" for value in values]
        begin = end
    return call("stage_inputs=", entries if len(entries) > 1 else [f"{entries[0]},"], 4)


def _value(value: Value, program: Program) -> str:
    constant = "" if value.type.differentiable else ", gradient=False"
    shape = literal(program.local_shape(value.type))
    return f"{literal(base(value.name))}, {shape}, {DTYPES[value.type.dtype]}{constant}"
