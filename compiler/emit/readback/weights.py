"""What `PLAN` must say of files of weights, from the IR alone.

Non-goals: the other settings.
"""

from math import prod

from ...config.hf_names import HFWeight
from ...ir import Param, Program, base, walk
from .ast_matching import DTYPES


def stored(program: Program, paths: dict[str, str], dtype: str) -> dict[str, str]:
    """The setting `names`, if the program has names; `paths` are the parameters' name patterns, `dtype` the model's."""
    if not program.names:
        return {}
    entries = (f"{paths[each.param]!r}: HFWeight({_place(each, program)})" for each in program.names)
    repeats = _counts(program, paths)
    return {"names": f"HFNames({DTYPES[dtype]}, {{{', '.join(entries)}}}, {repeats=})"}


def _counts(program: Program, paths: dict[str, str]) -> dict[str, int]:
    """The size of each repeat that has parameters, by the path of its modules."""
    around = {
        paths[param.name].rsplit(".*.", param.stacked - at)[0]: param.type.dims[at]
        for param in program.params
        for at in range(param.stacked)
    }
    return {path: program.size(dim) for path, dim in around.items()}


def _place(each: HFWeight, program: Program) -> str:
    """The arguments of one entry."""
    params = {param.name: param for param in program.params}
    rows = {other.part: _rows(params[other.param], program) for other in program.names if other.tensor == each.tensor}
    own = params[each.param]
    columns = _columns(own, program)
    shape = (sum(rows.values()), *columns)
    start = sum(rows[part] for part in range(each.part))
    words = [repr(each.tensor), repr(shape[::-1] if each.transposed else shape)]
    if each.part:
        words.append(f"start={start}")
    if each.transposed:
        words.append("transposed=True")
    if each.interleaved:
        outer = own.type.dims[: -own.inner or None]
        words.append(f"interleaved=({each.interleaved}, {program.valid(outer[-1])})")
    if own.type.dims[own.stacked :][:1] == ("seq",) and not (own.inner or each.transposed or each.parts > 1):
        words.append("positions=True")
    return ", ".join(words)


def _rows(param: Param, program: Program) -> int:
    """How much of the tensor's first dim, or of its transpose's, is the parameter's."""
    whole = prod(program.valid(dim) for dim in param.type.dims[param.stacked :])
    return whole // prod(_columns(param, program))


def _columns(param: Param, program: Program) -> tuple[int, ...]:
    """The tensor's other dims: the joined dims that a product sums over, and all but the first of a table
    of tokens or positions."""
    looked_up = {base(op.inputs[1]) for op in walk(program.region.body) if op.kind == "embedding"}
    if param.inner:
        return (prod(program.valid(dim) for dim in param.type.dims[-param.inner :]),)
    if param.name in looked_up or "seq" in param.type.dims:
        return tuple(program.valid(dim) for dim in param.type.dims[param.stacked + 1 :])
    return ()
