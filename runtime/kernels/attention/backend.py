"""Chooses the attention implementation of a call."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import launching
from .tiles import Blocks


class Choice(NamedTuple):
    """torch: scalec.runtime.attention, and what torch has for it; triton: our kernels; plain: their twin."""

    backend: Literal["torch", "triton", "plain"]
    reason: str


def backend(
    op: object, blocks: Mapping[int, Blocks], q: Tensor, k: Tensor, v: Tensor, *, special: bool, drops: bool
) -> Choice:
    """torch's kernels where it has some, ours where it has none, plain torch where we have none either.

    special: a mask other than a causal one, or a soft cap; drops: dropout.  torch's flash and cuDNN attention know
    neither; on GPUs they are for bfloat16 and float16, and copy q, k and v unless head_dim is a multiple of 8.  torch
    decides which of them.  For float32 it has memory-efficient attention, where queries have as many heads as keys and
    rows are multiples of 16 bytes, and else holds all scores.
    """
    dim = q.shape[-1]
    if drops:
        return Choice("torch", "dropout has no kernel")
    if not special and not (q.is_cuda or q.is_meta):
        return Choice("torch", "flash attention for CPUs")
    if not special and q.dtype in (torch.bfloat16, torch.float16) and dim % 8 == 0 and dim <= 256:
        return Choice("torch", "flash or cuDNN attention")
    if not special and q.dtype == torch.float32 and dim % 4 == 0 and q.shape[2] == k.shape[2]:
        return Choice("torch", "memory-efficient attention")
    if launching.tile_for(op, blocks, dim, q, k, v) is None:
        if not special:
            return Choice("torch", "plain attention")
        return Choice("plain", "no kernel for this device, element type or head_dim")
    return Choice("triton", "torch has no kernel for this mask, cap, element type or head_dim")
