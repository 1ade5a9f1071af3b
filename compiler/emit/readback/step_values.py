"""What names of a step stand for besides values of the IR.

Non-goals: expressions (`scope`), and names of a model's forward (`values`).
"""

from attrs import frozen

from ...ir import Type
from .values import Axes


@frozen
class Zero:
    """`torch.zeros_like(…)`, to which a sum over microbatches is added."""

    type: Type


@frozen
class Mark:
    """The mesh, the flat gradients or parameters by bucket, those of turns or chunks by themselves, or reductions."""

    of: str


MESH, GRADIENTS, WEIGHTS = Mark("mesh"), Mark("gradients"), Mark("weights")
FLATS, REDUCTIONS = Mark("flat_params"), Mark("reductions")

Seen = str | Axes | Zero | Mark
"""A value of the IR, or what is none."""
