"""The functions around the model of a program of torch alone, as the IR asks for them: a row for
each in `FUNCTIONS`.

Purpose: what a program does there must be what these do; names and lines may be others.
Non-goals: the model (`module`), and what functions of `torch_ops.py` do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import frozen

from ....config.settings import ParamGroup
from ....ir import BATCH, PRECISIONS, SEQUENCE, Bucket, Op, Pipeline, Program, Type, Value, base
from ....ir.placements import dual_type
from ....ir.stages import crossing as crossing_of
from ...naming import DTYPES
from ...readback.calls import placement_text
from ...target import mesh_axes, zigzag_ranks


@frozen
class Plan:
    """A program, the name patterns of its parameters in the model's state, and the class of its
    model.
    """

    program: Program
    paths: Mapping[str, str]
    model: str

    @property
    def type(self) -> str:
        """The type of what runs the model."""
        return "Pipeline" if self.program.pipeline else "nn.Module"

    def parameters_of_step(self, more: str = "") -> str:
        """The arguments of a step, with `more` before the batch."""
        batch = "Mapping[str, Tensor]" if self.program.pipeline else "Sequence[tuple[Tensor, ...]]"
        return f"model: {self.type}{more}, batch: {batch}"

    @property
    def inputs(self) -> list[str]:
        """The names of the model's inputs."""
        return [base(arg.value.name) for arg in self.program.microbatches.args]

    @property
    def batch(self) -> str:
        """The names of the inputs of a microbatch."""
        return ", ".join(self.inputs)


# ---- the functions


def _build(plan: Plan) -> Iterator[str]:
    program, pipeline = plan.program, plan.program.pipeline
    yield f"def build(mesh: DeviceMesh) -> tuple[{plan.type}, torch.optim.Optimizer]:"
    master = DTYPES[program.params[0].type.dtype]
    to = "" if master == "torch.float32" else f".to({master})"
    if pipeline:
        yield f"    inner = mesh[{(*mesh_axes(program),)!r}]"
        yield f"    each = enumerate({pipeline.stage_to_rank!r})"
        yield (
            "    own = [stage for stage, rank in each if rank =="
            f" mesh.get_local_rank({pipeline.axis!r})]"
        )
        module = f"stage_module(partial({plan.model}, inner), stage){to}"
        yield f"    stages = [{module} for stage in own]"
        for name, stages in pipeline.param_stages:
            if len(stages) > len(pipeline.ranks_of(name)):
                yield f"    share(stages, {plan.paths[name]!r})"
    else:
        yield f"    model = {plan.model}(mesh){to}"
    for repeats, buckets in _sharded(plan):
        modules = "stages" if pipeline else _modules(repeats)
        yield f"    for module in {modules}:"
        mesh = "inner" if pipeline else "mesh"
        yield f"        fully_shard(module, mesh={mesh}, {', '.join(_sharding(program, buckets))})"
        yield "        sum_gradients(module)"
    if pipeline:
        yield from _pipeline(plan, pipeline)
    settings = program.train.optimizer
    groups = settings.params_by_group(param.name for param in program.params)
    params = f"[{', '.join(_group(plan, *group) for group in groups.items())}]"
    if [param_group.lr_scale for param_group in groups] == [1]:
        params = f"model.parameters(), weight_decay={next(iter(groups)).weight_decay!r}"
    kind = f"AdamW({params}, betas={tuple(settings.betas)!r}, eps={settings.eps!r}"
    kind = kind if settings.kind == "adamw" else f"SGD({params}, momentum={settings.momentum!r}"
    yield f"    optimizer = torch.optim.{kind}, lr={settings.lr!r})"
    if _ops(program, "loss_scale"):
        yield "    start_loss_scale(optimizer)"
    yield "    return model, optimizer"


def _pipeline(plan: Plan, pipeline: Pipeline) -> Iterator[str]:
    """The stages of torch's pipelining, and what runs them."""
    axis, count = repr(pipeline.axis), len(pipeline.stage_to_rank)
    stage = f"pipeline_stage(module, stage, {count}, mesh, {axis}, partial(crossing, inner))"
    split = {
        base(arg.value.name): arg.value.type.dims.index(BATCH)
        for arg in plan.program.microbatches.args
    }
    ranks = {plan.paths[name]: pipeline.ranks_of(name) for name, _ in pipeline.param_stages}
    shared = {name: ranks_of_param for name, ranks_of_param in ranks.items() if ranks_of_param[1:]}
    rows = "Path(__file__).with_name('schedule.csv')"
    yield f"    parts = [{stage} for module, stage in zip(stages, own, strict=True)]"
    arguments = f"mesh, {axis}, parts, {rows}, {plan.program.size('microbatches')}"
    yield f"    model = Pipeline({arguments}, split={split!r}, shared={shared!r})"


def crossing(program: Program, pipeline: Pipeline) -> list[str]:
    """The values that each stage but the last hands on, with their gradients, as examples."""
    return [
        f"[{', '.join(_example(value, program) for value in values)}]"
        for values in crossing_of(program, pipeline)
    ]


CROSSING = "def crossing(mesh: DeviceMesh, stage: int) -> list[tuple[Tensor, Tensor | None]]: ..."
"""The header of a pipeline's function of examples."""


def _example(value: Value, program: Program) -> str:
    type, shape = value.type, tuple((dim,) for dim in value.type.dims)
    sizes = ", ".join(str(program.size(dim)) for dim in type.dims)

    def over(value_type: Type) -> str:
        placements = (
            placement_text(value_type.placement_on(axis), shape) for axis in mesh_axes(program)
        )
        return f"[{', '.join(placements)}]"

    gradient = f", gradient={over(dual_type(type))}" if type.differentiable else ""
    return f"example(mesh, {sizes}, dtype={DTYPES[type.dtype]}, placements={over(type)}{gradient})"


def _microbatches(plan: Plan) -> Iterator[str]:
    parameters = ", ".join(f"{name}: Tensor" for name in plan.inputs)
    axes = mesh_axes(plan.program)
    staged = plan.program.pipeline is not None
    mesh = "mesh"
    if staged:
        mesh = f"mesh[{(*axes,)!r}]"
    returned = "dict[str, Tensor]" if staged else "list[tuple[Tensor, ...]]"
    yield f"def microbatches(mesh: DeviceMesh, {parameters}) -> {returned}:"
    ranks, parts = zigzag_ranks(plan.program), list[str]()
    for arg in plan.program.microbatches.args:
        type = arg.value.type
        shape = tuple((dim,) for dim in type.dims)
        over = ", ".join(placement_text(type.placement_on(axis), shape) for axis in axes)
        how = f"seq_first={type.dims[0] == SEQUENCE}"
        if ranks > 1:
            how += f", zigzag={ranks}"
        name, count = base(arg.value.name), plan.program.size("microbatches")
        part = f"by_microbatch({mesh}, {name}, {count}, [{over}], {how})"
        if staged:
            part = f"{name!r}: all_microbatches({part}, dim={type.dims.index(BATCH)})"
        parts.append(part)
    if staged:
        yield f"    return {{{', '.join(parts)}}}"
    else:
        yield f"    return list(zip({', '.join(parts)}, strict=True))"


def _train_step(plan: Plan) -> Iterator[str]:
    scaled = bool(_ops(plan.program, "loss_scale"))
    parameters = plan.parameters_of_step(", optimizer: torch.optim.Optimizer")
    yield f"def train_step({parameters}, lr: float) -> Metrics:"
    yield from ["    scale = loss_scale(optimizer)"] * scaled
    yield from (
        _schedule_lines(True, scaled) if plan.program.pipeline else _each_microbatch(plan, scaled)
    )
    reduced, norm = (
        ("model.gradients", "model.") if plan.program.pipeline else ("reduced_gradients", "")
    )
    arguments = [*([] if plan.program.pipeline else ["model"]), *_reduction_dtypes(plan.program)]
    yield f"    gradients = {reduced}({', '.join(arguments)})"
    if scaled:
        yield "    for gradient in gradients:"
        yield "        gradient.div_(scale)"
    yield f"    norm = {norm}total_norm(gradients)"
    if scaled:
        yield "    if num_tokens and loss.isfinite():"
        yield "        adapt_loss_scale(optimizer, norm)"
    yield "    if num_tokens and loss.isfinite() and norm.isfinite():"
    for scale in _ops(plan.program, "clip_scale"):
        if limit := scale.get("max"):
            yield "        for gradient in gradients:"
            yield f"            gradient.mul_(min(1.0, {limit!r} / (norm.item() + 1e-6)))"
    yield "        update(optimizer, lr)"
    yield "    optimizer.zero_grad()"
    yield "    return Metrics(loss, norm, num_tokens)"


def _schedule_lines(trains: bool, scaled: bool = False) -> Iterator[str]:
    """The lines that run a schedule: all microbatches."""
    by, back = (" / scale", " / scale") if scaled else ("", "")
    yield "    num_tokens = count_valid([batch['labels']])"
    yield f"    loss = model.run(batch, num_tokens{by}, backward={trains}){back}"


def _each_microbatch(plan: Plan, scaled: bool) -> Iterator[str]:
    """The lines that run forward and backward of each microbatch."""
    yield f"    num_tokens = count_valid([labels for {plan.batch} in batch])"
    yield "    losses: list[Tensor] = []"
    sync = [*_each_module(plan)]
    loop_head = (
        f"number, ({plan.batch}) in enumerate(batch, start=1)" if sync else f"{plan.batch} in batch"
    )
    yield f"    for {loop_head}:"
    yield from (f"        {line}" for line in sync)
    yield f"        loss_sum = model({plan.batch})"
    yield f"        (loss_sum / max(num_tokens, 1){' * scale' * scaled}).backward()"
    yield "        losses.append(loss_sum.detach())"
    yield "    loss = whole_sum(losses) / max(num_tokens, 1)"


def _reduction_dtypes(program: Program) -> list[str]:
    """The element type in which gradients are summed, where it is not their own."""
    pairs = {(program.reduce_dtype(bucket), bucket.type.dtype) for bucket in program.buckets}
    return sorted({DTYPES[sent] for sent, dtype in pairs if sent != dtype})


def _eval_step(plan: Plan) -> Iterator[str]:
    yield "@torch.no_grad()"
    yield f"def eval_step({plan.parameters_of_step()}) -> Metrics:"
    if plan.program.pipeline:
        yield from _schedule_lines(False)
    else:
        yield f"    num_tokens = count_valid([labels for {plan.batch} in batch])"
        yield (
            f"    loss = whole_sum([model({plan.batch}) for {plan.batch} in batch]) /"
            " max(num_tokens, 1)"
        )
    yield "    return Metrics(loss, torch.zeros_like(loss), num_tokens)"


def _learning_rate(plan: Plan) -> Iterator[str]:
    settings = plan.program.train.optimizer
    schedule, peak = settings.schedule, settings.lr
    yield "def learning_rate(step: int, steps: int) -> float:"
    if schedule.warmup:
        yield f"    if step < {schedule.warmup}:"
        yield f"        return {peak!r} * (step + 1) / {schedule.warmup}"
    if schedule.kind == "constant":
        yield f"    return {peak!r}"
        return
    floor = min(schedule.floor, peak)
    progress = f"(step - {schedule.warmup}) / max(1, steps - 1 - {schedule.warmup})"
    cosine = f"0.5 * (1 + math.cos(math.pi * ({progress})))"
    yield f"    return {floor!r} + ({peak!r} - {floor!r}) * {cosine}"


FUNCTIONS: dict[str, Callable[[Plan], Iterator[str]]] = {
    "build": _build,
    "microbatches": _microbatches,
    "train_step": _train_step,
    "eval_step": _eval_step,
    "learning_rate": _learning_rate,
}
"""The text of each function that a program has for its plan, by its name."""

MAIN = '''
def main() -> None:
    """Trains on random windows of a file's bytes; `torchrun … train.py FILE [STEPS]`."""
    mesh = start_run(MESH)
    torch.manual_seed(SEED)
    model, optimizer = build(mesh)
    tokens = read_bytes(sys.argv[1])
    steps = int(sys.argv[2]) if sys.argv[2:] else STEPS
    for step in range(steps):
        rows = random_windows(tokens, GLOBAL_BATCH, SEQ + 1)
        batch = microbatches(mesh, rows[:, :-1], rows[:, 1:])
        metrics = train_step(model, optimizer, batch, learning_rate(step, steps))
        if dist.get_rank() == 0:
            print(f"step {step}  loss {metrics.loss:.4f}  norm {metrics.norm:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
"""The run of a program that trains on the bytes of a file: its function, and what calls it."""

IN_STEP = {
    "count_valid": "count_valid",
    "one": "backward of a loss",
    "reciprocal": "the loss divided by its labels",
    "mul": "the same",
    "coerce": "whole_sum, reduced_gradients, FSDP2",
    "unpack": "parameters are no parts of flat buffers",
    "pack": "the same",
    "cast": "reduce_dtype",
    "sum_squares": "total_norm",
    "loss_scale": "loss_scale",
    "unscaled": "div_ of gradients",
    "unscaled_norm": "the same, before total_norm",
    "grad_norm": "total_norm",
    "clip_scale": "mul_ of gradients",
    "if_finite": "the choice before the update",
    "update": "update",
}
"""The ops of a step besides its microbatches, and what does them in these functions."""


def demand_known(program: Program) -> None:
    """Raises where a step has an op that nothing above does."""
    others = sorted({op.kind for op in _ops(program)} - IN_STEP.keys())
    assert not others, f"emit: nothing in a step of torch alone does {', '.join(others)}"


# ---- what they are made of


def _ops(program: Program, kind: str = "") -> list[Op]:
    """The ops of the step besides its microbatches, all of them or all of a kind."""
    ops = (stmt for stmt in program.region.body if isinstance(stmt, Op))
    return [op for op in ops if kind in ("", op.kind)]


Sharded = tuple[tuple[str, ...], list[Bucket]]
"""The repeats of modules that FSDP2 shards, and the buckets of their parameters."""


def _sharded(plan: Plan) -> list[Sharded]:
    """The innermost modules first."""
    buckets_by_repeats: dict[tuple[str, ...], list[Bucket]] = {}
    for bucket in plan.program.buckets:
        *repeats, _ = plan.paths[bucket.params[0]].split(".*.")
        buckets_by_repeats.setdefault(tuple(repeats[: len(bucket.layers)]), []).append(bucket)
    split_modules = {
        repeats: buckets
        for repeats, buckets in buckets_by_repeats.items()
        if plan.program.degree(buckets[0].shard_axes) > 1
    }
    return sorted(split_modules.items(), key=lambda entry: -len(entry[0]))


def _modules(repeats: Sequence[str]) -> str:
    match repeats:
        case ():
            return "[model]"
        case (only,):
            return f"model.{only}"
        case (outer, inner):
            return f"[each for outer in model.{outer} for each in outer.{inner}]"
        case _:
            raise AssertionError(f"emit: repeats {len(repeats)} deep")


def _sharding(program: Program, buckets: Sequence[Bucket]) -> Iterator[str]:
    """The options of `fully_shard` for the parameters of some buckets."""
    first, axes = buckets[0], mesh_axes(program)
    summed = [
        axis
        for axis in first.reduce_axes
        if axis in axes and all(axis in bucket.reduce_axes for bucket in buckets)
    ]
    dims = {"shard": [axis for axis in first.shard_axes if axis in axes], "replicate": summed}
    options = list[str]()
    for key, names in dims.items():
        if len(names) == 1:
            options.append(f"{key}={names[0]!r}")
        elif names:
            options.append(f"{key}={tuple(names)}")
    yield f"reshard_after_forward={first.reshard_after_forward and not program.pipeline}"
    yield f"dp_mesh_dims=DataParallelMeshDims({', '.join(options)})"
    compute, (stored,) = (
        PRECISIONS[program.train.precision],
        {param.type.dtype for param in program.params},
    )
    if compute != stored or program.reduce_dtype(first) != stored:
        dtypes = (
            f"param_dtype={DTYPES[compute]}, reduce_dtype={DTYPES[program.reduce_dtype(first)]}"
        )
        yield f"mp_policy=MixedPrecisionPolicy({dtypes}, cast_forward_inputs=False)"


def _each_module(plan: Plan) -> Iterator[str]:
    """The lines that tell modules, for each microbatch, whether to reduce gradients, and to free
    parameters.
    """
    last = "number == len(batch)"
    for repeats, (first, *_) in _sharded(plan):
        now, free = (
            True if is_always else last
            for is_always in (first.shard_gradients, first.reshard_after_forward)
        )
        yield f"each_module({_modules(repeats)}, reduce_now={now}, free={free})"


def _group(plan: Plan, group: ParamGroup, names: Sequence[str]) -> str:
    scale = "" if group.lr_scale == 1 else f", lr_scale={group.lr_scale!r}"
    patterns = ", ".join(repr(plan.paths[name]) for name in names)
    return f"param_group(model, {patterns}, weight_decay={group.weight_decay!r}{scale})"
