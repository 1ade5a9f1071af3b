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
    """Bytes of buckets that one layer of a repeat holds, with the repeats inside it.

    layers    how many there are, of all repeats around it together
    weights  bytes that it gathers
    sums     by bucket the bytes of the gradients whose sums it begins; the sum of the layer before
             is finished first
    """

    layers: int
    weights: int
    sums: dict[str, int]


class Passing:
    """Bytes of all layers: `weights`, and `gradients` that backward makes or that are under way."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._ahead = storages.program.flow.prefetch
        program = storages.program
        self._sent = {bucket.name: program.reduce_dtype(bucket) for bucket in program.buckets}
        self._apart = set[str]()  # buckets whose gradients are sent from memory of their own
        for bucket in program.buckets:
            if self._sent[bucket.name] != bucket.type.dtype:
                self._apart.add(bucket.name)
        self._bucket: dict[str, str] = {}  # by the name of a gradient
        for op in storages.packs:
            self._bucket |= dict.fromkeys(op.inputs, str(op.get("bucket")))
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
        """Enters and leaves the layers of a repeat that may have the peak; yields how far each is
        from the last layer.

        The last layer has all that is kept; the layers before it gather for the next ones too.
        """
        per_layer, layers = self._per_layer(region), self._storages.program.size(region.dim)
        farthest = 0
        if per_layer.weights:
            farthest = min(layers - 1, self._ahead)
        for back in dict.fromkeys((0, farthest)):
            self._gathered.append((back + 1) * per_layer.weights)
            yield back
            self._gathered.pop()

    def backward(self, region: Region) -> Iterator[int]:
        """Enters and leaves the layers of a repeat's backward that may have the peak; yields how
        far each is from the first layer.

        The first layer has all that is kept; the layers after it begin with sums under way.
        """
        per_layer, layers = self._per_layer(region), self._storages.program.size(region.dim)
        before = self._under_way
        for on in range(min(layers, 2) if per_layer.sums else 1):
            self._under_way = dict(before)
            if on:
                self._under_way |= per_layer.sums
            self._gathered.append(min(per_layer.layers - on, self._ahead + 1) * per_layer.weights)
            yield on
            self._gathered.pop()
        self._under_way = before | per_layer.sums

    def makes(self, names: Iterable[str]) -> None:
        """Takes note that backward makes these values, if they are gradients of parameters."""
        program = self._storages.program
        for name in names:
            if name in self._bucket:
                bucket = self._bucket[name]
                self._made[bucket] = self._size(bucket, program.bucket(bucket).type.dtype)

    def moves(self, op: Op) -> Iterator[None]:
        """Begins to sum a layer's gradient, if this op completes it; yields in the moment when
        what is sent is there too.
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
        weights, layers = 0, 1
        for op in region.body:
            if isinstance(op, Op) and op.kind in ("unpack", "pack"):
                bucket = program.bucket(str(op.get("bucket")))
                layers = max(layers, prod(map(program.size, bucket.layers)))
                if op.kind == "unpack":
                    weights += self._storages.bytes(op.inputs[0])
        return LayerBytes(layers, weights, self._sums(region.body))

    def _sums(
        self, body: Sequence[Stmt], kinds: tuple[str, ...] = ("pack", "begin")
    ) -> dict[str, int]:
        """The bytes of the last sums that ops of these kinds begin, by bucket.

        A sum of gradients that are kept counts where what is sent has memory of its own.
        """
        sizes: dict[str, int] = {}
        for stmt in body:
            if isinstance(stmt, Region):
                sizes |= self._sums(stmt.body, kinds)
            elif stmt.kind in kinds and (stmt.kind == "pack" or stmt.get("bucket") in self._apart):
                bucket = str(stmt.get("bucket"))
                sizes[bucket] = self._size(bucket, self._sent[bucket])
        return sizes

    def _size(self, bucket: str, dtype: str) -> int:
        """The bytes of one layer's gradient in an element type."""
        program = self._storages.program
        return layout_of(program, program.bucket(bucket)).size * ITEM_BYTES[dtype]
