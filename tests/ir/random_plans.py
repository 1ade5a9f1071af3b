"""The random plans of `scalec.testing`, in the pieces that these tests take apart."""

from hypothesis import strategies as st

from ir.plans import Plan
from scalec.testing.random_plans import Sketch, sketches


def plans() -> st.SearchStrategy[Plan]:
    """Plans that the compiler may still refuse."""
    return sketches().map(_in_pieces)


def _in_pieces(sketch: Sketch) -> Plan:
    return Plan(
        sketch.body,
        sketch.mesh,
        "  ".join(sketch.rules),
        sketch.ranks,
        sketch.microbatches,
        sketch.microbatch,
        sketch.seq,
        sketch.train,
        sketch.clip,
        sketch.dims,
    )
