"""The sections `mesh`, `shard` and `state`: axes, the dims over them, and how ranks share what
a step keeps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from attrs import evolve

from ..analysis.context_parallel import AUTO, STRATEGIES, ULYSSES, ZIGZAG
from ..config.schema import read
from ..config.settings import Flow, StateGroup
from ..config.values import spelled
from ..ir import BATCH, DATA_DIMS, SEQUENCE, STATES, Axis, Claim, Dim, Program, StateAxes
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, did_you_mean, listing, nearest
from ..syntax.source import Span
from ..syntax.synonyms import said_elsewhere
from .elastic import MOST, range_of


def axes_of(
    section: tree.Section, rules: Sequence[tree.Rule], diagnostics: Diagnostics
) -> tuple[Axis, ...]:
    """The axes of a mesh; one without a size, or of which only rules can be read, is of size 1."""
    axes: dict[str, Axis] = {}
    for entry in section.entries:
        match entry:
            case tree.Setting(key, tree.Number(int() as size, "")) if (
                0 < size <= MOST and key.name not in axes
            ):
                axes[key.name] = Axis(key.name, size, key.name, span=entry.span)
            case tree.Setting(key, tree.Range() as sizes) if key.name not in axes:
                within = range_of(sizes, diagnostics)
                if not within:
                    within = 1, 1
                    diagnostics.doubt(key.name, section="mesh")
                several = within if within[0] < within[1] else None
                axes[key.name] = Axis(key.name, within[1], key.name, several, span=entry.span)
            case _:
                help = spelled(entry.value) if isinstance(entry, tree.Setting) else ""
                help = (
                    help
                    or "write `mesh { dp = 2  tp = 4 }`, outermost axis first, each once, sizes"
                    " from 1 to 2^20"
                )
                diagnostics.error("E0501", "this is not an axis with its size", entry.span, help=help)
                diagnostics.doubt(section="mesh")
                if isinstance(entry, tree.Setting):  # rules may name it
                    diagnostics.doubt(entry.key.name)
                    axes.setdefault(
                        entry.key.name, Axis(entry.key.name, 1, entry.key.name, span=entry.span)
                    )
    for axis in (axis for rule in rules for axis in rule.axes if axis.name in diagnostics.doubtful):
        axes.setdefault(axis.name, Axis(axis.name, 1, axis.name, span=axis.span))
    return tuple(axes.values())


def rules_of(section: tree.Section, diagnostics: Diagnostics) -> tuple[tree.Rule, ...]:
    """The rules of `shard`, in their order."""
    for entry in section.entries:
        if not isinstance(entry, tree.Rule):
            diagnostics.error("E0502", "this is not a rule", entry.span, help=f"write `{as_rule(entry)}`")
            diagnostics.doubt(section="shard")
    return tuple(entry for entry in section.entries if isinstance(entry, tree.Rule))


def as_rule(entry: tree.Entry) -> str:
    """The rule that is probably meant."""
    match entry:
        case tree.Setting(key=key, value=tree.Name() as axis):
            return f"{key} over {axis}"
        case tree.Setting(key=key, value=tree.List(items=items)) if all(
            isinstance(x, tree.Name) for x in items
        ):
            return f"{key} over {', '.join(map(str, items))}"
        case _:
            return "heads, ffn over tp"


def known_rules(
    rules: Sequence[tree.Rule], dims: Mapping[str, Dim], axes: Sequence[Axis], diagnostics: Diagnostics
) -> tuple[tree.Rule, ...]:
    """The rules without dims and axes that do not exist; axes that they may have meant are not
    said to be of no use.
    """
    names = [axis.name for axis in axes]
    for rule in rules:
        for dim in (dim for dim in rule.dims if dim.name not in dims):
            help = did_you_mean(dim.name, dims) or f"dims are {listing(dims)}"
            diagnostics.error("E0503", f"there is no dim `{dim}`", dim.span, help=help)
            diagnostics.used.update(map(str, rule.axes))
            diagnostics.doubtful.update({BATCH} & {nearest(dim.name, dims)})
        for axis in (axis for axis in rule.axes if axis.name not in names):
            help = _help_for_axis(axis.name, names)
            diagnostics.error("E0504", f"there is no axis `{axis}`", axis.span, help=help)
            diagnostics.used.update([near] if (near := nearest(axis.name, names)) else names)
    return tuple(
        evolve(
            rule,
            dims=tuple(dim for dim in rule.dims if dim.name in dims),
            axes=tuple(axis for axis in rule.axes if axis.name in names),
        )
        for rule in rules
    )


def claims_of(rules: Sequence[tree.Rule]) -> tuple[Claim, ...]:
    """One claim for each dim and axis."""
    return tuple(
        Claim(
            rank,
            dim.name,
            axis.name,
            True,
            str(rule.layout) == ZIGZAG,
            str(rule.via) if rule.via else "",
            span=dim.span,
        )
        for rank, rule in enumerate(rules)
        for dim in rule.dims
        for axis in rule.axes
    )


HOW = {"as": ("contiguous", ZIGZAG), "via": (*STRATEGIES, AUTO)}
"""Words of a rule for the sequence: of the positions that a rank holds, and of how attention
gets other ranks'.
"""


def check_how(rules: Sequence[tree.Rule], diagnostics: Diagnostics) -> None:
    """Layouts and strategies are known ones, and of the sequence alone."""
    for rule in rules:
        for (word, known), said in zip(HOW.items(), (rule.layout, rule.via), strict=True):
            if said and said.name not in known:
                help = (
                    did_you_mean(said.name, known)
                    or f"write {listing([f'{word} {each}' for each in known])}"
                )
                diagnostics.error("E0518", f"there is no `{word} {said}`", said.span, help=help)
            elif said and [*map(str, rule.dims)] != [SEQUENCE]:
                others = ", ".join(str(dim) for dim in rule.dims if str(dim) != SEQUENCE)
                message = f"only `{SEQUENCE}` is sharded `{word} {said}`"
                help = f"leave `{word} {said}` out, or write `{SEQUENCE}` in a rule of its own"
                diagnostics.error("E0518", message, said.span, f"not of `{others}`", help=help)
        if rule.layout and rule.via and (str(rule.layout), str(rule.via)) == (ZIGZAG, ULYSSES):
            message = (
                f"with `via {ULYSSES}` every rank has all positions in attention, which leaves"
                " nothing to balance"
            )
            diagnostics.error("E0518", message, rule.layout.span, help=f"leave `as {ZIGZAG}` out")


ZERO = "zero"
"""The word of the stages of ZeRO."""


def read_flow(section: tree.Section, diagnostics: Diagnostics) -> Flow | None:
    """The section's settings; None if there are mistakes, which are added to `diagnostics`."""
    return read(Flow, _settings(section, diagnostics, tree.Setting), diagnostics)


def state_axes(
    section: tree.Section, claims: tuple[Claim, ...], sizes: dict[str, int], diagnostics: Diagnostics
) -> tuple[StateAxes, ...]:
    """The section's rules, those of groups first, in mesh order, without axes of one rank."""
    states = [
        _rules(entry, patterns, claims, sizes, diagnostics)
        for entry, patterns, _ in _groups(section, diagnostics)
    ]
    states.append(_rules(section, ("*",), claims, sizes, diagnostics))
    return tuple(
        state for state in states if len(states) > 1 or any(getattr(state, kind) for kind in STATES)
    )


def check_patterns(section: tree.Section, program: Program, diagnostics: Diagnostics) -> None:
    """Groups are of parameters, each in one."""
    # whose mistakes `state_axes` has told
    spans = [span for *_, span in _groups(section, Diagnostics())]
    # after them the rules for all others
    groups = zip((state.of for state in program.state), spans, strict=False)
    check_groups(groups, [param.name for param in program.params], diagnostics)


def _groups(
    section: tree.Section, diagnostics: Diagnostics
) -> Iterator[tuple[tree.Section, tuple[str, ...], Span]]:
    """Each `group NAME { params = ["norm*"]  zero 1 over dp }`, with its patterns and their
    place.
    """
    for entry in (entry for entry in section.entries if isinstance(entry, tree.Section)):
        if entry.kind.name != StateGroup.SECTION:
            help = 'write `group NAME { params = ["norm*"]  zero 1 over dp }`'
            diagnostics.error("E0406", f"`state` has no section `{entry.kind}`", entry.head, help=help)
        elif group := read(StateGroup, _settings(entry, diagnostics, tree.Setting, tree.Section), diagnostics):
            yield entry, group.params, group.spans["params"]


def _settings(section: tree.Section, diagnostics: Diagnostics, *kinds: type[tree.Entry]) -> tree.Section:
    """The section with entries of these kinds alone, and without settings that are meant for
    rules.
    """
    entries: list[tree.Entry] = []
    for entry in (entry for entry in section.entries if isinstance(entry, kinds)):
        if isinstance(entry, tree.Setting) and entry.key.name in (*STATES, ZERO):
            stage = entry.value.value if isinstance(entry.value, tree.Number) else 1
            rule = f"{ZERO} {stage} over dp" if entry.key.name == ZERO else as_rule(entry)
            diagnostics.error("E0502", "this is not a rule", entry.span, help=f"write `{rule}`")
        else:
            entries.append(entry)
    return evolve(section, entries=tuple(entries))


def _rules(
    section: tree.Section,
    patterns: tuple[str, ...],
    claims: tuple[Claim, ...],
    sizes: dict[str, int],
    diagnostics: Diagnostics,
) -> StateAxes:
    rules_by_kind: dict[str, tree.Rule] = {}
    for entry in (entry for entry in section.entries if isinstance(entry, tree.Rule)):
        for kind in entry.dims:
            _kind(kind, rules_by_kind, diagnostics)
            rules_by_kind[kind.name] = entry
        for axis in entry.axes:
            _axis(axis, claims, sizes, diagnostics)
        _each_once(entry.axes, sizes, diagnostics)
    named = {
        kind: {axis.name for axis in rule.axes} for kind, rule in rules_by_kind.items() if kind in STATES
    }
    several = [axis for axis, size in sizes.items() if size > 1]
    state = StateAxes(
        patterns,
        **{kind: tuple(axis for axis in several if axis in axes) for kind, axes in named.items()},
    )
    _nested(state, rules_by_kind, diagnostics)
    return state


def _kind(kind: tree.Name, rules_by_kind: dict[str, tree.Rule], diagnostics: Diagnostics) -> None:
    if kind.name not in STATES:
        help = did_you_mean(kind.name, STATES) or said_elsewhere(kind.name)
        help = help or f"there are {listing(STATES)}, and stages of ZeRO: `zero 1 over dp`"
        diagnostics.error("E0514", f"there is no state `{kind}`", kind.span, help=help)
    elif kind.name in rules_by_kind:
        note = Note(rules_by_kind[kind.name].span, "first here")
        diagnostics.error("E0403", f"`{kind}` is sharded twice", kind.span, "repeated", notes=[note])


def _help_for_axis(name: str, names: Iterable[str]) -> str:
    axis_names = list(names)
    if not axis_names:
        return f"write the axis and its size in `mesh`: `mesh {{ {name} = 2 }}`"
    return did_you_mean(name, axis_names) or f"axes of `mesh` are {listing(axis_names)}"


def _axis(
    axis: tree.Name, claims: tuple[Claim, ...], sizes: dict[str, int], diagnostics: Diagnostics
) -> None:
    if axis.name not in sizes:
        help = _help_for_axis(axis.name, sizes)
        diagnostics.error("E0504", f"there is no axis `{axis}`", axis.span, help=help)
    elif sizes[axis.name] > 1 and not any(
        claim.axis == axis.name and claim.dim in DATA_DIMS for claim in claims
    ):
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


def _each_once(axes: Sequence[tree.Name], sizes: dict[str, int], diagnostics: Diagnostics) -> None:
    first: dict[str, tree.Name] = {}
    for axis in axes:
        if axis is not first.setdefault(axis.name, axis):
            notes = [Note(first[axis.name].span, "first here")]
            help = f"leave it out: its {sizes.get(axis.name, 1)} ranks shard state only once"
            diagnostics.error(
                "E0403", f"`{axis}` is named twice", axis.span, "repeated", notes=notes, help=help
            )


def _nested(state: StateAxes, rules_by_kind: dict[str, tree.Rule], diagnostics: Diagnostics) -> None:
    """Whoever holds a part of the parameters holds that of their gradients, and of their
    optimizer state.
    """
    for kind in STATES:
        axes = getattr(state, kind)
        if axes and axes != state.optimizer:
            span = rules_by_kind[kind].span
            help = (
                f"write `optimizer over {', '.join(axes)}` too"
                if not state.optimizer
                else "give them the same axes"
            )
            notes = [Note(rules_by_kind["optimizer"].span, "the other axes")] if state.optimizer else []
            message = f"`{kind}` and `optimizer` are sharded over different axes"
            diagnostics.error("E0516", message, span, help=help, notes=notes)


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
