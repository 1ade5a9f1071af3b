"""What a program with a pipeline binds besides classes and functions, from the IR alone: turns of stages, and rows.

Non-goals: what a stage does (`staged`), and which of its values are checked against these (`file`).
"""

import ast

from ...ir import Enter, Pipeline, Program, Type
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


def crossing(program: Program, pipeline: Pipeline) -> list[list[Type]]:
    """What crosses each cut: what the repeat carries in which the stage behind it begins."""
    _, repeats = groups(pipeline, blocks(program)[1].body)
    begun = [repeats[stage.begins] for stage in stages(program, pipeline)[1:]]
    return [[arg.value.type for arg in repeat.args if arg.enter is Enter.CARRY] for repeat in begun]


def _turns(program: Program, pipeline: Pipeline) -> str:
    of = [stage.turns for stage in stages(program, pipeline)]
    turns = {dim: [f"range({each[i].start}, {each[i].stop})" for each in of] for i, dim in enumerate(pipeline.dims)}
    entries = (f"{dim!r}: ({', '.join(ranges)},)" for dim, ranges in turns.items())
    return f"{{{', '.join(entries)}}}"


def _pipeline(program: Program, pipeline: Pipeline) -> str:
    assert pipeline.schedule, "emit: no schedule"
    carried = _carried(program, crossing(program, pipeline))
    rows = tuple(" ".join(map(str, row)) for row in pipeline.schedule.rows)
    return f"Pipeline({pipeline.axis!r}, homes={pipeline.homes!r}, carried=({', '.join(carried)},), rows={rows!r})"


def _carried(program: Program, cuts: list[list[Type]]) -> list[str]:
    """The values of all cuts by their place in the order, each with the cuts one behind the other that are alike."""
    found: dict[tuple[int, int], tuple[str, int]] = {}  # by place and first cut; behind the last one
    for cut, types in enumerate(cuts):
        for place, text in enumerate(_value(program, type) for type in types):
            known = [key for key, it in found.items() if key[0] == place and it == (text, cut)]
            found[known[0] if known else (place, cut)] = text, cut + 1
    some = {
        (at, end): "" if end - at == len(cuts) else f", cuts=range({at}, {end})" for (_, at), (_, end) in found.items()
    }
    return [f"Carried({text}{some[at, end]})" for (_, at), (text, end) in sorted(found.items())]


def _value(program: Program, type: Type) -> str:
    constant = "" if type.differentiable else ", gradient=False"
    return f"{program.local_shape(type)!r}, {DTYPES[type.dtype]}{constant}"
