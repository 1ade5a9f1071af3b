"""An example of every code as it is told, letter for letter; those of runs and files are in the
tests of these.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reports.test_codes import compiled
from scalec.compiler.analysis.memory import account, fits, too_large
from scalec.compiler.emit.dtensor import refusals
from scalec.compiler.reports.lints import advice
from scalec.compiler.syntax.codes import get_codes, get_example_plan
from scalec.compiler.syntax.diagnostics import Diagnostic, PlanError
from scalec.compiler.syntax.source import Source
from scalec.tools.importer import import_config

PLAN = get_example_plan()
OP = 'op f(x[.., d]) -> [.., e] over .. from "own:f"\n'
EDITS = {  # of the plan that `scalec explain` shows, for codes of which it shows no wrong plan
    "E0102": ("theta = 10000", f"theta = {'(' * 64}1{')' * 64}"),
    "E0205": ("model llama", 'use "plan.scale"\nmodel llama'),
    "E0217": ("model llama", f"{OP}model llama"),
    "E0218": ("model llama", f"{OP.replace('e]', 'd]')}model llama"),
    "E0314": ("vocab = 64", "vocab = 32 pad 64"),
    "E0602": ("x = x + m", "x, y = x + m"),
}
ELSEWHERE = {  # the tests of what only a run, a proof, a file of IR or a configuration can have
    "E0190": "ir/test_text.py",
    "E0413": "passes/test_fuse_ops.py",
    "W0915": "analysis/memory/test_fits.py",
    "E0221": "frontend/test_user_ops.py",
    "E0222": "testing/test_op_trial.py",
    "E0701": "proof/test_locate.py",
    "E0702": "cli/test_verify.py",
    "E0703": "cli/test_verify.py",
    "E0705": "proof/test_proof.py",
    "E0706": "cli/test_edited_ir.py",
    "E0801": "tools/importer/test_import.py",
    "E0803": "tools/importer/test_import.py",
    "E0804": "tools/importer/test_import.py",
}


def diagnostics(make: Callable[[], Any]) -> tuple[Diagnostic, ...]:
    """The errors that are raised, or else the warnings of the program that is made."""
    try:
        program = make()
    except PlanError as error:
        return error.diagnostics
    needs = account(program)
    return (
        *advice(program),
        *([too_large(program, needs, "")] if fits(program, needs) is False else []),
    )


def written(text: str, target: str = "") -> Callable[[], Any]:
    return lambda: compiled(text, target)


def makers() -> dict[str, Callable[[], Any]]:
    """For each code something that has it."""
    found: dict[str, Callable[[], Any]] = {}
    for code, row in get_codes().items():
        if row.wrong:
            found[code] = written(PLAN.replace(row.place, row.wrong), row.target)
    for code, edit in EDITS.items():
        assert edit[0] in PLAN
        found[code] = written(PLAN.replace(*edit, 1))
    ring = (
        ("tp = 2", "cp = 2"),
        ("vocab, heads, kv_heads, ffn over tp  seq over tp", "seq over cp via ring"),
    )
    dropped = PLAN.replace("mask=causal", "mask=causal, dropout=0.1")
    for before, after in ring:
        dropped = dropped.replace(before, after)
    return found | {
        "E0611": written(dropped),
        "E0101": written('use "none.scale"'),
        "E0202": written("mesh { }"),
        "E0203": written(f"{PLAN}\nmodel other(tokens[batch, seq], labels[batch, seq]) {{ }}"),
        "E0802": lambda: import_config(Source("config.json", "[")),
    }


def get_diagnostic_text(code: str, make: Callable[[], Any]) -> str:
    each = next((it for it in diagnostics(make) if it.code == code), None)
    assert each, f"{code} is not told"
    return str(each)


def test_each_code_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(refusals, "version", lambda _: "2.13.0")  # whichever there is
    Path("own.py").write_text("def g(x):\n    return x\n")
    Path("plan.scale").write_text(PLAN)
    made = makers()
    golden(
        "codes.txt",
        "".join(
            f"{get_diagnostic_text(code, made[code])}\n\n" for code in get_codes() if code in made
        ),
    )


def test_every_code_has_an_example() -> None:
    tests = Path(__file__).parents[1]
    shown = {
        code
        for path in tests.glob("golden/**/*.txt")
        for code in re.findall(r"\[([EW]\d{4})\]", path.read_text())
    }
    for code, test in ELSEWHERE.items():
        assert code in (tests / test).read_text(), f"{code} is not in {test}"
    assert not get_codes().keys() - shown - ELSEWHERE.keys()
