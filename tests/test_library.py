"""`import scalec`: the page that describes it, what it loads, its errors."""

import doctest
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scalec

assert scalec.__file__, (
    "scalec was installed before it could be imported as a library: run `make setup` once more"
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "library.md"
TEXT = (
    (ROOT / "plans" / "tiny_llama.scale")
    .read_text(encoding="utf-8")
    .replace('"models/', '"scalec:models/')
)


def test_the_page_says_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 10
    assert not failed


def test_the_page_names_all_that_there_is() -> None:
    said = set(re.findall(r"`plan\.(\w+)", PAGE.read_text(encoding="utf-8")))
    assert said == {name for name in vars(scalec.Plan) if not name.startswith("_")} - {"text"}
    assert {*dir(scalec)} == {"Diagnostic", "OutputError", "Plan", "PlanError", "compile", "plan"}


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = (
        "import sys, scalec; print(sorted({'attr', 'attrs', 'lark', 'argparse', 'torch'} &"
        " {*sys.modules}))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"


def test_a_name_that_it_lacks() -> None:
    with pytest.raises(AttributeError, match="module `scalec` has no attribute `complie`"):
        scalec.complie  # type: ignore[attr-defined]  # noqa: B018


def test_a_file_and_a_text_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "mine.scale"
    path.write_text(TEXT)
    assert (
        scalec.plan(TEXT).ir
        == scalec.compile(TEXT).ir
        == scalec.plan(path).ir.replace("mine.scale", "plan.scale")
    )
    assert scalec.plan(scalec.plan(TEXT).ir).collectives == scalec.plan(TEXT).collectives
    with pytest.raises(scalec.PlanError, match=r"there is no file `none\.scale`"):
        scalec.plan(os.fspath("none.scale"))


def test_errors_carry_all_diagnostics() -> None:
    with pytest.raises(scalec.PlanError) as caught:
        scalec.compile(TEXT.replace("tp = 2", "tp = 3"), "notes/one.scale")
    assert {each.code for each in caught.value.diagnostics} == {"E0510"}
    assert len(caught.value.diagnostics) > 1
    assert "one.scale:" in str(caught.value)


def test_warnings() -> None:
    (found,) = scalec.compile(f"{TEXT}\ncluster {{ reserve = 1GiB }}").diagnostics
    assert found.code == "W0916"


def test_what_it_writes_is_what_the_command_writes(tmp_path: Path) -> None:
    from scalec.compiler.cli import main

    plan = ROOT / "plans" / "tiny_llama.scale"
    assert scalec.plan(plan).write(tmp_path / "a") == tmp_path / "a" / "train.py"
    assert main(["compile", str(plan), "-o", str(tmp_path / "b")]) == 0
    for name in ("train.py", "plan.json"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()
    unproved = scalec.plan(plan).write(tmp_path / "c", verify=False)
    assert "--no-verify" in unproved.read_text()
    (tmp_path / "a" / "train.py").write_text("mine\n")
    with pytest.raises(scalec.OutputError, match="was not written by scalec"):
        scalec.plan(plan).write(tmp_path / "a")


def test_a_report_is_the_page_of_the_command(tmp_path: Path) -> None:
    """A notebook shows it in a frame of its own, whatever else is on its page."""
    from scalec.compiler.cli import main

    paths = [ROOT / "plans" / name for name in ("tiny_llama.scale", "llama3_8b.scale")]
    assert (
        main(["report", *map(str, paths), "-o", str(tmp_path / "a.html"), "--tokens", "15T"]) == 0
    )
    page = scalec.plan(paths[0]).report(scalec.plan(paths[1]), tokens=15e12)
    page.save(tmp_path / "b.html")
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text() == page.html
    (cell,) = re.findall(r'<iframe srcdoc="([^"]*)"', page._repr_html_())
    assert html.unescape(cell) == page.html
    assert "--no-verify" in scalec.plan(TEXT).report(verify=False).html


def test_time_of_an_unknown_gpu() -> None:
    with pytest.raises(ValueError, match=r"needs `cluster \{ gpu = … \}`"):
        scalec.plan(TEXT).explain("time")
    plan = scalec.plan(f"{TEXT}\ncluster {{ gpu = h100_sxm }}")
    assert plan.time
    assert f"{plan.time.mfu:.1%}"[:3] in plan.explain("time")
