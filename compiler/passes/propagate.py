"""Decides, for every op and mesh axis, which dim the op works on: the attribute `work`.

Purpose: the rules of `shard`, in their order, become `work = ["dp:batch", "tp:heads"]`; `tp:*` means replicated work,
and an axis that is not named means invariant work.  Before: `factor_axes`.  Non-goals: types and coercions.
"""

from collections.abc import Iterable

from attrs import evolve

from ..diagnostics import Diagnostics, Note
from ..ir import Claim, Op, Program, Region, Type, bound, walk
from ..ops import OPS, OpDef
from ..ops.attention import head_dims

DATA_DIMS = ("batch", "seq")


def propagate(program: Program) -> Program:
    """The program with `work` on every op but leaves.  Raises PlanError for rules that an op cannot follow."""
    types = _types(program)
    worker = _Worker(program, types, _made_of_parameters(program))
    region = worker.region(program.region)
    worker.found.check()
    return evolve(program, region=region)


def natural(program: Program, dims: Iterable[str]) -> list[str]:
    """The work of an elementwise op on `dims`: how a value that is carried through a repeat is placed."""
    present = set(dims)
    work: list[str] = []
    for axis in program.axes:
        if first := first_claims(program, axis.name, present):
            work += [f"{axis.name}:{claim.dim if claim.split else '*'}" for claim in first]
    return work


def first_claims(program: Program, axis: str, dims: set[str]) -> list[Claim]:
    """The claims on `axis` of the first rule that names one of `dims`."""
    claims = [claim for claim in program.claims if claim.axis == axis and claim.dim in dims]
    return [claim for claim in claims if claim.rank == min(c.rank for c in claims)]


def _types(program: Program) -> dict[str, Type]:
    types = {p.name: p.type for p in program.params}
    pending = [program.region]
    while pending:
        region = pending.pop()
        types |= {arg.value.name: arg.value.type for arg in region.args} | {v.name: v.type for v in region.results}
        pending += [stmt for stmt in region.body if isinstance(stmt, Region)]
    return types | {value.name: value.type for op in walk(program.region.body) for value in op.outputs}


def _made_of_parameters(program: Program) -> set[str]:
    """Values of parameters alone: replicated where data is sharded, so that it is leaves that are reduced, once."""
    inputs = {arg.value.name for arg in program.region.args}
    made = {p.name for p in program.params} | (set(bound(program.region)) - inputs)
    for region in _regions(program.region):
        made -= {arg.value.name for arg in region.args if arg.source not in made} | {v.name for v in region.results}
        carried = {arg.value.name for arg in region.args if arg.enter.value == "carry"}
        made -= carried
    for op in walk(program.region.body):
        if not made.issuperset(op.inputs):
            made -= {value.name for value in op.outputs}
    return made


def _regions(region: Region) -> Iterable[Region]:
    for stmt in region.body:
        if isinstance(stmt, Region):
            yield stmt
            yield from _regions(stmt)


class _Worker:
    def __init__(self, program: Program, types: dict[str, Type], constant: set[str]) -> None:
        self._program, self._types, self._constant = program, types, constant
        self._data_axes = {claim.axis for claim in program.claims if claim.dim in DATA_DIMS}
        self.found = Diagnostics()

    def region(self, region: Region) -> Region:
        body = tuple(self.region(stmt) if isinstance(stmt, Region) else self._op(stmt) for stmt in region.body)
        return evolve(region, body=body)

    def _op(self, op: Op) -> Op:
        if op.kind == "leaf":
            return op
        work = [f"{axis.name}:{dim}" for axis in self._program.axes for dim in self._on(op, axis.name)]
        return evolve(op, attrs=(*op.attrs, ("work", tuple(work))))

    def _on(self, op: Op, axis: str) -> list[str]:
        operands = [self._types[name] for name in op.inputs]
        space = {dim for type in (*operands, *(v.type for v in op.outputs)) for dim in type.dims}
        first = first_claims(self._program, axis, space)
        if not first:
            return ["*"] if axis in self._data_axes and self._constant.issuperset(op.inputs) else []
        split = [claim.dim for claim in first if claim.split]
        self._check(op, OPS[op.kind], operands, first, split)
        return split or ["*"]

    def _check(self, op: Op, entry: OpDef, operands: list[Type], first: list[Claim], split: list[str]) -> None:
        linked = set(head_dims(*operands[:2])) if op.kind == "attention" else set[str]()
        if linked and set(split) == {head_dims(*operands[:2])[1]} != linked:
            self.found.error(
                "E0609",
                f"key/value heads are over `{first[0].axis}`, but the query heads that use them are not",
                op.span,
                notes=[Note(first[0].span, "claimed here")],
                help=f"write `{', '.join(head_dims(*operands[:2]))} over {first[0].axis}` in one rule",
            )
        if len(set(split) - linked) > 1:
            self.found.error(
                "E0505",
                f"`{split[0]}` and `{split[1]}` both claim axis `{first[0].axis}` in one `{_word(op)}`",
                op.span,
                label="works on one dim per axis",
                notes=[Note(first[0].span, "claimed here")],
                help="put one of them in a rule of its own: earlier rules go first",
            )
        for dim in sorted(set(split) & entry.whole(operands, op) if not entry.expand else ()):
            self.found.error(
                "E0601",
                f"`{_word(op)}` needs `{dim}` whole on each rank, but `{dim}` is over `{first[0].axis}`",
                op.span,
                label=f"needs all of `{dim}`",
                notes=[Note(first[0].span, "claimed here, and no earlier rule names a dim of this op")],
                help=_advice(op, dim, first[0].axis),
            )


def _word(op: Op) -> str:
    return "@" if op.kind == "contract" else op.kind


def _advice(op: Op, dim: str, axis: str) -> str:
    if op.kind in ("attention", "rope") and dim == "seq":
        return f"put the heads over `{axis}` in an earlier rule; attention over a sharded sequence is not supported yet"
    return f"shard another dim over `{axis}`"
