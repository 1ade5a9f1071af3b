"""Going through regions: their ops, values and uses, and the same under other names."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from attrs import evolve

from .regions import Enter, Op, Region, Stmt
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
    """The values that a statement binds for those after it."""
    return stmt.outputs if isinstance(stmt, Op) else stmt.results


def values(region: Region) -> Iterator[Value]:
    """Every value that `region` binds, at any depth."""
    yield from (arg.value for arg in region.args)
    yield from region.results
    for stmt in region.body:
        yield from values(stmt) if isinstance(stmt, Region) else stmt.outputs


def defs(body: Iterable[Stmt]) -> dict[str, Op]:
    """The op that makes each value, of the ops that are statements of `body` themselves."""
    return {value.name: op for op in ops_in(body) for value in op.outputs}


def uses(*stmts: Stmt) -> Counter[str]:
    """How often each value is read by statements, at any depth."""
    return Counter(_names_read(stmts))


def _names_read(stmts: Iterable[Stmt]) -> list[str]:
    """The values that statements read, at any depth, each as often as it is read."""
    found: list[str] = []
    for stmt in stmts:
        if isinstance(stmt, Op):
            found += stmt.inputs
        else:
            found += [arg.source for arg in stmt.args]
            found += [end.name for end in stmt.yields]
            found += _names_read(stmt.body)
    return found


def slices(region: Region) -> dict[str, str]:
    """The whole that each value in a repeat is a slice of, at any depth."""
    found: dict[str, str] = {}
    for inner in walk_regions(region.body):
        found |= {
            arg.value.name: found.get(arg.source, arg.source)
            for arg in inner.args
            if arg.enter is Enter.EACH
        }
    return found


def ancestors(body: Sequence[Stmt], wanted: Iterable[str]) -> set[str]:
    """The values `wanted` and all values that statements of `body` make them of."""
    found = {*wanted}
    for stmt in reversed(body):
        if not found.isdisjoint(value.name for value in results(stmt)):
            found |= uses(stmt).keys()
    return found


def sources_of(region: Region, names: Iterable[str]) -> set[str]:
    """The values `names` and all values, at any depth, that they are made of."""
    sources = {value.name: [*op.inputs] for op in walk(region.body) for value in op.outputs}
    for inner in walk_regions([region]):
        sources |= {arg.value.name: [arg.source] for arg in inner.args}
        carried = (arg.value.name for arg in inner.args if arg.enter is Enter.CARRY)
        for name, end in zip(carried, inner.yields, strict=False):
            sources[name].append(end.name)
        sources |= {
            result.name: [end.name]
            for result, end in zip(inner.results, inner.yields, strict=False)
        }
    pending = [*names]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += sources.get(name, [])
    return found


def map_ops(region: Region, change: Callable[[Op], Stmt]) -> Region:
    """The region with each op, at any depth, replaced."""
    body = (
        map_ops(stmt, change) if isinstance(stmt, Region) else change(stmt) for stmt in region.body
    )
    return evolve(region, body=tuple(body))


def rename(stmt: S, names: Mapping[str, str]) -> S:
    """The statement with other names for values that it reads, at any depth."""
    if isinstance(stmt, Op):
        return evolve(stmt, inputs=tuple(names.get(name, name) for name in stmt.inputs))
    return evolve(
        stmt,
        args=tuple(evolve(arg, source=names.get(arg.source, arg.source)) for arg in stmt.args),
        body=tuple(rename(inner, names) for inner in stmt.body),
        yields=tuple(evolve(end, name=names.get(end.name, end.name)) for end in stmt.yields),
    )


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
