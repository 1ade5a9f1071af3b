"""torch's own flash attention, forward and backward apart, with the log-sum-exp that merges
results.

For calls on all keys, and for causal calls whose query i is at key i; k and v may have fewer heads
than q.  Where v has another last dim than q and k, the narrower are padded with zeros.  On CUDA
results and gradients of a call are in q's dtype.  On the CPU they are in float32 at least, which is
also faster there than bfloat16.
"""

from typing import Any, cast

import torch
from torch import Tensor

from .plain_attention import Saved, Setting, pad_last_dim, wide

_ATEN: Any = cast(Any, torch.ops).aten
_CUDA: Any = torch.backends.cuda

OPERATORS = {
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "cuda": "_scaled_dot_product_flash_attention",
}
"""By device; backward's operator has `_backward` after the name.

They are private: a test knows their signatures.
"""


def takes(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, how: Setting) -> bool:
    """Whether torch has a kernel for a call."""
    name = OPERATORS.get(q.device.type)
    if (
        not name
        or not hasattr(_ATEN, f"{name}_backward")
        or documents is not None
        or how.cap
        or how.back >= 0
    ):
        return False
    causal = how.forth == 0
    if how.forth > 0 or (causal and (how.shift or q.shape[how.seq] != k.shape[how.seq])):
        return False
    if not q.is_cuda:
        return True
    width = _width(q, v)
    operands = (_by_head(operand, how, width) for operand in (q, k, v))
    params = _CUDA.SDPAParams(*operands, None, 0.0, causal, q.shape[2] != k.shape[2])
    return width % 8 == 0 and _CUDA.can_use_flash_attention(params)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ids: None,
    k_ids: None,
    how: Setting,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `plain_attention.forward`."""
    operator = getattr(_ATEN, OPERATORS[_kind(q)])
    operands = (_by_head(operand, how, _width(q, v)) for operand in (q, k, v))
    out, lse, *_ = operator(*operands, 0.0, how.forth == 0, scale=how.scale)
    return out[..., : v.shape[-1]].movedim(-2, how.seq).to(dtype or q.dtype), lse


def backward(
    saved: Saved, g_out: Tensor, how: Setting, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `plain_attention.backward`.  The saved result and log-sum-exp may be of more keys than
    these k and v.
    """
    q, k, v, _, _, out, lse = saved
    operator = getattr(_ATEN, f"{OPERATORS[_kind(q)]}_backward")
    operands = (*(_by_head(operand, how, _width(q, v)) for operand in (g_out, q, k, v, out)), lse)
    causal = how.forth == 0
    if _kind(q) == "cpu":
        gradients = operator(*operands, 0.0, causal, scale=how.scale)
    else:
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the random state of dropout
        sizes = (None, None, q.shape[how.seq], k.shape[how.seq])  # those of sequences of one size
        gradients = operator(*operands, *sizes, 0.0, causal, unused, unused, scale=how.scale)
    unpadded = (g[..., : x.shape[-1]] for g, x in zip(gradients, (q, k, v), strict=True))
    g_q, g_k, g_v = (g.movedim(-2, how.seq).to(dtype or q.dtype) for g in unpadded)
    return g_q, g_k, g_v


def _kind(q: Tensor) -> str:
    """A tensor on the meta device counts as one on a GPU."""
    return "cpu" if q.device.type == "cpu" else "cuda"


def _width(q: Tensor, v: Tensor) -> int:
    """The last dim that a kernel is given."""
    return max(q.shape[-1], v.shape[-1])


def _by_head(x: Tensor, how: Setting, width: int) -> Tensor:
    """[b, n, s, width] with neighbours in memory along the last, which kernels take for
    granted; a view if it can.
    """
    if _kind(x) == "cpu":
        x = x.to(wide(x.dtype))
    x = pad_last_dim(x, width)
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x.movedim(how.seq, -2)
