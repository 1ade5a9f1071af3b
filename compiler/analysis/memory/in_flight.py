"""Bytes of buckets that layers of repeats hold for a while: gathered weights, and gradients until
ranks have their sum.

Weights of a layer are there from its gather, `prefetch` layers ahead of it, to its end.  A layer's
gradient takes memory from the first part that backward makes until its sum, reduced while backward
goes on, is there.  Non-goals: what is there all the time (`account`), and when layers come
(`peak`).
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from attrs import frozen

from ...ir import ITEM_BYTES, Op, Region, Stmt
from ..bucket_layout import layout_of
from .aliasing import Storages


@frozen
class LayerBytes:
    """Bytes of buckets that one layer of a repeat holds, those of repeats inside too.

    layers    how many there are, of all repeats around it together
    weights  bytes that it gathers
    sums     bytes of the gradients whose sums it begins, by bucket: the layer before's is finished
             first
    """

    layers: int
    weights: int
    sums: dict[str, int]


class Passing:
    """Bytes of all layers: `weights`, and `gradients`, those that backward makes and those
    under way.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._ahead = storages.program.flow.prefetch
        program = storages.program
        self._sent = {bucket.name: program.reduce_dtype(bucket) for bucket in program.buckets}
        self._apart = {
            bucket.name
            for bucket in program.buckets
            if self._sent[bucket.name] != bucket.type.dtype
        }
        self._bucket = {name: str(op.get("bucket")) for op in storages.packs for name in op.inputs}
        self._gathered: list[int] = []
        self._made: dict[str, int] = {}
        self._under_way: dict[str, int] = {}
        if storages.program.size(storages.program.microbatches.dim) > 1:
            self._under_way |= self._sums(storages.program.backward.body, ("pack",))

    @property
    def weights(self) -> int:
        """Bytes of gathered weights."""
        return sum(self._gathered)

    @property
    def gradients(self) -> int:
        """Bytes of gradients."""
        return sum(self._made.values()) + sum(self._under_way.values())

    def forward(self, region: Region) -> Iterator[int]:
        """Enters the layers of a repeat one of which has the peak, and leaves them; how far each is
        from the last.

        The last has all that is kept, those before it gather for the next ones too.
        """
        per_layer, layers = self._per_layer(region), self._storages.program.size(region.dim)
        for back in dict.fromkeys((0, min(layers - 1, self._ahead) if per_layer.weights else 0)):
            self._gathered.append((back + 1) * per_layer.weights)
            yield back
            self._gathered.pop()

    def backward(self, region: Region) -> Iterator[int]:
        """Enters the layers of a repeat's backward one of which has the peak, and leaves them; how
        far from the first.

        The first has all that is kept, those after it begin with sums under way.
        """
        per_layer, layers, before = (
            self._per_layer(region),
            self._storages.program.size(region.dim),
            self._under_way,
        )
        for on in range(min(layers, 2)) if per_layer.sums else (0,):
            self._under_way = before | (per_layer.sums if on else {})
            self._gathered.append(min(per_layer.layers - on, self._ahead + 1) * per_layer.weights)
            yield on
            self._gathered.pop()
        self._under_way = before | per_layer.sums

    def makes(self, names: Iterable[str]) -> None:
        """Takes note that backward makes gradients of parameters, if these are values of this
        kind.
        """
        for bucket in (self._bucket[name] for name in names if name in self._bucket):
            self._made[bucket] = self._size(
                bucket, self._storages.program.bucket(bucket).type.dtype
            )

    def moves(self, op: Op) -> Iterator[None]:
        """Begins to sum a layer's gradient, if this op completes it; a moment when what is sent
        is there too.
        """
        if op.kind not in ("pack", "begin"):
            return
        self._under_way |= self._sums((op,))
        bucket = str(op.get("bucket"))
        if bucket in self._apart:
            yield
        self._made.pop(bucket, None)

    def _per_layer(self, region: Region) -> LayerBytes:
        program = self._storages.program
        ops = [
            stmt for stmt in region.body if isinstance(stmt, Op) and stmt.kind in ("unpack", "pack")
        ]
        weights = sum(self._storages.bytes(op.inputs[0]) for op in ops if op.kind == "unpack")
        layers = [
            prod(map(program.size, program.bucket(str(op.get("bucket"))).layers)) for op in ops
        ]
        return LayerBytes(max(layers, default=1), weights, self._sums(region.body))

    def _sums(
        self, body: Sequence[Stmt], kinds: tuple[str, ...] = ("pack", "begin")
    ) -> dict[str, int]:
        """The bytes of the last sums that ops of these kinds begin, by bucket; those of gradients
        that are kept count where what is sent is memory of its own."""
        found: dict[str, int] = {}
        for stmt in body:
            if isinstance(stmt, Region):
                found |= self._sums(stmt.body, kinds)
            elif stmt.kind in kinds and (stmt.kind == "pack" or stmt.get("bucket") in self._apart):
                bucket = str(stmt.get("bucket"))
                found[bucket] = self._size(bucket, self._sent[bucket])
        return found

    def _size(self, bucket: str, dtype: str) -> int:
        """The bytes of one layer's gradient in an element type."""
        program = self._storages.program
        return layout_of(program, program.bucket(bucket)).size * ITEM_BYTES[dtype]
