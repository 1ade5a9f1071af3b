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

from ...runtime.comm.experts import Experts
from ...runtime.comm.mesh import Axis, Mesh
from ...runtime.comm.positions import Positions
from ...runtime.state.buckets import Bucket
from ...runtime.state.engine import TrainState
from ...runtime.state.optimizers import AdamW, ParamGroup
from ...runtime.state.parameters import normal, weight
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
"""Bytes that are more than a core's own caches hold: between two ops that share a value, other ops
use these caches.
"""

MEMORY = 1 << 28
"""The most bytes that the operands of all repetitions have together."""

LEAST = 1e-8
"""The seconds of a call that is too short for the clock."""


def rows(calls: Sequence[Json], clock: Clock) -> Iterator[Row]:
    """The rows of all calls."""

    def prepare() -> Callable[[], Any]:
        x = torch.ones(1, device=clock.device, requires_grad=True)
        return _backward(x.view(1, 1), [x], clock)

    # the time of backward besides its ops: a step spends it once a microbatch
    engine = clock.median(prepare, 200)
    for call in calls:
        yield from _Call(call, clock).rows(engine)


def median_issue_seconds(calls: Sequence[Json], clock: Clock) -> float:
    """Seconds that the host takes to issue an op: the median of memory-bound ones, each at its
    smallest shapes.
    """
    smallest = dict[str, Json]()
    for call in calls:
        if call["row"]["table"] == "moved":
            smallest[call["row"]["op"]] = call
    return median(_Call(call, clock).issue_seconds() for call in smallest.values())


def row_of(key: Json, seconds: float) -> Row:
    """A row of a table: its key, with the measured seconds."""
    return {**key, "seconds": max(seconds, LEAST)}


class _Call:
    """One call, with operands of the shapes that the list says."""

    def __init__(self, call: Json, clock: Clock) -> None:
        self._description, self._clock = call, clock
        self._function = _function(call)
        self._templates = list[Any]()
        self._warm = list[int]()
        size = 0
        for number, description in enumerate(call["inputs"].values()):
            template = _operand(description, clock.device)
            self._templates.append(template)
            if description.get("warm"):
                self._warm.append(number)
            if isinstance(template, Tensor):
                size += template.nbytes
        self._at_once = max(1, min(REPEATS // 2, MEMORY // (3 * size + 1)))

    def rows(self, engine: float) -> Iterator[Row]:
        """The rows of forward and of each part of backward.

        A part's seconds are the difference that it makes to backward.
        """
        parts = self._description["backward"]
        operands_up_to_part = list[list[int]]()
        operands = set[int]()
        for part in parts:
            operands.update(part["wrt"])
            operands_up_to_part.append(sorted(operands))
        forward, _ = self._seconds(sorted(operands))
        yield row_of(self._description["row"], forward)
        before = 0.0
        for part, operands_of_part in zip(parts, operands_up_to_part, strict=True):
            _, backward = self._seconds(operands_of_part)
            together = backward - engine
            yield row_of(part["row"], together - before)
            before = together

    def issue_seconds(self) -> float:
        """The median of seconds until the host has issued forward."""
        wrt = list[int]()
        for part in self._description["backward"]:
            wrt.extend(part["wrt"])
        seconds = list[float]()
        for _ in range(REPEATS):
            operands = self._operands(wrt)
            self._clock.wait()
            start = perf_counter()
            self._function(*operands)
            seconds.append(perf_counter() - start)
        return median(seconds)

    def _seconds(self, wrt: Sequence[int]) -> tuple[float, float]:
        """The medians of forward, and of backward for these operands.

        Tensors that a step has made long before lie in no cache: weights, and in backward the
        tensors that forward has saved.  A first round is left out: its memory is new to the
        process.
        """
        forward, backward = list[float](), list[float]()
        while len(forward) < self._at_once + REPEATS:
            results = list[tuple[Any, list[Tensor]]]()
            all_operands = [self._operands(wrt) for _ in range(self._at_once)]
            self._clock.cool()
            forward += self._clock.seconds_of_calls(
                self._prepare(operands, wrt, results) for operands in all_operands
            )
            del all_operands
            self._clock.cool()
            if wrt:
                backward += self._clock.seconds_of_calls(
                    _backward(*results.pop(), self._clock) for _ in range(len(results))
                )
        seconds_of_backward = median(backward[self._at_once :]) if wrt else 0.0
        return median(forward[self._at_once :]), seconds_of_backward

    def _operands(self, wrt: Sequence[int]) -> list[Any]:
        operands = list[Any]()
        for template in self._templates:
            operands.append(template.clone() if isinstance(template, Tensor) else template)
        for number in wrt:
            operands[number].requires_grad_()
        return operands

    def _prepare(
        self, operands: list[Any], wrt: Sequence[int], results: list[tuple[Any, list[Tensor]]]
    ) -> Callable[[], Any]:
        for number in self._warm:
            operands[number].data.copy_(self._templates[number])
        self._clock.cool(NEAR)
        return lambda: results.append(
            (self._function(*operands), [operands[number] for number in wrt])
        )


def _backward(output: Any, wanted: list[Tensor], clock: Clock) -> Callable[[], Any]:
    outputs: tuple[Tensor, ...] = (output,) if isinstance(output, Tensor) else output
    results = [tensor for tensor in outputs if tensor.requires_grad]
    grads = [torch.ones_like(result) for result in results]
    clock.cool(NEAR)
    return lambda: torch.autograd.grad(results, wanted, grads)


def _function(call: Json) -> Callable[..., Any]:
    names = {**vars(import_module("torch.nn.functional")), **vars(import_module(call["module"]))}
    return eval(f"lambda {', '.join(call['inputs'])}: {call['call']}", names)


class _AloneMesh(Mesh):
    """A mesh whose first rank this is, without groups."""

    def _place(self) -> dict[str, int]:
        return dict.fromkeys(self.axes, 0)

    def _set_group(self, key: tuple[str, ...]) -> None: ...


def _operand(description: Json, device: torch.device) -> Any:
    """A tensor or another argument, by its description in the list."""
    if "ranks" in description:
        return Axis("", description["ranks"], 0, None)
    if "layout" in description:
        mesh = _AloneMesh(description["mesh"], device)
        names = {"mesh": mesh, "Positions": Positions, "Experts": Experts}
        return eval(description["layout"], names)
    if "made" in description:
        inputs = description["made"]["inputs"].values()
        return _function(description["made"])(*(_operand(operand, device) for operand in inputs))
    dtype, generator = DTYPES[description["dtype"]], torch.Generator(device).manual_seed(0)
    shape, below = description["shape"], description["below"]
    if description.get("even"):
        return torch.arange(prod(shape), device=device).remainder(below).view(shape)
    if below:
        return torch.randint(below, shape, generator=generator, device=device)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def update_rows(sizes: Sequence[int], clock: Clock) -> Iterator[Row]:
    """The rows of updates of so many elements, clipped, with gradients zeroed after them."""
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
    scale = torch.ones((), device=clock.device)
    skip = torch.zeros((), dtype=torch.bool, device=clock.device)

    def prepare() -> Callable[[], Any]:
        clock.cool()
        return lambda: state.update(1e-3, skip=skip, scale=scale)

    return prepare
