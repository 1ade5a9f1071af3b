"""Which values of a step are parameters as the model uses them.

Non-goals: what leads from a parameter's state of record to its uses (`passes.place_state`, `passes.fuse_buckets`).
"""

from .ir import Op, Program


def leaves(program: Program) -> dict[str, str]:
    """The parameters, and the values at the scope of the step that are one as the model uses it, and whose they are."""
    of = {param.name: param.name for param in program.params}
    held = {bucket.name: bucket.params for bucket in program.buckets}
    for op in program.region.body:
        if isinstance(op, Op) and op.kind == "unpack":
            of |= {value.name: param for value, param in zip(op.outputs, held[str(op.get("bucket"))], strict=True)}
        elif isinstance(op, Op) and op.kind in ("coerce", "cast") and op.inputs[0] in of:
            of[op.outputs[0].name] = of[op.inputs[0]]
    return of
