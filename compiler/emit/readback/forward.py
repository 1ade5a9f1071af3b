"""Compares the `forward` of a text, as it was run on symbols, with the forward block of the IR.

Purpose: each op of the IR is written as the emitter's table of expressions has it and run on the
terms of its operands; what it logs is what the text must have logged.  Loops of the text are the
repeats of the IR, in their order.  Non-goals: stages of a pipeline (`stages`), and the step around
the model (`step`).
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

from attrs import evolve

from ...analysis.bucket_layout import is_stored_as_matrix
from ...analysis.param_uses import leaves
from ...analysis.recompute import name_of
from ...ir import (
    FLOATS,
    INVARIANT,
    REPLICATED,
    Arg,
    Enter,
    Op,
    Param,
    Program,
    Region,
    Stmt,
    base,
    uses,
)
from ...ir.placements import ends
from ...ops import OPS
from ...ops.dropout import are_draws
from ..expressions import ATOM, CASTS, Context, Expr, express
from ..line_writer import find_captured_values
from ..loop_hooks import repeat_of
from ..target import RUNTIME_TARGET, Target
from .buckets import LayerMoves, Repeats
from .calls import Calls, Shape, layout_of
from .compare import compare, demand_known, function_of
from .layers import AllLayers, Layers, get_recompute_interval
from .machine import Machine
from .recompute import Twins
from .terms import Event, Log, Loop, demand, wrong
from .values import Instance

VIEW = ".unflatten"
"""The method that views a product."""

TABLE = "table"
"""The name of the table of rotary positions in expressions."""

Loops = Iterator[tuple[Loop, Log]]
"""Loops of a body, and what was done before each."""


class Forward:
    """Compares one run of `forward` with the IR; `values` are the terms of the IR's, `paths`
    parameters' names.
    """

    def __init__(
        self,
        machine: Machine,
        program: Program,
        paths: Mapping[str, str],
        target: Target = RUNTIME_TARGET,
    ) -> None:
        self._machine, self._program, self._paths, self._target = machine, program, paths, target
        self._region, self._forward = program.microbatches, program.forward
        self._types, self._twins = program.types, Twins(self._forward, program.backward)
        self._leaves = leaves(program)
        self._texts: dict[str, str] = {}
        self.layers: Layers = AllLayers(machine, program)
        self._params: dict[str, object] = {}  # layers' groups of flat parameters, by repeat
        self.done_ops: set[str] = set()  # the ops, by their first results
        self.values: dict[str, object] = {}
        self._calls = Calls(machine, program, self._types, self._shape, target)
        layout = partial(layout_of, program)
        self._context = Context(
            program,
            self._types.__getitem__,
            _axis,
            layout,
            lambda op: TABLE,
            self._is_matrix,
            {},
            target,
        )

    def compare(self, model: Instance, names_of_inputs: Sequence[str]) -> None:
        """Runs the model on the inputs of these names, and compares it with the forward block."""
        named = {name: self._machine.terms.name(name) for name in names_of_inputs}
        node = model.class_of_module.forward
        actual = self.begin(named)
        result = self._machine.forward(node, model, [*named.values()])
        before = self.expect()
        self.body(
            self._forward.body,
            iter_loops(actual),
            Counter(uses(self._forward)) + Counter(self.yields()),
        )
        compare(node, actual, before)
        self.demand_result(node, result, [self.term(name) for name in self.yields()])

    # ---- a run and its expectation

    def begin(self, named: Mapping[str, object]) -> list[Event | Loop]:
        """The log of a run of the model, and its inputs, by the names that the IR's have
        without their numbers.
        """
        inputs = (arg.value.name for arg in self._region.args)
        self.values = {name: named[base(name)] for name in inputs if base(name) in named}
        flat_params = self._machine.terms.name("flat_params")
        repeats = {
            repeat_of(self._paths[bucket.params[0]])
            for bucket in self._program.buckets
            if bucket.per_layer
        }
        self._params = {name: self._machine.terms("getitem", flat_params, name) for name in repeats}
        self._machine.log = []
        return self._machine.log

    def expect(self) -> list[Event | Loop]:
        """The log of what the IR does, from here on."""
        self._machine.log = []
        return self._machine.log

    def demand_result(
        self, node: ast.FunctionDef, result: object, wanted: Sequence[object]
    ) -> None:
        """Raises where a function returns anything else."""
        results = cast(tuple[object, ...], result) if isinstance(result, tuple) else (result,)
        same = len(results) == len(wanted) and all(
            a is b for a, b in zip(results, wanted, strict=True)
        )
        last = [stmt for stmt in ast.walk(node) if isinstance(stmt, ast.Return)][-1]
        demand(
            last, same, f"returns {', '.join(map(str, results))}, not {', '.join(map(str, wanted))}"
        )

    def yields(self) -> list[str]:
        """The values that the model returns."""
        return [end.name for end in self._region.yields[: self._program.microbatch_results]]

    def term(self, name: str) -> object:
        """The term of a value of the IR."""
        if name not in self.values:
            assert name in self._leaves, f"emit: {name} is read before it is made"
            return self._param(name, self._leaves[name])
        return self.values[name]

    def _param(self, name: str, param: str) -> object:
        """A parameter; a DTensor is cast where it is read, and a view of a flat buffer is not."""
        term, dtype = self._machine.terms("param", param), self._types[name].dtype
        master = next(
            stored.type.dtype for stored in self._program.params_and_buffers if stored.name == param
        )
        if self._target.local or dtype == master:
            return term
        return self._machine.spec(f"x.{CASTS[dtype]}()", x=term)

    # ---- ops

    def body(
        self,
        body: Iterable[Stmt],
        loops: Loops,
        used: Counter[str],
        around: Repeats = (),
        whole: int = 0,
    ) -> None:
        """Does what the statements of a body do."""
        ops = [stmt for stmt in body if isinstance(stmt, Op)]
        if whole:
            self._compare_recomputed(ops, whole)
        for stmt in body:
            if isinstance(stmt, Op):
                self._op(stmt, bool(whole))
            else:
                self._repeat(stmt, loops, used, around)

    def _op(self, op: Op, whole: bool) -> None:
        results = [value.name for value in op.outputs]
        self.done_ops.add(results[0])
        if self._is_silent(op):
            self.values[results[0]] = self.term(op.inputs[0])
            return
        names = {f"a{i}": self.term(name) for i, name in enumerate(op.inputs)}
        log = self._machine.log
        before, is_read = len(log), results[0] in self._texts  # by an earlier stage
        value = self._machine.spec(self._text(op), **names, **{TABLE: self._calls.rotary_table(op)})
        if not is_read:
            self._calls.demand(op, value, [*names.values()])
        if len(log) == before:
            assert (op.kind, op.get("by")) == ("scale", -1), f"emit: {op.kind} does nothing"
            self.values[results[0]] = value
            return
        index = len(log) - 1
        while _views(log[index]):
            index -= 1
        event = log[index]
        assert isinstance(event, Event), f"emit: {op.kind} is no call"
        is_recomputed = (
            name_of(op) in self._kinds_recomputed() or results[0] in self._program.recomputed
        )
        if not whole and (is_recomputed or self._twins.count[self._twins.twin_of(results[0])]):
            log[index] = evolve(event, block=True)
        parts = [value]
        if len(results) > 1:
            parts = self._machine.parts(event.node, value, len(results))
        self.values |= dict(zip(results, parts, strict=True))

    def _text(self, op: Op) -> str:
        """The expression of an op, of operands `a0`, `a1`, …"""
        key = op.outputs[0].name
        if key not in self._texts:
            operands = [Expr(f"a{i}", ATOM, ()) for i in range(len(op.inputs))]
            self._texts[key] = express(op, operands, self._context).text
        return self._texts[key]

    def _is_silent(self, op: Op) -> bool:
        """Whether a coercion does nothing at run time: I → R of a value without gradient."""
        without = op.kind == "coerce" and self._types[op.inputs[0]].dtype not in FLOATS
        return without and ends(op) == (INVARIANT, REPLICATED)

    def _kinds_recomputed(self) -> set[str]:
        """The kinds of ops that the plan recomputes wherever they are."""
        recompute = self._program.train.recompute
        return {*recompute.names} if recompute.word == "selective" else set()

    def _compare_recomputed(self, ops: Sequence[Op], whole: int) -> None:
        """Raises unless backward recomputes a body up to some op; only the first of ops that are
        alike counts.
        """
        firsts = list[str]()
        for op in ops:
            if not (self._is_silent(op) or OPS[op.kind].decides):
                firsts.append(self._twins.twin_of(op.outputs[0].name))
        left = Counter({first: self._twins.count[first] for first in firsts})
        every = {self._twins.every[first] for first in firsts if left[first]}
        assert every <= {whole}, (
            f"emit: line 0: in the IR, backward recomputes one of {every} layers"
        )
        once = left.total()
        left.subtract(firsts[:once])
        assert not any(left[first] for first in firsts[:once]), (
            "emit: line 0: in the IR, backward recomputes other ops"
        )

    def _matrix(self, name: str) -> Param | None:
        """The parameter that a value is, if it is stored as a matrix."""
        params = {param.name: param for param in self._program.params if is_stored_as_matrix(param)}
        return params.get(self._leaves.get(name, ""))

    def _is_matrix(self, name: str) -> bool:
        return self._matrix(name) is not None

    def _shape(self, name: str) -> Shape:
        """The dims of a value as it is stored; the outer and the inner ones of a matrix are
        joined.
        """
        dims = self._types[name].dims
        if not (param := self._matrix(name)):
            return self._program.dims_in_memory(self._types[name])
        cut = len(dims) - param.inner
        return dims[:cut], dims[cut:]

    # ---- repeats

    def _repeat(self, region: Region, loops: Loops, used: Counter[str], around: Repeats) -> None:
        """The next loop of the text, which runs once for all layers."""
        machine, next_loop = self._machine, next(loops, None)
        if next_loop is None:
            raise wrong(machine.classes[-1].forward, f"a loop over {region.dim} is not run")
        loop, before_loop = next_loop
        carried = self._carry(region, loop, before_loop)
        machine.log.append(loop)
        outer, machine.log = machine.log, []
        outer_params = dict(self._params)
        around = (*around, (region.dim, str(region.span)))
        layer = LayerMoves(self._program, region, around, self._sliced_values(region))
        self._slice(region, loop)
        moved, groups = (layer.groups(names, self._paths) for names in self._buckets_around(layer))
        for name in groups:
            self._params[name] = machine.terms("each", outer_params[name], loop.symbol)
        draws = [self.term(arg.source) for arg in region.args if are_draws(arg.value.type)]
        self.layers.demand_domains(region, loop, [*draws, *(outer_params[name] for name in groups)])
        assert len(moved) < 2, f"emit: {', '.join(moved)} are one loop"
        first, last = layer.functions() if moved else ([], [])
        followed = self._value_for_backward(region, used)
        for function in first:
            self.values[followed] = self._move(function, self.values[followed], moved[0])
        self.done_ops |= {op.outputs[0].name for op in layer.flat()}
        results = self._layer(region, loop, layer.without_moves(), around)
        ends = dict[str, object]()
        for arg, end in zip(carried, region.yields, strict=False):
            ends[arg.value.name] = results[end.name]
        for function in last:
            ends[followed] = self._move(function, ends[followed], moved[0])
        compare(loop.node, loop.log, machine.log)
        for (arg, name), value in zip(carried.items(), region.results, strict=False):
            is_end = loop.end[name] is ends[arg.value.name]
            demand(loop.node, is_end, f"`{name}` does not end as {value.name}")
            self.values[value.name] = loop.after[name]
        machine.log, self._params = outer, outer_params

    def _sliced_values(self, region: Region) -> set[str]:
        """The parameters, or other values, whose slices enter a layer."""
        sliced = set[str]()
        for arg in region.args:
            if arg.enter is Enter.EACH:
                sliced.add(self._leaves.get(arg.source, arg.source))
        return sliced

    def _layer(
        self, region: Region, loop: Loop, inner: Region, around: Repeats
    ) -> dict[str, object]:
        """Does what one layer does without the moves of its state; returns what it hands on."""
        # parameters of the model, which a layer is given as they are read, and its layers after it
        model_params = dict[str, object]()
        for name in find_captured_values(region):
            if name in self._leaves and name not in self.values:
                model_params[name] = self.term(name)
        self.values |= model_params
        whole = get_recompute_interval(self._program, region)
        self._machine.recompute = self.layers.recompute(loop, whole)
        self.body(inner.body, iter_loops(loop.log), uses(region), around, whole)
        self._machine.recompute = None
        carried = [arg for arg in region.args if arg.enter is Enter.CARRY]
        results = dict[str, object]()
        for _, end in zip(carried, region.yields, strict=False):
            results[end.name] = self.term(end.name)
        for name in model_params:
            del self.values[name]
        return results

    def _buckets_around(self, layer: LayerMoves) -> tuple[Sequence[str], Sequence[str]]:
        """The buckets that lines around a layer move, and the buckets that a layer takes.

        DTensors have no lines for it.
        """
        if not self._target.local:
            return (), ()
        return layer.own_buckets, [*layer.own_buckets, *layer.inner]

    def _carry(self, region: Region, loop: Loop, log_before: Log) -> dict[Arg, str]:
        """The names that carry a repeat's values: each begins, after `done`, as its value does."""
        free, names = [*loop.begin], dict[Arg, str]()
        for arg in region.args:
            if arg.enter is not Enter.CARRY:
                continue
            name = next((name for name in free if loop.begin[name] is self.first(arg)), None)
            if name is None:
                demand_known(log_before, self._machine.log)
                raise wrong(loop.node, f"nothing here begins as {arg.source}")
            free.remove(name)
            names[arg], self.values[arg.value.name] = name, loop.carried[name]
        return names

    def first(self, arg: Arg) -> object:
        """The value that this argument carries into the first layer."""
        received = self.layers.received(arg)
        return self.term(arg.source) if received is None else received

    def _slice(self, region: Region, loop: Loop) -> None:
        """The values that a layer has of its own: draws, and slices of parameters, which go by
        the parameter's name.
        """
        for arg in region.args:
            if arg.enter is Enter.EACH and are_draws(arg.value.type):
                self.values[arg.value.name] = self.layers.draws(loop, self.term(arg.source))
            elif arg.enter is Enter.EACH and arg.source in self._leaves:
                self._leaves[arg.value.name] = self._leaves[arg.source]

    def _value_for_backward(self, region: Region, used: Counter[str]) -> str:
        """The first value by which backward comes through all layers.

        A layer reads it, and something uses its end.
        """
        inside = uses(region)
        carried = (arg.value for arg in region.args if arg.enter is Enter.CARRY)
        for value, end in zip(carried, region.results, strict=False):
            if value.type.differentiable and inside[value.name] and used[end.name]:
                return value.name
        return ""

    def _move(self, function: str, x: object, repeat: str) -> object:
        """The value that a line around a layer makes of the one it passes on."""
        return self._machine.spec(f"{function}(x, params)", x=x, params=self._params[repeat])


def iter_loops(log: Log) -> Loops:
    """The loops of a log."""
    return iter([(entry, log[:i]) for i, entry in enumerate(log) if isinstance(entry, Loop)])


def _views(entry: Event | Loop) -> bool:
    """Whether all that is done is another view of a result."""
    return isinstance(entry, Event) and function_of(entry.term) == VIEW


def _axis(axes: tuple[str, ...]) -> str:
    """The group of ranks over axes."""
    return f"mesh.axis({', '.join(map(repr, axes))})"
