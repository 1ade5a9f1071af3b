"""Whether `names hf` fits the model: each parameter has a place in the files, and each place
one parameter.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from ..analysis.vocabulary import tables
from ..config.hf_names import INDICES, HFWeight, read_names
from ..ir import SEQUENCE, Param, Program, base
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, did_you_mean, listing
from .arithmetic import Scalar
from .split_branches import Copies, names_of_parts


def stored(
    section: tree.Section, program: Program, copies: Copies, scope: Mapping[str, Scalar]
) -> tuple[HFWeight, ...]:
    """The entries of `section`, in the order of the program's parameters.  Raises PlanError."""
    diagnostics = Diagnostics()
    written = read_names(section, diagnostics, scope)
    diagnostics.check()
    for weight in written:
        if weight.param not in copies:
            help = did_you_mean(weight.param, copies)
            diagnostics.error("E0201", f"there is no parameter `{weight.param}`", weight.span, help=help)
    names = {weight.param: weight for weight in names_of_parts(written, copies)}
    params_by_name = {param.name: param for param in program.stored}
    for weight in names.values():
        _fits(weight, params_by_name[weight.param], program, diagnostics)
        if weight.interleaved:
            _pairs(weight, params_by_name[weight.param], program, diagnostics)
    if lacking := [name for name in copies if name not in {weight.param for weight in written}]:
        help = f'add `{lacking[0]} = "…"`, the tensor that holds it'
        diagnostics.error("E0402", f"`names hf` lacks {listing(lacking)}", section.head, help=help)
    _shared(names.values(), params_by_name, diagnostics)
    diagnostics.check()
    return tuple(names[name] for name in params_by_name)


def _fits(weight: HFWeight, param: Param, program: Program, diagnostics: Diagnostics) -> None:
    """The name has the indices of the parameter's repeats and of its experts; what is
    transposed is a matrix.
    """
    outer = program.outer(param)
    if weight.indices != (wanted := (*INDICES[: param.stacked], *outer[param.stacked :])):
        message = (
            f"the tensor of `{param.name}` is to be named by {listing(wanted)} in braces"
            if wanted
            else f"`{param.name}` is not repeated"
        )
        inside = f"inside {param.stacked} repeats" if param.stacked else "outside of repeats"
        note = Note(
            param.span,
            f"declared {inside}"
            + "".join(f", in a route to `{it}`" for it in outer[param.stacked :]),
        )
        diagnostics.error("E0405", message, weight.span, notes=[note])
    if weight.transposed and len(param.type.dims) - len(outer) < 2:
        diagnostics.error(
            "E0405",
            f"`{param.name}` is not a matrix",
            weight.span,
            "transposed",
            notes=[Note(param.span, "declared")],
        )


def _pairs(weight: HFWeight, param: Param, program: Program, diagnostics: Diagnostics) -> None:
    """The parameter's rows are those of heads, or with some skipped of one, which have those
    that are interleaved.
    """
    rows = param.type.dims[len(program.outer(param)) : len(param.type.dims) - param.inner]
    if (
        len(rows) < (1 if weight.skipped else 2)
        or SEQUENCE in rows
        or param.name in map(base, tables(program))
    ):
        help = (
            "heads are the rows of `wq[hidden -> heads, head_dim]`, or the elements of"
            " `bq[heads, head_dim]`"
        )
        notes = [Note(param.span, "declared")]
        diagnostics.error(
            "E0405",
            f"`{param.name}` has no heads",
            weight.span,
            "interleaved",
            notes=notes,
            help=help,
        )
    elif (last := weight.skipped + weight.interleaved) > (most := program.valid(rows[-1])):
        message = f"a head of `{param.name}` has {most} rows"
        diagnostics.error(
            "E0405", message, weight.span, f"not {last}", notes=[Note(param.span, "declared")]
        )


def _shared(names: Iterable[HFWeight], params: dict[str, Param], diagnostics: Diagnostics) -> None:
    """A tensor of one parameter is its alone; one of several has each of their parts once, of
    the same inner dims.
    """
    weights_by_tensor = defaultdict[str, list[HFWeight]](list)
    for weight in names:
        if weight.param in params:
            weights_by_tensor[weight.tensor].append(weight)
    for tensor, (first, *others) in weights_by_tensor.items():
        weight_by_part = {first.part: first}
        for weight in others:
            alike = (weight.parts, weight.transposed, _inner(params[weight.param])) == (
                first.parts,
                first.transposed,
                _inner(params[first.param]),
            )
            if not alike or weight.part in weight_by_part:
                note = Note(weight_by_part.get(weight.part, first).span, "taken here")
                diagnostics.error("E0403", f"`{tensor}` does not hold both", weight.span, notes=[note])
            weight_by_part[weight.part] = weight
        if lacking := [part for part in range(first.parts) if part not in weight_by_part]:
            message = f"no parameter is part {lacking[0]} of `{tensor}`"
            diagnostics.error("E0405", message, first.span, f"one of {first.parts} parts")


def _inner(param: Param) -> tuple[str, ...]:
    return param.type.dims[len(param.type.dims) - param.inner :]
