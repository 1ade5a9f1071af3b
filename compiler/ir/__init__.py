"""The intermediate representation: frozen classes for every level from plan to training step.

Purpose: say what a program *is*; `printer` writes it, `reader` reads it back, `wellformed` says which ones are legal.
Non-goals: behaviour.  Ops are described in `ops`, placements coerced in `placements`, both as data.
"""

from .program import STATES, Axis, Bucket, Claim, Dim, Init, Param, Pipeline, Program, StateAxes
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
from .walk import Names, base, types, uses, values, walk

__all__ = [
    "BATCH",
    "DATA_DIMS",
    "FLOATS",
    "INVARIANT",
    "ITEM_BYTES",
    "MAXIMUM",
    "MICROBATCHES",
    "PARTIAL",
    "PRECISIONS",
    "REPLICATED",
    "SEQUENCE",
    "STATES",
    "Arg",
    "Attr",
    "Axis",
    "Bucket",
    "Claim",
    "Dim",
    "Enter",
    "Init",
    "Kind",
    "Leave",
    "Names",
    "Op",
    "Param",
    "Pipeline",
    "Placement",
    "Places",
    "Program",
    "Region",
    "StateAxes",
    "Stmt",
    "Type",
    "Value",
    "Yield",
    "base",
    "sharded",
    "types",
    "uses",
    "values",
    "walk",
]
