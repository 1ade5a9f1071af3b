"""The parameters of a model: their declarations, their slices in repeats, their initial values."""

from collections.abc import Iterable, Iterator, Mapping

from attrs import evolve

from ..ir import SEQUENCE, Arg, Buffer, Enter, Init, Op, Param, Type
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, wrong
from ..syntax.source import Span
from .arithmetic import Scalar, evaluate
from .builder import ModelBuilder
from .errors import check_dim, check_name, check_not_data
from .expert_rules import check_declared, check_used
from .scope import Scope


class Parameters:
    """All parameters so far, as values of the model: `leaves` has one op for each."""

    def __init__(self, scope: Scope, builder: ModelBuilder, dtype: str, stored: str) -> None:
        """`dtype` is the element type of activations, `stored` the element type of parameters in
        their state of record.
        """
        self._scope, self._builder, self._dtype, self._stored = scope, builder, dtype, stored
        self.all: dict[str, Param] = {}
        self.buffers: dict[str, Buffer] = {}
        self.leaves: dict[str, Op] = {}
        self.roles: dict[str, str] = {}  # how a parameter begins by its first use, if that says so

    def declare(self, use: tree.ParamUse) -> str:
        """The value of a parameter where it is first used."""
        self._check(use)
        self._scope.declared[use.name.name] = use.name
        name, stack = use.name.name, tuple(repeat.dim for repeat in self._scope.repeats)
        dims = [*stack]
        if self._scope.route.experts:
            dims.append(self._scope.route.experts)
        dims += self._param_dims((*use.outs, *use.ins))
        if twice := [dim for dim in use.outs + use.ins if dims.count(dim.name) > 1]:
            dim = twice[-1]
            help = f"give one of the two a name of its own: `dims {{ {dim} = …  inner = {dim} }}`"
            raise wrong("E0308", f"`{name}` has dim `{dim}` twice", dim.span, "repeated", help)
        type = Type(self._stored, tuple(dims))
        self.all[name] = Param(name, type, len(stack), len(use.ins), Init(""), span=use.span)
        leaf = self._builder.value(name, evolve(type, dtype=self._dtype))
        self.leaves[name] = Op("leaf", (name,), (leaf,), (), span=use.span)
        for repeat in self._scope.repeats:
            slice = self._builder.value(name, leaf.type.inside(repeat.dim))
            repeat.slices.append(Arg(slice, leaf.name, Enter.EACH))
            repeat.holds[name] = slice.name
            leaf = slice
        return leaf.name

    def _param_dims(self, dims: Iterable[tree.Name]) -> list[str]:
        """A parameter's dims as it has them: in logits of a route, with the twin of the experts."""
        return [self._scope.twins.get(dim.name, dim.name) for dim in dims]

    def declare_biases(self, use: tree.ParamUse, rate: float, route: int) -> str:
        """A router's biases, which it chooses by: of one layer, where a repeat is around."""
        self._check(use)
        name, stack = use.name.name, tuple(repeat.dim for repeat in self._scope.repeats)
        self._scope.declared[name] = use.name
        type = Type("f32", (*stack, *self._param_dims(use.outs)))
        self.buffers[name] = Buffer(
            name, type, len(stack), 0, Init("zeros"), rate=rate, route=route, span=use.span
        )
        self._builder.types[name] = type
        for repeat in self._scope.repeats:
            slice = self._builder.value(name, self._builder.types[name].inside(repeat.dim))
            repeat.slices.append(Arg(slice, name, Enter.EACH))
            name = slice.name
        return name

    def use(self, param: Param, span: Span) -> str:
        """The value of a parameter declared before: its slice in the repeat that declared it."""
        param_experts = self._builder.program.outer(param)[param.stacked :]
        experts = self._scope.route.experts
        route_experts = (experts,) if experts else ()
        check_used(param, param_experts, route_experts, span)
        for repeat in reversed(self._scope.repeats):
            if param.name in repeat.holds:
                return repeat.holds[param.name]
        if param.stacked:
            notes = [Note(param.span, "declared here")]
            raise wrong(
                "E0209",
                f"`{param.name}` has one value per repetition",
                span,
                "used outside",
                notes=notes,
            )
        return self.leaves[param.name].outputs[0].name

    def begin(self, expr: tree.Expr, init: str) -> None:
        """A parameter that is declared by `expr` begins as its op says."""
        if init and isinstance(expr, tree.ParamUse):
            self.roles.setdefault(expr.name.name, init)

    def make_matrix(self, right: tree.Expr, inner: int) -> None:
        """A parameter on the right side of `@` has its `inner` last dims contracted."""
        match right:
            case tree.ParamUse(tree.Name(name)) | tree.Name(name):
                if param := self.all.get(name):
                    self.all[name] = evolve(param, inner=inner)
            case _:
                pass

    def _check(self, use: tree.ParamUse) -> None:
        name = use.name.name
        if first := self._scope.declared.get(name):
            help = f"write `{name}` without brackets to reuse it"
            notes = (Note(first.span, "declared here"),)
            raise wrong(
                "E0208", f"`{name}` is declared twice", use.span, "repeated", help, notes=notes
            )
        if name in self._scope.bound or name in self._scope.route.outside:
            raise wrong(
                "E0207",
                f"`{name}` is already a value",
                use.name.span,
                "declared as a parameter here",
            )
        wrong_dims = Diagnostics()
        for dim in (*use.outs, *use.ins):
            with wrong_dims.catch():
                check_dim(dim, self._scope.dims)
                if dim.name != SEQUENCE:
                    check_not_data(dim, "a parameter")
        wrong_dims.check()
        routed = self._builder.program.choices.keys() - self._scope.twins.keys()
        check_declared(use, self._scope.route.experts, routed)
        check_name(use.name)


def with_initial_values(
    model: tree.Model,
    params: Mapping[str, Param],
    roles: Mapping[str, str],
    scope: Mapping[str, Scalar],
    diagnostics: Diagnostics,
) -> Iterator[Param]:
    """The parameters with their initial values: by name, else by role, else by the model's
    `init ~ …`.
    """
    explicit, default = _inits(model, scope, diagnostics)
    for param in params.values():
        init = explicit.get(param.name)
        if init is None and param.name in roles:
            init = Init(roles[param.name])
        init = init or default
        if init is None:
            message = f"`{param.name}` has no initial value"
            raise wrong("E0210", message, param.span, help="add `init ~ normal(0.02)`")
        yield evolve(param, init=init)


def _inits(
    model: tree.Model, scope: Mapping[str, Scalar], diagnostics: Diagnostics
) -> tuple[dict[str, Init], Init | None]:
    """Initial values of single parameters, and of all others; 0 in place of mistakes, which are
    added to `diagnostics`.
    """
    explicit: dict[str, Init] = {}
    default: Init | None = None
    for item in model.body:
        if isinstance(item, tree.Init):
            init = Init("zeros")
            with diagnostics.catch():
                init = _distribution(item.dist, scope)
            for name in item.names:
                explicit[name.name] = init
            default = default if item.names else init
    return explicit, default


def _distribution(dist: tree.Name | tree.Call, scope: Mapping[str, Scalar]) -> Init:
    match dist:
        case tree.Name("ones" | "zeros"):
            return Init(dist.name)
        case tree.Call(tree.Name("normal"), (std,), ()):
            deviation = float(evaluate(std, scope))
            if deviation < 0:
                raise wrong(
                    "E0313",
                    "a standard deviation cannot be negative",
                    std.span,
                    f"is {deviation:g}",
                )
            return Init("normal", (deviation,))
        case tree.Name("normal") | tree.Call(tree.Name("normal")):
            help = "write `normal(0.02)`: its mean is 0"
            raise wrong(
                "E0211", "`normal` takes one number, the standard deviation", dist.span, help=help
            )
        case _:
            raise wrong(
                "E0211", "unknown distribution", dist.span, help="`normal(0.02)`, `ones` or `zeros`"
            )
