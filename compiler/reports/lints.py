"""Lints: plans that compile but are probably not what you meant."""

from collections.abc import Iterator

from ..analysis.context_parallel import ZIGZAG, query_axes
from ..analysis.expert_loads import rows_of_an_expert
from ..analysis.vocabulary import tables
from ..config.gpus import PRODUCT_ROWS, gpu
from ..config.units import count_words
from ..ir import SEQUENCE, STATES, Axis, Claim, Program
from ..ops import OPS
from ..ops.attention import seen_pairs, window_of
from ..ops.experts import SORT
from ..syntax.diagnostics import Diagnostic, Note
from .idle_pipeline import idle_pipeline
from .ineffective import without_effect


def advice(program: Program) -> Iterator[Diagnostic]:
    """The warnings for a program."""
    yield from _answers_in_sight(program)
    yield from _reduction_per_step(program)
    yield from idle_pipeline(program)
    yield from _long_interval(program)
    yield from _reserve_of_nothing(program)
    yield from _never_at_peak(program)
    yield from _ids_out_of_reach(program)
    yield from without_effect(program)
    yield from _unequal_parts(program)
    yield from _few_rows(program)


def _reserve_of_nothing(program: Program) -> Iterator[Diagnostic]:
    """A reserve of memory, although the cluster names no GPU."""
    if program.cluster.reserve is not None and not program.cluster.gpu:
        span = program.cluster.spans.get("reserve", program.region.span)
        message = "`reserve` has no effect: the cluster names no GPU"
        yield Diagnostic("W0916", message, span, help="name it: `gpu = h100_sxm`")


def _reduction_per_step(program: Program) -> Iterator[Diagnostic]:
    """Per-microbatch gradient reduction, in a pipeline whose stages reduce theirs when they end."""
    pipeline = program.pipeline
    state = next((state for state in program.state if state.gradients), None)
    if pipeline and state:
        kinds = ", ".join(kind for kind in STATES if kind != "gradients" and getattr(state, kind))
        message = "pipeline stages keep unsharded gradients and reduce them once per step"
        span = pipeline.settings.spans.get("schedule", program.region.span)
        after = ", and resharded after a stage" * bool(state.parameters)
        notes = (Note(None, f"weights are gathered once per step too{after}"),)
        help = f"write `{kinds} over {', '.join(state.gradients)}`, which is what the program does"
        yield Diagnostic("W0906", message, span, "not per microbatch", notes, help)


def _answers_in_sight(program: Program) -> Iterator[Diagnostic]:
    """A model that may look ahead, although labels are the next tokens."""
    data = program.train.data
    if "bidirectional" in program.sees and data.masked is None:
        message = "a bidirectional model can see the tokens that it must predict"
        notes = (Note(data.spans["kind"], "labels are the tokens that follow"),)
        help = (
            "leave `bidirectional` out, or hide the tokens to predict: `masked = 15% "
            " mask_token = …`"
        )
        yield Diagnostic("W0902", message, program.region.span, "may look ahead", notes, help)


def _long_interval(program: Program) -> Iterator[Diagnostic]:
    """An interval of recompute that is longer than the repeat; of 2, a part of a repeat may
    have one iteration.
    """
    recompute = program.train.recompute
    if recompute.word != "every" or recompute.number <= 2:
        return
    for name in recompute.names:
        if (layers := program.size(name)) < recompute.number:
            recomputed = f"1 of {layers}" if layers > 1 else "all of them"
            span = program.train.spans["recompute"]
            help = f"write `every(2, {name})`, which recomputes half of them, or `recompute = full`"
            message = (
                f"`every({recompute.number}, {name})`: `{name}` has only"
                f" {count_words(layers, 'iteration')}"
            )
            yield Diagnostic("W0903", message, span, f"recomputes {recomputed}", help=help)


def _unequal_parts(program: Program) -> Iterator[Diagnostic]:
    """Contiguous parts of a causal sequence, where the last rank computes most; or a window whose
    sequence lies in chunks apart.
    """
    for claim in program.claims:
        if claim.dim != SEQUENCE:
            continue
        ops = [op for op in program.ops if claim.axis in query_axes(program, op)]
        if not ops or any(OPS[op.kind].get(op, "mask") != "causal" for op in ops):
            continue
        axis, seq = program.axis(claim.axis), program.size(claim.dim)
        windows = [window_of(op) or seq for op in ops]
        # in contiguous parts, how many ranks have the keys of the widest window
        near = -(-max(windows) * axis.size // seq)
        if not claim.zigzag and min(windows) >= seq:
            yield _last_rank_computes_most(claim, axis, seq)
        elif claim.zigzag and near < axis.size - 1:
            message = (
                f"chunks apart need the keys of all {axis.size - 1} other ranks of `{axis.parent}`"
            )
            label = f"in contiguous parts a window of {max(windows):,} tokens needs those of {near}"
            yield Diagnostic("W0904", message, claim.span, label, help=f"leave `as {ZIGZAG}` out")


def _last_rank_computes_most(claim: Claim, axis: Axis, seq: int) -> Diagnostic:
    """The warning for contiguous parts of a causal sequence of `seq` tokens."""
    pairs, part = seen_pairs(seq, causal=True), seq // axis.size
    most = (pairs - seen_pairs(seq - part, causal=True)) * axis.size / pairs
    message = (
        f"the last rank of `{axis.parent}` computes {most:.1f} times as much attention as the mean"
    )
    label = "contiguous parts of a causal sequence"
    help = f"write `{claim.dim} over {axis.parent} as {ZIGZAG}`"
    return Diagnostic("W0904", message, claim.span, label, help=help)


def _never_at_peak(program: Program) -> Iterator[Diagnostic]:
    """A warm-up at least as long as the run."""
    train, schedule = program.train, program.train.optimizer.schedule
    if schedule.warmup > train.steps or (
        schedule.kind == "cosine" and schedule.warmup == train.steps
    ):
        message = f"warm-up takes {schedule.warmup:,} steps, but the run has only {train.steps:,}"
        label = "the learning rate never falls"
        if schedule.warmup > train.steps:
            label = "the learning rate never reaches its peak"
        notes = (Note(train.spans["steps"], "the steps of the run"),)
        help = f"write a `warmup` below {train.steps}, or more `steps`"
        yield Diagnostic("W0910", message, schedule.spans["warmup"], label, notes, help)


def _ids_out_of_reach(program: Program) -> Iterator[Diagnostic]:
    """Files of 16 bits a token, and a vocabulary of more."""
    data = program.train.data
    vocabulary = min(map(program.valid, tables(program).values()), default=0)
    if data.kind == "tokens" and data.dtype == "uint16" and vocabulary > 2**16:
        message = f"ids of uint16 end at 65,535, but the vocabulary has {vocabulary:,}"
        help = "write `dtype = uint32` if the files have 32 bits a token"
        yield Diagnostic("W0911", message, data.spans["dtype"], "others never occur", help=help)


def _few_rows(program: Program) -> Iterator[Diagnostic]:
    """Products of experts with fewer rows than tensor cores multiply at once."""
    known_gpu = gpu(program.cluster)
    least = known_gpu.product_rows if known_gpu else PRODUCT_ROWS
    for op in program.ops:
        if op.kind == SORT.name and (rows := rows_of_an_expert(program, op)) < least:
            rows_in_words = count_words(int(rows), "row") if rows >= 1 else "less than 1 row"
            message = f"each expert gets {rows_in_words} of a microbatch on average"
            label = f"tensor cores multiply {least} rows at a time"
            help = (
                f"use larger microbatches, or put `{op.get('to')}` over more of the axes of"
                " the tokens"
            )
            yield Diagnostic("W0905", message, op.span, label, help=help)
            return
