"""The whole emitted program: header, classes, buckets, step, plan.

Purpose: fills `codegen_templates/train.py.j2`; the same program gives the same bytes.
Non-goals: checking what was written (`readback`).
"""

import re
from collections.abc import Sequence

from .. import __version__
from ..analysis.certificate import Proof, header, trust_words, trusted
from ..analysis.kernel_tiles import Used, kernels_of
from ..analysis.memory import account, accounts
from ..config.units import counted
from ..ir import Arg, Program, Region, Type, base, types, walk
from ..ops.chunked_logits import class_dims
from ..ops.protocol import FUNCTIONAL, KERNELS, RUNTIME
from ..reports.summary import launch, ranks
from ..syntax.package_data import filled
from ..syntax.source import Source
from .build import bucket_entries, optimizer, state
from .hf_names import weights_lines
from .imports import IMPORTS
from .init import fields
from .kernels import kernel_lines
from .model_classes import compiled, model_classes
from .module import Module
from .naming import axes_word, call, file_word, letter, literal, run_word
from .pipeline import pipeline_lines
from .step import step_lines
from .user_ops import modules


def train_py(program: Program, source: Source, proof: Proof | None = None, known: str = "") -> str:
    """The text of `train.py`; its header says what was shown of it.  `known` is the hash of its model, if any."""
    microbatches = next(stmt for stmt in program.region.body if isinstance(stmt, Region))
    model = model_classes(program, microbatches)
    body = filled(
        "train.py.j2",
        version=__version__,
        file=file_word(source.path),
        program=program,
        ranks=counted(ranks(program), "rank"),
        mesh=" × ".join(f"{axis.name} {axis.size}" for axis in program.axes) or "one rank",
        launch=" ".join(launch(program).options()),
        legend=_wrapped(_legend(program), 116),
        shown=_wrapped(header(proof), 116),
        trusted=_wrapped(trust_words(trusted(program)), 116),
        modules=modules(program),
        kernels=kernel_lines(program),
        classes=[_Class(module, program) for module in model.classes],
        model_class=model.classes[-1].name,
        pipeline=pipeline_lines(program),
        buckets=bucket_entries(program, model.patterns),
        compiled=compiled(program, model.classes),
        optimizer=optimizer(program),
        state=state(program),
        step=step_lines(program),
        plan=[
            f"name={literal(run_word(source.path))},",
            *_plan(program, microbatches.args, types(program)),
            *([f"model={literal(known)},  # what is computed, on any mesh"] if known else []),
            *weights_lines(program, model.patterns),
        ],
    )
    return _with_imports(body, kernels_of(program))


def _legend(program: Program) -> str:
    """What the letters of shape comments mean, and this program's sizes."""
    used = {
        dim
        for op in walk(program.region.body)
        for value in op.outputs
        for dim in value.type.dims
        if not dim.startswith("flat_")
    }
    names = [dim for dim in program.dims if dim.name in used and dim.name not in ("microbatches",)]
    sizes = {"batch": f"{program.train.microbatch} per rank"}
    words = [
        f"{letter(d.name)} {d.name} {sizes.get(d.name, d.size)}" if letter(d.name) != d.name else f"{d.name} {d.size}"
        for d in names
    ]
    part = _part(program)
    return (
        f"Shapes in comments are one rank's: {', '.join(words)}{part}.  "
        "On an axis a value is I invariant, R replicated, S(dim) sharded or P partial; P→I is a change of placement, "
        "and bwd what backward does for it."
    )


def _part(program: Program) -> str:
    """What a slash means, by a dim that this program shards."""
    for op in walk(program.region.body):
        for value in op.outputs:
            for dim in value.type.dims:
                axes = value.type.axes_of(dim)
                if axes and dim != "batch" and not dim.startswith("flat_"):
                    word = axes_word(axes, program)
                    return f"; {letter(dim)}/{word} is the part of {letter(dim)} that a rank of axis {word} holds"
    return ""


def _wrapped(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in re.findall(r"\S+\s*", text):
        if lines and len(lines[-1]) + len(word.rstrip()) <= width:
            lines[-1] += word
        else:
            lines.append(word)
    return [line.rstrip() for line in lines]


class _Class:
    """A class as the template takes it."""

    def __init__(self, module: Module, program: Program) -> None:
        self.name = module.name
        self.doc = module.doc
        self.init = "self, mesh: Mesh, stages: tuple[int, ...]" if module.crossing else "self, mesh: Mesh"
        self.fields = [*fields(module, program)]
        returns = module.returns
        arguments = ["self", *(f"{name}: {type}" for name, type in module.arguments.items())]
        self.header = f"{call('def forward', arguments, 4, len(f' -> {returns}:'))} -> {returns}:"
        self.lines = [*module.lines, f"        return {module.result}"]


def _plan(program: Program, inputs: tuple[Arg, ...], types: dict[str, Type]) -> list[str]:
    """The lines of the settings that a person may change between runs, and of what the loop must know."""
    train, data = program.train, program.train.data
    schedule = train.optimizer.schedule
    arguments = [f"warmup={schedule.warmup}"] + (
        [f"floor={literal(schedule.floor)}"] if schedule.kind == "cosine" else []
    )
    corpus = [literal(tuple(data.files)), f"holdout={literal(data.holdout)}"]
    if data.separator is not None:
        corpus.append(f"separator={data.separator_id}")
    if data.masked is not None:
        corpus += [f"masked={literal(data.masked)}", f"mask_token={data.mask_id}"]
    if data.kind == "tokens":
        corpus.append(f"dtype=torch.{data.dtype}")
    return [
        f"mesh={{{', '.join(f'{literal(a.name)}: {a.size}' for a in program.axes)}}},",
        f"{call(f'data={data.kind.capitalize()}', corpus, 4)},",
        "inputs={",
        *(f"    {literal(base(arg.value.name))}: {_input(arg)}," for arg in inputs),
        "},",
        f"vocab={_vocabulary(program, types)},",
        f"seq={train.seq},",
        f"global_batch={train.global_batch},",
        f"microbatches={program.size('microbatches')},",
        f"steps={train.steps},",
        f"seed={train.seed},",
        f"lr={literal(train.optimizer.lr)},",
        f"schedule={schedule.kind.capitalize()}({', '.join(arguments)}),",
        *([f"nodes={program.cluster.nodes},"] if program.cluster.nodes > 1 else []),
        f"{call('account=Account', _account(program), 4)},",
    ]


def _account(program: Program) -> list[str]:
    """What tensors take in memory, of each rank of a pipeline's axis, and what is left to CUDA besides."""
    pipeline, first = program.pipeline, account(program)
    ranks = tuple(it.total for it in accounts(program)) if pipeline else (first.total,)
    reserve = [f"reserve={first.reserve}"] if first.reserve else []
    return [literal(first.device), literal(ranks), *reserve, *([f"axis={literal(pipeline.axis)}"] if pipeline else [])]


def _input(arg: Arg) -> str:
    type = arg.value.type
    split = {dim: type.axes_of(dim) for dim in type.dims if type.axes_of(dim)}
    return (
        f"Input({literal(type.dims)}, {{{', '.join(f'{literal(d)}: {literal(axes)}' for d, axes in split.items())}}})"
    )


def _vocabulary(program: Program, types: dict[str, Type]) -> int:
    """Every token id and label is below the smallest of the tables and of the numbers of classes."""
    ops = list(walk(program.region.body))
    dims = [types[op.inputs[1]].dims[0] for op in ops if op.kind == "embedding"]
    dims += [dim for op in ops for dim in class_dims(op, [types[name] for name in op.inputs])]
    return min(program.valid(dim) for dim in dims)


def _with_imports(body: str, made: Sequence[Used]) -> str:
    """The text with the names that it calls or annotates with imported, but for functions that it makes of kernels.

    What kernels and the runtime both have is the kernels' in a program that has any.
    """
    used = _names(re.sub(r"(?m)#.*$", "", body.split('"""', 2)[2]))
    own = [name for name in IMPORTS[KERNELS] if made and name in used]
    rest = used - {*own} - {each.function for each in made}
    functional = [name for name in IMPORTS[FUNCTIONAL] if name in used]
    line = f"from torch.nn.functional import {', '.join(functional)}\n" if functional else ""
    kernels = f"from scalec.runtime.kernels import (\n{_listed(own)})\n" if own else ""
    body = body.replace("@FUNCTIONAL@\n", line).replace("@KERNELS@\n", kernels)
    return body.replace("@IMPORTS@\n", _listed([name for name in IMPORTS[RUNTIME] if name in rest]))


def _listed(names: Sequence[str]) -> str:
    return "".join(f"    {name},\n" for name in names)


def _names(code: str) -> set[str]:
    """The names that `code` uses, other than as the keyword of an argument."""
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*\b(?!\s*=[^=])", code))
