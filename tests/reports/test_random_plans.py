"""Random plans whose GPU's speed is known: all that is told of a plan can be told of them."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from scalec.compiler.reports.value import explain_value, names_of
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import lower
from scalec.testing.random_plans import drafts
from scalec.tools.language_server.diagnose import get_shown_diagnostics
from scalec.tools.language_server.document import compile_document, parse_document
from scalec.tools.language_server.hints import colours, hints
from scalec.tools.language_server.hover import hover
from scalec.tools.language_server.outline import outline
from scalec.tools.report import Subject, report
from scalec.tools.report.memory import memory
from scalec.tools.report.pipeline import pipeline

ROOT = Path(__file__).parents[2]
CLUSTER = "\ncluster { gpu = h100_sxm }\n"


@pytest.mark.long
@settings(max_examples=300)
@given(drafts())
def test_all_is_told_of_random_plans(plan: str) -> None:
    document = compile_document(
        parse_document(
            None, Source(str(ROOT / "plan.scale"), plan if "cluster {" in plan else plan + CLUSTER)
        )
    )
    if not document.facts:
        assert get_shown_diagnostics(document)
        return
    assert document.syntax
    for it in document.syntax.mentions:
        hover(document, it.span.line, it.span.column)
    assert all([*colours(document), *hints(document, 1, 9_999), *outline(document)])

    facts = document.facts
    subject = Subject(document.source, facts.model, facts.program)
    drawn = memory(subject, pipeline(subject))
    assert [*drawn.xs] == sorted(drawn.xs)
    assert report(subject)
    worked, rows = lower(facts.model, "propagate"), {row.name: row for row in facts.rows}
    placed = lower(worked, "insert_collectives")
    for name in names_of(facts.model):
        assert explain_value(name, worked, placed, facts.program, rows)
