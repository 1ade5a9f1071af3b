"""Layers a model's statements into a region of ops without placements: the single-device
program.
"""

from collections.abc import Callable, Iterator, Mapping

from attrs import frozen

from ..ir import (
    BATCH,
    FLOATS,
    Arg,
    Buffer,
    Enter,
    Leave,
    Param,
    Program,
    Region,
    Type,
    Value,
    Yield,
    defs,
)
from ..ops import roles
from ..ops.experts import DISPATCH
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Unknown, wrong
from .arithmetic import Scalar
from .branch_names import bound_in, declarations
from .builder import UNKNOWN, ModelBuilder
from .errors import check_name
from .inputs import get_inputs
from .parameters import Draws, OpenRepeat, Parameters, Scope, with_initial_values
from .routes import CHOSEN, Routes
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
    draws = Draws(builder, parameters.repeats)
    inputs = get_inputs(model, diagnostics)
    args = tuple(_input(model_input, scope, builder) for model_input in inputs)
    statements = _Statements(scope, parameters, builder, draws, user_ops, diagnostics)
    statements.write_model(model)
    results = list(statements.results())
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


@frozen
class _Statements(Routes):
    def write_model(self, model: tree.Model) -> None:
        for item in model.body:
            if isinstance(item, tree.Statement):
                self._statement(item, self.begin)

    def _statement(
        self, item: tree.Statement, begin: Callable[[tree.Statement], None] = lambda item: None
    ) -> None:
        body, before, bound = self._builder.body, len(self._builder.body), {**self._scope.bound}
        with self._diagnostics.catch():
            begin(item)
            self._write(item)
            return
        # what it binds and declares is unknown, but for what it would bind anew
        del body[before:]
        self._builder.body, self._scope.bound = body, bound
        unknown = {*declarations([item]), *bound_in([item])} - bound.keys()
        self._diagnostics.doubt(*unknown, section="statements")
        self._diagnostics.used |= item.span.names
        if "route" in item.span.names:
            self._diagnostics.used.add(DISPATCH.name)

    def _write(self, item: tree.Statement) -> None:
        match item:
            case tree.Repeat():
                self._repeat(item)
            case tree.Bind():
                self._bind(item)
            case tree.Route():
                with self.route(item):
                    for statement in item.body:
                        self._statement(statement)
            case tree.If():
                raise AssertionError("resolve: a branch is left")

    def _bind(self, item: tree.Bind) -> None:
        names = [name.name for name in item.names]
        values = self.tensors(item.expr, names)
        for i, name in enumerate(item.names):
            self._scope.check_free(name)
            if name.name in names[:i]:
                raise wrong("E0207", f"`{name}` is bound twice at once", name.span, "repeated")
        if UNKNOWN in values:
            raise Unknown
        self._scope.bound |= dict(zip(names, values, strict=True))

    def _repeat(self, item: tree.Repeat) -> None:
        outer = dict(self._scope.bound)
        outside, self._builder.body = self._builder.body, []
        carried = self._make_carries(item, outer)
        repeat = OpenRepeat(item.dim.name, outside)
        self._parameters.repeats.append(repeat)
        for statement in item.body:
            self._statement(statement)
        self._parameters.repeats.pop()
        ends = tuple(Yield(self._scope.bound[name], Leave.LAST) for name in carried)
        types = [self._builder.types[end.name] for end in ends]
        for (name, arg), type in zip(carried.items(), types, strict=True):
            with self._diagnostics.catch():
                _check_same_type(name, arg.value.type, type, item)
        results: list[Value] = []
        for name, arg in carried.items():
            results.append(self._builder.value(name.lstrip("_"), arg.value.type))
        region = Region(
            "repeat",
            tuple(self._builder.body),
            (*carried.values(), *repeat.slices),
            ends,
            tuple(results),
            item.dim.name,
            span=item.span,
        )
        self._builder.body = [*outside, region]
        self._scope.bound = outer
        for name, value in zip(carried, results, strict=True):
            self._scope.bound[name] = value.name

    def _make_carries(self, item: tree.Repeat, outer: Mapping[str, str]) -> dict[str, Arg]:
        """The values that a repeat carries from one iteration to the next, by name.

        These are the values of `outer`, the names bound before it, that its body binds anew.
        """
        carried: dict[str, Arg] = {}
        names = dict.fromkeys(
            name.name for name in self._names_assigned(item) if name.name in outer
        )
        for name in names:
            with self._diagnostics.catch():
                carried[name] = self._carry(name, item)
                continue
            self._diagnostics.doubt(name)
        return carried

    def _carry(self, name: str, item: tree.Repeat) -> Arg:
        source = self._scope.bound[name]
        type = self._builder.types[source]
        if not name.startswith(CHOSEN) and BATCH in type.dims and type.dtype not in FLOATS:
            bound = next(target for target in self._names_assigned(item) if target.name == name)
            help = "leave it out: ops take inputs by the names that the model has for them"
            raise wrong(
                "E0607",
                f"`{name}` is an input, which no iteration can change",
                bound.span,
                "bound anew",
                help,
            )
        value = self._builder.value(name.lstrip("_"), type)
        self._scope.bound[name] = value.name
        return Arg(value, source, Enter.CARRY)

    def _names_assigned(self, item: tree.Repeat) -> Iterator[tree.Name]:
        for statement in item.body:
            if isinstance(statement, tree.Bind):
                yield from statement.names
            elif isinstance(statement, tree.Route):
                for name in self.names_assigned(statement):
                    yield tree.Name(name, statement.value.span)
            elif isinstance(statement, tree.Repeat):
                yield from self._names_assigned(statement)


def _check_same_type(name: str, before: Type, after: Type, item: tree.Repeat) -> None:
    """Raises PlanError where a repeat changes the type of a value that it carries."""
    if after != before:
        message = f"`{name}` changes its dims in `repeat {item.dim}`"
        label = f"enters as [{', '.join(before.dims)}], leaves as [{', '.join(after.dims)}]"
        raise wrong("E0305", message, item.dim.span, label)
