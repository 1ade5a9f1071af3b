"""The names that stand in expressions and statements, and the same with others.

Non-goals: what they stand for (`scope`).
"""

from collections.abc import Iterable, Iterator, Mapping

from attrs import evolve

from ..syntax import tree


def mentioned(expr: tree.Expr) -> Iterator[tree.Name | tree.ParamUse]:
    """All names and parameters, those of functions and keys left out."""
    pending = [expr]
    while pending:
        match pending.pop():
            case tree.Name() | tree.ParamUse() as found:
                yield found
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


def names_in(items: Iterable[tree.Section | tree.Init | tree.Statement]) -> Iterator[str]:
    """All names that statements bind or mention."""
    for bind in _binds(items):
        yield from map(str, bind.names)
        yield from (str(each if isinstance(each, tree.Name) else each.name) for each in mentioned(bind.expr))


def count(items: Iterable[tree.Statement]) -> int:
    """How many statements there are, at any depth."""
    total = 0
    for item in items:
        inside = () if isinstance(item, tree.Bind) else item.body + (item.others if isinstance(item, tree.If) else ())
        total += 1 + count(inside)
    return total


def declarations(items: Iterable[tree.Statement]) -> Iterator[tree.Name]:
    """The parameters that statements declare."""
    for bind in _binds(items):
        yield from (each.name for each in mentioned(bind.expr) if isinstance(each, tree.ParamUse))


def _binds(items: Iterable[tree.Section | tree.Init | tree.Statement]) -> Iterator[tree.Bind]:
    """At any depth."""
    for item in items:
        match item:
            case tree.Bind():
                yield item
            case tree.If():
                yield from _binds((*item.body, *item.others))
            case tree.Repeat():
                yield from _binds(item.body)
            case _:
                pass


def with_names(item: tree.Statement, names: Mapping[str, str]) -> tree.Statement:
    """The statement with other names for what `names` has, on its right side."""
    match item:
        case tree.Bind():
            return evolve(item, expr=_renamed(item.expr, names))
        case tree.If():
            first, others = (tuple(with_names(each, names) for each in side) for side in (item.body, item.others))
            return evolve(item, body=first, others=others)
        case tree.Repeat():
            return evolve(item, body=tuple(with_names(each, names) for each in item.body))


def _renamed(expr: tree.Expr, names: Mapping[str, str]) -> tree.Expr:
    """The expression with other names for what `names` has."""
    match expr:
        case tree.Name():
            return _rename(expr, names)
        case tree.ParamUse():
            return evolve(expr, name=_rename(expr.name, names))
        case tree.Call(_, args, kwargs):
            kwargs = tuple(evolve(setting, value=_renamed(setting.value, names)) for setting in kwargs)
            return evolve(expr, args=tuple(_renamed(each, names) for each in args), kwargs=kwargs)
        case tree.Negative(value):
            return evolve(expr, value=_renamed(value, names))
        case tree.List(items):
            return evolve(expr, items=tuple(_renamed(item, names) for item in items))
        case tree.Binary():
            return _chain(expr, names)
        case _:
            return expr


def _rename(name: tree.Name, names: Mapping[str, str]) -> tree.Name:
    return evolve(name, name=names.get(name.name, name.name))


def _chain(expr: tree.Binary, names: Mapping[str, str]) -> tree.Expr:
    """Walks down the left side with a loop, since chains may be long."""
    links: list[tree.Binary] = []
    left: tree.Expr = expr
    while isinstance(left, tree.Binary):
        links.append(left)
        left = left.left
    left = _renamed(left, names)
    for link in reversed(links):
        left = evolve(link, left=left, right=_renamed(link.right, names))
    return left
