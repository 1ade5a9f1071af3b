"""`scalec report`: a plan, or two side by side, as one page that needs nothing else.

Each section is gathered as a value of its own and then drawn.  Non-goals: compiling and proving
(`cli`).
"""

from collections.abc import Sequence
from typing import Any

from ...analysis.certificate import FULL_ROWS, KEPT, NOT_EVALUATED, RUN_TIME, Proof, trust_words
from ...syntax.package_data import filled
from ..diff import figures, rows
from ..drawing import styles
from ..summary import headline, tokens
from . import lines, mesh, model, pipeline, speed
from . import memory as memory_of
from .calls import Call, busiest, by_rank
from .subject import Subject

__all__ = ["MARK", "Subject", "notebook", "report"]

MARK = "Written by scalec report"
"""A mark in the opening lines of every page."""


def report(*subjects: Subject, tokens: float | None = None) -> str:
    """The page of a plan, or of two with what differs; `tokens` to train on, by default those
    of the plan's steps.
    """
    views = [_view(of, tokens) for of in subjects]
    names = [of.source.path for of in subjects]
    fills: dict[str, str] = {}
    for view in views:
        fills |= view["fills"]
    return filled(
        "report.html.j2",
        escaped=True,
        mark=MARK,
        title=" and ".join(names),
        styles=styles(fills),
        plans=views,
        differences=_differences(*subjects) if len(subjects) == 2 else [],
    )


def notebook(page: str, height: int = 900) -> str:
    """A page inside a cell of a notebook, apart from the notebook's own styles."""
    from html import escape

    return (
        f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: {height}px; border:'
        ' 0"></iframe>'
    )


def _view(of: Subject, count: float | None) -> dict[str, Any]:
    """All sections of a plan, drawn."""
    program, ranks = of.program, by_rank(of)
    sent = busiest(ranks)
    colours = {axis.name: at % 8 for at, axis in enumerate(program.axes)}
    layers = model.model(program, sent, ranks)
    rows_, figures_ = pipeline.pipeline(of), speed.speed(of, count)
    memory = memory_of.memory(of, rows_)
    return {
        "path": of.source.path,
        "headline": headline(program),
        "tokens": tokens(program),
        "mesh": mesh.drawing(mesh.mesh(of, sent)),
        **_state_calls(layers.state),
        "models": model.drawings(layers, colours),
        "memory": memory,
        "memory_svg": memory_of.drawing(memory),
        "pipeline": rows_,
        "pipelines": pipeline.drawings(rows_) if rows_ else [],
        "fills": rows_.fills if rows_ else {},
        "speed": figures_,
        "speed_svg": speed.drawing(figures_) if figures_.kinds else "",
        "certificate": _certificate(of),
        "texts": lines.texts(of, sent),
    }


NEGLIGIBLE = 0.001
"""The part of all bytes sent below which a call for parameters, gradients or stages is folded
away.
"""


def _state_calls(calls: Sequence[Call]) -> dict[str, Sequence[Call]]:
    """The calls for parameters, gradients and stages, and apart the ones that send next to
    nothing.
    """
    least = NEGLIGIBLE * sum(call.sent for call in calls)
    large = [call for call in calls if call.sent >= least]
    small = [call for call in calls if call.sent < least]
    return {"state": large, "small_state": small}


FIRST = (
    "rates",
    "seconds",
    "memory",
    "plan",
    "sent over",
    "calls",
    "input of calls",
    "parameters",
    "values",
)
"""The sections of differences, the most telling first."""


def _differences(first: Subject, second: Subject) -> list[tuple[str, list[tuple[str, ...]]]]:
    """By section the rows of `scalec diff` that differ."""
    found = [*rows(figures(first.program, first.time), figures(second.program, second.time))]
    each = (
        (name, [row.cells() for row in found if row.section == name and row.differs])
        for name in FIRST
    )
    return [(name, cells) for name, cells in each if cells]


def _certificate(of: Subject) -> list[tuple[str, str]]:
    """A name and a sentence each."""
    found = [
        (
            "placements",
            "Each op's placements are inferred from its operands' and compared, after every pass.",
        )
    ]
    proof = of.proof
    if proof is None:
        return [*found, ("values", f"The step's values are {NOT_EVALUATED}."), *_always()]
    found += _proved(proof)
    if not_tried := trust_words(proof.trusted, proved=True):
        found.append(("not tried here", not_tried))
    found.append(
        (
            "not covered",
            "Rounding, kernels, the network, and sizes other than those of the small meshes.",
        )
    )
    return [*found, *_always()]


def _proved(proof: Proof) -> list[tuple[str, str]]:
    kept = f"  Evaluated {KEPT}." if proof.kept else ""
    sure = f"Evaluated as {proof.field()}.{kept}"
    rows = f"For stages, {proof.rows()}; {FULL_ROWS}." if proof.stages else ""
    each = f"So it is with each of {proof.elastic}." if proof.elastic else ""
    step = f"{proof.results()} equal those of one device, on {proof.where()}, at small sizes."
    said = {
        "values": f"{step[0].upper()}{step[1:]}",
        "sizes": each,
        "pipeline": rows,
        "certainty": sure,
    }
    ops = f"All {proof.ops} ops of the step took part, of {proof.kinds} kinds."
    return [(name, text) for name, text in {**said, "ops": ops}.items() if text]


def _always() -> list[tuple[str, str]]:
    emitted = (
        "`scalec compile` reads train.py back and matches it to the program shown here, op for op."
    )
    return [("train.py", emitted), ("a run", f"{RUN_TIME[0].upper()}{RUN_TIME[1:]}.")]
