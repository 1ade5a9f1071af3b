"""The file beside an emitted program that says where files of weights hold the parameters.

The names are those of `names hf`, or else the parameters' own: `layers.{i}.wq`.

Non-goals: the plan's section `names` (`config.hf_names`), reading and writing such files (the
runtime).
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from .. import __version__
from ..analysis.bucket_layout import stored_shape
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
    if program.names or any(param.stacked > len(INDICES) for param in program.stored):
        return program
    names = tuple(
        _make_own_weight(param, patterns[param.name], program) for param in program.stored
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
    before, *rest = pattern.split("*")
    return before + "".join(
        f"{{{index}}}{part}" for index, part in zip(INDICES, rest, strict=False)
    )


def names_file(plan: Program, patterns: dict[str, str]) -> dict[str, str]:
    """The file that a program reads them from, name → text."""
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
    weights = [
        f"  {json.dumps(patterns[e.param])}: {json.dumps(entry(e, program))}" for e in program.names
    ]
    return {
        "hf_names.json": "{"
        + ",\n ".join([*lines, '"weights": {\n' + ",\n".join(weights) + "\n }"])
        + "}\n"
    }


def plain_names(program: Program, patterns: dict[str, str]) -> dict[str, str]:
    """The tensor of each parameter, by its pattern, where each is a whole one of the same
    shape; else none.
    """
    params = {param.name: param for param in program.stored}
    found: dict[str, str] = {}
    for each in program.names:
        place, pattern = entry(each, program), patterns[each.param]
        own = stored_shape(program, params[each.param])
        indices = re.findall(r"\{[^}]*\}", each.tensor)
        if place != {"tensor": each.tensor, "shape": own} or indices != ["{i}"] * pattern.count(
            "*"
        ):
            return {}
        found[pattern] = each.tensor
    return found if len(found) == len(program.stored) else {}


def repeats(program: Program, patterns: dict[str, str]) -> dict[str, int]:
    """How often each repeat around a parameter is repeated, by what the parameters' names have
    before its `*`.
    """
    found: dict[str, int] = {}
    for param in program.stored:
        parts = patterns[param.name].split(".*")
        for depth, dim in enumerate(param.type.dims[: param.stacked], start=1):
            found[".*".join(parts[:depth])] = program.size(dim)
    return found


def entry(each: HFWeight, program: Program) -> dict[str, Any]:
    """The description of one parameter's place, as the runtime reads it."""
    own = next(param for param in program.stored if param.name == each.param)
    shape_of = get_file_shapes(program)
    part_of = {other.part: other.param for other in program.names if other.tensor == each.tensor}
    shapes = [shape_of[part_of[part]] for part in sorted(part_of)]
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    found: dict[str, Any] = {
        "tensor": each.tensor,
        "shape": whole[::-1] if each.transposed else whole,
    }
    if experts := program.outer(own)[own.stacked :]:
        found["each"] = (*experts, program.size(*experts))
    if each.part:
        found["start"] = sum(shape[0] for shape in shapes[: each.part])
    if each.transposed:
        found["transposed"] = True
    if isinstance(own, Buffer):
        found["wide"] = True
    if each.interleaved:  # by heads, whose rows are the last dim that no product sums over
        last = each.skipped + each.interleaved
        found["interleaved"] = each.skipped, last, program.valid(own.type.dims[-own.inner - 1])
    of_positions = own.type.dims[own.stacked :][:1] == (SEQUENCE,) and not own.inner
    # a file may have more than the plan's sequences
    if of_positions and not each.transposed and each.parts == 1:
        found["positions"] = True
    return found
