"""Compares the loop over microbatches of `train_step` or `eval_step`, or the call that runs a schedule, with the IR.

Non-goals: the rest of the two functions (`step`), the model (`forward`).
"""

import ast
from collections.abc import Mapping, Sequence
from typing import cast

from ...ir import Op, Program, Region, base, walk
from .buckets import Buckets
from .compare import compare, demand_known, function_of
from .machine import Machine
from .terms import Event, Log, Loop, Term, demand, wrong

INPUTS = ("tokens", "labels", "documents", "draws")
"""The inputs that `batch.microbatches()` gives of each microbatch, if the model takes them, in the runtime's order."""

MICROBATCHES = (".run", ".evaluate")

ORDERED = {"all_gather_", "all_reduce_", "reduce_scatter_", "unshard_ahead", ".update", *MICROBATCHES}
"""The functions that communicate, or change the state."""


class Microbatches:
    """One of the two functions; `given` are the inputs, in the order of the model's arguments."""

    def __init__(self, machine: Machine, program: Program, node: ast.FunctionDef, paths: Mapping[str, str]) -> None:
        self._machine, self._program, self._node, self._trains = machine, program, node, node.name == "train_step"
        self._region, self._forward, self._backward = program.microbatches, program.forward, program.backward
        self._buckets = Buckets(program, paths)
        self._values: dict[str, object] = {}
        self._found: Log = []
        self.given: tuple[str, ...] = ()

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
        """The call of the model, which takes each of its inputs once, and in evaluation no draws."""
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
        return self._container(f"state.flat_params({'len(batch)' if counts else ''})")
