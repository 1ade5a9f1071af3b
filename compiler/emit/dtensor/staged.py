"""The lines of a program of torch alone that has a pipeline: stages for
torch.distributed.pipelining, and their rows.

Non-goals: a stage's forward (`staged_forward`), how its parameters are sharded (`sharded`).
"""

from collections.abc import Iterator, Mapping
from itertools import groupby

from ...ir import BATCH, Arg, Pipeline, Program, Value, base
from ...ir.placements import dual_type
from ...ir.stages import crossing
from ...schedules.actions import Row
from ..constants import stage_lines
from ..module import Child, Module
from ..naming import DTYPES, call, fill_lines, layers_word, literal, stage_word
from ..target import mesh_axes, placements

ROWS = "schedule.csv"
"""The file of rows beside the program."""


def get_pipeline(program: Program) -> Pipeline:
    """The pipeline of a program that has one."""
    assert program.pipeline, "emit: no pipeline"
    return program.pipeline


# ---- rows


def row_files(program: Program) -> dict[str, str]:
    """The file of each rank's actions; if state is sharded, also when torch gathers it and
    reduces gradients.
    """
    if not program.pipeline:
        return {}
    schedule = get_pipeline(program).schedule
    assert schedule, "emit: no schedule"
    lines = map(_with_state, schedule.rows) if is_sharded(program) else schedule.words
    return {ROWS: "".join(f"{','.join(line)}\n" for line in lines)}


def is_sharded(program: Program) -> bool:
    """Whether FSDP2 shards parameters."""
    return any(program.degree(bucket.shard_axes) > 1 for bucket in program.buckets)


def find_shared_params(program: Program) -> list[str]:
    """The parameters that several stages of one rank have."""
    pipeline = program.pipeline
    stages_by_param = pipeline.param_stages if pipeline else ()
    return [
        name
        for name, stages in stages_by_param
        if pipeline and len(stages) > len(pipeline.ranks_of(name))
    ]


def _with_state(row: Row) -> Iterator[str]:
    """A row that gathers stages' parameters first, and reduces a stage's gradients after its
    last action.
    """
    last = {action.stage: action for action in row if not action.work.is_message}
    yield from (f"{stage}UNSHARD" for stage in sorted(last))
    for action in row:
        yield str(action)
        if action is last[action.stage]:
            yield from (f"{action.stage}{word}" for word in ("REDUCE_GRAD", "RESHARD"))


# ---- the program's constants and classes


def constants(program: Program) -> Iterator[str]:
    """The layers and the rank of each stage."""
    if program.pipeline:
        yield from ["", *stage_lines(program)]
        yield fill_lines("STAGE_TO_RANK = ", [*map(str, program.pipeline.stage_to_rank)], 0)
        yield f"INNER = {literal(tuple(mesh_axes(program)))}  # the axes of DTensors"


def stage_layers(child: Child, count: str) -> str:
    """The expression for the layers of a repeat that is cut."""
    return (
        f"stage_layers(lambda: {child.module.name}(mesh), {count}, {layers_word(child.dim)}[stage])"
    )


def deletion_lines(module: Module, program: Program) -> Iterator[str]:
    """The lines that take away what a stage does not hold."""
    stages = len(get_pipeline(program).stage_to_rank)
    for owners, together in groupby(
        sorted(module.held, key=module.held.__getitem__), key=module.held.__getitem__
    ):
        words = [stage_word(stage, stages) for stage in owners]
        yield (
            f"if stage != {words[0]}:"
            if len(owners) == 1
            else f"if stage not in ({', '.join(words)}):"
        )
        yield f"    del {', '.join(f'self.{name}' for name in together)}"


# ---- messages


def crossing_lines(program: Program, sizes: Mapping[str, str]) -> Iterator[str]:
    """The lines that return examples of what crosses after a stage."""
    cuts = [
        [_example(value, program, sizes) for value in values]
        for values in crossing(program, get_pipeline(program))
    ]
    end = 0
    for values, same in groupby(cuts):
        end += len([*same])
        indent = "    " if end < len(cuts) else ""
        if indent:
            yield f"if stage < {end}:"
        yield f"{indent}return ["
        yield from (f"{indent}    {line}" for value in values for line in f"{value},".split("\n"))
        yield f"{indent}]"


def _example(value: Value, program: Program, sizes: Mapping[str, str]) -> str:
    type = value.type
    arguments = [
        "mesh",
        *(sizes.get(dim, str(program.size(dim))) for dim in type.dims),
        f"dtype={DTYPES[type.dtype]}",
    ]
    arguments.append(f"placements={placements(type, program)}")
    if type.differentiable:
        arguments.append(f"gradient={placements(dual_type(type), program)}")
    return call("example", arguments, 0, after=16)


# ---- build and steps


def stage_construction_lines(
    program: Program, patterns: Mapping[str, str], model: str, to: str
) -> Iterator[str]:
    """The lines of `build` that make a rank's stages."""
    yield "inner = mesh[INNER]"
    axis = literal(get_pipeline(program).axis)
    yield (
        "own = [stage for stage, rank in enumerate(STAGE_TO_RANK) if rank =="
        f" mesh.get_local_rank({axis})]"
    )
    yield f"stages = [stage_module(partial({model}, inner), stage){to} for stage in own]"
    yield from (f"share(stages, {literal(patterns[name])})" for name in find_shared_params(program))


def pipeline_construction_lines(program: Program, patterns: Mapping[str, str]) -> Iterator[str]:
    """The lines of `build` that make the pipeline of the stages."""
    ranks = {
        patterns[name]: get_pipeline(program).ranks_of(name)
        for name, _ in get_pipeline(program).param_stages
    }
    shared = (
        f"{literal(name)}: {literal(ranks_of_param)}"
        for name, ranks_of_param in ranks.items()
        if len(ranks_of_param) > 1
    )
    inputs = (arg.value for arg in program.microbatches.args)
    batch = (f"{literal(base(value.name))}: {value.type.dims.index(BATCH)}" for value in inputs)
    axis = literal(get_pipeline(program).axis)
    stage_call = (
        f"pipeline_stage(module, stage, len(STAGE_TO_RANK), mesh, {axis}, partial(crossing, inner))"
    )
    yield "parts = ["
    yield f"    {stage_call}"
    yield "    for module, stage in zip(stages, own, strict=True)"
    yield "]"
    arguments = [
        "mesh",
        axis,
        "parts",
        f"Path(__file__).with_name({literal(ROWS)})",
        "MICROBATCHES",
    ]
    arguments += [f"split={{{', '.join(batch)}}}", f"shared={{{', '.join(shared)}}}"]
    yield from call("model = Pipeline", arguments, 0, after=4).split("\n")


def whole_batch(arg: Arg, microbatches: str) -> str:
    """The entry of an input's microbatches in the dict that a schedule splits."""
    arguments = [microbatches, f"dim={arg.value.type.dims.index(BATCH)}"]
    return call(f"{literal(base(arg.value.name))}: all_microbatches", arguments, 8)


def step_lines(backward: bool, scaled: bool = False) -> Iterator[str]:
    """The lines that run the schedule of a step, whose loss has a scale if it is `scaled`."""
    yield 'num_tokens = count_valid([batch["labels"]])'
    tokens, back = ("num_tokens / scale", " / scale") if scaled else ("num_tokens", "")
    yield f"loss = model.run(batch, {tokens}, backward={backward}){back}"
