"""The single-device step: forward of the whole batch at once, backward along a tape, clipping,
update.

The step that a sharded step must equal.  It knows neither placements nor microbatches, and
differentiates by itself: along a tape of its own arithmetic, not by the adjoints that the compiler
writes.
"""

from collections.abc import Iterable

import numpy as np
from attrs import Factory, field, frozen

from ..ir import BATCH, MICROBATCHES, Arg, Enter, Leave, Op, Program, Region, Stmt, base
from .inputs import Inputs, everywhere
from .interpreter import Outcome, Watch, Where, differing, metrics, nothing
from .layout import take_slice
from .prime_field import Field
from .semantics import MEANINGS, Call
from .semantics import step as meaning
from .simulated_mesh import SimulatedMesh
from .tape import Tape
from .tensors import RANDOM, Dims, Numbers, Tensor

Env = dict[str, Tensor]

RENAMES = ("coerce", "cast", "leaf")
"""Ops that change a value's placement or element type: the identity on a single device."""


@frozen
class Model:
    """The forward of a program, before or after it became a step."""

    setup: tuple[Stmt, ...]
    body: tuple[Stmt, ...]
    inputs: tuple[Arg, ...]
    results: tuple[str, ...]

    @classmethod
    def of(cls, program: Program) -> "Model":
        """The model's statements, its inputs, and the names of its losses and loads."""
        region = program.region
        if region.kind == "model":
            return cls((), region.body, region.args, tuple(end.name for end in region.yields))
        inner = program.microbatches
        setup = region.body[: region.body.index(inner)]
        results = tuple(end.name for end in inner.yields[: program.microbatch_results])
        return cls(setup, program.forward.body, inner.args, results)


def _one_rank(reference: "Reference") -> SimulatedMesh:
    """All microbatches are one batch."""
    sizes = {dim.name: dim.size for dim in reference.program.dims}
    batch = sizes[BATCH] * sizes[MICROBATCHES]
    return SimulatedMesh({axis.name: 1 for axis in reference.program.axes}, sizes | {BATCH: batch})


@frozen
class Reference:
    """One evaluation.  `watch` is told every value of the forward."""

    program: Program
    numbers: Numbers
    watch: Watch = nothing
    world: SimulatedMesh = field(default=Factory(_one_rank, takes_self=True), init=False)

    def loss(self, scene: Inputs) -> Tensor:
        """The sum of the losses of all tokens."""
        model = Model.of(self.program)
        return self._forward(model, self._state(scene), scene, self.numbers)[model.results[0]]

    def run(self, scene: Inputs) -> Outcome:
        """The outcome of the step."""
        model, n = Model.of(self.program), self.numbers
        tape, state = Tape(n), self._state(scene)
        for param in self.program.params:
            state[param.name] = tape.make_leaf(state[param.name])
        env = self._forward(model, state, scene, tape)
        count = meaning.count_valid(
            everywhere(_merge_microbatches(scene.inputs["labels"]), self.world)
        )
        share = meaning.reciprocal(n, count)
        loss, *others = (env[name] for name in model.results)
        losses = loss, *others[: self.program.losses - 1]
        params = {param.name: state[param.name] for param in self.program.params}
        grads = self._backward(tape, zip(losses, (share, n.ratio(1, 1)), strict=False), params)
        norm = meaning.norm(n, [meaning.squares(n, [grad]) for grad in grads.values()])
        scale = meaning.clipping(n, norm, self.program.train.optimizer.clip)
        mean = n.product((), loss, share)
        due = self._due(count, mean)
        updated = dict[str, Tensor]()
        for name, param in params.items():
            updated[name] = meaning.update_param(
                self.program, n, name, param, grads[name], scale, due
            )
        loads = others[self.program.losses - 1 :]
        for buffer in self.program.buffers:
            bias, load = state[buffer.name], loads[buffer.route]
            updated[buffer.name] = meaning.update_bias(n, bias, load, due, buffer.rate)
        return Outcome(metrics(self.program, (mean, norm, count, *others)), grads, updated)

    def _backward(
        self, tape: Tape, grads: Iterable[tuple[Tensor, Tensor]], params: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The gradients of the parameters from the gradients of the losses; zero for a parameter
        that no loss depends on.
        """
        gradients = dict[str, Tensor]()
        leaves = [*params.values()]
        for name, param, grad in zip(params, leaves, tape.gradients(grads, leaves), strict=True):
            gradients[name] = grad or Tensor(param.dims, np.zeros_like(param.array))
        return gradients

    def _due(self, count: Tensor, loss: Tensor) -> Tensor:
        """The count as the update takes it: 0 in a step that is skipped."""
        due = meaning.if_finite(self.numbers, count)
        if deviations := self.program.watch.get_loss_limit:
            limit = meaning.loss_limit(self.numbers, len(self.world.axes), deviations)
            due = meaning.if_below(self.numbers, due, loss, limit)
        return due

    def _state(self, scene: Inputs) -> Env:
        """Parameters and buffers, their dims in the program's order."""
        state: Env = {}
        for param in self.program.params_and_buffers:
            value = everywhere(scene.params[param.name], self.world)
            state[param.name] = Tensor(param.type.dims, value.onto(param.type.dims), RANDOM)
        return state

    def _forward(self, model: Model, state: Env, scene: Inputs, numbers: Numbers) -> Env:
        """Every value of the forward."""
        inputs: Env = {}
        for arg in model.inputs:
            value = _merge_microbatches(scene.inputs[base(arg.value.name)])
            inputs[arg.value.name] = everywhere(value, self.world)
        forward = _Forward(self.program, self.world, numbers, self.watch)
        env = forward.body(model.setup, state, (), only=RENAMES)
        return forward.body(model.body, env | inputs, ())


@frozen
class _Forward:
    """One evaluation of a model's statements; `numbers` may be a tape."""

    program: Program
    world: SimulatedMesh
    numbers: Numbers
    watch: Watch

    def body(
        self, body: tuple[Stmt, ...], outer: Env, where: Where, only: tuple[str, ...] = ()
    ) -> Env:
        """All names visible at the end of a body."""
        env = dict(outer)
        for stmt in body:
            if isinstance(stmt, Region):
                results = self._repeat(stmt, env, where)
            elif stmt.kind == "unpack":
                results = self._unpack(stmt, env, where)
            elif stmt.kind in RENAMES and stmt.inputs[0] not in env:
                continue  # flat buffers, in whose place the parameters themselves are taken
            elif only and stmt.kind not in only:
                continue
            else:
                results = self._op(stmt, env)
            for name, value in results.items():
                self.watch(name, where, value)
            env |= results
        return env

    def _op(self, op: Op, env: Env) -> Env:
        args = [env[name] for name in op.inputs]
        if op.kind in RENAMES:
            return {op.outputs[0].name: args[0]}
        call = Call(self.program, self.world, self.numbers, op, args, self.program.operands(op))
        results = MEANINGS[op.kind].value(call)
        return {value.name: result for value, result in zip(op.outputs, results, strict=True)}

    def _unpack(self, op: Op, env: Env, where: Where) -> Env:
        """The parameters of a bucket, or their slices in a layer that has a bucket of its own."""
        bucket, params = self.program.bucket(str(op.get("bucket"))), dict[str, Tensor]()
        for value, name in zip(op.outputs, bucket.params, strict=True):
            param = env[name]
            for _, index in where[: len(bucket.layers)]:
                param = take_slice(self.numbers, param, index)
            params[value.name] = param
        return params

    def _repeat(self, region: Region, outer: Env, where: Where) -> Env:
        carried, sliced = dict[str, Tensor](), list[Arg]()
        for arg in region.args:
            if arg.enter is Enter.CARRY:
                carried[arg.value.name] = outer[arg.source]
            elif arg.source in outer:
                sliced.append(arg)
        # stacks are for a step's own backward
        ends = [end.name for end in region.yields if end.leave is Leave.LAST]
        inner: Env = {}
        for i in range(self.world.dims[region.dim]):
            slices = dict[str, Tensor]()
            for arg in sliced:
                slices[arg.value.name] = take_slice(self.numbers, outer[arg.source], i)
            inner = self.body(region.body, outer | slices | carried, (*where, (region.dim, i)))
            carried = dict(zip(carried, (inner[end] for end in ends), strict=True))
        return {value.name: inner[end] for value, end in zip(region.results, ends, strict=False)}


def forwards_apart(
    first: Program, second: Program, start: Inputs, trials: int
) -> tuple[str, Where] | None:
    """The first value of the forward, by name and iteration, at which two models part; None
    where there is none.
    """
    seen: dict[tuple[str, Where], Tensor] = {}
    apart: list[tuple[str, Where]] = []

    def note(name: str, where: Where, value: Tensor) -> None:
        seen[name, where] = value

    def look(name: str, where: Where, value: Tensor) -> None:
        other = seen.get((name, where))
        if not other or {*other.dims} != {*value.dims}:
            return
        if differing(numbers, bare(other, value.dims), bare(value)):
            apart.append((name, where))

    numbers = Field(trials, len(first.axes))
    Reference(first, numbers, note).run(start)
    numbers = Field(trials, len(second.axes))
    Reference(second, numbers, look).run(start)
    return apart[0] if apart else None


def bare(value: Tensor, dims: Dims | None = None) -> Tensor:
    """A value on one rank, without the axes of the mesh and with its dims in the order of
    `dims`.
    """
    dims = dims or value.dims
    array = value.onto(dims)
    shape = array.shape[array.ndim - len(dims) :]
    return Tensor(dims, array.reshape(len(array), *shape), value.degree)


def _merge_microbatches(value: Tensor) -> Tensor:
    """[1, microbatches, batch, …] as [1, microbatches · batch, …]."""
    trials, _, _, *rest = value.array.shape
    return Tensor(value.dims[1:], value.array.reshape(trials, -1, *rest))
