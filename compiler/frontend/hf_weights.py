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
    found = Diagnostics()
    written = read_names(section, found, scope)
    found.check()
    for each in written:
        if each.param not in copies:
            help = did_you_mean(each.param, copies)
            found.error("E0201", f"there is no parameter `{each.param}`", each.span, help=help)
    names = {each.param: each for each in names_of_parts(written, copies)}
    known = {param.name: param for param in program.stored}
    for each in names.values():
        _fits(each, known[each.param], program, found)
        if each.interleaved:
            _pairs(each, known[each.param], program, found)
    if lacking := [name for name in copies if name not in {each.param for each in written}]:
        help = f'add `{lacking[0]} = "…"`, the tensor that holds it'
        found.error("E0402", f"`names hf` lacks {listing(lacking)}", section.head, help=help)
    _shared(names.values(), known, found)
    found.check()
    return tuple(names[name] for name in known)


def _fits(each: HFWeight, param: Param, program: Program, found: Diagnostics) -> None:
    """The name has the indices of the parameter's repeats and of its experts; what is
    transposed is a matrix.
    """
    outer = program.outer(param)
    if each.indices != (wanted := (*INDICES[: param.stacked], *outer[param.stacked :])):
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
        found.error("E0405", message, each.span, notes=[note])
    if each.transposed and len(param.type.dims) - len(outer) < 2:
        found.error(
            "E0405",
            f"`{param.name}` is not a matrix",
            each.span,
            "transposed",
            notes=[Note(param.span, "declared")],
        )


def _pairs(each: HFWeight, param: Param, program: Program, found: Diagnostics) -> None:
    """The parameter's rows are those of heads, or with some skipped of one, which have those
    that are interleaved.
    """
    rows = param.type.dims[len(program.outer(param)) : len(param.type.dims) - param.inner]
    if (
        len(rows) < (1 if each.skipped else 2)
        or SEQUENCE in rows
        or param.name in map(base, tables(program))
    ):
        help = (
            "heads are the rows of `wq[hidden -> heads, head_dim]`, or the elements of"
            " `bq[heads, head_dim]`"
        )
        notes = [Note(param.span, "declared")]
        found.error(
            "E0405",
            f"`{param.name}` has no heads",
            each.span,
            "interleaved",
            notes=notes,
            help=help,
        )
    elif (last := each.skipped + each.interleaved) > (most := program.valid(rows[-1])):
        message = f"a head of `{param.name}` has {most} rows"
        found.error(
            "E0405", message, each.span, f"not {last}", notes=[Note(param.span, "declared")]
        )


def _shared(names: Iterable[HFWeight], params: dict[str, Param], found: Diagnostics) -> None:
    """A tensor of one parameter is its alone; one of several has each of their parts once, of
    the same inner dims.
    """
    of = defaultdict[str, list[HFWeight]](list)
    for each in names:
        if each.param in params:
            of[each.tensor].append(each)
    for tensor, (first, *others) in of.items():
        taken = {first.part: first}
        for each in others:
            alike = (each.parts, each.transposed, _inner(params[each.param])) == (
                first.parts,
                first.transposed,
                _inner(params[first.param]),
            )
            if not alike or each.part in taken:
                note = Note(taken.get(each.part, first).span, "taken here")
                found.error("E0403", f"`{tensor}` does not hold both", each.span, notes=[note])
            taken[each.part] = each
        if lacking := [part for part in range(first.parts) if part not in taken]:
            message = f"no parameter is part {lacking[0]} of `{tensor}`"
            found.error("E0405", message, first.span, f"one of {first.parts} parts")


def _inner(param: Param) -> tuple[str, ...]:
    return param.type.dims[len(param.type.dims) - param.inner :]
