"""The state engine: what a training step carries over, in flat buckets, behind one interface.

Non-goals: no communication (the program reduces the flat gradients in sight), no files (checkpoint.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from .boxes import Box
from .buckets import Bucket
from .mesh import Copies, Mesh
from .optimizers import Group, Optimizer
from .parameters import Spec, Weight

STEP = "optimizer/step"
"""The key of the number of updates, in checkpoints and `state_dict`."""


class State:
    """A model's parameters, gradients and optimizer state.

    Gives the weights that `model` declares their memory: each belongs to one group of one bucket.  They compute in
    `dtype`; gradients, optimizer state and the values that it updates are in `master`, the same memory where the
    two agree.  The buckets named in `shards` are shared out over those axes: a rank updates its part of each, and the
    rest of `weights` is stale until it is gathered.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        buckets: Mapping[str, Sequence[Group]],
        optimizer: Optimizer,
        dtype: torch.dtype = torch.float32,
        master: torch.dtype = torch.float32,
        shards: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.mesh = mesh
        members = _members(_specs(model), buckets)
        of = dict(shards or {})
        self._buckets = {
            name: Bucket(groups, mesh, dtype, master, optimizer.slots, of.pop(name, ()))
            for name, groups in members.items()
        }
        assert not of, f"state: there is no bucket {', '.join(of)}"
        _install(model, {name: p for bucket in self._buckets.values() for name, p in bucket.parameters()})
        self._optimizer = optimizer
        self._parts = [part for bucket in self._buckets.values() for part in bucket.parts()]
        self._step = torch.zeros((), device=mesh.device)  # float32, as the fused kernels count
        if mesh.watch is not None:
            mesh.watch.installed(model, [*self._copies()])

    def initialise(self, seed: int) -> None:
        """Initial values of every parameter, a function of seed, name and global index."""
        for bucket in self._buckets.values():
            bucket.initialise(seed)
        self._updated()

    def take(self, value: Callable[[str, Spec], Tensor]) -> None:
        """Values of every parameter, given as this rank's part by its name and spec."""
        for bucket in self._buckets.values():
            bucket.fill(value)
        self._updated()

    def gradients(self) -> dict[str, Tensor]:
        """Each bucket's flat gradient, by name: this rank's sum since the last update."""
        return {name: bucket.gradient for name, bucket in self._buckets.items()}

    def weights(self) -> dict[str, Tensor]:
        """The flat parameters, as the model uses them, of each bucket that is shared out, by name."""
        return {name: bucket.working for name, bucket in self._buckets.items() if bucket.shards}

    def zero(self) -> None:
        """Zeroes every gradient."""
        for bucket in self._buckets.values():
            bucket.gradient.zero_()

    def update(self, lr: float, skip: Tensor, scale: Tensor | None = None) -> None:
        """One optimizer step on the gradients, times `scale` (0-dim) if given, then zeroes them.

        Where `skip` (0-dim bool) holds nothing else changes: no decay, no momentum, no step count.
        """
        if self.mesh.watch is not None:
            self.mesh.watch.updating()
        if scale is not None:
            for bucket in self._buckets.values():
                bucket.gradient[bucket.own].mul_(scale)
        skipped = skip.float()  # read on the device, by the kernels too: no host sync decides
        self._step += 1 - skipped
        for part in self._parts:
            self._optimizer.update(part, lr, self._step, skipped)
        for bucket in self._buckets.values():
            bucket.refresh()
        self.zero()
        self._updated()

    def boxes(self) -> Iterator[Box]:
        """This rank's parts of what outlives the run, as views: parameters (masters) by name, `optimizer/…`.

        Who writes to them calls `refresh` behind it.
        """
        for bucket in self._buckets.values():
            for each in bucket.record():
                split = {axis for axes in each.spec.split.values() for axis in axes} | {*bucket.shards}
                own = self._is_first(set(self.mesh.axes) - split)
                yield Box(each.key, each.spec.shape, each.offset, each.local, own)
        yield Box(STEP, (), (), self._step, self._is_first(self.mesh.axes))

    def _is_first(self, axes: Iterable[str]) -> bool:
        """Whether this is the first of the ranks that differ on these axes."""
        return all(self.mesh.rank(axis) == 0 for axis in axes)

    def refresh(self) -> None:
        """Brings what is made of the boxes up to date with them."""
        for bucket in self._buckets.values():
            bucket.refresh()
        self._updated()

    def state_dict(self) -> dict[str, Tensor]:
        """What `boxes` gives, as torch's own tools take it: views, each a DTensor of the global shape.

        Plain tensors on a mesh of one rank.  For programs of one's own: checkpoints do without, and so without the
        seconds that the first call takes to import DTensor.
        """
        shared = [name for name, bucket in self._buckets.items() if bucket.shards]
        assert not shared, f"state: {', '.join(shared)} are shared out by rows, which no DTensor is: take `boxes`"
        own = {
            each.key: _as_global(each.local, each.spec, self.mesh)
            for bucket in self._buckets.values()
            for each in bucket.record()
        }
        return {**own, STEP: self._step}

    def load_state_dict(self, values: dict[str, Tensor]) -> None:
        """Takes over values of the form of `state_dict`, which may be its own views, written to."""
        for key, own in self.state_dict().items():
            _local(own).copy_(_local(values[key]))
        self.refresh()

    def _copies(self) -> Iterator[Copies]:
        """Everything in its memory, and which ranks hold it alike."""
        for bucket in self._buckets.values():
            yield from bucket.copies()
        yield Copies(self._step, self.mesh.axis(*self.mesh.axes), "kept", "", lambda _: (STEP, ""))

    def _updated(self) -> None:
        if self.mesh.watch is not None:
            self.mesh.watch.updated()


def _specs(model: nn.Module) -> dict[str, Spec]:
    """Each parameter's spec by its name; one that two modules share has its first name."""
    specs: dict[str, Spec] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, Weight), f"state: `{name}` was not made by weight()"
        specs[name] = parameter.spec
    return specs


def _members(
    specs: dict[str, Spec], buckets: Mapping[str, Sequence[Group]]
) -> dict[str, list[tuple[Group, dict[str, Spec]]]]:
    """Each bucket's groups with their parameters; asserts that these share out all parameters."""
    left = dict(specs)
    members = {bucket: [(group, _claim(group, left)) for group in groups] for bucket, groups in buckets.items()}
    assert not left, f"state: in no bucket: {', '.join(left)}"
    return members


def _claim(group: Group, left: dict[str, Spec]) -> dict[str, Spec]:
    """Takes out of `left` what a group's patterns match; asserts that each still matches something."""
    claimed: dict[str, Spec] = {}
    for pattern in group.patterns:
        names = [name for name in left if _matches(name, pattern)]
        assert names, f"state: `{pattern}` matches no parameter that is not in a bucket already"
        claimed |= {name: left.pop(name) for name in names}
    return claimed


def _matches(name: str, pattern: str) -> bool:
    """Whether each dotted part matches: `layers.*.wq` stands for `layers.3.wq` but not for `layers.3.attention.wq`."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _install(model: nn.Module, made: dict[str, nn.Parameter]) -> None:
    """Puts the made parameters in the place of the declared ones, wherever a module refers to them."""
    by_declared = {id(declared): made[name] for name, declared in model.named_parameters()}
    for name, declared in list(model.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, by_declared[id(declared)])


def _as_global(local: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    """The parameter of which `local` is this rank's part, without a copy."""
    if mesh.device_mesh is None:
        return local
    from torch.distributed.tensor import DTensor, Replicate, Shard  # slow to import

    dim_of = {axis: dim for dim, axes in spec.split.items() for axis in axes}
    placements = [Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in mesh.axes]
    stride = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh.device_mesh, placements, run_check=False, shape=torch.Size(spec.shape), stride=stride
    )


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
