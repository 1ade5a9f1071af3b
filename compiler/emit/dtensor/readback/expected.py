"""The functions around the model of a program of torch alone, as the IR asks for them: a row for
each in `FUNCTIONS`.

Purpose: what a program does there must be what these do; names and lines may be others.
Non-goals: the model (`module`), and what functions of `torch_ops.py` do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import frozen

from ....config.settings import ParamGroup
from ....ir import (
    BATCH,
    PRECISIONS,
    SEQUENCE,
    Arg,
    Bucket,
    Op,
    Pipeline,
    Program,
    Type,
    Value,
    base,
)
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

    @property
    def batch_type(self) -> str:
        """The type of the batch that a step is given."""
        if self.program.pipeline:
            return "Mapping[str, Tensor]"
        return "Sequence[tuple[Tensor, ...]]"

    @property
    def inputs(self) -> list[str]:
        """The names of the model's inputs."""
        return [base(arg.value.name) for arg in self.program.microbatches.args]

    @property
    def batch(self) -> str:
        """The names of the inputs of a microbatch."""
        return ", ".join(self.inputs)

    @property
    def is_scaled(self) -> bool:
        """Whether losses are scaled."""
        return bool(_ops(self.program, "loss_scale"))


# ---- build


def _build(plan: Plan) -> Iterator[str]:
    program, pipeline = plan.program, plan.program.pipeline
    yield f"def build(mesh: DeviceMesh) -> tuple[{plan.type}, torch.optim.Optimizer]:"
    if pipeline:
        yield from _stages(plan, pipeline)
    else:
        yield f"    model = {plan.model}(mesh){_cast_of_masters(program)}"
    for repeats, buckets in _sharded(plan):
        yield f"    for module in {_modules(repeats, pipeline)}:"
        options = ", ".join(_sharding_options(program, buckets))
        yield f"        fully_shard(module, {options})"
        yield "        sum_gradients(module)"
    if pipeline:
        yield from _pipeline(plan, pipeline)
    yield f"    optimizer = {_optimizer(plan)}"
    if plan.is_scaled:
        yield "    start_loss_scale(optimizer)"
    yield "    return model, optimizer"


def _stages(plan: Plan, pipeline: Pipeline) -> Iterator[str]:
    """A rank's stages, as modules."""
    is_own = f"rank == mesh.get_local_rank({pipeline.axis!r})"
    yield f"    inner = mesh[{tuple(mesh_axes(plan.program))!r}]"
    yield f"    numbered = enumerate({pipeline.stage_to_rank!r})"
    yield f"    own = [stage for stage, rank in numbered if {is_own}]"
    module = f"stage_module(partial({plan.model}, inner), stage){_cast_of_masters(plan.program)}"
    yield f"    stages = [{module} for stage in own]"
    for name, stages in pipeline.param_stages:
        if len(stages) > len(pipeline.ranks_of(name)):
            yield f"    share(stages, {plan.paths[name]!r})"


def _cast_of_masters(program: Program) -> str:
    """The call that changes the dtype in which parameters are stored, if they are not float32."""
    dtype = DTYPES[program.params[0].type.dtype]
    return "" if dtype == "torch.float32" else f".to({dtype})"


def _pipeline(plan: Plan, pipeline: Pipeline) -> Iterator[str]:
    """The stages of torch's pipelining, and what runs them."""
    axis, count = repr(pipeline.axis), len(pipeline.stage_to_rank)
    stage = f"pipeline_stage(module, stage, {count}, mesh, {axis}, partial(crossing, inner))"
    yield f"    parts = [{stage} for module, stage in zip(stages, own, strict=True)]"
    split: dict[str, int] = {}
    for arg in plan.program.microbatches.args:
        split[base(arg.value.name)] = arg.value.type.dims.index(BATCH)
    shared: dict[str, tuple[int, ...]] = {}
    for name, _ in pipeline.param_stages:
        if len(pipeline.ranks_of(name)) > 1:
            shared[plan.paths[name]] = pipeline.ranks_of(name)
    rows = "Path(__file__).with_name('schedule.csv')"
    arguments = f"mesh, {axis}, parts, {rows}, {plan.program.size('microbatches')}"
    yield f"    model = Pipeline({arguments}, split={split!r}, shared={shared!r})"


Sharded = tuple[tuple[str, ...], list[Bucket]]
"""The repeats of modules that FSDP2 shards, and the buckets of their parameters."""


def _sharded(plan: Plan) -> list[Sharded]:
    """The innermost modules first."""
    buckets_by_repeats: dict[tuple[str, ...], list[Bucket]] = {}
    for bucket in plan.program.buckets:
        *repeats, _ = plan.paths[bucket.params[0]].split(".*.")
        buckets_by_repeats.setdefault(tuple(repeats[: len(bucket.layers)]), []).append(bucket)
    sharded: list[Sharded] = []
    for repeats, buckets in buckets_by_repeats.items():
        if plan.program.degree(buckets[0].shard_axes) > 1:
            sharded.append((repeats, buckets))
    return sorted(sharded, key=lambda entry: -len(entry[0]))


def _modules(repeats: Sequence[str], pipeline: Pipeline | None = None) -> str:
    if pipeline:
        return "stages"
    match repeats:
        case ():
            return "[model]"
        case (only,):
            return f"model.{only}"
        case (outer, inner):
            return f"[each for outer in model.{outer} for each in outer.{inner}]"
        case _:
            raise AssertionError(f"emit: repeats {len(repeats)} deep")


def _sharding_options(program: Program, buckets: Sequence[Bucket]) -> Iterator[str]:
    """The options of `fully_shard` for the parameters of some buckets."""
    first, axes = buckets[0], mesh_axes(program)
    yield "mesh=inner" if program.pipeline else "mesh=mesh"
    yield f"reshard_after_forward={first.reshard_after_forward and not program.pipeline}"
    sharding = [axis for axis in first.shard_axes if axis in axes]
    replicating: list[str] = []
    for axis in first.reduce_axes:
        if axis in axes and all(axis in bucket.reduce_axes for bucket in buckets):
            replicating.append(axis)
    dims: list[str] = []
    for key, names in (("shard", sharding), ("replicate", replicating)):
        if len(names) == 1:
            dims.append(f"{key}={names[0]!r}")
        elif names:
            dims.append(f"{key}={tuple(names)}")
    yield f"dp_mesh_dims=DataParallelMeshDims({', '.join(dims)})"
    compute, reduce = PRECISIONS[program.train.precision], program.reduce_dtype(first)
    (stored,) = {param.type.dtype for param in program.params}
    if compute != stored or reduce != stored:
        dtypes = f"param_dtype={DTYPES[compute]}, reduce_dtype={DTYPES[reduce]}"
        yield f"mp_policy=MixedPrecisionPolicy({dtypes}, cast_forward_inputs=False)"


def _optimizer(plan: Plan) -> str:
    """The call that makes the optimizer."""
    settings = plan.program.train.optimizer
    groups = settings.params_by_group(param.name for param in plan.program.params)
    params = f"[{', '.join(_group(plan, *group) for group in groups.items())}]"
    first = next(iter(groups))
    if len(groups) == 1 and first.lr_scale == 1:
        params = f"model.parameters(), weight_decay={first.weight_decay!r}"
    if settings.kind == "adamw":
        options = f"betas={tuple(settings.betas)!r}, eps={settings.eps!r}"
        return f"torch.optim.AdamW({params}, {options}, lr={settings.lr!r})"
    return f"torch.optim.SGD({params}, momentum={settings.momentum!r}, lr={settings.lr!r})"


def _group(plan: Plan, group: ParamGroup, names: Sequence[str]) -> str:
    patterns = ", ".join(repr(plan.paths[name]) for name in names)
    scale = "" if group.lr_scale == 1 else f", lr_scale={group.lr_scale!r}"
    return f"param_group(model, {patterns}, weight_decay={group.weight_decay!r}{scale})"


# ---- what crosses between stages


def crossing(program: Program, pipeline: Pipeline) -> list[str]:
    """The values that each stage but the last hands on, with their gradients, as examples."""
    texts: list[str] = []
    for values in crossing_of(program, pipeline):
        examples = [_example(value, program) for value in values]
        texts.append(f"[{', '.join(examples)}]")
    return texts


CROSSING = "def crossing(mesh: DeviceMesh, stage: int) -> list[tuple[Tensor, Tensor | None]]: ..."
"""The header of a pipeline's function of examples."""


def _example(value: Value, program: Program) -> str:
    type = value.type
    sizes = [str(program.size(dim)) for dim in type.dims]
    dtype = f"dtype={DTYPES[type.dtype]}"
    arguments = ["mesh", *sizes, dtype, f"placements={_placements(type, type, program)}"]
    if type.differentiable:
        arguments.append(f"gradient={_placements(dual_type(type), type, program)}")
    return f"example({', '.join(arguments)})"


def _placements(placed: Type, shaped: Type, program: Program) -> str:
    """The placements of a type, on the dims of another."""
    shape = tuple((dim,) for dim in shaped.dims)
    texts = [placement_text(placed.placement_on(axis), shape) for axis in mesh_axes(program)]
    return f"[{', '.join(texts)}]"


# ---- the functions of a step


def _microbatches(plan: Plan) -> Iterator[str]:
    program = plan.program
    parameters = ["mesh: DeviceMesh", *(f"{name}: Tensor" for name in plan.inputs)]
    returned = "dict[str, Tensor]" if program.pipeline else "list[tuple[Tensor, ...]]"
    yield f"def microbatches({', '.join(parameters)}) -> {returned}:"
    inputs = ", ".join(_input(arg, program) for arg in program.microbatches.args)
    if program.pipeline:
        yield f"    return {{{inputs}}}"
    else:
        yield f"    return list(zip({inputs}, strict=True))"


def _input(arg: Arg, program: Program) -> str:
    """A rank's part of an input of all microbatches: of a pipeline, with the input's name."""
    name, type = base(arg.value.name), arg.value.type
    mesh = f"mesh[{tuple(mesh_axes(program))!r}]" if program.pipeline else "mesh"
    arguments = [mesh, name, str(program.size("microbatches")), _placements(type, type, program)]
    arguments.append(f"seq_first={type.dims[0] == SEQUENCE}")
    if zigzag_ranks(program) > 1:
        arguments.append(f"zigzag={zigzag_ranks(program)}")
    parts = f"by_microbatch({', '.join(arguments)})"
    if program.pipeline:
        return f"{name!r}: all_microbatches({parts}, dim={type.dims.index(BATCH)})"
    return parts


def _train_step(plan: Plan) -> Iterator[str]:
    program = plan.program
    parameters = f"model: {plan.type}, optimizer: torch.optim.Optimizer, batch: {plan.batch_type}"
    yield f"def train_step({parameters}, lr: float) -> Metrics:"
    if plan.is_scaled:
        yield "    scale = loss_scale(optimizer)"
    if program.pipeline:
        yield from _schedule_lines(True, plan.is_scaled)
    else:
        yield from _each_microbatch(plan)
    yield from _gradients(plan)
    if plan.is_scaled:
        yield "    if num_tokens and loss.isfinite():"
        yield "        adapt_loss_scale(optimizer, norm)"
    yield "    if num_tokens and loss.isfinite() and norm.isfinite():"
    for scale in _ops(program, "clip_scale"):
        if limit := scale.get("max"):
            yield "        for gradient in gradients:"
            yield f"            gradient.mul_(min(1.0, {limit!r} / (norm.item() + 1e-6)))"
    yield "        update(optimizer, lr)"
    yield "    optimizer.zero_grad()"
    yield "    return Metrics(loss, norm, num_tokens)"


def _schedule_lines(trains: bool, is_scaled: bool = False) -> Iterator[str]:
    """The lines that run a schedule: all microbatches."""
    scale = " / scale" if is_scaled else ""
    yield "    num_tokens = count_valid([batch['labels']])"
    yield f"    loss = model.run(batch, num_tokens{scale}, backward={trains}){scale}"


def _each_microbatch(plan: Plan) -> Iterator[str]:
    """The lines that run forward and backward of each microbatch."""
    yield f"    num_tokens = count_valid([labels for {plan.batch} in batch])"
    yield "    losses: list[Tensor] = []"
    sync = [*_each_module(plan)]
    if sync:
        yield f"    for number, ({plan.batch}) in enumerate(batch, start=1):"
    else:
        yield f"    for {plan.batch} in batch:"
    for line in sync:
        yield f"        {line}"
    yield f"        loss_sum = model({plan.batch})"
    scale = " * scale" if plan.is_scaled else ""
    yield f"        (loss_sum / max(num_tokens, 1){scale}).backward()"
    yield "        losses.append(loss_sum.detach())"
    yield "    loss = whole_sum(losses) / max(num_tokens, 1)"


def _each_module(plan: Plan) -> Iterator[str]:
    """The lines that tell modules, for each microbatch, whether to reduce gradients, and to free
    parameters.
    """
    last = "number == len(batch)"
    for repeats, buckets in _sharded(plan):
        reduce_now = "True" if buckets[0].shard_gradients else last
        free = "True" if buckets[0].reshard_after_forward else last
        yield f"each_module({_modules(repeats)}, reduce_now={reduce_now}, free={free})"


def _gradients(plan: Plan) -> Iterator[str]:
    """The lines that reduce gradients, and make their norm."""
    dtypes = _reduction_dtypes(plan.program)
    if plan.program.pipeline:
        yield f"    gradients = model.gradients({', '.join(dtypes)})"
    else:
        yield f"    gradients = reduced_gradients({', '.join(['model', *dtypes])})"
    if plan.is_scaled:
        yield "    for gradient in gradients:"
        yield "        gradient.div_(scale)"
    owner = "model." if plan.program.pipeline else ""
    yield f"    norm = {owner}total_norm(gradients)"


def _reduction_dtypes(program: Program) -> list[str]:
    """The element type in which gradients are summed, where it is not their own."""
    dtypes: set[str] = set()
    for bucket in program.buckets:
        if program.reduce_dtype(bucket) != bucket.type.dtype:
            dtypes.add(DTYPES[program.reduce_dtype(bucket)])
    return sorted(dtypes)


def _eval_step(plan: Plan) -> Iterator[str]:
    yield "@torch.no_grad()"
    yield f"def eval_step(model: {plan.type}, batch: {plan.batch_type}) -> Metrics:"
    if plan.program.pipeline:
        yield from _schedule_lines(False)
    else:
        yield f"    num_tokens = count_valid([labels for {plan.batch} in batch])"
        losses = f"[model({plan.batch}) for {plan.batch} in batch]"
        yield f"    loss = whole_sum({losses}) / max(num_tokens, 1)"
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


def _ops(program: Program, kind: str = "") -> list[Op]:
    """The ops of the step besides its microbatches, all of them or all of a kind."""
    ops: list[Op] = []
    for stmt in program.region.body:
        if isinstance(stmt, Op) and kind in ("", stmt.kind):
            ops.append(stmt)
    return ops
