"""Loops over the layers of a repeat: the values that enter, the line that opens the loop, and what
each layer has of its own.

Purpose: a body asks its `RepeatLoops`, so that a model in stages can run the layers of a stage
where others run all.  Non-goals: the call of a layer and the lines around it (`forward`).
"""

from collections.abc import Sequence
from typing import Protocol

from attrs import define, field

from ..analysis.recompute import recomputes_layers, recomputes_region
from ..ir import Arg, Enter, Program, Region
from ..ops.dropout import are_draws
from .line_writer import Lines
from .loop_hooks import LayerCall, group_name, loop_line, repeat_of
from .naming import literal, singular


class RepeatLoops(Protocol):
    """How a body goes through the layers of its repeats."""

    def enter(self, region: Region) -> list[str]:
        """Binds what enters the first layer to the Python names that the loop carries."""
        ...

    def open(
        self, region: Region, attribute: str, has_params: bool, inner: Sequence[str]
    ) -> LayerCall:
        """Writes the line that opens the loop over the modules `attribute`.

        `has_params` says whether a layer has a group of flat parameters, `inner` names the repeats
        inside a layer that have groups.
        """
        ...


@define
class ParamGroups:
    """The Python texts of groups of flat parameters, of a model or of a layer `depth` repeats
    deep.
    """

    lines: Lines
    depth: int
    flat_params: str = ""
    """The argument of a model's forward with the groups of all repeats."""
    by_repeat: dict[str, str] = field(factory=dict[str, str])
    """The arguments of a layer's forward with the groups of the layers inside it."""

    def of_layers(self, repeat: str) -> str:
        """The text of the groups of all layers of a repeat."""
        if not self.depth:
            return f"{self.flat_params}[{literal(repeat)}]"
        if repeat not in self.by_repeat:
            levels = repeat.count(".") + 1 - self.depth
            type = "list[" * levels + "FlatParamGroup" + "]" * levels
            self.by_repeat[repeat] = self.lines.argument(group_name(repeat), type)
        return self.by_repeat[repeat]


class AllLayers:
    """Loops over all layers of a repeat; names of the body's weights begin with `prefix`."""

    def __init__(self, program: Program, lines: Lines, groups: ParamGroups, prefix: str) -> None:
        self._program, self._lines, self._groups, self._prefix = program, lines, groups, prefix

    def enter(self, region: Region) -> list[str]:
        """The Python names that are carried through the loop."""
        return [self._loop_variable(arg) for arg in region.args if arg.enter is Enter.CARRY]

    def _loop_variable(self, arg: Arg) -> str:
        """The Python name that is carried through the loop: the value's own, if that ends here."""
        source = self._lines.operand(arg.source)
        self._lines.left[arg.source] -= 1
        if source.text.isidentifier() and not self._lines.left[arg.source] and not source.ops:
            return source.text
        name = self._lines.hold(arg.value.name)
        comment = self._lines.comment(source) if source.ops else ""
        self._lines.append(f"{name} = {source.text}", comment)
        return name

    def open(
        self, region: Region, attribute: str, has_params: bool, inner: Sequence[str]
    ) -> LayerCall:
        """Opens the loop over the modules, and over what else each layer has of its own."""
        lines = self._lines
        item = lines.free(singular(region.dim))
        params, groups = "", dict[str, str]()
        if has_params:
            params = lines.free("params", item)
            groups[params] = self._groups.of_layers(repeat_of(f"{self._prefix}{attribute}.*"))
        inner_groups = list[str]()
        for repeat in inner:
            name = lines.free(group_name(repeat), item, *groups)
            groups[name] = self._groups.of_layers(repeat)
            inner_groups.append(name)
        draws = dict(self._draws_of_layer(arg) for arg in region.args if are_draws(arg.value.type))
        zipped = groups | draws
        enabled = lines.free("enabled", item, *zipped)
        if (interval := recompute_interval(self._program, region)) > 1:
            layers = self._program.size(region.dim)
            zipped |= {enabled: f"[i % {interval} == 0 for i in range({layers})]"}
        lines.append(loop_line(item, f"self.{attribute}", zipped, lines.indent()))
        return LayerCall(item, (*draws,), enabled, params, tuple(inner_groups))

    def _draws_of_layer(self, arg: Arg) -> tuple[str, str]:
        """The Python names of the draws of one iteration and of all."""
        all_ = self._lines.operand(arg.source).text
        self._lines.left[arg.source] -= 1
        return self._lines.hold(arg.value.name), all_


def recompute_interval(program: Program, region: Region) -> int:
    """The interval of recomputed layers: backward recomputes the first layer of each.

    0 where it recomputes none.
    """
    if not recomputes_region(program, region):
        return 0
    return recomputes_layers(program, region.dim)
