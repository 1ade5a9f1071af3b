"""The intermediate representation: frozen classes for every level from plan to training step.

Purpose: say what a program *is*; `printer` writes it, `parser` reads it, `analysis.verifier` says
which ones are legal.  Non-goals: behaviour.  Ops are described in `ops`, placements coerced in
`placements`, both as data.
"""

# pyright: reportUnusedImport=false

from ..schedules.actions import once
from .declarations import STATES, Axis, Bucket, Buffer, Claim, Dim, Init, Param, Pipeline, StateAxes
from .program import Program
from .regions import Arg, Enter, Leave, Op, Region, Stmt, Yield
from .types import (
    BATCH,
    DATA_DIMS,
    FLOATS,
    INVARIANT,
    ITEM_BYTES,
    MAXIMUM,
    MICROBATCHES,
    PARTIAL,
    PRECISIONS,
    REPLICATED,
    SEQUENCE,
    Attr,
    Kind,
    Placement,
    Places,
    Type,
    Value,
    sharded,
)
from .walk import (
    Names,
    ancestors,
    base,
    blocks,
    defs,
    map_ops,
    ops_in,
    regions_in,
    rename,
    results,
    slices,
    sources_of,
    uses,
    values,
    walk,
    walk_regions,
)
