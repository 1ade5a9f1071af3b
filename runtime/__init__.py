"""The runtime of emitted programs: mesh, coercions, ops, parameters, state, data, loop.

Folders in reading order: comm, ops, autograd, state, pipeline, kernels, data, checkpoint, config,
train, debug.

Non-goals: nothing here knows plans' text, the IR or the compiler.
"""

from .autograd.recompute import recompute, recomputed
from .checkpoint.hf_weights import HFNames, HFWeight
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
from .comm.exchange import exchange, exchange_back, wait
from .comm.experts import Experts, exchange_counts, sort_by_expert
from .comm.mesh import Axis, Mesh
from .comm.p2p import StageInput
from .comm.positions import Positions, position_ids
from .config.plan import (
    Account,
    Constant,
    Cosine,
    Expected,
    Metrics,
    Plan,
    Prediction,
    SmallerMesh,
    Watch,
)
from .data.corpus import DataSet, Folder, Text, Tokens
from .data.loader import Batch, Input, Loader
from .errors import RunError
from .ops.attention import attention, rope, rope_frequencies
from .ops.delayed_wgrad import split_embedding, split_linear
from .ops.dropout import dropout, fork
from .ops.functional import (
    clip_scale,
    concat,
    count_valid,
    embedding,
    exp,
    layer_norm,
    mean,
    mean_square,
    rms_norm,
    rms_scaled,
    sigmoid,
    softcap,
    split,
    sum_squares,
    tanh,
)
from .ops.fused_linear import fused_linear
from .ops.grouped_linear import grouped_bias, grouped_linear
from .ops.ring_attention import ring_attention
from .ops.routed_rows import combine, dispatch
from .ops.routing import (
    add_choices,
    add_load,
    aux_loss,
    balance,
    limit_capacity,
    no_choices,
    no_load,
    no_loss,
    no_scores,
    router_z,
    sum_scores,
    top_k,
)
from .ops.token_losses import cross_entropy, local_softmax_stats, max_logit, token_loss
from .pipeline.executor import Pipeline
from .state.buckets import Bucket
from .state.engine import TrainState
from .state.flat_param_group import (
    FlatParamGroup,
    FlatParams,
    reduce_grads_in_backward,
    reshard,
    unshard,
    unshard_ahead,
)
from .state.optimizers import SGD, AdamW, ParamGroup
from .state.parameters import normal, ones, weight, zeros
from .train.companion_files import read_hf_names, read_predictions, read_schedule
from .train.compile import compile_each
from .train.loop import train

__all__ = [
    "SGD",
    "Account",
    "AdamW",
    "Axis",
    "Batch",
    "Bucket",
    "Constant",
    "Cosine",
    "DataSet",
    "Expected",
    "Experts",
    "FlatParamGroup",
    "FlatParams",
    "Folder",
    "HFNames",
    "HFWeight",
    "Input",
    "Loader",
    "Mesh",
    "Metrics",
    "ParamGroup",
    "Pipeline",
    "Plan",
    "Positions",
    "Prediction",
    "RunError",
    "SmallerMesh",
    "StageInput",
    "Text",
    "Tokens",
    "TrainState",
    "Watch",
    "add_choices",
    "add_load",
    "all_gather",
    "all_gather_",
    "all_gather_invariant",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "attention",
    "aux_loss",
    "balance",
    "clip_scale",
    "combine",
    "compile_each",
    "concat",
    "count_valid",
    "cross_entropy",
    "dispatch",
    "dropout",
    "embedding",
    "exchange",
    "exchange_back",
    "exchange_counts",
    "exp",
    "fork",
    "fused_linear",
    "grouped_bias",
    "grouped_linear",
    "invariant",
    "layer_norm",
    "limit_capacity",
    "local_softmax_stats",
    "max_logit",
    "mean",
    "mean_square",
    "no_choices",
    "no_load",
    "no_loss",
    "no_scores",
    "normal",
    "once",
    "once_replicated",
    "ones",
    "pad_shard",
    "position_ids",
    "read_hf_names",
    "read_predictions",
    "read_schedule",
    "recompute",
    "recomputed",
    "reduce_grads_in_backward",
    "reduce_scatter",
    "reduce_scatter_",
    "regather",
    "replicate",
    "reshard",
    "ring_attention",
    "rms_norm",
    "rms_scaled",
    "rope",
    "rope_frequencies",
    "router_z",
    "shard",
    "sigmoid",
    "softcap",
    "sort_by_expert",
    "split",
    "split_embedding",
    "split_linear",
    "sum_scores",
    "sum_squares",
    "take_shard",
    "tanh",
    "token_loss",
    "top_k",
    "train",
    "unshard",
    "unshard_ahead",
    "wait",
    "weight",
    "zeros",
]
