"""Attention over a sequence that is sharded: the axes, the way that it gets other ranks' keys, and
the cost.

Non-goals: which op it becomes (`passes.propagate`), which calls that makes (`ops.ring_attention`,
and coercions).
"""

from collections.abc import Iterator
from math import prod

from attrs import frozen

from ..config.settings import TRITON
from ..ir import BATCH, ITEM_BYTES, Claim, Op, Program
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
    op_roles = roles(op, program.types)
    return tuple(dict.fromkeys(dim for dim in (op_roles.heads, op_roles.kv_heads) if dim))


def heads_left(program: Program, dim: str) -> int:
    """How many heads are left to a rank by the axes that split them everywhere."""
    axes = set[str]()
    for claim in program.claims:
        if claim.dim == dim and claim.split and not claim.within:
            axes.add(claim.axis)
    return max(1, program.size(dim) // program.degree(tuple(axes)))


def query_axes(program: Program, op: Op) -> tuple[str, ...]:
    """The axes that split the sequence of an op's queries, once values are placed."""
    keys = roles(op, program.types).key_seq
    if not keys:
        return ()
    return program.types[op.inputs[0]].axes_of(keys)


@frozen
class Cost:
    """Calls and bytes that a rank sends for one attention of one microbatch, and bytes of keys
    that it keeps (`kept`).
    """

    strategy: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    key_bytes: int

    @property
    def sent_bytes(self) -> int:
        """The bytes of forward and backward."""
        return self.forward[1] + self.backward[1]


def sequence_axes(program: Program, op: Op) -> tuple[str, ...]:
    """The axes of the plan that split an op's sequence and not its heads, outermost first."""
    keys, heads = roles(op, program.types).key_seq, {*attention_heads(program, op)}
    if not keys:
        return ()
    claims = [claim for claim in program.claims if not claim.within]
    by_heads = {claim.axis for claim in claims if claim.dim in heads}
    parents: dict[str, None] = {}
    for claim in claims:
        if claim.dim == keys and claim.axis not in by_heads:
            parents[program.axis(claim.axis).parent] = None
    return tuple(parents)


def strategy(program: Program, op: Op, axis: str) -> str:
    """How an op gets the keys that other ranks of an axis of the plan hold."""
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
    attention = _Attention(program, op, axis)
    recompute = program.train.recompute
    # the costs are of a layer that backward recomputes
    layer = recompute.word in ("full", "every")
    ring = layer or (recompute.word == "selective" and OPS[op.kind].plan_name in recompute.names)
    return (
        attention.gather(layer or program.train.gathered == "regather"),
        attention.ring(ring),
        *attention.exchange(layer),
    )


class _Attention:
    """An attention over the ranks of an axis: the bytes of a rank's keys and values, and of its
    queries and result.
    """

    def __init__(self, program: Program, op: Op, axis: str) -> None:
        self.program, self.op = program, op
        types, op_roles = program.operands(op), roles(op, program.types)
        claims, batch_axes = dict[str, Claim](), list[str]()
        for claim in program.claims:
            if claim.dim == op_roles.key_seq:
                claims[program.axis(claim.axis).parent] = claim
            if claim.dim == BATCH:
                batch_axes.append(claim.axis)
        self.ranks, self.zigzag = _size(program, axis), claims[axis].zigzag
        exchanged = other_ranks = 1  # of the sequence's other axes
        for other in sequence_axes(program, op):
            if other == axis:
                continue
            if claims[other].via == ULYSSES:
                exchanged *= _size(program, other)
            else:
                other_ranks *= _size(program, other)
        batch = program.size(BATCH) // program.degree(tuple(batch_axes))
        self.positions = program.size(op_roles.key_seq) // other_ranks
        item = ITEM_BYTES[types[0].dtype]
        rows = batch * self.positions // self.ranks * item
        # the bytes of one head
        q, k, v = (rows * program.size(type.dims[-1]) for type in types[:3])
        self.heads = max(1, heads_left(program, op_roles.heads) // exchanged)
        self.kv_heads = max(1, heads_left(program, op_roles.kv_heads) // exchanged)
        self.keys, self.queries = (k + v) * self.kv_heads, (q + v) * self.heads
        self.wide = max(4, item) / item
        fuses, regathers = program.train.kernels == TRITON, program.train.gathered == "regather"
        # calls of one gather of keys and values, and of one exchange of queries, keys and values
        self.gathers = 1 if fuses and not regathers else 2
        self.exchanges = 3
        if fuses:
            self.exchanges = 1 if op_roles.heads == op_roles.kv_heads else 2

    def gather(self, recomputed: bool) -> Cost:
        """The cost of gathering keys and values each, or side by side."""
        moved = (self.ranks - 1) * self.keys
        return Cost(
            GATHER,
            (self.gathers, moved),
            (self.gathers * (1 + recomputed), moved * (1 + recomputed)),
            self.keys if recomputed else self.keys * self.ranks,
        )

    def ring(self, recomputed: bool) -> Cost:
        """The cost of a ring, which sends keys and values as one."""
        is_causal = self.op.get("mask") == "causal"
        count = hops(self.ranks, self.positions, window_of(self.op), is_causal, self.zigzag)
        gradients = count + (count > 0)
        back = count * self.keys + int(gradients * self.keys * self.wide)
        return Cost(
            RING,
            (count, count * self.keys),
            (count * (1 + recomputed) + gradients, back + recomputed * count * self.keys),
            self.keys,
        )

    def exchange(self, recomputed: bool) -> Iterator[Cost]:
        """The cost of exchanging queries and the result, and keys and values; if there are few
        heads of keys, they are gathered first.  None where heads do not fit.
        """
        ranks, few = self.ranks, min(self.kv_heads, self.ranks)
        if self.heads % ranks or self.kv_heads % few or ranks % few:
            return
        gathered = ranks // few
        moved = (
            self.queries * (ranks - 1) // ranks
            + (gathered - 1) * self.keys
            + gathered * self.keys * (few - 1) // few
        )
        if few > 1 and gathered > 1:
            calls = 6  # keys are gathered and exchanged, then values
        elif few > 1:
            calls = 1 + self.exchanges
        else:
            calls = 2 + self.gathers
        yield Cost(
            ULYSSES,
            (calls, moved),
            (calls * (1 + recomputed), moved * (1 + recomputed)),
            gathered * self.keys,
        )


def _size(program: Program, axis: str) -> int:
    """The ranks of an axis of the plan."""
    return prod(part.size for part in program.axes if part.parent == axis)
