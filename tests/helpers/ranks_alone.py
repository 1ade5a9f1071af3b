"""Axes and meshes as one of their ranks sees them, in one process: for what asks where it is
and sends nothing.
"""

from types import SimpleNamespace
from typing import Any, cast

from scalec.runtime import Axis, Mesh, Positions


def mesh_at(**axes: tuple[int, int]) -> Mesh:
    """A mesh of which each axis has (size, this rank)."""
    return cast(
        Any, SimpleNamespace(size=lambda name: axes[name][0], rank=lambda name: axes[name][1])
    )


def axis_at(rank: int, size: int) -> Axis:
    """One rank of an axis."""
    return Axis("axis", size, rank, None)


def positions_at(size: int, rank: int, ranks: int, zigzag: bool) -> Positions:
    """One rank's part of a dim of `size`."""
    return Positions(mesh_at(cp=(ranks, rank)), size, "cp", zigzag=["cp"] if zigzag else [])
