"""Reads what is different of a program in stages, and gives the rest as a program without them would have it.

Purpose: every branch is that of the stage to which the IR gives its ops, every loop is over the turns of the stage that
is asked for, and what is returned is what crosses.  Then branches and stages are taken out of the text, and the other
readers hold it to the IR as it stands.
Non-goals: which stage has what (`stages`), and the order of work, which is the IR's word for word.
"""

import ast
from collections.abc import Iterator, Sequence

from attrs import evolve, frozen

from ...ir import Enter, Pipeline, Program
from ...stages import groups, stages
from .text import DTYPES, demand, demand_same, targets, wrong
from .values import blocks

ASKED = "stage"
"""What `forward` calls the stage that is asked for, where no value has the name."""


def constants(program: Program) -> dict[str, ast.expr]:
    """The values that a program with a pipeline binds, by name; nothing without one."""
    pipeline = program.pipeline
    if not pipeline or not pipeline.schedule:
        return {}
    of = [stage.turns for stage in stages(program, pipeline)]
    turns = {
        dim: tuple(f"range({each[i].start}, {each[i].stop})" for each in of) for i, dim in enumerate(pipeline.dims)
    }
    shown = ", ".join(f"{dim!r}: ({', '.join(ranges)})" for dim, ranges in turns.items())
    crossing = (
        f"Carried({program.local_shape(arg.value.type)!r}, {DTYPES[arg.value.type.dtype]})"
        for arg in _repeats(program, pipeline)[0].args
        if arg.enter is Enter.CARRY
    )
    rows = tuple(" ".join(map(str, row)) for row in pipeline.schedule.rows)
    arguments = f"{pipeline.axis!r}, homes={pipeline.homes!r}, carried=({', '.join(crossing)},), rows={rows!r}"
    texts = {"TURNS": f"{{{shown}}}", "PIPELINE": f"Pipeline({arguments})"}
    return {name: ast.parse(text, mode="eval").body for name, text in texts.items()}


def _repeats(program: Program, pipeline: Pipeline):
    return groups(pipeline, blocks(program)[1].body)[1]


@frozen
class Unstaged:
    """The class of a model as it would be without stages, and the stages in whose branches it declares each weight."""

    node: ast.ClassDef
    held: dict[str, tuple[int, ...]]


def unstaged(program: Program, pipeline: Pipeline, node: ast.ClassDef) -> Unstaged:
    """The class of the whole model without its stages."""
    documented = ast.get_docstring(node) is not None
    match node.body[documented:]:
        case [ast.FunctionDef(name="__init__") as init, ast.FunctionDef(name="forward") as forward]:
            made = _Init(program, init)
            plain = [made.node, _Forward(program, pipeline, forward).node]
        case _:
            raise wrong(node, "is more or less than `__init__` and `forward`")
    body = [*node.body[:documented], *plain]
    return Unstaged(ast.copy_location(ast.ClassDef(**{**vars(node), "body": body}), node), made.held)


def _copied(node: ast.FunctionDef, arguments: Sequence[ast.arg], body: Sequence[ast.stmt]) -> ast.FunctionDef:
    """The function with other arguments and another body."""
    args = ast.arguments(**{**vars(node.args), "args": [*arguments]})
    return ast.copy_location(ast.FunctionDef(**{**vars(node), "args": args, "body": [*body]}), node)


class _Init:
    def __init__(self, program: Program, node: ast.FunctionDef) -> None:
        *others, last = node.args.args
        same = last.arg == "stages" and last.annotation and ast.unparse(last.annotation) == "tuple[int, ...]"
        demand(node, bool(same), "does not take `stages: tuple[int, ...]` last")
        self._program, self.held = program, dict[str, tuple[int, ...]]()
        self.node = _copied(node, others, [*self._body(node.body)])

    def _body(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for stmt in body:
            match stmt:
                case ast.If(orelse=[]):
                    held = _stages(stmt.test)
                    for inner in stmt.body:
                        self.held[_weight(inner)] = held
                    yield from stmt.body
                case ast.Assign(value=ast.Call(func=ast.Attribute(attr="ModuleDict")) as call):
                    yield ast.copy_location(evolve_assign(stmt, self._modules(call)), stmt)
                case ast.Assign(value=ast.Call(func=ast.Name(id="weight"))):
                    raise wrong(stmt, "declares a weight for every rank")
                case _:
                    yield stmt

    def _modules(self, call: ast.Call) -> ast.expr:
        """`nn.ModuleDict({str(i): Layer(mesh) for stage in stages for i in TURNS["layers"][stage]})` as a list of all."""
        match call.args:
            case [ast.DictComp(value=ast.Call(func=ast.Name(id=name)), generators=[_, ast.comprehension(iter=turns)])]:
                dim = _dim(turns)
                mine = f"for stage in stages for i in TURNS[{dim!r}][stage]"
                demand_same(call, f"nn.ModuleDict({{str(i): {name}(mesh) {mine}}})")
                size = self._program.size(dim)
                return ast.copy_location(_parsed(f"nn.ModuleList({name}(mesh) for _ in range({size}))", call), call)
            case _:
                raise wrong(call, "is no module for each turn of this rank's stages")


def evolve_assign(stmt: ast.Assign, value: ast.expr) -> ast.Assign:
    """The assignment of another value."""
    return ast.Assign(targets=stmt.targets, value=value)


def _stages(test: ast.expr) -> tuple[int, ...]:
    """`0 in stages`, or `not {0, 3}.isdisjoint(stages)`."""
    numbers = tuple(node.value for node in ast.walk(test) if isinstance(node, ast.Constant))
    alone = f"{numbers[0]} in stages" if numbers else ""
    demand_same(test, alone if len(numbers) == 1 else f"not {{{', '.join(map(str, numbers))}}}.isdisjoint(stages)")
    return tuple(int(str(number)) for number in numbers)


def _weight(stmt: ast.stmt) -> str:
    match stmt:
        case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call(func=ast.Name(id="weight"))):
            return name
        case _:
            raise wrong(stmt, f"`{ast.unparse(stmt)}` depends on a rank's stages")


def _dim(node: ast.expr) -> str:
    """The repeat of `TURNS["layers"][stage]`."""
    match node:
        case ast.Subscript(value=ast.Subscript(value=ast.Name(id="TURNS"), slice=ast.Constant(value=str(dim)))):
            return dim
        case _:
            raise wrong(node, f"`{ast.unparse(node)}` are no turns of a stage")


class _Forward:
    def __init__(self, program: Program, pipeline: Pipeline, node: ast.FunctionDef) -> None:
        self._program, self._pipeline, self._node = program, pipeline, node
        self._dims = [region.dim for region in _repeats(program, pipeline)]
        crossing = [a for a in _repeats(program, pipeline)[0].args if a.enter is Enter.CARRY]
        self._owner = {g: k for k, stage in enumerate(stages(program, pipeline)) for g in stage.groups}
        own, asked, entering, *others = node.args.args
        self._asked = asked.arg
        demand(node, asked.annotation is not None and ast.unparse(asked.annotation) == "int", "asks for no stage")
        types = ", ".join(["Tensor"] * len(crossing))
        said = ast.unparse(entering.annotation) if entering.annotation else ""
        demand(node, said == (types if len(crossing) == 1 else f"tuple[{types}]"), f"`{entering.arg}` is {said}")
        self._entering, self._count = entering.arg, len(crossing)
        self._names: list[str] = [entering.arg] if self._count == 1 else []
        self._group = 0
        body = [inner for stmt in node.body for inner in self._statement(stmt)]
        demand(node, self._group == len(self._dims) + 1, "has not the stages of the IR")
        self.node = _copied(node, [own, *others], body)

    def _statement(self, stmt: ast.stmt) -> list[ast.stmt]:
        last = len(self._dims)
        match stmt:
            case ast.Expr(value=ast.Constant()):
                return [stmt]
            case ast.If(test=ast.Compare(ops=[ast.Lt()]), orelse=[]) if self._group == last:
                demand_same(stmt.test, f"{self._asked} < {len(self._pipeline.turns) - 1}")
                demand(stmt, len(stmt.body) == 1, "does more than return what crosses")
                demand_same(stmt.body[0], f"return {', '.join(self._names)}")
                self._group += 1
                return []
            case ast.If(test=ast.Compare(ops=[ast.Eq()]), orelse=[]) if self._group < last:
                demand_same(stmt.test, f"{self._asked} == {self._owner[self._group]}")
                return [inner for each in stmt.body for inner in _one_by_one(each)]
            case ast.For() if self._group < last:
                return [self._loop(stmt)]
            case ast.Assign(targets=[ast.Tuple()], value=ast.Name(id=name)) if name == self._entering and not self._group:
                demand(stmt, self._count > 1, f"unpacks `{name}`")
                self._names = targets(stmt.targets[0])
                return []
            case ast.Assign(value=ast.Call(func=ast.Name(id="fork"))) if not self._group:
                return [stmt]
            case _:
                demand(stmt, self._group > last, f"every stage does `{ast.unparse(stmt)}`")
                return [stmt]

    def _loop(self, stmt: ast.For) -> ast.stmt:
        """`for i in TURNS["layers"][stage]: x = self.layers[str(i)](x, …)` as a loop over all modules."""
        dim = _dim(stmt.iter)
        demand(stmt, dim == self._dims[self._group], f"runs {dim}, not {self._dims[self._group]}")
        demand_same(stmt.iter, f"TURNS[{dim!r}][{self._asked}]")
        (index,) = targets(stmt.target)
        held = next((ast.unparse(n.value) for n in ast.walk(stmt) if isinstance(n, ast.Subscript) and _is_str(n.slice, index)), "")
        turn = _Turn(held, index)
        body = [turn.visit(inner) for inner in stmt.body]
        carried = targets(body[-1].targets[0]) if isinstance(body[-1], ast.Assign) else []
        demand(stmt, carried == self._names, f"carries {carried}, and {self._names} enter a stage")
        if turn.again:
            size = self._program.size(dim)
            turn.zipped.append(f"[i % {turn.again} == 0 for i in range({size})]")
        zipped = ", ".join([held, *turn.zipped])
        names = ", ".join([turn.item, *(f"{turn.item}_{k}" for k in range(len(turn.zipped)))])
        head = f"for {names} in zip({zipped}, strict=True): pass" if turn.zipped else f"for {names} in {held}: pass"
        (loop,) = ast.parse(head).body
        assert isinstance(loop, ast.For), "emit: no loop"
        loop.body = body
        self._group += 1
        return ast.fix_missing_locations(ast.copy_location(loop, stmt))


class _Turn(ast.NodeTransformer):
    """One turn's statements by the name of its module, and what is taken of each turn by its number."""

    def __init__(self, held: str, index: str) -> None:
        self._held, self._index = held, index
        self.item = "module_of_turn"
        self.zipped: list[str] = []
        self.again = 0  # of how many turns backward does one again, where it does not do all

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        match node.value:
            case ast.Compare(left=ast.BinOp(right=ast.Constant(value=int(every)))) if node.arg == "again":
                demand_same(node.value, f"{self._index} % {every} == 0")
                self.again = every
                value = ast.Name(f"{self.item}_{len(self.zipped)}", ast.Load())
                return ast.copy_location(ast.keyword("again", value), node)
            case _:
                self.generic_visit(node)
                return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if _is_str(node.slice, self._index) and ast.unparse(node.value) == self._held:
            return ast.copy_location(ast.Name(self.item, ast.Load()), node)
        if isinstance(node.slice, ast.Name) and node.slice.id == self._index:
            self.zipped.append(ast.unparse(node.value))
            return ast.copy_location(ast.Name(f"{self.item}_{len(self.zipped) - 1}", ast.Load()), node)
        return node


def _is_str(node: ast.expr, index: str) -> bool:
    return ast.unparse(node) == f"str({index})"


def _one_by_one(stmt: ast.stmt) -> list[ast.stmt]:
    """`x, s = a, b` as assignments of one name, by way of names that the text has not."""
    match stmt:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            held = [f"value_{i}_of_several" for i in range(len(values))]
            first = [ast.Assign([ast.Name(name, ast.Store())], value) for name, value in zip(held, values, strict=True)]
            then = [ast.Assign([name], ast.Name(of, ast.Load())) for name, of in zip(names, held, strict=True)]
            return [ast.fix_missing_locations(ast.copy_location(each, stmt)) for each in (*first, *then)]
        case _:
            return [stmt]


def _parsed(text: str, at: ast.AST) -> ast.expr:
    node = ast.parse(text, mode="eval").body
    for each in ast.walk(node):
        ast.copy_location(each, at)
    return node


def as_loop(stmt: ast.stmt, trains: bool, inputs: Sequence[str]) -> list[ast.stmt] | None:
    """`loss = PIPELINE.run(model, batch, share, mesh)` as the loop over microbatches that it stands for; else None."""
    match stmt:
        case ast.Assign(targets=[ast.Name(id=loss)], value=ast.Call(func=ast.Attribute(value=ast.Name(id="PIPELINE"))) as call):
            pass
        case _:
            return None
    given = ", ".join(inputs)
    if not trains:
        demand_same(call, "PIPELINE.evaluate(model, batch, mesh)")
        body = f"{loss} += model({given})"
    else:
        seed = ast.unparse(call.args[2]) if len(call.args) == 4 else ""
        demand_same(call, f"PIPELINE.run(model, batch, {seed}, mesh)")
        body = f"part_ = model({given})\n    (part_ * {seed}).backward()\n    {loss} += part_.detach()"
    text = f"{loss} = torch.zeros_like(share)\nfor {given} in batch.microbatches():\n    {body}"
    return [ast.copy_location(each, stmt) for each in ast.parse(text).body]
