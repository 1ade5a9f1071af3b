"""`scalec explain CODE`: every text belongs to a code; wrong plans have it, right plans compile."""

import re
from pathlib import Path

import pytest

from scalec.compiler.analysis.memory import account, fits, too_large
from scalec.compiler.cli import main
from scalec.compiler.cli.compile import DTENSOR
from scalec.compiler.emit.dtensor import emit, for_torch
from scalec.compiler.frontend import resolve
from scalec.compiler.ir import Program
from scalec.compiler.reports.lints import advice
from scalec.compiler.syntax.codes import (
    CONSTANT,
    NAME,
    PLACELESS,
    WHOLE,
    get_code,
    get_codes,
    get_example_plan,
)
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower

ROOT = Path(__file__).parents[2]
PLAN = get_example_plan()
SHOWN = [code for code, row in get_codes().items() if row.wrong]


def compiled(text: str, target: str = "") -> Program:
    """The program of a plan, of which one of torch alone is written where that is the `target`."""
    source = Source("plan.scale", text)
    if target != DTENSOR:
        return compile_plan(source)
    program = lower(for_torch(resolve(source)))
    emit(program, source)
    return program


def codes(text: str, target: str) -> set[str]:
    """The codes of a plan's errors, or else of its warnings."""
    try:
        program = compiled(text, target)
    except PlanError as error:
        return {each.code for each in error.diagnostics}
    needs = account(program)
    large = [too_large(program, needs, "")] if fits(program, needs) is False else []
    return {each.code for each in (*advice(program), *large)}


def test_every_code_of_the_source_has_a_row_and_every_row_is_used() -> None:
    used: set[str] = set()
    for folder in ("compiler", "tools", "testing"):
        for path in (ROOT / folder).rglob("*.py"):
            used.update(re.findall(r'"([EW]\d{4})"', path.read_text(encoding="utf-8")))
    assert get_codes().keys() == used


def test_rows_are_in_the_order_of_their_numbers() -> None:
    assert [*get_codes()] == sorted(get_codes())


def test_fields_of_a_few_words_have_one_of_these() -> None:
    for row in get_codes().values():
        assert row.once_for in ("", NAME, CONSTANT)
        assert row.leaves in ("", WHOLE, PLACELESS)


@pytest.mark.sample(48)
@pytest.mark.parametrize("code", SHOWN)
def test_the_wrong_plan_has_the_code_and_the_right_one_compiles(code: str) -> None:
    row = get_code(code)
    assert PLAN.count(row.place) == 1
    assert code in codes(PLAN.replace(row.place, row.wrong), row.target)
    assert not codes(PLAN.replace(row.place, row.right), row.target)


@pytest.mark.parametrize("code", get_codes())
def test_every_code_is_explained(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("explain", code.lower())) == 0
    assert capsys.readouterr().out.startswith(f"{code}: {get_code(code).title}\n")


def test_words_of_several_lines_are_indented_as_in_a_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(("explain", "E0707")) == 0
    assert (
        ", 2) {\n    m = silu(m @ e_in[hidden -> expert_ffn]) @ e_out[expert_ffn -> hidden]\n  }\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain", "EO510"), "cannot explain `EO510`: did you mean `E0510`?"),
        (("explain", "memry", "plan.scale"), "cannot explain `memry`: did you mean `memory`?"),
        (("explain", "memory"), "`scalec explain memory` needs a plan"),
        (("explain", "E0510", "plan.scale"), "`scalec explain E0510` takes no plan"),
    ],
)
def test_other_words(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {said}\n"
