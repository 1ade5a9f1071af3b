"""Changes of a plan's text: lists the changes of one setting, and makes the variant of a plan with
some of them.

Non-goals: which change is worth it (`remedies`, `advice`).
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice, permutations

from attrs import evolve

from ..analysis.context_parallel import STRATEGIES
from ..analysis.memory import capacity
from ..analysis.recompute import cheap
from ..config.gpus import GIB
from ..config.settings import AUTO, CHUNK, ON, SAVE, TORCH, TRITON
from ..frontend import resolve
from ..ir import BATCH, DATA_DIMS, SEQUENCE, Claim, Program, StateAxes, regions_in, walk_regions
from ..ir.printer import how_claimed
from ..syntax.diagnostics import PlanError
from ..syntax.source import Source
from .lowering import make_variant
from .variant import Change, Variant

TENSORS = 0.85
"""The part of a GPU's memory for tensors that leaves it with room to spare."""

SCHEDULES = (
    "1f1b",
    "interleaved_1f1b(chunks=2)",
    "interleaved_1f1b(chunks=4)",
    "zb_h1",
    "interleaved_zero_bubble(chunks=2)",
    "zbv",
    "dualpipev",
)
"""The schedules of pipelines that are worth a comparison."""

BUCKETS = ("32MiB", "128MiB", "512MiB")
"""The sizes of buckets that are worth a comparison."""


def make_changed_variant(source: Source, changes: Sequence[Change]) -> Variant | None:
    """A plan with some changes; None where they make no plan."""
    sections = get_sections(changes).items()
    text = "\n".join(f"{section} {{ {content} }}" for section, content in sections)
    try:
        model = resolve(source, Source("changes", text))
    except PlanError:
        return None
    variant = make_variant(model, changes)
    return variant if variant.is_plan else None


def get_sections(changes: Sequence[Change]) -> dict[str, str]:
    """The contents of the sections that override sections of the plan, by name."""
    contents = dict[str, str]()
    for change in changes:
        if change.section in contents:
            contents[change.section] += f"  {change.content}"
        else:
            contents[change.section] = change.content
    return contents


def neighbours(model: Program) -> Iterator[Change]:
    """All changes of one setting of a plan before any placement; changes that often make steps
    faster come first.
    """
    yield from less_recomputation(model)
    yield from more_recomputation(model)
    yield Change("train", f"microbatch = {2 * model.train.microbatch}")
    yield from islice(smaller_microbatches(model), 1)
    yield from less_sharding(model)
    yield from more_sharding(model)
    yield from sequence_parallelism(model)
    yield from strategies(model)
    yield from schedules(model)
    yield from meshes(model)
    yield from flows(model)
    yield from implementations(model)


def more_recomputation(model: Program) -> Iterator[Change]:
    """Recomputation in backward: of ops that cost little, or of layers."""
    recompute = model.train.recompute
    if recompute.word == "none":
        yield from _selective(model)
    if recompute.word != "full":
        yield Change("train", "recompute = full")


def less_recomputation(model: Program) -> Iterator[Change]:
    """Recomputation in backward of nothing, of as much as memory needs, of cheap ops, or of half
    of the layers.
    """
    recompute, room = model.train.recompute, capacity(model)
    if recompute.word != "none":
        yield Change("train", "recompute = none")
        if room and recompute.word != AUTO:
            yield Change("train", f"recompute = {AUTO}(memory={int(TENSORS * room / GIB)}GiB)")
    if recompute.word == "full":
        yield from _selective(model)
        for dim in _innermost(model):
            yield Change("train", f"recompute = every(2, {dim})")


def smaller_microbatches(model: Program) -> Iterator[Change]:
    """Half of the sequences at a time, a quarter, and so on."""
    size = model.train.microbatch
    while size % 2 == 0:
        size //= 2
        yield Change("train", f"microbatch = {size}")


def _selective(model: Program) -> Iterator[Change]:
    names = cheap(model)
    if names and model.train.compile != ON:
        yield Change("train", f"recompute = selective({', '.join(names)})")


def _innermost(model: Program) -> list[str]:
    """The dims of repeats without repeats, each once."""
    regions = walk_regions(model.region.body)
    dims = [region.dim for region in regions if region.dim and not regions_in(region.body)]
    return [*dict.fromkeys(dims)]


def data_axes(model: Program) -> tuple[str, ...]:
    """The axes over which a batch lies, in the mesh's order."""
    batch_axes = {claim.axis for claim in model.claims if claim.dim == BATCH}
    return tuple(axis.name for axis in model.axes if axis.name in batch_axes)


def more_sharding(model: Program) -> Iterator[Change]:
    """Stages of ZeRO over all axes of data; a pipeline reduces gradients once a step, so it has
    no second.
    """
    state, axes = _state(model), data_axes(model)
    rules = {"zero 1": "optimizer", "zero 2": "gradients", "zero 3": "parameters"}
    if model.pipeline:
        rules = {"zero 1": "optimizer", "parameters, optimizer": "parameters"}
    for rule, kind in rules.items() if state else ():
        if axes and getattr(state, kind) != axes:
            yield Change("state", f"{rule} over {', '.join(axes)}")


def less_sharding(model: Program) -> Iterator[Change]:
    """Lower stages of ZeRO over the same axes."""
    state = _state(model)
    if not state or not state.optimizer:
        return
    stage = 1
    if state.parameters:
        stage = 3
    elif state.gradients:
        stage = 2
    for lower in reversed(range(stage)):
        if lower < 2 or not model.pipeline:
            yield Change("state", f"zero {lower} over {', '.join(state.optimizer)}")


def _state(model: Program) -> StateAxes | None:
    """How state is shared out; None where groups of parameters have rules of their own."""
    if len(model.state) > 1:
        return None
    return model.state[0] if model.state else StateAxes()


def flows(model: Program) -> Iterator[Change]:
    """Gradients reduced in half the bytes, buckets of other sizes, gathers earlier or later."""
    yield from _narrow_sums(model)
    if data_axes(model):
        for size in BUCKETS:
            yield Change("state", f"bucket = {size}")
    if any(state.parameters for state in model.state):
        prefetch = model.flow.prefetch
        yield Change("state", f"prefetch = {prefetch + 1}")
        if prefetch:
            yield Change("state", f"prefetch = {prefetch - 1}")


def _narrow_sums(model: Program) -> Iterator[Change]:
    """Gradients of a plan in bf16 summed over ranks in bf16 too: half the bytes, fewer digits."""
    train = model.train
    is_wide = train.reduce in (None, "fp32") and train.master in (None, "fp32")
    if data_axes(model) and train.precision == "bf16" and is_wide:
        yield Change("train", "reduce = bf16")


def sequence_parallelism(model: Program) -> Iterator[Change]:
    """The sequence over an axis of tensor parallelism too, or no longer."""
    for axis in dict.fromkeys(axis.name for axis in model.axes):
        claims = [claim for claim in model.claims if claim.axis == axis]
        dims = {claim.dim for claim in claims}
        if SEQUENCE in dims and not dims <= {*DATA_DIMS}:
            without = [
                claim for claim in model.claims if (claim.dim, claim.axis) != (SEQUENCE, axis)
            ]
            yield Change("shard", _rules(model, without), f"shard without `{SEQUENCE} over {axis}`")
        elif dims and dims.isdisjoint(DATA_DIMS):
            last = max(claim.rank for claim in model.claims) + 1
            more = [*model.claims, evolve(claims[0], rank=last, dim=SEQUENCE)]
            yield Change("shard", _rules(model, more), f"shard with `{SEQUENCE} over {axis}`")


def strategies(model: Program) -> Iterator[Change]:
    """Other ways of attention to get the keys of a sequence that lies over an axis of its own."""
    for claim in model.claims:
        dims = {other.dim for other in model.claims if other.axis == claim.axis}
        if claim.dim != SEQUENCE or dims != {SEQUENCE}:
            continue
        for via in STRATEGIES:
            if via != claim.via:
                changed_claim = evolve(claim, via=via)
                claims = [changed_claim if other is claim else other for other in model.claims]
                words = f"shard with `{SEQUENCE} over {claim.axis} via {via}`"
                yield Change("shard", _rules(model, claims), words)


def _rules(model: Program, claims: Sequence[Claim]) -> str:
    """The rules of `shard` that make these claims, and the rule that cuts a pipeline."""
    rules = list[str]()
    if model.pipeline:
        rules.append(f"{', '.join(model.pipeline.dims)} over {model.pipeline.axis}")
    by_rank = sorted(claims, key=lambda claim: claim.rank)
    for _, group in groupby(by_rank, key=lambda claim: claim.rank):
        rule_claims = [*group]
        dims = dict.fromkeys(claim.dim for claim in rule_claims)
        axes = dict.fromkeys(claim.axis for claim in rule_claims)
        rules.append(f"{', '.join(dims)} over {', '.join(axes)}{how_claimed(rule_claims[0])}")
    return "  ".join(rules)


def schedules(model: Program) -> Iterator[Change]:
    """Other named schedules of a pipeline."""
    pipeline = model.pipeline
    if not pipeline or pipeline.settings.stages:
        return
    current = pipeline.settings.schedule
    for schedule in SCHEDULES:
        if schedule not in (current.kind, f"{current.kind}(chunks={current.chunks or 2})"):
            yield Change("pipeline", f"schedule = {schedule}")


def meshes(model: Program) -> Iterator[Change]:
    """Twice the ranks along one axis, half the ranks along another."""
    if model.pipeline and (model.pipeline.rows or model.pipeline.settings.stages):
        return
    sizes = {axis.name: axis.size for axis in model.axes}
    for more, less in permutations([axis for axis in model.axes if axis.size > 1], 2):
        if less.size % 2 == 0:
            changes = {more.name: 2 * more.size, less.name: less.size // 2}
            yield Change("mesh", mesh(sizes | changes))


def mesh(sizes: dict[str, int]) -> str:
    """For instance `dp = 2  tp = 4`."""
    return "  ".join(f"{name} = {size}" for name, size in sizes.items())


def more_stages(model: Program) -> Iterator[Change]:
    """Two and four times the ranks along a pipeline's axis, and as many times fewer along an axis
    of data.
    """
    pipeline = model.pipeline
    if not pipeline or pipeline.rows or pipeline.settings.stages:
        return
    sizes = {axis.name: axis.size for axis in model.axes}
    names = data_axes(model)
    for times in (2, 4):
        data = next((axis for axis in model.axes if axis.name in names and axis.size > times), None)
        if data and data.size % times == 0:
            changes = {pipeline.axis: sizes[pipeline.axis] * times, data.name: data.size // times}
            yield Change("mesh", mesh(sizes | changes))


def implementations(model: Program) -> Iterator[Change]:
    """Other kernels; logits and gathered activations that are saved, not made twice."""
    kernels = TORCH if model.train.kernels == TRITON else TRITON
    yield Change("train", f"kernels = {kernels}")
    if model.train.logits == CHUNK:
        yield Change("train", f"logits = {SAVE}")
    if model.train.gathered != SAVE:
        yield Change("train", f"gathered = {SAVE}")
