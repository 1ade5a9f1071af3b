"""Flat parameters: the parameters of one layer side by side, gathered when the model needs them,
with their gradients.

Parameters and gradients are views, so that one collective gathers or reduces, and one kernel
updates, them all.  Gathers are begun ahead of their use and go on while the model computes; who
uses the weights waits for them first.

Non-goals: where what lies (`layout`), whose memory it is (`bucket_memory`), when to gather
(`flat_param_group`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, pairwise
from typing import Any, cast

from torch import Tensor, nn

from ..comm import c10d
from ..comm.mesh import Axis, Copies, End, Mesh, Role
from ..ops.fused_linear import join
from .buckets import Bucket
from .grad_reduction import Accumulate, Reductions
from .layout import Layout, Piece
from .parameters import Spec, initialise


@dataclass(frozen=True, slots=True)
class Record:
    """This rank's part of one tensor: some rows of its shard of the whole, whose first index
    there is `offset`.
    """

    key: str
    spec: Spec
    offset: tuple[int, ...]
    local: Tensor


@dataclass(frozen=True, slots=True)
class Buffers:
    """The memory of a flat parameter.

    unsharded  the weights as the model computes with them, of all ranks
    shard      this rank's part of the weights, which gathers send: memory of its own, or a part of
               `unsharded`
    gradient   the gradient of record: of all, or with `shard_gradients` of this rank's part
    master     what the optimizer updates: `shard`, or a copy in another dtype
    slots      the optimizer's own, of this rank's part
    """

    unsharded: Tensor
    shard: Tensor
    gradient: Tensor
    master: Tensor
    slots: Mapping[str, Tensor]


class FlatParam:
    """One layer of a bucket, a chunk, or the whole of one.

    `place` is the layer's index in each repeat, or the stages that have a chunk; buffers are
    gathered in the order of places.  `before` and `after` are the layers around this one;
    `prefetch` of them are gathered ahead of their use.  The weights of each product in `products`
    form one matrix.
    """

    def __init__(
        self,
        place: tuple[int, ...],
        layout: Layout,
        mesh: Mesh,
        bucket: Bucket,
        buffers: Buffers,
        reductions: Reductions,
        accumulate: Accumulate,
        products: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self.place, self.layout, self.mesh = place, layout, mesh
        self.bucket, self.buffers = bucket, buffers
        self.reductions, self.accumulate = reductions, accumulate
        self.shard_axis = mesh.axis(*bucket.shard_axes)
        self.reduce_axis = mesh.axis(*bucket.reduce_axes) if bucket.reduce_axes else None
        # where ranks hold other parts or parameters
        self.apart = {*bucket.shard_axes, *filter(None, [bucket.stages])}
        self.is_mixed = buffers.master.dtype != buffers.unsharded.dtype
        self.resharded = bucket.reshard_after_forward and self.shard_axis.size > 1
        self.before: FlatParam | None = None
        self.after: FlatParam | None = None
        self.backwards_left = 0  # microbatches whose backward has not come by
        # under way: its work, axis, line of the program, end
        self._gather: tuple[Any, Axis, Any, End] | None = None
        self._passing: Tensor | None = None  # the gradient of one microbatch
        self.parameters = dict(self._parameters())
        for names in products:
            if names[0] in self.parameters:
                self._join(names)
        self.reshard()  # memory that views cannot be made without

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, by name: views of the weights, whose gradients arrive in
        `whole_gradient`.
        """
        # `data`, whose versions autograd counts apart: a gather in backward brings back the values
        # of forward.
        weights = self.buffers.unsharded.data
        for piece in self.layout.pieces:
            parameter = nn.Parameter(piece.view(weights))
            if self.is_mixed or self.bucket.shard_gradients:
                cast(Any, parameter).register_post_accumulate_grad_hook(
                    self._accumulator(piece.view)
                )
            else:
                parameter.grad = piece.view(self.buffers.gradient)  # autograd accumulates in place
            yield piece.name, parameter

    def _join(self, names: Sequence[str]) -> None:
        """Gives `fused_linear` neighbouring parameters, whose rows have one length, as one
        matrix.
        """
        pieces = [piece for piece in self.layout.pieces if piece.name in names]
        first, last = pieces[0], pieces[-1]
        assert [piece.name for piece in pieces] == [*names], (
            f"flat: {names} of one product lie in another order"
        )
        assert {piece.shape[1:] for piece in pieces} == {(first.row,)}, (
            f"flat: {names} differ in their rows"
        )
        assert all(a.stop == b.start for a, b in pairwise(pieces)), (
            f"flat: {names} are no neighbours"
        )
        join(
            self.parameters[first.name],
            self.buffers.unsharded.data[first.start : last.stop].view(-1, first.row),
        )

    # ---- weights

    @property
    def is_freed(self) -> bool:
        """Whether the weights have no memory: no gather has been begun since they were freed."""
        return self.buffers.unsharded.untyped_storage().nbytes() == 0

    def begin_unshard(self, axis: Axis, line: Any, end: End) -> None:
        """Begins to gather the weights."""
        if self.is_freed:
            reserve(self.buffers.unsharded)
        work = c10d.begin_all_gather(self.buffers.unsharded, self.buffers.shard, axis.group)
        self._gather = work, axis, line, end

    def wait_for_unshard(self) -> None:
        """Waits for the gather that was begun, if one was: from here on the weights may be used."""
        if self._gather is None:
            return
        (work, axis, line, end), self._gather = self._gather, None
        work.wait()
        axis.show_to_watch(self.buffers.unsharded, end, line)

    def unshard(self, line: Any, end: End) -> None:
        """Waits for the weights.  Where they come and go, first begins to gather the next
        layers'.
        """
        if self.resharded:
            for layer in self._upcoming(backwards=end == "result in backward"):
                if layer.is_freed:
                    layer.begin_unshard(layer.shard_axis, line, end)
        self.wait_for_unshard()

    def _upcoming(self, backwards: bool) -> Iterator["FlatParam"]:
        """This layer and the next ones, whose gathers should be under way when it is used."""
        layer: FlatParam | None = self
        for _ in range(1 + self.bucket.prefetch):
            if layer is None:
                return
            yield layer
            layer = layer.before if backwards else layer.after

    def reshard(self) -> None:
        """Frees the memory of weights that come and go, until the next gather.  All uses are
        over.
        """
        if self.resharded:
            release(self.buffers.unsharded)

    # ---- gradients

    def whole_gradient(self) -> Tensor:
        """The gradient that backward adds to; it begins with zeros; a temporary one is
        allocated when first used.
        """
        if not self.bucket.shard_gradients:
            return self.buffers.gradient
        if self._passing is None:
            self._passing = self.buffers.gradient.new_zeros(self.layout.size)
        return self._passing

    def gradient_shard(self) -> Tensor:
        """This rank's part of the gradient of record."""
        gradient = self.buffers.gradient
        if self.bucket.shard_gradients:
            return gradient
        return gradient[self.layout.own]

    def reduce_grad(self, line: Any) -> None:
        """Begins to reduce the gradient: of each microbatch with `shard_gradients`, else after
        the last one.
        """
        self.backwards_left -= 1
        if self.bucket.shard_gradients or self.backwards_left == 0:
            self.begin_reduction(line)

    def begin_reduction(self, line: Any) -> None:
        """Begins to sum the gradient, complete on this rank; later additions are another
        microbatch's.
        """
        dtype = self.bucket.reduce_dtype
        if self.bucket.shard_gradients or dtype not in (None, self.buffers.gradient.dtype):
            self.reductions.make_room()
        whole, self._passing = self.whole_gradient(), None
        sent, axes = whole.to(dtype or whole.dtype), (self.shard_axis, self.reduce_axis)
        self.reductions.begin(sent, self.layout.own, *axes, self._keep, line)

    def _keep(self, part: Tensor) -> None:
        """Puts a sum where the gradient of record is, if that is elsewhere."""
        gradient = self.gradient_shard()
        if self.bucket.shard_gradients:
            self.accumulate(gradient, part)
        elif part.dtype != gradient.dtype:
            gradient.copy_(part)

    def begin(self, microbatches: int) -> None:
        """Begins a step; gradients left by an unfinished backward are dropped."""
        self.backwards_left, self._passing = microbatches, None

    def abandon(self) -> None:
        """Ends the gather that an unfinished pass has left: it would write to memory that is
        gone.
        """
        self.wait_for_unshard()
        self.reshard()

    def _accumulator(self, view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
        """A hook that adds a parameter's gradient to its `view` of the whole, which may be
        wider, and frees it.
        """

        def hook(parameter: Tensor) -> None:
            if parameter.grad is None:
                return  # `delayed_wgrad`: backward comes by, and makes the gradient later
            self.accumulate(view(self.whole_gradient()), parameter.grad)
            parameter.grad = None

        return hook

    # ---- checkpoints and checks

    def record(self) -> Iterator[Record]:
        """The content of a checkpoint: this rank's part of every parameter and slot."""
        for piece in self.layout.pieces:
            rows = self.layout.rows(piece)
            if not rows:
                continue
            first, *others = piece.spec.offsets(self.mesh)
            offset = (first + rows.start, *others)
            master = self.layout.get_own_rows(piece, self.buffers.master)
            yield Record(piece.name, piece.spec, offset, master)
            for slot, flat in self.buffers.slots.items():
                key = f"optimizer/{slot}/{piece.name}"
                yield Record(key, piece.spec, offset, self.layout.get_own_rows(piece, flat))

    def copies(self) -> Iterator[Copies]:
        """Everything in its memory, in stretches that the same ranks hold alike."""
        flat_params: list[tuple[str, Role, Tensor]] = []
        # Optimizer state that differs spoils its parameter: it is named first.
        for slot, flat in [*self.buffers.slots.items()][::-1]:
            flat_params.append((f"{slot} of ", "state", flat))
        flat_params.append(("", "state", self.buffers.master))
        flat_params.append(("the gradient of ", "gradient", self.gradient_shard()))
        if self.is_mixed:
            flat_params.append(("the working copy of ", "working", self.buffers.shard))
        for split, group in groupby(self.layout.pieces, _axes):
            pieces = list(group)
            axis = self.mesh.without({*split, *self.apart})
            if (kept := self.layout.overlap_with_own(pieces[0].start, pieces[-1].stop)) is None:
                continue
            for what, role, flat in flat_params:
                yield Copies(flat[kept], axis, role, what, partial(self._element, kept.start))

    def _element(self, start: int, index: int) -> tuple[str, str]:
        place = self.layout.own.start + start + index
        return self.layout.piece_at(place).element(place, self.mesh)

    def initialise(self, seed: int) -> None:
        """Initial values of every parameter."""
        for piece in self.layout.pieces:
            if rows := self.layout.rows(piece):
                kept = self.layout.get_own_rows(piece, self.buffers.master)
                values = kept if kept.shape == piece.shape else kept.new_empty(piece.shape)
                initialise(values, piece.spec, self.mesh, seed, piece.name)
                kept.copy_(values[rows.start : rows.stop])

    def fill(self, value: Callable[[str, Spec], Tensor]) -> None:
        """Sets the values of every parameter: `value` gives the part of it that its spec says."""
        for piece in self.layout.pieces:
            if rows := self.layout.rows(piece):
                kept = self.layout.get_own_rows(piece, self.buffers.master)
                kept.copy_(value(piece.name, piece.spec)[rows.start : rows.stop])


def _axes(piece: Piece) -> set[str]:
    """The axes that split a parameter."""
    return {*chain.from_iterable(piece.spec.split.values())}


def reserve(x: Tensor) -> None:
    """Gives a tensor without memory its memory; its values are undefined."""
    x.untyped_storage().resize_(x.nbytes)


def release(x: Tensor) -> None:
    """Frees a tensor's memory; it and its views keep their shapes."""
    x.untyped_storage().resize_(0)
