"""How much each rank sends in a step, over which links, and in the units of the ZeRO paper.

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


def whole(each: Collective) -> int:
    """The elements of the whole tensor of a call: all ranks' parts where these are gathered,
    else what goes in.
    """
    return each.elements * (each.ranks if each.op == "all_gather" else 1)


def sent(each: Collective) -> int:
    """The bytes that a rank sends in all calls of a step, as rings send them (Patarasuk and
    Yuan 2009).
    """
    if each.op in PASSED:
        return each.count * each.bytes * PASSED[each.op]
    moved = each.count * HALVES[each.op] * whole(each) * ITEM_BYTES[each.dtype]
    return moved * (each.ranks - 1) // each.ranks


def crosses(
    program: Program, axes: tuple[str, ...], ranks_per_node: int, among: Sequence[int] = ()
) -> bool:
    """Whether some group over `axes` has ranks on several nodes; the ranks of a node are
    consecutive.

    Ranks count the mesh's places, its last axis innermost.  A group may be `among` some places of
    one axis.
    """
    origins, first, last, stride = [0], 0, 0, 1
    for axis in reversed(program.axes):
        if axis.name in axes:
            first += min(among, default=0) * stride
            last += max(among, default=axis.size - 1) * stride
        else:
            origins = [origin + place * stride for place in range(axis.size) for origin in origins]
        stride *= axis.size
    return any((it + first) // ranks_per_node != (it + last) // ranks_per_node for it in origins)


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

    `program` is a rank's of a pipeline.
    """
    alike: dict[tuple[str, ...], list[Bucket]] = {}
    # a rank of a pipeline may have none of one
    held = (bucket for bucket in program.buckets if bucket.params)
    for bucket in sorted(held, key=lambda it: not it.layers):
        alike.setdefault(bucket.layers, []).append(bucket)
    return tuple(_volume(program, layers, buckets, listed) for layers, buckets in alike.items())


def _volume(
    program: Program, layers: tuple[str, ...], buckets: list[Bucket], listed: Sequence[Collective]
) -> Volume:
    params = {name for bucket in buckets for name in bucket.params}
    totals = {"parameters": 0, "gradients": 0}
    for each in listed:
        if each.bucket in {bucket.name for bucket in buckets}:
            totals[each.use] += each.count * HALVES[each.op] * whole(each)
    elements = sum(program.elements(param.type) for param in program.params if param.name in params)
    return Volume(layers, len(buckets), elements, totals["parameters"], totals["gradients"])
