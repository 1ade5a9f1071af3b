"""Random sections `state`: the sharded parts, their axes and parameters, and the size of buckets.

Purpose: every stage and mixture, with and without buckets of layers; caps are so small that they
divide a small model.
"""

import re

from hypothesis import strategies as st

from .random_shardings import Sharding

STAGES = ("zero 0", "zero 1", "zero 2", "zero 3")
MIXED = (
    "optimizer",
    "gradients, optimizer",
    "parameters, optimizer",
    "parameters, gradients, optimizer",
)
CAPS = ("", "", "bucket = 100B", "bucket = 1KiB", "bucket = 4KiB")


@st.composite
def states(draw: st.DrawFn, sharding: Sharding, body: str) -> str:
    """The lines of the section, for a model with this body; none where no data lies over an
    axis.
    """
    data = [axis for dim, axes in sharding.rules if dim in ("batch", "seq") for axis in axes]
    data = [axis for axis in data if sharding.axes[axis] > 1 or not draw(st.integers(0, 3))]
    if not data or not draw(st.integers(0, 3)):
        return ""
    lines = [
        draw(_rule(data)),
        draw(st.sampled_from(CAPS)),
        draw(st.sampled_from(["", "prefetch = 0", "prefetch = 2"])),
    ]
    names = [*dict.fromkeys(re.findall(r"([a-z]+)[0-9]*\[", body))]
    if names and not draw(st.integers(0, 2)):
        few = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
        patterns = ", ".join(f'"{name}*"' for name in few)
        lines.append(f"group some {{ params = [{patterns}]  {draw(_rule(data))} }}")
    return "\n".join(filter(None, lines))


@st.composite
def _rule(draw: st.DrawFn, data: list[str]) -> str:
    """A stage or what it is short for, over some of the axes."""
    axes = draw(st.lists(st.sampled_from(data), min_size=1, unique=True))
    return f"{draw(st.sampled_from([*STAGES, *MIXED]))} over {', '.join(axes)}"
