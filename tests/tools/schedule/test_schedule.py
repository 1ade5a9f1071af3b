"""`scalec schedule`: what it draws is when things happen, and what it writes, others can read."""

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scalec.compiler import cli
from scalec.compiler.analysis.stage_schedule import estimate_times
from scalec.compiler.schedules.actions import ScheduleError, Work
from scalec.compiler.schedules.csv_file import parse_csv
from scalec.compiler.schedules.p2p import with_messages
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.schedules.timeline import Slot, Times, simulate
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.tools.drawing import Canvas
from scalec.tools.schedule.figures import FORMULAS, figures, find_formula
from scalec.tools.schedule.picture import HUES, Picture, label, picture, terminal_colour, ticks
from scalec.tools.schedule.rows import (
    LEFT,
    MOST,
    WIDTH,
    draw,
    excerpt,
    html,
    lines,
    messages,
    style,
    svg,
)
from scalec.tools.schedule.terminal import GAP, drawing
from scalec.tools.schedule.trace import trace

PLAN = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 8  hidden = 4  wide = 8  layers = 4 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    x = x + silu(x @ up[hidden -> wide]) @ down[wide -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { pp = 2 }
shard { layers over pp }
pipeline { schedule = interleaved_1f1b(chunks=2) }
train {
  seq = 16  global_batch = 8  microbatch = 2  steps = 1
  optimizer sgd { lr = 0.1 }
  data text { files = ["a"] }
}
"""

TIMES = {
    "whole": (1, 1, 1, 0),
    "uneven": (1, 1.3, 0.7, 0.2),
    "decimals": (0.1, 0.1, 0.1, 0.1),
    "apart": (1, 40, 3, 9),
}

Run = Callable[..., tuple[int, str, str]]


def drawn(
    name: str,
    ranks: int = 4,
    microbatches: int = 12,
    chunks: int | None = None,
    times: str = "uneven",
) -> Picture:
    made = SCHEDULES[name](ranks, microbatches, chunks)
    sent = with_messages(made, Times.uniform(made.stages))
    return picture(f"{name} & <others>", name, sent, Times.uniform(made.stages, *TIMES[times]))


@pytest.fixture(params=[(name, times) for name in SCHEDULES for times in TIMES], ids="-".join)
def each(request: pytest.FixtureRequest) -> Picture:
    """Every schedule with every kind of times."""
    name, times = request.param
    return drawn(name, times=times)


@pytest.fixture
def scalec(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """`scalec(*options)` runs `scalec schedule` on a plan: its exit status, standard output and
    standard error.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.delenv("NO_COLOR", raising=False)
    Path("tiny.scale").write_text(PLAN)

    def run(*options: str) -> tuple[int, str, str]:
        try:
            status = cli.main(("schedule", "tiny.scale", *options))
        except SystemExit as end:  # as argparse ends
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


# ---- the terminal


def test_what_is_shown(scalec: Run, golden: Callable[[str, str], None]) -> None:
    status, out, err = scalec()
    assert (status, err) == (0, "")
    golden("schedule/tiny.txt", out)
    assert out in (Path(__file__).parents[3] / "docs" / "schedule.md").read_text()


def test_what_is_shown_where_messages_take_time(
    scalec: Run, golden: Callable[[str, str], None]
) -> None:
    golden("schedule/tiny_late.txt", scalec("--unit", "--times", "b=1.5, comm=0.2")[1])


def test_what_is_shown_of_stages_that_are_taken_as_alike(
    scalec: Run, golden: Callable[[str, str], None]
) -> None:
    out = scalec("--unit")[1]
    golden("schedule/tiny_unit.txt", out)
    bubble = "".join(out.rpartition("\nbubble: ")[1:])
    assert bubble in (Path(__file__).parents[3] / "docs" / "schedule.md").read_text()


def costs() -> Times:
    """What the plan's stages are estimated to take, to a thousandth."""
    program = compile_plan(Source("tiny.scale", Path("tiny.scale").read_text()))
    assert program.pipeline
    times = estimate_times(program, program.pipeline)
    return times.round_times()


def slots(file: str) -> list[tuple[str, float, float]]:
    """The actions of a trace, with when each begins and how long it takes."""
    events = json.loads(Path(file).read_text())["traceEvents"]
    return [(it["name"], it["ts"] / 1000, it["dur"] / 1000) for it in events if it["ph"] == "X"]


def test_stages_take_what_they_cost_in_every_form(scalec: Run) -> None:
    text = scalec()[1]
    scalec("--html", "x.html", "--csv", "x.csv", "--trace", "x.json", "--svg", "x.svg")
    times = costs()
    assert len({*times.forward}) > 1
    timeline = simulate(parse_csv(Path("x.csv").read_text()), times)
    drawn = [(str(it.action), it.start, it.end - it.start) for row in timeline.slots for it in row]
    assert slots("x.json") == [
        (name, pytest.approx(start), pytest.approx(took)) for name, start, took in drawn
    ]
    total = f"messages 0; {timeline.total:.9g} in all, bubble {timeline.bubble:.1%}"
    for shown in (text, *(Path(f"x.{form}").read_text() for form in ("html", "json", "svg"))):
        assert total in shown


def test_times_that_are_given_are_those_of_all_stages(scalec: Run) -> None:
    """The others stay what stages cost."""
    scalec("--trace", "x.json", "--times", "f=2")
    forwards = {took for name, _, took in slots("x.json") if "F" in name}
    backwards = {took for name, _, took in slots("x.json") if "B" in name}
    assert forwards == {2}
    assert backwards == {
        round(b + w, 3) for b, w in zip(costs().input, costs().weight, strict=True)
    }


def test_a_stage_that_costs_next_to_nothing_has_no_label(scalec: Run) -> None:
    """Room for one would leave none on any page."""
    # the first stage is an embedding alone
    Path("tiny.scale").write_text(PLAN.replace("layers = 4", "layers = 2"))
    out = scalec()[1]
    assert "1F0" in out
    assert "0F0" not in out
    scalec("--svg", "x.svg", "--html", "x.html", "--csv", "x.csv")
    root = ElementTree.parse("x.svg").getroot()
    assert float(root.get("width", "")) < 2000
    shown = [it.text for it in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {it for it in shown if it and it.endswith("F0")} == {"1F0", "2F0", "3F0"}
    assert "0F0" in Path("x.csv").read_text()


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("rank ") and "stages" not in line]


def get_labels(it: Picture, row: tuple[Slot, ...]) -> list[str]:
    """The labels of a row, without colours."""
    return [str(slot.action) if it.depth > 1 else label(slot.action) for slot in row]


def test_all_actions_stand_in_their_order_and_columns(each: Picture) -> None:
    lines = rows(drawing(each, 10**9, colour=False))
    longest = max(len(one) for row in each.timeline.slots for one in get_labels(each, row))
    scale = (longest + 1) / min(slot.end - slot.start for slot in each.slots)
    for line, row in zip(lines, each.timeline.slots, strict=True):
        cells = list(re.finditer(r"[0-9A-Z]+─*", line.removeprefix("rank ")[1:]))
        assert [cell[0].rstrip("─") for cell in cells] == get_labels(each, row)
        for cell, slot in zip(cells, row, strict=True):
            assert abs(cell.start() - len("  ") - slot.start * scale) <= 0.5 + 1e-6
            assert abs(cell.end() + 1 - len("  ") - slot.end * scale) <= 0.5 + 1e-6


@pytest.mark.parametrize("width", [30, 61, 100])
def test_what_is_too_wide_loses_its_middle(each: Picture, width: int) -> None:
    text = drawing(each, width, colour=False)
    for line, row in zip(rows(text), each.timeline.slots, strict=True):
        assert len(line) <= width
        head, cut, tail = line.removeprefix("rank ")[1:].partition(GAP.rstrip())
        assert cut
        all_of_them, first, last = (
            get_labels(each, row),
            head.replace("─", "").split(),
            tail.replace("─", "").split(),
        )
        assert all_of_them[: len(first)] == first
        assert all_of_them[len(all_of_them) - len(last) :] == last
    assert "the middle is left out" in text


def test_a_terminal_has_colours(scalec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = scalec()[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    painted = scalec()[1]
    assert f"48;5;{terminal_colour(0, Work.FORWARD)}mF0\x1b[0m" in painted
    bare = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in rows(painted)]
    assert bare == [re.sub(r"\d([FB]\d)─*", r"\1", line).split() for line in rows(plain)]
    monkeypatch.setenv("NO_COLOR", "1")
    assert scalec()[1] == plain


def test_colours_stand_for_chunks() -> None:
    it = drawn("zbv", times="whole")
    for line, row in zip(rows(drawing(it, 10**9, colour=True)), it.timeline.slots, strict=True):
        cells = re.findall(r"48;5;(\d+)m(\w+) *\x1b", line)
        assert cells == [
            (str(terminal_colour(slot.action.stage // 4, slot.action.work)), label(slot.action))
            for slot in row
        ]


def test_a_terminal_has_the_colours() -> None:
    levels = ["00", "5f", "87", "af", "d7", "ff"]
    cube = [f"{r}{g}{b}" for r in levels for g in levels for b in levels]
    works = (Work.FORWARD, Work.INPUT, Work.WEIGHT)
    shown = [
        [cube[terminal_colour(chunk, work) - 16] for work in works] for chunk in range(len(HUES))
    ]
    assert shown == [list(hue) for hue in HUES]
    assert len({colour for hue in HUES for colour in hue}) == 3 * len(HUES)


def test_more_chunks_than_colours_are_told_apart_by_number() -> None:
    it = drawn("interleaved_1f1b", ranks=2, microbatches=2, chunks=len(HUES) + 1)
    assert re.search(r"m12F1 *\x1b", drawing(it, 10**9, colour=True))
    assert ">12F1<" in svg(it)
    assert '"12F1"' in html(it)


@pytest.mark.parametrize(
    ("until", "apart", "shown"),
    [(7, 2, [0, 2, 4, 6]), (0.7, 0.11, [0, 0.2, 0.4, 0.6]), (100, 21, [0, 50, 100])],
)
def test_ticks_are_round(until: float, apart: float, shown: list[float]) -> None:
    assert list(ticks(until, apart)) == pytest.approx(shown)


# ---- figures


def cases() -> Iterator[tuple[str, int, int, int | None]]:
    for name, maker in SCHEDULES.items():
        for ranks in (1, 2, 3, 4):
            for microbatches in (1, 2, 4, 5, 7, 8, 12):
                for chunks in (2, 3) if maker.variable else (None,):
                    yield name, ranks, microbatches, chunks


@pytest.mark.parametrize(
    "times", [(1, 1, 1), (1, 2, 0.5), (2, 1, 1), (0.5, 3, 2.5), (1, 1, 4)], ids=str
)
def test_formulas_are_what_the_simulation_says(times: tuple[float, float, float]) -> None:
    compared: set[str] = set()
    for name, ranks, microbatches, chunks in cases():
        try:
            made = SCHEDULES[name](ranks, microbatches, chunks)
        except ScheduleError:
            continue
        it = picture("", name, made, Times.uniform(made.stages, *times))
        if formula := find_formula(name, ranks, microbatches, it.times):
            compared.add(name)
            assert [it.timeline.idle(rank) for rank in range(ranks)] == pytest.approx(
                [formula.idle] * ranks
            )
    assert {"gpipe", "1f1b", "interleaved_1f1b", "breadth_first"} <= compared
    assert times != (1, 1, 1) or compared == {*FORMULAS} == {*SCHEDULES}


def test_figures_of_one_chunk_by_hand() -> None:
    assert figures(drawn("1f1b", ranks=2, microbatches=3, times="whole")) == (
        "rank  stages  busy  idle  bubble  microbatches in flight\n"
        "0     0          9     3   25.0%                       2\n"
        "1     1          9     3   25.0%                       1\n"
        "\n"
        "bubble: 25.0% of all ranks' time\n"
        "formula: (p - 1)(f + b + w) = 3 on each rank, 25.0%"
    )


def test_where_no_formula_is_known_none_is_shown() -> None:
    assert "formula" not in figures(drawn("zbv"))


# ---- files


def test_the_svg(scalec: Run, golden: Callable[[str, str], None]) -> None:
    assert scalec("--svg", "x.svg") == (0, "wrote x.svg\n", "")
    golden("schedule/tiny.svg", Path("x.svg").read_text())


def test_the_svg_is_to_scale(each: Picture) -> None:
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(svg(each))
    boxes = [it for it in root.iter(f"{space}rect") if "act " in it.get("class", "")]
    kinds = len(each.works) * each.depth
    # the legend's
    assert len({it.get("class") for it in boxes[-kinds:]}) == min(
        kinds, len(each.works) * len(HUES)
    )
    drawn = [
        (float(it.get("x", "")), float(it.get("width", "")), it.get("class"))
        for it in boxes[:-kinds]
    ]
    expected: list[tuple[Any, Any, str]] = []
    for line in lines(each, WIDTH):
        scale = (WIDTH - LEFT) / (line.end - line.start)
        for it in each.slots:
            start, end = max(it.start, line.start), min(it.end, line.end)
            if start < end:
                left, wide = LEFT + (start - line.start) * scale, (end - start) * scale
                named = f"act {style(each.chunks[it.action.stage], it.action.work)}"
                gap = 1 if wide > 3 else 0
                expected.append(
                    (pytest.approx(left, abs=0.06), pytest.approx(wide - gap, abs=0.06), named)
                )
    assert drawn == expected


def test_every_action_has_its_stage_in_its_label(each: Picture) -> None:
    """In one of the lines that it is in, unless it is far shorter than others."""
    texts = {
        it.text for it in ElementTree.fromstring(svg(each)).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {str(it.action) for it in each.slots if it.end - it.start >= each.shortest} <= texts


def test_messages_have_arrows(each: Picture) -> None:
    pairs = [tuple(str(slot.action) for slot in pair) for pair in messages(each)]
    assert sorted(pairs) == sorted(_sent(each))


def test_an_excerpt_of_a_long_schedule_has_all_and_both_ends() -> None:
    long = drawn("1f1b", ranks=8, microbatches=64)
    assert len(lines(long, WIDTH)) > MOST
    whole, first, last = excerpt(long, WIDTH)
    assert (whole.start, whole.end) == (first.start, last.end) == (0, long.timeline.total)
    assert first.end < last.start


def test_a_whole_step_in_one_line_shows_when_each_rank_computes() -> None:
    long = drawn("1f1b", ranks=8, microbatches=64)
    canvas = Canvas(WIDTH)
    draw(canvas, long, excerpt(long, WIDTH)[0], 0)
    paths = re.findall(r'class="k\w+" stroke-width="[^"]*" d="([^"]*)"', canvas.svg("rows"))
    bars = [
        (float(y), float(x), float(to))
        for d in paths
        for x, y, to in re.findall(r"M(\S+) (\S+)H([\d.]+)", d)
    ]
    scale = (WIDTH - LEFT) / long.timeline.total
    heights = sorted({y for y, _, _ in bars})
    assert len(heights) == 8
    for rank, height in enumerate(heights):
        own = sum(to - x for y, x, to in bars if y == height)
        assert own == pytest.approx(long.timeline.busy(rank) * scale, rel=0.03)


def test_the_trace(scalec: Run, golden: Callable[[str, str], None]) -> None:
    assert scalec("--trace", "x.json") == (0, "wrote x.json\n", "")
    golden("schedule/tiny.json", Path("x.json").read_text())


def test_the_trace_has_all_actions_and_messages(each: Picture) -> None:
    events = json.loads(trace(each))["traceEvents"]
    actions = [it for it in events if it["ph"] == "X"]
    assert [it["name"] for it in actions] == [str(slot.action) for slot in each.slots]
    assert [it["ts"] for it in actions] == pytest.approx([slot.start * 1000 for slot in each.slots])
    for rank in range(each.schedule.ranks):
        of_rank = [it for it in actions if it["tid"] == rank]
        assert all(one["ts"] + one["dur"] < other["ts"] + 1e-6 for one, other in pairwise(of_rank))
    begun = {(it["tid"], it["ts"]): it for it in actions}
    ends = {kind: {it["id"]: it for it in events if it["ph"] == kind} for kind in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    arrows = [
        [begun[it[at]["tid"], it[at]["ts"]]["name"] for it in ends.values()] for at in ends["s"]
    ]
    assert sorted(map(tuple, arrows)) == sorted(_sent(each))


def test_the_trace_keeps_the_rules_of_its_format(each: Picture) -> None:
    """What Perfetto's reader of the Trace Event Format asks of it: whole slices; arrows begin
    in one and end in one.
    """
    read = json.loads(trace(each))
    assert read["displayTimeUnit"] in ("ms", "ns")
    events = read["traceEvents"]
    assert {it["ph"] for it in events} == {"M", "X", "s", "f"}
    assert all(isinstance(it["name"], str) and isinstance(it["pid"], int) for it in events)
    named = {it["tid"]: it["args"]["name"] for it in events if it["name"] == "thread_name"}
    slices = [it for it in events if it["ph"] == "X"]
    assert {it["tid"] for it in slices} == named.keys()
    assert min(it["ts"] for it in slices) == 0
    assert min(it["dur"] for it in slices) > 0
    arrows: dict[int, list[dict[str, Any]]] = {}
    for it in events:
        if it["ph"] in "sf":
            assert any(
                own["tid"] == it["tid"] and own["ts"] <= it["ts"] < own["ts"] + own["dur"]
                for own in slices
            )
            arrows.setdefault(it["id"], []).append(it)
    for begin, end in arrows.values():  # of one category and name, by which a number is one arrow's
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert (begin["cat"], begin["name"]) == (end["cat"], end["name"])
        assert begin["tid"] != end["tid"]
        assert begin["ts"] < end["ts"]


def _sent(each: Picture) -> Iterator[tuple[str, str]]:
    """What makes and what needs each message, by the rows with messages."""
    begin: dict[Work, tuple[int, set[Work]]] = {
        Work.SEND_FORWARD: (1, {Work.FORWARD}),
        Work.SEND_BACKWARD: (-1, {Work.BACKWARD, Work.INPUT}),
    }
    actions = [slot.action for slot in each.slots]
    for _, _, send in with_messages(each.schedule, each.times).cells():
        if send.work in begin:
            hop, works = begin[send.work]
            of_it = {
                it.stage: str(it)
                for it in actions
                if it.microbatch == send.microbatch and it.work in works
            }
            yield of_it[send.stage], of_it[send.stage + hop]


def test_the_page_has_all_actions_and_needs_nothing_else(each: Picture) -> None:
    text = html(each)
    assert text.count("<script>") == 1
    assert not re.search(r"https?:|src=|href=|@import|url\(", text)
    assert (
        "<h1>"
        + each.title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        + "</h1>"
        in text
    )
    (data,) = re.findall(r"^const .*? = (\{.*\});$", text, re.MULTILINE)
    content = json.loads(data)
    assert content["total"] == each.timeline.total
    assert [[(stage, letter, microbatch, start, end) for _, _, letter, stage, microbatch, start, end in row]
            for row in content["rows"]] == [
        [(it.action.stage, it.action.work.value, it.action.microbatch, it.start, it.end) for it in row]
        for row in each.timeline.slots
    ]  # fmt: skip


def test_rows_read_back(scalec: Run) -> None:
    assert scalec("--csv", "rows.csv") == (0, "wrote rows.csv\n", "")
    made = SCHEDULES["interleaved_1f1b"](2, 4, 2)
    assert parse_csv(Path("rows.csv").read_text()) == made


def test_several_files_at_once_and_again(scalec: Run) -> None:
    options = ["--html", "a.html", "--csv", "a.csv", "--trace", "a.json", "--svg", "a.svg"]
    for times in ("f=1", "f=2"):
        assert scalec("--unit", "--times", times, *options) == (
            0,
            "wrote a.csv and a.svg and a.html and a.json\n",
            "",
        )
    assert all(
        "forward 2, input gradients 1" in Path(name).read_text()
        for name in ("a.html", "a.json", "a.svg")
    )
    assert sorted(path.name for path in Path().iterdir()) == [
        "a.csv",
        "a.html",
        "a.json",
        "a.svg",
        "tiny.scale",
    ]


# ---- mistakes


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (
            "g=1",
            "--times has no `g`; it takes `f`, `b`, `w`, `comm`, as in --times"
            " f=1,b=1,w=1,comm=0.1",
        ),
        (
            "f=1,,b=2",
            "--times has no ``; it takes `f`, `b`, `w`, `comm`, as in --times f=1,b=1,w=1,comm=0.1",
        ),
        ("f=1,f=2", "--times sets `f` twice"),
        ("w=fast", "--times sets `w` to `fast`, which is not a number"),
        ("w", "--times sets `w` to ``, which is not a number"),
        ("f=0", "--times sets `f` to 0, but it takes 0.001 to 1000"),
        ("b=nan", "--times sets `b` to nan, but it takes 0.001 to 1000"),
        ("b=1e9", "--times sets `b` to 1e9, but it takes 0.001 to 1000"),
        ("comm=-1", "--times sets `comm` to -1, but it takes 0, or 0.001 to 1000"),
    ],
)
def test_times_that_cannot_be(scalec: Run, times: str, said: str) -> None:
    assert scalec("--times", times) == (2, "", f"error: {said}\n")


def test_a_file_for_two_drawings(scalec: Run) -> None:
    status, _, err = scalec("--svg", "x", "--html", "./x")
    assert (status, err) == (2, "error: --svg and --html both write `x`: choose two files\n")
    assert not Path("x").exists()


def test_a_plan_without_a_pipeline(scalec: Run) -> None:
    Path("tiny.scale").write_text(
        re.sub("mesh.*\nshard.*\npipeline.*", "mesh { dp = 2 }\nshard { batch over dp }", PLAN)
    )
    said = "give its mesh an axis, for instance `pp = 4`, and its shard section `layers over pp`"
    assert scalec() == (2, "", f"error: `tiny.scale` has no pipeline, so nothing to draw: {said}\n")


def test_files_of_others_stay(scalec: Run) -> None:
    for form in ("svg", "html", "trace"):
        said = (
            "error: `tiny.scale` was not written by scalec: move it away, or choose another"
            f" file with --{form}\n"
        )
        assert scalec(f"--{form}", "tiny.scale", "--csv", "new.csv") == (2, "", said)
    Path("rows.csv").write_text("0F0,0B0\n")
    said = "error: `rows.csv` has other rows: move it away, or choose another file with --csv\n"
    assert scalec("--csv", "rows.csv", "--svg", "new.svg") == (2, "", said)
    assert sorted(path.name for path in Path().iterdir()) == ["rows.csv", "tiny.scale"]
    assert (Path("tiny.scale").read_text(), Path("rows.csv").read_text()) == (PLAN, "0F0,0B0\n")


def test_files_that_cannot_be_written(scalec: Run) -> None:
    said = (
        "error: cannot write `no/x.svg`: no such file or directory; choose another file with"
        " --svg\n"
    )
    assert scalec("--svg", "no/x.svg") == (2, "", said)
    said = (
        "error: cannot write `tiny.scale/x.svg`: not a directory; choose another file with --svg\n"
    )
    assert scalec("--svg", "tiny.scale/x.svg") == (2, "", said)
    Path("link.svg").symlink_to("elsewhere.svg")
    for name in (".", "link.svg", "/dev/null"):
        said = f"error: `{name}` is not a plain file: choose another with --svg\n"
        assert scalec("--svg", name) == (2, "", said)
    assert not Path("elsewhere.svg").exists()


def test_a_failure_on_the_way_leaves_the_old_file_and_no_draft(
    scalec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    scalec("--svg", "x.svg")
    before = Path("x.svg").read_text()
    monkeypatch.setattr(Path, "replace", fail)
    said = "error: cannot write `x.svg`: read-only file system; choose another file with --svg\n"
    assert scalec("--svg", "x.svg", "--times", "f=2") == (2, "", said)
    assert Path("x.svg").read_text() == before
    assert sorted(path.name for path in Path().iterdir()) == ["tiny.scale", "x.svg"]
