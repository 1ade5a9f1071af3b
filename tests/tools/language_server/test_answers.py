"""Answers of the language server, as pure functions of texts."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from helpers.edited_text import replaced
from scalec.compiler.reports.time import seconds
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.syntax.tree import Model
from scalec.tools.language_server import navigate
from scalec.tools.language_server.complete import call_at
from scalec.tools.language_server.diagnose import actions, get_shown_diagnostics
from scalec.tools.language_server.document import (
    Document,
    Overtaken,
    compile_document,
    parse_document,
)
from scalec.tools.language_server.hints import colours, hints
from scalec.tools.language_server.hover import hover
from scalec.tools.language_server.mentions import Kind
from scalec.tools.language_server.moved import TextChange, offset
from scalec.tools.language_server.outline import Part, outline
from scalec.tools.language_server.wire import UNITS, Wire
from scalec.tools.language_server.words import MEANINGS

ROOT = Path(__file__).parents[3]
PLAN = ROOT / "examples" / "06_mlp.scale"
Golden = Callable[[str, str], None]
FULL = ROOT / "plans" / "llama3_405b.scale"


@pytest.fixture(scope="module")
def mlp() -> Document:
    return compile_document(parse_document(None, load(PLAN)))


@pytest.fixture(scope="module")
def full() -> Document:
    return compile_document(parse_document(None, load(FULL)))


def at(document: Document, words: str, within: int = 0) -> tuple[int, int]:
    """The place of the first such words, or some characters behind it."""
    start = document.source.text.index(words) + within
    text = document.source.text[:start]
    return text.count("\n") + 1, start - text.rfind("\n")


def edited(document: Document, old: str, new: str) -> Document:
    """The document after a key stroke or several."""
    assert old in document.source.text
    return parse_document(
        document, Source(document.source.path, document.source.text.replace(old, new, 1))
    )


def test_hovers_of_each_name_of_a_model(full: Document, golden: Golden) -> None:
    """The model that the plan of 16,384 ranks uses, as that plan shards it."""
    model = full.get_view_from_file(load(ROOT / "plans" / "models" / "llama.scale"))
    assert model
    assert model.syntax
    own = [it for it in model.syntax.mentions if it.span.path == model.source.path]
    shown = {
        f"{it.span.line}: {it.kind.words} {it.name}": hover(model, it.span.line, it.span.column)
        for it in own
    }
    first = {each.text: title for title, each in reversed(shown.items()) if each}
    golden(
        "lsp/hovers.md",
        "\n".join(f"# line {title}\n\n{text}\n" for text, title in reversed(first.items())),
    )


def test_the_seconds_of_an_axis_are_those_of_the_step(full: Document) -> None:
    shown = hover(full, *at(full, "dp = "))
    assert shown
    assert full.facts
    assert full.facts.step
    waited = full.facts.step.kinds["exposed: dp"] + full.facts.step.kinds.get(
        "exposed: dp × tp", 0.0
    )
    assert f"for {seconds(waited)} the GPU waits" in shown.text


def test_hints_of_a_model(full: Document, golden: Golden) -> None:
    model = full.get_view_from_file(load(ROOT / "plans" / "models" / "llama.scale"))
    assert model
    golden("lsp/hints.txt", "".join(f"{line}: {text}\n" for line, text in hints(model, 1, 99)))


def test_a_syntax_error_leaves_the_last_good_state(mlp: Document) -> None:
    broken = edited(mlp, "loss = cross", "loss = = cross")
    (mistake,) = get_shown_diagnostics(broken)
    assert (mistake.of.code, mistake.span.line) == ("E0104", at(broken, "loss = =")[0])
    for words in ("x = embedding", "head[", "dp = 2"):
        before, now = hover(mlp, *at(mlp, words)), hover(broken, *at(broken, words))
        assert before
        assert now
        assert now.text == before.text
        assert (now.span.line, now.span.column) == at(broken, words)


def test_all_mistakes_are_told_at_once(mlp: Document) -> None:
    """Those beside a mistake of syntax too; and of a text that was never a plan, the names are
    known that can be.
    """
    broken = edited(edited(mlp, "loss = cross", "loss = = cross"), "tp = 2", "tp = 3")
    assert {"E0104", "E0510"} <= {each.of.code for each in get_shown_diagnostics(broken)}
    first = parse_document(None, broken.source)
    shown = hover(first, *at(first, "hidden = 64"))
    assert shown is None, "no facts yet"
    assert navigate.definition(first, *at(first, "wte[vocab", 4))
    mention = first.mention(*at(first, "ffn over"))
    assert mention
    with pytest.raises(PlanError, match="syntax error"):
        navigate.find_rename_spans([first], mention, "inner")


def test_places_move_with_what_is_typed_before_them(mlp: Document) -> None:
    longer = compile_document(edited(mlp, "model mlp", "# a comment\n# another\nmodel mlp"))
    assert [line for line, _ in hints(longer, 1, 99)] == [line + 2 for line, _ in hints(mlp, 1, 99)]
    stale = edited(mlp, "model mlp", "# a comment\n# another\nmodel mlp")
    assert [*hints(stale, 1, 99)] == [*hints(longer, 1, 99)], (
        "before the pause, those of the step before"
    )


def test_mistakes_of_sharding_are_told_at_once(mlp: Document) -> None:
    uneven = edited(mlp, "ffn = 256", "ffn = 255")
    assert [each.of.code for each in get_shown_diagnostics(uneven)] == ["E0510"]


def test_mistakes_of_passes_stay_until_the_step_is_compiled_anew(mlp: Document) -> None:
    idle = compile_document(edited(mlp, "batch over dp", "batch over dp  seq over dp"))
    (mistake,) = get_shown_diagnostics(idle)
    assert mistake.of.code == "E0508"
    (moved,) = get_shown_diagnostics(edited(idle, "mesh ", "# a comment\nmesh "))
    assert moved.span.line == mistake.span.line + 1
    assert get_shown_diagnostics(compile_document(edited(idle, "  seq over dp", ""))) == []


def test_warnings_stay_until_the_step_is_compiled_anew(full: Document) -> None:
    (warning,) = get_shown_diagnostics(full)
    longer = edited(full, "cluster {", "# a comment\ncluster {")
    (moved,) = get_shown_diagnostics(longer)
    assert (moved.text, moved.span.line) == (warning.text, warning.span.line + 1)
    edited_away = edited(full, warning.span.words, "nodes = 1")
    assert [each.of.code for each in get_shown_diagnostics(edited_away)] != ["W0901"]


def get_shown(document: Document) -> list[object]:
    """All that an editor is shown of a document, with places."""
    names = document.syntax.mentions if document.syntax else ()
    own = [it for it in names if it.span.path == document.source.path]
    hovers = [hover(document, it.span.line, it.span.column) for it in own]
    mistakes = [
        (it.of.code, it.span, it.text, [note.span for note in it.notes])
        for it in get_shown_diagnostics(document)
    ]
    return [*hovers, *mistakes, *hints(document, 1, 99)]


LEFT_TRUE = {
    "a comment": ("# ", "# also: "),
    "the seed": ("seed = 0", "seed = 12345"),
    "the steps": ("steps = 1_200_000", "steps = 1_300_000"),
    "the learning rate": ("lr = 8e-5", "lr = 7.25e-5"),
}
CHANGED = {
    "a size": ("global_batch = 2048", "global_batch = 4096"),
    "clipping": ("clip = 1.0", "clip = 0.0"),
    "recomputation": ("precision = bf16", "precision = bf16  recompute = full"),
    "steps that a warning is about": ("steps = 1_200_000", "steps = 9"),
    "a line more": ("mesh  ", "# a comment\nmesh "),
}


@pytest.mark.parametrize(("old", "new"), LEFT_TRUE.values(), ids=LEFT_TRUE)
def test_facts_that_an_edit_leaves_true_stay(full: Document, old: str, new: str) -> None:
    """Nothing is compiled anew, and all that is shown is what a first compile of the new text
    shows.
    """
    now = edited(full, old, new)
    after = compile_document(now, lambda: pytest.fail("a pass has run"))
    assert get_shown(after) == get_shown(compile_document(parse_document(None, now.source)))
    assert after.facts
    assert after.model
    assert after.facts.program.train.seed == after.model.train.seed
    assert after.facts.program.train.optimizer.lr == after.model.train.optimizer.lr


@pytest.mark.parametrize(("old", "new"), CHANGED.values(), ids=CHANGED)
def test_facts_that_an_edit_changes_are_made_anew(full: Document, old: str, new: str) -> None:
    now = edited(full, old, new)
    after = compile_document(now)
    assert after.facts
    assert after.facts.source == now.source
    assert get_shown(after) == get_shown(compile_document(parse_document(None, now.source)))


def test_a_name_between_two_edits_keeps_its_facts(full: Document) -> None:
    """Places are known up to the first and from the last edit on: between them all is compiled
    anew.
    """
    first = compile_document(edited(full, "# ", "# also: "))
    second = edited(first, "seed = 0", "seed = 1")
    after = compile_document(second)
    assert get_shown(after) == get_shown(compile_document(parse_document(None, second.source)))


def test_warnings_come_back_with_a_text_that_was_a_plan(full: Document) -> None:
    """A mistake that a pass found takes their place meanwhile."""
    wrong = compile_document(edited(full, "over dp\n", "over dp\n  seq over dp\n"))
    assert [each.of.code for each in get_shown_diagnostics(wrong)] != [
        each.of.code for each in get_shown_diagnostics(full)
    ]
    again = compile_document(parse_document(wrong, full.source))
    assert get_shown(again) == get_shown(full)


@pytest.mark.parametrize("name", ["llama3_405b", "deepseek_v3", "tiny_five", "tiny_llama"])
def test_no_fact_depends_on_what_only_the_run_reads(name: str) -> None:
    """Of the settings that `with_run` takes from another plan."""
    text = load(ROOT / "plans" / f"{name}.scale").text
    other = re.sub(r"\blr = \S+", "lr = 1.0", re.sub(r"\bsteps = \S+", "steps = 3", text))
    other = re.sub(r"\bseed = \d+", "seed = 99", other)
    assert other != text
    path = str(ROOT / "plans" / f"{name}.scale")
    one, two = (
        compile_document(parse_document(None, Source(path, each))).facts for each in (text, other)
    )
    assert one
    assert two
    assert (one.collectives_by_rank, one.memory, one.rows, one.step) == (
        two.collectives_by_rank,
        two.memory,
        two.rows,
        two.step,
    )
    assert evolve(one.program, train=two.program.train) == two.program


def test_definitions(mlp: Document, full: Document) -> None:
    for words, within, bound in (
        ("ffn over tp", 0, "ffn = 256"),
        ("over tp", 5, "tp = 2"),
        ("+ silu", 2, ""),
    ):
        found = navigate.definition(mlp, *at(mlp, words, within))
        assert (found and (found.line, found.column)) == (at(mlp, bound) if bound else None)
    second_x = navigate.definition(mlp, *at(mlp, "loss = cross_entropy(x", 21))
    assert second_x
    assert second_x.line == at(mlp, "x = x + silu")[0], "the statement before that binds it"
    seq = navigate.definition(mlp, *at(mlp, "seq], labels"))
    assert seq
    assert (seq.line, seq.column) == at(mlp, "seq = "), "a dim of the data is a setting"
    model = navigate.definition(full, *at(full, "models/llama"))
    assert model
    assert (Path(model.path).name, model.line) == ("llama.scale", 1)


def test_a_renamed_dim_makes_the_same_plan(mlp: Document) -> None:
    mention = mlp.mention(*at(mlp, "ffn over tp"))
    assert mention
    spans = navigate.find_rename_spans([mlp], mention, "inner")
    again = parse_document(None, Source(mlp.source.path, replaced(mlp.source.text, spans, "inner")))
    assert again.mistakes == ()
    assert again.source.text == mlp.source.text.replace("ffn", "inner")


def test_a_dim_is_renamed_in_all_files_of_a_plan(mlp: Document, tmp_path: Path) -> None:
    """One by way of another, by a text that was broken a moment before."""
    model, _, rest = mlp.source.text.partition("mesh  {")
    texts = {
        "model.scale": model,
        "base.scale": f'use "model.scale" {{ dims {{ ffn = 512 }} }}\nmesh  {{{rest}',
        "plan.scale": 'use "base.scale" { dims { ffn = 128 } }\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    path = str(tmp_path / "plan.scale")
    broken = parse_document(None, Source(path, texts["plan.scale"].replace("= 128", "= = 128")))
    assert [each.of.code for each in get_shown_diagnostics(broken)] == ["E0104"]
    plan = parse_document(broken, Source(path, texts["plan.scale"]))
    mention = plan.mention(*at(plan, "ffn"))
    assert mention
    spans = navigate.find_rename_spans([plan], mention, "inner")
    for name, text in texts.items():
        own = [span for span in spans if Path(span.path).name == name]
        assert len(own) == len(re.findall(r"\bffn\b", re.sub("#.*", "", text)))
        (tmp_path / name).write_text(replaced(text, own, "inner"))
    now = compile_document(parse_document(None, load(tmp_path / "plan.scale")))
    assert get_shown_diagnostics(now) == []
    assert now.facts
    assert now.facts.program.dim("inner").size == 128


@pytest.mark.parametrize(
    ("words", "name", "why"),
    [
        ("ffn over tp", "hidden", "`hidden` is the name of another dim"),
        ("ffn over tp", "1st", "`1st` cannot be a name"),
        ("batch over", "samples", "`batch` is a word of the language"),
        ("seq = 128", "length", "`seq` is a word of the language"),
    ],
)
def test_names_that_cannot_be_replaced(mlp: Document, words: str, name: str, why: str) -> None:
    mention = mlp.mention(*at(mlp, words))
    assert mention
    with pytest.raises(PlanError, match=why):
        navigate.find_rename_spans([mlp], mention, name)


def test_edits_mend_what_is_wrong(mlp: Document) -> None:
    for right, wrong in (
        ("ffn over", "fnn over"),
        ("over tp", "over tpp"),
        ("lr = ", "learning_rate = "),
    ):
        broken = edited(mlp, right, wrong)
        (action,) = actions(broken, 1, 99)
        assert replaced(broken.source.text, [action.fix.span], action.fix.text) == mlp.source.text


def test_a_mistake_of_a_used_file_is_told_where_that_is_named(full: Document) -> None:
    broken = edited(full, "heads = 128", "heads = 3")
    mistake = next(
        each
        for each in get_shown_diagnostics(broken)
        if Path(each.of.span.path).name == "llama.scale"
    )
    assert (mistake.span.path, mistake.span.line) == (broken.source.path, at(broken, "use ")[0])


def test_a_model_by_itself_has_no_mistake_but_its_own() -> None:
    for path in sorted((ROOT / "plans" / "models").glob("*.scale")):
        assert get_shown_diagnostics(compile_document(parse_document(None, load(path)))) == [], path
    model = load(ROOT / "plans" / "models" / "llama.scale")
    (mistake,) = get_shown_diagnostics(
        parse_document(
            None, Source(model.path, model.text.replace("rmsnorm(x, norm[", "rmsnorms(x, norm["))
        )
    )
    assert mistake.of.code == "E0605"


def test_a_model_by_itself_says_its_dims() -> None:
    model = compile_document(parse_document(None, load(ROOT / "plans" / "models" / "llama.scale")))
    for words, text in (
        ("q = rope", "q: [batch, seq, heads, head_dim]"),
        ("wq[hidden", "wq: [layers, heads, head_dim, hidden]"),
        ("ffn      =", "`ffn` = 14,336"),
    ):
        shown = hover(model, *at(model, words))
        assert shown
        assert shown.text.strip("`\n ") == text.strip("`\n ")
    assert hover(model, *at(model, "batch, seq]")) is None


def test_words_of_the_language_have_their_meaning(mlp: Document) -> None:
    for words, after in (("model", " mlp"), ("init", " ~"), ("repeat", " layers"), ("over", " dp")):
        shown = hover(mlp, *at(mlp, words + after))
        assert shown
        assert (shown.text, shown.span.words) == (MEANINGS[words], words)
    assert hover(mlp, 3, 7) is None, "in a comment"


def test_parameters_of_branches_have_their_dims() -> None:
    model = parse_document(None, load(ROOT / "plans" / "models" / "deepseek_v3.scale"))
    assert model.syntax
    params = [it for it in model.syntax.mentions if it.kind is Kind.PARAM]
    assert len(params) > 9
    assert all(hover(model, it.span.line, it.span.column) for it in params)


def test_colours_cover_each_name_once(mlp: Document) -> None:
    found = [*colours(mlp)]
    assert [it.kind for it in found if it.name == "ffn"] == [Kind.DIM] * 4
    assert all(it.span.words == it.name for it in found)


def shown(parts: Iterable[Part], depth: int = 0) -> Iterator[str]:
    for part in parts:
        yield f"{'  ' * depth}{part.span.line}–{part.span.end_line} {part.kind.words} {part.name}\n"
        yield from shown(part.parts, depth + 1)


def test_the_outline_of_a_plan(mlp: Document, golden: Golden) -> None:
    golden("lsp/outline.txt", "".join(shown(outline(mlp))))
    longer = edited(mlp, "model mlp", "# a comment\nmodel mlp")
    assert [
        part.span.line for part in outline(edited(longer, "loss = cross", "loss = = cross"))
    ] == [part.span.line + 1 for part in outline(mlp)]


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("plans/models/*.scale"))[::3], ids=lambda path: path.stem
)
def test_parts_lie_in_each_other_and_begin_with_their_names(path: Path) -> None:
    def check(parts: Iterable[Part], around: tuple[int, int]) -> None:
        for part in parts:
            assert part.name
            assert part.head.words.startswith(part.name.split(",")[0])
            assert (
                around[0]
                <= part.span.line
                <= part.head.line
                <= part.head.end_line
                <= part.span.end_line
                <= around[1]
            )
            check(part.parts, (part.span.line, part.span.end_line))

    check(outline(parse_document(None, load(path))), (1, 9_999))


@given(
    text=st.text(st.sampled_from("aé€\U0001f600\n"), min_size=1),
    at=st.data(),
    encoding=st.sampled_from([*UNITS]),
)
def test_places_on_the_wire(text: str, at: st.DataObject, encoding: str) -> None:
    """A place that the editor is told is the same when it sends that back; no unit leads into a
    character.
    """
    source, wire = Source("p", text), Wire(encoding)
    start = at.draw(st.integers(0, len(text) - 1))
    span = source.span(start, start + 1)
    range = wire.range_of(span)
    assert wire.place_of(source, range.start) == (span.line, span.column)
    assert wire.place_of(source, range.end) == (span.end_line, span.end_column)
    line = text.split("\n")[span.line - 1][: span.column - 1]
    assert range.start.character == len(line.encode(UNITS[encoding][0])) // UNITS[encoding][1]


def test_what_is_overtaken_is_given_up(mlp: Document) -> None:
    with pytest.raises(Overtaken):
        compile_document(edited(mlp, "dp = 2", "dp = 4"), lambda: True)


def test_the_lines_of_a_program(mlp: Document) -> None:
    assert mlp.facts
    mention = mlp.mention(*at(mlp, "x = x + silu"))
    assert mention
    text, lines = navigate.find_emitted_lines(mlp.facts, mention.span)
    assert any("self.w_in" in text.split("\n")[line - 1] for line in lines)


# ---- whatever is typed


def ask_all(document: Document) -> None:
    """Each question about each name."""
    for it in document.syntax.mentions if document.syntax else ():
        if it.span.path == document.source.path and (span := document.to_current_span(it.span)):
            hover(document, span.line, span.column)
            navigate.definition(document, span.line, span.column)
            call_at(document, span.line, span.column)
    assert all(
        [
            *colours(document),
            *hints(document, 1, 999),
            *actions(document, 1, 999),
            *get_shown_diagnostics(document),
        ]
    )
    assert all(shown(outline(document)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("path", sorted(ROOT.glob("plans/*.scale")), ids=lambda path: path.stem)
def test_every_plan_and_its_model_can_be_asked_about(path: Path) -> None:
    plan = compile_document(parse_document(None, load(path)))
    assert plan.facts, get_shown_diagnostics(plan)
    ask_all(plan)
    assert plan.syntax
    for used in plan.syntax.plans[1:]:
        model = plan.get_view_from_file(Source(used.span.path, used.span.text))
        assert model
        computes = (
            any(isinstance(item, Model) for item in used.items) and len(plan.facts.program.axes) > 1
        )
        assert [*hints(model, 1, 999)] or not computes
        ask_all(model)


def test_a_plan_that_is_typed_letter_by_letter(mlp: Document) -> None:
    document = None
    for end in range(0, len(mlp.source.text) + 1, 5):
        document = parse_document(document, Source(mlp.source.path, mlp.source.text[:end]))
        ask_all(document)
    document = parse_document(document, mlp.source)
    assert document.model
    assert get_shown_diagnostics(document) == []


@pytest.mark.long
def test_a_plan_in_which_each_word_is_left_out(mlp: Document) -> None:
    assert mlp.syntax
    for it in mlp.syntax.mentions:
        broken = parse_document(
            mlp, Source(mlp.source.path, replaced(mlp.source.text, [it.span], ""))
        )
        ask_all(broken if broken.mistakes else compile_document(broken))


@given(text=st.text(st.sampled_from('{}[]()=,#" \n\u0000\U0001f600abtrain0over@'), max_size=40))
def test_any_text_is_told_about(text: str) -> None:
    ask_all(parse_document(None, Source("any", text)))


def test_names_of_what_comes_with_scalec_stay(full: Document) -> None:
    shipped = edited(full, "models/llama.scale", "scalec:models/llama.scale")
    mention = shipped.mention(*at(shipped, "ffn over tp"))
    assert mention
    assert mention.kind is Kind.DIM
    with pytest.raises(PlanError, match="comes with scalec"):
        navigate.find_rename_spans([shipped], mention, "inner")
    found = navigate.definition(shipped, *at(shipped, "scalec:models"))
    assert found
    assert Path(found.path).samefile(ROOT / "plans" / "models" / "llama.scale")


@given(text=st.text("a \n", max_size=12), line=st.integers(1, 5), column=st.integers(1, 9))
def test_the_offset_of_a_place(text: str, line: int, column: int) -> None:
    """Beyond the end of a line, that of its end; beyond the text, that of the text's."""
    lines = text.split("\n")
    expected = len(text) if line > len(lines) else sum(len(each) + 1 for each in lines[: line - 1])
    within = min(column - 1, len(lines[line - 1])) if line <= len(lines) else 0
    assert offset(text, line, column) == expected + within


@given(
    before=st.text("ab\n", max_size=9),
    old=st.text("ab\n", max_size=4),
    new=st.text("ab\n", max_size=4),
)
def test_places_outside_of_an_edit_move_with_their_text(before: str, old: str, new: str) -> None:
    """A word after the edited stretch, and one before it, are where they are found."""
    one, other = (Source("p", f"{before}<1>{each}<2>{before}") for each in (old, new))
    moved = TextChange(one, other)
    for word in ("<1>", "<2>"):
        first, now = (each.text.index(word) for each in (one, other))
        assert moved.after(one.span(first, first + 3)) == other.span(now, now + 3)
        assert moved.back(other.span(now, now + 3)) == one.span(first, first + 3)
