"""Which values of a step are parameters as the model uses them.

Non-goals: what leads from a parameter's state of record to its uses (`passes.place_state`, `passes.fuse_buckets`).
"""

from .ir import Op, Program, walk


def leaves(program: Program) -> dict[str, str]:
    """The parameters and the values that are one as the model uses it, in the step or in a turn, and whose they are."""
    of = {param.name: param.name for param in program.params}
    for op in walk(program.region.body):
        if op.kind == "unpack":
            params = program.bucket(str(op.get("bucket"))).params
            of |= {value.name: param for value, param in zip(op.outputs, params, strict=True)}
    for op in program.region.body:
        if isinstance(op, Op) and op.kind in ("coerce", "cast") and op.inputs[0] in of:
            of[op.outputs[0].name] = of[op.inputs[0]]
    return of
