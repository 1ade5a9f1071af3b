"""From the final IR to a program of torch alone: DTensors on a DeviceMesh, FSDP2, torch's
optimizers.

Purpose: the files of the program, and the frame of `train.py`.  Non-goals: what torch cannot do
(`refusals`), classes (`modules`), a step (`step`), how state is sharded (`sharded`).
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from attrs import evolve

from ... import __version__
from ...analysis.certificate import Proof, Tried
from ...config.settings import OFF, TORCH
from ...config.units import count_words
from ...ir import MICROBATCHES, Program, base
from ...reports.summary import get_launch
from ...syntax.package_data import fill_template
from ...syntax.source import Source
from ..constants import size_lines
from ..hf_names import plain_names
from ..model_classes import Model, model_classes
from ..naming import class_name, file_word, literal
from ..plan_json import plan_json
from ..target import DTENSOR, whole_mesh
from ..train_py import legend, mesh_words, trust_lines
from ..user_ops import copies
from ..user_ops import modules as user_modules
from . import staged
from .build import build_lines
from .imports import LIBRARY_FILE, get_library, import_lines
from .modules import field_lines
from .readback import check
from .refusals import refuse
from .step import (
    evaluation_lines,
    input_expression,
    learning_rate_doc,
    learning_rate_lines,
    train_lines,
)


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
    script = train_py(program, source, proof, tried)
    files = {"train.py": script, LIBRARY_FILE: get_library(), **staged.row_files(program)}
    matched = check(script, program)
    account = plan_json(program, source, model or program, proof, matched, user_files, files, tried)
    return {**user_files, **files, "plan.json": account}


def train_py(
    program: Program, source: Source, proof: Proof | None = None, tried: Sequence[Tried] = ()
) -> str:
    """The text of a program that torch can express."""
    model = model_classes(program, DTENSOR)
    body = fill_template(
        "dtensor.py.j2",
        **_header(program, source, proof, tried),
        **_constants(program, model),
        **_functions(program, model),
    )
    imports = import_lines(body, user_modules(program))
    return body.replace("# @IMPORTS@\n", "\n".join(imports) + "\n")


def _header(
    program: Program, source: Source, proof: Proof | None, tried: Sequence[Tried]
) -> dict[str, Any]:
    """The template's values for the docstring."""
    start = "# for a program that gives it the data of the plan"
    if _reads_file(program):
        start = f"{get_launch(program).command(PurePath('train.py'))} FILE [STEPS]"
    return {
        "version": __version__,
        "file": file_word(source.path),
        "ranks": count_words(program.ranks, "rank"),
        "mesh": mesh_words(program),
        "name": class_name(program.name),
        "launch": textwrap.wrap(start, 112),
        "legend": legend(program),
        "shown": "\n".join([_proof_lines(proof), *trust_lines(program, tried, proof)]),
    }


def _reads_file(program: Program) -> bool:
    """Whether a program can train on the bytes of a file: its inputs are tokens and labels."""
    names = _input_names(program)
    return names == ["tokens", "labels"] and program.train.data.masked is None


def _input_names(program: Program) -> list[str]:
    return [base(arg.value.name) for arg in program.microbatches.args]


def _proof_lines(proof: Proof | None) -> str:
    """The lines of the docstring that say what is known of the program."""
    proof_text = ""
    if proof:
        model = proof.against
        proof_text = f"the IR's step evaluated equal to the single-device step of {model},\nand "
    shown = f"Shown: {proof_text}this file matches the IR, op for op."
    return f"{shown}\nNot shown: that torch communicates no more than the plan."


def _constants(program: Program, model: Model) -> dict[str, Any]:
    """The template's values for the constants of the module."""
    return {
        "sizes": [*size_lines(program, model.sizes)],
        "axes": json.dumps(whole_mesh(program)),
        "stages": [*staged.constants(program)],
        "microbatches": program.size(MICROBATCHES),
        "steps": program.train.steps,
        "seed": program.train.seed,
        "global_batch": program.train.global_batch,
        "names": [*_names(plain_names(program, model.patterns))],
    }


def _names(tensors: Mapping[str, str]) -> Iterator[str]:
    """The constant with the names of tensors in files, if there are any."""
    if not tensors:
        return
    yield "NAMES = {  # of the tensors in Hugging Face's files, for `save_weights` of torch_ops"
    for pattern, tensor in tensors.items():
        yield f"    {literal(pattern)}: {literal(tensor)},"
    yield "}"


def _functions(program: Program, model: Model) -> dict[str, Any]:
    """The template's values for classes and functions."""
    classes: list[tuple[object, list[str]]] = []
    for module in model.classes:
        classes.append((module, [*field_lines(module, program, model.sizes)]))
    names = _input_names(program)
    parameters = ["mesh: DeviceMesh", *(f"{name}: Tensor" for name in names)]
    crossing: list[str] = []
    if program.pipeline:
        crossing += staged.crossing_lines(program, model.sizes)
    return {
        **_types(program),
        "classes": classes,
        "crossing": crossing,
        "build": [*build_lines(program, model)],
        "call": ", ".join(parameters),
        "inputs": [input_expression(arg, program) for arg in program.microbatches.args],
        "train": [*train_lines(program, names, model.patterns)],
        "evaluate": [*evaluation_lines(program, names)],
        "windows": _reads_file(program),
        "lr_doc": learning_rate_doc(program),
        "lr": [*learning_rate_lines(program)],
    }


def _types(program: Program) -> dict[str, str]:
    """The types of a model and of a batch: `batch` is made, and `given` to a step."""
    if program.pipeline:
        return {
            "batch": "dict[str, Tensor]",
            "given": "Mapping[str, Tensor]",
            "model": "Pipeline",
        }
    return {
        "batch": "list[tuple[Tensor, ...]]",
        "given": "Sequence[tuple[Tensor, ...]]",
        "model": "nn.Module",
    }
