"""How many rows of tokens a rank's experts get: an equal share, `room` times as many, or all that
there can be.

Purpose: the program with such a load; every account counts its rows.  A load is a number of equal
shares.  Non-goals: what is counted (`memory`, `communication`).
"""

from collections.abc import Mapping
from fractions import Fraction
from math import inf, prod

from attrs import evolve, frozen

from ..ir import BATCH, DATA_DIMS, Op, Program, once
from ..ops.experts import COUNTS, SORT
from ..ops.routers import CAPACITY, capacity

ROOM = 1.25
"""Equal shares of rows that the account of a plan without `room` has memory for."""


@frozen
class Load:
    """A load by name, and the program of a rank whose experts get it.

    rows  of a microbatch on that rank, by dim of experts
    """

    name: str
    rows: Mapping[str, int]
    program: Program

    @property
    def row_words(self) -> str:
        """The rows, for instance `8,192`; with several dims of experts `8,192 of experts, 512
        of others`.
        """
        if len(self.rows) == 1:
            (rows,) = self.rows.values()
            return f"{rows:,}"
        return ", ".join(f"{rows:,} of {experts}" for experts, rows in self.rows.items())


def with_load(program: Program, load: float) -> Program:
    """The program with a load: a rank's experts get `load` equal shares of rows, or as many as
    there can be.
    """
    program_loads = list[tuple[str, Fraction]]()
    for experts, most in most_loads(program):
        program_loads.append((experts, Fraction(min(most, load))))
    if not program_loads:
        return program
    return evolve(program, loads=tuple(program_loads))


@once
def with_room(program: Program) -> Program:
    """The program with the load that the plan has memory for."""
    return with_load(program, program.train.room or ROOM)


def rows_of_an_expert(program: Program, sort: Op) -> float:
    """The rows of a microbatch that an expert gets on average, of all ranks that exchange
    tokens of this order.
    """
    order, experts = sort.outputs[0].type, str(sort.get("to"))
    exchanged = 1
    for claim in program.claims:
        if claim.dim == experts and claim.split and order.placement_on(claim.axis).dim in DATA_DIMS:
            exchanged *= program.degree((claim.axis,))
    choices = prod(program.local_size(order, dim) for dim in order.dims if dim != experts)
    return choices * exchanged / program.size(experts)


@once
def loads(program: Program) -> tuple[Load, ...]:
    """An equal load, the load that the plan has memory for, and the largest; none where all ranks
    get the same.
    """
    if all(most == 1 for _, most in most_loads(program)):
        return ()
    room = f"room = {program.train.room or ROOM:g}"
    programs = {
        "balanced": with_load(program, 1),
        room: with_room(program),
        "worst": with_load(program, inf),
    }
    return tuple(_make_load(name, load_program) for name, load_program in programs.items())


def _make_load(name: str, program: Program) -> Load:
    rows: dict[str, int] = {}
    for op in _orders(program):
        order = op.outputs[0].type
        rows[order.dims[0]] = program.local_shape(order)[0]
    return Load(name, rows, program)


@once
def most_loads(program: Program) -> tuple[tuple[str, Fraction], ...]:
    """The largest load of each dim of experts that lies over ranks: every token chooses as many of
    a rank's as it can.

    A token chooses an expert once, and a capacity bounds an expert's tokens of a sequence.
    """
    op_by_result = {value.name: op for op in program.ops for value in op.outputs}
    most_by_experts: dict[str, Fraction] = {}
    for op in _orders(program):
        experts = op.outputs[0].type.dims[0]
        most = _most(program, op, _ids(op, op_by_result))
        most_by_experts[experts] = max(most, most_by_experts.get(experts, Fraction(0)))
    return tuple(most_by_experts.items())


def _orders(program: Program) -> list[Op]:
    """The ops that make the orders of rows, not padded, which lie by a rank's own experts."""
    ops = list[Op]()
    for op in program.ops:
        if op.kind in (SORT.name, COUNTS.name):
            type = op.outputs[0].type
            if program.is_ragged(type) and type.axes_of(type.dims[0]):
                ops.append(op)
    return ops


def _ids(op: Op, op_by_result: Mapping[str, Op]) -> Op:
    """The op that made the choices of an order."""
    before = op_by_result[op.inputs[0]]
    if op.kind == COUNTS.name:
        return op_by_result[before.inputs[0]]
    return before


def _most(program: Program, op: Op, ids: Op) -> Fraction:
    order = op.outputs[0].type
    experts, *_, chosen = order.dims
    rank_experts, choices = program.local_size(order, experts), program.size(chosen)
    tokens = prod(program.local_size(order, dim) for dim in DATA_DIMS)
    rows = tokens * min(choices, rank_experts)
    if ids.kind == CAPACITY.name:
        sequences = program.local_size(order, BATCH)
        rows = min(rows, sequences * rank_experts * capacity(program, ids))
    return Fraction(rows * program.degree(order.axes_of(experts)), tokens * choices)
