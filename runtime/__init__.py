"""What an emitted program stands on: mesh, coercions, ops, parameters, state, data, loop.

Modules in reading order: mesh, traced, collectives, counters, dropout, functional, linears; parameters, optimizers,
boxes, layout, working, gradient, flat, flows, buckets, state; samples, data, schedule, weights, allocator, plan,
identity; deferred, messages, cells, pipeline; disk, untrusted, payload, index, saved, together, checkpoint; export,
asked, launch, compiling, ending, log, loop.

Non-goals: nothing here knows plans' text, the IR or the compiler.
"""

from .autograd.recompute import recompute, recomputed
from .checkpoint.hf_weights import HuggingFace, Stored
from .comm.collectives import (
    all_gather,
    all_gather_,
    all_gather_invariant,
    all_reduce,
    all_reduce_,
    all_to_all,
    invariant,
    once,
    once_replicated,
    pad_shard,
    reduce_scatter,
    reduce_scatter_,
    regather,
    replicate,
    shard,
    take_shard,
)
from .comm.mesh import Axis, Mesh
from .comm.p2p import Carried
from .config.lr_schedule import Constant, Cosine
from .config.plan import Account, Metrics, Plan
from .data.loader import Batch, Input, Loader, Text, Tokens
from .errors import RunError
from .ops.delayed_wgrad import split_embedding, split_linear
from .ops.dropout import dropout, fork
from .ops.functional import (
    attention,
    clip_scale,
    concat,
    count_valid,
    cross_entropy,
    embedding,
    exp,
    layer_norm,
    max_logit,
    mean,
    mean_square,
    rms_norm,
    rms_scaled,
    rope,
    rope_table,
    sigmoid,
    softcap,
    softmax_parts,
    split,
    sum_squares,
    tanh,
    token_loss,
)
from .ops.fused_linear import linears
from .pipeline.executor import Pipeline
from .pipeline.stage_buckets import reduce_each
from .state.buckets import Bucket
from .state.engine import State
from .state.flat_param import Flat
from .state.loop_hooks import Flats, await_weights, free_weights, gather_each, gather_weights, reduce_gradients
from .state.optimizers import SGD, AdamW, Group
from .state.parameters import normal, ones, weight, zeros
from .train.compile import compile_each
from .train.loop import train

__all__ = [
    "SGD",
    "Account",
    "AdamW",
    "Axis",
    "Batch",
    "Bucket",
    "Carried",
    "Constant",
    "Cosine",
    "Flat",
    "Flats",
    "Group",
    "HuggingFace",
    "Input",
    "Loader",
    "Mesh",
    "Metrics",
    "Pipeline",
    "Plan",
    "RunError",
    "State",
    "Stored",
    "Text",
    "Tokens",
    "all_gather",
    "all_gather_",
    "all_gather_invariant",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "attention",
    "await_weights",
    "clip_scale",
    "compile_each",
    "concat",
    "count_valid",
    "cross_entropy",
    "dropout",
    "embedding",
    "exp",
    "fork",
    "free_weights",
    "gather_each",
    "gather_weights",
    "invariant",
    "layer_norm",
    "linears",
    "max_logit",
    "mean",
    "mean_square",
    "normal",
    "once",
    "once_replicated",
    "ones",
    "pad_shard",
    "recompute",
    "recomputed",
    "reduce_each",
    "reduce_gradients",
    "reduce_scatter",
    "reduce_scatter_",
    "regather",
    "replicate",
    "rms_norm",
    "rms_scaled",
    "rope",
    "rope_table",
    "shard",
    "sigmoid",
    "softcap",
    "softmax_parts",
    "split",
    "split_embedding",
    "split_linear",
    "sum_squares",
    "take_shard",
    "tanh",
    "token_loss",
    "train",
    "weight",
    "zeros",
]
