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
        self._machine, self._program, self._node, self._trains = (
            machine,
            program,
            node,
            node.name == "train_step",
        )
        self._region, self._forward, self._backward = (
            program.microbatches,
            program.forward,
            program.backward,
        )
        self._buckets = Buckets(program, paths)
        self._values: dict[str, object] = {}
        self._found: Log = []
        self.given: tuple[str, ...] = ()

    def _microbatches(self, region: Region) -> None:
        if self._buckets.are_moved():
            self._flats()
        sums = self._run() if self._program.pipeline else self._loop()
        self._values |= zip((value.name for value in region.results), sums, strict=False)
        for value in region.results[self._program.made :]:
            if bucket := self._buckets.of(value):
                gradients = self._container("state.gradients()") if self._trains else None
                self._values[value.name] = self._machine.terms("getitem", gradients, bucket.name)

    def _seeds(self) -> list[Op]:
        """The ops of the step, but for parameters, whose results the block reads: from these
        backward begins.
        """
        read = uses(self._backward)
        body = (op for op in self._program.region.body if isinstance(op, Op))
        made = [op for op in body if any(read[value.name] for value in op.outputs)]
        found = [op for op in made if not any(self._is_state(value.name) for value in op.outputs)]
        kinds = [op.kind for op in found]
        of_scale = ["loss_scale", "mul"] if self._program.losses > 1 else ["mul"]
        plain = ["reciprocal", "one"][: self._program.losses]
        assert kinds in (plain, of_scale), f"emit: backward begins from {', '.join(kinds)}"
        return found if kinds == plain else found[::-1]

    def _is_state(self, name: str) -> bool:
        return name in self._buckets.leaves or self._buckets.of_name(name) is not None

    def _factors(self, seed: Op) -> list[object]:
        """Factors of a loss, in order."""
        if seed.kind == "one":
            return []
        return [
            self._values[name]
            for name in (seed.inputs if seed.kind == "mul" else [seed.outputs[0].name])
        ]

    def _inputs(self) -> list[str]:
        taken = {base(arg.value.name) for arg in self._region.args}
        return [name for name in INPUTS if name in taken]

    def _run(self) -> Sequence[object]:
        """The rows of the pipeline's schedule, which do the same."""
        self.given = tuple(self._inputs())
        mesh = self._spec("state.mesh")
        chunks = {"flat_params": self._flats()} if self._buckets.have_chunks else {}
        if not self._trains:
            of = ", ".join(["model", "batch", "mesh", *chunks])
            return [self._spec(f"PIPELINE.evaluate({of})", mesh=mesh, **chunks)]
        first, *others = self._seeds()
        seed, given = (
            self._values[first.outputs[0].name],
            ["model", "batch", "seed", "mesh", *chunks],
        )
        scales = [seed.outputs[0].name for seed in others if seed.kind != "one"]
        shares = {f"share{i}": self._values[name] for i, name in enumerate(scales)}
        given += [f"router_share={''.join(shares) or 1.0}" for _ in others]
        first, count = self._program.losses, self._program.made
        loads = tuple(self._values[f"zero {at}"] for at in range(first, count))
        given += ["loads=loads"] if loads else []
        result = self._spec(
            f"PIPELINE.run({', '.join(given)})",
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
        machine, loop = (
            self._machine,
            next((each for each in self._found if isinstance(each, Loop)), None),
        )
        if loop is None:
            raise wrong(self._node, "runs no microbatches")
        known, all_ = self._inputs(), self._spec("batch.microbatches()")
        demand(loop.node, loop.domains == (all_,), f"goes over {loop.domains[0]}, not {all_}")
        outer, machine.log = [*machine.log, loop], []
        each = machine.terms("each", all_, loop.symbol)
        inputs = {name: machine.terms("item", each, i, len(known)) for i, name in enumerate(known)}
        part, count, losses = self._model(loop, inputs), self._program.made, self._program.losses
        if self._trains:
            parts = [part] if count == 1 else machine.parts(loop.node, part, count)
            self._begin_backward(parts[:losses])
            parts = [
                *(self._spec("part.detach()", part=part) for part in parts[:losses]),
                *parts[losses:],
            ]
        else:
            parts = [part] if count == 1 else [self._spec("part[0]", part=part)]
        names = self._sums(loop, outer)
        ends = [
            machine.done(loop.node, machine.terms("+=", loop.carried[name], part))
            for name, part in zip(names, parts, strict=False)
        ]
        compare(loop.node, loop.log, machine.log, ORDERED)
        for name, end in zip(names, ends, strict=True):
            demand(
                loop.node,
                loop.end[name] is end,
                f"`{name}` is not the sum of those of microbatches",
            )
        machine.log = outer
        return [loop.after[name] for name in names]

    def _begin_backward(self, parts: Sequence[object]) -> None:
        """Backward from all losses, each times its gradient."""
        names, terms = dict[str, object](), list[str]()
        for i, (part, seed) in enumerate(zip(parts, self._seeds(), strict=True)):
            factors = {f"f{i}{j}": each for j, each in enumerate(self._factors(seed))}
            names |= {f"part{i}": part, **factors}
            terms.append(" * ".join([f"part{i}", *factors]))
        self._spec(f"({' + '.join(terms)}).backward()", **names)

    def _sums(self, loop: Loop, before: Log) -> list[str]:
        """The names of the sums of losses and loads, each of which begins as a zero of its own."""
        found = [
            next((name for name, begin in loop.begin.items() if begin is zero), None)
            for zero in (
                self._values[f"zero {i}"] for i in range(self._program.made if self._trains else 1)
            )
        ]
        if None in found:
            demand_known(self._found[: self._found.index(loop)], before)
            raise wrong(loop.node, "a sum over microbatches does not begin as a zero of its kind")
        return [name for name in found if name is not None]

    def _model(self, loop: Loop, inputs: dict[str, Term]) -> object:
        """The call of the model, which takes each of its inputs once, and in evaluation no
        draws.
        """
        calls = [
            each
            for each in loop.log
            if isinstance(each, Event) and function_of(each.term) == "model"
        ]
        demand(loop.node, len(calls) == 1, f"runs the model {len(calls)} times")
        by_term: dict[object, str] = {term: name for name, term in inputs.items()}
        if not self._trains and "draws" in inputs:  # nothing is dropped
            by_term = {term: name for term, name in by_term.items() if name != "draws"} | {
                None: "draws"
            }
        by_term |= (
            {self._flats(): "flat_params"}
            if any(bucket.layers for bucket in self._program.buckets)
            else {}
        )
        arguments, options = cast(tuple[object, ...], calls[0].term.args[1]), calls[0].term.args[2]
        self.given = tuple(
            by_term.get(each, "") if isinstance(each, Term | None) else "" for each in arguments
        )
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
