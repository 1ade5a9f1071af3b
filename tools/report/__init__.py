"""`scalec report`: a plan, or two side by side, as one page that needs nothing else.

Each section is gathered as a value of its own and then drawn.  Non-goals: compiling and proving
(`cli`).
"""

from collections.abc import Sequence
from typing import Any

from ...compiler.analysis.certificate import (
    FULL_ROWS,
    KEPT,
    NOT_EVALUATED,
    RUN_TIME,
    Proof,
    trust_words,
)
from ...compiler.reports.summary import headline, tokens
from ...compiler.syntax.package_data import fill_template
from ..diff.differences import figures, rows
from ..drawing import SERIES, styles
from . import lines, mesh, model, pipeline, speed
from . import memory as memory_of
from .calls import Call, busiest, by_rank
from .subject import Subject

__all__ = ["MARK", "Subject", "notebook", "report"]

MARK = "Written by scalec report"
"""A mark in the opening lines of every page."""


def report(*subjects: Subject, tokens: float | None = None) -> str:
    """The page of a plan, or of two plans with what differs; `tokens` to train on, by default
    all tokens of the plan's steps.
    """
    views: list[dict[str, Any]] = []
    names: list[str] = []
    fills: dict[str, str] = {}
    for subject in subjects:
        view = _view(subject, tokens)
        views.append(view)
        names.append(subject.source.path)
        fills |= view["fills"]
    return fill_template(
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


def _view(subject: Subject, count: float | None) -> dict[str, Any]:
    """All sections of a plan, drawn."""
    program, ranks = subject.program, by_rank(subject)
    sent = busiest(ranks)
    colours = {axis.name: number % SERIES for number, axis in enumerate(program.axes)}
    layers = model.model(program, sent, ranks)
    rows_of_pipeline = pipeline.pipeline(subject)
    pipelines, fills = list[str](), dict[str, str]()
    if rows_of_pipeline:
        pipelines = pipeline.drawings(rows_of_pipeline)
        fills = rows_of_pipeline.fills
    speed_of_plan = speed.speed(subject, count)
    speed_svg = ""
    if speed_of_plan.kinds:
        speed_svg = speed.drawing(speed_of_plan)
    memory = memory_of.memory(subject, rows_of_pipeline)
    return {
        "path": subject.source.path,
        "headline": headline(program),
        "tokens": tokens(program),
        "mesh": mesh.drawing(mesh.mesh(subject, sent)),
        **_state_calls(layers.state),
        "models": model.drawings(layers, colours),
        "memory": memory,
        "memory_svg": memory_of.drawing(memory),
        "pipeline": rows_of_pipeline,
        "pipelines": pipelines,
        "fills": fills,
        "speed": speed_of_plan,
        "speed_svg": speed_svg,
        "certificate": _certificate(subject),
        "texts": lines.annotated_files(subject, sent),
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
    all_rows = rows(figures(first.program, first.time), figures(second.program, second.time))
    cells_by_section: dict[str, list[tuple[str, ...]]] = {name: [] for name in FIRST}
    for row in all_rows:
        if row.differs:
            cells_by_section[row.section].append(row.cells())
    return [(name, cells) for name, cells in cells_by_section.items() if cells]


def _certificate(subject: Subject) -> list[tuple[str, str]]:
    """The parts of a plan that were proved, and the others: a name and a sentence each."""
    placements = (
        "Each op's placements are inferred from its operands' and compared, after every pass."
    )
    sentences = [("placements", placements)]
    proof = subject.proof
    if proof is None:
        return [*sentences, ("values", f"The step's values are {NOT_EVALUATED}."), *_always()]
    sentences += _proof_sentences(proof)
    if not_tried := trust_words(proof.trusted, proved=True):
        sentences.append(("not tried here", not_tried))
    not_covered = "Rounding, kernels, the network, and sizes other than those of the small meshes."
    sentences.append(("not covered", not_covered))
    return [*sentences, *_always()]


def _proof_sentences(proof: Proof) -> list[tuple[str, str]]:
    """The proof's words about each of its parts that this plan has."""
    step = f"{proof.results()} equal those of one device, on {proof.where()}, at small sizes."
    sentences = [("values", f"{step[0].upper()}{step[1:]}")]
    if proof.elastic:
        sentences.append(("sizes", f"So it is with each of {proof.elastic}."))
    if proof.stages:
        sentences.append(("pipeline", f"For stages, {proof.rows()}; {FULL_ROWS}."))
    certainty = f"Evaluated as {proof.field()}."
    if proof.kept:
        certainty += f"  Evaluated {KEPT}."
    sentences.append(("certainty", certainty))
    ops = f"All {proof.ops} ops of the step took part, of {proof.kinds} kinds."
    sentences.append(("ops", ops))
    return sentences


def _always() -> list[tuple[str, str]]:
    emitted = (
        "`scalec compile` reads train.py back and matches it to the program shown here, op for op."
    )
    return [("train.py", emitted), ("a run", f"{RUN_TIME[0].upper()}{RUN_TIME[1:]}.")]
