"""One entry of what a step communicates.

Non-goals: the list of them (`communication`).
"""

from math import prod
from typing import Literal

from attrs import frozen

from ..ir import ITEM_BYTES

Where = Literal["forward", "backward", "step"]
Use = Literal["parameters", "gradients", "activations", "stages", "totals"]


@frozen
class Collective:
    """A collective of the step as one rank sees it; it is done `count` times in a step, once for
    each layer of `loops`.

    Its place is where it begins, which may be before the place where its result is awaited.  A
    message is one too, of two ranks, one that sends and one that receives.

    use      what it is for; `totals` are the count of labels, the loss and the norm, `stages` what
             crosses their cuts
    bucket   whose flat buffer it moves; "" for none
    op       all_reduce, all_gather, reduce_scatter, all_to_all or rotate; send or receive
    maximum  whether an all_reduce takes the maximum, not the sum
    axes     the mesh axes of the group of `ranks` ranks
    shape    of the local tensor that goes in
    loops    the loops around it, outermost first, by their dims: `layers` is the step's first loop
             over layers, `layers.1` its second, so that the whole sequence of calls can be written
             out from the list
    last     whether it is done in the last microbatch alone
    ahead    how many layers ahead it begins, of all loops but that over microbatches: 1 + ahead of
             them in the first layer, then one in each layer, until all have begun
    every    of how many layers of its innermost loop, counted from forward's first, it is done in
             the first alone
    value    the name of what comes out
    line     the plan's line that asks for it, as `name.scale:7`
    rank     along the pipeline's axis, of the ranks that do it; None without a pipeline
    stage    which does it in each of its actions `where`; None at the scope of the step
    chunk    the rank's stages whose part of the bucket it moves: before its row, or as soon as all
             of them have ended
    peer     the rank along the pipeline's axis at a message's other end
    among    the ranks of the axis that take part, if not all do
    hops     the loop of `times` calls within the op itself, inside all others: `hops`, `hops.1`, …;
             "" for none
    by       how many ranks further a rotate sends
    ragged   whether the first size is an even share of `all` rows that ranks send, or of more than
             these, where they send but `some`; "" where all send as much
    """

    use: Use
    bucket: str
    op: str
    maximum: bool
    axes: tuple[str, ...]
    ranks: int
    dtype: str
    shape: tuple[int, ...]
    loops: tuple[str, ...]
    last: bool
    ahead: int
    every: int
    count: int
    where: Where
    value: str
    line: str
    rank: int | None = None
    stage: int | None = None
    chunk: tuple[int, ...] = ()
    peer: int | None = None
    among: tuple[int, ...] = ()
    hops: str = ""
    times: int = 0
    by: int = 1
    ragged: Literal["", "all", "some"] = ""

    @property
    def elements(self) -> int:
        """The number of elements that go in."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size in bytes of what goes in."""
        return self.elements * ITEM_BYTES[self.dtype]
