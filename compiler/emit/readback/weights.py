"""Matches the weights that the classes of a text declare to the parameters of the IR.

Non-goals: what they are read for (`forward`), and how they lie in buckets (`build`).
"""

import ast
from math import prod

from attrs import Factory, define

from ...analysis.bucket_layout import get_stored_dims
from ...ir import Buffer, Param, Program
from .machine import Machine
from .terms import Term, demand, wrong
from .values import Instance, Modules


@define
class Weights:
    """The name in the model's state of each parameter that is declared, and where each class's
    modules are.
    """

    machine: Machine
    program: Program
    paths: dict[str, str] = Factory(dict[str, str])
    _prefixes: dict[Instance, str] = Factory(dict[Instance, str])

    def declare(self, declaring: Instance, prefix: str = "", depth: int = 0) -> None:
        """Compares a module's declarations, `depth` repeats deep, with the IR; reading one then
        gives a parameter.
        """
        demand(
            declaring.class_of_module.node,
            self._prefixes.setdefault(declaring, prefix) == prefix,
            "is the class of modules in two places",
        )
        for name, value in declaring.attributes.items():
            match value:
                case (
                    Term(head="call", args=(Term(head="name", args=("weight",)), *_))
                    | Term(
                        head="call",
                        args=(
                            Term(head="attr", args=(Term(head="name", args=("torch",)), "zeros")),
                            *_,
                        ),
                    )
                ):
                    declaring.attributes[name] = self._param(
                        declaring, name, value, prefix + name, depth
                    )
                case Modules(by_key):
                    for module in dict.fromkeys(by_key.values()):
                        assert isinstance(module, Instance), "emit: no module"
                        self.declare(module, f"{prefix}{name}.*.", depth + 1)
                case _:
                    pass

    def demand_all(self, node: ast.AST) -> None:
        """Raises where a parameter of the IR is not declared."""
        missing = sorted({param.name for param in self.program.params_and_buffers} - {*self.paths})
        demand(node, not missing, f"declares no {', '.join(missing)}")

    def _param(self, declaring: Instance, name: str, value: Term, path: str, depth: int) -> Term:
        """The parameter that a weight is: its namesake, or what is named so but for a suffix."""
        node = self.machine.set_at[declaring, name]
        params = {
            param.name: param for param in self.program.params_and_buffers if param.stacked == depth
        }
        param = params.get(name) or params.get(name.rstrip("0123456789").rstrip("_"))
        if param is None or self.paths.setdefault(param.name, path) != path:
            raise wrong(node, f"`{name}` is no parameter of the IR, or declared already")
        declared = self.make_declaration(param)
        demand(node, value is declared, f"`{value}` should be `{declared}`")
        return self.machine.terms("param", param.name)

    def make_declaration(self, param: Param) -> object:
        """The call that declares a parameter: each dim its own, or the outer and the inner ones
        joined to a matrix.
        """
        type, groups = param.type, get_stored_dims(param)
        if isinstance(param, Buffer):
            return self.machine.spec(
                f"torch.zeros({self.program.size(*type.dims[param.stacked :])}, device=mesh.device)"
            )
        split = {
            i: type.axes_of(group[0]) for i, group in enumerate(groups) if type.axes_of(group[0])
        }
        inner = [dim for group in groups for dim in group[1:] if type.axes_of(dim)]
        assert not inner, f"emit: {param.name} joins dims of which not the first is split"
        sizes = ", ".join(str(prod(self.program.size(dim) for dim in group)) for group in groups)
        init = f"{param.init.kind}({', '.join(map(repr, param.init.args))})"
        shard = {i: axes[0] if len(axes) == 1 else axes for i, axes in split.items()}
        return self.machine.spec(
            f"weight(mesh, {sizes}, {f'shard={shard!r}, ' * bool(shard)}init={init})"
        )
