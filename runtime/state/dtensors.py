"""The state in the form of torch's own tools: DTensors of global shapes, views of what a rank
holds.

For programs of one's own: checkpoints do without, and so without the seconds that importing DTensor
takes.
"""

from collections.abc import Iterable, Mapping

from torch import Size, Tensor, empty

from ..comm.mesh import Mesh
from ..errors import RunError, named
from .flat_param import FlatParam, Record


def views(flats: Iterable[FlatParam], mesh: Mesh) -> dict[str, Tensor]:
    """Parameters and slots by key, as far as this rank has a part of them.

    Each has a placement for every axis of the mesh, but for that of a pipeline's stages: Shard(dim)
    where a rank has a part of that dim, Replicate() where ranks hold the same.  A rank has some
    rows of a bucket that is shared out: such a DTensor is Shard(0) over its axes, and its local
    tensor, a LocalShardsWrapper, says which.  Plain tensors where no axis is left.
    """
    return {each.key: _as_global(each, flat, mesh) for flat in flats for each in flat.record()}


def _as_global(record: Record, flat: FlatParam, mesh: Mesh) -> Tensor:
    bucket, spec = flat.bucket, record.spec
    axes = tuple(axis for axis in mesh.axes if axis != bucket.stages)
    if mesh.device_mesh is None or not axes:
        return record.local
    from torch.distributed.tensor import DTensor, Replicate, Shard  # slow to import

    dim_of = {axis: dim for dim, over in spec.split.items() for axis in over} | dict.fromkeys(
        bucket.shard_axes, 0
    )
    placements = [Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in axes]
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
    """Copies values into a rank's own, which they may be.

    RunError, before anything is changed, unless they fit.
    """
    if lacking := [key for key in current if key not in values]:
        raise RunError(
            f"the state to load lacks {named(lacking)}: it is another plan's, or a part of one"
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
        value = getattr(value, inner, lambda kept=value: kept)()
        value = value[0] if isinstance(value, list) else value
    return value
