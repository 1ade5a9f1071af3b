"""The constants of a program and the files that it reads, from the IR alone: sizes, layers and rows
of a pipeline.

Non-goals: what a stage does (`stages`), and what is in the file of names (`plan`).
"""

import ast
import re
from collections.abc import Mapping

from ...analysis.elastic import every_size
from ...ir import MICROBATCHES, Pipeline, Program, Value, base
from ...ir.stages import crossing, stages
from ..naming import DTYPES, PROGRAM
from ..plan_json import digest

_GROUP = r"\[([^]]*)\]"


def constants(program: Program) -> dict[str, str]:
    """Each one's expression; there are none without a pipeline."""
    pipeline = program.pipeline
    return (
        {"LAYERS_OF_STAGE": _layers(program, pipeline), "PIPELINE": _pipeline(program, pipeline)}
        if pipeline
        else {}
    )


def sizes(program: Program) -> dict[str, int]:
    """The sizes that a program may name, by the dims' names in capitals, and of stages the
    first and the last one.
    """
    of_dims = {name: dim.size for dim in program.dims if (name := dim.name.upper()) not in PROGRAM}
    return of_dims | (
        {"FIRST": 0, "LAST": len(program.pipeline.stage_to_rank) - 1} if program.pipeline else {}
    )


def _layers(program: Program, pipeline: Pipeline) -> str:
    all_stages, entries = stages(program, pipeline), list[str]()
    for i, dim in enumerate(pipeline.dims):
        layers = [stage.layers[i] for stage in all_stages]
        ranges = [f"range({numbers.start}, {numbers.stop})" for numbers in layers]
        entries.append(f"{dim!r}: ({', '.join(ranges)},)")
    return f"{{{', '.join(entries)}}}"


def _pipeline(program: Program, pipeline: Pipeline) -> str:
    carried = _stage_inputs(program, crossing(program, pipeline))
    largest, *smaller = every_size(program)
    file, groups = _rows(largest, "")
    settings = f"stage_to_rank={pipeline.stage_to_rank!r}, stage_inputs=({', '.join(carried)},)"
    settings += f", schedule={file}, message_groups={groups}"
    entries = list[str]()
    for sized in smaller:
        count = sized.size(MICROBATCHES)
        entries.append(f"{count}: ({', '.join(_rows(sized, f'_{count}'))})")
    if entries:
        settings += f", smaller={{{', '.join(entries)}}}"
    return f"Pipeline({pipeline.axis!r}, {settings})"


def _rows(program: Program, number: str) -> tuple[str, str]:
    """The calls that read the rows of a size, and the messages that begin as one."""
    assert program.pipeline, "emit: no pipeline"
    schedule = program.pipeline.schedule
    assert schedule, "emit: no schedule"
    rows = "".join(f"{','.join(row)}\n" for row in schedule.words)
    begun = "".join(
        f"{','.join(re.findall(_GROUP, ' '.join(row)))}\n" for row in schedule.words_with_groups
    )
    files = {f"schedule{number}.csv": rows, f"message_groups{number}.csv": begun}
    file, groups = (companion_call("read_schedule", name, text) for name, text in files.items())
    return file, groups


def _stage_inputs(program: Program, cuts: list[list[Value]]) -> list[str]:
    """The values of neighbouring cuts where the same crosses, each with these cuts if they are
    not all.
    """
    texts = [[_value(program, value) for value in values] for values in cuts]
    begins = [cut for cut in range(len(texts)) if not cut or texts[cut] != texts[cut - 1]]
    if begins == [0]:
        return [f"StageInput({text})" for text in texts[0]]
    ends = [*begins[1:], len(texts)]
    spans = zip(begins, ends, strict=True)
    return [
        f"StageInput({text}, cuts=range({begin}, {end}))"
        for begin, end in spans
        for text in texts[begin]
    ]


def _value(program: Program, value: Value) -> str:
    constant = "" if value.type.differentiable else ", gradient=False"
    return (
        f"{base(value.name)!r}, {program.local_shape(value.type)!r},"
        f" {DTYPES[value.type.dtype]}{constant}"
    )


# ---- files beside a program, which it knows by their hashes


def companion_call(function: str, name: str, text: str) -> str:
    """The call that reads a file with this text from beside the program."""
    return f"{function}({name!r}, beside=__file__, sha256={digest(text)!r})"


def check_files(files: Mapping[str, str]) -> None:
    """Compares the files beside `train.py` with the hashes in it, which `check` has compared.

    `files` are name → text, `train.py` among them.  Raises AssertionError where the two differ.
    """
    hashes = dict[str, str]()
    for node in ast.walk(ast.parse(files["train.py"])):
        if not isinstance(node, ast.Call):
            continue
        for keyword in node.keywords:
            if keyword.arg == "sha256":
                hashes[ast.literal_eval(node.args[0])] = ast.literal_eval(keyword.value)
    digests = {name: digest(text) for name, text in files.items() if name != "train.py"}
    wrong = sorted({*hashes.items()} ^ {*digests.items()})
    assert not wrong, f"emit: {wrong[0][0]} is not the file that the program reads"
