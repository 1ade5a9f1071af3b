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
from ..config.units import amount, count_words
from ..ir import MICROBATCHES
from ..ops.protocol import DETERMINISTIC
from .published import get_warning
from .summary import headline, table

LINES = 3
"""How many lines of the plan are named for each kind of time."""

SHOWN = 8
"""How many other plans are named: of the plans that fit, and again of the plans that do not."""

LEAST = 0.0005
"""The least share of a step that a row has."""

HIDDEN = 1000
"""A group whose collectives have this many seconds of computation for each second, or more, is
not worth a word.
"""


def time(report: Report) -> str:
    """The time of a step, for people."""
    speed = (
        f"{seconds(report.step.seconds)} a step, {report.tokens:,.0f} tokens/s/GPU,"
        f" MFU {report.mfu:.1%}, HFU {report.hfu:.1%}"
    )
    summary = "\n".join((speed, *_loads(report), *_full(report.room), *_rank_words(report)))
    rows = [("", "seconds", "share", "at"), *_rows(report)]
    return "\n\n".join(
        (
            f"{headline(report.program)}\n{_source(report)}",
            summary,
            "\n".join(table(rows, "lrrl")),
            *_ratios(report),
            *_looks_table(report),
            *_kernels_without_time(report),
            *_limit(report),
            *get_warning(report.program, report.on.name, report.mfu, report.tokens),
            *_advice(report),
            MFU,
        )
    )


def _source(report: Report) -> str:
    """For instance `on 64 × h100_sxm, by data sheets: expect 15 to 20%`."""
    words = f"on {report.ranks:,} × {report.on.name}, {accuracy_words(report.on)}"
    if report.ops and report.on.source != DATA_SHEETS:
        words += f" ({report.measured:.0%} of the time of ops from measured sizes)"
    return words


def accuracy_words(on: Hardware) -> str:
    """The source of the speeds of GPUs and links, and by how much a step may differ from its
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


def _ratios(report: Report) -> Iterator[str]:
    """For instance `compute : communication is 0.9 over dp, 11.8 over tp`, the lowest first."""
    ratios = sorted((ratio, axes) for axes, ratio in report.ratios.items() if ratio < HIDDEN)
    if not ratios:
        return
    words = ", ".join(f"{ratio:.3g} over {axes}" for ratio, axes in ratios)
    below = " (below 1, computation cannot hide all of it)" if ratios[0][0] < 1 else ""
    yield f"compute : communication is {words}{below}"


def _looks_table(report: Report) -> Iterator[str]:
    """The looks at values, whose time the step's time leaves out."""
    rows = [("watch, besides", "seconds", "of a step")]
    total = 0.0
    for look in looks(report.program, report.step.seconds, report.on):
        rows.append((look.words, seconds(look.seconds), seconds(look.of_a_step)))
        total += look.of_a_step
    if len(rows) > 1:
        rows.append(("", "", f"{total / report.step.seconds:.2%}"))
        yield "\n".join(table(rows, "lrr"))


def _kernels_without_time(report: Report) -> Iterator[str]:
    """Kernels without a known time: the deterministic ones, which the IR or `replay` asks for."""
    program = report.program
    is_deterministic = bool(program.watch.replay) or any(
        dict(op.attrs).get(DETERMINISTIC.name) == "on" for op in program.ops
    )
    if is_deterministic and not report.on.synchronous:
        yield (
            "not in it: by how much deterministic kernels are slower, which is not known of"
            " torch's;\n"
            "FlashAttention-3's backward of attention takes up to 1.6 times as long"
            " (arXiv:2601.21824)"
        )


def _loads(report: Report) -> Iterator[str]:
    """The step where experts of a rank get more rows than others, for instance `worst: 3.10 s`."""
    others = list[str]()
    for name, spent in report.loads.items():
        if name != "balanced":
            others.append(f"{name}: {seconds(spent)}")
    if others:
        yield f"at an equal load of experts; {', '.join(others)}"


def _limit(report: Report) -> Iterator[str]:
    """For instance `limited by: products, at 66% of the GPU's peak`."""
    if not report.ops:
        return
    program, kinds = report.program, report.step.kinds
    kind = max(kinds, key=lambda kind: kinds[kind])
    rate, axes = report.get_rate_part(kind), kind.removeprefix(EXPOSED)
    if kind == HOST:
        yield "limited by: the host" + (f", which {_pace(report)}" if _issues(report) else "")
    elif kind == BUBBLE and (pipeline := program.pipeline):
        ranks, microbatches = program.axis(pipeline.axis).size, program.size(MICROBATCHES)
        yield (
            f"limited by: the bubble of {count_words(ranks, 'rank')} with"
            f" {count_words(microbatches, 'microbatch')}"
        )
    elif axes != kind:
        across = crosses(program, tuple(axes.split(" × ")), report.on.ranks_per_node)
        where = "across nodes" if across else "within a node"
        yield f"limited by: collectives over {axes}, {where}"
    elif rate is not None:
        yield f"limited by: {kind}, at {rate:.0%} of {RATES.get(kind, MEMORY)}"


MEMORY = "the rate of the GPU's memory"
RATES = {str(kind): "the GPU's peak" for kind in ("products", "attention")}


def _issues(report: Report) -> bool:
    """Whether the host has a row of its own, with its pace: it issues ops that another device
    computes.
    """
    return bool(report.ops) and not report.on.synchronous


def _pace(report: Report) -> str:
    """For instance `issues a layer in 1.1 ms, the GPU takes 7.9 ms`."""
    pace = report.pace
    part = "a microbatch"
    if pace.layers == "layers":
        part = "a layer"
    elif pace.layers:
        part = f"a layer of `{pace.layers}`"
    return f"issues {part} in {seconds(pace.issues)}, the GPU takes {seconds(pace.computes)}"


def _rank_words(report: Report) -> Iterator[str]:
    """The rank of a pipeline whose time the report gives."""
    if report.program.pipeline:
        yield (
            f"below, the time of rank {report.step.rank} of {report.program.pipeline.axis}, which"
            " computes longest"
        )


NONE = "would help: no plan with one setting changed"
NONE_FITS = "no plan with one setting changed fits; `scalec check` tries several"


def _advice(report: Report) -> Iterator[str]:
    if note := advice_note(report):
        yield note
    for rows in advice_tables(report):
        yield "\n".join(table(rows, "lrrl"))


def advice_note(report: Report) -> str:
    """A sentence where plans were looked for and none of them fits; empty otherwise."""
    if report.neighbours is None:
        return ""
    if not all(other.room.lacks for other in report.neighbours):
        return ""
    return NONE_FITS if report.room.lacks else NONE


def advice_tables(report: Report) -> Iterator[list[tuple[str, ...]]]:
    """Faster plans that fit, then faster ones that do not; of a plan that does not fit, the plans
    that do.

    Each table has a head and a row for each plan; none where none was looked for.
    """
    fit, too_large = list[Neighbour](), list[Neighbour]()
    for other in report.neighbours or ():
        if other.room.lacks:
            too_large.append(other)
        else:
            fit.append(other)
    verb = "fit" if report.room.lacks else "help"
    for head, others in ((f"would {verb}", fit), ("too large", too_large)):
        if others:
            rows = [_neighbour(report, other) for other in others[:SHOWN]]
            yield [(head, "seconds", "gain", "memory"), *rows]


def _neighbour(report: Report, other: Neighbour) -> tuple[str, str, str, str]:
    """A row for another plan: its setting, its seconds, its gain, its memory."""
    memory, room = amount(other.room.needs), other.room
    if room.lacks and room.capacity:
        memory += f", {amount(room.needs - room.capacity)} too many"
    elif room.close_to_full:
        memory += ", close to full"
    gain = f"{1 - other.seconds / report.step.seconds:.1%}"
    return other.words, seconds(other.seconds), gain, memory


def _rows(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """Kinds of time, the longest first, each with the plan's lines that take most; shorter ones
    add up.
    """
    step, kinds = report.step, dict(report.step.kinds)
    has_host_row = _issues(report)
    if has_host_row:
        kinds.setdefault(HOST, 0.0)
    others = 0.0
    for kind, spent in sorted(kinds.items(), key=lambda pair: -pair[1]):
        if spent < LEAST * step.seconds and not (has_host_row and kind == HOST):
            others += spent
            continue
        notes = "; ".join(_where(report, kind))
        yield kind, seconds(spent), f"{spent / step.seconds:.0%}", notes
    if others:
        yield "other", seconds(others), f"{others / step.seconds:.0%}", ""


def _at(step: StepTime, kind: str) -> Iterator[str]:
    """The lines that take most, for instance `llama.scale:28 2.98 s, :22 374.0 ms`; nothing
    where there is one.
    """
    lines = list[tuple[float, str]]()
    for (kind_of_line, line), spent in step.spent.items():
        if kind_of_line == kind:
            lines.append((spent, line))
    if len(lines) <= 1:
        return
    words, last_file = list[str](), ""
    for spent, line in sorted(lines, reverse=True)[:LINES]:
        if spent >= LEAST * step.seconds:
            file, number = line.rsplit(":", 1)
            # a file is named once for the lines of it that follow each other
            name = "" if file == last_file else file
            words.append(f"{name}:{number} {seconds(spent)}")
            last_file = file
    yield ", ".join(words)


def _where(report: Report, kind: str) -> Iterator[str]:
    """Notes on a kind of time: how much of it is seen, the host's pace, lines."""
    yield from _beside(report, kind)
    if _issues(report) and kind == HOST:
        yield _pace(report)
    yield from _at(report.step, kind)


def _beside(report: Report, kind: str) -> Iterator[str]:
    """For instance `8.70 s in all, 5.30 s beside computation`."""
    in_all, waited = report.sends_by_axes.get(kind.removeprefix(EXPOSED), (0.0, 0.0))
    if kind.startswith(EXPOSED) and in_all - waited > LEAST * report.step.seconds:
        yield f"{seconds(in_all)} in all, {seconds(in_all - waited)} beside computation"


def seconds(time: float) -> str:
    """For instance `8.70 s`, `3.1 ms` or `12 µs`."""
    if not time:
        return "0"
    if time >= 1:
        return f"{time:.2f} s"
    if time >= 1e-3:
        return f"{time * 1e3:.1f} ms"
    return f"{time * 1e6:.0f} µs"
