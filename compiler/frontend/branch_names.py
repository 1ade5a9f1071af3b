"""Names in the statements of a model: all, renamed, and names that one side of a branch lacks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import evolve

from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, PlanError, did_you_mean, wrong

Item = tree.Section | tree.Init | tree.Statement
"""An item of the body of a model."""


def find_mentions(expr: tree.Expr) -> Iterator[tree.Name | tree.ParamUse]:
    """All names and parameters; names of functions and of keys are left out."""
    pending = [expr]
    while pending:
        match pending.pop():
            case tree.Name() | tree.ParamUse() as mention:
                yield mention
            case tree.Call(_, args, kwargs):
                pending += [*args, *(setting.value for setting in kwargs)]
            case tree.Negative(value):
                pending.append(value)
            case tree.Binary(_, left, right):
                pending += (left, right)
            case tree.List(items):
                pending += items
            case _:
                pass


def statements(items: Iterable[Item]) -> Iterator[tree.Statement]:
    """All statements, at any depth."""
    for item in items:
        if not isinstance(item, tree.Statement):
            continue
        yield item
        if not isinstance(item, tree.Bind):
            yield from statements(item.body)
        if isinstance(item, tree.If):
            yield from statements(item.others)


def names_in(items: Iterable[Item]) -> Iterator[str]:
    """All names that statements bind or mention."""
    for bind in _binds(items):
        yield from map(str, bind.names)
        for mention in find_mentions(bind.expr):
            yield str(_name(mention))


def _name(mention: tree.Name | tree.ParamUse) -> tree.Name:
    return mention if isinstance(mention, tree.Name) else mention.name


def declarations(items: Iterable[Item]) -> Iterator[str]:
    """The parameters that statements declare."""
    return (use.name.name for use in find_param_uses(items))


def find_param_uses(items: Iterable[Item]) -> Iterator[tree.ParamUse]:
    """The parameters that statements declare, with their dims."""
    for bind in _binds(items):
        for mention in find_mentions(bind.expr):
            if isinstance(mention, tree.ParamUse):
                yield mention


def bound_in(items: Iterable[Item]) -> Iterator[str]:
    """All names that statements bind."""
    for bind in _binds(items):
        yield from map(str, bind.names)


def _binds(items: Iterable[Item]) -> Iterator[tree.Bind]:
    """The statements that bind names, at any depth; a route binds by its first one."""
    for item in statements(items):
        if isinstance(item, tree.Route):
            yield item.binds[0]
        elif isinstance(item, tree.Bind):
            yield item


def one_sided(items: Iterable[Item], diagnostics: Diagnostics) -> Iterator[Item]:
    """The items without branches: the first side of each; names in the other side, and indices,
    are in doubt.
    """
    for item in items:
        match item:
            case tree.If():
                diagnostics.doubt(item.index.name, section="statements")
                diagnostics.used.update(item.span.names)
                diagnostics.doubt(*bound_in(item.others), *declarations(item.others))
                yield from one_sided(item.body, diagnostics)
            case tree.Repeat():
                if item.index:
                    diagnostics.doubt(str(item.index))
                yield evolve(item, body=tuple(one_sided(item.body, diagnostics)), index=None)
            case _:
                yield item


def with_names(item: tree.Statement, names: Mapping[str, str]) -> tree.Statement:
    """The statement with other names for what `names` has, on its right side."""
    match item:
        case tree.Bind():
            return evolve(item, expr=_expr_with_names(item.expr, names))
        case tree.If():
            return evolve(
                item, body=_with_names(item.body, names), others=_with_names(item.others, names)
            )
        case tree.Repeat():
            return evolve(item, body=_with_names(item.body, names))
        case tree.Route():
            body = tuple(
                evolve(bind, expr=_expr_with_names(bind.expr, names)) for bind in item.body
            )
            return evolve(item, by=_expr_with_names(item.by, names), body=body)


def _with_names(
    body: Sequence[tree.Statement], names: Mapping[str, str]
) -> tuple[tree.Statement, ...]:
    return tuple(with_names(statement, names) for statement in body)


def _expr_with_names(expr: tree.Expr, names: Mapping[str, str]) -> tree.Expr:
    """The expression with other names for what `names` has."""
    match expr:
        case tree.Name():
            return _rename(expr, names)
        case tree.ParamUse():
            return evolve(expr, name=_rename(expr.name, names))
        case tree.Call(_, args, kwargs):
            args = tuple(_expr_with_names(argument, names) for argument in args)
            kwargs = tuple(
                evolve(setting, value=_expr_with_names(setting.value, names)) for setting in kwargs
            )
            return evolve(expr, args=args, kwargs=kwargs)
        case tree.Negative(value):
            return evolve(expr, value=_expr_with_names(value, names))
        case tree.List(items):
            return evolve(expr, items=tuple(_expr_with_names(item, names) for item in items))
        case tree.Binary():
            return _chain(expr, names)
        case _:
            return expr


def _rename(name: tree.Name, names: Mapping[str, str]) -> tree.Name:
    return evolve(name, name=names.get(name.name, name.name))


def _chain(expr: tree.Binary, names: Mapping[str, str]) -> tree.Expr:
    left = _expr_with_names(expr.links[0].left, names)
    for link in expr.links:
        left = evolve(link, left=left, right=_expr_with_names(link.right, names))
    return left


Names = dict[str, tree.Name]


def check_visible(model: tree.Model) -> None:
    """Raises PlanError where a name is used that only one side of a branch binds, or an index
    out of place.
    """
    inputs = {model_input.name.name: model_input.name for model_input in model.inputs}
    statements = [item for item in model.body if isinstance(item, tree.Statement)]
    _Walk(inputs, {}, {}).body(statements)


class _Walk:
    """A body: the names that are `visible` in it, the names that are bound on one side of a branch
    only, `partly`, and the indices of the repeats around.
    """

    def __init__(self, visible: Names, partly: Names, indices: Names) -> None:
        self._visible, self._partly, self._indices = {**visible}, {**partly}, indices
        self._bound: Names = {}

    def body(self, statements: Sequence[tree.Statement]) -> Names:
        """Walks through it; the names that it binds."""
        for item in statements:
            match item:
                case tree.Bind():
                    self._bind(item)
                case tree.If():
                    self._branch(item)
                case tree.Repeat():
                    self._repeat(item)
                case tree.Route():
                    self._bind(item.binds[0])
                    self._inside(self._indices).body(item.body)
        return self._bound

    def _bind(self, item: tree.Bind) -> None:
        for mention in find_mentions(item.expr):
            name = _name(mention)
            self._check_index(name)
            if name.name in self._partly:
                notes = (Note(self._partly[name.name].span, "bound here"),)
                help = "bind it on both sides, or before the branch"
                message = f"only one side of a branch binds `{name}`"
                raise wrong("E0201", message, name.span, "used after the branch", help, notes=notes)
        for name in item.names:
            self._check_index(name)
        self._add({name.name: name for name in item.names})

    def _add(self, names: Names) -> None:
        self._visible |= names
        self._bound |= names
        for name in names:
            self._partly.pop(name, None)

    def _branch(self, item: tree.If) -> None:
        if item.index.name not in self._indices:
            raise _no_index(item.index, self._indices)
        first = self._inside(self._indices).body(item.body)
        others = self._inside(self._indices).body(item.others)
        self._add({name: first[name] for name in first.keys() & others.keys()})
        for side in (first, others):
            for name, place in side.items():
                if name not in self._visible:
                    self._partly[name] = place

    def _repeat(self, item: tree.Repeat) -> None:
        indices = self._indices
        if item.index:
            if item.index.name in {*self._indices, *self._visible}:
                raise wrong(
                    "E0219",
                    f"`{item.index}` has a meaning already",
                    item.index.span,
                    "cannot be an index",
                )
            indices = indices | {item.index.name: item.index}
        bound = self._inside(indices).body(item.body)
        for name, place in bound.items():
            if name in self._visible:
                self._bound[name] = place

    def _inside(self, indices: Names) -> "_Walk":
        return _Walk(self._visible, self._partly, indices)

    def _check_index(self, name: tree.Name) -> None:
        if name.name in self._indices:
            help = f"the index of a repeat can only be used in `if {name} < … {{ … }}`"
            raise wrong("E0219", f"`{name}` is an index", name.span, "not a value", help)


def _no_index(index: tree.Name, indices: Mapping[str, tree.Name]) -> PlanError:
    if not indices:
        help = "write `repeat layers as i { if i < 2 { … } }`"
        return wrong(
            "E0219",
            "`if` is allowed only in a repeat whose index has a name",
            index.span,
            "not an index",
            help,
        )
    help = did_you_mean(index.name, indices)
    if not help:
        help = f"the index here is {' or '.join(f'`{name}`' for name in indices)}"
    message = f"`{index}` is the index of no repeat around this"
    return wrong("E0219", message, index.span, "not an index", help)
