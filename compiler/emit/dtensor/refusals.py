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
    for refusal in REFUSALS:
        if (span := next(refusal.where(program), None)) is not None:
            unable = (
                f"torch {version('torch').partition('+')[0]} alone cannot express {refusal.feature}"
            )
            message = (
                unable
                if refusal.why
                else f"`--target dtensor` does not write {refusal.feature} yet"
            )
            help = "compile without `--target dtensor`, or change this part of the plan"
            diagnostics.error(
                "E0707",
                message,
                span,
                notes=(Note(None, refusal.why),) if refusal.why else (),
                help=help,
            )
    diagnostics.check()


def without_effect(program: Program) -> Iterator[Diagnostic]:
    """Warnings about settings of a run that only programs of scalec's runtime follow."""
    watch, train = program.watch, program.train
    watched = [
        setting.key
        for setting in fields_of(Watch)
        if getattr(watch, setting.key) != getattr(Watch(), setting.key)
    ]
    for name in (*watched, *train.saves):
        span = (watch if name in watched else train).spans[name]
        message = (
            f"`{name}` has no effect: a program of torch alone saves and watches nothing by itself"
        )
        yield Diagnostic(
            "W0912",
            message,
            span,
            help="compile without `--target dtensor`, or do this in your own loop",
        )


def _elastic(program: Program) -> Iterator[Span]:
    if axis := elastic_axis(program):
        yield axis.span


CHOOSING = ("top", "sort_by_expert", "dispatch")
"""The ops by which tokens choose experts."""


def _draws(program: Program) -> Iterator[Span]:
    if any(are_draws(arg.value.type) for arg in program.microbatches.args):
        yield next(
            op.span
            for op in walk(program.forward.body)
            if "dropout" in op.kind or "dropout" in dict(op.attrs)
        )


def _limit(program: Program) -> Iterator[Span]:
    if program.watch.get_loss_limit:
        yield program.watch.spans["spikes"]


def _zigzag(program: Program) -> Iterator[Span]:
    """Two chunks of the sequence over several axes, or of a parameter that has a row for each
    position.
    """
    claims = [claim for claim in program.claims if claim.zigzag]
    if claims and (
        len(program.zigzags) > 1 or any(SEQUENCE in param.type.dims for param in program.params)
    ):
        yield claims[0].span


def _order(program: Program) -> Iterator[Span]:
    """Dims over axes in another order than the mesh's."""
    order = [axis.name for axis in program.axes]
    for op in walk(program.forward.body):
        for type in (value.type for value in op.outputs):
            if any(
                [*axes] != sorted(axes, key=order.index) for axes in map(type.axes_of, type.dims)
            ):
                yield op.span


def _modules_of_mixed_sharding(program: Program) -> Iterator[Span]:
    """Modules whose parameters are sharded over several axes, or gathered and reduced in
    several ways.
    """
    repeats = (
        {}
        if program.pipeline
        else {param.name: param.type.dims[: param.stacked] for param in program.params}
    )
    alike: dict[tuple[str, ...], set[object]] = {}
    for bucket in program.buckets:
        over = bucket.shard_axes if program.degree(bucket.shard_axes) > 1 else ()
        for name in bucket.params:
            alike.setdefault(repeats.get(name, ()), set()).add(over)
        if bucket.layers:
            alike.setdefault(("of layers", *bucket.layers), set()).add(
                (bucket.reshard_after_forward, bucket.shard_gradients)
            )
    if any(len(ways) > 1 for ways in alike.values()):
        yield program.region.span


def _params_of_several_stages(program: Program) -> Iterator[Span]:
    sharded = {
        name
        for bucket in program.buckets
        if program.degree(bucket.shard_axes) > 1
        for name in bucket.params
    }
    if sharded.intersection(find_shared_params(program)):
        yield program.axis(staged(program).axis).span


def _positions(program: Program) -> Iterator[Span]:
    """Functions that take positions: each rank would have to know which part of a DTensor it
    has.
    """
    return (op.span for op in walk(program.forward.body) if op.kind == "call" and positions_in(op))


REFUSALS = (
    Refusal(
        "a mesh that loses nodes",
        _elastic,
        "`init_device_mesh` has one shape, of all ranks that start",
    ),
    Refusal(
        "experts that tokens choose",
        lambda program: (op.span for op in walk(program.forward.body) if op.kind in CHOOSING),
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
