"""Sizes that are small and tell dims and axes apart, for evaluating a program.

The program at other sizes: names, ops and placements are untouched, so whatever they say is
evaluated.
"""

from collections.abc import Iterable, Sequence
from itertools import count
from math import lcm, prod, remainder

from attrs import evolve

from ..config.settings import Cluster
from ..ir import BATCH, MICROBATCHES, SEQUENCE, Attr, Claim, Dim, Op, Program, map_ops, walk_regions
from ..ops import OPS, moves_positions, roles
from ..ops.attention import window_of
from ..ops.fused_parallel_loss import LINEAR_PARTS, LOGIT_PARTS
from ..ops.routers import AUX_LOSS, TOP, with_padding
from .pipeline.shrink import covers, few_layers, few_microbatches, params_on_several_ranks, recut
from .sharded_state import flat_size

Sizes = dict[str, int]

LAYERS_OF_STAGE = {1: (2, 2, 3, 3), 2: (2, 2, 1, 1), 3: (1, 2, 2, 3)}
"""How often loops layer, by the size of the mesh's first axis: microbatches, and three repeats by
layers.

On both meshes together no two repeats have as many layers, so that one is not another; and seldom,
for they multiply.
"""


def meshes(program: Program) -> list[Sizes]:
    """Two meshes where every axis is once 2 and once 3; an axis of size 1 stays, for it has rules
    of its own.

    A pipeline's may be 4 or more.
    """
    first = {axis.name: 1 for axis in program.axes}
    second = dict(first)
    wide = [axis.name for axis in program.axes if axis.size > 1]
    for i, name in enumerate(wide):
        first[name], second[name] = (2, 3) if i % 2 == 0 else (3, 2)
    if not wide:
        return [_with_owners(program, first)]
    return [_with_owners(program, first), _with_owners(program, second)]


def _with_owners(program: Program, axes: Sizes) -> Sizes:
    """With more ranks of a pipeline, where so few do not share parameters as the plan's ranks do,
    or, if they are more than two, do not hand on all that crosses the plan's cuts.
    """
    pipeline = program.pipeline
    if not pipeline:
        return axes
    few = axes[pipeline.axis]
    for ranks in range(few, max(4, program.axis(pipeline.axis).size) + 1):
        sizes = axes | {pipeline.axis: ranks}
        cut = resize(program, sizes, small(program, sizes))
        if not cut.pipeline or params_on_several_ranks(cut.pipeline) != params_on_several_ranks(
            pipeline
        ):
            continue
        if ranks == 2 or covers(program, cut):
            return sizes
    return axes | {pipeline.axis: program.axis(pipeline.axis).size}


def resize(program: Program, axes: Sizes, dims: Sizes) -> Program:
    """The program at other sizes."""
    ranks = prod(axes[claim.axis] for claim in program.claims if claim.dim == BATCH)
    microbatch = dims[BATCH] // ranks
    flat = {bucket.dim for bucket in program.buckets}
    sized = list[Dim]()
    for dim in program.dims:
        sized.append(dim if dim.name in flat else _with_size(dim, dims[dim.name]))
    small = evolve(
        program,
        axes=tuple(evolve(axis, size=axes[axis.name]) for axis in program.axes),
        dims=tuple(sized),
        train=evolve(
            program.train,
            seq=dims[SEQUENCE],
            microbatch=microbatch,
            global_batch=dims[BATCH] * dims[MICROBATCHES],
        ),
        cluster=Cluster(),  # the plan's machines are for its own mesh
    )
    groups = _groups(program, microbatch)
    if changed := groups | _windows(program, dims[SEQUENCE]) | _shifts(program):
        small = evolve(small, region=map_ops(small.region, lambda op: changed.get(op, op)))
    small = with_padding(small)
    sizes = {bucket.dim: flat_size(small, bucket) for bucket in program.buckets}
    sized = [_with_size(dim, sizes.get(dim.name, dim.size)) for dim in small.dims]
    small = evolve(small, dims=tuple(sized))
    if not program.pipeline or not program.pipeline.schedule:
        return small
    return recut(small, program, program.pipeline)


def _groups(program: Program, microbatch: int) -> dict[Op, Op]:
    """Losses of groups of sequences, with groups of at most two."""
    changed = dict[Op, Op]()
    for op in program.ops:
        if op.kind == AUX_LOSS.name:
            size = min(int(str(op.get("sequences"))), 2)
            assert microbatch % size == 0, "verify: a group over several microbatches"
            changed[op] = _with_attribute(op, "sequences", size)
    return changed


def _windows(program: Program, seq: int) -> dict[Op, Op]:
    """Ops with a window shorter than the sequence, with one of as large a share of a sequence of
    `seq`.

    Where ranks have all of the sequence it is half of that at least, so that documents within it
    matter.  A window of one token stays.
    """
    whole = program.size(SEQUENCE)
    least = max(2, seq // 2)
    if any(claim.dim == SEQUENCE and claim.split for claim in program.claims):
        least = 2
    changed = dict[Op, Op]()
    for op in program.ops:
        window = window_of(op)
        if 1 < window < whole:
            share = min(max(least, round(window * seq / whole)), seq - 1)
            changed[op] = _with_attribute(op, "window", float(share))
    return changed


def _shifts(program: Program) -> dict[Op, Op]:
    """Circular shifts of the sequence by as far or further than it is long, by what is left of
    them.
    """
    size = program.size(SEQUENCE)
    changed = dict[Op, Op]()
    for op in program.ops:
        if moves_positions(op):
            left = remainder(int(str(op.get("by"))), size)
            if left != op.get("by"):
                changed[op] = _with_attribute(op, "by", round(left))
    return changed


def _with_attribute(op: Op, name: str, value: Attr) -> Op:
    attrs = list[tuple[str, Attr]]()
    for key, before in op.attrs:
        attrs.append((key, value if key == name else before))
    return evolve(op, attrs=tuple(attrs))


def _with_size(dim: Dim, size: int) -> Dim:
    """The dim at another size; a padded one keeps one element of padding."""
    valid = size
    if dim.valid < dim.size:
        valid = size - 1
    return evolve(dim, size=size, valid=valid)


def small(program: Program, axes: Sizes) -> Sizes:
    """Sizes of all dims at which the axes divide them and, as far as can be, no two are the
    same.
    """
    return _Sizes(program, axes).choose()


class _Sizes:
    def __init__(self, program: Program, axes: Sizes) -> None:
        self._program, self._axes = program, axes
        self._claims: dict[str, list[Claim]] = {}
        for claim in program.claims:
            self._claims.setdefault(claim.dim, []).append(claim)
        self._flat = {bucket.dim for bucket in program.buckets}
        self._loops = [MICROBATCHES]
        for region in walk_regions(program.region.body):
            if region.dim and region.dim not in self._loops:
                self._loops.append(region.dim)
        self._chosen = {*self._program.choices.values()}
        self._groups: dict[str, set[str]] = {}  # query heads → their key/value heads
        self._parts: dict[str, tuple[str, ...]] = {}  # what is joined → its parts
        self._turned: dict[str, int] = {}  # dims that `rope` rotates → of how many elements
        groups, sequences = list[int](), [1]
        for op in program.ops:
            self._note_roles(op)
            self._parts |= OPS[op.kind].joins(program.operands(op), op)
            if op.kind == TOP.name:
                groups.append(int(str(OPS[op.kind].get(op, "groups"))))
            elif op.kind == AUX_LOSS.name:
                sequences.append(_sequences(program, op))
        self._of_experts = lcm(*groups)
        self._sequences = max(sequences)
        self._even = {*self._turned}
        for dim in self._turned:
            self._even.update(self._parts.get(dim, ()))
        self._shares = _shares(program.ops)
        self._sizes: Sizes = {}

    def _note_roles(self, op: Op) -> None:
        op_roles = roles(op, self._program.types)
        if op_roles.heads != op_roles.kv_heads:
            self._groups.setdefault(op_roles.heads, set()).add(op_roles.kv_heads)
        if op_roles.rotated:
            before = self._turned.get(op_roles.rotated, 0)
            self._turned[op_roles.rotated] = max(before, _rotated_elements(op))

    def choose(self) -> Sizes:
        dims = [dim for dim in self._program.dims if dim.name not in self._flat]
        for dim in sorted(dims, key=self._layer):
            self._sizes[dim.name] = self._size(dim)
        return self._sizes

    def _layer(self, dim: Dim) -> tuple[int, int]:
        """Tokens first, for they multiply everything; query heads after key/value heads, whose
        multiple they are, and joined dims after their parts.
        """
        if dim.name == BATCH:
            return 0, 0
        if dim.name == SEQUENCE:
            return 1, 0
        if dim.name in self._parts or dim.twin:
            return 4, dim.size
        if dim.name in self._groups or dim.chosen:
            return 3, dim.size
        return 2, 0

    def _layers(self, loop: str) -> int:
        """How often a loop layers; where stages are cut, often enough for their layers and rows."""
        first = next((size for size in self._axes.values() if size > 1), 1)
        few = LAYERS_OF_STAGE[min(first, 3)][self._loops.index(loop) % 4]
        pipeline = self._program.pipeline
        if not pipeline or not pipeline.schedule:
            return few
        if loop == MICROBATCHES:
            return few_microbatches(pipeline, self._axes[pipeline.axis])
        return max(few, few_layers(self._program, pipeline, self._axes[pipeline.axis]).get(loop, 0))

    def _is_apart(self, few: str) -> bool:
        """Whether key/value heads lie over other axes than query heads that use them."""
        for heads, all_few in self._groups.items():
            if few in all_few and self._axes_of(heads) != self._axes_of(few):
                return True
        return False

    def _axes_of(self, dim: str) -> list[str]:
        return [claim.axis for claim in self._claims.get(dim, []) if claim.split]

    def _size(self, dim: Dim) -> int:
        if self._program.pipeline and dim.name in self._program.pipeline.dims:
            return self._layers(dim.name)
        if dim.name in self._shares:
            return prod(self._axes[axis] for axis in self._shares[dim.name])
        if dim.twin:
            return self._sizes[dim.twin]
        if dim.name in self._chosen:
            return min(dim.size, 2)
        claims = self._claims.get(dim.name, [])
        unit = self._parts_of_axes(claims)
        if dim.name == BATCH:
            unit *= self._sequences
        if dim.size == 1 or not all(claim.split for claim in claims) or self._is_apart(dim.name):
            return unit  # few heads: as many as the factors that they fill, one on each rank
        if parts := self._parts.get(dim.name):
            return sum(self._sizes[part] for part in parts)
        if dim.name in self._loops:
            return self._layers(dim.name)
        if few := self._groups.get(dim.name):
            return self._multiple_of_heads(dim, unit, few)
        return self._distinct(dim, unit)

    def _parts_of_axes(self, claims: Iterable[Claim]) -> int:
        """The number of equal parts that axes cut a dim into, chunks counted."""
        count = 1
        for claim in claims:
            if claim.split:
                # ranks with two chunks each need twice as many parts
                count *= self._axes[claim.axis] * (1 + claim.zigzag)
        return count

    def _multiple_of_heads(self, dim: Dim, unit: int, few: Iterable[str]) -> int:
        """The number of query heads for key/value heads: more than one for each where the plan
        has more.
        """
        units = [unit]
        for kv_heads in few:
            size = self._sizes[kv_heads]
            if dim.size > self._program.size(kv_heads):
                size *= 2
            units.append(size)
        return lcm(*units)

    def _distinct(self, dim: Dim, unit: int) -> int:
        """The least multiple of `unit` that is large enough and that no other dim has."""
        if dim.name in self._even:
            unit = lcm(unit, 2)
        groups = self._of_experts if dim.chosen else 1
        unit = lcm(unit, groups)
        if dim.valid < dim.size:
            unit *= 2  # so that no rank holds padding alone
        taken = {size for name, size in self._sizes.items() if name not in self._loops}
        alone = dim.name == SEQUENCE and self._sizes[BATCH] == 1
        # two of three tokens have labels, one has none
        least = 3 if alone else 2 + self._turned.get(dim.name, 0)
        if groups > 1:
            least = max(least, 2 * groups)  # two experts in each
        return next(unit * k for k in count(1) if unit * k >= least and unit * k not in taken)


def bucket_dims(program: Program) -> set[str]:
    """The dims that no model has: the flat dims of buckets, and dims with one element on each
    rank.
    """
    return {bucket.dim for bucket in program.buckets} | _shares(program.ops).keys()


def _shares(ops: Sequence[Op]) -> dict[str, tuple[str, ...]]:
    """The dims with one element per rank, and their axes."""
    shares = dict[str, tuple[str, ...]]()
    for op in ops:
        if op.kind in (LINEAR_PARTS.name, LOGIT_PARTS.name):
            dim = str(op.get("as"))
            shares[dim] = op.outputs[1].type.axes_of(dim)
    return shares


def _sequences(program: Program, op: Op) -> int:
    """How many sequences a rank's microbatch needs: groups of two, if a group is one of
    several; two groups so.
    """
    size = int(str(op.get("sequences")))
    needed = min(size, 2)
    if 1 < size < program.train.microbatch:
        needed *= 2
    return needed


def _rotated_elements(op: Op) -> int:
    """The number of the last dim's elements that `rope` rotates, if not all; the dim must have
    more.
    """
    few = OPS[op.kind].get(op, "dims")
    assert isinstance(few, int | float), "verify: rope: dims is no number"
    return int(few)
