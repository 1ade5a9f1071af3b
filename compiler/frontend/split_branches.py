"""`if i < k { … }` in `repeat … as i`: a repeat whose iterations differ becomes several, whose
iterations do not.

Each part has a dim of its own; a parameter that several parts declare becomes one in each.  Claims,
groups, names and recomputation of a divided dim or parameter hold for all its parts."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

from attrs import evolve, frozen

from ..config.hf_names import HFWeight, move_indices
from ..config.settings import ParamGroup, Train
from ..ir import Claim, Dim, StateAxes
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, PlanError, Unknown, did_you_mean, wrong
from .arithmetic import Scalar, evaluate
from .branch_names import (
    Item,
    check_visible,
    declarations,
    names_in,
    one_sided,
    statements,
    with_names,
)
from .errors import check_dim, check_not_data

MOST = 8192
"""The most statements that a model may have; statements of a repeat count once for each of its
parts.
"""


@frozen
class Copy:
    """A parameter of one part, and the index at which each repeat around it begins, outermost
    first.
    """

    name: str
    starts: tuple[int, ...]


@frozen
class Divided:
    """The model without branches; what each divided dim, and each parameter, of the plan has
    become.
    """

    model: tree.Model
    dims: Mapping[str, tuple[Dim, ...]]
    copies: Mapping[str, tuple[Copy, ...]]


def divide(
    model: tree.Model,
    dims: Mapping[str, Dim],
    numbers: Mapping[str, Scalar],
    diagnostics: Diagnostics,
) -> Divided:
    """The model with each repeat cut where its branches part; where they cannot be told apart,
    with one side alone.
    """
    try:
        check_visible(model)
        divider = _Divider(model, dims, numbers)
        items = _divide_items(model, divider)
    except (PlanError, Unknown) as error:
        if isinstance(error, PlanError):
            diagnostics.add(error)
        model = evolve(model, body=tuple(one_sided(model.body, diagnostics)))
        divider = _Divider(model, dims, numbers)
        items = _divide_items(model, divider, diagnostics)
    copies = {name: tuple(parts) for name, parts in divider.copies.items()}
    body: list[Item] = []
    for item in items:
        if isinstance(item, tree.Init):
            item = _divide_init(item, copies, diagnostics)
        body.append(item)
    return Divided(evolve(model, body=tuple(body)), divider.get_parts(), copies)


def _divide_items(
    model: tree.Model, divider: "_Divider", diagnostics: Diagnostics | None = None
) -> list[Item]:
    """The items of a model without branches; statements with mistakes are left out where these
    are collected.
    """
    body: list[Item] = []
    for item in model.body:
        if isinstance(item, tree.Section | tree.Init):
            body.append(item)
        elif diagnostics is None:
            body += divider.statements([item], ())
        else:
            with diagnostics.catch():
                body += divider.statements([item], ())
                continue
            diagnostics.doubt(*item.span.names, section="statements")
            diagnostics.used.update(item.span.names)
    return body


def _divide_init(
    item: tree.Init, copies: Mapping[str, Sequence[Copy]], diagnostics: Diagnostics
) -> tree.Init:
    """Initial values of all parts of the parameters that an `init` names, or of a single part."""
    copies_by_name: dict[str, Sequence[Copy]] = {}
    for parts in copies.values():
        for copy in parts:
            copies_by_name[copy.name] = (copy,)
    copies_by_name.update(copies)
    names: list[tree.Name] = []
    for name in item.names:
        if name.name not in copies_by_name:
            help = did_you_mean(name.name, copies)
            message = f"there is no parameter `{name}`"
            diagnostics.error("E0201", message, name.span, help=help)
        for copy in copies_by_name.get(name.name, ()):
            names.append(evolve(name, name=copy.name))
    return evolve(item, names=tuple(names))


def _check_most(statements: int, item: tree.Statement) -> None:
    if statements > MOST:
        help = f"a model has at most {MOST} statements, each counted once for each part of a repeat"
        raise wrong("E0102", "too many parts of repeats", item.span, help=help)


class _Divider:
    def __init__(
        self, model: tree.Model, dims: Mapping[str, Dim], numbers: Mapping[str, Scalar]
    ) -> None:
        self._dims, self._numbers = dims, numbers
        self._taken = {*dims, *numbers, *names_in(model.body)}
        self._parts: dict[str, dict[range, Dim]] = {}
        self._whole: set[str] = set()  # dims of repeats that stay as they are
        self._origin: dict[str, str] = {}
        self._count = 0
        self.copies: dict[str, list[Copy]] = {}

    def get_parts(self) -> dict[str, tuple[Dim, ...]]:
        """The parts of each divided dim, and the dim itself where another repeat still goes
        over it.
        """
        dims_by_name: dict[str, tuple[Dim, ...]] = {}
        for name, parts in self._parts.items():
            whole = (self._dims[name],) if name in self._whole else ()
            dims_by_name[name] = (*parts.values(), *whole)
        return dims_by_name

    def statements(
        self, body: Sequence[tree.Statement], starts: tuple[int, ...]
    ) -> Iterator[tree.Statement]:
        """A body without branches, in repeats that begin at `starts`."""
        for item in body:
            self._count += 1
            _check_most(self._count, item)
            if isinstance(item, tree.Repeat):
                yield from self._repeat(item, starts)
            else:
                assert not isinstance(item, tree.If), (
                    "resolve: a branch outside of the repeat that it divides"
                )
                for name in declarations([item]):
                    self.copies.setdefault(self._origin.get(name, name), []).append(
                        Copy(name, starts)
                    )
                yield item

    def _repeat(self, item: tree.Repeat, starts: tuple[int, ...]) -> Iterator[tree.Repeat]:
        check_dim(item.dim, self._dims)
        check_not_data(item.dim, "a repeat")
        cuts = self._cuts(item.body, item, self._all(item))
        bounds = sorted({0, self._dims[item.dim.name].size} | cuts)
        parts = [range(start, stop) for start, stop in pairwise(bounds)]
        _check_most(len(parts) * len([*statements(item.body)]), item)
        if len(parts) == 1:
            self._whole.add(item.dim.name)
            yield evolve(item, body=tuple(self.statements(item.body, (*starts, 0))), index=None)
            return
        bodies: dict[range, tuple[tree.Statement, ...]] = {}
        for part in parts:
            if body := tuple(self._statements_of_part(item.body, item, part)):
                bodies[part] = body
        dims = [self._part(item, part).name for part in bodies]
        names_by_part = self._make_new_names(dims, [*bodies.values()])
        for (part, body), dim, names in zip(bodies.items(), dims, names_by_part, strict=True):
            renamed = [with_names(statement, names) for statement in body]
            inner = self.statements(renamed, (*starts, part.start))
            yield evolve(item, dim=evolve(item.dim, name=dim), body=tuple(inner), index=None)

    def _all(self, item: tree.Repeat) -> range:
        return range(self._dims[item.dim.name].size)

    # ---- where branches part

    def _cuts(self, body: Sequence[tree.Statement], item: tree.Repeat, within: range) -> set[int]:
        """The indices of the repeat `item` where a branch's other side begins; the body runs for
        the indices `within`.
        """
        cuts: set[int] = set()
        for statement in body:
            match statement:
                case tree.If(index) if item.index and index.name == item.index.name:
                    end = self._end(statement, item, within)
                    cuts |= {end} | self._cuts(statement.body, item, range(within.start, end))
                    cuts |= self._cuts(statement.others, item, range(end, within.stop))
                case tree.If():
                    cuts |= self._cuts((*statement.body, *statement.others), item, within)
                case tree.Repeat():
                    cuts |= self._cuts(statement.body, item, within)
                case tree.Bind() | tree.Route():
                    pass
        return cuts

    def _end(self, branch: tree.If, item: tree.Repeat, within: range) -> int:
        value = evaluate(branch.end, self._numbers)
        if not within.start < value < within.stop:
            word = "always" if value >= within.stop else "never"
            label = f"here `{branch.index}` goes from {within.start} to {within.stop - 1}"
            help = f"`{item.dim}` is {self._all(item).stop}"
            raise wrong(
                "E0315",
                f"`{branch.index} < {float(value):g}` {word} holds",
                branch.end.span,
                label,
                help,
            )
        if value != int(value):
            raise wrong(
                "E0315", "an index is a whole number", branch.end.span, f"is {float(value):g}"
            )
        return int(value)

    def _statements_of_part(
        self, body: Sequence[tree.Statement], item: tree.Repeat, part: range
    ) -> Iterator[tree.Statement]:
        """The statements of a body that run in a part of the repeat `item`."""
        for statement in body:
            match statement:
                case tree.If(index, end, first, others) if (
                    item.index and index.name == item.index.name
                ):
                    side = first if part.stop <= evaluate(end, self._numbers) else others
                    yield from self._statements_of_part(side, item, part)
                case tree.If():
                    first = tuple(self._statements_of_part(statement.body, item, part))
                    others = tuple(self._statements_of_part(statement.others, item, part))
                    yield evolve(statement, body=first, others=others)
                case tree.Repeat():
                    yield evolve(
                        statement, body=tuple(self._statements_of_part(statement.body, item, part))
                    )
                case tree.Bind() | tree.Route():
                    yield statement

    # ---- names

    def _part(self, item: tree.Repeat, part: range) -> Dim:
        """The dim of a part: one for all repeats over the same indices."""
        parts, whole = self._parts.setdefault(item.dim.name, {}), self._dims[item.dim.name]
        if part not in parts:
            parts[part] = Dim(self._free(f"{whole.name}_{len(parts)}"), len(part), span=whole.span)
        return parts[part]

    def _make_new_names(
        self, dims: Sequence[str], bodies: Sequence[Sequence[tree.Statement]]
    ) -> list[dict[str, str]]:
        """For each part the new names of the parameters that other parts declare too, numbered
        as its dim is.
        """
        declared = [dict.fromkeys(declarations(body)) for body in bodies]
        times: Counter[str] = Counter()
        for names in declared:
            times.update(names.keys())
        names_by_part: list[dict[str, str]] = []
        for dim, names in zip(dims, declared, strict=True):
            number = dim.rstrip("_").rpartition("_")[2]
            new_names: dict[str, str] = {}
            for name in names:
                if times[name] > 1:
                    new_names[name] = self._free(f"{name}_{number}")
            for name, new_name in new_names.items():
                self._origin[new_name] = self._origin.get(name, name)
            names_by_part.append(new_names)
        return names_by_part

    def _free(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


Copies = Mapping[str, Sequence[Copy]]


def claims_of_parts(
    claims: Sequence[Claim], dims: Mapping[str, Sequence[Dim]]
) -> tuple[Claim, ...]:
    """A claim for each part of a divided dim."""
    claims_by_part: list[Claim] = []
    for claim in claims:
        if claim.dim not in dims:
            claims_by_part.append(claim)
            continue
        for dim in dims[claim.dim]:
            claims_by_part.append(evolve(claim, dim=dim.name))
    return tuple(claims_by_part)


def train_of_parts(train: Train, copies: Copies, dims: Mapping[str, Sequence[Dim]]) -> Train:
    """The settings with groups that hold all parts of the parameters that they name, and with
    recomputed parts.
    """
    groups: list[ParamGroup] = []
    for group in train.optimizer.groups:
        groups.append(evolve(group, params=_patterns_of_parts(group.params, copies)))
    recompute = train.recompute
    if recompute.word == "every":
        names: list[str] = []
        for name in recompute.names:
            parts = [part.name for part in dims.get(name, ())]
            names += parts or [name]
        recompute = evolve(recompute, names=tuple(names))
    optimizer = evolve(train.optimizer, groups=tuple(groups))
    return evolve(train, optimizer=optimizer, recompute=recompute)


def state_of_parts(state: Sequence[StateAxes], copies: Copies) -> tuple[StateAxes, ...]:
    """State of all parts of the parameters that it names."""
    return tuple(
        evolve(group, param_patterns=_patterns_of_parts(group.param_patterns, copies))
        for group in state
    )


def _patterns_of_parts(patterns: Sequence[str], copies: Copies) -> tuple[str, ...]:
    """Each pattern, if it matches just the parts of the parameters that it means; otherwise the
    names of these parts.
    """
    names: list[str] = []
    for pattern in patterns:
        wanted: list[str] = []
        matched: list[str] = []
        for name, parts in copies.items():
            part_names = [copy.name for copy in parts]
            if fnmatchcase(name, pattern):
                wanted += part_names
            matched += [part for part in part_names if fnmatchcase(part, pattern)]
        if not wanted or wanted == matched:
            names.append(pattern)
        else:
            names += wanted
    return tuple(names)


def names_of_parts(names: Sequence[HFWeight], copies: Copies) -> Iterator[HFWeight]:
    """An entry for each part of a parameter; its index goes on where the part before ends."""
    for weight in names:
        for copy in copies.get(weight.param, ()):
            yield evolve(move_indices(weight, copy.starts), param=copy.name)
