"""`scalec calibrate --fit`: figures that were changed are found, a line that differs by itself
is none, mistakes.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve

from scalec.compiler import cli
from scalec.compiler.analysis.hardware import Hardware, hardware
from scalec.compiler.analysis.hardware.description import (
    Attention,
    Collective,
    Measured,
    Moved,
    Product,
)
from scalec.compiler.analysis.time.clocks import StepTime
from scalec.compiler.analysis.time.fit import FIGURES, Fit, fit, slower
from scalec.compiler.analysis.time.profile import KINDS, Profile, Seconds, beside, read_profile
from scalec.compiler.analysis.time.report import report
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.ir import Program
from scalec.compiler.reports.profile import explain_fit
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[3] / "plans"

RECORDED = {
    "": {"idle": 0.001},
    "train.py:90": {"compute": 0.002},
    "llama.scale:28": {"compute": 0.030, "exposed": 0.010},
    "llama.scale:22": {"compute": 0.004, "exposed": 0.020, "idle": 0.001},
}
"""Seconds of a step by line, as a run writes them."""


@cache
def _compiled(plan: str) -> tuple[Program, Hardware]:
    program = compile_plan(
        Source(str(PLANS / "fitted.scale"), f'use "{plan}.scale"\ncluster {{ gpu = h100_sxm }}\n')
    )
    on = hardware(program)
    assert on
    return program, on


def _as_profile(time: StepTime, times: Mapping[str, float] | None = None) -> Profile:
    """A profile as if steps took what is predicted, some lines so many times as long."""
    none: Seconds = dict.fromkeys(KINDS, 0.0)
    named = dict.fromkeys((line for _, line in time.spent), none)
    blank = Profile("cuda", 3, (0,), named)
    lines = {it.name: it.predicted for it in beside(blank, time) if it.name in named}
    longer = {
        name: {kind: each * (times or {}).get(name, 1) for kind, each in it.items()}
        for name, it in lines.items()
    }
    return Profile("cuda", 3, (0,), longer)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("plan", "planted"),
    [
        (
            "llama3_70b",
            {"products": 0.9, "attention": 1.3, "memory-bound ops": 1.25, "links in a node": 1.5},
        ),
        ("llama3_70b", {"products": 1.12}),
        ("llama3_405b", {"links between nodes": 1.6, "products": 1.1}),
        ("tiny_llama", {"issuing an op": 1.4}),
        ("tiny_pipeline", {"shortest kernels": 2.0, "issuing a collective": 1.5}),
    ],
)
def test_figures_that_steps_were_planted_with_are_found(
    plan: str, planted: Mapping[str, float]
) -> None:
    program, on = _compiled(plan)
    other = on
    for figure in FIGURES:
        other = slower(other, figure, planted.get(figure.name, 1.0))
    found = fit(program, on, _as_profile(step_time(program, other)))
    assert found.changes == pytest.approx(dict(planted), rel=0.03)


def test_a_line_that_differs_by_itself_moves_no_figure() -> None:
    program, on = _compiled("llama3_70b")
    found = fit(program, on, _as_profile(step_time(program, on), {"llama.scale:22": 1.5}))
    assert not found.changes
    assert found.on == on


def test_a_step_as_predicted_needs_no_other_figure() -> None:
    program, on = _compiled("tiny_llama")
    assert not fit(program, on, _as_profile(step_time(program, on))).changes


def test_measured_seconds_are_longer_too() -> None:
    rows = Measured(
        products=(Product("bf16", 8, 8, 8, 1, 1.0),),
        attention=(Attention("a", 8, 8, 4.0, 2.0),),
        moved=(Moved("add", 8, 1.0),),
        collectives=(
            Collective("all_reduce", 2, 1, 8, 1.0),
            Collective("all_reduce", 2, 2, 8, 1.0),
        ),
    )
    on = evolve(_compiled("tiny_llama")[1], measured=rows)
    products, attention, moved, near, far = (
        slower(on, FIGURES[at], 2.0).measured for at in (0, 1, 2, 4, 5)
    )
    assert products == evolve(rows, products=(Product("bf16", 8, 8, 8, 1, 2.0),))
    assert attention == evolve(rows, attention=(Attention("a", 8, 8, 2.0, 1.0),))
    assert moved == evolve(rows, moved=(Moved("add", 8, 2.0),))
    assert [[it.seconds for it in each.collectives] for each in (near, far)] == [
        [2.0, 1.0],
        [1.0, 2.0],
    ]


def _folder(folder: Path, lines: Mapping[str, Mapping[str, float]], device: str = "cuda") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rank00000-lines.json").write_text(
        json.dumps({"device": device, "steps": 3, "lines": lines})
    )
    return folder


def _fitted(tmp_path: Path, folder: Path, plan: str, *more: str) -> int:
    path = tmp_path / "p.scale"
    path.write_text(f'use "{PLANS / plan}.scale"\ncluster {{ gpu = h100_sxm }}\n')
    return cli.main(["calibrate", str(path), *more, "--fit", str(folder)])


@pytest.mark.long
def test_a_person_is_told_which_ops_and_figures_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, on = _compiled("llama3_70b")
    slow = slower(on, FIGURES[0], 1.12)
    folder = _folder(tmp_path / "p", _as_profile(step_time(program, slow)).lines)
    assert _fitted(tmp_path, folder, "llama3_70b") == 0
    out = capsys.readouterr().out.splitlines()
    profile = read_profile(folder)
    assert profile
    assert out[0].startswith(f"3 steps of 1 rank on cuda: {profile.seconds:.2f} s")
    lines = [line for line in out[4:] if line.startswith("llama.scale:")]
    assert lines[0].split()[0] == "llama.scale:28"
    assert lines[0].split()[-2:] == ["+1.71", "s"]
    after = out[out.index(lines[0]) + 1 : out.index(lines[1])]
    assert all(line.startswith("  ") for line in after)
    assert any(line.startswith("  contracts _y.3, forward ") for line in after)
    assert any(
        line.startswith("  coerce m.1, forward ") and line.rstrip().endswith(")") for line in after
    )
    (row,) = [line.split() for line in out if line.startswith("products ")]
    # though longer products hide more of what is sent beside them
    assert row[1:3] == ["+12%", "[gpu]"]
    assert row[7:9] == ["0.67,", "fp8"]
    (head,) = [line for line in out if line.startswith("slower or faster ")]
    assert head.split("  ")[-1].strip() == "would explain it"
    assert "  data sheets  " in head
    assert "with that, lines differ by " in out[-1]


def test_of_measured_seconds_a_person_is_told_the_times() -> None:
    program, on = _compiled("tiny_llama")
    on = evolve(on, measured=Measured(products=(Product("bf16", 8, 8, 8, 1, 1e-5),)))
    profile = _as_profile(step_time(program, on))
    lines = tuple(beside(profile, step_time(program, on)))
    text = explain_fit(profile, lines, report(program, on), Fit(on, {"products": 1.5}, lines))
    (row,) = [line for line in text.splitlines() if line.startswith("products ")]
    assert re.split("  +", row) == [
        "products",
        "+50%",
        "[[product]] seconds",
        "as measured",
        "1.5 times that",
    ]


def test_a_recorded_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of steps that take many times the prediction."""
    assert _fitted(tmp_path, _folder(tmp_path / "p", RECORDED), "tiny_llama") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "3 steps of 1 rank on cuda: 68.0 ms a step"
    differ = [line for line in out[4:] if line.startswith(("llama.scale:", "elsewhere"))]
    assert [line.split()[0] for line in differ] == ["llama.scale:28", "llama.scale:22", "elsewhere"]
    assert differ[0].split()[-1] == "ms"


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "p"
    assert _fitted(tmp_path, folder, "tiny_llama") == 2
    assert "has no profile: train with SCALEC_PROFILE=" in capsys.readouterr().err
    assert (
        _fitted(tmp_path, _folder(folder, {"other.scale:3": {"compute": 1.0}}), "tiny_llama") == 2
    )
    assert "is of another plan: this one has no line other.scale:3" in capsys.readouterr().err
    assert _fitted(tmp_path, _folder(folder, RECORDED, "cpu"), "tiny_llama") == 2
    assert "has steps on cpu, but the plan is for h100_sxm, on cuda" in capsys.readouterr().err
    assert (
        _fitted(tmp_path, _folder(folder, RECORDED), "tiny_llama", str(PLANS / "llama3_70b.scale"))
        == 2
    )
    assert "--fit takes one plan" in capsys.readouterr().err
    assert _fitted(tmp_path, _folder(folder, RECORDED), "tiny_llama", "-o", "mine.toml") == 2
    assert "leave out --output" in capsys.readouterr().err
