"""Going through regions: their ops, values and uses, and the same under other names."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from attrs import evolve

from .regions import Arg, Enter, Op, Region, Stmt, Yield
from .types import Value

S = TypeVar("S", bound=Stmt)


def walk(body: Iterable[Stmt]) -> Iterator[Op]:
    """Every op of `body` and of the regions in it, in order."""
    for stmt in body:
        if isinstance(stmt, Region):
            yield from walk(stmt.body)
        else:
            yield stmt


def walk_regions(body: Iterable[Stmt]) -> Iterator[Region]:
    """Every region of `body` and of the regions in it, outer ones first."""
    for stmt in body:
        if isinstance(stmt, Region):
            yield stmt
            yield from walk_regions(stmt.body)


def regions_in(body: Iterable[Stmt]) -> list[Region]:
    """The regions that are statements of `body` themselves."""
    return [stmt for stmt in body if isinstance(stmt, Region)]


def ops_in(body: Iterable[Stmt]) -> list[Op]:
    """The ops that are statements of `body` themselves."""
    return [stmt for stmt in body if isinstance(stmt, Op)]


def blocks(microbatches: Region) -> tuple[Region, Region]:
    """The blocks of forward and backward of a step's microbatches."""
    forward, backward = regions_in(microbatches.body)
    return forward, backward


def results(stmt: Stmt) -> tuple[Value, ...]:
    """The values that a statement binds for the statements after it."""
    if isinstance(stmt, Op):
        return stmt.outputs
    return stmt.results


def values(region: Region) -> Iterator[Value]:
    """Every value that `region` binds, at any depth."""
    yield from (arg.value for arg in region.args)
    yield from region.results
    for stmt in region.body:
        if isinstance(stmt, Region):
            yield from values(stmt)
        else:
            yield from stmt.outputs


def defs(body: Iterable[Stmt]) -> dict[str, Op]:
    """The op that makes each value, of the ops that are statements of `body` themselves."""
    makers = dict[str, Op]()
    for op in ops_in(body):
        for value in op.outputs:
            makers[value.name] = op
    return makers


def uses(*stmts: Stmt) -> Counter[str]:
    """How often each value is read by statements, at any depth."""
    return Counter(_names_read(stmts))


def _names_read(stmts: Iterable[Stmt]) -> list[str]:
    """The values that statements read, at any depth, each as often as it is read."""
    names: list[str] = []
    for stmt in stmts:
        if isinstance(stmt, Op):
            names += stmt.inputs
        else:
            names += [arg.source for arg in stmt.args]
            names += [end.name for end in stmt.yields]
            names += _names_read(stmt.body)
    return names


def slices(region: Region) -> dict[str, str]:
    """The whole that each value in a repeat is a slice of, at any depth."""
    wholes: dict[str, str] = {}
    for inner in walk_regions(region.body):
        # arguments of one region are no slices of each other
        added = dict[str, str]()
        for arg in inner.args:
            if arg.enter is Enter.EACH:
                added[arg.value.name] = wholes.get(arg.source, arg.source)
        wholes |= added
    return wholes


def ancestors(body: Sequence[Stmt], wanted: Iterable[str]) -> set[str]:
    """The values `wanted` and all values that statements of `body` make them of."""
    names = {*wanted}
    for stmt in reversed(body):
        if not names.isdisjoint(value.name for value in results(stmt)):
            names |= uses(stmt).keys()
    return names


def sources_of(region: Region, names: Iterable[str]) -> set[str]:
    """The values `names` and all values, at any depth, that they are made of."""
    sources = dict[str, list[str]]()
    for op in walk(region.body):
        for value in op.outputs:
            sources[value.name] = [*op.inputs]
    for inner in walk_regions([region]):
        for arg in inner.args:
            sources[arg.value.name] = [arg.source]
        carried = (arg.value.name for arg in inner.args if arg.enter is Enter.CARRY)
        for name, end in zip(carried, inner.yields, strict=False):
            sources[name].append(end.name)
        for result, end in zip(inner.results, inner.yields, strict=False):
            sources[result.name] = [end.name]
    pending = [*names]
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += sources.get(name, [])
    return reached


def map_ops(region: Region, change: Callable[[Op], Stmt]) -> Region:
    """The region with each op, at any depth, replaced."""
    body = list[Stmt]()
    for stmt in region.body:
        if isinstance(stmt, Region):
            body.append(map_ops(stmt, change))
        else:
            body.append(change(stmt))
    return evolve(region, body=tuple(body))


def rename(stmt: S, names: Mapping[str, str]) -> S:
    """The statement with other names for values that it reads, at any depth."""
    if isinstance(stmt, Op):
        return evolve(stmt, inputs=tuple(names.get(name, name) for name in stmt.inputs))
    args, body, yields = list[Arg](), list[Stmt](), list[Yield]()
    for arg in stmt.args:
        args.append(evolve(arg, source=names.get(arg.source, arg.source)))
    for inner in stmt.body:
        body.append(rename(inner, names))
    for end in stmt.yields:
        yields.append(evolve(end, name=names.get(end.name, end.name)))
    return evolve(stmt, args=tuple(args), body=tuple(body), yields=tuple(yields))


def base(name: str) -> str:
    """The name without the number of its rebinding: `x` of `x.2`."""
    return name.split(".")[0]


class Names:
    """Gives names that are not taken: `x`, `x.1`, `x.2`, …"""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._next: dict[str, int] = {}
        for name in taken:
            stem, _, number = name.partition(".")
            self._next[stem] = max(self._next.get(stem, 0), int(number or 0) + 1)

    def fresh(self, like: str) -> str:
        """A new name on the stem of `like`."""
        stem = base(like)
        number = self._next.get(stem, 0)
        self._next[stem] = number + 1
        return f"{stem}.{number}" if number else stem
