"""How many rows of tokens a rank's experts get: an equal share, `room` times as many, or all that
there can be.

Purpose: the program with such a load, of which every account counts rows.  A load is a number of
equal shares.  Non-goals: what is counted (`memory`, `communication`).
"""

from collections.abc import Mapping
from fractions import Fraction
from math import inf, prod

from attrs import evolve, frozen

from ..ir import BATCH, DATA_DIMS, Op, Program, once
from ..ops.experts import COUNTS, SORT
from ..ops.routers import CAPACITY, capacity

ROOM = 1.25
"""Equal shares of rows for which the account of a plan without `room` has memory."""


@frozen
class Load:
    """A load by name, and the program of a rank whose experts get it.

    rows  of a microbatch on that rank, by dim of experts
    """

    name: str
    rows: Mapping[str, int]
    program: Program

    @property
    def shown(self) -> str:
        """The rows, for instance `8,192`; with several dims of experts `8,192 of experts, 512
        of others`.
        """
        alone = len(self.rows) == 1
        return ", ".join(
            f"{rows:,}" if alone else f"{rows:,} of {experts}"
            for experts, rows in self.rows.items()
        )


def with_load(program: Program, load: float) -> Program:
    """The program in which a rank's experts get `load` equal shares of rows, or as many as
    there can be.
    """
    found = tuple((experts, Fraction(min(most, load))) for experts, most in most_loads(program))
    return evolve(program, loads=found) if found else program


@once
def with_room(program: Program) -> Program:
    """The program with the load for which the plan has memory."""
    return with_load(program, program.train.room or ROOM)


def rows_of_an_expert(program: Program, sort: Op) -> float:
    """The rows of a microbatch that an expert gets on average, of all ranks that exchange
    tokens of this order.
    """
    order, experts = sort.outputs[0].type, str(sort.get("to"))
    exchanged = prod(
        program.degree((claim.axis,))
        for claim in program.claims
        if claim.dim == experts and claim.split and order.at(claim.axis).dim in DATA_DIMS
    )
    choices = prod(program.local_size(order, dim) for dim in order.dims if dim != experts)
    return choices * exchanged / program.size(experts)


@once
def loads(program: Program) -> tuple[Load, ...]:
    """An equal load, that for which the plan has memory, and the largest; none where all ranks
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
    return tuple(_named(name, of) for name, of in programs.items())


def _named(name: str, program: Program) -> Load:
    rows = {
        op.outputs[0].type.dims[0]: program.local_shape(op.outputs[0].type)[0]
        for op in _orders(program)
    }
    return Load(name, rows, program)


@once
def most_loads(program: Program) -> tuple[tuple[str, Fraction], ...]:
    """The largest load of each dim of experts that lies over ranks: every token chooses as many of
    a rank's as it can.

    A token chooses an expert once, and a capacity bounds an expert's tokens of a sequence.
    """
    made = {value.name: op for op in program.ops for value in op.outputs}
    found: dict[str, Fraction] = {}
    for op in _orders(program):
        experts = op.outputs[0].type.dims[0]
        found[experts] = max(_most(program, op, _ids(op, made)), found.get(experts, Fraction(0)))
    return tuple(found.items())


def _orders(program: Program) -> list[Op]:
    """The ops that make the orders of rows, not padded, which lie by a rank's own experts."""
    orders = (op for op in program.ops if op.kind in (SORT.name, COUNTS.name))
    ragged = ((op, op.outputs[0].type) for op in orders if program.is_ragged(op.outputs[0].type))
    return [op for op, type in ragged if type.axes_of(type.dims[0])]


def _ids(op: Op, made: Mapping[str, Op]) -> Op:
    """The op whose choices an order is of."""
    before = made[op.inputs[0]]
    return made[before.inputs[0]] if op.kind == COUNTS.name else before


def _most(program: Program, op: Op, ids: Op) -> Fraction:
    order = op.outputs[0].type
    experts, *_, chosen = order.dims
    held, choices = program.local_size(order, experts), program.size(chosen)
    tokens = prod(program.local_size(order, dim) for dim in DATA_DIMS)
    rows = tokens * min(choices, held)
    if ids.kind == CAPACITY.name:
        rows = min(rows, program.local_size(order, BATCH) * held * capacity(program, ids))
    return Fraction(rows * program.degree(order.axes_of(experts)), tokens * choices)
