"""Whether `names hf` fits the model: each parameter has a place in the files, and each place
one parameter.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from ..analysis.vocabulary import tables
from ..config.hf_names import INDICES, HFWeight, parse_names
from ..ir import SEQUENCE, Param, Program, base
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, did_you_mean, listing
from .arithmetic import Scalar
from .split_branches import Copies, names_of_parts


def get_stored_weights(
    section: tree.Section, program: Program, copies: Copies, scope: Mapping[str, Scalar]
) -> tuple[HFWeight, ...]:
    """The entries of `section`, in the order of the program's parameters.  Raises PlanError."""
    diagnostics = Diagnostics()
    entries = parse_names(section, diagnostics, scope)
    diagnostics.check()
    for weight in entries:
        if weight.param not in copies:
            help = did_you_mean(weight.param, copies)
            message = f"there is no parameter `{weight.param}`"
            diagnostics.error("E0201", message, weight.span, help=help)
    weights = {weight.param: weight for weight in names_of_parts(entries, copies)}
    params_by_name = {param.name: param for param in program.params_and_buffers}
    for weight in weights.values():
        _check_indices(weight, params_by_name[weight.param], program, diagnostics)
        if weight.interleaved:
            _check_interleaved(weight, params_by_name[weight.param], program, diagnostics)
    named = {weight.param for weight in entries}
    if lacking := [name for name in copies if name not in named]:
        help = f'add `{lacking[0]} = "…"`, the tensor that holds it'
        message = f"`names hf` lacks {listing(lacking)}"
        diagnostics.error("E0402", message, section.head, help=help)
    _check_shared_tensors(weights.values(), params_by_name, diagnostics)
    diagnostics.check()
    return tuple(weights[name] for name in params_by_name)


def _check_indices(
    weight: HFWeight, param: Param, program: Program, diagnostics: Diagnostics
) -> None:
    """The name has the indices of the parameter's repeats and of its experts; what is
    transposed is a matrix.
    """
    outer = program.outer(param)
    experts = outer[param.stacked :]
    wanted = (*INDICES[: param.stacked], *experts)
    if weight.indices != wanted:
        if wanted:
            message = f"the tensor of `{param.name}` is to be named by {listing(wanted)} in braces"
        else:
            message = f"`{param.name}` is not repeated"
        place = f"inside {param.stacked} repeats" if param.stacked else "outside of repeats"
        for dim in experts:
            place += f", in a route to `{dim}`"
        note = Note(param.span, f"declared {place}")
        diagnostics.error("E0405", message, weight.span, notes=[note])
    if weight.is_transposed and len(param.type.dims) - len(outer) < 2:
        diagnostics.error(
            "E0405",
            f"`{param.name}` is not a matrix",
            weight.span,
            "transposed",
            notes=[Note(param.span, "declared")],
        )


def _check_interleaved(
    weight: HFWeight, param: Param, program: Program, diagnostics: Diagnostics
) -> None:
    """The parameter's rows are rows of heads, or of one head if some are skipped, and each head has
    the rows that are interleaved.
    """
    rows = param.type.dims[len(program.outer(param)) : len(param.type.dims) - param.inner]
    least = 1 if weight.skipped else 2
    is_table = param.name in map(base, tables(program))
    if len(rows) < least or SEQUENCE in rows or is_table:
        help = (
            "heads are the rows of `wq[hidden -> heads, head_dim]`, or the elements of"
            " `bq[heads, head_dim]`"
        )
        notes = [Note(param.span, "declared")]
        message = f"`{param.name}` has no heads"
        diagnostics.error("E0405", message, weight.span, "interleaved", notes=notes, help=help)
        return
    last, most = weight.skipped + weight.interleaved, program.valid(rows[-1])
    if last > most:
        message = f"a head of `{param.name}` has {most} rows"
        notes = [Note(param.span, "declared")]
        diagnostics.error("E0405", message, weight.span, f"not {last}", notes=notes)


def _check_shared_tensors(
    weights: Iterable[HFWeight], params: dict[str, Param], diagnostics: Diagnostics
) -> None:
    """A tensor of one parameter belongs to it alone; a tensor of several has each of their parts
    once, of the same inner dims.
    """
    weights_by_tensor = defaultdict[str, list[HFWeight]](list)
    for weight in weights:
        if weight.param in params:
            weights_by_tensor[weight.tensor].append(weight)
    for tensor, (first, *others) in weights_by_tensor.items():
        layout = _layout(first, params)
        weight_by_part = {first.part: first}
        for weight in others:
            if _layout(weight, params) != layout or weight.part in weight_by_part:
                note = Note(weight_by_part.get(weight.part, first).span, "taken here")
                message = f"`{tensor}` does not hold both"
                diagnostics.error("E0403", message, weight.span, notes=[note])
            weight_by_part[weight.part] = weight
        if lacking := [part for part in range(first.parts) if part not in weight_by_part]:
            message = f"no parameter is part {lacking[0]} of `{tensor}`"
            diagnostics.error("E0405", message, first.span, f"one of {first.parts} parts")


def _layout(weight: HFWeight, params: dict[str, Param]) -> tuple[int, bool, tuple[str, ...]]:
    """How parameters that share a tensor are alike: its parts, and how it lies in memory."""
    return weight.parts, weight.is_transposed, _inner(params[weight.param])


def _inner(param: Param) -> tuple[str, ...]:
    return param.type.dims[len(param.type.dims) - param.inner :]
