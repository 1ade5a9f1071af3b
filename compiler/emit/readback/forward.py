"""Reads the classes of emitted text: each `forward` against the body of the IR that it runs, repeats as they stand.

Purpose: follows statements, repeats and weights; expressions are read by `expressions`.
Non-goals: what stands around the model (`step`, `file`).
"""

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from attrs import Factory, define, frozen

from ...ir import INVARIANT, REPLICATED, Enter, Leave, Op, Param, Program, Region, Type
from ...ops.dropout import are_draws
from ...placements import ends
from .calls import VIEWS, coerced, readers
from .expressions import Expressions
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


@frozen
class Turn:
    """What a module in a loop is given, and whether backward does `whole` turns again."""

    args: list[ast.expr]
    whole: bool


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
    again: "Counter[str]"  # how often backward makes a result of forward once more
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


class Forward:
    """Reads one `forward`; `whole` says whether backward does all of it again."""

    def __init__(
        self, model: Model, name: str, region: Region, given: Sequence[Seen], place: Place, whole: bool = False
    ) -> None:
        self._model, self._place, self._region = model, place, region
        self._blocks: set[str] = set()  # values that have blocks of their own
        self._class = model.classes.pop(name)
        self._node = self._class.forward
        self._inner = [stmt for stmt in region.body if isinstance(stmt, Region)]
        self._forks = {  # what makes draws for a repeat: for all that turn as often, they are the same
            op.outputs[0].name: (op.inputs, model.program.size(op.outputs[0].type.dims[0]))
            for op in region.body
            if isinstance(op, Op) and op.kind == "fork"
        }
        self._ops = Ops(region.body, model.same, self._is_silent)
        arguments = [arg.arg for arg in self._node.args.args[1:]]
        demand(self._node, len(arguments) == len(given), f"takes {len(arguments)} arguments, is given {len(given)}")
        held: dict[str, Seen] = {
            name: held for name, held in self._class.attributes.items() if isinstance(held, (Axes, Table))
        }
        self._expressions = Expressions(
            readers(model.program), VIEWS, model.program, model.types, model.again, whole,
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
        self._expressions.closed.clear()
        elements = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        returned = [self._expressions.plain(element).name for element in elements]
        demand(
            last, returned == [self._ops.first(name) for name in results], f"returns {returned}, not {list(results)}"
        )
        self._model.taken += self._ops.finish(self._node)
        self._demand_again()
        demand(self._node, not self._inner, "a repeat of the IR is not run")
        unread = set(self._class.attributes) - self._expressions.read
        demand(self._node, not unread, f"nothing reads {sorted(unread)}")

    def _demand_again(self) -> None:
        """Backward does again what stands in a block, or of a body that it runs again all up to some op."""
        ops = [stmt for stmt in self._region.body if isinstance(stmt, Op) and not self._is_silent(stmt)]
        again = [self._model.again[self._ops.first(op.outputs[0].name)] > 0 for op in ops]
        if self._expressions.whole:
            demand(self._node, again == sorted(again, reverse=True), "in the IR, backward does other ops again")
            return
        named = {op.outputs[0].name for op in ops if op.kind in self._model.program.train.recompute.names}
        done = {op.outputs[0].name for op, anew in zip(ops, again, strict=True) if anew}
        blocks = {self._ops.first(name) for name in self._blocks}
        for name in named | done:
            demand(self._node, self._ops.first(name) in blocks, f"{name} is made again, and has no block")

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
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="recomputed")) as call):
                self._block(call, name, [])
            case ast.Assign(targets=[target]):
                value = self._expressions.value(stmt.value)
                values = value if isinstance(value, tuple) else (value,)
                names = targets(target)
                demand(stmt, len(names) == len(values), f"{len(values)} values for {len(names)} names")
                self._env.update(zip(names, values, strict=True))
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as call, optional_vars=ast.Name(id=name))]):
                self._block(call, name, stmt.body)
            case ast.For(
                target=ast.Name(id=item),
                iter=ast.Attribute(value=ast.Name(id="self"), attr=held),
                body=[ast.Assign(targets=[target], value=ast.Call(keywords=[]) as call)],
                orelse=[],
            ):
                self._env.pop(item, None)
                self._repeat(stmt, held, targets(target), self._turn(call, item))
            case ast.For(
                target=ast.Tuple(elts=[ast.Name(id=item), ast.Name(id=drawn)]),
                iter=ast.Call(args=[ast.Attribute(value=ast.Name(id="self"), attr=held), draws]),
                body=[ast.Assign(targets=[target], value=ast.Call(keywords=[]) as call)],
                orelse=[],
            ):
                demand_same(stmt.iter, f"zip(self.{held}, {ast.unparse(draws)}, strict=True)")
                self._env.pop(item, None)
                self._repeat(stmt, held, targets(target), self._turn(call, item), {drawn: draws})
                self._env.pop(drawn, None)
            case _:
                raise wrong(stmt, f"nothing in the IR does `{ast.unparse(stmt)}`")

    def _turn(self, call: ast.Call, item: str) -> Turn:
        """`layer(x, …)`, or `recomputed(layer, x, …)`."""
        match call:
            case ast.Call(func=ast.Name(id=called), args=args) if called == item:
                return Turn(args, whole=False)
            case ast.Call(func=ast.Name(id="recomputed"), args=[ast.Name(id=called), *args]) if called == item:
                self._expressions.names.demand(call, "recomputed")
                return Turn(args, whole=True)
            case _:
                raise wrong(call, f"does not run `{item}`")

    def _block(self, call: ast.Call, name: str, body: Sequence[ast.stmt]) -> None:
        """`with … as …`: what is read outside the block would be kept for backward."""
        made = self._made(call)
        self._env[name] = made
        self._blocks.add(made.name)
        for inner in body:
            self._statement(inner)
        self._expressions.closed.add(made.name)

    def _made(self, call: ast.Call) -> Local:
        """The value of a block: `regather(…)`, or `recompute(function, …)` of an op that the plan names."""
        match call:
            case ast.Call(func=ast.Name(id="regather")):
                self._expressions.names.demand(call, "regather")
                return coerced(self._expressions, call, "all_gather", again=True)
            case ast.Call(func=ast.Name(id="recompute" | "recomputed" as called), args=[ast.Name() as function, *args]):
                self._expressions.names.demand(call, called)
                done = ast.copy_location(ast.Call(function, args, call.keywords), call)
                made = self._expressions.tensor(done)
                kinds = {op.kind for op in self._ops.done if op.outputs[0].name == made.name}
                named = set(self._model.program.train.recompute.names)
                demand(call, kinds <= named, f"`{function.id}` is not to be done again")
                return made
            case _:
                raise wrong(call, "opens a block other than `regather` or `recompute`")

    def _repeat(
        self, stmt: ast.For, held: str, names: list[str], turn: Turn, draws: Mapping[str, ast.expr] = _NONE
    ) -> None:
        """`for layer in self.layers: x = layer(x, …)`, the next repeat; a name both passed and bound is carried.

        `draws` are one iteration's by name, and all of which they are.
        """
        demand(stmt, bool(self._inner), "the IR has no further repeat here")
        region = self._inner.pop(0)
        self._ops.in_turn(stmt, region)
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
            for arg in turn.args
        ]
        self._slice(region)
        place = Place(f"{self._place.prefix}{held}.*.", (*self._place.repeats, region.dim))
        results = [end.name for end in region.yields if end.leave is Leave.LAST]
        innermost = not any(isinstance(inner, Region) for inner in region.body)
        whole = self._model.program.train.recompute.word == "full" and innermost
        demand(stmt, turn.whole == whole, f"backward does {'all' if whole else 'not all'} of a turn again")
        Forward(self._model, modules.of, region, given, place, whole).read(results)
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
