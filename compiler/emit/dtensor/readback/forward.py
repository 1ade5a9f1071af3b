"""Matches the declarations of a program of torch alone, and its model, to the IR.

Non-goals: how it is matched (`emit.readback`).
"""

from collections.abc import Sequence
from math import prod

from ....analysis.bucket_layout import stored_as_matrix
from ....ir import Param
from ...readback.calls import placed
from ...readback.weights import Weights
from ...target import mesh_axes


class TorchWeights(Weights):
    """The weights of a program, DTensors of global shapes."""

    def declared(self, param: Param) -> object:
        """The call that declares a parameter, with its placements on the mesh."""
        type, dims = param.type, param.type.dims[param.stacked :]
        cut = len(dims) - param.inner
        shape = (dims[:cut], dims[cut:]) if stored_as_matrix(param) else tuple((dim,) for dim in dims)
        sizes = ", ".join(str(prod(self.program.size(dim) for dim in group)) for group in shape)
        over = ", ".join(placed(type.at(axis), shape) for axis in mesh_axes(self.program))
        return self.machine.spec(f"weight(mesh, {sizes}, placements=[{over}]{_initial(param)})")


def _initial(param: Param) -> str:
    args: Sequence[object] = param.init.args
    return {"normal": f", std={args[0]!r}" if args else "", "ones": ", mean=1.0", "zeros": ""}[param.init.kind]
