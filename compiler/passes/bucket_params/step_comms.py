"""What the step, or a layer of a repeat, does with a bucket: gathers its parameters, reduces its gradient.

Non-goals: where in the step that is done (`loop_comms`, and `fuse_buckets` itself).
"""

from collections.abc import Sequence

from ...ir import INVARIANT, PARTIAL, PRECISIONS, REPLICATED, Kind, Op, Value, sharded
from ...ir.placements import Step
from ...ops.builder import OpBuilder
from .assign import BucketGroup


def held(group: BucketGroup, leaves: Sequence[Value], builder: OpBuilder) -> str:
    """Writes what leads from a shared bucket's state of record to what each rank keeps of it for the model."""
    name = builder.write("pack", group.names, f"w_{group.identifier}", bucket=group.name)
    name = builder.coerce(name, Step(group.shards, INVARIANT, sharded(group.dim)))
    return builder.cast(name, leaves[0].type.dtype)


def gathered(group: BucketGroup, name: str, leaves: Sequence[Value], builder: OpBuilder) -> None:
    """Writes what leads from there to the parameters as the model uses them."""
    name = builder.coerce(name, Step(group.shards, sharded(group.dim), REPLICATED))
    others = tuple(axis for axis in leaves[0].type.axes_in(Kind.REPLICATED) if axis not in group.shards)
    name = builder.coerce(name, Step(others, INVARIANT, REPLICATED))
    builder.append(Op("unpack", (name,), tuple(leaves), (("bucket", group.name),), span=builder.span))


def reduced(group: BucketGroup, gradients: Sequence[str], builder: OpBuilder) -> str:
    """Writes what leads from gradients to the bucket's gradient of record."""
    name = builder.write("pack", gradients, f"g_{group.identifier}", bucket=group.name)
    name = builder.cast(name, group.key.dtype)
    name = _summed(name, Step(group.shards, PARTIAL, sharded(group.dim)), builder)
    return _summed(name, Step(group.reduce_axes, PARTIAL, INVARIANT), builder)


def _summed(name: str, step: Step, builder: OpBuilder) -> str:
    """Writes a reduction of gradients, in the element type that the plan chooses for what is sent."""
    if not step.axes:
        return name
    dtype = builder.types[name].dtype
    sent = PRECISIONS.get(builder.program.train.reduce or "", dtype)
    return builder.cast(builder.coerce(builder.cast(name, sent), step), dtype)
