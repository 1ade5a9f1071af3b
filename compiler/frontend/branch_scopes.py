"""Which names a branch leaves behind: those that both of its sides bind; and where an index may stand.

Purpose: the mistakes that would no longer be seen as such once a repeat is divided (`branches`).
Non-goals: all other names (`scope`).
"""

from collections.abc import Mapping, Sequence

from ..syntax import tree
from ..syntax.diagnostics import Diagnostic, Note, PlanError, did_you_mean
from ..syntax.source import Span
from .errors import wrong
from .rename import mentioned

Names = dict[str, tree.Name]


def check_visible(model: tree.Model) -> None:
    """Raises PlanError where a name is used that only one side of a branch binds, or an index out of place."""
    statements = [item for item in model.body if isinstance(item, tree.Bind | tree.Repeat | tree.If)]
    _Walk({given.name.name: given.name for given in model.inputs}, {}, {}).body(statements)


class _Walk:
    """A body: names `known`, those bound on one side of a branch only, and the indices of the repeats around."""

    def __init__(self, known: Names, partly: Names, indices: Names) -> None:
        self._known, self._partly, self._indices = {**known}, {**partly}, indices
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
        return self._bound

    def _bind(self, item: tree.Bind) -> None:
        for each in mentioned(item.expr):
            name = each if isinstance(each, tree.Name) else each.name
            self._check_index(name)
            if name.name in self._partly:
                notes = (Note(self._partly[name.name].span, "bound here"),)
                help = "bind it on both sides, or before the branch"
                message = f"only one side of a branch binds `{name}`"
                raise PlanError([Diagnostic("E0201", message, name.span, "used after the branch", notes, help)])
        for name in item.names:
            self._check_index(name)
        self._add({name.name: name for name in item.names})

    def _add(self, names: Names) -> None:
        self._known |= names
        self._bound |= names
        for name in names:
            self._partly.pop(name, None)

    def _branch(self, item: tree.If) -> None:
        if item.index.name not in self._indices:
            raise _no_index(item.index, self._indices)
        sides = [self._inside(self._indices).body(side) for side in (item.body, item.others)]
        self._add({name: sides[0][name] for name in sides[0].keys() & sides[1].keys()})
        self._partly |= {name: at for side in sides for name, at in side.items() if name not in self._known}

    def _repeat(self, item: tree.Repeat) -> None:
        own: Names = {}
        if item.index:
            if item.index.name in {*self._indices, *self._known}:
                raise wrong("E0219", f"`{item.index}` has a meaning already", item.index.span, "cannot be an index")
            own = {item.index.name: item.index}
        bound = self._inside(self._indices | own).body(item.body)
        self._bound |= {name: at for name, at in bound.items() if name in self._known}

    def _inside(self, indices: Names) -> "_Walk":
        return _Walk(self._known, self._partly, indices)

    def _check_index(self, name: tree.Name) -> None:
        if name.name in self._indices:
            raise _misplaced(name, name.span)


def _no_index(index: tree.Name, indices: Mapping[str, tree.Name]) -> PlanError:
    if not indices:
        help = "write `repeat layers as i { if i < 2 { … } }`"
        return wrong(
            "E0219", "`if` is allowed only in a repeat whose index has a name", index.span, "not an index", help
        )
    help = did_you_mean(index.name, indices) or f"the index here is {' or '.join(f'`{name}`' for name in indices)}"
    return wrong("E0219", f"`{index}` is the index of no repeat around this", index.span, "not an index", help)


def _misplaced(index: tree.Name, span: Span) -> PlanError:
    help = f"the index of a repeat can only be used in `if {index} < … {{ … }}`"
    return wrong("E0219", f"`{index}` is an index", span, "not a value", help)
