"""How much each rank sends in a step, over what links, and in the units of the ZeRO paper.

Non-goals: time, which depends on what else runs; what is communicated (`communication`), tables
(`reports.explain`).
"""

from collections.abc import Sequence

from attrs import frozen

from ..ir import ITEM_BYTES, Bucket, Program
from .collective import Collective

HALVES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
"""How many times a ring passes (n − 1)/n of the whole on: an all-reduce scatters the sums, then
gathers them.
"""

PASSED = {"send": 1, "receive": 0, "rotate": 1}
"""How many times what goes in is sent as it is."""


def count_whole_elements(collective: Collective) -> int:
    """The elements of the whole tensor of a call: all ranks' parts where these are gathered,
    else what goes in.
    """
    if collective.op == "all_gather":
        return collective.elements * collective.ranks
    return collective.elements


def get_sent_bytes(collective: Collective) -> int:
    """The bytes that a rank sends in all calls of a step, as rings send them (Patarasuk and
    Yuan 2009).
    """
    op, ranks = collective.op, collective.ranks
    if op in PASSED:
        return collective.count * collective.bytes * PASSED[op]
    moved = (
        collective.count
        * HALVES[op]
        * count_whole_elements(collective)
        * ITEM_BYTES[collective.dtype]
    )
    return moved * (ranks - 1) // ranks


def crosses(
    program: Program, axes: tuple[str, ...], ranks_per_node: int, among: Sequence[int] = ()
) -> bool:
    """Whether some group over `axes` has ranks on several nodes; the ranks of a node are
    consecutive.

    Ranks count the mesh's places, its last axis innermost.  A group may be `among` some places of
    one axis.
    """
    # the first place of each group, and how far from it the group's first and last ranks are
    origins, first, last, stride = [0], 0, 0, 1
    for axis in reversed(program.axes):
        if axis.name in axes:
            first += min(among, default=0) * stride
            last += max(among, default=axis.size - 1) * stride
        else:
            offsets = range(0, axis.size * stride, stride)
            origins = [origin + offset for offset in offsets for origin in origins]
        stride *= axis.size
    for origin in origins:
        if (origin + first) // ranks_per_node != (origin + last) // ranks_per_node:
            return True
    return False


@frozen
class Volume:
    """Elements that `buckets` buckets of the same `layers` move in a step; a rank has `parameters`
    (Ψ) of them.

    As Rajbhandari et al. 2020, section 7, count: (n − 1)/n is taken as 1.
    """

    layers: tuple[str, ...]
    buckets: int
    parameters: int
    gathered: int
    reduced: int


def volumes(program: Program, listed: Sequence[Collective]) -> tuple[Volume, ...]:
    """The volumes of a step's collectives; buckets with layers first.

    In a pipeline, `program` is a rank's.
    """
    buckets_by_layers: dict[tuple[str, ...], list[Bucket]] = {}
    for bucket in sorted(program.buckets, key=lambda bucket: not bucket.layers):
        if bucket.params:  # a rank of a pipeline may have no part of one
            buckets_by_layers.setdefault(bucket.layers, []).append(bucket)
    layer_volumes = list[Volume]()
    for layers, buckets in buckets_by_layers.items():
        layer_volumes.append(_volume(program, layers, buckets, listed))
    return tuple(layer_volumes)


def _volume(
    program: Program, layers: tuple[str, ...], buckets: list[Bucket], listed: Sequence[Collective]
) -> Volume:
    names = {bucket.name for bucket in buckets}
    totals = {"parameters": 0, "gradients": 0}
    for collective in listed:
        if collective.bucket in names:
            elements = collective.count * HALVES[collective.op] * count_whole_elements(collective)
            totals[collective.use] += elements
    params = set[str]()
    for bucket in buckets:
        params.update(bucket.params)
    parameters = 0
    for param in program.params:
        if param.name in params:
            parameters += program.elements(param.type)
    return Volume(layers, len(buckets), parameters, totals["parameters"], totals["gradients"])
