"""Compares the `forward` of a model in stages with the IR: it runs once as each stage, with that
stage's modules alone.

Purpose: every stage does its part of the IR, receives what crosses, and declares no more than it
reads.  Non-goals: which stage has what (`ir.stages`), the order of its work (`schedules`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from ...ir import Arg, Enter, Pipeline, Program, Region, uses
from ...ir.stages import Stage, crossing, groups, is_free, stages
from ..target import RUNTIME_TARGET, Target
from .annotations import NOTHING
from .compare import compare
from .forward import Forward, Loops, iter_loops
from .layers import Layers
from .machine import Machine
from .terms import Loop, Term, demand
from .values import Class, Instance, Modules
from .weights import Weights


class StagedForward:
    """Compares all stages with the IR."""

    def __init__(
        self,
        machine: Machine,
        program: Program,
        pipeline: Pipeline,
        weights: Weights,
        target: Target = RUNTIME_TARGET,
    ) -> None:
        self._machine, self._pipeline, self._weights = machine, pipeline, weights
        self._is_module = not target.local
        """Whether a module is of one stage, which it knows, and not of all stages of a rank."""
        self._forward = Forward(machine, program, weights.paths, target)
        self._layers = StageLayers(machine, pipeline, self._forward.layers)
        self._forward.layers = self._layers
        self._region, self._stages = program.forward, stages(program, pipeline)
        self._groups, self._cut = groups(pipeline, self._region.body)
        self._counts = [len(values) for values in crossing(program, pipeline)]

    @property
    def done_ops(self) -> set[str]:
        """The ops that stages do, by their first results."""
        return self._forward.done_ops

    def compare_all(self, model: Class, names_of_inputs: Sequence[str]) -> None:
        """Runs every stage, whose arguments are its number, what crosses and the inputs of
        these names.
        """
        alone: list[Instance] = []
        for number, stage in enumerate(self._stages):
            alone.append(self._make_model(model, number if self._is_module else (number,)))
            self._weights.declare(alone[-1])
            self._compare_stage(number, stage, alone[-1], names_of_inputs)
        if not self._is_module:
            self._compare_ranks(model, alone)
        self._weights.demand_all(model.node)
        read = {name for module in alone for name in module.attributes_read}
        demand(
            model.init,
            {*alone[0].attributes} <= read | {*self._of_stages(alone[0])},
            "sets what no stage reads",
        )

    def _make_model(self, model: Class, stages: object) -> Instance:
        return self._machine.instantiate(
            model.node, model, [self._machine.terms.name("mesh"), stages]
        )

    def _compare_ranks(self, model: Class, alone: Sequence[Instance]) -> None:
        """Compares each rank's model with its stages."""
        for rank in sorted({*self._pipeline.stage_to_rank}):
            stages_of_rank = self._pipeline.stages_of(rank)
            model_of_rank = self._make_model(model, stages_of_rank)
            self._weights.declare(model_of_rank)
            self._demand_together(model_of_rank, [alone[number] for number in stages_of_rank])

    def _of_stages(self, module: Instance) -> list[str]:
        return [name for name, value in module.attributes.items() if isinstance(value, Modules)]

    def _demand_together(self, model_of_rank: Instance, alone: Sequence[Instance]) -> None:
        """A rank's model has what its stages need, each by itself."""
        wanted = {name: value for stage in alone for name, value in stage.attributes.items()}
        for name in (
            self._of_stages(model_of_rank) if {*model_of_rank.attributes} == {*wanted} else ()
        ):
            parts = [stage.attributes[name] for stage in alone if name in stage.attributes]
            wanted[name] = Modules(
                {
                    key: m
                    for part in parts
                    if isinstance(part, Modules)
                    for key, m in part.by_key.items()
                }
            )
        demand(
            model_of_rank.class_of_module.init,
            model_of_rank.attributes == wanted,
            f"declares {sorted(model_of_rank.attributes)}, not {sorted(wanted)}",
        )

    def _compare_stage(
        self, number: int, stage: Stage, model: Instance, names_of_inputs: Sequence[str]
    ) -> None:
        machine, node = self._machine, model.class_of_module.forward
        named = {name: machine.terms.name(name) for name in names_of_inputs}
        actual = self._forward.begin(named)
        enters = [
            machine.terms("enters", number, i)
            for i in range(self._counts[number - 1] if number else 0)
        ]
        what = (
            (enters[0] if len(enters) == 1 else tuple(enters))
            if number
            else machine.terms.name(NOTHING)
        )
        received = [tuple(enters)] if self._is_module else [number, what]
        result = machine.forward(node, model, [*received, *named.values()])
        before = self._forward.expect()
        entering = dict[Arg, object]()
        if number:
            entering = dict(zip(_carried_args(self._cut[stage.begins]), enters, strict=True))
        layers = dict(zip(self._pipeline.dims, stage.layers, strict=True))
        self._layers.begin(layers, entering)
        self._forward.values |= {arg.source: value for arg, value in entering.items()}
        self._do_stage(stage, iter_loops(actual))
        compare(node, actual, before)
        wanted = [self._forward.term(name) for name in self._leaving(number)]
        self._forward.demand_result(node, result, wanted)
        self._demand_declared(model)

    def _do_stage(self, stage: Stage, loops: Loops) -> None:
        """Does what the IR has for a stage, by the loops of its text."""
        used = Counter(uses(self._region)) + Counter(self._forward.yields())
        free = [stmt for group in self._groups for stmt in group if is_free(stmt)]
        self._forward.body(free, loops, used)
        for index, group in enumerate(self._groups):
            own = [stmt for stmt in group if index in stage.groups and not is_free(stmt)]
            self._forward.body(own, loops, used)
            if index < len(self._cut):
                self._do_layers(self._cut[index], loops, used)

    def _do_layers(self, repeat: Region, loops: Loops, used: Counter[str]) -> None:
        """The layers of the stage, or none: then carried values go on unchanged."""
        forward = self._forward
        if self._layers.by_dim[repeat.dim]:
            forward.body([repeat], loops, used)
            return
        for arg, result in zip(_carried_args(repeat), repeat.results, strict=False):
            if self._layers.received(arg) is not None or arg.source in forward.values:
                forward.values[result.name] = forward.first(arg)

    def _leaving(self, number: int) -> list[str]:
        """The values that a stage hands on, or returns in the end."""
        if number + 1 == len(self._stages):
            return self._forward.yields()
        repeat = self._cut[self._stages[number + 1].begins]
        return [value.name for value in repeat.results[: len(_carried_args(repeat))]]

    def _demand_declared(self, model: Instance) -> None:
        """A stage has no weight and no modules that it does not read."""
        for name, value in model.attributes.items():
            is_own = isinstance(value, Term) and value.head == "param"
            is_own = is_own or (isinstance(value, Modules) and bool(value.by_key))
            node = self._machine.set_at[model, name]
            demand(
                node,
                name in model.attributes_read or not is_own,
                f"a stage has `{name}`, and does not read it",
            )


class StageLayers:
    """The layers of the stage that runs in repeats that are cut, whose modules are looked up by
    number; in other repeats `uncut`.
    """

    def __init__(self, machine: Machine, pipeline: Pipeline, uncut: Layers) -> None:
        self._machine, self._pipeline, self._uncut = machine, pipeline, uncut
        self.by_dim: Mapping[str, range] = {}
        # by the argument, though two may begin as one value
        self._received: Mapping[Arg, object] = {}

    def begin(self, layers: Mapping[str, range], received: Mapping[Arg, object]) -> None:
        """Goes on to a stage, of these layers by dim, which receives these values."""
        self.by_dim, self._received = layers, received

    def received(self, arg: Arg) -> object | None:
        """The value that the stage received for the first layer; None where it makes it."""
        return self._received.get(arg)

    def demand_domains(self, region: Region, loop: Loop, others: Sequence[object]) -> None:
        """Raises unless a loop over a repeat that is cut goes over the layers of the stage."""
        if region.dim not in self._pipeline.dims:
            self._uncut.demand_domains(region, loop, others)
            return
        layers = self.by_dim[region.dim]
        demand(loop.node, loop.domains == (layers,), f"goes over {loop.domains[0]}, not {layers}")

    def draws(self, loop: Loop, all_: object) -> object:
        """The draws of one layer, by its number."""
        if not isinstance(loop.domains[0], range):
            return self._uncut.draws(loop, all_)
        return self._machine.terms("getitem", all_, self._index(loop))

    def recompute(self, loop: Loop, interval: int) -> object:
        """Whether backward recomputes this layer, by its number."""
        if interval < 2 or not isinstance(loop.domains[0], range):
            return self._uncut.recompute(loop, interval)
        return self._machine.spec(f"i % {interval} == 0", i=self._index(loop))

    def _index(self, loop: Loop) -> Term:
        return self._machine.terms("index", loop.domains[0], loop.symbol)


def _carried_args(repeat: Region) -> list[Arg]:
    """The values that each layer of a repeat hands to the next."""
    return [arg for arg in repeat.args if arg.enter is Enter.CARRY]
