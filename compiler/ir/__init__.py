"""The intermediate representation: frozen classes for every level from plan to training step.

Purpose: say what a program *is*; `printer` writes it, `parser` reads it, `analysis.verifier` says which ones are legal.
Non-goals: behaviour.  Ops are described in `ops`, placements coerced in `placements`, both as data.
"""

from ..schedules.actions import once as once
from .declarations import STATES as STATES
from .declarations import Axis as Axis
from .declarations import Bucket as Bucket
from .declarations import Buffer as Buffer
from .declarations import Claim as Claim
from .declarations import Dim as Dim
from .declarations import Init as Init
from .declarations import Param as Param
from .declarations import Pipeline as Pipeline
from .declarations import StateAxes as StateAxes
from .program import Program as Program
from .regions import Arg as Arg
from .regions import Enter as Enter
from .regions import Leave as Leave
from .regions import Op as Op
from .regions import Region as Region
from .regions import Stmt as Stmt
from .regions import Yield as Yield
from .types import BATCH as BATCH
from .types import DATA_DIMS as DATA_DIMS
from .types import FLOATS as FLOATS
from .types import INVARIANT as INVARIANT
from .types import ITEM_BYTES as ITEM_BYTES
from .types import MAXIMUM as MAXIMUM
from .types import MICROBATCHES as MICROBATCHES
from .types import PARTIAL as PARTIAL
from .types import PRECISIONS as PRECISIONS
from .types import REPLICATED as REPLICATED
from .types import SEQUENCE as SEQUENCE
from .types import Attr as Attr
from .types import Kind as Kind
from .types import Placement as Placement
from .types import Places as Places
from .types import Type as Type
from .types import Value as Value
from .types import sharded as sharded
from .walk import Names as Names
from .walk import ancestors as ancestors
from .walk import base as base
from .walk import blocks as blocks
from .walk import defs as defs
from .walk import map_ops as map_ops
from .walk import ops_in as ops_in
from .walk import regions_in as regions_in
from .walk import rename as rename
from .walk import results as results
from .walk import slices as slices
from .walk import uses as uses
from .walk import values as values
from .walk import walk as walk
from .walk import walk_regions as walk_regions
