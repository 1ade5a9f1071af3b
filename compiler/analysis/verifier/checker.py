"""The base of every check: the program's names, and the rules for each type."""

from ...ir import INVARIANT, ITEM_BYTES, Kind, Placement, Program, Type

STEP_PASSES = ("differentiate", "place_state", "place_stages", "fuse_buckets", "schedule_pipeline")
"""After these passes the program is a training step, before them a model."""


class Checker:
    """Asserts with messages, before which `check` puts the pass that made the program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = {dim.name: dim.size for dim in program.dims}
        self.axes = {axis.name: place for place, axis in enumerate(program.axes)}
        self._legal: set[Type] = set()

    def type(self, name: str, type: Type) -> None:
        """Dims and axes are declared, placements canonical, and what is sharded divides."""
        if type in self._legal:
            return
        assert type.dtype in ITEM_BYTES, f"{name}: there is no element type {type.dtype}"
        assert all(dim in self.sizes for dim in type.dims), (
            f"{name}: has a dim that is not declared"
        )
        assert len({*type.dims}) == len(type.dims), f"{name}: has a dim twice"
        assert all(axis in self.axes for axis, _ in type.places), (
            f"{name}: lies over an unknown axis"
        )
        order = [self.axes[axis] for axis, _ in type.places]
        assert order == sorted({*order}), f"{name}: its axes are not in mesh order, each once"
        for _, place in type.places:
            self._place(name, place, type)
        for dim in {place.dim for _, place in type.places} - {""}:
            ranks = self.program.degree(type.axes_of(dim))
            assert self.sizes[dim] % ranks == 0, (
                f"{name}: {dim} = {self.sizes[dim]} over {ranks} ranks"
            )
        self._legal.add(type)

    def _place(self, name: str, place: Placement, type: Type) -> None:
        assert place != INVARIANT, f"{name}: says that it is invariant, which goes without saying"
        assert bool(place.dim) == (place.kind is Kind.SHARDED), (
            f"{name}: {place.kind.value} of {place.dim}"
        )
        assert place.dim in ("", *type.dims), f"{name}: shards no dim of its own"
