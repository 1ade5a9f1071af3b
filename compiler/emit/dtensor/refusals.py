"""The parts of a plan that torch alone cannot express: one row each, with the call of torch that
fails.

Tests make each of these calls, so that a version of torch that learns one is noticed.
Parts that torch could express and this target does not write yet have rows too, without a call.
"""

from collections.abc import Callable, Iterator
from importlib.metadata import version

from attrs import frozen

from ...analysis.elastic import elastic_axis
from ...config.fields import fields_of
from ...config.settings import Watch
from ...ir import SEQUENCE, Program, walk
from ...ops.dropout import are_draws
from ...ops.user import positions_in
from ...syntax.diagnostics import Diagnostic, Diagnostics, Note
from ...syntax.source import Span
from .staged import find_shared_params
from .staged import get_pipeline as staged

Where = Callable[[Program], Iterator[Span]]


@frozen
class Refusal:
    """A part of a plan: its name, where a program has it, and why torch cannot do it; "" where
    it could.
    """

    feature: str
    where: Where
    why: str = ""


def refuse(program: Program) -> None:
    """Raises PlanError with all parts of a program that torch cannot express."""
    diagnostics = Diagnostics()
    help = "compile without `--target dtensor`, or change this part of the plan"
    for refusal in REFUSALS:
        span = next(refusal.where(program), None)
        if span is None:
            continue
        if refusal.why:
            torch = f"torch {version('torch').partition('+')[0]}"
            message = f"{torch} alone cannot express {refusal.feature}"
            notes = (Note(None, refusal.why),)
            diagnostics.error("E0707", message, span, notes=notes, help=help)
        else:
            message = f"`--target dtensor` does not write {refusal.feature} yet"
            diagnostics.error("E0707", message, span, help=help)
    diagnostics.check()


def without_effect(program: Program) -> Iterator[Diagnostic]:
    """Warnings about settings of a run that only programs of scalec's runtime follow."""
    watch, train = program.watch, program.train
    spans: dict[str, Span] = {}
    for setting in fields_of(Watch):
        if getattr(watch, setting.key) != getattr(Watch(), setting.key):
            spans[setting.key] = watch.spans[setting.key]
    for name in train.saves:
        spans[name] = train.spans[name]
    why = "a program of torch alone saves and watches nothing by itself"
    help = "compile without `--target dtensor`, or do this in your own loop"
    for name, span in spans.items():
        yield Diagnostic("W0912", f"`{name}` has no effect: {why}", span, help=help)


def _elastic(program: Program) -> Iterator[Span]:
    if axis := elastic_axis(program):
        yield axis.span


CHOOSING = ("top", "sort_by_expert", "dispatch")
"""The ops by which tokens choose experts."""


def _choices(program: Program) -> Iterator[Span]:
    for op in walk(program.forward.body):
        if op.kind in CHOOSING:
            yield op.span


def _draws(program: Program) -> Iterator[Span]:
    if not any(are_draws(arg.value.type) for arg in program.microbatches.args):
        return
    for op in walk(program.forward.body):
        if "dropout" in op.kind or "dropout" in dict(op.attrs):
            yield op.span


def _limit(program: Program) -> Iterator[Span]:
    if program.watch.get_loss_limit:
        yield program.watch.spans["spikes"]


def _zigzag(program: Program) -> Iterator[Span]:
    """Two chunks of the sequence over several axes, or of a parameter that has a row for each
    position.
    """
    has_positions = any(SEQUENCE in param.type.dims for param in program.params)
    if has_positions or len(program.zigzags) > 1:
        for claim in program.claims:
            if claim.zigzag:
                yield claim.span


def _order(program: Program) -> Iterator[Span]:
    """Dims over axes in another order than the mesh's."""
    order = [axis.name for axis in program.axes]
    for op in walk(program.forward.body):
        for value in op.outputs:
            for dim in value.type.dims:
                axes = [*value.type.axes_of(dim)]
                if axes != sorted(axes, key=order.index):
                    yield op.span


def _modules_of_mixed_sharding(program: Program) -> Iterator[Span]:
    """Modules whose parameters are sharded over several axes, or gathered and reduced in
    several ways.
    """
    repeats: dict[str, tuple[str, ...]] = {}
    if not program.pipeline:
        repeats = {param.name: param.type.dims[: param.stacked] for param in program.params}
    axes_by_repeats: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    ways_by_layers: dict[tuple[str, ...], set[tuple[bool, bool]]] = {}
    for bucket in program.buckets:
        axes = bucket.shard_axes if program.degree(bucket.shard_axes) > 1 else ()
        for name in bucket.params:
            axes_by_repeats.setdefault(repeats.get(name, ()), set()).add(axes)
        if bucket.layers:
            way = (bucket.reshard_after_forward, bucket.shard_gradients)
            ways_by_layers.setdefault(bucket.layers, set()).add(way)
    for ways in (*axes_by_repeats.values(), *ways_by_layers.values()):
        if len(ways) > 1:
            yield program.region.span


def _params_of_several_stages(program: Program) -> Iterator[Span]:
    sharded: set[str] = set()
    for bucket in program.buckets:
        if program.degree(bucket.shard_axes) > 1:
            sharded |= {*bucket.params}
    if sharded.intersection(find_shared_params(program)):
        yield program.axis(staged(program).axis).span


def _positions(program: Program) -> Iterator[Span]:
    """Functions that take positions: each rank would have to know which part of a DTensor it
    has.
    """
    for op in walk(program.forward.body):
        if op.kind == "call" and positions_in(op):
            yield op.span


REFUSALS = (
    Refusal(
        "a mesh that loses nodes",
        _elastic,
        "`init_device_mesh` has one shape, of all ranks that start",
    ),
    Refusal(
        "experts that tokens choose",
        _choices,
        "`DTensor.redistribute` sends equal parts; `torch.bincount`, which counts rows, has no"
        " rule for DTensors",
    ),
    Refusal(
        "dropout whose masks are the same on every mesh",
        _draws,
        "`torch.nn.functional.dropout` of a DTensor on CPUs draws each rank's mask by itself",
    ),
    Refusal(
        "steps that are skipped by their loss",
        _limit,
    ),
    Refusal(
        "two chunks of the sequence on each rank over several axes, or of a parameter",
        _zigzag,
        "`Shard` is one contiguous part of a dim, here of the sequence in the order of its ranks",
    ),
    Refusal(
        "a dim over axes in another order than the mesh's",
        _order,
        "`Shard` on several axes nests in the order of the mesh",
    ),
    Refusal(
        "parameters of one module that are sharded in several ways",
        _modules_of_mixed_sharding,
        "`fully_shard` has one setting for all parameters of a module",
    ),
    Refusal(
        "sharded parameters that several stages of one rank share",
        _params_of_several_stages,
        "`fully_shard` of modules that share parameters has them as one, and its forward"
        " requires a single root module",
    ),
    Refusal("functions that take positions", _positions),
)
