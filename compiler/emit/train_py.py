"""The whole emitted program: header, classes, buckets, step, plan.

Purpose: fills `codegen_templates/train.py.j2`; the same program gives the same bytes.
Non-goals: checking what was written (`readback`).
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from .. import __version__
from ..analysis.certificate import Proof, Tried, header, tried_words, trust_words, untried
from ..analysis.elastic import alternatives, elastic_axis, every_size, sizes
from ..analysis.kernel_tiles import Used, kernels_of, tiles_file
from ..analysis.memory import Account, account, accounts, at_loads
from ..analysis.time import expected
from ..analysis.vocabulary import vocabulary
from ..config.settings import ON, Data, Watch
from ..config.units import counted
from ..ir import BATCH, MICROBATCHES, SEQUENCE, Arg, Program, base
from ..ops.protocol import FUNCTIONAL, KERNELS, RUNTIME
from ..ops.routers import limited_choices
from ..reports.summary import launch
from ..syntax.package_data import filled
from ..syntax.source import Source
from .build import bucket_entries, optimizer, state
from .constants import kernel_lines, pipeline_line, schedule_files, size_lines, stage_lines
from .hf_names import names_file
from .imports import IMPORTS
from .model_classes import compiled, model_classes
from .module import fields
from .naming import (
    axes_word,
    call,
    class_name,
    exploded,
    file_word,
    letter,
    literal,
    read_beside,
    run_word,
)
from .step import step_lines
from .user_ops import modules

if TYPE_CHECKING:
    from ..analysis.time.report import Report

PARALLEL = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
}
"""The field's names for axes so called."""

SIGNS = (
    "I, R    on an axis: the same on all ranks, invariant or replicated; S(dim) sharded, P partial",
    "P→I     a change of placement; bwd: what backward does for it",
)
"""The meanings of placements in comments."""


def train_py(program: Program, source: Source, proof: Proof | None = None, known: str = "") -> str:
    """The text of `train.py`; its header says what was shown of it.

    `known` is the hash of its model, if any.
    """
    return program_files(program, source, proof, known)["train.py"]


def program_files(
    program: Program,
    source: Source,
    proof: Proof | None = None,
    known: str = "",
    unpadded: str = "",
    tried: Sequence[Tried] = (),
) -> dict[str, str]:
    """That, and the files that it reads from where it lies, name → text.

    `unpadded` is the hash without padding; `tried` are the functions of user ops that were tried.
    """
    model = model_classes(program)
    names = names_file(program, model.patterns)
    train, evaluate = step_lines(program, model.patterns, model.sizes)
    body = filled(
        "train.py.j2",
        version=__version__,
        file=file_word(source.path),
        program=program,
        ranks=counted(program.ranks, "GPU" if account(program).device == "cuda" else "rank"),
        mesh=mesh_words(program),
        name=class_name(program.name),
        launch=textwrap.wrap(
            launch(program).command(PurePath("train.py")), 112, break_on_hyphens=False
        ),
        legend=legend(program),
        shown=header(proof),
        trusted=trust_lines(program, tried, proof),
        modules=modules(program),
        kernels=kernel_lines(program),
        sizes=[*size_lines(program, model.sizes)],
        classes=[(module, [*fields(module, program, model.sizes)]) for module in model.classes],
        model_class=model.classes[-1].name,
        layers=stage_lines(program),
        pipeline=pipeline_line(program, model.sizes) if program.pipeline else "",
        buckets=bucket_entries(program, model.patterns),
        compiled=compiled(program, model.classes),
        optimizer=optimizer(program),
        state=state(program),
        train=train,
        evaluate=evaluate,
        plan=[
            f"name={literal(run_word(source.path))},",
            *_plan(program, program.microbatches.args, model.sizes),
            *([f"model={literal(known)},  # what is computed, on any mesh"] if known else []),
            *([f"unpadded={literal(unpadded)},  # the same without padding"] if unpadded else []),
            *(
                [f"padded_rows={literal(rows)},"]
                if (rows := padded_rows(program, model.patterns))
                else []
            ),
            *([f"names={read_beside('read_hf_names', names)},"] if names else []),
        ],
    )
    beside = schedule_files(program) | tiles_file(program) | names
    return {**beside, "train.py": _with_imports(body, kernels_of(program))}


def trust_lines(program: Program, tried: Sequence[Tried], proof: Proof | None) -> list[str]:
    """The lines of the docstring about the user's own functions."""
    of_untried = trust_words(untried(program, tried), proved=proof is not None)
    statements = of_untried, tried_words([each.function for each in tried])
    return [line for statement in statements for line in textwrap.wrap(statement, 116)]


def legend(program: Program) -> list[str]:
    """The legend of signs in comments, and this program's sizes."""
    used = {
        dim
        for op in program.ops
        for value in op.outputs
        for dim in value.type.dims
        if not dim.startswith("flat_")
    }
    stored = {dim for param in program.params for dim in param.type.dims}
    # not by the plan
    made = {MICROBATCHES, *(str(dict(op.attrs).get("as")) for op in program.ops)} - stored
    names = [dim for dim in program.dims if dim.name in used - made and not dim.twin]
    known = {BATCH: f"{program.train.microbatch} per rank"}
    sizes = [
        f"{letter(d.name)} {d.name} {known.get(d.name, d.size)}"
        if letter(d.name) != d.name
        else f"{d.name} {d.size}"
        for d in names
    ]
    lines = [*textwrap.wrap(", ".join(sizes).replace(" ", "\0").replace(",\0", ", "), 108)]
    lines += [*_smaller_sizes(program), *_part(program), *SIGNS]
    return [f"    {line}".replace("\0", " ") for line in lines]


def _smaller_sizes(program: Program) -> list[str]:
    """The other sizes of an elastic axis."""
    axis, smaller = elastic_axis(program), sizes(program)[1:]
    head = f"{axis.name} {axis.size}" if axis else ""
    return (
        [f"{head:<7} {alternatives(smaller)} where nodes are lost; sizes are those of {head}"]
        if smaller
        else []
    )


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


def padded_rows(program: Program, patterns: Mapping[str, str]) -> dict[str, int]:
    """The rows of each parameter that has more for padding, by the pattern of its name."""
    found = dict[str, int]()
    for param in program.params:
        rows, *columns = (*param.type.dims[param.stacked :], "")
        is_grouped = param.inner > 0 and len(columns) - 1 > param.inner
        if rows and not is_grouped and program.valid(rows) != program.size(rows):
            found[patterns[param.name]] = program.valid(rows)
    return found


def _plan(program: Program, inputs: tuple[Arg, ...], sizes: Mapping[str, str]) -> list[str]:
    """The lines of the settings that a person may change between runs, and of what the loop
    must know.
    """
    train, data = program.train, program.train.data
    schedule = train.optimizer.schedule
    arguments = [f"warmup={schedule.warmup}"] + (
        [f"floor={literal(schedule.floor)}"] if schedule.kind == "cosine" else []
    )
    corpus = [_sets(data) if data.sets else literal(data.files), f"holdout={literal(data.holdout)}"]
    if data.separator is not None:
        corpus.append(f"separator={data.separator_id}")
    if data.masked is not None:
        corpus += [f"masked={literal(data.masked)}", f"mask_token={data.mask_id}"]
    if data.kind == "tokens":
        corpus.append(f"dtype=torch.{data.dtype}")
    if data.as_is == ON:
        corpus.append("as_is=True")
    return [
        f"mesh={mesh_word(program)},",
        f"{call(f'data={data.kind.capitalize()}', corpus, 4)},",
        "inputs={",
        *(f"    {literal(base(arg.value.name))}: {_input(arg, program)}," for arg in inputs),
        "},",
        f"vocab={_vocabulary(program, sizes)},",
        f"seq={sizes.get(SEQUENCE, train.seq)},",
        f"global_batch={train.global_batch},",
        f"microbatches={program.size('microbatches')},",
        f"steps={train.steps},",
        f"seed={train.seed},",
        f"lr={literal(train.optimizer.lr)},",
        f"schedule={schedule.kind.capitalize()}({', '.join(arguments)}),",
        *(f"{each}," for each in _costs(program, 4)),
        *_smaller(program),
        *(f"{name}={number}," for name, number in train.saves.items()),
        *([f"watch={_watch(program.watch)},"] if program.watch != Watch() else []),
        *([f"choices={literal(choices)},"] if (choices := limited_choices(program)) else []),
    ]


def _watch(it: Watch) -> str:
    steps = f"finite={it.finite}, skips={it.skips}, locate={it.locate == ON}"
    return f"Watch({steps}, copies={it.copies}, replay={it.replay}, spikes={it.deviations})"


def _sets(data: Data) -> str:
    """The sets of a mixture, a line each."""
    rows = [
        [
            literal(it.name),
            literal(it.files),
            f"weight={literal(it.weight)}",
            f"holdout={literal(it.holdout)}",
        ]
        for it in data.mixture
    ]
    return exploded("sets=", [call("DataSet", row, 12) for row in rows], 8)


def mesh_words(program: Program) -> str:
    """The axes in the field's names, of more than three by their own, which fit a line, with
    their sizes.
    """
    names = PARALLEL if len(program.axes) <= 3 else {}
    return (
        " × ".join(f"{names.get(axis.parent, axis.name)} {axis.size}" for axis in program.axes)
        or "one rank"
    )


def mesh_word(program: Program) -> str:
    """The axes and their sizes as a dictionary."""
    return f"{{{', '.join(f'{literal(axis.name)}: {axis.size}' for axis in program.axes)}}}"


def _costs(program: Program, indent: int) -> list[str]:
    """Nodes, if several, memory, and time if it is known."""
    return [
        *([f"nodes={program.cluster.nodes}"] if program.cluster.nodes > 1 else []),
        call("account=Account", _account(program), indent),
        *([call("expected=Expected", _expected(it), indent)] if (it := expected(program)) else []),
    ]


def _smaller(program: Program) -> list[str]:
    """The lines of the other sizes of an elastic axis."""
    rows = [
        call(
            "SmallerMesh",
            [mesh_word(it), f"microbatches={it.size(MICROBATCHES)}", *_costs(it, 12)],
            8,
        )
        for it in every_size(program)[1:]
    ]
    return (
        ["smaller=(  # where nodes are lost", *(f"    {row}," for row in rows), "),"]
        if rows
        else []
    )


def _account(program: Program) -> list[str]:
    """The peak memory of tensors, of each rank of a pipeline's axis, and the reserve left to CUDA.

    Where loads of experts differ: with equal ones, and the most.
    """
    pipeline, first, loads = program.pipeline, account(program), [it for _, it in at_loads(program)]
    reserve = [f"reserve={first.reserve}"] if first.reserve else []
    axis = [f"axis={literal(pipeline.axis)}"] if pipeline else []
    most = [f"most={_totals(loads[-1])}"] if loads else []
    return [
        literal(first.device),
        _totals(loads[0] if loads else accounts(program)),
        *reserve,
        *axis,
        *most,
    ]


def _totals(accounts: Sequence[Account]) -> str:
    ranks = tuple(it.total for it in accounts)
    return literal(ranks) if len(ranks) < 8 else exploded("", [*map(str, ranks)], 8)


def _expected(it: "Report") -> list[str]:
    """A step's time, to four digits, and what its MFU is made of."""
    figures = {"seconds": literal(float(f"{it.step.seconds:.4g}")), "error": literal(it.on.error)}
    figures |= {"flops_per_token": f"{it.per_token:_}", "peak_flops": f"{it.peak / 1e12:g}e12"}
    return [literal(it.on.name), *(f"{name}={value}" for name, value in figures.items())]


def _input(arg: Arg, program: Program) -> str:
    type = arg.value.type
    split = {dim: type.axes_of(dim) for dim in type.dims if type.axes_of(dim)}
    chunked = program.zigzag_axes(SEQUENCE, split.get(SEQUENCE, ()))
    zigzag = f", zigzag={literal(chunked)}" if chunked else ""
    each = ", ".join(f"{literal(dim)}: {literal(axes)}" for dim, axes in split.items())
    return f"Input({literal(type.dims)}, {{{each}}}{zigzag})"


def _vocabulary(program: Program, sizes: Mapping[str, str]) -> str:
    dim = vocabulary(program)
    return (
        sizes[dim]
        if dim in sizes and program.valid(dim) == program.size(dim)
        else str(program.valid(dim))
    )


def _with_imports(body: str, made: Sequence[Used]) -> str:
    """The text with the names that it calls or annotates with imported, but for functions that it
    makes of kernels.

    A name that both kernels and the runtime have is imported from the kernels in a program with
    any.
    """
    code = re.sub(r'(?m)#.*$|"[^"\n]*"', "", body.split('"""', 2)[2])
    # but not as the keyword of an argument
    used = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*\b(?!\s*=[^=])", code))
    own = [name for name in IMPORTS[KERNELS] if made and name in used]
    rest = used - {*own} - {each.function for each in made}
    functional = [name for name in IMPORTS[FUNCTIONAL] if name in used]
    line = f"from torch.nn.functional import {', '.join(functional)}\n" if functional else ""
    kernels = f"from scalec.runtime.kernels import (\n{_listed(own)})\n" if own else ""
    body = body.replace("@FUNCTIONAL@\n", line).replace("@KERNELS@\n", kernels)
    return body.replace("@IMPORTS@\n", _listed([name for name in IMPORTS[RUNTIME] if name in rest]))


def _listed(names: Sequence[str]) -> str:
    return "".join(f"    {name},\n" for name in names)
