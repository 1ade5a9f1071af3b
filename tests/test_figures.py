"""Figures of README, docs and plans that a command can check."""

import re
import tomllib
from math import prod
from pathlib import Path

import pytest

import scalec
from helpers.mistakes import MISTAKES
from scalec.compiler.cli import main
from scalec.compiler.frontend import resolve
from scalec.compiler.ir import SEQUENCE
from scalec.compiler.syntax.limits import MAX_BYTES, MAX_WRITTEN_BYTES, load
from scalec.runtime.comm.store import READS
from scalec.runtime.train.watchdog.limits import EARLY, LEAST
from scalec.testing.audit import audit
from scalec.tools.planner.search import ALIKE
from scalec.tools.planner.sweep import CLIFF

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PROOF, MEMORY, RELIABILITY, PLANNING, INDEX, ARCHITECTURE, COMMANDS = (
    (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    for page in ("proof", "memory", "reliability", "planning", "index", "architecture", "commands")
)
GIB = 2**30
PLANS = sorted((ROOT / "plans").glob("*.scale"))
NUMBERS = {"five": 5, "ten": 10, "sixteen": 16}


def test_the_tutorial_has_as_many_plans_as_readme_says() -> None:
    (said,) = re.findall(r"from one process to five axes in (\w+) plans", README)
    assert NUMBERS[said] == len([*(ROOT / "docs" / "tutorial").glob("[0-9]*.scale")])


def test_as_many_plans_have_experts_as_the_page_says() -> None:
    (said,) = re.findall(r"in `plans/`, the (\w+) with experts", COMMANDS)
    assert NUMBERS[said] == len([path for path in PLANS if resolve(load(path)).choices])


def test_the_plan_of_five_axes_has_as_many_processes_as_the_page_says() -> None:
    (said,) = re.findall(
        r"`plans/tiny_five.scale` has all five\s+axes at once, [^`]* on (\d+) processes", COMMANDS
    )
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


@pytest.mark.parametrize(
    "path", sorted((ROOT / "plans" / "models").glob("*.scale")), ids=lambda path: path.stem
)
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
    (least, most) = re.findall(r"run the proof, ([\d.]+) to (\d+) s of CPU time", COMMANDS)[0]
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8")
    section = results.split("## The proof of each plan of `plans/`, CPU time")[1].split("\n## ")[0]
    seconds = {
        name: float(time)
        for name, time in re.findall(r"^\| (\w+) \| ([\d.]+) \|$", section, re.MULTILINE)
    }
    assert seconds.keys() == {path.stem for path in PLANS}
    assert float(least) == round(min(seconds.values()), 1)
    assert max(seconds.values()) <= float(most)


def get_plan(name: str, *changes: tuple[str, str]) -> scalec.Plan:
    """A plan of `plans/` with some of its words replaced."""
    text = (
        (ROOT / "plans" / f"{name}.scale").read_text("utf-8").replace('"models/', '"scalec:models/')
    )
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return scalec.plan(text)


def get_table(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the table whose first line begins with `heading`, by their first cell."""
    lines = page.partition(f"\n| {heading}")[2].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: cells for name, *cells in rows}


def test_the_state_of_a_rank_under_each_stage_of_zero() -> None:
    """The report of `explain memory` has the rows of the table, but for two that it adds up."""
    table = get_table(MEMORY, "| `zero 0` |")
    for stage in range(4):
        plan = get_plan(
            "llama3_70b",
            ("dp = 128  tp = 4", "dp = 64  tp = 8"),
            ("precision = bf16", "precision = bf16  recompute = full"),
            ("zero 3", f"zero {stage}"),
        )
        report = plan.explain("memory")
        sizes = re.findall(r"^([a-z ]+?)  .*? ([\d.]+) (MiB|GiB)$", report, re.MULTILINE)
        gib = {name: float(size) / (1 if unit == "GiB" else 1024) for name, size, unit in sizes}
        parts = (
            "parameters",
            "masters",
            "gradients",
            "optimizer",
            "unsharded weights",
            "unsharded gradients",
        )
        for name in parts:
            assert table[name][stage] == (f"{gib[name]:.1f}" if name in gib else ""), (name, stage)
        others = gib["saved activations"] + gib["temporaries"]
        assert abs(float(table["saved activations and temporaries"][stage]) - others) <= 0.1
        assert table["total, at peak memory"][stage] == f"{plan.memory.total / GIB:.1f}"


def test_what_auto_recomputes_of_mixtral() -> None:
    section = MEMORY.partition("Mixtral 8x7B as in")[2].partition("More memory never")[0]
    said = re.findall(r"needs ([\d.]+) GiB\s+and ([\d.]+) s", section)
    plans = [
        get_plan("mixtral_8x7b"),
        get_plan("mixtral_8x7b", ("recompute = full", "recompute = auto(memory = 45GiB)")),
    ]
    figures = [
        (f"{plan.memory.needs / GIB:.1f}", f"{plan.time.step.seconds:.2f}")
        for plan in plans
        if plan.time
    ]
    assert said == figures


def test_quoted_tables_of_memory_are_printed() -> None:
    (loads,) = re.findall(r"```\n(rows of a rank's experts.*?)```", MEMORY, re.DOTALL)
    assert loads in get_plan("qwen3_30b_a3b").explain("memory")


def test_the_advice_for_llama_3_405b(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(ROOT / "plans" / "llama3_405b.scale")]) == 0
    printed = re.sub(r"\s+", " ", "".join(capsys.readouterr()))
    (advice,) = re.findall(r"```\n(help: .*?)```", MEMORY, re.DOTALL)
    assert re.sub(r"\s+", " ", advice).strip() in printed
    (reserve,) = re.findall(r"For an H100 in a program with dp and tp it is ([\d.]+) GiB", MEMORY)
    assert f"{reserve} reserve (GiB)" in printed


def test_operations_of_an_h100_for_each_byte_that_it_reads() -> None:
    file = ROOT / "compiler" / "analysis" / "hardware" / "gpus" / "h100_sxm.toml"
    gpu = tomllib.loads(file.read_text("utf-8"))["gpu"]
    (said,) = re.findall(r"an H100 computes (\d+) times as many bf16 operations", MEMORY)
    (repeated,) = re.findall(r"fewer than (\d+) rows", MEMORY)
    assert int(said) == int(repeated) == round(gpu["peak"]["bf16"] / gpu["memory"])


def test_the_largest_plan_has_as_many_ranks_and_layers_as_the_pages_say() -> None:
    program = resolve(load(ROOT / "plans" / "llama3_405b.scale"))
    (layers,) = re.findall(r"compiling (\d+) layers", INDEX)
    (ranks,) = re.findall(r"Llama 3 405B on ([\d,]+) ranks", INDEX)
    assert int(layers) == program.size("layers")
    assert ranks == f"{program.ranks:,}"
    assert f"{ranks} GPUs" in INDEX


def test_the_demo_has_as_many_steps_as_readme_says() -> None:
    (steps,) = re.findall(r"On 2 CPU cores its (\d+) steps", README)
    assert int(steps) == resolve(load(ROOT / "plans" / "tiny_llama.scale")).train.steps


def test_as_many_silent_bugs_are_planted_as_readme_says() -> None:
    ((planted, known),) = re.findall(
        r"can express (\d+) of (\d+) known silent bugs of other frameworks", README
    )
    section = PROOF.partition("## What frameworks got wrong in silence")[2].partition("\n## ")[0]
    rows = [row for cell in re.findall(r"(?m)^\| ([\d, ]+) \|", section) for row in cell.split(",")]
    tests = "".join(
        path.read_text("utf-8") for path in (ROOT / "tests" / "silent_wrongness").glob("test_*.py")
    )
    assert int(known) == len(rows)
    assert int(planted) == len({*re.findall(r"(?m)^def test_row_(\d+)_", tests)})


def test_versions_that_readme_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    makefile, requirements = (
        (ROOT / "Makefile").read_text("utf-8"),
        README.partition("## Requirements")[2],
    )
    (python,) = re.findall(r"Python ([\d.]+) or newer", requirements)
    (torch,) = re.findall(r"torch ([\d.]+) or newer", requirements)
    ((least, last),) = re.findall(r"Triton ([\d.]+) to 3\.(\d+)", requirements)
    assert project["requires-python"] == f">={python}"
    assert f"torch>={torch}" in project["dependencies"]
    assert project["optional-dependencies"]["kernels"] == [f"triton>={least},<3.{int(last) + 1}"]
    ((torch, triton),) = re.findall(r"installs torch ([\d.]+) with Triton ([\d.]+)", requirements)
    assert f"torch=={torch} triton=={triton}" in makefile


def test_limits_of_steps_and_looks_at_the_store() -> None:
    (least, early) = re.findall(
        r"and at least (\d+) s\.\nThe limit is at least (\d+) s", RELIABILITY
    )[0]
    assert (int(least), int(early)) == (LEAST, EARLY)
    (reads,) = re.findall(r"has at most ([\d,]+) reads", RELIABILITY)
    ((ranks, seconds),) = re.findall(r"([\d,]+) ranks look every (\d+) s", RELIABILITY)
    assert int(reads.replace(",", "")) == READS
    assert int(seconds) == round(int(ranks.replace(",", "")) / READS)


def test_what_looks_for_silent_corruption_take() -> None:
    (said,) = re.findall(r"`spikes` takes ([\d.]+)% longer", RELIABILITY.replace("\n", " "))
    watch = "watch { copies every 100  replay every 1000  skips = 3  spikes = skip(10) }\ntrain {"
    (part,) = re.findall(
        r"^ +([\d.]+)%$", get_plan("llama3_8b", ("train {", watch)).explain("time"), re.MULTILINE
    )
    assert float(part) == float(said)


def test_what_the_planner_takes_for_as_fast_and_for_a_cliff() -> None:
    (alike,) = re.findall(r"Plans within (\d+)% of the first are `as fast`", PLANNING)
    (cliff,) = re.findall(r"where a GPU does\n(\d+)% less than at the point before", PLANNING)
    assert (int(alike), int(cliff)) == (round(100 * ALIKE), round(100 * CLIFF))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["tiny_llama", pytest.param("tiny_pipeline", marks=pytest.mark.long)]
)
def test_the_mutants_of_a_plan_are_as_many_as_the_table_says(name: str) -> None:
    row = get_table(PROOF, "program | killed |")[f"`plans/{name}.scale`"]
    plan = get_plan(name)
    table = "\n".join(audit(plan.program, resolve(load(ROOT / "plans" / f"{name}.scale"))).lines())
    (counts,) = re.findall(r"^all +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", table, re.MULTILINE)
    total, *others = (f"{int(count):,}" for count in counts)
    assert row[:5] == [f"{total} of {total}", *others]


def test_the_size_of_texts_and_the_mistakes_of_the_plan_with_all() -> None:
    ((written, plan),) = re.findall(
        r"be as long as (\d+) MiB, .* \(a plan: (\d+) KiB\)", ARCHITECTURE
    )
    assert (int(written) * 2**20, int(plan) * 2**10) == (MAX_WRITTEN_BYTES, MAX_BYTES)
    assert "has over a hundred mistakes\nin one plan" in ARCHITECTURE
    assert len(MISTAKES) > 100
