"""What a program says of its pipeline: each stage's turns, homes, what crosses, and each rank's row.

Non-goals: the model's stages (`bodies`), and the call that runs the rows (`step`).
"""

import textwrap
from itertools import groupby

from attrs import frozen

from ..ir import Pipeline, Program, Value, base
from ..ir.stages import crossing, stages
from .naming import DTYPES, WIDTH, call, literal


@frozen
class PipelineLines:
    """The constants before the classes, and the value behind them."""

    turns: tuple[str, ...] = ()
    value: tuple[str, ...] = ()


def pipeline_lines(program: Program) -> PipelineLines:
    """What stands in the program, nothing without a pipeline."""
    pipeline = program.pipeline
    if not pipeline:
        return PipelineLines()
    assert pipeline.schedule, "emit: no schedule"
    all_ = stages(program, pipeline)
    turns = [
        "LAYERS_OF_STAGE = {  # of each repeat, those of each stage",
        *(
            f"    {call(f'{literal(dim)}: ', [_range(stage.turns[i]) for stage in all_], 4)},"
            for i, dim in enumerate(pipeline.dims)
        ),
        "}",
    ]
    arguments = [
        literal(pipeline.axis),
        f"stage_to_rank={literal(pipeline.homes)}",
        _carried(program, pipeline),
    ]
    rows = [line for row in pipeline.schedule.rows for line in _row(" ".join(map(str, row)))]
    given = (f"    {argument}," for argument in arguments)
    value = ["PIPELINE = Pipeline(", *given, "    rows=(", *rows, "    ),", ")"]
    return PipelineLines(tuple(turns), tuple(value))


def _range(turns: range) -> str:
    return f"range({turns.start}, {turns.stop})"


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


def _row(text: str) -> list[str]:
    """A row as one string, over several lines if it is long."""
    parts = textwrap.wrap(text, WIDTH - 12)
    if len(parts) == 1:
        return [f'        "{text}",']
    return [*(f'        "{part} "' for part in parts[:-1]), f'        "{parts[-1]}",']
