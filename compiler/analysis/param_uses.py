"""The values of a step that are parameters as the model uses them, and the groups of them that go
into one product.

Non-goals: the ops between a parameter's state of record and its uses (`passes.place_state`,
`passes.bucket_params`).
"""

from ..ir import Program, Region, Stmt, ops_in, walk_regions
from ..ops.fused import CONTRACTS

_SAME_VALUE = ("coerce", "cast")
"""Ops whose result is their operand, elsewhere or in another element type."""


def leaves(program: Program) -> dict[str, str]:
    """The parameters and the values that are one as the model uses it, in the step or in a
    layer, by parameter.
    """
    param_of = {param.name: param.name for param in program.params_and_buffers}
    for op in program.ops:
        if op.kind == "unpack":
            params = program.bucket(str(op.get("bucket"))).params
            for value, param in zip(op.outputs, params, strict=True):
                param_of[value.name] = param
    for op in ops_in(program.region.body):
        if op.kind in _SAME_VALUE and op.inputs[0] in param_of:
            param_of[op.outputs[0].name] = param_of[op.inputs[0]]
    return param_of


def get_param_values(program: Program) -> dict[str, str]:
    """The parameters and the values that are one, or a layer's slice of one, at any depth, by
    parameter.
    """
    param_of = leaves(program)

    def follow(stmt: Stmt) -> None:
        if isinstance(stmt, Region):
            for arg in stmt.args:
                if arg.source in param_of:
                    param_of[arg.value.name] = param_of[arg.source]
            for inner in stmt.body:
                follow(inner)
        elif stmt.kind in _SAME_VALUE and stmt.inputs[0] in param_of:
            param_of[stmt.outputs[0].name] = param_of[stmt.inputs[0]]

    follow(program.region)
    return param_of


def products(program: Program) -> list[tuple[str, ...]]:
    """The parameters of each product with several weights: these are adjacent, in each layer of
    a repeat.
    """
    param_of = leaves(program)
    for region in walk_regions(program.region.body):
        for arg in region.args:
            if arg.source in param_of:
                param_of[arg.value.name] = param_of[arg.source]
    groups: dict[tuple[str, ...], None] = {}
    for op in program.ops:
        if op.kind == CONTRACTS.name:
            groups[tuple(param_of[name] for name in op.inputs[1:])] = None
    return [*groups]
