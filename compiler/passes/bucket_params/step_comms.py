"""What the step does with a bucket outside of its microbatches: gathers its parameters, reduces its gradient.

Non-goals: buckets that are gathered or reduced in each layer of a repeat (`layers`).
"""

from collections.abc import Sequence

from ...ir import INVARIANT, PARTIAL, REPLICATED, Kind, Value, sharded
from ...ir.placements import Step
from .assign import BucketGroup
from .builder import Lines


def held(group: BucketGroup, leaves: Sequence[Value], lines: Lines) -> Value:
    """Writes what leads from a shared bucket's state of record to what each rank keeps of it for the model."""
    value = lines.write("pack", group.names, f"w_{group.identifier}", bucket=group.name)
    value = lines.coerce(value, Step(group.shards, INVARIANT, sharded(group.dim)))
    return lines.cast(value, leaves[0].type.dtype)


def gathered(group: BucketGroup, value: Value, leaves: Sequence[Value], lines: Lines) -> None:
    """Writes what leads from there to the parameters as the model uses them."""
    value = lines.coerce(value, Step(group.shards, sharded(group.dim), REPLICATED))
    others = tuple(axis for axis in leaves[0].type.axes_in(Kind.REPLICATED) if axis not in group.shards)
    value = lines.coerce(value, Step(others, INVARIANT, REPLICATED))
    lines.give("unpack", [value.name], leaves, bucket=group.name)


def reduced(group: BucketGroup, gradients: Sequence[str], lines: Lines) -> Value:
    """Writes what leads from gradients to the bucket's gradient of record."""
    value = lines.write("pack", gradients, f"g_{group.identifier}", bucket=group.name)
    value = lines.cast(value, group.key.dtype)
    value = lines.reduce(value, Step(group.shards, PARTIAL, sharded(group.dim)))
    return lines.reduce(value, Step(group.reduce_axes, PARTIAL, INVARIANT))
