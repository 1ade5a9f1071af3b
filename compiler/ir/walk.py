"""Going through a program: its ops, values, types and uses, and names that are still free."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from .program import Program
from .regions import Op, Region, Stmt
from .types import Type, Value


def walk(body: tuple[Stmt, ...]) -> Iterator[Op]:
    """Every op of `body` and of the regions in it, in order."""
    for stmt in body:
        if isinstance(stmt, Region):
            yield from walk(stmt.body)
        else:
            yield stmt


def values(region: Region) -> Iterator[Value]:
    """Every value that `region` binds, at any depth."""
    yield from (arg.value for arg in region.args)
    yield from region.results
    for stmt in region.body:
        yield from values(stmt) if isinstance(stmt, Region) else stmt.outputs


def types(program: Program) -> dict[str, Type]:
    """The type of every parameter and value, by name."""
    return {p.name: p.type for p in program.params} | {v.name: v.type for v in values(program.region)}


def results(stmt: Stmt) -> tuple[Value, ...]:
    """The values that a statement binds for later ones."""
    return stmt.results if isinstance(stmt, Region) else stmt.outputs


def uses(region: Region) -> Counter[str]:
    """How often each value is read in `region`, at any depth."""
    ends = (arg.source for arg in region.args), (end.name for end in region.yields)
    return reads(region.body) + Counter(chain(*ends))


def reads(body: Iterable[Stmt]) -> Counter[str]:
    """How often each value is read by statements, at any depth."""
    found: Counter[str] = Counter()
    for stmt in body:
        found.update(uses(stmt) if isinstance(stmt, Region) else stmt.inputs)
    return found


def blocks(program: Program) -> tuple[Region, Region, Region]:
    """A step's microbatches, and their forward and backward."""
    (microbatches,) = (stmt for stmt in program.region.body if isinstance(stmt, Region))
    forward, backward = microbatches.body
    assert isinstance(forward, Region), "blocks: no forward"
    assert isinstance(backward, Region), "blocks: no backward"
    return microbatches, forward, backward


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
