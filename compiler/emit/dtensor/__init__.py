"""From the final IR to a program of torch alone: DTensors on a DeviceMesh, FSDP2, torch's
optimizers.

Purpose: the same classes as in `train_py`, around them a step in torch's own words.
Non-goals: what torch cannot do (`refusals`), how state is sharded (`sharded`).
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from attrs import evolve

from ... import __version__
from ...analysis.certificate import Proof, Tried
from ...config.settings import OFF, TORCH
from ...config.units import count_words
from ...ir import MICROBATCHES, SEQUENCE, Arg, Param, Program, base
from ...reports.summary import get_launch
from ...syntax.package_data import fill_template
from ...syntax.source import Source
from ..constants import product, size_lines
from ..hf_names import plain_names
from ..model_classes import Model, model_classes
from ..module import Child, Module, parameter_sizes, ropes
from ..naming import DTYPES, call, class_name, file_word, fit_line, literal, matrix_shape
from ..plan_json import plan_json
from ..target import DTENSOR, mesh_axes, placements, whole_mesh, zigzag_ranks
from ..train_py import legend, mesh_words, trust_lines
from ..user_ops import copies
from ..user_ops import modules as user_modules
from . import staged
from .imports import import_lines, ops_source
from .readback import check
from .refusals import refuse
from .sharded import optimizer_lines, sharding_lines, sync_lines


def for_torch(model: Program) -> Program:
    """A plan before its passes, with torch's own ops: kernels and graphs are no part of what a
    program says.
    """
    return evolve(model, train=evolve(model.train, kernels=TORCH, compile=OFF))


def emit(
    program: Program,
    source: Source,
    model: Program | None = None,
    proof: Proof | None = None,
    modules: Mapping[str, str] | None = None,
    tried: Sequence[Tried] = (),
) -> dict[str, str]:
    """The files of a program of torch alone, by name; `emit.emit` has the files of the runtime's.

    Raises PlanError where torch cannot express the plan.
    """
    refuse(program)
    user_files = copies(program, source) if modules is None else modules
    files = {"train.py": train_py(program, source, proof, tried), **staged.row_files(program)}
    matched = check(files["train.py"], program)
    account = plan_json(program, source, model or program, proof, matched, user_files, files, tried)
    return {**user_files, **files, "plan.json": account}


def train_py(
    program: Program, source: Source, proof: Proof | None = None, tried: Sequence[Tried] = ()
) -> str:
    """The text of a program that torch can express."""
    model = model_classes(program, DTENSOR)
    inputs = [base(arg.value.name) for arg in program.microbatches.args]
    start = f"{get_launch(program).command(PurePath('train.py'))} FILE [STEPS]"
    windows = inputs == ["tokens", "labels"] and program.train.data.masked is None
    body = fill_template(
        "dtensor.py.j2",
        version=__version__,
        file=file_word(source.path),
        ranks=count_words(program.ranks, "rank"),
        mesh=mesh_words(program),
        name=class_name(program.name),
        launch=textwrap.wrap(
            start if windows else "# for a program that gives it the data of the plan", 112
        ),
        legend=legend(program),
        shown="\n".join([_proof_lines(proof), *trust_lines(program, tried, proof)]),
        sizes=[*size_lines(program, model.sizes)],
        axes=json.dumps(whole_mesh(program)),
        stages=[*staged.constants(program)],
        crossing=[*staged.crossing_lines(program, model.sizes)] if program.pipeline else [],
        microbatches=program.size(MICROBATCHES),
        steps=program.train.steps,
        seed=program.train.seed,
        global_batch=program.train.global_batch,
        classes=[(module, [*_fields(module, program, model.sizes)]) for module in model.classes],
        build=[*_build(program, model)],
        call=", ".join(["mesh: DeviceMesh", *(f"{name}: Tensor" for name in inputs)]),
        inputs=[_input(arg, program) for arg in program.microbatches.args],
        batch="dict[str, Tensor]" if program.pipeline else "list[tuple[Tensor, ...]]",
        given="Mapping[str, Tensor]" if program.pipeline else "Sequence[tuple[Tensor, ...]]",
        model='"Pipeline"' if program.pipeline else "nn.Module",
        train=[*_train(program, inputs, model.patterns)],
        evaluate=[*_evaluate(program, inputs)],
        windows=windows,
        state="scaled_state" if program.train.precision == "fp16" else "training_state",
        names=[*_names(plain_names(program, model.patterns))],
        lr_doc=f"The learning rate of a step, from 0: {program.train.optimizer.schedule.kind},"
        " after a warm-up.",
        lr=[*_learning_rate(program)],
    )
    text = body.replace("# @OPS@\n", ops_source(body) + "\n")
    return text.replace("# @IMPORTS@\n", import_lines(text, user_modules(program)))


def _proof_lines(proof: Proof | None) -> str:
    """The lines of the docstring that say what is known of the program."""
    proof_text = (
        f"the IR's step evaluated equal to the single-device step of {proof.against},\nand "
        if proof
        else ""
    )
    shown = f"Shown: {proof_text}this file matches the IR, op for op."
    return f"{shown}\nNot shown: that torch communicates no more than the plan."


def _names(tensors: Mapping[str, str]) -> Iterator[str]:
    """The constant with the names of tensors in files, if there are any."""
    if tensors:
        yield "NAMES = {  # of the tensors in Hugging Face's files"
        yield from (
            f"    {literal(pattern)}: {literal(tensor)}," for pattern, tensor in tensors.items()
        )
        yield "}"


def _fields(module: Module, program: Program, sizes: Mapping[str, str]) -> Iterator[str]:
    cut = program.pipeline.dims if module.crossing and program.pipeline else ()
    for name, declared in module.declared.items():
        if isinstance(declared, Child):
            count = sizes.get(declared.dim, declared.count)
            all_ = f"nn.ModuleList({declared.module.name}(mesh) for _ in range({count}))"
            is_cut = declared.dim in cut
            modules = staged.stage_layers(declared, str(count)) if is_cut else all_
            yield f"self.{name} = {modules}"
        else:
            yield from _weight(name, declared, program, sizes)
    if cut:
        yield from staged.deletion_lines(module, program)
    for table, name in module.tables.items():
        arguments = ropes(table, program, sizes)
        split = ", ".join(
            "Shard(1)" if axis in table.axes else "Replicate()" for axis in mesh_axes(program)
        )
        joined_arguments = ", ".join(["mesh", *arguments, f"placements=[{split}]"])
        line = f"{name} = rope_frequencies({joined_arguments}{_zigzag(program)})"
        yield from fit_line(line, 8).replace("\n        ", "\n").split("\n")
        yield f"self.register_buffer({literal(name)}, {name}, persistent=False)"
    yield from ["self.stage = stage"] * bool(module.crossing)


def _weight(name: str, param: Param, program: Program, sizes: Mapping[str, str]) -> list[str]:
    """The declaration of a parameter as one layer has it, after a comment with its shape on a
    rank.
    """
    groups, type, joined = parameter_sizes(param)
    stored = evolve(type, dims=tuple(group[0] for group in groups))
    init = {"normal": "std={}", "ones": "mean=1.0", "zeros": ""}[param.init.kind].format(
        *param.init.args
    )
    arguments = ["mesh", *(product(sizes, program, group) for group in groups)]
    arguments += [f"placements={placements(stored, program)}", *([init] if init else [])]
    code, comment = (
        call(f"self.{name} = weight", arguments, 8, 0),
        matrix_shape(type, joined, program),
    )
    if "\n" not in code and len(code) + len(comment) < 108:
        return [f"{code}  # {comment}"]
    return [f"# {comment}", *code.replace("\n        ", "\n").split("\n")]


def _zigzag(program: Program) -> str:
    return f", zigzag={ranks}" if (ranks := zigzag_ranks(program)) > 1 else ""


def _input(arg: Arg, program: Program) -> str:
    """How a rank has its part of an input of all microbatches."""
    type, name = arg.value.type, base(arg.value.name)
    how = f"{placements(type, program)}, seq_first={type.dims[0] == SEQUENCE}{_zigzag(program)}"
    microbatches = f"by_microbatch(mesh, {name}, MICROBATCHES, {how})"
    return staged.whole_batch(arg, microbatches) if program.pipeline else microbatches


def _build(program: Program, model: Model) -> Iterator[str]:
    name, master = model.classes[-1].name, DTYPES[program.params[0].type.dtype]
    to = "" if master == DTYPES["f32"] else f".to({master})"
    if program.pipeline:
        yield from staged.stage_construction_lines(program, model.patterns, name, to)
    else:
        yield f"model = {name}(mesh){to}"
    yield from sharding_lines(program, model.patterns)
    if program.pipeline:
        yield from staged.pipeline_construction_lines(program, model.patterns)
    yield from optimizer_lines(program, model.patterns)


def _train(program: Program, inputs: list[str], patterns: Mapping[str, str]) -> Iterator[str]:
    clip, scaled = program.train.optimizer.clip, program.train.precision == "fp16"
    if scaled:
        yield "scale = loss_scale(optimizer)"
    yield from (
        staged.step_lines(True, scaled)
        if program.pipeline
        else _backward(program, inputs, patterns)
    )
    yield from _gradients(program)
    if scaled:
        yield "if num_tokens and loss.isfinite():"
        yield "    adapt_loss_scale(optimizer, grad_norm)"
    yield (
        "if num_tokens and loss.isfinite() and grad_norm.isfinite():  # or else the step"
        " changes nothing"
    )
    if clip:
        yield "    for gradient in gradients:"
        yield f"        gradient.mul_(min(1.0, {literal(clip)} / (grad_norm.item() + 1e-6)))"
    yield "    update(optimizer, lr)"
    yield "optimizer.zero_grad()"
    yield "return Metrics(loss, grad_norm, num_tokens)"


def _backward(program: Program, inputs: list[str], patterns: Mapping[str, str]) -> Iterator[str]:
    """The lines that run forward and backward of all microbatches."""
    sync = [*sync_lines(program, patterns)]
    names = ", ".join(inputs)
    yield _count_valid(inputs)
    yield "losses: list[Tensor] = []"
    if sync:
        yield f"for number, ({names}) in enumerate(batch, start=1):"
        yield from (f"    {line}" for line in sync)
    else:
        yield f"for {names} in batch:"
    yield f"    loss_sum = model({names})"
    scale = " * scale" if program.train.precision == "fp16" else ""
    yield f"    (loss_sum / max(num_tokens, 1){scale}).backward()"
    yield "    losses.append(loss_sum.detach())"
    yield "loss = whole_sum(losses) / max(num_tokens, 1)"


def _gradients(program: Program) -> Iterator[str]:
    """The lines that reduce gradients, and make their norm."""
    sent = {program.reduce_dtype(bucket) for bucket in program.buckets} - {
        bucket.type.dtype for bucket in program.buckets
    }
    function, arguments, norm = "reduced_gradients", ["model"], "total_norm"
    if program.pipeline:
        function, arguments, norm = "model.gradients", [], "model.total_norm"
    yield f"gradients = {function}({', '.join([*arguments, *(DTYPES[dtype] for dtype in sent)])})"
    if program.train.precision == "fp16":
        yield "for gradient in gradients:"
        yield "    gradient.div_(scale)"
    yield f"grad_norm = {norm}(gradients)"


def _evaluate(program: Program, inputs: list[str]) -> Iterator[str]:
    if program.pipeline:
        yield from staged.step_lines(backward=False)
    else:
        yield _count_valid(inputs)
        yield (
            f"loss = whole_sum([model({', '.join(inputs)}) for {', '.join(inputs)} in batch])"
            " / max(num_tokens, 1)"
        )
    yield "return Metrics(loss, torch.zeros_like(loss), num_tokens)"


def _count_valid(inputs: list[str]) -> str:
    names = ", ".join(name if name == "labels" else "_" for name in inputs)
    return f"num_tokens = count_valid([labels for {names} in batch])"


def _learning_rate(program: Program) -> Iterator[str]:
    optimizer = program.train.optimizer
    schedule, peak = optimizer.schedule, literal(optimizer.lr)
    if schedule.warmup:
        yield f"if step < {schedule.warmup}:"
        yield f"    return {peak} * (step + 1) / {schedule.warmup}"
    if schedule.kind == "constant":
        yield f"return {peak}"
        return
    floor = literal(min(schedule.floor, optimizer.lr))
    yield f"done = (step - {schedule.warmup}) / max(1, steps - 1 - {schedule.warmup})"
    yield f"return {floor} + ({peak} - {floor}) * 0.5 * (1 + math.cos(math.pi * done))"
