"""A small model whose repeats' parameters are moved layer by layer, written by hand as programs
are, and its steps.

Purpose: the same model under every way to share its state out, and with none, on one rank, as the
reference.  Non-goals: what is asserted of it (`tests/runtime/state/test_loop_hooks.py`,
`tests/runtime/state/test_waits.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalec.runtime import (
    SGD,
    AdamW,
    Axis,
    Bucket,
    FlatParams,
    Mesh,
    ParamGroup,
    TrainState,
    all_gather_,
    all_reduce_,
    normal,
    recomputed,
    reduce_grads_in_backward,
    reduce_scatter_,
    reshard,
    sum_squares,
    unshard,
    unshard_ahead,
    weight,
)
from scalec.runtime.state.shards import Box, whole

LAYERS, BLOCKS, WIDTH = 3, 2, 4


@dataclass(frozen=True)
class Way:
    """How state is shared out; `nested` has repeats in repeats, `again` does the innermost
    layers again in backward.
    """

    scatters: bool = True
    shard_gradients: bool = False
    reshard_after_forward: bool = False
    nested: bool = False
    again: bool = False
    prefetch: int = 1


ZERO = [
    Way(scatters=False),
    Way(),
    Way(shard_gradients=True),
    Way(shard_gradients=True, reshard_after_forward=True),
]
WAYS = [*ZERO, Way(reshard_after_forward=True)]


def _nothing() -> None:
    pass


def _as_it_is(axis: Axis) -> Axis:
    return axis


class Block(nn.Module):
    """x + tanh((x · norm) wᵀ) w, and a bias in odd microbatches alone."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.norm = weight(mesh, WIDTH, init=normal(1.0))
        self.w = weight(mesh, 5, WIDTH, init=normal(0.5))
        self.bias = weight(mesh, WIDTH, init=normal(0.5))

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        """One layer."""
        x = x + torch.tanh((x * self.norm) @ self.w.T) @ self.w
        return x + self.bias if odd else x


class Layer(nn.Module):
    """A layer of the outer repeat, of layers of the inner one, and a factor of its own."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.factor = weight(mesh, WIDTH, init=normal(1.0))
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(BLOCKS))


class Model(nn.Module):
    """Table, layers, head; the plain model where it is not `shared`.

    `computes` is called where a layer begins, in forward and in backward, `ends` where it ends in
    backward.
    """

    def __init__(
        self,
        mesh: Mesh,
        way: Way,
        shared: bool,
        computes: Callable[[], None] = _nothing,
        ends: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__()
        self.wte = weight(mesh, 7, WIDTH, init=normal(1.0))
        layer = Layer if way.nested else Block
        self.layers = nn.ModuleList(layer(mesh) for _ in range(LAYERS))
        self.head = weight(mesh, 3, WIDTH, init=normal(1.0))
        self.way, self.shared, self.computes, self.ends = way, shared, computes, ends

    def forward(self, tokens: Tensor, odd: bool, flat_params: FlatParams) -> Tensor:
        """A number."""
        x = self.wte[tokens]
        if not self.way.nested:
            for layer, params in zip(self.layers, self._of(flat_params, "layers"), strict=True):
                x = self._layer(layer, x, odd, params)
        else:
            groups = self._of(flat_params, "layers"), self._of(flat_params, "layers.blocks")
            nested: list[Any] = [*self.layers]
            for layer, params, inner in zip(nested, *groups, strict=True):
                x = self._enter(x, params)
                x = x * layer.factor
                for block, own in zip(layer.blocks, inner, strict=True):
                    x = self._layer(block, x, odd, own)
                x = self._leave(x, params)
        return torch.tanh(x @ self.head.T).square().sum()

    def _of(self, flat_params: FlatParams, name: str) -> list[Any]:
        """The groups of a repeat's layers; of the plain model as many without meaning."""
        return flat_params.get(name, [[None] * BLOCKS for _ in range(LAYERS)])

    def _layer(self, block: nn.Module, x: Tensor, odd: bool, params: Any) -> Tensor:
        x = self._enter(x, params)
        self.computes()
        _on_backward(x, self.ends)
        x = recomputed(block, x, odd) if self.way.again else block(x, odd)
        _on_backward(x, self.computes)
        return self._leave(x, params)

    def _enter(self, x: Tensor, params: Any) -> Tensor:
        if not self.shared:
            return x
        return unshard(x, params) if self.way.scatters else reduce_grads_in_backward(x, params)

    def _leave(self, x: Tensor, params: Any) -> Tensor:
        return reshard(x, params) if self.shared and self.way.reshard_after_forward else x


def _on_backward(x: Tensor, call: Callable[[], None]) -> None:
    """Calls when backward has the gradient of x, if it has one."""
    if x.requires_grad:
        x.register_hook(lambda _: call())  # pyright: ignore[reportUnknownMemberType, reportUnknownLambdaType]


Optimizer = AdamW | SGD
Dtypes = tuple[torch.dtype, torch.dtype]
"""In which the model computes, and that of gradients and masters."""
F64: Dtypes = (torch.float64, torch.float64)
Microbatch = tuple[Tensor, bool]
"""Tokens, and whether it is odd."""


def plain(way: Way, optimizer: Optimizer, dtypes: Dtypes) -> "Run":
    """The model on one rank."""
    mesh = Mesh({})
    model = Model(mesh, way, shared=False)
    names = [name for name, _ in model.named_parameters()]
    named = {last: [name for name in names if name.endswith(last)] for last in _GROUPS}
    groups = [ParamGroup(*names, **_GROUPS[last]) for last, names in named.items() if names]
    return Run(model, TrainState(model, mesh, {"all": Bucket(*groups)}, optimizer, *dtypes))


_GROUPS: dict[str, dict[str, float]] = {
    "norm": {},
    "w": {"weight_decay": 0.1},
    "bias": {"lr_scale": 0.5},
    "wte": {"weight_decay": 0.1},
    "head": {},
    "factor": {},
}


def shared(
    way: Way,
    mesh: Mesh,
    optimizer: Optimizer,
    dtypes: Dtypes,
    late: Callable[[Axis], Axis] = _as_it_is,
    computes: Callable[[], None] = _nothing,
    ends: Callable[[], None] = _nothing,
) -> "Run":
    """The model on all ranks of a mesh of dp and replica, its state as `way` says."""
    model = Model(mesh, way, True, computes, ends)
    inner = "layers.*.blocks.*" if way.nested else "layers.*"
    options: dict[str, Any] = {
        "per_layer": True,
        "shard_axes": ("dp",) if way.scatters else (),
        "reduce_axes": ("replica",) if way.scatters else ("dp", "replica"),
        "shard_gradients": way.shard_gradients,
        "reshard_after_forward": way.reshard_after_forward,
        "prefetch": way.prefetch,
    }
    rest = Bucket(
        ParamGroup("wte", **_GROUPS["wte"]),
        ParamGroup("head"),
        shard_axes=("dp",) if way.scatters else (),
    )
    weights, biases = (
        ParamGroup(f"{inner}.w", **_GROUPS["w"]),
        ParamGroup(f"{inner}.bias", **_GROUPS["bias"]),
    )
    buckets = {
        "rest": rest,
        "layers_dp": Bucket(weights, biases, **options),
        "layers_all": Bucket(
            ParamGroup(f"{inner}.norm"), per_layer=True, reduce_axes=("dp", "replica")
        ),
    }
    if way.nested:
        buckets["outer"] = Bucket(ParamGroup("layers.*.factor"), **options)
    state = TrainState(model, mesh, buckets, optimizer, *dtypes)
    for flat in (flat for flat in state._flats() if flat.bucket.per_layer):
        flat.shard_axis, flat.reduce_axis = (
            late(flat.shard_axis),
            late(flat.reduce_axis or flat.shard_axis),
        )
    return Run(model, state, late)


@dataclass
class Run:
    """A model and its state, with the functions of a program."""

    model: Model
    state: TrainState
    late: Callable[[Axis], Axis] = _as_it_is

    def train_step(self, microbatches: Sequence[Microbatch], skip: bool = False) -> Tensor:
        """The square of the gradient's norm, as a step takes it; then the update."""
        flat_params = self.begin(len(microbatches))
        for tokens, odd in microbatches:
            self.model(tokens, odd, flat_params).backward()
        gradients = self.state.gradients()
        squares = sum(
            (self._reduced(name, gradient) for name, gradient in gradients.items()), torch.zeros(())
        )
        self.state.update(
            0.1, scale=torch.tensor(0.5, dtype=torch.float64), skip=torch.tensor(skip)
        )
        return squares

    @torch.no_grad()
    def eval_step(self, tokens: Tensor) -> Tensor:
        """The model's number."""
        return self.model(tokens, True, self.begin())

    def begin(self, microbatches: int = 0) -> FlatParams:
        """Begins a pass: whole buckets are gathered, gathers of layers begun, unless these
        gather themselves.
        """
        for flat in self.state.weights().values():
            all_gather_(flat, self.state.mesh.axis("dp"))
        flat_params = self.state.flat_params(microbatches)
        way = self.model.way
        if self.model.shared and way.scatters and not way.reshard_after_forward:
            dp = self.late(self.state.mesh.axis("dp"))
            for name in ("layers.blocks", "layers") if way.nested else ("layers",):
                unshard_ahead(dp, flat_params[name])
        return flat_params

    def _reduced(self, name: str, gradient: Tensor) -> Tensor:
        mesh = self.state.mesh
        if not mesh.axes:
            return sum_squares(gradient)
        if name == "rest" and self.model.way.scatters:
            gradient = all_reduce_(reduce_scatter_(gradient, mesh.axis("dp")), mesh.axis("replica"))
        elif name == "rest":
            all_reduce_(gradient, mesh.axis("dp", "replica"))
        squares = sum_squares(gradient)
        is_part = self.model.way.scatters and name != "layers_all"
        return all_reduce_(squares, mesh.axis("dp")) if is_part else squares

    def boxes(self) -> dict[str, Box]:
        """This rank's state, by key."""
        return {box.key: box for box in self.state.boxes()}


def data(step: int, rank: int, microbatches: int) -> list[Microbatch]:
    """A rank's data of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        (torch.randint(0, 7, (2,), generator=generator), i % 2 == 1) for i in range(microbatches)
    ]


def furthest(ours: Run, plain: Run) -> float:
    """How far what this rank keeps is from the plain model's, at most; NaN where it is NaN."""
    theirs = plain.boxes()
    far = [0.0]
    for key, box in ours.boxes().items():
        difference = box.tensor - theirs[key].tensor[box.extent.within(whole(box.shape))]
        far.append(float(difference.abs().max()))
    return max(far, key=lambda value: (value != value, value))
