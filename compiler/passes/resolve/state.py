"""The section `state`: over which axes ranks share out what a step keeps, and how it is moved.

Non-goals: what that does to parameters and gradients (`passes.fuse_buckets`).
"""

from fnmatch import fnmatchcase

from attrs import evolve

from ... import syntax
from ...diagnostics import Diagnostics, Note, did_you_mean, listing
from ...ir import DATA_DIMS, STATES, Claim, Program, StateAxes
from ...settings import Flow, read


def flow(section: syntax.Section) -> Flow:
    """The section's settings.  Raises PlanError."""
    found = Diagnostics()
    settings = tuple(entry for entry in section.entries if isinstance(entry, syntax.Setting))
    read_flow = read(Flow, evolve(section, entries=settings), found)
    found.check()
    assert read_flow, "resolve: settings that failed to read were not reported"
    return read_flow


def state_axes(section: syntax.Section, claims: tuple[Claim, ...], sizes: dict[str, int]) -> tuple[StateAxes, ...]:
    """What the section's rules say, those of groups first, mesh order kept and axes of one rank left out.

    Raises PlanError.
    """
    found = Diagnostics()
    groups = [entry for entry in section.entries if isinstance(entry, syntax.Section)]
    states = [_group(group, claims, sizes, found) for group in groups]
    states.append(_rules(section, ("*",), claims, sizes, found))
    found.check()
    return tuple(state for state in states if groups or any(getattr(state, kind) for kind in STATES))


def check_patterns(section: syntax.Section, program: Program) -> None:
    """Every pattern of a group means a parameter.  Raises PlanError."""
    found = Diagnostics()
    names = [param.name for param in program.params]
    for group in section.entries:
        for setting in group.entries if isinstance(group, syntax.Section) else ():
            for pattern in _patterns(setting, Diagnostics()) if isinstance(setting, syntax.Setting) else ():
                if not any(fnmatchcase(name, pattern) for name in names):
                    help = did_you_mean(pattern, names) or f"there are {listing(names)}"
                    found.error("E0517", f"`{pattern}` is the name of no parameter", setting.span, help=help)
    found.check()


def _group(section: syntax.Section, claims: tuple[Claim, ...], sizes: dict[str, int], found: Diagnostics) -> StateAxes:
    """`group NAME { params = ["norm*"]  zero 1 over dp }`."""
    of: tuple[str, ...] = ()
    if str(section.kind) != "group" or not section.name:
        help = 'write `group NAME { params = ["norm*"]  zero 1 over dp }`'
        found.error("E0406", f"`state` has no section `{_words(section)}`", section.head, help=help)
        return StateAxes()
    for entry in section.entries:
        if isinstance(entry, syntax.Setting):
            of = _patterns(entry, found)
    if not of:
        found.error("E0402", f"`{_words(section)}` needs `params`", section.head, help='write `params = ["norm*"]`')
    return _rules(section, of, claims, sizes, found)


def _words(section: syntax.Section) -> str:
    return " ".join(str(word) for word in (section.kind, section.name) if word)


def _patterns(entry: syntax.Setting, found: Diagnostics) -> tuple[str, ...]:
    match entry:
        case syntax.Setting(syntax.Name("params"), syntax.List(items)) if all(
            isinstance(item, syntax.String) for item in items
        ):
            return tuple(item.value for item in items if isinstance(item, syntax.String))
        case _:
            found.error("E0406", "a group has `params` and rules only", entry.span, help='write `params = ["norm*"]`')
            return ("",)


def _rules(
    section: syntax.Section,
    of: tuple[str, ...],
    claims: tuple[Claim, ...],
    sizes: dict[str, int],
    found: Diagnostics,
) -> StateAxes:
    said: dict[str, syntax.Rule] = {}
    for entry in (entry for entry in section.entries if isinstance(entry, syntax.Rule)):
        for kind in entry.dims:
            _kind(kind, said, found)
            said[kind.name] = entry
        for axis in entry.axes:
            _axis(axis, claims, sizes, found)
    axes = {kind: _axes(rule, sizes) for kind, rule in said.items() if kind in STATES}
    state = StateAxes(of, **axes)
    _nested(state, said, found)
    return state


def _axes(rule: syntax.Rule, sizes: dict[str, int]) -> tuple[str, ...]:
    named = {axis.name for axis in rule.axes}
    return tuple(axis for axis, size in sizes.items() if axis in named and size > 1)


def _kind(kind: syntax.Name, said: dict[str, syntax.Rule], found: Diagnostics) -> None:
    if kind.name not in STATES:
        help = did_you_mean(kind.name, STATES) or f"there are {listing(STATES)}"
        found.error("E0514", f"there is no state `{kind}`", kind.span, help=help)
    elif kind.name in said:
        note = Note(said[kind.name].span, "first here")
        found.error("E0403", f"`{kind}` is shared out twice", kind.span, "again", notes=[note])


def _axis(axis: syntax.Name, claims: tuple[Claim, ...], sizes: dict[str, int], found: Diagnostics) -> None:
    if axis.name not in sizes:
        help = did_you_mean(axis.name, sizes) or f"axes of `mesh` are {listing(sizes)}"
        found.error("E0504", f"there is no axis `{axis}`", axis.span, help=help)
    elif sizes[axis.name] > 1 and not any(claim.axis == axis.name and claim.dim in DATA_DIMS for claim in claims):
        help = f"state is shared out where gradients are summed: write `batch over {axis}` in `shard`, or another axis"
        found.error("E0515", f"no data lies over `{axis}`", axis.span, "gradients are not summed over it", help=help)


def _nested(state: StateAxes, said: dict[str, syntax.Rule], found: Diagnostics) -> None:
    """Whoever holds a part of the parameters holds that of their gradients, and of their optimizer state."""
    for kind in STATES:
        axes = getattr(state, kind)
        if axes and axes != state.optimizer:
            span = said[kind].span
            help = f"write `optimizer over {', '.join(axes)}` too" if not state.optimizer else "give them the same axes"
            found.error("E0516", f"`{kind}` and `optimizer` are shared out over different axes", span, help=help)
