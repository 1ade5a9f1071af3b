"""The lines of a program of torch alone that has a pipeline: stages for
torch.distributed.pipelining, and their rows.

Non-goals: a stage's forward (`staged_forward`), how its parameters are sharded (`sharded`).
"""

from collections.abc import Iterable, Iterator, Mapping
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
    rows: list[str] = []
    for row, words in zip(schedule.rows, schedule.words, strict=True):
        actions = _with_state(row) if is_sharded(program) else words
        rows.append(f"{','.join(actions)}\n")
    return {ROWS: "".join(rows)}


def is_sharded(program: Program) -> bool:
    """Whether FSDP2 shards parameters."""
    return any(program.degree(bucket.shard_axes) > 1 for bucket in program.buckets)


def find_shared_params(program: Program) -> list[str]:
    """The parameters that several stages of one rank have."""
    pipeline = program.pipeline
    if not pipeline:
        return []
    shared: list[str] = []
    for name, stages in pipeline.param_stages:
        if len(stages) > len(pipeline.ranks_of(name)):
            shared.append(name)
    return shared


def _with_state(row: Row) -> Iterator[str]:
    """A row that gathers stages' parameters first, and reduces a stage's gradients after its
    last action.
    """
    last_actions = {action.stage: action for action in row if not action.work.is_message}
    for stage in sorted(last_actions):
        yield f"{stage}UNSHARD"
    for action in row:
        yield str(action)
        if action is last_actions[action.stage]:
            yield f"{action.stage}REDUCE_GRAD"
            yield f"{action.stage}RESHARD"


# ---- the program's constants and classes


def constants(program: Program) -> Iterator[str]:
    """The layers and the rank of each stage."""
    if program.pipeline:
        yield from ["", *stage_lines(program)]
        yield fill_lines("STAGE_TO_RANK = ", [*map(str, program.pipeline.stage_to_rank)], 0)
        yield f"INNER = {literal(tuple(mesh_axes(program)))}  # the axes of DTensors"


def stage_layers(child: Child, count: str) -> str:
    """The expression for the layers of a repeat that is cut."""
    own = f"{layers_word(child.dim)}[stage]"
    return f"stage_layers(lambda: {child.module.name}(mesh), {count}, {own})"


def deletion_lines(module: Module, program: Program) -> Iterator[str]:
    """The lines that take away what a stage does not hold."""
    stages = len(get_pipeline(program).stage_to_rank)
    names_by_owners: dict[tuple[int, ...], list[str]] = {}
    for name, owners in module.held.items():
        names_by_owners.setdefault(owners, []).append(f"self.{name}")
    for owners, names in sorted(names_by_owners.items()):
        words = [stage_word(stage, stages) for stage in owners]
        if len(words) == 1:
            yield f"if stage != {words[0]}:"
        else:
            yield f"if stage not in ({', '.join(words)}):"
        yield f"    del {', '.join(names)}"


# ---- messages


def crossing_lines(program: Program, sizes: Mapping[str, str]) -> Iterator[str]:
    """The lines that return examples of what crosses after a stage."""
    cuts: list[list[str]] = []
    for values in crossing(program, get_pipeline(program)):
        cuts.append([_example(value, program, sizes) for value in values])
    end = 0
    for examples, same in groupby(cuts):
        end += len([*same])
        lines = ["return [", *_indented(f"{example}," for example in examples), "]"]
        if end < len(cuts):
            yield f"if stage < {end}:"
            yield from _indented(lines)
        else:
            yield from lines


def _example(value: Value, program: Program, sizes: Mapping[str, str]) -> str:
    type = value.type
    shape = [sizes.get(dim, str(program.size(dim))) for dim in type.dims]
    arguments = ["mesh", *shape, f"dtype={DTYPES[type.dtype]}"]
    arguments.append(f"placements={placements(type, program)}")
    if type.differentiable:
        arguments.append(f"gradient={placements(dual_type(type), program)}")
    return call("example", arguments, 0, after=16)


def _indented(texts: Iterable[str]) -> Iterator[str]:
    """The lines of some texts, one step further in."""
    for text in texts:
        for line in text.split("\n"):
            yield f"    {line}"


# ---- build and steps


def stage_construction_lines(
    program: Program, patterns: Mapping[str, str], model: str, cast: str
) -> Iterator[str]:
    """The lines of `build` that make a rank's stages; `cast` changes the dtype of a module."""
    yield "inner = mesh[INNER]"
    is_own = f"rank == mesh.get_local_rank({literal(get_pipeline(program).axis)})"
    yield f"own = [stage for stage, rank in enumerate(STAGE_TO_RANK) if {is_own}]"
    yield f"stages = [stage_module(partial({model}, inner), stage){cast} for stage in own]"
    for name in find_shared_params(program):
        yield f"share(stages, {literal(patterns[name])})"


def pipeline_construction_lines(program: Program, patterns: Mapping[str, str]) -> Iterator[str]:
    """The lines of `build` that make the pipeline of the stages."""
    axis = literal(get_pipeline(program).axis)
    arguments = ["module", "stage", "len(STAGE_TO_RANK)", "mesh", axis, "partial(crossing, inner)"]
    yield "parts = ["
    yield f"    pipeline_stage({', '.join(arguments)})"
    yield "    for module, stage in zip(stages, own, strict=True)"
    yield "]"
    rows = f"Path(__file__).with_name({literal(ROWS)})"
    batch_dims = f"split={{{', '.join(_batch_dims(program))}}}"
    shared = f"shared={{{', '.join(_ranks_of_shared_params(program, patterns))}}}"
    arguments = ["mesh", axis, "parts", rows, "MICROBATCHES", batch_dims, shared]
    yield from call("model = Pipeline", arguments, 0, after=4).split("\n")


def _batch_dims(program: Program) -> Iterator[str]:
    """The dim of the batch in each input, by the input's name."""
    for arg in program.microbatches.args:
        yield f"{literal(base(arg.value.name))}: {arg.value.type.dims.index(BATCH)}"


def _ranks_of_shared_params(program: Program, patterns: Mapping[str, str]) -> Iterator[str]:
    """The ranks of each parameter that several of them have, by the parameter's name."""
    pipeline = get_pipeline(program)
    for name, _ in pipeline.param_stages:
        ranks = pipeline.ranks_of(name)
        if len(ranks) > 1:
            yield f"{literal(patterns[name])}: {literal(ranks)}"


def whole_batch(arg: Arg, microbatches: str) -> str:
    """The entry of an input's microbatches in the dict that a schedule splits."""
    arguments = [microbatches, f"dim={arg.value.type.dims.index(BATCH)}"]
    return call(f"{literal(base(arg.value.name))}: all_microbatches", arguments, 8)


def step_lines(backward: bool, is_scaled: bool = False) -> Iterator[str]:
    """The lines that run the schedule of a step; a loss that is scaled is scaled back."""
    yield 'num_tokens = count_valid([batch["labels"]])'
    scale = " / scale" if is_scaled else ""
    yield f"loss = model.run(batch, num_tokens{scale}, backward={backward}){scale}"
