"""Reads the classes of emitted text: each `forward` against the body of the IR that it runs, repeats as they stand.

Purpose: follows statements, repeats and weights; expressions are read by `expressions`.
Non-goals: what stands around the model (`step`, `file`).
"""

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from attrs import Factory, define, frozen

from ...ir import INVARIANT, REPLICATED, Enter, Kind, Leave, Op, Param, Program, Region, Type
from ...ops.dropout import are_draws
from ...placements import ends
from .calls import VIEWS, coerced, readers
from .expressions import Expressions, Gather
from .text import Names, Ops, demand, demand_same, statements, targets, wrong
from .values import Axes, Groups, Local, Seen, Table

_NONE: Mapping[str, ast.expr] = {}


@frozen
class Modules:
    """`nn.ModuleList(…)`: so many modules of a class."""

    of: str
    count: int


@frozen
class Weight:
    """`weight(…)`, not yet matched to a parameter."""

    call: ast.Call


Attribute = Axes | Table | Modules | Weight


@frozen
class Class:
    """A class of the text: what `__init__` sets, and `forward`."""

    attributes: dict[str, Attribute]
    forward: ast.FunctionDef


@define
class Model:
    """What the readers of all classes share, and what they find."""

    program: Program
    types: dict[str, Type]
    again: "Counter[Gather]"
    names: frozenset[str]  # of the module
    classes: dict[str, Class]  # those not read yet
    same: dict[str, str]
    paths: dict[str, str] = Factory(dict[str, str])  # parameter → its name pattern in the model's state
    taken: int = 0


@frozen
class Place:
    """Where a class stands in the model: the prefix of its weights' names, and the dims of the repeats around it."""

    prefix: str = ""
    repeats: tuple[str, ...] = ()


def gathers_again(forward: Region, backward: Region) -> "Counter[Gather]":
    """How often backward coerces what forward sharded, and kept for it."""
    kept: dict[str, str] = {}  # a stack over all iterations → the value of one
    for region in _regions(forward):
        kept |= {
            v.name: end.name for v, end in zip(region.results, region.yields, strict=True) if end.leave is Leave.STACK
        }
    origin: dict[str, str] = {}  # a slice of such a stack → the forward value that it is
    found: Counter[Gather] = Counter()
    for region in _regions(backward):
        origin |= {
            a.value.name: kept.get(origin.get(a.source, a.source), "") for a in region.args if a.enter is Enter.EACH
        }
        gathers = [
            op for op in region.body if isinstance(op, Op) and op.kind == "coerce" and ends(op)[0].kind is Kind.SHARDED
        ]
        found.update((origin.get(op.inputs[0], op.inputs[0]), frozenset(op.attrs)) for op in gathers)
    return found


def _regions(region: Region) -> list[Region]:
    """A region and those in it, outer first."""
    return [region, *(found for stmt in region.body if isinstance(stmt, Region) for found in _regions(stmt))]


class Forward:
    """Reads one `forward`."""

    def __init__(self, model: Model, name: str, region: Region, given: Sequence[Seen], place: Place) -> None:
        self._model, self._place = model, place
        self._class = model.classes.pop(name)
        self._node = self._class.forward
        self._inner = [stmt for stmt in region.body if isinstance(stmt, Region)]
        self._forks = {  # what makes draws for a repeat: for all that turn as often, they are the same
            op.outputs[0].name: (op.inputs, model.program.size(op.outputs[0].type.dims[0]))
            for op in region.body
            if isinstance(op, Op) and op.kind == "fork"
        }
        self._ops = Ops((stmt for stmt in region.body if isinstance(stmt, Op)), model.same, self._is_silent)
        arguments = [arg.arg for arg in self._node.args.args[1:]]
        demand(self._node, len(arguments) == len(given), f"takes {len(arguments)} arguments, is given {len(given)}")
        held: dict[str, Seen] = {
            name: held for name, held in self._class.attributes.items() if isinstance(held, (Axes, Table))
        }
        self._expressions = Expressions(
            readers(model.program), VIEWS, model.program, model.types, model.again,
            Names.of(self._node, model.names), self._ops,
            held | self._weights(), dict(zip(arguments, given, strict=True)), set(), set(),
        )  # fmt: skip
        self._env = self._expressions.env

    def _is_silent(self, op: Op) -> bool:
        """Whether a coercion does nothing at run time: I → R of what has no gradient."""
        return (
            op.kind == "coerce"
            and ends(op) == (INVARIANT, REPLICATED)
            and not self._model.types[op.inputs[0]].differentiable
        )

    def read(self, results: Sequence[str]) -> None:
        """Reads all statements; `results` are the values that the last one returns."""
        *body, last = statements(self._node)
        for stmt in body:
            self._statement(stmt)
        if not isinstance(last, ast.Return) or not last.value:
            raise wrong(last, "does not return")
        elements = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        returned = [self._expressions.plain(element).name for element in elements]
        demand(
            last, returned == [self._ops.first(name) for name in results], f"returns {returned}, not {list(results)}"
        )
        self._model.taken += self._ops.finish(self._node)
        demand(self._node, not self._inner, "a repeat of the IR is not run")
        unread = set(self._class.attributes) - self._expressions.read
        demand(self._node, not unread, f"nothing reads {sorted(unread)}")

    # ---- weights

    def _weights(self) -> dict[str, Seen]:
        """The parameter that each weight stands for: its namesake, or what is named so but for a suffix."""
        params = [p for p in self._model.program.params if p.type.dims[: p.stacked] == self._place.repeats]
        free = {p.name: p for p in params if p.name not in self._model.paths}
        calls = {name: held.call for name, held in self._class.attributes.items() if isinstance(held, Weight)}
        found: dict[str, Seen] = {}
        for name in sorted(calls, key=lambda name: name not in free):
            param = free.pop(name, None) or free.pop(name.rstrip("0123456789").rstrip("_"), None)
            if not param:
                raise wrong(calls[name], f"`{name}` is no parameter of the IR, or declared already")
            found[name] = Local(param.name, self._groups(calls[name], param))
            self._model.paths[param.name] = self._place.prefix + name
        return found

    def _groups(self, call: ast.Call, param: Param) -> Groups:
        """The dims of a weight as declared: each its own, or the outer and the inner ones joined to a matrix."""
        program, type, dims = self._model.program, param.type, param.type.dims[param.stacked :]
        cut = len(dims) - param.inner
        groups = (dims[:cut], dims[cut:]) if param.inner and len(call.args) == 3 else tuple((dim,) for dim in dims)
        split = {i: type.axes_of(group[0]) for i, group in enumerate(groups) if type.axes_of(group[0])}
        demand(
            call,
            not any(type.axes_of(dim) for group in groups for dim in group[1:]),
            "joins dims of which not the first is split",
        )
        sizes = ", ".join(str(prod(program.size(dim) for dim in group)) for group in groups)
        init = f"{param.init.kind}({', '.join(map(repr, param.init.args))})"
        demand_same(call, f"weight(mesh, {sizes}, {f'split={split!r}, ' if split else ''}init={init})")
        return groups

    # ---- statements

    def _statement(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Assign(targets=[target]):
                value = self._expressions.value(stmt.value)
                values = value if isinstance(value, tuple) else (value,)
                names = targets(target)
                demand(stmt, len(names) == len(values), f"{len(values)} values for {len(names)} names")
                self._env.update(zip(names, values, strict=True))
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as call, optional_vars=ast.Name(id=name))]):
                self._block(stmt, call, name)
            case ast.For(
                target=ast.Name(id=item),
                iter=ast.Attribute(value=ast.Name(id="self"), attr=held),
                body=[ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=called), args=args, keywords=[]))],
                orelse=[],
            ) if called == item:
                self._env.pop(item, None)
                self._repeat(stmt, held, targets(target), args)
            case ast.For(
                target=ast.Tuple(elts=[ast.Name(id=item), ast.Name(id=drawn)]),
                iter=ast.Call(args=[ast.Attribute(value=ast.Name(id="self"), attr=held), draws]),
                body=[ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=called), args=args, keywords=[]))],
                orelse=[],
            ) if called == item:
                demand_same(stmt.iter, f"zip(self.{held}, {ast.unparse(draws)}, strict=True)")
                self._env.pop(item, None)
                self._repeat(stmt, held, targets(target), args, {drawn: draws})
                self._env.pop(drawn, None)
            case _:
                raise wrong(stmt, f"nothing in the IR does `{ast.unparse(stmt)}`")

    def _block(self, stmt: ast.With, call: ast.Call, name: str) -> None:
        """`with regather(…) as …`: what is read outside the block would be kept for backward."""
        demand(
            call, isinstance(call.func, ast.Name) and call.func.id == "regather", "opens a block other than `regather`"
        )
        self._expressions.names.demand(call, "regather")
        gathered = coerced(self._expressions, call, "all_gather", again=True)
        self._env[name] = gathered
        for inner in stmt.body:
            self._statement(inner)
        self._expressions.closed.add(gathered.name)

    def _repeat(
        self, stmt: ast.For, held: str, names: list[str], args: list[ast.expr], draws: Mapping[str, ast.expr] = _NONE
    ) -> None:
        """`for layer in self.layers: x = layer(x, …)`, the next repeat; a name both passed and bound is carried.

        `draws` are one iteration's by name, and all of which they are.
        """
        demand(stmt, bool(self._inner), "the IR has no further repeat here")
        region = self._inner.pop(0)
        modules = self._modules(stmt, held, region)
        carried = [arg for arg in region.args if arg.enter is Enter.CARRY]
        demand(stmt, len(names) == len(carried), f"carries {names}, not {[arg.value.name for arg in carried]}")
        for name, arg in zip(names, carried, strict=True):
            begin = self._env.get(name)
            demand(
                stmt,
                isinstance(begin, Local) and begin.name == self._ops.first(arg.source),
                f"`{name}` does not begin as {arg.source}",
            )
        inside = {name: self._expressions.local(arg.value.name) for name, arg in zip(names, carried, strict=True)}
        inside |= self._drawn(stmt, region, draws)
        given = [
            inside[arg.id] if isinstance(arg, ast.Name) and arg.id in inside else self._expressions.value(arg)
            for arg in args
        ]
        self._slice(region)
        place = Place(f"{self._place.prefix}{held}.*.", (*self._place.repeats, region.dim))
        results = [end.name for end in region.yields if end.leave is Leave.LAST]
        Forward(self._model, modules.of, region, given, place).read(results)
        self._env |= {
            name: self._expressions.local(value.name) for name, value in zip(names, region.results, strict=False)
        }

    def _drawn(self, stmt: ast.For, region: Region, draws: Mapping[str, ast.expr]) -> dict[str, Local]:
        """The draws of one iteration, where the repeat takes any."""
        slices = [arg for arg in region.args if are_draws(arg.value.type)]
        demand(stmt, len(slices) == len(draws), f"draws {len(draws)} times, not {len(slices)}")
        for arg, node in zip(slices, draws.values(), strict=True):
            made = self._forks.get(self._expressions.plain(node).name)
            demand(node, made == self._forks[arg.source], f"is not {arg.source}")
        return {name: self._expressions.local(arg.value.name) for name, arg in zip(draws, slices, strict=True)}

    def _modules(self, node: ast.AST, name: str, region: Region) -> Modules:
        modules = self._class.attributes.get(name)
        if not isinstance(modules, Modules) or name in self._expressions.read or modules.of not in self._model.classes:
            raise wrong(node, f"`self.{name}` holds no modules that are not run yet")
        self._expressions.read.add(name)
        size = self._model.program.size(region.dim)
        demand(node, modules.count == size, f"{modules.count} modules, not {size} {region.dim}")
        return modules

    def _slice(self, region: Region) -> None:
        """Inside a repeat a parameter's slice goes by the parameter's name."""
        held = [arg for arg in region.args if arg.enter is Enter.EACH and not are_draws(arg.value.type)]
        slices = {arg.value.name: self._ops.first(arg.source) for arg in held}
        self._model.same.update(slices)
