"""Compares `train_step` and `eval_step`, as they were run on symbols, with the ops of the IR's
step.

Purpose: what is counted, gathered, reduced and updated, over which axes, and the order.
Non-goals: the model (`forward`), the loop over microbatches (`microbatches`), which buckets move in
parts (`buckets`).
"""

import ast
from collections.abc import Mapping
from typing import Any, cast

from ...ir import INVARIANT, Kind, Op, Program, Region, Value, ancestors, base, ops_in, uses
from ...ir.placements import ends
from ..naming import DTYPES
from .compare import compare, function_of
from .machine import Machine
from .microbatches import MICROBATCHES, ORDERED, Microbatches
from .terms import Event, Loop, demand, frozen_key

BEFORE, AFTER = (".weights", ".flat_params", "unshard_ahead"), (".gradients",)
"""The functions called before the microbatches, and the functions called after them."""


FIXED_TEXTS = {"one": "", "loss_scale": "state.loss_scale()"}
"""The expressions of ops without operands."""


def _norm(op: Op) -> str:
    """The norm of all gradients, over the loss scale where it is an operand."""
    operands = [f"a{i}" for i in range(len(op.inputs))]
    if op.kind == "unscaled_norm":
        return f"({' + '.join(operands[1:])}).sqrt() / a0"
    return f"({' + '.join(operands)}).sqrt()"


class Step(Microbatches):
    """Compares one of the two functions; `given` are the inputs, in the order of the model's
    arguments.
    """

    def __init__(
        self, machine: Machine, program: Program, node: ast.FunctionDef, paths: Mapping[str, str]
    ) -> None:
        super().__init__(machine, program, node, paths)
        self._types = program.types
        result_of = {op.kind: op.outputs[0].name for op in program.ops if op.outputs}
        self._scale = result_of.get("loss_scale", "")
        self._limit = result_of.get("loss_limit", "")
        metrics = ("loss", "norm", "tokens", "router_loss")[: 2 + program.losses]
        ends = [end.name for end in program.region.yields]
        returns = dict[str, str](zip(metrics, ends, strict=False))
        self._returns = returns
        self._loads = list[str]()
        if self._trains:
            self._loads = ends[len(metrics) :][: program.routes]
            if self._scale:
                self._returns["loss_scale"] = self._scale
            if self._limit:
                self._returns["limit"] = self._limit
        else:
            self._returns = {key: returns[key] for key in ("loss", "tokens")}
        self._ops = ops_in(program.region.body) if self._trains else self._needed()
        self._updated = False
        # the names in the model's state by which biases are moved
        self.biases: dict[str, object] = {}

    def _needed(self) -> list[Op]:
        """The ops of the step on which the results of evaluation depend."""
        ops, of_model = ops_in(self._program.region.body), {arg.source for arg in self._region.args}
        names = ancestors(ops, {*self._returns.values(), *of_model, *uses(self._forward)})
        return [op for op in ops if not names.isdisjoint(value.name for value in op.outputs)]

    def compare(self) -> None:
        """Runs the function and compares it with the IR."""
        machine, name = self._machine, self._machine.terms.name
        machine.log = self._found = []
        arguments = ["model", "state", "batch"]
        if self._trains:
            arguments.append("lr")
        result = machine.function(self._node, [*map(name, arguments)])
        cells, machine.log = machine.last.cells, []
        for stmt in self._program.region.body:
            if isinstance(stmt, Region):
                self._microbatches(stmt)
            elif stmt in self._ops:
                self._do(stmt)
        fields = [f"{key}={key}" for key in self._returns]
        if self._loads:
            fields.append("loads=loads")
        loads = tuple(map(self._values.get, self._loads))
        wanted = self._spec(f"Metrics({', '.join(fields)})", **self._metrics(), loads=loads)
        compare(self._node, self._found, machine.log, ORDERED)
        demand(self._node.body[-1], result is wanted, f"returns {result}, not {wanted}")
        self._compare_sides()
        if self._trains:
            self._demand_updated(cells)

    def _metrics(self) -> dict[str, object]:
        return {key: self._values[name] for key, name in self._returns.items()}

    def _compare_sides(self) -> None:
        """Values of the state are taken on the right side of the microbatches."""
        ran = False
        for entry in self._found:
            function = "" if isinstance(entry, Loop) else function_of(entry.term)
            is_early, is_late = function in AFTER and not ran, function in BEFORE and ran
            side = "before" if is_early else "after"
            demand(entry.node, not (is_early or is_late), f"comes {side} the microbatches")
            ran = ran or isinstance(entry, Loop) or function in MICROBATCHES

    def _demand_updated(self, cells: dict[tuple[object, object], object]) -> None:
        """Each bucket's gradient in the state is, in the end, the one by which the IR updates
        it.
        """
        gradients = self._container("state.gradients()")
        for op in (op for op in self._ops if op.kind == "update"):
            name = str(op.get("bucket"))
            actual = cells.get(
                (gradients, frozen_key(name)), self._machine.terms("getitem", gradients, name)
            )
            wanted = self._values[op.inputs[0]]
            demand(self._node, actual is wanted, f"the gradient `{name}` is {actual}, not {wanted}")

    # ---- ops

    def _do(self, op: Op) -> None:
        """Does in the log what an op of the step is in a program."""
        result = op.outputs[0].name if op.outputs else ""
        match op.kind:
            case "unpack":
                pass  # views of a bucket
            case "cast":
                self._values[result] = self._values.get(op.inputs[0])
            case "coerce":
                self._values[result] = self._coerce(op)
            case "pack":
                self._values[result] = self._pack(op)
            case "update":
                self._update(op)
            case "balanced":
                self._compare_balance(op)
            case _:
                text = self._text(op)
                names = {f"a{i}": self._values.get(name) for i, name in enumerate(op.inputs)}
                self._values[result] = self._spec(text, **names) if text else None
        if op.kind == "reciprocal":
            self._begin_sums(op)

    def _begin_sums(self, op: Op) -> None:
        """The zeros at which the sums of losses and loads begin."""
        if not self._program.pipeline:
            like, loss = op.outputs[0].type, self._region.results[0].type
            assert (like.dtype, like.dims) == (loss.dtype, loss.dims), (
                "emit: the loss is of another type than its share"
            )
            zero = self._spec("torch.zeros_like(x)", x=self._values[op.outputs[0].name])
            self._values["zero 0"] = zero
            if self._trains and self._program.losses > 1:
                self._values["zero 1"] = self._spec("torch.zeros_like(x)", x=zero)
        if self._trains:
            self._begin_loads(self._values[op.inputs[0]])

    def _begin_loads(self, num_tokens: object) -> None:
        """A zero of each load, where the number of tokens is."""
        first, last = self._program.losses, self._program.microbatch_results
        for index, end in enumerate(self._region.yields[first:last], start=first):
            sizes = ", ".join(str(self._program.size(dim)) for dim in self._types[end.name].dims)
            self._values[f"zero {index}"] = self._spec(f"no_load(x, {sizes})", x=num_tokens)

    def _text(self, op: Op) -> str:
        """The expression of an op of operands `a0`, `a1`, …; "" where another line does it."""
        match op.kind:
            case "count_valid":
                labels = next(
                    arg.source for arg in self._region.args if base(arg.value.name) == "labels"
                )
                assert op.inputs == (labels,), "emit: counts other than labels"
                return "count_valid(batch.labels)"
            case "one" | "loss_scale":
                return FIXED_TEXTS[op.kind]
            case "reciprocal":
                return f"a0.clamp(min=1).to({DTYPES[str(op.get('dtype'))]}).reciprocal()"
            case "mul" | "clip_scale" | "unscaled":
                return self._scaling(op)
            case "grad_norm" | "unscaled_norm":
                return _norm(op)
            case "sum_squares":
                return self._squares(op)
            case _:
                return self._condition(op)

    def _scaling(self, op: Op) -> str:
        """The expression of an op that scales the loss or the gradients."""
        if op.kind == "clip_scale":
            most = op.get("max")
            return f"clip_scale(a0, {most!r})" if most else ""
        if op.kind == "unscaled":
            return "1 / a1" if self._values.get(op.inputs[0]) is None else "a0 / a1"
        alone = op == self._seeds()[0] and not self._program.pipeline
        return "" if alone else "a0 * a1"

    def _condition(self, op: Op) -> str:
        """The expression of an op that decides whether the step updates."""
        match op.kind:
            case "if_finite":
                return "" if self._scale else "a2.isfinite() & a1.isfinite()"
            case "loss_limit":
                return f"state.loss_limit({op.get('deviations')!r})"
            case "if_below":
                return "a1.isfinite() & (a1 <= a2)" if self._scale else "a0 & (a1 <= a2)"
            case _:
                raise AssertionError(f"emit: nothing does {op.kind} at the scope of the step")

    def _squares(self, op: Op) -> str:
        """The sum of squares, chunk by chunk; a parameter of several stages counts on the first
        of them.
        """
        bucket_of_dim = {bucket.dim: bucket for bucket in self._program.buckets}
        arguments = list[str]()
        for i, name in enumerate(op.inputs):
            bucket = bucket_of_dim[self._types[name].dims[-1]]
            star = "*" if self._buckets.has_chunks(bucket) else ""
            arguments.append(f"{star}a{i}")
        if shared := op.names("once"):
            arguments.append(f"once={self._ranks((str(op.get('stages')),), shared)}")
        return f"sum_squares({', '.join(arguments)})"

    def _ranks(self, axes: tuple[str, ...], among: tuple[str, ...]) -> str:
        """The group over axes, or of some ranks of one."""
        if among and len(among) < self._program.degree(axes):
            return f"state.mesh.among({', '.join([repr(axes[0]), *among])})"
        return f"state.mesh.axis({', '.join(map(repr, axes))})"

    # ---- buckets

    def _coerce(self, op: Op) -> object:
        """A rank's part of a parameter is there; buckets are moved in place, or by layers and
        stages.
        """
        (name,), result = op.inputs, op.outputs[0]
        bucket = self._buckets.bucket_of(result)
        group = self._ranks(op.names("axes"), op.names("among"))
        match [end.kind for end in ends(op)]:
            case _ if ends(op)[0] == INVARIANT:
                return self._values.get(name)
            case [Kind.SHARDED, Kind.REPLICATED] if bucket and self._buckets.moves(bucket):
                if run := self._buckets.run_of(bucket):
                    parts = ", ".join(f"flat_params[{first_name!r}]" for first_name in run)
                    self._spec(f"unshard_ahead({group}, {parts})", flat_params=self._flats())
                return self._values[name]
            case [Kind.PARTIAL, _] if bucket and self._buckets.reduces(bucket, op):
                return self._values[name]
            case [Kind.PARTIAL, Kind.INVARIANT]:
                return self._spec(
                    f"all_reduce_(x, {group}{self._reduction_dtype(op, result)})",
                    x=self._values[name],
                )
            case [Kind.PARTIAL, Kind.SHARDED]:
                return self._spec(
                    f"reduce_scatter_(x, {group}{self._reduction_dtype(op, result)})",
                    x=self._values[name],
                )
            case [Kind.SHARDED, Kind.REPLICATED]:
                return self._spec(f"all_gather_(x, {group})", x=self._values[name])
            case _:
                raise AssertionError(f"emit: nothing does {result.name} at the scope of the step")

    def _reduction_dtype(self, op: Op, value: Value) -> str:
        """The element type in which a gradient is reduced, between two casts, where it is not the
        bucket's.
        """
        bucket, dtype = self._buckets.bucket_of(value), value.type.dtype
        if not bucket or dtype == bucket.type.dtype:
            return ""
        casts = [cast_op for cast_op in self._ops if cast_op.kind == "cast"]
        has_cast_to = any(cast_op.outputs[0].name == op.inputs[0] for cast_op in casts)
        has_cast_back = any(
            cast_op.inputs[0] == value.name and cast_op.get("dtype") == bucket.type.dtype
            for cast_op in casts
        )
        assert all((has_cast_to, has_cast_back)), (
            f"emit: {bucket.name} is reduced in {dtype} without casts to it and back"
        )
        return f", dtype={DTYPES[dtype]}"

    def _pack(self, op: Op) -> object:
        """The flat parameters of a bucket, or its flat gradients."""
        bucket = self._program.bucket(str(op.get("bucket")))
        if op.inputs == bucket.params:
            buffers = (
                self._flats() if self._buckets.moves(bucket) else self._container("state.weights()")
            )
            return self._machine.terms("getitem", buffers, bucket.name)
        assert op.inputs == self._buckets.sums(bucket), f"emit: {bucket.name} packs other gradients"
        return self._machine.terms("getitem", self._container("state.gradients()"), bucket.name)

    def _update(self, op: Op) -> None:
        """One call for the updates of all buckets."""
        if self._updated:
            return
        self._updated = True
        scale = self._values.get(op.inputs[1])
        arguments = ["scale=scale"] if self._program.train.optimizer.clip or self._scale else []
        skipped, names = self._skip_condition(op.inputs[2])
        self._spec(f"state.update(lr, {', '.join([*arguments, skipped])})", scale=scale, **names)

    def _compare_balance(self, op: Op) -> None:
        """The biases of a route's routers, by its load."""
        bias, load, count = op.inputs
        skipped, names = self._skip_condition(count)
        calls = [
            cast(Any, entry.term.args[1])
            for entry in self._found
            if isinstance(entry, Event) and _balances(entry)
        ]
        pattern = calls[len(self.biases)][0] if len(self.biases) < len(calls) else None
        self.biases[bias] = pattern
        text = f"state.balance(given, load, rate={op.get('rate')!r}, {skipped})"
        self._spec(text, given=pattern, load=self._values[load], **names)

    def _skip_condition(self, counted: str) -> tuple[str, dict[str, object]]:
        """When a step changes nothing, and the names in that."""
        makers = {value.name: op for op in self._ops for value in op.outputs}
        decides = makers[counted]
        finite = makers[decides.inputs[0]] if decides.kind == "if_below" else decides
        assert finite.kind == "if_finite", (
            "emit: an update that does not look whether values are finite"
        )
        assert bool(self._limit) == (decides is not finite), (
            "emit: an update that does not look at the loss's limit"
        )
        names = dict(
            zip(("count", "norm", "loss"), map(self._values.get, finite.inputs), strict=True)
        )
        overflow = ", overflow=~norm.isfinite()" if self._scale else ""
        usual = "loss.isfinite()" if self._scale and decides is finite else "usual"
        return f"skip=count == 0{overflow}, finite={usual}", {
            **names,
            "usual": self._values[counted],
        }


def _balances(event: Event) -> bool:
    return function_of(event.term) == ".balance"
