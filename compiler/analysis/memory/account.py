"""All of one rank's memory in one value; and over one microbatch, moment by moment, for drawings.

The latter is the walk that finds the peak, written down; layers that it does not visit are like the
nearest that it does, but for what the layers before them keep.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from attrs import evolve, frozen

from ...ir import ITEM_BYTES, Op, Program, once
from ...ir import Bucket as Shared
from ...ops import roles
from ...ops.saved_tensors import Device
from ..expert_loads import Load, loads, with_room
from ..stage_program import rank_programs
from .aliasing import Storages
from .peak import PeakSnapshot, Walk, update
from .pipeline_peak import Stage, device_of, keeps, peaks, stages_of
from .reserve import hash_keys, loss_window, reserve
from .saved_activations import Keeper, Kept

STEP_COUNT, HELD, LOSS_SCALE = 4, 8, 8
"""Bytes of the optimizer's count of steps, a float32 on the device, and of a loss scale with
its own count.
"""


@frozen
class Bucket:
    """A bucket's bytes, of all layers.

    parameters  as the model computes with them: whole, or where each layer gathers them, this
                rank's part
    gradients   whole, or where each microbatch sums them, this rank's part
    masters     0 where they are the parameters' memory, or a part of it
    saved       at most, what a checkpoint gets from this rank: masters, or the parameters, and the
                optimizer's
    padding     the part of all this, from 0 to 1, that is no parameter's; of all ranks together
    """

    name: str
    parameters: int
    gradients: int
    masters: int
    slots: tuple[tuple[str, int], ...]
    saved: int
    padding: float

    @property
    def optimizer(self) -> int:
        """The optimizer's state of each element."""
        return sum(size for _, size in self.slots)

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.masters + self.optimizer


@frozen
class Account:
    """The memory of one rank, in bytes.

    scalars the optimizer's count of steps, the count of steps that were held, a loss scale, the
    biases of routers, and
            the losses by which others are spikes
    unsaved the part of them that no checkpoint gets
    tables  of rotary positions, that the model computes once, and of keys of hashes
    inputs  tokens, labels and the like of all microbatches of a step
    kept    what autograd keeps of one microbatch, each storage once
    peak    the moment when most is in memory
    reserve what no tensor gets: CUDA, its libraries and NCCL have it
    rank    along the pipeline's axis, of which it is; None without a pipeline, where it is that of
            each rank
    """

    device: Device
    buckets: tuple[Bucket, ...]
    scalars: int
    tables: int
    inputs: int
    kept: tuple[Kept, ...]
    peak: PeakSnapshot
    reserve: int = 0
    rank: int | None = None
    unsaved: int = HELD

    @property
    def state(self) -> int:
        """Parameters, gradients, masters and the optimizer's own."""
        return self.scalars + sum(bucket.total for bucket in self.buckets)

    @property
    def host(self) -> int:
        """Host memory: the copy of what this rank writes of a checkpoint, if it is the first of
        those with the same.
        """
        return self.scalars - self.unsaved + sum(bucket.saved for bucket in self.buckets)

    @property
    def padding(self) -> int:
        """Bytes of the state that are no parameter's: ranks' parts of buckets are equal, and of
        whole rows.
        """
        return round(sum(bucket.total * bucket.padding for bucket in self.buckets))

    @property
    def activations(self) -> int:
        """Saved activations of one microbatch, in all stages of the rank."""
        return sum(it.total for it in self.kept)

    @property
    def always(self) -> int:
        """Memory that is in use for the whole step."""
        return self.state + self.tables + self.inputs

    @property
    def total(self) -> int:
        """The most that tensors take at once."""
        return self.always + self.peak.bytes

    @property
    def needs(self) -> int:
        """With what no tensor gets."""
        return self.total + self.reserve


@once
def account(program: Program) -> Account:
    """The account of a program after the last pass, on the device that its cluster names: a GPU, or
    else the CPU.

    A pipeline's is that of the rank that needs most; with experts, that of a rank with the load of
    `with_room`.
    """
    return max(accounts(program), key=lambda it: it.total)


@once
def accounts(program: Program) -> tuple[Account, ...]:
    """Accounts of all ranks of a pipeline's axis; without one, that of each rank."""
    return accounts_of(with_room(program))


@once
def at_loads(program: Program) -> tuple[tuple[Load, tuple[Account, ...]], ...]:
    """The accounts with each of `loads`."""
    return tuple((load, accounts_of(load.program)) for load in loads(program))


@once
def accounts_of(program: Program) -> tuple[Account, ...]:
    """The accounts with the program's own loads."""
    if not program.pipeline:
        storages = Storages(program)
        keeper = Keeper(storages, device_of(program))
        peak = Walk(storages, keeper, device_of(program)).peak
        return (_account(program, storages, tuple(keeper.all.values()), peak),)
    pipeline, of = program.pipeline, stages_of(program)
    assert pipeline.schedule, "memory: no rows"
    moments = zip(
        idle(program, of), peaks(program, pipeline.schedule, of, keeps(program, of)), strict=True
    )
    return tuple(
        evolve(it, peak=max(it.peak, peak, key=lambda moment: moment.bytes)) for it, peak in moments
    )


def idle(program: Program, of: Sequence[Stage]) -> list[Account]:
    """Accounts of all ranks of a pipeline's axis while they work on no microbatch; `of` has all
    stages.
    """
    assert program.pipeline, "memory: no pipeline"
    found: list[Account] = []
    # of ranks that hold as much, but for what they keep of microbatches
    alike: dict[object, Account] = {}
    for rank, own in enumerate(rank_programs(program)):
        if (own.dims, own.buckets) not in alike:
            storages = Storages(evolve(own, params=program.params))
            alike[own.dims, own.buckets] = _account(own, storages, (), update(storages))
        kept = tuple(
            kept for number in program.pipeline.stages_of(rank) for kept in of[number].kept
        )
        found.append(evolve(alike[own.dims, own.buckets], kept=kept, rank=rank))
    return found


def _account(
    program: Program, storages: Storages, kept: tuple[Kept, ...], peak: PeakSnapshot
) -> Account:
    """The account of a program with a rank's parameters; `storages` know all, at the rank's
    sizes.
    """
    # of its own layers
    biases = sum(ITEM_BYTES[it.type.dtype] * program.elements(it.type) for it in program.buffers)
    return Account(
        device_of(program),
        tuple(_bucket(bucket, storages) for bucket in program.buckets if bucket.params),
        STEP_COUNT
        + HELD
        + LOSS_SCALE * (program.train.precision == "fp16")
        + biases
        + loss_window(program),
        _tables(storages.program) + hash_keys(program),
        sum(storages.bytes(name) for name in storages.inputs),
        kept,
        peak,
        reserve(storages.program),
        unsaved=0 if program.watch.skips else HELD,
    )


def _bucket(bucket: Shared, storages: Storages) -> Bucket:
    """Masters and the optimizer's own are this rank's part of the bucket."""
    program, wide = storages.program, ITEM_BYTES[bucket.type.dtype]
    part, item = program.elements(bucket.type), ITEM_BYTES[_used(bucket, storages)]
    whole = part * program.degree(bucket.shard_axes)
    elements = sum(
        program.elements(param.type) for param in program.params if param.name in bucket.params
    )
    return Bucket(
        bucket.name,
        (part if bucket.reshard_after_forward else whole) * item,
        (part if bucket.shard_gradients else whole) * wide,
        part * wide if item < wide else 0,
        tuple((slot, part * wide) for slot in program.train.optimizer.slots),
        part * wide * (1 + len(program.train.optimizer.slots)),
        1 - elements / whole,
    )


def _used(bucket: Shared, storages: Storages) -> str:
    """The element type in which the model computes with a bucket's parameters."""
    ops = (op for op in storages.program.region.body if isinstance(op, Op) and op.kind == "cast")
    casts = [op for op in ops if storages.root(op.inputs[0]) in storages.state]
    return casts[0].outputs[0].type.dtype if casts else bucket.type.dtype


def _tables(program: Program) -> int:
    """Cosines and sines of rotary positions, a table for each way to rotate and place of the
    sequence.
    """
    known = program.types
    sizes: dict[object, int] = {}
    for op in program.ops:
        if (at := roles(op, known)).rotated:
            type = known[op.inputs[0]]
            own = {"dims": float(program.size(type.dims[-1])), **dict(op.attrs)}
            own.pop("every", None)  # recomputed layers of backward use forward's
            size = (
                2
                * program.local_size(type, at.query_seq)
                * round(float(str(own["dims"])))
                * ITEM_BYTES[type.dtype]
            )
            sizes[
                len(type.dims) - type.dims.index(at.query_seq),
                tuple(sorted(own.items())),
                type.dtype,
            ] = size
    return sum(sizes.values())


Noted = tuple[PeakSnapshot, int]
"""A moment, and the bytes that the other layers of its outermost repeat keep."""


class _Recorder(Walk):
    def __init__(self, storages: Storages, keeper: Keeper, device: Device) -> None:
        self.moments: list[Noted] = []
        super().__init__(storages, keeper, device)

    def _note(self, moment: PeakSnapshot) -> None:
        super()._note(moment)
        self.moments.append((moment, self._of_others()))


def over_microbatch(program: Program) -> list[PeakSnapshot]:
    """The moments of a microbatch in all layers, forward's before backward's, and that of the
    update.
    """
    storages = Storages(with_room(program))
    device = device_of(program)
    recorder = _Recorder(storages, Keeper(storages, device), device)
    runs = groupby(
        recorder.moments, key=lambda it: (it[0].where, it[0].layers[:1] and it[0].layers[0][0])
    )
    moments = [
        moment
        for (_, dim), run in runs
        for moment in (_layers([*run]) if dim else (it for it, _ in run))
    ]
    return [*moments, recorder.peaks["update"]]


def _layers(run: list[Noted]) -> Iterator[PeakSnapshot]:
    """The moments of all layers of a repeat."""
    visited: dict[int, list[Noted]] = {}
    for noted in run:
        visited.setdefault(noted[0].layers[0][1], []).append(noted)
    first, _ = run[0]
    count = first.layers[0][2]
    for at in range(1, count + 1) if first.where == "forward" else range(count, 0, -1):
        nearest = min(visited, key=lambda other: abs(other - at))
        for moment, others in visited[nearest]:
            yield moment if at == nearest else _moved(moment, others, at)


def _moved(moment: PeakSnapshot, others: int, to: int) -> PeakSnapshot:
    """The same moment in another layer: the layers before it keep a part of what those before
    the visited one keep.
    """
    (dim, at, count), *inner = moment.layers
    kept = moment.kept - others + others * (to - 1) // max(at - 1, 1)
    return evolve(moment, layers=((dim, to, count), *inner), kept=max(kept, 0))
