"""The lines of `build` and of a step's microbatches that shard state by FSDP2, and the
optimizer's groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

from attrs import frozen

from ...config.settings import ParamGroup
from ...ir import PRECISIONS, Bucket, Param, Program
from ..naming import DTYPES, WIDTH, call, literal
from ..target import mesh_axes


@frozen
class ShardedModules:
    """Modules whose parameters FSDP2 shards alike: the layers of a repeat, or the model itself."""

    buckets: tuple[Bucket, ...]
    repeats: tuple[str, ...]

    @property
    def expression(self) -> str:
        """The expression for the modules."""
        if not self.repeats:
            return "[model]"
        if len(self.repeats) == 1:
            return f"model.{self.repeats[0]}"
        outer, inner = self.repeats
        return f"[each for outer in model.{outer} for each in outer.{inner}]"


def find_sharded_modules(program: Program, patterns: Mapping[str, str]) -> list[ShardedModules]:
    """The modules that FSDP2 shards, the model last."""
    buckets_by_repeats: dict[tuple[str, ...], list[Bucket]] = {}
    for bucket in program.buckets:
        repeats = tuple(patterns[bucket.params[0]].split(".*.")[: len(bucket.layers)])
        buckets_by_repeats.setdefault(repeats, []).append(bucket)
    sharded: list[ShardedModules] = []
    for repeats, buckets in buckets_by_repeats.items():
        if program.degree(buckets[0].shard_axes) > 1:
            sharded.append(ShardedModules(tuple(buckets), repeats))
    return sorted(sharded, key=lambda modules: -len(modules.repeats))


# ---- build


def sharding_lines(program: Program, patterns: Mapping[str, str]) -> Iterator[str]:
    """The lines that shard modules."""
    for modules in find_sharded_modules(program, patterns):
        policy = _precision_policy(program, modules.buckets[0])
        if policy:
            yield f"policy = {policy}"
        yield from _gathered_along(program, modules)
        arguments = [*_sharding_arguments(program, modules.buckets)]
        if policy:
            arguments.append("mp_policy=policy")
        expression = "stages" if program.pipeline else modules.expression
        yield f"for module in {expression}:"
        for line in call("fully_shard", arguments, 0, after=4).split("\n"):
            yield f"    {line}"
        yield "    sum_gradients(module)"


def _sharding_arguments(program: Program, buckets: Sequence[Bucket]) -> Iterator[str]:
    """The arguments of `fully_shard` for modules with the parameters of some buckets."""
    first, axes = buckets[0], mesh_axes(program)
    yield "module"
    if program.pipeline:
        yield "mesh=inner"
        yield "reshard_after_forward=False"  # a schedule says when
    else:
        yield "mesh=mesh"
        yield f"reshard_after_forward={first.reshard_after_forward}"
    sharding = [axis for axis in first.shard_axes if axis in axes]
    replicating: list[str] = []
    for axis in first.reduce_axes:
        if axis in axes and all(axis in bucket.reduce_axes for bucket in buckets):
            replicating.append(axis)
    dims = [f"shard={_axes(sharding)}"]
    if replicating:
        dims.append(f"replicate={_axes(replicating)}")
    yield f"dp_mesh_dims=DataParallelMeshDims({', '.join(dims)})"


def _axes(axes: Sequence[str]) -> str:
    return literal(axes[0] if len(axes) == 1 else tuple(axes))


def _precision_policy(program: Program, bucket: Bucket) -> str:
    """The policy of modules that compute or sum in another dtype than they store; "" for others."""
    compute, stored = PRECISIONS[program.train.precision], program.params[0].type.dtype
    reduce = program.reduce_dtype(bucket)
    if compute == reduce == stored:
        return ""
    arguments = [f"param_dtype={DTYPES[compute]}", f"reduce_dtype={DTYPES[reduce]}"]
    return f"MixedPrecisionPolicy({', '.join(arguments)}, cast_forward_inputs=False)"


def _gathered_along(program: Program, modules: ShardedModules) -> list[str]:
    """The comment that names parameters of the modules that are not in their buckets."""
    if not modules.repeats:
        return []
    names: list[str] = []
    for param in program.params_and_buffers:
        if _is_elsewhere(param, modules.buckets):
            names.append(param.name)
    if not names:
        return []
    comment = (
        f"{', '.join(names)} too, which the plan gathers by themselves: fully_shard takes all of"
        " a module"
    )
    return [f"# {line}" for line in wrap(comment, WIDTH - 6)]


def _is_elsewhere(param: Param, buckets: Sequence[Bucket]) -> bool:
    """Whether a parameter of the buckets' layers is in none of the buckets."""
    if param.type.dims[: param.stacked] != buckets[0].layers:
        return False
    return not any(param.name in bucket.params for bucket in buckets)


def optimizer_lines(program: Program, patterns: Mapping[str, str]) -> Iterator[str]:
    """The lines that make the optimizer: of all parameters where they have the same settings,
    else of groups.
    """
    settings = program.train.optimizer
    groups = settings.params_by_group(param.name for param in program.params)
    first, *others = groups
    has_groups = bool(others) or first.lr_scale != 1
    if has_groups:
        yield "groups = ["
        for group, names in groups.items():
            for line in f"{_group(group, names, patterns)},".split("\n"):
                yield f"    {line}"
        yield "]"
    arguments = ["groups" if has_groups else "model.parameters()", f"lr={literal(settings.lr)}"]
    if settings.kind == "adamw":
        kind = "AdamW"
        arguments += [f"betas={literal(tuple(settings.betas))}", f"eps={literal(settings.eps)}"]
    else:
        kind = "SGD"
        arguments.append(f"momentum={literal(settings.momentum)}")
    if not has_groups:
        arguments.append(f"weight_decay={literal(first.weight_decay)}")
    yield from call(f"optimizer = torch.optim.{kind}", arguments, 0, after=4).split("\n")


def _group(group: ParamGroup, names: Sequence[str], patterns: Mapping[str, str]) -> str:
    words = [literal(patterns[name]) for name in names]
    arguments = ["model", *words, f"weight_decay={literal(group.weight_decay)}"]
    if group.lr_scale != 1:
        arguments.append(f"lr_scale={literal(group.lr_scale)}")
    return call("param_group", arguments, 0, after=9)


# ---- the microbatches of a step


def sync_lines(program: Program, patterns: Mapping[str, str]) -> Iterator[str]:
    """The lines that say of each microbatch whether it reduces gradients, and frees what was
    gathered.
    """
    for modules in find_sharded_modules(program, patterns):
        first = modules.buckets[0]
        reduce_now = _when(first.shard_gradients)
        free = _when(first.reshard_after_forward)
        arguments = [modules.expression, f"reduce_now={reduce_now}", f"free={free}"]
        yield call("each_module", arguments, 8)


def _when(is_always: bool) -> str:
    """The condition of what each microbatch does, or the last one alone."""
    return "True" if is_always else "number == len(batch)"
