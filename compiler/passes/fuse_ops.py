"""Puts one op in the place of several, where kernels do their work in one pass over memory or in one product.

Purpose: a function and its product become a gate, products of one value with several weights one product, a sum and
its norm one op.  Before: `insert_collectives`, so that nothing is taken together between which ranks communicate.
Non-goals: which kernels run (`emit`), and programs that run without them (`kernels = torch`).
"""

from collections import Counter
from collections.abc import Sequence

from attrs import evolve, frozen

from ..ir import Enter, Op, Program, Region, Stmt, Type, types, uses, walk
from ..ops.fused import CONTRACTS, GATES, NORMS
from ..settings import TRITON


def fuse_ops(program: Program) -> Program:
    """The program with ops fused."""
    if program.train.kernels != TRITON:
        return program
    known = _Known(types(program), uses(program.region), _parameters(program.region), _kept_apart(program))
    return evolve(program, region=_fused(program.region, known))


@frozen
class _Known:
    """What fusing asks of the program: types and uses of values, which are parameters, which ops stay by themselves."""

    types: dict[str, Type]
    uses: Counter[str]
    parameters: frozenset[str]
    apart: frozenset[str]


def _parameters(region: Region) -> frozenset[str]:
    """The values that are parameters, or slices of one."""
    found = {value.name for op in walk(region.body) if op.kind == "leaf" for value in op.outputs}
    return frozenset(found | _slices(region, found))


def _slices(region: Region, found: set[str]) -> set[str]:
    own = {arg.value.name for arg in region.args if arg.enter is Enter.EACH and arg.source in found}
    inner = (stmt for stmt in region.body if isinstance(stmt, Region))
    return own.union(*(_slices(each, found | own) for each in inner))


def _kept_apart(program: Program) -> frozenset[str]:
    """Ops that backward does again, which goes by their names; products whose weights' gradients a schedule sets apart."""
    recompute = program.train.recompute
    named = recompute.names if recompute.word == "selective" else ()
    return frozenset(named) | ({"contract"} if program.pipeline else set())


def _fused(region: Region, known: _Known) -> Region:
    body = tuple(_fused(stmt, known) if isinstance(stmt, Region) else stmt for stmt in region.body)
    for pattern in (_gates, _products, _norms):
        body = pattern(body, known)
    return evolve(region, body=body)


def _replaced(body: Sequence[Stmt], by: dict[int, Op | None]) -> tuple[Stmt, ...]:
    """The body with other ops, or none, in the places of some."""
    found = (by.get(i, stmt) for i, stmt in enumerate(body))
    return tuple(stmt for stmt in found if stmt is not None)


def _ops(body: Sequence[Stmt], kinds: Sequence[str], known: _Known) -> list[tuple[int, Op]]:
    """The ops of these kinds that may be fused, with their places."""
    free = {*kinds} - known.apart
    return [(i, stmt) for i, stmt in enumerate(body) if isinstance(stmt, Op) and stmt.kind in free]


# ---- the patterns


def _gates(body: tuple[Stmt, ...], known: _Known) -> tuple[Stmt, ...]:
    """f(x) · y of a function whose value is used only there."""
    opened = {op.outputs[0].name: (i, op) for i, op in _ops(body, tuple(GATES), known)}
    by: dict[int, Op | None] = {}
    for at, op in _ops(body, ("mul",), known):
        name = next((n for n in op.inputs if n in opened and known.uses[n] == 1), "")
        if name and len({known.types[n] for n in op.inputs}) == 1:
            first, function = opened[name]
            (other,) = (n for n in op.inputs if n != name)
            inputs = (*function.inputs, other)
            by |= {first: None, at: evolve(op, kind=GATES[function.kind], inputs=inputs, attrs=function.attrs)}
    return _replaced(body, by)


def _products(body: tuple[Stmt, ...], known: _Known) -> tuple[Stmt, ...]:
    """Products of one value with several parameters of as many dims, over the same ones, divided over the same axes."""
    alike: dict[object, list[tuple[int, Op]]] = {}
    for at, op in _ops(body, ("contract",), known):
        x, weight = op.inputs
        if weight in known.parameters and x not in known.parameters:
            key = (x, op.attrs, len(known.types[weight].dims), _axes(known.types[weight]))
            alike.setdefault(key, []).append((at, op))
    by: dict[int, Op | None] = {}
    for several in alike.values():
        if len(several) > 1 and len({op.inputs[1] for _, op in several}) == len(several):
            by |= dict.fromkeys((at for at, _ in several), None)
            by[several[0][0]] = _together([op for _, op in several], _turned(body))
    return _replaced(body, by)


def _turned(body: Sequence[Stmt]) -> set[str]:
    """What rope takes, and nothing keeps for backward."""
    return {name for stmt in body if isinstance(stmt, Op) and stmt.kind == "rope" for name in stmt.inputs}


def _axes(weight: Type) -> frozenset[str]:
    """Over which axes a weight is divided, whatever dim that is."""
    return frozenset(axis for axis, place in weight.places if place.dim)


def _together(several: Sequence[Op], turned: set[str]) -> Op:
    """One op for all; what backward keeps gets memory of its own, if others in that memory are not kept."""
    first, weights = several[0], tuple(op.inputs[1] for op in several)
    outputs = tuple(value for op in several for value in op.outputs)
    kept = tuple(str(i) for i, value in enumerate(outputs) if value.name not in turned)
    apart = (("apart", kept),) if 0 < len(kept) < len(outputs) else ()
    return Op(CONTRACTS.name, (first.inputs[0], *weights), outputs, (*first.attrs, *apart), span=first.span)


def _norms(body: tuple[Stmt, ...], known: _Known) -> tuple[Stmt, ...]:
    """x + y that is normalised, and used besides."""
    added = {op.outputs[0].name: (i, op) for i, op in _ops(body, ("add",), known)}
    by: dict[int, Op | None] = {}
    for at, op in _ops(body, tuple(NORMS), known):
        total, *weights = op.inputs
        first, add = added.pop(total, (0, None))
        if add and known.uses[total] > 1 and _two_alike(add, known) and known.parameters >= {*weights}:
            outputs = (*add.outputs, *op.outputs)
            by |= {at: None, first: evolve(op, kind=NORMS[op.kind], inputs=(*add.inputs, *weights), outputs=outputs)}
    return _replaced(body, by)


def _two_alike(add: Op, known: _Known) -> bool:
    """Whether two values of one type are added."""
    return len(add.inputs) == 2 and len({known.types[name] for name in (*add.inputs, add.outputs[0].name)}) == 1
