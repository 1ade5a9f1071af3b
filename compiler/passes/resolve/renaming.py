"""The names that stand in expressions and statements, and the same with others.

Non-goals: what they stand for (`scope`).
"""

from collections.abc import Iterable, Iterator, Mapping

from attrs import evolve

from ... import syntax


def mentioned(expr: syntax.Expr) -> Iterator[syntax.Name | syntax.ParamUse]:
    """All names and parameters, those of functions and keys left out."""
    pending = [expr]
    while pending:
        match pending.pop():
            case syntax.Name() | syntax.ParamUse() as found:
                yield found
            case syntax.Call(_, args, kwargs):
                pending += [*args, *(setting.value for setting in kwargs)]
            case syntax.Negative(value):
                pending.append(value)
            case syntax.Binary(_, left, right):
                pending += (left, right)
            case syntax.List(items):
                pending += items
            case _:
                pass


def names_in(items: Iterable[syntax.Section | syntax.Init | syntax.Statement]) -> Iterator[str]:
    """All names that statements bind or mention."""
    for bind in _binds(items):
        yield from map(str, bind.names)
        yield from (str(each if isinstance(each, syntax.Name) else each.name) for each in mentioned(bind.expr))


def count(items: Iterable[syntax.Statement]) -> int:
    """How many statements there are, at any depth."""
    total = 0
    for item in items:
        inside = (
            () if isinstance(item, syntax.Bind) else item.body + (item.others if isinstance(item, syntax.If) else ())
        )
        total += 1 + count(inside)
    return total


def declarations(items: Iterable[syntax.Statement]) -> Iterator[syntax.Name]:
    """The parameters that statements declare."""
    for bind in _binds(items):
        yield from (each.name for each in mentioned(bind.expr) if isinstance(each, syntax.ParamUse))


def _binds(items: Iterable[syntax.Section | syntax.Init | syntax.Statement]) -> Iterator[syntax.Bind]:
    """At any depth."""
    for item in items:
        match item:
            case syntax.Bind():
                yield item
            case syntax.If():
                yield from _binds((*item.body, *item.others))
            case syntax.Repeat():
                yield from _binds(item.body)
            case _:
                pass


def with_names(item: syntax.Statement, names: Mapping[str, str]) -> syntax.Statement:
    """The statement with other names for what `names` has, on its right side."""
    match item:
        case syntax.Bind():
            return evolve(item, expr=_renamed(item.expr, names))
        case syntax.If():
            first, others = (tuple(with_names(each, names) for each in side) for side in (item.body, item.others))
            return evolve(item, body=first, others=others)
        case syntax.Repeat():
            return evolve(item, body=tuple(with_names(each, names) for each in item.body))


def _renamed(expr: syntax.Expr, names: Mapping[str, str]) -> syntax.Expr:
    """The expression with other names for what `names` has."""
    match expr:
        case syntax.Name():
            return _rename(expr, names)
        case syntax.ParamUse():
            return evolve(expr, name=_rename(expr.name, names))
        case syntax.Call(_, args, kwargs):
            kwargs = tuple(evolve(setting, value=_renamed(setting.value, names)) for setting in kwargs)
            return evolve(expr, args=tuple(_renamed(each, names) for each in args), kwargs=kwargs)
        case syntax.Negative(value):
            return evolve(expr, value=_renamed(value, names))
        case syntax.List(items):
            return evolve(expr, items=tuple(_renamed(item, names) for item in items))
        case syntax.Binary():
            return _chain(expr, names)
        case _:
            return expr


def _rename(name: syntax.Name, names: Mapping[str, str]) -> syntax.Name:
    return evolve(name, name=names.get(name.name, name.name))


def _chain(expr: syntax.Binary, names: Mapping[str, str]) -> syntax.Expr:
    """Walks down the left side with a loop, since chains may be long."""
    links: list[syntax.Binary] = []
    left: syntax.Expr = expr
    while isinstance(left, syntax.Binary):
        links.append(left)
        left = left.left
    left = _renamed(left, names)
    for link in reversed(links):
        left = evolve(link, left=left, right=_renamed(link.right, names))
    return left
