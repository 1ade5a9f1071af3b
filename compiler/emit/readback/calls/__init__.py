"""The functions that an emitted `forward` may call: elementwise ones by their entries, others by a reader each.

Purpose: the table of readers, in the families of `ops`.  Non-goals: expressions around the calls (`expressions`).
"""

from ....ir import Program
from ....ir.placements import COERCIONS
from ....ops import OPS
from ....ops.fused import GATES
from ....ops.pointwise import FUNCTIONS
from ...imports import SPLIT
from ..expressions import Reader, ViewReader
from . import algebra, attention, dropout, embedding, fused, head, join, loss, norm, reduce, user, views
from .coercions import coerced, coercion
from .pointwise import elementwise

CALLS: dict[str, Reader] = {
    "add_layer_norm": fused.add_norm("add_layernorm", 3, 4),
    "add_rms_norm": fused.add_norm("add_rmsnorm", 3),
    "attention": attention.attention,
    "concat": join.concat,
    "cross_entropy": loss.cross_entropy,
    "dropout": dropout.dropout,
    "embedding": embedding.embedding,
    "fork": dropout.fork,
    "layer_norm": norm.norm("layernorm", 2, 3),
    "linear": algebra.linear,
    "linear_cross_entropy": head.linear_cross_entropy,
    "linear_softmax_stats": head.linear_softmax_stats,
    "fused_linear": fused.fused_linear,
    "logit_softmax_stats": head.logit_softmax_stats,
    "max_logit": loss.max_logit,
    "mean": reduce.mean("mean"),
    "mean_square": reduce.mean("mean_square"),
    "rescale_to_global_max": head.rescale_to_global_max,
    "rms_norm": norm.norm("rmsnorm", 2),
    "rms_scaled": norm.norm("rms_scaled", 3),
    "rope": attention.rope,
    "rope_pair": attention.rope_pair,
    "softmax": reduce.over("softmax"),
    "local_softmax_stats": loss.local_softmax_stats,
    "split": join.split,
    "token_loss": loss.token_loss,
    "torch.sum": reduce.over("sum"),
    **{entry.function: elementwise(entry) for entry in (*FUNCTIONS, *(OPS[gate] for gate in GATES.values()))},
    **{entry.function: coercion(entry.function) for entry in COERCIONS.values()},
}
"""Functions of torch and of the runtime."""

VIEWS: dict[str, ViewReader] = {
    "flatten": views.flatten,
    "unflatten": views.unflatten,
    "unsqueeze": views.unsqueeze,
}
"""Methods of tensors."""


def readers(program: Program) -> dict[str, Reader]:
    """The functions that `program` may call: the table's, and the plan's own as `module.function`."""
    calls = CALLS | user.readers(program)
    if program.pipeline and program.pipeline.splits:
        return {SPLIT.get(name, name): reader for name, reader in calls.items()}
    return calls


__all__ = ["CALLS", "VIEWS", "coerced", "readers"]
