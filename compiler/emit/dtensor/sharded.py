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
class Sharded:
    """Modules whose parameters FSDP2 shards alike: the layers of a repeat, or the model itself."""

    buckets: tuple[Bucket, ...]
    repeats: tuple[str, ...]

    @property
    def modules(self) -> str:
        """The expression for the modules."""
        if not self.repeats:
            return "[model]"
        if len(self.repeats) == 1:
            return f"model.{self.repeats[0]}"
        return f"[each for outer in model.{self.repeats[0]} for each in outer.{self.repeats[1]}]"


def sharded(program: Program, patterns: Mapping[str, str]) -> list[Sharded]:
    """The modules that FSDP2 shards, the model last."""
    buckets_by_modules: dict[tuple[str, ...], list[Bucket]] = {}
    for bucket in program.buckets:
        parts = tuple(patterns[bucket.params[0]].split(".*.")[: len(bucket.layers)])
        buckets_by_modules.setdefault(parts, []).append(bucket)
    ordered = sorted(buckets_by_modules.items(), key=lambda item: -len(item[0]))
    return [
        Sharded(tuple(buckets), parts)
        for parts, buckets in ordered
        if program.degree(buckets[0].shard_axes) > 1
    ]


def sharding_lines(program: Program, patterns: Mapping[str, str]) -> list[str]:
    """The lines that shard modules."""
    return [
        line for modules in sharded(program, patterns) for line in _fully_shard(modules, program)
    ]


def optimizer_lines(program: Program, patterns: Mapping[str, str]) -> list[str]:
    """The lines that make the optimizer: of all parameters where they have the same settings,
    else of groups.
    """
    settings = program.train.optimizer
    groups = settings.params_by_group(param.name for param in program.params)
    first, *others = groups
    lines, params, decay = (
        list[str](),
        "model.parameters()",
        [f"weight_decay={literal(first.weight_decay)}"],
    )
    if others or first.lr_scale != 1:
        calls = [_group(group, names, patterns) for group, names in groups.items()]
        lines = [
            "groups = [",
            *(f"    {line}" for group in calls for line in f"{group},".split("\n")),
            "]",
        ]
        params, decay = "groups", []
    if settings.kind == "adamw":
        kind, options = (
            "AdamW",
            [f"betas={literal(tuple(settings.betas))}", f"eps={literal(settings.eps)}"],
        )
    else:
        kind, options = "SGD", [f"momentum={literal(settings.momentum)}"]
    arguments = [params, f"lr={literal(settings.lr)}", *options, *decay]
    return [*lines, *call(f"optimizer = torch.optim.{kind}", arguments, 0, after=4).split("\n")]


def _fully_shard(modules: Sharded, program: Program) -> Iterator[str]:
    first, axes = modules.buckets[0], mesh_axes(program)
    common = [
        axis
        for axis in first.reduce_axes
        if all(axis in bucket.reduce_axes for bucket in modules.buckets)
    ]
    replicated, over = (
        [axis for axis in names_of_axes if axis in axes]
        for names_of_axes in (common, first.shard_axes)
    )
    dims = [f"shard={_axes(over)}", *([f"replicate={_axes(replicated)}"] if replicated else [])]
    mesh, free = ("inner", False) if program.pipeline else ("mesh", first.reshard_after_forward)
    arguments = ["module", f"mesh={mesh}", f"reshard_after_forward={free}"]
    arguments.append(f"dp_mesh_dims=DataParallelMeshDims({', '.join(dims)})")
    compute, stored = PRECISIONS[program.train.precision], program.params[0].type.dtype
    if {compute, program.reduce_dtype(first)} != {stored}:
        dtypes = (
            f"param_dtype={DTYPES[compute]}, reduce_dtype={DTYPES[program.reduce_dtype(first)]}"
        )
        yield f"policy = MixedPrecisionPolicy({dtypes}, cast_forward_inputs=False)"
        arguments.append("mp_policy=policy")
    if params_elsewhere := [
        name
        for name in program.params_and_buffers
        if modules.repeats and _elsewhere(program, name, modules)
    ]:
        words = ", ".join(param.name for param in params_elsewhere)
        comment = (
            f"{words} too, which the plan gathers by themselves: fully_shard takes all of a module"
        )
        yield from (f"# {line}" for line in wrap(comment, WIDTH - 6))
    all_modules = "stages" if program.pipeline else modules.modules
    yield f"for module in {all_modules}:"
    yield from (f"    {line}" for line in call("fully_shard", arguments, 0, after=4).split("\n"))
    yield "    sum_gradients(module)"


def _elsewhere(program: Program, param: Param, modules: Sharded) -> bool:
    """Whether a parameter of these layers is in a bucket that is not theirs."""
    layers = modules.buckets[0].layers
    return param.type.dims[: param.stacked] == layers and not any(
        param.name in bucket.params for bucket in modules.buckets
    )


def _axes(axes: Sequence[str]) -> str:
    return literal(axes[0] if len(axes) == 1 else tuple(axes))


def sync_lines(program: Program, patterns: Mapping[str, str]) -> Iterator[str]:
    """The lines that say of each microbatch whether it reduces gradients, and frees what was
    gathered.
    """
    for modules in sharded(program, patterns):
        first = modules.buckets[0]
        now = "True" if first.shard_gradients else "number == len(batch)"
        free = "True" if first.reshard_after_forward else "number == len(batch)"
        yield call("each_module", [modules.modules, f"reduce_now={now}", f"free={free}"], 8)


def _group(group: ParamGroup, names: Sequence[str], patterns: Mapping[str, str]) -> str:
    arguments = [
        "model",
        *(literal(patterns[name]) for name in names),
        f"weight_decay={literal(group.weight_decay)}",
    ]
    arguments += [f"lr_scale={literal(group.lr_scale)}"] if group.lr_scale != 1 else []
    return call("param_group", arguments, 0, after=9)
