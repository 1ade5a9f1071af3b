"""The file of names that `PLAN` must read, from the IR alone.

Non-goals: the other settings.
"""

from json import dumps
from math import prod

from ... import __version__
from ...analysis.vocabulary import tables
from ...config.hf_names import HFWeight
from ...ir import SEQUENCE, Param, Program, base
from ..naming import DTYPES
from .files import read_beside


def stored(program: Program, paths: dict[str, str], dtype: str) -> dict[str, str]:
    """The setting `names`, if the program has names; `paths` are the parameters' name patterns, `dtype` the model's."""
    if not program.names:
        return {}
    entries = (f"  {dumps(paths[each.param])}: {dumps(_place(each, program))}" for each in program.names)
    head = f'"written_by": "scalec {__version__}",\n "dtype": "{DTYPES[dtype].removeprefix("torch.")}"'
    weights = '"weights": {\n' + ",\n".join(entries) + "\n }"
    text = f'{{{head},\n "repeats": {dumps(_counts(program, paths))},\n {weights}}}\n'
    return {"names": read_beside("read_hf_names", "hf_names.json", text)}


def _counts(program: Program, paths: dict[str, str]) -> dict[str, int]:
    """The size of each repeat that has parameters, by the path of its modules."""
    around = {
        paths[param.name].rsplit(".*.", param.stacked - at)[0]: param.type.dims[at]
        for param in program.params
        for at in range(param.stacked)
    }
    return {path: program.size(dim) for path, dim in around.items()}


def _place(each: HFWeight, program: Program) -> dict[str, object]:
    """One entry."""
    params = {param.name: param for param in program.params}
    rows = {other.part: _rows(params[other.param], program) for other in program.names if other.tensor == each.tensor}
    own = params[each.param]
    columns = _columns(own, program)
    shape = (sum(rows.values()), *columns)
    start = sum(rows[part] for part in range(each.part))
    said: dict[str, object] = {"tensor": each.tensor, "shape": shape[::-1] if each.transposed else shape}
    if each.part:
        said["start"] = start
    if each.transposed:
        said["transposed"] = True
    if each.interleaved:
        outer = own.type.dims[: -own.inner or None]
        said["interleaved"] = each.interleaved, program.valid(outer[-1])
    if own.type.dims[own.stacked :][:1] == (SEQUENCE,) and not (own.inner or each.transposed or each.parts > 1):
        said["positions"] = True
    return said


def _rows(param: Param, program: Program) -> int:
    """How much of the tensor's first dim, or of its transpose's, is the parameter's."""
    whole = prod(program.valid(dim) for dim in param.type.dims[param.stacked :])
    return whole // prod(_columns(param, program))


def _columns(param: Param, program: Program) -> tuple[int, ...]:
    """The tensor's other dims: the joined dims that a product sums over, and all but the first of a table
    of tokens or positions."""
    if param.inner:
        return (prod(program.valid(dim) for dim in param.type.dims[-param.inner :]),)
    if param.name in map(base, tables(program)) or SEQUENCE in param.type.dims:
        return tuple(program.valid(dim) for dim in param.type.dims[param.stacked + 1 :])
    return ()
