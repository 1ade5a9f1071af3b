"""The statements of a `forward`: ops, blocks of recomputed values, loops over the modules of a
repeat.

Purpose: which value has a line, and which one is part of the line that reads it; the class of each
repeat's body.  Non-goals: lines and names as such (`line_writer`), and the lines around a layer
that moves state (`loop_hooks`).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ..analysis.recompute import recomputes_layers, recomputes_region
from ..ir import Arg, Bucket, Enter, Op, Region, Stmt, Value, uses, walk
from ..ops import OPS, roles
from ..ops.dropout import are_draws
from ..ops.protocol import begins
from .expressions import Expr, as_call, express, split_view
from .line_writer import Lines, find_captured_values, reads
from .loop_hooks import Around, LayerCall, Line, around, group_name, is_flat, loop_line, repeat_of
from .module import Child, Frame, Module, Table, in_lines, table_of
from .naming import call, class_name, identifier, literal, place, shape, singular

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
        self._body = tuple(stmt for stmt in body if not is_flat(frame.program, stmt))
        self._frame, self._module, self._ends = frame, module, ends
        self._prefix, self._depth = prefix, depth
        self._uses = Counter(reads(self._body)) + Counter(ends)
        self._consumer = dict[str, Op]()  # by value, the last op that reads it
        for stmt in self._body:
            if isinstance(stmt, Op):
                self._consumer |= dict.fromkeys(stmt.inputs, stmt)
        self._lines = Lines(frame, module, prefix, self._uses)
        self._flat_params = ""  # of the model, the argument with the groups of all repeats
        # of a layer, repeat → the argument with the groups of its layers
        self.groups: dict[str, str] = {}

    # ---- what the surroundings give

    def bind(self, region: Region, captured_names: list[str], tables: list[Table]) -> None:
        """Binds the arguments of a repeat's body, in their order, and the slices that are
        parameters of its modules.
        """
        slices = [arg for arg in region.args if arg.enter is Enter.EACH]
        draws = [arg.value.name for arg in slices if are_draws(arg.value.type)]
        carried = [arg.value.name for arg in region.args if arg.enter is Enter.CARRY]
        for value in (*carried, *captured_names, *draws):
            self.bind_argument(value)
        for arg in slices:
            if arg.source in self._frame.leaves:
                self._frame.leaves[arg.value.name] = self._frame.leaves[arg.source]
        for table in tables:
            self._lines.bind_table(table)

    def bind_argument(self, value: str) -> None:
        """Makes a value an argument of `forward`; evaluation has no draws."""
        type = "Tensor | None" if are_draws(self._frame.types[value]) else "Tensor"
        self._module.arguments[self._lines.hold(value)] = type

    def bind_flats(self) -> None:
        """Makes the groups of flat parameters of all layers, by repeat, an argument."""
        self._flat_params = self._lines.argument("flat_params", "FlatParams")

    def _layer_groups(self, repeat: str) -> str:
        """The text of the groups of all layers of a repeat."""
        if not self._depth:
            return f"{self._flat_params}[{literal(repeat)}]"
        if repeat not in self.groups:
            levels = repeat.count(".") + 1 - self._depth
            name = self._lines.argument(
                group_name(repeat), "list[" * levels + "FlatParamGroup" + "]" * levels
            )
            self.groups[repeat] = name
        return self.groups[repeat]

    # ---- statements

    def write(self) -> None:
        """Writes every statement, and returns."""
        self._statements(self._body)
        self._lines.finish(self._ends)

    def _statements(self, body: Iterable[Stmt]) -> None:
        for stmt in body:
            if isinstance(stmt, Region) or OPS[stmt.kind].sends:
                self._end_coercions(stmt)
            if isinstance(stmt, Region):
                self._repeat(stmt)
            else:
                self._op(stmt)

    def _op(self, op: Op) -> None:
        expr = self._express(op)
        while len(expr.text) > INLINE and (longest := self._longest(op)):
            self._lines.assign([longest], self._lines.exprs.pop(longest))
            expr = self._express(op)
        for name in op.inputs:
            if name in self._lines.exprs and self._lines.exprs[name].ops:
                del self._lines.exprs[name]
        values = [value.name for value in op.outputs]
        if values[0] in self._frame.recomputed_values:
            self._block(op, expr, self._roles(op) if values[1:] else values)
        elif len(values) == 1 and self._inlines(op):
            self._lines.exprs[values[0]] = expr
        else:
            self._lines.assign(values, expr, self._roles(op) if values[1:] else values)

    def _roles(self, op: Op) -> list[str]:
        """The names of several results."""
        values = [value.name for value in op.outputs]
        weights = op.inputs[1:] if op.kind == "contracts" else values
        names = list[str]()
        for value, weight in zip(values, weights, strict=True):
            names.append(self._becomes(value) or self._role(weight))
        return names

    def _role(self, weight: str) -> str:
        """The name of a weight's product: `gate` of `w_gate`; any other value as itself."""
        name = self._frame.leaves.get(weight, "")
        match = re.fullmatch(r"(?:.*_)?w_?([^\W\d]\w*)", name)
        return match[1] if match else weight

    def _becomes(self, value: str) -> str:
        """The name of a result in the plan, or the name of its only consumer's result.

        The consumer's result so takes the place of this one, whose memory is freed.
        """
        if not value.startswith("_"):
            return value
        op = self._consumer.get(value)
        if self._uses[value] != 1 or op is None:
            return ""
        if len(op.outputs) == 1:
            successor = op.outputs[0]
        else:
            successor = dict(zip(op.inputs, op.outputs, strict=False)).get(value)
        if successor is None or successor.name.startswith("_"):
            return ""
        return successor.name

    def _express(self, op: Op) -> Expr:
        write = as_call if op.outputs[0].name in self._frame.recomputed_values else express
        return write(op, [self._lines.operand(name) for name in op.inputs], self._lines.context)

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
            expr = self._lines.exprs.get(name)
            if expr and expr.ops and len(expr.text) > length:
                longest, length = name, len(expr.text)
        return longest

    def _end_coercions(self, before: Stmt | None = None) -> None:
        """Writes lines of their own for coercions that were to be part of other lines.

        Also for all other pending expressions that are no part of the coercion that comes: backward
        goes by the order of forward's ops.  Values of parameters alone communicate neither in
        forward nor in backward; beside an exchange they are made where the IR makes them.
        """
        exprs, inside = self._lines.exprs, before.inputs if isinstance(before, Op) else ()
        waiting = [name for name, expr in exprs.items() if expr.ops and name not in inside]
        is_end = isinstance(before, Op) and (begins(before) or OPS[before.kind].awaits)
        for name in waiting:
            expr = exprs[name]
            orders_backward = bool(before and expr.reads)
            if is_end or orders_backward or any(OPS[op.kind].sends for op in expr.ops):
                self._lines.assign([name], exprs.pop(name))

    def _block(self, op: Op, expr: Expr, like: Sequence[str]) -> None:
        """Opens a block of values that backward recomputes, and that only this block reads."""
        values = [value.name for value in op.outputs]
        text, view = split_view(expr.text)
        function, _, arguments = text.partition("(")
        self._lines.count_reads(expr)
        target = ", ".join(map(self._lines.hold, values, like))
        # nothing here would keep values that are returned
        if not {*values} & {*reads(self._body)}:
            alone = expr.text
            if op.kind != "coerce":
                alone = f"recomputed({function}, {arguments}"
            self._lines.append(f"{target} = {alone}", self._lines.comment(expr))
            return
        call = f"recompute({function}, {arguments}"
        if op.kind == "coerce" and self._frame.target.local:
            call = f"regather({arguments}"
        names = f"({target})" if values[1:] else target
        self._lines.append(f"with {call} as {names}:", self._lines.comment(expr))
        self._lines.open_block(values)
        if view:
            self._lines.append(f"{target} = {target}{view}")

    # ---- repeats

    def _repeat(self, region: Region) -> None:
        lines, leaves = self._lines, self._frame.leaves
        # values first, then parameters
        from_outside = sorted(find_captured_values(region), key=lambda name: name in leaves)
        tables = self._tables_of(region)
        moved = self._buckets_per_layer(region) if self._frame.target.local else []
        buckets = [bucket for bucket in moved if len(bucket.layers) == self._depth + 1]
        attribute, inner = self._child(region, from_outside, tables)
        variables = self._entering(region)
        texts = [lines.operand(name).text for name in from_outside]
        for name in from_outside:
            lines.left[name] -= 1
        layer = self._open(region, attribute, bool(buckets), inner)
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
            if roles(op, self._frame.types).rotated:
                tables[table_of(op, self._frame.types, self._frame.program)] = None
        return [*tables]

    def _open(
        self, region: Region, attribute: str, has_params: bool, inner: Sequence[str]
    ) -> LayerCall:
        """Opens the loop over the modules of a repeat, and over what else each layer has of its
        own.
        """
        item = self._lines.free(singular(region.dim))
        params, groups = "", dict[str, str]()
        if has_params:
            params = self._lines.free("params", item)
            groups[params] = self._layer_groups(repeat_of(f"{self._prefix}{attribute}.*"))
        inner_groups = list[str]()
        for repeat in inner:
            name = self._lines.free(group_name(repeat), item, *groups)
            groups[name] = self._layer_groups(repeat)
            inner_groups.append(name)
        draws = dict(self._draws_of_layer(arg) for arg in region.args if are_draws(arg.value.type))
        zipped = groups | draws
        enabled = self._lines.free("enabled", item, *zipped)
        if (every := self._every(region)) > 1:
            layers = self._frame.program.size(region.dim)
            zipped |= {enabled: f"[i % {every} == 0 for i in range({layers})]"}
        self._lines.append(loop_line(item, f"self.{attribute}", zipped, self._lines.indent()))
        return LayerCall(item, (*draws,), enabled, params, tuple(inner_groups))

    def _child(
        self, region: Region, captured_names: list[str], tables: list[Table]
    ) -> tuple[str, list[str]]:
        """Writes the class of a repeat's body; returns the attribute of its modules in this one.

        Also the repeats inside of it whose groups its forward takes.
        """
        program, frame = self._frame.program, self._frame
        attribute = identifier(region.dim, self._module.attributes())
        taken = {module.name for module in frame.classes} | {class_name(program.name)}
        name = identifier(class_name(singular(region.dim)), taken)
        carried = [arg.value for arg in region.args if arg.enter is Enter.CARRY]
        module = Module(name, in_lines(f"{self._headline(region)}  {self._shapes(carried)}"))
        ends = tuple(end.name for end, _ in zip(region.yields, carried, strict=False))
        prefix = f"{self._prefix}{attribute}.*."
        body = Body(frame, module, region.body, ends, prefix, self._depth + 1)
        body.bind(region, captured_names, tables)
        body.write()
        frame.classes.append(module)
        self._module.declared[attribute] = Child(module, region.dim, program.size(region.dim))
        return attribute, [*body.groups]

    def _headline(self, region: Region) -> str:
        """The first sentence of the docstring of a repeat's class: `A layer, of 32.`"""
        dim = region.dim
        kind = singular(dim.rsplit("_", 1)[0] if dim[-1].isdecimal() else dim)
        article = "An" if kind[0] in "aeiou" else "A"
        return f"{article} {kind}, of {self._frame.program.size(dim)}."

    def _shapes(self, values: Sequence[Value]) -> str:
        """The shapes of the values that layers hand on, for a docstring."""
        shapes = list[str]()
        for value in values:
            name = identifier(value.name, set())
            shapes.append(f"{name}: {shape(value.type, self._frame.program)}")
        return ", ".join(shapes)

    def _call(
        self, region: Region, layer: LayerCall, variables: list[str], passed: list[str]
    ) -> Line:
        """The call of a layer of a repeat, which backward may recompute."""
        function, arguments, comment = layer.module, passed, place(region.span)
        if every := self._every(region):
            function, arguments, layers = "recomputed", [layer.module, *passed], ""
            if every > 1:
                arguments.append(f"enabled={layer.recompute}")
                layers = f" in 1 of {every} layers"
            comment = f"bwd: recomputed{layers}  {comment}"
        targets = ", ".join(variables)
        indent = self._lines.indent(deeper=1)
        return call(f"{targets} = {function}", arguments, indent, after=0), comment

    def _every(self, region: Region) -> int:
        """The interval of recomputed layers: backward recomputes the first layer of each.

        0 where it recomputes none.
        """
        program = self._frame.program
        if not recomputes_region(program, region):
            return 0
        return recomputes_layers(program, region.dim)

    def _buckets_per_layer(self, region: Region) -> list[Bucket]:
        """The buckets that have a buffer for each layer of a repeat."""
        sliced = list[Bucket | None]()
        for arg in region.args:
            if arg.enter is Enter.EACH:
                sliced.append(self._frame.bucket_per_layer(arg.source))
        buckets = self._frame.program.buckets
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
                return around(self._frame.program, buckets, params, name)
        raise AssertionError(
            f"emit: backward comes along no value that is carried through {region.dim}"
        )

    def _append(self, lines: Iterable[Line]) -> None:
        for code, comment in lines:
            self._lines.append(code, comment, deeper=1)

    def _draws_of_layer(self, arg: Arg) -> tuple[str, str]:
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
        comment = self._lines.comment(source) if source.ops else ""
        self._lines.append(f"{name} = {source.text}", comment)
        return name
