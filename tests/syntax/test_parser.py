"""The syntax tree, its spans, and the bounds on what is read."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lark import Transformer
from lark.exceptions import UnexpectedInput

import scalec.plans
from scalec.compiler.syntax import lark_parser
from scalec.compiler.syntax.diagnostics import Diagnostic, Note, PlanError, render
from scalec.compiler.syntax.limits import MAX_BYTES, load
from scalec.compiler.syntax.parser import parse_plan
from scalec.compiler.syntax.source import Source, Span
from scalec.compiler.syntax.tree import (
    Binary,
    Bind,
    Call,
    Expr,
    If,
    Init,
    Input,
    List,
    Model,
    Name,
    Negative,
    Number,
    ParamUse,
    Repeat,
    Rule,
    Section,
    Setting,
    String,
    Use,
    UserOp,
)

PLANS = sorted(Path(scalec.plans.__path__[0]).rglob("*.scale"))
NOWHERE = Span("", 0, 0, 0, 0)


def parse(text: str) -> tuple[Use | Model | UserOp | Section, ...]:
    return parse_plan(Source("m.scale", text)).items


def value(text: str) -> Expr:
    match parse(f"s {{ k = {text} }}"):
        case (Section(entries=(Setting(value=value),)),):
            return value
        case other:
            raise AssertionError(other)


def name(text: str) -> Name:
    return Name(text, NOWHERE)


def number(value: float, unit: str = "") -> Number:
    return Number(value, unit, NOWHERE)


# ---- trees


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("1_000", number(1000)),
        ("3e-4", number(3e-4)),
        ("0.5", number(0.5)),
        ("25MiB", number(25, "MiB")),
        ("5%", number(5, "%")),
        (r'"a\"\\\n\t#"', String('a"\\\n\t#', NOWHERE)),
        ("[a, 1,]", List((name("a"), number(1)), NOWHERE)),
        ("[]", List((), NOWHERE)),
        ("-a", Negative(name("a"), NOWHERE)),
        ("a - b * c", Binary("-", name("a"), Binary("*", name("b"), name("c"), NOWHERE), NOWHERE)),
        ("a - b - c", Binary("-", Binary("-", name("a"), name("b"), NOWHERE), name("c"), NOWHERE)),
        (
            "(a - b) / c",
            Binary("/", Binary("-", name("a"), name("b"), NOWHERE), name("c"), NOWHERE),
        ),
        (
            "f(a, k=1)",
            Call(name("f"), (name("a"),), (Setting(name("k"), number(1), NOWHERE),), NOWHERE),
        ),
        ("w[a -> b, c]", ParamUse(name("w"), (name("a"),), (name("b"), name("c")), NOWHERE)),
        ("w[a, b]", ParamUse(name("w"), (), (name("a"), name("b")), NOWHERE)),
        ("overt", name("overt")),
    ],
)
def test_expressions(text: str, tree: Expr) -> None:
    assert value(text) == tree


def test_a_plan() -> None:
    text = """
    use "x.scale" { dims { a = 1 } }
    model m(t[b, s]) { init ~ zeros  init w ~ normal(1)  repeat l { x, y = t } }
    shard { a, b over x, y }
    """
    ab, xy = (name("a"), name("b")), (name("x"), name("y"))
    dims = Section(name("dims"), None, (Setting(name("a"), number(1), NOWHERE),), NOWHERE)
    inits = (
        Init((), name("zeros"), NOWHERE),
        Init((name("w"),), Call(name("normal"), (number(1),), (), NOWHERE), NOWHERE),
    )
    repeat = Repeat(name("l"), (Bind(xy, name("t"), NOWHERE),), NOWHERE)
    inputs = (Input(name("t"), (name("b"), name("s")), NOWHERE),)
    assert parse(text) == (
        Use(String("x.scale", NOWHERE), (dims,), NOWHERE),
        Model(name("m"), inputs, (), (*inits, repeat), NOWHERE),
        Section(name("shard"), None, (Rule(ab, xy, None, None, NOWHERE),), NOWHERE),
    )


def test_branches() -> None:
    (model,) = parse(
        "model m(t[b]) { repeat l as i { if i < 2 + k { x = as } else { if j < 1 { } } if i <"
        " 3 { y = x } } }"
    )
    x, y, end = name("x"), name("y"), Binary("+", number(2), name("k"), NOWHERE)
    inner = If(name("j"), number(1), (), (), NOWHERE)
    first = If(name("i"), end, (Bind((x,), name("as"), NOWHERE),), (inner,), NOWHERE)
    second = If(name("i"), number(3), (Bind((y,), x, NOWHERE),), (), NOWHERE)
    assert isinstance(model, Model)
    assert model.body == (Repeat(name("l"), (first, second), NOWHERE, name("i")),)


def test_ops_of_several_results() -> None:
    (op,) = parse('op f(x[.., d]) -> [.., d], [d], [..] over .. from "a:b"')
    assert isinstance(op, UserOp)
    assert [[*map(str, dims)] for dims in op.gives] == [["..", "d"], ["d"], [".."]]
    assert [*map(str, op.along)] == [".."]


def test_keywords_are_names_elsewhere() -> None:
    assert value("if + as * else") == Binary(
        "+", name("if"), Binary("*", name("as"), name("else"), NOWHERE), NOWHERE
    )
    assert value("init + model") == Binary("+", name("init"), name("model"), NOWHERE)
    assert value("every(2, every)") == Call(name("every"), (number(2), name("every")), (), NOWHERE)


def test_numbers_of_steps() -> None:
    (section,) = parse("watch { every every 10 # or\n copies every # of steps\n 1_000 replay = 5 }")
    pairs = [("every", 10, True), ("copies", 1000, True), ("replay", 5, False)]
    assert isinstance(section, Section)
    assert section.entries == tuple(
        Setting(name(key), number(n), NOWHERE, every=said) for key, n, said in pairs
    )


def test_spans_are_those_of_the_text() -> None:
    (section,) = parse("mesh {\n  dp = (2\n    + 3)\n}")
    assert isinstance(section, Section)
    (setting,) = section.entries
    assert isinstance(setting, Setting)
    assert (
        section.span.line,
        section.span.column,
        section.span.end_line,
        section.span.end_column,
    ) == (1, 1, 4, 2)
    assert (section.head.end_line, section.head.end_column) == (1, 5)
    at = setting.value.span
    assert (at.line, at.column, at.end_line, at.end_column) == (2, 8, 3, 9)
    assert str(setting.span) == "m.scale:2"


def test_a_chain_of_thousands() -> None:
    value("a" + " + a" * 10_000)


# ---- bounds


def get_first_message(text: str) -> str:
    with pytest.raises(PlanError) as error:
        parse(text)
    return error.value.diagnostics[0].message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s { k = " + "[" * 64, "brackets nest deeper than 64"),
        ("# " + "x" * MAX_BYTES, "`m.scale` is larger than 64 KiB"),
        ("mesh {\0}", "a plan is text, but this is a NUL character"),
        (f"s {{ k = {'9' * 21} }}", "a number of more than 20 digits"),
        ("s { k = 1e999 }", "this number is too large"),
        ("s { k = 1e-999 }", "this number is too small: it would become 0"),
        (r's { k = "\x" }', r"`\x` is not an escape"),
    ],
)
def test_bounds(text: str, message: str) -> None:
    assert get_first_message(text) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file `{path}`"),
        (b"mesh {\n \xff }", "`{path}` is not UTF-8: byte 0xff on line 2"),
        (b" " * (MAX_BYTES + 1), "`{path}` is larger than 64 KiB"),
    ],
)
def test_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "p.scale"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError) as error:
        load(path)
    assert error.value.diagnostics[0].message == message.format(path=path)
    assert str(error.value).endswith(f"--> {path}")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is not a file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("there", "named", "help"),
    [
        ("mine.scale", "mine.scal", "did you mean `{}/mine.scale`?"),
        ("out/train.py", "out", "did you mean `{}/out/train.py`?"),
        ("llama/config.json", "llama", "did you mean `{}/llama/config.json`?"),
        ("notes/a.txt", "notes", ""),
        ("other.scale", "mine.scale/deeper", ""),
    ],
)
def test_a_path_that_is_no_file_has_the_file_that_may_be_meant_beside_it(
    tmp_path: Path, there: str, named: str, help: str
) -> None:
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("")
    with pytest.raises(PlanError) as error:
        load(tmp_path / named)
    assert error.value.diagnostics[0].help == help.format(tmp_path)


@pytest.mark.parametrize("path", PLANS, ids=["/".join(path.parts[-2:]) for path in PLANS])
def test_the_plans_parse(path: Path) -> None:
    parse_plan(load(path))


# ---- nothing but PlanError, whatever the text

SNIPPETS = [
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "->",
    "=",
    "~",
    ",",
    '"',
    "#",
    "\n",
    "over",
    "1e",
    "é",
    "\x1b",
    "w[",
    "use",
    "\\",
    "-",
]
edits = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 30), st.sampled_from(["", *SNIPPETS])),
    max_size=4,
)


def get_message(text: str) -> str:
    try:
        parse(text)
    except PlanError as error:
        return str(error)
    return ""


def is_safe_to_print(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


@settings(max_examples=150)
@given(st.sampled_from(PLANS), edits)
def test_mutated_plans(path: Path, edits: list[tuple[int, int, str]]) -> None:
    text = path.read_text(encoding="utf-8")
    for at, length, snippet in edits:
        text = text[:at] + snippet + text[at + length :]
    assert is_safe_to_print(get_message(text))


@given(
    st.text(max_size=80)
    | st.lists(st.sampled_from([*SNIPPETS, "a", "1"]), max_size=30).map(" ".join)
)
def test_garbage(text: str) -> None:
    assert is_safe_to_print(get_message(text))


# ---- the cache of tables


def parse_anew(text: str) -> None:
    """Reads a text with a parser that is made for it alone."""
    lark_parser.parser("plan", Transformer()).parse(text)


def test_the_table_is_cached_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parse_anew("mesh { }")
    (table,) = (tmp_path / "scalec").iterdir()
    assert not (tmp_path / "scalec").stat().st_mode & 0o077
    table.write_bytes(b"damaged")
    parse_anew("mesh { }")


def test_no_cache_where_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "scalec"
    folder.mkdir()
    folder.chmod(0o777)
    parse_anew("mesh { }")
    assert not os.listdir(folder)


def test_no_cache_without_a_place_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    parse_anew("mesh { }")


def test_versions_that_differ_in_an_imported_grammar_share_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = "mesh { dp = 2 } ; of another version"
    with pytest.raises(UnexpectedInput):
        parse_anew(text)
    shutil.copytree(lark_parser.folder("grammar"), tmp_path / "grammar")
    sections = tmp_path / "grammar" / "sections.lark"
    sections.write_text(sections.read_text().replace("COMMENT: /#", "COMMENT: /[#;]"))
    monkeypatch.setattr(lark_parser, "folder", lambda package: tmp_path / package)
    parse_anew(text)


# ---- rendering


def test_places_in_other_files_and_colour() -> None:
    here = Source("a.scale", "use x").span(4, 5)
    there = Source("b.scale", "\n\ttab").span(2, 5)
    told = Diagnostic(
        "E0104", "wrong", here, "this", (Note(there, "that"), Note(None, "noted")), "one\ntwo"
    )
    assert render(told) == "\n".join(
        [
            "error[E0104]: wrong",
            " --> a.scale:1:5",
            "  |",
            "1 | use x",
            "  |     ^ this",
            " ::: b.scale:2:2",
            "  |",
            "2 |  tab",
            "  |  --- that",
            "  |",
            "  = note: noted",
            "  = help: one",
            "          two",
        ]
    )
    assert "\x1b[1;31merror[E0104]\x1b[0m" in render(told, colour=True)


def test_errors_are_ordered_by_position() -> None:
    source = Source("a.scale", "x\ny")
    first, second = (Diagnostic("E0104", "wrong", source.span(at, at + 1)) for at in (0, 2))
    assert PlanError([second, first]).diagnostics == (first, second)
    assert str(PlanError([second, first])) == f"{first}\n\n{second}"
