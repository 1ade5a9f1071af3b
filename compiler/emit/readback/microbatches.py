"""Compares the loop over microbatches of `train_step` or `eval_step`, or the call that runs a
schedule, with the IR.

Non-goals: the rest of the two functions (`step`), the model (`forward`).
"""

import ast
from collections.abc import Mapping, Sequence
from typing import cast

from ...ir import Op, Program, Region, base, uses
from .buckets import Buckets
from .compare import compare, demand_known, function_of
from .machine import Machine
from .terms import Event, Log, Loop, Term, demand, wrong

INPUTS = ("tokens", "labels", "documents", "draws")
"""The inputs that `batch.microbatches()` gives of each microbatch, if the model takes them, in
the runtime's order.
"""

MICROBATCHES = (".run", ".evaluate")

ORDERED = {
    "all_gather_",
    "all_reduce_",
    "reduce_scatter_",
    "unshard_ahead",
    ".update",
    ".balance",
    *MICROBATCHES,
}
"""The functions that communicate, or change the state."""


class Microbatches:
    """One of the two functions; `given` are the inputs, in the order of the model's arguments."""

    def __init__(
        self, machine: Machine, program: Program, node: ast.FunctionDef, paths: Mapping[str, str]
    ) -> None:
        self._machine, self._program, self._node = machine, program, node
        self._trains = node.name == "train_step"
        self._region, self._forward = program.microbatches, program.forward
        self._backward = program.backward
        self._buckets = Buckets(program, paths)
        self._values: dict[str, object] = {}
        self._found: Log = []
        self.model_inputs: tuple[str, ...] = ()

    def _microbatches(self, region: Region) -> None:
        if self._buckets.are_moved():
            self._flats()
        sums = self._run() if self._program.pipeline else self._loop()
        self._values |= zip((value.name for value in region.results), sums, strict=False)
        for value in region.results[self._program.microbatch_results :]:
            if bucket := self._buckets.bucket_of(value):
                gradients = self._container("state.gradients()") if self._trains else None
                self._values[value.name] = self._machine.terms("getitem", gradients, bucket.name)

    def _seeds(self) -> list[Op]:
        """The ops of the step, except parameters, whose results the block reads: backward begins
        from them.
        """
        read, seeds = uses(self._backward), list[Op]()
        for op in self._program.region.body:
            names = [value.name for value in op.outputs] if isinstance(op, Op) else []
            is_read = any(read[name] for name in names)
            if isinstance(op, Op) and is_read and not any(map(self._is_state, names)):
                seeds.append(op)
        kinds = [op.kind for op in seeds]
        of_scale = ["loss_scale", "mul"] if self._program.losses > 1 else ["mul"]
        plain = ["reciprocal", "one"][: self._program.losses]
        assert kinds in (plain, of_scale), f"emit: backward begins from {', '.join(kinds)}"
        return seeds if kinds == plain else seeds[::-1]

    def _is_state(self, name: str) -> bool:
        return name in self._buckets.leaves or self._buckets.of_name(name) is not None

    def _factors(self, seed: Op) -> list[object]:
        """Factors of a loss, in order."""
        if seed.kind == "one":
            return []
        names = seed.inputs if seed.kind == "mul" else [seed.outputs[0].name]
        return [self._values[name] for name in names]

    def _inputs(self) -> list[str]:
        taken = {base(arg.value.name) for arg in self._region.args}
        return [name for name in INPUTS if name in taken]

    def _run(self) -> Sequence[object]:
        """The call that runs the rows of the pipeline's schedule instead of a loop."""
        self.model_inputs = tuple(self._inputs())
        mesh = self._spec("state.mesh")
        chunks = {"flat_params": self._flats()} if self._buckets.have_chunks else {}
        if not self._trains:
            arguments = ["model", "batch", "mesh", *chunks]
            text = f"PIPELINE.evaluate({', '.join(arguments)})"
            return [self._spec(text, mesh=mesh, **chunks)]
        first, *others = self._seeds()
        seed = self._values[first.outputs[0].name]
        arguments = ["model", "batch", "seed", "mesh", *chunks]
        scales = [op.outputs[0].name for op in others if op.kind != "one"]
        shares = {f"share{i}": self._values[name] for i, name in enumerate(scales)}
        arguments += [f"router_share={''.join(shares) or 1.0}"] * len(others)
        losses, count = self._program.losses, self._program.microbatch_results
        loads = tuple(self._values[f"zero {i}"] for i in range(losses, count))
        if loads:
            arguments.append("loads=loads")
        result = self._spec(
            f"PIPELINE.run({', '.join(arguments)})",
            seed=seed,
            mesh=mesh,
            loads=loads,
            **chunks,
            **shares,
        )
        return self._machine.parts(self._node, result, count) if count > 1 else [result]

    def _loop(self) -> Sequence[object]:
        """Forward, and in training backward, of each microbatch, and the sums of losses and
        loads.
        """
        machine = self._machine
        loop = next((entry for entry in self._found if isinstance(entry, Loop)), None)
        if loop is None:
            raise wrong(self._node, "runs no microbatches")
        names_of_inputs, all_ = self._inputs(), self._spec("batch.microbatches()")
        demand(loop.node, loop.domains == (all_,), f"goes over {loop.domains[0]}, not {all_}")
        outer, machine.log = [*machine.log, loop], []
        microbatch, inputs = machine.terms("each", all_, loop.symbol), dict[str, Term]()
        for i, name in enumerate(names_of_inputs):
            inputs[name] = machine.terms("item", microbatch, i, len(names_of_inputs))
        parts = self._parts(loop, self._model(loop, inputs))
        names, ends = self._sums(loop, outer), list[Term]()
        for name, part in zip(names, parts, strict=False):
            ends.append(machine.log_term(loop.node, machine.terms("+=", loop.carried[name], part)))
        compare(loop.node, loop.log, machine.log, ORDERED)
        for name, end in zip(names, ends, strict=True):
            is_sum = loop.end[name] is end
            demand(loop.node, is_sum, f"`{name}` is not the sum of those of microbatches")
        machine.log = outer
        return [loop.after[name] for name in names]

    def _parts(self, loop: Loop, result: object) -> Sequence[object]:
        """The losses and loads of a microbatch as they are added up; in training, backward runs
        before.
        """
        count, losses = self._program.microbatch_results, self._program.losses
        if not self._trains:
            return [result] if count == 1 else [self._spec("part[0]", part=result)]
        parts = [result] if count == 1 else self._machine.parts(loop.node, result, count)
        self._begin_backward(parts[:losses])
        detached = [self._spec("part.detach()", part=part) for part in parts[:losses]]
        return [*detached, *parts[losses:]]

    def _begin_backward(self, parts: Sequence[object]) -> None:
        """Backward from all losses, each times its gradient."""
        names, terms = dict[str, object](), list[str]()
        for i, (part, seed) in enumerate(zip(parts, self._seeds(), strict=True)):
            factors = {f"f{i}{j}": factor for j, factor in enumerate(self._factors(seed))}
            names |= {f"part{i}": part, **factors}
            terms.append(" * ".join([f"part{i}", *factors]))
        self._spec(f"({' + '.join(terms)}).backward()", **names)

    def _sums(self, loop: Loop, before: Log) -> list[str]:
        """The names of the sums of losses and loads; each begins as a zero of its own."""
        names = list[str]()
        for i in range(self._program.microbatch_results if self._trains else 1):
            zero = self._values[f"zero {i}"]
            name = next((name for name, begin in loop.begin.items() if begin is zero), None)
            if name is None:
                demand_known(self._found[: self._found.index(loop)], before)
                message = "a sum over microbatches does not begin as a zero of its kind"
                raise wrong(loop.node, message)
            names.append(name)
        return names

    def _model(self, loop: Loop, inputs: dict[str, Term]) -> object:
        """The call of the model, which takes each of its inputs once, and in evaluation no
        draws.
        """
        calls = list[Event]()
        for entry in loop.log:
            if isinstance(entry, Event) and function_of(entry.term) == "model":
                calls.append(entry)
        demand(loop.node, len(calls) == 1, f"runs the model {len(calls)} times")
        by_term: dict[object, str] = {term: name for name, term in inputs.items()}
        if not self._trains and "draws" in inputs:  # evaluation drops nothing, and passes None
            del by_term[inputs["draws"]]
            by_term[None] = "draws"
        if any(bucket.layers for bucket in self._program.buckets):
            by_term[self._flats()] = "flat_params"
        _, arguments, options = calls[0].term.args
        values, names = cast(tuple[object, ...], arguments), list[str]()
        for value in values:
            names.append(by_term.get(value, "") if isinstance(value, Term | None) else "")
        self.model_inputs = tuple(names)
        fits = sorted(names) == sorted(by_term.values()) and not options
        demand(calls[0].node, fits, "gives the model other inputs")
        return self._spec("model(*given)", given=values)

    # ---- expressions

    def _spec(self, text: str, **names: object) -> object:
        return self._machine.spec(text, **names)

    def _container(self, text: str) -> object:
        """A container that the state gives; it is asked once."""
        if text not in self._values:
            self._values[text] = self._spec(text)
        return self._values[text]

    def _flats(self) -> object:
        """The buffers of layers, which in training count the microbatches, or of chunks."""
        counts = self._trains and not self._program.pipeline
        return self._container(f"state.flat_params({'len(batch)' * counts})")
