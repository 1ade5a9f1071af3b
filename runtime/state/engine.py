"""The state engine: the state that training steps carry over, in flat buckets, with one interface.

Non-goals: no communication (the program moves whole buckets in sight, `flat_param_group` layers),
no files.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.mesh import Copies, Mesh
from . import dtensors
from .biases import Biases
from .bucket_memory import Elements, Memory, memories
from .buckets import Bucket, Holders
from .flat_param import FlatParam
from .flat_param_group import FlatParamGroup, FlatParams
from .grad_reduction import Accumulate
from .optimizers import Optimizer, Part
from .parameters import Spec, Weight
from .shards import Box
from .skips import Losses, LossScale, UpdateHold

STEP = "optimizer/step"
"""The key of the number of updates, in checkpoints and `state_dict`."""


class TrainState:
    """A model's parameters, gradients and optimizer state.

    Gives the weights that `model` declares their memory: each belongs to one group of one bucket.
    Weights compute in `dtype`.  Gradients, optimizer state and the values that the optimizer
    updates are in `master`.  Where the two types agree, weights and updated values are the same
    memory; where not, `accumulate` adds gradients up.  In float16 it keeps a loss scale too.  A
    rank updates its part of buckets that are shared out, and the other parts of the weights are
    stale until they are gathered.  `stages_of_param` are the stages of a pipeline that have each
    parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        buckets: Mapping[str, Bucket],
        optimizer: Optimizer,
        dtype: torch.dtype = torch.float32,
        master: torch.dtype = torch.float32,
        accumulate: Accumulate = Tensor.add_,
        stages_of_param: Holders | None = None,
    ) -> None:
        self.mesh = mesh
        elements = Elements(dtype, master, optimizer.slots, accumulate)
        self._memories_by_bucket = memories(
            _specs(model), buckets, stages_of_param or {}, mesh, elements
        )
        self._memories = [*chain.from_iterable(self._memories_by_bucket.values())]
        parameters = dict[str, nn.Parameter]()
        for flat in self._flats():
            parameters |= flat.parameters
        _install(model, parameters)
        self._optimizer = optimizer
        self._parts = list[Part]()
        for memory in self._memories:
            self._parts.extend(memory.parts())
        self._step = torch.zeros((), device=mesh.device)  # float32, as the fused kernels count
        self._biases = Biases(model)
        self.hold = UpdateHold(mesh.device)
        """Whether updates change nothing since a step whose values were not finite."""
        self.replicated_values: list[tuple[str, Tensor]] = []
        """All else that a run keeps, by key: the same on all ranks."""
        self.looks: list[Callable[[], None]] = []
        """Called by each update before it changes anything, when gradients are complete."""
        self.around: Callable[[Part, Callable[[Part], None]], None] = _once
        """Called for each part, with what updates it or pieces of it."""
        self._stages = next((memory.bucket.stages for memory in self._memories), "")
        self._loss_scale = LossScale(mesh.device) if dtype == torch.float16 else None
        if mesh.watch is not None:
            mesh.watch.see_state(model, [*self.copies()])

    def _flats(self) -> Iterator[FlatParam]:
        for memory in self._memories:
            yield from memory.flat_params

    def _finish(self) -> None:
        """Waits for the reductions that backward began."""
        for memory in self._memories:
            memory.reductions.finish()

    def initialise(self, seed: int) -> None:
        """Initial values of every parameter, a function of seed, name and global index."""
        for flat in self._flats():
            flat.initialise(seed)
        self._biases.zero()
        self.refresh()

    def take(self, value: Callable[[str, Spec], Tensor]) -> None:
        """Values of every parameter, given as this rank's part by its name and spec."""
        for flat in self._flats():
            flat.fill(value)
        self._biases.take(value)
        self.refresh()

    def flat_params(self, microbatches: int = 0) -> FlatParams:
        """The groups of all layers by the name of their repeat, for a step with `microbatches`
        backwards to come.

        With a pipeline, also the chunks of each bucket by the bucket's name; chunks do not count
        microbatches.
        """
        self._abandon()
        for flat in self._flats():
            flat.begin(microbatches if flat.bucket.per_layer else 0)
        flat_params = dict[str, Any]()
        for name, chunks in self._memories_by_bucket.items():
            if chunks[0].bucket.stages:
                flats = [chunk.flat_params for chunk in chunks]
                flat_params[name] = [*chain.from_iterable(flats)]
        memories_by_repeat = dict[str, list[Memory]]()
        for memory in self._memories:
            if memory.bucket.per_layer:
                memories_by_repeat.setdefault(memory.bucket.modules, []).append(memory)
        for name, repeat_memories in memories_by_repeat.items():
            groups = zip(*(memory.flat_params for memory in repeat_memories), strict=True)
            flat_params[name] = repeat_memories[0].nest_by_repeat([*map(FlatParamGroup, groups)])
        return flat_params

    def _abandon(self) -> None:
        """Ends what an unfinished pass has left under way."""
        self._finish()
        for flat in self._flats():
            flat.abandon()

    def gradients(self) -> dict[str, Any]:
        """Each bucket's flat gradient, by name: this rank's sum since the last update.  For layers
        it is this rank's part, reduced.

        With a pipeline it is a list: this rank's part of each chunk.  Parameters that several ranks
        have make one chunk: this rank's part, reduced, but not among these ranks.
        """
        self._finish()
        assert all(flat.backwards_left == 0 for flat in self._flats()), (
            "state: backward has not come by every layer"
        )
        gradients = dict[str, Any]()
        for name, bucket_memories in self._memories_by_bucket.items():
            parts = [memory.gradient() for memory in bucket_memories]
            if bucket_memories[0].is_chunk:
                gradients[name] = parts
            else:
                gradients[name] = parts[0]
        return gradients

    def loss_scale(self) -> Tensor:
        """The factor on this step's gradients (0-dim float32), for a model that computes in
        float16.
        """
        assert self._loss_scale, "state: only float16 needs a loss scale"
        return self._loss_scale.value()

    @cached_property
    def losses(self) -> Losses:
        """The losses that say whether the next one is a spike; most runs keep none."""
        return Losses(self.mesh.device)

    def loss_limit(self, deviations: float) -> Tensor:
        """The largest loss that is no spike (0-dim float32), given the losses of the steps
        before.
        """
        return self.losses.limit(deviations)

    def weights(self) -> dict[str, Tensor]:
        """By name, the flat parameters of each bucket that is shared out as a whole, as the model
        uses them.
        """
        weights = dict[str, Tensor]()
        for name, (memory, *_) in self._memories_by_bucket.items():
            if memory.bucket.shard_axes and not memory.bucket.moves:
                weights[name] = memory.flat_params[0].buffers.unsharded
        return weights

    def zero(self) -> None:
        """Zeroes every gradient."""
        self._abandon()
        for memory in self._memories:
            memory.zero()

    def update(
        self,
        lr: float,
        skip: Tensor,
        finite: Tensor | None = None,
        scale: Tensor | None = None,
        overflow: Tensor | None = None,
    ) -> None:
        """One optimizer step on the gradients, times `scale` (0-dim) if given, then zeroes them.

        `skip`, `finite` and `overflow` are 0-dim bools.  Where `skip` is true nothing else changes:
        no decay, no momentum, no step count.  Where `finite` is given and false (values are not
        finite, or a spike), nothing changes from then on, as `held` says.  Where `overflow`, of
        gradients with a loss scale, is true, the loss scale is halved, and nothing else changes.
        """
        if finite is not None:
            skip = skip | self.hold.after(finite | skip)
        if self.mesh.watch is not None:
            self.mesh.watch.see_update_begin()
        for look in [*self.looks]:
            look()
        if overflow is not None:
            assert self._loss_scale, "state: only float16 needs a loss scale"
            self._loss_scale.update(overflow, skip)
            skip = skip | overflow
        skipped = skip.float()  # read on the device, by the kernels too: no host sync decides
        self._step += 1 - skipped
        for part in self._parts:
            self.around(
                part,
                partial(self._optimizer.update, lr=lr, step=self._step, skip=skipped, scale=scale),
            )
        self.zero()
        if self.mesh.watch is not None:
            self.mesh.watch.see_update_end()

    def balance(
        self,
        biases: str,
        load: Tensor,
        rate: float,
        skip: Tensor,
        finite: Tensor,
        overflow: Tensor | None = None,
    ) -> None:
        """Moves the biases of a name pattern by `rate`, to where the step's `load` [layers,
        experts] is below its mean.

        To be called after the step's update.  Does nothing where the update has changed nothing.
        """
        skip = skip | ~finite | self.hold.holds()
        if overflow is not None:
            skip = skip | overflow
        self._biases.balance(biases, load, rate, skip)

    def _bias_axes(self, name: str) -> tuple[str, ...]:
        """The axes whose ranks hold a bias alike.  A layer's bias is on one stage of a pipeline."""
        return tuple(axis for axis in self.mesh.axes if axis != self._stages or "." not in name)

    def boxes(self) -> Iterator[Box]:
        """This rank's parts of all that outlives the run, as views: parameters (masters) by name,
        `optimizer/…`.

        Call `refresh` after writing to them.
        """
        for box, _ in self._boxes_and_holders():
            yield box

    def get_boxes_by_axes(self) -> dict[str, list[Box]]:
        """The boxes that other ranks have too, by the axes of these ranks: `dp*tp` or
        `dp*pp[0, 3]`.
        """
        shared = dict[str, list[Box]]()
        for box, holders in self._boxes_and_holders():
            if holders:
                shared.setdefault("*".join(holders), []).append(box)
        return shared

    def _boxes_and_holders(self) -> Iterator[tuple[Box, list[str]]]:
        """Each box, and the axes, longer than one rank, whose ranks all have it."""
        for memory in self._memories:
            yield from self._memory_boxes(memory)
        for name, bias in self._biases.by_name.items():
            yield self._whole_box(name, bias, self._bias_axes(name))
        for key, value in self._whole():
            yield self._whole_box(key, value, (*self.mesh.axes,))

    def _memory_boxes(self, memory: Memory) -> Iterator[tuple[Box, list[str]]]:
        """The boxes of a bucket's memory, and the axes whose ranks have each."""
        stages, among = memory.bucket.stages, memory.bucket.among
        is_first_stage = not among or self.mesh.rank(stages) == among[0]
        sharing_stages = [f"{stages}{[*among]}"] if among else []
        for flat in memory.flat_params:
            for record in flat.record():
                split = {*chain.from_iterable(record.spec.split.values()), *flat.apart}
                along = [axis for axis in self.mesh.axes if axis not in split]
                is_own = is_first_stage and self._is_first(along)
                box = Box(record.key, record.spec.shape, record.offset, record.local, is_own)
                yield box, [*self._longer(along), *sharing_stages]

    def _whole_box(self, key: str, value: Tensor, along: Sequence[str]) -> tuple[Box, list[str]]:
        """The box of a value that each rank along some axes has as a whole, and the longer of these
        axes.
        """
        box = Box(key, tuple(value.shape), (0,) * value.ndim, value, self._is_first(along))
        return box, self._longer(along)

    def _longer(self, axes: Iterable[str]) -> list[str]:
        """The axes of more than one rank."""
        return [axis for axis in axes if self.mesh.size(axis) > 1]

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """The values that every rank has as a whole, and alike, by key."""
        yield STEP, self._step
        if self._loss_scale:
            yield from self._loss_scale.get_checkpoint_values()
        yield from self.replicated_values

    def _is_first(self, axes: Iterable[str]) -> bool:
        """Whether this is the first of the ranks that differ on these axes."""
        return all(self.mesh.rank(axis) == 0 for axis in axes)

    def refresh(self) -> None:
        """Brings all that is made from the boxes up to date with them."""
        for memory in self._memories:
            memory.refresh()
        if self.mesh.watch is not None:
            self.mesh.watch.see_update_end()

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of `boxes` in the form of torch's own tools, by key: views, DTensors as
        `dtensors.views` says.

        A rank lacks the keys that it has no part of.  Collective on first use, for torch's own
        mesh.
        """
        return {
            **dtensors.views(self._flats(), self.mesh),
            **self._biases.by_name,
            **dict(self._whole()),
        }

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Takes over values in the form of `state_dict`, which may be its own views, written to.

        RunError, before anything changes, where a value lacks or does not fit.
        """
        dtensors.take(self.state_dict(), values)
        self.refresh()

    def copies(self) -> Iterator[Copies]:
        """Everything in its memory, and which ranks hold it alike."""
        for memory in self._memories:
            yield from memory.copies()
        for name, bias in self._biases.by_name.items():
            if axes := self._bias_axes(name):
                yield Copies(bias, self.mesh.axis(*axes), "state", "", partial(_element, name))
        for key, value in self._whole():
            yield Copies(
                value, self.mesh.axis(*self.mesh.axes), "state", "", partial(_name_of_value, key)
            )


def _once(part: Part, update: Callable[[Part], None]) -> None:
    """The update of a part."""
    update(part)


def _element(name: str, expert: int) -> tuple[str, str]:
    """An element of a router's biases."""
    return name, f"expert {expert}"


def _name_of_value(key: str, _: int) -> tuple[str, str]:
    """An element of a value that is whole on every rank."""
    return key, ""


def _specs(model: nn.Module) -> dict[str, Spec]:
    """Each parameter's spec by its name; one that two modules share has its first name."""
    specs: dict[str, Spec] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, Weight), f"state: `{name}` was not made by weight()"
        specs[name] = parameter.spec
    return specs


def _install(model: nn.Module, made_parameters: dict[str, nn.Parameter]) -> None:
    """Puts the parameters that were made, by name, in the place of the declared ones, wherever a
    module refers to them.
    """
    by_declared = {
        id(declared): made_parameters[name] for name, declared in model.named_parameters()
    }
    for name, declared in list(model.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, by_declared[id(declared)])
