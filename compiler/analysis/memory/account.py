"""All of one rank's memory in one value; and over one microbatch, moment by moment, for drawings.

The moments are a record of the walk that finds the peak.  A layer that it does not visit is like
the nearest that it does, but for what the layers before them keep.
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
    saved       the most that a checkpoint gets from this rank: masters, or the parameters, and the
                optimizer's state
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
            biases of routers, and the losses that decide whether another is a spike
    unsaved the part of the scalars that no checkpoint gets
    tables  of rotary positions, that the model computes once, and of keys of hashes
    inputs  tokens, labels and the like of all microbatches of a step
    kept    what autograd keeps of one microbatch, each storage once
    peak    the moment when most is in memory
    reserve what no tensor gets: CUDA, its libraries and NCCL have it
    rank    the rank along the pipeline's axis; None without a pipeline, where each rank has this
            account
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
        the ranks with the same state.
        """
        return self.scalars - self.unsaved + sum(bucket.saved for bucket in self.buckets)

    @property
    def padding(self) -> int:
        """Bytes of the state that are no parameter's: the ranks' parts of a bucket have the same
        size, and consist of whole rows.
        """
        return round(sum(bucket.total * bucket.padding for bucket in self.buckets))

    @property
    def activations(self) -> int:
        """Saved activations of one microbatch, in all stages of the rank."""
        return sum(tensor.total for tensor in self.kept)

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
        """Bytes of `total` and `reserve` together."""
        return self.total + self.reserve


@once
def account(program: Program) -> Account:
    """The account of a program after the last pass, on the device that its cluster names: a GPU, or
    else the CPU.

    For a pipeline it is the account of the rank that needs most; with experts, of a rank with the
    load of `with_room`.
    """
    return max(accounts(program), key=lambda account: account.total)


@once
def accounts(program: Program) -> tuple[Account, ...]:
    """Accounts of all ranks of a pipeline's axis; without one, the account that each rank has."""
    return accounts_of(with_room(program))


@once
def at_loads(program: Program) -> tuple[tuple[Load, tuple[Account, ...]], ...]:
    """The accounts with each of `loads`."""
    return tuple((load, accounts_of(load.program)) for load in loads(program))


@once
def accounts_of(program: Program) -> tuple[Account, ...]:
    """The accounts with the program's own loads."""
    pipeline = program.pipeline
    if not pipeline:
        storages = Storages(program)
        keeper = Keeper(storages, device_of(program))
        peak = Walk(storages, keeper, device_of(program)).peak
        return (_account(program, storages, tuple(keeper.all.values()), peak),)
    stages = stages_of(program)
    assert pipeline.schedule, "memory: no rows"
    idle_accounts = idle(program, stages)
    row_peaks = peaks(program, pipeline.schedule, stages, keeps(program, stages))
    rank_accounts = list[Account]()
    for account, row_peak in zip(idle_accounts, row_peaks, strict=True):
        peak = max(account.peak, row_peak, key=lambda moment: moment.bytes)
        rank_accounts.append(evolve(account, peak=peak))
    return tuple(rank_accounts)


def idle(program: Program, stages: Sequence[Stage]) -> list[Account]:
    """Accounts of all ranks of a pipeline's axis while they work on no microbatch; `stages` are
    all stages.
    """
    assert program.pipeline, "memory: no pipeline"
    accounts = list[Account]()
    # accounts of ranks that hold as much, but for what they keep of microbatches
    account_by_kind: dict[object, Account] = {}
    for rank, rank_program in enumerate(rank_programs(program)):
        kind = rank_program.dims, rank_program.buckets
        if kind not in account_by_kind:
            storages = Storages(evolve(rank_program, params=program.params))
            account_by_kind[kind] = _account(rank_program, storages, (), update(storages))
        kept = list[Kept]()
        for number in program.pipeline.stages_of(rank):
            kept += stages[number].kept
        accounts.append(evolve(account_by_kind[kind], kept=tuple(kept), rank=rank))
    return accounts


def _account(
    program: Program, storages: Storages, kept: tuple[Kept, ...], peak: PeakSnapshot
) -> Account:
    """The account of a program with a rank's parameters; `storages` know all parameters, at the
    rank's sizes.
    """
    scalars = STEP_COUNT + HELD + LOSS_SCALE * (program.train.precision == "fp16")
    for bias in program.buffers:  # of its own layers
        scalars += ITEM_BYTES[bias.type.dtype] * program.elements(bias.type)
    return Account(
        device_of(program),
        tuple(_bucket(bucket, storages) for bucket in program.buckets if bucket.params),
        scalars + loss_window(program),
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
    part, item = program.elements(bucket.type), ITEM_BYTES[_get_compute_dtype(bucket, storages)]
    whole = part * program.degree(bucket.shard_axes)
    elements = 0
    for param in program.params:
        if param.name in bucket.params:
            elements += program.elements(param.type)
    slots = program.train.optimizer.slots
    return Bucket(
        bucket.name,
        parameters=(part if bucket.reshard_after_forward else whole) * item,
        gradients=(part if bucket.shard_gradients else whole) * wide,
        masters=part * wide if item < wide else 0,
        slots=tuple((slot, part * wide) for slot in slots),
        saved=part * wide * (1 + len(slots)),
        padding=1 - elements / whole,
    )


def _get_compute_dtype(bucket: Shared, storages: Storages) -> str:
    """The element type that the model computes in with a bucket's parameters."""
    for op in storages.program.region.body:
        if not isinstance(op, Op) or op.kind != "cast":
            continue
        if storages.root(op.inputs[0]) in storages.state:
            return op.outputs[0].type.dtype
    return bucket.type.dtype


def _tables(program: Program) -> int:
    """Bytes of cosines and sines of rotary positions: a table for each way to rotate and place of
    the sequence.
    """
    types = program.types
    sizes: dict[object, int] = {}
    for op in program.ops:
        op_roles = roles(op, types)
        if not op_roles.rotated:
            continue
        type = types[op.inputs[0]]
        attrs = {"dims": float(program.size(type.dims[-1])), **dict(op.attrs)}
        attrs.pop("every", None)  # recomputed layers of backward use forward's
        rows = program.local_size(type, op_roles.query_seq)
        columns = round(float(str(attrs["dims"])))
        seq_from_end = len(type.dims) - type.dims.index(op_roles.query_seq)
        table = seq_from_end, tuple(sorted(attrs.items())), type.dtype
        sizes[table] = 2 * rows * columns * ITEM_BYTES[type.dtype]
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
    """The moments of a microbatch in all layers, forward's before backward's, and the update's."""
    storages = Storages(with_room(program))
    device = device_of(program)
    recorder = _Recorder(storages, Keeper(storages, device), device)
    moments = list[PeakSnapshot]()
    for (_, dim), run in groupby(recorder.moments, key=_outermost_repeat):
        if dim:
            moments += _layers([*run])
        else:
            moments += [moment for moment, _ in run]
    return [*moments, recorder.peaks["update"]]


def _outermost_repeat(noted: Noted) -> tuple[str, str]:
    """The block of a moment, and the dim of its outermost repeat, "" outside all repeats."""
    moment, _ = noted
    dim = moment.layers[0][0] if moment.layers else ""
    return moment.where, dim


def _layers(run: list[Noted]) -> Iterator[PeakSnapshot]:
    """The moments of all layers of a repeat."""
    visited: dict[int, list[Noted]] = {}
    for noted in run:
        visited.setdefault(noted[0].layers[0][1], []).append(noted)
    first, _ = run[0]
    count = first.layers[0][2]
    numbers = range(1, count + 1)
    if first.where == "backward":
        numbers = reversed(numbers)
    for number in numbers:
        nearest = min(visited, key=lambda other: abs(other - number))
        for moment, others in visited[nearest]:
            if number == nearest:
                yield moment
            else:
                yield _move_to_layer(moment, others, number)


def _move_to_layer(moment: PeakSnapshot, others: int, to: int) -> PeakSnapshot:
    """The same moment in the layer of number `to`.

    The layers before it keep a part of the `others` bytes that the layers before the visited one
    keep.
    """
    (dim, number, count), *inner = moment.layers
    kept = moment.kept - others + others * (to - 1) // max(number - 1, 1)
    return evolve(moment, layers=((dim, to, count), *inner), kept=max(kept, 0))
