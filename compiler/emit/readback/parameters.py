"""Matches the weights that a class declares to the parameters of the IR.

Non-goals: what they are read for (`forward`), and how they lie in buckets (`settings`).
"""

import ast
from math import prod

from ...ir import Param, Program
from .ast_matching import demand, demand_same, wrong
from .classes import Class, Model, Place, Weight
from .values import Groups, Local


def weights(model: Model, declared: Class, place: Place) -> dict[str, Local]:
    """The parameter that each weight stands for: its namesake, or what is named so but for a suffix."""
    params = [p for p in model.program.params if p.type.dims[: p.stacked] == place.dims]
    free = {p.name: p for p in params if p.name not in model.paths}
    calls = {name: held.call for name, held in declared.attributes.items() if isinstance(held, Weight)}
    found: dict[str, Local] = {}
    for name in sorted(calls, key=lambda name: name not in free):
        param = free.pop(name, None) or free.pop(name.rstrip("0123456789").rstrip("_"), None)
        if not param:
            raise wrong(calls[name], f"`{name}` is no parameter of the IR, or declared already")
        found[name] = Local(param.name, _groups(calls[name], param, model.program))
        model.paths[param.name] = place.prefix + name
    return found


def _groups(call: ast.Call, param: Param, program: Program) -> Groups:
    """The dims of a weight as declared: each its own, or the outer and the inner ones joined to a matrix."""
    type, dims = param.type, param.type.dims[param.stacked :]
    cut = len(dims) - param.inner
    groups = (dims[:cut], dims[cut:]) if param.inner and len(call.args) == 3 else tuple((dim,) for dim in dims)
    split = {i: type.axes_of(group[0]) for i, group in enumerate(groups) if type.axes_of(group[0])}
    inner_split = any(type.axes_of(dim) for group in groups for dim in group[1:])
    demand(call, not inner_split, "joins dims of which not the first is split")
    sizes = ", ".join(str(prod(program.size(dim) for dim in group)) for group in groups)
    init = f"{param.init.kind}({', '.join(map(repr, param.init.args))})"
    shard = {i: axes[0] if len(axes) == 1 else axes for i, axes in split.items()}
    demand_same(call, f"weight(mesh, {sizes}, {f'shard={shard!r}, ' if shard else ''}init={init})")
    return groups
