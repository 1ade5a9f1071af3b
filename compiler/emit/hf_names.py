"""The file beside an emitted program that says where Hugging Face files hold the parameters.

Non-goals: the plan's section `names` (`config.hf_names`), reading and writing such files (the runtime).
"""

import json
import re
from math import prod

from .. import __version__
from ..analysis.bucket_layout import stored_shape
from ..analysis.param_uses import leaves
from ..analysis.vocabulary import tables
from ..config.hf_names import HFWeight
from ..ir import PRECISIONS, SEQUENCE, Buffer, Param, Program
from .naming import DTYPES


def names_file(program: Program, patterns: dict[str, str]) -> dict[str, str]:
    """The file that a program reads them from, name → text, if the plan has any.

    `patterns` are the parameters' names in the program's state.
    """
    if not program.names:
        return {}
    dtype = DTYPES[PRECISIONS[program.train.precision]].removeprefix("torch.")
    head = {"written_by": f"scalec {__version__}", "dtype": dtype, "repeats": repeats(program, patterns)}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    weights = [f"  {json.dumps(patterns[e.param])}: {json.dumps(entry(e, program))}" for e in program.names]
    return {"hf_names.json": "{" + ",\n ".join([*lines, '"weights": {\n' + ",\n".join(weights) + "\n }"]) + "}\n"}


def plain_names(program: Program, patterns: dict[str, str]) -> dict[str, str]:
    """The tensor of each parameter, by its pattern, where each is a whole one of the same shape; else none."""
    params = {param.name: param for param in program.stored}
    found: dict[str, str] = {}
    for each in program.names:
        place, pattern = entry(each, program), patterns[each.param]
        own = stored_shape(program, params[each.param])
        indices = re.findall(r"\{[^}]*\}", each.tensor)
        if place != {"tensor": each.tensor, "shape": own} or indices != ["{i}"] * pattern.count("*"):
            return {}
        found[pattern] = each.tensor
    return found if len(found) == len(program.stored) else {}


def repeats(program: Program, patterns: dict[str, str]) -> dict[str, int]:
    """How often each repeat around a parameter is repeated, by what the parameters' names have before its `*`."""
    found: dict[str, int] = {}
    for param in program.stored:
        parts = patterns[param.name].split(".*")
        for depth, dim in enumerate(param.type.dims[: param.stacked], start=1):
            found[".*".join(parts[:depth])] = program.size(dim)
    return found


def entry(each: HFWeight, program: Program) -> dict[str, object]:
    """The description of one parameter's place, as the runtime reads it."""
    params = {param.name: param for param in program.stored}
    part_of = {other.part: params[other.param] for other in program.names if other.tensor == each.tensor}
    shapes = [_shape_of(part_of[part], program) for part in sorted(part_of)]
    whole, own = (sum(shape[0] for shape in shapes), *shapes[0][1:]), params[each.param]
    found: dict[str, object] = {"tensor": each.tensor, "shape": whole[::-1] if each.transposed else whole}
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
    if of_positions and not each.transposed and each.parts == 1:  # a file may have more than the plan's sequences
        found["positions"] = True
    return found


def _shape_of(param: Param, program: Program) -> tuple[int, ...]:
    """A parameter's shape in files, without padding: matrices [out, in], tables as they are, all else flat."""
    sizes = [program.valid(dim) for dim in param.type.dims[len(program.outer(param)) :]]
    if param.inner:
        return prod(sizes[: -param.inner]), prod(sizes[-param.inner :])
    return tuple(sizes) if param.name in _tables(program) else (prod(sizes),)


def _tables(program: Program) -> set[str]:
    """The parameters that have a row for each token or each position."""
    own = leaves(program)
    of_positions = {param.name for param in program.params if SEQUENCE in param.type.dims}
    return of_positions | {own.get(name, "") for name in tables(program)}
