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
    sent, moves = program.reduce_dtype(bucket), bucket.per_layer or bool(program.pipeline)
    stages = program.pipeline.axis if program.pipeline else ""
    among = program.pipeline.ranks_of(bucket.params[0]) if program.pipeline else ()
    options = {
        "per_layer=True": bucket.per_layer,
        f"shard_axes={literal(shards)}": bool(shards),
        f"reduce_axes={literal(bucket.reduce_axes)}": moves and bool(bucket.reduce_axes),
        f"reduce_dtype={DTYPES[sent]}": moves and sent != bucket.type.dtype,
        "shard_gradients=True": bucket.shard_gradients,
        "reshard_after_forward=True": bucket.reshard_after_forward,
        f"stages={literal(stages)}": bool(stages),
        f"among={literal(among)}": len(among) > 1,
        f"prefetch={prefetch}": bucket.per_layer
        and bucket.reshard_after_forward
        and prefetch != Flow().prefetch,
    }
    return [option for option, said in options.items() if said]


def _groups(program: Program, bucket: Bucket, patterns: Mapping[str, str]) -> list[str]:
    """A bucket's parameters by the optimizer settings that they share."""
    groups = program.train.optimizer.grouped(bucket.params)
    together = {name: names for names in products(program) for name in names}
    found = {
        group: dict.fromkeys(together.get(name, (name,)) for name in names)
        for group, names in groups.items()
    }
    return [
        _group(group, [[patterns[name] for name in names] for names in each])
        for group, each in found.items()
    ]


def _group(group: ParamGroup, patterns: Sequence[Sequence[str]]) -> str:
    """A pattern for each parameter, and a tuple of patterns for those of one product."""
    arguments = [literal(tuple(several) if several[1:] else several[0]) for several in patterns]
    arguments.append(f"weight_decay={literal(group.weight_decay)}")
    if group.lr_scale != 1:
        arguments.append(f"lr_scale={literal(group.lr_scale)}")
    return call("ParamGroup", arguments, 12)


def optimizer(program: Program) -> str:
    """The optimizer as a call."""
    settings = program.train.optimizer
    if settings.kind == "adamw":
        tile = f", tile=TILES[{literal(name)}]" if (name := optimizer_kernel(program)) else ""
        return f"AdamW(betas={literal(tuple(settings.betas))}, eps={literal(settings.eps)}{tile})"
    return f"SGD(momentum={literal(settings.momentum)})"


def compute(program: Program) -> str:
    """The element type of activations."""
    return PRECISIONS[program.train.precision]


def state(program: Program) -> str:
    """The state as a call: with the element types of the working copy and of the masters."""
    stored = program.params[0].type.dtype
    arguments = ["model", "mesh", "buckets", "optimizer"]
    arguments += [f"dtype={DTYPES[compute(program)]}", f"master={DTYPES[stored]}"]
    arguments += ["accumulate=Accumulate()"] if accumulates(program) else []
    arguments += ["stages_of_param=stages_of_param"] if program.pipeline else []
    return call("TrainState", arguments, indent=4, after=len("return model, ") + 1)
