"""What a program with a pipeline binds besides classes and functions, from the IR alone: turns of stages, and rows.

Non-goals: what a stage does (`staged`), and which of its values are checked against these (`file`).
"""

import ast

from ...ir import Enter, Pipeline, Program, Value, base
from ...ir.stages import groups, stages
from .ast_matching import DTYPES
from .values import blocks


def constants(program: Program) -> dict[str, ast.expr]:
    """Each one's value; there are none without a pipeline."""
    pipeline = program.pipeline
    if not pipeline:
        return {}
    texts = {"LAYERS_OF_STAGE": _turns(program, pipeline), "PIPELINE": _pipeline(program, pipeline)}
    return {name: ast.parse(text, mode="eval").body for name, text in texts.items()}


def crossing(program: Program, pipeline: Pipeline) -> list[list[Value]]:
    """What crosses each cut: what the repeat carries in which the stage behind it begins."""
    _, repeats = groups(pipeline, blocks(program)[1].body)
    begun = [repeats[stage.begins] for stage in stages(program, pipeline)[1:]]
    return [[arg.value for arg in repeat.args if arg.enter is Enter.CARRY] for repeat in begun]


def _turns(program: Program, pipeline: Pipeline) -> str:
    of = [stage.turns for stage in stages(program, pipeline)]
    turns = {dim: [f"range({each[i].start}, {each[i].stop})" for each in of] for i, dim in enumerate(pipeline.dims)}
    entries = (f"{dim!r}: ({', '.join(ranges)},)" for dim, ranges in turns.items())
    return f"{{{', '.join(entries)}}}"


def _pipeline(program: Program, pipeline: Pipeline) -> str:
    assert pipeline.schedule, "emit: no schedule"
    carried = _carried(program, crossing(program, pipeline))
    rows = tuple(" ".join(map(str, row)) for row in pipeline.schedule.rows)
    settings = f"stage_to_rank={pipeline.homes!r}, stage_inputs=({', '.join(carried)},), rows={rows!r}"
    return f"Pipeline({pipeline.axis!r}, {settings})"


def _carried(program: Program, cuts: list[list[Value]]) -> list[str]:
    """The values of cuts one behind the other where the same crosses, each with these cuts if they are not all."""
    texts = [[_value(program, value) for value in values] for values in cuts]
    begins = [cut for cut in range(len(texts)) if not cut or texts[cut] != texts[cut - 1]]
    if begins == [0]:
        return [f"StageInput({text})" for text in texts[0]]
    ends = [*begins[1:], len(texts)]
    spans = zip(begins, ends, strict=True)
    return [f"StageInput({text}, cuts=range({begin}, {end}))" for begin, end in spans for text in texts[begin]]


def _value(program: Program, value: Value) -> str:
    constant = "" if value.type.differentiable else ", gradient=False"
    return f"{base(value.name)!r}, {program.local_shape(value.type)!r}, {DTYPES[value.type.dtype]}{constant}"
