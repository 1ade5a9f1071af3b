"""All of one rank's memory in one value."""

from attrs import frozen

from ..ir import ITEM_BYTES, Op, Program, types, walk
from ..ir import Bucket as Shared
from ..ops.saved import Device
from .kept import Keeper, Kept
from .storages import Storages
from .walk import Moment, Walk

STEP_COUNT = 4
"""Bytes of the optimizer's count of steps, a float32 on the device."""


@frozen
class Bucket:
    """A bucket's bytes; `masters` are 0 where the model computes with them itself, as `parameters`."""

    name: str
    parameters: int
    gradients: int
    masters: int
    slots: tuple[tuple[str, int], ...]

    @property
    def optimizer(self) -> int:
        """What the optimizer remembers of each element."""
        return sum(size for _, size in self.slots)


@frozen
class Account:
    """What one rank holds, in bytes.

    tables  of rotary positions, that the model computes once
    inputs  tokens, labels and the like of all microbatches of a step
    kept    what autograd keeps of one microbatch, each storage once
    peak    the moment when most is in memory
    """

    device: Device
    buckets: tuple[Bucket, ...]
    tables: int
    inputs: int
    kept: tuple[Kept, ...]
    peak: Moment

    @property
    def state(self) -> int:
        """Parameters, gradients, masters and the optimizer's own."""
        return STEP_COUNT + sum(b.parameters + b.gradients + b.masters + b.optimizer for b in self.buckets)

    @property
    def activations(self) -> int:
        """What autograd keeps of one microbatch."""
        return sum(it.total for it in self.kept)

    @property
    def always(self) -> int:
        """What is there all the time."""
        return self.state + self.tables + self.inputs

    @property
    def total(self) -> int:
        """The most that is in memory at once."""
        return self.always + self.peak.bytes


def account(program: Program) -> Account:
    """The account of a program after the last pass, on the device that its cluster names: a GPU, or else the CPU."""
    device: Device = "cuda" if program.cluster.gpu else "cpu"
    storages = Storages(program)
    keeper = Keeper(storages, device)
    return Account(
        device,
        tuple(_bucket(bucket, storages) for bucket in program.buckets),
        _tables(program),
        sum(storages.bytes(name) for name in storages.inputs),
        tuple(keeper.all.values()),
        Walk(storages, keeper, device).peak,
    )


def _bucket(bucket: Shared, storages: Storages) -> Bucket:
    """Masters and the optimizer's own are this rank's part of the bucket; gradients are whole, and parameters too."""
    program = storages.program
    ops = [op for op in program.region.body if isinstance(op, Op)]
    gradients = next(storages.bytes(op.outputs[0].name) for op in ops if _packs(op, bucket) and not _reads(op, bucket))
    whole, item = gradients // ITEM_BYTES[bucket.type.dtype], ITEM_BYTES[_used(ops, bucket, storages)]
    masters = program.elements(bucket.type) * ITEM_BYTES[bucket.type.dtype]
    alone = item < ITEM_BYTES[bucket.type.dtype]  # else they are a part of the parameters' memory
    slots = tuple((slot, masters) for slot in program.train.optimizer.slots)
    return Bucket(bucket.name, whole * item, gradients, masters if alone else 0, slots)


def _packs(op: Op, bucket: Shared) -> bool:
    return op.kind == "pack" and op.get("dim") == bucket.dim


def _reads(op: Op, bucket: Shared) -> bool:
    return op.inputs[0] in bucket.params


def _used(ops: list[Op], bucket: Shared, storages: Storages) -> str:
    """The element type in which the model computes with a bucket's parameters."""
    casts = [op for op in ops if op.kind == "cast" and storages.root(op.inputs[0]) in storages.state]
    return casts[0].outputs[0].type.dtype if casts else bucket.type.dtype


def _tables(program: Program) -> int:
    """Cosines and sines of rotary positions, a table for each way to turn and place of the sequence."""
    known = types(program)
    sizes: dict[object, int] = {}
    for op in walk(program.region.body):
        if op.kind == "rope":
            type = known[op.inputs[0]]
            own = {"dims": float(program.size(type.dims[-1])), **dict(op.attrs)}
            size = 2 * program.local_size(type, "seq") * round(float(str(own["dims"]))) * ITEM_BYTES[type.dtype]
            sizes[len(type.dims) - type.dims.index("seq"), tuple(sorted(own.items())), type.dtype] = size
    return sum(sizes.values())
