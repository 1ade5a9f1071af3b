"""The limits of a search: the GPUs that there are, and what a model sets, by its program on one
rank without passes.
"""

from functools import cached_property
from pathlib import Path

from attrs import frozen

from ...analysis.hardware import Hardware
from ...analysis.recompute import cheap
from ...config.gpus import GIB, GPUS
from ...ir import DATA_DIMS, Program, Region, regions_in, walk_regions
from ...ops import roles


@frozen
class Goal:
    """A number of GPUs, and the step that they do.

    hardware  one GPU and its links; `ranks_per_node` are the GPUs of a node
    file      of the cluster; None where data sheets serve
    """

    gpus: int
    hardware: Hardware
    global_batch: int
    seq: int
    file: Path | None = None

    @property
    def per_node(self) -> int:
        """GPUs of a node, at most all of them."""
        return min(self.hardware.ranks_per_node, self.gpus)

    @property
    def capacity(self) -> int | None:
        """Bytes of a GPU; None where that is not known."""
        found = GPUS.get(self.hardware.name)
        return found.memory * GIB if found else None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq


@frozen
class Facts:
    """The model of `program`: its layers, and the dims over which it can be split."""

    program: Program

    @cached_property
    def repeats(self) -> tuple[str, ...]:
        """The dims of its outermost repeats, as a plan names them."""
        return tuple(dict.fromkeys(map(self._named, self.outermost)))

    @cached_property
    def innermost(self) -> tuple[str, ...]:
        """The dims of its repeats without others inside, as a plan names them."""
        regions = walk_regions(self.program.region.body)
        return tuple(
            dict.fromkeys(
                self._named(it.dim) for it in regions if it.dim and not regions_in(it.body)
            )
        )

    @cached_property
    def layers(self) -> int:
        """How many layers it has in all."""
        return sum(map(self.program.size, self.outermost))

    @cached_property
    def outermost(self) -> tuple[str, ...]:
        """The dims of its outermost repeats, of which branches cut a plan's dim into several."""
        return tuple(stmt.dim for stmt in self.program.region.body if isinstance(stmt, Region))

    def _named(self, dim: str) -> str:
        """The dim of the model: a part that branches cut off has the span of the whole dim,
        which comes first.
        """
        span = self.program.dim(dim).span
        return next(it.name for it in self.program.dims if it.span == span)

    @cached_property
    def experts(self) -> int:
        """How many experts a route has at least; 0 without routes."""
        return min(map(self.program.size, self.program.choices), default=0)

    @cached_property
    def heads(self) -> tuple[tuple[str, str], ...]:
        """The dims of query heads and of key/value heads of its kinds of attention."""
        found = (roles(op, self.program.types) for op in self.program.ops)
        return tuple(
            dict.fromkeys((it.heads, it.kv_heads) for it in found if it.key_seq and it.heads)
        )

    @cached_property
    def tensor_dims(self) -> tuple[str, ...]:
        """The dims that tensor parallelism splits: a vocabulary, heads, inner dims of MLPs; no
        two of one parameter.
        """
        params = [set(it.type.dims[it.stacked :]) for it in self.program.params]
        apart = {*DATA_DIMS, *self._width, *self.program.choices}
        first = [dim for pair in self.heads for dim in pair]
        classes = [roles(op, self.program.types).classes for op in self.program.ops]
        inner = [
            dim
            for it in self.program.params
            for dim in it.type.dims[it.stacked :]
            if dim not in apart
        ]
        found = list[str]()
        for dim in filter(None, dict.fromkeys((*classes, *first, *inner))):
            using = [own - {dim} for own in params if dim in own]
            # into an MLP's inner dim, and out of it
            matrices = [own for own in using if own & self._width]
            alone = dim in (*first, *classes) or (
                len(matrices) > 1 and all(own <= self._width for own in using)
            )
            if using and alone and not any(own & {*found} for own in using):
                found.append(dim)
        return tuple(found)

    @cached_property
    def _width(self) -> set[str]:
        """The dims of what layers hand on, but for tokens."""
        regions = (stmt for stmt in self.program.region.body if isinstance(stmt, Region))
        return {dim for region in regions for it in region.results for dim in it.type.dims} - {
            *DATA_DIMS
        }

    @cached_property
    def selective(self) -> tuple[str, ...]:
        """The ops that backward recomputes in little time."""
        return tuple(cheap(self.program))
