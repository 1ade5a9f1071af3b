"""The forward of a step as `nn.Module` classes: one for the model, one for each repeat.

Purpose: one line per named value and coercion; what the plan did not name stands inside the line that uses it, but
never a coercion behind another: a program communicates in the order of its IR.
Non-goals: the step around forward (`step`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from attrs import define, field, frozen

from ..again import is_made_again, runs_again
from ..ir import Arg, Attr, Enter, Kind, Op, Param, Program, Region, Stmt, Type, base, types, walk
from ..layout import stored_as_matrix
from ..ops.dropout import are_draws
from ..placements import coercion, conjugate, ends
from .expressions import ATOM, Context, Expr, express
from .words import axes_word, class_name, identifier, literal, matrix_shape, place, shape, singular

WIDTH = 120
INLINE = 88
"""The longest expression that still takes in another one."""


@frozen
class Table:
    """Rotary positions that a model computes once."""

    seq: int
    dim: int
    theta: float
    between: int
    scaling: tuple[tuple[str, Attr], ...] = ()


@define
class Module:
    """A class under construction."""

    name: str
    doc: str
    axes: dict[tuple[str, ...], str] = field(factory=dict[tuple[str, ...], str])  # groups over axes, by attribute
    weights: dict[str, Param] = field(factory=dict[str, Param])  # by attribute, as one repetition holds it
    children: dict[str, tuple["Module", int]] = field(factory=dict[str, tuple["Module", int]])
    tables: dict[Table, str] = field(factory=dict[Table, str])
    arguments: dict[str, str] = field(factory=dict[str, str])  # Python types by name
    lines: list[str] = field(factory=list[str])
    result: str = ""

    def attributes(self) -> set[str]:
        """All names taken so far."""
        return {*self.axes.values(), *self.weights, *self.children, *self.tables.values()}


@frozen
class Model:
    """All classes, innermost first, the model last; and each parameter's name pattern in its state."""

    classes: tuple[Module, ...]
    patterns: dict[str, str]


class Modules:
    """Makes the classes of a program's forward block."""

    def __init__(self, program: Program, forward: Region, inputs: tuple[Arg, ...], leaves: dict[str, str]) -> None:
        self.program = program
        self.types = types(program)
        self.params = {p.name: p for p in program.params}
        self.leaves = leaves  # leaf value → parameter; grows by the slices of repeats
        self._forward, self._inputs = forward, inputs
        self._classes: list[Module] = []
        self._patterns: dict[str, str] = {}
        self.made_again = _made_again(program, forward)

    def build(self, result: str) -> Model:
        """The classes; `result` is the value that the model returns."""
        given = ", ".join(f"{base(a.value.name)}: {shape(a.value.type, self.program)}" for a in self._inputs)
        doc = f"The sum of token losses of this rank's part of a microbatch.  {given}"
        if len(f'    """{doc}"""') > WIDTH:
            doc = doc.replace("  ", "\n\n    ") + "\n    "
        module = Module(class_name(self.program.name), doc)
        body = Body(self, module, self._forward.body, (result,), "")
        for arg in self._inputs:
            body.bind_argument(arg.value.name)
        body.write()
        self._classes.append(module)
        return Model(tuple(self._classes), self._patterns)

    def child(
        self, region: Region, parent: Module, prefix: str, captured: list[str], tables: list[Table]
    ) -> tuple[Module, str]:
        """The class of a repeat's body, and the attribute under which `parent` holds its modules."""
        attribute = identifier(region.dim, parent.attributes())
        taken = {c.name for c in self._classes} | {class_name(self.program.name)}
        name = identifier(class_name(singular(region.dim)), taken)
        carried = [arg for arg in region.args if arg.enter is Enter.CARRY]
        doc = ", ".join(f"{identifier(a.value.name, set())}: {shape(a.value.type, self.program)}" for a in carried)
        module = Module(name, f"One of {self.program.size(region.dim)} {region.dim}.  {doc}")
        ends_ = tuple(end.name for end, _ in zip(region.yields, carried, strict=False))
        body = Body(self, module, region.body, ends_, f"{prefix}{attribute}.*.")
        for arg in carried:
            body.bind_argument(arg.value.name)
        for value in captured:
            body.bind_argument(value)
        for arg in region.args:
            if arg.enter is Enter.EACH and are_draws(arg.value.type):
                body.bind_argument(arg.value.name)
            elif arg.enter is Enter.EACH:
                body.bind_slice(arg)
        for table in tables:
            body.bind_table(table)
        body.write()
        self._classes.append(module)
        parent.children[attribute] = (module, self.program.size(region.dim))
        return module, attribute

    def declare(self, module: Module, prefix: str, param: Param) -> str:
        """The attribute under which `module` holds a parameter."""
        attribute = identifier(param.name, module.attributes())
        module.weights[attribute] = param
        self._patterns[param.name] = prefix + attribute
        return attribute


class Body:
    """Writes the lines of one `forward`."""

    def __init__(
        self, modules: Modules, module: Module, body: tuple[Stmt, ...], ends_: tuple[str, ...], prefix: str
    ) -> None:
        self._all, self._module, self._body, self._ends, self._prefix = modules, module, body, ends_, prefix
        self._uses = Counter(_reads(body)) + Counter(ends_)  # how often each value is read,
        self._left = Counter(self._uses)  # and how often it still will be
        self._consumer = {name: op.kind for op in body if isinstance(op, Op) for name in op.inputs}
        self._exprs: dict[str, Expr] = {}  # of what has a Python name, or will stand inside the line that uses it
        self._holder: dict[str, str] = {}  # Python name → the value it holds
        self._tables: dict[Table, str] = {}
        self._blocks: list[str] = []  # values whose `with regather` or `with recompute` block is open
        self._context = Context(modules.program, modules.types.__getitem__, self._axis, self._rotary, self._is_matrix)

    # ---- what the surroundings give

    def bind_argument(self, value: str) -> None:
        """An argument of `forward`; of draws there are none in evaluation."""
        self._module.arguments[self._hold(value)] = "Tensor | None" if are_draws(self._all.types[value]) else "Tensor"

    def bind_slice(self, arg: Arg) -> None:
        """A parameter of which every repetition has one."""
        assert arg.source in self._all.leaves, "emit: a repeat slices what is no parameter"
        self._all.leaves[arg.value.name] = self._all.leaves[arg.source]

    def bind_table(self, table: Table) -> None:
        """A table of rotary positions that the caller passes on."""
        name = identifier("rotary", set(self._holder) | set(self._tables.values()))
        self._tables[table] = name
        self._module.arguments[name] = "Tensor"

    # ---- lines

    def write(self) -> None:
        """Writes every statement, and returns."""
        for stmt in self._body:
            if isinstance(stmt, Region) or stmt.kind == "coerce":
                self._end_coercions()
            if isinstance(stmt, Region):
                self._repeat(stmt)
            else:
                self._op(stmt)
        names = [self._operand(name).text for name in self._ends]
        self._blocks.clear()
        self._module.result = ", ".join(names)

    def _op(self, op: Op) -> None:
        expr = express(op, [self._operand(name) for name in op.inputs], self._context)
        while len(expr.text) > INLINE and (longest := self._longest(op)):
            self._line(longest, self._exprs.pop(longest))
            expr = express(op, [self._operand(name) for name in op.inputs], self._context)
        for name in op.inputs:
            if name in self._exprs and self._exprs[name].ops:
                del self._exprs[name]
        if op.outputs[0].name in self._all.made_again:
            self._block(op, expr)
        elif len(op.outputs) == 1 and self._inlines(op):
            self._exprs[op.outputs[0].name] = expr
        else:
            self._assign(op, expr)

    def _inlines(self, op: Op) -> bool:
        (value,) = op.outputs
        consumer = self._consumer.get(value.name)
        if self._uses[value.name] != 1 or consumer is None or not value.name.startswith("_"):
            return False
        if op.kind == consumer == "add":
            return False  # in Python both would be one sum
        return consumer == "add" if op.kind == "coerce" else consumer != "coerce"

    def _longest(self, op: Op) -> str:
        """The operand of `op` with the longest text of its own; "" if all are names."""
        own = [
            name
            for name in op.inputs
            if name in self._exprs and self._exprs[name].ops and len(self._exprs[name].text) > 12
        ]
        return max(own, key=lambda name: len(self._exprs[name].text), default="")

    def _end_coercions(self) -> None:
        """A line of its own for a coercion that still was to stand inside another line."""
        for name in [name for name, expr in self._exprs.items() if any(op.kind == "coerce" for op in expr.ops)]:
            self._line(name, self._exprs.pop(name))

    def _assign(self, op: Op, expr: Expr) -> None:
        self._read(expr)
        targets = ", ".join(self._hold(value.name) for value in op.outputs)
        self._append(f"{targets} = {expr.text}", self._comment(expr))
        self._close_blocks()

    def _line(self, value: str, expr: Expr) -> None:
        """A line of its own for a value that was to stand inside another."""
        self._read(expr)
        self._append(f"{self._hold(value)} = {expr.text}", self._comment(expr))
        self._close_blocks()

    def _block(self, op: Op, expr: Expr) -> None:
        """Made for this block alone; backward makes it again."""
        (value,) = op.outputs
        function, _, arguments = expr.text.partition("(")
        self._read(expr)
        target = self._hold(value.name)
        if value.name not in _reads(self._body):  # it is returned, and nothing here would keep it
            alone = expr.text if op.kind == "coerce" else f"recomputed({function}, {arguments}"
            self._append(f"{target} = {alone}", self._comment(expr))
            return
        called = f"regather({arguments}" if op.kind == "coerce" else f"recompute({function}, {arguments}"
        self._append(f"with {called} as {target}:", self._comment(expr))
        self._blocks.append(value.name)

    def _close_blocks(self) -> None:
        while self._blocks and not self._left[self._blocks[-1]]:
            self._blocks.pop()

    def _append(self, code: str, comment: str = "") -> None:
        indent = "    " * (2 + len(self._blocks))
        line = f"{indent}{code}  # {comment}" if comment else indent + code
        if len(line) > WIDTH and comment:
            self._module.lines += [f"{indent}# {comment}", indent + code]
        else:
            self._module.lines.append(line)

    def _repeat(self, region: Region) -> None:
        program = self._all.program
        carried = [arg for arg in region.args if arg.enter is Enter.CARRY]
        captured = [name for name in _captured(region) if name not in self._all.leaves]
        weights = [name for name in _captured(region) if name in self._all.leaves]
        tables = list(
            dict.fromkeys(table_of(op, self._all.types, program) for op in walk(region.body) if op.kind == "rope")
        )
        module, attribute = self._all.child(region, self._module, self._prefix, [*captured, *weights], tables)
        variables = [self._loop_variable(arg) for arg in carried]
        given = [self._operand(name).text for name in (*captured, *weights)]
        for name in (*captured, *weights):
            self._left[name] -= 1
        item = identifier(singular(region.dim), set(self._holder))
        draws = dict(self._drawn(arg) for arg in region.args if are_draws(arg.value.type))
        passed = [*variables, *given, *draws, *map(self._table, tables)]
        self._append(_loop(item, f"self.{attribute}", draws))
        called, comment = f"{item}({', '.join(passed)})", place(region.span)
        if runs_again(program, region):
            called, comment = f"recomputed({item}, {', '.join(passed)})", f"bwd: forward again  {comment}"
        self._append(f"    {', '.join(variables)} = {called}", comment)
        for variable, result in zip(variables, region.results, strict=False):
            self._holder[variable] = result.name
            self._exprs[result.name] = Expr(variable, ATOM, (result.name,))
        self._close_blocks()
        assert module.arguments, "emit: a repeat without arguments"

    def _drawn(self, arg: Arg) -> tuple[str, str]:
        """The Python names of the draws of one iteration and of all."""
        all_ = self._operand(arg.source).text
        self._left[arg.source] -= 1
        return self._hold(arg.value.name), all_

    def _loop_variable(self, arg: Arg) -> str:
        """The Python name that is carried through the loop."""
        source = self._operand(arg.source)
        self._left[arg.source] -= 1
        if source.text.isidentifier() and not self._left[arg.source] and not source.ops:
            return source.text
        name = self._hold(arg.value.name)
        self._append(f"{name} = {source.text}", self._comment(source) if source.ops else "")
        return name

    # ---- values

    def _operand(self, name: str) -> Expr:
        if name in self._exprs:
            return self._exprs[name]
        if name in self._all.leaves:
            return Expr(f"self.{self._attribute(name)}", ATOM, ())
        raise AssertionError(f"emit: {name} is read before it is written")

    def _attribute(self, name: str) -> str:
        param = self._all.params[self._all.leaves[name]]
        for attribute, held in self._module.weights.items():
            if held is param:
                return attribute
        return self._all.declare(self._module, self._prefix, param)

    def _hold(self, value: str) -> str:
        """A Python name for `value`: its own, if what held it is not read any more."""
        held = {name for name, value in self._holder.items() if self._left[value]}
        name = identifier(value, held | set(self._tables.values()))
        self._holder[name] = value
        self._exprs[value] = Expr(name, ATOM, (value,))
        return name

    def _read(self, expr: Expr) -> None:
        for name in expr.reads:
            self._left[name] -= 1

    def _axis(self, axes: tuple[str, ...]) -> str:
        if axes not in self._module.axes:
            self._module.axes[axes] = identifier(axes_word(axes, self._all.program), self._module.attributes())
        return f"self.{self._module.axes[axes]}"

    def _rotary(self, op: Op) -> str:
        return self._table(table_of(op, self._all.types, self._all.program))

    def _table(self, table: Table) -> str:
        if table in self._tables:
            return self._tables[table]
        if table not in self._module.tables:
            self._module.tables[table] = identifier("rotary", self._module.attributes())
        return f"self.{self._module.tables[table]}"

    def _is_matrix(self, name: str) -> bool:
        return name in self._all.leaves and stored_as_matrix(self._all.params[self._all.leaves[name]])

    def _comment(self, expr: Expr) -> str:
        op = expr.ops[-1]
        parts = [shape(value.type, self._all.program) for value in op.outputs[:1]]
        parts += [self._note(part) for part in expr.ops if part.kind == "coerce"]
        if op.kind != "coerce" and op.outputs[0].name in self._all.made_again:
            parts.append(f"bwd: {op.kind} again")
        return "  ".join([*parts, place(op.span)])

    def _note(self, op: Op) -> str:
        """What a coercion does, forward and backward."""
        source, target = ends(op)
        if source.kind is Kind.MAXIMUM:
            return f"{source}→{target}  no gradient"
        back = coercion(*conjugate(source, target)).collective or "none"
        again = "all_gather again, " if op.outputs[0].name in self._all.made_again else ""
        return f"{source}→{target}  bwd: {again}{back}"


def _loop(item: str, modules: str, draws: Mapping[str, str]) -> str:
    """The line that begins a loop over modules; `draws` are those of one iteration, and all of which they are."""
    if not draws:
        return f"for {item} in {modules}:"
    return f"for {', '.join([item, *draws])} in zip({', '.join([modules, *draws.values()])}, strict=True):"


def table_of(op: Op, types: dict[str, Type], program: Program) -> Table:
    """The table of rotary positions that an op `rope` needs."""
    type = types[op.inputs[0]]
    between = len(type.dims) - type.dims.index("seq") - 2
    given = dict(op.attrs)
    theta, dims = given.pop("theta"), given.pop("dims", program.local_size(type, type.dims[-1]))
    assert isinstance(theta, float), "emit: rope without theta"
    return Table(program.local_size(type, "seq"), round(float(str(dims))), theta, between, tuple(given.items()))


def _reads(body: tuple[Stmt, ...]) -> Iterator[str]:
    """Every reading of a value by the statements of a body."""
    for stmt in body:
        if isinstance(stmt, Op):
            yield from stmt.inputs
        else:
            yield from (arg.source for arg in stmt.args)
            yield from _captured(stmt)


def _captured(region: Region) -> list[str]:
    """Values from outside that a repeat's body reads, other than by its arguments."""
    inside = {arg.value.name for arg in region.args}
    found: dict[str, None] = {}
    for stmt in region.body:
        reads = stmt.inputs if isinstance(stmt, Op) else [*(a.source for a in stmt.args), *_captured(stmt)]
        found |= dict.fromkeys(name for name in reads if name not in inside)
        inside |= {v.name for v in (stmt.outputs if isinstance(stmt, Op) else stmt.results)}
    return list(found)


def _made_again(program: Program, region: Region) -> set[str]:
    """Results of single forward ops that backward makes again instead of keeping them."""
    if runs_again(program, region):
        return set()
    inner = [_made_again(program, stmt) for stmt in region.body if isinstance(stmt, Region)]
    own = [stmt for stmt in region.body if isinstance(stmt, Op) and is_made_again(program, stmt)]
    return {op.outputs[0].name for op in own}.union(*inner)


def weight_line(attribute: str, param: Param, program: Program) -> str:
    """The declaration of a parameter in its module, as one repetition holds it."""
    type = param.type
    for dim in type.dims[: param.stacked]:
        type = type.inside(dim)
    groups = _groups(param, type)
    sizes = [_product(program.size(dim) for dim in group) for group in groups]
    split = {i: type.axes_of(group[0]) for i, group in enumerate(groups) if type.axes_of(group[0])}
    arguments = ["mesh", *map(str, sizes)]
    if split:
        arguments.append("split={" + ", ".join(f"{i}: {literal(axes)}" for i, axes in split.items()) + "}")
    arguments.append(f"init={param.init.kind}({', '.join(map(literal, param.init.args))})")
    joined = param.inner if stored_as_matrix(param) else 0
    return f"self.{attribute} = weight({', '.join(arguments)})  # {matrix_shape(type, joined, program)}"


def _groups(param: Param, type: Type) -> list[tuple[str, ...]]:
    """The dims of each stored dim."""
    if not stored_as_matrix(param):
        return [(dim,) for dim in type.dims]
    cut = len(type.dims) - param.inner
    return [type.dims[:cut], type.dims[cut:]]


def _product(sizes: Iterator[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
