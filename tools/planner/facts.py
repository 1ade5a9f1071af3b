"""The limits of a search: the GPUs, and the facts of the model, by its program on one rank without
passes.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from attrs import frozen

from ...compiler.analysis.hardware import Hardware
from ...compiler.analysis.recompute import cheap
from ...compiler.config.gpus import GIB, GPUS
from ...compiler.ir import DATA_DIMS, Program, Region, regions_in, walk_regions
from ...compiler.ops import roles


@frozen
class Goal:
    """A number of GPUs, and the step that they do.

    hardware      one GPU and its links; `ranks_per_node` are the GPUs of a node
    global_batch  sequences of a step
    seq           tokens of a sequence
    file          the cluster's file; None where the figures are from data sheets
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
        gpu = GPUS.get(self.hardware.name)
        return gpu.memory * GIB if gpu else None

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
        return tuple(dict.fromkeys(map(self._plan_dim, self.outermost)))

    @cached_property
    def innermost(self) -> tuple[str, ...]:
        """The dims of its repeats without others inside, as a plan names them."""
        dims = dict[str, None]()
        for region in walk_regions(self.program.region.body):
            if region.dim and not regions_in(region.body):
                dims[self._plan_dim(region.dim)] = None
        return tuple(dims)

    @cached_property
    def layers(self) -> int:
        """How many layers it has in all."""
        return sum(map(self.program.size, self.outermost))

    @cached_property
    def outermost(self) -> tuple[str, ...]:
        """The dims of its outermost repeats; branches cut a plan's dim into several."""
        return tuple(stmt.dim for stmt in self.program.region.body if isinstance(stmt, Region))

    def _plan_dim(self, dim: str) -> str:
        """The dim of the model: a part that branches cut off has the span of the whole dim,
        which comes first.
        """
        span = self.program.dim(dim).span
        return next(other.name for other in self.program.dims if other.span == span)

    @cached_property
    def experts(self) -> int:
        """How many experts a route has at least; 0 without routes."""
        return min(map(self.program.size, self.program.choices), default=0)

    @cached_property
    def heads(self) -> tuple[tuple[str, str], ...]:
        """The dims of query heads and of key/value heads of its kinds of attention."""
        pairs = dict[tuple[str, str], None]()
        for op in self.program.ops:
            op_roles = roles(op, self.program.types)
            if op_roles.key_seq and op_roles.heads:
                pairs[op_roles.heads, op_roles.kv_heads] = None
        return tuple(pairs)

    @cached_property
    def tensor_dims(self) -> tuple[str, ...]:
        """The dims that tensor parallelism splits: a vocabulary, heads, inner dims of MLPs; no
        two of one parameter.
        """
        dims_by_param = [param.type.dims[param.stacked :] for param in self.program.params]
        classes = [roles(op, self.program.types).classes for op in self.program.ops]
        heads = [dim for pair in self.heads for dim in pair]
        apart = {*DATA_DIMS, *self._width, *self.program.choices}
        candidates = [*classes, *heads]
        for dims in dims_by_param:
            candidates += [dim for dim in dims if dim not in apart]
        tensor_dims = list[str]()
        for dim in filter(None, dict.fromkeys(candidates)):
            # the other dims of each parameter that has this one
            others = [{*dims} - {dim} for dims in dims_by_param if dim in dims]
            is_split = dim in heads or dim in classes or self._is_inner(others)
            if others and is_split and not any(dims & {*tensor_dims} for dims in others):
                tensor_dims.append(dim)
        return tuple(tensor_dims)

    def _is_inner(self, others: Sequence[set[str]]) -> bool:
        """Whether a dim is an MLP's inner one, by the other dims of its parameters: two matrices at
        least, into it and out of it, and no dims but the width.
        """
        matrices = [dims for dims in others if dims & self._width]
        return len(matrices) > 1 and all(dims <= self._width for dims in others)

    @cached_property
    def _width(self) -> set[str]:
        """The dims of the values that layers hand on, except dims of data."""
        dims = set[str]()
        for stmt in self.program.region.body:
            if isinstance(stmt, Region):
                for result in stmt.results:
                    dims.update(result.type.dims)
        return dims - {*DATA_DIMS}

    @cached_property
    def selective(self) -> tuple[str, ...]:
        """The ops that backward recomputes in little time."""
        return tuple(cheap(self.program))
