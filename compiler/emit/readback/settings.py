"""Reads `build` and `PLAN`: buckets, optimizer, element types, and the settings of the run.

Non-goals: classes and steps.
"""

import ast
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import cast

from ...analysis.bucket_layout import shard_axes
from ...analysis.kernel_tiles import accumulates, optimizer_tile
from ...analysis.memory import account, accounts
from ...analysis.param_uses import products
from ...config.settings import ON
from ...ir import Bucket, Op, Program, Type, base, walk
from ...ops.chunked_logits import class_dims
from .ast_matching import DTYPES, Names, demand, demand_same, keywords, literal, statements, targets, wrong
from .values import blocks


def model_class(build: ast.FunctionDef) -> str:
    """The class of the model, which `build` makes first."""
    match statements(build)[0]:
        case ast.Assign(value=ast.Call(func=ast.Name(id=name))):
            return name
        case ast.Assign(value=ast.Call(func=ast.Attribute(attr="build"), args=[ast.Name(id=name), _])):
            return name
        case other:
            raise wrong(other, "`build` does not begin with the model")


def check_build(
    build: ast.FunctionDef,
    program: Program,
    innermost: Sequence[str],
    paths: dict[str, str],
    dtype: str,
    names: frozenset[str],
) -> None:
    """`build` puts every parameter, by its name pattern in `paths`, into its bucket and its group of settings.

    `innermost` are the classes without repeats inside, which torch.compile may be given; `dtype` is that in which the
    model computes.
    """
    local, body = Names.of(build, names), statements(build)
    if program.train.compile == ON:
        local.demand(build, "compile_each")
        demand_same(body.pop(1), f"compile_each({_targets(body[0])[0]}, {', '.join(innermost)})")
    demand(build, len(body) == 4, "`build` is not model, buckets, optimizer and state")
    (model, *holders), (buckets,), (optimizer,) = (_targets(stmt) for stmt in body[:3])
    demand(build, len({model, *holders, buckets, optimizer, "mesh"}) == 4 + len(holders), "uses a name twice")
    made = _optimizer(program)
    for name in (model_class(build), "Bucket", "ParamGroup", "TrainState", "torch", made.partition("(")[0]):
        local.demand(build, name)
    made_of = f"PIPELINE.build({model_class(build)}, mesh)" if program.pipeline else f"{model_class(build)}(mesh)"
    demand_same(body[0], f"{', '.join([model, *holders])} = {made_of}")
    demand(build, len(holders) == bool(program.pipeline), "asks for stages that have parameters, or not")
    _check_buckets(body[1], program, paths)
    demand_same(body[2], f"{optimizer} = {made}")
    (master,) = {p.type.dtype for p in program.params}
    given = [f"dtype={DTYPES[dtype]}, master={DTYPES[master]}"]
    given += ["accumulate=Accumulate()"] if accumulates(program) else []
    kept = ", ".join([*given, *(f"stages_of_param={name}" for name in holders)])
    demand_same(body[-1], f"return {model}, TrainState({model}, mesh, {buckets}, {optimizer}, {kept})")


def _targets(stmt: ast.stmt) -> list[str]:
    if not isinstance(stmt, ast.Assign):
        raise wrong(stmt, f"`build` does `{ast.unparse(stmt)}`")
    return targets(stmt.targets[0])


def _optimizer(program: Program) -> str:
    settings = program.train.optimizer
    if settings.kind == "adamw":
        tile = f", tile={made}" if (made := optimizer_tile(program)) else ""
        return f"AdamW(betas={tuple(settings.betas)!r}, eps={settings.eps!r}{tile})"
    return f"SGD(momentum={settings.momentum!r})"


def _check_buckets(stmt: ast.stmt, program: Program, paths: dict[str, str]) -> None:
    """A bucket's groups hold its parameters, each once and with its settings."""
    if not (isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Dict)):
        raise wrong(stmt, "the buckets are no dict")
    names = [literal(key) if key else None for key in stmt.value.keys]
    demand(stmt, sorted(map(str, names)) == sorted(b.name for b in program.buckets), f"the buckets are {names}")
    for name, node in zip(names, stmt.value.values, strict=True):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "Bucket"):
            raise wrong(node, "is no bucket")
        bucket = program.bucket(str(name))
        groups = [_group(group) for group in node.args]
        found = [(pattern, settings) for several, settings in groups for pattern in chain(*several)]
        wanted = [(paths.get(param, ""), _settings(param, program)) for param in bucket.params]
        demand(node, sorted(found) == sorted(wanted), f"bucket {name} is {sorted(found)}, not {sorted(wanted)}")
        together = sorted(patterns for several, _ in groups for patterns in several if len(patterns) > 1)
        demand(node, together == _together(bucket, program, paths), f"bucket {name} lays {together} side by side")
        kept = _kept(bucket, program)
        for option, value in keywords(node, *kept).items():
            demand_same(value, repr(kept[option]))


def _together(bucket: Bucket, program: Program, paths: dict[str, str]) -> list[tuple[str, ...]]:
    """The patterns of each product with several weights of the bucket, in the product's order."""
    return sorted(tuple(paths[name] for name in names) for names in products(program) if names[0] in bucket.params)


def _kept(bucket: Bucket, program: Program) -> dict[str, object]:
    """What a bucket must say of how it is kept: whatever is not so by itself."""
    _, forward, backward = blocks(program)
    reshards = any(_is(op, "unpack", bucket) for op in walk(forward.body)) or _frees(program, bucket)
    kept: dict[str, object] = {"reshard_after_forward": True} if reshards else {}
    kept |= {"shard_gradients": True} if any(_is(op, "pack", bucket) for op in walk(backward.body)) else {}
    kept |= {"shard_axes": axes} if (axes := shard_axes(program, bucket)) else {}
    kept |= {"per_layer": True} if bucket.turns else {}
    if pipeline := program.pipeline:
        among = pipeline.ranks_of(bucket.params[0])
        kept |= {"stages": pipeline.axis} | ({"among": among} if len(among) > 1 else {})
    ahead = program.flow.prefetch
    return kept | ({"prefetch": ahead} if ahead != 1 and bucket.turns and reshards else {})


def _frees(program: Program, bucket: Bucket) -> bool:
    """Whether stages free the bucket's parameters when they end: where ranks are to share these out too."""
    parameters = program.state_of(bucket.params[0]).parameters
    return program.pipeline is not None and bool({*parameters} & {*shard_axes(program, bucket)})


def _is(op: Op, kind: str, bucket: Bucket) -> bool:
    return op.kind == kind and op.get("bucket") == bucket.name


Settings = tuple[float, float]
"""Weight decay, and the factor on the learning rate."""


def _group(node: ast.expr) -> tuple[list[tuple[str, ...]], Settings]:
    """The patterns of a group, those that lie side by side together, and its settings."""
    if not isinstance(node, ast.Call):
        raise wrong(node, "is no group")
    said = [literal(pattern) for pattern in node.args]
    options = {str(keyword.arg): literal(keyword.value) for keyword in node.keywords}
    demand_same(node, f"ParamGroup({', '.join([*map(repr, said), *(f'{k}={v!r}' for k, v in options.items())])})")
    demand(node, bool(said) and set(options) <= {"weight_decay", "lr_scale"}, f"sets {sorted(options)}")
    settings = float(str(options["weight_decay"])), float(str(options.get("lr_scale", 1.0)))
    patterns = [cast(tuple[object, ...], each) if isinstance(each, tuple) else (each,) for each in said]
    return [tuple(map(str, several)) for several in patterns], settings


def _settings(param: str, program: Program) -> Settings:
    """The settings of the first group of the plan that names the parameter, else the optimizer's own."""
    optimizer = program.train.optimizer
    for group in optimizer.groups:
        if any(fnmatchcase(param, pattern) for pattern in group.params):
            return group.weight_decay, group.lr_scale
    return optimizer.weight_decay, 1.0


def check_plan(
    node: ast.expr, program: Program, types: dict[str, Type], stored: dict[str, str], names: frozenset[str]
) -> None:
    """`PLAN` says what the program says; `stored` is what it says of files of weights.

    The model's hash is not read: of the model before any placement a program does not tell.
    """
    if not isinstance(node, ast.Call):
        raise wrong(node, "the plan is no call")
    demand(node, ast.unparse(node.func) == "Plan" and not node.args, "is no plan")
    expected = _plan(program, types) | stored
    said = {keyword.arg: keyword.value for keyword in node.keywords}
    if isinstance(known := said.get("model"), ast.Constant) and isinstance(known.value, str):
        expected["model"] = repr(known.value)
    given = keywords(node, "name", *expected)
    name = given.pop("name")
    demand(name, isinstance(name, ast.Constant) and isinstance(name.value, str), "is no name")  # of the plan's file
    for key, value in given.items():
        demand_same(value, expected[key])
    used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    demand(node, used <= names, f"does not import {sorted(used - names)}")


def _plan(program: Program, types: dict[str, Type]) -> dict[str, str]:
    """Each setting of the plan as Python writes it."""
    train, schedule = program.train, program.train.optimizer.schedule
    floor = f", floor={schedule.floor!r}" if schedule.kind == "cosine" else ""
    numbers = {"seq": train.seq, "global_batch": train.global_batch, "steps": train.steps, "seed": train.seed}
    return {
        "mesh": repr({axis.name: axis.size for axis in program.axes}),
        "data": _data(program),
        "inputs": _inputs(program),
        "vocab": repr(_vocabulary(program, types)),
        "microbatches": repr(program.size("microbatches")),
        "lr": repr(train.optimizer.lr),
        "schedule": f"{schedule.kind.capitalize()}(warmup={schedule.warmup}{floor})",
        **{name: repr(number) for name, number in numbers.items()},
        **({"nodes": repr(program.cluster.nodes)} if program.cluster.nodes > 1 else {}),
        "account": _account(program),
    }


def _account(program: Program) -> str:
    """Of all ranks along a pipeline's axis; without one, of one that stands for all."""
    found = accounts(program) if program.pipeline else [account(program)]
    options = f", reserve={found[0].reserve}" if found[0].reserve else ""
    options += f", axis={program.pipeline.axis!r}" if program.pipeline else ""
    return f"Account({found[0].device!r}, {tuple(it.total for it in found)!r}{options})"


def _data(program: Program) -> str:
    data = program.train.data
    dtype = f", dtype=torch.{data.dtype}" if data.kind == "tokens" else ""
    options = f", separator={data.separator_id}" if data.separator is not None else ""
    options += f", masked={data.masked!r}, mask_token={data.mask_id}" if data.masked is not None else ""
    return f"{data.kind.capitalize()}({tuple(data.files)!r}, holdout={data.holdout!r}{options}{dtype})"


def _inputs(program: Program) -> str:
    """Each input's dims as they lie in memory, and the axes over which each is split."""
    found: dict[str, str] = {}
    for arg in blocks(program)[0].args:
        type = arg.value.type
        split = {dim: type.axes_of(dim) for dim in type.dims if type.axes_of(dim)}
        found[base(arg.value.name)] = f"Input({type.dims!r}, {split!r})"
    return f"{{{', '.join(f'{name!r}: {text}' for name, text in found.items())}}}"


def _vocabulary(program: Program, types: dict[str, Type]) -> int:
    """The smallest of the tables that are looked up in and of the numbers of classes: above all ids."""
    ops = [*walk(blocks(program)[1].body)]
    dims = [types[op.inputs[1]].dims[0] for op in ops if op.kind == "embedding"]
    dims += [dim for op in ops for dim in class_dims(op, [types[name] for name in op.inputs])]
    return min(program.valid(dim) for dim in dims)
