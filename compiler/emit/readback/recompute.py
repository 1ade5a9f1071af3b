"""The ops that backward recomputes, read off the IR alone: each of its ops that does what an op of
forward did.

Purpose: a program's blocks and loops are compared with the IR's backward.  Non-goals: what the plan
asks for.
"""

from collections import Counter

from ...ir import Attr, Enter, Leave, Op, Region, ops_in, regions_in
from ...syntax.source import Span

Path = tuple[tuple[str, Span], ...]
"""The dims of the repeats around an op and their places in the plan: the same in forward and
backward.
"""

Key = tuple[Path, str, tuple[str, ...], frozenset[tuple[str, Attr]]]


class Twins:
    """Each value's twin: the first value of forward's body that is the same.

    `count` says how often backward recomputes a value of forward, and `every` in one of how many
    layers it does so, by twin.
    """

    def __init__(self, forward: Region, backward: Region) -> None:
        self._twins: dict[str, str] = {}
        # what lies stacked over all layers of a repeat → what one layer calls it
        self._layers: dict[str, str] = {}
        self._firsts: dict[Key, Op] = {}
        self.every: dict[str, int] = {}
        for path, region in _regions(forward):
            ends = zip(region.yields, region.results, strict=True)
            self._layers |= {
                value.name: end.name for end, value in ends if end.leave is Leave.STACK
            }
            self._slice(region)
            for op in ops_in(region.body):
                self._bind(op, self._firsts.setdefault(self._key(path, op), op))
        self.count = self._count_recomputed(backward)

    def _count_recomputed(self, backward: Region) -> "Counter[str]":
        """How often ops of backward, in their order, make what forward made."""
        counts: Counter[str] = Counter()
        for path, region in _regions(backward):
            self._slice(region)
            for op in ops_in(region.body):
                if first := self._firsts.get(self._key(path, op)):
                    self._bind(op, first)
                    counts[first.outputs[0].name] += 1
                    self.every[first.outputs[0].name] = int(str(dict(op.attrs).get("every", 1)))
        return counts

    def _slice(self, region: Region) -> None:
        """Slices of the same stack have the same twin, also in another repeat of as many layers."""
        for arg in region.args:
            if arg.enter is Enter.EACH:
                first = self._layers.setdefault(self.twin_of(arg.source), arg.value.name)
                self._twins[arg.value.name] = self.twin_of(first)

    def twin_of(self, name: str) -> str:
        """The twin of a value."""
        return self._twins.get(name, name)

    def _key(self, path: Path, op: Op) -> Key:
        attrs = frozenset((key, value) for key, value in op.attrs if key != "every")
        return path, op.kind, tuple(map(self.twin_of, op.inputs)), attrs

    def _bind(self, op: Op, first: Op) -> None:
        self._twins |= {
            new.name: old.name for new, old in zip(op.outputs, first.outputs, strict=True)
        }


def _regions(region: Region, around: Path = ()) -> list[tuple[Path, Region]]:
    """A region and the regions in it, outer first."""
    path = (*around, (region.dim, region.span)) if region.dim else around
    inner = [
        inner_region for stmt in regions_in(region.body) for inner_region in _regions(stmt, path)
    ]
    return [(path, region), *inner]
