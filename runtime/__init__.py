"""What an emitted program stands on: mesh, coercions, ops, parameters, state, data, loop.

Modules in reading order: mesh, traced, collectives, counters, dropout, functional, linears; parameters, optimizers,
boxes, layout, working, gradient, flat, flows, buckets, state; samples, data, schedule, weights, allocator, plan,
identity; deferred, messages, cells, pipeline; disk, untrusted, payload, index, saved, together, checkpoint; export,
asked, launch, compiling, ending, log, loop.

Non-goals: nothing here knows plans' text, the IR or the compiler.
"""

from .again import recompute, recomputed
from .allocator import Account
from .buckets import Bucket
from .chunks import reduce_each
from .collectives import (
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
from .compiling import compile_each
from .data import Batch, Input, Loader, Text, Tokens
from .deferred import split_embedding, split_linear
from .dropout import dropout, fork
from .errors import RunError
from .flat import Flat
from .flows import Flats, await_weights, free_weights, gather_each, gather_weights, reduce_gradients
from .functional import (
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
from .linears import linears
from .loop import train
from .mesh import Axis, Mesh
from .messages import Carried
from .optimizers import SGD, AdamW, Group
from .parameters import normal, ones, weight, zeros
from .pipeline import Pipeline
from .plan import Metrics, Plan
from .schedule import Constant, Cosine
from .state import State
from .weights import HuggingFace, Stored

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
