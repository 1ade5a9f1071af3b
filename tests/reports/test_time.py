"""`scalec explain time`: its text, its options, and what can be wrong with them."""

import csv
import json
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from helpers.timed_plans import WASTEFUL
from scalec.compiler.analysis.hardware import Hardware
from scalec.compiler.analysis.memory import account
from scalec.compiler.analysis.time.clocks import StepTime, nothing
from scalec.compiler.analysis.time.op_rows import OpRow
from scalec.compiler.analysis.time.report import Neighbour, Report, Room
from scalec.compiler.cli import main
from scalec.compiler.reports.time import time
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[2] / "plans"
LLAMA = str(PLANS / "llama3_70b.scale")


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a command prints with `--json`."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "explain", "time", LLAMA)
    kinds, lines = found["kinds"], found["lines"]
    assert sum(kinds.values()) == pytest.approx(found["seconds"])
    for kind, seconds in kinds.items():
        assert sum(row["seconds"] for row in lines if row["kind"] == kind) == pytest.approx(seconds)


@pytest.mark.parametrize("plan", ["gpt2_124m", "mixtral_8x7b"])
def test_rows_add_up(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To the step and to 100%, as far as they are rounded."""
    main(["explain", "time", "--no-advice", str(PLANS / f"{plan}.scale")])
    _, summary, table, *_ = capsys.readouterr().out.split("\n\n")
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    found = [
        re.match(r"(.+?)  +(?:([\d.]+) (s|ms|µs)|0)  +(\d+)%", row)
        for row in table.splitlines()[1:]
    ]
    assert all(found)
    rows = [row.groups() for row in found if row]
    step, unit, *_ = summary.split()
    assert sum(float(size) * units[of] for _, size, of, _ in rows if size) == pytest.approx(
        float(step) * units[unit], rel=5e-3
    )
    assert sum(int(share) for *_, share in rows) == pytest.approx(100, abs=len(rows) / 2)


def test_deterministic_kernels_are_told_to_be_priced_as_others_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = dict[str, bool]()
    for watch in ("", "watch { replay every 1000 }"):
        text = (PLANS / "gpt2_124m.scale").read_text().replace("models/", f"{PLANS}/models/")
        (tmp_path / "plan.scale").write_text(text + watch)
        main(["explain", "time", "--no-advice", str(tmp_path / "plan.scale")])
        said[watch] = (
            "not in it: by how much deterministic kernels are slower" in capsys.readouterr().out
        )
    assert said == {"": False, "watch { replay every 1000 }": True}


GIB = 2**30
FAST = Hardware("h100_sxm", {"bf16": 1e15}, 3e12, 132, {"bf16": 0.7}, 0.4, 4e11, 4e11)

TABLES: dict[
    str, tuple[str, int, dict[tuple[str, str], float], dict[tuple[str, ...], float], Hardware]
] = {
    "one_gpu": (
        'use "gpt2_124m.scale" { mesh { dp = 1  tp = 1 }  cluster { gpus_per_node = 1 } }',
        30,
        {
            ("products", "gpt2.scale:21"): 0.2,
            ("products", "gpt2.scale:23"): 0.1,
            ("host", "gpt2.scale:21"): 0.35,
        }
        | {("memory-bound", "gpt2.scale:20"): 0.01, ("update", "gpt2.scale:5"): 1e-5},
        {},
        FAST,
    ),
    "zero_3": (
        'use "llama3_70b.scale" { mesh { dp = 64  tp = 8 }  train { recompute = full } }',
        75,
        {
            ("products", f"llama.scale:{line}"): seconds
            for line, seconds in ((28, 20.0), (22, 3.0), (25, 2.5), (6, 1))
        }
        | {("attention", "llama.scale:25"): 5.0, ("exposed: tp", "llama.scale:28"): 4.0}
        | {
            ("exposed: dp", "llama.scale:6"): 0.03,
            ("exposed: tp", "plan.scale:2"): 1.0,
            ("update", "x.scale:1"): 5e-4,
        },
        {("tp",): 8.0, ("dp",): 1.5},
        evolve(FAST, source="my_cluster.toml", error=0.05),
    ),
    "pipeline": (
        'use "mixtral_8x7b.scale"',
        90,
        {("bubble", "mixtral_8x7b.scale:7"): 3.0, ("products", "mixtral.scale:29"): 2.0}
        | {("exposed: ep", "mixtral.scale:28"): 0.5, ("attention", "mixtral.scale:25"): 0.25},
        {("ep",): 0.75, ("pp",): 0.1},
        FAST,
    ),
}
"""For each golden file a plan, the GiB that a rank needs, seconds as they are spent, seconds of
links, hardware.
"""


def report(name: str) -> Report:
    """A report of a real plan with times that are easy to follow."""
    plan, needs, spent, sent, on = TABLES[name]
    program = compile_plan(Source(str(PLANS / "plan.scale"), plan))
    ranks = prod(axis.size for axis in program.axes)
    step = StepTime(
        sum(spent.values()), nothing() | spent, nothing() | sent, 1 if program.pipeline else None
    )
    each = {"products": 1.0, "attention": 0.2}
    ops = (
        OpRow(
            "contract",
            "y",
            "a.scale:1",
            "forward",
            "layers",
            40,
            each,
            {},
            0.1,
            6 * 10**14,
            9 * 10**11,
            0,
        ),
        OpRow(
            "coerce",
            "z",
            "a.scale:1",
            "forward",
            "layers",
            40,
            {},
            {("tp",): 1.0},
            0.1,
            0,
            0,
            10**9,
        ),
    )
    room, others = (
        Room(needs * GIB, 80 * GIB),
        [("microbatch = 2", 0.9, 60), ("recompute = none", 0.8, 95)],
    )
    neighbours = tuple(
        Neighbour(
            {"train": content},
            f"train {{ {content} }}",
            step.seconds * part,
            Room(size * GIB, 80 * GIB),
        )
        for content, part, size in others
    )
    needed, loads = (
        0.4e15 * step.seconds,
        {"balanced": step.seconds, "worst": 9.0} if program.choices else {},
    )
    return Report(
        program,
        on,
        step,
        ranks,
        needed,
        round(1.25 * needed),
        1e15,
        room,
        loads,
        ops,
        0.96,
        neighbours,
    )


@pytest.mark.parametrize("name", TABLES)
def test_people_are_told(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"time/{name}.txt", time(report(name)) + "\n")


def test_computation_is_told_beside_communication_by_axes() -> None:
    """31.5 s are computed beside 8 s over tp and 1.5 s over dp; of the pipeline 2.25 s beside
    0.75 s and 0.1 s.
    """
    assert "compute : communication is 3.94 over tp, 21 over dp\n" in time(report("zero_3"))
    assert "compute : communication is 3 over ep, 22.5 over pp\n" in time(report("pipeline"))
    assert "compute : communication" not in time(report("one_gpu"))
    slow = report("pipeline")
    step = evolve(slow.step, sent=nothing() | {("ep",): 4.5})
    told = "is 0.5 over ep (below 1, computation cannot hide all of it)"
    assert told in time(evolve(slow, step=step))


def test_a_host_that_computes_itself_has_no_pace() -> None:
    cpu = report("zero_3")
    assert "issues" in time(cpu)
    assert "issues" not in time(evolve(cpu, on=evolve(cpu.on, synchronous=True)))
    limited = report("one_gpu")
    assert "limited by: the host\n" in time(
        evolve(limited, on=evolve(limited.on, synchronous=True))
    )


def test_ops_as_csv_and_as_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same ops as in JSON, with the same sums."""
    ops, path = (
        as_json(capsys, "explain", "time", "--no-advice", LLAMA)["ops"],
        tmp_path / "ops.csv",
    )
    main(["explain", "time", "--no-advice", LLAMA])
    report = capsys.readouterr().out
    assert main(["explain", "time", "--no-advice", "--csv", str(path), LLAMA]) == 0
    assert capsys.readouterr() == (report, f"wrote {path}\n")
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["value"] for row in rows] == [op["name"] for op in ops]
    assert sum(float(row["products_s"]) for row in rows) == pytest.approx(
        sum(op["computes"].get("products", 0) for op in ops)
    )
    main(["explain", "time", "--lines", "--csv", str(path), LLAMA])  # replaces its own
    path.write_text("mine")
    assert main(["explain", "time", "--lines", "--csv", str(path), LLAMA]) == 2
    capsys.readouterr()
    main(["explain", "time", "--lines", LLAMA])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["op", "value", "line", "where"]
    assert sorted(line.split()[1] for line in lines) == sorted(op["name"] for op in ops)


def test_forms_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "time", LLAMA, "--json", "--lines"]) == 2
    assert "--json and --lines exclude each other" in capsys.readouterr().err


def test_measured_figures_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All products of a size that is measured; the others, and all else, by formulas."""
    shape = 'dtype = "bf16"\nm = 8192\nn = 8192\nk = 8192\nbatch = 1\nseconds = 1e-3\n'
    (tmp_path / "mine.toml").write_text(
        f'[cluster]\ngpu = "h100_sxm"\nerror = 0.04\n[[product]]\n{shape}'
    )
    plan = tmp_path / "plan.scale"
    plan.write_text(f'use "{LLAMA}" {{ cluster {{ hardware = "mine.toml" }} }}')
    assert 0 < as_json(capsys, "explain", "time", str(plan), "--no-advice")["measured"] < 1
    main(["explain", "time", str(plan), "--no-advice"])
    assert "by mine.toml: expect 4% (" in capsys.readouterr().out
    assert as_json(capsys, "explain", "time", LLAMA, "--no-advice")["measured"] == 0


@pytest.mark.parametrize("option", ["--json", "--lines", "--no-advice"])
@pytest.mark.parametrize("words", [("memory", LLAMA), ("collectives", LLAMA), ("E0510",)])
def test_options_of_time_go_with_time(
    words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words, option]) == 2
    assert f"`{option}` goes with `scalec explain time`" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", ["gpt2_124m", "mixtral_8x7b"])
def test_neighbours_are_as_their_own_report_says(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = PLANS / f"{plan}.scale"
    found = as_json(capsys, "explain", "time", str(path))
    assert found["neighbours"]
    for each in found["neighbours"]:
        changed = tmp_path / "changed.scale"
        sections = " ".join(
            f"{section} {{ {content} }}" for section, content in each["changes"].items()
        )
        changed.write_text(f'use "{path}" {{ {sections} }}')
        own = as_json(capsys, "explain", "time", "--no-advice", str(changed))
        assert own["seconds"] == each["seconds"]
        assert own["memory"] == each["memory"]
        assert 1 - own["seconds"] / found["seconds"] == pytest.approx(each["gain"])


def wasteful(folder: Path, more: str = "") -> str:
    """The path of a plan that one can advise much on."""
    plan = folder / "plan.scale"
    plan.write_text(f'use "{LLAMA}" {{ {WASTEFUL} {more} }}')
    return str(plan)


@pytest.mark.long
def test_faster_plans_are_named_with_their_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = wasteful(tmp_path)
    assert main(["explain", "time", slow]) == 0
    shown = capsys.readouterr().out
    _, fits, large, _ = shown.rsplit("\n\n", 3)
    assert fits.startswith("would help")
    assert "train { microbatch = 2 }" in fits
    assert "train { recompute = none } with state { zero 2 over dp }" in fits
    assert large.startswith("too large")
    assert "train { recompute = none }" in large
    assert "GiB too many" in large
    main(["explain", "time", "--no-advice", slow])
    assert capsys.readouterr().out == shown.replace(f"\n\n{fits}\n\n{large}", "")


def test_a_plan_that_does_not_fit_is_told_which_do(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "time", str(PLANS / "llama3_405b.scale")])
    shown = capsys.readouterr().out
    assert "does not fit: a rank needs" in shown
    assert "no plan with one setting changed fits; `scalec check`" in shown


def test_memory_that_is_close_to_full_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["explain", "time", "--no-advice", wasteful(tmp_path, "cluster { memory = 60GiB }")])
    assert "close to full: time cannot be told; a rank needs" in capsys.readouterr().out


def test_memory_of_which_a_part_of_the_range_fits_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With little less than the likely need, which `explain memory` prints."""
    compiled = compile_plan(load(PLANS / "llama3_70b.scale"))
    needs = account(compiled).needs
    plan = tmp_path / "plan.scale"
    plan.write_text(f'use "{LLAMA}" {{ cluster {{ memory = {needs - 2**20}B }} }}')
    main(["explain", "time", "--no-advice", str(plan)])
    assert "may not fit: a rank needs" in capsys.readouterr().out
