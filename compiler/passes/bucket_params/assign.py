"""Which parameters share a bucket: parameters whose gradients are reduced alike, in one place, up
to the cap.

A repeat's parameters have a bucket per layer where gradients or parameters are sharded, or where
the stack of all layers is larger than the cap; else they go with the parameters outside of repeats.
Buckets are in the order of backward, which completes their gradients in this order.  Non-goals: the
ops that move them (`comms`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count, groupby
from math import prod

from attrs import evolve, frozen

from ...analysis.param_uses import products
from ...ir import ITEM_BYTES, Bucket, Kind, Program, Type
from .param_loops import ParamLoops

SMALL = 25 << 20
"""Bytes up to which what all layers have is reduced at once, where the plan does not say (as
torch's DDP does).
"""


@frozen
class Key:
    """The properties that gradients of one bucket share: the axes they are reduced over, and the
    axes that shard them.
    """

    reduce_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    dtype: str


@frozen
class ParamUse:
    """A parameter in its step: as the model uses it, `leaf`, and its gradient `summed` over
    microbatches.
    """

    name: str
    leaf: str
    summed: str
    gradient: Type
    loops: ParamLoops | None


@frozen
class BucketGroup:
    """A bucket to be: its parameters in the order of the optimizer's groups, and the axes that
    share it out.

    `layers` are the dims of repeats whose layers have a buffer each.  Each of these is gathered
    where it is used if `reshard_after_forward`, and reduced in each microbatch if
    `shard_gradients`.
    """

    key: Key
    params: tuple[ParamUse, ...]
    layers: tuple[str, ...]
    shards: tuple[str, ...]
    reshard_after_forward: bool
    shard_gradients: bool
    name: str = ""

    @property
    def dim(self) -> str:
        """The flat dim."""
        return f"flat_{self.identifier}"

    @property
    def identifier(self) -> str:
        """The name as a part of other names: of dims and values."""
        return self.name.replace(".", "_")

    @property
    def reduce_axes(self) -> tuple[str, ...]:
        """The axes over which the gradient is reduced but not scattered."""
        return tuple(axis for axis in self.key.reduce_axes if axis not in self.shards)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return tuple(param.name for param in self.params)

    @property
    def loops(self) -> ParamLoops:
        """Where its layers are."""
        loops = self.params[0].loops
        assert loops, "fuse_buckets: a bucket of layers without loops"
        return loops


def make_groups(program: Program, params: Iterable[ParamUse]) -> list[BucketGroup]:
    """The buckets, in the order that backward completes their gradients."""
    order = _order(program)
    alike: dict[tuple[Key, object, object], list[ParamUse]] = {}
    for param in sorted(params, key=lambda param: order[param.name]):
        place = param.loops and param.loops.place
        # by whatever pattern
        apart = (
            evolve(program.state_of(param.name), param_patterns=()),
            sharing(program, param.name),
        )
        alike.setdefault((_key(param.gradient), apart, place), []).append(param)
    without_layers: dict[object, list[ParamUse]] = {}
    buckets: list[BucketGroup] = []
    for (key, apart, _), members in alike.items():
        if layers := _layers(program, key, members):
            buckets += _groups_up_to_cap(program, key, members, layers)
        else:
            without_layers.setdefault((key, apart), []).extend(members)
    buckets = _by_repeat(buckets)
    for members in without_layers.values():
        members.sort(key=lambda param: order[param.name])
        buckets += _groups_up_to_cap(program, _key(members[0].gradient), members, 0)
    return _with_names(program, buckets)


def _by_repeat(groups: list[BucketGroup]) -> list[BucketGroup]:
    """The groups of each repeat together; within a repeat, the groups sharded over the same axes
    together, since they are gathered together.
    """
    places = [*dict.fromkeys(group.loops.place for group in groups)]
    shards = [*dict.fromkeys(group.shards for group in groups)]
    return sorted(
        groups, key=lambda group: (places.index(group.loops.place), shards.index(group.shards))
    )


def make_groups_as(
    program: Program, buckets: Iterable[Bucket], params: Iterable[ParamUse]
) -> list[BucketGroup]:
    """Buckets of the same parameters and layers as `buckets`, whatever their bytes are."""
    params_by_name = {param.name: param for param in params}
    groups = list[BucketGroup]()
    for bucket in buckets:
        members = [params_by_name[name] for name in bucket.params]
        group = _group(program, _key(members[0].gradient), members, len(bucket.layers))
        groups.append(evolve(group, name=bucket.name))
    return groups


def _order(program: Program) -> dict[str, tuple[int, int]]:
    """The place of each parameter: the program's order, but all weights of one product follow the
    first of them.
    """
    order = {param.name: (i, 0) for i, param in enumerate(program.params)}
    for names in products(program):
        first, _ = order[names[0]]
        for i, name in enumerate(names):
            order[name] = (first, i)
    return order


def sharing(program: Program, param: str) -> tuple[int, ...]:
    """The ranks of a pipeline among which a parameter's gradient is summed, if several hold it."""
    if not program.pipeline:
        return ()
    ranks = program.pipeline.ranks_of(param)
    return ranks if len(ranks) > 1 else ()


def _key(type: Type) -> Key:
    return Key(type.axes_in(Kind.PARTIAL), type.axes_in(Kind.SHARDED), type.dtype)


def _layers(program: Program, key: Key, params: list[ParamUse]) -> int:
    """How many repeats, one in the other, there are around a layer that has a bucket of its own; 0
    if none has.

    Stages of a pipeline gather and reduce once a step.
    """
    loops, state = params[0].loops, program.state_of(params[0].name)
    if not loops or not key.reduce_axes or program.pipeline:
        return 0
    shared = bool({*state.gradients, *state.parameters} & {*key.reduce_axes})
    large = sum(_bytes(program, param, 0) for param in params) > (program.flow.largest or SMALL)
    return len(loops.forward) if shared or large else 0


def _bytes(program: Program, param: ParamUse, layers: int) -> int:
    """The gradient's bytes on a rank, of one layer of `layers` repeats."""
    sizes = [program.size(dim) for dim in param.gradient.dims[:layers]]
    return program.elements(param.gradient) // prod(sizes) * ITEM_BYTES[param.gradient.dtype]


def _groups_up_to_cap(
    program: Program, key: Key, params: list[ParamUse], layers: int
) -> Iterator[BucketGroup]:
    """The parameters, last ones first, in as few buckets as the cap allows."""
    full: list[list[ParamUse]] = [[]]
    filled, most = 0, program.flow.largest
    for together in reversed([*_together(program, params)]):
        size = sum(_bytes(program, param, layers) for param in together)
        if full[-1] and most and filled + size > most:
            full.append([])
            filled = 0
        full[-1][:0] = together
        filled += size
    for part in full:
        yield _group(program, key, part, layers)


def _together(program: Program, params: Iterable[ParamUse]) -> Iterator[list[ParamUse]]:
    """The parameters, the weights of one product in one piece."""
    first = dict[str, str]()
    for names in products(program):
        first |= dict.fromkeys(names, names[0])
    for _, run in groupby(params, key=lambda param: first.get(param.name, param.name)):
        yield [*run]


def _group(program: Program, key: Key, params: list[ParamUse], layers: int) -> BucketGroup:
    state = program.state_of(params[0].name)
    shards = tuple(axis for axis in key.reduce_axes if axis in state.optimizer)
    dims = params[0].gradient.dims[:layers]
    # group by group
    ordered = tuple(sorted(params, key=lambda param: program.train.optimizer.place(param.name)))
    shares_layers = bool(layers and shards)
    return BucketGroup(
        key,
        ordered,
        dims,
        shards,
        reshard_after_forward=shares_layers and bool(state.parameters),
        shard_gradients=shares_layers and bool(state.gradients),
    )


def _with_names(program: Program, groups: list[BucketGroup]) -> list[BucketGroup]:
    """Each group with a name of its own: its contents, then the axes that tell it apart, then a
    number.

    For instance `layers.matrices`; `matrices` and `matrices.tp`; `matrices.tp` and `matrices.tp_2`.
    """
    words = [_contents(program, group) for group in groups]
    axes_by_word = defaultdict[str, set[tuple[str, ...]]](set)
    for group, word in zip(groups, words, strict=True):
        axes_by_word[word].add(group.key.shard_axes)
    by_identifier: dict[str, BucketGroup] = {}
    for group, word in zip(groups, words, strict=True):
        name = word
        if len(axes_by_word[word]) > 1 and group.key.shard_axes:
            name = f"{word}.{'_'.join(group.key.shard_axes)}"
        candidates = (evolve(group, name=f"{name}_{i}" if i > 1 else name) for i in count(1))
        unique = next(c for c in candidates if c.identifier not in by_identifier)
        by_identifier[unique.identifier] = unique
    return [*by_identifier.values()]


def _contents(program: Program, group: BucketGroup) -> str:
    """The kind of parameters, matrices or vectors, after the repeats that all of them are in."""
    names = group.names
    repeats, vectors = set[tuple[str, ...]](), set[bool]()
    for param in program.params:
        if param.name in names:
            repeats.add(param.type.dims[: param.stacked])
            vectors.add(len(param.type.dims) - param.stacked < 2)
    kind = "matrices"
    if len(vectors) > 1:
        kind = "params"
    elif True in vectors:
        kind = "vectors"
    if len(repeats) != 1:
        return kind
    return ".".join([*repeats.pop(), kind])
