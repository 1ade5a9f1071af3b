"""The file beside an emitted program that says where files of weights hold the parameters.

The names are the plan's, in `names hf`, or else the parameters' own: `layers.{i}.wq`.

Non-goals: the plan's section `names` (`config.hf_names`), reading and writing such files (the
runtime).
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from .. import __version__
from ..analysis.bucket_layout import get_stored_shape
from ..analysis.file_shapes import get_file_shapes
from ..config.hf_names import INDICES, HFWeight
from ..ir import PRECISIONS, SEQUENCE, Buffer, Param, Program
from .naming import DTYPES


def get_program_with_names(program: Program, patterns: Mapping[str, str]) -> Program:
    """The program with a name in files for each parameter: by the plan's `names hf`, or else the
    parameter's own.

    `patterns` are the parameters' names in the program's state.  A name has an index for each of
    two repeats, so that a program with a parameter in more repeats keeps none.
    """
    if program.names or any(param.stacked > len(INDICES) for param in program.params_and_buffers):
        return program
    names = tuple(
        _make_own_weight(param, patterns[param.name], program)
        for param in program.params_and_buffers
    )
    return evolve(program, names=names)


def _make_own_weight(param: Param, pattern: str, program: Program) -> HFWeight:
    """The tensor of a parameter under its own name; experts have one tensor each:
    `layers.{i}.e_up.{experts}`.
    """
    expert_dims = program.outer(param)[param.stacked :]
    indices_of_experts = "".join(f".{{{dim}}}" for dim in expert_dims)
    return HFWeight(param.name, own_name(pattern) + indices_of_experts, span=param.span)


def own_name(pattern: str) -> str:
    """A parameter's name by the indices of its repeats."""
    name, *parts = pattern.split("*")
    for index, part in zip(INDICES, parts, strict=False):
        name += f"{{{index}}}{part}"
    return name


def names_file(plan: Program, patterns: dict[str, str]) -> dict[str, str]:
    """The file of names that a program reads, name → text."""
    program = get_program_with_names(plan, patterns)
    if not program.names:
        return {}
    dtype = DTYPES[PRECISIONS[program.train.precision]].removeprefix("torch.")
    head = {
        "written_by": f"scalec {__version__}",
        "dtype": dtype,
        "repeats": repeats(program, patterns),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    weights = list[str]()
    for weight in program.names:
        place = json.dumps(entry(weight, program))
        weights.append(f"  {json.dumps(patterns[weight.param])}: {place}")
    lines.append('"weights": {\n' + ",\n".join(weights) + "\n }")
    return {"hf_names.json": "{" + ",\n ".join(lines) + "}\n"}


def plain_names(program: Program, patterns: dict[str, str]) -> dict[str, str]:
    """The tensor of each parameter, by its pattern, where every tensor is one whole parameter of
    the same shape; else none.
    """
    params = {param.name: param for param in program.params_and_buffers}
    tensors: dict[str, str] = {}
    for weight in program.names:
        pattern = patterns[weight.param]
        shape = get_stored_shape(program, params[weight.param])
        is_whole = entry(weight, program) == {"tensor": weight.tensor, "shape": shape}
        indices = re.findall(r"\{[^}]*\}", weight.tensor)
        if not is_whole or indices != ["{i}"] * pattern.count("*"):
            return {}
        tensors[pattern] = weight.tensor
    return tensors if len(tensors) == len(program.params_and_buffers) else {}


def repeats(program: Program, patterns: dict[str, str]) -> dict[str, int]:
    """How often each repeat around a parameter is repeated, by the part of the parameters' names
    before its `*`.
    """
    counts: dict[str, int] = {}
    for param in program.params_and_buffers:
        parts = patterns[param.name].split(".*")
        for depth, dim in enumerate(param.type.dims[: param.stacked], start=1):
            counts[".*".join(parts[:depth])] = program.size(dim)
    return counts


def entry(weight: HFWeight, program: Program) -> dict[str, Any]:
    """The description of one parameter's place, as the runtime reads it."""
    param = next(param for param in program.params_and_buffers if param.name == weight.param)
    shape_of = get_file_shapes(program)
    # the parameters that are parts of the same tensor, by the number of the part
    params = {other.part: other.param for other in program.names if other.tensor == weight.tensor}
    shapes = [shape_of[params[part]] for part in sorted(params)]
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    place: dict[str, Any] = {
        "tensor": weight.tensor,
        "shape": whole[::-1] if weight.is_transposed else whole,
    }
    if experts := program.outer(param)[param.stacked :]:
        place["each"] = (*experts, program.size(*experts))
    if weight.part:
        place["start"] = sum(shape[0] for shape in shapes[: weight.part])
    if weight.is_transposed:
        place["transposed"] = True
    if isinstance(param, Buffer):
        place["wide"] = True
    if weight.interleaved:  # by heads, whose rows are the last dim that no product sums over
        last, head_dim = weight.skipped + weight.interleaved, param.type.dims[-param.inner - 1]
        place["interleaved"] = weight.skipped, last, program.valid(head_dim)
    of_positions = param.type.dims[param.stacked :][:1] == (SEQUENCE,) and not param.inner
    # a file may have more positions than the plan's sequences
    if of_positions and not weight.is_transposed and weight.parts == 1:
        place["positions"] = True
    return place
