"""What a program binds besides classes and functions, from the IR alone: sizes, and of a pipeline layers and rows.

Non-goals: what a stage does (`staged`), and which of its values are checked against these (`file`).
"""

from ...ir import Pipeline, Program, Value, base
from ...ir.stages import crossing, stages
from ..naming import DTYPES
from .files import read_beside


def constants(program: Program) -> dict[str, str]:
    """Each one's expression; there are none without a pipeline."""
    pipeline = program.pipeline
    return {"LAYERS_OF_STAGE": _layers(program, pipeline), "PIPELINE": _pipeline(program, pipeline)} if pipeline else {}


def sizes(program: Program) -> dict[str, int]:
    """The sizes that a program may name, by the dims' names in capitals, and of stages the first and the last one."""
    of_dims = {dim.name.upper(): dim.size for dim in program.dims}
    return of_dims | ({"FIRST": 0, "LAST": len(program.pipeline.stage_to_rank) - 1} if program.pipeline else {})


def _layers(program: Program, pipeline: Pipeline) -> str:
    of = [stage.layers for stage in stages(program, pipeline)]
    layers = {dim: [f"range({each[i].start}, {each[i].stop})" for each in of] for i, dim in enumerate(pipeline.dims)}
    entries = (f"{dim!r}: ({', '.join(ranges)},)" for dim, ranges in layers.items())
    return f"{{{', '.join(entries)}}}"


def _pipeline(program: Program, pipeline: Pipeline) -> str:
    assert pipeline.schedule, "emit: no schedule"
    carried = _carried(program, crossing(program, pipeline))
    rows = "".join(f"{','.join(row)}\n" for row in pipeline.schedule.words)
    file = read_beside("read_schedule", "schedule.csv", rows)
    settings = f"stage_to_rank={pipeline.stage_to_rank!r}, stage_inputs=({', '.join(carried)},), schedule={file}"
    return f"Pipeline({pipeline.axis!r}, {settings})"


def _carried(program: Program, cuts: list[list[Value]]) -> list[str]:
    """The values of neighbouring cuts where the same crosses, each with these cuts if they are not all."""
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
