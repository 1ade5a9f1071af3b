"""Attention's backward kernels: both recompute the weights from q, k and the log-sum-exp, without atomics."""
# pyright: basic

from torch import Tensor

from .. import launching
from .delta import delta
from .keys import keys_kernel
from .layouts import sizes, strides, unit
from .queries import queries_kernel
from .setting import Saved, Setting
from .tiles import Blocks


def backward(
    saved: Saved, g_out: Tensor, g_lse: Tensor | None, how: Setting, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each as it is shaped, in its dtype."""
    q, k, v, q_ids, k_ids, out, lse = saved
    q, k, v, g_out = (unit(each) for each in (q, k, v, g_out))
    batch, queries, heads = sizes(q, how.seq)
    _, keys, kv_heads = sizes(k, how.seq)
    g_q, g_k, g_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    given = (q, k, v, q_ids, k_ids, g_out, lse, delta(out, g_out, g_lse, how.seq))
    lie = (*how.operand_strides(q, k, v, q_ids, k_ids), *strides(g_out, how.seq))
    rest = (heads, queries, keys, how.shift, how.scale)
    constants = how.constants(q, k, q_ids)
    grid = (batch * kv_heads * launching.blocks(keys, blocks.keys.keys),)
    args = (*given, g_k, g_v, *lie, *strides(g_k, how.seq), *rest)
    launching.launch(keys_kernel, grid, *args, **constants, **blocks.keys.options())
    grid = (batch * heads * launching.blocks(queries, blocks.queries.queries),)
    args = (*given, g_q, *lie, *strides(g_q, how.seq), *rest)
    launching.launch(queries_kernel, grid, *args, **constants, **blocks.queries.options())
    return g_q, g_k, g_v
