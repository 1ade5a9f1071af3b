"""Compares `train_step` and `eval_step`, as they were run on symbols, with the ops of the IR's
step.

Purpose: what is counted, gathered, reduced and updated, over which axes, and the order.  An op that
has a line is what its formula is of the terms of its operands, and `formula_values` compares the
formula with the op.  Non-goals: the model (`forward`), the loop over microbatches (`microbatches`),
which buckets move in parts (`buckets`).
"""

import ast
from collections.abc import Mapping
from typing import Any, cast

from attrs import frozen

from ...ir import INVARIANT, Kind, Op, Program, Region, Value, ancestors, base, ops_in, uses
from ...ir.placements import ends
from ...ops import OPS
from ...ops.step import LOSS_LIMIT, RECIPROCAL
from ..naming import DTYPES, literal
from ..step_formulas import CONDITIONS, fill, get_conditions_text, get_fields, get_line
from .compare import compare, function_of
from .evaluate import parse
from .formula_values import compare_line
from .machine import Machine
from .microbatches import MICROBATCHES, ORDERED, Microbatches
from .terms import Event, Loop, demand, frozen_key

BEFORE, AFTER = (".weights", ".flat_params", "unshard_ahead"), (".gradients",)
"""The functions called before the microbatches, and the functions called after them."""


@frozen
class _Decision:
    """A count as an update takes it.

    keywords  by which the update knows whether it changes anything, with their texts
    reads     the values that decide
    """

    keywords: Mapping[str, str]
    reads: frozenset[str]


class Step(Microbatches):
    """Compares one of the two functions; `given` are the inputs, in the order of the model's
    arguments.
    """

    def __init__(
        self, machine: Machine, program: Program, node: ast.FunctionDef, paths: Mapping[str, str]
    ) -> None:
        super().__init__(machine, program, node, paths)
        self._types = program.types
        self._limits = list[str]()
        self._decisions: dict[str, _Decision] = {}  # of counts that updates take
        self._names: dict[str, str] = {}  # of values, in the texts of the step
        metrics = ("loss", "norm", "tokens", "router_loss")[: 2 + program.losses]
        ends = [end.name for end in program.region.yields]
        returns = dict[str, str](zip(metrics, ends, strict=False))
        self._returns = returns
        self._loads = list[str]()
        if self._trains:
            self._loads = ends[len(metrics) :][: program.routes]
            self._find_metrics()
        else:
            self._returns = {key: returns[key] for key in ("loss", "tokens")}
        self._ops = ops_in(program.region.body) if self._trains else self._needed()
        self._updated = False
        # the names in the model's state by which biases are moved
        self.biases: dict[str, object] = {}

    def _find_metrics(self) -> None:
        """Finds the metrics that single ops make."""
        for op in ops_in(self._program.region.body):
            if op.kind == LOSS_LIMIT.name:
                self._limits.append(op.outputs[0].name)
            if OPS[op.kind].line and (metric := get_line(self._program, op).metric):
                self._returns[metric] = op.outputs[0].name

    def _needed(self) -> list[Op]:
        """The ops of the step on which the results of evaluation depend."""
        ops, of_model = ops_in(self._program.region.body), {arg.source for arg in self._region.args}
        names = ancestors(ops, {*self._returns.values(), *of_model, *uses(self._forward)})
        return [op for op in ops if not names.isdisjoint(value.name for value in op.outputs)]

    def compare(self) -> None:
        """Runs the function and compares it with the IR."""
        machine, name = self._machine, self._machine.terms.name
        machine.log = self._found = []
        for arg in self._program.region.args:
            self._values[arg.value.name] = self._spec(f"batch.{base(arg.value.name)}")
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
            case "sum_squares":
                self._values[result] = self._squares(op)
            case "update":
                self._update(op)
            case "balanced":
                self._compare_balance(op)
            case _:
                self._line(op)
        if op.kind == RECIPROCAL.name:
            self._begin_sums(op)

    # ---- ops that have a line

    def _line(self, op: Op) -> None:
        """The formula of an op, of the terms of its operands."""
        line, result = get_line(self._program, op), op.outputs[0].name
        decision = self._decisions.get(op.inputs[0]) if op.inputs else None
        if self._trains:
            types = [self._types[name] for name in op.inputs]
            compare_line(op, line, types, decision is not None)
        if op.kind == "mul" and op == self._seeds()[0] and not self._program.pipeline:
            return  # its factors are factors of the loss
        fields = self._fields(op)
        text = fill(line.formula, op, fields)
        keywords = dict(decision.keywords) if decision else dict[str, str]()
        for keyword, formula in line.conditions.items():
            keywords[keyword] = fill(formula, op, fields)
        if keywords:
            reads = {*op.inputs, *(decision.reads if decision else ())}
            is_part = line.target is None  # of the statements that are told
            keywords["finite"] = text if is_part else self._named(result)
            self._decisions[result] = _Decision(keywords, frozenset(reads))
            if is_part:
                return
        self._values[result] = self._evaluate(text)

    def _fields(self, op: Op) -> dict[str, str]:
        """The texts of an op's operands, by name, and the keywords of a count."""
        texts = list[str]()
        for name in op.inputs:
            decision = self._decisions.get(name)
            texts.append(decision.keywords["finite"] if decision else self._named(name))
        fields = get_fields(op, texts)
        for name in op.inputs:
            if name in self._decisions:
                fields[CONDITIONS] = get_conditions_text(self._decisions[name].keywords)
        return fields

    def _named(self, name: str) -> str:
        """The name of a value in the texts of the step."""
        return self._names.setdefault(name, f"v{len(self._names)}")

    def _evaluate(self, text: str) -> object:
        """The term of a text of named values."""
        values = dict[str, object]()
        for value, name in self._names.items():
            values[name] = self._values.get(value)
        return self._spec(text, **values)

    def _change_state(self, op: Op, function: str, args: list[str], options: list[str]) -> None:
        """The call by which the step changes the state, unless the count says that it changes
        nothing.
        """
        decision = self._decisions.get(op.inputs[2])
        assert decision, "emit: an update that does not look whether values are finite"
        assert decision.reads.issuperset(self._limits), (
            "emit: an update that does not look at the loss's limit"
        )
        text = fill(get_line(self._program, op).formula, op, self._fields(op))
        conditions = get_conditions_text(decision.keywords)
        wanted = f"{function}({', '.join([*args, *options, conditions])})"
        assert ast.dump(parse(text)) == ast.dump(parse(wanted)), (
            f"emit: `{text}` of {op.kind} is not `{wanted}`"
        )
        self._evaluate(text)

    # ---- sums

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

    def _squares(self, op: Op) -> object:
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
        values = {f"a{i}": self._values[name] for i, name in enumerate(op.inputs)}
        return self._spec(f"sum_squares({', '.join(arguments)})", **values)

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
        train, options = self._program.train, list[str]()
        if train.optimizer.clip or train.precision == "fp16":
            options.append(f"scale={self._named(op.inputs[1])}")
        self._change_state(op, "state.update", ["lr"], options)

    def _compare_balance(self, op: Op) -> None:
        """The biases of a route's routers, by its load."""
        bias, load, _ = op.inputs
        calls = [
            cast(Any, entry.term.args[1])
            for entry in self._found
            if isinstance(entry, Event) and _balances(entry)
        ]
        pattern = calls[len(self.biases)][0] if len(self.biases) < len(calls) else None
        self.biases[bias] = self._values[bias] = pattern
        rate = f"rate={literal(op.get('rate'))}"
        self._change_state(op, "state.balance", [self._named(bias), self._named(load)], [rate])


def _balances(event: Event) -> bool:
    return function_of(event.term) == ".balance"
