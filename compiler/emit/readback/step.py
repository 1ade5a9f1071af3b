"""Holds `train_step` and `eval_step`, as they were run on symbols, to the ops of the IR's step.

Purpose: what is counted, gathered, reduced and updated, over which axes and in which order.
Non-goals: the model (`forward`), and which buckets move in parts (`step_buckets`).
"""

import ast
from collections.abc import Mapping, Sequence
from typing import cast

from ...ir import INVARIANT, Kind, Op, Program, Region, Value, base, blocks, types, walk
from ...ir.placements import ends
from ..naming import DTYPES
from .blocks import needed
from .compare import compare, demand_known, function_of
from .execute import Machine
from .step_buckets import Buckets
from .terms import Event, Log, Loop, Term, demand, frozen_key, wrong

INPUTS = ("tokens", "labels", "documents", "draws")
"""What `batch.microbatches()` gives of each microbatch, as far as the model takes it, in the runtime's order."""

MICROBATCHES = (".run", ".evaluate")
BEFORE, BEHIND = (".weights", ".flat_params", "unshard_ahead"), (".gradients",)
"""What is done on which side of the microbatches."""

ORDERED = {"all_gather_", "all_reduce_", "reduce_scatter_", "unshard_ahead", ".update", *MICROBATCHES}
"""What communicates, or changes the state."""


class Step:
    """Holds one of the two functions; `given` are the inputs, in the order in which the model takes them."""

    def __init__(self, machine: Machine, program: Program, node: ast.FunctionDef, paths: Mapping[str, str]) -> None:
        self._machine, self._program, self._node, self._trains = machine, program, node, node.name == "train_step"
        self._region, self._forward, self._backward = blocks(program)
        self._types, self._buckets = types(program), Buckets(program, paths)
        self._scale = next((op.outputs[0].name for op in walk(program.region.body) if op.kind == "loss_scale"), "")
        metrics = ("loss", "norm", "tokens")
        self._returns = {key: end.name for key, end in zip(metrics, program.region.yields, strict=False)}
        if not self._trains:
            del self._returns["norm"]
        elif self._scale:
            self._returns["loss_scale"] = self._scale
        self._ops = needed(program, None if self._trains else {*self._returns.values()})
        self._values: dict[str, object] = {}
        self._found: Log = []
        self._updated = False
        self.given: tuple[str, ...] = ()

    def hold(self) -> None:
        """Runs the function and holds it to the IR."""
        machine, name = self._machine, self._machine.terms.name
        machine.log = self._found = []
        arguments = ("model", "state", "batch", *(("lr",) if self._trains else ()))
        result = machine.function(self._node, [*map(name, arguments)])
        cells, machine.log = machine.last.cells, []
        for stmt in self._program.region.body:
            if isinstance(stmt, Region):
                self._microbatches(stmt)
            elif stmt in self._ops:
                self._do(stmt)
        wanted = self._spec(f"Metrics({', '.join(f'{key}={key}' for key in self._returns)})", **self._metrics())
        compare(self._node, self._found, machine.log, ORDERED)
        demand(self._node.body[-1], result is wanted, f"returns {result}, not {wanted}")
        self._demand_sides()
        if self._trains:
            self._demand_updated(cells)

    def _spec(self, text: str, **names: object) -> object:
        return self._machine.spec(text, **names)

    def _metrics(self) -> dict[str, object]:
        return {key: self._values[name] for key, name in self._returns.items()}

    def _demand_sides(self) -> None:
        """What is taken from the state is taken on the right side of the microbatches."""
        ran = False
        for each in self._found:
            function = "" if isinstance(each, Loop) else function_of(each.term)
            early, late = function in BEHIND and not ran, function in BEFORE and ran
            demand(each.node, not (early or late), f"comes {'before' if early else 'after'} the microbatches")
            ran = ran or isinstance(each, Loop) or function in MICROBATCHES

    def _demand_updated(self, cells: dict[tuple[object, object], object]) -> None:
        """Each bucket's gradient in the state is, in the end, the one by which the IR updates it."""
        gradients = self._container("state.gradients()")
        for op in (op for op in self._ops if op.kind == "update"):
            name = str(op.get("bucket"))
            found = cells.get((gradients, frozen_key(name)), self._machine.terms("getitem", gradients, name))
            wanted = self._values[op.inputs[0]]
            demand(self._node, found is wanted, f"the gradient `{name}` is {found}, not {wanted}")

    # ---- ops

    def _do(self, op: Op) -> None:
        """What an op of the step is in a program."""
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
            case _:
                text = self._text(op)
                names = {f"a{i}": self._values.get(name) for i, name in enumerate(op.inputs)}
                self._values[result] = self._spec(text, **names) if text else None
        if op.kind == "reciprocal" and not self._program.pipeline:
            like, loss = op.outputs[0].type, self._region.results[0].type
            assert (like.dtype, like.dims) == (loss.dtype, loss.dims), (
                "emit: the loss is of another type than its share"
            )
            self._values["zero"] = self._spec("torch.zeros_like(x)", x=self._values[result])

    def _text(self, op: Op) -> str:
        """The expression of an op of operands `a0`, `a1`, …; "" where another line does it."""
        operands = [f"a{i}" for i in range(len(op.inputs))]
        match op.kind:
            case "count_valid":
                labels = next(arg.source for arg in self._region.args if base(arg.value.name) == "labels")
                assert op.inputs == (labels,), "emit: counts other than labels"
                return "count_valid(batch.labels)"
            case "reciprocal":
                return f"a0.clamp(min=1).to({DTYPES[str(op.get('dtype'))]}).reciprocal()"
            case "loss_scale":
                return "state.loss_scale()"
            case "mul":
                alone = op.outputs[0].name == self._seed_name() and not self._program.pipeline
                return "" if alone else "a0 * a1"
            case "grad_norm":
                return f"({' + '.join(operands)}).sqrt()"
            case "unscaled_norm":
                return f"({' + '.join(operands[1:])}).sqrt() / a0"
            case "clip_scale":
                return f"clip_scale(a0, {op.get('max')!r})" if op.get("max") else ""
            case "unscaled":
                return f"{1 if self._values.get(op.inputs[0]) is None else 'a0'} / a1"
            case "sum_squares":
                return self._squares(op)
            case "if_finite":
                return ""
            case _:
                raise AssertionError(f"emit: nothing does {op.kind} at the scope of the step")

    def _squares(self, op: Op) -> str:
        """Of chunks one by one, and of what several stages hold on the first of them alone."""
        of = {bucket.dim: bucket for bucket in self._program.buckets}
        buckets = [of[self._types[name].dims[-1]] for name in op.inputs]
        stars = ("*" if self._buckets.has_chunks(bucket) else "" for bucket in buckets)
        operands = [f"{star}a{i}" for i, star in enumerate(stars)]
        held = op.names("once")
        once = [f"once={self._ranks((str(op.get('stages')),), held)}"] if held else []
        return f"sum_squares({', '.join([*operands, *once])})"

    def _ranks(self, axes: tuple[str, ...], among: tuple[str, ...]) -> str:
        """The group over axes, or of some ranks of one."""
        if among and len(among) < self._program.degree(axes):
            return f"state.mesh.among({', '.join([repr(axes[0]), *among])})"
        return f"state.mesh.axis({', '.join(map(repr, axes))})"

    # ---- buckets

    def _coerce(self, op: Op) -> object:
        """What a rank holds of a parameter is there; buckets are moved in place, or by layers and stages."""
        (name,), result = op.inputs, op.outputs[0]
        bucket = self._buckets.of(result)
        group = self._ranks(op.names("axes"), op.names("among"))
        match [end.kind for end in ends(op)]:
            case _ if ends(op)[0] == INVARIANT:
                return self._values.get(name)
            case [Kind.SHARDED, Kind.REPLICATED] if bucket and self._buckets.moves(bucket):
                if run := self._buckets.run_of(bucket):
                    parts = ", ".join(f"flat_params[{each!r}]" for each in run)
                    self._spec(f"unshard_ahead({group}, {parts})", flat_params=self._flats())
                return self._values[name]
            case [Kind.PARTIAL, _] if bucket and self._buckets.reduces(bucket, op):
                return self._values[name]
            case [Kind.PARTIAL, Kind.INVARIANT]:
                return self._spec(f"all_reduce_(x, {group}{self._sent(op, result)})", x=self._values[name])
            case [Kind.PARTIAL, Kind.SHARDED]:
                return self._spec(f"reduce_scatter_(x, {group}{self._sent(op, result)})", x=self._values[name])
            case [Kind.SHARDED, Kind.REPLICATED]:
                return self._spec(f"all_gather_(x, {group})", x=self._values[name])
            case _:
                raise AssertionError(f"emit: nothing does {result.name} at the scope of the step")

    def _sent(self, op: Op, value: Value) -> str:
        """The element type in which a gradient is reduced, between two casts, where it is not that of record."""
        bucket, dtype = self._buckets.of(value), value.type.dtype
        if not bucket or dtype == bucket.type.dtype:
            return ""
        casts = [each for each in self._ops if each.kind == "cast"]
        made = any(each.outputs[0].name == op.inputs[0] for each in casts)
        kept = any(each.inputs[0] == value.name and each.get("dtype") == bucket.type.dtype for each in casts)
        assert all((made, kept)), f"emit: {bucket.name} is reduced in {dtype} without casts to it and back"
        return f", dtype={DTYPES[dtype]}"

    def _pack(self, op: Op) -> object:
        """The flat parameters of a bucket, or its flat gradients."""
        bucket = self._program.bucket(str(op.get("bucket")))
        if op.inputs == bucket.params:
            of = self._flats() if self._buckets.moves(bucket) else self._container("state.weights()")
            return self._machine.terms("getitem", of, bucket.name)
        assert op.inputs == self._buckets.sums(bucket), f"emit: {bucket.name} packs other gradients"
        return self._machine.terms("getitem", self._container("state.gradients()"), bucket.name)

    def _container(self, text: str) -> object:
        """What the state gives; it is asked once."""
        if text not in self._values:
            self._values[text] = self._spec(text)
        return self._values[text]

    def _flats(self) -> object:
        """The buffers of layers, which in training count the microbatches, or of chunks."""
        counts = self._trains and not self._program.pipeline
        return self._container(f"state.flat_params({'len(batch)' if counts else ''})")

    def _update(self, op: Op) -> None:
        """One call for the updates of all buckets."""
        if self._updated:
            return
        self._updated = True
        scale, counted = (self._values.get(name) for name in op.inputs[1:3])
        said = ["scale=scale"] if self._program.train.optimizer.clip or self._scale else []
        finite = next((each for each in self._ops if each.kind == "if_finite"), None)
        count = self._values[finite.inputs[0] if finite else op.inputs[2]]
        norm = self._values[finite.inputs[1]] if finite else counted
        said += ["skip=count == 0", *(["overflow=~norm.isfinite()"] if finite else [])]
        self._spec(f"state.update(lr, {', '.join(said)})", scale=scale, count=count, norm=norm)

    # ---- microbatches

    def _microbatches(self, region: Region) -> None:
        if self._buckets.are_moved():
            self._flats()
        loss = self._run() if self._program.pipeline else self._loop()
        self._values[region.results[0].name] = loss
        for value in region.results[1:]:
            if bucket := self._buckets.of(value):
                gradients = self._container("state.gradients()") if self._trains else None
                self._values[value.name] = self._machine.terms("getitem", gradients, bucket.name)

    def _seed_name(self) -> str:
        """The value from which backward begins: the one of the step, but for parameters, that the block reads."""
        made = {v.name for op in self._program.region.body if isinstance(op, Op) for v in op.outputs}
        read = {name for op in walk(self._backward.body) for name in op.inputs} & made
        seeds = [name for name in read if name not in self._buckets.leaves and self._buckets.of_name(name) is None]
        assert len(seeds) == 1, f"emit: backward begins from {', '.join(seeds)}"
        return seeds[0]

    def _seed(self) -> Sequence[object]:
        """Its factors, in their order."""
        name = self._seed_name()
        made = next(op for op in self._program.region.body if isinstance(op, Op) and op.outputs[0].name == name)
        return [self._values[each] for each in (made.inputs if made.kind == "mul" else (name,))]

    def _inputs(self) -> list[str]:
        taken = {base(arg.value.name) for arg in self._region.args}
        return [name for name in INPUTS if name in taken]

    def _run(self) -> object:
        """The rows of the pipeline's schedule, which do the same."""
        self.given = tuple(self._inputs())
        mesh = self._spec("state.mesh")
        chunks = {"flat_params": self._flats()} if self._buckets.have_chunks else {}
        if not self._trains:
            return self._spec(
                f"PIPELINE.evaluate({', '.join(['model', 'batch', 'mesh', *chunks])})", mesh=mesh, **chunks
            )
        seed = self._values[self._seed_name()]
        given = ", ".join(["model", "batch", "seed", "mesh", *chunks])
        return self._spec(f"PIPELINE.run({given})", seed=seed, mesh=mesh, **chunks)

    def _loop(self) -> object:
        """Forward, and in training backward, of each microbatch, and the sum of losses."""
        machine, loop = self._machine, next((each for each in self._found if isinstance(each, Loop)), None)
        if loop is None:
            raise wrong(self._node, "runs no microbatches")
        known, all_ = self._inputs(), self._spec("batch.microbatches()")
        demand(loop.node, loop.domains == (all_,), f"goes over {loop.domains[0]}, not {all_}")
        outer, machine.log = [*machine.log, loop], []
        each = machine.terms("each", all_, loop.symbol)
        inputs = {name: machine.terms("item", each, i, len(known)) for i, name in enumerate(known)}
        part = self._model(loop, inputs)
        if self._trains:
            product = " * ".join(["part", *(f"f{i}" for i, _ in enumerate(self._seed()))])
            self._spec(f"({product}).backward()", part=part, **{f"f{i}": each for i, each in enumerate(self._seed())})
            part = self._spec("part.detach()", part=part)
        total = next((name for name, begin in loop.begin.items() if begin is self._values["zero"]), None)
        if total is None:
            demand_known(self._found[: self._found.index(loop)], outer)
            raise wrong(loop.node, "the sum of losses does not begin as a zero of the loss' kind")
        end = machine.done(loop.node, machine.terms("+=", loop.carried[total], part))
        compare(loop.node, loop.log, machine.log, ORDERED)
        demand(loop.node, loop.end[total] is end, f"`{total}` is not the sum of losses")
        machine.log = outer
        return loop.after[total]

    def _model(self, loop: Loop, inputs: dict[str, Term]) -> object:
        """The call of the model, which is given each of its inputs once, and in evaluation no draws."""
        calls = [each for each in loop.log if isinstance(each, Event) and function_of(each.term) == "model"]
        demand(loop.node, len(calls) == 1, f"runs the model {len(calls)} times")
        by_term: dict[object, str] = {term: name for name, term in inputs.items()}
        if not self._trains and "draws" in inputs:  # nothing is dropped
            by_term = {term: name for term, name in by_term.items() if name != "draws"} | {None: "draws"}
        by_term |= {self._flats(): "flat_params"} if any(bucket.layers for bucket in self._program.buckets) else {}
        arguments, options = cast(tuple[object, ...], calls[0].term.args[1]), calls[0].term.args[2]
        self.given = tuple(by_term.get(each, "") if isinstance(each, Term | None) else "" for each in arguments)
        demand(
            calls[0].node,
            sorted(self.given) == sorted(by_term.values()) and not options,
            "gives the model other inputs",
        )
        return self._spec("model(*given)", given=arguments)
