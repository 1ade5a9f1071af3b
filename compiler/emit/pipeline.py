"""What a program says of its pipeline: each stage's turns, homes, what crosses, and each rank's row.

Non-goals: the model's stages (`bodies`), and the call that runs the rows (`step`).
"""

import textwrap

from attrs import frozen

from ..ir import Enter, Program, Region, Value
from ..stages import groups, stages
from .words import DTYPES, WIDTH, call, literal


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
        "TURNS = {  # of each repeat, those of each stage",
        *(
            f"    {call(f'{literal(dim)}: ', [_range(stage.turns[i]) for stage in all_], 4)},"
            for i, dim in enumerate(pipeline.dims)
        ),
        "}",
    ]
    arguments = [
        literal(pipeline.axis),
        f"homes={literal(pipeline.homes)}",
        f"carried=({', '.join(_carried(value, program) for value in crossing(program))},)",
    ]
    rows = [line for row in pipeline.schedule.rows for line in _row(" ".join(map(str, row)))]
    given = (f"    {argument}," for argument in arguments)
    value = ["PIPELINE = Pipeline(", *given, "    rows=(", *rows, "    ),", ")"]
    return PipelineLines(tuple(turns), tuple(value))


def crossing(program: Program) -> list[Value]:
    """What the repeats that are cut carry, all of the same shapes: what every stage makes for the next."""
    pipeline = program.pipeline
    assert pipeline, "emit: no pipeline"
    (microbatches,) = (stmt for stmt in program.region.body if isinstance(stmt, Region))
    forward = microbatches.body[0]
    assert isinstance(forward, Region), "emit: no forward block"
    _, repeats = groups(pipeline, forward.body)
    first, *others = [[arg.value for arg in each.args if arg.enter is Enter.CARRY] for each in repeats]
    alike = all([value.type for value in each] == [value.type for value in first] for each in others)
    assert alike, f"emit: what crosses cuts of {pipeline.dims[0]} and of another repeat is not of the same shapes"
    return first


def _range(turns: range) -> str:
    return f"range({turns.start}, {turns.stop})"


def _carried(value: Value, program: Program) -> str:
    shape = literal(program.local_shape(value.type))
    constant = "" if value.type.differentiable else ", gradient=False"
    return f"Carried({shape}, {DTYPES[value.type.dtype]}{constant})"


def _row(text: str) -> list[str]:
    """A row as one string, over several lines if it is long."""
    parts = textwrap.wrap(text, WIDTH - 12)
    if len(parts) == 1:
        return [f'        "{text}",']
    return [*(f'        "{part} "' for part in parts[:-1]), f'        "{parts[-1]}",']
