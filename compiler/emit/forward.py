"""The statements of a `forward`: ops, blocks of recomputed values, loops over the modules of a
repeat.

Purpose: which value has a line, and which one is part of the line that reads it; the class of each
repeat's body.  Non-goals: lines and names as such (`line_writer`), and the lines around a layer
that moves state (`loop_hooks`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from ..ir import Bucket, Enter, Op, Region, Stmt, Value, uses, walk
from ..ops import OPS, roles
from ..ops.dropout import are_draws
from ..ops.protocol import begins
from .expressions import Expr, as_call, express, split_view
from .layer_loops import AllLayers, ParamGroups, RepeatLoops, recompute_interval
from .line_writer import Lines, find_captured_values, reads
from .loop_hooks import Around, LayerCall, Line, around, is_flat
from .module import Child, Frame, Module, Table, in_lines, table_of
from .naming import call, class_name, identifier, place, shape
from .result_names import make_result_names

INLINE = 88
"""The length of the longest expression that still takes in another one."""


class Body:
    """Writes the lines of one `forward`, `depth` repeats deep; its weights' names begin with
    `prefix`.
    """

    def __init__(
        self,
        frame: Frame,
        module: Module,
        body: Sequence[Stmt],
        ends: Sequence[str],
        prefix: str = "",
        depth: int = 0,
    ) -> None:
        self.stmts = tuple(stmt for stmt in body if not is_flat(frame.program, stmt))
        self.frame, self.module, self.ends = frame, module, ends
        self._prefix, self._depth = prefix, depth
        self._uses = Counter(reads(self.stmts)) + Counter(ends)
        self._consumer = dict[str, Op]()  # by value, the last op that reads it
        for stmt in self.stmts:
            if isinstance(stmt, Op):
                self._consumer |= dict.fromkeys(stmt.inputs, stmt)
        names = make_result_names(frame, self.stmts)
        self.lines = Lines(frame, module, prefix, self._uses, names)
        self._groups = ParamGroups(self.lines, depth)
        self.loops: RepeatLoops = AllLayers(frame.program, self.lines, self._groups, prefix)

    # ---- what the surroundings give

    def bind(self, region: Region, captured_names: list[str], tables: list[Table]) -> None:
        """Binds the arguments of a repeat's body, in their order."""
        slices = [arg for arg in region.args if arg.enter is Enter.EACH]
        draws = [arg.value.name for arg in slices if are_draws(arg.value.type)]
        carried = [arg.value.name for arg in region.args if arg.enter is Enter.CARRY]
        for value in (*carried, *captured_names, *draws):
            self.bind_argument(value)
        for table in tables:
            self.lines.bind_table(table)

    def bind_argument(self, value: str) -> None:
        """Makes a value an argument of `forward`; evaluation has no draws."""
        type = "Tensor | None" if are_draws(self.frame.types[value]) else "Tensor"
        self.module.arguments[self.lines.hold(value)] = type

    def bind_flats(self) -> None:
        """Makes the groups of flat parameters of all layers, by repeat, an argument."""
        self._groups.flat_params = self.lines.argument("flat_params", "FlatParams")

    @property
    def inner_repeats(self) -> Sequence[str]:
        """The repeats inside a layer whose groups of flat parameters its forward takes."""
        return [*self._groups.by_repeat]

    # ---- statements

    def write(self) -> None:
        """Writes every statement, and returns."""
        self.write_statements(self.stmts)
        self.lines.finish(self.ends)

    def write_statements(self, stmts: Iterable[Stmt]) -> None:
        """Writes some statements of the body."""
        for stmt in stmts:
            if isinstance(stmt, Region) or OPS[stmt.kind].sends:
                self.end_coercions(stmt)
            if isinstance(stmt, Region):
                self.write_repeat(stmt)
            else:
                self._op(stmt)

    def _op(self, op: Op) -> None:
        expr = self._express(op)
        while len(expr.text) > INLINE and (longest := self._longest(op)):
            self.lines.assign([longest], self.lines.exprs.pop(longest))
            expr = self._express(op)
        for name in op.inputs:
            if name in self.lines.exprs and self.lines.exprs[name].ops:
                del self.lines.exprs[name]
        values = [value.name for value in op.outputs]
        if values[0] in self.frame.recomputed_values:
            self._block(op, expr)
        elif len(values) == 1 and self._inlines(op):
            self.lines.exprs[values[0]] = expr
        else:
            self.lines.assign(values, expr)

    def _express(self, op: Op) -> Expr:
        write = as_call if op.outputs[0].name in self.frame.recomputed_values else express
        return write(op, [self.lines.operand(name) for name in op.inputs], self.lines.context)

    def _inlines(self, op: Op) -> bool:
        """Whether an op's only result is part of the line that reads it."""
        (value,) = op.outputs
        consumer = self._consumer.get(value.name)
        if begins(op) or not value.name.startswith("_"):
            return False
        if self._uses[value.name] != 1 or consumer is None:
            return False
        if op.kind == consumer.kind == "add":
            return False  # in Python both would be one sum
        if op.kind == "coerce":
            return consumer.kind == "add"
        return consumer.kind != "coerce"

    def _longest(self, op: Op) -> str:
        """The operand of `op` with the longest expression; "" if all are names or short."""
        longest, length = "", 12
        for name in op.inputs:
            expr = self.lines.exprs.get(name)
            if expr and expr.ops and len(expr.text) > length:
                longest, length = name, len(expr.text)
        return longest

    def end_coercions(self, before: Stmt | None = None) -> None:
        """Writes lines of their own for coercions that were to be part of other lines.

        Also for all other pending expressions that are no part of the coercion that comes: backward
        goes by the order of forward's ops.  Values of parameters alone communicate neither in
        forward nor in backward; beside an exchange they are made where the IR makes them.
        """
        exprs, inside = self.lines.exprs, before.inputs if isinstance(before, Op) else ()
        waiting = [name for name, expr in exprs.items() if expr.ops and name not in inside]
        is_end = isinstance(before, Op) and (begins(before) or OPS[before.kind].awaits)
        for name in waiting:
            expr = exprs[name]
            orders_backward = bool(before and expr.reads)
            if is_end or orders_backward or any(OPS[op.kind].sends for op in expr.ops):
                self.lines.assign([name], exprs.pop(name))

    def _block(self, op: Op, expr: Expr) -> None:
        """Opens a block of values that backward recomputes, and that only this block reads."""
        values = [value.name for value in op.outputs]
        text, view = split_view(expr.text)
        function, _, arguments = text.partition("(")
        self.lines.count_reads(expr)
        target = ", ".join(map(self.lines.hold, values))
        # nothing here would keep values that are returned
        if not {*values} & {*reads(self.stmts)}:
            alone = expr.text
            if op.kind != "coerce":
                alone = f"recomputed({function}, {arguments}"
            self.lines.append(f"{target} = {alone}", self.lines.comment(expr))
            return
        call = f"recompute({function}, {arguments}"
        if op.kind == "coerce" and self.frame.target.local:
            call = f"regather({arguments}"
        names = f"({target})" if values[1:] else target
        self.lines.append(f"with {call} as {names}:", self.lines.comment(expr))
        self.lines.open_block(values)
        if view:
            self.lines.append(f"{target} = {target}{view}")

    # ---- repeats

    def write_repeat(self, region: Region) -> None:
        """Writes the class of a repeat's body, and the loop over its layers."""
        lines, leaves = self.lines, self.frame.leaves
        # values first, then parameters
        from_outside = sorted(find_captured_values(region), key=lambda name: name in leaves)
        tables = self._tables_of(region)
        moved = self._buckets_per_layer(region) if self.frame.target.local else []
        buckets = [bucket for bucket in moved if len(bucket.layers) == self._depth + 1]
        attribute, inner = self._child(region, from_outside, tables)
        variables = self.loops.enter(region)
        texts = [lines.operand(name).text for name in from_outside]
        for name in from_outside:
            lines.left[name] -= 1
        layer = self.loops.open(region, attribute, bool(buckets), inner)
        passed = [*variables, *texts, *layer.draws, *map(lines.table, tables), *layer.inner]
        around = self._around(region, buckets, layer.params, variables)
        self._append(around.before)
        self._append([self._call(region, layer, variables, passed)])
        self._append(around.after)
        for variable, result in zip(variables, region.results, strict=False):
            lines.rename(variable, result.name)
        lines.close_blocks()

    def _tables_of(self, region: Region) -> list[Table]:
        """The tables of rotary positions that ops of a repeat need, each once."""
        tables = dict[Table, None]()
        for op in walk(region.body):
            if roles(op, self.frame.types).rotated:
                tables[table_of(op, self.frame.types, self.frame.program)] = None
        return [*tables]

    def _child(
        self, region: Region, captured_names: list[str], tables: list[Table]
    ) -> tuple[str, list[str]]:
        """Writes the class of a repeat's body; returns the attribute of its modules in this one.

        Also the repeats inside of it whose groups its forward takes.
        """
        program, frame = self.frame.program, self.frame
        attribute = identifier(region.dim, self.module.attributes())
        taken = {module.name for module in frame.classes} | {class_name(program.name)}
        name = identifier(frame.layer_names[region.dim].of_class, taken)
        carried = [arg.value for arg in region.args if arg.enter is Enter.CARRY]
        module = Module(name, in_lines(f"{self._headline(region)}  {self._shapes(carried)}"))
        ends = tuple(end.name for end, _ in zip(region.yields, carried, strict=False))
        prefix = f"{self._prefix}{attribute}.*."
        frame.add_slices(region)
        body = Body(frame, module, region.body, ends, prefix, self._depth + 1)
        body.bind(region, captured_names, tables)
        body.write()
        frame.classes.append(module)
        self.module.declared[attribute] = Child(module, region.dim, program.size(region.dim))
        return attribute, [*body.inner_repeats]

    def _headline(self, region: Region) -> str:
        """The first sentence of the docstring of a repeat's class: `A layer, of 32.`"""
        layer = self.frame.layer_names[region.dim].in_words
        article = "An" if layer[0] in "aeiou" else "A"
        return f"{article} {layer}, of {self.frame.program.size(region.dim)}."

    def _shapes(self, values: Sequence[Value]) -> str:
        """The shapes of the values that layers hand on, for a docstring."""
        shapes = list[str]()
        for value in values:
            name = identifier(value.name, set())
            shapes.append(f"{name}: {shape(value.type, self.frame.program)}")
        return ", ".join(shapes)

    def _call(
        self, region: Region, layer: LayerCall, variables: list[str], passed: list[str]
    ) -> Line:
        """The call of a layer of a repeat, which backward may recompute."""
        function, arguments, comment = layer.module, passed, place(region.span)
        if interval := recompute_interval(self.frame.program, region):
            function, arguments, layers = "recomputed", [layer.module, *passed], ""
            if interval > 1:
                arguments.append(f"enabled={layer.recompute}")
                layers = f" in 1 of {interval} layers"
            comment = f"bwd: recomputed{layers}  {comment}"
        targets = ", ".join(variables)
        indent = self.lines.indent(deeper=1)
        return call(f"{targets} = {function}", arguments, indent, after=0), comment

    def _buckets_per_layer(self, region: Region) -> list[Bucket]:
        """The buckets that have a buffer for each layer of a repeat."""
        sliced = list[Bucket | None]()
        for arg in region.args:
            if arg.enter is Enter.EACH:
                sliced.append(self.frame.bucket_per_layer(arg.source))
        buckets = self.frame.program.buckets
        return [
            bucket for bucket in buckets if bucket in sliced and len(bucket.layers) > self._depth
        ]

    def _around(
        self, region: Region, buckets: Sequence[Bucket], params: str, variables: list[str]
    ) -> Around:
        """The lines around a layer.

        They pass on a value through which backward comes, so that it runs their part.
        """
        if not buckets:
            return Around()
        inside = uses(region)
        carried = (arg.value for arg in region.args if arg.enter is Enter.CARRY)
        for value, result, name in zip(carried, region.results, variables, strict=False):
            if value.type.differentiable and inside[value.name] and self._uses[result.name]:
                return around(self.frame.program, buckets, params, name)
        raise AssertionError(
            f"emit: backward comes along no value that is carried through {region.dim}"
        )

    def _append(self, lines: Iterable[Line]) -> None:
        for code, comment in lines:
            self.lines.append(code, comment, deeper=1)
