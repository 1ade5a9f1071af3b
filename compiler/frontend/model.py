"""Makes a region of ops without placements of a model: the single-device program."""

from collections.abc import Mapping

from attrs import frozen

from ..ir import (
    Arg,
    Buffer,
    Enter,
    Leave,
    Param,
    Program,
    Region,
    Type,
    Yield,
    defs,
)
from ..ops import roles
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, wrong
from .arithmetic import Scalar
from .branch_names import declarations
from .builder import ModelBuilder
from .draft import Draft
from .draws import Draws
from .errors import check_name
from .inputs import get_inputs
from .parameters import Parameters, with_initial_values
from .route_losses import RouterLosses
from .routes import Routes
from .scope import Scope
from .statements import Statements
from .user_ops import UserOp


@frozen
class Built:
    """The model's region, its parameters and its routers' biases."""

    region: Region
    params: tuple[Param, ...]
    buffers: tuple[Buffer, ...]


def build(
    model: tree.Model,
    frame: Program,
    numbers: Mapping[str, Scalar],
    user_ops: Mapping[str, UserOp],
    dtype: str,
    stored: str,
    diagnostics: Diagnostics,
) -> Built:
    """The model as a region.

    `frame` has the dims; `dtype` and `stored` are the element types of activations and of the
    parameters' state of record. Statements with mistakes, which are added to `diagnostics`, are
    left out.
    """
    with diagnostics.catch():
        check_name(model.name)
    scope, builder = Scope(numbers, _visible_dims(frame)), ModelBuilder(frame)
    builder.reserve(declarations(model.body))
    parameters = Parameters(scope, builder, dtype, stored)
    draws = Draws(builder, scope.repeats)
    draft = Draft(builder, scope, parameters, draws, user_ops, diagnostics)
    inputs = get_inputs(model, diagnostics)
    args = tuple(_input(model_input, scope, builder) for model_input in inputs)
    routes = Routes(draft, RouterLosses(draft))
    Statements(draft, routes).write(model)
    results = list(routes.results())
    with diagnostics.catch():
        results.insert(0, _loss(model, scope, builder))
    if not results or results[0] != scope.bound.get("loss"):
        diagnostics.doubt(section="loss")
    body = (*parameters.leaves.values(), *builder.body)
    ends = tuple(Yield(result, Leave.LAST) for result in results)
    region = Region("model", body, (*args, *draws.inputs), ends, span=model.span)
    params = tuple(parameters.all.values())
    with diagnostics.catch():
        params = tuple(
            with_initial_values(model, parameters.all, parameters.roles, numbers, diagnostics)
        )
    return Built(region, params, (*parameters.buffers.values(),))


def _visible_dims(frame: Program) -> list[str]:
    """The dims that a plan can name: not the ones that the compiler makes for routes."""
    choice_dims = {*frame.choices.values()}
    return [dim.name for dim in frame.dims if not dim.twin and dim.name not in choice_dims]


def _input(model_input: tree.Input, scope: Scope, builder: ModelBuilder) -> Arg:
    value = builder.value(model_input.name.name, Type("i64", tuple(map(str, model_input.dims))))
    scope.bound[model_input.name.name] = value.name
    scope.declared[model_input.name.name] = model_input.name
    return Arg(value, value.name, Enter.EACH)


def _loss(model: tree.Model, scope: Scope, builder: ModelBuilder) -> str:
    loss = scope.bound.get("loss")
    if loss is None:
        help = "end the model with `loss = cross_entropy(logits, labels)`"
        raise wrong("E0206", "this model computes no `loss`", model.name.span, help=help)
    made_by = defs(builder.body)
    pending = [loss]
    while pending:  # what is summed over microbatches and ranks must be a sum over tokens
        op = made_by.get(pending.pop())
        if op and op.kind == "add":
            pending += op.inputs
        elif not op or not roles(op, builder.types).classes:
            help = "the loss is `cross_entropy(…)`, or a sum of such outside of repeats"
            span = op.span if op else model.name.span
            raise wrong("E0214", "`loss` is not a sum of token losses", span, help=help)
    return loss
