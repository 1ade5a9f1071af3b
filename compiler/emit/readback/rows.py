"""What a program with a pipeline binds besides classes and functions, from the IR alone: turns of stages, and rows.

Non-goals: what a stage does (`staged`), and which of its values are checked against these (`file`).
"""

import ast

from ...ir import Enter, Pipeline, Program, Value, base
from ...stages import groups, stages
from .text import DTYPES
from .values import blocks


def constants(program: Program) -> dict[str, ast.expr]:
    """Each one's value; there are none without a pipeline."""
    pipeline = program.pipeline
    if not pipeline:
        return {}
    texts = {"TURNS": _turns(program, pipeline), "PIPELINE": _pipeline(program, pipeline)}
    return {name: ast.parse(text, mode="eval").body for name, text in texts.items()}


def crossing(program: Program, pipeline: Pipeline) -> list[Value]:
    """What crosses from stage to stage: what the repeats that are cut carry."""
    first, *_ = groups(pipeline, blocks(program)[1].body)[1]
    return [arg.value for arg in first.args if arg.enter is Enter.CARRY]


def _turns(program: Program, pipeline: Pipeline) -> str:
    of = [stage.turns for stage in stages(program, pipeline)]
    turns = {dim: [f"range({each[i].start}, {each[i].stop})" for each in of] for i, dim in enumerate(pipeline.dims)}
    entries = (f"{dim!r}: ({', '.join(ranges)},)" for dim, ranges in turns.items())
    return f"{{{', '.join(entries)}}}"


def _pipeline(program: Program, pipeline: Pipeline) -> str:
    assert pipeline.schedule, "emit: no schedule"
    carried = (_carried(program, value) for value in crossing(program, pipeline))
    rows = tuple(" ".join(map(str, row)) for row in pipeline.schedule.rows)
    return f"Pipeline({pipeline.axis!r}, homes={pipeline.homes!r}, carried=({', '.join(carried)},), rows={rows!r})"


def _carried(program: Program, value: Value) -> str:
    constant = "" if value.type.differentiable else ", gradient=False"
    return f"Carried({base(value.name)!r}, {program.local_shape(value.type)!r}, {DTYPES[value.type.dtype]}{constant})"
