"""Decides, for every op and mesh axis, which dim the op works on: the attribute `work`.

Purpose: the rules of `shard`, in their order, become `work = ["dp:batch", "tp:heads"]`; `tp:*`
means replicated work, and an axis that is not named means invariant work.  Before: `factor_axes`.
Non-goals: types and coercions.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from attrs import evolve

from ..analysis.context_parallel import GATHER, ULYSSES, attention_heads, heads_left
from ..config.settings import ON
from ..ir import DATA_DIMS, Claim, Enter, Op, Program, Region, Type, map_ops
from ..ops import OPS, OpDef, Roles, roles
from ..ops.ring_attention import RING, around_ring
from ..ops.user import module_and_function
from ..syntax.diagnostics import Diagnostics, Note


def propagate(program: Program, known: Diagnostics | None = None) -> Program:
    """The program with `work` on every op but leaves.  Raises PlanError for rules that an op cannot
    follow.

    Mistakes that are `known` are not reported again; new ones are added to them, and the program
    may then lack parts.
    """
    diagnostics = Diagnostics() if known is None else known
    program = evolve(program, claims=(*program.claims, *_exchanges(program)))
    inputs = {arg.value.name for arg in program.region.args}
    worker = _Worker(program, _add_values_of_data(program.region, inputs), diagnostics)
    region = map_ops(program.region, worker.op)
    if not diagnostics.in_part & {"model", "statements"}:
        worker.check_followed()
    if known is None:
        diagnostics.check()
    return evolve(program, region=region)


def natural(program: Program, dims: Iterable[str]) -> list[str]:
    """The work of an elementwise op on `dims`: how a value that is carried through a repeat is
    placed.
    """
    present = set(dims)
    work: list[str] = []
    for axis in program.axes:
        for claim in first_claims(program, axis.name, present):
            dim = claim.dim if claim.split else "*"
            work.append(f"{axis.name}:{dim}")
    return work


def first_claims(program: Program, axis: str, dims: Collection[str]) -> list[Claim]:
    """The claims on `axis` of the first rule that names one of `dims`."""
    claims = list[Claim]()
    for claim in program.claims:
        if claim.axis == axis and claim.dim in dims and not claim.within:
            claims.append(claim)
    first_rank = min((claim.rank for claim in claims), default=0)
    return [claim for claim in claims if claim.rank == first_rank]


def _exchanges(program: Program) -> Iterator[Claim]:
    """The claims of attention's heads over axes whose ranks exchange the sequence for them; of
    few, over the first.
    """
    seen = set[tuple[str, str, str]]()
    for op in program.ops:
        dims = attention_heads(program, op)
        if not dims:
            continue
        # heads lie there without an exchange
        everywhere = {claim.axis for claim in program.claims if claim.dim in dims}
        for claim in program.claims:
            if claim.via != ULYSSES or claim.axis in everywhere:
                continue
            parent = program.axis(claim.axis).parent
            factors = [axis.name for axis in program.axes if axis.parent == parent]
            filled = program.degree(tuple(factors[: factors.index(claim.axis) + 1]))
            for dim in dims:
                if (op.kind, dim, claim.axis) not in seen:
                    seen.add((op.kind, dim, claim.axis))
                    split = filled <= heads_left(program, dim)
                    yield evolve(claim, dim=dim, split=split, via="", within=op.kind)


def _add_values_of_data(region: Region, data: set[str]) -> set[str]:
    """Adds to `data` every value that depends on a value in it; values carried through a repeat
    count as data.

    All other values are made of parameters alone: they are replicated where data is sharded, so
    that leaves are reduced, once.
    """
    for stmt in region.body:
        if isinstance(stmt, Region):
            carried_or_data = list[str]()
            for arg in stmt.args:
                if arg.enter is Enter.CARRY or arg.source in data:
                    carried_or_data.append(arg.value.name)
            data.update(carried_or_data)
            data |= {value.name for value in stmt.results}
            _add_values_of_data(stmt, data)
        elif not data.isdisjoint(stmt.inputs):
            data |= {value.name for value in stmt.outputs}
    return data


class _Worker:
    def __init__(self, program: Program, data: set[str], diagnostics: Diagnostics) -> None:
        self._program, self._data, self._diagnostics = program, data, diagnostics
        self._data_axes = {claim.axis for claim in program.claims if claim.dim in DATA_DIMS}
        self._followed: set[tuple[str, str]] = set()
        self._reported: set[tuple[str, str]] = set()

    def check_followed(self) -> None:
        """Each rule is followed by an op."""
        for claim in self._program.claims:
            if not claim.within and (claim.dim, claim.axis) not in self._followed:
                axis = self._program.axis(claim.axis).parent
                message = f"nothing works on `{claim.dim}` over `{axis}`"
                help = (
                    "leave the rule out, or write it before those that come first wherever it"
                    " could apply"
                )
                self._diagnostics.error(
                    "E0508", message, claim.span, "no op follows this rule", help=help
                )

    def op(self, op: Op) -> Op:
        """The op with its work."""
        if op.kind == "leaf":
            return op
        work = list[str]()
        for axis in self._program.axes:
            for dim in self._on(op, axis.name):
                work.append(f"{axis.name}:{dim}")
        op = self._around_ring(op, work)
        self._check_routed(op, work)
        return evolve(op, attrs=(*op.attrs, ("work", tuple(work))))

    def _around_ring(self, op: Op, work: Sequence[str]) -> Op:
        """An op with keys as the one whose keys go around a ring, where a rule says so."""
        keys = roles(op, self._program.types).key_seq
        ring: Claim | None = None
        others = list[Claim]()
        for claim in self._program.claims:
            if keys != claim.dim or f"{claim.axis}:{keys}" not in work:
                continue
            if ring is None and claim.via == RING:
                ring = claim
            else:
                others.append(claim)
        if not ring:
            return op
        self._check_ring(op, ring, others)
        return around_ring(op, ring.axis)

    def _check_ring(self, op: Op, ring: Claim, others: Sequence[Claim]) -> None:
        """Keys go around one axis, and are gathered over no other; a ring keeps no weights that
        could be dropped.
        """
        if self._new("E0518", ring):
            for other in others:
                self._error_of_second_axis(ring, other)
        notes = [Note(ring.span, "the ring")]
        train = self._program.train
        if train.compile == ON and self._new("E0412", ring):
            message = "a compiled layer sends no keys around a ring"
            why = [Note(train.spans["compile"], "layers are compiled")]
            help = f"write `via {GATHER}` or `via {ULYSSES}`, or leave `compile` out"
            self._diagnostics.error("E0412", message, ring.span, notes=why, help=help)
        if "dropout" in dict(op.attrs) and self._new("E0611", ring):
            message = "no ring keeps the weights that `dropout` drops"
            help = "write `via gather`, or leave `dropout` out of attention"
            self._diagnostics.error("E0611", message, op.span, notes=notes, help=help)

    def _error_of_second_axis(self, ring: Claim, other: Claim) -> None:
        """Adds the error for keys that go around a ring and over another axis as well."""
        one = self._program.axis(ring.axis).parent
        two = self._program.axis(other.axis).parent
        if other.via == RING:
            message = (
                f"a ring goes over one axis, and `{ring.dim}` is `via ring` over `{one}` and"
                f" over `{two}`"
            )
        else:
            message = f"keys that are gathered over `{two}` cannot go around a ring over `{one}`"
        notes = [Note(ring.span, "the ring")]
        help = f"write `{ring.dim} over {two} via {ULYSSES}`: heads are exchanged there"
        self._diagnostics.error("E0518", message, other.span, notes=notes, help=help)

    def _check_routed(self, op: Op, work: Sequence[str]) -> None:
        """Experts lie over axes that all have parts of the tokens, or that all have the same
        tokens.
        """
        experts = roles(op, self._program.types).routed
        whole, parts = list[Claim](), list[Claim]()
        for claim in self._program.claims:
            if experts and claim.dim == experts:
                (whole if f"{claim.axis}:{experts}" in work else parts).append(claim)
        if whole and parts and self._new("E0614", whole[0]):
            one = self._program.axis(whole[0].axis).parent
            other = self._program.axis(parts[0].axis).parent
            message = (
                f"`{experts}` lies over `{other}`, whose ranks have parts of the tokens, and"
                f" over `{one}`, without"
            )
            help = f"write `seq over {one}` as the last rule, or leave `{one}` out"
            notes = [Note(op.span, "tokens are routed here")]
            self._diagnostics.error(
                "E0614",
                message,
                whole[0].span,
                f"all of `{one}` have the same",
                notes=notes,
                help=help,
            )

    def _on(self, op: Op, axis: str) -> list[str]:
        operands = self._program.operands(op)
        dims = set[str]()
        for type in operands:
            dims.update(type.dims)
        for value in op.outputs:
            dims.update(value.type.dims)
        op_roles = roles(op, self._program.types)
        linked = (op_roles.heads, op_roles.kv_heads) if op_roles.heads else ()
        first, exchanged = self._claims_on(op, axis, dims, op_roles, linked)
        if not first:
            return ["*"] if axis in self._data_axes and self._data.isdisjoint(op.inputs) else []
        for claim in first:
            dim = op_roles.key_seq if claim.within else claim.dim
            self._followed.add((dim, claim.axis))
        split = [claim.dim for claim in first if claim.split]
        if linked and not exchanged:
            self._check_heads(op, linked, first, split)
        unlinked = [dim for dim in split if dim not in linked[1:]]
        self._check(op, OPS[op.kind], operands, first, unlinked)
        return split or ["*"]

    def _claims_on(
        self, op: Op, axis: str, dims: set[str], op_roles: Roles, linked: tuple[str, ...]
    ) -> tuple[list[Claim], bool]:
        """The claims on an axis that an op follows, and whether they exchange heads for it."""
        first = first_claims(self._program, axis, dims - {op_roles.routed})
        if not first:
            first = first_claims(self._program, axis, dims)
        outer, inner = list[Claim](), list[Claim]()
        for claim in self._program.claims:
            if claim.axis != axis or claim.dim not in linked:
                continue
            if not claim.within:
                outer.append(claim)
            elif claim.within == op.kind:
                inner.append(claim)
        # query and key/value heads go together, whatever their ranks
        if any(claim.dim in linked for claim in first):
            first = outer
        elif inner:
            first = inner
        return first, bool(inner)

    def _check_heads(
        self, op: Op, linked: tuple[str, ...], first: list[Claim], split: list[str]
    ) -> None:
        """Each rank holds the key/value heads that its query heads use: both have as many shards,
        or one head serves all.
        """
        heads, kv_heads = linked
        axes = tuple(c.axis for c in self._program.claims if c.dim == kv_heads and c.split)
        order = [axis.name for axis in self._program.axes if axis.name in (*axes, first[0].axis)]
        one_left = (
            self._program.size(kv_heads) == self._program.degree(axes)
            and order[-1] == first[0].axis
        )
        alone = {heads, kv_heads} & set(split)
        if len(alone) == len(set(linked)) or not alone or (alone == {heads} and one_left):
            return
        (dim,) = alone
        other = kv_heads if dim == heads else heads
        self._diagnostics.error(
            "E0609",
            f"`{dim}` are over `{first[0].axis}`, but `{other}` are not",
            op.span,
            label="query heads stay with the key/value heads they use",
            notes=[Note(first[0].span, "claimed here")],
            help=f"write `{heads}, {kv_heads} over {first[0].axis}`",
        )

    def _new(self, code: str, claim: Claim) -> bool:
        """Whether a rule's mistake is seen for the first time: one error for all ops that
        cannot follow it.
        """
        seen = (code, f"{claim.dim} over {claim.axis}") in self._reported
        self._reported.add((code, f"{claim.dim} over {claim.axis}"))
        return not seen

    def _check(
        self, op: Op, entry: OpDef, operands: Sequence[Type], first: list[Claim], split: list[str]
    ) -> None:
        if len(set(split)) > 1 and self._new("E0505", first[0]):
            self._diagnostics.error(
                "E0505",
                f"`{split[0]}` and `{split[1]}` both claim axis `{first[0].axis}` in one"
                f" `{_word(op)}`",
                op.span,
                label="works on one dim per axis",
                notes=[Note(first[0].span, "claimed here")],
                help="put one of them in a rule of its own: earlier rules go first",
            )
        if entry.expand:
            return
        broken = set(split) & entry.unsharded_dims(operands, op)
        if not broken or not self._new("E0601", first[0]):
            return
        for dim in sorted(broken):
            self._diagnostics.error(
                "E0601",
                f"`{_word(op)}` needs `{dim}` whole on each rank, but `{dim}` is over"
                f" `{first[0].axis}`",
                op.span,
                label=f"needs all of `{dim}`",
                notes=[
                    Note(first[0].span, "claimed here, and no earlier rule names a dim of this op")
                ],
                help=_advice(op, roles(op, self._program.types), dim, first[0].axis),
            )


def _word(op: Op) -> str:
    match op.kind:
        case "contract":
            return "@"
        case "call":
            return module_and_function(op)[1]
        case kind:
            return kind


def _advice(op: Op, op_roles: Roles, dim: str, axis: str) -> str:
    if op.kind == "call":
        slices = (
            f"if the function works slice by slice along `{dim}`, name that dim after `over`"
            " in its `op`"
        )
        return f"{slices}, and with `at=DIM` in the signature it gets the positions of its slices"
    if dim in (op_roles.query_seq, op_roles.key_seq):
        return (
            f"put the heads over `{axis}` in an earlier rule; attention over a sharded"
            " sequence is not supported yet"
        )
    return f"shard another dim over `{axis}`"
