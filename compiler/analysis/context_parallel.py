"""Attention over a sequence that is sharded: over which axes, how it gets other ranks' keys, at
what cost.

Non-goals: which op it becomes (`passes.propagate`), which calls that makes (`ops.ring_attention`,
and coercions).
"""

from collections.abc import Iterator
from math import prod

from attrs import frozen

from ..config.settings import TRITON
from ..ir import BATCH, ITEM_BYTES, Op, Program
from ..ops import OPS, roles
from ..ops.attention import window_of
from ..ops.ring_attention import RING, hops

ZIGZAG, GATHER, ULYSSES, AUTO = "zigzag", "gather", "ulysses", "auto"
STRATEGIES = (GATHER, RING, ULYSSES)
"""Keys are gathered, go round a ring (Liu et al. 2023), or the sequence is exchanged for heads
(Jacobs et al. 2023).
"""


def attention_heads(program: Program, op: Op) -> tuple[str, ...]:
    """The dims that count an op's heads of queries and of keys; none for an op without."""
    own = roles(op, program.types)
    return tuple(dict.fromkeys(dim for dim in (own.heads, own.kv_heads) if dim))


def heads_left(program: Program, dim: str) -> int:
    """How many heads are left to a rank by the axes over which they lie everywhere."""
    axes = {
        claim.axis
        for claim in program.claims
        if claim.dim == dim and claim.split and not claim.within
    }
    return max(1, program.size(dim) // program.degree(tuple(axes)))


def query_axes(program: Program, op: Op) -> tuple[str, ...]:
    """The axes over which an op's queries are parts of a sequence, once values are placed."""
    keys = roles(op, program.types).key_seq
    return program.types[op.inputs[0]].axes_of(keys) if keys else ()


@frozen
class Cost:
    """Calls and bytes that a rank sends for one attention of one microbatch, and bytes of keys
    that it keeps.
    """

    strategy: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    kept: int

    @property
    def sent(self) -> int:
        """The bytes of both."""
        return self.forward[1] + self.backward[1]


def sequence_axes(program: Program, op: Op) -> tuple[str, ...]:
    """The axes of the plan over which an op's sequence lies and its heads do not, outermost
    first.
    """
    keys, heads = roles(op, program.types).key_seq, {*attention_heads(program, op)}
    claims = [claim for claim in program.claims if not claim.within]
    by_heads = {claim.axis for claim in claims if claim.dim in heads}
    found = (
        claim.axis for claim in claims if keys and claim.dim == keys and claim.axis not in by_heads
    )
    return tuple(dict.fromkeys(program.axis(axis).parent for axis in found))


def strategy(program: Program, op: Op, axis: str) -> str:
    """How an op comes by the keys that other ranks of an axis of the plan hold."""
    keys = roles(op, program.types).key_seq
    claims = (
        claim
        for claim in program.claims
        if claim.dim == keys and program.axis(claim.axis).parent == axis
    )
    return next(claims).via or GATHER


def costs(program: Program, op: Op, axis: str) -> tuple[Cost, ...]:
    """Costs of each strategy over an axis of the plan, as rings send it, the rest of the plan
    as it is.
    """
    at = _Attention(program, op, axis)
    recompute = program.train.recompute
    layer = recompute.word in ("full", "every")  # of which this is a layer that backward recomputes
    ring = layer or (recompute.word == "selective" and OPS[op.kind].plan_name in recompute.names)
    return (
        at.gather(layer or program.train.gathered == "regather"),
        at.ring(ring),
        *at.exchange(layer),
    )


class _Attention:
    """An attention over the ranks of an axis: the bytes of a rank's keys and values, and of its
    queries and result.
    """

    def __init__(self, program: Program, op: Op, axis: str) -> None:
        self.program, self.op, types, own = (
            program,
            op,
            program.operands(op),
            roles(op, program.types),
        )
        claims = {
            program.axis(claim.axis).parent: claim
            for claim in program.claims
            if claim.dim == own.key_seq
        }
        self.ranks, self.zigzag = _size(program, axis), claims[axis].zigzag
        others = [each for each in sequence_axes(program, op) if each != axis]
        exchanged = prod(_size(program, each) for each in others if claims[each].via == ULYSSES)
        rest = prod(_size(program, each) for each in others) // exchanged
        batch = program.size(BATCH) // program.degree(
            tuple(c.axis for c in program.claims if c.dim == BATCH)
        )
        self.positions = program.size(own.key_seq) // rest
        rows = batch * self.positions // self.ranks * ITEM_BYTES[types[0].dtype]
        # the bytes of one head
        q, k, v = (rows * program.size(type.dims[-1]) for type in types[:3])
        self.heads, self.kv_heads = (
            max(1, heads_left(program, dim) // exchanged) for dim in (own.heads, own.kv_heads)
        )
        self.keys, self.queries = (k + v) * self.kv_heads, (q + v) * self.heads
        self.wide = max(4, ITEM_BYTES[types[0].dtype]) / ITEM_BYTES[types[0].dtype]
        fuses, regathers = program.train.kernels == TRITON, program.train.gathered == "regather"
        self.gathers = 1 if fuses and not regathers else 2
        self.exchanges = (1 if own.heads == own.kv_heads else 2) if fuses else 3

    def gather(self, recomputed: bool) -> Cost:
        """Keys and values each, or side by side."""
        moved = (self.ranks - 1) * self.keys
        return Cost(
            GATHER,
            (self.gathers, moved),
            (self.gathers * (1 + recomputed), moved * (1 + recomputed)),
            self.keys * (1 if recomputed else self.ranks),
        )

    def ring(self, recomputed: bool) -> Cost:
        """Both as one."""
        count = hops(
            self.ranks,
            self.positions,
            window_of(self.op),
            self.op.get("mask") == "causal",
            self.zigzag,
        )
        gradients = count + (count > 0)
        back = count * self.keys + int(gradients * self.keys * self.wide)
        return Cost(
            RING,
            (count, count * self.keys),
            (count * (1 + recomputed) + gradients, back + recomputed * count * self.keys),
            self.keys,
        )

    def exchange(self, recomputed: bool) -> Iterator[Cost]:
        """Queries and the result, and keys and values, of which few are gathered first; none
        where heads do not fit.
        """
        ranks, few = self.ranks, min(self.kv_heads, self.ranks)
        if self.heads % ranks or self.kv_heads % few or ranks % few:
            return
        each = ranks // few
        moved = (
            self.queries * (ranks - 1) // ranks
            + (each - 1) * self.keys
            + each * self.keys * (few - 1) // few
        )
        apart = few > 1 and each > 1  # keys are gathered and exchanged, then values
        calls = 6 if apart else 1 + self.exchanges if few > 1 else 2 + self.gathers
        yield Cost(
            ULYSSES,
            (calls, moved),
            (calls * (1 + recomputed), moved * (1 + recomputed)),
            each * self.keys,
        )


def _size(program: Program, axis: str) -> int:
    """The ranks of an axis of the plan."""
    return prod(each.size for each in program.axes if each.parent == axis)
