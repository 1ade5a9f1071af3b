"""The sections `mesh`, `shard` and `state`: axes, the dims over them, and how ranks share what
a step keeps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from attrs import evolve

from ..analysis.context_parallel import AUTO, STRATEGIES, ULYSSES, ZIGZAG
from ..config.schema import parse_section
from ..config.settings import Flow, StateGroup
from ..config.values import help_for_digits
from ..ir import BATCH, DATA_DIMS, SEQUENCE, STATES, Axis, Claim, Dim, Program, StateAxes
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, did_you_mean, listing, nearest
from ..syntax.source import Span
from ..syntax.synonyms import help_for_setting
from .elastic import MOST, range_of


def axes_of(
    section: tree.Section, rules: Sequence[tree.Rule], diagnostics: Diagnostics
) -> tuple[Axis, ...]:
    """The axes of a mesh.

    An axis without a size, or one that only rules name because its own text cannot be read, is of
    size 1.
    """
    axes: dict[str, Axis] = {}
    for entry in section.entries:
        match entry:
            case tree.Setting(key, tree.Number(int() as size, "")) if (
                0 < size <= MOST and key.name not in axes
            ):
                axes[key.name] = Axis(key.name, size, key.name, span=entry.span)
            case tree.Setting(key, tree.Range() as sizes) if key.name not in axes:
                least, most = _range_or_1(key.name, sizes, diagnostics)
                several = (least, most) if least < most else None
                axes[key.name] = Axis(key.name, most, key.name, several, span=entry.span)
            case _:
                _report_no_axis(entry, diagnostics)
                if isinstance(entry, tree.Setting):  # rules may name it
                    diagnostics.doubt(entry.key.name)
                    axes.setdefault(
                        entry.key.name, Axis(entry.key.name, 1, entry.key.name, span=entry.span)
                    )
    for rule in rules:
        for axis in rule.axes:
            if axis.name in diagnostics.doubtful:
                axes.setdefault(axis.name, Axis(axis.name, 1, axis.name, span=axis.span))
    return tuple(axes.values())


def _range_or_1(axis: str, sizes: tree.Range, diagnostics: Diagnostics) -> tuple[int, int]:
    """The least and the most ranks of an axis, 1 and 1 where there are mistakes."""
    least_and_most = range_of(sizes, diagnostics)
    if least_and_most:
        return least_and_most
    diagnostics.doubt(axis, section="mesh")
    return 1, 1


def _report_no_axis(entry: tree.Entry, diagnostics: Diagnostics) -> None:
    help = help_for_digits(entry.value) if isinstance(entry, tree.Setting) else ""
    help = help or (
        "write `mesh { dp = 2  tp = 4 }`, outermost axis first, each once, sizes from 1 to 2^20"
    )
    diagnostics.error("E0501", "this is not an axis with its size", entry.span, help=help)
    diagnostics.doubt(section="mesh")


def rules_of(section: tree.Section, diagnostics: Diagnostics) -> tuple[tree.Rule, ...]:
    """The rules of `shard`, in their order."""
    for entry in section.entries:
        if not isinstance(entry, tree.Rule):
            diagnostics.error(
                "E0502", "this is not a rule", entry.span, help=f"write `{as_rule(entry)}`"
            )
            diagnostics.doubt(section="shard")
    return tuple(entry for entry in section.entries if isinstance(entry, tree.Rule))


def as_rule(entry: tree.Entry) -> str:
    """The rule that is probably meant."""
    match entry:
        case tree.Setting(key=key, value=tree.Name() as axis):
            return f"{key} over {axis}"
        case tree.Setting(key=key, value=tree.List(items=items)) if _are_names(items):
            return f"{key} over {', '.join(map(str, items))}"
        case _:
            return "heads, ffn over tp"


def _are_names(items: Iterable[tree.Expr]) -> bool:
    return all(isinstance(item, tree.Name) for item in items)


def without_unknown_names(
    rules: Sequence[tree.Rule],
    dims: Mapping[str, Dim],
    axes: Sequence[Axis],
    diagnostics: Diagnostics,
) -> tuple[tree.Rule, ...]:
    """The rules without dims and axes that do not exist; axes that they may have meant are not
    said to be of no use.
    """
    names = [axis.name for axis in axes]
    rules_left: list[tree.Rule] = []
    for rule in rules:
        dims_left: list[tree.Name] = []
        for dim in rule.dims:
            if dim.name in dims:
                dims_left.append(dim)
                continue
            help = did_you_mean(dim.name, dims) or f"dims are {listing(dims)}"
            diagnostics.error("E0503", f"there is no dim `{dim}`", dim.span, help=help)
            diagnostics.used.update(map(str, rule.axes))
            if nearest(dim.name, dims) == BATCH:
                diagnostics.doubtful.add(BATCH)
        axes_left: list[tree.Name] = []
        for axis in rule.axes:
            if axis.name in names:
                axes_left.append(axis)
                continue
            help = _help_for_axis(axis.name, names)
            diagnostics.error("E0504", f"there is no axis `{axis}`", axis.span, help=help)
            near = nearest(axis.name, names)
            diagnostics.used.update([near] if near else names)
        rules_left.append(evolve(rule, dims=tuple(dims_left), axes=tuple(axes_left)))
    return tuple(rules_left)


def claims_of(rules: Sequence[tree.Rule]) -> tuple[Claim, ...]:
    """One claim for each dim and axis."""
    claims: list[Claim] = []
    for rank, rule in enumerate(rules):
        zigzag, via = str(rule.layout) == ZIGZAG, str(rule.via) if rule.via else ""
        for dim in rule.dims:
            for axis in rule.axes:
                claim = Claim(rank, dim.name, axis.name, True, zigzag, via, span=dim.span)
                claims.append(claim)
    return tuple(claims)


HOW = {"as": ("contiguous", ZIGZAG), "via": (*STRATEGIES, AUTO)}
"""Words of a rule for the sequence: of the positions that a rank holds, and of how attention
gets other ranks'.
"""


def check_how(rules: Sequence[tree.Rule], diagnostics: Diagnostics) -> None:
    """Layouts and strategies are known ones, and of the sequence alone."""
    for rule in rules:
        _check_how_word(rule, "as", rule.layout, diagnostics)
        _check_how_word(rule, "via", rule.via, diagnostics)
        if rule.layout and rule.via and (str(rule.layout), str(rule.via)) == (ZIGZAG, ULYSSES):
            message = (
                f"with `via {ULYSSES}` every rank has all positions in attention, which leaves"
                " nothing to balance"
            )
            diagnostics.error("E0518", message, rule.layout.span, help=f"leave `as {ZIGZAG}` out")


def _check_how_word(
    rule: tree.Rule, word: str, choice: tree.Name | None, diagnostics: Diagnostics
) -> None:
    """The choice after a word of `HOW` in a rule is a known one, and of the sequence alone."""
    if choice is None:
        return
    choices = HOW[word]
    if choice.name not in choices:
        help = did_you_mean(choice.name, choices)
        if not help:
            help = f"write {listing([f'{word} {choice}' for choice in choices])}"
        diagnostics.error("E0518", f"there is no `{word} {choice}`", choice.span, help=help)
    elif [*map(str, rule.dims)] != [SEQUENCE]:
        others = ", ".join(str(dim) for dim in rule.dims if str(dim) != SEQUENCE)
        message = f"only `{SEQUENCE}` is sharded `{word} {choice}`"
        help = f"leave `{word} {choice}` out, or write `{SEQUENCE}` in a rule of its own"
        diagnostics.error("E0518", message, choice.span, f"not of `{others}`", help=help)


ZERO = "zero"
"""The word of the stages of ZeRO."""


def get_flow(section: tree.Section, diagnostics: Diagnostics) -> Flow | None:
    """The section's settings; None if there are mistakes, which are added to `diagnostics`."""
    return parse_section(Flow, _settings(section, diagnostics, tree.Setting), diagnostics)


def state_axes(
    section: tree.Section,
    claims: tuple[Claim, ...],
    sizes: dict[str, int],
    diagnostics: Diagnostics,
) -> tuple[StateAxes, ...]:
    """The section's rules, with groups first, in mesh order, without axes of one rank."""
    states: list[StateAxes] = []
    for entry, patterns, _ in _groups(section, diagnostics):
        states.append(_rules(entry, patterns, claims, sizes, diagnostics))
    states.append(_rules(section, ("*",), claims, sizes, diagnostics))
    if len(states) == 1 and not any(getattr(states[0], kind) for kind in STATES):
        return ()
    return tuple(states)


def check_patterns(section: tree.Section, program: Program, diagnostics: Diagnostics) -> None:
    """Groups are of parameters, each in one."""
    # `state_axes` has reported the mistakes in groups already
    spans = [span for *_, span in _groups(section, Diagnostics())]
    # `strict` is off: the rules for all other parameters come last and have no span
    groups = zip((state.param_patterns for state in program.state), spans, strict=False)
    check_groups(groups, [param.name for param in program.params], diagnostics)


def _groups(
    section: tree.Section, diagnostics: Diagnostics
) -> Iterator[tuple[tree.Section, tuple[str, ...], Span]]:
    """Each `group NAME { params = ["norm*"]  zero 1 over dp }`, with its patterns and their
    place.
    """
    for entry in section.entries:
        if not isinstance(entry, tree.Section):
            continue
        if entry.kind.name != StateGroup.SECTION:
            help = 'write `group NAME { params = ["norm*"]  zero 1 over dp }`'
            message = f"`state` has no section `{entry.kind}`"
            diagnostics.error("E0406", message, entry.head, help=help)
            continue
        settings = _settings(entry, diagnostics, tree.Setting, tree.Section)
        if group := parse_section(StateGroup, settings, diagnostics):
            yield entry, group.params, group.spans["params"]


def _settings(
    section: tree.Section, diagnostics: Diagnostics, *kinds: type[tree.Entry]
) -> tree.Section:
    """The section with entries of these kinds alone, and without settings that are meant for
    rules.
    """
    entries: list[tree.Entry] = []
    for entry in section.entries:
        if not isinstance(entry, kinds):
            continue
        if not isinstance(entry, tree.Setting) or entry.key.name not in (*STATES, ZERO):
            entries.append(entry)
            continue
        rule = as_rule(entry)
        if entry.key.name == ZERO:
            stage = entry.value.value if isinstance(entry.value, tree.Number) else 1
            rule = f"{ZERO} {stage} over dp"
        diagnostics.error("E0502", "this is not a rule", entry.span, help=f"write `{rule}`")
    return evolve(section, entries=tuple(entries))


def _rules(
    section: tree.Section,
    patterns: tuple[str, ...],
    claims: tuple[Claim, ...],
    sizes: dict[str, int],
    diagnostics: Diagnostics,
) -> StateAxes:
    """The state axes of the parameters that match `patterns`, by a section's rules."""
    rules_by_kind: dict[str, tree.Rule] = {}
    for entry in section.entries:
        if not isinstance(entry, tree.Rule):
            continue
        for kind in entry.dims:
            _check_kind(kind, rules_by_kind, diagnostics)
            rules_by_kind[kind.name] = entry
        for axis in entry.axes:
            _check_axis(axis, claims, sizes, diagnostics)
        _check_no_repeats(entry.axes, sizes, diagnostics)
    axes_by_kind: dict[str, tuple[str, ...]] = {}
    for kind, rule in rules_by_kind.items():
        if kind in STATES:
            names = {axis.name for axis in rule.axes}
            axes_by_kind[kind] = tuple(
                axis for axis, size in sizes.items() if size > 1 and axis in names
            )
    state = StateAxes(patterns, **axes_by_kind)
    _check_nested(state, rules_by_kind, diagnostics)
    return state


def _check_kind(
    kind: tree.Name, rules_by_kind: dict[str, tree.Rule], diagnostics: Diagnostics
) -> None:
    if kind.name not in STATES:
        help = did_you_mean(kind.name, STATES) or help_for_setting(kind.name)
        help = help or f"there are {listing(STATES)}, and stages of ZeRO: `zero 1 over dp`"
        diagnostics.error("E0514", f"there is no state `{kind}`", kind.span, help=help)
    elif kind.name in rules_by_kind:
        note = Note(rules_by_kind[kind.name].span, "first here")
        diagnostics.error(
            "E0403", f"`{kind}` is sharded twice", kind.span, "repeated", notes=[note]
        )


def _help_for_axis(name: str, names: Iterable[str]) -> str:
    axis_names = list(names)
    if not axis_names:
        return f"write the axis and its size in `mesh`: `mesh {{ {name} = 2 }}`"
    return did_you_mean(name, axis_names) or f"axes of `mesh` are {listing(axis_names)}"


def _check_axis(
    axis: tree.Name, claims: tuple[Claim, ...], sizes: dict[str, int], diagnostics: Diagnostics
) -> None:
    """An axis that shards state is one of the mesh, and data is sharded over it."""
    if axis.name not in sizes:
        help = _help_for_axis(axis.name, sizes)
        diagnostics.error("E0504", f"there is no axis `{axis}`", axis.span, help=help)
        return
    data_axes = {claim.axis for claim in claims if claim.dim in DATA_DIMS}
    if sizes[axis.name] > 1 and axis.name not in data_axes:
        help = (
            f"gradients are summed over axes with data: write `batch over {axis}` in `shard`,"
            " or another axis"
        )
        diagnostics.error(
            "E0515",
            f"no data is sharded over `{axis}`",
            axis.span,
            "gradients are not summed over it",
            help=help,
        )


def _check_no_repeats(
    axes: Sequence[tree.Name], sizes: dict[str, int], diagnostics: Diagnostics
) -> None:
    first: dict[str, tree.Name] = {}
    for axis in axes:
        if axis is not first.setdefault(axis.name, axis):
            notes = [Note(first[axis.name].span, "first here")]
            help = f"leave it out: its {sizes.get(axis.name, 1)} ranks shard state only once"
            diagnostics.error(
                "E0403", f"`{axis}` is named twice", axis.span, "repeated", notes=notes, help=help
            )


def _check_nested(
    state: StateAxes, rules_by_kind: dict[str, tree.Rule], diagnostics: Diagnostics
) -> None:
    """A rank that holds a part of the parameters holds the same part of their gradients, and of
    their optimizer state.
    """
    for kind in STATES:
        axes = getattr(state, kind)
        if not axes or axes == state.optimizer:
            continue
        notes: list[Note] = []
        if state.optimizer:
            help = "give them the same axes"
            notes.append(Note(rules_by_kind["optimizer"].span, "the other axes"))
        else:
            help = f"write `optimizer over {', '.join(axes)}` too"
        message = f"`{kind}` and `optimizer` are sharded over different axes"
        diagnostics.error("E0516", message, rules_by_kind[kind].span, help=help, notes=notes)


def check_groups(
    groups: Iterable[tuple[Sequence[str], Span]], names: Sequence[str], diagnostics: Diagnostics
) -> None:
    """Every pattern of a group matches a parameter, and no parameter is in two groups; spans
    are of their patterns.
    """
    owner: dict[str, Span] = {}
    for patterns, span in groups:
        for pattern in patterns:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched and not any(fnmatchcase(name, pattern) for name in diagnostics.doubtful):
                help = did_you_mean(pattern, names) or f"parameters are {listing(names)}"
                diagnostics.error("E0407", f"`{pattern}` matches no parameter", span, help=help)
            for name in matched:
                if (first := owner.setdefault(name, span)) is not span:
                    notes = [Note(first, "the first group")]
                    diagnostics.error(
                        "E0408",
                        f"parameter `{name}` is in two groups",
                        span,
                        "also matched here",
                        notes=notes,
                    )
