"""Gives every value its placements and inserts the coercions that its uses ask for.

Purpose: operands that have an op's work dim become sharded, the others replicated; one coercion
serves all uses of a value; a pending sum crosses sums and is reduced once, where it is first used.
Copies stay the same to the last bit (`choose_deterministic`).  Before: `propagate`,
`choose_layout`.  After: no `work` attributes; forward collectives are final.  Non-goals: backward
(`differentiate` derives it), how a parameter gets from its state of record to its `leaf`
(`place_state`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from attrs import evolve

from ..config.settings import PADDED
from ..ir import (
    DATA_DIMS,
    INVARIANT,
    REPLICATED,
    Arg,
    Enter,
    Kind,
    Op,
    Param,
    Placement,
    Places,
    Program,
    Region,
    Type,
    Value,
    sharded,
    slices,
    uses,
)
from ..ir.placements import OrderError, Step, path
from ..ops import OPS
from ..ops.builder import OpBuilder, infer_types
from ..ops.experts import COUNTS, EXCHANGE, EXCHANGE_BACK, EXCHANGE_PADDED, SORT, with_own_experts
from ..ops.protocol import is_pending
from ..ops.routers import begins_sum, is_sum_by_sequence, pending_over_tokens, with_padding
from ..syntax.diagnostics import Diagnostic, PlanError
from ..syntax.source import Span
from .choose_deterministic import choose_deterministic
from .propagate import natural


def insert_collectives(program: Program) -> Program:
    """The program with placements and coercions.  Raises PlanError where a dim's axes would have to
    be reordered, or copies would drift apart."""
    wants = _Wants(program)
    leaves = {param.name: wants.leaf(param) for param in program.params}
    params = list[Param]()
    for param in program.params:
        # the state of record is sharded where the leaf is, else invariant
        places = leaves[param.name].places
        stored = tuple((axis, place) for axis, place in places if place.kind is Kind.SHARDED)
        params.append(evolve(param, type=evolve(param.type, places=stored)))
    args = tuple(evolve(arg, value=wants.input(arg.value)) for arg in program.region.args)
    program = evolve(program, params=tuple(params))
    inserter = _Inserter(program, leaves, (arg.value for arg in args))
    placed = with_padding(
        evolve(program, region=inserter.region(evolve(program.region, args=args)))
    )
    return choose_deterministic(placed)


def _placements_for_work(
    program: Program, type: Type, work: Sequence[str], whole: Collection[str] = ()
) -> Places:
    """The placements that an op working on `work` wants of an operand of `type`, whose dims
    `whole` it needs whole.
    """
    places: dict[str, Placement] = {}
    for item in work:
        axis, _, dim = item.partition(":")
        if dim in type.dims and dim not in whole:
            places[axis] = sharded(dim)
        elif type.dtype != "i64":
            places.setdefault(axis, REPLICATED)
    return program.places(places)


def _placements_of_operands(program: Program, types: Sequence[Type], op: Op) -> list[Places | None]:
    """The placements that an op wants of its operands; None for operands that it takes as they
    are.
    """
    entry, work = OPS[op.kind], op.names("work")
    whole = entry.whole_operands(types, op)
    wants = list[Places | None]()
    for i, type in enumerate(types):
        if i in entry.as_placed:
            wants.append(None)
        else:
            wants.append(_placements_for_work(program, type, work, whole.get(i, ())))
    return wants


class _Wants:
    """The placements that all uses of an input or a parameter want of it."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._by_source: dict[str, list[Places]] = {}
        leaves = {op.outputs[0].name: op.inputs[0] for op in program.ops if op.kind == "leaf"}
        whole = slices(program.region)
        for op in program.ops:
            if op.kind == "leaf":
                continue
            wants = _placements_of_operands(program, program.operands(op), op)
            for name, places in zip(op.inputs, wants, strict=True):
                source = whole.get(name, name)
                if places is not None:
                    self._by_source.setdefault(leaves.get(source, source), []).append(places)

    def leaf(self, param: Param) -> Type:
        """Sharded if a use works on one of its dims, else replicated if any use is; data dims
        never shard storage.
        """
        places: dict[str, Placement] = {}
        for use in self._by_source.get(param.name, []):
            for axis, place in use:
                stored = REPLICATED if place.dim in DATA_DIMS else place
                if axis not in places or stored.kind is Kind.SHARDED:
                    places[axis] = stored
        return evolve(param.type, places=self._program.places(places))

    def input(self, value: Value) -> Value:
        """Sharded where all uses want it so: inputs load at any placement for free."""
        uses = [dict(places) for places in self._by_source.get(value.name, [])]
        agreed: dict[str, Placement] = {}
        for use in uses[:1]:
            for axis, place in use.items():
                if all(other.get(axis) == place for other in uses):
                    agreed[axis] = place
        return evolve(value, type=evolve(value.type, places=self._program.places(agreed)))


class _Inserter(OpBuilder):
    def __init__(self, program: Program, leaves: dict[str, Type], inputs: Iterable[Value]) -> None:
        super().__init__(program)
        self.types.update((value.name, value.type) for value in inputs)
        self._leaves = leaves
        self._uses = uses(program.region)
        self._reduced: dict[str, str] = {}  # a pending sum or maximum → its one reduction
        self._versions: dict[tuple[str, Places], str] = {}
        self._orders: dict[str, str] = {}  # rows of experts → their order
        self._exchanged_orders: dict[str, str] = {}  # an order → the order after an exchange

    def region(self, region: Region) -> Region:
        """The region with its body placed; coercions made inside are not visible outside."""
        outer, self.body = self.body, []
        outer_versions = dict(self._reduced), dict(self._versions)
        for stmt in region.body:
            if isinstance(stmt, Region):
                self._repeat(stmt)
            else:
                self._op(stmt)
        self.span = region.span
        ends = tuple(
            evolve(end, name=self._place_carry(end.name, region.dim)) for end in region.yields
        )
        body, self.body = tuple(self.body), outer
        self._reduced, self._versions = outer_versions
        return evolve(region, body=body, yields=ends)

    def _repeat(self, region: Region) -> None:
        self.span = region.span
        args = tuple(self._arg(arg, region) for arg in region.args)
        placed = self.region(evolve(region, args=args))
        results = list[Value]()
        for value, end in zip(region.results, placed.yields, strict=True):
            results.append(Value(value.name, self.types[end.name]))
        for value in results:
            self.types[value.name] = value.type
        self.body.append(evolve(placed, results=tuple(results)))

    def _arg(self, arg: Arg, region: Region) -> Arg:
        if arg.enter is Enter.CARRY:
            source = self._place_carry(arg.source, region.dim)
            type = self.types[source]
        else:
            source = arg.source
            type = self.types[source].inside(region.dim)
        self.types[arg.value.name] = type
        return Arg(Value(arg.value.name, type), source, arg.enter)

    def _place_carry(self, name: str, dim: str) -> str:
        """The value placed as every iteration takes and leaves it; a model's own result stays
        as it is.
        """
        if not dim:
            return name
        type = self.types[name]
        is_sum = type.dtype == "i64" or is_sum_by_sequence(self.program, type)
        if not type.dims or is_sum:  # over tokens: ranks add theirs in the end
            return name
        return self._fetch(
            name, _placements_for_work(self.program, type, natural(self.program, type.dims))
        )

    def _op(self, op: Op) -> None:
        self.span = op.span
        if op.kind == "leaf":
            type = evolve(self._leaves[op.inputs[0]], dtype=op.outputs[0].type.dtype)
            self.append(evolve(op, outputs=(Value(op.outputs[0].name, type),)))
        elif parts := self._expand(op):
            for part in parts:
                self._op(part)
        elif op.kind == "add":
            self._sum(op)
        elif begins_sum(op):
            self.append(pending_over_tokens(self.program, op))
        else:
            op = with_own_experts(self._fetch_operands(op, op.inputs), op.names("work"))
            attrs = tuple((key, value) for key, value in op.attrs if key != "work")
            self._place(evolve(op, attrs=attrs))

    def _expand(self, op: Op) -> Sequence[Op]:
        """The ops in place of one that would work on a dim that its own kind needs whole; none
        for all other ops.
        """
        entry = OPS[op.kind]
        if not entry.expand:
            return ()
        worked = {item.partition(":")[2] for item in op.names("work")}
        if worked.isdisjoint(entry.unsharded_dims([self.types[name] for name in op.inputs], op)):
            return ()
        return entry.expand(op, self.names.fresh, self.types.__getitem__)

    def _sum(self, op: Op) -> None:
        """Pending operands of one placement are added first and reduced once; a sum of nothing
        else stays pending.
        """
        groups: dict[Type, list[str]] = {}
        for name in op.inputs:
            if is_pending(self.types[name]) and self._uses[name] == 1:
                groups.setdefault(self.types[name], []).append(name)
        if [len(names) for names in groups.values()] == [len(op.inputs)]:
            self._place(evolve(op, attrs=()))
            return
        terms: list[str] = []
        for name in op.inputs:
            group = groups.get(self.types[name], []) if self._uses[name] == 1 else []
            if len(group) < 2:
                terms.append(name)
            elif name == group[0]:
                terms.append(self.write("add", group, name))  # pending itself
        self._place(evolve(self._fetch_operands(op, terms), attrs=()))

    def _fetch_operands(self, op: Op, operands: Sequence[str]) -> Op:
        """The op with these operands, each placed as the op wants it."""
        wants = _placements_of_operands(self.program, [self.types[name] for name in operands], op)
        inputs = list[str]()
        for name, want in zip(operands, wants, strict=True):
            inputs.append(name if want is None else self._fetch(name, want))
        return evolve(op, inputs=tuple(inputs))

    def _fetch(self, name: str, want: Places) -> str:
        """The name of `name` coerced to the placements `want`."""
        type = self.types[name]
        if type.dtype == "i64":
            want = tuple((axis, place) for axis, place in want if place.kind is not Kind.REPLICATED)
        if type.places == want:
            return name
        if (name, want) in self._versions:
            return self._versions[name, want]
        source = self._reduced.get(name, name)
        to = self._exchanges(source, dict(want))
        back: dict[str, str] = {}
        if self.program.experts_of(type) not in to.values():
            back = to  # from the experts: last of all
        else:
            source = self._exchange(source, to)
        places = dict(want)
        for axis in back:
            places[axis] = self.types[source].placement_on(axis)
        try:
            steps = path(self.program, self.types[source], self.program.places(places))
        except OrderError as error:
            raise PlanError([_order_diagnostic(error, self.span)]) from None
        if self.program.experts_of(type) and not _are_even(self.program, type, steps):
            raise PlanError([_uneven(self.program, steps, self.span)])
        for step in steps:
            coerced = self.coerce(source, step, name)
            if _is_open(type) and not _is_open(self.types[coerced]):
                self._reduced.setdefault(name, coerced)
            self._versions[name, self.types[coerced].places] = coerced
            if source in self._orders:
                self._orders[coerced] = self._orders[source]
            source = coerced
        return self._exchange(source, back)

    def _exchanges(self, name: str, want: Mapping[str, Placement]) -> dict[str, str]:
        """The axes over which rows of experts are exchanged for the placements `want`, and the
        dim that each shards.
        """
        if name not in self._orders:
            return {}
        dims_by_axis = dict[str, str]()
        for axis, place in self.types[name].places:
            target = want.get(axis, INVARIANT).dim
            if place.dim and target not in ("", place.dim):
                dims_by_axis[axis] = target
        return dims_by_axis

    def _exchange(self, name: str, axes: Mapping[str, str]) -> str:
        """Rows of experts exchanged over these axes; of none, the rows themselves.

        Unless they are padded, ranks tell each other once how many rows there are.
        """
        if not axes:
            return name
        order, to = self._orders[name], tuple(f"{axis}:{dim}" for axis, dim in axes.items())
        to_experts = self.program.experts_of(self.types[name]) in axes.values()
        like = name if to_experts else "_rows"
        if self.program.train.experts == PADDED:
            exchanged = self.write(EXCHANGE_PADDED.name, [name], like, to=to)
        else:
            if order not in self._exchanged_orders:
                self._exchanged_orders[order] = self._exchange_counts(order, to)
            if name == order:
                return self._exchanged_orders[order]
            kind = EXCHANGE if to_experts else EXCHANGE_BACK
            inputs = [name, self._exchanged_orders[order]]
            exchanged = self.write(kind.name, inputs, like, to=to)
        self._orders[exchanged] = order
        self._versions[name, self.types[exchanged].places] = exchanged
        return exchanged

    def _exchange_counts(self, order: str, to: tuple[str, ...]) -> str:
        """The order after an exchange, asked for as soon as there is one."""
        sorted_at = next(
            index
            for index, op in enumerate(self.body)
            if isinstance(op, Op) and op.outputs[0].name == order
        )
        later, self.body = self.body[sorted_at + 1 :], self.body[: sorted_at + 1]
        exchanged = self.write(COUNTS.name, [order], COUNTS.stem, to=to)
        self.body += later
        return exchanged

    def _place(self, op: Op) -> None:
        """Appends an op whose results are placed as its operands are."""
        self.append(infer_types(self.program, op, self.types))
        rows = [value.name for value in op.outputs if self.program.experts_of(value.type)]
        if op.kind == SORT.name:
            orders = rows
        else:
            orders = [self._orders[name] for name in op.inputs if name in self._orders]
        if orders:
            self._orders |= dict.fromkeys(rows, orders[0])


def _is_open(type: Type) -> bool:
    """Whether a sum or a maximum over ranks is still to be done."""
    return is_pending(type) or bool(type.axes_in(Kind.MAXIMUM))


def _are_even(program: Program, type: Type, steps: Sequence[Step]) -> bool:
    """Whether rows of experts are gathered and scattered in equal parts, and come apart as they
    were put together.

    Padded rows of one sequence's parts are: they lie along one dim of tokens, and each rank has
    one part of it.
    """
    moved, axes = set[str](), list[str]()
    for step in steps:
        moved |= {step.source.dim, step.target.dim} - {""}
        axes += step.axes
    if not moved:
        return True
    if program.is_ragged(type) or len(moved) != 1 or not moved < {*DATA_DIMS}:
        return False
    (dim,) = moved

    return not any((dim, axis) in program.zigzags for axis in axes)


def _uneven(program: Program, steps: Sequence[Step], span: Span) -> Diagnostic:
    """Rows that an axis would have to gather or scatter in parts of different sizes."""
    step = next(step for step in steps if step.source.dim or step.target.dim)
    axes = " × ".join(dict.fromkeys(program.axis(axis).parent for axis in step.axes))
    padded = "; or write `experts = padded` in `train`" * (program.train.experts != PADDED)
    return Diagnostic(
        "E0612",
        f"rows of experts cannot be gathered over `{axes}`",
        span,
        label=f"would be {step.source} → {step.target}",
        help=f"put the experts themselves over `{axes}`, in a rule before those of other"
        f" dims{padded}",
    )


def _order_diagnostic(error: OrderError, span: Span) -> Diagnostic:
    axes, moved = ", ".join(error.axes), ", ".join(error.moved)
    outer = [axis for axis in error.axes if axis not in error.moved]
    return Diagnostic(
        "E0506",
        f"`{error.dim}` is over `{axes}`, outer first, so it cannot be gathered or scattered"
        f" over `{moved}` alone",
        span,
        label="needs that here",
        help=f"make `{moved}` the innermost: in `mesh`, write it after `{', '.join(outer)}`",
    )
