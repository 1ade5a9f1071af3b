"""The lines of `build`: buckets and how they are sharded and reduced, the optimizer, element types.

Non-goals: how buckets move in a step (`step`, `loop_hooks`).
"""

from collections.abc import Mapping, Sequence

from ..analysis.kernel_tiles import accumulates, optimizer_kernel
from ..analysis.param_uses import products
from ..config.settings import Flow, ParamGroup
from ..ir import PRECISIONS, Bucket, Program
from .naming import DTYPES, call, literal


def bucket_entries(program: Program, patterns: Mapping[str, str]) -> list[str]:
    """Each bucket's entry; `patterns` are the parameters' names in the model's state."""
    return [_entry(program, bucket, patterns) for bucket in program.buckets]


def _entry(program: Program, bucket: Bucket, patterns: Mapping[str, str]) -> str:
    arguments = [*_groups(program, bucket, patterns), *_options(program, bucket)]
    return call(f"{literal(bucket.name)}: Bucket", arguments, 8)


def _options(program: Program, bucket: Bucket) -> list[str]:
    """The options of a bucket that differ from the runtime's defaults."""
    shards, prefetch = bucket.shard_axes, program.flow.prefetch
    reduce_dtype = program.reduce_dtype(bucket)
    moves = bucket.per_layer or bool(program.pipeline)
    stages, among = "", ()
    if program.pipeline:
        stages = program.pipeline.axis
        among = program.pipeline.ranks_of(bucket.params[0])
    options = {
        "per_layer=True": bucket.per_layer,
        f"shard_axes={literal(shards)}": bool(shards),
        f"reduce_axes={literal(bucket.reduce_axes)}": moves and bool(bucket.reduce_axes),
        f"reduce_dtype={DTYPES[reduce_dtype]}": moves and reduce_dtype != bucket.type.dtype,
        "shard_gradients=True": bucket.shard_gradients,
        "reshard_after_forward=True": bucket.reshard_after_forward,
        f"stages={literal(stages)}": bool(stages),
        f"among={literal(among)}": len(among) > 1,
        f"prefetch={prefetch}": bucket.per_layer
        and bucket.reshard_after_forward
        and prefetch != Flow().prefetch,
    }
    return [option for option, is_set in options.items() if is_set]


def _groups(program: Program, bucket: Bucket, patterns: Mapping[str, str]) -> list[str]:
    """A bucket's parameters by the optimizer settings that they share."""
    product_of_weight = dict[str, tuple[str, ...]]()
    for weights in products(program):
        product_of_weight |= dict.fromkeys(weights, weights)
    groups = list[str]()
    for group, params in program.train.optimizer.params_by_group(bucket.params).items():
        # a product of several weights is one entry, at its first weight
        entries = dict.fromkeys(product_of_weight.get(param, (param,)) for param in params)
        pattern_lists = list[list[str]]()
        for weights in entries:
            pattern_lists.append([patterns[weight] for weight in weights])
        groups.append(_group(group, pattern_lists))
    return groups


def _group(group: ParamGroup, patterns: Sequence[Sequence[str]]) -> str:
    """A pattern for each parameter, and a tuple of patterns for the weights of one product."""
    arguments = list[str]()
    for of_product in patterns:
        is_single = len(of_product) == 1
        arguments.append(literal(of_product[0]) if is_single else literal(tuple(of_product)))
    arguments.append(f"weight_decay={literal(group.weight_decay)}")
    if group.lr_scale != 1:
        arguments.append(f"lr_scale={literal(group.lr_scale)}")
    return call("ParamGroup", arguments, 12)


def optimizer(program: Program) -> str:
    """The optimizer as a call."""
    settings = program.train.optimizer
    if settings.kind != "adamw":
        return f"SGD(momentum={literal(settings.momentum)})"
    kernel = optimizer_kernel(program)
    tile = f", tile=TILES[{literal(kernel)}]" if kernel else ""
    return f"AdamW(betas={literal(tuple(settings.betas))}, eps={literal(settings.eps)}{tile})"


def compute(program: Program) -> str:
    """The element type of activations."""
    return PRECISIONS[program.train.precision]


def state(program: Program) -> str:
    """The state as a call, with the element types of the working copy and the masters."""
    master_dtype = program.params[0].type.dtype
    arguments = ["model", "mesh", "buckets", "optimizer"]
    arguments += [f"dtype={DTYPES[compute(program)]}", f"master={DTYPES[master_dtype]}"]
    if accumulates(program):
        arguments.append("accumulate=Accumulate()")
    if program.pipeline:
        arguments.append("stages_of_param=stages_of_param")
    return call("TrainState", arguments, indent=4, after=len("return model, ") + 1)
