"""The statements of a model: bindings, repeats and routes."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from attrs import frozen

from ..ir import BATCH, FLOATS, Arg, Enter, Leave, Region, Type, Value, Yield
from ..ops.experts import DISPATCH
from ..syntax import tree
from ..syntax.diagnostics import Unknown, wrong
from .branch_names import bound_in, declarations
from .builder import UNKNOWN
from .draft import Draft
from .expressions import write_tensors
from .route_losses import CHOSEN
from .routes import Routes
from .scope import OpenRepeat


@frozen
class Statements:
    """Writes the ops of statements."""

    _draft: Draft
    _routes: Routes

    def write(self, model: tree.Model) -> None:
        """Writes all statements of a model; the ones with mistakes are left out."""
        for item in model.body:
            if isinstance(item, tree.Statement):
                with self._leave_out_if_wrong(item):
                    self._routes.begin(item)
                    self._write(item)

    def _write_body(self, body: Sequence[tree.Statement]) -> None:
        for item in body:
            with self._leave_out_if_wrong(item):
                self._write(item)

    @contextmanager
    def _leave_out_if_wrong(self, item: tree.Statement) -> Generator[None]:
        """A statement with a mistake inside, which is reported, has no ops and binds nothing."""
        builder, scope, diagnostics = (
            self._draft.builder,
            self._draft.scope,
            self._draft.diagnostics,
        )
        body, count, bound = builder.body, len(builder.body), {**scope.bound}
        is_right = False
        with diagnostics.catch():
            yield
            is_right = True
        if is_right:
            return
        del body[count:]
        builder.body, scope.bound = body, bound
        # what it binds and declares is unknown, but for what it would bind anew
        unknown = {*declarations([item]), *bound_in([item])} - bound.keys()
        diagnostics.doubt(*unknown, section="statements")
        diagnostics.used |= item.span.names
        if "route" in item.span.names:
            diagnostics.used.add(DISPATCH.name)

    def _write(self, item: tree.Statement) -> None:
        match item:
            case tree.Repeat():
                self._write_repeat(item)
            case tree.Bind():
                self._write_bind(item)
            case tree.Route():
                with self._routes.route(item):
                    self._write_body(item.body)
            case tree.If():
                raise AssertionError("resolve: a branch is left")

    def _write_bind(self, item: tree.Bind) -> None:
        names = [name.name for name in item.names]
        values = write_tensors(self._draft, item.expr, names)
        for i, name in enumerate(item.names):
            self._draft.scope.check_free(name)
            if name.name in names[:i]:
                raise wrong("E0207", f"`{name}` is bound twice at once", name.span, "repeated")
        if UNKNOWN in values:
            raise Unknown
        self._draft.scope.bound |= dict(zip(names, values, strict=True))

    def _write_repeat(self, item: tree.Repeat) -> None:
        builder, scope = self._draft.builder, self._draft.scope
        outer = dict(scope.bound)
        outside, builder.body = builder.body, []
        carried = self._make_carries(item, outer)
        repeat = OpenRepeat(item.dim.name, outside)
        scope.repeats.append(repeat)
        self._write_body(item.body)
        scope.repeats.pop()
        ends = tuple(Yield(scope.bound[name], Leave.LAST) for name in carried)
        types = [builder.types[end.name] for end in ends]
        for (name, arg), type in zip(carried.items(), types, strict=True):
            with self._draft.diagnostics.catch():
                _check_same_type(name, arg.value.type, type, item)
        results: list[Value] = []
        for name, arg in carried.items():
            results.append(builder.value(name.lstrip("_"), arg.value.type))
        region = Region(
            "repeat",
            tuple(builder.body),
            (*carried.values(), *repeat.slices),
            ends,
            tuple(results),
            item.dim.name,
            span=item.span,
        )
        builder.body = [*outside, region]
        scope.bound = outer
        for name, value in zip(carried, results, strict=True):
            scope.bound[name] = value.name

    def _make_carries(self, item: tree.Repeat, outer: Mapping[str, str]) -> dict[str, Arg]:
        """The values that a repeat carries from one iteration to the next, by name.

        These are the values of `outer`, the names bound before it, that its body binds anew.
        """
        carried: dict[str, Arg] = {}
        names = dict.fromkeys(
            name.name for name in self._names_assigned(item) if name.name in outer
        )
        for name in names:
            with self._draft.diagnostics.catch():
                carried[name] = self._carry(name, item)
                continue
            self._draft.diagnostics.doubt(name)
        return carried

    def _carry(self, name: str, item: tree.Repeat) -> Arg:
        """The value that a repeat carries by a name.  Raises PlanError where it is an input."""
        source = self._draft.scope.bound[name]
        type = self._draft.builder.types[source]
        if not name.startswith(CHOSEN) and BATCH in type.dims and type.dtype not in FLOATS:
            bound = next(target for target in self._names_assigned(item) if target.name == name)
            message = f"`{name}` is an input, which no iteration can change"
            help = "leave it out: ops take inputs by the names that the model has for them"
            raise wrong("E0607", message, bound.span, "bound anew", help)
        value = self._draft.builder.value(name.lstrip("_"), type)
        self._draft.scope.bound[name] = value.name
        return Arg(value, source, Enter.CARRY)

    def _names_assigned(self, item: tree.Repeat) -> Iterator[tree.Name]:
        """The names that the body of a repeat binds, each where it is bound."""
        for statement in item.body:
            if isinstance(statement, tree.Bind):
                yield from statement.names
            elif isinstance(statement, tree.Route):
                for name in self._routes.names_assigned(statement):
                    yield tree.Name(name, statement.value.span)
            elif isinstance(statement, tree.Repeat):
                yield from self._names_assigned(statement)


def _check_same_type(name: str, before: Type, after: Type, item: tree.Repeat) -> None:
    """Raises PlanError where a repeat changes the type of a value that it carries."""
    if after != before:
        message = f"`{name}` changes its dims in `repeat {item.dim}`"
        label = f"enters as [{', '.join(before.dims)}], leaves as [{', '.join(after.dims)}]"
        raise wrong("E0305", message, item.dim.span, label)
