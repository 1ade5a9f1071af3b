"""`scalec report`: its numbers are those of `scalec explain`, and the page is whole, small and
needs nothing else.
"""

import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from attrs import evolve

from scalec.compiler import cli
from scalec.compiler.analysis.communication import collectives, places
from scalec.compiler.analysis.link_traffic import get_sent_bytes
from scalec.compiler.analysis.memory import account
from scalec.compiler.config.units import amount
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.reports.explain import memory as explained_memory
from scalec.tools.drawing import LETTER, columns, ticks
from scalec.tools.report import Subject, model, report
from scalec.tools.report.calls import busiest, by_rank
from scalec.tools.report.command import subject
from scalec.tools.report.lines import annotated_files
from scalec.tools.report.memory import memory
from scalec.tools.report.mesh import mesh
from scalec.tools.report.pipeline import pipeline

PLANS = Path(__file__).parents[3] / "plans"
SPACE = "{http://www.w3.org/2000/svg}"
SEVERAL = ("tiny_llama", "tiny_pipeline", "llama3_70b", "llama3_405b")
EMPTY = {"meta", "rect", "path", "line", "circle"}


@cache
def plan(name: str) -> Subject:
    return subject(PLANS / f"{name}.scale", proved=name.startswith("tiny"))


@cache
def page(*names: str) -> str:
    return report(*map(plan, names))


class Words(HTMLParser):
    """The words of a page, a line for each element, and whether its elements are closed in
    order.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.lines: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in EMPTY or self.get_starttag_text() == f"<{tag}>":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and not {"style", "title"} & {*self.open}:
            self.lines.append(data.strip())


@pytest.fixture(params=SEVERAL)
def each(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    "names", [("tiny_llama",), ("tiny_pipeline",), ("llama3_70b",), ("tiny_llama", "tiny_pipeline")]
)
def test_the_words_of_pages(names: tuple[str, ...], golden: Callable[[str, str], None]) -> None:
    words = Words(page(*names).replace(str(PLANS), "plans"))
    golden(f"report/{'_and_'.join(names)}.txt", "\n".join(words.lines) + "\n")


def test_a_page_needs_nothing_else_and_is_small(each: str) -> None:
    text = page(each)
    assert len(text.encode()) < 400_000
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", text)
    assert all(link.startswith('"#') for link in re.findall(r'href=("[^"]*")', text))
    assert {*re.findall(r"https?://[^\"<\s]*", text)} == {"http://www.w3.org/2000/svg"}


def test_a_page_is_well_formed_and_its_links_lead_somewhere(each: str) -> None:
    text = page(each)
    assert not Words(text).open
    assert {*re.findall(r'href="#([^"]*)"', text)} <= {*re.findall(r'id="([^"]*)"', text)}


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(it) for it in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_a_table_over_several_sheets_of_paper_has_its_head_on_each(each: str) -> None:
    assert 0 < page(each).count("<table>") == page(each).count("<thead>")


def test_types_of_tiny_fives_values_are_whole_beside_backward() -> None:
    of = subject(PLANS / "tiny_five.scale", proved=False)
    drawn = model.drawings(model.model(of.program, busiest(ranks := by_rank(of)), ranks), {})
    assert "[batch/dp, seq/cp, heads/tp, head_dim]" in drawn[1]
    assert "head_di…" not in "".join(drawn)


def test_drawings_are_well_formed_and_no_words_leave_them(each: str) -> None:
    for drawing in drawings(page(each)):
        width = float(drawing.get("viewBox", "").split()[2])
        for text in drawing.iter(f"{SPACE}text"):
            x, long, named = (
                float(text.get("x", "")),
                len(text.text or "") * LETTER,
                text.get("class", "").split(),
            )
            long *= 9.5 / 11 if "small" in named else 1
            left = x - long / 2 if "mid" in named else x - long if "end" in named else x
            assert left > -3, text.text
            assert left + long < width + 3, text.text


def test_every_class_of_a_drawing_has_a_style(each: str) -> None:
    text = page(each)
    used = {
        name
        for it in drawings(text)
        for shape in it.iter()
        for name in shape.get("class", "").split()
    }
    assert used - {"drawing", "act", "s7", "p7"} <= {
        *re.findall(r"\.(\w+)", text.partition("</style>")[0])
    }


@pytest.mark.parametrize("name", [*SEVERAL, "llama3_8b", "gemma2_9b", "mixtral_8x7b"])
def test_memory_is_that_of_explain(name: str) -> None:
    of = plan(name)
    found = memory(of, pipeline(of))
    totals = [sum(sizes) for sizes in zip(*(owner.bytes for owner in found.owners), strict=True)]
    scalars = account(of.program).needs - totals[found.peak]
    assert max(totals) == totals[found.peak]
    assert scalars == 0
    assert "total" in explained_memory(of.program)
    assert amount(found.needs) in explained_memory(of.program)
    assert found.peak_words in explained_memory(of.program)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama3_70b", ["forward", "backward", "update"]),
        ("gpt2_124m", ["forward", "backward", "update"]),
        ("mixtral_8x7b", ["warm-up", "steady", "cool-down", "update"]),
    ],
)
def test_memory_is_drawn_in_time(name: str, parts: list[str]) -> None:
    """A microbatch and the update, or a row, are as long as `explain time` says; moments follow
    each other.
    """
    of = plan(name)
    found = memory(of, pipeline(of))
    assert of.time
    assert found.seconds
    assert [part for part, _ in found.phases] == parts
    starts = [start for _, start in found.phases]
    assert starts == sorted(starts)
    assert [*found.xs] == sorted(found.xs)
    if of.program.pipeline:
        assert found.seconds == pytest.approx(of.time.step.seconds)
    else:
        update = 1 - starts[-1]
        times = of.program.size("microbatches")
        step = found.seconds * (starts[-1] * times + update)
        assert step == pytest.approx(of.time.step.seconds)


def test_memory_without_seconds_is_drawn_by_ops() -> None:
    found = memory(plan("tiny_llama"), None)
    assert found.seconds is None
    assert {round((b - a) * 128) for a, b in pairwise(found.xs)} == {1}


def test_calls_are_those_of_explain(each: str) -> None:
    of = plan(each)
    most = max(
        (collectives(of.program, rank) for rank in places(of.program)),
        key=lambda it: sum(map(get_sent_bytes, it)),
    )
    assert [call.sent for call in busiest(by_rank(of))] == [*map(get_sent_bytes, most)]


def test_every_call_is_in_the_drawing(each: str) -> None:
    """At its place, or in the table; of a pipeline those of other ranks too, at places where
    this one has none.
    """
    of = plan(each)
    ranks = by_rank(of)
    found, known = model.model(of.program, busiest(ranks), ranks), busiest(ranks)
    rows = [row for stretch in found.stretches for row in stretch.rows]
    drawn = [call for row in rows for call in (*row.calls, *row.back)]
    sums = {
        use: sum(call.sent for call in known if call.use == use)
        for use in ("activations", "totals")
    }
    if not of.program.pipeline:
        assert sum(call.sent for call in drawn) == sums["activations"]
    assert {
        (it.value, it.where) for own in by_rank(of) for it in own if it.use == "activations"
    } >= {(it.value, it.where) for it in drawn}
    assert sum(call.sent for call in found.state) == sum(call.sent for call in known) - sum(
        sums.values()
    )


def test_every_parameter_is_in_the_drawing(each: str) -> None:
    of = plan(each)
    stretches = model.model(of.program, busiest(by_rank(of)), by_rank(of)).stretches
    shards = {shard.name for it in stretches for row in it.rows for shard in row.shards}
    assert shards == {param.name for param in of.program.params}


def test_a_long_layer_is_drawn_in_parts_that_are_legible_on_paper() -> None:
    of = plan("deepseek_v3")
    it = model.model(of.program, busiest(ranks := by_rank(of)), ranks)
    parts = model.drawings(it, {})
    heights = [float(re.findall(r'viewBox="0 0 1080 ([\d.]+)"', part)[0]) for part in parts]
    assert len(parts) == len(it.stretches) + 1
    assert max(heights) < 900
    assert [">layers_1 × 58, drawn once; continued<" in part for part in parts].count(True) == 1
    assert len(re.findall(">contract", "".join(parts))) == len(
        re.findall(">contract", model.draw_model(it, {}).svg(""))
    )


def test_layers_of_two_dims_are_cut_into_stages_together() -> None:
    found = model.model(plan("deepseek_v3").program, (), ())
    assert [(it.dim, it.stages) for it in found.stretches if it.dim] == [
        ("layers_0", "; cut, with layers_1, into 32 stages"),
        ("layers_1", "; cut, with layers_0, into 32 stages"),
    ]


def test_the_most_that_a_rank_of_a_pipeline_has_is_what_the_plan_needs() -> None:
    of = plan("deepseek_v3")
    rows, most = pipeline(of), account(of.program)
    assert rows
    assert most.rank is not None
    _, *ranks = rows.table
    assert ranks[most.rank][-1] == amount(most.needs)


def test_the_groups_of_a_mesh() -> None:
    found = mesh(plan("llama3_70b"), busiest(by_rank(plan("llama3_70b"))))
    dp, tp = found.groups
    assert (dp.axis, dp.crosses, dp.more) == ("dp", True, 60)
    assert [(node.number, {*node.group}) for node in dp.nodes] == [
        (at, {8 * at, 8 * at + 4}) for at in range(4)
    ]
    assert (tp.axis, tp.crosses, tp.more) == ("tp", False, 0)
    assert {*tp.nodes[0].group} == {*range(4)}


def test_notes_are_those_of_a_line_of_its_own_file_where_two_have_one_name(tmp_path: Path) -> None:
    path = tmp_path / "llama.scale"
    path.write_text((PLANS / "tiny_llama.scale").read_text().replace('"models/', '"scalec:models/'))
    of = subject(path, proved=False)
    own, used = annotated_files(of, busiest(by_rank(of)))
    assert (own.name, used.name) == ("llama.scale", "models/llama.scale")
    assert not any(line.badge for line in own.lines)
    assert {line.text.split()[0] for line in own.lines if line.notes} == {
        "mesh",
        "batch",
        "vocab,",
        "seq",
    }
    same = plan("tiny_llama")
    assert used.lines == annotated_files(same, busiest(by_rank(same)))[1].lines


def test_a_page_of_ir_text_has_the_pictures_of_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "tiny_llama.ir"
    path.write_text(print_ir(plan("tiny_llama").program))
    of = subject(path, proved=False)
    assert memory(of, None) == memory(plan("tiny_llama"), None)
    assert path.name in report(of)


def test_ticks_are_round_and_few() -> None:
    assert [*ticks(83)] == [0, 20, 40, 60, 80]
    assert [*ticks(0.7)] == pytest.approx([0, 0.2, 0.4, 0.6])
    assert [*ticks(0)] == []


def test_a_column_has_its_highest_point() -> None:
    assert columns([(0.0, 1), (0.1, 5), (0.2, 2), (0.9, 3)], 2) == [1, 3]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = str(PLANS / "tiny_llama.scale")
    for options in ((), ("--no-verify",), ("-o", "tiny_llama.html", "--tokens", "15T")):
        assert cli.main(("report", tiny, *options)) == 0
        assert capsys.readouterr().out == "wrote tiny_llama.html\n"
    Path("mine.html").write_text("<p>mine</p>")
    assert cli.main(("report", tiny, "-o", "mine.html")) == 2
    assert "was not written by scalec" in capsys.readouterr().err
    assert cli.main(("report", tiny, tiny, tiny)) == 2
    assert "report takes one plan, or two to compare" in capsys.readouterr().err


def test_advice_is_that_of_explain_time_and_only_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = subject(PLANS / "llama3_70b.scale", proved=False, advised=True)
    plain = plan("llama3_70b")
    assert cli.main(("explain", "time", str(PLANS / "llama3_70b.scale"))) == 0
    explained = capsys.readouterr().out
    assert asked.neighbours
    lines = Words(report(asked)).lines
    for neighbour in asked.neighbours:
        assert neighbour.words in lines
        assert neighbour.words in explained
    assert "would help" in lines
    assert "would help" not in Words(report(plain)).lines


def test_a_page_says_where_no_advice_was_found() -> None:
    asked = evolve(plan("llama3_70b"), neighbours=())
    assert "would help: no plan with one setting changed" in Words(report(asked)).lines


def test_calls_that_send_next_to_nothing_are_folded_and_none_is_lost() -> None:
    of = plan("llama3_70b")
    ranks = by_rank(of)
    every = model.model(of.program, busiest(ranks), ranks).state
    open_part, _, folded = report(of).partition("<details>")
    folded, _, _ = folded.partition("</details>")
    total = sum(call.sent for call in every)
    small = [call for call in every if call.sent < total / 1000]
    assert 0 < len(small) < len(every)
    assert folded.count("<tr><td>") == len(small)
    assert f"{len(small)} more" in folded
    (table,) = re.findall(r"<table>.*?</table>", open_part, re.DOTALL)
    assert table.count("<tr><td>") == len(every) - len(small)


@pytest.mark.parametrize("given", ["", "x", "-3", "0", "1e99", "nan"])
def test_tokens_that_cannot_be(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(("report", "plan.scale", f"--tokens={given}"))
    assert f"`{given}` is not a number of tokens, as 300B or 15T" in capsys.readouterr().err
