"""The sections `mesh` and `shard`: axes, and which dims lie over them.

Non-goals: whether the sharding is possible (`validate`), and rules of `state`.
"""

from collections.abc import Mapping, Sequence

from ..config.fields import spelled
from ..ir import Axis, Claim, Dim
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, did_you_mean, listing


def axes_of(section: tree.Section, found: Diagnostics) -> tuple[Axis, ...]:
    """The axes of a mesh; one without a size is of size 1."""
    axes: dict[str, Axis] = {}
    for entry in section.entries:
        match entry:
            case tree.Setting(key, tree.Number(int() as size, "")) if 0 < size <= 2**20 and key.name not in axes:
                axes[key.name] = Axis(key.name, size, key.name, span=entry.span)
            case _:
                help = spelled(entry.value) if isinstance(entry, tree.Setting) else ""
                help = help or "write `mesh { dp = 2  tp = 4 }`, outermost axis first, each once, sizes from 1 to 2^20"
                found.error("E0501", "this is not an axis with its size", entry.span, help=help)
                if isinstance(entry, tree.Setting):  # rules may name it
                    axes.setdefault(entry.key.name, Axis(entry.key.name, 1, entry.key.name, span=entry.span))
    return tuple(axes.values())


def rules_of(section: tree.Section, found: Diagnostics) -> tuple[tree.Rule, ...]:
    """The rules of `shard`, in their order."""
    for entry in section.entries:
        if not isinstance(entry, tree.Rule):
            found.error("E0502", "this is not a rule", entry.span, help=f"write `{as_rule(entry)}`")
    return tuple(entry for entry in section.entries if isinstance(entry, tree.Rule))


def as_rule(entry: tree.Entry) -> str:
    """The rule that is probably meant."""
    match entry:
        case tree.Setting(key=key, value=tree.Name() as axis):
            return f"{key} over {axis}"
        case tree.Setting(key=key, value=tree.List(items=items)) if all(isinstance(x, tree.Name) for x in items):
            return f"{key} over {', '.join(map(str, items))}"
        case _:
            return "heads, ffn over tp"


def check_known(rules: Sequence[tree.Rule], dims: Mapping[str, Dim], axes: Sequence[Axis], found: Diagnostics) -> None:
    """Every rule speaks of dims and axes that there are."""
    names = [axis.name for axis in axes]
    for rule in rules:
        for dim in rule.dims:
            if dim.name not in dims:
                help = did_you_mean(dim.name, dims) or f"dims are {listing(dims)}"
                found.error("E0503", f"there is no dim `{dim}`", dim.span, help=help)
        for axis in rule.axes:
            if axis.name not in names:
                help = did_you_mean(axis.name, names) or f"axes of `mesh` are {listing(names)}"
                found.error("E0504", f"there is no axis `{axis}`", axis.span, help=help)


def claims_of(rules: Sequence[tree.Rule]) -> tuple[Claim, ...]:
    """One claim for each dim and axis."""
    return tuple(
        Claim(rank, dim.name, axis.name, True, span=dim.span)
        for rank, rule in enumerate(rules)
        for dim in rule.dims
        for axis in rule.axes
    )
