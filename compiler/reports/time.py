"""The report of `scalec explain time`: what a step takes, on what, and how much of the GPU's peak
it is.

Non-goals: the times themselves (`analysis.time`).
"""

from collections.abc import Iterator

from ..analysis.hardware import DATA_SHEETS, Hardware
from ..analysis.link_traffic import crosses
from ..analysis.time.clocks import BUBBLE, HOST, StepTime
from ..analysis.time.prices import EXPOSED
from ..analysis.time.report import Neighbour, Report, Room, looks
from ..config.units import amount, counted
from ..ir import MICROBATCHES
from ..ops.protocol import DETERMINISTIC
from .published import get_warning
from .summary import headline, table

LINES = 3
"""How many lines of the plan are named for each kind of time."""

SHOWN = 8
"""How many other plans are named, of those that fit and of those that do not."""

LEAST = 0.0005
"""The least share of a step that a row has."""

HIDDEN = 1000
"""The seconds of computation for each second of a group's collectives from which on these are
not worth a word.
"""


def time(it: Report) -> str:
    """The time of a step, for people."""
    summary = (
        f"{seconds(it.step.seconds)} a step, {it.tokens:,.0f} tokens/s/GPU, MFU {it.mfu:.1%},"
        f" HFU {it.hfu:.1%}"
    )
    rows = [("", "seconds", "share", "at"), *_rows(it)]
    said = "\n".join((summary, *_loads(it), *_full(it.room), *_whose(it)))
    return "\n\n".join(
        (
            f"{headline(it.program)}\n{_source(it)}",
            said,
            "\n".join(table(rows, "lrrl")),
            *_ratios(it),
            *_watched(it),
            *_unpriced(it),
            *_limit(it),
            *get_warning(it.program, it.on.name, it.mfu, it.tokens),
            *_advice(it),
            MFU,
        )
    )


def _source(it: Report) -> str:
    """For instance `on 64 × h100_sxm, by data sheets: expect 15 to 20%`."""
    on = f"on {it.ranks:,} × {it.on.name}"
    measured = it.ops and it.on.source != DATA_SHEETS
    part = f" ({it.measured:.0%} of the time of ops from measured sizes)" if measured else ""
    return f"{on}, {expected(it.on)}{part}"


def expected(on: Hardware) -> str:
    """Where the speeds of GPUs and links are from, and by how much a step may differ from its
    prediction.
    """
    error = "15 to 20%" if on.source == DATA_SHEETS else f"{on.error:.0%}"
    return f"by {on.source}: expect {error}"


MFU = (
    "MFU: 6 operations for each token and parameter but the embedding's, and attention's of"
    " the pairs that are seen;\n"
    "HFU: all operations that are done, backward's recomputation too."
)


def _full(room: Room) -> Iterator[str]:
    """Memory, where the step does not fit or hardly."""
    if room.close_to_full and room.capacity:
        needs = f"a rank needs {amount(room.needs)} of {amount(room.capacity)}"
        low, high = room.ends or (room.needs, room.needs)
        if not room.lacks:
            yield f"close to full: time cannot be told; {needs}"
        elif low > room.capacity:
            yield f"does not fit: {needs}"
        else:
            yield f"may not fit: {needs}, {amount(low)} to {amount(high)}"


def _ratios(it: Report) -> Iterator[str]:
    """For instance `compute : communication is 0.9 over dp, 11.8 over tp`, the lowest first."""
    ratios = sorted((ratio, axes) for axes, ratio in it.ratios.items() if ratio < HIDDEN)
    if not ratios:
        return
    each = [f"{ratio:.3g} over {axes}" for ratio, axes in ratios]
    below = " (below 1, computation cannot hide all of it)" if ratios[0][0] < 1 else ""
    yield f"compute : communication is {', '.join(each)}{below}"


def _watched(it: Report) -> Iterator[str]:
    """The looks at values, which come besides."""
    if found := [*looks(it.program, it.step.seconds, it.on)]:
        rows = [(each.said, seconds(each.seconds), seconds(each.of_a_step)) for each in found]
        share = sum(each.of_a_step for each in found) / it.step.seconds
        yield "\n".join(
            table(
                [("watch, besides", "seconds", "of a step"), *rows, ("", "", f"{share:.2%}")], "lrr"
            )
        )


def _unpriced(it: Report) -> Iterator[str]:
    """Kernels of which no time is known: those that are told to be deterministic, by the IR or
    by `replay`.
    """
    program = it.program
    told = bool(program.watch.replay) or any(
        dict(op.attrs).get(DETERMINISTIC.name) == "on" for op in program.ops
    )
    if told and not it.on.synchronous:
        yield (
            "not in it: by how much deterministic kernels are slower, which is not known of"
            " torch's;\n"
            "FlashAttention-3's backward of attention takes up to 1.6 times as long"
            " (arXiv:2601.21824)"
        )


def _loads(it: Report) -> Iterator[str]:
    """The step where experts of a rank get more rows than others, for instance `worst: 3.10 s`."""
    if others := [
        f"{name}: {seconds(spent)}" for name, spent in it.loads.items() if name != "balanced"
    ]:
        yield f"at an equal load of experts; {', '.join(others)}"


def _limit(it: Report) -> Iterator[str]:
    """For instance `limited by: products, at 66% of the GPU's peak`."""
    if not it.ops:
        return
    kind = max(it.step.kinds, key=lambda kind: it.step.kinds[kind])
    held, axes = it.held(kind), kind.removeprefix(EXPOSED)
    if kind == HOST:
        yield "limited by: the host" + (f", which {_pace(it)}" if _issues(it) else "")
    elif kind == BUBBLE and (pipeline := it.program.pipeline):
        ranks, microbatches = it.program.axis(pipeline.axis).size, it.program.size(MICROBATCHES)
        yield (
            f"limited by: the bubble of {counted(ranks, 'rank')} with"
            f" {counted(microbatches, 'microbatch')}"
        )
    elif axes != kind:
        across = crosses(it.program, tuple(axes.split(" × ")), it.on.ranks_per_node)
        yield (
            f"limited by: collectives over {axes}, {'across nodes' if across else 'within a node'}"
        )
    elif held is not None:
        yield f"limited by: {kind}, at {held:.0%} of {RATES.get(kind, MEMORY)}"


MEMORY = "the rate of the GPU's memory"
RATES = {str(kind): "the GPU's peak" for kind in ("products", "attention")}


def _issues(it: Report) -> bool:
    """Whether the host has a row of its own, with its pace: it issues ops that another device
    computes.
    """
    return bool(it.ops) and not it.on.synchronous


def _pace(it: Report) -> str:
    """For instance `issues a layer in 1.1 ms, the GPU takes 7.9 ms`."""
    pace = it.pace
    of = "" if pace.layers == "layers" else f" of `{pace.layers}`"
    what = f"a layer{of}" if pace.layers else "a microbatch"
    return f"issues {what} in {seconds(pace.issues)}, the GPU takes {seconds(pace.computes)}"


def _whose(it: Report) -> Iterator[str]:
    """The rank whose time is told, of a pipeline."""
    if it.program.pipeline:
        yield (
            f"below, the time of rank {it.step.rank} of {it.program.pipeline.axis}, which"
            " computes longest"
        )


NONE = "would help: no plan with one setting changed"
NONE_FITS = "no plan with one setting changed fits; `scalec check` tries several"


def _advice(it: Report) -> Iterator[str]:
    if note := advice_note(it):
        yield note
    for rows in advice_tables(it):
        yield "\n".join(table(rows, "lrrl"))


def advice_note(it: Report) -> str:
    """A sentence where plans were looked for and none of them fits; empty otherwise."""
    if it.neighbours is None or not all(other.room.lacks for other in it.neighbours):
        return ""
    return NONE_FITS if it.room.lacks else NONE


def advice_tables(it: Report) -> Iterator[list[tuple[str, ...]]]:
    """Faster plans that fit, then faster ones that do not; of a plan that does not fit, the plans
    that do.

    Each table has a head and a row for each plan; none where none was looked for.
    """
    fit = [other for other in it.neighbours or () if not other.room.lacks]
    too_large = [other for other in it.neighbours or () if other.room.lacks]
    verb = "fit" if it.room.lacks else "help"
    for head, others in ((f"would {verb}", fit), ("too large", too_large)):
        if others:
            rows = [_neighbour(it, other) for other in others[:SHOWN]]
            yield [(head, "seconds", "gain", "memory"), *rows]


def _neighbour(it: Report, other: Neighbour) -> tuple[str, str, str, str]:
    memory, room = amount(other.room.needs), other.room
    if room.lacks and room.capacity:
        memory += f", {amount(room.needs - room.capacity)} too many"
    elif room.close_to_full:
        memory += ", close to full"
    return other.told, seconds(other.seconds), f"{1 - other.seconds / it.step.seconds:.1%}", memory


def _rows(it: Report) -> Iterator[tuple[str, str, str, str]]:
    """Kinds of time, the longest first, each with the plan's lines that take most; shorter ones
    add up.
    """
    rest, step = 0.0, it.step
    kinds = step.kinds | ({HOST: step.kinds.get(HOST, 0.0)} if _issues(it) else {})
    for kind, spent in sorted(kinds.items(), key=lambda pair: -pair[1]):
        if spent < LEAST * step.seconds and not (_issues(it) and kind == HOST):
            rest += spent
            continue
        yield kind, seconds(spent), f"{spent / step.seconds:.0%}", "; ".join(_where(it, kind))
    if rest:
        yield "other", seconds(rest), f"{rest / step.seconds:.0%}", ""


def _at(step: StepTime, kind: str) -> Iterator[str]:
    """The lines that take most, for instance `llama.scale:28 2.98 s, :22 374.0 ms`; nothing
    where there is one.
    """
    lines = sorted(
        ((spent, line) for (of, line), spent in step.spent.items() if of == kind), reverse=True
    )
    if len(lines) > 1:
        most = [
            (spent, *line.rsplit(":", 1))
            for spent, line in lines[:LINES]
            if spent >= LEAST * step.seconds
        ]
        files = ["", *(file for _, file, _ in most)]
        yield ", ".join(
            f"{'' if file == before else file}:{line} {seconds(spent)}"
            for (spent, file, line), before in zip(most, files, strict=False)
        )


def _where(it: Report, kind: str) -> Iterator[str]:
    """Notes on a kind of time: how much of it is seen, the host's pace, lines."""
    yield from _beside(it, kind)
    if _issues(it) and kind == HOST:
        yield _pace(it)
    yield from _at(it.step, kind)


def _beside(it: Report, kind: str) -> Iterator[str]:
    """For instance `8.70 s in all, 5.30 s beside computation`."""
    in_all, waited = it.sent.get(kind.removeprefix(EXPOSED), (0.0, 0.0))
    if kind.startswith(EXPOSED) and in_all - waited > LEAST * it.step.seconds:
        yield f"{seconds(in_all)} in all, {seconds(in_all - waited)} beside computation"


def seconds(time: float) -> str:
    """For instance `8.70 s`, `3.1 ms` or `12 µs`."""
    if not time:
        return "0"
    return (
        f"{time:.2f} s"
        if time >= 1
        else f"{time * 1e3:.1f} ms"
        if time >= 1e-3
        else f"{time * 1e6:.0f} µs"
    )
