"""The calls of an emitted program in the terms of `spmd_types`: its own collectives, and rules
where it has none.

A joint coercion over several axes is one for each: what leaves a sharded dim innermost first, all
else outermost first.

Non-goals: values.  Under a fake process group nothing is communicated; only types and local shapes
are meant.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import spmd_types.checker
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from scalec import runtime
from scalec.runtime import Axis, Mesh, Positions

spmd = cast(Any, spmd_types)  # it exports nothing to type checkers
I, P, R, S, V, rules = spmd.I, spmd.P, spmd.R, spmd.S, spmd.V, spmd.rules  # noqa: E741

METHODS: dict[str, Callable[..., Tensor]] = {"zeros_like": torch.zeros_like}
"""Names that emitted programs do not call bare, and the tests do."""

# it calls some conjugates expert
CONVERT: Callable[..., Tensor] = partial(spmd.convert, expert_mode=True)

# ours → their function and the types from and to; S stands for S(dim), whose dims follow the axis
# in the call.
COERCIONS: dict[str, tuple[Callable[..., Tensor], Any, Any]] = {
    "replicate": (CONVERT, I, R),
    "all_reduce": (spmd.all_reduce, P, I),
    "all_gather": (spmd.all_gather, S, R),
    "reduce_scatter": (spmd.reduce_scatter, P, S),
    "all_to_all": (spmd.all_to_all, S, S),
    "all_gather_invariant": (spmd.all_gather, S, I),
    "shard": (CONVERT, I, S),
    "take_shard": (CONVERT, R, S),
    "pad_shard": (CONVERT, S, P),
    "once": (CONVERT, I, P),
    "invariant": (CONVERT, R, I),
    "once_replicated": (CONVERT, R, P),
}


def coerced(name: str, x: Tensor, group: ProcessGroup, *dims: int) -> Tensor:
    """The coercion that we call `name` as theirs, over one axis."""
    function, source, target = COERCIONS[name]
    left = list(dims)
    ends = {
        key: S(left.pop(0)) if end is S else end for key, end in (("src", source), ("dst", target))
    }
    return function(x, group, **ends)


class Swap:
    """The values of an emitted program's names here, on one mesh; `loss` is the type of the sum
    of losses.
    """

    def __init__(self, mesh: Mesh, loss: dict[str, Any]) -> None:
        self._loss = loss
        with spmd.no_typecheck():
            self._groups = {
                name: mesh.axis(name).group for name, size in mesh.axes.items() if size > 1
            }

    def names(self, without: str = "") -> dict[str, Any]:
        """Each name and what it is bound to; one without a rule stays what it was."""
        return {
            **{name: partial(self._coerce, name) for name in COERCIONS},
            "all_reduce": self._all_reduce,
            "all_reduce_": self._all_reduce_,
            "regather": self._regather,
            **METHODS,
            **{name: getattr(self, f"_{name}") for name in RULED if name != without},
        }

    def _axes(self, axis: Axis) -> list[str]:
        return [name for name in self._groups if name in axis.name.split("*")]

    def _coerce(
        self, name: str, x: Tensor, axis: Axis, *args: int, zigzag: bool = False, **dims: int
    ) -> Tensor:
        """Their types do not say in which order a sharded dim lies, so that a zigzag is as any
        other shard.
        """
        axes = self._axes(axis)
        for one in reversed(axes) if COERCIONS[name][1] is S else axes:
            x = coerced(name, x, self._groups[one], *args, *dims.values())
        return x

    def _all_reduce(self, x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
        return self._coerce("all_reduce", x, axis) if op == "sum" else self._maximum(x, axis)

    def _maximum(self, x: Tensor, axis: Axis) -> Tensor:
        """V without a dim → R: all-reduce (max), for which they have no type."""
        spmd.assert_type(x, dict.fromkeys(self._axes(axis), V))
        with spmd.no_typecheck():
            out = x.clone()
        types = {
            **spmd.get_local_type(x),
            **{spmd.normalize_axis(name): R for name in self._axes(axis)},
        }
        return spmd.assert_type(out, types, partition_spec=spmd.get_partition_spec(x))

    def _all_reduce_(self, x: Tensor, axis: Axis) -> Tensor:
        for one in self._axes(axis):
            x = spmd.all_reduce(x, self._groups[one], src=P, dst=I, inplace=True)
        return x

    def _regather(
        self, x: Tensor, axis: Axis, dim: int, zigzag: bool = False
    ) -> nullcontext[Tensor]:
        # that backward gathers again changes no type
        return nullcontext(self._coerce("all_gather", x, axis, dim))

    # Rules, for what their checker does not follow by itself (RULED says why).

    def _zeros_like(self, like: Tensor) -> Tensor:
        with spmd.no_typecheck():
            zeros = torch.zeros_like(like)
        return spmd.assert_type(zeros, self._loss)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: str = "bshd",
        positions: Positions | None = None,
    ) -> Tensor:
        with spmd.no_typecheck():
            out = runtime.attention(q, k, v, layout, positions=positions)
        queries, keys = ("sbn_", "tbn_") if layout == "sbhd" else ("bsn_", "btn_")
        equation = f"{queries},{keys},{keys}->{queries}"
        if _heads(q) == _heads(k):
            rules.einsum(equation, q, k, v, out=out)
            return out
        # heads of q over more ranks than those of k: kinds alone, and the result lies as q does
        with spmd.local():
            types = rules.einsum(equation, q, k, v)
        return spmd.assert_type(
            out, spmd.get_local_type(types), partition_spec=spmd.get_partition_spec(q)
        )

    def _embedding(self, tokens: Tensor, table: Tensor, axis: Axis | None = None) -> Tensor:
        if axis is None:
            return runtime.embedding(tokens, table)
        with spmd.no_typecheck():
            out = runtime.embedding(tokens, table, axis)
        rules.einsum("...,vh->...h", _without_gradient(tokens, table), table, out=out)
        return out

    def _max_logit(
        self, logits: Tensor, axis: Axis | None = None, classes: int | None = None
    ) -> Tensor:
        """The maximum of parts is V without a dim, which no op but the all-reduce (max) may
        take.
        """
        with spmd.no_typecheck():
            out = runtime.max_logit(logits, axis, classes)
        spec = spmd.get_partition_spec(logits)
        assert spec is not None, "a maximum of parts of nothing"
        return spmd.assert_type(
            out, spmd.get_local_type(logits), partition_spec=spmd.PartitionSpec(*spec[:-1])
        )

    def _local_softmax_stats(
        self, logits: Tensor, m: Tensor, labels: Tensor, axis: Axis, classes: int | None = None
    ) -> tuple[Tensor, Tensor]:
        with spmd.no_typecheck():
            z, t = runtime.local_softmax_stats(logits, m, labels, axis, classes)
        parts = rules.einsum("...v,...,...->...", logits, m, _without_gradient(labels, logits))
        rules.output((z, t), (parts, parts))
        return z, t

    def _cross_entropy(self, logits: Tensor, labels: Tensor, classes: int | None = None) -> Tensor:
        if len(_shards(logits)) < 2:
            return runtime.cross_entropy(logits, labels, classes)
        with spmd.no_typecheck():
            out = runtime.cross_entropy(logits, labels, classes)
        rules.einsum("ab_,ab->", logits, _without_gradient(labels, logits), out=out)
        return out

    def _sum_squares(self, gradient: Tensor) -> Tensor:
        with spmd.no_typecheck():
            out = runtime.sum_squares(gradient)
        rules.einsum("f,f->", gradient, gradient, out=out)
        return out


def _heads(x: Tensor) -> Any:
    """The axes that shard the heads of queries or keys."""
    spec = spmd.get_partition_spec(x)
    return spec and spec[2]


def _shards(x: Tensor) -> list[Any]:
    """The sharded dims' axes."""
    return [entry for entry in spmd.get_partition_spec(x) or () if entry is not None]


def _without_gradient(x: Tensor, beside: Tensor) -> Any:
    """Integers, which have no gradient, typed R instead of I on the axes where `beside` is not
    I.
    """
    like: Any = x
    for axis, type in spmd.get_local_type(beside).items():
        if type is not I and spmd.get_local_type(x)[axis] is I:
            like = rules.convert(like, axis, src=I, dst=R)
    return like


RULED = {
    "zeros_like": (
        "zeros are P as well as R, which it does not know; the sum over microbatches begins"
        " with them"
    ),
    "attention": (
        "DTensor's propagation, which it uses, fails in scaled_dot_product_attention with a"
        " causal mask"
    ),
    "embedding": (
        "tokens are compared with this rank's part of the vocabulary: elementwise ops to it"
    ),
    "max_logit": "it knows partial sums, not maxima",
    "local_softmax_stats": (
        "it does not look into autograd functions; labels are compared with this rank's classes"
    ),
    "cross_entropy": (
        "it refuses to flatten two sharded dims into one, as cross entropy of all tokens does"
    ),
    "sum_squares": "DTensor's norm of a sharded tensor is no partial sum, though its square is",
}
"""The local functions that it does not follow by itself, and why; `Swap` has a rule for each."""
