"""The whole emitted program: header, classes, buckets, step, plan.

Purpose: fills `train_code.py.j2` and, around it, `train.py.j2` of `codegen_templates`; the same
program gives the same bytes.
Non-goals: checking what was written (`readback`).
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from .. import __version__
from ..analysis.certificate import (
    Proof,
    Tried,
    find_untried_functions,
    get_trial_words,
    header,
    trust_words,
)
from ..analysis.elastic import alternatives, elastic_axis, every_size, sizes
from ..analysis.kernel_tiles import kernels_of, tiles_file
from ..analysis.memory import account
from ..analysis.vocabulary import vocabulary
from ..config.settings import ON, Data, Watch
from ..config.units import count_words
from ..ir import BATCH, MICROBATCHES, SEQUENCE, Arg, Dim, Program, base
from ..ops.routers import choices_with_capacity
from ..reports.summary import get_launch
from ..syntax.package_data import fill_template
from ..syntax.source import Source
from .build import bucket_entries, optimizer, state
from .constants import kernel_lines, pipeline_line, schedule_files, size_lines, stage_lines
from .hf_names import names_file
from .imports import get_imports
from .model_classes import Model, compiled_class_names, model_classes
from .module import Module, fields
from .naming import (
    axes_word,
    call,
    class_name,
    companion_call,
    explode,
    file_word,
    letter,
    literal,
    run_word,
)
from .predictions import predictions_file
from .step import step_lines
from .user_ops import modules

PARALLEL = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
}
"""The field's names for the axes of these names."""

SIGNS = (
    "I, R    on an axis: the same on all ranks, invariant or replicated; S(dim) sharded, P partial",
    "P→I     a change of placement; bwd: what backward does for it",
)
"""The meanings of placements in comments."""


def train_py(
    program: Program, source: Source, proof: Proof | None = None, model_hash: str = ""
) -> str:
    """The text of `train.py`; its header says what was shown about it.

    `model_hash` is the hash of its model, "" if it has none.
    """
    return program_files(program, source, proof, model_hash)["train.py"]


def program_files(
    program: Program,
    source: Source,
    proof: Proof | None = None,
    model_hash: str = "",
    unpadded_hash: str = "",
    tried: Sequence[Tried] = (),
) -> dict[str, str]:
    """`train.py`, and the files that it reads from its own folder, name → text.

    `model_hash` is the hash of its model, `unpadded_hash` the hash without padding, each "" if
    there is none; `tried` are the functions of user ops that were tried.
    """
    model = model_classes(program)
    names, predictions = names_file(program, model.patterns), predictions_file(program)
    train, evaluate = step_lines(program, model.patterns, model.sizes)
    plan = [
        f"name={literal(run_word(source.path))},",
        *_plan(program, program.microbatches.args, model.sizes),
        *_identity(program, model.patterns, model_hash, unpadded_hash),
        f"predictions={companion_call('read_predictions', predictions)},",
    ]
    if names:
        plan.append(f"names={companion_call('read_hf_names', names)},")
    code = fill_template(
        "train_code.py.j2",
        **_model(program, model),
        train=train,
        evaluate=evaluate,
        plan=plan,
    )
    text = fill_template(
        "train.py.j2",
        **_header(program, source, proof, tried),
        modules=modules(program),
        imports=get_imports(code, kernels_of(program)),
        code=code,
    )
    beside = schedule_files(program) | tiles_file(program) | names | predictions
    return {**beside, "train.py": text}


def _header(
    program: Program, source: Source, proof: Proof | None, tried: Sequence[Tried]
) -> dict[str, Any]:
    """The template's values for the docstring."""
    device = "GPU" if account(program).device == "cuda" else "rank"
    command = get_launch(program).command(PurePath("train.py"))
    return {
        "version": __version__,
        "file": file_word(source.path),
        "program": program,
        "ranks": count_words(program.ranks, device),
        "mesh": mesh_words(program),
        "name": class_name(program.name),
        "launch": textwrap.wrap(command, 112, break_on_hyphens=False),
        "legend": legend(program),
        "shown": header(proof),
        "trusted": trust_lines(program, tried, proof),
    }


def _model(program: Program, model: Model) -> dict[str, Any]:
    """The template's values for constants, classes and `build`."""
    classes = list[tuple[Module, list[str]]]()
    for module in model.classes:
        classes.append((module, [*fields(module, program, model.sizes)]))
    return {
        "kernels": kernel_lines(program),
        "sizes": [*size_lines(program, model.sizes)],
        "classes": classes,
        "model_class": model.classes[-1].name,
        "layers": stage_lines(program),
        "pipeline": pipeline_line(program, model.sizes) if program.pipeline else "",
        "buckets": bucket_entries(program, model.patterns),
        "compiled": compiled_class_names(program, model.classes),
        "optimizer": optimizer(program),
        "state": state(program),
    }


def _identity(
    program: Program, patterns: Mapping[str, str], model_hash: str, unpadded_hash: str
) -> Iterator[str]:
    """The lines of the settings that tell whether a checkpoint is of this model."""
    if model_hash:
        note = "hash of the model on any mesh; checkpoints must have the same"
        yield f"model={literal(model_hash)},  # {note}"
    if unpadded_hash:
        yield f"unpadded={literal(unpadded_hash)},  # its hash without padding"
    if rows := get_padded_rows(program, patterns):
        yield f"padded_rows={literal(rows)},"


def trust_lines(program: Program, tried: Sequence[Tried], proof: Proof | None) -> list[str]:
    """The lines of the docstring about the user's own functions."""
    of_untried = trust_words(find_untried_functions(program, tried), proved=proof is not None)
    of_tried = get_trial_words([user_op.function for user_op in tried])
    return [*textwrap.wrap(of_untried, 116), *textwrap.wrap(of_tried, 116)]


def legend(program: Program) -> list[str]:
    """The legend of signs in comments, and this program's sizes."""
    entries = list[str]()
    for dim in _legend_dims(program):
        size = f"{program.train.microbatch} per rank" if dim.name == BATCH else str(dim.size)
        sign = letter(dim.name)
        name = f"{sign} {dim.name}" if sign != dim.name else dim.name
        entries.append(f"{name} {size}")
    # a zero byte keeps `wrap` from breaking a line inside of an entry
    lines = [*textwrap.wrap(", ".join(entries).replace(" ", "\0").replace(",\0", ", "), 108)]
    lines += [*_smaller_sizes(program), *_part(program), *SIGNS]
    return [f"    {line}".replace("\0", " ") for line in lines]


def _legend_dims(program: Program) -> list[Dim]:
    """The dims of the plan that values of the program have."""
    used = set[str]()
    for op in program.ops:
        for value in op.outputs:
            used |= {dim for dim in value.type.dims if not dim.startswith("flat_")}
    stored = set[str]()
    for param in program.params:
        stored |= {*param.type.dims}
    # passes made these, not the plan
    introduced = {MICROBATCHES, *(str(dict(op.attrs).get("as")) for op in program.ops)} - stored
    return [dim for dim in program.dims if dim.name in used - introduced and not dim.twin]


def _smaller_sizes(program: Program) -> list[str]:
    """The other sizes of an elastic axis."""
    axis, smaller = elastic_axis(program), sizes(program)[1:]
    if not smaller:
        return []
    head = f"{axis.name} {axis.size}" if axis else ""
    return [f"{head:<7} {alternatives(smaller)} on fewer nodes; shapes are for {head}"]


def _part(program: Program) -> list[str]:
    """The meaning of a slash, by a dim that this program shards."""
    for op in program.ops:
        for value in op.outputs:
            for dim in value.type.dims:
                axes = value.type.axes_of(dim)
                if axes and dim != BATCH and not dim.startswith("flat_"):
                    word = axes_word(axes, program)
                    part = f"{letter(dim)}/{word}"
                    return [f"{part:<7} the part of {letter(dim)} that a rank of {word} holds"]
    return []


def get_padded_rows(program: Program, patterns: Mapping[str, str]) -> dict[str, int]:
    """The rows of each parameter that has more for padding, by the pattern of its name."""
    valid_rows = dict[str, int]()
    for param in program.params:
        rows, *columns = (*param.type.dims[param.stacked :], "")
        is_grouped = param.inner > 0 and len(columns) - 1 > param.inner
        if rows and not is_grouped and program.valid(rows) != program.size(rows):
            valid_rows[patterns[param.name]] = program.valid(rows)
    return valid_rows


def _plan(program: Program, inputs: tuple[Arg, ...], sizes: Mapping[str, str]) -> Iterator[str]:
    """The lines of the settings that a person may change between runs, and what the loop must
    know.
    """
    train, schedule = program.train, program.train.optimizer.schedule
    yield f"mesh={mesh_word(program)},"
    yield f"{call(f'data={train.data.kind.capitalize()}', _corpus(train.data), 4)},"
    yield "inputs={"
    yield from (f"    {literal(base(arg.value.name))}: {_input(arg, program)}," for arg in inputs)
    yield "},"
    yield f"vocab={_vocabulary(program, sizes)},"
    yield f"seq={sizes.get(SEQUENCE, train.seq)},"
    yield f"global_batch={train.global_batch},"
    yield f"microbatches={program.size('microbatches')},"
    yield f"steps={train.steps},"
    yield f"seed={train.seed},"
    yield f"lr={literal(train.optimizer.lr)},"
    floor = f", floor={literal(schedule.floor)}" if schedule.kind == "cosine" else ""
    yield f"schedule={schedule.kind.capitalize()}(warmup={schedule.warmup}{floor}),"
    yield from (f"{argument}," for argument in _nodes(program))
    yield from _smaller(program)
    yield from (f"{name}={number}," for name, number in train.saves.items())
    if program.watch != Watch():
        yield f"watch={_watch(program.watch)},"
    if choices := choices_with_capacity(program):
        yield f"choices={literal(choices)},"


def _corpus(data: Data) -> list[str]:
    """The arguments that say where a run's data lies and how it is read."""
    files = _sets(data) if data.sets else literal(data.files)
    arguments = [files, f"holdout={literal(data.holdout)}"]
    if data.separator is not None:
        arguments.append(f"separator={data.separator_id}")
    if data.masked is not None:
        arguments += [f"masked={literal(data.masked)}", f"mask_token={data.mask_id}"]
    if data.kind == "tokens":
        arguments.append(f"dtype=torch.{data.dtype}")
    if data.as_is == ON:
        arguments.append("as_is=True")
    return arguments


def _watch(watch: Watch) -> str:
    steps = f"finite={watch.finite}, skips={watch.skips}, locate={watch.locate == ON}"
    times = f"copies={watch.copies}, replay={watch.replay}, spikes={watch.deviations}"
    return f"Watch({steps}, {times})"


def _sets(data: Data) -> str:
    """The sets of a mixture, a line each."""
    rows = list[str]()
    for data_set in data.mixture:
        weight = f"weight={literal(data_set.weight)}"
        holdout = f"holdout={literal(data_set.holdout)}"
        arguments = [literal(data_set.name), literal(data_set.files), weight, holdout]
        rows.append(call("DataSet", arguments, 12))
    return explode("sets=", rows, 8)


def mesh_words(program: Program) -> str:
    """The axes with their sizes, in the field's names.

    More than three axes go by their own names, which fit a line.
    """
    names = PARALLEL if len(program.axes) <= 3 else {}
    words = [f"{names.get(axis.parent, axis.name)} {axis.size}" for axis in program.axes]
    return " × ".join(words) or "one rank"


def mesh_word(program: Program) -> str:
    """The axes and their sizes as a dictionary."""
    entries = [f"{literal(axis.name)}: {axis.size}" for axis in program.axes]
    return f"{{{', '.join(entries)}}}"


def _nodes(program: Program) -> list[str]:
    """The argument for the number of nodes, if there are several."""
    nodes = program.cluster.nodes
    return [f"nodes={nodes}"] if nodes > 1 else []


def _smaller(program: Program) -> list[str]:
    """The lines of the other sizes of an elastic axis."""
    rows = list[str]()
    for sized in every_size(program)[1:]:
        microbatches = f"microbatches={sized.size(MICROBATCHES)}"
        arguments = [mesh_word(sized), microbatches, *_nodes(sized)]
        rows.append(f"    {call('SmallerMesh', arguments, 8)},")
    return ["smaller=(  # meshes for fewer nodes", *rows, "),"] if rows else []


def _input(arg: Arg, program: Program) -> str:
    type = arg.value.type
    split = dict[str, tuple[str, ...]]()
    for dim in type.dims:
        if axes := type.axes_of(dim):
            split[dim] = axes
    chunked = program.zigzag_axes(SEQUENCE, split.get(SEQUENCE, ()))
    zigzag = f", zigzag={literal(chunked)}" if chunked else ""
    axes_by_dim = ", ".join(f"{literal(dim)}: {literal(axes)}" for dim, axes in split.items())
    return f"Input({literal(type.dims)}, {{{axes_by_dim}}}{zigzag})"


def _vocabulary(program: Program, sizes: Mapping[str, str]) -> str:
    dim = vocabulary(program)
    is_padded = program.valid(dim) != program.size(dim)
    if dim in sizes and not is_padded:
        return sizes[dim]
    return str(program.valid(dim))
