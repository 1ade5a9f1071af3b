"""Figures of README, docs and plans that a command can check."""

import re
from math import prod
from pathlib import Path

import pytest

from scalec.compiler.frontend import resolve
from scalec.compiler.ir import SEQUENCE
from scalec.compiler.syntax.limits import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PLANS = sorted((ROOT / "plans").glob("*.scale"))
NUMBERS = {"five": 5, "ten": 10, "sixteen": 16}


def test_the_tutorial_has_as_many_plans_as_readme_says() -> None:
    (said,) = re.findall(r"from one process to five axes in (\w+) plans", README)
    assert NUMBERS[said] == len([*(ROOT / "docs" / "tutorial").glob("[0-9]*.scale")])


def test_as_many_plans_have_experts_as_readme_says() -> None:
    (said,) = re.findall(r"in `plans/`, the (\w+) with experts", README)
    assert NUMBERS[said] == len([path for path in PLANS if resolve(load(path)).choices])


def test_the_plan_of_five_axes_has_as_many_processes_as_readme_says() -> None:
    (said,) = re.findall(r"`plans/tiny_five.scale` has all five axes at once, [^`]* on (\d+) processes", README)
    assert int(said) == resolve(load(ROOT / "plans" / "tiny_five.scale")).ranks


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_first_comment_of_a_plan_says_its_gpus_and_parameters(path: Path) -> None:
    comment = path.read_text("utf-8").split("\n\n")[0]
    program = resolve(load(path))
    for said in re.findall(r"on ([\d,]+) GPUs", comment)[:1]:
        assert int(said.replace(",", "")) == program.ranks
    for said in re.findall(r"([\d,]{5,}) parameters", comment)[:1]:
        count = sum(prod(map(program.valid, param.type.dims)) for param in program.params)
        assert int(said.replace(",", "")) == count


@pytest.mark.parametrize("path", sorted((ROOT / "plans" / "models").glob("*.scale")), ids=lambda path: path.stem)
def test_the_first_comment_of_a_model_says_its_parameters(path: Path) -> None:
    text = path.read_text("utf-8")
    run = "train { seq = 8  global_batch = 1  microbatch = 1  steps = 1  optimizer sgd { lr = 1.0 }"
    run += "  data text { files = [python_stdlib] } }"
    source = load(path)
    program = resolve(type(source)(source.path, f"{source.text}\n{run}"))
    for said in re.findall(r"([\d,]{5,}) parameters", text.split("\nmodel ")[0])[:1]:
        if not any(SEQUENCE in param.type.dims for param in program.params):
            count = sum(prod(map(program.valid, param.type.dims)) for param in program.params)
            assert int(said.replace(",", "")) == count


def test_the_time_of_the_proof_has_been_measured() -> None:
    (least, most) = re.findall(r"run the same proof, ([\d.]+) to (\d+) s of CPU time", README)[0]
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8")
    section = results.split("## The proof of each plan of `plans/`, CPU time")[1].split("\n## ")[0]
    seconds = {name: float(time) for name, time in re.findall(r"^\| (\w+) \| ([\d.]+) \|$", section, re.MULTILINE)}
    assert seconds.keys() == {path.stem for path in PLANS}
    assert float(least) == round(min(seconds.values()), 1)
    assert max(seconds.values()) <= float(most)
