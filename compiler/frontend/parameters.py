"""Parameters: declared where they are first used, sliced by the repeats around that place.

Non-goals: initial values (`initial`), but for what the op of the first use says of them.
"""

from attrs import evolve

from ..ir import Arg, Enter, Init, Op, Param, Stmt, Type
from ..syntax import tree
from ..syntax.diagnostics import Diagnostic, Note, PlanError
from ..syntax.source import Span
from .builder import Writer
from .errors import check_name, check_not_data, wrong
from .scope import Scope


class OpenRepeat:
    """A repeat whose body is being read: what it takes slices of, the parameters declared in it among these."""

    def __init__(self, dim: str, outside: list[Stmt]) -> None:
        """`outside` are the statements before it."""
        self.dim, self.outside = dim, outside
        self.slices: list[Arg] = []
        self.holds: dict[str, str] = {}
        self.draws = ""


class Parameters:
    """All parameters so far, as values of the model: `leaves` has one op for each."""

    def __init__(self, scope: Scope, writer: Writer, dtype: str, stored: str) -> None:
        """`dtype` is that of activations, `stored` that of the parameters' state of record."""
        self._scope, self._writer, self._dtype, self._stored = scope, writer, dtype, stored
        self.all: dict[str, Param] = {}
        self.leaves: dict[str, Op] = {}
        self.roles: dict[str, str] = {}  # how a parameter begins by its first use, if that says so
        self.repeats: list[OpenRepeat] = []

    def declare(self, use: tree.ParamUse) -> str:
        """The value of a parameter where it is first used."""
        self._check(use)
        self._scope.declared[use.name.name] = use.name
        name, stack = use.name.name, tuple(repeat.dim for repeat in self.repeats)
        dims = (*stack, *map(str, use.outs), *map(str, use.ins))
        if twice := [dim for dim in use.outs + use.ins if dims.count(dim.name) > 1]:
            dim = twice[-1]
            help = f"give one of the two a name of its own: `dims {{ {dim} = …  inner = {dim} }}`"
            raise wrong("E0308", f"`{name}` has dim `{dim}` twice", dim.span, "again", help)
        self._writer.reserve(name)
        param = Param(name, Type(self._stored, dims), len(stack), len(use.ins), Init(""), span=use.span)
        self.all[name] = param
        leaf = self._writer.value(name, evolve(param.type, dtype=self._dtype))
        self.leaves[name] = Op("leaf", (name,), (leaf,), (), span=use.span)
        for repeat in self.repeats:
            slice = self._writer.value(name, leaf.type.inside(repeat.dim))
            repeat.slices.append(Arg(slice, leaf.name, Enter.EACH))
            repeat.holds[name] = slice.name
            leaf = slice
        return leaf.name

    def use(self, param: Param, span: Span) -> str:
        """The value of a parameter declared before: its slice in the repeat that declared it."""
        for repeat in reversed(self.repeats):
            if param.name in repeat.holds:
                return repeat.holds[param.name]
        if param.stacked:
            notes = (Note(param.span, "declared here"),)
            raise PlanError(
                [Diagnostic("E0209", f"`{param.name}` has one value per repetition", span, "used outside", notes)]
            )
        return self.leaves[param.name].outputs[0].name

    def begin(self, expr: tree.Expr, init: str) -> None:
        """A parameter that is declared by `expr` begins as its op says."""
        if init and isinstance(expr, tree.ParamUse):
            self.roles.setdefault(expr.name.name, init)

    def make_matrix(self, right: tree.Expr, inner: int) -> None:
        """A parameter on the right side of `@` has its `inner` last dims contracted."""
        if isinstance(right, tree.ParamUse | tree.Name):
            name = right.name.name if isinstance(right, tree.ParamUse) else right.name
            if param := self.all.get(name):
                self.all[name] = evolve(param, inner=inner)

    def _check(self, use: tree.ParamUse) -> None:
        name = use.name.name
        if first := self._scope.declared.get(name):
            help = f"write `{name}` without brackets to use it again"
            notes = (Note(first.span, "declared here"),)
            raise PlanError([Diagnostic("E0208", f"`{name}` is declared twice", use.span, "again", notes, help)])
        if name in self._scope.bound:
            raise wrong("E0207", f"`{name}` is already a value", use.name.span, "declared as a parameter here")
        for dim in (*use.outs, *use.ins):
            self._scope.check_dim(dim)
            if dim.name != "seq":
                check_not_data(dim, "a parameter")
        check_name(use.name)
