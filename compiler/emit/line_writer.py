"""The lines of one `forward` as they are written, and the Python names of its values.

Purpose: a name is reused once nothing reads its value any more; comments say shapes, placements and
the plan's line.  Non-goals: which lines there are (`forward`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

from ..analysis.bucket_layout import is_stored_as_matrix
from ..ir import Kind, Op, Region, Stmt, uses, values
from ..ir.placements import coercion, conjugate, ends
from ..ops import OPS, messages
from ..ops.call import Layout
from ..ops.protocol import begins
from .expressions import ATOM, CASTS, Context, Expr
from .module import Frame, Module, Table, table_of
from .naming import WIDTH, axes_word, fit_line, identifier, layout_stem, place, shape


class _Assigned(NamedTuple):
    """An assignment outside of blocks: its targets, the number of its first line, the expression,
    the comment.
    """

    targets: str
    first_line: int
    text: str
    comment: str


class Lines:
    """Appends to the lines of `module`; `uses` says how often each value is read, `names` what
    results are called.
    """

    def __init__(
        self,
        frame: Frame,
        module: Module,
        prefix: str,
        uses: Counter[str],
        names: Mapping[str, str],
    ) -> None:
        self._frame, self._module, self._prefix = frame, module, prefix
        self._names = names
        self.left = Counter(uses)  # how often each value still will be read
        # of values that have a Python name, or will be part of the line that uses them
        self.exprs: dict[str, Expr] = {}
        self._holder: dict[str, str] = {}  # Python name → its value
        self._tables: dict[Table, str] = {}
        self._fixed: set[str] = set()  # arguments that no value takes the name of
        # values whose `with regather` or `with recompute` block is still open
        self._blocks: list[Sequence[str]] = []
        self._branch = 0  # 1 within an `if stage == …`
        self._last: _Assigned | None = None  # if it is the last statement
        self.context = Context(
            frame.program,
            frame.types.__getitem__,
            self.axis,
            self._layout,
            lambda op: self.table(table_of(op, frame.types, frame.program)),
            lambda name: name in frame.leaves and is_stored_as_matrix(frame.param(name)),
            frame.sizes,
            frame.target,
        )

    # ---- lines

    def assign(self, values: list[str], expr: Expr) -> None:
        """Writes a line of its own for values."""
        self.count_reads(expr)
        targets = ", ".join(map(self.hold, values))
        assigned = _Assigned(targets, len(self._module.lines), expr.text, self.comment(expr))
        self.append(f"{targets} = {expr.text}", assigned.comment)
        self._last = None if self._blocks or self._branch else assigned
        self.close_blocks()

    def append(self, code: str, comment: str = "", deeper: int = 0) -> None:
        """Writes a line in the innermost open block, or `deeper` in the loop that the lines before
        it open.
        """
        self._last = None
        indent = " " * self.indent(deeper)
        code = fit_line(code, len(indent))
        line = f"{indent}{code}  # {comment}" if comment else indent + code
        fits = len(line) <= WIDTH and "\n" not in line
        if fits or not comment:
            self._module.lines.append(line)
            return
        # the comment goes before the code where both do not fit one line
        for text in comment.split("\n"):
            for part in wrap(text, WIDTH - len(indent) - 2):
                self._module.lines.append(f"{indent}# {part}")
        self._module.lines.append(indent + code)

    def indent(self, deeper: int = 0) -> int:
        """The columns that a line is indented by, `deeper` in loops as in `append`."""
        return 4 * (2 + self._branch + len(self._blocks) + deeper)

    def open_branch(self, head: str) -> None:
        """Opens a branch, `if …` or `else`, for the lines that follow."""
        self.append(f"{head}:")
        self._branch = 1

    def close_branch(self) -> None:
        """Ends the branch, and the blocks in it."""
        self._blocks.clear()
        self._branch = 0

    def open_block(self, values: Sequence[str]) -> None:
        """Opens the block of some values; it ends when nothing reads them any more."""
        self._blocks.append(values)

    def close_blocks(self) -> None:
        """Ends the blocks whose values nothing reads any more."""
        while self._blocks and not any(self.left[value] for value in self._blocks[-1]):
            self._blocks.pop()

    def finish(self, ends: Sequence[str]) -> None:
        """Ends the body with a `return` of some values.

        If the last line only gives them their names, its expression is returned instead.
        """
        result = ", ".join(self.operand(name).text for name in ends)
        self._blocks.clear()
        self._module.result = result
        if (last := self._last) and last.targets == result:
            del self._module.lines[last.first_line :]
            self.append(f"return {last.text}", last.comment)
        else:
            self.append(f"return {result}")

    # ---- values

    def operand(self, name: str) -> Expr:
        """The expression of a value."""
        if name in self.exprs:
            return self.exprs[name]
        if name in self._frame.leaves:
            return Expr(f"self.{self._attribute(name)}{self._cast(name)}", ATOM, ())
        raise AssertionError(f"emit: {name} is read before it is written")

    def hold(self, value: str) -> str:
        """A Python name for `value`, with a number while another value that is still read has
        it.
        """
        in_use = {name for name, value in self._holder.items() if self.left[value]}
        name = identifier(self._names.get(value, value), in_use | self._fixed)
        self.rename(name, value)
        return name

    def rename(self, name: str, value: str) -> None:
        """Binds the Python name to `value`."""
        self._holder[name] = value
        self.exprs[value] = Expr(name, ATOM, (value,))

    def argument(self, like: str, type: str) -> str:
        """Adds an argument of `forward` that is no value of the IR; no value takes its name."""
        name = self.free(like)
        self._fixed.add(name)
        self._module.arguments[name] = type
        return name

    def free(self, like: str, *taken: str) -> str:
        """A Python name that nothing has yet."""
        return identifier(like, {*self._holder, *self._fixed, *taken})

    def count_reads(self, expr: Expr) -> None:
        """Counts the values that an expression reads."""
        for name in expr.reads:
            self.left[name] -= 1

    # ---- attributes

    def axis(self, axes: tuple[str, ...]) -> str:
        """The group over these axes."""
        if axes not in self._module.axes:
            self._module.axes[axes] = identifier(
                axes_word(axes, self._frame.program), self._module.attributes()
            )
        return f"self.{self._module.axes[axes]}"

    def _layout(self, layout: Layout) -> str:
        """The positions or the experts that a rank holds."""
        if layout not in self._module.layouts:
            self._module.layouts[layout] = identifier(
                layout_stem(layout), self._module.attributes()
            )
        return f"self.{self._module.layouts[layout]}"

    def table(self, table: Table) -> str:
        """A table of rotary positions: the caller's, or the module's own."""
        if table in self._tables:
            return self._tables[table]
        if table not in self._module.tables:
            self._module.tables[table] = identifier("rotary", self._module.attributes())
        return f"self.{self._module.tables[table]}"

    def bind_table(self, table: Table) -> None:
        """Makes a table an argument, which the caller passes on."""
        self._tables[table] = self.argument("rotary", "Tensor")

    def _attribute(self, name: str) -> str:
        param = self._frame.param(name)
        for attribute, weight in self._module.weights.items():
            if weight is param:
                return attribute
        return self._frame.declare(self._module, self._prefix, param)

    def _cast(self, name: str) -> str:
        """The method that casts a parameter to the model's element type, "" where it has that.

        In programs of the runtime a buffer holds the cast parameter.
        """
        dtype = self._frame.types[name].dtype
        differs = not self._frame.target.local and dtype != self._frame.param(name).type.dtype
        return f".{CASTS[dtype]}()" if differs else ""

    # ---- comments

    def comment(self, expr: Expr) -> str:
        """The shape of an expression's value, what its coercions do, and the plan's line."""
        op = expr.ops[-1]
        parts = [shape(value.type, self._frame.program) for value in op.outputs[:1]]
        for part in expr.ops:
            parts.append(self._note(part) if part.kind == "coerce" else self._message_note(part))
        if op.kind != "coerce" and op.outputs[0].name in self._frame.recomputed_values:
            parts.append("bwd: recomputed")
        return "  ".join([*filter(None, parts), place(op.span)])

    def _message_note(self, op: Op) -> str:
        """The collectives of an op that is no coercion, forward and backward."""
        program, entry = self._frame.program, OPS.get(op.kind)
        communicates_back = entry and (entry.linear or (entry.vjp and entry.vjp.communicates))
        # dictionaries as ordered sets
        forward, backward = dict[str, None](), dict[str, None]()
        for message in messages(program, op, self._frame.types):
            forward[f"{message.op} over {axes_word(message.axes, program)}"] = None
            if communicates_back:
                backward["bwd: wait" if begins(op) else f"bwd: {message.op}"] = None
        if entry and entry.awaits:
            backward = {"bwd: begins the exchange": None}
        return "  ".join([*forward, *backward])

    def _note(self, op: Op) -> str:
        """A coercion's effect, forward and backward."""
        source, target = ends(op)
        if source.kind is Kind.MAXIMUM:
            return f"{source}→{target}  no gradient"
        conjugate_coercion = coercion(*conjugate(source, target))
        backward = conjugate_coercion.collective or conjugate_coercion.local or "none"
        if op.outputs[0].name in self._frame.recomputed_values:
            backward = f"all_gather, {backward}"
        return f"{source}→{target}  bwd: {backward}"


def reads(body: tuple[Stmt, ...]) -> Iterator[str]:
    """Every reading of a value by the statements of a body."""
    for stmt in body:
        if isinstance(stmt, Op):
            yield from stmt.inputs
        else:
            yield from (arg.source for arg in stmt.args)
            yield from find_captured_values(stmt)


def find_captured_values(region: Region) -> list[str]:
    """Values from outside that a repeat's body reads, other than by its arguments."""
    inside = {value.name for value in values(region)}
    return [name for name in uses(*region.body) if name not in inside]
