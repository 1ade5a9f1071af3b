"""The statements of a `forward`: ops, blocks of what backward makes again, loops over the modules of a repeat.

Purpose: which value has a line, and which stands inside the line that reads it; the class of each repeat's body.
Non-goals: lines and names as such (`lines`), and those around a turn that moves state (`turns`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from ..analysis.recompute import runs_again, turns_again
from ..ir import Arg, Bucket, Enter, Op, Region, Stmt, uses, walk
from ..ops.attention import ROPES
from ..ops.dropout import are_draws
from .expressions import Expr, express
from .line_writer import Lines
from .live_values import captured, reads
from .loop_hooks import Around, Line, around, is_flat, loop_name
from .module import Child, Frame, Module, Table, table_of
from .naming import WIDTH, call, class_name, exploded, identifier, literal, place, shape, singular

AGAIN = "again"
"""What says so, in loops and calls, if backward does a turn again and not all."""

INLINE = 88
"""The longest expression that still takes in another one."""


@frozen
class Turn:
    """What a turn in a loop has of its own, as Python names it."""

    module: str
    draws: tuple[str, ...]
    again: str
    """Whether backward does it again, where it does not do all."""
    flat_params: Mapping[str, str] = {}
    """Its buffers, by bucket."""


class Body:
    """Writes the lines of one `forward`; `prefix` is that of its weights' names, inside so many repeats."""

    def __init__(
        self, frame: Frame, module: Module, body: Sequence[Stmt], ends: Sequence[str], prefix: str = "", depth: int = 0
    ) -> None:
        self._body = tuple(stmt for stmt in body if not is_flat(frame.program, stmt))
        self._frame, self._module, self._ends, self._prefix, self._depth = frame, module, ends, prefix, depth
        self._uses = Counter(reads(self._body)) + Counter(ends)
        self._consumer = {name: op for op in self._body if isinstance(op, Op) for name in op.inputs}
        self._lines = Lines(frame, module, prefix, self._uses)
        self._flats: dict[str, str] = {}  # bucket → the text of its buffers, one for each turn of a repeat of this body

    # ---- what the surroundings give

    def bind(self, region: Region, given: list[str], tables: list[Table], flat_params: list[Bucket]) -> None:
        """The arguments of a repeat's body, in their order, and the slices that each of its modules holds."""
        slices = [arg for arg in region.args if arg.enter is Enter.EACH]
        draws = [arg.value.name for arg in slices if are_draws(arg.value.type)]
        carried = [arg.value.name for arg in region.args if arg.enter is Enter.CARRY]
        for value in (*carried, *given, *draws):
            self.bind_argument(value)
        for arg in slices:
            if arg.source in self._frame.leaves:
                self._frame.leaves[arg.value.name] = self._frame.leaves[arg.source]
        for bucket in flat_params:
            levels = len(bucket.turns) - self._depth
            name = loop_name(bucket, self._depth - 1, alone=False)
            self._flats[bucket.name] = self._lines.argument(name, "list[" * levels + "FlatParam" + "]" * levels)
        for table in tables:
            self._lines.bind_table(table)

    def bind_argument(self, value: str) -> None:
        """An argument of `forward`; of draws there are none in evaluation."""
        type = "Tensor | None" if are_draws(self._frame.types[value]) else "Tensor"
        self._module.arguments[self._lines.hold(value)] = type

    def bind_flats(self) -> None:
        """The flat buffers of all turns, by bucket."""
        name = self._lines.argument("flat_params", "FlatParams")
        self._flats = {b.name: f"{name}[{literal(b.name)}]" for b in self._frame.program.buckets if b.turns}

    # ---- statements

    def write(self) -> None:
        """Writes every statement, and returns."""
        self._statements(self._body)
        self._finish()

    def _statements(self, body: Iterable[Stmt]) -> None:
        for stmt in body:
            if isinstance(stmt, Region) or stmt.kind == "coerce":
                self._end_coercions(stmt)
            if isinstance(stmt, Region):
                self._repeat(stmt)
            else:
                self._op(stmt)

    def _finish(self) -> None:
        self._lines.finish(", ".join(self._lines.operand(name).text for name in self._ends))

    def _op(self, op: Op) -> None:
        expr = self._express(op)
        while len(expr.text) > INLINE and (longest := self._longest(op)):
            self._lines.assign([longest], self._lines.exprs.pop(longest))
            expr = self._express(op)
        for name in op.inputs:
            if name in self._lines.exprs and self._lines.exprs[name].ops:
                del self._lines.exprs[name]
        if op.outputs[0].name in self._frame.made_again:
            self._block(op, expr)
        elif len(op.outputs) == 1 and self._inlines(op):
            self._lines.exprs[op.outputs[0].name] = expr
        else:
            values = [value.name for value in op.outputs]
            self._lines.assign(values, expr, [self._becomes(value) for value in values] if values[1:] else values)

    def _becomes(self, value: str) -> str:
        """What an unnamed result is called: as what is made of it, so that nothing holds its memory from there on."""
        op = self._consumer.get(value)
        if not value.startswith("_") or self._uses[value] != 1 or op is None:
            return value
        made = op.outputs[0] if len(op.outputs) == 1 else dict(zip(op.inputs, op.outputs, strict=False)).get(value)
        return value if made is None or made.name.startswith("_") else made.name

    def _express(self, op: Op) -> Expr:
        return express(op, [self._lines.operand(name) for name in op.inputs], self._lines.context)

    def _inlines(self, op: Op) -> bool:
        (value,) = op.outputs
        consumer = self._consumer.get(value.name)
        if self._uses[value.name] != 1 or consumer is None or not value.name.startswith("_"):
            return False
        if op.kind == consumer.kind == "add":
            return False  # in Python both would be one sum
        return consumer.kind == "add" if op.kind == "coerce" else consumer.kind != "coerce"

    def _longest(self, op: Op) -> str:
        """The operand of `op` with the longest text of its own; "" if all are names."""
        inside = {name: self._lines.exprs[name] for name in op.inputs if name in self._lines.exprs}
        own = [name for name, expr in inside.items() if expr.ops and len(expr.text) > 12]
        return max(own, key=lambda name: len(inside[name].text), default="")

    def _end_coercions(self, before: Stmt | None = None) -> None:
        """Lines of their own for coercions that still were to stand inside other lines.

        And for all else that was, and does not stand inside the coercion that comes: backward goes by the order in
        which forward was made.
        """
        exprs, inside = self._lines.exprs, before.inputs if isinstance(before, Op) else ()
        waiting = [name for name, expr in exprs.items() if expr.ops and name not in inside]
        for name in waiting:
            if before or any(op.kind == "coerce" for op in exprs[name].ops):
                self._lines.assign([name], exprs.pop(name))

    def _block(self, op: Op, expr: Expr) -> None:
        """Made for this block alone; backward makes it again."""
        (value,) = op.outputs
        function, _, arguments = expr.text.partition("(")
        self._lines.read(expr)
        target = self._lines.hold(value.name)
        if value.name not in reads(self._body):  # it is returned, and nothing here would keep it
            alone = expr.text if op.kind == "coerce" else f"recomputed({function}, {arguments}"
            self._lines.append(f"{target} = {alone}", self._lines.comment(expr))
            return
        called = f"regather({arguments}" if op.kind == "coerce" else f"recompute({function}, {arguments}"
        self._lines.append(f"with {called} as {target}:", self._lines.comment(expr))
        self._lines.open_block(value.name)

    # ---- repeats

    def _repeat(self, region: Region) -> None:
        lines, leaves = self._lines, self._frame.leaves
        given = sorted(captured(region), key=lambda name: name in leaves)  # values first, then parameters
        tables = list(dict.fromkeys(self._table_of(op) for op in walk(region.body) if op.kind in ROPES))
        turned = self._turned(region)
        inner = [bucket for bucket in turned if len(bucket.turns) > self._depth + 1]
        attribute = self._child(region, given, tables, inner)
        variables = self._entering(region)
        texts = [lines.operand(name).text for name in given]
        for name in given:
            lines.left[name] -= 1
        turn = self._open(region, attribute, turned)
        inside = [turn.flat_params[bucket.name] for bucket in inner]
        passed = [*variables, *texts, *turn.draws, *inside, *map(lines.table, tables)]
        own = {bucket: turn.flat_params[bucket.name] for bucket in turned if bucket not in inner}
        around = self._around(region, own, variables)
        self._append(around.before)
        self._append([self._call(region, turn, variables, passed)])
        self._append(around.after)
        for variable, result in zip(variables, region.results, strict=False):
            lines.rename(variable, result.name)
        lines.close_blocks()

    def _open(self, region: Region, attribute: str, turned: list[Bucket]) -> Turn:
        """Opens the loop over the modules of a repeat, with what else each turn has of its own."""
        item = self._lines.free(singular(region.dim))
        flat_params = self._loop_flats(turned, item)
        draws = dict(self._drawn(arg) for arg in region.args if are_draws(arg.value.type))
        zipped = {name: self._flats[bucket] for bucket, name in flat_params.items()} | draws
        if (every := self._every(region)) > 1:
            zipped |= {AGAIN: f"[i % {every} == 0 for i in range({self._frame.program.size(region.dim)})]"}
        self._lines.append(_loop(item, f"self.{attribute}", zipped, self._lines.indent()))
        return Turn(item, (*draws,), AGAIN, flat_params)

    def _child(self, region: Region, given: list[str], tables: list[Table], inner: list[Bucket]) -> str:
        """The attribute under which this module holds those of a repeat's body, whose class is written now."""
        program, frame = self._frame.program, self._frame
        attribute = identifier(region.dim, self._module.attributes())
        taken = {c.name for c in frame.classes} | {class_name(program.name)}
        name = identifier(class_name(singular(region.dim)), taken)
        carried = [arg for arg in region.args if arg.enter is Enter.CARRY]
        doc = ", ".join(f"{identifier(a.value.name, set())}: {shape(a.value.type, program)}" for a in carried)
        module = Module(name, f"One of {program.size(region.dim)} {region.dim}.  {doc}")
        ends = tuple(end.name for end, _ in zip(region.yields, carried, strict=False))
        body = Body(frame, module, region.body, ends, f"{self._prefix}{attribute}.*.", self._depth + 1)
        body.bind(region, given, tables, inner)
        body.write()
        frame.classes.append(module)
        self._module.children[attribute] = Child(module, region.dim, program.size(region.dim))
        return attribute

    def _call(self, region: Region, turn: Turn, variables: list[str], passed: list[str]) -> Line:
        """A turn of a repeat, which backward may do again."""
        function, arguments, comment = turn.module, passed, place(region.span)
        if every := self._every(region):
            given, turns = ([f"{AGAIN}={turn.again}"], f", every {every} turns") if every > 1 else ([], "")
            function, arguments = "recomputed", [turn.module, *passed, *given]
            comment = f"bwd: forward again{turns}  {comment}"
        return call(f"{', '.join(variables)} = {function}", arguments, self._lines.indent(deeper=1), after=0), comment

    def _every(self, region: Region) -> int:
        """Of how many turns backward does one again; 0 for none."""
        program = self._frame.program
        return turns_again(program, region.dim) if runs_again(program, region) else 0

    def _turned(self, region: Region) -> list[Bucket]:
        """The buckets that have a buffer for each turn of a repeat."""
        taken = [self._frame.turned(arg.source) for arg in region.args if arg.enter is Enter.EACH]
        return [b for b in self._frame.program.buckets if b in taken and len(b.turns) > self._depth]

    def _loop_flats(self, turned: list[Bucket], item: str) -> dict[str, str]:
        """By bucket, the Python names of one turn's buffers."""
        names: dict[str, str] = {}
        for bucket in turned:
            like = loop_name(bucket, self._depth, alone=len(turned) == 1)
            names[bucket.name] = self._lines.free(like, item, *names.values())
        return names

    def _around(self, region: Region, own: Mapping[Bucket, str], variables: list[str]) -> Around:
        """What stands around a turn: backward must come by there, so it passes on a value that backward comes along."""
        if not own:
            return Around()
        inside, carried = uses(region), (arg.value for arg in region.args if arg.enter is Enter.CARRY)
        ends = zip(carried, region.results, variables, strict=False)
        found = (
            name
            for value, result, name in ends
            if value.type.differentiable and inside[value.name] and self._uses[result.name]
        )
        x = next(found, "")
        assert x, f"emit: backward comes along no value that is carried through {region.dim}"
        return around(self._frame.program, own, x, self._lines)

    def _append(self, lines: Iterable[Line]) -> None:
        for code, comment in lines:
            self._lines.append(code, comment, deeper=1)

    def _drawn(self, arg: Arg) -> tuple[str, str]:
        """The Python names of the draws of one iteration and of all."""
        all_ = self._lines.operand(arg.source).text
        self._lines.left[arg.source] -= 1
        return self._lines.hold(arg.value.name), all_

    def _entering(self, region: Region) -> list[str]:
        """The Python names that are carried through a loop."""
        return [self._loop_variable(arg) for arg in region.args if arg.enter is Enter.CARRY]

    def _loop_variable(self, arg: Arg) -> str:
        """The Python name that is carried through the loop."""
        source = self._lines.operand(arg.source)
        self._lines.left[arg.source] -= 1
        if source.text.isidentifier() and not self._lines.left[arg.source] and not source.ops:
            return source.text
        name = self._lines.hold(arg.value.name)
        self._lines.append(f"{name} = {source.text}", self._lines.comment(source) if source.ops else "")
        return name

    def _table_of(self, op: Op) -> Table:
        return table_of(op, self._frame.types, self._frame.program)


def _loop(item: str, modules: str, zipped: Mapping[str, str], indent: int) -> str:
    """The line that opens a loop over modules and what each turn has beside its module."""
    if not zipped:
        return f"for {item} in {modules}:"
    names = ", ".join([item, *zipped])
    fits = len(f"for {names} in zip(") + indent <= WIDTH
    head = f"for {names}" if fits else exploded("for ", [item, *zipped], indent)
    return f"{call(f'{head} in zip', [modules, *zipped.values(), 'strict=True'], indent)}:"
