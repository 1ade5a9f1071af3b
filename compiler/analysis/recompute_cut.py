"""The ops of forward that backward recomputes so that the added time is least: a minimum cut for
each price of memory.

For a price of a byte, the cut weighs what is kept against the time of what is recomputed.  An op is
recomputed from storages that are kept or recomputed themselves.  A storage that backward reads is
kept or recomputed.  Source and method: the min-cut partitioner of torch.compile, with times as
further edges, and Everett's multipliers (Operations Research 11, 1963).  Non-goals: peak memory
(`memory`), and which cut a plan gets (`tuning.decisions`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from importlib import import_module
from typing import Any

from attrs import define, field, frozen

from ..ir import Leave, Op, Program, Region, Stmt
from ..ops import OPS, messages
from ..ops.attention import WIDER
from .flops import cost
from .memory.aliasing import Storages, get_carried_values
from .memory.pipeline_peak import device_of
from .memory.saved_activations import Keeper
from .recompute import is_recomputed

OPERATORS = ("mul",)
"""Ops without a function in emitted programs that backward can recompute nevertheless."""

TRIES = 48
"""The most cuts that `least` makes."""

LEVELS = 2**40
"""The whole time in numbers of a cut's edges, which are integers."""


@frozen
class Choice:
    """An op of forward.

    name    its first result
    kind    of the op
    reads   storages of its operands
    makes   storages of its results
    keeps   bytes that it keeps besides, in all layers; none if backward recomputes the op
    time    of the op in all layers; None where backward cannot recompute it
    """

    name: str
    kind: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    keeps: int
    time: float | None


@frozen
class Cut:
    """A choice of what is recomputed: the ops' names, the added time, and the bytes of a
    microbatch that are kept.
    """

    names: frozenset[str]
    time: float
    bytes: int


@frozen
class Choices:
    """Values that backward can keep or recompute.

    sizes   bytes of each storage that is no parameter's, in all layers
    needed  the storages that backward reads if it recomputes nothing
    """

    ops: tuple[Choice, ...]
    sizes: Mapping[str, int]
    needed: frozenset[str]

    @property
    def recomputable(self) -> list[Choice]:
        """The ops that backward can recompute."""
        return [op for op in self.ops if op.time is not None]

    def cut(self, names: frozenset[str]) -> Cut:
        """The cut that recomputes the ops of these names."""
        recomputed, kept, read = list[Choice](), 0, set(self.needed)
        for op in self.ops:
            if op.name in names:
                recomputed.append(op)
                read.update(op.reads)
            else:
                kept += op.keeps
        for op in recomputed:
            read.difference_update(op.makes)
        kept += sum(map(self.sizes.__getitem__, read))
        return Cut(names, sum(op.time or 0.0 for op in recomputed), kept)

    def cheapest(self, price: Fraction, fixed: Mapping[str, bool] | None = None) -> Cut:
        """The cut with the least sum of time and of the price of each byte; `fixed` ops are
        recomputed, or are not.
        """
        return self.cut(_Network(self, price, fixed or {}).find_recomputed_ops())

    @cached_property
    def whole_time(self) -> Fraction:
        """The time of all ops that backward can recompute."""
        return sum((Fraction(op.time or 0) for op in self.recomputable), Fraction(0))


class _Network:
    """The graph of a minimum cut: ops on the sink's side are recomputed; storages there are
    kept or recomputed.
    """

    def __init__(self, choices: Choices, price: Fraction, fixed: Mapping[str, bool]) -> None:
        networkx: Any = import_module("networkx")
        self._graph, self._min_cut = networkx.DiGraph(), networkx.minimum_cut
        self._able = [op.name for op in choices.recomputable]
        unit = choices.whole_time / LEVELS or Fraction(1)
        results = set[str]()
        for op in choices.ops:
            results.update(op.makes)
            again = ("op", op.name)
            if op.time is not None and fixed.get(op.name, True):
                self._edge("source", again, max(1, round(Fraction(op.time) / unit)))
                sources = op.reads
            else:
                self._edge("source", again, None)
                sources = ()
            if fixed.get(op.name):
                self._edge(again, "sink", None)
            else:
                self._edge(again, "sink", round(op.keeps * price / unit))
            for storage in sources:
                self._edge(storage, again, None)
            for storage in op.makes:
                self._edge(again, storage, round(choices.sizes[storage] * price / unit))
        for storage, size in choices.sizes.items():
            if storage not in results:
                self._edge("source", storage, round(size * price / unit))
        for storage in choices.needed:
            self._edge(storage, "sink", None)

    def _edge(self, source: object, target: object, capacity: int | None) -> None:
        """Adds an edge; one without a capacity is never cut."""
        if capacity is None:
            self._graph.add_edge(source, target)
        else:
            self._graph.add_edge(source, target, capacity=capacity)

    def find_recomputed_ops(self) -> frozenset[str]:
        """The ops on the sink's side."""
        _, (_, sinks) = self._min_cut(self._graph, "source", "sink")
        return frozenset(name for name in self._able if ("op", name) in sinks)


def frontier(choices: Choices) -> list[Cut]:
    """The cuts that are cheapest for some price, from the one without added time to the one
    that keeps least.
    """
    nothing = choices.cut(frozenset())
    last = choices.cheapest(2 * choices.whole_time + 1)
    if last.bytes >= nothing.bytes:
        return [nothing]
    return [nothing, *_between(choices, nothing, last), last]


def _price(first: Cut, last: Cut) -> Fraction:
    """The price of a byte that makes two cuts cost the same."""
    return (Fraction(last.time) - Fraction(first.time)) / (first.bytes - last.bytes)


def _between(choices: Choices, first: Cut, last: Cut) -> list[Cut]:
    if last.time <= first.time:
        return []
    price = _price(first, last)
    middle = choices.cheapest(price)
    gain = Fraction(first.time) - Fraction(middle.time) + price * (first.bytes - middle.bytes)
    if gain <= choices.whole_time / 2**20 or not last.bytes < middle.bytes < first.bytes:
        return []
    return [*_between(choices, first, middle), middle, *_between(choices, middle, last)]


def least(choices: Choices, most: float, known: Sequence[Cut]) -> Cut | None:
    """The cut with the least time that keeps `most` bytes or less, None where there is none;
    `known` is the frontier.

    Branch and bound between the frontier's cuts: exact, unless it takes more than `TRIES` cuts.
    """
    enough = next((i for i, cut in enumerate(known) if cut.bytes <= most), None)
    if enough is None:
        return None
    if enough == 0:
        return known[0]
    search = _Search(choices, most, _price(known[enough - 1], known[enough]), known[enough])
    search.go({})
    return search.best


@define
class _Search:
    choices: Choices
    most: float
    price: Fraction
    best: Cut
    tries: int = field(init=False, default=TRIES)

    def go(self, fixed: Mapping[str, bool]) -> None:
        """Looks for a better cut; `fixed` says of ops whether they are recomputed."""
        self.tries -= 1
        cut = self.choices.cheapest(self.price, fixed)
        if cut.bytes <= self.most and cut.time < self.best.time:
            self.best = cut
        bound = cut.time + float(self.price) * (cut.bytes - self.most)
        free = [op for op in self.choices.recomputable if op.name not in fixed]
        if bound >= self.best.time * (1 - 1e-12) or not free or self.tries <= 0:
            return
        differs = cut.names ^ self.best.names
        op = max(free, key=lambda op: (op.name in differs, op.time))
        is_in_cut = op.name in cut.names
        for again in (not is_in_cut, is_in_cut):
            self.go({**fixed, op.name: again})


# ---- off the IR


def times(program: Program) -> Callable[[Op], float]:
    """The seconds that the cluster's GPU takes for an op; where they are not known, the op's
    operations.
    """
    from .hardware import hardware

    gpu = hardware(program)
    if not gpu:
        return lambda op: float(cost(program, (op,)).forward)
    from .time.prices import prices  # a plan without a cluster does without

    price_of = prices(program, gpu)
    return lambda op: sum(seconds for _, seconds in price_of(op).computes)


def get_recomputed_ops(program: Program) -> dict[str, Op]:
    """The ops of forward that backward recomputes, by their first results, in a program after
    the last pass.
    """
    recomputed = Storages(program).recomputed.values()
    return {op.outputs[0].name: op for op in recomputed}


def get_added_time(program: Program) -> float:
    """The time of what backward recomputes, relative to the time of the rest of a microbatch."""
    time, storages = times(program), Storages(program)

    def split_time(body: Sequence[Stmt]) -> tuple[float, float]:
        """The time of the ops of a body that are recomputed, and of all others."""
        recomputed = others = 0.0
        for stmt in body:
            if isinstance(stmt, Region):
                layers = program.size(stmt.dim)
                inner_recomputed, inner_others = split_time(stmt.body)
                recomputed += layers * inner_recomputed
                others += layers * inner_others
            elif is_again(stmt):
                recomputed += time(stmt)
            else:
                others += time(stmt)
        return recomputed, others

    def is_again(op: Op) -> bool:
        return bool(op.outputs) and op.outputs[0].name in storages.recomputed

    recomputed, backward = split_time(program.backward.body)
    _, forward = split_time(program.forward.body)
    return recomputed / (backward + forward)


def choices(program: Program, time: Callable[[Op], float]) -> Choices:
    """Choices of a program after the last pass that recomputes nothing yet; `time` gives the time
    of doing an op once.
    """
    return _Reader(program, time).choices()


class _Reader:
    """Reads a forward block; a layer's result and the next layer's operand count as one storage."""

    def __init__(self, program: Program, time: Callable[[Op], float]) -> None:
        self._program, self._time = program, time
        self._storages = Storages(program)
        self._keeper = Keeper(self._storages, device_of(program))
        self._handed: dict[str, str] = {}
        self._ends = {end.name for end in program.microbatches.yields}
        self._sizes: dict[str, int] = {}
        self._needed: set[str] = set()

    def choices(self) -> Choices:
        """All of them."""
        ops = tuple(self._ops(self._program.forward.body, 1))
        return Choices(ops, self._sizes, frozenset(self._needed))

    def _ops(self, body: Sequence[Stmt], times: int) -> Iterator[Choice]:
        for stmt in body:
            if isinstance(stmt, Op):
                yield from self._op(stmt, times)
                continue
            for end in stmt.yields:
                if end.leave is Leave.LAST:
                    self._ends.add(end.name)
            for arg, end, _ in get_carried_values(stmt):
                self._handed[self._storages.root(end)] = arg
            yield from self._ops(stmt.body, times * self._program.size(stmt.dim))

    def _op(self, op: Op, times: int) -> Iterator[Choice]:
        reads = self._of(op.inputs, times)
        self._needed.update(self._of(self._keeper.values(op), times))
        if OPS[op.kind].views(self._program, op):
            return
        makes = self._of([value.name for value in op.outputs], times)
        keeps = sum(self._keeper.others(op).values())
        time = None
        if is_recomputed(self._program, op):
            time = 0.0
        elif self._is_able(op):
            time = self._time(op) * times
        yield Choice(op.outputs[0].name, op.kind, reads, makes, keeps * times, time)

    def _is_able(self, op: Op) -> bool:
        """Whether it is a call of one function that decides and sends nothing, for a value of
        this body alone.
        """
        entry = OPS[op.kind]
        is_function = entry.function or op.kind in OPERATORS
        if not is_function or not entry.differentiable or op.kind == "call":
            return False
        if entry.decides or entry.sends or messages(self._program, op, self._program.types):
            return False
        if any(what.endswith(WIDER) for what in self._keeper.others(op)):
            return False  # its result is not in one piece, so that joining dims of it copies it
        return self._ends.isdisjoint(value.name for value in op.outputs)

    def _of(self, names: Sequence[str], times: int) -> tuple[str, ...]:
        """The storages of some values; their sizes count for that number of layers."""
        storages = self._storages
        roots: dict[str, None] = {}
        for name in names:
            if not storages.is_permanent(name):
                root = storages.root(name)
                roots[self._handed.get(root, root)] = None
        for root in roots:
            self._sizes.setdefault(root, storages.bytes(root) * times)
        return tuple(roots)
