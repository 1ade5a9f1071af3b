"""The tutorial's plans compile, train, and make one update; what its page quotes is what scalec
prints.
"""

import json
import re
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest

from helpers.launched import run_file
from scalec.compiler import cli
from scalec.compiler.syntax.limits import load
from scalec.tools.formatter import format_plan

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
PLANS = sorted((ROOT / "docs" / "tutorial").glob("[0-9]*.scale"))
BLOCKS = re.findall(
    r"(?:<!-- (\S+) -->\n)?```(scale|text|python)\n(.*?)```",
    PAGE.read_text(encoding="utf-8"),
    re.DOTALL,
)
SHOWN = {
    kind: [(place, block) for place, of, block in BLOCKS if of == kind]
    for kind in ("scale", "python")
}
QUOTED = [block for _, kind, block in BLOCKS if kind == "text"]


@pytest.fixture
def here(working_folder: Path) -> Path:
    """A folder with the tutorial's plans, where commands run."""
    for folder in ("docs/tutorial", "plans"):
        shutil.copytree(ROOT / folder, working_folder / folder)
    return working_folder


def test_there_are_ten_plans_in_order() -> None:
    shown = dict.fromkeys(Path(place).name for place, kind, _ in BLOCKS if kind == "scale")
    assert [name for name in shown if name != "model.scale"] == [path.name for path in PLANS]
    assert len(PLANS) == 10


@pytest.mark.parametrize(("place", "block"), SHOWN["scale"], ids=lambda text: text.split("\n")[0])
def test_the_page_shows_the_plans_as_they_are(place: str, block: str) -> None:
    assert block in (ROOT / place).read_text(encoding="utf-8")


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
def test_plans_are_laid_out(plan: Path) -> None:
    source = load(plan)
    assert format_plan(source) == source.text


def test_the_page_shows_the_program_as_it_is(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place, block), *others = SHOWN["python"]
    assert not others
    assert cli.main(["compile", place, "-o", "out"]) == 0
    assert block in (here / "out" / "train.py").read_text(encoding="utf-8")
    capsys.readouterr()


@pytest.mark.parametrize("block", QUOTED, ids=lambda block: block.split("\n")[0])
def test_the_page_shows_what_is_printed(
    block: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line for line, but for those left out at `…` and after the last; a comment says what is
    edited before.
    """
    command, *lines = block.splitlines()
    words, _, edit = command.removeprefix("$ scalec ").partition("#")
    arguments = words.split()
    if edit:
        name = edit.split()[1]
        plan = here / arguments[-1]
        plan.write_text(
            re.sub(rf"\b{name} = \d+", edit.removeprefix(" with "), plan.read_text()),
            encoding="utf-8",
        )
    assert cli.main(arguments) == (1 if edit else 0)
    captured = capsys.readouterr()
    printed: Iterator[str] = iter((captured.out + captured.err).splitlines())
    for line in lines:
        assert line == "…" or line in printed, f"not printed, or not there: {line}"


@pytest.mark.sample(3)
@pytest.mark.parametrize("plan", PLANS[1:8], ids=lambda path: path.stem)
def test_the_first_eight_make_the_same_update(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(PLANS[0]), str(plan)]) == 0
    assert "make the same update" in capsys.readouterr().out


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
def test_each_plan_trains(plan: Path, tmp_path: Path) -> None:
    assert cli.main(["compile", str(plan), "-o", str(tmp_path)]) == 0
    ranks = json.loads((tmp_path / "plan.json").read_text())["mesh"]
    ended = run_file(tmp_path, prod(ranks.values()), "--steps=2")
    assert [status for status, _ in ended] == [0] * len(ended), ended
