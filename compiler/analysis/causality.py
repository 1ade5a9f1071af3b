"""Which tokens a loss can depend on: a flow along the sequence, in the model before any placement.

Purpose: find the ops that let a later token or another document reach the loss of a token.
Non-goals: showing it by values (`proof.causality`); the losses of routers, which predict no token;
other sequences of the batch, since no op works along `batch` (E0307).

The flow knows, for each position of a short sequence, the set of tokens that a value depends on
there.  The entry of an op says what the op lets through: slices along a dim that an axis may shard
know nothing of each other.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

from attrs import Factory, evolve, field, frozen

from ..ir import SEQUENCE, Arg, Enter, Op, Program, Region, Stmt, Type, Value, base, sources_of
from ..ops import OPS, OpDef, moves_positions
from ..ops.reach import Reach
from ..ops.routers import CAPACITY

Tokens: TypeAlias = int
"""A set of tokens: bit i is on if it has the token at position i."""

Seen: TypeAlias = tuple[Tokens, ...]
"""The tokens that a value depends on at each position.  A value without a sequence has the same
tokens at all positions.
"""

What = Literal["later", "document"]
"""How a token relates to the one whose loss depends on it: it is later, or of another document."""

WORDS: dict[What, str] = {"later": "bidirectional", "document": "cross_document"}
"""The word of a plan that allows a loss to depend on such tokens."""

TOKENS, LABELS, DOCUMENTS = "tokens", "labels", "documents"

FEW, MOST = 16, 256
"""Positions of the flow's sequence: as many as usually suffice, and the most that circular shifts
may ask for.
"""


@frozen
class Leak:
    """An op that lets a loss depend on a token that it must not see, with one example.

    position  the position of the op's result
    token     the position of the token
    length    how many positions the flow's sequence had
    """

    op: Op
    what: What
    position: int
    token: int
    length: int


def find_leaks(program: Program) -> list[Leak]:
    """The ops that let a loss depend on tokens that it must not see, in the program's order.

    A loss may depend on the tokens that a word of the model allows.
    """
    flow = _Flow(program)
    flow.run()
    logits = [op.inputs[0] for op in program.ops if _reads_labels(op)]
    if not any(flow.has_leak(name) for name in logits):
        return []
    # each leak is taken out where it enters, so that leaks after the first one are seen too
    mending_flow = _Flow(program, mends=True)
    mending_flow.run()
    into_logits = sources_of(program.region, logits)
    reaching_logits = list[Leak]()
    for op, leak in mending_flow.leak_by_op.items():
        if any(value.name in into_logits for value in op.outputs):
            reaching_logits.append(leak)
    return reaching_logits


def kinds_seen(program: Program) -> dict[str, tuple[What, ...]]:
    """By value of the model the kinds of tokens that it depends on, beside earlier tokens of its
    own document.
    """
    flow = _Flow(program)
    flow.run()
    kinds_by_value: dict[str, tuple[What, ...]] = {}
    for name in program.types:
        kinds_by_value[name] = tuple(what for what in WORDS if flow.sees(name, what))
    return kinds_by_value


def claim(program: Program) -> str:
    """The statement of a certificate about a program without leaks."""
    hidden: dict[What, str] = {"later": "a later token"}
    if has_documents(program):
        hidden["document"] = "another document"
    allowed, others, statements = list[str](), list[str](), list[str]()
    for what, tokens in hidden.items():
        if WORDS[what] in program.sees:
            allowed.append(tokens)
        else:
            others.append(tokens)
    if others:
        statements.append(f"no loss depends on {' or on '.join(others)}")
    if allowed:
        statements.append(f"a loss may depend on {' or on '.join(allowed)}, as the model says")
    if "another document" in others and shares_capacity(program):
        statements.append("documents of a sequence share the capacity of experts")
    return "; ".join(statements)


def model_inputs(program: Program) -> tuple[Arg, ...]:
    """The model's inputs, whether or not it has become a step."""
    if program.region.kind == "model":
        return program.region.args
    return program.microbatches.args


def has_documents(program: Program) -> bool:
    """Whether the model is told which document each token is of."""
    return any(base(arg.value.name) == DOCUMENTS for arg in model_inputs(program))


def shares_capacity(program: Program) -> bool:
    """Whether experts drop a token because of how many came before it in the sequence, of any
    document.
    """
    return any(op.kind == CAPACITY.name for op in program.ops)


def _reads_labels(op: Op) -> bool:
    return any(operand.input_name == LABELS for operand in OPS[op.kind].operands)


def _enough_positions(flow: "_Flow") -> int:
    """The number of positions of the flow's sequence, at most `MOST`.

    It is so large that no circular shift comes full circle, however often its repeats do it.
    """
    shifts = sum(_shifts(flow.program, flow.program.region.body))
    return min(flow.program.size(SEQUENCE), MOST, max(FEW, 2 * shifts + 2))


@frozen
class _Flow:
    """One evaluation of a model.

    If it `mends`, it takes each leak out of the result of the op that lets it in.
    """

    program: Program
    mends: bool = False
    leak_by_op: dict[Op, Leak] = field(factory=dict[Op, Leak], init=False)
    length: int = field(default=Factory(_enough_positions, takes_self=True), init=False)
    _values: dict[str, Seen] = field(factory=dict[str, Seen], init=False)

    def run(self) -> None:
        """Evaluates the model."""
        for arg in self.program.region.args:
            if arg.source == TOKENS:
                self._values[arg.value.name] = self._table(lambda position: 1 << position)
        self._body(self.program.region.body)

    def sees(self, name: str, what: What) -> bool:
        """Whether a value depends on a token of this kind."""
        return self._example(self._value(name), what) is not None

    def has_leak(self, name: str) -> bool:
        """Whether a value depends on a token that no loss may depend on."""
        return any(self.sees(name, what) for what in self._forbidden())

    def _forbidden(self) -> Iterator[What]:
        return (what for what, word in WORDS.items() if word not in self.program.sees)

    # ---- statements

    def _body(self, body: Sequence[Stmt]) -> None:
        for stmt in body:
            if isinstance(stmt, Region):
                self._repeat(stmt)
            else:
                self._op(stmt)

    def _repeat(self, region: Region) -> None:
        """Iterates until nothing changes any more."""
        carried = [arg for arg in region.args if arg.enter is Enter.CARRY]
        state = [self._value(arg.source) for arg in carried]
        for _ in range(self.program.size(region.dim)):
            for arg, seen in zip(carried, state, strict=True):
                self._values[arg.value.name] = seen
            self._body(region.body)
            next_state = [self._value(end.name) for end in region.yields]
            if next_state == state:
                break
            state = next_state
        for result, seen in zip(region.results, state, strict=True):
            self._values[result.name] = seen

    def _op(self, op: Op) -> None:
        entry, types = OPS[op.kind], self.program.operands(op)
        for value in op.outputs:
            seen = self._nothing()
            if types:
                parts = [
                    self._operand(entry, types, op, index, value) for index in range(len(types))
                ]
                seen = tuple(map(_union, zip(*parts, strict=True)))
            if self.mends:
                seen = self._take_out_leaks(op, seen)
            self._values[value.name] = seen

    def _operand(
        self, entry: OpDef, types: Sequence[Type], op: Op, index: int, value: Value
    ) -> Seen:
        """The tokens that a result depends on through one operand."""
        seen = self._value(op.inputs[index])
        if entry.permutes and moves_positions(op) and self._is_long_enough:
            return tuple(seen[source] for source in entry.permutes(op, self.length))
        if reach := entry.reach(types, op).get(index):
            return self._within(seen, reach, op)
        summed_over = {*types[index].dims} - {*value.type.dims}
        if SEQUENCE in entry.unsharded_dims(types, op) | summed_over:
            return (_union(seen),) * self.length
        return seen

    @property
    def _is_long_enough(self) -> bool:
        """Whether the sequence is long enough to do circular shifts as they are.  If not, a shift
        is taken to look at the whole sequence.
        """
        return self.length < MOST or self.length == self.program.size(SEQUENCE)

    def _within(self, seen: Seen, reach: Reach, op: Op) -> Seen:
        """For each position the tokens at all positions within its reach."""
        # documents share the capacity of experts on purpose, and the certificate says so
        if op.kind == CAPACITY.name:
            reach = evolve(reach, within_document=True)
        return self._table(lambda position: _union(seen[self._span(position, reach)]))

    def _span(self, position: int, reach: Reach) -> slice:
        """The positions that a position can see."""
        first = max(position - reach.before, 0)
        stop = min(position + reach.after + 1, self.length)
        if reach.within_document:
            begin, end = self._document(position)
            first, stop = max(first, begin), min(stop, end)
        return slice(int(first), int(stop))

    def _take_out_leaks(self, op: Op, seen: Seen) -> Seen:
        """A result without what leaks into it; the op's first leak is noted."""
        for what in self._forbidden():
            if op not in self.leak_by_op and (pair := self._example(seen, what)):
                self.leak_by_op[op] = Leak(op, what, *pair, self.length)
            pairs = zip(seen, self._unwanted_tokens(what), strict=True)
            seen = tuple(tokens & ~others for tokens, others in pairs)
        return seen

    # ---- sets of tokens

    def _value(self, name: str) -> Seen:
        """The tokens that a value depends on.  Parameters, labels and document numbers depend on
        none.
        """
        return self._values.get(name) or self._nothing()

    def _nothing(self) -> Seen:
        return (0,) * self.length

    def _table(self, tokens: Callable[[int], Tokens]) -> Seen:
        return tuple(tokens(position) for position in range(self.length))

    def _unwanted_tokens(self, what: What) -> Seen:
        """For each position the tokens of this kind."""
        if what == "later":
            return self._table(self._later_tokens)
        return self._table(self._tokens_of_other_documents)

    def _later_tokens(self, position: int) -> Tokens:
        return _all_before(self.length) & ~_all_before(position + 1)

    def _tokens_of_other_documents(self, position: int) -> Tokens:
        begin, end = self._document(position)
        return _all_before(begin) | (_all_before(self.length) & ~_all_before(end))

    def _document(self, position: int) -> tuple[int, int]:
        """Where the document of a position begins and ends.

        The sequence has two documents if the model knows documents, else one.
        """
        if not has_documents(self.program):
            return 0, self.length
        border = self.length // 2
        if position < border:
            return 0, border
        return border, self.length

    def _example(self, seen: Seen, what: What) -> tuple[int, int] | None:
        """The first position that depends on a token of this kind, and the last such token."""
        for position, (tokens, others) in enumerate(
            zip(seen, self._unwanted_tokens(what), strict=True)
        ):
            if forbidden := tokens & others:
                return position, forbidden.bit_length() - 1
        return None


def _union(sets: Iterable[Tokens]) -> Tokens:
    union = 0
    for tokens in sets:
        union |= tokens
    return union


def _all_before(position: int) -> Tokens:
    return (1 << position) - 1


def _shifts(program: Program, body: Sequence[Stmt]) -> Iterator[int]:
    """By how many positions each circular shift of the sequence moves, summed over all iterations
    of its repeats.
    """
    for stmt in body:
        if isinstance(stmt, Region):
            yield program.size(stmt.dim) * sum(_shifts(program, stmt.body))
        elif moves_positions(stmt):
            yield abs(int(str(stmt.get("by"))))
