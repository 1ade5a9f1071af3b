"""The section `state`: over which axes ranks share out what a step keeps.

Non-goals: what that does to parameters and gradients (`passes.fuse_buckets`).
"""

from attrs import asdict, fields_dict

from ... import syntax
from ...diagnostics import Diagnostics, Note, did_you_mean, listing
from ...ir import DATA_DIMS, Claim, StateAxes

KINDS = tuple(fields_dict(StateAxes))


def state_axes(section: syntax.Section, claims: tuple[Claim, ...], sizes: dict[str, int]) -> StateAxes:
    """What the section says, mesh order kept and axes of one rank left out.  Raises PlanError."""
    found = Diagnostics()
    said: dict[str, syntax.Rule] = {}
    for entry in section.entries:
        if not isinstance(entry, syntax.Rule):
            help = "write `zero 1 over dp`, or `optimizer over dp`"
            found.error("E0406", "`state` has rules, and settings are not built yet", entry.span, help=help)
            continue
        for kind in entry.dims:
            _kind(kind, said, found)
            said[kind.name] = entry
        for axis in entry.axes:
            _axis(axis, claims, sizes, found)
    found.check()
    axes = {kind: _axes(rule, sizes) for kind, rule in said.items() if kind in KINDS}
    state = StateAxes(**axes)
    _nested(state, said, found)
    found.check()
    return state


def _axes(rule: syntax.Rule, sizes: dict[str, int]) -> tuple[str, ...]:
    named = {axis.name for axis in rule.axes}
    return tuple(axis for axis, size in sizes.items() if axis in named and size > 1)


def _kind(kind: syntax.Name, said: dict[str, syntax.Rule], found: Diagnostics) -> None:
    if kind.name not in KINDS:
        help = did_you_mean(kind.name, KINDS) or f"there are {listing(KINDS)}"
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
    for kind, axes in asdict(state).items():
        if axes and axes != state.optimizer:
            span = said[kind].span
            help = f"write `optimizer over {', '.join(axes)}` too" if not state.optimizer else "give them the same axes"
            found.error("E0516", f"`{kind}` and `optimizer` are shared out over different axes", span, help=help)
    for kind in ("parameters", "gradients"):
        if kind in said and said[kind].axes:
            help = "`zero 1` shares out masters and optimizer state"
            found.error("E0517", f"{kind} are not shared out yet", said[kind].span, help=help)
            return
