"""What turns of repeats hold of buckets for a while: weights that are gathered, gradients until ranks have their sum.

Weights of a turn are there from its gather, `prefetch` turns ahead of it, to its end.  A turn's gradient is memory for
all of it from the first that backward makes, and is on its way, while backward goes on, until its sum is there.
Non-goals: what is there all the time (`account`), and when turns come (`walk`).
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from attrs import frozen

from ...ir import ITEM_BYTES, Op, Region, Stmt
from ..bucket_layout import layout_of
from .aliasing import Storages


@frozen
class Turned:
    """What one turn of a repeat does with buckets, those of repeats inside too.

    turns    how many there are, of all repeats around it together
    weights  bytes that it gathers
    sums     bytes of the gradients whose sums it begins, by bucket: the turn before's is finished first
    """

    turns: int
    weights: int
    sums: dict[str, int]


class Passing:
    """What is there of all turns: `weights`, and `gradients`, those that backward makes and those under way."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._ahead = storages.program.flow.prefetch
        program = storages.program
        self._sent = {bucket.name: program.reduce_dtype(bucket) for bucket in program.buckets}
        self._apart = {bucket.name for bucket in program.buckets if self._sent[bucket.name] != bucket.type.dtype}
        self._bucket = {name: str(op.get("bucket")) for op in storages.packs for name in op.inputs}
        self._gathered: list[int] = []
        self._made: dict[str, int] = {}
        self._under_way: dict[str, int] = {}
        if storages.program.size(storages.microbatches.dim) > 1:
            self._under_way |= self._sums(storages.backward.body, ("pack",))

    @property
    def weights(self) -> int:
        """Bytes of gathered weights."""
        return sum(self._gathered)

    @property
    def gradients(self) -> int:
        """Bytes of gradients."""
        return sum(self._made.values()) + sum(self._under_way.values())

    def forward(self, region: Region) -> Iterator[int]:
        """Enters the turns of a repeat of which one is fullest, and leaves them; how far each is from the last.

        The last has all that is kept, those before it gather for the next ones too.
        """
        turned, turns = self._turned(region), self._storages.program.size(region.dim)
        for back in dict.fromkeys((0, min(turns - 1, self._ahead) if turned.weights else 0)):
            self._gathered.append((back + 1) * turned.weights)
            yield back
            self._gathered.pop()

    def backward(self, region: Region) -> Iterator[int]:
        """Enters the turns of a repeat's backward of which one is fullest, and leaves them; how far from the first.

        The first has all that is kept, those after it begin with sums under way.
        """
        turned, turns, before = self._turned(region), self._storages.program.size(region.dim), self._under_way
        for on in range(min(turns, 2)) if turned.sums else (0,):
            self._under_way = before | (turned.sums if on else {})
            self._gathered.append(min(turned.turns - on, self._ahead + 1) * turned.weights)
            yield on
            self._gathered.pop()
        self._under_way = before | turned.sums

    def makes(self, names: Iterable[str]) -> None:
        """Takes note that backward makes gradients of parameters, if these are values of this kind."""
        for bucket in (self._bucket[name] for name in names if name in self._bucket):
            self._made[bucket] = self._size(bucket, self._storages.program.bucket(bucket).type.dtype)

    def moves(self, op: Op) -> Iterator[None]:
        """Begins to sum a turn's gradient, if it is all there with this op; a moment when what is sent is there too."""
        if op.kind not in ("pack", "begin"):
            return
        self._under_way |= self._sums((op,))
        bucket = str(op.get("bucket"))
        if bucket in self._apart:
            yield
        self._made.pop(bucket, None)

    def _turned(self, region: Region) -> Turned:
        program = self._storages.program
        ops = [stmt for stmt in region.body if isinstance(stmt, Op) and stmt.kind in ("unpack", "pack")]
        weights = sum(self._storages.bytes(op.inputs[0]) for op in ops if op.kind == "unpack")
        turns = [prod(map(program.size, program.bucket(str(op.get("bucket"))).turns)) for op in ops]
        return Turned(max(turns, default=1), weights, self._sums(region.body))

    def _sums(self, body: Sequence[Stmt], kinds: tuple[str, ...] = ("pack", "begin")) -> dict[str, int]:
        """The bytes of the last sums that ops of these kinds begin, by bucket; those of gradients that are kept count
        where what is sent is memory of its own."""
        found: dict[str, int] = {}
        for stmt in body:
            if isinstance(stmt, Region):
                found |= self._sums(stmt.body, kinds)
            elif stmt.kind in kinds and (stmt.kind == "pack" or stmt.get("bucket") in self._apart):
                bucket = str(stmt.get("bucket"))
                found[bucket] = self._size(bucket, self._sent[bucket])
        return found

    def _size(self, bucket: str, dtype: str) -> int:
        """The bytes of one turn's gradient in an element type."""
        program = self._storages.program
        return layout_of(program, program.bucket(bucket)).size * ITEM_BYTES[dtype]
