"""Edits that mend mistakes: each row of the table by a plan that is wrong in one place."""

import re
from pathlib import Path

import pytest

from helpers.edited_text import replaced
from scalec.compiler.reports.lints import advice
from scalec.compiler.syntax.codes import get_code, get_codes, get_example_plan
from scalec.compiler.syntax.diagnostics import Diagnostic, PlanError
from scalec.compiler.syntax.fixes import ROWS, fixes
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

RIGHT = load(Path(__file__).parents[2] / "examples" / "06_mlp.scale")

PLAN = get_example_plan()
SHOWN = [code for code, row in get_codes().items() if row.wrong]

MENDED = [
    ("ffn over tp", "fnn over tp", "ffn over tp"),
    ("over dp", "over dpp", "over dp"),
    ("silu(", "swish(", "silu("),
    ("lr = 1e-3", "learning_rate = 1e-3", "lr = 1e-3"),
    ("global_batch = 16", "global_batch = 9", "global_batch = 16"),
    ("dp = 2", "dp = 4..2", "dp = 2..4"),
    ("@ head[hidden -> vocab]", "@ wte[vocab, hidden]", "@ wte"),
    ("[python_stdlib]", '["python_stdlib"]', "[python_stdlib]"),
    ("seq = 128", "seq = 128.0", "seq = 128"),
    ("batch over dp", "batch = dp", "batch over dp"),
    (
        "steps =",
        "precision = bf16  reduce = fp16  steps =",
        "precision = bf16  reduce = bf16  steps =",
    ),
    ("steps =", "room = 1.5  steps =", "steps ="),
    ("head[hidden -> vocab]", "head[hidden => vocab]", "head[hidden -> vocab]"),
    ("steps = 100", "steps : 100", "steps = 100"),
    ("x = embedding", "x := embedding", "x = embedding"),
    ("seq = 128", "seq 128", "seq = 128"),
    ("batch over dp", "batch -> dp", "batch over dp"),
    ("over tp", "over [tp]", "over tp"),
    ("init ~", "init =", "init ~"),
    ("[python_stdlib]", "[python_stdlib.txt]", '["python_stdlib.txt"]'),
    ("clip = 1.0", "clip = .5", "clip = 0.5"),
    ("mesh  {", "mesh = {", "mesh {"),
    (
        "train {",
        "cluster { gpu = v100_16gb  gpus_per_node = 4 }\ntrain {\n  kernels = triton",
        "kernels = torch",
    ),
]


def get_diagnostics(source: Source) -> list[Diagnostic]:
    """All that is wrong with a plan."""
    try:
        return [*advice(compile_plan(source))]
    except PlanError as error:
        return [*error.diagnostics]


@pytest.mark.parametrize(("words", "wrong", "mended"), MENDED)
def test_the_first_edit_mends_the_plan(words: str, wrong: str, mended: str) -> None:
    broken = Source(RIGHT.path, RIGHT.text.replace(words, wrong, 1))
    found = [fix for diagnostic in get_diagnostics(broken) for fix in fixes(diagnostic)]
    assert found, get_diagnostics(broken)
    text = replaced(broken.text, [found[0].span], found[0].text)
    assert mended in text
    if mended not in wrong:
        assert get_diagnostics(Source(RIGHT.path, text)) == []


def test_each_row_is_used() -> None:
    texts = [RIGHT.text.replace(words, wrong, 1) for words, wrong, _ in MENDED]
    texts += [PLAN.replace(get_code(code).place, get_code(code).wrong) for code in SHOWN]
    helps = {each.help for text in texts for each in get_diagnostics(Source("p", text))}
    assert not [says for says, *_ in ROWS if not any(re.search(says, help) for help in helps)]


@pytest.mark.parametrize("code", SHOWN)
def test_each_edit_mends_the_example_of_a_code(code: str) -> None:
    """An edit may show another mistake, as a name that is now right is used wrongly; never the
    same.
    """
    row = get_code(code)
    broken = Source("plan.scale", PLAN.replace(row.place, row.wrong))
    for diagnostic in get_diagnostics(broken):
        for fix in fixes(diagnostic) if diagnostic.code == code else ():
            now = get_diagnostics(Source("plan.scale", replaced(broken.text, [fix.span], fix.text)))
            assert (code, diagnostic.message) not in {(each.code, each.message) for each in now}


@pytest.mark.parametrize(
    ("words", "wrong", "offered"),
    [
        ("over tp", "over model", ["dp", "tp"]),
        ("train {", "cluster { gpu = v100 }\ntrain {", ["v100_16gb", "v100_32gb"]),
        ("lr = 1e-3", "lr = 1e-3  schedule = linear", ["constant", "cosine"]),
    ],
)
def test_a_few_words_to_choose_from_are_an_edit_each(
    words: str, wrong: str, offered: list[str]
) -> None:
    broken = Source(RIGHT.path, RIGHT.text.replace(words, wrong, 1))
    found = [fix for diagnostic in get_diagnostics(broken) for fix in fixes(diagnostic)]
    assert [fix.text for fix in found] == offered
    for fix in found:
        messages = {
            each.message
            for each in get_diagnostics(
                Source(RIGHT.path, replaced(broken.text, [fix.span], fix.text))
            )
        }
        assert not messages & {each.message for each in get_diagnostics(broken)}


def test_a_help_that_says_no_words_is_no_edit() -> None:
    uneven = Source(RIGHT.path, RIGHT.text.replace("ffn = 256", "ffn = 255"))
    assert [fix for diagnostic in get_diagnostics(uneven) for fix in fixes(diagnostic)] == []
