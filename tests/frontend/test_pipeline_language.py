"""Pipelines in plans: those that compile, and each mistake at its words, with its arithmetic
and what to do.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.edited_text import replace_once
from helpers.pipeline_plan import PLAN, compiled
from scalec.compiler.analysis.memory import accounts
from scalec.compiler.cli.compile import load_ir_program
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.proof import verify
from scalec.compiler.schedules.actions import Schedule
from scalec.compiler.schedules.activation_memory import high_water
from scalec.compiler.schedules.csv_file import csv
from scalec.compiler.schedules.p2p import with_messages
from scalec.compiler.schedules.registry import SCHEDULES, loop_placement, v_placement
from scalec.compiler.schedules.rescale import resize
from scalec.compiler.schedules.timeline import Times, simulate
from scalec.compiler.syntax.codes import get_codes
from scalec.compiler.syntax.diagnostics import Diagnostic, PlanError
from scalec.compiler.syntax.source import Source, Span
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan, lower


def marked(span: Span) -> str:
    line = span.text.split("\n")[span.line - 1]
    return line[span.column - 1 : span.end_column - 1]


def get_diagnostics(edits: Mapping[str, str], path: str = "plan.scale") -> tuple[Diagnostic, ...]:
    with pytest.raises(PlanError) as caught:
        compiled(edits, path=path)
    assert {diagnostic.code for diagnostic in caught.value.diagnostics} <= get_codes().keys()
    return caught.value.diagnostics


def schedule_of(edits: Mapping[str, str], path: str = "plan.scale") -> Schedule:
    pipeline = compiled(edits, path=path).pipeline
    assert pipeline
    assert pipeline.schedule
    return pipeline.schedule


# ---- mistakes

TWO_REPEATS = {"layers over pp": "layers, rest over pp"}
MISTAKES = {  # edits, code, the words that are marked, what is said, what helps
    "an unknown schedule": (
        {"1f1b": "gpip"},
        "E0404",
        "gpip",
        "there is no schedule `gpip`",
        "did you mean `gpipe`?",
    ),
    "an unknown setting": (
        {"1f1b }": "1f1b  stage = [6] }"},
        "E0401",
        "stage",
        "no setting `stage`",
        "mean `stages`?",
    ),
    "chunks of what has none": (
        {"1f1b": "1f1b(chunks=2)"},
        "E0517",
        "chunks=2",
        "a rank has 1 of its stages, not 2",
        "leave `chunks` out, or choose among `interleaved_1f1b`, `breadth_first`,"
        " `interleaved_zero_bubble`",
    ),
    "too many chunks": (
        {"1f1b": "interleaved_1f1b(chunks=3)"},
        "E0517",
        "chunks=3",
        "6 iterations cannot fill 12 stages",
        "at most 8 stages",
    ),
    "very many chunks": (
        {"1f1b": "interleaved_1f1b(chunks=99999999999)"},
        "E0517",
        "chunks=99999999999",
        "6 iterations cannot fill 399,999,999,996 stages",
        "at most 8 stages",
    ),
    "too many ranks": (
        {"layers = 6": "layers = 1"},
        "E0517",
        "schedule = 1f1b",
        "1 iteration cannot fill 4 stages",
        "3 stages",
    ),
    "too many layers": (
        {"layers = 6": "layers = 2000"},
        "E0517",
        "schedule = 1f1b",
        "2,000 iterations are too many",
        "1,024",
    ),
    "too few stages": (
        {"1f1b }": "1f1b  stages = [1, 2, 3] }"},
        "E0517",
        "stages = [1, 2, 3]",
        "the schedule has 4 stages, not 3",
        "`1f1b` has 4 stages on the 4 ranks of `pp`",
    ),
    "too many layers in stages": (
        {"1f1b }": "1f1b  stages = [1, 2, 2, 2] }"},
        "E0517",
        "stages = [1, 2, 2, 2]",
        "stages have 7 iterations, the repeats 6",
        "take away 1",
    ),
    "too few layers in stages": (
        {"1f1b }": "1f1b  stages = [1, 1, 1, 1] }"},
        "E0517",
        "stages = [1, 1, 1, 1]",
        "stages have 4 iterations, the repeats 6",
        "add 2",
    ),
    "a stage without a layer": (
        {"1f1b }": "1f1b  stages = [3, 0, 2, 1] }"},
        "E0517",
        "stages = [3, 0, 2, 1]",
        "stage 1 has nothing to do",
        "the first and the last stage",
    ),
    "microbatches that it cannot take": (
        {"1f1b": "dualpipev"},
        "E0517",
        "schedule = dualpipev",
        "6 microbatches are fewer than the 2 × 4 stages",
        "at least 8",
    ),
    "microbatches that make no layers": (
        {"1f1b": "interleaved_1f1b(chunks=2)", "global_batch = 24": "global_batch = 36"},
        "E0517",
        "schedule = interleaved_1f1b(chunks=2)",
        "9 / 2 is not whole",
        "8 or 12",
    ),
    "very many microbatches": (
        {"global_batch = 24": "global_batch = 1000000"},
        "E0517",
        "schedule = 1f1b",
        "4 stages × 250000 microbatches = 1,000,000",
        "larger microbatches",
    ),
    "too little memory": (
        {"1f1b": "auto(memory=1, chunks=2)"},
        "E0517",
        "memory=1",
        "rank 0 holds 2 for one microbatch",
        "more memory",
    ),
    "too few bytes": (
        {"1f1b": "auto(memory=8KiB)"},
        "E0517",
        "memory=8KiB",
        "rank 0 needs ",
        "raise the memory budget",
    ),
    "bytes that are not whole": (
        {"1f1b": "auto(memory=1.5GiB)"},
        "E0404",
        "1.5GiB",
        "an integer or a size, as in",
        "",
    ),
    "no memory": ({"1f1b": "auto(memory=0)"}, "E0405", "0", "must be at least 1", ""),
    "memory of a name": (
        {"1f1b": "1f1b(memory=2)"},
        "E0401",
        "memory",
        "a setting of `schedule auto`",
        "",
    ),
    "memory without its name": ({"1f1b": "auto(2)"}, "E0404", "2", "given by name", "`key=value`"),
    "a file without a path": (
        {"1f1b": "file"},
        "E0402",
        "file",
        "`file` needs a path",
        'file("rows.csv")',
    ),
    "a path without quotes": (
        {"1f1b": "file(rows)"},
        "E0404",
        "rows",
        "takes a string, not a name",
        "",
    ),
    "a file and chunks": (
        {"1f1b": 'file("a.csv", chunks=2)'},
        "E0401",
        "chunks=2",
        "not a setting of `file`",
        "",
    ),
    "a file that is not there": (
        {"1f1b": 'file("a.csv")'},
        "E0101",
        '"a.csv"',
        "there is no file",
        "",
    ),
    "a repeat in another": (
        {
            "repeat layers {": "repeat rest { x = tanh(x)  repeat layers {",
            "  }\n  loss": "  } }\n  loss",
        },
        "E0513",
        "layers",
        "`layers` is the dim of another repeat",
        "split the repeat around it",
    ),
    "an axis that carries data": (
        {"batch over dp": "batch over pp, dp", "global_batch = 24": "global_batch = 32"},
        "E0513",
        "batch",
        "`batch` is sharded over the stages' axis",
        "an axis of their own",
    ),
    "an axis that carries weights": (
        {"batch over dp": "batch over dp  ffn over pp"},
        "E0513",
        "ffn",
        "stages' axis",
        "",
    ),
    "two axes": (
        {"batch over dp  layers over pp": "layers over pp, dp"},
        "E0513",
        "layers",
        "over one axis, not over `pp` and `dp`",
        "`pp` alone",
    ),
    "two repeats over two axes": (
        {
            "batch over dp  layers over pp": "layers over pp  rest over dp",
            "  loss": "  repeat rest { x = tanh(x) }\n  loss",
        },
        "E0513",
        "rest",
        "over one axis, not over `pp` and `dp`",
        "`pp` alone",
    ),
    "nothing over an axis": (
        {"  layers over pp": ""},
        "E0517",
        "pipeline",
        "there is nothing to split",
        "`layers over pp`",
    ),
    "a dim that is repeated twice": (
        {"  loss": "  repeat layers { x = tanh(x) }\n  loss"},
        "E0513",
        "layers",
        "`layers` is repeated 2 times",
        "a dim of its own",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_each_mistake_is_told_at_its_words(what: str) -> None:
    edits, code, words, said, helps = MISTAKES[what]
    first = get_diagnostics(edits)[0]
    assert (first.code, marked(first.span)) == (code, words)
    assert said in first.message
    assert helps in first.help


def test_places_that_have_to_do_with_a_mistake_are_shown() -> None:
    (found,) = get_diagnostics({"1f1b": "dualpipev"})
    assert [note.span and marked(note.span) for note in found.notes] == [
        "global_batch = 24",
        "pp = 4",
    ]


def test_without_a_section_mistakes_stand_where_repeats_are_laid() -> None:
    (found,) = get_diagnostics({"pipeline { schedule = 1f1b }\n": "", "layers = 6": "layers = 1"})
    assert marked(found.span) == "layers"


def test_parts_of_a_repeat_are_one_mistake() -> None:
    branch = "repeat layers as i { if i < 2 { x = tanh(x) } else { x = silu(x) }"
    around = {"  repeat layers {": f"  repeat rest {{ {branch}", "  }\n  loss": "  } }\n  loss"}
    assert len(get_diagnostics(around)) == 1


# ---- what compiles

LEFT_OUT = {"pipeline { schedule = 1f1b }\n": ""}


def test_1f1b_is_what_a_plan_gets_that_says_nothing() -> None:
    assert schedule_of(LEFT_OUT) == schedule_of({})


@pytest.mark.parametrize("section", ["", "pipeline { schedule = zbv  stages = [1, 2] }\n"])
def test_on_an_axis_of_size_1_the_model_is_what_it_is(section: str) -> None:
    """Whatever the section says, the program is that of the plan without the axis."""
    alone = compiled({"pp = 4": "pp = 1", **LEFT_OUT, "train {": f"{section}train {{"})
    plain = compiled({"pp = 4  ": "", "  layers over pp": "", **LEFT_OUT})
    assert alone.pipeline is None
    assert (alone.region, alone.params, alone.buckets) == (
        plain.region,
        plain.params,
        plain.buckets,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "order",
    [
        "1f1b",
        "interleaved_1f1b(chunks=2)",
        "auto(memory=3)",
        "auto(memory=1GiB)",
        'file("rows.csv")',
    ],
)
def test_programs_of_all_passes_read_back(order: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(csv(SCHEDULES["zb_h1"](4, 6)))
    path = str(tmp_path / "plan.scale")
    edits = {
        "1f1b": order,
        "global_batch = 24": "global_batch = 32" if "chunks" in order else "global_batch = 24",
    }
    model = program = compiled(edits, "resolve", path)
    for stage in PASS_NAMES:
        program = lower(program, stage)
        assert read_ir(Source("plan.ir", print_ir(program))) == program
    assert lower(read_ir(Source("plan.ir", print_ir(model)))) == program


def test_rows_in_ir_text_that_are_none() -> None:
    text = print_ir(compiled({})).replace('row "0F0', 'row "F0')
    with pytest.raises(PlanError, match="these are not rows"):
        read_ir(Source("plan.ir", text))


ILLEGAL = {  # what is written instead of what, and the note
    "a send too late": (
        "0SEND_F0 (.*?)0RECV_B0",
        r"0RECV_B0 \1 0SEND_F0",
        "rows of rank 1: `1RECV_F0` gets `0SEND_F1`",
    ),
    "two parts in the wrong order": (
        r"1I1 (.*)1W1",
        r"1W1 \1 1I1",
        "rows of rank 1: `1W1` (rank 1, cell ",
    ),
    "twice": ("3W0", "3W1", "rows of rank 3: `3W1`: `3W1` in cell "),
    "left out": (" 1W5", "", "rows of rank 1: the row lacks `1W5`"),
    "a send left out": (" 1SEND_F5", "", "rows of rank 1: the row lacks `1SEND_F5`"),
    "no rows": (r'row ".*"\n', "", "a pipeline without rows"),
    "fewer ranks": (r'row "3.*"\n', "", "rows of 3 ranks, the axis has 4"),
    "other stage_to_rank": (
        r"stage_to_rank \[0, 1",
        "stage_to_rank [1, 0",
        "the ranks of rows are not those of stage_to_rank",
    ),
    "a rank that there is not": (
        r"stage_to_rank \[0",
        "stage_to_rank [4",
        "stages lie on ranks [1, 2, 3, 4] of 4",
    ),
    "too many layers": (r"layers \[1", "layers [2", "stages have 7 iterations, the repeats 6"),
    "a stage that there is not": (
        r"held wte by \[0\]",
        "held wte by [4]",
        "wte: held by a stage that there is not",
    ),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_rows_and_stages_edited_into_something_illegal_are_told(what: str) -> None:
    before, after, note = ILLEGAL[what]
    text, times = re.subn(before, after, print_ir(compiled({"1f1b": "zb_h1"})))
    assert times
    with pytest.raises(PlanError) as error:
        load_ir_program(Source("plan.ir", text))
    (found,) = error.value.diagnostics
    assert (found.code, found.message) == ("E0190", "this IR is not legal")
    assert note in found.notes[0].text


@pytest.mark.parametrize("stage", ["resolve", "place_state", "fuse_buckets"])
def test_rows_of_a_file_edited_in_ir_text_are_told(stage: str, plan: str) -> None:
    """Before they have messages, too."""
    written(plan, csv(SCHEDULES["zb_h1"](4, 6)))
    text = print_ir(compiled(FILE, stage, plan))
    assert (text.count("given "), text.count("row ")) == (4, 0)
    with pytest.raises(PlanError, match="not legal"):
        load_ir_program(Source("plan.ir", text.replace("3F0 3I0", "3I0 3F0")))


def test_rows_of_auto_left_out_of_ir_text_are_told() -> None:
    text = print_ir(compiled({"1f1b": "auto"}, "fuse_buckets"))
    with pytest.raises(PlanError, match="a pipeline without rows"):
        load_ir_program(Source("plan.ir", re.sub(r'given ".*"\n', "", text)))


# ---- made for the plan's costs


def test_auto_keeps_its_bound() -> None:
    for memory in (1, 2, 3):
        assert max(high_water(schedule_of({"1f1b": f"auto(memory={memory})"}))) <= memory


@pytest.mark.long
def test_auto_keeps_to_its_bytes_in_all_that_ranks_hold() -> None:
    """The account of the finished program is what it is held to; with more memory it is no
    slower.
    """
    needs = {order: sizes(order) for order in ("1f1b", "auto")}
    totals: list[float] = []
    for most in (
        max(needs["1f1b"]),
        (max(needs["1f1b"]) + max(needs["auto"])) // 2,
        max(needs["auto"]),
    ):
        order = f"auto(memory={most}B)"
        assert max(sizes(order)) <= most
        totals.append(simulate(schedule_of({"1f1b": order}), times_of({})).total)
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]


def sizes(order: str) -> list[int]:
    """What the plan's ranks hold at their fullest moments."""
    return [it.total for it in accounts(compiled({"1f1b": order}))]


def test_the_arithmetic_of_too_few_bytes() -> None:
    """What the message adds up is what the account says of a rank that does one microbatch."""
    (found,) = get_diagnostics({"1f1b": "auto(memory=8KiB)"})
    parts = re.fullmatch(
        r"rank 0 needs (.*) KiB of state and inputs \+ (.*) KiB of one microbatch \+ (.*) KiB while it is done "
        r"= (.*) KiB, but its memory budget is 8.0 KiB",
        found.message,
    )
    assert parts, found.message
    *each, total = map(float, parts.groups())
    assert sum(each) == pytest.approx(total, abs=0.2)
    assert accounts(compiled({}))[0].always / 1024 == pytest.approx(each[0], abs=0.05)


def test_auto_is_no_slower_than_what_has_a_name() -> None:
    """For what the plan's stages cost, of which the first and the last cost more."""
    unlike = {"vocab = 64": "vocab = 256"}
    total = {
        order: simulate(schedule_of({**unlike, "1f1b": order}), times_of(unlike)).total
        for order in ("auto", "1f1b", "zb_h1", "zb_h2")
    }
    assert total["auto"] == min(total.values()) < total["1f1b"]


def times_of(edits: Mapping[str, str]) -> Times:
    from scalec.compiler.analysis.stage_schedule import estimate_times

    program = compiled(edits, "fuse_buckets")
    assert program.pipeline
    return estimate_times(program, program.pipeline)


TWO_STAGES = {"layers = 6": "layers = 8", "global_batch = 24": "global_batch = 32"}
"""Of eight layers each rank can have two; eight microbatches."""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["interleaved_1f1b", "breadth_first", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
def test_auto_is_no_slower_than_what_has_a_name_and_two_stages_on_each_rank(name: str) -> None:
    """Wherever that has its stages."""
    times = times_of({**TWO_STAGES, "1f1b": "zbv"})
    named = schedule_of({**TWO_STAGES, "1f1b": name})
    made = schedule_of({**TWO_STAGES, "1f1b": f"auto(chunks=2, memory={max(high_water(named)):g})"})
    assert max(high_water(made)) <= max(high_water(named))
    assert simulate(made, times).total <= simulate(named, times).total


def test_auto_has_as_many_stages_as_it_is_told() -> None:
    assert schedule_of({"1f1b": "auto(chunks=2)"}).stage_to_rank in (
        loop_placement(4, 2),
        v_placement(4, 2),
    )


DOWN_AND_UP = {**TWO_STAGES, "1f1b": "auto(chunks=2, memory=2)"}


def test_what_auto_decides_is_in_the_ir() -> None:
    """Homes and rows from `place_stages` on, to which the later passes keep."""
    program = compiled(DOWN_AND_UP, "place_stages")
    assert program.pipeline
    assert program.pipeline.rows
    assert (
        program.pipeline.stage_to_rank == program.pipeline.rows.stage_to_rank == v_placement(4, 2)
    )
    last = lower(read_ir(Source("plan.ir", print_ir(program))))
    assert last == compiled(DOWN_AND_UP)


@pytest.mark.parametrize("tied", [{}, {"x @ head[hidden -> vocab]": "x @ wte"}], ids=["", "tied"])
def test_stages_of_auto_that_lie_down_and_up_are_proved(tied: dict[str, str]) -> None:
    """The first rank has the embedding and the head: of one tied no sum over ranks is left."""
    model = compile_plan(
        Source("plan.scale", replace_once(PLAN, {**DOWN_AND_UP, **tied})), "resolve"
    )
    program = lower(model)
    verify(program, model)
    assert program.pipeline
    assert program.pipeline.ranks_of("wte") == (0,)


def test_stages_lie_where_their_bytes_have_room() -> None:
    """Down and up the first rank has the embedding and the head, around the ranks each on its
    own has less.
    """
    edits = {
        **TWO_STAGES,
        "vocab = 64": "vocab = 640",
        "microbatch = 2": "microbatch = 1",
        "batch = 32": "batch = 12",
    }
    least = max(
        it.total for it in accounts(compiled({**edits, "1f1b": "interleaved_1f1b(chunks=2)"}))
    )
    assert schedule_of(
        {**edits, "1f1b": f"auto(chunks=2, memory={least}B)"}
    ).stage_to_rank == loop_placement(4, 2)
    assert max(it.total for it in accounts(compiled({**edits, "1f1b": "zbv"}))) > least


# ---- from a file


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """The path of a plan, in a folder of its own."""
    return str(tmp_path / "plan.scale")


FILE = {"1f1b": 'file("rows.csv")'}


def written(plan: str, text: str) -> str:
    Path(plan).with_name("rows.csv").write_text(text)
    return plan


@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "zbv"])
def test_rows_of_a_file_are_as_good_as_a_name(name: str, plan: str) -> None:
    made = SCHEDULES[name](4, 6)
    found = schedule_of(FILE, written(plan, csv(made)))
    assert found == schedule_of({"1f1b": name})
    assert resize(found, 4, 6) == made


def test_messages_of_a_file_are_written_anew(plan: str) -> None:
    made = SCHEDULES["1f1b"](4, 6)
    late = with_messages(made, Times.uniform(4, comm=5))
    assert schedule_of(FILE, written(plan, csv(late))) == schedule_of(
        FILE, written(plan, csv(made))
    )


@pytest.mark.parametrize(("name", "ranks"), [("zb_h1", 4), ("zbv", 2)])
def test_steps_of_a_file_are_proved(name: str, ranks: int, plan: str) -> None:
    written(plan, csv(SCHEDULES[name](ranks, 6)))
    model = compile_plan(
        Source(plan, replace_once(PLAN, {**FILE, "pp = 4": f"pp = {ranks}"})), "resolve"
    )
    verify(lower(model), model)


def test_the_path_is_that_from_the_file_that_says_it(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    plan = str(tmp_path / "base" / "plan.scale")
    written(plan, csv(SCHEDULES["gpipe"](4, 6)))
    Path(plan).write_text(replace_once(PLAN, FILE))
    text = 'use "base/plan.scale" { train { steps = 9 } }'
    program = compile_plan(Source(str(tmp_path / "other.scale"), text))
    assert program.pipeline
    assert program.pipeline.rows == SCHEDULES["gpipe"](4, 6)


ROWS = csv(SCHEDULES["1f1b"](4, 6))
WRONG_ROWS = {  # what is written instead of what, where, and what is said
    "no action": ("2F1", "2G1", "rank 2, cell 1", "`2G1` is not an action"),
    "twice": ("3B1", "3B0", "rank 3, cell 3", "`3B0`: `3B0` in cell 1 has done it"),
    "left out": ("1B5", "", "rank 1", "the row lacks `1B5`"),
    "another rank's": (
        "1F0,",
        "1F0,2F0,",
        "rank 2, cell 0",
        "`2F0` is for stage 2, which rank 1 has",
    ),
    "a circle": ("3F0,3B0", "3B0,3F0", "rank 3, cell 0", "`3B0` (rank 3, cell 0) waits for"),
}


@pytest.mark.parametrize("what", WRONG_ROWS)
def test_problems_of_rows_are_told_with_rank_and_cell(what: str, plan: str) -> None:
    before, after, label, said = WRONG_ROWS[what]
    assert before in ROWS
    first = get_diagnostics(FILE, written(plan, ROWS.replace(before, after, 1)))[0]
    assert (first.code, marked(first.span), first.label) == ("E0517", '"rows.csv"', label)
    assert first.message.startswith(f"`rows.csv`: {said}")


def test_of_many_problems_a_few_are_told(plan: str) -> None:
    found = get_diagnostics(FILE, written(plan, ROWS.replace("F3", "F2").replace("B4", "B2")))
    assert len(found) == 6
    assert "more like these" in found[-1].message


def test_rows_for_other_numbers(plan: str) -> None:
    found = get_diagnostics(FILE, written(plan, csv(SCHEDULES["1f1b"](3, 5))))
    assert [each.message for each in found] == [
        "`rows.csv` is for 3 ranks, the plan has 4",
        "`rows.csv` is for 5 microbatches, the plan has 6",
    ]
    assert [note.span and marked(note.span) for each in found for note in each.notes] == [
        "pp = 4",
        "global_batch = 24",
    ]


def test_a_file_is_bounded(plan: str) -> None:
    (found,) = get_diagnostics(FILE, written(plan, "," * (2**20 + 1)))
    assert (found.code, found.message.split(" is ")[1]) == ("E0102", "larger than 1024 KiB")


def test_the_plan_itself_compiles() -> None:
    assert compile_plan(Source("plan.scale", PLAN)).pipeline


def test_the_language_page_has_a_row_for_every_schedule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "language.md").read_text(encoding="utf-8")
    table = page.partition("\n| schedule | stages of a rank | |\n")[2].partition("\n\n")[0]
    assert [name for name in SCHEDULES if not re.search(rf"`{name}[`(]", table)] == []
