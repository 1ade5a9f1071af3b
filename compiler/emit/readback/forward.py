"""Reads the classes of emitted text: each `forward` against the body of the IR that it runs, repeats as they stand.

Purpose: follows statements, repeats and weights; expressions are read by `expressions`.
Non-goals: what stands around the model (`step`, `file`).
"""

import ast
from collections import Counter
from collections.abc import Mapping, Sequence

from ...ir import INVARIANT, REPLICATED, Arg, Enter, Leave, Op, Region, uses
from ...ir.placements import ends
from ...ops.dropout import are_draws
from .ast_matching import Names, Ops, demand, statements, targets, wrong
from .bucket_moves import Turn
from .calls import VIEWS, coerced, readers
from .classes import Model, Modules, Place
from .expressions import Expressions
from .loop_hooks import check_moves
from .loops import Loop
from .parameters import weights
from .values import Axes, Buffers, Local, Seen, Table


class Forward:
    """Reads one `forward`, which returns `results`; `whole` says of how many of its turns backward does one again."""

    def __init__(
        self,
        model: Model,
        name: str,
        region: Region,
        results: Sequence[str],
        given: Sequence[Seen],
        place: Place,
        whole: int = 0,
    ) -> None:
        self._model, self._place, self._region, self._results = model, place, region, results
        self._whole = whole
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
            readers(model.program), VIEWS, model.program, model.types, model.again, bool(whole),
            Names.of(self._node, model.names), self._ops,
            held | weights(model, self._class, place), dict(zip(arguments, given, strict=True)), set(), set(),
        )  # fmt: skip
        self._env = self._expressions.env

    def _is_silent(self, op: Op) -> bool:
        """Whether a coercion does nothing at run time: I → R of what has no gradient."""
        return (
            op.kind == "coerce"
            and ends(op) == (INVARIANT, REPLICATED)
            and not self._model.types[op.inputs[0]].differentiable
        )

    def read(self) -> None:
        """Reads all statements."""
        *body, last = statements(self._node)
        self._body(body)
        if not isinstance(last, ast.Return) or not last.value:
            raise wrong(last, "does not return")
        self._expressions.closed.clear()
        elements = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        returned = [self._ops.first(self._expressions.plain(element).name) for element in elements]
        wanted = [self._ops.first(name) for name in self._results]
        demand(last, returned == wanted, f"returns {returned}, not {wanted}")
        self._model.taken += self._ops.finish(self._node)
        self._demand_again()
        demand(self._node, not self._inner, "a repeat of the IR is not run")
        unread = set(self._class.attributes) - self._expressions.read
        demand(self._node, not unread, f"nothing reads {sorted(unread)}")

    def _body(self, body: Sequence[ast.stmt]) -> None:
        for stmt in body:
            self._statement(stmt)

    def _demand_again(self) -> None:
        """Backward does again what stands in a block, or of a body that it runs again all up to some op."""
        ops = [stmt for stmt in self._region.body if isinstance(stmt, Op) and not self._is_silent(stmt)]
        firsts = [self._ops.first(op.outputs[0].name) for op in ops]
        if self._whole:
            self._demand_all_up_to_one(firsts)
            return
        named = {op.outputs[0].name for op in ops if op.kind in self._selected()}
        done = {op.outputs[0].name for op, first in zip(ops, firsts, strict=True) if self._model.again[first]}
        for name in named | done:
            demand(self._node, name in self._blocks, f"{name} is made again, and has no block")

    def _demand_all_up_to_one(self, firsts: Sequence[str]) -> None:
        """Of ops that are computed alike, those that come first are done again."""
        left = Counter({first: self._model.again[first] for first in firsts})
        every = {self._model.every[first] for first in firsts if left[first]}
        demand(self._node, every <= {self._whole}, f"in the IR, backward does one of {every} turns again")
        once = left.total()
        left.subtract(firsts[:once])
        demand(self._node, not any(left[first] for first in firsts[:once]), "in the IR, backward does other ops again")

    def _selected(self) -> set[str]:
        """The kinds of ops that the plan says to do again wherever they stand."""
        recompute = self._model.program.train.recompute
        return {*recompute.names} if recompute.word == "selective" else set()

    # ---- statements

    def _statement(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="recomputed")) as call):
                self._block(call, name, [])
            case ast.Assign(targets=[target]):
                values = self._values(stmt.value)
                names = targets(target)
                demand(stmt, len(names) == len(values), f"{len(values)} values for {len(names)} names")
                self._env.update(zip(names, values, strict=True))
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as call, optional_vars=ast.Name(id=name))]):
                self._block(call, name, stmt.body)
            case ast.For():
                self._repeat(stmt, Loop.of(self._expressions, stmt))
            case _:
                raise wrong(stmt, f"nothing in the IR does `{ast.unparse(stmt)}`")

    def _values(self, node: ast.expr) -> Sequence[Seen]:
        """What one expression gives, or several with commas."""
        if isinstance(node, ast.Tuple):
            return [self._expressions.value(element) for element in node.elts]
        value = self._expressions.value(node)
        return value if isinstance(value, tuple) else (value,)

    def _block(self, call: ast.Call, name: str, body: Sequence[ast.stmt]) -> None:
        """`with … as …`: what is read outside the block would be kept for backward."""
        groups = self._made(call).groups
        own = self._ops.done[-1].outputs[0].name  # not the first that is the same: each block ends for itself
        self._env[name] = Local(own, groups)
        self._blocks.add(own)
        for inner in body:
            self._statement(inner)
        self._expressions.closed.add(own)

    def _made(self, call: ast.Call) -> Local:
        """The value of a block: `regather(…)`, or `recompute(function, …)` of an op that the plan names."""
        match call:
            case ast.Call(func=ast.Name(id="regather")):
                self._expressions.names.demand(call, "regather")
                return coerced(self._expressions, call, "all_gather", again=True)
            case ast.Call(
                func=ast.Name(id="recompute" | "recomputed" as called),
                args=[ast.Name() | ast.Attribute(value=ast.Name(id="torch")) as function, *args],
            ):
                self._expressions.names.demand(call, called)
                made = self._expressions.tensor(ast.copy_location(ast.Call(function, args, call.keywords), call))
                selected = self._ops.done[-1].kind in self._selected()
                demand(call, selected, f"`{ast.unparse(function)}` is not to be done again")
                return made
            case _:
                raise wrong(call, "opens a block other than `regather` or `recompute`")

    # ---- repeats

    def _repeat(self, stmt: ast.For, loop: Loop) -> None:
        """The next repeat; a name that is both passed and bound is carried."""
        demand(stmt, bool(self._inner), "the IR has no further repeat here")
        region = self._inner.pop(0)
        self._ops.in_turn(stmt, region)
        modules = self._modules(stmt, loop.held, region)
        zipped = {name: self._expressions.value(node) for name, node in loop.zipped.items()}
        for name in (loop.item, *loop.zipped):
            self._env.pop(name, None)
        carried = self._carried(stmt, region, loop.names)
        draws = {name: seen for name, seen in zipped.items() if isinstance(seen, Local)}
        place = self._place.inside(loop.held, region)
        turn = self._turn(region, place)
        inside: dict[str, Seen] = {name: self._expressions.local(arg.value.name) for name, arg in carried.items()}
        inside |= self._drawn(stmt, region, draws)
        buffers = {name: seen for name, seen in zipped.items() if name not in draws}
        inside |= self._moved(loop, self._followed(region, loop.names), buffers, turn)
        given = [self._passed(node, inside) for node in loop.args]
        self._slice(region, turn)
        whole = self._turns_again(region)
        demand(stmt, loop.again == whole, f"of turns, backward does one of {whole} again")
        turns = self._model.program.size(region.dim)
        demand(stmt, loop.turns in (0, turns), f"says of {loop.turns} turns which are done again, of {turns}")
        results = [end.name for end in region.yields if end.leave is Leave.LAST]
        Forward(self._model, modules.of, turn.rest(), results, given, place, whole).read()
        after = zip(loop.names, region.results, strict=False)
        self._env |= {name: self._expressions.local(value.name) for name, value in after}

    def _turns_again(self, region: Region) -> int:
        """Of how many turns backward does one again, all of it; 0 for none."""
        recompute = self._model.program.train.recompute
        if any(isinstance(inner, Region) for inner in region.body):
            return 0
        if recompute.word == "every" and region.dim in recompute.names:
            return recompute.number
        return int(recompute.word == "full")

    def _carried(self, stmt: ast.For, region: Region, names: Sequence[str]) -> dict[str, Arg]:
        """What is carried, by the names in the loop."""
        carried = [arg for arg in region.args if arg.enter is Enter.CARRY]
        demand(stmt, len(names) == len(carried), f"carries {names}, not {[arg.value.name for arg in carried]}")
        for name, arg in zip(names, carried, strict=True):
            begin = self._env.get(name)
            fits = isinstance(begin, Local) and self._ops.first(begin.name) == self._ops.first(arg.source)
            demand(stmt, fits, f"`{name}` does not begin as {arg.source}")
        return dict(zip(names, carried, strict=True))

    def _passed(self, node: ast.expr, inside: Mapping[str, Seen]) -> Seen:
        """An argument of a turn."""
        text = ast.unparse(node)
        return inside[text] if text in inside else self._expressions.value(node)

    def _drawn(self, stmt: ast.For, region: Region, draws: Mapping[str, Local]) -> dict[str, Local]:
        """The draws of one iteration, where the repeat takes any."""
        slices = [arg for arg in region.args if are_draws(arg.value.type)]
        demand(stmt, len(slices) == len(draws), f"draws {len(draws)} times, not {len(slices)}")
        for arg, all_ in zip(slices, draws.values(), strict=True):
            demand(stmt, self._forks.get(all_.name) == self._forks[arg.source], f"`{all_.name}` is not {arg.source}")
        return {name: self._expressions.local(arg.value.name) for name, arg in zip(draws, slices, strict=True)}

    def _turn(self, region: Region, place: Place) -> Turn:
        slices = [arg.source for arg in region.args if arg.enter is Enter.EACH]
        return Turn(self._model.program, region, place, {self._ops.first(name) for name in slices})

    def _moved(self, loop: Loop, x: str, zipped: Mapping[str, Seen], turn: Turn) -> dict[str, Buffers]:
        """Reads the lines around a turn, which pass on `x`; the buffers that are given to the turns inside."""
        level = len(self._place.repeats)
        buffers = {n: seen for n, seen in zipped.items() if isinstance(seen, Buffers) and seen.level == level}
        demand(loop.node, len(buffers) == len(zipped), f"zips what are no buffers of these turns: {', '.join(zipped)}")
        check_moves(self._expressions, loop, x, buffers, turn)
        return {n: Buffers(seen.bucket, level + 1) for n, seen in buffers.items() if seen.bucket in turn.inner}

    def _followed(self, region: Region, names: Sequence[str]) -> str:
        """The first name by which backward comes through all turns: what is carried is read, and in the end used."""
        inside, after = uses(region), uses(self._region) + Counter(self._results)
        carried = (arg.value for arg in region.args if arg.enter is Enter.CARRY)
        found = zip(names, carried, region.results, strict=False)
        able = (n for n, it, end in found if it.type.differentiable and inside[it.name] and after[end.name])
        return next(able, "")

    def _modules(self, node: ast.AST, name: str, region: Region) -> Modules:
        modules = self._class.attributes.get(name)
        if not isinstance(modules, Modules) or name in self._expressions.read or modules.of not in self._model.classes:
            raise wrong(node, f"`self.{name}` holds no modules that are not run yet")
        self._expressions.read.add(name)
        wanted = self._turns_of(region)
        demand(node, modules.turns == wanted, f"has modules for the turns {modules.turns}, not {wanted}")
        return modules

    def _turns_of(self, region: Region) -> int | str:
        """What a repeat has modules for: for all of so many turns."""
        return self._model.program.size(region.dim)

    def _slice(self, region: Region, turn: Turn) -> None:
        """Inside a repeat a parameter's slice, or what a turn gathers of it, goes by the parameter's name."""
        held = [arg for arg in region.args if arg.enter is Enter.EACH and not are_draws(arg.value.type)]
        slices = {arg.value.name: self._ops.first(arg.source) for arg in held}
        self._model.same.update(slices | turn.weights())
        self._model.taken += len(turn.flat())
