"""Sizes that are small and tell dims and axes apart, for evaluating a program.

The program at other sizes: names, ops and placements are untouched, so whatever they say is
evaluated.
"""

from collections.abc import Sequence
from itertools import count
from math import lcm, prod, remainder

from attrs import evolve

from ..config.settings import Cluster
from ..ir import BATCH, MICROBATCHES, SEQUENCE, Attr, Claim, Dim, Op, Program, map_ops, walk_regions
from ..ops import OPS, moves_positions, roles
from ..ops.attention import window_of
from ..ops.fused_parallel_loss import LINEAR_PARTS, LOGIT_PARTS
from ..ops.routers import AUX_LOSS, TOP, with_padding
from .pipeline.shrink import covers, few_layers, few_microbatches, recut, shared
from .sharded_state import flat_size

Sizes = dict[str, int]

LAYERS_OF_STAGE = {1: (2, 2, 3, 3), 2: (2, 2, 1, 1), 3: (1, 2, 2, 3)}
"""How often loops layer, by the size of the mesh's first axis: microbatches, and three repeats by
layers.

On both meshes together no two repeats have as many layers, so that one is not another; and seldom,
for they multiply.
"""


def meshes(program: Program) -> list[Sizes]:
    """Two meshes in which every axis is once 2 and once 3; an axis of size 1 stays, for it has
    rules of its own.

    A pipeline's may be 4 or more.
    """
    wide = [axis.name for axis in program.axes if axis.size > 1]
    pairs = [(2, 3) if i % 2 == 0 else (3, 2) for i in range(len(wide))]
    one = {axis.name: 1 for axis in program.axes}
    both = [one | {name: pair[k] for name, pair in zip(wide, pairs, strict=True)} for k in (0, 1)]
    return [_with_owners(program, axes) for axes in (both if wide else both[:1])]


def _with_owners(program: Program, axes: Sizes) -> Sizes:
    """With more ranks of a pipeline, where so few do not share parameters as the plan's ranks do,
    or, if they are more than two, do not hand on all that crosses the plan's cuts.
    """
    pipeline = program.pipeline
    if not pipeline:
        return axes
    few = axes[pipeline.axis]
    for ranks in range(few, max(4, program.axis(pipeline.axis).size) + 1):
        found = axes | {pipeline.axis: ranks}
        cut = resized(program, found, small(program, found))
        if (
            cut.pipeline
            and shared(cut.pipeline) == shared(pipeline)
            and (ranks == 2 or covers(program, cut))
        ):
            return found
    return axes | {pipeline.axis: program.axis(pipeline.axis).size}


def resized(program: Program, axes: Sizes, dims: Sizes) -> Program:
    """The program at other sizes."""
    ranks = prod(axes[claim.axis] for claim in program.claims if claim.dim == BATCH)
    batch, global_batch = dims[BATCH] // ranks, dims[BATCH] * dims[MICROBATCHES]
    flat = {bucket.dim for bucket in program.buckets}
    small = evolve(
        program,
        axes=tuple(evolve(axis, size=axes[axis.name]) for axis in program.axes),
        dims=tuple(
            dim if dim.name in flat else _with_size(dim, dims[dim.name]) for dim in program.dims
        ),
        train=evolve(
            program.train, seq=dims[SEQUENCE], microbatch=batch, global_batch=global_batch
        ),
        cluster=Cluster(),  # the plan's machines are for its own mesh
    )
    if changed := _groups(program, batch) | _windows(program, dims[SEQUENCE]) | _shifts(program):
        small = evolve(small, region=map_ops(small.region, lambda op: changed.get(op, op)))
    small = with_padding(small)
    sizes = {bucket.dim: flat_size(small, bucket) for bucket in program.buckets}
    small = evolve(
        small, dims=tuple(_with_size(dim, sizes.get(dim.name, dim.size)) for dim in small.dims)
    )
    return (
        recut(small, program, program.pipeline)
        if program.pipeline and program.pipeline.schedule
        else small
    )


def _groups(program: Program, microbatch: int) -> dict[Op, Op]:
    """Losses of groups of sequences, with groups of at most two."""
    found = {
        op: min(int(str(op.get("sequences"))), 2) for op in program.ops if op.kind == AUX_LOSS.name
    }
    assert all(microbatch % size == 0 for size in found.values()), (
        "verify: a group over several microbatches"
    )
    return {op: _with_attribute(op, "sequences", size) for op, size in found.items()}


def _windows(program: Program, seq: int) -> dict[Op, Op]:
    """Ops with a window shorter than the sequence, with one of as large a share of a sequence of
    `seq`.

    Where ranks have all of the sequence it is half of that at least, so that documents within it
    matter.  A window of one token stays.
    """
    whole = program.size(SEQUENCE)
    least = (
        2
        if any(claim.dim == SEQUENCE and claim.split for claim in program.claims)
        else max(2, seq // 2)
    )
    found = {op: window_of(op) for op in program.ops if 1 < window_of(op) < whole}
    shares = {
        op: float(min(max(least, round(window * seq / whole)), seq - 1))
        for op, window in found.items()
    }
    return {op: _with_attribute(op, "window", share) for op, share in shares.items()}


def _shifts(program: Program) -> dict[Op, Op]:
    """Circular shifts of the sequence by as far or further than it is long, by what is left of
    them.
    """
    size = program.size(SEQUENCE)
    left = {
        op: remainder(int(str(op.get("by"))), size) for op in program.ops if moves_positions(op)
    }
    return {
        op: _with_attribute(op, "by", round(by)) for op, by in left.items() if by != op.get("by")
    }


def _with_attribute(op: Op, name: str, value: Attr) -> Op:
    return evolve(
        op, attrs=tuple((key, value if key == name else before) for key, before in op.attrs)
    )


def _with_size(dim: Dim, size: int) -> Dim:
    """The dim at another size; a padded one keeps one element of padding."""
    return evolve(dim, size=size, valid=size - 1 if dim.valid < dim.size else size)


def small(program: Program, axes: Sizes) -> Sizes:
    """Sizes of all dims at which the axes divide them and, as far as can be, no two are the
    same.
    """
    return _Sizes(program, axes).chosen()


class _Sizes:
    def __init__(self, program: Program, axes: Sizes) -> None:
        self._program, self._axes = program, axes
        self._claims: dict[str, list[Claim]] = {}
        for claim in program.claims:
            self._claims.setdefault(claim.dim, []).append(claim)
        self._flat = {bucket.dim for bucket in program.buckets}
        loops = (region.dim for region in walk_regions(program.region.body) if region.dim)
        self._loops = [*dict.fromkeys((MICROBATCHES, *loops))]
        ops = program.ops
        each = [(op, roles(op, program.types)) for op in ops]
        self._groups: dict[str, set[str]] = {}
        for _, own in each:
            if own.heads != own.kv_heads:
                self._groups.setdefault(own.heads, set()).add(own.kv_heads)
        joins = [OPS[op.kind].joins(program.operands(op), op) for op in ops]
        self._parts = {dim: parts for each in joins for dim, parts in each.items()}
        few = sorted((_turned(op), own.rotated) for op, own in each if own.rotated)
        self._turned = {dim: most for most, dim in few}
        self._chosen = {*self._program.choices.values()}
        tops = (OPS[op.kind].get(op, "groups") for op in ops if op.kind == TOP.name)
        self._of_experts = lcm(*(int(str(groups)) for groups in tops))
        self._even = {
            *self._turned,
            *(part for dim in self._turned for part in self._parts.get(dim, ())),
        }
        self._shares = _shares(ops)
        self._sequences = max(
            (_sequences(program, op) for op in ops if op.kind == AUX_LOSS.name), default=1
        )
        self._sizes: Sizes = {}

    def chosen(self) -> Sizes:
        dims = [dim for dim in self._program.dims if dim.name not in self._flat]
        for dim in sorted(dims, key=self._layer):
            self._sizes[dim.name] = self._size(dim)
        return self._sizes

    def _layer(self, dim: Dim) -> tuple[int, int]:
        """Tokens first, for they multiply everything; query heads after key/value heads, which they
        are a multiple of, and what is joined after its parts."""
        later = (
            4
            if dim.name in self._parts or dim.twin
            else 3
            if dim.name in self._groups or dim.chosen
            else 2
        )
        layer = 0 if dim.name == BATCH else 1 if dim.name == SEQUENCE else later
        return layer, dim.size if layer > 2 else 0

    def _layers(self, loop: str) -> int:
        """How often a loop layers; where stages are cut, often enough for their layers and rows."""
        first = next((size for size in self._axes.values() if size > 1), 1)
        few, pipeline = (
            LAYERS_OF_STAGE[min(first, 3)][self._loops.index(loop) % 4],
            self._program.pipeline,
        )
        if not pipeline or not pipeline.schedule:
            return few
        if loop == MICROBATCHES:
            return few_microbatches(pipeline, self._axes[pipeline.axis])
        return max(few, few_layers(self._program, pipeline, self._axes[pipeline.axis]).get(loop, 0))

    def _is_apart(self, few: str) -> bool:
        """Whether key/value heads lie over other axes than query heads that use them."""
        users = [heads for heads, all_few in self._groups.items() if few in all_few]
        return any(self._axes_of(heads) != self._axes_of(few) for heads in users)

    def _axes_of(self, dim: str) -> list[str]:
        return [claim.axis for claim in self._claims.get(dim, []) if claim.split]

    def _size(self, dim: Dim) -> int:
        claims = self._claims.get(dim.name, [])
        unit = prod(self._axes[claim.axis] * (1 + claim.zigzag) for claim in claims if claim.split)
        if dim.name == BATCH:
            unit *= self._sequences
        if self._program.pipeline and dim.name in self._program.pipeline.dims:
            return self._layers(dim.name)
        if dim.name in self._shares:
            return prod(self._axes[axis] for axis in self._shares[dim.name])
        if dim.twin:
            return self._sizes[dim.twin]
        if dim.name in self._chosen:
            return min(dim.size, 2)
        if dim.size == 1 or not all(claim.split for claim in claims) or self._is_apart(dim.name):
            return unit  # few heads: as many as the factors that they fill, one on each rank
        if parts := self._parts.get(dim.name):
            return sum(self._sizes[part] for part in parts)
        if dim.name in self._loops:
            return self._layers(dim.name)
        if few := self._groups.get(dim.name):
            return lcm(
                unit,
                *(
                    self._sizes[each] * (2 if dim.size > self._program.size(each) else 1)
                    for each in few
                ),
            )
        unit = lcm(unit, 2) if dim.name in self._even else unit
        groups = self._of_experts if dim.chosen else 1
        unit = lcm(unit, groups)
        unit = 2 * unit if dim.valid < dim.size else unit  # so that no rank holds padding alone
        taken = {size for name, size in self._sizes.items() if name not in self._loops}
        alone = dim.name == SEQUENCE and self._sizes[BATCH] == 1
        # two of three tokens have labels, one has none
        least = 3 if alone else 2 + self._turned.get(dim.name, 0)
        least = max(least, 2 * groups if groups > 1 else 0)  # two experts in each
        return next(unit * k for k in count(1) if unit * k >= least and unit * k not in taken)


def made(program: Program) -> set[str]:
    """The dims that no model has: the flat ones of buckets, and those of what each rank has one
    of.
    """
    return {bucket.dim for bucket in program.buckets} | _shares(program.ops).keys()


def _shares(ops: Sequence[Op]) -> dict[str, tuple[str, ...]]:
    """The dims with one element per rank, and their axes."""
    parted = [op for op in ops if op.kind in (LINEAR_PARTS.name, LOGIT_PARTS.name)]
    pairs = ((str(op.get("as")), op.outputs[1].type) for op in parted)
    return {dim: type.axes_of(dim) for dim, type in pairs}


def _sequences(program: Program, op: Op) -> int:
    """How many sequences a rank's microbatch needs: groups of two, if a group is one of
    several; two groups so.
    """
    size = int(str(op.get("sequences")))
    return min(size, 2) * (2 if 1 < size < program.train.microbatch else 1)


def _turned(op: Op) -> int:
    """The number of the last dim's elements that `rope` rotates, if not all; the dim must have
    more.
    """
    few = OPS[op.kind].get(op, "dims")
    assert isinstance(few, int | float), "verify: rope: dims is no number"
    return int(few)
