"""What an emitted `forward` may call.  A new op's name stands here, and its reader in its family's module.

Purpose: the table of readers, in the families of `ops`.  Non-goals: expressions around the calls (`expressions`).
"""

from ....ir import Program
from ....ir.placements import COERCIONS
from ..expressions import Reader, ViewReader
from . import algebra, attention, dropout, embedding, fused, head, join, loss, norm, pointwise, reduce, user, views
from .coercions import coerced, coercion

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
    **{name: pointwise.function(name) for name in ("exp", "relu", "sigmoid", "silu", "tanh")},
    "gelu": pointwise.function("gelu", "approximate"),
    "gelu_mul": fused.gate("gelu_mul", "approximate"),
    "silu_mul": fused.gate("silu_mul"),
    "softcap": pointwise.function("softcap", "cap"),
    "softmax": reduce.over("softmax"),
    "local_softmax_stats": loss.local_softmax_stats,
    "split": join.split,
    "token_loss": loss.token_loss,
    "torch.sum": reduce.over("sum"),
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


SPLIT = {name: f"split_{name}" for name in ("embedding", "linear")}
"""Functions by what a program calls in their stead whose schedule sets weight gradients apart."""


__all__ = ["CALLS", "SPLIT", "VIEWS", "coerced", "readers"]
