"""Seconds of the calls of a list, forward and each part of backward, and of updates, as rows of
hardware's tables.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..comm.experts import Experts
from ..comm.mesh import Axis, Mesh
from ..comm.positions import Positions
from ..state.buckets import Bucket
from ..state.engine import TrainState
from ..state.optimizers import AdamW, ParamGroup
from ..state.parameters import normal, weight
from .clock import REPEATS, Clock

Json = Mapping[str, Any]
Row = dict[str, Any]

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
}
NEAR = 1 << 22
"""Bytes that are more than a core's own caches hold: other ops use these between two that share
a value.
"""

MEMORY = 1 << 28
"""Bytes that the operands of all repetitions have together, at most."""

LEAST = 1e-8
"""Seconds of what is too short for the clock."""


def rows(calls: Sequence[Json], clock: Clock) -> Iterator[Row]:
    """The rows of all calls."""

    def prepared() -> Callable[[], Any]:
        x = torch.ones(1, device=clock.device, requires_grad=True)
        return _backward(x.view(1, 1), [x], clock)

    # what backward takes besides its ops: in a step, once a microbatch
    engine = clock.median(prepared, 200)
    for call in calls:
        yield from _Call(call, clock).rows(engine)


def issued(calls: Sequence[Json], clock: Clock) -> float:
    """Seconds in which the host issues an op: the median of memory-bound ones, each at its
    smallest shapes.
    """
    smallest = {it["row"]["op"]: it for it in calls if it["row"]["table"] == "moved"}
    return median(_Call(it, clock).issued() for it in smallest.values())


def row_of(it: Json, seconds: float) -> Row:
    """A row of its table, with what was measured: seconds, or of attention a rate."""
    return {**it, "seconds": max(seconds, LEAST)}


class _Call:
    """One call, with operands of the shapes that the list says."""

    def __init__(self, of: Json, clock: Clock) -> None:
        self._of, self._clock = of, clock
        self._function = _function(of)
        self._templates = [_operand(it, clock.device) for it in of["inputs"].values()]
        self._warm = [at for at, it in enumerate(of["inputs"].values()) if it.get("warm")]
        size = sum(it.nbytes for it in self._templates if isinstance(it, Tensor))
        self._at_once = max(1, min(REPEATS // 2, MEMORY // (3 * size + 1)))

    def rows(self, engine: float) -> Iterator[Row]:
        """Forward's, and those of backward; a part's seconds are those by which backward is
        longer with it.
        """
        back = self._of["backward"]
        wrt = [
            sorted({at for it in back[: last + 1] for at in it["wrt"]}) for last in range(len(back))
        ]
        forward, _ = self._seconds(wrt[-1] if wrt else [])
        yield row_of(self._of["row"], forward)
        before = 0.0
        for it, operands in zip(back, wrt, strict=True):
            together = self._seconds(operands)[1] - engine
            yield row_of(it["row"], together - before)
            before = together

    def issued(self) -> float:
        """The median of seconds until the host has issued forward."""
        found = list[float]()
        for _ in range(REPEATS):
            operands = self._operands([at for it in self._of["backward"] for at in it["wrt"]])
            self._clock.wait()
            start = perf_counter()
            self._function(*operands)
            found.append(perf_counter() - start)
        return median(found)

    def _seconds(self, wrt: Sequence[int]) -> tuple[float, float]:
        """The medians of forward, and of backward for these operands.

        Tensors that a step has made long before lie in no cache: weights, and in backward what
        forward has saved.  A first round, in which memory is new to the process, is left out.
        """
        forward, backward = list[float](), list[float]()
        while len(forward) < self._at_once + REPEATS:
            made = list[tuple[Any, list[Tensor]]]()
            operands = [self._operands(wrt) for _ in range(self._at_once)]
            self._clock.cool()
            forward += self._clock.each(self._prepared(each, wrt, made) for each in operands)
            del operands
            self._clock.cool()
            if wrt:
                backward += self._clock.each(
                    _backward(*made.pop(), self._clock) for _ in range(len(made))
                )
        return median(forward[self._at_once :]), median(backward[self._at_once :]) if wrt else 0.0

    def _operands(self, wrt: Sequence[int]) -> list[Any]:
        operands = [it.clone() if isinstance(it, Tensor) else it for it in self._templates]
        for at in wrt:
            operands[at].requires_grad_()
        return operands

    def _prepared(
        self, operands: list[Any], wrt: Sequence[int], made: list[tuple[Any, list[Tensor]]]
    ) -> Callable[[], Any]:
        for at in self._warm:
            operands[at].data.copy_(self._templates[at])
        self._clock.cool(NEAR)
        return lambda: made.append((self._function(*operands), [operands[at] for at in wrt]))


def _backward(made: Any, wanted: list[Tensor], clock: Clock) -> Callable[[], Any]:
    each: tuple[Tensor, ...] = (made,) if isinstance(made, Tensor) else made
    results = [it for it in each if it.requires_grad]
    grads = [torch.ones_like(it) for it in results]
    clock.cool(NEAR)
    return lambda: torch.autograd.grad(results, wanted, grads)


def _function(of: Json) -> Callable[..., Any]:
    names = {**vars(import_module("torch.nn.functional")), **vars(import_module(of["module"]))}
    return eval(f"lambda {', '.join(of['inputs'])}: {of['call']}", names)


class _AloneMesh(Mesh):
    """A mesh whose first rank this is, without groups."""

    def _place(self) -> dict[str, int]:
        return dict.fromkeys(self.axes, 0)

    def _made(self, key: tuple[str, ...]) -> None: ...


def _operand(it: Json, device: torch.device) -> Any:
    if "ranks" in it:
        return Axis("", it["ranks"], 0, None)
    if "layout" in it:
        names = {"mesh": _AloneMesh(it["mesh"], device), "Positions": Positions, "Experts": Experts}
        return eval(it["layout"], names)
    if "made" in it:
        return _function(it["made"])(
            *(_operand(each, device) for each in it["made"]["inputs"].values())
        )
    dtype, generator = DTYPES[it["dtype"]], torch.Generator(device).manual_seed(0)
    if it.get("even"):
        return (
            torch.arange(prod(it["shape"]), device=device).remainder(it["below"]).view(it["shape"])
        )
    if it["below"]:
        return torch.randint(it["below"], it["shape"], generator=generator, device=device)
    return torch.randn(it["shape"], generator=generator, device=device).to(dtype)


def update_rows(sizes: Sequence[int], clock: Clock) -> Iterator[Row]:
    """Updates of a number of elements, clipped, with gradients zeroed after them."""
    for size in sizes:
        mesh = Mesh({}, clock.device)
        model = torch.nn.Module()
        model.w = weight(mesh, size, init=normal(0.02))
        state = TrainState(model, mesh, {"all": Bucket(ParamGroup("w"))}, AdamW())
        state.initialise(0)
        yield row_of(
            {"table": "moved", "op": "update", "bytes": 28 * size},
            clock.median(_update(state, clock)),
        )


def _update(state: TrainState, clock: Clock) -> Callable[[], Callable[[], Any]]:
    scale, skip = (
        torch.ones((), device=clock.device),
        torch.zeros((), dtype=torch.bool, device=clock.device),
    )

    def prepared() -> Callable[[], Any]:
        clock.cool()
        return lambda: state.update(1e-3, skip=skip, scale=scale)

    return prepared
