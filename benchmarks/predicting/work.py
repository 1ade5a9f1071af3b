"""The work of a microbatch on one rank, read off the IR: by the place in the model where it is
done.
"""

from collections.abc import Iterator, Sequence
from math import prod

from attrs import define, field

from scalec.compiler.analysis.time.seconds import near_ranks
from scalec.compiler.ir import ITEM_BYTES, Op, Program, Region, Stmt
from scalec.compiler.ops import OPS, messages
from scalec.compiler.ops.saved_tensors import Local

PLACES = ("embedding", "layers", "head", "embedding back", "layers back", "head back")
"""Before, in and after the layers; forward, then backward.

Work of layers is that of one of them.
"""

LARGE = 1 << 16
"""Bytes below which a message is part of an op's latency."""


@define
class Microbatch:
    """The work of a microbatch; each list has a tuple for an op, the place first and how often it
    is done last.

    products  place, dtype, m, n, k, batch, times
    scores    place, heads, length, pairs, width, backward, times
    moved     place, bytes, kernels, times
    messages  place, axis, op, bytes of the whole, ranks, ranks on a node, times
    layers    how many there are
    params    elements on a rank before any state is sharded: of a layer, of the embedding, of the
              head
    logits    how many the head makes
    """

    layers: int
    params: tuple[float, float, float]
    logits: float
    products: list[tuple[int, int, int, int, int, int, float]] = field(factory=list)
    scores: list[tuple[int, int, int, int, int, bool, float]] = field(factory=list)
    moved: list[tuple[int, int, int, float]] = field(factory=list)
    messages: list[tuple[int, str, str, float, int, int, float]] = field(factory=list)


def work_of(program: Program, ranks_per_node: int) -> Microbatch:
    """The work of a microbatch of a program, by the number of ranks on a node."""
    layers = program.size("layers")
    tokens = program.train.microbatch * program.train.seq / prod(_degrees(program, "cp"))
    logits = tokens * program.size("vocab") / prod(_degrees(program, "tp"))
    found = Microbatch(layers, _params(program), logits)
    for backward, region in enumerate((program.forward, program.backward)):
        for place, op, times in _placed(program, region.body):
            at = place if not backward else 3 + (2 - place)
            _add(found, program, op, at, times / layers if place == 1 else times, ranks_per_node)
    return found


def _degrees(program: Program, axis: str) -> list[int]:
    return [it.size for it in program.axes if it.name == axis]


def _placed(program: Program, body: Sequence[Stmt]) -> Iterator[tuple[int, Op, float]]:
    """Ops with their place, before, in or after the layers, and how often each is done in all
    layers together.
    """
    place = 0
    for stmt in body:
        if isinstance(stmt, Region):
            yield from (
                (1, op, times) for op, times in _inside(program, stmt, program.size(stmt.dim))
            )
            place = 2
        else:
            yield place, stmt, 1.0


def _inside(program: Program, region: Region, times: float) -> Iterator[tuple[Op, float]]:
    for stmt in region.body:
        if isinstance(stmt, Op):
            yield stmt, times
        else:
            yield from _inside(program, stmt, times * (program.size(stmt.dim) if stmt.dim else 1))


def _add(found: Microbatch, program: Program, op: Op, place: int, times: float, near: int) -> None:
    own = program.operands(op)
    for it in (
        messages(program, op, program.types) if not (own and program.bucket_of(own[0])) else ()
    ):
        ranks, size = program.degree(it.axes), prod(it.shape) * ITEM_BYTES[it.dtype]
        if size >= LARGE and ranks > 1:
            whole = size * (ranks if it.op == "all_gather" else 1)
            beside = int(min(near_ranks(program, it.axes, near), ranks))
            found.messages.append(
                (place, it.axes[0], it.op, whole, ranks, beside, times * max(it.hops, 1))
            )
    entry = OPS[op.kind]
    if entry.views(program, op):
        return
    work = entry.work(Local(program, op, own, (True,) * len(own), "cuda"))
    found.products += [(place, 0, it.m, it.n, it.k, it.batch, times) for it in work.products]
    if work.scores:
        it = work.scores
        found.scores.append((place, it.heads, it.length, it.pairs, it.width, it.backward, times))
    if (work.bytes or work.kernels) and not (op.kind == "cast" and place > 2):
        found.moved.append((place, work.bytes, work.kernels, times))


def _params(program: Program) -> tuple[float, float, float]:
    """A parameter of the layers has their dim; of the others the first is the embedding's, the
    rest the head's.
    """
    inner = [param for param in program.params if "layers" in param.type.dims]
    outer = [program.elements(param.type) for param in program.params if param not in inner]
    return (
        sum(program.elements(param.type) for param in inner) / program.size("layers"),
        outer[0],
        sum(outer[1:]),
    )
