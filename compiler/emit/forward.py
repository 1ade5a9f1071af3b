"""The statements of a `forward`: ops, blocks of recomputed values, loops over the modules of a
repeat.

Purpose: which value has a line, and which is part of the line that reads it; the class of each
repeat's body.  Non-goals: lines and names as such (`line_writer`), and the lines around a layer
that moves state (`loop_hooks`).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ..analysis.recompute import recomputes_layers, recomputes_region
from ..ir import Arg, Bucket, Enter, Op, Region, Stmt, uses, walk
from ..ops import OPS, roles
from ..ops.dropout import are_draws
from ..ops.experts import begins
from .expressions import Expr, as_call, express, split_view
from .line_writer import Lines, captured, reads
from .loop_hooks import Around, LayerCall, Line, around, group_name, is_flat, loop_line, repeat_of
from .module import Child, Frame, Module, Table, in_lines, table_of
from .naming import call, class_name, identifier, literal, place, shape, singular

INLINE = 88
"""The longest expression that still takes in another one."""


class Body:
    """Writes the lines of one `forward`; `prefix` is that of its weights' names, `depth`
    repeats deep.
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
        self._frame, self._module, self._ends, self._prefix, self._depth = (
            frame,
            module,
            ends,
            prefix,
            depth,
        )
        self._uses = Counter(reads(self._body)) + Counter(ends)
        self._consumer = {name: op for op in self._body if isinstance(op, Op) for name in op.inputs}
        self._lines = Lines(frame, module, prefix, self._uses)
        self._flat_params = ""  # of the model, the argument with the groups of all repeats
        # of a layer, repeat → the argument with the groups of its layers
        self.groups: dict[str, str] = {}

    # ---- what the surroundings give

    def bind(self, region: Region, given: list[str], tables: list[Table]) -> None:
        """The arguments of a repeat's body, in their order, and the slices that are parameters
        of its modules.
        """
        slices = [arg for arg in region.args if arg.enter is Enter.EACH]
        draws = [arg.value.name for arg in slices if are_draws(arg.value.type)]
        carried = [arg.value.name for arg in region.args if arg.enter is Enter.CARRY]
        for value in (*carried, *given, *draws):
            self.bind_argument(value)
        for arg in slices:
            if arg.source in self._frame.leaves:
                self._frame.leaves[arg.value.name] = self._frame.leaves[arg.source]
        for table in tables:
            self._lines.bind_table(table)

    def bind_argument(self, value: str) -> None:
        """An argument of `forward`; evaluation has no draws."""
        type = "Tensor | None" if are_draws(self._frame.types[value]) else "Tensor"
        self._module.arguments[self._lines.hold(value)] = type

    def bind_flats(self) -> None:
        """The groups of flat parameters of all layers, by repeat."""
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
        of = op.inputs[1:] if op.kind == "contracts" else values
        return [
            self._becomes(value) or self._role(each) for value, each in zip(values, of, strict=True)
        ]

    def _role(self, weight: str) -> str:
        """The name of a weight's product: `gate` of `w_gate`; any other value as itself."""
        name = self._frame.leaves.get(weight, "")
        of = re.fullmatch(r"(?:.*_)?w_?([^\W\d]\w*)", name)
        return of[1] if of else weight

    def _becomes(self, value: str) -> str:
        """The name of a result in the plan, or that of its only consumer, which so frees the
        memory of the result.
        """
        op = self._consumer.get(value)
        if not value.startswith("_"):
            return value
        if self._uses[value] != 1 or op is None:
            return ""
        made = (
            op.outputs[0]
            if len(op.outputs) == 1
            else dict(zip(op.inputs, op.outputs, strict=False)).get(value)
        )
        return "" if made is None or made.name.startswith("_") else made.name

    def _express(self, op: Op) -> Expr:
        write = as_call if op.outputs[0].name in self._frame.recomputed_values else express
        return write(op, [self._lines.operand(name) for name in op.inputs], self._lines.context)

    def _inlines(self, op: Op) -> bool:
        (value,) = op.outputs
        consumer = self._consumer.get(value.name)
        if (
            begins(op)
            or self._uses[value.name] != 1
            or consumer is None
            or not value.name.startswith("_")
        ):
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
        """Lines of their own for coercions that were to be part of other lines.

        And for all else that was, and is no part of the coercion that comes: backward goes by the
        order in which forward was made.  Values of parameters alone communicate in none of the two;
        beside an exchange they are made as the IR says.
        """
        exprs, inside = self._lines.exprs, before.inputs if isinstance(before, Op) else ()
        waiting = [name for name, expr in exprs.items() if expr.ops and name not in inside]
        is_end = isinstance(before, Op) and (begins(before) or OPS[before.kind].awaits)
        for name in waiting:
            if (
                is_end
                or (before and exprs[name].reads)
                or any(OPS[op.kind].sends for op in exprs[name].ops)
            ):
                self._lines.assign([name], exprs.pop(name))

    def _block(self, op: Op, expr: Expr, like: Sequence[str]) -> None:
        """Values of this block alone, which backward recomputes."""
        values = [value.name for value in op.outputs]
        text, view = split_view(expr.text)
        function, _, arguments = text.partition("(")
        self._lines.read(expr)
        target = ", ".join(map(self._lines.hold, values, like))
        # they are returned, and nothing here would keep them
        if not {*values} & {*reads(self._body)}:
            alone = expr.text if op.kind == "coerce" else f"recomputed({function}, {arguments}"
            self._lines.append(f"{target} = {alone}", self._lines.comment(expr))
            return
        regathers = op.kind == "coerce" and self._frame.target.local
        called = f"regather({arguments}" if regathers else f"recompute({function}, {arguments}"
        self._lines.append(
            f"with {called} as {f'({target})' if values[1:] else target}:",
            self._lines.comment(expr),
        )
        self._lines.open_block(values)
        if view:
            self._lines.append(f"{target} = {target}{view}")

    # ---- repeats

    def _repeat(self, region: Region) -> None:
        lines, leaves = self._lines, self._frame.leaves
        # values first, then parameters
        given = sorted(captured(region), key=lambda name: name in leaves)
        rotations = (op for op in walk(region.body) if roles(op, self._frame.types).rotated)
        tables = list(
            dict.fromkeys(table_of(op, self._frame.types, self._frame.program) for op in rotations)
        )
        moved = self._buckets_per_layer(region) if self._frame.target.local else []
        own = [bucket for bucket in moved if len(bucket.layers) == self._depth + 1]
        attribute, inner = self._child(region, given, tables)
        variables = self._entering(region)
        texts = [lines.operand(name).text for name in given]
        for name in given:
            lines.left[name] -= 1
        layer = self._open(region, attribute, bool(own), inner)
        passed = [*variables, *texts, *layer.draws, *map(lines.table, tables), *layer.inner]
        around = self._around(region, own, layer.params, variables)
        self._append(around.before)
        self._append([self._call(region, layer, variables, passed)])
        self._append(around.after)
        for variable, result in zip(variables, region.results, strict=False):
            lines.rename(variable, result.name)
        lines.close_blocks()

    def _open(
        self, region: Region, attribute: str, has_params: bool, inner: Sequence[str]
    ) -> LayerCall:
        """Opens the loop over the modules of a repeat, with what else each layer has of its own."""
        item = self._lines.free(singular(region.dim))
        params = self._lines.free("params", item) if has_params else ""
        groups = (
            {params: self._layer_groups(repeat_of(f"{self._prefix}{attribute}.*"))}
            if params
            else {}
        )
        for repeat in inner:
            groups[self._lines.free(group_name(repeat), item, *groups)] = self._layer_groups(repeat)
        draws = dict(self._drawn(arg) for arg in region.args if are_draws(arg.value.type))
        zipped = groups | draws
        enabled = self._lines.free("enabled", item, *zipped)
        if (every := self._every(region)) > 1:
            layers = self._frame.program.size(region.dim)
            zipped |= {enabled: f"[i % {every} == 0 for i in range({layers})]"}
        self._lines.append(loop_line(item, f"self.{attribute}", zipped, self._lines.indent()))
        return LayerCall(
            item, (*draws,), enabled, params, tuple(name for name in groups if name != params)
        )

    def _child(
        self, region: Region, given: list[str], tables: list[Table]
    ) -> tuple[str, list[str]]:
        """Writes the class of a repeat's body; returns the attribute of its modules in this one.

        Also the repeats inside of it whose groups its forward takes.
        """
        program, frame = self._frame.program, self._frame
        attribute = identifier(region.dim, self._module.attributes())
        taken = {c.name for c in frame.classes} | {class_name(program.name)}
        name = identifier(class_name(singular(region.dim)), taken)
        carried = [arg for arg in region.args if arg.enter is Enter.CARRY]
        doc = ", ".join(
            f"{identifier(a.value.name, set())}: {shape(a.value.type, program)}" for a in carried
        )
        kind = singular(region.dim.rsplit("_", 1)[0] if region.dim[-1].isdecimal() else region.dim)
        head = f"{'An' if kind[0] in 'aeiou' else 'A'} {kind}, of {program.size(region.dim)}."
        module = Module(name, in_lines(f"{head}  {doc}"))
        ends = tuple(end.name for end, _ in zip(region.yields, carried, strict=False))
        body = Body(
            frame, module, region.body, ends, f"{self._prefix}{attribute}.*.", self._depth + 1
        )
        body.bind(region, given, tables)
        body.write()
        frame.classes.append(module)
        self._module.declared[attribute] = Child(module, region.dim, program.size(region.dim))
        return attribute, [*body.groups]

    def _call(
        self, region: Region, layer: LayerCall, variables: list[str], passed: list[str]
    ) -> Line:
        """The call of a layer of a repeat, which backward may recompute."""
        function, arguments, comment = layer.module, passed, place(region.span)
        if every := self._every(region):
            given, layers = (
                ([f"enabled={layer.recompute}"], f" in 1 of {every} layers")
                if every > 1
                else ([], "")
            )
            function, arguments = "recomputed", [layer.module, *passed, *given]
            comment = f"bwd: recomputed{layers}  {comment}"
        return call(
            f"{', '.join(variables)} = {function}", arguments, self._lines.indent(deeper=1), after=0
        ), comment

    def _every(self, region: Region) -> int:
        """The interval of recomputed layers: backward recomputes the first layer of each; 0 for
        none.
        """
        program = self._frame.program
        return recomputes_layers(program, region.dim) if recomputes_region(program, region) else 0

    def _buckets_per_layer(self, region: Region) -> list[Bucket]:
        """The buckets that have a buffer for each layer of a repeat."""
        taken = [
            self._frame.bucket_per_layer(arg.source)
            for arg in region.args
            if arg.enter is Enter.EACH
        ]
        return [
            b for b in self._frame.program.buckets if b in taken and len(b.layers) > self._depth
        ]

    def _around(
        self, region: Region, own: Sequence[Bucket], params: str, variables: list[str]
    ) -> Around:
        """The lines around a layer: backward comes through a value that they pass on, and so
        runs their part.
        """
        if not own:
            return Around()
        inside, carried = (
            uses(region),
            (arg.value for arg in region.args if arg.enter is Enter.CARRY),
        )
        ends = zip(carried, region.results, variables, strict=False)
        found = (
            name
            for value, result, name in ends
            if value.type.differentiable and inside[value.name] and self._uses[result.name]
        )
        x = next(found, "")
        assert x, f"emit: backward comes along no value that is carried through {region.dim}"
        return around(self._frame.program, own, params, x)

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
        self._lines.append(
            f"{name} = {source.text}", self._lines.comment(source) if source.ops else ""
        )
        return name
