"""How parameters begin: the `init` lines of a model, and what an op says of parameters first used there."""

from collections.abc import Iterator, Mapping

from attrs import evolve

from ..ir import Init, Param
from ..syntax import tree
from .arithmetic import Scalar, evaluate
from .errors import wrong


def initialised(
    model: tree.Model, params: Mapping[str, Param], roles: Mapping[str, str], scope: Mapping[str, Scalar]
) -> Iterator[Param]:
    """The parameters with their initial values: by name, else by role, else by the model's `init ~ …`."""
    explicit, default = _inits(model, scope)
    for param in params.values():
        init = explicit.get(param.name) or (Init(roles[param.name]) if param.name in roles else default)
        if init is None:
            message = f"`{param.name}` has no initial value"
            raise wrong("E0210", message, param.span, help="add `init ~ normal(0.02)`")
        yield evolve(param, init=init)


def _inits(model: tree.Model, scope: Mapping[str, Scalar]) -> tuple[dict[str, Init], Init | None]:
    """What the lines say of single parameters, and of all others."""
    explicit: dict[str, Init] = {}
    default: Init | None = None
    for item in model.body:
        if isinstance(item, tree.Init):
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
                raise wrong("E0313", "a standard deviation cannot be negative", std.span, f"is {deviation:g}")
            return Init("normal", (deviation,))
        case tree.Name("normal") | tree.Call(tree.Name("normal")):
            help = "write `normal(0.02)`: its mean is 0"
            raise wrong("E0211", "`normal` takes one number, the standard deviation", dist.span, help=help)
        case _:
            raise wrong("E0211", "unknown distribution", dist.span, help="`normal(0.02)`, `ones` or `zeros`")
