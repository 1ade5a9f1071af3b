"""The state in the form of torch's own tools: DTensors of global shapes, views of what a rank
holds.

For programs of one's own: checkpoints do without, and so without the seconds that importing DTensor
takes.
"""

from collections.abc import Iterable, Mapping

from torch import Size, Tensor, empty

from ..comm.mesh import Mesh
from ..errors import RunError, quote_first_names
from .flat_param import FlatParam, Record


def views(flats: Iterable[FlatParam], mesh: Mesh) -> dict[str, Tensor]:
    """Parameters and slots by key, as far as this rank has a part of them.

    Each has a placement for every axis of the mesh except a pipeline's stages: Shard(dim) where a
    rank has a part of that dim, Replicate() where ranks hold the same.  A rank has some rows of a
    bucket that is shared out: such a DTensor is Shard(0) over its axes, and its local tensor, a
    LocalShardsWrapper, says which rows.  Plain tensors where no axis is left.
    """
    global_views = dict[str, Tensor]()
    for flat in flats:
        for record in flat.record():
            global_views[record.key] = _as_global(record, flat, mesh)
    return global_views


def _as_global(record: Record, flat: FlatParam, mesh: Mesh) -> Tensor:
    bucket, spec = flat.bucket, record.spec
    axes = tuple(axis for axis in mesh.axes if axis != bucket.stages)
    if mesh.device_mesh is None or not axes:
        return record.local
    from torch.distributed.tensor import DTensor, Replicate, Shard  # slow to import

    dim_by_axis = dict[str, int]()
    for dim, split_axes in spec.split.items():
        dim_by_axis |= dict.fromkeys(split_axes, dim)
    dim_by_axis |= dict.fromkeys(bucket.shard_axes, 0)
    placements = list[Shard | Replicate]()
    for axis in axes:
        if axis in dim_by_axis:
            placements.append(Shard(dim_by_axis[axis]))
        else:
            placements.append(Replicate())
    local = _rows(record) if flat.shard_axis.size > 1 else record.local
    stride = empty(spec.shape, device="meta").stride()
    return DTensor.from_local(
        local,
        mesh.device_mesh[axes],
        placements,
        run_check=False,
        shape=Size(spec.shape),
        stride=stride,
    )


def _rows(record: Record) -> Tensor:
    """A part with its place: parts of a bucket are cut between rows, and not as Shard(0) cuts."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    return LocalShardsWrapper([record.local], [record.offset])


def take(current: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copies values into a rank's current ones; the two may be the same tensors.

    RunError, before anything is changed, where a value lacks, or has another shape or dtype.
    """
    if lacking := [key for key in current if key not in values]:
        raise RunError(
            f"the state to load lacks {quote_first_names(lacking)}: it is another plan's, or a part"
            " of one"
        )
    pairs = {key: (local(mine), local(values[key])) for key, mine in current.items()}
    for key, (mine, value) in pairs.items():
        if (mine.shape, mine.dtype) != (value.shape, value.dtype):
            raise RunError(
                f"the state to load has `{key}` as {_kind(value)}, but the plan's is {_kind(mine)}"
            )
    for mine, value in pairs.values():
        mine.copy_(value)


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on this rank"


def local(value: Tensor) -> Tensor:
    """This rank's part of a tensor of any form."""
    for inner in ("to_local", "local_shards"):
        if hasattr(value, inner):
            value = getattr(value, inner)()
        if isinstance(value, list):
            value = value[0]
    return value
