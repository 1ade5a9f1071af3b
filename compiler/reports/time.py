"""The report of `scalec explain time`: what a step takes, on what, and how much of the GPU's peak it is.

Non-goals: the times themselves (`analysis.time`).
"""

from collections.abc import Iterator

from ..analysis.time.prices import EXPOSED
from ..analysis.time.report import Report
from ..analysis.time.step import StepTime
from ..config.units import amount
from .summary import headline

LINES = 3
"""How many lines of the plan are named for each kind of time."""

LEAST = 0.0005
"""The least share of a step that a row has."""


def time(it: Report) -> str:
    """The time of a step, for people."""
    source = f"on {it.ranks:,} × {it.on.name}, by data sheets: expect 15 to 20%"
    summary = f"{seconds(it.step.seconds)} a step, {it.tokens:,.0f} tokens/s/GPU, MFU {it.mfu:.1%}, HFU {it.hfu:.1%}"
    rows = [("", "seconds", "share", "at"), *_rows(it)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (f"{kind:{widths[0]}}  {s:>{widths[1]}}  {part:>{widths[2]}}  {at}".rstrip() for kind, s, part, at in rows)
    said = "\n".join((summary, *_full(it)))
    return "\n\n".join((f"{headline(it.program)}\n{source}", said, "\n".join(lines), MFU))


MFU = (
    "MFU: 6 operations for each token and parameter but the embedding's, and attention's of the pairs that are seen;\n"
    "HFU: all operations that are done, backward's recomputation too."
)


def _full(it: Report) -> Iterator[str]:
    """Memory, where the step does not fit or hardly."""
    if it.close_to_full and it.capacity:
        needs = f"needs {amount(it.needs)} of {amount(it.capacity)}"
        yield f"does not fit: {needs}" if it.needs > it.capacity else f"close to full: time cannot be told; {needs}"


def _rows(it: Report) -> Iterator[tuple[str, str, str, str]]:
    """Kinds of time, the longest first, each with the plan's lines that take most; shorter ones add up."""
    rest, step = 0.0, it.step
    for kind, spent in sorted(step.kinds.items(), key=lambda pair: -pair[1]):
        if spent < LEAST * step.seconds:
            rest += spent
            continue
        yield kind, seconds(spent), f"{spent / step.seconds:.0%}", "; ".join((*_beside(it, kind), *_at(step, kind)))
    if rest:
        yield "other", seconds(rest), f"{rest / step.seconds:.0%}", ""


def _at(step: StepTime, kind: str) -> Iterator[str]:
    """The lines that take most, for instance `llama.scale:28 2.98 s, :22 374.0 ms`; nothing where there is one."""
    lines = sorted(((spent, line) for (of, line), spent in step.spent.items() if of == kind), reverse=True)
    if len(lines) > 1:
        most = [(spent, *line.rsplit(":", 1)) for spent, line in lines[:LINES] if spent >= LEAST * step.seconds]
        files = ["", *(file for _, file, _ in most)]
        yield ", ".join(
            f"{'' if file == before else file}:{line} {seconds(spent)}"
            for (spent, file, line), before in zip(most, files, strict=False)
        )


def _beside(it: Report, kind: str) -> Iterator[str]:
    """For instance `8.70 s in all, 5.30 s beside computation`."""
    in_all, waited = it.sent.get(kind.removeprefix(EXPOSED), (0.0, 0.0))
    if kind.startswith(EXPOSED) and in_all - waited > LEAST * it.step.seconds:
        yield f"{seconds(in_all)} in all, {seconds(in_all - waited)} beside computation"


def seconds(time: float) -> str:
    """For instance `8.70 s`, `3.1 ms` or `12 µs`."""
    return f"{time:.2f} s" if time >= 1 else f"{time * 1e3:.1f} ms" if time >= 1e-3 else f"{time * 1e6:.0f} µs"
